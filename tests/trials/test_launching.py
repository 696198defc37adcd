"""Launches: signals, exit codes, launcher scripts, ranks of Slurm, restarts, errors before the
first step.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trials.harness import (
    LAUNCHERS,
    ROOT,
    SLOW,
    TRAIN,
    fresh_mmldlm,
    installed_environment,
    mmldlm,
    ranks_command,
    records,
    refuses,
    shell,
    succeeds,
    tiny_run,
    train_rank,
)

# A rank: says that it started, ends with 5 on a request to stop, and by itself with the code of
# its number.
RANK = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["FOLDER"])
for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
    number = getattr(signal, name)
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda *_: os._exit(5))
(folder / f"rank{os.environ['RANK']}").touch()
end = time.monotonic() + 20
while time.monotonic() < end and not (folder / "finish").exists():
    time.sleep(0.02)
codes = [int(code) for code in os.environ.get("CODES", "0 0").split()]
code = codes[int(os.environ["RANK"])]
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class Launched:
    """Two ranks under the local launcher, in a process group of their own, started with some
    signals ignored.
    """

    def __init__(self, folder: Path, codes: str = "0 0", ignored: tuple[str, ...] = ()):
        (folder / "rank.py").write_text(RANK, encoding="utf-8")
        traps = "".join(f"trap '' {name.removeprefix('SIG')}; " for name in ignored)
        self.folder = folder
        self.process = subprocess.Popen(
            ["bash", "-c", f'{traps}exec "$@"', "bash", *ranks_command(2, folder / "rank.py")],
            env={**os.environ, "FOLDER": str(folder), "CODES": codes},
            start_new_session=True,
        )
        self.wait_for("rank0", "rank1")

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + 60
        while not all((self.folder / name).exists() for name in names):
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)

    def finish(self) -> int:
        (self.folder / "finish").touch()
        return self.process.wait(60)


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGUSR1"])
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(tmp_path, name):
    """public-reports A nohup_hangup: nohup, and a shell's background job."""
    launched = Launched(tmp_path, ignored=(name,))
    os.killpg(launched.process.pid, getattr(signal, name))
    time.sleep(0.3)
    assert launched.process.poll() is None
    assert launched.finish() == 0


@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM"])
@pytest.mark.parametrize("to_all", [True, False], ids=["to the job", "to the launcher"])
def test_ranks_outlive_the_terminal_and_end_with_5(tmp_path, name, to_all):
    """public-reports A nohup_hangup: without nohup; the kernel sends it to all processes of the
    terminal.
    """
    launched = Launched(tmp_path)
    (os.killpg if to_all else os.kill)(launched.process.pid, getattr(signal, name))
    assert launched.process.wait(60) == 5


@pytest.mark.parametrize(("codes", "expected"), [("0 -9", 1), ("3 0", 1), ("5 5", 5), ("0 0", 0)])
def test_exit_codes_are_kept_where_the_parent_ignores_children(tmp_path, codes, expected):
    """public-reports A sigchld_ignored."""
    assert Launched(tmp_path, codes, ignored=("SIGCHLD",)).finish() == expected


def _training(
    store, folder, *words: str, ignored: str = "", prefix: tuple = (), **environment: str
):
    """`mmldlm train` of many steps, in a session of its own; returns the process once it has made
    three steps.
    """
    command = [
        Path(sys.executable).with_name("mmldlm"),
        "train",
        *tiny_run(store, folder, "r", *words),
    ]
    traps = f"trap '' {ignored}; " if ignored else ""
    log = open(folder / "screen.txt", "wb")  # noqa: SIM115  the process keeps it
    process = subprocess.Popen(
        [*prefix, "bash", "-c", f'{traps}exec "$@"', "bash", *map(str, command)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(ROOT),
            **environment,
        },
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    _wait_for_steps(folder, process, 3)
    return process


def _wait_for_steps(
    folder: Path, process: subprocess.Popen, count: int, seconds: float = 180
) -> None:
    path, deadline = folder / "r" / "training_log.jsonl", time.monotonic() + seconds
    while not path.exists() or len(records(path)) < count:
        assert process.poll() is None, (folder / "screen.txt").read_text(encoding="utf-8")[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "r" / "checkpoints").glob("step_*"))


