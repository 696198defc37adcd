"""The GPUs that CUDA_VISIBLE_DEVICES leaves to a process of this machine; needs no torch. As a
script: print their number.
"""

from __future__ import annotations

import os
from types import ModuleType

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(pynvml: ModuleType) -> list[int]:
    """Return NVML's indices of the GPUs that a process started here uses, in its order.

    NVML counts in the order of the PCI bus; CUDA's own differs only between GPUs of several models
    (CUDA_DEVICE_ORDER).

    Args:
        pynvml: The module, after nvmlInit.
    """
    count = pynvml.nvmlDeviceGetCount()
    if VISIBLE not in os.environ:
        return list(range(count))
    indices: list[int] = []
    for name in os.environ[VISIBLE].split(","):
        index = _index_of(pynvml, name.strip(), count)
        if index is None:
            # CUDA ignores what follows a name that it does not know.
            break
        indices.append(index)
    return list(dict.fromkeys(indices))


def _index_of(pynvml: ModuleType, name: str, count: int) -> int | None:
    """Return the index of a GPU that is named by its number, the beginning of its UUID or the UUID
    of a MIG instance; None if there is none.
    """
    if name.isascii() and name.isdigit():
        return int(name) if int(name) < count else None
    try:
        if name.startswith("MIG-"):
            instance = pynvml.nvmlDeviceGetHandleByUUID(name)
            gpu = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)
            return pynvml.nvmlDeviceGetIndex(gpu)
        if name.startswith("GPU-"):
            handles = ((n, pynvml.nvmlDeviceGetHandleByIndex(n)) for n in range(count))
            uuids = ((n, pynvml.nvmlDeviceGetUUID(handle)) for n, handle in handles)
            return next((n for n, uuid in uuids if uuid.startswith(name)), None)
    except pynvml.NVMLError:
        pass
    return None


def count_visible_gpus() -> int:
    """Return the number of visible GPUs; 0 without a working driver, or nvidia-ml-py."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        return len(visible_gpus(pynvml))
    except pynvml.NVMLError:
        return 0


if __name__ == "__main__":
    print(count_visible_gpus())
