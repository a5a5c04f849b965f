"""Blind votes on the compare screen."""
from __future__ import annotations

import random
from collections import Counter

from bench_pilot import bench_app, running, say, screen_text, settled
from compare_pilot import A, B, asked, compare_of, to_columns

from lora_bench.engine import protocol as p
from lora_bench.workbench.votes import VoteFile
from lora_bench.workbench.widgets.compare_columns import CompareColumn
from lora_bench.workbench.widgets.prompt import Prompt
from lora_bench.workbench.widgets.token_view import TokenView


async def test_a_blind_vote_hides_the_names_until_it_is_given_and_is_kept() -> None:
    app = bench_app(*[A, B] * 4)
    votes = Counter()
    async with running(app, 80, 24) as pilot:
        await pilot.press("f3")
        await settled(pilot)
        await pilot.press("tab")
        await settled(pilot)
        assert "b Blind" in screen_text(app).splitlines()[-1]
        await pilot.press("b")
        await settled(pilot)
        assert "b Names" in screen_text(app).splitlines()[-1]
        run = await asked(pilot)
        shown = screen_text(app)
        assert "×0.75" not in shown and "base" not in shown.replace("base: Ctrl", "") and "KL(" not in shown and "reused" not in shown
        columns = await to_columns(pilot)
        last = screen_text(app).splitlines()[-1]
        assert all(key in last for key in ("1 Left", "2 Right", "3 Tie", "4 Both bad", "b Names"))
        assert "Sweep" not in last and "Mix" not in last, "what cannot be now has no key"
        await pilot.press("e", "k", "w", "m")
        await settled(pilot)
        assert "vote first" in screen_text(app) and "×0.75" not in screen_text(app)
        assert not app.screen.query_one(TokenView).display and isinstance(app.screen.focused, CompareColumn)
        assert [side.text for side in columns.sides] == [run.rows[place].text for place in run.order]
        for key in "1234":
            if votes:
                run = await asked(pilot, f"and {key}?")
                await to_columns(pilot)
            await pilot.press(key)
            await settled(pilot)
            left, right = ("A", "B") if run.order == (0, 1) else ("B", "A")
            votes[{"1": left, "2": right, "3": "tie", "4": "bad"}[key]] += 1
            tally = VoteFile(app.control.comparing.votes.path).counts(run.tally)[0]
            assert (tally.first, tally.second, tally.tie, tally.bad) == tuple(votes[side] for side in ("A", "B", "tie", "bad"))
            assert "A  pirate ×0.75" in screen_text(app) and f"votes A {votes['A']} · B {votes['B']}" in screen_text(app)
        last = screen_text(app).splitlines()[-1]
        assert "Left" not in last and "Sweep" in last
        await pilot.press(key)
        await settled(pilot)
        assert VoteFile(app.control.comparing.votes.path).counts(run.tally)[0].total == 4, "one vote for a pair of replies"


async def test_blind_sides_are_drawn_anew_and_pairs_by_lot(seed: int) -> None:
    app = bench_app()
    app.control.comparing._rng = random.Random(seed)
    async with running(app) as pilot:
        await pilot.press("f3")
        await settled(pilot)
        await pilot.press("tab", "a", "space", "escape")
        await settled(pilot)
        comparing = app.control.comparing
        compare_of(app).blind = True
        orders, pairs = set(), set()
        for _ in range(40):
            assert comparing.ask("x", "", p.Sampling())
            for row in compare_of(app).run.rows:
                row.phase = "done"
            orders.add(compare_of(app).run.order)
            pairs.add(tuple(column.label for column in compare_of(app).run.setup.columns))
        assert orders == {(0, 1), (1, 0)} and pairs == {("A", "B"), ("A", "C"), ("B", "C")}


async def test_columns_that_compute_the_same_are_no_pair_to_vote_on() -> None:
    app = bench_app(*[A, B] * 9)
    async with running(app) as pilot:
        await pilot.press("f3")
        await settled(pilot)
        await pilot.press("tab", "a", "escape", "b")  # C is as A
        await settled(pilot)
        comparing, compare = app.control.comparing, compare_of(app)
        for _ in range(8):
            assert comparing.ask("x", "", p.Sampling())
            assert "B" in [column.label for column in compare.run.setup.columns]
            compare.run = None
        compare.lanes[1].board.take(compare.lanes[0].board.now)
        await say(pilot, "who is better?")
        assert "nothing to vote on" in screen_text(app) and compare.run is None
        assert app.screen.query_one(Prompt).text == "who is better?", "it waits there"


async def test_a_vote_that_was_not_blind_or_too_early_is_refused() -> None:
    app = bench_app(A, B)
    async with running(app) as pilot:
        await asked(pilot)
        await to_columns(pilot)
        await pilot.press("1")
        await settled(pilot)
        assert "votes are blind: b" in screen_text(app)
        await pilot.press("b")
        await say(pilot, "more")
        await to_columns(pilot)
        await pilot.press("1")
        await settled(pilot)
        assert "vote when both replies are there" in screen_text(app) and compare_of(app).run.hidden
        assert not app.control.comparing.votes.path.exists()
        number = compare_of(app).run.rows[0].request_id
        app.engine.emit(*(p.RequestFailed(number + i, "no room") for i in range(2)))
        await settled(pilot)
        assert "nothing to vote on" in screen_text(app) and "✗ no room" in screen_text(app) and "A  pirate" in screen_text(app)
