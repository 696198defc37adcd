"""The launcher probe, with `env` in place of the launcher; and what variables do to a launch."""

from __future__ import annotations

import socket
import sys

import pytest

from mmldlm.preflight.check import WARN, run_check
from mmldlm.preflight.checks.launchers import run_launcher_probe
from tests.support.preflight_context import CHECKS, gpu, gpus, make_context


@pytest.mark.parametrize(("launcher", "visible"), [("deepspeed", None), ("slurm", "0")])
def test_the_gpu_of_the_probe_is_not_that_of_all_ranks(monkeypatch, launcher, visible):
    """DeepSpeed hides all GPUs but that of the one rank that it starts per node; the collectives
    of level 3 start one for each slot.
    """
    identity = {"machine": "m", "hostname": socket.gethostname()}
    context = make_context(("a",), launcher, slots=8, identity=identity)
    context.check_ids = {"LNCH003"}

    def command(script, *args):
        variables = ["CUDA_VISIBLE_DEVICES=0", "NCCL_DEBUG=INFO"]
        return ["env", *variables, sys.executable, *script]

    monkeypatch.setattr(context, "launcher_command", command)
    run_launcher_probe(context)
    environment = context.environment_on("a")
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment.get("CUDA_VISIBLE_DEVICES") == visible


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
