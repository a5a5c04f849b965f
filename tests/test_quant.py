"""Dequantisation against the gguf package, bit for bit, on random blocks."""
from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from lora_bench.engine.weights.entry import BLOCKS, READABLE
from lora_bench.engine.weights.gguf import TYPES
from lora_bench.kernels.quant import QUANT_TYPES, dequantize, swap_byte_order_

KINDS = sorted(QUANT_TYPES)
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
          "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
"""where the float16 scales of a block lie"""
HOSTILE_HALVES = torch.tensor([0x0000, 0x8000, 0x0001, 0x83ff, 0x0400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0xfe01], dtype=torch.int32)
"""zeros, subnormal, smallest normal, largest, infinite, NaN"""


def random_blocks(kind: str, count: int, hostile: bool) -> torch.Tensor:
    """Blocks of any bytes; their scales are finite numbers, subnormal ones included, or `hostile` ones."""
    blocks = torch.randint(0, 256, (count, QUANT_TYPES[kind].block_bytes), dtype=torch.uint8)
    for low in HALVES.get(kind, ()):
        scales = (torch.randn(count) * 10.0 ** torch.randint(-7, 3, (count,))).to(torch.float16)
        if hostile:
            scales = HOSTILE_HALVES[torch.randint(0, len(HOSTILE_HALVES), (count,))].to(torch.int16).view(torch.float16)
        blocks[:, low:low + 2] = scales.view(torch.uint8).view(count, 2)
    if hostile and kind == "MXFP4":
        blocks[:, 0] = torch.tensor([0, 1, 2, 3, 127, 254, 255], dtype=torch.uint8)[torch.randint(0, 7, (count,))]
    return blocks


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_gguf_bit_for_bit(kind: str, hostile: bool, seed: int) -> None:
    blocks = random_blocks(kind, 257, hostile)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]).astype(np.float32).reshape(-1)
    ours = dequantize(blocks.view(-1), kind)
    assert ours.dtype == torch.float32 and ours.numel() == 257 * QUANT_TYPES[kind].block_elements
    number = ~np.isnan(expected)
    assert np.array_equal(ours.numpy().view(np.int32)[number], expected.view(np.int32)[number])
    assert np.array_equal(np.isnan(ours.numpy()), ~number)


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_byte_order(kind: str, seed: int) -> None:
    """Swapping is its own inverse, and turns round what numpy reads as numbers of several bytes."""
    blocks = random_blocks(kind, 5, False)
    swapped = swap_byte_order_(blocks.clone().view(-1), kind).view(5, -1)
    for low in HALVES.get(kind, ()):
        there = np.ascontiguousarray(swapped[:, low:low + 2].numpy()).view(">f2")
        assert np.array_equal(there, np.ascontiguousarray(blocks[:, low:low + 2].numpy()).view("<f2"), equal_nan=True)
    if QUANT_TYPES[kind].block_elements == 1:
        width = f"{QUANT_TYPES[kind].block_bytes}"
        assert np.array_equal(swapped.numpy().view(">u" + width), blocks.numpy().view("<u" + width))
    assert torch.equal(swap_byte_order_(swapped.clone().view(-1), kind), blocks.view(-1))
    apart = sum(width for _, width in QUANT_TYPES[kind].wide)
    assert ((swapped != blocks).sum(1) <= apart).all()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_undoes_quantisation_within_its_step(kind: str, seed: int) -> None:
    weights = torch.randn(64, 96)
    packed = quants.quantize(weights.numpy(), gguf.GGMLQuantizationType[kind])
    back = dequantize(torch.from_numpy(packed).reshape(-1), kind).view(64, 96)
    steps = {"Q8_0": 1 / 127, "Q4_0": 1 / 4, "Q4_1": 1 / 7}
    assert (back - weights).abs().max() <= weights.abs().max() * steps[kind]


def test_a_torn_block_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 34 bytes, got 35"):
        dequantize(torch.zeros(35, dtype=torch.uint8), "Q8_0")


@pytest.mark.parametrize("kind", KINDS)
def test_no_blocks_are_no_numbers(kind: str) -> None:
    assert dequantize(torch.zeros(0, dtype=torch.uint8), kind).shape == (0,)


def test_tables_agree_with_each_other_and_with_gguf() -> None:
    assert set(QUANT_TYPES) == READABLE
    assert all(BLOCKS[kind] == (entry.block_elements, entry.block_bytes) for kind, entry in QUANT_TYPES.items())
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert {number: name for number, name in TYPES.items() if number in known} == {n: name for n, name in known.items() if n in TYPES}
    for number, name in known.items():
        if number in TYPES and name != "Q8_1":  # never in files; the package counts its scales as float32, ggml as float16
            assert BLOCKS[name] == tuple(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]), name
