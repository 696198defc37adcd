"""What the loop around a step costs: one network on the same batches under four trainers.

    python benchmarks/trainers.py [--quick] [--rounds R] [--json FILE]

GPT-2 of transformers (4 blocks of 256; examples/own_task) on two ranks under ZeRO-2 with the same
DeepSpeed settings, optimizer and batches: a bare DeepSpeed loop, accelerate, the Trainer of
transformers, and mmldlm with its guard, heartbeat, logs and saves at their defaults. Each loop
reads its batches through the same collator and keeps its own habits otherwise; none saves or
evaluates within the steps that are measured. A figure is CPU seconds a step, summed over both
ranks and all of their threads, the median over rounds in which the trainers take turns; ratios are
of the same round. Equal losses show that all of them trained the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import _report
import _runs
import _store

RANKS, MICRO_BATCH = 2, 8
sys.path[1:1] = [str(_runs.ROOT / "examples" / "own_task")]


class Clock:
    """CPU seconds of this process at the end of each step, and its share of each step's loss."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.losses: list[float] = []

    def end_of_step(self, loss: float | None = None) -> None:
        self.times.append(time.process_time())
        if loss is not None:
            self.losses.append(loss)


class Peer:
    """What a bare loop, accelerate and the Trainer have in common: model, optimizer, batches."""

    def __init__(self, words: list[str]):
        from mmldlm.data.loader import MicroBatches
        from mmldlm.engines.deepspeed_config import CPU_BUCKET, merged_config
        from mmldlm.engines.optimizer import build_optimizer
        from mmldlm.tasks.registry import find_task, load_config
        from mmldlm.train import check_run

        data = check_run(load_config(None, None, words), RANKS)
        config, training = data.config, data.config.training
        task = find_task(config.task)
        self.accum, self.num_steps = training.grad_accum_steps, training.num_train_steps
        self.model = task.build_model(data)
        plan = task.parameter_plan(self.model, config)
        plan.apply(self.model, task.parameter_groups(self.model))
        self.optimizer = build_optimizer(self.model, plan, config.optimizer)
        self.ds_config = merged_config(config, RANKS, CPU_BUCKET)
        rank, order = int(os.environ["RANK"]), data.training_plan(MICRO_BATCH * RANKS * self.accum)
        collator = task.collator(data)
        self.batches = MicroBatches(data.train, order, collator, rank, RANKS, self.accum)
        self._objective = task.objective(config)

    def loss(self, module, batch):
        """This micro-batch's term of the global loss, times what an average over ranks divides."""
        return self._objective(module, batch)[0] * RANKS


def train_bare(words: list[str], clock: Clock) -> None:
    """The loop of DeepSpeed's own tutorial."""
    import deepspeed

    peer = Peer(words)
    deepspeed.init_distributed("gloo", verbose=False)
    engine, *_ = deepspeed.initialize(
        model=peer.model, optimizer=peer.optimizer, config=peer.ds_config
    )
    for step in range(peer.num_steps):
        losses = []
        for micro in range(peer.accum):
            # DeepSpeed divides by the number of accumulated micro-batches.
            loss = peer.loss(engine, peer.batches[step * peer.accum + micro]) * peer.accum
            engine.backward(loss)
            engine.step()
            losses.append(loss.item() / peer.accum / RANKS)
        clock.end_of_step(sum(losses))


def train_accelerate(words: list[str], clock: Clock) -> None:
    """The loop of accelerate's guide to DeepSpeed."""
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin

    peer = Peer(words)
    # On CPUs accelerate would choose no backend, and with cpu=True drop DeepSpeed without a word.
    deepspeed.init_distributed("gloo", verbose=False)
    plugin = DeepSpeedPlugin(hf_ds_config=peer.ds_config)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=peer.accum)
    model, optimizer = accelerator.prepare(peer.model, peer.optimizer)
    for step in range(peer.num_steps):
        losses = []
        for micro in range(peer.accum):
            with accelerator.accumulate(model):
                loss = peer.loss(model, peer.batches[step * peer.accum + micro]) * peer.accum
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item() / peer.accum / RANKS)
        clock.end_of_step(sum(losses))


def train_trainer(words: list[str], clock: Clock) -> None:
    """The Trainer of transformers with a DeepSpeed config."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    peer = Peer(words)

    class StepClock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            clock.end_of_step(sum(losses))
            losses.clear()

    class Named(torch.utils.data.Dataset):  # the Trainer looks for names in a batch
        def __getitem__(self, item):
            return {"batch": peer.batches[item]}

    class Streamed(Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(Named(), batch_size=None, sampler=items)

        def create_optimizer(self, model=None):
            self.optimizer = peer.optimizer
            return self.optimizer

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            # The Trainer divides by the number of accumulated micro-batches.
            loss = peer.loss(model, inputs["batch"]) * peer.accum
            losses.append(loss.item() / peer.accum / RANKS)
            return loss

    losses: list[float] = []
    items = range(peer.num_steps * peer.accum)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=peer.num_steps,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=peer.accum,
            max_grad_norm=peer.ds_config["gradient_clipping"],
            lr_scheduler_type="constant",
            deepspeed=peer.ds_config,
            report_to=[],
            disable_tqdm=True,
        )
        Streamed(peer.model, arguments, callbacks=[StepClock()]).train()


def train_mmldlm(words: list[str], clock: Clock) -> None:
    """The product's own entry."""
    import mmldlm.train as product
    from mmldlm.training.run_logger import RunLogger

    log_step = RunLogger.log_step

    def log_step_and_clock(self, *args):
        log_step(self, *args)
        clock.end_of_step()

    RunLogger.log_step = log_step_and_clock
    if code := product.main(words):
        sys.exit(code)


