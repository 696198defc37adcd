"""Evaluation: during training (validation) and of a finished model (conditioning gain,
retrieval).
"""
