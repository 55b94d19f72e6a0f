"""The pure functions of humanline.py against formulas written out here: perception, objectives, log-probs."""

import builtins
import dis
import doctest
import inspect
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import humanline
from eval import capacity
from humanline import (dpo_loss, group_advantages, grpo_loss, humanline_clip, humanline_verdicts,
                       humanline_sample, kto_loss, token_logps)

each_dtype = pytest.mark.parametrize("dtype", [np.float64, np.float32])


def assert_close(value, expected, dtype=np.float64, floor=1e-2):
    """Relative error <= 1e-9 in float64 (no float32 step goes unseen), <= 1e-4 in float32, everywhere.

    Elements below `floor` times the largest one are measured against that instead.
    """
    expected = np.asarray(expected)
    tolerance = 1e-9 if dtype == np.float64 else 1e-4
    smallest = tolerance * floor * abs(expected).max(initial=0)
    np.testing.assert_allclose(value, expected, rtol=tolerance, atol=smallest)


def differentiate(function, inputs):
    """The value of function(*inputs), and the gradient of a weighted sum of it by each input."""
    inputs = [torch.tensor(x, requires_grad=True) for x in inputs]
    value = function(*inputs)
    assert value.dtype == inputs[0].dtype
    upstream = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).view_as(value)
    grads = torch.autograd.grad(value, inputs, upstream, allow_unused=True, materialize_grads=True)
    return [value.detach(), *grads]


def check(function, formula, *inputs, floor=1e-2):
    """The function is the formula in float64, in value and gradients."""
    exact = [x.astype(float) for x in inputs]
    for value, expected in zip(differentiate(function, inputs), differentiate(formula, exact), strict=True):
        assert_close(value, expected, inputs[0].dtype, floor)


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
    results = doctest.testmod(humanline)
    assert results.attempted >= 3 and results.failed == 0


def test_the_defaults_are_those_of_the_paper_and_its_authors():
    d, ones = torch.tensor([[-9.0, 0.125, 9.0]]).double(), torch.ones(2).double()
    assert_close(humanline_clip(d), [[-1.5, 0.125, 1.5]])
    assert_close(dpo_loss(ones[:, None], -ones[:, None]), [math.log(1 + math.exp(-0.2))] * 2)
    assert_close(kto_loss(6 * ones[:, None], torch.tensor([1, 0]), 1.0), [1 - sigmoid(0.5), sigmoid(0.5)])
    assert_close(group_advantages(torch.tensor([1.0, 0.0]).double(), torch.tensor([3, 3])), [0.5 / 0.51, -0.5 / 0.51])
    assert_close(grpo_loss(d, d, ones[:1]), [[-math.exp(-9), -math.exp(0.125), -1.2]])  # and no KL penalty
    many, mask = torch.randn(4, 500, generator=seeded(0)), torch.ones(4, 500)
    named = humanline_verdicts(many, mask, gamma_p=0.5, gamma_r=0.01, beta_p=1.0, beta_r=1.0, generator=seeded(1))
    assert torch.equal(humanline_verdicts(many, mask, generator=seeded(1)), named)


# --- perception ---------------------------------------------------------------------------------------------


def test_capacity_gives_the_weights_of_tversky_and_kahneman():
    probabilities = np.array([0.01, 0.5, 0.99])
    assert capacity(probabilities, 0.61) == pytest.approx([0.0553, 0.4206, 0.9116], abs=5e-5)
    assert capacity(probabilities, 0.69) == pytest.approx([0.0397, 0.4540, 0.9451], abs=5e-5)


@each_dtype
def test_clipping_equals_the_formula(dtype):
    d = np.random.default_rng(0).normal(0, 2, (6, 7)).astype(dtype)
    formula = lambda x: torch.where((x > -1) & (x < 2.5), x, torch.where(x < 0, -1.0, 2.5))
    check(lambda x: humanline_clip(x, -1.0, 2.5), formula, d)


@pytest.mark.parametrize("gamma_p, beta_p, gamma_r, beta_r", [
    (0.5, 1, 0.01, 1), (1, 3, 1, 0.5), (2, 1, 1, 2),
])
def test_each_token_is_kept_with_the_probability_that_the_betas_give(gamma_p, beta_p, gamma_r, beta_r):
    """P(B <= x) is x^γ where β = 1, and 1 - (1 - x)^β where γ = 1."""
    at_most = lambda x, gamma, beta: x**gamma if beta == 1 else 1 - (1 - x) ** beta
    levels, count = np.array([-1.2, -0.3, 0.0, 0.4, 0.9]), 20_000
    d = torch.tensor(levels)[:, None].expand(-1, count)
    verdicts = humanline_verdicts(d, torch.ones_like(d), gamma_p, gamma_r, beta_p, beta_r, seeded(0))
    for level, value in zip(levels, (verdicts == 0).double().mean(1)):
        expected = (at_most(math.exp(level - levels.max()), gamma_p, beta_p)
                    * at_most(math.exp(levels.min() - level), gamma_r, beta_r))
        assert abs(value - expected) <= 5 * math.sqrt(expected * (1 - expected) / count) + 1e-9


