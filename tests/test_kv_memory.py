"""The KV memory: what is found is right, and nothing is lost."""
from __future__ import annotations

import pytest
from kv_bench import BASE, JSON, PIRATE, KvBench, acting, kinds, tokens, under

from lora_bench.engine.blocks import BLOCK_TOKENS, blocks_for
from lora_bench.engine.protocol import CacheCleared, KvEvicted, MissedRun
from lora_bench.engine.stretches import Stretch


def test_a_second_request_finds_whole_blocks_and_the_beginning_of_the_last() -> None:
    bench = KvBench(16)
    first = bench.run(1, tokens(40))
    again = bench.run(2, tokens(40) + tokens(20, 1))
    assert (first.hit_tokens, kinds(first)) == (0, ["new tokens"])
    assert (again.hit_blocks, again.copied_tokens, kinds(again), again.base_tokens) == (2, 8, ["new tokens"], 40)
    same = bench.begin(3, tokens(40))
    assert (same.hit_blocks, same.copied_tokens, kinds(same)) == (2, 7, []), "the last token is always computed"


def test_running_requests_share_blocks_and_outlive_each_other() -> None:
    bench = KvBench(8)
    bench.begin(1, tokens(33))
    bench.compute(1, tokens(33))
    assert bench.begin(2, tokens(33)).hit_blocks == 2
    assert bench.memory.free == 5
    bench.memory.end(1)
    assert bench.memory.free == 6
    bench.check(2, tokens(33), BASE)
    bench.memory.end(2)
    assert bench.memory.free == 8


def test_history_is_exact() -> None:
    """Same tokens, other adapters on them: any of it, in any order, shares exactly what is the same."""
    ids = tokens(64)
    mixes = [
        BASE, under(PIRATE), under(acting("pirate", 0.8)), under(acting("pirate", 0.7, "other")), under(PIRATE, JSON), under(JSON, PIRATE),
        under(JSON, start=20), under(JSON, start=32), (Stretch(0, (PIRATE,)), Stretch(40))]
    shared = {(i, j): KvBench(16) for i in range(len(mixes)) for j in range(len(mixes))}
    for (i, j), bench in shared.items():
        bench.run(1, ids, mixes[i])
        found = bench.begin(2, ids, mixes[j]).hit_tokens
        truths = [bench.truths(2, ids, mix)[:63] for mix in (mixes[i], mixes[j])]
        assert found == sum(a == b for a, b in zip(*truths, strict=True))


def test_stretches_that_change_nothing_do_not_keep_from_sharing() -> None:
    bench = KvBench(8)
    bench.run(1, tokens(48), (Stretch(0), Stretch(10), Stretch(20, (JSON,)), Stretch(20)))
    assert bench.begin(2, tokens(48), ()).hit_tokens == 47


def test_two_names_of_one_content_share() -> None:
    bench = KvBench(8)
    bench.run(1, tokens(48), under(acting("a", 1.0, "same")))
    assert bench.begin(2, tokens(48), under(acting("b", 1.0, "same"))).hit_tokens == 47


def test_equal_blocks_computed_twice_are_found_once_and_both_end() -> None:
    bench = KvBench(8)
    for user in (1, 2):
        bench.begin(user, tokens(40))
    for user in (1, 2):
        bench.compute(user, tokens(40))
    assert bench.memory.view([]).held == 6
    bench.memory.end(1)
    bench.memory.end(2)
    view = bench.memory.view([])
    assert (view.held, view.cached, bench.memory.free) == (0, 3, 8)


@pytest.mark.parametrize("back", [0, 5, 16, 20, 32, 40])
def test_rewind_to_any_place_leaves_what_others_see(back: int) -> None:
    bench = KvBench(12)
    bench.begin(1, tokens(48))
    bench.compute(1, tokens(48))
    bench.begin(2, tokens(48) + [1])
    bench.compute(2, tokens(48) + [1])
    bench.memory.rewind(1, back)
    assert bench.memory.stored(1) == back
    other = tokens(back) + tokens(30, 1)
    bench.compute(1, other)
    bench.check(2, tokens(48) + [1], BASE)
    bench.memory.end(2)
    assert bench.begin(3, tokens(48)).hit_tokens == 47


def test_rewind_without_a_free_block_writes_over_what_is_its_own_and_leaves_what_is_not() -> None:
    bench = KvBench(2)
    bench.begin(1, tokens(32))
    bench.compute(1, tokens(32))
    bench.memory.rewind(1, 24)
    assert bench.memory.stored(1) == 24 and not bench.copies
    bench.compute(1, tokens(24) + tokens(8, 1))
    bench.memory.end(1)
    found = bench.begin(2, tokens(32))
    assert (found.hit_tokens, kinds(found)) == (16, ["no room"])
    bench = KvBench(3)
    bench.begin(1, tokens(32))
    bench.compute(1, tokens(32))
    bench.begin(2, tokens(32) + [1])
    bench.compute(2, tokens(32) + [1])
    bench.memory.rewind(1, 24)
    assert bench.memory.stored(1) == 16
    bench.check(2, tokens(32) + [1], BASE)


