"""Faults of a virtual cluster, each with the results that preflight must give; for tests and
benchmarks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from tests.support.virtual_cluster import ROOT, VirtualCluster, end

PYTHON = sys.executable
TRAIN = str(ROOT / "mmldlm" / "train.py")


@dataclass
class Scene:
    """A preflight on the cluster, as faults modify it."""

    cluster: VirtualCluster
    store: Path
    folder: Path
    saved_run: Path | None = None
    hostfile_text: str | None = "n1 slots=1\nn2 slots=1\nn3 slots=1\n"
    words: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    cwd: Path = ROOT
    level: int = 2

    def run(self) -> dict:
        """Run `mmldlm preflight` on n1; return its receipt with "exit_code" and "screen"."""
        self.folder.mkdir(parents=True, exist_ok=True)
        hostfile, receipt = self.folder / "hostfile", self.folder / "receipt.json"
        hostfile.unlink(missing_ok=True)
        receipt.unlink(missing_ok=True)
        if self.hostfile_text is not None:
            hostfile.write_text(self.hostfile_text)
        (self.folder / "runs").mkdir(exist_ok=True)
        command = [
            PYTHON,
            "-m",
            "mmldlm",
            "preflight",
            "--hostfile",
            hostfile,
            "--level",
            self.level,
            "--json",
            receipt,
        ]
        command += [
            "--config-name",
            "tiny",
            f"data.latent_data_root={self.store}",
            f"logging.save_dir={self.save_dir}",
        ]
        own = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **self.environment}
        done = self.cluster["n1"].run(
            *command, *self.words, cwd=self.cwd, env=own, timeout=150 if self.level < 3 else 500
        )
        assert receipt.exists(), f"no receipt (status {done.returncode}):\n{done.stdout[-3000:]}"
        found = json.loads(receipt.read_text())
        assert found["exit_code"] == done.returncode
        return {**found, "screen": done.stdout}

    @property
    def save_dir(self) -> Path:
        return self.folder / "runs"

    def env_file(self, text: str) -> None:
        """Set the .deepspeed_env of DeepSpeed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "deepspeed_env"
        path.write_text(text)
        self.environment["DS_ENV_FILE"] = str(path)

    def json_file(self, values: dict) -> None:
        """Pass a DeepSpeed JSON to the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "ds.json"
        path.write_text(json.dumps(values))
        self.words += ["--deepspeed_config", str(path)]


def problems(receipt: dict) -> set[tuple[str, str]]:
    """Return (id, node) of every result that is not PASS or SKIP."""
    return {
        (r["id"], r["node"])
        for r in receipt["results"]
        if r["status"] in ("FAIL", "WARN", "ERROR")
    }


def problem_text(receipt: dict, id: str) -> str:
    """Return measured, expected and fix of all problems that a check reported."""
    bad = [r for r in receipt["results"] if r["id"] == id and r["status"] in ("FAIL", "WARN")]
    return "\n".join(f"{r['measured']} | {r['expected']} | {r['fix']}" for r in bad)


@dataclass(frozen=True)
class Fault:
    """A fault: inject(scene, stack) causes it, exactly `expected` must be reported, check `id`
    with all of `words`.
    """

    name: str
    inject: Callable[[Scene, contextlib.ExitStack], None]
    expected: frozenset[tuple[str, str]]
    words: tuple[str, ...]

    @property
    def id(self) -> str:
        return min(self.expected)[0] if len({i for i, _ in self.expected}) == 1 else self.main_id

    main_id: str = ""


FAULTS: list[Fault] = []
HARMLESS: list[Fault] = []
ALL = ("n1", "n2", "n3")


def fault(name: str, *expected: tuple[str, str], words: tuple[str, ...], main: str = ""):
    """Register a fault; `expected` are (id, node), `main` the id whose words count when there are
    several.
    """

    def register(inject):
        FAULTS.append(Fault(name, inject, frozenset(expected), words, main or expected[0][0]))
        return inject

    return register


def harmless(name: str):
    """Register a condition that must not be reported, because a run trains with it."""

    def register(inject):
        HARMLESS.append(Fault(name, inject, frozenset(), ()))
        return inject

    return register


def everywhere(id: str) -> tuple[tuple[str, str], ...]:
    return tuple((id, name) for name in ALL)


# -- hostfile -------------------------------------------------------------------------------------


@fault("hostfile missing", ("HOST001", ""), words=("No such file", "check the path"))
def _(scene, stack):
    scene.hostfile_text = None


@fault("typo in slots", ("HOST001", ""), words=("hostfile:2", "'lots=1' after n2"))
def _(scene, stack):
    scene.hostfile_text = "n1 slots=1\nn2 lots=1\n"


@fault("uneven slots", ("HOST002", ""), words=("n3=2", "slots=1 on every line"))
def _(scene, stack):
    scene.hostfile_text = "n1 slots=1\nn2 slots=1\nn3 slots=2\n"


@fault("one host that is not this one", ("HOST003", ""), words=("n2", "--force_multi"))
def _(scene, stack):
    scene.hostfile_text = "n2 slots=1\n"


@fault(
    "one machine under two names",
    ("HOST004", "alias"),
    words=("same machine as n2", "delete one of the lines"),
)
def _(scene, stack):
    n1 = scene.cluster["n1"]
    known = (n1.folder / "ssh" / "known_hosts").read_text()
    key = next(line.split(" ", 1)[1] for line in known.splitlines() if line.startswith("n2,"))
    for host in scene.cluster.hosts:
        text = scene.cluster.hosts_file(host) + "10.77.0.2 alias\n"
        stack.enter_context(host.changed("/etc/hosts", text))
    stack.enter_context(n1.changed(Path.home() / ".ssh" / "known_hosts", known + f"alias {key}\n"))
    scene.hostfile_text = "n1 slots=1\nn2 slots=1\nalias slots=1\n"


# -- ssh ------------------------------------------------------------------------------------------


@fault("unknown host key", ("SSH003", "n2"), words=("ssh-keyscan -H n2 >>",))
def _(scene, stack):
    n1 = scene.cluster["n1"]
    known = (n1.folder / "ssh" / "known_hosts").read_text().splitlines(keepends=True)
    text = "".join(line for line in known if not line.startswith("n2,"))
    stack.enter_context(n1.changed(Path.home() / ".ssh" / "known_hosts", text))


@fault("changed host key", ("SSH003", "n3"), words=("ssh-keygen -R n3",))
def _(scene, stack):
    n1 = scene.cluster["n1"]
    known = (n1.folder / "ssh" / "known_hosts").read_text().splitlines(keepends=True)
    other = next(line.split(" ", 1)[1] for line in known if line.startswith("n2,"))
    text = "".join(line for line in known if not line.startswith("n3,")) + f"n3,10.77.0.3 {other}"
    stack.enter_context(n1.changed(Path.home() / ".ssh" / "known_hosts", text))


@fault("refused key", ("SSH004", "n2"), words=("Permission denied", "ssh-copy-id n2"))
def _(scene, stack):
    stack.enter_context(
        scene.cluster["n2"].changed(Path.home() / ".ssh" / "authorized_keys", "\n")
    )


@fault("sshd down", ("SSH002", "n3"), words=("refused", "start sshd on n3"))
def _(scene, stack):
    host = scene.cluster["n3"]
    host.stop_sshd()
    stack.callback(host.start_sshd)


@fault("wrong ssh port", *everywhere("SSH002"), words=("refused", "--ssh-port"))
def _(scene, stack):
    scene.words += ["--ssh-port", "2222"]


@fault(
    "name does not resolve",
    ("SSH001", "n3"),
    ("NET003", "n1"),
    words=("n3", "/etc/hosts"),
    main="SSH001",
)
def _(scene, stack):
    n1 = scene.cluster["n1"]
    text = "".join(
        line + "\n"
        for line in scene.cluster.hosts_file(n1).splitlines()
        if not line.endswith(" n3")
    )
    stack.enter_context(n1.changed("/etc/hosts", text))


@fault("host is off", ("SSH002", "n2"), words=("delete its line",))
def _(scene, stack):
    stack.enter_context(scene.cluster.cable_pulled(scene.cluster["n2"]))


@fault("node hangs during the check", ("SSH005", "n2"), words=("within", "log in to n2"))
def _(scene, stack):
    script = scene.cluster["n2"].folder / "hang"
    script.write_text("#!/bin/sh\nsleep 1000\n")
    script.chmod(0o755)
    stack.enter_context(scene.cluster["n2"].bound(script, os.path.realpath(PYTHON)))


def both(one: str, other: str) -> tuple[tuple[str, str], ...]:
    return ("NET006", f"{one}->{other}"), ("NET006", f"{other}->{one}")


def login(scene, stack, name: str, script: str) -> None:
    """What a node's login runs before the command that ssh brings, as a ~/.bashrc does."""
    host = scene.cluster[name]
    path = host.folder / "login"
    path.write_text(f'{script}\neval "$SSH_ORIGINAL_COMMAND"\n')
    key = (scene.cluster.folder / "id_ed25519.pub").read_text()
    stack.enter_context(
        host.changed(Path.home() / ".ssh" / "authorized_keys", f'command="sh {path}" {key}')
    )


