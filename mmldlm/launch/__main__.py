"""`python -m mmldlm.launch`: the same as `mmldlm launch`."""

from __future__ import annotations

import sys

from mmldlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
