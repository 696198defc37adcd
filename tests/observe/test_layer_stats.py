"""Figures of gradients, updates and activations: the same under every engine as in one process.

As a script: what the ranks run, THIS STORE FOLDER.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch

from mmldlm.data.batch_plan import BatchPlan
from mmldlm.data.loader import MicroBatches
from mmldlm.engines.build import build_engine
from mmldlm.models import MultimodalMMDiT
from mmldlm.observe.layer_stats import (
    DEAD_AFTER_REPORTS,
    LayerStatsCollector,
    adamw_update,
    layers_of,
)
from mmldlm.tasks.registry import load_config
from mmldlm.tasks.translation.data import open_data
from mmldlm.tasks.translation.noiser import Noiser
from mmldlm.tasks.translation.objective import TranslationObjective
from mmldlm.tasks.translation.parameter_plan import parameter_plan
from tests.support.helpers import run_ranks

ENGINES = {
    "ddp": ["engine.kind=ddp"],
    "fsdp": ["engine.kind=fsdp"],
    **{f"zero{stage}": [f"engine.zero_stage={stage}"] for stage in range(4)},
}
BF16 = ("fsdp", "zero1", "zero2", "zero3")  # ZeRO-1 runs another optimizer in bf16
GLOBAL_BATCH, NUM_STEPS, BAD_STEP, LR = 8, 4, 3, 1e-3


def steps(
    store: str,
    accum: int,
    words: list[str],
    frozen: str = "unconditional",
    num_steps: int = NUM_STEPS,
):
    """Real steps of the tiny preset, all looked at; BAD_STEP has a NaN in one sample's latent and
    is thrown away.

    Returns:
        (looks, parameter -> norm of its change over each applied step, as the weights themselves
        say)
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    micro = GLOBAL_BATCH // world // accum
    common = [
        f"data.latent_data_root={store}",
        f"training.train_batch_size={micro}",
        f"training.loss_type={frozen}",
    ]
    common += [
        f"training.grad_accum_steps={accum}",
        "training.freeze=by_mode",
        "training.condition_dropout=0.3",
    ]
    data = open_data(load_config("tiny", None, [*common, *words]))
    config = data.config
    torch.manual_seed(0)
    model = MultimodalMMDiT(config.model)
    parameters = parameter_plan(model, config)
    parameters.set_requires_grad(model)
    engine = build_engine(model, config, parameters)
    plan = BatchPlan(data.train_lengths, GLOBAL_BATCH, 0)
    batches = MicroBatches(
        data.train,
        plan,
        Noiser(config, data.latent_mean, data.latent_std),
        engine.rank,
        world,
        accum,
    )
    objective, diagnostics = TranslationObjective(config), LayerStatsCollector(engine, 1)
    engine.module.train()
    looks, moved = [], []
    for step in range(1, num_steps + 1):
        diagnostics.before_forward(step)
        for micro in range(accum):
            batch = batches[(step - 1) * accum + micro]
            if step == BAD_STEP and micro == 0 and engine.rank == 0:
                batch.latents[0] = float("nan")
            loss, _ = objective(engine.module, batch.to(engine.device))
            engine.backward(loss)
        norm = engine.grad_norm().item()
        diagnostics.before_step()
        fragments = [fragment for fragment in engine.parameter_shards() if fragment.count]
        before = [fragment.slice_of(fragment.owner).clone() for fragment in fragments]
        apply = math.isfinite(norm)
        engine.step(LR, norm) if apply else engine.discard_gradients()
        squares = dict.fromkeys(diagnostics.names, 0.0)
        for fragment, old in zip(fragments, before, strict=True):
            if engine.saves_shards:
                squares[fragment.name] += float(
                    (fragment.slice_of(fragment.owner).double() - old.double()).square().sum()
                )
        values = (
            engine.all_reduce_sum(torch.tensor(list(squares.values()), dtype=torch.float64))
            .sqrt()
            .tolist()
        )
        moved.append(dict(zip(squares, values, strict=True)))
        look = diagnostics.after_step(LR, apply)
        total = math.sqrt(math.fsum(figures.grad_norm**2 for figures in look.parameters.values()))
        assert not apply or total == pytest.approx(norm, rel=1e-3), (words, step, norm, total)
        looks.append(look)
    return looks, moved


