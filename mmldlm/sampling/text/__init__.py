"""Text samplers."""
