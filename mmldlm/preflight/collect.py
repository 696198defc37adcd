"""Measure: this machine, then every node, then the nodes together. Nothing is judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mmldlm.config.load import to_yaml
from mmldlm.preflight.context import Context
from mmldlm.preflight.dynamic import launcher_probe
from mmldlm.preflight.probes import PROBES
from mmldlm.preflight.remote.small_packets import SEGMENT, login_works
from mmldlm.preflight.remote.ssh import Agent, AgentFailure, AgentPool, ssh_command
from mmldlm.preflight.remote.timeouts import run_with_timeout

HEAD_PROBES = ("identity", "gpus", "memory", "network", "resolve", "checkpoints", "versions", "code")
NODE_PROBES = tuple(PROBES)
PLAN_IDLE_SECONDS = 30


def start_plan(context: Context) -> subprocess.Popen | None:
    """Start the child that opens the data; the nodes are asked meanwhile."""
    if context.config is None:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        file.write(to_yaml(context.config))
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "mmldlm.preflight.dynamic.data_probe", file.name, str(context.world_size)]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    child.config_file = file.name
    return child


def finish_plan(context: Context, child: subprocess.Popen | None) -> None:
    """Put what the child found into the context, or why it found nothing."""
    if child is None:
        return
    try:
        output, errors = _wait_while_it_works(child)
        if child.returncode == 0:
            context.plan = json.loads(output.strip().splitlines()[-1])
        else:
            context.plan_error = (errors.strip().splitlines() or [f"status {child.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        child.kill()
        context.plan_error = f"reading the data stood still for {PLAN_IDLE_SECONDS} s: its file system may hang"
    finally:
        os.unlink(child.config_file)


def _wait_while_it_works(child: subprocess.Popen) -> tuple[str, str]:
    """The child's output. TimeoutExpired when it used no CPU time for PLAN_IDLE_SECONDS: slow is not hung."""
    used, since = -1, time.monotonic()
    while True:
        try:
            return child.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2].split()
            now = int(fields[11]) + int(fields[12])
            if now != used:
                used, since = now, time.monotonic()
            elif time.monotonic() - since > PLAN_IDLE_SECONDS:
                raise


def probe_arguments(context: Context) -> dict:
    """Arguments of the probes."""
    config = context.config
    arguments: dict = {"names": context.names, "master": _master_hint(context)}
    if config is not None:
        arguments["save_dir"] = os.path.abspath(config.logging.save_dir)
        if config.data.roots:
            arguments["data_roots"] = [os.path.abspath(root) for root in config.data.roots]
    return arguments


def _usable(probes, arguments: dict) -> list[str]:
    needs = {"checkpoints": "save_dir", "data": "data_roots"}
    return [probe for probe in probes if needs.get(probe) is None or needs[probe] in arguments]


def _master_hint(context: Context) -> str | None:
    """Address by which the nodes look for a route to the master."""
    if context.options.master_addr:
        return context.options.master_addr
    if not context.nodes or context.local:
        return None
    return next(iter(context.reachable_addresses(context.names[0])), context.names[0])


def collect_head(context: Context) -> None:
    """Facts of this machine. To be called before any thread runs: probes fork."""
    arguments = probe_arguments(context)
    jobs = {}
    for name in _usable(HEAD_PROBES, arguments):
        function, seconds = PROBES[name]
        jobs[name] = (lambda function=function: function(arguments), seconds)
    context.head = run_with_timeout(jobs)


def open_fleet(context: Context) -> AgentPool:
    """Agents for all nodes, not started yet."""
    options = context.options
    return AgentPool([Agent(name, context.local, options.ssh_port, options.ssh_option) for name in context.names])


def measure_nodes(context: Context, fleet: AgentPool) -> None:
    """Level 1: every node by itself, all at the same time."""
    fleet.start()
    _look_for_lost_packets(context, fleet)
    arguments = probe_arguments(context)
    asked = {"probes": _usable(NODE_PROBES, arguments), **arguments}
    longest = max(PROBES[name][1] for name in asked["probes"])
    context.facts = fleet.ask("facts", asked, timeout=longest + 5)
    _record_failures(context, fleet)


def _look_for_lost_packets(context: Context, fleet: AgentPool) -> None:
    """Logins that ran out of time are tried with small packets: where those work, the MTU is the cause."""
    options = context.options
    late = {name: failure for name, failure in fleet.failures.items() if "timed out" in failure.said}
    with ThreadPoolExecutor(max(len(late), 1)) as pool:
        lines = [ssh_command(name, options.ssh_port, options.ssh_option) for name in late]
        for (name, failure), works in zip(late.items(), pool.map(login_works, lines), strict=True):
            if works:
                fleet.failures[name] = AgentFailure("mtu", f"{failure.said}; with packets of {SEGMENT} bytes it works")


def _record_failures(context: Context, fleet: AgentPool) -> None:
    context.failures.update(fleet.failures)
    context.errors.update(fleet.errors)


def measure_together(context: Context, fleet: AgentPool) -> None:
    """Level 2: clocks, the master's address and port, every pair, the shared folder, what the launcher brings."""
    context.clocks = fleet.clocks()
    _measure_connections(context, fleet)
    probe = launcher_probe.start_probe(
        context
    )  # it waits for the nodes' interpreters; the folder is looked at meanwhile
    try:
        if context.config is not None and len(context.nodes) > 1:
            _measure_shared_folder(context, fleet)
    finally:
        if probe is not None:
            probe.finish()
    _record_failures(context, fleet)


