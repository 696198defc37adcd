"""Collectives of level 3, on results written by hand."""

from __future__ import annotations

from mmldlm.preflight.check import FAIL, PASS
from tests.support.preflight_context import gpu, gpus, make_context, run


def test_gloo_between_gpus_fails():
    """Its values are right, and the run would train on the CPU."""

    def verdict(backend, facts):
        context = make_context(("a", "b"), gpus=facts)
        answer = {"formed": 1.0, "wrong": [], "backend": backend}
        context.collectives = {
            "rounds": [("1.1", ["a", "b"])],
            "ranks": {(node, 0): {"1.1": answer} for node in "ab"},
        }
        (found,) = run("COLL002", context).values()
        return found

    absent = {"absent": "no NVIDIA driver"}
    assert verdict("nccl", gpus(gpu())).status == verdict("gloo", absent).status == PASS
    found = verdict("gloo", {"a": absent, "b": gpus(gpu())})
    assert found.status == FAIL and "uses no GPU on b" in found.measured
