import json

import pytest
import torch

from mmldlm.errors import UserError
from mmldlm.models import MultimodalMMDiT
from mmldlm.models.base import LatentInputs
from mmldlm.models.packing import PackingShape, pack
from tests.support.forward import run_model
from tests.support.helpers import LONG

pytestmark = pytest.mark.long

BASE = dict(
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


def make(seed=0, awake=True, model_class=MultimodalMMDiT, **more) -> MultimodalMMDiT:
    """A small model; `awake` gives the zero-initialized gates values, so that every path shows in
    the output.
    """
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**{**BASE, **more}))
    if awake:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if not parameter.any():
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def inputs(batch=4, length=10, seed=1):
    torch.manual_seed(seed)
    return (
        torch.randint(4, 40, (batch, length)),
        torch.randn(batch, 12),
        torch.rand(batch),
        torch.rand(batch),
    )


def test_shapes_of_all_inputs():
    model = make(num_latents=2)
    tokens, latents, text_t, latent_t = inputs()
    out = run_model(model, tokens, latents, text_t, latent_t)
    assert out.text.logits.shape == (4, 10, 40) and out.latent.shape == (4, 12)
    assert out.length_logits.shape == (4, 16)
    assert torch.isneginf(out.text.logits[..., 3]).all()
    assert run_model(
        model, tokens, latents[:, None].expand(4, 2, 12), text_t, latent_t
    ).latent.shape == (4, 2, 12)
    assert run_model(model, None, latents).text is None
    assert run_model(model, tokens, None).latent.shape == (4, 12)
    one = make(tokens_per_latent=1)
    assert run_model(one, tokens, latents).latent.shape == (4, 12)


def test_text_only_is_the_null_latent_and_latent_only_the_null_text():
    model = make()
    tokens, latents, text_t, latent_t = inputs()
    everyone = torch.ones(4, dtype=torch.bool)
    a = run_model(model, tokens, None, text_t)
    b = run_model(model, tokens, latents, text_t, latent_is_null=everyone)
    torch.testing.assert_close(a.text.logits, b.text.logits)
    c = run_model(model, None, latents, None, latent_t)
    d = run_model(model, tokens, latents, None, latent_t, text_is_null=everyone)
    torch.testing.assert_close(c.latent, d.latent, rtol=1e-4, atol=1e-5)
    # Null rows do not touch their neighbours.
    half = torch.tensor([True, False, True, False])
    e = run_model(model, tokens, latents, text_t, latent_is_null=half).text.logits
    torch.testing.assert_close(e[half], b.text.logits[half])
    torch.testing.assert_close(
        e[~half], run_model(model, tokens, latents, text_t).text.logits[~half]
    )


def test_padding_never_reaches_a_real_token():
    model = make()
    tokens, latents, text_t, latent_t = inputs(length=12)
    real = torch.arange(12) < torch.tensor([12, 7, 3, 9])[:, None]
    a = run_model(model, tokens, latents, text_t, latent_t, real)
    other = torch.where(real, tokens, torch.randint(4, 40, tokens.shape))
    b = run_model(model, other, latents, text_t, latent_t, real)
    assert torch.equal(a.text.logits[real], b.text.logits[real])
    assert torch.equal(a.latent, b.latent)
    short = run_model(model, tokens[2:3, :3], latents[2:3], text_t[2:3], latent_t[2:3])
    torch.testing.assert_close(short.text.logits[0], a.text.logits[2, :3], rtol=1e-4, atol=1e-4)


def test_logits_only_where_they_are_read():
    model = make()
    tokens, latents, text_t, latent_t = inputs()
    full = run_model(model, tokens, latents, text_t, latent_t).text.logits.flatten(0, 1)
    positions = torch.tensor([0, 11, 37, 5])
    some = run_model(
        model, tokens, latents, text_t, latent_t, text_positions=positions
    ).text.logits
    torch.testing.assert_close(some, full[positions])
    targets = tokens.flatten()[positions]
    out = run_model(
        model,
        tokens,
        latents,
        text_t,
        latent_t,
        text_positions=positions,
        text_targets=targets,
        text_weights=torch.ones(4),
    )
    nll = -full[positions].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(out.text.nll, nll)
    assert out.text.logits is None


