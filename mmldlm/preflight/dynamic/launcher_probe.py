"""Through the launcher itself: one process a node, started as training will be, tells which variables arrive there."""

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
    """Why nothing can be learnt from starting the launcher now; None when something can."""
    if context.local:
        return "one machine: nothing is carried"
    if context.options.carries_all:
        return "mmldlm launch carries the variables itself, and its watcher tells of nodes that do not start"
    if context.launcher == "torchrun":
        return "torchrun is started on each node by a shell of its own: set variables there"
    if context.failures or len(context.facts) < len(context.nodes):
        return "a node does not answer, so the launcher would not reach it either"
    machines = [found["machine"] for found in context.answered("identity").values()]
    if len(set(machines)) < len(machines):
        return "two names are one machine (see HOST004)"
    if context.launcher == "deepspeed" and any(read_env_file(path)[1] for path in env_files()):
        return "DeepSpeed stops at its .deepspeed_env (see ENV001)"
    return None


class LauncherProbe:
    """A launch of arrived.py, one rank a node, that runs while other things are measured."""

    def __init__(self, context: Context):
        self.context, self.output = context, ""
        self._folder = tempfile.TemporaryDirectory(prefix="mmldlm_preflight_")
        nodes = [replace(node, slots=1) for node in context.nodes]
        try:
            self.process = subprocess.Popen(
                self._line(nodes), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:  # no such launcher here: LNCH001
            self._folder.cleanup()
            raise LauncherMissing(str(error)) from error
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _line(self, nodes) -> list[str]:
        options, script = self.context.options, [print_environment.__file__]
        address = self.context.master_address()
        if self.context.launcher == "mpi":
            return mpi_command(nodes, False, {}, options.ssh_port, script)
        if self.context.launcher == "slurm":
            return srun_command(nodes, address, options.master_port, script)
        hostfile = Path(self._folder.name) / "hostfile"
        hostfile.write_text("".join(f"{node.name} slots=1\n" for node in nodes))
        return deepspeed_command(nodes, False, str(hostfile), address, options.master_port, options.ssh_port, script)

    def _read(self) -> None:
        self.output = self.process.stdout.read()

    def finish(self) -> None:
        """Wait for the end, at most SECONDS, and fill context.arrived and context.through."""
        context = self.context
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS)
        late = self.process.poll() is None
        with contextlib.suppress(OSError):  # what the launcher started here, if it still runs
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)
        self._folder.cleanup()
        names = {found["hostname"]: name for name, found in context.answered("identity").items()}
        other = []
        for line in self.output.splitlines():
            if print_environment.MARK not in line:
                other.append(line)
                continue
            with contextlib.suppress(ValueError):  # cut short, when time ran out
                found = json.loads(line.split(print_environment.MARK, 1)[1])
                if found["hostname"] in names:
                    variables = {k: v for k, v in found["environment"].items() if k.startswith(PREFIXES)}
                    context.arrived[names[found["hostname"]]] = {"rank": found["rank"], "variables": variables}
        code = self.process.returncode
        context.through = {"code": None if late else code, "lines": [line for line in other if line.strip()][-20:]}


class LauncherMissing(Exception):
    """The launcher's program is not on this machine."""


def start_probe(context: Context) -> LauncherProbe | None:
    """Start the probe if one of its checks is wanted and it can tell something; else context.through says why not."""
    if not CHECKS & context.chosen:
        return None
    reason = skip_reason(context)
    if reason is None:
        with contextlib.suppress(LauncherMissing):
            return LauncherProbe(context)
        reason = "the launcher is not on this machine (see LNCH001)"
    context.through = {"skipped": reason}
    return None
