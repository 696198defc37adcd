"""What surrounds a run: the working folder, virtual environments, limits of a job, clocks of other
hosts, variables.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time

import pytest

from tests.trials.harness import (
    LAUNCHERS,
    ROOT,
    SLOW,
    fresh_mmldlm,
    installed_environment,
    mmldlm,
    module_command,
    ranks_command,
    refuses,
    shell,
    succeeds,
    tiny_run,
    virtual_cluster,
)

# -- modules of the working folder ----------------------------------------------------------------

STANDARD = (
    "random",
    "signal",
    "queue",
    "json",
    "types",
    "numbers",
    "selectors",
    "tempfile",
    "pkgutil",
    "resource",
)
PACKAGES = ("datasets", "tokenizers", "yaml", "numpy", "pydantic", "rich")


@pytest.fixture
def project(tmp_path):
    """A working folder with modules of the names of others, each of which marks that it was
    executed.
    """
    folder = tmp_path / "project"
    folder.mkdir()
    for name in (*STANDARD, *PACKAGES):
        (folder / f"{name}.py").write_text(
            f"open('RAN', 'a').write('{name} ')\nraise SystemExit(77)\n", encoding="utf-8"
        )
    return folder


def unharmed(project, result) -> None:
    ran = (project / "RAN").read_text(encoding="utf-8") if (project / "RAN").exists() else ""
    assert ran == "" and result.code != 77 and not result.traceback, (
        f"{ran}\n{result.output[-2000:]}"
    )


# PYTHONPATH names the checkout, which is not installed here; the working folder is not on it.
def start(command: list, project, **environment: str):
    return shell(command, cwd=project, env={"PYTHONPATH": str(ROOT), **environment})


@pytest.mark.parametrize(
    ("module", "safe"),
    [
        ("train", "1"),
        *((name, "") for name in ("train", "cli", "launch.local_launcher", "cluster.hostfile")),
    ],
)
def test_a_module_that_is_started_by_name_imports_no_file_of_the_working_folder(
    project, module, safe
):
    """trials-3 BAD 3, public-reports B 25: torchrun -m mmldlm.train, python -m mmldlm.cli, ..."""
    if not safe:
        (project / "types.py").unlink()  # `python -m` itself imports it, before any file of ours
    words = {"launch.local_launcher": ("1", "-c"), "cluster.hostfile": ("none",)}.get(
        module, ("--help",)
    )
    unharmed(project, start(module_command(module, *words), project, PYTHONSAFEPATH=safe))


def test_ranks_import_no_file_of_the_working_folder(project):
    """trials-3 BAD 3: what `mmldlm train --nproc` and `prepare --num-procs` become."""
    (project / "rank.py").write_text("print('rank')\n", encoding="utf-8")
    result = start(ranks_command(1, project / "rank.py"), project)
    unharmed(project, result)
    succeeds(result, "rank")


@SLOW
def test_what_works_on_one_rank_works_on_two(corpus, project):
    """trials-3 BAD 3, public-reports B 25: the whole commands."""
    for words in (
        ("prepare", corpus, "--num-procs", "2", "--output-dir", project / "S"),
        ("train", *tiny_run(project / "S", project, "r", "engine.kind=ddp"), "--nproc", "2"),
        (
            "preflight",
            "--level",
            "1",
            "--skip",
            "JIT001,PROC001",
            *tiny_run(project / "S", project, "p"),
        ),
    ):
        result = fresh_mmldlm(*words, cwd=project, timeout=280)
        unharmed(project, result)
        assert result.code in (0, 1) if words[0] == "preflight" else result.code == 0, (
            result.output[-3000:]
        )


@SLOW
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_launch_imports_no_file_of_the_working_folder(trial_store, project, launcher):
    """trials-3 BAD 3: the launchers that `mmldlm launch` starts, and their ranks."""
    words = tiny_run(trial_store, project, "r", "engine.kind=ddp", "training.num_train_steps=2")
    line = ("launch", "--level", "0", "--launcher", launcher, "--nproc", "2", *words)
    result = fresh_mmldlm(*line, cwd=project, timeout=280)
    unharmed(project, result)
    assert result.code == 0, result.output[-3000:]


@SLOW
def test_a_task_of_the_working_folder_is_found(trial_store, project):
    """trials-3 BAD 3: the way in that stays."""
    (project / "own_task.py").write_text(
        "from mmldlm.tasks.translation.task import TranslationTask\nclass Own(TranslationTask):\n "
        "   pass\n",
        encoding="utf-8",
    )
    words = tiny_run(
        trial_store,
        project,
        "r",
        "task=own_task:Own",
        "engine.kind=ddp",
        "training.num_train_steps=1",
    )
    result = fresh_mmldlm("train", "--nproc", "2", *words, cwd=project, timeout=200)
    unharmed(project, result)
    assert result.code == 0, result.output[-3000:]


@SLOW
def test_a_working_folder_that_was_deleted_is_named(trial_store, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    command = [sys.executable, "-m", "mmldlm.cli", "train", *tiny_run(trial_store, tmp_path, "r")]
    result = shell(f"cd {folder}; rmdir {folder}; exec {' '.join(map(str, command))}")
    refuses(result, "working folder.*no longer exists")


# -- virtual environments -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "has_record", [True, False], ids=["recorded", "set up by an earlier version"]
)
def test_an_environment_of_another_checkout_is_not_taken_over(tmp_path, has_record):
    """newcomer B5."""
    other = tmp_path / "other"
    (other / "mmldlm").mkdir(parents=True)
    (other / "mmldlm" / "__init__.py").touch()
    pip = f'cd {other}; [ "$2" != pip ] || {{ echo pip >>{tmp_path}/installed; exit 1; }}'
    line = (
        f'PYTHONPATH={other}; export PYTHONPATH; [ "$2" != pip ] || echo pip'
        f" >>{tmp_path}/installed; {pip}"
    )
    venv = installed_environment(
        tmp_path / "venv", {"python": f'{line}; exec {sys.executable} "$@"'}, root=other
    )
    if has_record:
        (venv / ".mmldlm-root").write_text(f"{other}\n", encoding="utf-8")
    command = f"set -euo pipefail; . {LAUNCHERS}/_env.sh; mmldlm_env; echo reached"
    before = {path.name: path.read_bytes() for path in venv.iterdir() if path.is_file()}
    result = shell(command, env={"MMLDLM_VENV": str(venv)})
    refuses(result, f"set up for the mmldlm in {other}", "MMLDLM_VENV_TAKE=1")
    assert "reached" not in result and not (tmp_path / "installed").exists()
    assert {path.name: path.read_bytes() for path in venv.iterdir() if path.is_file()} == before
    shell(command, env={"MMLDLM_VENV": str(venv), "MMLDLM_VENV_TAKE": "1"})
    assert (tmp_path / "installed").exists()


def test_an_environment_of_this_checkout_is_used(tmp_path):
    """newcomer B5: also through a link."""
    venv = installed_environment(tmp_path / "venv", {})
    (tmp_path / "link").symlink_to(ROOT)
    for root in (ROOT, tmp_path / "link"):
        command = f". {root}/launchers/_env.sh; mmldlm_need_own {venv} && echo own"
        (venv / ".mmldlm-root").write_text(f"{root}\n", encoding="utf-8")
        succeeds(shell(command), "own")


# -- limits of a job ------------------------------------------------------------------------------

FAKE = """
import builtins, io, os, re
real = io.open
def fake(file, *args, **more):
    if re.fullmatch(r"/proc/(self|\\d+)/cgroup", str(file)) and os.path.exists("/sys/fs/cgroup/own"):
        file = "/sys/fs/cgroup/own"
    return real(file, *args, **more)
