"""Run a script with arbitrary arguments: `python run_decoded.py BASE64` of the JSON list [SCRIPT,
ARG, ...].

For launchers that paste their arguments into a shell line. `python run_decoded.py --encode SCRIPT
ARG...` prints the words to give to such a launcher, one per line: those given, if no shell would
change them, else this script and BASE64.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys

# Characters that no shell changes, nor pdsh, which expands %h, %n and %u.
PLAIN = re.compile(r"[\w@+=:,./-]*", re.ASCII)


def encode(words: list[str]) -> list[str]:
    """Return the words to give to a launcher that pastes them into a shell line."""
    if all(word and PLAIN.fullmatch(word) for word in words):
        return words
    return [
        os.path.abspath(__file__),
        base64.urlsafe_b64encode(json.dumps(words).encode()).decode(),
    ]


def main(words: list[str]) -> None:
    """Print encoded words, or become the script."""
    if words[0] == "--encode":
        print("\n".join(encode(words[1:])))
    else:
        os.execv(
            sys.executable, [sys.executable, "-u", *json.loads(base64.urlsafe_b64decode(words[0]))]
        )


if __name__ == "__main__":
    main(sys.argv[1:])
