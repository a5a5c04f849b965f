"""The engine on tiny bases: stops, limits, live mixes, slots, unloading, cancelling, failures that stay alone."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_bench import PROMPT, Bench

from lora_bench.engine.models.facts import ModelFacts
from lora_bench.engine.models.names import config_name
from lora_bench.engine.protocol import (
    AdapterUnloaded,
    AdapterUnloading,
    AdapterUse,
    LoadModel,
    MixSet,
    RawText,
    RequestFailed,
    RequestQueued,
    RequestStarted,
    SlotEvicted,
    StepFinished,
    TokenIds,
)
from lora_bench.engine.stop_text import StopText

Write = Callable[..., Path]


@pytest.fixture
def bench(base: Path, adapter_folder: Write) -> Bench:
    """Three adapters, two slots."""
    bench = Bench(base, slots=2)
    for number, name in enumerate(("one", "two", "three")):
        bench.engine.load_adapter(str(adapter_folder(name, ("q_proj", "down_proj"), r=2 + number)), name)
    bench.events.clear()
    return bench


@pytest.fixture
def scripted(tiny_gguf: Write, tiny_facts: ModelFacts) -> Callable[..., Bench]:
    """`scripted("abc.", **load)`: a base that says b after a, c after b, and so on, and then ends."""
    tokens = {letter: 5 + number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKL.,:!")}

    def build(chain: str, **load: object) -> Bench:
        embedding = torch.nn.functional.normalize(torch.randn(tiny_facts.vocab, tiny_facts.hidden), dim=-1)
        head = torch.zeros_like(embedding)
        for now, after in zip([tokens[letter] for letter in chain], [*(tokens[letter] for letter in chain[1:]), 2], strict=True):
            head[after] += embedding[now]
        weights = {"token_embd.weight": embedding.numpy(), "output.weight": head.numpy(),
                   "output_norm.weight": torch.ones(tiny_facts.hidden).numpy()}
        for layer in range(tiny_facts.layers):
            weights[f"blk.{layer}.attn_output.weight"] = torch.zeros(tiny_facts.hidden, tiny_facts.heads * tiny_facts.head_dim).numpy()
            weights[f"blk.{layer}.ffn_down.weight"] = torch.zeros(tiny_facts.hidden, tiny_facts.intermediate).numpy()
        return Bench(tiny_gguf(tensors=weights), **load)
    return build


def test_a_reply_ends_at_the_end_token_and_its_text_joins(scripted: Callable[..., Bench]) -> None:
    bench = scripted("hgfab.")
    bench.submit(1, RawText("h"))
    bench.run()
    done = bench.finished(1)
    assert bench.text(1) == "gfab." and done.reason == "stop" and done.ids[-1] == 2 and len(done.ids) == 6
    assert done.stats.new_tokens == 6 and done.stats.prompt_tokens == 1 and done.stats.ttft_ms > 0


def test_max_tokens_and_context_end_a_reply_with_their_own_reasons(bench: Bench) -> None:
    assert len(bench.reply(max_tokens=7)) == 7
    bench.submit(1, max_tokens=7)
    bench.submit(2, TokenIds((5,) * 250), max_tokens=100)
    bench.run()
    assert bench.finished(1).reason == "length"
    assert bench.finished(2).reason == "context" and len(bench.finished(2).ids) == 6
    with pytest.raises(ValueError, match="256 tokens long, too long for the context of 256"):
        bench.submit(3, TokenIds((5,) * 256))


@pytest.mark.parametrize("stop,expected,reason", [("cd", "b", "stop"), ("bcd", "", "stop"), ("dX", "bcd", "stop"), ("d", "bc", "stop")])
def test_no_part_of_a_stop_string_is_shown_and_an_unfinished_one_is(
    scripted: Callable[..., Bench], stop: str, expected: str, reason: str,
) -> None:
    bench = scripted("abcd")
    bench.submit(1, RawText("a"), stop=(stop,))
    bench.run()
    assert bench.text(1) == expected and bench.finished(1).reason == reason


def test_stop_text_in_pieces() -> None:
    stops = StopText(("beta gamma", "tax"))
    assert [stops.push(piece) for piece in ("alpha be", "ta g", "one be", "ta ga", "mma!")] == [
        ("alpha ", False), ("", False), ("beta gone ", False), ("", False), ("", True)]
    held = StopText(("abab",))
    assert held.push("aba") == ("", False) and held.push("x") == ("abax", False)
    assert held.push("ab") == ("", False) and held.finish() == "ab"
    assert StopText(()).push("anything") == ("anything", False)
    assert StopText(("bc", "abcd")).push("abcd") == ("", True)


def test_a_draw_is_the_same_alone_and_among_others(bench: Bench) -> None:
    hot = {"temperature": 1.3, "seed": 11, "repetition_penalty": 1.2, "top_p": 0.95}
    alone = bench.reply((AdapterUse("one", 0.5),), **hot)
    for number in range(3):
        bench.submit(number, TokenIds((6 + number,) * (number + 3)), temperature=0.8, seed=number)
    bench.submit(9, mix=(AdapterUse("one", 0.5),), **hot)
    bench.run()
    assert bench.finished(9).ids == alone
    assert bench.reply((AdapterUse("one", 0.5),), **hot | {"seed": 12}) != alone


def test_a_live_mix_acts_from_the_next_token_on(bench: Bench) -> None:
    base, other = bench.reply(), bench.reply((AdapterUse("one", 1.0),))
    assert base != other
    bench.submit(1)
    bench.run(5)
    bench.engine.set_mix((AdapterUse("one", 1.0),), (1,))
    bench.engine.set_mix((AdapterUse("one", 1.0),), (1,))
    bench.run()
    assert [event.at_token for event in bench.of(MixSet)] == [{1: 5}]
    ids = bench.finished(1).ids
    assert ids[:5] == base[:5] and ids != base
    bench.submit(2)
    bench.run(5)
    bench.engine.set_mix((), (2,))
    bench.run()
    assert bench.finished(2).ids == base


def test_a_mix_that_cannot_be_is_refused_and_the_old_one_holds(bench: Bench) -> None:
    bench.submit(1, mix=(AdapterUse("one"),))
    bench.submit(2, mix=(AdapterUse("two"),))
    bench.run(3)
    with pytest.raises(ValueError, match="no adapter 'onne' is loaded; did you mean 'one'"):
        bench.engine.set_mix((AdapterUse("onne"),), (1,))
    with pytest.raises(ValueError, match="3 slots, there are 2"):
        bench.engine.set_mix((AdapterUse("one"), AdapterUse("two"), AdapterUse("three")), (1,))
    with pytest.raises(ValueError, match="held by request 2"):
        bench.engine.set_mix((AdapterUse("one"), AdapterUse("three")), (1,))
    assert [owner.mix for owner in bench.engine.snapshot().kv.owners] == [(AdapterUse("one"),), (AdapterUse("two"),)]
    bench.run()
    assert not bench.of(MixSet)


def test_a_request_waits_for_slots_with_the_numbers_and_then_runs(bench: Bench) -> None:
    alone = bench.reply((AdapterUse("three"),))
    bench.submit(1, mix=(AdapterUse("one"), AdapterUse("two")))
    bench.submit(2, mix=(AdapterUse("three"),))
    bench.run()
    (queued,) = bench.of(RequestQueued)
    assert queued.request_id == 2 and "2" in queued.because
    assert bench.finished(2).ids == alone
    assert [event.adapter for event in bench.of(SlotEvicted)][-1] in ("one", "two")
    bench.submit(3, mix=(AdapterUse("one"), AdapterUse("two"), AdapterUse("three")))
    bench.run()
    (failed,) = bench.of(RequestFailed)
    assert failed.request_id == 3 and "3 slots, there are 2" in failed.message


def test_an_adapter_in_use_is_unloaded_after_its_request(bench: Bench) -> None:
    bench.submit(1, mix=(AdapterUse("one"),))
    bench.run(3)
    bench.engine.unload_adapter("one")
    assert bench.of(AdapterUnloading)[0].waiting_for == (1,) and not bench.of(AdapterUnloaded)
    bench.run()
    (gone,) = bench.of(AdapterUnloaded)
    assert gone.name == "one" and gone.freed_bytes > 0 and bench.finished(1).reason == "length"
    with pytest.raises(ValueError, match="no adapter 'one'"):
        bench.submit(2, mix=(AdapterUse("one"),))


def test_an_adapter_that_a_queued_request_needs_is_unloaded_after_it(bench: Bench) -> None:
    alone = bench.reply((AdapterUse("three"),))
    bench.submit(1, mix=(AdapterUse("one"), AdapterUse("two")))
    bench.submit(2, mix=(AdapterUse("three"),))
    bench.submit(3, mix=(AdapterUse("three"),))
    bench.run(3)
    bench.engine.unload_adapter("three")
    assert bench.of(AdapterUnloading)[0].waiting_for == (2, 3)
    with pytest.raises(ValueError, match="'three' is being unloaded"):
        bench.submit(4, mix=(AdapterUse("three"),))
    with pytest.raises(ValueError, match="already being unloaded; it waits for requests 2, 3"):
        bench.engine.unload_adapter("three")
    bench.engine.abort(3)
    bench.run()
    assert bench.finished(2).ids == alone and [event.name for event in bench.of(AdapterUnloaded)] == ["three"]
    bench.submit(5, mix=(AdapterUse("one"), AdapterUse("two")))
    bench.submit(6, mix=(AdapterUse("two"),))
    bench.engine.unload_adapter("two")
    bench.engine.set_mix((), (5, 6))
    assert [event.name for event in bench.of(AdapterUnloaded)] == ["three", "two"], "nobody needs it any more"


def test_abort_ends_a_request_at_once_and_frees_what_it_held(bench: Bench) -> None:
    bench.submit(1, mix=(AdapterUse("one"),))
    bench.submit(2)
    bench.run(4)
    bench.engine.abort(1)
    bench.engine.abort(77)
    assert bench.finished(1).reason == "aborted" and len(bench.finished(1).ids) == 4
    bench.run()
    snapshot = bench.engine.snapshot()
    assert not snapshot.running and not snapshot.kv.owners and all(slot.users == 0 for slot in snapshot.slots)
    assert bench.engine.model.memory.free == bench.engine.model.config.blocks


def test_numbers_that_are_not_finite_fail_their_request_alone(bench: Bench, adapter_folder: Write) -> None:
    good = bench.reply()
    path = "base_model.model.model.layers.0.mlp.down_proj"
    huge = {f"{path}.lora_A.weight": torch.full((2, 40), 1e18), f"{path}.lora_B.weight": torch.full((24, 2), 1e17)}
    bench.engine.load_adapter(str(adapter_folder("huge", ("down_proj",), r=2, tensors=huge)), "huge")
    bench.submit(1, mix=(AdapterUse("huge", 1e6),))
    bench.submit(2)
    bench.run()
    (failed,) = bench.of(RequestFailed)
    assert failed.request_id == 1 and "not finite" in failed.message and "huge x 1e+06" in failed.message
    assert bench.finished(2).ids == good


def test_steps_tell_what_they_did(bench: Bench) -> None:
    bench.submit(1, mix=(AdapterUse("one"), AdapterUse("two")), max_tokens=3)
    bench.run()
    first, second = bench.of(StepFinished)[:2]
    assert (first.prefill_tokens, first.decode_tokens, first.adapters, first.max_rank) == (7, 0, 2, 3)
    assert (second.prefill_tokens, second.decode_tokens, second.requests) == (0, 1, 1)
    assert abs(sum(first.ms_by_op.values()) - first.ms) < 1e-6 and first.ms_by_op["shrink"] > 0


def test_an_alora_switched_on_in_a_reply_needs_its_invocation_in_the_prompt(bench: Bench) -> None:
    base = bench.reply()
    bench.engine.set_invocation("one", "de")
    assert bench.reply((AdapterUse("one"),)) != base, "the prompt holds it"
    bench.engine.set_invocation("one", "zz")
    bench.submit(1, mix=(AdapterUse("one"),))
    bench.run()
    (started,) = bench.of(RequestStarted)
    assert not started.activations[0].found and bench.finished(1).ids == base
    bench.submit(2)
    bench.submit(3, TokenIds((5, 30, 30)))
    bench.run(3)
    bench.engine.set_mix((AdapterUse("one"),), (2, 3))
    (told,) = bench.of(MixSet)
    assert [(number, found.adapter, found.found) for number, (found,) in told.activations.items()] == [(2, "one", False), (3, "one", True)]
    bench.run()
    assert bench.finished(2).ids == base


def test_a_load_that_fails_loses_nothing(bench: Bench, tmp_path: Path) -> None:
    good = bench.reply((AdapterUse("one"),))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF nothing")
    for command in (LoadModel(str(broken)), LoadModel(str(tmp_path / "none")), LoadModel(bench.engine.model.info.path, context=10**9),
                    LoadModel(bench.engine.model.info.path, slots=0)):
        with pytest.raises((ValueError, OSError)):
            bench.engine.load_model(command)
    assert bench.reply((AdapterUse("one"),)) == good


def test_settings_and_prompts_that_mean_nothing_are_refused(bench: Bench) -> None:
    for prompt, settings, word in (
        (TokenIds(()), {}, "no token"), (TokenIds((50,)), {}, "50"), (TokenIds((-1,)), {}, "-1"), (PROMPT, {"top_p": 2.0}, "top_p")):
        with pytest.raises(ValueError, match=word):
            bench.submit(1, prompt, **settings)
    assert not bench.engine.busy


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bit_weights_compute_nearly_the_same(tiny_folder: Write, tiny_tensors: dict, adapter_folder: Write, dtype: str) -> None:
    """On a base whose rounding is not amplified from layer to layer, as it is with weights of size 1."""
    base = tiny_folder(tensors={config_name(name): 0.3 * tensor for name, tensor in tiny_tensors.items()})
    wide, narrow = Bench(base), Bench(base, dtype=dtype)
    assert narrow.engine.model.info.dtype == dtype and 2 * narrow.engine.model.info.weight_bytes == wide.engine.model.info.weight_bytes
    folder = str(adapter_folder("one", ("q_proj", "down_proj"), r=2))
    for bench in (wide, narrow):
        bench.engine.load_adapter(folder, "one")
    for mix in ((), (AdapterUse("one", 0.1),)):
        assert torch.corrcoef(torch.stack([bench.engine.logits(PROMPT.ids, mix) for bench in (wide, narrow)]))[0, 1] > 0.999
    assert len(narrow.reply((AdapterUse("one", 0.1),))) >= 1


def test_a_prompt_longer_than_a_step_gives_the_same_logits_as_its_parts_say(bench: Bench) -> None:
    ids = [5 + i % 40 for i in range(200)]
    whole = bench.engine.logits(ids)
    bench.engine.clear_cache()
    bench.submit(1, TokenIds(tuple(ids)), max_tokens=1)
    bench.run()
    assert bench.finished(1).ids == (whole.argmax().item(),)
    assert [event.prefill_tokens for event in bench.of(StepFinished)] == [128, 72]
