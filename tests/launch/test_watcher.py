"""Outcomes that the watcher derives from rank states, for three nodes without processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from mmldlm.errors import EXIT_DONE, EXIT_INTERRUPTED
from mmldlm.launch import watcher
from mmldlm.launch.watcher import Watcher
from tests.launch.test_launcher import three_nodes


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A watcher of three nodes with one rank each, whose answers are `views`; and how it judges
    them.
    """
    context = three_nodes(tmp_path, (1, 1, 1))
    context.options.ssh_option = []
    one = Watcher(context, [], tmp_path)
    monkeypatch.setattr(watcher, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(watcher, "AGREED_SECONDS", 0.0)
    states = {
        name: {
            "rank": number,
            "exit": None,
            "alive": True,
            "orphan": False,
            "ended": time.time(),
            "last": [],
            "log": "/",
        }
        for number, name in enumerate("abc")
    }
    views = {
        name: {"ranks": [state], "processes": 2, "ended": []} for name, state in states.items()
    }
    one.pool.call = lambda *args, **more: views
    yield one, states, views
    one.pool.stop()


def ended(code: int) -> subprocess.Popen:
    """A launcher that has ended."""
    process = subprocess.Popen([sys.executable, "-c", f"import sys; sys.exit({code})"])
    process.wait()
    return process


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"exit": 137, "out_of_memory": True}, "out of memory, see dmesg on b"),
        (
            {"exit": 137, "out_of_memory": False},
            "(signal 9): killed manually, by the scheduler, or for lack of memory",
        ),
        ({"exit": 128 + signal.SIGSEGV}, "(signal 11)"),
        ({"exit": EXIT_INTERRUPTED}, "it received a signal that this launch did not send"),
    ],
)
def test_the_reason_names_rank_node_and_what_the_status_means(watched, state, text):
    one, states, views = watched
    states["b"].update(state, alive=False)
    outcome = one.evaluate(views, False, 10.0)
    assert (
        outcome.code == state["exit"]
        and outcome.reason.startswith("rank 1 on b ended first")
        and text in outcome.reason
    )


def test_an_end_that_was_asked_for_is_not_called_a_fault(watched):
    one, states, views = watched
    one.interrupts = 1
    for state in states.values():
        state.update(exit=EXIT_INTERRUPTED, alive=False)
    assert one.evaluate(views, False, 10.0).reason == "interrupted as requested"


@pytest.mark.parametrize("code", [2, EXIT_INTERRUPTED])
def test_exit_codes_of_a_script_have_no_meaning(watched, code):
    """mmldlm's own ranks agree on them; one that alone ends with such a code is a fault."""
    one, states, views = watched
    states["b"].update(exit=code, alive=False)
    assert one.evaluate(views, False, 10.0).failed_nodes == []
    one.context.options.script = ["run.py"]
    outcome = one.evaluate(views, False, 10.0)
    assert outcome.failed_nodes == ["b"] and outcome.reason.endswith(f"with status {code}")


def test_a_script_that_ends_at_the_signal_was_interrupted(watched):
    one, states, views = watched
    one.context.options.script, one.interrupts = ["run.py"], 1
    for state in states.values():
        state.update(exit=128 + signal.SIGTERM, alive=False)
    assert one.evaluate(views, False, 10.0).reason == "interrupted as requested"
    one.interrupts = 0
    assert "ended first" in one.evaluate(views, False, 10.0).reason


@pytest.mark.parametrize(
    ("code", "processes", "expected"), [(0, 0, EXIT_DONE), (1, 0, 1), (0, 2, 1)]
)
def test_a_rank_without_a_state_is_judged_by_the_launcher(
    watched, capsys, code, processes, expected
):
    """Its node's folders were full from the first moment."""
    one, states, views = watched
    one.process = ended(code)
    views_of_none = {name: {"ranks": [], "processes": 0, "ended": []} for name in "abc"}
    # A launcher that ended before it started anything.
    assert one.evaluate(views_of_none, True, 10.0).code == 1
    for name in "ac":
        states[name].update(exit=EXIT_DONE, alive=False)
        views[name]["processes"] = 0
    views["b"] = {"ranks": [], "processes": processes, "ended": []}
    outcome = one.evaluate(views, True, 10.0)
    assert outcome.code == expected
    assert ("left no status" in capsys.readouterr().out) == (expected == EXIT_DONE)


