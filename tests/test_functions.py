"""The pure functions of humanline.py against formulas written out here: perception, objectives, log-probs."""

import doctest
import inspect
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import eval as eval_module
import humanline
from eval import capacity
from humanline import (dpo_loss, group_advantages, grpo_loss, humanline_clip, humanline_rejected, humanline_sample,
                       kto_loss, token_logps)

settings.register_profile("functions", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("functions")

each_dtype = pytest.mark.parametrize("dtype", [np.float64, np.float32])
nats = st.floats(-4, 4, allow_subnormal=False)
rows_of_nats = arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 6)), elements=nats)


def assert_close(value, expected, dtype=np.float64, floor=1e-2):
    """Relative error <= 1e-9 in float64 (so that no float32 step goes unseen), <= 1e-4 in float32, at every element.

    Elements below `floor` times the largest one are measured against that instead.
    """
    expected, tolerance = np.asarray(expected), {np.float64: 1e-9, np.float32: 1e-4}[dtype]
    np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance * floor * abs(expected).max(initial=0))


def differentiate(function, *inputs, upstream=1.0):
    """The value of function(*inputs), and sum(upstream * value)'s gradient with respect to each input, in numpy."""
    inputs = [torch.tensor(x, requires_grad=True) for x in inputs]
    value = function(*inputs)
    assert value.dtype == inputs[0].dtype
    upstream = torch.as_tensor(upstream, dtype=value.dtype).expand_as(value)
    grads = torch.autograd.grad(value, inputs, upstream, allow_unused=True, materialize_grads=True)
    return value.detach().numpy(), *(grad.numpy() for grad in grads)


def ragged(shape, dtype, seed=0, scale=1.0):
    """(N, T) normal numbers that are exact zeros after each row's own length, and the mask of the others."""
    rng = np.random.default_rng(seed)
    mask = np.arange(shape[1]) < rng.integers(1, shape[1] + 1, (shape[0], 1))
    return (rng.normal(0, scale, shape) * mask).astype(dtype), mask


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_the_examples_in_the_docstrings_are_true():
    for module, least in ((humanline, 3), (eval_module, 1)):
        results = doctest.testmod(module)
        assert results.attempted >= least and results.failed == 0


def test_the_defaults_are_the_papers_and_the_authors():
    d, ones = torch.tensor([[-9.0, 0.125, 9.0]]).double(), torch.ones(2).double()
    assert_close(humanline_clip(d), [[-1.5, 0.125, 1.5]])
    assert_close(dpo_loss(ones[:, None], -ones[:, None]), [math.log(1 + math.exp(-0.2))] * 2)
    assert_close(kto_loss(6 * ones[:, None], torch.tensor([1, 0]), 1.0), [1 - sigmoid(0.5), sigmoid(0.5)])
    assert_close(group_advantages(torch.tensor([1.0, 0.0]).double(), torch.tensor([3, 3])), [0.5 / 0.51, -0.5 / 0.51])
    assert_close(grpo_loss(d, d, ones[:1]), [[-math.exp(-9), -math.exp(0.125), -1.2]])  # and no KL penalty
    many, mask = torch.randn(4, 500, generator=seeded(0)), torch.ones(4, 500)
    named = humanline_rejected(many, mask, gamma_p=0.5, gamma_r=0.01, beta_p=1.0, beta_r=1.0, generator=seeded(1))
    assert torch.equal(humanline_rejected(many, mask, generator=seeded(1)), named)


# --- capacity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma, a, perceived", [
    (0.61, 0.01, 0.0553), (0.61, 0.1, 0.1863), (0.61, 0.5, 0.4206), (0.61, 0.9, 0.7117), (0.61, 0.99, 0.9116),
    (0.69, 0.01, 0.0397), (0.69, 0.1, 0.1701), (0.69, 0.5, 0.4540), (0.69, 0.9, 0.7749), (0.69, 0.99, 0.9451),
])
def test_capacity_gives_the_weights_of_tversky_and_kahneman(gamma, a, perceived):
    assert capacity(a, gamma) == pytest.approx(perceived, abs=5e-5)


