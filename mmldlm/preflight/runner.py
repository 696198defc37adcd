"""`mmldlm preflight`: gather the facts up to a level, run the checks, show and record the verdict."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import time
from pathlib import Path

from mmldlm.cluster.hostfile import LOCAL_NAMES, Node, read_hostfile
from mmldlm.config.load import load_config, preset_names
from mmldlm.errors import EXIT_DONE, UserError
from mmldlm.preflight import collect, receipt
from mmldlm.preflight.check import Result, all_checks, run_check
from mmldlm.preflight.context import Context
from mmldlm.preflight.dynamic import dry_run, launcher_probe
from mmldlm.preflight.report import exit_code, print_report

LAUNCHERS = ("deepspeed", "torchrun", "mpi", "slurm")
DEFAULT_LEVEL = 2


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say which run is meant: shared with `mmldlm launch`."""
    parser.add_argument("--hostfile", metavar="FILE", help="DeepSpeed hostfile; without it, this machine alone")
    parser.add_argument("--config-name", metavar="NAME", help=f"preset: {', '.join(preset_names())}")
    parser.add_argument("--config", metavar="FILE", help="YAML file, read over the preset")
    parser.add_argument("--deepspeed_config", "--deepspeed-config", metavar="JSON", help="DeepSpeed settings")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="deepspeed")
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks on this machine, without a hostfile")
    parser.add_argument("--master_addr", "--master-addr", metavar="ADDRESS", help="first node's address")
    parser.add_argument("--master_port", "--master-port", type=int, default=29500, metavar="PORT")
    parser.add_argument("--ssh-port", type=int, metavar="PORT")
    parser.add_argument("--ssh-option", action="append", default=[], metavar="WORD", help="further word for ssh")
    parser.add_argument("--strict", action="store_true", help="a warning counts as a failure")
    parser.add_argument("--only", metavar="ID,...", help="only these checks")
    parser.add_argument("--skip", metavar="ID,...", help="without these checks")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set single keys")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `mmldlm preflight`."""
    add_run_arguments(parser)
    parser.add_argument(
        "--level",
        type=int,
        choices=range(5),
        default=DEFAULT_LEVEL,
        help="0 this machine, 1 each node, 2 nodes together (default), 3 collectives, 4 two training steps",
    )
    parser.add_argument("--json", metavar="FILE", help="write the receipt there too")
    parser.add_argument("--explain", metavar="ID", help="say what a check looks at ('all': list them)")
    parser.add_argument("--fix", action="store_true", help="write the variables that stay behind to ./.deepspeed_env")


def main(args: argparse.Namespace) -> int:
    """Run the preflight; returns the exit code (ARCHITECTURE: 0, 1, 2 or 3)."""
    if args.explain:
        return explain(args.explain)
    started = time.perf_counter()
    context, results = run(args)
    code = exit_code(results, args.strict)
    seconds = time.perf_counter() - started
    print_report(context, results, seconds, sys.stdout)
    record(context, results, code, seconds, args.json)
    return code


def run(args: argparse.Namespace) -> tuple[Context, list[Result]]:
    """Gather and judge. Adds the defaults that only `mmldlm launch` changes."""
    args.carries_all = getattr(args, "carries_all", False)
    chosen = select(args.only, args.skip, args.level)
    context = plan_run(args)
    context.chosen = {check.id for check in chosen}
    measure(context)
    if getattr(args, "fix", False):
        apply_fix(context)
    return context, [result for check in chosen for result in run_check(check, context)]


def select(only: str | None, without: str | None, level: int):
    """The checks to run.

    Raises:
        UserError: an id that does not exist.
    """
    checks = all_checks()
    known = {check.id for check in checks}
    run_variables, unwanted = (
        {word.strip().upper() for word in (words or "").split(",") if word} for words in (only, without)
    )
    if (run_variables | unwanted) - known:
        raise UserError(
            "ids of checks",
            ", ".join(sorted((run_variables | unwanted) - known)),
            "mmldlm preflight --explain all lists them",
        )
    return [
        c for c in checks if c.level <= level and c.id not in unwanted and (not run_variables or c.id in run_variables)
    ]


