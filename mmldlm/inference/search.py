"""The options of a search in `mmldlm sample` and `mmldlm evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmldlm.errors import UserError
from mmldlm.inference.judges import JUDGES, best_of
from mmldlm.inference.local_search import LocalSearchSettings, local_search
from mmldlm.sampling.judge import FoundTexts, Judge
from mmldlm.tasks.pretrained import Pretrained
from mmldlm.tasks.text_task import TextTask
from mmldlm.utils import option_types

SEARCHES = ("best_of", "local")
# argparse settings of the options; None everywhere means that an option was not given.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "search": {
        "choices": SEARCHES,
        "help": (
            "embed written texts again and keep the nearest to the embedding given: best_of"
            " several, or a local search that edits them"
        ),
    },
    "num_candidates": {
        "type": option_types.count,
        "metavar": "N",
        "help": "texts of --search best_of for an embedding (default 16)",
    },
    "correct": {
        "type": option_types.count,
        "metavar": "N",
        "help": (
            "write texts, embed them, and let the model edit the nearest from that, in about N"
            " rounds of 16 edits; the best text by embedding and log-probabilities is kept (a"
            " model of task=corrector)"
        ),
    },
    "encoder_calls": {
        "type": option_types.count,
        "metavar": "E",
        "help": "most texts that --search local embeds for an embedding (default 64)",
    },
    "judge": {
        "choices": tuple(JUDGES),
        "help": (
            "what embeds the texts of --search: the encoder of the training data (default), or"
            " t2l, the model's own estimate, where the encoder is missing"
        ),
    },
}
NUM_CANDIDATES = 16
READERS = {"num_candidates": "best_of", "encoder_calls": "local"}
# Of `write_texts`: a search chooses samplers, lengths and temperatures itself, and reads the
# embedding as it is.
OWN_CHOICES = ("sampler", "temperature", "num_beams", "condition_timestep")


@dataclass(frozen=True)
class SearchOptions:
    """What was asked for; None: not given.

    Raises:
        UserError: an option without the search that reads it, or out of range.
    """

    search: str | None = None
    correct: int | None = None
    num_candidates: int | None = None
    encoder_calls: int | None = None
    judge: str | None = None

    @property
    def way(self) -> str | None:
        """One of SEARCHES, "correct", or None."""
        return self.search if self.correct is None else "correct"

    def __post_init__(self):
        if self.correct is not None and self.search is not None:
            raise UserError("--correct or --search", "both", "omit one of them")
        if self.correct is not None and self.correct < 1:
            raise UserError(
                "--correct of at least 1", str(self.correct), "choose a larger number, or omit it"
            )
        for key, reader in (*READERS.items(), ("judge", None)):
            value = getattr(self, key)
            if value is None:
                continue
            if self.way is None or reader not in (None, self.way):
                expected = f"{_option(key)} with --search {reader or ' or '.join(SEARCHES)}"
                found = f"{_option(key)} {value} " + (
                    f"with --search {self.search}" if self.search else "alone"
                )
                raise UserError(expected, found, f"omit it, or add --search {reader or 'local'}")
            if reader is not None and value < 1:
                raise UserError(
                    f"{_option(key)} of at least 1", str(value), "choose a larger number"
                )

    @classmethod
    def of(cls, values: Any) -> SearchOptions:
        """Those among the attributes of an object."""
        return cls(**{key: getattr(values, key) for key in ARGUMENTS})

    def check(self, task: TextTask, given: Collection[str]) -> None:
        """Check the search against the task and the other options that were given.

        Args:
            given: names of the options that the user gave a value.

        Raises:
            UserError: a task that lacks the search, or an option that the search chooses itself.
        """
        if self.way is None:
            return
        name = f"--search {self.search}" if self.correct is None else "--correct"
        own = [_option(key) for key in OWN_CHOICES if key in given]
        if own:
            found = f"{', '.join(own)} with {name}, which chooses its samplers itself"
            raise UserError(
                f"{name} without options that it does not read",
                found,
                f"omit them, or omit {name}",
            )
        if self.correct is not None:
            task.check_correction()
            return
        draws = (
            "ancestral" in task.samplers.get("l2t", ()) and "temperature" in task.sampling_options
        )
        if not draws or self.search == "local" and not task.fills_lengths:
            known = " or ".join(
                name for name, has in zip(SEARCHES, (draws, task.fills_lengths)) if has
            )
            expected = (
                f"--search {known} for task={task.name}"
                if known
                else f"no --search for task={task.name}"
            )
            raise UserError(
                expected,
                f"--search {self.search}",
                "choose one that the task has, or omit --search",
            )

    def describe(self) -> str:
        """The search in a few words."""
        judge = "the encoder" if (self.judge or "encoder") == "encoder" else "the model's own t2l"
        if self.correct is not None:
            return f"{self.correct} rounds of correction by the embeddings of {judge}"
        if self.search == "best_of":
            return f"best of {self.num_candidates or NUM_CANDIDATES} by {judge}"
        return (
            f"local search, at most {self.encoder_calls or LocalSearchSettings.judge_calls} calls"
            f" of {judge}"
        )

    def open_judge(self, pretrained: Pretrained) -> Judge:
        """Return a judge with empty counts.

        Raises:
            UserError: it is not available.
        """
        return JUDGES[self.judge or "encoder"](pretrained)

    def run(
        self,
        pretrained: Pretrained,
        latents: Tensor,
        judge: Judge,
        *,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> FoundTexts:
        """Search the text of each latent [N, D] (or [N, M, D]).

        Args:
            judge: of `open_judge`, not used before.
            options: of `TextTask.write_texts`, without OWN_CHOICES.
        """
        if self.correct is not None:
            return pretrained.task.correct_texts(
                pretrained,
                latents,
                judge,
                rounds=self.correct,
                seed=seed,
                progress=progress,
                **options,
            )
        if self.search == "best_of":
            count = self.num_candidates or NUM_CANDIDATES
            return best_of(
                pretrained,
                latents,
                judge,
                num_candidates=count,
                seed=seed,
                progress=progress,
                **options,
            )
        settings = LocalSearchSettings(self.encoder_calls or LocalSearchSettings.judge_calls)
        return local_search(
            pretrained, latents, judge, settings=settings, seed=seed, progress=progress, **options
        )


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")
