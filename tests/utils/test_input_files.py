import os
import socket

import pytest

from mmldlm.errors import UserError
from mmldlm.utils import input_files
from mmldlm.utils.input_files import NotRegularFileError


@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "socket", "device", "endless device"])
@pytest.mark.parametrize(
    "read", [input_files.open_regular, input_files.read_text, input_files.open_append]
)
def test_what_is_no_file_is_a_users_error_and_an_os_error(tmp_path, kind, read):
    path = tmp_path / "f"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link to a fifo":
        os.mkfifo(tmp_path / "other")
        path.symlink_to(tmp_path / "other")
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path.symlink_to("/dev/null" if kind == "device" else "/dev/zero")
    with pytest.raises(NotRegularFileError, match="expected a regular file at") as caught:
        read(path)
    assert isinstance(caught.value, UserError) and isinstance(caught.value, OSError)
    assert caught.value.filename == str(path) and "not a regular file" in caught.value.strerror


def test_files_are_read_up_to_a_size(tmp_path):
    path = tmp_path / "f"
    path.write_bytes("caf\u00e9\r\nx".encode())
    assert (
        input_files.read_text(path) == "caf\u00e9\nx"
        and input_files.read_bytes(path, 8) == path.read_bytes()
    )
    with pytest.raises(OSError, match="more than 7 bytes"):
        input_files.read_bytes(path, 7)
    with pytest.raises(IsADirectoryError):
        input_files.read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        input_files.open_regular(tmp_path / "none")
    with input_files.open_append(path) as file:
        file.write("\udce9")
    assert path.read_bytes().endswith(b"x\\udce9")


def test_a_limit_is_not_reserved_as_memory(tmp_path):
    """Under `ulimit -v`, one read of 16 GiB at most ended with a MemoryError for any file."""
    path = tmp_path / "f"
    path.write_bytes(b"x" * ((1 << 20) + 5))
    assert len(input_files.read_bytes(path, 1 << 60)) == (1 << 20) + 5
    with pytest.raises(OSError, match="more than 1,048,580 bytes"):
        input_files.read_bytes(path, (1 << 20) + 4)
