"""The adapter_config.json of a PEFT adapter."""
from __future__ import annotations

from random import Random

from lora_bench.engine.adapters.fields import FIELDS

from .. import peft_folder
from ..mutations import mutate_json
from ..target import Target

WORDS = [*FIELDS, "LORA", "IA3", "all", "lora_only", "all-linear", "q_proj", "v_proj", "layers.0.self_attn.q_proj", ".*q_proj",
         r".*\.0\..*", "(a+)+$", "(.*.*.*)*x",
         "^(?:q|v)_proj$", "embed_tokens", "lm_head", "norm", "pissa", "pissa_niter_4", "olora", "eva", "loftq", "gaussian", "corda",
         "layers", "h", "default",
         "model.layers.0.self_attn.q_proj", "(?i)Q_PROJ", "layers\\.(0|1)\\.", "a{1,99999}b"]


def mutate(data: bytes, other: bytes, random: Random) -> bytes:
    config, weights = peft_folder.split(data)
    foreign = peft_folder.split(other)
    return peft_folder.join(mutate_json(config, foreign[0], random, WORDS), foreign[1] if random.random() < 0.1 else weights)


TARGET = Target(peft_folder.seeds, mutate, peft_folder.prepare, peft_folder.DOCUMENTED, peft_folder.names, seconds=5.0)