# --- humanline clipping -----------------------------------------------------------------------------------------------


@each_dtype
def test_clipping_equals_the_formula(dtype):
    d = np.random.default_rng(0).normal(0, 2, (6, 7)).astype(dtype)
    value, grad = differentiate(lambda x: humanline_clip(x, -1.0, 2.5), d, upstream=3.0)
    assert_close(value, np.minimum(np.maximum(d.astype(float), -1.0), 2.5), dtype)
    assert_close(grad, 3.0 * ((d > -1.0) & (d < 2.5)), dtype)


@given(d=rows_of_nats, low=st.floats(-3, -0.1), high=st.floats(0.1, 3))
def test_clipping_passes_no_gradient_outside_the_interval_and_all_of_it_inside(d, low, high):
    assume((abs(d - low) > 1e-6).all() and (abs(d - high) > 1e-6).all())
    _, grad = differentiate(lambda x: humanline_clip(x, low, high), d)
    assert (grad == ((low < d) & (d < high))).all()


# --- humanline sampling -----------------------------------------------------------------------------------------------


@given(d=rows_of_nats, mean_p=st.floats(0.05, 0.95), mean_r=st.floats(0.05, 0.95), seed=st.integers(0, 99))
@settings(max_examples=80)
def test_sampling_becomes_clipping_as_the_betas_concentrate(d, mean_p, mean_r, seed):
    """Theorem 4.3: the rejected set is the complement of [M_P m_P, 1 / (M_R m_R)], in ratios."""
    low, high = np.exp(d).max() * mean_p, 1 / (np.exp(-d).max() * mean_r)
    assume((abs(d - np.log(low)) > 0.01).all() and (abs(d - np.log(high)) > 0.01).all())
    # Masked positions beyond every ratio would move M_P and M_R if they counted.
    padded, mask = np.pad(d, ((0, 0), (1, 1)), constant_values=(-50, 50)), np.pad(np.ones_like(d), ((0, 0), (1, 1)))
    betas = dict(gamma_p=mean_p * 1e8, beta_p=(1 - mean_p) * 1e8, gamma_r=mean_r * 1e8, beta_r=(1 - mean_r) * 1e8)
    rejected = humanline_rejected(torch.tensor(padded), torch.tensor(mask), **betas, generator=seeded(seed)).numpy()
    assert (rejected[:, 1:-1] == ((np.exp(d) < low) | (np.exp(d) > high))).all()

    sample = lambda x: humanline_sample(x, torch.tensor(mask), **betas, generator=seeded(seed))
    _, sampled_grad = differentiate(sample, padded)
    _, clipped_grad = differentiate(lambda x: humanline_clip(x, math.log(low), math.log(high)), d)
    assert (sampled_grad[:, 1:-1] == clipped_grad).all()


@pytest.mark.parametrize("gamma_p, beta_p, gamma_r, beta_r", [
    (0.5, 1, 0.01, 1), (0.5, 1, 2, 1), (1, 3, 1, 0.5), (2, 1, 1, 2),
])
def test_each_token_is_kept_with_the_probability_that_the_betas_give(gamma_p, beta_p, gamma_r, beta_r):
    """P(B <= x) is x^γ where β = 1, and 1 - (1 - x)^β where γ = 1."""
    at_most = lambda x, gamma, beta: x**gamma if beta == 1 else 1 - (1 - x) ** beta
    levels, count = np.array([-1.2, -0.3, 0.0, 0.4, 0.9]), 20_000
    d = torch.tensor(levels)[:, None].expand(-1, count)
    rejected = humanline_rejected(d, torch.ones_like(d), gamma_p, gamma_r, beta_p, beta_r, seeded(0)).double()
    for level, value in zip(levels, 1 - rejected.mean(1)):
        expected = (at_most(math.exp(level - levels.max()), gamma_p, beta_p)
                    * at_most(math.exp(levels.min() - level), gamma_r, beta_r))
        assert abs(value - expected) <= 5 * math.sqrt(expected * (1 - expected) / count) + 1e-9


