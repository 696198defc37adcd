"""Inputs that several trials share, made once a session by the real commands."""

from __future__ import annotations

import pytest

from tests.support.helpers import made_once
from tests.trials.harness import mmldlm, succeeds, tiny_run, train_rank

SUBJECTS, VERBS = ("cat", "dog", "bird", "ship"), ("sees", "paints", "repairs")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A text file of 200 different sentences."""
    path = tmp_path_factory.mktemp("trial_corpus") / "c.txt"
    lines = [
        f"The {SUBJECTS[i % 4]} {VERBS[i % 3]} a letter near the river, {i} times."
        for i in range(200)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def trial_store(corpus, tmp_path_factory):
    """Folder of the store that `prepare` makes of the corpus. Copy it before changing anything."""

    def make(folder):
        result = mmldlm("prepare", corpus, "--output-dir", folder / "S", timeout=120)
        if "weights of encoder" in result.output and result.code == 2:
            pytest.skip("no MiniLM weights here")
        succeeds(result)

    return made_once(tmp_path_factory, "trial_store", make) / "S"


@pytest.fixture(scope="session")
def trial_run(trial_store, tmp_path_factory):
    """Folder of a finished run of six steps, with checkpoints at 3 and 6.

    Copy it before changing anything.
    """

    def make(folder):
        succeeds(train_rank(*tiny_run(trial_store, folder, "r0")))

    return made_once(tmp_path_factory, "trial_runs", make) / "r0"


@pytest.fixture(scope="session")
def trial_model(trial_run, tmp_path_factory):
    """Folder of that run's converted model."""

    def make(folder):
        succeeds(mmldlm("convert", trial_run / "latest", folder / "model"))

    return made_once(tmp_path_factory, "trial_model", make) / "model"
