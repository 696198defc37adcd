"""The arithmetic of sizes.py against the model itself: on the meta device nothing is allocated,
however large.
"""

from __future__ import annotations

import pytest
import torch

from mmldlm.config.load import preset_names
from mmldlm.engines.deepspeed_config import bucket_elements
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.models.memory import head_bytes, mmdit_working_bytes
from mmldlm.models.token_scores import TokenQuery
from mmldlm.preflight.memory_model import BASE_GPU, PLANS, bytes_per_rank, state_bytes
from mmldlm.tasks.corrector.model import Hypotheses
from mmldlm.tasks.registry import find_task, load_config
from mmldlm.tasks.translation.parameter_plan import (
    decided_freeze,
    frozen_names,
    stacked_matrices,
)
from tests.support.forward import run_model

IMAGE_PRESETS = [name for name in preset_names() if load_config(name).task.startswith("image_")]
FROM_DATA = [
    "model.latent_dim=71",
    "model.vocab_size=1009",
    "model.mask_token_id=1",
    "model.pad_token_id=0",
    "model.eos_token_id=2",
]


def configured(name, *words):
    return load_config(name, None, [*FROM_DATA, *words])


def model_sizes(config, length):
    return find_task(config.task).model_sizes(config, length)


def meta_model(config):
    with torch.device("meta"):
        model = find_task(config.task).model_class()(config.model)
    frozen = frozen_names(model, config.training.loss_type, decided_freeze(config))
    ParameterPlan(frozen=frozenset(frozen)).set_requires_grad(model)
    return model


TWO_PREDICTIONS = (
    "latent_diffusion.schedule=decoupled",
    "latent_diffusion.prediction=x0_epsilon",
    "latent_diffusion.weighting=ddm",
    "model.scale_noisy_latents=false",
    "loss.latent_loss=mse",
)


@pytest.mark.parametrize(
    "name", [name for name in preset_names() if load_config(name).task == "translation"]
)
@pytest.mark.parametrize(
    "words",
    [
        (),
        (
            "model.tie_embeddings=true",
            "model.qk_rmsnorm=false",
            "model.num_latents=3",
            "task=corrector",
        ),  # fmt: skip
        TWO_PREDICTIONS,
    ],
)
def test_parameters_of_every_preset_to_the_element(name, words):
    check_parameters(configured(name, *words))


@pytest.mark.parametrize("name", IMAGE_PRESETS)
def test_parameters_of_the_presets_of_images(name):
    """At full width, with the latents of a store of 256-pixel images, or 512 codes of their
    patches.
    """
    kind = (
        ["model.latent_dim=1", "model.num_codes=512"]
        if name == "image_text_discrete"
        else ["model.latent_dim=768"]
    )
    check_parameters(configured(name, *kind, "model.num_latents=256", "model.latent_grid=[16,16]"))