@harmless("a prompt that ends no line")
def _(scene, stack):
    login(scene, stack, "n2", r"printf '\033]0;root@cluster\007$ '")


@harmless("names that only ssh's configuration knows")
def _(scene, stack):
    path = scene.cluster["n1"].folder / "ssh" / "config"
    path.write_text("Host worker2\n  HostName 10.77.0.2\n")
    stack.callback(path.unlink)
    scene.hostfile_text = "n1 slots=1\nworker2 slots=1\nn3 slots=1\n"


@fault(
    "login shell ends",
    ("SSH005", "n1"),
    words=("status 0, after printing 'account expired'", "~/.bashrc"),
)
def _(scene, stack):
    login(scene, stack, "n1", "echo account expired; exit 0")


@fault(
    "login shell asks", ("SSH005", "n2"), words=("after printing 'Which project?'", "~/.bashrc")
)
def _(scene, stack):
    login(scene, stack, "n2", "printf 'Which project? '; sleep 1000")


@fault(
    "MTU above the switch's",
    ("SSH005", "n2"),
    ("NET007", "n3"),
    words=("timed out", "one MTU"),
    main="SSH005",
)
def _(scene, stack):
    jumbo_frames(scene, stack, "n1", "n2")


def jumbo_frames(scene, stack, *names: str) -> None:
    """9000 bytes on hosts whose switch takes 1500, with segments as long as a network card sends
    them.
    """
    for name in names:
        link = ("ip", "link", "set", "dev", "eth0")
        scene.cluster[name].sh(*link, "mtu", 9000, "gso_max_segs", 1)
        stack.callback(scene.cluster[name].sh, *link, "mtu", 1500, "gso_max_segs", 65535)


