"""`mmldlm <verb>`: each verb is a thin function that calls its room."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from pathlib import Path
from typing import NoReturn

from mmldlm import __version__
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, MmldlmError, UserError
from mmldlm.utils.formatting import describe_os_error, for_screen
from mmldlm.utils.standard_streams import open_standard_streams
from mmldlm.utils.stop_signals import interrupt_on_stop_signals


def _config(parser):
    from mmldlm import train
    from mmldlm.commands import config as show

    train.add_arguments(parser)
    show.add_arguments(parser)
    parser.add_argument(
        "--check", action="store_true", help="print nothing; check what `train` checks before its ranks"
    )

    def run(args) -> int:
        if not args.check:
            return show.main(args, train.parse_config)
        train.check_run(train.parse_config(args), args.world_size)
        return EXIT_DONE

    return run


def _sanity(parser):
    from mmldlm import train
    from mmldlm.commands import sanity

    train.add_arguments(parser)
    sanity.add_arguments(parser)
    return lambda args: sanity.main(args, train.parse_config)


def _prepare(parser):
    from mmldlm.data.prepare import options
    from mmldlm.data.prepare import pipeline as prepare

    options.add_arguments(parser)
    return lambda args: _prepare_by_ranks(args, prepare, options)


def _prepare_by_ranks(args, prepare, options) -> int:
    """Alone in this process, or become the launcher of several ranks."""
    import torch

    _check_ranks("--num-procs", args.num_procs)
    nproc = args.num_procs or (1 if "RANK" in os.environ else max(torch.cuda.device_count(), 1))
    if nproc == 1 or "RANK" in os.environ:
        return prepare.main(args)
    words = options.to_arguments(options.from_arguments(args))
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):  # the encoder's threads, and the tokenizer's
        os.environ.setdefault(name, str(max((os.cpu_count() or 1) // nproc, 1)))
    launcher = [sys.executable, "-m", "mmldlm.launch.local_launcher", str(nproc), "-m", "mmldlm.data.prepare"]
    os.execv(sys.executable, [*launcher, *words])


def _train(parser):
    from mmldlm import train

    train.add_arguments(parser)
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks on this machine (default: its GPUs, or 1)")
    return lambda args: _launch_local(args, train)


def _launch_local(args, train) -> int:
    """Check everything in this process, then become the launcher: a mistake is found before any rank starts."""
    import torch

    _check_ranks("--nproc", args.nproc)
    nproc = args.nproc or max(torch.cuda.device_count(), 1)
    config = train.parse_config(args)
    train.check_run(config, nproc)
    words = [*_option("--config-name", args.config_name), *_option("--config", args.config)]
    words += [*_option("--deepspeed_config", args.deepspeed_config), *args.overrides]
    script = Path(train.__file__)
    if config.engine.kind == "single":
        os.execv(sys.executable, [sys.executable, str(script), *words])
    # On CPUs every rank would start a thread pool of all cores, and they would fight.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc, 1)))
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Not the deepspeed launcher: a signal to it ends the ranks unsaved, or not at all (launch/local_launcher.py).
    os.execv(sys.executable, [sys.executable, "-m", "mmldlm.launch.local_launcher", str(nproc), str(script), *words])


def _check_ranks(option: str, count: int | None) -> None:
    if count is not None and count < 1:
        raise UserError(f"{option} of at least 1", str(count), "give the number of ranks, or leave it out")


def _convert(parser):
    # numpy's OpenBLAS starts a thread for every core, which takes as long as all other imports; nothing here uses it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from mmldlm.commands import convert

    convert.add_arguments(parser)
    return convert.main


def _convert_part(part: str):
    def fill(parser):
        from mmldlm.commands import convert

        return convert.add_part_arguments(parser, part)

    return fill


def _sample_kind(kind: str):
    def fill(parser):
        from mmldlm.commands import sample as run

        run.add_arguments(parser, kind)
        return run.main

    return fill


def _option(name: str, value) -> list[str]:
    return [] if value is None else [name, str(value)]


# Verb (of one word or two) -> (who fills its parser and runs it, help). A module's name stands for its add_arguments
# and main.
VERBS = {
    "prepare": (_prepare, "encode a corpus into a store"),
    "pack": (
        "mmldlm.data.importers.sample_folders",
        "make a store of MM-LDLM's folders of text or token files and latents",
    ),
    "verify-data": ("mmldlm.data.store.verify", "check a store: checksums, dims, norms, leakage"),
    "config": (_config, "print the resolved config and parameter counts"),
    "sanity": (_sanity, "a few real steps in one process, every part of them checked"),
    "preflight": ("mmldlm.preflight.runner", "will this run start on these hosts, fit and finish?"),
    "launch": ("mmldlm.launch.launcher", "preflight, then the launcher, then a watcher"),
    "replay": ("mmldlm.commands.replay", "rerun a skipped step and name the operation behind its non-finite numbers"),
    "train": (_train, "check everything, then train on this machine"),
    "convert": (_convert, "a checkpoint as safetensors, or for another engine and world size"),
    "convert inspect": (_convert_part("inspect"), "what a checkpoint holds; no weight is read"),
    "convert diff": (_convert_part("diff"), "where two checkpoints differ, tensor by tensor"),
    "sample": ("mmldlm.commands.sample", "text from embeddings, embeddings from text, or both from nothing"),
    "sample l2t": (_sample_kind("l2t"), "text from embeddings"),
    "sample t2l": (_sample_kind("t2l"), "embeddings from text"),
    "sample unconditional": (_sample_kind("unconditional"), "text and embeddings from nothing"),
    "evaluate": ("mmldlm.commands.evaluate", "conditioning gain, retrieval and F1 on unseen text"),
    "plot": ("mmldlm.commands.plot", "draw a run's loss curve"),
    "monitor": ("mmldlm.commands.monitor", "follow a run's log and report its health"),
}


def _add_arguments(parser: argparse.ArgumentParser, verb: str):
    """Add a verb's options to its parser; returns what runs it. Imports only what the verb needs."""
    how = VERBS[verb][0]
    if callable(how):
        return how(parser)
    module = importlib.import_module(how)
    module.add_arguments(parser)
    return module.main


