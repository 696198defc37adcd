"""Interfaces, addresses, names and routes of a node (Linux; IPv4, as gloo and NCCL's sockets use it by default)."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "tunl", "kube")


def network(args: dict) -> dict:
    """Interfaces, what the own name means, the route to the master, the ephemeral ports.

    args["master"]: address of the first node, or None.
    """
    name = socket.gethostname()
    try:
        own = sorted({entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET)})
        own_error = None
    except OSError as error:
        own, own_error = [], str(error)
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    found = interfaces()
    return {
        "interfaces": found,
        "hostname": name,
        "hostname_addresses": own,
        "hostname_error": own_error,
        # What `hostname -I` prints, whose first word DeepSpeed takes for the master's address.
        "addresses": [e["address"] for e in found if e["address"] and e["switched_on"] and not e["loopback"]],
        "route_to_master": route_to(args["master"], found) if args.get("master") else None,
        "ephemeral_ports": [int(low), int(high)],
    }


def interfaces() -> list[dict]:
    """Every interface in the kernel's order; `up` means switched on and with a carrier."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in sorted(socket.if_nameindex()):
            # Not from /sys: in a container that may show the host's interfaces.
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, struct.pack("256s", name.encode()[:15]))
            flags = struct.unpack("H", answer[16:18])[0]
            found.append(
                {
                    "name": name,
                    "address": _ask(probe, name, _SIOCGIFADDR),
                    "netmask": _ask(probe, name, _SIOCGIFNETMASK),
                    "switched_on": bool(flags & _IFF_UP),
                    "up": bool(flags & _IFF_UP and flags & _IFF_RUNNING),
                    "loopback": bool(flags & _IFF_LOOPBACK),
                    "virtual": name.startswith(VIRTUAL),
                }
            )
    return found


def _ask(probe: socket.socket, name: str, request: int) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def route_to(address: str, known: list[dict]) -> dict:
    """Source address and interface with which this node would speak to an address (nothing is sent)."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source = probe.getsockname()[0]
    except OSError as error:
        return {"error": str(error)}
    names = [entry["name"] for entry in known if entry["address"] == source]
    return {"source": source, "interface": names[0] if names else None}


def resolve(args: dict) -> dict:
    """IPv4 addresses that this node gives each name of args["names"]: a list, or {"error": ...}."""
    found = {}
    for name in args["names"]:
        try:
            found[name] = sorted({entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET)})
        except OSError as error:
            found[name] = {"error": error.strerror or str(error)}
    return found
