"""What the variables of this shell do to a launch."""

from __future__ import annotations

import pytest

from mmldlm.preflight.check import WARN, run_check
from tests.support.preflight_context import CHECKS, gpu, gpus, make_context


@pytest.mark.parametrize(
    ("value", "launcher", "warns"),
    [
        ("2,3", "deepspeed", True),
        ("2,3", "mpi", True),
        ("GPU-aaa", "deepspeed", True),
        ("", "deepspeed", True),  # of a run that was meant for CPUs
        # As a batch system sets it, and srun passes it.
        ("0,1,2,3", "deepspeed", False),
        ("2,3", "slurm", False),
        ("2,3", "torchrun", False),  # a shell of a node
    ],
)
def test_visible_gpus_that_do_not_reach_other_nodes_warn(value, launcher, warns, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    context = make_context(launcher=launcher, slots=2, gpus=gpus(gpu()))

    def found() -> list[str]:
        warnings = [r for r in run_check(CHECKS["ENV001"], context) if r.status == WARN]
        return [r.measured for r in warnings if "CUDA_VISIBLE_DEVICES" in r.measured]

    assert len(found()) == warns
    assert not warns or f"CUDA_VISIBLE_DEVICES={value} is not passed" in found()[0]
    context.options.propagates_all = True  # mmldlm launch, which starts torchrun itself
    assert len(found()) == (warns or launcher == "torchrun")
    context.facts = {name: {"gpus": {"value": gpus()}} for name in "abc"}
    assert found() == []