@each_dtype
def test_sampling_keeps_every_value_and_passes_gradient_at_kept_tokens_only(dtype):
    d, mask = ragged((8, 40), dtype, scale=1.5)
    rejected = humanline_rejected(torch.tensor(d), torch.tensor(mask), generator=seeded(3)).numpy()
    value, grad = differentiate(lambda x: humanline_sample(x, torch.tensor(mask), generator=seeded(3)), d, upstream=2.0)
    assert (value == d).all()
    assert (grad == 2.0 * ~rejected).all()
    assert 0 < rejected.sum() < mask.sum() and not rejected[~mask].any()


@pytest.mark.parametrize("huge", [-1e4, -60.0, 60.0, 1e4])
def test_a_masked_position_neither_counts_nor_is_rejected_whatever_it_holds(huge):
    d, mask = map(torch.tensor, ragged((6, 30), np.float32, scale=1.5))
    expected = humanline_rejected(d, mask, gamma_r=0.5, generator=seeded(0))
    value = humanline_rejected(d.masked_fill(~mask, huge), mask, gamma_r=0.5, generator=seeded(0))
    assert torch.equal(value, expected) and expected.any() and not value[~mask].any()


def test_without_a_completion_token_nothing_is_rejected():
    d = torch.randn(2, 3)
    assert not humanline_rejected(d, torch.zeros(2, 3)).any()
    assert torch.equal(humanline_sample(d, torch.zeros(2, 3)), d)


def test_sampling_survives_ratios_that_overflow():
    d = torch.tensor([[800.0, 799.9, 799.0]])  # B_P = 0.6 rejects ratios below e^799.5, B_R = 0.3 those above e^800.2
    assert humanline_rejected(d, d == d, 6e7, 3e7, 4e7, 7e7, seeded(0)).tolist() == [[False, False, True]]
    assert humanline_rejected(-d, d == d, 3e7, 6e7, 7e7, 4e7, seeded(0)).tolist() == [[False, False, True]]


def test_sampling_with_a_generator_leaves_the_global_ones_alone(monkeypatch):
    reseeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded.append)  # what torch.manual_seed does to every GPU
    d = torch.randn(2, 50)
    before = torch.get_rng_state()
    humanline_rejected(d, d == d, generator=seeded(0))
    assert torch.equal(torch.get_rng_state(), before) and reseeded == []


