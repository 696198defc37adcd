"""The memory of a large gradient is used again only when nobody holds it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mmldlm.models.kept_gradient import embedding, gradient_memory


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
