"""One recipe trained to one length, and what it cost and reached: the pieces of speedrun.py.

A finished run leaves `result.json` in its folder and is never trained again; an unfinished one
starts afresh.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The quickstart's preset at commit 2b95890, and the defaults of that commit that a recipe may
# change.
REFERENCE = """
model: {hidden_size: 192, n_blocks: 4, n_heads: 4, cond_dim: 192, mlp_ratio: 4.0, tokens_per_latent: 4,
        max_seq_len: 64, qk_rmsnorm: true, tie_embeddings: true, token_embedding_init: encoder}
text_diffusion: {schedule: loglinear, masking: fixed_count, timesteps: low_discrepancy}
latent_diffusion: {schedule: cosine, prediction: x0, timesteps: low_discrepancy, timestep_shift: 4.0, weighting: unit}
loss: {latent_loss_weight: 3.0, text_loss_weight: 1.0, latent_loss: mse}
training: {loss_type: mixed, loss_type_weights: {l2t: 0.6, t2l: 0.4}, condition_dropout: 0.1, train_batch_size: 96,
           num_train_steps: 1300, dtype: fp32, freeze: none, seed: 0}
optimizer: {kind: adamw, lr: 2.5e-3, min_lr: 2.5e-5, schedule: cosine, warmup_steps: 80, betas: [0.9, 0.98],
            eps: 1.0e-8, weight_decay: 0.01, grad_clip_norm: 1.0}
"""  # noqa: E501
# The quickstart's ranks; one process trains here with the batches of both, in the same order.
RANKS = 2
# Fixed, because timesteps and masks of the evaluation are drawn per batch.
EVALUATION_BATCH = 96
# FLOPs of an element: decay, two moments, their corrections, a root, a quotient and the update.
ADAMW_FLOPS = 16
# FLOPs of an element of a Muon matrix: momentum, look-ahead, scale, decay and update.
MOMENTUM_FLOPS = 9


@dataclass(frozen=True)
class Recipe:
    """What is trained.

    Attributes:
        name: for the screen.
        words: arguments of the training, without length, data and folder.
    """

    name: str
    words: tuple[str, ...]

    def folder(self) -> str:
        """Name of the folder of its runs: another config gets another one."""
        values = self.config().model_dump(mode="json", exclude_defaults=True, exclude={"logging"})
        values["training"].pop("num_train_steps", None)  # the length is that of the run
        return f"{self.name}_{hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]}"  # noqa: E501

    def config(self, *more: str):
        """The config of its words and some more."""
        from mmldlm.tasks.registry import load_config

        kind, value, *overrides = (*self.words, *more)
        return load_config(
            **{{"--config": "path", "--config-name": "name"}[kind]: value}, overrides=overrides
        )


@dataclass(frozen=True)
class Result:
    """A finished run: its cost, and its figures on the complete validation split, in the
    reference's noise.

    Attributes:
        steps: optimizer steps.
        samples: of the validation split, all of them.
        nelbo, gain: l2t NELBO and its gain over the null latent, nats a token.
        error, cosine: t2l squared error (in the space of the prediction) and cosine.
        model_flops: of the FLOP model, forward and backward of all steps. optimizer_flops: of all
            updates.
        cpu_seconds: of the training process, its start and its evaluation included.
    """

    steps: int
    samples: int
    nelbo: float
    gain: float
    error: float
    cosine: float
    model_flops: float
    optimizer_flops: float
    cpu_seconds: float

    @property
    def flops(self) -> float:
        return self.model_flops + self.optimizer_flops

    def line(self) -> str:
        """Format for the screen."""
        tera, optimizer = self.flops / 1e12, self.optimizer_flops / 1e12
        cost = f"{tera:6.2f} TFLOP (optimizer {optimizer:.2f})  {self.cpu_seconds:.0f} CPU s"
        reached = f"NELBO {self.nelbo:.3f}  gain {self.gain:.3f}  t2l cosine {self.cosine:.4f}"
        return f"{self.steps:5} steps  {reached}  {cost}"


def reference_recipe(folder: Path) -> Recipe:
    """The recipe of commit 2b95890; writes its config file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "reference.yaml"
    path.write_text(REFERENCE)
    return Recipe("reference", ("--config", str(path)))


def todays_recipe(overrides: tuple[str, ...] = (), seed: int = 0) -> Recipe:
    """The preset `quickstart` on one process, with the global batch of the quickstart's
    two ranks.
    """
    from mmldlm.tasks.registry import load_config

    batch = RANKS * load_config("quickstart", None, list(overrides)).training.train_batch_size
    words = f"training.train_batch_size={batch}", f"training.seed={seed}"
    return Recipe("today", ("--config-name", "quickstart", *overrides, *words))


