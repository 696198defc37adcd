"""Figures of made images by models that the user names: CLIP score, FID and KID.

Off by default.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mmldlm.data.encoders.encoder import no_loading_bar, require_docstrings
from mmldlm.errors import UserError
from mmldlm.evaluation.sentences import Sentences
from mmldlm.evaluation.statistics import Estimate, mean
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.counter_rng import Stream, generator
from mmldlm.utils.formatting import first_line
from mmldlm.utils.settings import flags


class NamedWeights:
    """The models of `--clip` and `--inception-weights`; without either, nothing is measured.

    Args:
        clip: Folder of a CLIPModel, or None.
        inception_weights: TorchScript file of a feature network, or None.
        seed: Seed of the subsets of FID and KID.

    Raises:
        UserError: files of other models, or a model that makes no images.

    Attributes:
        conditions: Names of the models, for the report.
    """

    def __init__(
        self, pretrained: Pretrained, clip: str | None, inception_weights: str | None, seed: int
    ) -> None:
        self.seed = seed
        given = {"clip": clip, "inception_weights": inception_weights}
        self.conditions = {key: value for key, value in given.items() if value is not None}
        if self.conditions and not pretrained.supports("t2l"):
            names = flags(self.conditions)
            raise UserError(
                f"a model trained in mode t2i for {names}",
                "one that makes no images",
                f"omit {names}",
            )
        device: torch.device = next(pretrained.model.parameters()).device
        self.scorer = None if clip is None else ClipScorer(clip, device)
        self.network = (
            None if inception_weights is None else FeatureNetwork(inception_weights, device)
        )

    def set_real(self, images: np.ndarray, sentences: Sentences) -> None:
        """Take the unseen images [N, S, S, C] uint8 that made ones are compared with, and their
        captions.

        Raises:
            UserError: too few images, or a network of other outputs.
        """
        self.texts, self.of_real = sentences.texts, {}
        if self.network is not None:
            check_count(len(images))
            self.real = self.network.features(images)
        if self.scorer is not None:
            pictures, texts = self.scorer.embed(images, self.texts)
            self.of_real["clip_score_real"] = clip_score(pictures, texts)
            self.of_real["clip_score_real_shuffled"] = clip_score(
                pictures, texts[sentences.shuffled_index]
            )

    def estimates(self, made: np.ndarray) -> dict[str, Estimate]:
        """Return the figures of images [N, S, S, C] uint8, made from the captions of the real
        ones.
        """
        found: dict[str, Estimate] = {}
        if self.scorer is not None:
            found["clip_score"] = clip_score(*self.scorer.embed(made, self.texts))
            found |= self.of_real
        if self.network is not None:
            found |= distance_estimates(self.network.features(made), self.real, self.seed)
        return found

    def notes(self, count: int) -> list[str]:
        """Return what limits the figures of so many images."""
        if self.network is None or count >= FEW_IMAGES:
            return []
        return [
            f"FID of n = {count} images, below {FEW_IMAGES}: it is mostly the bias of few images,"
            " which its standard error does not include; KID has no such bias"
        ]


_BATCH = 64


class ClipScorer:
    """Scores images and captions by a local CLIPModel; nothing is downloaded.

    Args:
        folder: Folder of `CLIPModel.save_pretrained`, with its processor (tokenizer and
            preprocessing of images).

    Raises:
        UserError: not such a folder, or one without some of the weights.
    """

    def __init__(self, folder: str, device: torch.device) -> None:
        require_docstrings()
        from transformers import CLIPModel, CLIPProcessor

        if not Path(folder).is_dir():
            raise _no_clip(f"{folder}: no such folder")
        try:
            with no_loading_bar():
                # The stubs do not know of the information beside the model.
                loaded: Any = CLIPModel.from_pretrained(
                    folder,
                    local_files_only=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
                model, info = loaded
            self.processor = CLIPProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, TypeError, RuntimeError, KeyError) as error:
            raise _no_clip(f"{folder}: {first_line(error)}") from error
        if missing := sorted(info["missing_keys"]):
            raise _no_clip(f"{folder} lacks {len(missing)} weights, {missing[0]} among them")
        self.model: nn.Module = model.float().eval().to(device)
        self.limit = model.config.text_config.max_position_embeddings
        self.folder, self.device = folder, device

    @torch.inference_mode()
    def embed(self, images: np.ndarray, captions: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the embeddings of norm 1, [N, P] fp64 of images and of captions, cut to the
        longest text of CLIP.

        Args:
            images: [N, S, S, C] uint8, C = 1 or 3; the processor scales them to CLIP's size.

        Raises:
            UserError: embeddings that are not finite.
        """
        found = []
        for start in range(0, len(images), _BATCH):
            block = images[start : start + _BATCH]
            inputs = self.processor(
                images=[
                    np.repeat(image, 3, -1) if image.shape[-1] == 1 else image for image in block
                ],
                text=list(captions[start : start + _BATCH]),
                input_data_format="channels_last",
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=self.limit,
            )
            output = self.model(**inputs.to(self.device))
            found.append(
                (
                    output.image_embeds.double().cpu().numpy(),
                    output.text_embeds.double().cpu().numpy(),
                )
            )
        pictures, texts = (np.concatenate(parts) for parts in zip(*found, strict=True))
        if not (np.isfinite(pictures).all() and np.isfinite(texts).all()):
            raise _no_clip(f"{self.folder}: embeddings that are not finite")
        return pictures, texts


