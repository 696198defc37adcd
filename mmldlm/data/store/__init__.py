"""The packed store: reading, writing, verifying."""
