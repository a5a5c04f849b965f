"""Random adapters that PEFT makes on random tiny bases, computed here and by PEFT: logits of every token, at several scales and in mixes.

`python tests/peft_random.py --seed 7 --cases 300` makes a long run; `--first 41 --cases 1` one case of it again.
"""
from __future__ import annotations

import argparse
import copy
import logging
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from acting_bench import ActingBench, change_all, peft_logits
from conftest import TINY_TOKENS, tiny_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from peft_random_config import INVOCATION, random_config, random_saving, save_adapter
from peft_scaled import scale_adapter, summed
from tiny_models import make_model, save_folder, save_gguf
from torch import Tensor

from lora_bench.engine.adapters.adapter import Adapter
from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.open import open_adapter
from lora_bench.engine.alora import find_last
from lora_bench.engine.base_file import open_base
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.vocabulary import Vocabulary, own_vocabulary
from lora_bench.engine.weights.load import load_weights

BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}), "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {}), "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}), "gemma2": ("gemma2", {}), "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}), "qwen3": ("qwen3", {}), "granite": ("granite", {"tie_word_embeddings": True}), "gemma3": ("gemma3", {}),
}
SCALES = (1.0, 0.5, -1.0, 2.0)
CLOSE = 1e-4
"""of the largest logit"""


@dataclass(frozen=True)
class Base:
    name: str
    model: Any
    folder: Path
    decoders: dict[str, Decoder]

    @property
    def rows(self) -> int:
        return self.model.config.vocab_size


@cache
def make_base(name: str, folder: Path) -> Base:
    """The model as a folder and as a GGUF file, each opened."""
    kind, changes = BASES[name]
    model = make_model(kind, **changes)
    if not model.config.tie_word_embeddings:
        model.lm_head.weight.data.normal_(0, 0.3)
    place = folder / name.replace(" ", "-")
    files = {"folder": save_folder(model, place, tiny_tokenizer()), "GGUF": save_gguf(model, kind, place.with_suffix(".gguf"), TINY_TOKENS)}
    decoders = {}
    for form, path in files.items():
        base = open_base(path)
        decoders[form] = Decoder(base.facts, load_weights(base, torch.device("cpu"), torch.float32), 96)
    return Base(name, model, place, decoders)


class Case:
    """Adapters of random configs on one base, the files of which lie in `folder`."""

    def __init__(self, number: int, seed: int, bases: Path, folder: Path, count: int) -> None:
        self.chance = random.Random(seed * 1_000_003 + number)
        torch.manual_seed(self.chance.randrange(1 << 31))
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        self.base = make_base(self.chance.choice(list(BASES)), bases)
        torch.set_rng_state(state)
        self.folder, self.configs, self.rows = folder, [], self.base.rows
        for index in range(count):
            self._train(f"a{index}", count == 1)

    def _train(self, name: str, alone: bool) -> None:
        model = copy.deepcopy(self.base.model)
        config = random_config(self.chance, self.base.name == "phi3", self.base.rows, [path for path, _ in model.named_modules()])
        saving = random_saving(self.chance, exact=not alone or "alora_invocation_tokens" in config)
        if saving.added:
            model.resize_token_embeddings(self.base.rows + saving.added, mean_resizing=False)
            self.rows = self.base.rows + saving.added
        model.config._name_or_path = str(self.base.folder)
        self.configs.append(config | {"saving": saving})
        model = change_all(get_peft_model(model, LoraConfig(**config)), "default")
        if config["bias"] != "none":
            for path, parameter in model.named_parameters():
                trained = parameter.requires_grad and path.endswith(".bias") and "lora_" not in path
                parameter.data += torch.randn_like(parameter) * 0.1 * trained
        save_adapter(self.chance, model, self.folder / name, saving)

    def read(self, form: str) -> list[Adapter]:
        """Every adapter as it is read for the base in that form. Raises AdapterError."""
        facts = self.base.decoders[form].facts
        read = [load_adapter(open_adapter(self.folder / f"a{index}"), facts, f"a{index}") for index in range(len(self.configs))]
        for adapter in read:
            own_vocabulary(adapter, Vocabulary(None, facts.vocab, facts.vocab))  # type: ignore[arg-type]  # for what it refuses
        return read

    def ids(self, rows: int) -> list[int]:
        """Ids below `rows`, those that the adapters train among them and perhaps an invocation."""
        special = [i for config in self.configs for i in _flat(config.get("trainable_token_indices")) if i < rows]
        ids = [self.chance.choice([*special, *range(rows)]) for _ in range(self.chance.randint(3, 24))]
        if self.chance.random() < 0.8:
            place = self.chance.randint(0, len(ids))
            ids[place:place] = INVOCATION
        return ids

    def peft(self, scales: Sequence[float]) -> PeftModel:
        """The files as PEFT loads them on a fresh base. Raises what PEFT raises."""
        model = copy.deepcopy(self.base.model)
        if self.rows != self.base.rows:
            model.resize_token_embeddings(self.rows, mean_resizing=False)
        model = PeftModel.from_pretrained(model, self.folder / "a0", adapter_name="a0")
        for index in range(1, len(self.configs)):
            model.load_adapter(self.folder / f"a{index}", adapter_name=f"a{index}")
        for index, scale in enumerate(scales):
            scale_adapter(model, f"a{index}", scale, self.base.model)
        return model.eval()


def _flat(indices: object) -> list[int]:
    return [i for part in (indices.values() if isinstance(indices, dict) else [indices or []]) for i in part]


def starts(adapters: Sequence[Adapter], ids: Sequence[int]) -> list[int]:
    """The first token that each acts on, the end where it does not."""
    found = [find_last(ids, adapter.info.invocation_tokens) if adapter.info.invocation_tokens else 0 for adapter in adapters]
    return [len(ids) if start < 0 else start for start in found]