@pytest.mark.parametrize("more", [{}, {"scale_noisy_latents": True}], ids=str)
def test_latents_encoded_before_give_the_same_text_and_nothing_else(more):
    model, (tokens, latents, text_t, latent_t) = make(**more), inputs()
    real = torch.arange(10) < torch.tensor([10, 7, 3, 9])[:, None]
    given = {"text_positions": torch.tensor([0, 4, 12, 31, 36])}
    encoded = model.encode_latents(LatentInputs(latents, latent_t))
    expected = run_model(model, tokens, latents, text_t, latent_t, real, **given)
    found = run_model(model, tokens, encoded, text_t, None, real, **given)
    assert found.latent is None and found.length_logits is None
    torch.testing.assert_close(found.text.logits, expected.text.logits, rtol=1e-4, atol=1e-5)
    null = run_model(
        model,
        tokens,
        model.encode_latents(None, batch=4),
        text_t,
        None,
        real,
        **given,
    )
    without = run_model(model, tokens, None, text_t, None, real, **given)
    torch.testing.assert_close(null.text.logits, without.text.logits, rtol=1e-4, atol=1e-5)
    order = torch.tensor([3, 1])
    torch.testing.assert_close(encoded.select(order).tokens, encoded.tokens[order])
    with pytest.raises(ValueError, match="side_inputs"):
        run_model(model, tokens, latents, text_t, latent_t, side_inputs=tokens)


def test_qk_rmsnorm_switch_changes_parameters_and_output():
    with_norm, without = make(), make(qk_rmsnorm=False)
    names = {name for name, _ in with_norm.named_parameters()} - {
        name for name, _ in without.named_parameters()
    }
    assert names and all("qk_norm" in name for name in names)
    without.load_state_dict(
        {k: v for k, v in with_norm.state_dict().items() if k in without.state_dict()}
    )
    tokens, latents, text_t, latent_t = inputs()
    a, b = (
        run_model(m, tokens, latents, text_t, latent_t).text.logits[..., 4:]
        for m in (with_norm, without)
    )
    assert (a - b).abs().max() > 1e-3
    # and it bounds the attention logits: scaling all queries and keys changes nothing
    scaled = make()
    for block in scaled.blocks:
        for weight in block.to_qkv.weight.data.chunk(2):
            weight[:64] *= 1000
    torch.testing.assert_close(
        run_model(scaled, tokens, latents, text_t, latent_t).text.logits[..., 4:],
        a,
        rtol=1e-2,
        atol=1e-2,
    )


@pytest.mark.parametrize(
    "key", ["n_heads", "tokens_per_latent", "n_blocks", "mlp_ratio", "cond_dim", "tie_embeddings"]
)
def test_every_shape_key_does_something(key):
    """MM-LDLM's n_heads, qk_rmsnorm and dropout were read by nobody."""
    other = {
        "n_heads": 2,
        "tokens_per_latent": 2,
        "n_blocks": 3,
        "mlp_ratio": 2.0,
        "cond_dim": 16,
        "tie_embeddings": True,
    }
    tokens, latents, text_t, latent_t = inputs()
    a, b = make(), make(**{key: other[key]})
    outputs = [
        run_model(m, tokens, latents, text_t, latent_t).text.logits[..., 4:] for m in (a, b)
    ]
    assert not torch.allclose(*outputs)


def test_timesteps_and_latent_condition_the_text():
    model = make()
    tokens, latents, text_t, latent_t = inputs()
    base = run_model(model, tokens, latents, text_t, latent_t).text.logits[..., 4:]
    for changed in (
        run_model(model, tokens, latents, text_t * 0.5, latent_t),
        run_model(model, tokens, latents, text_t, latent_t * 0.5),
        run_model(model, tokens, latents + 1, text_t, latent_t),
    ):
        assert (changed.text.logits[..., 4:] - base).abs().max() > 1e-3


def test_close_timesteps_are_told_apart():
    """Unscaled, t = 0 and t = 0.01 were 0.027 apart."""
    sinusoids = make().text_timestep.sinusoids(torch.tensor([0.0, 0.01]))
    assert (sinusoids[0] - sinusoids[1]).norm() > 1.0


def test_blocks_start_as_the_identity():
    model = make(awake=False)
    layout = pack(None, None, PackingShape(4, 10, 3, 8, torch.float32, torch.device("cpu")))
    rows = torch.randn(4 * 13, 32)
    assert torch.equal(model.blocks[0](rows, torch.randn(4, 24), layout), rows)


def test_length_logits_use_only_clean_latents():
    model = make()
    tokens, latents, text_t, _ = inputs()
    clean = run_model(model, tokens, latents, text_t, torch.zeros(4)).length_logits
    noisy = run_model(model, tokens, latents, text_t, torch.full((4,), 0.5)).length_logits
    nothing = run_model(model, tokens, None, text_t).length_logits
    assert not torch.allclose(clean, noisy)
    torch.testing.assert_close(noisy, nothing)


def loss_of(model):
    tokens, latents, text_t, latent_t = inputs()
    positions = torch.arange(0, 40, 3)
    out = run_model(
        model,
        tokens,
        latents,
        text_t,
        latent_t,
        text_positions=positions,
        text_targets=tokens.flatten()[positions],
        text_weights=torch.ones(len(positions)),
    )
    return out.text.loss_sum + out.latent.square().sum() + out.length_logits.logsumexp(-1).sum()


