"""Exchanges of nodes over real sockets, and a relay that sends small packets only."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading

from mmldlm.cluster import connections
from mmldlm.utils import run_module


def test_data_goes_to_and_fro_and_is_measured():
    (opened,) = connections.listen({"ports": [0]})["ports"]
    try:
        to = {"to": [["127.0.0.1", opened["port"]]]}
        found = [connections.connect(to)[0] for _ in range(3)]
    finally:
        connections.close({})
    assert all(0 < one["ms"] < 1000 and one["segments"] > 3 for one in found)
    # A busy machine sends a packet again now and then, even to itself.
    assert min(one["retransmitted"] for one in found) == 0
    assert "error" in connections.connect({"to": [["127.0.0.1", opened["port"]]]})[0]


def test_a_connection_without_data_is_an_error(monkeypatch):
    """A listener that accepts and never answers, as behind a firewall that lets handshakes pass
    alone.
    """
    monkeypatch.setattr(connections, "EXCHANGE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (found,) = connections.connect({"to": [["127.0.0.1", server.getsockname()[1]]]})
    assert found["stalled"] and not found["small_pass"] and "no data passes" in found["error"]


def test_only_a_port_in_use_has_a_holder():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = connections.listen({"ports": [port]})["ports"]
    assert "in use" in found["error"] and found["holder"]["pid"] == os.getpid()
    refused = connections.describe_unusable_port(80, PermissionError(13, "Permission denied"))
    assert refused == {"error": "Permission denied"}


def test_the_time_limit_grows_with_the_targets():
    """Each may let the node wait, for as long as two attempts may take."""
    few, many = (connections.connect_seconds(num_targets) for num_targets in (2, 2048))
    assert few < 60 and many > 32 * 18


def test_the_relay_carries_both_directions_in_small_segments():
    asked, size = b"x" * 50_000, []

    def answer(server):
        connection, _ = server.accept()
        with connection:
            got = b""
            while len(got) < len(asked):
                got += connection.recv(1 << 16)
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            size.append(struct.unpack_from("I", info, 16)[0])  # what it may send in one packet
            connection.sendall(got[::-1])

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        words = [
            sys.executable,
            run_module.__file__,
            connections.__name__,
            "127.0.0.1",
            str(server.getsockname()[1]),
        ]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdin.write(asked)
            process.stdin.flush()
            assert process.stdout.read(len(asked)) == asked[::-1]
        thread.join()
    assert size[0] <= connections.SEGMENT
