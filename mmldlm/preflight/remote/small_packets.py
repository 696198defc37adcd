"""Test whether a login that hangs succeeds with small packets: then a device on the path drops
large ones (MTU).

Also the ProxyCommand of ssh for that test, run by its path: `python small_packets.py HOST PORT`.
"""

from __future__ import annotations

import os
import select
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable

SEGMENT = 500  # bytes; every IPv4 path accepts them
CONNECT_SECONDS = 3.0


def login_works(ssh: Iterable[str]) -> bool:
    """Return whether a login succeeds if no packet of either direction carries more than SEGMENT
    bytes.

    A jump host of the user's configuration is bypassed; the result is then False if only the jump
    host is reachable.

    Args:
        ssh: command line of ssh that ends with the host name.
    """
    *options, name = ssh
    path = shlex.join([sys.executable, os.path.abspath(__file__)]).replace("%", "%%")
    command = [*options, "-o", f"ProxyCommand={path} %h %p", name, "true"]
    try:
        return (
            subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=12
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def relay(host: str, port: int) -> None:
    """Copy stdin to a connection with small segments, and the connection to stdout, until either
    ends.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT
        )  # announced to the peer too
        connection.settimeout(CONNECT_SECONDS)
        connection.connect((host, port))
        connection.settimeout(None)
        while True:
            ready = select.select([0, connection], [], [])[0]
            data = os.read(0, 1 << 16) if 0 in ready else connection.recv(1 << 16)
            if not data:
                return
            if 0 in ready:
                connection.sendall(data)
            else:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()


if __name__ == "__main__":
    relay(sys.argv[1], int(sys.argv[2]))
