"""The pure functions of humanline.py against formulas written out here: perception, objectives, log-probs."""

import builtins
import dis
import doctest
import inspect
import math
import re
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import humanline
from eval import capacity
from humanline import (
    dpo_loss,
    group_advantages,
    grpo_loss,
    humanline_clip,
    humanline_verdicts,
    kto_loss,
    token_logps,
)

def test_packs_hold_each_item_once_and_at_most_their_tokens_with_padding():
    chance = np.random.default_rng(0)
    widths, heights = chance.integers(1, 60, 200).tolist(), chance.integers(1, 9, 200).tolist()
    for rows in (heights, None):
        packs = humanline.pack(widths, 150, rows)
        assert sorted(sum(packs, [])) == list(range(200)) and 20 < len(packs) < 200
        for items in packs:
            height = sum(rows[i] for i in items) if rows else len(items)
            assert height * max(widths[i] for i in items) <= 150 or len(items) == 1


each_dtype = pytest.mark.parametrize("dtype", [np.float64, np.float32])


def assert_close(value, expected, dtype=np.float64, floor=1e-2):
    """Relative error <= 1e-9 in float64 (no float32 step goes unseen), <= 1e-4 in float32, everywhere.

    Elements below `floor` times the largest one are measured against that instead.
    """
    expected = np.asarray(expected)
    tolerance = 1e-9 if dtype == np.float64 else 1e-4
    largest = abs(expected).max(initial=0)
    smallest = tolerance * floor * largest
    np.testing.assert_allclose(value, expected, rtol=tolerance, atol=smallest)


def differentiate(function, inputs):
    """The value of function(*inputs), and the gradient of a weighted sum of it for each input."""
    inputs = [torch.tensor(array, requires_grad=True) for array in inputs]
    value = function(*inputs)
    assert value.dtype == inputs[0].dtype
    upstream = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).view_as(value)
    grads = torch.autograd.grad(
        value, inputs, upstream, allow_unused=True, materialize_grads=True)
    return [value.detach(), *grads]


def check(function, formula, *inputs, floor=1e-2):
    """The function equals the formula in float64, in value and gradients."""
    exact = [array.astype(float) for array in inputs]
    results = differentiate(function, inputs)
    expected = differentiate(formula, exact)
    for result, right in zip(results, expected, strict=True):
        assert_close(result, right, inputs[0].dtype, floor)


def ragged(shape, dtype, seed=0, scale=1.0):
    """Normal numbers (N, T), with zeros after a random length of each row, and the mask of the others."""
    rng = np.random.default_rng(seed)
    count, longest = shape
    lengths = rng.integers(1, longest + 1, (count, 1))
    mask = np.arange(longest) < lengths
    values = rng.normal(0, scale, shape) * mask
    return values.astype(dtype), mask


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_the_examples_in_the_docstrings_are_true():
    results = doctest.testmod(humanline)
    assert results.attempted >= 3
    assert results.failed == 0


def test_the_defaults_are_those_of_the_paper_and_its_authors():
    d = torch.tensor([[-9.0, 0.125, 9.0]]).double()
    assert_close(humanline_clip(d), [[-1.5, 0.125, 1.5]])

    ones = torch.ones(2, 1).double()
    dpo = math.log(1 + math.exp(-0.2))
    assert_close(dpo_loss(ones, -ones), [dpo, dpo])

    sides = torch.tensor([True, False])
    assert_close(kto_loss(6 * ones, sides, 1.0), [1 - sigmoid(0.5), sigmoid(0.5)])

    rewards = torch.tensor([1.0, 0.0]).double()
    assert_close(group_advantages(rewards), [0.5 / 0.51, -0.5 / 0.51])

    grpo = [-math.exp(-9), -math.exp(0.125), -1.2]  # no KL penalty
    assert_close(grpo_loss(d, d, ones[0]), [grpo])

    d = torch.randn(4, 500, generator=seeded(0))
    mask = torch.ones(4, 500)
    expected = humanline_verdicts(
        d, mask, gamma_p=0.5, gamma_r=0.01, beta_p=1.0, beta_r=1.0, generator=seeded(1))
    assert torch.equal(humanline_verdicts(d, mask, generator=seeded(1)), expected)


# --- perception ---------------------------------------------------------------------------------------------


