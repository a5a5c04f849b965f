"""The compare screen over a real engine: what it shows is what the engine says when it is asked by itself."""
from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from bench_pilot import NOW, running, screen_text, settled, wait_until
from compare_pilot import asked, compare_of, to_columns
from engine_bench import Bench
from textual.pilot import Pilot
from thread_engine import ThreadEngine

from lora_bench.engine import protocol as p
from lora_bench.workbench.app import BenchApp
from lora_bench.workbench.comparison import mixes_to_score
from lora_bench.workbench.screens.sweep import SweepScreen
from lora_bench.workbench.state import StartAdapter

pytestmark = pytest.mark.calm

MIXES = ((p.AdapterUse("one", 0.5),), (), (p.AdapterUse("one", 0.5), p.AdapterUse("two", 1.0)))
SAMPLING = p.Sampling(temperature=0.8, seed=5, max_tokens=24)


@pytest.fixture
def folders(adapter_folder: Callable[..., Path]) -> dict[str, Path]:
    """Adapters that move a calm base by little, so that rounding is not amplified."""
    return {name: adapter_folder(name, r=rank, lora_alpha=rank / 8) for name, rank in (("one", 4), ("two", 2), ("three", 3))}


@pytest.fixture
def bench(base: Path, folders: dict[str, Path], endless: None) -> Bench:
    """The engine to ask by itself."""
    bench = Bench(base)
    for name, folder in folders.items():
        bench.engine.load_adapter(str(folder), name)
    bench.events.clear()
    return bench


