"""Adapters read for one base: checked against it, made ready, with what is to be said of them. Nothing that is loaded is touched."""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import msgspec

from .adapter_read import Progress, ReadAdapter, read_adapter
from .adapters.adapter import Adapter
from .adapters.describe import CHANGES_NOTHING
from .chat import own_template_note
from .models.facts import ModelFacts
from .tiers import Tiers
from .vocabulary import Vocabulary, own_vocabulary


class AdapterReader:
    """Any thread may use it."""

    def __init__(self, facts: ModelFacts, tiers: Tiers, vocabulary: Vocabulary, chat_template: str | None) -> None:
        """`vocabulary` and `chat_template` are those of the base."""
        self._facts, self._tiers, self._vocabulary, self._chat_template = facts, tiers, vocabulary, chat_template

    def read(
        self, path: str | os.PathLike[str], name: str | None, progress: Progress, cancelled: Callable[[], bool],
    ) -> ReadAdapter:
        """See `read_adapter`. It is made ready for the slot that `name` has."""
        read = read_adapter(path, name, self._facts, progress, cancelled)
        self._tiers.check(read.adapter)
        vocabulary, notes = own_vocabulary(read.adapter, self._vocabulary)
        if note := own_template_note(read.source.exact, self._chat_template):
            notes += (note,)
        if CHANGES_NOTHING not in read.adapter.info.notes and self._tiers.leaves_base(read.adapter):
            notes += (CHANGES_NOTHING,)
        info = msgspec.structs.replace(read.adapter.info, notes=(*read.adapter.info.notes, *notes))
        adapter = self._tiers.prepared(Adapter(info, read.adapter.weights))
        has_slot = name is not None and self._tiers.pool.get(name) is not None
        return replace(read, adapter=adapter, vocabulary=vocabulary,
                       ready=self._tiers.ready(name, adapter, read_ms=read.ms) if has_slot else None)
