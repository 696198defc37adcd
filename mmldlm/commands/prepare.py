"""`mmldlm prepare`: encode a corpus of texts or of images into a store; texts with one rank per
GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mmldlm.data.corpora.image_lists import holds_images
from mmldlm.data.corpora.text_corpus import DEFAULT_CORPUS
from mmldlm.data.corpora.text_files import kind_of
from mmldlm.data.encoders.specs import ENCODERS, POOLINGS
from mmldlm.data.prepare.options import (
    NUMBERS,
    OVERLONG,
    ImageOptions,
    PrepareOptions,
)
from mmldlm.data.writers import LAYOUTS
from mmldlm.distributed.environment import set_rank_environment
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, MmldlmError, UserError
from mmldlm.utils import option_types
from mmldlm.utils.atomic_files import naming_errors
from mmldlm.utils.formatting import join_some
from mmldlm.utils.paths import output_root
from mmldlm.utils.run_module import module_command

if TYPE_CHECKING:
    from mmldlm.data.prepare.task_queue import TaskQueue

CACHE_DIR_HELP = "folder for files from the Hugging Face hub"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mmldlm prepare`."""
    parser.add_argument(
        "--output-dir",
        type=option_types.path,
        required=True,
        metavar="DIR",
        help="output folder; rerun the same command to resume",
    )
    parser.add_argument(
        "--num-procs",
        type=option_types.integer(1, 4096),
        metavar="N",
        help="ranks on this machine (default: its GPUs, or 1)",
    )
    add = parser.add_argument
    add("--layout", choices=LAYOUTS, help="files: one .txt and one .npy per sample, as in MM-LDLM")
    add(
        "--seed",
        type=NUMBERS["seed"],
        default=0,
        help="seed of the sampling and the split (default %(default)s)",
    )
    add(
        "--force",
        action="store_true",
        help="replace an existing store when the new one is complete",
    )
    _add_corpus_arguments(parser)
    _add_sample_arguments(parser)
    _add_encoder_arguments(parser)
    _add_image_arguments(parser)
    _add_tokenizer_arguments(parser)


class _OneCorpus(argparse.Action):
    """Take one positional argument; explain several, which the shell makes of a pattern."""

    def __call__(self, parser, namespace, values, option_string=None):
        given = [values] if isinstance(values, str) else list(values)
        if len(given) > 1:
            raise UserError(
                "one CORPUS",
                f"{len(given)}: {join_some(given, limit=3)}",
                "give several as --datasets A B ...",
            )
        setattr(namespace, self.dest, given[0] if given else self.default)


def _add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "corpus",
        type=option_types.path,
        nargs="*",
        action=_OneCorpus,
        default=DEFAULT_CORPUS,
        metavar="CORPUS",
        help=(
            ".txt (one sentence per line), .jsonl, .csv, .tsv or .parquet (one text per record;"
            " all but the last also .gz and .zst), a folder of such files, a Hugging Face dataset"
            " (openwebtext, lm1b, PATH[:CONFIG][@SPLIT]), or 'docstrings' (default; needs no"
            " download). Of images: 'glyphs' (needs no download), 'emoji', a folder of images with"
            " captions in .txt files of the same names or in a metadata.jsonl, a .jsonl, .csv or"
            " .tsv of {image, caption}, a .json (COCO captions, or MM-LDLM's list), or .tar shards"
            " (a file, a folder, or a quoted pattern)"
        ),
    )
    add = parser.add_argument_group("corpus").add_argument
    add(
        "--datasets",
        type=option_types.path,
        nargs="+",
        metavar="NAME",
        help="one or more corpora, read one after the other",
    )
    add(
        "--validation-corpus",
        type=option_types.path,
        metavar="PATH",
        help="corpus of the validation split (default: held-out training texts)",
    )
    add("--text-field", help="field or column that holds the text (default: text)")
    add(
        "--sentences",
        action="store_true",
        default=None,
        help="split every text into sentences first",
    )
    add(
        "--whole-files",
        action="store_true",
        default=None,
        help="one text per .txt file of a folder (default: a sentence)",
    )
    add(
        "--max-documents",
        type=NUMBERS["max_documents"],
        metavar="N",
        help="read only the first N texts of every corpus",
    )


