"""JSON objects with a checksum: a damaged one is noticed even if it is still a JSON object."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

__all__ = ["CHECKSUM", "checksum", "dump_record", "parse_record"]

CHECKSUM = "crc32"


def dump_record(values: Mapping[str, Any]) -> bytes:
    """One line of JSON, without a line break. Its last entry is the checksum of the others."""
    return json.dumps({**values, CHECKSUM: checksum(values)}).encode()


def parse_record(text: bytes, *, has_checksum: bool = False) -> dict[str, Any] | None:
    """The object in a line from :func:`dump_record`, or None if the line is damaged.

    Args:
        text: the line.
        has_checksum: whether it must have a checksum. Earlier versions wrote none.
    """
    try:
        values = json.loads(text.decode())
    except (ValueError, RecursionError):  # not UTF-8, not JSON, a number of thousands of digits, or deeply nested
        return None
    if not isinstance(values, dict):
        return None
    stated = values.pop(CHECKSUM, None)
    is_whole = stated == checksum(values) or (stated is None and not has_checksum)
    return values if is_whole else None


def checksum(values: Mapping[str, Any]) -> int:
    """The checksum of values, which is the same after they were written as JSON and read again."""
    return zlib.crc32(json.dumps(values).encode())
