"""Reading and writing large files: threads, checksums, durable output."""
