"""The commit protocol: killed between any two steps or out of disk, the previous checkpoint stays
usable.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from mmldlm.checkpoints import commit as commit_module
from mmldlm.checkpoints import retention
from mmldlm.checkpoints.commit import CommitFailed, begin, owner_of
from mmldlm.checkpoints.locate import (
    find_latest_valid,
    holds_checkpoints,
    is_of_run,
    list_checkpoints,
    locate_checkpoint,
    read_link,
)
from mmldlm.checkpoints.manifest import is_as_saved, read_manifest, verify
from mmldlm.checkpoints.retention import prune, set_aside_after
from mmldlm.distributed.collectives import Ranks
from mmldlm.errors import UserError

# Every call by which the protocol changes the disk.
DISK_CALLS = [
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (os, "symlink"),
    (os, "mkdir"),
    (os, "unlink"),
    (os, "rmdir"),
    (shutil, "rmtree"),
]


def write_files(folder, rank: int, content: str) -> list[Path]:
    """Write a rank's files; return those with its number in their names."""
    (folder / "engine" / "zero").mkdir(parents=True, exist_ok=True)
    files = [
        folder / "engine" / "zero" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        folder / f"rng_state_rank{rank}.pt",
    ]
    files[0].write_text(content * 1000)
    files[1].write_text(f"rng {rank}")
    if rank == 0:
        step = int("".join(sign for sign in folder.name if sign.isdigit())[:8])
        state = {
            "content": content,
            "global_batch": 1,
            "num_samples": 1,
            "step": step,
            "applied_steps": step,
        }
        (folder / "training_state.json").write_text(json.dumps(state))
    return files


def write_and_commit(pending, content: str, **facts) -> Path:
    """Write this rank's files and commit them, as a run does."""
    failure = None
    try:
        pending.write_manifest_entry(write_files(pending.path, pending.ranks.rank, content))
    except OSError as error:
        failure = error
    return pending.commit(failure, has_entry=True, **facts)


def save(run_dir, step: int, content: str = "a", **facts):
    pending = begin(run_dir, step)
    write_files(pending.path, 0, content)
    return pending.commit(**facts)


def content_of(checkpoint) -> str:
    return json.loads((checkpoint / "training_state.json").read_text())["content"]


def run_ranks(world_size: int, work) -> list:
    """work(peers) on a thread for each rank; what each returned or raised."""
    barrier = threading.Barrier(world_size, timeout=20)
    values: list = [None] * world_size
    results: list = [None] * world_size

    class ThreadRanks(Ranks):
        def __init__(self, rank: int):
            self.rank, self.world_size = rank, world_size

        def gather_objects(self, value):
            values[self.rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        def all_agree(self, ok: bool) -> bool:
            return all(self.gather_objects(ok))

    def rank_main(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank))
        except BaseException as error:
            results[rank] = error

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank{rank}")
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_layout_and_manifest(tmp_path):
    path = save(tmp_path, 1000, engine="deepspeed", stage=2)
    assert path == tmp_path / "checkpoints" / "step_00001000"
    assert (tmp_path / "latest").is_symlink() and os.readlink(
        tmp_path / "latest"
    ) == "checkpoints/step_00001000"
    manifest = read_manifest(path)
    assert (manifest["step"], manifest["engine"], manifest["stage"], manifest["world_size"]) == (
        1000,
        "deepspeed",
        2,
        1,
    )
    assert set(manifest["files"]) == {
        "engine/zero/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "rng_state_rank0.pt",
        "training_state.json",
    }
    assert verify(path) == [] and not list((tmp_path / "checkpoints").glob(".*"))


def test_all_ranks_files_are_listed(tmp_path):
    def work(peers):
        return write_and_commit(begin(tmp_path, 5, peers), "a", engine="deepspeed")

    results = run_ranks(3, work)
    assert results == [tmp_path / "checkpoints" / "step_00000005"] * 3
    manifest = read_manifest(results[0])
    assert manifest["world_size"] == 3 and len(manifest["files"]) == 7
    assert verify(results[0]) == []


@pytest.mark.parametrize("world_size", [4, 16, 64])
def test_only_rank_0_lists_the_folder(tmp_path, monkeypatch, world_size):
    """Each of 1,024 ranks would read the names of all files."""
    read, walk = {}, os.walk

    def counting(folder):
        for base, folders, names in walk(folder):
            rank = threading.current_thread().name
            read[rank] = read.get(rank, 0) + len(folders) + len(names)
            yield base, folders, names

    monkeypatch.setattr(os, "walk", counting)
    run_ranks(world_size, lambda peers: write_and_commit(begin(tmp_path, 1, peers), "a"))
    assert set(read) == {"rank0"} and read["rank0"] <= 5 * world_size + 8


