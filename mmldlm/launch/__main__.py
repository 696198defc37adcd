"""python -m mmldlm.launch: the same as `mmldlm launch`."""

from __future__ import annotations

import argparse
import sys

from mmldlm.errors import MmldlmError
from mmldlm.launch.launcher import add_arguments, main
from mmldlm.utils.standard_streams import open_standard_streams


def run() -> int:
    open_standard_streams()
    parser = argparse.ArgumentParser(prog="mmldlm launch", description="Preflight, then the launcher, then a watcher.")
    add_arguments(parser)
    try:
        return main(parser.parse_intermixed_args())
    except MmldlmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(run())
