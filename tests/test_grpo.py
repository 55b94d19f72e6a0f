"""Plain GRPO: the ratio to the old policy, the KL to the initial one, temperature, rewards, settings."""

import dataclasses
import json
import types

import pytest
import torch
from conftest import double, gradient, metrics, policy_of, random_batch, same_weights

import humanline
from humanline import Config, Group, group_advantages

PLAIN = "--no-humanline --sample-every 4"


def weights_of(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def with_weights(model, weights):
    with torch.no_grad():
        for p, value in zip(model.parameters(), weights):
            p.copy_(value)
    return model


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


def test_stored_reference_weights_can_be_swapped_in_and_out(tiny):
    policy, _, config = policy_of(tiny, sample_every=4, kl_beta=0.1, humanline=False)
    batches = types.SimpleNamespace(steps=8, made_until=0, pending=[], make=lambda until: None)
    reference = humanline.Reference(policy, batches, config)
    initial = weights_of(policy)
    reference.sync(0)
    moved = weights_of(with_weights(policy, [weight + 1 for weight in initial]))
    reference.swap_weights()
    assert all(map(torch.equal, weights_of(policy), initial))
    reference.swap_weights()
    assert all(map(torch.equal, weights_of(policy), moved))
    assert all(map(torch.equal, reference.weights, initial))


def test_online_log_probs_are_at_the_sampling_temperature(tiny):
    policy, _, config = policy_of(tiny, sample_every=1, temperature=0.7)
    assert config.logits_temperature == 0.7
    assert Config(temperature=0.7).logits_temperature == 1  # the data's own completions
    sequences = random_batch("grpo").sequences
    for sequence, logps in zip(sequences, humanline.sequence_logps(policy, sequences, config)):
        logits = policy(torch.tensor([sequence.prompt + sequence.completion])).logits[0, :-1] / 0.7
        last = len(logits) - len(sequence.completion)  # of the prompt
        expected = logits[last:].log_softmax(-1)[range(len(sequence.completion)), sequence.completion]
        torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)


def test_offline_the_temperature_has_no_effect(run):
    """The data's completions were not drawn with it."""
    assert same_weights(run("--steps 3"), run("--steps 3 --temperature 0.7"))


# The knobs.

def test_dr_grpo_divides_neither_by_the_deviation_nor_by_a_sequences_length(tiny):
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert group_advantages(rewards, scale=False).tolist() == [0.75, -0.25, -0.25, -0.25]
    group = Group(0, [1], [[2]] * 4, rewards.tolist())
    humanline.make_units([group], Config(scale_rewards=False))
    assert [s.advantage for s in group.sequences] == [0.75, -0.25, -0.25, -0.25]
    batch = random_batch("grpo")
    x = humanline.make_microbatch([[s] for s in batch.sequences], torch.device("cpu"))
    losses = torch.rand(x.mask.shape)
    mean_loss = humanline.share_of_mean(losses, x, batch, Config(average="constant", max_new_tokens=16))
    assert float(mean_loss) == pytest.approx(float((losses * x.mask).sum() / (8 * 16)))


@pytest.mark.parametrize("flags", ["--epsilon-high 0.5 --epsilon 0.001", "--no-scale-rewards",
                                   "--average constant"])
@pytest.mark.parametrize("mode", ["--sync-k 3", PLAIN])
def test_each_setting_has_an_effect_in_a_run(run, flags, mode):
    plain = f"{mode} --epsilon 0.001" if "epsilon" in flags else mode
    assert not same_weights(run(plain), run(f"{mode} {flags}"))


def test_no_setting_depends_on_the_microbatches(tiny):
    policy, _, config = policy_of(tiny, max_new_tokens=8, average="constant", epsilon_high=0.3)
    batch = random_batch("grpo")
    double(policy, batch)
    whole = gradient(policy, batch, config)
    config.microbatch_tokens = 36
    small = gradient(policy, batch, config)
    assert torch.allclose(small, whole, rtol=1e-6, atol=1e-6 * float(whole.abs().max()))


# A reward that fails.

LETTERS = """
def letters(prompts, completions, rows):
    return [sum(map(str.isalpha, text)) or None for text in completions]
"""


def test_a_failed_reward_counts_as_0(run, tmp_path):
    (tmp_path / "letters.py").write_text(LETTERS)
    reward = f"{tmp_path}/letters.py:letters"
    folder = run(f"--sample-every 1 --steps 3 --max-new-tokens 2 --reward {reward}")
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    for step, metric in enumerate(metrics(folder), 1):
        rewards = [line["reward"] for line in lines if line["step"] == step]
        assert metric["reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert 0 in rewards and max(rewards) > 0
    assert f'reward = "{reward}"' in (folder / "config.toml").read_text()


@pytest.mark.parametrize("spec", ["maths", "math=8", "a.py", "a.py:f=1"])
def test_a_bad_reward_gives_a_one_line_error(spec):
    with pytest.raises(humanline.UserError, match="--reward .*: pass exact, math"):
        humanline.parse_config(["--reward", spec])
