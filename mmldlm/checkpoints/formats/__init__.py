"""Checkpoint formats behind one registry."""
