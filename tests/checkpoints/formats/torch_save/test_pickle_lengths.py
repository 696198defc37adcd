"""Lengths in pickles are held against their size; what picklers write passes."""

from __future__ import annotations

import pickle

import pytest

from mmldlm.checkpoints.formats.torch_save.pickle_lengths import check_lengths

VALUE = {
    "a": [
        1,
        2.5,
        "x" * 300,
        b"y" * 70_000,
        (1, 2),
        10**40,
        2**3000,
        None,
        True,
        {1},
        frozenset([2]),
        bytearray(9),
    ],
    "many": {number: str(number) for number in range(3000)},
    "é\n\\": print,
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_picklers_write(protocol):
    data = pickle.dumps(VALUE, protocol)
    check_lengths(data)
    for end in (1, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError):
            check_lengths(data[:end])


@pytest.mark.parametrize(
    "data",
    [
        b"}r\xff\xff\xff\x7f.",
        b"}p2147483647\n.",
        b"p" + b"9" * 40 + b"\n.",
        b"\x8e" + bytes(7) + b"\x01.",
        b"B\xff\xff\xff\x7f.",
        b"\x96" + bytes(6) + b"\x01\0.",
        b"\x8b\xff\xff\xff\x7f.",
        b"T\xff\xff\xff\xff.",
        b"",
        b"}",
        b"\xfe.",
        b"cmodule\nname",
    ],
)
def test_claims_without_bytes(data):
    with pytest.raises(ValueError):
        check_lengths(data)
