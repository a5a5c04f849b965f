"""Packed matrices as a CPU multiplies them: their numbers and products against those of the file, and what is left as it is."""
from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from gguf_file import HALVES, random_bytes, write_gguf
from torch import Tensor

from lora_bench.engine import config
from lora_bench.engine.base_file import open_base
from lora_bench.engine.config import make_config
from lora_bench.engine.protocol import LoadModel
from lora_bench.engine.weights.load import load_weights
from lora_bench.engine.weights.memory import CPU_BITS, weight_bytes
from lora_bench.kernels import packed_cpu
from lora_bench.kernels.cpu import products
from lora_bench.kernels.cpu.coded_rows import ROUNDED, CodedRows
from lora_bench.kernels.cpu.products import MOST_ROWS
from lora_bench.kernels.cpu.team import Team
from lora_bench.kernels.packed import PackedRows, PackedWeight, packed_concat
from lora_bench.kernels.packed_cpu import CpuWeight, multiplies_packed
from lora_bench.kernels.quant.codes import CODED
from lora_bench.kernels.weights import base_linear, laid_out, row_chunks, rows

pytestmark = pytest.mark.skipif(not multiplies_packed(), reason="this CPU has no products of packed numbers")
SUMMED = 1e-6
"""of the lengths of what is multiplied, by sums in fp32"""


