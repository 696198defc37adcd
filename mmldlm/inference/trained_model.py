"""A trained model as one object: texts from embeddings, embeddings from texts, and the same of
images.

    model = mmldlm.load("RUN")
    model.decode(model.embed(["A sentence."]))

Every call takes the options of `mmldlm sample` by their names, with the same defaults, draws and
errors.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from mmldlm.data.encoders.model_files import encoder_dir
from mmldlm.errors import UserError
from mmldlm.inference.generate import Samples, sample_text_latents
from mmldlm.inference.inputs import encode_texts, given_texts
from mmldlm.inference.load import load_pretrained, usable_device
from mmldlm.inference.sample import options_of_call, plain, sample
from mmldlm.sampling.model import rows_of_latents
from mmldlm.utils.formatting import count_noun
from mmldlm.utils.progress import ProgressBar, hidden_progress
from mmldlm.utils.settings import Option

# Arguments that MTEB gives to every encoder; a model that takes no prompts has no use for them.
_OF_MTEB = ("task_name", "task_metadata", "hf_split", "hf_subset", "prompt_type")
# float8 types are stored, but not computed with.
_DTYPES = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16)
_BATCH_SIZE = Option("texts of full length in a pass", int, 1)


class TrainedModel:
    """A model and what it was trained with; arguments and errors as of `mmldlm.load`.

    Attributes:
        pretrained: Model, tokenizer, settings of the training, and task.
    """

    def __init__(
        self,
        path: str | Path,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        encoder_dir: str | None = None,
        revision: str | None = None,
    ):
        if dtype not in _DTYPES:
            known = ", ".join(str(one) for one in _DTYPES[1:])
            raise UserError(f"dtype: one of {known}", repr(dtype), "give torch.bfloat16")
        self.pretrained = load_pretrained(
            path, usable_device(device), dtype or torch.float32, revision
        )
        self._encoder_dir = encoder_dir

    def decode(
        self,
        embeddings: np.ndarray | torch.Tensor | Sequence,
        *,
        seed: int = 0,
        show_progress_bar: bool = False,
        **options: Any,
    ) -> list[str]:
        """Write the texts of embeddings; of a model of images, the captions of latents.

        Args:
            embeddings: [N, D] or [D] as the encoder of the training data makes them; [N, M, D] or
                [M, D] for a model of M latents per text.
            seed: Seed of every draw.
            show_progress_bar: Whether to report the stages on standard error.
            options: Options of `mmldlm sample l2t`, as num_steps, sampler, search.

        Raises:
            UserError: embeddings of another shape, not finite or zero, or options that do not fit
                together or to the model.
        """
        # A text here is no path.
        given = dict(latent_file=_as_array(embeddings), **options)
        return _texts(self.sample("l2t", seed=seed, show_progress_bar=show_progress_bar, **given))

    def encode(
        self,
        sentences: str | Iterable,
        batch_size: int | None = None,
        show_progress_bar: bool = False,
        *,
        convert_to_tensor: bool = False,
        normalize_embeddings: bool = False,
        device: str | None = None,
        truncate: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> Any:
        """Embed texts with the model itself (t2l), by the signature of sentence-transformers.

        Args:
            sentences: A text, texts, or records {"text": text or texts}, as MTEB's batches are.
            batch_size: Texts of full length in a pass; None: as many as fit a number of tokens.
            show_progress_bar: Whether to report the stages on standard error.
            convert_to_tensor: Whether to return a tensor on the CPU instead of an array.
            normalize_embeddings: Whether to return unit vectors.
            device: Device to move the model to; None: where it is.
            truncate: Whether to cut texts that are too long for the model; else they are refused.
            seed: Seed of the noise; that of a text depends on it and on the text's index.
            options: Options of `mmldlm sample t2l`, as num_steps, guidance, method. What MTEB says
                of its task is ignored.

        Returns:
            fp32 [N, D] ([N, M, D] for a model of M latents per text), of one text without N.

        Raises:
            UserError: a blank text or one that the model cannot read, options that do not fit
                together or to the model, a model of images or one that was not trained in t2l.
        """
        if self.pretrained.image is not None:
            raise UserError(
                "a model of texts and embeddings",
                f"a model of images ({self.pretrained.folder})",
                "call draw(captions)",
            )
        model: Any = self.pretrained.model
        if device is not None:
            model.to(usable_device(device))
        options = {key: value for key, value in options.items() if key not in _OF_MTEB}
        given = dict(text=_text_list(sentences), **options)
        _, fitted = options_of_call(self.pretrained, "t2l", given, seed)
        more: dict[str, Any] = {"truncate": truncate}
        if batch_size is not None:
            batch_size = plain(batch_size)
            _BATCH_SIZE.check("batch_size", batch_size)
            rows = model.config.max_seq_len + rows_of_latents(model.config)
            more["batch_tokens"] = batch_size * rows
        with _progress(show_progress_bar) as progress:
            found = sample_text_latents(self.pretrained, fitted, progress, **more).complete()
        assert found.latents is not None
        vectors = torch.from_numpy(found.latents)
        if normalize_embeddings:
            vectors = normalize(vectors, dim=-1)
        if isinstance(sentences, str):
            vectors = vectors[0]
        return vectors if convert_to_tensor else vectors.numpy()

    def embed(self, texts: str | Iterable[str], *, show_progress_bar: bool = False) -> np.ndarray:
        """Embed texts with the encoder of the training data.

        Returns:
            fp32 [N, D] ([N, M, D] for a model of M latents per text), of one text without N.

        Raises:
            UserError: an encoder that is unknown, missing or has other weights, or a text that it
                cannot read.
        """
        texts_given = given_texts(_text_list(texts), None)
        with _progress(show_progress_bar) as progress, encoder_dir(self._encoder_dir):
            message = f"embedding {count_noun(len(texts_given), 'text')} with the encoder"
            vectors = encode_texts(texts_given, self.pretrained, progress.start(message), [])
        return vectors[0] if isinstance(texts, str) else vectors

    def caption(
        self, images: Any, *, seed: int = 0, show_progress_bar: bool = False, **options: Any
    ) -> list[str]:
        """Write the captions of images.

        Args:
            images: Paths, pictures opened with PIL, or arrays uint8 [H, W] or [H, W, C]; one path
                or picture; or an array [N, H, W, C].
            seed, show_progress_bar: See `decode`.
            options: Options of `mmldlm sample i2t`.

        Raises:
            UserError: what is no image, options that do not fit together or to the model, or a
                model of texts.
        """
        given = dict(image=_picture_list(images), **options)
        return _texts(self.sample("i2t", seed=seed, show_progress_bar=show_progress_bar, **given))

    def draw(
        self,
        captions: str | Iterable[str],
        *,
        seed: int = 0,
        show_progress_bar: bool = False,
        **options: Any,
    ) -> np.ndarray:
        """Draw the images of captions.

        Args:
            captions: Captions.
            seed, show_progress_bar: See `decode`.
            options: Options of `mmldlm sample t2i`.

        Returns:
            uint8 [N, S, S, C], of one image of one caption without N.

        Raises:
            UserError: captions that the model cannot read, options that do not fit together or to
                the model, or a model of texts.
        """
        given = dict(text=_text_list(captions), **options)
        found = self.sample("t2i", seed=seed, show_progress_bar=show_progress_bar, **given)
        assert found.images is not None
        is_one = isinstance(captions, str) and len(found.images) == 1
        return found.images[0] if is_one else found.images

    def sample(
        self, kind: str, *, seed: int = 0, show_progress_bar: bool = False, **options: Any
    ) -> Samples:
        """Return what `mmldlm sample KIND` writes into files.

        Args:
            kind: l2t, t2l or unconditional; of a model of images i2t, t2i or joint.
            seed, show_progress_bar: See `decode`.
            options: Options of `mmldlm sample KIND`; `latent_file` may be what `decode` takes.

        Raises:
            UserError: options that do not fit together, to the kind, the model or its task.
        """
        latents = options.get("latent_file")
        if latents is not None and not isinstance(latents, (str, Path)):
            options["latent_file"] = _as_array(latents)
        with _progress(show_progress_bar) as progress, encoder_dir(self._encoder_dir):
            return sample(self.pretrained, kind, options, seed, progress)

    def similarity(self, first: Any, second: Any) -> torch.Tensor:
        """Return the cosines [N, K] of embeddings [N, D] with others [K, D]."""
        return _unit(first) @ _unit(second).T

    def similarity_pairwise(self, first: Any, second: Any) -> torch.Tensor:
        """Return the cosines [N] of embeddings [N, D] with the others [N, D] of the same rows."""
        return (_unit(first) * _unit(second)).sum(-1)

    @property
    def mteb_model_meta(self) -> Any:
        """What `mteb.evaluate` files its results under: the folder's name and the weights.

        Raises:
            AttributeError: mteb is not installed.
        """
        try:
            from mteb.models import ModelMeta
        except ImportError as error:
            raise AttributeError(
                f"mteb is needed for its description of a model: {error}"
            ) from None
        model: Any = self.pretrained.model
        digest = hashlib.sha256()
        for tensor in model.state_dict().values():
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
        folder = Path(self.pretrained.folder or ".").resolve()
        return ModelMeta.create_empty(
            {
                "name": f"mmldlm/{folder.name}",
                "revision": digest.hexdigest()[:16],
                "embed_dim": model.config.latent_dim,
                "max_tokens": model.config.max_seq_len - 1,
                "framework": ["PyTorch"],
            }
        )


def _progress(is_shown: bool) -> ProgressBar:
    if not is_shown:
        return hidden_progress()
    return ProgressBar(log=lambda line: print(line, file=sys.stderr, flush=True))


def _as_array(embeddings: Any) -> np.ndarray:
    if isinstance(embeddings, torch.Tensor):
        tensor = embeddings.detach().cpu()
        # numpy has no bf16.
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(embeddings, (list, tuple)):
        embeddings = [
            _as_array(row) if isinstance(row, torch.Tensor) else row for row in embeddings
        ]
    try:
        return np.asarray(embeddings)
    except ValueError as error:
        raise UserError(
            "embeddings of one shape", str(error), "give an array [N, D], or rows of equal length"
        ) from error


def _text_list(texts: str | Iterable) -> list[str]:
    """Return one text, texts, or records {"text": text or texts} as a list of texts."""
    if isinstance(texts, Mapping):
        if "text" not in texts:
            found = ", ".join(map(repr, texts)) or "none"
            raise UserError('the field "text" of every record', found, "give the texts themselves")
        texts = texts["text"]
    if isinstance(texts, str):
        return [texts]
    return [
        text
        for entry in texts
        for text in (_text_list(entry) if isinstance(entry, Mapping) else [entry])
    ]


def _picture_list(images: Any) -> list[Any]:
    """Return one picture or several as a list."""
    from PIL.Image import Image

    if isinstance(images, (str, Path, Image)):
        return [images]
    if isinstance(images, np.ndarray) and images.ndim != 4:
        # Rows of one picture would pass for pictures.
        raise UserError(
            "a list of images, or an array [N, H, W, C]",
            f"an array {list(images.shape)}",
            "give one image as [image]",
        )
    return list(images)


def _texts(samples: Samples) -> list[str]:
    return [record["text"] for record in samples.records]


def _unit(vectors: Any) -> torch.Tensor:
    return normalize(torch.as_tensor(vectors, dtype=torch.float32), dim=-1)
