"""`mmldlm init DIR`: lay out the files that a user edits, which an installed package hides."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import mmldlm
from mmldlm.errors import EXIT_DONE, UserError
from mmldlm.utils import option_types
from mmldlm.utils.atomic_files import naming_errors
from mmldlm.utils.formatting import closing_lines, join_some, print_table
from mmldlm.utils.paths import check_writable_dir

FILES = Path(mmldlm.__file__).with_name("files")
# Folder -> what to edit in it.
FOLDERS = {
    "ds_configs": "DeepSpeed's settings, for --deepspeed_config: ZeRO stage, offload",
    "hostfiles": "one line per node, for --hostfile: its name and its ranks (slots)",
    "launchers": "scripts for ssh, MPI and Slurm: the #SBATCH lines of slurm.sh",
}
# Files of these folders that need more of the checkout than a package has: its benchmarks.
OF_CHECKOUT = (
    "_quickstart.sh",
    "gpu_check.sh",
    "quickstart.sh",
    "quickstart_images.sh",
    "quickstart_report.py",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm init`."""
    parser.add_argument(
        "dir", type=option_types.path, metavar="DIR", help=f"folder for {', '.join(FOLDERS)}"
    )


def _lay_out(out: Path) -> None:
    """Copy the files into a folder, which a full disk leaves as it was."""
    partial = out / f".partial-{os.getpid()}"
    try:
        for name in FOLDERS:
            (partial / name).mkdir(parents=True)
            for path in (FILES / name).iterdir():
                if path.is_file() and path.name not in OF_CHECKOUT:
                    _copy(path, partial / name / path.name)
        for name in FOLDERS:
            (partial / name).rename(out / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    # shutil.copy would name the source's disk as the one that is full.
    with naming_errors(target):
        target.write_bytes(source.read_bytes())
        shutil.copymode(source, target)


def main(args: argparse.Namespace) -> int:
    """Run `mmldlm init`; return the exit code.

    Raises:
        UserError: DIR has one of the folders, or is not writable.
    """
    out = check_writable_dir(args.dir, "DIR")
    if existing := [name for name in FOLDERS if (out / name).exists()]:
        raise UserError(
            f"a folder without {', '.join(FOLDERS)}",
            f"{join_some(existing)} in {out}",
            "name another folder; what you have edited is never replaced",
        )
    _lay_out(out)
    print_table([(f"{name}/", text) for name, text in FOLDERS.items()])
    next_words = ["bash", f"{out}/launchers/single_node.sh", "data.latent_data_root=STORE"]
    print("\n".join(closing_lines(f"{len(FOLDERS)} folders in {out}", *next_words)))
    return EXIT_DONE
