"""The fused block equals the reference, values and gradients, in fp64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmldlm.models import MultimodalMMDiT
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.models.packing import has_varlen
from tests.models.reference_mmdit import use_reference_blocks
from tests.support.forward import run_model

# Of the largest element of a tensor; fp64 rounding through two blocks is about 1e-13.
RELATIVE = 1e-10


def make(**more) -> MultimodalMMDiT:
    settings = dict(
        hidden_size=32,
        n_blocks=2,
        n_heads=4,
        cond_dim=24,
        max_seq_len=16,
        latent_dim=12,
        tokens_per_latent=3,
        vocab_size=40,
        mask_token_id=3,
        pad_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = MultimodalMMDiT(ModelConfig(**{**settings, **more})).double().train()
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data = 0.3 * torch.randn_like(parameter)
    return model


def batch(lengths, null_text=()):
    """tensors of a padded batch with every second real token scored."""
    torch.manual_seed(1)
    size, length = len(lengths), max(lengths)
    real = torch.arange(length) < torch.tensor(lengths)[:, None]
    is_null = torch.tensor([b in null_text for b in range(size)])
    scored = (real & ~is_null[:, None]).flatten().nonzero()[:, 0][::2]
    return {
        "text_tokens": torch.randint(4, 40, (size, length)),
        "latents": torch.randn(size, 12).double(),
        "text_timesteps": torch.rand(size),
        "latent_timesteps": torch.rand(size),
        "attention_mask": real,
        "text_is_null": is_null,
        "text_positions": scored,
        "text_targets": torch.randint(4, 40, (len(scored),)),
        "text_weights": torch.rand(len(scored)),
    }


def losses(model, given) -> torch.Tensor:
    out = run_model(model, **given)
    nll = out.text.loss_sum.double()
    return (
        nll + out.latent.double().square().sum() + out.length_logits.double().logsumexp(-1).sum()
    )


def gradients(model, given) -> dict[str, torch.Tensor]:
    loss = losses(model, given)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def largest_error(found: dict, expected: dict) -> tuple[float, str]:
    assert found.keys() == expected.keys()
    errors = []
    for name, truth in expected.items():
        assert (truth is None) == (found[name] is None), name
        if truth is not None:
            scale = truth.abs().max().clamp_min(1e-12)
            errors.append((float((found[name] - truth).abs().max() / scale), name))
    return max(errors)


CASES = {
    "dense": ([10, 10, 10], ()),
    "rectangle with a mask": ([16, 16, 15], ()),
    "sample by sample": ([16, 3, 9, 1], ()),
    "with null texts": ([12, 5, 12], (0, 2)),
}


@pytest.mark.parametrize("qk_rmsnorm", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference_with_all_gradients(case, qk_rmsnorm):
    given = batch(*CASES[case])
    fast, plain = make(qk_rmsnorm=qk_rmsnorm), make(qk_rmsnorm=qk_rmsnorm)
    use_reference_blocks(plain)
    error, name = largest_error(gradients(fast, given), gradients(plain, given))
    assert error < RELATIVE, f"{name}: {error}"


@pytest.mark.parametrize("case", CASES)
def test_a_hooked_or_replaced_layer_is_called(case):
    """Replay and the sanity check see each hooked layer called; the result stays the same."""
    given = batch(*CASES[case])
    fast, hooked = make(), make()
    called = []
    hooked.blocks[0].mlp_in.register_forward_hook(lambda *_: called.append("hook"))
    layer = hooked.blocks[1].to_qkv
    forward = layer.forward
    layer.forward = lambda *given: (called.append("replaced"), forward(*given))[1]
    error, name = largest_error(gradients(fast, given), gradients(hooked, given))
    assert error < RELATIVE, f"{name}: {error}"
    assert called == ["hook", "replaced"]


@pytest.mark.parametrize(
    "more", [{}, {"hidden_size": 24, "mlp_ratio": 2.3}, {"qk_rmsnorm": False}]
)
@pytest.mark.parametrize("case", CASES)
def test_fp32_grouped_products_equal_the_reference(case, more):
    """Grouped products take rows of whole 16 bytes only (not those of 55 elements) and no fp64."""
    given = batch(*CASES[case])
    plain = make(**more)
    use_reference_blocks(plain)
    exact = gradients(plain, given)
    grouped: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket is torch.ops.aten._grouped_mm:
                grouped.append(tuple(args[0].shape))
            return function(*args, **(kwargs or {}))

    given["latents"] = given["latents"].float()
    model = make(**more).float()
    with Seen():
        found = gradients(model, given)
    assert len(grouped) == 2 * (10 if "mlp_ratio" not in more else 5)
    error, name = largest_error(
        {key: None if g is None else g.double() for key, g in found.items()}, exact
    )
    assert error < 2e-5, f"{name}: {error}"


@pytest.mark.parametrize("dtype, bound", [(torch.float64, RELATIVE), (torch.float32, 2e-5)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", ["none", "backwards", "twice"])
def test_whatever_rows_are_read_of_the_last_block(case, order, dtype, bound):
    """No text at all (t2l), in any order, one twice: behind attention the last block computes
    these alone.
    """
    given = batch(*CASES[case])
    positions = given["text_positions"]
    chosen = {
        "none": positions[:0],
        "backwards": positions.flip(0),
        "twice": positions[[0, 1, 1]],
    }[order]
    given |= {
        "text_positions": chosen,
        "text_targets": 4 + chosen % 30,
        "text_weights": torch.rand(len(chosen)),
    }
    plain = make()
    use_reference_blocks(plain)
    exact = gradients(plain, given)
    rows: list[int] = []
    model = make().to(dtype)
    model.text_head.register_forward_hook(lambda _, arguments, out: rows.append(len(arguments[0])))
    found = gradients(model, {**given, "latents": given["latents"].to(dtype)})
    assert rows == [len(chosen)]
    error, name = largest_error(
        {key: None if g is None else g.double() for key, g in found.items()}, exact
    )
    assert error < bound, f"{name}: {error}"


def test_last_block_computes_only_rows_that_are_used():
    """Its results have as many rows as are read, recomputed or not, and through layers, too."""
    given = batch([16, 3, 9, 1])
    shapes: list[int] = []
    for more in ({}, {"gradient_checkpointing": True}):
        for hooked in (False, True):
            model = make(**more)
            if hooked:
                model.blocks[1].mlp_in.register_forward_hook(
                    lambda _, given, out: shapes.append(len(given[0]))
                )
            model.blocks[1].register_forward_hook(lambda _, given, out: shapes.append(len(out)))
            losses(model, given).backward()
    assert len(shapes) > 6 and set(shapes) == {len(given["text_positions"]) + 4 * 3}


@pytest.mark.parametrize("case", CASES)
def test_dropout_equals_that_of_the_layers_and_of_a_recomputed_block(case):
    """Fused, layer by layer, and recomputed: one loss, one gradient; with other keys, another."""
    given = {**batch(*CASES[case]), "dropout_keys": torch.arange(len(CASES[case][0])) * 7919 + 3}
    expected = gradients(make(dropout=0.25), given)
    layers = make(dropout=0.25)
    for block in layers.blocks:
        block.mlp_in.register_forward_hook(lambda *_: None)
    assert largest_error(gradients(layers, given), expected)[0] < RELATIVE
    for recomputed in (
        make(dropout=0.25, gradient_checkpointing=True),
        make(dropout=0.25, gradient_checkpointing=True),
    ):
        assert largest_error(gradients(recomputed, given), expected)[0] < RELATIVE
        recomputed.zero_grad()
        recomputed.blocks[0].to_out.register_forward_hook(lambda *_: None)
        assert largest_error(gradients(recomputed, given), expected)[0] < RELATIVE
    other = gradients(make(dropout=0.25), {**given, "dropout_keys": given["dropout_keys"] + 1})
    assert largest_error(other, expected)[0] > 1e-3
    plain = gradients(make(), batch(*CASES[case]))
    assert largest_error(gradients(make(dropout=0.25).eval(), given), plain)[0] == 0.0
    assert largest_error(gradients(make(dropout=0.0), given), plain)[0] == 0.0


def test_dropout_does_not_depend_on_padding_or_on_the_other_samples():
    """Each sample alone, without its padding, gives its part of the whole batch's predictions."""
    given = batch([16, 3, 9, 1])
    keys = torch.tensor([5, -7, 11, 2**62])
    model = make(dropout=0.25)
    whole = run_model(model, **given, dropout_keys=keys)
    assert not torch.equal(whole.latent, run_model(model.eval(), **given).latent)
    model.train()
    rows = given["text_positions"] // 16
    for sample, length in enumerate([16, 3, 9, 1]):
        own = {
            key: value[sample : sample + 1]
            for key, value in given.items()
            if not key.startswith("text_")
        }
        own["text_tokens"] = given["text_tokens"][sample : sample + 1, :length]
        own["attention_mask"] = own["attention_mask"][:, :length]
        own["text_timesteps"] = given["text_timesteps"][sample : sample + 1]
        positions = given["text_positions"][rows == sample] % 16
        out = run_model(
            model,
            **own,
            text_positions=positions,
            text_targets=given["text_targets"][rows == sample],
            text_weights=given["text_weights"][rows == sample],
            dropout_keys=keys[sample : sample + 1],
        )
        torch.testing.assert_close(
            out.latent, whole.latent[sample : sample + 1], rtol=0, atol=1e-6
        )
        torch.testing.assert_close(
            out.text.nll, whole.text.nll[rows == sample], rtol=1e-5, atol=1e-5
        )


