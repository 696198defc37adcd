"""Run a preflight: collect facts up to a level, run the checks, print the report, write the
receipt.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from mmldlm.cluster.agent import Agent, AgentPool
from mmldlm.cluster.env_propagation import write_env_file
from mmldlm.cluster.hostfile import LOCAL_NAMES, Node, read_hostfile, write_hostfile
from mmldlm.errors import EXIT_DONE, UserError
from mmldlm.preflight import receipt
from mmldlm.preflight.agent import PROBES, run_probes
from mmldlm.preflight.check import Check, Result, registered_checks, run_check
from mmldlm.preflight.checks import (
    collectives,
    config,
    connections,
    dry_run,
    gpu,
    hosts,
    launchers,
    limits,
    memory,
    network,
    processes,
    rdma,
    resume,
    script,
    storage,
    versions,
)
from mmldlm.preflight.context import Context
from mmldlm.preflight.report import exit_code, failing_nodes, print_report
from mmldlm.tasks.registry import load_config
from mmldlm.utils.formatting import count_noun
from mmldlm.utils.run_files import PASSING_NODES, PREFLIGHT

# Order of the checks of one level, in reports and in docs/preflight.md.
CHECK_MODULES = (
    storage,
    versions,
    collectives,
    dry_run,
    gpu,
    limits,
    processes,
    launchers,
    config,
    script,
    memory,
    resume,
    network,
    connections,
    rdma,
    hosts,
)

AGENT = "mmldlm.preflight.agent"
HEAD_PROBES = ("gpus", "memory", "network", "resolve", "checkpoints")


def run_preflight(args: argparse.Namespace) -> tuple[Context, int]:
    """Collect, check, print and write receipts; return the context and the exit code.

    Args:
        args: Options of mmldlm/commands/preflight.py or launch.py.
    """
    started = time.perf_counter()
    context, results = run_checks(args)
    code = exit_code(results, args.strict)
    seconds = time.perf_counter() - started
    print_report(context, results, seconds, sys.stdout)
    write_receipts(context, results, code, seconds, args.json)
    return context, code


def run_checks(args: argparse.Namespace) -> tuple[Context, list[Result]]:
    """Collect the facts and run the selected checks."""
    selected = select_checks(args.only, args.skip, args.level)
    context = create_context(args)
    context.check_ids = {check.id for check in selected}
    collect_facts(context)
    if args.fix:
        apply_fix(context)
    return context, [result for check in selected for result in run_check(check, context)]


def all_checks() -> list[Check]:
    """Return every check, by level, then in the order of CHECK_MODULES and of each file."""
    modules = [module.__name__ for module in CHECK_MODULES]
    checks = [check for check in registered_checks() if check.function.__module__ in modules]
    return sorted(
        checks, key=lambda check: (check.level, modules.index(check.function.__module__))
    )


def select_checks(only: str | None, without: str | None, level: int) -> list[Check]:
    """Return the checks to run.

    Raises:
        UserError: an id that does not exist.
    """
    checks = all_checks()
    included, excluded = (
        {id.strip().upper() for id in (ids or "").split(",") if id} for ids in (only, without)
    )  # fmt: skip
    unknown = (included | excluded) - {check.id for check in checks}
    if unknown:
        raise UserError(
            "ids of checks",
            ", ".join(sorted(unknown)),
            "mmldlm preflight --explain all lists them",
        )
    return [
        check
        for check in checks
        if check.level <= level
        and check.id not in excluded
        and (not included or check.id in included)
    ]


def create_context(args: argparse.Namespace) -> Context:
    """Read hostfile and config; HOST001 and CFG001 report their errors.

    Raises:
        UserError: both --hostfile and --nproc give the number of ranks.
    """
    if args.hostfile is not None and args.nproc is not None:
        raise UserError(
            "--hostfile, whose slots are the ranks of each node, or --nproc for one machine",
            f"--hostfile {args.hostfile} and --nproc {args.nproc}",
            "leave out --nproc, and write slots=N in the hostfile",
        )
    context = Context(args)
    if args.hostfile is None:
        context.nodes, context.local = [Node("localhost", args.nproc or 0)], True
    else:
        try:
            context.nodes = read_hostfile(args.hostfile)
            context.local = context.nodes[0].name in LOCAL_NAMES
        except UserError as error:
            context.hostfile_error = error
    if args.script is not None:
        return context
    overrides = list(args.overrides)
    if args.deepspeed_config:
        overrides.append(f"engine.deepspeed_config={args.deepspeed_config}")
    try:
        context.config = load_config(args.config_name, args.config, overrides)
    except UserError as error:
        context.config_error = error
    return context


def collect_facts(context: Context) -> None:
    """Fill the context up to the requested level."""
    collect_head(context)
    if context.nodes and context.nodes[0].slots == 0:
        gpus = (context.head_value("gpus") or {}).get("gpus") or ()
        is_single = context.config is not None and context.config.engine.kind == "single"
        context.nodes = [Node("localhost", 1 if is_single else len(gpus) or 1)]
    level, options = context.level, context.options
    with contextlib.ExitStack() as stack:
        with config.data_probe(context):
            if level == 0 or not context.nodes:
                return
            agents = [
                Agent(name, AGENT, context.local, options.ssh_port, options.ssh_option)
                for name in context.names
            ]
            pool = AgentPool(agents)
            context.failures, context.errors = pool.failures, pool.errors
            stack.callback(pool.stop)
            _log_progress(f"asking {len(context.nodes)} node(s) ...")
            collect_nodes(context, pool)
            if level >= 2:
                collect_cluster(context, pool)
        if level >= 3:
            _log_progress("collectives on all ranks (a few minutes at most) ...")
            collectives.run_collectives(context, pool)
        if level >= 4 and context.config is not None and not pool.failures:
            if "data_error" not in context.data_facts:
                _log_progress("two training steps, a save and a resume (at most 5 minutes) ...")
                dry_run.run_training(context, pool)


def collect_head(context: Context) -> None:
    """Collect the facts of this machine.

    Call it before any thread is started, because probes fork.
    """
    context.head = run_probes(_probe_request(context, HEAD_PROBES))


def _probe_request(context: Context, probes: Iterable[str]) -> dict:
    """Return the arguments of the probes, and as "probes" those for which the config has them."""
    request: dict = {"names": context.names, "master": context.options.master_addr}
    request["local"] = context.local
    if request["master"] is None and context.nodes and not context.local:
        # An address of the first node, to which the nodes look up their route.
        first = context.names[0]
        request["master"] = next(iter(context.reachable_addresses(first)), first)
    lacking = {"checkpoints", "data"}
    if context.script is None:
        lacking.add("script")
    else:
        request |= script.request(context.script)
    if context.config is not None:
        request["save_dir"] = os.path.abspath(context.config.logging.save_dir)
        lacking.remove("checkpoints")
        if context.config.data.roots:
            request["data_roots"] = [os.path.abspath(root) for root in context.config.data.roots]
            lacking.remove("data")
    return {**request, "probes": [name for name in probes if name not in lacking]}


def collect_nodes(context: Context, pool: AgentPool) -> None:
    """Level 1: collect the facts of every node, all at the same time."""
    pool.start()
    hosts.detect_lost_packets(context, pool)
    request = _probe_request(context, PROBES)
    # Names that only ssh's configuration defines here are no names on a node.
    request["known"] = {
        name: lookup["addresses"]
        for name, lookup in (context.head_value("resolve") or {}).items()
        if "addresses" in lookup and "ssh" not in lookup
    }
    # A folder of cuda-compat there decides which CUDA the ranks have.
    request["library_path"] = (context.passed_variables() or {}).get("LD_LIBRARY_PATH")
    longest = max(PROBES[name][1] for name in request["probes"])
    context.facts = pool.call("collect_facts", request, timeout=longest + 5)


def collect_cluster(context: Context, pool: AgentPool) -> None:
    """Level 2: collect clocks, master address and port, all connections, the shared folder,
    launcher environments.
    """
    context.clocks = pool.clocks()
    connections.collect_connections(context, pool)
    launchers.run_launcher_probe(context)
    if context.config is not None and len(context.nodes) > 1:
        storage.collect_shared_folder(context, pool)


def _log_progress(text: str) -> None:
    """Print what takes time, to stderr: stdout is the report."""
    print(f"preflight: {text}", file=sys.stderr, flush=True)


def apply_fix(context: Context) -> None:
    """Write variables that are not propagated to ./.deepspeed_env, and run the launcher probe
    again.
    """
    environments = [context.environment_on(name) for name in context.facts]
    missing = sorted(
        {
            name
            for on_node in environments
            if on_node is not None
            for name in launchers.not_propagated(on_node)
        }
    )
    if not missing or context.launcher != "deepspeed":
        return
    path = Path(os.environ.get("DS_ENV_FILE", ".deepspeed_env"))
    refused = write_env_file(path, missing)
    added = [name for name in missing if name not in refused]
    print(f"wrote {', '.join(added) or 'nothing'} to {path}")
    if refused:
        print(f"not written (secret, or not plain text): {', '.join(refused)}")
    if added:
        launchers.run_launcher_probe(context)


def write_receipts(
    context: Context, results: list[Result], code: int, seconds: float, path: str | None
) -> None:
    """Write the receipt of a complete preflight to the run folder, and to `path` if given; beside
    the former, of several nodes, a hostfile of those that passed.
    """
    created = receipt.create(context, results, code, seconds)
    if path is not None:
        receipt.write(created, Path(path))
    if (
        context.config is not None
        and context.level >= 1
        and not (context.options.only or context.options.skip)
    ):
        try:
            receipt.write(created, context.config.run_dir() / PREFLIGHT)
            if len(context.nodes) > 1:
                write_passing_nodes(context, results, context.config.run_dir() / PASSING_NODES)
        except OSError as error:
            # CKPT001 reports it too; the exit code does not depend on it.
            print(f"no receipt in {context.config.run_dir()}: {error.strerror}", file=sys.stderr)


def write_passing_nodes(context: Context, results: list[Result], path: Path) -> None:
    """Write a hostfile of the nodes without a failed check, and say where if it leaves some out.

    Where none is left, an earlier file is removed.
    """
    failing = failing_nodes(context, results)
    passing = [node for node in context.nodes if node.name not in failing]
    if not passing:
        path.unlink(missing_ok=True)
        return
    write_hostfile(path, passing)
    if failing:
        print(f"  the other {count_noun(len(passing), 'node')}: --hostfile {path}")


def explain(id: str) -> int:
    """Print the description of a check, or the list of all checks; return the exit code."""
    checks = all_checks()
    if id.lower() == "all":
        for check in checks:
            print(f"{check.id}  level {check.level}, {check.scope:7}  {check.title}")
        return EXIT_DONE
    explained = next((check for check in checks if check.id == id.upper()), None)
    if explained is None:
        raise UserError("the id of a check", id, "mmldlm preflight --explain all lists them")
    print(f"{explained.id} {explained.title} (level {explained.level}, {explained.scope})\n")
    print(inspect.getdoc(explained.function))
    return EXIT_DONE
