"""The gate between two linears of a step of many rows, and in the same launch what rank rows add to the first of them."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
import torch.nn.functional as F
from torch import Tensor

from .decode_linear import Glu
from .decode_linear_triton import gated
from .launch import launch
from .lora_tiles import PLAIN_ROWS, TILE_ROWS, Shrunk, lora_expand_tiles_
from .triton_compat import runs_triton, tl, triton

COLUMNS = 64


def gate_tiles(y: Tensor, glu: Glu, shrunk: Shrunk | None = None) -> Tensor:
    """Semantics: act(g) * u, with g and u the halves of y + H B^T.

    y [rows, 2 * width], which may be changed; `shrunk`: of its linear, of two slices. Returns [rows, width], made in fp32 on a GPU; a row
    on which nothing acts has the bits that it has without `shrunk`.
    """
    if not runs_triton(y):
        if shrunk is not None:
            lora_expand_tiles_(y, shrunk)
        gate, up = y.chunk(2, -1)
        return (F.silu(gate) if glu == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)
    rows, width = y.shape[0], y.shape[1] // 2
    out = y.new_empty(rows, width)
    ranked = shrunk is not None and shrunk.places.most > 0
    if ranked:
        shrunk.wait()
    size = TILE_ROWS if ranked else PLAIN_ROWS
    launch(
        _gate_kernel, (y.get_device(), y.dtype, y.data_ptr() % 16, y.stride(0), width), (-(-width // COLUMNS), -(-rows // size), 1),
        (y, out, *(shrunk.of_kernels if ranked else (y, y, y, y, y, 0, 0, 0, 0, 0)), rows, y.stride(0), width),
        {"GLU": glu, "RANKED": ranked, "BM": size, "BN": COLUMNS}, num_warps=4)
    return out


@triton.jit(do_not_specialize=["rows", "layer", "most"], do_not_specialize_on_alignment=["counts", "pages", "touched"])
def _gate_kernel(
    y, out, b, counts, pages, touched, h, layer, b_page, b_layer, h_row, most, rows, y_row, width,
    GLU: tl.constexpr, RANKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    """A program makes BM rows at BN columns."""
    tile = tl.program_id(1)
    m = tile * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < width
    both = (m < rows)[:, None] & inside[None, :]
    at = y + m.to(tl.int64)[:, None] * y_row + n[None, :]
    gate = tl.load(at, mask=both, other=0.0)
    up = tl.load(at + width, mask=both, other=0.0)
    if RANKED:
        count = tl.load(counts + tile)
        acts = (tl.load(touched + m, mask=m < rows, other=0) != 0)[:, None]
        r = tl.arange(0, 16)
        low = h + m.to(tl.int64)[:, None] * h_row + r[None, :]
        rank = b + layer * b_layer + r[:, None] + n[None, :] * 16
        added = tl.zeros((BM, BN), tl.float32)
        added_up = added
        for place in range(0, count):
            page = tl.load(pages + tile * most + place).to(tl.int64) * b_page
            added = tl.dot(tl.load(low + place * 32, mask=acts, other=0.0),
                           tl.load(rank + page, mask=inside[None, :], other=0.0), added, input_precision="ieee")
            added_up = tl.dot(tl.load(low + (place * 32 + 16), mask=acts, other=0.0),
                              tl.load(rank + (page + width * 16), mask=inside[None, :], other=0.0), added_up, input_precision="ieee")
        result = gated(gate.to(tl.float32) + added, up.to(tl.float32) + added_up, GLU)
    else:
        result = gated(gate.to(tl.float32), up.to(tl.float32), GLU)
    tl.store(out + m.to(tl.int64)[:, None] * width + n[None, :], result.to(out.dtype.element_ty), mask=both)
