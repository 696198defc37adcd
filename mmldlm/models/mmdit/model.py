"""MultimodalMMDiT: text tokens and latents in, token distributions and latents out."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmldlm.errors import UserError
from mmldlm.models import pretrained_io
from mmldlm.models.buffer_reuse import embedding
from mmldlm.models.layers import Modulation, StreamLinear, TimestepEmbedding, compute_dtype, has_no_hooks, modulate
from mmldlm.models.linear_cross_entropy import linear_cross_entropy
from mmldlm.models.mmdit.block import MMDiTBlock
from mmldlm.models.mmdit.config import ModelConfig
from mmldlm.models.mmdit.costs import GROUPS, group_of
from mmldlm.models.mmdit.fused_block import select_rows
from mmldlm.models.mmdit.null_condition import apply_null_condition
from mmldlm.models.mmdit.packing import RECTANGLE_FILL, has_varlen, pack


class TextEncoder(nn.Module):
    """Token embedding, and the learned null text that stands for "no text given"."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.null_text = nn.Parameter(torch.randn(hidden_size) * 0.02)

    def forward(self, tokens: Tensor, first: Tensor, is_null: Tensor | None) -> Tensor:
        """[N] ids, [B] row of each sample's first token, [B] bool -> [N, H].

        A null sample starts with the null text; what follows it is masked or left out by the caller.
        """
        table = self.token_embedding
        x = embedding(table.weight, tokens) if has_no_hooks(table, nn.Embedding) else table(tokens)
        return x if is_null is None else apply_null_condition(x, self.null_text, is_null, first)


