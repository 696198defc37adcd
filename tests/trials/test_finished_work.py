"""What is trained, sampled or measured is kept: trackers, plots, full disks, files that vanish,
two calls at once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from tests.trials.harness import (
    SLOW,
    Result,
    mmldlm,
    records,
    refuses,
    shell,
    succeeds,
    tiny_run,
    train_rank,
)

# -- a tracker ------------------------------------------------------------------------------------

WANDB = """
import time
class Settings:
    def __init__(self, **keywords): pass
class Run:
    id = "x"
    def define_metric(self, *words, **keywords): pass
    def log(self, *words, **keywords): {log}
    def finish(self, exit_code=0): {finish}
def init(**keywords): {init}; return Run()
"""


def wandb(folder, source: str) -> dict[str, str]:
    """Write a package of the name wandb; return the environment in which it is found."""
    (folder / "wandb").mkdir(parents=True)
    (folder / "wandb" / "__init__.py").write_text(source, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise AttributeError('`np.float_` was removed')", "np.float_"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import no_such_package", "no_such_package"),
        ("", "without init and Settings"),
        ("def init(**keywords): pass", "without Settings"),
        (
            WANDB.format(log="pass", finish="pass", init="raise SystemExit(0)"),
            "logging.wandb.mode",
        ),
        (WANDB.format(log="pass", finish="pass", init="1 / 0"), "division"),
    ],
    ids=["attribute", "exit", "import", "empty", "half", "init-exit", "init-error"],
)
def test_a_tracker_that_does_not_start_is_refused_before_the_training(
    trial_store, tmp_path, source, words
):
    """public-reports A wandb_broken_import, wandb_shadowed."""
    environment = wandb(tmp_path / "site", source)
    result = train_rank(
        *tiny_run(trial_store, tmp_path, "r", "logging.wandb.mode=offline"), env=environment
    )
    refuses(result, words, "logging.wandb.mode")
    assert not (tmp_path / "r" / "checkpoints").exists() or not list(
        (tmp_path / "r" / "checkpoints").glob("step_*")
    )


HANG = "time.sleep(1000)"


@pytest.mark.parametrize(
    "stub",
    [
        {"finish": "raise SystemExit(1)", "log": "pass"},
        {"finish": "1 / 0", "log": "1 / 0"},
        pytest.param({"finish": HANG, "log": "pass"}, marks=SLOW),
        pytest.param({"finish": "pass", "log": HANG}, marks=SLOW),
    ],
    ids=["exit", "errors", "finish-hangs", "log-hangs"],
)
def test_a_tracker_never_changes_how_a_run_ends(trial_store, tmp_path, stub):
    """public-reports A wandb_finish_hangs, wandb_server_lost."""
    environment = wandb(tmp_path / "site", WANDB.format(init="pass", **stub))
    words = tiny_run(trial_store, tmp_path, "r", "logging.wandb.mode=offline")
    succeeds(train_rank(*words, env=environment, timeout=200), "warning: .*wandb")
    events = records(tmp_path / "r" / "events.jsonl")
    assert events[-1]["event"] == "end" and events[-1]["exit_code"] == 0
    assert (tmp_path / "r" / "latest").resolve().name == "step_00000006"


# -- plots ----------------------------------------------------------------------------------------


def test_a_plot_that_fails_is_a_warning(trial_store, tmp_path):
    """trials-3 BAD 4, the kind: an error of any kind in a plot."""
    (tmp_path / "r" / "plots").mkdir(parents=True)
    (tmp_path / "r" / "plots" / "loss.png").mkdir()
    succeeds(
        train_rank(*tiny_run(trial_store, tmp_path, "r", "training.num_train_steps=1")),
        "warning: no plot",
    )
    assert records(tmp_path / "r" / "events.jsonl")[-1]["event"] == "end"


@SLOW
def test_the_end_of_a_failed_run_is_an_event(trial_store, tmp_path):
    """trials-3 BAD 4, the kind: events.jsonl ends with how the run ended."""
    words = tiny_run(trial_store, tmp_path, "r", "training.num_train_steps=3")
    (tmp_path / "r" / "checkpoints").mkdir(parents=True)
    (tmp_path / "r" / "latest").mkdir()  # a save cannot move it
    result = train_rank(*words)
    assert result.code != 0
    last = records(tmp_path / "r" / "events.jsonl")[-1]
    assert (last["event"], last["exit_code"]) == ("end", result.code)


# -- files of the data that vanish in mid-run -----------------------------------------------------


@pytest.fixture(scope="module")
def image_store(tmp_path_factory):
    """A store of glyphs as codes, which has a codebook."""
    folder = tmp_path_factory.mktemp("images") / "G"
    words = [
        "prepare",
        "glyphs",
        "--faces",
        "1",
        "--image-size",
        "16",
        "--latents",
        "codes:kmeans:64",
    ]
    succeeds(mmldlm(*words, "--output-dir", folder, timeout=120))
    return folder


def train_and(change, words, run, timeout: float = 120):
    """Train, and call `change` once the log has a step."""
    ended = threading.Event()

    def wait():
        while not ended.is_set():
            log = run / "training_log.jsonl"
            if log.exists() and log.stat().st_size:
                return change()
            time.sleep(0.02)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        return train_rank(*words, timeout=timeout)
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("delete", "codebook.npy"),
        *(
            pytest.param("delete", name, marks=SLOW)
            for name in ("tokenizer", "manifest.json", "train", "validation")
        ),
        *(
            pytest.param("garble", name, marks=SLOW)
            for name in ("codebook.npy", "tokenizer", "manifest.json")
        ),
    ],
)
def test_a_save_needs_nothing_of_the_data(image_store, tmp_path, name, how):
    """trials-3 BAD 2."""
    store = tmp_path / "G"
    shutil.copytree(image_store, store)

    def change():
        if how == "delete":
            shutil.rmtree(store / name) if (store / name).is_dir() else (store / name).unlink()
            return
        files = [path for path in [store / name, *(store / name).rglob("*")] if path.is_file()]
        for path in files:
            path.unlink()  # the run may have mapped it
            path.write_bytes(b"garbled")

    words = [
        "--config-name",
        "image_text_discrete",
        "engine.kind=single",
        f"data.latent_data_root={store}",
        "training.num_train_steps=12",
        "optimizer.warmup_steps=2",
        "logging.save_freq=4",
        "logging.eval_freq=8",
        "training.train_batch_size=4",
        "data.max_validation_samples=4",
        f"logging.save_dir={tmp_path}",
        "logging.run_name=r",
        "data.num_workers=0",
        "model.hidden_size=32",
        "model.n_heads=2",
        "model.n_blocks=1",
        "model.cond_dim=32",
        "optimizer.muon_block_rows=16",
    ]
    result = train_and(change, words, tmp_path / "r")
    succeeds(result)
    saved = tmp_path / "r" / "latest"
    assert saved.resolve().name == "step_00000012"
    assert (saved / "codebook.npy").read_bytes() == (image_store / "codebook.npy").read_bytes()


# -- outputs --------------------------------------------------------------------------------------


def sample_words(model, out, *more) -> list:
    return ["sample", "t2l", "--checkpoint", model, "--text", "hello", "--output-dir", out, *more]


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 80 kB, and a function that fills it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")

    def fill():
        with open(disk / "fill", "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass

    yield disk, fill
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_keeps_the_samples_of_before(trial_model, tiny_disk):
    """trials-3 BAD 16 and POOR 1, newcomer 7: sample --overwrite."""
    disk, fill = tiny_disk
    words = sample_words(trial_model, disk / "o")
    succeeds(mmldlm(*words))
    before = content(disk / "o")
    fill()
    result = mmldlm(*words, "--overwrite", "--seed", 5)
    refuses(result, f"{disk}/o.*No space left on device", "free", code=1)
    assert content(disk / "o") == before
    (disk / "fill").unlink()
    succeeds(mmldlm(*words, "--overwrite", "--seed", 5))
    assert content(disk / "o") != before and set(content(disk / "o")) == set(before)


@pytest.mark.parametrize(
    "words",
    [
        ["plot", "{run}", "--out", "{out}.png"],
        ["verify-data", "{store}", "--plot", "{out}.png"],
        pytest.param(
            [
                "evaluate",
                "--checkpoint",
                "{model}",
                "--data",
                "{store}",
                "--num-samples",
                "4",
                "--control-samples",
                "2",
                "--num-steps",
                "2",
                "--html",
                "{out}.html",
            ],
            marks=SLOW,
        ),
        pytest.param(
            [
                "sanity",
                "--config-name",
                "tiny",
                "data.latent_data_root={store}",
                "--overfit-steps",
                "2",
                "--max-steps",
                "1",
                "--json",
                "{out}.json",
            ],
            marks=SLOW,
        ),
    ],
    ids=lambda words: words[0],
)
def test_a_full_disk_keeps_the_file_of_before(
    trial_run, trial_store, trial_model, tiny_disk, words
):
    """trials-3 BAD 16 and POOR 1, newcomer 7."""
    disk, fill = tiny_disk
    out = disk / f"p{words[-1][5:]}"
    out.write_text("an earlier result", encoding="utf-8")
    fill()
    places = dict(run=trial_run, store=trial_store, model=trial_model, out=disk / "p")
    refuses(
        mmldlm(*(word.format(**places) for word in words)),
        f"{out}.*No space left on device",
        code=1,
    )
    assert out.read_text(encoding="utf-8") == "an earlier result"


@pytest.mark.parametrize("kind", ["file", "dangling"])
def test_an_output_that_is_a_link_stays_one(trial_run, tmp_path, kind):
    """public-reports B 26 output-link, for files: what it leads to is written."""
    target, link = tmp_path / "big" / "p.png", tmp_path / "p.png"
    target.parent.mkdir()
    if kind == "file":
        target.write_text("an earlier picture", encoding="utf-8")
    link.symlink_to(target)
    succeeds(mmldlm("plot", trial_run, "--out", link))
    assert link.is_symlink() and target.read_bytes().startswith(b"\x89PNG")
    link.unlink()
    link.symlink_to(tmp_path / "gone" / "p.png")
    refuses(mmldlm("plot", trial_run, "--out", link), "whose folder does not exist")


def test_samples_into_a_folder_that_is_a_link(trial_model, tmp_path):
    """public-reports B 26 output-link, for samples."""
    (tmp_path / "big").mkdir()
    (tmp_path / "o").symlink_to(tmp_path / "big" / "o")
    succeeds(mmldlm(*sample_words(trial_model, tmp_path / "o")))
    assert (tmp_path / "big" / "o" / "samples.jsonl").is_file()


# -- two calls at once ----------------------------------------------------------------------------


def both(*calls):
    """Run commands at the same time; return their results."""
    results = [None] * len(calls)

    def run(i):
        results[i] = mmldlm(*calls[i], timeout=120)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_samples_into_one_folder_never_both_succeed(trial_model, tmp_path, overwrite):
    """trials-3 BAD 25."""
    out, more = tmp_path / "two", ["--overwrite"] if overwrite else []
    results = both(*(sample_words(trial_model, out, "--seed", seed, *more) for seed in (1, 2)))
    codes = sorted(result.code for result in results)
    if overwrite and codes == [0, 0]:
        return  # one began after the other had ended
    assert codes in ([0, 1], [0, 2]) and not any(result.traceback for result in results)
    winner = [result.code for result in results].index(0) + 1
    assert json.loads((out / "settings.json").read_text(encoding="utf-8"))["seed"] == winner
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_samples_that_appear_meanwhile_are_kept(trial_model, tmp_path):
    """trials-3 BAD 25: another host, whose lock is not seen, fills the folder while this call
    samples.
    """
    out, ended = tmp_path / "o", threading.Event()

    def fill():
        while not ended.is_set():
            if (out / ".mmldlm-output.lock").exists():  # it has begun
                return (out / "samples.jsonl").write_text("of another call", encoding="utf-8")
            time.sleep(0.002)

    thread = threading.Thread(target=fill)
    thread.start()
    result = mmldlm(*sample_words(trial_model, out))
    ended.set()
    thread.join()
    refuses(result, "was filled by another call", code=1)
    assert content(out) == {"samples.jsonl": b"of another call"}


@pytest.mark.parametrize(
    "words",
    [["plot", "{run}", "--out", "{f}.png"], ["verify-data", "{store}", "--plot", "{f}.png"]],
)
def test_a_file_that_another_call_writes_is_refused(trial_run, trial_store, tmp_path, words):
    """trials-3 BAD 25, the kind."""
    import fcntl

    lock = open(tmp_path / ".p.png.lock", "a", encoding="utf-8")
    fcntl.flock(lock, fcntl.LOCK_EX)
    words = [word.format(run=trial_run, store=trial_store, f=tmp_path / "p") for word in words]
    refuses(mmldlm(*words), "another call is at work")
    lock.close()
    succeeds(mmldlm(*words))
    assert os.listdir(tmp_path) == ["p.png"]


# -- later issues ---------------------------------------------------------------------------------


@SLOW
def test_what_is_sampled_is_kept_on_an_interrupt(trial_model, trial_store, tmp_path):
    """newcomer 7: Ctrl-C in sample lost the finished texts."""
    out, log, count = tmp_path / "o", tmp_path / "log", 200_000
    command = (
        f"{os.path.dirname(sys.executable)}/mmldlm sample t2l --checkpoint {trial_model}"
        f" --text-file {tmp_path / 't'} --num-steps 2 --output-dir {out}"
    )
    (tmp_path / "t").write_text("".join(f"text {i}\n" for i in range(count)), encoding="utf-8")
    # The first line of progress comes after 15 s; bash's background jobs ignore SIGINT.
    interrupt = f"until grep -q ' left' {log}; do sleep .2; done; kill -TERM $p; wait $p"
    result = shell(f"{command} 2>{log} & p=$!; {interrupt}")
    refuses(Result(result.code, log.read_text()), "finished samples kept in", code=5)
    kept = records(out / "samples.jsonl")
    assert [record["latent"] for record in kept] == list(range(len(kept)))
    settings = json.loads((out / "settings.json").read_text(encoding="utf-8"))
    assert len(kept) + settings["num_missing"] == count


def test_the_plot_of_a_read_only_run_names_the_option(trial_run, tmp_path):
    """public-reports C, small ones: plot of a read-only run."""
    run = tmp_path / "r"
    run.mkdir()
    shutil.copy(trial_run / "training_log.jsonl", run)
    (run / "plots").write_text("", encoding="utf-8")  # root writes to read-only folders
    refuses(mmldlm("plot", run), "--out")
