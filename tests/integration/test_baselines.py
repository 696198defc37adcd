"""Baselines on sharded and whole weights: the same losses, skips, resumes, exports; sampled and
evaluated from a checkpoint.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.baseline_worker import ARMS, BAD_STEP, RUN_ON, STEPS, config_of
from tests.support.helpers import ROOT, read_log, run_ranks

pytestmark = pytest.mark.long

WORKER = ROOT / "tests" / "support" / "baseline_worker.py"


@pytest.fixture(scope="module")
def runs(store, tmp_path_factory):
    """Folder of the runs ARM_ENGINE and ARM_resumed."""
    folder = tmp_path_factory.mktemp("baselines")
    for world in (1, 2):
        done = run_ranks(world, WORKER, "engines", str(store), str(folder), timeout=400)
        assert done.returncode == 0, done.stdout[-4000:]
    return folder


@pytest.mark.parametrize("arm", ARMS)
def test_its_engine_gives_the_losses_of_one_process(runs, arm):
    """Around a step whose loss is NaN on one rank, and in the evaluation at the end."""
    expected = read_log(runs, f"{arm}_single")
    assert [record["skipped"] for record in expected] == [
        step == BAD_STEP for step in range(1, STEPS + 1)
    ]
    (evaluation,) = read_log(runs, f"{arm}_single", "eval_log.jsonl")
    figures = {key for key in evaluation if key.endswith(("_nelbo", "_nll", "_gain_null"))}
    assert len(figures) == (3 if arm.startswith("ar") else 2 if arm == "mdlm" else 5)
    engine = RUN_ON[arm]
    found = read_log(runs, f"{arm}_{engine}")
    assert [record["skipped"] for record in found] == [record["skipped"] for record in expected], (
        engine
    )
    for one, other in zip(expected, found, strict=True):
        for key in ("loss", "text_loss", "length_loss", "grad_norm"):
            if key in one and not one["skipped"]:
                # A norm over a million elements is summed in another order, in fp32: 3e-4
                # apart at equal gradients.
                near = pytest.approx(one[key], rel=1e-3 if key == "grad_norm" else 1e-4)
                assert other[key] == near, (engine, key, one["step"])
    (other,) = read_log(runs, f"{arm}_{engine}", "eval_log.jsonl")
    for key in figures:
        assert other[key] == pytest.approx(evaluation[key], rel=1e-4, abs=1e-4), (engine, key)
    # Without a condition there is nothing to write, and a causal model is not sampled.
    sampled = read_log(runs, f"{arm}_{engine}", "samples.jsonl")
    assert len(sampled) == (arm not in ("ar", "mdlm")), engine


@pytest.mark.parametrize("arm", ARMS)
def test_a_resumed_run_has_the_same_losses(runs, arm):
    straight, resumed = (
        read_log(runs, f"{arm}_{RUN_ON[arm]}")[4:],
        read_log(runs, f"{arm}_resumed"),
    )
    for key in ("step", "loss", "text_loss", "grad_norm", "lr", "samples"):
        assert [record[key] for record in resumed] == [record[key] for record in straight], key


# AR, GIDD and HDLM: in the tests of their tasks.
@pytest.mark.parametrize("arm", ["mdlm", "latent_dit_adaln"])
def test_the_skipped_step_is_replayed(runs, arm, tmp_path, monkeypatch):
    from mmldlm.cli import main
    from mmldlm.tasks.baselines.mdlm import MaskingCollator

    make = MaskingCollator.collate

    def planted(self, batch, *arguments):
        found = make(self, batch, *arguments)
        if batch.step == BAD_STEP - 1:
            found.text_weights[:] = float("nan")
        return found

    monkeypatch.setattr(MaskingCollator, "collate", planted)
    words = [
        "replay",
        str(runs / f"{arm}_single"),
        "last",
        "--dtypes",
        "fp32",
        "--json",
        str(tmp_path / "replay.json"),
    ]
    assert main(words) == 0
    (found,) = json.loads((tmp_path / "replay.json").read_text())["dtypes"]["fp32"][
        "micro_batches"
    ]
    assert found["origins"][0]["kind"] == "NaN"


@pytest.mark.parametrize("arm", ["ar", "mdlm", "latent_dit_cross_attention", "gidd", "hdlm"])
def test_sanity_finds_nothing_wrong(store, tmp_path, arm):
    from mmldlm.debug.sanity import SanityRunner
    from mmldlm.debug.sanity_checks import FAIL
    from mmldlm.tasks.registry import find_task

    config = config_of(arm, str(store), str(tmp_path), "sanity", 1, "engine.kind=single")
    found = SanityRunner(find_task(config.task).open_data(config))
    found.run(3, 6)
    assert [f"{row.id}: {row.reason}" for row in found.findings.rows() if row.status == FAIL] == []


@pytest.mark.parametrize(
    ("arm", "engine"), [("mdlm", "zero3"), ("latent_dit_cross_attention", "fsdp")]
)
def test_a_checkpoint_is_converted_sampled_and_evaluated(
    runs, store, tmp_path, arm, engine, capsys
):
    from mmldlm.cli import main
    from mmldlm.inference.load import load_pretrained

    def command(*words):
        return main([str(word) for word in words])

    checkpoint, out = runs / f"{arm}_{engine}" / "latest", tmp_path / "model"
    assert command("convert", checkpoint, out) == 0
    state, direct = (load_pretrained(path).model.state_dict() for path in (out, checkpoint))
    assert all(torch.equal(state[name], direct[name]) for name in direct)

    few = ("--checkpoint", out, "--num-samples", 3, "--num-steps", 4, "--output-dir")
    assert command("sample", "unconditional", *few, tmp_path / "a") == 0
    settings = json.loads((tmp_path / "a" / "settings.json").read_text())
    assert settings["sampler"] == "ancestral" and not (tmp_path / "a" / "latents.npy").exists()
    conditional = arm != "mdlm"
    assert command("sample", "l2t", "--data", store, *few, tmp_path / "b") == (
        0 if conditional else 2
    )
    said = capsys.readouterr().err
    if not conditional:
        assert "trained in mode l2t" in said
    assert (
        command(
            "sample", "t2l", "--text", "words", "--checkpoint", out, "--output-dir", tmp_path / "c"
        )
        == 2
    )
    assert "task=mdlm" in capsys.readouterr().err
    assert command("sample", "unconditional", "--sampler", "beam", *few, tmp_path / "d") == 2

    report = tmp_path / "report.json"
    words = (
        "--data",
        store,
        "--num-samples",
        8,
        "--control-samples",
        4,
        "--num-draws",
        1,
        "--json",
        report,
    )
    assert command("evaluate", "--checkpoint", out, *words) == 0
    found = json.loads(report.read_text())
    model, untrained = found["details"]["model"], found["details"]["untrained"]
    assert model["nelbo_null"]["value"] > 0 and model["length_nll_null"]["value"] > 0
    assert ("gain_null" in model) == conditional == ("f1_right" in model)
    if conditional:  # adaLN and gates of zero: an untrained model ignores its latent exactly
        assert (
            untrained["gain_null"]["value"] == 0 and untrained["latent_sensitivity"]["value"] == 0
        )
        assert found["details"]["untrained_random_gates"]["latent_sensitivity"]["value"] > 0
