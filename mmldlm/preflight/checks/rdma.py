"""RDMA ports of a node (InfiniBand and RoCE), as the kernel lists them."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

from mmldlm.preflight.check import Results, check, ok, skip, warn
from mmldlm.preflight.context import Context
from mmldlm.utils.formatting import count_noun, join_some

SYSFS = Path("/sys/class/infiniband")
ACTIVE, ETHERNET = "ACTIVE", "Ethernet"
# A GID that stands for an IPv4 address, which RoCE v2 routes by.
_IPV4_GID = "0000:0000:0000:0000:0000:ffff:"
_MOST_GIDS = 256


def rdma(args: dict) -> list[dict[str, Any]]:
    """Return the ports of all devices: name ("mlx5_0/1"), state, rate, layer, and whether one of
    its GIDs stands for an IPv4 address.
    """
    return [
        {
            "name": f"{port.parent.parent.name}/{port.name}",
            "state": _read(port / "state").rpartition(": ")[2],  # "4: ACTIVE"
            "rate": _read(port / "rate"),
            "layer": _read(port / "link_layer"),
            "has_ipv4": any(
                _read(gid).startswith(_IPV4_GID)
                for gid in sorted((port / "gids").glob("*"))[:_MOST_GIDS]
            ),
        }
        for port in sorted(SYSFS.glob("*/ports/*"))
    ]


def _read(path: Path) -> str:
    # An entry of a table that is not set cannot be read.
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


@check("RDMA001", 2, "node", "RDMA ports")
def rdma_ports(context: Context) -> Results:
    """As many RDMA ports are active, at the same rates, as on most nodes, and RoCE ports have the
    GID of an IPv4 address. Otherwise NCCL uses slower ports or TCP on all nodes. Only with GPUs.
    """
    ports = context.probe_values("rdma")
    if not context.has_gpus() or not any(ports.values()):
        yield skip("no GPUs, or no RDMA devices")
        return
    active = {
        name: [port for port in found if port["state"] == ACTIVE] for name, found in ports.items()
    }
    rates = {name: _rates(found) for name, found in active.items()}
    ((usual, _),) = Counter(rates.values()).most_common(1)
    for name, found in active.items():
        others = [f"{port['name']} {port['state']}" for port in ports[name] if port not in found]
        without = [
            port["name"] for port in found if port["layer"] == ETHERNET and not port["has_ipv4"]
        ]
        if rates[name] != usual or not found:
            measured = f"{rates[name]}{f'; {join_some(others)}' if others else ''}"
            expected = f"{usual}, as on most nodes" if usual != rates[name] else "active ports"
            fix = "look at cables and switch (ibstat, ip link), or exclude the node"
            yield warn(measured, expected, fix, name)
        elif without:
            fix = "give its interface an IPv4 address, or set NCCL_IB_GID_INDEX"
            yield warn(
                f"no GID of an IPv4 address: {join_some(without)}", "one per RoCE port", fix, name
            )
        else:
            yield ok(rates[name], name)


def _rates(ports: list[dict[str, Any]]) -> str:
    """Describe active ports by their rates: "8 active ports: 400 Gb/sec (4X NDR)"."""
    rates = sorted({port["rate"] for port in ports})
    text = count_noun(len(ports), "active port")
    return f"{text}: {', '.join(rates)}" if rates else text
