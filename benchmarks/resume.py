"""From every engine and world size to every other: is what was loaded what was saved, and do the
losses go on?

    python benchmarks/resume.py [--optimizer muon] [--data STORE] [--quick] [--json FILE]

Each source trains nine steps and saves at the fourth; what its live engine held at that moment
(every master, both moments, EMA, frozen weights and buffers, rank by rank) is kept beside the run.
Each target starts a new run from that checkpoint with weights that were made different first, so
that one which is not loaded is seen. Right after loading, everything that its ranks hold must
equal what was kept, bit for bit, and the weights that the model computes with must be those
masters in the engine's compute precision. Then it takes the five steps that are left: its losses
are compared with the source's own, exactly where engine and world size are the same.

{ddp, fsdp, zero1, zero2, zero3} x world {1, 2} to the same engines x world {1, 2, 4} makes 150
pairs in fp32; some more in bf16, and with frozen groups and EMA, where FSDP2 with two replicas
(hsdp) takes part too. --quick takes a few pairs that use every engine and world size once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _report
import _runs
import _store

ENGINES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
SOURCE_WORLDS, TARGET_WORLDS = (1, 2), (1, 2, 4)
SAVE_STEP, LAST_STEP = 4, 9
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}
VARIANTS = {
    "fp32": ["training.dtype=fp32"],
    "bf16": ["training.dtype=bf16"],
    "frozen": [
        "training.dtype=fp32",
        "training.loss_type=l2t",
        "training.freeze=by_mode",
        "optimizer.ema_decay=0.9",
    ],
}
# Every engine is left and reached, and every world size; one engine in one place twice, where the
# losses must be equal. A source that two pairs share is trained once.
QUICK = """
fp32 ddpx1 zero3x4
fp32 zero1x2 fsdpx2
fp32 zero3x2 zero1x1
bf16 zero2x2 zero2x2
bf16 zero2x2 ddpx2
frozen fsdpx2 zero3x2
"""


@dataclass(frozen=True)
class Place:
    """Where a run takes place."""

    engine: str
    world_size: int

    @staticmethod
    def parse(word: str) -> Place:
        """What str gives: zero2x4 is ZeRO-2 on four ranks."""
        engine, world_size = word.rsplit("x", 1)
        return Place(engine, int(world_size))

    def __str__(self) -> str:
        return f"{self.engine}x{self.world_size}"


def pairs_of(quick: bool) -> list[tuple[str, Place, Place]]:
    """(variant, source, target) of all pairs."""

    if quick:
        chosen = [tuple(line.split()) for line in QUICK.strip().splitlines()]
        return [
            (variant, Place.parse(source), Place.parse(target))
            for variant, source, target in chosen
        ]
    sources = [Place(engine, world) for engine in ENGINES for world in SOURCE_WORLDS]
    targets = [Place(engine, world) for engine in ENGINES for world in TARGET_WORLDS]
    pairs = [("fp32", source, target) for source in sources for target in targets]
    for variant in ("bf16", "frozen"):
        for number, word in enumerate(("ddpx1", "fsdpx2", "zero1x2", "zero2x2", "zero3x2")):
            source = Place.parse(word)
            pairs += [(variant, source, target) for target in [*targets[number::5], source]]
        hsdp, zero = Place("hsdp", 4), Place("zero2", 2)
        pairs += [(variant, hsdp, zero), (variant, zero, hsdp)]
    return list(dict.fromkeys(pairs))


# -- in the ranks ---------------------------------------------------------------------------------


def held(engine, average) -> dict[str, tuple[int, Any]]:
    """`state|name` -> (first element, values on the host) of everything that a resume must bring
    back to this rank.
    """
    import numpy as np

    from mmldlm.engines.base import persistent_buffers

    found = {}
    states = engine.optimizer_state()
    for fragment in engine.parameter_shards():
        state = states[fragment.owner]
        found[f"weight|{fragment.name}"] = (
            fragment.start,
            fragment.slice_of(fragment.owner).float().numpy().copy(),
        )
        for what in {"exp_avg", "exp_avg_sq"} & state.keys():  # Muon keeps one
            found[f"{what}|{fragment.name}"] = (
                fragment.start,
                fragment.slice_of(state[what]).numpy().copy(),
            )
        found[f"step|{fragment.name}"] = (
            fragment.start,
            np.full(fragment.count, float(state["step"]), np.float32),
        )
    for fragment in engine.frozen_shards():
        found[f"frozen|{fragment.name}"] = (
            fragment.start,
            fragment.slice_of(fragment.owner).float().numpy().copy(),
        )
    for name, buffer in persistent_buffers(engine.model).items():
        found[f"buffer|{name}"] = 0, buffer.float().reshape(-1).numpy().copy()
    if average is not None:
        for fragment, values in zip(average._shards, average.values, strict=True):
            found[f"ema|{fragment.name}"] = fragment.start, values.numpy().copy()
    return {key: (start, values) for key, (start, values) in found.items() if values.size}


def keep_what_is_saved(folder: Path) -> None:
    """At SAVE_STEP, just before the product saves, write what this rank's live engine holds to
    folder.
    """
    import numpy as np

    from mmldlm.training.checkpointer import Checkpointer

    save = Checkpointer.save

    def keep_and_save(self):
        if self.state.step == SAVE_STEP:
            found = held(self.engine, self.average)
            folder.mkdir(parents=True, exist_ok=True)
            arrays = {f"{key}|{start}": values for key, (start, values) in found.items()}
            np.savez(folder / f"rank{self.engine.rank}.npz", **arrays)
        return save(self)

    Checkpointer.save = keep_and_save


def read_kept(folder: Path) -> dict[str, Any]:
    """`state|name` -> all its elements, put together from the ranks' files."""
    import numpy as np

    parts: dict[str, dict[int, Any]] = {}
    for path in folder.glob("rank*.npz"):
        with np.load(path) as file:
            for key in file.files:
                whole, start = key.rsplit("|", 1)
                parts.setdefault(whole, {})[int(start)] = file[key]
    kept: dict[str, Any] = {}
    for whole, pieces in parts.items():
        end = 0
        for start in sorted(pieces):
            assert start == end, f"the live ranks' pieces of {whole} leave a gap or overlap"
            end += pieces[start].size
        kept[whole] = np.concatenate([pieces[start] for start in sorted(pieces)])
    return kept


