"""`mmldlm convert` beside the tools that people use: exact, fast, small, and never a wrong file.

    python benchmarks/convert.py [--quick] [--rounds N] [--large] [--keep DIR] [--json FILE]

Real checkpoints of two ranks are made first (benchmarks/_checkpoints.py): ZeRO-2, ZeRO-3 and FSDP2
of a model of about 98M parameters (1.4M with --quick), with their optimizers. Then, in turns:

* speed: `mmldlm convert` (start-up included, every CRC checked) against DeepSpeed's zero_to_fp32,
  torch's dcp_to_torch, and `dd conv=fsync` of a file as large as the output; and a re-shard with
  the optimizer, ZeRO-2 to ZeRO-3 and ZeRO-3 to ZeRO-2 of four ranks, against ds_to_universal,
  which is what takes DeepSpeed to another world size (the universal form by mmldlm is timed too).
  Ours has its output on the disk when it returns; no peer has, so both are timed in both forms.
  The claims compare both as they come, which is the strictest: ours flushed, the peers not; beside
  are printed the ratios with both on the disk (the peers with a `sync` of the files they wrote)
  and with neither (ours with --no-fsync). dcp_to_torch cannot leave the optimizer out and writes
  it too. No tool finds an output to replace. Medians; CPU seconds are printed beside, because wall
  time on a shared machine is noisy. mmldlm's modules are compiled to bytecode first, as pip does
  with what it installs.
* peak_mib: the largest resident set of any of these conversions; with --large also of a ZeRO-2
  checkpoint of 8 ranks and 1,000M parameters, written by mmldlm's own writer (6 GB, and 4 GB for
  each output); zero_to_fp32 is timed there too, and its ratio printed.
* tensors_unequal: converted weights against the live engines' values, dumped before saving; also
  on the awkward small checkpoints of tests/support/make_zero.py (stages 0 to 3, world sizes 1, 2,
  4; 2 alone with --quick). And the round trip zero2@2 -> zero3@4 -> dcp@1 -> universal -> zero2@2
  of the large ZeRO-2 checkpoint, with its moments, against its beginning; of a small one DeepSpeed
  itself loads the end, in a model of another seed, and must find the loss that the engine had
  which saved it (tests/support/load_zero.py).
* fuzz_wrong_files: flipped bits, cut files, swapped, mixed, renamed rank files, hostile pickles:
  conversions and re-shards that gave other weights or moments than the intact checkpoint, or ran
  what a pickle asked for. DCP's own .metadata has no checksum, so that checkpoint is fuzzed inside
  an mmldlm checkpoint, whose manifest has. And files of other programs: views that torch saves
  with a sign, names of torch's wrappers, one rank's or one shard's file, several models in a
  folder, two files in one: the model's names and bits, or refused.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import _report
from _runs import ROOT, RankServer

HERE = Path(__file__).resolve().parent
SMALL_CASES = (
    "z0_fp32",
    "z0_bf16",
    "z1_bf16",
    "z1_bf16opt",
    "z2_bf16",
    "z2_robin",
    "z2_elastic",
    "z3_bf16",
    "z3_subgroups",
)
LATER = ("z2_later", "z3_later")
FLUSHED, LOOSE = "the same + sync", "mmldlm --no-fsync"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "2",
}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)


def python(*words: str | Path) -> list[str]:
    return [sys.executable, *map(str, words)]


def check(command: list[str]) -> str:
    """Runs a command that must succeed; its output."""
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command[:6])} ... failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        )
    return done.stdout


def measure(command: list[str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak resident MiB of a command that must succeed.

    The peak counts this process too, whose memory a child starts from; so nothing large is
    imported here.
    """
    started = time.perf_counter()
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    errors = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:6])} ... failed:\n{errors.decode()[-3000:]}")
    return wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def convert(source: Path, out: Path) -> list[str]:
    return python("-m", "mmldlm.cli", "convert", source, out, "--force")


# -- speed and memory -----------------------------------------------------------------------------