def test_a_file_that_no_rank_lists_is_noticed(tmp_path):
    def work(peers):
        pending = begin(tmp_path, 1, peers)
        files = write_files(pending.path, peers.rank, "a")
        pending.write_manifest_entry(files[peers.rank :])
        return pending.commit(has_entry=True)

    results = run_ranks(2, work)
    assert all("rank_1_mp_rank_00_optim_states.pt changes" in str(error) for error in results)


def test_owner_is_the_rank_that_wrote():
    names = {
        "engine/ema_rank1.pt": 1,
        "engine/ema_rank3.pt": 3,
        "engine/zero/bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt": 3,
        "engine/zero/mp_rank_00_model_states.pt": 0,
        "rng_state_rank2.pt": 2,
        "engine/__1_0.distcp": 1,
        "config.yaml": 0,
        "rng_state_rank9.pt": 0,  # no such rank: rank 0 takes care of it
    }
    assert {name: owner_of(name, 4) for name in names} == names


# -- kill -9 --------------------------------------------------------------------------------------


def killed_before_disk_call(number: int, work) -> bool:
    """Runs `work` in a forked process that kill -9s itself before its disk call `number`; False
    once it has no such.
    """
    pid = os.fork()
    if pid == 0:
        count = 0

        def guarded(original):
            def call(*args, **kwargs):
                nonlocal count
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                return original(*args, **kwargs)

            return call

        status = 1
        try:
            for module, name in DISK_CALLS:
                setattr(module, name, guarded(getattr(module, name)))
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_killed_before_every_step_of_a_save(tmp_path):
    number, outcomes = 0, set()
    while True:
        run_dir = tmp_path / str(number)
        save(run_dir, 1, "old")
        was_killed = killed_before_disk_call(number, lambda run=run_dir: save(run, 2, "new"))
        for step, path in list_checkpoints(run_dir):
            # Nothing that looks like a checkpoint may be half of one.
            assert verify(path) == [] and content_of(path) == {1: "old", 2: "new"}[step]
        complaints: list[str] = []
        found = find_latest_valid(run_dir, complaints.append)
        assert found is not None and complaints == []
        assert (
            verify(locate_checkpoint(run_dir)) == []
            and verify(locate_checkpoint(run_dir / "latest")) == []
        )
        outcomes.add(content_of(found))
        again = save(run_dir, 2, "again")  # the next save needs no cleaning up by hand
        assert content_of(locate_checkpoint(run_dir)) == "again" and verify(again) == []
        assert not list((run_dir / "checkpoints").glob(".*"))
        if not was_killed:
            break
        number += 1
    assert number >= 10 and outcomes == {"old", "new"}


def test_killed_while_a_step_is_saved_again(tmp_path):
    number = 0
    while True:
        run_dir = tmp_path / str(number)
        save(run_dir, 1, "first")
        save(run_dir, 2, "old")
        was_killed = killed_before_disk_call(number, lambda run=run_dir: save(run, 2, "new"))
        found = find_latest_valid(run_dir)
        assert found is not None and content_of(found) in ("old", "new") and verify(found) == []
        assert locate_checkpoint(run_dir / "latest") == found.resolve()
        if not was_killed:
            assert content_of(found) == "new"
            break
        number += 1


def test_killed_while_pruning(tmp_path):
    number = 0
    while True:
        run_dir = tmp_path / str(number)
        for step in (1, 2, 3):
            save(run_dir, step, str(step))
        was_killed = killed_before_disk_call(number, lambda run=run_dir: prune(run, keep_last=1))
        found = find_latest_valid(run_dir)
        assert found is not None and content_of(found) == "3"
        for _, path in list_checkpoints(run_dir):  # a half-deleted one has no manifest
            assert verify(path) == [] or not (path / "manifest.json").exists()
        if not was_killed:
            break
        number += 1
    assert number >= 4


# -- failures that are agreed ---------------------------------------------------------------------


def untouched(run_dir) -> bool:
    return (
        [step for step, _ in list_checkpoints(run_dir)] == [1]
        and content_of(locate_checkpoint(run_dir)) == "old"
        and verify(locate_checkpoint(run_dir)) == []
        and not list((run_dir / "checkpoints").glob(".*"))
    )


