"""Fixtures that many test files share."""
from __future__ import annotations

from pathlib import Path

import pytest

from lora_bench.engine.default_model import ensure_default_model


@pytest.fixture(scope="session")
def sample_base() -> Path:
    """The default model's GGUF file; fetched on the first run on a machine."""
    return ensure_default_model()


@pytest.fixture(scope="session")
def golden() -> Path:
    """Reference token ids and logits, computed with transformers and PEFT; its README says how."""
    return Path(__file__).parent / "data" / "golden"
