"""`python -m mmldlm.preflight`: the same as `mmldlm preflight`."""

from __future__ import annotations

import sys

from mmldlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["preflight", *sys.argv[1:]]))