def test_capacity_gives_the_weights_of_tversky_and_kahneman():
    probabilities = np.array([0.01, 0.5, 0.99])
    assert capacity(probabilities, 0.61) == pytest.approx([0.0553, 0.4206, 0.9116], abs=5e-5)
    assert capacity(probabilities, 0.69) == pytest.approx([0.0397, 0.4540, 0.9451], abs=5e-5)


@each_dtype
def test_clipping_equals_the_formula(dtype):
    def clip(d):
        return humanline_clip(d, -1.0, 2.5)

    def formula(d):
        bound = torch.where(d < 0, -1.0, 2.5)
        is_inside = (d > -1) & (d < 2.5)
        return torch.where(is_inside, d, bound)

    rng = np.random.default_rng(0)
    d = rng.normal(0, 2, (6, 7)).astype(dtype)
    check(clip, formula, d)


@pytest.mark.parametrize("gamma_p, beta_p, gamma_r, beta_r", [
    (0.5, 1, 0.01, 1), (1, 3, 1, 0.5), (2, 1, 1, 2),
])
def test_each_token_is_kept_with_the_probability_that_the_betas_give(gamma_p, beta_p, gamma_r, beta_r):
    """P(B <= x) is x^γ where β = 1, and 1 - (1 - x)^β where γ = 1."""
    def at_most(x, gamma, beta):
        return x**gamma if beta == 1 else 1 - (1 - x) ** beta

    levels = np.array([-1.2, -0.3, 0.0, 0.4, 0.9])
    count = 20_000
    d = torch.tensor(levels)[:, None].expand(-1, count)
    mask = torch.ones_like(d)
    verdicts = humanline_verdicts(d, mask, gamma_p, gamma_r, beta_p, beta_r, seeded(0))
    kept = (verdicts == 0).double().mean(1)
    for level, share in zip(levels, kept):
        passes_p = at_most(math.exp(level - levels.max()), gamma_p, beta_p)
        passes_r = at_most(math.exp(levels.min() - level), gamma_r, beta_r)
        expected = passes_p * passes_r
        deviation = math.sqrt(expected * (1 - expected) / count)
        assert abs(share - expected) <= 5 * deviation + 1e-9


@each_dtype
def test_sampling_keeps_every_value_and_passes_gradient_only_at_kept_tokens(dtype):
    d, mask = map(torch.tensor, ragged((8, 40), dtype, scale=1.5))
    x = SimpleNamespace(verdicts=humanline_verdicts(d, mask, generator=seeded(3)))
    kept = x.verdicts == 0
    d.requires_grad_()
    value, is_low, is_high = humanline.perceive(d, x, humanline.Config(perception="sample"))
    assert torch.equal(is_low | is_high, ~kept)
    assert torch.equal(value, d)
    [grad] = torch.autograd.grad(value.sum(), d)
    assert torch.equal(grad, kept.to(d.dtype))
    assert 0 < (~kept).sum() < mask.sum()


@pytest.mark.parametrize("huge", [-1e4, 1e4])
def test_a_masked_position_has_no_effect_and_is_never_rejected(huge):
    d, mask = map(torch.tensor, ragged((6, 30), np.float32, scale=1.5))
    expected = humanline_verdicts(d, mask, gamma_r=0.5, generator=seeded(0))
    assert expected.any()
    filled = d.masked_fill(~mask, huge)
    verdicts = humanline_verdicts(filled, mask, gamma_r=0.5, generator=seeded(0))
    assert torch.equal(verdicts, expected)
    assert not verdicts[~mask].any()


def test_sampling_survives_ratios_that_overflow():
    # B_P = 0.6 rejects ratios below e^799.5, B_R = 0.3 those above e^800.2.
    d = torch.tensor([[800.0, 799.9, 799.0]])
    mask = torch.ones_like(d)
    low = humanline_verdicts(d, mask, 6e7, 3e7, 4e7, 7e7, seeded(0))
    assert low.tolist() == [[0, 0, -1]]
    high = humanline_verdicts(-d, mask, 3e7, 6e7, 7e7, 4e7, seeded(0))
    assert high.tolist() == [[0, 0, 1]]


# --- objectives ---------------------------------------------------------------------------------------------


