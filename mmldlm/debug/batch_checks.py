"""Sanity checks of a micro-batch: device, value ranges, and agreement with the store."""

from __future__ import annotations

import torch

from mmldlm.config.schema import Config
from mmldlm.data.batching.run_data import RunData
from mmldlm.debug.findings import Findings, format_names
from mmldlm.tasks.translation.noiser import NoisedBatch


def check_pinned(batches: list[NoisedBatch], device: torch.device, findings: Findings) -> None:
    """Check that batches for a GPU are in pinned memory; otherwise the copy is synchronous."""
    if device.type == "cuda":
        tensors = [item for batch in batches for item in batch.tensors.items()]
        unpinned = [name for name, tensor in tensors if tensor.numel() and not tensor.is_pinned()]
        if unpinned:
            findings.failed("batches", f"not in pinned memory: {format_names(unpinned)}")


def check_batch(batch: NoisedBatch, data: RunData, device: torch.device, findings: Findings) -> None:
    """Check a micro-batch on the device against the store it was read from."""
    for bad in batch.bad:
        findings.failed("batches", f"sample {bad['id']} of the store is excluded: {bad['reason']}")
    for text in [*_tensor_problems(batch, data.config, device), *_store_problems(batch, data)]:
        findings.failed("batches", text)


def _tensor_problems(batch: NoisedBatch, config: Config, device: torch.device) -> list[str]:
    tensors, problems = batch.tensors, []
    for name, tensor in tensors.items():
        if tensor.device != device:
            problems.append(f"{name} on {tensor.device}, not on {device}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"{int((~torch.isfinite(tensor)).sum())} non-finite values in {name}")
    for name in ("text_tokens", "text_targets"):
        ids = tensors[name]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < config.model.vocab_size:
            problems.append(
                f"{name} holds ids {int(ids.min())}..{int(ids.max())} outside 0..{config.model.vocab_size - 1}"
            )
    for name in ("text_timesteps", "latent_timesteps"):
        if not bool(((tensors[name] >= 0) & (tensors[name] <= 1)).all()):
            problems.append(f"{name} outside [0, 1]")
    if not bool(tensors["attention_mask"].any(dim=1).all()):
        problems.append("a text without a single token")
    return problems


def _store_problems(batch: NoisedBatch, data: RunData) -> list[str]:
    """Compare the reconstructed clean text and latent of every real row with the store."""
    tensors = {name: tensor.cpu() for name, tensor in batch.tensors.items()}
    rows, clean = data.train.get(batch.ids), tensors["text_tokens"].clone()
    width = clean.shape[1]
    positions = tensors["text_positions"]
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < clean.numel():
        return [f"text_positions outside 0..{clean.numel() - 1}"]
    clean.view(-1)[positions] = tensors["text_targets"]
    latents = torch.from_numpy(rows.latents)
    if data.config.latent_diffusion.l2_normalise:
        latents = torch.nn.functional.normalize(latents.float(), dim=-1)
    latents = (latents - torch.as_tensor(data.latent_mean)) / torch.as_tensor(data.latent_std)
    problems = []
    for row in batch.real.nonzero()[0].tolist():
        text = torch.tensor([*rows.tokens[row].tolist(), data.config.model.eos_token_id])
        real = torch.arange(width) < len(text)
        if len(text) > width or not torch.equal(tensors["attention_mask"][row], real):
            problems.append(f"sample {batch.ids[row]}: attention_mask is not that of a text of {len(text)} tokens")
        elif not torch.equal(clean[row, : len(text)], text):
            problems.append(f"sample {batch.ids[row]}: its tokens are not the store's")
        if not torch.allclose(tensors["latent_clean"][row], latents[row], rtol=1e-4, atol=1e-4):
            problems.append(f"sample {batch.ids[row]}: its latent is not the store's")
    return problems
