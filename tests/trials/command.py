"""The `mmldlm` command as a script, for the process that forks commands
(tests/support/rank_server.py).

It leaves without the interpreter's teardown: freeing all that the fork inherited takes seconds.
"""

import atexit
import os
import sys
import traceback

from mmldlm.cli import console_main


def leave(code: int) -> None:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        console_main()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        leave(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        traceback.print_exc()
        leave(1)