def test_a_rank_that_ends_because_of_another_has_not_failed(watched):
    """A stopped rank ends nothing: the first to end is the healthy one that found it."""
    one, states, views = watched
    sentence = "rank 0 on a (pid 7) has made no progress since step 4"
    states["b"].update(exit=1, alive=False, failure={"ranks": [[0, 0]], "sentence": sentence})
    outcome = one.evaluate_failed_rank(views)
    assert (outcome.code, outcome.reason, outcome.failed_nodes) == (1, sentence, ["a"])
    states["b"].update(failure={"ranks": [[1, 1]], "sentence": "rank 1 on b failed"})
    outcome = one.evaluate_failed_rank(views)
    assert outcome.failed_nodes == ["b"] and "rank 1 on b ended first" in outcome.reason


def test_a_node_that_misses_a_round_has_not_lost_its_ranks(watched, monkeypatch):
    """The launcher ends in the round in which the session to a node breaks and is opened again."""
    one, states, views = watched
    monkeypatch.setattr(watcher, "POLL_SECONDS", 0.0)
    one.process = ended(0)
    for state in states.values():
        state.update(exit=EXIT_DONE, alive=False)
    rounds = [{name: views[name] for name in "ac"}, views]
    one.pool.call = lambda *args, **more: rounds.pop(0)
    outcome = one._watch()
    assert (outcome.code, outcome.reason) == (EXIT_DONE, "") and rounds == []


