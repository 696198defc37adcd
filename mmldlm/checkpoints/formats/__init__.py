"""Checkpoint formats, one folder per format, behind one registry."""
