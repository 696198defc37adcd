"""Low-level file access: descriptors, one output file, checksums of ranges, threads."""
