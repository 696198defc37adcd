"""A preflight context of three nodes with facts written by hand."""

from __future__ import annotations

import argparse

from mmldlm.cluster.hostfile import Node
from mmldlm.preflight.check import Result, run_check
from mmldlm.preflight.context import Context
from mmldlm.preflight.runner import all_checks
from mmldlm.tasks.registry import load_config

CHECKS = {found.id: found for found in all_checks()}
GIB = 1 << 30


def make_context(nodes=("a", "b", "c"), launcher="deepspeed", slots=1, **facts) -> Context:
    """A context with the same facts on every node; facts[probe] may be a dict by node."""
    options = argparse.Namespace(
        level=2,
        launcher=launcher,
        propagates_all=False,
        script=None,
        ssh_port=None,
        ssh_option=[],
        hostfile="h",
        master_addr=None,
        master_port=29500,
    )
    context = Context(options, [Node(name, slots) for name in nodes])
    for probe, value in facts.items():
        for name in nodes:
            own = value[name] if isinstance(value, dict) and set(value) == set(nodes) else value
            context.facts.setdefault(name, {})[probe] = {"value": own}
    return context


def three_nodes(tmp_path, slots):
    """Nodes a, b, c and a run with a config: 4 samples a pass and rank, 2 passes."""
    config = load_config(
        "tiny",
        None,
        [
            f"logging.save_dir={tmp_path}",
            "training.train_batch_size=4",
            "training.grad_accum_steps=2",
        ],
    )
    (config.run_dir() / "logs").mkdir(parents=True)
    nodes = [Node(name, count) for name, count in zip("abc", slots, strict=True)]
    options = argparse.Namespace(
        hostfile="h",
        master_addr=None,
        master_port=1,
        ssh_port=None,
        ssh_option=[],
        launcher="deepspeed",
        script=None,
    )
    return Context(options, nodes, config=config)


def run(id: str, context: Context) -> dict[str, Result]:
    return {result.node: result for result in run_check(CHECKS[id], context)}


def gpu(**changes) -> dict:
    sound = {
        "index": 0,
        "name": "H100",
        "memory_total": 80 * GIB,
        "memory_free": 79 * GIB,
        "ecc_uncorrected": 0,
        "remap_pending": False,
        "remap_failed": False,
        "slowed": [],
        "recovery": None,
        "processes": [],
    }
    return {**sound, **changes}


def gpus(*entries, driver="570.1", **changes) -> dict:
    sound = {
        "cuda": {"code": 0, "version": 12080},
        "torch": {"version": "2.13.0", "cuda": "12.8", "hip": None},
    }
    return {"driver": driver, "gpus": list(entries), **sound, **changes}