def _explain_import(error: Exception, verb: str) -> UserError | None:
    """What an error means that came while packages were imported, where PYTHONPATH puts others in their place."""
    trace, is_import = error.__traceback__, isinstance(error, ImportError)
    while trace is not None:
        is_import = is_import or trace.tb_frame.f_code.co_name == "<module>"
        trace = trace.tb_next
    replaced = _replaced_packages() if is_import else []
    if not replaced:
        return None
    return UserError(
        f"the packages that mmldlm was installed with, for `mmldlm {verb}`",
        f"{type(error).__name__}: {error}; PYTHONPATH puts others in their place: {', '.join(replaced)}",
        "start it with another PYTHONPATH (unset PYTHONPATH)",
    )


def _replaced_packages() -> list[str]:
    """Files on PYTHONPATH that take the place of packages installed beside this Python's own."""
    import sysconfig

    installed = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    folders = [Path(name) for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name]
    found = []
    for folder in folders:
        if folder.is_dir() and folder.resolve() not in {place.resolve() for place in installed}:
            entries = [path for path in folder.iterdir() if path.suffix in ("", ".py") and path.stem != "mmldlm"]
            found += [str(path) for path in entries if any((place / path.stem).is_dir() for place in installed)]
    return sorted(found)


def _print_help(argv: list[str]) -> int:
    """What stands in for a verb: --help, --version, nothing, or a mistake."""
    parser = argparse.ArgumentParser(
        prog="mmldlm", description="Train and use an MMDiT between text and sentence embeddings."
    )
    parser.add_argument("--version", action="version", version=f"mmldlm {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, (_, text) in VERBS.items():
        if " " in name:
            continue
        verbs.add_parser(name, help=text, add_help=False)
    parser.parse_args(argv[:1])
    parser.print_help()
    return EXIT_USAGE


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    open_standard_streams()
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in VERBS:
        return _print_help(argv)
    verb = next(verb for verb in (" ".join(argv[:2]), argv[0]) if verb in VERBS)
    words = argv[len(verb.split(" ")) :]
    _make_output_encodable()
    interrupt_on_stop_signals()
    own = argparse.ArgumentParser(prog=f"mmldlm {verb}", description=VERBS[verb][1])
    try:
        run = _add_arguments(own, verb)
        code = run(own.parse_intermixed_args(words)) or EXIT_DONE
        sys.stdout.flush()
        return code
    except MmldlmError as error:
        print(for_screen(f"error: {error}", sys.stderr), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:  # a room that can go on later says so in it
        print(": ".join(["interrupted", *map(str, error.args)]), file=sys.stderr)
        return EXIT_INTERRUPTED if error.args else EXIT_FAILED
    except OSError as error:  # a path or a disk that no room has foreseen: the system says what is wrong, no traceback
        if isinstance(error, BrokenPipeError) and _stdout_closed():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor must the interpreter complain of it
            return EXIT_FAILED
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"error: {where}{describe_os_error(error)}", file=sys.stderr)
        return EXIT_FAILED
    except Exception as error:
        explained = _explain_import(error, verb)
        if explained is None:
            raise
        print(f"error: {explained}", file=sys.stderr)
        return explained.exit_code


def _make_output_encodable() -> None:
    """Where the terminal's encoding (LC_ALL=C) lacks a sign, its number stands for it: no text is worth a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure") and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="backslashreplace")


def _stdout_closed() -> bool:
    """Whether the broken pipe is that of the output, as in `... | head`: any other is an error to be told."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # an output without a number
        return False


def console_main() -> NoReturn:
    """Entry of the console command."""
    code = main()
    if sys.argv[1:2] == ["convert"]:
        leave_at_once(code)
    sys.exit(code)


def leave_at_once(code: int) -> NoReturn:
    """Ends the process without taking the interpreter apart, which takes a conversion of a second's quarter 15 ms.

    For commands that leave no thread, child or exit handler behind.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # whoever read has enough
        code = code or EXIT_FAILED
    except (OSError, ValueError):
        sys.exit(code)  # the interpreter says what is wrong
    os._exit(code)


if __name__ == "__main__":
    console_main()
