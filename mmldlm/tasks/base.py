"""The seam between the training system and what is trained: one Task per model.

Everything else (engines, loop, guard, resume, replay, sanity, preflight, convert, logs, plots)
asks the task and names no model. docs/tasks.md explains it with an example of one file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired, TypedDict

from mmldlm.config.schema import Config
from mmldlm.data.batch import Batch, Collator
from mmldlm.data.run_data import RunData
from mmldlm.errors import UserError

# The registry, which preflight imports, works without torch.
if TYPE_CHECKING:
    from torch import Tensor, nn

    from mmldlm.engines.base import Engine
    from mmldlm.engines.parameter_plan import ParameterPlan
    from mmldlm.tasks.validation import PassTotals, Validation

Objective = Callable[["nn.Module", Batch], tuple["Tensor", dict[str, "Tensor"]]]
"""(module, batch on the device) -> (loss, {name: sum}).

The loss is this micro-batch's share of the GLOBAL batch's loss: sums divided by `batch.counts`, so
that adding up gradients over ranks and micro-batches gives the gradient of the whole batch. The
sums are fp32 scalars, detached.
"""


@dataclass(frozen=True)
class Metric:
    """One figure of a step: a sum over the global batch, divided by a count of it. One row serves
    all logs.

    Attributes:
        name: Key in training_log.jsonl and the trackers.
        numerator: Name of a sum that the objective returns.
        denominator: Name of a count of the batch, which samples that are left out as bad are part
            of, or of another sum, to which they add nothing.
        label: Word on the progress line; None: not shown there.
        is_loss: Whether it is drawn with the loss (`mmldlm plot`).
        evaluation: Ending of the validation figures drawn with it (`{pass}_{evaluation}`); None:
            `name`.
    """

    name: str
    numerator: str
    denominator: str
    label: str | None = None
    is_loss: bool = False
    evaluation: str | None = None

    def value(self, sums: Mapping[str, float], counts: Mapping[str, int]) -> float | None:
        """Return the figure; None where the batch has nothing of the kind."""
        denominator = counts.get(self.denominator, sums.get(self.denominator, 0.0))
        return sums[self.numerator] / denominator if denominator else None


class ParameterSizes(TypedDict):
    """The part of `ModelSizes` that is known of the model alone, in elements.

    largest_block: the largest of the sharding units and of what is outside them all, gathered at
    once by ZeRO-3 and FSDP2. matrices: of the trainable, those of ParameterPlan.matrices.
    """

    trainable: int
    frozen: int
    largest_block: int
    buffers: int
    matrices: NotRequired[int]


class ModelSizes(ParameterSizes):
    """What preflight's memory model needs to know of a model and one micro-batch per rank: also
    bytes.

    activations: kept for backward, and the working memory of one block's backward pass. working:
    the part of them that still exists when the backward pass ends. logits_cpu, logits_gpu: that
    exist at once.
    """

    activations: int
    logits_cpu: int
    logits_gpu: int
    working: NotRequired[int]


class Task(ABC):
    """What is trained. Every method is a function of its arguments; a task keeps no state but what
    it has counted.

    Class attributes:
        name: Name on the screen.
        config_class: Subclass of Config with the task's own sections.
        sums: Names of the sums that the objective returns; one of them is "loss".
        metrics: Figures derived from the sums.
        buffers: Names of the model's tensors that are not trained (they are buffers, not
            parameters).
        samplers: Kinds of `mmldlm sample` and the samplers of each; {}: not sampled by mmldlm (see
            TextTask).
        sample_rate: Key in training_log.jsonl of the samples per second; None: not logged.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[Config]]
    sums: ClassVar[tuple[str, ...]] = ("loss",)
    metrics: ClassVar[tuple[Metric, ...]] = ()
    buffers: ClassVar[frozenset[str]] = frozenset()
    samplers: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    sample_rate: ClassVar[str | None] = None

    _counted: tuple[Config, int] | None = None
    """A config and the number of parameters of its model."""

    # -- before a model is built: config, preflight, convert --------------------------------------

    @abstractmethod
    def open_data(self, config: Config) -> RunData:
        """Open both splits and fill in the keys that the data decides.

        Raises:
            UserError: the data is missing, damaged, or contradicts the config.
        """

    def names_data(self, config: Config) -> bool:
        """Return whether the config names data to open (`mmldlm config` also works without)."""
        return True

    def parameter_counts(self, config: Config) -> dict[str, int] | None:
        """Return parameters by group; None: not known, or keys are unset that the data decides."""
        sizes = self.model_sizes(config, 1)
        return (
            None if sizes is None else {"trained": sizes["trainable"], "frozen": sizes["frozen"]}
        )

    def model_sizes(self, config: Config, length: int) -> ModelSizes | None:
        """Return the sizes for a micro-batch whose longest sample has `length` tokens; None: not
        known. It may import torch.
        """
        return None

    def training_flops(
        self, config: Config, num_samples: int, num_tokens: float, sums: Mapping[str, float]
    ) -> float:
        """Return forward and backward FLOPs of a global batch; 6 per parameter and token (arXiv
        2001.08361).
        """
        if self._counted is None or self._counted[0] is not config:
            sizes = self.model_sizes(config, 1)  # may build a model: not at every step
            self._counted = config, 0 if sizes is None else sizes["trainable"] + sizes["frozen"]
        return 6.0 * self._counted[1] * num_tokens

    def describe(self, config: Config) -> str:
        """Return a few words about the config for the line about the model."""
        return self.name

    def warnings(self, config: Config) -> list[str]:
        """Return warnings to print when a run starts afresh."""
        return []

    # -- the model and its training ---------------------------------------------------------------

    @abstractmethod
    def build_model(self, data: RunData) -> nn.Module:
        """Build the model on its first weights: a function of config and data, equal on every
        rank.
        """

    def parameter_plan(self, model: nn.Module, config: Config) -> ParameterPlan:
        """Choose frozen parameters, weight decay, sharding units and Muon's matrices.

        Default: the modules of the longest ModuleList are sharded, and their two-dimensional
        weights are Muon's, one matrix each. A weight that stacks matrices (q, k and v) trains
        better if the plan says so.
        """
        from torch import nn

        from mmldlm.engines.parameter_plan import ParameterPlan

        stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        units = list(max(stacks, key=len, default=[]))
        embeddings = {
            id(m.weight) for unit in units for m in unit.modules() if isinstance(m, nn.Embedding)
        }
        inside = {id(p) for unit in units for p in unit.parameters() if p.dim() == 2} - embeddings
        matrices = {
            name: 1 for name, parameter in model.named_parameters() if id(parameter) in inside
        }
        return ParameterPlan(sharding_units=units, matrices=matrices)

    def parameter_groups(self, model: nn.Module) -> dict[str, list[str]]:
        """Return parameter names by group, for the screen.

        Default: by the first part of the name.
        """
        groups: dict[str, list[str]] = {}
        for name, _ in model.named_parameters():
            groups.setdefault(name.split(".")[0], []).append(name)
        return groups

    def compile(self, model: nn.Module, plan: ParameterPlan) -> None:
        """Compile the model in place (training.compile_model)."""
        for unit in plan.sharding_units:
            unit.compile()

    @abstractmethod
    def collator(self, data: RunData, seed: int | None = None) -> Collator:
        """Return what makes micro-batches.

        Args:
            seed: Seed of the noise; None: training.seed. Evaluation passes its own, so that it
                never sees training noise.
        """

    @abstractmethod
    def objective(self, config: Config) -> Objective:
        """Return the loss."""

    def metrics_of(self, config: Config) -> tuple[Metric, ...]:
        """Return the figures of a run: `metrics`, and those that only some configs have."""
        return self.metrics

    def sums_of(self, config: Config) -> tuple[str, ...]:
        """Return the sums that the objective returns: `sums`, and those of `metrics_of`."""
        numerators = (metric.numerator for metric in self.metrics_of(config))
        return tuple(dict.fromkeys((*self.sums, *numerators)))

    def stack_sums(self, names: Sequence[str], loss: Tensor, sums: Mapping[str, Tensor]) -> Tensor:
        """Return the named sums of what the objective returned, [len(names)] fp64 on its device.

        Raises:
            UserError: the loss or a sum is missing, or is not a scalar tensor.
        """
        import torch

        values = {"the loss": loss, **{name: sums.get(name) for name in names}}
        for name, value in values.items():
            if not (isinstance(value, torch.Tensor) and value.numel() == 1):
                shape = f" {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
                description = "none" if value is None else f"{type(value).__name__}{shape}"
                raise UserError(
                    f"{name} from the objective of {type(self).__name__}: a scalar tensor",
                    description,
                    "return (loss, {name: sum}) with every name of `sums` (docs/tasks.md)",
                )
        return torch.stack([sums[name].detach().double().reshape(()) for name in names])

    def validation(self, data: RunData, engine: Engine) -> Validation:
        """Return the evaluation during training: `validation_figures` of `validation_passes`."""
        from mmldlm.tasks.validation import Validation

        seed = data.config.training.seed + Validation.SEED_OFFSET
        return Validation(self, data, engine, self.validation_passes(data, seed))

    def validation_passes(self, data: RunData, seed: int) -> Sequence[tuple[str, Collator]]:
        """Return name and collator of each pass over the validation samples."""
        return [("validation", self.collator(data, seed))]

    def validation_figures(self, totals: dict[str, PassTotals]) -> dict[str, float]:
        """Return the validation metrics, from the totals of each pass: every metric of the task as
        `{pass}_{metric}`.
        """
        figures = {}
        for name, total in totals.items():
            for metric in self.metrics:
                value = metric.value(total.sums, total.counts)
                if value is not None:
                    figures[f"{name}_{metric.name}"] = value
        return figures

    def model_config(self, data: RunData) -> dict[str, Any]:
        """Return what `config.json` of an exported model holds (model_config.json in a
        checkpoint).
        """
        return {"task": data.config.task, "buffers": sorted(self.buffers)}

    # -- debugging --------------------------------------------------------------------------------

    def unused_parameters(self, model: nn.Module, config: Config, batch: Batch) -> Sequence[str]:
        """Return beginnings of the names of parameters that rightly get a zero gradient from a
        batch (`sanity`).
        """
        return ()

    def check_batch(self, data: RunData, batch: Batch) -> list[str]:
        """Compare a batch with the data it was made from; return what is wrong with it
        (`sanity`).
        """
        return []
