"""The store, the board and the person's side of the bench, without any widget."""
from __future__ import annotations

from collections import deque
from datetime import datetime

import pytest
from fake_engine import FakeEngine, adapter, model, stats, step

from lora_bench.engine import protocol as p
from lora_bench.workbench.commands import run_command
from lora_bench.workbench.control import Control
from lora_bench.workbench.header import header_line
from lora_bench.workbench.live_change import splice_text
from lora_bench.workbench.mixboard import MixBoard, Setting, mix_text, parse_scale
from lora_bench.workbench.reply_facts import meter_lines
from lora_bench.workbench.state import BenchState, StartAdapter
from lora_bench.workbench.transcript import Notice, Turn


class Bench:
    """A control over a scripted engine; `run` delivers what the engine sent."""

    def __init__(self, *adapters: StartAdapter, answers: bool = True) -> None:
        self.inbox: deque[p.Event] = deque()
        self.engine = FakeEngine(self.inbox, answers)
        self.state = BenchState(clock=lambda: datetime(2026, 1, 2, 14, 2, 11))
        self.control = Control(self.state, self.engine)
        self.engine.start()
        self.control.open_model(p.LoadModel(), adapters)
        self.run()

    def run(self) -> None:
        while self.inbox:
            self.control.receive(self.inbox.popleft())

    def tell(self, *events: p.Event) -> None:
        self.engine.emit(*events)
        self.run()

    @property
    def reply(self):
        return self.state.versions()[-1]

    @property
    def notices(self) -> list[Notice]:
        return [item for item in self.state.items if isinstance(item, Notice)]


PIRATE, JSON = StartAdapter("/a/pirate", None, 0.75), StartAdapter("/a/json", "j", 0.3, on=False)


def uses(*pairs: tuple[str, float]) -> p.Mix:
    return tuple(p.AdapterUse(name, scale) for name, scale in pairs)


# -- the board ------------------------------------------------------------------------------------
@pytest.fixture
def board() -> MixBoard:
    board = MixBoard()
    board.add("a", Setting(True, 0.5))
    board.add("b", Setting(False, 1.0))
    return board


def test_the_mix_is_what_is_on_and_not_zero(board: MixBoard) -> None:
    assert board.mix() == uses(("a", 0.5))
    board.set_scale("a", 0.0)
    assert board.mix() == ()
    board.toggle("b")
    assert board.mix() == uses(("b", 1.0))


def test_solo_hears_one_even_if_off_and_bypass_hears_none(board: MixBoard) -> None:
    board.toggle_solo("b")
    assert board.mix() == uses(("b", 1.0))
    board.toggle_bypass()
    assert board.mix() == ()
    board.toggle_bypass()
    board.toggle_solo("b")
    assert board.mix() == uses(("a", 0.5))


def test_undo_and_redo_walk_every_change(board: MixBoard) -> None:
    states = [board.now]
    for change in (lambda: board.toggle("b"), lambda: board.set_scale("a", -1.0), board.toggle_bypass, lambda: board.toggle_solo("a")):
        change()
        states.append(board.now)
    for state in states[-2::-1]:
        assert board.undo() and board.now == state
    assert not board.undo()
    for state in states[1:]:
        assert board.redo() and board.now == state
    assert not board.redo()


def test_a_drag_is_one_change(board: MixBoard) -> None:
    before = board.now
    board.set_scale("a", 0.55)
    for scale in (0.6, 0.65, 0.7):
        board.set_scale("a", scale, joined=True)
    board.undo()
    assert board.now == before


def test_undo_neither_removes_a_new_adapter_nor_brings_one_back(board: MixBoard) -> None:
    board.toggle("a")
    board.add("c", Setting())
    board.remove("b")
    board.undo()
    assert board.names == ["a", "c"] and board["a"].on


@pytest.mark.parametrize(("text", "scale"), [("0.75", 0.75), (" -1 ", -1.0), ("0,5", 0.5), ("−2", -2.0), ("1e-3", 0.001)])
def test_typed_scales(text: str, scale: float) -> None:
    assert parse_scale(text) == scale


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "-inf", "1e9", "0x10", "1 2"])
def test_bad_scales_are_explained(text: str) -> None:
    with pytest.raises(ValueError, match="scale"):
        parse_scale(text)


