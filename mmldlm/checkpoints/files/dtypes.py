"""Element types of checkpoint tensors, their sizes and the casts between them, with numpy alone.

numpy has no bfloat16 and no float8: such elements are raw unsigned integers next to the name of
their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class DType(NamedTuple):
    """One element type.

    Attributes:
        name: Name in torch.
        raw: NumPy type that carries its bytes.
        safetensors: Code of the dtype in safetensors files; "" if they cannot hold it.
        is_float: Whether it is a real floating-point type.
        itemsize: Number of bytes per element.
    """

    name: str
    raw: str
    safetensors: str
    is_float: bool
    itemsize: int


def _table() -> dict[str, DType]:
    rows = [
        ("float64", "<f8", "F64", True),
        ("float32", "<f4", "F32", True),
        ("float16", "<f2", "F16", True),
        ("bfloat16", "<u2", "BF16", True),
        ("float8_e4m3fn", "|u1", "F8_E4M3", True),
        ("float8_e5m2", "|u1", "F8_E5M2", True),
        ("float8_e4m3fnuz", "|u1", "F8_E4M3FNUZ", True),
        ("float8_e5m2fnuz", "|u1", "F8_E5M2FNUZ", True),
        ("float8_e8m0fnu", "|u1", "F8_E8M0", True),
        ("complex64", "<c8", "C64", False),
        ("complex128", "<c16", "", False),
        ("int64", "<i8", "I64", False),
        ("int32", "<i4", "I32", False),
        ("int16", "<i2", "I16", False),
        ("int8", "|i1", "I8", False),
        ("uint64", "<u8", "U64", False),
        ("uint32", "<u4", "U32", False),
        ("uint16", "<u2", "U16", False),
        ("uint8", "|u1", "U8", False),
        ("bool", "|b1", "BOOL", False),
    ]
    return {
        name: DType(name, raw, code, is_float, int(raw[2:])) for name, raw, code, is_float in rows
    }


DTYPES: dict[str, DType] = _table()
COMPLEX = ("complex64", "complex128")
# Between these there are casts.
WIDE_FLOATS = ("float64", "float32", "float16", "bfloat16")


def numel(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)


def nbytes(shape: Sequence[int], dtype: str) -> int:
    """Return the number of bytes of a tensor."""
    return numel(shape) * DTYPES[dtype].itemsize


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(max(numel(shape[axis + 1 :]), 1) for axis in range(len(shape)))


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 bits (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_numbers(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return elements in a numpy type of their own: bfloat16 as float32, all others unchanged."""
    return bf16_to_fp32(values) if dtype == "bfloat16" else values


def fp32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Convert float32 to bfloat16 bits (uint16), rounding to nearest even as torch and CUDA; NaN
    stays NaN.
    """
    result = _rounded(values).view(np.uint16)[..., 1::2].copy()
    nan = np.isnan(values)
    if nan.any():
        result[nan] = 0x7FC0
    return result


def is_rounded(values: np.ndarray, bits: np.ndarray) -> bool:
    """Return True if bfloat16 `bits` are float32 `values` rounded; False may need an exact
    comparison (NaN, -0.0).
    """
    differing = np.left_shift(bits, 16, dtype=np.uint32)
    differing ^= _rounded(values)
    return not differing.size or bool(differing.max() < 1 << 16)


def _rounded(values: np.ndarray) -> np.ndarray:
    """Round float32 to nearest even in the upper halves of the bits; wrong for NaN payloads that
    wrap.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    return rounded


def count_nonfinite(chunk: np.ndarray, dtype: str) -> int:
    """Count the NaN and infinite elements of a chunk of `dtype`; integers and float8 count as
    finite.
    """
    if dtype == "bfloat16":
        return int(np.count_nonzero((chunk & 0x7F80) == 0x7F80))
    if dtype in ("float64", "float32", "float16", *COMPLEX):
        return chunk.size - int(np.count_nonzero(np.isfinite(chunk)))
    return 0


def negate(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return -values of wide floats or complex numbers, exactly, also of zeros and NaN."""
    return values ^ np.uint16(0x8000) if dtype == "bfloat16" else np.negative(values)


def is_mask(chunk: np.ndarray, dtype: str) -> bool:
    """Return whether a chunk holds zeros and infinities of one sign alone, as attention
    masks do.
    """
    values = as_numbers(chunk, dtype)
    # NaN differs from 0, so that it is among them.
    infinite = values[values != 0]
    return 0 < infinite.size < values.size and bool(
        np.isinf(infinite).all() and (infinite == infinite[0]).all()
    )


def cast(chunk: np.ndarray, source: str, target: str) -> np.ndarray:
    """Cast a chunk from dtype `source` to dtype `target`, both as DTYPES[...].raw.

    Raises:
        ValueError: not a cast between float types wider than 8 bits.
    """
    if source == target:
        return chunk
    if source not in WIDE_FLOATS or target not in WIDE_FLOATS:
        raise ValueError(f"no cast from {source} to {target}")
    values = as_numbers(chunk, source)
    # The caller counts infinities; a warning would not name the tensor.
    with np.errstate(over="ignore"):
        if target == "bfloat16":
            return fp32_to_bf16(values.astype(np.float32, copy=False))
        return values.astype(DTYPES[target].raw, copy=False)
