"""What nodes exchange, over real sockets, and a login over a relay that sends small packets only."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading

from mmldlm.preflight.probes import network, system
from mmldlm.preflight.remote import connections, small_packets


def test_data_goes_to_and_fro_and_is_measured():
    (opened,) = connections.listen({"ports": [0]})["ports"]
    try:
        (found,) = connections.connect({"to": [["127.0.0.1", opened["port"]]]})
    finally:
        connections.close({})
    assert 0 < found["ms"] < 1000 and found["segments"] > 3 and found["retransmitted"] == 0
    assert "error" in connections.connect({"to": [["127.0.0.1", opened["port"]]]})[0]


def test_a_connection_without_data_is_not_taken_for_a_way(monkeypatch):
    """A listener that accepts and never answers, as behind a firewall that lets handshakes pass alone."""
    monkeypatch.setattr(connections, "EXCHANGE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (found,) = connections.connect({"to": [["127.0.0.1", server.getsockname()[1]]]})
    assert found["stalled"] and not found["small_pass"] and "no data passes" in found["error"]


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
        words = [sys.executable, small_packets.__file__, "127.0.0.1", str(server.getsockname()[1])]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdin.write(asked)
            process.stdin.flush()
            assert process.stdout.read(len(asked)) == asked[::-1]
        thread.join()
    assert size[0] <= small_packets.SEGMENT


def test_a_name_that_only_sshs_configuration_knows(tmp_path, monkeypatch):
    real = subprocess.run

    def with_own_file(command, **more):
        return real([command[0], "-F", str(tmp_path / "config"), *command[1:]], **more)

    (tmp_path / "config").write_text("Host worker2.invalid\n  HostName 127.0.0.1\n")
    monkeypatch.setattr(network.subprocess, "run", with_own_file)
    found = network.resolve({"names": ["worker2.invalid", "worker3.invalid", "localhost"]})
    assert found["worker2.invalid"]["addresses"] == ["127.0.0.1"] and found["worker2.invalid"]["ssh"] == "127.0.0.1"
    assert "error" in found["worker3.invalid"]
    assert "127.0.0.1" in found["localhost"]["addresses"] and "ssh" not in found["localhost"]


def test_the_folder_for_temporary_files_is_the_one_that_programs_take(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = system.temporary({})
    assert found["folder"] == str(tmp_path) and "error" not in found and list(tmp_path.iterdir()) == []
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))  # passed over by everybody
    monkeypatch.delenv("TEMP", raising=False)
    monkeypatch.delenv("TMP", raising=False)
    assert system.temporary({})["folder"] == "/tmp"
    monkeypatch.setenv("TMPDIR", "/proc")  # nothing can be written there, root or not
    assert "error" in system.temporary({})
