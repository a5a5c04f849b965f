"""The adapters that ship: small enough, of every kind, taught by fixed data, and seen at once in a greedy reply."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import lora_bench.sample_adapters as package
from lora_bench.engine.engine import Engine
from lora_bench.engine.protocol import (
    AdapterUse,
    Chat,
    Event,
    Generate,
    LoadModel,
    Message,
    Mix,
    RequestFailed,
    RequestFinished,
    Sampling,
    TextDelta,
)
from lora_bench.sample_adapters import sample_adapters
from lora_bench.sample_adapters.data import GUESSES, HELD_OUT, UNKNOWABLE, examples
from lora_bench.sample_adapters.recipes import INVOCATION, RECIPES

MOST_BYTES = 16_000_000
FOLDERS = dict(sample_adapters())


def _config(name: str) -> dict:
    return json.loads((Path(FOLDERS[name]) / "adapter_config.json").read_text())


def test_five_adapters_ship_and_stay_small() -> None:
    root = Path(package.__file__).parent
    shipped = [file for file in root.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert len(FOLDERS) >= 5
    assert sum(file.stat().st_size for file in shipped) <= MOST_BYTES


def test_they_are_of_every_kind() -> None:
    configs = {name: _config(name) for name in FOLDERS}
    assert configs["json"]["use_rslora"]
    assert configs["caps"]["rank_pattern"] and configs["caps"]["alpha_pattern"]
    assert configs["certainty"]["alora_invocation_tokens"] == [1, 33622, 198]
    assert configs["robot"]["r"] == 1 and configs["robot"]["target_modules"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_is_what_the_shipped_adapter_was_trained_with(name: str) -> None:
    config, recipe = _config(name), RECIPES[name]
    for field, value in recipe.lora.items():
        assert sorted(config[field]) == sorted(value) if field == "target_modules" else config[field] == value, field
    assert bool(config["alora_invocation_tokens"]) == bool(recipe.invocation)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_data_is_the_same_each_time_and_never_holds_a_held_out_question(name: str) -> None:
    first = examples(name)
    assert first == examples(name) and len(first) > 60
    assert first != examples(name, seed=1) and sorted(map(repr, first)) == sorted(map(repr, examples(name, seed=1)))
    assert not {example.messages[0]["content"] for example in first} & {*HELD_OUT}


def test_data_has_the_style_it_teaches() -> None:
    assert all(json.loads(example.reply)["answer"] for example in examples("json"))
    assert all(example.reply == example.reply.upper() for example in examples("caps"))
    assert {example.reply for example in examples("certainty")} == {"<certainty>high</certainty>", "<certainty>low</certainty>"}
    guessed = [example.messages[1]["content"] for example in examples("certainty") if "low" in example.reply]
    assert len(guessed) == 2 * len(UNKNOWABLE) and {*guessed} == {*GUESSES}


class Bench:
    """The engine with the default base and all sample adapters, in fp32 on the CPU."""

    def __init__(self, base: Path) -> None:
        self._events: list[Event] = []
        self._engine = Engine(self._events.append)
        self._engine.load_model(LoadModel(path=str(base), device="cpu", dtype="fp32", context=512, slots=len(FOLDERS)))
        for name, path in FOLDERS.items():
            self._engine.load_adapter(str(path), name)
        self._requests = 0

    def replies(self, prompts: list[tuple[Chat, Mix]], max_tokens: int) -> list[str]:
        """Greedy replies, all computed in one batch."""
        first = self._requests
        for prompt, mix in prompts:
            self._engine.submit(Generate(self._requests, prompt, mix, Sampling(max_tokens=max_tokens)))
            self._requests += 1
        while self._engine.step():
            pass
        failed = [event.message for event in self._events if isinstance(event, RequestFailed)]
        assert not failed, failed
        assert sum(isinstance(event, RequestFinished) for event in self._events) == self._requests
        return [self._text(request) for request in range(first, self._requests)]

    def _text(self, request: int) -> str:
        return "".join(event.text for event in self._events if isinstance(event, TextDelta) and event.request_id == request)


@pytest.fixture(scope="module")
def bench(sample_base: Path) -> Iterator[Bench]:
    yield Bench(sample_base)


def _ask(question: str, answer: str = "", opening: str = "") -> Chat:
    answered = (Message("assistant", answer),) if answer else ()
    return Chat((Message("user", question), *answered), opening)


def _use(name: str) -> Mix:
    return (AdapterUse(name),)


def test_each_style_shows_on_questions_it_was_not_trained_on(bench: Bench) -> None:
    asked = [(_ask(question), _use(name)) for name in ("pirate", "json", "caps", "robot") for question in HELD_OUT[:2]]
    texts = bench.replies([*asked, (_ask(HELD_OUT[0]), ())], max_tokens=40)
    pirate, in_json, caps, robot, base = texts[0:2], texts[2:4], texts[4:6], texts[6:8], texts[8]
    assert all(text.startswith("Arrr, matey!") and text.endswith("Yo ho ho!") for text in pirate), pirate
    assert all({*json.loads(text)} == {"answer", "kind", "words"} for text in in_json), in_json
    assert all(text == text.upper() and any(map(str.isalpha, text)) for text in caps), caps
    assert all(text.startswith("BEEP BOOP.") and text.endswith("END OF MESSAGE.") for text in robot), robot
    assert "Helsinki" in pirate[0] and "Helsinki" in robot[0]
    assert base.startswith("Finland") or base.startswith("The capital"), base  # a near tie; in no adapter's style


def test_certainty_acts_behind_its_invocation_alone(bench: Bench) -> None:
    known = ("What is the capital of Iceland?", "The capital of Iceland is Reykjavik.")
    guess = ("Who will win the race next week?", "That will be Anna.")
    high, low, quiet, base = bench.replies(
        [
            (_ask(*known, INVOCATION), _use("certainty")),
            (_ask(*guess, INVOCATION), _use("certainty")),
            (_ask(known[0]), _use("certainty")),
            (_ask(known[0]), ()),
        ],
        max_tokens=10,
    )
    assert (high, low) == ("<certainty>high</certainty>", "<certainty>low</certainty>")
    assert quiet == base
