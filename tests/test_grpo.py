"""Plain GRPO: the ratio to the old policy, the KL to the initial one, temperature, rewards, settings."""

import pytest
import torch
from conftest import metrics, same_weights

import humanline
from humanline import Config, Group, group_advantages

PLAIN = "--no-humanline --sample-every 4"


def test_the_kl_to_the_initial_policy_does_not_fall_to_0_when_completions_are_drawn(run):
    lines = metrics(run(f"{PLAIN} --steps 12 --kl-beta 0.01"))
    kl, drift = ([line[name] for line in lines] for name in ("kl", "drift"))
    assert kl[0] == drift[0] == drift[4] == drift[8] == 0  # the policy that drew is the policy
    assert min(kl[1], kl[4], kl[8]) > 0.1


@pytest.mark.parametrize("flags, names", [
    (f"{PLAIN} --steps 8", {"old_logps"}), ("--sync-k 2 --sample-every 4 --kl-beta 0.1", {"ref_logps"})])
def test_no_unneeded_log_probs_are_computed(run, monkeypatch, flags, names):
    attached, attach = set(), humanline.attach_logps
    monkeypatch.setattr(humanline, "attach_logps",
                        lambda name, *more: attached.add(name) or attach(name, *more))
    lines = metrics(run(flags))
    assert attached == names
    assert all(("kl" in line) == ("ref_logps" in names) for line in lines)
    assert max(line["drift"] for line in lines) > 0


def test_the_temperature_of_log_probs_is_that_of_sampling_or_1_for_the_datas_own_completions():
    assert Config(temperature=0.7, sample_every=1).logits_temperature == 0.7
    assert Config(temperature=0.7).logits_temperature == 1


def test_offline_the_temperature_has_no_effect(run, tmp_path):
    """The data's completions were not drawn with it."""
    (tmp_path / "online.toml").write_text("temperature = 0.7\n")
    assert same_weights(run("--steps 3"), run(f"--steps 3 --config {tmp_path / 'online.toml'}"))


def test_dr_grpo_does_not_divide_by_the_deviation():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert group_advantages(rewards, scale=False).tolist() == [0.75, -0.25, -0.25, -0.25]
    group = Group(0, [1], [[2]] * 4, rewards.tolist())
    [[sequences]] = humanline.prepare_groups([group], Config(scale_rewards=False))
    assert [s.advantage for s in sequences] == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("spec", ["maths", "math=8", "a.py", "a.py:f=1"])
def test_a_bad_reward_gives_a_one_line_error(spec):
    with pytest.raises(humanline.UserError, match="--reward .*: pass exact, math"):
        humanline.parse_config(["--reward", spec])
