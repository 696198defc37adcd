"""The seam between `mmldlm sample` and `mmldlm evaluate` and a task whose model writes and scores
texts: the task, and a trained model of it with its tokenizer and diffusion settings.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.config.task_names import DEFAULT_TASK
from mmldlm.data.encoders.specs import UNKNOWN_ENCODER
from mmldlm.diffusion import GaussianProcess, MaskedDiffusion
from mmldlm.engines.optimizer import parameter_groups
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.errors import UserError
from mmldlm.models.base import BaseTransformer, LatentInputs, ModelOutput, TextInputs
from mmldlm.models.flops import Flops, estimate_flops
from mmldlm.models.meta_device import meta_device
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.judge import FoundTexts, Judge
from mmldlm.sampling.model import Model
from mmldlm.sampling.records import TextSamples
from mmldlm.sampling.settings import (
    BY_CERTAINTY,
    BY_CHANCE,
    MASKED_SAMPLERS,
    REMOVED_SAMPLERS,
    RESULTS_PAGE,
    STRATEGY_OPTIONS,
)
from mmldlm.sampling.text import sample_masked
from mmldlm.tasks.base import ParameterSizes, Task
from mmldlm.tasks.initialization import set_first_weights
from mmldlm.tasks.registry import find_task
from mmldlm.tasks.translation.config import LatentDiffusionConfig
from mmldlm.utils.settings import options_of


@dataclass
class TextScores:
    """Scores of B texts.

    Attributes:
        nats: Negative log-likelihood of each text (EOS counted), or one draw of an upper bound on
            it. [B] fp64
        correct: Number of scored tokens that are the most probable. [B] fp64
        scored: Number of scored tokens. [B]
        length_nll: Nats of the length; None for a model that writes EOS itself. [B]
    """

    nats: Tensor
    correct: Tensor
    scored: Tensor
    length_nll: Tensor | None


def masked_text_scores(
    model: Model,
    tokens: Tensor,
    attention_mask: Tensor,
    latents: Tensor | None,
    uniform: Tensor,
    stratum: tuple[int, int],
    *,
    diffusion: MaskedDiffusion,
) -> TextScores:
    """Draw the NELBO of masked diffusion with fixed mask counts (`MaskedDiffusion.corrupt_count`).

    Unbiased for every schedule: the masked positions count 1 / their fraction.

    Args:
        model: Model with the forward contract of MultimodalMMDiT.
        diffusion: Masking process of training.
        The rest as in `TextTask.score_texts`.
    """
    width, (draw, draws) = tokens.shape[1], stratum
    strata = (draw + uniform[:, -1]) / draws
    mask_token_id = diffusion.mask_token_id
    noised, masked, fraction = diffusion.corrupt_count(
        tokens, strata, uniform[:, :width], attention_mask, mask_token_id
    )
    t = diffusion.timestep_of(fraction)
    positions = masked.flatten().nonzero()[:, 0]
    owner = positions // width
    weight = (1 / fraction)[owner]
    out = model(
        TextInputs(noised, t.float(), attention_mask),
        None if latents is None else LatentInputs(latents),
        TokenQuery(positions, tokens.flatten()[positions], weight.float()),
    )
    return TextScores(
        sum_by_row(out.text.nll.double() * weight, owner, len(tokens)),
        sum_by_row(out.text.correct.double(), owner, len(tokens)),
        masked.sum(1),
        F.cross_entropy(out.length_logits, attention_mask.sum(1) - 1, reduction="none"),
    )


def scores_of_targets(out: ModelOutput) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss_sum, nll and correct (`TokenScores`) of a pass with targets."""
    assert out.text is not None
    loss_sum, nll, correct = out.text.loss_sum, out.text.nll, out.text.correct
    assert loss_sum is not None and nll is not None and correct is not None
    return loss_sum, nll, correct


