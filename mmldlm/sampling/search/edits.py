"""Edits of a text that the model finds likely given its latent, and the change of embedding that it expects of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mmldlm.data.encoders.encoder import token_budget_batches
from mmldlm.sampling.device import device_of
from mmldlm.sampling.latent_sampler import pad_texts, steps_given_text
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.sampling.search.accounting import SamplingCost
from mmldlm.sampling.search.judge import cosines, estimate_embeddings, estimates_embeddings
from mmldlm.sampling.text.draw import check_finite

SUBSTITUTE, INSERT, DELETE = range(3)
# Tokens tried at each position and in each gap, and the edits of each kind that are looked at, the likeliest.
TOKENS_A_POSITION = 16
MOST = {SUBSTITUTE: 40, INSERT: 16, DELETE: 8}
# What a cosine of 1 is worth beside the model's log-probability, in nats. With far more, edits are chosen that the
# encoder likes and the model does not; without, fewer come nearer (measured in docs/sampling.md).
COSINE_NATS = 100.0

Text = tuple[int, ...]


@dataclass
class Edits:
    """Edits of one text.

    Attributes:
        kinds: SUBSTITUTE, INSERT or DELETE. [K] int64
        positions: in the text; an insertion is in front of it. [K] int64
        tokens: new ones; -1 for a deletion. [K] int64
        log_ratios: log p(new text) - log p(text) by the model, in nats, of the token alone: what another length
            changes at the other tokens is not in it. [K] fp64
        shifts: expected change of the embedding, [K, M, D] fp32; None for a model that estimates no embeddings.
    """

    kinds: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    log_ratios: np.ndarray
    shifts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.kinds)

    def scores(self, embedding: np.ndarray, target: np.ndarray) -> np.ndarray:
        """How promising each edit is, in nats: its log-ratio, and COSINE_NATS times the cosine expected after it.

        The expected embedding is the text's true one plus the shift: the error of the estimate at the text cancels.

        Args:
            embedding, target: of the text by the judge, and the latent. [M, D]

        Returns:
            [K] fp64.
        """
        expected = np.broadcast_to(embedding, (len(self), *embedding.shape))
        if self.shifts is not None:
            expected = expected + self.shifts
        return self.log_ratios + COSINE_NATS * cosines(expected, np.broadcast_to(target, expected.shape))

    def apply(self, text: Text, row: int) -> Text:
        """The text after one edit."""
        return _edit(text, int(self.kinds[row]), int(self.positions[row]), int(self.tokens[row]))


class Editor:
    """Proposes edits of texts, by the model's own probabilities at one masked position at a time.

    Args:
        pretrained: of a task of masked diffusion.
        latents: [N, D] (or [N, M, D]) in the encoder's space.
        cost: that passes of the model are added to.
        batch_tokens: maximum padded positions per pass.
    """

    def __init__(self, pretrained: Pretrained, latents: torch.Tensor, cost: SamplingCost, batch_tokens: int = 4096):
        self._pretrained, self._cost, self._batch_tokens = pretrained, cost, batch_tokens
        model = pretrained.model
        with torch.inference_mode():
            self._encoded = model.encode_latents(model.scale_latents(latents.to(device_of(model))))
        self.estimates_shifts = estimates_embeddings(pretrained)

    @property
    def depth(self) -> int:
        """Passes of `propose` one after the other."""
        return 1 + (steps_given_text(self._pretrained.latent_diffusion) if self.estimates_shifts else 0)

    def propose(self, texts: Sequence[Text], owners: Sequence[int]) -> list[Edits]:
        """Return the edits of each text, likeliest first within a kind; texts that they lead to are distinct.

        Args:
            texts: ids without EOS.
            owners: index of each text's latent.

        Raises:
            MmldlmError: NaN logits or estimates.
        """
        if not texts:
            return []
        config = self._pretrained.model.config
        mask, longest = config.mask_token_id, config.max_seq_len - 1  # EOS needs a place
        masked, places, old, kinds, sources = [], [], [], [], []
        for source, text in enumerate(texts):
            for place in range(len(text)):
                masked.append((*text[:place], mask, *text[place + 1 :]))
                old.append(text[place])
            inserts = len(text) + 1 if len(text) < longest else 0
            for place in range(inserts):
                masked.append((*text[:place], mask, *text[place:]))
                old.append(-1)
            places += [*range(len(text)), *range(inserts)]
            kinds += [SUBSTITUTE] * len(text) + [INSERT] * inserts
            sources += [source] * (len(text) + inserts)
        read = self._read(masked, places, old, [owners[source] for source in sources])
        counts = np.bincount(sources, minlength=len(texts))
        ends = np.cumsum(counts)
        rows = [range(end - count, end) for end, count in zip(ends.tolist(), counts.tolist())]
        found = [_edits(text, own, places, kinds, read) for text, own in zip(texts, rows)]
        if self.estimates_shifts:
            self._estimate_shifts(texts, found)
        return found

    @torch.inference_mode()
    def _read(self, masked: list[Text], places: list[int], old: list[int], owners: list[int]) -> _Read:
        """What the model says at the one masked position of each of R texts."""
        pretrained, config = self._pretrained, self._pretrained.model.config
        count = min(TOKENS_A_POSITION, config.vocab_size - 3)
        numbers = len(masked)
        read = _Read(np.empty((numbers, count), dtype=np.int64), np.empty((numbers, count)), np.empty(numbers))
        lengths = [len(text) + 1 for text in masked]
        device = device_of(pretrained.model)
        for batch in token_budget_batches(lengths, self._batch_tokens):
            rows = batch.tolist()
            ids, real = pad_texts([masked[row] for row in rows], config.eos_token_id, config.pad_token_id, device)
            positions = torch.tensor([i * ids.shape[1] + places[row] for i, row in enumerate(rows)], device=device)
            share = torch.tensor([1 / lengths[row] for row in rows], dtype=torch.float64, device=device)
            own = torch.tensor([owners[row] for row in rows], device=device)
            logits = pretrained.model(
                ids, None, pretrained.text_diffusion.timestep_of(share).float(), None, real, text_positions=positions,
                encoded=self._encoded.select(own),
            )["text_logits"]  # fmt: skip
            logits[:, [config.mask_token_id, config.pad_token_id, config.eos_token_id]] = float("-inf")
            values = logits.log_softmax(-1)
            best, index = values.topk(count)
            check_finite(best)
            given = torch.tensor([max(old[row], 0) for row in rows], device=device)
            read.tokens[batch], read.log_probs[batch] = index.cpu().numpy(), best.cpu().numpy()
            read.old_log_probs[batch] = values.gather(1, given[:, None])[:, 0].cpu().numpy()
        self._count(lengths, scored=1)
        return read

    def _estimate_shifts(self, texts: Sequence[Text], found: list[Edits]) -> None:
        """Fill in `shifts`: embeddings after an edit minus those before, both estimated by the model."""
        changed = [edits.apply(text, row) for text, edits in zip(texts, found) for row in range(len(edits))]
        embedded = estimate_embeddings(self._pretrained, [*texts, *changed], self._batch_tokens)
        embedded = embedded.reshape(len(embedded), -1, embedded.shape[-1])
        start = len(texts)
        for before, edits in zip(embedded, found):
            edits.shifts = embedded[start : start + len(edits)] - before
            start += len(edits)
        self._count([len(text) + 1 for text in (*texts, *changed)], scored=0, passes=self.depth - 1)

    def _count(self, lengths: Sequence[int], scored: int, passes: int = 1) -> None:
        task, config = self._pretrained.task, self._pretrained.model.config
        counts = np.bincount(lengths)
        flops = sum(counts[n] * task.pass_flops(config, n, scored) for n in np.flatnonzero(counts).tolist())
        self._cost.add_rows(passes * len(lengths), passes * sum(lengths), passes * float(flops))


@dataclass
class _Read:
    """At the one masked position of each of R texts: the likeliest tokens, their log p [R, K], the old one's [R]."""

    tokens: np.ndarray
    log_probs: np.ndarray
    old_log_probs: np.ndarray


