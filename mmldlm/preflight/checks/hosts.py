"""The hostfile, ssh access to each node, and what answers there: machine, interpreter, package and
the measurements of other checks.
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mmldlm.cluster.agent import AgentFailure, AgentPool, ssh_command
from mmldlm.cluster.connections import SEGMENT, login_works
from mmldlm.preflight.check import ERROR, Result, Results, check, fail, ok, skip, warn
from mmldlm.preflight.context import Context


def identity(args: dict) -> dict:
    """Return the identity of the machine: two names of it share the boot id and the namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    spaces = [os.readlink(f"/proc/self/ns/{namespace}") for namespace in ("net", "pid", "uts")]
    return {"hostname": socket.gethostname(), "machine": "/".join([boot, *spaces])}


def detect_lost_packets(context: Context, pool: AgentPool) -> None:
    """Retry logins that timed out with small packets; where those succeed, the MTU is the
    cause.
    """
    options = context.options
    late = {
        name: failure for name, failure in pool.failures.items() if "timed out" in failure.message
    }
    with ThreadPoolExecutor(max(len(late), 1)) as executor:
        commands = [ssh_command(name, options.ssh_port, options.ssh_option) for name in late]
        for (name, failure), works in zip(
            late.items(), executor.map(login_works, commands), strict=True
        ):
            if works:
                message = f"{failure.message}; with packets of {SEGMENT} bytes it works"
                pool.failures[name] = AgentFailure("mtu", message)


@check("HOST001", 0, "head", "hostfile")
def hostfile_parses(context: Context) -> Result:
    """The hostfile exists and DeepSpeed reads every line as intended.

    DeepSpeed treats a missing hostfile as a local run, reads `a slots=8x` as 8, and `node[1-2]` as
    one name.
    """
    if context.hostfile_error is not None:
        error = context.hostfile_error
        return fail(error.found, error.expected, error.fix)
    if context.options.hostfile is None:
        return ok(f"no hostfile: this machine alone, {context.world_size} rank(s)")
    return ok(f"{len(context.nodes)} node(s), {context.world_size} ranks")


@check("HOST002", 0, "cluster", "even slots")
def slots_are_even(context: Context) -> Result:
    """All nodes have the same number of ranks.

    With uneven slots DeepSpeed's launcher sets LOCAL_RANK = rank % slots: ranks are permuted, or
    share a GPU. srun starts the same number of tasks on every node.
    """
    counts = {node.slots for node in context.nodes}
    if len(counts) < 2:
        return ok(f"{max(counts, default=0)} per node")
    measured = ", ".join(f"{node.name}={node.slots}" for node in context.nodes)
    reasons = {
        "deepspeed": "DeepSpeed computes LOCAL_RANK as rank % slots",
        "slurm": "srun starts as many tasks on every node",
    }
    if context.launcher in reasons:
        return fail(
            measured,
            f"the same slots on all nodes ({reasons[context.launcher]})",
            f"set slots={min(counts)} on every line, or remove the odd node",
        )
    return warn(measured, "the same slots on all nodes", "make them equal if ranks use wrong GPUs")


@check("HOST003", 0, "head", "one host")
def single_host_is_this_one(context: Context) -> Result:
    """A hostfile with one host names this machine; DeepSpeed would start the ranks here in any
    case.
    """
    if len(context.nodes) != 1 or context.local or context.launcher != "deepspeed":
        return ok("not a hostfile with one host" if len(context.nodes) != 1 else "this machine")
    if context.options.propagates_all:
        return ok("mmldlm launch starts the ranks on the host named, wherever it is")
    name, network = context.nodes[0].name, context.head_value("network") or {}
    own = [address for e in network.get("interfaces", ()) for address in e["addresses"]]
    if name == network.get("hostname") or set(context.addresses(name)) & set(own):
        return ok(f"{name} is this machine")
    measured = (
        f"the only host is {name}, which is not this machine; DeepSpeed would train here instead"
    )
    return warn(
        measured,
        "--force_multi",
        "add --force_multi to the deepspeed command (mmldlm launch does)",
    )


@check("HOST004", 1, "node", "different machines")
def no_machine_twice(context: Context) -> Results:
    """No two names refer to the same machine."""
    seen: dict[str, str] = {}
    for name, identity in context.probe_values("identity").items():
        first = seen.setdefault(identity["machine"], name)
        if first != name:
            yield fail(
                f"{name} is the same machine as {first} ({identity['hostname']})",
                "a different machine in every line",
                f"delete one of the lines {first} and {name}",
                name,
            )
        else:
            yield ok(identity["hostname"], name)


def _port(context: Context) -> str:
    return f"-p {context.options.ssh_port} " if context.options.ssh_port else ""


def _ssh(context: Context, cause_fixes: dict, expected: str) -> Results:
    """Yield a FAIL for nodes whose failure has one of these causes (cause -> fix), a PASS for
    nodes that answer.
    """
    for name in context.names:
        failure = context.failures.get(name)
        if context.local:
            yield skip("this machine: no ssh needed", name)
        elif failure is not None and failure.cause in cause_fixes:
            yield fail(
                failure.message,
                expected,
                cause_fixes[failure.cause].format(name=name, port=_port(context)),
                name,
            )
        elif failure is None:
            yield ok("", name)


