"""Interfaces, addresses, names and routes of a node (Linux; IPv4, the default of gloo and NCCL
sockets).
"""

from __future__ import annotations

import fcntl
import socket
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mmldlm.utils.formatting import describe_os_error

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK, _SIOCGIFMTU = 0x8913, 0x8915, 0x891B, 0x8921
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "tunl", "kube")


def network(args: dict) -> dict:
    """Return interfaces, addresses of the own name, route to the master, ephemeral ports.

    args["master"]: address of the first node, or None.
    """
    name = socket.gethostname()
    own = _look_up(name)
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()
    found = interfaces()
    return {
        "interfaces": found,
        "hostname": name,
        "hostname_addresses": own.get("addresses", []),
        "hostname_error": own.get("error"),
        "hostname_seconds": own["seconds"],
        # As `hostname -I` prints them; DeepSpeed takes the first as the master's address.
        "addresses": [
            e["address"] for e in found if e["address"] and e["switched_on"] and not e["loopback"]
        ],
        "route_to_master": route_to(args["master"], found) if args.get("master") else None,
        "ephemeral_ports": [int(low), int(high)],
    }


def interfaces() -> list[dict]:
    """Return every interface in the kernel's order; `up` means switched on and with a carrier."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in sorted(socket.if_nameindex()):
            # Not from /sys, which may show the host's interfaces in a container.
            answer = fcntl.ioctl(
                probe.fileno(), _SIOCGIFFLAGS, struct.pack("256s", name.encode()[:15])
            )
            flags = struct.unpack("H", answer[16:18])[0]
            answer = fcntl.ioctl(
                probe.fileno(), _SIOCGIFMTU, struct.pack("256s", name.encode()[:15])
            )
            mtu = struct.unpack("i", answer[16:20])[0]
            found.append(
                {
                    "name": name,
                    "address": _get_address(probe, name, _SIOCGIFADDR),
                    "netmask": _get_address(probe, name, _SIOCGIFNETMASK),
                    "switched_on": bool(flags & _IFF_UP),
                    "up": bool(flags & _IFF_UP and flags & _IFF_RUNNING),
                    "loopback": bool(flags & _IFF_LOOPBACK),
                    "virtual": name.startswith(VIRTUAL),
                    "mtu": mtu,
                }
            )
    return found


def _get_address(probe: socket.socket, name: str, request: int) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def route_to(address: str, known: list[dict]) -> dict:
    """Return source address and interface of the route to an address, without sending a packet."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source = probe.getsockname()[0]
    except OSError as error:
        return {"error": str(error)}
    names = [entry["name"] for entry in known if entry["address"] == source]
    return {"source": source, "interface": names[0] if names else None}


def resolve(args: dict) -> dict:
    """Resolve all args["names"] in parallel on this node.

    Returns:
        name -> {"addresses": IPv4 addresses, "seconds"} or {"error", "seconds"}. A name that only
        ssh's configuration defines has "ssh" (the real host) and the addresses of that host, if
        any.
    """

    def one(name: str) -> dict:
        found = _look_up(name)
        if "error" in found and (host := _ssh_host(name)) is not None:
            return {
                "addresses": _look_up(host).get("addresses", []),
                "seconds": found["seconds"],
                "ssh": host,
            }
        return found

    with ThreadPoolExecutor(32) as executor:
        return dict(zip(args["names"], executor.map(one, args["names"]), strict=True))


def _look_up(name: str) -> dict:
    started = time.monotonic()
    try:
        addresses = sorted(
            {entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET)}
        )
        return {"addresses": addresses, "seconds": round(time.monotonic() - started, 2)}
    except OSError as error:
        return {"error": describe_os_error(error), "seconds": round(time.monotonic() - started, 2)}


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
