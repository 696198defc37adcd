"""Paths from users and from files, and outputs of commands: writable before long work starts,
written by one call at a time, whole or as they were.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mmldlm.errors import MmldlmError, UserError
from mmldlm.utils.atomic_files import fsync_path, naming_errors
from mmldlm.utils.formatting import describe_os_error, join_some
from mmldlm.utils.input_files import read_bytes

_LOCK = ".mmldlm-output.lock"


def check_working_folder() -> None:
    """Raise a UserError if the working folder was deleted; call it before torch is imported, whose
    libraries end the process there without naming it.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UserError(
            "a working folder", "the working folder no longer exists", "cd to another folder"
        ) from error


def output_root(path: str | os.PathLike) -> Path:
    """Return the absolute path of an output folder behind all links.

    Work beside it is then on the disk of the folder itself, and the rename at the end does not
    meet a link.
    """
    return Path(os.path.realpath(path))


def without_folders(name: str) -> str:
    """Return the last part of a path that exists, as the folders of this machine mean nothing
    elsewhere; any other name as it is.
    """
    return Path(name).resolve().name if Path(name).exists() else name


def check_writable_dir(path: str | os.PathLike, option: str) -> Path:
    """Check, with a temporary file, that a folder can be created and written to; leave nothing
    behind.

    Args:
        path: Folder.
        option: Option that named it, for the error.

    Raises:
        UserError: it cannot be created, is not a folder, or cannot be written to.
    """
    try:
        _probe_write(Path(path))
    except OSError as error:
        raise _cannot_write(path, option, error) from error
    return Path(path)


def check_writable_file(path: str | os.PathLike, option: str) -> Path:
    """Check that a file can be written, in a folder that may not exist yet; leave nothing behind.

    Raises:
        UserError: it cannot be written, or the path is not a regular file.
    """
    path = Path(path)
    try:
        if path.is_symlink() and not Path(os.path.realpath(path)).parent.is_dir():
            found = f"{path}: a link to {os.readlink(path)}, whose folder does not exist"
            raise UserError(
                f"a file to write for {option}", found, "make that folder, or give another path"
            )
        _probe_write(Path(os.path.realpath(path)).parent)
        if path.exists() and not path.is_file():
            # The output replaces the path: not a device, pipe or folder.
            found = "a folder" if path.is_dir() else "not a regular file"
            raise UserError(
                f"a file to write for {option}", f"{path}: {found}", "give the path of a file"
            )
        if path.exists():
            open(path, "ab").close()
    except OSError as error:
        raise _cannot_write(path, option, error) from error
    return path


@contextlib.contextmanager
def claimed_file(
    path: str | os.PathLike | None, option: str, work: str = "call"
) -> Iterator[None]:
    """Check that a file (or a folder that does not exist yet) can be written, and keep other calls
    from it meanwhile. A killed call keeps nobody from it.

    Args:
        path: None claims nothing.
        option: Option that named it, for the error.
        work: What the others do with it, for the error.

    Raises:
        UserError: it cannot be written, or another call is writing it.
    """
    if path is None:
        yield
        return
    target = Path(os.path.realpath(path))
    name = os.fsencode(target.name)
    if len(name) > _MAX_PART_BYTES - len("..lock"):
        name = hashlib.sha256(name).hexdigest().encode()
    with _held_lock(target.with_name(f".{os.fsdecode(name)}.lock"), path, option, work):
        yield


@contextlib.contextmanager
def claimed_folder(path: Path, option: str) -> Iterator[None]:
    """Make a folder, and keep other calls from writing into it meanwhile; an empty one is removed
    again.

    Raises:
        UserError: it cannot be made, or another call is writing into it.
    """
    with _held_lock(path / _LOCK, path, option, "call"):
        yield


@contextlib.contextmanager
def replaced_files(folder: Path, owned: Sequence[str], overwrite: bool) -> Iterator[Path]:
    """Make a folder to fill; at the end of the block its files appear in `folder`, in place of
    those of earlier calls.

    An error, such as a full disk, leaves `folder` as it was.

    Args:
        folder: Existing folder.
        owned: Patterns of the files that a call writes.
        overwrite: Whether to replace what is there.

    Raises:
        MmldlmError: files of another call have appeared meanwhile.
        OSError: it names the folder, or a file in it.
    """
    partial = folder / f".partial-{os.uname().nodename}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with naming_errors(folder):
            partial.mkdir()
            yield partial
            names = sorted(
                path.relative_to(partial) for path in partial.rglob("*") if path.is_file()
            )
            for name in names:
                fsync_path(partial / name)
            _publish(partial, folder, names, owned, overwrite)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(
    partial: Path, folder: Path, names: list[Path], owned: Sequence[str], overwrite: bool
) -> None:
    earlier = {path.relative_to(folder) for pattern in owned for path in folder.glob(pattern)}
    first = next(name for name in names if len(name.parts) == 1)
    try:
        if earlier and not overwrite:
            raise FileExistsError
        if not overwrite:
            _rename_to_new(partial / first, folder / first)
    except FileExistsError:
        found = join_some(sorted(map(str, earlier))) or str(first)
        raise MmldlmError(
            f"{folder} was filled by another call meanwhile ({found}): give each call an"
            " --output-dir of its own"
        ) from None
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        if overwrite or name != first:
            os.replace(partial / name, folder / name)
    for name in earlier.difference(names):
        (folder / name).unlink(missing_ok=True)


