"""Hostfile and measurements on facts written by hand."""

from __future__ import annotations

from mmldlm.cluster.agent import classify
from mmldlm.cluster.hostfile import Node
from mmldlm.preflight.check import ERROR, FAIL, PASS, WARN
from mmldlm.preflight.report import exit_code
from tests.support.preflight_context import make_context, run


def test_uneven_slots_fail_where_the_launcher_cannot_have_them():
    for launcher, status in (("deepspeed", FAIL), ("slurm", FAIL), ("torchrun", WARN)):
        context = make_context(launcher=launcher)
        context.nodes[2] = Node("c", 2)
        assert run("HOST002", context)[""].status == status


def test_a_failed_probe_is_an_error_and_a_hung_one_a_failure():
    context = make_context(limits={}, memory={})
    context.facts["a"]["limits"] = {"error": "KeyError: x"}
    context.facts["b"]["memory"] = {"error": "no answer within 5 s", "timeout": True}
    found = run("SSH006", context)
    assert (found["a"].status, found["b"].status, found["c"].status) == (ERROR, FAIL, PASS)
    assert exit_code([found["a"]]) == 3


def test_a_node_without_a_package_says_which_to_install():
    context = make_context(processes=[])
    context.facts["b"]["processes"] = {"error": "ModuleNotFoundError: No module named 'psutil'"}
    found = run("SSH006", context)["b"]
    assert found.status == FAIL and "psutil" in found.measured
    assert found.fix == "on b: pip install -c constraints.txt psutil"


def test_a_node_on_which_nothing_could_be_measured_is_not_passed_over():
    """As where its process table is full: no probe can be started."""
    context = make_context(("a", "b"), limits={})
    del context.facts["b"]
    context.errors["b", "collect_facts"] = "b: BlockingIOError: Resource temporarily unavailable"
    found = run("SSH006", context)
    assert (found["a"].status, found["b"].status) == (PASS, ERROR)
    assert "collect_facts failed on b: BlockingIOError" in found["b"].why


def test_a_launch_on_one_other_host_needs_no_option():
    """It adds --force_multi; --strict would refuse the warning."""
    context = make_context(("a",))
    context.head["network"] = {"value": {"hostname": "here", "interfaces": []}}
    assert run("HOST003", context)[""].status == WARN
    context.options.propagates_all = True
    assert run("HOST003", context)[""].status == PASS


def test_a_python_that_lacks_a_library_is_no_missing_checkout():
    context = make_context(("a", "b"))
    line = "python: error while loading shared libraries: libpython3.11.so.1.0: cannot open"
    context.failures["b"] = classify(127, line)
    found = run("PY001", context)["b"]
    assert found.status == FAIL and "libpython3.11" in found.measured
    assert "LD_LIBRARY_PATH" in found.fix and "b" not in run("PY002", context)
