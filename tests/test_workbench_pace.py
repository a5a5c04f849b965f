"""The speed that stands under a reply while it is written."""
from __future__ import annotations

from lora_bench.engine import protocol as p
from lora_bench.workbench.pace import Pace
from lora_bench.workbench.reply_facts import meter_lines
from lora_bench.workbench.transcript import Version


def test_the_last_second_counts() -> None:
    now = [5.0]
    pace = Pace(clock=lambda: now[0])
    told = []
    for at, tokens in ((5.0, 1), (5.5, 40), (6.0, 81), (6.9, 90), (7.0, 91), (9.5, 96)):
        now[0] = at
        pace.take(tokens)
        told.append(pace.speed)
    assert told == [0, 0, 80, 80, 10, 2]


def test_it_is_shown_and_begins_anew_after_a_pause() -> None:
    version = Version(1, (), (), p.Sampling())
    version.take(p.RequestStarted(1, prompt_tokens=9))
    now = [0.0]
    version.pace = Pace(clock=lambda: now[0])
    for tokens in (1, 61):
        version.take(p.TextDelta(1, "a", tokens))
        now[0] += 1.5
    assert str(meter_lines(version)[0]) == "61 tok · 40 tok/s …"
    version.take(p.RequestPreempted(1, "memory", 61))
    version.take(p.RequestStarted(1, prompt_tokens=9))
    assert str(meter_lines(version)[0]) == "61 tok …"
