"""Where text comes from: files, hub datasets, docstrings."""
