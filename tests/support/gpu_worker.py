"""The trainings of tests/integration/test_one_gpu.py, several in one launch.

python -m torch.distributed.run --nproc_per_node=1 tests/support/gpu_worker.py CASE STORE FOLDER

Runs on the GPU if torch sees one, else on the CPU.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mmldlm.distributed.error_reporting import leave_process_group  # noqa: E402
from mmldlm.tasks.registry import load_config  # noqa: E402
from mmldlm.train import check_run, train  # noqa: E402

ENGINES = {
    "single": ["engine.kind=single"],
    "ddp": ["engine.kind=ddp"],
    "fsdp": ["engine.kind=fsdp"],
    **{f"zero{stage}": [f"engine.zero_stage={stage}"] for stage in range(4)},
}
# Kernels and draws that the tiny preset alone does not reach.
OPTIONS = {
    "muon": ["optimizer.kind=muon", "optimizer.ema_decay=0.9"],
    "dropout": ["model.dropout=0.2", "model.gradient_checkpointing=true"],
    "candidates": ["loss.text_candidates=50", "loss.text_weighting=uniform"],
    "tied": ["model.tie_embeddings=true", "training.grad_accum_steps=2"],
    "images": [
        "task=image_text",
        "data.latent_data_root=FOLDER/images",
        "data.max_validation_samples=null",
        "model.latent_rope=true",
        "training.loss_type_weights={t2i: 0.5, i2t: 0.5}",
    ],
    "codes": [
        "task=image_codes",
        "data.latent_data_root=FOLDER/codes",
        "data.max_validation_samples=null",
        "training.loss_type_weights={t2i: 0.4, i2t: 0.6}",
    ],
}
STEPS, BAD_STEP = 6, 3


def run(store: str, folder: str, name: str, *words: str) -> None:
    """One training of the tiny preset through the product's own loop."""
    common = [
        f"data.latent_data_root={store}",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
        "data.max_validation_samples=16",
        f"training.num_train_steps={STEPS}",
        "logging.eval_freq=100",
        "logging.plot=false",
    ]
    train(check_run(load_config("tiny", None, [*common, *words]), 1))


def engines(store: str, folder: str) -> None:
    """Every engine in fp32 and bf16, with a NaN in one batch."""
    from mmldlm.data import loader

    make = loader.MicroBatches.__getitem__

    def poisoned(self, item):
        batch = make(self, item)
        if item // self.accum == BAD_STEP - 1 and self.plan.shuffle:
            batch.latents[:, 0] = float("nan")
        return batch

    loader.MicroBatches.__getitem__ = poisoned
    for dtype in ("fp32", "bf16"):
        for name, words in ENGINES.items():
            run(store, folder, f"{dtype}_{name}", f"training.dtype={dtype}", *words)


def options(store: str, folder: str) -> None:
    """Every option in one process, in fp32."""
    for name, words in OPTIONS.items():
        words = [word.replace("FOLDER", folder) for word in words]
        run(store, folder, name, "engine.kind=single", *words)


def syncs(store: str, folder: str) -> None:
    """Print, per engine, the places at which the host waits for the GPU at every step."""
    steps, found = 20, {}
    for name in ("single", "fsdp", "zero2"):
        seen: Counter[str] = Counter()

        def record(message, category, filename, lineno, *rest, seen=seen):
            if "synchronizing" not in str(message):
                return
            frames = [f for f in traceback.extract_stack() if "/mmldlm/" in f.filename]
            if not any(frame.name == "train_step" for frame in frames):
                return
            inner = frames[-1]
            seen[f"{inner.name} ({Path(inner.filename).name}: {inner.line})"] += 1

        warnings.simplefilter("always")
        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        words = [
            f"training.num_train_steps={steps}",
            "logging.save_freq=1000",
            "logging.log_freq=50",
        ]
        run(store, folder, f"syncs_{name}", *ENGINES[name], "training.dtype=bf16", *words)
        torch.cuda.set_sync_debug_mode("default")
        found[name] = {place: count for place, count in seen.items() if count >= steps - 2}
    print(json.dumps({"syncs": found}), flush=True)


def compiled(store: str, folder: str) -> None:
    """Compiled blocks on texts of many lengths."""
    for name in ("single", "zero2"):
        words = ["training.compile_model=true", "training.dtype=bf16"]
        run(store, folder, f"compiled_{name}", *ENGINES[name], *words)


def half(store: str, folder: str) -> None:
    """fp16 with a loss scale that overflows first."""
    for name, words in ENGINES.items():
        run(store, folder, f"fp16_{name}", "training.dtype=fp16", *words)


if __name__ == "__main__":
    case, *arguments = sys.argv[1:]
    cases = {f.__name__: f for f in (engines, options, syncs, compiled, half)}
    cases[case](*arguments)
    leave_process_group()
    print(json.dumps({"done": case}))
