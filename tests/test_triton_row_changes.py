"""What single rows of a decode step have of their own: the launches against their reference, other rows untouched."""
from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from triton_cpu import interpreted, run_interpreted

from lora_bench.kernels import late_ranks, row_changes
from lora_bench.kernels.decode_linear import RowSquares
from lora_bench.kernels.embedding_rows import EMBEDDING_WORDS, MOST_TERMS, EmbeddingRows, Term
from lora_bench.kernels.head_rows import HEAD_WORDS, HeadPart, HeadRows
from lora_bench.kernels.rank_pages import MAX_PAGES, RankPool, RankRows
from lora_bench.kernels.row_changes import NormRows, RowChanges, RowStream

PROFILES = 3


def test_interpreted() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize(("rows", "width", "dtype"), [(5, 40, torch.float32), (2, 1030, torch.float16)])
@interpreted
def test_kernels(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    _compare(rows, width, dtype, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 40), (64, 4096), (33, 5376)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_gpu(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    _compare(rows, width, dtype, torch.device("cuda"))


def _compare(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """What the ops write is poisoned before: what they touch there becomes a number."""
    which = torch.randint(-PROFILES, PROFILES + 1, (rows,)).clamp_min(0).int()
    which[0] = torch.randint(1, PROFILES + 1, ())
    embedded = torch.randint(0, 2, (rows,)).int()
    # each op takes a part of longer rows
    gains, shifts = 1 + torch.randn(PROFILES, 3 * width) / 4, torch.randn(PROFILES, 3 * width)
    pair = RowChanges(which, gains[:, : 2 * width], shifts[:, : 2 * width])
    one = RowChanges(which, pair.gains[:, :width], pair.shifts[:, :width])
    weight = 1 + torch.randn(width).to(dtype) / 8
    norm = NormRows(weight, shifts[:, 2 * width :])
    x, y, bias = torch.randn(rows, width).to(dtype), torch.randn(rows, 2 * width).to(dtype), torch.randn(2 * width).to(dtype)
    stream, shared = (torch.randn(rows, width).to(dtype) for _ in range(2))
    poisoned, parts = torch.full((rows, width), torch.nan, dtype=dtype), torch.full((5, rows + 2), torch.nan)
    folded = RowStream(stream, shared, poisoned, RowSquares(parts, width, 0.0), 1e-5)
    normed = RowStream(stream, shared, poisoned, None, 1e-5)
    _same("change_rows{}_", (y, bias, pair), dtype, device)
    _same("change_rows{}_", (y, None, pair), dtype, device)
    late = replace(pair, late=torch.randn(rows, 2 * width))
    _same("change_rows{}_", (y, bias, late), dtype, device)
    _same("gate_rows{}", (y, bias, late, "silu", poisoned), dtype, device)
    _same("join_rows{}_", (x, 1.0, None, replace(one, late=torch.randn(rows, width)), None, 0.7, norm, folded), dtype, device)
    _same("gate_rows{}", (y, bias, pair, "silu", poisoned), dtype, device)
    _same("gate_rows{}", (y, None, pair, "gelu_tanh", poisoned), dtype, device)
    for to, before in ((folded, norm), (normed, norm), (normed, None)):
        _same("begin_rows{}_", (which, embedded, x, 1.5, before, to), dtype, device)
        _same("join_rows{}_", (x, 1.0, None, one, norm, 0.7, before, to), dtype, device)
        _same("join_rows{}_", (to.shared, 0.5, bias[:width], one, None, 0.7, before, to), dtype, device)


def _same(op: str, given: tuple[object, ...], dtype: torch.dtype, device: torch.device, place: ModuleType = row_changes) -> None:
    """What the op leaves in all that it was given is what its reference leaves."""
    left: list[list[Tensor]] = []
    for form, where in (("_reference", torch.device("cpu")), ("", device)):
        copies: dict[int, Tensor] = {}
        getattr(place, op.format(form))(*(_copied(value, where, copies) for value in given))
        left.append([tensor.cpu().double() for tensor in copies.values()])
    for theirs, ours in zip(*left, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan()), op
        assert (ours - theirs).nan_to_num().norm() <= 4 * torch.finfo(dtype).eps * theirs.nan_to_num().norm(), op


def _copied(value: object, place: torch.device, copies: dict[int, Tensor]) -> object:
    """What is one tensor remains one."""
    if isinstance(value, Tensor):
        if id(value) not in copies:
            copies[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=place).copy_(value)
        return copies[id(value)]
    if isinstance(value, RowChanges | NormRows | RowStream | RowSquares | RankRows | RankPool):
        return type(value)(*(_copied(getattr(value, name), place, copies) for name in value.__slots__))
    return value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@interpreted
def test_late_ranks(dtype: torch.dtype, seed: int) -> None:
    _compare_late(40, (24, 40, 300), dtype, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("d_in", "ends"), [(40, (24, 40, 300)), (1000, (1500, 3000)), (4096, (4096,))])
def test_late_ranks_on_gpu(d_in: int, ends: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    _compare_late(d_in, ends, dtype, torch.device("cuda"))


def _compare_late(d_in: int, ends: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Pages in any order, rows on which none acts and one without a profile."""
    pool = RankPool(torch.randn(4, 2, len(ends), 16, d_in).to(dtype), torch.randn(4, 2, ends[-1], 16).to(dtype), ends)
    pages = torch.full((1 + 2 * MAX_PAGES,), 99, dtype=torch.int32)
    pages[:4], pages[1 + MAX_PAGES : 4 + MAX_PAGES] = torch.tensor([3, 2, 0, 3]), torch.tensor([1, 1, 0])
    weights = torch.tensor([[0.5, -1.0], [0.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    which, x = torch.tensor([1, 2, 3, 0], dtype=torch.int32), torch.randn(4, d_in).to(dtype)
    for norm in (None, RowSquares(torch.rand(3, 5), d_in, 1e-5)):
        given = (x, RankRows(pool, 1, pages, weights), norm, which, torch.full((4, ends[-1]), torch.nan))
        _same("late_ranks{}", given, torch.float16, device, late_ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@interpreted
def test_heads(dtype: torch.dtype, seed: int) -> None:
    _compare_heads(40, 70, dtype, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "vocab"), [(40, 70), (1030, 5000)])
def test_heads_on_gpu(hidden: int, vocab: int, dtype: torch.dtype, seed: int) -> None:
    _compare_heads(hidden, vocab, dtype, torch.device("cuda"))


def _compare_heads(hidden: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """A row of the base, trained rows, a whole matrix, and both with added tokens, of which one has no row; against plain words."""
    rows, columns = 5, vocab + 8
    x, logits = torch.randn(rows, hidden).to(dtype), torch.randn(rows, columns).to(dtype)
    parts = [None, (torch.tensor([3, 7, vocab - 1]), 1.0, 0.4), (torch.arange(vocab), 0.3, 0.7),
             (torch.tensor([0, vocab, vocab + 2]), 1.0, -0.5), (torch.arange(vocab + 2), 0.5, 0.5)]
    numbers = [None if part is None else torch.randn(len(part[0]), hidden).to(dtype) for part in parts]
    norm = RowSquares(torch.rand(3, rows + 1), hidden, 1e-5)
    host, given = np.zeros((rows, HEAD_WORDS), np.int64), []
    for part, own in zip(parts, numbers, strict=True):
        whole = part is not None and len(part[0]) >= vocab
        given.append(part and HeadPart(own.to(device), None if whole else part[0].to(device), *part[1:]))
    words = torch.zeros(rows, HEAD_WORDS, dtype=torch.int64, device=device)
    heads = HeadRows(host, words, vocab)
    for squares in (None, norm):
        expected = logits.double()
        expected[:, vocab:] = 0
        for row, (part, own) in enumerate(zip(parts, numbers, strict=True)):
            if part is not None:
                z = own.double() @ x[row].double()
                z *= 1 if squares is None else torch.rsqrt(norm.parts[:, row].double().sum() / hidden + norm.eps)
                old = expected[row, part[0]]
                expected[row, part[0]] = torch.where(part[0] < vocab, part[1] * old + part[2] * z, z)
        heads.set(given)
        words.copy_(torch.from_numpy(host))
        got = logits.to(device, copy=True)
        placed = squares and RowSquares(norm.parts.to(device), hidden, norm.eps)
        heads.run_(x.to(device), placed, got)
        assert torch.equal(got[0, :vocab].cpu(), logits[0, :vocab])
        assert (got.cpu().double() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@interpreted
def test_embeddings(dtype: torch.dtype, seed: int) -> None:
    _compare_embeddings(200, dtype, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [40, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embeddings_on_gpu(hidden: int, dtype: torch.dtype, seed: int) -> None:
    _compare_embeddings(hidden, dtype, torch.device("cuda"))


def _compare_embeddings(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """Against plain words: rows without terms, of every kind of them, ranks that are no whole steps, as many terms as there may be."""
    table, a, wide, b, c = (torch.randn(size).to(dtype) for size in ((9, hidden), (9, 5), (9, 33), (5, hidden), (33, hidden)))
    gains = torch.rand(hidden) + 0.5
    x = table.double()
    more, most = a.double() @ b.double(), wide.double() @ c.double()
    table, a, wide, b, c, gains = (tensor.to(device) for tensor in (table, a, wide, b, c, gains))
    terms = [[], [Term("row", table, 8)], [Term("row", table, 3, weight=0.3), Term("row", table, 4, weight=0.7)],
             [Term("row", table, 2), Term("lora", a, 7, b, -0.5), Term("gains", gains), Term("lora", wide, 1, c, 2.0)],
             [Term("row", table, place, weight=0.1) for place in range(MOST_TERMS)]]
    scale = gains.cpu().double()
    expected = torch.stack([x[8], 0.3 * x[3] + 0.7 * x[4], (x[2] - 0.5 * more[7]) * scale + 2 * most[1], 0.1 * x[:MOST_TERMS].sum(0)])
    host, words = np.zeros((6, EMBEDDING_WORDS), np.int64), torch.zeros(6, EMBEDDING_WORDS, dtype=torch.int64, device=device)
    rows, out = EmbeddingRows(host, words), torch.full((6, hidden), torch.nan, dtype=dtype, device=device)
    rows.set(terms)
    words.copy_(torch.from_numpy(host))
    rows.run(out)
    assert out[[0, 5]].isnan().all() and (out[1:5].cpu().double() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


def test_rows_without_a_profile_keep_their_bits(seed: int) -> None:
    """And what a profile means, in plain words."""
    which = torch.tensor([0, 2, 0], dtype=torch.int32)
    gains, shifts, bias = torch.rand(2, 6) + 0.5, torch.randn(2, 6), torch.randn(6)
    y = torch.randn(3, 6)
    before = y.clone()
    row_changes.change_rows_(y, bias, RowChanges(which, gains, shifts))
    assert torch.equal(y[[0, 2]], before[[0, 2]])
    torch.testing.assert_close(y[1], bias + gains[1] * (before[1] - bias) + shifts[1])
    to = RowStream(*(torch.randn(3, 6) for _ in range(3)), RowSquares(torch.randn(2, 3), 6, 0.0), 1e-5)
    old = replace(to, stream=to.stream.clone(), shared=to.shared.clone(), out=to.out.clone())
    parts = to.squares.parts.clone()
    norm = NormRows(torch.rand(6), torch.randn(2, 6))
    row_changes.join_rows_(to.shared, 0.5, bias, RowChanges(which, gains, shifts), None, 0.5, norm, to)
    for ours, theirs in ((to.stream, old.stream), (to.shared, old.shared), (to.out, old.out), (to.squares.parts.T, parts.T)):
        assert torch.equal(ours[[0, 2]], theirs[[0, 2]])
    stream = old.stream[1] + 0.5 * (bias + gains[1] * (old.shared[1] / 0.5 - bias) + shifts[1])
    torch.testing.assert_close(to.stream[1], stream)
    torch.testing.assert_close(to.out[1], stream * (norm.weight + norm.changes[1]))
    torch.testing.assert_close(to.squares.parts[:, 1], torch.stack([stream.square().sum(), torch.zeros(())]))
    assert not to.shared[1].any()
