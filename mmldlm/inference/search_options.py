"""The options of `mmldlm sample` and `mmldlm evaluate` for a search with the encoder; no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmldlm.errors import UserError
from mmldlm.utils.settings import Settings, flag, flags, option

# A task imports torch, which --help does without.
if TYPE_CHECKING:
    from mmldlm.tasks.text_task import TextTask

SEARCHES = ("best_of", "local")
JUDGES = ("encoder", "t2l")
"""What embeds the texts of a search (`inference/judges.py`), the default first."""
NUM_CANDIDATES, ENCODER_CALLS = 16, 64
# Title of the group of --help.
OF_SEARCH = "search with an encoder"
# Of `write_texts`: a search chooses samplers, lengths and temperatures itself, and reads the
# embedding as it is.
OWN_CHOICES = ("sampler", "temperature", "num_beams", "condition_timestep")


@dataclass(frozen=True)
class SearchOptions(Settings):
    """What `mmldlm sample` and `mmldlm evaluate` search with; None: not given.

    Raises:
        UserError: an option without the search that reads it, or out of range.
    """

    search: str | None = option(
        None,
        "embed written texts again and keep the nearest to the embedding given: best_of several,"
        " or a local search that edits them",
        group=OF_SEARCH,
        choices=SEARCHES,
    )
    num_candidates: int | None = option(
        None,
        f"texts of --search best_of for an embedding (default {NUM_CANDIDATES})",
        int,
        low=1,
        group=OF_SEARCH,
        metavar="N",
    )
    correct: int | None = option(
        None,
        "write texts, embed them, and let the model edit the nearest from that, in about N rounds"
        " of 16 edits; the best text by embedding and log-probabilities is kept (a model of"
        " task=corrector)",
        int,
        low=1,
        group=OF_SEARCH,
        metavar="N",
    )
    encoder_calls: int | None = option(
        None,
        f"most texts that --search local embeds for an embedding (default {ENCODER_CALLS})",
        int,
        low=1,
        group=OF_SEARCH,
        metavar="E",
    )
    judge: str | None = option(
        None,
        "what embeds the texts of --search: the encoder of the training data (default), or t2l,"
        " the model's own estimate, where the encoder is missing",
        group=OF_SEARCH,
        choices=JUDGES,
    )

    @property
    def way(self) -> str | None:
        """One of SEARCHES, "correct", or None."""
        return self.search if self.correct is None else "correct"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.correct is not None and self.search is not None:
            raise UserError("--correct or --search", "both", "omit one of them")
        readers = {"num_candidates": "best_of", "encoder_calls": "local", "judge": None}
        for key, reader in readers.items():
            value = getattr(self, key)
            if value is None or (self.way is not None and reader in (None, self.way)):
                continue
            expected = f"{flag(key)} with --search {reader or ' or '.join(SEARCHES)}"
            alone = f"with --search {self.search}" if self.search else "alone"
            fix = f"omit it, or add --search {reader or 'local'}"
            raise UserError(expected, f"{flag(key)} {value} {alone}", fix)

    def check_search(self, task: TextTask, given: Collection[str]) -> None:
        """Check the search against the task and the other options that were given.

        Args:
            given: Names of the options that the user gave a value.

        Raises:
            UserError: a task that lacks the search, or an option that the search chooses itself.
        """
        if self.way is None:
            return
        name = f"--search {self.search}" if self.correct is None else "--correct"
        if chosen_by_search := [key for key in OWN_CHOICES if key in given]:
            raise UserError(
                f"{name} without options that it does not read",
                f"{flags(chosen_by_search)} with {name}, which chooses its samplers itself",
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
            raise UserError(
                f"--search {known} for task={task.name}"
                if known
                else f"no --search for task={task.name}",
                f"--search {self.search}",
                "choose one that the task has, or omit --search",
            )

    def describe_search(self) -> str:
        """Return the search in a few words."""
        judge = "the encoder" if (self.judge or "encoder") == "encoder" else "the model's own t2l"
        if self.correct is not None:
            return f"{self.correct} rounds of correction by the embeddings of {judge}"
        if self.search == "best_of":
            return f"best of {self.num_candidates or NUM_CANDIDATES} by {judge}"
        return f"local search, at most {self.encoder_calls or ENCODER_CALLS} calls of {judge}"
