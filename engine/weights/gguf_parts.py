"""A GGUF model in several files ("name-00001-of-00003.gguf"), opened by any of them as one."""
from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from .files import FormatError, show
from .gguf import GgufHeader, read_header

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def read_model(path: Path) -> GgufHeader:
    """The header of a GGUF model: that of the file, or of all its parts with the metadata of the first.

    Raises FormatError naming the part that is missing or does not belong; else as `read_header`.
    """
    header = read_header(path)
    count = header.metadata.get("split.count", 0)
    if type(count) is not int:
        raise FormatError(f"{path}: metadata split.count is {show(count)}, a whole number is expected; the file is corrupt")
    if count < 2:
        return header
    name = _NAME.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        raise FormatError(f"{path}: is one of {count} parts, whose names must end in -00001-of-{count:05}.gguf and so on; name it so")
    parts = [_part(path.with_name(f"{name['stem']}-{number:05}-of-{count:05}.gguf"), number, count) for number in range(1, count + 1)]
    tensors = {}
    for part in parts:
        if twice := tensors.keys() & part.tensors.keys():
            raise FormatError(f"{part.path}: tensor {show(min(twice))} is also in another part; download the parts again")
        tensors |= part.tensors
    return replace(parts[0], tensors=tensors, file_bytes=sum(part.file_bytes for part in parts))


def _part(path: Path, number: int, count: int) -> GgufHeader:
    if not path.exists():
        raise FormatError(f"{path}: part {number} of {count} is missing; download it into the same folder")
    header = read_header(path)
    if header.metadata.get("split.count") != count or header.metadata.get("split.no") != number - 1:
        raise FormatError(f"{path}: is not part {number} of {count} as its name says; download the parts again")
    return header
