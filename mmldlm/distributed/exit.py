"""How a rank leaves: the process group, and the process itself."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

EXIT_HOOK_SECONDS = 30.0


def leave_process_group() -> None:
    """Destroy the process group after success; after an error this would block on ranks that have
    exited.
    """
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def exit_without_teardown(code: int) -> NoReturn:
    """Exit without tearing down the interpreter.

    The results are on the disk by then, and native threads of gloo and ZeRO-3 now and then abort
    in the teardown (seen: exit -6 of a finished run).
    """
    if (
        code == 0 and "mpi4py.MPI" in sys.modules
    ):  # mpirun takes a rank that exits without it for a failed one
        sys.modules["mpi4py.MPI"].Finalize()
    # A library's hook may wait for ever, as a tracker's for a server that is gone.
    hooks = threading.Thread(target=atexit._run_exitfuncs, name="exit-hooks", daemon=True)
    hooks.start()
    hooks.join(EXIT_HOOK_SECONDS)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
