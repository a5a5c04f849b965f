"""Replies whose mix was changed, and whose beginning must be computed again under what acted on it then."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from engine_bench import NAMES, ONE, THREE, TWO, Bench, random_ids
from torch import Tensor

from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.look import look
from lora_bench.engine.mix_history import MixHistory
from lora_bench.engine.protocol import (
    AdapterUnloaded,
    AdapterUse,
    MixSet,
    RequestFailed,
    RequestPreempted,
    RequestStarted,
    Sampling,
    TokenIds,
)

Write = Callable[..., Path]
TRAINED = 64
"""tokens up to which the base turns by the short factors"""
LONG_ROPE = {"original_max_position_embeddings": TRAINED, "rope_scaling": {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 4.0, 9.0], "factor": 4.0}}


@pytest.fixture
def folders(adapter_folder: Write) -> dict[str, Path]:
    return {name: adapter_folder(name, ("q_proj", "v_proj", "down_proj")) for name in NAMES}


@pytest.fixture
def bench(tiny_folder: Write, talking_head: Tensor, folders: dict[str, Path]) -> Bench:
    """Two slots for three adapters."""
    made = Bench(tiny_folder(config=LONG_ROPE, tensors={"lm_head.weight": talking_head}), slots=2)
    for name, folder in folders.items():
        made.engine.load_adapter(str(folder), name)
    return made


def _change(bench: Bench, prompt: Sequence[int]) -> object:
    """Request 1 goes on under TWO from its fifth token on; what acted before loses its slot. Returns the request."""
    bench.submit(1, TokenIds(tuple(prompt)), ONE, max_tokens=60)
    bench.run(5)
    bench.engine.set_mix(TWO, (1,))
    bench.engine.set_mix(THREE)
    assert {slot.adapter for slot in bench.engine.snapshot().slots} == {"two", "three"}
    return bench.engine.model.scheduler.running[0]


def _best(bench: Bench, ids: Sequence[int], history: MixHistory) -> Tensor:
    """The tokens [tokens] that the logits at each of `ids` prefer, computed anew under `history`."""
    engine = bench.engine
    engine.clear_cache()
    request = engine.make_request(-1, list(ids), (), Sampling(max_tokens=1))
    request.history, found = history, []
    with look(engine.model, [request], "a test") as scheduler:
        while works := scheduler.plan():
            found.append(engine.model.runner.logits(works, every=True))
    return torch.cat(found).argmax(-1)


def test_what_grows_beyond_longrope_s_trained_length_is_computed_again_under_its_former_mix(bench: Bench, seed: int) -> None:
    prompt = random_ids(30, seed)
    request = _change(bench, prompt)
    bench.run()
    reply, (preempted,) = bench.ids(1), bench.of(RequestPreempted)
    assert len(reply) == 60 and preempted.tokens == 0 and "must have slots first" in preempted.because
    ids = [*prompt, *reply]
    short = _best(bench, ids[:TRAINED], request.history)[len(prompt) - 1 :].tolist()
    long = _best(bench, ids[:-1], request.history)[TRAINED:].tolist()
    assert [*short, *long] == list(reply)


def test_a_former_mix_that_means_other_content_by_then_is_not_taken_for_what_it_was(
        bench: Bench, folders: dict[str, Path], adapter_folder: Write, seed: int) -> None:
    request = _change(bench, random_ids(30, seed))
    former = request.history
    adapter_folder("one", ("q_proj", "v_proj", "down_proj"))
    bench.engine.reload_adapter("one")
    bench.run()
    told = bench.of(RequestStarted)[1].cache.remark
    assert "all of it under the mix that holds now: one of its former mix is not loaded any more" in told
    assert [part.mix for part in request.history.parts] == [former.mix] and len(bench.ids(1)) == 60


def test_a_reply_that_lost_its_beginning_takes_the_slots_of_its_former_mix_again(bench: Bench, seed: int) -> None:
    prompt = random_ids(20, seed)
    request = _change(bench, prompt)
    bench.engine.clear_cache()
    request.rewind(3)
    bench.engine.set_mix(TWO, (1,), "splice")
    bench.run(4)
    assert len(bench.of(RequestPreempted)) == 1 and {slot.adapter for slot in bench.engine.snapshot().slots} == {"one", "two"}
    bench.run(20)
    ids = list(request.ids)
    assert _best(bench, ids[:-1], request.history)[len(prompt) - 1 :].tolist() == ids[len(prompt) :]


def test_an_adapter_that_is_off_may_go_while_others_of_the_mix_are_reloaded(bench: Bench, adapter_folder: Write, seed: int) -> None:
    bench.submit(1, TokenIds(tuple(random_ids(30, seed))), ONE, max_tokens=3)
    bench.submit(2, TokenIds(tuple(random_ids(30, seed))), (AdapterUse("three", 0.0), *TWO), max_tokens=3)
    bench.engine.unload_adapter("three")
    adapter_folder("two", ("q_proj",))
    bench.engine.reload_adapter("two")
    bench.run()
    assert not bench.of(RequestFailed) and len(bench.ids(2)) == 3


def test_numbers_of_looks_are_no_numbers_of_requests(bench: Bench) -> None:
    with pytest.raises(ValueError, match="request -1 has a number below 0"):
        bench.submit(-1, TokenIds((7, 8)))


def test_a_refused_change_leaves_every_request_what_it_has_though_that_is_being_unloaded(bench: Bench, seed: int) -> None:
    both = (*ONE, *TWO)
    alone = bench.reply(both, prompt=TokenIds(tuple(random_ids(30, seed))), max_tokens=12)
    bench.submit(1, TokenIds(tuple(random_ids(30, seed))), both, max_tokens=12)
    bench.submit(2, TokenIds(tuple(random_ids(30, seed))), max_tokens=12)
    bench.run(4)
    for name in ("one", "two"):
        bench.engine.unload_adapter(name)
    with pytest.raises(AdapterError, match="adapter 'one' is being unloaded"):
        bench.engine.set_mix(ONE, (1, 2))
    assert not bench.of(AdapterUnloaded)
    bench.run()
    assert bench.ids(1) == alone and len(bench.ids(2)) == 12 and len(bench.of(AdapterUnloaded)) == 2


def test_a_change_of_several_replies_needs_no_slot_for_what_they_all_leave(bench: Bench, seed: int) -> None:
    for number in (1, 2):
        bench.submit(number, TokenIds(tuple(random_ids(20, seed + number))), (*ONE, *TWO), max_tokens=12)
    bench.run(4)
    bench.engine.set_mix(THREE, (1, 2))
    (told,) = bench.of(MixSet)
    assert told.at_token.keys() == {1, 2} and "three" in {slot.adapter for slot in bench.engine.snapshot().slots}
    bench.run()
    assert len(bench.ids(1)) == len(bench.ids(2)) == 12
