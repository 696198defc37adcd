"""The seam between `mmldlm sample` and `mmldlm evaluate` and a task whose model writes and scores
texts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from mmldlm.errors import UserError
from mmldlm.sampling.settings import BY_CERTAINTY, BY_CHANCE, MASKED_SAMPLERS, STRATEGY_OPTIONS
from mmldlm.tasks.base import Task
from mmldlm.utils.settings import options_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mmldlm.sampling.judge import FoundTexts, Judge
    from mmldlm.sampling.records import TextSamples
    from mmldlm.tasks.pretrained import Pretrained
    from mmldlm.tasks.text_scores import TextScores


class TextTask(Task):
    """A task whose trained model writes texts, given latents or without, and says how probable
    texts are.

    `load_pretrained` builds the model from config.json: `model_config` must hold "task",
    "architecture", the fields of the config section `model` at top level, "training" with
    mode_weights and condition_dropout, and the sections `text_diffusion` and `latent_diffusion` if
    the task's config has them. The model section has mask_token_id, pad_token_id, eos_token_id,
    vocab_size, max_seq_len, latent_dim and num_latents; the model has `scale_latents`.

    Class attributes:
        architecture: name of the model's class in config.json.
        samplers: for every kind of `mmldlm sample` that the task has (l2t, t2l, unconditional) the
            values of --sampler, the default first. Kind t2l is that of the translation task.
        sampling_options: options of `mmldlm sample` and `mmldlm evaluate` that the task reads, of
            TASK_OPTIONS in inference/options.py; any other is an error.
        fills_lengths: whether `write_texts` takes `lengths` [N] int64, EOS counted, and refills
            texts with kept tokens.
        exact_likelihood: whether `score_texts` gives the exact likelihood, so that one draw is
            enough.
        evaluation_decoding: how evaluation writes texts, in words.
    """

    architecture: ClassVar[str]
    sampling_options: ClassVar[frozenset[str]] = frozenset(
        {"num_steps", "sampler", "temperature", "top_p", "guidance", "presence_penalty"}
    )
    fills_lengths: ClassVar[bool] = False
    exact_likelihood: ClassVar[bool] = False
    evaluation_decoding: ClassVar[str] = (
        "confidence, greedy, lengths from the model (median of p(length | latent))"
    )

    def unread_options(self, kind: str, sampler: str) -> frozenset[str]:
        """Return those of `sampling_options` that one sampler does not read for a kind of
        samples.
        """
        return frozenset()

    @abstractmethod
    def model_class(self) -> type[nn.Module]:
        """Return the class whose constructor takes the config section `model`."""

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
            pretrained: the model and its settings.
            latents: [N, D] (or [N, M, D]) in the encoder's space, or None.
            sampler: one of `samplers`.
            seed: the draws of a sample depend on the seed and its index only.
            batch_tokens: maximum padded positions per pass; None: the task's choice.
            progress: called as the work proceeds with (done, total).
            options: those of `sampling_options` but sampler; None where neither user nor command
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
        """Write a text for each latent [N, D] (or [N, M, D]) and correct it in some rounds, from
        what the judge's embeddings of it say.

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
        real: Tensor,
        latents: Tensor | None,
        uniform: Tensor,
        stratum: tuple[int, int],
    ) -> TextScores:
        """Score a batch of texts: their exact negative log-likelihood, or one draw of an upper
        bound (NELBO).

        Args:
            tokens: [B, S] int64, EOS written, padded.
            real: [B, S] bool, True for tokens and EOS.
            latents: [B, D] (or [B, M, D]) in model space (`scale_latents`); None: the null
                condition.
            uniform: [B, S + 1] fp64 in [0, 1), the same for every condition; the last column is
                the same for all draws of a text and places it in its stratum.
            stratum: (k, n): the draw is the k-th of n; draw a timestep or a count from this n-th
                part of its range.
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
        total = sum(number * cost for number, cost in zip(passes, costs))
        written = samples.num_rows / max(sum(passes), 1) * total  # guidance takes two rows a pass
        return written + len(costs) * self.encoding_flops(model_config)

    def unread_options(self, kind: str, sampler: str) -> frozenset[str]:
        unread = STRATEGY_OPTIONS - options_of(MASKED_SAMPLERS[sampler]).keys()
        makes_latents = kind == "unconditional" and "t2l" in self.samplers
        return unread - {"num_steps"} if makes_latents else unread

    def write_texts(
        self, pretrained: Pretrained, latents: Tensor | None, **options: Any
    ) -> TextSamples:
        from mmldlm.sampling.text import sample_masked

        if options.get("condition_timestep"):
            options["latent_diffusion"] = pretrained.latent_diffusion
        return sample_masked(
            pretrained.model, latents, diffusion=pretrained.text_diffusion, **options
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
        from mmldlm.tasks.text_scores import masked_text_scores

        diffusion = pretrained.text_diffusion
        return masked_text_scores(
            pretrained.model, tokens, real, latents, uniform, stratum, diffusion=diffusion
        )
