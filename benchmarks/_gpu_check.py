"""Everything that wants a look on a machine with new GPUs, in one command.

    bash launchers/gpu_check.sh [--out DIR] [--minutes 40] [--parts PART ...] [--data STORE]
        [--device cuda|cpu]

Each part runs in processes of its own. After each, DIR/gpu_check.json and DIR/gpu_check.html hold
all that is known. A part that has ended is not run again, so that the same command goes on where
an earlier call stopped; delete DIR/PART to run one again. A part that may not fit into the minutes
is left for another call. With --device cpu everything runs on tiny models: its form, no figures.

Exit codes: 0 every part ended well, 1 one of them failed, 2 usage, 3 parts are left.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import _report
import _runs
import _store
import torch
from all import end

from mmldlm.observe.pages.elements import Column, definitions, element, section, table
from mmldlm.observe.pages.page import titled_page, write_page
from mmldlm.utils.atomic_files import write_json

SIZES = ("quickstart", "small", "mmdit_300m", "mmdit_1b")
ENGINES = {name: _runs.ENGINES[name] for name in ("ddp", "zero1", "zero2", "zero3", "fsdp")}
STEPS, LOG_FREQ, WARM_RECORDS = 30, 5, 2
ENDED_WELL, FAILED = "ended well", "failed"


class PartFailed(Exception):
    """What went wrong in a part, with the end of what its processes printed."""


@dataclass
class Machine:
    """Where and with what the parts run.

    Attributes:
        out: Folder of the results.
        data: Store of texts.
        device: "cuda" or "cpu".
        ranks: Ranks of a training: the GPUs, or two on a CPU.
    """

    out: Path
    data: str
    device: str
    ranks: int

    @property
    def identity(self) -> dict[str, Any]:
        """What results must share to stand in one report."""
        name = torch.cuda.get_device_name() if self.on_gpu else "CPU"
        return {"device": name, "ranks": self.ranks, "data": self.data}

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def run(self, folder: Path, name: str, command: list[str], minutes: float) -> str:
        """Run a command in a session of its own; return what it printed.

        Raises:
            PartFailed: it ended with another code than 0, or not in time.
        """
        log = folder / f"{name}.log"
        variables = dict(os.environ)
        if not self.on_gpu:
            variables |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command,
                cwd=_runs.ROOT,
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(60 * minutes)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process)
        printed = log.read_text(encoding="utf-8", errors="replace")
        if code != 0:
            ended = f"no end after {minutes:g} minutes" if code is None else f"exit code {code}"
            raise PartFailed(f"{name}: {ended}\n{printed[-2000:]}")
        return printed

    def mmldlm(self, folder: Path, name: str, words: list[str], minutes: float = 10) -> str:
        """Run a verb of mmldlm."""
        return self.run(folder, name, [sys.executable, "-m", "mmldlm.cli", *words], minutes)

    def train(self, folder: Path, name: str, preset: str, *words: str, steps: int) -> list[dict]:
        """Train for some steps on all GPUs; return the records of the log."""
        command = ["train", "--nproc", str(self.ranks), "--config-name", preset]
        command += [
            f"data.latent_data_root={self.data}",
            f"logging.save_dir={folder}",
            f"logging.run_name={name}",
            f"training.num_train_steps={steps}",
            "logging.plot=false",
            "logging.eval_freq=1000000",
            "data.max_validation_samples=16",
            *words,
        ]
        self.mmldlm(folder, name, command)
        return _runs.read_log(folder / name)


def environment(machine: Machine, folder: Path) -> list[dict]:
    """GPUs, driver and versions."""
    if not machine.on_gpu:
        return [{"device": "cpu", "cores": os.cpu_count()}]
    rows = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append(
            {
                "device": properties.name,
                "memory_gib": properties.total_memory / 2**30,
                "capability": f"{properties.major}.{properties.minor}",
                "cuda": torch.version.cuda,
                "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            }
        )
    machine.run(folder, "topology", ["nvidia-smi", "topo", "-m"], 1)
    return rows


def preflight(machine: Machine, folder: Path) -> list[dict]:
    """Every check of a run on this machine, with its dry run."""
    words = ["preflight", "--level", "4", "--nproc", str(machine.ranks), "--config-name"]
    words += ["quickstart" if machine.on_gpu else "tiny", f"data.latent_data_root={machine.data}"]
    words += [f"logging.save_dir={folder}"]
    printed = machine.mmldlm(folder, "preflight", words)
    return [{"verdict": printed.strip().splitlines()[-1]}]


def tests(machine: Machine, folder: Path) -> list[dict]:
    """The tests that need a GPU."""
    file = "tests/integration/test_one_gpu.py"
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", file]
    printed = machine.run(folder, "tests", command, 20)
    return [{"verdict": printed.strip().splitlines()[-1].strip("= ")}]


def speed(records: list[dict]) -> dict[str, Any]:
    """Medians of a training's log, without its first records."""
    timed = records[WARM_RECORDS:]
    return {
        "tokens_per_second": median(record["tokens_per_second"] for record in timed),
        "mfu": median(record["mfu"] for record in timed) if "mfu" in records[-1] else None,
        "peak_gib": max(record["peak_memory_gib"] for record in records),
        "loss": records[-1]["loss"],
    }


