"""Print the variables received from the launcher whose names begin with one of the arguments,
after MARK; started by its path instead of train.py.

Imports nothing of mmldlm: only the launcher is tested, not the files on the node (PY002, VER002).
"""

from __future__ import annotations

import json
import os
import socket
import sys

MARK = "@environment "

if __name__ == "__main__":
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    rank = next((os.environ[name] for name in names if name in os.environ), None)
    prefixes = tuple(sys.argv[1:])
    variables = {name: text for name, text in os.environ.items() if name.startswith(prefixes)}
    report = {"hostname": socket.gethostname(), "rank": rank, "variables": variables}
    # One short write, so that lines of other ranks do not interleave: mpirun passes on 4 KiB at a
    # time, which a whole environment often exceeds.
    sys.stdout.write(f"{MARK}{json.dumps(report)}\n")
