"""The folder for temporary files on a node."""

from __future__ import annotations

from mmldlm.preflight.probes import system


def test_the_temporary_folder_is_that_of_other_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = system.temporary({})
    assert (
        found["folder"] == str(tmp_path)
        and "error" not in found
        and list(tmp_path.iterdir()) == []
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))  # passed over by everybody
    monkeypatch.delenv("TEMP", raising=False)
    monkeypatch.delenv("TMP", raising=False)
    assert system.temporary({})["folder"] == "/tmp"
    monkeypatch.setenv("TMPDIR", "/proc")  # nothing can be written there, root or not
    assert "error" in system.temporary({})
