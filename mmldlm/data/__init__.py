"""Data: corpora, encoders, the packed store, the batch plan and collation."""
