"""Configs that someone else wrote, or that YAML reads otherwise than their writer: a value or an
error, no surprise.
"""

import os
import subprocess
import sys

import pytest
import yaml

from mmldlm.config.schema import WandbConfig
from mmldlm.config.yaml_reader import format_yaml, parse_yaml, read_yaml
from mmldlm.errors import UserError
from mmldlm.tasks.registry import load_config

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (LAUGHS, "alias \\*a0 in line 2"),
        (b"training:\n  seed: 1 # caf\xe9\n", r"byte 0xe9 at position 25 \(line 2\)"),
        ("[" * 100_000, "levels of nesting"),
        ("training: " + "{a: " * 30 + "1" + "}" * 30, "levels of nesting in line 1"),
        ("x" * 1_000_000, "config of at most"),
        (
            "training:\n  seed: 1\n  dtype: fp32\n  seed: 2\n",
            "key seed twice, in line 2 and in line 4",
        ),
        (
            "training: {seed: 1}\nmodel: {}\ntraining: {seed: 2}\n",
            "key training twice, in line 1 and in line 3",
        ),
        ("training: !!python/object/apply:os.getcwd []", "tag .*/apply:os.getcwd in line 1"),
        ("? [a, b]\n: 1\n", "key that is not a word in line 1"),
    ],
)
def test_what_is_refused_is_named_with_its_place(content, says, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=says) as caught:
        load_config(None, str(path))
    assert str(path) in str(caught.value) and caught.value.exit_code == 2


def test_numbers_and_words_are_what_they_look_like(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "\ufeffoptimizer: {lr: 1e-4, min_lr: .5e-6, grad_clip_norm: 1}\nstability: {spike_action:"
        " off}\ntraining: {num_train_steps: 1000, compile_model: yes, resume:"
        " 2024-01-01}\nlogging: {run_name: no}\n",
        encoding="utf-8",
    )
    config = load_config(None, str(path))
    assert (config.optimizer.lr, config.optimizer.min_lr, config.training.num_train_steps) == (
        1e-4,
        5e-7,
        1000,
    )
    assert (config.logging.run_name, config.stability.spike_action, config.training.resume) == (
        "no",
        "off",
        "2024-01-01",
    )
    assert config.training.compile_model is True
    path.write_text("training: {num_train_steps: 12:30}")  # 750 in YAML 1.1
    with pytest.raises(UserError, match="num_train_steps.*12:30"):
        load_config(None, str(path))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("training.num_train_steps=010", "num_train_steps: a decimal number.*zeros .*'010'"),
        ("training.num_train_steps=1_000", "num_train_steps: a decimal number.*'1_000'"),
        ("training.num_train_steps='1000'", "num_train_steps: a decimal number.*'1000'"),
        ("training.num_train_steps=0x10", "num_train_steps: a decimal number.*'0x10'"),
        ("data.max_validation_samples=0x10", "a decimal number.* or auto .*'0x10'"),
        ("training.loss_type_weights={l2t: 1, l2t: 2}", "key l2t twice"),
        ("training.loss_type_weights=[&a [1], *a]", "alias"),
        ("model.hidden_size=1000000000", "hidden_size"),
        ("+model.latent_dim=3", "write model.latent_dim=3"),
        ("~loss.text_loss_clamp=1", "loss.text_loss_clamp=null"),
        ("trainer.lr=1", "now optimizer.lr"),
        ("trainer.max_steps=1", "now training.num_train_steps"),
        ("training.num_epochs=3", "now training.num_train_steps.*epochs x samples"),
        ("data.data_files.train=x", "now data.latent_data_root.*mmldlm pack"),
        ("loss.loss_scale=0.1", "loss.latent_loss_weight"),
    ],
)
def test_overrides_are_read_by_the_same_rules(word, says):
    with pytest.raises(UserError, match=says):
        load_config("tiny", None, [word])


def test_text_is_taken_as_it_is():
    for name in ("010", "@x", "a: b", "%s", "[x]", "1e-4"):
        assert load_config("tiny", None, [f"logging.run_name={name}"]).logging.run_name == name
    assert load_config("tiny", None, ["logging.run_name='7'"]).logging.run_name == "7"


def test_a_word_that_the_shells_encoding_lacks_is_named():
    code = (
        "import sys; from mmldlm.cli import main; sys.exit(main(['config', '--config-name',"
        " 'tiny', *sys.argv[1:]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "logging.run_name=ü".encode()],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
    )
    assert done.returncode == 2 and b"LC_ALL=C.UTF-8" in done.stderr and b"udc" not in done.stderr