def tools(name: str, folder: Path, scratch: Path) -> dict[str, tuple[list[str], Path]]:
    """Tool -> its command and what that writes; ours first, and without the flush, then the peer.

    zero2, zero3 and fsdp to weights, reshard2 and reshard3 with the optimizer.
    """
    out, other, loose = scratch / name, scratch / f"{name}_peer", scratch / f"{name}_loose"
    if name.startswith("reshard"):
        source, stage = folder / f"zero{name[-1]}", {"2": "zero3", "3": "zero2"}[name[-1]]
        words = (
            "--input_folder",
            source / "step",
            "--output_folder",
            other / "universal",
            "--inject_missing_state",
        )
        universal, more = scratch / f"{name}_universal", ("--to", stage, "--world", "4")
        return {
            "mmldlm": ([*convert(source, out), *more], out),
            LOOSE: ([*convert(source, loose), *more, "--no-fsync"], loose),
            "ds_to_universal": (
                python("-m", "deepspeed.checkpoint.ds_to_universal", *words),
                other,
            ),
            "mmldlm universal": ([*convert(source, universal), "--to", "universal"], universal),
        }
    source = folder / name
    ours = {
        "mmldlm": (convert(source, out), out),
        LOOSE: ([*convert(source, loose), "--no-fsync"], loose),
    }
    if name == "fsdp":  # zero2, zero3 and 1000M are ZeRO's
        words = ("-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", source, other)
        return {**ours, "dcp_to_torch": (python(*words), other)}
    words = ("-m", "deepspeed.utils.zero_to_fp32", source, other, "-t", "step")
    copy = scratch / "copy"
    return {
        **ours,
        "zero_to_fp32": (python(*words), other),
        "dd": (
            ["dd", f"if={out / 'model.safetensors'}", f"of={copy}", "bs=4M", "conv=fsync"],
            copy,
        ),
    }


def flush(out: Path) -> list[str]:
    """The command that takes what a peer wrote to the disk."""
    return [
        "sync",
        *map(
            str,
            [out] if out.is_file() else sorted(path for path in out.rglob("*") if path.is_file()),
        ),
    ]


def remove(out: Path) -> None:
    shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)


def time_tools(commands: dict[str, tuple[list[str], Path]], rounds: int) -> dict[str, list[float]]:
    """Tool (see tools) -> medians of wall and CPU seconds, and the largest peak in MiB; the peer
    also with FLUSHED.
    """
    peer = list(commands)[2]
    found: dict[str, list] = {}
    for _ in range(rounds):
        for tool, (command, out) in commands.items():
            remove(out)  # nobody replaces anything
            os.sync()  # and nobody waits for what others wrote
            taken = measure(command)
            found.setdefault(tool, []).append(taken)
            if tool == peer:
                more = measure(flush(out))
                found.setdefault(FLUSHED, []).append(
                    (taken[0] + more[0], taken[1] + more[1], taken[2])
                )
            if tool != "mmldlm":
                remove(out)
    middle = {}
    for tool, runs in found.items():
        walls, cpus, mibs = zip(*runs)
        middle[tool] = [median(walls), median(cpus), max(mibs)]
    return middle


def rows_of(name: str, middle: dict[str, list[float]]) -> list[dict]:
    return [
        {"checkpoint": name, "tool": tool, "wall_s": wall, "cpu_s": cpu, "peak_mib": mib}
        for tool, (wall, cpu, mib) in middle.items()
    ]


def speedups(commands: dict, middle: dict[str, list[float]]) -> tuple[float, float, float]:
    """Wall time of the peer over ours: both as they come, both on the disk, neither on the
    disk.
    """
    ours, loose, peer, flushed = (
        middle[name][0] for name in ("mmldlm", LOOSE, list(commands)[2], FLUSHED)
    )
    return peer / ours, flushed / ours, peer / loose


def peak_of(rows: list[dict]) -> float:
    return max(row["peak_mib"] for row in rows if row["tool"].startswith("mmldlm"))


