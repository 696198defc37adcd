"""A run opens its data: mixtures of stores, texts longer than the model, and what must agree."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mmldlm.data import run_data
from mmldlm.data.lengths import Lengths
from mmldlm.data.manifest import MANIFEST
from mmldlm.data.mixture import MixedStore
from mmldlm.data.prepare.options import PrepareOptions
from mmldlm.data.prepare.pipeline import prepare
from mmldlm.data.store import Store
from mmldlm.data.writers import StoreSplit
from mmldlm.distributed.collectives import Ranks
from mmldlm.errors import MmldlmError, UserError
from mmldlm.tasks.registry import load_config
from mmldlm.tasks.translation.data import open_data


@pytest.fixture(scope="module")
def other_store(need_minilm, sentences, tmp_path_factory):
    """A second store of the same encoder and tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "o.txt").write_text("\n".join(f"Later, {text.lower()}" for text in sentences[:20]))
    return prepare(PrepareOptions(str(folder / "s"), str(folder / "o.txt"), validation_samples=4))


def _config(*words):
    return load_config("tiny", None, list(words))


def test_a_mixture_is_one_store_with_the_statistics_of_its_weights(made_store, other_store):
    data = open_data(
        _config(f"data.mixture={json.dumps({str(made_store): 0.75, str(other_store): 0.25})}")
    )
    first, second = Store(made_store), Store(other_store)
    assert (
        isinstance(data.train, MixedStore)
        and len(data.train) == len(first) + len(second) == 38 + 16
    )
    found, own = data.train.get([40, 3, 38]), second.get([2, 0])
    np.testing.assert_array_equal(found.latents[[0, 2]], own.latents)
    np.testing.assert_array_equal(found.latents[1], first.get([3]).latents[0])
    assert [ids.tolist() for ids in found.tokens] == [
        own.tokens[0].tolist(), first.get([3]).tokens[0].tolist(), own.tokens[1].tolist(),
    ]  # fmt: skip
    assert data.train.texts([1, 39]) == [first.text(1), second.text(1)]
    assert data.train.locate(39) == (other_store / "train", 1)
    latents = [
        store.get(range(len(store))).latents.astype(np.float64) for store in (first, second)
    ]
    weights = np.concatenate([np.full(38, 0.75 / 38), np.full(16, 0.25 / 16)])[:, None]
    mean = (weights * np.concatenate(latents)).sum(0)
    np.testing.assert_allclose(data.latent_mean, mean, atol=1e-6)
    std = np.sqrt((weights * (np.concatenate(latents) - mean) ** 2).sum(0))
    np.testing.assert_allclose(data.train.latent_std, std, atol=1e-6)
    plan = data.training_plan(8)
    ids = np.concatenate([plan.batch(step).ids for step in range(200)])
    assert (ids < 38).mean() == pytest.approx(0.75, abs=0.02)


def test_stores_that_mean_different_things_are_not_mixed(made_store, store_copy):
    path = store_copy / MANIFEST
    whole = path.read_text()
    for key, value in (("encoder", {"pooling": "cls"}), ("tokenizer", {"sha256": "0"})):
        manifest = json.loads(whole)
        manifest[key].update(value)
        path.write_text(json.dumps(manifest))
        with pytest.raises(UserError, match=f"the {key} of"):
            open_data(
                _config(f"data.mixture={json.dumps({str(made_store): 1, str(store_copy): 1})}")
            )


def test_a_mixture_and_one_root_are_refused_together(made_store):
    for words in ([f"data.latent_data_root={made_store}"], ["data.max_train_samples=3"]):
        with pytest.raises(UserError, match="mixture"):
            _config(f"data.mixture={json.dumps({str(made_store): 1})}", *words)
    with pytest.raises(UserError, match="above 0"):
        _config(f"data.mixture={json.dumps({str(made_store): 0})}")


def test_texts_longer_than_the_model_are_refused_or_cut_and_counted(made_store):
    words = (f"data.latent_data_root={made_store}", "model.max_seq_len=12")
    with pytest.raises(UserError, match="data.long_texts=truncate"):
        open_data(_config(*words))
    data = open_data(_config(*words, "data.long_texts=truncate"))
    whole = Store(made_store)
    num_long = int((np.asarray(whole.lengths) > 11).sum())
    assert data.train_lengths.max() == 12 and num_long > 0
    assert (
        data.notes[0]
        == f"{num_long} of 38 training texts cut to 11 tokens (data.long_texts=truncate)"
    )
    for ids, full in zip(data.train.get(range(38)).tokens, whole.get(range(38)).tokens):
        assert np.array_equal(ids, full[:11])


