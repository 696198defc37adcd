"""Each node by itself: GPUs, limits, leftovers."""

from __future__ import annotations

from mmldlm.preflight.check import check, fail, ok, skip, warn
from mmldlm.preflight.context import majority
from mmldlm.preflight.memory_model import GIB
from mmldlm.utils.formatting import format_bytes

SHM_NEEDED, SHM_GPU = GIB // 2, 8 * GIB  # gloo and dataloader workers; NCCL between GPUs of a node (Primus' bound)
NOFILE_LEAST, NOFILE_PER_RANK = 512, 16  # libraries and shards; sockets to each peer
NOFILE_WANTED = 4096  # with GPUs: NCCL's channels and workers' pipes
MEMLOCK_NEEDED = 32 * GIB  # GPUDirect and InfiniBand register that much (Primus' bound)
GPU_MEMORY_IN_USE = 2 * GIB
NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "fuse.", "9p", "wekafs")


def _each_gpu(context):
    """(node, GPU) of every GPU that a rank would use; a SKIP for each node without one."""
    for name, found in context.answered("gpus").items():
        if found.get("absent"):
            yield name, None, found["absent"]
        for gpu in (found.get("gpus") or ())[: context.slots(name)]:
            yield name, gpu, None


def _gpu_check(context, judge, well: str):
    """Results of a judge(gpu) -> None or (measured, expected, fix[, verdict]) over all GPUs, one PASS a sound node."""
    faults: dict[str, int] = {}
    for name, gpu, absent in _each_gpu(context):
        if absent is not None:
            yield skip(absent, name)
            continue
        verdict = judge(gpu)
        faults.setdefault(name, 0)
        if verdict is not None:
            faults[name] += 1
            measured, expected, fix, *kind = verdict
            yield (kind[0] if kind else fail)(
                f"GPU {gpu['index']} ({gpu.get('name', '?')}): {measured}", expected, fix, name
            )
    for name, count in faults.items():
        if count == 0:
            yield ok(well, name)


@check("GPU001", 1, "node", "GPU count")
def gpus_for_all_slots(context):
    """A node has at least as many GPUs as slots, unless no node has any (a CPU run)."""
    for name, found in context.answered("gpus").items():
        count, slots = len(found.get("gpus") or ()), context.slots(name)
        if found.get("broken"):
            yield fail(found["absent"], "a driver that answers", "reload the NVIDIA driver, or reboot the node", name)
        elif not context.has_gpus():
            yield skip(f"{found.get('absent', 'no GPU')}; no other node has GPUs either: a CPU run with gloo", name)
        elif count < slots:
            fix = f"set slots={count} for {name}" if count else f"delete {name} from the hostfile, or mend its driver"
            yield fail(f"{count} GPU(s) for {slots} slots", f"at least {slots}", fix, name)
        else:
            yield ok(f"{count} x {found['gpus'][0].get('name')}", name)
    for name, why in context.unanswered("gpus").items():
        yield fail(why, "NVML answers within 20 s", "the driver hangs: reboot the node, or exclude it", name)


@check("GPU002", 1, "node", "GPU health")
def gpus_are_healthy(context):
    """No GPU is lost, has uncorrected ECC errors, a pending or failed row remap, or asks for a recovery action."""

    def judge(gpu):
        if gpu.get("lost"):
            return gpu["lost"], "an answer", "reboot the node, or exclude it"
        if gpu["recovery"]:
            return f"asks for: {gpu['recovery']}", "no recovery action", f"{gpu['recovery']}, as the driver says"
        if gpu["remap_failed"]:
            return "row remapping failed", "no failed remap", "exclude the node and have the GPU replaced"
        if gpu["remap_pending"]:
            return "row remapping is pending", "none pending", "reset the GPU (nvidia-smi -r) when it is idle"
        if gpu["ecc_uncorrected"]:
            return (
                f"{gpu['ecc_uncorrected']} uncorrected ECC errors",
                "0 since boot",
                "reset the GPU; replace it if they return",
            )
        return None

    yield from _gpu_check(context, judge, "ECC, row remap and recovery action are clean")


@check("GPU003", 1, "node", "GPU clocks")
def gpus_are_not_slowed(context):
    """No GPU is slowed down by heat or by its power supply."""

    def judge(gpu):
        if gpu.get("slowed"):
            return ", ".join(gpu["slowed"]), "full clocks", "look at the node's cooling and power", warn
        return None

    yield from _gpu_check(context, judge, "not slowed")


@check("GPU004", 1, "node", "GPUs are free")
def gpus_are_free(context):
    """No other process holds memory of the GPUs."""

    def judge(gpu):
        if gpu.get("lost"):
            return None
        held = [
            f"pid {p['pid']} {p['user'] or ''} {p['command'] or '(of another container)'}" for p in gpu["processes"]
        ]
        used = gpu["memory_total"] - gpu["memory_free"]
        if held:
            return "; ".join(held), "no process on it", "end them (they are named, never killed here), or wait"
        if used > GPU_MEMORY_IN_USE:
            return (
                f"{format_bytes(used)} in use by no visible process",
                "less than 2 GiB",
                "look for leftovers as root, or reset it",
            )
        return None

    yield from _gpu_check(context, judge, "free")