def time_all(
    folder: Path, scratch: Path, rounds: int
) -> tuple[dict[str, tuple[float, ...]], float, list[dict]]:
    """speedups by checkpoint, our time over dd's (the worst), and the rows of the table."""
    ratios, rows, against_dd = {}, [], []
    for name in ("zero2", "zero3", "fsdp", "reshard2", "reshard3"):
        commands = tools(name, folder, scratch)
        middle = time_tools(commands, rounds)
        rows += rows_of(name, middle)
        ratios[name] = speedups(commands, middle)
        if "dd" in commands:
            against_dd.append(middle["mmldlm"][0] / middle["dd"][0])
    return ratios, max(against_dd), rows


def measure_large(
    scratch: Path, rounds: int
) -> tuple[tuple[float, ...], list[dict], tuple[int, int]]:
    """Speedups, rows of the table, and (tensors, unequal), of 1,000M parameters."""
    words = ("synthetic", scratch / "1000M" / "step", "--params", "1000000000", "--ranks", "8")
    check(python(HERE / "_checkpoints.py", *words))
    (scratch / "1000M" / "latest").write_text("step")
    (scratch / "large").mkdir()
    commands = tools("1000M", scratch, scratch / "large")
    middle = time_tools(commands, rounds)
    answer = json.loads(
        check(python(HERE / "_checkpoints.py", "judge-synthetic", scratch / "large" / "1000M"))
    )
    return (
        speedups(commands, middle),
        rows_of("1000M", middle),
        (answer["tensors"], answer["unequal"]),
    )


# -- exactness ------------------------------------------------------------------------------------


def judge(jobs: list[tuple[Path, Path, bool]], scratch: Path) -> tuple[int, int]:
    """Tensors compared, and those that are not the live engine's.

    Args:
        jobs: (what was converted, its truth, whether that is in 16 bits) of each conversion.
    """
    path = scratch / "judged.json"
    path.write_text(
        json.dumps(
            [
                {"out": str(out), "truth": str(truth), "rounded": rounded}
                for out, truth, rounded in jobs
            ]
        )
    )
    answers = [
        json.loads(line)
        for line in check(python(HERE / "_checkpoints.py", "judge", path)).splitlines()
    ]
    for (_, truth, _), answer in zip(jobs, answers, strict=True):
        if answer["unequal"]:
            print(f"unequal in {truth.parent.name}: {answer['names']}")
    return tuple(sum(answer[key] for answer in answers) for key in ("tensors", "unequal"))


def small_checkpoints(server: RankServer, folder: Path, world_sizes: tuple[int, ...]) -> None:
    script = ROOT / "tests" / "support" / "make_zero.py"
    for world_size in world_sizes:
        cases = ",".join([*SMALL_CASES, *(LATER if world_size == 2 else ())])
        words = ["--out", folder / f"world{world_size}", "--cases", cases]
        server.run(world_size, words, script)
    server.run(2, ["--out", folder / "small_fsdp"], script.with_name("make_fsdp.py"))


def compare_all(folder: Path, scratch: Path, world_sizes: tuple[int, ...]) -> tuple[int, int]:
    """Tensors compared, and those that are not the live engine's."""
    jobs = [
        (scratch / name, folder / name / "truth.pt", False) for name in ("zero2", "zero3", "fsdp")
    ]
    for world_size in world_sizes:
        for case in SMALL_CASES:
            source, out = folder / f"world{world_size}" / case, scratch / f"{case}@{world_size}"
            check(convert(source, out))
            # Under round robin DeepSpeed's own getter of masters is wrong: there the model's
            # weights are the truth.
            jobs.append((out, source / "truth.npz", "robin" in case))
    return judge(jobs, scratch)


CHAIN = (("zero3", 4), ("dcp", 1), ("universal", None), ("zero2", 2))


