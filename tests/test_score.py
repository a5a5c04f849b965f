"""Texts read under several mixes: against the logits one by one, in pieces, beside requests, and what is refused."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from engine_bench import PROMPT, Bench

from lora_bench.engine import effect, loaded, score, scores
from lora_bench.engine.protocol import (
    AdapterLoaded,
    AdapterUnloaded,
    AdapterUse,
    CancelScore,
    CheckAdapter,
    CheckFailed,
    CheckFinished,
    CheckProgress,
    EngineSnapshot,
    Event,
    Generate,
    LoadAdapter,
    LoadModel,
    Mix,
    ModelLoaded,
    RawText,
    RequestFinished,
    Sampling,
    Score,
    Scored,
    ScoreFailed,
    Shutdown,
    TokenIds,
    Tokenize,
    Tokenized,
)
from lora_bench.engine.protocol.words import requests_text
from lora_bench.engine.service import Inbox, serve

pytestmark = pytest.mark.calm

ONE, OTHER, JUDGE = (AdapterUse("one", 0.1),), (AdapterUse("one", 0.1), AdapterUse("two", -0.04)), (AdapterUse("judge", 0.1),)
REPLY = (12, 3, 40, 12, 22, 7, 9)
VOCAB = 50


@pytest.fixture
def bench(tiny_gguf: Callable, adapter_folder: Callable, endless: None) -> Bench:
    bench = Bench(tiny_gguf())
    for name, more in (("one", {}), ("two", {"r": 2}), ("judge", {"alora_invocation_tokens": [9, 10]})):
        bench.engine.load_adapter(str(adapter_folder(name, init_lora_weights=True, **more)))
    bench.events.clear()
    return bench


def finish(bench: Bench, *commands: Score) -> list[Scored | ScoreFailed]:
    for command in commands:
        bench.engine.scores.ask(command)
    while bench.engine.scores.busy:
        bench.engine.scores.advance()
    found = [event for event in bench.events if isinstance(event, Scored | ScoreFailed)]
    bench.events.clear()
    return found


def scored(bench: Bench, mixes: Sequence[Mix], reply: Sequence[int] = REPLY, prompt=PROMPT, top: int = 5) -> Scored:
    (answer,) = finish(bench, Score(3, prompt, tuple(reply), tuple(mixes), top))
    assert isinstance(answer, Scored), answer
    return answer


def plain(bench: Bench, mix: Mix, prompt: Sequence[int], reply: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [reply, vocabulary], float64, each position computed by itself."""
    logits = [bench.engine.logits([*prompt, *reply[:i]], mix) for i in range(len(reply))]
    return torch.log_softmax(torch.stack(logits).double(), -1)


def agrees(bench: Bench, answer: Scored, mixes: Sequence[Mix], prompt: Sequence[int], reply: Sequence[int], top: int = 5) -> None:
    first = plain(bench, mixes[0], prompt, reply)
    assert [token.id for token in answer.tokens] == list(reply)
    assert [token.logprob for token in answer.tokens] == list(answer.rows[0].logprobs)
    for row, mix in zip(answer.rows, mixes, strict=True):
        own = plain(bench, mix, prompt, reply)
        chosen = own[range(len(reply)), list(reply)]
        assert row.mix == mix
        assert row.logprobs == pytest.approx(chosen.tolist(), rel=1e-4, abs=1e-4)
        assert row.kl == pytest.approx((first.exp() * (first - own)).sum(-1).tolist(), rel=1e-4, abs=1e-4)
        likelier = (own > chosen[:, None] + 1e-5).sum(-1), (own > chosen[:, None] - 1e-5).sum(-1)  # but for what rounding may turn round
        assert all(low < rank <= high for low, rank, high in zip(likelier[0].tolist(), row.ranks, likelier[1].tolist(), strict=True))
        best, ids = own.topk(top).values.flatten().tolist(), [[chance.id for chance in chances] for chances in row.top]
        assert all(len(set(each)) == top for each in ids)
        assert own.gather(1, torch.tensor(ids)).flatten().tolist() == pytest.approx(best, rel=0, abs=1e-5)  # equals may change places
        assert [chance.logprob for chances in row.top for chance in chances] == pytest.approx(best, rel=1e-4, abs=1e-4)


