"""Collect facts of this machine, of every node, and of the nodes together, without evaluating
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

from mmldlm.config.load import to_yaml
from mmldlm.preflight.context import Context
from mmldlm.preflight.dynamic import launcher_probe
from mmldlm.preflight.probes import PROBES
from mmldlm.preflight.remote.small_packets import SEGMENT, login_works
from mmldlm.preflight.remote.ssh import Agent, AgentFailure, AgentPool, ssh_command
from mmldlm.preflight.remote.timeouts import run_with_timeout
from mmldlm.utils.entry_point import module_command
from mmldlm.utils.processes import read_stat

HEAD_PROBES = (
    "identity",
    "gpus",
    "memory",
    "network",
    "resolve",
    "checkpoints",
    "versions",
    "code",
)
NODE_PROBES = tuple(PROBES)
DATA_IDLE_SECONDS = 30


def start_data_probe(context: Context) -> subprocess.Popen | None:
    """Start the child process that opens the data, while the nodes are asked."""
    if context.config is None:
        return None
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml", delete=False) as file:
        file.write(to_yaml(context.config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = module_command(
        "mmldlm.preflight.dynamic.data_probe", file.name, str(context.world_size)
    )
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    child.config_file = file.name
    return child


def finish_data_probe(context: Context, child: subprocess.Popen | None) -> None:
    """Store the child's result in the context, or why it has none."""
    if child is None:
        return
    try:
        output, errors = _communicate_while_active(child)
        if child.returncode == 0:
            context.data_facts = json.loads(output.strip().splitlines()[-1])
        else:
            context.data_probe_error = (
                errors.strip().splitlines() or [f"status {child.returncode}"]
            )[-1]
    except subprocess.TimeoutExpired:
        child.kill()
        context.data_probe_error = (
            f"reading the data stalled for {DATA_IDLE_SECONDS} s: its file system may hang"
        )
    finally:
        os.unlink(child.config_file)


def _communicate_while_active(child: subprocess.Popen) -> tuple[str, str]:
    """Return the child's output.

    Raises:
        subprocess.TimeoutExpired: it used no CPU time for DATA_IDLE_SECONDS. A slow child is not a
            hung one.
    """
    last_ticks, last_change = -1, time.monotonic()
    while True:
        try:
            return child.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            stat = read_stat(child.pid)
            if stat is not None and stat.cpu_ticks != last_ticks:
                last_ticks, last_change = stat.cpu_ticks, time.monotonic()
            elif time.monotonic() - last_change > DATA_IDLE_SECONDS:
                raise


def probe_arguments(context: Context) -> dict:
    """Return the arguments of the probes."""
    config = context.config
    arguments: dict = {"names": context.names, "master": _master_hint(context)}
    if config is not None:
        arguments["save_dir"] = os.path.abspath(config.logging.save_dir)
        if config.data.roots:
            arguments["data_roots"] = [os.path.abspath(root) for root in config.data.roots]
    return arguments


def _applicable(probes, arguments: dict) -> list[str]:
    """Return the probes whose arguments are given."""
    required = {"checkpoints": "save_dir", "data": "data_roots"}
    return [probe for probe in probes if probe not in required or required[probe] in arguments]


def _master_hint(context: Context) -> str | None:
    """Return an address of the master, to which the nodes look up their route."""
    if context.options.master_addr:
        return context.options.master_addr
    if not context.nodes or context.local:
        return None
    return next(iter(context.reachable_addresses(context.names[0])), context.names[0])


def collect_head(context: Context) -> None:
    """Collect the facts of this machine.

    Call it before any thread is started, because probes fork.
    """
    arguments = probe_arguments(context)
    jobs = {}
    for name in _applicable(HEAD_PROBES, arguments):
        function, seconds = PROBES[name]
        jobs[name] = (lambda function=function: function(arguments), seconds)
    context.head = run_with_timeout(jobs)


def create_pool(context: Context) -> AgentPool:
    """Return agents for all nodes, not started yet."""
    options = context.options
    return AgentPool(
        [
            Agent(name, context.local, options.ssh_port, options.ssh_option)
            for name in context.names
        ]
    )


def collect_nodes(context: Context, pool: AgentPool) -> None:
    """Level 1: collect the facts of every node, all at the same time."""
    pool.start()
    _detect_lost_packets(context, pool)
    arguments = probe_arguments(context)
    request = {"probes": _applicable(NODE_PROBES, arguments), **arguments}
    longest = max(PROBES[name][1] for name in request["probes"])
    context.facts = pool.call("collect_facts", request, timeout=longest + 5)
    _record_failures(context, pool)


def _detect_lost_packets(context: Context, pool: AgentPool) -> None:
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


def _record_failures(context: Context, pool: AgentPool) -> None:
    context.failures.update(pool.failures)
    context.errors.update(pool.errors)


def collect_cluster(context: Context, pool: AgentPool) -> None:
    """Level 2: collect clocks, master address and port, all connections, the shared folder,
    launcher environments.
    """
    context.clocks = pool.clocks()
    _collect_connections(context, pool)
    # The launcher waits for the interpreters on the nodes; meanwhile the shared folder is tested.
    probe = launcher_probe.start_probe(context)
    try:
        if context.config is not None and len(context.nodes) > 1:
            _collect_shared_folder(context, pool)
    finally:
        if probe is not None:
            probe.finish()
    _record_failures(context, pool)