def test_full_disk_on_one_rank_while_writing(tmp_path):
    """A real ENOSPC, from /dev/full."""
    if not os.path.exists("/dev/full"):
        pytest.skip("/dev/full is not on this system")
    save(tmp_path, 1, "old")

    def work(peers):
        pending = begin(tmp_path, 2, peers)
        failure = None
        try:
            write_files(pending.path, peers.rank, "new")
            if peers.rank == 1:
                with open("/dev/full", "w", encoding="utf-8") as full:
                    full.write("x")
        except OSError as error:
            failure = error
        return pending.commit(failure)

    results = run_ranks(2, work)
    assert all(isinstance(result, CommitFailed) for result in results)
    assert all("No space left" in str(result) for result in results)
    assert untouched(tmp_path)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_failed_save_names_the_previous_checkpoint_if_there_is_one(tmp_path, is_first):
    """trials-3, POOR 9: `convert zero2` on a full disk spoke of a checkpoint that does not
    exist.
    """
    if not is_first:
        save(tmp_path, 1, "old")
    with pytest.raises(CommitFailed) as caught:
        begin(tmp_path, 2).commit(OSError(errno.ENOSPC, "full"))
    assert ("previous checkpoint" in str(caught.value)) is not is_first


@pytest.mark.parametrize("victim", [0, 1])
def test_full_disk_while_flushing(tmp_path, monkeypatch, victim):
    save(tmp_path, 1, "old")
    original = os.fsync

    def fsync(fd):
        if threading.current_thread().name == f"rank{victim}" and "optim_states" in os.readlink(
            f"/proc/self/fd/{fd}"
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(fd)

    monkeypatch.setattr(os, "fsync", fsync)

    def work(peers):
        return write_and_commit(begin(tmp_path, 2, peers), "new")

    results = run_ranks(2, work)
    assert all(isinstance(result, CommitFailed) for result in results), results
    assert untouched(tmp_path)


@pytest.mark.parametrize("call", ["rename", "replace"])
def test_failure_while_publishing(tmp_path, monkeypatch, call):
    save(tmp_path, 1, "old")

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def work(peers):
        pending = begin(tmp_path, 2, peers)
        if peers.rank == 0:
            monkeypatch.setattr(os, call, fail)
        return write_and_commit(pending, "new")

    results = run_ranks(2, work)
    assert all(isinstance(result, CommitFailed) for result in results), results
    monkeypatch.undo()
    assert content_of(locate_checkpoint(tmp_path / "latest")) == "old"
    assert verify(find_latest_valid(tmp_path)) == []


@pytest.mark.parametrize("first", [1, 2])
def test_a_link_that_cannot_be_moved_leaves_a_complete_checkpoint(tmp_path, monkeypatch, first):
    save(tmp_path, first, "old")

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", fail)
    results = run_ranks(2, lambda peers: write_and_commit(begin(tmp_path, 2, peers), "new"))
    monkeypatch.undo()
    for error in results:
        assert isinstance(error, CommitFailed)
        assert "step 2 is complete in" in str(error) and "`latest`" in str(error)
        assert "not saved" not in str(error) and "untouched" not in str(error)
    found = find_latest_valid(tmp_path)
    assert found.name == "step_00000002" and content_of(found) == "new" and verify(found) == []
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_failed_resave_puts_the_old_one_back(tmp_path, monkeypatch):
    save(tmp_path, 2, "old")
    original = os.rename

    def rename(source, target):
        if ".partial_" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CommitFailed):
        save(tmp_path, 2, "new")
    monkeypatch.undo()
    assert (
        content_of(locate_checkpoint(tmp_path / "latest")) == "old"
        and verify(locate_checkpoint(tmp_path)) == []
    )


def test_every_rank_tries_to_write_before_any_enters_a_collective_save(tmp_path, monkeypatch):
    """DeepSpeed's save has barriers: a rank that found its folder read-only in it would leave the
    others there.
    """
    save(tmp_path, 1, "old")
    write = Path.write_bytes

    def read_only_on_rank_1(self, content):
        if threading.current_thread().name == "rank1" and self.parent.name == "zero":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return write(self, content)

    monkeypatch.setattr(Path, "write_bytes", read_only_on_rank_1)
    entered = []

    def work(peers):
        pending = begin(tmp_path, 2, peers, ("engine", "engine/zero"))
        entered.append(peers.rank)
        return write_and_commit(pending, "new")

    results = run_ranks(2, work)
    assert all(isinstance(result, CommitFailed) for result in results) and entered == []
    assert "Read-only file system" in str(results[1]) and "mount it for writing again" in str(
        results[1]
    )
    assert untouched(tmp_path)
    monkeypatch.undo()
    assert run_ranks(2, work) == [tmp_path / "checkpoints" / "step_00000002"] * 2
    assert not [path for path in (tmp_path / "checkpoints").rglob("*") if ".try_rank" in path.name]


