"""Norms that stand between linears of a decode step: of what is added to the residual stream, and of the stream."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
import torch
from torch import Tensor

from .launch import launch
from .triton_compat import runs_triton, tl, triton


def residual_norm(
    y: Tensor, post_weight: Tensor | None, stream: Tensor, scale: float, next_weight: Tensor | None, out: Tensor, eps: float,
) -> None:
    """Semantics: stream += scale * n(y, post_weight); out = n(stream, next_weight), with n(x, w) = x / rms(x) * w, or x where w is None.

    y, stream, out [rows, width] of one dtype; weights [width], of that dtype or fp32; rms(x) = sqrt(mean(x^2) + eps). Products and sums
    in fp32; the stream is rounded to its dtype before it is normed. A row does not depend on the other rows.
    """
    if runs_triton(y):
        rows, width = y.shape
        block = 1 << (width - 1).bit_length()
        weights = post_weight is None or post_weight.dtype, next_weight is None or next_weight.dtype
        places = tuple(None if one is None else one.data_ptr() % 16 for one in (y, post_weight, stream, next_weight, out))
        form = y.get_device(), y.dtype, weights, places
        launch(
            _residual_norm, form, (rows, 1, 1), (y, post_weight, stream, scale, next_weight, out, eps),
            {"WIDTH": width, "BLOCK": block}, num_warps=min(16, max(1, block // 512)))
    else:
        residual_norm_reference(y, post_weight, stream, scale, next_weight, out, eps)


def residual_norm_reference(
    y: Tensor, post_weight: Tensor | None, stream: Tensor, scale: float, next_weight: Tensor | None, out: Tensor, eps: float,
) -> None:
    stream.copy_(stream.float() + scale * _normed(y, post_weight, eps))
    out.copy_(_normed(stream, next_weight, eps))


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.float()
    return x if weight is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


@triton.jit
def _residual_norm(
    y, post_weight, stream, scale, next_weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    place = tl.arange(0, BLOCK)
    inside = place < WIDTH
    row = tl.program_id(0).to(tl.int64) * WIDTH + place
    added = tl.load(y + row, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(stream + row, mask=inside, other=0.0).to(tl.float32)
    if post_weight is not None:
        added *= tl.rsqrt(tl.sum(added * added, 0) / WIDTH + eps) * tl.load(post_weight + place, mask=inside, other=0.0).to(tl.float32)
    x = (x + scale * added).to(stream.dtype.element_ty)
    tl.store(stream + row, x, mask=inside)
    x = x.to(tl.float32)
    if next_weight is not None:
        x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * tl.load(next_weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, x.to(out.dtype.element_ty), mask=inside)
