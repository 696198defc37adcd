"""The small store that a benchmark makes itself when it gets none."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import _report

ROOT = Path(__file__).resolve().parent.parent
HELP = "a store made by `mmldlm prepare` (default: a small one is made of docstrings, which takes half a minute)"
NUM_TRAIN, NUM_VALIDATION = 576, 64  # the most that a benchmark asks for is parity.py's 509

_folders: list[tempfile.TemporaryDirectory] = []  # removed when the benchmark ends


def given_or_made(data: str | None) -> str:
    """Absolute path of the given store, or of a new one in a temporary folder that lasts as long as this process."""
    if data is not None:
        return str(Path(data).resolve())
    _folders.append(tempfile.TemporaryDirectory(prefix="mmldlm_benchmark_"))
    return make(Path(_folders[-1].name))


def make(folder: Path) -> str:
    """Path of a store of the standard library's docstrings in folder, made by `mmldlm prepare`; exits if it cannot."""
    sentences = stdlib_sentences(NUM_TRAIN + NUM_VALIDATION)
    corpus, store = folder / "corpus.txt", folder / "store"
    corpus.write_text("\n".join(sentences) + "\n", encoding="utf-8")
    print(f"no --data: making a store of {len(sentences)} docstring sentences in {store}", flush=True)
    words = ["prepare", str(corpus), "--output-dir", str(store), "--validation-samples", str(NUM_VALIDATION)]
    done = subprocess.run(
        [sys.executable, "-m", "mmldlm.cli", *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        print(f"{done.stdout[-2000:]}\ncannot be measured here without --data: `mmldlm prepare` failed, see above")
        sys.exit(_report.COULD_NOT_CHECK)
    return str(store)


def stdlib_sentences(count: int) -> list[str]:
    """Different English sentences from the docstrings of the standard library's modules, by name."""
    sys.path.insert(0, str(ROOT))
    from mmldlm.data.corpora.docstring_prose import prose_paragraphs, reject_reason
    from mmldlm.data.corpora.docstrings import docstrings_of
    from mmldlm.data.sentences import split_sentences

    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for docstring in docstrings_of(path.read_bytes()) or []:
            for paragraph in prose_paragraphs(docstring):
                found.update({text: None for text in split_sentences(paragraph) if reject_reason(text) is None})
        if len(found) >= count:
            break
    return list(found)[:count]
