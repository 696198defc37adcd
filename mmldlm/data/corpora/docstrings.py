"""The default corpus: English sentences in the docstrings of the installed Python packages."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import os
import platform
import re
import site
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmldlm.data.sentences import split_sentences
from mmldlm.utils.input_files import read_bytes

_SKIPPED_FOLDERS = frozenset(
    "test tests testing idle_test __pycache__ site-packages dist-packages _vendor vendor vendored"
    " mmldlm".split()
)
_FENCE = re.compile(r"^(```|~~~)")
_UNDERLINE = re.compile(r"^([=\-~^\"'`*#+_.:<>])\1{2,}$")
_TABLE = re.compile(r"^[|+]|\S\s+\|\s|^[=\-+]+(\s+[=\-+]+)+$|\S\s{3,}\S")
_DIRECTIVE = re.compile(r"^\.\.( |$)")
_PROSE_DIRECTIVE = re.compile(
    r"^\.\. (note|warning|tip|important|caution|attention|hint|seealso|admonition)::\s*(.*)$"
)
_RST_FIELD = re.compile(
    r"^[:@](param|parameter|arg|argument|key|keyword|raises?|returns?|yields?|ivar|cvar|var|attr)\b[^:]*:\s*(.*)$"
)
_OTHER_FIELD = re.compile(r"^(:[\w\s.\-]+:(?!`)|@\w+)")
_NUMPY_NAME = re.compile(r"^[*`]*[\w.]+[`*]*(\s*,\s*[*`]*[\w.]+[`*]*)*\s*:(\s|$)(?!.*[.!?]$)")
_NAME_ALONE = re.compile(r"^[\-*+]?\s*[*`'\"]{0,3}[a-z_][\w.*\-]*[`'\"*]*\s*(\(.*\))?[`*]*:$")
_ARG_LEAD = re.compile(
    r"^[\-*+]?\s*[*`'\"]{0,3}[a-z_][\w.*\-]*[`'\"*]*(\s*\([^)]*\))?[`*]*\s*(:|--|\u2013)\s+"
    r"(defaults? to \S+\s+)?(?=\S)"
)
_BULLET = re.compile(r"^([\-*+\u2022]|\(?\d{1,2}[.)]|\(?[a-z]\))\s+(?=\S)")
_HEADING = re.compile(r"^(#+ .*|[A-Z][\w /\-]{0,40}::?)$")
_PROMPT = re.compile(r"^(>>>|\.\.\. |\$ |% |In \[|Out\[|C:\\)")


def docstrings_source() -> str:
    """Return a name that differs between environments with different packages."""
    distributions = {(dist.name, dist.version) for dist in importlib.metadata.distributions()}
    names = sorted(
        f"{name}=={version}" for name, version in distributions if name and name != "mmldlm"
    )
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    return f"docstrings:python-{platform.python_version()}:{len(names)}-packages:{digest}"


def source_files() -> list[Path]:
    """Return the Python sources of the standard library, then of the packages, each sorted by
    relative path.
    """
    paths = sysconfig.get_paths()
    roots = [paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    files: list[Path] = []
    for root in dict.fromkeys(os.path.realpath(root) for root in roots):
        names_in_root = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
            for name in names:
                if (
                    name.endswith(".py")
                    and not name.startswith("test_")
                    and not name.endswith("_test.py")
                ):
                    names_in_root.append(os.path.relpath(os.path.join(folder, name), root))
        files += [Path(root, name) for name in sorted(names_in_root)]
    return list(dict.fromkeys(files))


def read_docstrings(counts: Counter) -> Iterator[str]:
    """Yield the English sentences of all docstrings, without near-repeats; count the others by
    reason.
    """
    seen: set[str] = set()
    seen_keys: set[bytes] = set()
    for sentence in _sentences(counts):
        counts["read"] += 1
        reason = "repeated" if sentence in seen else reject_reason(sentence)
        seen.add(sentence)
        if reason is None:
            key = hashlib.blake2b(skeleton(sentence).encode(), digest_size=12).digest()
            if key not in seen_keys:
                seen_keys.add(key)
                yield sentence
                continue
            reason = "near_repeat"
        counts[f"drop_{reason}"] += 1


def _sentences(counts: Counter) -> Iterator[str]:
    """Yield the sentences of all docstrings; count the files."""
    for path in source_files():
        counts["files"] += 1
        try:
            source = read_bytes(path)
            has_docs = b'"""' in source or b"'''" in source
            docs = docstrings_of(source) if has_docs else []
        except OSError:
            docs = None
        if docs is None:
            counts["files_unreadable"] += 1
            continue
        for doc in docs:
            for paragraph in prose_paragraphs(doc):
                yield from split_sentences(paragraph)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)
_WITH_BODY = (ast.ClassDef, *_FUNCTIONS, ast.If, ast.Try, ast.With)


