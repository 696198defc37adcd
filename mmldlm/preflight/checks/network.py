"""Interfaces, names, master address and port, connections of every pair of nodes, clocks."""

from __future__ import annotations

import statistics

from mmldlm.preflight.check import check, fail, ok, skip, warn
from mmldlm.preflight.context import majority
from mmldlm.preflight.remote.small_packets import SEGMENT

MAX_ROUND_TRIP_MS = 20.0  # within a data center it is far below 1 ms
OUTLIER_ROUND_TRIP_MS, OUTLIER_FACTOR = 2.0, 10  # above both, relative to the median
MIN_LOST_PACKETS, MAX_LOST_SHARE = 3, 0.01
LOOKUP_SECONDS = 1.0


def _selected_interfaces(value: str, interfaces: list[dict]) -> list[dict]:
    """Return the interfaces of a value of NCCL_SOCKET_IFNAME: prefixes, ^excluded prefixes, =exact
    names.
    """
    exclude, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    patterns = [pattern for pattern in value.lstrip("^=").split(",") if pattern]

    def matches(entry: dict) -> bool:
        return any(entry["name"] == p if exact else entry["name"].startswith(p) for p in patterns)

    return [entry for entry in interfaces if matches(entry) != exclude]


@check("NET001", 1, "node", "interface")
def interface_is_usable(context):
    """The interface in NCCL_/GLOO_SOCKET_IFNAME exists on the node, is up and leads to the master.

    It is not loopback or a container bridge. The variables are those of a rank on the node. A run
    of one machine needs its loopback interface.
    """
    for name, found in context.probe_values("network").items():
        there = context.environment_on(name)
        if there is None:
            there = context.value(name, "environment") or {}
        variables = {
            key: there[key]
            for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            if there.get(key)
        }
        usual = _default_interface(found)
        problems = [
            _interface_problem(key, value, found, usual) for key, value in variables.items()
        ]
        if context.local and not any(
            entry["loopback"] and entry["up"] for entry in found["interfaces"]
        ):
            fix = "ip link set lo up (in a sandbox: let it set up the loopback interface)"
            yield fail(
                "the loopback interface is down",
                "an interface with 127.0.0.1, where ranks meet",
                fix,
                name,
            )
            continue
        for problem in filter(None, problems):
            fix = (
                f"export {problem[1]}={usual}"
                if usual
                else "repair the interface that leads to the master"
            )
            yield fail(problem[0], "an interface that is up and leads to the master", fix, name)
        if not any(problems):
            if not variables and usual is None and not context.local:
                yield fail(
                    "no interface is up with an address, except loopback and container bridges",
                    "one that leads to the other nodes", "repair the node's network", name,
                )  # fmt: skip
            else:
                yield ok(
                    ", ".join(f"{k}={v}" for k, v in variables.items())
                    or f"unset; {usual or 'lo'} leads to the master",
                    name,
                )


def _default_interface(found: dict) -> str | None:
    """Return the interface of the route to the master; on the master itself the first
    usable one.
    """
    route = (found.get("route_to_master") or {}).get("interface")
    usable = [entry["name"] for entry in found["interfaces"] if _is_usable(entry)]
    return route if route in usable else usable[0] if usable else None


def _is_usable(entry: dict) -> bool:
    return entry["up"] and entry["address"] and not entry["loopback"] and not entry["virtual"]


def _interface_problem(
    key: str, value: str, found: dict, usual: str | None
) -> tuple[str, str] | None:
    """Return (problem, variable) if a variable selects an unusable interface; None otherwise."""
    if key.startswith("GLOO") and (value.startswith(("^", "=")) or "," in value):
        return f"{key}={value}: gloo accepts one plain name", key
    matching = _selected_interfaces(
        "=" + value if key.startswith("GLOO") else value, found["interfaces"]
    )
    known = ", ".join(entry["name"] for entry in found["interfaces"])
    if not matching:
        return f"{key}={value}: this node has only {known}", key
    usable = [entry for entry in matching if _is_usable(entry)]
    if not usable:
        entry = matching[0]
        problem = (
            "is loopback" if entry["loopback"] else "is a container bridge" if entry["virtual"]
            else "is down" if not entry["up"] else "has no address"
        )  # fmt: skip
        return f"{key}={value}: {entry['name']} {problem}", key
    if usual is not None and usual not in [entry["name"] for entry in usable]:
        return f"{key}={value}, but the route to the master is {usual}", key
    return None