def test_folder_cannot_be_made(tmp_path):
    (tmp_path / "checkpoints").write_text("a file stands here")
    results = run_ranks(2, lambda peers: begin(tmp_path, 1, peers))
    assert all(isinstance(result, CommitFailed) for result in results)


def test_files_that_grow_during_the_commit_are_noticed(tmp_path, monkeypatch):
    original = commit_module.write_text_synced

    def late_write(path, text):
        original(path, text)
        (path.parent / "late.bin").write_text("written after the vote")

    pending = begin(tmp_path, 1)
    write_files(pending.path, 0, "a")
    monkeypatch.setattr(commit_module, "write_text_synced", late_write)
    with pytest.raises(CommitFailed, match="late.bin"):
        pending.commit()


def test_no_symlinks_on_the_file_system(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", refuse)
    save(tmp_path, 1, "a")
    path = save(tmp_path, 2, "b")
    assert (tmp_path / "latest").read_text().strip() == "checkpoints/step_00000002"
    assert locate_checkpoint(tmp_path / "latest") == locate_checkpoint(tmp_path) == path.resolve()


# -- finding, resolving, pruning ------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage, word",
    [
        (lambda path: (path / "rng_state_rank0.pt").unlink(), "rng_state_rank0.pt is missing"),
        (lambda path: (path / "rng_state_rank0.pt").write_text("rng"), "3 bytes"),
        (lambda path: (path / "rng_state_rank0.pt").write_text("rng 1"), "CRC-32"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is damaged"),
    ],
)
def test_damaged_ones_are_skipped_by_name(tmp_path, damage, word):
    whole = save(tmp_path, 1)
    damage(save(tmp_path, 2))
    complaints: list[str] = []
    assert find_latest_valid(tmp_path, complaints.append) == whole
    assert len(complaints) == 1 and "step_00000002" in complaints[0] and word in complaints[0]


def another_owner(monkeypatch, path):
    """The system's answer for a file of mode 600 of another user; the tests may run as root, who
    can read it.
    """
    open_file = open

    def refuse(name, *args, **options):
        if str(name) == str(path):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(name))
        return open_file(name, *args, **options)

    monkeypatch.setattr("builtins.open", refuse)


def to_a_link(path, target):
    shutil.rmtree(path)
    path.symlink_to(target)


