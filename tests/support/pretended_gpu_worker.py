"""Samplers, training with its evaluation, and commands on a pretended GPU and on the CPU: the same
results, and no operation that a GPU refuses.

python tests/support/pretended_gpu_worker.py LIBRARY CHECKPOINT STORE FOLDER

LIBRARY: fake_cuda.cpp, compiled; CHECKPOINT: a converted folder of a translation model. Prints one
JSON object, case -> "equal" or what went wrong.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

IMAGES = "images"
SMALL = ["model.hidden_size=32", "model.n_blocks=1", "model.n_heads=2"]
# Runs: preset, words.
RUNS: dict[str, tuple[str, list[str]]] = {
    "MMDiT": (
        "tiny",
        [
            "model.n_blocks=2",
            "model.gradient_checkpointing=2",
            "model.dropout=0.1",
            "logging.eval_samples=4",
        ],
    ),
    "bf16": ("tiny", ["training.dtype=bf16"]),
    IMAGES: ("image_text_quick", ["logging.eval_samples=4"]),
    "Muon": ("tiny", ["optimizer.kind=muon", "model.tie_embeddings=true"]),
    "AR": ("ar", []),
    "latent DiT": ("latent_dit_adaln", []),
    "GIDD": ("gidd", []),
    "HDLM": ("hdlm", ["text_diffusion.num_clusters=6"]),
}
# With each optimizer: loading is the engine's, whatever the model.
RESUMED = ("MMDiT", "Muon")
# Ends of the names of what is compared in logs.
COMPARED = ("loss", "norm", "lr", "skipped", "nelbo", "mse", "nll", "accuracy")


def pretend(library: str) -> None:
    """Give torch a CUDA device by name, before it is imported."""
    assert "torch" not in sys.modules
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import torch
    from torch.utils._device import _device_constructors

    def without_inference(mode: Any = True) -> Any:
        # Views of parameters cannot be wrapped in inference mode.
        return torch.no_grad()(mode) if callable(mode) else torch.set_grad_enabled(not mode)

    torch.inference_mode = without_inference
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    for name, value in {
        "_lazy_init": None,
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "get_device_name": "pretended",
        "get_device_capability": (7, 0),  # without varlen attention, which has no CPU kernel
        "is_bf16_supported": True,
    }.items():
        setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
    torch.Tensor.pin_memory = lambda self, *args: self
    # `with torch.device(...)` knows constructors by identity: by that of the real torch.tensor.
    _device_constructors()
    make = torch.tensor

    def make_and_move(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any):
        # It would make the tensor on the device below every mode.
        made = make(*args, **kwargs)
        return made if device is None else made.to(device)

    torch.tensor = make_and_move
    torch.cuda.get_rng_state = lambda *args: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args: torch.set_rng_state(state)


def samplers(checkpoint: str, device: str) -> dict[str, Callable[[], Any]]:
    """Every sampler of every kind of model, on a device."""
    import torch

    from mmldlm.diffusion.hdlm import HierarchicalProcess
    from mmldlm.inference.load import load_pretrained
    from mmldlm.sampling.autoregressive import write_texts
    from mmldlm.sampling.joint import sample_joint
    from mmldlm.sampling.latents import sample_latents
    from mmldlm.sampling.posterior import sample_by_posterior
    from mmldlm.sampling.settings import MASKED_SAMPLERS
    from mmldlm.sampling.text import sample_lengths, sample_text
    from mmldlm.tasks.image_codes.sampling import sample_codes, sample_codes_and_texts
    from tests.sampling.test_autoregressive import make_model as make_causal_model
    from tests.sampling.test_posterior import CLUSTERS, MASK, PROCESSES, model_of
    from tests.tasks.image_codes.test_model import make_model as make_codes_model

    pretrained = load_pretrained(checkpoint, device)
    model, text = pretrained.model, pretrained.text_diffusion
    latent = pretrained.latent_diffusion
    points = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(device)
    causal, codes = make_causal_model().to(device), make_codes_model().to(device)
    found: dict[str, Callable[[], Any]] = {
        name: partial(sample_text, model, points, diffusion=text, sampler=name)
        for name in MASKED_SAMPLERS
    }
    guided = {"guidance": 2.0, "presence_penalty": 1.0, "temperature": 0.7, "top_p": 0.9}
    found |= {
        "guided": partial(sample_text, model, points, diffusion=text, steps=3, **guided),
        "lengths": partial(sample_lengths, model, points, 3, diffusion=text, steps=3),
        "latents": partial(sample_latents, model, None, num_samples=5, diffusion=latent, steps=3),
        "joint": partial(
            sample_joint, model, 5, text_diffusion=text, latent_diffusion=latent, steps=3
        ),
        "causal": partial(write_texts, causal, points[:, :4]),
        "beam": partial(write_texts, causal, points[:, :4], sampler="beam"),
        "codes": partial(sample_codes, codes, None, num_samples=5, steps=3),
        "codes and texts": partial(
            sample_codes_and_texts, codes, 5, text_diffusion=text, steps=3, batch_size=2
        ),
    }
    processes = PROCESSES | {"hdlm": HierarchicalProcess(CLUSTERS.to(device), MASK)}
    for name, process in processes.items():
        found[f"posterior, {name}"] = partial(
            sample_by_posterior, model_of().to(device), points, process, num_steps=3
        )
    return found


def plain(result: Any) -> Any:
    """A result as lists and dicts of numbers."""
    import torch

    if isinstance(result, torch.Tensor):
        return result.detach().cpu().double().flatten().tolist()
    if isinstance(result, (tuple, list)):
        return [plain(part) for part in result]
    return getattr(result, "tokens", result)


def difference(found: Any, expected: Any, rel_tol: float = 1e-2, place: str = "") -> str | None:
    """Where two results differ by more than rounding; None: nowhere.

    Muon orthogonalizes in bf16 on a GPU.
    """
    if isinstance(expected, float) and isinstance(found, float):
        is_equal = math.isclose(found, expected, rel_tol=rel_tol, abs_tol=1e-5)
    elif isinstance(expected, str) and isinstance(found, str):
        # A sentence may hold a loss.
        is_equal = re.sub(r"\d+\.\d+", "", found) == re.sub(r"\d+\.\d+", "", expected)
    elif isinstance(expected, (dict, list)) and type(found) is type(expected):
        if len(found) != len(expected):
            return f"{place}: {len(found)} instead of {len(expected)} entries"
        keys = expected if isinstance(expected, dict) else range(len(expected))
        parts = (difference(found[key], expected[key], rel_tol, f"{place}.{key}") for key in keys)
        return next(filter(None, parts), None)
    else:
        is_equal = found == expected
    return None if is_equal else f"{place}: {found} instead of {expected}"


def compare(call: Callable[[], Any], reference: Callable[[], Any], rel_tol: float = 1e-2) -> str:
    import torch

    from tests.support.pretended_gpu import PretendedGpu

    has_gpu = torch.cuda.is_available
    try:
        torch.cuda.is_available = lambda: False
        expected = plain(reference())
    finally:
        torch.cuda.is_available = has_gpu
    try:
        with PretendedGpu():
            found = plain(call())
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/mmldlm/" in f.filename]
        where = (
            f"{frames[-1].filename.split('/mmldlm/')[-1]}:{frames[-1].lineno}" if frames else ""
        )
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]} ({where})"
    return difference(found, expected, rel_tol) or "equal"


def train_twice(
    store: str, folder: Path, *, name: str, preset: str, words: list[str]
) -> list[Any]:
    """Train four steps with a NaN in the second, RESUMED runs the last after a resume; return what
    was logged.
    """
    from unittest import mock

    from mmldlm.data.loader import MicroBatches
    from mmldlm.tasks.registry import load_config
    from mmldlm.train import check_run, train

    make = MicroBatches.__getitem__

    def poisoned(self, item):
        batch = make(self, item)
        if self.plan.shuffle and item == 1:
            batch.length_weights.fill_(float("nan"))
        return batch

    for num_steps in (3, 4) if name in RESUMED else (4,):
        config = load_config(
            preset,
            None,
            [
                f"data.latent_data_root={store}",
                "data.max_validation_samples=8",
                f"logging.save_dir={folder}",
                f"logging.run_name={name}",
                "logging.plot=false",
                "logging.eval_samples=0",  # some of RUNS draw them
                "logging.layer_stats_freq=2",
                "engine.kind=single",
                "training.dtype=fp32",
                "training.train_batch_size=4",
                f"training.num_train_steps={num_steps}",
                "training.resume=auto",
                "optimizer.ema_decay=0.9",
                *SMALL,
                *words,
            ],
        )
        with mock.patch.object(MicroBatches, "__getitem__", poisoned):
            train(check_run(config, 1))
    logs = []
    for log in ("training_log.jsonl", "eval_log.jsonl"):
        lines = (folder / name / log).read_text(encoding="utf-8").splitlines()
        logs += [
            {key: value for key, value in json.loads(line).items() if key.endswith(COMPARED)}
            for line in lines
        ]
    return logs


def commands(run: Path, images: Path, store: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """What is done with a run of texts and one of images; each of these picks its device itself.

    The encoder of the latents is in most of them.
    """
    import numpy as np

    from mmldlm.cli import main

    def output(*words: object, file: str) -> Any:
        folder.mkdir(exist_ok=True, parents=True)
        assert main([str(word) for word in words]) == 0
        path = folder / file
        if path.suffix == ".npy":
            return np.load(path).astype(float).ravel().tolist()
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines] if path.suffix == ".jsonl" else _read(path)

    def sample(kind: str, source: Path, *words: object, file: str = "samples.jsonl") -> Any:
        out = ("--output-dir", folder / kind, "--overwrite")
        return output("sample", kind, "--checkpoint", source, *out, *words, file=f"{kind}/{file}")

    text, few = ("--text", "A short sentence."), ("--num-steps", 2)
    return {
        "evaluate": partial(
            output, "evaluate", "--checkpoint", run, "--data", store, "--num-samples", 6, *few,
            "--control-samples", 4, "--latent-steps", 2, "--json", folder / "report.json",
            file="report.json",
        ),
        "replay": partial(
            output, "replay", run, 2, "--json", folder / "replay.json", file="replay.json"
        ),
        "t2l": partial(sample, "t2l", run, *text, *few, file="latents.npy"),
        "l2t, search": partial(
            sample, "l2t", run, "--latent-file", Path(store) / "validation" / "latents.npy",
            "--num-samples", 2, *few, "--search", "local", "--encoder-calls", 4,
        ),
        "t2i": partial(sample, "t2i", images, *text, *few, file="latents.npy"),
    }  # fmt: skip


def _read(path: Path) -> Any:
    """The figures of a report; a replay's findings."""
    report = json.loads(path.read_text(encoding="utf-8"))
    return report.get("claims", report)


