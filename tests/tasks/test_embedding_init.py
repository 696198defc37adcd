import json
import shutil

import numpy as np
import pytest

from mmldlm.data.encoders.model_files import find_model_folder
from mmldlm.data.prepare.tokenizer import load
from mmldlm.data.store import Store
from mmldlm.errors import UserError
from mmldlm.tasks.initialization import encoder_token_embeddings, spellings


@pytest.fixture
def store(minilm_store):
    return minilm_store


def edited(store, folder, section, key, value):
    copy = folder / "store"
    shutil.copytree(store, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest[section][key] = value
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return Store(copy)


def test_geometry_of_the_encoder_is_kept(store):
    from safetensors import safe_open

    with safe_open(
        find_model_folder("minilm")[0] / "model.safetensors", framework="numpy"
    ) as file:
        table = file.get_tensor(
            next(key for key in file.keys() if key.endswith("word_embeddings.weight"))
        )
    wide = encoder_token_embeddings(Store(store), 400)
    assert wide.shape == (len(table), 400) and wide.dtype == np.float32
    assert not wide[:, table.shape[1] :].any()
    rows = np.arange(2000, 2400)
    centred = (table - table.mean(0))[rows]
    ours, theirs = wide[rows] @ wide[rows].T, centred @ centred.T
    np.testing.assert_allclose(ours / ours.max(), theirs / theirs.max(), atol=1e-4)
    narrow = encoder_token_embeddings(Store(store), 64)
    assert narrow.std() == pytest.approx(0.02, rel=1e-3)
    # the first components of the same rotation, and the same at every call
    scale = narrow[0, 0] / wide[0, 0]
    np.testing.assert_allclose(narrow, wide[:, :64] * scale, rtol=1e-3, atol=1e-5)
    assert np.array_equal(narrow, encoder_token_embeddings(Store(store), 64))


def test_tokens_of_another_tokenizer_start_from_those_that_spell_them(store, tmp_path):
    from transformers import AutoTokenizer

    own = Store(store)
    theirs = AutoTokenizer.from_pretrained(find_model_folder("minilm")[0])
    words = load("words", texts=["The unhappiest dataframe ☃"])
    found = spellings(words, theirs)
    ids, known = words.get_vocab(), theirs.get_vocab()
    assert found[ids["the"]] == [known["the"]]
    assert found[ids["dataframe"]] == [known["data"], known["##frame"]]
    assert ids["☃"] not in found  # the encoder reads it as [UNK]
    assert found[words.mask_token_id] == [theirs.mask_token_id] and found[words.eos_token_id] == [
        theirs.sep_token_id
    ]

    renamed = edited(store, tmp_path, "tokenizer", "name", "other")
    expected = encoder_token_embeddings(own, 32)
    same = (encoder_token_embeddings(renamed, 32) == expected).all(1)
    assert same.mean() > 0.999  # the same vocabulary under another name


def test_byte_level_tokens_are_spelled_without_their_space():
    from tokenizers import Tokenizer, decoders, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    core = Tokenizer(models.BPE({"Ġhello": 0, "ing": 1, "[PAD]": 2}, []))
    core.decoder = decoders.ByteLevel()
    theirs = AutoTokenizer.from_pretrained(find_model_folder("minilm")[0])
    found = spellings(PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]"), theirs)
    known = theirs.get_vocab()
    assert found == {0: [known["hello"]], 1: [known["ing"]], 2: [known["[PAD]"]]}


def test_a_vocabulary_that_the_encoder_can_hardly_spell_is_refused(store, tmp_path):
    foreign = edited(store, tmp_path, "tokenizer", "name", "other")
    size = foreign.manifest["tokenizer"]["vocab_size"]
    # As if two thirds of it were other scripts.
    foreign.manifest["tokenizer"]["vocab_size"] = 3 * size
    with pytest.raises(UserError, match=f"of {3 * size} in"):
        encoder_token_embeddings(foreign, 32)


def test_another_encoder_is_refused(store, tmp_path):
    with pytest.raises(UserError, match="same release"):
        encoder_token_embeddings(
            edited(store, tmp_path, "encoder", "weights_sha256", "0" * 64), 32
        )


def test_an_own_encoder_is_found_in_a_folder_of_the_environment(store, tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "own").symlink_to(find_model_folder("minilm")[0])
    own = edited(store, tmp_path, "encoder", "name", "own")
    own.manifest["encoder"]["source"] = "folder:own"
    with pytest.raises(UserError, match="MMLDLM_ENCODERS"):
        encoder_token_embeddings(own, 8)
    monkeypatch.setenv("MMLDLM_ENCODERS", str(tmp_path / "models"))
    same = (encoder_token_embeddings(own, 8) == encoder_token_embeddings(Store(store), 8)).all(1)
    assert same.mean() > 0.999


def test_an_encoder_of_packed_latents_is_known_by_its_name_or_not(store, tmp_path):
    """`mmldlm pack --encoder minilm` records no weights; without --encoder no encoder is known."""
    packed = edited(store, tmp_path, "encoder", "source", "imported")
    packed.manifest["encoder"] = {"name": "minilm", "source": "imported"}
    same = encoder_token_embeddings(packed, 8) == encoder_token_embeddings(Store(store), 8)
    assert same.all()
    packed.manifest["encoder"]["name"] = "unknown"
    with pytest.raises(UserError, match="packed without --encoder"):
        encoder_token_embeddings(packed, 8)
