"""The checks: one short function each, found by reading this folder (result.all_checks). New file, new checks."""
