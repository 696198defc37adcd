"""benchmarks/convert.py in its short form: its claims about correctness hold, and its judge can
say no.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.helpers import LONG, ROOT, launch, launch_benchmark, run_ranks

torch = pytest.importorskip("torch", reason="torch is not installed")
SCRIPTS = ROOT / "benchmarks"
pytestmark = [pytest.mark.long, LONG]


@pytest.fixture(scope="module")
def made(zero_dir, fsdp_dir, tmp_path_factory):
    """What the script would make first, with the small checkpoints that are there already."""
    folder = tmp_path_factory.mktemp("benchmark") / "made"
    words = ("make", str(folder), "--hidden", "32", "--blocks", "2")
    done = run_ranks(2, SCRIPTS / "_checkpoints.py", *words)
    assert done.returncode == 0, done.stdout[-3000:]
    (folder / "world2").symlink_to(zero_dir)
    (folder / "small_fsdp").symlink_to(fsdp_dir)
    (folder / "COMPLETE").write_text("")
    return folder


def test_quick(made, tmp_path):
    report = tmp_path / "report.json"
    done = launch_benchmark("convert.py", "--quick", "--keep", made, "--json", report)
    assert done.returncode in (0, 1), done.stdout[-3000:]
    answer = json.loads(report.read_text())
    claims = {claim["id"]: claim for claim in answer["claims"]}
    assert set(claims) == {
        "speedup_zero2",
        "speedup_zero3",
        "speedup_dcp",
        "speedup_reshard_universal",
        "times_dd",
        "peak_mib",
        "tensors_unequal",
        "fuzz_wrong_files",
    }
    # Times belong to the machine; what was written does not.
    for name in ("peak_mib", "tensors_unequal", "fuzz_wrong_files"):
        assert claims[name]["holds"], done.stdout
    assert answer["conditions"]["compared"] > 100 and answer["conditions"]["fuzzed"] == 40
    tools = {(row["checkpoint"], row["tool"]) for row in answer["conditions"]["runs"]}
    assert {
        ("zero2", "zero_to_fp32"),
        ("fsdp", "dcp_to_torch"),
        ("reshard3", "ds_to_universal"),
    } <= tools


def test_the_judge_sees_one_wrong_element(made, tmp_path):
    from safetensors.torch import save_file

    path = made / "fsdp" / "truth.pt"
    truth = torch.load(path, weights_only=True)
    right = {name: value.clone() for name, value in truth.items() if name != "head.weight"}
    damaged = {}
    for name in ("blocks.1.up.weight", "scale"):
        damaged[name] = {key: value.clone() for key, value in right.items()}
        damaged[name][name].view(-1)[-1] += 1e-6
    absent = {name: value for name, value in right.items() if name != "scale"}
    jobs = []
    for case, tensors in enumerate((right, *damaged.values(), absent)):
        out = tmp_path / str(case)
        out.mkdir()
        save_file(tensors, out / "model.safetensors")
        jobs.append({"out": str(out), "truth": str(path), "rounded": False})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(SCRIPTS / "_checkpoints.py"), "judge"]
    said = launch([*command, str(tmp_path / "jobs.json")]).stdout
    answers = [json.loads(line) for line in said.splitlines()]
    assert [answer["unequal"] for answer in answers] == [0, 1, 1, 1], said
    for name, answer in zip(damaged, answers[1:]):
        assert name in answer["names"]
