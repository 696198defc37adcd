"""TCP connections from node to node: what an agent opens for the others, and what it measures of its way to them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from mmldlm.preflight.remote.small_packets import SEGMENT

CONNECT_SECONDS = 3.0
EXCHANGE_SECONDS = 6.0
# Bytes to and fro on a connection: enough segments to see a loss of one percent, little enough for a thousand nodes.
EXCHANGE_MOST, EXCHANGE_LEAST, EXCHANGE_ALL = 256 << 10, 16 << 10, 64 << 20
_RTT, _TOTAL_RETRANS, _SEGS_OUT, _MIN_RTT, _DSACK_DUPS = 68, 100, 136, 148, 216
_listening: list[socket.socket] = []


def listen(args: dict) -> dict:
    """Open listening sockets for the others to reach: args["ports"] (0: any), kept until close.

    A port that cannot be had is answered with {"error", "holder"}.
    """
    found = []
    for port in args["ports"]:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # As torch's store binds it: a port in TIME_WAIT from the last run is free.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen(4096)
        except OSError as error:
            server.close()
            found.append({"port": port, "error": error.strerror, "holder": port_owner(port)})
            continue
        _listening.append(server)
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        found.append({"port": server.getsockname()[1]})
    return {"ports": found}


def close(args: dict) -> None:
    """Close all listening sockets."""
    while _listening:
        server = _listening.pop()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        server.close()


def _accept(server: socket.socket) -> None:
    with ThreadPoolExecutor(64) as pool:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # closed
                return
            pool.submit(_answer, connection)


def _answer(connection: socket.socket) -> None:
    """Read as many bytes as the first four say, and send as many back."""
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
            raise ConnectionError("closed by the other side")
        data += chunk
    return data


def connect(args: dict) -> list[dict]:
    """Exchange data with each (address, port) of args["to"], where an agent listens.

    Returns per target {"ms": shortest round trip, "segments", "retransmitted": of what was sent}, or {"error": ...}.
    Where a connection was made and data did not pass, also {"stalled": True, "small_pass": whether small packets do}.
    """
    size = max(min(EXCHANGE_MOST, EXCHANGE_ALL // max(len(args["to"]), 1)), EXCHANGE_LEAST)
    with ThreadPoolExecutor(64) as pool:
        return list(pool.map(lambda target: _attempt(target[0], target[1], size), args["to"]))


def _attempt(address: str, port: int, size: int) -> dict:
    try:
        connection = _connection(address, port)
    except OSError as error:
        return {"error": error.strerror or str(error) or type(error).__name__}
    with connection:
        try:
            _exchange(connection, size)
            return _measured(connection)
        except OSError as error:
            reason = error.strerror or str(error)
    try:
        with _connection(address, port, SEGMENT) as connection:
            _exchange(connection, EXCHANGE_LEAST)
            small_pass = True
    except OSError:
        small_pass = False
    return {"error": f"connected, but no data passes: {reason}", "stalled": True, "small_pass": small_pass}


def _connection(address: str, port: int, segment: int | None = None) -> socket.socket:
    """A connection; `segment` bounds the packets of both directions (bytes of payload)."""
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


def _measured(connection: socket.socket) -> dict:
    """From the kernel, not from a clock of this process: the load of a node must not look like a slow network.

    Offsets: struct tcp_info of linux/tcp.h.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)

    def number(offset: int) -> int:  # 0 where the kernel is too old to know it
        return struct.unpack_from("I", info, offset)[0] if len(info) >= offset + 4 else 0

    # What arrived twice (tcpi_dsack_dups) was late, not lost.
    lost = max(number(_TOTAL_RETRANS) - number(_DSACK_DUPS), 0)
    microseconds = number(_MIN_RTT) or number(_RTT)
    return {"ms": round(microseconds / 1000, 2), "segments": number(_SEGS_OUT), "retransmitted": lost}


def port_owner(port: int) -> dict | None:
    """pid, user and command of who listens on a TCP port here, as far as this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        inodes |= {row[9] for row in rows if int(row[1].rpartition(":")[2], 16) == port and row[3] == "0A"}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and wanted & set(_open_files(entry)):
            with contextlib.suppress(OSError), open(f"/proc/{entry}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
                return {"pid": int(entry), "command": command[:160]}
    return None


def _open_files(pid: str):
    """What a process has open, as far as this user may look."""
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                yield os.readlink(f"/proc/{pid}/fd/{fd}")
