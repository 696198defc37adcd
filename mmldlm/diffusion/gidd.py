"""Generalized interpolating discrete diffusion, masks and uniform noise: GIDD (arXiv
2503.04482).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmldlm.diffusion.categorical import draw


class Marginals(NamedTuple):
    """Probabilities of q_t(z | x) in fp64: alpha on the token itself, mask on [MASK], uniform on
    all N tokens besides [MASK] together (the token itself among them). They sum to 1.
    """

    alpha: Tensor
    mask: Tensor
    uniform: Tensor


class GiddProcess:
    """q_t(z | x) = alpha x + (t [MASK] + c u) / C, with c = B (t (1 - t))^(gamma / 2), C = 1 + c,
    alpha = (1 - t) / C.

    u is uniform over the N = vocab_size - 1 tokens besides [MASK], and B = 2^gamma p_u / (1 -
    p_u), so that a fraction p_u of the tokens is uniform noise at t = 1/2. p_u = 0 is masked
    diffusion (MDLM) with its log-linear schedule.

    The NELBO of a denoiser x_hat, in nats per token, is E_{t, z} w(z, x, t) d(z, x, x_hat, t) over
    t in (0, 1), with d = KL(q_t(. | x) || q_t(. | x_hat)) + r - log r - 1 and
    r = q_t(z | x) / q_t(z | x_hat) (eq. 11 of the paper).

    Args:
        vocab_size: V, [MASK] included.
        mask_token_id: Id of [MASK].
        uniform_share: Fraction of uniform noise p_u in [0, 1).
        gamma: Exponent in (0, 2]; above 2 uniform noise would have to vanish faster than tokens
            do.
    """

    def __init__(
        self, vocab_size: int, mask_token_id: int, uniform_share: float = 0.1, gamma: float = 1.0
    ):
        self.vocab_size, self.mask_token_id = vocab_size, mask_token_id
        self.num_noise_tokens = vocab_size - 1
        self.uniform_share, self.gamma = uniform_share, gamma
        self._scale = 2**gamma * uniform_share / (1 - uniform_share)

    def _uniform_mass(self, t: Tensor) -> Tensor:
        """c(t) in fp64."""
        return self._scale * (t * (1 - t)) ** (0.5 * self.gamma)

    def _uniform_inflow(self, t: Tensor) -> Tensor:
        """(c + (1 - t) c') / c = 1 + (gamma / 2) (1 - 2t) / t, for 0 < t < 1; c' is the derivative
        of c.
        """
        return 1 + 0.5 * self.gamma * (1 - 2 * t) / t

    def marginals(self, t: Tensor) -> Marginals:
        """Probabilities at t in [0, 1]; each of t's shape, fp64."""
        t = t.double()
        mass = self._uniform_mass(t)
        return Marginals((1 - t) / (1 + mass), t / (1 + mass), mass / (1 + mass))

    def corrupt(
        self, tokens: Tensor, t: Tensor, uniform: Tensor, noisable: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw z_t independently for every position.

        Args:
            tokens: [B, S] int64
            t: [B]
            uniform: [B, S] fp64 in [0, 1).
            noisable: [B, S] bool (real tokens).

        Returns:
            noised tokens [B, S], and scored [B, S] bool: positions whose NELBO weight is not zero.
        """
        keep, mask, uniform_noise = (value[:, None] for value in self.marginals(t))
        position = ((uniform.double() - keep - mask) / uniform_noise.clamp_min(1e-300)).clamp(0, 1)
        other = self._noise_token(position)
        noised = torch.where(
            uniform < keep, tokens, torch.where(uniform < keep + mask, self.mask_token_id, other)
        )
        if self.uniform_share == 0:
            # Rounding of keep + mask must not let a uniform token in.
            noised = torch.where(uniform < keep, tokens, self.mask_token_id)
        noised = torch.where(noisable, noised, tokens)
        return noised, (
            noisable if self.uniform_share > 0 else noisable & (noised == self.mask_token_id)
        )

    def _noise_token(self, uniform: Tensor) -> Tensor:
        """Numbers in [0, 1) -> tokens besides [MASK]."""
        token = (uniform * self.num_noise_tokens).long().clamp_max(self.num_noise_tokens - 1)
        return token + (token >= self.mask_token_id)

    def elbo_weights(self, tokens: Tensor, noised: Tensor, t: Tensor) -> Tensor:
        """w(z, x, t), the NELBO's weights; tokens, noised and t in (0, 1) broadcast. fp64"""
        t = t.double()
        inflow = self._uniform_inflow(t)
        mass = self._uniform_mass(t) / self.num_noise_tokens
        at_token = mass * inflow / ((1 - t) * (1 - t + mass))
        at_other = inflow / (1 - t)
        weights = torch.where(noised == self.mask_token_id, 1 / (t * (1 - t)), at_other)
        return torch.where(noised == tokens, at_token, weights)

    def divergence(self, tokens: Tensor, noised: Tensor, t: Tensor) -> GiddDivergence:
        """d of M rows: tokens and noised [M] int64, t [M] in (0, 1)."""
        t = t.double()
        alpha = self.marginals(t).alpha
        log_rho = (self._uniform_mass(t) / (self.num_noise_tokens * (1 - t))).log()
        return GiddDivergence(
            tokens, noised, noised == self.mask_token_id, alpha.float(), log_rho.float()
        )

    def is_open(self, tokens: Tensor) -> Tensor:
        """Every token, or [MASK] alone without uniform noise; same shape, bool."""
        return (
            torch.ones_like(tokens, dtype=torch.bool)
            if self.uniform_share
            else tokens == self.mask_token_id
        )

    def possible_words(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """The logits themselves: a token at t may come from any word."""
        return logits

    def sampling_times(self, steps: int) -> Tensor:
        """Even steps from 1 to 0, with uniform noise finer at both ends, where it changes as a
        root. [steps + 1]
        """
        u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        return torch.sin(0.5 * torch.pi * u) ** 2 if self.uniform_share else u

    def reverse(
        self, tokens: Tensor, logits: Tensor, t: Tensor, s: Tensor, uniform: Tensor
    ) -> Tensor:
        """Draw z_s from the posterior q(z_s | z_t, x_hat) (eq. 12), s < t: exact for every step
        size.

        The posterior is q_{t|s}(z_t | z_s) q_s(z_s | x_hat) / q_t(z_t | x_hat): with probability
        alpha_{t|s} q_s(z_t | x_hat) / q_t(z_t | x_hat) nothing happened since s, otherwise z_s is
        a fresh draw from q_s(. | x_hat). At s = 0 no [MASK] is left.

        Args:
            tokens: State at t. [B, S] int64
            logits: Logits of x_0, -inf for [MASK]. [B, S, V]
            t: Current timestep. [B]
            s: Next timestep. [B]
            uniform: Uniform numbers in [0, 1): what happens, and which token. [2, B, S]

        Returns:
            tokens at s. [B, S]
        """
        at_t, at_s = (
            Marginals(*(marginal[:, None] for marginal in self.marginals(time))) for time in (t, s)
        )
        probability = (
            logits.gather(-1, tokens[..., None])[..., 0].double() - logits.double().logsumexp(-1)
        ).exp()
        before = self._probability(tokens, probability, at_s)
        after = self._probability(tokens, probability, at_t)
        stay = at_t.alpha / at_s.alpha * before / after
        # Given that the token does not stay, the rest of the first number is uniform again.
        what = ((uniform[0].double() - stay) / (1 - stay).clamp_min(1e-300)).clamp(0, 1)
        drawn = draw(logits.flatten(0, 1), uniform[1].flatten()).view_as(tokens)
        fresh = torch.where(
            what < at_s.alpha + at_s.uniform,
            self._noise_token(uniform[1].double()),
            self.mask_token_id,
        )
        fresh = torch.where(what < at_s.alpha, drawn, fresh)
        return torch.where(uniform[0] < stay, tokens, fresh)

    def _probability(self, z: Tensor, probability: Tensor, marginals: Marginals) -> Tensor:
        """q(z | x_hat), where x_hat[z] is `probability`."""
        noise = torch.where(
            z == self.mask_token_id, marginals.mask, marginals.uniform / self.num_noise_tokens
        )
        return marginals.alpha * probability + noise


class GiddDivergence(NamedTuple):
    """d(z, x, x_hat, t) of M rows and its gradient with respect to their logits.

    With p = x_hat and rho = c / (N (1 - t)), the uniform noise per token relative to alpha, the
    divergence is

        KL = alpha ((1 + rho) log((1 + rho) / (p_x + rho)) - rho sum_{v != x} log(1 + p_v / rho)),

    one pass over the vocabulary, and r = (1 + rho) / (p_x + rho) at z = x, rho / (p_z + rho) at
    another token, 1 at [MASK]. Every logarithm is of p + rho in log space: finite for p = 0, and
    for rho = 0.

    Attributes:
        targets: Clean tokens x. [M] int64
        noised: Noised tokens z. [M] int64
        is_masked: Whether z is [MASK]. [M] bool
        alpha: [M] fp32.
        log_rho: [M] fp32; -inf without uniform noise.
    """

    targets: Tensor
    noised: Tensor
    is_masked: Tensor
    alpha: Tensor
    log_rho: Tensor

    def score(self, logits: Tensor, rows: slice, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
        """See `mmldlm.diffusion.process.Divergence`."""
        x, is_masked = self.targets[rows, None], self.is_masked[rows, None]
        z = torch.where(is_masked, x, self.noised[rows, None])
        alpha = self.alpha[rows, None].to(logits.dtype)
        log_rho = self.log_rho[rows, None].to(logits.dtype)
        rho = log_rho.exp()
        log_p = logits.log_softmax(-1)
        log_x, log_z = log_p.gather(1, x), log_p.gather(1, z)
        p = log_p.exp_()
        # The floor of a denominator: rho may be 0.
        floor = rho.clamp_min(torch.finfo(p.dtype).tiny ** 0.75)
        log_ratio_x = rho.log1p() - torch.logaddexp(log_x, log_rho)
        # The term log(1 + p_x / rho) is taken out of the sum; without uniform noise it is
        # infinite, and its factor 0.
        others = (p / floor).log1p_().scatter_(1, x, 0.0).sum(1, keepdim=True)
        kl = (1 + rho) * log_ratio_x - rho * others
        is_scored = ~is_masked & (rho > 0)
        log_r = torch.where(z == x, log_ratio_x, log_rho - torch.logaddexp(log_z, log_rho))
        itakura_saito = torch.where(is_scored, log_r.expm1() - log_r, 0.0)
        divergence = (alpha * kl + itakura_saito)[:, 0]
        if not wants_grad:
            return divergence, None
        # With g = d(divergence)/dp, the gradient of the logits is p g - p sum(p g), and p g is
        # finite.
        ratio = p / (p + floor)
        pull = ratio.mul_(-alpha * rho).scatter_(
            1, x, -alpha * (1 + rho) * torch.sigmoid(log_x - log_rho)
        )
        at_z = torch.where(is_scored, -log_r.expm1() * torch.sigmoid(log_z - log_rho), 0.0)
        pull.scatter_add_(1, z, at_z)
        return divergence, pull.sub_(p.mul_(pull.sum(1, keepdim=True)))


# Of the tokens that self-correction proposes.
_PROPOSAL_TEMPERATURE = 0.1


def self_correct(
    tokens: Tensor, logits: Tensor, uniform: Tensor, real: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace the one token of each text that the model most wants to be another (section 4.3 of
    the paper).

    Args:
        tokens: Finished texts. [B, S] int64
        logits: Logits of x_0 at the texts and a small t, -inf for [MASK]. [B, S, V]
        uniform: [B, S] in [0, 1).
        real: [B, S] bool, positions that may change.

    Returns:
        tokens [B, S], changed [B] bool, and agreement [B]: the fraction of real tokens that are
        the most probable.
    """
    flat = logits.double().flatten(0, 1) / _PROPOSAL_TEMPERATURE
    drawn = draw(flat, uniform.flatten())
    score = flat.log_softmax(-1).gather(1, drawn[:, None])[:, 0].view(tokens.shape)
    drawn = drawn.view(tokens.shape)
    best, position = score.masked_fill((drawn == tokens) | ~real, float("-inf")).max(1)
    changed, position = best > float("-inf"), position[:, None]
    corrected = tokens.scatter(
        1, position, torch.where(changed[:, None], drawn, tokens).gather(1, position)
    )
    agreement = ((logits.argmax(-1) == tokens) & real).sum(1) / real.sum(1).clamp_min(1)
    return corrected, changed, agreement
