"""Every architecture of the table on a small model made from its config: the reference pooling, in
the card's own way.

The reference of each is computed one text at a time with no padding, so that batching, padding and
masks are on trial.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mmldlm.data.encoders import encoder as encoders
from mmldlm.data.encoders import specs
from mmldlm.data.encoders.encoder import Encoder
from mmldlm.data.encoders.specs import ENCODERS
from mmldlm.errors import UserError

WORDS = (
    "the a cat dog sleeps near warm window in winter when nobody is looking passage : boat river"
    " old man".split()
)
TEXTS = [
    "the cat sleeps near the warm window",
    "a dog",
    "the old man in the boat on the river when nobody is looking in winter",
    "boat",
    "a cat in a boat near a river",
]
HIDDEN = 32


def _tokenizer(folder: Path, template: str | None, **special: str):
    """A word-level tokenizer with the closing tokens of its family."""
    import tokenizers as hf
    from transformers import PreTrainedTokenizerFast

    names = ["[UNK]", *special.values(), *WORDS]
    core = hf.Tokenizer(
        hf.models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    )
    core.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    if template is not None:
        pairs = [(name, names.index(name)) for name in special.values() if name in template]
        core.post_processor = hf.processors.TemplateProcessing(
            single=template, special_tokens=pairs
        )
    known = {key: value for key, value in special.items() if key.endswith("_token")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", **known)
    tokenizer.save_pretrained(folder)
    return tokenizer, len(names)


def _bert(folder):
    from transformers import BertConfig, BertModel

    tokenizer, size = _tokenizer(
        folder, "[CLS] $A [SEP]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )
    shape = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
    }
    return tokenizer, BertModel(BertConfig(vocab_size=size, hidden_size=HIDDEN, **shape))


def _xlmr(folder):
    from transformers import XLMRobertaConfig, XLMRobertaModel

    tokenizer, size = _tokenizer(
        folder, "<s> $A </s>", bos_token="<s>", pad_token="<pad>", eos_token="</s>"
    )
    shape = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
    }
    config = XLMRobertaConfig(
        vocab_size=size, hidden_size=HIDDEN, pad_token_id=tokenizer.pad_token_id, **shape
    )
    return tokenizer, XLMRobertaModel(config)


def _qwen(folder):
    from transformers import Qwen3Config, Qwen3Model

    tokenizer, size = _tokenizer(folder, None, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        intermediate_size=48,
        layer_types=None,
        **heads,
    )
    return tokenizer, Qwen3Model(config)


def _t5(folder):
    from transformers import T5Config, T5EncoderModel

    tokenizer, size = _tokenizer(folder, "$A </s>", pad_token="<pad>", eos_token="</s>")
    shape = {
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
    }
    return tokenizer, T5EncoderModel(T5Config(vocab_size=size, d_model=HIDDEN, **shape))


def _m2m(folder):
    from transformers import M2M100Config
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100Encoder

    tokenizer, size = _tokenizer(
        folder, "__eng__ $A </s>", pad_token="<pad>", eos_token="</s>", lang="__eng__"
    )
    shape = {
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "max_position_embeddings": 40,
    }
    config = M2M100Config(
        vocab_size=size, d_model=HIDDEN, pad_token_id=tokenizer.pad_token_id, **shape
    )
    return tokenizer, M2M100Encoder(config)


# name of the table -> (what makes a model of its architecture, prefix, closing token, pooling,
# norm)
KINDS = {
    "minilm": (_bert, "", None, "mean", True),
    "e5": (_xlmr, "passage: ", None, "mean", True),
    "bge": (_xlmr, "", None, "cls", True),
    "qwen": (_qwen, "", "<|endoftext|>", "last", True),
    "t5": (_t5, "", None, "mean", False),
    "sonar": (_m2m, "", None, "mean", False),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder, tokenizer and model of each kind, with weights that differ by a seed of
    their own.
    """
    made = {}
    for number, (name, (make, *_)) in enumerate(KINDS.items()):
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(number)
        tokenizer, model = make(folder)
        model = model.eval()
        with torch.no_grad():  # biases and norms of a fresh model are all alike
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        made[name] = (folder, tokenizer, model)
    return made


