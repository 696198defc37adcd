"""training.init_from: the weights of another run or exported model, and nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from mmldlm.checkpoints.formats.open import open_source
from mmldlm.errors import UserError
from mmldlm.models.pretrained_io import open_safetensors

EXPORTED = "model.safetensors"


@dataclass
class InitReport:
    """What of a model was taken from where.

    Attributes:
        taken: names of parameters that were copied. missing: those of the model that the source does not have.
        unfit: name -> (shape there, shape here). unused: tensors of the source that the model does not have.
    """

    source: str
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For the screen: one line of counts, one for each kind of mismatch."""
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        found = [f"{len(self.loaded)} of {total} parameters from {self.source}"]
        if self.missing:
            found.append(f"kept as initialised, not in the source: {join_some(self.missing)}")
        if self.mismatched:
            told = [f"{name} {there} there, {here} here" for name, (there, here) in self.mismatched.items()]
            found.append(f"kept as initialised, of another shape: {join_some(told)}")
        if self.unexpected:
            found.append(f"not used, not in this model: {join_some(self.unexpected)}")
        return found


def init_weights(model: nn.Module, path: str) -> InitReport:
    """Copy every parameter of the same name and shape into model (before an engine wraps it).

    Buffers (the latent statistics) stay those of the present data. Every rank reads for itself.

    Args:
        path: a run, a checkpoint of any engine, a DeepSpeed folder, a model.pt, or an exported model's folder.

    Raises:
        UserError: nothing readable there, no parameter that fits, or a NaN or infinite value in one that does.
    """
    parameters = dict(model.named_parameters())
    report = InitReport(path)
    buffers = {name for name, _ in model.named_buffers()}
    bad: dict[str, int] = {}
    with torch.no_grad():
        for name, shape, read in _tensors(Path(path)):
            if name in buffers:
                continue
            if name not in parameters:
                report.unexpected.append(name)
            elif tuple(shape) != tuple(parameters[name].shape):
                report.mismatched[name] = (tuple(shape), tuple(parameters[name].shape))
            else:
                parameters[name].copy_(read())
                report.loaded.append(name)
                num_bad = int((~torch.isfinite(parameters[name])).sum())  # as taken: fp32 may not hold what fp64 did
                if num_bad:
                    bad[name] = num_bad
    if bad:
        told = [f"{num_bad} NaN or infinite values in {name}" for name, num_bad in bad.items()]
        raise UserError(
            f"finite weights in {path}",
            join_some(told),
            "take an older checkpoint of that run (RUN/checkpoints/step_...), or an export of one",
        )
    report.missing = [name for name in parameters if name not in report.loaded and name not in report.mismatched]
    if not report.loaded:
        raise UserError(
            f"weights for this model in training.init_from={path}",
            "; ".join(report.lines()),
            "check the path, and model.* against its config.json",
        )
    return report


def _tensors(path: Path):
    """(name, shape, function that reads it as a torch tensor) of every stored tensor."""
    exported = path / EXPORTED if path.is_dir() else path
    if exported.suffix == ".safetensors" and exported.is_file():
        with open_safetensors(exported) as file:
            for name in file.keys():
                yield name, file.get_slice(name).get_shape(), lambda name=name: file.get_tensor(name)
        return
    # The readers' own look at each number advises an option that only `convert` has; init_weights looks at all formats.
    with open_source(path, allow_nonfinite=True, weights_only=True).weights as source:
        for name, info in source.tensors.items():
            yield name, info.shape, lambda name=name, info=info: as_torch(source.read(name), info.dtype)


def as_torch(values, dtype: str) -> torch.Tensor:
    """What WeightSource.read gave, as a tensor of its dtype."""
    tensor = torch.from_numpy(values.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def join_some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
