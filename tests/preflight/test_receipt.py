"""The receipt, the sizes, and the command on one machine without a node."""

from __future__ import annotations

import argparse
import json

import pytest

from mmldlm.config.load import load_config
from mmldlm.errors import UserError
from mmldlm.preflight import command, receipt, sizes
from mmldlm.preflight.plan_child import model_sizes


def run(tmp_path, *words, capsys=None):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    path = tmp_path / "receipt.json"
    code = command.main(parser.parse_intermixed_args(["--json", str(path), *words]))
    return code, json.loads(path.read_text()) if path.exists() else None


def test_a_machine_alone_passes_and_train_finds_its_receipt(store, tmp_path, monkeypatch, capsys):
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    words = [
        "--config-name",
        "tiny",
        f"data.latent_data_root={store}",
        f"logging.save_dir={tmp_path}",
        "engine.kind=single",
    ]
    # Leftovers of other tests and this machine's own limits are not what is tested.
    code, found = run(tmp_path, "--level", "0", *words)
    assert code == 0, capsys.readouterr().out
    assert found["world_size"] == 1 and found["failing_nodes"] == [] and found["config_sha256"]
    config = load_config("tiny", None, words[2:])
    receipt.write(found, config.run_dir() / receipt.NAME)
    assert receipt.stale(config, 1) == []
    resumed = load_config("tiny", None, [*words[2:], "training.resume=auto"])
    assert receipt.stale(resumed, 1) == []
    assert "2" in receipt.stale(config, 2)[0]
    filled = load_config("tiny", None, [*words[2:], "model.latent_dim=384", "model.vocab_size=30522"])
    assert receipt.stale(filled, 1) == []  # as train knows it once the data is open
    other = load_config("tiny", None, [*words[2:], "optimizer.lr=1e-5"])
    assert receipt.stale(other, 1) == ["the config has changed since"]


def test_a_bad_config_is_a_usage_error_with_a_verdict(tmp_path, capsys):
    code, found = run(
        tmp_path, "--level", "0", "--config-name", "tiny", "model.n_head=3", f"logging.save_dir={tmp_path}"
    )
    assert code == 2 and "model.n_heads" in capsys.readouterr().out
    assert [r["id"] for r in found["results"] if r["status"] == "FAIL"] == ["CFG001"]


def test_unknown_check_ids_are_refused(tmp_path):
    with pytest.raises(UserError):
        run(tmp_path, "--only", "NET999")
    with pytest.raises(UserError):
        run(tmp_path, "--explain", "NET999")


def test_explain_prints_what_a_check_looks_at(tmp_path, capsys):
    code, _ = run(tmp_path, "--explain", "net006")
    assert code == 0 and "ephemeral ports" in capsys.readouterr().out


def tiny(*words: str):
    ids = ["model.latent_dim=384", "model.vocab_size=1000", "model.mask_token_id=1", "model.pad_token_id=0"]
    return load_config("tiny", None, [*ids, "model.eos_token_id=2", *words])


def test_sizes_are_those_of_the_real_model():
    from mmldlm.models import MultimodalMMDiT

    config = tiny()
    found = model_sizes(config, 64)
    model = MultimodalMMDiT(config.model)
    assert found["trainable"] == sum(p.numel() for p in model.parameters()) and found["frozen"] == 0
    assert found["buffers"] == sum(b.numel() for b in model.buffers())


def test_activations_grow_with_the_batch_and_shrink_with_checkpointing():
    one, two = (model_sizes(tiny(f"training.train_batch_size={n}"), 64)["activations"] for n in (8, 16))
    assert 1.8 < two / one < 2.05
    assert model_sizes(tiny("model.gradient_checkpointing=true"), 64)["activations"] < one


def test_each_zero_stage_needs_less_and_more_ranks_help_where_they_shard():
    large = {"trainable": 10**9, "frozen": 0, "largest_block": 10**7, "activations": 0, "logits": {"cpu": 0, "cuda": 0}}
    need = [sizes.state_bytes(plan, large, 8, "bf16") for plan in sizes.PLANS]
    assert need[1:5] == sorted(need[1:5], reverse=True) and need[0] == 16 * 10**9
    assert sizes.state_bytes("zero3", large, 64, "bf16") < sizes.state_bytes("zero3", large, 8, "bf16")
    assert sizes.state_bytes("zero0", large, 64, "bf16") == sizes.state_bytes("zero0", large, 8, "bf16")