def test_without_a_generator_sampling_draws_from_the_global_one():
    d = torch.randn(2, 50, generator=seeded(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = (humanline_rejected(d, d == d) for _ in range(2))
        torch.manual_seed(0)
        assert torch.equal(first, humanline_rejected(d, d == d))
    assert not torch.equal(first, second)


# --- DPO --------------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo_equals_the_formula_for_completions_of_different_length(beta, dtype):
    (chosen, _), (rejected, _) = ragged((5, 7), dtype, 1), ragged((5, 4), dtype, 2)
    upstream, dpo = np.linspace(0.5, 2, 5), lambda w, l: dpo_loss(w, l, beta)
    margin = [beta * (sum(w) - sum(l)) for w, l in zip(chosen.astype(float), rejected.astype(float))]
    slope = [-u * beta * sigmoid(-m) for u, m in zip(upstream, margin)]
    loss, d_chosen, d_rejected = differentiate(dpo, chosen, rejected, upstream=upstream)
    assert_close(loss, [math.log(1 + math.exp(-m)) for m in margin], dtype)
    assert_close(d_chosen, np.repeat(slope, 7).reshape(5, 7), dtype)
    assert_close(d_rejected, -np.repeat(slope, 4).reshape(5, 4), dtype)


# --- KTO --------------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("desirable", [[True, False, True, False, False], [True] * 5, [False] * 5])
def test_kto_equals_the_formula_for_mixed_and_for_one_sided_batches(desirable, dtype):
    d, _ = ragged((5, 6), dtype, 3)
    beta, kl, upstream = 0.6, 0.8, np.linspace(0.5, 2, 5)
    loss, slope = [], []
    for row, good, u in zip(d.astype(float), desirable, upstream):
        away = beta * (sum(row) - kl) * (1 if good else -1)
        loss.append(1 - sigmoid(away))
        slope.append(-u * beta * (1 if good else -1) * sigmoid(away) * (1 - sigmoid(away)))
    kto = lambda x: kto_loss(x, torch.tensor(desirable), kl, beta)
    value, grad = differentiate(kto, d, upstream=upstream)
    assert_close(value, loss, dtype)
    assert_close(grad, np.repeat(slope, 6).reshape(5, 6), dtype)


def test_no_gradient_flows_into_the_kl_of_kto():
    d, kl = torch.randn(4, 3, requires_grad=True), torch.tensor(0.3, requires_grad=True)
    loss = kto_loss(d, torch.tensor([True, False, True, True]), kl)
    d_grad, kl_grad = torch.autograd.grad(loss.sum(), [d, kl], allow_unused=True)
    assert kl_grad is None and d_grad.abs().min() > 0
    assert torch.equal(loss, kto_loss(d, torch.tensor([True, False, True, True]), 0.3))


# --- GRPO -------------------------------------------------------------------------------------------------------------


@each_dtype
def test_advantages_equal_the_formula_for_interleaved_groups(dtype):
    rng = np.random.default_rng(0)
    rewards, ids = rng.normal(1, 2, 24).astype(dtype), rng.permutation(np.repeat([7, -1, 40, 3], [3, 6, 10, 5]))
    expected = []
    for reward, group_id in zip(rewards.astype(float), ids):
        group = [float(r) for r, i in zip(rewards, ids) if i == group_id]
        mean = sum(group) / len(group)
        expected.append((reward - mean) / (math.sqrt(sum((r - mean) ** 2 for r in group) / len(group)) + 0.01))
    value = group_advantages(torch.tensor(rewards), torch.tensor(ids))
    assert value.numpy().dtype == dtype
    assert_close(value, expected, dtype)


groups = st.lists(st.tuples(st.integers(0, 3), st.integers(-10, 10)), min_size=1, max_size=20)


@each_dtype
@pytest.mark.parametrize("epsilon, kl_beta", [(0.2, 0.0), (0.2, 0.3), (0.5, 0.04)])
def test_grpo_equals_the_formula(epsilon, kl_beta, dtype):
    d, _ = ragged((6, 9), dtype, 4, scale=0.6)
    perceived, _ = ragged((6, 9), dtype, 5, scale=0.6)  # unrelated to d, to tell the two apart
    advantages = np.array([1.5, -1.5, 0.3, -0.3, 0, 2]).astype(dtype)
    upstream = np.random.default_rng(6).uniform(0.5, 2, d.shape)
    loss, d_raw, d_perceived = np.zeros((3, *d.shape))
    for i, t in np.ndindex(d.shape):
        a, raw, ratio = float(advantages[i]), float(d[i, t]), math.exp(perceived[i, t])
        clipped = min(max(ratio, 1 - epsilon), 1 + epsilon)
        loss[i, t] = -min(a * ratio, a * clipped) + kl_beta * (math.exp(-raw) + raw - 1)
        stopped = ratio > 1 + epsilon if a > 0 else ratio < 1 - epsilon
        d_perceived[i, t] = 0 if stopped else -upstream[i, t] * a * ratio
        d_raw[i, t] = upstream[i, t] * kl_beta * (1 - math.exp(-raw))
    grpo = lambda x, y: grpo_loss(x, y, torch.tensor(advantages), epsilon, kl_beta)
    for value, expected in zip(differentiate(grpo, d, perceived, upstream=upstream), (loss, d_raw, d_perceived)):
        assert_close(value, expected, dtype)


def test_grpo_at_a_ratio_of_1_is_minus_the_advantage_with_its_full_gradient():
    advantages = np.array([1.5, -0.5])
    grpo = lambda d, perceived: grpo_loss(d, perceived, torch.tensor(advantages), kl_beta=0.1)
    loss, _, grad = differentiate(grpo, np.zeros((2, 3)), np.zeros((2, 3)))
    assert (loss == -advantages[:, None]).all() and (grad == -advantages[:, None]).all()


# --- All losses -------------------------------------------------------------------------------------------------------


def test_dpo_and_kto_keep_their_precision_far_from_zero():
    dpo, dpo_grad, _ = differentiate(lambda w, l: dpo_loss(w, l, 1.0), np.float32([[-1e3], [1e3], [30]]), np.zeros((3, 1), 'f'))
    kto, kto_grad = differentiate(lambda x: kto_loss(x, torch.tensor([True, False]), 0.0, 1.0), np.float32([[30], [-30]]))
    tiny = math.exp(-30)
    assert_close(dpo, [1e3, 0, tiny], np.float32, floor=0)
    assert_close(dpo_grad, [[-1], [0], [-tiny]], np.float32, floor=0)
    assert_close(kto, [tiny, tiny], np.float32, floor=0)
    assert_close(kto_grad, [[-tiny], [tiny]], np.float32, floor=0)


@given(d=rows_of_nats, width=st.integers(1, 5), kl_beta=st.sampled_from([0.0, 0.2]))
def test_padding_changes_no_loss_and_no_gradient(d, width, kl_beta):
    n, t = d.shape
    padded, mask = np.pad(d, ((0, 0), (0, width))), np.pad(np.ones_like(d), ((0, 0), (0, width)))
    sides = torch.arange(n) % 2 == 0
    masked = lambda x: torch.tensor(mask[:, : x.shape[1]])
    for loss in (lambda x: dpo_loss(humanline_clip(x), -2 * x),
                 lambda x: kto_loss(humanline_clip(x), sides, 0.2),
                 lambda x: (grpo_loss(x, humanline_clip(x), sides.double() - 0.5, 0.2, kl_beta) * masked(x)).sum(1)):
        (value, grad), (padded_value, padded_grad) = differentiate(loss, d), differentiate(loss, padded)
        assert_close(padded_value, value)
        assert_close(padded_grad[:, :t], grad)


# --- Pasting ----------------------------------------------------------------------------------------------------------


def pasted(name: str) -> dict:
    """A file that holds three imports, the source of a function, and what its docstring says to paste with it."""
    sentence = re.search(r"Paste with ([^.]*)\.", getattr(humanline, name).__doc__)
    names = [name, *(re.findall(r"`(\w+)`", sentence[1]) if sentence else [])]
    file = dict(torch=torch, F=torch.nn.functional, Tensor=torch.Tensor)
    exec("\n\n".join(inspect.getsource(getattr(humanline, name)) for name in names), file)
    assert all(file[name] is not getattr(humanline, name) for name in names)
    return file


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


# name: what it is called with, each time; together they reach every line of it
PASTED = {
    "humanline_clip": lambda: [(normal(0, 4, 9),)],
    "humanline_rejected": lambda: [(normal(0, 4, 9), torch.zeros(4, 9)),
                                   (normal(0, 4, 9), normal(1, 4, 9) > -1, 0.5, 0.1, 1.0, 1.0, seeded(2))],
    "humanline_sample": lambda: [(normal(0, 4, 9), normal(1, 4, 9) > -1, 0.5, 0.1, 1.0, 1.0, seeded(2))],
    "dpo_loss": lambda: [(normal(0, 4, 9), normal(1, 4, 7)), (normal(0, 4, 9), normal(1, 4, 7), 0.7)],
    "kto_loss": lambda: [(normal(0, 4, 9), normal(1, 4) > 0, torch.tensor(0.3), 0.5),
                         (normal(0, 4, 9), normal(1, 4) > 0, 0.3)],
    "group_advantages": lambda: [(normal(0, 8), torch.tensor([3, 1, 3, 3, 1, 5, 1, 3]))],
    "grpo_loss": lambda: [(normal(0, 4, 9), normal(1, 4, 9), normal(2, 4)),
                          (normal(0, 4, 9), normal(1, 4, 9), normal(2, 4), 0.3, 0.1)],
    "taper_weight": lambda: [(normal(0, 4, 9), -normal(2, 4, 9).abs(), normal(3, 4, 9) > 0, normal(1, 4) > 0, 0.7)],
    "token_kl": lambda: [(normal(0, 4, 9),)],
    "token_logps": lambda: [(*parameters()[:2], LABELS), (*parameters()[:2], LABELS, parameters()[2], 2.0, 5)],
}


@pytest.mark.parametrize("name", PASTED)
def test_a_function_pasted_with_what_its_docstring_names_does_the_same_elsewhere(name):
    def value_and_gradients(function, arguments):
        leaves = [x.requires_grad_() for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point()]
        value = function(*arguments)
        if not value.requires_grad:  # booleans and weights
            return [value]
        upstream = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).view_as(value)
        return [value, *torch.autograd.grad(value, leaves, upstream, allow_unused=True, materialize_grads=True)]

    # The arguments are made twice, as a generator moves on.
    for ours, theirs in zip(PASTED[name](), PASTED[name](), strict=True):
        expected = value_and_gradients(getattr(humanline, name), ours)
        results = value_and_gradients(pasted(name)[name], theirs)
        torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)  # NaN: the slope of √0
        assert len(results) > 1 or name in ("humanline_rejected", "taper_weight")


