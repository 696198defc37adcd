"""The first hours of a new user: own data, ends of commands, the model in Python, an own task,
help, typing errors.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys

import numpy as np
import pytest

from tests.trials.harness import (
    ROOT,
    SLOW,
    installed_environment,
    loaded_model,
    mmldlm,
    refuses,
    shell,
    succeeds,
    tiny_run,
    train_rank,
)
from tests.trials.test_config_values import GOOD_TASK

SENTENCES = [
    f"The {('cat', 'dog', 'bird')[i % 3]} sees house number {i}, near the river."
    for i in range(40)
]


def manifest(folder) -> dict:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


# -- own data -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "separator", [",", pytest.param("\t", marks=SLOW), pytest.param(";", marks=SLOW)]
)
def test_a_table_of_texts_is_a_corpus(tmp_path, separator):
    path = tmp_path / ("c.tsv" if separator == "\t" else "c.csv")
    rows = [f'{i}{separator}"{text}"' for i, text in enumerate(SENTENCES)]
    path.write_text("\n".join([f"id{separator}text", *rows]) + "\n", encoding="utf-8")
    succeeds(mmldlm("prepare", path, "--text-field", "text", "--output-dir", tmp_path / "S"))
    assert manifest(tmp_path / "S")["corpus"]["kept"] == len(SENTENCES)


@pytest.mark.parametrize("kind", ["npy", pytest.param("npz", marks=SLOW)])
def test_texts_and_one_file_of_latents_are_a_store(tmp_path, kind):
    (tmp_path / "texts.txt").write_text("\n".join(SENTENCES) + "\n", encoding="utf-8")
    latents = np.random.default_rng(0).standard_normal((len(SENTENCES), 8)).astype(np.float32)
    (
        np.save(tmp_path / "E.npy", latents)
        if kind == "npy"
        else np.savez(tmp_path / "E.npz", latents=latents)
    )
    words = ("--latents", tmp_path / f"E.{kind}", "--output-dir", tmp_path / "S")
    succeeds(mmldlm("pack", tmp_path / "texts.txt", *words))
    stored = [
        row
        for part in ("train", "validation")
        for row in np.load(tmp_path / "S" / part / "latents.npy")
    ]
    assert len(stored) == len(SENTENCES) and all(
        any(np.allclose(row, own) for own in latents) for row in stored
    )


def test_a_count_of_what_pack_read_is_no_dict_of_python(tmp_path):
    """newcomer 2: "found: 0; {'files': 2, 'read': 1, ...}"."""
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "E.npy", np.zeros((9, 4), np.float32))
    (tmp_path / "in" / "E.txt").write_text("\n".join(SENTENCES[:9]), encoding="utf-8")
    result = mmldlm("pack", tmp_path / "in", "--output-dir", tmp_path / "S")
    refuses(result)
    assert "{'" not in result


# -- ends of commands -----------------------------------------------------------------------------


@SLOW
def test_prepare_ends_with_the_command_that_trains(tmp_path):
    """newcomer 2: it named `mmldlm config`, which prints 130 lines."""
    (tmp_path / "c.txt").write_text("\n".join(SENTENCES) + "\n", encoding="utf-8")
    result = mmldlm("prepare", tmp_path / "c.txt", "--output-dir", tmp_path / "S")
    succeeds(result)
    assert re.search(rf"next:\s+mmldlm train .*{tmp_path}/S", result.output), result.output[-600:]


def test_a_training_ends_with_done_where_and_what_next(trial_store, tmp_path):
    result = train_rank(*tiny_run(trial_store, tmp_path, "r"))
    succeeds(result)
    end = "\n".join(result.output.splitlines()[-4:])
    assert "done" in end and str(tmp_path / "r") in end and "mmldlm convert" in end, end


@SLOW
def test_a_learning_rate_that_jumps_on_resume_is_said(trial_store, tmp_path):
    """newcomer 2; public-reports A longer_schedule_after_resume."""
    words = ("optimizer.schedule=cosine", "optimizer.min_lr=1e-6", "logging.save_freq=6")
    succeeds(train_rank(*tiny_run(trial_store, tmp_path, "r", *words)))
    more = ("training.num_train_steps=9", "training.resume=auto")
    resumed = train_rank(*tiny_run(trial_store, tmp_path, "r", *words, *more))
    succeeds(resumed, "num_train_steps: 6 -> 9", "learning rate rises from 1e-06 to")


@SLOW
def test_evaluate_begins_with_one_sentence(trial_model, trial_store):
    words = ("--num-samples", 4, "--control-samples", 2, "--num-steps", 2)
    result = mmldlm(
        "evaluate", "--checkpoint", trial_model, "--data", trial_store, *words, timeout=120
    )
    succeeds(result)
    assert re.search(r"the model (ignores|uses|hardly uses) its embedding", result.output), (
        result.output[-3000:]
    )


@SLOW
def test_an_interrupted_evaluation_says_what_it_has(trial_model, trial_store, tmp_path):
    """newcomer 7: "interrupted", exit 1."""
    evaluate = f"{os.path.dirname(sys.executable)}/mmldlm evaluate --checkpoint {trial_model}"
    log = tmp_path / "log"
    # A job in the background ignores SIGINT.
    command = (
        f"{evaluate} --data {trial_store} --num-steps 100000 >{log} 2>&1 & p=$!;"
        f" until grep -q gain {log}; do kill -0 $p || exit 9; sleep .05; done;"
        f" kill -TERM $p; wait $p; code=$?; cat {log}; exit $code"
    )
    result = shell(command)
    assert result.code not in (0, 9) and re.search("gain|cosine", result.output), result.output[
        -2000:
    ]


@SLOW
def test_a_killed_rank_is_followed_by_how_to_go_on(trial_store, tmp_path):
    """newcomer 4: after a killed rank no mention of training.resume=auto."""
    words = tiny_run(
        trial_store, tmp_path, "r", "engine.kind=ddp", "training.num_train_steps=100000"
    )
    command = " ".join(
        f"'{word}'" for word in (sys.executable, "-m", "mmldlm.cli", "train", "--nproc", 2, *words)
    )
    kill = f"until [ -e {tmp_path}/r/latest ]; do sleep .2; done; kill -9 $(pgrep -n -P $p)"
    result = shell(f"{command} & p=$!; {kill}; wait $p", timeout=200)
    assert result.code == 1 and "training.resume=auto" in result, result.output[-2000:]


def test_a_run_of_a_preset_is_named_after_it():
    """newcomer 2: the default name was `mmldlm` for all presets, and a second preset met the first
    one's folder.
    """
    succeeds(mmldlm("config", "--config-name", "tiny"), "run_name: tiny")


# -- the model in Python --------------------------------------------------------------------------


@SLOW
def test_the_tokenizer_of_a_converted_folder_loads_with_transformers(trial_model):
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(trial_model)("A cat sleeps.")["input_ids"]


def test_a_model_loads_with_one_import(trial_model):
    import mmldlm as package

    model = package.load(trial_model)
    assert len(model.decode(model.embed(["A cat sleeps."]))) == 1


@SLOW
def test_a_device_that_is_not_there_is_named_in_python(trial_model):
    """newcomer 3: a raw AssertionError of torch's."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    refuses(loaded_model(trial_model, device="cuda"), "cuda")


