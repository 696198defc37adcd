"""Gradients of ZeRO-2: the memory of one that is cleared is not used again too early."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mmldlm.engines.deepspeed_shards import keep_until_reduced


def zero2(stream):
    optimizer = SimpleNamespace(reduction_stream=stream, overlap_comm=True, reduce_bucket_size=10)
    optimizer.clear_grad_attribute = lambda parameter: setattr(parameter, "grad", None)
    keep_until_reduced(optimizer)
    return optimizer


@pytest.mark.parametrize(("size", "is_kept"), [(11, True), (10, False)])
def test_a_gradient_larger_than_a_bucket_is_kept_for_the_stream_of_the_reduction(size, is_kept):
    kept, stream = [], object()
    parameter = SimpleNamespace(
        grad=SimpleNamespace(record_stream=kept.append), numel=lambda: size
    )
    zero2(stream).clear_grad_attribute(parameter)
    assert kept == [stream] * is_kept and parameter.grad is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_its_memory_is_not_given_out_while_the_reduction_runs():
    optimizer = zero2(torch.cuda.Stream())
    parameter = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    parameter.grad = torch.zeros_like(parameter)
    address = parameter.grad.data_ptr()
    with torch.cuda.stream(optimizer.reduction_stream):
        torch.cuda._sleep(10**9)
    optimizer.clear_grad_attribute(parameter)
    assert torch.empty_like(parameter).data_ptr() != address
