"""Cost of the guard: CPU time per step with and without it, and host syncs per step.

    python benchmarks/guard_overhead.py [--data STORE] [--quick] [--json FILE]

One process runs the training loop on the preset `mmdit_300m` (--quick: `tiny`) with the guard on
and off in turns (A B B A); off applies every step without a decision, windows or audit. (The sums
that a decision reads are made in both: the log has them.) The ratio is the median over steps, each
compared with that of the same batch; one step's fraction of an audit (1 / stability.audit_freq) is
added to "on".

The windows are short, so that the guard judges every step, and the threshold is so high that it
finds nothing: a step with a finding reads its micro-batches' losses for the record.

Host syncs are counted between the arrival of the batch and the end of the optimizer step: every
tolist(), and every operation whose result or shape the host must read from a tensor. The run that
counts takes the layouts of a GPU: a CPU's loop over texts of equal length reads the lengths. The
check of text_positions (torch.equal), which happens on a CPU only, is not counted. To find any
other read, the model and its objective also run forward and backward on the device `meta`, where
reads are errors: `model_reads_off_cpu`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import _report
import _store

ROOT = Path(__file__).resolve().parent.parent
OPTIMIZER = "optimizer.kind=adamw"  # the cheaper update, so the larger share for the guard
sys.path.insert(0, str(ROOT))


class Meter:
    """CPU seconds and host syncs of each step, from the batch's arrival to the end of
    engine.step.
    """

    def __init__(self):
        self.seconds: list[float] = []
        self.syncs: list[int] = []
        self._started: float | None = None
        self.count = 0

    def arrive(self) -> None:
        self._started, self.count = time.process_time(), 0

    def leave(self) -> None:
        assert self._started is not None
        self.seconds.append(time.process_time() - self._started)
        self.syncs.append(self.count)
        self._started = None


def counting_mode(meter: Meter):
    """A dispatch mode that counts what would wait for a GPU (torch.equal aside: see above)."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            packet = function.overloadpacket
            by_mask = packet in (aten.index, aten.index_put, aten.index_put_) and any(
                index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
            )
            read = torch.Tag.data_dependent_output in function.tags and packet is not aten.equal
            sized = torch.Tag.dynamic_output_shape in function.tags and packet is not aten.index
            meter.count += by_mask or read or sized
            return function(*args, **(kwargs or {}))

    return Count()


def run(args, folder: str, name: str, guarded: bool, count_syncs: bool) -> Meter:
    """Run one short training and measure its steps."""
    import torch

    from mmldlm.distributed.heartbeat import Heartbeat
    from mmldlm.engines.torch_engines import TorchEngine
    from mmldlm.stability.guard import Guard, StepDecision
    from mmldlm.tasks.registry import load_config
    from mmldlm.train import check_run, train

    meter = Meter()
    enter_phase, apply, tolist = Heartbeat.enter_phase, TorchEngine.step, torch.Tensor.tolist

    def record_phase(self, step, phase, *rest):
        if phase == "step":
            meter.arrive()
        return enter_phase(self, step, phase, *rest)

    def applied(self, lr, grad_norm):
        apply(self, lr, grad_norm)
        meter.leave()

    def listed(self):
        meter.count += 1
        return tolist(self)

    words = [
        f"data.latent_data_root={args.data}",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
        "engine.kind=single",
        f"training.num_train_steps={args.steps}",
        f"training.train_batch_size={args.micro}",
        "training.dtype=fp32",
        "data.max_validation_samples=2",
        "logging.save_freq=100000",
        "logging.eval_freq=100000",
        "logging.log_freq=100000",
        "stability.audit_freq=100000",
        "stability.spike_window=4",
        "stability.spike_sigma=1e6",
        "checkpoints.async_save=false",
        "training.freeze=none",
        "training.grad_accum_steps=1",
        "stability.spike_action=log",
        OPTIMIZER,
    ]
    patches: list[Any] = [
        mock.patch.object(Heartbeat, "enter_phase", record_phase),
        mock.patch.object(TorchEngine, "step", applied),
        mock.patch.object(torch.Tensor, "tolist", listed),
    ]
    if not guarded:
        patches.append(
            mock.patch.object(Guard, "decide", lambda self, *values: StepDecision(True))
        )
    for patch in patches:
        patch.start()
    try:
        config = load_config("tiny" if args.quick else "mmdit_300m", None, words)
        if count_syncs:
            layout = mock.patch("mmldlm.models.mmdit.ragged_kind", return_value=None)
            with layout, counting_mode(meter):
                train(check_run(config, 1))
        else:
            train(check_run(config, 1))
    finally:
        for patch in reversed(patches):
            patch.stop()
    # The run's model and optimizer are in reference cycles; two of them fill a small machine.
    gc.collect()
    return meter


