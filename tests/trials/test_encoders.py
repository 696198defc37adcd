"""Encoders, tokens and given texts: what a latent is made of, and what a tokenizer or an encoder
does not read.
"""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest

from tests.trials.harness import (
    SLOW,
    mmldlm,
    records,
    refuses,
    succeeds,
    tiny_run,
    train_rank,
)

KHMER = [chr(code) for code in range(0x1780, 0x17A3)]
EMOJI = [chr(code) for code in range(0x1F600, 0x1F640)]
WHO, DOES, WHAT = (
    ("Cat", "dog", "Bird", "ship"),
    ("Sees", "paints", "Finds"),
    ("river", "House", "letter", "Stone"),
)
PROMPT = "Represent the Sentence: "
SENTENCES = [f"The {WHO[i % 4]} {DOES[i % 3]} a {WHAT[i // 12 % 4]} {i} times" for i in range(60)]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentences") / "c.txt"
    path.write_text("\n".join(SENTENCES) + "\n", encoding="utf-8")
    return path


def make_encoder(
    folder, sub="", length=100, lower=False, pooling=None, extra=(), prompts=None, sbert=None
):
    """Write a tiny sentence-transformers model of random weights over single letters; `extra` are
    further modules.
    """
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    letters = [chr(code) for code in range(33, 127)]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *("##" + letter for letter in letters)]
    core = Tokenizer(
        models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    core.normalizer = normalizers.BertNormalizer(lowercase=False)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    part = folder / sub
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(part)
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes = {
        "vocab_size": len(names),
        "hidden_size": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.5,
    }
    BertModel(BertConfig(**sizes, **shape)).save_pretrained(part)
    modules = [
        (sub, "Transformer", None),
        ("1_Pooling", "Pooling", pooling or {"pooling_mode_mean_tokens": True}),
    ]
    modules += [
        (f"{number}_{kind}", kind, settings) for number, (kind, settings) in enumerate(extra, 2)
    ]
    listed = []
    for path, kind, settings in modules:
        listed.append(
            {
                "name": str(len(listed)),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
        )
        if settings is not None:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        if kind == "Dense":
            weights = {"linear.weight": torch.randn(8, 16), "linear.bias": torch.randn(8)}
            torch.save(weights, folder / path / "pytorch_model.bin")
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    settings = {"max_seq_length": length, "do_lower_case": lower, **(sbert or {})}
    (part / "sentence_bert_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(
            json.dumps(prompts), encoding="utf-8"
        )
    return folder


def reference(
    folder,
    texts,
    sub="",
    prompt="",
    skips_prompt=False,
    lower=False,
    length=100,
    after=lambda states: 0,
):
    """Vectors as sentence-transformers' definitions give them, one unpadded text at a time."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / sub)
    model = AutoModel.from_pretrained(folder / sub).eval()
    skipped = (
        len(tokenizer(prompt.lower() if lower else prompt)["input_ids"]) - 1
        if prompt and skips_prompt
        else 0
    )
    vectors = []
    for text in texts:
        full = (prompt + text).lower() if lower else prompt + text
        ids = tokenizer(full, return_tensors="pt", truncation=True, max_length=length)
        with torch.no_grad():
            vectors.append(after(model(**ids).last_hidden_state[0], skipped).numpy())
    return np.stack(vectors)


def mean(states, skipped):
    return states[skipped:].mean(0)


def stored(store, split="train"):
    """Texts and latents of a store."""
    raw, ends = (np.load(store / split / f"{name}.npy") for name in ("text", "text_offsets"))
    raw = raw.tobytes()
    return [raw[a:b].decode() for a, b in zip(ends, ends[1:])], np.load(
        store / split / "latents.npy"
    )


DEFAULT_PROMPT = {"prompts": {"passage": PROMPT}, "default_prompt_name": "passage"}
NO_PROMPT = {"pooling_mode": "mean", "include_prompt": False}


def weighted(states, skipped):
    import torch

    weight = torch.arange(1, len(states) + 1)[skipped:, None]
    return (states[skipped:] * weight).sum(0) / weight.sum()


def mean_and_max(states, skipped):
    import torch

    return torch.cat([states.amax(0), states.mean(0)])


KINDS = {
    # Two settings at once where they do not hide each other.
    "st-lower-case and st-include-prompt, in a subfolder": (
        {"sub": "0_Transformer", "lower": True, "pooling": NO_PROMPT, "prompts": DEFAULT_PROMPT},
        {
            "sub": "0_Transformer",
            "lower": True,
            "prompt": PROMPT,
            "skips_prompt": True,
            "after": mean,
        },
    ),
    "st-lower-case": ({"lower": True}, {"lower": True, "after": mean}),
    "st-include-prompt": (
        {"pooling": NO_PROMPT, "prompts": DEFAULT_PROMPT},
        {"prompt": PROMPT, "skips_prompt": True, "after": mean},
    ),
    "st-include-prompt, weightedmean, lower case": (
        {
            "pooling": {**NO_PROMPT, "pooling_mode": "weightedmean"},
            "prompts": DEFAULT_PROMPT,
            "lower": True,
        },
        {"prompt": PROMPT, "skips_prompt": True, "lower": True, "after": weighted},
    ),
    "two poolings, concatenated in the library's order": (
        {"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}},
        {"after": mean_and_max},
    ),
    "max_seq_length of the tokenizer's arguments": (
        {"sbert": {"tokenizer_args": {"model_max_length": 70}}},
        {"length": 70, "after": mean},
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=SLOW if number else ()) for number, kind in enumerate(KINDS)]
)
def test_latents_are_the_librarys(kind, sentences, tmp_path):
    """public-reports B 10, 11 and 9"""
    made, expected = KINDS[kind]
    folder = make_encoder(tmp_path / "enc", **made)
    succeeds(
        mmldlm(
            "prepare",
            sentences,
            "--encoder",
            folder,
            "--max-tokens",
            20,
            "--output-dir",
            tmp_path / "S",
        )
    )
    texts, latents = stored(tmp_path / "S")
    wanted = reference(folder, texts, **expected)
    np.testing.assert_allclose(latents, wanted, atol=1e-4 * np.abs(wanted).max())


DENSE = {
    "in_features": 16,
    "out_features": 8,
    "activation_function": "torch.nn.modules.activation.Tanh",
}
NOT_FOLLOWED = {
    "LayerNorm": ({"extra": [("LayerNorm", {"dimension": 16})]}, "LayerNorm"),
    "WordWeights": ({"extra": [("WordWeights", {})]}, "WordWeights"),
    "activation": (
        {"extra": [("Dense", {**DENSE, "activation_function": "my.Act"})]},
        "activation_function",
    ),
    "dense layer of the tokens": (
        {"extra": [("Dense", {**DENSE, "module_input_name": "token_embeddings"})]},
        "module_input_name",
    ),
    "pooling": ({"pooling": {"pooling_mode": "median"}}, "pooling_mode"),
    "pooling's setting": ({"pooling": {"pooling_mode": "mean", "window": 3}}, "window"),
    "transformer's setting": ({"sbert": {"strip_accents": True}}, "strip_accents"),
    "chat template": (
        {
            "sbert": {
                "modality_config": {
                    "message": {"method": "forward", "method_output_name": "logits"}
                }
            }
        },
        "modality_config",
    ),
    "arguments of the model": (
        {"sbert": {"config_args": {"num_hidden_layers": 1}}},
        "config_args.num_hidden_layers",
    ),
    "prompt": (
        {"prompts": {"prompts": {}, "default_prompt_name": "passage"}},
        "default_prompt_name",
    ),
    "sparse encoder": ({"prompts": {"model_type": "SparseEncoder"}}, "model_type"),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if number < 2 else SLOW)
        for number, kind in enumerate(NOT_FOLLOWED)
    ],
)
def test_settings_that_are_not_followed_are_refused_by_name(kind, sentences, tmp_path):
    """public-reports B 10, 11: never other vectors than the library's, exit 0"""
    made, name = NOT_FOLLOWED[kind]
    folder = make_encoder(tmp_path / "enc", **made)
    refuses(
        mmldlm("prepare", sentences, "--encoder", folder, "--output-dir", tmp_path / "S"), name
    )


@pytest.mark.parametrize("missing", ["weights", pytest.param("part of the weights", marks=SLOW)])
def test_a_users_own_folder_is_never_to_be_deleted(missing, sentences, tmp_path):
    """public-reports B 16"""
    from safetensors.torch import load_file, save_file

    folder = make_encoder(tmp_path / "enc", sub="0_Transformer")
    weights = folder / "0_Transformer" / "model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    if missing != "weights":  # transformers would fill the rest with random numbers
        kept = {name: tensor for name, tensor in tensors.items() if "layer.1." not in name}
        save_file(kept, weights, metadata={"format": "pt"})
    result = mmldlm("prepare", sentences, "--encoder", folder, "--output-dir", tmp_path / "S")
    refuses(result, "weights|model.safetensors")
    assert "delete" not in result


def test_max_tokens_above_what_the_encoder_reads_are_refused(sentences, tmp_path):
    """public-reports B 13"""
    words = ("prepare", sentences, "--output-dir", tmp_path / "S", "--max-tokens", 300)
    refuses(mmldlm(*words), "encoder minilm reads 256 tokens", "--overlong chunk")


@SLOW
def test_texts_that_the_encoder_cuts_are_counted(sentences, tmp_path):
    """public-reports B 13: of an encoder whose tokens are shorter than the model's"""
    folder = make_encoder(tmp_path / "enc", length=24)
    words = ("--encoder", folder, "--max-tokens", 20, "--output-dir", tmp_path / "S")
    succeeds(
        mmldlm("prepare", sentences, *words),
        "cut by the encoder",
        "warning: .* longer than the encoder reads",
    )
    splits = json.loads((tmp_path / "S" / "manifest.json").read_text())["splits"]
    assert splits["train"]["num_cut_by_encoder"] > 50
    succeeds(mmldlm("verify-data", tmp_path / "S"), "longer than the encoder reads")


@SLOW
def test_pieces_of_long_texts_are_never_longer_than_the_encoder_reads(tmp_path):
    """public-reports B 13: --overlong chunk"""
    chooser = random.Random(0)
    lines = [" ".join(chooser.choice(WHO + DOES + WHAT) for _ in range(400)) for _ in range(20)]
    (tmp_path / "c.txt").write_text("\n".join(lines))
    words = ("--max-tokens", 510, "--overlong", "chunk", "--output-dir", tmp_path / "S")
    succeeds(mmldlm("prepare", tmp_path / "c.txt", *words), "pieces of at most 254 tokens")
    splits = json.loads((tmp_path / "S" / "manifest.json").read_text())["splits"]
    assert splits["train"]["max_tokens"] <= 254 and "num_cut_by_encoder" not in splits["train"]


def words_of(letters, chooser, number=8):
    return " ".join(
        "".join(chooser.choice(letters) for _ in range(chooser.randint(3, 7)))
        for _ in range(number)
    )


@pytest.mark.parametrize("script", ["Khmer", pytest.param("emoji", marks=SLOW)])
def test_a_corpus_that_the_tokenizer_does_not_know_is_refused(script, tmp_path):
    """public-reports B 14"""
    chooser = random.Random(0)
    lines = [words_of(KHMER if script == "Khmer" else EMOJI, chooser) for _ in range(60)]
    (tmp_path / "c.txt").write_text("\n".join(lines), encoding="utf-8")
    result = mmldlm("prepare", tmp_path / "c.txt", "--output-dir", tmp_path / "S")
    refuses(result, r"\[UNK\]", "--tokenizer train")


@SLOW
def test_a_corpus_that_the_encoder_does_not_know_is_refused(tmp_path):
    """public-reports B 14: a tokenizer made for the texts, and an encoder to which they are all
    alike
    """
    chooser = random.Random(0)
    lines = [words_of(KHMER, chooser) for _ in range(60)]
    (tmp_path / "c.txt").write_text("\n".join(lines), encoding="utf-8")
    words = (
        "--tokenizer",
        "train",
        "--vocab-size",
        300,
        "--max-tokens",
        100,
        "--output-dir",
        tmp_path / "S",
    )
    refuses(
        mmldlm("prepare", tmp_path / "c.txt", *words), r"encoder minilm .*\[UNK\]", "--encoder"
    )


@SLOW
def test_a_share_of_unknown_tokens_is_said_everywhere(tmp_path):
    """public-reports B 14: above 1 % a warning, in table, manifest and verify-data"""
    lines = [f"{text}, {chr(0x1780 + i % 30)} alone" for i, text in enumerate(SENTENCES)]
    (tmp_path / "c.txt").write_text("\n".join(lines), encoding="utf-8")
    succeeds(
        mmldlm("prepare", tmp_path / "c.txt", "--output-dir", tmp_path / "S"),
        r"warning: .*\[UNK\]",
        r"\[UNK\] +│ \d",
    )
    split = json.loads((tmp_path / "S" / "manifest.json").read_text())["splits"]["train"]
    assert split["num_unknown"] == split["num_samples"]
    succeeds(mmldlm("verify-data", tmp_path / "S"), r"warning: .*\[UNK\]", r"\[UNK\]")


@pytest.mark.parametrize("kind", ["t2l", pytest.param("l2t", marks=SLOW)])
def test_a_given_text_of_unknown_words_alone_is_refused(kind, trial_model, tmp_path):
    """public-reports C 16"""
    words = (
        "--checkpoint",
        trial_model,
        "--text",
        "The cat",
        "ខ្មែរ",
        "--output-dir",
        tmp_path / "O",
    )
    refuses(mmldlm("sample", kind, *words), r"\[UNK\]")


@SLOW
@pytest.mark.parametrize("kind", ["t2l", "l2t"])
def test_unknown_words_of_a_given_text_are_counted(kind, trial_model, tmp_path):
    """public-reports C 16: from one of them"""
    words = (
        "--checkpoint",
        trial_model,
        "--text",
        "The cat",
        "a ខ្មែរ river",
        "--output-dir",
        tmp_path / "O",
    )
    succeeds(mmldlm("sample", kind, *words), r"warning: .*\[UNK\].*ខ្មែរ", r"┃ \[UNK\]")
    assert [row["num_unknown"] for row in records(tmp_path / "O" / "samples.jsonl")] == [0, 1]


def byte_level_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<eos>", "<mask>"],
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", mask_token="<mask>"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize(
    ("letters", "max_tokens"),
    [
        pytest.param([chr(code) for code in range(0x4E00, 0x4E40)], 10, id="CJK"),
        pytest.param(EMOJI, 11, id="emoji"),
        pytest.param(["e\u0301", "\u00f1", "\u0101"], 7, id="accents"),
    ],
)
@SLOW
@pytest.mark.parametrize("way", ["prepare", "pack"])
def test_tokens_are_never_cut_inside_a_character(way, letters, max_tokens, tmp_path):
    """public-reports B 17"""
    tokenizer, chooser = byte_level_tokenizer(tmp_path / "tok"), random.Random(0)
    lines = ["".join(chooser.choice([*letters, "a", "b"]) for _ in range(30)) for _ in range(60)]
    words = (
        "--tokenizer",
        tmp_path / "tok",
        "--max-tokens",
        max_tokens,
        "--output-dir",
        tmp_path / "S",
    )
    if way == "prepare":
        (tmp_path / "c.txt").write_text("\n".join(lines), encoding="utf-8")
        if letters is EMOJI:  # all alike to MiniLM
            refuses(
                mmldlm("prepare", tmp_path / "c.txt", "--overlong", "truncate", *words),
                r"encoder minilm .*\[UNK\]",
            )
            return
        succeeds(mmldlm("prepare", tmp_path / "c.txt", "--overlong", "truncate", *words))
    else:
        for folder in ("texts/train", "latents/train"):
            (tmp_path / "D" / folder).mkdir(parents=True)
        for number, line in enumerate(lines):
            (tmp_path / "D" / "texts" / "train" / f"{number}.txt").write_text(
                line, encoding="utf-8"
            )
            np.save(
                tmp_path / "D" / "latents" / "train" / f"{number}.npy",
                np.random.randn(4).astype(np.float32),
            )
        succeeds(mmldlm("pack", tmp_path / "D", *words))
    texts, _ = stored(tmp_path / "S")
    ids, ends = (
        np.load(tmp_path / "S" / "train" / f"{name}.npy") for name in ("tokens", "token_offsets")
    )
    assert [tokenizer.decode(ids[a:b]) for a, b in zip(ends, ends[1:])] == texts
    succeeds(mmldlm("verify-data", tmp_path / "S"))


def test_verify_data_compares_tokens_with_their_text(trial_store, tmp_path):
    """public-reports B 17: tokens that are those of another text"""
    store = shutil.copytree(trial_store, tmp_path / "S")
    tokens = np.load(store / "train" / "tokens.npy")
    tokens[0] = tokens[1]
    np.save(store / "train" / "tokens.npy", tokens)
    refuses(mmldlm("verify-data", store), "the tokens of sample 0 are not its text", code=1)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(
            "\ufeffReturn the name\u2028of the file.\nOpen the stream\x85for"
            " reading.\nClose\x0cthe\x1efile.\n",
            id="separators, BOM",
        ),
        pytest.param(
            "Return the name.\nOpen the stream.\n\nClose the file.", id="blank line", marks=SLOW
        ),
        pytest.param(
            "Return the name.\r\nOpen the stream.\rClose the file.\r\n",
            id="carriage returns",
            marks=SLOW,
        ),
    ],
)
def test_lines_of_a_text_file_are_those_of_a_corpus(content, trial_model, tmp_path):
    """public-reports B 18"""
    (tmp_path / "in.txt").write_bytes(content.encode())
    words = (
        "--checkpoint",
        trial_model,
        "--text-file",
        tmp_path / "in.txt",
        "--output-dir",
        tmp_path / "O",
    )
    succeeds(mmldlm("sample", "t2l", *words))
    texts = [row["text"] for row in records(tmp_path / "O" / "samples.jsonl")]
    assert len(texts) == 3 and texts[0].startswith("Return")


