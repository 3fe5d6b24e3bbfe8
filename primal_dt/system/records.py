"""JSON objects with a checksum: a damaged one is noticed even if it is still a JSON object."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

__all__ = ["dump_record", "parse_record"]

CHECKSUM = "crc32"


def dump_record(values: Mapping[str, Any]) -> bytes:
    """One line of JSON, without a line break. Its last entry is the checksum of the others."""
    return json.dumps({**values, CHECKSUM: _checksum(values)}).encode()


def parse_record(text: bytes) -> dict[str, Any] | None:
    """The object in a line from :func:`dump_record`, or None if the line is damaged.

    A line without a checksum is accepted, since earlier versions wrote none.
    """
    try:
        values = json.loads(text.decode())
    except (ValueError, RecursionError):  # not UTF-8, not JSON, a number of thousands of digits, or deeply nested
        return None
    if not isinstance(values, dict):
        return None
    stated = values.pop(CHECKSUM, None)
    return values if stated is None or stated == _checksum(values) else None


def _checksum(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values).encode())
