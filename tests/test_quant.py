"""Dequantisation against the gguf package, bit for bit, on random blocks."""
from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from lora_bench.engine.weights.entry import BLOCKS, READABLE
from lora_bench.engine.weights.gguf import TYPES
from lora_bench.kernels.quant import QUANT_TYPES, dequantize

KINDS = sorted(QUANT_TYPES)
SCALE_BYTES = {"Q8_0": (0, 1), "Q4_0": (0, 1), "Q4_1": (0, 1, 2, 3)}


def random_blocks(kind: str, count: int) -> torch.Tensor:
    """Blocks whose scales are finite numbers, subnormal ones included; the rest is any byte."""
    size = QUANT_TYPES[kind].block_bytes
    blocks = torch.randint(0, 256, (count, size), dtype=torch.uint8)
    for low in SCALE_BYTES.get(kind, ())[::2]:
        scales = (torch.randn(count) * 10.0 ** torch.randint(-7, 3, (count,))).to(torch.float16)
        blocks[:, low:low + 2] = scales.view(torch.uint8).view(count, 2)
    return blocks


@pytest.mark.parametrize("kind", KINDS)
def test_equals_gguf_bit_for_bit(kind: str, seed: int) -> None:
    blocks = random_blocks(kind, 257)
    expected = quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]).astype(np.float32).reshape(-1)
    ours = dequantize(blocks.view(-1), kind)
    assert ours.dtype == torch.float32 and ours.numel() == 257 * QUANT_TYPES[kind].block_elements
    finite = ~np.isnan(expected)
    assert np.array_equal(ours.numpy().view(np.uint32)[finite], expected.view(np.uint32)[finite])
    assert np.array_equal(np.isnan(ours.numpy()), ~finite)


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


def test_no_blocks_are_no_numbers() -> None:
    assert dequantize(torch.zeros(0, dtype=torch.uint8), "Q4_1").shape == (0,)


def test_tables_agree_with_each_other_and_with_gguf() -> None:
    assert set(QUANT_TYPES) == READABLE
    assert all(BLOCKS[kind] == (entry.block_elements, entry.block_bytes) for kind, entry in QUANT_TYPES.items())
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert {number: name for number, name in TYPES.items() if number in known} == {n: name for n, name in known.items() if n in TYPES}
    for number, name in known.items():
        if number in TYPES and name != "Q8_1":  # never in files; the package counts its scales as float32, ggml as float16
            assert BLOCKS[name] == tuple(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]), name
