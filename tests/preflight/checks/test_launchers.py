"""The launcher probe, with `env` in place of the launcher."""

from __future__ import annotations

import socket
import sys

import pytest

from mmldlm.preflight.checks.launchers import run_launcher_probe
from tests.support.preflight_context import make_context


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
