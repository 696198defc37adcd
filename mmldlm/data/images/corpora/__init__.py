"""Corpora of images with captions."""
