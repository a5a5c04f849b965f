"""Attention of a decode step against fp64 arithmetic, with poison in every cell that must not be read; on a GPU the kernel too."""
from __future__ import annotations

import random

import pytest
import torch
from attention_cases import check_decode, decode_case

from lora_bench.kernels.decode_attention import AttentionWork, decode_attention, decode_attention_reference

GPU = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = [
    {"heads": 4, "kv_heads": 4, "size": 64}, {"heads": 9, "kv_heads": 3, "size": 64}, {"heads": 32, "kv_heads": 8, "size": 128},
    {"heads": 8, "kv_heads": 4, "size": 256, "normed": True, "window": 40}, {"heads": 8, "kv_heads": 4, "size": 256, "softcap": 3.0},
    {"heads": 16, "kv_heads": 1, "size": 80, "rotary": 20}, {"heads": 20, "kv_heads": 1, "size": 96, "rotary": 72, "rope_start": 30},
    {"heads": 12, "kv_heads": 2, "size": 64, "window": 1}, {"heads": 12, "kv_heads": 2, "size": 128, "window": 16, "rotary": 0},
    {"heads": 6, "kv_heads": 2, "size": 6, "normed": True}, {"heads": 4, "kv_heads": 2, "size": 128, "normed": True, "softcap": 1.5,
                                                             "window": 129},
]
POSITIONS = [0, 1, 15, 16, -1, 63, 64, 200, 129, -1]


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


def _name(kind: dict) -> str:
    return "-".join(f"{key}{value}" for key, value in kind.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=_name)
def test_the_reference_is_what_it_says(kind: dict, dtype: torch.dtype, rng: random.Random) -> None:
    case = decode_case(rng, POSITIONS, dtype=dtype, **kind)
    check_decode(case, *case.run(decode_attention_reference))


def test_without_triton_the_op_is_the_reference(rng: random.Random) -> None:
    case = decode_case(rng, POSITIONS, 6, 2, 16)
    got = case.run(decode_attention, AttentionWork(len(POSITIONS), case.heads, torch.device("cpu")))
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(got, case.run(decode_attention_reference), strict=True))


def _on_gpu(case, rows: int = 0):  # noqa: ANN001, ANN202
    case = case.to("cuda")
    work = AttentionWork(max(rows, len(case.qkv)), case.heads, torch.device("cuda"))
    work.parts.fill_(float("nan"))
    work.sums.fill_(float("nan"))
    first = case.run(decode_attention, work)
    again = case.run(decode_attention, work)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, again, strict=True)), "not repeatable"
    assert not work.arrived.any()
    return first


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=GPU) for dtype in DTYPES], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=_name)
def test_the_kernel_matches_plain_arithmetic(kind: dict, dtype: torch.dtype, rng: random.Random) -> None:
    case = decode_case(rng, [*POSITIONS, rng.randint(300, 1500)], dtype=dtype, **kind)
    check_decode(case, *_on_gpu(case))


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=GPU) for dtype in DTYPES], ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_the_kernel_matches_plain_arithmetic_far_from_the_first_token(size: int, dtype: torch.dtype, rng: random.Random) -> None:
    case = decode_case(rng, [16384, 16390, 40000, 5], 4, 1, size, dtype)
    check_decode(case, *_on_gpu(case))


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=GPU) for dtype in DTYPES], ids=str)
@pytest.mark.parametrize("kv_heads, size, positions", [(4, 64, (40, 300, 2100)), (1, 64, (17000,)), (1, 128, (300, 20000))])
def test_a_row_depends_on_nothing_beside_it(
    kv_heads: int, size: int, positions: tuple[int, ...], dtype: torch.dtype, rng: random.Random,
) -> None:
    """Its bits are the same alone, among others, in wider tables, and wherever blocks lie."""
    for position in positions:
        alone = decode_case(rng, [position], 3 * kv_heads, kv_heads, size, dtype, scale=0.1)
        expected = _on_gpu(alone)[0][0].cpu()
        assert expected.isfinite().all()
        for others, width in (([9, -1, 70], 11), ([position] * (30 if position < 4000 else 6) + [3000], 300)):
            joined = decode_case(rng, [position, *others], 3 * kv_heads, kv_heads, size, dtype, scale=0.1, width=width)
            blocks = joined.rows.tables[0, : position // 16 + 1].long()
            joined.cache[:, :, blocks] = alone.cache[:, :, alone.rows.tables[0].long()]
            joined.qkv[0] = alone.qkv[0]
            assert torch.equal(_on_gpu(joined)[0][0].cpu(), expected)


@pytest.mark.parametrize("softcap", [pytest.param(softcap, marks=GPU) for softcap in (0.0, 3.0)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_kernel_hides_no_bad_query(bad: float, softcap: float, rng: random.Random) -> None:
    case = decode_case(rng, [0, 300, 40], 6, 2, 64, torch.bfloat16, softcap=softcap)
    row = rng.randrange(3)
    case.qkv[row, rng.randrange(6 * 64)] = bad
    fine = _on_gpu(case)[0].isfinite().all(1).tolist()
    assert fine == [each != row for each in range(3)]
