"""Which nodes of an elastic launch train, and with which overrides. tests/multinode plays it on
real hosts.
"""

from __future__ import annotations

import argparse
import errno

import pytest

from mmldlm.cluster.hostfile import Node
from mmldlm.commands.launch import main
from mmldlm.errors import UserError
from mmldlm.launch import elastic
from mmldlm.launch.elastic import RETURN_CHECKS, ElasticNodes, ReturnWatch
from mmldlm.launch.watcher import launcher_start
from mmldlm.preflight.runner import all_checks
from tests.support.preflight_context import three_nodes


def test_fewer_nodes_keep_the_global_batch(tmp_path):
    context = three_nodes(tmp_path, (2, 2, 2))
    nodes = ElasticNodes(context)
    assert nodes.overrides() == []
    assert nodes.exclude(["c"]) and nodes.overrides() == ["training.grad_accum_steps=3"]
    assert context.names == ["a", "b"] and context.master_address() == "a"
    launcher_start(context, tmp_path, ["rank.py"], {})
    assert (tmp_path / "hostfile").read_text() == "a slots=2\nb slots=2\n"
    # Another one is lost later: it is still the batch that the run began with; and another node is
    # the first.
    assert nodes.exclude(["a"]) and nodes.overrides() == ["training.grad_accum_steps=6"]
    assert context.names == ["b"] and context.master_address() == "b"
    # They return, one after the other.
    nodes.take_back(["a"])
    assert context.names == ["a", "b"] and context.master_address() == "a"
    assert nodes.overrides() == ["training.grad_accum_steps=3"]
    nodes.take_back(["c"])
    assert context.names == ["a", "b", "c"] and nodes.overrides() == [] and nodes.absent == set()


def test_nodes_beyond_the_largest_fitting_set_wait(tmp_path, capsys):
    """Four nodes and no factor of three in the batch: two train."""
    context = three_nodes(tmp_path, (1, 1, 1))
    context.nodes.append(Node("d", 1))
    nodes = ElasticNodes(context)
    nodes.print_plan()
    assert "without one of 4 nodes 2 train and 1 wait" in capsys.readouterr().out
    assert nodes.exclude(["b"]) and context.names == ["a", "c"]
    assert nodes.overrides() == ["training.grad_accum_steps=4"]
    assert "continuing without b: 2 ranks; d wait" in capsys.readouterr().err
    # One that waited takes the place of the next that fails.
    assert nodes.exclude(["a"]) and context.names == ["c", "d"]
    # No restart for a third node, with which two would train; for the fourth.
    assert not nodes.would_gain(["a"]) and nodes.would_gain(["a", "b"])
    # One that is back takes its place when another attempt begins.
    nodes.mark_present(["a"])
    assert context.names == ["c", "d"] and nodes.exclude(["c"])
    assert context.names == ["a", "d"] and nodes.absent == {"b", "c"}


def test_fewer_nodes_have_fewer_hsdp_replicas(tmp_path):
    """public-reports C 11 elastic-hsdp: one replica per node stays so; else a number that divides
    the ranks.
    """
    context = three_nodes(tmp_path, (2, 2, 2))
    context.config.engine.hsdp_replicas = 3
    nodes = ElasticNodes(context)
    assert nodes.exclude(["c"])
    assert nodes.overrides() == ["training.grad_accum_steps=3", "engine.hsdp_replicas=2"]
    assert nodes.exclude(["a"])
    assert nodes.overrides() == ["training.grad_accum_steps=6", "engine.hsdp_replicas=1"]
    context = three_nodes(tmp_path / "other", (2, 2, 2))
    context.config.engine.hsdp_replicas = 2
    nodes = ElasticNodes(context)
    assert nodes.exclude(["a", "b"])
    assert nodes.overrides() == ["training.grad_accum_steps=6", "engine.hsdp_replicas=2"]


@pytest.mark.parametrize(("slots", "bad"), [((5, 1, 1), ["b", "c"]), ((1, 1, 1), ["a", "b", "c"])])
def test_a_batch_that_cannot_be_kept_ends_the_run(tmp_path, slots, bad, capsys):
    nodes = ElasticNodes(three_nodes(tmp_path, slots))
    assert not nodes.exclude(bad)
    assert "cannot continue" in capsys.readouterr().err


def test_a_loss_that_would_end_the_run_is_said_before_the_launch(tmp_path, capsys):
    context = three_nodes(tmp_path, (5, 1, 1))
    context.nodes = context.nodes[:2]
    ElasticNodes(context).print_plan()
    printed = capsys.readouterr().out
    assert "this run would end without b:" in printed and "without a" not in printed


def test_the_checks_of_a_return_exist_and_leave_out_none_of_a_node():
    checks = {check.id: check for check in all_checks()}
    of_nodes = {id for id, check in checks.items() if check.level <= 2 and check.scope == "node"}
    assert set(RETURN_CHECKS) <= set(checks)
    # A new check of nodes belongs to RETURN_CHECKS, or here: of a script; of what only costs time;
    # of the launcher and the master, which are those of the job.
    others = {"SCR001", "SCR002", "JIT002", "NET008", "LNCH003", "ENV002", "NET004", "NET005"}
    assert of_nodes - set(RETURN_CHECKS) == others


def test_a_thousand_nodes_are_planned_in_one_line(tmp_path, capsys):
    context = three_nodes(tmp_path, (8, 8, 8))
    context.nodes = [Node(f"n{number}", 8) for number in range(1024)]
    ElasticNodes(context).print_plan()
    (line,) = capsys.readouterr().out.splitlines()
    assert "without one of 1024 nodes 512 train and 511 wait" in line


def test_a_check_that_cannot_be_made_is_said_and_asked_again(tmp_path, monkeypatch, capsys):
    """A full disk under the log folder: the thread goes on, and the run does."""

    def full(self, nodes):
        if not seen:
            seen.append(nodes)
            raise OSError(errno.ENOSPC, "No space left on device")
        return {}

    seen: list = []
    monkeypatch.setattr(elastic, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(elastic, "ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(ReturnWatch, "_answers", lambda self, name: True)
    monkeypatch.setattr(ReturnWatch, "_failures", full)
    context = three_nodes(tmp_path, (1, 1, 1))
    watch = ReturnWatch(context, context.nodes[2:], tmp_path)
    watch._thread.join(30)
    assert watch.returned() == ["c"]
    assert "c answers again, but cannot be checked" in capsys.readouterr().out


def test_elastic_without_a_retry_is_refused():
    args = argparse.Namespace(
        elastic=True, retries=0, script=None, heartbeat_timeout=None, level=2
    )
    with pytest.raises(UserError, match="--retries"):
        main(args)
