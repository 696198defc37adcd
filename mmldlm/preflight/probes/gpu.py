"""GPUs through NVML's C library, without torch and without nvidia-smi, which hangs together with
the driver.
"""

from __future__ import annotations

import ctypes
import os
import pwd

from mmldlm.utils.processes import read_command

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
