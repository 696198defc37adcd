"""The autoregressive task. Torch is imported where it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from mmldlm.models.flops import estimate_flops
from mmldlm.tasks.base import Metric
from mmldlm.tasks.baselines.ar.config import ArConfig
from mmldlm.tasks.baselines.common.data import BaselineData
from mmldlm.tasks.baselines.common.task import BaselineTask

if TYPE_CHECKING:
    from torch import Tensor

    from mmldlm.engines.base import Engine
    from mmldlm.sampling.records import TextSamples
    from mmldlm.tasks.baselines.ar.collator import ArCollator
    from mmldlm.tasks.baselines.ar.objective import ArObjective
    from mmldlm.tasks.pretrained import Pretrained
    from mmldlm.tasks.text_scores import TextScores
    from mmldlm.tasks.validation import Validation


class ArTask(BaselineTask):
    """p(x) = prod p(x_i | x_<i, z) with EOS as a token, given a latent or not."""

    name = "ar"
    config_class = ArConfig
    sums = ("loss", "text_nll_sum", "text_correct", "text_scored", "text_logits")
    metrics = (
        Metric(
            "text_loss",
            "text_nll_sum",
            "text_tokens",
            label="text",
            is_loss=True,
            evaluation="nll",
        ),
        Metric("text_accuracy", "text_correct", "text_scored", evaluation="token_accuracy"),
    )
    scored_sum = "text_scored"
    samplers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "l2t": ("greedy", "ancestral", "beam", "beam_sum"),
        "unconditional": ("ancestral", "greedy", "beam", "beam_sum"),
    }
    sampling_options = frozenset({"sampler", "temperature", "top_p", "num_beams"})
    exact_likelihood = True
    evaluation_decoding = "greedy, one token after the other, until EOS"

    def collator(
        self, data: BaselineData, seed: int | None = None, condition_dropout: float | None = None
    ) -> ArCollator:
        """Return the collator; `condition_dropout` replaces that of training."""
        from mmldlm.tasks.baselines.ar.collator import ArCollator

        config, candidates = data.config, None
        if seed is None and config.loss.text_candidates is not None:  # evaluation is exact
            from mmldlm.tasks.translation.candidates import CandidateSampler

            candidates = CandidateSampler(data)
        dropout = None
        if config.model.conditioning != "none":
            dropout = config.condition_dropout if condition_dropout is None else condition_dropout
        return ArCollator(data, dropout, seed, candidates)

    def objective(self, config: ArConfig) -> ArObjective:
        from mmldlm.tasks.baselines.ar.objective import ArObjective

        return ArObjective(config)

    def validation(self, data: BaselineData, engine: Engine) -> Validation:
        """Exact NLL with the right latent and, if it was trained, with the null latent."""
        from mmldlm.tasks.baselines.common.validation import validation

        return validation(self, data, engine)

    def records_passes(self, sampler: str) -> bool:
        from mmldlm.sampling.autoregressive import EXPONENTS

        return sampler not in EXPONENTS

    def write_texts(
        self, pretrained: Pretrained, latents: Tensor | None, **options: Any
    ) -> TextSamples:
        from mmldlm.sampling.autoregressive import write_texts

        return write_texts(pretrained.model, latents, **options)

    def writing_flops(self, model_config: Any, samples: TextSamples) -> float:
        """A row of the cache is one token: all rows cost what a pass over the texts costs
        a token.
        """
        lengths = samples.lengths.tolist()
        return (
            samples.num_rows
            / sum(lengths)
            * estimate_flops(model_config, lengths, sum(lengths)).forward
        )

    def score_texts(
        self,
        pretrained: Pretrained,
        tokens: Tensor,
        real: Tensor,
        latents: Tensor | None,
        uniform: Tensor,
        stratum: tuple[int, int],
    ) -> TextScores:
        """Exact: neither uniform nor stratum is read."""
        import torch

        from mmldlm.models.latent_transformer import LatentInputs, TextInputs
        from mmldlm.models.token_scores import TokenQuery
        from mmldlm.tasks.text_scores import TextScores, sum_by_row

        positions = real.flatten().nonzero()[:, 0]
        owner, targets = positions // tokens.shape[1], tokens.flatten()[positions]
        out = pretrained.model(
            TextInputs(tokens, attention_mask=real),
            None if latents is None else LatentInputs(latents),
            TokenQuery(positions, targets, torch.ones(len(targets), device=tokens.device)),
        )
        nats = sum_by_row(out.text.nll.double(), owner, len(tokens))
        correct = sum_by_row(out.text.correct.double(), owner, len(tokens))
        return TextScores(nats, correct, real.sum(1), None)
