"""Interfaces, names, the master's address and port, and every pair of nodes."""

from __future__ import annotations

import statistics

from mmldlm.preflight.check import check, fail, ok, skip, warn
from mmldlm.preflight.context import majority
from mmldlm.preflight.remote.small_packets import SEGMENT

ROUND_TRIP_MS, ROUND_TRIP_NOTED_MS, FAR_ABOVE = 20.0, 2.0, 10  # within a data center it is far below 1 ms
LOST_AT_LEAST, LOST_SHARE = 3, 0.01
LOOKUP_SECONDS = 1.0


def _chosen(name: str, interfaces: list[dict]) -> list[dict]:
    """Interfaces that a value of NCCL_SOCKET_IFNAME takes: prefixes, ^prefixes left out, =exact names."""
    exclude, exact = name.startswith("^"), name.lstrip("^").startswith("=")
    words = [word for word in name.lstrip("^=").split(",") if word]

    def hit(entry: dict) -> bool:
        return any(entry["name"] == w if exact else entry["name"].startswith(w) for w in words)

    return [entry for entry in interfaces if hit(entry) != exclude]


@check("NET001", 1, "node", "interface")
def interface_is_usable(context):
    """What NCCL_/GLOO_SOCKET_IFNAME names exists on the node, is up, is no loopback or container bridge, and leads to
    the master. Judged with the variables as they arrive on the node."""
    for name, found in context.answered("network").items():
        there = context.environment_on(name)
        if there is None:
            there = context.value(name, "environment") or {}
        names = {key: there[key] for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if there.get(key)}
        usual = _default_interface(found)
        problems = [_interface_problem(key, value, found, usual) for key, value in names.items()]
        for problem in filter(None, problems):
            fix = f"export {problem[1]}={usual}" if usual else "mend the interface that leads to the master"
            yield fail(problem[0], "an interface that is up and leads to the master", fix, name)
        if not any(problems):
            if not names and usual is None and not context.local:
                yield fail(
                    "no interface that is up, with an address, besides loopback and container bridges",
                    "one that leads to the other nodes", "mend the node's network", name,
                )  # fmt: skip
            else:
                yield ok(
                    ", ".join(f"{k}={v}" for k, v in names.items()) or f"unset; {usual or 'lo'} leads to the master",
                    name,
                )


def _default_interface(found: dict) -> str | None:
    """Interface on the way to the master; the first sound one on the master itself."""
    way = (found.get("route_to_master") or {}).get("interface")
    sound = [
        e["name"] for e in found["interfaces"] if e["up"] and e["address"] and not e["loopback"] and not e["virtual"]
    ]
    return way if way in sound else sound[0] if sound else None


def _interface_problem(key: str, value: str, found: dict, usual: str | None) -> tuple[str, str] | None:
    if key.startswith("GLOO") and (value.startswith(("^", "=")) or "," in value):
        return f"{key}={value}: gloo takes one plain name", key
    matching = _chosen("=" + value if key.startswith("GLOO") else value, found["interfaces"])
    known = ", ".join(entry["name"] for entry in found["interfaces"])
    if not matching:
        return f"{key}={value}: this node has only {known}", key
    usable = [e for e in matching if e["up"] and e["address"] and not e["loopback"] and not e["virtual"]]
    if not usable:
        entry = matching[0]
        what = (
            "is loopback" if entry["loopback"] else "is a container bridge" if entry["virtual"]
            else "is down" if not entry["up"] else "has no address"
        )  # fmt: skip
        return f"{key}={value}: {entry['name']} {what}", key
    if usual is not None and usual not in [entry["name"] for entry in usable]:
        return f"{key}={value}, but the way to the master is {usual}", key
    return None


