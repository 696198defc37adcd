"""Interfaces, addresses, names and routes of a node.

IPv4 on Linux: the default of gloo's and NCCL's sockets. An interface may have several addresses.
"""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mmldlm.preflight.check import Result, Results, check, fail, ok, skip, warn
from mmldlm.preflight.context import Context
from mmldlm.utils.formatting import describe_os_error, join_some

# A lookup that takes longer is slow.
LOOKUP_SECONDS = 1.0
# Of a name without an IPv4 address, in DNS and in /etc/hosts.
_NO_IPV4 = (socket.EAI_NODATA, socket.EAI_ADDRFAMILY)
VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "tunl", "kube")
# Without NCCL_SOCKET_IFNAME, NCCL (ncclFindInterfaces) takes the first interface whose name begins
# with the one, else the first whose name begins with none of the others.
_NCCL_FIRST, _NCCL_LAST = "ib", ("docker", "lo", "virbr")


def network(args: dict) -> dict:
    """Return interfaces, addresses of the own name, route to the master, ephemeral ports.

    args["master"]: address of the first node, or None.
    """
    name = socket.gethostname()
    lookup = _look_up(name)
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()
    entries = interfaces()
    return {
        "interfaces": entries,
        "hostname": name,
        "hostname_addresses": lookup.get("addresses", []),
        "hostname_error": lookup.get("error"),
        "hostname_seconds": lookup["seconds"],
        # As `hostname -I` prints them; DeepSpeed takes the first as the master's address.
        "addresses": [
            address
            for e in entries
            if e["switched_on"] and not e["loopback"]
            for address in e["addresses"]
        ],
        "route_to_master": route_to(args["master"], entries) if args.get("master") else None,
        "ephemeral_ports": [int(low), int(high)],
    }


def interfaces() -> list[dict]:
    """Return every interface in the kernel's order, with its IPv4 addresses (gloo and NCCL publish
    the first) and their networks; `up` means switched on and with a carrier.
    """
    import psutil

    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    entries = []
    for _, name in sorted(socket.if_nameindex()):
        flags = states[name].flags.split(",") if name in states else []
        known = addresses.get(name, ())
        ipv4 = [
            ipaddress.ip_interface(f"{entry.address}/{entry.netmask or 32}")
            for entry in known
            if entry.family == socket.AF_INET
        ]
        entries.append(
            {
                "name": name,
                "addresses": [str(interface.ip) for interface in ipv4],
                "networks": [str(interface.network) for interface in ipv4],
                "ipv6": any(entry.family == socket.AF_INET6 for entry in known),
                "switched_on": "up" in flags,
                "up": "up" in flags and "running" in flags,
                "loopback": "loopback" in flags,
                "virtual": name.startswith(VIRTUAL),
                "mtu": states[name].mtu if name in states else None,
            }
        )
    return entries


