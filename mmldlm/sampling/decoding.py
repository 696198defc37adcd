"""The state of texts during decoding, and the draws of their tokens and lengths."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mmldlm.errors import MmldlmError
from mmldlm.models.base import LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.model import Model, device_of, rows_of_latents
from mmldlm.utils.counter_rng import Stream, uniforms


class DecodingState:
    """A batch of texts between all [MASK] and complete.

    The last position of a text of known length is its EOS: it is written, not predicted.

    Args:
        lengths: Lengths of the texts, EOS counted. [B] int64
        width: Number of positions S.
        mask_token_id, pad_token_id, eos_token_id: Ids of the special tokens.
        drafts: Tokens that stand from the start, [MASK] where one is to be filled; None: all
            [MASK]. [B, >= S] int64

    Attributes:
        tokens: Ids. [B, S] int64
        real: False at padding. [B, S] bool
        is_last: The EOS position of each text. [B, S] bool
        undecided: Positions that a strategy has yet to fill. [B, S] bool
    """

    def __init__(
        self,
        lengths: Tensor,
        width: int,
        *,
        mask_token_id: int,
        pad_token_id: int,
        eos_token_id: int,
        drafts: Tensor | None = None,
    ):
        assert int(lengths.min()) >= 1 and int(lengths.max()) <= width
        self.mask_token_id = mask_token_id
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id
        self.lengths = lengths
        position = torch.arange(width, device=lengths.device)
        self.real = position < lengths[:, None]
        self.is_last = position == lengths[:, None] - 1
        self.tokens = torch.where(self.real, mask_token_id, pad_token_id)
        self.undecided = self.real & ~self.is_last
        if drafts is not None:
            self.tokens = torch.where(self.undecided, drafts[:, :width], self.tokens)
            self.undecided &= self.tokens == mask_token_id
        # Also of a text without words: nothing of it is left to predict.
        has_token = (self.real & ~self.is_last & ~self.undecided).any(1)
        self.write_eos((has_token | (lengths == 1))[:, None])

    def exclude_special_tokens(self, logits: Tensor) -> None:
        """Set the logits [M, V] of [MASK], padding and EOS to -inf, in place."""
        # Column by column: a list of indices would be copied to the device at every pass.
        for token in (self.mask_token_id, self.pad_token_id, self.eos_token_id):
            logits[:, token] = float("-inf")

    def masked_share(self) -> Tensor:
        """Return the masked fraction of each text, EOS counted as in training: [B] fp64."""
        return ((self.tokens == self.mask_token_id) & self.real).sum(1) / self.lengths.double()

    def num_written(self) -> int:
        """Return how many words of all texts stand."""
        return int((self.real & ~self.is_last & ~self.undecided).sum())

    def write_eos(self, rows: Tensor) -> None:
        """Write the EOS where `rows` ([B, 1] or [B, S] bool) is True."""
        self.tokens.masked_fill_(self.is_last & rows, self.eos_token_id)

    def fill(self, positions: Tensor, tokens: Tensor) -> None:
        """Write tokens [M] at positions [M] of B * S."""
        self.tokens.view(-1)[positions] = tokens
        self.undecided.view(-1)[positions] = False

    def texts(self) -> list[list[int]]:
        """Return the ids of each complete text without its EOS."""
        assert not bool(self.undecided.any())
        lengths = self.lengths.tolist()
        return [row[: length - 1] for row, length in zip(self.tokens.tolist(), lengths)]


# Rows of fp64 probabilities in memory at once: 256 x 30,522 tokens are 62 MB.
_MAX_ROWS = 256
# Rows of latents of which lengths are predicted in one pass.
_LENGTH_ROWS = 16_384


def draw_tokens(logits: Tensor, uniform: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Draw from a categorical distribution by inverting the CDF in fp64.

    In fp32, uniforms and Gumbels truncate the tail (arXiv 2409.02908).

    Args:
        logits: Logits. [M, V]
        uniform: Numbers in [0, 1). [M] fp64
        temperature: Temperature; 0 takes the most probable token.
        top_p: Probability that the most probable tokens, among which one is drawn, reach together.

    Returns:
        [M] int64; never a token of logit -inf.

    Raises:
        MmldlmError: the logits contain NaN.
    """
    if temperature == 0:
        best, tokens = logits.max(-1)
        check_finite(best)
        return tokens
    parts = []
    for start in range(0, len(logits), _MAX_ROWS):
        rows = slice(start, start + _MAX_ROWS)
        probability = (logits[rows].double() / temperature).softmax(-1)
        if top_p < 1.0:
            probability = probability.masked_fill(outside_nucleus(probability, top_p), 0.0)
        cumulative = probability.cumsum(-1)
        total = cumulative[:, -1]
        check_finite(total)
        # A point rounded up to the total would select an index after the last token with any
        # probability.
        point = torch.minimum(
            uniform[rows] * total, torch.nextafter(total, torch.zeros_like(total))
        )
        parts.append(torch.searchsorted(cumulative, point[:, None], right=True)[:, 0])
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=logits.device)