@each_dtype
def test_sampling_keeps_every_value_and_passes_gradient_only_at_kept_tokens(dtype):
    d, mask = map(torch.tensor, ragged((8, 40), dtype, scale=1.5))
    rejected = humanline_verdicts(d, mask, generator=seeded(3)) != 0
    value = humanline_sample(d.requires_grad_(), mask, generator=seeded(3))
    [grad] = torch.autograd.grad(value.sum(), d)
    assert torch.equal(value, d) and torch.equal(grad, 1.0 - rejected.to(d.dtype))
    assert 0 < rejected.sum() < mask.sum()


@pytest.mark.parametrize("huge", [-1e4, 1e4])
def test_a_masked_position_has_no_effect_and_is_never_rejected(huge):
    d, mask = map(torch.tensor, ragged((6, 30), np.float32, scale=1.5))
    expected = humanline_verdicts(d, mask, gamma_r=0.5, generator=seeded(0))
    value = humanline_verdicts(d.masked_fill(~mask, huge), mask, gamma_r=0.5, generator=seeded(0))
    assert torch.equal(value, expected) and expected.any() and not value[~mask].any()
    assert not humanline_verdicts(d, torch.zeros_like(mask)).any()


def test_sampling_survives_ratios_that_overflow():
    d = torch.tensor([[800.0, 799.9, 799.0]])  # B_P = 0.6 rejects ratios below e^799.5, B_R = 0.3 those above e^800.2
    assert humanline_verdicts(d, d == d, 6e7, 3e7, 4e7, 7e7, seeded(0)).tolist() == [[0, 0, -1]]
    assert humanline_verdicts(-d, d == d, 3e7, 6e7, 7e7, 4e7, seeded(0)).tolist() == [[0, 0, 1]]


# --- objectives ---------------------------------------------------------------------------------------------


@each_dtype
def test_dpo_equals_the_formula_for_different_lengths_and_far_from_zero(dtype):
    dpo = lambda w, l: dpo_loss(w, l, 0.7)
    formula = lambda w, l: F.softplus(0.7 * (l.sum(1) - w.sum(1)))
    check(dpo, formula, ragged((5, 7), dtype, 1)[0], ragged((5, 4), dtype, 2)[0])
    check(dpo, formula, np.array([[-1e4], [1e4], [40]], dtype), np.zeros((3, 1), dtype), floor=0)


@each_dtype
def test_kto_equals_the_formula_for_both_sides_and_far_from_zero(dtype):
    """No gradient flows into the KL."""
    sides = torch.tensor([True, False, True, False, False])
    kto = lambda x, kl: kto_loss(x, sides, kl, 0.6, 1.5, 0.75)

    def formula(x, kl):
        loss_of = lambda gain: 1 / (1 + torch.exp(0.6 * gain))
        gain = x.sum(1) - kl.detach()
        return torch.where(sides, 1.5 * loss_of(gain), 0.75 * loss_of(-gain))

    kl = np.array(0.8, dtype)
    check(kto, formula, ragged((5, 6), dtype, 3)[0], kl)
    check(kto, formula, np.where(sides, 45, -45).astype(dtype)[:, None], kl, floor=0)


@each_dtype
def test_advantages_equal_the_formula_for_interleaved_groups(dtype):
    rng = np.random.default_rng(0)
    rewards = rng.normal(1, 2, 24).astype(dtype)
    ids = rng.permutation(np.repeat([7, -1, 40, 3], [3, 6, 10, 5]))
    value = group_advantages(torch.tensor(rewards), torch.tensor(ids)).numpy()
    assert value.dtype == dtype
    for one in set(ids):
        group = rewards[ids == one].astype(float)
        assert_close(value[ids == one], (group - group.mean()) / (group.std() + 0.01), dtype)


@each_dtype
@pytest.mark.parametrize("kl_beta, epsilon_high", [(0.0, None), (0.3, None), (0.04, 0.5)])
def test_grpo_equals_the_formula(kl_beta, epsilon_high, dtype):
    advantages = torch.tensor([1.5, -1.5, 0.3, -0.3, 0, 2])[:, None].double()

    def formula(d, perceived):
        gains = advantages * perceived.exp()
        clipped = advantages * perceived.exp().clip(0.8, 1 + (epsilon_high or 0.2))
        return kl_beta * (torch.exp(-d) + d - 1) - torch.where(gains > clipped, clipped, gains)

    grpo = lambda d, perceived: grpo_loss(
        d, perceived, advantages[:, 0].to(d.dtype), 0.2, kl_beta, epsilon_high)
    # Unrelated to each other, to tell the two apart; where the ratio is 1, the gradient is whole.
    check(grpo, formula, ragged((6, 9), dtype, 4, scale=0.6)[0], ragged((6, 9), dtype, 5, scale=0.6)[0])


# --- Pasting ------------------------------------------------------------------------------------------------

# The two sections above the loop that the file's head calls pure.
SECTION = inspect.getsource(humanline).split("# ---------- Perception")[1].split("# What a loss trains on")[0]


