"""Every command that docs/migration.md gives to users of MM-LDLM works; where it needs a cluster,
a download or days, its checks pass or its words are read.
"""

from __future__ import annotations

import re
import shlex

import numpy as np
import pytest

from tests.support.helpers import ROOT
from tests.trials.harness import SLOW, mmldlm, refuses, succeeds

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
SPANS = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", PAGE)]
COMMANDS = sorted(
    {
        span
        for span in SPANS
        if re.match(r"mmldlm \w", span) and (" RUN" in span or "STORE" in span or "--" in span)
    }
)
NO_STORE_OF_IMAGES = ("image_text_continuous", "image_text_discrete")
DEAR = ("sanity", "evaluate", "plot", "report", "sample unconditional")  # over three seconds
OPEN = ("mmldlm convert --to model.pt", "mmldlm prepare --layout files", "mmldlm config --keys")
ELSEWHERE = ("launch", "prepare", "preflight")  # hosts, a download
STS = "".join(
    f"main-captions\tMSRvid\t2012test\t{i:04d}\t{i % 6}.0\tThe cat sees {i}.\tA dog paints {i}.\n"
    for i in range(12)
)


def named(command):
    slow = command.startswith(tuple(f"mmldlm {verb}" for verb in DEAR))
    return pytest.param(command, marks=SLOW if slow else (), id=command[7:60])


@pytest.mark.parametrize("command", [named(text) for text in COMMANDS if text not in OPEN])
def test_a_command_of_the_page_works(command, trial_store, trial_run, tmp_path):
    np.save(tmp_path / "X.npy", np.load(next(trial_store.rglob("*latents*.npy")))[0])
    (tmp_path / "sts-dev.csv").write_text(STS, encoding="utf-8")
    for kind in ("texts", "latents"):
        (tmp_path / "FOLDER" / kind / "train").mkdir(parents=True)
    for i in range(8):
        (tmp_path / f"FOLDER/texts/train/{i}.txt").write_text(f"Text {i}.", encoding="utf-8")
        np.save(tmp_path / f"FOLDER/latents/train/{i}.npy", np.ones(4, np.float32) + i)
    names = {"STORE": trial_store, "RUN2": trial_run, "RUN": trial_run, "OUT": tmp_path / "OUT"}
    words = []
    for word in shlex.split(command)[1:]:
        makes = words and words[0] == "pack" and word == "STORE"
        name = re.search(r"\b(STORE|RUN2|RUN|OUT)\b", "" if makes else word)
        words.append(word.replace(name[0], str(names[name[0]])) if name else word)
    verb = words[0]
    if verb in ELSEWHERE:
        # Read, and ended by the first thing that is missing here.
        code = mmldlm(*words, "--max-samples=no" if verb == "prepare" else "model.none=1")
        refuses(code, "whole number" if verb == "prepare" else "model.none|hostfile|not found")
    elif verb == "train":
        checked = [word for word in words[1:] if word not in ("--nproc", "2")]
        if any(name in words for name in NO_STORE_OF_IMAGES):
            succeeds(mmldlm("config", "--keys", *checked, cwd=tmp_path))
        else:
            succeeds(mmldlm("config", "--check", *checked, cwd=tmp_path))
    else:
        once = ["--once"] if verb == "monitor" and "--once" not in words else []
        succeeds(mmldlm(*words, *once, cwd=tmp_path, timeout=120))


def test_the_steps_of_the_old_guide_get_a_note(trial_run, tmp_path):
    words = ("sample", "t2l", "--checkpoint", trial_run, "--text", "A cat.", "--output-dir")
    found = mmldlm(*words, tmp_path / "a", "--num-steps", "3", cwd=tmp_path)
    succeeds(found, "note: a text determines its embedding")
    assert "note: a text" not in mmldlm(*words, tmp_path / "b", cwd=tmp_path).output