MANY = ("training.num_train_steps=100000", "logging.save_freq=100000")


@SLOW
@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_a_training_goes_on_under_nohup_and_saves_without_it(trial_store, tmp_path, kind):
    """public-reports A nohup_hangup."""
    words = ("--nproc", "1" if kind == "single" else "2", f"engine.kind={kind}")
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    process = _training(
        trial_store, tmp_path / "a", "training.num_train_steps=40", *words, ignored="HUP"
    )
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(200) == 0 and len(records(tmp_path / "a/r/training_log.jsonl")) == 40
    process = _training(trial_store, tmp_path / "b", *MANY, *words)
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(100) == 5 and len(_saved(tmp_path / "b")) == 1


@SLOW
def test_a_closed_terminal_ends_a_training_with_a_checkpoint(trial_store, tmp_path):
    """public-reports A nohup_hangup: the terminal itself goes away, and can no longer be written
    to.
    """
    script = tmp_path / "terminal.py"
    words = [
        Path(sys.executable).with_name("mmldlm"),
        "train",
        "--nproc",
        "2",
        *tiny_run(trial_store, tmp_path, "r"),
    ]
    words += ["engine.kind=ddp", *MANY]
    script.write_text(
        "import json, os, pty, sys, time, pathlib\n"
        "words, log = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])\n"
        "pid, terminal = pty.fork()\n"
        "if pid == 0: os.execv(words[0], words)\n"
        "os.set_blocking(terminal, False)\n"
        "end = time.time() + 180\n"
        "while time.time() < end and not (log.exists() and log.read_text().count('\\n') > 3):\n"
        "    time.sleep(0.1)\n"
        "    try: os.read(terminal, 1 << 16)\n"
        "    except (BlockingIOError, OSError): pass\n"
        "os.close(terminal)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n",
        encoding="utf-8",
    )
    log = tmp_path / "r" / "training_log.jsonl"
    result = shell(
        [sys.executable, script, json.dumps([str(word) for word in words]), log], timeout=280
    )
    assert result.code == 5 and len(_saved(tmp_path)) == 1, result.output


@SLOW
def test_a_killed_rank_is_never_exit_0(trial_store, tmp_path):
    """public-reports A sigchld_ignored: with a real training."""
    words = (*MANY, "--nproc", "2", "engine.kind=ddp", "engine.collective_timeout=30")
    process = _training(trial_store, tmp_path, *words, ignored="CHLD")
    ranks = [int(pid) for pid in shell(f"pgrep -P {process.pid}").output.split()]
    os.kill(ranks[-1], signal.SIGKILL)
    assert process.wait(120) == 1


# -- ranks without RANK ---------------------------------------------------------------------------

