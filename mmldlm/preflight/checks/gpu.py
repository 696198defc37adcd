"""GPUs of a node: present, healthy, free and alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from mmldlm.cluster.agent import LOGIN_LIBRARIES
from mmldlm.engines.deepspeed_config import check_fp16
from mmldlm.errors import UserError
from mmldlm.preflight import cuda_driver
from mmldlm.preflight.check import Result, Results, check, fail, majority, ok, skip, warn
from mmldlm.preflight.context import Context
from mmldlm.preflight.memory_model import GIB
from mmldlm.utils.formatting import format_bytes
from mmldlm.utils.gpus import VISIBLE, visible_gpus

GPU_MEMORY_IN_USE = 2 * GIB
# Limit of the probe. Without persistence mode NVML initializes one GPU after the other, which
# takes 30 s and more on nodes of eight.
PROBE_SECONDS = 60
# nvmlDeviceGpuRecoveryAction_t
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
# Status of cuInit -> its meaning and the fix.
CUDA_STATUS = {
    100: (
        "CUDA finds no device",
        "compare `nvidia-smi -L` with the devices that the job or container has; GPUs in MIG mode"
        " need instances",
    ),
    802: (
        "the system is not ready",
        "start the fabric manager, in the version of the driver (systemctl status"
        " nvidia-fabricmanager)",
    ),
    803: (
        "libcuda.so.1 is not of the running driver's version",
        "reboot the node after an update of the driver; remove other copies of libcuda.so.1 from"
        " the container or LD_LIBRARY_PATH",
    ),
    804: (
        "libcuda.so.1 is of a newer driver, which these GPUs do not allow",
        "remove cuda-compat from the container or LD_LIBRARY_PATH",
    ),
}


def gpus(args: dict) -> dict:
    """Return {"gpus": [...], "driver", "cuda", "torch"}, or {"absent": reason} on a node without
    an NVIDIA driver.

    The facts come from NVML, without torch and without nvidia-smi, which hangs together with the
    driver; "cuda" and "torch" are those of cuda_driver.py. A reason that needs to be fixed comes
    with its "fix". Of a run on this machine alone (args["local"]), the GPUs are those that
    CUDA_VISIBLE_DEVICES leaves it; on other nodes launchers set that variable. Ranks there load
    libraries from args["library_path"], if it is given.

    Per GPU: name, memory in bytes, ECC errors, row remapping, throttle reasons, recovery action,
    and its processes. A field that the GPU or driver does not support is None.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return {"absent": "no NVIDIA driver on this node (libnvidia-ml.so.1 is missing)"}
    except pynvml.NVMLError as error:
        fix = "reload the NVIDIA driver, or reboot the node"
        return {"absent": f"NVML does not start (code {error.value})", "fix": fix}
    try:
        count = pynvml.nvmlDeviceGetCount()
        indices = visible_gpus(pynvml) if args.get("local") else range(count)
        if count and not indices:
            return {"absent": f"{VISIBLE}={os.environ[VISIBLE]} hides all {count} GPU(s)"}
        facts = {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "gpus": [_gpu(pynvml, index) for index in indices],
        }
        if facts["gpus"]:
            facts["cuda"] = cuda_driver.ask_driver(_rank_environment(args))
            facts["torch"] = cuda_driver.torch_build()
        return facts
    finally:
        pynvml.nvmlShutdown()


def _rank_environment(args: dict) -> dict[str, str]:
    """Return the environment of a rank here, as far as it decides which driver library is loaded
    and which GPUs that shows.
    """
    if args.get("local"):
        return dict(os.environ)
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE}
    # That of this process is the head's (cluster/agent.py).
    library_path = args.get("library_path") or os.environ.get(LOGIN_LIBRARIES)
    if library_path is not None:
        environment["LD_LIBRARY_PATH"] = library_path
    return environment