def mixture(device: str) -> Any:
    """What a GPU refuses."""
    import torch

    return torch.ones(2, device=device) + torch.ones(2)


def main() -> None:
    library, checkpoint, store, folder = sys.argv[1:]
    pretend(library)
    from tests.support.pretended_gpu import PretendedGpu

    on_cpu = samplers(checkpoint, "cpu")
    with PretendedGpu():
        on_gpu = samplers(checkpoint, "cuda:0")
    found = {name: compare(call, on_cpu[name]) for name, call in on_gpu.items()}
    from tests.support.image_store import make_image_store

    pictures = str(make_image_store(Path(folder, "pictures")))
    for name, (preset, words) in RUNS.items():
        data = pictures if name == IMAGES else store
        train = partial(train_twice, data, name=name, preset=preset, words=words)
        found[f"training, {name}"] = compare(
            partial(train, Path(folder, "gpu")), partial(train, Path(folder, "cpu"))
        )
    runs = Path(folder, "cpu")
    done = [
        commands(runs / "MMDiT", runs / IMAGES, store, Path(folder, device))
        for device in ("gpu_out", "cpu_out")
    ]
    # The judge's cosines are those of an encoder in bf16.
    found |= {name: compare(call, done[1][name], rel_tol=2e-2) for name, call in done[0].items()}
    found["a mixture"] = compare(partial(mixture, "cuda:0"), partial(mixture, "cpu"))
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()