def test_extend_finds_what_others_computed_meanwhile() -> None:
    bench = KvBench(12)
    for user in (1, 2):
        bench.begin(user, tokens(40))
        bench.memory.reserve(user, 40)
    assert bench.memory.next_key(1, tokens(40), BASE) == bench.memory.next_key(2, tokens(40), BASE) is not None
    bench.compute(1, tokens(40), to=20)
    assert bench.memory.extend(2, tokens(40), BASE) == 16
    bench.compute(2, tokens(40), to=18)
    bench.compute(1, tokens(40))
    assert bench.memory.extend(2, tokens(40), BASE) == 14
    assert bench.memory.next_key(2, tokens(40), BASE) is None
    bench.check(2, tokens(40), BASE)
    assert bench.memory.view([]).held == 3 + 1, "its own blocks went back"


def test_next_keys_differ_with_what_acts() -> None:
    bench = KvBench(4)
    keys = []
    for user, stretches in enumerate((BASE, under(PIRATE), under(JSON, start=15), under(JSON, start=16))):
        bench.begin(user, tokens(20), stretches)
        keys.append(bench.memory.next_key(user, tokens(20), stretches))
    assert keys[0] == keys[3] and len(set(keys)) == 3


def test_eviction_takes_the_longest_unused_and_says_so() -> None:
    bench = KvBench(8)
    bench.run(1, tokens(48))
    bench.now += 5
    bench.run(2, tokens(48, 1))
    bench.now += 7
    bench.begin(3, tokens(60, 2))
    bench.compute(3, tokens(60, 2))
    assert bench.events == [KvEvicted(2, 3, 12.0)]
    bench.memory.end(3)
    bench.now += 9
    found = bench.begin(4, tokens(48))
    assert (found.hit_blocks, found.missed) == (1, (MissedRun(16, 2, "evicted", "evicted 9 s ago for request 3"),))
    assert not bench.memory.reserve(4, 16 * 9) and len(bench.events) == 1, "a memory too small changes nothing"


def test_a_large_memory_evicts_ahead_so_that_what_grows_has_consecutive_blocks() -> None:
    bench = KvBench(256)
    for user in range(2):
        ids = tokens(128 * BLOCK_TOKENS, user)
        bench.memory.begin(user, ids, BASE)
        assert bench.memory.reserve(user, len(ids))
        bench.memory.commit(user, ids, BASE, len(ids))
        bench.memory.end(user)
    assert not bench.events
    bench.begin(2, tokens(12 * BLOCK_TOKENS, 2))
    for blocks in range(12):
        assert bench.memory.reserve(2, blocks * BLOCK_TOKENS + 1)
    assert [event.blocks for event in bench.events] == [4, 4, 4]
    assert [count for _, count in bench.memory.table_of(2).runs(12 * BLOCK_TOKENS)] == [4, 4, 4]


def test_a_chat_of_many_turns_lies_in_one_run_and_leaves_no_former_ends() -> None:
    bench, ids = KvBench(64), tokens(5)
    for turn in range(12):
        bench.run(turn, ids)
        ids = ids + tokens(13, turn)
    bench.begin(12, ids)
    bench.compute(12, ids)
    assert len(bench.memory.table_of(12).runs(len(ids))) == 1
    view = bench.memory.view([])
    assert (view.held, view.cached) == (blocks_for(len(ids)), 0)


def test_what_explains_misses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_bench.engine.kv_index.FORGOTTEN", 2)
    bench = KvBench(8)
    for user in range(3):
        bench.run(user, tokens(10, user))
    bench.memory.clear("it was asked for")
    found = [kinds(bench.run(user + 10, tokens(10, user))) for user in range(3)]
    assert found == [["new tokens"], ["cleared"], ["cleared"]]


def test_a_full_memory_says_that_there_was_no_room_for_a_copy() -> None:
    bench = KvBench(2)
    bench.begin(1, tokens(32))
    bench.compute(1, tokens(32))
    found = bench.begin(2, tokens(10))
    assert (found.hit_tokens, kinds(found)) == (0, ["no room"])


def test_clear_forgets_what_nobody_holds_and_says_why() -> None:
    bench = KvBench(16)
    bench.run(1, tokens(32), under(PIRATE))
    bench.run(2, tokens(32))
    bench.begin(3, tokens(32), under(JSON))
    bench.compute(3, tokens(32), under(JSON))
    assert bench.memory.clear("adapter pirate was unloaded", {PIRATE.digest}) == 2
    bench.now += 3
    found = bench.begin(4, tokens(32), under(PIRATE))
    assert found.missed == (MissedRun(0, 2, "cleared", "cleared 3 s ago: adapter pirate was unloaded"),)
    assert bench.begin(5, tokens(32)).hit_tokens == 31
    bench.memory.end(5)
    assert bench.memory.clear("it was asked for") == 2
    assert bench.begin(6, tokens(32), under(JSON)).hit_tokens == 31
    assert [event for event in bench.events if isinstance(event, CacheCleared)] == [
        CacheCleared(2, "adapter pirate was unloaded"), CacheCleared(2, "it was asked for")]


