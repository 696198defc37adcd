"""Trackers by name: unknown ones, those of other packages, and one that fails beside another."""

import json
import subprocess
import sys
import textwrap

import pytest

from mmldlm.config.schema import Config
from mmldlm.errors import UserError
from mmldlm.observe.trackers.base import TrackedRun
from mmldlm.observe.trackers.registry import Trackers

PACKAGE = """
import json

class Lines:
    def __init__(self, run):
        self.path = run.folder / "lines.jsonl"
        self.file = open(self.path, "a", encoding="utf-8")
        self.log(run.step, {"resumed": run.is_resumed, "seed": run.config.training.seed})
    def log(self, step, values):
        self.file.write(json.dumps([step, values]) + "\\n")
    def text(self, step, name, text):
        self.log(step, {name: text})
    def finish(self, exit_code):
        self.log(-1, {"exit_code": exit_code})
        self.file.close()
        return str(self.path)

def broken(run):
    raise ConnectionError("no such server")

class Failing:
    def __init__(self, run): pass
    def log(self, step, values): raise ConnectionResetError("Connection lost")
    def finish(self, exit_code): pass
"""
ENTRY_POINTS = """
[mmldlm.trackers]
lines = tracker_package:Lines
broken = tracker_package:broken
failing = tracker_package:Failing
missing = no_such_module:open
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with trackers."""
    site = tmp_path / "site"
    metadata = site / "tracker_package-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "tracker_package.py").write_text(PACKAGE)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tracker_package\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(site)
    yield
    sys.modules.pop("tracker_package", None)


def open_trackers(tmp_path, *names, failed=None):
    run = TrackedRun(tmp_path, 7, True, Config())
    report = (lambda *words: pytest.fail(str(words))) if failed is None else failed
    return Trackers(names, run, report)


def test_a_tracker_of_another_package_gets_the_run_its_numbers_and_end(tmp_path, package):
    trackers = open_trackers(tmp_path, "lines")
    trackers.log({"step": 8, "loss": 0.5, "time": "not a number", "latent_loss": None})
    trackers.log({"step": 8, "nelbo": 2}, prefix="eval/")
    trackers.text(8, "samples/l2t", "a text")
    assert trackers.finish(5, lambda: False) == [f"lines: {tmp_path / 'lines.jsonl'}"]
    lines = (tmp_path / "lines.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        [7, {"resumed": True, "seed": Config().training.seed}],
        [8, {"loss": 0.5}],
        [8, {"eval/nelbo": 2}],
        [8, {"samples/l2t": "a text"}],
        [-1, {"exit_code": 5}],
    ]


def test_names_that_cannot_be_opened_are_users_errors(tmp_path, package):
    with pytest.raises(UserError, match="tensorbord.*did you mean tensorboard"):
        open_trackers(tmp_path, "tensorbord")
    with pytest.raises(UserError, match="no_such_module"):
        open_trackers(tmp_path, "missing")
    with pytest.raises(UserError, match="no such server"):
        open_trackers(tmp_path, "lines", "broken")
    # The one that was open is closed with the exit code of the error.
    assert json.loads((tmp_path / "lines.jsonl").read_text().splitlines()[-1])[1] == {
        "exit_code": 2
    }


def test_one_that_fails_is_reported_once_and_the_others_go_on(tmp_path, package):
    failures = []
    trackers = open_trackers(
        tmp_path, "failing", "lines", failed=lambda *words: failures.append(words)
    )
    for step in range(20):
        trackers.log({"step": step, "loss": 1.0})
    trackers.finish(0, lambda: False)
    assert failures == [("failing", "ConnectionResetError: Connection lost")]
    assert len((tmp_path / "lines.jsonl").read_text().splitlines()) == 22


def test_without_trackers_nothing_is_imported(tmp_path):
    code = textwrap.dedent(
        f"""
        import pathlib, sys
        from mmldlm.config.schema import Config
        from mmldlm.observe.trackers.base import TrackedRun
        from mmldlm.observe.trackers.registry import Trackers
        run = TrackedRun(pathlib.Path({str(tmp_path)!r}), 0, False, Config())
        assert Trackers([], run, print).finish(0, lambda: False) == []
        assert not {{"wandb", "torch.utils.tensorboard", "tensorboardX"}} & set(sys.modules)
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert list(tmp_path.iterdir()) == []
