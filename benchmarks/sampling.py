"""Text from embeddings: time of sampling against the matrix products it needs and against
MM-LDLM's wiring.

    python benchmarks/sampling.py [--quick] [--json FILE] [--rounds N] [--steps K]

One process, one thread, variants in turns, medians of process CPU seconds. 64 texts of mixed
lengths, equal numbers of steps, random weights (time does not depend on them). The peer (extra
`bench`): PyPI mmdit 0.3.0 wired as MM-LDLM wires it, and its sampler: one batch padded to the
longest text, every step computes all logits of all rows, a softmax and a draw at all positions,
and commits the surest on a cosine schedule in a Python loop over texts. Against it ours draws too
(temperature 1); against the floor it takes the likeliest tokens. The floor: the matrix products of
the texts that are unfinished in each pass, with logits where the sampler reads them, in aligned
rows.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import _report

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from _reference_steps import (  # noqa: E402
    EOS_ID,
    MASK_ID,
    PAD_ID,
    MmldlmWiring,
    Shape,
    awake,
    missing_peers,
)
from torch import Tensor  # noqa: E402

from mmldlm.diffusion import MaskedDiffusion  # noqa: E402
from mmldlm.models import MultimodalMMDiT  # noqa: E402
from mmldlm.models.memory import ROW_ALIGNMENT  # noqa: E402
from mmldlm.models.mmdit_config import ModelConfig  # noqa: E402
from mmldlm.sampling.text import sample_text  # noqa: E402

CHUNKS = 4


def text_lengths(count: int, longest: int) -> Tensor:
    """[N] lengths, EOS counted: those of short sentences, the mean about 40 % of the longest."""
    generator = torch.Generator().manual_seed(0)
    return (
        (torch.rand(count, generator=generator) * 0.8 * longest + 2)
        .long()
        .index_fill(0, torch.tensor([0]), longest)
    )


@dataclass
class Pass:
    """What one call of our model computes: texts, their real tokens, and positions with logits."""

    texts: int
    tokens: int
    logits: int


class Ours:
    """mmldlm's model and sampler."""

    def __init__(self, shape: Shape, lengths: Tensor, steps: int):
        config = ModelConfig(
            hidden_size=shape.width,
            n_blocks=shape.depth,
            n_heads=shape.heads,
            cond_dim=shape.width,
            tokens_per_latent=CHUNKS,
            max_seq_len=shape.length,
            latent_dim=shape.latent,
            vocab_size=shape.vocab,
            mask_token_id=MASK_ID,
            pad_token_id=PAD_ID,
            eos_token_id=EOS_ID,
        )
        torch.manual_seed(0)
        self.model, self.lengths, self.steps = (
            awake(MultimodalMMDiT(config)).eval(),
            lengths,
            steps,
        )
        self.latents = torch.randn(len(lengths), shape.latent)

    def __call__(self, sampler: str = "confidence", temperature: float = 0.0) -> None:
        sample_text(
            self.model,
            self.latents,
            diffusion=MaskedDiffusion(MASK_ID),
            steps=self.steps,
            lengths=self.lengths,
            sampler=sampler,
            temperature=temperature,
        )

    def passes(self, sampler: str) -> list[Pass]:
        """What each call of the model computes."""
        found: list[Pass] = []

        def note(module, args):
            text, _, query = args
            real = text.attention_mask.sum(1)
            found.append(Pass(len(real), int(real.sum()), len(query.positions)))

        handle = self.model.register_forward_pre_hook(note)
        self(sampler)
        handle.remove()
        return found


class Peer:
    """MM-LDLM's model and sampler, on texts of given lengths (its own has one length for all)."""

    def __init__(self, shape: Shape, lengths: Tensor, steps: int):
        torch.manual_seed(0)
        self.model, self.lengths, self.steps = awake(MmldlmWiring(shape)).eval(), lengths, steps
        self.latents, self.width = torch.randn(len(lengths), shape.latent), shape.length

    @torch.inference_mode()
    def __call__(self) -> None:
        model, count = self.model, len(self.lengths)
        tokens = torch.full((count, self.width), MASK_ID)
        is_open = torch.arange(self.width) < self.lengths[:, None]
        tokens[~is_open] = PAD_ID
        everything = torch.ones_like(is_open)
        for k, t in enumerate(torch.linspace(1, 0, self.steps).tolist()):
            text = model.tokens(tokens) + model.positions
            latent = model.latent_in(self.latents[:, None]) + model.latent_position
            times = [
                F.silu(net(torch.full((count,), value)))
                for net, value in ((model.text_t, t), (model.latent_t, 0.0))
            ]
            text, latent = model.blocks(
                text, latent, model.joint(torch.cat(times, -1)), everything
            )
            model.latent_head(latent)
            probabilities = model.text_head(text).softmax(-1)
            drawn = torch.multinomial(probabilities.flatten(0, 1), 1).view(count, -1)
            sure = probabilities.amax(-1).masked_fill(~is_open, -1.0)
            left = math.cos(0.5 * math.pi * (k + 1) / self.steps) if k + 1 < self.steps else 0.0
            for row in range(count):
                number = int(is_open[row].sum()) - int(left * int(self.lengths[row]))
                if number > 0:
                    place = sure[row].topk(number).indices
                    tokens[row, place] = drawn[row, place]
                    is_open[row, place] = False


