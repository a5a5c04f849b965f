"""Trains one sample adapter again: `python -m lora_bench.sample_adapters.train NAME --out DIR`.

Needs the `train` extra (transformers, PEFT). The base is the default GGUF, dequantised by transformers; the base is frozen in
bf16, the adapter learns in fp32 and is written in bf16. A CPU is enough: minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .data import HELD_OUT, Example, examples
from .hf_base import load_base
from .recipes import RECIPES, Recipe

IGNORED = -100  # cross_entropy's label for "no loss here"
WARMUP_STEPS = 5


@dataclass(frozen=True)
class Batch:
    """Left-padded, so that every reply ends at the last column: ids, labels, attention [rows, tokens]; reply_tokens is the longest."""

    ids: torch.Tensor
    labels: torch.Tensor
    attention: torch.Tensor
    reply_tokens: int


def train(model: PeftModel, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Trains the adapter on `model` in place by its recipe, and prints the loss as it goes."""
    recipe = RECIPES[name]
    pairs = [_tokens(tokenizer, example, recipe.invocation) for example in examples(name)]
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    batches = _batches(pairs, recipe.batch, tokenizer.pad_token_id)
    for step in range(recipe.steps):
        optimizer.param_groups[0]["lr"] = _learning_rate(recipe, step)
        loss = _loss(model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 5 == 0 or step == recipe.steps - 1:
            print(f"step {step + 1}/{recipe.steps}  loss {loss.item():.3f}", flush=True)


def attach(base: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> PeftModel:
    """The base with a fresh adapter of the recipe's shape; the base's weights stay frozen."""
    lora = dict(recipe.lora)
    if recipe.invocation:
        lora["alora_invocation_tokens"] = tokenizer.encode(recipe.invocation)
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", **lora))


def save(model: PeftModel, folder: Path, base_name: str) -> int:
    """Writes adapter_config.json and adapter_model.safetensors (bf16) into `folder`; returns the bytes of the weights."""
    with TemporaryDirectory() as scratch:  # PEFT writes a model card too, over a README.md that may be somebody's
        model.save_pretrained(scratch, save_embedding_layers=False)
        tensors = load_file(Path(scratch) / "adapter_model.safetensors")
        config = json.loads((Path(scratch) / "adapter_config.json").read_text()) | {"base_model_name_or_path": base_name}
    config["target_modules"] = sorted(config["target_modules"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = folder / "adapter_model.safetensors"
    save_file({name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
    return weights.stat().st_size


def greedy(model: PeftModel, tokenizer: PreTrainedTokenizerFast, prompt: str, tokens: int = 48) -> str:
    """The greedy reply to an already templated prompt, without end tokens."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def _tokens(tokenizer: PreTrainedTokenizerFast, example: Example, invocation: str) -> tuple[list[int], list[int]]:
    """(prompt ids, reply ids with the end token). An invocation stands where the assistant's header otherwise would."""
    prompt = tokenizer.apply_chat_template(list(example.messages), add_generation_prompt=not invocation, tokenize=False) + invocation
    return tokenizer.encode(prompt), tokenizer.encode(example.reply + tokenizer.eos_token)


def _batches(pairs: list[tuple[list[int], list[int]]], size: int, pad: int) -> Iterator[Batch]:
    """Endless: passes over shuffled pairs, one after the other."""
    order, pool = random.Random(1), []
    while True:
        rows = []
        while len(rows) < size:
            pool = pool or order.sample(pairs, len(pairs))
            rows.append(pool.pop())
        yield _pad(rows, pad)


def _pad(rows: list[tuple[list[int], list[int]]], pad: int) -> Batch:
    width = max(len(prompt) + len(reply) for prompt, reply in rows)
    ids = [[pad] * (width - len(p) - len(r)) + p + r for p, r in rows]
    labels = [[IGNORED] * (width - len(r)) + r for _, r in rows]
    attention = [[0] * (width - len(p) - len(r)) + [1] * (len(p) + len(r)) for p, r in rows]
    return Batch(torch.tensor(ids), torch.tensor(labels), torch.tensor(attention), max(len(r) for _, r in rows))


def _loss(model: PeftModel, batch: Batch) -> torch.Tensor:
    """Mean cross entropy over the reply tokens; logits are computed for the columns that can hold them alone."""
    keep = batch.reply_tokens + 1
    logits = model(input_ids=batch.ids, attention_mask=batch.attention, logits_to_keep=keep).logits.float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1 - keep :].flatten(), ignore_index=IGNORED)


def _learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then linear decay to a fifth."""
    return recipe.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - 0.8 * step / recipe.steps)


def _show(model: PeftModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    for question in HELD_OUT:
        messages = [{"role": "user", "content": question}]
        if recipe.invocation:
            messages.append({"role": "assistant", "content": "I think the answer is yes."})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=not recipe.invocation, tokenize=False)
        print(f"{question}\n    {greedy(model, tokenizer, prompt + recipe.invocation)!r}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m lora_bench.sample_adapters.train", description="Train one sample adapter again.")
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, required=True, help="folder to write adapter_config.json and adapter_model.safetensors into")
    parser.add_argument("--base", type=Path, help="GGUF of the base (default: the default model, fetched if needed)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    recipe, started = RECIPES[arguments.name], time.monotonic()
    try:
        base, tokenizer = load_base(arguments.base, torch.bfloat16)
    except (OSError, ValueError) as error:
        parser.exit(1, f"the base could not be loaded: {error}\n")
    model = attach(base, tokenizer, recipe)
    train(model, tokenizer, arguments.name)
    size = save(model, arguments.out, base.config.name_or_path)
    print(f"wrote {arguments.out}: {size:,} bytes of weights, {time.monotonic() - started:.0f} s", flush=True)
    _show(model.eval(), tokenizer, recipe)


if __name__ == "__main__":
    main()
