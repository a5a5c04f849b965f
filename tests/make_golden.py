"""Computes tests/data/golden/peft-*.json and the PEFT half of alora.json: `python tests/make_golden.py --out DIR [CASE ...]`.

Needs the `train` extra. transformers and PEFT in fp32 on the dequantised default base, CPU, eager attention: numbers that our
engine had no part in. tests/data/golden/README.md says what the files hold.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import LlamaForCausalLM

import lora_bench.sample_adapters as sample_adapters
from lora_bench.sample_adapters.hf_base import load_base

GOLDEN = Path(__file__).parent / "data" / "golden"
FOLDERS = {"a-pirate": "pirate", "b-json": "json", "c-caps": "caps", "d-alora-certainty": "certainty", "robot": "robot"}
CASES: dict[str, dict[str, float]] = {
    "base": {},
    "a": {"a-pirate": 1.0},
    "b": {"b-json": 1.0},
    "c": {"c-caps": 1.0},
    "a0.3": {"a-pirate": 0.3},
    "a0": {"a-pirate": 0.0},
    "a-0.5": {"a-pirate": -0.5},
    "a1+c0.5": {"a-pirate": 1.0, "c-caps": 0.5},
    "robot": {"robot": 1.0},
    "robot1+a0.5": {"robot": 1.0, "a-pirate": 0.5},
    "robot0.7+b0.8": {"robot": 0.7, "b-json": 0.8},
}
NEW_TOKENS = 48
FULL_LOGITS_OF = "P01"


def attach(base: LlamaForCausalLM, mix: dict[str, float]) -> PeftModel:
    """The base with the adapters of `mix` all active, each module's own scaling times the mix's scale."""
    root = Path(sample_adapters.__file__).parent
    first, *others = mix
    model = PeftModel.from_pretrained(base, root / FOLDERS[first], adapter_name=first)
    for name in others:
        model.load_adapter(root / FOLDERS[name], adapter_name=name)
    model.base_model.set_adapter(list(mix))
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for name in layer.scaling.keys() & mix.keys():  # set_scale would forget rsLoRA
                layer.scaling[name] *= mix[name]
    return model.eval()


def last_logits(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """fp32 logits [vocabulary] after the last prompt token."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), logits_to_keep=1).logits[0, -1].numpy()


def greedy(model: torch.nn.Module, ids: list[int], limit: int) -> tuple[list[int], list[float]]:
    """(new tokens, gap between the two largest logits at each), up to and with the end token."""
    prompt = torch.tensor([ids])
    with torch.no_grad():
        out = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=limit,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    top = [logits[0].topk(2).values.tolist() for logits in out.logits]
    return out.sequences[0, len(ids) :].tolist(), [round(first - second, 4) for first, second in top]


def top(logits: np.ndarray) -> dict[str, Any]:
    """The 20 largest logits and their ids, and the logsumexp of all."""
    order = np.argsort(-logits, kind="stable")[:20]
    return {
        "top_ids": order.tolist(),
        "top_logits": [round(float(logits[i]), 5) for i in order],
        "logsumexp": round(float(torch.from_numpy(logits).logsumexp(0)), 5),
    }


def make_case(base: LlamaForCausalLM, tokenizer: Any, case: str, out: Path) -> None:
    """Writes peft-CASE.json and peft-CASE-full.npz."""
    mix = CASES[case]
    model = attach(base, mix) if mix else base
    results = {}
    for key, prompt in json.loads((GOLDEN / "prompts.json").read_text()).items():
        logits = last_logits(model, prompt["ids"])
        tokens, gaps = greedy(model, prompt["ids"], NEW_TOKENS)
        results[key] = top(logits) | {"mean": round(float(logits.mean()), 6), "tokens": tokens, "text": tokenizer.decode(tokens)}
        results[key] |= {"gaps": gaps, "min_gap": min(gaps)}
        if key == FULL_LOGITS_OF:
            np.savez_compressed(out / f"peft-{case}-full.npz", **{key: logits})
    (out / f"peft-{case}.json").write_text(json.dumps({"case": case, "adapters": list(mix.items()), "results": results}) + "\n")
    if mix:
        model.unload()  # gives the base back as it was


def make_alora(base: LlamaForCausalLM, tokenizer: Any, out: Path) -> None:
    """Writes alora.json: the stored prompts and foreign numbers, with PEFT's half computed again."""
    cases = json.loads((GOLDEN / "alora.json").read_text())
    for case in cases.values():
        model = attach(base, dict(case["adapters"]))
        logits = top(last_logits(model, case["ids"]))
        tokens, _ = greedy(model, case["ids"], len(case["peft_tokens"]))
        case |= {f"peft_{key}": value for key, value in logits.items()}
        case |= {"peft_tokens": tokens, "peft_text": tokenizer.decode(tokens)}
        model.unload()
    (out / "alora.json").write_text(json.dumps(cases, indent=1) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compute the golden data again with transformers and PEFT.")
    parser.add_argument("cases", nargs="*", help="which to make (default: all, alora too)")
    parser.add_argument("--out", type=Path, required=True, help="an existing folder")
    parser.add_argument("--base", type=Path, help="GGUF of the base (default: the default model, fetched if needed)")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - {*CASES, "alora"}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)} and alora")
    base, tokenizer = load_base(arguments.base, torch.float32)
    for case in arguments.cases or [*CASES, "alora"]:
        if case == "alora":
            make_alora(base, tokenizer, arguments.out)
        else:
            make_case(base, tokenizer, case, arguments.out)
        print(f"wrote {case}", flush=True)


if __name__ == "__main__":
    main()
