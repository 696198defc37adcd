"""TCP connections between nodes: listening sockets, measured exchanges, small packets.

Run as a module it is the ProxyCommand of ssh for such logins: HOST PORT.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import shlex
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from mmldlm.utils import run_module
from mmldlm.utils.formatting import describe_os_error
from mmldlm.utils.network import port_owner

# In bytes; every IPv4 path accepts them.
SEGMENT = 500
CONNECT_SECONDS = 3.0
EXCHANGE_SECONDS = 6.0
_THREADS = 64
# Bytes per direction of a connection: enough segments to detect one percent loss, few enough for a
# thousand nodes.
EXCHANGE_MAX, EXCHANGE_MIN, EXCHANGE_TOTAL = 256 << 10, 16 << 10, 64 << 20
_RTT, _TOTAL_RETRANS, _SEGS_OUT, _MIN_RTT, _DSACK_DUPS = 68, 100, 136, 148, 216
_listening: list[socket.socket] = []


def listen(args: dict) -> dict:
    """Open listening sockets on args["ports"] (0: any free port), kept until `close`.

    Returns:
        {"ports": [{"port"}, or with "error" and more of `describe_unusable_port`]}.
    """
    listeners = []
    for port in args["ports"]:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # As torch's store does: a port in TIME_WAIT after the last run is free.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen(4096)
        except OSError as error:
            server.close()
            listeners.append({"port": port, **describe_unusable_port(port, error)})
            continue
        _listening.append(server)
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        listeners.append({"port": server.getsockname()[1]})
    return {"ports": listeners}


def describe_unusable_port(port: int, error: OSError) -> dict:
    """Return the "error" of a port that cannot be bound, and the "holder" of one in use."""
    in_use = error.errno == errno.EADDRINUSE
    holder = {"holder": port_owner(port)} if in_use else {}
    return {"error": describe_os_error(error), **holder}


def close(args: dict) -> None:
    """Close all listening sockets."""
    while _listening:
        server = _listening.pop()
        with contextlib.suppress(OSError):
            # Wakes the accepting thread.
            server.shutdown(socket.SHUT_RDWR)
        server.close()


def _accept(server: socket.socket) -> None:
    with ThreadPoolExecutor(64) as executor:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                # The server was closed.
                return
            executor.submit(_answer, connection)


def _answer(connection: socket.socket) -> None:
    """Read the number of bytes that the first four bytes announce, and send as many back."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(2 * EXCHANGE_SECONDS)
        (size,) = struct.unpack("!I", _read(connection, 4))
        _read(connection, size)
        connection.sendall(bytes(size))


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 1 << 16))
        if not chunk:
            raise ConnectionError("closed by the peer")
        data += chunk
    return data


def connect_seconds(num_targets: int) -> float:
    """Return the time limit of `connect`, should every target let it wait."""
    longest = 2 * (CONNECT_SECONDS + EXCHANGE_SECONDS)  # a second attempt with small packets
    return 40 + longest * math.ceil(num_targets / _THREADS)


def connect(args: dict) -> list[dict]:
    """Exchange data with each (address, port) of args["to"], where an agent listens.

    Returns:
        per target {"ms": shortest round trip, "segments": sent, "retransmitted"}, or {"error"}. If
        the connection succeeded but the exchange did not, also {"stalled": True, "small_pass":
        whether small packets pass}.
    """
    size = max(min(EXCHANGE_MAX, EXCHANGE_TOTAL // max(len(args["to"]), 1)), EXCHANGE_MIN)
    with ThreadPoolExecutor(_THREADS) as executor:
        return list(executor.map(lambda target: _attempt(target[0], target[1], size), args["to"]))


def _attempt(address: str, port: int, size: int) -> dict:
    try:
        connection = _connection(address, port)
    except OSError as error:
        return {"error": describe_os_error(error)}
    with connection:
        try:
            _exchange(connection, size)
            return _measure(connection)
        except OSError as error:
            reason = describe_os_error(error)
    try:
        with _connection(address, port, SEGMENT) as connection:
            _exchange(connection, EXCHANGE_MIN)
            small_pass = True
    except OSError:
        small_pass = False
    return {
        "error": f"connected, but no data passes: {reason}",
        "stalled": True,
        "small_pass": small_pass,
    }


def _connection(address: str, port: int, segment: int | None = None) -> socket.socket:
    """Open a connection; `segment` limits the packets of both directions (bytes of payload)."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if segment is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        connection.settimeout(CONNECT_SECONDS)
        connection.connect((address, port))
    except OSError:
        connection.close()
        raise
    return connection


def _exchange(connection: socket.socket, size: int) -> None:
    connection.settimeout(EXCHANGE_SECONDS)
    started = time.monotonic()
    connection.sendall(struct.pack("!I", size) + bytes(size))
    connection.settimeout(max(EXCHANGE_SECONDS - (time.monotonic() - started), 0.1))
    _read(connection, size)


def _measure(connection: socket.socket) -> dict:
    """Return round trip and losses from the kernel's tcp_info, which the load of the node does not
    distort.

    Offsets: struct tcp_info of linux/tcp.h.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)

    def field(offset: int) -> int:
        # A kernel that is too old has no such field.
        return struct.unpack_from("I", info, offset)[0] if len(info) >= offset + 4 else 0

    # Duplicates (tcpi_dsack_dups) were late, not lost.
    lost = max(field(_TOTAL_RETRANS) - field(_DSACK_DUPS), 0)
    microseconds = field(_MIN_RTT) or field(_RTT)
    return {"ms": microseconds / 1000, "segments": field(_SEGS_OUT), "retransmitted": lost}


def login_works(ssh: Iterable[str]) -> bool:
    """Return whether a login succeeds if no packet of either direction carries more than SEGMENT
    bytes.

    A jump host of the user's configuration is bypassed; the result is then False if only the jump
    host is reachable.

    Args:
        ssh: Command line of ssh that ends with the host name.
    """
    *options, name = ssh
    path = shlex.join([sys.executable, run_module.__file__, "mmldlm.cluster.connections"]).replace(
        "%", "%%"
    )
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
        # This size is announced to the peer, too.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
        connection.settimeout(CONNECT_SECONDS)
        connection.connect((host, port))
        connection.settimeout(None)
        inputs: list[int | socket.socket] = [0, connection]
        while True:
            ready = select.select(inputs, [], [])[0]
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
