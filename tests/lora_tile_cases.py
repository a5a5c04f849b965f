"""Random steps of the tiled low-rank ops, and what they come to in float64."""
from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lora_bench.kernels.decode_linear import Glu
from lora_bench.kernels.gate_tiles import gate_tiles
from lora_bench.kernels.lora_tiles import RowTiles, Shrunk, SideStream, cut_tiles, lora_expand_tiles_, lora_shrink_tiles
from lora_bench.kernels.rank_pages import PAGE_ROWS, RankPool

LAYERS = 2
MIXED = (8, 16, 32, 64, 5, 17)


@dataclass(frozen=True)
class TileCase:
    x: Tensor
    y: Tensor
    pool: RankPool
    tiles: RowTiles
    weights: Tensor
    """[rows, adapters] float64, on the CPU"""
    pages: tuple[int, ...]
    columns: tuple[int, ...]
    layer: int

    def run(self, side: SideStream | None = None) -> Tensor:
        y = self.y.clone()
        lora_expand_tiles_(y, self.shrunk(side))
        return y

    def shrunk(self, side: SideStream | None = None) -> Shrunk:
        return lora_shrink_tiles(self.x, self.pool, self.layer, self.tiles, 0, side)

    def expected(self) -> Tensor:
        """[rows, d_out] float64 on the CPU."""
        y, x, start = self.y.double().cpu(), self.x.double().cpu(), 0
        for index, end in enumerate(self.pool.ends):
            for page, column in zip(self.pages, self.columns, strict=True):
                a, b = self.pool.a[page, self.layer, index].double().cpu(), self.pool.b[page, self.layer, start:end].double().cpu()
                y[:, start:end] += (x @ a.T * self.weights[:, column, None]) @ b.T
            start = end
        return y

    def check(self, y: Tensor, tolerance: float) -> None:
        acts, y, expected = (self.weights != 0).any(1), y.cpu(), self.expected()
        assert torch.equal(y[~acts], self.y.cpu()[~acts]), "rows without adapters keep their bits"
        error = (y.double() - expected)[acts].norm() / expected[acts].norm() if acts.any() else torch.zeros(())
        assert error < tolerance, f"relative error {error:.2e}"

    def check_gate(self, glu: Glu, tolerance: float) -> None:
        """`gate_tiles` of its linear, which has two slices of one size."""
        gated = gate_tiles(self.y.clone(), glu, self.shrunk()).cpu()
        gate, up = self.expected().chunk(2, 1)
        expected = (F.silu(gate) if glu == "silu" else F.gelu(gate, approximate="tanh")) * up
        assert (gated.double() - expected).norm() < tolerance * expected.norm()
        untouched = (self.weights == 0).all(1)
        assert torch.equal(gated[untouched], gate_tiles(self.y.clone(), glu).cpu()[untouched])


def tile_case(rng: random.Random, rows: int, d_in: int, ends: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype,
              device: str = "cpu", spare: int = 3) -> TileCase:
    """Requests of random lengths, each with none, one or some of the adapters of `ranks`, which may begin within it."""
    needed = [-(-rank // PAGE_ROWS) for rank in ranks]
    count = sum(needed) + spare
    pages = rng.sample(range(count), sum(needed))
    columns = [column for column, many in enumerate(needed) for _ in range(many)]
    a = torch.full((count, LAYERS, len(ends), PAGE_ROWS, d_in), float("nan"))
    b = torch.full((count, LAYERS, ends[-1], PAGE_ROWS), float("nan"))
    for column, rank in enumerate(ranks):
        for place, page in enumerate([page for page, of in zip(pages, columns, strict=True) if of == column]):
            live = min(PAGE_ROWS, rank - place * PAGE_ROWS)
            a[page], b[page] = 0, 0
            a[page, :, :, :live] = torch.randn(LAYERS, len(ends), live, d_in) * d_in**-0.5
            b[page, :, :, :live] = torch.randn(LAYERS, ends[-1], live)
    weights = torch.zeros(rows, len(ranks))
    at = 0
    while at < rows:
        end = min(rows, at + rng.randint(1, max(1, rows // 2)))
        for column in rng.sample(range(len(ranks)), rng.choice((0, 1, 1, min(2, len(ranks))))):
            weights[rng.randint(at, end - 1) if rng.random() < 0.3 else at:end, column] = rng.choice((1.0, -0.5, 2.0))
        at = end
    pool = RankPool(a.to(dtype).to(device), b.to(dtype).to(device), ends)
    x = torch.randn(rows, d_in + 16)[:, :d_in].to(dtype).to(device)
    y = torch.randn(rows, ends[-1]).to(dtype).to(device)
    tiles = cut_tiles(weights.numpy().astype(np.float32), [(tuple(pages), tuple(columns))], torch.device(device))
    return TileCase(x, y, pool, tiles, weights.double(), tuple(pages), tuple(columns), rng.randrange(LAYERS))
