"""The steps that benchmarks/step.py compares: ours, two from package registries, and the bare
matrix products.

Every variant trains on the same batch: text with half of its real tokens masked, one latent per
sample (image: many). `build(name, shape, dtype)` makes a variant with `forward_backward()` and
`update()`.
"""

from __future__ import annotations

import copy
import importlib.metadata
import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, LATENT, MASK_ID, PAD_ID, EOS_ID = 30_522, 1_024, 103, 0, 102
CLIP, LEARNING_RATE = 1.0, 1e-4


@dataclass(frozen=True)
class Shape:
    """A model and a batch.

    fill: mean length over S; below 1 the rows have random lengths, the longest is S. latents: of
    one sample; more than one are the patches of a square image, which turn by their place.
    """

    name: str
    depth: int = 6
    width: int = 384
    length: int = 127
    batch: int = 8
    fill: float = 1.0
    vocab: int = VOCAB
    latent: int = LATENT
    latents: int = 1

    @property
    def heads(self) -> int:
        return max(self.width // 64, 1)

    def lengths(self) -> np.ndarray:
        """[B] text lengths with a mean of fill * S."""
        if self.fill == 1:
            return np.full(self.batch, self.length)
        rng = np.random.default_rng(0)
        rest = self.fill * self.length * self.batch - self.length
        draws = rng.uniform(0.2, 1.0, self.batch - 1)
        others = np.clip(np.round(draws * rest / draws.sum()), 1, self.length)
        return np.concatenate([[self.length], others]).astype(np.int64)


class Batch:
    """One micro-batch: tokens, attention_mask [B, S]; latents [B, D], of images [B, N, D];
    timesteps [B]; positions, targets [M]."""

    def __init__(self, shape: Shape, device: str = "cpu"):
        generator = torch.Generator().manual_seed(1)
        lengths = torch.from_numpy(shape.lengths())
        size = (shape.batch, shape.length)
        clean = torch.randint(min(1000, shape.vocab // 2), shape.vocab, size, generator=generator)
        real = torch.arange(shape.length) < lengths[:, None]
        chosen = torch.rand(size, generator=generator).masked_fill(~real, 2.0)
        order = chosen.argsort(1).argsort(1)
        masked = order < (lengths[:, None] + 1) // 2
        mask_id = min(MASK_ID, shape.vocab - 1)
        self.tokens = clean.masked_fill(masked, mask_id).masked_fill(~real, PAD_ID).to(device)
        self.attention_mask = real.to(device)
        self.positions = masked.flatten().nonzero()[:, 0].to(device)
        self.targets = clean.flatten()[self.positions.cpu()].to(device)
        # What a dense head is scored with.
        self.labels = clean.masked_fill(~masked, -100).to(device)
        self.lengths = lengths.to(device)
        self.text_t = torch.rand(shape.batch, generator=generator).clamp(0.1, 1).to(device)
        self.latent_t = torch.rand(shape.batch, generator=generator).clamp(0.1, 1).to(device)
        latents = (
            (shape.batch, shape.latent)
            if shape.latents == 1
            else (shape.batch, shape.latents, shape.latent)
        )
        self.latents = torch.randn(latents, generator=generator).to(device)
        self.latent_targets = torch.randn(latents, generator=generator).to(device)
        self.num_tokens, self.num_masked = int(lengths.sum()), len(self.positions)


class Variant:
    """A model with its optimizer on one batch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: str):
        self.model, self.optimizer, self.device = model.train(), optimizer, device

    def loss(self) -> Tensor:
        raise NotImplementedError

    def forward_backward(self) -> None:
        """Forward and backward pass; gradients of the step before are dropped first, as every loop
        does.
        """
        self.model.zero_grad(set_to_none=True)
        self.loss().backward()

    def update(self) -> None:
        """Clip and AdamW."""
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()


class Ours(Variant):
    """mmldlm: its model, objective and optimizer as a run builds them.

    bf16 as under ZeRO 1 to 3: weights and gradients in bf16, AdamW on fp32 copies of both.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str = "cpu", **model):
        from mmldlm.engines.optimizer import build_optimizer
        from mmldlm.engines.parameter_plan import ParameterPlan
        from mmldlm.models import MultimodalMMDiT
        from mmldlm.tasks.translation.config import TranslationConfig
        from mmldlm.tasks.translation.noiser import TranslationBatch
        from mmldlm.tasks.translation.objective import TranslationObjective
        from mmldlm.tasks.translation.parameter_plan import no_decay_names

        settings = {
            "hidden_size": shape.width,
            "n_blocks": shape.depth,
            "n_heads": shape.heads,
            "cond_dim": shape.width,
            "tokens_per_latent": 1,
            "max_seq_len": shape.length,
            "latent_dim": shape.latent,
            "vocab_size": shape.vocab,
            "mask_token_id": min(MASK_ID, shape.vocab - 1),
            "pad_token_id": PAD_ID,
            "eos_token_id": min(EOS_ID, shape.vocab - 2),
        }
        if shape.latents > 1:
            side = math.isqrt(shape.latents)
            settings |= {
                "num_latents": shape.latents,
                "latent_grid": [side, side],
                "latent_rope": True,
            }
        settings |= model
        config = TranslationConfig(model=settings)
        torch.manual_seed(0)
        network = awake(MultimodalMMDiT(config.model)).to(device)
        self.masters = []  # fp32 weights of a model in bf16
        if dtype == torch.bfloat16:
            exact, network = network, copy.deepcopy(network).bfloat16()
            self.masters = list(exact.parameters())
            optimizer = build_optimizer(
                exact, ParameterPlan(no_decay=no_decay_names(exact)), config.optimizer
            )
        else:
            optimizer = build_optimizer(
                network, ParameterPlan(no_decay=no_decay_names(network)), config.optimizer
            )
        super().__init__(network, optimizer, device)
        self.clip = config.optimizer.grad_clip_norm
        self.objective, batch = TranslationObjective(config), Batch(shape, device)
        rows = batch.positions // shape.length
        tensors = {
            "text_tokens": batch.tokens,
            "attention_mask": batch.attention_mask,
            "latents": batch.latents,
            "text_timesteps": batch.text_t,
            "latent_timesteps": batch.latent_t,
            "text_positions": batch.positions,
            "text_targets": batch.targets,
            "text_weights": 1 / batch.text_t[rows],
            "text_samples": rows,
            "latent_targets": batch.latent_targets,
            "latent_clean": batch.latent_targets,
            "latent_weights": torch.ones(shape.batch, device=device),
            "length_targets": batch.lengths - 1,
            "length_weights": torch.ones(shape.batch, device=device),
            "text_is_null": torch.zeros(shape.batch, dtype=torch.bool, device=device),
            "latent_is_null": torch.zeros(shape.batch, dtype=torch.bool, device=device),
            "token_positions": batch.attention_mask.flatten().nonzero()[:, 0],
        }
        self.batch = TranslationBatch(
            **tensors,
            ids=np.arange(shape.batch),
            modes=np.zeros(shape.batch),
            real=np.ones(shape.batch, bool),
            counts={
                "text_tokens": batch.num_tokens,
                "latents": shape.batch * shape.latents,
                "texts": shape.batch,
            },
            num_tokens=batch.num_tokens,
            epoch=0,
            index=0,
        )

    def loss(self) -> Tensor:
        return self.objective(self.model, self.batch)[0]

    def update(self) -> None:
        """As the engine `single` does it: the host reads the norm (the loop's one sync), clips and
        steps.
        """
        from mmldlm.engines.optimizer import clipped_step

        weights = list(self.model.parameters())
        if self.masters:
            for master in self.masters:
                # Memory of gradients is taken once, as ZeRO takes its partition's.
                master.grad = torch.empty_like(master) if master.grad is None else master.grad
            torch._foreach_copy_(
                [master.grad for master in self.masters], [weight.grad for weight in weights]
            )
        norm = nn.utils.get_total_norm([p.grad for p in self.masters or weights])
        clipped_step(self.optimizer, self.clip, norm.item(), 1.0)
        if self.masters:
            with torch.no_grad():
                torch._foreach_copy_(weights, self.masters)


def awake(model: nn.Module) -> nn.Module:
    """Give zero-initialized parameters values: products with zeros may be cheaper than with
    numbers.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


class _Timestep(nn.Module):
    def __init__(self, cond: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, cond), nn.SiLU(), nn.Linear(cond, cond))

    def forward(self, t: Tensor) -> Tensor:
        frequencies = torch.exp(-9.21034 / 128 * torch.arange(128, device=t.device))
        angles = t[:, None] * frequencies
        return self.mlp(torch.cat([angles.cos(), angles.sin()], -1).to(self.mlp[0].weight.dtype))


class _Around(nn.Module):
    """Embeddings, conditioning and heads as MM-LDLM puts them around the blocks; logits at all
    positions.
    """

    def __init__(self, shape: Shape):
        super().__init__()
        width = cond = shape.width
        self.tokens = nn.Embedding(shape.vocab, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, shape.length, width))
        self.latent_in = nn.Sequential(
            nn.Linear(shape.latent, 2 * width),
            nn.LayerNorm(2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )
        self.latent_position = nn.Parameter(0.02 * torch.randn(1, shape.latents, width))
        self.text_t, self.latent_t = _Timestep(cond), _Timestep(cond)
        self.joint = nn.Sequential(
            nn.Linear(2 * cond, 4 * cond), nn.SiLU(), nn.Linear(4 * cond, cond)
        )
        self.text_head = nn.Linear(width, shape.vocab)
        self.latent_head = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, shape.latent)
        )

    def blocks(
        self, text: Tensor, latent: Tensor, condition: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward(self, batch: Batch) -> Tensor:
        text = self.tokens(batch.tokens) + self.positions
        latents = batch.latents.to(text.dtype).view(
            len(text), *self.latent_position.shape[1:2], -1
        )
        latent = self.latent_in(latents) + self.latent_position
        times = [F.silu(self.text_t(batch.text_t)), F.silu(self.latent_t(batch.latent_t))]
        condition = self.joint(torch.cat(times, -1))
        text, latent = self.blocks(text, latent, condition, batch.attention_mask)
        logits, prediction = self.text_head(text), self.latent_head(latent).view_as(batch.latents)
        text_loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())
        return text_loss + (prediction.float() - batch.latent_targets).square().mean()


class MmldlmWiring(_Around):
    """PyPI mmdit 0.3.0 as MM-LDLM calls it: depth, widths, condition and 2 residual streams,
    nothing else.
    """

    def __init__(self, shape: Shape):
        super().__init__(shape)
        from mmdit.mmdit_generalized_pytorch import MMDiT

        width = shape.width
        self.mmdit = MMDiT(
            depth=shape.depth,
            dim_modalities=(width, width),
            dim_cond=width,
            qk_rmsnorm=True,
            num_residual_streams=2,
        )

    def blocks(self, text, latent, condition, mask):
        return self.mmdit(
            modality_tokens=(text, latent), modality_masks=(mask, None), time_cond=condition
        )


class Sd3Blocks(_Around):
    """diffusers' SD3 joint blocks (scaled_dot_product_attention, no key mask, no QK norm: as they
    come).
    """

    def __init__(self, shape: Shape):
        super().__init__(shape)
        from diffusers.models.attention import JointTransformerBlock

        self.layers = nn.ModuleList(
            JointTransformerBlock(shape.width, shape.heads, shape.width // shape.heads)
            for _ in range(shape.depth)
        )

    def blocks(self, text, latent, condition, mask):
        for layer in self.layers:
            latent, text = layer(hidden_states=text, encoder_hidden_states=latent, temb=condition)
        return text, latent


class Peer(Variant):
    """A peer's model with torch's default AdamW; bf16 is its own way: weights and moments
    in bf16.
    """

    def __init__(
        self, network: type[_Around], shape: Shape, dtype: torch.dtype, device: str = "cpu"
    ):
        torch.manual_seed(0)
        model = awake(network(shape)).to(device=device, dtype=dtype)
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), device)
        self.batch = Batch(shape, device)

    def loss(self) -> Tensor:
        return self.model(self.batch)


class Gemms:
    """The matrix products that the real work needs: every linear layer's output, input gradient
    and weight gradient.

    Real tokens only; the head, and the last block's layers behind attention, at scored positions
    only. Attention's products are left out, as they are in facts of the issue; `attention=True`
    adds them (two forward, four backward).
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: str = "cpu", attention: bool = False
    ):
        batch = Batch(shape, device)
        width, layers, num_latents = shape.width, [], shape.batch * shape.latents
        for rows, read in ((batch.num_tokens, batch.num_masked), (num_latents, num_latents)):
            layers += shape.depth * [(rows, width, 3 * width)]
            for size in (shape.depth - 1) * [rows] + [read]:
                layers += [
                    (size, width, width),
                    (size, width, 4 * width),
                    (size, 4 * width, width),
                ]
        layers.append((batch.num_masked, width, shape.vocab))
        if shape.latents > 1:  # one latent a sample is next to nothing
            layers += [(num_latents, shape.latent, width), (num_latents, width, shape.latent)]
        make = lambda *size: torch.randn(*size, dtype=dtype, device=device)  # noqa: E731
        # Every layer has its own weight and rows: in a step none of them is still in the cache.
        self.layers = [
            (make(rows, inner), make(outer, inner), make(rows, outer))
            for rows, inner, outer in layers
        ]
        self.attention = []
        if attention:
            for length in shape.lengths().tolist():
                rows = length + shape.latents
                size = (shape.heads, rows, width // shape.heads)
                self.attention.append((make(*size), make(shape.heads, rows, rows)))
        self.depth = shape.depth

    def forward_backward(self) -> None:
        for x, weight, grad in self.layers:
            x @ weight.t(), grad @ weight, grad.t() @ x
        for _ in range(self.depth if self.attention else 0):
            for part, square in self.attention:
                for _ in range(2):
                    part @ part.transpose(1, 2), square @ part, square.transpose(1, 2) @ part


PEERS = {
    "mmldlm_wiring": (MmldlmWiring, "mmdit", "0.3.0"),
    "sd3_blocks": (Sd3Blocks, "diffusers", None),
}


def missing_peers() -> list[str]:
    """Packages of the extra `bench` that are not installed (or not at the version the claims are
    about).
    """
    missing = []
    for network, package, version in PEERS.values():
        try:
            importlib.import_module(package)
            found = importlib.metadata.version(package)
        except ImportError as error:
            missing.append(f"{package} ({error})")
        else:
            if version is not None and found != version:
                missing.append(f"{package}=={version} (found {found})")
        assert issubclass(network, _Around)
    return missing


def build(name: str, shape: Shape, dtype: torch.dtype, device: str = "cpu", **options):
    """A variant by name: ours, mmldlm_wiring, sd3_blocks, gemm, gemm_attention."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    if name == "ours":
        return Ours(shape, dtype, device, **options)
    if name in ("gemm", "gemm_attention"):
        return Gemms(shape, dtype, device, attention=name == "gemm_attention")
    return Peer(PEERS[name][0], shape, dtype, device)
