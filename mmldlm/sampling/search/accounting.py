"""What sampling a text costs: FLOPs, calls of the judge, and passes one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmldlm.sampling.search.judge import Judge
    from mmldlm.sampling.text.loop import TextSamples
    from mmldlm.tasks.text_task import TextTask


@dataclass
class SamplingCost:
    """The cost of N texts, so that arms of equal cost can be compared.

    Attributes:
        num_texts: N.
        denoiser_rows: passes of the model times the texts in them.
        denoiser_positions: text positions in these rows, EOS counted.
        denoiser_flops: forward FLOPs of these rows; None for a task without a cost model.
        judge: its name; None: the texts were written without one.
        judge_calls: texts that the judge embedded.
        judge_tokens: tokens that it read, special tokens counted.
        judge_flops: its forward FLOPs.
        depth: passes of model and judge one after the other, of the text that took most.
    """

    num_texts: int
    denoiser_rows: int = 0
    denoiser_positions: float = 0.0
    denoiser_flops: float | None = 0.0
    judge: str | None = None
    judge_calls: int = 0
    judge_tokens: int = 0
    judge_flops: float = 0.0
    depth: int = 0

    @property
    def flops(self) -> float | None:
        """Of model and judge."""
        return None if self.denoiser_flops is None else self.denoiser_flops + self.judge_flops

    def add_rows(self, rows: int, positions: float, flops: float | None) -> None:
        """Add passes of the model."""
        self.denoiser_rows += rows
        self.denoiser_positions += positions
        unknown = flops is None or self.denoiser_flops is None
        self.denoiser_flops = None if unknown else self.denoiser_flops + flops

    def add_texts(self, task: TextTask, model_config: Any, samples: TextSamples) -> None:
        """Add what `TextTask.write_texts` did; the depth is the caller's to set."""
        passes = samples.passes.double()
        positions = samples.num_rows * float(
            (passes * samples.lengths).sum() / passes.sum().clamp_min(1)
        )
        self.add_rows(samples.num_rows, positions, task.writing_flops(model_config, samples))

    def add_judge(self, judge: Judge) -> None:
        """Take over the counts of a judge that served these texts alone."""
        self.judge, self.judge_calls = judge.name, judge.num_calls
        self.judge_tokens, self.judge_flops = judge.num_tokens, judge.flops

    def per_text(self) -> dict[str, Any]:
        """JSON-ready means over the texts."""
        count = self.num_texts
        return {
            "judge": self.judge,
            "denoiser_rows": self.denoiser_rows / count,
            "denoiser_positions": self.denoiser_positions / count,
            "denoiser_gflops": None
            if self.denoiser_flops is None
            else self.denoiser_flops / count / 1e9,
            "judge_calls": self.judge_calls / count,
            "judge_tokens": self.judge_tokens / count,
            "judge_gflops": self.judge_flops / count / 1e9,
            "gflops": None if self.flops is None else self.flops / count / 1e9,
            "depth": self.depth,
        }
