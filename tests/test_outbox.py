"""Events leave in the order in which they happened, whenever they are sent."""
from __future__ import annotations

import random

from lora_bench.engine.outbox import Outbox
from lora_bench.engine.protocol import CommandFailed, Event


def test_order_is_kept_and_each_is_made_once_and_late(seed: int) -> None:
    sent: list[Event] = []
    made: list[int] = []
    outbox, draw = Outbox(sent.append), random.Random(seed)

    def make(number: int) -> Event:
        made.append(number)
        return CommandFailed(str(number))

    waiting = 0
    for number in range(300):
        match draw.randrange(3):
            case 0:
                outbox(CommandFailed(str(number)))
                waiting = 0
            case 1:
                outbox.later(lambda number=number: make(number))
                waiting += 1
            case 2:
                outbox.flush()
                outbox(CommandFailed(str(number)))
                waiting = 0
        assert len(sent) == number + 1 - waiting
    outbox.flush()
    assert [event.message for event in sent] == [str(number) for number in range(300)] and made == sorted(set(made))
