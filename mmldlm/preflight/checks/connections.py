"""Connections between nodes: master address and port, every pair, MTU, name resolution, clocks."""

from __future__ import annotations

import statistics

from mmldlm.cluster.agent import AgentPool
from mmldlm.cluster.connections import SEGMENT, connect_seconds
from mmldlm.preflight.check import Result, Results, check, fail, majority, ok, skip, warn
from mmldlm.preflight.checks.network import LOOKUP_SECONDS, default_interface
from mmldlm.preflight.context import Context

# Within a data center it is far below 1 ms.
MAX_ROUND_TRIP_MS = 20.0
# An outlier is above both: the absolute limit, and this multiple of the median.
OUTLIER_ROUND_TRIP_MS, OUTLIER_FACTOR = 2.0, 10
MIN_LOST_PACKETS, MAX_LOST_SHARE = 3, 0.01


def collect_connections(context: Context, pool: AgentPool) -> None:
    """Let every node connect to every other one and to all addresses of the master."""
    first, port = next(iter(context.names), None), context.options.master_port
    master_answers = first in context.facts and first not in pool.failures
    opened = pool.call(
        "listen", lambda name: {"ports": [0, 0] + ([port] if name == first else [])}, timeout=10
    )
    try:
        targets = {
            name: (context.data_address(name), [entry["port"] for entry in answer["ports"][:2]])
            for name, answer in opened.items()
        }
        reach_port, candidates = None, []
        if master_answers and first in opened:
            reach_port = _collect_master(context, opened[first]["ports"])
            candidates = context.master["candidates"]

        def connect_args(name: str) -> dict:
            to = [
                [address, p]
                for other, (address, ports) in targets.items()
                if other != name
                for p in ports
            ]
            return {"to": to + [[address, reach_port] for address in candidates]}

        num_targets = 2 * (len(targets) - 1) + len(candidates)
        answers = pool.call("connect", connect_args, timeout=connect_seconds(num_targets))
    finally:
        pool.call("close", timeout=10)
    for name, results in answers.items():
        others = [other for other in targets if other != name]
        to_others, to_master = results[: 2 * len(others)], results[2 * len(others) :]
        for other, *pair in zip(others, to_others[::2], to_others[1::2], strict=True):
            context.connections[(name, other)] = _merge_connections(*pair)
        for address, result in zip(candidates, to_master, strict=True):
            context.master["reach"].setdefault(address, {})[name] = result


def _merge_connections(first: dict, second: dict) -> dict:
    """Merge two connections of one direction: an error of either, else the shorter round trip and
    all segments.
    """
    for result in (first, second):
        if "error" in result:
            return result
    added = {key: first[key] + second[key] for key in ("segments", "retransmitted")}
    return {"ms": min(first["ms"], second["ms"]), **added}


def _collect_master(context: Context, ports: list[dict]) -> int:
    """Fill context.master; return the port on which the master's addresses are tested."""
    first, listening = context.names[0], ports[2]
    options, network = context.options, context.value(first, "network") or {}
    resolved, addresses = context.reachable_addresses(first), network.get("addresses", [])
    guessed = (
        options.master_addr is None
        and context.launcher == "deepspeed"
        and not options.propagates_all
    )
    address: str | None
    if context.local:
        address, addresses = "127.0.0.1", []
    else:
        address = options.master_addr or next(
            iter(addresses if guessed else resolved + addresses), None
        )
    context.master = {
        "address": address,
        "guessed": guessed and not context.local,
        "port": options.master_port,
        "listening": listening,
        "candidates": list(dict.fromkeys(filter(None, [address, *resolved, *addresses]))),
        "reach": {},
    }
    return ports[0]["port"] if "error" in listening else listening["port"]


