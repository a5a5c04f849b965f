"""What single rows of a decode step have of their own besides rank rows: gains and shifts of outputs, and norm weights.

All that such adapters bring (DoRA, trained biases and norms) is elementwise: y = bias + g * (x W^T + delta) + s, and what `late_ranks` made
of the adapters behind a DoRA is added. The launches here come behind those of the other rows (kernels/decode_linear.py) and touch none but
those that have a *profile*: the vectors of one mix at its scales. Which rows have which profile is numbers in device memory, so that a
captured step serves every mix.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode_linear import Glu, RowSquares
from .row_changes_triton import begin_kernel, change_kernel, gate_kernel, join_kernel
from .triton_compat import runs_triton, triton

BLOCK = 1024
"""outputs of a program"""


@dataclass(frozen=True, slots=True)
class RowChanges:
    """Of one linear."""

    which: Tensor
    """int32 [rows]: 0, or the number of the row's profile, counted from 1"""
    gains: Tensor
    """fp32 [profiles, d_out]"""
    shifts: Tensor
    """the same, with the same strides"""
    late: Tensor | None = None
    """fp32 [rows, d_out], contiguous: what is added behind the gains"""


@dataclass(frozen=True, slots=True)
class NormRows:
    """A norm whose weight is another one for some rows."""

    weight: Tensor
    """[width]"""
    changes: Tensor
    """fp32 [profiles, width]: what profiles add to it"""


@dataclass(frozen=True, slots=True)
class RowStream:
    """The residual stream of the rows with a profile, and what of it is made ready for the linear that reads it next."""

    stream: Tensor
    """[rows, width]"""
    shared: Tensor
    """[rows, width] of all rows: zero for these ones between two launches, so that what is added there can be taken from it"""
    out: Tensor
    """[rows, width]"""
    squares: RowSquares | None
    """of the stream; None where norms are launches of their own"""
    eps: float


def change_rows_(y: Tensor, bias: Tensor | None, at: RowChanges) -> None:
    """Semantics, for rows with a profile: y = bias + gains * (y - bias) + shifts + late, in fp32.

    y [rows, d_out] and bias [d_out] of one dtype.
    """
    if runs_triton(y):
        rows, width = y.shape
        change_kernel[(rows, triton.cdiv(width, BLOCK))](
            y, bias, at.which, at.gains, at.shifts, at.late, y.stride(0), at.gains.stride(0), width, BLOCK)
    else:
        change_rows_reference_(y, bias, at)


def change_rows_reference_(y: Tensor, bias: Tensor | None, at: RowChanges) -> None:
    y.copy_(torch.where(at.which[:, None] > 0, _changed(y, bias, at), y.float()))


def gate_rows(y: Tensor, bias: Tensor | None, at: RowChanges, glu: Glu, out: Tensor) -> None:
    """Semantics, for rows with a profile: z = bias + gains * (y - bias) + shifts + late; out = act(z[:, :n]) * z[:, n:].

    y [rows, 2 n], bias [2 n], out [rows, n] of one dtype; in fp32.
    """
    if runs_triton(y):
        rows, width = out.shape
        gate_kernel[(rows, triton.cdiv(width, BLOCK))](
            y, bias, at.which, at.gains, at.shifts, at.late, out, y.stride(0), out.stride(0), at.gains.stride(0), width, glu, BLOCK)
    else:
        gate_rows_reference(y, bias, at, glu, out)


def gate_rows_reference(y: Tensor, bias: Tensor | None, at: RowChanges, glu: Glu, out: Tensor) -> None:
    gate, up = _changed(y, bias, at).chunk(2, -1)
    act = F.silu(gate) if glu == "silu" else F.gelu(gate, approximate="tanh")
    out.copy_(torch.where(at.which[:, None] > 0, act * up, out.float()))


def begin_rows_(
    which: Tensor, embedded: Tensor, embeddings: Tensor, scale: float, before: NormRows | None, to: RowStream,
) -> None:
    """Semantics, where `embedded` is not 0: shared = scale * embeddings. Then for rows with a profile: stream = shared, shared = 0.
    For both: out = n(stream or shared, before), and squares of it.

    To be called when `to` has the beginning of all rows. which, embedded int32 [rows]; embeddings [rows, width] in the stream's dtype.
    n(x, w) = x * w with `to.squares`, else x / rms(x) * w, or x where there is no `before`.
    """
    if runs_triton(embeddings):
        rows, width = embeddings.shape
        begin_kernel[(rows,)](
            which, embedded, embeddings, *_norm(before), *_stream(to), scale, to.eps, **_sizes(width, to), num_warps=_warps(width))
    else:
        begin_rows_reference_(which, embedded, embeddings, scale, before, to)


