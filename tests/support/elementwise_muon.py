"""An optimizer with the groups and states of MuonAdamW, for files that DeepSpeed and torch save
without our engines.

It moves a matrix along its momentum, element by element: it needs no complete matrices, however
they are cut.
"""

from __future__ import annotations

import torch


class ElementwiseMuon(torch.optim.AdamW):
    """AdamW; a group with `muon: True` has only a momentum, under the key exp_avg."""

    def __init__(self, groups, lr: float):
        groups = [{"muon": False, "momentum": 0.9, "lr_factor": 1.0, **group} for group in groups]
        super().__init__(groups, lr=lr)

    @torch.no_grad()
    def step(self, closure=None):
        groups = self.param_groups
        for group in groups:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    self._step_matrix(parameter, group)
        self.param_groups = [group for group in groups if not group["muon"]]
        super().step()
        self.param_groups = groups

    def _step_matrix(self, parameter, group) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
        state["step"] += 1
        state["exp_avg"].lerp_(parameter.grad, 1 - group["momentum"])
        parameter.add_(state["exp_avg"], alpha=-group["lr"] * group["lr_factor"])


def with_muon(groups: list[dict], matrices: list) -> list[dict]:
    """Move `matrices` from their groups into a first group of Muon's."""
    chosen = {id(matrix) for matrix in matrices}
    rest = [
        {**group, "params": [p for p in group["params"] if id(p) not in chosen]}
        for group in groups
    ]
    return [{"params": matrices, "weight_decay": 0.05, "muon": True, "lr_factor": 8.0}, *rest]