# -- the node's programs and files ----------------------------------------------------------------


@fault("python missing", ("PY001", "n3"), words=("no such interpreter", "virtual environment"))
def _(scene, stack):
    stack.enter_context(scene.cluster["n3"].tmpfs(Path(PYTHON).parent, "size=1m"))


@fault("working folder missing", ("PY001", "n3"), words=("no such folder", "share it"))
def _(scene, stack):
    scene.cwd = scene.folder / "parent" / "work"
    scene.cwd.mkdir(parents=True, exist_ok=True)
    stack.enter_context(scene.cluster["n3"].tmpfs(scene.cwd.parent, "size=1m"))


@fault("package broken", ("PY002", "n3"), words=("SyntaxError", "copy this checkout to n3"))
def _(scene, stack):
    path = ROOT / "mmldlm" / "preflight" / "agent.py"
    stack.enter_context(scene.cluster["n3"].changed(path, "def main(:\n"))


@fault("other torch version", ("VER001", "n2"), words=("torch 1.13.1", "pip install", "torch=="))
def _(scene, stack):
    path = next(p for p in metadata.distribution("torch").files if p.name == "METADATA").locate()
    own = metadata.version("torch")
    text = (
        Path(path).read_text(encoding="utf-8").replace(f"\nVersion: {own}", "\nVersion: 1.13.1", 1)
    )
    stack.enter_context(scene.cluster["n2"].changed(path, text))


