"""mmldlm: one MMDiT that translates between text and sentence embeddings, trained at scale."""

__version__ = "0.1.0"