class Gemms:
    """The matrix products of our passes: linear layers of all blocks, and the logits; attention is
    left out.
    """

    def __init__(self, shape: Shape, passes: list[Pass]):
        self.shape, self.passes, width = shape, passes, shape.width
        make = lambda *size: torch.randn(*size)  # noqa: E731
        sizes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        self.layers = [
            [[make(*size) for size in sizes] for _ in range(2)] for _ in range(shape.depth)
        ]
        self.head = make(shape.vocab, width)
        most = max(part.tokens + CHUNKS * part.texts for part in passes)
        self.narrow, self.wide = make(most, width), make(most, 4 * width)
        self.aligned = -(-shape.vocab // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @torch.inference_mode()
    def __call__(self) -> None:
        width = self.shape.width
        for part in self.passes:
            for depth, block in enumerate(self.layers):
                # Behind the last block's attention only the rows of logits are needed.
                read = (
                    (part.logits, 0)
                    if depth + 1 == len(self.layers)
                    else (part.tokens, CHUNKS * part.texts)
                )
                for stream, rows in zip(block, (part.tokens, CHUNKS * part.texts)):
                    self.narrow[:rows] @ stream[0]
                for stream, rows in zip(block, read):
                    for weight in stream[1:]:
                        (self.narrow if len(weight) == width else self.wide)[:rows] @ weight
            # In aligned rows, as our head writes them: on some CPUs `hidden @ weight.T` takes up
            # to 1.7 times as long.
            logits = self.narrow.new_empty(part.logits, self.aligned)[:, : self.shape.vocab]
            torch.mm(self.narrow[: part.logits], self.head.t(), out=logits)


def measure(variants: dict, rounds: int) -> dict[str, float]:
    """Median CPU seconds of each variant."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name, variant in variants.items():
            started = time.process_time()
            variant()
            if turn:  # the first one warms up
                taken[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a toy, to see that it runs; times are not judged"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="denoising steps (default 12)")
    args = parser.parse_args()
    if missing := missing_peers():
        print(
            f"SKIPPED: this benchmark needs the peers of the extra `bench`: {', '.join(missing)}."
        )
        _report.write(args.json, [], args.quick, skipped=missing)
        return _report.COULD_NOT_CHECK
    torch.set_num_threads(1)
    shape, count = Shape("h192 x 4", depth=4, width=192, length=48, latent=384), 64
    if args.quick:
        shape, count, args.rounds = (
            Shape("toy", depth=1, width=64, length=12, latent=16, vocab=500),
            8,
            1,
        )
    lengths = text_lengths(count, shape.length)
    ours = Ours(shape, lengths, args.steps)
    variants = {"ours": ours, "mmldlm_wiring": Peer(shape, lengths, args.steps)}
    variants["ours, drawn"] = lambda: ours(temperature=1.0)
    variants["gemm"] = Gemms(shape, ours.passes("confidence"))
    variants["ours, random order"] = lambda: ours("scheduled")
    variants["gemm, random order"] = Gemms(shape, ours.passes("scheduled"))
    seconds = measure(variants, args.rounds)
    words = int((lengths - 1).sum())
    print(
        f"{count} texts of {words} tokens, {shape.name}, {args.steps} steps: CPU seconds, tokens"
        " per CPU second"
    )
    for name, value in seconds.items():
        print(f"  {name:20} {value:7.3f}  {words / value:8.0f}")
    speedup = seconds["mmldlm_wiring"] / seconds["ours, drawn"]
    times = max(seconds[f"ours{kind}"] / seconds[f"gemm{kind}"] for kind in ("", ", random order"))
    claims = [
        _report.claim("sampling_speedup_mmldlm_wiring", speedup, ">=", 5, measured=True),
        _report.claim("times_gemm_sampling", times, "<=", 1.5, measured=True),
    ]
    return _report.write(
        args.json, claims, args.quick, seconds=seconds, tokens=words, steps=args.steps
    )


if __name__ == "__main__":
    sys.exit(main())
