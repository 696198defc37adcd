"""Run a script with words of any text: `python decoded.py BASE64`, where BASE64 is of a JSON list [SCRIPT, WORD...].

For launchers that paste their words into a line of a shell.
"""

from __future__ import annotations

import base64
import json
import os
import sys

if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, "-u", *json.loads(base64.urlsafe_b64decode(sys.argv[1]))])
