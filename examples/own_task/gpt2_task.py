"""A task from outside the package: train a small GPT-2 of `transformers` on the lines of a text
file, byte by byte.

mmldlm train --config small.yaml data.text_file=FILE, started in this folder. docs/tasks.md
explains every part.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from mmldlm.config.schema import Config, DataConfig
from mmldlm.config.section import FilePath, OnResume, Section
from mmldlm.data.batch import Batch
from mmldlm.data.run_data import RunData
from mmldlm.errors import UserError
from mmldlm.tasks.base import Metric, ModelSizes, Task

EOS, VOCAB_SIZE = 256, 257  # a token is a byte; EOS begins and ends every line, and pads a batch


class Gpt2ModelConfig(Section):
    """The keys of transformers.GPT2Config that a run may set."""

    on_resume = OnResume.FIXED  # a resume refuses another model

    n_layer: int = Field(4, ge=1)
    """Number of blocks."""
    n_head: int = Field(4, ge=1)
    """Attention heads; they divide n_embd."""
    n_embd: int = Field(128, ge=1)
    """Width."""
    n_positions: int = Field(256, ge=2)
    """Tokens of the longest line, EOS included; longer lines are cut."""


class Gpt2DataConfig(DataConfig):
    text_file: FilePath = None
    """UTF-8 text, one sample per line."""
    validation_lines: int = Field(100, ge=1)
    """Number of lines at the end of the file that are the validation split."""


class Gpt2RunConfig(Config):
    data: Gpt2DataConfig = Field(default_factory=Gpt2DataConfig)
    model: Gpt2ModelConfig = Field(default_factory=Gpt2ModelConfig)


@dataclass(kw_only=True)
class TextData(RunData):
    def fingerprint(self) -> str:
        return hashlib.sha256(b"\n".join(self.train)).hexdigest()


class LineCollator:
    """Makes micro-batches of lines.

    It draws no random numbers: a row is a function of its line alone.
    """

    def collate(self, batch, slots, samples, lengths) -> Batch:
        import torch

        ids, real = batch.samples_at(slots)
        rows, bad = [], []
        for row, (sample, is_real) in enumerate(zip(ids.tolist(), real.tolist())):
            line = samples[sample][: lengths[sample] - 1]
            if is_real and b"\0" in line:  # left out: it becomes a placeholder, with the weight 0
                reason = f"a zero byte at position {line.index(0)}: not text"
                bad.append({"id": sample, "reason": reason})
                line, real[row] = b"", False
            rows.append([EOS, *line, EOS])
        width = max(map(len, rows))
        tokens = torch.tensor([row + [EOS] * (width - len(row)) for row in rows])
        num_targets = torch.tensor([len(row) - 1 for row in rows]) * torch.from_numpy(real)
        weights = (torch.arange(width - 1) < num_targets[:, None]).float()
        return Batch(
            tensors={"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights},
            ids=ids,
            real=real,
            counts={"tokens": int(lengths[batch.ids].sum())},  # of the GLOBAL batch
            num_tokens=int(num_targets.sum()),
            epoch=batch.epoch,
            index=batch.index,
            bad=bad,
        )


def next_byte_loss(module, batch: Batch):
    """Return this micro-batch's share of the global batch's loss, and the sums of the metrics."""
    import torch.nn.functional as F

    logits = module(input_ids=batch.tensors["inputs"], use_cache=False).logits.float()
    nll = F.cross_entropy(logits.transpose(1, 2), batch.tensors["targets"], reduction="none")
    total = (nll * batch.tensors["weights"]).sum()
    loss = total / batch.counts["tokens"]
    return loss, {"loss": loss.detach(), "nll_sum": total.detach()}


class Gpt2Task(Task):
    name = "gpt2"
    config_class = Gpt2RunConfig
    sums = ("loss", "nll_sum")
    metrics = (Metric("nll", "nll_sum", "tokens", label="nll", is_loss=True),)

    def names_data(self, config: Gpt2RunConfig) -> bool:
        return config.data.text_file is not None

    def open_data(self, config: Gpt2RunConfig) -> TextData:
        path, count = Path(config.data.text_file or ""), config.data.validation_lines
        lines = path.read_bytes().splitlines() if path.is_file() else []
        if len(lines) <= count:
            found = f"{len(lines)} lines in data.text_file={path}"
            fix = "name a longer one, or lower validation_lines"
            raise UserError(f"a file of more than data.validation_lines={count} lines", found, fix)
        longest = config.model.n_positions
        lengths = np.array([min(len(line) + 1, longest) for line in lines], np.int32)
        train, validation = config.data.limit_samples(lengths[:-count], lengths[-count:])
        data = {"train": lines[:-count], "validation": lines[-count:], "source": str(path)}
        return TextData(config=config, **data, train_lengths=train, validation_lengths=validation)

    def model_sizes(self, config: Gpt2RunConfig, length: int) -> ModelSizes:
        model, num_bytes = config.model, 4 if config.training.dtype == "fp32" else 2
        tokens = config.training.train_batch_size * length
        block = 12 * model.n_embd**2 + 13 * model.n_embd
        outside = (VOCAB_SIZE + model.n_positions + 2) * model.n_embd
        # In the compute dtype and in fp32, with their gradients.
        logits = (8 + 2 * num_bytes) * VOCAB_SIZE * tokens
        return ModelSizes(
            trainable=model.n_layer * block + outside,
            frozen=0,
            largest_block=max(block, outside),
            buffers=0,
            # arXiv 2205.05198, with fused attention.
            activations=17 * num_bytes * model.n_embd * model.n_layer * tokens,
            logits_cpu=logits,
            logits_gpu=logits,
        )

    def build_model(self, data: TextData):
        import torch
        from transformers import GPT2LMHeadModel

        torch.manual_seed(data.config.training.seed)
        return GPT2LMHeadModel(gpt2_config(data.config))

    def collator(self, data: TextData, seed: int | None = None) -> LineCollator:
        return LineCollator()

    def objective(self, config: Gpt2RunConfig):
        return next_byte_loss

    def model_config(self, data: TextData) -> dict:
        return {**gpt2_config(data.config).to_dict(), **super().model_config(data)}


def gpt2_config(config: Gpt2RunConfig):
    from transformers import GPT2Config

    # The masks of dropout would depend on the world size.
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ids = {"vocab_size": VOCAB_SIZE, "bos_token_id": EOS, "eos_token_id": EOS}
    return GPT2Config(
        **config.model.model_dump(), **dropout, **ids, architectures=["GPT2LMHeadModel"]
    )
