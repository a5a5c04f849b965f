"""The scales of a sweep, as they are typed: `0:1.5:0.25`, or one by one."""
from __future__ import annotations

from decimal import Decimal, InvalidOperation

from .arguments import MAX_SCALE

MAX_SCALES = 31
"""with scale 0, which is always beside them, as many rows as run at once"""


def parse_scales(text: str) -> tuple[float, ...]:
    """`START:END:STEP`, both ends included where the step meets them, or `0,0.5,1`. Raises ValueError with a sentence for the person."""
    ranged = ":" in text
    try:
        numbers = [Decimal(part.strip()) for part in text.split(":" if ranged else ",")]
        start, end, step = numbers if ranged else (numbers[0],) * 3
    except (ValueError, InvalidOperation):
        raise ValueError(f"{text!r} are no scales; write START:END:STEP, for example 0:1.5:0.25, or a list: 0,0.5,1") from None
    if not all(number.is_finite() and abs(number) <= MAX_SCALE for number in numbers):
        raise ValueError(f"{text!r}: scales lie between -1,000,000 and 1,000,000")
    if not ranged:
        if len(numbers) > MAX_SCALES:
            raise ValueError(f"{text!r} are {len(numbers)} scales; at most {MAX_SCALES} run together")
        return tuple(map(float, numbers))
    if not step or (end - start) / step < 0:
        raise ValueError(f"{text!r}: a step of {step} does not lead from {start} to {end}")
    steps = (end - start) / step
    if steps >= MAX_SCALES:
        raise ValueError(f"{text!r} are {int(steps) + 1:,} scales; at most {MAX_SCALES} run together, take a larger step")
    return tuple(float(start + step * i) for i in range(int(steps) + 1))