def _edit(text: Text, kind: int, place: int, token: int) -> Text:
    new = () if kind == DELETE else (token,)
    return text[:place] + new + text[place + (kind != INSERT) :]


def _edits(text: Text, rows: range, places: list[int], kinds: list[int], read: _Read) -> Edits:
    """The likeliest edits of one text, from what the model says at its positions and gaps."""
    options: dict[int, list[tuple[float, int, int]]] = {SUBSTITUTE: [], INSERT: [], DELETE: []}
    for row in rows:
        place, kind, old = places[row], kinds[row], float(read.old_log_probs[row])
        gains = read.log_probs[row] - (old if kind == SUBSTITUTE else 0.0)
        options[kind] += [(float(gain), place, int(token)) for gain, token in zip(gains, read.tokens[row])]
        if kind == SUBSTITUTE and len(text) > 1:
            options[DELETE].append((-old, place, -1))
    chosen, seen = [], {text}
    for kind, found in options.items():
        number = 0
        for gain, place, token in sorted(found, key=lambda option: (-option[0], option[1], option[2])):
            changed = _edit(text, kind, place, token)
            if changed not in seen:
                seen.add(changed)
                chosen.append((kind, place, token, gain))
                number += 1
            if number == MOST[kind]:
                break
    columns = list(zip(*chosen)) or [(), (), (), ()]
    return Edits(*(np.array(column, dtype=np.int64) for column in columns[:3]), np.array(columns[3], dtype=np.float64))