def clip_score(images: np.ndarray, captions: np.ndarray) -> Estimate:
    """Return the mean of 100 max(cos, 0) of embeddings [N, P] of norm 1, with its standard error
    over images.
    """
    return mean(np.maximum((images * captions).sum(1), 0), "100 cos", 100.0)


def _no_clip(found: str) -> UserError:
    return UserError(
        "--clip FOLDER: a CLIPModel of transformers with its processor",
        found,
        "name a folder that `save_pretrained` of CLIPModel and CLIPProcessor wrote, or omit"
        " --clip",
    )


FEW_IMAGES = 5000
"""Below so many images FID mostly measures their number."""
SUBSETS = 10
LEAST_IMAGES = 2 * SUBSETS


class FeatureNetwork:
    """A TorchScript file that maps uint8 [B, 3, H, W] to features [B, F].

    It resizes images itself. If its forward has an argument `return_features`, it is True (as for
    StyleGAN2-ADA).

    Raises:
        UserError: not a TorchScript file, or torchmetrics is not installed.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        load_torchmetrics()  # its absence is found before anything is measured
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
                reason = str(error).strip().rpartition("\n")[2]
                raise _no_network(
                    f"{self.path} fails on uint8 {list(block.shape)}: {reason}"
                ) from error
            shape = list(getattr(output, "shape", ()))
            if len(shape) != 2 or shape[0] != len(block):
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
    # Delete-a-group jackknife (Shao and Wu, 1989).
    error = float(np.sqrt((SUBSETS - 1) * left.var()))
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
    """Return torchmetrics' Frechet distance of the Gaussians of features [N, F] and [M, F].

    It is taken in the space that the features span, where it is the same: of fewer images than
    features, all other directions would add the roots of rounding errors, and time.
    """
    frechet, _ = load_torchmetrics()
    both = np.concatenate([made, real])
    both = both - both.mean(0)
    _, lengths, directions = np.linalg.svd(both, full_matrices=False)
    both = both @ directions[lengths >= 1e-12 * lengths[0]].T
    made, real = both[: len(made)], both[len(made) :]
    metric = frechet(feature=_GivenFeatures(made.shape[1]))
    metric.update(torch.from_numpy(made), real=False)
    metric.update(torch.from_numpy(real), real=True)
    return float(metric.compute())


def kid(made: np.ndarray, real: np.ndarray) -> float:
    """Return torchmetrics' unbiased squared MMD with the kernel (x'y / F + 1)^3 of features [N, F]
    of both, N >= 2.
    """
    _, kernel = load_torchmetrics()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # It warns that it keeps all features, and draws its subset, here all of them in an order
        # that moves the last digits.
        warnings.simplefilter("ignore", UserWarning)
        torch.manual_seed(0)
        metric = kernel(feature=_GivenFeatures(made.shape[1]), subsets=1, subset_size=len(made))
        metric.update(torch.from_numpy(made), real=False)
        metric.update(torch.from_numpy(real), real=True)
        return float(metric.compute()[0])


class _GivenFeatures(nn.Module):
    """The feature network of a metric that is given features instead of images."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features


def load_torchmetrics() -> tuple[Any, Any]:
    """Return torchmetrics' FrechetInceptionDistance and KernelInceptionDistance.

    Raises:
        UserError: torchmetrics is not installed.
    """
    try:
        from torchmetrics.image.fid import FrechetInceptionDistance
        from torchmetrics.image.kid import KernelInceptionDistance
    except ImportError:
        raise UserError(
            "torchmetrics, for --inception-weights",
            "it is not installed",
            "pip install 'mmldlm[eval]'",
        ) from None
    return FrechetInceptionDistance, KernelInceptionDistance


def _no_network(found: str) -> UserError:
    return UserError(
        "--inception-weights FILE: TorchScript that maps uint8 [B, 3, H, W] to features [B, F]",
        found,
        "name such a file, for example StyleGAN2-ADA's inception-2015-12-05.pt, or omit"
        " --inception-weights",
    )
