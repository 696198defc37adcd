"""Model FLOPs of a training step, and model FLOPs utilization (MFU).

Only matrix products count, 2 FLOPs per multiply-add, as in PaLM's MFU (arXiv 2204.02311, appendix B) and torch's
FlopCounterMode. A text token passes through the text stream and the head only: the rule of 6 N FLOPs per token with all
N parameters would overstate the work of the 0.9B model three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmldlm.config.schema import ModelConfig

# Dense peak of one device, TFLOP/s: (bf16, fp32 outside tensor cores). Sources: NVIDIA's data sheets of the H100 and
# H200 Tensor Core GPUs (2024), the A100 (2022) and the L40S (2023); figures with sparsity are halved. Names are
# substrings of torch.cuda.get_device_name; the longest match counts. For other devices set logging.peak_tflops.
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
    """Return the peak FLOP/s of one device; None if unknown (a CPU, a device outside the table).

    Args:
        device_name: result of torch.cuda.get_device_name; None for a CPU.
        dtype: training.dtype (bf16 and fp16 have the same peak).
        override_tflops: logging.peak_tflops, in TFLOP/s.
    """
    if override_tflops is not None:
        return override_tflops * 1e12
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):
        if device_name is not None and name in device_name:
            return PEAK_TFLOPS[name][dtype == "fp32"] * 1e12
    return None


@dataclass(frozen=True)
class StepFlops:
    """Forward FLOPs by module. `training` is three times their sum: a matrix product has two gradients of its size."""

    embeddings: float
    modulation: float
    text_blocks: float
    latent_blocks: float
    attention: float
    text_head: float
    latent_head: float
    length_head: float
    inputs: float
    """Forward FLOPs of the layers that read the batch (part of embeddings); their inputs need no gradient."""

    @property
    def forward(self) -> float:
        return sum(value for name, value in vars(self).items() if name != "inputs")

    @property
    def training(self) -> float:
        """Model FLOPs of forward and backward, the numerator of MFU."""
        return 3 * self.forward

    @property
    def without_input_gradients(self) -> float:
        """`training` without the input gradients that autograd omits because nothing before those layers is trained."""
        return self.training - self.inputs


def step_flops(model: ModelConfig, lengths: Sequence[int], scored: int, num_latents: int | None = None) -> StepFlops:
    """Return the forward FLOPs of one batch.

    Real work: `lengths` of the real tokens (EOS included) and `scored` masked positions. Nominal work, the cost of a
    padded batch with a dense head: lengths [S] * B and scored B * S. After its attention, the last block computes
    scored positions only.

    Args:
        model: shape of the model, with latent_dim and vocab_size set.
        lengths: text tokens per sample.
        scored: text positions that the head scores.
        num_latents: latents per sample (default: max_latents).
    """
    num_latents = model.max_latents if num_latents is None else num_latents
    width, cond, inner = model.hidden_size, model.cond_dim, int(model.hidden_size * model.mlp_ratio)
    batch, tokens = len(lengths), sum(lengths)
    latent_tokens = num_latents * model.latent_tokens
    per_row = 2 * width * (4 * width + 2 * inner)  # to_qkv, to_out, and the two MLP layers
    after_attention = 2 * width * (width + 2 * inner)
    pairs = sum((length + latent_tokens) ** 2 for length in lengths)
    timesteps = 2 * (2 * 256 * cond + 2 * cond * cond)
    latent_in = (
        num_latents * 2 * model.latent_dim * (model.latent_tokens * width + cond) + num_latents * 2 * cond * cond
    )
    inputs = 2 * 2 * 256 * cond + num_latents * 2 * model.latent_dim * (model.latent_tokens * width + cond)
    return StepFlops(
        embeddings=batch * (timesteps + latent_in),
        modulation=batch * (model.n_blocks * 2 * 2 * cond * 6 * width + 2 * 2 * cond * 2 * width),
        text_blocks=model.n_blocks * tokens * per_row - (tokens - scored) * after_attention,
        latent_blocks=model.n_blocks * batch * latent_tokens * per_row,
        attention=model.n_blocks * 4 * pairs * width,
        text_head=2 * scored * width * model.vocab_size,
        latent_head=batch * num_latents * 2 * model.latent_tokens * width * model.latent_dim,
        length_head=batch * 2 * cond * (cond + model.max_seq_len),
        inputs=batch * inputs,
    )


class FlopRate:
    """FLOPs of training steps from the counts in their records.

    Attention is quadratic in the length: the sum of squares is approximated at the batch's mean length, which for
    length-bucketed batches is accurate to a few percent of attention's part.

    Args:
        model: shape of the model.
        world_size: number of devices.
        peak: peak FLOP/s of one device; None if unknown.
    """

    def __init__(self, model: ModelConfig, world_size: int, peak: float | None):
        self.model, self.world_size, self.peak = model, world_size, peak

    def flops(self, num_samples: int, num_tokens: float, num_scored: float) -> float:
        """Return the training FLOPs of a global batch's real work, without recomputation."""
        if not num_samples or not num_tokens:
            return 0.0
        token, unscored_token = step_flops(self.model, [1], 1), step_flops(self.model, [1], 0)
        mean = num_tokens / num_samples
        latents = self.model.max_latents * self.model.latent_tokens
        per_row = token.text_blocks
        saved = (num_tokens - num_scored) * (token.text_blocks - unscored_token.text_blocks)
        pairs = (mean + latents) ** 2 / (1 + latents) ** 2
        fixed = token.embeddings + token.modulation + token.latent_blocks + token.latent_head + token.length_head
        head = 2 * num_scored * self.model.hidden_size * self.model.vocab_size
        return 3 * (num_samples * (fixed + per_row * mean + token.attention * pairs) - saved + head)

    def mfu(self, flops: float, seconds: float) -> float | None:
        """Return the fraction of the devices' peak; None if the peak is unknown."""
        if self.peak is None or seconds <= 0:
            return None
        return flops / seconds / (self.peak * self.world_size)
