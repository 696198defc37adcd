"""Values of configs, options and environment variables: read as they were written, in bounds, or
refused by name.
"""

from __future__ import annotations

import json
import shutil

import pytest

from tests.trials.harness import SLOW, Result, mmldlm, refuses, succeeds, tiny_run, train_rank


def few(kinds, *shown):
    """Parameters of which the named ones run by default, and all with --trials.

    In-process tests have all of them.
    """
    return [
        pytest.param(kind, marks=() if kind in shown else SLOW, id=str(kind)[:40])
        for kind in kinds
    ]


def config(*words: object, **options: object) -> Result:
    return mmldlm("config", "--config-name", "tiny", *words, **options)


# -- public-reports C 1 own-config ----------------------------------------------------------------


@pytest.mark.parametrize("name", few(["0829", "12e4567", "- x: #"], "12e4567"))
def test_a_name_is_read_back_from_the_resolved_config(name, tmp_path):
    """public-reports C 1 own-config. tests/config/test_yaml_reader.py has all words."""
    printed = config(f"logging.run_name={name}")
    succeeds(printed)
    (tmp_path / "own.yaml").write_text(printed.output, encoding="utf-8")
    again = mmldlm("config", "--config", tmp_path / "own.yaml")
    succeeds(again)
    assert again.output == printed.output


@pytest.mark.parametrize("name", few(["0829", "12e4567", "1e5"], "0829"))
def test_a_run_whose_config_has_its_name_unquoted_goes_on(name, trial_run, trial_store, tmp_path):
    """public-reports C 1 own-config: runs of earlier releases."""
    run = tmp_path / name
    shutil.copytree(trial_run, run, symlinks=True)
    for file in (run / "config.yaml", *run.glob("checkpoints/*/config.yaml")):
        text = file.read_text(encoding="utf-8").replace("run_name: r0", f"run_name: {name}")
        file.write_text(text.replace(str(trial_run.parent), str(tmp_path)), encoding="utf-8")
    monitored = mmldlm("monitor", "--once", run)
    assert monitored.code in (0, 1) and "step 6/6" in monitored, monitored.output


@SLOW
@pytest.mark.parametrize("name", ["0829", "12e4567"])
def test_a_run_named_like_a_number_is_resumed(name, trial_store, tmp_path):
    """public-reports C 1 own-config."""
    succeeds(train_rank(*tiny_run(trial_store, tmp_path, name, "training.num_train_steps=2")))
    more = ("training.num_train_steps=4", "training.resume=auto")
    succeeds(train_rank(*tiny_run(trial_store, tmp_path, name, *more)), "step 4/4")
    more = ("training.num_train_steps=5", "training.resume=auto")
    succeeds(train_rank("--config", tmp_path / name / "config.yaml", *more), "step 5/5")
    checked = (
        "preflight",
        "--level",
        "0",
        "--only",
        "DATA001",
        "--config",
        tmp_path / name / "config.yaml",
    )
    succeeds(mmldlm(*checked, "--nproc", "1", "training.num_train_steps=6"))
    unquoted = (
        (tmp_path / name / "config.yaml").read_text(encoding="utf-8").replace(f"'{name}'", name)
    )
    for file in (
        tmp_path / name / "config.yaml",
        *(tmp_path / name).glob("checkpoints/*/config.yaml"),
    ):
        file.write_text(unquoted, encoding="utf-8")  # as earlier releases wrote it
    more = ("training.num_train_steps=6", "training.resume=auto")
    succeeds(train_rank("--config", tmp_path / name / "config.yaml", *more), "step 6/6")


# -- numbers --------------------------------------------------------------------------------------

