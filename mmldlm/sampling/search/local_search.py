"""Local search: edit a text, embed it again, keep what comes nearer to its latent.

The model proposes: one position after the other is masked, and its conditional probabilities give likely substitutions,
insertions and deletions. Its own estimate of the embedding says what each would change, so that few of them, alone and
combined, are shown to the judge. The judge alone decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from mmldlm.errors import UserError
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.sampling.search.accounting import SamplingCost
from mmldlm.sampling.search.best_of import LENGTHS, FoundTexts, write_candidate
from mmldlm.sampling.search.combine import promising_texts
from mmldlm.sampling.search.edits import Editor, Edits, Text
from mmldlm.sampling.search.judge import Judge, cosines
from mmldlm.sampling.text.length_rule import most_probable_lengths

# Latents whose beams are in memory at once; no result depends on it.
GROUP = 64
# Texts of one member of a beam that are ranked for the judge; more than it can see in a round, as some were seen.
MOST_PROMISING = 64
# The search of a latent ends after PATIENCE rounds in which its best cosine rose by less than MIN_GAIN.
MIN_GAIN, PATIENCE = 1e-4, 2


@dataclass(frozen=True)
class LocalSearchSettings:
    """Extent of a local search.

    Attributes:
        judge_calls: most texts that the judge embeds for one latent.
        num_starts: texts that the search starts from (`best_of.candidate`).
        beam: distinct texts that are kept after each round; the second and later ones are edited only where the first
            did not get nearer in the last round.
        calls_a_round: texts that are judged in a round.
        max_edits: edits that one new text combines at most.
    """

    judge_calls: int = 64
    num_starts: int = 4
    beam: int = 3
    calls_a_round: int = 8
    max_edits: int = 4


@dataclass
class _Found:
    """A judged text; edits are proposed when it is edited for the first time."""

    text: Text
    embedding: np.ndarray
    cosine: float
    edits: Edits | None = None


@dataclass
class _Beam:
    """The state of one latent's search."""

    owner: int
    target: np.ndarray
    members: list[_Found] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    calls: int = 0
    stale: int = 0
    depth: int = 0
    ended: bool = False

    @property
    def best(self) -> float:
        """Cosine of the text to return."""
        return self.members[0].cosine if self.members else -np.inf

    def goes_on(self, most_calls: int) -> bool:
        """Whether another round may find a nearer text."""
        return self.calls < most_calls and self.stale < PATIENCE and not self.ended

    def edited(self) -> list[_Found]:
        """The texts to edit: the nearest alone as long as it gets nearer, else all."""
        return self.members if self.stale else self.members[:1]

    def add(self, found: _Found, size: int) -> None:
        """Keep the nearest texts; of equal ones the earlier."""
        self.members = sorted([*self.members, found], key=lambda one: -one.cosine)[:size]


