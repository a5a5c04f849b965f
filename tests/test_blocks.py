"""KV blocks: nobody has another's, runs are found, what was kept the longest goes first, and everything comes back."""
from __future__ import annotations

import random

import pytest

from lora_bench.engine.blocks import BLOCK_TOKENS, BlockPool, BlockTable, blocks_for


def test_blocks_for_counts_whole_blocks() -> None:
    assert [blocks_for(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_random_holders_against_counts_and_an_order_of_use() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    pool, held, kept = BlockPool(48), dict[int, int](), list[int]()
    for _ in range(4000):
        what = rng.random()
        if what < 0.3:
            count, after = rng.randint(1, 6), rng.choice([-1, *held])
            unused = set(range(48)) - set(held) - set(kept)
            if count > len(unused):
                with pytest.raises(ValueError, match="are unused"):
                    pool.take(count, after)
                continue
            taken = pool.take(count, after)
            assert len(set(taken)) == count and set(taken) <= unused
            assert after + 1 not in unused or after < 0 or taken[0] == after + 1
            held |= dict.fromkeys(taken, 1)
        elif what < 0.35 and len(held) + len(kept) < 48:
            aside = pool.take_aside()
            assert aside not in held and aside not in kept
            held[aside] = 1
        elif what < 0.5 and (held or kept):
            block = rng.choice([*held, *kept])
            pool.hold(block)
            held[block] = held.get(block, 0) + 1
            if block in kept:
                kept.remove(block)
        elif what < 0.9 and held:
            block, keep = rng.choice(list(held)), rng.random() < 0.5
            pool.drop(block, keep)
            held[block] -= 1
            if not held[block]:
                del held[block]
                kept += [block] if keep else []
        elif kept:
            assert pool.oldest(3) == kept[:3]
            pool.forget(kept.pop(0))
        assert (pool.free, pool.kept, pool.unused) == (48 - len(held), len(kept), 48 - len(held) - len(kept))
        assert [pool.holders(block) for block in range(48)] == [held.get(block, 0) for block in range(48)]
    for block, count in held.items():
        for _ in range(count):
            pool.drop(block, keep=False)
    for block in kept:
        pool.forget(block)
    assert pool.take(48) == list(range(48)), "all came back, as one run"


def test_tables_that_grow_side_by_side_stay_in_one_run() -> None:
    pool = BlockPool(64)
    tables = [BlockTable(pool.take(1)) for _ in range(3)]
    for _ in range(14):
        for table in tables:
            table.append(pool.take(1, table.blocks[-1])[0])
    assert all(len(table.runs(15 * BLOCK_TOKENS)) == 1 for table in tables)


def test_table_says_where_its_tokens_lie() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        blocks = rng.sample(range(12), rng.randint(1, 10))
        table = BlockTable(blocks)
        at = rng.randrange(len(blocks))
        blocks[at] = 12
        table.replace(at, 12)
        count = rng.randint(0, len(blocks))
        rest = table.cut(count)
        assert table.blocks == blocks[:count] and rest == blocks[count:]
        for block in (20, 21):
            table.append(block)
        blocks = [*blocks[:count], 20, 21]
        tokens = rng.randint(1, len(blocks) * BLOCK_TOKENS)
        runs = table.runs(tokens)
        assert [block for first, count in runs for block in range(first, first + count)] == blocks[: blocks_for(tokens)]
        assert all(a + n != b for (a, n), (b, _) in zip(runs, runs[1:], strict=False)), "runs as long as they can be"
        assert [table.cell(p) for p in range(tokens)] == [
            blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(tokens)]


def test_what_is_not_held_cannot_be_dropped_and_what_is_unused_not_held() -> None:
    pool = BlockPool(4)
    block = pool.take(1)[0]
    pool.drop(block, keep=False)
    with pytest.raises(ValueError, match=f"block {block} is not held"):
        pool.drop(block, keep=False)
    with pytest.raises(ValueError, match=f"block {block} is unused"):
        pool.hold(block)
