"""Start one process per node with the real launcher and collect the environment that it
receives.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from mmldlm.cluster.env_propagation import PREFIXES, env_files, read_env_file
from mmldlm.cluster.launcher_commands import deepspeed_command, mpi_command, srun_command
from mmldlm.preflight.context import Context
from mmldlm.preflight.dynamic import print_environment

SECONDS = 60.0
CHECKS = {"ENV002", "LNCH003"}


def skip_reason(context: Context) -> str | None:
    """Return why the probe would measure nothing; None if it should run."""
    if context.local:
        return "one machine: no variables are propagated"
    if context.options.propagates_all:
        return (
            "mmldlm launch passes the variables itself, and its watcher reports nodes that do not"
            " start"
        )
    if context.launcher == "torchrun":
        return "torchrun is started on each node by its own shell: set variables there"
    if context.failures or len(context.facts) < len(context.nodes):
        return "a node does not answer, so the launcher would not reach it either"
    machines = [found["machine"] for found in context.probe_values("identity").values()]
    if len(set(machines)) < len(machines):
        return "two names are one machine (see HOST004)"
    if context.launcher == "deepspeed" and any(read_env_file(path)[1] for path in env_files()):
        return "DeepSpeed fails on its .deepspeed_env (see ENV001)"
    return None


class LauncherProbe:
    """A launch of print_environment.py with one rank per node, in the background."""

    def __init__(self, context: Context):
        self.context, self.output = context, ""
        self._folder = tempfile.TemporaryDirectory(prefix="mmldlm_preflight_")
        nodes = [replace(node, slots=1) for node in context.nodes]
        try:
            self.process = subprocess.Popen(
                self._command(nodes),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:  # no such launcher on this machine: LNCH001
            self._folder.cleanup()
            raise LauncherMissing(str(error)) from error
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _command(self, nodes) -> list[str]:
        options, script = self.context.options, [print_environment.__file__]
        address = self.context.master_address()
        if self.context.launcher == "mpi":
            return mpi_command(nodes, False, {}, options.ssh_port, script)
        if self.context.launcher == "slurm":
            return srun_command(nodes, address, options.master_port, script)
        hostfile = Path(self._folder.name) / "hostfile"
        hostfile.write_text("".join(f"{node.name} slots=1\n" for node in nodes), encoding="utf-8")
        return deepspeed_command(
            nodes, False, str(hostfile), address, options.master_port, options.ssh_port, script
        )

    def _read(self) -> None:
        self.output = self.process.stdout.read()

    def finish(self) -> None:
        """Wait for the end, at most SECONDS, and fill context.launched and
        context.launcher_result.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS)
        timed_out = self.process.poll() is None
        with contextlib.suppress(OSError):  # remaining processes of the launcher on this machine
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)
        self._folder.cleanup()
        lines = self._parse_output()
        self.context.launcher_result = {
            "code": None if timed_out else self.process.returncode,
            "lines": lines[-20:],
        }

    def _parse_output(self) -> list[str]:
        """Fill context.launched from the output; return its other lines."""
        context, other = self.context, []
        names = {
            found["hostname"]: name for name, found in context.probe_values("identity").items()
        }
        for line in self.output.splitlines():
            if print_environment.MARK not in line:
                other.append(line)
                continue
            with contextlib.suppress(ValueError):  # truncated by the timeout
                found = json.loads(line.split(print_environment.MARK, 1)[1])
                if found["hostname"] in names:
                    variables = {
                        k: v for k, v in found["environment"].items() if k.startswith(PREFIXES)
                    }
                    context.launched[names[found["hostname"]]] = {
                        "rank": found["rank"],
                        "variables": variables,
                    }
        return [line for line in other if line.strip()]


class LauncherMissing(Exception):
    """The launcher's program is not installed on this machine."""


def start_probe(context: Context) -> LauncherProbe | None:
    """Start the probe if one of its checks is selected; otherwise context.launcher_result has the
    reason.
    """
    if not CHECKS & context.check_ids:
        return None
    reason = skip_reason(context)
    if reason is None:
        with contextlib.suppress(LauncherMissing):
            return LauncherProbe(context)
        reason = "the launcher is not on this machine (see LNCH001)"
    context.launcher_result = {"skipped": reason}
    return None
