"""Where texts and images come from: files, lists, hub datasets, docstrings, and drawings."""
