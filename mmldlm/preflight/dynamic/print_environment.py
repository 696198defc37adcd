"""Started by a launcher in place of train.py: prints which variables arrived here, behind MARK. Run by its path.

Imports nothing of mmldlm: what is asked is what the launcher brings, not what lies here (PY002, VER002).
"""

from __future__ import annotations

import json
import os
import socket
import sys

MARK = "@arrived "

if __name__ == "__main__":
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    rank = next((os.environ[name] for name in names if name in os.environ), None)
    found = {"hostname": socket.gethostname(), "rank": rank, "environment": dict(os.environ)}
    sys.stdout.write(f"{MARK}{json.dumps(found)}\n")  # in one write, so that no other rank's line comes between
