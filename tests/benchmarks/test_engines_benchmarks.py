"""The benchmarks of the engines in their short forms: what they claim about correctness holds, and
they can fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import _report
import _runs
import memory
import pytest
import zero_parity

from tests.support.helpers import LONG, ROOT, launch, launch_benchmark, rank_server
from tests.support.image_store import make_image_store

pytestmark = pytest.mark.long


def run_script(name: str, store, tmp_path, *words: str) -> tuple[dict[str, dict], str]:
    """Claims by id, and what was printed."""
    report = tmp_path / "report.json"
    done = launch_benchmark(name, "--data", store, "--json", report, *words)
    assert done.returncode == 0, done.stdout[-4000:]
    answer = json.loads(report.read_text())
    assert {"torch", "deepspeed", "cpus"} <= set(answer["conditions"])
    return {claim["id"]: claim for claim in answer["claims"]}, done.stdout


def test_more_ranks_and_offload_give_the_losses_of_one_process(store, tmp_path):
    """Uneven too: 37 samples in global batches of 8 leave ranks with empty micro-batches. The
    other engines: tests/integration/test_engines.py.
    """
    claims, output = run_script("parity.py", store, tmp_path, "--quick")
    assert set(claims) == {"loss_rel_diff_fp32", "loss_rel_diff_bf16"}
    assert all(claim["value"] <= claim["bound"] for claim in claims.values()), output
    for row in ("single x1", "zero3_offload x2", "hsdp x4"):
        assert row in output


def test_the_parity_of_the_quickstart_has_its_form(tmp_path, monkeypatch, capsys):
    """Of images, in one of its stages; tests/integration/test_engines.py has all four."""
    report, images = tmp_path / "parity.json", make_image_store(tmp_path / "images")
    words = ["--steps", "2", "--data", str(images), "--json", str(report), "task=image_text"]
    monkeypatch.setattr(sys, "argv", ["zero_parity.py", *words])
    monkeypatch.setattr(zero_parity, "STAGES", (3,))
    rank_server()
    assert zero_parity.main() == 0
    (claim,) = json.loads(report.read_text())["claims"]
    assert claim["id"] == "zero_stage_loss_rel_diff" and claim["value"] <= claim["bound"] == 1e-3
    assert "ZeRO-3, 2 ranks: largest relative loss difference" in capsys.readouterr().out


def test_two_kills(tmp_path):
    """One life saves in the background, one in the loop. Images that are shifted, and dropout:
    both must be drawn again by a resumed run.
    """
    words = ["--engines", "fsdp", "--kills", "2"]
    words += ["task=image_text", "data.shift_pixels=1", "model.dropout=0.1"]
    words += ["training.loss_type_weights={i2t: 0.5, t2i: 0.4, joint: 0.1}"]
    images = make_image_store(tmp_path / "images")
    claims, output = run_script("kill_resume.py", images, tmp_path, *words)
    assert set(claims) == {"kills_lost"} and claims["kills_lost"]["value"] == 0, output
    assert output.count("killed at step") == 2 and output.count("like an undisturbed run") == 1
    assert output.count(" async rank") == 1 and output.count(" sync  rank") == 1


@LONG
def test_the_cost_of_saving_is_measured(store, tmp_path):
    """Its form; a time is never asserted."""
    claims, output = run_script("checkpoint_overhead.py", store, tmp_path, "--quick")
    assert set(claims) == {"save_stall_share"} and claims["save_stall_share"]["measured"]
    for engine in ("zero2", "fsdp"):
        for kind in ("async", "sync"):
            assert f"{engine:8} {kind:12}" in output


@LONG
def test_bucket_sizes_are_compared(store, tmp_path):
    """Its form; a time is never asserted."""
    claims, output = run_script("communication.py", store, tmp_path, "--quick")
    (claim,) = claims.values()
    assert claim["id"] == "bucket_time_ratio_zero2" and claim["measured"]
    rows = [line for line in output.splitlines() if line.startswith("zero2 ")]
    assert [row.split()[1] for row in rows] == ["reduce", "5,000,000", "50,000,000"]
    assert all("%" in row for row in rows)
    # Elements sent over parameters, with two micro-batches.
    assert [float(row.split()[-1]) for row in rows] == pytest.approx([3, 5, 5], abs=0.01)


# -- what the scripts stand on --------------------------------------------------------------------


def test_a_missing_step_is_no_agreement():
    assert _runs.loss_difference({1: 2.0, 2: 4.0}, {1: 2.0, 2: 5.0}, 1, 2) == pytest.approx(0.2)
    assert _runs.loss_difference({1: 2.0}, {1: 2.0, 2: 5.0}, 1, 2) == float("inf")
    assert _runs.loss_difference({1: 2.0, 2: None}, {1: 2.0, 2: 5.0}, 1, 2) == float("inf")


def test_a_line_being_written_is_left_out(tmp_path):
    (tmp_path / "training_log.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    assert _runs.losses(tmp_path) == {1: 3.0}
    assert _runs.read_log(tmp_path, "events.jsonl") == []


def test_ranks_get_their_environment(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT'.split()\n"
        "print(sys.argv[1:], [os.environ[n] for n in names])\n"
        "sys.exit(int(os.environ['RANK']))\n"
    )
    ranks = rank_server().start(2, ["a", 5], script)
    assert ranks.wait(60) == [0, 1]
    assert "['a', '5'] ['1', '1', '2', '127.0.0.1'" in ranks.output()


def test_a_rank_that_stays_behind_is_ended(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(3)\ntime.sleep(600)\n"
    )
    assert rank_server().start(3, [], script).wait(120, grace=0.2) == [3, -9, -9]
    assert rank_server().start(1, [], script).wait(120) == [3]


def test_a_failed_run_ends_the_script_with_its_output(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('the reason')\n")
    with pytest.raises(SystemExit, match="the reason"):
        rank_server().run(2, [], script)


def test_ranks_end_with_the_launcher(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with _runs.RankServer(tmp_path / "ranks") as opened:
        (pid,) = opened.start(1, [], script).pids
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_killed_benchmark_ends_its_ranks_and_no_others(tmp_path):
    """It shares the server of this session, which it leaves with questions and without answers."""
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(600)\n")
    own = rank_server().start(1, [], script)
    client = f"""
import _runs, os, signal
with _runs.RankServer({str(tmp_path / "ranks")!r}) as server:
    print(server.start(1, [], _runs.Path({str(script)!r})).pids[0], flush=True)
    server._socket.sendall(b'{{"poll": []}}\\n' * 100)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", client], cwd=ROOT / "benchmarks", stdout=subprocess.PIPE, text=True
    )
    pid = int(process.stdout.readline())
    process.communicate()
    assert process.returncode == -9
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, "its rank still runs"
        time.sleep(0.05)
    assert own.codes() == [None]
    own.kill(0)
    assert own.wait(60) == [-9]


@LONG
def test_memory_runs_on_a_cpu_and_claims_nothing_without_a_gpu(
    store, tmp_path, monkeypatch, capsys
):
    """benchmarks/memory.py: promised and measured bytes of real runs."""
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "memory.py"), "--quick"]
    done = launch([*command, "--data", str(store), "--json", str(report), "--device", "cpu"])
    assert done.returncode == 0, done.stdout[-3000:]
    (row,) = json.loads(report.read_text())["conditions"]["rows"]
    assert row["plan"] == "zero2" and row["predicted"] > 0 and row["peak"] > 0
    monkeypatch.setattr(sys, "argv", command[1:])
    assert memory.main() == _report.COULD_NOT_CHECK and "SKIPPED" in capsys.readouterr().out
