"""Measure finished models: the gain of conditioning, retrieval, images and captions, STS."""
