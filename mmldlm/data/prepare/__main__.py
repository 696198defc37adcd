"""`python -m mmldlm.data.prepare`, for torchrun: one rank of `mmldlm prepare`."""

from __future__ import annotations

import sys

from mmldlm.cli import main
from mmldlm.errors import UserError
from mmldlm.utils.environment import check_platform_variables

if __name__ == "__main__":
    try:
        check_platform_variables()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(main(["prepare", *sys.argv[1:]]))