def sizes(machine: Machine, folder: Path) -> list[dict]:
    """Speed of four presets in bf16 under ZeRO-2, with and without torch.compile."""
    rows = []
    for preset in SIZES if machine.on_gpu else ("tiny",):
        for compiles in (False, True) if machine.on_gpu else (False,):
            name = f"{preset}_compiled" if compiles else preset
            words = ["training.dtype=bf16", f"training.compile_model={str(compiles).lower()}"]
            words += [f"logging.log_freq={LOG_FREQ if machine.on_gpu else 1}"]
            words += ["engine.zero_stage=2", "logging.save_freq=1000000"]
            records = machine.train(
                folder, name, preset, *words, steps=STEPS if machine.on_gpu else 4
            )
            rows.append({"preset": preset, "compiled": compiles, **speed(records)})
    return rows


def engines(machine: Machine, folder: Path) -> list[dict]:
    """The same training under every engine: speed, memory, and a loss that must agree."""
    rows = []
    for name, words in ENGINES.items():
        preset, steps = ("small", STEPS) if machine.on_gpu else ("tiny", 4)
        log_freq = LOG_FREQ if machine.on_gpu else 1
        more = [*words, "training.dtype=bf16", f"logging.log_freq={log_freq}"]
        records = machine.train(folder, name, preset, *more, steps=steps)
        rows.append({"engine": name, **speed(records)})
    losses = [row["loss"] for row in rows]
    if max(losses) - min(losses) > 0.02 * abs(losses[0]):
        raise PartFailed(f"losses of the engines differ by more than 2 %: {rows}")
    return rows


def resume(machine: Machine, folder: Path) -> list[dict]:
    """A run that continues has the losses of one that was never stopped, and converts."""
    rows = []
    preset = "quickstart" if machine.on_gpu else "tiny"
    for name in ("zero2", "fsdp"):
        words = [*ENGINES[name], "logging.log_freq=1", "logging.save_freq=4"]
        whole = machine.train(folder, f"{name}_whole", preset, *words, steps=8)
        checkpoint = folder / f"{name}_whole" / "checkpoints" / "step_00000004"
        words.append(f"training.resume={checkpoint}")
        resumed = machine.train(folder, f"{name}_resumed", preset, *words, steps=8)
        ours, theirs = ({line["step"]: line["loss"] for line in log} for log in (resumed, whole))
        worst = _runs.loss_difference(ours, theirs, 5, 8)
        run = folder / f"{name}_resumed" / "latest"
        machine.mmldlm(folder, f"{name}_convert", ["convert", str(run), str(folder / name)])
        if worst > 1e-3:
            raise PartFailed(f"{name}: losses after resuming differ by {worst:.1e}")
        rows.append({"engine": name, "largest_relative_difference": worst})
    return rows


def benchmark(name: str, *words: str) -> Callable[[Machine, Path], list[dict]]:
    """A benchmark of this folder; its claims are the rows."""

    def part(machine: Machine, folder: Path) -> list[dict]:
        report = folder / "report.json"
        command = [sys.executable, f"benchmarks/{name}.py", "--device", machine.device, *words]
        command += ["--json", str(report)] + ([] if machine.on_gpu else ["--quick"])
        if name != "step":
            command += ["--data", machine.data]
        try:
            machine.run(folder, name, command, 20)
        except PartFailed:
            if not report.exists():  # a claim that fails is a figure, not a failure
                raise
        claims = json.loads(report.read_text(encoding="utf-8"))["claims"]
        return [{"claim": _report.line(claim, not machine.on_gpu).strip()} for claim in claims]

    part.__doc__ = f"benchmarks/{name}.py."
    return part


