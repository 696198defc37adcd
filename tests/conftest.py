"""What several rooms' tests share: a small store of real sentences, made once a session by the
real `prepare`.
"""

from __future__ import annotations

import ast
import inspect
import os
import signal
from pathlib import Path

import pytest

from tests.support.helpers import made_once, start_rank_server

# Thread pools of parallel ranks would fight for the cores; set before torch is imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tests count on several ranks of one machine and on the CPU's arithmetic; only
# tests/integration/test_one_gpu.py uses a GPU.
VISIBLE_GPUS: str | None = None
"""CUDA_VISIBLE_DEVICES of the tests that use a GPU; None on a machine without a driver."""
if Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists():
    # The workers of pytest-xdist inherit what the first process set.
    VISIBLE_GPUS = os.environ.setdefault(
        "MMLDLM_TEST_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


# A background job of a shell starts with SIGINT ignored, which the processes of the tests would
# inherit.
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(
            _number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        )

RANK_SERVER = pytest.StashKey()

pytest_plugins = ["tests.support.checkpoint_fixtures", "tests.support.browser"]


def pytest_configure(config):
    """Before pytest-xdist starts its workers: they fork their ranks from one process."""
    has_workers = getattr(config.option, "numprocesses", None)
    if has_workers and not (config.option.collectonly or hasattr(config, "workerinput")):
        config.stash[RANK_SERVER] = start_rank_server()


def pytest_addoption(parser):
    parser.addoption(
        "--trials", action="store_true", help="run the slow trials of tests/trials too"
    )


def pytest_collection_modifyitems(config, items):
    """Put the files with long tests first, or one of two workers would end alone with them
    (tests/run.sh).
    """
    if not config.getoption("--trials"):
        skip = pytest.mark.skip(reason="takes over three seconds: bash tests/run.sh --trials")
        for item in items:
            if item.get_closest_marker("slow_trial"):
                item.add_marker(skip)
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """Some 900 English sentences from the standard library's docstrings."""
    import argparse
    import asyncio.events
    import logging
    import subprocess
    import tarfile
    import unittest.mock
    import zipfile

    from mmldlm.data.corpora.docstrings import docstrings_of, prose_paragraphs, reject_reason
    from mmldlm.data.sentences import split_sentences

    found: dict[str, None] = {}
    for module in (
        argparse,
        asyncio.events,
        ast,
        inspect,
        logging,
        subprocess,
        tarfile,
        unittest.mock,
        unittest.case,
        zipfile,
    ):
        for docstring in docstrings_of(inspect.getsource(module).encode()) or []:
            for paragraph in prose_paragraphs(docstring):
                found.update(
                    {s: None for s in split_sentences(paragraph) if reject_reason(s) is None}
                )
    assert len(found) > 150
    return list(found)


@pytest.fixture(scope="session")
def store(tmp_path_factory, request):
    """Folder of a store of 360 training and 40 validation sentences, encoded by MiniLM.

    Its tokenizer is trained on them: with MiniLM's own, nine tenths of a tiny model are 30,522
    rows of the embedding, and a run of six steps takes three times the CPU time.
    """
    words = ("--tokenizer", "train", "--vocab-size", "600")
    return _prepared(tmp_path_factory, request, "store", *words)


@pytest.fixture(scope="session")
def minilm_store(tmp_path_factory, request):
    """Folder of the same sentences in the tokens of their encoder."""
    return _prepared(tmp_path_factory, request, "minilm_store")


def _prepared(tmp_path_factory, request, name: str, *words: str) -> Path:
    from mmldlm.cli import main
    from mmldlm.data.encoders.model_files import find_model_folder

    try:
        find_model_folder("minilm")
    except Exception as error:
        pytest.skip(f"no MiniLM weights here: {error}")

    def make(folder: Path) -> None:
        corpus = folder / "corpus.txt"
        corpus.write_text("\n".join(request.getfixturevalue("sentences")[:400]) + "\n")
        options = ["--output-dir", str(folder / "store"), "--validation-samples", "40"]
        assert main(["prepare", str(corpus), *options, *words]) == 0

    return made_once(tmp_path_factory, name, make) / "store"
