"""HDLM, unconditional or given a latent. Torch is imported where it is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mmldlm.tasks.baselines.common.divergence_task import DivergenceTask
from mmldlm.tasks.baselines.hdlm.config import HdlmConfig
from mmldlm.tasks.baselines.hdlm.data import HdlmData, open_data

if TYPE_CHECKING:
    from torch import Tensor

    from mmldlm.diffusion.hdlm import HierarchicalProcess
    from mmldlm.tasks.baselines.common.divergence import DivergenceObjective
    from mmldlm.tasks.baselines.hdlm.model import HierarchicalTransformer
    from mmldlm.tasks.pretrained import Pretrained


class HdlmTask(DivergenceTask):
    """Word -> cluster -> [MASK] (arXiv 2510.08632) with the exact posterior; clusters are stored
    with the model.
    """

    name = "hdlm"
    config_class = HdlmConfig
    logit_copies = 5
    architecture = "HierarchicalTransformer"
    buffers = DivergenceTask.buffers | {"token_clusters"}

    def open_data(self, config: HdlmConfig) -> HdlmData:
        return open_data(config)

    def describe(self, config: HdlmConfig) -> str:
        return f"{super().describe(config)}, {config.text_diffusion.num_clusters} clusters"

    def model_class(self) -> type[HierarchicalTransformer]:
        from mmldlm.tasks.baselines.hdlm.model import HierarchicalTransformer

        return HierarchicalTransformer

    def build_model(self, data: HdlmData) -> HierarchicalTransformer:
        import torch

        from mmldlm.tasks.baselines.common.build_model import build_model

        model = build_model(data, self.model_class())
        model.token_clusters.copy_(torch.from_numpy(data.clusters))
        return model

    def scored_share(self, config: HdlmConfig) -> float:
        """1 - E[(1 - t)^gamma] with t = sin^2(pi u / 2): a word that still stands is not
        scored.
        """
        gamma = config.text_diffusion.gamma
        return 1 - math.gamma(gamma + 0.5) / (math.sqrt(math.pi) * math.gamma(gamma + 1))

    def process_of_data(self, data: HdlmData) -> HierarchicalProcess:
        import torch

        from mmldlm.diffusion.hdlm import HierarchicalProcess

        clusters = torch.from_numpy(data.clusters)
        return HierarchicalProcess(
            clusters, data.config.model.mask_token_id, data.config.text_diffusion.gamma
        )

    def process_of_model(self, pretrained: Pretrained) -> HierarchicalProcess:
        from mmldlm.diffusion.hdlm import HierarchicalProcess

        model = pretrained.model
        clusters, gamma = model.token_clusters.cpu(), pretrained.text_config.gamma
        return HierarchicalProcess(clusters, model.config.mask_token_id, gamma).to(
            model.token_clusters.device
        )

    def training_weights(self, data: HdlmData) -> Callable[[Tensor, Tensor], Tensor]:
        largest = data.config.loss.largest_weight
        return partial(_clipped, largest=largest)

    def objective(self, config: HdlmConfig) -> DivergenceObjective:
        from mmldlm.diffusion.hdlm import HierarchicalDivergence
        from mmldlm.tasks.baselines.common.divergence import DivergenceObjective

        return DivergenceObjective(HierarchicalDivergence, config.loss.length_loss_weight)


def _clipped(weights: Tensor, t: Tensor, largest: float | None) -> Tensor:
    return weights if largest is None else weights.clamp_max(largest)
