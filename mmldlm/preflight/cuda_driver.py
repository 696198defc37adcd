"""Whether torch can use this machine's GPUs, found out without torch: the answer of the CUDA
driver, and the CUDA of torch's build. As a script: print the answer of the driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import runpy
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmldlm.utils.run_module import module_command

# The GPUs are initialized already where NVML is open.
SECONDS = 25.0


def ask_driver(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return {"code", "version"}: the status of cuInit (0: success), and the newest CUDA that the
    driver supports (12020: 12.2; None if it does not say). Without an answer: {"error", "fix"}.

    A process of its own asks: the children of one that has called cuInit cannot use CUDA, and the
    loader reads LD_LIBRARY_PATH once.

    Args:
        environment: Variables of that process.
    """
    try:
        done = subprocess.run(
            module_command(__name__), env=environment, capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        error = f"cuInit does not return within {SECONDS:.0f} s"
    else:
        lines = done.stdout.splitlines() or done.stderr.splitlines() or [b""]
        try:
            return json.loads(lines[-1])
        except ValueError:
            said = lines[-1].decode(errors="replace").strip()
            error = f"a process that calls cuInit ends with status {done.returncode} {said}"
    return {"error": error.strip(), "fix": "reload the NVIDIA driver, or reboot the node"}


def call_driver() -> dict[str, Any]:
    """Return the same from within this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        fix = (
            "install the driver's CUDA library (in a container:"
            " NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        )
        return {"error": str(error), "fix": fix}
    version = ctypes.c_int()
    says = driver.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value > 0
    return {"code": driver.cuInit(0), "version": version.value if says else None}


def torch_build() -> dict[str, str | None] | None:
    """Return "version", "cuda" and "hip" of the installed torch (None: built without); None
    without torch, or of a build that does not say.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        built = runpy.run_path(str(Path(found.origin).with_name("version.py")))
        return {"version": built["__version__"], "cuda": built["cuda"], "hip": built["hip"]}
    except Exception:
        return None


if __name__ == "__main__":
    print(json.dumps(call_driver()))