NO_RANK = dict.fromkeys(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)
SRUN = {
    **NO_RANK,
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "1",
    "SLURM_JOB_NODELIST": "n1",
}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, "FLUX_TASK_RANK=0 of 2 without RANK"),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"}, "JSM_NAMESPACE_RANK"),
        ({**SRUN, "SLURM_LOCALID": None}, "SLURM_PROCID=1 of 2 without RANK"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "multi_node.sh, which reads both"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_of_several_processes_never_trains_alone(trial_store, tmp_path, environment, words):
    """public-reports A srun_without_rank, trials-3 BAD 23."""
    refuses(
        train_rank(*tiny_run(trial_store, tmp_path, "r"), env={**NO_RANK, **environment}), words
    )
    assert not (tmp_path / "r").exists()


def test_the_numbers_of_a_platform_are_those_of_nodes(trial_store, corpus, tmp_path):
    """ecosystem 5: RANK and WORLD_SIZE in a pod of Kubernetes, or exported as by MM-LDLM's guide.

    A rank would wait half an hour for one that nobody starts.
    """
    env = {**NO_RANK, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"}
    words = tiny_run(trial_store, tmp_path, "r")
    refuses(mmldlm("train", *words, env=env), "RANK=1, WORLD_SIZE=2", "LOCAL_RANK=0")
    note = "note: RANK=1, WORLD_SIZE=2 without LOCAL_RANK number the nodes"
    succeeds(mmldlm("verify-data", trial_store, env=env), note)
    prepare = ("prepare", corpus, "--output-dir", tmp_path / "s", "--encoder", "hash:8")
    assert note in mmldlm(*prepare, env=env)


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_a_command_that_starts_ranks_is_no_task_of_srun(trial_store, corpus, tmp_path, verb):
    """public-reports A srun_without_rank: the command in place of the script."""
    if verb == "train":
        refuses(
            mmldlm("train", *tiny_run(trial_store, tmp_path, "r"), env=SRUN),
            "task 1 of 2, started by srun",
        )
    else:  # its tasks are ranks; the first one never comes
        env = {**SRUN, "SLURM_PROCID": "5", "SLURM_LOCALID": None}
        refuses(
            mmldlm("prepare", corpus, "--output-dir", tmp_path / "S", env=env),
            "SLURM_PROCID=5 of 2 without RANK",
        )


@SLOW
def test_two_tasks_of_srun_are_two_ranks(trial_store, tmp_path):
    """public-reports A srun_without_rank."""
    words = tiny_run(trial_store, tmp_path, "r", "engine.kind=ddp", "training.num_train_steps=2")
    command = " ".join(f"'{word}'" for word in (sys.executable, "-u", TRAIN, *words))
    environment = " ".join(f"{name}={value}" for name, value in SRUN.items() if value is not None)
    unset = " ".join(f"-u {name}" for name in NO_RANK)
    lines = [
        f"env {unset} {environment} SLURM_PROCID={i} SLURM_LOCALID={i} {command} & p{i}=$!"
        for i in range(2)
    ]
    succeeds(shell("\n".join([*lines, "wait $p0 && wait $p1"]), timeout=200), r"x 2 rank\(s\)")


# -- errors before the first heartbeat ------------------------------------------------------------


def test_a_gloo_interface_of_another_machine_is_named(trial_store, tmp_path):
    """public-reports A gloo_interface_of_another_machine."""
    env = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",
    }
    env["GLOO_SOCKET_IFNAME"] = "ib0nosuch"
    refuses(
        train_rank(*tiny_run(trial_store, tmp_path, "r", "engine.kind=ddp"), env=env),
        "GLOO_SOCKET_IFNAME",
    )


def test_a_port_that_is_taken_is_on_the_screen(trial_store, tmp_path):
    """newcomer B1."""
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        env = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        words = tiny_run(
            trial_store, tmp_path, "r", "engine.kind=ddp", "engine.collective_timeout=8"
        )
        refuses(
            train_rank(*words, env=env), f"127.0.0.1:{port}", "MASTER_PORT", "taken by pid", code=1
        )


@SLOW
@pytest.mark.parametrize("kind", ["ddp", "deepspeed", "fsdp"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_node_that_never_comes_is_on_the_screen(trial_store, tmp_path, kind, rank):
    """public-reports A second_node_never_comes, master_not_reachable; newcomer B1."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    env = {
        "RANK": rank,
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    words = tiny_run(
        trial_store, tmp_path, "r", f"engine.kind={kind}", "engine.collective_timeout=6"
    )
    refuses(train_rank(*words, env=env), "all 2 ranks", f"127.0.0.1:{port}", code=1)


@SLOW
def test_a_rank_that_waits_for_others_says_so(trial_store, tmp_path):
    """After some seconds of waiting: which address, and how many ranks came."""
    env = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29877",
    }
    words = tiny_run(trial_store, tmp_path, "r", "engine.kind=ddp", "engine.collective_timeout=20")
    assert "waiting for 1 of 2 ranks" in train_rank(*words, env=env)


@SLOW
def test_every_restart_of_torchrun_trains(trial_store, tmp_path):
    """public-reports A torchrun_restarts: no attempt meets the addresses of the one before."""
    words = tiny_run(
        trial_store,
        tmp_path,
        "r",
        "engine.kind=ddp",
        "training.resume=auto",
        "logging.save_freq=2",
    )
    words += ["training.num_train_steps=60", "engine.collective_timeout=30"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    command += ["--max-restarts", "3", "--monitor-interval", "1", "-m", "mmldlm.train", *words]
    screen = open(tmp_path / "screen.txt", "wb")  # noqa: SIM115
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stdout=screen, stderr=screen, env=environment, start_new_session=True
    )
    for rank in range(2):  # each of them once
        _wait_for_steps(tmp_path, process, 4 + 20 * rank)
        for pid in map(int, shell(f"pgrep -P {process.pid}").output.split()):
            with contextlib.suppress(OSError):
                if (
                    f"\0RANK={rank}\0".encode()
                    in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
                ):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(2)
    assert process.wait(280) == 0
    assert [record["step"] for record in records(tmp_path / "r/training_log.jsonl")] == list(
        range(1, 61)
    )


# -- the scripts ----------------------------------------------------------------------------------

SAYS = 'printf "%s\\n" "${0##*/}" "$@"; echo "threads $OMP_NUM_THREADS"'


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """An environment in which torchrun, deepspeed, mpirun and mmldlm print their words, and every
    host is this one.
    """
    programs = {name: SAYS for name in ("torchrun", "deepspeed", "mpirun")} | {
        "mmldlm": "exit 0",
        "ssh": 'for last; do :; done; exec sh -c "$last"',
    }
    return installed_environment(tmp_path_factory.mktemp("venv") / "v", programs)


UNSET = dict.fromkeys(
    ("NNODES", "NODE_RANK", "RANK", "MASTER_PORT", "OMP_NUM_THREADS", "HOSTFILE", "CARRY")
)


def script(venv: Path, name: str, cwd: Path, *words: str, prefix: str = "", **environment: str):
    own = {
        **UNSET,
        "MMLDLM_VENV": str(venv),
        "PATH": f"{venv}/bin:{os.environ['PATH']}",
        **environment,
    }
    quoted = " ".join(f"'{word}'" for word in words)
    return shell(f"{prefix} bash {LAUNCHERS}/{name} {quoted}", cwd=cwd, env=own)


@pytest.mark.parametrize(
    "line",
    [
        "node2 slots = 8",
        "node2 slots=8 # second",
        "-oProxyCommand=x slots=8",
        "node2:8",
        "node[2-3] slots=8",
        "node2",
        "node2\tslots=8\tmax_slots=9",
        "$(touch pwned) slots=8",
        "node1 slots=8",
        "node2 slots=8; touch pwned",
    ],
)
def test_the_scripts_drop_no_line_of_a_hostfile(venv, tmp_path, line):
    """trials-3 BAD 24."""
    name = "multi_node.sh" if line.startswith("-") or "#" in line else "mpi.sh"
    (tmp_path / "hosts").write_text(f"node1 slots=8\n{line}\n", encoding="utf-8")
    result = script(venv, name, tmp_path, HOSTFILE="hosts", MASTER_ADDR="node1")
    refuses(result, "hosts:2")
    assert (
        "mpirun" not in result
        and "deepspeed\n" not in result
        and os.listdir(tmp_path) == ["hosts"]
    )


def test_the_scripts_read_what_is_legitimate(venv, tmp_path):
    """trials-3 BAD 24: slots=08, comments, blank lines, Windows line ends."""
    (tmp_path / "hosts").write_text(
        "# nodes\r\nnode1 slots=08\r\n\r\n  node-2.a_b   slots=9\r\n", encoding="utf-8"
    )
    result = script(venv, "mpi.sh", tmp_path, HOSTFILE="hosts")
    succeeds(result, "-np\n17\n", "--host\nnode1:8,node-2.a_b:9\n")


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("mpi.sh", {"CARRY": "a[$(touch${IFS}pwned)]"}),
        ("mpi.sh", {"CARRY": "HF_HOME *"}),
        ("multi_node.sh", {"HOSTFILE": "hosts", "MASTER_ADDR": "$(touch pwned)"}),
        (
            "multi_node.sh",
            {"HOSTFILE": "hosts", "MASTER_ADDR": "n1", "NCCL_DEBUG": "`touch pwned`"},
        ),
        ("multi_node.sh", {"NNODES": "a[$(touch pwned)]", "MASTER_ADDR": "n1", "NODE_RANK": "0"}),
        ("multi_node.sh", {"NNODES": "2", "MASTER_ADDR": "n1", "NODE_RANK": "a[$(touch pwned)]"}),
        ("single_node.sh", {"NPROC_PER_NODE": "a[$(touch pwned)]"}),
    ],
)
def test_no_script_lets_the_shell_evaluate_a_value(venv, tmp_path, name, environment):
    """trials-3 POOR 13."""
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n", encoding="utf-8")
    refuses(script(venv, name, tmp_path, **environment))
    assert os.listdir(tmp_path) == ["hosts"]


def test_words_that_deepspeed_would_paste_into_a_shell_are_encoded(venv, tmp_path):
    """trials-3 POOR 13: DeepSpeed's runner pastes them unquoted, for every node."""
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n", encoding="utf-8")
    own = {"HOSTFILE": "hosts", "MASTER_ADDR": "n1"}
    result = script(venv, "multi_node.sh", tmp_path, "logging.run_name=$(touch pwned)", **own)
    succeeds(result, r"run_decoded\.py\n")
    assert "touch" not in result
    assert "train.py" in script(venv, "multi_node.sh", tmp_path, "logging.run_name=plain", **own)


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("single_node.sh", {}),
        ("multi_node.sh", {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "n1"}),
    ],
)
def test_torchrun_gives_ranks_time_to_save(venv, tmp_path, name, environment):
    """public-reports A torchrun_script_signals, nohup_hangup."""
    words = script(venv, name, tmp_path, **environment).output.splitlines()
    handled = words[words.index("--signals-to-handle") + 1].split(",")
    assert {"SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"} <= set(handled)
    assert int(words[words.index("--shutdown-timeout") + 1]) >= 3600
    words = script(venv, name, tmp_path, prefix="trap '' HUP;", **environment).output.splitlines()
    assert "SIGHUP" not in words[words.index("--signals-to-handle") + 1]


def test_two_single_node_runs_have_two_ports(venv, tmp_path):
    """public-reports A two_jobs_one_port."""
    found = [script(venv, "single_node.sh", tmp_path).output.splitlines() for _ in range(2)]
    ports = [words[words.index("--master_port") + 1] for words in found]
    assert ports[0] != ports[1]
    words = script(venv, "single_node.sh", tmp_path, MASTER_PORT="29123").output.splitlines()
    assert words[words.index("--master_port") + 1] == "29123"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_the_scripts_share_the_cores_of_the_job(venv, tmp_path):
    """public-reports A threads_of_a_cpuset."""
    cpu = min(os.sched_getaffinity(0))
    assert "threads 1\n" in script(
        venv, "single_node.sh", tmp_path, prefix=f"taskset -c {cpu}", NPROC_PER_NODE="1"
    )


@SLOW
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_to_a_script_leaves_a_checkpoint(trial_store, tmp_path, name):
    """public-reports A torchrun_script_signals."""
    programs = {
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        "mmldlm": f'exec {Path(sys.executable).with_name("mmldlm")} "$@"',
    }
    venv = installed_environment(tmp_path / "venv", programs)
    words = [
        word
        for word in tiny_run(trial_store, tmp_path, "r", "engine.kind=ddp", *MANY)
        if word not in ("--config-name", "tiny")
    ]
    own = {
        "MMLDLM_VENV": str(venv),
        "CONFIG_NAME": "tiny",
        "NPROC_PER_NODE": "1",
        "PYTHONPATH": str(ROOT),
    }
    screen = open(tmp_path / "screen.txt", "wb")  # noqa: SIM115
    process = subprocess.Popen(
        ["bash", LAUNCHERS / "single_node.sh", *words],
        env={**os.environ, **own, "OMP_NUM_THREADS": "1"},
        stdout=screen,
        stderr=screen,
        start_new_session=True,
    )
    _wait_for_steps(tmp_path, process, 3)
    ranks = shell(f"pgrep -P {process.pid}").output.split()
    os.kill(process.pid, getattr(signal, name))
    assert process.wait(120) != 0 and len(_saved(tmp_path)) == 1
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


# -- DeepSpeed's monitors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ('"flops_profiler": {"enabled": true}', "flops_profiler.*\n.*\n.*gradients"),
        ('"memory_breakdown": true', "memory_breakdown"),
        ('"tensorboard": {"enabled": true}', "package tensorboard"),
        ('"comet": {"enabled": true}', "package comet_ml"),
    ],
)
def test_a_monitor_changes_no_gradient_and_is_no_traceback(trial_store, tmp_path, section, words):
    """public-reports A deepspeed_monitors."""
    import importlib.util

    package = words.removeprefix("package ")
    if package != words and importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    (tmp_path / "ds.json").write_text(
        f'{{"zero_optimization": {{"stage": 2}}, {section}}}', encoding="utf-8"
    )
    run = tiny_run(trial_store, tmp_path, "r", "engine.kind=deepspeed")
    refuses(train_rank("--deepspeed_config", tmp_path / "ds.json", *run), words)


