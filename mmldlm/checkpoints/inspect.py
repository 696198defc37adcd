"""Show the content of a checkpoint, and the differences between two."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mmldlm.checkpoints.files.dtypes import COMPLEX, as_numbers, numel
from mmldlm.checkpoints.formats.open import open_source
from mmldlm.checkpoints.formats.weight_source import (
    RANGE_ELEMENTS,
    WEIGHT,
    OpenedCheckpoint,
    WeightSource,
)
from mmldlm.errors import UserError
from mmldlm.utils.formatting import for_screen, print_table


def summarize(opened: OpenedCheckpoint) -> list[tuple[str, str]]:
    """Return rows (label, value) that describe a source."""
    weights = opened.weights
    stored = [info for info in weights.tensors.values() if info.kind != "alias"]
    rows = [("source", str(opened.checkpoint or weights.path)), ("engine", opened.engine)]
    recorded = {
        "ZeRO stage": weights.stage,
        "world size": opened.world_size,
        "step": opened.step,
    }
    rows += [(key, str(value)) for key, value in recorded.items() if value is not None]
    rows.append(("tensors", f"{len(stored)} stored, {len(weights.tensors) - len(stored)} tied"))
    for kind in ("trainable", "frozen", "parameter", "buffer"):
        of_kind = [info for info in stored if info.kind == kind]
        if of_kind:
            elements = sum(info.numel for info in of_kind)
            size = sum(info.nbytes for info in of_kind)
            rows.append((kind, f"{len(of_kind)} tensors, {elements:,} elements, {size:,} bytes"))
    if weights.moments:
        counts = [f"{what} of {len(table)} tensors" for what, table in weights.moments.items()]
        rows.append(("moments", ", ".join(counts)))
    num_averaged = sum(weights.tensors[name].numel for name in weights.ema)
    average = f"of {len(weights.ema)} tensors, {num_averaged:,} elements"
    rows.append(("EMA", average if weights.ema else "none"))
    return rows


def inspect(path: Path | str, keep_names: bool = False, key: str | None = None) -> int:
    """Print the content of a checkpoint without reading its weights; return the exit code.

    For `keep_names` and `key` see open_source.
    """
    read = functools.partial(
        open_source, path, allow_nonfinite=True, with_ema=True, keep_names=keep_names, key=key
    )
    try:
        opened = read(with_moments=True)
    except UserError as error:
        # The weights can be read even if mmldlm cannot continue the optimizer.
        opened = read()
        opened.weights.notes.append(
            f"optimizer state not shown: expected {error.expected}, found {error.found}"
        )
    with opened.weights as weights:
        print_table(summarize(opened))
        width = max((len(name) for name in weights.tensors), default=0)
        print()
        for name, info in weights.tensors.items():
            tied = f" -> {info.alias_of}" if info.alias_of else ""
            moments = "".join(f"  {what}" for what in weights.moments_of(name))
            row = f"{name:<{width}}  {info.dtype:<9} {info.kind:<9} {_shape(info.shape)}"
            print(for_screen(f"{row}{tied}{moments}", sys.stdout))
        for note in weights.notes:
            print(f"note: {note}")
    return 0


@dataclass
class CheckpointDiff:
    """Differences between two sources; names include the second names of tied weights.

    Attributes:
        equal: Number of tensors with equal bits (after widening if the dtypes differ).
        values: Name -> (number of differing elements, largest absolute difference; NaN if only one
            of them is).
        shapes: Name -> (shape in a, in b).
        dtypes: Name -> (dtype in a, in b); the values may still be equal.
        only_a: Names only in a.
        only_b: Names only in b.
        renamed: Difference between the names of the two whose rest is the same; empty if there is
            none.
    """

    equal: int = 0
    values: dict[str, tuple[int, float]] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    renamed: str = ""

    @property
    def any(self) -> bool:
        """Whether a tensor is missing or has other values or names; a different dtype alone does
        not count.
        """
        return bool(self.values or self.shapes or self.only_a or self.only_b or self.renamed)


def compare(a: WeightSource, b: WeightSource, strip_prefix: str = "") -> CheckpointDiff:
    """Compare two sources tensor by tensor, in ranges, and the moments that they were opened with.

    If the names of one are those of the other behind a prefix, they are compared without it.

    Args:
        a: First source.
        b: Second source.
        strip_prefix: Prefix that is removed from the names of both; it is no difference.

    Raises:
        UserError: one of them is damaged.
    """
    difference = CheckpointDiff()
    names_a = {name.removeprefix(strip_prefix): name for name in a.tensors}
    names_b = {name.removeprefix(strip_prefix): name for name in b.tensors}
    for one, other, label in ((names_a, names_b, "A"), (names_b, names_a, "B")):
        if prefix := _extra_prefix(list(one), list(other)):
            difference.renamed = (
                f"all {len(one)} names of {label} begin with {prefix!r}, compared without it"
            )
            stripped = {name.removeprefix(prefix): origin for name, origin in one.items()}
            one.clear()
            one.update(stripped)
            break
    states_a, states_b = _states(a, names_a), _states(b, names_b)
    difference.only_a = [label for label in states_a if label not in states_b]
    difference.only_b = [label for label in states_b if label not in states_a]
    for label, (name_a, what, shape, dtype_a) in states_a.items():
        if label not in states_b:
            continue
        name_b, _, shape_b, dtype_b = states_b[label]
        if shape != shape_b:
            difference.shapes[label] = (shape, shape_b)
            continue
        if dtype_a != dtype_b:
            difference.dtypes[label] = (dtype_a, dtype_b)
        count, largest = 0, 0.0
        for low in range(0, numel(shape), RANGE_ELEMENTS):
            high = min(low + RANGE_ELEMENTS, numel(shape))
            x, y = _read(a, name_a, what, low, high), _read(b, name_b, what, low, high)
            differ, most = _difference(x, dtype_a, y, dtype_b)
            count, largest = count + differ, float(np.maximum(largest, most))
        if count:
            difference.values[label] = (count, largest)
        else:
            difference.equal += 1
    a.finish()
    b.finish()
    return difference


def _states(
    source: WeightSource, names: dict[str, str]
) -> dict[str, tuple[str, str, tuple[int, ...], str]]:
    """Return label -> (name in the source, weight or moment, shape, dtype) of all that is
    compared, for `names`: name to compare by -> name in the source.
    """
    states = {}
    for name, origin in names.items():
        info = source.tensors[origin]
        states[name] = (origin, WEIGHT, info.shape, info.dtype)
        for what in source.moments_of(origin):
            states[f"{what} of {name}"] = (origin, what, info.shape, "float32")
    return states


def _read(source: WeightSource, name: str, what: str, low: int, high: int) -> np.ndarray:
    chunks = source.iter_range(name, what, low, high)
    return np.concatenate([chunk.copy() for chunk, _ in chunks])


def _extra_prefix(names: list[str], others: list[str]) -> str:
    """Return the prefix without which names that are in none of `others` are among them; "" if
    there is none.
    """
    other_names = set(others)
    if not other_names or other_names & set(names):
        return ""
    first = names[0].split(".") if names else []
    prefixes = [".".join(first[:depth]) + "." for depth in range(1, len(first))]
    shared = [prefix for prefix in prefixes if all(name.startswith(prefix) for name in names)]
    return next(
        (
            prefix
            for prefix in shared
            if other_names & {name.removeprefix(prefix) for name in names}
        ),
        "",
    )


def diff(
    path_a: Path | str,
    path_b: Path | str,
    with_ema: bool = False,
    with_moments: bool = False,
    keep_names: bool = False,
    strip_prefix: str = "",
    key_a: str | None = None,
    key_b: str | None = None,
) -> int:
    """Print the differences between two checkpoints; return 0 if all tensors are equal, else 1.

    For `keep_names`, `key_a` and `key_b` see open_source.
    """
    options = {"with_ema": with_ema, "with_moments": with_moments, "keep_names": keep_names}
    opened_a = open_source(path_a, allow_nonfinite=True, key=key_a, **options)
    with opened_a.weights as a:
        opened_b = open_source(path_b, allow_nonfinite=True, key=key_b, **options)
        with opened_b.weights as b:
            if with_ema:
                a.use_ema()
                b.use_ema()
            difference = compare(a, b, strip_prefix)
            notes = [
                f"{label}: {note}"
                for label, source in (("A", a), ("B", b))
                for note in source.notes
            ]
    for note in notes:
        print(f"note: {note}")
    if difference.renamed:
        print(f"names      {difference.renamed}")
    for name in difference.only_a:
        print(f"only in A  {name}")
    for name in difference.only_b:
        print(f"only in B  {name}")
    for name, (one, two) in difference.shapes.items():
        print(f"shape      {name}: {_shape(one)} in A, {_shape(two)} in B")
    for name, (count, largest) in difference.values.items():
        print(f"values     {name}: {count:,} elements differ, by at most {largest:.6g}")
    for name, (dtype, other) in difference.dtypes.items():
        print(f"dtype      {name}: {dtype} in A, {other} in B")
    differing = len(difference.values) + len(difference.shapes)
    absent = len(difference.only_a) + len(difference.only_b)
    print(f"{difference.equal} tensors equal, {differing} differ, {absent} in one alone")
    return int(difference.any)


def _difference(x: np.ndarray, x_dtype: str, y: np.ndarray, y_dtype: str) -> tuple[int, float]:
    """Return the number of differing elements and the largest difference.

    NaNs are equal; 0.0 and -0.0 are not.
    """
    if x_dtype == y_dtype and np.array_equal(x.view(np.uint8), y.view(np.uint8)):
        return 0, 0.0
    # float8 stays bits, which suffices for equality.
    wide = np.complex128 if {x_dtype, y_dtype} & set(COMPLEX) else np.float64
    wide_x, wide_y = as_numbers(x, x_dtype).astype(wide), as_numbers(y, y_dtype).astype(wide)
    # Integers beyond 2^53 are only exact as they are stored.
    one, two = (x, y) if x_dtype == y_dtype else (wide_x, wide_y)
    same = (one.view(np.uint8) == two.view(np.uint8)).reshape(one.size, -1).all(axis=1)
    same |= np.isnan(wide_x) & np.isnan(wide_y)
    if same.all():
        return 0, 0.0
    with np.errstate(invalid="ignore"):
        return int(np.count_nonzero(~same)), float(np.abs(wide_x - wide_y)[~same].max())


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape) or "scalar"
