import errno
import multiprocessing
import os
import shutil

import numpy as np
import pytest

from mmldlm.errors import MmldlmError, UserError
from mmldlm.utils import atomic_files
from mmldlm.utils.formatting import describe_os_error
from mmldlm.utils.paths import (
    check_writable_file,
    claimed_file,
    claimed_folder,
    replaced_files,
)

OWNED = ("a.txt", "b.txt", "more/*.png")


def fill(folder, text, *names):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def content(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files
    }


def test_files_of_a_call_replace_those_of_before_and_no_others(tmp_path):
    fill(tmp_path, "own", "notes.md")
    with replaced_files(tmp_path, OWNED, overwrite=False) as folder:
        fill(folder, "1", "a.txt", "b.txt", "more/0.png", "more/1.png")
        assert content(tmp_path).keys() & {"a.txt", "b.txt"} == set()
    with replaced_files(tmp_path, OWNED, overwrite=True) as folder:
        fill(folder, "2", "a.txt", "more/0.png")
    assert content(tmp_path) == {"notes.md": "own", "a.txt": "2", "more/0.png": "2"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_leaves_the_folder_as_it_was(tmp_path, overwrite):
    fill(tmp_path, "1", *(["a.txt"] if overwrite else []))
    before = content(tmp_path)
    with pytest.raises(OSError) as caught, replaced_files(tmp_path, OWNED, overwrite) as folder:
        fill(folder, "2", "a.txt")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert content(tmp_path) == before and caught.value.filename == str(tmp_path)


def test_what_appeared_meanwhile_is_kept(tmp_path):
    with pytest.raises(MmldlmError, match="filled by another call"):
        with replaced_files(tmp_path, OWNED, overwrite=False) as folder:
            fill(folder, "mine", "a.txt", "b.txt")
            fill(tmp_path, "another's", "b.txt")
    assert content(tmp_path) == {"b.txt": "another's"}


def hold(path, ready, end):
    with claimed_folder(path, "--output-dir"):
        ready.set()
        end.wait(60)


def test_a_claim_excludes_other_processes_and_leaves_nothing(tmp_path):
    ready, end = multiprocessing.Event(), multiprocessing.Event()
    out = tmp_path / "new" / "o"
    process = multiprocessing.Process(target=hold, args=(out, ready, end))
    process.start()
    assert ready.wait(60)
    with (
        pytest.raises(UserError, match="another call is at work"),
        claimed_folder(out, "--output-dir"),
    ):
        pass
    end.set()
    process.join()
    assert list(tmp_path.iterdir()) == []
    with (
        claimed_folder(out, "--output-dir"),
        claimed_file(out / "f", "--json"),
        claimed_file(None, "--html"),
    ):
        assert out.is_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [80, 254])
def test_long_names_that_begin_alike_are_claimed_apart(tmp_path, length):
    first, second = (tmp_path / ("x" * length + end) for end in "ab")
    with claimed_file(first, "--json"), claimed_file(second, "--json"):
        with pytest.raises(UserError, match="another call"), claimed_file(first, "--json"):
            pass
    assert not list(tmp_path.iterdir())


def test_a_file_is_written_through_a_link_of_which_nothing_is_lost(tmp_path):
    (tmp_path / "big").mkdir()
    link = tmp_path / "f"
    link.symlink_to("big/f")
    check_writable_file(link, "--json")
    assert list((tmp_path / "big").iterdir()) == []
    atomic_files.write_text(link, "1")
    with pytest.raises(OSError) as caught, atomic_files.atomic_file(link) as file:
        file.write(b"2")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(link)
    assert (
        link.is_symlink()
        and (tmp_path / "big" / "f").read_text() == "1"
        and len(os.listdir(tmp_path / "big")) == 1
    )
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="a FIFO"):
        atomic_files.write_text(tmp_path / "fifo", "1")


def test_an_error_of_numpy_on_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError) as caught, atomic_files.naming_errors(tmp_path / "f.npy"):
        raise OSError("4096 requested and 100 written")  # as numpy.save does
    assert (
        caught.value.filename == str(tmp_path / "f.npy") and "requested" in caught.value.strerror
    )


@pytest.mark.parametrize("name", ["n" * 250, "\u00e9" * 120, "caf\udce9"])
def test_a_file_of_any_name_is_written(tmp_path, name):
    with atomic_files.atomic_file(tmp_path / name) as file:
        np.save(file, np.arange(3))
    assert os.listdir(tmp_path) == [name]


def test_errors_that_are_not_of_a_disk_stay_as_they_are(tmp_path):
    with pytest.raises(OSError) as caught, atomic_files.naming_errors(tmp_path):
        raise OSError("We couldn't connect to 'https://huggingface.co'")
    assert caught.value.filename is None and "couldn't connect" in str(caught.value)
    with pytest.raises(ConnectionRefusedError) as caught, atomic_files.naming_errors(tmp_path):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    assert caught.value.filename is None


def test_an_error_of_copytree_is_its_first_one(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to("nowhere")
    with pytest.raises(shutil.Error) as caught:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    said = describe_os_error(caught.value)
    assert (
        said.startswith(f"{tmp_path / 'b' / 'link'}: No such file or directory")
        and "[" not in said
    )