def route_to(address: str, interfaces: list[dict]) -> dict:
    """Return source address and interface of the route to an address, without sending a packet."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source = probe.getsockname()[0]
    except OSError as error:
        return {"error": str(error)}
    names = [entry["name"] for entry in interfaces if source in entry["addresses"]]
    return {"source": source, "interface": names[0] if names else None}


def resolve(args: dict) -> dict:
    """Resolve all args["names"] in parallel on this node.

    Lookups that took no time and gave the addresses of args["known"] (name -> those that the head
    found) are left out: of a large job almost all, and each node has one for every other.

    Returns:
        name -> {"addresses": IPv4 addresses, "seconds"} or {"error", "seconds"}. A name that only
        ssh's configuration defines has "ssh" (the real host) and the addresses of that host, if
        any.
    """
    known = args.get("known", {})

    def one(name: str) -> dict:
        lookup = _look_up(name)
        if "error" in lookup and (host := _ssh_host(name)) is not None:
            return {
                "addresses": _look_up(host).get("addresses", []),
                "seconds": lookup["seconds"],
                "ssh": host,
            }
        return lookup

    with ThreadPoolExecutor(32) as executor:
        lookups = dict(zip(args["names"], executor.map(one, args["names"]), strict=True))
    return {
        name: lookup
        for name, lookup in lookups.items()
        if name not in known
        or lookup.get("addresses") != known[name]
        or lookup["seconds"] > LOOKUP_SECONDS
    }


def _look_up(name: str) -> dict:
    started = time.monotonic()
    try:
        addresses = sorted(
            {entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET)}
        )
        return {"addresses": addresses, "seconds": round(time.monotonic() - started, 2)}
    except OSError as error:
        missing = "no IPv4 address, over which ranks connect"
        reason = missing if error.errno in _NO_IPV4 else describe_os_error(error)
        return {"error": reason, "seconds": round(time.monotonic() - started, 2)}


def _ssh_host(name: str) -> str | None:
    """Return the real host of a name in ssh's configuration (HostName, ProxyJump); None if it is
    not configured.
    """
    try:
        done = subprocess.run(
            ["ssh", "-G", name], capture_output=True, text=True, errors="replace", timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    settings = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    is_proxied = any(settings.get(key, "none") != "none" for key in ("proxyjump", "proxycommand"))
    host = settings.get("hostname", name)
    return host if host != name or is_proxied else None


def _selected_interfaces(key: str, value: str, interfaces: list[dict]) -> list[dict]:
    """Return the interfaces that a variable selects: NCCL's by prefixes, ^excluded prefixes or
    =exact names; gloo's by exact names.
    """
    exclude = value.startswith("^")
    exact = key.startswith("GLOO") or value.lstrip("^").startswith("=")
    patterns = [pattern for pattern in value.lstrip("^=").split(",") if pattern]

    def matches(entry: dict) -> bool:
        return any(entry["name"] == p if exact else entry["name"].startswith(p) for p in patterns)

    return [entry for entry in interfaces if matches(entry) != exclude]


@check("NET001", 1, "node", "interface")
def interface_is_usable(context: Context) -> Results:
    """The interface in NCCL_/GLOO_SOCKET_IFNAME exists on the node and is up.

    It is not loopback (unless the run has one machine) or a container bridge. An interface that
    does not lead to the master is a warning: it is right where a cluster has a network of its own
    for data. So is the one that NCCL takes by itself, where NCCL_SOCKET_IFNAME is not set, unless
    the nodes share a subnet there. The variables are those of a rank on the node. A run of one
    machine needs its loopback interface.
    """
    all_facts = context.probe_values("network")
    choices = {name: nccl_interface(facts) for name, facts in all_facts.items()}
    share_network = _share_network(list(choices.values()))
    uses_nccl = len(context.nodes) > 1 and context.has_gpus()
    for name, facts in all_facts.items():
        on_node = _rank_environment(context, name)
        keys = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        variables = {key: on_node[key] for key in keys if on_node.get(key)}
        usual = default_interface(facts)
        if context.local and not any(
            entry["loopback"] and entry["up"] for entry in facts["interfaces"]
        ):
            fix = "ip link set lo up (in a sandbox: let it set up the loopback interface)"
            expected = "an interface with 127.0.0.1, where ranks meet"
            yield fail("the loopback interface is down", expected, fix, name)
            continue
        if usual is None and not variables and not context.local:
            yield fail(
                "no interface is up with an IPv4 address, except loopback and container bridges",
                "one that leads to the other nodes",
                "repair the node's network",
                name,
            )
            continue
        for key, value in variables.items():
            yield _judge_interface(key, value, name, facts, context.local)
        chosen = choices[name]
        nccl_chooses = (
            uses_nccl
            and "NCCL_SOCKET_IFNAME" not in variables
            and on_node.get("NCCL_SOCKET_FAMILY") != "AF_INET6"
        )
        if nccl_chooses and usual and chosen and chosen["name"] != usual:
            yield _judge_choice_of_nccl(chosen, usual, share_network, name)
        elif not variables:
            yield ok(f"unset; {usual or 'lo'} leads to the master", name)


def _rank_environment(context: Context, name: str) -> dict[str, str]:
    """Return the environment of a rank on a node; where it is unknown, that of the login."""
    on_node = context.environment_on(name)
    return (context.value(name, "environment") or {}) if on_node is None else on_node


def nccl_interface(facts: dict) -> dict | None:
    """Return the interface over which NCCL's bootstrap connects the ranks of a node without
    NCCL_SOCKET_IFNAME; None if it would fall back to a container bridge or loopback.
    """
    running = [e for e in facts["interfaces"] if e["up"] and (e["addresses"] or e["ipv6"])]
    # The kernel lists all IPv4 addresses before those of IPv6.
    running.sort(key=lambda entry: not entry["addresses"])
    first = [entry for entry in running if entry["name"].startswith(_NCCL_FIRST)]
    others = [entry for entry in running if not entry["name"].startswith(_NCCL_LAST)]
    return next(iter(first + others), None)


def _share_network(interfaces: list[dict | None]) -> bool:
    """Return whether one interface of each node lies in the same IPv4 subnet as the others.

    Bridges of containers have the same address on every node, and link-local ones lead to a
    controller of the node itself. Without IPv4 on any of them (IP over InfiniBand), nothing
    contradicts it.
    """
    entries = [entry for entry in interfaces if entry is not None]
    addresses = {entry["addresses"][0] for entry in entries if entry["addresses"]}
    networks = {entry["networks"][0] if entry["addresses"] else "" for entry in entries}
    if len(entries) < len(interfaces) or len(networks) != 1:
        return False
    network = networks.pop()
    return not network or (
        len(addresses) == len(entries) and not ipaddress.ip_network(network).is_link_local
    )


def _judge_choice_of_nccl(entry: dict, usual: str, share_network: bool, node: str) -> Result:
    """Return the result of NET001 for an interface that NCCL takes by itself and that is not the
    one that leads to the master.
    """
    where = f"{entry['name']} ({', '.join(entry['networks'][:1]) or 'IPv6 alone'})"
    measured = f"NCCL_SOCKET_IFNAME is unset: NCCL takes {where}"
    if share_network:
        return ok(f"{measured}, as all nodes do; {usual} leads to the master", node)
    return warn(
        f"{measured}; the route to the master is {usual}, and the interfaces that NCCL takes on"
        " the nodes are not in one subnet",
        "an interface that leads to the other nodes",
        f"export NCCL_SOCKET_IFNAME='={usual}', unless all nodes connect over {entry['name']}"
        " (--level 3 tries it)",
        node,
    )


def _judge_interface(key: str, value: str, node: str, facts: dict, is_local: bool) -> Result:
    """Return the result of NET001 for one variable of a node."""
    usual, expected = default_interface(facts), "an interface that leads to the other nodes"
    if problem := _interface_problem(key, value, facts, is_local):
        repair = "repair the interface that leads to the master"
        return fail(problem, expected, f"export {key}={usual}" if usual else repair, node)
    selected = _selected_interfaces(key, value, facts["interfaces"])
    if usual is None or is_local or usual in [entry["name"] for entry in selected]:
        return ok(f"{key}={value}", node)
    return warn(
        f"{key}={value}, and the route to the master is {usual}",
        expected,
        f"export {key}={usual}, unless all nodes are on that network (--level 3 connects them)",
        node,
    )


def default_interface(facts: dict) -> str | None:
    """Return the interface of the route to the master; on the master itself the first
    usable one.
    """
    route = (facts.get("route_to_master") or {}).get("interface")
    usable = [entry["name"] for entry in facts["interfaces"] if _is_usable(entry)]
    return route if route in usable else usable[0] if usable else None


def _is_usable(entry: dict, with_loopback: bool = False) -> bool:
    is_own = entry["virtual"] or (entry["loopback"] and not with_loopback)
    return bool(entry["up"] and entry["addresses"] and not is_own)


def _interface_problem(key: str, value: str, facts: dict, is_local: bool) -> str | None:
    """Return what is wrong with the interfaces that a variable selects; None if they are usable.

    NCCL takes those that it can use; gloo takes turns on all that the variable names. The ranks of
    one machine may meet on its loopback interface.
    """
    is_gloo = key.startswith("GLOO")
    if is_gloo and value.startswith(("^", "=")):
        return f"{key}={value}: gloo accepts plain names, separated by commas"
    matching = _selected_interfaces(key, value, facts["interfaces"])
    present = [entry["name"] for entry in matching]
    if not matching or (is_gloo and not set(filter(None, value.split(","))) <= set(present)):
        interfaces = ", ".join(entry["name"] for entry in facts["interfaces"])
        return f"{key}={value}: this node has only {interfaces}"
    usable = [entry["name"] for entry in matching if _is_usable(entry, is_local)]
    if not usable or (is_gloo and usable != present):
        entry = next(entry for entry in matching if entry["name"] not in usable)
        problem = (
            "is loopback" if entry["loopback"] else "is a container bridge" if entry["virtual"]
            else "is down" if not entry["up"] else "has no IPv4 address"
        )  # fmt: skip
        return f"{key}={value}: {entry['name']} {problem}"
    return None


@check("NET002", 1, "node", "own name")
def own_name_is_not_loopback(context: Context) -> Results:
    """The node's own name has an address that the others can reach: gloo publishes exactly that
    address.

    GLOO_SOCKET_IFNAME names an interface instead. On GPUs only engine.kind=fsdp uses gloo, for its
    checkpoints; whether a script of your own does is unknown, and a warning.
    """
    has_gpus = context.has_gpus()
    for name, facts in context.probe_values("network").items():
        addresses, host = facts["hostname_addresses"], facts["hostname"]
        if context.local:
            yield skip("this machine alone: loopback is sufficient", name)
            continue
        if _rank_environment(context, name).get("GLOO_SOCKET_IFNAME"):
            yield skip("GLOO_SOCKET_IFNAME is set (NET001)", name)
            continue
        usual = default_interface(facts)
        own = {e["name"]: e["addresses"] for e in facts["interfaces"]}
        better = next(iter(own.get(usual, ())), None)
        if not addresses:
            measured = f"{host} does not resolve on itself ({facts['hostname_error']})"
            expected = "an address"
        elif any(address.startswith("127.") for address in addresses):
            measured = f"{host} is {', '.join(addresses)} on itself"
            expected = better or "an address that the others can reach"
        elif not set(addresses) & set().union(*own.values()):
            measured = f"{host} is {', '.join(addresses)}, an address of no interface on the node"
            expected = better or "an own address"
        else:
            yield ok(f"{host} is {', '.join(addresses)}", name)
            continue
        if not has_gpus or (context.config and context.config.engine.kind == "fsdp"):
            report = fail
        elif context.config is not None:
            yield ok(f"{measured}; this run uses NCCL alone, which needs no name", name)
            continue
        else:
            report = warn
        fix = (
            f"export GLOO_SOCKET_IFNAME={usual or 'INTERFACE'}, or on {name}, give {host} its"
            f" address in /etc/hosts: '{better or 'ADDRESS'} {host}'"
        )
        yield report(f"{measured}: gloo would publish a loopback address", expected, fix, name)


@check("NET003", 2, "node", "names agree")
def names_resolve_alike(context: Context) -> Results:
    """Every node resolves every name in the hostfile to the same address as this machine.

    Names that only ~/.ssh/config defines on this machine are skipped: ranks get addresses, so
    nodes do not need them.
    """
    on_head = context.head_value("resolve") or {}
    for name, lookups in context.probe_values("resolve").items():
        if context.local:
            yield skip("one node", name)
            continue
        different = []
        for other, on_node in lookups.items():
            lookup_here = on_head.get(other, {})
            if "ssh" in lookup_here:
                continue
            if "error" in on_node:
                different.append(f"{other}: {on_node['error']}")
            elif (
                other != name
                and "addresses" in lookup_here
                and not set(on_node["addresses"]) & set(lookup_here["addresses"])
            ):
                different.append(
                    f"{other} is {', '.join(on_node['addresses'])} there,"
                    f" {', '.join(lookup_here['addresses'])} here"
                )
        if different:
            fix = f"correct /etc/hosts or DNS on {name}"
            yield fail(
                join_some(different, 4, "; "), "the same addresses as on this machine", fix, name
            )
        else:
            yield ok(f"{len(lookups)} name(s)", name)