def round_trip(source: Path, scratch: Path) -> Path:
    """The end of the chain."""
    path = source
    for number, (target, world) in enumerate(CHAIN):
        out = scratch / f"chain{number}"
        more = ["--world", str(world)] if world else []
        check([*convert(path, out), "--to", target, *more])
        if number:
            shutil.rmtree(path)
        path = out
    return path


def compare_round_trips(server: RankServer, folder: Path, scratch: Path) -> tuple[int, int]:
    """Tensors and moments compared, and those that are not the same bits; a loss that is not is
    one more.
    """
    end = round_trip(folder / "zero2", scratch)
    words = ("-m", "mmldlm.cli", "convert", "diff", folder / "zero2", end, "--optimizer")
    said = subprocess.run(
        python(*words), env=ENVIRONMENT, capture_output=True, text=True
    ).stdout.splitlines()[-1:]
    found = re.fullmatch(r"(\d+) tensors equal, (\d+) differ, (\d+) in one alone", "".join(said))
    if found is None:
        raise SystemExit(f"no comparison of {folder / 'zero2'} with {end}: {said}")
    equal, differing, absent = map(int, found.groups())
    shutil.rmtree(end)
    small = folder / "world2" / "z2_bf16"
    job = {
        "folder": str(round_trip(small, scratch)),
        "tag": "zero",
        "stage": 2,
        "universal": False,
        "like": str(small),
    }
    (scratch / "jobs.json").write_text(json.dumps([job]))
    script = ROOT / "tests" / "support" / "load_zero.py"
    ranks = server.start(2, [scratch / "jobs.json"], script)
    goes_on = not any(ranks.wait(600)) and "loaded 0" in ranks.output()
    if not goes_on:
        print(f"the end of the round trip does not go on as its beginning:\n{ranks.output(1500)}")
    return equal + differing + absent + 1, differing + absent + (not goes_on)


# -- fuzz -----------------------------------------------------------------------------------------