def ours(
    case: Case, form: str, adapters: Sequence[Adapter], ids: Sequence[int], mixes: Sequence[Sequence[tuple[int, float]]],
) -> list[Tensor]:
    """Logits of `ids` with each of the mixes, (adapter, scale) in order, all in one batch in two steps, beside the base."""
    bench = ActingBench(case.base.decoders[form], {f"a{index}": adapter.weights for index, adapter in enumerate(adapters)})
    first = starts(adapters, ids)
    batch = [(ids, [(f"a{index}", scale, first[index]) for index, scale in mix if first[index] < len(ids)]) for mix in mixes]
    plain = [token for token in ids if token < case.base.rows]
    return bench.logits([*batch, (plain, [])], pieces=2)[:-1]


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference as a part of the largest logit."""
    return ((got - want).abs().max() / want.abs().max()).item() if got.shape == want.shape else float("inf")


def check_alone(case: Case) -> str:
    """One adapter at every scale on both forms of the base: "" or what is wrong. Raises AdapterError for a refusal."""
    found, ids = {}, []
    for form in case.base.decoders:
        adapters = case.read(form)
        ids = ids or case.ids(adapters[0].weights.vocab_rows(case.base.rows))
        found[form] = ours(case, form, adapters, ids, [[(0, scale)] for scale in SCALES])
    for index, scale in enumerate(SCALES):
        want = peft_logits(case.peft([scale]), ids, [("a0", scale)])
        for form, got in found.items():
            if not (error := apart(got[index], want[:, : got[index].shape[1]])) <= CLOSE:
                return f"{form}, scale {scale:g}: {error:.2g} apart"
    return ""


def check_mix(case: Case) -> str:
    """Several adapters at once, in any order, beside each other in one batch: as `check_alone`."""
    ids, count = case.ids(case.base.rows), len(case.configs)
    order = case.chance.sample(range(count), count)
    mixes = [[(index, scale) for index in order] for scale in (1.0,)]
    mixes.append([(index, case.chance.choice(SCALES)) for index in order])
    form = case.chance.choice(list(case.base.decoders))
    adapters = case.read(form)
    found = ours(case, form, adapters, ids, [*mixes, [mixes[1][0]]])[: len(mixes)]
    for mix, got in zip(mixes, found, strict=True):
        want, how = reference(case, adapters, mix, ids)
        if want is None:
            return f"not compared: {how}"
        if not (error := apart(got, want)) <= CLOSE:
            return f"{form}, mix {mix}, {how}: {error:.2g} apart"
    return ""


def reference(case: Case, adapters: Sequence[Adapter], mix: Sequence[tuple[int, float]], ids: Sequence[int]) -> tuple[Tensor | None, str]:
    """Logits by PEFT with all of them active, else by the sum of what each changes where that is what a mix means; and which."""
    try:
        if any(adapter.info.invocation_tokens for adapter in adapters):
            raise ValueError("PEFT looks for the invocation of one adapter")
        if any(config["bias"] != "none" for config in case.configs):
            raise ValueError("PEFT finds a trained bias only where the others have LoRA too")
        scales = dict(mix)
        model = case.peft([scales[index] for index in range(len(adapters))])
        model.base_model.set_adapter([f"a{index}" for index, _ in mix])
        with torch.no_grad():
            return model(input_ids=torch.tensor([list(ids)])).logits[0], "PEFT"
    except (ValueError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        why = f"{type(error).__name__} {error}"
    if any(adapter.info.dora or adapter.info.invocation_tokens for adapter in adapters):
        return None, why
    if case.base.model.config.tie_word_embeddings and any(
            set(adapter.weights.replaced) | set(adapter.weights.rows) or adapter.weights.embedding for adapter in adapters):
        return None, "PEFT merges an embedding into a tied head"
    merged = []
    for index, scale in mix:
        model = PeftModel.from_pretrained(copy.deepcopy(case.base.model), case.folder / f"a{index}", adapter_name=f"a{index}")
        scale_adapter(model, f"a{index}", scale, case.base.model)
        merged.append(model.eval())
    try:
        merged = [model.merge_and_unload() for model in merged]
        total = summed(case.base.model, merged)
    except (AttributeError, KeyError, RuntimeError, ValueError, TypeError) as error:
        return None, f"{why}; {error}"
    with torch.no_grad():
        return total(input_ids=torch.tensor([list(ids)])).logits[0], f"the sum of deltas ({why})"


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    """"same", "wrong", "refused" here, "not made" by PEFT or "not compared" as PEFT cannot run it"""
    what: str = ""


def run_case(number: int, seed: int, bases: Path, count: int) -> Outcome:
    """One case with `count` adapters; `bases` is a folder that all cases of a seed share."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            case = Case(number, seed, bases, Path(folder), count)
        except (ValueError, TypeError) as error:
            return Outcome("not made", str(error))
        try:
            wrong = check_alone(case) if count == 1 else check_mix(case)
        except AdapterError as error:
            return Outcome("refused", str(error).replace(folder, ""))
        if wrong.startswith("not compared"):
            return Outcome("not compared", wrong)
        return Outcome("wrong", f"{case.base.name}: {wrong} {case.configs}") if wrong else Outcome("same")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--adapters", type=int, default=1, help="of a case; from 2 on they act at once")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as bases:
        for number in range(given.first, given.first + given.cases):
            outcome = run_case(number, given.seed, Path(bases), given.adapters)
            seen[outcome.kind] += 1
            if outcome.kind in ("wrong", "refused"):
                print(f"{number} {outcome.kind}: {outcome.what}", flush=True)
    print(dict(seen))


if __name__ == "__main__":
    main()
