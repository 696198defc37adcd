"""`python -m mmldlm`: the same as `mmldlm`."""

from __future__ import annotations

import sys

from mmldlm.cli import console_main

if __name__ == "__main__":
    sys.exit(console_main())