def check_what_is_loaded(kept_in: Path, report: Path) -> None:
    """After the product has loaded, compare what this rank holds with what the source held; write
    what differs.
    """
    from mmldlm.engines import build
    from mmldlm.training.checkpointer import Checkpointer

    make, load = build.build_engine, Checkpointer.load

    def make_from_other_weights(model, config, plan):
        import torch

        generator = torch.Generator().manual_seed(20_000)
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data.add_(torch.randn(tensor.shape, generator=generator))
        return make(model, config, plan)

    def load_and_check(self, checkpoint):
        before = {id(p) for p in self.engine.model.parameters()}
        load(self, checkpoint)
        assert before == {id(p) for p in self.engine.model.parameters()}, (
            "loading replaced a parameter"
        )
        kept = read_kept(kept_in)
        found = held(self.engine, self.average)
        differing = compare(found, kept) + compare_computing_weights(self.engine, kept)
        answer = {
            "differing": differing,
            "held": {key: (start, len(values)) for key, (start, values) in found.items()},
        }
        report.with_name(f"{report.name}_rank{self.engine.rank}.json").write_text(
            json.dumps(answer)
        )

    build.build_engine, Checkpointer.load = make_from_other_weights, load_and_check


def compare(found: dict[str, tuple[int, Any]], kept: dict[str, Any]) -> list[str]:
    """Keys whose bits differ from what was kept.

    A frozen weight that the target keeps in bf16 is compared in bf16.
    """
    import numpy as np
    import torch

    differing = []
    for key, (start, values) in found.items():
        expected = kept.get(key, np.empty(0))[start : start + values.size]
        if key.startswith("frozen|") and not np.array_equal(expected, values):
            expected = torch.from_numpy(expected).bfloat16().float().numpy()
        if expected.tobytes() != values.tobytes():
            differing.append(key)
    return differing


def not_held(answers: list[dict], kept: dict[str, Any]) -> list[str]:
    """Keys of which an element is held by no rank."""
    missing = []
    for key, values in kept.items():
        end = 0
        for start, count in sorted(
            answer["held"][key] for answer in answers if key in answer["held"]
        ):
            end = max(end, start + count) if start <= end else end
        if end < values.size:
            missing.append(f"nobody holds {key}")
    return missing


def compare_computing_weights(engine, kept: dict[str, Any]) -> list[str]:
    """Parameters whose value in the forward pass is not the master in the parameter's precision.

    Collective.
    """
    import torch

    differing = []
    for name, parameter in engine.model.named_parameters():
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                value = parameter.detach().clone()
        else:
            value = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        master = kept[f"weight|{name}" if parameter.requires_grad else f"frozen|{name}"]
        if not torch.equal(value.reshape(-1), torch.from_numpy(master).to(value.dtype)):
            differing.append(f"computes with another {name}")
    return differing


def rank_main(kind: str, folder: str, report: str, words: list[str]) -> None:
    """One rank of a source or a target: the product's own entry, with the two hooks above around
    it.
    """
    import mmldlm.train as product
    from mmldlm.distributed.error_reporting import exit_without_teardown

    if kind == "--source":
        keep_what_is_saved(Path(folder))
    else:
        check_what_is_loaded(Path(folder), Path(report))
    exit_without_teardown(product.main(words))


# -- the whole ------------------------------------------------------------------------------------