class _Hostile:
    """Pickles into a call that leaves a mark."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def damage(folder: Path, later: Path | None, mark: Path, chooser: random.Random) -> str:
    """Damages a copy of a checkpoint in one way; says how."""
    import zipfile

    from tests.support.damage import cut, flip_bit

    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in (".pt", ".distcp") or path.name == ".metadata"
    )
    path = chooser.choice(files)
    data = path.read_bytes()
    twins = [other for other in files if other != path and other.stat().st_size == len(data)]
    kind = chooser.choice(["flip"] * 5 + ["cut", "join", "swap", "mix", "rename", "hostile"])
    if kind == "cut":
        path.write_bytes(cut(data, chooser))
    elif kind == "join" and path.suffix == ".pt":
        other = chooser.choice(
            [chooser.choice(files).read_bytes(), chooser.randbytes(chooser.randrange(1, 600))]
        )
        path.write_bytes(chooser.choice([data + other, other + data]))
    elif kind == "swap" and twins:
        twin = chooser.choice(twins)
        path.write_bytes(twin.read_bytes())
        twin.write_bytes(data)
    elif kind == "mix" and later is not None and (later / path.name).is_file():
        shutil.copy(later / path.name, path)
    elif kind == "rename":
        path.rename(path.with_name(path.name.replace("rank_0", "rank_7").replace("__0", "__7")))
    elif kind == "hostile" and path.suffix == ".pt":
        with zipfile.ZipFile(path) as archive:
            entries = [(name, archive.read(name)) for name in archive.namelist()]
        with zipfile.ZipFile(path, "w") as archive:
            for name, record in entries:
                archive.writestr(
                    name, pickle.dumps(_Hostile(mark)) if name.endswith("data.pkl") else record
                )
    elif kind == "hostile" and path.name == ".metadata":
        path.write_bytes(pickle.dumps(_Hostile(mark)))
    else:
        path.write_bytes(flip_bit(data, chooser))
        kind = "flip"
    return f"{kind} {path.name}"


def fuzz(folder: Path, scratch: Path, count: int) -> tuple[int, int]:
    """Damaged checkpoints that were refused, and those that gave a wrong file or ran code."""
    sys.path.insert(0, str(ROOT))
    from mmldlm.checkpoints.commit import begin
    from mmldlm.checkpoints.convert import convert as convert_here
    from mmldlm.checkpoints.convert import convert_state
    from mmldlm.errors import UserError

    pending = begin(scratch / "run", 1)
    shutil.copytree(folder / "small_fsdp" / "fsdp", pending.path / "engine")
    whole = pending.commit(engine="fsdp")
    small = folder / "world2"
    sources = [(small / case / "zero", None) for case in ("z0_bf16", "z1_bf16")]
    sources += [
        (small / f"z{stage}_bf16" / "zero", small / f"z{stage}_later" / "zero") for stage in (2, 3)
    ]
    sources += [(whole, None)]
    chooser, refused, wrong, mark = random.Random(13), 0, 0, scratch / "ran"
    expected = {}
    for source, _ in sources:
        convert_here(source, scratch / "clean", force=True)
        expected[source] = _weights(scratch / "clean")
    for number in range(count):
        source, later = chooser.choice(sources)
        victim = (
            scratch / "victim" / "checkpoints" / "step_00000001"
            if later is None
            else scratch / "victim" / "zero"
        )
        shutil.copytree(source, victim)
        how = damage(victim, later, mark, chooser)
        try:
            # Half of those with an optimizer that can be carried on are re-sharded, moments and
            # all.
            if later is not None and number % 2:
                target = chooser.choice(("zero2", "zero3", "dcp", "universal"))
                convert_state(victim, scratch / "fuzzed", target, 3, force=True)
                is_same = _same_state(source, scratch / "fuzzed")
                shutil.rmtree(scratch / "fuzzed")
            else:
                convert_here(victim, scratch / "fuzzed", force=True)
                is_same = _weights(scratch / "fuzzed") == expected[source]
            if not is_same:
                wrong += 1
                print(f"wrong file after: {how} in {source}")
        except UserError as error:
            refused += 1
            if "victim" not in str(error):
                wrong += 1
                print(f"refused without the file's name after: {how}: {error}")
        if mark.exists():
            wrong += 1
            print(f"code was run: {how}")
            mark.rmdir()
        shutil.rmtree(scratch / "victim")
    return refused, wrong


def fuzz_foreign(scratch: Path, count: int) -> tuple[int, int]:
    """Files of other programs that were refused, and those whose output has other names or bits
    than the model.
    """
    sys.path.insert(0, str(ROOT))
    from safetensors.torch import load_file

    from mmldlm.checkpoints.convert import convert as convert_here
    from mmldlm.errors import UserError

    chooser, refused, wrong = random.Random(17), 0, 0
    for _ in range(count):
        folder = scratch / "foreign"
        folder.mkdir()
        source, expected, how = chooser.choice((_views, _wrapped, _several, _part, _joined))(
            folder, chooser
        )
        try:
            convert_here(source, scratch / "fuzzed", dtype="keep", force=True)
            found = load_file(scratch / "fuzzed" / "model.safetensors")
            is_same = (
                expected is not None
                and {name: _bits(value) for name, value in found.items()} == expected
            )
            if not is_same:
                wrong += 1
                print(f"wrong file of another program: {how}")
        except UserError as error:
            refused += 1
            if expected is not None or str(folder) not in str(error):
                wrong += 1
                print(f"refused without reason, or without the file's name: {how}: {error}")
        shutil.rmtree(folder)
    return refused, wrong


def _bits(value) -> tuple:
    import torch

    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    return plain.dtype, plain.shape, plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensors(chooser: random.Random) -> dict:
    """A small state_dict of random names and shapes."""
    import torch

    generator = torch.Generator().manual_seed(chooser.randrange(1 << 30))
    names = [
        f"{chooser.choice('abc')}.{number}.{chooser.choice(('weight', 'module.bias'))}"
        for number in range(4)
    ]
    return {
        name: (
            torch.randn(chooser.randrange(2, 5), chooser.randrange(2, 5), generator=generator)
            .bfloat16()
            .float()
        )
        for name in names
    }


def _save(value: dict, path: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(value, path) if path.suffix == ".safetensors" else torch.save(value, path)
    return path


# Each makes one case in a folder: what to convert, name -> bits of the model (None: to be
# refused), and what it is.
def _views(folder: Path, chooser: random.Random) -> tuple[Path, dict | None, str]:
    import torch

    views = (
        lambda x: torch._neg_view(x),
        lambda x: torch._neg_view(x.t()),
        lambda x: torch._neg_view(x.bfloat16())[1:],
        lambda x: torch.polar(torch.ones_like(x), x).conj().imag,
        lambda x: torch.polar(torch.ones_like(x), x).conj(),
        lambda x: torch.nn.Parameter(torch._neg_view(x.double())),
        lambda x: x.t()[:, 1:],
    )
    state = {name: chooser.choice(views)(value) for name, value in _tensors(chooser).items()}
    return (
        _save(state, folder / "a.pt"),
        {name: _bits(value) for name, value in state.items()},
        "views",
    )


def _wrapped(folder: Path, chooser: random.Random) -> tuple[Path, dict | None, str]:
    state, form = (
        _tensors(chooser),
        folder / chooser.choice(("a.pt", "a.safetensors", "pytorch_model.bin")),
    )
    expected = {name: _bits(value) for name, value in state.items()}
    prefix = chooser.choice(
        (
            "_orig_mod.",
            "_fsdp_wrapped_module.",
            "module._orig_mod.",
            "_orig_mod.module.",
            "module.",
        )
    )
    if prefix == "module.":  # nothing tells it from the name of a child
        expected = {prefix + name: bits for name, bits in expected.items()}
    return (
        _save({prefix + name: value for name, value in state.items()}, form),
        expected,
        f"wrapped in {prefix}",
    )


def _several(folder: Path, chooser: random.Random) -> tuple[Path, dict | None, str]:
    first = chooser.choice(("model.safetensors", "pytorch_model.bin", "model.pt"))
    second = chooser.choice(
        ("model_1.safetensors", "discriminator.bin", "ema.pt", "adapter_model.safetensors")
    )
    for name in (first, second):
        _save(_tensors(chooser), folder / "in" / name)
    return folder / "in", None, f"{first} and {second}"


def _part(folder: Path, chooser: random.Random) -> tuple[Path, dict | None, str]:
    name, second = chooser.choice((
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("mp_rank_00/model.ckpt", "mp_rank_01/model.ckpt"),
        ("consolidated.00.pth", "consolidated.01.pth"),
        ("model_rank3.bin", "model_rank0.bin"),
    ))  # fmt: skip
    _save(_tensors(chooser), folder / second)
    return _save(_tensors(chooser), folder / name), None, name


def _joined(folder: Path, chooser: random.Random) -> tuple[Path, dict | None, str]:
    state = _tensors(chooser)
    other = {name: value + 1 for name, value in state.items()}  # of the same layout
    data = [
        _save(value, folder / name).read_bytes()
        for value, name in ((state, "a.pt"), (other, "b.pt"))
    ]
    chooser.shuffle(data)
    junk = chooser.randbytes(chooser.randrange(1, 5000))
    path = folder / "c.pt"
    path.write_bytes(
        b"".join(
            chooser.choice((data, [data[0], junk, data[1]], [junk, data[0]], [data[0], junk]))
        )
    )
    return path, None, "two files in one"


def _same_state(source: Path, out: Path) -> bool:
    """Weights and moments, as mmldlm's reader finds them in both."""
    from mmldlm.checkpoints.formats.open import open_source
    from mmldlm.checkpoints.inspect import compare

    with (
        open_source(source, with_moments=True).weights as one,
        open_source(out, with_moments=True).weights as two,
    ):
        return not compare(one, two).any


