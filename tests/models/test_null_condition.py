"""Nulls in the place of conditions equal torch.where, gradients included."""

from __future__ import annotations

import pytest
import torch

from mmldlm.models.layers import apply_null_condition


def where(x, null, is_null, at):
    if at is None:
        return torch.where(is_null.view(-1, *(1,) * (x.dim() - 1)), null, x)
    return x.index_copy(0, at, torch.where(is_null[:, None], null, x.index_select(0, at)))


@pytest.mark.parametrize("is_null", [(False, True, False, True), (False,) * 4, (True,) * 4])
@pytest.mark.parametrize(
    "shape, null_shape, at",
    [((4, 6), (6,), None), ((4, 2, 3, 5), (3, 5), None), ((9, 5), (5,), (0, 3, 4, 8))],
)
def test_values_and_gradients_are_those_of_where(shape, null_shape, at, is_null):
    torch.manual_seed(0)
    mask, rows = torch.tensor(is_null), None if at is None else torch.tensor(at)
    factor, found = torch.randn(shape, dtype=torch.float64), []
    given = torch.randn(shape, dtype=torch.float64), torch.randn(null_shape, dtype=torch.float64)
    for function in (apply_null_condition, where):
        x, null = (tensor.clone().requires_grad_() for tensor in given)
        out = function(x, null, mask, rows)
        (out * factor).sum().backward()
        found.append((out, x.grad, null.grad))
    for ours, wanted in zip(*found):
        assert torch.allclose(ours, wanted, rtol=1e-12, atol=1e-14)
    if any(is_null):
        assert found[0][2].any()


def test_what_a_null_replaces_does_not_matter():
    x = torch.full((3, 2), float("nan")).requires_grad_()
    null = torch.ones(2, requires_grad=True)
    out = apply_null_condition(x, null, torch.ones(3, dtype=torch.bool))
    out.sum().backward()
    assert (
        torch.equal(out, torch.ones(3, 2))
        and torch.equal(null.grad, torch.full((2,), 3.0))
        and not x.grad.any()
    )


def test_the_dtypes_are_those_of_where():
    """Under autocast a condition in bf16 meets a null in fp32, and goes on in fp32."""
    x = torch.randn(3, 4).bfloat16().requires_grad_()
    null = torch.randn(4, requires_grad=True)
    out = apply_null_condition(x, null, torch.tensor([True, False, False]))
    out.sum().backward()
    assert (
        out.dtype == torch.float32
        and torch.equal(out[0], null)
        and torch.equal(out[1:], x[1:].float())
    )
    assert x.grad.dtype == torch.bfloat16 and null.grad.dtype == torch.float32
