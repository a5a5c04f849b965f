"""Decode steps on fixed buffers: the numbers of the decoder's own forward, whatever acts on the rows and changes between steps."""
from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import tiny_tokenizer
from engine_bench import ONE, THREE, TWO, Bench, random_ids
from tiny_models import CONFIGS, VOCAB, make_model, save_folder

from lora_bench.engine.base_file import open_base
from lora_bench.engine.batch import Chunk, step_inputs
from lora_bench.engine.blocks import BlockTable
from lora_bench.engine.device_rows import StepRows
from lora_bench.engine.mix import ActiveUse, TokenMix
from lora_bench.engine.mix_history import MixHistory
from lora_bench.engine.models.decode_forward import NO_RANKS, DecodeForward, DecodeStep
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.protocol import AdapterUse, Mix, StepFinished, TokenIds
from lora_bench.engine.weights.load import load_weights
from lora_bench.kernels.decode_attention import DecodeRows
from lora_bench.kernels.stamps import Stamps

CPU = torch.device("cpu")
BLOCKS = 40
FORMS = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "gemma2 with strong softcaps": ("gemma2", {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5, "attention_bias": True}),
    "gemma3 with softcaps": ("gemma3", {"final_logit_softcapping": 2.0}),
    "olmo2 with biases, tied": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "longrope": ("llama", {"head_dim": 8, "rope_parameters": {
        "rope_type": "longrope", "original_max_position_embeddings": 30, "rope_theta": 5000.0, "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [1.0, 2.0, 4.0, 9.0]}}),
}


def _decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    base = open_base(folder)
    return Decoder(base.facts, load_weights(base, "cpu", dtype), base.facts.context)


def _steps(decoder: Decoder, other: Decoder, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of one token each for requests of `lengths`, by `decoder`'s forward and by a DecodeForward of `other`.

    Both begin with the same random keys and values; blocks lie anywhere, some rows are empty.
    """
    blocks, caches = random.sample(range(BLOCKS), BLOCKS), decoder.kv_cache(BLOCKS, 16).normal_()
    tables = [BlockTable(blocks[6 * row : 6 * row + 6]) for row in range(len(lengths))]
    ids = [random.randrange(5, VOCAB) for _ in lengths]
    starts = [decoder.rope.start(length) for length in lengths]
    own = caches.to(other.dtype)
    chunks = [Chunk((token,), length - 1, table, True, rope_start=start)
              for token, length, table, start in zip(ids, lengths, tables, starts, strict=True)]
    expected = decoder.forward(step_inputs(chunks, CPU), caches, None, lambda op: None)
    rows = len(lengths) + 2
    positions, places = (torch.full((rows,), -1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32))
    positions[: len(lengths)] = torch.tensor(lengths) - 1
    places[: len(lengths)] = torch.tensor(lengths) - 1 + torch.tensor(starts)
    table = torch.full((rows, 6), BLOCKS - 1, dtype=torch.int32)
    table[: len(lengths)] = torch.tensor([one.blocks for one in tables])
    forward = DecodeForward(other, own, rows + 3, Stamps(torch.zeros(64, dtype=torch.int64)))
    step = DecodeStep(torch.tensor([*ids, 0, 0], dtype=torch.int32), DecodeRows(positions, places, table), NO_RANKS)
    forward(step)
    got = forward(step)  # twice: what one call leaves behind must not matter
    assert (own.float() - caches).norm() <= (1e-5 if other.dtype == torch.float32 else 5e-3) * caches.norm()
    return expected, got[: len(lengths), : expected.shape[1]]


@pytest.mark.parametrize("form", [*CONFIGS, *FORMS])
def test_every_architecture_computes_what_its_forward_does(form: str, tmp_path: Path, seed: int) -> None:
    name, changes = FORMS.get(form, (form, {}))
    folder = save_folder(make_model(name, **changes), tmp_path / "m", tiny_tokenizer())
    decoder = _decoder(folder)
    expected, got = _steps(decoder, decoder, [1, 2, 16, random.randint(17, 40), 90])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    half = _decoder(folder, torch.float16)
    expected, got = _steps(decoder, half, [3, 33])
    assert (got.float() - expected).norm() < 0.03 * expected.norm()


@pytest.fixture
def on_device(make: Callable[..., Bench]) -> Bench:
    """An engine whose adapters lie in pages and whose steps run on fixed buffers where they can."""
    bench = make(pages=12)
    bench.engine.model.runner.use_device_step(8, bench.events.append)
    return bench


MIXES: tuple[Mix, ...] = ((), ONE, TWO, (*THREE, *ONE), (AdapterUse("two", -1.0), AdapterUse("one", 0.0)), (*TWO, *THREE, *ONE))


def _paths(bench: Bench) -> list[str]:
    return [step.path for step in bench.of(StepFinished)]


@pytest.mark.calm
def test_replies_of_many_mixes_are_those_of_the_plain_engine(make: Callable[..., Bench], on_device: Bench, seed: int) -> None:
    """With an aLoRA, requests that come and go, rows that move up, rescales on the way; parted at most where two tokens are as good."""
    plain, draw = make(), random.Random(seed)
    asked = [(number, random_ids(draw.randint(3, 40), seed + number), draw.choice(MIXES), draw.randint(1, 40)) for number in range(14)]
    for bench in (plain, on_device):
        bench.engine.set_invocation("three", "th")
        for number, prompt, mix, tokens in asked:
            temperature = 0.8 if number % 3 == 0 else 0.0
            bench.submit(number, TokenIds((*prompt, 48, *prompt[:2])), mix, max_tokens=tokens, temperature=temperature, seed=number,
                         repetition_penalty=1.3 if temperature else 1.0)
            bench.run(draw.randint(0, 3) if bench is plain else 2)
        bench.run()
    for number, prompt, mix, _ in asked:
        assert plain.same((*prompt, 48, *prompt[:2]), mix, plain.ids(number), on_device.ids(number)), mix
    paths = _paths(on_device)
    assert paths.count("graph") > 20 and "graph and 1 prompt" in paths and set(_paths(plain)) == {""}
    assert all("graph" in path or path == "eager: 1 prompt" for path in paths)
    assert all(sum(step.ms_by_op.values()) == pytest.approx(step.ms) for step in on_device.of(StepFinished))


def test_why_a_step_was_not_one_of_these_is_said(on_device: Bench, adapter_folder: Callable[..., Path], seed: int) -> None:
    engine = on_device.engine
    engine.load_adapter(str(adapter_folder("turned", ("q_proj",), 3, _dora(), use_dora=True)), "turned")
    for mix in ((*ONE, AdapterUse("turned")), (AdapterUse("turned"), *ONE)):
        on_device.submit(1, TokenIds(random_ids(5)), mix, max_tokens=4)
        on_device.run()
        assert _paths(on_device) == ["eager: 1 prompt"] + ["graph"] * 3
        on_device.engine.clear_cache()
        on_device.events.clear()
    for number in range(9):
        on_device.submit(number, TokenIds(random_ids(4, number)), ONE, max_tokens=6 if number else 4)
    on_device.run()
    crowd = "eager: 9 requests, at most 8 run in a graph"
    assert _paths(on_device) == ["eager: 9 prompts", *[crowd] * 3, "graph", "graph"]


def _dora() -> dict[str, torch.Tensor]:
    return {f"base_model.model.model.layers.{layer}.self_attn.q_proj.{name}": torch.rand(shape) + 0.1 for layer in range(2)
            for name, shape in (("lora_A.weight", (3, 24)), ("lora_B.weight", (36, 3)), ("lora_magnitude_vector", (36,)))}


class _Asked:
    """As much of a request as its row reads."""

    def __init__(self, blocks: list[int], length: int, uses: tuple[ActiveUse, ...]) -> None:
        self.ids = [random.randrange(50) for _ in range(length)]
        self.table, self.history = BlockTable(blocks), MixHistory.of(TokenMix((), uses))

    @property
    def mix(self) -> TokenMix:
        return self.history.mix


def test_rows_have_what_their_requests_have_however_these_change(seed: int) -> None:
    """Against rows that are filled from nothing, in long lives of requests that grow, lose blocks, change their mix, come and go."""
    rows, asked = StepRows(8, 20, 50, CPU), []
    for turn in range(300):
        asked = [one for one in asked if random.random() > 0.1]
        while len(asked) < 8 and random.random() < 0.5:
            asked.insert(random.randrange(len(asked) + 1), _asked(random.randint(1, 100)))
        for one in asked:
            _live(one)
        if not asked:
            continue
        fresh = StepRows(8, 20, 50, CPU)
        for each in (rows, fresh):
            each.fill(asked, lambda length: 500 if length > 90 else 0)
            each.upload_tables()
            each.upload(8, False)
        assert rows.uses == fresh.uses == [tuple(use for use in _part(one).active if use.start < len(one.ids)) for one in asked]
        (got, expected), many = (each.places(8) for each in (rows, fresh)), len(asked)
        assert torch.equal(rows.ids(8)[:many], fresh.ids(8)[:many]) and torch.equal(got.positions, expected.positions), turn
        assert torch.equal(got.rope_rows[:many], expected.rope_rows[:many])
        for row, one in enumerate(asked):
            held = -(-len(one.ids) // 16)
            assert got.tables[row, :held].tolist() == one.table.blocks[:held]


def _asked(length: int) -> _Asked:
    return _Asked(random.sample(range(1000), -(-length // 16)), length, _uses())


def _uses() -> tuple[ActiveUse, ...]:
    names = random.sample("abc", random.randint(0, 3))
    return tuple(ActiveUse(name, random.choice((0.5, 1.0)), random.choice((0, 0, 40)), name) for name in names)


def _part(one: _Asked) -> TokenMix:
    (mix, _, _), = one.history.pieces(len(one.ids) - 1, 1)
    return mix


def _live(one: _Asked) -> None:
    """A token more, as every step brings one, and now and then something else."""
    one.ids.append(random.randrange(50))
    if len(one.ids) > 16 * len(one.table.blocks):
        one.table.append(random.randrange(1000))
    match random.randrange(12):
        case 0:
            one.table.replace(random.randrange(len(one.table.blocks)), random.randrange(1000))
        case 1:
            one.history = one.history.spliced(len(one.ids) - random.randint(0, 2), TokenMix((), _uses()))
        case 2:
            one.table = BlockTable(random.sample(range(1000), len(one.table.blocks)))
        case 3:
            one.history = one.history.replaced(TokenMix((), _uses()))
