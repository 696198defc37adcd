"""Debugging tools: replay of a skipped step, NaN tracing, sanity checks."""
