"""What `prepare` and `pack` read: one encoder, one corpus, and nothing left out without a word."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trials.harness import SLOW, mmldlm, refuses, shell, succeeds, todo

BROKEN_WORD = "zebra"  # the encoder has no finite vector for it
WORDS = (
    f"the cat dog bird ship river house stone sees finds paints near today again {BROKEN_WORD} . ,"
    " ? # - c".split()
)


def kinds(*values):
    """Parameters of which the first is tried by default, the others with all trials."""
    first, *others = values
    return [
        first,
        *(pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=SLOW) for v in others),
    ]


def sentences(count, first=0, words=WORDS[1:7]):
    """Return `count` different sentences."""
    places = WORDS[4:7] + WORDS[11:14]
    return [
        f"the {words[i % 6]} sees the {places[i // 6 % 6]} {words[i // 36 % 6]} near the"
        f" {words[i // 216 % 6]}."
        for i in range(first, first + count)
    ]


def write_lines(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_paragraphs(path, lines):
    """Write a file of a folder, whose texts are the sentences of its paragraphs."""
    return write_lines(path, [f"{line}\n" for line in lines])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Folder of a sentence-transformers model with random weights, of 16 dimensions."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("encoder") / "enc"
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    core = Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(vocab)}, unk_token="[UNK]")
    )
    core.normalizer, core.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    specials = {
        f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")
    }
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    model = BertModel(config)
    model.embeddings.word_embeddings.weight.data[vocab.index(BROKEN_WORD)] = float("nan")
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=core, **specials).save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True})
    )
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))
    return folder


@pytest.fixture
def prepare(encoder, tmp_path):
    """Call `mmldlm prepare` with the small encoder."""

    def call(*words, encoder=encoder, output_dir=tmp_path / "S", **options):
        own = ("--encoder", encoder, "--tokenizer", encoder, "--output-dir", output_dir)
        return mmldlm("prepare", *words, *own, **options)

    return call


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


def halve_weights(folder):
    path = folder / "model.safetensors"
    save_file(
        {name: value * 0.5 for name, value in load_file(path).items()}, path, {"format": "pt"}
    )


def edit_text(name, old, new):
    def edit(folder):
        path = folder / name
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    return edit


@pytest.mark.parametrize(
    ("name", "change"),
    kinds(
        ("model.safetensors", halve_weights),
        (
            "tokenizer.json",
            edit_text("tokenizer.json", '"strip_accents": null', '"strip_accents": true'),
        ),
        ("1_Pooling/config.json", edit_text("1_Pooling/config.json", "mean_tokens", "cls_token")),
    ),
)
def test_latents_of_two_encoders_never_meet(prepare, encoder, tmp_path, name, change):
    """public-reports B 1 mixed-encoders: a launch that resumes"""
    own = tmp_path / "a" / "enc"
    shutil.copytree(encoder, own)
    corpus = write_lines(tmp_path / "c.txt", [*sentences(60), f"the {BROKEN_WORD} sees the ship."])
    # One text without a latent is too many: the work is kept, as after an interruption.
    refuses(prepare(corpus, "--max-quarantined", 0, encoder=own), "keeps the finished work")
    change(own)
    refuses(
        prepare(corpus, "--max-quarantined", 0, encoder=own), f"encoder enc/{name} was .*, now "
    )
    assert os.listdir(tmp_path / "S.work" / "encode-train") == ["000000"], "the work is kept"


@SLOW
def test_a_store_of_another_encoder_is_not_complete(prepare, encoder, tmp_path):
    """public-reports B 2 stale-encoder: another folder of the same name"""
    corpus = write_lines(tmp_path / "c.txt", sentences(60))
    succeeds(prepare(corpus))
    succeeds(prepare(corpus), "already complete")
    own = tmp_path / "b" / "enc"
    shutil.copytree(encoder, own)
    succeeds(prepare(corpus, encoder=own), "already complete")
    halve_weights(own)
    refuses(prepare(corpus, encoder=own), "encoder enc/model.safetensors was .*, now ")


def test_the_default_of_max_tokens_refuses_no_encoder(prepare, encoder, tmp_path):
    """public-reports B 13 encoder-cut: an encoder of 32 tokens; a limit that was given is
    refused
    """
    short = shutil.copytree(encoder, tmp_path / "enc")
    (short / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32}))
    corpus = write_lines(tmp_path / "c.txt", [*sentences(40), " ".join(["cat"] * 40)])
    refuses(prepare(corpus, "--max-tokens", 61, encoder=short), "--max-tokens of at most 30")
    succeeds(prepare(corpus, encoder=short), "longer than the encoder reads")


def test_a_store_of_an_earlier_version_is_complete(prepare, tmp_path):
    """public-reports B 3: it knows the names and sizes of its files alone, which is said; another
    size is refused
    """
    corpus = write_lines(tmp_path / "c.txt", sentences(40))
    succeeds(prepare(corpus))
    manifest = json.loads((tmp_path / "S" / "manifest.json").read_text(encoding="utf-8"))
    del manifest["inputs"]
    units = {"train": [f"txt:c.txt c.txt#0-{corpus.stat().st_size}"], "validation": []}
    manifest["units"] = hashlib.sha256(json.dumps(units).encode()).hexdigest()
    (tmp_path / "S" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    succeeds(prepare(corpus), "already complete, .*content and the encoder were not")
    write_lines(corpus, sentences(50))
    refuses(prepare(corpus), "does not name the files it read")


@SLOW
def test_another_tokenizer_is_named(prepare, encoder, tmp_path):
    """public-reports B 1: the folder of --tokenizer"""
    tokenizer = shutil.copytree(encoder, tmp_path / "tok")
    corpus = write_lines(tmp_path / "c.txt", sentences(40))
    words = (
        "prepare",
        corpus,
        "--encoder",
        encoder,
        "--tokenizer",
        tokenizer,
        "--output-dir",
        tmp_path / "S",
    )
    succeeds(mmldlm(*words))
    succeeds(mmldlm(*words), "already complete")
    edit_text("tokenizer.json", '"strip_accents": null', '"strip_accents": true')(tokenizer)
    refuses(mmldlm(*words), "tokenizer tok was sha256 .*, now sha256 ")


def write_gz(path, lines):
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))


def write_folder(path, lines):
    path.mkdir(exist_ok=True)
    write_paragraphs(path / "a.txt", lines[:30])
    write_paragraphs(path / "b.txt", lines[30:])


def write_jsonl(path, lines):
    write_lines(path, [json.dumps({"text": line}) for line in lines])


@pytest.mark.parametrize(
    ("name", "write"),
    kinds(
        ("c.txt", write_lines),
        ("c.txt.gz", write_gz),
        ("folder", write_folder),
        ("c.jsonl", write_jsonl),
    ),
)
@pytest.mark.parametrize("place", kinds("CORPUS", "--validation-corpus"))
def test_a_changed_corpus_is_named_and_a_copied_one_is_the_same(
    prepare, tmp_path, name, write, place
):
    """public-reports B 3 stale-corpus: other content of the same size, too"""
    path = tmp_path / name
    write(path, sentences(60))
    other = write_lines(tmp_path / "other.txt", sentences(60, 100))
    words = (path,) if place == "CORPUS" else (other, place, path)
    succeeds(prepare(*words))
    write(path, sentences(60))  # again, at another time
    succeeds(prepare(*words), "already complete")
    lines = sentences(60)
    write(path, [*lines[:-1], lines[-1].replace("cat", "dog").replace("sees", "seen")])
    refuses(prepare(*words), r"file (folder/)?\w+\.(txt|jsonl|txt\.gz) was .*, now ")


@SLOW
def test_a_corpus_that_changes_between_two_launches_is_named(prepare, tmp_path):
    """public-reports B 3: on resuming"""
    corpus = write_lines(tmp_path / "c.txt", [*sentences(60), f"the {BROKEN_WORD} sees the ship."])
    refuses(prepare(corpus, "--max-quarantined", 0), "keeps the finished work")
    write_lines(corpus, [*sentences(60, 1), f"the {BROKEN_WORD} sees the ship."])
    refuses(prepare(corpus, "--max-quarantined", 0), "file c.txt was .*, now ", "started with")


def damaged(path, kind):
    lines = sentences(60)
    if ".jsonl" in path.name:
        lines = [json.dumps({"text": line}) for line in lines]
    content = ("\n".join(lines) + "\n").encode()
    raw = gzip.compress(content)
    if path.suffix == ".zst":
        raw = pytest.importorskip("zstandard").compress(content)
    forms = {
        "half": raw[: len(raw) // 2],
        "less 1": raw[:-1],
        "empty": b"",
        "garbage behind": raw + b"garbage here",
    }
    path.write_bytes(forms[kind])
    return path


@pytest.mark.parametrize("suffix", kinds(".txt.gz", ".txt.zst", ".jsonl.ZST", ".TXT.GZ"))
@pytest.mark.parametrize("kind", kinds("half", "less 1", "empty", "garbage behind"))
def test_a_cut_file_is_not_a_complete_one(prepare, tmp_path, suffix, kind):
    """public-reports B 4 zst-cut"""
    path = damaged(tmp_path / f"c{suffix.lower()}", kind).rename(tmp_path / f"c{suffix}")
    refuses(prepare(path), "a complete compressed file in")


def test_links_in_a_corpus_are_followed_and_dangling_ones_named(prepare, tmp_path):
    """public-reports B 6 linked-folder; a loop, a folder linked twice, macOS's files and others
    are accounted for
    """
    own, elsewhere, more = tmp_path / "corpus", tmp_path / "elsewhere", tmp_path / "more"
    for folder in (own / "a", elsewhere / "deep", more):
        folder.mkdir(parents=True)
    write_paragraphs(own / "a" / "one.txt", sentences(20))
    write_paragraphs(elsewhere / "deep" / "two.TXT", sentences(20, 20))
    write_paragraphs(more / "three.txt", sentences(20, 40))
    (own / "linked").symlink_to(elsewhere)
    (own / "again").symlink_to(elsewhere)
    (own / "file.txt").symlink_to(more / "three.txt")
    (own / "loop").symlink_to(own)
    (own / "gone.txt").symlink_to(tmp_path / "nowhere")
    (own / "a" / "._one.txt").write_bytes(b"\x00\x05\x16\x07\xff")
    (own / ".DS_Store").write_bytes(b"\x00")
    (own / "readme.md").write_text("No text of the corpus.")
    result = prepare(own)
    succeeds(result, "links to nothing", "gone.txt", "readme.md", "files of macOS")
    entry = manifest(tmp_path / "S")["corpus"]
    assert entry["read"] == 60 and entry["files"] == 3
    found = {reason: value["number"] for reason, value in entry["not_read"].items()}
    assert found == {
        "links to nothing": 1,
        "folders reached twice": 2,
        "files of macOS": 2,
        "files of another kind": 1,
    }


@SLOW
@pytest.mark.parametrize("name", ["c.TXT", "c.Txt", "c.JSONL", "c.jsonl.GZ"])
def test_suffixes_in_upper_case(prepare, tmp_path, name):
    """public-reports B, issue item 3: upper-case suffixes"""
    write = write_gz if name.endswith("GZ") else write_lines
    lines = sentences(40)
    write(
        tmp_path / name,
        [json.dumps({"text": line}) for line in lines] if "json" in name.lower() else lines,
    )
    succeeds(prepare(tmp_path / name))
    assert manifest(tmp_path / "S")["corpus"]["read"] == 40


@SLOW
@pytest.mark.parametrize("name", ["c.txt", "folder", "c.jsonl", "field.jsonl"])
def test_no_byte_order_mark_gets_into_a_text(prepare, tmp_path, name):
    """public-reports B 8 and POOR of B: joined files with marks, and marks in fields"""
    lines = sentences(40)
    marked = [f"\ufeff{line}" if i % 20 == 0 else line for i, line in enumerate(lines)]
    if name == "folder":
        (tmp_path / name).mkdir()
        write_paragraphs(tmp_path / name / "a.txt", marked)
    elif name == "field.jsonl":
        write_jsonl(tmp_path / name, marked)
    else:
        records = [json.dumps({"text": line}) for line in lines]
        write_lines(
            tmp_path / name, marked if name == "c.txt" else [f"\ufeff{line}" for line in records]
        )
    succeeds(prepare(tmp_path / name))
    texts = b"".join(
        (tmp_path / "S" / split / "text.npy").read_bytes() for split in ("train", "validation")
    )
    assert "\ufeff".encode() not in texts


@SLOW
def test_texts_with_nul_characters_are_counted(prepare, tmp_path):
    """issue item 3: UTF-16 without a mark is no text"""
    path = tmp_path / "c.txt"
    path.write_bytes("\n".join(sentences(40)).encode("utf-16-le"))
    refuses(prepare(path), "not text")


def write_parquet(path, columns):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table(columns), path)


@pytest.mark.parametrize(
    "record",
    kinds(
        {"file_name": "a.png", "text": "a cat"},
        {"image": "a.png", "text": "a cat"},
        {"text": "a cat", "path": "deep/a.JPEG"},
        {"text": "a cat", "filename": "a.heic"},
    ),
)
@pytest.mark.parametrize("how", kinds("folder", "validation", "datasets", "gz"))
def test_a_list_of_images_is_never_taken_for_texts(prepare, tmp_path, record, how):
    """public-reports C 3 hf-metadata, B 8: in the places where texts alone are read"""
    path = tmp_path / "folder" / ("list.jsonl.gz" if how == "gz" else "list.jsonl")
    path.parent.mkdir()
    lines = ["", json.dumps({"text": "no image here"}), json.dumps(record)]
    (write_gz if how == "gz" else write_lines)(path, lines)
    texts = write_lines(tmp_path / "c.txt", sentences(40))
    words = {"validation": (texts, "--validation-corpus", path), "folder": (path.parent,)}.get(
        how, ("--datasets", path)
    )
    refuses(prepare(*words), "records that name images", "--text-field")


@SLOW
def test_captions_are_texts_when_their_field_is_named(prepare, tmp_path):
    """public-reports C 3: not without a word, but with one"""
    records = [{"file_name": f"{i}.png", "text": line} for i, line in enumerate(sentences(40))]
    write_lines(tmp_path / "list.jsonl", map(json.dumps, records))
    succeeds(prepare(tmp_path / "list.jsonl", "--text-field", "text"))
    assert "image" not in manifest(tmp_path / "S")


@SLOW
def test_a_parquet_of_images_is_refused_and_categories_are_strings(prepare, tmp_path):
    """public-reports C 3, B 32 parquet-category"""
    arrow = pytest.importorskip("pyarrow")
    lines = sentences(40)
    pictures = [{"bytes": b"x", "path": "a.png"}] * 40
    write_parquet(tmp_path / "images.parquet", {"picture": pictures, "text": lines})
    refuses(prepare(tmp_path / "images.parquet"), "a column 'picture' of images", "--text-field")
    kinds = {
        "category": arrow.array(lines).dictionary_encode(),
        "view": arrow.array(lines, arrow.string_view()),
    }
    for name, column in kinds.items():
        write_parquet(tmp_path / f"{name}.parquet", {"text": column})
        succeeds(prepare(tmp_path / f"{name}.parquet", output_dir=tmp_path / name))
        assert manifest(tmp_path / name)["corpus"]["read"] == 40


@pytest.mark.parametrize("name", kinds("model.safetensors", "c.txt", "c.jsonl", "c.txt.gz"))
def test_a_pointer_of_git_lfs_is_named(prepare, encoder, tmp_path, name):
    """public-reports B 28 lfs-pointer"""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 90868376\n"
    corpus, own = write_lines(tmp_path / "texts.txt", sentences(40)), encoder
    if name == "model.safetensors":
        own = shutil.copytree(encoder, tmp_path / "enc")
        (own / name).write_text(pointer)
    else:
        corpus = tmp_path / name
        corpus.write_text(pointer)
    refuses(
        prepare(corpus, encoder=own), "Git LFS|one JSON object" if name == "c.jsonl" else "Git LFS"
    )


@SLOW
@pytest.mark.parametrize("target", ["empty", "dangling", "linked twice"])
def test_an_output_may_be_a_link(prepare, tmp_path, target):
    """public-reports B 26 output-link: the store, and the work beside it, are on the
    target's disk
    """
    (tmp_path / "big").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "big" / "S")
    if target == "empty":
        (tmp_path / "big" / "S").mkdir()
    if target == "linked twice":
        (tmp_path / "link").rename(tmp_path / "first")
        (tmp_path / "link").symlink_to(tmp_path / "first")
    corpus = write_lines(tmp_path / "c.txt", [*sentences(40), f"the {BROKEN_WORD} sees the ship."])
    refuses(
        prepare(corpus, "--max-quarantined", 0, output_dir=tmp_path / "link"),
        "keeps the finished work",
    )
    assert [path.name for path in (tmp_path / "big").iterdir() if path.suffix] == ["S.work"]
    succeeds(prepare(corpus, "--max-quarantined", 0.1, "--force", output_dir=tmp_path / "link"))
    assert (tmp_path / "link").is_symlink() and (
        tmp_path / "big" / "S" / "manifest.json"
    ).is_file()
    assert os.listdir(tmp_path / "big") == ["S"]


def test_packing_accounts_for_every_file(encoder, tmp_path):
    """public-reports B 26, B 6 and issue item 3: `pack` through links, with other splits, marks
    and macOS's files
    """
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "big").mkdir()
    source = tmp_path / "d"
    for folder in ("texts", "latents"):
        (source / folder / "test").mkdir(parents=True)
    (source / "texts" / "train").symlink_to(tmp_path / "elsewhere")
    (source / "latents" / "train").mkdir()
    (tmp_path / "P").symlink_to(tmp_path / "big" / "P")
    for i, text in enumerate(sentences(40)):
        suffix = ".TXT" if i == 7 else ".txt"
        (tmp_path / "elsewhere" / f"{i}{suffix}").write_text(f"\ufeff{text}", encoding="utf-8")
        np.save(
            source / "latents" / "train" / f"{i}.npy",
            np.random.default_rng(i).normal(size=8).astype(np.float32),
        )
    (source / "latents" / "train" / "._0.npy").write_bytes(b"\x00")
    (source / "texts" / "test" / "a.txt").write_text("a text of a split that is not read")
    result = mmldlm("pack", source, "--tokenizer", encoder, "--output-dir", tmp_path / "P")
    succeeds(result, "files of no sample", "test/a.txt", "files of macOS")
    assert manifest(tmp_path / "big" / "P")["corpus"]["kept"] == 40
    text = (tmp_path / "P" / "train" / "text.npy").read_bytes()
    assert "\ufeff".encode() not in text


def test_an_output_that_is_not_utf8_is_refused_before_the_work(prepare, tmp_path):
    """trials-3 BAD 22: --output-dir"""
    corpus = write_lines(tmp_path / "c.txt", sentences(40))
    refuses(prepare(corpus, output_dir=tmp_path / os.fsdecode(b"S\xe9")), "UTF-8")
    assert [path.name for path in tmp_path.iterdir()] == ["c.txt"]


@SLOW
@pytest.mark.parametrize("kilobytes", [64, 600])
def test_a_full_disk_while_the_tokenizer_is_written(corpus, tmp_path, kilobytes):
    """trials-3 BAD 15: one line that names the file; the same command resumes"""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = f"{Path(sys.executable).with_name('mmldlm')} prepare {corpus} --output-dir {disk}/S"
    script = f"""mount -t tmpfs -o size={kilobytes}k tmpfs {disk} || exit 77
    {command}; echo "first: $?"
    mount -o remount,size=64m {disk}; {command}; echo "second: $?" """
    result = shell(["unshare", "-rm", "bash", "-c", script], timeout=300)
    if result.code == 77 or "unshare" in result.output:
        pytest.skip("no file system can be mounted here")
    assert not result.traceback and "first: 1" in result and "second: 0" in result, result.output
    assert "No space left on device" in result and "free some space" in result


@SLOW
@todo("public-reports B 31 dedup-marks")
def test_marks_that_change_the_meaning_make_another_text(prepare, tmp_path):
    """Stays as it is: the hash that finds equal texts also assigns them to splits, so that another
    one would move texts between training and validation when a corpus is prepared again. Texts
    that differ in marks alone are counted, and `--keep-duplicates` keeps them (docs/data.md).
    """
    lines = [
        f"{line} c{mark}" for line in sentences(20) for mark in ("", "#")
    ]  # of words that the encoder knows
    succeeds(prepare(write_lines(tmp_path / "c.txt", lines)))
    assert manifest(tmp_path / "S")["corpus"]["kept"] == 40


def test_two_corpora_without_datasets_are_told_the_option(prepare, tmp_path):
    """public-reports B, small ones: prepare a.txt b.txt"""
    files = [write_lines(tmp_path / f"{name}.txt", sentences(20)) for name in "ab"]
    refuses(prepare(*files), "--datasets")


def test_marks_are_category_punctuation():
    """The trial of dedup-marks says what it means only while these are marks."""
    assert all(unicodedata.category(mark).startswith("P") for mark in "#-%")
