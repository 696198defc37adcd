"""FLOPs of a training step, counted for the work that is needed, and model FLOPs utilisation (MFU).

Only matrix products count, 2 FLOPs a multiply-add, as in PaLM's MFU (arXiv 2204.02311, appendix B) and torch's
FlopCounterMode. A text token meets the text stream and the head alone: 6 N FLOPs a token with all N parameters would
overstate the work of the 0.9B model three times.
"""

from __future__ import annotations

from mmldlm.models.mmdit.config import ModelConfig
from mmldlm.models.mmdit.costs import step_flops

# Dense peak of one device, TFLOP/s: (bf16, fp32 outside tensor cores). Sources: NVIDIA's data sheets of the H100 and
# H200 Tensor Core GPUs (2024), the A100 (2022) and the L40S (2023); figures given with sparsity are halved. Names as
# torch.cuda.get_device_name has them; the longest that fits counts. Devices of which no sheet was at hand are left out:
# logging.peak_tflops names theirs.
PEAK_TFLOPS = {
    "H200": (989.4, 66.9),
    "H200 NVL": (835.5, 60.0),
    "H100 PCIe": (756.0, 51.2),
    "H100 NVL": (835.5, 60.0),
    "H100": (989.4, 66.9),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
}


def peak_flops(device_name: str | None, dtype: str, override_tflops: float | None = None) -> float | None:
    """FLOP/s that one device could do; None where that is not known (a CPU, a device outside the table).

    Args:
        device_name: as torch.cuda.get_device_name gives it, None for a CPU. dtype: training.dtype (bf16 and fp16
            have one peak).
        override_tflops: logging.peak_tflops, in TFLOP/s.
    """
    if override_tflops is not None:
        return override_tflops * 1e12
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):
        if device_name is not None and name in device_name:
            return PEAK_TFLOPS[name][dtype == "fp32"] * 1e12
    return None


class FlopRate:
    """FLOPs of the steps of a run, from the counts that a step's record has anyway.

    Attention is quadratic in the length: the sum of squares is taken at the batch's mean length, which length-bucketed
    batches hold within a few per cent of attention's share.

    Args:
        model: shape. world_size: devices. peak: FLOP/s of one device, None when unknown.
    """

    def __init__(self, model: ModelConfig, world_size: int, peak: float | None):
        self.model, self.world_size, self.peak = model, world_size, peak

    def flops(self, num_samples: int, num_tokens: float, num_scored: float) -> float:
        """Training FLOPs of a global batch's real work (what is recomputed does not count)."""
        if not num_samples or not num_tokens:
            return 0.0
        one, unread = step_flops(self.model, [1], 1), step_flops(self.model, [1], 0)
        mean = num_tokens / num_samples
        latents = self.model.max_latents * self.model.latent_tokens
        a_row = one.text_blocks  # at one token
        saved = (num_tokens - num_scored) * (one.text_blocks - unread.text_blocks)
        pairs = (mean + latents) ** 2 / (1 + latents) ** 2
        fixed = one.embeddings + one.modulation + one.latent_blocks + one.latent_head + one.length_head
        head = 2 * num_scored * self.model.hidden_size * self.model.vocab_size
        return 3 * (num_samples * (fixed + a_row * mean + one.attention * pairs) - saved + head)

    def mfu(self, flops: float, seconds: float) -> float | None:
        """Share of the devices' peak; None where the peak is not known."""
        if self.peak is None or seconds <= 0:
            return None
        return flops / seconds / (self.peak * self.world_size)
