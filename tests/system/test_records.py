"""JSON objects with a checksum."""

import json
import math

import pytest

from primal_dt.system.records import dump_record, parse_record

VALUES = {"step": 10, "loss": 0.1 + 0.2, "text": "ä", "nothing": None, "infinite": math.inf}


def test_a_record_round_trips() -> None:
    line = dump_record(VALUES)
    assert b"\n" not in line
    assert parse_record(line) == VALUES


def test_every_flipped_bit_is_noticed() -> None:
    """Or leaves the values as they are: the letters of an escape have two cases."""
    line = dump_record(VALUES)
    for place in range(len(line)):
        for bit in range(8):
            damaged = bytearray(line)
            damaged[place] ^= 1 << bit
            values = parse_record(bytes(damaged))
            assert values in (None, VALUES) or "crc32" not in json.loads(damaged), damaged


@pytest.mark.parametrize("line", [b"", b"5", b"[]", b"null", b"\xff", b"{", b"[" * 100_000, b"9" * 5000])
def test_what_is_not_an_object_is_damaged(line: bytes) -> None:
    assert parse_record(line) is None


def test_earlier_records_without_a_checksum_are_read() -> None:
    assert parse_record(b'{"step": 1}') == {"step": 1}
