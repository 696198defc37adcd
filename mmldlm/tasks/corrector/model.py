"""The MMDiT that also reads an earlier text for the same latent: its tokens, its embedding, and
how far off that is.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mmldlm.models.base import EncodedLatent, LatentInputs, TextInputs
from mmldlm.models.layers import random_parameter
from mmldlm.models.mmdit import MultimodalMMDiT
from mmldlm.models.packing import Packing, packed_values
from mmldlm.tasks.corrector.config import CorrectorModelConfig


class Hypotheses(NamedTuple):
    """Earlier texts for the latents of a batch.

    Attributes:
        tokens: Tokens with EOS; the pad token where a text has ended, and where it has no word (a
            hole). Read where the batch has text. [B, S] int64
        latents: The encoder's embeddings of these texts, in model space. [B, N, D] or [B, D]
        given: True for samples that have one; of others the rest is not read. [B] bool
    """

    tokens: Tensor
    latents: Tensor
    given: Tensor


class HypothesisEncoder(nn.Module):
    """Rows of a hypothesis: its words beside those of the text, and z - ẑ as further latent
    tokens.

    Of vec2text's three latents z, ẑ and z - ẑ (arXiv 2310.06816) the model reads the first and the
    last, which the latent encoder turns into tokens alike: a model that reads z then reads the
    difference, too, with the same weights. Every word is also multiplied by a projection of z - ẑ,
    which tells the words that the difference contradicts.

    Args:
        is_blind: Whether z is read in place of ẑ: the ablation, which sees the words of a
            hypothesis and not how good they are.
    """

    def __init__(
        self,
        hidden_size: int,
        tokens_per_latent: int,
        num_latents: int,
        cond_dim: int,
        is_blind: bool,
    ):
        super().__init__()
        self.is_blind = is_blind
        self.to_text = nn.Linear(hidden_size, hidden_size)
        self.to_factor = nn.Linear(cond_dim, hidden_size)
        self.to_product = nn.Linear(hidden_size, hidden_size)
        self.to_pooled = nn.Linear(cond_dim, cond_dim)
        self.position = random_parameter(num_latents * tokens_per_latent, hidden_size)
        self.null_tokens = random_parameter(num_latents * tokens_per_latent, hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin with the words beside [MASK] as they are; z - ẑ adds nothing to them or to the
        condition.

        From zero it takes longer to learn that most words are right, and first texts get worse
        (docs/objectives.md).
        """
        for layer in (self.to_text, self.to_product, self.to_pooled):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        # nn.init.eye_ would load torch's compiler on the meta device (`meta_device`).
        self.to_text.weight.data.fill_diagonal_(1.0)

    def text_beside(
        self,
        text_encoder: nn.Module,
        ids: Tensor,
        own: Tensor,
        is_read: Tensor,
        sample: Tensor,
        difference: Tensor | None,
        first_rows: Tensor,
        text_is_null: Tensor | None,
    ) -> Tensor:
        """Rows [R, H] of the text, to which those of the hypotheses are added.

        Args:
            ids, own: Tokens of the text and of the hypothesis at each row. [R]
            is_read: Rows at which a hypothesis has a word. [R] bool
            sample: Sample that each row belongs to. [R]
            difference: Pooled z - ẑ. [B, C]

        Raises:
            ValueError: no difference: the latents were encoded without the hypotheses.
        """
        if difference is None:
            raise ValueError(
                "hypotheses with latents that were encoded without them: give encode_latents both"
            )
        # In one call: ZeRO-3 reduces the gradients of a module once per step.
        text, words = text_encoder(torch.cat([ids, own]), first_rows, text_is_null).split(len(ids))
        more = self.to_text(words) + self.to_product(words * self.to_factor(difference)[sample])
        return text + torch.where(is_read[:, None], more, 0.0)

    def latents_beside(
        self,
        latent_encoder: nn.Module,
        points: Tensor,
        is_null: Tensor | None,
        hypotheses: Hypotheses | None,
    ) -> EncodedLatent:
        """Encode latents z [B, N, D]: 2 * N * K tokens, first those of z, then those of z - ẑ."""
        if hypotheses is None:
            tokens, pooled = latent_encoder(points, is_null)
            return EncodedLatent(
                torch.cat([tokens, self.null_tokens[: tokens.shape[1]].expand_as(tokens)], 1),
                pooled,
            )
        has_hypothesis = hypotheses.given
        is_null = torch.zeros_like(hypotheses.given) if is_null is None else is_null
        hypothesis_points = (
            points if self.is_blind else hypotheses.latents.reshape(points.shape).to(points.dtype)
        )
        difference = torch.where(has_hypothesis[:, None, None], points - hypothesis_points, 0.0)
        # In one call, as above.
        both = latent_encoder(
            torch.cat([points, difference]), torch.cat([is_null, torch.zeros_like(is_null)])
        )
        (tokens, more), (pooled, more_pooled) = (values.chunk(2) for values in both)
        count = tokens.shape[1]
        more = torch.where(
            has_hypothesis[:, None, None], more + self.position[:count], self.null_tokens[:count]
        )
        pooled = pooled + torch.where(has_hypothesis[:, None], self.to_pooled(more_pooled), 0.0)
        return EncodedLatent(torch.cat([tokens, more], 1), pooled, side=more_pooled)


class CorrectorMMDiT(MultimodalMMDiT):
    """MultimodalMMDiT whose side inputs are Hypotheses.

    A latent has twice the rows in the blocks, with hypotheses or without; the latent head reads
    the first half.

    Args:
        config: Shape and vocabulary, as of MultimodalMMDiT.
    """

    config_class: ClassVar[type[CorrectorModelConfig]] = CorrectorModelConfig
    config: CorrectorModelConfig

    def __init__(self, config: CorrectorModelConfig):
        super().__init__(config)
        # Last, so that the rest starts from the weights of a model without it.
        self.hypothesis_encoder = HypothesisEncoder(
            config.hidden_size,
            config.tokens_per_latent,
            config.num_latents,
            config.cond_dim,
            is_blind=config.corrector == "blind",
        )

    def encode_points(
        self, latents: LatentInputs, side_inputs: Hypotheses | None
    ) -> EncodedLatent:
        return self.hypothesis_encoder.latents_beside(
            self.latent_encoder, self.scaled_points(latents), latents.is_null, side_inputs
        )

    def embed_text(
        self,
        text: TextInputs,
        computed: Tensor | None,
        packing: Packing,
        encoded: EncodedLatent,
        side_inputs: Hypotheses | None,
    ) -> Tensor:
        if side_inputs is None:
            return super().embed_text(text, computed, packing, encoded, None)
        words = packed_values(side_inputs.tokens, computed)
        sample = packing.sample[: len(words)]
        return self.hypothesis_encoder.text_beside(
            self.text_encoder,
            packed_values(text.tokens, computed),
            words,
            (words != self.config.pad_token_id) & side_inputs.given[sample],
            sample,
            encoded.side,
            packing.first_rows,
            text.is_null,
        )

    def latent_outputs(
        self, rows: Tensor, condition: Tensor, latents: LatentInputs | None, query: Any
    ) -> Tensor:
        return super().latent_outputs(rows[:, : rows.shape[1] // 2], condition, latents, query)