UNREADABLE = {
    "manifest of another user": lambda path, patch: another_owner(patch, path / "manifest.json"),
    "manifest of another program": lambda path, patch: (path / "manifest.json").write_text("{}"),
    "link to a disk that is not mounted": lambda path, patch: to_a_link(
        path, "/nowhere/step_00000002"
    ),
    "links in a circle": lambda path, patch: to_a_link(path, path),
    "file that cannot be opened": lambda path, patch: (
        (path / "training_state.json").unlink(),
        (path / "training_state.json").symlink_to("training_state.json"),
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_refused_and_neither_deleted_nor_moved_nor_replaced(
    tmp_path, monkeypatch, case
):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    for step in (3, 4):
        shutil.rmtree(tmp_path / "checkpoints" / f"step_0000000{step}")
    victim = tmp_path / "checkpoints" / "step_00000002"
    UNREADABLE[case](victim, monkeypatch)
    before = sorted(os.listdir(tmp_path / "checkpoints"))
    with pytest.raises(UserError, match="readable checkpoints[^$]*step_00000002"):
        find_latest_valid(tmp_path)
    with pytest.raises(UserError, match="step_00000002"):
        set_aside_after(tmp_path, 1)
    with pytest.raises(CommitFailed, match="cannot be read is not replaced"):
        save(tmp_path, 2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == before
    save(tmp_path, 5)
    save(tmp_path, 6)
    prune(tmp_path, keep_last=1)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 6] and find_latest_valid(
        tmp_path
    ).name[-1] == "6"


def test_a_damaged_one_is_set_aside_where_its_step_is_saved_again(tmp_path):
    save(tmp_path, 1)
    (save(tmp_path, 2, "old") / "rng_state_rank0.pt").unlink()
    save(tmp_path, 2, "new")
    assert content_of(locate_checkpoint(tmp_path)) == "new"
    assert content_of(tmp_path / "checkpoints" / ".dropped_step_00000002") == "old"


def test_files_that_hold_no_state_do_not_make_a_checkpoint_unusable(tmp_path):
    for step in (1, 2):
        pending = begin(tmp_path, step)
        write_files(pending.path, 0, "a")
        (pending.path / "tokenizer").mkdir()
        for name in (
            "tokenizer/tokenizer.json",
            "tokenizer/vocab.txt",
            "config.yaml",
            "model_config.json",
        ):
            (pending.path / name).write_text("x: 1\n")
        path = pending.commit()
    (path / "tokenizer" / "tokenizer.json").write_text("x: 1\n\n")
    (path / "model_config.json").unlink()
    (path / "config.yaml").unlink()
    (path / "config.yaml").symlink_to("config.yaml")
    told: list[str] = []
    assert find_latest_valid(tmp_path, told.append) == path == locate_checkpoint(tmp_path)
    assert (
        len(told) == 1 and "training state is complete" in told[0] and "2 more problems" in told[0]
    )
    assert (
        len(verify(path)) == 3
        and not is_as_saved(path, "config.yaml")
        and is_as_saved(path, "rng_state_rank0.pt")
    )


def test_a_latest_without_its_checkpoints_is_no_empty_folder(tmp_path):
    save(tmp_path, 1)
    os.rename(tmp_path / "checkpoints", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="`latest` names step_00000001"):
        find_latest_valid(tmp_path)
    assert holds_checkpoints(tmp_path) and not holds_checkpoints(tmp_path / "new")


def test_nothing_whole(tmp_path):
    assert find_latest_valid(tmp_path) is None
    (save(tmp_path, 1) / "rng_state_rank0.pt").unlink()
    assert find_latest_valid(tmp_path) is None


def test_resolve_takes_every_spelling(tmp_path):
    save(tmp_path, 1)
    second = save(tmp_path, 2).resolve()
    for spelling in (
        tmp_path,
        tmp_path / "latest",
        tmp_path / "checkpoints",
        second,
        f"{tmp_path}/latest/",
    ):
        assert locate_checkpoint(spelling) == second
    assert locate_checkpoint(tmp_path / "checkpoints" / "step_00000001").name == "step_00000001"


def test_errors_of_resolve_report_what_was_there(tmp_path):
    with pytest.raises(UserError, match="nothing"):
        locate_checkpoint(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="notes.txt"):
        locate_checkpoint(tmp_path)
    path = save(tmp_path, 1)
    (path / "rng_state_rank0.pt").unlink()
    with pytest.raises(UserError, match="rng_state_rank0.pt is missing"):
        locate_checkpoint(tmp_path)
    shutil.rmtree(path)
    with pytest.raises(UserError, match="does not exist"):
        locate_checkpoint(tmp_path / "latest")


def test_prune_keeps_what_it_must(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "step_00000007" / "rng_state_rank0.pt").unlink()
    (tmp_path / "checkpoints" / "step_00000002" / "rng_state_rank0.pt").unlink()
    prune(tmp_path, keep_last=2, keep_every=3)
    # 5 and 6 are the newest whole ones, 3 is due, 2 and 7 are damaged: somebody may still need
    # what is in them.
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 3, 5, 6, 7]


def test_prune_looks_at_the_newest_and_those_to_delete(tmp_path, monkeypatch):
    """Not at all that are kept: 100 checkpoints of 1,024 ranks have 200,000 files."""
    for step in range(1, 10):
        save(tmp_path, step)
    looked_at = []
    examine = retention.examine
    monkeypatch.setattr(
        retention,
        "examine",
        lambda path, **more: looked_at.append(path.name[-1]) or examine(path, **more),
    )
    prune(tmp_path, keep_last=2, keep_every=2)
    assert sorted(looked_at) == list("135789")
    looked_at.clear()
    save(tmp_path, 10)
    prune(tmp_path, keep_last=2, keep_every=2)
    assert len(looked_at) == 2


@pytest.mark.parametrize("keep_last", [0, 1])
def test_prune_never_deletes_the_last_good_one(tmp_path, keep_last):
    save(tmp_path, 1)
    for step in (2, 3):
        (save(tmp_path, step) / "rng_state_rank0.pt").unlink()
    assert prune(tmp_path, keep_last=keep_last) == []
    assert find_latest_valid(tmp_path).name == "step_00000001"


def test_prune_keeps_what_latest_names(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    commit_module.update_link(tmp_path, "latest", tmp_path / "checkpoints" / "step_00000001")
    prune(tmp_path, keep_last=1)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1, 3]
    assert read_link(tmp_path).name == "step_00000001"


def test_stale_partials_are_cleared(tmp_path):
    stale = tmp_path / "checkpoints" / ".partial_step_00000009"
    stale.mkdir(parents=True)
    (stale / "half.pt").write_text("half")
    save(tmp_path, 10)
    assert not stale.exists()
    # What NFS once kept, under the name it was then given.
    stale.with_name(f".stale{stale.name}").mkdir()
    save(tmp_path, 11)
    assert not list((tmp_path / "checkpoints").glob(".*"))


# -- a run that was copied, or lies on two disks --------------------------------------------------


@pytest.fixture
def copied_run(tmp_path):
    """A copy whose links became folders, as scp -r, cp -rL and clients of object stores make."""
    for step in (1, 2):
        save(tmp_path / "run", step)
    commit_module.update_link(
        tmp_path / "run", "last_best", tmp_path / "run" / "checkpoints" / "step_00000001"
    )
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=False)
    return tmp_path / "copy"