OUT_OF_BOUNDS = {
    "public-reports C 14, bounds": [
        "optimizer.betas=[0.9, 1.0]",
        "training.seed=18446744073709551616",
        "engine.collective_timeout=1e300",
        "checkpoints.save_timeout=1e10",
        "training.grad_accum_steps=1000000000000",
        "optimizer.eps=2",
        "data.num_workers=1000000",
        "training.train_batch_size=1000000000",
        "optimizer.grad_clip_norm=1e-320",
        "data.prefetch_factor=1000000000",
        "stability.spike_window=1000000000000",
        "optimizer.muon_lr=-1",
    ],
    "trials-3 BAD 11, below": [
        "optimizer.betas=[-0.1, 0.95]",
        "training.seed=-1",
        "model.mask_token_id=-1",
        "model.pad_token_id=-5",
        "training.num_train_steps=0",
        "data.max_train_samples=-3",
        "model.hidden_size=0",
        "optimizer.ema_decay=1.0",
    ],
    "trials-3 BAD 17, not finite": [
        "loss.text_loss_weight=.inf",
        "model.token_embedding_scale=.inf",
        "latent_diffusion.timestep_shift=.inf",
        "optimizer.eps=.inf",
        "optimizer.lr=.nan",
        "optimizer.weight_decay=.inf",
        "engine.collective_timeout=.inf",
        "stability.spike_sigma=.inf",
        "training.loss_type_weights={l2t: .nan, t2l: 1.0}",
        "loss.text_loss_clamp=.inf",
        "latent_diffusion.min_snr_gamma=1e999",
        "data.mixture={a: .inf}",
        "logging.peak_tflops=.nan",
    ],
    "trials-3 BAD 18, no numbers": [
        "optimizer.lr=true",
        "training.train_batch_size=true",
        "training.seed='1_000'",
        'optimizer.min_lr="1e-5"',
        "training.grad_accum_steps=false",
        "optimizer.betas=[true, 0.9]",
        "data.mixture={a: true}",
        "training.profile=[1, true]",
        "data.max_validation_samples=true",
        "stability.loss_scale=yes",
        "training.loss_type_weights={l2t: '1'}",
        "checkpoints.keep_last=[2]",
    ],
    "trials-3 POOR 11, one spelling": [
        "training.num_train_steps=0x10",
        "optimizer.warmup_steps=1_000",
        "logging.save_freq=010",
        "model.n_blocks=0b1",
        "data.max_validation_samples=0x10",
        "optimizer.lr=1_0.5",
    ],
}


@pytest.mark.parametrize(
    "entries", few(["all of these entries", *OUT_OF_BOUNDS], "all of these entries")
)
def test_numbers_that_no_run_can_use_are_refused_by_key(entries):
    """public-reports C 14, trials-3 BAD 11, 17, 18 and POOR 11: every key is named."""
    words = OUT_OF_BOUNDS.get(entries) or [
        word for words in OUT_OF_BOUNDS.values() for word in words
    ]
    # A later word for a key wins.
    words = list({word.partition("=")[0]: word for word in words}.values())
    result = config(*words)
    refuses(result)
    for word in words:
        assert f"{word.partition('=')[0]}" in result, f"{word} was accepted:\n{result.output}"


DO_NOT_FIT = {
    "model.mlp_ratio=1e-6": "model.mlp_ratio=1e-06 .*at least",  # trials-3 BAD 11
    "model.mlp_ratio=0.015": "model.mlp_ratio",
    # trials-3 POOR 12
    "model.vocab_size=100 model.mask_token_id=100": r"model.mask_token_id=100 .*vocabulary",
    "model.vocab_size=100 model.pad_token_id=10000000": "model.pad_token_id=10000000",
    "training.train_batch_size=1000000 training.grad_accum_steps=1000": "1,000,000,000",
    "logging.run_name=a\nb": "run_name",  # trials-3 POOR 7
    "logging.run_name=\x1b[31mred": "run_name",
    # public-reports B 35 hydra-dict
    "training.loss_type_weights={l2t:0.7,t2l:0.3}": (
        r"blank after the colon: write \{l2t: 0.7, t2l: 0.3\}"
    ),
}


@pytest.mark.parametrize("word", few(DO_NOT_FIT, "model.mlp_ratio=1e-6"))
def test_values_that_do_not_fit_are_refused(word):
    separator = "\0" if "run_name" in word or "{" in word else " "
    refuses(config(*word.split(separator)), DO_NOT_FIT[word])


def test_what_people_write_for_numbers_is_read():
    """trials-3 BAD 18: what worked, and is right, goes on working."""
    words = [
        "training.num_train_steps=1e3",
        "optimizer.lr=1E-4",
        "optimizer.grad_clip_norm=1",
        "optimizer.min_lr=.5e-6",
        "training.compile_model=yes",
        "training.loss_type_weights={l2t: 1, t2l: 2}",
        "optimizer.betas=[0, 0.999]",
        "training.profile=[2,3]",
        "logging.plot=off",
        "data.max_train_samples=+5",
        "training.seed=9223372036854775807",
    ]
    found = config(*words)
    succeeds(
        found,
        "num_train_steps: 1000",
        "lr: 0.0001",
        "grad_clip_norm: 1.0",
        "compile_model: true",
        "l2t: 1.0",
        "max_train_samples: 5",
        "seed: 9223372036854775807",
        "plot: false",
    )


