import pytest
import torch

from mmldlm.config.schema import OptimizerConfig
from mmldlm.engines.optimizer import build_optimizer, clipped_step, learning_rate, parameter_groups
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.models import MultimodalMMDiT
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.tasks.translation.parameter_plan import no_decay_names


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 10])
def test_schedule_never_turns_up_again(schedule, warmup):
    config = OptimizerConfig(lr=1e-3, min_lr=1e-5, schedule=schedule, warmup_steps=warmup)
    rates = [learning_rate(step, 100, config) for step in range(300)]
    assert min(rates) > 0 and max(rates) == pytest.approx(1e-3)
    after = rates[max(warmup - 1, 0) :]
    assert all(b <= a for a, b in zip(after, after[1:], strict=False))
    assert all(b > a for a, b in zip(rates[:warmup], rates[1:warmup], strict=False))
    end = 1e-3 if schedule == "constant" else 1e-5
    assert rates[100:] == pytest.approx([end] * 200)


def test_weight_decay_only_where_it_belongs():
    model = MultimodalMMDiT(
        ModelConfig(
            hidden_size=16,
            n_blocks=1,
            n_heads=2,
            latent_dim=6,
            vocab_size=20,
            mask_token_id=3,
            pad_token_id=0,
            eos_token_id=2,
            tie_embeddings=True,
        )
    )
    model.latent_head.requires_grad_(False)
    decayed, plain = parameter_groups(
        model, ParameterPlan(no_decay=no_decay_names(model)), OptimizerConfig(weight_decay=0.1)
    )
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed_names, plain_names = (
        {names[id(p)] for p in group["params"]} for group in (decayed, plain)
    )
    assert (
        "blocks.0.to_qkv.weight" in decayed_names
        and "latent_encoder.to_tokens.weight" in decayed_names
    )
    for name in plain_names:
        assert (
            name.endswith("bias")
            or "norm" in name
            or "embedding" in name
            or "null" in name
            or "position" in name
        ), name
    assert not any("latent_head" in name for name in decayed_names | plain_names)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert (
        len(decayed["params"]) + len(plain["params"])
        == len(trainable)
        == len(set(map(id, trainable)))
    )
    assert all(isinstance(p, torch.nn.Parameter) for p in trainable)


@pytest.mark.parametrize("max_norm", [None, 0.1, 1e6])
@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_a_clipped_step_is_torchs_clipping_and_step(max_norm, loss_scale):
    torch.manual_seed(0)
    models = [torch.nn.Linear(5, 7, dtype=torch.float64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, theirs = (build_optimizer(model, ParameterPlan(), OptimizerConfig()) for model in models)
    for _ in range(3):
        gradients = [torch.randn_like(parameter) for parameter in models[0].parameters()]
        for model, scale in zip(models, (loss_scale, 1.0), strict=True):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient * scale
        norm = torch.nn.utils.get_total_norm(gradients).item()
        clipped_step(ours, max_norm, norm, loss_scale)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(models[1].parameters(), max_norm)
        theirs.step()
    for found, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        # The scale is an fp32 number.
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
