"""PlainTransformer: the same numbers from every layout, cache and head; what a causal or
conditioned model may see.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmldlm.models import plain_layout as layout
from mmldlm.models.base import LatentInputs
from mmldlm.models.dropout import RowDropout
from mmldlm.models.plain import PlainTransformer, next_logits, start_text
from mmldlm.models.plain_config import PlainConfig
from tests.support.forward import run_model

CONDITIONINGS = ("none", "prefix", "adaln", "cross_attention")
KINDS = [
    (causal, kind, time)
    for causal in (True, False)
    for kind in CONDITIONINGS
    for time in {False, not causal}
]
LENGTHS, WIDTH, VOCAB, MASK = torch.tensor([9, 4, 6]), 9, 40, 1


def make_model(
    causal: bool, conditioning: str, reads_time: bool = False, noise: float = 0.1, **keys
):
    """A tiny fp64 model; with noise on all weights no gate is 0."""
    torch.manual_seed(0)
    config = PlainConfig(
        hidden_size=32,
        n_heads=2,
        n_blocks=2,
        max_seq_len=12,
        latent_dim=8,
        vocab_size=VOCAB,
        mask_token_id=MASK,
        pad_token_id=0,
        eos_token_id=2,
        causal=causal,
        conditioning=conditioning,
        reads_time=reads_time,
        **keys,
    )
    model = PlainTransformer(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


@pytest.fixture
def batch():
    """Tokens [3, 9], latents, timesteps and the mask of three lengths."""
    torch.manual_seed(1)
    tokens = torch.randint(3, VOCAB, (3, WIDTH))
    mask = torch.arange(WIDTH) < LENGTHS[:, None]
    return tokens, torch.randn(3, 8).double(), torch.rand(3).double(), mask


def call(model, batch, **keys):
    tokens, latents, times, mask = batch
    latents = None if model.config.conditioning == "none" else latents
    return run_model(model, tokens, latents, times, None, mask, **keys)


@pytest.mark.parametrize(("causal", "kind", "time"), KINDS)
def test_layouts_heads_and_caches_agree(causal, kind, time, batch, monkeypatch):
    """Packed (loop and rectangle), padded, one sample at a time, NLLs, chunks, and cached: the
    same distributions.
    """
    model = make_model(causal, kind, time)
    tokens, latents, times, mask = batch
    positions = mask.flatten().nonzero()[:, 0]
    logits = call(model, batch, text_positions=positions).text.logits
    monkeypatch.setattr(layout, "RECTANGLE_FILL", 0.0)
    others = [
        call(model, batch, text_positions=positions).text.logits,
        call(model, batch).text.logits.flatten(0, 1)[positions],
        torch.cat(
            [
                call(
                    model, (tokens[i : i + 1, :n], latents[i : i + 1], times[i : i + 1], None)
                ).text.logits[0]
                for i, n in enumerate(LENGTHS.tolist())
            ]
        ),
    ]
    if causal:
        full = call(model, (tokens, latents, times, None)).text.logits
        cache = start_text(model, None if kind == "none" else latents, batch=3)
        steps = [next_logits(model, cache)] + [
            next_logits(model, cache, tokens[:, i]) for i in range(WIDTH - 1)
        ]
        torch.testing.assert_close(torch.stack(steps, 1), full)
    else:
        inputs = None if kind == "none" else LatentInputs(latents)
        encoded = model.encode_latents(inputs, 3, caches=True)
        others.append(
            run_model(
                model, tokens, encoded, times, None, mask, text_positions=positions
            ).text.logits
        )
    for other in others:
        torch.testing.assert_close(other, logits)
    targets = tokens.flatten()[positions]
    expected = F.cross_entropy(logits, targets, reduction="none")
    scored = call(
        model,
        batch,
        text_positions=positions,
        text_targets=targets,
        text_weights=torch.ones(len(targets)).double(),
    )
    torch.testing.assert_close(scored.text.nll, expected)
    assert bool(torch.isneginf(logits[:, MASK]).all())


def nll_sum(model, batch, **keys):
    """Sum of the NLLs of all real tokens, half of them null latents, and of all length logits."""
    tokens, latents, times, mask = batch
    positions = mask.flatten().nonzero()[:, 0]
    targets = tokens.flatten()[positions]
    is_null = None if model.config.conditioning == "none" else torch.tensor([True, False, True])
    out = call(
        model,
        (tokens, latents, times, mask),
        text_positions=positions,
        latent_is_null=is_null,
        text_targets=targets,
        text_weights=torch.ones(len(targets)).double(),
        **keys,
    )
    return out.text.loss_sum + (0.0 if model.config.causal else out.length_logits.sum())


@pytest.mark.parametrize(("causal", "kind", "time"), KINDS)
def test_every_parameter_has_a_gradient_with_and_without_checkpointing(causal, kind, time, batch):
    """An engine waits for all gradients; checkpointing changes none of them."""
    grads = []
    for saves in (False, True):
        model = make_model(causal, kind, time, gradient_checkpointing=saves)
        nll_sum(model, batch).backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    missing = [name for name, grad in grads[0].items() if grad is None or not grad.any()]
    assert missing == []
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


@pytest.mark.parametrize(("causal", "kind", "time"), KINDS)
def test_dropout_depends_on_the_row_alone(causal, kind, time, batch):
    """Neither padding, other samples, their order, nor a recomputed block change it; other keys
    do.
    """
    model, keys = make_model(causal, kind, time, dropout=0.25), torch.tensor([5, -7, 2**62])
    whole = call(model, batch, dropout_keys=keys).text.logits
    alone = [
        run_model(
            model,
            batch[0][i : i + 1, :n],
            None if kind == "none" else batch[1][i : i + 1],
            batch[2][i : i + 1],
            dropout_keys=keys[i : i + 1],
        ).text.logits[0]
        for i, n in enumerate(LENGTHS.tolist())
    ]
    torch.testing.assert_close(torch.cat(alone), whole[batch[3]])
    order = torch.tensor([2, 0, 1])
    swapped = call(model, [part[order] for part in batch], dropout_keys=keys[order]).text.logits
    torch.testing.assert_close(swapped[batch[3][order]], whole[order][batch[3][order]])
    losses = []
    for other, saves in ((keys, False), (keys, True), (keys + 1, False)):
        model = make_model(causal, kind, time, dropout=0.25, gradient_checkpointing=saves)
        losses.append(nll_sum(model, batch, dropout_keys=other))
        losses[-1].backward()
        losses[-1] = [losses[-1].detach(), *(parameter.grad for parameter in model.parameters())]
    for found, expected in zip(losses[1], losses[0], strict=True):
        torch.testing.assert_close(found, expected)
    assert abs(float(losses[2][0] - losses[0][0])) > 1e-3
    with pytest.raises(ValueError, match="dropout_keys"):
        call(model, batch)
    plain = call(make_model(causal, kind, time), batch).text.logits
    assert torch.equal(call(model.eval(), batch).text.logits, plain)


@pytest.mark.parametrize("place", range(3))
def test_each_output_of_a_block_is_dropped(place, batch, monkeypatch):
    """Attention, MLP and cross-attention: without masks at this place, the loss is another one."""
    model, keys, drop = (
        make_model(False, "cross_attention", dropout=0.25),
        torch.tensor([1, 2, 3]),
        RowDropout.drop,
    )
    expected = call(model, batch, dropout_keys=keys).text.logits[batch[3]]
    monkeypatch.setattr(
        RowDropout, "drop", lambda self, x, at: x if at == place else drop(self, x, at)
    )
    found = call(model, batch, dropout_keys=keys).text.logits[batch[3]]
    assert float((found - expected)[..., 2:].detach().abs().max()) > 1e-3


@pytest.mark.parametrize("kind", CONDITIONINGS)
def test_a_causal_model_sees_what_came_before(kind, batch):
    model, (tokens, latents, times, _) = make_model(True, kind), batch
    at = 4
    changed = tokens.clone()
    changed[:, at:] = torch.randint(3, VOCAB, (3, WIDTH - at))
    first, second = (
        call(model, (t, latents, times, None)).text.logits.detach() for t in (tokens, changed)
    )
    torch.testing.assert_close(second[:, : at + 1], first[:, : at + 1], rtol=0, atol=1e-13)
    assert float((second[:, at + 1] - first[:, at + 1])[:, 2:].abs().min(0).values.max()) > 1e-3


@pytest.mark.parametrize(("causal", "kind", "time"), KINDS)
def test_padding_changes_nothing(causal, kind, time, batch):
    model, (tokens, latents, times, mask) = make_model(causal, kind, time), batch
    other = torch.where(mask, tokens, torch.randint(3, VOCAB, tokens.shape))
    first, second = (
        call(model, (t, latents, times, mask)).text.logits[mask] for t in (tokens, other)
    )
    torch.testing.assert_close(second, first, rtol=0, atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["prefix", "adaln", "cross_attention"])
def test_no_latent_is_the_null_latent_and_a_latent_matters(causal, kind, batch):
    model, (tokens, latents, times, mask) = make_model(causal, kind), batch
    null = run_model(
        model, tokens, latents, times, None, mask, latent_is_null=torch.ones(3, dtype=torch.bool)
    ).text.logits
    torch.testing.assert_close(run_model(model, tokens, None, times, None, mask).text.logits, null)
    given = call(model, batch).text.logits
    assert float((given - null)[..., 2:].detach().abs().mean()) > 1e-2


@pytest.mark.parametrize("kind", ["adaln", "cross_attention"])
def test_gates_start_at_zero_and_learn(kind, batch):
    """At the start the logits do not depend on the latent, but the gradient leads there."""
    model, (tokens, latents, times, mask) = make_model(False, kind, True, noise=0.0), batch
    given, other = (call(model, (tokens, z, times, mask)).text.logits for z in (latents, -latents))
    assert torch.equal(given, other)
    call(model, batch).text.logits[mask][:, 3:].square().sum().backward()
    gate = model.text_head.modulation.weight if kind == "adaln" else model.blocks[0].cross.gate
    # Under adaLN a block's own output is gated as well: what learns first is the head's
    # modulation.
    assert float(gate.grad.abs().max()) > 0


def test_cross_attention_to_one_token_is_a_bias(batch):
    """A softmax over one key is 1: with K = 1 every position receives the same vector
    (docs/baselines.md).
    """
    spreads = {}
    for chunks in (1, 3):
        model = make_model(False, "cross_attention", tokens_per_latent=chunks)
        encoded, cross = model.encode_latents(LatentInputs(batch[1])), model.blocks[0].cross
        rows = torch.randn(3 * WIDTH, 32).double()
        dense = layout.lay_out(None, None, (3, WIDTH), 0, 16, torch.float64, torch.device("cpu"))
        added = cross(rows, cross.keys_values(encoded.tokens), dense).view(3, WIDTH, 32)
        spreads[chunks] = float(added.detach().std(1).max())
    assert spreads[1] < 1e-12 and spreads[3] > 1e-3


def test_functions_of_chunks_of_logits(batch, monkeypatch):
    """Values and gradients as from all logits at once, however small the chunks."""
    batch = (*batch[:3], None)
    targets = batch[0].flatten()
    grads = []
    for rows_of_a_chunk in (1000, 4):
        monkeypatch.setattr(
            "mmldlm.models.token_scores.rows_of_a_chunk", lambda *_, rows=rows_of_a_chunk: rows
        )
        model = make_model(False, "adaln", True)
        out = call(
            model,
            batch,
            text_positions=torch.arange(27),
            text_function=lambda logits, which: F.cross_entropy(
                logits, targets[which], reduction="none"
            ),
        ).text.values
        out.sum().backward()
        grads.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.allclose(a, b) for a, b in zip(*grads, strict=True))
    model = make_model(False, "adaln", True)
    logits = call(model, batch, text_positions=torch.arange(27)).text.logits
    torch.testing.assert_close(
        grads[0][0], F.cross_entropy(logits, targets, reduction="none").detach()
    )


def test_compiled_blocks_give_the_same_with_one_graph_for_all_lengths():
    """Captured by dynamo and run by torch: what a compiler makes of the graph is the
    compiler's.
    """
    from torch._dynamo.utils import counters

    model, compiled = (make_model(False, "prefix", tokens_per_latent=2) for _ in range(2))
    compiled._blocks_are_compiled = True
    for block in compiled.blocks:
        block.compile(dynamic=True, backend="eager", fullgraph=True)
    counters.clear()
    for lengths in ([9, 4, 6, 9], [12, 7], [5, 11, 3, 6, 4]):
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        batch = (
            torch.randint(3, VOCAB, mask.shape),
            torch.randn(len(mask), 8).double(),
            None,
            mask,
        )
        at = mask.flatten().nonzero()[::2, 0]
        found, expected = (
            call(each, batch, text_positions=at).text.logits for each in (compiled, model)
        )
        torch.testing.assert_close(found, expected)
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]


def test_what_does_not_fit_is_refused(batch):
    tokens, latents, times, mask = batch
    with pytest.raises(ValueError, match="unconditional"):
        run_model(make_model(False, "none"), tokens, latents)
    model = make_model(True, "prefix")
    with pytest.raises(ValueError, match="max_seq_len is 12"):
        run_model(model, torch.zeros(1, 13, dtype=torch.int64), latents[:1])
    with pytest.raises(ValueError, match="latent_dim is 8"):
        run_model(model, tokens, latents[:, :5])
    with pytest.raises(ValueError, match="padding"):
        run_model(
            model, tokens, latents, None, None, mask, text_positions=torch.tensor([WIDTH + 5])
        )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"causal": True, "reads_time": True}, "reads_time"),
        ({"conditioning": "adaln", "tokens_per_latent": 4}, "tokens_per_latent=4 is read only"),
        ({"conditioning": "adaln", "reads_pooled": True}, "reads_pooled=True is read only"),
        ({"causal": True, "cond_dim": 32}, "cond_dim=32 is read only"),
        ({"tie_embeddings": True, "extra_input_tokens": 3}, "extra_input_tokens"),
        ({"n_heads": 5}, "does not divide"),
    ],
)
def test_keys_that_nothing_reads_are_errors(keys, message):
    with pytest.raises(ValueError, match=message):
        PlainConfig(**keys)