OPTIONS = [
    "sample t2l --checkpoint R --text hello --output-dir N --seed 18446744073709551616",
    "sample t2l --checkpoint R --text hello --output-dir N --seed 9223372036854775808",
    "sample l2t --checkpoint R --data S --output-dir N --num-samples 1000000000000",
    "sample l2t --checkpoint R --data S --output-dir N --temperature inf",
    "sample l2t --checkpoint R --data S --output-dir N --guidance nan",
    "sample unconditional --checkpoint R --output-dir N --num-samples 1_000",
    "sample t2l --checkpoint R --text x --output-dir N --eta 1e400",
    "evaluate --checkpoint R --data S --seed 99999999999999999999",
    "evaluate --checkpoint R --data S --num-samples 1",
    "evaluate --checkpoint R --data S --guidance inf",
    "hypotheses --checkpoint R --data S --output-dir N --seed -1",
    "hypotheses --checkpoint R --data S --output-dir N --num-steps 0",
    "monitor R --once --window -5",
    "monitor R --interval -1",
    "monitor R --stall-seconds nan",
    "launch --level 0 --retries -1",
    "launch --level 0 --grace 1e300",
    "preflight --master_port 70000",
    "preflight --nproc 0",
    "train --nproc -1",
    "config --world-size 0",
    "prepare c.txt --output-dir N --retries -1",
    "prepare c.txt --output-dir N --seed 99999999999999999999",
    "prepare c.txt --output-dir N --max-quarantined 2",
    "prepare c.txt --output-dir N --max-tokens 0",
    "pack d --output-dir N --seed -1",
    "convert A B --world 0",
    "convert A B --sub-group-size -1",
    "replay R last --samples -1",
]


@pytest.mark.parametrize("line", few(OPTIONS, OPTIONS[0]))
def test_numbers_out_of_range_in_options_are_refused_by_name(line, tmp_path):
    """trials-3 BAD 11."""
    option, value = line.split()[-2:]
    refuses(
        mmldlm(*line.split(), cwd=tmp_path),
        rf"argument .*{option}.*: '{value}': a (whole|finite) number",
    )
    assert not (tmp_path / "N").exists()


# -- paths ----------------------------------------------------------------------------------------

PATH_KEYS = (
    "logging.save_dir",
    "engine.deepspeed_config",
    "training.resume",
    "training.init_from",
    "data.hypotheses",
    "tokenizer.name",
)


@pytest.mark.parametrize(
    "path, where",
    [
        ("~/a b/x", "override"),
        pytest.param("$HOME/a b/x", "override", marks=SLOW),
        ("${HOME}/a b/x", "yaml"),
        pytest.param("~/a b/x", "yaml", marks=SLOW),
    ],
)
def test_home_and_variables_are_expanded_in_every_path_key(path, where, tmp_path):
    """public-reports B 24 tilde, C 15 variables-in-paths, newcomer B3."""
    values = {key: path for key in PATH_KEYS if key != "data.hypotheses"}
    if where == "override":
        words = [f"{key}={value}" for key, value in values.items()]
    else:
        (tmp_path / "own.json").write_text(json.dumps(values))
        words = ["--config", tmp_path / "own.json"]
    found = config(*words, cwd=tmp_path, env={"HOME": str(tmp_path / "own")})
    succeeds(found)
    assert found.output.count(f"{tmp_path}/own/a b/x") == len(values), found.output
    values = found.output.replace("$schema", "")
    assert "~" not in values and "$" not in values


@SLOW
@pytest.mark.parametrize(
    "path",
    ["$NOT_SET_HERE/x", "${NOT_SET_HERE}/x", "${HOME:-x}/y", "${oc.env:HOME}/x", "~nobody_here/x"],
)
def test_what_cannot_be_expanded_is_refused(path, tmp_path):
    """public-reports C 15 variables-in-paths."""
    refuses(config(f"logging.save_dir={path}", cwd=tmp_path), "logging.save_dir")
    refuses(config(f"data.mixture={{'{path}': 1.0}}", cwd=tmp_path), "data.mixture")
    lines = (
        ["sample", "l2t", "--output-dir", "o", "--checkpoint", path],
        ["prepare", "c.txt", "--output-dir", path],
        ["convert", "a", path],
        ["pack", path, "--output-dir", "o"],
        ["train", "--config", path],
        ["preflight", "--hostfile", path],
        ["monitor", path],
    )
    for line in lines:
        refuses(mmldlm(*line, cwd=tmp_path), "argument ")
    assert not list(tmp_path.iterdir())