def test_a_node_that_never_reports_is_named(watched, monkeypatch):
    one, states, views = watched
    monkeypatch.setattr(watcher, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(watcher, "UNANSWERED_SECONDS", 0.05)
    del views["b"]
    one.pool.errors["b", "report_ranks"] = "PermissionError: /tmp/states"
    outcome = one._watch()
    assert outcome.failed_nodes == ["b"] and outcome.reason.startswith("b: it does not report")
    assert "PermissionError" in outcome.reason


def test_only_the_same_signal_again_means_at_once(watched, monkeypatch):
    """A session that closes sends SIGHUP and SIGTERM, Slurm SIGTERM after SIGUSR1."""
    one, _, _ = watched
    clock = [100.0]
    monkeypatch.setattr(watcher.time, "monotonic", lambda: clock[0])
    for signum, seconds, count in (
        (signal.SIGHUP, 0, 1),
        (signal.SIGTERM, 0.01, 1),
        (signal.SIGHUP, 0.5, 1),
        (signal.SIGUSR1, 30, 1),
        (signal.SIGINT, 30, 1),
        (signal.SIGINT, 2, 2),
    ):
        clock[0] += seconds
        one._count_interrupt(signum, None)
        assert one.interrupts == count


def test_an_interrupt_reaches_ranks_that_start_after_it(watched, monkeypatch):
    """They may be there only minutes after Ctrl-C: a slow import, a node that is late."""
    one, states, views = watched
    monkeypatch.setattr(watcher, "POLL_SECONDS", 0.0)
    pids, told, polls = {"a": [7], "b": [], "c": []}, [], []

    def call(action, args=None, timeout=0):
        if action == "signal_ranks":
            given = {name: args(name)["told"] for name in views}
            new = {name: [p for p in pids[name] if p not in given[name]] for name in views}
            told.append({name: found for name, found in new.items() if found})
            return new
        polls.append(action)
        if len(polls) == 2:
            pids.update(b=[8], c=[9])
        if len(polls) == 4:
            for state in states.values():
                state.update(exit=EXIT_INTERRUPTED, alive=False)
        return views

    one.pool.call, one.interrupts = call, 1
    assert one._watch().reason == "interrupted as requested"
    assert told == [{"a": [7]}, {"b": [8], "c": [9]}, {}, {}]


def test_nothing_is_started_after_an_interrupt(watched, monkeypatch):
    one, _, _ = watched
    one.pool.start = lambda: one._count_interrupt(signal.SIGINT, None)
    stop, one.pool.stop = one.pool.stop, lambda: None
    monkeypatch.setattr(one, "_prepare_nodes", lambda: None)
    monkeypatch.setattr(one, "_start", lambda: pytest.fail("the launcher was started"))
    outcome = one.run()
    one.pool.stop = stop
    assert (outcome.code, outcome.interrupted) == (EXIT_INTERRUPTED, True)
    assert outcome.reason == "interrupted before the ranks were started"


def test_a_rank_that_cannot_yet_save_ends_by_the_signal_as_requested(watched):
    one, states, views = watched
    one.interrupts = 1
    for state, code in zip(states.values(), (EXIT_INTERRUPTED, 143, 143), strict=True):
        state.update(exit=code, alive=False)
    outcome = one.evaluate(views, False, 10.0)
    assert (outcome.code, outcome.reason) == (EXIT_INTERRUPTED, "interrupted as requested")


def test_a_wrapper_that_the_launcher_killed_hides_no_fault(watched):
    """As mpirun does to all others when a rank ends with an error."""
    one, states, views = watched
    now = time.time()
    states["a"].update(alive=False, ended=now + 1.0)
    states["b"].update(exit=1, alive=False, ended=now, last=["KeyError: 'x'"])
    outcome = one.evaluate(views, False, 10.0)
    assert outcome.failed_nodes == ["b"] and outcome.last_lines == ["KeyError: 'x'"]
    # It ended first: the others were stopped for it, or failed later.
    states["b"].update(exit=128 + signal.SIGTERM)
    states["c"].update(exit=1, alive=False, ended=now + 3.0)
    outcome = one.evaluate(views, False, 10.0)
    assert outcome.failed_nodes == ["a"] and "rank 0 on a ended first" in outcome.reason


def test_a_full_disk_does_not_stop_the_reading_of_the_launchers_output(watched, capsys):
    """Its ranks would wait for room in the pipe."""
    one, _, _ = watched
    (one.log_dir / "launcher.log").symlink_to("/dev/full")
    words = [sys.executable, "-c", "print('x' * (1 << 20)); print('the end')"]
    one.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    one._copy_output(one.process.stdout)
    assert one.process.wait(30) == 0 and capsys.readouterr().out.endswith("the end\n")


@pytest.mark.parametrize(("gpus", "accelerator"), [(None, None), ([], "cpu"), ([{}], None)])
def test_cpus_are_forced_only_where_the_nodes_have_no_gpus(
    watched, monkeypatch, gpus, accelerator
):
    """Level 0 asks this machine alone, which may be a login node without GPUs."""
    one, _, _ = watched
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    one.context.head = {"gpus": {"value": {"absent": "no driver"}}}
    if gpus is not None:
        one.context.facts = {name: {"gpus": {"value": {"gpus": gpus}}} for name in "abc"}
    assert watcher.rank_variables(one.context).get("DS_ACCELERATOR") == accelerator


def test_deepspeeds_launcher_passes_the_libraries_of_the_head(watched, tmp_path, monkeypatch):
    """Its launch.py on a node, and the wrappers of ranks, run before any launch file is read."""
    one, _, _ = watched
    (tmp_path / "pdsh").write_text('#!/bin/sh\necho "words: $*"\n')
    (tmp_path / "pdsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    # DeepSpeed would paste the last one into a line for the shells of the nodes.
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/a:/opt/b:/$(touch pwned)")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    start = watcher.launcher_start(one.context, tmp_path, ["rank.py"], {})
    done = subprocess.run(**start, capture_output=True, text=True, timeout=60)
    assert "export LD_LIBRARY_PATH=/opt/a:/opt/b; " in done.stdout, done.stderr