@check("NET002", 1, "node", "own name")
def own_name_is_not_loopback(context):
    """The node's own name has an address that the others can reach: gloo publishes exactly that
    address.
    """
    for name, found in context.probe_values("network").items():
        own, host = found["hostname_addresses"], found["hostname"]
        if context.local:
            yield skip("this machine alone: loopback is sufficient", name)
            continue
        if (context.environment_on(name) or {}).get("GLOO_SOCKET_IFNAME"):
            yield skip("GLOO_SOCKET_IFNAME is set (NET001)", name)
            continue
        usual = _default_interface(found)
        better = next((e["address"] for e in found["interfaces"] if e["name"] == usual), None)
        fix = f"on {name}, give {host} its address in /etc/hosts: '{better or 'ADDRESS'} {host}'"
        if not own:
            yield fail(
                f"{host} does not resolve on itself ({found['hostname_error']})",
                "an address",
                fix,
                name,
            )
        elif any(address.startswith("127.") for address in own):
            measured = (
                f"{host} is {', '.join(own)} on itself, so its ranks would publish a loopback"
                " address"
            )
            yield fail(measured, f"{better or 'an address that the others can reach'}", fix, name)
        elif not set(own) & {entry["address"] for entry in found["interfaces"]}:
            measured = f"{host} is {', '.join(own)}, an address of no interface on the node"
            yield fail(measured, f"{better or 'an own address'}", fix, name)
        else:
            yield ok(f"{host} is {', '.join(own)}", name)


@check("NET003", 2, "node", "names agree")
def names_resolve_alike(context):
    """Every node resolves every name in the hostfile to the same address as this machine.

    Names that only ~/.ssh/config defines on this machine are skipped: ranks get addresses, so
    nodes do not need them.
    """
    here = context.head_value("resolve") or {}
    for name, found in context.probe_values("resolve").items():
        if context.local:
            yield skip("one node", name)
            continue
        different = []
        for other, there in found.items():
            own = here.get(other, {})
            if "ssh" in own:
                continue
            if "error" in there:
                different.append(f"{other}: {there['error']}")
            elif (
                other != name
                and "addresses" in own
                and not set(there["addresses"]) & set(own["addresses"])
            ):
                different.append(
                    f"{other} is {', '.join(there['addresses'])} there,"
                    f" {', '.join(own['addresses'])} here"
                )
        if different:
            fix = f"correct /etc/hosts or DNS on {name}"
            yield fail("; ".join(different), "the same addresses as on this machine", fix, name)
        else:
            yield ok(f"{len(found)} name(s)", name)


@check("NET004", 2, "node", "master port")
def master_port_is_free(context):
    """The master port is free on the first node; otherwise its owner is reported."""
    found = context.master.get("listening")
    if found is None:
        return skip("the first node gave no answer" if context.nodes else "no nodes")
    name, port = context.names[0], context.master["port"]
    if "error" not in found:
        return ok(f"{port} on {name}", name)
    holder = found.get("holder")
    owner = f"pid {holder['pid']}: {holder['command']}" if holder else "a process of another user"
    free = context.master.get("free_port")
    fix = (
        f"end that process, or use --master_port {free}"
        if free
        else "end that process, or use another --master_port"
    )
    return fail(f"{port} is held by {owner}", f"port {port} free on {name}", fix, name)


@check("NET005", 2, "node", "master address")
def master_is_reachable(context):
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
def every_pair_connects(context):
    """Every node exchanges data with ephemeral ports of every other; gloo and NCCL connect all
    pairs on such ports.

    A pair that fails in one direction is reported with it. WARN for a round trip above 20 ms or
    far above the median, and for more than one percent of lost packets.
    """
    if not context.connections:
        return skip("one node" if len(context.nodes) < 2 else "fewer than two nodes answered")
    return _pair_results(context)