@check("NET002", 1, "node", "own name")
def own_name_is_not_loopback(context):
    """The node's own name has an address that others can reach: gloo tells its peers exactly that address."""
    for name, found in context.answered("network").items():
        own, host = found["hostname_addresses"], found["hostname"]
        if context.local:
            yield skip("this machine alone: loopback will do", name)
            continue
        if (context.environment_on(name) or {}).get("GLOO_SOCKET_IFNAME"):
            yield skip("GLOO_SOCKET_IFNAME decides (NET001)", name)
            continue
        usual = _default_interface(found)
        better = next((e["address"] for e in found["interfaces"] if e["name"] == usual), None)
        fix = f"on {name}, give {host} its address in /etc/hosts: '{better or 'ADDRESS'} {host}'"
        if not own:
            yield fail(f"{host} does not resolve on itself ({found['hostname_error']})", "an address", fix, name)
        elif any(address.startswith("127.") for address in own):
            measured = f"{host} is {', '.join(own)} on itself, so its ranks would tell the others to call loopback"
            yield fail(measured, f"{better or 'an address the others reach'}", fix, name)
        elif not set(own) & {entry["address"] for entry in found["interfaces"]}:
            yield fail(
                f"{host} is {', '.join(own)}, which no interface here has", f"{better or 'an own address'}", fix, name
            )
        else:
            yield ok(f"{host} is {', '.join(own)}", name)


@check("NET003", 2, "node", "names agree")
def names_resolve_alike(context):
    """Every node gives every name in the hostfile the address that this machine gives it, and none a loopback one.

    A name that only ~/.ssh/config knows here is for ssh alone: ranks are given addresses, so nodes need not know it.
    """
    here = context.head_value("resolve") or {}
    for name, found in context.answered("resolve").items():
        if context.local:
            yield skip("one node", name)
            continue
        wrong = []
        for other, there in found.items():
            own = here.get(other, {})
            if "ssh" in own:
                continue
            if "error" in there:
                wrong.append(f"{other}: {there['error']}")
            elif other != name and "addresses" in own and not set(there["addresses"]) & set(own["addresses"]):
                wrong.append(f"{other} is {', '.join(there['addresses'])} there, {', '.join(own['addresses'])} here")
        if wrong:
            fix = f"correct /etc/hosts or DNS on {name}"
            yield fail("; ".join(wrong), "the same addresses as on this machine", fix, name)
        else:
            yield ok(f"{len(found)} name(s)", name)


@check("NET004", 2, "node", "master port")
def master_port_is_free(context):
    """The master port can be had on the first node; otherwise its holder is named."""
    found = context.master.get("listening")
    if found is None:
        return skip("the first node gave no answer" if context.nodes else "no nodes")
    name, port = context.names[0], context.master["port"]
    if "error" not in found:
        return ok(f"{port} on {name}", name)
    holder = found.get("holder")
    who = f"pid {holder['pid']}: {holder['command']}" if holder else "a process of another user"
    free = context.master.get("free_port")
    fix = f"end that process, or use --master_port {free}" if free else "end that process, or use another --master_port"
    return fail(f"{port} is held by {who}", f"port {port} free on {name}", fix, name)


@check("NET005", 2, "node", "master address")
def master_is_reachable(context):
    """Every node connects to the address that the launcher will use for the master.

    Without --master_addr DeepSpeed takes the first word of `hostname -I` on the first node, whatever interface that is.
    """
    address, reach = context.master.get("address"), context.master.get("reach") or {}
    if address is None or not reach:
        yield skip("one node" if context.local else "the first node gave no answer")
        return
    every = [name for name in context.facts if name not in context.failures]
    best = next((a for a, seen in reach.items() if all("ms" in seen.get(name, {}) for name in every)), None)
    why = " (the first word of `hostname -I` there)" if context.master.get("guessed") else ""
    fix = (
        f"use --master_addr {best}: all nodes reach it"
        if best
        else "open the firewall between the nodes, or mend the routes"
    )
    for name in every:
        answer = reach.get(address, {}).get(name)
        if answer is None:
            continue
        if "ms" in answer:
            yield ok(f"{address} in {answer['ms']} ms", name)
        else:
            measured = f"{address}{why}: {answer['error']}"
            yield fail(measured, f"a connection to {context.names[0]}", fix, name)


@check("NET006", 2, "pair", "every pair")
def every_pair_connects(context):
    """Every node exchanges data with ephemeral ports of every other: gloo and NCCL connect all to all, on such ports.

    A pair that works one way only is named with its direction. A round trip far above the median and lost packets warn.
    """
    if not context.matrix:
        return skip("one node" if len(context.nodes) < 2 else "fewer than two nodes answered")
    return _pair_results(context)


