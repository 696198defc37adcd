"""`mmldlm sanity`: a healthy run passes on every engine, and each planted fault fails the row that
is about it.

As a script: sanity on one engine after the other in one process. THIS STORE FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from mmldlm.commands import sanity
from mmldlm.data import loader
from mmldlm.debug import sanity as sanity_steps
from mmldlm.debug.sanity import SanityRunner
from mmldlm.debug.sanity_checks import CHECKS, FAIL, NOT_RUN, PASS
from mmldlm.errors import UserError
from mmldlm.models import mmdit
from mmldlm.tasks.registry import load_config
from mmldlm.tasks.translation.data import open_data
from mmldlm.tasks.translation.objective import TranslationObjective
from tests.support.helpers import run_ranks

# ddp and ZeRO-0 keep gradients and state as one process does.
ENGINES = {
    "fsdp": ["engine.kind=fsdp"],
    **{f"zero{stage}": [f"engine.zero_stage={stage}"] for stage in (1, 2, 3)},
}
LMOL = (
    "--max_steps 3 --amp_dtype bf16 --grad_log_interval 1 --detect_anomaly false"
    " --clip_grad_norm 1.0".split()
)


def command(store, *words: str) -> int:
    """What `mmldlm sanity` runs."""
    parser = argparse.ArgumentParser()
    sanity.add_arguments(parser)
    args = parser.parse_intermixed_args(
        ["--config-name", "tiny", f"data.latent_data_root={store}", *words]
    )
    return sanity.main(args)


def main(store: str, folder: str) -> None:
    for name, words in ENGINES.items():
        file = str(Path(folder) / f"{name}.json")
        more = ["training.loss_type=l2t", "training.freeze=by_mode", "training.grad_accum_steps=2"]
        command(store, *LMOL, "--overfit_steps", "5", "--json", file, *more, *words)


def statuses(report: dict) -> dict[str, str]:
    return {row["id"]: row["status"] for row in report["checks"]}


def examined(store, *words: str, overfit_steps: int = 6, plant=None) -> SanityRunner:
    """Sanity of a tiny run in this process; plant(sanity) breaks it before its first step."""
    config = load_config(
        "tiny", None, [f"data.latent_data_root={store}", "engine.kind=single", *words]
    )
    found = SanityRunner(open_data(config))
    if plant is not None:
        plant(found)
    found.run(3, overfit_steps)
    return found


def failed(found: SanityRunner) -> dict[str, str]:
    """The rows that did not pass, and why."""
    return {row.id: row.reason for row in found.findings.rows() if row.status == FAIL}


def test_a_healthy_run_passes_with_lmols_options(minilm_store, tmp_path, capsys):
    file = tmp_path / "sanity.json"
    assert command(minilm_store, *LMOL, "engine.kind=single", "--json", str(file)) == 0
    report = json.loads(file.read_text())
    assert report["ok"] and statuses(report) == dict.fromkeys(CHECKS, PASS)
    assert (
        report["conditions"]["dtype"] == "bf16" and report["conditions"]["grad_clip_norm"] == 1.0
    )
    assert [step["step"] for step in report["steps"]] == list(
        range(1, 4 + sanity_steps.OVERFIT_STEPS)
    )
    assert {group["weight_decay"] for group in report["groups"]} == {0.01, 0.0}
    assert report["layers"]["blocks.1.text"]["grad_norm"] > 0
    # Tokens that no text of the batch has, of 30,522.
    assert report["layers"]["text_encoder"]["zero_share"] > 0.9
    assert report["peak_memory_bytes"] > 2**27
    shown = capsys.readouterr().out
    assert shown.count("PASS") == len(CHECKS) and "weight decay" in shown
    assert (
        next(row["reason"] for row in report["checks"] if row["id"] == "frozen")
        == "nothing is frozen in this run"
    )


def test_a_healthy_run_passes_on_every_engine(store, tmp_path):
    """With frozen groups and accumulation, in bf16, the default of each engine's own optimizer."""
    done = run_ranks(1, __file__, str(store), str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:]
    for name in ENGINES:
        report = json.loads((tmp_path / f"{name}.json").read_text())
        assert statuses(report) == dict.fromkeys(CHECKS, PASS), (name, report["checks"])
        frozen = next(row["reason"] for row in report["checks"] if row["id"] == "frozen")
        assert not frozen.startswith("0 "), name


