"""Damaged files of every kind: refused by an error that a user understands, in bounded time and
memory, and never taken for what they were.

MMLDLM_FUZZ=N damages N times as many files (1: about 1,400).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmldlm.errors import UserError
from tests.support.damage import damage, restore
from tests.support.readers import BASES, HAS_PARQUET, READERS, Reader

pytestmark = pytest.mark.long

ROUNDS = 16 * int(os.environ.get("MMLDLM_FUZZ", "1"))
SECONDS = 60
"""A reader that takes longer waits for ever: the good files take less than one."""
MAX_MIB = 200
"""Memory above that of the good file."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """Folders of undamaged files, by name."""
    parent, made = tmp_path_factory.mktemp("undamaged"), {}
    for name, make in BASES.items():
        make(parent / name, made)
        made[name] = parent / name
    return made


class HangsError(BaseException):
    """Not an Exception, which a reader might take for damage."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise HangsError in a block that takes longer, also where it waits in a system call, and
    MemoryError where it takes far more memory than it may: /dev/zero has no end.
    """

    def stop(*_: object) -> None:
        raise HangsError(f"no end after {seconds} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = (_status("VmData") + 5 * MAX_MIB * 1024) * 1024
    before = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def _status(name: str) -> int:
    """Return an entry of this process's status in KiB."""
    found = re.search(
        rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8")
    )
    assert found is not None
    return int(found[1])


def peak_mib() -> float:
    """Largest resident memory since `reset_peak`."""
    return _status("VmHWM") / 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def fuzz(reader: Reader, base: Path, folder: Path, rounds: int) -> list[str]:
    """Damage the files of a reader one at a time; return what went wrong, a paragraph each."""
    shutil.copytree(base, folder, symlinks=True)
    names, problems = reader.names(base), []
    reader.read(folder)  # imports and caches are not the memory of a file
    reset_peak()
    good = reader.read(folder)
    good_mib = peak_mib()
    for number in range(rounds):
        chooser = random.Random(f"{reader.name} {number}")
        name = chooser.choice(names)
        kind, problem = damage(folder / name, chooser), None
        reset_peak()
        try:
            with limited(SECONDS):
                found = reader.read(folder)
            if found != good and reader.is_sealed(name, kind):
                problem = "accepted, with another result"
        except UserError:
            pass
        except (Exception, HangsError):
            problem = traceback.format_exc(limit=-6)
        if (more := peak_mib() - good_mib) > MAX_MIB:
            problem = f"{more:.0f} MiB more than for the good file"
        if problem is not None:
            problems.append(f"{reader.name} {number}: {kind} in {name}: {problem}")
        for changed in {name, *reader.written}:
            restore(folder / changed, base / changed)
    return problems


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damage_is_refused(reader, bases, tmp_path):
    if "parquet" in reader.name and not HAS_PARQUET:
        pytest.skip("pyarrow is not installed")
    problems = fuzz(reader, bases[reader.base], tmp_path / "damaged", ROUNDS)
    assert not problems, "\n\n".join(problems)


# -- The harness can fail -------------------------------------------------------------------------


def read_some(folder: Path) -> bytes:
    """What not to do: wait for a pipe, compare nothing, and let errors of the system out."""
    with open(folder / "t.jsonl", "rb") as file:
        return file.read(1 << 20)


@pytest.fixture
def texts(tmp_path) -> Path:
    (tmp_path / "good").mkdir()
    lines = (json.dumps({"text": f"text {number}"}) + "\n" for number in range(99))
    (tmp_path / "good" / "t.jsonl").write_text("".join(lines))
    return tmp_path / "good"


@pytest.mark.parametrize("says", ["another result", "FileNotFoundError", "no end after"])
def test_a_bad_reader_is_found(texts, tmp_path, monkeypatch, says):
    monkeypatch.setattr(f"{__name__}.SECONDS", 0.5)
    planted = Reader("bad", "", ("t.jsonl",), read_some, sealed=("*",))
    problems = "\n".join(fuzz(planted, texts, tmp_path / "damaged", 250))
    assert says in problems and "in t.jsonl" in problems


def test_a_reader_that_takes_too_much_memory_is_found(texts, tmp_path):
    def read(folder: Path) -> int:
        is_good = (folder / "t.jsonl").stat().st_size == size
        return len(b"x" * (1 if is_good else MAX_MIB << 21))

    size = (texts / "t.jsonl").stat().st_size
    planted = Reader("takes memory", "", ("t.jsonl",), read)
    problems = fuzz(planted, texts, tmp_path / "damaged", 10)
    assert any("MiB more than for the good file" in problem for problem in problems)
