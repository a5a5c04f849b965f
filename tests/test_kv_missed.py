"""The KV memory: every block that is not found has its reason."""
from __future__ import annotations

import pytest
from kv_bench import BASE, JSON, PIRATE, KvBench, acting, kinds, tokens, under

from lora_bench.engine.protocol import MissedRun
from lora_bench.engine.stretches import Stretch

REASONS = [
    (under(PIRATE), under(acting("pirate", 0.8)), "mix differs", "pirate x 0.7 then, x 0.8 now"),
    (under(PIRATE), under(acting("pirate", 0.7 + 1e-9)), "mix differs", "pirate x 0.7 then, x 0.7000000009999999 now"),
    (under(PIRATE, JSON), under(PIRATE), "mix differs", "json acted then, not now"),
    (BASE, under(PIRATE), "mix differs", "pirate acts now, not then"),
    (under(PIRATE, JSON), under(JSON, PIRATE), "mix differs", "the order was pirate, json then, json, pirate now"),
    (under(acting("pirate", 0.7, "12ab99")), under(acting("pirate", 0.7, "34cd99")), "content changed",
     "content of pirate changed (digest 12ab… then, 34cd… now)"),
    (BASE, under(JSON, start=20), "mix differs",
     "json acts now, not then; json begins to act inside this block, at token 20"),
    (under(PIRATE), (Stretch(0, (PIRATE,)), Stretch(32)), "mix differs", "pirate acted then, not now, from token 32 on"),
]


@pytest.mark.parametrize("then, now, kind, detail", REASONS)
def test_reasons_of_a_miss(then: tuple[Stretch, ...], now: tuple[Stretch, ...], kind: str, detail: str) -> None:
    bench = KvBench(16)
    bench.run(1, tokens(40), then)
    found = bench.begin(2, tokens(40), now)
    assert (found.missed[0].kind, found.missed[0].detail) == (kind, detail)


def test_the_closest_former_mix_tells_also_when_it_is_gone() -> None:
    bench = KvBench(16)
    bench.run(1, tokens(40), under(PIRATE))
    bench.run(2, tokens(40), under(acting("a"), acting("b"), acting("c"), acting("d")))
    bench.memory.clear("it was asked for")
    found = bench.begin(3, tokens(40), under(acting("pirate", 0.8)))
    assert found.missed[0].detail == "pirate x 0.7 then, x 0.8 now"
    found = bench.begin(4, tokens(40), under(acting("e")))
    assert found.missed[0].detail == "pirate acted then, not now, e acts now, not then"


def test_other_positions_are_told() -> None:
    bench = KvBench(16)
    bench.run(1, tokens(40))
    assert kinds(bench.begin(2, tokens(40), root=b"long")) == ["positions differ"]


def test_tokens_that_only_begin_alike_are_new() -> None:
    bench = KvBench(16)
    bench.run(1, tokens(40), under(PIRATE))
    assert kinds(bench.begin(2, tokens(8) + tokens(40, 1))) == ["new tokens"]


def test_every_missed_block_has_its_reason() -> None:
    """One prompt of which one block is there, the next was evicted, others were computed under another mix, and the rest is new."""
    bench = KvBench(12)
    ids = tokens(48) + tokens(32, 1)
    bench.run(1, tokens(48), under(PIRATE))
    bench.now += 5
    bench.run(2, ids, under(JSON))
    bench.now += 5
    bench.run(3, tokens(96, 2))
    bench.now += 10
    found = bench.begin(4, ids + tokens(40, 3), under(PIRATE))
    assert (found.hit_blocks, found.missed_blocks) == (1, 7)
    assert found.missed == (
        MissedRun(16, 2, "evicted", "evicted 10 s ago for request 3"),
        MissedRun(48, 2, "mix differs", "json acted then, not now, pirate acts now, not then"),
        MissedRun(80, 3, "new tokens"))


def test_a_block_is_told_whole_or_from_what_was_copied_of_it_and_the_last_token_is_not_looked_for() -> None:
    bench = KvBench(24)
    bench.run(1, tokens(120))
    found = bench.begin(2, tokens(97), under(PIRATE, start=40))
    first = "pirate acts now, not then; pirate begins to act inside this block, at token 40"
    assert (found.hit_tokens, found.missed_blocks) == (40, 4)
    assert found.missed == (
        MissedRun(40, 1, "mix differs", first), MissedRun(48, 3, "mix differs", "pirate acts now, not then, from token 40 on"))


def test_blocks_that_went_at_other_times_for_one_cause_are_one_run() -> None:
    bench = KvBench(8)
    bench.run(1, tokens(80))
    bench.begin(2, tokens(200, 1))
    for block in range(6):
        bench.memory.reserve(2, 16 * (block + 1))
        bench.now += 4
    bench.memory.end(2)
    bench.now += 100
    assert bench.begin(3, tokens(80)).missed == (MissedRun(32, 3, "evicted", "evicted 112 s ago to 104 s ago for request 2"),)


def test_what_is_there_behind_a_gap_is_said_and_taken_over_when_the_gap_is_closed() -> None:
    bench, ids = KvBench(9), tokens(60)
    for user in (1, 2):
        bench.begin(user, ids)
    bench.compute(1, ids, to=32)
    bench.compute(2, ids, to=32)  # the same once more: what user 1 has is found
    bench.compute(2, ids)
    bench.memory.end(1)
    bench.now += 5
    bench.begin(3, tokens(80, 1))
    assert bench.compute(3, tokens(80, 1))
    bench.memory.end(3)
    bench.memory.end(2)
    bench.now += 1
    found = bench.begin(4, ids)
    assert [(run.token, run.blocks, run.kind) for run in found.missed] == [(0, 2, "evicted"), (32, 2, "behind a gap")]
    assert bench.memory.stored(4) == 0 and bench.compute(4, ids, to=32)
    assert bench.memory.extend(4, ids, BASE) == 27 and bench.memory.stored(4) == 59


def test_of_many_reasons_the_first_are_told_and_all_blocks_counted() -> None:
    bench, ids = KvBench(32), tokens(320)
    bench.begin(1, ids)
    bench.compute(1, ids)
    for block in range(19, -1, -1):
        bench.memory.rewind(1, block * 16)
        bench.memory.clear(f"reason {block}")
    found = bench.begin(2, ids)
    assert found.missed_blocks == 20
    assert found.missed == tuple(MissedRun(block * 16, 1, "cleared", f"cleared just now: reason {block}") for block in range(8))


def test_an_explanation_ends_where_another_mix_begins() -> None:
    """What explains a block explains the next one, but for changes of the mix, then or now, on the way."""
    bench, ids = KvBench(64), tokens(112)
    bench.run(1, ids, (Stretch(0, (PIRATE,)), Stretch(36, (JSON,))))
    bench.memory.clear("it was asked for")
    found = bench.begin(2, ids, (Stretch(0, (PIRATE,)), Stretch(70, (JSON,))))
    gone, other = "cleared just now: it was asked for", "json acted then, not now, pirate acts now, not then"
    assert found.missed == (
        MissedRun(0, 3, "cleared", gone),
        MissedRun(48, 1, "mix differs", f"{other}, from token 36 on"),
        MissedRun(64, 1, "mix differs", f"{other}; json begins to act inside this block, at token 70"),
        MissedRun(80, 2, "mix differs", f"{other}, from token 36 on"))
