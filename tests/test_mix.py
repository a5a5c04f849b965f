"""A mix made concrete: refusals, aLoRA starts, and the rows of W."""
from __future__ import annotations

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_bench.engine.mix import MixError, check_mix, fill_weights, resolve_mix
from lora_bench.engine.protocol import AdapterInfo, AdapterUse


def _info(name: str, invocation: tuple[int, ...] = ()) -> AdapterInfo:
    return AdapterInfo(
        name=name, path="", format="", digest="", ranks=(), effective_scales=(), matched=1, total=1, targets={}, bytes=0, rslora=False,
        dtype="", base_model="", invocation_tokens=invocation,
    )


INFOS = {name: _info(name) for name in ("pirate", "json")} | {"sure": _info("sure", (7, 8))}


def _words(ids: object) -> str:
    return " ".join(map(str, ids))  # type: ignore[call-overload]


def test_an_unknown_name_is_refused_with_close_ones() -> None:
    with pytest.raises(MixError, match="'pirat' is loaded; did you mean 'pirate'"):
        check_mix((AdapterUse("pirat"),), INFOS)
    with pytest.raises(MixError, match="loaded: 'json', 'pirate', 'sure'"):
        check_mix((AdapterUse("zzz"),), INFOS)
    with pytest.raises(MixError, match="loaded: none"):
        check_mix((AdapterUse("zzz"),), {})


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(MixError, match="'json' is in the mix twice"):
        check_mix((AdapterUse("json", 1), AdapterUse("json", 0.5)), INFOS)


@pytest.mark.parametrize("scale", [nan, inf, -inf, 1e7, -1e300])
def test_a_scale_that_is_no_number_is_refused(scale: float) -> None:
    with pytest.raises(MixError, match="finite"):
        check_mix((AdapterUse("json", scale),), INFOS)


def test_scale_zero_acts_nowhere_and_is_no_error() -> None:
    mix = (AdapterUse("json", 0.0), AdapterUse("pirate", -0.5))
    resolved = resolve_mix(mix, [1, 2, 3], INFOS, _words)
    assert resolved.names == ("pirate",)
    assert resolved.mix == mix
    assert resolved.activations == ()


def test_an_alora_starts_at_the_last_invocation_and_says_so() -> None:
    resolved = resolve_mix((AdapterUse("sure"),), [7, 8, 1, 7, 8, 2], INFOS, _words)
    assert resolved.active[0].start == 3
    (activation,) = resolved.activations
    assert (activation.found, activation.start, activation.length) == (True, 3, 2)
    assert activation.detail == "'7 8'", "what the other fields do not say"
    assert (activation.before, activation.tokens, activation.after) == ("7 8 1", ("7", "8"), "2")


def test_an_alora_without_its_invocation_is_off_and_says_why() -> None:
    resolved = resolve_mix((AdapterUse("sure"), AdapterUse("json")), [7, 9], INFOS, _words)
    assert resolved.names == ("json",)
    (activation,) = resolved.activations
    assert (activation.found, activation.start) == (False, -1)
    assert activation.detail == "nearest is [7, 9] at token 0, expected [7, 8]"


@given(st.integers(0, 6), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_weights_of_chunks_are_those_of_the_whole(before: int, chunks: list[int]) -> None:
    prompt = [1] * before + [7, 8] + [1] * 4
    mix = resolve_mix((AdapterUse("json", 0.5), AdapterUse("sure", -2.0)), prompt, INFOS, _words)
    columns = {"sure": 0, "json": 1}
    total = sum(chunks)
    weights = torch.zeros(total, 2)
    position = 0
    for count in chunks:
        fill_weights(weights, position, position, count, mix.active, columns)
        position += count
    expected = [[-2.0 if token >= before else 0.0, 0.5] for token in range(total)]
    assert weights.tolist() == expected
