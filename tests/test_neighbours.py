"""Training on better completions alone, and tests/claims/neighbours.py: the taper and the prior."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from conftest import double, gradient, logps_of, metrics, policy_of, random_batch

import humanline
from humanline import Config, Group, prepare_groups

sys.path.append(str(Path(__file__).parent / "claims"))
import neighbours  # noqa: F401  (adds entries to LOSSES)


@pytest.mark.parametrize("loss", ["grpo", "kto"])
def test_with_positive_only_worse_completions_have_no_gradient(loss):
    config = Config(loss=loss, positive_only=True)
    group = Group(0, [1], [[2], [3], [4]], [1.0, 0.5, 0.0])
    [units] = prepare_groups([group], config)
    better, average, worse = sum(units, [])
    assert [humanline.is_idle(sequence, config) for sequence in (better, average, worse)] == [False, True, True]
    if loss == "grpo":
        assert better.advantage > 0 == average.advantage == worse.advantage
    else:
        assert better.kto_weight > 0 == average.kto_weight == worse.kto_weight


def test_with_positive_only_dpo_is_supervised_finetuning_and_needs_no_reference(run, monkeypatch):
    monkeypatch.setattr(humanline, "attach_logps", None)  # no pass of another policy is made
    lines = metrics(run("--loss dpo --positive-only --steps 3 --batch-size 4"))
    assert not {"kl", "drift", "reward_chosen"} & lines[0].keys()
    assert lines[0]["loss"] > lines[-1]["loss"] > 0


def test_rpo_adds_the_mean_surprisal_of_the_chosen(tiny):
    policy, _, plain = policy_of(tiny, loss="dpo")
    batch = random_batch("dpo")
    double(policy, batch)
    chosen = batch.sequences[0::2]
    nll = torch.stack([-logps.mean() for logps in logps_of(policy, chosen)]).mean()
    loss = humanline.forward_backward(policy, batch, plain)["loss"]
    with_rpo = humanline.forward_backward(policy, batch, dataclasses.replace(plain, loss="dpo-rpo"))["loss"]
    assert with_rpo - loss == pytest.approx(float(nll), rel=1e-5)


@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
def test_the_taper_scales_the_gradient_of_worse_completions_and_changes_no_value(tiny, loss):
    policy, _, plain = policy_of(tiny, loss=loss)
    tapered = dataclasses.replace(plain, loss=f"{loss}-taper")
    batch = random_batch(loss)
    double(policy, batch)

    def with_sampler(surer: float) -> tuple[dict, torch.Tensor]:
        for sequence in batch.sequences:
            sequence.sampler_logps = sequence.ref_logps + surer
        return humanline.forward_backward(policy, batch, tapered), gradient(policy, batch, tapered)

    whole_gradient = gradient(policy, batch, plain)
    plain_loss = humanline.forward_backward(policy, batch, plain)["loss"]
    report, _ = with_sampler(0.1)
    assert report["loss"] == pytest.approx(plain_loss, abs=1e-12)
    report, of_all = with_sampler(-1000.0)  # the sampler was much less likely to write it: the weight is 1
    assert report["taper_weight"] == 1
    torch.testing.assert_close(of_all, whole_gradient)
    report, of_better = with_sampler(1000.0)  # the sampler was sure of it: the weight is 0
    assert report["taper_weight"] == 0
    assert not torch.allclose(of_better, whole_gradient, rtol=1e-3)


def test_the_taper_of_a_completion_falls_to_0_as_its_surprisal_doubles(tiny):
    policy, _, config = policy_of(tiny, loss="kto-taper")
    batch = random_batch("kto")
    double(policy, batch)
    sequence = batch.sequences[0]
    sequence.advantage = -1.0
    batch.sequences[:] = [sequence]
    [logps] = logps_of(policy, [sequence])
    for factor, weight in ((1.0, 1.0), (1.25, 0.75), (1.5, 0.5), (2.0, 0.0), (3.0, 0.0)):
        sequence.sampler_logps = logps.float() / factor
        report = humanline.forward_backward(policy, batch, config)
        assert report["taper_weight"] == pytest.approx(weight, abs=1e-5)


@pytest.mark.parametrize("loss", ["grpo", "dpo"])
def test_offline_the_initial_policy_stands_in_for_an_unknown_sampler(run, tiny, monkeypatch, loss):
    sequences, forward_backward = [], humanline.forward_backward

    def spied(policy, batch, config):
        sequences.extend(batch.sequences)
        return forward_backward(policy, batch, config)

    monkeypatch.setattr(humanline, "forward_backward", spied)
    run(f"--loss {loss}-taper --sync-k 2 --steps 8")
    for sequence, expected in zip(sequences, logps_of(policy_of(tiny)[0], sequences), strict=True):
        torch.testing.assert_close(sequence.sampler_logps, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("loss", ["grpo", "grpo-taper-prior"])
def test_a_prior_gives_groups_without_a_difference_a_gradient(loss):
    groups = [Group(i, [1, 2], [[3, 9]] * 4, [reward] * 4) for i, reward in enumerate((1.0, 0.0))]
    config = Config(loss=loss)
    [first], [second] = humanline.prepare_groups(groups, config)
    right, wrong = ([sequence.advantage for sequence in sequences] for sequences in (first, second))
    has_prior = "prior" in loss
    assert all(advantage > 0 for advantage in right) == has_prior
    assert all(advantage < 0 for advantage in wrong) == has_prior
    assert [humanline.is_idle(sequence, config) for sequence in first] == [not has_prior] * 4