def test_token_batches_train_on_every_rank_alike(made_store):
    """The union of what four ranks compute is what one rank computes."""
    from mmldlm.data.loader import MicroBatches
    from mmldlm.tasks.translation.noiser import Noiser

    data = open_data(_config(f"data.latent_data_root={made_store}", "data.batching=tokens"))
    plan = data.training_plan(8)
    noiser = Noiser(
        data.config,
        data.latent_mean,
        data.latent_std,
    )
    assert plan.version == "tokens-1:64"
    for step in (0, 4, 7):
        (whole,) = [MicroBatches(data.train, plan, noiser, 0, 1, 1)[step]]
        parts = [MicroBatches(data.train, plan, noiser, rank, 4, 1)[step] for rank in range(4)]
        ids = np.concatenate([part.ids[part.real] for part in parts])
        assert np.array_equal(ids, whole.ids) and {
            part.counts["text_tokens"] for part in parts
        } == {whole.counts["text_tokens"]}
        for name in ("text_timesteps", "latent_timesteps", "latents"):
            joined = np.concatenate([getattr(part, name).numpy()[part.real] for part in parts])
            np.testing.assert_array_equal(joined, getattr(whole, name).numpy())


def test_a_sample_of_latents_is_looked_at_when_a_run_opens(store_copy):
    latents = np.load(store_copy / "train" / "latents.npy")
    latents[17] = 0
    np.save(store_copy / "train" / "latents.npy", latents)
    with pytest.raises(UserError, match="zero vectors in 1 row"):
        open_data(_config(f"data.latent_data_root={store_copy}"))


def test_rows_of_many_values_are_looked_at_in_fewer(made_store, monkeypatch):
    monkeypatch.setattr(run_data, "VALUES_CHECKED", 384 * 5)
    seen, blocks = [], Store.latent_blocks

    def counted(self, num_rows, *more):
        seen.append(num_rows)
        return blocks(self, num_rows, *more)

    monkeypatch.setattr(Store, "latent_blocks", counted)
    open_data(_config(f"data.latent_data_root={made_store}"))
    assert seen == [5, 5]


def test_every_file_of_the_tokenizer_is_kept(store_copy):
    """Of several chat templates transformers makes a folder."""
    (store_copy / "tokenizer" / "additional_chat_templates").mkdir()
    (store_copy / "tokenizer" / "additional_chat_templates" / "tool.jinja").write_text("x")
    kept = open_data(_config(f"data.latent_data_root={store_copy}")).files_to_keep()
    assert kept["tokenizer/additional_chat_templates/tool.jinja"].read_text() == "x"
    assert all(path.is_file() for path in kept.values())


def test_tokens_are_read_without_latents(made_store, other_store, monkeypatch):
    data = open_data(
        _config(f"data.mixture={json.dumps({str(made_store): 0.75, str(other_store): 0.25})}")
    )
    rows = [40, 3, 38, 3]
    expected = data.train.get(rows).tokens
    for store in data.train.stores:
        monkeypatch.setattr(store, "_latents", None)
    found = data.train.tokens(rows)
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]
    with pytest.raises(IndexError):
        data.train.tokens([54])


def test_offsets_that_fall_are_refused(store_copy):
    path = store_copy / "train" / "token_offsets.npy"
    offsets = np.load(path)
    offsets[5], offsets[6] = offsets[6], offsets[5]
    np.save(path, offsets)
    store = Store(store_copy)
    with pytest.raises(UserError, match="(?s)agree with its lengths.npy.*row 4"):
        store.get(range(len(store)))
    as_older_store(store_copy)
    with pytest.raises(UserError, match="ascending offsets"):
        Store(store_copy)


