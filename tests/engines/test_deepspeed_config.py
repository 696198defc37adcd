import json
from pathlib import Path

import pytest

from mmldlm.engines.deepspeed_config import (
    CPU_BUCKET,
    GPU_BUCKET,
    check_fp16,
    merged_config,
    resolve_stage,
)
from mmldlm.errors import UserError
from mmldlm.tasks.registry import load_config
from tests.trials.test_config_values import JSON_FILES

DS_CONFIGS = sorted((Path(__file__).resolve().parents[2] / "ds_configs").glob("*.json"))


def config(tmp_path, values, *words):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(values))
    return load_config(
        "tiny", None, [f"engine.deepspeed_config={path}", "training.train_batch_size=8", *words]
    )


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_shipped_files_merge(path):
    merged = merged_config(
        load_config("tiny", None, [f"engine.deepspeed_config={path}", "training.dtype=bf16"]), 2
    )
    assert "auto" not in json.dumps(merged)
    assert merged["train_batch_size"] == 16 and merged["bf16"]["enabled"] is True
    assert (
        merged["communication_data_type"] == "fp32"
        and merged["data_types"]["grad_accum_dtype"] == "fp32"
    )


def test_ours_fill_auto_and_agree_with_repetition(tmp_path):
    values = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3},
    }
    merged = merged_config(config(tmp_path, values), 4)
    assert (
        merged["train_batch_size"],
        merged["gradient_clipping"],
        merged["zero_optimization"]["stage"],
    ) == (
        32,
        1.0,
        3,
    )
    assert resolve_stage(load_config("tiny")) == 2


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("bucket", [CPU_BUCKET, GPU_BUCKET])
def test_communication_is_set_alike_with_and_without_a_shipped_file(stage, bucket):
    path = DS_CONFIGS[0].parent / f"zero{stage}.json"
    bare, shipped = (
        merged_config(load_config("tiny", None, [f"engine.{setting}"]), 2, bucket)[
            "zero_optimization"
        ]
        for setting in (f"zero_stage={stage}", f"deepspeed_config={path}")
    )
    assert bare["overlap_comm"] is bare["contiguous_gradients"] is True
    assert [value for key, value in shipped.items() if "bucket" in key] == [bucket] * 2
    assert (
        bare == {key: shipped[key] for key in bare} and sum("bucket" in key for key in bare) == 2
    )


def test_what_the_file_says_about_communication_holds(tmp_path):
    zero = {
        "stage": 2,
        "reduce_bucket_size": 7_000,
        "overlap_comm": False,
        "contiguous_gradients": "auto",
    }
    found = merged_config(config(tmp_path, {"zero_optimization": zero}), 2)["zero_optimization"]
    assert (found["reduce_bucket_size"], found["overlap_comm"], found["contiguous_gradients"]) == (
        7_000,
        False,
        True,
    )


def test_zero_0_is_left_alone():
    assert merged_config(load_config("tiny", None, ["engine.zero_stage=0"]), 2)[
        "zero_optimization"
    ] == {"stage": 0}


@pytest.mark.parametrize(
    ("values", "ours", "theirs"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4},
            "training.train_batch_size=8",
            "train_micro_batch_size_per_gpu=4",
        ),
        ({"train_batch_size": 50}, "world size=16", "train_batch_size=50"),
        ({"gradient_clipping": 0.5}, "optimizer.grad_clip_norm=1.0", "gradient_clipping=0.5"),
        (
            {"bf16": {"enabled": True}},
            "training.dtype and ZeRO stage > 0=False",
            "bf16.enabled=True",
        ),
        ({"fp16": {"enabled": True}}, "training.dtype", "fp16.enabled=True"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer", "section 'optimizer'"),
        ({"scheduler": {"type": "WarmupLR"}}, "optimizer.schedule", "section 'scheduler'"),
    ],
)
def test_disagreement_names_both_places(tmp_path, values, ours, theirs):
    with pytest.raises(UserError) as caught:
        merged_config(config(tmp_path, values), 2)
    assert ours in str(caught.value) and theirs in str(caught.value)


def test_stage_in_two_places(tmp_path):
    with pytest.raises(UserError, match="zero_optimization.stage=3"):
        resolve_stage(config(tmp_path, {"zero_optimization": {"stage": 3}}, "engine.zero_stage=1"))


def test_bf16_reduction_is_refused(tmp_path):
    with pytest.raises(UserError, match="fp32"):
        merged_config(
            config(tmp_path, {"communication_data_type": "bf16"}, "training.dtype=bf16"), 2
        )


def test_unreadable_json(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    for name, says in (("bad.json", "damaged file: Expecting"), ("none.json", "No such file")):
        with pytest.raises(UserError, match=says):
            resolve_stage(
                load_config("tiny", None, [f"engine.deepspeed_config={tmp_path / name}"])
            )


@pytest.mark.parametrize("kind", JSON_FILES)
def test_a_json_that_cannot_be_used_is_refused(kind, tmp_path):
    """trials-3 BAD 20, public-reports B 22 ds-json-bom."""
    content, says = JSON_FILES[kind]
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says) as caught:
        merged_config(load_config("tiny", None, [f"engine.deepspeed_config={path}"]), 2)
    assert str(path) in str(caught.value)


def test_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "ds.json").write_bytes(b'\xef\xbb\xbf{"zero_optimization": {"stage": 1}}\r\n')
    assert (
        resolve_stage(
            load_config("tiny", None, [f"engine.deepspeed_config={tmp_path / 'ds.json'}"])
        )
        == 1
    )


def test_fp16_is_refused_where_deepspeed_has_none():
    """public-reports C 13 fp16-cpu."""
    run = load_config("tiny", None, ["training.dtype=fp16"])
    check_fp16(run, True)
    check_fp16(load_config("tiny", None, ["training.dtype=fp16", "engine.kind=ddp"]), False)
    check_fp16(load_config("tiny", None, ["training.dtype=fp16", "engine.zero_stage=0"]), False)
    with pytest.raises(UserError, match=r"training.dtype=fp16(.|\n)*engine.kind=ddp"):
        check_fp16(run, False)