@check("NET004", 2, "node", "master port")
def master_port_is_free(context: Context) -> Result:
    """The master port can be used on the first node; the owner of one in use is reported."""
    listening = context.master.get("listening")
    if listening is None:
        return skip("the first node gave no answer" if context.nodes else "no nodes")
    name, port = context.names[0], context.master["port"]
    if "error" not in listening:
        return ok(f"{port} on {name}", name)
    fix = "use another --master_port"
    expected = f"port {port} free on {name}"
    if "holder" not in listening:
        return fail(f"{port} cannot be used: {listening['error']}", expected, fix, name)
    holder = listening["holder"]
    owner = f"pid {holder['pid']}: {holder['command']}" if holder else "a process of another user"
    return fail(f"{port} is held by {owner}", expected, f"end that process, or {fix}", name)


@check("NET005", 2, "node", "master address")
def master_is_reachable(context: Context) -> Results:
    """Every node can connect to the address that the launcher will use for the master.

    Without --master_addr DeepSpeed takes the first address of `hostname -I` on the first node, of
    any interface.
    """
    address, reach = context.master.get("address"), context.master.get("reach") or {}
    if address is None or not reach:
        yield skip("one node" if context.local else "the first node gave no answer")
        return
    nodes = [name for name in context.facts if name not in context.failures]
    best = next(
        (
            a
            for a, answers in reach.items()
            if all("ms" in answers.get(name, {}) for name in nodes)
        ),
        None,
    )
    source = " (the first address of `hostname -I`)" if context.master.get("guessed") else ""
    if best:
        fix = f"use --master_addr {best}: all nodes reach it"
    else:
        fix = "open the firewall between the nodes, or repair the routes"
    for name in nodes:
        answer = reach.get(address, {}).get(name)
        if answer is None:
            continue
        if "ms" in answer:
            yield ok(f"{address} in {answer['ms']} ms", name)
        else:
            measured = f"{address}{source}: {answer['error']}"
            yield fail(measured, f"a connection to {context.names[0]}", fix, name)


@check("NET006", 2, "pair", "every pair")
def every_pair_connects(context: Context) -> Results:
    """Every node exchanges data with ephemeral ports of every other; gloo and NCCL connect all
    pairs on such ports.

    A pair that fails in one direction is reported with it. WARN for a round trip above 20 ms or
    far above the median, and for more than one percent of lost packets.
    """
    if not context.connections:
        yield skip("one node" if len(context.nodes) < 2 else "fewer than two nodes answered")
        return
    bad = {pair: answer for pair, answer in context.connections.items() if "error" in answer}
    for (start, end), answer in bad.items():
        measured, fix = _broken(context, start, end, answer)
        measured += f", but {end} can to {start}" if (end, start) not in bad else ""
        yield fail(measured, "a connection in both directions", fix, f"{start}->{end}")
    good = {pair: answer for pair, answer in context.connections.items() if pair not in bad}
    times = [answer["ms"] for answer in good.values()]
    median = statistics.median(times or [0.0])
    num_slow = 0
    for (start, end), answer in good.items():
        if measured := _slow_or_lossy(answer, median):
            num_slow += 1
            expected = (
                f"at most {MAX_ROUND_TRIP_MS:.0f} ms, near the median, and less than"
                f" {MAX_LOST_SHARE:.0%} lost"
            )
            fix = (
                f"check the link, the route and other traffic between {start} and {end}: every"
                " step waits for them"
            )
            yield warn(f"{start} to {end}: {measured}", expected, fix, f"{start}->{end}")
    if not bad and not num_slow:
        yield ok(f"{len(good)} directions, longest round trip {max(times)} ms")


def _broken(context: Context, start: str, end: str, answer: dict) -> tuple[str, str]:
    """Return (measured, fix) of a direction without a connection, or without data on it."""
    if not answer.get("stalled"):
        low, high = (context.value(end, "network") or {}).get("ephemeral_ports", (32768, 60999))
        return (
            f"{start} cannot connect to {end} ({answer['error']})",
            f"on {end}, allow TCP ports {low}-{high} from {start} (firewall, security group)",
        )
    if answer["small_pass"]:
        return (
            f"{start} to {end}: {answer['error']}; packets of {SEGMENT} bytes do",
            f"set one MTU on {start}, {end} and every switch between them (ip link; see NET007)",
        )
    return (
        f"{start} to {end}: {answer['error']}",
        f"look for a stateful firewall or asymmetric routes (ip route get) on {start} and {end}",
    )


