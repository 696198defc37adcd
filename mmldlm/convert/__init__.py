"""From any checkpoint to any other."""
