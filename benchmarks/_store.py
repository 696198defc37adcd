"""A small store for benchmarks that are started without --data."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import _report

ROOT = Path(__file__).resolve().parent.parent
HELP = (
    "store made by `mmldlm prepare` (default: a small one is made from docstrings, in half a"
    " minute)"
)
NUM_TRAIN, NUM_VALIDATION = 576, 64  # parity.py needs the most: 509

_folders: list[tempfile.TemporaryDirectory] = []  # removed when the benchmark ends


def given_or_made(data: str | None) -> str:
    """Return the absolute path of the given store, or of a new one in a folder that is removed
    with this process.
    """
    if data is not None:
        return str(Path(data).resolve())
    _folders.append(tempfile.TemporaryDirectory(prefix="mmldlm_benchmark_"))
    return make(Path(_folders[-1].name))


def make(folder: Path) -> str:
    """Prepare a store from the standard library's docstrings in `folder` and return its path;
    exits on failure.
    """
    sentences = stdlib_sentences(NUM_TRAIN + NUM_VALIDATION)
    corpus, store = folder / "corpus.txt", folder / "store"
    corpus.write_text("\n".join(sentences) + "\n", encoding="utf-8")
    print(
        f"no --data: making a store of {len(sentences)} docstring sentences in {store}", flush=True
    )
    words = [
        "prepare",
        str(corpus),
        "--output-dir",
        str(store),
        "--validation-samples",
        str(NUM_VALIDATION),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mmldlm.cli", *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        print(
            f"{done.stdout[-2000:]}\ncannot measure here without --data: `mmldlm prepare` failed,"
            " see above"
        )
        sys.exit(_report.COULD_NOT_CHECK)
    return str(store)


def stdlib_sentences(count: int) -> list[str]:
    """Return distinct English sentences from the docstrings of the standard library, in the order
    of its modules.
    """
    sys.path.insert(0, str(ROOT))
    from mmldlm.data.corpora.docstrings import docstrings_of, prose_paragraphs, reject_reason
    from mmldlm.data.sentences import split_sentences

    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for docstring in docstrings_of(path.read_bytes()) or []:
            for paragraph in prose_paragraphs(docstring):
                found.update(
                    {
                        text: None
                        for text in split_sentences(paragraph)
                        if reject_reason(text) is None
                    }
                )
        if len(found) >= count:
            break
    return list(found)[:count]
