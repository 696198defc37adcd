"""Checks of each node: GPUs, limits, leftover processes, build caches."""

from __future__ import annotations

from mmldlm.preflight.check import check, fail, ok, skip, warn
from mmldlm.preflight.context import majority
from mmldlm.preflight.memory_model import GIB
from mmldlm.utils.formatting import format_bytes

SHM_NEEDED, SHM_GPU = (
    GIB // 2,
    8 * GIB,
)  # gloo and dataloader workers; NCCL within a node (limit of Primus)
NOFILE_MIN, NOFILE_PER_RANK = 512, 16  # libraries and shards; sockets to each rank
NOFILE_GPU = 4096  # with GPUs: NCCL channels and pipes of workers
MEMLOCK_NEEDED = 32 * GIB  # registered by GPUDirect and InfiniBand (limit of Primus)
GPU_MEMORY_IN_USE = 2 * GIB
NETWORK_FILE_SYSTEMS = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb",
    "fuse.",
    "9p",
    "wekafs",
)


def _each_gpu(context):
    """Yield (node, GPU, None) of every GPU that a rank would use, (node, None, reason) for nodes
    without GPUs.
    """
    for name, found in context.probe_values("gpus").items():
        if found.get("absent"):
            yield name, None, found["absent"]
        for gpu in (found.get("gpus") or ())[: context.slots(name)]:
            yield name, gpu, None


def _check_gpus(context, evaluate, pass_message: str):
    """Yield the results of evaluate(gpu) over all GPUs, and one PASS per healthy node.

    Args:
        context: facts of the nodes.
        evaluate: returns None or (measured, expected, fix) for a GPU; (..., warn) for a warning.
        pass_message: measured value of a healthy node.
    """
    num_faults: dict[str, int] = {}
    for name, gpu, absent in _each_gpu(context):
        if absent is not None:
            yield skip(absent, name)
            continue
        fault = evaluate(gpu)
        num_faults.setdefault(name, 0)
        if fault is not None:
            num_faults[name] += 1
            measured, expected, fix, *kind = fault
            yield (kind[0] if kind else fail)(
                f"GPU {gpu['index']} ({gpu.get('name', '?')}): {measured}", expected, fix, name
            )
    for name, count in num_faults.items():
        if count == 0:
            yield ok(pass_message, name)


@check("GPU001", 1, "node", "GPU count")
def gpus_for_all_slots(context):
    """Every node has at least as many GPUs as slots, unless no node has a GPU (a CPU run)."""
    for name, found in context.probe_values("gpus").items():
        count, slots = len(found.get("gpus") or ()), context.slots(name)
        if found.get("broken"):
            yield fail(
                found["absent"],
                "a working driver",
                "reload the NVIDIA driver, or reboot the node",
                name,
            )
        elif not context.has_gpus():
            yield skip(
                f"{found.get('absent', 'no GPU')}; no other node has GPUs either: a CPU run with"
                " gloo",
                name,
            )
        elif count < slots:
            fix = (
                f"set slots={count} for {name}"
                if count
                else f"delete {name} from the hostfile, or repair its driver"
            )
            yield fail(f"{count} GPU(s) for {slots} slots", f"at least {slots}", fix, name)
        else:
            yield ok(f"{count} x {found['gpus'][0].get('name')}", name)
    for name, error in context.probe_errors("gpus").items():
        yield fail(
            error,
            "an answer of NVML within 20 s",
            "the driver hangs: reboot the node, or exclude it",
            name,
        )


