"""The tiled low-rank ops in plain torch, and how rows are cut into tiles."""
from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from lora_tile_cases import MIXED, tile_case

from lora_bench.kernels.lora_tiles import TILE_ROWS, cut_tiles


@pytest.mark.parametrize("rows, ends, ranks", [
    (1, (30,), (4,)), (150, (20, 28, 41), MIXED), (64, (33, 66), (16, 40)), (200, (7,), (9,) * 5),
])
def test_against_float64(rows: int, ends: tuple[int, ...], ranks: tuple[int, ...], seed: int) -> None:
    case = tile_case(random.Random(seed), rows, 24, ends, ranks, torch.float32)
    case.check(case.run(), 1e-5)


def test_a_tile_has_the_pages_that_act_on_one_of_its_rows_in_their_order() -> None:
    weights = np.zeros((3 * TILE_ROWS + 1, 3), np.float32)
    weights[:10, 0], weights[9:TILE_ROWS + 1, 2], weights[-1, 1] = 1, 0.5, -1
    tiles = cut_tiles(weights, [((7, 5, 9, 2), (0, 2, 2, 1)), ((3,), (1,)), ((), ())], torch.device("cpu"))
    first, second, none = tiles.lists
    assert first.counts.tolist() == [3, 2, 0, 1] and first.pages.shape == (4, 3)
    assert [first.pages[tile, :count].tolist() for tile, count in enumerate(first.counts)] == [[7, 5, 9], [5, 9], [], [2]]
    assert [first.columns[tile, :count].tolist() for tile, count in enumerate(first.counts)] == [[0, 2, 2], [2, 2], [], [1]]
    assert second.counts.tolist() == [0, 0, 0, 1] and none.counts.tolist() == [0] * 4
    assert tiles.touched.nonzero().flatten().tolist() == [*range(TILE_ROWS + 1), 3 * TILE_ROWS]
    assert torch.equal(tiles.weights, torch.from_numpy(weights))
