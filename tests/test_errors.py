"""Errors as users see them."""

from __future__ import annotations

import errno
import os

import pytest

from mmldlm.errors import ACCESS_FIX, UserError
from mmldlm.utils.formatting import explain_os_error


def refuse(found: str, code: int = errno.EACCES, path: str = "/a/E.npy") -> UserError:
    """Return the error of a reader that the system refused."""
    with pytest.raises(UserError) as caught:
        try:
            raise OSError(code, os.strerror(code), path)
        except OSError:
            raise UserError("an array in /a/E.npy", found, "save it again") from None
    return caught.value


def test_a_path_that_may_not_be_read_is_not_called_damaged():
    """newcomer 7: an unreadable array was to be saved again, an unreadable model to be copied."""
    for found in ("Permission denied", "/a/E.npy: Permission denied"):
        error = refuse(found)
        assert error.fix == ACCESS_FIX and str(error).endswith(f"fix:   {ACCESS_FIX}")
        assert "save it again" not in str(error)
    assert refuse(os.strerror(errno.EPERM), errno.EPERM).fix == ACCESS_FIX


def test_the_own_fix_stays_where_access_was_not_what_failed():
    # Another way was tried after a refusal, and failed by itself.
    assert refuse("float16, not float32").fix == "save it again"
    assert refuse("No such file or directory", errno.ENOENT).fix == "save it again"
    error = UserError("ranks on n2", "n2: Permission denied (publickey)", "copy your key")
    assert error.fix == "copy your key" and str(error).startswith("expected ranks on n2\n")


def test_an_error_of_the_system_names_path_and_fix():
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/a/train")
    assert explain_os_error(error) == f"/a/train: Permission denied; {ACCESS_FIX}"
