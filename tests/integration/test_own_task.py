"""The example of docs/tasks.md: a task outside the package has everything that the package's own
task has.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest
import torch

from tests.support.helpers import LONG, ROOT, environment, rank_server, read_log, run_ranks
from tests.support.own_task_worker import ENGINES, EXAMPLE, STEPS, words_of

pytestmark = pytest.mark.long

WORKER = ROOT / "tests" / "support" / "own_task_worker.py"
BAD_LINE, NAN_LINE = 5, 9


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text file of 28 lines: 22 for training, so that an epoch ends with a short batch."""
    lines = [f"line {number}: {'word ' * (number % 7)}end" for number in range(28)]
    lines[BAD_LINE] += "\0"
    lines[NAN_LINE] += "\a"
    path = tmp_path_factory.mktemp("own_task") / "lines.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def runs(text):
    """Folder of the runs on one process and, on two ranks, under every engine."""
    for world in (1, 2):
        done = run_ranks(world, WORKER, "engines", str(text), str(text.parent))
        assert done.returncode == 0, done.stdout[-4000:]
    return text.parent


@pytest.fixture
def command(monkeypatch):
    """`mmldlm WORD...` in this process, started in the example's folder; returns the exit code."""
    from mmldlm.cli import main

    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "support"))
    monkeypatch.chdir(EXAMPLE)
    return lambda *words: main([str(word) for word in words])


def test_the_example_is_one_short_file():
    source = (EXAMPLE / "gpt2_task.py").read_text()
    assert len(source.split()) <= 710  # 150 lines of a width of 120
    assert "import _" not in source and "mmldlm._" not in source


def test_every_engine_gives_the_losses_of_one_process(runs):
    """With a line that is left out, a line that makes a NaN, short batches and accumulation."""
    expected = read_log(runs, "single")
    assert len(expected) == STEPS
    skips = [record["skipped"] for record in expected]
    assert 0 < sum(skips) < STEPS - 2
    assert sum(record["bad_samples"] for record in expected) >= 2
    for engine in ENGINES:
        found = read_log(runs, engine)
        assert [record["skipped"] for record in found] == skips, engine
        for key in ("loss", "nll", "grad_norm", "samples", "bad_samples"):
            values = [
                record[key] for record, skipped in zip(expected, skips, strict=True) if not skipped
            ]
            others = [record[key] for record in found if not record["skipped"]]
            assert others == pytest.approx(values, rel=2e-5), (engine, key)
        (evaluation,) = read_log(runs, engine, "eval_log.jsonl")
        assert evaluation["validation_nll"] == pytest.approx(
            read_log(runs, "single", "eval_log.jsonl")[0]["validation_nll"], rel=2e-5
        )
        layers = read_log(runs, engine, "gradient_log.jsonl")[0]["layers"]
        assert {"transformer.wte", "transformer.h.0", "transformer.h.1"} <= set(layers), engine
        events = read_log(runs, engine, "events.jsonl")
        bad = [event for event in events if event["event"] == "bad_sample"]
        assert {(event["id"], event["file"]) for event in bad} == {
            (BAD_LINE, str(runs / "lines.txt"))
        }


@pytest.mark.parametrize("engine", ["single", "zero3"])
def test_replay_names_the_operation_and_the_line(runs, command, tmp_path, engine):
    report = tmp_path / "replay.json"
    assert command("replay", runs / engine, "last", "--json", report) == 0
    (found,) = json.loads(report.read_text())["dtypes"]["fp32"]["micro_batches"]
    (origin,) = (origin for origin in found["origins"] if origin["phase"] == "forward")
    assert (origin["kind"], origin["module"], origin["operation"]) == (
        "NaN",
        "transformer.wte",
        "aten.sqrt",
    )
    assert [sample["ids"] for sample in found["samples"] if not sample["clean"]] == [[NAN_LINE]]


def test_transformers_reads_what_convert_writes(runs, command, tmp_path):
    from transformers import GPT2LMHeadModel

    from mmldlm.checkpoints.init_from import init_weights

    tokens = torch.arange(40)[None]
    logits = {}
    for engine in ("single", *ENGINES):
        out = tmp_path / engine
        assert command("convert", runs / engine / "latest", out) == 0
        model, report = GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
        assert not any(report.values()), report
        logits[engine] = model.eval()(tokens).logits
        fresh = GPT2LMHeadModel(model.config)
        init_weights(fresh, str(runs / engine / "latest"))
        assert torch.equal(logits[engine], fresh.eval()(tokens).logits)
        assert torch.allclose(logits[engine], logits["single"], atol=1e-4)
    assert command("convert", runs / "fsdp" / "latest", tmp_path / "average", "--ema") == 0
    average = GPT2LMHeadModel.from_pretrained(tmp_path / "average").eval()(tokens).logits
    assert not torch.allclose(average, logits["fsdp"], atol=1e-4)


def test_killed_and_resumed_it_has_the_same_losses(text, tmp_path):
    def words(name: str) -> list[str]:
        more = [
            "training.num_train_steps=12",
            "logging.save_freq=3",
            "engine.kind=deepspeed",
            "engine.zero_stage=2",
        ]
        more += ["training.train_batch_size=2", "training.resume=auto", "data.num_workers=1"]
        return ["train", *words_of(text, tmp_path, name), *more]

    done = run_ranks(2, WORKER, *words("straight"))
    assert done.returncode == 0, done.stdout[-4000:]
    ranks = rank_server().start(2, words("killed"), WORKER)
    log = tmp_path / "killed" / "training_log.jsonl"
    saved = tmp_path / "killed" / "checkpoints" / "step_00000003" / "manifest.json"
    deadline = time.monotonic() + 200
    while not (saved.exists() and len(log.read_text().splitlines()) >= 5):
        assert None in ranks.codes() and time.monotonic() < deadline, ranks.output()
        time.sleep(0.01)
    for rank in range(2):
        ranks.kill(rank)
    assert ranks.wait(60) == [-9, -9]
    done = run_ranks(2, WORKER, *words("killed"))
    assert done.returncode == 0 and "resumed  at step" in done.stdout, done.stdout[-4000:]
    keys = ("step", "loss", "nll", "grad_norm", "lr", "samples")
    straight, killed = (
        [[record[key] for key in keys] for record in read_log(tmp_path, name)]
        for name in ("straight", "killed")
    )
    assert len(straight) == 12 and straight == killed


