"""The plain files in a tar, found by reading its headers alone.

The names are only keys: no file is ever made from them. Python's own `tarfile` is not used, since it reads headers of
any size into memory, and some of its versions never end on a negative size.
"""

import re
from collections.abc import Callable, Iterator
from zlib import crc32

from attrs import define

from hookdiff import shown

BLOCK = 512  # bytes of a header
_AFTER = 1 << 22  # bytes of zero padding that an archive may have at its end
_CHUNK = 1 << 16  # bytes that are read at a time
_LONGEST = 1 << 20  # bytes of an extended header, which holds a long name
_SIGNS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_KINDS = {"1": "a hard link", "2": "a symbolic link", "3": "a device", "4": "a device", "6": "a pipe"}

Read = Callable[[int, int], bytes]  # takes a position and a number of bytes; returns fewer at the end of the file


@define(frozen=True)
class Member:
    """A plain file in a tar."""

    name: str
    start: int  # position of its first byte; the header, one block, comes before
    size: int
    head: int  # the CRC-32 of its header


def members(read: Read, total: int) -> Iterator[Member]:
    """Yield the plain files in a tar of `total` bytes, in their order; folders are passed over.

    Raises ValueError for a file that is compressed, truncated, damaged or no tar, and for links, sparse files, devices.
    """
    begin, long_name, records = 0, "", dict[str, str]()
    while True:
        head = read(begin, BLOCK)
        if not begin and (packed := next((name for sign, name in _SIGNS.items() if head.startswith(sign)), None)):
            raise ValueError(f"is compressed with {packed}, so that no sample can be read alone; unpack it to a .tar")
        if not total:
            raise ValueError("is empty, expected a tar")
        if len(head) < BLOCK:
            raise ValueError(f"is truncated, or no tar: it has no end mark in its {total} bytes; copy or make it again")
        if not any(head):
            if any(any(read(at, min(_CHUNK, total - at))) for at in range(begin, min(total, begin + _AFTER), _CHUNK)):
                raise ValueError(
                    f"has data after its end mark at byte {begin}; join archives by tar --concatenate, not by cat"
                )
            return
        if not _is_header(head):
            raise ValueError(f"is damaged at byte {begin}: expected a header of tar" if begin else "is no tar")
        kind, size, start = chr(head[156]), _number(head[124:136], begin), begin + BLOCK
        if kind not in "xgLK":
            size = _size(records.get("size"), size)
        if size > (left := total - start):
            raise ValueError(f"is truncated or damaged: the member at byte {begin} has {size} bytes, {left} are left")
        begin = start + -(-size // BLOCK) * BLOCK
        if kind in "xgLK":
            if size > _LONGEST:
                raise ValueError(f"has an extended header of {size} bytes, expected at most {_LONGEST}")
            if kind == "x":
                records = _records(read(start, size), start)
            elif kind == "L":
                long_name = _text(read(start, size))
            continue  # "g" describes the whole archive, "K" the target of a link
        name = records.get("path") or long_name or _own_name(head)
        if kind == "S" or any(key.startswith("GNU.sparse") for key in records):
            raise ValueError(f"{shown(name)} is a sparse file, expected plain files")
        if kind in "\x0007" and not name.endswith("/"):
            yield Member(name, start, size, crc32(head))
        elif kind not in "\x00057V":  # "V" is the label of the archive
            what = _KINDS.get(kind, f"of the unknown type {kind!r}")
            raise ValueError(f"{shown(name)} is {what}, expected plain files: tar --dereference --hard-dereference")
        long_name, records = "", {}


def _is_header(head: bytes) -> bool:
    checksum = head[148:156].strip(b"\0 ")
    if not re.fullmatch(rb"[0-7]+", checksum):
        return False
    counted = head[:148] + b" " * 8 + head[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in counted)  # some old programs summed signed bytes
    return int(checksum, 8) in (sum(counted), signed)


def _number(field: bytes, where: int) -> int:
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b"\0 ")
    if not re.fullmatch(rb"[0-7]*", digits):
        raise ValueError(f"is damaged at byte {where}: a member has no size, or a negative one")
    return int(digits or b"0", 8)


def _size(record: str | None, size: int) -> int:
    """Return the size in the `record` of an extended header; without a record, `size`."""
    if record is None:
        return size
    if not re.fullmatch(r"[0-9]{1,19}", record):
        raise ValueError(f"is damaged: a member has the size {shown(record)[:30]!r}")
    return int(record)


def _own_name(head: bytes) -> str:
    name = _text(head[:100])
    prefix = _text(head[345:500]) if head[257:263] == b"ustar\0" else ""  # GNU's format has other fields in this place
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _records(data: bytes, where: int) -> dict[str, str]:
    """Return the records "LENGTH KEY=VALUE" of an extended header of POSIX."""
    records = {}
    while data.strip(b"\0"):
        length, space, _ = data[:20].partition(b" ")
        if not space or not re.fullmatch(rb"[0-9]+", length) or not len(length) + 3 <= int(length) <= len(data):
            raise ValueError(f"is damaged at byte {where}: an extended header is broken")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        records[_text(key)] = _text(value)
        data = data[int(length) :]
    return records
