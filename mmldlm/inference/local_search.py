"""Local search: edit a text, embed it again, keep what comes nearer to its latent.

The model proposes: one position after the other is masked, and its conditional probabilities give
likely substitutions, insertions and deletions. Its own estimate of the embedding says what each
would change. The few most promising edits by both go to the judge, which alone decides. Where
edits lead no further, the model writes new texts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from mmldlm.inference.edits import Editor, Edits, Text
from mmldlm.inference.judges import LENGTHS, write_candidate
from mmldlm.inference.search_options import ENCODER_CALLS
from mmldlm.sampling.decoding import most_probable_lengths
from mmldlm.sampling.judge import FoundTexts, Judge, SamplingCost, cosines
from mmldlm.sampling.records import keeping_finished
from mmldlm.tasks.text_task import Pretrained

# Latents whose beams are in memory at once; no result depends on it.
GROUP = 64
# After PATIENCE rounds in which the best score of a latent rose by less than MIN_GAIN, new texts
# are written for it.
MIN_GAIN, PATIENCE = 1e-4, 2


@dataclass(frozen=True)
class LocalSearchSettings:
    """Extent of a local search.

    Attributes:
        judge_calls: Most texts that the judge embeds for one latent.
        num_starts: Texts that the search starts from (`judges.candidate`).
        beam: Distinct texts that are kept after each round; the second and later ones are edited
            only where the first did not get better in the last round.
        calls_a_round: Edited texts that are judged in a round. As many new texts are written
            whenever edits lead no further, until the calls are used up or the model writes nothing
            new.
        cosine_a_nat: Cosine that a nat of the edits' log-ratios is worth when judged texts are
            compared. 0: the encoder alone decides.
    """

    judge_calls: int = ENCODER_CALLS
    num_starts: int = 4
    beam: int = 3
    calls_a_round: int = 8
    cosine_a_nat: float = 0.0


@dataclass
class _Found:
    """A judged text; edits are proposed when it is edited for the first time.

    Attributes:
        log_ratio: Sum over the edits that lead to it from a text that the model wrote, in nats.
        score: What the search maximizes: the cosine, and the log-ratio by `cosine_a_nat`.
    """

    text: Text
    embedding: np.ndarray
    cosine: float
    log_ratio: float
    score: float
    edits: Edits | None = None


@dataclass
class _Beam:
    """The state of one latent's search.

    Attributes:
        row: Index of the latent.
        owner: Index of the latent in its group.
        target: The latent. [M, D]
        members: The best texts, best first.
        seen: Strings of all judged texts.
        written: Candidates of `judges.candidate` so far.
        calls: Texts judged.
        stale: Rounds without a gain.
        depth: Passes one after the other, the judge's among them.
        writing_depth: Passes of the longest text of the present round of writing.
        edited_out: Whether edits of the members gave no new text.
        ended: Whether the model wrote no new text either.
    """

    row: int
    owner: int
    target: np.ndarray
    members: list[_Found] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    written: int = 0
    calls: int = 0
    stale: int = 0
    depth: int = 0
    writing_depth: int = 0
    edited_out: bool = False
    ended: bool = False

    @property
    def best(self) -> float:
        """Score of the text to return."""
        return self.members[0].score if self.members else -np.inf

    def goes_on(self, most_calls: int) -> bool:
        """Whether another round may find a better text."""
        return self.calls < most_calls and not self.ended

    @property
    def is_stuck(self) -> bool:
        """Whether edits lead no further."""
        return self.stale >= PATIENCE or self.edited_out

    def edited(self) -> list[_Found]:
        """The texts to edit: the best alone as long as it gets better, else all."""
        return self.members if self.stale else self.members[:1]

    def add(self, found: _Found, size: int) -> None:
        """Keep the best texts; of equal ones the earlier."""
        self.members = sorted([*self.members, found], key=lambda one: -one.score)[:size]


def local_search(
    pretrained: Pretrained,
    latents: Tensor,
    judge: Judge,
    *,
    settings: LocalSearchSettings | None = None,
    editor_class: type[Editor] = Editor,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> FoundTexts:
    """Search for the text of each latent whose embedding is nearest to it; references are never
    read.

    The score of a text never falls (by default its cosine with its latent), and no latent takes
    more than `judge_calls` texts of the judge.

    Args:
        pretrained: A model of masked diffusion, whose single tokens can be refilled.
        latents: Latents in the encoder's space, [N, D] (or [N, M, D]).
        judge: Judge used for this call alone, so that its counts are those of this search.
        editor_class: Class of the editors, which propose the edits.
        seed: Seed of the draws of the texts that the model writes; edits draw nothing.
        progress: Callback after every round, with the number of finished latents and of all.
        options: Options of `TextTask.write_texts`, for these texts.

    Raises:
        MmldlmError: NaN logits or embeddings.
        SamplingInterrupted: an interrupt after the first search that has ended.
    """
    settings = settings or LocalSearchSettings()
    count = len(latents)
    cost = SamplingCost(count)
    found = FoundTexts(
        [[] for _ in range(count)], np.zeros(count), np.zeros(count), np.zeros(count, int), cost
    )
    lengths = most_probable_lengths(pretrained.model, latents, LENGTHS)[0]
    write = partial(_write, pretrained, latents, lengths, seed, options, cost)
    with keeping_finished(found) as finished:
        for first in range(0, count, GROUP):
            rows = list(range(first, min(first + GROUP, count)))
            editor = editor_class(pretrained, latents[rows], cost)
            targets = [latents[row].reshape(-1, latents.shape[-1]).cpu().numpy() for row in rows]
            group = [_Beam(row, i, target) for i, (row, target) in enumerate(zip(rows, targets))]
            _take_writing_round(judge, write, group, settings, settings.num_starts)
            active = _keep_ended(found, finished, group, settings.judge_calls)
            while active:
                stuck = [beam for beam in active if beam.is_stuck]
                edited = [beam for beam in active if not beam.is_stuck]
                _take_editing_round(judge, editor, edited, settings)
                _take_writing_round(judge, write, stuck, settings, settings.calls_a_round)
                active = _keep_ended(found, finished, active, settings.judge_calls)
                if progress is not None:
                    progress(len(finished), count)
    cost.add_judge(judge)
    return found


def _keep_ended(
    found: FoundTexts, finished: list[int], beams: list[_Beam], most_calls: int
) -> list[_Beam]:
    """Write the best texts of the searches that have ended into the result, and add their rows to
    the finished ones; return the other searches.
    """
    for beam in beams:
        if beam.goes_on(most_calls):
            continue
        best = beam.members[0]
        found.tokens[beam.row] = list(best.text)
        found.cosine[beam.row], found.score[beam.row] = best.cosine, best.score
        found.calls[beam.row] = beam.calls
        found.cost.depth = max(found.cost.depth, beam.depth)
        finished.append(beam.row)
    return [beam for beam in beams if beam.goes_on(most_calls)]


def _write(
    pretrained: Pretrained,
    latents: Tensor,
    lengths: Tensor,
    seed: int,
    options: dict[str, Any],
    cost: SamplingCost,
    beams: list[_Beam],
    k: int,
) -> list[Text]:
    """Return the k-th text of each beam, numbered as `judges.best_of` numbers its candidates, and
    count its passes.
    """
    rows = [beam.row for beam in beams]
    own = {**options, "indices": rows}
    samples = write_candidate(pretrained, latents[rows], k, lengths[rows], seed, own)
    cost.add_texts(samples, pretrained.task.writing_flops(pretrained.model.config, samples))
    for beam, passes in zip(beams, samples.passes.tolist()):
        beam.writing_depth = max(beam.writing_depth, passes)
    return [tuple(text) for text in samples.tokens]


def _take_writing_round(
    judge: Judge,
    write: Callable[[list[_Beam], int], list[Text]],
    beams: list[_Beam],
    settings: LocalSearchSettings,
    number: int,
) -> None:
    """Write and judge new texts of each beam; one that is better is edited again, one without a
    new text ends.
    """
    texts: list[dict[Text, float]] = [{} for _ in beams]
    for first in sorted({beam.written for beam in beams}):
        places = [i for i, beam in enumerate(beams) if beam.written == first]
        for k in range(first, first + number):
            for i, text in zip(places, write([beams[i] for i in places], k)):
                texts[i][text] = 0.0
    for beam in beams:
        beam.written += number
        beam.depth, beam.writing_depth = beam.depth + beam.writing_depth + 1, 0
    before = [beam.best for beam in beams]
    numbers = _judge(judge, beams, texts, settings, number)
    for beam, best, judged in zip(beams, before, numbers):
        beam.ended = judged == 0
        if beam.best > best + MIN_GAIN:
            beam.stale, beam.edited_out = 0, False


def _take_editing_round(
    judge: Judge, editor: Editor, beams: list[_Beam], settings: LocalSearchSettings
) -> None:
    """Edit the members of each beam, judge the most promising new texts, keep the best."""
    fresh = [(beam, member) for beam in beams for member in beam.edited() if member.edits is None]
    if fresh:
        embedded = np.stack([member.embedding for _, member in fresh])
        proposed = editor.propose(
            [member.text for _, member in fresh], [beam.owner for beam, _ in fresh], embedded
        )
        for (_, member), edits in zip(fresh, proposed):
            member.edits = edits
    for beam in beams:
        beam.depth += 1 + (editor.depth if any(beam is other for other, _ in fresh) else 0)
    before = [beam.best for beam in beams]
    texts = [_promising(beam) for beam in beams]
    numbers = _judge(judge, beams, texts, settings, settings.calls_a_round)
    for beam, best, num_judged in zip(beams, before, numbers):
        beam.stale = 0 if beam.best > best + MIN_GAIN else beam.stale + 1
        beam.edited_out = num_judged == 0


def _promising(beam: _Beam) -> dict[Text, float]:
    """New texts from all members of a beam, the most promising first, with the log-ratio of the
    best way to each.
    """
    best_ways: dict[Text, tuple[float, float]] = {}
    for member in beam.edited():
        assert member.edits is not None
        scores = member.edits.scores(member.embedding, beam.target).tolist()
        for row, (score, log_ratio) in enumerate(zip(scores, member.edits.log_ratios.tolist())):
            text, way = member.edits.apply(member.text, row), (score, member.log_ratio + log_ratio)
            best_ways[text] = max(way, best_ways.get(text, way))
    return {
        text: best_ways[text][1]
        for text in sorted(best_ways, key=lambda text: -best_ways[text][0])
    }


def _judge(
    judge: Judge,
    beams: list[_Beam],
    texts: list[dict[Text, float]],
    settings: LocalSearchSettings,
    most: int,
) -> list[int]:
    """Judge the first texts of each beam that it has not seen, keep the best, and return how many
    were judged.

    Args:
        texts: Texts with the log-ratio of each.
    """
    strings = iter(judge.strings([text for log_ratios in texts for text in log_ratios]))
    chosen: list[tuple[_Beam, Text, float]] = []
    numbers = []
    for beam, log_ratios in zip(beams, texts):
        room, num_judged = min(most, settings.judge_calls - beam.calls), 0
        for text, log_ratio in log_ratios.items():
            string = next(strings)
            if num_judged < room and string not in beam.seen:
                beam.seen.add(string)
                chosen.append((beam, text, log_ratio))
                num_judged += 1
        beam.calls += num_judged
        numbers.append(num_judged)
    if not chosen:
        return numbers
    embedded = judge.embed([text for _, text, _ in chosen])
    embedded = embedded.reshape(len(chosen), -1, embedded.shape[-1])
    values = cosines(embedded, np.stack([beam.target for beam, _, _ in chosen]))
    for (beam, text, log_ratio), embedding, cosine in zip(chosen, embedded, values.tolist()):
        score = cosine + settings.cosine_a_nat * log_ratio
        beam.add(_Found(text, embedding, cosine, log_ratio, score), settings.beam)
    return numbers
