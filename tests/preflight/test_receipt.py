"""The receipt, and the command on one machine without a node."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from mmldlm.commands import preflight
from mmldlm.errors import UserError
from mmldlm.preflight import receipt
from mmldlm.preflight.checks import config
from mmldlm.tasks.registry import load_config
from mmldlm.utils.run_files import PREFLIGHT


def run(tmp_path, *words, capsys=None):
    parser = argparse.ArgumentParser()
    preflight.add_arguments(parser)
    path = tmp_path / "receipt.json"
    code = preflight.main(parser.parse_intermixed_args(["--json", str(path), *words]))
    return code, json.loads(path.read_text()) if path.exists() else None


class Folder:
    """The part of RunFolder that receipt.log_receipt uses."""

    def __init__(self):
        self.warnings, self.events = [], []

    def warning(self, text):
        self.warnings.append(text)

    def event(self, kind, **values):
        self.events.append((kind, values))


def test_a_machine_alone_passes_and_train_finds_its_receipt(store, tmp_path, monkeypatch, capsys):
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    words = [
        "--config-name",
        "tiny",
        f"data.latent_data_root={store}",
        f"logging.save_dir={tmp_path}",
        "engine.kind=single",
    ]
    # Leftovers of other tests and this machine's own limits are not what is tested.
    code, found = run(tmp_path, "--level", "0", *words)
    assert code == 0, capsys.readouterr().out
    assert found["world_size"] == 1 and found["failing_nodes"] == [] and found["config_sha256"]
    config, folder = load_config("tiny", None, words[2:]), Folder()
    receipt.log_receipt(config, 1, folder)
    assert folder.warnings == folder.events == []  # there is none to compare with
    receipt.write(found, config.run_dir() / PREFLIGHT)
    receipt.log_receipt(config, 1, folder)
    ((kind, values),) = folder.events
    assert (kind, values["level"], values["stale"], folder.warnings) == ("preflight", 0, [], [])
    receipt.log_receipt(config, 2, folder)
    assert "this run has 2" in folder.warnings[0] and "mmldlm preflight" in folder.warnings[0]
    found = receipt.read(config.run_dir())
    assert receipt.staleness_reasons(found, config, 1) == []
    resumed = load_config("tiny", None, [*words[2:], "training.resume=auto"])
    assert receipt.staleness_reasons(found, resumed, 1) == []
    assert "2" in receipt.staleness_reasons(found, config, 2)[0]
    filled = load_config(
        "tiny", None, [*words[2:], "model.latent_dim=384", "model.vocab_size=30522"]
    )
    # As train knows it once the data is open.
    assert receipt.staleness_reasons(found, filled, 1) == []
    other = load_config("tiny", None, [*words[2:], "optimizer.lr=1e-5"])
    assert receipt.staleness_reasons(found, other, 1) == ["the config has changed since"]
    (config.run_dir() / PREFLIGHT).write_text('{"format": "mmldlm-preflight"}')
    receipt.log_receipt(config, 1, folder)  # cut short by a full disk: no reason to end a run
    assert "cannot be read" in folder.warnings[-1]


def test_a_bad_config_is_a_usage_error_with_a_verdict(tmp_path, capsys):
    code, found = run(
        tmp_path,
        "--level",
        "0",
        "--config-name",
        "tiny",
        "model.n_head=3",
        f"logging.save_dir={tmp_path}",
    )
    assert code == 2 and "model.n_heads" in capsys.readouterr().out
    assert [r["id"] for r in found["results"] if r["status"] == "FAIL"] == ["CFG001"]


def test_unknown_check_ids_are_refused(tmp_path):
    with pytest.raises(UserError):
        run(tmp_path, "--only", "NET999")
    with pytest.raises(UserError):
        run(tmp_path, "--explain", "NET999")


@pytest.mark.parametrize("id", ["HOST001", "CFG003"])
def test_the_data_are_opened_for_checks_that_read_them(store, tmp_path, monkeypatch, id):
    """By a child that imports torch."""
    started = []

    def command(*words):
        started.append(words)
        return ["echo", "{}"]

    monkeypatch.setattr(config, "module_command", command)
    words = ["--config-name", "tiny", f"data.latent_data_root={store}", "--level", "0"]
    run(tmp_path, *words, "--only", id)
    assert len(started) == (id == "CFG003")


def test_explain_prints_what_a_check_looks_at(tmp_path, capsys):
    code, _ = run(tmp_path, "--explain", "net006")
    assert code == 0 and "ephemeral ports" in capsys.readouterr().out


WITHOUT_TORCH = """
import sys
from mmldlm import cli; from mmldlm.preflight.checks import config
sys.argv[1:] = sys.argv[1:] or {words!r}
{call}
slow = [name for name in {slow!r} if name in sys.modules]
assert not slow, slow
"""


@pytest.mark.parametrize("part", ["command", "data"])
def test_level_0_needs_no_torch(store, tmp_path, part):
    words = [
        "preflight",
        "--level",
        "0",
        "--config-name",
        "tiny",
        f"data.latent_data_root={store}",
        f"logging.save_dir={tmp_path}",
    ]
    call, slow = "assert cli.main() == 0", ("torch", "transformers", "deepspeed")
    if part == "data":  # its child process, which counts the parameters on the model
        slow = slow[1:]
        (tmp_path / "c.yaml").write_text(
            f"data: {{latent_data_root: {store}}}\nengine: {{zero_stage: 3}}\n"
        )
        words, call = [str(tmp_path / "c.yaml"), "2"], "assert config.main() == 0"
    code = WITHOUT_TORCH.format(words=words, call=call, slow=slow)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert part == "command" or '"trainable"' in done.stdout
