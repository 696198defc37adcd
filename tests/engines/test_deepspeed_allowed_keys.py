"""The list of keys that a DeepSpeed JSON may hold, against the installed DeepSpeed and by
example.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mmldlm.engines import deepspeed_allowed_keys as allowed_keys
from mmldlm.engines.deepspeed_config import merged_config, resolve_stage
from mmldlm.errors import UserError
from mmldlm.tasks.registry import load_config


class Asked(dict):
    """Remembers every key that is looked for, also by copies of it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.keys_asked = set()

    def get(self, key, default=None):
        self.keys_asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.keys_asked.add(key)
        return super().__contains__(key)

    def keys(self):
        return self  # for `key in values.keys()`


def test_the_list_is_that_of_the_installed_deepspeed():
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import config, precision_config
    from deepspeed.runtime.zero import offload_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    values = Asked(
        train_batch_size=1, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1
    )
    config.DeepSpeedConfig(values)
    # deepspeed.initialize and DeepSpeedConfig read these where the ranks are more than
    # data-parallel.
    asked = values.keys_asked | {"sequence_parallel_size", "data_parallel_size"}
    assert asked | set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) == set(allowed_keys.TOP)

    def names(model):
        return {
            name for key, field in model.model_fields.items() for name in (key, field.alias or key)
        }

    removed = set(config._REMOVED_ZERO_CONFIG_KEYS)
    assert names(DeepSpeedZeroConfig) | removed == set(allowed_keys.ZERO)
    assert names(offload_config.DeepSpeedZeroOffloadParamConfig) == set(allowed_keys.OFFLOAD_PARAM)
    assert names(offload_config.DeepSpeedZeroOffloadOptimizerConfig) == set(
        allowed_keys.OFFLOAD_OPTIMIZER
    )
    assert names(precision_config.DeepSpeedBF16Config) == set(allowed_keys.BF16)
    assert names(precision_config.DeepSpeedFP16Config) == set(allowed_keys.FP16)
    types = (
        config.GRAD_ACCUM_DTYPE,
        config.PARAM_DTYPE,
        config.BUFFER_DTYPE,
        config.KEEP_IN_FP32_MODULES,
    )
    assert set(types) == set(allowed_keys.DATA_TYPES)
    # The value that changes nothing is DeepSpeed's own default, except where it is its default
    # that we change.
    for section, model in (
        ("ZERO", DeepSpeedZeroConfig),
        ("BF16", precision_config.DeepSpeedBF16Config),
    ):
        for key, rule in getattr(allowed_keys, section).items():
            if isinstance(rule, allowed_keys.AllowedValue) and key in model.model_fields:
                assert model.model_fields[key].default == rule.value, key


def test_it_needs_neither_deepspeed_nor_torch():
    code = (
        "import sys, mmldlm.engines.deepspeed_config; assert not {'torch', 'deepspeed'} &"
        " set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def merge(tmp_path, values, dtype="fp32", *words):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(values))
    config = load_config(
        "tiny", None, [f"engine.deepspeed_config={path}", f"training.dtype={dtype}", *words]
    )
    resolve_stage(config)
    return merged_config(config, 2)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"zero_optimisation": {"stage": 3}}, "did you mean zero_optimization"),
        ({"gradient_accumulation_step": 8}, "did you mean gradient_accumulation_steps"),
        (
            {"zero_optimization": {"reduce_bukket_size": 5}},
            "did you mean reduce_bucket_size",
        ),
        ({"quite_another_thing": 1}, "delete it"),
        ({"zero_optimization": 3}, "an object"),
        ({"zero_optimization": {"stage": 7}}, "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "3"}}, "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, "0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "overlap_comm": "yes"}}, "true or false"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}, "an integer"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": None}}, "an integer"),
        ({"zero_optimization": {"stage": 3, "sub_group_size": None}}, "an integer"),
        ({"bf16": True}, "an object"),
        ({"data_types": "fp32"}, "an object"),
        ({"bfloat16": {"enabled": False}}, "rename it"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "set training.dtype"),
        ({"communication_data_type": "bf16"}, "fp32 on every engine"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "fp32 on every engine"),
        ({"gradient_allreduce_op": "sum"}, "changes results"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "changes results"),
        ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}}, "gradient norm"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "never tested"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "offload_optimizer"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, 'write "cpu"'),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"devise": "cpu"}}},
            "did you mean device",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu", "super_offload": True},
                }
            },
            "never",
        ),
        ({"zero_optimization": {"stage": 2, "zenflow": {}}}, "changes results"),
        ({"activation_checkpointing": {"partition_activations": True}}, "no effect"),
        ({"compression_training": {}}, "removed"),
        ({"elasticity": {"enabled": True}}, "--nnodes"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor parallelism"),
    ],
)
def test_what_would_be_ignored_or_do_harm_is_refused(tmp_path, values, says):
    with pytest.raises(UserError) as caught:
        merge(tmp_path, values)
    assert says in str(caught.value) and "ds.json" in caught.value.found


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    "section",
    [
        {"initial_scale_power": 8},
        {"loss_scale_window": 100},
        {"hysteresis": 2},
        {"min_loss_scale": 4},
        {"loss_scale": 0},
    ],
)
def test_deepspeeds_loss_scaling_is_not_silently_ours(tmp_path, section, stage):
    values = {"fp16": section, "zero_optimization": {"stage": stage}}
    with pytest.raises(UserError, match="stability.loss_scale"):
        merge(tmp_path, values, "fp16")
    assert merge(tmp_path, values, "bf16")["fp16"]["enabled"] is False  # no scaling is asked for


def test_what_changes_nothing_may_stay(tmp_path):
    values = {
        "fp16": {
            "enabled": "auto",
            "initial_scale_power": 10,
            "loss_scale_window": 50,
            "hysteresis": 1,
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": None,
            "stage3_prefetch_bucket_size": 5e7,
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "round_robin_gradients": True,
        },
        "torch_autocast": {"enabled": False, "dtype": "float16"},
        "prescale_gradients": False,
        "flops_profiler": {"enabled": False},
        "comms_logger": {"enabled": True},
        "wall_clock_breakdown": True,
        "tensorboard": {},
        "csv_monitor": {},
        "wandb": {},
        "aio": {},
        "steps_per_print": 10**9,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
    }
    merged = merge(
        tmp_path, values, "fp16", "stability.loss_scale=1024", "stability.loss_scale_window=50"
    )
    assert merged["fp16"]["loss_scale"] == 1.0 and merged["zero_optimization"]["stage"] == 3
    assert merged["wall_clock_breakdown"] is True
