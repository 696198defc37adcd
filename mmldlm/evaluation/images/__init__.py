"""Evaluation of models of images and captions."""
