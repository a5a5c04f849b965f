"""Adapters that add tokens to their base: read, written and shown with them, beside requests that have the base's words."""
from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TINY_TOKENS
from engine_bench import Bench
from safetensors.torch import save_file

from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.mix import MixError
from lora_bench.engine.models.facts import ModelFacts
from lora_bench.engine.protocol import AdapterUse, RawText, RequestFinished, TokenIds
from lora_bench.kernels.sampling import Draw, sample

WITH, TWICE, OFF = (AdapterUse("a"),), (AdapterUse("a", 2.0),), (AdapterUse("a", 0.0),)
ADDED = [("<tool>", True), ("wow", False)]


@pytest.fixture
def bench(tiny_folder: Callable[..., Path]) -> Bench:
    """Its replies do not end before their length."""
    made = Bench(tiny_folder())
    model = made.engine.model
    made.engine._model = replace(model, base=replace(model.base, end_tokens=()))
    return made


@pytest.fixture
def grown(tmp_path: Path, tiny_facts: ModelFacts, tiny_tensors: Mapping[str, torch.Tensor], bench: Bench) -> Callable[..., Path]:
    """`grown(name, added, scale of the new rows of the head)` writes an adapter of whole embed_tokens and lm_head, larger by `added`."""
    def write(name: str, added: list[tuple[str, bool]] = ADDED, loud: float = 1.0, head: bool = True, **config: object) -> Path:
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True)
        rows = torch.randn(len(added), tiny_facts.hidden)
        tensors = {"base_model.model.model.embed_tokens.weight": torch.cat([tiny_tensors["embed_tokens.weight"], rows])}
        if head:
            tensors["base_model.model.lm_head.weight"] = torch.cat([tiny_tensors["lm_head.weight"], rows * loud])
        tensors |= {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight": torch.randn(shape) * 0.2
                    for half, shape in (("A", (2, tiny_facts.hidden)), ("B", (tiny_facts.q_out, 2)))}
        save_file(tensors, folder / "adapter_model.safetensors")
        saved = ["embed_tokens", "lm_head"][: 1 + head]
        whole = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "modules_to_save": saved} | config
        (folder / "adapter_config.json").write_text(json.dumps(whole))
        tokenizer = json.loads((Path(bench.engine.model.base.path) / "tokenizer.json").read_text())
        tokenizer["added_tokens"] += [
            {"id": len(TINY_TOKENS) + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": special} for i, (text, special) in enumerate(added)]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        return folder

    return write


def _ids(vocab: int = 50, size: int = 12) -> list[int]:
    return [random.randrange(5, vocab) for _ in range(size)]


def test_rows_that_are_added_are_read_and_have_logits(bench: Bench, grown: Callable[..., Path]) -> None:
    info = bench.engine.load_adapter(str(grown("a")), "a")
    assert info.added_rows == 2 and "adds 2 tokens: '<tool>' (50), 'wow' (51)" in info.notes
    ids = [*_ids(), 50, 51, 7]
    other = _ids()
    alone, base = bench.engine.logits(ids, WITH), bench.engine.logits(other)
    together = bench.engine.batch_logits([(other, ()), (ids, WITH), (other, OFF)])
    assert (alone.shape[0], base.shape[0]) == (52, 50)
    assert [row.shape[0] for row in together] == [50, 52, 50]
    for got, expected in zip(together, (base, alone, base), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(alone, bench.engine.logits([*ids[:-2], 50, 7], WITH)), "the added tokens are told apart"


def test_at_another_scale_added_rows_act_whole(bench: Bench, grown: Callable[..., Path]) -> None:
    bench.engine.load_adapter(str(grown("a")), "a")
    ids = [*_ids(), 50]
    once, half = bench.engine.logits(ids, WITH), bench.engine.logits(ids, (AdapterUse("a", 0.5),))
    assert torch.isfinite(half).all() and not torch.allclose(once, half), "the LoRA beside them is scaled"
    assert half[50:].abs().sum() > 0


def test_prompts_are_cut_with_the_tokens_of_the_mix(bench: Bench, grown: Callable[..., Path]) -> None:
    bench.engine.load_adapter(str(grown("a")), "a")
    for number, mix in enumerate([WITH, (), OFF]):
        bench.submit(number, RawText("ab<tool>wow"), mix, max_tokens=2)
    prompts = [request.ids[: request.prompt_tokens] for request in bench.engine.model.scheduler.waiting]
    assert prompts[0][-2:] == [50, 51] and len(prompts[0]) == 4
    assert prompts[1] == prompts[2] and max(prompts[1]) < 50
    bench.run()
    assert len(bench.of(RequestFinished)) == 3
    with pytest.raises(ValueError, match="50"):
        bench.submit(9, TokenIds((7, 50)))


def test_added_tokens_are_written_and_shown_only_where_they_are(bench: Bench, grown: Callable[..., Path]) -> None:
    bench.engine.load_adapter(str(grown("a", loud=400.0)), "a")
    prompts = [TokenIds(tuple(_ids())) for _ in range(4)]
    for number, prompt in enumerate(prompts):
        bench.submit(100 + number, prompt, (), temperature=1.0, seed=3)
        bench.run()
    for number, prompt in enumerate(prompts):
        bench.submit(number, prompt, (), temperature=1.0, seed=3)
        bench.submit(10 + number, prompt, WITH, temperature=1.0, seed=3)
    bench.run()
    for number in range(4):
        assert bench.ids(number) == bench.ids(100 + number), "the base's requests draw what they draw alone"
    written = [token for number in range(4) for token in bench.ids(10 + number)]
    assert set(written) & {50, 51}
    shown = "".join(bench.text(10 + number) for number in range(4))
    assert shown.count("wow") == written.count(51) and "<tool>" not in shown


def test_a_mix_that_would_lose_the_words_of_a_reply_is_refused(bench: Bench, grown: Callable[..., Path]) -> None:
    bench.engine.load_adapter(str(grown("a")), "a")
    bench.submit(1, TokenIds((7, 8, 51, 9)), WITH)
    bench.submit(2, TokenIds((7, 8, 9)), WITH, max_tokens=1)
    bench.submit(3, TokenIds((7, 8, 9)), ())
    bench.engine.step()
    for mix in ((), OFF):
        with pytest.raises(MixError, match="request 1 holds the token 51, 'wow', that only an adapter of its old mix has"):
            bench.engine.set_mix(mix, (1,))
    bench.engine.set_mix(TWICE, (1, 3))
    bench.run()
    assert len(bench.of(RequestFinished)) == 3


def test_vocabularies_that_differ_do_not_mix(bench: Bench, grown: Callable[..., Path]) -> None:
    for name, added in (("a", ADDED), ("same", ADDED), ("other", [("<x>", True), ("wow", False)]), ("more", [*ADDED, ("z9", False)])):
        bench.engine.load_adapter(str(grown(name, added)), name)
    for other in ("other", "more"):
        with pytest.raises(MixError, match=f"'a' and {other!r} add different tokens"):
            bench.engine.logits(_ids(), (AdapterUse("a"), AdapterUse(other)))
        with pytest.raises(MixError, match=f"'a' and {other!r} add different tokens"):
            bench.engine.set_mix((AdapterUse("a"), AdapterUse(other)))
    shared = bench.engine.logits([*_ids(), 50], (AdapterUse("a"), AdapterUse("same")))
    assert shared.shape[0] == 52 and torch.isfinite(shared).all()
    rows = bench.engine.batch_logits([(_ids(), (AdapterUse("more"),)), (_ids(), WITH), (_ids(), ())])
    assert [row.shape[0] for row in rows] == [53, 52, 50]


def test_rows_that_can_only_be_read(bench: Bench, grown: Callable[..., Path]) -> None:
    info = bench.engine.load_adapter(str(grown("a", head=False)), "a")
    assert any("read, never written" in note for note in info.notes)
    assert bench.engine.logits([7, 50, 9], WITH).shape[0] == 50


def test_an_invocation_beside_added_tokens_is_refused(bench: Bench, grown: Callable[..., Path]) -> None:
    with pytest.raises(AdapterError, match="in PEFT that acts before the invocation too"):
        bench.engine.load_adapter(str(grown("b", alora_invocation_tokens=[7])), "b")
    bench.engine.load_adapter(str(grown("a")), "a")
    with pytest.raises(AdapterError, match="adds tokens to the vocabulary"):
        bench.engine.set_invocation("a", "ab")


def test_columns_beyond_a_row_s_own_are_never_drawn(seed: int) -> None:
    logits = torch.randn(3, 9)
    logits[:, 6:] = 50.0
    for temperature in (0.0, 1.0):
        drawn = sample(logits, [Draw(temperature, vocab=6), Draw(temperature), Draw(temperature, vocab=7)])
        assert drawn[0] < 6 and drawn[1] >= 6 and drawn[2] == 6
        assert sample(logits[:1, :6], [Draw(temperature)]) == drawn[:1], "nor do they change a draw"
    logits[0, 3] = math.nan
    assert sample(logits, [Draw(vocab=6), Draw(), Draw()])[0] == -1