def test_gradient_checkpointing_changes_no_gradient():
    grads = []
    for switch in (False, True, 2):
        model = make(gradient_checkpointing=switch).train()
        loss_of(model).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name in grads[0]:
        for found in grads[1:]:
            assert (grads[0][name] is None) == (found[name] is None)
            if grads[0][name] is not None:
                torch.testing.assert_close(found[name], grads[0][name])


def test_gradients_reach_every_parameter():
    model = make().train()
    everyone = torch.tensor([True, False, False, False])
    tokens, latents, text_t, latent_t = inputs()
    # Of a null text only its first.
    positions = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(10, 40)])
    out = run_model(
        model,
        tokens,
        latents,
        text_t,
        torch.tensor([0.5, 0.5, 0.0, 0.0]),
        text_is_null=everyone,
        latent_is_null=everyone.flip(0),
        text_positions=positions,
        text_targets=tokens.flatten()[positions],
        text_weights=torch.ones(31),
    )
    (
        out.text.loss_sum + out.latent.square().sum() + out.length_logits.logsumexp(-1).sum()
    ).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


@pytest.mark.parametrize("tie", [False, True])
def test_save_and_load_again(tmp_path, tie):
    model = make(tie_embeddings=tie)
    model.set_latent_statistics(torch.randn(12), torch.rand(12) + 0.5)
    model.save_pretrained(tmp_path)
    loaded = MultimodalMMDiT.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    x = torch.randn(3, 12)
    torch.testing.assert_close(loaded.unscale_latents(loaded.scale_latents(x)), x)
    half = MultimodalMMDiT.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert (
        half.latent_mean.dtype == torch.float32
        and half.blocks[0].to_out.weight.dtype == torch.bfloat16
    )


def test_load_refuses_tensors_of_another_model(tmp_path):
    make().save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"hidden_size": 32', '"hidden_size": 48'))
    with pytest.raises(UserError, match="text_encoder"):
        MultimodalMMDiT.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="config.json"):
        MultimodalMMDiT.from_pretrained(tmp_path.parent)


def test_bad_shapes_are_named():
    model = make()
    tokens, latents, _, _ = inputs(length=10)
    with pytest.raises(ValueError, match="max_seq_len"):
        run_model(model, torch.cat([tokens, tokens], 1), latents)
    with pytest.raises(ValueError, match="latent_dim"):
        run_model(model, tokens, latents[:, :5])
    with pytest.raises(TypeError, match="TextInputs"):
        model(tokens, latents)
    with pytest.raises(ValueError, match="mask_token_id"):
        make(mask_token_id=40)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=LONG)])
def test_compiled_blocks_give_the_same_with_one_graph_for_all_lengths(monkeypatch, backend):
    """Forward and backward graphs as torch captures them; a minute of C++ for what the compiler
    makes of them only when it is asked for.
    """
    import shutil

    from torch._dynamo.utils import counters

    if backend == "inductor" and shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("torch.compile on CPU needs a C++ compiler")
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda module, **options: compile_module(module, backend=backend, **options),
    )
    model, compiled = make().train(), make().train()
    compiled.compile_blocks()
    counters.clear()
    for lengths in (
        [10, 10, 8, 10],
        [12, 7, 11],
        [9, 9, 9, 3, 6],
    ):
        # Several blocks, batches and lengths.
        real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        tokens, latents, text_t, latent_t = inputs(len(lengths), max(lengths))
        positions = real.flatten().nonzero()[::2, 0]
        for m in (model, compiled):
            m.zero_grad()
            out = run_model(m,
                tokens, latents, text_t, latent_t, real, text_positions=positions,
                text_targets=tokens.flatten()[positions], text_weights=torch.ones(len(positions)),
            )  # fmt: skip
            (out.text.loss_sum + out.latent.square().sum()).backward()
        for (name, p), q in zip(model.named_parameters(), compiled.parameters()):
            if p.grad is not None:
                largest = float(p.grad.abs().max())
                torch.testing.assert_close(
                    q.grad,
                    p.grad,
                    rtol=1e-3,
                    atol=1e-6 * largest,
                    msg=lambda m, name=name: f"{name}: {m}",
                )
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]


def test_from_pretrained_reads_shards_and_names_a_missing_one(tmp_path):
    from safetensors.torch import save_file

    model = make()
    model.save_pretrained(tmp_path)
    tensors = dict(model.state_dict())
    names = sorted(tensors)
    halves = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, part in halves.items():
        save_file({name: tensors[name].contiguous() for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model.safetensors").unlink()
    loaded = MultimodalMMDiT.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in loaded.state_dict().items())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="00002-of-00002"):
        MultimodalMMDiT.from_pretrained(tmp_path)
