"""DoRA's lengths and gains, vectors of adapters, and whole linears with phases, against dense sums in fp64."""
from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lora_bench.engine.active import Span, rows_acting
from lora_bench.engine.adapters.adapter import LoraPair
from lora_bench.engine.dora_rows import KEPT_SCALES, BaseSquares, DoraRows, linear_stats
from lora_bench.engine.mix import ActiveUse, TokenMix
from lora_bench.engine.models.acting import Deltas, Linear, linear
from lora_bench.engine.routing import RoutingCache
from lora_bench.engine.slots import FusedPart, Slot, SlotContent
from lora_bench.kernels import weights as kernel_weights
from lora_bench.kernels.dora import (
    LowRank,
    RowStats,
    column_products,
    column_squares,
    delta_squares,
    row_gains,
    row_products,
    row_squares,
    scale_rows,
)
from lora_bench.kernels.lora import RowVectors, add_vectors_

PLACE = (0, "o_proj")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the borders of chunks lie inside of small matrices."""
    monkeypatch.setattr(kernel_weights, "CHUNK_ELEMENTS", 64)


@pytest.mark.parametrize("rows, inputs", [(1, 1), (7, 5), (33, 19), (5, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_the_base(seed: int, rows: int, inputs: int, dtype: torch.dtype) -> None:
    weight = torch.randn(rows, inputs).to(dtype)
    exact = weight.double()
    start = random.randrange(rows)
    rank = random.choice([3, 30])
    parts = [LowRank(s, torch.randn(rank, inputs), torch.randn(n, rank), 0.7) for s, n in ((0, start), (start, rows - start)) if n]
    torch.testing.assert_close(row_squares(weight), exact.square().sum(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(column_squares(weight), exact.square().sum(0), rtol=1e-6, atol=1e-6)
    for part, got in zip(parts, row_products(weight, parts), strict=True):
        change = part.scaling * part.b.double() @ part.a.double()
        torch.testing.assert_close(got, (exact[part.start:part.start + len(change)] * change).sum(1), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(delta_squares(part), change.square().sum(1), rtol=1e-5, atol=1e-6)
    part = LowRank(0, torch.randn(2, rows), torch.randn(inputs, 2), -1.3)
    change = part.scaling * part.b.double() @ part.a.double()
    torch.testing.assert_close(column_products(weight, part), (exact * change.T).sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 0.5, -2.0, 1e-3, 1e6])
def test_gains_at_any_scale(seed: int, scale: float) -> None:
    weight, a, b = torch.randn(9, 14), torch.randn(3, 14), torch.randn(9, 3)
    weight[4], b[4] = 0, 0
    part = LowRank(0, a, b, 1.5)
    magnitude = torch.rand(9).double() + 0.1
    stats = RowStats(magnitude, row_squares(weight), row_products(weight, [part])[0], delta_squares(part))
    lengths = (weight.double() + scale * 1.5 * (b.double() @ a.double())).norm(dim=1)
    lengths[4] = magnitude[4]  # a row of zeros: its gain is 1, it stays zero
    torch.testing.assert_close(row_gains(stats, scale).double(), magnitude / lengths, rtol=1e-4, atol=1e-7)


def test_only_the_rows_of_dora_modules_have_gains_and_the_last_scales_are_kept(seed: int) -> None:
    weight = torch.randn(12, 6)
    pairs = [(0, LoraPair(torch.randn(2, 6), torch.randn(5, 2), 1.0)),
             (5, LoraPair(torch.randn(2, 6), torch.randn(3, 2), 1.0, magnitude=torch.rand(3)))]
    rows = DoraRows({PLACE: linear_stats(PLACE, weight, pairs, BaseSquares())})
    gains = rows.gains(0.5)[PLACE]
    assert torch.equal(gains[:5], torch.ones(5)) and torch.equal(gains[8:], torch.ones(4)) and not (gains[5:8] == 1).any()
    assert rows.gains(0.5) is rows.gains(0.5)
    for scale in range(1, KEPT_SCALES + 2):
        rows.gains(float(scale))
    torch.testing.assert_close(rows.gains(0.5)[PLACE], gains)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_scaled_around_their_bias(seed: int, dtype: torch.dtype) -> None:
    y, gains, bias = torch.randn(4, 7).to(dtype), torch.rand(7), torch.randn(7).to(dtype)
    expected = bias.double() + gains.double() * (y.double() - bias.double())
    torch.testing.assert_close(scale_rows(y, gains, bias).double(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(scale_rows(y, gains, None).double(), gains.double() * y.double(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tokens", [1, 5, 18])
def test_vectors_are_added_where_they_have_weight(seed: int, tokens: int) -> None:
    y, weights, values = torch.randn(tokens, 11), torch.randn(tokens, 4), torch.randn(2, 11)
    weights[0] = 0
    before = y.clone()
    add_vectors_(y, weights, RowVectors(torch.tensor([1, 3]), values))
    torch.testing.assert_close(y.double(), before.double() + weights[:, [1, 3]].double() @ values.double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(y[0], before[0])


def _dense(x: Tensor, weight: Tensor, bias: Tensor, pairs: dict[str, LoraPair], mix: list[ActiveUse], position: int) -> Tensor:
    """One token by PEFT's rule, adapter by adapter, in fp64."""
    y = x @ weight.T + bias
    for use in mix:
        if position < use.start:
            continue
        pair = pairs[use.name]
        change = use.scale * pair.scaling * (pair.b.double() @ pair.a.double())
        if pair.magnitude is None:
            y = y + x @ change.T
            continue
        gain = pair.magnitude.double() / (weight + change).norm(dim=1)
        y = y + (gain - 1) * (y - bias) + gain * (x @ change.T)
    return y