def docstrings_of(source: bytes) -> list[str] | None:
    """Return all docstrings of a Python source in order, without running it; None if it does not
    parse.
    """
    try:
        with warnings.catch_warnings():
            # Sources of other people have invalid escapes.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    docs: list[str] = []
    todo: list[Any] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, _DOCUMENTED):
            doc = ast.get_docstring(node, clean=True)
            if doc:
                docs.append(doc)
        if not isinstance(node, _FUNCTIONS):
            # Nested functions are hardly ever documented.
            todo += [child for child in reversed(node.body) if isinstance(child, _WITH_BODY)]
    return docs


def prose_paragraphs(doc: str) -> list[str]:
    """Return the paragraphs of prose in a cleaned docstring (RST, Google, NumPy or Markdown),
    without markup.

    Code, doctests, literal blocks, tables, headings, directives, field names and parameter lines
    are left out. The descriptions of parameters are kept.
    """
    reader = _ProseReader()
    lines = doc.expandtabs().splitlines()
    for raw, below in zip(lines, [*lines[1:], ""]):
        reader.add(raw, below.strip())
    reader.finish()
    return [text for text in map(_strip_markup, reader.paragraphs) if text]


class _ProseReader:
    """Collect the paragraphs of prose from lines.

    Attributes:
        paragraphs: Finished paragraphs.
    """

    def __init__(self) -> None:
        self.paragraphs: list[str] = []
        self._current: list[str] = []
        # Indentation of the current paragraph, and whether its first line hangs.
        self._indent, self._is_hanging = 0, False
        self._skip_deeper_than: int | None = None
        self._in_fence = self._in_doctest = False

    def finish(self) -> None:
        """End the current paragraph."""
        if self._current:
            self.paragraphs.append(" ".join(self._current))
            self._current.clear()

    def _begin(self, line: str, indent: int, is_hanging: bool) -> None:
        """Begin a paragraph with a line."""
        self.finish()
        self._current.append(line)
        self._indent, self._is_hanging = indent, is_hanging

    def add(self, raw: str, below: str) -> None:
        """Read one line; `below` is the stripped next line."""
        line, indent = raw.strip(), len(raw) - len(raw.lstrip())
        if not (self._skip_code(line, indent) or self._skip_markup(line, indent, below)):
            self._add_prose(line, indent)

    def _skip_code(self, line: str, indent: int) -> bool:
        """Whether the line is blank, or part of fenced code, a literal block or a doctest."""
        if _FENCE.match(line):
            self.finish()
            self._in_fence = not self._in_fence
            return True
        if self._in_fence:
            return True
        if not line:
            self.finish()
            self._in_doctest = False
            return True
        if self._skip_deeper_than is not None:
            if indent > self._skip_deeper_than:
                return True
            self._skip_deeper_than = None
        if self._in_doctest or _PROMPT.match(line):
            self.finish()
            self._in_doctest = True
            return True
        return False

    def _skip_markup(self, line: str, indent: int, below: str) -> bool:
        """Whether the line is a heading, directive or field; the text of a directive or field
        starts a paragraph.
        """
        if (
            _UNDERLINE.match(line)
            or (_UNDERLINE.match(below) and len(below) >= 3)
            or _HEADING.match(line)
        ):
            self.finish()
            if line.endswith("::"):
                self._skip_deeper_than = indent
            return True
        directive = _PROSE_DIRECTIVE.match(line)
        if directive or _DIRECTIVE.match(line):
            self.finish()
            if not directive:
                self._skip_deeper_than = indent
                return True
            self._indent, self._is_hanging = indent, True
            if directive.group(2):
                self._current.append(directive.group(2))
            return True
        field = _RST_FIELD.match(line)
        if field or _OTHER_FIELD.match(line):
            self.finish()
            if field and field.group(2):
                self._begin(field.group(2), indent, is_hanging=True)
            return True
        return False

    def _add_prose(self, line: str, indent: int) -> None:
        is_outward = not self._current or indent <= self._indent
        is_name = _NAME_ALONE.match(line) or (len(line) < 100 and _NUMPY_NAME.match(line))
        if (is_outward and is_name) or _TABLE.search(line):
            self.finish()
            return
        lead = (_ARG_LEAD.match(line) or _BULLET.match(line)) if is_outward else None
        # A hanging paragraph continues with deeper lines, others with lines as deep as the first.
        continues = indent > self._indent if self._is_hanging else indent == self._indent
        if lead:
            line = line[lead.end() :]
            inner = _ARG_LEAD.match(line)
            line = line[inner.end() :] if inner else line
            self._begin(line, indent, is_hanging=True)
        elif self._current and continues:
            self._current.append(line)
        else:
            self._begin(line, indent, is_hanging=False)
        if line.endswith("::"):
            self.finish()
            self._skip_deeper_than = indent


