"""Level 3 on one rank: form process groups and check every collective by value and time.

python -m mmldlm.preflight.dynamic.collective_test ROUNDS

ROUNDS is a JSON list of {"name", "rank", "world", "address", "port", "seconds", "on_cpu"}. Prints
one JSON object per round. The backend is NCCL with a GPU, gloo without one or with on_cpu.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

from mmldlm.utils.environment import int_from_env
from mmldlm.utils.formatting import first_line

BYTES = {"nccl": 256 << 20, "gloo": 4 << 20}
REPEATS = 5


def check_values(torch, rank: int, world: int, device) -> list[str]:
    """Run the collectives that training uses; return the names of those with wrong values."""
    dist, wrong = torch.distributed, []
    positions = torch.arange(1024, dtype=torch.float64, device=device)

    def compare(name: str, found, expected) -> None:
        if not torch.equal(found, expected):
            wrong.append(name)

    own = positions * (rank + 1)
    summed = own.clone()
    dist.all_reduce(summed)
    total = positions * (world * (world + 1) // 2)
    compare("all_reduce", summed, total)
    sent = own.clone()
    dist.broadcast(sent, src=world - 1)
    compare("broadcast", sent, positions * world)
    gathered = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(gathered, own)
    compare(
        "all_gather",
        torch.stack(gathered),
        torch.stack([positions * (r + 1) for r in range(world)]),
    )
    if device.type == "cuda":
        part = torch.empty(1024, dtype=torch.float64, device=device)
        dist.reduce_scatter_tensor(part, own.repeat(world))
        compare("reduce_scatter", part, total)
    return wrong


def bus_bandwidth(torch, world: int, device, size: int) -> tuple[float, float]:
    """Return (bus bandwidth of all_reduce as in nccl-tests: size / time x 2 (n - 1) / n, median
    seconds).
    """
    dist = torch.distributed
    values = torch.ones(size // 4, device=device)
    seconds = []
    for _ in range(REPEATS + 2):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)  # at most world ^ 7, within the range of fp32
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    median = sorted(seconds[2:])[REPEATS // 2]
    return size / median * 2 * (world - 1) / world, median


def compute_seconds(torch, device) -> float:
    """Return the median seconds of a matrix product: the compute speed of this rank, without the
    network.
    """
    side = 4096 if device.type == "cuda" else 384
    matrix = torch.ones(side, side, device=device)
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        for _ in range(4):
            matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[3]


def run_round(torch, entry: dict, device) -> dict:
    """Form the group, check, measure; each operation within entry["seconds"]."""
    device = torch.device("cpu") if entry["on_cpu"] else device
    backend = "nccl" if device.type == "cuda" else "gloo"
    started = time.perf_counter()
    torch.distributed.init_process_group(
        backend,
        init_method=f"tcp://{entry['address']}:{entry['port']}",
        rank=entry["rank"],
        world_size=entry["world"],
        timeout=timedelta(seconds=entry["seconds"]),
    )
    try:
        wrong = check_values(torch, entry["rank"], entry["world"], device)
        found = {
            "formed": round(time.perf_counter() - started, 3),
            "wrong": wrong,
            "backend": backend,
        }
        if entry["world"] > 1:
            found["busbw"], found["seconds"] = bus_bandwidth(
                torch, entry["world"], device, BYTES[backend]
            )
        return found
    finally:
        torch.distributed.destroy_process_group()


def main() -> int:
    """Run the rounds of sys.argv and print their results; return the exit code."""
    # A round that times out must raise, so that the next one runs: by default NCCL's watchdog ends
    # the process.
    os.environ.update(
        TORCH_NCCL_BLOCKING_WAIT="1",
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        TORCH_NCCL_DUMP_ON_TIMEOUT="0",
    )
    import torch

    local_rank = int_from_env("LOCAL_RANK", 0)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    for entry in json.loads(sys.argv[1]):
        started = time.perf_counter()
        try:
            found = run_round(torch, entry, device)
        except Exception as error:
            found = {"error": first_line(error)}
        seconds = round(time.perf_counter() - started, 2)
        print("\n" + json.dumps({"round": entry["name"], "took": seconds, **found}), flush=True)
    print(
        "\n" + json.dumps({"round": "compute", "seconds": compute_seconds(torch, device)}),
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