def main(store: str, folder: str) -> None:
    from mmldlm.distributed.error_reporting import leave_process_group

    for dtype in ("fp32", "bf16"):
        for name, words in ENGINES.items():
            if dtype == "bf16" and name not in BF16:
                continue
            looks, moved = steps(store, 2, [*words, f"training.dtype={dtype}"])
            if int(os.environ["RANK"]) == 0:
                told = [dataclasses.asdict(look) for look in looks]
                Path(folder, f"{dtype}_{name}.json").write_text(
                    json.dumps({"looks": told, "moved": moved}), encoding="utf-8"
                )
    leave_process_group()


@pytest.fixture(scope="module")
def two_ranks(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagnostics")
    done = run_ranks(2, __file__, str(store), str(folder), timeout=400)
    assert done.returncode == 0, done.stdout[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_sharded_figures_are_those_of_one_process(store, two_ranks):
    expected, _ = steps(str(store), 1, ["engine.kind=single", "training.dtype=fp32"])
    assert [look.applied for look in expected] == [True, True, False, True]
    assert set(two_ranks) == {f"fp32_{name}" for name in ENGINES} | {
        f"bf16_{name}" for name in BF16
    }
    for engine in ENGINES:
        for look, found in zip(expected, two_ranks[f"fp32_{engine}"]["looks"], strict=True):
            assert (found["step"], found["applied"]) == (look.step, look.applied)
            assert list(found["parameters"]) == list(look.parameters)
            for name, figures in look.parameters.items():
                where, other = (engine, look.step, name), found["parameters"][name]
                assert other["numel"] == figures.numel, where
                # The poisoned text is padded in a batch of eight and not in one of two: the row of
                # [PAD], 64 wide.
                row = 64 if "token_embedding" in name else 0
                assert abs(other["num_nonfinite"] - figures.num_nonfinite) in (0, row), where
                # A sum that cancels to an exact zero in one order may not in another.
                assert other["num_zeros"] == pytest.approx(
                    figures.num_zeros, abs=1 + 1e-3 * figures.numel
                ), where
                for key in ("grad_norm", "weight_norm", "update_norm"):
                    value = getattr(figures, key)
                    same = (
                        None
                        if value is None
                        else pytest.approx(value, rel=2e-3, abs=1e-7, nan_ok=True)
                    )
                    assert other[key] == same, (*where, key)
            for name, figures in look.layers.items():
                rms = found["layers"][name]["activation_rms"]
                if figures.activation_rms is None:
                    assert rms is None, (engine, name)
                    continue
                # Two ranks pad each micro-batch to its own longest text: streams of text hold
                # fewer padded places.
                rel = 0.15 if "text" in name else 1e-4
                assert rms == pytest.approx(figures.activation_rms, rel=rel, nan_ok=True), (
                    engine,
                    look.step,
                    name,
                )


def test_the_poisoned_step_shows_where_and_how_much(two_ranks):
    for name, run in two_ranks.items():
        counts = [
            sum(p["num_nonfinite"] for p in look["parameters"].values()) for look in run["looks"]
        ]
        assert counts[BAD_STEP - 1] > 0 and counts[:2] == [0, 0] and counts[3] == 0, (name, counts)
        assert all(
            p["update_norm"] is None for p in run["looks"][BAD_STEP - 1]["parameters"].values()
        )


def test_bf16_gradients_are_near_those_of_fp32(two_ranks):
    for name in BF16:
        for exact, found in zip(
            two_ranks[f"fp32_{name}"]["looks"], two_ranks[f"bf16_{name}"]["looks"], strict=True
        ):
            if not exact["applied"]:
                continue
            for layer, figures in exact["layers"].items():
                other = found["layers"][layer]
                assert other["grad_norm"] == pytest.approx(
                    figures["grad_norm"], rel=0.2, abs=1e-3
                ), (name, layer)


def test_update_norms_are_what_the_weights_really_did(two_ranks):
    for name, run in two_ranks.items():
        for look, moved in zip(run["looks"], run["moved"], strict=True):
            for parameter, change in moved.items():
                parts = [
                    figures
                    for part, figures in look["parameters"].items()
                    if part.split("[")[0] == parameter
                ]
                where = (name, look["step"], parameter)
                assert len(parts) == (2 if parameter.startswith("blocks.") else 1), where
                norms = [part["update_norm"] for part in parts]
                told = None if None in norms else math.hypot(*norms)
                assert (
                    change == 0
                    if told is None
                    else told == pytest.approx(change, rel=1e-3, abs=1e-8)
                ), where


def test_the_formula_is_torchs_adamw():
    torch.manual_seed(1)
    for decay in (0.0, 0.1):
        weight = torch.nn.Parameter(torch.randn(50))
        optimizer = torch.optim.AdamW(
            [weight], lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=decay
        )
        for _ in range(3):
            before = weight.detach().clone()
            weight.grad = torch.randn(50)
            optimizer.step()
            state, group = optimizer.state[weight], optimizer.param_groups[0]
            found = adamw_update(
                weight.detach(), state["exp_avg"], state["exp_avg_sq"], state["step"], 0.01, group
            )
            torch.testing.assert_close(found, before - weight.detach(), rtol=1e-4, atol=1e-7)


def test_dead_parameters_are_named_once_and_only_them(store, monkeypatch):
    """The text encoder's output is cut off the graph: its parameters get no gradient at all under
    one process.
    """
    from mmldlm.models.mmdit import TextEncoder

    forward = TextEncoder.forward
    monkeypatch.setattr(
        TextEncoder, "forward", lambda self, *given: forward(self, *given).detach()
    )
    monkeypatch.setattr(sys.modules[__name__], "BAD_STEP", 0)
    looks, _ = steps(str(store), 1, ["engine.kind=single"], "mixed", DEAD_AFTER_REPORTS + 2)
    named = {look.step: set(look.dead) for look in looks if look.dead}
    assert named == {
        DEAD_AFTER_REPORTS: {"text_encoder.token_embedding.weight", "text_encoder.null_text"}
    }
    assert looks[-1].layers["text_encoder"].zero_share == 1.0


def test_nothing_happens_on_steps_that_are_not_looked_at(store):
    """Steps in between register no hook, sum nothing and reach no collective (a second rank would
    wait in one).
    """

    class NoCollective:
        world_size, device, saves_shards = 1, torch.device("cpu"), True

        def __init__(self, model):
            self.model = model

        def parameter_shards(self):
            return []

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for interval, due in ((0, []), (3, [3, 6])):
        diagnostics = LayerStatsCollector(NoCollective(model), interval)
        for step in range(1, 7):
            diagnostics.before_forward(step)
            assert bool(model[0]._forward_hooks) == (step in due)
            if step in due:
                diagnostics._step = 0
                diagnostics._activations._stop()
            else:
                diagnostics.before_step()
                assert diagnostics._sums is None and diagnostics.after_step(LR, True) is None


def test_compiled_blocks_are_watched_without_a_hook_inside_them():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Identity()

        def forward(self, x):
            return 2 * x, 3 * x

        @staticmethod
        def split_streams(output, x):
            return output

    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([Block()])
    from mmldlm.observe.layer_stats import ActivationRecorder

    block = model.blocks[0]
    # What Module.compile() sets; compiling for real takes a C++ compiler.
    block._compiled_call_impl = block.forward
    kept = block._compiled_call_impl
    activations = ActivationRecorder(model)
    activations.start()
    block(torch.ones(5))
    assert not block._forward_hooks
    values = activations.rms(activations.collect(torch.device("cpu")).flatten().tolist())
    assert values == pytest.approx({"blocks.0.text": 2.0, "blocks.0.latent": 3.0})
    assert block._compiled_call_impl == kept


def test_layers():
    assert layers_of("blocks.11.to_qkv.weight", 2) == ["blocks.11.text", "blocks.11.latent"]
    assert layers_of("length_head.1.bias", 1) == ["length_head"]


if __name__ == "__main__":
    main(*sys.argv[1:])
