"""Settings of sentence-transformers folders: which are followed, and which are refused by their
name.
"""

from __future__ import annotations

import json

import pytest

from mmldlm.data.encoders.sentence_transformer import (
    positions,
    read_sentence_transformer,
    transformer_folder,
)
from mmldlm.data.encoders.specs import Step
from mmldlm.errors import UserError

CONFIG = {"model_type": "bert", "max_position_embeddings": 128}
POOLING = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}


def model(folder, sub="", sbert=None, pooling=None, after=(), st=None, config=None):
    """Write the settings of a model without weights; `after` are kinds and settings of its further
    modules.
    """
    entries = [
        (sub, "Transformer", None),
        ("1_Pooling", "Pooling", POOLING if pooling is None else pooling),
    ]
    entries += [
        (f"{number}_{kind}", kind, settings) for number, (kind, settings) in enumerate(after, 2)
    ]
    modules = []
    for path, kind, settings in entries:
        prefix = "" if "." in kind else "sentence_transformers.models."
        modules.append({"name": str(len(modules)), "path": path, "type": prefix + kind})
        (folder / path).mkdir(parents=True, exist_ok=True)
        if settings is not None:
            (folder / path / "config.json").write_text(json.dumps(settings))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / sub / "config.json").write_text(json.dumps(config or CONFIG))
    if sbert is not None:
        (folder / sub / "sentence_bert_config.json").write_text(json.dumps(sbert))
    if st is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(st))
    return folder


def spec(folder, **made):
    return read_sentence_transformer(model(folder, **made), "enc")


def test_the_transformers_own_folder_and_settings(tmp_path):
    found = spec(
        tmp_path, sub="0_Transformer", sbert={"max_seq_length": 64, "do_lower_case": True}
    )
    assert (found.subfolder, found.max_length, found.lower_case) == ("0_Transformer", 64, True)
    assert transformer_folder(tmp_path) == tmp_path / "0_Transformer" and found.pooling == "mean"


@pytest.mark.parametrize(
    ("sbert", "expected"),
    [
        ({"max_seq_length": 1000}, 128),  # no more than there are positions
        ({"max_seq_length": None}, None),  # as tokenizer and positions allow
        ({"max_seq_length": 50, "tokenizer_args": {"model_max_length": 10}}, 10),
        (
            {
                "max_seq_length": 50,
                "model_args": {"torch_dtype": "float16", "trust_remote_code": True},
            },
            50,
        ),
    ],
)
def test_lengths(sbert, expected, tmp_path):
    assert spec(tmp_path, sbert=sbert).max_length == expected


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}, "cls+last"),
        ({"pooling_mode": ["lasttoken", "mean_sqrt_len_tokens"]}, "last+mean_sqrt_len"),
        ({"pooling_mode": "weightedmean", "pooling_mode_mean_tokens": True}, "weightedmean"),
        ({"pooling_mode_mean_tokens": False}, "mean"),
    ],
)
def test_poolings(pooling, expected, tmp_path):
    assert spec(tmp_path, pooling=pooling).pooling == expected


def test_steps_are_in_the_order_of_the_modules(tmp_path):
    dense = {
        "in_features": 16,
        "out_features": 4,
        "activation_function": "torch.nn.modules.activation.GELU",
    }
    found = spec(
        tmp_path, after=[("Normalize", {}), ("Dense", dense), ("Dropout", {}), ("Normalize", None)]
    )
    assert found.steps == (Step("normalize"), Step("dense", "3_Dense", "GELU")) and found.normalize
    # No unit vectors after the cut.
    found = spec(tmp_path, after=[("Normalize", {})], st={"truncate_dim": 8})
    assert found.steps == (Step("normalize"), Step("cut", dim=8)) and not found.normalize


def test_prompts(tmp_path):
    prompts = {
        "prompts": {"passage": "p: ", "query": "q: "},
        "similarity_fn_name": "dot",
        "__version__": {},
    }
    assert spec(tmp_path, st=prompts).prefix == ""
    assert spec(tmp_path, st={**prompts, "default_prompt_name": "passage"}).prefix == "p: "
    assert spec(tmp_path, st={"prompts": {}, "default_prompt_name": "document"}).prefix == ""


DENSE = {"in_features": 16, "out_features": 4}
REFUSED = {
    "do_lower_case": {"sbert": {"do_lower_case": "yes"}},
    "max_seq_length": {"sbert": {"max_seq_length": 0}},
    "tokenizer_name_or_path": {"sbert": {"tokenizer_name_or_path": "elsewhere"}},
    "processing_kwargs": {"sbert": {"processing_kwargs": {"text": {"max_length": 3}}}},
    "transformer_task": {"sbert": {"transformer_task": "fill-mask"}},
    "tokenizer_args.do_lower_case": {"sbert": {"tokenizer_args": {"do_lower_case": True}}},
    "strange": {"sbert": {"strange": 1}},
    "include_prompt": {"pooling": {**POOLING, "include_prompt": 0}},
    "pooling_mode": {"pooling": {"pooling_mode": ["mean", "median"]}},
    "truncate_dim": {"st": {"truncate_dim": -3}},
    "default_prompt_name": {"st": {"prompts": {}, "default_prompt_name": "x"}},
    "activation_function": {
        "after": [("Dense", {**DENSE, "activation_function": "torch.nn.Softmax2d"})]
    },
    "module_output_name": {"after": [("Normalize", {"module_output_name": "other"})]},
    "use_residual": {"after": [("Dense", {**DENSE, "use_residual": "no"})]},
    "CNN": {"after": [("CNN", {})]},
    "custom_st.Transformer2": {"after": [("custom_st.Transformer2", {})]},
    "is_encoder_decoder": {"config": {"model_type": "marian", "is_encoder_decoder": True}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_followed_is_refused_by_its_name(name, tmp_path):
    with pytest.raises(UserError) as error:
        spec(tmp_path, **REFUSED[name])
    assert name in str(error.value)


@pytest.mark.parametrize("path", ["/etc", "../other", "a/../../b"])
def test_modules_outside_the_folder_are_refused(path, tmp_path):
    model(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = path
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match="inside"):
        transformer_folder(tmp_path)


def test_an_adapter_is_no_complete_model(tmp_path):
    model(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter_config.json"):
        read_sentence_transformer(tmp_path, "enc")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mpnet", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "camembert", "max_position_embeddings": 514}, 512),
        ({"model_type": "xlnet", "max_position_embeddings": -1}, None),
        ({"model_type": "t5"}, None),
    ],
)
def test_positions(config, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert positions(tmp_path) == expected
