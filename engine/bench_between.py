"""What the engine's loop takes between two steps of several replies: its own work, while the device has none."""
from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .bench_loop import TimedLoop
from .protocol import Generate, Mix, ModelInfo, RequestFinished, Sampling, StepFinished, TokenIds

FIRST_NUMBER = 1_000_000
"""of the requests here"""
PROMPT_TOKENS, TOKENS = 16, 64
LEAST_STEPS = 5


def between_steps(loop: TimedLoop, info: ModelInfo, mixes: Sequence[Mix]) -> dict[str, Any]:
    """Milliseconds from the end of a step of one reply under each of `mixes` to the begin of the next: the time from step to step less
    that of the step itself, its gaps not counted. `median` and `greatest` are None when replies ended before there were enough steps.

    Raises NotMeasured.
    """
    after, draw = loop.heard, random.Random(0)
    loop.put(*(Generate(FIRST_NUMBER + place, TokenIds(tuple(draw.randrange(info.vocab) for _ in range(PROMPT_TOKENS))), mix,
                        Sampling(max_tokens=TOKENS)) for place, mix in enumerate(mixes)))
    for place in range(len(mixes)):
        loop.wait(RequestFinished, after, lambda when, event, place=place: event.request_id == FIRST_NUMBER + place)
    found = [(till - since) * 1e3 - (step.ms - step.ms_by_op.get("gaps", 0.0))
             for (since, before), (till, step) in pairwise(loop.all(StepFinished, after))
             if _of_replies(before, len(mixes)) and _of_replies(step, len(mixes))]
    enough = len(found) >= LEAST_STEPS
    return {"replies": len(mixes), "steps": len(found), "median_ms": round(statistics.median(found), 4) if enough else None,
            "greatest_ms": round(max(found), 4) if enough else None}


def _of_replies(step: StepFinished, count: int) -> bool:
    return step.decode_tokens == count and step.prefill_tokens == 0
