"""A short run on two ranks under any launcher: its arguments and the comparison of its losses."""

from __future__ import annotations

import pytest

from tests.support.helpers import read_log, train_words

NODES = "n1 slots=1\nn2 slots=1\n"
STEPS = 4


def more_words(stage: int) -> list[str]:
    return [
        f"training.num_train_steps={STEPS}",
        "training.train_batch_size=4",
        "logging.eval_freq=100",
        f"engine.zero_stage={stage}",
    ]


def words_of(store, folder, name: str, stage: int) -> list[str]:
    return train_words(store, folder, name, *more_words(stage))


def losses(folder, name: str) -> list[float]:
    return [record["loss"] for record in read_log(folder, name)]


def close(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected) == STEPS
    assert found == pytest.approx(expected, rel=1e-5)
