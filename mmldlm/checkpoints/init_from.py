"""training.init_from: initialize a model with the weights of another run or an exported model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from mmldlm.checkpoints.formats.open import open_source
from mmldlm.checkpoints.formats.wrapper_names import prefix_to_match
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some


@dataclass
class InitReport:
    """Report of the weights that were copied into a model.

    Attributes:
        source: Path of the source.
        loaded: Names of the parameters that were copied.
        missing: Parameters of the model that the source does not have.
        mismatched: Name -> (shape in the source, shape in the model).
        unexpected: Tensors of the source that the model does not have.
        notes: Further facts on the source, such as a prefix that was removed from its names.
    """

    source: str
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def messages(self) -> list[str]:
        """Return one line of counts, and one per kind of mismatch."""
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        lines = [f"{len(self.loaded)} of {total} parameters from {self.source}"]
        if self.missing:
            lines.append(f"kept as initialized, not in the source: {join_some(self.missing)}")
        if self.mismatched:
            shapes = [
                f"{name} {in_source} there, {in_model} here"
                for name, (in_source, in_model) in self.mismatched.items()
            ]
            lines.append(f"kept as initialized, of another shape: {join_some(shapes)}")
        if self.unexpected:
            lines.append(f"not used, not in this model: {join_some(self.unexpected)}")
        return lines + self.notes


def init_weights(model: nn.Module, path: str) -> InitReport:
    """Copy every parameter of the same name and shape into a model, before an engine wraps it.

    Buffers (the latent statistics) remain those of the current data. Every rank reads for itself.

    Args:
        model: Model.
        path: Path of a run, a checkpoint of any engine, a DeepSpeed folder, a model.pt, or the
            folder of an exported model.

    Raises:
        UserError: nothing readable there, no parameter matches, or one that does has NaN or
            infinite values.
    """
    parameters = dict(model.named_parameters())
    first_name = {parameter: name for name, parameter in parameters.items()}
    # Tied weights have several names, each of which a source may use.
    names = {
        name: first_name[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    report = InitReport(path)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    bad: dict[str, int] = {}
    # Non-finite values are checked below for all formats; the reader's error names an option of
    # `convert`.
    opened = open_source(path, allow_nonfinite=True, weights_only=True)
    with torch.no_grad(), opened.weights as source:
        # The names of the model decide whether `module.` is a wrapper's; open_source could not
        # know.
        source.notes = [
            note.partition("; --")[0] for note in source.notes if "--strip-prefix" not in note
        ]
        prefix = prefix_to_match(source.tensors, {*names, *buffers})
        if prefix:
            source.notes.append(f"the prefix {prefix!r} was removed from the names of {path}")
        for stored_name, info in source.tensors.items():
            own_name = stored_name.removeprefix(prefix)
            name = names.get(own_name, own_name)
            # What the source has under the first name of a tied weight, if this is another one.
            first = source.tensors.get(prefix + name) if own_name != name else None
            is_tied = first is not None and (info.alias_of or first.alias_of == stored_name)
            if name in buffers or is_tied:
                continue
            if name not in parameters:
                report.unexpected.append(own_name)
            elif first is not None:
                source.notes.append(
                    f"not used, since this model ties it to {name}: {own_name}, which has a"
                    f" tensor of its own in {path}"
                )
            elif info.shape != tuple(parameters[name].shape):
                report.mismatched[name] = (info.shape, tuple(parameters[name].shape))
            else:
                parameters[name].copy_(as_torch(source.read(stored_name), info.dtype))
                report.loaded.append(name)
                # After the copy: fp32 may overflow where fp64 did not.
                num_bad = int((~torch.isfinite(parameters[name])).sum())
                if num_bad:
                    bad[name] = num_bad
        report.notes = source.notes
    if bad:
        counts = [f"{num_bad} NaN or infinite values in {name}" for name, num_bad in bad.items()]
        raise UserError(
            f"finite weights in {path}",
            join_some(counts),
            "give an older checkpoint of that run (RUN/checkpoints/step_...), or an export of one",
        )
    report.missing = [
        name for name in parameters if name not in report.loaded and name not in report.mismatched
    ]
    if not report.loaded:
        raise UserError(
            f"weights for this model in training.init_from={path}",
            "; ".join(report.messages()),
            "check the path, and compare model.* with its config.json; `mmldlm convert SRC OUT"
            " --strip-prefix PREFIX` removes a prefix that no wrapper of torch's added",
        )
    return report


def as_torch(values: np.ndarray, dtype: str) -> torch.Tensor:
    """Return an array of WeightSource.read as a tensor of its dtype."""
    tensor = torch.from_numpy(values.copy())
    return tensor.view(getattr(torch, dtype))