@check("SSH001", 1, "node", "name resolves")
def name_resolves(context: Context) -> Results:
    """The name in the hostfile has an address on this machine."""
    fix = (
        "add {name} to /etc/hosts (on every node) or to DNS, or write its address into the"
        " hostfile"
    )
    return _ssh(context, {"name": fix}, "a name with an address")


@check("SSH002", 1, "node", "ssh port")
def ssh_port_answers(context: Context) -> Results:
    """An ssh server answers at the node's port, within five seconds."""
    fixes = {
        "refused": (
            "start sshd on {name}, or give its port with --ssh-port (and PDSH_SSH_ARGS_APPEND='-p"
            " PORT')"
        ),
        "unreachable": (
            "switch {name} on, repair its link or firewall, or delete its line from the hostfile"
        ),
        "closed": "check the log of sshd on {name} (journalctl -u ssh): it closed the connection",
    }
    return _ssh(
        context, fixes, f"an ssh server at port {context.options.ssh_port or 'of ssh_config (22)'}"
    )


@check("SSH003", 1, "node", "host key")
def host_key_known(context: Context) -> Results:
    """The node's host key is known, because pdsh cannot answer ssh's prompt."""
    fixes = {
        "key_unknown": (
            "ssh-keyscan {port}-H {name} >> ~/.ssh/known_hosts (compare the fingerprint with the"
            " node's)"
        ),
        "key_changed": (
            "if it was reinstalled: ssh-keygen -R {name}; ssh-keyscan {port}-H {name} >>"
            " ~/.ssh/known_hosts"
        ),
    }
    return _ssh(context, fixes, "its key in ~/.ssh/known_hosts")


@check("SSH004", 1, "node", "login without password")
def login_accepted(context: Context) -> Results:
    """The node accepts this user's key."""
    return _ssh(
        context, {"denied": "ssh-copy-id {port}{name}"}, "a login with a key, without a prompt"
    )


@check("SSH005", 1, "node", "answers")
def node_answers(context: Context) -> Results:
    """The node starts the agent and answers every request in time."""
    fixes = {
        "client": (
            "install openssh-client on this machine, or start one command per node"
            " (launchers/multi_node.sh)"
        ),
        "silent": (
            "log in to {name} and look for a hung file system (df), a full process table, or an"
            " overload (top)"
        ),
        "shell": (
            "`ssh {port}{name} true` must exit immediately with status 0: check ~/.bashrc and the"
            " login shell of {name}"
        ),
        "mtu": (
            "large packets to {name} are lost: set one MTU on both hosts and every switch between"
            " them (`ip link`; `ip link set dev INTERFACE mtu 1500`)"
        ),
        "ended": "try manually: ssh {port}{name} true",
    }
    return _ssh(context, fixes, "answers within the time limit")


# Probes whose errors other checks report.
COVERED_BY_OTHER_CHECKS = ("data", "checkpoints", "gpus")


@check("SSH006", 1, "node", "measurements")
def everything_was_measured(context: Context) -> Results:
    """Every probe returned a value in time.

    A hung probe, or one without its package, is a fault of the node, a failed one an error of this
    tool.
    """
    for (name, action), error in context.errors.items():
        yield Result(ERROR, node=name, why=f"{action} failed on {error}")
    for name, facts in context.facts.items():
        failed = {
            probe: answer
            for probe, answer in facts.items()
            if "value" not in answer and probe not in COVERED_BY_OTHER_CHECKS
        }
        for probe, answer in failed.items():
            if answer.get("timeout"):
                fix = (
                    f"log in to {name} and find the cause of the hang (a file system, DNS, /proc)"
                )
                yield fail(f"{probe}: {answer['error']}", "an answer in time", fix, name)
            elif answer["error"].startswith("ModuleNotFoundError"):
                package = answer["error"].split("'")[1]
                fix = f"on {name}: pip install -c constraints.txt {package}"
                yield fail(f"{probe}: no {package}", "mmldlm's requirements", fix, name)
            else:
                yield Result(
                    ERROR, node=name, why=f"{probe} could not be measured: {answer['error']}"
                )
        if not failed:
            yield ok(f"{len(facts)} measurements", name)


@check("PY001", 1, "node", "python and folder")
def python_and_folder(context: Context) -> Results:
    """The interpreter and the working folder of this command exist on the node; launchers use both
    paths there. The interpreter finds its libraries there, also those in LD_LIBRARY_PATH of this
    shell, which `mmldlm launch` passes on.
    """
    fixes = {
        "library": (
            "make that library available on {name} at the same path as here, and name its folder"
            " in LD_LIBRARY_PATH of this shell (module load), which the node gets"
        ),
        "python": "install the same virtual environment at the same path on {name}, or share it",
        "cwd": "make the folder (the checkout) on {name} at the same path, or share it",
    }
    return _ssh(context, fixes, "the same paths as here")


@check("PY002", 1, "node", "mmldlm imports")
def package_imports(context: Context) -> Results:
    """That interpreter can import mmldlm on the node."""
    fix = "copy this checkout to {name} at the same path; its python must be 3.11 or newer"
    return _ssh(context, {"import": fix}, "mmldlm at the same path")