_MARKUP = [
    (re.compile(r":[\w:\-]+:`~?([^`<>]*?)\s*<[^`<>]*>`"), r"\1"),
    (re.compile(r":[\w:\-]+:`~(?:[\w.]*\.)?([^`]*)`"), r"\1"),
    (re.compile(r":[\w:\-]+:`!?\.?([^`]*)`"), r"\1"),
    (re.compile(r"`([^`<>]+?)\s*<[^`<>]*>`__?"), r"\1"),
    (re.compile(r"!?\[`*~?([^\]`]+)`*\]\([^)]*\)"), r"\1"),
    (re.compile(r"\[`~?(?:[\w.]*\.)?([^\]`]+)`\]"), r"\1"),
    (re.compile(r"``([^`]+)``"), r"\1"),
    (re.compile(r"`([^`]+)`(?:__?(?!\w))?"), r"\1"),
    (re.compile(r"\*\*(\S[^*]*\S|\S)\*\*"), r"\1"),
    (re.compile(r"(?<![\w*])\*([A-Za-z][^*]*?)\*(?![\w*])"), r"\1"),
    (re.compile(r"\s*\[(?:#\w*|\d+|[A-Z][A-Za-z]+\d{2,4}\w?)\]_?(?!\w)"), ""),
    (re.compile(r"\|(\w+)\|_?"), r"\1"),
    (re.compile(r"\\([*_`|\\ ])"), r"\1"),
    (re.compile(r"\s+([,.;:!?])(?=\s|$)"), r"\1"),
]


def _strip_markup(text: str) -> str:
    if "`" in text or "*" in text or "[" in text or "|" in text or "\\" in text:
        for pattern, replacement in _MARKUP:
            text = pattern.sub(replacement, text)
    return " ".join(text.split())


# Nearly every English sentence has one of these words.
_STOP_WORDS = frozenset(
    "the a an of to is are be in that this it for and or with as not on by from if can will was"
    " were has have which when you we its their these no all any at but does do should may must"
    " they there he she his her i".split()
)
_WORD = re.compile(r"^[A-Za-z]+(?:['\u2019-][A-Za-z]+)*$")
_CAMEL = re.compile(r"[a-z][A-Z]|[A-Z]{2,}[a-z]{2,}")
_FORBIDDEN = re.compile(
    r"https?://|www\.|[{}$\\<>|^~`@\[\]*%&#]|==|->|::|\w=|=\w|;;|\.\.|/\w+/|__|--| ="
    r" |\w\(|\?\?|TODO|FIXME|XXX"
)
# Gaps left by removed citations and links: "as shown in, and ..." or "... is taken from."
_GAP = re.compile(r"\b(?:in|see|from|by|of|the|non),|\b(?:the|an?|of|non)[.!?]$")
_NOT_LETTERS = re.compile(r"[^A-Za-z ]+")
_IDENTIFIER = re.compile(r"_|[A-Za-z]\.[A-Za-z]{2}|\w/\w|\d.*[A-Za-z]|[A-Za-z].*\d")
_EDGE = "\"'()\u201c\u201d\u2018\u2019,.;:!?"


def reject_reason(sentence: str) -> str | None:
    """Return the first rule of plain English prose that a sentence breaks, or None."""
    words = sentence.split()
    if not 5 <= len(words) <= 40:
        return "length"
    if not sentence[0].isupper() or sentence[-1] not in ".!?" or not sentence.isascii():
        return "form"
    if _FORBIDDEN.search(sentence):
        return "symbols"
    if _GAP.search(sentence):
        return "gap"
    if sentence.count("(") != sentence.count(")") or sentence.count('"') % 2:
        return "brackets"
    if len(_NOT_LETTERS.sub("", sentence)) < 0.75 * len(sentence):
        return "letters"
    bare = [word.strip(_EDGE) for word in words]
    lowered = {word.lower() for word in bare}
    if not lowered & _STOP_WORDS:
        return "no_stop_word"
    num_identifiers = sum(_is_identifier(word) for word in bare)
    if num_identifiers > 1 or _is_identifier(bare[0]):
        return "identifiers"
    num_plain = sum(word.islower() and bool(_WORD.match(word)) for word in bare[1:])
    if num_plain < 0.7 * (len(bare) - 1):
        return "not_words"
    return None


def _is_identifier(word: str) -> bool:
    return not _WORD.match(word) and bool(_IDENTIFIER.search(word)) or bool(_CAMEL.search(word))


def skeleton(sentence: str) -> str:
    """Return a key that near-repeats share: the set of content words, with one mark for
    identifiers and numbers.

    "Builds a FooModel." and "Builds the BarModel." have one key, as have sentences that differ in
    a stop word or in word order. Documentation is full of both, and one of the two in validation
    would not be unseen text.
    """
    content = set()
    for index, word in enumerate(sentence.split()):
        word = word.strip(_EDGE)
        folded = word.lower()
        if folded in _STOP_WORDS:
            continue
        is_plain = index == 0 or (word.islower() and _WORD.match(word))
        content.add(
            (folded[:-1] if folded.endswith("s") and len(folded) > 3 else folded)
            if is_plain
            else "#"
        )
    return " ".join(sorted(content))