def _rename_to_new(source: Path, target: Path) -> None:
    """Rename a file unless the target exists, in one step where the file system has links."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        if target.exists():
            raise FileExistsError from None
        os.replace(source, target)


@contextlib.contextmanager
def _held_lock(lock: Path, path: str | os.PathLike, option: str, work: str) -> Iterator[None]:
    created = [part for part in lock.parents if not part.exists()]
    descriptor = None
    try:
        try:
            _make_folder(lock.parent)
            descriptor = _lock_file(lock)
        except BlockingIOError:
            raise UserError(
                f"no other {work} at work on {path} ({option})",
                f"another {work} is at work on it: {_holder_of(lock)} holds {lock}",
                "wait for it, stop it, or give another path",
            ) from None
        except OSError as error:
            raise _cannot_write(path, option, error) from error
        try:
            with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode())
            yield
        finally:
            # The file goes before the lock ends, so that whoever waits for it sees that it is
            # gone.
            lock.unlink(missing_ok=True)
    finally:
        if descriptor is not None:
            os.close(descriptor)
        for part in created:  # the work may have failed, and must then leave nothing
            with contextlib.suppress(OSError):
                part.rmdir()


def _holder_of(lock: Path) -> str:
    try:
        text = read_bytes(lock, 1024).decode()
    except (OSError, ValueError):
        text = ""
    return text if text.isprintable() and text else "a process"


def _lock_file(path: Path) -> int:
    """Create and lock a file, and return its descriptor; the lock ends with the process at the
    latest.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be created.
    """
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:  # a file system without locks: only the end of the work finds another call
            return descriptor
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(path), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # its holder deleted it between these lines


def _probe_write(folder: Path) -> None:
    created = [part for part in (folder, *folder.parents) if not part.exists()]
    try:
        _make_folder(folder)
        # Permission bits are not enough: root passes them, but cannot write to /proc or a
        # read-only disk.
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for part in created:  # the work may still fail on its input, and must then leave nothing
            with contextlib.suppress(OSError):
                part.rmdir()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        # The system's "File exists" would not say that a folder was needed.
        raise NotADirectoryError(
            errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename
        ) from error


def _cannot_write(path: str | os.PathLike, option: str, error: OSError) -> UserError:
    return UserError(
        f"a writable path for {option}", f"{path}: {describe_os_error(error)}", "give another path"
    )


_MAX_PART_BYTES = 255  # of a file name on every common file system


def path_inside(folder: Path, name: object) -> Path:
    """Return the path of `name` below `folder`.

    A name is relative, its parts separated by slashes (`a/b` is legitimate), and has one spelling
    alone: no empty part, no `.` and no `..`. Links are not followed here.

    Raises:
        ValueError: anything else; the message completes "found ...".
    """
    problem = _problem(name)
    if problem is not None:
        raise ValueError(f"the name {str(name)[:80]!r}, {problem}")
    return folder / str(name)


def check_distinct(names: Iterable[str]) -> None:
    """Check that files of these names can exist beside each other: none twice, and none as the
    folder of another.

    Raises:
        ValueError: two names collide; the message completes "found ...".
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two files named {name[:80]!r}")
        seen.add(name)
    for name in seen:
        folder = name
        while folder := folder.rpartition("/")[0]:
            if folder in seen:
                raise ValueError(
                    f"{folder[:80]!r} both as a file and as the folder of {name[:80]!r}"
                )


def _problem(name: object) -> str | None:
    if not isinstance(name, str):
        return f"a {type(name).__name__} instead of text"
    if not name:
        return "which is empty"
    if "\0" in name:
        return "with a NUL byte"
    if name.startswith("/"):
        return "an absolute path"
    parts = name.split("/")
    if ".." in parts:
        return "which leads out of the folder"
    if "" in parts or "." in parts:
        return "with an empty part or `.`"
    try:
        longest = max(len(os.fsencode(part)) for part in parts)
    except UnicodeEncodeError:
        return "which is not valid text"
    return (
        f"with a part of more than {_MAX_PART_BYTES} bytes" if longest > _MAX_PART_BYTES else None
    )


_VARIABLE = re.compile(r"\$\$|\$\{[^}]*\}?|\$[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


def expand_path(path: str) -> str:
    """Return a path with a leading ~ or ~user, $NAME and ${NAME} replaced as a shell does.

    A path that exists as it is written, or lies in a folder whose absolute name has the sign, is
    what it says: names may have a $.

    Raises:
        ValueError: an unknown user, a variable that is not set, or another use of ${.
    """
    if path.startswith("~"):
        expanded = os.path.expanduser(path)
        if expanded.startswith("~") and not os.path.lexists(path):
            user = path.partition("/")[0]
            raise ValueError(
                f"{path!r}: no home folder is known for {user}; write ./{path} if that is its name"
            )
        path = expanded
    if not _VARIABLE.search(path) or _exists_as_written(path):
        return path
    return _VARIABLE.sub(lambda found: _value_of(found[0], path), path)


def _exists_as_written(path: str) -> bool:
    if "\0" in path:
        return False
    if not os.path.isabs(path):
        return os.path.lexists(path)
    signs = [found.end() for found in _VARIABLE.finditer(path) if found[0] != "$$"]
    end = path.find("/", signs[-1]) if signs else -1
    return os.path.lexists(path if end < 0 else path[:end])


def _value_of(variable: str, path: str) -> str:
    if variable == "$$":  # a process number in a shell; here two letters of a name
        return variable
    found = _NAME.fullmatch(variable)
    if found is None:
        raise ValueError(
            f"{path!r}: {variable} is not a variable; write $NAME, ${{NAME}}, or the path itself"
        )
    name = found[1] or found[2]
    value = os.environ.get(name)
    if not value:
        state = "not set" if value is None else "empty"
        raise ValueError(
            f"{path!r}: the variable {name} is {state} here; set it, or write the path itself"
        )
    return value