class Matrix:
    """Sources are trained once, when first needed; targets one after the other."""

    def __init__(
        self, launcher: _runs.RankServer, data: str, folder: Path, optimizer: str = "adamw"
    ):
        self.launcher, self.data, self.folder, self.optimizer = launcher, data, folder, optimizer
        self._sources: dict[tuple[str, Place], dict[int, float]] = {}
        self.target_script = Path(__file__)

    def _words(self, name: str, variant: str, place: Place, *more: str) -> list[str]:
        steps = [f"training.num_train_steps={LAST_STEP}", "optimizer.warmup_steps=5"]
        own = [
            *steps,
            *VARIANTS[variant],
            *_runs.OPTIMIZERS[self.optimizer],
            *_runs.ENGINES[place.engine],
            *more,
        ]
        return _runs.settings(self.data, self.folder, name, place.world_size, *own)

    def source(self, variant: str, place: Place) -> tuple[str, dict[int, float]]:
        """Name and losses of a source's run."""
        name = f"{variant}_{place}"
        if (variant, place) not in self._sources:
            words = self._words(
                name, variant, place, f"logging.save_freq={SAVE_STEP}", "checkpoints.keep_every=4"
            )
            kept = self.folder / "kept" / name
            self.launcher.run(place.world_size, ["--source", kept, "-", *words], Path(__file__))
            run = self.folder / name
            if not (run / "checkpoints" / f"step_{SAVE_STEP:08d}").is_dir():
                raise SystemExit(
                    f"{name} saved no step {SAVE_STEP}:\n{(run / 'events.jsonl').read_text()}"
                )
            self._sources[variant, place] = _runs.losses(self.folder / name)
        return name, self._sources[variant, place]

    def target(self, variant: str, source: Place, place: Place) -> tuple[bool, bool, str]:
        """Whether everything was loaded to the bit, whether the losses went on, and a line for the
        table.
        """
        source_name, reference = self.source(variant, source)
        name = f"{source_name}_to_{place}"
        checkpoint = self.folder / source_name / "checkpoints" / f"step_{SAVE_STEP:08d}"
        report, kept = self.folder / f"report_{name}", self.folder / "kept" / source_name
        words = self._words(name, variant, place, f"training.resume={checkpoint}")
        ranks = self.launcher.start(
            place.world_size, ["--target", kept, report, *words], self.target_script
        )
        codes = ranks.wait(timeout=600)
        answers = [
            json.loads(path.read_text()) for path in self.folder.glob(f"{report.name}_rank*.json")
        ]
        differing = sorted({key for answer in answers for key in answer["differing"]})
        if len(answers) == place.world_size:
            differing += not_held(answers, read_kept(kept))
        equal = len(answers) == place.world_size and not differing
        bound = 0.0 if source == place else BOUNDS["bf16" if variant == "bf16" else "fp32"]
        difference = _runs.loss_difference(
            _runs.losses(self.folder / name), reference, SAVE_STEP + 1, LAST_STEP
        )
        goes_on = difference <= bound and not any(codes)
        line = (
            f"{variant:7} {source!s:8} -> {place!s:8} {'equal' if equal else 'DIFFERS':8}"
            f" {difference:10.1e}"
        )
        if differing:
            line += f"  {len(differing)} differ: {', '.join(differing[:3])}"
        if any(codes):
            line += f"\nended with {codes}:\n{ranks.output()}"
        # 150 checkpoints would need gigabytes.
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return equal, goes_on, line


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help=_store.HELP)
    parser.add_argument("--optimizer", choices=_runs.OPTIMIZERS, default="adamw")
    parser.add_argument("--quick", action="store_true", help="a few pairs instead of all")
    parser.add_argument("--json", help="write conditions and claims here")
    args = parser.parse_args()
    data, pairs = _store.given_or_made(args.data), pairs_of(args.quick)
    num_unequal = num_failed = 0
    print(
        f"{'variant':7} {'source':8}    {'target':8} {'loaded':8}"
        f" {'largest relative loss difference of 5 steps':>10}"
    )
    with tempfile.TemporaryDirectory() as folder, _runs.RankServer(f"{folder}/output") as launcher:
        matrix = Matrix(launcher, data, Path(folder), args.optimizer)
        for pair in pairs:
            equal, goes_on, line = matrix.target(*pair)
            num_unequal += not equal
            num_failed += not goes_on
            print(line, flush=True)
    claims = [
        _report.claim("resume_pairs_failed", num_failed, "<=", 0),
        _report.claim("params_bit_equal_failed", num_unequal, "<=", 0),
    ]
    used = {"pairs": len(pairs), "global_batch": _runs.GLOBAL_BATCH, "optimizer": args.optimizer}
    return _report.write(args.json, claims, args.quick, preset="tiny", **used)


if __name__ == "__main__":
    if sys.argv[1:2] in (["--source"], ["--target"]):
        kind, folder, report, *words = sys.argv[1:]
        rank_main(kind, folder, report, words)
    sys.exit(main())
