"""Rollouts: they are written, can be read back and trained on, and a run reports what it learns from."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    encode_prompt, gradient, logps_of, metrics, policy_of, random_batch, same_weights, timeless, write_jsonl)

import humanline
from humanline import Config, Group


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rollouts_of(folder) -> list[dict]:
    return lines_of(folder / "rollouts.jsonl")


# On disk, and back.

def test_every_completion_is_written_as_it_was_sampled_with_its_log_probs(run, tiny):
    folder = run("--sample-every 2 --steps 4 --temperature 0.7 --sync-k 2")
    lines = rollouts_of(folder)
    assert len(lines) == 4 * 4 * 4  # steps, prompts, completions
    assert [line["step"] for line in lines] == [1] * 32 + [3] * 32
    assert len({line["prompt_id"] for line in lines}) == 16
    policy, tokenizer, _ = policy_of(tiny)  # the policy that drew at step 1
    stops = humanline.stop_ids(policy, tokenizer)
    for line in lines[:32]:
        ids = line["tokens"]
        assert line["completion"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert line["truncated"] == (ids[-1] not in stops) and (len(ids) == 4 or not line["truncated"])
        prompt = encode_prompt(tokenizer, line["prompt"])
        logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1)[range(len(ids)), ids]
        assert line["logps"] == pytest.approx(expected.tolist(), abs=2e-4)
    drawn = metrics(folder)[0]
    assert drawn["truncated"] == sum(line["truncated"] for line in lines[:32]) / 32
    rewards = torch.tensor([line["reward"] for line in lines[:32]])
    assert drawn["reward_std"] == pytest.approx(float(rewards.std(correction=0)))
    first = {line["prompt_id"] for line in lines[:16]}  # the first step's
    assert drawn["reward"] == pytest.approx(float(rewards[:16].mean())) and len(first) == 4


@pytest.mark.parametrize("loss", ["grpo", "kto"])
def test_rollouts_of_a_run_can_be_offline_data_of_another_token_for_token(run, tiny, loss, monkeypatch):
    first = run("--sample-every 2 --steps 4")
    expected = {}
    for line in rollouts_of(first):
        expected.setdefault(line["prompt_id"], []).append((line["tokens"], line["reward"], line["logps"]))
    seen, batches = [], humanline.Batches

    def spied(config, groups, *more):
        seen.extend(groups)
        return batches(config, groups, *more)

    monkeypatch.setattr(humanline, "Batches", spied)
    flags = ["--model", tiny, "--data", str(first / "rollouts.jsonl"), "--loss", loss, "--lr", "1e-2"]
    run("--taper --steps 4 --batch-size 16", flags=flags)  # each completion once, or more often
    assert [list(zip(g.completions, g.rewards, g.logps)) for g in seen] == list(expected.values())
    for group in seen:
        for sequence, logps in zip(group.sequences, group.logps, strict=True):
            assert sequence.sampler_logps.tolist() == pytest.approx(logps)


def test_an_empty_completion_can_be_read_back(run, tiny, tmp_path):
    line = dict(step=1, row=0, prompt_id="1-0", prompt=[dict(role="user", content="a")], reward=1.0)
    rows = [dict(line, completion="", tokens=[3], logps=[-0.1]),
            dict(line, completion="b", reward=0.0, tokens=[5 + ord("b") - 32 + 3, 3], logps=[-0.1, -0.2])]
    path = write_jsonl(tmp_path / "rollouts.jsonl", rows)
    [row] = humanline.read_rows(path, Config(), "--data")
    assert row.completions == ["", "b"] and row.tokens[0] == [3] and row.rewards == [1.0, 0.0]


@pytest.mark.parametrize("settings, usable", [
    (dict(temperature=1.0, top_p=1.0), True), (dict(temperature=0.9), False), (dict(top_p=0.9), False)])
def test_log_probs_of_rollouts_are_used_only_if_drawn_at_temperature_1_and_top_p_1(settings, usable):
    fields = dict(prompt="a", completion="b", reward=1.0, tokens=[37, 3], logps=[-0.1, -0.2], **settings)
    assert humanline.read_row(fields, "row 1", Config()).logps == [[-0.1, -0.2]] * usable


def test_rows_of_another_model_do_not_affect_the_other_rows(tiny, tmp_path, capsys):
    policy, tokenizer, config = policy_of(tiny, max_new_tokens=4)
    ids = tokenizer("ab", add_special_tokens=False)["input_ids"]
    line = dict(prompt="a", completion="ab", logps=[-0.1] * 2, tokens=ids)  # cut at its longest: without an end
    rows = [dict(line, prompt_id="1", reward=i) for i in (0, 1)]
    rows += [dict(line, prompt_id="2", reward=i, tokens=ids[::-1]) for i in (0, 1)]
    rows = humanline.read_rows(write_jsonl(tmp_path / "both.jsonl", rows), config, "--data")
    ours, theirs = humanline.encode_rows(rows, humanline.Sampler(policy, tokenizer, config))
    assert ours.completions == [ids] * 2 and ours.logps == [line["logps"]] * 2
    assert theirs.completions == [[*ids, tokenizer.eos_token_id]] * 2 and theirs.logps == []
    assert "the tokens of 1 rows do not match their texts under this tokenizer" in capsys.readouterr().err


def test_held_out_completions_have_their_own_file(run, data_files):
    folder = run(f"--sample-every 1 --steps 2 --eval-data {data_files['prompts']} --eval-every 1 --eval-samples 3")
    lines = lines_of(folder / "eval_rollouts.jsonl")
    assert [line["step"] for line in lines] == [0] * 72 + [1] * 72 + [2] * 72
    accuracy = [metrics(folder)[0]["accuracy_before"], *(line["accuracy"] for line in metrics(folder))]
    for step, value in enumerate(accuracy):
        rewards = [line["reward"] for line in lines if line["step"] == step]
        assert value == pytest.approx(sum(rewards) / 72)


def cut_back(whole: Path, to: Path, step: int) -> str:
    """A copy of a finished run, rolled back to a checkpoint except for its JSON lines."""
    shutil.copytree(whole, to)
    shutil.rmtree(to / "final")
    for later in [path for path in (to / "checkpoint").iterdir() if path.name > f"step-{step:08d}"]:
        shutil.rmtree(later)
    return str(to)


def test_a_resumed_run_neither_loses_nor_repeats_a_line(run, tmp_path, data_files):
    flags = f"--sample-every 2 --steps 8 --save-every 3 --eval-data {data_files['prompts']} --eval-every 2"
    whole = run(flags)
    interrupted = Path(cut_back(whole, tmp_path / "interrupted", 3))
    for name in ("rollouts.jsonl", "eval_rollouts.jsonl"):  # cut off in the middle of a line
        text = (interrupted / name).read_bytes()
        (interrupted / name).write_bytes(text[:-17])
    run(f"{flags} --resume latest", out=str(interrupted))
    for name in ("rollouts.jsonl", "eval_rollouts.jsonl"):
        assert (interrupted / name).read_text() == (whole / name).read_text()
    assert timeless(interrupted) == timeless(whole) and same_weights(interrupted, whole)


# Health.

def test_the_shares_of_clipped_tokens_and_the_lengths_equal_a_plain_count(tiny):
    policy, _, config = policy_of(tiny, perception="clip", log_eps_p=-0.5, log_eps_r=0.7, epsilon=0.1, epsilon_high=0.3)
    batch = random_batch("grpo")
    for sequence in batch.sequences:
        sequence.is_idle = sequence.advantage == 0
    report = humanline.forward_backward(policy, batch, config)
    counts, tokens = dict.fromkeys(("clamped_low", "clamped_high", "clip_fraction_low", "clip_fraction_high", "drift"), 0.0), 0
    active = [sequence for sequence in batch.sequences if sequence.advantage]  # the others have no gradient
    for sequence, logps in zip(active, logps_of(policy, active)):
        for d in (logps - sequence.ref_logps).tolist():
            ratio = math.exp(min(max(d, -0.5), 0.7))
            counts["clamped_low"] += d < -0.5
            counts["clamped_high"] += d > 0.7
            counts["clip_fraction_low"] += ratio < 0.9 and sequence.advantage < 0
            counts["clip_fraction_high"] += ratio > 1.3 and sequence.advantage > 0
            counts["drift"] += abs(d)
            tokens += 1
    assert all(count > 0 for count in counts.values())
    for name, count in counts.items():
        assert report[name] == pytest.approx(count / tokens, rel=1e-4), name
    assert report["unclamped"] == pytest.approx(1 - (counts["clamped_low"] + counts["clamped_high"]) / tokens)
    lengths = [len(s.completion) for s in batch.sequences]
    assert report["completion_length"] == sum(lengths) / len(lengths)


@pytest.mark.parametrize("lines, word, step", [
    ([dict(truncated=0.4)] * 3 + [dict(truncated=0.6)] * 3, "--max-new-tokens", 4),
    ([dict(reward_std=0.1), dict(), dict(reward_std=1.4e-17)], "same reward", 3),
    ([dict(logp_wanted=-1.0, completion_length=1)] * 20 + [dict(logp_wanted=-3.0)] * 20, "collapsing", 27),
])
def test_each_warning_is_printed_once_and_in_time(lines, word, step):
    watch = humanline.Watch()
    warned = [(number, text) for number, line in enumerate(lines, 1) for text in watch(line)]
    [(number, text)] = warned
    assert number == step and word in text


def test_a_resumed_run_does_not_repeat_its_warnings(run, tmp_path, capsys):
    (tmp_path / "same.py").write_text("def same(prompts, completions, rows):\n    return [1.0] * len(rows)\n")
    flags = f"--sample-every 1 --steps 4 --save-every 2 --reward {tmp_path}/same.py:same"
    first = run(flags)
    err = capsys.readouterr().err
    assert err.count("same reward") == 1
    assert all(line["grad_norm"] == 0 and line["no_difference"] == 1 for line in metrics(first))
    run(f"{flags} --resume latest", out=cut_back(first, tmp_path / "again", 2))
    assert same_weights(first, tmp_path / "again") and "same reward" not in capsys.readouterr().err


# Groups without a difference.

def batch_of(equal: int, different: int, **settings):
    config, groups = Config(**settings), []
    for number in range(equal + different):
        rewards = [1.0] * 4 if number < equal else [0.0, 1.0, 0.5, 0.0]
        completions = [[20 + i, 30 + number, 3][i % 2 :] for i in range(4)]
        groups.append(Group(number, [10 + number, 11, 12], completions, rewards))
    humanline.make_units(groups, config)
    for group in groups:
        for sequence in group.sequences:
            sequence.ref_logps = torch.full((len(sequence.completion),), -4.0)
    return humanline.Batch(1, [sequence for group in groups for sequence in group.sequences], [], 0.5, equal / len(groups))


def test_skipping_groups_without_a_difference_changes_no_gradient(tiny, monkeypatch):
    policy, _, config = policy_of(tiny, perception="clip")
    policy.double()
    computed, log_probs = [], humanline.log_probs

    def spied(model, rows, *more):
        computed.append(sum(map(len, rows)))
        return log_probs(model, rows, *more)

    monkeypatch.setattr(humanline, "log_probs", spied)
    batch = batch_of(3, 2)
    short = gradient(policy, batch, config)
    assert sum(computed) == 8
    for sequence in batch.sequences:
        sequence.is_idle = False
    computed.clear()
    whole = gradient(policy, batch, config)
    assert sum(computed) == 20 and whole.abs().max() > 0
    assert torch.allclose(short, whole, rtol=1e-6, atol=1e-9 * float(whole.abs().max()))


@pytest.mark.parametrize("settings", [dict(kl_beta=0.1), dict(perception="sample")])
def test_settings_that_need_all_tokens_skip_no_group(settings):
    assert all(sequence.is_idle for sequence in batch_of(1, 0).sequences)
    assert not any(sequence.is_idle for sequence in batch_of(1, 0, **settings).sequences)


def test_rejections_depend_only_on_the_seed_and_the_step(tiny):
    policy, _, config = policy_of(tiny, loss="dpo", perception="sample", gamma_r=0.5)

    def verdicts(seed: int, step: int) -> list[int]:
        config.seed = seed
        batch = random_batch("dpo")
        batch.step = step
        humanline.decide_verdicts(policy, batch, config)
        return torch.cat([sequence.verdicts for sequence in batch.sequences]).tolist()

    first = verdicts(1, 1)
    assert len(set(first)) > 1 and first == verdicts(1, 1)
    assert first not in (verdicts(2, 1), verdicts(1, 2))