def packed_matrix(kind: str, count: int, d_in: int) -> PackedWeight:
    """Its scales are alike, as trained ones are."""
    chance = np.random.default_rng(torch.initial_seed())
    blocks = random_bytes(kind, (count, d_in), chance)
    for start in HALVES[kind]:
        blocks[:, start:start + 2] = chance.uniform(0.01, 0.03, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    data = torch.from_numpy(blocks)
    return PackedWeight((PackedRows(kind, data.view(count, -1)),), torch.float32, True)


def exact(weight: PackedWeight | CpuWeight) -> Tensor:
    return torch.cat([chunk.clone() for _, chunk in row_chunks(weight)])


def apart(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def test_the_types_are_those_that_headers_count() -> None:
    assert CPU_BITS == {kind: coded.bits + 16 * (1 + coded.offsets) / coded.group for kind, coded in CODED.items()}


@pytest.mark.parametrize(("count", "d_in"), [(128, 256), (176, 512), (16, 256), (33, 768), (1, 256)], ids=str)
@pytest.mark.parametrize("kind", sorted(CODED))
def test_numbers_rows_and_products(kind: str, count: int, d_in: int) -> None:
    packed = packed_matrix(kind, count, d_in)
    weight, wanted = laid_out(packed), exact(packed)
    (part,) = weight.parts
    assert weight.shape == (count, d_in) and isinstance(part, CodedRows)
    assert weight.nbytes == pytest.approx(-(-count // 32) * 32 * d_in * CPU_BITS[kind] / 8)
    if kind.endswith("_K"):  # whose scales are products
        assert 0 < apart(exact(weight), wanted) < 16 * ROUNDED
    else:
        assert torch.equal(exact(weight), wanted)
    ids = torch.tensor([0, count - 1, count // 2, 0])
    assert torch.equal(rows(weight, ids), exact(weight)[ids]) and rows(weight, ids[:0]).shape == (0, d_in)
    for tokens in (1, 2, 3, 7, MOST_ROWS + 1):
        x, bias = torch.randn(tokens, d_in), torch.randn(count)
        y = base_linear(x, weight, bias)
        rooms = SUMMED * (x.norm(dim=1, keepdim=True) * exact(weight).norm(dim=1) + bias.abs())
        assert y.dtype == torch.float32 and ((y.double() - bias - x.double() @ exact(weight).double().t()).abs() <= rooms).all()
        assert base_linear(x.bfloat16(), weight, None).dtype == torch.bfloat16


def test_numbers_do_not_depend_on_how_many_are_unpacked_at_once() -> None:
    for kind in ("Q4_1", "Q8_0", "Q6_K"):
        weight = laid_out(packed_matrix(kind, 240, 256))
        for elements in (1, 70 * 256, 1 << 20):
            assert torch.equal(torch.cat([chunk.clone() for _, chunk in weight.chunks(torch.float32, elements)]), exact(weight))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q8_0"])
def test_the_bits_of_a_row_depend_on_nothing_beside_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = laid_out(packed_matrix(kind, 2080, 1024)), torch.randn(MOST_ROWS, 1024)
    alone = torch.cat([base_linear(row, weight, None) for row in x.split(1)])
    for tokens in range(2, MOST_ROWS + 1):
        assert torch.equal(base_linear(x[:tokens], weight, None), alone[:tokens])
    for threads in (1, 3):
        monkeypatch.setattr(products, "team", lambda threads=threads: Team(threads))
        assert torch.equal(base_linear(x, weight, None), alone)


def test_a_team_runs_for_one_caller_at_a_time() -> None:
    """An adapter is made ready in a thread beside the steps, with the numbers of packed weights."""
    alone, crowd, inside = Team(2), [], []

    def run(thread: int, threads: int, sync: object) -> None:
        if thread == 0:
            inside.append(1)
            crowd.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    callers = [Thread(target=alone.run, args=(run,)) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert crowd == [1, 1, 1]


def test_types_beside_each_other_and_those_without_codes() -> None:
    parts = [packed_matrix(kind, count, 256) for kind, count in (("Q4_K", 80), ("Q6_K", 48), ("IQ4_NL", 33), ("Q4_0", 24))]
    weight, wanted = laid_out(packed_concat(parts)), torch.cat([exact(part) for part in parts])
    assert [type(part) for part in weight.parts] == [CodedRows, CodedRows, PackedWeight, CodedRows]
    ids = torch.tensor([0, 79, 80, 127, 128, 160, 161, 184])
    assert apart(rows(weight, ids), wanted[ids]) < ROUNDED
    for tokens in (1, 70):
        x = torch.randn(tokens, 256)
        assert apart(base_linear(x, weight, None), x @ wanted.t()) < ROUNDED
    assert isinstance(laid_out(parts[2]), PackedWeight)


@pytest.mark.parametrize(("kind", "number", "kept"), [("Q4_0", 9000.0, False), ("Q4_K", 2000.0, False), ("Q4_K", 6e-8, True)])
def test_scales_that_fp16_cannot_hold_stay_as_they_are(kind: str, number: float, kept: bool) -> None:
    """-8 times the one, 63 times the next; small ones are multiples of the least fp16 number."""
    packed = packed_matrix(kind, 64, 256)
    blocks = packed.parts[0].data.view(-1, {"Q4_0": 18, "Q4_K": 144}[kind])
    blocks[:, :2] = torch.tensor([number], dtype=torch.float16).view(torch.uint8)
    blocks[:, 4:8] |= 63
    weight = laid_out(packed)
    assert isinstance(weight, CpuWeight) == kept
    if kept:
        assert apart(exact(weight), exact(packed)) < ROUNDED


def test_exact_products_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_matrix("Q4_0", 64, 256)
    assert isinstance(laid_out(replace(packed, recoded=False)), PackedWeight)
    monkeypatch.setattr(packed_cpu, "multiplies_packed", lambda: False)
    assert isinstance(laid_out(packed), PackedWeight)


# -- which dtype does what -------------------------------------------------------------------------
def test_auto_multiplies_packed_where_the_file_is_packed(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(seed)
    small, plain = (open_base(write_gguf(tmp_path / f"{kind}.gguf", {"": kind}, draw)) for kind in ("Q4_K", "F32"))

    def chosen(base: object, dtype: str, weights: str = "auto") -> tuple[str, bool]:
        made = make_config(LoadModel("", "cpu", dtype, weights=weights), base, lambda: None)
        return made.dtype_name, made.packed

    assert chosen(small, "auto") == chosen(small, "packed") == chosen(small, "auto", "packed") == ("packed", True)
    assert chosen(small, "auto", "dense") == chosen(small, "fp32") == chosen(plain, "auto") == ("fp32", False)
    assert chosen(small, "fp32", "packed") == ("fp32", True) and chosen(small, "bf16") == ("bf16", False)
    assert chosen(plain, "packed") == ("fp32", False)
    monkeypatch.setattr(config, "multiplies_packed", lambda: False)
    assert chosen(small, "auto") == ("fp32", False) and chosen(small, "packed") == ("fp32", True)
    assert config.UNPACKED_NOTE in make_config(LoadModel("", "cpu", "packed"), small, lambda: None).notes
    for device in ("cpu", "cuda"):
        with pytest.raises(ValueError, match="dtype packed was asked for with dense weights; choose"):
            make_config(LoadModel("", device, "packed", weights="dense"), small, lambda: None)


def test_memory_is_what_headers_say(tmp_path: Path, seed: int) -> None:
    base = open_base(write_gguf(tmp_path / "base.gguf", {"": "Q4_K", "up_proj": "IQ4_XS"}, np.random.default_rng(seed)))
    weights = load_weights(base, "cpu", torch.float32, packed=True, recoded=True)
    taken = sum(laid_out(weight).nbytes if len(weight.shape) == 2 else weight.nbytes for weight in weights.values())
    assert taken == pytest.approx(weight_bytes(base.tensors.values(), 4, True, True), rel=0.03)
