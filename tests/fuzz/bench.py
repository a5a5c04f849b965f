"""Engines that stand behind the targets: an input that is accepted must also work, and one that is refused must leave nothing."""
from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.adapters.verdicts import field_verdicts
from lora_bench.engine.engine import Engine
from lora_bench.engine.inspect import inspect_path
from lora_bench.engine.protocol import AdapterUse, Event, LoadModel, write_frame

from . import tiny
from .target import Wrong

IDS = (1, 5, 6, 7, 5, 8)


class AdapterBench:
    """One tiny base; adapters come and go, and the base must answer as before, bit for bit."""

    def __init__(self, folder: Path) -> None:
        write_files(folder / "base", tiny.base_files(Random(1)))
        self._engine = Engine(_send)
        self._engine.load_model(LoadModel(str(folder / "base"), "cpu", "fp32"))
        self._before = self._engine.logits(IDS)

    def try_adapter(self, path: Path) -> None:
        """Inspect, load, use at two scales, unload. Raises what the loading raises; Wrong for everything that fails after it."""
        field_verdicts(path)
        try:
            inspect_path(path)
            refusal = ""
        except (ValueError, OSError) as error:
            refusal = str(error)
        try:
            self._engine.load_adapter(str(path), "it")
        except Exception:
            if self._engine.model.store.infos:
                raise Wrong("an adapter that was refused is in the store") from None
            raise
        if refusal and "the config gives it rank" not in refusal:  # inspect cannot know that no base has the module
            self._engine.unload_adapter("it")
            raise Wrong(f"inspect refuses what loads: {refusal}")
        sure("use of an accepted adapter", self._use)
        if not torch.allclose(self._engine.logits(IDS), self._before, rtol=1e-4, atol=1e-4):
            raise Wrong("the base answers otherwise from the KV blocks that were there while the adapter was")
        self._engine.clear_cache()
        if not torch.equal(self._engine.logits(IDS), self._before):
            raise Wrong("the base answers otherwise once the adapter is gone")

    def _use(self) -> None:
        try:
            for scale in (0.0, 0.5):
                self._engine.logits(IDS, (AdapterUse("it", scale),))
            _send(self._engine.snapshot())
        except AdapterError as error:
            if "too large for" not in str(error):  # what a dtype holds is known where the adapter is used
                raise
        finally:
            self._engine.unload_adapter("it")


class BaseBench:
    """Loads a base whole, answers once, and says the same of it by its header."""

    def __init__(self) -> None:
        self._engine = Engine(_send)

    def try_base(self, path: Path) -> None:
        self._engine.load_model(LoadModel(str(path), "cpu", "fp32"))
        sure("use of an accepted base", self._use)

    def _use(self) -> None:
        model = self._engine.model
        use_tokenizer(model.tokenizer)
        self._engine.logits([token % model.base.facts.vocab for token in IDS][: max(1, model.config.context - 1)])


def use_tokenizer(tokenizer: object) -> None:
    """Text to tokens and back, whole and as a stream."""
    from lora_bench.engine.tokenizer import TextStream

    for text in ("", " ", "the he\n\tabc  ĠK 😀漢 <|im_end|></s> 12345 \ud800", "a" * 300):
        for special in (False, True):
            ids = tokenizer.encode(text, special)
            if not all(0 <= number < tokenizer.model_vocab for number in ids):
                raise Wrong(f"token ids {ids} are outside of the vocabulary")
            stream = TextStream(tokenizer)
            streamed = "".join(map(stream.push, ids)) + stream.finish()
            if streamed != tokenizer.decode(ids):
                raise Wrong("the stream's text is not that of all tokens")
            tokenizer.token_text(ids)
    tokenizer.decode(range(tokenizer.model_vocab), special=True)


def _send(event: Event) -> None:
    """Every event must pass the wire."""
    write_frame(io.BytesIO(), event)


def sure(what: str, act: Callable[[], None]) -> None:
    """Nothing may go wrong any more: what does is told as Wrong."""
    try:
        act()
    except Wrong:
        raise
    except Exception as error:
        raise Wrong(f"{what}: {type(error).__name__}: {error}") from error


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