@check("GPU002", 1, "node", "GPU health")
def gpus_are_healthy(context):
    """No GPU is lost, has uncorrected ECC errors or a pending or failed row remap, or requests a
    recovery action.
    """

    def evaluate(gpu):
        if gpu.get("lost"):
            return gpu["lost"], "an answer", "reboot the node, or exclude it"
        if gpu["recovery"]:
            return (
                f"requests: {gpu['recovery']}",
                "no recovery action",
                f"{gpu['recovery']}, as the driver requests",
            )
        if gpu["remap_failed"]:
            return (
                "row remapping failed",
                "no failed remap",
                "exclude the node and replace the GPU",
            )
        if gpu["remap_pending"]:
            return (
                "row remapping is pending",
                "none pending",
                "reset the GPU (nvidia-smi -r) when it is idle",
            )
        if gpu["ecc_uncorrected"]:
            return (
                f"{gpu['ecc_uncorrected']} uncorrected ECC errors",
                "0 since boot",
                "reset the GPU; replace it if they return",
            )
        return None

    yield from _check_gpus(context, evaluate, "ECC, row remap and recovery action are clean")


@check("GPU003", 1, "node", "GPU clocks")
def gpus_are_not_slowed(context):
    """No GPU is throttled by heat or by its power supply."""

    def evaluate(gpu):
        if gpu.get("slowed"):
            return (
                ", ".join(gpu["slowed"]),
                "full clocks",
                "check the node's cooling and power",
                warn,
            )
        return None

    yield from _check_gpus(context, evaluate, "not throttled")


@check("GPU004", 1, "node", "GPUs are free")
def gpus_are_free(context):
    """No other process uses memory of the GPUs."""

    def evaluate(gpu):
        if gpu.get("lost"):
            return None
        held = [
            f"pid {p['pid']} {p['user'] or ''} {p['command'] or '(of another container)'}"
            for p in gpu["processes"]
        ]
        used = gpu["memory_total"] - gpu["memory_free"]
        if held:
            return "; ".join(held), "no process on it", "end them (preflight never does), or wait"
        if used > GPU_MEMORY_IN_USE:
            return (
                f"{format_bytes(used)} in use by no visible process",
                "less than 2 GiB",
                "look for leftover processes as root, or reset it",
            )
        return None

    yield from _check_gpus(context, evaluate, "free")


@check("GPU005", 2, "node", "same GPUs and driver")
def gpus_are_alike(context):
    """GPU model and driver are those of the majority."""
    kinds = {
        name: f"{found['gpus'][0].get('name')}, driver {found['driver']}"
        for name, found in context.probe_values("gpus").items()
        if found.get("gpus")
    }
    if not kinds:
        yield skip("no node has GPUs")
    usual = majority(kinds)
    for name, kind in kinds.items():
        if kind == usual:
            yield ok(kind, name)
        else:
            yield warn(
                kind, usual, "expect the speed of the slowest GPU, or exclude the node", name
            )


@check("LIM001", 1, "node", "/dev/shm")
def shared_memory(context):
    """/dev/shm is writable and large enough for gloo, NCCL and workers."""
    needed = SHM_GPU if context.has_gpus() else SHM_NEEDED
    for name, found in context.probe_values("limits").items():
        fix = (
            "docker run --shm-size=16g (Kubernetes: emptyDir, medium Memory), or mount -o"
            " remount,size=50% /dev/shm"
        )
        if not found["shm_writable"]:
            yield fail(f"/dev/shm: {found.get('shm_error')}", "a writable /dev/shm", fix, name)
        elif found["shm_free"] < needed:
            measured = (
                f"{format_bytes(found['shm_free'])} free of {format_bytes(found['shm_total'])}"
            )
            yield fail(measured, f"at least {format_bytes(needed)} free", fix, name)
        else:
            yield ok(f"{format_bytes(found['shm_free'])} free", name)


@check("LIM002", 1, "node", "locked memory")
def locked_memory(context):
    """Locked memory is unlimited on nodes with GPUs, as InfiniBand and GPUDirect require."""
    for name, found in context.probe_values("limits").items():
        limit = found["memlock"]
        if not (context.value(name, "gpus") or {}).get("gpus"):
            yield skip("no GPU: no memory is registered", name)
        elif limit != -1 and limit < MEMLOCK_NEEDED:
            fix = "ulimit -l unlimited (docker run --ulimit memlock=-1; /etc/security/limits.conf)"
            yield warn(format_bytes(limit), "unlimited", fix, name)
        else:
            yield ok("unlimited" if limit == -1 else format_bytes(limit), name)