def test_every_public_function_of_tensors_can_be_pasted():
    """Those of the two sections above the loop that the file's head calls pure, and `token_logps`."""
    section = inspect.getsource(humanline).split("# ---------- Perception")[1].split("# What a loss trains on")[0]
    assert {*re.findall(r"^def (\w+)", section, re.MULTILINE), "token_logps"} == PASTED.keys()


# --- token_logps ------------------------------------------------------------------------------------------------------

N, T, D, V = 4, 7, 5, 37
KEPT = torch.rand(N, T, generator=seeded(0)) < 0.7
KEPT[2], KEPT[0, 0], KEPT[3, -1] = False, True, True  # a row without a label, and labels at both ends
COUNT = int(KEPT.sum())
assert COUNT % 2 == 0 and COUNT < N * T  # so that chunks of COUNT / 2 divide the labelled tokens, COUNT - 1 do not
LABELS = torch.randint(V, (N, T), generator=seeded(1)).masked_fill(~KEPT, -100)
UPSTREAM = torch.rand(N, T, generator=seeded(2), dtype=torch.float64) + 0.5


def full_logps(hidden, weight, labels, bias=None, softcap=None, temperature=1.0):
    """The plain formula, with all logits at once."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    of_labels = (logits * torch.nn.functional.one_hot(labels.clamp(min=0), weight.shape[0])).sum(-1)
    return torch.where(labels == -100, 0.0, of_labels - logits.exp().sum(-1).log())


def parameters(dtype=torch.float64):
    """Hidden states, weight and bias."""
    shapes = (N, T, D), (V, D), (V,)
    return [torch.randn(shape, generator=seeded(3 + i)).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_size", [1, COUNT - 1, COUNT // 2, 1024])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_token_logps_and_their_gradients_equal_those_of_full_logits(with_bias, temperature, softcap, chunk_size, dtype):
    inputs = parameters(dtype)[: 3 if with_bias else 2]
    more = dict(softcap=softcap, temperature=temperature)
    value = token_logps(*inputs[:2], LABELS, *inputs[2:], chunk_size=chunk_size, **more)
    grads = torch.autograd.grad(value, inputs, UPSTREAM.to(dtype))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = full_logps(*exact[:2], LABELS, *exact[2:], **more)
    expected_grads = torch.autograd.grad(expected, exact, UPSTREAM)
    assert value.dtype == dtype and (value[~KEPT] == 0).all() and (value[KEPT] < 0).all()
    for first, second in zip([value.detach(), *grads], [expected.detach(), *expected_grads]):
        assert_close(first, second.numpy(), np.float64 if dtype == torch.float64 else np.float32)


def test_tied_weights_gather_the_gradients_of_both_uses():
    tokens = torch.randint(V, (N, T), generator=seeded(9))
    grads = []
    for logps in (lambda *x: token_logps(*x, chunk_size=4), full_logps):
        embedding = parameters()[1]
        loss = (logps(embedding[tokens].tanh(), embedding, LABELS) * UPSTREAM).sum()
        grads.append(torch.autograd.grad(loss, embedding)[0])
    assert_close(grads[0], grads[1].numpy())


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (1, 2)])
def test_token_logps_pass_gradcheck_whatever_is_frozen(frozen, softcap):
    inputs = [x.detach() if i in frozen else x for i, x in enumerate(parameters())]
    logps = lambda hidden, weight, bias: token_logps(hidden, weight, LABELS, bias, softcap, chunk_size=5)
    assert torch.autograd.gradcheck(logps, inputs, fast_mode=True)


def test_a_second_backward_pass_finds_the_same_gradients():
    inputs = parameters()
    value = token_logps(*inputs[:2], LABELS, inputs[2], softcap=2.0, chunk_size=5)
    first, second = (torch.autograd.grad(value, inputs, UPSTREAM, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_without_labels_all_logps_are_zero():
    hidden, weight, bias = parameters(torch.float32)
    value = token_logps(hidden, weight, torch.full((N, T), -100), bias)
    assert value.shape == (N, T) and value.dtype == torch.float32 and (value == 0).all()


def test_ignored_positions_get_no_gradient_and_may_hold_anything():
    hidden, weight, _ = (x.detach().numpy() for x in parameters())
    poisoned = np.where(KEPT[..., None], hidden, math.nan)
    logps = lambda h, w: token_logps(h, w, LABELS, chunk_size=4)
    clean, dirty = (differentiate(logps, x, weight) for x in (hidden, poisoned))
    assert (dirty[1][~KEPT] == 0).all()
    assert all((a == b).all() for a, b in zip(clean, dirty))


@pytest.mark.parametrize("with_bias", [False, True])
def test_token_logps_take_float32_weights_under_bfloat16_autocast(with_bias):
    inputs = parameters(torch.float32)[: 3 if with_bias else 2]
    with torch.autocast("cpu", torch.bfloat16):
        value = token_logps(*inputs[:2], LABELS, *inputs[2:], chunk_size=4)
    expected = full_logps(*inputs[:2], LABELS, *inputs[2:])
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=0.03, atol=0.03)
    for first, second in zip(torch.autograd.grad(value.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
        assert first.dtype == torch.float32
        torch.testing.assert_close(first, second, rtol=0.05, atol=0.05)


class LargestOutput(TorchDispatchMode):
    """Records the element count of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **(kwargs or {}))
        self.numel = max([self.numel] + [x.numel() for x in tree_leaves(output) if isinstance(x, torch.Tensor)])
        return output


