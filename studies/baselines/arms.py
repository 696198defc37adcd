"""The arms of baselines.py: what is trained, for how long, and what it reached."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Scale:
    """Extent of a comparison: the same for every arm.

    Attributes:
        width, blocks, heads: of every model.
        steps, batch: optimizer steps, texts of a global batch.
        rates: learning rates tried at a tenth of the length; the best trains the arm.
        seeds: of full trainings.
        samples: validation texts that are scored.
    """

    width: int
    blocks: int
    heads: int
    steps: int
    batch: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    samples: int | None

    def words(self) -> list[str]:
        """Arguments that all arms share."""
        return [
            f"model.hidden_size={self.width}",
            f"model.n_blocks={self.blocks}",
            f"model.n_heads={self.heads}",
            "model.max_seq_len=64",
            "model.output_bias_init=frequency",
            "model.token_embedding_scale=8.0",
            f"training.train_batch_size={self.batch}",
            "training.dtype=fp32",
            "engine.kind=single",
            "optimizer.betas=[0.9, 0.98]",
            "logging.plot=false",
            "logging.log_freq=50",
            "data.max_validation_samples=256",
        ]


@dataclass(frozen=True)
class Arm:
    """One model. `conditional` arms are given a latent; `own` are its arguments."""

    name: str
    task: str
    conditional: bool
    own: tuple[str, ...] = ()

    def words(self, scale: Scale, double_depth: bool = False) -> list[str]:
        """Arguments of a training but its length, rate, seed and folders."""
        depth = [f"model.n_blocks={2 * scale.blocks}"] if double_depth else []
        own = [word.replace("WIDTH", str(scale.width)) for word in self.own]
        return [f"task={self.task}", *scale.words(), *own, *depth]


_TIME = ("model.reads_time=true", "model.cond_dim=WIDTH")
ARMS = (
    Arm("ar", "ar", False, ("model.conditioning=none",)),
    Arm("mdlm", "mdlm", False, ("model.cond_dim=WIDTH",)),
    # It reads the timestep, as GIDD, HDLM and the latent DiTs do.
    Arm("mdlm_time", "mdlm", False, _TIME),
    Arm("gidd", "gidd", False, ("model.cond_dim=WIDTH", "text_diffusion.uniform_share=0.1")),
    Arm("gidd_masks", "gidd", False, ("model.cond_dim=WIDTH", "text_diffusion.uniform_share=0")),
    Arm("hdlm", "hdlm", False, ("model.cond_dim=WIDTH",)),
    Arm("ar_prefix", "ar", True, ("model.conditioning=prefix",)),
    Arm("latent_dit_adaln", "mdlm", True, ("model.conditioning=adaln", *_TIME)),
    Arm(
        "latent_dit_cross_attention", "mdlm", True, ("model.conditioning=cross_attention", *_TIME)
    ),
    Arm("latent_dit_tokens", "mdlm", True, ("model.conditioning=prefix", *_TIME)),
    Arm("mmdit", "translation", True, ("training.loss_type=l2t", "model.cond_dim=WIDTH")),
)


def known_arms() -> list[Arm]:
    """The arms whose task this version has."""
    from mmldlm.config.task_names import TASK_NAMES as TASKS

    return [arm for arm in ARMS if arm.task in TASKS]


def train(words: list[str], folder: Path, name: str) -> float:
    """Train in a process of its own with one thread; return its CPU seconds.

    Exits this program if it fails.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mmldlm.train",
            *words,
            f"logging.save_dir={folder}",
            f"logging.run_name={name}",
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise SystemExit(
            f"training {name} ended with exit code {done.returncode}:\n{done.stdout[-3000:]}"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def length_words(steps: int, rate: float, seed: int) -> list[str]:
    """Arguments of a training's length and rate, evaluated and saved at its end."""
    return [
        f"training.num_train_steps={steps}",
        f"optimizer.lr={rate}",
        f"optimizer.warmup_steps={max(steps // 20, 1)}",
        f"training.seed={seed}",
        f"logging.save_freq={steps}",
        f"logging.eval_freq={steps}",
    ]


def best_rate(arm: Arm, scale: Scale, store: str, folder: Path, double_depth: bool) -> float:
    """The rate with the lowest validation NELBO or NLL after a tenth of the steps."""
    if len(scale.rates) == 1:
        return scale.rates[0]
    found = {}
    for rate in scale.rates:
        name = f"{arm.name}_rate_{rate:g}"
        words = [
            *arm.words(scale, double_depth),
            *length_words(max(scale.steps // 10, 1), rate, 0),
        ]
        train([*words, f"data.latent_data_root={store}"], folder, name)
        record = json.loads((folder / name / "eval_log.jsonl").read_text().splitlines()[-1])
        mode = "l2t" if arm.conditional else "unconditional"
        found[rate] = next(
            record[key] for key in (f"{mode}_nelbo", f"{mode}_nll") if key in record
        )
    return min(found, key=lambda rate: found[rate])


def costs(arm: Arm, scale: Scale, store: str, double_depth: bool) -> dict[str, float]:
    """Parameters (all, and without embeddings and text head), and training FLOPs of a text
    token.
    """
    import numpy as np

    from mmldlm.tasks.registry import find_task, load_config

    words = [*arm.words(scale, double_depth), f"data.latent_data_root={store}"]
    config = load_config(None, None, words)
    task = find_task(config.task)
    data = task.open_data(config)
    model = task.build_model(data)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    wide = sum(
        n
        for name, n in counts.items()
        if "token_embedding" in name or name.startswith("text_head.weight")
    )
    batch = data.training_plan(scale.batch).batch(0)
    collated: Any = task.collator(data).collate(
        batch, np.arange(len(batch.ids)), data.train, data.train_lengths
    )
    scored = float(len(collated.text_targets))
    sums = {"text_masked": scored, "text_scored": scored, "text_logits": 0.0}
    flops = task.training_flops(data.config, len(batch.ids), collated.num_tokens, sums)
    total = sum(counts.values())
    return {
        "parameters": total,
        "without_vocabulary": total - wide,
        "flops_a_token": flops / collated.num_tokens,
    }