def test_the_mix_in_words() -> None:
    assert mix_text(()) == "base"
    assert mix_text(uses(("a", 0.75), ("b", -0.123))) == "a ×0.75 + b ×-0.123"


# -- loading --------------------------------------------------------------------------------------
def test_adapters_are_asked_for_after_the_model_and_get_their_settings() -> None:
    bench = Bench(PIRATE, JSON)
    assert [type(command) for command in bench.engine.sent[:3]] == [p.LoadModel, p.LoadAdapter, p.LoadAdapter]
    assert bench.state.board.names == ["pirate", "j"] and not bench.state.board["j"].on
    assert bench.state.mix() == uses(("pirate", 0.75)) and bench.engine.of(p.SetMix)[-1].mix == uses(("pirate", 0.75))


def test_a_message_waits_for_model_and_adapters_and_takes_their_mix() -> None:
    bench = Bench(answers=False)
    bench.state.wanted.append(PIRATE)
    assert bench.control.ask("hi")
    assert not bench.engine.of(p.Generate) and bench.reply.note == "waits for the model"
    bench.engine.answers = True
    bench.engine._do_LoadModel(p.LoadModel())
    bench.run()
    (generate,) = bench.engine.of(p.Generate)
    assert generate.mix == uses(("pirate", 0.75)) == bench.reply.mix


def test_a_failed_adapter_is_said_and_holds_nothing_up() -> None:
    bench = Bench(answers=False)
    bench.state.wanted.append(PIRATE)
    bench.tell(p.ModelLoaded(bench.engine.snapshot().model, 1.0), p.AdapterFailed("pirate", "/a/pirate", "0 of 210 modules match"))
    assert "0 of 210 modules match" in bench.notices[-1].text
    assert bench.control.ask("hi") and bench.engine.of(p.Generate)


def test_another_model_gets_the_same_adapters_and_one_that_does_not_fit_stays_on_the_board() -> None:
    bench = Bench(PIRATE)
    bench.engine.answers = False
    bench.control.open_model(p.LoadModel("/other"))
    bench.tell(p.AdapterUnloaded("pirate", 9), p.ModelLoaded(bench.engine.snapshot().model, 1.0))
    assert bench.engine.of(p.LoadAdapter)[-1] == p.LoadAdapter("/a/pirate", "pirate")
    bench.tell(p.AdapterFailed("pirate", "/a/pirate", "no module fits"))
    assert bench.state.failed == {"pirate": "no module fits"} and bench.state.mix() == ()
    assert bench.state.board["pirate"] == Setting(True, 0.75)


# -- chat -----------------------------------------------------------------------------------------
def test_a_reply_grows_and_becomes_part_of_the_next_prompt() -> None:
    bench = Bench()
    bench.engine.replies += ["Arr, matey", "Aye"]
    bench.control.system = "Be brief."
    bench.control.ask("Hello")
    bench.run()
    assert (bench.reply.text, bench.reply.phase, bench.reply.tokens) == ("Arr, matey", "done", 2)
    bench.control.ask("Again")
    assert [m.role for m in bench.engine.of(p.Generate)[-1].prompt.messages] == ["system", "user", "assistant", "user"]


def test_one_reply_at_a_time_and_escape_aborts_it() -> None:
    bench = Bench()
    assert bench.control.ask("one") and not bench.control.ask("two") and "Esc" in bench.state.hint
    assert bench.control.stop() and bench.engine.of(p.Abort) == [p.Abort(1)]
    bench.tell(p.TextDelta(1, "par", 1), p.RequestFinished(1, "aborted", stats(1)))
    assert bench.reply.text == "par" and "stopped" in meter_lines(bench.reply)[0].plain
    assert not bench.control.stop()


def test_regenerate_keeps_versions_and_says_when_greedy_would_repeat() -> None:
    bench = Bench(PIRATE)
    bench.engine.replies += ["one", "two", "three"]
    bench.control.ask("Hello")
    bench.run()
    assert not bench.control.regenerate() and "greedy" in bench.state.hint
    bench.state.board.toggle("pirate")
    assert bench.control.regenerate()
    bench.run()
    bench.control.toggle_sampling()
    assert bench.control.regenerate() and bench.reply.sampling.seed == 1
    (turn,) = [item for item in bench.state.items if isinstance(item, Turn)]
    assert [version.mix for version in turn.versions] == [uses(("pirate", 0.75)), (), ()] and turn.shown == 2
    assert turn.step(-1) and not turn.step(5) and turn.version.text == "two"


