"""The memory of a large tensor is used again only when nobody holds it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mmldlm.models.buffer_reuse import embedding, gradient_memory, reusable_buffer


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
    """[MASK] stands in half of all rows: added up in bf16, its gradient would stop growing at 256."""
    weight, ids = torch.nn.Parameter(torch.zeros(20, 4, dtype=torch.bfloat16)), torch.tensor([7] * 1000 + [3])
    for _ in range(2):
        weight.grad = None
        embedding(weight, ids).float().sum().backward()
        assert weight.grad.dtype == torch.bfloat16
        expected = torch.zeros(20, 4).index_fill_(0, torch.tensor([7]), 1000.0).index_fill_(0, torch.tensor([3]), 1.0)
        assert torch.equal(weight.grad.float(), expected)


def test_a_smaller_tensor_of_the_same_use_stands_in_the_same_memory():
    weight = torch.nn.Parameter(torch.randn(20, 4))
    place = reusable_buffer(weight, "logits", (6, 8), torch.float32).data_ptr()
    smaller = reusable_buffer(weight, "logits", (5, 8), torch.float32)
    assert smaller.data_ptr() == place and smaller.shape == (5, 8)
    assert reusable_buffer(weight, "shares", (5, 8), torch.float32).data_ptr() != place
    del smaller
    larger = reusable_buffer(weight, "logits", (7, 8), torch.float32)
    assert larger.shape == (7, 8)
    part = larger[:1]
    del larger
    assert reusable_buffer(weight, "logits", (2, 8), torch.float32).data_ptr() != part.data_ptr(), "a part is held"


def test_memory_somebody_holds_is_not_given_out_again():
    weight = torch.nn.Parameter(torch.randn(20, 4))
    first = gradient_memory(weight, torch.float32)
    place = first.data_ptr()
    held = first.detach()
    del first
    assert gradient_memory(weight, torch.float32).data_ptr() != place, "a step's gradient would be overwritten"
    place = gradient_memory(weight, torch.float32).data_ptr()
    assert gradient_memory(weight, torch.float32).data_ptr() == place
    assert held.shape == (20, 4)
    other = torch.nn.Parameter(torch.randn(20, 4))
    assert gradient_memory(other, torch.float32).data_ptr() != place
    assert gradient_memory(weight, torch.float64).dtype == torch.float64