# -- planted faults -------------------------------------------------------------------------------


def on_step(found: SanityRunner, act) -> None:
    """act(engine) before every optimizer step, the gradients being ready."""
    grad_norm = found.engine.grad_norm

    def acting():
        norm = grad_norm()
        act(found.engine)
        return norm

    found.engine.grad_norm = acting


def test_a_detached_module_is_named(store, monkeypatch):
    forward = mmdit.TextEncoder.forward
    monkeypatch.setattr(
        mmdit.TextEncoder, "forward", lambda self, *given: forward(self, *given).detach()
    )
    found = failed(examined(store))
    assert found == {"gradient_coverage": found["gradient_coverage"]}
    assert (
        "cut off from the loss: text_encoder.null_text, text_encoder.token_embedding.weight"
        in found["gradient_coverage"]
    )


def test_a_module_whose_output_is_thrown_away_is_named(store, monkeypatch):
    embed = mmdit.TimestepEmbedding.forward
    monkeypatch.setattr(mmdit.TimestepEmbedding, "forward", lambda self, t: 0.0 * embed(self, t))
    found = failed(examined(store))
    assert (
        set(found) == {"gradient_coverage"}
        and "a zero gradient in each of 9 steps: text_timestep.mlp.0" in found["gradient_coverage"]
    )


def test_a_stream_that_a_block_does_not_change_is_named(store, monkeypatch):
    """Its weights are halves of parameters whose other halves do learn."""
    forward = mmdit.MMDiTBlock.forward

    def without_latents(self, rows, condition, layout, recompute=False, after=None, dropout=None):
        out = forward(self, rows, condition, layout, recompute, after, dropout)
        text, latent = self.split_streams(out, rows, condition, layout, recompute, after)
        # Latents come last, and all are read.
        return torch.cat([text, rows[len(rows) - len(latent) :]])

    monkeypatch.setattr(mmdit.MMDiTBlock, "forward", without_latents)
    found = failed(examined(store))
    assert set(found) == {"gradient_coverage"}
    assert "a zero gradient in each of 9 steps" in found["gradient_coverage"]
    assert (
        "blocks.0.to_out.weight[latent], blocks.0.mlp_in.weight[latent]"
        in found["gradient_coverage"]
    )


def test_what_a_mode_cannot_train_is_no_fault_and_is_said(store):
    """In t2l nothing reads the last block's text stream; with a dropout of 0 the learned nulls
    have no sample.
    """
    words = ["training.loss_type=t2l", "training.freeze=none", "training.condition_dropout=0"]
    rows = {row.id: row for row in examined(store, *words).findings.rows()}
    assert {row.status for row in rows.values()} == {PASS}
    assert (
        "do not use" in rows["gradient_coverage"].reason
        and "text_encoder.null_text" in rows["gradient_coverage"].reason
    )
    assert ".to_out.weight[text]" in rows["gradient_coverage"].reason


def test_a_loss_without_a_graph_ends_the_steps(store, monkeypatch):
    """The earlier system's answer to a bad loss: a constant."""
    objective = TranslationObjective.__call__
    constant = lambda self, *given: (torch.tensor(0.01), objective(self, *given)[1])  # noqa: E731
    monkeypatch.setattr(TranslationObjective, "__call__", constant)
    rows = {row.id: row.status for row in examined(store).findings.rows()}
    assert rows["loss_graph"] == FAIL and rows["device"] == rows["batches"] == PASS
    assert rows["step_runs"] == rows["gradient_coverage"] == rows["overfit"] == NOT_RUN


def test_a_frozen_parameter_that_moves_is_named(store):
    def nudge(engine):
        engine.model.latent_head.to_latent.bias.data.add_(1e-7)

    found = failed(
        examined(
            store,
            "training.loss_type=l2t",
            "training.freeze=by_mode",
            plant=lambda s: on_step(s, nudge),
        )
    )
    assert found == {"frozen": "changed during the steps: latent_head.to_latent.bias"}