@check("GPU005", 2, "node", "same GPUs and driver")
def gpus_are_alike(context):
    """GPU model and driver are those of the majority."""
    kinds = {
        name: f"{found['gpus'][0].get('name')}, driver {found['driver']}"
        for name, found in context.answered("gpus").items()
        if found.get("gpus")
    }
    if not kinds:
        yield skip("no node has GPUs")
    usual = majority(kinds)
    for name, kind in kinds.items():
        if kind == usual:
            yield ok(kind, name)
        else:
            yield warn(kind, usual, "expect the slowest GPU's pace, or leave the node out", name)


@check("LIM001", 1, "node", "/dev/shm")
def shared_memory(context):
    """/dev/shm is writable and large enough for gloo, NCCL and workers."""
    needed = SHM_GPU if context.has_gpus() else SHM_NEEDED
    for name, found in context.answered("limits").items():
        fix = "docker run --shm-size=16g (Kubernetes: emptyDir, medium Memory), or mount -o remount,size=50% /dev/shm"
        if not found["shm_writable"]:
            yield fail(f"/dev/shm: {found.get('shm_error')}", "a writable /dev/shm", fix, name)
        elif found["shm_free"] < needed:
            measured = f"{format_bytes(found['shm_free'])} free of {format_bytes(found['shm_total'])}"
            yield fail(measured, f"at least {format_bytes(needed)} free", fix, name)
        else:
            yield ok(f"{format_bytes(found['shm_free'])} free", name)


@check("LIM002", 1, "node", "locked memory")
def locked_memory(context):
    """On nodes with GPUs, memory may be locked without bound, which InfiniBand and GPUDirect need."""
    for name, found in context.answered("limits").items():
        limit = found["memlock"]
        if not (context.value(name, "gpus") or {}).get("gpus"):
            yield skip("no GPU: nothing registers memory", name)
        elif limit != -1 and limit < MEMLOCK_NEEDED:
            fix = "ulimit -l unlimited (docker run --ulimit memlock=-1; /etc/security/limits.conf)"
            yield warn(format_bytes(limit), "unlimited", fix, name)
        else:
            yield ok("unlimited" if limit == -1 else format_bytes(limit), name)


@check("LIM003", 1, "node", "open files")
def open_files(context):
    """A rank may open enough files: sockets to all peers, shards, workers' pipes.

    With GPUs, less than 4096 warns: the usual 1024 of a login is enough for few ranks without workers.
    """
    least = NOFILE_LEAST + NOFILE_PER_RANK * context.world_size
    wanted = max(least, NOFILE_WANTED) if context.has_gpus() else least
    for name, found in context.answered("limits").items():
        if found["nofile"] != -1 and found["nofile"] < wanted:
            fix = f"ulimit -n {wanted}"
            if not context.local:
                fix += " for ssh sessions: /etc/security/limits.conf, or LimitNOFILE of the ssh service"
            verdict = fail if found["nofile"] < least else warn
            yield verdict(f"nofile {found['nofile']}", f"at least {wanted}", fix, name)
        else:
            yield ok(f"nofile {found['nofile']}", name)


@check("LIM004", 1, "node", "temporary files")
def temporary_files(context):
    """A file can be written where temporary files go (TMPDIR, else /tmp): ranks keep their states, sockets and builds
    there."""
    for name, found in context.answered("temporary").items():
        if "error" in found:
            measured = f"{found['folder']}: {found['error']}"
            if "free" in found:
                measured += f" ({format_bytes(found['free'])} free)"
            fix = f"free some space in {found['folder']} on {name}, or set TMPDIR there to another folder"
            yield fail(measured, f"{format_bytes(found['bytes'])} can be written", fix, name)
        else:
            yield ok(f"{found['folder']}, {format_bytes(found['free'])} free", name)


def _on(context, name: str) -> str:
    """What a command begins with, to be run on a node."""
    return "" if context.local else f"ssh {name} "


@check("PROC001", 1, "node", "leftover ranks")
def no_leftover_ranks(context):
    """No rank or launcher of an earlier run is alive."""
    for name, found in context.answered("processes").items():
        # A launch of the same hostfile that runs right now is somebody's work: only the user can tell.
        for entry in found:
            measured = f"pid {entry['pid']} of {entry['user']}, {entry['age']} s old: {entry['command']}"
            fix = f"if it is a leftover: {_on(context, name)}kill {entry['pid']}"
            if not entry["own"]:
                fix = f"it is another user's: see that the node has room for both, or ask {entry['user']} to end it"
            yield warn(measured, "no other rank", fix, name)
        if not found:
            yield ok("none", name)


@check("JIT001", 1, "node", "build locks")
def no_stale_locks(context):
    """No lock of a killed JIT build lies in torch's extension cache; torch waits on one for ever, silently."""
    for name, found in context.answered("locks").items():
        stale = [entry for entry in found if entry["stale"]]
        for entry in stale:
            measured = f"{entry['path']}, {entry['age']} s old, and no compiler runs"
            yield fail(measured, "no lock without its build", f"{_on(context, name)}rm {entry['path']}", name)
        if not stale:
            yield ok("none", name)


@check("JIT002", 1, "node", "build caches")
def caches_are_local(context):
    """What torch and Triton compile goes to a disk of the node: on a shared one, ranks of all nodes race for it."""
    for name, found in context.answered("caches").items():
        shared = {k: v for k, v in found.items() if v["file_system"].startswith(NETWORK_FILE_SYSTEMS)}
        for variable, place in shared.items():
            measured = f"{place['folder']} is on {place['file_system']}"
            yield warn(
                measured, "a local disk", f"export {variable}=/tmp/$USER/{variable.lower()} (carried: ENV002)", name
            )
        if not shared:
            yield ok("local", name)
