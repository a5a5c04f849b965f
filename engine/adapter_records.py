"""What is known of every adapter by name, wherever its tensors are."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from .adapter_read import Source
from .adapters.errors import AdapterError
from .mix import unknown_adapter
from .protocol import AdapterInfo
from .vocabulary import Vocabulary
from .watch import FileState, Watched

MOST_TWINS = 3
"""names of the same content that a note has"""


@dataclass(slots=True)
class Record:
    info: AdapterInfo
    source: Source
    file: FileState = ""
    """what became of the files of `source` since they were read"""
    own_invocation: bool = False
    """set by command, not by the file"""
    vocabulary: Vocabulary | None = None
    """with what it adds to the base's, if anything"""
    pages: Mapping[str, int] = field(default_factory=dict)
    """of rank rows that it takes on the device, by kind of fused linear"""
    leaving: bool = False
    replaced: bool = False
    """old content that running requests finish on; no mix can name it"""


class Records(dict[str, Record]):
    """Records by name, in the order of loading. Old content that was replaced is among them under a name of its own."""

    def known(self, name: str) -> Record:
        """Raises AdapterError for a name that no mix may have."""
        if name not in self or self[name].replaced:
            raise AdapterError(unknown_adapter(name, self.infos()))
        return self[name]

    def infos(self) -> dict[str, AdapterInfo]:
        """Of all but old content."""
        return {name: record.info for name, record in self.items() if not record.replaced}

    def choose_name(self, given: str | None, info: AdapterInfo) -> str:
        """`given`, or the first of name, name-2, name-3, ... that is free or already holds this content."""
        if given is not None:
            record = self.get(given)
            if record is not None and record.info.digest != info.digest:
                here = "what this path held before" if record.info.path == info.path else f"other content ({record.info.path})"
                way = "reload it to take what it holds now" if record.info.path == info.path else "unload that first"
                raise AdapterError(f"{info.path}: the name {given!r} is taken by {here}; {way}, or choose another name")
            return given
        return self._free(info.name, info.digest)

    def set_aside(self, name: str) -> str:
        """A second record of what `name` holds, as old content that leaves with its users; its name, `name@digest`."""
        record = self[name]
        kept = self._free(f"{name}@{record.info.digest[:8]}")
        info = msgspec.structs.replace(record.info, name=kept)
        self[kept] = Record(info, record.source, vocabulary=record.vocabulary, pages=record.pages, leaving=True, replaced=True)
        return kept

    def twins_note(self, info: AdapterInfo) -> tuple[str, ...]:
        """Which other names have the same content, in words; nothing for none."""
        twins = [name for name, known in self.infos().items() if known.digest == info.digest and name != info.name]
        more = f" and {len(twins) - MOST_TWINS} more" if len(twins) > MOST_TWINS else ""
        return (f"the same content as {', '.join(map(repr, twins[:MOST_TWINS]))}{more}",) if twins else ()

    def neighbours(self, name: str) -> tuple[str, ...]:
        """Other names that were loaded from the same files and keep other content than `name` has."""
        own = self[name]
        return tuple(other for other, record in self.items()
                     if not record.replaced and record.source.files == own.source.files and record.info.digest != own.info.digest)

    def watched(self) -> tuple[Watched, ...]:
        """The files of every adapter, and what they were like when they were read."""
        return tuple(Watched(name, record.source.files, record.source.stamp) for name, record in self.items() if not record.replaced)

    def _free(self, first: str, digest: str = "") -> str:
        name, number = first, 1
        while name in self and self[name].info.digest != digest:
            number += 1
            name = f"{first}-{number}"
        return name