class LatentEncoder(nn.Module):
    """N latents of D -> N * K chunk tokens and one pooled vector; learned nulls for "no latent given"."""

    def __init__(self, latent_dim: int, latent_tokens: int, max_latents: int, hidden_size: int, cond_dim: int):
        super().__init__()
        self.latent_tokens, self.hidden_size = latent_tokens, hidden_size
        self.to_tokens = nn.Linear(latent_dim, latent_tokens * hidden_size)
        self.to_pooled = nn.Sequential(nn.Linear(latent_dim, cond_dim), nn.SiLU(), nn.Linear(cond_dim, cond_dim))
        self.chunk_position = nn.Parameter(torch.randn(latent_tokens, hidden_size) * 0.02)
        self.latent_position = nn.Parameter(torch.randn(max_latents, 1, hidden_size) * 0.02)
        self.null_tokens = nn.Parameter(torch.randn(latent_tokens, hidden_size) * 0.02)
        self.null_pooled = nn.Parameter(torch.zeros(cond_dim))

    def forward(self, latents: Tensor, is_null: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, N, D], [B] bool -> tokens [B, N * K, H], pooled [B, C]."""
        batch, count, _ = latents.shape
        tokens = self.to_tokens(latents).view(batch, count, self.latent_tokens, self.hidden_size)
        pooled = self.to_pooled(latents)
        pooled = pooled.squeeze(1) if count == 1 else pooled.mean(dim=1)
        if is_null is not None:
            tokens = apply_null_condition(tokens, self.null_tokens, is_null)
            pooled = apply_null_condition(pooled, self.null_pooled, is_null)
        tokens = tokens + self.chunk_position + self.latent_position[:count]
        return tokens.flatten(1, 2), pooled


class TextHead(nn.Module):
    """adaLN, then a linear layer over the vocabulary, run only on the rows somebody reads."""

    def __init__(self, hidden_size: int, cond_dim: int, vocab_size: int, mask_token_id: int):
        super().__init__()
        self.mask_token_id = mask_token_id
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.modulation = Modulation(cond_dim, hidden_size, ("shift", "scale"))
        self.weight = nn.Parameter(torch.randn(vocab_size, hidden_size) * 0.02)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(
        self, rows: Tensor, sample: Tensor, condition: Tensor, targets: Tensor | None, weights: Tensor | None
    ) -> dict[str, Tensor]:
        """Score rows [M, H] of samples [M]; see `MultimodalMMDiT.forward` for targets, weights and the result."""
        shift, scale = self.modulation(condition).index_select(0, sample).chunk(2, dim=-1)
        rows = modulate(self.norm(rows), shift, scale)
        if targets is not None:
            loss_sum, nll, correct = linear_cross_entropy(
                rows, self.weight, self.bias, targets, weights, self.mask_token_id
            )
            return {"text_loss_sum": loss_sum, "text_nll": nll, "text_correct": correct}
        logits = torch.addmm(self.bias, rows, self.weight.t()).float()
        logits[:, self.mask_token_id] = float("-inf")
        return {"text_logits": logits}


class LatentHead(nn.Module):
    """adaLN, then the K chunk outputs of a latent, concatenated, projected back to D (never averaged)."""

    def __init__(self, hidden_size: int, cond_dim: int, latent_tokens: int, latent_dim: int):
        super().__init__()
        self.latent_tokens = latent_tokens
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.modulation = Modulation(cond_dim, hidden_size, ("shift", "scale"))
        self.to_latent = nn.Linear(latent_tokens * hidden_size, latent_dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """[B, N * K, H] -> [B, N, D]."""
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        x = modulate(self.norm(x), shift, scale)
        return self.to_latent(x.reshape(x.shape[0], -1, self.latent_tokens * x.shape[-1]))


class MultimodalMMDiT(nn.Module):
    """Two-stream diffusion transformer over text tokens and sentence embeddings.

    Joint bidirectional attention as in SD3's MMDiT (arXiv 2403.03206), adaLN-Zero conditioning (DiT, arXiv 2212.09748)
    on both timesteps and the pooled latent, RoPE on text, QK-RMSNorm, a latent presented as K chunk tokens.

    Args:
        config: shape and vocabulary; latent_dim, vocab_size and the token ids must be set.

    Raises:
        UserError: when one of those is missing or out of range.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        missing = [
            key for key in ("latent_dim", "vocab_size", "mask_token_id", "pad_token_id", "eos_token_id")
            if getattr(config, key) is None
        ]  # fmt: skip
        if missing:
            raise UserError(
                "a complete model config",
                f"model.{', model.'.join(missing)} unset",
                "set them, or take them from a store",
            )
        for key in ("mask_token_id", "pad_token_id", "eos_token_id"):
            if not 0 <= getattr(config, key) < config.vocab_size:
                raise UserError(
                    f"model.{key} below model.vocab_size={config.vocab_size}",
                    f"model.{key}={getattr(config, key)}",
                    "use the vocabulary size and ids of the tokenizer the data was prepared with",
                )
        self.config = config
        self._blocks_are_compiled = False
        width, cond = config.hidden_size, config.cond_dim
        self.text_encoder = TextEncoder(config.vocab_size, width)
        self.latent_encoder = LatentEncoder(config.latent_dim, config.latent_tokens, config.max_latents, width, cond)
        self.text_timestep = TimestepEmbedding(cond)
        self.latent_timestep = TimestepEmbedding(cond)
        self.blocks = nn.ModuleList(
            MMDiTBlock(width, config.n_heads, cond, config.mlp_ratio, config.qk_rmsnorm) for _ in range(config.n_blocks)
        )
        self.text_head = TextHead(width, cond, config.vocab_size, config.mask_token_id)
        self.latent_head = LatentHead(width, cond, config.latent_tokens, config.latent_dim)
        # Sampling must not see a text's true length, so the model learns p(length | latent) beside the tokens.
        self.length_head = nn.Sequential(
            nn.SiLU(), nn.Linear(cond, cond), nn.SiLU(), nn.Linear(cond, config.max_seq_len)
        )
        # Statistics of the training latents travel with the weights: without them samples are in no known space.
        self.normalises_latents = False  # trained with latent_diffusion.l2_normalise
        self.register_buffer("latent_mean", torch.zeros(config.latent_dim))
        self.register_buffer("latent_std", torch.ones(config.latent_dim))
        self._initialise()

    def _initialise(self) -> None:
        # adaLN-Zero: every block starts as the identity, every head reads the unmodulated norm.
        for module in self.modules():
            if isinstance(module, (Modulation, StreamLinear)):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.latent_head.to_latent.weight)
        if self.config.tie_embeddings:
            self.text_head.weight = self.text_encoder.token_embedding.weight

    # -- latents -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_latent_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Store the training latents' scaling: model space = (raw - mean [D]) / std [D]."""
        self.latent_mean.copy_(torch.as_tensor(mean))
        self.latent_std.copy_(torch.as_tensor(std))

    def scale_latents(self, raw: Tensor) -> Tensor:
        """Encoder's latents [..., D] -> model space, fp32."""
        if self.normalises_latents:
            raw = nn.functional.normalize(raw.float(), dim=-1)
        return (raw.float() - self.latent_mean.float()) / self.latent_std.float()

    def unscale_latents(self, latents: Tensor) -> Tensor:
        """Model space [..., D] -> encoder's latents, fp32."""
        return latents.float() * self.latent_std.float() + self.latent_mean.float()

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        text_tokens: Tensor | None,
        latents: Tensor | None,
        text_timesteps: Tensor | None = None,
        latent_timesteps: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        text_is_null: Tensor | None = None,
        latent_is_null: Tensor | None = None,
        token_positions: Tensor | None = None,
        text_positions: Tensor | None = None,
        text_targets: Tensor | None = None,
        text_weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Joint forward pass.

        Args:
            text_tokens: [B, S] int64, S <= max_seq_len. None: latent-only, the learned null text stands in.
            latents: [B, D] or [B, N, D] in model space (`scale_latents`). None: text-only, the learned null latent.
            text_timesteps: [B] in [0, 1], 0 clean, 1 fully masked. None: 0.
            latent_timesteps: [B] in [0, 1], 0 clean, 1 pure noise. None: 0.
            attention_mask: [B, S] bool, True for real tokens. None: all real. What stands at a False position changes
                nothing at a True one.
            text_is_null, latent_is_null: [B] bool, samples whose condition is replaced by the learned null.
            token_positions: [N] int64 indices into B * S, ascending, of the text that may be attended to (the real
                tokens; of a null text its first position): with text_positions, only these are computed. None: found
                from the mask on a CPU; on a GPU, where that would make the host wait, padding is computed, too.
            text_positions: [M] int64 indices into B * S whose logits are wanted, real tokens. None: all of B * S.
            text_targets: [M] int64 clean tokens at text_positions; then no logits are returned but their NLLs.
            text_weights: [M] fp32 weight of each target in text_loss_sum.

        Returns:
            latent_pred [B, D] or [B, N, D] (as `latents`; [B, D] when None), length_logits [B, max_seq_len] for lengths
            1..max_seq_len (EOS counted; given the latent where its timestep is 0, without it elsewhere), and of the
            text: text_logits [M, V] (or [B, S, V] without positions) in fp32
            with -inf for [MASK]; with targets instead text_loss_sum (fp32 scalar), text_nll [M] and text_correct [M].
            Nothing of the text when text_tokens is None.

        Raises:
            ValueError: on shapes that do not fit the config, token_positions of a part of the text without an
                attention_mask, or (on a CPU) a scored position that is padding.
        """
        config = self.config
        dtype = self.text_encoder.null_text.dtype
        given = text_tokens if text_tokens is not None else latents
        if given is None:
            raise ValueError("forward needs text_tokens or latents")
        batch, device = given.shape[0], given.device

        if text_tokens is None:
            tokens = torch.full((batch, 1), config.pad_token_id, dtype=torch.int64, device=device)
            text_is_null = torch.ones(batch, dtype=torch.bool, device=device)
            attention_mask = None
        else:
            tokens = text_tokens
        length = tokens.shape[1]
        if length > config.max_seq_len:
            raise ValueError(f"text of {length} tokens, but model.max_seq_len is {config.max_seq_len}")
        if latents is None:
            points = torch.zeros(batch, config.max_latents, config.latent_dim, device=device)
            latent_is_null = torch.ones(batch, dtype=torch.bool, device=device)
        else:
            points = latents[:, None] if latents.dim() == 2 else latents
        if points.shape[-1] != config.latent_dim or points.shape[1] > config.max_latents:
            raise ValueError(
                f"latents of shape {tuple(points.shape)}, but model.latent_dim is {config.latent_dim} and "
                f"model.max_latents {config.max_latents}"
            )

        latent, pooled = self.latent_encoder(points.to(dtype), latent_is_null)
        if text_timesteps is None or latent_timesteps is None:
            clean = torch.zeros(batch, device=device)
        raw_condition = (
            self.text_timestep(clean if text_timesteps is None else text_timesteps)
            + self.latent_timestep(clean if latent_timesteps is None else latent_timesteps)
            + pooled
        )
        condition = nn.functional.silu(raw_condition)

        keys = place = None
        # Without text_positions all logits are wanted, those of padding included: then nothing is left out.
        chooses = text_positions is not None
        if not (chooses and token_positions is not None and token_positions.shape[0] == batch * length):
            is_null = text_is_null if text_tokens is not None else None
            keys = self._text_keys(attention_mask, is_null, batch, length, device)
            place = self._places(token_positions, keys) if chooses else None
            if place is not None and place.shape[0] == batch * length:
                place = keys = None
        if place is not None and keys is None:
            raise ValueError("token_positions leaves text out, so attention_mask must name it as padding")
        layout = pack(
            place, keys, batch, length, latent.shape[1], config.hidden_size // config.n_heads, dtype, device,
            self._ragged(place, batch * length, latent),
        )  # fmt: skip
        if self._blocks_are_compiled:  # else a batch of head_dim / 2 samples would be taken for the same size
            torch._dynamo.mark_static(layout.rotation, (1, 2, 3))
        ids = tokens.flatten() if place is None else tokens.flatten().index_select(0, place)
        text = self.text_encoder(ids, layout.first, text_is_null)
        rows = torch.cat([text, latent.flatten(0, 1)])
        recompute = config.gradient_checkpointing and torch.is_grad_enabled()
        after = layout  # of the rows that a head reads
        if text_tokens is None:
            after = layout.restrict_to(layout.first[:0])
        elif chooses:
            after = layout.restrict_to(text_positions if place is None else self._rows_at(place, text_positions))
        # Compiled, the last block would need a graph of its own: minutes for a share of one block.
        last = None if self._blocks_are_compiled else self.blocks[-1]
        for block in self.blocks:
            given = (rows, condition, layout, recompute, after if block is last else None)
            if recompute and (self._blocks_are_compiled or not block.runs_fused()):
                rows = checkpoint(block, *given, use_reentrant=False)
            else:
                rows = block(*given)
        if last is None:
            rows = select_rows(rows, after)

        text_rows, latent_rows = rows.split((after.num_text, batch * latent.shape[1]))
        latent_pred = self.latent_head(latent_rows.view(batch, latent.shape[1], -1), condition).float()
        if latents is None or latents.dim() == 2:
            latent_pred = latent_pred.squeeze(1) if latent_pred.shape[1] == 1 else latent_pred[:, 0]
        out = {
            "latent_pred": latent_pred,
            "length_logits": self.length_head(self._known_pooled(pooled, latent_timesteps)).float(),
        }
        if text_tokens is not None:
            sample = after.sample[: after.num_text]
            text_out = self.text_head(text_rows, sample, condition, text_targets, text_weights)
            if text_positions is None and text_targets is None:
                text_out["text_logits"] = text_out["text_logits"].view(batch, length, -1)
            out.update(text_out)
        return out

    def _known_pooled(self, pooled: Tensor, latent_timesteps: Tensor | None) -> Tensor:
        """[B, C] the pooled latent where it is clean, the null's elsewhere: p(length | latent) or p(length)."""
        if latent_timesteps is None:
            return pooled
        return apply_null_condition(pooled, self.latent_encoder.null_pooled, latent_timesteps > 0)

    @staticmethod
    def _places(token_positions: Tensor | None, keys: Tensor | None) -> Tensor | None:
        """[N] places in B * S of the text to compute, None for all. Found from the mask only where that is no sync."""
        if token_positions is not None:
            return token_positions
        if keys is None or keys.device.type != "cpu":
            return None
        return keys.flatten().nonzero()[:, 0]

    def _ragged(self, place: Tensor | None, num_positions: int, latent: Tensor) -> str | None:
        """How attention leaves padding out (layout.make_layout)."""
        if place is None:
            return None
        low = compute_dtype(latent)  # of an activation: under ZeRO-3, looking at a weight gathers it
        if place.device.type != "cpu":
            width = self.config.hidden_size // self.config.n_heads
            return "varlen" if has_varlen(low, width, place.device) else None
        rows = latent.shape[0] * latent.shape[1]
        filled = (place.shape[0] + rows) / (num_positions + rows)
        # A loop over lengths would be compiled anew for every batch.
        return "loop" if filled < RECTANGLE_FILL and not self._blocks_are_compiled else None

    @staticmethod
    def _rows_at(place: Tensor, positions: Tensor) -> Tensor:
        """[M] rows of positions in B * S, all of which must be places of computed text."""
        rows = torch.searchsorted(place, positions.contiguous())
        if place.device.type == "cpu" and not torch.equal(place[rows.clamp_max(len(place) - 1)], positions):
            raise ValueError("text_positions names padding: only real tokens are computed")
        return rows

    @staticmethod
    def _text_keys(
        attention_mask: Tensor | None, text_is_null: Tensor | None, batch: int, length: int, device: torch.device
    ) -> Tensor | None:
        """[B, S] bool of the text that may be attended to, or None when all may."""
        if attention_mask is None and text_is_null is None:
            return None
        keys = attention_mask.bool() if attention_mask is not None else None
        if text_is_null is not None:
            only_first = torch.arange(length, device=device) == 0
            rest = torch.ones(batch, length, dtype=torch.bool, device=device) if keys is None else keys
            keys = torch.where(text_is_null[:, None], only_first, rest)
        return keys

    # -- parameters --------------------------------------------------------------------------------------------------

    def parameter_groups(self) -> dict[str, list[str]]:
        """Names of the parameters in each of the groups text, latent and shared (MM-LDLM's freezing groups)."""
        groups: dict[str, list[str]] = {group: [] for group in GROUPS}
        for name, _ in self.named_parameters():
            groups[group_of(name)].append(name)
        return groups

    def compile_blocks(self) -> None:
        """torch.compile every block by itself: compiling the whole model takes many minutes and gains nothing more."""
        self._blocks_are_compiled = True
        for block in self.blocks:
            block.compile(dynamic=True)

    # -- files -------------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model.safetensors and config.json (Hugging Face layout) into folder."""
        pretrained_io.write(self, Path(folder))

    def config_dict(self) -> dict:
        """What config.json holds: the model section plus the architecture's name."""
        return {"architecture": type(self).__name__, **self.config.model_dump()}

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> MultimodalMMDiT:
        """Load a model that `mmldlm convert` or `save_pretrained` wrote.

        Args:
            path: local folder with model.safetensors and config.json, or a Hugging Face repository's name.
            device: where to put it. dtype: of the weights; the latent statistics stay fp32.

        Raises:
            UserError: when files are missing or tensors do not fit the config; nothing is loaded partly.
        """
        return pretrained_io.read(cls, path, device, dtype)
