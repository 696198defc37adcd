"""Name resolution on a node."""

from __future__ import annotations

import subprocess

from mmldlm.preflight.probes import network


def test_a_name_that_only_sshs_configuration_knows(tmp_path, monkeypatch):
    real = subprocess.run

    def with_own_file(command, **more):
        return real([command[0], "-F", str(tmp_path / "config"), *command[1:]], **more)

    (tmp_path / "config").write_text("Host worker2.invalid\n  HostName 127.0.0.1\n")
    monkeypatch.setattr(network.subprocess, "run", with_own_file)
    found = network.resolve({"names": ["worker2.invalid", "worker3.invalid", "localhost"]})
    assert (
        found["worker2.invalid"]["addresses"] == ["127.0.0.1"]
        and found["worker2.invalid"]["ssh"] == "127.0.0.1"
    )
    assert "error" in found["worker3.invalid"]
    assert "127.0.0.1" in found["localhost"]["addresses"] and "ssh" not in found["localhost"]
