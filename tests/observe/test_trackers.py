import subprocess
import sys
import textwrap
import threading
import types

import pytest

from mmldlm.errors import UserError
from mmldlm.observe import trackers
from mmldlm.observe.trackers import open_wandb

# No way out of this machine: what offline mode must do without.
NO_NETWORK = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}


def test_disabled_imports_nothing(tmp_path):
    code = textwrap.dedent(
        f"""
        import sys
        from mmldlm.observe.trackers import open_wandb
        assert open_wandb("disabled", "p", "n", {str(tmp_path)!r}, {{}}) is None
        assert "wandb" not in sys.modules
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert list(tmp_path.iterdir()) == []


def test_offline_writes_a_run_and_a_resume_keeps_its_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in NO_NETWORK.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    ids = []
    for resume in (False, True):
        run = open_wandb(
            "offline",
            "mmldlm-tests",
            "first",
            tmp_path,
            {"optimizer": {"lr": 1e-4}},
            resume=resume,
        )
        ids.append(run.id)
        # Steps 2 and 3 come again after the resume, as after a crash.
        for step in (1, 2, 3) if not resume else (2, 3, 4):
            run.log(
                {"step": step, "loss": 1.0 / step, "time": "not a number", "latent_loss": None}
            )
        run.log({"step": 3, "loss": 0.5}, prefix="eval/")
        run.finish()
    assert ids[0] == ids[1] == (tmp_path / "wandb_id").read_text().strip()
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{ids[0]}.wandb"))
    assert files, "nothing was written"
    content = b"".join(path.read_bytes() for path in files)
    assert b"eval/loss" in content and b"mmldlm-tests" in content
    fresh = open_wandb("offline", "mmldlm-tests", "second", tmp_path, {})
    fresh.finish()
    assert fresh.id != ids[0]


def test_missing_package_and_unknown_mode_are_users_errors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        open_wandb("offline", "p", "n", tmp_path, {})
    with pytest.raises(UserError, match="disabled, offline or online"):
        open_wandb("somewhere", "p", "n", tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_online_without_a_login_says_what_to_do(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name, value in NO_NETWORK.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="wandb login"):
        open_wandb("online", "p", "n", tmp_path / "run", {})


class Stub:
    """A package wandb whose run does what a test says."""

    def __init__(self, log=lambda values: None, finish=lambda: None):
        self.logged, self._log, self._finish = [], log, finish
        self.id = "x"

    Settings = staticmethod(lambda **keywords: None)

    def init(self, **keywords):
        return self

    def define_metric(self, *words, **keywords):
        pass

    def log(self, values):
        self._log(values)
        self.logged.append(values)

    def finish(self, exit_code=0):
        self._finish()


def test_an_upload_that_does_not_end_is_waited_for_within_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.3)
    never = threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", Stub(finish=never.wait))
    run = open_wandb("offline", "p", "n", tmp_path, {})
    with pytest.raises(trackers.WandbError, match="did not end within"):
        run.finish()
    never.set()
    never = threading.Event()
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 1000)
    monkeypatch.setattr(trackers, "STOP_SECONDS", 0.1)
    monkeypatch.setitem(sys.modules, "wandb", Stub(finish=never.wait))
    run = open_wandb("offline", "p", "n", tmp_path, {})
    with pytest.raises(trackers.WandbError, match="did not end within"):
        run.finish(stop=lambda: True)
    never.set()


def test_a_service_that_takes_no_records_delays_no_step(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "_MAX_WAITING", 8)
    never = threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", Stub(log=lambda values: never.wait()))
    run = open_wandb("offline", "p", "n", tmp_path, {})
    with pytest.raises(trackers.WandbError, match="takes no records"):
        for step in range(20):
            run.log({"step": step})
    never.set()


def test_records_are_logged_in_order_before_the_end(tmp_path, monkeypatch):
    stub = Stub()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    run = open_wandb("offline", "p", "n", tmp_path, {})
    for step in range(5):
        run.log({"step": step, "loss": 0.5}, "eval/")
    run.finish()
    assert stub.logged == [{"step": step, "eval/loss": 0.5} for step in range(5)]


def test_a_module_of_that_name_that_is_not_wandb_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    with pytest.raises(UserError, match="without init and Settings"):
        open_wandb("offline", "p", "n", tmp_path, {})
