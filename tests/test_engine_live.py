"""The engine while replies are changed: another mix, an invocation that the model writes; and what is brought in for those that wait."""
from __future__ import annotations

from collections.abc import Callable

from engine_bench import ONE, TWO, Bench, random_ids

from lora_bench.engine.protocol import (
    AdapterUse,
    InvocationFired,
    MixSet,
    RequestFinished,
    RequestQueued,
    SlotLoaded,
    TokenIds,
)

Make = Callable[..., Bench]


# -- live changes -------------------------------------------------------------------------------------
def test_recompute_goes_on_as_if_the_text_had_been_written_under_the_new_mix(make: Make) -> None:
    bench, prompt = make(), random_ids(40)
    bench.submit(1, TokenIds(prompt), ONE)
    bench.run(6)
    bench.engine.set_mix(TWO, (1,), "recompute")
    (told,) = bench.of(MixSet)
    assert told.at_token == {1: 6} and told.recomputed == {1: 45}
    bench.run()
    ids = bench.ids(1)
    fresh = make()
    fresh.submit(1, TokenIds((*prompt, *ids[:6])), TWO, max_tokens=14)
    fresh.run()
    assert fresh.same((*prompt, *ids[:6]), TWO, ids[6:], fresh.ids(1))


def test_recompute_keeps_what_the_mixes_have_in_common_and_finds_what_was_there(make: Make) -> None:
    bench, prompt = make(), (*random_ids(40), 7, 8, 9)
    bench.engine.set_invocation("one", "cde")
    bench.submit(1, TokenIds(prompt))
    bench.run(3)
    bench.engine.set_mix(ONE, (1,), "recompute")
    bench.engine.set_mix((), (1,), "recompute")
    first, second = bench.of(MixSet)
    assert first.recomputed == {1: 5} and first.activations[1][0].start == 40
    assert second.recomputed == {}, "it had not been computed again yet, and what was before is still there"
    bench.run()
    assert len(bench.ids(1)) == 20


def test_a_recompute_before_the_one_before_is_through_counts_all_that_the_reply_had(make: Make) -> None:
    bench = make()
    bench.submit(1, TokenIds(random_ids(40)), ONE)
    bench.run(6)
    for mix in (TWO, (AdapterUse("two", 0.3),), (AdapterUse("two", 0.7),)):
        bench.engine.set_mix(mix, (1,), "recompute")
    assert [told.recomputed for told in bench.of(MixSet)] == [{1: 45}] * 3
    bench.run()
    assert len(bench.ids(1)) == 20


def test_finish_lets_the_reply_end_under_its_mix(make: Make) -> None:
    bench = make()
    alone = bench.reply(ONE)
    bench.submit(1, mix=ONE)
    bench.run(4)
    bench.engine.set_mix(TWO, (1,), "finish")
    bench.run()
    (told,) = bench.of(MixSet)
    assert told.at_token == {} and bench.ids(1) == alone and bench.engine.snapshot().mix == TWO


def test_what_a_splice_left_is_found_only_as_it_was_computed(make: Make) -> None:
    bench, prompt = make(), random_ids(20)
    bench.submit(1, TokenIds(prompt), ONE, max_tokens=30)
    bench.run(15)
    bench.engine.set_mix(TWO, (1,))
    bench.run()
    whole = TokenIds((*prompt, *bench.ids(1)))
    for number, (mix, hit) in enumerate(((ONE, 34), (TWO, 0)), 2):
        bench.submit(number, whole, mix, max_tokens=2)
        bench.run()
        assert bench.started(number)[-1].cache.hit_tokens == hit


# -- invocations in a reply ---------------------------------------------------------------------------
def _written(bench: Bench, end: int) -> tuple[tuple[int, ...], tuple[int, ...], int, str]:
    """A prompt of 30 tokens, the base's reply, and where before its token `end` a word of two tokens stands in it for the first time."""
    encode, decode = bench.engine.model.tokenizer.encode, bench.engine.model.tokenizer.decode
    for number in range(100, 120):
        prompt = random_ids(30, number)
        bench.submit(number, TokenIds(prompt))
        bench.run()
        base = bench.ids(number)
        text = (*prompt, *base)
        for at in range(3, end):
            pair = base[at : at + 2]
            word = decode(pair, special=True)
            if pair not in [text[j : j + 2] for j in range(30 + at)] and tuple(encode(word, special=True)) == pair:
                return prompt, base, at, word
    raise AssertionError("every reply repeats itself from its beginning")


def test_an_invocation_that_the_model_writes_is_acted_on_where_that_was_asked_for(make: Make) -> None:
    bench = make()
    prompt, base, at, word = _written(bench, 15)
    bench.engine.set_invocation("one", word)
    bench.submit(2, TokenIds(prompt), ONE)
    bench.run()
    assert bench.ids(2) == base and not bench.of(InvocationFired), "off unless it was asked for"
    bench.engine.set_invocation("one", word, in_reply=True)
    assert bench.engine.model.store.infos["one"].invocation_in_reply
    bench.submit(3, TokenIds(prompt), ONE)
    bench.run()
    (fired,) = bench.of(InvocationFired)
    assert fired.at_token == at + 2 and fired.activation.start == 30 + at and fired.activation.found
    ids = bench.ids(3)
    assert ids[: at + 2] == base[: at + 2] and ids != base
    fresh = make()
    fresh.engine.set_invocation("one", word)
    again = (*prompt, *ids[: at + 2])
    fresh.submit(3, TokenIds(again), ONE, max_tokens=18 - at)
    fresh.run()
    assert fresh.same(again, ONE, ids[at + 2 :], fresh.ids(3)), "as a prompt that ends with the invocation goes on"


def test_a_new_scale_after_an_invocation_fired_keeps_where_it_acts(make: Make) -> None:
    bench = make()
    prompt, _, _, word = _written(bench, 12)
    finished = bench.of(RequestFinished)
    bench.engine.set_invocation("one", word, in_reply=True)
    bench.submit(2, TokenIds(prompt), ONE)
    while not bench.of(InvocationFired):
        assert bench.of(RequestFinished) == finished
        bench.run(1)
    bench.run(2)
    bench.engine.set_mix((AdapterUse("one", 0.8),), (2,))
    (told,) = bench.of(MixSet)
    assert told.activations[2][0].start == bench.of(InvocationFired)[0].activation.start
    bench.run()
    assert len(bench.ids(2)) == 20 and len(bench.of(InvocationFired)) == 1


# -- waiting ------------------------------------------------------------------------------------------
def test_the_adapters_of_those_that_wait_for_memory_are_brought_in_beforehand(make: Make) -> None:
    bench = make(blocks=4)
    bench.submit(1, TokenIds(random_ids(60)), max_tokens=4)
    bench.run(1)
    bench.submit(2, TokenIds(random_ids(50, 1)), max_tokens=4)
    bench.submit(3, TokenIds(random_ids(5)), TWO, max_tokens=4)
    bench.run(1)
    (brought,) = bench.of(SlotLoaded)
    assert brought.adapter == "two" and brought.because == "request 3, which waits"
    assert [event.because for event in bench.of(RequestQueued)] == [
        "it needs up to 4 KV blocks, 0 of 4 are free", "its turn comes after request 2"]
    bench.run()
    assert len(bench.ids(2)) == len(bench.ids(3)) == 4
