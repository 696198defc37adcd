"""Hierarchical diffusion of text, word -> cluster -> [MASK]: HDLM (arXiv 2510.08632), and the
clusters of words that it needs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmldlm.diffusion.categorical import draw
from mmldlm.utils.counter_rng import Stream, generator


class Levels(NamedTuple):
    """Probabilities of a token's three levels at t, in fp64: word, cluster, mask.

    They sum to 1.
    """

    word: Tensor
    cluster: Tensor
    mask: Tensor


class HierarchicalProcess:
    """A word becomes its cluster at the hazard gamma / (1 - t), a cluster becomes [MASK] at 1 / (1
    - t).

    States are tokens 0 .. V - 1, among them [MASK], and clusters V .. V + n - 1. A token in no
    cluster (EOS and other special tokens) keeps its own id where others show their cluster: a
    cluster of one, whose state is the token itself.

    The NELBO of a denoiser x_hat, in nats per token, with P_hat the sum of x_hat over a cluster,
    is E_{t, z} w(z, t) d over t in (0, 1): at [MASK] w = m' / m and d = -log P_hat(c(x)); at a
    cluster w = -alpha' / c and d = -log(x_hat[x] / P_hat(c(x))); 0 at a word. The cluster of a
    noised token is always the right one (xi = 1); the paper's xi < 1, for which only an
    approximate bound is known, is not supported.

    Args:
        clusters: Cluster of every token, -1 for tokens in none and for [MASK]. [V] int64
        mask_token_id: Id of [MASK].
        gamma: Exponent above 0; 1 spreads clusters most evenly.
    """

    def __init__(self, clusters: Tensor, mask_token_id: int, gamma: float = 1.0):
        self.vocab_size, self.mask_token_id, self.gamma = len(clusters), mask_token_id, gamma
        self.num_clusters = int(clusters.max()) + 1
        alone, ids = clusters < 0, torch.arange(len(clusters), device=clusters.device)
        # Groups are the clusters and every token that is alone. `_group` [V] is the group of a
        # token, `_state` [V] the state that it takes first.
        self._group = torch.where(alone, self.num_clusters + alone.cumsum(0) - 1, clusters)
        self._state = torch.where(alone, ids, self.vocab_size + clusters)

    def levels(self, t: Tensor) -> Levels:
        """Probabilities at t in [0, 1]; each of t's shape."""
        # Logarithm of 1 - t; differences of powers of it do not cancel at small t.
        log_left = torch.log1p(-t.double())
        return Levels((self.gamma * log_left).exp(), *self._leave(log_left))

    def _leave(self, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Word -> cluster and word -> [MASK] from s to t, log_ratio = log((1 - t) / (1 -
        s)) <= 0.
        """
        g, ratio = self.gamma, log_ratio.exp()
        if g == 1:
            to_cluster = torch.where(ratio > 0, -ratio * log_ratio, 0.0)
            return to_cluster, -torch.expm1(log_ratio) - to_cluster
        # e^L - e^(gL) and expm1(gL) - g expm1(L)
        to_cluster = -g / (g - 1) * ratio * torch.expm1((g - 1) * log_ratio)
        to_cluster = torch.where(ratio > 0, to_cluster, 0.0)
        return to_cluster, (torch.expm1(g * log_ratio) - g * torch.expm1(log_ratio)) / (g - 1)

    def word_outflow(self, t: Tensor) -> Tensor:
        """-alpha'(t) = gamma (1 - t)^(gamma - 1) for 0 <= t < 1; same shape, fp64."""
        return self.gamma * (1 - t.double()) ** (self.gamma - 1)

    def mask_inflow(self, t: Tensor) -> Tensor:
        """m'(t) = c(t) / (1 - t) for 0 <= t < 1; same shape, fp64."""
        log_left = torch.log1p(-t.double())
        if self.gamma == 1:
            return -log_left
        return -self.gamma / (self.gamma - 1) * torch.expm1((self.gamma - 1) * log_left)

    def corrupt(
        self, tokens: Tensor, t: Tensor, uniform: Tensor, noisable: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw z_t independently for every position.

        Args:
            tokens: [B, S] int64 below V.
            t: [B]
            uniform: [B, S] fp64 in [0, 1).
            noisable: [B, S] bool (real tokens).

        Returns:
            noised tokens [B, S] below V + n, and scored [B, S] bool: positions whose NELBO weight
            is not zero.
        """
        word, cluster, _ = (level[:, None] for level in self.levels(t))
        noised = torch.where(uniform < word + cluster, self._state[tokens], self.mask_token_id)
        noised = torch.where((uniform < word) | ~noisable, tokens, noised)
        return noised, noisable & (noised != tokens)

    def elbo_weights(self, tokens: Tensor, noised: Tensor, t: Tensor) -> Tensor:
        """w(z, t), the NELBO's weights; tokens, noised and t in (0, 1) broadcast. fp64"""
        levels = self.levels(t)
        at_mask = self.mask_inflow(t) / levels.mask
        at_cluster = self.word_outflow(t) / levels.cluster
        weights = torch.where(noised == self.mask_token_id, at_mask, at_cluster)
        return torch.where(noised == tokens, 0.0, weights)

    def divergence(
        self, tokens: Tensor, noised: Tensor, t: Tensor | None = None
    ) -> HierarchicalDivergence:
        """d of M rows whose noised token is [MASK] or a cluster; tokens and noised [M] int64. t is
        not read.
        """
        return HierarchicalDivergence(tokens, noised == self.mask_token_id, self._group)

    def is_open(self, tokens: Tensor) -> Tensor:
        """[MASK] and clusters; same shape, bool."""
        return (tokens == self.mask_token_id) | (tokens >= self.vocab_size)

    def sampling_times(self, steps: int) -> Tensor:
        """Even steps from 1 to 0. [steps + 1]"""
        return torch.linspace(1, 0, steps + 1, dtype=torch.float64)

    def reverse(
        self, tokens: Tensor, logits: Tensor, t: Tensor, s: Tensor, uniform: Tensor
    ) -> Tensor:
        """Draw z_s from the posterior q(z_s | z_t, x_hat), s < t: exact for every step size and
        gamma.

        From [MASK] a cluster is drawn from P_hat or a word from x_hat; a cluster gives a word of
        that cluster. At s = 0 only words are left.

        Args:
            tokens: State at t. [B, S] int64 below V + n
            logits: Logits of x_0, -inf for [MASK] and outside `possible_words`. [B, S, V]
            t: Current timestep. [B]
            s: Next timestep. [B]
            uniform: Uniform numbers in [0, 1): what happens, and which token. [2, B, S]

        Returns:
            tokens at s. [B, S]
        """
        at_t, at_s = (Levels(*(level[:, None] for level in self.levels(time))) for time in (t, s))
        log_ratio = (torch.log1p(-t.double()) - torch.log1p(-s.double()))[:, None]
        stay_mask = at_s.mask / at_t.mask
        # At t = 1 every token is [MASK]: no position holds a cluster, whose probability to stay
        # would be 0 / 0.
        stay_cluster = at_s.cluster * log_ratio.exp() / at_t.cluster.clamp_min(1e-300)
        to_cluster = stay_mask + at_s.cluster * -torch.expm1(log_ratio) / at_t.mask
        is_masked, is_cluster = tokens == self.mask_token_id, tokens >= self.vocab_size
        first = uniform[0].double()
        drawn = draw(logits.flatten(0, 1), uniform[1].flatten()).view_as(tokens)
        from_mask = torch.where(first < to_cluster, self._state[drawn], drawn)
        from_mask = torch.where(first < stay_mask, tokens, from_mask)
        from_cluster = torch.where(first < stay_cluster, tokens, drawn)
        return torch.where(is_masked, from_mask, torch.where(is_cluster, from_cluster, tokens))

    def possible_words(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Logits [..., V] of x_0, -inf outside the cluster that a token [...] is."""
        is_cluster = tokens >= self.vocab_size
        outside = is_cluster[..., None] & (self._group != (tokens - self.vocab_size)[..., None])
        return logits.masked_fill(outside, float("-inf"))


class HierarchicalDivergence(NamedTuple):
    """d(z, x, x_hat) of M rows and its gradient with respect to their logits.

    Attributes:
        targets: Clean tokens x. [M] int64
        is_masked: Whether z is [MASK]; otherwise it is the cluster of x. [M] bool
        group: Cluster of every token, tokens in none having one of their own. [V] int64
    """

    targets: Tensor
    is_masked: Tensor
    group: Tensor

    def score(self, logits: Tensor, rows: slice, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
        """See `mmldlm.diffusion.process.Divergence`."""
        x, is_masked = self.targets[rows, None], self.is_masked[rows, None]
        inside = logits.masked_fill(self.group != self.group[x], float("-inf"))
        cluster = inside.logsumexp(-1, keepdim=True)
        whole = torch.where(is_masked, logits.logsumexp(-1, keepdim=True), cluster)
        part = torch.where(is_masked, cluster, logits.gather(1, x))
        if not wants_grad:
            return (whole - part)[:, 0], None
        within = (inside - cluster).exp_()
        grad = torch.where(is_masked, (logits - whole).exp_().sub_(within), within)
        return (whole - part)[:, 0], grad.scatter_add_(
            1, x, torch.where(is_masked, 0.0, -1.0).to(grad.dtype)
        )


# Sizes of clusters in units of the mean (HDLM).
SMALLEST, LARGEST = 0.1, 5.0
# Unit vectors are rounded to this grid. Products and sums of such integers are exact in fp32, in
# any order, so every rank, machine and number of threads finds the same clusters.
_GRID = 1024
# Largest number of rounds of k-means, which ends when no token moves.
_ROUNDS = 20


def cluster_tokens(
    vectors: np.ndarray, num_clusters: int, alone: Collection[int], seed: int
) -> np.ndarray:
    """K-means by cosine, started with k-means++ (Arthur and Vassilvitskii, SODA 2007).

    A function of its arguments on every machine: draws are counter-based, sums are those of
    integers, and ties go to the lower index.

    Args:
        vectors: [V, D], one per token; zeros where nothing is known of a token, which then goes to
            any cluster.
        num_clusters: Number of clusters n, at most the number of tokens to cluster.
        alone: Tokens in no cluster (special tokens).
        seed: Seed of the starting centers.

    Returns:
        [V] int64, cluster of every token, -1 for those alone. Every cluster has between SMALLEST
        and LARGEST times the mean number of tokens, and at least one.
    """
    words = np.setdiff1d(np.arange(len(vectors)), np.array(sorted(alone), dtype=np.int64))
    is_known = vectors[words].any(1)
    if is_known.sum() < num_clusters:
        is_known = np.ones(len(words), dtype=bool)
    cluster_of_word = np.empty(len(words), dtype=np.int64)
    cluster_of_word[is_known] = _k_means(vectors[words[is_known]], num_clusters, seed)
    cluster_of_word[~is_known] = np.arange(len(words) - is_known.sum()) % num_clusters
    clusters = np.full(len(vectors), -1, dtype=np.int64)
    clusters[words] = cluster_of_word
    return clusters


def _k_means(vectors: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """Cluster of every row [rows]; sizes are bounded."""
    points = _unit(vectors.astype(np.float64)).astype(np.float32)
    mean = len(points) / num_clusters
    bounds = (
        max(int(SMALLEST * mean), 1),
        max(int(LARGEST * mean), -(-len(points) // num_clusters)),
    )
    centers = _starting_centers(points, num_clusters, generator(seed, Stream.TOKEN_CLUSTERS))
    clusters = np.full(len(points), -1)
    for _ in range(_ROUNDS):
        before, clusters = clusters, _bounded_assignment(points @ centers.T, *bounds)
        if np.array_equal(before, clusters):
            break
        # No cluster is empty.
        by_cluster = np.argsort(clusters, kind="stable")
        starts = np.searchsorted(clusters[by_cluster], np.arange(num_clusters))
        centers = _unit(np.add.reduceat(points[by_cluster], starts, dtype=np.float64)).astype(
            np.float32
        )
    return clusters


def _unit(rows: np.ndarray) -> np.ndarray:
    """Unit vectors times _GRID, rounded; a row of zeros stays one."""
    norms = np.sqrt(np.square(rows).sum(1, keepdims=True))
    return np.rint(rows * (_GRID / np.where(norms > 0, norms, 1.0)))


def _starting_centers(points: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """k-means++: every further center is drawn in proportion to its squared distance from those
    chosen.
    """
    chosen = [int(random.integers(len(points)))]
    distance = np.full(len(points), np.inf)
    for _ in range(count - 1):
        cosine = (points @ points[chosen[-1]]).astype(np.float64)
        distance = np.minimum(distance, np.maximum(2 * (_GRID**2 - cosine), 0))
        distance[chosen] = 0
        cumulative = distance.cumsum()
        if cumulative[-1] <= _GRID:
            # Only copies of chosen points are left.
            chosen.append(int(np.setdiff1d(np.arange(len(points)), chosen)[0]))
            continue
        chosen.append(
            int(np.searchsorted(cumulative, random.random() * cumulative[-1], side="right"))
        )
    return points[chosen]


def _bounded_assignment(similarity: np.ndarray, smallest: int, largest: int) -> np.ndarray:
    """[points, n] similarities -> nearest cluster [points], no cluster below `smallest` or above
    `largest`.

    A cluster that is too large keeps its nearest points; the others go to their nearest cluster
    with room. Then those that are too small take their nearest points from clusters that can spare
    them.
    """
    clusters = similarity.argmax(1)
    sizes = np.bincount(clusters, minlength=similarity.shape[1])
    pool = []
    for cluster in np.flatnonzero(sizes > largest):
        members = np.flatnonzero(clusters == cluster)
        pool.append(members[np.argsort(-similarity[members, cluster], kind="stable")[largest:]])
        sizes[cluster] = largest
    for point in np.concatenate(pool) if pool else ():
        cluster = np.where(sizes < largest, similarity[point], -np.inf).argmax()
        clusters[point], sizes[cluster] = cluster, sizes[cluster] + 1
    for cluster in np.flatnonzero(sizes < smallest):
        for point in np.argsort(-similarity[:, cluster], kind="stable"):
            if sizes[cluster] >= smallest:
                break
            if sizes[clusters[point]] > smallest and clusters[point] != cluster:
                sizes[clusters[point]] -= 1
                clusters[point], sizes[cluster] = cluster, sizes[cluster] + 1
    return clusters
