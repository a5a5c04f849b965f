"""The rows of a decode step, in memory that is uploaded with it; only what changed since the step before is written."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.decode_attention import DecodeRows
from ..kernels.device_sampling import DRAW_WORDS
from ..kernels.embedding_rows import EMBEDDING_WORDS
from ..kernels.head_rows import HEAD_WORDS
from .blocks import BLOCK_TOKENS, BlockTable, blocks_for
from .mix import ActiveUse
from .mix_history import MixHistory
from .page_lists import MAX_COLUMNS
from .request import Request

_EMPTY = -1
"""position of a row without a request"""
_WORDS = 2 * DRAW_WORDS + 6
"""int32 of a row, but for its weights"""


@dataclass(slots=True)
class _Row:
    """What a row was last filled with."""

    request: Request | None = None
    history: MixHistory | None = None
    settled: bool = False
    """what acts on its token acts on all that follow under this history"""
    uses: tuple[ActiveUse, ...] = ()
    table: BlockTable | None = None
    moves: int = 0
    blocks: int = 0


class StepRows:
    """A step of up to `rows` requests that each compute one token, in RAM and on the device, always at the same addresses.

    A request has the row of its place in the step. `weights` fp32 [rows, MAX_COLUMNS], of each adapter on each row, `draws` int64
    [rows, DRAW_WORDS] and `own` int32 [3, rows] (RowProfiles.compose) are written by others in RAM, and uploaded with the rest; `heads`
    int64 [rows, HEAD_WORDS], `embeddings` [rows, EMBEDDING_WORDS] and `late` fp32 [rows, MAX_COLUMNS] where that is asked for.
    """

    def __init__(self, rows: int, blocks: int, vocab: int, device: torch.device) -> None:
        """`blocks`: of the longest request; `vocab`: words of the base. An added token is read as its last one by what knows no others."""
        pinned = device.type == "cuda"
        self._rows, self._vocab = rows, vocab
        self._host = torch.zeros(rows * (_WORDS + MAX_COLUMNS), dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros_like(self._host, device=device)
        self._host_tables = torch.zeros(rows, blocks, dtype=torch.int32, pin_memory=pinned)
        self._device_tables = torch.zeros_like(self._host_tables, device=device)
        self._tables = self._host_tables.numpy()
        draws, places, weights = np.split(self._host.numpy(), (2 * DRAW_WORDS * rows, _WORDS * rows))
        self.draws: np.ndarray = draws.view(np.int64).reshape(rows, DRAW_WORDS)
        self._ids, self._positions, self._rope_rows, *_ = places.reshape(6, rows)
        self.own: np.ndarray = places.reshape(6, rows)[3:]
        self._positions[:] = _EMPTY
        self.weights: np.ndarray = weights.view(np.float32).reshape(rows, MAX_COLUMNS)
        of_draws, of_places, of_weights = self._device.split([part.size for part in (draws, places, weights)])
        self.device_draws = of_draws.view(torch.int64).view(rows, DRAW_WORDS)
        self._device_places, self.device_own = of_places.view(6, rows).split(3)
        self.device_weights = of_weights.view(torch.float32).view(rows, MAX_COLUMNS)
        sizes = [rows * HEAD_WORDS, rows * EMBEDDING_WORDS, rows * MAX_COLUMNS // 2]
        self._host_own = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=pinned)
        self._device_own = torch.zeros_like(self._host_own, device=device)
        heads, embeddings, late = np.split(self._host_own.numpy(), np.cumsum(sizes[:2]))
        self.heads: np.ndarray = heads.reshape(rows, HEAD_WORDS)
        self.embeddings: np.ndarray = embeddings.reshape(rows, EMBEDDING_WORDS)
        self.late: np.ndarray = late.view(np.float32).reshape(rows, MAX_COLUMNS)
        of_heads, of_embeddings, of_late = self._device_own.split(sizes)
        self.device_heads, self.device_embeddings = of_heads.view(rows, HEAD_WORDS), of_embeddings.view(rows, EMBEDDING_WORDS)
        self.device_late = of_late.view(torch.float32).view(rows, MAX_COLUMNS)
        self._held = [_Row() for _ in range(rows)]
        self._used = 0
        self._stale = range(0)
        """rows whose tables are not on the device yet"""

    # -- on the device ---------------------------------------------------------------------------
    def ids(self, rows: int) -> Tensor:
        """[rows] int32 of the first rows, as are those below."""
        return self._device_places[0, :rows]

    def places(self, rows: int) -> DecodeRows:
        _, positions, rope_rows = self._device_places[:, :rows]
        return DecodeRows(positions, rope_rows, self._device_tables[:rows])

    def upload(self, rows: int, own: bool) -> None:
        """What the first `rows` rows have of their own in every step, with `heads`, `embeddings` and `late` or without; may be captured."""
        end = _WORDS * self._rows + rows * MAX_COLUMNS
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if own:
            self._device_own.copy_(self._host_own, non_blocking=True)

    def upload_tables(self) -> None:
        """The tables of blocks that changed since they were uploaded last; not to be captured."""
        if self._stale:
            part = slice(self._stale.start, self._stale.stop)
            self._device_tables[part].copy_(self._host_tables[part], non_blocking=True)
            self._stale = range(0)

    # -- of a step -------------------------------------------------------------------------------
    def fill(self, requests: Sequence[Request], rope_start: Callable[[int], int] | None) -> bool:
        """The last token of each of `requests`. Returns whether another request, or other adapters or scales, act on some row than before.

        `rope_start`: RopeTables.start where it may differ from 0.
        """
        count = len(requests)
        changed = count != self._used
        for number in range(count, self._used):
            self._positions[number] = _EMPTY
            self._held[number] = _Row()
        self._used = count
        lengths = [len(request.ids) for request in requests]
        self._ids[:count] = np.minimum([request.ids[-1] for request in requests], self._vocab - 1)
        positions = self._positions[:count] = np.array(lengths, np.int32) - 1
        self._rope_rows[:count] = positions if rope_start is None else positions + [rope_start(length) for length in lengths]
        for number, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            row = self._held[number]
            if row.request is not request or row.history is not request.history or not row.settled:
                changed |= _take(row, request, length - 1)
            table = request.table
            if row.table is not table or row.moves != table.moves or row.blocks * BLOCK_TOKENS < length:
                self._fill_table(number, row, table, blocks_for(length))
        return changed

    @property
    def uses(self) -> list[tuple[ActiveUse, ...]]:
        """What acts on each row of the step."""
        return [row.uses for row in self._held[: self._used]]

    def _fill_table(self, number: int, row: _Row, table: BlockTable, blocks: int) -> None:
        if row.table is not table or row.moves != table.moves:
            row.table, row.moves, row.blocks = table, table.moves, 0
        self._tables[number, row.blocks : blocks] = table.blocks[row.blocks : blocks]
        row.blocks = blocks
        stale = self._stale or range(number, number)
        self._stale = range(min(stale.start, number), max(stale.stop, number + 1))


def _take(row: _Row, request: Request, position: int) -> bool:
    """`row` is that of `request` now. Whether it was not, or what acts on its token `position` differs from what the row had."""
    (mix, _, _), = request.history.pieces(position, 1)
    uses = tuple(use for use in mix.active if use.start <= position)
    changed = row.request is not request or uses != row.uses
    row.request, row.history, row.settled = request, request.history, mix is request.mix and len(uses) == len(mix.active)
    if changed:
        row.uses = uses
    return changed
