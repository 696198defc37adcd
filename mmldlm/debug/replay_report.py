"""Results of `mmldlm replay`: one forward and backward pass, its summary and its JSON form."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from mmldlm.debug.nan_tracer import NanOrigin
from mmldlm.utils.formatting import join_some
from mmldlm.utils.json_files import plain_value


@dataclass
class ReplayResult:
    """Result of one forward and backward pass.

    Attributes:
        ids: the samples.
        loss: contribution of this micro-batch to the loss.
        grad_norm: norm of its gradients alone.
        origins: non-finite inputs, then the first operation of the forward and of the backward
            pass that produced a non-finite number.
        bad_gradients: parameters with a non-finite gradient.
        only_fused: the same pass run layer by layer is clean, so the fused blocks produce the bad
            numbers.
    """

    ids: list[int]
    loss: float
    grad_norm: float
    origins: list[NanOrigin] = field(default_factory=list)
    bad_gradients: list[str] = field(default_factory=list)
    only_fused: bool = False

    @property
    def is_clean(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return not self.bad_gradients and math.isfinite(self.loss)

    def summary(self) -> str:
        """Describe the result in one line."""
        parts = [str(origin) for origin in self.origins]
        if self.only_fused:
            parts.append("only where blocks run fused; layer by layer every number is finite")
        if self.bad_gradients:
            parts.append(f"non-finite gradients of {join_some(self.bad_gradients, 3)}")
        return "; ".join(parts) or f"loss {self.loss}"

    def to_json(self) -> dict:
        """Return the result for --json; non-finite numbers are words."""
        return plain_value(
            {
                "ids": self.ids,
                "clean": self.is_clean,
                "sentence": self.summary(),
                "origins": [vars(origin) for origin in self.origins],
                "bad_gradients": self.bad_gradients,
                "only_fused": self.only_fused,
                "loss": self.loss,
                "grad_norm": self.grad_norm,
            }
        )


def is_clean(report: dict) -> bool:
    """Whether a report found nothing.

    A spike's numbers are finite; its samples are listed by gradient norm.
    """
    is_spike = report["reason"].startswith("spike")
    return not is_spike and all(found["clean"] for found in report["dtypes"].values())


def print_samples(samples: list[dict]) -> None:
    """Print the failing samples, and the largest gradient norms of the others."""
    bad = [sample for sample in samples if not sample["clean"]]
    for sample in bad[:16]:
        print(f"         sample {sample['ids'][0]}: {sample['sentence']}")
    if len(bad) > 16:
        print(f"         and {len(bad) - 16} more samples")
    clean = sorted(
        (sample for sample in samples if sample["clean"]), key=lambda sample: -sample["grad_norm"]
    )
    if clean:
        largest = ", ".join(
            f"{sample['ids'][0]} ({sample['grad_norm']:.3g})" for sample in clean[:4]
        )
        print(
            f"         {len(clean)} sample(s) clean by themselves; largest gradient norms:"
            f" {largest}"
        )


def explain_clean(
    run_dir: Path, case: dict, is_exact: bool, age: int | None, bad: list[dict]
) -> str:
    """Advice for a replay that found nothing.

    Args:
        age: steps between the weights used and those of the step.
        bad: the micro-batches that had a non-finite loss in the run.
    """
    if not is_exact:
        older = f"{age} step(s) older than" if age else "not"
        return (
            f"nothing found with these weights, which are {older} those of the step. The weights"
            f" themselves may be the cause: `mmldlm replay {run_dir} {case['step']} --exact` first"
            " trains up to the step on this process (the micro-batches of all ranks in sequence)"
        )
    ranks = (
        ", ".join(sorted({f"rank {entry['rank']} on {entry['host']}" for entry in bad}))
        or "the step's ranks"
    )
    return (
        "nothing found: data, weights and model give finite numbers here. What differs is the"
        f" machine and the engine: check the hardware of {ranks} (ECC, memory errors of other"
        " jobs), or run the step under engine.kind=single"
    )
