"""The linears of a decode step as one kernel: against float64, and bit for bit against themselves in other company."""
from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from interleaved import interleaved
from torch import Tensor
from triton_cpu import interpreted, run_interpreted

from lora_bench.kernels import tiles
from lora_bench.kernels.decode_linear import DecodeWork, Glu, Residual, RowSquares, decode_linear, decode_linear_reference, square_parts
from lora_bench.kernels.rank_pages import MAX_PAGES, PAGE_ROWS, RankPool, RankRows
from lora_bench.kernels.triton_compat import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
ERRORS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


@dataclass
class Form:
    """A linear of random weights with what stands around it."""

    d_in: int
    ends: tuple[int, ...]
    dtype: torch.dtype
    glu: Glu = ""
    residual: bool = False
    norm: bool = False
    bias: bool = False
    ranks: tuple[int, ...] = ()
    pool_pages: int = 0

    def __post_init__(self) -> None:
        n, slices, pages = self.ends[-1], len(self.ends), sum(-(-r // PAGE_ROWS) for r in self.ranks)
        self.weight, self.bias_values = self.random(n, self.d_in) * self.d_in**-0.5, self.random(n) if self.bias else None
        self.next_weight = 1 + self.random(n) / 8
        total = self.pool_pages or pages + 3
        a, b = self.random(total, 2, slices, PAGE_ROWS, self.d_in) * self.d_in**-0.5, self.random(total, 2, n, PAGE_ROWS) / 4
        self.pool, free = RankPool(a, b, self.ends), torch.randperm(total).tolist()
        self.owned = [[free.pop() for _ in range(-(-r // PAGE_ROWS))] for r in self.ranks]
        for rank, pages_of in zip(self.ranks, self.owned, strict=True):
            if rank % PAGE_ROWS:
                a[pages_of[-1], :, :, rank % PAGE_ROWS :] = 0
                b[pages_of[-1], ..., rank % PAGE_ROWS :] = 0

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(self.dtype)

    def rank_rows(self, scales: list[dict[int, float]]) -> RankRows | None:
        """The adapters of each row with their scales; those of no row are not in the table."""
        active = sorted({adapter for row in scales for adapter in row})
        pages, weights = torch.full((1 + 2 * MAX_PAGES,), 1 << 30, dtype=torch.int32), torch.zeros(len(scales), max(1, len(active)))
        numbers = [(page, column) for column, adapter in enumerate(active) for page in self.owned[adapter]]
        pages[0] = len(numbers)
        for place, (page, column) in enumerate(numbers):
            pages[1 + place], pages[1 + MAX_PAGES + place] = page, column
        for row, mix in enumerate(scales):
            for adapter, scale in mix.items():
                weights[row, active.index(adapter)] = scale
        return RankRows(self.pool, 1, pages.to(DEVICE), weights.to(DEVICE))

    def run(
        self, x: Tensor, stream: Tensor, squares: Tensor, rank: RankRows | None, work: DecodeWork | None = None,
        stamp: tuple[Tensor, int] | None = None, lane: int = 0,
    ) -> tuple[Tensor, ...]:
        """What the kernel writes: out, and with a residual the stream and its squares [rows, parts]. A step begins at `lane` 0."""
        rows, n = x.shape[0], self.ends[-1]
        norm, residual, stream = RowSquares(squares[:, :rows].contiguous(), self.d_in, 1e-5), None, stream[:rows].clone()
        if self.residual:
            parts = torch.full((square_parts(self.d_in, n, self.dtype) + 3, rows), torch.nan, device=DEVICE)
            residual = Residual(stream, self.next_weight, RowSquares(parts, n, 1e-5), scale=0.5)
        out = torch.full((rows, n // 2 if self.glu else n), torch.nan, dtype=self.dtype, device=DEVICE)
        work = work or DecodeWork(rows, [(self.d_in, self.ends[-1], len(self.ends))] * 2, self.dtype, DEVICE)
        if lane == 0:
            work.begin()
        for scratch in (work.lane(lane).h, work.lane(lane).partials, work.lane(lane).added, work.lane(lane).inverses):
            scratch.fill_(torch.nan)
        decode_linear(x, self.weight, self.bias_values, out, norm=norm if self.norm else None, glu=self.glu, residual=residual, rank=rank,
                      work=work.lane(lane), stamp=stamp)
        return (out, stream, residual.squares.parts.T) if residual else (out,)

    def exact(self, x: Tensor, stream: Tensor, squares: Tensor, rank: RankRows | None) -> tuple[Tensor, ...]:
        """The same by the reference in float64."""
        rows = x.shape[0]
        norm, stream = RowSquares(squares[:, :rows].double(), self.d_in, 1e-5), stream[:rows].double()
        parts = torch.full((2, rows), torch.nan, device=DEVICE, dtype=torch.float64)
        residual = Residual(stream, self.next_weight.double(), RowSquares(parts, self.ends[-1], 1e-5), scale=0.5)
        out = torch.empty(rows, self.ends[-1] // (2 if self.glu else 1), dtype=torch.float64, device=DEVICE)
        if rank is not None:
            rank = replace(rank, pool=RankPool(rank.pool.a.double(), rank.pool.b.double(), self.ends), weights=rank.weights.double())
        bias = None if self.bias_values is None else self.bias_values.double()
        decode_linear_reference(x.double(), self.weight.double(), bias, out, norm=norm if self.norm else None, glu=self.glu,
                                residual=residual if self.residual else None, rank=rank)
        return (out, stream, parts.T) if self.residual else (out,)

    def inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, the stream before, and sums of squares whose mean over the inputs is about one."""
        return self.random(rows, self.d_in), self.random(rows, self.ends[-1]), torch.rand(37, rows, device=DEVICE) * self.d_in / 18


def _mixes(rows: int, adapters: int) -> list[dict[int, float]]:
    """Several adapters on a row, negative scales, and rows of the base."""
    return [{} if torch.rand(()) < 0.2 else {int(torch.randint(adapters, ())): float(torch.randn(())) for _ in range(1 + row % 3)}
            for row in range(rows)]


def _check(form: Form, rows: int) -> None:
    given = form.inputs(rows)
    for rank in (None, form.rank_rows(_mixes(rows, len(form.ranks)))) if form.ranks else (None,):
        for ours, exact in zip(form.run(*given, rank), form.exact(*given, rank), strict=True):
            assert ours.isfinite().all()
            if ours.shape != exact.shape:
                ours, exact = ours.sum(1), exact.sum(1)
            assert (ours.double() - exact).norm() <= ERRORS[form.dtype] * exact.norm(), (rows, rank is None)


def _bits(form: Form, sizes: tuple[int, ...]) -> None:
    """A row alone, in company of several sizes, on other pages, and without active pages."""
    most = sizes[-1]
    given, mine = form.inputs(most), {0: 1.5, 2: -0.5}
    alone = form.run(*(t[..., :1] if t is given[2] else t[:1] for t in given), form.rank_rows([mine]))
    for rows in sizes:
        others = _mixes(rows - 1, len(form.ranks))
        for company in (others, [{}] * (rows - 1)):
            got = form.run(*(t[..., :rows] if t is given[2] else t[:rows] for t in given), form.rank_rows([mine, *company]))
            assert all(torch.equal(a[0], b[0]) for a, b in zip(alone, got, strict=True)), rows
    base = form.run(*given, None)
    assert all(map(torch.equal, base, form.run(*given, form.rank_rows([{}] * most))))
    some = form.run(*given, form.rank_rows([{}, *_mixes(most - 1, len(form.ranks))]))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(base, some, strict=True))
    mixes = _mixes(most, len(form.ranks))
    before = form.run(*given, form.rank_rows(mixes))
    order = torch.randperm(form.pool.a.shape[0], device=DEVICE)
    form.pool = RankPool(form.pool.a[order.argsort()].contiguous(), form.pool.b[order.argsort()].contiguous(), form.ends)
    form.owned = [[int(order[page]) for page in pages] for pages in form.owned]
    assert all(map(torch.equal, before, form.run(*given, form.rank_rows(mixes))))


def _name(given: dict | torch.dtype) -> str:
    return f"{given['d_in']}-{given['ends'][-1]}" if isinstance(given, dict) else str(given)


def test_interpreted() -> None:
    run_interpreted(__file__)


SMALL = [
    dict(d_in=48, ends=(24, 40, 56), norm=True, bias=True, ranks=(16, 8, 40)),
    dict(d_in=80, ends=(72,), residual=True, ranks=(16, 8, 40)),
    dict(d_in=64, ends=(20, 40), glu="silu", norm=True, ranks=(24, 16, 1)),
    dict(d_in=64, ends=(48,), glu="gelu_tanh", bias=True, ranks=(16, 16, 16)),
    dict(d_in=1056, ends=(24,), residual=True, ranks=(16, 3, 17)),
]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", SMALL)
@pytest.mark.parametrize("rows", [3, 35])
def test_small(form: dict, rows: int, dtype: torch.dtype, seed: int) -> None:
    _check(Form(dtype=dtype, **form), rows)


@interpreted
def test_bits_small(seed: int) -> None:
    few = (2, 15)  # numpy, which multiplies for the interpreter, adds in another order where the shape is another
    _bits(Form(d_in=48, ends=(24, 40), dtype=torch.float32, norm=True, ranks=(16, 8, 24)), few)


@interpreted
@pytest.mark.parametrize("form", SMALL)
def test_programs_that_run_at_once(form: dict, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have what others make for them when they need it, in whatever order they run: that of their own step and linear."""
    form = Form(dtype=torch.float32, **form)
    mixes = [{0: 1.0}, {}, {1: 0.5}], [{2: 1.0}] * 3, [{0: -1.0, 1: 2.0}, {}, {}], [{}] * 3
    given, steps = form.inputs(3), [form.rank_rows(mix) for mix in mixes]
    usual = [form.run(*given, rank) for rank in steps]
    monkeypatch.setattr(tiles, "_multiprocessors", lambda: 3)
    work = DecodeWork(3, [(form.d_in, form.ends[-1], len(form.ends))] * len(steps), torch.float32, DEVICE)
    for resident in (4, 99):
        with interleaved(seed, resident):
            for lane, rank in enumerate(steps):
                assert all(map(torch.equal, usual[lane], form.run(*given, rank, work, lane=lane)))


LARGE = [
    *SMALL,
    dict(d_in=4096, ends=(4096, 5120, 6144), norm=True, ranks=(8, 16, 32, 64)),
    dict(d_in=4096, ends=(4096,), residual=True, ranks=(8, 16, 32, 64, 5)),
    dict(d_in=4096, ends=(14336, 28672), glu="silu", norm=True, ranks=(16, 16, 48)),
    dict(d_in=14336, ends=(4096,), residual=True, ranks=(16,) * 9),
    dict(d_in=576, ends=(576, 768, 960), norm=True, ranks=(16, 8, 64)),
    dict(d_in=1536, ends=(576,), residual=True, ranks=(16, 8, 64)),
    dict(d_in=576, ends=(1536, 3072), glu="silu", norm=True, ranks=(16, 8, 64)),
    dict(d_in=576, ends=(49152,), norm=True, ranks=(16, 8)),
    dict(d_in=896, ends=(896, 1024, 1152), norm=True, bias=True, ranks=(16, 8, 64)),
    dict(d_in=2304, ends=(9216, 18432), glu="gelu_tanh", norm=True, ranks=(16, 8, 250)),
    dict(d_in=2050, ends=(333, 1000), norm=True, bias=True, ranks=(16, 8, 33)),
    dict(d_in=520, ends=(7,), residual=True, ranks=(16, 8, 33)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "form"), [
    *((torch.bfloat16, form) for form in LARGE), *((dtype, form) for dtype in (torch.float16, torch.float32) for form in LARGE[:8]),
], ids=_name)
def test_large(dtype: torch.dtype, form: dict, seed: int) -> None:
    for rows in (5, 40):
        _check(Form(dtype=dtype, **form), rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "form"), [
    *((torch.bfloat16, LARGE[index]) for index in (0, 1, 5, 6, 7, 8, 9, 10, 11, 15)),
    *((torch.float32, LARGE[index]) for index in (0, 1, 5)),
], ids=_name)
def test_bits(dtype: torch.dtype, form: dict, seed: int) -> None:
    _bits(Form(dtype=dtype, **{**form, "ranks": (16, 8, 40, 64, 16, 16)}), (2, 15, 17, 33, 64))


@interpreted
def test_step_that_ended_early(seed: int) -> None:
    """What a step leaves in its scratch does not matter to the next."""
    form = Form(d_in=48, ends=(24, 40), dtype=torch.float32, ranks=(16, 40))
    given, rank = form.inputs(3), form.rank_rows([{0: 1.0}, {1: 2.0}, {}])
    work = DecodeWork(3, [(48, 40, 2)] * 2, torch.float32, DEVICE)
    for _ in range(2):
        assert all(map(torch.equal, form.run(*given, rank), form.run(*given, rank, work)))


@pytest.mark.gpu
def test_stamp(seed: int) -> None:
    form, stamps = Form(576, (960,), torch.bfloat16, ranks=(16,)), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    given, rank = form.inputs(2), form.rank_rows([{0: 1.0}, {}])
    for place in (2, 0):
        assert torch.equal(form.run(*given, rank)[0], form.run(*given, rank, stamp=(stamps, place))[0])
    assert 0 == stamps[1] < stamps[2] < stamps[0]


@pytest.mark.gpu
def test_replay(seed: int) -> None:
    form = Form(4096, (4096,), torch.bfloat16, residual=True, ranks=(16,) * 30)
    given, rank = form.inputs(32), form.rank_rows([{row % 30: 1.0} for row in range(32)])
    first = form.run(*given, rank)
    assert all(all(map(torch.equal, first, form.run(*given, rank))) for _ in range(30))