# -- the end, and machines that lack something ----------------------------------------------------


@SLOW
@pytest.mark.parametrize("kind", ["single", "ddp"])
def test_the_last_line_of_a_finished_run_is_its_own(trial_store, tmp_path, kind):
    """public-reports C 2 worker-end."""
    words = (
        "--nproc",
        "1" if kind == "single" else "2",
        f"engine.kind={kind}",
        "data.num_workers=2",
    )
    result = fresh_mmldlm("train", *tiny_run(trial_store, tmp_path, "r", *words), timeout=200)
    succeeds(result)
    assert "RuntimeError" not in result


@SLOW
def test_a_gpu_that_is_named_and_not_there_is_warned_of(trial_store, tmp_path):
    """public-reports C 19 gpu-hidden."""
    result = train_rank(*tiny_run(trial_store, tmp_path, "r"), env={"CUDA_VISIBLE_DEVICES": "99"})
    assert result.code != 0 or "warning: CUDA_VISIBLE_DEVICES=99" in result


@SLOW
@pytest.mark.parametrize("verb", ["preflight", "launch"])
def test_an_image_without_ssh_is_told_what_to_do(trial_store, tmp_path, verb):
    """public-reports C 22 no-ssh."""
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "bash", "env"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    (tmp_path / "H").write_text("n1 slots=1\nn2 slots=1\n", encoding="utf-8")
    words = tiny_run(trial_store, tmp_path, "r", "engine.kind=ddp")
    result = mmldlm(
        verb,
        "--hostfile",
        tmp_path / "H",
        *words,
        env={"PATH": str(tmp_path / "bin")},
        timeout=120,
    )
    assert (
        result.code and not result.traceback and "fix" in result and "openssh-client" in result
    ), result.output


