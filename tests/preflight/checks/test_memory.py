"""Memory against model sizes written by hand."""

from __future__ import annotations

import json

import pytest

from mmldlm.engines.deepspeed_config import GPU_BUCKET
from mmldlm.preflight import memory_model
from mmldlm.preflight.check import FAIL, PASS, SKIP, Result
from mmldlm.tasks.registry import build_config
from tests.support.preflight_context import GIB, gpu, gpus, make_context, run


@pytest.mark.parametrize(
    "text", ['{"zero_optimization": 3}', '{"zero_optimization": {"stage": 7}}', "{"]
)
def test_a_json_without_a_stage_is_reported_once(tmp_path, text):
    (tmp_path / "ds.json").write_text(text)
    context = make_context(gpus=gpus(gpu(memory_free=GIB)))
    context.data_facts = {"trainable": 10**9}
    context.config = build_config({"engine": {"deepspeed_config": str(tmp_path / "ds.json")}})
    found = {
        id: next(iter(run(id, context).values()))
        for id in ("CFG002", "MEM001", "MEM002", "DISK001")
    }
    assert found["CFG002"].status == FAIL
    assert all(
        found[id].status == SKIP and "CFG002" in found[id].why
        for id in ("MEM001", "MEM002", "DISK001")
    )


def test_memory_counts_the_buckets_of_the_json(tmp_path):
    """On a GPU that has room for our own buckets and not for those of DeepSpeed's default."""
    path = tmp_path / "ds.json"
    sizes = {
        "trainable": 10**9,
        "frozen": 0,
        "largest_block": 10**7,
        "activations": 0,
        "logits_gpu": 0,
    }
    free = memory_model.bytes_per_rank("zero2", sizes, 3, "bf16", True, GPU_BUCKET) * 1.3

    def verdict(zero: dict, kind: str = "deepspeed") -> Result:
        path.write_text(json.dumps({"zero_optimization": zero}))
        context = make_context(gpus=gpus(gpu(memory_free=free)))
        context.data_facts, engine = (
            sizes,
            {"kind": kind, "zero_stage": 2, "deepspeed_config": str(path)},
        )
        if kind != "deepspeed":
            engine = {"kind": kind}
        context.config = build_config({"engine": engine, "training": {"dtype": "bf16"}})
        (result,) = run("MEM001", context).values()
        return result

    assert verdict({"reduce_bucket_size": "auto"}).status == PASS
    found = verdict({"reduce_bucket_size": 10**9})
    assert found.status == FAIL and "use zero3" in found.fix  # advice is given for our own buckets
    assert (
        verdict({"reduce_bucket_size": GPU_BUCKET, "allgather_bucket_size": 10**9}).status == FAIL
    )
    assert "fsdp needs" in verdict({}, "fsdp").measured


def test_saved_checkpoints_need_no_more_space(tmp_path):
    """Of a resumed run, which has room for one more beside the three that it keeps."""
    sizes = {"trainable": 10**6, "frozen": 0, "largest_block": 10**5}

    def verdict(free: float) -> Result:
        context = make_context(checkpoints={"free": free, "folder": str(tmp_path)})
        context.data_facts = sizes
        context.config = build_config(
            {
                "logging": {"save_dir": str(tmp_path), "run_name": "r"},
                "checkpoints": {"keep_last": 3},
                "engine": {"kind": "ddp"},
                "training": {"dtype": "fp32"},
            }
        )
        (result,) = run("DISK001", context).values()
        return result

    each = memory_model.checkpoint_bytes("zero0", sizes, "fp32")
    assert verdict(3.5 * each).status == FAIL and verdict(4.5 * each).status == PASS
    for step in (1, 2, 3):
        (tmp_path / "r" / "checkpoints" / f"step_{step:08}").mkdir(parents=True)
    assert verdict(0.5 * each).status == FAIL
    found = verdict(1.5 * each)
    assert found.status == PASS and "beside the 3 saved" in found.measured


def test_offloaded_tensors_count_on_the_host(tmp_path):
    sizes = {
        "trainable": 10**10,
        "frozen": 0,
        "largest_block": 10**7,
        "activations": 0,
        "logits_gpu": 0,
    }
    path = tmp_path / "ds.json"

    def verdicts(memory: float, **zero) -> tuple[Result, Result]:
        path.write_text(json.dumps({"zero_optimization": {"stage": 3, **zero}}))
        context = make_context(gpus=gpus(gpu(memory_free=20 * GIB)), memory={"available": memory})
        context.data_facts = sizes
        context.config = build_config(
            {"engine": {"deepspeed_config": str(path)}, "training": {"dtype": "bf16"}}
        )
        return tuple(next(iter(run(id, context).values())) for id in ("MEM001", "MEM002"))

    on_gpu, on_host = verdicts(200 * GIB)
    assert on_gpu.status == FAIL and on_host.status == SKIP
    both = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    on_gpu, on_host = verdicts(200 * GIB, **both)
    assert on_gpu.status == PASS and "zero3 with offload" in on_gpu.measured
    assert on_host.status == PASS and "optimizer and param" in on_host.measured
    # 16 and 2 bytes of a third of the weights: 56 GiB.
    assert verdicts(40 * GIB, **both)[1].status == FAIL
    assert verdicts(40 * GIB, offload_optimizer={"device": "nvme"})[1].status == SKIP


def test_the_least_checkpointing_that_fits_is_named():
    """Where no other stage helps, because activations take the memory."""
    plain = {
        "trainable": 10**9,
        "frozen": 0,
        "largest_block": 10**7,
        "activations": 40 * GIB,
        "working": GIB,
        "logits_gpu": 0,
    }
    context = make_context(gpus=gpus(gpu(memory_free=30 * GIB)))
    context.config = build_config({"engine": {"zero_stage": 2}, "training": {"dtype": "bf16"}})
    context.data_facts = {
        **plain,
        "checkpointed": {
            "4": {"activations": 31 * GIB, "working": GIB},
            "2": {"activations": 15 * GIB, "working": GIB},
            "1": {"activations": 4 * GIB, "working": GIB},
        },
    }
    (found,) = run("MEM001", context).values()
    assert found.status == FAIL
    assert found.fix.startswith("set model.gradient_checkpointing=2 (zero2 then needs 2")
    context.config.engine.zero_stage = 1
    context.data_facts["activations"] = 20 * GIB  # which fits under another engine, too
    (found,) = run("MEM001", context).values()
    assert found.fix.startswith("use fsdp (")
    assert "or set model.gradient_checkpointing=1 (zero1 then needs" in found.fix


def test_gpus_that_do_not_tell_their_memory_are_not_the_host():
    sizes = {"trainable": 10**9, "frozen": 0, "largest_block": 10**7, "activations": 0}
    silent = {**gpu(), "memory_total": None, "memory_free": None}
    context = make_context(
        gpus={"a": gpus(silent), "b": gpus(gpu()), "c": gpus(gpu())}, memory={"available": GIB}
    )
    context.data_facts = {**sizes, "logits_gpu": 0}
    context.config = build_config({"training": {"dtype": "bf16"}})
    (found,) = run("MEM001", context).values()
    assert found.status == PASS and "a GPU of b" in found.measured
    context.facts["b"] = context.facts["c"] = context.facts["a"]
    (found,) = run("MEM001", context).values()
    assert found.status == SKIP