@pytest.fixture
def table(models, monkeypatch):
    """The table with its own pooling, prefix and so on, but the small models in the place of the
    large.
    """

    def small(name):
        spec = specs.replace(ENCODERS[name], latent_dim=HIDDEN, max_length=32, package=None)
        if spec.matryoshka:
            spec = specs.replace(spec, matryoshka=(4, HIDDEN))
        if spec.source_language:
            # A word-level tokenizer has no languages.
            spec = specs.replace(spec, source_language=None)
        return spec

    for name in KINDS:
        monkeypatch.setitem(ENCODERS, name, small(name))
    monkeypatch.setattr(
        encoders, "find_model_folder", lambda name, *_: (models[name][0], f"hub:{name}")
    )


def reference(tokenizer, model, text, prefix, closing, pooling, normalize):
    ids = tokenizer(prefix + text)["input_ids"]
    if closing is not None:
        ids = [*ids, tokenizer.convert_tokens_to_ids(closing)]
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    vector = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
    return (vector / vector.norm() if normalize else vector).numpy()


@pytest.mark.parametrize("name", KINDS)
def test_latents_are_the_cards(name, models, table):
    _, tokenizer, model = models[name]
    expected = np.stack([reference(tokenizer, model, text, *KINDS[name][1:]) for text in TEXTS])
    scale = np.abs(expected).max()
    for batch_tokens in (1024, 12):
        found = Encoder(name, batch_tokens, device="cpu").encode(TEXTS)
        np.testing.assert_allclose(found / scale, expected / scale, atol=3e-6)
    # The test would see another pooling, prefix or closing token: the texts' latents are far from
    # equal.
    others = [how for how in ("mean", "cls", "last") if how != KINDS[name][3]]
    for how in others:
        other = reference(tokenizer, model, TEXTS[0], *KINDS[name][1:3], how, KINDS[name][4])
        assert np.abs(other - expected[0]).max() > 1e-3 * scale


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name][1] or KINDS[name][2]])
def test_prefix_and_closing_token_matter(name, models, table):
    _, tokenizer, model = models[name]
    bare = reference(tokenizer, model, TEXTS[0], "", None, *KINDS[name][3:])
    assert np.abs(Encoder(name, device="cpu").encode(TEXTS[:1])[0] - bare).max() > 1e-3


def test_matryoshka_cuts_and_normalises_again(table):
    whole = Encoder("qwen", device="cpu").encode(TEXTS)
    cut = Encoder("qwen", device="cpu", latent_dim=8)
    found = cut.encode(TEXTS)
    assert found.shape == (len(TEXTS), 8) and cut.identity()["cut_to"] == 8
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with pytest.raises(UserError, match="from 4 to 32"):
        Encoder("qwen", device="cpu", latent_dim=2)
    with pytest.raises(UserError, match="not trained with Matryoshka"):
        Encoder("e5", device="cpu", latent_dim=8)


def test_an_identity_finds_its_encoder_again(table, models):
    made = Encoder("qwen", device="cpu", latent_dim=8, prefix="a ")
    again = Encoder.from_identity(json.loads(json.dumps(made.identity())), device="cpu")
    np.testing.assert_array_equal(again.encode(TEXTS), made.encode(TEXTS))
    with pytest.raises(UserError, match="weights of the data"):
        Encoder.from_identity({**made.identity(), "weights_sha256": "0" * 64}, device="cpu")


def test_low_precision_is_close_and_recorded(table):
    exact, low = Encoder("e5", device="cpu"), Encoder("e5", device="cpu", dtype="bf16")
    assert "dtype" not in exact.identity() and low.identity()["dtype"] == "bf16"
    cosine = (exact.encode(TEXTS) * low.encode(TEXTS)).sum(1)
    assert 0.99 < cosine.min() < 1 and low.encode(TEXTS).dtype == np.float32


def test_at_most_batch_size_texts_at_once(table):
    done = []
    Encoder("e5", device="cpu", batch_size=2).encode(TEXTS, done.append)
    assert done == [2, 2, 1]


# -- models by name -------------------------------------------------------------------------------


def _sentence_transformer(folder: Path, pooling: dict, extra: list[dict] = ()) -> None:
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
        *extra,
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(
        '{"max_seq_length": 6, "do_lower_case": false}'
    )
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": HIDDEN, **pooling})
    )


