"""The checks: one short function per check, one module per subject."""

# Order of the checks of one level, in reports and in docs/preflight.md.
MODULES = (
    "consistency",
    "dry_run",
    "hardware",
    "launchers",
    "config",
    "memory",
    "resume",
    "network",
    "ssh_access",
)
