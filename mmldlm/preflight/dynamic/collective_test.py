"""Level 3, on one rank: rounds of process groups in which every collective is checked by value and timed.

python -m mmldlm.preflight.dynamic.collective_test ROUNDS

ROUNDS is JSON: a list of {"name", "rank", "world", "address", "port", "seconds", "on_cpu"} or null.
Prints one JSON object a round. NCCL where there is a GPU, gloo elsewhere and where on_cpu asks for it; the same code.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

BYTES = {"nccl": 256 << 20, "gloo": 4 << 20}
REPEATS = 5


def check_values(torch, rank: int, world: int, device) -> list[str]:
    """Run the collectives that training uses; names of those that gave a wrong value."""
    dist, wrong = torch.distributed, []
    place = torch.arange(1024, dtype=torch.float64, device=device)

    def compare(name: str, found, expected) -> None:
        if not torch.equal(found, expected):
            wrong.append(name)

    own = place * (rank + 1)
    summed = own.clone()
    dist.all_reduce(summed)
    total = place * (world * (world + 1) // 2)
    compare("all_reduce", summed, total)
    sent = own.clone()
    dist.broadcast(sent, src=world - 1)
    compare("broadcast", sent, place * world)
    gathered = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(gathered, own)
    compare("all_gather", torch.stack(gathered), torch.stack([place * (r + 1) for r in range(world)]))
    if device.type == "cuda":
        part = torch.empty(1024, dtype=torch.float64, device=device)
        dist.reduce_scatter_tensor(part, own.repeat(world))
        compare("reduce_scatter", part, total)
    return wrong


def bus_bandwidth(torch, world: int, device, size: int) -> tuple[float, float]:
    """(bytes a second of all_reduce as nccl-tests count them: size / time x 2 (n - 1) / n, median seconds)."""
    dist = torch.distributed
    values = torch.ones(size // 4, device=device)
    seconds = []
    for _ in range(REPEATS + 2):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)  # at most world ^ 7, which fp32 holds
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    median = sorted(seconds[2:])[REPEATS // 2]
    return size / median * 2 * (world - 1) / world, median


def compute_seconds(torch, device) -> float:
    """Median seconds of a matrix product: what this rank computes at, whatever the network does."""
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


def one_round(torch, place: dict, device) -> dict:
    """Form the group, check, measure; nothing of it may take longer than the place's seconds."""
    device = torch.device("cpu") if place["on_cpu"] else device
    backend = "nccl" if device.type == "cuda" else "gloo"
    started = time.perf_counter()
    torch.distributed.init_process_group(
        backend,
        init_method=f"tcp://{place['address']}:{place['port']}",
        rank=place["rank"],
        world_size=place["world"],
        timeout=timedelta(seconds=place["seconds"]),
    )
    try:
        wrong = check_values(torch, place["rank"], place["world"], device)
        found = {"formed": round(time.perf_counter() - started, 3), "wrong": wrong, "backend": backend}
        if place["world"] > 1:
            found["busbw"], found["seconds"] = bus_bandwidth(torch, place["world"], device, BYTES[backend])
        return found
    finally:
        torch.distributed.destroy_process_group()


def main() -> int:
    # A round that times out must raise, so that the next one is tried: by default NCCL's watchdog ends the process.
    os.environ.update(TORCH_NCCL_BLOCKING_WAIT="1", TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_DUMP_ON_TIMEOUT="0")
    import torch

    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    for place in json.loads(sys.argv[1]):
        if place is None:
            continue
        started = time.perf_counter()
        try:
            found = one_round(torch, place, device)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        print(
            "\n" + json.dumps({"round": place["name"], "took": round(time.perf_counter() - started, 2), **found}),
            flush=True,
        )
    print("\n" + json.dumps({"round": "compute", "seconds": compute_seconds(torch, device)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
