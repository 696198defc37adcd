"""Ancestral sampling that masks tokens again (ReMDM, arXiv 2503.00307)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmldlm.errors import UserError
from mmldlm.sampling.text.strategies.base import TextStrategy, check_range

ETAS = {"cap": 0.02, "rescale": 0.015, "loop": 0.02}
"""How much is masked again, by default, in each variant."""
LOOP_ON, LOOP_OFF, LOOP_ALPHA = 0.55, 0.05, 0.9


class RemaskingStrategy(TextStrategy):
    """Ancestral sampling whose tokens are masked again with probability sigma a step, so that
    errors can be corrected.

    From t to s a token is masked again with sigma <= (1 - alpha_s) / alpha_t, and a masked
    position opens with probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t): at every time
    as many are masked as without.

    Option remask: cap: sigma at most remask_eta; rescale: remask_eta times the largest sigma;
    loop: nothing is masked again but in a middle phase, in which the share of masks stays at 0.1
    and sigma is remask_eta. The EOS stays once it is written. It takes num_steps of at least the
    length to pay, and wants top_p about 0.9.
    """

    defaults: ClassVar = {"num_steps": 64, "remask": "cap", "remask_eta": None}
    default_temperature: ClassVar[float] = 1.0
    deterministic_order: ClassVar[bool] = False
    writes_once: ClassVar[bool] = False

    def __init__(self, state, **settings):
        super().__init__(state, **settings)
        steps = self.options["num_steps"]
        times = 1 - torch.arange(steps + 1, dtype=torch.float64) / steps
        self.alpha = self._alphas(times)
        self.sigma = self._sigmas(times)
        self.own = state.undecided.clone()  # what stands in a draft stays
        self.masked_at = self.uniform[
            :, 0
        ].clone()  # opens when the share that stays masked has fallen to this number
        self.stays = torch.ones_like(self.masked_at)
        self.token_numbers = self.uniform[:, 1].clone()
        self.step, self._fresh = -1, torch.empty(0)
        self.opens = self.closes = torch.zeros_like(state.real)

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        super().check(options)
        if options["remask"] not in ETAS:
            raise UserError(
                f"--remask {', '.join(ETAS)}", str(options["remask"]), "choose one of them"
            )
        check_range(options, "remask_eta", 0, 1)

    def _alphas(self, times: Tensor) -> Tensor:
        """Return the share of tokens that stand at each time: [num_steps + 1] fp64."""
        if self.options["remask"] != "loop":
            return self.diffusion.alpha(times)
        before, after = (
            (1 - times) * LOOP_ALPHA / (1 - LOOP_ON),
            1 - times * (1 - LOOP_ALPHA) / LOOP_OFF,
        )
        return torch.where(
            times > LOOP_ON, before, torch.where(times > LOOP_OFF, LOOP_ALPHA, after)
        )

    def _sigmas(self, times: Tensor) -> Tensor:
        """Return sigma of each step: [num_steps] fp64."""
        variant, eta = self.options["remask"], self.options["remask_eta"]
        eta = ETAS[variant] if eta is None else eta
        before, after = self.alpha[:-1], self.alpha[1:]
        most = ((1 - after) / before.clamp_min(1e-12)).clamp_max(1.0)
        if variant == "rescale":
            return eta * most
        sigma = most.clamp_max(eta)
        if variant == "loop":
            return torch.where((times[:-1] <= LOOP_ON) & (times[:-1] > LOOP_OFF), sigma, 0.0)
        return sigma

    def positions(self) -> Tensor:
        while self.step < self.number:
            if self.number == self.options["num_steps"]:
                return self.state.undecided.flatten().nonzero()[:, 0]  # nothing is left
            self._plan()
            if not self.shared_schedule and not bool((self.opens & self.state.undecided).any()):
                self._end_step()
        return (self.opens & self.state.undecided).flatten().nonzero()[:, 0]

    def _plan(self) -> None:
        """Decide what the step from t to s opens and closes."""
        k, state = self.number, self.state
        self.step = k
        before, after, sigma = (
            float(x) for x in (self.alpha[k], self.alpha[k + 1], self.sigma[k])
        )
        masked = (state.tokens == state.mask_token_id) & state.real
        self.stays = torch.where(
            masked, self.stays * (1 - after - sigma * before) / (1 - before), self.stays
        )
        self.opens = masked & (self.masked_at >= self.stays)
        self.closes = torch.zeros_like(self.opens)
        if sigma > 0:
            assert self.redraw is not None
            self._fresh = self.redraw(k)[:, :, : masked.shape[1]].to(masked.device)
            self.closes = self.own & ~masked & (self._fresh[:, 0] < sigma)

    def choose(self, positions: Tensor, logits: Tensor) -> Tensor:
        return torch.arange(len(positions), device=positions.device)

    def draw_tokens(self, positions: Tensor, logits: Tensor) -> Tensor:
        self.token_uniform = self.token_numbers.view(-1)
        return super().draw_tokens(positions, logits)

    def commit(self, positions: Tensor, tokens: Tensor) -> None:
        number = self.number
        super().commit(positions, tokens)
        self.number = number
        self._end_step()

    def _write_eos(self, rows: Tensor) -> None:
        pass  # at its own step

    def _end_step(self) -> None:
        self.state.write_eos(self.opens)
        if bool(self.closes.any()):
            self.state.reopen(self.closes)
            self.stays = self.stays.masked_fill(self.closes, 1.0)
            self.masked_at = torch.where(self.closes, self._fresh[:, 1], self.masked_at)
            self.token_numbers = torch.where(self.closes, self._fresh[:, 2], self.token_numbers)
        self.number += 1