@fault("other commit", ("VER002", "n2"), words=("git checkout", "commit 000000000000"))
def _(scene, stack):
    head = Path(os.popen(f"git -C {ROOT} rev-parse --git-path HEAD").read().strip())
    stack.enter_context(scene.cluster["n2"].changed(ROOT / head, "0" * 39 + "1\n"))


@fault("other sources", ("VER002", "n3"), words=("sources", "copy this checkout"))
def _(scene, stack):
    path = ROOT / "mmldlm" / "commands" / "config.py"
    stack.enter_context(scene.cluster["n3"].changed(path, path.read_text() + "# another state\n"))


@fault("data missing", ("DATA002", "n3"), words=("No such file", "copy the store to n3"))
def _(scene, stack):
    stack.enter_context(scene.cluster["n3"].tmpfs(scene.store, "size=1m"))


@fault(
    "one byte of a shard differs",
    ("DATA003", "n2"),
    words=("train/latents.npy", "copy the store to n2"),
)
def _(scene, stack):
    path, other = scene.store / "train" / "latents.npy", scene.cluster["n2"].folder / "latents.npy"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    other.write_bytes(data)
    stack.enter_context(scene.cluster["n2"].bound(other, path))


@fault(
    "shard cut short",
    ("DATA002", "n2"),
    ("DATA003", "n2"),
    words=("train/tokens.npy", "rsync"),
    main="DATA002",
)
def _(scene, stack):
    path, other = scene.store / "train" / "tokens.npy", scene.cluster["n2"].folder / "tokens.npy"
    other.write_bytes(path.read_bytes()[:-100])
    stack.enter_context(scene.cluster["n2"].bound(other, path))


@fault(
    "checkpoint folder not shared",
    ("CKPT002", "n2"),
    words=("does not see", "file system that all nodes mount"),
)
def _(scene, stack):
    scene.save_dir.mkdir(parents=True, exist_ok=True)
    stack.enter_context(scene.cluster["n2"].tmpfs(scene.save_dir, "size=1g"))


@fault(
    "checkpoint folder read-only", ("CKPT001", "n3"), words=("Read-only file system", "remount")
)
def _(scene, stack):
    scene.save_dir.mkdir(parents=True, exist_ok=True)
    host = scene.cluster["n3"]
    stack.enter_context(host.bound(scene.save_dir, scene.save_dir))
    host.sh("mount", "-o", "remount,bind,ro", scene.save_dir)


@fault(
    "checkpoint folder full",
    ("CKPT001", "n2"), ("CKPT002", "n2"), ("DISK001", ""),
    words=("No space left", "free some space"), main="CKPT001",
)  # fmt: skip
def _(scene, stack):
    scene.save_dir.mkdir(parents=True, exist_ok=True)
    host = scene.cluster["n2"]
    stack.enter_context(host.tmpfs(scene.save_dir, "size=64k"))
    host.popen("sh", "-c", f"cat /dev/zero > {scene.save_dir}/filler 2>/dev/null").wait()


# -- limits ---------------------------------------------------------------------------------------


@fault("/dev/shm too small", ("LIM001", "n2"), words=("64.0 MiB", "--shm-size"))
def _(scene, stack):
    stack.enter_context(scene.cluster["n2"].tmpfs("/dev/shm", "size=64m"))


@fault("temporary folder full", ("LIM004", "n3"), words=("No space left", "free some space"))
def _(scene, stack):
    host, folder = scene.cluster["n3"], scene.folder / "temporary"
    folder.mkdir(parents=True, exist_ok=True)
    stack.enter_context(host.tmpfs(folder, "size=64k"))
    host.popen("sh", "-c", f"cat /dev/zero > {folder}/filler 2>/dev/null").wait()
    login(scene, stack, "n3", f"export TMPDIR={folder}")


