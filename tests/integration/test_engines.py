"""Real runs on several gloo ranks: every engine gives the losses of one process, also of broken
and uneven batches.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.engine_worker import (
    BAD_STEP,
    DS_CONFIGS,
    ENGINES,
    RESUMED_BY,
    UNEVEN,
    engines_of,
)
from tests.support.helpers import ROOT, read_log, run_ranks, train_words
from tests.support.hypotheses import make_hypotheses
from tests.support.image_store import make_image_store

pytestmark = pytest.mark.long

WORKER = str(ROOT / "tests" / "support" / "engine_worker.py")


def test_a_nan_on_one_rank_skips_the_step_on_all(store, tmp_path):
    """In bf16 the losses and gradients beside it are those of one process, too."""
    from mmldlm.checkpoints.convert import convert

    for world in (1, 2):
        done = run_ranks(world, WORKER, "nonfinite", str(store), str(tmp_path), timeout=400)
        assert done.returncode == 0, done.stdout[-4000:]
    alone = read_log(tmp_path, "bf16_single")
    for engine in ("single", *ENGINES):
        name = f"bf16_{engine}"
        records = read_log(tmp_path, name)
        assert [r["skipped"] for r in records] == [False, False, True, True, False, False], name
        assert records[2]["loss"] is None and records[2]["loss_nonfinite"] == "nan"
        assert all(r["loss"] is not None for r in records[3:]), name
        assert records[3]["grad_norm"] is None, name
        # The schedule's clock stands still on a skip.
        assert records[4]["lr"] == records[3]["lr"] == records[2]["lr"] != records[5]["lr"]
        skips = [e for e in read_log(tmp_path, name, "events.jsonl") if e["event"] == "skip"]
        assert [e["step"] for e in skips] == [3, 4] and "gradient norm" in skips[1]["reason"]
        for step in (1, 2, 5, 6):
            for key, error in (("loss", 5e-4), ("grad_norm", 1e-2)):
                expected = pytest.approx(alone[step - 1][key], rel=error)
                assert records[step - 1][key] == expected, (name, step, key)
        # Refuses non-finite weights.
        convert(tmp_path / name / "latest", tmp_path / f"{name}_out")


def test_every_file_of_ds_configs_is_trained():
    """With offload: benchmarks/parity.py, in its short form, too."""
    files = {path.stem for path in (ROOT / "ds_configs").glob("*.json")}
    assert files == {*DS_CONFIGS, "zero3_offload"}


def test_muon_on_every_engine(store, tmp_path):
    """The losses of one process, a skipped step that changes no state, and a resume on another
    engine.
    """
    for world in (1, 2):
        done = run_ranks(world, WORKER, "muon", str(store), str(tmp_path), timeout=500)
        assert done.returncode == 0, done.stdout[-4000:]
    expected = [record["loss"] for record in read_log(tmp_path, "muon_single")]
    assert len(expected) == 6 and expected[BAD_STEP - 1] is None
    for engine, other in RESUMED_BY.items():
        records = read_log(tmp_path, f"muon_{engine}")
        assert [record["skipped"] for record in records] == [
            step == BAD_STEP for step in range(1, 7)
        ], engine
        continued = read_log(tmp_path, f"muon_{engine}_to_{other}")
        applied = [record for record in [*records, *continued] if not record["skipped"]]
        assert [record["loss"] for record in applied] == pytest.approx(
            [expected[record["step"] - 1] for record in applied], rel=2e-5
        ), (engine, other)
        assert [record["step"] for record in continued] == [5, 6], (engine, other)


def test_uneven_batches_and_frozen_groups_on_every_engine(store, tmp_path):
    """Short and empty micro-batches, micro-batches with nothing masked, frozen groups: the losses
    of one process.
    """
    from safetensors.torch import load_file

    from mmldlm.checkpoints.convert import convert
    from mmldlm.models import MultimodalMMDiT
    from mmldlm.models.mmdit_config import ModelConfig
    from mmldlm.tasks.translation.parameter_plan import frozen_names

    make_hypotheses(store, tmp_path / "hypotheses")
    make_image_store(tmp_path / "images")
    make_image_store(tmp_path / "large", size=24)
    make_image_store(tmp_path / "codes", codes=48)
    for world in (1, 2):
        done = run_ranks(world, WORKER, "uneven", str(store), str(tmp_path), timeout=500)
        assert done.returncode == 0, done.stdout[-4000:]
    for case in UNEVEN:
        expected = [record["loss"] for record in read_log(tmp_path, f"{case}_single")]
        assert len(expected) == 4
        for engine in engines_of(case):
            found = [record["loss"] for record in read_log(tmp_path, f"{case}_{engine}")]
            assert found == pytest.approx(expected, rel=2e-5), (case, engine)
    for engine in ("single", *engines_of("sparse_modes")):
        (profile,) = [
            e
            for e in read_log(tmp_path, f"sparse_modes_{engine}", "events.jsonl")
            if e["event"] == "profile"
        ]
        share, alone = profile["communication_share"], profile["exposed_communication_share"]
        assert (
            profile["error"] is None
            and Path(profile["path"]).is_file()
            and profile["steps"] == [2, 3]
        )
        assert 0 < alone <= share < 1 if engine != "single" else share == alone == 0, (
            engine,
            profile,
        )
    for mode in ("l2t", "t2l"):
        results = []
        for engine in engines_of(f"frozen_{mode}"):
            out = tmp_path / f"{mode}_{engine}_out"
            convert(tmp_path / f"frozen_{mode}_{engine}" / "latest", out)
            results.append(load_file(out / "model.safetensors"))
        values = json.loads((out / "config.json").read_text())
        torch.manual_seed(0)
        fresh = MultimodalMMDiT(ModelConfig(**{k: values[k] for k in ModelConfig.model_fields}))
        frozen = frozen_names(fresh, mode, "by_mode")
        for key, start in fresh.named_parameters():
            for tensors in results:
                if key in frozen:
                    assert torch.equal(tensors[key], start), (mode, key)
                elif key.startswith("blocks.0.") and key.endswith("to_qkv.weight"):
                    assert not torch.equal(tensors[key], start), (mode, key)
                # AdamW divides the rounding of a sum by tiny second moments: one element may move
                # far.
                torch.testing.assert_close(tensors[key], results[0][key], rtol=1e-3, atol=5e-4)
    from mmldlm.inference.load import load_pretrained
    from mmldlm.sampling.latents import sample_latents
    from mmldlm.tasks.image_codes.sampling import sample_codes

    made = []
    for engine in ("single", "fsdp", "zero3"):  # ids, converted and sampled
        convert(tmp_path / f"codes_{engine}" / "latest", out := tmp_path / f"codes_{engine}_out")
        loaded = load_pretrained(out)
        assert loaded.num_ids == 48 and (out / "codebook.npy").is_file()
        made.append(loaded.model.state_dict())
        ids = sample_codes(loaded.model, [[5, 6]], steps=4, sampler="ancestral")
        assert ids.shape == (1, 16, 1) and 0 <= int(ids.min()) <= int(ids.max()) < 48
    for key in ("latent_encoder.code_embedding.weight", "latent_head.weight", "latent_head.bias"):
        for weights in made:
            torch.testing.assert_close(weights[key], made[0][key], rtol=1e-3, atol=5e-4)
    for engine in ("fsdp", "zero3"):  # two predictions, converted and sampled
        convert(
            tmp_path / f"options_{engine}" / "latest", out := tmp_path / f"options_{engine}_out"
        )
        loaded = load_pretrained(out)
        width = loaded.model.config.latent_dim
        assert (
            loaded.model.latent_head.to_latent.weight.shape[0] == 2 * width
            and loaded.condition_noise == 0.3
        )
        for steps, method, eta in ((1, "ddim", 0.0), (3, "ddim", "bridge"), (3, "dpm++2m", 0.0)):
            made = sample_latents(
                loaded.model,
                [[5, 6]],
                diffusion=loaded.latent_diffusion,
                steps=steps,
                method=method,
                eta=eta,
            )
            assert made.shape == (1, width) and torch.isfinite(made).all()


RANKS_DECIDE_OTHERWISE = """
import os, sys
from mmldlm import train
from mmldlm.tasks.translation import data
data.decided_freeze = lambda config: ("none", "by_mode")[int(os.environ["RANK"])]
sys.exit(train.main(sys.argv[1:]))
"""


def test_ranks_that_decide_freeze_differently_end_together(store, tmp_path):
    """One node that does not see the run's checkpoints: an error on all ranks before an engine is
    built, not a hang.
    """
    script = tmp_path / "otherwise.py"
    script.write_text(RANKS_DECIDE_OTHERWISE)
    words = train_words(store, tmp_path, "run", "engine.zero_stage=2", "training.loss_type=l2t")
    done = run_ranks(2, script, *words, timeout=120)
    assert done.returncode == 2 and "one training.freeze on all ranks" in done.stdout, done.stdout[
        -3000:
    ]


RANKS_WITH_PATHS_OF_THEIR_OWN = """
import os, sys
from mmldlm import train
sys.exit(train.main([word.replace("STORE", f"store{os.environ['RANK']}") for word in sys.argv[1:]]))
"""  # noqa: E501


def test_ranks_may_keep_the_data_in_different_folders(store, tmp_path):
    """torchrun per node, with node-local copies of the data: the paths differ, the run trains, and
    the second rank writes its trace.
    """
    script = tmp_path / "node_local.py"
    script.write_text(RANKS_WITH_PATHS_OF_THEIR_OWN)
    for rank in range(2):
        (tmp_path / f"store{rank}").symlink_to(store, target_is_directory=True)
    words = train_words(
        tmp_path / "STORE", tmp_path, "run", "engine.zero_stage=2", "training.num_train_steps=2"
    )
    words += ["training.profile=[2,2]", "training.profile_ranks=[1]"]
    done = run_ranks(2, script, *words, timeout=240)
    assert done.returncode == 0 and len(read_log(tmp_path, "run")) >= 2, done.stdout[-3000:]
    traces = [path.name for path in (tmp_path / "run" / "profile").iterdir()]
    assert traces == ["steps_2_2_rank1.json"]
