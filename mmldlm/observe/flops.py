"""Peak FLOP/s of devices, for model FLOPs utilization (MFU, arXiv 2204.02311).

FLOPs of a model: its task.
"""

from __future__ import annotations

# Dense peak of one device, TFLOP/s: (bf16, fp32 outside tensor cores). Sources: NVIDIA's data
# sheets of the H100 and H200 Tensor Core GPUs (2024), the A100 (2022) and the L40S (2023); figures
# given with sparsity are halved. Names as torch.cuda.get_device_name has them; the longest that
# fits counts. Devices of which no sheet was at hand are left out: logging.peak_tflops names
# theirs.
PEAK_TFLOPS = {
    "H200": (989.4, 66.9),
    "H200 NVL": (835.5, 60.0),
    "H100 PCIe": (756.0, 51.2),
    "H100 NVL": (835.5, 60.0),
    "H100": (989.4, 66.9),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
}


def peak_flops(
    device_name: str | None, dtype: str, override_tflops: float | None = None
) -> float | None:
    """FLOP/s that one device could do; None where that is not known (a CPU, a device outside the
    table).

    Args:
        device_name: as torch.cuda.get_device_name gives it, None for a CPU. dtype: training.dtype
            (bf16 and fp16 have one peak).
        override_tflops: logging.peak_tflops, in TFLOP/s.
    """
    if override_tflops is not None:
        return override_tflops * 1e12
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):
        if device_name is not None and name in device_name:
            return PEAK_TFLOPS[name][dtype == "fp32"] * 1e12
    return None