def outside_nucleus(probability: Tensor, top_p: float) -> Tensor:
    """Return which tokens of [M, V] are not among the most probable that together reach top_p."""
    ordered, indices = probability.sort(dim=-1, descending=True)
    return torch.zeros_like(probability, dtype=torch.bool).scatter_(
        -1, indices, ordered.cumsum(-1) - ordered >= top_p
    )


def top_log_probability(logits: Tensor) -> Tensor:
    """Return the log of the largest probability: [M, V] -> [M]; NaN logits raise a MmldlmError, so
    that they are not ranked as numbers.
    """
    # A few rows at a time stay in the CPU's cache: measured 40 ms instead of 107 for 800 rows of
    # 30,522.
    rows = 16 if logits.device.type == "cpu" else max(len(logits), 1)
    values = torch.cat([part.log_softmax(-1).amax(-1) for part in logits.split(rows)])
    check_finite(values)
    return values


def check_finite(values: Tensor) -> None:
    """Raise MmldlmError if a value is not finite."""
    if not bool(torch.isfinite(values).all()):
        raise MmldlmError(
            "the model returned NaN or infinite logits: its weights are corrupt or its input out"
            " of range"
        )


def choose_lengths(logits: Tensor, uniform: Tensor | None = None) -> Tensor:
    """Choose lengths from the length head's logits: draw them, or take the median, which minimizes
    the expected absolute error.

    Args:
        logits: Logits of lengths 1 .. L, EOS counted. [B, L]
        uniform: Numbers in [0, 1) for a draw, [B]; None: the median.

    Returns:
        [B] int64 in 1 .. L.
    """
    cumulative = logits.double().softmax(-1).cumsum(-1)
    point = torch.full_like(cumulative[:, 0], 0.5) if uniform is None else uniform.to(cumulative)
    below = (cumulative <= (point * cumulative[:, -1])[:, None]).sum(-1)
    return below.clamp_max(logits.shape[-1] - 1) + 1


@torch.inference_mode()
def predict_lengths(
    model: Model, latents: Tensor | None, count: int | None = None, seed: int = 0
) -> Tensor:
    """Predict lengths with the model's length head: the median of p(length | latent), or a draw
    from p(length) without a latent, which is broad: only draws give texts of different lengths.

    Args:
        latents: Latents in the encoder's space, [N, D] or [N, M, D]; None: no condition.
        count: Number of texts, needed without latents.

    Returns:
        [N] int64 lengths, EOS counted, on the CPU.
    """
    if latents is not None:
        return torch.cat([choose_lengths(part) for part in _length_logits(model, latents)]).cpu()
    assert count is not None, "count is needed without latents"
    device = device_of(model)
    uniform = uniforms(seed, Stream.LENGTH, range(count), (1,))[:, 0].to(device)
    start = torch.full((1, 1), model.config.mask_token_id, dtype=torch.int64, device=device)
    out = model(TextInputs(start), None, TokenQuery(start.new_empty(0)))
    return choose_lengths(out.length_logits.expand(count, -1), uniform).cpu()


def _length_logits(model: Model, latents: Tensor) -> Iterator[Tensor]:
    """Yield the length head's logits [B, L], batch by batch; an image has many rows."""
    device = device_of(model)
    batch_size = max(1, min(512, _LENGTH_ROWS // max(rows_of_latents(model.config), 1)))
    for part in latents.split(batch_size):
        yield model(None, LatentInputs(model.scale_latents(part.to(device)))).length_logits


@torch.inference_mode()
def most_probable_lengths(model: Model, latents: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the most probable lengths of each text, the best first, and their log-probabilities.

    Args:
        latents: Latents in the encoder's space. [N, D] or [N, M, D]
        number: Number of lengths K; at most as many as there are.

    Returns:
        [N, K] int64, EOS counted, and [N, K] fp64, both on the CPU.
    """
    parts = []
    for logits in _length_logits(model, latents):
        top = logits.double().log_softmax(-1).topk(min(number, logits.shape[-1]), dim=-1)
        parts.append((top.indices.cpu() + 1, top.values.cpu()))
    lengths, scores = zip(*parts)
    return torch.cat(lengths), torch.cat(scores)
