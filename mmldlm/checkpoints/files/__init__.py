"""Bytes of checkpoint files: dtypes, descriptors, checksums, torch.save; without torch."""
