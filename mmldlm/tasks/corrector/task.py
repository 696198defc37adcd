"""The corrector task: translation that also corrects an earlier text for the same latent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmldlm.models.flops import Flops, timestep_flops
from mmldlm.sampling.judge import FoundTexts, Judge
from mmldlm.tasks.corrector.config import CorrectorConfig
from mmldlm.tasks.corrector.data import CorrectorData, open_data
from mmldlm.tasks.corrector.model import CorrectorMMDiT
from mmldlm.tasks.corrector.noiser import CorrectorBatch, CorrectorNoiser
from mmldlm.tasks.text_task import Pretrained
from mmldlm.tasks.translation.noiser import Noiser, TranslationBatch
from mmldlm.tasks.translation.objective import TranslationObjective
from mmldlm.tasks.translation.task import TranslationTask
from mmldlm.tasks.validation import PassTotals


class CorrectorObjective(TranslationObjective):
    """(model, noised batch) -> loss and metric sums, of batches with hypotheses or without."""

    def _more_arguments(self, batch: TranslationBatch) -> dict[str, Any]:
        assert isinstance(batch, CorrectorBatch)
        return {} if batch.hypotheses is None else {"side_inputs": batch.hypotheses}


class CorrectorTask(TranslationTask):
    """The translation task with hypotheses (docs/objectives.md#the-corrector)."""

    name = "corrector"
    config_class = CorrectorConfig
    architecture = "CorrectorMMDiT"

    # -- data and costs ---------------------------------------------------------------------------

    def open_data(self, config: CorrectorConfig) -> CorrectorData:
        return open_data(config)

    def activation_bytes(self, config: CorrectorConfig, length: int) -> int:
        """Return what the translation task does, with the words of the hypotheses, the factor of
        each, and their product.
        """
        size = 4 if config.training.dtype == "fp32" else 2
        words = 3 * config.training.train_batch_size * length * config.model.hidden_size
        return super().activation_bytes(config, length) + size * words

    def estimate_flops(
        self, model_config: Any, lengths: Sequence[float], num_scored: float, **work: Any
    ) -> Flops:
        """Return the forward FLOPs of a batch: z - z_hat beside z, and the words of the
        hypotheses, which are not always given.
        """
        flops = super().estimate_flops(model_config, lengths, num_scored, **work)
        width, cond = model_config.hidden_size, model_config.cond_dim
        return flops._replace(
            text=flops.text + 4 * sum(lengths) * width * width,
            latent_inputs=2 * flops.latent_inputs + len(lengths) * 2 * cond * (cond + width),
            first_layers=2 * flops.first_layers - timestep_flops(len(lengths), cond),
        )

    # -- model, batches and loss ------------------------------------------------------------------

    def model_class(self) -> type[CorrectorMMDiT]:
        return CorrectorMMDiT

    def noiser_class(self, config: CorrectorConfig) -> type[CorrectorNoiser]:
        return CorrectorNoiser

    def collator(
        self, data: CorrectorData, seed: int | None = None, *words: Any, **options: Any
    ) -> Noiser:
        """Return the noiser; that of training reads the hypotheses."""
        if seed is None and data.hypotheses is not None:
            options.setdefault("hypotheses", data.hypotheses[0])
        return super().collator(data, seed, *words, **options)

    def objective(self, config: CorrectorConfig) -> CorrectorObjective:
        return CorrectorObjective(config)

    def validation_passes(self, data: CorrectorData, seed: int) -> list[tuple[str, Noiser]]:
        """Return the passes of the translation task, and two over texts that are wholly masked
        where there is a hypothesis: one that does not read it, and one that does.
        """
        assert data.hypotheses is not None
        options: dict[str, Any] = {"condition_dropout": 0.0, "hypotheses": data.hypotheses[1]}
        return [
            *super().validation_passes(data, seed),
            *(
                (name, self.collator(data, seed, "l2t", **options, reads_hypotheses=is_read))
                for name, is_read in (("l2t_uncorrected", False), ("l2t_corrected", True))
            ),
        ]

    def validation_figures(self, totals: dict[str, PassTotals]) -> dict[str, float]:
        """Return the figures of the translation task, and l2t_gain_hypothesis: NELBO without minus
        with the hypotheses that exist, of texts that are wholly masked where there is one.
        """
        figures = super().validation_figures(totals)
        if "l2t_corrected_nelbo" in figures:
            figures["l2t_gain_hypothesis"] = (
                figures["l2t_uncorrected_nelbo"] - figures["l2t_corrected_nelbo"]
            )
        return figures

    # -- sampling ---------------------------------------------------------------------------------

    def check_correction(self) -> None:
        pass

    def correct_texts(
        self, pretrained: Pretrained, latents: Tensor, judge: Judge, **options: Any
    ) -> FoundTexts:
        from mmldlm.tasks.corrector.sampling import correct

        return correct(pretrained, latents, judge, **options)

    # -- debugging --------------------------------------------------------------------------------

    def unused_parameters(
        self, model: CorrectorMMDiT, config: CorrectorConfig, batch: CorrectorBatch
    ) -> Sequence[str]:
        """Return those of the translation task, and those that hypotheses alone read."""
        unused = [*super().unused_parameters(model, config, batch)]
        hypotheses = batch.hypotheses
        if hypotheses is None or not bool(hypotheses.given.any()):
            names = ("to_text", "to_factor", "to_product", "to_pooled", "position")
            unused += [f"hypothesis_encoder.{name}" for name in names]
        elif bool(hypotheses.given.all()):
            unused.append("hypothesis_encoder.null_tokens")
        return unused
