"""CLIP score of images and captions by a CLIPModel that the user names (Hessel et al., EMNLP
2021).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mmldlm.data.encoders.encoder import no_loading_bar
from mmldlm.errors import UserError
from mmldlm.evaluation.statistics import Estimate, mean
from mmldlm.utils.formatting import first_line
from mmldlm.utils.input_files import read_text

_BATCH = 64


class ClipScorer:
    """Scores images and captions by a local CLIPModel; nothing is downloaded.

    Args:
        folder: of `CLIPModel.save_pretrained`, with its processor (tokenizer and preprocessing of
            images).

    Raises:
        UserError: not such a folder, or one without some of the weights.
    """

    def __init__(self, folder: str, device: torch.device) -> None:
        from transformers import CLIPModel, CLIPProcessor

        _check_folder(folder)
        try:
            with no_loading_bar():
                model, info = CLIPModel.from_pretrained(
                    folder,
                    local_files_only=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
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


def _check_folder(folder: str) -> None:
    config = Path(folder) / "config.json"
    if not config.is_file():
        raise _no_clip(f"{folder} without config.json")
    try:
        values = json.loads(read_text(config))
    except ValueError as error:
        raise _no_clip(f"{config}: not JSON") from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind != "clip":
        raise _no_clip(f"{folder} of model_type {kind}")


def _no_clip(found: str) -> UserError:
    return UserError(
        "--clip FOLDER: a CLIPModel of transformers with its processor",
        found,
        "name a folder that `save_pretrained` of CLIPModel and CLIPProcessor wrote, or omit"
        " --clip",
    )
