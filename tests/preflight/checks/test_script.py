"""A script of the user's own: what a node has of it, and whether all nodes have the same."""

from __future__ import annotations

import pytest

from mmldlm.preflight.check import FAIL, PASS, SKIP
from mmldlm.preflight.checks import script
from mmldlm.preflight.runner import run_probes
from tests.support.preflight_context import make_context, run


def probe(monkeypatch, folder, *command):
    """What this machine has, asked in a child as on a node."""
    monkeypatch.chdir(folder)
    arguments = {"probes": ["script"], **script.request(list(command))}
    return run_probes(arguments)["script"]


def test_imports_are_found_without_running_the_script(tmp_path, monkeypatch):
    lines = ["import os, torch.nn", "from nosuchpackage import x", "from beside import y"]
    lines += ["class A:", "    import numpy", "try:", "    import nosuchextra"]
    lines += ["except ImportError:", "    pass", "open('ran', 'w')"]
    lines += ["from typing import TYPE_CHECKING", "if TYPE_CHECKING:", "    import nosuchtypes"]
    lines += ["def f():", "    import nosuchtracker"]
    (tmp_path / "run.py").write_text("\n".join(lines))
    (tmp_path / "beside.py").write_text("y = 1")
    found = probe(monkeypatch, tmp_path, "run.py", "--lr", "1")["value"]
    assert found["path"] == str(tmp_path / "run.py") and not (tmp_path / "ran").exists()
    imports = found["imports"]
    assert set(imports) == {"os", "torch", "nosuchpackage", "beside", "numpy", "typing"}
    assert imports["os"] == "" and imports["nosuchpackage"] == script.MISSING
    assert imports["torch"][0].isdigit() and imports["beside"].startswith("file ")
    (tmp_path / "beside.py").write_text("y = 2")
    assert (
        probe(monkeypatch, tmp_path, "run.py")["value"]["imports"]["beside"] != imports["beside"]
    )


def test_a_module_is_found_as_python_finds_it(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import json")
    (tmp_path / "package" / "__init__.py").write_text("")
    found = probe(monkeypatch, tmp_path, "-m", "package", "--steps", "3")["value"]
    assert found["path"].endswith("package/__main__.py") and found["imports"] == {"json": ""}
    assert "no module absent" in probe(monkeypatch, tmp_path, "-m", "absent")["error"]


@pytest.mark.parametrize(("text", "words"), [(None, "No such file"), ("def f(:\n", "SyntaxError")])
def test_a_script_that_cannot_run_is_told(tmp_path, monkeypatch, text, words):
    if text is not None:
        (tmp_path / "run.py").write_text(text)
    assert words in probe(monkeypatch, tmp_path, "run.py")["error"]


def state(content="abc", **imports):
    return {"path": "/s/run.py", "hash": content, "imports": {"torch": "2.13.0", **imports}}


def context_of(*command, **states):
    context = make_context(tuple("abc"), script=states)
    context.options.script = list(command)
    return context


def test_a_node_that_lacks_a_package_or_has_another_one_fails():
    states = {"a": state(), "b": state(wandb=script.MISSING), "c": state(torch="2.12.0")}
    context = context_of("run.py", **states)
    there, same = run("SCR001", context), run("SCR002", context)
    assert [there[name].status for name in "abc"] == [PASS, FAIL, PASS]
    assert "wandb" in there["b"].measured and "install wandb on b" in there["b"].fix
    assert same["a"].status == PASS and same["c"].status == FAIL
    assert "torch 2.12.0 (others 2.13.0)" in same["c"].measured


def test_a_node_with_another_script_fails():
    states = {"a": state(), "b": state("xyz"), "c": state()}
    found = run("SCR002", context_of("run.py", **states))
    assert [found[name].status for name in "abc"] == [PASS, FAIL, PASS]
    assert "another content of /s/run.py" in found["b"].measured


def test_a_run_of_mmldlm_has_no_script():
    context = make_context()
    assert run("SCR001", context)[""].status == run("SCR002", context)[""].status == SKIP