def test_figures_are_those_of_the_logits_one_by_one(bench: Bench) -> None:
    mixes = (ONE, (), OTHER, ONE)
    answer = scored(bench, mixes)
    agrees(bench, answer, mixes, PROMPT.ids, REPLY)
    assert set(answer.rows[0].kl) == {0.0} and max(answer.rows[3].kl) < 1e-9 and min(answer.rows[1].kl) > 1e-6
    assert answer.tokens[0].text == bench.engine.model.tokenizer.token_text([12])[0] and not answer.notes


def test_a_long_text_is_read_in_pieces_with_the_same_figures(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, reply = torch.randint(5, VOCAB, (60,)).tolist(), torch.randint(5, VOCAB, (70,)).tolist()
    whole = scored(bench, (ONE, ()), reply, TokenIds(tuple(prompt)))
    agrees(bench, whole, (ONE, ()), prompt, reply)
    monkeypatch.setattr(score, "STEP_LOGITS", 7 * VOCAB)
    rows: list[int] = []
    logits = bench.engine.model.runner.logits
    monkeypatch.setattr(bench.engine.model.runner, "logits", lambda works, every=False: rows.append(every * sum(w.tokens for w in works))
                        or logits(works, every))
    pieces = scored(bench, (ONE, ()), reply, TokenIds(tuple(prompt)))
    assert max(rows) == 6
    assert pieces.rows[1].kl == pytest.approx(whole.rows[1].kl, rel=1e-4, abs=1e-4) and len(pieces.rows[1].kl) == 70


def test_what_is_stored_of_the_prompt_is_not_computed_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tuple(torch.randint(5, VOCAB, (40,)).tolist())
    for number, mix in enumerate((ONE, ())):
        bench.submit(number, TokenIds(prompt), mix, max_tokens=30)
    bench.run()
    reply = bench.ids(0)  # stored too, under the first mix: its logits are wanted all the same
    works: list[int] = []
    logits = bench.engine.model.runner.logits
    monkeypatch.setattr(bench.engine.model.runner, "logits",
                        lambda found, every=False: works.append(sum(work.tokens for work in found)) or logits(found, every))
    answer = scored(bench, (ONE, ()), reply, TokenIds(prompt))
    assert sum(works) <= 2 * (7 + len(reply))
    monkeypatch.undo()
    agrees(bench, answer, (ONE, ()), prompt, reply)


def test_an_alora_is_invoked_by_the_prompt_and_not_by_the_reply(bench: Bench) -> None:
    agrees(bench, scored(bench, ((), JUDGE)), ((), JUDGE), PROMPT.ids, REPLY)
    reply = (12, 9, 10, 4)
    answer = scored(bench, ((), JUDGE), reply)
    later = plain(bench, JUDGE, PROMPT.ids, reply)[range(4), list(reply)].tolist()  # invoked by the reply for its last token
    assert answer.rows[1].logprobs[:3] == pytest.approx(later[:3], rel=1e-4, abs=1e-4)
    assert answer.rows[1].logprobs[3] != pytest.approx(later[3], rel=1e-4, abs=1e-4)
    assert not answer.notes
    bench.engine.set_invocation("judge", "ef", True)
    assert bench.engine.model.store.infos["judge"].invocation_tokens == (9, 10)
    bench.events.clear()
    (note,) = scored(bench, ((), JUDGE, JUDGE), reply, TokenIds((5, 6, 7))).notes
    assert note.startswith("judge begins to act where a reply holds its invocation, here at token 1")
    silent = scored(bench, ((), JUDGE), reply, TokenIds((5, 6, 7)))
    assert set(silent.rows[1].kl) == {0.0}


def test_more_mixes_than_the_memory_holds_are_read_one_after_the_other(tiny_gguf: Callable, adapter_folder: Callable,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tiny_gguf(), slots=1)
    for name in ("one", "two", "three"):
        bench.engine.load_adapter(str(adapter_folder(name)))
    bench.events.clear()
    mixes = ((), *((AdapterUse(name, 0.1),) for name in ("one", "two", "three")))
    agrees(bench, scored(bench, mixes), mixes, PROMPT.ids, REPLY)
    (answer,) = finish(bench, Score(1, PROMPT, REPLY, ((AdapterUse("one"),), (AdapterUse("two"),))))  # the first is needed beside it
    assert isinstance(answer, ScoreFailed) and "slot" in answer.message


def test_requests_go_on_beside_a_score_and_each_step_is_followed_by_a_small_piece(bench: Bench) -> None:
    alone = bench.reply(ONE, max_tokens=30)
    prompt, reply = TokenIds(tuple(torch.randint(5, VOCAB, (80,)).tolist())), torch.randint(5, VOCAB, (60,)).tolist()
    expected = scored(bench, (ONE, ()), reply, prompt)
    works: list[int] = []
    logits = bench.engine.model.runner.logits
    bench.engine.model.runner.logits = lambda found, every=False: works.append(sum(work.tokens for work in found)) or logits(found, every)
    bench.submit(1, mix=ONE, max_tokens=30)
    bench.engine.scores.ask(Score(3, prompt, tuple(reply), (ONE, ())))
    while bench.engine.step():
        if bench.engine.scores.busy:
            bench.engine.scores.advance()
    assert bench.ids(1) == alone and max(works) <= score.BESIDE_TOKENS and len(bench.of(Scored)) == 1
    assert bench.of(Scored)[0].rows[1].kl == pytest.approx(expected.rows[1].kl, rel=1e-4, abs=1e-4)
    assert bench.engine.model.memory.free == bench.engine.model.config.blocks


def test_a_reload_in_the_middle_does_not_change_what_is_read(bench: Bench, adapter_folder: Callable,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    expected = scored(bench, (ONE, ()))
    monkeypatch.setattr(score, "STEP_LOGITS", 2 * VOCAB)
    bench.engine.scores.ask(Score(3, PROMPT, REPLY, (ONE, ())))
    bench.engine.scores.advance()
    bench.engine.scores.advance()
    adapter_folder("one")  # other numbers in the same place
    bench.engine.reload_adapter("one")
    (answer,) = finish(bench)
    assert answer.rows[1].kl == pytest.approx(expected.rows[1].kl, rel=1e-4, abs=1e-4)
    assert scored(bench, (ONE, ())).rows[1].kl != pytest.approx(expected.rows[1].kl, abs=1e-3)


def test_rows_read_in_turns_are_never_of_different_contents(tiny_gguf: Callable, adapter_folder: Callable) -> None:
    bench = Bench(tiny_gguf(), slots=1)
    for name in ("one", "two"):
        bench.engine.load_adapter(str(adapter_folder(name)))
    command = Score(3, PROMPT, REPLY, ((), ONE, (AdapterUse("two", 0.1),)))
    bench.engine.scores.ask(command)
    bench.engine.scores.advance()
    adapter_folder("one")
    bench.engine.reload_adapter("one")
    (answer,) = finish(bench)
    assert isinstance(answer, ScoreFailed) and "the mix one x 0.1 was reloaded" in answer.message and "score it again" in answer.message
    assert isinstance(finish(bench, command)[0], Scored)


def test_tokens_that_an_adapter_adds_are_left_out_of_the_distance(bench: Bench, adapter_folder: Callable, tiny_tensors: dict,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "MAX_TOP", 99)
    rows = {f"base_model.model.{place}.weight": torch.cat([tiny_tensors[f"{name}.weight"], torch.randn(2, 24)])
            for place, name in (("model.embed_tokens", "embed_tokens"), ("lm_head", "lm_head"))}
    lora = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight": torch.randn(*shape)
            for side, shape in (("A", (4, 24)), ("B", (36, 4)))}
    bench.engine.load_adapter(str(adapter_folder("words", ("q_proj",), tensors=rows | lora)))
    bench.events.clear()
    words = (AdapterUse("words", 0.1),)
    answer = scored(bench, ((), words), top=52)
    own = plain(bench, words, PROMPT.ids, REPLY)
    assert own.shape[-1] == VOCAB + 2 and [len(row.top[0]) for row in answer.rows] == [VOCAB, VOCAB + 2]
    first, cut = plain(bench, (), PROMPT.ids, REPLY), torch.log_softmax(own[:, :VOCAB], -1)
    assert answer.rows[1].kl == pytest.approx((first.exp() * (first - cut)).sum(-1).tolist(), rel=1e-4, abs=1e-4)
    assert answer.rows[1].logprobs == pytest.approx(own[range(len(REPLY)), list(REPLY)].tolist(), rel=1e-4, abs=1e-4)
    assert "adds tokens" in answer.notes[0]
    (refused,) = finish(bench, Score(1, PROMPT, (VOCAB + 1, 5), (words, ())))
    assert isinstance(refused, ScoreFailed) and "of the base alone cannot read it" in refused.message
    assert isinstance(finish(bench, Score(1, PROMPT, (VOCAB + 1, 5), (words, words)))[0], Scored)


@pytest.mark.parametrize(("command", "why"), [
    (Score(8, PROMPT, (), ((),)), "no token"), (Score(8, PROMPT, (5,), ()), "1 to 64"), (Score(8, PROMPT, (5,), ((),) * 65), "1 to 64"),
    (Score(8, PROMPT, (5,), ((),), 0), "top is 0"), (Score(8, PROMPT, (5,), ((),), 51), "top is 51"),
    (Score(8, PROMPT, (5, VOCAB), ((),)), "token id 50 of the reply"), (Score(8, PROMPT, (-1,), ((),)), "token id -1"),
    (Score(8, PROMPT, (5,) * 300, ((),)), "7 and 300 tokens long, 307 in all"), (Score(8, TokenIds(()), (5,), ((),)), "no token"),
    (Score(8, PROMPT, (5,) * 20_000, ((),) * 64), "over the limit"), (Score(8, RawText("a" * 100_000), (5,), ((),)), "100,000 characters"),
    (Score(8, PROMPT, (5,), ((AdapterUse("onee"),),)), "did you mean 'one'"),
    (Score(8, PROMPT, (5,), ((AdapterUse("one", 1e9),),)), "scale")])
def test_what_cannot_be_read_is_refused_in_words_and_the_next_one_is_read(bench: Bench, command: Score, why: str) -> None:
    refused, answer = finish(bench, command, Score(9, PROMPT, REPLY, ((),)))
    assert isinstance(refused, ScoreFailed) and refused.score_id == 8 and why in refused.message
    assert isinstance(answer, Scored) and answer.score_id == 9
    assert bench.engine.model.memory.free == bench.engine.model.config.blocks


def test_numbers_that_are_not_finite_are_said_with_the_mix(bench: Bench) -> None:
    for mix, advice in ((((AdapterUse("one", 1e6),), "lower the scales")), ((), "another copy of the base")):
        logits = bench.engine.model.runner.logits
        bench.engine.model.runner.logits = lambda works, every=False, logits=logits: logits(works, every) * (float("nan") if every else 1)
        (refused,) = finish(bench, Score(8, PROMPT, REPLY, (mix,)))
        bench.engine.model.runner.logits = logits
        assert isinstance(refused, ScoreFailed) and "not finite at token 0" in refused.message and advice in refused.message


def test_scores_end_with_their_base_and_no_more_than_some_wait(bench: Bench, tiny_gguf: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "MAX_WAITING", 2)
    for number in (1, 2):
        bench.engine.scores.ask(Score(number, PROMPT, REPLY, (ONE, ())))
    with pytest.raises(ValueError, match="2 texts wait"):
        bench.engine.scores.ask(Score(3, PROMPT, REPLY, ((),)))
    bench.engine.scores.advance()
    assert bench.engine.scores.requests
    bench.engine.load_model(LoadModel(str(tiny_gguf("next.gguf")), device="cpu"))
    assert [(event.score_id, event.message) for event in bench.of(ScoreFailed)] == [
        (number, "the base was unloaded: another base was loaded") for number in (1, 2)]
    assert not bench.engine.scores.busy and not bench.engine.scores.requests


def test_an_unload_waits_for_the_reading_and_says_so(bench: Bench) -> None:
    bench.engine.scores.ask(Score(1, PROMPT, REPLY, (ONE, ())))
    bench.engine.scores.advance()
    bench.engine.unload_adapter("one")
    assert not bench.of(AdapterUnloaded)
    assert requests_text(request.id for request in bench.engine.scores.requests) == "the reading of a text"
    assert requests_text((4, 3, -1_000_002)) == "requests 3, 4 and an adapter check"
    while bench.engine.scores.busy:
        bench.engine.scores.advance()
    assert len(bench.of(Scored)) == 1 and bench.of(AdapterUnloaded)


def test_a_score_is_given_up_running_or_waiting_and_what_it_held_is_free(bench: Bench) -> None:
    scores, memory = bench.engine.scores, bench.engine.model.memory
    for number, mix in ((1, ONE), (2, ONE), (3, ())):
        scores.ask(Score(number, PROMPT, REPLY, (mix, ())))
    scores.advance()
    bench.engine.unload_adapter("two")
    bench.engine.unload_adapter("one")
    assert scores.requests and memory.free < bench.engine.model.config.blocks
    assert scores.cancel(2) and not scores.cancel(2) and not scores.cancel(9)
    assert scores.cancel(1) and not scores.requests and memory.free == bench.engine.model.config.blocks
    assert bench.of(ScoreFailed) == [ScoreFailed(number, "the reading of the text was stopped", cancelled=True) for number in (2, 1)]
    assert [event.name for event in bench.of(AdapterUnloaded)] == ["two", "one"]
    bench.events.clear()
    (answer,) = finish(bench)
    assert isinstance(answer, Scored) and answer.score_id == 3


# -- through the service ---------------------------------------------------------------------------
def told(*commands: object) -> list[Event]:
    inbox, events = Inbox(), []
    left = sum(isinstance(command, Score | Tokenize) for command in commands)

    def emit(event: Event) -> None:
        nonlocal left
        events.append(event)
        left -= isinstance(event, Scored | ScoreFailed | Tokenized)
        if not left:
            inbox.put(Shutdown())

    for command in commands:
        inbox.put(command)
    serve(inbox, emit)
    return events


def test_a_check_under_way_a_reply_that_waits_for_its_blocks_and_a_score_that_waits_for_both_all_end(
    tiny_gguf: Callable, adapter_folder: Callable, monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_config = loaded.make_config
    monkeypatch.setattr(loaded, "make_config", lambda *asked: replace(make_config(*asked), blocks=4))
    monkeypatch.setattr(effect, "PROMPTS", (("short", "ab"),))
    inbox, events = Inbox(), []

    def ended() -> int:
        return sum(isinstance(event, CheckFinished | CheckFailed | RequestFinished | Scored) for event in events)

    def emit(event: Event) -> None:
        begun = any(isinstance(other, CheckProgress) and other.text == "the base replies" for other in events)
        events.append(event)
        if isinstance(event, CheckProgress) and event.text == "the base replies" and not begun:
            inbox.put(Generate(1, TokenIds((7,)), sampling=Sampling(max_tokens=40)))
            inbox.put(Score(1, PROMPT, REPLY, ((), ONE)))
        if ended() == 3 or sum(isinstance(other, EngineSnapshot) for other in events) > 30:
            inbox.put(Shutdown())

    for command in (LoadModel(str(tiny_gguf()), device="cpu"), LoadAdapter(str(adapter_folder("one"))), CheckAdapter("one", True)):
        inbox.put(command)
    serve(inbox, emit)
    assert ended() == 3


def test_a_score_waits_for_an_adapter_that_is_being_read_and_an_invocation_is_cut_at_once(
    tiny_gguf: Callable, adapter_folder: Callable,
) -> None:
    events = told(LoadModel(str(tiny_gguf()), device="cpu"), LoadAdapter(str(adapter_folder("one"))), Score(1, PROMPT, REPLY, ((), ONE)),
                  Tokenize(2, "he"))
    kinds = [type(event) for event in events if isinstance(event, ModelLoaded | AdapterLoaded | Scored | ScoreFailed | Tokenized)]
    assert kinds == [ModelLoaded, Tokenized, AdapterLoaded, Scored]


def test_a_score_that_waits_behind_a_load_or_another_is_given_up_and_those_beside_it_are_not(
    tiny_gguf: Callable, adapter_folder: Callable,
) -> None:
    asked = [Score(number, PROMPT, REPLY, ((), ONE)) for number in (1, 2)]
    loads = LoadModel(str(tiny_gguf()), device="cpu"), LoadAdapter(str(adapter_folder("one")))
    events = told(*loads, *asked, CancelScore(1), CancelScore(7))
    stopped, answer = [event for event in events if isinstance(event, Scored | ScoreFailed)]
    assert stopped == ScoreFailed(1, "the reading of the text was stopped", cancelled=True)
    assert isinstance(answer, Scored) and answer.score_id == 2
    assert [type(event) for event in events if isinstance(event, AdapterLoaded | ScoreFailed)] == [ScoreFailed, AdapterLoaded]


def test_without_a_base_there_is_nothing_to_score_or_to_cut() -> None:
    failed, cut = [event for event in told(Score(5, PROMPT, REPLY, ((),)), Tokenize(6, "x")) if isinstance(event, ScoreFailed | Tokenized)]
    assert failed.score_id == 5 and "load a model" in failed.message
    assert (cut.ask_id, cut.ids) == (6, ()) and "load a model" in cut.detail


# -- invocations -------------------------------------------------------------------------------------
def test_an_invocation_is_cut_as_the_base_cuts_it_and_found_where_it_stands_last(tiny_gguf: Callable) -> None:
    base = LoadModel(str(tiny_gguf()), device="cpu")
    texts = "he", "<|im_start|>he", "", "the", "\ud800", "h" * 70_000, "x" * 2000
    asked = [Tokenize(i, text, RawText("she, the he")) for i, text in enumerate(texts)]
    answers = [event for event in told(base, *asked, Tokenize(7, "he")) if isinstance(event, Tokenized)]
    he, special, empty, miss, half, huge, long, alone = answers
    assert (he.ids, he.texts, he.found, he.start) == ((49,), ("he",), True, 7) and not he.detail
    assert special.ids[0] == 3 and not special.found and special.detail
    assert not empty.ids and "plain LoRA" in empty.detail
    assert miss.found and miss.start == 4 and len(miss.ids) == 2
    assert not half.found and half.detail
    assert not huge.ids and "70,000 characters" in huge.detail and not long.ids and "2,000 tokens" in long.detail
    assert alone.ids == (49,) and not alone.found and not alone.detail


def test_a_prompt_that_cannot_be_cut_leaves_the_tokens_and_says_why(tiny_gguf: Callable) -> None:
    (answer,) = [event for event in told(LoadModel(str(tiny_gguf()), device="cpu"), Tokenize(1, "he", TokenIds((5, 99))))
                 if isinstance(event, Tokenized)]
    assert answer.ids == (49,) and not answer.found and "99" in answer.detail
