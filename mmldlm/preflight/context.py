"""What the checks judge: the plan of the run, and what was measured of it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from mmldlm.cluster.hostfile import Node
from mmldlm.config.schema import Config
from mmldlm.errors import UserError
from mmldlm.preflight.remote.ssh import AgentFailure

Facts = dict[str, dict[str, Any]]


@dataclass
class Context:
    """Everything known when the checks run. Nothing here is judged yet.

    Attributes:
        options: the command line. nodes: of the hostfile, in order. local: one node, this machine, without ssh.
        config, config_error: the resolved config, or why there is none. plan: what plan_child found.
        head: facts of this machine. facts: node -> probe -> {"value"} or {"error"}.
        failures: nodes whose agent gave no (more) answer. clocks: node -> (offset, half round trip) in seconds.
        master: {"address", "port", "listening", "candidates", "reach"}. matrix: (from, to) -> {"ms"} or {"error"}.
        shared: (writer, reader) -> whether the reader saw the writer's token. arrived: node -> {"rank", "variables"}
            of a process that the launcher itself started; through: how that went. chosen: ids of the checks to run.
    """

    options: argparse.Namespace
    nodes: list[Node] = field(default_factory=list)
    local: bool = False
    hostfile_error: UserError | None = None
    config: Config | None = None
    config_error: UserError | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    plan_error: str | None = None
    head: Facts = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)
    failures: dict[str, AgentFailure] = field(default_factory=dict)
    errors: dict[tuple[str, str], str] = field(default_factory=dict)
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    master: dict[str, Any] = field(default_factory=dict)
    matrix: dict[tuple[str, str], dict] = field(default_factory=dict)
    shared: dict[tuple[str, str], bool] = field(default_factory=dict)
    arrived: dict[str, dict] = field(default_factory=dict)
    through: dict[str, Any] = field(default_factory=dict)
    chosen: set[str] = field(default_factory=set)
    collectives: dict[str, Any] = field(default_factory=dict)
    dry_run: dict[str, Any] = field(default_factory=dict)

    @property
    def level(self) -> int:
        return self.options.level

    @property
    def launcher(self) -> str:
        return self.options.launcher

    @property
    def world_size(self) -> int:
        return sum(node.slots for node in self.nodes)

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.nodes]

    def slots(self, name: str) -> int:
        return next(node.slots for node in self.nodes if node.name == name)

    def value(self, name: str, probe: str) -> Any:
        """What a probe measured on a node; None where it gave no value."""
        return self.facts.get(name, {}).get(probe, {}).get("value")

    def head_value(self, probe: str) -> Any:
        """What a probe measured on this machine."""
        return self.head.get(probe, {}).get("value")

    def answered(self, probe: str) -> dict[str, Any]:
        """node -> value, of the nodes where the probe gave one."""
        found = {name: self.value(name, probe) for name in self.names}
        return {name: value for name, value in found.items() if value is not None}

    def unanswered(self, probe: str) -> dict[str, str]:
        """node -> why the probe gave no value there, of nodes whose agent did answer."""
        return {
            name: facts[probe].get("error", "no value")
            for name, facts in self.facts.items()
            if probe in facts and "value" not in facts[probe]
        }

    def has_gpus(self) -> bool:
        """Whether any node (or this machine, when none was asked) has a GPU."""
        found = list(self.answered("gpus").values()) or [self.head_value("gpus") or {}]
        return any(entry.get("gpus") for entry in found)

    def engine_plan(self) -> str:
        """The row of sizes.PLANS that the config asks for."""
        from mmldlm.engines.deepspeed.config import resolve_stage

        kind = self.config.engine.kind
        if kind == "deepspeed":
            return f"zero{resolve_stage(self.config)}"
        return {"ddp": "zero0"}.get(kind, kind)

    def master_address(self) -> str:
        """Address of the first node that the launcher is given: the one that was tried (level 2), else --master_addr,
        else what this machine knows of the first node."""
        if self.local:
            return "127.0.0.1"
        named = next(iter(self.reachable_addresses(self.names[0])), self.names[0])
        return self.master.get("address") or self.options.master_addr or named

    def addresses(self, name: str) -> list[str]:
        """Addresses that this machine knows of a name of the hostfile."""
        return (self.head_value("resolve") or {}).get(name, {}).get("addresses", [])

    def reachable_addresses(self, name: str) -> list[str]:
        """The same without loopback, which means another machine elsewhere."""
        return [address for address in self.addresses(name) if not address.startswith("127.")]

    def environment_on(self, name: str) -> dict[str, str] | None:
        """Variables as a rank on this node will have them.

        As the launcher was seen to bring them (level 2, through.py); before that, the login's, and over them what the
        launcher is known to carry. None where the launcher starts ranks in shells that preflight does not see.
        """
        from mmldlm.cluster.env_propagation import propagated_variables, run_variables

        if name in self.arrived:
            return self.arrived[name]["variables"]
        own = self.value(name, "environment")
        taken = run_variables() if self.options.carries_all else propagated_variables(self.launcher, self.has_gpus())
        if self.local:
            return run_variables()
        return None if own is None or taken is None else {**own, **taken}


def majority(values: dict[str, Any]) -> Any:
    """The value that most nodes have; of equally many, the first node's."""
    counted = list(values.values())
    return max(counted, key=counted.count) if counted else None
