"""A base made ready to answer: file, tokenizer, weights on the device, adapter tiers, KV memory."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..kernels.attention import copy_block_
from .adapter_store import AdapterStore
from .base_file import open_base
from .base_parts import BaseFile
from .blocks import BLOCK_TOKENS
from .chat import template_note
from .config import EngineConfig, make_config
from .default_model import ensure_default_model
from .group_slots import GroupSlots
from .kv_memory import KvMemory
from .models.decoder import Decoder
from .models.facts import module_shapes
from .protocol import Emit, LoadModel, ModelInfo, ModelLoading
from .runner import Runner
from .scheduler import Scheduler
from .template import RENDERER
from .tokenizer import Tokenizer
from .weights.load import LoadCancelled, load_weights

PROGRESS_SECONDS = 0.1
"""between two reports of one phase"""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    base: BaseFile
    config: EngineConfig
    tokenizer: Tokenizer
    runner: Runner
    store: AdapterStore
    slots: GroupSlots
    memory: KvMemory
    scheduler: Scheduler
    info: ModelInfo


class Progress:
    """ModelLoading events, at most ten a second in one phase; the first and the last of a phase are always sent."""

    def __init__(self, emit: Emit, cancelled: Callable[[], bool], what: str) -> None:
        self._emit, self._cancelled, self._what = emit, cancelled, what
        self._phase, self._sent = "", 0.0

    def check(self) -> None:
        """Raises LoadCancelled when the load is no longer wanted."""
        if self._cancelled():
            raise LoadCancelled(f"{self._what}: loading was cancelled")

    def report(self, phase: str, item: str = "", done: int = 0, total: int = 0) -> None:
        """Raises LoadCancelled where a phase begins."""
        if phase != self._phase:
            self.check()
        now = time.monotonic()
        if phase == self._phase and now - self._sent < PROGRESS_SECONDS and not (total and done >= total):
            return
        self._phase, self._sent = phase, now
        self._emit(ModelLoading(phase, item, done, total))

    def next(self, phase: str, item: str) -> None:
        """`report` of a phase whose items take their time; raises LoadCancelled before each."""
        self.check()
        self.report(phase, item)


def load_model(
    command: LoadModel, emit: Emit, cancelled: Callable[[], bool], make_room: Callable[[], None], wake: Callable[[], None] | None = None,
) -> LoadedModel:
    """Everything a base needs to answer; ModelLoading events on the way.

    `make_room` is called, once, if the weights do not fit beside the base loaded now; `wake` is that of its adapters (see Fetches).
    Raises LoadCancelled, DownloadCancelled, OutOfMemory, ValueError and OSError with a sentence; what was loaded before is not touched
    then, unless room had to be made.
    """
    progress = Progress(emit, cancelled, command.path or "the default model")
    path = command.path
    if path is None:
        path = ensure_default_model(lambda item, done, total: progress.report("download", item, done, total), cancelled)
    progress.report("header", str(path))
    base = open_base(path)
    if base.chat_template:
        RENDERER.start()  # beside the reading of the weights
    progress.report("tokenizer", base.name)
    tokenizer = Tokenizer(base)
    progress.check()  # before room is made
    config = make_config(command, base, make_room)
    weights = load_weights(
        base, config.device, config.dtype, lambda item, done, total: progress.report("weights", item, done, total), cancelled,
        config.packed, config.recoded)
    decoder = Decoder(base.facts, weights, config.context)
    compiles = f": {decoder.compiles}" if decoder.compiles else ""
    progress.report("warm-up", f"{base.name}{compiles}")
    caches = decoder.kv_cache(config.blocks, BLOCK_TOKENS)
    memory = KvMemory(config.blocks, partial(copy_block_, caches), emit)
    store = AdapterStore(
        decoder, config.slots, config.host_cache_bytes, emit, tokenizer, base.chat_template,
        lambda why, digest: memory.clear(why, {digest}), wake, config.pages)
    runner = Runner(decoder, store, caches)
    if config.device.type == "cuda":
        runner.use_device_step(config.max_running, emit)
    runner.warm_up(lambda done, total: progress.next("warm-up", f"{base.name}{compiles or f': step {done + 1} of {total}'}"))
    progress.check()
    template = template_note(tokenizer, base.chat_template) if base.chat_template else ""
    base = replace(base, notes=(*base.notes, *config.notes, *([template] if template else [])))
    scheduler = Scheduler(memory, config.step_tokens, config.max_running, base.facts.long_after, config.alone_tokens)
    return LoadedModel(base, config, tokenizer, runner, store, GroupSlots(store), memory, scheduler, _info(base, config, decoder))


def _info(base: BaseFile, config: EngineConfig, decoder: Decoder) -> ModelInfo:
    facts = base.facts
    return ModelInfo(
        name=base.name, path=str(base.path), format=base.format, architecture=facts.architecture, layers=facts.layers, hidden=facts.hidden,
        heads=facts.heads, kv_heads=facts.kv_heads, vocab=facts.vocab, context=config.context, trained_context=facts.context,
        parameters=base.parameters, file_bytes=base.file_bytes, weight_bytes=decoder.nbytes,
        weights="packed" if config.packed else "dense", weight_types=base.weight_types,
        device=str(config.device), dtype=config.dtype_name, tied=facts.tied, threads=torch.get_num_threads(),
        linear_modules=len(module_shapes(facts)), chat_template=bool(base.chat_template), end_tokens=base.end_tokens, notes=base.notes)
