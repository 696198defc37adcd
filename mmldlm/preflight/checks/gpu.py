"""GPUs of a node: present, healthy, free and alike."""

from __future__ import annotations

import ctypes
import os
import pwd

from mmldlm.preflight.check import check, fail, majority, ok, skip, warn
from mmldlm.preflight.memory_model import GIB
from mmldlm.utils.formatting import format_bytes
from mmldlm.utils.processes import read_command

GPU_MEMORY_IN_USE = 2 * GIB
_MAX_PROCESSES = 64
_VOLATILE, _UNCORRECTED = 0, 1
_NOT_SUPPORTED = 3
# nvmlClocksEventReasons of throttling by heat or power supply, without idling and the power cap.
THROTTLE_REASONS = {
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
RECOVERY = {
    0: None,
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer-to-peer traffic",
    4: "drain and reset",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}
_FIELD_RECOVERY_ACTION = (
    230  # nvml.h: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, drivers of 570 and later
)


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Field(ctypes.Structure):
    _fields_ = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("value_type", ctypes.c_uint),
        ("status", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    ]


def gpus(args: dict) -> dict:
    """Return {"gpus": [...], "driver"}, or {"absent": reason} on a node without an NVIDIA driver.

    Per GPU: name, memory in bytes, ECC errors, row remapping, throttle reasons, recovery action,
    and its processes. A field that the GPU or driver does not support is None.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {"absent": "no NVIDIA driver on this node (libnvidia-ml.so.1 is missing)"}
    code = nvml.nvmlInit_v2()
    if code != 0:
        return {"absent": f"NVML does not start (code {code})", "broken": True}
    try:
        text = ctypes.create_string_buffer(96)
        driver = text.value.decode() if nvml.nvmlSystemGetDriverVersion(text, 96) == 0 else None
        driver = text.value.decode() or driver
        count = ctypes.c_uint()
        _expect(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), "nvmlDeviceGetCount")
        return {"driver": driver, "gpus": [_gpu(nvml, index) for index in range(count.value)]}
    finally:
        nvml.nvmlShutdown()


def _expect(code: int, function: str) -> None:
    if code != 0:
        raise RuntimeError(f"{function} returned NVML code {code}")


def _gpu(nvml, index: int) -> dict:
    """Return the facts of one GPU."""
    device = ctypes.c_void_p()
    code = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
    if code != 0:
        return {"index": index, "lost": f"NVML code {code}"}
    name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetName(device, name, 96)
    nvml.nvmlDeviceGetUUID(device, uuid, 96)
    memory = _Memory()
    _expect(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)), "nvmlDeviceGetMemoryInfo")
    ecc, reasons = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    has_ecc = (
        nvml.nvmlDeviceGetTotalEccErrors(device, _UNCORRECTED, _VOLATILE, ctypes.byref(ecc)) == 0
    )
    has_reasons = (
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device, ctypes.byref(reasons)) == 0
    )
    remapped = [ctypes.c_uint() for _ in range(4)]  # correctable, uncorrectable, pending, failed
    has_remap = (
        nvml.nvmlDeviceGetRemappedRows(device, *(ctypes.byref(cell) for cell in remapped)) == 0
    )
    return {
        "index": index,
        "name": name.value.decode(),
        "uuid": uuid.value.decode(),
        "memory_total": memory.total,
        "memory_free": memory.free,
        "ecc_uncorrected": ecc.value if has_ecc else None,
        "remap_pending": bool(remapped[2].value) if has_remap else None,
        "remap_failed": bool(remapped[3].value) if has_remap else None,
        "slowed": [text for bit, text in THROTTLE_REASONS.items() if reasons.value & bit]
        if has_reasons
        else None,
        "recovery": _recovery(nvml, device),
        "processes": _processes(nvml, device),
    }


def _recovery(nvml, device) -> str | None:
    field = _Field(field=_FIELD_RECOVERY_ACTION)
    if nvml.nvmlDeviceGetFieldValues(device, 1, ctypes.byref(field)) != 0 or field.status != 0:
        return None
    number = field.value & 0xFFFFFFFF
    return RECOVERY.get(number, f"recovery action {number}")


def _processes(nvml, device) -> list[dict]:
    count = ctypes.c_uint(_MAX_PROCESSES)
    found = (_Process * _MAX_PROCESSES)()
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), found) != 0:
        return []
    return [
        {"pid": p.pid, "memory": p.used, **_process_owner(p.pid)} for p in found[: count.value]
    ]


def _process_owner(pid: int) -> dict:
    """Return command and user of a process; None for those of another container or user."""
    command = read_command(pid)
    try:
        user = pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    except (OSError, KeyError):
        return {"command": None, "user": None}
    return {"command": None if command is None else " ".join(command).strip()[:120], "user": user}


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
