"""Rounds of correction by the model's own critic: mask what it doubts, write it again, keep what
it likes better.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmldlm.data.encoders.encoder import token_budget_batches
from mmldlm.errors import UserError
from mmldlm.sampling.device import device_of
from mmldlm.sampling.text.records import TextSamples

if TYPE_CHECKING:
    from mmldlm.sampling.pretrained import Pretrained

_ROUND_SEEDS = 1 << 32  # apart from every seed of the command line
_OF_DRAFTS = ("seed", "num_lengths", "progress", "recorder", "with_log_probabilities")


def write_corrected(
    write: Callable[..., TextSamples],
    pretrained: Pretrained,
    latents: Tensor | None,
    rounds: int,
    share: float | None = None,
    **options: Any,
) -> TextSamples:
    """Write texts and correct them.

    Args:
        write: `TextTask.write_texts` of the drafts, which also writes again what is masked.
        latents: in the encoder's space.
        rounds, share: see `correct_texts`; a share of None is 0.1.
        options: of `write`.
    """
    check_quality_head(pretrained.model)
    assert latents is not None, "the critic needs latents"
    samples = write(pretrained, latents, **options)
    again = partial(
        write,
        pretrained,
        **{key: value for key, value in options.items() if key not in _OF_DRAFTS},
    )
    share, seed = 0.1 if share is None else share, options.get("seed") or 0
    tokens = {"batch_tokens": options["batch_tokens"]} if options.get("batch_tokens") else {}
    return correct_texts(
        pretrained.model, latents, samples, again, rounds=rounds, share=share, seed=seed, **tokens
    )


def check_quality_head(model: nn.Module) -> None:
    """Raise a UserError for a model without a quality head."""
    if getattr(model, "quality_head", None) is None:
        raise UserError(
            "a model with a quality head",
            "one of model.quality_head=false",
            "omit --critic-rounds, or train one: model.quality_head=true"
            " training.init_from=CHECKPOINT",
        )


@torch.inference_mode()
def correct_texts(
    model: nn.Module,
    latents: Tensor,
    samples: TextSamples,
    write: Callable[..., TextSamples],
    *,
    rounds: int,
    share: float,
    seed: int = 0,
    batch_tokens: int = 1536,
) -> TextSamples:
    """Correct finished texts (after PRISM, arXiv 2510.01384).

    In round r of R the ceil(share (1 - r / R) n) words of a text that the quality head doubts most
    are masked and written again. The new text replaces the old one if its mean quality is higher.
    Otherwise these words are left alone until another change is kept.

    Args:
        model: a MultimodalMMDiT with model.quality_head.
        latents: [N, D] (or [N, M, D]) in the encoder's space; the critic reads them without noise.
        samples: of these latents.
        write: (latents, lengths, indices, drafts, seed) -> texts whose masked words are written
            again.
        rounds: R.
        share: largest share of the words of a text that a round masks; 0 changes nothing.
        seed: the draws of a round depend on it, the round and the index of the text.
        batch_tokens: maximum padded positions per pass.

    Returns:
        Texts of the same lengths, with the passes of all rounds: at most 1 + R (n + 1) more for a
        text of n words.

    Raises:
        UserError: the model has no quality head.
        MmldlmError: NaN logits.
    """
    check_quality_head(model)
    if rounds == 0 or share == 0:
        return samples
    texts, num_rows, passes = list(samples.tokens), samples.num_rows, samples.passes.clone()
    num_scored = samples.num_scored
    qualities = text_qualities(model, latents, texts, batch_tokens)
    left_alone = [torch.zeros(len(text), dtype=torch.bool) for text in texts]
    num_rows, passes = num_rows + len(texts), passes + 1
    for number in range(rounds):
        doubted = _most_doubted(qualities, left_alone, share * (1 - number / rounds))
        rows = [row for row, where in enumerate(doubted) if len(where)]
        if not rows:
            break
        index = torch.tensor(rows)
        found = write(
            latents=latents[index], lengths=samples.lengths[index], indices=rows,
            drafts=_drafts(model, [texts[row] for row in rows], [doubted[row] for row in rows]),
            seed=seed + _ROUND_SEEDS * (number + 1),
        )  # fmt: skip
        num_rows, passes[index] = (
            num_rows + found.num_rows + len(rows),
            passes[index] + found.passes + 1,
        )
        num_scored += found.num_scored
        new_qualities = text_qualities(model, latents[index], found.tokens, batch_tokens)
        for row, text, quality in zip(rows, found.tokens, new_qualities):
            left_alone[row][doubted[row]] = True
            if float(quality.mean()) > float(qualities[row].mean()):
                texts[row], qualities[row], left_alone[row] = (
                    text,
                    quality,
                    torch.zeros_like(left_alone[row]),
                )
    return TextSamples(texts, samples.lengths, num_rows, passes, num_scored=num_scored)


@torch.inference_mode()
def text_qualities(
    model: nn.Module, latents: Tensor, texts: list[list[int]], batch_tokens: int = 1536
) -> list[Tensor]:
    """Return the probability of each word to be right, as the quality head sees it: [n] fp64 of
    each text.

    Args:
        latents: [N, D] (or [N, M, D]) in the encoder's space.
        texts: N, without EOS.
        batch_tokens: maximum padded positions per pass.
    """
    config, device = model.config, device_of(model)
    lengths = torch.tensor([len(text) + 1 for text in texts])
    found: list[Tensor] = [torch.empty(0, dtype=torch.float64)] * len(texts)
    for batch in token_budget_batches(lengths.tolist(), batch_tokens):
        index = torch.from_numpy(batch.copy())
        own, width = lengths[index], int(lengths[index].max())
        tokens = torch.full((len(index), width), config.pad_token_id)
        for row, sample in enumerate(index.tolist()):
            tokens[row, : len(texts[sample]) + 1] = torch.tensor(
                [*texts[sample], config.eos_token_id]
            )
        real = torch.arange(width) < own[:, None]
        words = (torch.arange(width) < own[:, None] - 1).flatten().nonzero()[:, 0]
        if len(words) == 0:
            continue
        given = model.scale_latents(latents[index].to(device))
        logits = model.quality_logits(
            tokens.to(device), given, None, real.to(device), words.to(device)
        )
        qualities = logits.double().sigmoid().cpu().split((own - 1).tolist())
        for sample, quality in zip(index.tolist(), qualities):
            found[sample] = quality
    return found


def _most_doubted(qualities: list[Tensor], left_alone: list[Tensor], share: float) -> list[Tensor]:
    """Return the places of the ceil(share n) words of lowest quality of each text that are not
    left alone; [k].
    """
    doubted = []
    for quality, skipped in zip(qualities, left_alone):
        order = quality.masked_fill(skipped, math.inf).argsort(stable=True)
        count = min(math.ceil(share * len(quality)), int((~skipped).sum()))
        doubted.append(order[:count])
    return doubted


def _drafts(model: nn.Module, texts: list[list[int]], masked: list[Tensor]) -> Tensor:
    """Return the texts with [MASK] at some places: [N, longest + 1] int64."""
    config = model.config
    drafts = torch.full((len(texts), max(map(len, texts)) + 1), config.pad_token_id)
    for row, (text, where) in enumerate(zip(texts, masked)):
        drafts[row, : len(text)] = torch.tensor(text)
        drafts[row, where] = config.mask_token_id
    return drafts