def test_dropout_in_training_needs_its_keys():
    with pytest.raises(ValueError, match="dropout_keys"):
        run_model(make(dropout=0.1), **batch([4, 3]))


def test_a_second_backward_pass_is_refused():
    """By the head and by a block: both use memory again that the first pass has used."""
    for part in (lambda out: out.latent, lambda out: out.text.loss_sum):
        loss = part(run_model(make(), **batch([10, 10]))).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward once"):
            loss.backward()


def test_the_comparison_sees_a_small_mistake():
    given = batch([16, 3, 9, 1])
    fast, plain = make(), make()
    use_reference_blocks(plain)
    fast.blocks[1].qk_norm.weight.data[9] += 1e-6
    assert largest_error(gradients(fast, given), gradients(plain, given))[0] > RELATIVE


def test_one_batch_in_all_layouts():
    """Padding left out (loop), padding masked (all logits wanted), and given positions: one
    result.
    """
    given = batch([16, 3, 9, 1])
    model = make()
    packed = gradients(model, given)
    model.zero_grad()
    positions = given["attention_mask"].flatten().nonzero()[:, 0]
    assert (
        largest_error(
            gradients(copy.deepcopy(model), {**given, "token_positions": positions}), packed
        )[0]
        < RELATIVE
    )
    everywhere = {
        key: value
        for key, value in given.items()
        if not key.startswith(("text_positions", "text_targets"))
    }
    logits = run_model(model, **everywhere).text.logits.flatten(0, 1)[given["text_positions"]]
    some = run_model(
        model, **{key: value for key, value in given.items() if key != "text_targets"}
    ).text.logits
    torch.testing.assert_close(some, logits, rtol=1e-5, atol=1e-6)


