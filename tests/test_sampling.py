"""Sampling: what each setting keeps, the law of the draws, and that a batch changes nothing."""
from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from lora_bench.kernels.device_sampling import DRAW_WORDS, DeviceSampler
from lora_bench.kernels.sampling import Draw, gumbel, sample


def _possible(logits: torch.Tensor, tries: int = 400, **settings: float) -> set[int]:
    return {sample(logits, [Draw(temperature=1.0, seed=3, position=p, **settings)])[0] for p in range(tries)}


LOGITS = torch.log(torch.tensor([[0.05, 0.5, 0.15, 0.3]]))


def test_greedy_is_the_best_token() -> None:
    assert sample(LOGITS, [Draw()]) == [1]


def test_top_k_top_p_min_p_keep_what_they_say() -> None:
    assert _possible(LOGITS) == {0, 1, 2, 3}
    assert _possible(LOGITS, top_k=2) == {1, 3}
    assert _possible(LOGITS, top_k=99) == {0, 1, 2, 3}
    assert _possible(LOGITS, top_p=0.79) == {1, 3}
    assert _possible(LOGITS, top_p=0.81) == {1, 2, 3}
    assert _possible(LOGITS, top_p=0.0) == {1}
    assert _possible(LOGITS, min_p=0.25) == {1, 2, 3}
    assert _possible(LOGITS, top_k=3, top_p=0.8, min_p=0.5) == {1, 3}


def test_draws_follow_the_softmax() -> None:
    drawn = torch.tensor([sample(LOGITS, [Draw(temperature=1.0, seed=s)])[0] for s in range(4000)])
    share = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(share, LOGITS.exp()[0], atol=0.04, rtol=0.0)


def test_temperature_sharpens_and_flattens() -> None:
    cold = [sample(LOGITS, [Draw(temperature=0.05, seed=s)])[0] for s in range(200)]
    assert cold.count(1) >= 195
    hot = [sample(LOGITS, [Draw(temperature=50.0, seed=s)])[0] for s in range(2000)]
    assert min(hot.count(t) for t in range(4)) > 350


def test_near_temperature_zero_the_best_token_is_drawn() -> None:
    for cold in (1e-12, 1e-308, 5e-324):
        assert sample(LOGITS, [Draw(temperature=cold, seed=4)]) == [1]


def test_a_penalty_that_leaves_no_finite_number_is_told() -> None:
    assert sample(torch.tensor([[-3e38, 1.0]]), [Draw(repetition_penalty=100.0, seen=torch.tensor([True]))]) == [-1]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    seen = torch.tensor([True, False, True])
    assert sample(torch.tensor([[3.0, 2.0, -1.0]]), [Draw(repetition_penalty=2.0, seen=seen)]) == [1]
    assert sample(torch.tensor([[-3.0, -2.5, -1.5]]), [Draw(repetition_penalty=2.0, seen=seen)]) == [1]
    logits = torch.tensor([[3.0, 2.0, -1.0]])
    sample(logits, [Draw(repetition_penalty=2.0, seen=seen)])
    assert logits.tolist() == [[3.0, 2.0, -1.0]]


def test_a_row_alone_and_in_a_batch_draw_the_same() -> None:
    torch.manual_seed(torch.seed() % 1000)
    logits = torch.randn(6, 500)
    draws = [
        Draw(), Draw(temperature=0.9, seed=4, position=7), Draw(temperature=1.2, top_k=40, seed=1),
        Draw(temperature=0.7, top_p=0.8, seed=2**63 + 5, position=3), Draw(temperature=1.0, min_p=0.1, seed=-1),
        Draw(temperature=0.8, repetition_penalty=1.3, seen=torch.arange(500) < 50, seed=9),
    ]
    alone = [sample(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]
    assert sample(logits, draws) == alone
    assert sample(logits.flip(0), draws[::-1]) == alone[::-1]


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 2, "top_p": 0.0, "min_p": 0.9}], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("count", [1, 4])
def test_rows_of_which_none_is_finite_are_marked(settings: dict, bad: float, count: int) -> None:
    one = torch.cat((torch.full((1, count), bad), LOGITS), 1)
    assert sample(one, [Draw(temperature=0.7, **settings)]) == [-1]
    assert sample(one[:, :count].repeat(3, 1), [Draw(temperature=0.7, **settings)] * 3) == [-1] * 3


def test_a_row_that_is_not_finite_is_marked_and_harms_no_other() -> None:
    logits = torch.stack((torch.tensor([0.0, 1.0, float("nan")]), torch.tensor([0.0, 5.0, 1.0]), torch.tensor([0.0, float("inf"), 1.0])))
    assert sample(logits, [Draw()] * 3) == [-1, 1, -1]
    assert sample(logits, [Draw(temperature=0.001, top_p=0.5, top_k=1)] * 3) == [-1, 1, -1]
    assert sample(logits, [Draw(vocab=2), Draw(), Draw(vocab=1)]) == [1, 1, 0], "numbers of ids that a row lacks are not looked at"


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    a = gumbel(7, 3, 1000)
    assert torch.equal(a, gumbel(7, 3, 1000)) and torch.equal(a[:10], gumbel(7, 3, 10))
    assert torch.isfinite(gumbel(0, 0, 200_000)).all()
    for other in (gumbel(8, 3, 1000), gumbel(7, 4, 1000)):
        assert torch.corrcoef(torch.stack((a, other)))[0, 1].abs() < 0.15
    assert abs(a.mean().item() - 0.5772) < 0.2  # Euler's constant is the mean of the law


def test_equal_numbers_are_kept_or_cut_together() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.2, 0.1, 0.4]]))
    assert _possible(logits, top_k=2) == {1, 2, 4}
    assert _possible(logits, top_p=0.5) == {1, 2, 4}
    assert _possible(logits, top_k=2, top_p=0.45) == {4}


def test_a_device_sampler_without_triton_draws_as_sample_does() -> None:
    host = torch.zeros(4, DRAW_WORDS, dtype=torch.int64)
    sampler = DeviceSampler(host.numpy(), host, 4)
    tokens = torch.full((3,), -7)
    draws = [Draw(temperature=1.0, seed=5, position=9), Draw()]
    logits = torch.cat((LOGITS, LOGITS, torch.tensor([[1.0, 2.0, float("nan"), 3.0]])))
    sampler.set(draws)
    sampler.run(logits, tokens)
    assert tokens.tolist() == [*sample(logits[:2], draws), -1]
    sampler.move_on([12, 3])
    sampler.run(logits, tokens)
    assert tokens.tolist() == [*sample(logits[:2], [Draw(temperature=1.0, seed=5, position=12), Draw(position=3)]), -1]


def test_draws_that_move_on_have_the_words_of_those_that_are_set_there(seed: int) -> None:
    """Whatever was set before, and is set after."""
    rng = random.Random(seed)
    hosts = [torch.zeros(6, DRAW_WORDS, dtype=torch.int64) for _ in range(2)]
    moved, set_anew = (DeviceSampler(host.numpy(), host, 40) for host in hosts)
    for _ in range(40):
        draws = [Draw(rng.choice((0.0, 0.7)), top_k=rng.randrange(9), seed=rng.randrange(-9, 1 << 64)) for _ in range(rng.randint(1, 6))]
        moved.set(draws)
        for _ in range(rng.randrange(3)):
            positions = [rng.randrange(1 << 20) for _ in draws]
            moved.move_on(positions)
            draws = [replace(draw, position=position) for draw, position in zip(draws, positions, strict=True)]
        set_anew.set(draws)
        assert torch.equal(*hosts)
