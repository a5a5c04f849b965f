"""Attention of a decode step: norm and rotation of the heads, the write into the cache, and the products with all tokens, in one launch."""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .decode_attention_triton import decode_attention_kernel
from .early import early_launch
from .rope import rope_
from .stamps import Stamp
from .triton_compat import runs_triton

WIDEST = 256
"""numbers of a head that the kernels take"""
NARROW = 64
"""numbers of a head whose tiles one warp holds"""
ROW_PROGRAMS = 256
"""about so many stretches has the longest row, of all its heads together, twice as many of narrow heads"""
LONG = 16384
"""tokens up to which a row has half as many at most: to join them takes longer the more there are"""
FILLED = 528
"""warps of a launch: of more programs some would come late, and each begins with a wait"""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Where the rows of a step stand. A row is the next token of one request; rows at position -1 are empty: nothing is read or written."""

    positions: Tensor
    """[rows] int32: tokens of the request before this one"""
    rope_rows: Tensor
    """[rows] int32: its row of the RoPE tables"""
    tables: Tensor
    """[rows, blocks of the longest request] int32: the blocks of each request in order"""


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer's attention is like."""

    heads: int
    kv_heads: int
    size: int
    scale: float
    """of the products of q and k"""
    softcap: float = 0.0
    """c of c tanh(score / c), 0 for none"""
    window: int = 0
    """tokens that one sees, itself included, 0 for all"""
    cos: Tensor | None = None
    """[positions, rotary] fp32 as `rope_table` makes them; None where nothing is turned"""
    sin: Tensor | None = None
    q_norm: Tensor | None = None
    """[size] of every head by itself"""
    k_norm: Tensor | None = None
    eps: float = 0.0


class AttentionWork:
    """What the programs of a launch leave for each other; one for all layers of a step of `rows` rows, which run one after another."""

    def __init__(self, rows: int, heads: Heads, device: torch.device) -> None:
        self.splits = most_splits(heads)
        parts = rows * heads.kv_heads * self.splits
        group = heads.heads // heads.kv_heads
        self.parts = torch.empty(parts, group, head_width(heads.size), dtype=torch.float32, device=device)
        self.sums = torch.empty(parts, 2, group, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows * heads.kv_heads, dtype=torch.int32, device=device)

    def begin(self) -> None:
        """A step begins. A launch leaves the counters as it found them, one that was cut short does not."""
        self.arrived.zero_()


def kernels_take(cache: Tensor) -> bool:
    """Whether our attention kernels take a layer's cache [2, kv_heads, blocks, block_tokens, d]: heads of at most WIDEST, whose numbers
    they count in 31 bits."""
    return cache.shape[4] <= WIDEST and cache[0, 0].numel() < 1 << 31


