"""`mmldlm push FOLDER REPO`: publish a converted folder on the Hugging Face hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmldlm.errors import EXIT_DONE, UserError
from mmldlm.utils import option_types
from mmldlm.utils.formatting import closing_lines, format_bytes, join_some, print_table
from mmldlm.utils.hub import HUB_NAME


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm push`."""
    add = parser.add_argument
    add(
        "folder", type=option_types.path, metavar="FOLDER",
        help="folder that `mmldlm convert` wrote",
    )  # fmt: skip
    add("repo", metavar="OWNER/NAME", help="repository on the hub, created if it is not there")
    add("--revision", metavar="BRANCH", help="branch, created if it is not there (default main)")
    add("--private", action="store_true", help="publish to a private repository only")
    add("--dry-run", action="store_true", help="check and list the files, without a network")


def main(args: argparse.Namespace) -> int:
    """Run `mmldlm push`; return the exit code."""
    if not HUB_NAME.fullmatch(args.repo):
        raise UserError(
            "a repository OWNER/NAME", args.repo, "name your account or organization before the /"
        )
    from mmldlm.inference.publish import publishable_files, push

    folder = Path(args.folder)
    files, left_out = publishable_files(folder)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    print_table([(name, format_bytes(size)) for name, size in sizes.items()])
    if left_out:
        print(f"left out, because no part of a model: {join_some(left_out, 8)}")
    total = f"{len(files)} files, {format_bytes(sum(sizes.values()))}"
    if args.dry_run:
        print(f"would publish {total} as {args.repo}; nothing was sent")
        return EXIT_DONE
    url = push(folder, files, args.repo, args.revision, args.private)
    words = ["mmldlm", "evaluate", "--data", "STORE", "--checkpoint", args.repo]
    print("\n".join(closing_lines(f"{total} at {url}", *words)))
    return EXIT_DONE
