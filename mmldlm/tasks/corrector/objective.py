"""The objective of the corrector task: that of translation, of a model that reads hypotheses."""

from __future__ import annotations

from typing import Any

from mmldlm.tasks.corrector.noiser import CorrectorBatch
from mmldlm.tasks.translation.noiser import TranslationBatch
from mmldlm.tasks.translation.objective import TranslationObjective


class CorrectorObjective(TranslationObjective):
    """(model, noised batch) -> loss and metric sums, of batches with hypotheses or without."""

    def _more_arguments(self, batch: TranslationBatch) -> dict[str, Any]:
        assert isinstance(batch, CorrectorBatch)
        return {} if batch.hypotheses is None else {"side_inputs": batch.hypotheses}