def test_a_frozen_parameter_that_is_thawed_is_named(store):
    def thaw(found):
        found.engine.model.latent_encoder.to_tokens.bias.requires_grad_(True)

    found = failed(
        examined(store, "training.loss_type=l2t", "training.freeze=by_mode", plant=thaw)
    )
    assert found["frozen"] == "latent_encoder.to_tokens.bias has a gradient although it is frozen"


def test_a_parameter_the_optimizer_forgot_is_named(store):
    def forget(found):
        group = found.engine.optimizer.param_groups[0]
        group["params"] = [
            p for p in group["params"] if p is not found.engine.model.text_head.weight
        ]

    found = failed(examined(store, plant=forget))
    assert "text_head.weight" in found["optimizer"]


def test_a_weight_that_does_not_move_is_named(store):
    def hold(found):
        apply, bias = found.engine.step, found.engine.model.text_head.bias

        def applying(lr, norm):
            before = bias.detach().clone()
            apply(lr, norm)
            bias.data.copy_(before)

        found.engine.step = applying

    # The step straight down the gradient moves it, too: hold that back as well.
    def still(found):
        hold(found)
        found._check_gradient_scale = lambda batches: found.findings.passed(
            "gradient_scale", "left out"
        )

    assert failed(examined(store, plant=still)) == {
        "weights_update": "a gradient, but an unchanged weight: text_head.bias"
    }


def test_a_wrong_dtype_is_named(store):
    def half_head(found):
        head = found.engine.model.latent_head.to_latent
        head.register_forward_hook(lambda module, inputs, output: output.double())

    found = failed(examined(store, "training.dtype=fp32", plant=half_head))
    assert set(found) == {"precision"} and "latent_head.to_latent (float64)" in found["precision"]


def test_autocast_that_is_off_is_named(store):
    def bare(found):
        found.engine.module = found.engine.model

    found = failed(examined(store, "training.dtype=bf16", plant=bare))
    assert (
        set(found) == {"precision"}
        and "not bfloat16 although training.dtype=bf16" in found["precision"]
    )


def test_a_module_left_in_eval_mode_is_named(store):
    def refuse(found):
        block = found.engine.model.blocks[1]
        block.train = lambda mode=True: block
        block.eval()
        block.training = False

    found = failed(examined(store, plant=refuse))
    assert set(found) == {"train_mode"} and "blocks.1" in found["train_mode"]


def broken_batches(monkeypatch, act) -> None:
    make = loader.MicroBatches.__getitem__

    def broken(self, item):
        batch = make(self, item)
        act(batch)
        return batch

    monkeypatch.setattr(loader.MicroBatches, "__getitem__", broken)


def test_a_nan_batch_is_told_apart_and_never_reaches_the_weights(store, monkeypatch):
    def poison(batch):
        batch.latents[1, 5] = float("nan")

    broken_batches(monkeypatch, poison)
    found = examined(store)
    reasons = failed(found)
    assert "1 non-finite values in latents" in reasons["batches"]
    assert "the loss is nan" in reasons["finite"] and "after the steps" not in reasons["finite"]
    assert not any(step["applied"] for step in found.steps)


def test_tokens_and_latents_of_another_sample_are_seen(store, monkeypatch):
    def swap(batch):
        batch.latent_clean[[0, 1]] = batch.latent_clean[[1, 0]]
        batch.text_targets[0] += 1

    broken_batches(monkeypatch, swap)
    found = failed(examined(store))
    assert set(found) == {"batches", "micro_batches"}  # each micro-batch was changed
    assert (
        "its tokens are not the store's" in found["batches"]
        and "its latent is not" in found["batches"]
    )


def test_writing_into_the_batch_is_seen(store, monkeypatch):
    objective = TranslationObjective.__call__

    def writing(self, model, batch):
        batch.latents.mul_(1.0)
        return objective(self, model, batch)

    monkeypatch.setattr(TranslationObjective, "__call__", writing)
    assert failed(examined(store)) == {
        "in_place": "forward or backward wrote into the batch: latents"
    }


def test_an_overwritten_saved_tensor_is_an_in_place_fault(store):
    def overwrite(found):
        def hook(module, inputs, output):
            kept = torch.exp(output)  # exp keeps its result for the backward pass
            return kept.add_(1.0)

        found.engine.model.latent_head.register_forward_hook(hook)

    found = examined(store, plant=overwrite)
    assert "modified by an inplace operation" in failed(found)["in_place"]
    assert {row.id: row.status for row in found.findings.rows()}["overfit"] == NOT_RUN


