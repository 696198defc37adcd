"""`python -m mmldlm.data.prepare`, for torchrun: one rank of `mmldlm prepare`."""

from __future__ import annotations

import sys

from mmldlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["prepare", *sys.argv[1:]]))
