"""python -m mmldlm.preflight: the same as `mmldlm preflight`."""

from __future__ import annotations

import argparse
import sys

from mmldlm.errors import MmldlmError
from mmldlm.preflight.runner import add_arguments, main
from mmldlm.utils.standard_streams import open_standard_streams


def run() -> int:
    open_standard_streams()
    parser = argparse.ArgumentParser(prog="mmldlm preflight", description="Will this run start, fit and finish?")
    add_arguments(parser)
    try:
        return main(parser.parse_intermixed_args())
    except MmldlmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(run())