@each_dtype
def test_dpo_equals_the_formula_for_different_lengths_and_far_from_zero(dtype):
    def dpo(chosen, rejected):
        return dpo_loss(chosen, rejected, 0.7)

    def formula(chosen, rejected):
        margin = chosen.sum(1) - rejected.sum(1)
        return F.softplus(-0.7 * margin)

    chosen, _ = ragged((5, 7), dtype, 1)
    rejected, _ = ragged((5, 4), dtype, 2)
    check(dpo, formula, chosen, rejected)
    far = np.array([[-1e4], [1e4], [40]], dtype)
    check(dpo, formula, far, np.zeros_like(far), floor=0)


@each_dtype
def test_kto_equals_the_formula_for_both_sides_and_far_from_zero(dtype):
    sides = torch.tensor([True, False, True, False, False])

    kl = 0.8
    weights = torch.where(sides, 1.5, 0.75)

    def kto(d):
        return kto_loss(d, sides, kl, 0.6, weights.to(d.dtype))

    def formula(d):
        gain = 0.6 * (d.sum(1) - kl)
        desirable = 1.5 / (1 + torch.exp(gain))
        undesirable = 0.75 / (1 + torch.exp(-gain))
        return torch.where(sides, desirable, undesirable)

    d, _ = ragged((5, 6), dtype, 3)
    check(kto, formula, d)
    far = np.where(sides, 45, -45).astype(dtype)
    check(kto, formula, far[:, None], floor=0)


@each_dtype
def test_advantages_equal_the_formula_in_each_group(dtype):
    rewards = np.random.default_rng(0).normal(1, 2, (4, 6)).astype(dtype)
    advantages = group_advantages(torch.tensor(rewards)).numpy()
    assert advantages.dtype == dtype
    for row, group in zip(advantages, rewards.astype(float)):
        assert_close(row, (group - group.mean()) / (group.std() + 0.01), dtype)


@each_dtype
@pytest.mark.parametrize("kl_beta, epsilon_high", [(0.0, None), (0.3, None), (0.04, 0.5), (0.0, 0.0)])
def test_grpo_equals_the_formula(kl_beta, epsilon_high, dtype):
    advantages = torch.tensor([1.5, -1.5, 0.3, -0.3, 0, 2]).double()

    def grpo(d, perceived):
        return grpo_loss(d, perceived, advantages.to(d.dtype), 0.2, kl_beta, epsilon_high)

    def formula(d, perceived):
        ratio = perceived.exp()
        clipped_ratio = ratio.clip(0.8, 1.2 if epsilon_high is None else 1 + epsilon_high)
        gains = advantages[:, None] * ratio
        clipped = advantages[:, None] * clipped_ratio
        kl = torch.exp(-d) + d - 1
        return kl_beta * kl - torch.where(gains > clipped, clipped, gains)

    # Unrelated to each other, to tell the two apart. Where the ratio is 1, the gradient is whole.
    d, _ = ragged((6, 9), dtype, 4, scale=0.6)
    perceived, _ = ragged((6, 9), dtype, 5, scale=0.6)
    check(grpo, formula, d, perceived)


# --- Pasting ------------------------------------------------------------------------------------------------

# The two sections above the loop that the file's head calls pure.
SOURCE = inspect.getsource(humanline)
SECTION = SOURCE.split("# ---------- Perception")[1].split("# What a loss trains on")[0]
PURE = re.findall(r"^def (\w+)", SECTION, re.MULTILINE)


def globals_of(code) -> set[str]:
    """The names that some code, with the functions in it, takes from the file around it."""
    names = set()
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            names.add(step.argval)
    for part in code.co_consts:
        if inspect.iscode(part):
            names |= globals_of(part)
    return names


@pytest.mark.parametrize("name", [*PURE, "token_logps"])
def test_a_pure_function_can_be_pasted_with_only_torch_and_what_its_docstring_names(name):
    function = getattr(humanline, name)
    source = inspect.getsource(function)
    other = re.search(r"copy\s+`(\w+)` as\s+well", function.__doc__)
    if other:
        source += "\n\n" + inspect.getsource(getattr(humanline, other[1]))
    code = compile(source, "pasted.py", "exec")
    imports = re.findall("`((?:import|from) .*?)`", inspect.getsource(humanline))
    file = {}
    exec("\n".join(imports), file)
    exec(code, file)
    assert globals_of(code) <= file.keys() | vars(builtins).keys()


