"""Virtual cluster of three hosts on one machine: network, processes, mounts, /etc/hosts, /dev/shm
and sshd each.

A host is a process in new net, pid, mount, uts and ipc namespaces; a bridge in one more net
namespace is the switch. Nothing is set up outside these namespaces: the cluster ends with its
processes. Needs root.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from mmldlm.utils.stop_signals import set_parent_death_signal

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "sshd": "openssh-server",
    "pdsh": "pdsh",
    "nft": "nftables",
    "mpirun": "openmpi-bin",
    "ip": "iproute2",
}
SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_die_with_parent = functools.partial(set_parent_death_signal, signal.SIGKILL)


def reason_to_skip() -> str | None:
    """Return why no cluster can be built; None if it can.

    Missing programs are installed with apt-get.
    """
    if os.geteuid() != 0:
        return "a cluster of network namespaces needs root"
    if subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount", "true"], capture_output=True
    ).returncode:
        return "this machine allows no namespaces"
    missing = [
        package
        for program, package in PACKAGES.items()
        if shutil.which(program, path=SBIN) is None
    ]
    if missing and shutil.which("apt-get"):
        quiet = {
            "capture_output": True,
            "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        }
        subprocess.run(["apt-get", "update", "-qq"], **quiet)
        subprocess.run(
            ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing], **quiet
        )
        missing = [
            package
            for program, package in PACKAGES.items()
            if shutil.which(program, path=SBIN) is None
        ]
    return f"the cluster needs {', '.join(missing)}" if missing else None


def sh(*command, timeout: float = 30) -> str:
    """Run a command of the set-up; return its output, or raise an AssertionError with its
    message.
    """
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PATH": SBIN},
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stderr or done.stdout}"
    return done.stdout


class Host:
    """A host of the cluster. Its name is its hostname; `pid` is its init, seen from outside."""

    def __init__(self, name: str, address: str, folder: Path):
        self.name, self.address, self.folder = name, address, folder
        self.pid = 0

    def enter(self, *command) -> list[str]:
        """Return the command line that runs a command on this host."""
        return [
            "nsenter",
            "--target",
            str(self.pid),
            "--all",
            "--wd=" + os.getcwd(),
            *map(str, command),
        ]

    def sh(self, *command, timeout: float = 30) -> str:
        """Run a command of the set-up on this host."""
        return sh(*self.enter(*command), timeout=timeout)

    def popen(self, *command, cwd=ROOT, env: dict | None = None, **more) -> subprocess.Popen:
        """Start a command on this host with a login's environment and `env`."""
        line = ["nsenter", "--target", str(self.pid), "--all", f"--wd={cwd}", *map(str, command)]
        return subprocess.Popen(line, env={**base_environment(), **(env or {})}, text=True, **more)

    def run(self, *command, timeout: float = 120, **more) -> subprocess.CompletedProcess:
        """Run a command to its end; stdout and stderr are one text."""
        process = self.popen(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **more,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            end(process)
            output, _ = process.communicate()
            raise AssertionError(
                f"no end after {timeout} s on {self.name}:\n{output[-4000:]}"
            ) from None
        return subprocess.CompletedProcess(command, process.returncode, output)

    def start_sshd(self, *prefix: str) -> None:
        """`prefix` wraps the daemon, so that its sessions inherit what it sets (prlimit)."""
        self.sh(*prefix, shutil.which("sshd", path=SBIN), "-f", self.folder / "sshd_config")

    def stop_sshd(self) -> None:
        """Stop the listening daemon; open sessions continue."""
        pid = (self.folder / "sshd.pid").read_text().strip()
        self.sh("kill", pid)
        (self.folder / "sshd.pid").unlink(missing_ok=True)

    # -- faults: each holds while its context is open ---------------------------------------------

    @contextlib.contextmanager
    def bound(self, source, target):
        """Bind `source` over `target` (file over file, folder over folder) on this host alone."""
        self.sh("mount", "--bind", source, target)
        try:
            yield
        finally:
            self.sh("umount", "--lazy", target)

    @contextlib.contextmanager
    def tmpfs(self, target, options: str):
        """A fresh tmpfs over a folder on this host alone (options: size=64k, ro ...)."""
        self.sh("mount", "-t", "tmpfs", "-o", options, "none", target)
        try:
            yield
        finally:
            self.sh("umount", "--lazy", target)

    @contextlib.contextmanager
    def changed(self, path, text: str):
        """A file with another text on this host alone."""
        other = self.folder / f"changed_{Path(path).name}"
        other.write_text(text)
        with self.bound(other, path):
            yield

    @contextlib.contextmanager
    def firewall(self, rule: str):
        """One nft rule on what comes in."""
        self.sh(
            "nft",
            "add table inet faults; add chain inet faults in { type filter hook input priority"
            " 0; }",
        )
        self.sh("nft", f"add rule inet faults in {rule}")
        try:
            yield
        finally:
            self.sh("nft", "delete table inet faults")

    @contextlib.contextmanager
    def slow_dns(self, seconds: float, address: str):
        """A name server on this host that answers every name with one address, late;
        /etc/resolv.conf names it.
        """
        line = [sys.executable, "-c", _SLOW_DNS, str(seconds), address]
        with self.process(*line, stdout=subprocess.PIPE) as server:
            assert server.stdout.readline() == "ready\n"
            with self.changed(
                "/etc/resolv.conf", "nameserver 127.0.0.1\noptions timeout:30 attempts:1\n"
            ):
                yield

    @contextlib.contextmanager
    def process(self, *command, **more):
        """A process that runs on this host meanwhile."""
        child = self.popen(*command, stdin=subprocess.DEVNULL, **more)
        try:
            yield child
        finally:
            end(child)


# Frames between two interfaces, each way after a delay. Each with the kernel's own header
# (PACKET_VNET_HDR): without it checksums and the cutting of segments, which the kernel leaves to
# network cards, would be missing.
_DELAY = """
import collections, select, socket, sys, time
ends = []
for name in sys.argv[2:]:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    end.setsockopt(263, 15, 1)
    end.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE: nothing is to be lost here
    end.bind((name, 3))
    ends.append(end)
waiting = collections.deque()
print("ready", flush=True)
while True:
    wait = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
    for end in select.select(ends, [], [], wait)[0]:
        frame, place = end.recvfrom(1 << 17)
        if place[2] != socket.PACKET_OUTGOING:
            waiting.append((time.monotonic() + float(sys.argv[1]), ends[1 - ends.index(end)], frame))
    while waiting and waiting[0][0] <= time.monotonic():
        _, end, frame = waiting.popleft()
        end.send(frame)
"""  # noqa: E501
# Answers every question of DNS with one address, after a delay.
_SLOW_DNS = """
import socket, sys, threading, time
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
print("ready", flush=True)
def answer(question, place):
    time.sleep(float(sys.argv[1]))
    name_end = question.index(b"\\0", 12) + 1
    kind = question[name_end : name_end + 2]
    found = socket.inet_aton(sys.argv[2]) if kind == b"\\0\\1" else b""
    head = question[:2] + b"\\x85\\x80\\0\\1" + (b"\\0\\1" if found else b"\\0\\0") + b"\\0" * 4
    record = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\1\\0\\4" + found if found else b""
    server.sendto(head + question[12 : name_end + 4] + record, place)
while True:
    threading.Thread(target=answer, args=server.recvfrom(4096), daemon=True).start()
"""


def end(process: subprocess.Popen) -> None:
    """Kill nsenter and all of its descendants on the host; a survivor would hold the pipe of its
    output open.
    """
    parents = {process.pid: process.info["ppid"] for process in psutil.process_iter(["ppid"])}
    below = [process.pid]
    for pid in below:
        below += [child for child, parent in parents.items() if parent == pid]
    for pid in below[1:]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


def base_environment() -> dict[str, str]:
    """Return the environment of a login on a CPU node, without the variables of a test session."""
    keep = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    return {
        "HOME": os.path.expanduser("~"),
        "PATH": f"{Path(sys.executable).parent}:{SBIN}",
        "SHELL": "/bin/bash",
        **keep,
    }


class VirtualCluster:
    """`num_hosts` hosts n1, n2 ... with addresses 10.77.0.1, 10.77.0.2 ... that log in to one
    another with keys.
    """

    def __init__(self, folder: Path, num_hosts: int = 3):
        self.folder = folder
        self.hosts = [
            Host(f"n{i}", f"10.77.0.{i}", folder / f"n{i}") for i in range(1, num_hosts + 1)
        ]
        self._processes: list[subprocess.Popen] = []
        self._home_ssh, self._home_cache = Path.home() / ".ssh", Path.home() / ".cache"
        self._made = [path for path in (self._home_ssh, self._home_cache) if not path.exists()]

    def __enter__(self) -> VirtualCluster:
        # Held by every running cluster: removing a folder ends the mounts on it, also those of
        # another test session.
        self._lock = open(
            Path(tempfile.gettempdir()) / "mmldlm_virtual_cluster.lock", "a", encoding="utf-8"
        )
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        try:
            self._up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *exc) -> None:
        self.down()

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def hosts_file(self, own: Host) -> str:
        """/etc/hosts of one host."""
        return "127.0.0.1 localhost\n" + "".join(
            f"{host.address} {host.name}\n" for host in self.hosts
        )

    def _up(self) -> None:
        for path in self._made:
            path.mkdir(mode=0o700, exist_ok=True)
        self._write_files()
        self.switch = self._spawn("unshare", "--net", "sleep", "infinity")
        # Until it has left this machine's namespace, the bridge would become this machine's.
        here, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + 10
        while os.readlink(f"/proc/{self.switch.pid}/ns/net") == here:
            assert time.monotonic() < deadline, "the switch did not start"
            time.sleep(0.01)
        self.in_switch("ip", "link", "add", "br0", "type", "bridge")
        self.in_switch("ip", "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts, 1):
            self._start_host(host, number)

    def _write_files(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        key = self.folder / "id_ed25519"
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "cluster", "-f", key)
        known = []
        for host in self.hosts:
            ssh = host.folder / "ssh"
            ssh.mkdir(parents=True, mode=0o700)
            (host.folder / "cache").mkdir()
            sh(
                "ssh-keygen",
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-C",
                host.name,
                "-f",
                host.folder / "host_key",
            )
            algorithm, public = (host.folder / "host_key.pub").read_text().split()[:2]
            known.append(f"{host.name},{host.address} {algorithm} {public}\n")
        for host in self.hosts:
            for name in ("id_ed25519", "id_ed25519.pub"):
                shutil.copy(self.folder / name, host.folder / "ssh" / name)
            shutil.copy(self.folder / "id_ed25519.pub", host.folder / "ssh" / "authorized_keys")
            (host.folder / "ssh" / "known_hosts").write_text("".join(known))
            (host.folder / "etc_hosts").write_text(self.hosts_file(host))
            (host.folder / "resolv.conf").write_text("")
            # sshd without PAM refuses an account whose password field begins with "!".
            shadow = [
                line.split(":")
                for line in Path("/etc/shadow").read_text(encoding="utf-8").splitlines()
            ]
            text = "\n".join(
                ":".join([f[0], "*" if f[0] == "root" else f[1], *f[2:]]) for f in shadow
            )
            (host.folder / "shadow").write_text(text + "\n")
            (host.folder / "sshd_config").write_text(
                f"Port 22\nHostKey {host.folder}/host_key\nPidFile {host.folder}/sshd.pid\nUsePAM"
                " no\nUseDNS no\nStrictModes no\nPermitRootLogin yes\nPasswordAuthentication"
                " no\nPrintMotd no\nMaxStartups 200\nMaxSessions 200\n"
            )

    def _spawn(self, *command: str) -> subprocess.Popen:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
            start_new_session=True,
            env={**os.environ, "PATH": SBIN},
        )
        self._processes.append(process)
        return process

    def _start_host(self, host: Host, number: int) -> None:
        f = host.folder
        script = f"""
            hostname {host.name}
            mount -t sysfs none /sys
            mount -t tmpfs -o mode=755 none /run && mkdir -p /run/sshd /run/lock
            mount -t tmpfs -o size=4g,mode=1777 none /dev/shm
            for name in hosts:etc_hosts resolv.conf:resolv.conf shadow:shadow; do
                mount --bind {f}/${{name#*:}} /etc/${{name%:*}}
            done
            mount --bind {f}/ssh {self._home_ssh}
            mount --bind {f}/cache {self._home_cache}
            touch {f}/ready
            while :; do sleep 1000 & wait $!; done
        """
        words = (
            "--mount",
            "--uts",
            "--net",
            "--ipc",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
        )
        outer = self._spawn("unshare", *words, "bash", "-c", script)
        deadline = time.monotonic() + 10
        while not (f / "ready").exists():
            assert outer.poll() is None and time.monotonic() < deadline, (
                f"{host.name} did not start"
            )
            time.sleep(0.02)
        host.pid = int(
            Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            .read_text(encoding="utf-8")
            .split()[0]
        )
        # A high index, so that an interface added by a test comes first in `hostname -I`.
        veth = ("type", "veth", "peer", "name", f"port{number}", "netns", self.switch.pid)
        sh(
            "nsenter",
            "--target",
            host.pid,
            "--net",
            "ip",
            "link",
            "add",
            "eth0",
            "index",
            100,
            *veth,
        )
        self.in_switch("ip", "link", "set", f"port{number}", "master", "br0", "up")
        host.sh("ip", "link", "set", "lo", "up")
        host.sh("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.sh("ip", "link", "set", "eth0", "up")
        host.start_sshd()

    def in_switch(self, *command) -> str:
        """Run a command in the switch's network namespace."""
        return sh("nsenter", "--target", self.switch.pid, "--net", *command)

    @contextlib.contextmanager
    def cable_pulled(self, host: Host):
        """The host's link is down at the switch."""
        port = f"port{self.hosts.index(host) + 1}"
        self.in_switch("ip", "link", "set", port, "down")
        try:
            yield
        finally:
            self.in_switch("ip", "link", "set", port, "up")

    @contextlib.contextmanager
    def delayed(self, host: Host, seconds: float):
        """Delay all packets of a host by `seconds` in each direction."""
        port = f"port{self.hosts.index(host) + 1}"
        self.in_switch("ip", "link", "add", "late0", "type", "veth", "peer", "name", "late1")
        for name in ("late0", "late1"):
            self.in_switch("ip", "link", "set", name, "up")
        line = [
            "nsenter",
            "--target",
            str(self.switch.pid),
            "--net",
            sys.executable,
            "-c",
            _DELAY,
            str(seconds),
        ]
        relay = subprocess.Popen(
            [*line, port, "late0"], stdout=subprocess.PIPE, text=True, preexec_fn=_die_with_parent
        )
        try:
            assert relay.stdout.readline() == "ready\n"
            self.in_switch("ip", "link", "set", port, "nomaster")
            self.in_switch("ip", "link", "set", "late1", "master", "br0")
            yield
        finally:
            end(relay)
            self.in_switch("ip", "link", "delete", "late0")
            self.in_switch("ip", "link", "set", port, "master", "br0")

    def down(self) -> None:
        """End every host with all of its processes, and the switch with its network."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        # A host's init, and with it all of the host, ends after what started it.
        deadline = time.monotonic() + 10
        while (
            any(Path(f"/proc/{host.pid}").exists() for host in self.hosts if host.pid)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        with contextlib.suppress(BlockingIOError), self._lock:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in self._made:
                with contextlib.suppress(OSError):
                    path.rmdir()
