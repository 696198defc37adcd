"""Run a script with arbitrary arguments: `python run_decoded.py BASE64` of the JSON list [SCRIPT, ARG, ...].

For launchers that paste their arguments into a shell line.
"""

from __future__ import annotations

import base64
import json
import os
import sys

if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, "-u", *json.loads(base64.urlsafe_b64decode(sys.argv[1]))])
