"""The objective of the corrector task: that of translation, of a model that reads hypotheses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmldlm.tasks.corrector.model import Hypotheses
from mmldlm.tasks.translation.objective import TranslationObjective


class CorrectorObjective(TranslationObjective):
    """(model, noised batch) -> loss and metric sums, of batches with hypotheses or without."""

    def _more_arguments(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        if "hypothesis_given" not in tensors:
            return {}
        names = (f"hypothesis_{name}" for name in Hypotheses._fields)
        return {"side_inputs": Hypotheses(*(tensors[name] for name in names))}
