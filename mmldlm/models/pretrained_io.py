"""Read a model in Hugging Face's layout: model.safetensors (or shards with an index) and
config.json.

config.json is compared with the tensors' shapes before a model is built from it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from mmldlm.config.renamed_keys import is_removed_weight, model_config_with_new_names
from mmldlm.config.section import Section
from mmldlm.errors import UserError
from mmldlm.models.base import BaseTransformer
from mmldlm.models.meta_device import meta_device
from mmldlm.utils.formatting import describe_os_error
from mmldlm.utils.hub import model_path
from mmldlm.utils.input_files import open_regular
from mmldlm.utils.json_files import read_json
from mmldlm.utils.validation import describe_problems

Model = TypeVar("Model", bound=BaseTransformer)
AnySection = TypeVar("AnySection", bound=Section)

CONVERT = "make the folder with `mmldlm convert RUN/latest OUT`"
COPY_AGAIN = "copy it again from its source, or convert the checkpoint again"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read(kind: type[Model], name: str | Path, device: str, dtype: torch.dtype) -> Model:
    """Implement `MultimodalMMDiT.from_pretrained`."""
    folder = model_path(name)
    config_path = folder / "config.json"
    config = checked_section(read_values(config_path), kind.config_class, config_path)
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        tensors |= _read_safetensors(path)
    tensors = {name: value for name, value in tensors.items() if not is_removed_weight(name)}
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    check_shapes(kind, config, shapes, config_path)
    if other := [
        f"{name}: {tensor.dtype}"
        for name, tensor in tensors.items()
        if tensor.dtype not in _DTYPES
    ]:
        raise UserError(f"floating-point weights in {folder}", "; ".join(other[:5]), CONVERT)
    if config.tie_embeddings:
        tensors.setdefault("text_head.weight", tensors["text_encoder.token_embedding.weight"])
    model = kind(config)
    model.load_state_dict(tensors)
    model.check_latent_statistics(folder)
    mean, std = model.latent_mean.clone(), model.latent_std.clone()
    model.to(device=device, dtype=dtype)
    model.latent_mean, model.latent_std = mean.to(device), std.to(device)
    return model.eval()


def read_values(path: Path) -> dict[str, Any]:
    """Read config.json of any model.

    Raises:
        UserError: a missing or corrupt file.
    """
    if not path.is_file():
        raise UserError(f"{path.name} in {path.parent}", "no such file", CONVERT)
    return model_config_with_new_names(read_json(path, COPY_AGAIN, max_bytes=4 << 20))


def checked_section(values: dict[str, Any], section: type[AnySection], path: Path) -> AnySection:
    """The model section of what `read_values` returned.

    Raises:
        UserError: sizes that do not define a model.
    """
    try:
        return section(
            **{key: value for key, value in values.items() if key in section.model_fields}
        )
    except ValidationError as error:
        problems = describe_problems(error, limit=5)
        raise UserError(
            f"valid sizes of a model in {path}", f"damaged file: {problems}", COPY_AGAIN
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards of its index, which must be in the folder itself."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    names = [single.name]
    if not single.is_file() and index.is_file():
        shards = read_json(index, COPY_AGAIN).get("weight_map")
        names = sorted({str(name) for name in shards.values()}) if isinstance(shards, dict) else []
        if not names or any(Path(name).name != name for name in names):
            description = f"damaged file: {', '.join(names[:5]) or 'no weight_map'}"
            raise UserError(
                f"in {index}, names of shards in {folder} itself", description, COPY_AGAIN
            )
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{name} in {folder}", "no such file", CONVERT)
    return [folder / name for name in names]


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file.

    Raises:
        UserError: a truncated file, or a header with wrong sizes, shapes or positions.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        open_regular(path).close()  # the library names no error of the system
        return load_file(path)
    except OSError as error:
        found = describe_os_error(error)
        raise UserError(f"a safetensors file {path}", found, COPY_AGAIN) from error
    except (SafetensorError, RuntimeError, OverflowError, TypeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"an intact safetensors file {path}", f"damaged file: {first}", COPY_AGAIN
        ) from error


def check_shapes(
    kind: Callable[[Any], nn.Module],
    config: Section,
    stored: dict[str, tuple[int, ...]],
    config_path: Path,
) -> None:
    """Compare the stored shapes with those of the model that the config describes, without memory
    for its weights.

    A tied weight may be stored once, under its first name.

    Raises:
        UserError: a tensor that is missing, has another shape, or does not belong to this model.
    """
    fix = "convert the checkpoint again; the config and the weights must come from the same run"
    expected = f"the tensors of the model in {config_path}"
    num_blocks = getattr(config, "n_blocks", 0)
    if num_blocks > len(stored):
        raise UserError(expected, f"{len(stored)} tensors for n_blocks {num_blocks}", fix)
    with meta_device():
        model = kind(config)
    expected_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {name: shape for name, shape in stored.items() if not is_removed_weight(name)}
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(parameter, name)
        if first != name and first in stored:
            stored = {name: stored[first], **stored}
    wrong = [
        f"{name}: {stored.get(name, 'missing')}, expected {shape}"
        for name, shape in expected_shapes.items()
        if stored.get(name) != shape
    ] + [f"{name}: not a tensor of this model" for name in stored if name not in expected_shapes]
    if wrong:
        raise UserError(expected, f"{len(wrong)} mismatched: " + "; ".join(wrong[:5]), fix)
