"""FID and KID of made against real images, by a feature network that the user names.

FID: Heusel et al., NeurIPS 2017. KID: Binkowski et al., ICLR 2018.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mmldlm.errors import UserError
from mmldlm.evaluation.statistics import Estimate, mean
from mmldlm.utils.counter_rng import Stream, generator

FEW_IMAGES = 5000
"""Below so many images FID mostly measures their number."""
SUBSETS = 10
LEAST_IMAGES = 2 * SUBSETS
_BATCH = 64


class FeatureNetwork:
    """A TorchScript file that maps uint8 [B, 3, H, W] to features [B, F].

    It resizes images itself. If its forward has an argument `return_features`, it is True (as for
    StyleGAN2-ADA).

    Raises:
        UserError: not a TorchScript file, or of other outputs.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        if not Path(path).is_file():
            raise _no_network(f"{path}: no such file")
        try:
            self.module = torch.jit.load(path, map_location=device).eval()
        except (RuntimeError, ValueError) as error:
            raise _no_network(f"{path}: torch.jit.load cannot read it") from error
        names = [argument.name for argument in self.module.forward.schema.arguments]
        self.options = {"return_features": True} if "return_features" in names else {}
        self.path, self.device = path, device

    @torch.inference_mode()
    def features(self, images: np.ndarray) -> np.ndarray:
        """Return [N, F] fp64 of images [N, S, S, C] uint8; one channel is repeated.

        Raises:
            UserError: the network fails, or returns other shapes or values that are not finite.
        """
        found = []
        for start in range(0, len(images), _BATCH):
            block = torch.from_numpy(np.ascontiguousarray(images[start : start + _BATCH])).permute(
                0, 3, 1, 2
            )
            block = block.expand(-1, 3, -1, -1).contiguous().to(self.device)
            try:
                output = self.module(block, **self.options)
            except RuntimeError as error:
                raise _no_network(
                    f"{self.path} fails on uint8 {list(block.shape)}: {_last_line(error)}"
                ) from error
            if (
                not isinstance(output, torch.Tensor)
                or output.ndim != 2
                or len(output) != len(block)
            ):
                shape = (
                    list(output.shape)
                    if isinstance(output, torch.Tensor)
                    else type(output).__name__
                )
                raise _no_network(f"{self.path} maps uint8 {list(block.shape)} to {shape}")
            found.append(output.double().cpu().numpy())
        features = np.concatenate(found)
        if not np.isfinite(features).all():
            raise _no_network(f"{self.path}: features that are not finite")
        return features


def distance_estimates(made: np.ndarray, real: np.ndarray, seed: int) -> dict[str, Estimate]:
    """Return FID and KID (x 1000) of features [N, F] fp64, N >= 20; row i of both has one caption.

    Standard errors are those of ten random subsets: the mean of KID over them, the jackknife of
    FID without each.
    """
    check_count(len(made))
    order = generator(seed, Stream.FEATURE_SUBSETS).permutation(len(made))
    subsets = [np.sort(order[start::SUBSETS]) for start in range(SUBSETS)]
    left = np.array(
        [fid(np.delete(made, rows, axis=0), np.delete(real, rows, axis=0)) for rows in subsets]
    )
    error = float(
        np.sqrt((SUBSETS - 1) * left.var())
    )  # delete-a-group jackknife (Shao and Wu, 1989)
    distances = mean(
        np.array([kid(made[rows], real[rows]) for rows in subsets]), "1000 MMD^2", 1000.0
    )
    return {
        "fid": Estimate(fid(made, real), error, "squared distance of features", len(made)),
        "kid": Estimate(distances.value, distances.se, distances.unit, len(made)),
    }


def check_count(count: int) -> None:
    """Check that subsets can be drawn.

    Raises:
        UserError: too few images.
    """
    if count < LEAST_IMAGES:
        raise UserError(
            f"at least {LEAST_IMAGES} unseen images for --inception-weights",
            str(count),
            "raise --num-samples",
        )


def fid(made: np.ndarray, real: np.ndarray) -> float:
    """Return the Frechet distance of the Gaussians of features [N, F] and [M, F] fp64.

    tr sqrt(A B) of covariances A = X'X and B = Y'Y is the sum of the singular values of XY': exact
    where the covariances have no full rank, too.
    """
    shift = made.mean(0) - real.mean(0)
    first, second = (_root(features) for features in (made, real))
    cross = np.linalg.svd(first @ second.T, compute_uv=False).sum()
    return float(shift @ shift + (first**2).sum() + (second**2).sum() - 2 * cross)


def _root(features: np.ndarray) -> np.ndarray:
    """Return X [min(N, F), F] whose X'X is the covariance of [N, F]."""
    centered = (features - features.mean(0)) / np.sqrt(len(features) - 1)
    return np.linalg.qr(centered, mode="r") if len(centered) > centered.shape[1] else centered


def kid(made: np.ndarray, real: np.ndarray) -> float:
    """Return the unbiased squared MMD with the kernel (x'y / F + 1)^3 of features [N, F] of both,
    N >= 2.

    A made and a real image of one caption are no independent pair, so row i is not compared with
    row i (the U-statistic of Gretton et al., JMLR 2012).
    """
    count, width = made.shape

    def mean_kernel(first: np.ndarray, second: np.ndarray) -> float:
        kernel = (first @ second.T / width + 1) ** 3
        return float(kernel.sum() - np.trace(kernel)) / (count * (count - 1))

    return (
        mean_kernel(made, made)
        + mean_kernel(real, real)
        - mean_kernel(made, real)
        - mean_kernel(real, made)
    )


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _no_network(found: str) -> UserError:
    return UserError(
        "--inception-weights FILE: TorchScript that maps uint8 [B, 3, H, W] to features [B, F]",
        found,
        "name such a file, for example StyleGAN2-ADA's inception-2015-12-05.pt, or omit"
        " --inception-weights",
    )
