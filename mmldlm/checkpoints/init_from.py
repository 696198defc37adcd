"""training.init_from: initialize a model with the weights of another run or an exported model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from mmldlm.checkpoints.formats.open import open_source
from mmldlm.checkpoints.layout import SAFETENSORS_FILE
from mmldlm.errors import UserError
from mmldlm.models.pretrained_io import iter_safetensors
from mmldlm.utils.formatting import join_some


@dataclass
class InitReport:
    """What was copied into a model.

    Attributes:
        source: the path.
        loaded: names of the parameters that were copied.
        missing: parameters of the model that the source does not have.
        mismatched: name -> (shape in the source, shape in the model).
        unexpected: tensors of the source that the model does not have.
    """

    source: str
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)

    def messages(self) -> list[str]:
        """Return one line of counts, and one per kind of mismatch."""
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        lines = [f"{len(self.loaded)} of {total} parameters from {self.source}"]
        if self.missing:
            lines.append(f"kept as initialized, not in the source: {join_some(self.missing)}")
        if self.mismatched:
            shapes = [f"{name} {theirs} there, {ours} here" for name, (theirs, ours) in self.mismatched.items()]
            lines.append(f"kept as initialized, of another shape: {join_some(shapes)}")
        if self.unexpected:
            lines.append(f"not used, not in this model: {join_some(self.unexpected)}")
        return lines


def init_weights(model: nn.Module, path: str) -> InitReport:
    """Copy every parameter of the same name and shape into a model, before an engine wraps it.

    Buffers (the latent statistics) remain those of the current data. Every rank reads for itself.

    Args:
        model: the model.
        path: a run, a checkpoint of any engine, a DeepSpeed folder, a model.pt, or an exported model's folder.

    Raises:
        UserError: nothing readable there, no parameter matches, or one that does has NaN or infinite values.
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
                num_bad = int(
                    (~torch.isfinite(parameters[name])).sum()
                )  # after the copy: fp32 may overflow where fp64 did not
                if num_bad:
                    bad[name] = num_bad
    if bad:
        counts = [f"{num_bad} NaN or infinite values in {name}" for name, num_bad in bad.items()]
        raise UserError(
            f"finite weights in {path}",
            join_some(counts),
            "give an older checkpoint of that run (RUN/checkpoints/step_...), or an export of one",
        )
    report.missing = [name for name in parameters if name not in report.loaded and name not in report.mismatched]
    if not report.loaded:
        raise UserError(
            f"weights for this model in training.init_from={path}",
            "; ".join(report.messages()),
            "check the path, and compare model.* with its config.json",
        )
    return report


def _tensors(path: Path) -> Iterator[tuple[str, tuple[int, ...], Callable[[], torch.Tensor]]]:
    """Yield (name, shape, function that reads the tensor) of every stored tensor."""
    exported = path / SAFETENSORS_FILE if path.is_dir() else path
    if exported.suffix == ".safetensors" and exported.is_file():
        yield from iter_safetensors([exported])
        return
    # Non-finite values: init_weights checks them for all formats; the reader's error names an option of `convert`.
    with open_source(path, allow_nonfinite=True, weights_only=True).weights as source:
        for name, info in source.tensors.items():
            yield name, info.shape, lambda name=name, info=info: as_torch(source.read(name), info.dtype)


def as_torch(values, dtype: str) -> torch.Tensor:
    """Return an array of WeightSource.read as a tensor of its dtype."""
    tensor = torch.from_numpy(values.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