def _pair_results(context):
    bad = {pair: answer for pair, answer in context.matrix.items() if "error" in answer}
    for (start, end), answer in bad.items():
        other_way = (end, start) not in bad
        low, high = (context.value(end, "network") or {}).get("ephemeral_ports", (32768, 60999))
        measured = f"{start} cannot connect to {end} ({answer['error']})"
        fix = f"on {end}, let in TCP ports {low}-{high} from {start} (firewall, security group)"
        if answer.get("stalled"):
            measured = f"{start} to {end}: {answer['error']}"
            fix = f"look for a stateful firewall or routes that differ by direction (ip route get) on {start} and {end}"
            if answer["small_pass"]:
                measured += f"; packets of {SEGMENT} bytes do"
                fix = f"give {start}, {end} and every switch between them one MTU (ip link; see NET007)"
        measured += f", but {end} can to {start}" if other_way else ""
        yield fail(measured, "a connection both ways", fix, f"{start}->{end}")
    good = {pair: answer for pair, answer in context.matrix.items() if pair not in bad}
    middle = statistics.median(answer["ms"] for answer in good.values()) if good else 0.0
    slow = []
    for (start, end), answer in good.items():
        fault = _way_fault(answer, middle)
        if fault is not None:
            slow.append((start, end))
            fix = f"look at the link, the route and other traffic between {start} and {end}: every step waits for it"
            yield warn(f"{start} to {end}: {fault[0]}", fault[1], fix, f"{start}->{end}")
    if not bad and not slow:
        yield ok(f"{len(good)} directions, longest round trip {max(answer['ms'] for answer in good.values())} ms")


def _way_fault(answer: dict, median: float) -> tuple[str, str] | None:
    """(measured, expected) of a way that is slow or loses packets."""
    lost, segments, faults = answer["retransmitted"], answer["segments"], []
    if answer["ms"] > ROUND_TRIP_MS or (answer["ms"] > ROUND_TRIP_NOTED_MS and answer["ms"] > FAR_ABOVE * median):
        faults.append(f"a round trip takes {answer['ms']} ms (the median is {median:.2f})")
    if lost >= LOST_AT_LEAST and lost > LOST_SHARE * segments:
        faults.append(f"{lost} of {segments} packets were lost and sent again")
    if not faults:
        return None
    return "; ".join(faults), f"at most {ROUND_TRIP_MS:.0f} ms, near the median, and less than {LOST_SHARE:.0%} lost"


@check("NET007", 2, "node", "MTU")
def mtu_is_alike(context):
    """The interface on the way to the master has the MTU of the majority: a larger one than the way's loses packets."""
    found = {}
    for name, network in context.answered("network").items():
        by_name = {entry["name"]: entry for entry in network["interfaces"] if entry["up"]}
        wanted = (context.environment_on(name) or {}).get("GLOO_SOCKET_IFNAME")
        entry = by_name.get(wanted if wanted in by_name else _default_interface(network))
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
            fix = f"on {name}: ip link set dev {entry['name']} mtu {usual} (its switch port must take as much)"
            yield warn(f"{entry['name']} has {entry['mtu']} bytes", f"{usual}, as most nodes", fix, name)


@check("NET008", 2, "node", "names resolve at once")
def lookups_are_quick(context):
    """Looking up a node's own name and those of the hostfile takes less than a second: every process group does it."""
    for name, found in context.answered("resolve").items():
        seconds = {other: there["seconds"] for other, there in found.items()}
        network = context.value(name, "network") or {}
        seconds[network.get("hostname", "its own name")] = network.get("hostname_seconds", 0.0)
        late = {other: took for other, took in seconds.items() if took > LOOKUP_SECONDS}
        if context.local and not late:
            yield skip("one node", name)
        elif late:
            worst = max(late, key=late.get)
            fix = f"write the names into /etc/hosts on {name}, or repair the servers in its /etc/resolv.conf"
            measured = f"{worst} took {late[worst]:.1f} s" + (f", {len(late)} names in all" if len(late) > 1 else "")
            yield warn(measured, f"less than {LOOKUP_SECONDS:.0f} s", fix, name)
        else:
            yield ok(f"{max(seconds.values()):.2f} s", name)


@check("CLK001", 2, "node", "clocks")
def clocks_agree(context):
    """The clocks differ by less than two seconds (logs, file times, stale locks and certificates rest on them)."""
    if not context.clocks:
        yield skip("no node told its time")
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
                f"{offset - middle:+.1f} s from the others", "within 2 s", f"start a time daemon on {name}", name
            )
        else:
            yield ok(f"{offset - middle:+.3f} s", name)