@SLOW
def test_names_with_a_dollar_are_what_they_say_where_they_exist(tmp_path):
    """public-reports C 15: shells expand a pattern to such names, and a run's config has absolute
    ones.
    """
    (tmp_path / "a$b").mkdir()
    succeeds(config(f"logging.save_dir={tmp_path}/a$b/runs"), r"save_dir: .*a\$b/runs")
    succeeds(config("logging.save_dir=a$b", cwd=tmp_path), r"save_dir: a\$b")
    succeeds(
        config("logging.save_dir=cost$5", "logging.run_name=a$$b$HOME"),
        r"save_dir: cost\$5",
        r"a\$\$b\$HOME",
    )


@SLOW
def test_outputs_are_in_the_home_folder(corpus, trial_store, tmp_path):
    """public-reports B 24 tilde, C 15 variables-in-paths."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir(), work.mkdir()
    environment = {"HOME": str(home), "HF_HOME": None}
    words = ("--tokenizer", "train", "--encoder", "minilm")
    prepared = mmldlm(
        "prepare", corpus, "--output-dir=~/S", *words, cwd=work, env=environment, timeout=120
    )
    if prepared.code == 0:
        assert (home / "S" / "manifest.json").is_file()
    trained = train_rank(*tiny_run(trial_store, "$HOME/runs", "a"), cwd=work, env=environment)
    succeeds(trained)
    assert (home / "runs" / "a" / "latest").exists() and not list(work.iterdir())


def test_the_same_folder_in_another_spelling_gives_no_note(trial_run, trial_store, tmp_path):
    """newcomer B2. tests/config/test_resume_compat.py has paths on which the weights depend."""
    shutil.copytree(trial_run, tmp_path / "r0", symlinks=True)
    (tmp_path / "link").symlink_to(trial_store)
    words = tiny_run(
        trial_store, "./", "r0", "training.resume=auto", "data.latent_data_root=./link//"
    )
    resumed = train_rank(*words, cwd=tmp_path)
    succeeds(resumed, "nothing to do")
    assert "changed since" not in resumed


# -- public-reports C 18 config-words -------------------------------------------------------------


CONFIGS = (
    '{\n\t"training": {\n\t\t"num_train_steps": 3\n\t}\n}\n',
    "training.num_train_steps: 3\ndata:\n  # none\n",
    "\ufefftraining:\n  num_train_steps: 3\n",
)


@pytest.mark.parametrize("text", few(CONFIGS, CONFIGS[0]))
def test_configs_of_other_writers_are_read(text, tmp_path):
    """public-reports C 18 config-words."""
    (tmp_path / "own").write_text(text, encoding="utf-8")
    succeeds(config("--config", tmp_path / "own"), "num_train_steps: 3")


# -- DeepSpeed JSON and schedules -----------------------------------------------------------------

STAGE = '{"zero_optimization": {"stage": 2, '
JSON_FILES = {
    "nested": (b"[" * 100_000, "nested too deep|object"),
    "not UTF-8": ('{\n "comment": "Größe"}'.encode("latin-1"), "UTF-8"),
    "UTF-16": ('{"zero_optimization": {}}'.encode("utf-16"), "UTF-8"),
    "1e999": (f'{STAGE}"reduce_bucket_size": 1e999}}}}'.encode(), "1e999"),
    "NaN": (f'{STAGE}"reduce_bucket_size": NaN}}}}'.encode(), "NaN"),
    "400 digits": (f'{STAGE}"allgather_bucket_size": {"9" * 400}}}}}'.encode(), "9999"),
    "5000 digits": (f'{STAGE}"allgather_bucket_size": {"9" * 5000}}}}}'.encode(), "9999"),
    "bucket 0": (f'{STAGE}"reduce_bucket_size": 0}}}}'.encode(), "reduce_bucket_size"),
    "bucket -1": (f'{STAGE}"allgather_bucket_size": -1}}}}'.encode(), "allgather_bucket_size"),
    "bucket true": (f'{STAGE}"reduce_bucket_size": true}}}}'.encode(), "reduce_bucket_size"),
    "fp16 power": (b'{"fp16": {"initial_scale_power": -Infinity}}', "Infinity"),
    "a list": (b"[1]", "list"),
    "cut": (b'{"zero_optimization": {"sta', "object"),
    "empty": (b"", "object"),
}


@pytest.mark.parametrize("kind", few(JSON_FILES, "1e999"))
def test_a_deepspeed_json_that_cannot_be_used_is_refused(kind, tmp_path):
    """trials-3 BAD 20, public-reports B 22 ds-json-bom."""
    content, says = JSON_FILES[kind]
    (tmp_path / "ds.json").write_bytes(content)
    refuses(config("--check", "--deepspeed_config", tmp_path / "ds.json"), "ds.json", says)


@SLOW
def test_a_deepspeed_json_with_a_byte_order_mark_is_read(tmp_path, trial_store):
    """public-reports B 22 ds-json-bom."""
    (tmp_path / "ds.json").write_bytes(
        b'\xef\xbb\xbf{\r\n  "zero_optimization": {"stage": 1}\r\n}\r\n'
    )
    words = ("--deepspeed_config", tmp_path / "ds.json", f"data.latent_data_root={trial_store}")
    succeeds(config("--check", *words, f"logging.save_dir={tmp_path}"))


# -- environment ----------------------------------------------------------------------------------


VARIABLES = (
    "WORLD_SIZE=x",
    "WORLD_SIZE=0",
    "WORLD_SIZE=1.0",
    "RANK=-1",
    "RANK=3",
    "LOCAL_RANK=one",
    "SLURM_RESTART_COUNT=x",
    "MASTER_PORT=99999",
    "LOCAL_WORLD_SIZE=٣",
    "GROUP_RANK=[0]",
    "DEEPSPEED_TIMEOUT=30m",
)


@pytest.mark.parametrize("variable", few(VARIABLES, "WORLD_SIZE=x", "SLURM_RESTART_COUNT=x"))
def test_a_variable_that_is_no_number_is_refused_by_name(variable, trial_store, tmp_path):
    """trials-3 BAD 23."""
    name, _, value = variable.partition("=")
    result = train_rank(*tiny_run(trial_store, tmp_path, "env"), env={name: value})
    refuses(result, f"{name}=")
    assert not (tmp_path / "env").exists()


# -- tasks of the user ----------------------------------------------------------------------------

GOOD_TASK = """
import numpy as np, torch
from pathlib import Path
from mmldlm.config.schema import Config
from mmldlm.data.batch import Batch
from mmldlm.data.run_data import RunData
from mmldlm.tasks.base import Metric, Task

