"""A batch moves, pins and names its tensors, in fields of a subclass or in `tensors`."""

import pickle
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.batch import Batch

COMMON = {
    "ids": np.arange(2),
    "real": np.ones(2, bool),
    "counts": {"samples": 2},
    "num_tokens": 2,
    "epoch": 0,
    "index": 0,
}


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass(kw_only=True)
class OwnBatch(Batch):
    tokens: Tensor
    pair: Pair | None = None
    weights: Tensor | None = None
    shape: tuple[int, int] = (2, 3)


def test_named_tensors_are_those_of_every_field():
    pair = Pair(torch.zeros(1), torch.ones(2))
    batch = OwnBatch(**COMMON, tokens=torch.arange(6), pair=pair, tensors={"x": torch.zeros(3)})
    named = batch.named_tensors()
    assert {name: len(tensor) for name, tensor in named.items()} == {
        "x": 3, "tokens": 6, "pair.first": 1, "pair.second": 2,
    }  # fmt: skip
    moved = batch.to("meta")
    assert moved is batch and {t.device.type for t in batch.named_tensors().values()} == {"meta"}
    assert type(batch.pair) is Pair and batch.weights is None and batch.shape == (2, 3)


def test_a_batch_of_a_dict_is_what_it_was():
    batch = Batch(tensors={"x": torch.arange(4)}, **COMMON)
    sent = pickle.loads(pickle.dumps(batch)).map_tensors(lambda tensor: tensor * 2)
    assert sent.tensors["x"].tolist() == [0, 2, 4, 6] and sent.named_tensors().keys() == {"x"}