def plan_run(args: argparse.Namespace) -> Context:
    """Hostfile and config; what is wrong with them is kept for HOST001 and CFG001."""
    context = Context(args)
    if args.hostfile is None:
        context.nodes, context.local = [Node("localhost", args.nproc or 0)], True
    else:
        try:
            context.nodes = read_hostfile(args.hostfile)
            context.local = context.nodes[0].name in LOCAL_NAMES
        except UserError as error:
            context.hostfile_error = error
    words = list(args.overrides)
    if args.deepspeed_config:
        words.append(f"engine.deepspeed_config={args.deepspeed_config}")
    try:
        context.config = load_config(args.config_name, args.config, words)
    except UserError as error:
        context.config_error = error
    return context


def measure(context: Context) -> None:
    """Fill the context up to the level that was asked for."""
    collect.collect_head(context)
    if context.nodes and context.nodes[0].slots == 0:
        gpus = (context.head_value("gpus") or {}).get("gpus") or ()
        context.nodes = [Node("localhost", len(gpus) or 1)]
    child = collect.start_plan(context)
    try:
        if context.level >= 1 and context.nodes:
            fleet = collect.open_fleet(context)
            try:
                _say(f"asking {len(context.nodes)} node(s) ...")
                collect.measure_nodes(context, fleet)
                if context.level >= 2:
                    collect.measure_together(context, fleet)
                if context.level >= 3:
                    _say("collectives on all ranks (some minutes at most) ...")
                    dry_run.rehearse_collectives(context, fleet)
                if context.level >= 4 and context.config is not None and len(fleet.failures) == 0:
                    collect.finish_plan(context, child)
                    child = None
                    if "data_error" not in context.plan:
                        _say("two training steps, a save and a resume (at most 5 minutes) ...")
                        dry_run.rehearse_training(context, fleet)
            finally:
                fleet.stop()
    finally:
        collect.finish_plan(context, child)


def _say(what: str) -> None:
    """What takes the time; not on stdout, which is the report."""
    print(f"preflight: {what}", file=sys.stderr, flush=True)


def apply_fix(context: Context) -> None:
    """Write the variables that stay behind on any node to ./.deepspeed_env, and look again what arrives."""
    from mmldlm.cluster.env_propagation import run_variables, write_env_file

    here = run_variables()
    views = [there for name in context.facts if (there := context.environment_on(name)) is not None]
    behind = sorted(key for key, value in here.items() if any(there.get(key) != value for there in views))
    if behind and context.launcher == "deepspeed":
        path = Path(os.environ.get("DS_ENV_FILE", ".deepspeed_env"))
        refused = write_env_file(path, behind)
        written = [name for name in behind if name not in refused]
        print(f"wrote {', '.join(written) or 'nothing'} to {path}")
        if refused:
            print(f"not written (secret, or not plain text): {', '.join(refused)}")
        if written and (probe := launcher_probe.start_probe(context)) is not None:
            context.arrived.clear()
            probe.finish()


def record(context: Context, results: list[Result], code: int, seconds: float, path: str | None) -> None:
    """Write the receipt to the run's folder and, when asked, to a file of the user's."""
    made = receipt.make(context, results, code, seconds)
    if path is not None:
        receipt.write(made, Path(path))
    if context.config is not None and context.level >= 1 and not (context.options.only or context.options.skip):
        try:
            receipt.write(made, context.config.run_dir() / receipt.NAME)
        except OSError as error:  # CKPT001 says it too; the verdict stands without the file
            print(f"no receipt in {context.config.run_dir()}: {error.strerror}", file=sys.stderr)


def explain(id: str) -> int:
    """Print what a check looks at, or the list of all checks."""
    checks = all_checks()
    if id.lower() == "all":
        for check in checks:
            print(f"{check.id}  level {check.level}, {check.scope:7}  {check.title}")
        return EXIT_DONE
    found = next((check for check in checks if check.id == id.upper()), None)
    if found is None:
        raise UserError("the id of a check", id, "mmldlm preflight --explain all lists them")
    print(f"{found.id} {found.title} (level {found.level}, {found.scope})\n")
    print(inspect.cleandoc(found.function.__doc__))
    return EXIT_DONE
