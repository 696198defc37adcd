"""Samples of any kind from a model, with the options and the checks of `mmldlm sample`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mmldlm.errors import UserError
from mmldlm.inference.generate import Samples, sample_l2t, sample_t2l, sample_unconditional
from mmldlm.inference.images import sample_i2t, sample_pairs, sample_t2i, use_image_size
from mmldlm.inference.options import (
    IMAGE_KINDS,
    KINDS,
    READERS,
    TASK_OPTIONS,
    SampleOptions,
    check_read,
    defaults_of,
)
from mmldlm.inference.search_options import SearchOptions
from mmldlm.sampling.records import Recorder
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.progress import ProgressBar, hidden_progress
from mmldlm.utils.settings import flags, options_of

SAMPLERS: dict[str, Callable[..., Samples]] = {
    "l2t": sample_l2t,
    "t2l": sample_t2l,
    "unconditional": sample_unconditional,
    "i2t": sample_i2t,
    "t2i": sample_t2i,
    "joint": sample_pairs,
}


def sample(
    pretrained: Pretrained,
    kind: str,
    given: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: ProgressBar | None = None,
) -> Samples:
    """Return what `mmldlm sample KIND` writes into files.

    Args:
        kind: One of KINDS.
        given: Options by the names of `SampleOptions`; the others have the defaults of the kind.
        seed: Seed of every draw.
        progress: Display of the stages; None: none.

    Raises:
        UserError: Options that do not fit together, the kind, the model or its task.
    """
    kind, options = options_of_call(pretrained, kind, given or {}, seed)
    return run_sampler(pretrained, kind, options, progress or hidden_progress()).complete()


def options_of_call(
    pretrained: Pretrained, kind: str, given: Mapping[str, Any], seed: int = 0
) -> tuple[str, SampleOptions]:
    """Return the kind of samples and all options of a call from Python, as `fit_options` does.

    As on the command line, None is an option that is not given; numbers of NumPy are numbers.

    Raises:
        UserError: As of `sample`, or an option that writes a file.
    """
    given = {key: plain(value) for key, value in given.items() if value is not None}
    if "trace" in given:
        raise UserError(
            "options of a call from Python, which writes no files",
            "trace",
            "omit it, or run `mmldlm sample` with --trace FILE.html",
        )
    if kind not in KINDS:
        raise UserError(f"a kind of samples: {', '.join(KINDS)}", str(kind), "choose one of them")
    seed = plain(seed)
    SampleOptions.resolve(kind, given, seed)
    return fit_options(pretrained, kind, given, seed)


def plain(value: Any) -> Any:
    """Return a number of NumPy as one of Python, and anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def run_sampler(
    pretrained: Pretrained,
    kind: str,
    options: SampleOptions,
    progress: ProgressBar,
    recorder: Recorder | None = None,
) -> Samples:
    """Sample with the options of `fit_options`; a recorder sees every pass (`records_passes`)."""
    pretrained.vae = options.vae
    use_image_size(pretrained, options.image_size, options.data)
    more = {} if recorder is None else {"recorder": recorder}
    return SAMPLERS[kind](pretrained, options, progress, **more)


def fit_options(
    pretrained: Pretrained, kind: str, given: Mapping[str, Any], seed: int = 0
) -> tuple[str, SampleOptions]:
    """Return the kind of samples and all options for a model; None for what it does not read.

    Of a model of images, l2t, t2l and unconditional mean i2t, t2i and joint, with their defaults.

    Args:
        kind: One of KINDS.
        given: Options that the user gave, which `SampleOptions.resolve` accepted.

    Raises:
        UserError: The task lacks the kind, the sampler, or an option that was given, an option of
            other latents was given, or the model was not trained for the kind or for guidance.
    """
    if pretrained.image is not None:
        words = {mode: word for word, mode in IMAGE_KINDS.items()}
        kind = words.get(kind, kind)
        check_read(kind, given)
    values = defaults_of(kind) | dict(given)
    if pretrained.image is not None:
        _fit_to_latents(pretrained, kind, given, values)
    _fit_to_task(pretrained, kind, given, values)
    mode = IMAGE_KINDS.get(kind, kind)
    if mode != "unconditional" or pretrained.latent_config is None:
        # Else `choose_method` checks the modes.
        pretrained.check_mode(mode)
    options = SampleOptions(**values, seed=seed)
    pretrained.check_guidance(1.0 if options.guidance is None else options.guidance)
    return kind, options


def _fit_to_latents(
    pretrained: Pretrained, kind: str, given: Mapping[str, Any], values: dict[str, Any]
) -> None:
    """Refuse what the latents of a model of images do not read, and change defaults to theirs."""
    task: Any = pretrained.task
    assert pretrained.image is not None
    if (
        "guidance" not in given
        and values["guidance"] is not None
        and pretrained.condition_dropout == 0
    ):
        # No null condition was trained.
        values["guidance"] = 1.0
    unread = task.unread_of_kinds.get(kind, ())
    if wrong := [key for key in unread if key in given]:
        latents = f"{pretrained.image['latents']}, which are {task.corruption}"
        expected = f"options of `sample {kind}` for a model of {latents}"
        raise UserError(expected, flags(wrong), "omit them")
    values.update(dict.fromkeys(unread))
    if kind == "t2i" and task.t2i_steps is not None and "num_steps" not in given:
        values["num_steps"] = task.t2i_steps


def _fit_to_task(
    pretrained: Pretrained, kind: str, given: Mapping[str, Any], values: dict[str, Any]
) -> None:
    """Check kind, sampler and options against the task, and drop what it does not read."""
    task = pretrained.task
    pretrained.check_kind(kind, values["sampler"])
    if values["sampler"] is None and kind in READERS["sampler"] and task.samplers[kind]:
        values["sampler"] = task.samplers[kind][0]
    unread = [key for key in TASK_OPTIONS if key not in task.sampling_options]
    if wrong := [key for key in unread if key in given]:
        known = flags(key for key in TASK_OPTIONS if kind in READERS[key] and key not in unread)
        raise UserError(f"options that task={task.name} reads: {known}", flags(wrong), "omit them")
    if kind == "l2t":
        search = SearchOptions(**{key: values[key] for key in options_of(SearchOptions)})
        search.check_search(task, given)
    sampler = values["sampler"]
    if sampler is not None:
        of_others = task.unread_options(IMAGE_KINDS.get(kind, kind), sampler)
        if wrong := [key for key in TASK_OPTIONS if key in given and key in of_others]:
            known = flags(
                key
                for key in TASK_OPTIONS
                if kind in READERS[key] and key not in (*unread, *of_others)
            )
            fix = "omit them, or choose the --sampler that reads them"
            raise UserError(f"options that --sampler {sampler} reads: {known}", flags(wrong), fix)
        unread += of_others
    values.update(dict.fromkeys(unread))
