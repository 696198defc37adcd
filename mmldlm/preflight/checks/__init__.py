"""The checks: one file per subject, with its probe and one short function per check."""
