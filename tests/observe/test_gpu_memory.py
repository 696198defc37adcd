"""A run whose GPU is out of memory. No GPU is here: torch's error is raised by hand, and the two
functions of torch that need one are replaced.
"""

from __future__ import annotations

import pytest
import torch

from mmldlm.observe import gpu_memory
from mmldlm.train import main
from mmldlm.training import loop, session
from tests.support.helpers import read_log, train_words

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture
def calls(monkeypatch):
    """Calls of torch's two functions, of which one writes a file."""
    found = []

    def write(filename):
        found.append("dump")
        with open(filename, "w", encoding="utf-8") as file:
            file.write("snapshot")

    def record(enabled="all", **options):
        found.append(options or enabled)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", write)
    return found


@pytest.fixture
def fails_at_step_2(monkeypatch):
    train_step = loop.train_step

    def fail(context, *given):
        if context.state.step == 1:
            raise torch.OutOfMemoryError(MESSAGE)
        return train_step(context, *given)

    monkeypatch.setattr(loop, "train_step", fail)


def train(store, folder, *more):
    return main(train_words(store, folder, "run", "engine.kind=single", *more))


def test_the_error_says_what_to_do(store, tmp_path, capsys, calls, fails_at_step_2):
    assert train(store, tmp_path) == 1
    shown = capsys.readouterr().err
    assert MESSAGE in shown and "training.train_batch_size" in shown and "MEM001" in shown
    assert "training.memory_snapshot=true" in shown and calls == []
    end = read_log(tmp_path, "run", "events.jsonl")[-1]
    assert end["exit_code"] == 1 and MESSAGE in end["reason"]


def test_a_run_writes_what_its_gpu_held(
    store, tmp_path, capsys, monkeypatch, calls, fails_at_step_2
):
    def on_a_gpu(path, device):
        return gpu_memory.memory_snapshot(path, torch.device("cuda"))

    monkeypatch.setattr(session, "memory_snapshot", on_a_gpu)
    assert train(store, tmp_path, "training.memory_snapshot=true") == 1
    path = tmp_path / "run" / "profile" / "memory_rank0.pickle"
    assert path.read_text() == "snapshot"
    assert calls == [{"max_entries": 100_000, "stacks": "python"}, "dump", None]
    shown = capsys.readouterr().err
    assert str(path) in shown and "training.memory_snapshot=true" not in shown


def test_nothing_is_recorded_without_the_key_or_a_gpu(tmp_path, calls):
    for path, device in ((None, "cuda"), (tmp_path / "file", "cpu")):
        with pytest.raises(torch.OutOfMemoryError):
            with gpu_memory.memory_snapshot(path, torch.device(device)):
                raise torch.OutOfMemoryError(MESSAGE)
    assert calls == []


def test_other_errors_write_nothing(tmp_path, calls):
    with pytest.raises(RuntimeError) as error:
        with gpu_memory.explain_out_of_memory(False):
            with gpu_memory.memory_snapshot(tmp_path / "file", torch.device("cuda")):
                raise RuntimeError("another")
    assert "dump" not in calls and calls[-1] is None
    assert not hasattr(error.value, "__notes__")


def test_a_full_disk_does_not_hide_the_error(tmp_path, calls):
    (tmp_path / "file").write_text("")
    with pytest.raises(torch.OutOfMemoryError) as error:
        with gpu_memory.memory_snapshot(tmp_path / "file" / "x", torch.device("cuda")):
            raise torch.OutOfMemoryError(MESSAGE)
    assert "could not be written" in error.value.__notes__[0]
