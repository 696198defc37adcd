"""Elastic launches: continue without the nodes that failed, and take them back when they return.

The sample order depends on the global batch, so every set of nodes must reach it with a whole
number of accumulated micro-batches. Healthy nodes beyond the largest such set wait.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from mmldlm.cluster.agent import Agent, AgentFailure
from mmldlm.cluster.hostfile import Node, write_hostfile
from mmldlm.cluster.launcher_commands import train_arguments
from mmldlm.errors import MmldlmError
from mmldlm.preflight.check import ERROR, FAIL
from mmldlm.preflight.context import Context
from mmldlm.utils.formatting import count_noun, join_some
from mmldlm.utils.input_files import read_text
from mmldlm.utils.streams import print_line

# Between two attempts to reach absent nodes; after checks that failed, the longer one.
ASK_SECONDS, ASK_AGAIN_SECONDS = 10.0, 120.0
CHECK_SECONDS = 300.0
# What a node must pass to return, beside one that trains: the checks of level 1, and those of
# level 2 that compare it with the other, also those that only warn. The rest concern the job, a
# script or what only costs time, or would start a launcher.
RETURN_CHECKS = (
    "DATA002", "CKPT001", "GPU001", "GPU002", "GPU003", "GPU004", "LIM001", "LIM002", "LIM003",
    "LIM004", "PROC001", "JIT001", "NET001", "NET002", "HOST004", "SSH001", "SSH002", "SSH003",
    "SSH004", "SSH005", "SSH006", "PY001", "PY002", "DATA003", "CKPT002", "VER001", "VER002",
    "GPU005", "GPU006", "NET003", "NET006", "NET007", "RDMA001", "CLK001",
)  # fmt: skip


class ElasticNodes:
    """The nodes of a launch, of which some may be absent.

    Args:
        context: Context of the preflight, whose `nodes` are kept to those that train.

    Attributes:
        absent: Names of the nodes that failed.
    """

    def __init__(self, context: Context):
        self.context = context
        self.absent: set[str] = set()
        self._all = list(context.nodes)
        self._first_address = context.master.get("address")
        self._global_batch = None if context.config is None else context.global_batch

    def exclude(self, failed: Iterable[str]) -> bool:
        """Continue with the nodes that are present, without these; return whether some can
        train.
        """
        self.absent |= set(failed)
        nodes = self._largest_set(self._present())
        if nodes is None:
            print_line(f"cannot continue: {self._why_none()}", sys.stderr)
            return False
        self._train_on(nodes)
        who = f"without {_names(self.absent)}" if self.absent else "with all nodes"
        print_line(f"continuing {who}: {self._described()}", sys.stderr)
        return True

    def would_gain(self, returned: Iterable[str]) -> bool:
        """Return whether more ranks could train with these nodes than train now."""
        nodes = self._largest_set(self._present(returned))
        return nodes is not None and _num_ranks(nodes) > self.context.world_size

    def mark_present(self, returned: Iterable[str]) -> None:
        """Count these nodes among those of which the next attempt takes its own."""
        self.absent -= set(returned)

    def take_back(self, returned: Iterable[str]) -> None:
        """Continue with these nodes again."""
        self.mark_present(returned)
        nodes = self._largest_set(self._present())
        assert nodes is not None, "fewer nodes could train"
        self._train_on(nodes)
        print_line(f"continuing with {_names(returned)}: {self._described()}", sys.stderr)

    def overrides(self) -> list[str]:
        """Return the config overrides with which the nodes that train keep the global batch."""
        context = self.context
        if self._global_batch is None or len(context.nodes) == len(self._all):
            return []
        config = context.run_config
        of_a_pass = context.world_size * config.training.train_batch_size
        overrides = [f"training.grad_accum_steps={self._global_batch // of_a_pass}"]
        replicas = config.engine.hsdp_replicas
        if replicas > 1:
            # One replica per node where it was so, and a number that divides the ranks.
            # Checkpoints fit any number.
            wanted = len(context.nodes) if replicas == len(self._all) else replicas
            fitting = max(n for n in range(1, wanted + 1) if context.world_size % n == 0)
            overrides.append(f"engine.hsdp_replicas={fitting}")
        return overrides

    def print_plan(self) -> None:
        """Say before the launch what the loss of a node would mean, unless all others go on."""
        without = {
            node.name: self._largest_set([other for other in self._all if other != node])
            for node in self._all
        }
        needed = [name for name, nodes in without.items() if nodes is None]
        if needed:
            print_line(
                f"--elastic: this run would end without {_names(needed)}: the others cannot keep"
                f" the global batch of {self._global_batch}"
            )
        others = len(self._all) - 1
        fewest = min((len(nodes) for nodes in without.values() if nodes), default=others)
        if fewest < others:
            print_line(
                f"--elastic: without one of {len(self._all)} nodes {fewest} train and"
                f" {others - fewest} wait, to keep the global batch of {self._global_batch}"
            )

    def absent_nodes(self) -> list[Node]:
        return [node for node in self._all if node.name in self.absent]

    def _present(self, returned: Iterable[str] = ()) -> list[Node]:
        absent = self.absent - set(returned)
        return [node for node in self._all if node.name not in absent]

    def _largest_set(self, nodes: list[Node]) -> list[Node] | None:
        """Return the first nodes, as many as can keep the global batch; None if none can."""
        if self._global_batch is None:
            return nodes or None
        micro_batch = self.context.run_config.training.train_batch_size
        ranks = itertools.accumulate(node.slots for node in nodes)
        fitting = [
            count
            for count, r in enumerate(ranks, 1)
            if self._global_batch % (r * micro_batch) == 0
        ]
        return nodes[: fitting[-1]] if fitting else None

    def _train_on(self, nodes: list[Node]) -> None:
        context, first = self.context, nodes[0].name
        context.nodes = nodes
        if first == self._all[0].name:
            context.master["address"] = self._first_address
        else:
            # The address that level 2 tested is that of another node.
            known = context.value(first, "network")
            context.master["address"] = context.data_address(first) if known else first

    def _described(self) -> str:
        """Return who trains and who waits."""
        waiting = [node.name for node in self._present() if node not in self.context.nodes]
        ranks = count_noun(self.context.world_size, "rank")
        if not waiting:
            return ranks
        return f"{ranks}; {_names(waiting)} wait, to keep the global batch of {self._global_batch}"

    def _why_none(self) -> str:
        present = self._present()
        if not present:
            return "no node is left"
        micro_batch = self.context.run_config.training.train_batch_size
        return (
            f"the global batch of {self._global_batch} is not a multiple of {_num_ranks(present)}"
            f" ranks x"
            f" training.train_batch_size={micro_batch}, nor with fewer nodes; the sample order"
            " depends on it"
        )


class ReturnWatch:
    """Asks absent nodes in the background whether they are back and pass the checks of a node,
    until all are or it is stopped.

    Args:
        context: Context of the launch; its first node is what the returned ones are compared with.
        absent: The absent nodes.
        log_dir: Folder for the report of the checks.
    """

    def __init__(self, context: Context, absent: list[Node], log_dir: Path):
        self._context, self._absent, self._log_dir = context, absent, log_dir
        self._returned: list[str] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def returned(self) -> list[str]:
        """Return the names of nodes that are back."""
        return self._returned

    def stop(self) -> None:
        """End the questions, and wait for the one that is being asked."""
        self._stopped.set()
        self._thread.join()

    def _ask(self) -> None:
        pause, absent = ASK_SECONDS, self._absent
        while absent and not self._stopped.wait(pause):
            answering = [
                node for node in absent if not self._stopped.is_set() and self._answers(node.name)
            ]
            try:
                failures = self._failures(answering) if answering else {}
            except (OSError, ValueError, MmldlmError) as error:
                # A full disk, for instance. The run goes on without the nodes.
                failures = {node.name: f"cannot be checked: {error}" for node in answering}
            if self._stopped.is_set():
                return
            returned = [node.name for node in answering if node.name not in failures]
            self._returned = self._returned + returned
            absent = [node for node in absent if node.name not in returned]
            pause = ASK_AGAIN_SECONDS if failures else ASK_SECONDS
            for name, text in failures.items():
                print_line(f"{name} answers again, but {text}; asked again in {pause:.0f} s")

    def _answers(self, name: str) -> bool:
        options = self._context.options
        agent = Agent(
            name, "mmldlm.launch.node_agent", False, options.ssh_port, options.ssh_option, 3
        )
        try:
            agent.start()
        except AgentFailure:
            return False
        finally:
            agent.stop()
        return True

    def _failures(self, nodes: list[Node]) -> dict[str, str]:
        """Run the preflight for nodes that answer; return node -> what failed."""
        # In a process of its own: probes fork, which a process with threads must not.
        hostfile, receipt = (self._log_dir / f"returned_nodes{end}" for end in ("", ".json"))
        write_hostfile(hostfile, [self._context.nodes[0], *nodes])
        receipt.unlink(missing_ok=True)
        with open(hostfile.with_suffix(".log"), "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                self._command(hostfile, receipt),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for _ in range(int(CHECK_SECONDS)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
                if process.returncode is not None or self._stopped.is_set():
                    break
            process.kill()
            process.wait()
        if not receipt.exists():
            return {node.name: f"its checks did not end: {log.name}" for node in nodes}
        results = json.loads(read_text(receipt))["results"]
        failed = [result for result in results if result["status"] in (FAIL, ERROR)]
        return {
            node.name: f"{result['id']} failed: {result['measured'] or result['why']}"
            for node in nodes
            for result in failed
            if node.name in result["node"].split("->")
        }

    def _command(self, hostfile: Path, receipt: Path) -> list[str]:
        options: argparse.Namespace = self._context.options
        skipped = {id.strip().upper() for id in (options.skip or "").split(",")}
        ids = ",".join(id for id in RETURN_CHECKS if id not in skipped)
        words = ["--level", "2", "--only", ids, "--launcher", options.launcher]
        words.append("--propagates-all")
        words += ["--master_port", str(options.master_port)]
        if options.master_addr is not None:
            words += ["--master_addr", options.master_addr]
        if options.ssh_port is not None:
            words += ["--ssh-port", str(options.ssh_port)]
        words += [f"--ssh-option={option}" for option in options.ssh_option]
        files = ["--hostfile", str(hostfile), "--json", str(receipt)]
        program = [sys.executable, "-m", "mmldlm", "preflight"]
        return [*program, *files, *words, *train_arguments(options)]


def _num_ranks(nodes: Iterable[Node]) -> int:
    return sum(node.slots for node in nodes)


def _names(names: Iterable[str]) -> str:
    return join_some(sorted(names))