@check("LIM003", 1, "node", "open files")
def open_files(context):
    """A rank may open enough files: sockets to all ranks, shards, pipes of workers.

    With GPUs, a limit below 4096 warns: the usual 1024 of a login is enough for few ranks without
    workers.
    """
    minimum = NOFILE_MIN + NOFILE_PER_RANK * context.world_size
    recommended = max(minimum, NOFILE_GPU) if context.has_gpus() else minimum
    for name, found in context.probe_values("limits").items():
        if found["nofile"] != -1 and found["nofile"] < recommended:
            fix = f"ulimit -n {recommended}"
            if not context.local:
                fix += (
                    " for ssh sessions: /etc/security/limits.conf, or LimitNOFILE of the ssh"
                    " service"
                )
            result = fail if found["nofile"] < minimum else warn
            yield result(f"nofile {found['nofile']}", f"at least {recommended}", fix, name)
        else:
            yield ok(f"nofile {found['nofile']}", name)


@check("LIM004", 1, "node", "temporary files")
def temporary_files(context):
    """A file can be written to the folder for temporary files (TMPDIR, else /tmp): state files,
    sockets, builds.
    """
    for name, found in context.probe_values("temporary").items():
        if "error" in found:
            measured = f"{found['folder']}: {found['error']}"
            if "free" in found:
                measured += f" ({format_bytes(found['free'])} free)"
            fix = (
                f"free some space in {found['folder']} on {name}, or set TMPDIR there to another"
                " folder"
            )
            yield fail(measured, f"{format_bytes(found['bytes'])} of writable space", fix, name)
        else:
            yield ok(f"{found['folder']}, {format_bytes(found['free'])} free", name)


def _ssh_prefix(context, name: str) -> str:
    """Return the prefix of a shell command for a node."""
    return "" if context.local else f"ssh {name} "


@check("PROC001", 1, "node", "leftover ranks")
def no_leftover_ranks(context):
    """No rank or launcher of an earlier run is alive."""
    for name, found in context.probe_values("processes").items():
        # Only the user can distinguish a leftover from a running launch.
        for entry in found:
            measured = (
                f"pid {entry['pid']} of {entry['user']}, {entry['age']} s old: {entry['command']}"
            )
            fix = f"if it is a leftover: {_ssh_prefix(context, name)}kill {entry['pid']}"
            if not entry["own"]:
                fix = (
                    "another user's: check that the node has space for both, or ask"
                    f" {entry['user']} to end it"
                )
            yield warn(measured, "no other rank", fix, name)
        if not found:
            yield ok("none", name)


@check("JIT001", 1, "node", "build locks")
def no_stale_locks(context):
    """torch's extension cache has no lock of a killed JIT build, on which torch would wait
    forever.
    """
    for name, found in context.probe_values("locks").items():
        stale = [entry for entry in found if entry["stale"]]
        for entry in stale:
            measured = f"{entry['path']}, {entry['age']} s old, without a running compiler"
            yield fail(
                measured,
                "no lock without its build",
                f"{_ssh_prefix(context, name)}rm {entry['path']}",
                name,
            )
        if not stale:
            yield ok("none", name)


@check("JIT002", 1, "node", "build caches")
def caches_are_local(context):
    """torch and Triton compile to a local disk; on a shared one, the ranks of all nodes race for
    the cache.
    """
    for name, found in context.probe_values("caches").items():
        shared = {
            k: v for k, v in found.items() if v["file_system"].startswith(NETWORK_FILE_SYSTEMS)
        }
        for variable, cache in shared.items():
            measured = f"{cache['folder']} is on {cache['file_system']}"
            yield warn(
                measured,
                "a local disk",
                f"export {variable}=/tmp/$USER/{variable.lower()} (propagated: ENV002)",
                name,
            )
        if not shared:
            yield ok("local", name)
