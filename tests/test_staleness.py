"""The taper, which keeps offline completions from being pushed down without limit, and the prior."""

import dataclasses

import pytest
import torch
from conftest import double, gradient, logps_of, policy_of, random_batch

import humanline
from humanline import Config, Group, group_advantages, make_units, taper_weight


def test_the_weight_falls_to_0_as_the_surprisal_doubles_for_worse_completions_only():
    sampler_logps = torch.zeros(7, 40)
    d = torch.zeros(7, 40)
    sampler_logps[0, 3] = -2.0  # a token has 2 nats under the sampler, and 2.5 under the policy
    d[0, 3] = -0.5
    sampler_logps[1] = -2.0  # so has each of many tokens
    d[1] = -0.5
    sampler_logps[2, 3] = -0.1  # the sampler was nearly certain: the budget is 1 nat
    d[2, 3] = -0.4
    sampler_logps[3] = -0.5  # more likely under the policy
    d[3] = 0.4
    sampler_logps[4:] = -1.0
    d[4] = -1.0  # twice the surprisal
    d[5:] = -1000.0
    worse = torch.tensor([True] * 6 + [False])

    def weigh(worse, mean_surprisal):
        mask = torch.ones_like(d).bool()
        return taper_weight(d, sampler_logps, mask, worse, mean_surprisal)

    weights = weigh(worse, 9.0)[:, 0].tolist()
    assert weights == pytest.approx([0.75, 0.75, 0.6, 1.0, 0.0, 0.0, 1.0])
    assert torch.equal(weigh(~worse, 9.0)[:6], torch.ones(6, 1))
    # If completions have 0.03 nats per token on average, 40 tokens have a budget of 1.2 nats at most.
    weights = weigh(worse, 0.03)[:, 0].tolist()
    assert weights == pytest.approx([1 - 0.5 / 1.2, 0.0, 0.6, 1.0, 0.0, 0.0, 1.0])
    d.requires_grad_()
    assert not weigh(worse, 9.0).requires_grad


def test_in_a_pair_the_chosen_completion_keeps_one_part_in_its_surprisal_of_the_weight_that_is_lost():
    worse = torch.tensor([False, True] * 3)
    sampler_logps = torch.full((6, 4), -2.0)  # 8 nats each
    sampler_logps[2] = 0.0  # the sampler was certain of a chosen one: the budget is 1 nat
    d = torch.zeros(6, 4)
    d[1] = -1.0
    d[3] = -1.0
    d[4] = -9.0  # the surprisal of a chosen one has no effect
    d[5] = 1.0
    mask = torch.ones(6, 4).bool()
    weights = taper_weight(d, sampler_logps, mask, worse, 9.0, in_pairs=True)
    assert weights[:, 0].tolist() == pytest.approx([0.5 + 0.5 / 8, 0.5, 1.0, 0.5, 1.0, 1.0])
    weights = taper_weight(d, sampler_logps, mask, worse, 9.0)
    assert weights[:, 0].tolist() == pytest.approx([1.0, 0.5, 1.0, 0.5, 1.0, 1.0])


@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
def test_the_taper_scales_the_gradient_of_worse_completions_and_not_the_loss(tiny, loss):
    policy, _, plain = policy_of(tiny, loss=loss)
    tapered = dataclasses.replace(plain, taper=True)
    batch = random_batch(loss)
    double(policy, batch)

    def with_sampler(difference: float) -> tuple[dict, torch.Tensor]:
        """The report and the gradient, if the sampler's log-probs were higher than the reference's."""
        for sequence in batch.sequences:
            sequence.sampler_logps = sequence.ref_logps + difference
        report = humanline.forward_backward(policy, batch, tapered)
        return report, gradient(policy, batch, tapered)

    plain_report = humanline.forward_backward(policy, batch, plain)
    plain_grad = gradient(policy, batch, plain)
    assert "taper_weight" not in plain_report
    report, _ = with_sampler(0.1)
    assert report["loss"] == pytest.approx(plain_report["loss"], abs=1e-12)
    report, grad = with_sampler(-1000.0)  # very unlikely under the sampler
    assert report["taper_weight"] == 1
    assert torch.equal(grad, plain_grad)
    report, grad = with_sampler(1000.0)  # certain under the sampler
    assert report["taper_weight"] == 0
    assert not torch.allclose(grad, plain_grad, rtol=1e-3)


@pytest.mark.parametrize("loss", ["grpo", "dpo"])
def test_offline_the_initial_policy_replaces_an_unknown_sampler(run, tiny, monkeypatch, loss):
    sequences = []
    forward_backward = humanline.forward_backward

    def watched(policy, batch, config):
        sequences.extend(batch.sequences)
        return forward_backward(policy, batch, config)

    monkeypatch.setattr(humanline, "forward_backward", watched)
    run(f"--loss {loss} --taper --sync-k 2 --steps 8")
    initial, _, _ = policy_of(tiny)
    for sequence, logps in zip(sequences, logps_of(initial, sequences), strict=True):
        torch.testing.assert_close(sequence.sampler_logps, logps, rtol=0, atol=1e-5)


# The prior.

def test_a_prior_acts_like_that_many_more_rollouts_with_the_mean_reward_of_all_groups():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]).double()
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    advantages = group_advantages(rewards, ids, prior=1.0, prior_mean=0.7)
    extra = torch.tensor([0.7]).double()
    for group in (0, 1):
        members = ids == group
        longer = torch.cat([rewards[members], extra])
        expected = group_advantages(longer, torch.zeros(4).long())[:-1]
        assert advantages[members].tolist() == pytest.approx(expected.tolist())
    assert (advantages[ids == 1] > 0).all()
    without = group_advantages(rewards, ids, prior=0.0, prior_mean=0.7)
    assert torch.equal(without, group_advantages(rewards, ids))


def test_with_a_prior_a_group_that_is_all_right_or_all_wrong_has_advantages():
    for prior in (0, 1):
        groups = []
        for i, reward in enumerate((1.0, 0.0)):
            groups.append(Group(i, [1, 2], [[3, 9]] * 4, [reward] * 4))
        make_units(groups, Config(prior=prior))
        right, wrong = groups
        has_advantage = bool(prior)
        assert all(sequence.advantage > 0 for sequence in right.sequences) == has_advantage
        assert all(sequence.advantage < 0 for sequence in wrong.sequences) == has_advantage
        for sequence in right.sequences:
            assert sequence.is_idle != has_advantage
