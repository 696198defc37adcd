"""One file per family of metrics."""