# -- an own task ----------------------------------------------------------------------------------

LEAK = GOOD_TASK.replace(
    "x = torch.tensor(samples[ids % len(samples)], dtype=torch.float32)",
    """
        rows = [samples[i][: lengths[i]] for i in ids]
        x = torch.zeros(len(rows), max(map(len, rows)), 4)
        for row, values in enumerate(rows):
            x[row, : len(values)] = torch.tensor(values)""",
).replace(
    "np.ones((32, 4)), np.ones(32, np.int32)",
    "np.random.default_rng(0).random((32, 9, 4), np.float32), np.arange(32, dtype=np.int32) %"
    " 8 + 2",
)


@SLOW
def test_sanity_finds_padding_that_leaks(tmp_path):
    """newcomer 4: the loss of a sample depends on the longest one of its micro-batch, and 17
    checks passed.
    """
    for name, source in (("leak", LEAK), ("whole", LEAK.replace("max(map(len, rows))", "9"))):
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    words = ("training.train_batch_size=8", "logging.save_dir=runs", "engine.kind=single",
             "training.dtype=fp32", "--overfit-steps", "2", "--max-steps", "1")  # fmt: skip
    result = mmldlm("sanity", "task=leak:T", *words, cwd=tmp_path)
    assert result.code == 1 and re.search("FAIL.*(padding|micro-batch)", result.output), (
        result.output[-3000:]
    )
    whole = mmldlm("sanity", "task=whole:T", *words, cwd=tmp_path)
    assert not re.search("FAIL.*(padding|micro-batch)", whole.output)


def test_a_task_without_sizes_is_told_what_is_missing(tmp_path):
    """Task.model_sizes is not written; the note sends its author to the data."""
    named = "    def names_data(self, config): return True\n    def open_data"
    (tmp_path / "own.py").write_text(
        GOOD_TASK.replace("    def open_data", named), encoding="utf-8"
    )
    succeeds(mmldlm("config", "task=own:T", cwd=tmp_path), "parameters: .*model_sizes")


def test_the_docs_of_tasks_have_a_skeleton_with_its_imports():
    """newcomer 4; that each sample stands alone is a rule."""
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    assert "from mmldlm.tasks.base import" in text and re.search(r"\n8\. \*\*", text)


# -- help and typing errors -----------------------------------------------------------------------