def run(recipe: Recipe, store: str, folder: Path, steps: int) -> Result:
    """Train a recipe for so many steps, or read the result of a finished run."""
    digest = hashlib.sha256(Path(store, "manifest.json").read_bytes()).hexdigest()[:8]
    run_dir = folder / f"store-{digest}" / recipe.folder() / f"steps_{steps}"
    done = run_dir / "result.json"
    if not done.exists():
        shutil.rmtree(run_dir, ignore_errors=True)
        words = _words(store, run_dir, steps)
        seconds = _train([*recipe.words, *words], run_dir)
        result = _measure(
            recipe.config(*words, "data.max_validation_samples=null"), run_dir, steps, seconds
        )
        temporary = done.with_suffix(".part")
        temporary.write_text(json.dumps(asdict(result), indent=2) + "\n")
        os.replace(temporary, done)
        shutil.rmtree(run_dir / "checkpoints")
    result = Result(**json.loads(done.read_text()))
    print(f"{recipe.name:10}{result.line()}", flush=True)
    return result


def _words(store: str, run_dir: Path, steps: int) -> list[str]:
    return [
        "engine.kind=single",
        f"data.latent_data_root={store}",
        f"training.eval_batch_size={EVALUATION_BATCH}",
        f"training.num_train_steps={steps}",
        f"logging.save_dir={run_dir.parent}",
        f"logging.run_name={run_dir.name}",
        f"logging.save_freq={steps}",
        f"logging.eval_freq={steps}",
        "data.max_validation_samples=16",  # the evaluation of record follows
        "logging.plot=false",
    ]


def _train(words: list[str], run_dir: Path) -> float:
    """Train in a process of its own, with one thread and the quickstart's allocator; return its
    CPU seconds.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TRIM_THRESHOLD_": "17179869184",
        "MALLOC_TOP_PAD_": "268435456",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "mmldlm.train", *words],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(
            f"training {run_dir} ended with exit code {done.returncode}:\n{done.stdout[-3000:]}"
        )
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _measure(config, run_dir: Path, steps: int, seconds: float) -> Result:
    """Evaluate a trained run and count its FLOPs."""
    from mmldlm.inference.load import load_model
    from mmldlm.tasks.registry import find_task

    task = find_task(config.task)
    data = task.open_data(config)
    model, *_ = load_model(run_dir / "latest")
    figures = _evaluate(task, data, model)
    return Result(
        steps=steps,
        samples=len(data.validation_lengths),
        nelbo=figures["l2t_nelbo"],
        gain=figures["l2t_gain_null"],
        error=figures["t2l_latent_mse"],
        cosine=figures["t2l_latent_cosine"],
        model_flops=model_flops(task, data, steps),
        optimizer_flops=steps * optimizer_flops(task, data, model),
        cpu_seconds=seconds,
    )


def _evaluate(task, data, model) -> dict[str, float]:
    """Figures of the complete validation split, under the timesteps and masks of the reference."""
    from dataclasses import replace

    import yaml

    from mmldlm.engines.build import build_engine

    config = data.config.model_copy(deep=True)
    frozen = yaml.safe_load(REFERENCE)
    for section in ("text_diffusion", "latent_diffusion"):
        for key, value in frozen[section].items():
            # The prediction is the space of the network's output; the cosine is that of its x0.
            if key != "prediction":
                setattr(getattr(config, section), key, value)
    config.training.condition_dropout = frozen["training"]["condition_dropout"]
    config.training.seed = frozen["training"]["seed"]
    engine = build_engine(model, config, task.parameter_plan(model, config))
    return task.validation(replace(data, config=config), engine).run()


def model_flops(task, data, steps: int) -> float:
    """Forward and backward FLOPs of all steps, from the batches themselves."""
    import numpy as np

    plan = data.training_plan(data.config.training.train_batch_size)
    collator, total = task.collator(data), 0.0
    for step in range(steps):
        batch = plan.batch(step)
        noised = collator.collate(batch, np.arange(len(batch.ids)), data.train, data.train_lengths)
        num_scored, candidates = len(noised.text_targets), noised.text_candidates
        num_candidates = 0 if candidates is None else len(candidates)
        sums = {
            "text_masked": float(num_scored),
            "text_logits": float(num_scored * num_candidates),
        }
        total += task.training_flops(data.config, len(batch.ids), noised.num_tokens, sums)
    return total


def optimizer_flops(task, data, model) -> float:
    """FLOPs of one update: Muon's orthogonalizations, and what every element costs."""
    from mmldlm.engines.muon import update_flops

    plan, total = task.parameter_plan(model, data.config), 0.0
    for name, parameter in model.named_parameters():
        if data.config.optimizer.kind == "muon" and name in plan.matrices:
            count = plan.matrices[name]
            rows, columns = parameter.shape[0] // count, parameter.shape[1]
            block_rows = data.config.optimizer.muon_block_rows
            total += (
                count * update_flops(rows, columns, block_rows)
                + MOMENTUM_FLOPS * parameter.numel()
            )
        else:
            total += ADAMW_FLOPS * parameter.numel()
    return total