def _add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("samples").add_argument
    add(
        "--max-samples",
        type=NUMBERS["max_samples"],
        metavar="N",
        help="keep N samples, chosen by a hash of their content",
    )
    add(
        "--validation-samples",
        type=NUMBERS["validation_samples"],
        metavar="N",
        help="validation split (default: 1000 or 5 %%, the smaller)",
    )
    add("--min-tokens", type=NUMBERS["min_tokens"], help="shorter texts are dropped (default 3)")
    add(
        "--max-tokens",
        type=NUMBERS["max_tokens"],
        default=62,
        help="longest sample, without the closing EOS (default %(default)s)",
    )
    add(
        "--overlong",
        choices=OVERLONG,
        help=(
            "treatment of longer texts; chunk cuts at sentence ends and drops nothing (default:"
            " chunk for Hugging Face datasets, else drop)"
        ),
    )
    add(
        "--keep-duplicates",
        action="store_true",
        help="keep texts that differ only in case, spaces or punctuation",
    )


def _add_encoder_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("encoder of texts").add_argument
    add(
        "--encoder",
        "--latent-model",
        type=option_types.path,
        help=f"one of: {', '.join(ENCODERS)}; or a folder or Hugging Face name (default minilm)",
    )
    add(
        "--latent-dim",
        type=NUMBERS["latent_dim"],
        metavar="D",
        help="cut latents to D components and normalize again (qwen: 32 to 1024)",
    )
    add(
        "--latents-per-text",
        type=NUMBERS["latents_per_text"],
        metavar="N",
        help="latents per text, of N pieces cut at sentence ends (default 1; for long texts)",
    )
    add("--pooling", choices=POOLINGS, help="pooling of a model that does not declare it")
    add("--prefix", help="prefix of every text (default: that of the encoder's card)")
    add(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="scale latents to unit norm (default: as the encoder's card)",
    )
    add(
        "--max-length",
        type=NUMBERS["max_length"],
        help="tokens of a text that the encoder reads (default: as its card)",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="of the encoder (default: fp32 on the CPU, bf16 on a GPU)",
    )
    add(
        "--batch-tokens",
        type=NUMBERS["batch_tokens"],
        help="padded tokens per forward pass (default 1024, on a GPU 65536)",
    )
    add(
        "--batch-size",
        type=NUMBERS["batch_size"],
        help="maximum texts, or images of vae:NAME, per forward pass",
    )
    add("--compile", action="store_true", default=None, help="torch.compile the encoder")
    add(
        "--retries",
        type=NUMBERS["retries"],
        help="retries per text before it is quarantined (default 2)",
    )
    add(
        "--max-quarantined",
        type=NUMBERS["max_quarantined"],
        default=0.01,
        metavar="SHARE",
        help="largest share of samples on which the encoder may fail (default %(default)s)",
    )


def _add_image_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("images").add_argument
    add(
        "--image-size",
        type=NUMBERS["image_size"],
        metavar="S",
        help="side in pixels (default: 16 for glyphs, 256 for vae, else 32)",
    )
    add(
        "--patch-size",
        type=NUMBERS["patch_size"],
        metavar="P",
        help=(
            "side of a patch (default: 4 to 16 pixels, 8 to 64, else 16; of codes 4 to 64, else 8)"
        ),
    )
    add(
        "--channels",
        type=option_types.count,
        choices=(1, 3),
        help="1 (gray) or 3 (default: 1 for glyphs, else 3)",
    )
    add(
        "--latents",
        type=option_types.path_after("vae:"),
        metavar="KIND",
        help=(
            "pixels (default), pca:M (M components of the whole image, small ones),"
            " vae:NAME_OR_FOLDER (an AutoencoderKL), codes:kmeans:Q (ids of Q codes of patches,"
            " default 512) or codes:fsq (1,000 codes on a grid)"
        ),
    )
    add(
        "--faces",
        type=NUMBERS["faces"],
        metavar="N",
        help="the first N of the 10 faces of glyphs (default: all)",
    )
    add(
        "--font",
        type=option_types.path,
        metavar="FILE",
        help="NotoColorEmoji.ttf of emoji (default: that of fonts-noto-color-emoji)",
    )
    add(
        "--data-root",
        type=option_types.path,
        metavar="DIR",
        help="folder of the image paths in a .jsonl, .csv, .tsv or .json (default: its own)",
    )
    add(
        "--white",
        type=NUMBERS["white"],
        metavar="N",
        help="largest value of gray images of 16 bits (12 bits: 4095)",
    )


