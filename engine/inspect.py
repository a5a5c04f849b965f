"""What a base or an adapter is, from headers alone. `python -m lora_bench.engine.inspect PATH` prints it as JSON. No torch."""
from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .adapters.family import family
from .adapters.file import AdapterFile
from .adapters.open import is_adapter, open_adapter
from .adapters.scales import effective_scales
from .adapters.verdicts import field_verdicts
from .base_file import BaseFile, open_base
from .models.facts import ModelFacts, RopeScaling, module_shapes

PICKLED = "tensors: not looked into, those of a pickle (.bin) are known only when it is loaded"
OF_ARCHITECTURE = (
    "rotary_dim", "local_rope", "layers_without_rope", "windows", "fused", "norms", "norm_offset", "qk_norm", "activation",
    "embedding_scale",
    "attention_scale", "attention_softcap", "residual_scale", "logit_divisor", "logit_softcap",
)
CANNOT_BE_USED = 3
"""exit code for a file that is no base and no adapter that runs here"""


def inspect_path(path: str | Path) -> dict[str, Any]:
    """Plain data about the base or adapter at `path`; `kind` says which. All text in it is untrusted.

    Raises FormatError, AdapterError (ValueErrors) or OSError with a sentence that names the file, for all that loading would
    refuse as far as headers tell it; whether an adapter fits a base is seen when both are loaded.
    """
    path = Path(os.path.expanduser(path))
    return _adapter(open_adapter(path)) if is_adapter(path) else _base(open_base(path))


def _base(base: BaseFile) -> dict[str, Any]:
    facts, tokenizer = base.facts, base.tokenizer
    return {
        "kind": "base", "name": base.name, "path": str(base.path), "format": base.format, "architecture": facts.architecture,
        "parameters": base.parameters, "file_bytes": base.file_bytes, "weight_types": base.weight_types,
        "layers": facts.layers, "hidden": facts.hidden, "heads": facts.heads, "kv_heads": facts.kv_heads, "head_dim": facts.head_dim,
        "intermediate": facts.intermediate, "vocab": facts.vocab, "trained_context": facts.context,
        "rope_theta": facts.rope_theta, "rope_scaling": _stated(facts.rope_scaling), "rope_freq_factors": facts.rope_freq_factors,
        "tied": facts.tied, "attention_bias": facts.attention_bias, "output_bias": facts.output_bias, "mlp_bias": facts.mlp_bias,
        "other_facts": _other_facts(facts), "linear_modules": len(module_shapes(facts)),
        "tokenizer": {
            "from": str(tokenizer.path or "GGUF metadata"),
            "bos": tokenizer.bos, "eos": tokenizer.eos, "add_bos": tokenizer.add_bos, "end_tokens": list(base.end_tokens),
        },
        "chat_template": base.chat_template, "details": base.details, "notes": list(base.notes),
    }


def _stated(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Kind, factor, and whatever else is not as it would be if nothing were said."""
    if scaling is None:
        return None
    unsaid = asdict(RopeScaling(scaling.kind, scaling.factor))
    return {name: value for name, value in asdict(scaling).items() if name in ("kind", "factor") or value != unsaid[name]}


def _other_facts(facts: ModelFacts) -> dict[str, Any]:
    """What tells this decoder from a plain llama: every fact of an architecture that is not its default."""
    shown = {"windows": sorted(set(facts.windows)), "local_rope": facts.local_rope and facts.local_rope.theta, "norms": facts.norms.names}
    return {name: shown.get(name, getattr(facts, name)) for name in OF_ARCHITECTURE if getattr(facts, name) != getattr(ModelFacts, name)}


def _adapter(file: AdapterFile) -> dict[str, Any]:
    settings = file.settings
    answer = {
        "kind": "adapter", "name": file.default_name, "path": file.readable_path, "format": file.format, "file_bytes": file.weights_bytes,
        "base_model": settings.base_model, "rslora": settings.rslora, "r": settings.r, "lora_alpha": settings.alpha,
        "rank_pattern": dict(settings.rank_pattern), "alpha_pattern": dict(settings.alpha_pattern),
        "invocation_tokens": list(settings.invocation), "dora": settings.dora, "bias": settings.bias, "task": file.task,
        "prompt_prefix": file.prompt_prefix, "card": dict(file.card), "metadata": dict(file.metadata),
        "more_metadata_keys": file.metadata_keys - len(file.metadata),
        "fields": _fields(file), "checkpoints": [member.path.name for member in family(file.path) if member.step is not None],
        "notes": list(file.notes) + ([PICKLED] if file.entries is None else []),
    }
    return answer | (_tensors(file) if file.entries is not None and file.names is not None else {})


def _fields(file: AdapterFile) -> dict[str, Any]:
    """Honoured field -> its value as JSON; refused field -> why; the names of those that have no meaning here."""
    found = field_verdicts(file.path)
    answer = {
        "refused": {field.field: field.why for field in found if field.verdict == "refused"},
        "honoured": {field.field: field.value for field in found if field.verdict == "honoured"},
        "irrelevant": [field.field for field in found if field.verdict == "irrelevant"],
    }
    return {verdict: fields for verdict, fields in answer.items() if fields}


def _tensors(file: AdapterFile) -> dict[str, Any]:
    """Facts that follow from the tensors' shapes. Raises AdapterError where they and the config disagree."""
    entries, names, shapes = file.entries, file.names, file.shapes
    pairs = {pair.path: pair for pair in names.pairs}
    scales = effective_scales(file, pairs, shapes)
    return {
        "modules": len(pairs), "ranks": sorted({shapes[pair.a][0] for pair in pairs.values()}),
        "effective_scales": sorted(set(scales.values())), "targets": dict(Counter(path.rsplit(".", 1)[-1] for path in pairs)),
        "replaced": sorted(names.whole), "token_rows": {path: shapes[name][0] for path, name in names.rows.items() if shapes[name]},
        "dora": any(pair.magnitude for pair in pairs.values()), "lora_bias": any(pair.bias for pair in pairs.values()),
        "parameters": sum(entry.elements for entry in entries.values()), "tensors": len(entries),
        "dtypes": dict(Counter(entry.type for entry in entries.values())),
    }


def main() -> int:
    try:
        print(json.dumps(inspect_path(sys.argv[1]), ensure_ascii=True))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return CANNOT_BE_USED
    return 0


if __name__ == "__main__":
    sys.exit(main())