def reads_off_cpu() -> int:
    """Of three forms of the model (fp32; bf16; bf16 with ragged attention), those that read a
    tensor off the CPU.
    """
    import torch
    from _reference_steps import Ours, Shape

    shape, num_failed = (
        Shape("padded", depth=2, width=64, length=24, batch=4, fill=0.5, vocab=500, latent=32),
        0,
    )
    for dtype, ragged in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        variant = Ours(shape, dtype)
        variant.model.to("meta")
        variant.batch.to("meta")
        try:
            with mock.patch("mmldlm.models.packing.has_varlen", return_value=ragged):
                variant.loss().backward()
        except (RuntimeError, TypeError) as error:
            num_failed += 1
            print(f"{dtype}, ragged attention {ragged}: the model cannot run on `meta`: {error}")
    return num_failed


def audit_seconds(args, folder: str) -> float:
    """CPU seconds of one audit of the whole training state."""
    import torch

    from mmldlm.engines.build import build_engine
    from mmldlm.models import MultimodalMMDiT
    from mmldlm.stability.audit import audit_on_all_ranks
    from mmldlm.tasks.registry import load_config
    from mmldlm.tasks.translation.data import open_data
    from mmldlm.tasks.translation.parameter_plan import parameter_plan

    words = [
        f"data.latent_data_root={args.data}",
        "engine.kind=single",
        f"logging.save_dir={folder}",
        OPTIMIZER,
    ]
    data = open_data(load_config("tiny" if args.quick else "mmdit_300m", None, words))
    model = MultimodalMMDiT(data.config.model)
    engine = build_engine(model, data.config, parameter_plan(model, data.config))
    states = engine.optimizer_state()
    for shard in engine.parameter_shards():
        states[shard.owner] = {
            key: torch.zeros_like(shard.owner) for key in ("exp_avg", "exp_avg_sq")
        }
    times = []
    for _ in range(3):
        started = time.process_time()
        assert audit_on_all_ranks(engine) == {}
        times.append(time.process_time() - started)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help=_store.HELP)
    parser.add_argument("--quick", action="store_true", help="the tiny preset")
    parser.add_argument(
        "--steps", type=int, default=6, help="steps of one run (the first is not counted)"
    )
    parser.add_argument(
        "--pairs", type=int, help="runs with and without the guard (default 3, --quick 2)"
    )
    parser.add_argument("--micro", type=int, default=4, help="samples per step")
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    args.data = _store.given_or_made(args.data)
    pairs = args.pairs or (2 if args.quick else 3)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(pairs):
            for guarded in (True, False) if pair % 2 == 0 else (False, True):
                name = f"pair{pair}_{'on' if guarded else 'off'}"
                seconds[guarded] += run(args, folder, name, guarded, count_syncs=False).seconds[1:]
        syncs = run(args, folder, "syncs", True, count_syncs=True).syncs[1:]
        audit_fraction = audit_seconds(args, folder) / 500
    on, off = statistics.median(seconds[True]), statistics.median(seconds[False])
    print(
        f"CPU seconds per step: guard on {on:.4f}, off {off:.4f}; a 500th of an audit"
        f" {audit_fraction:.6f}"
    )
    # The same step of two runs has the same batch.
    ratio = statistics.median(a / b for a, b in zip(seconds[True], seconds[False], strict=True))
    print(f"host syncs per step: {syncs}")
    claims = [
        _report.claim("guard_cpu_ratio", ratio + audit_fraction / off, "<=", 1.02, measured=True),
        _report.claim("host_syncs_per_step", max(syncs), "<=", 1),
        _report.claim("model_reads_off_cpu", reads_off_cpu(), "==", 0),
    ]
    preset = "tiny" if args.quick else "mmdit_300m"
    return _report.write(
        args.json, claims, args.quick, preset=preset, micro_batch=args.micro, pairs=pairs
    )


if __name__ == "__main__":
    sys.exit(main())
