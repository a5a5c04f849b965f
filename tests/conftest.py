"""Fixtures that many test files share."""
from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lora_bench.engine.default_model import ensure_default_model
from lora_bench.engine.models.facts import ModelFacts, module_shapes


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings and logs of a test never touch the person's own."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))


@pytest.fixture(scope="session")
def sample_base() -> Path:
    """The default model's GGUF file; fetched on the first run on a machine."""
    return ensure_default_model()


@pytest.fixture(scope="session")
def golden() -> Path:
    """Reference token ids and logits, computed with transformers and PEFT; its README says how."""
    return Path(__file__).parent / "data" / "golden"


@pytest.fixture
def seed() -> int:
    """A fresh seed, printed so that a failure can be repeated; torch is seeded with it."""
    number = random.SystemRandom().randrange(1 << 31)
    print(f"seed {number}")
    torch.manual_seed(number)
    return number


@pytest.fixture(scope="session")
def tiny_facts() -> ModelFacts:
    """A decoder of two layers whose sizes are all different, where they may be."""
    return ModelFacts(
        architecture="llama", layers=2, hidden=24, heads=6, kv_heads=2, head_dim=6, intermediate=40, vocab=50, context=256,
        rms_eps=1e-5, rope_theta=1e4,
    )


AdapterFolder = Callable[..., Path]


@pytest.fixture
def adapter_folder(tmp_path: Path, tiny_facts: ModelFacts, seed: int) -> AdapterFolder:
    """`adapter_folder(name, targets, r=.., tensors=.., **config)` writes a PEFT folder of random weights for `tiny_facts`."""
    shapes = module_shapes(tiny_facts)

    def write(name: str, targets: tuple[str, ...] = ("q_proj", "v_proj"), r: int = 4, tensors: Mapping[str, Tensor] | None = None,
              **config: object) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        if tensors is None:
            tensors = {}
            for module, (d_out, d_in) in shapes.items():
                if module.rsplit(".", 1)[-1] in targets:
                    path = f"base_model.model.{'' if module == 'lm_head' else 'model.'}{module}"
                    tensors[f"{path}.lora_A.weight"] = torch.randn(r, d_in)
                    tensors[f"{path}.lora_B.weight"] = torch.randn(d_out, r)
        save_file(dict(tensors), folder / "adapter_model.safetensors")
        whole = {"peft_type": "LORA", "r": r, "lora_alpha": 2 * r, "target_modules": list(targets)} | config
        (folder / "adapter_config.json").write_text(json.dumps(whole))
        return folder

    return write
