"""`mmldlm <verb>`: dispatch to mmldlm/commands/<verb>.py."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import select
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from mmldlm import __version__
from mmldlm.config import earlier_systems
from mmldlm.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    MmldlmError,
    UserError,
)
from mmldlm.utils.command_parser import CommandParser
from mmldlm.utils.environment import leave_platform
from mmldlm.utils.formatting import did_you_mean, explain_os_error, first_line, for_screen
from mmldlm.utils.own_code import report_exit_as_error
from mmldlm.utils.paths import check_working_folder
from mmldlm.utils.stop_signals import interrupt_on_stop_signals, keep_exit_codes
from mmldlm.utils.streams import open_standard_streams

Main = Callable[[argparse.Namespace], int | None]
"""The main of a verb: options -> exit code, None for 0."""


def _completion(parser: argparse.ArgumentParser) -> Main:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="shell that reads it")
    return _print_completion


def _print_completion(args: argparse.Namespace) -> None:
    """Print a script for a shell, which then completes verbs, options, choices and files."""
    try:
        import shtab
    except ImportError as error:
        raise UserError("the package shtab", str(error), "pip install shtab") from error
    from mmldlm.config.load import preset_names
    from mmldlm.utils import option_types

    parser = argparse.ArgumentParser("mmldlm")
    verbs = parser.add_subparsers(dest="verb")
    for name, (_, text) in VERBS.items():
        if " " not in name:
            _add_arguments(verb := verbs.add_parser(name, help=text), name)
            for action in verb._actions:
                if action.dest == "config_name":
                    action.choices = preset_names()
                elif action.type is option_types.path:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))


def _sample(parser: argparse.ArgumentParser, kind: str) -> Main:
    from mmldlm.commands import sample

    sample.add_arguments(parser, kind)
    return sample.main


# Verbs for which several machines may be meant.
STARTS_RANKS = ("train", "launch", "preflight")

# Verb (of one or two words) -> (entry, help). An entry is a module with add_arguments and main,
# `module:NAME` for one with add_NAME_arguments and NAME, or a function that adds the options to a
# parser and returns main.
VERBS: dict[str, tuple[str | Callable[[argparse.ArgumentParser], Main], str]] = {
    "init": (
        "mmldlm.commands.init",
        "lay out host files, DeepSpeed settings and launcher scripts to edit",
    ),
    "prepare": ("mmldlm.commands.prepare", "encode a corpus into a store"),
    "pack": (
        "mmldlm.commands.pack",
        "turn texts and latents of your own, or MM-LDLM's folders, into a store",
    ),
    "verify-data": (
        "mmldlm.commands.verify_data",
        "check a store: checksums, dimensions, norms, leakage",
    ),
    "config": ("mmldlm.commands.config", "print the resolved config and parameter counts"),
    "sanity": ("mmldlm.commands.sanity", "check a config with a few real steps in one process"),
    "preflight": (
        "mmldlm.commands.preflight",
        "check whether a run will start on its hosts, fit and finish",
    ),
    "launch": ("mmldlm.commands.launch", "preflight, then the launcher, then a watcher"),
    "replay": (
        "mmldlm.commands.replay",
        "rerun a skipped step and name the operation behind its non-finite numbers",
    ),
    "train": ("mmldlm.commands.train", "check everything, then train on this machine"),
    "convert": (
        "mmldlm.commands.convert",
        "convert a checkpoint to safetensors, or for another engine and world size",
    ),
    "convert inspect": (
        "mmldlm.commands.convert:inspect",
        "print the content of a checkpoint without reading its weights",
    ),
    "convert diff": (
        "mmldlm.commands.convert:diff",
        "compare two checkpoints tensor by tensor",
    ),
    "push": ("mmldlm.commands.push", "publish a converted model on the Hugging Face hub"),
    "sample": (
        "mmldlm.commands.sample",
        "text from embeddings, embeddings from text, or both unconditionally",
    ),
    "sample l2t": (partial(_sample, kind="l2t"), "text from embeddings"),
    "sample t2l": (partial(_sample, kind="t2l"), "embeddings from text"),
    "sample unconditional": (
        partial(_sample, kind="unconditional"),
        "text and embeddings without a condition",
    ),
    "hypotheses": (
        "mmldlm.commands.hypotheses",
        "write and embed a model's texts, to train a corrector on",
    ),
    "evaluate": (
        "mmldlm.commands.evaluate",
        "measure conditioning gain, retrieval and F1 on unseen text, or STS-B",
    ),
    "plot": ("mmldlm.commands.run_log:plot", "draw a run's loss curve"),
    "report": (
        "mmldlm.commands.run_log:report",
        "write a page about a run: curves, events, validation, config",
    ),
    "completion": (_completion, "print what makes a shell complete verbs, options and files"),
    "monitor": (
        "mmldlm.commands.run_log:monitor",
        "follow a run's log and report its health",
    ),
}


def _add_arguments(parser: argparse.ArgumentParser, verb: str) -> Main:
    """Add a verb's options to its parser; return its main.

    Imports only the modules of this verb.
    """
    entry = VERBS[verb][0]
    if callable(entry):
        return entry(parser)
    if verb.startswith("convert"):
        # numpy's OpenBLAS starts a thread per core, which takes as long as all other imports and
        # is not used here.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    path, _, name = entry.partition(":")
    module = importlib.import_module(path)
    getattr(module, f"add_{name}_arguments" if name else "add_arguments")(parser)
    return getattr(module, name or "main")


def _report_unread_variables(verb: str, arguments: list[str]) -> None:
    """Name set variables of MM-LDLM's scripts, which commands do not read.

    Raises:
        UserError: one that has another name in our scripts, too.
    """
    for name, word in earlier_systems.unread_variables(arguments, os.environ):
        if name.startswith("L2T_"):
            raise UserError(
                "settings that mmldlm reads",
                f"{name}={os.environ[name]}, a variable of MM-LDLM's scripts",
                f"unset {name}, and write {word}",
            )
        print(f"note: mmldlm {verb} does not read {name}: write {word}", file=sys.stderr)


def _print_help(argv: list[str]) -> int:
    """Handle arguments without a valid verb: --help, --version, none, or an unknown verb."""
    if argv and not argv[0].startswith("-"):
        names = [name for name in VERBS if " " not in name]
        error = UserError(
            "a verb of mmldlm",
            f"{argv[0]}{earlier_systems.hint_for_script(argv[0]) or did_you_mean(argv[0], names)}",
            "`mmldlm --help` lists the verbs",
        )
        print(for_screen(f"error: {error}", sys.stderr), file=sys.stderr)
        return error.exit_code
    parser = CommandParser(
        "mmldlm", "Train and use an MMDiT between text and sentence embeddings."
    )
    parser.add_argument("--version", action="version", version=f"mmldlm {__version__}")
    verbs = parser.add_subparsers(
        title="verbs", dest="verb", metavar="VERB", parser_class=argparse.ArgumentParser
    )
    for name, (_, text) in VERBS.items():
        if " " in name:
            continue
        verbs.add_parser(name, help=text, add_help=False)
    parser.parse_args(argv[:1])
    parser.print_help()
    return EXIT_USAGE


def main(argv: list[str] | None = None) -> int:
    """Run a command; return the exit code."""
    open_standard_streams()
    keep_exit_codes()
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in VERBS:
        return _print_help(argv)
    verb = next(verb for verb in (" ".join(argv[:2]), argv[0]) if verb in VERBS)
    arguments = argv[len(verb.split(" ")) :]
    interrupt_on_stop_signals()
    parser = CommandParser(f"mmldlm {verb}", VERBS[verb][1])
    parser.hints = earlier_systems.OPTIONS
    try:
        check_working_folder()
        run = _add_arguments(parser, verb)
        args = parser.parse(arguments)
        if verb == "prepare":
            args.words = arguments  # for the ranks that it starts
        if verb not in STARTS_RANKS:
            leave_platform(verb)
        if hasattr(args, "overrides") and getattr(args, "script", None) is None:
            _report_unread_variables(verb, arguments)
        with report_exit_as_error():
            code = run(args) or EXIT_DONE
        sys.stdout.flush()
        return code
    except MmldlmError as error:
        print(for_screen(f"error: {error}", sys.stderr), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:  # its message says how to resume, if the command can
        print(": ".join(["interrupted", *map(str, error.args)]), file=sys.stderr)
        return EXIT_INTERRUPTED if error.args else EXIT_FAILED
    except OSError as error:
        # An unexpected path or disk error: its message suffices, without a traceback.
        if isinstance(error, BrokenPipeError) and _stdout_closed():
            # For the interpreter's flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_FAILED
        print(f"error: {explain_os_error(error)}", file=sys.stderr)
        return EXIT_FAILED
    except (MemoryError, RuntimeError) as error:
        # NumPy's, and torch's on a CPU.
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        print(
            f"error: not enough memory: {first_line(error)}; ask for less at once", file=sys.stderr
        )
        return EXIT_FAILED


def _stdout_closed() -> bool:
    """Whether standard output is a closed pipe, as in `... | head`; any other broken pipe is
    reported.
    """
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # an output without a file descriptor
        return False


def console_main() -> NoReturn:
    """Entry point of the `mmldlm` command."""
    # Walking torch's objects, at every 700 new ones and at the exit, takes a sixth of `config`.
    gc.set_threshold(10_000)
    code = main()
    gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    console_main()