def test_a_misspelt_verb_gets_a_proposal():
    refuses(mmldlm("trian"), "did you mean.*train")


def test_an_unknown_option_is_not_hidden_behind_the_usage():
    """newcomer 7: 20 lines of usage before the error."""
    result = mmldlm("sample", "l2t", "--chekpoint", "x")
    refuses(result, "--chekpoint")
    assert len(result.output.splitlines()) < 6, result.output


@pytest.mark.parametrize("words", [("sample", "l2t"), pytest.param(("prepare",), marks=SLOW),
                                   pytest.param(("evaluate",), marks=SLOW)])  # fmt: skip
def test_help_has_groups(words):
    found = mmldlm(*words, "--help", env={"COLUMNS": "80"})
    succeeds(found)
    titles = [line for line in found.output.splitlines() if re.fullmatch(r"\S.*:", line)]
    assert titles[0].lower().startswith(("common", "usage")) and len(titles) > 3, titles


@pytest.mark.parametrize("verb", ["convert", "sample", "prepare"])
def test_help_fits_a_terminal(verb):
    """newcomer 8."""
    found = mmldlm(verb, "--help", env={"COLUMNS": "80"})
    succeeds(found)
    assert max(map(len, found.output.splitlines())) <= 80


def test_the_readme_says_what_to_do_with_own_data():
    """newcomer 1: prepare, train, convert and sample in one block, and the checked way to many
    nodes first.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?:^    .*\n)+", text, re.M)
    assert any(
        all(f"mmldlm {verb}" in block for verb in ("prepare", "train", "convert", "sample"))
        for block in blocks
    )
    assert text.index("mmldlm launch") < text.index("deepspeed --hostfile")


# -- machines and nodes ---------------------------------------------------------------------------


@SLOW
def test_a_lock_of_a_kernel_that_a_cpu_never_builds_does_not_stop_it(trial_store, tmp_path):
    """newcomer 5: JIT001 failed `launch` on a CPU machine for a lock of fused_adam."""
    (tmp_path / "ext" / "fused_adam").mkdir(parents=True)
    (tmp_path / "ext" / "fused_adam" / "lock").touch()
    os.utime(tmp_path / "ext" / "fused_adam" / "lock", (1, 1))
    words = (
        "preflight",
        "--level",
        "1",
        "--only",
        "JIT001",
        "--nproc",
        "1",
        *tiny_run(trial_store, tmp_path, "r"),
    )
    result = mmldlm(
        *words, env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "ext"), "CUDA_VISIBLE_DEVICES": ""}
    )
    assert result.code == 0, result.output


def test_the_launcher_script_names_a_host_that_is_not_there(tmp_path):
    """newcomer B1: an unknown host was followed by ten minutes of silence."""
    says = 'echo started "$@"'
    venv = installed_environment(
        tmp_path / "v", {"deepspeed": says, "torchrun": says, "mmldlm": "exit 0"}
    )
    (tmp_path / "hosts").write_text(
        f"{socket.gethostname()} slots=1\nno-such-host.invalid slots=1\n", encoding="utf-8"
    )
    own = {
        "MMLDLM_VENV": str(venv),
        "PATH": f"{venv}/bin:{os.environ['PATH']}",
        "HOSTFILE": "hosts",
        "MASTER_ADDR": "127.0.0.1",
        "NNODES": None,
        "RANK": None,
    }
    refuses(
        shell(f"bash {ROOT}/launchers/multi_node.sh", cwd=tmp_path, env=own),
        "no-such-host.invalid",
    )


@SLOW
def test_what_may_not_be_read_is_not_called_damaged(trial_model, tmp_path):
    """newcomer 7: an unreadable .npy was "not a .npy file", an unreadable model "copy the file
    again".
    """
    import shutil

    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("another user needs root and setpriv")
    own = shutil.copytree(trial_model, tmp_path / "model")
    np.save(tmp_path / "E.npy", np.zeros((1, 384), np.float32))
    (own / "model.safetensors").chmod(0), (tmp_path / "E.npy").chmod(0)
    lines = (("sample", "l2t", "--checkpoint", trial_model, "--latent-file", tmp_path / "E.npy"),
             ("sample", "t2l", "--checkpoint", own, "--text", "x"))  # fmt: skip
    for words in lines:
        command = [sys.executable, "-m", "mmldlm.cli", *words, "--output-dir", tmp_path / "o"]
        result = shell(
            ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--clear-groups", *command]
        )
        assert result.code in (1, 2) and "ermission" in result, result.output
        assert "copy the file again" not in result and "numpy.save" not in result


@SLOW
def test_the_package_describes_itself():
    """newcomer 6: METADATA had no README, and a wheel has no ds_configs/ to look at."""
    found = shell([sys.executable, "setup.py", "--long-description"], cwd=ROOT)
    assert found.code == 0 and "mmldlm train" in found
