"""RDMA ports of a node (InfiniBand and RoCE), as the kernel lists them, and access to them."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import Counter
from pathlib import Path
from typing import Any

from mmldlm.preflight.check import Results, check, ok, skip, warn
from mmldlm.preflight.context import Context
from mmldlm.utils.formatting import count_noun, join_some

SYSFS = Path("/sys/class/infiniband")
# Of each device, the name of the file in DEVICES by which programs use it.
VERBS, DEVICES = Path("/sys/class/infiniband_verbs"), Path("/dev/infiniband")
LIBRARY = "libibverbs.so.1"
ACTIVE, ETHERNET = "ACTIVE", "Ethernet"
# A GID that stands for an IPv4 address, which RoCE v2 routes by.
_IPV4_GID = "0000:0000:0000:0000:0000:ffff:"
_MOST_GIDS = 256
CLOSED_FIX = (
    "install libibverbs (rdma-core) and give this user /dev/infiniband (docker run --device"
    " /dev/infiniband --ulimit memlock=-1), or set NCCL_IB_DISABLE=1 if sockets are meant"
)


def rdma(args: dict) -> list[dict[str, Any]]:
    """Return the ports of all devices: name ("mlx5_0/1"), state, rate, layer, whether one of its
    GIDs stands for an IPv4 address, and, of an active port, why NCCL cannot open it ("closed";
    None if it can).
    """
    ports: list[dict[str, Any]] = [
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
    for port in ports:
        device = port["name"].partition("/")[0]
        port["closed"] = _why_closed(device) if port["state"] == ACTIVE else None
    return ports


def _why_closed(device: str) -> str | None:
    """Return why a program cannot open a device; None if it can."""
    files = [
        DEVICES / entry.parent.name for entry in VERBS.glob("*/ibdev") if _read(entry) == device
    ]
    try:
        ctypes.CDLL(LIBRARY)
        for file in files:
            os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return None if files else f"no file for {device} in {DEVICES} (kernel module ib_uverbs)"


def _read(path: Path) -> str:
    # An entry of a table that is not set cannot be read.
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


@check("RDMA001", 2, "node", "RDMA ports")
def rdma_ports(context: Context) -> Results:
    """As many RDMA ports are active, at the same rates, as on most nodes, RoCE ports have the GID
    of an IPv4 address, and between several nodes, NCCL can open one. Otherwise it uses slower
    ports or TCP on all nodes. Only with GPUs.
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
        elif closed := _why_unused(context, name, found):
            yield warn(
                f"{rates[name]}, none of which NCCL can open: {closed}",
                "access to one; over sockets, NCCL is far slower",
                CLOSED_FIX,
                name,
            )
        elif without:
            fix = "give its interface an IPv4 address, or set NCCL_IB_GID_INDEX"
            yield warn(
                f"no GID of an IPv4 address: {join_some(without)}", "one per RoCE port", fix, name
            )
        else:
            yield ok(rates[name], name)


def _why_unused(context: Context, name: str, active: list[dict[str, Any]]) -> str | None:
    """Return why NCCL can open no active port of a node that needs one; None if it can."""
    is_off = (context.environment_on(name) or {}).get("NCCL_IB_DISABLE", "0") != "0"
    if len(context.nodes) < 2 or is_off or not all(port["closed"] for port in active):
        return None
    return active[0]["closed"]


def _rates(ports: list[dict[str, Any]]) -> str:
    """Describe active ports by their rates: "8 active ports: 400 Gb/sec (4X NDR)"."""
    rates = sorted({port["rate"] for port in ports})
    text = count_noun(len(ports), "active port")
    return f"{text}: {', '.join(rates)}" if rates else text
