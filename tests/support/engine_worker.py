"""The ranks of tests/integration/test_engines.py: several trainings in one launch, because
starting DeepSpeed is slow.

python -m torch.distributed.run --nproc_per_node=2 tests/support/engine_worker.py CASE STORE FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mmldlm.distributed.error_reporting import leave_process_group
from mmldlm.tasks.registry import load_config  # noqa: E402
from mmldlm.train import check_run, train
from tests.support.run_files import drop_checkpoints

ROOT = Path(__file__).resolve().parents[2]
ENGINES = {
    "ddp": ["engine.kind=ddp"],
    "fsdp": ["engine.kind=fsdp"],
    **{f"zero{stage}": [f"engine.zero_stage={stage}"] for stage in range(4)},
}
DS_CONFIGS = {
    name: [f"engine.deepspeed_config={ROOT / 'ds_configs' / name}.json"]
    for name in ("zero1", "zero2", "zero3")
}
"""Settings of an engine in a file that users start from."""
# What the last batch of an epoch, a mode without masked tokens, or frozen groups do to some ranks.
UNEVEN = {
    # 21 samples in global batches of 8: the last has 5, so two of its four micro-batches of 2 are
    # short or empty.
    "short_epoch": [
        "data.max_train_samples=21",
        "training.grad_accum_steps=2",
        "model.gradient_checkpointing=true",
    ],
    # Whole micro-batches of rows whose text is given: nothing is masked there.
    "sparse_modes": ["training.loss_type_weights={t2l: 0.8, l2t: 0.2}", "training.profile=[2,3]"],
    "frozen_l2t": ["training.freeze=by_mode", "training.loss_type=l2t"],
    # Everything that draws for itself: masks of dropout (with recomputed blocks), noised
    # conditions, hypotheses.
    "options": [
        "task=corrector",
        "data.hypotheses=FOLDER/hypotheses",
        "model.dropout=0.2",
        "model.gradient_checkpointing=true",
        "training.grad_accum_steps=2",
        "latent_diffusion.schedule=decoupled",
        "latent_diffusion.prediction=x0_epsilon",
        "latent_diffusion.weighting=ddm",
        "training.l2t_condition_noise=0.3",
    ],
    # Images of 16 and of 36 latents, a batch of one size each, moved before they are noised.
    "images": [
        "task=image_text",
        "data.latent_data_root=null",
        "data.max_validation_samples=null",
        "data.mixture={FOLDER/images: 2, FOLDER/large: 1}",
        "model.latent_rope=true",
        "data.shift_pixels=1",
        "training.loss_type_weights={t2i: 0.5, i2t: 0.5}",
    ],
    # Images as ids of codes, masked on their own clock; micro-batches without a masked code.
    "codes": [
        "task=image_codes",
        "data.latent_data_root=FOLDER/codes",
        "training.loss_type_weights={t2i: 0.4, i2t: 0.6}",
    ],
    "frozen_t2l": ["training.freeze=by_mode", "training.loss_type=t2l"],
}
LEFT_OUT = {
    # The engines do not know what a batch holds: of texts, images and codes each has some.
    *(("sparse_modes", engine) for engine in ("zero0", "zero1")),
    *(("options", engine) for engine in ("ddp", "zero0", "zero1", "zero2")),
    *(("images", engine) for engine in ("fsdp", "zero0", "zero1", "zero3")),
    *(("codes", engine) for engine in ("ddp", "zero0", "zero1", "zero2")),
    # Other parameters than in l2t, frozen in the same way.
    *(("frozen_t2l", engine) for engine in ("ddp", "zero0", "zero2", "zero3")),
}
"""(case, engine) that is not run."""


def engines_of(case: str) -> dict[str, list[str]]:
    """Engines on which an uneven case runs on two ranks -> their settings."""
    return {name: words for name, words in ENGINES.items() if (case, name) not in LEFT_OUT}


CONVERTED_AFTER_UNEVEN = {
    *(f"frozen_{mode}_{name}" for mode in ("l2t", "t2l") for name in ENGINES),
    *(f"codes_{name}" for name in ("single", "fsdp", "zero3")),
    *(f"options_{name}" for name in ("fsdp", "zero3")),
}
"""Runs of UNEVEN whose checkpoints the test reads."""
BAD_STEP = 3


def run(store: str, folder: str, name: str, *words: str) -> None:
    """One training of the tiny preset through the product's own loop."""
    common = [
        f"data.latent_data_root={store}",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
        "data.max_validation_samples=16",
        "training.train_batch_size=4",
        "logging.eval_freq=100",
        "logging.plot=false",
        "logging.eval_samples=0",
    ]
    train(check_run(load_config("tiny", None, [*common, *words]), int(os.environ["WORLD_SIZE"])))