class Data(RunData):
    def fingerprint(self): return "x"

class Collator:
    def collate(self, batch, slots, samples, lengths):
        ids, real = batch.samples_at(slots)
        x = torch.tensor(samples[ids % len(samples)], dtype=torch.float32)
        return Batch(tensors={"x": x}, ids=ids, real=real, counts={"samples": len(batch.ids)},
                     num_tokens=int(real.sum()), epoch=batch.epoch, index=batch.index)

class T(Task):
    name = "own"
    config_class = Config
    sums = ("loss",)
    def open_data(self, config):
        x, n = np.ones((32, 4)), np.ones(32, np.int32)
        return Data(config=config, train=x, validation=x[:4], train_lengths=n, validation_lengths=n[:4])
    def build_model(self, data):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 1))
    def collator(self, data, seed=None): return Collator()
    def objective(self, config):
        def loss(module, batch):
            value = module(batch.tensors["x"]).square().sum() / batch.counts["samples"]
            return value, {"loss": value.detach()}
        return loss
"""  # noqa: E501
BROKEN_ON_IMPORT = {
    "exit 0": ("import sys\nsys.exit(0)\n", "own.py, line 2"),
    "exit with words": ("raise SystemExit('enough')\n", "enough.*own.py, line 1"),
    "os._exit": ("import os\n\nos._exit(0)\n", "own.py, line 3"),
    "from os import _exit": ("from os import _exit\n_exit(3)\n", "own.py, line 2"),
    "argparse": (
        "import argparse\nargparse.ArgumentParser().parse_args(['--x'])\n",
        "own.py, line 2",
    ),
    "error": ("1/0\n", "ZeroDivisionError.*own.py, line 1"),
    "syntax": ("def f(:\n", "own.py, line 1"),
    "bytes": ("x = '\0'\n", "own"),
    "missing package": ("\nimport nowhere_at_all\n", "nowhere_at_all"),
    "no class": ("X = 1\n", "None"),
    "a function": ("def T(): pass\n", "subclass of mmldlm.tasks.base.Task"),
    "no task": ("class T:\n    config_class = dict\n", "subclass of mmldlm.tasks.base.Task"),
    "config_class": (
        GOOD_TASK.replace("config_class = Config", "config_class = dict"),
        "config_class",
    ),
    "no config_class": (GOOD_TASK.replace("config_class = Config", ""), "config_class"),
    "no method": (GOOD_TASK.replace("def collator", "def no_collator"), "collator"),
    "no name": (GOOD_TASK.replace('name = "own"', ""), "name"),
    "sums": (GOOD_TASK.replace('("loss",)', '("nll",)'), "sums"),
    "metrics": (
        GOOD_TASK.replace('sums = ("loss",)', 'metrics = (Metric("a", "b", "samples"),)'),
        "metrics",
    ),
    "constructor": (
        GOOD_TASK + "    def __init__(self): self.x = {}['a']\n",
        "own.py, line 36|KeyError",
    ),
    "constructor that exits": (
        GOOD_TASK + "    def __init__(self): raise SystemExit(0)\n",
        r"sys.exit\(0\).*own.py",
    ),
}


@pytest.mark.parametrize("kind", few(BROKEN_ON_IMPORT, "exit 0", "os._exit"))
def test_a_task_that_cannot_be_imported_is_refused_with_file_and_line(kind, tmp_path):
    """trials-3 BAD 10."""
    source, says = BROKEN_ON_IMPORT[kind]
    (tmp_path / "own.py").write_text(source, encoding="utf-8")
    refuses(mmldlm("config", "task=own:T", cwd=tmp_path), says)


@SLOW
@pytest.mark.parametrize(
    "name", ["..own:T", ".own:T", "own.:T", "a b:T", "own/x:T", "own:", ":T", "own.py:T"]
)
def test_a_name_that_is_no_module_is_refused(name, tmp_path):
    """trials-3 BAD 10."""
    refuses(mmldlm("config", f"task={name}", cwd=tmp_path), "task")


BROKEN_LATER = {
    "a sum missing": (
        GOOD_TASK.replace('{"loss": value.detach()}', "{}"),
        "loss from the objective.*\n.*none",
        2,
    ),
    "a float": (
        GOOD_TASK.replace("value.detach()", "float(value)"),
        "loss from the objective.*\n.*float",
        2,
    ),
    "a vector": (
        GOOD_TASK.replace(".square().sum()", ".square()"),
        "the loss from the objective",
        2,
    ),
    "no samples": (
        GOOD_TASK.replace("train_lengths=n", "train_lengths=n[:0]"),
        "a sample for train",
        2,
    ),
    "no validation": (GOOD_TASK.replace("n[:4]", "n[:0]"), "a sample for validation", 2),
    "no data": (
        GOOD_TASK.replace("return Data(", "Data("),
        "a RunData from own:T.open_data\n.*None",
        2,
    ),
    "a list": (GOOD_TASK.replace("train_lengths=n", "train_lengths=list(n)"), "train_lengths", 2),
    "exit in open_data": (
        GOOD_TASK.replace("x, n = np", "raise SystemExit(0); x, n = np"),
        r"exit\(0\).*own.py",
        1,
    ),
    "exit in the model": (
        GOOD_TASK.replace("torch.manual_seed(0)", "raise SystemExit"),
        "sys.exit.*own.py, line",
        1,
    ),
}


@pytest.mark.parametrize("kind", few(BROKEN_LATER, "exit in the model"))
def test_a_task_that_does_not_do_what_it_declares_is_named(kind, tmp_path):
    """trials-3, further tracebacks: own tasks, beyond import; an exit code is never lost."""
    source, says, code = BROKEN_LATER[kind]
    (tmp_path / "own.py").write_text(source, encoding="utf-8")
    words = (
        "task=own:T",
        "engine.kind=single",
        "training.num_train_steps=2",
        "training.train_batch_size=4",
        "logging.save_dir=runs",
        "logging.plot=false",
    )
    refuses(train_rank(*words, cwd=tmp_path), says, code=code)


@pytest.mark.parametrize("sums", few(['("loss",)', '["loss"]'], '["loss"]'))
def test_the_task_of_these_trials_trains(sums, tmp_path):
    (tmp_path / "own.py").write_text(GOOD_TASK.replace('("loss",)', sums), encoding="utf-8")
    words = (
        "task=own:T",
        "engine.kind=single",
        "training.num_train_steps=2",
        "training.train_batch_size=4",
        "logging.save_dir=runs",
        "logging.plot=false",
    )
    succeeds(train_rank(*words, cwd=tmp_path), "step 2/2")