def sum_by_row(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """Return [count] fp64 sums of values [M] fp64, which belong to rows `owner` [M]."""
    return torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(
        0, owner, values
    )


class TextTask(Task):
    """A task whose trained model writes texts, given latents or without, and says how probable
    texts are.

    `load_pretrained` builds the model from config.json: `model_config` must hold "task",
    "architecture", the fields of the config section `model` at top level, "training" with
    mode_weights and condition_dropout, and the sections `text_diffusion` and `latent_diffusion` if
    the task's config has them. The model section has mask_token_id, pad_token_id, eos_token_id,
    vocab_size, max_seq_len, latent_dim and num_latents; the model has `scale_latents`.

    Class attributes:
        architecture: Name of the model's class in config.json.
        samplers: Values of --sampler, the default first, for every kind of `mmldlm sample` that
            the task has (l2t, t2l, unconditional). Kind t2l is that of the translation task.
        sampling_options: Options of `mmldlm sample` and `mmldlm evaluate` that the task reads, of
            TASK_OPTIONS in inference/options.py; any other is an error.
        fills_lengths: Whether `write_texts` takes `lengths` [N] int64, EOS counted, and refills
            texts with kept tokens.
        t2i_steps: Default number of steps of an image of a caption; None: that of `mmldlm
            sample`.
        exact_likelihood: Whether `score_texts` gives the exact likelihood, so that one draw is
            enough.
        evaluation_decoding: Words for how evaluation writes texts.
        scored_sum: Name of the sum that counts the tokens that the text head scores.
        samples_by_forward: Whether `write_texts` calls the model and its `encode_latents` alone,
            so that a run can sample while the engine shards the weights (logging.eval_samples).
    """

    architecture: ClassVar[str]
    sampling_options: ClassVar[frozenset[str]] = frozenset(
        {"num_steps", "sampler", "temperature", "top_p", "guidance", "presence_penalty"}
    )
    fills_lengths: ClassVar[bool] = False
    t2i_steps: ClassVar[int | None] = None
    exact_likelihood: ClassVar[bool] = False
    evaluation_decoding: ClassVar[str] = (
        "confidence, greedy, lengths from the model (median of p(length | latent))"
    )
    samples_by_forward: ClassVar[bool] = True
    scored_sum: ClassVar[str] = "text_masked"
    buffers = frozenset({"latent_mean", "latent_std"})

    def names_data(self, config: Any) -> bool:
        return bool(config.data.roots)

    @abstractmethod
    def model_class(self) -> type[BaseTransformer]:
        """Return the class whose constructor takes the config section `model`."""

    def build_model(self, data: Any) -> Any:
        torch.manual_seed(data.config.training.seed)
        model = self.model_class()(data.config.model)
        set_first_weights(model, data)
        return model

    def compile(self, model: BaseTransformer, plan: ParameterPlan) -> None:
        model.compile_blocks()

    # -- parameters, counted on torch's meta device, where tensors have shapes and no values ------

    def _model_without_values(self, config: Any) -> nn.Module:
        with meta_device():
            return self.model_class()(config.model)

    def parameter_counts(self, config: Any) -> dict[str, int] | None:
        """Return parameters by group, tied weights once; None: the data decides keys that are
        unset.
        """
        if config.model.latent_dim is None or config.model.vocab_size is None:
            return None
        model = self._model_without_values(config)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        groups = self.parameter_groups(model)
        return {group: sum(sizes[name] for name in names) for group, names in groups.items()}

    def parameter_sizes(self, config: Any) -> ParameterSizes:
        """Count the model of a config whose keys are all set, training.freeze=auto too.

        Raises:
            UserError: the optimizer does not fit the model (optimizer.muon_block_rows).
        """
        model = self._model_without_values(config)
        plan = self.parameter_plan(model, config)
        plan.set_requires_grad(model)
        parameter_groups(model, plan, config.optimizer)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        buffers = dict(model.named_buffers())
        # What a sharding engine gathers at once: a unit, or all that is outside them.
        units = [sum(p.numel() for p in unit.parameters()) for unit in plan.sharding_units]
        outside = sum(sizes.values()) - sum(units)
        num_frozen = sum(sizes[name] for name in plan.frozen)
        return ParameterSizes(
            trainable=sum(sizes.values()) - num_frozen,
            frozen=num_frozen,
            largest_block=max([*units, outside]),
            buffers=sum(buffers[name].numel() for name in self.buffers),
            matrices=sum(sizes[name] for name in plan.matrices),
        )

    def estimate_flops(
        self, model_config: Any, lengths: Sequence[float], num_scored: float, **work: Any
    ) -> Flops:
        """Return the forward FLOPs of a batch (models/flops.py)."""
        return estimate_flops(model_config, lengths, num_scored, **work)

    def training_flops(
        self, config: Any, num_samples: int, num_tokens: float, sums: Mapping[str, float]
    ) -> float:
        """Return forward and backward FLOPs of a global batch, whose texts count as equally long:
        length-bucketed batches hold the sum of squares within a few percent of attention's share.
        """
        if not num_samples or not num_tokens:
            return 0.0
        of_one = {name: value / num_samples for name, value in sums.items()}
        flops = self.estimate_flops(
            config.model,
            [num_tokens / num_samples],
            of_one[self.scored_sum],
            # Counted under loss.text_candidates only.
            num_logits=of_one.get("text_logits") or None,
            num_latents=of_one.get("all_latents"),
            **self.latent_work(of_one),
        )
        return num_samples * flops.training

    def latent_work(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return further counts of a batch that `estimate_flops` takes."""
        return {}

    # -- sampling and evaluation ------------------------------------------------------------------

    def unread_options(self, kind: str, sampler: str) -> frozenset[str]:
        """Return those of `sampling_options` that one sampler does not read for a kind of
        samples.
        """
        return frozenset()

    def records_passes(self, sampler: str) -> bool:
        """Whether `write_texts` with this sampler takes `recorder`
        (`sampling.records.Recorder`).
        """
        return False

    @abstractmethod
    def write_texts(
        self,
        pretrained: Pretrained,
        latents: Tensor | None,
        *,
        num_samples: int | None = None,
        sampler: str,
        seed: int = 0,
        batch_tokens: int | None = None,
        progress: Any = None,
        **options: Any,
    ) -> TextSamples:
        """Write one text per latent, or num_samples texts without a latent.

        Args:
            pretrained: Model and its settings.
            latents: Latents in the encoder's space, [N, D] (or [N, M, D]); None: no condition.
            sampler: One of `samplers`.
            seed: Seed of the draws; those of a sample depend on it and on the sample's index only.
            batch_tokens: Maximum of padded positions per pass; None: the task's choice.
            progress: Callback as the work proceeds, with (done, total).
            options: Options of `sampling_options` but sampler; None where neither user nor command
                gave a value. And `recorder` if one is wanted, where `records_passes`.

        Raises:
            MmldlmError: NaN logits.
        """

    def check_correction(self) -> None:
        """Raise a UserError unless the task has `correct_texts`."""
        raise UserError(
            "a model that was trained to correct texts, for --correct",
            f"a checkpoint of task={self.name}",
            "use --search, which needs no training, or train one: `mmldlm hypotheses`, then"
            " task=corrector data.hypotheses=DIR training.init_from=CHECKPOINT",
        )

    def correct_texts(
        self,
        pretrained: Pretrained,
        latents: Tensor,
        judge: Judge,
        *,
        rounds: int,
        seed: int = 0,
        progress: Any = None,
        **options: Any,
    ) -> FoundTexts:
        """Write a text for each latent [N, D] (or [N, M, D]) and correct it in some rounds, by the
        judge's embeddings of it.

        Raises:
            UserError: the task has no corrections (`check_correction`).
            MmldlmError: NaN logits or embeddings.
        """
        self.check_correction()
        raise NotImplementedError

    def writing_flops(self, model_config: Any, samples: TextSamples) -> float | None:
        """Return the forward FLOPs of `write_texts`; None: not known."""
        return None

    @abstractmethod
    def score_texts(
        self,
        pretrained: Pretrained,
        tokens: Tensor,
        attention_mask: Tensor,
        latents: Tensor | None,
        uniform: Tensor,
        stratum: tuple[int, int],
    ) -> TextScores:
        """Score a batch of texts: their exact negative log-likelihood, or one draw of an upper
        bound (NELBO).

        Args:
            tokens: Tokens with EOS, padded. [B, S] int64
            attention_mask: True for tokens and EOS. [B, S] bool
            latents: Latents in model space (`scale_latents`), [B, D] (or [B, M, D]); None: the
                null condition.
            uniform: Numbers in [0, 1), the same for every condition; the last column is the same
                for all draws of a text and places it in its stratum. [B, S + 1] fp64
            stratum: Pair (k, n): the draw is the k-th of n; draw a timestep or a count from this
                n-th part of its range.
        """


class MaskedTextTask(TextTask):
    """A task of masked diffusion: a model with the forward contract of MultimodalMMDiT, a section
    `text_diffusion`.

    Its `score_texts` masks 1 .. L of a text's L tokens, a number that the last column of `uniform`
    chooses evenly.
    """

    fills_lengths = True
    samplers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "l2t": (*BY_CERTAINTY, *BY_CHANCE),
        "unconditional": (*BY_CHANCE, *BY_CERTAINTY),
    }
    sampling_options = TextTask.sampling_options | STRATEGY_OPTIONS

    def records_passes(self, sampler: str) -> bool:
        return True

    @abstractmethod
    def pass_flops(self, model_config: Any, length: float, scored: float) -> float:
        """Return the forward FLOPs of a pass for one text of `length` tokens (EOS counted),
        `scored` of them.

        Latents are encoded before (`encoding_flops`) where text is scored, and in each pass where
        none is.
        """

    def encoding_flops(self, model_config: Any) -> float:
        """Return the forward FLOPs of encoding the latents of one text, where `pass_flops` leaves
        them out.
        """
        return 0.0

    def writing_flops(self, model_config: Any, samples: TextSamples) -> float:
        if not samples.num_rows:
            return 0.0
        passes, scored = samples.passes.tolist(), samples.num_scored / samples.num_rows
        costs = [
            self.pass_flops(model_config, length, scored) for length in samples.lengths.tolist()
        ]
        total = sum(num_passes * cost for num_passes, cost in zip(passes, costs))
        # Rows may be more than passes: guidance takes two rows per pass.
        decoding_flops = samples.num_rows / max(sum(passes), 1) * total
        return decoding_flops + len(costs) * self.encoding_flops(model_config)

    def unread_options(self, kind: str, sampler: str) -> frozenset[str]:
        unread = STRATEGY_OPTIONS - options_of(MASKED_SAMPLERS[sampler]).keys()
        makes_latents = kind == "unconditional" and "t2l" in self.samplers
        return unread - {"num_steps"} if makes_latents else unread

    def write_texts(
        self, pretrained: Pretrained, latents: Tensor | None, **options: Any
    ) -> TextSamples:
        if options.get("condition_timestep"):
            options["latent_diffusion"] = pretrained.latent_diffusion
        return sample_masked(
            pretrained.model, latents, diffusion=pretrained.text_diffusion, **options
        )

    def score_texts(
        self,
        pretrained: Pretrained,
        tokens: Tensor,
        attention_mask: Tensor,
        latents: Tensor | None,
        uniform: Tensor,
        stratum: tuple[int, int],
    ) -> TextScores:
        diffusion = pretrained.text_diffusion
        return masked_text_scores(
            pretrained.model,
            tokens,
            attention_mask,
            latents,
            uniform,
            stratum,
            diffusion=diffusion,
        )


# Latents of norm 1 have sum(mean^2 + std^2) = 1 up to rounding; other encoders differ by far more.
_UNIT_TOLERANCE = 1e-2


@dataclass
class Pretrained:
    """A model and the settings it was trained with.

    Attributes:
        model: The model, in eval mode.
        tokenizer: Fast Hugging Face tokenizer, or None (not needed to sample ids).
        text_config: Section text_diffusion of its training; None for a task without one.
        latent_config: Section latent_diffusion of its training; None for a task that predicts no
            latents.
        mode_weights: Fraction of each mode in training; None if unknown.
        condition_dropout: Fraction of samples trained on the null condition; None if unknown.
        condition_noise: Fraction of the l2t samples that were trained on a noised latent.
        encoder: Identity of the encoder of its latents; None if unknown.
        folder: Path that was opened.
        task: Task that trained it.
        image: Identity of the codec of its images; None for a model of texts.
        config_folder: Folder of its config.json, which has the files of the codec.
        vae: Folder of the autoencoder of its images, if it is elsewhere than the codec says.
    """

    model: Model
    tokenizer: Any
    text_config: Any
    latent_config: LatentDiffusionConfig | None
    mode_weights: dict[str, float] | None = None
    condition_dropout: float | None = None
    condition_noise: float = 0.0
    encoder: dict[str, Any] | None = None
    folder: Path | None = None
    task: TextTask = field(default_factory=lambda: cast("TextTask", find_task(DEFAULT_TASK)))
    image: dict[str, Any] | None = None
    config_folder: Path | None = None
    vae: str | None = None

    def __post_init__(self) -> None:
        # The model's own section does not hold this key, whoever made the model: load_model, a
        # run or an evaluation that needs an untrained one.
        if self.latent_config is not None and self.latent_config.l2_normalize:
            self.model.normalize_latents()

    @property
    def text_diffusion(self) -> MaskedDiffusion:
        """Masking process of the text, for tasks of masked diffusion."""
        return MaskedDiffusion(
            self.model.config.mask_token_id, self.text_config.schedule, self.text_config.eps
        )

    @property
    def latent_diffusion(self) -> GaussianProcess:
        """Noise process of the latents."""
        assert self.latent_config is not None
        return self.latent_config.process()

    @property
    def unit_norm(self) -> bool:
        """Whether the training latents are unit vectors, according to the encoder or else to their
        statistics.
        """
        if self.latent_config is not None and self.latent_config.l2_normalize:
            return True
        if self.encoder is not None and "normalize" in self.encoder:
            return bool(self.encoder["normalize"])
        return latents_are_unit(self.model.latent_mean, self.model.latent_std)

    @property
    def renormalize(self) -> bool:
        """Whether samplers project x0 estimates onto the unit sphere."""
        return self.latent_config is not None and self.unit_norm

    @property
    def num_ids(self) -> int | None:
        """Number of ids of which each of its latents is one; None: they are values."""
        return getattr(self.model, "num_ids", None)

    @property
    def clamp_x0(self) -> float | None:
        """The bound that samplers clamp x0 estimates to, in the space of the stored latents; None:
        none.
        """
        return None if self.latent_config is None else self.latent_config.clamp_x0

    @property
    def reads_latents(self) -> bool:
        """Whether the model is conditioned on latents, or predicts them."""
        return self.latent_config is not None or self.supports("l2t")

    @property
    def has_encoder(self) -> bool:
        """Whether the encoder of its latents is known; that of `mmldlm pack` without --encoder is
        not.
        """
        return self.encoder is not None and self.encoder.get("name") != UNKNOWN_ENCODER

    def supports(self, mode: str) -> bool:
        """Whether the model was trained in a mode; True if unknown."""
        return self.mode_weights is None or self.mode_weights.get(mode, 0) > 0

    def check_kind(self, kind: str, sampler: str | None = None) -> None:
        """Reject what the model's task lacks.

        Raises:
            UserError: a kind of samples or, where one is named, a sampler.
        """
        samplers = self.task.samplers
        name, where = self.task.name, self.folder or "a model"
        if kind not in samplers:
            raise UserError(
                f"a checkpoint of a task that has `sample {kind}`",
                f"task={name} in {where}, which has {', '.join(samplers)}",
                "use another checkpoint, or another kind of samples",
            )
        if sampler is not None and sampler not in samplers[kind]:
            known = ", ".join(samplers[kind])
            expected = f"--sampler {known} for `sample {kind}` of task={name}"
            is_removed = sampler in REMOVED_SAMPLERS
            removed = f" (removed, with its measurements in {RESULTS_PAGE})" if is_removed else ""
            raise UserError(
                expected, f"--sampler {sampler}{removed}", "choose one of them, or omit --sampler"
            )

    def check_mode(self, mode: str) -> None:
        """Reject a mode without training, whose output would be plausible-looking noise.

        Raises:
            UserError: the model was not trained in it.
        """
        if not self.supports(mode):
            how = (
                "another model.conditioning"
                if self.latent_config is None
                else f"training.loss_type={mode} or mixed"
            )
            trained = ", ".join(
                name for name, weight in (self.mode_weights or {}).items() if weight > 0
            )
            raise UserError(
                f"a model trained in mode {mode}",
                f"{self.folder or 'a model'} trained only in {trained or 'no mode'}",
                f"use another checkpoint, or train one with {how}",
            )

    def check_guidance(self, guidance: float) -> None:
        """Reject guidance for a model whose null condition was never trained.

        Raises:
            UserError: guidance other than 1 with condition_dropout 0.
        """
        if guidance != 1.0 and self.condition_dropout == 0:
            raise UserError(
                "--guidance 1 for a model trained with training.condition_dropout=0",
                f"--guidance {guidance}: its null conditions were never trained",
                "omit --guidance, or train with training.condition_dropout=0.1",
            )

    def check_condition_timestep(self, timestep: float) -> None:
        """Reject a noised condition for a model that was trained on clean ones alone.

        Raises:
            UserError: a timestep above 0 without training.l2t_condition_noise and mode
                unconditional.
        """
        trained = self.condition_noise > 0 or (self.mode_weights or {}).get("unconditional", 0) > 0
        if timestep > 0 and not trained:
            raise UserError(
                "--condition-timestep 0 for a model whose text was only ever trained on clean"
                " embeddings",
                f"--condition-timestep {timestep}",
                "omit it, or train with training.l2t_condition_noise=0.3",
            )


def latents_are_unit(mean: Tensor, std: Tensor) -> bool:
    """Whether data with this mean and std [D] has norm 1 on average."""
    return abs(float((mean.double() ** 2 + std.double() ** 2).sum()) - 1.0) < _UNIT_TOLERANCE