def globals_of(code) -> set[str]:
    """The names that the functions within some code take from the file around them."""
    inner = [globals_of(part) for part in code.co_consts if inspect.iscode(part)]
    return {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}.union(*inner)


@pytest.mark.parametrize("name", [*re.findall(r"^def (\w+)", SECTION, re.MULTILINE), "token_logps"])
def test_a_pure_function_can_be_pasted_with_only_torch_and_what_its_docstring_names(name):
    sentence = re.search(r"copy\s+(`\w+`) as\s+well", getattr(humanline, name).__doc__)
    names = [name, *(re.findall(r"`(\w+)`", sentence[1]) if sentence else [])]
    source = "\n\n".join(inspect.getsource(getattr(humanline, name)) for name in names)
    code = compile(source, "pasted.py", "exec")
    file = dict(torch=torch, F=F, Tensor=torch.Tensor)
    exec(code, file)
    assert globals_of(code) <= file.keys() | vars(builtins).keys()


# --- token_logps --------------------------------------------------------------------------------------------

N, T, D, V = 4, 7, 5, 37
KEPT = torch.rand(N, T, generator=seeded(0)) < 0.7
KEPT[2], KEPT[0, 0], KEPT[3, -1] = False, True, True  # a row without a label, and labels at both ends
COUNT = int(KEPT.sum())
assert COUNT % 2 == 0 and COUNT < N * T  # so that chunks of COUNT / 2 divide the labelled tokens, COUNT - 1 do not
LABELS = torch.randint(V, (N, T), generator=seeded(1)).masked_fill(~KEPT, -100)
UPSTREAM = torch.rand(N, T, generator=seeded(2), dtype=torch.float64) + 0.5


def full_logps(hidden, weight, labels, softcap=None, temperature=1.0):
    """The plain formula, with all logits at once."""
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return -F.cross_entropy(logits.mT / temperature, labels, reduction="none")


def parameters(dtype=torch.float64):
    """Hidden states and weight."""
    shapes = (N, T, D), (V, D)
    return [torch.randn(shape, generator=seeded(3 + i)).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_size", [1, COUNT - 1, COUNT // 2, 1024])
@pytest.mark.parametrize("softcap, temperature", [(None, 1.0), (2.0, 0.7)])
@pytest.mark.parametrize("trained", [[0, 1], [0]])
def test_token_logps_and_their_gradients_equal_those_of_full_logits(
        trained, softcap, temperature, chunk_size, dtype):
    """Whatever is frozen. What stands where no label is changes nothing."""
    inputs = parameters(dtype)
    exact = [x.detach().double().clone().requires_grad_() for x in inputs]
    inputs[0].data[~KEPT] = math.nan
    for i in range(2):
        inputs[i].requires_grad_(i in trained)
    more = dict(softcap=softcap, temperature=temperature)
    value = token_logps(*inputs, LABELS, chunk_size=chunk_size, **more)
    expected = full_logps(*exact, LABELS, **more)
    expected_grads = torch.autograd.grad(expected, [exact[i] for i in trained], UPSTREAM)
    assert value.dtype == dtype and (value[~KEPT] == 0).all() and (value[KEPT] < 0).all()
    for _ in range(2):  # the second backward pass computes all logits anew
        leaves = [inputs[i] for i in trained]
        grads = torch.autograd.grad(value, leaves, UPSTREAM.to(dtype), retain_graph=True)
        assert (grads[0][~KEPT] == 0).all()
        for first, second in zip([value.detach(), *grads], [expected.detach(), *expected_grads], strict=True):
            assert_close(first, second.numpy(), np.float64 if dtype == torch.float64 else np.float32)


def test_without_labels_all_logps_are_zero():
    hidden, weight = parameters(torch.float32)
    value = token_logps(hidden, weight, torch.full((N, T), -100))
    assert value.shape == (N, T) and value.dtype == torch.float32 and (value == 0).all()


def test_token_logps_take_float32_weights_under_bfloat16_autocast():
    inputs = parameters(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        value = token_logps(*inputs, LABELS, chunk_size=4)
    expected = full_logps(*inputs, LABELS)
    # assert_close asks for float32, too
    torch.testing.assert_close(value, expected, rtol=0.03, atol=0.03)
    grads = [torch.autograd.grad(logps.sum(), inputs) for logps in (value, expected)]
    torch.testing.assert_close(*grads, rtol=0.05, atol=0.05)


class LargestOutput(TorchDispatchMode):
    """Records the element count of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **(kwargs or {}))
        self.numel = max([self.numel] + [x.numel() for x in tree_leaves(output) if isinstance(x, torch.Tensor)])
        return output


def test_no_tensor_grows_with_the_tokens_times_the_vocabulary():
    hidden, weight = parameters()
    with LargestOutput() as largest:
        token_logps(hidden, weight, LABELS.clamp(min=0), softcap=2.0, chunk_size=6).sum().backward()
    assert weight.grad is not None and largest.numel == 6 * V < N * T * V