def quickstart(script: str) -> Callable[[Machine, Path], list[dict]]:
    """One of the quickstarts; without a GPU its first step alone."""

    def part(machine: Machine, folder: Path) -> list[dict]:
        if not machine.on_gpu:
            return [{"verdict": "not run: it takes half an hour on a CPU"}]
        command = ["env", f"OUT={folder / 'out'}", "bash", f"launchers/{script}.sh"]
        printed = machine.run(folder, script, command, 25)
        return [{"verdict": line} for line in printed.strip().splitlines()[-12:]]

    part.__doc__ = f"bash launchers/{script}.sh, with the claims at its end."
    return part


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        run: Function of the machine and the part's folder that returns rows of figures.
        minutes: Minutes that it may take on one GPU.
    """

    run: Callable[[Machine, Path], list[dict]]
    minutes: float


PARTS = {
    "environment": Part(environment, 0.2),
    "preflight": Part(preflight, 2),
    "tests": Part(tests, 6),
    "engines": Part(engines, 4),
    "sizes": Part(sizes, 7),
    "resume": Part(resume, 3),
    "memory": Part(benchmark("memory"), 5),
    "step": Part(benchmark("step"), 3),
    "quickstart": Part(quickstart("quickstart"), 5),
    "quickstart_images": Part(quickstart("quickstart_images"), 5),
}


@dataclass
class Result:
    """How a part ended.

    Attributes:
        verdict: ENDED_WELL or FAILED.
        seconds: Its wall time.
        rows: Its figures.
        error: What went wrong.
        machine: Where it ran (`Machine.identity`).
    """

    verdict: str
    seconds: float
    rows: list[dict] = field(default_factory=list)
    error: str | None = None
    machine: dict[str, Any] = field(default_factory=dict)


def run_part(part: Part, machine: Machine, folder: Path) -> Result:
    """Run a part in its folder, which is emptied; what goes wrong is part of the result."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()
    try:
        rows, error = part.run(machine, folder), None
    except PartFailed as failure:
        rows, error = [], str(failure)
    except Exception:  # the other parts still run
        rows, error = [], traceback.format_exc()
    seconds = time.monotonic() - started
    verdict = FAILED if error else ENDED_WELL
    return Result(verdict, round(seconds, 1), rows, error, machine.identity)


def results_of(machine: Machine) -> dict[str, Result]:
    """Return the parts that have ended well on this machine, by name; others run again."""
    found = {}
    for name in PARTS:
        path = machine.out / name / "result.json"
        if path.exists():
            result = Result(**json.loads(path.read_text(encoding="utf-8")))
            if result.verdict == ENDED_WELL and result.machine == machine.identity:
                found[name] = result
    return found


def write_reports(machine: Machine, results: dict[str, Result]) -> None:
    """Write all that is known into one JSON and one page."""
    left = [name for name in PARTS if name not in results]
    conditions = _report.conditions(
        device=machine.device, ranks=machine.ranks, parts_left=", ".join(left) or "none"
    )
    parts = {name: vars(result) for name, result in results.items()}
    write_json(
        machine.out / "gpu_check.json", {"conditions": conditions, "parts": parts}, indent=2
    )
    sections = [part_section(name, result) for name, result in results.items()]
    told = definitions([(key, str(value)) for key, value in conditions.items()])
    write_page(machine.out / "gpu_check.html", titled_page("GPU check", [], [told, *sections]))


def part_section(name: str, result: Result):
    """Return a part of the page."""
    said = f"{result.verdict} in {result.seconds:.0f} s"
    if result.error:
        return section(name, element("p", said), element("pre", result.error))
    measured = (key for row in result.rows for key, value in row.items() if value is not None)
    keys = list(dict.fromkeys(measured))
    rows = [[cell(row.get(key)) for key in keys] for row in result.rows]
    columns = [Column(key.replace("_", " "), index > 0) for index, key in enumerate(keys)]
    return section(name, table(said, columns, rows))


def cell(value: Any) -> str:
    """Return a figure as text."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=_runs.ROOT / "runs" / "gpu_check")
    parser.add_argument("--minutes", type=float, default=40.0, help="of this call")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--data", help=_store.HELP)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here (--device cpu tries the form on tiny models)")
    return args


def main() -> int:
    args = parse_arguments()
    deadline = time.monotonic() + 60 * args.minutes
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    data = args.data
    if data is None:
        store = out / "store"
        data = str(store) if (store / "manifest.json").exists() else _store.make(out)
    ranks = torch.cuda.device_count() if args.device == "cuda" else 2
    machine = Machine(out, str(Path(data).resolve()), args.device, ranks)
    results = results_of(machine)
    for name in args.parts:
        part = PARTS[name]
        if name in results:
            print(f"{name}: {results[name].verdict} in an earlier call", flush=True)
            continue
        if time.monotonic() + 60 * part.minutes > deadline:
            print(f"{name}: left for another call ({part.minutes:g} minutes)", flush=True)
            continue
        print(f"{name}: running, about {part.minutes:g} minutes on one GPU", flush=True)
        result = results[name] = run_part(part, machine, out / name)
        write_json(out / name / "result.json", vars(result))
        write_reports(machine, results)
        print(f"{name}: {result.verdict}{f': {result.error}' if result.error else ''}", flush=True)
    print(f"results: {out / 'gpu_check.html'} and gpu_check.json")
    if any(result.verdict == FAILED for result in results.values()):
        return 1
    return 3 if any(name not in results for name in args.parts) else 0


if __name__ == "__main__":
    sys.exit(main())
