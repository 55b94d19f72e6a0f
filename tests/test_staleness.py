"""The taper and the prior: what keeps offline data from being pushed down without end, and what is known from being lost."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from conftest import metrics, random_batch, same_weights, timeless, write_jsonl

import humanline
from humanline import LOSSES, Batch, Config, Group, Sequence, group_advantages, staleness_weight
from test_training import gradient, policy_of


def test_the_weight_falls_to_0_as_the_surprisal_doubles_and_for_the_worse_alone():
    d, mu = torch.zeros(7, 40), torch.zeros(7, 40)
    mu[0, 3], d[0, 3] = -2.0, -0.5  # surprised the sampler by 2 nats, and the policy by 2.5
    mu[1], d[1] = -2.0, -0.5  # the same of each of many tokens
    mu[2, 3], d[2, 3] = -0.1, -0.4  # the sampler was nearly sure of it: what counts is the ratio's logarithm
    mu[3], d[3] = -0.5, 0.4  # the policy says it more often
    mu[4], d[4] = -1.0, -1.0  # twice as much
    mu[5], d[5] = -1.0, -1000.0
    mu[6], d[6] = -1.0, -1000.0
    worse = torch.tensor([True] * 6 + [False])
    weigh = lambda d, worse, mean_surprisal: staleness_weight(d, mu, mu <= 0, worse, mean_surprisal)
    assert weigh(d, worse, 9.0)[:, 0].tolist() == pytest.approx([0.75, 0.75, 0.6, 1.0, 0.0, 0.0, 1.0])
    assert torch.equal(weigh(d, ~worse, 9.0)[:6], torch.ones(6, 1))
    assert not weigh(d.requires_grad_(), worse, 9.0).requires_grad
    # Among completions that surprise less, by 1.2 nats at 40 tokens and so by 0.03 a token, no more counts.
    assert weigh(d, worse, 0.03)[:, 0].tolist() == pytest.approx([1 - 0.5 / 1.2, 0.0, 0.6, 1.0, 0.0, 0.0, 1.0])


def test_in_a_pair_the_chosen_one_keeps_one_part_in_its_surprisal_of_what_the_rejected_one_loses():
    d, mu, worse = torch.zeros(6, 4), torch.full((6, 4), -2.0), torch.tensor([False, True] * 3)  # 8 nats each
    mu[2] = 0.0  # a chosen one that the sampler was sure of: at least 1 nat
    d[1], d[3], d[4], d[5] = -1.0, -1.0, -9.0, 1.0  # what the chosen one does is not asked
    weights = staleness_weight(d, mu, mu <= 0, worse, 9.0, in_pairs=True)
    assert weights[:, 0].tolist() == pytest.approx([0.5 + 0.5 / 8, 0.5, 1.0, 0.5, 1.0, 1.0])
    no_pairs = staleness_weight(d, mu, mu <= 0, worse, 9.0)
    assert no_pairs[:, 0].tolist() == pytest.approx([1.0, 0.5, 1.0, 0.5, 1.0, 1.0])


def test_beside_an_empty_completion_each_counts_one_part_in_its_surprisal():
    d, mu, worse = torch.zeros(4, 4), torch.full((4, 4), -2.0), torch.tensor([False, True] * 2)
    mask = torch.tensor([[True], [False], [False], [True]]).expand(4, 4)  # empty: the rejected one, the chosen one
    d[3] = -1.0
    weights = staleness_weight(d * mask, mu * mask, mask, worse, 9.0, in_pairs=True)[:, 0]
    assert [float(weights[0]), float(weights[3])] == pytest.approx([1 / 8, 0.5 / 8])


def test_pairs_fade_together_in_training_as_well(tiny):
    policy, _, config = policy_of(tiny, loss="dpo")
    policy.double()
    batch = random_batch("dpo")
    for s in batch.sequences + batch.mismatched:
        logps = humanline.log_probs(policy, [s])[0][0].detach()[-len(s.completion) :]
        s.ref_logps = s.ref_logps.double()
        s.sampler_logps = logps * 1e-3 if not s.is_chosen else torch.full_like(logps, -1e6)  # w = 0, before is huge
    tapered, kept = (gradient(policy, batch, dataclasses.replace(config, stale=how)) for how in ("taper", "keep"))
    limit = 1e-2 * kept.abs().max()  # what is left is the chosen one's 1 / before
    assert kept.abs().max() > 0 and tapered.abs().max() < limit


def test_right_tokens_around_a_wrong_one_do_not_hide_it():
    wrong_alone, worse = torch.tensor([[-1.5], [-1.2]]), torch.tensor([True])
    among_right = torch.cat([wrong_alone, torch.zeros(2, 30)], 1)
    weights = [staleness_weight(d[None], mu[None], mu[None] <= 0, worse, 9.0) for mu, d in (wrong_alone, among_right)]
    assert torch.equal(*weights) and float(weights[0]) == pytest.approx(0.2)


def test_the_taper_counts_over_the_whole_batch_so_that_microbatches_change_nothing(tiny):
    policy, _, config = policy_of(tiny, stale="taper")
    policy.double()
    batch = random_batch("grpo")
    for number, s in enumerate(batch.sequences):
        s.sampler_logps = torch.full((len(s.completion),), -3.0 - number / 5, dtype=torch.double)
    whole = gradient(policy, batch, config)
    in_parts = gradient(policy, batch, dataclasses.replace(config, microbatch_tokens=16))
    torch.testing.assert_close(in_parts, whole, rtol=1e-9, atol=1e-12)
    untapered = gradient(policy, batch, dataclasses.replace(config, stale="keep"))
    assert not torch.allclose(whole, untapered, rtol=1e-3)


def test_a_completion_that_surprises_by_half_as_much_again_keeps_half_of_the_push_however_long_it_is(tiny):
    policy, _, config = policy_of(tiny)
    batch = random_batch("grpo")
    for s in batch.sequences:
        logps = humanline.log_probs(policy, [s])[0][0].detach()[-len(s.completion) :]
        s.sampler_logps = logps / 1.5 if not s.is_chosen else torch.full_like(logps, -1000)  # so the mean is no limit
    found = {stale: gradient(policy, batch, dataclasses.replace(config, stale=stale))
             for stale in ("keep", "drop", "taper")}
    pushed_down = found["keep"] - found["drop"]
    assert pushed_down.abs().max() > 0 and len({len(s.completion) for s in batch.sequences if not s.is_chosen}) > 1
    torch.testing.assert_close(found["taper"] - found["drop"], 0.5 * pushed_down, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
def test_the_taper_scales_the_gradient_of_the_worse_completions_and_no_value(tiny, loss):
    policy, _, config = policy_of(tiny, loss=loss)
    policy.double()
    batch = random_batch(loss)
    for s in batch.sequences + batch.mismatched:
        s.ref_logps = s.ref_logps.double()
        s.sampler_logps = s.ref_logps + 0.1
    tapered = dataclasses.replace(config, stale="taper")
    plain_report, report = (humanline.forward_backward(policy, batch, c) for c in (config, tapered))
    assert report["loss"] == pytest.approx(plain_report["loss"], abs=1e-12)
    for s in batch.sequences:  # a sampler that hardly said it: the weight is 1
        s.sampler_logps = s.ref_logps - 1000
    assert torch.equal(gradient(policy, batch, config), gradient(policy, batch, tapered))
    assert humanline.forward_backward(policy, batch, tapered)["stale_weight"] == 1 and "stale_weight" not in plain_report
    for s in batch.sequences:  # a sampler that was sure of it: the weight is 0
        s.sampler_logps = s.ref_logps + 1000
    of_better = gradient(policy, batch, tapered)
    assert humanline.forward_backward(policy, batch, tapered)["stale_weight"] == 0

    def only_better(inputs, config, compute=LOSSES[loss].compute):
        fixed = inputs.is_chosen[:, None]
        d = torch.where(fixed, inputs.perceived, inputs.perceived.detach())
        return compute(dataclasses.replace(inputs, perceived=d), config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOSSES, loss, dataclasses.replace(LOSSES[loss], compute=only_better))
        expected = gradient(policy, batch, config)
    assert expected.abs().max() > 0 and torch.allclose(of_better, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
def test_offline_the_initial_policy_stands_in_for_an_unknown_sampler(run, tiny, monkeypatch, loss):
    seen, forward = [], humanline.forward_backward
    monkeypatch.setattr(humanline, "forward_backward",
                        lambda policy, batch, config: (seen.append(batch), forward(policy, batch, config))[1])
    run(f"--loss {loss} --stale taper --sync-k 2 --steps 8")
    model = policy_of(tiny)[0]
    for batch in seen:
        sequences = [s for s in batch.sequences if s.advantage or loss != "grpo"]
        logps, _ = humanline.log_probs(model, sequences)
        for s, values in zip(sequences, humanline.completion_parts(logps, sequences), strict=True):
            torch.testing.assert_close(s.sampler_logps, values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.9])
def test_rollouts_keep_the_log_probs_of_the_policy_that_drew_them_if_it_drew_at_temperature_1(
        run, tiny, monkeypatch, temperature):
    first = run(f"--sample-every 4 --steps 4 --temperature {temperature}")
    lines = [json.loads(line) for line in (first / "rollouts.jsonl").read_text().splitlines()]
    assert {line["temperature"] for line in lines} == {temperature}
    known = [[round(x, 5) for x in torch.tensor(line["logps"]).tolist()] for line in lines]
    seen, forward = [], humanline.forward_backward
    monkeypatch.setattr(humanline, "forward_backward",
                        lambda policy, batch, config: (seen.extend(batch.sequences), forward(policy, batch, config))[1])
    flags = ["--model", tiny, "--data", str(first / "rollouts.jsonl"), "--lr", "1e-2"]
    run("--stale taper --steps 2 --batch-size 4", flags=flags)
    found = [[round(x, 5) for x in s.sampler_logps.tolist()] for s in seen if s.advantage]
    assert found and all((values in known) == (temperature == 1) for values in found)


@pytest.mark.parametrize("mode", ["--sync-k 3", "--sync-k 2 --sample-every 4", "--no-humanline --sample-every 4"])
def test_both_act_and_a_resumed_run_repeats_them_bit_for_bit(run, tmp_path, mode):
    flags = f"{mode} --steps 9 --save-every 3 --stale taper --prior 1"
    whole = run(flags)
    again = run(f"{flags} --resume {whole}/checkpoint/step-00000006", out=str(tmp_path / "again"))
    assert timeless(again) == timeless(whole)[6:] and same_weights(again, whole)
    plain, tapered, prior = (run(f"{mode} --steps 9 {more}") for more in ("", "--stale taper", "--prior 1"))
    assert not same_weights(plain, tapered) and not same_weights(plain, prior) and not same_weights(tapered, whole)


# The prior.

def test_a_prior_is_that_many_rollouts_more_with_the_mean_reward_of_all():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    advantages = group_advantages(rewards, ids, prior=1.0, prior_mean=0.7)
    for group in (0, 1):
        longer = torch.cat([rewards[ids == group], torch.tensor([0.7], dtype=torch.float64)])
        expected = group_advantages(longer, torch.zeros(4, dtype=torch.long))[:-1]
        assert advantages[ids == group].tolist() == pytest.approx(expected.tolist())
    assert (advantages[ids == 1] > 0).all()
    assert torch.equal(group_advantages(rewards, ids, prior=0.0, prior_mean=0.7), group_advantages(rewards, ids))


def units(loss: str, rewards: list[float], prior: float):
    group = Group(0, [1, 2], [[3 + i, 9] for i in range(len(rewards))], rewards)
    return LOSSES[loss].make_units(group, Config(prior=prior), 0.7)


def test_a_group_that_is_all_right_says_so_and_one_that_is_all_wrong_too():
    for rewards, sign in (([1.0] * 4, 1), ([0.0] * 4, -1)):
        assert all(s.advantage == 0 for s in units("grpo", rewards, 0)[0])
        assert all(s.advantage * sign > 0 for s in units("grpo", rewards, 1)[0])
        assert units("kto", rewards, 0) == [] == units("dpo", rewards, 0)
        assert [s.is_chosen for [s] in units("kto", rewards, 1)] == [sign > 0] * 4
        [[chosen, rejected]] = units("dpo", rewards, 1)
        assert [chosen.completion, rejected.completion] == [[3, 9], []][::sign]
        assert chosen.is_chosen and not rejected.is_chosen


@pytest.mark.parametrize("mean_reward", [0.7, 0.7 + 1e-16, sum([0.7] * 11) / 11])
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_where_all_groups_have_one_reward_there_is_nothing_to_say(loss, mean_reward):
    group = Group(0, [1, 2], [[3, 9], [4, 9], [5, 9]], [0.7] * 3)
    assert LOSSES[loss].make_units(group, Config(prior=1), mean_reward) == []


def test_an_empty_completion_has_a_log_ratio_of_0(tiny):
    policy, _, config = policy_of(tiny, loss="dpo")
    pair = [Sequence([5, 6, 7], [8, 9], is_chosen=True), Sequence([5, 6, 7], [])]
    for s in pair:
        s.ref_logps = torch.full((len(s.completion),), -2.0)
    d, _, mask, logps = humanline.log_ratios(policy, pair, config)
    assert not d[1].any() and not mask[1].any()
    report = humanline.forward_backward(policy, Batch(1, pair, [], None), config)
    assert report["loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(0.1 * d[0].sum().detach())))


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_groups_without_a_difference_are_counted_and_with_a_prior_they_teach(run, tiny, tmp_path, loss, data_files):
    rows = [dict(prompt=f"{i}", completions=["a", "b"], scores=[1.0, 1.0] if i % 2 else [0.0, 1.0]) for i in range(8)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    common = f"--model {tiny} --data {path} --batch-size 4 --lr 1e-2 --loss {loss} --steps 2".split()
    assert not same_weights(run("", flags=common), run("--prior 1", flags=common))


def test_the_run_says_so(run, capsys):
    folder = run("--stale taper --prior 1 --steps 2")
    assert "GRPO with humanline, a taper, a prior of 1" in (folder / "final" / "README.md").read_text()


# A run that comes apart.

@pytest.mark.parametrize("how", ["warn", "stop", "restore"])
def test_a_collapse_ends_the_run_where_that_is_asked_for(run, tmp_path, monkeypatch, capsys, how):
    """The log-prob of the wanted completions is best at steps 16 to 20, and falls from step 21 on."""
    kept, forward = {}, humanline.forward_backward

    def spied(policy, batch, config):
        kept[batch.step - 1] = [p.detach().clone() for p in policy.parameters()]  # the weights after the step before
        return forward(policy, batch, config) | dict(
            logp_wanted=-0.1 if batch.step <= 20 else -3.0, completion_length=1)

    monkeypatch.setattr(humanline, "forward_backward", spied)
    folder = run(f"--steps 40 --on-collapse {how}", out=str(tmp_path / "out"))
    steps, err = len(metrics(folder)), capsys.readouterr().err
    assert err.count("may be coming apart") == 1
    if how == "warn":
        assert steps == 40 and "the run ends" not in err
        return
    assert 20 < steps < 30 and f"--on-collapse {how}: the run ends" in err
    assert f"its model is that of step {16 if how == 'restore' else steps}" in err
    model = humanline.load_policy(Config(model=str(folder / "final")), torch.device("cpu"))[0]
    same = all(map(torch.equal, [p.detach() for p in model.parameters()], kept[16]))
    assert same == (how == "restore")
    assert f"{16 if how == 'restore' else steps} steps from" in (folder / "final" / "README.md").read_text()


@pytest.mark.parametrize("how", ["stop", "restore"])
def test_a_run_that_was_warned_and_resumed_ends_there(run, tmp_path, monkeypatch, capsys, data_files, how):
    """And restores what it resumed from; a run that is best at steps 12 to 14 alone restores one of them."""
    forward = humanline.forward_backward
    fallen = lambda policy, batch, config: forward(policy, batch, config) | dict(
        logp_wanted=-0.1 if batch.step <= 14 else -3.0, completion_length=1)
    monkeypatch.setattr(humanline, "forward_backward", fallen)
    measured = f"--eval-data {data_files['groups']} --eval-every 10"
    flags, out = f"--steps 40 --save-every 30 --keep 1 {measured}", str(tmp_path / "out")
    run(flags, out=out)
    shutil.rmtree(tmp_path / "out" / "final")
    run(f"{flags} --resume latest --on-collapse {how}", out=out)
    assert len(metrics(tmp_path / "out")) == 31
    assert f"its model is that of step {30 if how == 'restore' else 31}" in capsys.readouterr().err
    folder = run(f"--steps 40 --on-collapse {how} {measured}")
    ended = 12 if how == "restore" else len(metrics(folder))
    assert f"its model is that of step {ended}" in capsys.readouterr().err
    steps = [json.loads(line)["step"] for line in (folder / "eval_rollouts.jsonl").read_text().splitlines()]
    assert len({steps.count(step) for step in steps}) == 1  # the last measurement has a number of its own


@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
def test_drop_pushes_nothing_down(tiny, loss):
    policy, _, config = policy_of(tiny, loss=loss)
    policy.double()
    batch = random_batch(loss)
    for s in batch.sequences + batch.mismatched:
        s.ref_logps = s.ref_logps.double()
        s.sampler_logps = s.ref_logps + 1000  # so sure that the taper's weight is 0
    dropped, tapered = (gradient(policy, batch, dataclasses.replace(config, stale=how)) for how in ("drop", "taper"))
    assert dropped.abs().max() > 0 and torch.allclose(dropped, tapered, rtol=1e-9, atol=1e-12)