@pytest.fixture
def app(base: Path, folders: dict[str, Path], endless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchApp:
    monkeypatch.chdir(tmp_path)
    inbox: deque[p.Event] = deque()
    engine = ThreadEngine(inbox.append)
    engine.start()
    adapters = [StartAdapter(str(folder), name, 0.5 if name == "one" else 1.0, on=name == "one") for name, folder in folders.items()]
    app = BenchApp(engine, inbox, p.LoadModel(str(base), device="cpu"), tuple(adapters), clock=lambda: NOW)
    app.engine = engine
    yield app
    engine.stop()


def replies_alone(bench: Bench, prompt: p.Prompt, mixes: Sequence[p.Mix]) -> list[tuple[tuple[int, ...], str]]:
    """(ids, text) of the reply to each mix, one after the other."""
    found = []
    for mix in mixes:
        bench.events.clear()
        bench.engine.submit(p.Generate(1, prompt, mix, SAMPLING))
        bench.run()
        found.append((bench.ids(1), bench.text(1)))
    return found


def figures_alone(bench: Bench, prompt: p.Prompt, ids: tuple[int, ...], mixes: Sequence[p.Mix]) -> p.Scored:
    bench.events.clear()
    bench.engine.scores.ask(p.Score(1, prompt, ids, tuple(mixes)))
    while bench.engine.scores.busy:
        bench.engine.scores.advance()
    return bench.of(p.Scored)[0]


def agree(shown: p.Scored, told: p.Scored) -> None:
    assert [row.mix for row in shown.rows] == [row.mix for row in told.rows]
    for one, other in zip(shown.rows, told.rows, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=1e-4, abs=1e-4)
        assert one.kl == pytest.approx(other.kl, rel=1e-3, abs=1e-5)


def advanced_together(said: Sequence[p.Event], numbers: Sequence[int]) -> None:
    """After every step each row that still runs has as many tokens as the others."""
    tokens: Counter[int] = Counter()
    for event in said:
        if isinstance(event, p.TextDelta) and event.request_id in numbers:
            tokens[event.request_id] = event.tokens
        elif isinstance(event, p.StepFinished) and tokens:
            assert len({tokens[number] for number in numbers}) == 1
    assert set(tokens) == set(numbers) and set(tokens.values()) == {SAMPLING.max_tokens}


async def three_columns(pilot: Pilot) -> None:
    """A has the chat's mix, B is the base, C has two beside A's."""
    pilot.app.control.set_sampling(temperature=SAMPLING.temperature, seed=SAMPLING.seed, max_tokens=SAMPLING.max_tokens)
    await pilot.press("f3")
    await settled(pilot)
    await pilot.press("tab", "a", "j", "space", "escape")
    await settled(pilot)
    assert tuple(lane.board.mix() for lane in compare_of(pilot.app).lanes) == MIXES


async def test_three_columns_their_figures_and_what_is_written_of_them(app: BenchApp, bench: Bench, tmp_path: Path) -> None:
    async with running(app, 160, 45) as pilot:
        await three_columns(pilot)
        run = await asked(pilot, "he the")
        alone = replies_alone(bench, run.prompt, MIXES)
        assert [(row.ids, row.text) for row in run.rows] == alone
        advanced_together(app.engine.said, [row.request_id for row in run.rows])
        mixes = mixes_to_score(run.setup.columns)
        assert set(mixes) == {*MIXES, MIXES[2][1:]}, "what is left when one of C's adapters is out, but for what is there already"
        told = figures_alone(bench, run.prompt, run.rows[0].ids, mixes)
        agree(run.scored, told)
        assert all(max(row.kl) > 1e-4 for row in told.rows[1:]), "mixes that differ"
        shown = screen_text(app)
        for column, row in (("B", told.rows[1]), ("C", told.rows[2])):
            mean, most = re.search(rf"KL\(A‖{column}\) on A's text: mean (\S+), max (\S+) nats", shown).groups()
            assert (float(mean), float(most)) == pytest.approx((sum(row.kl) / len(row.kl), max(row.kl)), abs=6e-4)

        await to_columns(pilot)
        await pilot.press("right", "right", "k", *["right"] * 7)
        await settled(pilot)
        shown = screen_text(app)
        likely = {row.mix: row.logprobs[7] for row in told.rows}
        moved = dict(re.findall(r"(one|two) ([+-][\d.]+)", re.search(r"C: with it less without it, in nats: .*", shown)[0]))
        assert "token 7 of 24" in shown and {name: float(nats) for name, nats in moved.items()} == pytest.approx(
            {"one": likely[MIXES[2]] - likely[MIXES[2][1:]], "two": likely[MIXES[2]] - likely[MIXES[0]]}, abs=6e-3)

        await pilot.press("escape", "e")
        await settled(pilot)
        report = tmp_path / "compare-20260102-140211.md"
        data = json.loads(report.with_suffix(".jsonl").read_text())
        assert [(tuple(column["ids"]), column["text"]) for column in data["columns"]] == alone
        assert data["scored"]["rows"][2]["kl"] == pytest.approx(told.rows[2].kl, rel=1e-3, abs=1e-5)
        assert all(text.strip() in report.read_text() for _, text in alone)


async def test_a_blind_vote_is_kept_and_a_sweep_has_a_reply_and_a_distance_at_every_scale(
    app: BenchApp, bench: Bench, tmp_path: Path,
) -> None:
    async with running(app, 160, 45) as pilot:
        await three_columns(pilot)
        await pilot.press("b")
        run = await asked(pilot, "the he")
        assert run.hidden and len(run.rows) == 2 and "KL(" not in screen_text(app)
        await to_columns(pilot)
        await pilot.press("1")
        await settled(pilot)
        first = run.order[0] == 0
        kept = json.loads(app.control.comparing.votes.path.read_text())
        tally, problem = app.control.comparing.votes.counts(run.tally)
        assert kept and not problem and (tally.first, tally.second, tally.total) == (int(first), int(not first), 1)
        assert f"your vote: left, which is {run.rows[run.order[0]].column.label}" in screen_text(app) and "KL(" in screen_text(app)

        await pilot.press("w", "ctrl+u", *"three 0:1:0.5", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, SweepScreen) and compare_of(app).sweep.scored)
        await settled(pilot)
        sweep = compare_of(app).sweep
        beside = sweep.rows[0].column.mix
        mixes = tuple((*([p.AdapterUse("three", scale)] if scale else []), *beside) for scale in (0.0, 0.5, 1.0))
        alone = replies_alone(bench, sweep.prompt, mixes)
        assert beside in MIXES and [row.column.mix for row in sweep.rows] == list(mixes)
        assert [(row.ids, row.text) for row in sweep.rows] == alone
        advanced_together(app.engine.said, [row.request_id for row in sweep.rows])
        told = figures_alone(bench, sweep.prompt, sweep.rows[0].ids, mixes)
        agree(sweep.scored, told)
        lines = re.findall(r"[▸ ] ×([\d.]+) +KL +([\d.]+) ", screen_text(app))
        assert [scale for scale, _ in lines] == ["0.00", "0.50", "1.00"]
        assert [float(kl) for _, kl in lines] == pytest.approx([sum(row.kl) / len(row.kl) for row in told.rows], abs=6e-4)

        await pilot.press("e")
        await settled(pilot)
        report = tmp_path / "sweep-20260102-140211.md"
        data = json.loads(report.with_suffix(".jsonl").read_text())
        assert [(tuple(column["ids"]), column["text"]) for column in data["columns"]] == alone
        assert all(text.strip() in report.read_text() for _, text in alone)
