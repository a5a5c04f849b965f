"""Comparisons as plain data: where replies part, words that differ, figures of a scored text, and the reports that hold them."""
from __future__ import annotations

import json
import random
import shlex

import fake_engine
import pytest

from lora_bench.engine.protocol import AdapterUse, Chat, Message, Sampling, Scored, ScoredRow, TokenChance
from lora_bench.workbench import comparison, word_diff
from lora_bench.workbench.comparison import (
    Column,
    Reply,
    Round,
    Setup,
    agreement,
    attribution,
    distance,
    first_divergence,
    furthest_token,
    mixes_to_score,
    mixes_without,
    sweep_columns,
)
from lora_bench.workbench.comparison_command import compare_command
from lora_bench.workbench.comparison_export import jsonl_line, markdown
from lora_bench.workbench.comparison_text import numbers
from lora_bench.workbench.scales import parse_scales
from lora_bench.workbench.word_diff import word_changes

PIRATE, JSON = AdapterUse("pirate", 0.75), AdapterUse("json", 0.3)
EVIL = "a\x1b]2;owned\x07 ```` b | <script> *x*\n# not a heading"


def row(mix: tuple, logprobs: tuple[float, ...], kl: tuple[float, ...], likeliest: tuple[int, ...]) -> ScoredRow:
    return ScoredRow(mix, logprobs, kl, (1,) * len(kl), tuple((TokenChance(i, f"t{i}", -0.1),) for i in likeliest))


def scored(*rows: ScoredRow) -> Scored:
    tokens = tuple(TokenChance(i, f"<{i}>", one) for i, one in enumerate(rows[0].logprobs))
    return Scored(1, tokens, rows)


# -- replies ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("first", "second", "parts", "equal"), [
    ((1, 2, 3), (1, 2, 3), None, 1.0), ((), (), None, 1.0), ((1, 2, 3), (1, 5, 3), (1, 2, 5), 2 / 3),
    ((1, 2), (1, 2, 7, 8), (2, None, 7), 0.5),
    ((4,), (), (0, 4, None), 0.0)])
def test_where_replies_part(first: tuple, second: tuple, parts: tuple | None, equal: float) -> None:
    assert first_divergence(first, second) == parts and agreement(first, second) == pytest.approx(equal)


def test_the_text_of_a_token_comes_from_the_scores_or_the_reply_or_is_its_number() -> None:
    told = scored(row((PIRATE,), (-1.0, -2.0), (0.0, 0.0), (0, 1)), row((), (-1.0, -2.0), (0.1, 0.2), (0, 9)))
    pieces = ("", "two")
    round = Round(Chat(()), (Reply(ids=(0, 1, 5), pieces=pieces), Reply(ids=(0, 9, 7), pieces=("", "nine"))), told)
    assert comparison.token_text(round, 1, 1) == "t9"
    assert comparison.token_text(round, 0, 1) == "<1>"
    assert comparison.token_text(round, 1, 2) == "<7>"
    without = Round(round.prompt, round.replies)
    assert comparison.token_text(without, 0, 1) == "two" and comparison.token_text(without, 0, 0) == "<0>"


# -- words -------------------------------------------------------------------------------------------
def test_changed_words_put_into_the_first_text_give_the_words_of_the_second() -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        first, second = ("".join(rng.choice(["a", "b", "cd", " ", "  ", "\n"]) for _ in range(rng.randrange(30))) for _ in range(2))
        changed, at, place = "", 0, 0
        for change in word_changes(first, second):
            assert at <= change.first_start <= change.first_end and place <= change.second_start <= change.second_end
            assert first[at:change.first_start].split() == second[place:change.second_start].split()
            changed += first[at:change.first_start] + " " + second[change.second_start:change.second_end] + " "
            at, place = change.first_end, change.second_end
        assert (changed + first[at:]).split() == second.split(), (first, second)
        assert bool(word_changes(first, second)) == (word_diff._WORD.findall(first) != word_diff._WORD.findall(second))


