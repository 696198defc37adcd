"""Files of torch.save, read and written without torch and without executing anything."""