TRAINERS = {
    "bare": train_bare,
    "accelerate": train_accelerate,
    "trainer": train_trainer,
    "mmldlm": train_mmldlm,
}


def rank_main(name: str, report: str, words: list[str]) -> None:
    """One rank of one trainer."""
    from mmldlm.distributed.error_reporting import exit_without_teardown

    clock = Clock()
    TRAINERS[name](words, clock)
    answer = {"times": clock.times, "losses": clock.losses}
    Path(f"{report}_rank{os.environ['RANK']}.json").write_text(
        json.dumps(answer), encoding="utf-8"
    )
    exit_without_teardown(0)


def measure(
    launcher: _runs.RankServer, folder: Path, name: str, run_name: str, accum: int, args
) -> tuple[float, list[float]]:
    """Run a trainer once; return its CPU seconds per step and the losses of all steps."""
    steps = args.steps // accum
    words = [
        "task=gpt2_task:Gpt2Task",
        f"data.text_file={folder / 'lines.txt'}",
        *(f"model.{key}={value}" for key, value in args.model.items()),
        f"training.train_batch_size={MICRO_BATCH}",
        f"training.grad_accum_steps={accum}",
        f"training.num_train_steps={steps}",
        "training.dtype=fp32",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        "engine.kind=deepspeed",
        "engine.zero_stage=2",
        f"logging.save_dir={folder}",
        f"logging.run_name={run_name}",
        "logging.plot=false",
    ]
    report = folder / f"report_{run_name}"
    launcher.run(RANKS, [name, report, *words], Path(__file__).resolve(), timeout=3600)
    ranks = [
        json.loads(Path(f"{report}_rank{rank}.json").read_text(encoding="utf-8"))
        for rank in range(RANKS)
    ]
    if name == "mmldlm":
        losses = [loss for _, loss in sorted(_runs.losses(folder / run_name).items())]
    else:
        losses = [sum(shares) for shares in zip(*(rank["losses"] for rank in ranks), strict=True)]
    first = max(1, steps // 6)  # the steps before warm up
    seconds = sum(rank["times"][-1] - rank["times"][first - 1] for rank in ranks)
    return seconds / (steps - first), losses


def worst_difference(found: list[float], reference: list[float]) -> float:
    """Return the largest relative difference of two runs' losses; infinite for other counts, and
    for NaN.
    """
    if len(found) != len(reference) or any(map(math.isnan, (*found, *reference))):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(found, reference))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two narrow blocks, few steps")
    parser.add_argument("--rounds", type=int, help="times that each trainer runs (3)")
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    if importlib.util.find_spec("accelerate") is None:
        print("cannot measure here: accelerate is not installed (pip install -e '.[bench]')")
        return _report.COULD_NOT_CHECK
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.steps = 24 if args.quick else 144
    args.model = {
        "n_layer": 2 if args.quick else 4,
        "n_embd": 32 if args.quick else 256,
        "n_positions": 128,
    }
    claims, figures, difference = [], {}, 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sentences = _store.stdlib_sentences(1200)
        (folder / "lines.txt").write_text("\n".join(sentences) + "\n", encoding="utf-8")
        with _runs.RankServer(folder / "output") as launcher:
            for accum in (1, 4):
                seconds: dict[str, list[float]] = {name: [] for name in TRAINERS}
                for turn in range(args.rounds):
                    reference: list[float] = []
                    for name in list(TRAINERS)[:: 1 if turn % 2 == 0 else -1]:
                        run_name = f"{name}_{accum}_{turn}"
                        found, losses = measure(launcher, folder, name, run_name, accum, args)
                        seconds[name].append(found)
                        reference = reference or losses
                        difference = max(difference, worst_difference(losses, reference))
                figures[accum] = seconds
                for name, found in seconds.items():
                    ratios = [a / b for a, b in zip(found, seconds["bare"])]
                    print(
                        f"accumulation {accum}  {name:10} {median(found):8.4f} CPU s a step,"
                        f" {median(ratios):.3f} of the bare loop"
                        f" ({min(ratios):.3f} to {max(ratios):.3f})",
                        flush=True,
                    )

    def ratio(numerator: str, denominator: str, worst) -> float:
        return worst(
            median(a / b for a, b in zip(seconds[numerator], seconds[denominator]))
            for seconds in figures.values()
        )

    claims = [
        _report.claim("trainers_loss_difference", difference, "<=", 1e-5),
        _report.claim(
            "mmldlm_over_bare_deepspeed", ratio("mmldlm", "bare", max), "<=", 1.03, measured=True
        ),
        _report.claim(
            "hf_trainer_over_mmldlm", ratio("trainer", "mmldlm", min), ">=", 1.0, measured=True
        ),
    ]
    return _report.write(
        args.json, claims, args.quick, ranks=RANKS, rounds=args.rounds, figures=figures
    )


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in TRAINERS:
        rank_main(sys.argv[1], sys.argv[2], sys.argv[3:])
    sys.exit(main())
