"""benchmarks/all.py: what each end of a script amounts to, and the guard's claims through it."""

from __future__ import annotations

import importlib
import json
import sys

import _report
import _store
import pytest

from tests.support.helpers import LONG, ROOT, launch

every = importlib.import_module("all")

# name -> a benchmark that ends in its own way, and what must be said of it
HEAD = "import sys, _report\npath = sys.argv[sys.argv.index('--json') + 1]\n"
SCRIPTS = {
    "fine": (
        HEAD + "sys.exit(_report.write(path, [_report.claim('count', 1, '<=', 1)], '--quick' in"
        " sys.argv))"
    ),
    "wrong": HEAD + "sys.exit(_report.write(path, [_report.claim('count', 2, '<=', 1)]))",
    "nan": HEAD + "sys.exit(_report.write(path, [_report.claim('count', float('nan'), '<=', 1)]))",
    "slow": (
        HEAD
        + "sys.exit(_report.write(path, [_report.claim('s', 2, '<=', 1, measured=True)], '--quick'"
        " in sys.argv))"
    ),
    "crash": "raise ValueError('the reason')",
    "late_crash": (
        HEAD + "_report.write(path, [_report.claim('count', 1, '<=', 1)])\nraise ValueError('the"
        " reason')"
    ),
    "silent": HEAD + "sys.exit(_report.write(path, []))",
    "no_report": "",
    "skips": HEAD + "print('needs the extra bench')\nsys.exit(_report.COULD_NOT_CHECK)",
    "hangs": "import time\nprint('waiting', flush=True)\ntime.sleep(600)",
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    for name, source in SCRIPTS.items():
        (folder / f"{name}.py").write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n{source}\n"
        )
    (folder / "_helper.py").write_text("raise AssertionError('a helper is not a benchmark')\n")
    return folder


def run(scripts, monkeypatch, tmp_path, *words: str) -> tuple[int, dict]:
    report = tmp_path / "all.json"
    monkeypatch.setattr(sys, "argv", ["all.py", "--json", str(report), *words])
    code = every.main(scripts)
    answer = json.loads(report.read_text())
    return code, {entry["script"]: entry for entry in answer["conditions"]["scripts"]} | {
        "claims": answer["claims"]
    }


def test_each_end_is_what_it_is(scripts, monkeypatch, tmp_path, capsys):
    names = sorted(set(SCRIPTS) - {"hangs"})
    code, found = run(scripts, monkeypatch, tmp_path, "--only", *names)
    shown = capsys.readouterr().out
    assert code == 1
    assert {name for name in names if found[name]["error"]} == {
        "crash",
        "late_crash",
        "silent",
        "no_report",
    }
    assert "the reason" in found["crash"]["error"] and "the reason" in found["late_crash"]["error"]
    assert [name for name in names if found[name]["skipped"]] == [
        "skips"
    ] and "needs the extra bench" in shown
    assert {claim["script"] for claim in found["claims"] if claim["holds"]} == {"fine"}
    assert "9 scripts: 1 claims hold, 3 fail" in shown
    assert "wrong: FAILS" in shown and "nan: FAILS" in shown and "slow: FAILS" in shown
    assert "failed to run: crash, late_crash, no_report, silent" in shown
    assert "not checked, see the reason above: skips" in shown


def test_what_the_short_form_measures_is_neither_held_nor_failed(
    scripts, monkeypatch, tmp_path, capsys
):
    code, _ = run(scripts, monkeypatch, tmp_path, "--quick", "--only", "fine", "slow", "skips")
    shown = capsys.readouterr().out
    assert code == 0 and "3 scripts: 1 claims hold, 0 fail" in shown
    assert "measured and not judged with --quick: 1 claims" in shown
    code, _ = run(scripts, monkeypatch, tmp_path, "--quick", "--only", "slow", "skips")
    assert code == _report.COULD_NOT_CHECK


def test_a_script_that_does_not_end_is_ended(scripts, monkeypatch, tmp_path):
    code, found = run(scripts, monkeypatch, tmp_path, "--only", "hangs", "--timeout", "1")
    assert code == 1 and "no end after 1 s" in found["hangs"]["error"]
    assert "KeyboardInterrupt" in found["hangs"]["error"]  # it could have cleaned up


def test_scripts_are_found_and_have_a_test():
    """A new benchmark is run by all.py without being listed; its short form must be run by a test,
    too.
    """
    found = every.discover()
    assert {"guard_overhead", "parity", "step", "preflight"} <= set(found)
    assert {"baselines", "inversion", "speedrun"} <= set(found)
    assert not {"all", "_runs", "arms", "recipes"} & set(found)
    studies = [path for path in (ROOT / "studies").iterdir() if list(path.glob("*.py"))]
    assert [study.name for study in studies if not (study / "README.md").is_file()] == []
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in found if f"{name}.py" not in tests] == []
    for name, path in found.items():
        source = path.read_text()
        assert '"--quick"' in source and '"--json"' in source, name
        assert '"--data", required' not in source, name


def test_a_claim_is_judged_by_its_kind():
    count, clock = _report.claim("n", 2, "<=", 1), _report.claim("s", 2, "<=", 1, measured=True)
    assert [_report.verdict(claim, False) for claim in (count, clock)] == ["FAILS", "FAILS"]
    assert [_report.verdict(claim, True) for claim in (count, clock)] == ["FAILS", "not judged"]
    assert _report.write(None, [clock], True) == 0 == _report.write(None, [], False)
    assert _report.write(None, [clock]) == 1 == _report.write(None, [count, clock], True)


def test_a_store_can_be_made_of_the_standard_library():
    sentences = _store.stdlib_sentences(640)
    assert len(set(sentences)) == 640 and all(len(text.split()) > 2 for text in sentences)


@LONG
def test_the_guard_costs_one_host_sync_a_step(store, tmp_path):
    """benchmarks/guard_overhead.py through all.py: one host read per step and none by the model;
    time is not judged.
    """
    report = tmp_path / "all.json"
    words = ["--quick", "--only", "guard_overhead", "--data", str(store), "--json", str(report)]
    done = launch([sys.executable, str(ROOT / "benchmarks" / "all.py"), *words], timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    claims = {claim["id"]: claim for claim in json.loads(report.read_text())["claims"]}
    assert set(claims) == {"guard_cpu_ratio", "host_syncs_per_step", "model_reads_off_cpu"}
    assert (
        claims["host_syncs_per_step"]["value"] == 1 and claims["model_reads_off_cpu"]["value"] == 0
    )
    assert "holds       host_syncs_per_step = 1 (<= 1)" in done.stdout


def test_a_read_of_the_model_is_seen(monkeypatch):
    """The pass on `meta` can fail: the trick that this claim once missed, put back."""
    import guard_overhead

    from mmldlm.models.linear_cross_entropy import _LinearCrossEntropy as head

    backward = head.backward
    monkeypatch.setattr(
        head,
        "backward",
        staticmethod(lambda ctx, *grads: grads[0].item() and backward(ctx, *grads)),
    )
    assert guard_overhead.reads_off_cpu() == 3
    monkeypatch.undo()
    assert guard_overhead.reads_off_cpu() == 0