@pytest.mark.parametrize(
    "size, accum, said",
    [(1, 2, "of one sample"), (3, 1, "1 instead of 3"), (9, 2, "3 instead of 9")],
)
def test_any_batch_can_be_cut(store, size, accum, said):
    words = [f"training.train_batch_size={size}", f"training.grad_accum_steps={accum}"]
    rows = {row.id: row for row in examined(store, *words, overfit_steps=2).findings.rows()}
    assert rows["micro_batches"].status == PASS and said in rows["micro_batches"].reason


def test_gradients_that_are_not_clipped_are_seen(store):
    def unclipped(found):
        found.engine.clip = None

    found = failed(examined(store, "optimizer.grad_clip_norm=0.5", plant=unclipped))
    assert set(found) == {"clipping"} and "norm 0.5," in found["clipping"]


def test_a_leftover_loss_scale_is_seen(store):
    def scale(found):
        backward = found.engine.backward
        found.engine.backward = lambda loss: backward(8 * loss)

    found = failed(examined(store, plant=scale))
    assert set(found) == {"gradient_scale"}


def test_another_learning_rate_in_a_group_is_seen(store):
    def keep_rate(found):
        apply = found.engine.step

        def applying(lr, norm):
            apply(lr, norm)
            found.engine.optimizer.param_groups[1]["lr"] = 3.0

        found.engine.step = applying

    found = failed(examined(store, plant=keep_rate))
    assert set(found) == {"groups"} and "LR 3.0 where" in found["groups"]


def test_a_loss_that_climbs_is_seen(store):
    def uphill(engine):
        for _, gradient in engine.gradient_shards():
            gradient.neg_()

    found = failed(examined(store, plant=lambda s: on_step(s, uphill)))
    assert set(found) == {"overfit", "gradient_scale"} and "it went from" in found["overfit"]


def test_a_buffer_on_another_device_is_named(store):
    def move(found):
        found.engine.model.latent_mean = torch.zeros(3, device="meta")

    assert failed(examined(store, plant=move)) == {
        "device": "latent_mean on meta, the engine on cpu"
    }


def test_fp16_finds_its_loss_scale(store, tmp_path):
    """The first scale is far too large: the overflows it causes are no faults."""
    file, words = tmp_path / "report.json", ("engine.kind=single", "stability.loss_scale=16777216")
    command(store, *words, "--amp_dtype", "fp16", "--overfit_steps", "4", "--json", str(file))
    report = json.loads(file.read_text())
    assert {name: status for name, status in statuses(report).items() if status == FAIL} == {}
    assert all(step["applied"] for step in report["steps"])
    scale = next(row["reason"] for row in report["checks"] if "loss scale" in row["reason"])
    assert float(scale.split("loss scale ")[1]) < 16777216


def test_several_processes_are_refused(store, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one process"):
        command(store)
    with pytest.raises(SystemExit):
        command(store, "--detect_anomaly", "perhaps")


def test_a_fault_gives_exit_code_1_and_strict_json(store, tmp_path, monkeypatch):
    broken_batches(monkeypatch, lambda batch: batch.latents.fill_(float("inf")))
    file = tmp_path / "report.json"
    assert command(store, "engine.kind=single", "--overfit_steps", "2", "--json", str(file)) == 1
    report = json.loads(
        file.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not strict JSON")
    )
    assert (
        not report["ok"]
        and statuses(report)["finite"] == FAIL
        and report["steps"][0]["loss"] == "nan"
    )


def test_a_mixture_of_one_mode_is_no_fault(store):
    """Its other head is trained by weight decay alone, of which a start warns."""
    words = ["training.loss_type_weights={l2t: 1}", "training.freeze=none"]
    found = examined(store, *words, overfit_steps=2)
    assert failed(found) == {}
    (warning,) = found.task.warnings(found.config)
    assert "training.loss_type=l2t training.loss_type_weights=null" in warning
    both = load_config("tiny", None, ["training.loss_type_weights={unconditional: 1}"])
    assert found.task.warnings(both) == []


if __name__ == "__main__":
    main(*sys.argv[1:])