@fault("nofile too low", ("LIM003", "n3"), words=("nofile 256", "limits.conf"))
def _(scene, stack):
    host = scene.cluster["n3"]
    host.stop_sshd()
    host.start_sshd("prlimit", "--nofile=256")

    def again():
        host.stop_sshd()
        host.start_sshd()

    stack.callback(again)


@fault("clock skew", ("CLK001", "n2"), words=("+90.", "time daemon on n2"))
def _(scene, stack):
    # time.time() itself is moved: clocks of namespaces cannot be. A .pth file is the one thing
    # every python runs.
    path = min(Path(sysconfig.get_paths()["purelib"]).glob("*.pth"))
    line = "import time; time.time = lambda own=time.time_ns: own() / 1e9 + 90\n"
    stack.enter_context(scene.cluster["n2"].changed(path, path.read_text() + "\n" + line))


@fault("stale build lock", ("JIT001", "n2"), words=("deepspeed_shm_comm/lock", "ssh n2 rm"))
def _(scene, stack):
    lock = (
        scene.cluster["n2"].folder
        / "cache"
        / "torch_extensions"
        / "py311_cpu"
        / "deepspeed_shm_comm"
        / "lock"
    )
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    os.utime(lock, (time.time() - 3600,) * 2)
    stack.callback(shutil.rmtree, scene.cluster["n2"].folder / "cache" / "torch_extensions")


@fault("leftover rank", ("PROC001", "n3"), words=("mmldlm/train.py", "ssh n3 kill"))
def _(scene, stack):
    stack.enter_context(
        scene.cluster["n3"].process(
            PYTHON, "-c", "import time; time.sleep(1000)", "mmldlm/train.py"
        )
    )
    time.sleep(0.3)


# -- network --------------------------------------------------------------------------------------


@fault("own name is 127.0.1.1", ("NET002", "n2"), words=("n2 is 127.0.1.1", "10.77.0.2 n2"))
def _(scene, stack):
    n2 = scene.cluster["n2"]
    stack.enter_context(
        n2.changed(
            "/etc/hosts", scene.cluster.hosts_file(n2).replace("10.77.0.2 n2", "127.0.1.1 n2")
        )
    )


@fault(
    "names differ between nodes",
    ("NET003", "n3"),
    words=("n2 is 10.77.0.99 there", "/etc/hosts or DNS on n3"),
)
def _(scene, stack):
    n3 = scene.cluster["n3"]
    stack.enter_context(
        n3.changed(
            "/etc/hosts", scene.cluster.hosts_file(n3).replace("10.77.0.2 n2", "10.77.0.99 n2")
        )
    )


@fault(
    "interface does not exist",
    *everywhere("NET001"),
    words=("only lo, eth0", "export GLOO_SOCKET_IFNAME=eth0"),
)
def _(scene, stack):
    scene.env_file("GLOO_SOCKET_IFNAME=ib0\n")


@fault(
    "interface is loopback",
    *everywhere("NET001"),
    words=("is loopback", "export NCCL_SOCKET_IFNAME=eth0"),
)
def _(scene, stack):
    scene.env_file("NCCL_SOCKET_IFNAME=lo\n")


@fault(
    "interface down",
    *everywhere("NET001"),
    words=("eth1 is down", "export GLOO_SOCKET_IFNAME=eth0"),
)
def _(scene, stack):
    for number, host in enumerate(scene.cluster.hosts, 1):
        host.sh("ip", "link", "add", "eth1", "type", "bridge")
        stack.callback(host.sh, "ip", "link", "delete", "eth1")
        host.sh("ip", "address", "add", f"10.88.0.{number}/24", "dev", "eth1")
    scene.env_file("GLOO_SOCKET_IFNAME=eth1\n")


@fault(
    "one direction firewalled",
    ("NET006", "n2->n3"),
    words=("but n3 can to n2", "on n3, allow TCP ports"),
)
def _(scene, stack):
    rule = "ip saddr 10.77.0.2 tcp dport != 22 tcp flags & (syn|ack) == syn drop"
    stack.enter_context(scene.cluster["n3"].firewall(rule))


