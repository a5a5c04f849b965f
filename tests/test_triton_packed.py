"""The linears of a decode step over packed matrices: against float64, and on GPUs bit for bit against themselves in other company."""
from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from interleaved import interleaved
from torch import Tensor
from triton_cpu import interpreted, run_interpreted

from lora_bench.kernels import packed_linear
from lora_bench.kernels.decode_linear import DecodeWork, Glu, Residual, RowSquares, decode_linear, decode_linear_reference
from lora_bench.kernels.packed import PackedRows, PackedWeight
from lora_bench.kernels.packed_linear import packed_square_parts
from lora_bench.kernels.quant import QUANT_TYPES, dequantize
from lora_bench.kernels.rank_pages import MAX_PAGES, PAGE_ROWS, RankPool, RankRows
from lora_bench.kernels.repack import ORDERS, repack
from lora_bench.kernels.repacked import repacked
from lora_bench.kernels.triton_compat import INTERPRETED
from lora_bench.kernels.unpack_rows import unpack_rows

DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
ERRORS = {torch.float16: 1e-3, torch.bfloat16: 6e-3}


def random_rows(kind: str, rows: int, d_in: int) -> PackedRows:
    """Random blocks whose scales are moderate numbers."""
    quant = QUANT_TYPES[kind]
    blocks = torch.randint(0, 256, (rows * d_in // quant.block_elements, quant.block_bytes), dtype=torch.uint8, device=DEVICE)
    for start, width in quant.wide:
        if width == 2:
            halves = torch.randn(len(blocks), 1, device=DEVICE) / (2000 if quant.block_elements == 256 else 50)
            blocks[:, start:start + 2] = halves.half().view(torch.uint8)
    return PackedRows(kind, blocks.view(rows, -1))


def numbers(parts: tuple[PackedRows, ...]) -> Tensor:
    """What ggml makes of them, fp32 [rows, d_in]."""
    return torch.cat([dequantize(part.data.reshape(-1), part.type).view(part.data.shape[0], -1) for part in parts])


@dataclass
class Form:
    """A linear of random packed weights with what stands around it; `kinds` lie one under the other."""

    d_in: int
    kinds: tuple[tuple[str, int], ...]
    dtype: torch.dtype
    glu: Glu = ""
    residual: bool = False
    norm: bool = False
    bias: bool = False
    ends: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parts = tuple(random_rows(kind, rows, self.d_in) for kind, rows in self.kinds)
        self.numbers = numbers(parts)
        self.n = n = self.numbers.shape[0]
        self.weight = repacked(PackedWeight(parts, self.dtype), gated=bool(self.glu))
        self.scale = 1 / float(self.numbers.std() * self.d_in**0.5)
        self.ends = self.ends or (n,)
        self.bias_values = self.random(n) if self.bias else None
        self.next_weight = 1 + self.random(n) / 8
        pages = sum(-(-rank // PAGE_ROWS) for rank in self.ranks) + 2
        a = self.random(pages, 2, len(self.ends), PAGE_ROWS, self.d_in) * self.d_in**-0.5 / self.scale
        self.pool, free = RankPool(a, self.random(pages, 2, n, PAGE_ROWS) / 4, self.ends), torch.randperm(pages).tolist()
        self.owned = [[free.pop() for _ in range(-(-rank // PAGE_ROWS))] for rank in self.ranks]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(self.dtype)

    def inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, the stream before, and sums of squares."""
        x = (torch.randn(rows, self.d_in, device=DEVICE) * self.scale).to(self.dtype)
        return x, self.random(rows, self.n), torch.rand(37, rows, device=DEVICE) * self.d_in / 18

    def rank_rows(self, mixes: list[dict[int, float]]) -> RankRows:
        """The adapters of each row with their scales; those of no row are not in the table."""
        active = sorted({adapter for row in mixes for adapter in row})
        pages, weights = torch.full((1 + 2 * MAX_PAGES,), 1 << 30, dtype=torch.int32), torch.zeros(len(mixes), max(1, len(active)))
        places = [(page, column) for column, adapter in enumerate(active) for page in self.owned[adapter]]
        pages[0] = len(places)
        for place, (page, column) in enumerate(places):
            pages[1 + place], pages[1 + MAX_PAGES + place] = page, column
        for row, mix in enumerate(mixes):
            for adapter, scale in mix.items():
                weights[row, active.index(adapter)] = scale
        return RankRows(self.pool, 1, pages.to(DEVICE), weights.to(DEVICE))

    def run(self, given: tuple[Tensor, Tensor, Tensor], rank: RankRows | None, rows: int) -> tuple[Tensor, ...]:
        """What the kernel writes for the first `rows` rows: out, and with a residual the stream and its squares in parts [rows, parts]."""
        x, stream, squares = given[0][:rows], given[1][:rows].clone(), given[2][:, :rows].contiguous()
        parts = torch.full((packed_square_parts(self.weight) + 3, rows), torch.nan, device=DEVICE)
        residual = Residual(stream, self.next_weight, RowSquares(parts, self.n, 1e-5), scale=0.5) if self.residual else None
        out = torch.full((rows, self.n // 2 if self.glu else self.n), torch.nan, dtype=self.dtype, device=DEVICE)
        work = DecodeWork(rows, [(self.d_in, self.ends[-1], len(self.ends))] * 2, self.dtype, DEVICE, [self.weight])
        work.begin()
        for scratch in (work.lane(1).h, work.lane(1).partials):
            scratch.fill_(torch.nan)
        decode_linear(x, self.weight, self.bias_values, out, norm=RowSquares(squares, self.d_in, 1e-5) if self.norm else None,
                      glu=self.glu, residual=residual, rank=rank, work=work.lane(1))
        assert not work.lane(1).sums.any()
        return (out, stream, parts.T) if residual else (out,)

    def exact(self, given: tuple[Tensor, Tensor, Tensor], rank: RankRows | None) -> tuple[Tensor, ...]:
        """The same by the reference in float64."""
        x, stream, squares = (part.double() for part in given)
        parts = torch.full((2, x.shape[0]), torch.nan, device=DEVICE, dtype=torch.float64)
        residual = Residual(stream, self.next_weight.double(), RowSquares(parts, self.n, 1e-5), scale=0.5) if self.residual else None
        out = torch.empty(x.shape[0], self.n // (2 if self.glu else 1), dtype=torch.float64, device=DEVICE)
        if rank is not None:
            rank = replace(rank, pool=RankPool(rank.pool.a.double(), rank.pool.b.double(), self.ends), weights=rank.weights.double())
        decode_linear_reference(x, self.numbers.double(), self.bias_values.double() if self.bias else None, out, glu=self.glu, rank=rank,
                                norm=RowSquares(squares, self.d_in, 1e-5) if self.norm else None, residual=residual)
        return (out, stream, parts.sum(0)[:, None]) if residual else (out,)


def _mixes(rows: int, adapters: int) -> list[dict[int, float]]:
    """Several adapters on a row, negative scales, and rows of the base."""
    return [{} if torch.rand(()) < 0.2 else {int(torch.randint(adapters, ())): float(torch.randn(())) for _ in range(1 + row % 3)}
            for row in range(rows)]


def _check(form: Form, rows: int) -> None:
    given = form.inputs(rows)
    for rank in (None, form.rank_rows(_mixes(rows, len(form.ranks)))) if form.ranks else (None,):
        for ours, exact in zip(form.run(given, rank, rows), form.exact(given, rank), strict=True):
            assert ours.isfinite().all()
            ours = ours.double().sum(1, keepdim=True) if ours.shape != exact.shape else ours
            assert (ours.double() - exact).norm() <= ERRORS[form.dtype] * exact.norm(), (rows, rank is None)


def _bits(form: Form, sizes: tuple[int, ...]) -> None:
    """A row alone and in company of several sizes; without active pages."""
    most = max(sizes)
    given, mine = form.inputs(most), {0: 1.5, 1: -0.5}
    alone = form.run(given, form.rank_rows([mine]), 1)
    for rows in sizes:
        for company in (_mixes(rows - 1, len(form.ranks)), [{}] * (rows - 1)):
            got = form.run(given, form.rank_rows([mine, *company]), rows)
            assert all(torch.equal(a[0], b[0]) for a, b in zip(alone, got, strict=True)), rows
    base = form.run(given, None, most)
    assert all(map(torch.equal, base, form.run(given, form.rank_rows([{}] * most), most)))
    some = form.run(given, form.rank_rows([{}, *_mixes(most - 1, len(form.ranks))]), most)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(base, some, strict=True))


plain = pytest.mark.skipif(INTERPRETED, reason="the interpreter is slow")


def test_interpreted() -> None:
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("kind", ORDERS)
def test_unpacked_rows(kind: str, seed: int) -> None:
    packed = random_rows(kind, 40, 288 if QUANT_TYPES[kind].block_elements == 32 else 256)
    ids, out = torch.tensor([39, 0, 17]), torch.full((3, packed.data.shape[1] * 8), torch.nan)[:, : numbers((packed,)).shape[1]]
    unpack_rows(repack(packed), ids, out)
    torch.testing.assert_close(out, numbers((packed,))[ids], rtol=1e-6, atol=1e-7)


@plain
@pytest.mark.parametrize("kind", ORDERS)
def test_repacked_rows_are_the_same_numbers(kind: str, seed: int) -> None:
    shapes = [(70, 512), (2100, 256)] + ([(5, 576)] if QUANT_TYPES[kind].block_elements == 32 else [])
    for rows, d_in in shapes:
        packed, order = random_rows(kind, rows, d_in), torch.randperm(rows, device=DEVICE)
        ids = torch.randint(0, rows, (50,), device=DEVICE)
        assert torch.equal(repack(packed, order).numbers(ids), numbers((packed,))[order][ids])
    assert repack(packed).data.nbytes <= 1.03 * packed.data.nbytes or d_in % 256 or rows % 64


@plain
@pytest.mark.parametrize(("kinds", "gated"), [((("Q4_K", 70), ("Q6_K", 40)), False), ((("Q4_0", 50), ("Q4_0", 50)), True)])
def test_a_repacked_matrix_hands_out_what_the_packed_one_does(kinds: tuple[tuple[str, int], ...], gated: bool, seed: int) -> None:
    packed = PackedWeight(tuple(random_rows(kind, rows, 512) for kind, rows in kinds), torch.float16)
    weight, last = repacked(packed, gated), torch.finfo(torch.float16).eps
    ids, x = torch.randint(0, packed.shape[0], (40,), device=DEVICE), torch.randn(3, 512, device=DEVICE).half()
    assert weight.shape == packed.shape and weight.device == packed.device
    torch.testing.assert_close(weight.rows(ids), packed.rows(ids), rtol=last, atol=1e-6)
    for elements in (512, 5000, 1 << 20):
        whole = torch.cat([chunk for _, chunk in weight.chunks(torch.float32, elements)])
        torch.testing.assert_close(whole, numbers(packed.parts), rtol=1e-6, atol=1e-7)
    bias = torch.randn(packed.shape[0], device=DEVICE).half()
    for given in (None, bias):
        wanted = packed.linear(x, given).float()
        assert (weight.linear(x, given) - wanted).norm() <= 2 * last * wanted.norm()


@plain
def test_what_is_not_repacked() -> None:
    rows = random_rows("Q4_K", 64, 256), random_rows("Q6_K", 64, 256)
    assert repacked(PackedWeight(rows, torch.float32)) is None
    assert repacked(PackedWeight(rows, torch.bfloat16), gated=True) is None
    assert repacked(PackedWeight((random_rows("Q3_K", 64, 256),), torch.bfloat16)) is None
    assert repacked(PackedWeight(rows * 2, torch.bfloat16)) is None


SMALL = [
    (3, dict(d_in=256, kinds=(("Q4_K", 64), ("Q4_K", 40), ("Q6_K", 30)), ends=(64, 104, 134), norm=True, bias=True, ranks=(16, 8))),
    (9, dict(d_in=288, kinds=(("Q4_0", 70),), residual=True, ranks=(40, 16))),
    (2, dict(d_in=256, kinds=(("Q5_K", 72),), glu="silu", ends=(36, 72), norm=True, bias=True, ranks=(24, 16))),
    (17, dict(d_in=64, kinds=(("Q4_1", 48),), glu="gelu_tanh", bias=True)),
    (1, dict(d_in=1056, kinds=(("Q8_0", 24),), residual=True, ranks=(16, 3))),
    (33, dict(d_in=32, kinds=(("Q5_0", 20), ("Q5_1", 20)), norm=True)),
]


@interpreted
@pytest.mark.parametrize(("rows", "form"), SMALL)
def test_against_float64(rows: int, form: dict, seed: int) -> None:
    _check(Form(dtype=torch.float16, **form), rows)


@interpreted
@pytest.mark.parametrize(("rows", "form"), [
    (3, dict(d_in=1536, kinds=(("Q4_K", 64),), residual=True, ranks=(16, 24))),
    (2, dict(d_in=1536, kinds=(("Q8_0", 70),), ends=(30, 50, 70), norm=True, ranks=(16, 8))),
    (9, dict(d_in=1536, kinds=(("Q4_0", 40),), glu="silu", ends=(20, 40), bias=True, ranks=(24,))),
])
def test_programs_that_run_at_once(rows: int, form: dict, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the sums of each other when they need them, in whatever order they run."""
    form = Form(dtype=torch.float16, **form)
    given, rank = form.inputs(rows), form.rank_rows([{0: 1.0}, *_mixes(rows - 1, len(form.ranks))])
    usual = form.run(given, rank, rows)
    monkeypatch.setattr(packed_linear, "RANK_PROGRAMS", 3)
    for resident in (4, 99):
        with interleaved(seed, resident):
            assert all(map(torch.equal, usual, form.run(given, rank, rows)))


LARGE = [
    (8, dict(d_in=4096, kinds=(("Q4_K", 5120), ("Q6_K", 1024)), ends=(4096, 5120, 6144), norm=True, ranks=(16, 8, 64))),
    (1, dict(d_in=4096, kinds=(("Q4_K", 4096),), residual=True, ranks=(16, 16))),
    (32, dict(d_in=4096, kinds=(("Q4_K", 4096),), glu="silu", ends=(2048, 4096), norm=True, ranks=(16, 40))),
    (16, dict(d_in=14336, kinds=(("Q6_K", 4096),), residual=True, ranks=(16, 40))),
    (64, dict(d_in=2048, kinds=(("Q5_K", 1000),), norm=True, bias=True, ranks=(16, 40))),
    (5, dict(d_in=1536, kinds=(("Q8_0", 576),), residual=True, ranks=(16, 40))),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "form"), SMALL + LARGE)
def test_on_gpu(rows: int, form: dict, dtype: torch.dtype, seed: int) -> None:
    _check(Form(dtype=dtype, **form), rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "form"), [case for case in SMALL + LARGE if case[1].get("ranks")])
def test_bits_on_gpu(rows: int, form: dict, seed: int) -> None:
    _bits(Form(dtype=torch.bfloat16, **form), (2, 3, 8, 16, 33))
