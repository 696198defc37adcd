"""Names of MM-LDLM, RadioDiff and LMOL are answered with the names here, and the page about moving
lists the same.
"""

from __future__ import annotations

import re

import pytest

from mmldlm import cli
from mmldlm.config import earlier_systems
from mmldlm.config.load import all_keys, preset_names
from mmldlm.errors import UserError
from mmldlm.tasks.registry import load_config
from mmldlm.tasks.translation.config import TranslationConfig
from tests.support.helpers import ROOT

TODAY = {key for key, _, _ in all_keys(TranslationConfig)}
PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")


def test_a_key_is_an_error_that_names_what_replaces_it():
    for key, new in earlier_systems.KEYS.items():
        with pytest.raises(UserError) as error:
            load_config("tiny", None, [f"{key}=1"])
        found = str(error.value)
        assert f"{key} (now {new})" in found or f"{key} is now {new})" in found


def test_the_replacements_of_keys_exist():
    """The first word of each hint, if it is a key."""
    hints = [*earlier_systems.KEYS.values(), *earlier_systems.OPTIONS.values()]
    hints += [hint.replace("{}", "x") for hint in earlier_systems.VARIABLES.values()]
    matches = [re.match(r"[a-z_]+\.[a-z_0-9]+(?![\w/])", hint) for hint in hints]
    for key in {match[0] for match in matches if match}:
        assert key in TODAY, key


@pytest.mark.parametrize("name", earlier_systems.PRESETS)
def test_a_preset_is_an_error_that_names_ours(name):
    for spelling in (name, f"{name}.yaml"):
        with pytest.raises(UserError, match=f"now {earlier_systems.PRESETS[name]}"):
            load_config(spelling)
    assert earlier_systems.PRESETS[name] in preset_names()


def test_a_mode_is_an_error_that_names_ours():
    for old, new in earlier_systems.LOSS_TYPES.items():
        with pytest.raises(UserError, match=f"did you mean {new}"):
            load_config("tiny", None, [f"training.loss_type={old}"])


@pytest.mark.parametrize("name", earlier_systems.SCRIPTS)
def test_a_script_in_place_of_a_verb_is_answered_with_the_verb(name, capsys):
    for word in (name, f"scripts/utils/{name}.py", f"{name}.sh"):
        assert cli.main([word, "--checkpoint", "x"]) == 2
        assert f"(now {earlier_systems.SCRIPTS[name]})" in capsys.readouterr().err
    hint = earlier_systems.SCRIPTS[name].split()
    assert hint[0] != "mmldlm" or hint[1] in cli.VERBS


@pytest.mark.parametrize("option", earlier_systems.OPTIONS)
def test_an_option_is_an_error_that_names_what_replaces_it(option, capsys):
    verb = ["sample", "l2t"] if option in ("--npy_dir", "--steps", "--seq_len") else ["train"]
    with pytest.raises(SystemExit) as end:
        cli.main([*verb, option, "1"])
    found = " ".join(capsys.readouterr().err.split())
    assert end.value.code == 2 and f"{option} (now {earlier_systems.OPTIONS[option]})" in found


@pytest.mark.parametrize("name", earlier_systems.VARIABLES)
def test_a_variable_that_no_command_reads_is_named(name, monkeypatch, capsys):
    for variable in earlier_systems.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "3")
    word = earlier_systems.VARIABLES[name].format("3")
    code = cli.main(["config", "--keys", "--config-name=tiny"])
    captured = capsys.readouterr()
    if name.startswith("L2T_"):
        assert code == 2 and name in captured.err and f"write {word}" in captured.err
    elif word.startswith("--config-name"):
        assert captured.err == ""  # the command line has it
    else:
        assert (
            code == 0
            and captured.err == f"note: mmldlm config does not read {name}: write {word}\n"
        )


def test_a_variable_whose_key_is_given_is_not_named(monkeypatch, capsys):
    """The scripts in launchers/ turn their variables into words of `mmldlm config --check`."""
    monkeypatch.setenv("LEARNING_RATE", "1e-4")
    cli.main(["config", "--keys", "--config-name", "tiny", "optimizer.lr=1e-5"])
    assert capsys.readouterr().err == ""


def test_the_launchers_read_the_variables_that_the_notes_name():
    script = (ROOT / "launchers" / "_launch_args.sh").read_text(encoding="utf-8")
    rows = re.search(r"<<'KEYS'\n(.*?)KEYS\n", script, re.S)[1].splitlines()
    for name, key in (row.split() for row in rows):
        assert earlier_systems.VARIABLES[name] == f"{key}={{}}"


@pytest.mark.parametrize(
    "table", ["PRESETS", "SCRIPTS", "OPTIONS", "VARIABLES", "LOSS_TYPES", "KEYS"]
)
def test_the_page_about_moving_has_a_row_for_every_name(table):
    rows = "".join(
        line.split(" | ")[0] + "\n" for line in PAGE.splitlines() if line.startswith("| ")
    )
    # RadioDiff's keys are one section, of which the page has the common ones.
    names = [name for name in getattr(earlier_systems, table) if not name.startswith("trainer")]
    missing = [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", rows)]
    assert missing == []