PAIRS = [
    ("The cat sees the house.", "A cat looks at a house.", 4.2),
    ("The dog runs.", "A plane lands.", 0.2),
    ("Open the file.", "Close the file.", 1.8),
    ("Return the name.", "Return the name of it.", 4.0),
]
GLUE = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"


def sts_file(kind, path):
    glue = [
        f"{i}\tmain\tMSRvid\t2012\t{i:04}\tnone\tnone\t{a}\t{b}\t{s}"
        for i, (a, b, s) in enumerate(PAIRS)
    ]
    own = [f"main\tMSRvid\t2012\t{i:04}\t{s}\t{a}\t{b}" for i, (a, b, s) in enumerate(PAIRS)]
    lines = {
        "GLUE": [GLUE[:-1], *glue],
        "the original": own,
        "GLUE without its header": glue,
        "scores in percent": [line.replace("\t4.2\t", "\t84\t") for line in own],
        "NaN": [line.replace("\t4.2\t", "\tnan\t") for line in own],
        "sentences without a difference": [
            f"main\tMSRvid\t2012\t{i:04}\t{s}\tnone\tnone" for i, s in enumerate("1234")
        ],
        "no scores": [GLUE[:-7], *(line.rsplit("\t", 1)[0] for line in glue)],
    }[kind]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "GLUE without its header",
        *(
            pytest.param(kind, marks=SLOW)
            for kind in ("scores in percent", "NaN", "sentences without a difference", "no scores")
        ),
    ],
)
def test_files_of_another_sts_form_are_refused(kind, trial_model, tmp_path):
    """public-reports B 19"""
    words = ("--suite", "stsb", "--sts-file", sts_file(kind, tmp_path / "dev.tsv"))
    refuses(mmldlm("evaluate", "--checkpoint", trial_model, *words), "STS Benchmark")