@fault(
    "handshakes pass, data does not",
    *both("n2", "n3"),
    words=("no data passes", "stateful firewall"),
)
def _(scene, stack):
    rule = "ip saddr 10.77.0.2 tcp dport != 22 ip length > 200 drop"
    stack.enter_context(scene.cluster["n3"].firewall(rule))


@fault("route works one way", *both("n2", "n3"), words=("n2 cannot connect to n3 (timed out)",))
def _(scene, stack):
    stack.enter_context(scene.cluster["n3"].firewall("ip saddr 10.77.0.2 drop"))


@fault(
    "jumbo frames between two nodes", *both("n2", "n3"), ("NET007", "n1"),
    words=("packets of 500 bytes do", "one MTU"), main="NET006",
)  # fmt: skip
def _(scene, stack):
    jumbo_frames(scene, stack, "n2", "n3")


@fault("another MTU", ("NET007", "n3"), words=("576", "ip link set dev eth0 mtu 1500"))
def _(scene, stack):
    n3 = scene.cluster["n3"]
    n3.sh("ip", "link", "set", "dev", "eth0", "mtu", 576)
    stack.callback(n3.sh, "ip", "link", "set", "dev", "eth0", "mtu", 1500)


@fault(
    "far away",
    *both("n1", "n2"),
    *both("n2", "n3"),
    words=("a round trip takes", "every step waits"),
)
def _(scene, stack):
    stack.enter_context(scene.cluster.delayed(scene.cluster["n2"], 0.03))


@fault(
    "packets get lost",
    ("NET006", "n1->n2"),
    ("NET006", "n3->n2"),
    words=("lost and sent again", "the link"),
)
def _(scene, stack):
    rule = "tcp dport 1024-65535 ip length > 1000 numgen inc mod 8 0 drop"
    stack.enter_context(scene.cluster["n2"].firewall(rule))


@fault("slow name server", ("NET008", "n2"), words=("n3 took", "/etc/hosts on n2"))
def _(scene, stack):
    n2 = scene.cluster["n2"]
    text = "".join(
        line + "\n"
        for line in scene.cluster.hosts_file(n2).splitlines()
        if not line.endswith(" n3")
    )
    stack.enter_context(n2.changed("/etc/hosts", text))
    stack.enter_context(n2.slow_dns(3, "10.77.0.3"))


@fault(
    "master port taken",
    ("NET004", "n1"),
    words=("29500 is held by pid", "holder", "use another --master_port"),
)
def _(scene, stack):
    # As launchers bind it: the port of a run that has just ended is free to them, and would not be
    # to this one.
    code = (
        "import socket, time; s = socket.create_server(('', 29500)); print(1, flush=True);"
        " time.sleep(1000)"
    )
    child = scene.cluster["n1"].popen(PYTHON, "-c", code, "holder", stdout=-1)
    child.stdout.readline()
    stack.callback(end, child)


