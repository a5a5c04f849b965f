"""Drawing tokens in one launch, whatever each row is drawn by.

A row's columns are parted among programs. Where they need of each other what they found, they meet: each stores its part, counts itself in
and waits until all have; each then adds the parts of all in the same order. A grid starts in order, so those of a row that wait are there.
"""
# No `from __future__ import annotations` here: Triton reads the annotations of kernels.
from .triton_compat import tl, triton


@triton.jit
def _logits(logits, seen, n, vocab, seen_end, penalty, COLUMNS: tl.constexpr):
    """(fp32 logits at n behind the penalty, -inf where the row has no such id; whether they are finite where it has)"""
    inside = n < COLUMNS
    z = tl.load(logits + n, mask=inside, other=0.0).to(tl.float32)
    if penalty != 1.0:
        old = tl.load(seen + n, mask=n < seen_end, other=0) != 0
        z = tl.where(old, tl.where(z > 0, tl.div_rn(z, penalty), z * penalty), z)
    own = n < vocab
    return tl.where(own, z, float("-inf")), (tl.abs(z) < float("inf")) | ~own


@triton.jit
def _arrive(counter):
    """How many came before, once all that this program stored can be seen by those that come behind."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def _meet(counter, wanted):
    _arrive(counter)
    arrived = tl.atomic_add(counter, 0, sem="acquire")
    while arrived < wanted:
        arrived = tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def _number(order):
    """The fp32 number at a place [0, 2^32) in the order of all of them; -inf for what lies before it."""
    signed = (order - 2147483648).to(tl.int32)
    number = (signed ^ ((signed >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(order <= 0x007FFFFF, float("-inf"), number)


@triton.jit
def _least(
    logits, seen, vocab, seen_end, penalty, most, floor, temperature, target, shares, counter, met, start, end, turns,
    BY_MASS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """The largest number c for which the logits >= c, of those >= floor, are `target` many or that share of the mass; 4 bits a turn."""
    j = tl.arange(0, 16)
    part = tl.arange(0, PARTS)
    low = tl.full((), 0, tl.int64)
    for turn in tl.range(0, turns, num_stages=1):
        shift = 28 - 4 * turn
        marks = _number(low + (j.to(tl.int64) << shift))
        above = tl.zeros((BLOCK, 16), tl.float32)
        for first in tl.range(start, end, BLOCK, num_stages=1):
            z, _ = _logits(logits, seen, first + tl.arange(0, BLOCK), vocab, seen_end, penalty, COLUMNS)
            counted = (z >= floor) & (z > float("-inf"))
            weight = tl.exp((z - most) / temperature) if BY_MASS else tl.full((BLOCK,), 1.0, tl.float32)
            above += tl.where(counted[:, None] & (z[:, None] >= marks[None, :]), weight[:, None], 0.0)
        mine = tl.program_id(0) % PARTS
        into = shares + turn * (PARTS * 16)
        tl.store(into + mine * 16 + j, tl.sum(above, 0))
        met += PARTS
        _meet(counter, met)
        found = tl.sum(tl.load(into + part[:, None] * 16 + j[None, :], cache_modifier=".cg"), 0)
        if BY_MASS:
            target = tl.where(turn == 0, target * tl.sum(tl.where(j == 0, found, 0.0), 0), target)
        low += tl.sum(((found >= target) & (j > 0)).to(tl.int64), 0) << shift
    return _number(low), met


@triton.jit
def _mixed(x):
    """The finaliser of splitmix64; shifts of the signed numbers are made logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _gumbel(key, n):
    """sampling.gumbel at ids n, fp64."""
    bits = _mixed(n.to(tl.int64) * -7046029254386353131 + key)
    uniform = (((bits >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _largest(values, PARTS: tl.constexpr):
    """The largest value of all parts."""
    return tl.max(tl.load(values + tl.arange(0, PARTS), cache_modifier=".cg"), 0)


@triton.jit
def _id_of_largest(values, ids, PARTS: tl.constexpr):
    """The lowest id of those that have the largest value; -1 where a part has that."""
    part = tl.arange(0, PARTS)
    value = tl.load(values + part, cache_modifier=".cg")
    number = tl.load(ids + part, cache_modifier=".cg")
    best = tl.min(tl.where(value == tl.max(value, 0), number, 0x7FFFFFFF), 0)
    return tl.where(tl.min(number, 0) < 0, -1, best)


@triton.jit
def draw_kernel(
    logits, rows, tokens, values, ids, shares, counters, logits_row,
    COLUMNS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
    TURNS: tl.constexpr,
):
    """tokens [rows] int64: of each row of logits by its settings in rows [rows, WORDS] (DeviceSampler), -1 where one of its own is not
    finite.

    values fp64 and ids int32 [rows, 2, PARTS]; shares fp32 [rows, 2, 8, PARTS, 16]; counters int32 [rows], zero between launches.
    TURNS of 4 bits are all that logits of this dtype have, as fp32.
    """
    row = tl.program_id(0) // PARTS
    mine = tl.program_id(0) % PARTS
    logits += row.to(tl.int64) * logits_row
    counter = counters + row
    values += row * (2 * PARTS)
    ids += row * (2 * PARTS)
    shares += row * (2 * 8 * PARTS * 16)
    words = rows + row * WORDS
    temperature = tl.load(words).to(tl.float64, bitcast=True)
    least_score = tl.load(words + 1).to(tl.float64, bitcast=True)
    top_p = tl.load(words + 2).to(tl.float64, bitcast=True)
    penalty = tl.load(words + 3).to(tl.float64, bitcast=True).to(tl.float32)
    key = tl.load(words + 4)
    vocab = tl.load(words + 5)
    top_k = tl.load(words + 6)
    seen = tl.load(words + 7).to(tl.pointer_type(tl.int8))
    seen_end = tl.load(words + 8)
    start = mine * PART
    end = tl.minimum(start + PART, COLUMNS)

    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = start + tl.arange(0, BLOCK)
    bad = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(start, end, BLOCK, num_stages=1):
        n = first + tl.arange(0, BLOCK)
        z, finite = _logits(logits, seen, n, vocab, seen_end, penalty, COLUMNS)
        bad |= (~finite).to(tl.int32)
        at = tl.where(z > top, n, at)
        top = tl.maximum(top, z)
    most = tl.max(top, 0)
    best = tl.where(tl.max(bad, 0) > 0, -1, tl.min(tl.where(top == most, at, 0x7FFFFFFF), 0))
    tl.store(values + mine, most.to(tl.float64))
    tl.store(ids + mine, best)
    if temperature == 0.0:
        if _arrive(counter) == PARTS - 1:
            token = _id_of_largest(values, ids, PARTS)
            tl.store(tokens + row, token.to(tl.int64))
            tl.store(counter, 0)
    else:
        met = PARTS
        _meet(counter, met)
        wide = _largest(values, PARTS)
        greedy = _id_of_largest(values, ids, PARTS)
        most = wide.to(tl.float32)
        floor = tl.full((), float("-inf"), tl.float32)
        turns = tl.where(penalty == 1.0, TURNS, 8)
        soft = tl.maximum(temperature, 1e-30).to(tl.float32)
        if top_k > 0:
            kept, met = _least(logits, seen, vocab, seen_end, penalty, most, floor, soft, top_k.to(tl.float32), shares, counter, met, start,
                               end, turns, False, COLUMNS, PARTS, BLOCK)
            floor = tl.where(kept <= most, kept, most)
        if top_p < 1.0:
            kept, met = _least(logits, seen, vocab, seen_end, penalty, most, floor, soft, top_p.to(tl.float32),
                               shares + 8 * PARTS * 16, counter, met, start, end, turns, True, COLUMNS, PARTS, BLOCK)
            floor = tl.maximum(floor, tl.where(kept <= most, kept, most))
        high = tl.full((BLOCK,), float("-inf"), tl.float64)
        at = start + tl.arange(0, BLOCK)
        for first in tl.range(start, end, BLOCK, num_stages=1):
            n = first + tl.arange(0, BLOCK)
            z, _ = _logits(logits, seen, n, vocab, seen_end, penalty, COLUMNS)
            kept_here = (z >= floor) & (z > float("-inf"))
            if tl.max(kept_here.to(tl.int32), 0) > 0:
                scaled = (z.to(tl.float64) - wide) / temperature
                score = tl.where(kept_here & (scaled >= least_score), scaled + _gumbel(key, n), float("-inf"))
                at = tl.where(score > high, n, at)
                high = tl.maximum(high, score)
        drawn = tl.max(high, 0)
        tl.store(values + PARTS + mine, drawn)
        tl.store(ids + PARTS + mine, tl.min(tl.where(high == drawn, at, 0x7FFFFFFF), 0))
        if _arrive(counter) == met + PARTS - 1:
            token = _id_of_largest(values + PARTS, ids + PARTS, PARTS)
            tl.store(tokens + row, tl.where(greedy < 0, greedy, token).to(tl.int64))
            tl.store(counter, 0)