def _weights(out: Path) -> tuple[str, bytes]:
    """The written tensors without the header's metadata, which names the source."""
    data = (out / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    return json.dumps(header, sort_keys=True), data[8 + length :]


# -- the whole ------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small model, one round: the form, not the figures"
    )
    parser.add_argument(
        "--rounds", type=int, help="how often each tool runs (default 3, 1 with --quick)"
    )
    parser.add_argument(
        "--large", action="store_true", help="also convert 1,000M parameters (14 GB of disk)"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="make the checkpoints in this folder, or use those that are there",
    )
    parser.add_argument("--json", help="write the claims here")
    args = parser.parse_args()
    world_sizes = (2,) if args.quick else (1, 2, 4)
    with tempfile.TemporaryDirectory() as temporary, RankServer(f"{temporary}/ranks") as server:
        folder, scratch = args.keep or Path(temporary) / "made", Path(temporary) / "scratch"
        scratch.mkdir()
        if not (folder / "COMPLETE").exists():
            sizes = (
                ["--hidden", "64", "--blocks", "4"]
                if args.quick
                else ["--hidden", "768", "--blocks", "17"]
            )
            server.run(2, ["make", folder, *sizes], HERE / "_checkpoints.py")
            small_checkpoints(server, folder, world_sizes)
            (folder / "COMPLETE").write_text("")
        check(python("-m", "compileall", "-q", ROOT / "mmldlm"))
        rounds = args.rounds or (1 if args.quick else 3)
        ratios, against_dd, rows = time_all(folder, scratch, rounds)
        compared, unequal = compare_all(folder, scratch, world_sizes)
        more, wrong_there = compare_round_trips(server, folder, scratch)
        compared, unequal = compared + more, unequal + wrong_there
        if args.large:
            ratios["1000M"], more_rows, (more, wrong_there) = measure_large(scratch, rounds)
            rows += more_rows
            compared, unequal = compared + more, unequal + wrong_there
        tried = 40 if args.quick else 1000
        refused, wrong = fuzz(folder, scratch, tried)
        refused_foreign, wrong_foreign = fuzz_foreign(scratch, tried)
    for row in rows:
        figures = (
            f"{row['wall_s']:7.2f} s wall  {row['cpu_s']:7.2f} s CPU  {row['peak_mib']:6.0f} MiB"
        )
        print(f"{row['checkpoint']:<10} {row['tool']:<17} {figures}")
    for name, (plain, flushed, loose) in ratios.items():
        print(
            f"{name:<10} {plain:5.1f} times as fast as its peer, both as they come; {flushed:5.1f}"
            f" with both on the disk, {loose:5.1f} with neither"
        )
    print(
        f"{compared} tensors compared with the live engines; {tried} damaged checkpoints,"
        f" {refused} refused"
    )
    print(f"{tried} files of other programs, {refused_foreign} refused")
    resharded = min(ratios["reshard2"][0], ratios["reshard3"][0])
    claims = [
        _report.claim("speedup_zero2", ratios["zero2"][0], ">=", 8, measured=True),
        _report.claim("speedup_zero3", ratios["zero3"][0], ">=", 8, measured=True),
        _report.claim("speedup_dcp", ratios["fsdp"][0], ">=", 10, measured=True),
        _report.claim("speedup_reshard_universal", resharded, ">=", 8, measured=True),
        _report.claim("times_dd", against_dd, "<=", 3.5, measured=True),
        _report.claim("peak_mib", peak_of(rows), "<=", 100),
        _report.claim("tensors_unequal", unequal, "==", 0),
        _report.claim("fuzz_wrong_files", wrong + wrong_foreign, "==", 0),
    ]
    if args.large:
        claims.append(_report.claim("speedup_1000m", ratios["1000M"][0], ">=", 3, measured=True))
    return _report.write(args.json, claims, args.quick, runs=rows, fuzzed=tried, compared=compared)


if __name__ == "__main__":
    sys.exit(main())
