"""The beginning of a decode step: the residual stream from the embedding table."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from torch import Tensor

from .decode_linear import Residual
from .triton_compat import runs_triton, tl, triton


def embed_rows(ids: Tensor, table: Tensor, out: Tensor, residual: Residual) -> None:
    """Semantics: stream = scale * table[ids], out = stream * next_weight, squares of the stream, all as `Residual` says.

    ids [rows] int32 or int64; table [words, width]; out, stream [rows, width]. Nothing waits for the device, so a graph can hold it.
    """
    if not runs_triton(table):
        embed_rows_reference(ids, table, out, residual)
        return
    width, parts = table.shape[1], residual.squares.parts
    block = triton.next_power_of_2(width)
    _embed_rows[(ids.shape[0],)](
        ids, table, out, residual.stream, residual.next_weight, parts, residual.scale, parts.stride(0), width, block,
        parts.shape[0], triton.next_power_of_2(parts.shape[0]), num_warps=min(16, max(1, block // 512)))


def embed_rows_reference(ids: Tensor, table: Tensor, out: Tensor, residual: Residual) -> None:
    """`embed_rows` in plain torch."""
    stream = table.index_select(0, ids).float() * residual.scale
    residual.stream.copy_(stream)
    out.copy_(stream * residual.next_weight.float())
    residual.squares.parts.zero_()
    residual.squares.parts[0, : ids.shape[0]] = stream.square().sum(1)


@triton.jit
def _embed_rows(
    ids, table, out, stream, next_weight, parts, scale, parts_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < WIDTH
    x = tl.load(table + tl.load(ids + row).to(tl.int64) * WIDTH + place, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(stream + row * WIDTH + place, x.to(stream.dtype.element_ty), mask=inside)
    following = tl.load(next_weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + place, (x * following).to(out.dtype.element_ty), mask=inside)
    part = tl.arange(0, PARTS_BLOCK)
    tl.store(parts + part * parts_row + row, tl.where(part == 0, tl.sum(x * x, 0), 0.0), mask=part < PARTS)
