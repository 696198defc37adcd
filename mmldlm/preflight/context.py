"""Input of the checks: the options of the run and the collected facts."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.cluster.agent import AgentFailure
from mmldlm.cluster.env_propagation import propagated_variables, run_variables
from mmldlm.cluster.hostfile import Node, write_hostfile
from mmldlm.cluster.launcher_commands import deepspeed_command, mpi_command, srun_command
from mmldlm.config.schema import Config
from mmldlm.errors import UserError
from mmldlm.utils.gpus import VISIBLE
from mmldlm.utils.validation import not_none

Facts = dict[str, dict[str, Any]]


@dataclass
class Context:
    """Options and facts of a preflight, before any evaluation.

    Attributes:
        options: Parsed command line.
        nodes: Nodes of the hostfile, in order.
        local: Whether the run is on this machine alone, without ssh.
        hostfile_error: Reason why the hostfile cannot be used.
        config: Resolved config; None for a script of the user's own.
        config_error: Reason why the config is invalid.
        data_facts: Result of checks/config.py's child: samples, model sizes, or errors of data and
            engine.
        data_probe_error: Reason why the data probe failed.
        head: Probe -> {"value"} or {"error"} of this machine.
        facts: Node -> probe -> {"value"} or {"error"}.
        failures: Node -> why its agent stopped answering (those of the AgentPool).
        errors: (node, action) -> error of an agent's action (the same).
        clocks: Node -> (clock offset, half round trip) in seconds.
        master: {"address", "guessed", "port", "listening", "candidates", "reach"}.
        connections: (from, to) -> {"ms", "segments", "retransmitted"} or {"error"}.
        shared_folder: (writer, reader) -> whether the reader saw the writer's file.
        launched: Node -> {"rank", "variables"} of a process that the launcher itself started.
        launcher_result: {"code", "lines"} of that launcher, or {"skipped": reason}.
        check_ids: Ids of the checks to run.
        collectives: Results of level 3: {"rounds", "ranks"}.
        dry_run: Results of level 4: {"train", "resume", "log"}.
    """

    options: argparse.Namespace
    nodes: list[Node] = field(default_factory=list)
    local: bool = False
    hostfile_error: UserError | None = None
    config: Config | None = None
    config_error: UserError | None = None
    data_facts: dict[str, Any] = field(default_factory=dict)
    data_probe_error: str | None = None
    head: Facts = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)
    failures: dict[str, AgentFailure] = field(default_factory=dict)
    errors: dict[tuple[str, str], str] = field(default_factory=dict)
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    master: dict[str, Any] = field(default_factory=dict)
    connections: dict[tuple[str, str], dict] = field(default_factory=dict)
    shared_folder: dict[tuple[str, str], bool] = field(default_factory=dict)
    launched: dict[str, dict] = field(default_factory=dict)
    launcher_result: dict[str, Any] = field(default_factory=dict)
    check_ids: set[str] = field(default_factory=set)
    collectives: dict[str, Any] = field(default_factory=dict)
    dry_run: dict[str, Any] = field(default_factory=dict)

    @property
    def level(self) -> int:
        return self.options.level

    @property
    def launcher(self) -> str:
        return self.options.launcher

    @property
    def script(self) -> list[str] | None:
        """Script of the user's own and its arguments; None for a run of mmldlm."""
        return self.options.script

    @property
    def no_config(self) -> str:
        """Why there is no config."""
        return "no config" if self.script is None else "a script of your own"

    @property
    def run_config(self) -> Config:
        """`config`, where it is known that there is one."""
        return not_none(self.config)

    @property
    def world_size(self) -> int:
        return sum(node.slots for node in self.nodes)

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.nodes]

    def slots(self, name: str) -> int:
        return next(node.slots for node in self.nodes if node.name == name)

    def value(self, name: str, probe: str) -> Any:
        """Return a probe's value on a node; None if it has none."""
        return self.facts.get(name, {}).get(probe, {}).get("value")

    def head_value(self, probe: str) -> Any:
        """Return a probe's value on this machine; None if it has none."""
        return self.head.get(probe, {}).get("value")

    def probe_values(self, probe: str) -> dict[str, Any]:
        """Return node -> value of a probe, without nodes that have none."""
        values = {name: self.value(name, probe) for name in self.names}
        return {name: value for name, value in values.items() if value is not None}

    def probe_errors(self, probe: str) -> dict[str, str]:
        """Return node -> error of a probe, for nodes whose agent answered without a value."""
        return {
            name: facts[probe].get("error", "no value")
            for name, facts in self.facts.items()
            if probe in facts and "value" not in facts[probe]
        }

    def has_gpus(self) -> bool | None:
        """Return whether any node has a GPU; None if that is unknown: level 0 asks no other
        machine.
        """
        # Checks ask for every node: the first one with a GPU answers.
        answers = [self.head] if self.local and not self.facts else self.facts.values()
        known = False
        for answer in answers:
            value = answer.get("gpus", {}).get("value")
            if value is not None and value.get("gpus"):
                return True
            known = known or value is not None
        return False if known else None

    @property
    def global_batch(self) -> int:
        """Samples of one step of all ranks."""
        training = self.run_config.training
        return training.train_batch_size * training.grad_accum_steps * self.world_size

    def master_address(self) -> str:
        """Return the address of the first node for the launcher.

        In this order: the address tested by level 2, --master_addr, the address known on this
        machine.
        """
        if self.local:
            return "127.0.0.1"
        reachable = next(iter(self.reachable_addresses(self.names[0])), self.names[0])
        return self.master.get("address") or self.options.master_addr or reachable

    def launcher_command(
        self,
        script: list[str],
        hostfile: Path,
        nodes: list[Node] | None = None,
        folder: str | None = None,
    ) -> list[str]:
        """Return the command with which the launcher starts a script on every rank.

        Args:
            script: Script and its arguments.
            hostfile: Path for a hostfile of the nodes. The user's own may be a pipe, which can be
                read only once.
            nodes: Nodes to start on; by default all.
            folder: Working folder of the command; by default the current one.

        Raises:
            UserError: DeepSpeed would paste a value into a shell line that changes it, or take
                another GPU.
        """
        nodes = nodes or self.nodes
        address, port = self.master_address(), self.options.master_port
        ssh_port = self.options.ssh_port
        if self.launcher == "mpi":
            options = self.options.ssh_option
            # Without it, a Python of an environment module does not start.
            carry = ["LD_LIBRARY_PATH"] if self.options.propagates_all else []
            return mpi_command(nodes, self.local, address, port, ssh_port, options, script, carry)
        if self.launcher == "slurm":
            return srun_command(nodes, address, port, script)
        write_hostfile(hostfile, nodes)
        return deepspeed_command(
            nodes,
            self.local,
            str(hostfile),
            address,
            port,
            ssh_port,
            script,
            folder,
            self._chosen_gpus(),
        )

    def _chosen_gpus(self) -> list[int]:
        """Return the GPUs of this machine that CUDA_VISIBLE_DEVICES names for the ranks, if it
        does.

        Raises:
            UserError: it names instances of MIG, which have no numbers.
        """
        if VISIBLE not in os.environ or not self.local or not self.has_gpus():
            return []
        if "MIG-" in os.environ[VISIBLE]:
            raise UserError(
                "GPUs that DeepSpeed's launcher can select by number",
                f"{VISIBLE}={os.environ[VISIBLE]}, a MIG instance",
                "use `mmldlm train` or --launcher torchrun, which keep its name",
            )
        facts = self.value(self.names[0], "gpus") or self.head_value("gpus")
        return [gpu["index"] for gpu in facts["gpus"]][: self.world_size]

    def addresses(self, name: str) -> list[str]:
        """Return the addresses of a hostfile name, as this machine resolves it."""
        return (self.head_value("resolve") or {}).get(name, {}).get("addresses", [])

    def reachable_addresses(self, name: str) -> list[str]:
        """Return the same addresses without loopback, which means another machine elsewhere."""
        return [address for address in self.addresses(name) if not address.startswith("127.")]

    def environment_on(self, name: str) -> dict[str, str] | None:
        """Return the environment of a rank on a node.

        Level 2 reads it from a process that the launcher started. Before, it is the login's
        environment plus the variables that the launcher is known to propagate. None if the
        launcher starts ranks in shells unknown here.
        """
        if name in self.launched:
            return self.launched[name]["variables"]
        if self.local:
            return run_variables()
        login, propagated = self.value(name, "environment"), self.passed_variables()
        return None if login is None or propagated is None else {**login, **propagated}

    def passed_variables(self) -> dict[str, str] | None:
        """Return the variables of this shell that ranks on other nodes get; None if the launcher
        starts them in shells unknown here.
        """
        if self.options.propagates_all:
            return run_variables()
        return propagated_variables(self.launcher, bool(self.has_gpus()))

    def gloo_interfaces(self, name: str) -> list[str]:
        """Return the interfaces in GLOO_SOCKET_IFNAME of a rank on a node."""
        names = (self.environment_on(name) or {}).get("GLOO_SOCKET_IFNAME", "")
        return [interface for interface in names.split(",") if interface]

    def data_address(self, name: str) -> str:
        """Return the address that ranks on a node publish: of GLOO_SOCKET_IFNAME, else of the
        node's own name.
        """
        network = self.value(name, "network") or {}
        interfaces = network.get("interfaces", [])
        # NET001 reports an unusable interface; the connections are then tested over a usable one.
        by_name = {
            e["name"]: e["addresses"]
            for e in interfaces
            if e["addresses"] and e["up"] and not e["loopback"]
        }
        for interface in self.gloo_interfaces(name):
            if interface in by_name:
                return by_name[interface][0]
        own = [address for addresses in by_name.values() for address in addresses]
        for address in network.get("hostname_addresses", []):
            if not address.startswith("127.") and address in own:
                return address
        return (network.get("route_to_master") or {}).get("source") or name