def test_a_sentence_transformer_says_itself_how_it_is_used(tmp_path):
    """Its pooling, length, dense layer, normalization and default prompt."""
    tokenizer, model = _bert(tmp_path)
    model = model.eval()
    model.save_pretrained(tmp_path)
    dense = {
        "idx": 2,
        "name": "2",
        "path": "2_Dense",
        "type": "sentence_transformers.models.Dense",
    }
    norm = {
        "idx": 3,
        "name": "3",
        "path": "3_Normalize",
        "type": "sentence_transformers.models.Normalize",
    }
    cls = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    _sentence_transformer(tmp_path, cls, [dense, norm])
    (tmp_path / "2_Dense").mkdir()
    weight, bias = torch.randn(5, HIDDEN), torch.randn(5)
    activation = {"in_features": HIDDEN, "activation_function": "torch.nn.modules.activation.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(activation))
    torch.save(
        {"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "pytorch_model.bin"
    )
    prompts = {"prompts": {"document": "passage : "}, "default_prompt_name": "document"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    encoder = Encoder(str(tmp_path), device="cpu")
    assert (
        encoder.latent_dim == 5
        and encoder.spec.max_length == 6
        and encoder.spec.prefix == "passage : "
    )
    # What a store records finds all of it again, the dense layer included, and refuses another
    # one.
    identity = json.loads(json.dumps(encoder.identity()))
    again = Encoder.from_identity({**identity, "name": str(tmp_path)}, device="cpu")
    np.testing.assert_array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    other = [module.replace("dense", "dense2") for module in identity["modules"]]
    with pytest.raises(UserError, match="modules of the data"):
        Encoder.from_identity({**identity, "name": str(tmp_path), "modules": other}, device="cpu")
    for text, found in zip(TEXTS, encoder.encode(TEXTS)):
        ids = tokenizer("passage : " + text, truncation=True, max_length=6)["input_ids"]
        with torch.no_grad():
            first = model(input_ids=torch.tensor([ids])).last_hidden_state[0, 0]
        vector = torch.tanh(weight @ first + bias)
        np.testing.assert_allclose(found, (vector / vector.norm()).numpy(), atol=3e-6)


def test_a_model_without_settings_needs_options(tmp_path):
    tokenizer, model = _xlmr(tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--pooling mean, cls or last"):
        Encoder(str(tmp_path), device="cpu")
    encoder = Encoder(str(tmp_path), device="cpu", pooling="cls", normalize=False)
    # RoBERTa counts positions from the padding id (2 here) on.
    assert encoder.spec.max_length == 40 - (tokenizer.pad_token_id + 1)
    expected = reference(tokenizer, model.eval(), TEXTS[0], "", None, "cls", False)
    np.testing.assert_allclose(encoder.encode(TEXTS)[0], expected, atol=3e-6)
    identity = encoder.identity()
    assert identity["name"] == tmp_path.name and str(tmp_path.parent) not in json.dumps(identity)


def test_parts_that_are_not_known_are_refused(tmp_path):
    _, model = _bert(tmp_path)
    model.save_pretrained(tmp_path)
    weird = {"idx": 2, "name": "2", "path": "2_LSTM", "type": "sentence_transformers.models.LSTM"}
    _sentence_transformer(tmp_path, {"pooling_mode_mean_tokens": True}, [weird])
    with pytest.raises(UserError, match="LSTM"):
        Encoder(str(tmp_path), device="cpu")
    _sentence_transformer(tmp_path, {"pooling_mode_median_tokens": True})
    with pytest.raises(UserError, match="pooling_mode_median_tokens"):
        Encoder(str(tmp_path), device="cpu")


def test_weights_in_several_files_and_in_pytorchs_form(tmp_path, models):
    _, _, model = models["minilm"]
    for name, options in (("split", {"max_shard_size": "10KB"}), ("whole", {})):
        _bert(tmp_path / name)
        model.save_pretrained(tmp_path / name, **options)
    torch.save(model.state_dict(), tmp_path / "whole" / "pytorch_model.bin")
    (tmp_path / "whole" / "model.safetensors").unlink()
    split, whole = (
        Encoder(str(tmp_path / name), device="cpu", pooling="mean") for name in ("split", "whole")
    )
    assert len(encoders.weights_files(split.folder, "split")) > 1
    np.testing.assert_array_equal(split.encode(TEXTS), whole.encode(TEXTS))