@pytest.mark.parametrize("chunk_size", [6, 7])
def test_no_tensor_grows_with_the_tokens_times_the_vocabulary(chunk_size):
    hidden, weight, bias = parameters()
    labels = LABELS.clamp(min=0)
    with LargestOutput() as largest:
        token_logps(hidden, weight, labels, bias, softcap=2.0, chunk_size=chunk_size).sum().backward()
    assert weight.grad is not None and weight.numel() < chunk_size * V < N * T * V
    assert largest.numel == chunk_size * V
    with LargestOutput() as largest:
        full_logps(hidden, weight, labels).sum().backward()
    assert largest.numel >= N * T * V  # the recorder sees such a tensor where there is one


# --- a claim of the README --------------------------------------------------------------------------------------------


def test_most_bf16_weights_never_move_at_the_learning_rate_of_the_papers_runs():
    torch.manual_seed(0)
    start, moved = torch.randn(50_000) * 0.02, {}
    for dtype in (torch.float32, torch.bfloat16):
        weights = start.to(dtype, copy=True).requires_grad_(True)
        before, optimizer = weights.detach().clone(), torch.optim.AdamW([weights], lr=5e-6)
        for _ in range(100):
            weights.grad = torch.ones_like(weights)  # a gradient that never turns: the longest steps that AdamW takes
            optimizer.step()
        moved[dtype] = float((weights.detach() != before).float().mean())
    assert moved[torch.float32] == 1 and 0.01 < moved[torch.bfloat16] < 0.15, moved