io.open = builtins.open = fake
"""  # noqa: E501
NESTED = """job=system.slice/job_7; mkdir -p $job/step_0; echo 0::/$job/step_0 > own; echo {limit} > $job/memory.max
for d in system.slice $job $job/step_0; do echo 104857600 > $d/memory.current; done"""  # noqa: E501
CACHE = """echo {limit} > memory.max; echo $(({limit} - 104857600)) > memory.current
printf 'anon 1\\ninactive_file %d\\nactive_file %d\\n' $(({cache} / 2)) $(({cache} / 2)) > memory.stat"""  # noqa: E501


@SLOW
@pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root")
@pytest.mark.parametrize(
    ("setup", "code"),
    [
        (NESTED.format(limit=200 << 20), 1),
        (NESTED.format(limit=64 << 30), 0),
        (CACHE.format(limit=4 << 30, cache=3700 << 20), 0),
        (CACHE.format(limit=4 << 30, cache=0), 1),
    ],
    ids=["job of 200 MiB", "job of 64 GiB", "full of cache", "full"],
)
def test_preflight_knows_the_memory_of_the_job(trial_store, tmp_path, setup, code):
    """public-reports C 8 page-cache, C 9 nested-cgroup."""
    (tmp_path / "sitecustomize.py").write_text(FAKE, encoding="utf-8")
    words = [
        "preflight",
        "--level",
        "1",
        "--only",
        "MEM001",
        *tiny_run(trial_store, tmp_path, "r"),
    ]
    command = " ".join(f"'{word}'" for word in (sys.executable, "-m", "mmldlm.cli", *words))
    inner = (
        f"set -e; mount -t tmpfs none /sys/fs/cgroup; cd /sys/fs/cgroup; {setup}\ncd {tmp_path};"
        f" exec {command}"
    )
    result = shell(
        ["unshare", "-m", "bash", "-c", inner],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        timeout=200,
    )
    assert result.code == code and ("FAIL  " in result) == bool(code), result.output[-3000:]


@SLOW
@pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root")
def test_a_machine_without_shared_memory_is_told_so(trial_store, tmp_path):
    """public-reports C 12 no-shm."""
    bare = (
        "mkdir d; mount -t tmpfs none d; for n in null zero random urandom full tty; do touch"
        " d/$n; "
    )
    bare += "mount --bind /dev/$n d/$n; done; mount --rbind d /dev"
    executable = os.path.join(os.path.dirname(sys.executable), "mmldlm")
    for verb, words in (
        ("preflight", ("--level", "1", "--only", "LIM001", *tiny_run(trial_store, tmp_path, "p"))),
        ("train", ("--nproc", "1", *tiny_run(trial_store, tmp_path, "r", "data.num_workers=2"))),
    ):
        line = " ".join(f"'{word}'" for word in (executable, verb, *words))
        (tmp_path / verb).mkdir()
        command = ["unshare", "-m", "bash", "-c", f"set -e; {bare}; exec {line}"]
        result = shell(command, cwd=tmp_path / verb, timeout=200)
        assert result.code in (1, 2) and not result.traceback, result.output
        assert "/dev/shm" in result and "fix" in result, result.output


@SLOW
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_machine_without_loopback_is_told_so(trial_store, tmp_path):
    """public-reports C 20 no-loopback."""
    executable = os.path.join(os.path.dirname(sys.executable), "mmldlm")
    words = tiny_run(trial_store, tmp_path, "r", "engine.kind=ddp", "engine.collective_timeout=10")
    for line, pattern in (
        (("preflight", "--level", "1", "--only", "NET001", "--nproc", "2", *words), "loopback"),
        (("train", "--nproc", "2", *words), "127.0.0.1"),
    ):
        result = shell(["unshare", "-n", executable, *line], timeout=200)
        assert result.code and not result.traceback and pattern in result, result.output


# -- clocks of other hosts ------------------------------------------------------------------------


def _log(folder, offset: float, age: float) -> None:
    """A run's log by a clock that is `offset` seconds ahead, last written `age` seconds ago."""
    folder.mkdir()
    last = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=offset - age)
    (folder / "config.yaml").write_text("training:\n  num_train_steps: 1000\n", encoding="utf-8")
    lines = []
    for step in range(1, 21):
        at = (last - datetime.timedelta(seconds=0.2 * (20 - step))).isoformat(
            timespec="milliseconds"
        )
        lines.append(
            {
                "step": step,
                "loss": 9.0,
                "grad_norm": 5.0,
                "lr": 1e-3,
                "samples": 8 * step,
                "time": at,
            }
        )
    (folder / "training_log.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    written = time.time() - age
    os.utime(folder / "training_log.jsonl", (written, written))


@pytest.mark.parametrize(
    ("offset", "age", "code"),
    [(-300, 1, 0), (86_400, 1, 0), (0, 1200, 1), (86_400, 1200, 1), (-86_400, 1200, 1)],
)
def test_a_run_is_alive_by_what_arrives(tmp_path, offset, age, code):
    """public-reports C 17 monitor-clock."""
    _log(tmp_path / "run", offset, age)
    result = mmldlm("monitor", "--once", tmp_path / "run")
    assert result.code == code and ("STALLED" in result) == bool(code), result.output
    assert ("the clock of the run's host" in result) == bool(offset), result.output


# -- variables ------------------------------------------------------------------------------------


@SLOW
def test_proxies_and_certificates_reach_the_ranks(trial_store, tmp_path):
    """public-reports C 10 launch-proxy."""
    own = {
        "https_proxy": "http://proxy.example:3128",
        "NO_PROXY": "10.0.0.0/8",
        "SSL_CERT_FILE": "/etc/ssl/own.pem",
        "REQUESTS_CA_BUNDLE": "/etc/ssl/own.pem",
        "TZ": "Asia/Tokyo",
    }
    (tmp_path / "H").write_text("n1 slots=1\nn2 slots=1\n", encoding="utf-8")
    words = tiny_run(
        trial_store, tmp_path, "r", "engine.kind=ddp", "training.num_train_steps=2000"
    )
    line = [
        sys.executable,
        "-m",
        "mmldlm.launch",
        "--level",
        "0",
        "--hostfile",
        tmp_path / "H",
        *words,
    ]
    with virtual_cluster(tmp_path / "hosts", 2) as cluster:
        process = cluster["n1"].popen(
            *line, cwd=tmp_path, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **own},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            log, deadline = tmp_path / "r" / "training_log.jsonl", time.monotonic() + 200
            while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
                assert process.poll() is None
                time.sleep(0.3)
            show = (
                "for p in $(pgrep -f mmldlm/train.py); do tr '\\0' '\\n' </proc/$p/environ; done"
            )
            for name in ("n1", "n2"):
                found = subprocess.run(
                    cluster[name].enter("bash", "-c", show), capture_output=True, text=True
                ).stdout
                assert [key for key, value in own.items() if f"{key}={value}\n" not in found] == []
        finally:
            process.terminate()
            process.wait(100)
