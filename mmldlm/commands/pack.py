"""`mmldlm pack`: turn latents that were made elsewhere into a store: texts and latents in one file
each, or folders of one file per sample, MM-LDLM's layouts.
"""

from __future__ import annotations

import argparse

from mmldlm.commands.prepare import CACHE_DIR_HELP
from mmldlm.data.encoders.specs import ENCODERS
from mmldlm.data.folder_layouts import LAYOUTS
from mmldlm.errors import EXIT_DONE
from mmldlm.utils import option_types
from mmldlm.utils.atomic_files import naming_errors
from mmldlm.utils.paths import claimed_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mmldlm pack`."""
    add = parser.add_argument
    add(
        "source",
        type=option_types.path,
        metavar="SOURCE",
        help=(
            "the texts of --latents: .txt (one per line), .jsonl, .csv, .tsv or .parquet (one per"
            f" record); or a folder with {LAYOUTS}"
        ),
    )
    add(
        "--latents",
        type=option_types.path,
        metavar="FILE",
        help=(
            "the latents of the texts, row by row: .npy or .npz [N, D] (or [N, K, D], K of every"
            " text), or parquet with a column of lists (default of a .parquet: the same file)"
        ),
    )
    add("--text-field", metavar="NAME", help="field or column of the texts (default: text)")
    add(
        "--latents-field",
        metavar="NAME",
        help="array of a .npz or column of a parquet file (default: the only one)",
    )
    add(
        "--output-dir",
        type=option_types.path,
        required=True,
        metavar="STORE",
        help="folder of the store; must not exist yet",
    )
    add("--tokenizer", type=option_types.path, metavar="NAME",
        help="tokenizer that made the token files (default for texts: minilm)")  # fmt: skip
    add("--encoder", choices=sorted(ENCODERS), help="encoder of the latents, if known")
    add("--cache-dir", type=option_types.path, metavar="DIR", help=CACHE_DIR_HELP)
    add(
        "--add-mask-token",
        action="store_true",
        help="add the special tokens that the tokenizer lacks",
    )
    add(
        "--min-tokens",
        type=option_types.size,
        default=1,
        help="shorter texts are dropped (default %(default)s)",
    )
    add(
        "--max-tokens",
        type=option_types.count,
        help="longer texts are truncated (their latents remain those of the complete texts)",
    )
    add(
        "--validation-samples",
        type=option_types.size,
        metavar="N",
        help="size of a missing validation split (default: 1000 or 5 %%)",
    )
    add(
        "--keep-duplicates",
        action="store_true",
        help="keep texts that differ only in case, spaces or punctuation",
    )
    add("--latents-per-text", type=option_types.count, metavar="N",
        help="vectors per .npy file (default: 1, or as prepare wrote)")  # fmt: skip
    add(
        "--seed", type=option_types.seed, default=0, help="seed of the split (default %(default)s)"
    )
    add(
        "--force",
        action="store_true",
        help="replace an existing store when the new one is complete",
    )


def main(args: argparse.Namespace) -> int:
    """Run `mmldlm pack`; return the exit code."""
    from mmldlm.data.pack import PackOptions, pack

    names = PackOptions.__dataclass_fields__
    with claimed_file(args.output_dir, "--output-dir"), naming_errors(args.output_dir):
        pack(PackOptions(**{name: value for name, value in vars(args).items() if name in names}))
    return EXIT_DONE