@SLOW
@pytest.mark.parametrize("kind", ["GLUE", "the original"])
def test_files_of_both_sts_forms_are_read(kind, trial_model, tmp_path):
    """public-reports B 19"""
    words = ("--suite", "stsb", "--sts-file", sts_file(kind, tmp_path / "dev.tsv"))
    succeeds(mmldlm("evaluate", "--checkpoint", trial_model, *words), "4 pairs", "MSRvid")


def test_a_vector_of_another_norm_is_named(trial_model, tmp_path):
    """public-reports B 30"""
    vectors = np.random.default_rng(0).normal(size=(3, 384))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[1] *= 12
    np.save(tmp_path / "v.npy", vectors.astype(np.float32))
    words = ("--latent-file", tmp_path / "v.npy", "--num-steps", 2, "--output-dir", tmp_path / "O")
    succeeds(
        mmldlm("sample", "l2t", "--checkpoint", trial_model, *words),
        r"warning: 1 of 3 .*norm 12 \(rows 1\)",
    )


@pytest.mark.parametrize(
    "seed", [2**65, pytest.param(2**64, marks=SLOW), pytest.param(-1, marks=SLOW)]
)
def test_seeds_are_bounded(seed, trial_model, tmp_path):
    """public-reports B 27"""
    words = (
        "--checkpoint",
        trial_model,
        "--text",
        "The cat",
        f"--seed={seed}",
        "--output-dir",
        tmp_path / "O",
    )
    refuses(mmldlm("sample", "t2l", *words), "--seed")


