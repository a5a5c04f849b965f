"""transformers + PEFT on the weights of a loaded base, for comparison only; neither is a dependency of the engine."""
from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .chat import prompt_ids
from .loaded import LoadedModel
from .models.facts import ModelFacts
from .protocol import Prompt
from .weights.load import load_weights

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


PLAIN = ("architecture", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context", "rms_eps", "rope_theta",
         "tied")
"""the facts in which bases differ that the comparison is made for"""


class PeftBench:
    """An fp32 transformers model of the base of `loaded`, with at most one PEFT adapter. Raises ImportError without both packages."""

    def __init__(self, loaded: LoadedModel, adapter: str | None) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from peft import PeftModel
        from transformers import LlamaConfig, LlamaForCausalLM
        f = loaded.base.facts
        if f != ModelFacts(**{name: getattr(f, name) for name in PLAIN}):
            raise ValueError(f"{loaded.base.path}: the comparison is made for plain llama bases, without RoPE scaling, biases, windows and "
                             f"the like; this is a {f.architecture} model with some of them")
        config = LlamaConfig(
            vocab_size=f.vocab, hidden_size=f.hidden, intermediate_size=f.intermediate, num_hidden_layers=f.layers,
            num_attention_heads=f.heads, num_key_value_heads=f.kv_heads, head_dim=f.head_dim, max_position_embeddings=f.context,
            rms_norm_eps=f.rms_eps, rope_theta=f.rope_theta, tie_word_embeddings=f.tied)
        weights = load_weights(loaded.base, "cpu", torch.float32)
        named = {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in weights.items()}
        self._loaded = loaded
        self._model = LlamaForCausalLM(config).float().eval()
        missing, spare = self._model.load_state_dict(named, strict=False, assign=True)
        if spare or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"{loaded.base.path}: transformers wants other tensors: {[*missing, *spare][:4]}")
        self._model.tie_weights()
        folder = None if adapter is None else Path(adapter)
        self._peft = folder and PeftModel.from_pretrained(self._model, str(folder if folder.is_dir() else folder.parent)).eval()

    @torch.inference_mode()
    def decode(self, prompt: Prompt, tokens: int, adapter: bool) -> float:
        """Greedy tokens/s after the first, by `generate`, as users of these libraries run it."""
        if self._peft is not None and not adapter:
            with self._peft.disable_adapter():
                return self._greedy(self._peft, prompt, tokens)
        return self._greedy(self._peft if adapter else self._model, prompt, tokens)

    def _greedy(self, model: PreTrainedModel | PeftModel, prompt: Prompt, tokens: int) -> float:
        ids, _ = prompt_ids(self._loaded.tokenizer, self._loaded.base.chat_template, prompt)
        prompt_tokens, times = torch.tensor([ids]), _Times()
        model.generate(input_ids=prompt_tokens, attention_mask=torch.ones_like(prompt_tokens), streamer=times, do_sample=False,
                       min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0)
        first, *_, last = times.tokens
        return (tokens - 1) / (last - first)


class _Times:
    """A streamer for `generate` that keeps when each token came."""

    def __init__(self) -> None:
        self._calls: list[float] = []

    @property
    def tokens(self) -> list[float]:
        """Seconds of the drawn tokens; the first call of `put` brings the prompt."""
        return self._calls[1:]

    def put(self, _: torch.Tensor) -> None:
        self._calls.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""
