import sys
import types

import numpy as np
import pytest

from mmldlm.config.schema import Config
from mmldlm.errors import UserError
from mmldlm.observe.trackers.base import TrackedRun
from mmldlm.observe.trackers.wandb import open_wandb

# No way out of this machine: what offline mode must do without.
NO_NETWORK = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
VARIABLES = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_RUN_ID", "WANDB_IDENTITY_TOKEN_FILE")


def tracked(folder, is_resumed=False, **settings) -> TrackedRun:
    config = Config(logging={"trackers": ["wandb"], "wandb": {"mode": "offline", **settings}})
    return TrackedRun(folder, 0, is_resumed, config)


@pytest.fixture
def offline(monkeypatch):
    """The real package, without a network and without settings of this machine."""
    pytest.importorskip("wandb")
    for name, value in NO_NETWORK.items():
        monkeypatch.setenv(name, value)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_offline_writes_a_run_and_a_resume_keeps_its_id(tmp_path, offline):
    ids, places = [], []
    for is_resumed in (False, True):
        settings = {"project": "mmldlm-tests", "group": "pairs", "tags": ["tagged"]}
        tracker = open_wandb(tracked(tmp_path, is_resumed, notes="a note", **settings))
        ids.append(tracker._run.id)
        # Steps 2 and 3 come again after the resume, as after a crash.
        for step in (1, 2, 3) if not is_resumed else (2, 3, 4):
            tracker.log(step, {"loss": 1.0 / step, "eval/loss": 0.5})
        tracker.text(3, "samples/l2t", "a <b> text")
        tracker.image(3, "samples/t2i", np.zeros((4, 5, 3), np.uint8))
        places.append(tracker.finish(0))
    assert ids[0] == ids[1] == (tmp_path / "wandb_id").read_text().strip()
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert "wandb sync" in places[0] and len(folders) == 2
    assert all(str(folder) in places[1] for folder in folders)
    files = [path for folder in folders for path in folder.glob(f"run-{ids[0]}.wandb")]
    content = b"".join(path.read_bytes() for path in files)
    for word in (b"eval/loss", b"mmldlm-tests", b"pairs", b"tagged", b"a note"):
        assert word in content, word
    texts = [path.read_text() for path in (tmp_path / "wandb").rglob("*.html")]
    assert texts and all("a &lt;b&gt; text" in text for text in texts)
    fresh = open_wandb(tracked(tmp_path))
    fresh.finish(0)
    assert fresh._run.id != ids[0]


def test_a_missing_package_is_a_users_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install -U wandb"):
        open_wandb(tracked(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_online_without_a_login_says_what_to_do(tmp_path, monkeypatch, offline):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    with pytest.raises(UserError, match="wandb login"):
        open_wandb(tracked(tmp_path, mode="online"))


def test_a_module_of_that_name_that_is_not_wandb_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    with pytest.raises(UserError, match="without init and Settings"):
        open_wandb(tracked(tmp_path))
