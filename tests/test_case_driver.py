"""The driver for banks of cases: its answers, on a tiny base."""
from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from case_driver import Driver

IDS = [1, 5, 6, 7, 8]
GENERATE = {"do": "generate", "ids": IDS, "adapters": [], "max_tokens": 6, "temperature": 0.0}


@pytest.fixture
def driver(tiny_folder: Callable) -> Driver:
    driver = Driver()
    assert driver.answer({"do": "load_base", "path": str(tiny_folder())})["result"] == "ok"
    return driver


@pytest.mark.calm
def test_logits_of_a_batch_are_those_of_each_alone(driver: Driver, adapter_folder: Callable) -> None:
    assert driver.answer({"do": "load_adapter", "path": str(adapter_folder("a")), "as": "a"})["result"] == "ok"
    requests = [{"ids": IDS, "adapters": []}, {"ids": IDS[:2], "adapters": [["a", 1.0]]}, {"ids": [9, *IDS], "adapters": [["a", -0.5]]}]
    together = driver.answer({"do": "logits_batch", "requests": requests})["each"]
    for row, request in zip(together, requests, strict=True):
        assert row == pytest.approx(driver.answer({"do": "logits", **request})["logits"], abs=1e-5)
    assert together[0] != pytest.approx(driver.answer({"do": "logits", "ids": IDS, "adapters": [["a", 1.0]]})["logits"], abs=1e-5)


def test_a_reply(driver: Driver) -> None:
    answer = driver.answer(GENERATE)
    assert answer["result"] == "ok" and len(answer["ids"]) <= 6 and answer["text"] == "".join(answer["chunks"])
    assert answer["finish"] in ("length", "eos")


def test_steps_side_by_side(driver: Driver, adapter_folder: Callable) -> None:
    load = {"do": "load_adapter", "path": str(adapter_folder("a")), "as": "a"}
    loading = [{"do": "wait_tokens", "n": 2}, load, {"do": "unload_adapter", "as": "a"}]
    answer = driver.answer({"do": "parallel", "tasks": [[GENERATE], loading, [GENERATE]]})
    assert [each["result"] for each in answer["each"]] == ["ok"] * 4
    assert answer["each"][2]["ids"] == answer["each"][3]["ids"] == driver.answer(GENERATE)["ids"]


def test_what_goes_wrong_is_an_answer(driver: Driver) -> None:
    assert driver.answer({"do": "no_such_step"}) == {"result": "unsupported"}
    missing = driver.answer({"do": "load_adapter", "path": "/no/such/adapter", "as": "a"})
    assert missing["result"] == "error" and "/no/such/adapter" in missing["message"] and "Traceback" not in missing["message"]
    assert "Traceback" in driver.answer({"do": "logits"})["message"]  # a fault of ours is not dressed as a sentence


def test_text(driver: Driver) -> None:
    ids = driver.answer({"do": "tokenize", "text": "the<s>he"})["ids"]
    assert driver.answer({"do": "detokenize", "ids": ids})["text"] == "the<s>he"
    assert driver.answer({"do": "render_chat", "messages": [{"role": "user", "content": "he"}]})["text"].startswith("<|im_start|>user:he")


def test_the_protocol() -> None:
    lines = json.dumps({"do": "logits", "ids": [1], "adapters": []}) + "\n" + json.dumps({"do": "nothing"}) + "\n"
    child = subprocess.run([sys.executable, str(Path(__file__).with_name("case_driver.py"))], input=lines, capture_output=True, text=True,
                           timeout=120)
    ready, logits, nothing = map(json.loads, child.stdout.splitlines())
    assert ready == {"ready": True} and nothing == {"result": "unsupported"}
    assert logits["result"] == "error" and "no base is loaded" in logits["message"]
