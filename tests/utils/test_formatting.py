"""Texts of messages."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from mmldlm.utils.formatting import describe_counts, describe_os_error


def test_a_failed_copytree_is_its_first_file_and_reason(tmp_path):
    """trials-3, POOR 2: the message was a Python list of tuples."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to("nowhere")
    with pytest.raises(shutil.Error) as caught:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    message = describe_os_error(caught.value)
    assert "link" in message and "No such file" in message and "[(" not in message


def test_other_errors_are_the_words_of_the_system():
    assert describe_os_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "f")) == os.strerror(
        errno.ENOSPC
    )


def test_counts_are_words():
    counts = {
        "files": 2,
        "read": 1200,
        "drop_too_short": 3,
        "drop_no_text": 0,
        "links to nothing": 1,
    }
    words = "2 files, 1,200 read, 3 dropped (too short), 1 links to nothing"
    assert describe_counts(counts) == words and describe_counts({}) == "nothing"