def test_a_scored_position_of_padding_is_refused():
    given = batch([16, 3])
    given["text_positions"] = torch.tensor([0, 20])
    with pytest.raises(ValueError, match="padding"):
        run_model(make(), **given)
    given = {**batch([16, 3]), "attention_mask": None, "text_is_null": None}
    with pytest.raises(ValueError, match="attention_mask"):
        run_model(make(), **given, token_positions=torch.arange(20))


def test_a_bad_value_stays_in_its_sample():
    """NaN in one sample's latent: no other sample's prediction, padded or not, sees it."""
    for lengths in ([16, 16, 15], [16, 3, 9, 1], [10, 10]):
        given = batch(lengths)
        given["latents"][0] = float("nan")
        model = make()
        out = run_model(
            model, **{key: value for key, value in given.items() if key != "text_targets"}
        )
        rows = given["text_positions"] // max(lengths)
        others = torch.isfinite(out.text.logits[rows > 0][:, 4:]).all()
        assert others and torch.isfinite(out.latent[1:]).all() and out.latent[0].isnan().all(), (
            lengths
        )


@pytest.mark.parametrize("lengths", [[10, 10, 10], [16, 3, 9, 1]])
def test_bf16_stays_close(lengths):
    """Autocast over fp32 weights, and bf16 weights: every gradient points where the fp64
    one does.
    """
    given = batch(lengths)
    exact = gradients(make(), given)
    given["latents"] = given["latents"].float()
    model = make().float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = losses(model, given)
    loss.backward()
    low = make().bfloat16()
    losses(low, given).backward()
    for name, truth in exact.items():
        if name == "loss" or truth is None or truth.norm() == 0:
            continue
        for found in (dict(model.named_parameters())[name], dict(low.named_parameters())[name]):
            assert found.grad.dtype == found.dtype
            cosine = torch.nn.functional.cosine_similarity(
                found.grad.double().flatten(), truth.flatten(), dim=0
            )
            assert cosine > 0.97, (name, found.dtype, float(cosine))


def test_ragged_attention_is_taken_where_a_gpu_has_it(monkeypatch):
    """Elsewhere a padded batch goes over the rectangle: every even width of a head trains on every
    GPU.
    """
    gpu, low = torch.device("cuda", 0), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    has_varlen.cache_clear()
    found = [
        has_varlen(dtype, width, gpu)
        for dtype, width in [(low, 64), (low, 256), (low, 36), (low, 264)]
    ]
    assert found == [True, True, False, False]
    assert has_varlen(torch.float16, 64, gpu) and not has_varlen(torch.float32, 64, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    has_varlen.cache_clear()
    assert not has_varlen(torch.float16, 64, gpu)
    has_varlen.cache_clear()
