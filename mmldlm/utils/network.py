"""Small network helpers; standard library only. As a script: print a free port."""

from __future__ import annotations

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that was free on `host` a moment ago ("" for all interfaces)."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    print(free_port())