def as_older_store(root):
    """Remove what stores did not have before."""
    manifest = json.loads((root / "manifest.json").read_text())
    for split in ("train", "validation"):
        (root / split / "lengths.npy").unlink()
        del manifest["files"][f"{split}/lengths.npy"]
    (root / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("limits", [[], ["data.long_texts=truncate", "model.max_seq_len=8"]])
def test_an_older_store_without_lengths_gives_the_same_batches(made_store, store_copy, limits):
    as_older_store(store_copy)
    new, old = (
        open_data(_config(f"data.latent_data_root={root}", *limits))
        for root in (made_store, store_copy)
    )
    assert new.train._stored_lengths().dtype == np.uint16
    assert old.train._stored_lengths().dtype == np.int32
    assert new.fingerprint() == old.fingerprint() and new.describe()[:40] == old.describe()[:40]
    for step in range(20):
        ids = [data.training_plan(4).batch(step).ids for data in (new, old)]
        np.testing.assert_array_equal(*ids)
        np.testing.assert_array_equal(new.train_lengths[ids[0]], old.train_lengths[ids[0]])


def test_lengths_of_several_stores_are_those_of_numpy():
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 60_000, n).astype(np.uint16) for n in (5, 1, 40)]
    for limit, extra in ((None, 0), (30_000, 1)):
        lengths = Lengths.joined([Lengths([part], limit) for part in parts]) + extra
        expected = np.minimum(np.concatenate(parts).astype(np.int32), limit or 60_000) + extra
        assert (len(lengths), lengths.shape) == (46, (46,)) and lengths.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(lengths), expected)
        for ids in (rng.integers(0, 46, 200), np.zeros((2, 0), int), np.array(7), 45):
            np.testing.assert_array_equal(lengths[ids], expected[ids])
        for low, high in ((0, None), (3, 5), (2, 30), (6, 6), (46, 90)):
            np.testing.assert_array_equal(np.asarray(lengths[low:high]), expected[low:high])
        assert lengths[2:30].sum() == expected[2:30].sum()
        assert (lengths.max(), lengths.min()) == (expected.max(), expected.min())
        assert lengths.num_cut() == (np.concatenate(parts) > (limit or 60_000)).sum()
        with pytest.raises(IndexError):
            lengths[[46]]


def test_a_store_with_a_very_long_text_has_no_file_of_lengths(tmp_path):
    split = StoreSplit(tmp_path, "train", (2,), 10)
    for count in (3, 70_000, 5):
        split.add(["x"], [np.ones(count, np.int64)], np.ones((1, 2), np.float32))
    assert split.close()["max_tokens"] == 70_000
    assert not (tmp_path / "train" / "lengths.npy").exists()


def test_blocks_of_latents_are_those_of_the_map(made_store, tmp_path):
    store = Store(made_store)
    whole = store.get(range(len(store))).latents
    blocks = list(store.latent_blocks(len(store)))
    np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), whole)
    for start, block in store.latent_blocks(10, num_blocks=5):
        assert len(block) == 2
        np.testing.assert_array_equal(block, whole[start : start + 2])
    shutil.copytree(made_store, tmp_path / "cut")
    cut = Store(tmp_path / "cut", max_tokens=5)
    assert cut.lengths.max() == 5
    assert cut.num_truncated == int((np.asarray(store.lengths) > 5).sum()) > 0


def test_a_run_continues_with_its_own_plan_only(tmp_path, monkeypatch):
    """Checkpoints from before plans had names were written under the one that is still the
    default.
    """

    from mmldlm.training import checkpointer
    from mmldlm.training.checkpointer import Checkpointer
    from mmldlm.training.state import TrainingState

    def load(saved, plan):
        checkpoints = Checkpointer.__new__(Checkpointer)
        checkpoints.state, checkpoints.config = TrainingState(8, 100, 0, plan=plan), _config()
        checkpoints.engine = Ranks()
        checkpoints.average, checkpoints.is_main = None, True

        def reached(*args):
            raise MmldlmError("the plan was accepted")

        monkeypatch.setattr(checkpointer, "open_training_state", reached)
        (tmp_path / "training_state.json").write_text(json.dumps(saved))
        checkpoints.load(tmp_path)

    old = {"step": 3, "global_batch": 8, "num_samples": 100, "seed": 0, "applied_steps": 3}
    for saved, plan, found in (
        (old, "samples-1:64", "was accepted"),
        (old, "tokens-1:64", "plan=samples-1:64"),
        ({**old, "plan": "tokens-1:64"}, "tokens-1:64", "was accepted"),
        ({**old, "plan": "samples-1:32"}, "samples-1:64", "plan=samples-1:32"),
    ):
        with pytest.raises(MmldlmError, match=found):
            load(saved, plan)
