"""Token embeddings and their gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mmldlm.models.layers import embedding


def test_gradients_are_those_of_torch_also_when_they_add_up():
    torch.manual_seed(0)
    weight, ids = torch.nn.Parameter(torch.randn(20, 4)), torch.randint(0, 20, (50,))
    for _ in range(3):
        weight.grad = None
        for _ in range(2):
            embedding(weight, ids).square().sum().backward()
        found, weight.grad = weight.grad, None
        F.embedding(ids, weight).square().sum().backward()
        torch.testing.assert_close(found, 2 * weight.grad)


def test_a_bf16_gradient_is_rounded_once_however_often_an_id_occurs():
    """[MASK] stands in half of all rows: added up in bf16, its gradient would stop growing
    at 256.
    """
    weight, ids = (
        torch.nn.Parameter(torch.zeros(20, 4, dtype=torch.bfloat16)),
        torch.tensor([7] * 1000 + [3]),
    )
    for _ in range(2):
        weight.grad = None
        embedding(weight, ids).float().sum().backward()
        assert weight.grad.dtype == torch.bfloat16
        expected = (
            torch.zeros(20, 4)
            .index_fill_(0, torch.tensor([7]), 1000.0)
            .index_fill_(0, torch.tensor([3]), 1.0)
        )
        assert torch.equal(weight.grad.float(), expected)
