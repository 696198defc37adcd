"""Where a blocked rank is, and whether it waits for others."""

from __future__ import annotations

import threading

import torch

from mmldlm.distributed.stack_dump import current_location, describe_error, is_collective_error
from mmldlm.engines.torch_engines import SingleEngine


def test_a_rank_that_reads_the_sum_over_ranks_waits_in_a_collective():
    class Stuck(SingleEngine):
        def __init__(self):
            self.entered, self.go_on = threading.Event(), threading.Event()

        def all_reduce_sum(self, values):
            self.entered.set()
            self.go_on.wait(30)
            return values

    engine = Stuck()
    thread = threading.Thread(target=lambda: engine.sum_on_host(torch.zeros(1)))
    thread.start()
    engine.entered.wait(30)
    try:
        assert current_location(thread.ident)[1]
    finally:
        engine.go_on.set()
        thread.join()
    assert not current_location(threading.get_ident())[1]


def test_nccl_without_memory_is_an_error_of_its_own_rank():
    network = torch.distributed.DistBackendError(
        "NCCL error: remote process exited\nLast error:\nX"
    )
    assert is_collective_error(network) and describe_error(network).endswith("exited: X")
    memory = "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
    error = torch.distributed.DistBackendError(memory)
    assert not is_collective_error(error) and "out of memory" in describe_error(error)
