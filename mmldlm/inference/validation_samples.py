"""Samples of a model in training: a few validation texts written from their latents, and images
drawn for their captions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mmldlm.data.run_data import RunData
from mmldlm.inference.generate import write_from_latents
from mmldlm.inference.images import codec_of, make_images
from mmldlm.inference.sample import options_of_call
from mmldlm.sampling.model import Model
from mmldlm.tasks.text_task import Pretrained, TextTask
from mmldlm.utils.progress import hidden_progress

NUM_STEPS = 16
"""Denoising steps of a sample: all of them cost about as much as training on 20 samples."""


@dataclass(frozen=True)
class ValidationSample:
    """What a model makes of one validation sample.

    Attributes:
        kind: Kind of `mmldlm sample`: l2t (i2t) or t2i.
        reference: Text of the sample, as the tokenizer writes it.
        text: Text that the model wrote from the sample's latent; None for an image.
        image: Image that it drew for the sample's text, with the sample's own to the right,
            [S, 2 S, C] uint8; None for a text.
    """

    kind: str
    reference: str
    text: str | None = None
    image: np.ndarray | None = None


def sample_validation(
    task: Any, data: RunData, model: Model, count: int
) -> list[ValidationSample]:
    """Sample from validation samples spread over the split, the same ones and with the same draws
    at every call.

    Args:
        task: Task of the run; one that mmldlm does not sample gives no samples.
        data: Data of the run.
        model: Its model in eval mode, as `sampling.model.Model`.
        count: Number of samples of each kind.

    Returns:
        Texts if the model learns to write them from latents, and images if it learns to draw them
        from captions and their latents need no autoencoder.

    Raises:
        MmldlmError: NaN in the model's outputs.
    """
    if not (isinstance(task, TextTask) and task.samples_by_forward):
        return []
    values = task.model_config(data)
    pretrained = _running(task, data, model, values)
    # Of images of several sizes the largest, which is the size that a model draws by itself.
    orders = data.validation_orders(min(count, len(data.validation_lengths)))
    parts = [data.validation.get(order.ids(np.arange(order.count), 0)) for order in orders]
    rows = max(parts, key=lambda part: part.latents[0].size)
    references = pretrained.tokenizer.batch_decode(rows.tokens)
    samples = []
    if "l2t" in task.samplers and pretrained.supports("l2t"):
        texts = _written(pretrained, rows.latents)
        kind = "l2t" if pretrained.image is None else "i2t"
        samples += [ValidationSample(kind, *pair) for pair in zip(references, texts)]
    has_pixels = pretrained.image is not None and pretrained.image["latents"] != "vae"
    if has_pixels and pretrained.supports("t2l"):
        drawn = _drawn(pretrained, [ids.tolist() for ids in rows.tokens])
        beside = np.concatenate([drawn, codec_of(pretrained).decode(rows.latents)], axis=2)
        samples += [
            ValidationSample("t2i", reference, image=image)
            for reference, image in zip(references, beside)
        ]
    return samples


class _Tokenizer:
    """Decodes as the store's tokenizer; transformers, which `mmldlm sample` reads it with, takes
    seconds to import.
    """

    def __init__(self, path: str):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(path)

    def batch_decode(self, tokens: Any, skip_special_tokens: bool = True) -> list[str]:
        """Return lists of ids as strings."""
        # One by one: threads of decode_batch would disturb data workers that are forked later.
        return [
            self._tokenizer.decode(
                list(map(int, ids)), skip_special_tokens=skip_special_tokens
            ).strip()
            for ids in tokens
        ]


def _running(task: TextTask, data: Any, model: Model, values: dict[str, Any]) -> Pretrained:
    """Return what `load_pretrained` returns of a checkpoint."""
    training = values.get("training") or {}
    return Pretrained(
        model,
        _Tokenizer(str(data.train.root / "tokenizer" / "tokenizer.json")),
        getattr(data.config, "text_diffusion", None),
        getattr(data.config, "latent_diffusion", None),
        mode_weights=training.get("mode_weights"),
        condition_dropout=training.get("condition_dropout"),
        encoder=values.get("encoder"),
        task=task,
        image=values.get("image"),
        config_folder=data.train.root,
    )


def _written(pretrained: Pretrained, latents: np.ndarray) -> list[str]:
    given: dict[str, Any] = {"latent_file": latents, "num_steps": NUM_STEPS}
    _, options = options_of_call(pretrained, "l2t", given)
    samples = write_from_latents(pretrained, options, None, latents, hidden_progress())
    return [record["text"] for record in samples.complete().records]


def _drawn(pretrained: Pretrained, captions: list[list[int]]) -> np.ndarray:
    given = {"text": ["the captions are given as ids"], "num_steps": NUM_STEPS}
    _, options = options_of_call(pretrained, "t2i", given)
    task: Any = pretrained.task
    own = {key: getattr(options, key) for key in task.t2i_options}
    steps, guidance = options.num_steps, options.guidance
    assert steps is not None and guidance is not None
    return make_images(pretrained, captions, steps=steps, guidance=guidance, **own)[1]