def _add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tokenizer").add_argument
    add(
        "--tokenizer",
        type=option_types.path,
        metavar="NAME",
        help=(
            "an encoder's name (its own tokenizer), a Hugging Face name or folder, 'train', or"
            " 'words' (default: minilm; of images 'train', of glyphs and emoji 'words')"
        ),
    )
    add("--cache-dir", type=option_types.path, metavar="DIR", help=CACHE_DIR_HELP)
    add(
        "--vocab-size",
        type=NUMBERS["vocab_size"],
        default=8192,
        help="most tokens of --tokenizer train or words (default %(default)s)",
    )
    add(
        "--add-mask-token",
        action="store_true",
        help="add the special tokens that the tokenizer lacks",
    )


def to_options(args: argparse.Namespace) -> PrepareOptions | ImageOptions:
    """Return the options of a parsed command line, by the kind of its corpus.

    Raises:
        UserError: an option that this kind of corpus does not read.
    """
    given = {name: value for name, value in vars(args).items() if value is not None}
    for_images = (
        ImageOptions.__dataclass_fields__.keys() - PrepareOptions.__dataclass_fields__.keys()
    )
    # Options of images say what a folder without a captioned image was meant to be: opening it
    # says what it lacks.
    is_image = holds_images(args.corpus) or (
        bool(for_images & given.keys()) and Path(args.corpus).is_dir()
    )
    # A field of texts says that the captions of a list are meant.
    only_captions = args.text_field is not None and kind_of(Path(args.corpus)) is not None
    is_image = is_image and args.datasets is None and not only_captions
    own, other = (ImageOptions, PrepareOptions) if is_image else (PrepareOptions, ImageOptions)
    known = own.__dataclass_fields__
    for name in given:
        if name in other.__dataclass_fields__ and name not in known:
            flag = f"--{name.replace('_', '-')}"
            reads, has = ("texts", "images") if is_image else ("images", "texts")
            raise UserError(
                f"{flag} with a corpus of {reads}",
                f"one of {has}, {args.corpus}",
                f"leave {flag} out, or name another",
            )
    return own(**{name: value for name, value in given.items() if name in known})


def main(args: argparse.Namespace) -> int:
    """Prepare in this process, or become the launcher of several ranks; return the exit code."""
    import torch

    set_rank_environment()
    options = to_options(args)
    needs_none = isinstance(options, ImageOptions) and options.vae is None
    num_gpus = 0 if needs_none else torch.cuda.device_count()
    num_procs = args.num_procs or (1 if "RANK" in os.environ else max(num_gpus, 1))
    if num_procs == 1 or "RANK" in os.environ:
        return run_rank(args)
    # Each rank parses the words behind the verb again; it does not read --num-procs.
    ranks = module_command("mmldlm.data.prepare", *args.words)[1:]
    os.execv(
        sys.executable, module_command("mmldlm.launch.local_launcher", str(num_procs), *ranks)
    )


def run_rank(args: argparse.Namespace) -> int:
    """Prepare as one of the ranks of this launch; see `run_shared`."""
    from mmldlm.data.prepare.pipeline import prepare

    options = to_options(args)
    return run_shared(options.output_dir, lambda queue: prepare(options, queue=queue))


def run_shared(output_dir: str, work: Callable[[TaskQueue], object]) -> int:
    """Do work that the ranks of this launch share; return the exit code, 5 if a signal came and
    the work can resume.

    Args:
        output_dir: Folder beside which `WorkDir` keeps what is finished.
        work: Function that is called with the queue of the ranks.
    """
    from mmldlm.data.prepare.task_queue import connect
    from mmldlm.data.prepare.work_dir import PLAN, WorkDir

    set_rank_environment()
    queue = connect()
    try:
        with naming_errors(output_dir):
            work(queue)
    except MmldlmError as error:
        if queue.world_size == 1:
            raise
        # A RankFailed is reported by the rank that failed, unless that rank cannot report any
        # more.
        if not getattr(error, "already_reported", False) and queue.is_reporter():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        folder = WorkDir(output_root(output_dir), queue).folder
        can_resume = (folder / PLAN).is_file()
        hint = [f"rerun the same command to resume from {folder}"] if can_resume else []
        if queue.world_size == 1:
            raise KeyboardInterrupt(*hint) from None
        if queue.is_reporter():  # the signal may have reached any rank
            print(": ".join(["interrupted", *hint]), file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED if can_resume else EXIT_FAILED
    return EXIT_DONE