def test_links_that_a_copy_made_folders_are_links_again(copied_run, capsys):
    assert locate_checkpoint(copied_run / "latest").parts[-2:] == ("checkpoints", "step_00000002")
    # The best one stays known, and is not pruned.
    assert locate_checkpoint(copied_run / "last_best").parts[-2:] == (
        "checkpoints",
        "step_00000001",
    )
    save(copied_run, 3)
    assert (copied_run / "latest").is_symlink() and read_link(copied_run).name == "step_00000003"
    assert (
        verify(copied_run / "latest.copied") == [] and "latest.copied" in capsys.readouterr().out
    )
    prune(copied_run, keep_last=1)
    assert [step for step, _ in list_checkpoints(copied_run)] == [1, 3]


def test_what_follows_a_copied_link_takes_the_newest(copied_run):
    shutil.copytree(
        copied_run / "checkpoints" / "step_00000002", copied_run / "checkpoints" / "step_00000003"
    )
    assert locate_checkpoint(copied_run / "latest").name == "step_00000003"
    assert locate_checkpoint(copied_run).name == "step_00000003"


def test_copied_links_to_abandoned_checkpoints_are_set_aside(copied_run):
    set_aside_after(copied_run, 0)
    assert not holds_checkpoints(copied_run)
    assert (copied_run / "latest.copied").is_dir() and (copied_run / "last_best.copied").is_dir()


def test_the_folder_of_checkpoints_may_be_a_link(tmp_path):
    run, scratch = tmp_path / "run", tmp_path / "scratch" / "of_run"
    scratch.mkdir(parents=True)
    run.mkdir()
    (run / "checkpoints").symlink_to(scratch)
    save(run, 1)
    for spelling in (run, run / "latest", run / "checkpoints", run / "checkpoints/step_00000001"):
        located = locate_checkpoint(spelling)
        assert located == run / "checkpoints" / "step_00000001" and is_of_run(located, run)
    assert is_of_run(scratch / "step_00000001", run) and not is_of_run(scratch, run)


# -- a commit that stopped between its renames ----------------------------------------------------


@pytest.fixture
def interrupted_run(tmp_path):
    save(tmp_path, 1)
    final = save(tmp_path, 2, "only copy")
    os.rename(final, final.with_name(f".replaced_{final.name}"))
    return tmp_path


def test_a_reader_takes_the_replaced_one_where_it_is(interrupted_run):
    before = sorted(os.listdir(interrupted_run / "checkpoints"))
    for found in (
        find_latest_valid(interrupted_run),
        *(locate_checkpoint(interrupted_run / name) for name in ("", "latest")),
        locate_checkpoint(interrupted_run / "checkpoints" / "step_00000002"),
    ):
        assert content_of(found) == "only copy"
    assert [step for step, _ in list_checkpoints(interrupted_run)] == [1, 2]
    assert sorted(os.listdir(interrupted_run / "checkpoints")) == before
    save(interrupted_run, 3)
    assert content_of(interrupted_run / "checkpoints" / "step_00000002") == "only copy"


def test_the_only_copy_is_not_deleted_where_it_cannot_be_restored(interrupted_run, monkeypatch):
    def refused(source, target):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refused)
        with pytest.raises(CommitFailed, match="replaced_step_00000002"):
            save(interrupted_run, 3)
    assert content_of(locate_checkpoint(interrupted_run)) == "only copy"
