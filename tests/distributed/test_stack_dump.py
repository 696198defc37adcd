"""Where a blocked rank is, and whether it waits for others."""

from __future__ import annotations

import threading

import torch

from mmldlm.distributed.stack_dump import current_location
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
