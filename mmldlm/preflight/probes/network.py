"""Interfaces, addresses, names and routes of a node (Linux; IPv4, as gloo and NCCL's sockets use it by default)."""

from __future__ import annotations

import fcntl
import socket
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK, _SIOCGIFMTU = 0x8913, 0x8915, 0x891B, 0x8921
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "tunl", "kube")


def network(args: dict) -> dict:
    """Interfaces, what the own name means, the route to the master, the ephemeral ports.

    args["master"]: address of the first node, or None.
    """
    name = socket.gethostname()
    own = _look_up(name)
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    found = interfaces()
    return {
        "interfaces": found,
        "hostname": name,
        "hostname_addresses": own.get("addresses", []),
        "hostname_error": own.get("error"),
        "hostname_seconds": own["seconds"],
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
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFMTU, struct.pack("256s", name.encode()[:15]))
            mtu = struct.unpack("i", answer[16:20])[0]
            found.append(
                {
                    "name": name,
                    "address": _ask(probe, name, _SIOCGIFADDR),
                    "netmask": _ask(probe, name, _SIOCGIFNETMASK),
                    "switched_on": bool(flags & _IFF_UP),
                    "up": bool(flags & _IFF_UP and flags & _IFF_RUNNING),
                    "loopback": bool(flags & _IFF_LOOPBACK),
                    "virtual": name.startswith(VIRTUAL),
                    "mtu": mtu,
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
    """Name -> what this node makes of it, for all of args["names"] at the same time.

    {"addresses": [IPv4 ...], "seconds": of the look-up}, or {"error", "seconds"}. A name that only ssh's configuration
    knows has "ssh": the host it stands for, and that host's addresses, if it has any here.
    """

    def one(name: str) -> dict:
        found = _look_up(name)
        if "error" in found and (host := _ssh_host(name)) is not None:
            return {"addresses": _look_up(host).get("addresses", []), "seconds": found["seconds"], "ssh": host}
        return found

    with ThreadPoolExecutor(32) as pool:
        return dict(zip(args["names"], pool.map(one, args["names"]), strict=True))


def _look_up(name: str) -> dict:
    started = time.monotonic()
    try:
        addresses = sorted({entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET)})
        return {"addresses": addresses, "seconds": round(time.monotonic() - started, 2)}
    except OSError as error:
        reason = error.strerror or str(error)
        return {"error": reason, "seconds": round(time.monotonic() - started, 2)}


def _ssh_host(name: str) -> str | None:
    """The host that ssh's configuration puts in a name's place, or reaches through another; None: it does neither."""
    try:
        done = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, errors="replace", timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    reached_otherwise = any(said.get(key, "none") != "none" for key in ("proxyjump", "proxycommand"))
    host = said.get("hostname", name)
    return host if host != name or reached_otherwise else None