@fault(
    "first address unreachable",
    ("NET005", "n2"),
    ("NET005", "n3"),
    words=("172.17.0.1", "--master_addr 10.77.0.1"),
)
def _(scene, stack):
    n1 = scene.cluster["n1"]
    n1.sh("ip", "link", "add", "docker0", "index", 50, "type", "bridge")
    stack.callback(n1.sh, "ip", "link", "delete", "docker0")
    n1.sh("ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
    n1.sh("ip", "link", "set", "docker0", "up")


@fault("variable stays behind", *everywhere("ENV002"), words=("GLOO_SOCKET_IFNAME", "--fix"))
def _(scene, stack):
    scene.environment["GLOO_SOCKET_IFNAME"] = "eth0"


@fault(
    "pdsh goes to another port",
    *everywhere("LNCH003"),
    words=("Connection refused", "pdsh -w n1 hostname"),
)
def _(scene, stack):
    scene.environment["PDSH_SSH_ARGS_APPEND"] = "-p 2222"


@fault(  # the text as it stands is not an interface either, and NET001 reports that on every node
    "command in .deepspeed_env",
    ("ENV001", ""),
    *everywhere("NET001"),
    words=("deepspeed_env:1", "changes in the shells"),
)
def _(scene, stack):
    scene.env_file("GLOO_SOCKET_IFNAME=$(hostname)\n")


@fault("comment in .deepspeed_env", ("ENV001", ""), words=("deepspeed_env:1", "delete that line"))
def _(scene, stack):
    scene.env_file("# interfaces\nGLOO_SOCKET_IFNAME=eth0\n")


# -- the plan -------------------------------------------------------------------------------------


@fault("unknown key", ("CFG001", ""), words=("training.num_steps", "config --keys"))
def _(scene, stack):
    scene.words.append("training.num_steps=3")


@fault(
    "latent_dim mismatch",
    ("DATA001", ""),
    words=("model.latent_dim=768", "leave model.latent_dim unset"),
)
def _(scene, stack):
    scene.words.append("model.latent_dim=768")


@fault(
    "vocabulary mismatch",
    ("DATA001", ""),
    words=("model.vocab_size=100", "leave model.vocab_size unset"),
)
def _(scene, stack):
    scene.words.append("model.vocab_size=100")


@fault(
    "batch does not divide", ("CFG002", ""), words=("train_batch_size=7", "set it in one place")
)
def _(scene, stack):
    scene.json_file({"train_batch_size": 7})


@fault(
    "batch larger than the data",
    ("CFG003", ""),
    words=("300000", "lower training.train_batch_size"),
)
def _(scene, stack):
    scene.words += ["training.grad_accum_steps=100000", "training.train_batch_size=1"]


@fault("removed DeepSpeed key", ("CFG002", ""), words=("compression_training", "delete"))
def _(scene, stack):
    scene.json_file({"compression_training": {}})


@fault(
    "model cannot fit",
    ("MEM001", ""), ("DISK001", ""),
    words=("zero2 needs", "use more ranks"), main="MEM001",
)  # fmt: skip
def _(scene, stack):
    scene.words += ["model.hidden_size=16384", "model.n_blocks=64", "model.n_heads=64"]


@fault(
    "resume at another world size",
    ("RES001", ""),
    words=("global_batch 12, now 6", "grad_accum_steps=2"),
)
def _(scene, stack):
    scene.words += [f"training.resume={scene.saved_run / 'latest'}", "training.train_batch_size=2"]


@fault(
    "damaged checkpoint",
    ("RES001", ""),
    words=("bytes, the manifest says", "training.resume=auto"),
)
def _(scene, stack):
    copy = scene.folder / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(scene.saved_run, copy, symlinks=True)
    largest = max(
        (p for p in copy.rglob("*") if p.is_file() and not p.is_symlink()),
        key=lambda p: p.stat().st_size,
    )
    largest.write_bytes(largest.read_bytes()[:-10])
    scene.words += [
        f"training.resume={copy / 'latest'}",
        "training.train_batch_size=2",
        "training.grad_accum_steps=2",
    ]


# Faults that do not touch one another, for runs that share the time.
TOGETHER = [
    (
        "other torch version",
        "other sources",
        "/dev/shm too small",
        "nofile too low",
        "stale build lock",
        "leftover rank",
        "one byte of a shard differs",
        "own name is 127.0.1.1",
        "names differ between nodes",
        "variable stays behind",
        "one direction firewalled",
        "first address unreachable",
        "batch larger than the data",
        "clock skew",
        "interface is loopback",
        "temporary folder full",
        "packets get lost",
    ),
    ("unknown host key", "sshd down", "latent_dim mismatch"),
    (
        "refused key",
        "changed host key",
        "login shell ends",
        "vocabulary mismatch",
        "comment in .deepspeed_env",
    ),
    ("host is off", "python missing", "master port taken", "batch does not divide"),
    ("node hangs during the check", "package broken", "damaged checkpoint"),
    (
        "interface does not exist",
        "checkpoint folder not shared",
        "checkpoint folder read-only",
        "data missing",
        "resume at another world size",
        "slow name server",
        "jumbo frames between two nodes",
    ),
    (
        "interface down",
        "other commit",
        "shard cut short",
        "checkpoint folder full",
        "removed DeepSpeed key",
        "far away",
        "another MTU",
    ),
]
