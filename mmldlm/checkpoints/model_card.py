"""The model card of a converted model: README.md, written from what its run recorded.

The files that it reads may come from anyone: their words are shown as words, never as markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from mmldlm.checkpoints.formats.weight_source import OpenedCheckpoint
from mmldlm.checkpoints.manifest import CONFIG_FILE, STATE_FILE
from mmldlm.checkpoints.output_folder import CARD
from mmldlm.config.task_names import DEFAULT_TASK, TASK_NAMES
from mmldlm.errors import UserError
from mmldlm.utils.formatting import count_noun, printable
from mmldlm.utils.hub import MODEL_TYPE
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.json_files import read_json
from mmldlm.utils.run_files import CHECKPOINTS, EVALUATIONS

# Longest recorded word or phrase in a card, in characters.
_MAX_WORD = 120
# Figures from here on are not shown: an integer may be larger than any float.
_LARGEST = 1e30


def write_model_card(
    opened: OpenedCheckpoint,
    folder: Path,
    name: str,
    num_parameters: int,
    dtype: str,
    is_average: bool = False,
) -> None:
    """Write README.md of a converted checkpoint of mmldlm; nothing for other sources.

    Args:
        folder: Folder that has the model's config.json.
        name: Name of the model.
        num_parameters: Number of its parameters.
        dtype: Dtype of its weights, in words.
        is_average: Whether they are the moving average, which no run evaluates.
    """
    weights = f"{dtype}, the moving average" if is_average else dtype
    if opened.checkpoint is None or not (folder / CONFIG_FILE).is_file():
        return
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    parts = [
        f"---\nlibrary_name: {MODEL_TYPE}\ntags:\n- {MODEL_TYPE}\n- embeddings\n- diffusion\n---",
        f"# {_words(name)}",
        _introduction(config, num_parameters),
        "## How to load it",
        _usage(config, name),
        "## Training",
        _table(_training(opened, config, weights)) + "\n\nAll settings are in `config.yaml`.",
        "## Quality",
        _quality(opened, is_average),
        "## Limits",
        _limits(config),
    ]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _introduction(config: Mapping[str, Any], num_parameters: int) -> str:
    between = "captions and images" if _is_of_images(config) else "text and embeddings"
    purpose = f", which translates between {between}" if _is_sampled(config) else ""
    architecture = _code(config.get("architecture", "model"))
    task = _code(config.get("task", DEFAULT_TASK))
    return (
        f"{architecture} of {num_parameters:,} parameters, trained by mmldlm as task={task}"
        f"{purpose}."
    )


def _usage(config: Mapping[str, Any], name: str) -> str:
    folder = json.dumps(printable(name), ensure_ascii=False)
    if not _is_sampled(config):
        return (
            "The weights have the names of the task's model:\n\n"
            "    from safetensors.torch import load_file\n\n"
            f'    model.load_state_dict(load_file({folder} + "/model.safetensors"))'
        )
    if _is_of_images(config):
        calls = {
            "l2t": 'model.caption(["picture.png"])   # a caption of each picture',
            "t2l": 'model.draw(["a caption"])        # [N, S, S, C] uint8',
        }
    else:
        calls = {
            "l2t": "model.decode(embeddings)         # a text of each embedding [N, D]",
            "t2l": 'model.encode(["A text."])        # [N, D], by the model itself',
        }
    trained = _section(_section(config, "training"), "mode_weights")
    lines = [call for mode, call in calls.items() if trained.get(mode, 1)]
    return "\n".join(
        ["    import mmldlm", "", f"    model = mmldlm.load({folder})"]
        + [f"    {line}" for line in lines]
    )


def _training(
    opened: OpenedCheckpoint, config: Mapping[str, Any], weights: str
) -> list[tuple[str, str]]:
    """Return what the model was trained on, and for how long, as far as it is recorded."""
    state = _state(opened)
    encoder, tokenizer = _section(config, "encoder"), _section(config, "tokenizer")
    modes = _section(_section(config, "training"), "mode_weights")
    rows = [
        ("data", count_noun(state["num_samples"], "sample") if "num_samples" in state else ""),
        ("embeddings of", _encoder(encoder) if encoder and not _is_of_images(config) else ""),
        ("images", _images(_section(config, "image"))),
        ("tokenizer", _code(tokenizer["name"]) if "name" in tokenizer else ""),
        ("steps", f"{opened.step:,}" if opened.step is not None else ""),
        ("samples in a step", f"{state['global_batch']:,}" if "global_batch" in state else ""),
        (
            "modes",
            ", ".join(
                f"{_code(mode)} {share:.2g}"
                for mode, share in modes.items()
                if type(share) in (int, float) and 0 < share < _LARGEST
            ),
        ),
        ("engine", f"{_code(opened.engine)}, {count_noun(opened.world_size or 1, 'rank')}"),
        ("weights", weights),
    ]
    return [(title, value) for title, value in rows if value]


def _encoder(encoder: Mapping[str, Any]) -> str:
    name = _code(encoder.get("hub_name") or encoder.get("name"))
    return f"{name}, unit vectors" if encoder.get("normalize") is True else name


def _images(image: Mapping[str, Any]) -> str:
    if "size" not in image:
        return ""
    return f"{_words(image['size'])} pixels, as {_code(image.get('latents'))}"


def _quality(opened: OpenedCheckpoint, is_average: bool) -> str:
    """Return the figures of the last evaluation up to the checkpoint's step, with whose they
    are.
    """
    figures = _last_evaluation(opened)
    measure = (
        "`mmldlm evaluate --checkpoint FOLDER --data STORE` measures texts and embeddings on"
        " unseen samples, beside floors and with standard errors."
    )
    if not figures:
        return f"The run has not evaluated this model. {measure}"
    step = figures.pop("step")
    rows = [(_code(name), f"{value:.4g}") for name, value in figures.items()]
    whose = ", of the weights themselves and not of their average" if is_average else ""
    return (
        f"On the validation split of its data, at step {step:,} of the training{whose}:\n\n"
        f"{_table(rows)}\n\n{measure}"
    )


def _last_evaluation(opened: OpenedCheckpoint) -> dict[str, Any]:
    """Return the step and the finite figures of a record of eval_log.jsonl; {} without one."""
    assert opened.checkpoint is not None
    # Not the path behind links: the folder of checkpoints may be one to another disk.
    checkpoint = opened.checkpoint
    log = checkpoint.parent.parent / EVALUATIONS
    if checkpoint.parent.name != CHECKPOINTS or log.is_symlink() or opened.step is None:
        return {}
    try:
        lines = read_bytes(log).decode("utf-8").split("\n")
    except (OSError, ValueError):
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            # The last line of a run that is being written, or was killed.
            continue
        if isinstance(record, dict) and _is_count(record.get("step")):
            if record["step"] <= opened.step:
                return {
                    key: value
                    for key, value in record.items()
                    if type(value) in (int, float) and abs(value) < _LARGEST
                }
    return {}


def _limits(config: Mapping[str, Any]) -> str:
    limits = []
    length = config.get("max_seq_len")
    if _is_sampled(config) and _is_count(length):
        limits.append(f"It reads and writes texts of at most {length - 1:,} tokens.")
    if _is_sampled(config):
        limits.append(
            "It knows the language and the subjects of its training data alone; what it writes of"
            " others reads well at best."
        )
    if _is_sampled(config) and not _is_of_images(config):
        limits.append(
            "Embeddings must come from the encoder of the training data, unscaled. A text that is"
            " written from an embedding is a guess: it may say what the embedded text did not."
        )
    limits.append("The license of the training data is not recorded: name it before you publish.")
    return "\n".join(f"- {limit}" for limit in limits)


# -- what is recorded -----------------------------------------------------------------------------


def _state(opened: OpenedCheckpoint) -> dict[str, int]:
    """Return the counts in training_state.json; a resume checks them, here they are shown."""
    assert opened.checkpoint is not None
    try:
        values = read_json(opened.checkpoint / STATE_FILE, "")
    except UserError:
        return {}
    return {key: value for key, value in values.items() if _is_count(value)}


def _section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 62


def _is_of_images(config: Mapping[str, Any]) -> bool:
    return bool(_section(config, "image"))


def _is_sampled(config: Mapping[str, Any]) -> bool:
    """Whether `mmldlm.load` reads it: a task of one's own has no samplers."""
    return config.get("task", DEFAULT_TASK) in TASK_NAMES


# -- Markdown -------------------------------------------------------------------------------------


def _words(value: Any) -> str:
    """Return a recorded value as one line of words, without marks of Markdown, HTML or the
    direction of writing.
    """
    text = " ".join(printable(str(value)).split())
    return "".join(c for c in text if c.isprintable() and c not in "`|<>[]*")[:_MAX_WORD]


def _code(value: Any) -> str:
    return f"`{_words(value) or '?'}`"


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
