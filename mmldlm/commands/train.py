"""`mmldlm train`: check everything in this process, then become the launcher of the ranks of this
machine.
"""

from __future__ import annotations

import argparse
import os
import sys

from mmldlm.cluster.launcher_commands import TRAIN, train_arguments
from mmldlm.commands import config_options
from mmldlm.distributed.environment import check_single_process, hidden_gpu_note
from mmldlm.engines.deepspeed_config import check_fp16
from mmldlm.errors import UserError
from mmldlm.training.run_check import check_run
from mmldlm.utils import option_types
from mmldlm.utils.run_module import module_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm train`."""
    config_options.add_arguments(parser)
    parser.add_argument(
        "--nproc",
        type=option_types.integer(1, 4096),
        metavar="N",
        help="ranks on this machine (default: its GPUs, or 1; 1 for engine.kind=single)",
    )


def main(args: argparse.Namespace) -> int:
    """Check the run, then replace this process by the launcher: a mistake is found before any rank
    starts.
    """
    check_single_process("mmldlm train")
    # Takes two seconds, which `mmldlm train --help` can do without.
    import torch

    config = config_options.parse_config(args)
    is_single = config.engine.kind == "single"
    nproc = args.nproc or (1 if is_single else max(torch.cuda.device_count(), 1))
    # One process is warned of; several were meant for GPUs.
    if args.nproc is not None and args.nproc > 1 and (note := hidden_gpu_note()) is not None:
        raise UserError(
            f"GPUs that torch can use, for --nproc {args.nproc}",
            note.removesuffix(": training on the CPU"),
            "set CUDA_VISIBLE_DEVICES to GPUs of this machine; for ranks on its CPU set it to an"
            " empty text",
        )
    check_fp16(config, torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_fp16_supported())
    check_run(config, nproc)
    command = [TRAIN, *train_arguments(args)]
    if is_single:
        os.execv(sys.executable, [sys.executable, *command])
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Not the deepspeed launcher: a signal to it ends the ranks unsaved, or not at all
    # (launch/local_launcher.py).
    os.execv(sys.executable, module_command("mmldlm.launch.local_launcher", str(nproc), *command))