def most_splits(heads: Heads) -> int:
    """Into how many stretches a row's tokens are parted at most: the same for all rows, contexts and batches of a model."""
    programs = ROW_PROGRAMS * 2 if head_width(heads.size) <= NARROW else ROW_PROGRAMS
    return min(128, max(16, power_of_two(-(-programs // heads.kv_heads))))


def decode_attention(
    qkv: Tensor, cache: Tensor, out: Tensor, rows: DecodeRows, heads: Heads, work: AttentionWork, stamp: Stamp | None = None,
) -> None:
    """As `decode_attention_reference`, by one kernel where Triton runs and `kernels_take` the cache.

    `work` was made for at least so many rows of such heads. `stamp`: where the kernel's beginning is put down, on a GPU. What `rows` holds
    may be read while the launch before still runs: that must not be what writes it.
    """
    if runs_triton(qkv) and kernels_take(cache):
        _launch(qkv, cache, out, rows, heads, work, stamp)
    else:
        decode_attention_reference(qkv, cache, out, rows, heads)


def _launch(
    qkv: Tensor, cache: Tensor, out: Tensor, rows: DecodeRows, heads: Heads, work: AttentionWork, stamp: Stamp | None,
) -> None:
    group, width = heads.heads // heads.kv_heads, head_width(heads.size)
    tile, least, warps, stages = _shape(width, qkv.dtype)
    times, index = stamp if stamp is not None else (None, 0)
    decode_attention_kernel[(qkv.shape[0], heads.kv_heads, _programs(qkv.shape[0] * heads.kv_heads, work.splits, warps))](
        qkv, cache, out, rows.positions, rows.rope_rows, rows.tables, heads.cos, heads.sin, heads.q_norm, heads.k_norm, work.parts,
        work.sums, work.arrived, times, index, cache.shape[2], rows.tables.shape[1], heads.window, heads.scale, heads.softcap, heads.eps,
        HEADS=heads.heads, KV_HEADS=heads.kv_heads, SIZE=heads.size, WIDTH=width, BLOCK=cache.shape[3],
        ROTARY=0 if heads.cos is None else heads.cos.shape[1], SOFTCAP=heads.softcap != 0,
        WINDOWED=heads.window != 0, STAMPED=stamp is not None, QUERIES=max(16, power_of_two(group)), GROUP_ROWS=power_of_two(group),
        SPLITS=work.splits, LEAST=least, TILE=tile, STAGES=stages, JOINED=_joined(group, width, warps),
        AHEAD=4 if qkv.element_size() == 2 and width > NARROW else 1, LONG=LONG, num_warps=warps, **early_launch())


def _programs(rows: int, splits: int, warps: int) -> int:
    """How many programs share the stretches of a row's head, of `rows` heads of rows in all."""
    return max(1, min(splits, round(FILLED / (rows * warps))))


def _shape(width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Tokens read at once, fewest tokens of a stretch, warps, reads under way."""
    if dtype == torch.float32:
        return (32, 64, 8, 2) if width <= 128 else (16, 64, 4, 2)
    return (32, 64, 1, 3) if width <= NARROW else (64, 64, 2, 3) if width <= 128 else (32, 64, 2, 3)


def _joined(group: int, width: int, warps: int) -> int:
    """Parts of a row read at once, as many as 64 registers of each thread hold, 128 where programs have one warp."""
    return max(1, min(32, (4096 if warps == 1 else 2048 * warps) // (power_of_two(group) * width)))


def head_width(size: int) -> int:
    """Numbers that the kernels hold of a head of `size`."""
    return max(16, power_of_two(size))


def power_of_two(number: int) -> int:
    """The first that is not less than `number`."""
    return 1 << (number - 1).bit_length()


def decode_attention_reference(qkv: Tensor, cache: Tensor, out: Tensor, rows: DecodeRows, heads: Heads) -> None:
    """Semantics, for every row t that is not empty: q, k normed and turned; cache[position] = k, v; out = softmax(cap(q K^T scale)) V over
    the tokens 0 .. position of its request (of them the last `window`).

    qkv [rows, (heads + 2 kv_heads) * size], may be changed; cache: a layer's [2, kv_heads, blocks, block_tokens, size]; out
    [rows, heads * size]. Sums and softmax in fp32. A row does not depend on the other rows.
    """
    block = cache.shape[3]
    for row in range(qkv.shape[0]):
        position = int(rows.positions[row])
        if position < 0:
            continue
        q, k, v = qkv[row].view(-1, heads.size).split((heads.heads, heads.kv_heads, heads.kv_heads))
        turned = torch.cat((_normed(q, heads.q_norm, heads.eps), _normed(k, heads.k_norm, heads.eps))).unsqueeze(0)
        if heads.cos is not None and heads.sin is not None:
            place = slice(int(rows.rope_rows[row]), int(rows.rope_rows[row]) + 1)
            rope_(turned[..., : heads.cos.shape[1]], heads.cos[place, None], heads.sin[place, None])
        q, k = turned[0].split((heads.heads, heads.kv_heads))
        here = int(rows.tables[row, position // block])
        cache[0, :, here, position % block] = k
        cache[1, :, here, position % block] = v
        first = max(0, position + 1 - heads.window) if heads.window else 0
        blocks = rows.tables[row, : position // block + 1].long()
        keys, values = cache[:, :, blocks].float().flatten(2, 3)[:, :, first : position + 1].unbind()
        group = heads.heads // heads.kv_heads
        scores = torch.einsum("kgd,ktd->kgt", q.float().view(heads.kv_heads, group, -1), keys) * heads.scale
        if heads.softcap:
            scores = heads.softcap * torch.tanh(scores / heads.softcap)
        out[row] = torch.einsum("kgt,ktd->kgd", scores.softmax(-1), values).reshape(-1)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x.clone() if weight is None else F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
