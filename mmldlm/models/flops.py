"""FLOPs of the networks by one closed formula, without torch.

Only matrix products count, 2 per multiply-add, as in PaLM's MFU (arXiv 2204.02311, appendix B) and
torch's FlopCounterMode, against which a test holds every network. A counter cannot replace the
formula, because a step's FLOPs need the real lengths of its texts. A text token of an MMDiT meets
the text stream and the head alone: 6 N FLOPs per token with all N parameters would overstate the
work of the 0.9B model three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.models.plain_config import PlainConfig
from mmldlm.utils.validation import not_none

# Sinusoids of a timestep (models/layers.py).
FREQUENCIES = 256


class Flops(NamedTuple):
    """Forward FLOPs of one batch.

    Attributes:
        text: All that a pass over the texts computes given encoded latents.
        latent_inputs: What encodes the latents.
        latent_rows: What the last block computes of latents after its attention.
        latent_head: Head of the latents.
        length_head: Head of the lengths.
        first_layers: The part of them that multiplies data, latents and timesteps, and so has no
            gradient of its inputs.
    """

    text: float
    latent_inputs: float
    latent_rows: float
    latent_head: float
    length_head: float
    first_layers: float

    @property
    def forward(self) -> float:
        return (
            self.text + self.latent_inputs + self.latent_rows + self.latent_head + self.length_head
        )

    @property
    def training(self) -> float:
        """Model FLOPs of forward and backward, of which MFU is taken: a product has two gradients
        of its own size, one if its input is data. Recomputation does not count.
        """
        return 3 * self.forward - self.first_layers


def timestep_flops(samples: int, cond: int, timesteps: int = 2) -> float:
    """FLOPs of the first layers of the embeddings of each sample's timesteps."""
    return samples * timesteps * 2 * FREQUENCIES * cond


def latent_rows(model: ModelConfig | PlainConfig, num_latents: float | None = None) -> float:
    """Rows of a sample's latents in the blocks, beside those of its text.

    Args:
        num_latents: Latents of the sample; None: model.num_latents.
    """
    if isinstance(model, PlainConfig):
        return model.prefix_rows
    num_latents = model.num_latents if num_latents is None else num_latents
    return num_latents * model.rows_per_latent


def estimate_flops(
    model: ModelConfig | PlainConfig,
    lengths: Sequence[float],
    num_scored: float,
    *,
    num_logits: float | None = None,
    num_latents: float | None = None,
) -> Flops:
    """Forward FLOPs of a batch's real work.

    Attention is counted over all pairs, causal or not, as kernels' counters do. The last block
    computes what is behind attention for the rows that a head reads.

    Args:
        model: Config of an MMDiT or a plain transformer; latent_dim and vocab_size are set.
        lengths: Text tokens of each sample, EOS included.
        num_scored: Text positions that the head scores.
        num_logits: Logits that it computes; None: of the whole vocabulary at each position.
        num_latents: Latents of each sample; None: model.num_latents.
    """
    width, inner = model.hidden_size, int(model.hidden_size * model.mlp_ratio)
    samples, tokens, dim = len(lengths), sum(lengths), not_none(model.latent_dim)
    prefix = latent_rows(model, num_latents)
    num_latents = model.num_latents if num_latents is None else num_latents
    memory: float = 0
    if isinstance(model, PlainConfig):
        cond, chunks, streams = model.cond_width, model.chunks, int(model.is_modulated)
        timesteps, pools, is_read = int(model.reads_time), model.pools_latent, False
        has_length_head, predictions = model.has_length_head, 0
        if model.conditioning == "cross_attention":
            memory = num_latents * chunks
    else:
        cond, chunks, streams = model.cond_dim, model.tokens_per_latent, 2
        timesteps, pools, is_read, has_length_head = 2, True, True, True
        predictions = model.latent_predictions

    first_layers = timestep_flops(samples, cond, timesteps)
    condition = timesteps * 2 * (FREQUENCIES * cond + cond * cond)
    # The modulations of adaLN.
    condition += streams * 2 * cond * width * (6 * model.n_blocks + 2)
    latent_inputs = num_latents * 2 * dim * (chunks * width + (cond if pools else 0))
    first_layers += samples * latent_inputs
    latent_inputs += num_latents * 2 * cond * cond if pools else 0

    # q, k, v and out, the MLP; under cross-attention its q and out, and k and v of the memory.
    row = 2 * width * (4 * width + 2 * inner) + (4 * width * width if memory else 0)
    behind_attention = 2 * width * (2 * inner + (0 if memory else width))
    blocks = model.n_blocks * (tokens * row + samples * memory * 4 * width * width)
    pairs = sum((length + prefix) ** 2 for length in lengths) + tokens * memory
    attention = model.n_blocks * 4 * pairs * width
    latents = samples * prefix * (model.n_blocks * row - behind_attention)
    unread = (tokens - num_scored) * behind_attention
    logits = num_scored * not_none(model.vocab_size) if num_logits is None else num_logits

    return Flops(
        text=samples * condition + blocks + attention + latents - unread + 2 * logits * width,
        latent_inputs=samples * latent_inputs,
        latent_rows=samples * prefix * behind_attention if is_read else 0,
        latent_head=samples * num_latents * 2 * chunks * width * predictions * dim,
        length_head=samples * 2 * cond * (cond + model.max_seq_len) if has_length_head else 0,
        first_layers=first_layers,
    )
