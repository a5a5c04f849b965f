"""The measurement of ops: every op is there, told whole, and computes numbers."""
from __future__ import annotations

import json

import pytest
import torch

from lora_bench.engine.bench_kernels import run_kernels
from lora_bench.engine.bench_ops import OPS, Setting, packed_linears
from lora_bench.engine.random_base import shape_facts
from lora_bench.kernels.rank_pages import MAX_PAGES
from lora_bench.workbench.cli import main
from lora_bench.workbench.kernel_speed import _lines
from lora_bench.workbench.measuring_options import MOST_PAGES

SHAPE = "layers=2,hidden=32,heads=4,kv_heads=2,head_dim=8,intermediate=48,vocab=64"
LINEARS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def test_every_op_is_told_whole() -> None:
    result = run_kernels(SHAPE, "cpu", rows=3, context=20, tokens=33, ranks=(4, 20))
    json.dumps(result)
    names = [name for kind in LINEARS for name in (kind, f"{kind}, 2 adapters")]
    names += ["lm_head", "attention of replies", "attention of a prompt"]
    names += [*(f"{kind} of prompts, 2 adapters" for kind in LINEARS), "the best token", "a token at random"]
    assert [op["op"] for op in result["ops"]] == names and result["triton"] is False and result["copy_bytes_per_second"] > 0
    for op in result["ops"]:
        assert 0 < op["least_us"] <= op["us"] <= op["greatest_us"] and op["floor_us"] >= 0 and op["bytes"] > 0
        assert (op["torch_us"] is None) == (op["op"] == "a token at random" or op["op"].endswith("_proj, 2 adapters"))
    by_name = {op["op"]: op["bytes"] for op in result["ops"]}
    assert by_name["o_proj, 2 adapters"] - by_name["o_proj"] == 24 * (32 + 32) * 4
    assert len(_lines(result)) == 3 + len(names)


def test_sizes_that_need_no_adapters_or_more_rows_than_adapters(seed: int) -> None:
    for ranks, rows in (((), 2), ((8,), 5)):
        at = Setting(shape_facts(SHAPE), torch.device("cpu"), torch.float32, rows, 18, 21, ranks)
        cases = [case for op in OPS for case in op(at)]
        assert sum("1 adapter" in case.name for case in cases) == 8 * len(ranks)
        for case in cases:
            case.run()
            if case.plain is not None:
                case.plain()


@pytest.mark.gpu
def test_packed_matrices_are_measured_where_they_are_in_16_bits(seed: int) -> None:
    facts = shape_facts("layers=1,hidden=256,heads=4,kv_heads=2,head_dim=64,intermediate=256,vocab=64")
    for dtype, count in ((torch.float32, 0), (torch.bfloat16, 18)):
        cases = list(packed_linears(Setting(facts, torch.device("cuda"), dtype, 2, 18, 21, (8,))))
        assert len(cases) == count
        for case in cases:
            case.run()
        if cases:
            q4, q8 = (case.nbytes for case in cases if case.name.startswith("lm_head"))
            assert q4 < q8 < 64 * 256 * 2


def test_wrong_usage_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    assert MOST_PAGES == MAX_PAGES
    for words, arguments in [("one adapter for each of 1 rows", ["--rows", "1"]), ("--ranks x: give whole", ["--ranks", "x"]),
                             ("and 64 pages of 16", ["--ranks", "256,256,256,256,16"]), ("'9b' is no size", ["--shape", "9b"]),
                             ("fewer than the 8 adapters", ["--tokens", "4"])]:
        assert main(["bench", "kernels", "--device", "cpu", *arguments]) == 2
        out, err = capfd.readouterr()
        assert out == "" and words in err and "Traceback" not in err, err