def test_an_invocation_opens_on_the_chat_and_stays_out_of_it() -> None:
    bench = Bench(StartAdapter("/a/certainty", on=False))
    bench.engine.replies += ["Paris.", "sure"]
    assert not bench.control.invoke("certainty") and "no chat" in bench.state.hint
    bench.control.ask("Capital?")
    bench.run()
    assert bench.control.invoke("certainty")
    generate = bench.engine.of(p.Generate)[-1]
    assert generate.prompt.opening == "<|judge|>" and generate.mix == uses(("certainty", 1.0))
    bench.run()
    bench.control.ask("And Spain?")
    assert [m.content for m in bench.engine.of(p.Generate)[-1].prompt.messages] == ["Capital?", "Paris.", "And Spain?"]


def test_a_change_while_a_reply_runs_is_sent_for_it_and_marked_where_it_acted() -> None:
    bench = Bench(PIRATE)
    bench.control.ask("Hello")
    bench.tell(p.RequestStarted(1, 9), p.TextDelta(1, "Arr", 2))
    bench.engine.answers = False
    bench.state.board.set_scale("pirate", 1.0)
    bench.control.send_mix()
    bench.control.send_mix()  # nothing changed: nothing is sent
    assert bench.engine.of(p.SetMix)[-1] == p.SetMix(uses(("pirate", 1.0)), (1,)) and len(bench.engine.of(p.SetMix)) == 2
    bench.tell(p.MixSet(uses(("pirate", 1.0)), {1: 2}), p.TextDelta(1, " aye", 3))
    (splice,) = bench.reply.splices
    assert (splice.at, splice.token, splice.before, splice.after) == (3, 2, uses(("pirate", 0.75)), uses(("pirate", 1.0)))


def test_a_recompute_of_a_reply_that_waits_for_memory_claims_no_number() -> None:
    bench = Bench(PIRATE)
    bench.control.set_change("recompute")
    bench.control.ask("Hello")
    bench.tell(p.RequestStarted(1, 9), p.TextDelta(1, "Arr", 2), p.RequestPreempted(1, 10, "KV memory ran out"))
    bench.engine.answers = False
    bench.state.board.set_scale("pirate", 0.5)
    bench.control.send_mix()
    bench.tell(p.MixSet(bench.state.mix(), {1: 2}))
    (splice,) = bench.reply.splices
    assert splice.recomputed is None and splice_text(splice).endswith("recomputed when it goes on ──")


def test_a_refused_mix_returns_to_what_holds() -> None:
    bench = Bench(PIRATE, JSON)
    bench.engine.answers = False
    bench.state.board.toggle("j")
    bench.control.send_mix()
    bench.tell(p.MixRefused(uses(("pirate", 0.75), ("j", 0.3)), "the mix wants 2 adapters, there is 1 slot"))
    assert bench.state.mix() == uses(("pirate", 0.75)) and "1 slot" in bench.notices[-1].text
    bench.state.board.toggle("j")
    bench.control.send_mix()
    assert len(bench.engine.of(p.SetMix)) == 3, "the same wish may be tried again"


def test_activations_are_told_under_the_reply() -> None:
    bench = Bench()
    bench.control.ask("x")
    bench.tell(p.RequestStarted(1, 9, (p.Activation("c", True, 5, 3, "«<|judge|>»"), p.Activation("d", False, -1, 2, "nearest: «<|jud»"))))
    lines = [line.plain for line in meter_lines(bench.reply)]
    assert "acts from token 5" in lines[1] and "d did not act: v on it" in lines[2] and "nearest" in lines[2]


def test_the_notes_of_a_model_and_of_an_adapter_are_told() -> None:
    bench = Bench()
    bench.tell(p.ModelLoaded(model(notes=("no chat template in the model's files",)), 1.0))
    assert "no chat template" in bench.notices[-1].text
    bench.tell(p.AdapterLoaded(adapter("dud", notes=("changes nothing: every delta is zero",)), 1.0))
    assert (bench.state.events[-1].text, bench.state.events[-1].bad) == ("dud: changes nothing: every delta is zero", True)


