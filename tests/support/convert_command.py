"""Run `mmldlm convert` in this process."""

from __future__ import annotations

import argparse

from mmldlm.commands import convert


def command(*words: object) -> int:
    """Parse words as `mmldlm convert`, `convert inspect` or `convert diff`, and run it; errors are
    raised.
    """
    texts = [str(word) for word in words]
    parser = argparse.ArgumentParser()
    parts = {
        "inspect": (convert.add_inspect_arguments, convert.inspect),
        "diff": (convert.add_diff_arguments, convert.diff),
    }
    if texts[0] in parts:
        add_arguments, run = parts[texts[0]]
        add_arguments(parser)
        return run(parser.parse_args(texts[1:]))
    convert.add_arguments(parser)
    return convert.main(parser.parse_intermixed_args(texts))
