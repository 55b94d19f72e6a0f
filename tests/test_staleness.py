"""The taper, which keeps offline completions from being pushed down without limit, and the prior."""

import dataclasses

import pytest
import torch
from conftest import double, gradient, logps_of, policy_of, random_batch

import humanline
from humanline import Config, Group, group_advantages, make_units, taper_weight


def test_the_weight_falls_to_0_as_the_surprisal_doubles_for_worse_completions_only():
    d, mu = torch.zeros(7, 40), torch.zeros(7, 40)
    mu[0, 3], d[0, 3] = -2.0, -0.5  # surprised the sampler by 2 nats, and the policy by 2.5
    mu[1], d[1] = -2.0, -0.5  # the same of each of many tokens
    mu[2, 3], d[2, 3] = -0.1, -0.4  # the sampler was nearly sure of it: what counts is the ratio's logarithm
    mu[3], d[3] = -0.5, 0.4  # the policy says it more often
    mu[4], d[4] = -1.0, -1.0  # twice as much
    mu[5], d[5] = -1.0, -1000.0
    mu[6], d[6] = -1.0, -1000.0
    worse = torch.tensor([True] * 6 + [False])
    weigh = lambda d, worse, mean_surprisal: taper_weight(d, mu, mu <= 0, worse, mean_surprisal)
    assert weigh(d, worse, 9.0)[:, 0].tolist() == pytest.approx([0.75, 0.75, 0.6, 1.0, 0.0, 0.0, 1.0])
    assert torch.equal(weigh(d, ~worse, 9.0)[:6], torch.ones(6, 1))
    assert not weigh(d.requires_grad_(), worse, 9.0).requires_grad
    # Among completions that surprise less, by 1.2 nats at 40 tokens and so by 0.03 a token, no more counts.
    assert weigh(d, worse, 0.03)[:, 0].tolist() == pytest.approx([1 - 0.5 / 1.2, 0.0, 0.6, 1.0, 0.0, 0.0, 1.0])


def test_in_a_pair_the_chosen_completion_loses_weight_with_the_rejected_one_except_one_part_in_its_surprisal():
    d, mu, worse = torch.zeros(6, 4), torch.full((6, 4), -2.0), torch.tensor([False, True] * 3)  # 8 nats each
    mu[2] = 0.0  # a chosen one that the sampler was sure of: at least 1 nat
    d[1], d[3], d[4], d[5] = -1.0, -1.0, -9.0, 1.0  # what the chosen one does is not asked
    weights = taper_weight(d, mu, mu <= 0, worse, 9.0, in_pairs=True)
    assert weights[:, 0].tolist() == pytest.approx([0.5 + 0.5 / 8, 0.5, 1.0, 0.5, 1.0, 1.0])
    alone = taper_weight(d, mu, mu <= 0, worse, 9.0)
    assert alone[:, 0].tolist() == pytest.approx([1.0, 0.5, 1.0, 0.5, 1.0, 1.0])


@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
def test_the_taper_scales_the_gradient_of_worse_completions_and_not_the_loss(tiny, loss):
    policy, _, plain = policy_of(tiny, loss=loss)
    tapered = dataclasses.replace(plain, taper=True)
    batch = random_batch(loss)
    double(policy, batch)

    def with_sampler(surer: float) -> tuple[dict, torch.Tensor]:
        for s in batch.sequences:
            s.sampler_logps = s.ref_logps + surer
        return humanline.forward_backward(policy, batch, tapered), gradient(policy, batch, tapered)

    all_of_it = gradient(policy, batch, plain)
    plain_report = humanline.forward_backward(policy, batch, plain)
    report, _ = with_sampler(0.1)
    assert report["loss"] == pytest.approx(plain_report["loss"], abs=1e-12)
    report, grad = with_sampler(-1000.0)  # it hardly said it: the weight is 1
    assert torch.equal(grad, all_of_it)
    assert report["taper_weight"] == 1 and "taper_weight" not in plain_report
    report, of_better = with_sampler(1000.0)  # it was sure of it: the weight is 0
    assert report["taper_weight"] == 0
    assert not torch.allclose(of_better, all_of_it, rtol=1e-3)


@pytest.mark.parametrize("loss", ["grpo", "dpo"])
def test_offline_the_initial_policy_replaces_an_unknown_sampler(run, tiny, monkeypatch, loss):
    seen, forward = [], humanline.forward_backward

    def spied(policy, batch, config):
        seen.extend(batch.sequences)
        return forward(policy, batch, config)

    monkeypatch.setattr(humanline, "forward_backward", spied)
    run(f"--loss {loss} --taper --sync-k 2 --steps 8")
    for s, expected in zip(seen, logps_of(policy_of(tiny)[0], seen), strict=True):
        torch.testing.assert_close(s.sampler_logps, expected, rtol=0, atol=1e-5)


# The prior.

def test_a_prior_acts_like_that_many_more_rollouts_with_the_mean_reward_of_all_groups():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    advantages = group_advantages(rewards, ids, prior=1.0, prior_mean=0.7)
    for group in (0, 1):
        longer = torch.cat([rewards[ids == group], torch.tensor([0.7], dtype=torch.float64)])
        expected = group_advantages(longer, torch.zeros(4, dtype=torch.long))[:-1]
        assert advantages[ids == group].tolist() == pytest.approx(expected.tolist())
    assert (advantages[ids == 1] > 0).all()
    assert torch.equal(group_advantages(rewards, ids, prior=0.0, prior_mean=0.7), group_advantages(rewards, ids))


def test_with_a_prior_a_group_that_is_all_right_or_all_wrong_has_advantages():
    for prior in (0, 1):
        groups = []
        for i, reward in enumerate((1.0, 0.0)):
            groups.append(Group(i, [1, 2], [[3, 9]] * 4, [reward] * 4))
        make_units(groups, Config(prior=prior))
        right, wrong = ([s.advantage for s in group.sequences] for group in groups)
        assert all(advantage > 0 for advantage in right) == bool(prior)
        assert all(advantage < 0 for advantage in wrong) == bool(prior)
        assert [s.is_idle for s in groups[0].sequences] == [not prior] * 4
