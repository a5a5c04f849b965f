"""The beginning of a decode step: the residual stream from the embedding table."""
from __future__ import annotations

from torch import Tensor

from .decode_linear import Residual


def embed_rows(ids: Tensor, table: Tensor, out: Tensor, residual: Residual) -> None:
    """Semantics: stream = scale * table[ids], out = stream * next_weight, squares of the stream, all as `Residual` says.

    ids [rows] int64; table [words, width]; out, stream [rows, width]. Nothing waits for the device, so a graph can hold it.
    """
    stream = table.index_select(0, ids).float() * residual.scale
    residual.stream.copy_(stream)
    out.copy_(stream * residual.next_weight.float())
    residual.squares.parts.zero_()
    residual.squares.parts[0, : ids.shape[0]] = stream.square().sum(1)