def local_search(
    pretrained: Pretrained,
    latents: Tensor,
    judge: Judge,
    *,
    settings: LocalSearchSettings | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> FoundTexts:
    """Search for the text of each latent whose embedding is nearest to it; references are never read.

    The cosine of a text with its latent never falls, and no latent takes more than `judge_calls` texts of the judge.

    Args:
        latents: [N, D] (or [N, M, D]) in the encoder's space.
        judge: used for this call alone, so that its counts are those of this search.
        seed: of the draws among the texts that the search starts from; the search itself draws nothing.
        progress: called after every round with the latents that are finished and all.
        options: of `TextTask.write_texts`, for these texts.

    Raises:
        UserError: a task without masked positions to refill.
        MmldlmError: NaN logits or embeddings.
    """
    settings = settings or LocalSearchSettings()
    task, count = pretrained.task, len(latents)
    if not task.fills_lengths:
        raise UserError(
            "--search best_of for a task that cannot refill single tokens of a text",
            f"--search local with task={task.name}",
            "add --search best_of, or use a checkpoint of masked diffusion",
        )
    cost = SamplingCost(count)
    starts, depth = _starts(pretrained, latents, settings, seed, options, cost)
    beams: list[_Beam] = []
    for first in range(0, count, GROUP):
        rows = list(range(first, min(first + GROUP, count)))
        editor = Editor(pretrained, latents[rows], cost)
        targets = [latents[row].reshape(-1, latents.shape[-1]).cpu().numpy() for row in rows]
        group = [_Beam(i, target) for i, target in enumerate(targets)]
        _judge(judge, group, [starts[row] for row in rows], settings, settings.num_starts)
        while active := [beam for beam in group if beam.goes_on(settings.judge_calls)]:
            _take_round(judge, editor, active, settings)
            if progress is not None:
                progress(first + sum(not beam.goes_on(settings.judge_calls) for beam in group), count)
        beams += group
    cost.add_judge(judge)
    cost.depth = depth + 1 + max((beam.depth for beam in beams), default=0)
    texts = [list(beam.members[0].text) for beam in beams]
    return FoundTexts(texts, np.array([beam.best for beam in beams]), np.array([beam.calls for beam in beams]), cost)


def _starts(
    pretrained: Pretrained, latents: Tensor, settings: LocalSearchSettings, seed: int, options: dict[str, Any],
    cost: SamplingCost,
) -> tuple[list[list[Text]], int]:  # fmt: skip
    """Texts that the search of each latent starts from, and the passes of the longest one."""
    lengths, depth = most_probable_lengths(pretrained.model, latents, LENGTHS)[0], 0
    starts: list[list[Text]] = [[] for _ in range(len(latents))]
    for k in range(settings.num_starts):
        samples = write_candidate(pretrained, latents, k, lengths, seed, options)
        cost.add_texts(pretrained.task, pretrained.model.config, samples)
        depth = max(depth, int(samples.passes.max()))
        for texts, text in zip(starts, samples.tokens):
            texts.append(tuple(text))
    return starts, depth


def _take_round(judge: Judge, editor: Editor, beams: list[_Beam], settings: LocalSearchSettings) -> None:
    """Edit the members of each beam, judge the most promising new texts, keep the nearest."""
    fresh = [(beam, member) for beam in beams for member in beam.edited() if member.edits is None]
    proposed = editor.propose([member.text for _, member in fresh], [beam.owner for beam, _ in fresh])
    for (_, member), edits in zip(fresh, proposed):
        member.edits = edits
    for beam in beams:
        beam.depth += 1 + (editor.depth if any(beam is other for other, _ in fresh) else 0)
    before = [beam.best for beam in beams]
    _judge(judge, beams, [_promising(beam, settings) for beam in beams], settings, settings.calls_a_round)
    for beam, best in zip(beams, before):
        beam.stale = 0 if beam.best > best + MIN_GAIN else beam.stale + 1


def _promising(beam: _Beam, settings: LocalSearchSettings) -> list[Text]:
    """New texts from all members of a beam, the most promising first."""
    found: dict[Text, float] = {}
    for member in beam.edited():
        assert member.edits is not None
        for score, text in promising_texts(
            member.text, member.edits, member.embedding, beam.target,
            max_edits=settings.max_edits, most=MOST_PROMISING,
        ):  # fmt: skip
            found[text] = max(score, found.get(text, -np.inf))
    return sorted(found, key=lambda text: -found[text])


def _judge(judge: Judge, beams: list[_Beam], texts: list[list[Text]], settings: LocalSearchSettings, most: int) -> None:
    """Judge the first texts of each beam that it has not seen, and keep the nearest; a beam without one ends."""
    strings = iter(judge.strings([text for own in texts for text in own]))
    chosen: list[tuple[_Beam, Text]] = []
    for beam, own in zip(beams, texts):
        room, number = min(most, settings.judge_calls - beam.calls), 0
        for text in own:
            string = next(strings)
            if number < room and string not in beam.seen:
                beam.seen.add(string)
                chosen.append((beam, text))
                number += 1
        beam.calls += number
        beam.ended = number == 0
    if not chosen:
        return
    embedded = judge.embed([text for _, text in chosen])
    embedded = embedded.reshape(len(chosen), -1, embedded.shape[-1])
    values = cosines(embedded, np.stack([beam.target for beam, _ in chosen]))
    for (beam, text), embedding, value in zip(chosen, embedded, values.tolist()):
        beam.add(_Found(text, embedding, value), settings.beam)
