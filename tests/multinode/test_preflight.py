"""Preflight on three virtual hosts: no false alarms, and every injected fault reported on its
node.

Faults that do not touch one another share a run; benchmarks/preflight.py injects each alone.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.support.helpers import LONG, ROOT
from tests.support.preflight_faults import (
    ALL,
    FAULTS,
    HARMLESS,
    PYTHON,
    TOGETHER,
    Scene,
    problem_text,
    problems,
)

pytestmark = pytest.mark.long

BY_NAME = {fault.name: fault for fault in FAULTS}
HEAD_ALONE = {
    "hostfile missing": 2,
    "typo in slots": 2,
    "uneven slots": 1,
    "one host that is not this one": 0,
    "unknown key": 2,
}
"""Exit codes of the faults that the head sees."""
ALONE = [
    name
    for name in BY_NAME
    if name not in HEAD_ALONE and all(name not in group for group in TOGETHER)
]


@pytest.fixture
def scene(cluster, store, saved_run, tmp_path):
    return Scene(cluster, store, tmp_path / "scene", saved_run)


def inject(scene, names):
    """Run with some faults; every one must be found, and nothing else."""
    with contextlib.ExitStack() as stack:
        for name in names:
            BY_NAME[name].inject(scene, stack)
        receipt = scene.run()
    expected = set().union(*(BY_NAME[name].expected for name in names))
    assert problems(receipt) == expected, receipt["screen"]
    for name in names:
        fault = BY_NAME[name]
        text = problem_text(receipt, fault.id)
        assert [word for word in fault.words if word not in text] == [], text
    return receipt


@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: names[0])
def test_faults_are_found_where_they_are_and_nothing_else(scene, names):
    receipt = inject(scene, names)
    assert receipt["exit_code"] == 1
    faulty = {node for name in names for _, node in BY_NAME[name].expected if node in ALL}
    assert set(receipt["failing_nodes"]) <= faulty
    assert all(node in receipt["screen"] for node in faulty)


@LONG
@pytest.mark.parametrize("name", ALONE)
def test_a_fault_alone(scene, name):
    inject(scene, [name])


@pytest.mark.parametrize("name", HEAD_ALONE)
def test_what_the_head_sees_without_its_nodes(scene, name):
    scene.level = 0
    receipt = inject(scene, [name])
    assert receipt["exit_code"] == HEAD_ALONE[name]


def test_what_a_run_trains_with_raises_no_alarm(scene):
    """Hosts that are healthy, and a little odd."""
    with contextlib.ExitStack() as stack:
        for harmless in HARMLESS:
            harmless.inject(scene, stack)
        receipt = scene.run()
    assert (problems(receipt), receipt["exit_code"]) == (set(), 0), receipt["screen"]
    assert receipt["exclude"] == "" and receipt["launcher"] == "deepspeed"
    # One of them is known to ssh alone, by another name.
    assert set(receipt["nodes"]) == {*ALL, "worker2"} - {"n2"}


@LONG
def test_launch_trains_with_it(scene):
    """Preflight of all levels that launch runs by itself, the watcher's agents, and the
    launcher.
    """
    with contextlib.ExitStack() as stack:
        for harmless in HARMLESS:
            harmless.inject(scene, stack)
        scene.save_dir.mkdir(parents=True)
        hostfile = scene.folder / "hostfile"
        hostfile.write_text(scene.hostfile_text.replace("n3 slots=1\n", ""))
        command = [PYTHON, "-m", "mmldlm.launch", "--hostfile", hostfile, "--config-name", "tiny"]
        command += [f"data.latent_data_root={scene.store}", f"logging.save_dir={scene.save_dir}"]
        command += [
            "training.num_train_steps=2",
            "training.train_batch_size=4",
            "data.max_validation_samples=16",
        ]
        done = scene.cluster["n1"].run(
            *command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout=280
        )
    assert done.returncode == 0 and "done; logs of all ranks" in done.stdout, done.stdout[-3000:]


@LONG
@pytest.mark.parametrize("launcher", ["deepspeed", "mpi"])
def test_healthy_hosts_raise_no_alarm(scene, launcher):
    scene.words += ["--launcher", launcher]
    receipt = scene.run()
    assert (problems(receipt), receipt["exit_code"]) == (set(), 0), receipt["screen"]
    assert receipt["exclude"] == "" and set(receipt["nodes"]) == set(ALL)


@LONG
def test_fix_writes_what_stays_behind_and_then_it_arrives(scene):
    scene.env_file("OMP_NUM_THREADS=1\n")
    scene.environment.update(GLOO_SOCKET_IFNAME="eth0", HF_TOKEN="not to be written")
    scene.words.append("--fix")
    receipt = scene.run()
    written = (scene.folder / "deepspeed_env").read_text()
    assert written == "OMP_NUM_THREADS=1\nGLOO_SOCKET_IFNAME=eth0\n"
    # A secret is named, never shown or written.
    assert problems(receipt) == {("ENV002", name) for name in ALL}
    assert "HF_TOKEN" in receipt["screen"] and "not to be written" not in receipt["screen"]
    assert "GLOO_SOCKET_IFNAME" not in problem_text(receipt, "ENV002")


@LONG
def test_collectives_and_two_training_steps_through_the_launcher(scene):
    scene.hostfile_text = "n1 slots=1\nn2 slots=1\n"
    scene.words += ["data.max_validation_samples=16"]
    scene.level = 4
    receipt = scene.run()
    assert problems(receipt) == set(), receipt["screen"]
    passed = {
        r["id"]: r["measured"]
        for r in receipt["results"]
        if r["status"] == "PASS" and r["level"] >= 3
    }
    assert set(passed) == {"COLL001", "COLL002", "COLL003", "DRY001", "DRY002"}
    assert "gloo" in passed["COLL002"] and "waiting for data" in passed["DRY001"]
    assert passed["DRY001"] in receipt["screen"]  # what a user runs this level for
    # The rehearsal leaves nothing but the receipt and the nodes that passed.
    assert [path.name for path in scene.save_dir.iterdir()] == ["tiny"]
    left = sorted(path.name for path in (scene.save_dir / "tiny").iterdir())
    assert left == ["passing_nodes.txt", "preflight.json"]