def test_a_given_text_that_is_not_utf_8_is_refused(trial_model, tmp_path):
    """trials-3 BAD 22"""
    words = ("--checkpoint", trial_model, "--text", "caf\udce9", "--output-dir", tmp_path / "O")
    refuses(mmldlm("sample", "t2l", *words), "--text in UTF-8")


@SLOW
def test_rows_without_their_parent_are_left_out(corpus, trial_store, tmp_path):
    """newcomer B4: a store whose encoder is not known has no cosine of texts embedded again, and
    no floor of it
    """
    store = shutil.copytree(trial_store, tmp_path / "S")
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["encoder"] = {"name": "unknown", "source": "imported", "normalize": True}
    (store / "manifest.json").write_text(json.dumps(manifest))
    succeeds(train_rank(*tiny_run(store, tmp_path, "r")))
    words = ("--num-samples", 8, "--html", tmp_path / "e.html")
    result = mmldlm(
        "evaluate", "--checkpoint", tmp_path / "r", "--data", store, *words, timeout=300
    )
    assert "Traceback" not in result.output and "l2t set-F1" in result
    page = (tmp_path / "e.html").read_text(encoding="utf-8")
    for text in (result.output, page):
        assert "floor: nearest training sentence" not in text


@SLOW
def test_an_encoder_of_a_moved_folder_is_found_or_asked_for(sentences, tmp_path):
    """public-reports B 15"""
    folder = make_encoder(tmp_path / "models" / "enc")
    words = ("--encoder", folder, "--max-tokens", 20, "--output-dir", tmp_path / "S")
    succeeds(mmldlm("prepare", sentences, *words))
    succeeds(train_rank(*tiny_run(tmp_path / "S", tmp_path, "r")))
    sample = (
        "sample",
        "l2t",
        "--checkpoint",
        tmp_path / "r",
        "--text",
        "The Cat Sees a House",
        "--output-dir",
    )
    refuses(mmldlm(*sample, tmp_path / "O"), "MMLDLM_ENCODERS")
    succeeds(mmldlm(*sample, tmp_path / "O", env={"MMLDLM_ENCODERS": str(tmp_path / "models")}))
    folder.rename(tmp_path / "renamed")
    succeeds(mmldlm(*sample, tmp_path / "P", "--encoder-dir", tmp_path / "renamed"))


@SLOW
def test_the_fix_for_a_store_of_another_dimension_is_one_that_the_command_has(
    trial_model, sentences, tmp_path
):
    folder = make_encoder(tmp_path / "enc")
    words = ("--encoder", folder, "--max-tokens", 20, "--output-dir", tmp_path / "S")
    succeeds(mmldlm("prepare", sentences, *words))
    words = ("--checkpoint", trial_model, "--data", tmp_path / "S", "--output-dir", tmp_path / "O")
    result = mmldlm("sample", "l2t", *words)
    refuses(result)
    assert "model.latent_dim" not in result


@SLOW
def test_prepare_works_without_docstrings(sentences, tmp_path):
    from tests.trials.harness import fresh_mmldlm

    result = fresh_mmldlm(
        "prepare", sentences, "--output-dir", tmp_path / "S", env={"PYTHONOPTIMIZE": "2"}
    )
    assert result.code == 0 or "PYTHONOPTIMIZE" in result
