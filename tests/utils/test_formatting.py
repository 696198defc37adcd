"""Texts of messages."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from mmldlm.utils.formatting import describe_os_error


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