def check_parameters(config):
    model, sizes = meta_model(config), model_sizes(config, 16)
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    outside = sum(p.numel() for p in model.parameters()) - sum(blocks)
    stacked = stacked_matrices(model)
    assert sizes["matrices"] == sum(
        p.numel() for name, p in model.named_parameters() if name in stacked
    )
    assert sizes["trainable"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sizes["frozen"] == sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert sizes["largest_block"] == max(*blocks, outside)
    assert sizes["buffers"] == sum(buffer.numel() for buffer in model.buffers())


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("freeze", ["by_mode", "none"])
@pytest.mark.parametrize("mode", ["unconditional", "mixed", "l2t", "t2l"])
def test_what_a_mode_freezes(mode, freeze, tied):
    words = [
        f"training.loss_type={mode}",
        f"training.freeze={freeze}",
        f"model.tie_embeddings={tied}",
    ]
    config = configured("tiny", *words)
    model, sizes = meta_model(config), model_sizes(config, 16)
    assert sizes["frozen"] == sum(p.numel() for p in model.parameters() if not p.requires_grad)


def kept_for_backward(config, length) -> int:
    """Bytes of the tensors that autograd keeps for a micro-batch, each storage once; weights and
    inputs not counted.

    Nor are attention's weights [B, heads, T, T], which the meta device keeps because it has no
    fused attention.
    """
    model = meta_model(config).to(
        torch.bfloat16 if config.training.dtype == "bf16" else torch.float32
    )
    batch, masked = (
        config.training.train_batch_size,
        config.training.train_batch_size * length // 2,
    )
    with torch.device("meta"):
        flags = torch.zeros(batch, dtype=torch.bool)
        inputs = {
            "latents": torch.zeros(batch, config.model.num_latents, config.model.latent_dim),
            "text_timesteps": torch.zeros(batch),
            "latent_timesteps": torch.zeros(batch),
            "attention_mask": torch.ones(batch, length, dtype=torch.bool),
            "text_is_null": flags,
            "latent_is_null": flags.clone(),
            "text_positions": torch.zeros(masked, dtype=torch.int64),
            "text_targets": torch.zeros(masked, dtype=torch.int64),
            "text_weights": torch.zeros(masked),
            "dropout_keys": torch.zeros(batch, dtype=torch.int64),
        }
        if config.task == "corrector":
            words = torch.zeros(batch, length, dtype=torch.int64)
            inputs["side_inputs"] = Hypotheses(words, inputs["latents"].clone(), flags.clone())
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        is_codes = config.task == "image_codes"
        if is_codes:  # half of the codes is scored
            inputs["latents"] = inputs["latents"].long()
            half = batch * config.model.num_latents // 2
            inputs["latent_query"] = TokenQuery(
                *torch.zeros(2, half, dtype=torch.int64), torch.zeros(half)
            )
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept, alive = {}, []  # alive: no address is used twice

    def pack(tensor):
        storage = tensor.untyped_storage()
        is_square = tensor.dim() > 2 and tensor.shape[-2] == tensor.shape[-1]
        if storage._cdata not in weights and not is_square:
            kept[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor.detach()  # itself, an output would keep its graph alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run_model(model, tokens, **inputs)
        if not is_codes:
            latents = torch.nn.functional.mse_loss(out.latent, torch.zeros_like(out.latent))
        else:
            latents = out.latent.loss_sum
        loss = out.text.loss_sum + latents + out.length_logits.sum()
    del loss
    return sum(kept.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "words",
    [
        ("tiny", 33),
        ("tiny", 64, "training.train_batch_size=32", "model.hidden_size=192", "model.n_blocks=5"),
        ("small", 64, "training.train_batch_size=4", "model.dropout=0.1"),
        ("mmdit", 128, "training.train_batch_size=2", "model.tokens_per_latent=9"),
        ("small", 64, "training.train_batch_size=4", "task=corrector"),
        ("small", 64, "model.n_blocks=6", "model.gradient_checkpointing=2"),
        ("small", 64, "model.n_blocks=6", "model.gradient_checkpointing=4"),
        ("tiny", 12, "model.num_latents=16", "model.tokens_per_latent=1"),
        (
            "small",
            16,
            "model.num_latents=256",
            "model.tokens_per_latent=1",
            "model.latent_grid=[16,16]",
        ),
        (
            "image_text_quick",
            8,
            "model.num_latents=16",
            "model.latent_grid=[4,4]",
            "model.latent_dim=16",
        ),
        (
            "image_text_quick",
            9,
            "model.num_latents=64",
            "model.latent_grid=[8,8]",
            "model.latent_dim=192",
        ),
        (
            "image_text_256",
            12,
            "model.num_latents=256",
            "model.latent_grid=[16,16]",
            "model.latent_dim=768",
        ),
        (
            "small",
            16,
            "task=image_codes",
            "model.num_latents=64",
            "model.latent_dim=1",
            "model.num_codes=512",
            "model.tokens_per_latent=1",
        ),
        (
            "tiny",
            9,
            "task=image_codes",
            "model.num_latents=16",
            "model.latent_dim=1",
            "model.num_codes=512",
            "model.tokens_per_latent=4",
        ),
    ],
    ids=lambda words: f"{words[0]}_{words[1]}",
)
def test_activations(words, dtype):
    name, length, *more = words
    # Of blocks that run again, none is the last one here.
    config = configured(
        name, f"training.dtype={dtype}", "model.gradient_checkpointing=false", *more
    )
    task, shape = find_task(config.task), (config.training.train_batch_size, length, dtype)
    found = task.activation_bytes(config, length) - mmdit_working_bytes(config.model, *shape)
    assert found == pytest.approx(kept_for_backward(config, length), rel=0.04)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tiny", "mmdit"])
def test_logits(name, dtype):
    config = configured(name, f"training.dtype={dtype}")
    found, scored = model_sizes(config, 64), config.training.train_batch_size * 32
    for on_gpu, key in ((False, "logits_cpu"), (True, "logits_gpu")):
        assert found[key] == head_bytes(config.model.vocab_size, scored, dtype, on_gpu)


def test_logits_of_codes_count_where_they_are_more_than_those_of_the_text():
    words = (
        "task=image_codes",
        "model.num_latents=256",
        "model.latent_dim=1",
        "model.num_codes=4096",
        "training.dtype=fp32",
    )
    config = configured("tiny", *words)
    found, scored = model_sizes(config, 8), config.training.train_batch_size * 128
    assert found["logits_cpu"] == head_bytes(4096, scored, "fp32", on_gpu=False)
    assert found["logits_gpu"] == head_bytes(4096, scored, "fp32", on_gpu=True)


def test_checkpointing_keeps_the_inputs_of_every_block_and_one_block_whole():
    config = configured("mmdit", "model.n_blocks=10")
    one = configured("mmdit", "model.n_blocks=1")
    saving = configured("mmdit", "model.n_blocks=10", "model.gradient_checkpointing=true")
    block = model_sizes(config, 64)["activations"] - model_sizes(one, 64)["activations"]
    assert model_sizes(one, 64)["activations"] < model_sizes(saving, 64)["activations"] < block / 2


def test_every_stage_needs_less_than_the_one_before_it():
    sizes = model_sizes(configured("mmdit"), 64)
    for dtype in ("fp32", "bf16"):
        # A model below ZeRO-3's limit stays gathered, and then ZeRO-2 needs no more.
        needs = [state_bytes(plan, sizes, 64, dtype, 50_000_000, max_live=0) for plan in PLANS]
        assert needs[1] > needs[2] > needs[3] > needs[4], needs


def test_more_ranks_help_where_they_shard():
    large = {"trainable": 10**9, "frozen": 0, "largest_block": 10**7, "activations": 0}
    assert state_bytes("single", large, 8, "fp32", 50_000_000) == 16 * 10**9
    assert state_bytes("zero3", large, 64, "bf16", 50_000_000) < state_bytes(
        "zero3", large, 8, "bf16", 50_000_000
    )
    assert state_bytes("zero0", large, 64, "bf16", 50_000_000) == state_bytes(
        "zero0", large, 8, "bf16", 50_000_000
    )


def test_accumulation_keeps_whole_gradients_under_fsdp_alone():
    """4 bytes per element on every rank, whatever their number: 28 GiB of a model of 8B."""
    sizes = {"trainable": 8 * 10**9, "frozen": 0, "largest_block": 2 * 10**8}
    for plan in PLANS[1:]:
        once, accumulated = (
            state_bytes(plan, sizes, 1024, "bf16", 50_000_000, accumulates=accumulates)
            for accumulates in (False, True)
        )
        grown = accumulated - once
        if plan == "fsdp":
            sharded = state_bytes(
                plan, sizes, 1024, "bf16", 0, accumulates=True, shard_gradients=True
            )
            assert sharded == once
        assert grown == (pytest.approx(4 * 8 * 10**9, rel=0.01) if plan == "fsdp" else 0)


def test_zero3_copies_the_gradients_of_a_sub_group_in_its_step():
    """4 bytes per element of the sub-group beside all gradients; with the optimizer on the host,
    none.
    """
    sizes = {"trainable": 8 * 10**9, "frozen": 0, "largest_block": 2 * 10**8}
    whole, part = (
        state_bytes("zero3", sizes, 2, "bf16", 0, max_live=0, sub_group=elements)
        for elements in (10**10, 10**9)
    )
    assert whole - part == 4 * (4 * 10**9 - 10**9)
    offload = [
        state_bytes("zero3", sizes, 2, "bf16", 0, offload=("optimizer",), sub_group=elements)
        for elements in (10**10, 10**9)
    ]
    assert offload[0] == offload[1]


def test_zero3_keeps_weights_gathered_up_to_its_limit():
    sizes = {"trainable": 8 * 10**9, "frozen": 0, "largest_block": 2 * 10**8}
    default, low = (
        state_bytes("zero3", sizes, 1024, "bf16", 50_000_000, max_live=limit)
        for limit in (10**9, 0)
    )
    assert default - low == 2 * (10**9 - 2 * 2 * 10**8)


# GiB allocated by torch at the peak on an H200, by plan and tokens of the longest text: one rank,
# 310M parameters, bf16, AdamW, 16 texts (docs/performance.md): plain, 2 accumulated micro-batches,
# checkpointing. FSDP2's of 254 tokens are less the whole fp32 weights (1.155 GiB) that a session
# of that day kept.
MEASURED = {
    ("single", 254): (5.1, 6.1, 5.0),
    ("zero0", 254): (7.1, 7.2, 6.3),
    ("zero1", 254): (7.0, 7.1, 7.0),
    ("zero2", 254): (6.6, 6.6, 5.8),
    ("zero3", 254): (6.6, 6.7, 6.5),
    ("fsdp", 254): (5.05, 6.15, 5.05),
    ("single", 62): (4.76, 4.97, 4.76),
    # DDP with checkpointing took 4.88: its peak of once 4 bytes per parameter more is a matter of
    # timing.
    ("zero0", 62): (6.10, 6.11, None),
    ("zero1", 62): (7.00, 7.00, 7.00),
    ("zero2", 62): (5.83, 5.83, 5.77),
    ("zero3", 62): (6.51, 6.51, 6.52),
    ("fsdp", 62): (4.95, 5.15, 4.95),
}


@pytest.mark.parametrize("plan, length", MEASURED)
def test_the_promise_covers_what_a_gpu_allocated(plan, length):
    bucket = bucket_elements(int(plan[4:]), True) if plan[-1] in "123" else 0
    for option, found in enumerate(MEASURED[plan, length]):
        if found is None:
            continue
        words = ["model.gradient_checkpointing=true"] if option == 2 else []
        config = load_config(
            "mmdit_300m",
            None,
            [*FROM_DATA, "model.vocab_size=30522", "model.latent_dim=384", *words],
        )
        config.training.train_batch_size, config.training.dtype = 16, "bf16"
        sizes = model_sizes(config, length)
        assert sizes["trainable"] == 310_010_042
        promised = bytes_per_rank(plan, sizes, 1, "bf16", True, bucket, accumulates=option == 1)
        assert 1.0 <= (promised - BASE_GPU) / 2**30 / found <= 1.25


@pytest.mark.parametrize("plan", PLANS)
def test_muon_saves_a_moment(plan):
    """4 bytes per element that it updates, on the ranks that hold its state."""
    sizes = {"trainable": 1000, "frozen": 0, "largest_block": 0}
    ranks = 1 if plan in ("single", "zero0") else 4
    adamw, muon = (
        state_bytes(plan, {**sizes, "single_moment": n}, 4, "bf16", 0) for n in (0, 600)
    )
    assert adamw - muon == 4 * 600 / ranks
