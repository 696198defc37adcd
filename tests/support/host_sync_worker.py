"""Steps on FakeTensors of a GPU: which operations cross between host and device, or make the host
wait.

python tests/support/host_sync_worker.py LIBRARY STORE   (LIBRARY: fake_cuda.cpp, compiled)

Prints one JSON object, case -> ["operation at file:line", ...]. Shapes, dtypes and devices are as
on a GPU, and so is which code runs; kernels and what they compute are not. A copy from the host,
an operation that mixes devices, and a value that the host reads all show up, on machines that have
no GPU.
"""

from __future__ import annotations

import ctypes
import json
import sys
import traceback

CASES = {
    "bf16": {"dtype": "bf16"},
    "bf16, no padding": {"dtype": "bf16", "full": True},
    "bf16, checkpointing": {
        "dtype": "bf16",
        "words": ["model.gradient_checkpointing=true", "model.dropout=0.1"],
    },
    "bf16, nothing scored": {"dtype": "bf16", "words": ["training.loss_type=t2l"]},
    "bf16, layer by layer": {"dtype": "bf16", "hooked": True, "words": ["model.dropout=0.1"]},
    "fp32": {"dtype": "fp32"},
    "autocast, Muon": {"dtype": "bf16", "autocast": True, "words": ["optimizer.kind=muon"]},
    "sampled candidates": {
        "dtype": "bf16",
        "words": [
            "loss.text_candidates=50",
            "loss.text_weighting=uniform",
            "model.token_embedding_scale=20",
        ],
    },
    "several latents, clamps": {
        "dtype": "bf16",
        "words": [
            "loss.text_loss_clamp=5.0",
            "loss.latent_prediction_clamp=1.0",
            "model.tie_embeddings=true",
        ],
    },
    "AR": {"dtype": "bf16", "preset": "ar"},
    "AR, fp32, cross-attention, checkpointing": {
        "dtype": "fp32",
        "preset": "ar",
        "words": ["model.conditioning=cross_attention", "model.gradient_checkpointing=true"],
    },
    "latent DiT, autocast": {"dtype": "bf16", "preset": "latent_dit_adaln", "autocast": True},
    "GIDD": {"dtype": "bf16", "preset": "gidd"},
    "HDLM, autocast": {
        "dtype": "bf16",
        "preset": "hdlm",
        "autocast": True,
        "words": ["text_diffusion.num_clusters=6", "model.conditioning=prefix"],
    },
    "two predictions, dropout": {
        "dtype": "bf16",
        "words": [
            "latent_diffusion.schedule=decoupled",
            "latent_diffusion.prediction=x0_epsilon",
            "latent_diffusion.weighting=ddm_inverse",
            "loss.latent_weight_clip=50",
            "training.l2t_condition_noise=0.3",
            "model.dropout=0.1",
        ],
    },
}
SMALL = ["model.hidden_size=64", "model.n_blocks=1", "model.n_heads=2", "model.max_seq_len=64"]


def pretend(library: str) -> None:
    """Give torch a CUDA device, as far as FakeTensors need one.

    Before torch is imported, for it looks once.
    """
    assert "torch" not in sys.modules
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401
    import torch.cuda.amp.common

    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *args, **kwargs: True
    torch.cuda.get_device_capability = lambda *args: (9, 0)


def crossings():
    """A dispatch mode that notes operations between host and device, and reads."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Crossings(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.found: dict[str, None] = {}

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            out = function(*args, **kwargs)
            given = {
                x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
            }
            made = {x.device.type for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
            reads = any(
                word in str(function)
                for word in ("_local_scalar", "nonzero", "unique", "masked_select")
            )
            if reads or len(given | made) > 1:
                frames = [
                    frame for frame in traceback.extract_stack() if "/mmldlm/" in frame.filename
                ]
                where = (
                    f"{frames[-1].filename.split('/mmldlm/')[-1]}:{frames[-1].lineno}"
                    if frames
                    else "?"
                )
                self.found[f"{function} at {where}"] = None
            return out

    return Crossings()


def step(
    store: str,
    dtype: str,
    words=(),
    full: bool = False,
    hooked: bool = False,
    autocast: bool = False,
    preset="tiny",
):
    """Two steps of SingleEngine; what crossed in the second, from the forward pass to the weights'
    average.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from mmldlm.data.loader import MicroBatches
    from mmldlm.engines.base import Autocast, compute_dtype
    from mmldlm.engines.ema import WeightAverage
    from mmldlm.engines.muon import attach_muon
    from mmldlm.engines.torch_engines import SingleEngine
    from mmldlm.tasks.registry import find_task, load_config

    sizes = [
        f"data.latent_data_root={store}",
        *SMALL,
        "training.train_batch_size=8",
        "optimizer.warmup_steps=5",
    ]
    config = load_config(preset, None, [*sizes, *words])
    task, device = find_task(config.task), torch.device("cuda", 0)
    data = task.open_data(config)
    config, model_class = data.config, task.model_class()
    collator = task.collator(data)
    batches = MicroBatches(
        data.train, data.training_plan(config.training.train_batch_size), collator, 0, 1, 1
    )
    batch = batches[0]
    if full:
        batch = cut(batch, int(batch.attention_mask.sum(1).min()))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        torch.set_default_dtype(torch.float32 if autocast else compute_dtype(dtype))
        with device:
            model = model_class(config.model)
        torch.set_default_dtype(torch.float32)
        if hooked:
            for block in model.blocks:
                block.to_qkv.register_forward_hook(lambda *args: None)
        engine = SingleEngine.__new__(SingleEngine)  # its own start would look for the GPU
        engine.rank, engine.world_size, engine.device = 0, 1, device
        plan = task.parameter_plan(model, config)
        engine._setup(model, config, plan)
        if config.optimizer.kind == "muon":
            attach_muon(engine, plan)
        engine.module = Autocast(model, "cuda", compute_dtype(dtype)) if autocast else model
        batch.map_tensors(lambda tensor: mode.from_tensor(tensor).to(device))
        objective, average = task.objective(config), WeightAverage(engine, 0.99)
        for _ in range(2):
            with crossings() as seen:
                loss, metrics = objective(engine.module, batch)
                engine.backward(loss)
                norm = engine.grad_norm()
                assert {value.device.type for value in (loss, norm, *metrics.values())} == {"cuda"}
                for name, parameter in model.named_parameters():
                    grad = parameter.grad
                    assert grad is None or (grad.device, grad.dtype) == (
                        device,
                        parameter.dtype,
                    ), name
                engine.step(1e-3, 5.0)
                average.update()
    return list(seen.found)


def cut(batch, length: int):
    """The first `length` tokens of every text: a batch without padding."""
    rows, width = batch.text_tokens.shape
    keep = batch.text_positions % width < length

    def moved(places):
        return places // width * length + places % width

    every = batch.token_positions
    batch.token_positions = moved(every[every % width < length])
    for name in ("text_targets", "text_weights", "text_samples"):
        setattr(batch, name, getattr(batch, name)[keep])
    batch.text_positions = moved(batch.text_positions[keep])
    for name in ("text_tokens", "attention_mask"):
        setattr(batch, name, getattr(batch, name)[:, :length].contiguous())
    return batch


def main() -> None:
    library, store = sys.argv[1:]
    pretend(library)
    print(json.dumps({name: step(store, **case) for name, case in CASES.items()}))


if __name__ == "__main__":
    main()