# -- death ----------------------------------------------------------------------------------------
def test_death_keeps_the_chat_and_a_restart_brings_everything_back() -> None:
    bench = Bench(PIRATE, JSON, StartAdapter("/a/certainty", on=False))
    bench.control.pin("pirate")
    bench.control.set_invocation("certainty", "judge this")
    bench.run()
    bench.control.ask("Hello")
    bench.tell(p.RequestStarted(1, 9), p.TextDelta(1, "Ar", 1), p.EngineFailed("killed by signal 9"))
    bench.tell(p.EngineFailed("exit code 0"))
    assert len(bench.notices) == 1, "the first cause is kept"
    assert bench.state.engine == "gone" and bench.reply.phase == "lost" and bench.reply.text == "Ar"
    assert bench.notices[-1].kind == "engine" and not bench.control.ask("more")
    bench.engine.sent.clear()
    bench.control.restart()
    bench.run()
    assert bench.notices[-1].resolved and bench.state.engine == "idle"
    assert [c.name for c in bench.engine.of(p.LoadAdapter)] == ["pirate", "j", "certainty"]
    assert bench.engine.of(p.PinAdapter) == [p.PinAdapter("pirate", True)]
    assert bench.engine.of(p.SetInvocation) == [p.SetInvocation("certainty", "judge this")]
    assert bench.engine.of(p.SetMix)[-1].mix == uses(("pirate", 0.75)) and bench.control.ask("more")


def test_a_recovered_engine_drops_the_reply_and_goes_on() -> None:
    bench = Bench()
    bench.control.ask("Hello")
    bench.tell(p.EngineFailed("a step failed: out of memory", fatal=False))
    assert bench.reply.phase == "lost" and bench.state.engine == "idle" and bench.control.ask("more")


# -- numbers and commands -------------------------------------------------------------------------
def test_the_header_says_when_weights_are_packed() -> None:
    state = Bench().state
    assert "packed" not in header_line(state, 200).plain
    state.snapshot = p.EngineSnapshot(model=model(weights="packed", weight_bytes=96_576_768))
    assert " · packed 92.1 MiB, fp32 · cpu(2)" in header_line(state, 200).plain


def test_step_times() -> None:
    bench = Bench()
    assert bench.state.step_times() == (0.0, 0.0, 0.0)
    bench.tell(*(step(i, float(i)) for i in range(1, 501)))
    last, median, p95 = bench.state.step_times()
    assert len(bench.state.steps) == 240 and last == 500.0 and median == 380.5 and 487 < p95 < 489


def test_events_carry_their_cause() -> None:
    bench = Bench()
    bench.tell(p.SlotEvicted(2, "sql", "pirate needed a slot"))
    assert bench.state.last_eviction.text == "sql left G2: pirate needed a slot"


def test_slash_commands() -> None:
    bench = Bench()
    run_command(bench.control, "/set temperature 0.7")
    run_command(bench.control, "/seed 9")
    run_command(bench.control, "/system Be kind.")
    run_command(bench.control, r"/set stop \n\n")
    assert bench.control.sampling == p.Sampling(temperature=0.7, seed=9, stop=("\n\n",)) and bench.control.system == "Be kind."
    assert "/system" in run_command(bench.control, "/help")


@pytest.mark.parametrize("line", ["/nope", "/set nope 1", "/set top_k x", "/set temperature nan", "/set max_tokens 0", "/set top_p",
                                  "/seed -1"])
def test_bad_slash_commands_change_nothing(line: str) -> None:
    bench = Bench()
    with pytest.raises(ValueError):
        run_command(bench.control, line)
    assert bench.control.sampling == p.Sampling()


def test_an_unloaded_adapter_leaves_the_board_and_one_asked_twice_is_said_by_the_engine() -> None:
    bench = Bench(PIRATE)
    bench.control.unload("pirate")
    bench.run()
    assert bench.state.board.names == [] and bench.state.mix() == ()
    bench.tell(p.CommandFailed("there is no adapter pirate"), p.AdapterChanged(adapter("x")))
    assert bench.notices[-1].text == "there is no adapter pirate"
