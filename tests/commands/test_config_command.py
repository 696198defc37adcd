"""`mmldlm config` says what a run of many GPUs would need, without one."""

import re

import pytest
import yaml

from mmldlm.cli import main

WHAT_THE_DATA_DECIDES = [
    "model.latent_dim=768",
    "model.vocab_size=30522",
    "model.pad_token_id=0",
    "model.eos_token_id=102",
    "model.mask_token_id=103",
]


def gib(capsys, *words: str) -> dict[str, float]:
    """Plan -> GiB of a rank, as printed."""
    assert main(["config", *words, *WHAT_THE_DATA_DECIDES]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["model"]["vocab_size"] == 30522  # still a config
    return {
        plan: float(number)
        for plan, number in re.findall(r"^#   (\w+) +([\d.]+) GiB", printed, re.MULTILINE)
    }


def test_a_rank_of_many_needs_less_where_the_engine_shards(capsys):
    few = gib(capsys, "--config-name", "mmdit_8b", "--world-size", "64")
    many = gib(capsys, "--config-name", "mmdit_8b", "--world-size", "1024")
    assert list(few) == ["zero0", "zero1", "zero2", "zero3", "fsdp"]
    assert few["zero0"] == many["zero0"]
    assert all(many[plan] < few[plan] for plan in list(few)[1:])
    assert few["zero1"] > few["zero2"] > few["zero3"] > few["fsdp"]
    assert few["zero2"] > 8.1e9 * 2 / 2**30  # whole bf16 weights


@pytest.mark.parametrize(
    ("more", "plan", "compare"),
    [
        ("model.gradient_checkpointing=false", "zero3", "more"),
        ("training.grad_accum_steps=4", "zero3", "as much"),
        ("deepspeed", "zero3", "less"),
    ],
)
def test_settings_of_the_run_count(more, plan, compare, capsys):
    words = ["--config-name", "mmdit_8b", "--world-size", "64", "engine.zero_stage=3"]
    offload = ["--deepspeed_config", "ds_configs/zero3_offload.json"]
    before = gib(capsys, *words)[plan]
    after = gib(capsys, *words, *(offload if more == "deepspeed" else [more]))[plan]
    assert {"more": after > before, "as much": after == before, "less": after < before}[compare]


def test_one_rank_is_shown_with_its_own_engine(capsys):
    assert list(gib(capsys, "--config-name", "small")) == ["zero2"]
