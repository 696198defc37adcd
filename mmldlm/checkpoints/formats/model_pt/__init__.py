"""model.pt and optimizer.pt."""