def test_a_resume_refuses_another_model_and_other_data(runs, text, tmp_path, command):
    from mmldlm.config.resume_compat import diff_configs
    from mmldlm.errors import UserError
    from mmldlm.tasks.registry import load_config

    words = words_of(text, runs, "single", "fragile_gpt2:FragileGpt2Task")
    diff = diff_configs(
        runs / "single" / "latest", load_config(None, None, [*words, "model.n_layer=3"])
    )
    assert "model.n_layer: 2 -> 3" in diff.errors
    changed = tmp_path / "changed.txt"
    changed.write_text(text.read_text().replace("line 3:", "LINE 3:"))
    words += [
        f"data.text_file={changed}",
        "training.train_batch_size=4",
        "training.grad_accum_steps=2",
    ]
    words += [
        "training.resume=auto",
        "optimizer.ema_decay=0.9",
        f"training.num_train_steps={STEPS + 1}",
    ]
    done = run_ranks(1, WORKER, "train", *words)
    assert done.returncode == UserError.exit_code and "other files" in done.stdout, done.stdout


def test_config_sanity_preflight_monitor_and_plot_know_it(
    runs, text, tmp_path, command, capsys, monkeypatch
):
    words = words_of(text, tmp_path, "run")
    more = ["training.train_batch_size=2", "training.num_train_steps=12"]
    assert command("config", *words) == 0
    assert "# parameters" in capsys.readouterr().out
    assert command("preflight", "--level", "0", *words, *more) == 0
    shown = capsys.readouterr().out
    assert "22 samples" in shown and "single needs" in shown and "per rank" in shown
    assert (
        command("sanity", *words, *more, "training.train_batch_size=4", "data.max_train_samples=4")
        == 0
    )
    assert "checks passed" in capsys.readouterr().out
    assert command("monitor", runs / "ddp", "--once") == 1  # many of its few steps were skipped
    assert "steps were skipped" in capsys.readouterr().out
    assert command("plot", runs / "ddp", "--out", tmp_path / "plot.svg") == 0
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(f"<!-- {label} -->" in drawn for label in ("total", "nll", "validation nll"))


@LONG
def test_the_dry_run_of_preflight_trains_it(text, tmp_path):
    """Two steps, a save and a resume through torchrun, started in the example's folder."""
    words = [*words_of(text, tmp_path, "dry"), "engine.kind=ddp", "training.train_batch_size=2"]
    level = ["--level", "4", "--launcher", "torchrun", "--only", "DRY001,DRY002"]
    report = tmp_path / "receipt.json"
    command = [
        sys.executable,
        "-m",
        "mmldlm.cli",
        "preflight",
        *level,
        "--json",
        str(report),
        *words,
    ]
    done = subprocess.run(
        command, env=environment(), cwd=EXAMPLE, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads(report.read_text())["results"]
    assert {result["id"]: result["status"] for result in results} == {
        "DRY001": "PASS",
        "DRY002": "PASS",
    }


def test_the_memory_model_counts_the_parameters(text, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from mmldlm.tasks.registry import find_task, load_config

    config = load_config(None, None, words_of(text, text.parent, "count"))
    task = find_task(config.task)
    model = task.build_model(task.open_data(config))
    sizes = task.model_sizes(config, 40)
    assert sizes["trainable"] == sum(parameter.numel() for parameter in model.parameters())
    flops = 6 * sizes["trainable"] * 80
    assert task.training_flops(config, 2, 80, {}) == flops
    monkeypatch.setattr(type(task), "build_model", None)  # not at every step
    monkeypatch.setattr(type(task), "model_sizes", None)
    assert task.training_flops(config, 4, 160, {}) == 2 * flops


def test_mmldlm_train_finds_it_in_the_folder_it_is_started_in(text, tmp_path):
    """Through the local launcher, on two ranks with data-loading processes."""
    words = [
        "--config",
        "small.yaml",
        f"data.text_file={text}",
        "data.validation_lines=6",
        "training.train_batch_size=2",
    ]
    words += [
        f"logging.save_dir={tmp_path}",
        "training.num_train_steps=2",
        "data.num_workers=1",
        "model.n_layer=1",
    ]
    command = [
        sys.executable,
        "-m",
        "mmldlm.cli",
        "train",
        "--nproc",
        "2",
        *words,
        "engine.kind=ddp",
    ]
    done = subprocess.run(
        command, env=environment(), cwd=EXAMPLE, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [record["step"] for record in read_log(tmp_path, "gpt2")] == [1, 2]
    assert (tmp_path / "gpt2" / "plots" / "loss.png").is_file()


def test_the_skeleton_of_the_docs_passes_sanity(tmp_path):
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "skeleton.py").write_text(source, encoding="utf-8")
    words = ["task=skeleton:Skeleton", "logging.save_dir=runs", "training.train_batch_size=16"]
    command = [sys.executable, "-m", "mmldlm.cli", "sanity", *words, "--overfit-steps", "3"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
