"""What a step does, counted without a clock: operations, bytes kept, the head's memory, rows
computed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from _reference_steps import Ours, Shape
from step import count_ops, saved_bytes
from torch.utils._python_dispatch import TorchDispatchMode

from mmldlm.models.linear_cross_entropy import linear_cross_entropy
from mmldlm.models.memory import ROW_ALIGNMENT, head_bytes, rows_of_a_chunk

SMALL = Shape("small", depth=2, width=64, length=24, batch=4, vocab=500, latent=32)


@pytest.mark.parametrize("qk_rmsnorm, a_block, at_24", [(True, 73, 1994), (False, 59, 1662)])
def test_operations_of_a_whole_step(qk_rmsnorm, a_block, at_24):
    """Forward, objective, backward, clip and AdamW; views left out.

    The same for every batch and length.
    """
    counts = [
        count_ops(
            Ours(replace(SMALL, depth=depth), torch.float32, qk_rmsnorm=qk_rmsnorm),
            with_update=True,
        )
        for depth in (2, 3)
    ]
    each = counts[1] - counts[0]
    assert each <= a_block and counts[0] + 22 * each <= at_24
    longer = replace(SMALL, length=40, batch=7)
    assert (
        count_ops(Ours(longer, torch.float32, qk_rmsnorm=qk_rmsnorm), with_update=True)
        == counts[0]
    )


@pytest.mark.parametrize("qk_rmsnorm, widths", [(True, 13), (False, 11)])
def test_bytes_kept_by_a_block(qk_rmsnorm, widths):
    """A row keeps its own H, 3 H of queries, keys and values, H of attention's result, H of each
    residual branch, 4 H of the MLP's hidden layer; and 2 H of queries and keys before QK-RMSNorm's
    weights."""
    kept = [
        saved_bytes(Ours(replace(SMALL, depth=depth), torch.float32, qk_rmsnorm=qk_rmsnorm))
        for depth in (2, 3)
    ]
    rows = SMALL.batch * (SMALL.length + 1)
    assert (kept[1] - kept[0]) / (rows * SMALL.width * 4) == pytest.approx(widths, rel=0.06)


def test_gradient_checkpointing_keeps_a_blocks_input_alone():
    kept = [
        saved_bytes(Ours(replace(SMALL, depth=depth), torch.float32, gradient_checkpointing=True))
        for depth in (2, 3)
    ]
    rows = SMALL.batch * (SMALL.length + 1)
    assert kept[1] - kept[0] == rows * SMALL.width * 4


def test_every_nth_block_is_checkpointed():
    """Of four blocks, the inputs of two and two whole ones."""

    def kept(depth: int, every: int | bool) -> int:
        shape = replace(SMALL, depth=depth)
        return saved_bytes(Ours(shape, torch.float32, gradient_checkpointing=every))

    inputs = kept(3, True) - kept(2, True)
    assert kept(4, 2) == kept(2, False) + 2 * inputs


def test_no_row_of_padding_is_projected():
    """The blocks' products see the real tokens and the latents only, the head the scored tokens
    only.
    """
    shape = replace(SMALL, fill=0.4)
    variant = Ours(shape, torch.float32)
    num_real, scored = int(variant.batch.attention_mask.sum()), len(variant.batch.text_positions)
    num_rows = num_real + shape.batch  # of latents, one each
    assert num_real < 0.5 * shape.batch * shape.length
    rows: set[int] = set()

    class Rows(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                rows.add(args[-2].shape[0])
            elif function.overloadpacket is torch.ops.aten._grouped_mm:
                rows.add(args[0].shape[0])
            return function(*args, **(kwargs or {}))

    with Rows(), torch.no_grad():
        variant.loss()
    assert num_rows in rows and scored in rows
    assert max(rows) == num_rows


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and not function.is_view:
                self.elements = max(self.elements, tensor.numel())
        return out


def test_the_heads_memory_does_not_grow_with_the_tokens():
    """Logits of a chunk, and the weight's gradient: [positions, V] never exists."""
    vocab, width = 5000, 8
    weight, bias = (
        torch.randn(vocab, width, requires_grad=True),
        torch.zeros(vocab, requires_grad=True),
    )
    found = []
    for num_rows in (256, 512, 2048):
        hidden = torch.randn(num_rows, width, requires_grad=True)
        targets = torch.randint(1, vocab, (num_rows,))
        with Largest() as largest:
            linear_cross_entropy(
                hidden, weight, bias, targets, torch.ones(num_rows), 0, chunk_rows=64
            )[0].backward()
        found.append(largest.elements)
    assert len(set(found)) == 1 and 64 * vocab <= found[0] < 64 * (vocab + ROW_ALIGNMENT)


def test_a_chunk_is_bounded_on_every_device():
    for vocab in (500, 30_522, 250_000):
        for dtype, low_bytes in (("bf16", 2), ("fp32", 4)):
            for on_gpu in (False, True):
                many, more = (head_bytes(vocab, n, dtype, on_gpu) for n in (10**6, 2 * 10**6))
                assert many == more
            assert (
                rows_of_a_chunk(vocab, "cuda", low_bytes)
                >= rows_of_a_chunk(vocab, "cpu", low_bytes)
                >= 64
            )
    one, wider = (head_bytes(vocab, 10, "fp32", on_gpu=False) for vocab in (512, 513))
    assert one == 10 * 512 * 4 < wider