def begin_rows_reference_(
    which: Tensor, embedded: Tensor, embeddings: Tensor, scale: float, before: NormRows | None, to: RowStream,
) -> None:
    ours, own = which[:, None] > 0, embedded[:, None] > 0
    value = torch.where(own, (scale * embeddings.float()).to(to.shared.dtype), to.shared)
    _make_ready(value, which, before, to, ours | own)
    to.stream.copy_(torch.where(ours, value, to.stream))
    to.shared.copy_(torch.where(ours, 0.0, value.float()))


def join_rows_(
    y: Tensor, divisor: float, bias: Tensor | None, at: RowChanges, after: NormRows | None, scale: float, before: NormRows | None,
    to: RowStream,
) -> None:
    """Semantics, for rows with a profile: z = bias + gains * (y / divisor - bias) + shifts + late; stream += scale * z / rms(z) * `after`'s
    weight, or scale * z where there is none; out and squares as `begin_rows_` makes them; shared = 0.

    y [rows, width], perhaps `to.shared` itself, and bias in the stream's dtype. In fp32; the stream is rounded before it is normed.
    """
    if runs_triton(y):
        rows, width = y.shape
        join_kernel[(rows,)](
            at.which, y, bias, at.gains, at.shifts, at.late, at.gains.stride(0), *_norm(after), *_norm(before), *_stream(to), divisor,
            scale, to.eps, **_sizes(width, to), num_warps=_warps(width))
    else:
        join_rows_reference_(y, divisor, bias, at, after, scale, before, to)


def join_rows_reference_(
    y: Tensor, divisor: float, bias: Tensor | None, at: RowChanges, after: NormRows | None, scale: float, before: NormRows | None,
    to: RowStream,
) -> None:
    ours = at.which[:, None] > 0
    z = _changed(y.float() / divisor, bias, at)
    if after is not None:
        z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + to.eps) * _weights(after, at.which)
    value = (to.stream.float() + scale * z).to(to.stream.dtype)
    _make_ready(value, at.which, before, to, ours)
    to.stream.copy_(torch.where(ours, value, to.stream))
    to.shared.copy_(torch.where(ours, 0.0, to.shared.float()))


def _changed(y: Tensor, bias: Tensor | None, at: RowChanges) -> Tensor:
    own, shift = (at.which - 1).clamp_min(0), 0.0 if bias is None else bias.float()
    y = (y.float() - shift) * at.gains[own] + shift + at.shifts[own]
    return y if at.late is None else y + at.late


def _weights(norm: NormRows, which: Tensor) -> Tensor:
    return norm.weight.float() + torch.where(which[:, None] > 0, norm.changes[(which - 1).clamp_min(0)], 0.0)


def _make_ready(value: Tensor, which: Tensor, before: NormRows | None, to: RowStream, here: Tensor) -> None:
    x = value.float()
    if before is not None:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + to.eps) if to.squares is None else 1.0
        x = x * inverse * _weights(before, which)
    to.out.copy_(torch.where(here, x, to.out.float()))
    if to.squares is not None:
        parts = to.squares.parts[:, : len(which)]
        own = torch.zeros_like(parts)
        own[0] = value.float().square().sum(1)
        parts.copy_(torch.where(here.T, own, parts))


def _norm(norm: NormRows | None) -> tuple[Tensor | None, Tensor | None, int]:
    return (None, None, 0) if norm is None else (norm.weight, norm.changes, norm.changes.stride(0))


def _stream(to: RowStream) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int]:
    parts = to.squares.parts if to.squares is not None else None
    return to.stream, to.shared, to.out, parts, parts.stride(0) if parts is not None else 0


def _sizes(width: int, to: RowStream) -> dict[str, int]:
    parts = to.squares.parts.shape[0] if to.squares is not None else 1
    return {"WIDTH": width, "BLOCK": triton.next_power_of_2(width), "PARTS": parts, "PARTS_BLOCK": triton.next_power_of_2(parts)}


def _warps(width: int) -> int:
    return min(16, max(1, triton.next_power_of_2(width) // 512))