@pytest.mark.parametrize("case", range(12))
def test_a_linear_with_phases_in_a_mixed_batch(seed: int, case: int) -> None:
    rng = random.Random(seed)
    d_in, d_out = rng.randint(3, 20), rng.randint(3, 20)
    weight, bias = torch.randn(d_out, d_in), torch.randn(d_out)
    pairs = {}
    for name in "abcde":
        r = rng.randint(1, 5)
        dora = torch.rand(d_out) + 0.5 if name in "cde" else None
        pairs[name] = LoraPair(torch.randn(r, d_in), torch.randn(d_out, r), rng.choice([0.5, 2.0]), magnitude=dora)
    slots, squares = [], BaseSquares()
    for index, (name, pair) in enumerate(pairs.items()):
        dora = DoraRows({PLACE: linear_stats(PLACE, weight, [(0, pair)], squares)}) if pair.magnitude is not None else None
        slots.append(Slot(index))
        slots[-1].fill(name, SlotContent({PLACE: FusedPart(pair.a, ((pair.b * pair.scaling).T.contiguous(),))}, 0, pair.rank, dora=dora))
    routing = RoutingCache(1, {PLACE: [d_out], (1, "lm_head"): [9]}, torch.device("cpu")).get(slots)
    spans = []
    for _ in range(rng.randint(1, 6)):
        names = rng.sample("abcde", rng.randint(0, 5))
        mix = tuple(ActiveUse(name, rng.choice([1.0, -0.5, 0.5]), rng.choice([0, 0, 3])) for name in names)
        spans.append(Span(TokenMix((), mix), rng.randint(0, 4), rng.randint(1, 5)))
    x = torch.randn(sum(span.count for span in spans), d_in)
    deltas = Deltas(routing.layers[0], rows_acting(routing, spans), 0)
    got = linear(x, Linear("o_proj", weight, bias), deltas, lambda op: None)
    row = 0
    for span in spans:
        for position in range(span.position, span.position + span.count):
            expected = _dense(x[row].double(), weight.double(), bias.double(), pairs, list(span.mix.active), position)
            torch.testing.assert_close(got[row].double(), expected, rtol=1e-3, atol=1e-3)
            if not any(position >= use.start for use in span.mix.active):
                assert torch.equal(got[row], linear(x, Linear("o_proj", weight, bias), Deltas({}, None), lambda op: None)[row])
            row += 1
