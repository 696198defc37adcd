"""training_state.json of a checkpoint: the progress of a run.

Its values are checked wherever it is read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mmldlm.checkpoints.manifest import STATE_FILE
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.validation import describe_problems

_STEP_FOLDER = re.compile(r"step_(\d{8,})")

Count = Annotated[int, Field(ge=0, le=1 << 62)]
StepRange = Annotated[list[Count], Field(min_length=2, max_length=2)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    # Unknown keys are ignored, because later releases may add some.
    model_config = ConfigDict(strict=True, extra="ignore")


class _GuardState(_Strict):
    loss: list[Finite] = []
    norm: list[Finite] = []
    loss_scale: list[Finite] = []
    bad_share: list[StepRange] = []

    @model_validator(mode="after")
    def _loss_scale_is_whole(self) -> _GuardState:
        if self.loss_scale and (
            len(self.loss_scale) != 2 or self.loss_scale[0] <= 0 or self.loss_scale[1] < 0
        ):
            raise ValueError(
                f"loss_scale={self.loss_scale}: [scale, steps without an overflow], or []"
            )
        return self


class _SavedState(_Strict):
    """The fields of TrainingState (mmldlm/training/state.py); those with a default may be
    missing.
    """

    global_batch: Annotated[int, Field(ge=1, le=1 << 62)]
    num_samples: Annotated[int, Field(ge=1, le=1 << 62)]
    seed: Count = 0
    step: Count
    applied_steps: Count
    consumed_samples: Count = 0
    skipped_steps: Count = 0
    consecutive_skips: Count = 0
    first_skip: Annotated[int, Field(ge=-1, le=1 << 62)] = -1
    num_rollbacks: Count = 0
    lr_scale: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    rolled_back_to: Annotated[int, Field(ge=-1, le=1 << 62)] = -1
    applied_at_rollback: Annotated[int, Field(ge=-1, le=1 << 62)] = -1
    passed_over: list[StepRange] = []
    guard: _GuardState = _GuardState()
    evaluation_left: bool = False
    plan: str = ""
    data: str = ""
    versions: dict[str, str] = {}

    @model_validator(mode="after")
    def _numbers_agree(self) -> _SavedState:
        if self.applied_steps > self.step:
            raise ValueError(f"applied_steps={self.applied_steps} of step={self.step}")
        for first, end in self.passed_over:
            if first >= end:
                raise ValueError(
                    f"passed_over has [{first}, {end}): the first of these steps is not before"
                    " the end"
                )
        return self


def read_training_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of training_state.json: keys that it does not have are missing, unknown
    ones are kept.

    Raises:
        ValueError: not JSON, or not the state of a run; the message names file and key.
        OSError: it cannot be read.
    """
    path = checkpoint / STATE_FILE
    text = read_bytes(path)
    try:
        values = json.loads(text.decode("utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"a JSON {type(values).__name__}, expected an object")
        state = _SavedState(**values)
    except ValidationError as error:
        raise ValueError(f"{path} is damaged: {describe_problems(error)}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is damaged: nested too deep") from error
    except ValueError as error:
        # JSON and UTF-8 both raise it.
        raise ValueError(f"{path} is damaged: {error}") from error
    named = _STEP_FOLDER.fullmatch(checkpoint.name)
    if named is not None and int(named[1]) != state.step:
        raise ValueError(
            f"{path} is damaged: step {state.step} in a checkpoint of step {int(named[1])}"
        )
    return values