def test_keys_are_listed_with_the_words_that_they_take(capsys):
    from mmldlm.cli import main

    assert main(["config", "--keys"]) == 0
    listed = capsys.readouterr().out
    assert 'data.batching = "samples"  (samples | tokens)' in listed
    assert (
        'latent_diffusion.schedule = "cosine"  (cosine | linear | sigmoid | rectified_flow |'
        " decoupled)" in listed
    )
    assert "training.loss_type_weights={l2t: 0.7, t2l: 0.3}" in listed


WORDS = (
    "0829",
    "12e4567",
    "1e5",
    "1e-4",
    "1E5",
    "08",
    "010",
    "0730",
    ".5",
    ".5e3",
    "+.5",
    "5.",
    "1_0",
    "+5",
    "-3",
    "0x1F",
    "0o17",
    "0b11",
    "1:30",
    "190:20:30",
    "2024-01-01",
    "2024-01-01 10:00:00",
    "no",
    "Yes",
    "on",
    "OFF",
    "true",
    "False",
    "~",
    "null",
    "Null",
    "",
    " a",
    "a ",
    "a  b",
    "- x",
    "-",
    "--",
    "a: b",
    "a:",
    ":",
    "a #b",
    "#",
    "{",
    "}",
    "[",
    "]",
    ",",
    "*x",
    "&x",
    "!t",
    "!!str",
    "%",
    "%YAML",
    "@",
    "`",
    "?",
    "? x",
    "|",
    ">",
    "'",
    '"',
    "''",
    "\\",
    "a\\nb",
    "<<",
    "=",
    ".",
    "..",
    "---",
    "...",
    ".inf",
    "-.INF",
    ".nan",
    "nan",
    "inf",
    "\t",
    "a\tb",
    "a\nb",
    "a\n\nb\n",
    "\n",
    "\r",
    "a\r\nb",
    "\x00",
    "\x07",
    "\x1b[31m",
    "\x7f",
    "\x85",
    "\xa0",
    "\u2028",
    "\ufeff",
    "\udce9",
    "ü",
    "猫 猫",
    "🐈",
    "$HOME",
    "word " * 60,
    "x" * 3000,
)


@pytest.mark.parametrize("word", WORDS)
def test_a_text_is_read_back_as_it_was_written(word):
    """public-reports C 1 own-config."""
    values = {
        "logging": {"run_name": word, "wandb": {"project": word}},
        "data": {"mixture": {word: 0.5}},
    }
    text = format_yaml(values)
    assert (
        parse_yaml(text, "x")
        == parse_yaml(text, "x", spelling=True)
        == yaml.safe_load(text)
        == values
    )


@pytest.mark.parametrize("word", WORDS)
def test_a_text_that_an_earlier_release_wrote_is_read_as_it_stands(word):
    """public-reports C 1 own-config: PyYAML's own rules left numbers of YAML 1.2 unquoted."""
    values = parse_yaml(yaml.safe_dump({"wandb": {"project": word}}), "x", spelling=True)
    assert WandbConfig(**values["wandb"]).project == word
    assert type(WandbConfig(**values["wandb"]).project) is str


@pytest.mark.parametrize(
    "number", [0, -3, 1000, 2**62, 1e-5, 0.1, 1e22, 1e300, 5e-324, -0.0, True, None, 12345678.9]
)
def test_a_number_is_read_back_as_it_was_written(number):
    found = parse_yaml(format_yaml({"x": number}), "x", spelling=True)["x"]
    assert found == number and isinstance(found, type(number))


def test_configs_of_other_writers(tmp_path):
    """public-reports C 18 config-words: tabs in JSON, dotted keys, a section of comments."""
    path = tmp_path / "own"
    path.write_text(
        '{\n\t"training": {\n\t\t"num_train_steps": 3},\n\t"logging": {"run_name": "a\\tb:'
        ' \\"c\\""}\n}\n'
    )
    assert read_yaml(path) == {
        "training": {"num_train_steps": 3},
        "logging": {"run_name": 'a\tb: "c"'},
    }
    path.write_text(
        "training.num_train_steps: 7\nlogging.wandb.mode: offline\ntraining:\n  # seed: 3\n"
    )
    assert read_yaml(path) == {
        "training": {"num_train_steps": 7},
        "logging": {"wandb": {"mode": "offline"}},
    }
    path.write_text("training.seed: 7\ntraining:\n  seed: 3\n")
    with pytest.raises(UserError, match="each key once"):
        read_yaml(path)