@SLOW
def test_a_job_that_was_suspended_goes_on(trial_store, tmp_path):
    """All processes are stopped for longer than engine.collective_timeout, as by Slurm's
    preemption by suspend.
    """
    words = (*MANY, "--nproc", "2", "engine.kind=ddp", "engine.collective_timeout=10")
    process = _training(trial_store, tmp_path, *words)
    try:
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(25)
        os.killpg(process.pid, signal.SIGCONT)
        _wait_for_steps(tmp_path, process, len(records(tmp_path / "r/training_log.jsonl")) + 3, 60)
    finally:
        os.killpg(process.pid, signal.SIGCONT)
        process.terminate()
        process.wait(60)


IN_ANOTHER_UTS = ("unshare", "--uts", "bash", "-c", 'hostname other-host; exec "$@"', "bash")


@SLOW
@pytest.mark.skipif(os.geteuid() != 0, reason="another host name needs root")
@pytest.mark.parametrize("seconds", [600, -600])
def test_the_lock_of_a_living_job_is_kept_whatever_the_other_clock_says(
    trial_store, tmp_path, seconds
):
    """public-reports A lock_and_clock_skew."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"import time\nreal = time.time\ntime.time = lambda: real() + {seconds}\n",
        encoding="utf-8",
    )
    process = _training(trial_store, tmp_path, *MANY, "logging.save_freq=20")
    try:
        _wait_for_steps(tmp_path, process, 22)
        command = [
            *IN_ANOTHER_UTS,
            sys.executable,
            TRAIN,
            *tiny_run(trial_store, tmp_path, "r", *MANY),
        ]
        result = shell(
            [*command, "training.resume=auto"], env={"PYTHONPATH": f"{site}:{ROOT}"}, timeout=120
        )
        refuses(result, "renewed while this job watched it")
    finally:
        process.terminate()
    assert process.wait(60) == 5