def test_what_other_rules_would_have_had() -> None:
    bench = KvBench(64)
    ids = tokens(48)
    bench.run(1, ids, under(PIRATE))
    assert bench.begin(2, ids, under(PIRATE)).llama_cpp_tokens == 47
    bench.compute(2, ids, under(PIRATE))
    rescaled = bench.run(3, ids, under(acting("pirate", 0.8)))
    assert (rescaled.llama_cpp_tokens, rescaled.name_keyed_wrong) == (0, 32)
    reloaded = bench.run(4, ids, under(acting("pirate", 0.8, "new")))
    assert reloaded.name_keyed_wrong == 32
    back = bench.run(5, ids, under(PIRATE))
    assert (back.llama_cpp_tokens, back.hit_tokens, back.name_keyed_wrong) == (0, 47, 0)
    bench.run(6, ids)
    for user in (7, 8):
        late = bench.begin(user, ids, under(JSON, start=40))
        assert (late.llama_cpp_tokens, late.hit_tokens) == (39, 40)
        bench.memory.end(user)
    assert bench.run(9, ids, under(JSON, start=40)).llama_cpp_tokens == 39
    bench.run(-1, ids)
    counters = bench.memory.view([]).counters
    assert counters.llama_cpp_tokens == 47 + 39 and counters.name_keyed_wrong == 64
    assert counters.llama_cpp_cleared == 4 * 2, "of requests 2 to 5"
    assert (counters.looked_up_tokens, counters.hit_tokens) == (7 * 47, 2 * 47 + 40)


def test_what_one_slot_would_have_cleared_counts_but_for_what_is_lost_here() -> None:
    bench, ids = KvBench(64), tokens(70)
    assert bench.run(1, ids, under(PIRATE)).llama_cpp_cleared == 0, "nothing was in the slot"
    assert bench.run(2, ids, under(PIRATE)).llama_cpp_cleared == 0, "the same mix"
    assert bench.run(3, tokens(70, 1)).llama_cpp_cleared == 4
    assert bench.run(4, ids, under(JSON, start=40)).llama_cpp_cleared == 0, "an aLoRA behind the base"
    assert bench.run(5, ids).llama_cpp_cleared == 4, "the base behind an aLoRA"
    bench.memory.clear("adapter pirate was unloaded", {PIRATE.digest})
    bench.run(6, ids, under(PIRATE))
    bench.memory.clear("it was asked for", {PIRATE.digest})
    assert bench.begin(7, ids).llama_cpp_cleared == 0, "here they were cleared too"
    assert bench.begin(8, ids, under(JSON)).llama_cpp_cleared == 4, "what is about to be computed"
    bench.memory.end(8)
    bench.memory.end(7)
    assert bench.memory.view([]).counters.llama_cpp_cleared == 4 + 4 + 4, "what computed nothing does not count"


def test_the_view_shows_every_block_once() -> None:
    bench = KvBench(16)
    bench.run(1, tokens(20), under(PIRATE))
    bench.begin(2, tokens(33))
    bench.compute(2, tokens(33))
    bench.begin(3, tokens(33))
    bench.compute(3, tokens(33))
    view = bench.memory.view([(2, ()), (3, ())], nbytes=7)
    assert [owner.shared for owner in view.owners] == [2, 2] and view.bytes == 7
    assert sum(run.count for run in view.runs) == 16
    assert all(a.first + a.count == b.first for a, b in zip(view.runs, view.runs[1:], strict=False))
    shown = {(view.mixes[run.mix] if run.mix >= 0 else None, run.requests): run.count for run in view.runs}
    assert shown[(), (2, 3)] == 2 and sum(run.count for run in view.runs if run.mix < 0) == 10
    assert [use.name for mix in view.mixes for use in mix] == ["pirate"]
    assert (view.held, view.cached) == (4, 2)


def test_ended_without_keeping_leaves_only_what_was_there() -> None:
    bench = KvBench(16)
    bench.run(1, tokens(32))
    bench.begin(2, tokens(32) + tokens(40, 1))
    bench.compute(2, tokens(32) + tokens(40, 1))
    bench.memory.end(2, keep=False)
    assert bench.memory.view([]).cached == 2
    assert bench.begin(3, tokens(32) + tokens(40, 1)).hit_tokens == 32


def test_misuse_is_refused() -> None:
    bench = KvBench(4)
    bench.begin(1, tokens(20), under(PIRATE))
    with pytest.raises(ValueError, match="request 1 has its KV blocks already"):
        bench.memory.begin(1, tokens(20), BASE)
    with pytest.raises(ValueError, match="0 tokens in 0 KV blocks; 20 were committed"):
        bench.memory.commit(1, tokens(20), under(PIRATE), 20)
    bench.compute(1, tokens(20), under(PIRATE))
    with pytest.raises(ValueError, match="other adapters act on the 20 stored tokens of a request"):
        bench.memory.commit(1, tokens(20), BASE, 20)
    with pytest.raises(ValueError, match="cannot go back to 21"):
        bench.memory.rewind(1, 21)