def _measure_connections(context: Context, fleet: AgentPool) -> None:
    first, port = (context.names or [None])[0], context.options.master_port
    master_answers = first in context.facts and first not in fleet.failures
    opened = fleet.ask("listen", lambda name: {"ports": [0, 0] + ([port] if name == first else [])}, timeout=10)
    try:
        targets = {
            name: (data_address(context, name), [e["port"] for e in o["ports"][:2]]) for name, o in opened.items()
        }
        reach_port, candidates = None, []
        if master_answers and first in opened:
            reach_port = _note_master(context, fleet, opened[first]["ports"])
            candidates = context.master["candidates"]

        def aims(name: str) -> dict:
            to = [[address, p] for other, (address, ports) in targets.items() if other != name for p in ports]
            return {"to": to + [[address, reach_port] for address in candidates]}

        answers = fleet.ask("connect", aims, timeout=60)
    finally:
        fleet.ask("close", timeout=10)
    for name, results in answers.items():
        others = [other for other in targets if other != name]
        for index, other in enumerate(others):
            context.matrix[(name, other)] = _of_both(*results[2 * index : 2 * index + 2])
        for address, result in zip(candidates, results[2 * len(others) :], strict=True):
            context.master["reach"].setdefault(address, {})[name] = result


def _of_both(first: dict, second: dict) -> dict:
    """What two connections say of one way: an error of either; else the shorter round trip, and all segments."""
    for found in (first, second):
        if "error" in found:
            return found
    added = {key: first[key] + second[key] for key in ("segments", "retransmitted")}
    return {"ms": min(first["ms"], second["ms"]), **added}


def _note_master(context: Context, fleet: AgentPool, ports: list[dict]) -> int:
    """Fill context.master; returns the port on which its addresses are tried."""
    first, found = context.names[0], ports[2]
    options, network = context.options, context.value(first, "network") or {}
    named, own = context.reachable_addresses(first), network.get("addresses", [])
    guessed = options.master_addr is None and context.launcher == "deepspeed" and not options.carries_all
    if context.local:
        address, own = "127.0.0.1", []
    else:
        address = options.master_addr or next(iter(own if guessed else named + own), None)
    context.master = {
        "address": address,
        "guessed": guessed and not context.local,
        "port": options.master_port,
        "listening": found,
        "candidates": list(dict.fromkeys(filter(None, [address, *named, *own]))),
        "reach": {},
    }
    if "error" not in found:
        return found["port"]
    for other in (options.master_port + step for step in (1, 11, 111)):
        answer = fleet.agents[first].request("listen", {"ports": [other]})["ports"][0]
        if "error" not in answer:
            context.master["free_port"] = other
            break
    return ports[0]["port"]


def data_address(context: Context, name: str) -> str:
    """The address that ranks on a node will tell their peers: of GLOO_SOCKET_IFNAME, else of the node's own name."""
    network = context.value(name, "network") or {}
    interfaces = network.get("interfaces", [])
    wanted = (context.environment_on(name) or {}).get("GLOO_SOCKET_IFNAME")
    # An interface that cannot be used is NET001's to tell; the pairs are then tried over the one that can.
    by_name = {e["name"]: e["address"] for e in interfaces if e["address"] and e["up"] and not e["loopback"]}
    if wanted in by_name:
        return by_name[wanted]
    own = [a for a in network.get("hostname_addresses", []) if not a.startswith("127.") and a in by_name.values()]
    if own:
        return own[0]
    return (network.get("route_to_master") or {}).get("source") or name


def _measure_shared_folder(context: Context, fleet: AgentPool) -> None:
    """What the first sound node writes must be seen by all others; what the last that saw it writes, by the first."""
    folders = context.answered("checkpoints")
    writers = [name for name, found in folders.items() if "write_error" not in found and name not in fleet.failures]
    if not writers:
        return
    first = writers[0]
    seen = _file_visible_from(fleet, first, folders[first]["folder"], None)
    context.shared.update(seen)
    back = [name for (_, name), saw in seen.items() if saw and name in writers]
    if back:
        context.shared.update(_file_visible_from(fleet, back[-1], folders[back[-1]]["folder"], first))


def _file_visible_from(fleet: AgentPool, writer: str, folder: str, reader: str | None) -> dict[tuple[str, str], bool]:
    """(writer, reader) -> whether a file that the writer makes is seen; by one reader, or by all others."""
    text = uuid.uuid4().hex
    path = os.path.join(folder, f".mmldlm_preflight_{text}")
    agent = fleet.agents[writer]
    try:
        if "value" not in agent.request("token", {"path": path, "text": text}, 15):
            return {}
        if reader is not None:
            answers = {reader: fleet.agents[reader].request("token", {"path": path}, 15)}
        else:
            answers = fleet.ask("token", {"path": path}, timeout=15)
        agent.request("remove", {"path": path}, 15)
        return {(writer, name): answer.get("value") == text for name, answer in answers.items() if name != writer}
    except (AgentFailure, RuntimeError):
        return {}