def nonfinite(store: str, folder: str) -> None:
    """At one step, one rank has a NaN in each latent of its micro-batches, at the next an Inf in
    one row of a gradient behind a finite loss: under every engine in bf16 (or, alone, on the
    single process with which they are compared). In fp32: benchmarks/fault_injection.py.

    Two accumulated micro-batches, a weight that two modules share, and an epoch whose last batch
    is short: where engines go wrong first. ZeRO has the settings of ds_configs/.
    """
    from mmldlm.data import loader
    from mmldlm.engines.deepspeed import DeepSpeedEngine
    from mmldlm.engines.deepspeed_config import CPU_BUCKET
    from mmldlm.models import MultimodalMMDiT

    world, accum = int(os.environ["WORLD_SIZE"]), 2
    make = loader.MicroBatches.__getitem__

    def poisoned(self, item):
        batch = make(self, item)
        # Validation has another plan; only training's last rank at one step is hit.
        if self.rank == world - 1 and item // self.accum == BAD_STEP - 1 and self.plan.shuffle:
            batch.latents[:, 0] = float("nan")
        return batch

    loader.MicroBatches.__getitem__ = poisoned
    forward, calls = MultimodalMMDiT.forward, [0]

    def planted(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        if self.training:
            calls[0] += 1
            if calls[0] == accum * BAD_STEP + 1 and int(os.environ["RANK"]) == world - 1:
                out.latent.register_hook(
                    lambda grad: grad.index_fill(0, grad.new_zeros(1).long(), float("inf"))
                )
        return out

    start = DeepSpeedEngine._init_masters_exactly

    def checked(self, exact):  # what DeepSpeed itself will do: its default buckets are gigabytes
        assert self.stage == 0 or self._engine.zero_reduce_bucket_size() == CPU_BUCKET, self.stage
        start(self, exact)

    MultimodalMMDiT.forward, DeepSpeedEngine._init_masters_exactly = planted, checked
    words = [
        "training.num_train_steps=6",
        "logging.save_freq=6",
        "data.max_train_samples=37",
        f"training.train_batch_size={8 // accum // world}",
        f"training.grad_accum_steps={accum}",
        "model.tie_embeddings=true",
    ]
    if world == 1:
        run(store, folder, "bf16_single", "engine.kind=single", "training.dtype=bf16", *words)
        return
    # ZeRO-3 last: DeepSpeed then replaces torch's linear function in the whole process.
    for name, engine in {**ENGINES, **DS_CONFIGS}.items():
        calls[0] = 0
        run(store, folder, f"bf16_{name}", *engine, "training.dtype=bf16", *words)


def uneven(store: str, folder: str) -> None:
    """Every uneven case on every engine (or, alone, on the single process they are
    compared with).
    """
    world = int(os.environ["WORLD_SIZE"])
    for case, words in UNEVEN.items():
        words = [word.replace("FOLDER", folder) for word in words]
        micro = 8 // world // (2 if "training.grad_accum_steps=2" in words else 1)
        sizes = [
            f"training.train_batch_size={micro}",
            "training.num_train_steps=4",
            "logging.save_freq=4",
        ]
        engines = engines_of(case) if world > 1 else {"single": ["engine.kind=single"]}
        for name, engine in engines.items():
            run(store, folder, f"{case}_{name}", *engine, *words, *sizes)
            if f"{case}_{name}" not in CONVERTED_AFTER_UNEVEN:
                drop_checkpoints(folder, f"{case}_{name}")


RESUMED_BY = {
    "ddp": "zero2",
    "fsdp": "zero3",
    "zero0": "fsdp",
    "zero1": "zero0",
    "zero2": "ddp",
    "zero3": "zero1",
}
"""The engine that continues each engine's checkpoint: every one is left and reached."""


def muon(store: str, folder: str) -> None:
    """Muon on every engine: a NaN at one step, a checkpoint after it, and the rest of the run on
    another engine.
    """
    from mmldlm.data import loader
    from mmldlm.engines import build

    world = int(os.environ["WORLD_SIZE"])
    make_batch, make_engine = loader.MicroBatches.__getitem__, build.build_engine

    def poisoned(self, item):
        batch = make_batch(self, item)
        if self.rank == world - 1 and item // self.accum == BAD_STEP - 1 and self.plan.shuffle:
            batch.latents[:, 0] = float("nan")
        return batch

    def watched(*args):
        engine = make_engine(*args)
        discard = engine.discard_gradients

        def discard_and_compare():
            before = held(engine)
            discard()
            after = held(engine)
            assert before.keys() == after.keys() and all(
                before[key].equal(after[key]) for key in before
            )

        engine.discard_gradients = discard_and_compare
        return engine

    loader.MicroBatches.__getitem__, build.build_engine = poisoned, watched
    words = [
        "optimizer.kind=muon",
        "training.num_train_steps=6",
        "logging.save_freq=4",
        "checkpoints.keep_every=4",
    ]
    words += [
        f"training.train_batch_size={8 // world}",
        "optimizer.warmup_steps=2",
        "training.dtype=fp32",
    ]
    if world == 1:
        run(store, folder, "muon_single", "engine.kind=single", *words)
        return
    for name, engine in ENGINES.items():
        run(store, folder, f"muon_{name}", *engine, *words)
    for name, other in RESUMED_BY.items():
        checkpoint = f"{folder}/muon_{name}/checkpoints/step_00000004"
        run(
            store,
            folder,
            f"muon_{name}_to_{other}",
            *ENGINES[other],
            *words,
            f"training.resume={checkpoint}",
        )
        drop_checkpoints(folder, f"muon_{name}_to_{other}")
        drop_checkpoints(folder, f"muon_{name}")


def held(engine) -> dict[str, torch.Tensor]:
    """Copies of the masters and the optimizer's state on this rank."""
    states, found = engine.optimizer_state(), {}
    for shard in engine.parameter_shards():
        found[shard.name] = shard.slice_of(shard.owner).clone()
        for key, value in states.get(shard.owner, {}).items():
            found[f"{shard.name}.{key}"] = (
                value.clone() if key == "step" else shard.slice_of(value).clone()
            )
    return found


CONVERTED = {
    1: {"muon_single": ["engine.kind=single", "optimizer.kind=muon"]},
    2: {
        "adamw_zero2": ENGINES["zero2"],
        **{f"muon_{name}": [*ENGINES[name], "optimizer.kind=muon"] for name in ("fsdp", "zero3")},
    },
}
"""Number of ranks -> name -> settings of the trainings whose checkpoints tests/checkpoints takes
through every format.
"""


def converted(store: str, folder: str, resumed: str = "") -> None:
    """Four steps, saved after two; with `resumed`, the last two from FOLDER/NAME_converted/latest,
    from other weights than those that the model starts with."""
    from mmldlm.models import MultimodalMMDiT

    initialize = MultimodalMMDiT._initialize

    def other(self):
        initialize(self)
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.add_(torch.rand_like(tensor))

    MultimodalMMDiT._initialize = other if resumed else initialize
    words = [
        "training.num_train_steps=4",
        "logging.save_freq=2",
        "optimizer.ema_decay=0.9",
        "logging.plot=false",
        "logging.eval_samples=0",
    ]
    words += [
        "model.tie_embeddings=true",
        "training.grad_accum_steps=2",
        "training.train_batch_size=2",
    ]
    for name, settings in CONVERTED[int(os.environ["WORLD_SIZE"])].items():
        resume = [f"training.resume={folder}/{name}_converted/latest"] if resumed else []
        run(store, folder, f"{name}_{resumed or 'straight'}", *settings, *words, *resume)


if __name__ == "__main__":
    case, *arguments = sys.argv[1:]
    {"nonfinite": nonfinite, "uneven": uneven, "muon": muon, "converted": converted}[case](
        *arguments
    )
    leave_process_group()
    print(json.dumps({"done": case}))