def _collect_connections(context: Context, pool: AgentPool) -> None:
    """Let every node connect to every other one and to all addresses of the master."""
    first, port = (context.names or [None])[0], context.options.master_port
    master_answers = first in context.facts and first not in pool.failures
    opened = pool.call(
        "listen", lambda name: {"ports": [0, 0] + ([port] if name == first else [])}, timeout=10
    )
    try:
        targets = {
            name: (data_address(context, name), [entry["port"] for entry in answer["ports"][:2]])
            for name, answer in opened.items()
        }
        reach_port, candidates = None, []
        if master_answers and first in opened:
            reach_port = _collect_master(context, pool, opened[first]["ports"])
            candidates = context.master["candidates"]

        def connect_args(name: str) -> dict:
            to = [
                [address, p]
                for other, (address, ports) in targets.items()
                if other != name
                for p in ports
            ]
            return {"to": to + [[address, reach_port] for address in candidates]}

        answers = pool.call("connect", connect_args, timeout=60)
    finally:
        pool.call("close", timeout=10)
    for name, results in answers.items():
        others = [other for other in targets if other != name]
        for index, other in enumerate(others):
            context.connections[(name, other)] = _merge_connections(
                *results[2 * index : 2 * index + 2]
            )
        for address, result in zip(candidates, results[2 * len(others) :], strict=True):
            context.master["reach"].setdefault(address, {})[name] = result


def _merge_connections(first: dict, second: dict) -> dict:
    """Merge two connections of one direction: an error of either, else the shorter round trip and
    all segments.
    """
    for found in (first, second):
        if "error" in found:
            return found
    added = {key: first[key] + second[key] for key in ("segments", "retransmitted")}
    return {"ms": min(first["ms"], second["ms"]), **added}


def _collect_master(context: Context, pool: AgentPool, ports: list[dict]) -> int:
    """Fill context.master; return the port on which the master's addresses are tested."""
    first, listening = context.names[0], ports[2]
    options, network = context.options, context.value(first, "network") or {}
    resolved, own = context.reachable_addresses(first), network.get("addresses", [])
    guessed = (
        options.master_addr is None
        and context.launcher == "deepspeed"
        and not options.propagates_all
    )
    if context.local:
        address, own = "127.0.0.1", []
    else:
        address = options.master_addr or next(iter(own if guessed else resolved + own), None)
    context.master = {
        "address": address,
        "guessed": guessed and not context.local,
        "port": options.master_port,
        "listening": listening,
        "candidates": list(dict.fromkeys(filter(None, [address, *resolved, *own]))),
        "reach": {},
    }
    if "error" not in listening:
        return listening["port"]
    for other in (options.master_port + step for step in (1, 11, 111)):
        answer = pool.agents[first].request("listen", {"ports": [other]})["ports"][0]
        if "error" not in answer:
            context.master["free_port"] = other
            break
    return ports[0]["port"]


def data_address(context: Context, name: str) -> str:
    """Return the address that ranks on a node publish: of GLOO_SOCKET_IFNAME, else of the node's
    own name.
    """
    network = context.value(name, "network") or {}
    interfaces = network.get("interfaces", [])
    interface = (context.environment_on(name) or {}).get("GLOO_SOCKET_IFNAME")
    # NET001 reports an unusable interface; the connections are then tested over a usable one.
    by_name = {
        e["name"]: e["address"]
        for e in interfaces
        if e["address"] and e["up"] and not e["loopback"]
    }
    if interface in by_name:
        return by_name[interface]
    own = [
        a
        for a in network.get("hostname_addresses", [])
        if not a.startswith("127.") and a in by_name.values()
    ]
    if own:
        return own[0]
    return (network.get("route_to_master") or {}).get("source") or name


def _collect_shared_folder(context: Context, pool: AgentPool) -> None:
    """Test whether all nodes see a file of the first writer, and the first one a file of the last
    reader.
    """
    folders = context.probe_values("checkpoints")
    writers = [
        name
        for name, found in folders.items()
        if "write_error" not in found and name not in pool.failures
    ]
    if not writers:
        return
    first = writers[0]
    seen = _file_visible_from(pool, first, folders[first]["folder"], None)
    context.shared_folder.update(seen)
    readers = [name for (_, name), visible in seen.items() if visible and name in writers]
    if readers:
        context.shared_folder.update(
            _file_visible_from(pool, readers[-1], folders[readers[-1]]["folder"], first)
        )


def _file_visible_from(
    pool: AgentPool, writer: str, folder: str, reader: str | None
) -> dict[tuple[str, str], bool]:
    """Return (writer, reader) -> whether a new file of the writer is visible, for one reader or
    all other nodes.
    """
    text = uuid.uuid4().hex
    path = os.path.join(folder, f".mmldlm_preflight_{text}")
    agent = pool.agents[writer]
    try:
        if "value" not in agent.request("write_probe_file", {"path": path, "text": text}, 15):
            return {}
        if reader is not None:
            answers = {reader: pool.agents[reader].request("read_probe_file", {"path": path}, 15)}
        else:
            answers = pool.call("read_probe_file", {"path": path}, timeout=15)
        agent.request("remove_probe_file", {"path": path}, 15)
        return {
            (writer, name): answer.get("value") == text
            for name, answer in answers.items()
            if name != writer
        }
    except (AgentFailure, RuntimeError):
        return {}
