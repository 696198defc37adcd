"""The command line: one file per verb, with all of its argument parsing."""