def test_texts_that_repeat_one_word_endlessly_are_one_change() -> None:
    first, second = (" ".join(["ha", tail] * 4000) for tail in ("ho", "hi"))
    (change,) = word_changes(first, second)  # difflib alone takes minutes
    assert (change.first_start, change.second_start) == (3, 3)


# -- scales --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "expected"), [
    ("0:1.5:0.25", (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5)), ("0:1:0.3", (0, 0.3, 0.6, 0.9)), ("1:-1:-1", (1, 0, -1)), ("2:2:1", (2,)),
    ("0 : 0.3 : 0.1", (0, 0.1, 0.2, 0.3))])
def test_scales_of_a_sweep(text: str, expected: tuple[float, ...]) -> None:
    assert parse_scales(text) == expected


@pytest.mark.parametrize(("text", "why"), [
    ("", "START:END:STEP"), ("0:1", "START:END:STEP"), ("0:1:x", "START:END:STEP"), ("0:1:0", "does not lead"), ("0:1:-1", "does not lead"),
    ("0:nan:1", "between"), ("0:inf:1", "between"), ("0:1e7:1", "between"),
    ("0:100:1", "101 scales"), ("0:1:1e-300", "scales; at most 31")])
def test_scales_that_are_none(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_scales(text)


def test_the_columns_of_a_sweep_begin_with_the_scale_that_the_rest_are_compared_with() -> None:
    columns = sweep_columns("pirate", (1, 0.5, 0, -1), (JSON,))
    assert columns[0].mix == (JSON,) and [column.label for column in columns] == ["0.00", "-1.00", "0.50", "1.00"]
    assert columns[2].mix == (AdapterUse("pirate", 0.5), JSON)
    assert [columns[i].label for i in comparison.by_scale(columns)] == ["-1.00", "0.00", "0.50", "1.00"]


# -- figures -------------------------------------------------------------------------------------------
def test_distance_of_mixes_on_one_text() -> None:
    told = scored(row((PIRATE,), (-1.0, -2.0, -3.0), (0.0, 0.0, 0.0), (0, 1, 2)), row((), (-1.5, -2.0, -9.0), (0.5, 0.25, 2.25), (0, 4, 2)))
    assert distance(told, 1) == pytest.approx((1.0, 2.25, 2, 2 / 3))
    assert furthest_token(told, 2) == 2 and furthest_token(told, 1) == 0
    assert distance(Scored(1, (), (row((), (), (), ()),) * 2), 1) is None


def test_leaving_out_one_adapter_tells_what_it_did_to_a_token() -> None:
    mix = (PIRATE, JSON, AdapterUse("caps", 0.0))
    assert mixes_without(mix) == (("pirate", (JSON, mix[2])), ("json", (PIRATE, mix[2])))
    columns = (Column("A", (PIRATE, JSON)), Column("B", ()), Column("C", (PIRATE,)))
    assert mixes_to_score(columns) == ((PIRATE, JSON), (), (PIRATE,), (JSON,))
    told = scored(*(row(one, (value,), (0.0,), (0,)) for one, value in zip(mixes_to_score(columns), (-1.0, -6.0, -2.0, -5.0), strict=True)))
    assert attribution(told, (PIRATE, JSON), 0) == (("pirate", pytest.approx(4.0)), ("json", pytest.approx(1.0)))
    assert attribution(told, (PIRATE,), 0) == (("pirate", pytest.approx(4.0)),)
    assert attribution(told, (), 0) == () and attribution(told, (AdapterUse("robot"),), 0) == ()


# -- reports -------------------------------------------------------------------------------------------
@pytest.fixture
def setup() -> Setup:
    adapters = (fake_engine.adapter("pirate"), fake_engine.adapter("js|on"))
    columns = (Column("A", (PIRATE, AdapterUse("js|on", 0.3))), Column("B", ()))
    return Setup(fake_engine.model(), adapters, columns, Sampling(temperature=0.8, seed=7, stop=("\n\n",)))


def one_round(setup: Setup) -> Round:
    mixes = mixes_to_score(setup.columns)
    told = scored(*(row(mix, (-1.0 - i, -2.0), (0.1 * i, 1.5 * i), (0, 5)) for i, mix in enumerate(mixes)))
    replies = Reply(EVIL, (0, 1), ("a", "b"), "stop"), Reply("a c", (0, 5), ("a", "c"), "length")
    return Round(Chat((Message("system", "be brief"), Message("user", EVIL)), opening="<x>\n"), replies, told)


def test_lines_for_programs_hold_all_that_it_takes_to_repeat_it(setup: Setup) -> None:
    line = jsonl_line(setup, one_round(setup))
    assert line.endswith("\n") and line.count("\n") == 1
    data = json.loads(line)
    assert data["prompt"]["messages"][1]["content"] == EVIL and data["sampling"]["seed"] == 7 and data["sampling"]["top_p"] == 1.0
    assert data["adapters"][0]["digest"] == setup.adapters[0].digest and data["model"]["name"] == setup.model.name
    first, second = data["columns"]
    assert first["text"] == EVIL and first["mix"] == [{"name": "pirate", "scale": 0.75}, {"name": "js|on", "scale": 0.3}]
    assert second["first_divergence"] == {"token": 1, "first": 1, "second": 5} and second["agreement"] == 0.5
    assert second["on_first_text"]["max_at"] == 1 and len(data["scored"]["rows"]) == 4


def test_a_failed_column_has_no_figures(setup: Setup) -> None:
    round = Round(Chat(()), (Reply("x", (1,)), Reply(failed="no room")), None, "no room either")
    assert "agreement" not in json.loads(jsonl_line(setup, round))["columns"][1]
    assert numbers(setup, round) == []
    assert "no room" in markdown(setup, [round]) and "not scored: no room either" in markdown(setup, [round])


def test_figures_in_words(setup: Setup) -> None:
    lines = numbers(setup, one_round(setup))
    assert lines[0] == "A–B: first difference at token 1, '<1>' and 't5'; 50% of the tokens equal"
    assert lines[1] == "KL(A‖B) on A's text: mean 0.800, max 1.500 nats at token 1 '<1>'; same likeliest token at 100%"
    assert lines[2].startswith("A, token 1 '<1>'") and "pirate +0.00" in lines[2] and len(lines) == 3


def test_a_report_for_people_keeps_hostile_text_inside_its_blocks(setup: Setup) -> None:
    text = markdown(setup, [one_round(setup)], command=compare_command(setup, [one_round(setup).prompt]))
    assert "\x1b" not in text and "`js\\|on`" in text and setup.adapters[0].digest in text and "seed 7" in text
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "# Comparison", r"## 1. a␛\]2;owned␇ \`\`\`\` b \| \<script\> \*x\*⏎\# not a heading", "# not a heading", "# not a heading"]
    fences = [i for i, line in enumerate(lines) if line == "`````"]
    inside = [i for i, line in enumerate(lines) if line == "# not a heading"]
    assert len(fences) == 4 and fences[0] < inside[0] < fences[1] and fences[2] < inside[1] < fences[3]


def test_the_command_asks_the_same_again(setup: Setup) -> None:
    words = compare_command(setup, [one_round(setup).prompt])
    assert "--a pirate=/adapters/pirate:0.75 --a 'js|on=/adapters/js|on:0.3' --b base" in words, words
    assert "-f prompts.jsonl" in words and "--seed 7" in words and r"--stop '\n\n'" in words
    plain = Chat((Message("system", "be brief"), Message("user", "it's\nlong")), opening="<x>\n")
    words = shlex.split(compare_command(setup, [plain]))
    assert words[words.index("-s"):][:6] == ["-s", "be brief", "-p", "it's\nlong", "--opening", r"<x>\n"]
    assert "-f prompts.jsonl" in compare_command(setup, [plain] * 2)