def _slow_or_lossy(answer: dict, median: float) -> str:
    """Return what is wrong with a direction that is slow or loses packets; "" otherwise."""
    lost, segments, faults = answer["retransmitted"], answer["segments"], []
    is_outlier = answer["ms"] > OUTLIER_ROUND_TRIP_MS and answer["ms"] > OUTLIER_FACTOR * median
    if answer["ms"] > MAX_ROUND_TRIP_MS or is_outlier:
        faults.append(f"a round trip takes {answer['ms']} ms (the median is {median:.2f})")
    if lost >= MIN_LOST_PACKETS and lost > MAX_LOST_SHARE * segments:
        faults.append(f"{lost} of {segments} packets were lost and sent again")
    return "; ".join(faults)


@check("NET007", 2, "node", "MTU")
def mtu_is_alike(context: Context) -> Results:
    """The interface to the master has the MTU of the majority: packets larger than the path's MTU
    are lost.
    """
    interfaces = {}
    for name, network in context.probe_values("network").items():
        by_name = {entry["name"]: entry for entry in network["interfaces"] if entry["up"]}
        chosen = (i for i in context.gloo_interfaces(name) if i in by_name)
        entry = by_name.get(next(chosen, default_interface(network)))
        if entry is not None:
            interfaces[name] = entry
    if len(context.nodes) < 2 or len(interfaces) < 2:
        yield skip("fewer than two nodes to compare")
        return
    usual = majority({name: entry["mtu"] for name, entry in interfaces.items()})
    for name, entry in interfaces.items():
        if entry["mtu"] == usual:
            yield ok(f"{entry['name']} {usual}", name)
        else:
            fix = (
                f"on {name}: ip link set dev {entry['name']} mtu {usual} (its switch port must"
                " support it)"
            )
            yield warn(
                f"{entry['name']} has {entry['mtu']} bytes",
                f"{usual}, as on most nodes",
                fix,
                name,
            )


@check("NET008", 2, "node", "fast name resolution")
def lookups_are_fast(context: Context) -> Results:
    """Resolving the node's own name and those of the hostfile takes under a second: every process
    group does it.
    """
    for name, lookups in context.probe_values("resolve").items():
        seconds = {other: lookup["seconds"] for other, lookup in lookups.items()}
        network = context.value(name, "network") or {}
        seconds[network.get("hostname", "its own name")] = network.get("hostname_seconds", 0.0)
        slow = {
            other: duration for other, duration in seconds.items() if duration > LOOKUP_SECONDS
        }
        if context.local and not slow:
            yield skip("one node", name)
        elif slow:
            worst = max(slow, key=slow.__getitem__)
            fix = (
                f"write the names into /etc/hosts on {name}, or repair the servers in its"
                " /etc/resolv.conf"
            )
            measured = f"{worst} took {slow[worst]:.1f} s" + (
                f", {len(slow)} names in total" if len(slow) > 1 else ""
            )
            yield warn(measured, f"less than {LOOKUP_SECONDS:.0f} s", fix, name)
        else:
            yield ok(f"under {LOOKUP_SECONDS:.0f} s", name)


@check("CLK001", 2, "node", "clocks")
def clocks_agree(context: Context) -> Results:
    """The clocks differ by less than two seconds; logs, file times, stale locks and certificates
    depend on them.
    """
    if not context.clocks:
        yield skip("no node reported its time")
        return
    offsets = sorted(offset for offset, _ in context.clocks.values())
    middle = offsets[len(offsets) // 2]
    for name, (offset, slack) in context.clocks.items():
        away = abs(offset - middle) - slack
        if away > 2:
            report = fail if away > 30 else warn
            fix = f"start a time daemon on {name} (chronyd or systemd-timesyncd)"
            yield report(f"{offset - middle:+.1f} s from the others", "within 2 s", fix, name)
        else:
            yield ok(f"{offset - middle:+.3f} s", name)