def _gpu(pynvml: Any, index: int) -> dict:
    """Return the facts of one GPU."""
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return {"index": index, "lost": f"NVML code {error.value}"}

    def supported(function, *args):
        """Return the function's value; None if the GPU or the driver does not have it."""
        try:
            return function(device, *args)
        except pynvml.NVMLError:
            return None

    # GPUs that share the host's memory have none of their own, and a container with a MIG instance
    # may not read that of the GPU.
    memory = supported(pynvml.nvmlDeviceGetMemoryInfo)
    uncorrected, since_boot = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    _, _, pending, failed = supported(pynvml.nvmlDeviceGetRemappedRows) or [None] * 4
    reasons = supported(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    # Idling and the power cap are left out, because they throttle a healthy GPU, too.
    faults = {
        pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
        pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "software thermal",
        pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hardware thermal",
        pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
    }
    action = supported(
        pynvml.nvmlDeviceGetFieldValues, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    )
    processes = supported(pynvml.nvmlDeviceGetComputeRunningProcesses) or []
    return {
        "index": index,
        "name": supported(pynvml.nvmlDeviceGetName) or "unnamed GPU",
        "memory_total": None if memory is None else memory.total,
        "memory_free": None if memory is None else memory.free,
        "ecc_uncorrected": supported(pynvml.nvmlDeviceGetTotalEccErrors, uncorrected, since_boot),
        "remap_pending": None if pending is None else bool(pending),
        "remap_failed": None if failed is None else bool(failed),
        "slowed": None
        if reasons is None
        else [text for bit, text in faults.items() if reasons & bit],
        "recovery": _recovery(action),
        "processes": [_process(process.pid) for process in processes],
    }


def _recovery(fields: Any) -> str | None:
    """Return the recovery action that the driver requests; None if there is none, or the driver is
    older than 570.
    """
    if fields is None or fields[0].nvmlReturn != 0:
        return None
    action = fields[0].value.uiVal
    return RECOVERY.get(action, f"recovery action {action}")


def _process(pid: int) -> dict:
    """Return command and user of a process; None for those of another container or user."""
    import psutil

    try:
        process = psutil.Process(pid)
        command, user = " ".join(process.cmdline()), process.username()
    except psutil.Error:
        return {"pid": pid, "command": None, "user": None}
    return {"pid": pid, "command": command.strip()[:120], "user": user}


def _check_gpus(
    context: Context,
    fault_of: Callable[[dict], tuple[str, str, str] | None],
    pass_message: str,
    report: Callable[..., Result] = fail,
) -> Results:
    """Yield a result for every faulty GPU that a rank would use, and a PASS per healthy node.

    Args:
        fault_of: Function that returns (measured, expected, fix) of a GPU's fault, or None.
        pass_message: Measured value of a healthy node.
        report: `fail` or `warn`.
    """
    for name, facts in context.probe_values("gpus").items():
        if facts.get("absent"):
            yield skip(facts["absent"], name)
            continue
        used = (facts.get("gpus") or ())[: context.slots(name)]
        faults = [(gpu, fault) for gpu in used if (fault := fault_of(gpu)) is not None]
        for gpu, (measured, expected, fix) in faults:
            place = f"GPU {gpu['index']} ({gpu.get('name', '?')})"
            yield report(f"{place}: {measured}", expected, fix, name)
        if used and not faults:
            yield ok(pass_message, name)


@check("GPU001", 1, "node", "GPU count")
def gpus_for_all_slots(context: Context) -> Results:
    """Every node has at least as many GPUs as slots, unless no node has a GPU (a CPU run).

    DeepSpeed trains in fp16 on GPUs, or on CPUs with fp16 instructions.
    """
    has_gpus, slots_of = context.has_gpus(), {node.name: node.slots for node in context.nodes}
    if not has_gpus and context.config is not None:
        try:
            check_fp16(context.config, context.data_facts.get("cpu_has_fp16", True))
        except UserError as error:
            yield fail(error.found, error.expected, error.fix)
            return
    for name, facts in context.probe_values("gpus").items():
        count, slots = len(facts.get("gpus") or ()), slots_of[name]
        if "fix" in facts:
            yield fail(facts["absent"], "a working driver", facts["fix"], name)
        elif not has_gpus:
            yield skip(
                f"{facts.get('absent', 'no GPU')}; no other node has GPUs either: a CPU run with"
                " gloo",
                name,
            )
        elif count < slots:
            if context.local:
                fix = f"use --nproc {count}, or name more GPUs in {VISIBLE} if it is set"
            elif count:
                fix = f"set slots={count} for {name}"
            else:
                fix = f"delete {name} from the hostfile, or repair its driver"
            yield fail(f"{count} GPU(s) for {slots} slots", f"at least {slots}", fix, name)
        else:
            yield ok(f"{count} x {facts['gpus'][0].get('name', '?')}", name)
    for name, problem in context.probe_errors("gpus").items():
        if context.facts[name]["gpus"].get("timeout"):
            fix = (
                "the driver hangs, or initializes its GPUs at every call: start"
                " nvidia-persistenced; otherwise reboot the node, or exclude it"
            )
        elif problem.startswith("ModuleNotFoundError"):
            fix = f"on {name}: pip install -c constraints.txt nvidia-ml-py"
        else:
            fix = "if nvidia-smi fails there, too: reload the driver, or reboot the node"
        yield fail(problem, f"an answer of the driver within {PROBE_SECONDS} s", fix, name)


@check("GPU002", 1, "node", "GPU health")
def gpus_are_healthy(context: Context) -> Results:
    """No GPU is lost, has uncorrected ECC errors or a pending or failed row remap, or requests a
    recovery action.
    """

    return _check_gpus(context, _health_fault, "ECC, row remap and recovery action are clean")


def _health_fault(gpu: dict) -> tuple[str, str, str] | None:
    if gpu.get("lost"):
        return gpu["lost"], "an answer", "reboot the node, or exclude it"
    if action := gpu["recovery"]:
        return f"requests: {action}", "no recovery action", f"{action}, as the driver requests"
    if gpu["remap_failed"]:
        fix = "exclude the node and replace the GPU"
        return "row remapping failed", "no failed remap", fix
    if gpu["remap_pending"]:
        fix = "reset the GPU (nvidia-smi -r) when it is idle"
        return "row remapping is pending", "none pending", fix
    if count := gpu["ecc_uncorrected"]:
        fix = "reset the GPU; replace it if they return"
        return f"{count} uncorrected ECC errors", "0 since boot", fix
    return None


@check("GPU003", 1, "node", "GPU clocks")
def gpus_are_not_slowed(context: Context) -> Results:
    """No GPU is throttled by heat or by its power supply."""

    def fault_of(gpu):
        if not gpu.get("slowed"):
            return None
        return ", ".join(gpu["slowed"]), "full clocks", "check the node's cooling and power"

    return _check_gpus(context, fault_of, "not throttled", warn)


@check("GPU004", 1, "node", "GPUs are free")
def gpus_are_free(context: Context) -> Results:
    """No other process uses memory of the GPUs."""

    return _check_gpus(context, _occupation, "free")


def _occupation(gpu: dict) -> tuple[str, str, str] | None:
    if gpu.get("lost"):
        return None
    held = [
        f"pid {p['pid']} {p['user'] or ''} {p['command'] or '(of another container)'}"
        for p in gpu["processes"]
    ]
    if held:
        return "; ".join(held), "no process on it", "end them (preflight never does), or wait"
    if gpu["memory_free"] is None:
        return None
    used = gpu["memory_total"] - gpu["memory_free"]
    if used > GPU_MEMORY_IN_USE:
        measured = f"{format_bytes(used)} in use by no visible process"
        return measured, "less than 2 GiB", "look for leftover processes as root, or reset it"
    return None


@check("GPU005", 2, "node", "same GPUs and driver")
def gpus_are_alike(context: Context) -> Results:
    """GPU models and driver are those of the majority, and a node has GPUs of one model."""
    by_node = {}
    for name, facts in context.probe_values("gpus").items():
        used = (facts.get("gpus") or ())[: context.slots(name)]
        if used:
            models = sorted({gpu["name"] for gpu in used if not gpu.get("lost")})
            by_node[name] = {"models": models, "driver": facts["driver"]}
    if not by_node:
        yield skip("no node has GPUs")
    alike = {name: node for name, node in by_node.items() if len(node["models"]) == 1}
    usual = majority(alike or by_node)
    for name, node in by_node.items():
        measured, expected = (
            f"{' and '.join(n['models']) or 'no answer'}, driver {n['driver']}"
            for n in (node, usual)
        )
        if node == usual and len(node["models"]) <= 1:
            yield ok(measured, name)
            continue
        if node == usual:
            expected = "GPUs of one model"
        fix = "expect the speed of the slowest GPU, or exclude the node"
        yield warn(measured, expected, fix, name)


@check("GPU006", 1, "node", "torch on GPUs")
def torch_can_use_gpus(context: Context) -> Results:
    """The CUDA driver of a node with GPUs starts, and torch is built for a CUDA that it supports;
    otherwise the ranks would train on the CPU.

    Asks the driver itself (cuInit) and reads the version of torch's build, without importing
    torch.
    """
    for name, facts in context.probe_values("gpus").items():
        if not facts.get("gpus"):
            yield skip(facts.get("absent", "no GPU"), name)
            continue
        faults = [*_driver_faults(facts), *_torch_faults(facts, context.local)]
        for measured, expected, fix in faults:
            yield fail(measured, expected, fix, name)
        if not faults:
            torch = f"; torch {facts['torch']['version']}" if facts["torch"] else ""
            yield ok(f"driver {facts['driver']} starts CUDA{torch}", name)


def _driver_faults(facts: dict) -> Iterator[tuple[str, str, str]]:
    """Yield (measured, expected, fix) if the CUDA driver does not start."""
    expected = "a CUDA driver that starts"
    if "error" in facts["cuda"]:
        yield facts["cuda"]["error"], expected, facts["cuda"]["fix"]
    elif code := facts["cuda"]["code"]:
        fix = "look for the cause in `dmesg | grep NVRM`; reload the driver, or reboot the node"
        meaning, fix = CUDA_STATUS.get(code, ("", fix))
        yield f"cuInit fails with status {code}{meaning and f': {meaning}'}", expected, fix


def _torch_faults(facts: dict, local: bool) -> Iterator[tuple[str, str, str]]:
    """Yield (measured, expected, fix) if torch is built for CPUs, or for a newer CUDA."""
    build, supported = facts["torch"], facts["cuda"].get("version")
    if build is None or build["hip"]:
        return
    major = supported and supported // 1000
    install = f"install a torch built for CUDA{f' {major}' if major else ''}"
    if build["cuda"] is None:
        on_purpose = f'{VISIBLE}=""' if local else "--skip GPU006"
        yield (
            f"torch {build['version']} is built without CUDA",
            "a torch that can use the GPUs",
            f"{install} (pytorch.org), or train on the CPUs on purpose: {on_purpose}",
        )
    elif major and int(build["cuda"].split(".")[0]) > major:
        yield (
            f"torch {build['version']} is built for CUDA {build['cuda']}; driver"
            f" {facts['driver']} supports {major}.{supported % 1000 // 10}",
            f"a driver for CUDA {build['cuda'].split('.')[0]} or newer",
            f"update the driver, or {install} (pytorch.org)",
        )
