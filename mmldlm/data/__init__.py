"""Data: corpora, encoders, the packed store, the batch plan and collation."""

BASIS, CODEBOOK = "pca_basis.npy", "codebook.npy"
CODEC_FILES = (BASIS, CODEBOOK)
"""Files of an image codec that belong to a model, next to its config.json."""