# --- token_logps --------------------------------------------------------------------------------------------

N, T, D, V = 4, 7, 5, 37
KEPT = torch.rand(N, T, generator=seeded(0)) < 0.7
KEPT[2] = False  # a row without a label, and labels at both ends
KEPT[0, 0] = True
KEPT[3, -1] = True
COUNT = int(KEPT.sum())
# Chunks of COUNT / 2 divide the labelled tokens, chunks of COUNT - 1 do not.
assert COUNT % 2 == 0
assert COUNT < N * T
LABELS = torch.randint(V, (N, T), generator=seeded(1))
LABELS.masked_fill_(~KEPT, -100)
UPSTREAM = torch.rand(N, T, generator=seeded(2), dtype=torch.float64) + 0.5


def full_logps(hidden, weight, labels, softcap=None, temperature=1.0):
    """The plain formula, with all logits at once."""
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return -F.cross_entropy(logits.mT / temperature, labels, reduction="none")


def parameters(dtype=torch.float64):
    """Hidden states and weight."""
    hidden = torch.randn(N, T, D, generator=seeded(3)).to(dtype)
    weight = torch.randn(V, D, generator=seeded(4)).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("positions", [1, COUNT - 1, COUNT // 2, 1024])
@pytest.mark.parametrize("softcap, temperature", [(None, 1.0), (2.0, 0.7)])
@pytest.mark.parametrize("trained", [[0, 1], [0]])
def test_token_logps_and_their_gradients_equal_those_of_full_logits(
        trained, softcap, temperature, positions, dtype):
    """With every combination of frozen inputs. Hidden states without a label have no effect."""
    settings = dict(softcap=softcap, temperature=temperature)
    exact = [tensor.detach().double().requires_grad_() for tensor in parameters(dtype)]
    expected = full_logps(*exact, LABELS, **settings)
    leaves = [exact[i] for i in trained]
    expected_grads = torch.autograd.grad(expected, leaves, UPSTREAM)

    inputs = parameters(dtype)
    inputs[0].data[~KEPT] = math.nan
    for i in range(2):
        inputs[i].requires_grad_(i in trained)
    value = token_logps(*inputs, LABELS, chunk=positions, **settings)
    assert value.dtype == dtype
    assert (value[~KEPT] == 0).all()
    assert (value[KEPT] < 0).all()

    precision = np.float64 if dtype == torch.float64 else np.float32
    assert_close(value.detach(), expected.detach().numpy(), precision)
    leaves = [inputs[i] for i in trained]
    [node] = [node for node, _ in value.grad_fn.next_functions if hasattr(node, "kept")]
    kept = weakref.ref(node.kept[0])
    grads = torch.autograd.grad(value, leaves, UPSTREAM.to(dtype))
    assert kept() is None  # no logits stay, although `value` does
    assert (grads[0][~KEPT] == 0).all()
    for grad, right in zip(grads, expected_grads, strict=True):
        assert_close(grad, right.numpy(), precision)


def test_without_labels_all_logps_are_zero():
    hidden, weight = parameters(torch.float32)
    value = token_logps(hidden, weight, torch.full((N, T), -100))
    assert value.shape == (N, T)
    assert value.dtype == torch.float32
    assert (value == 0).all()


def test_token_logps_take_float32_weights_under_bfloat16_autocast():
    inputs = parameters(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        value = token_logps(*inputs, LABELS, chunk=4)
    expected = full_logps(*inputs, LABELS)
    # assert_close requires float32, too.
    torch.testing.assert_close(value, expected, rtol=0.03, atol=0.03)
    grads = torch.autograd.grad(value.sum(), inputs)
    expected_grads = torch.autograd.grad(expected.sum(), inputs)
    torch.testing.assert_close(grads, expected_grads, rtol=0.05, atol=0.05)


class LargestOutput(TorchDispatchMode):
    """Records the element count of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return output


def test_no_tensor_grows_with_the_tokens_times_the_vocabulary():
    hidden, weight = parameters()
    labels = LABELS.clamp(min=0)
    with LargestOutput() as largest:
        value = token_logps(hidden, weight, labels, softcap=2.0, chunk=6)
        value.sum().backward()
    assert weight.grad is not None
    assert largest.numel == 6 * V < N * T * V