def _pair_results(context):
    """Yield a FAIL per failed direction, a WARN per slow or lossy one, or one PASS."""
    bad = {pair: answer for pair, answer in context.connections.items() if "error" in answer}
    for (start, end), answer in bad.items():
        reverse_works = (end, start) not in bad
        low, high = (context.value(end, "network") or {}).get("ephemeral_ports", (32768, 60999))
        measured = f"{start} cannot connect to {end} ({answer['error']})"
        fix = f"on {end}, allow TCP ports {low}-{high} from {start} (firewall, security group)"
        if answer.get("stalled"):
            measured = f"{start} to {end}: {answer['error']}"
            fix = (
                f"look for a stateful firewall or asymmetric routes (ip route get) on {start} and"
                f" {end}"
            )
            if answer["small_pass"]:
                measured += f"; packets of {SEGMENT} bytes do"
                fix = (
                    f"set one MTU on {start}, {end} and every switch between them (ip link; see"
                    " NET007)"
                )
        measured += f", but {end} can to {start}" if reverse_works else ""
        yield fail(measured, "a connection in both directions", fix, f"{start}->{end}")
    good = {pair: answer for pair, answer in context.connections.items() if pair not in bad}
    median = statistics.median(answer["ms"] for answer in good.values()) if good else 0.0
    slow = []
    for (start, end), answer in good.items():
        fault = _slow_or_lossy(answer, median)
        if fault is not None:
            slow.append((start, end))
            fix = (
                f"check the link, the route and other traffic between {start} and {end}: every"
                " step waits for them"
            )
            yield warn(f"{start} to {end}: {fault[0]}", fault[1], fix, f"{start}->{end}")
    if not bad and not slow:
        yield ok(
            f"{len(good)} directions, longest round trip"
            f" {max(answer['ms'] for answer in good.values())} ms"
        )


def _slow_or_lossy(answer: dict, median: float) -> tuple[str, str] | None:
    """Return (measured, expected) of a direction that is slow or loses packets; None otherwise."""
    lost, segments, faults = answer["retransmitted"], answer["segments"], []
    is_outlier = answer["ms"] > OUTLIER_ROUND_TRIP_MS and answer["ms"] > OUTLIER_FACTOR * median
    if answer["ms"] > MAX_ROUND_TRIP_MS or is_outlier:
        faults.append(f"a round trip takes {answer['ms']} ms (the median is {median:.2f})")
    if lost >= MIN_LOST_PACKETS and lost > MAX_LOST_SHARE * segments:
        faults.append(f"{lost} of {segments} packets were lost and sent again")
    if not faults:
        return None
    return (
        "; ".join(faults),
        (
            f"at most {MAX_ROUND_TRIP_MS:.0f} ms, near the median, and less than"
            f" {MAX_LOST_SHARE:.0%} lost"
        ),
    )


@check("NET007", 2, "node", "MTU")
def mtu_is_alike(context):
    """The interface to the master has the MTU of the majority: packets larger than the path's MTU
    are lost.
    """
    found = {}
    for name, network in context.probe_values("network").items():
        by_name = {entry["name"]: entry for entry in network["interfaces"] if entry["up"]}
        interface = (context.environment_on(name) or {}).get("GLOO_SOCKET_IFNAME")
        entry = by_name.get(interface if interface in by_name else _default_interface(network))
        if entry is not None:
            found[name] = entry
    if len(context.nodes) < 2 or len(found) < 2:
        yield skip("fewer than two nodes to compare")
        return
    usual = majority({name: entry["mtu"] for name, entry in found.items()})
    for name, entry in found.items():
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
def lookups_are_fast(context):
    """Resolving the node's own name and those of the hostfile takes under a second: every process
    group does it.
    """
    for name, found in context.probe_values("resolve").items():
        seconds = {other: there["seconds"] for other, there in found.items()}
        network = context.value(name, "network") or {}
        seconds[network.get("hostname", "its own name")] = network.get("hostname_seconds", 0.0)
        slow = {
            other: duration for other, duration in seconds.items() if duration > LOOKUP_SECONDS
        }
        if context.local and not slow:
            yield skip("one node", name)
        elif slow:
            worst = max(slow, key=slow.get)
            fix = (
                f"write the names into /etc/hosts on {name}, or repair the servers in its"
                " /etc/resolv.conf"
            )
            measured = f"{worst} took {slow[worst]:.1f} s" + (
                f", {len(slow)} names in total" if len(slow) > 1 else ""
            )
            yield warn(measured, f"less than {LOOKUP_SECONDS:.0f} s", fix, name)
        else:
            yield ok(f"{max(seconds.values()):.2f} s", name)


@check("CLK001", 2, "node", "clocks")
def clocks_agree(context):
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
        if away > 30:
            fix = f"start a time daemon on {name} (chronyd or systemd-timesyncd)"
            yield fail(f"{offset - middle:+.1f} s from the others", "within 2 s", fix, name)
        elif away > 2:
            yield warn(
                f"{offset - middle:+.1f} s from the others",
                "within 2 s",
                f"start a time daemon on {name}",
                name,
            )
        else:
            yield ok(f"{offset - middle:+.3f} s", name)
