"""Config of the image_codes task."""

CODE_SAMPLERS = ("confidence", "margin", "entropy", "ancestral")
"""Samplers of images, the default first."""
CODE_STEPS = 12
"""Default number of passes of an image (Show-o, arXiv 2408.12528, has as many)."""
