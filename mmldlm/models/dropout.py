"""Dropout whose masks are functions of the row: the same however rows are batched, spread over
ranks or run again.

torch's dropout draws from the generator of a device, so its masks depend on what else that device
computes. Here each sample brings a random key, new in each epoch. The key of a row follows from it
and the position of the row, and the mask of each layer, site and column from that by arithmetic
alone: no generator, no state, no stored mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmldlm.models.layers import cache_tensor

# Dropout sites in a layer; CROSS only with cross-attention.
ATTENTION, MLP, CROSS = 0, 1, 2
# Masks of 16 bits in one number of 64.
_LANES = 4


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# SplitMix64's increment and multipliers (Steele et al., OOPSLA 2014); torch's int64 wraps as
# uint64 does.
STEP = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def mix(values: Tensor) -> Tensor:
    """SplitMix64's finalizer of int64 values; same shape.

    A tensor's >> keeps the sign, so it is masked away.
    """
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _FIRST
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * _SECOND
    return values ^ ((values >> 31) & ((1 << 33) - 1))


@cache_tensor
def _column_keys(count: int, device: torch.device) -> Tensor:
    """[count] odd numbers."""
    return mix(torch.arange(1, count + 1, device=device) * STEP) | 1


class RowDropout(NamedTuple):
    """Dropout of the rows [R, H] of a model or, after `of_layer`, of one layer.

    Attributes:
        keys: Keys, one per layer, site (ATTENTION, MLP, CROSS) and row. [layers * sites, R] int64
        rate: Probability that an element is dropped, rounded to 1 / 65,536.
        sites: Number of dropout sites in a layer.
    """

    keys: Tensor
    rate: float
    sites: int = 2

    @classmethod
    def of_rows(
        cls,
        keys: Tensor,
        sample: Tensor,
        position: Tensor,
        num_layers: int,
        rate: float,
        sites: int = 2,
    ) -> RowDropout:
        """Return the dropout of a batch.

        Args:
            keys: Random keys, one per sample. [B] int64
            sample: Sample of each row. [R]
            position: Position of each row in its sample, different for all of its rows. [R] int64
            num_layers: Number of layers.
            rate: Probability in (0, 1).
            sites: Number of dropout sites in a layer: 3 with cross-attention.
        """
        rows = mix(keys.index_select(0, sample) + position * STEP)
        uses = torch.arange(1, sites * num_layers + 1, device=rows.device)[:, None] * STEP
        return cls(mix(rows + uses) | 1, rate, sites)

    def of_layer(self, layer: int) -> RowDropout:
        """Return the dropout of one layer."""
        return self._replace(keys=self.keys[self.sites * layer : self.sites * (layer + 1)])

    def select(self, rows: Tensor | None) -> RowDropout:
        """Return the dropout of some rows [Q]; None: all."""
        return self if rows is None else self._replace(keys=self.keys.index_select(1, rows))

    def drop(self, x: Tensor, site: int) -> Tensor:
        """x [R, H] with dropped elements 0 and the others divided by 1 - rate; also its own
        gradient.
        """
        return x.masked_fill(self._dropped(x.shape[1], site), 0.0) * self._scale()

    def _threshold(self) -> int:
        return min(round(self.rate * (1 << 16)), (1 << 16) - 1)

    def _scale(self) -> float:
        return (1 << 16) / ((1 << 16) - self._threshold())

    def _dropped(self, width: int, site: int) -> Tensor:
        """[R, width] bool. The product of a row's key and a column's, scrambled, is a number of 64
        bits: four masks of 16.

        Only the high bits of a product depend on all bits of its factors, so they are mixed into
        the low ones. The sign that >> shifts in costs the first bit, which the second product
        restores.
        """
        bits = self.keys[site][:, None] * _column_keys(-(-width // _LANES), self.keys.device)
        bits = (bits ^ (bits >> 32)) * _SECOND
        return bits.view(torch.int16)[:, :width] < self._threshold() - (1 << 15)
