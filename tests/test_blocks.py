"""KV blocks: reservations never overlap, runs are found, and everything comes back."""
from __future__ import annotations

import random

import pytest

from lora_bench.engine.blocks import BLOCK_TOKENS, BlockPool, blocks_for


def test_blocks_for_counts_whole_blocks() -> None:
    assert [blocks_for(n) for n in (1, 16, 17, 32, 33)] == [1, 1, 2, 2, 3]


def test_random_reservations_against_a_set_of_free_blocks() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    pool, free, held = BlockPool(64), set(range(64)), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            table = held.pop(rng.randrange(len(held)))
            pool.release(table)
            free |= set(table.blocks)
            continue
        count = rng.randint(1, 20)
        run_exists = any(set(range(b, b + count)) <= free for b in range(64))
        table = pool.reserve(count)
        assert (table is None) == (count > len(free))
        if table is not None:
            assert set(table.blocks) <= free and len(set(table.blocks)) == count
            assert (table.first >= 0) == run_exists
            free -= set(table.blocks)
            held.append(table)
        assert pool.free == len(free)
    for table in held:
        pool.release(table)
    assert pool.reserve(64).first == 0


def test_cells_follow_the_table() -> None:
    pool = BlockPool(6)
    tables = [pool.reserve(1) for _ in range(6)]
    for at in (1, 3, 4):
        pool.release(tables[at])
    scattered = pool.reserve(3)
    assert scattered.first == -1 and scattered.blocks == (1, 3, 4)
    cells = [scattered.cell(p) for p in range(3 * BLOCK_TOKENS)]
    assert cells == [b * BLOCK_TOKENS + o for b in (1, 3, 4) for o in range(BLOCK_TOKENS)]


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(4)
    table = pool.reserve(2)
    pool.release(table)
    with pytest.raises(ValueError, match="free already"):
        pool.release(table)
