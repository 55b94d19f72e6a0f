"""Rollouts: they are written, can be read back and trained on, and a run reports what it learns from."""

import collections
import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    encode_prompt,
    gradient,
    logps_of,
    metrics,
    policy_of,
    random_batch,
    same_weights,
    timeless,
    write_jsonl,
)

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

    drawn = lines[:32]
    policy, tokenizer, _ = policy_of(tiny)  # the policy that drew at step 1
    stops = humanline.find_stop_ids(policy, tokenizer)
    for line in drawn:
        ids = line["tokens"]
        hidden = (*stops, tokenizer.bos_token_id, tokenizer.pad_token_id)
        assert line["completion"] == tokenizer.decode([token for token in ids if token not in hidden])
        assert line["truncated"] == (ids[-1] not in stops)
        if line["truncated"]:
            assert len(ids) == 4
        prompt = encode_prompt(tokenizer, line["prompt"])
        logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logps = (logits / 0.7).log_softmax(-1)[range(len(ids)), ids]
        assert line["logps"] == pytest.approx(logps.tolist(), abs=2e-4)

    report = metrics(folder)[0]
    assert report["truncated"] == sum(line["truncated"] for line in drawn) / 32
    rewards = torch.tensor([line["reward"] for line in drawn])
    assert report["reward_std"] == pytest.approx(float(rewards.std(correction=0)))
    # The reward is that of the first step's completions.
    assert report["reward"] == pytest.approx(float(rewards[:16].mean()))
    assert len({line["prompt_id"] for line in drawn[:16]}) == 4


@pytest.mark.parametrize("loss", ["grpo", "kto"])
def test_rollouts_of_a_run_can_be_offline_data_of_another_token_for_token(run, tiny, loss, monkeypatch):
    first = run("--sample-every 2 --steps 4")
    expected = {}
    for line in rollouts_of(first):
        rollout = (line["tokens"], line["reward"], line["logps"])
        expected.setdefault(line["prompt_id"], []).append(rollout)

    used = []
    batches = humanline.Batches

    def watched(config, groups, *args):
        used.extend(groups)
        return batches(config, groups, *args)

    monkeypatch.setattr(humanline, "Batches", watched)
    data = str(first / "rollouts.jsonl")
    flags = ["--model", tiny, "--data", data, "--loss", loss, "--lr", "1e-2"]
    run("--steps 4 --batch-size 16", flags=flags)  # each completion once, or more often
    for group, rollouts in zip(used, expected.values(), strict=True):
        assert list(zip(group.completions, group.rewards, group.logps)) == rollouts
        [units] = humanline.prepare_groups([group], humanline.Config(loss=loss))
        for sequence in sum(units, []):
            logps = group.logps[group.completions.index(sequence.completion)]
            assert sequence.sampler_logps.tolist() == pytest.approx(logps)


def test_an_empty_completion_can_be_read_back(run, tiny, tmp_path):
    prompt = [dict(role="user", content="a")]
    common = dict(step=1, row=0, prompt_id="1-0", prompt=prompt)
    empty = dict(common, completion="", reward=1.0, tokens=[3], logps=[-0.1])
    other = dict(common, completion="b", reward=0.0, tokens=[74, 3], logps=[-0.1, -0.2])  # 74 is b
    path = write_jsonl(tmp_path / "rollouts.jsonl", [empty, other])
    [row] = humanline.read_rows(path, Config(), "--data")
    assert row.completions == ["", "b"]
    assert row.tokens[0] == [3]
    assert row.rewards == [1.0, 0.0]


@pytest.mark.parametrize("settings, usable", [
    (dict(temperature=1.0, top_p=1.0), True),
    (dict(temperature=0.9), False),
    (dict(top_p=0.9), False),
])
def test_log_probs_of_rollouts_are_used_only_if_drawn_at_temperature_1_and_top_p_1(settings, usable):
    logps = [-0.1, -0.2]
    fields = dict(
        prompt="a", completion="b", reward=1.0, tokens=[37, 3], logps=logps, **settings)
    row = humanline.read_row(fields, "row 1", Config())
    assert row.logps == ([logps] if usable else [])


def test_rows_of_another_model_do_not_affect_the_other_rows(tiny, tmp_path, capsys):
    policy, tokenizer, config = policy_of(tiny, max_new_tokens=4)
    ids = tokenizer("ab", add_special_tokens=False)["input_ids"]
    logps = [-0.1, -0.1]
    lines = []
    for prompt_id, tokens in (("1", ids), ("2", ids[::-1])):  # truncated, and so without an end
        for reward in (0, 1):
            lines.append(dict(prompt_id=prompt_id, prompt="a", completion="ab", reward=reward,
                              tokens=tokens, logps=logps))
    path = write_jsonl(tmp_path / "both.jsonl", lines)
    rows = humanline.read_rows(path, config, "--data")
    sampler = humanline.Sampler(policy, tokenizer, config)
    ours, theirs = humanline.encode_rows(rows, sampler, online=False)
    assert ours.completions == [ids, ids]
    assert ours.logps == [logps, logps]
    encoded = [*ids, tokenizer.eos_token_id]
    assert theirs.completions == [encoded, encoded]
    assert theirs.logps == []
    assert "the tokens of 1 rows do not match their texts under this tokenizer" in capsys.readouterr().err


def test_held_out_completions_have_their_own_file(run, data_files):
    folder = run(f"--sample-every 1 --steps 2 --eval-data {data_files['prompts']} "
                 "--eval-every 1 --eval-samples 3 --eval-prompts 5")
    lines = lines_of(folder / "eval_rollouts.jsonl")
    assert [line["step"] for line in lines] == [0] * 15 + [1] * 15 + [2] * 15
    first, second = metrics(folder)
    accuracies = [first["accuracy_before"], first["accuracy"], second["accuracy"]]
    for step, accuracy in enumerate(accuracies):
        rewards = [line["reward"] for line in lines if line["step"] == step]
        assert accuracy == pytest.approx(sum(rewards) / 15)


def cut_back(whole: Path, to: Path, step: int) -> str:
    """A copy of a finished run, rolled back to a checkpoint except for its JSON lines."""
    shutil.copytree(whole, to)
    shutil.rmtree(to / "final")
    for path in list((to / "checkpoint").iterdir()):
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)
    return str(to)


def test_a_resumed_run_neither_loses_nor_repeats_a_line(run, tmp_path, data_files):
    flags = (f"--sample-every 2 --steps 8 --save-every 3 --eval-data {data_files['prompts']} "
             "--eval-every 2")
    whole = run(flags)
    interrupted = Path(cut_back(whole, tmp_path / "interrupted", 3))
    for name in ("rollouts.jsonl", "eval_rollouts.jsonl"):  # cut off in the middle of a line
        text = (interrupted / name).read_bytes()
        (interrupted / name).write_bytes(text[:-17])
    run(f"{flags} --resume latest", out=str(interrupted))
    for name in ("rollouts.jsonl", "eval_rollouts.jsonl"):
        assert (interrupted / name).read_text() == (whole / name).read_text()
    assert timeless(interrupted) == timeless(whole)
    assert same_weights(interrupted, whole)


def test_a_second_drawing_at_the_same_step_differs_and_both_repeat_in_another_process(tiny, data_files):
    policy, tokenizer, config = policy_of(tiny, max_new_tokens=4, sample_every=1)
    rows = humanline.read_rows(data_files["prompts"], config, "--data")

    def draw_twice(step: int) -> list:
        sampler = humanline.Sampler(policy, tokenizer, config)
        prompts = humanline.encode_rows(rows, sampler, online=True)
        return [[group.completions for group in sampler.draw_rollouts(prompts, rows, 2, step)]
                for _ in range(2)]

    first, second = draw_twice(1)
    assert first != second
    assert draw_twice(1) == [first, second]
    assert not {str(first), str(second)} & set(map(str, draw_twice(2)))


def test_two_calls_of_generate_draw_different_completions_of_the_same_prompt(tiny):
    policy, tokenizer, config = policy_of(tiny, max_new_tokens=8, sample_every=1, sample_tokens=2 * (4 + 8))
    sampler = humanline.Sampler(policy, tokenizer, config)
    drawn = sampler.draw([Group(0, [4, 5, 6, 7], [], [])] * 8, 1, False)  # two completions a call
    calls = [str([drawn[i], drawn[i + 1]]) for i in range(0, 8, 2)]
    assert len(set(calls)) == 4


# Health.

def test_the_shares_of_clipped_tokens_and_the_lengths_equal_a_plain_count(tiny):
    policy, _, config = policy_of(
        tiny, perception="clip", log_eps_p=-0.5, log_eps_r=0.7, epsilon=0.1, epsilon_high=0.3)
    batch = random_batch("grpo")
    active = []
    for sequence in batch.sequences:
        if sequence.advantage != 0:
            active.append(sequence)
    report = humanline.forward_backward(policy, batch, config)
    counts = collections.Counter()
    tokens = 0
    for sequence, logps in zip(active, logps_of(policy, active)):
        for d in (logps - sequence.ref_logps).tolist():
            ratio = math.exp(min(max(d, -0.5), 0.7))
            counts["clamped_low"] += d < -0.5
            counts["clamped_high"] += d > 0.7
            counts["clip_fraction_low"] += ratio < 0.9 and sequence.advantage < 0
            counts["clip_fraction_high"] += ratio > 1.3 and sequence.advantage > 0
            counts["drift"] += abs(d)
            tokens += 1
    for name, count in counts.items():
        assert count > 0
        assert report[name] == pytest.approx(count / tokens, rel=1e-4), name
    clamped = counts["clamped_low"] + counts["clamped_high"]
    assert report["unclamped"] == pytest.approx(1 - clamped / tokens)
    lengths = [len(sequence.completion) for sequence in batch.sequences]
    assert report["completion_length"] == sum(lengths) / len(lengths)


LONGER = [dict(truncated=0.4)] * 3 + [dict(truncated=0.6)] * 3
EQUAL = [dict(reward_std=0.1), dict(), dict(reward_std=1.4e-17)]
COLLAPSE = [dict(logp_wanted=-1.0, completion_length=1)] * 20 + [dict(logp_wanted=-3.0)] * 20


@pytest.mark.parametrize("lines, words, step", [
    (LONGER, "--max-new-tokens", 4), (EQUAL, "same reward; use harder prompts if these are solved", 3),
    (COLLAPSE, "collapsing", 27)])
def test_each_warning_is_printed_once_and_in_time(lines, words, step):
    watch = humanline.Watch()
    warnings = []
    for number, line in enumerate(lines, 1):
        warnings += [(number, text) for text in watch(line)]
    [(number, text)] = warnings
    assert number == step
    assert words in text


def test_a_resumed_run_does_not_repeat_its_warnings(run, tmp_path, capsys):
    code = "def same(prompts, completions, rows):\n    return [1.0] * len(rows)\n"
    (tmp_path / "same.py").write_text(code)
    flags = f"--sample-every 1 --steps 4 --save-every 2 --reward {tmp_path}/same.py:same"
    first = run(flags)
    assert capsys.readouterr().err.count("same reward") == 1
    for line in metrics(first):
        assert line["grad_norm"] == 0
        assert line["no_difference"] == 1
    again = tmp_path / "again"
    run(f"{flags} --resume latest", out=cut_back(first, again, 2))
    assert same_weights(first, again)
    assert "same reward" not in capsys.readouterr().err


# Completions that were cut off.

@pytest.mark.parametrize("loss", ["grpo", "kto"])
def test_masked_completions_keep_their_advantage_and_lose_their_gradient_online_and_offline(
        run, tiny, monkeypatch, loss):
    trained_on, original = [], humanline.forward_backward

    def watched(policy, batch, config):
        trained_on.append((batch.sequences, config))
        return original(policy, batch, config)

    monkeypatch.setattr(humanline, "forward_backward", watched)
    stored = run(f"--loss {loss} --sample-every 1 --steps 12 --mask-truncated") / "rollouts.jsonl"
    lines = [json.loads(line) for line in stored.read_text().splitlines()]
    is_cut = {tuple(line["tokens"]): line["truncated"] for line in lines}
    flags = f"--loss {loss} --model {tiny} --data {stored} --steps 12 --batch-size 4 --lr 1e-2 --mask-truncated"
    run("", flags=flags.split())
    for part in trained_on[:12], trained_on[12:]:
        masked = trained = 0
        for sequences, config in part:
            for sequence in sequences:
                cut = is_cut[tuple(sequence.completion)]
                teaches_nothing = loss == "grpo" and sequence.advantage == 0
                assert humanline.is_idle(sequence, config) == (cut or teaches_nothing)
                masked += cut and sequence.advantage != 0
                trained += not (cut or teaches_nothing)
        assert masked and trained


def test_scoring_that_takes_long_reports_its_tokens_to_a_file(tiny, monkeypatch, capsys):
    policy, _, config = policy_of(tiny)
    batches = [random_batch("grpo", seed=seed) for seed in range(3)]
    tokens = sum(len(one.prompt + one.completion) for batch in batches for one in batch.sequences)
    for seconds in 0.1, 30:
        clock = itertools.count(step=seconds)
        monkeypatch.setattr("tqdm.std.time", lambda clock=clock: next(clock))
        humanline.attach_logps("ref_logps", policy, batches, config)
        assert (f"scoring {tokens:,} tokens: " in capsys.readouterr().err) == (seconds == 30)


# Groups without a difference.

def batch_of(equal: int, different: int, **settings):
    groups = []
    for number in range(equal + different):
        rewards = [1.0] * 4 if number < equal else [0.0, 1.0, 0.5, 0.0]
        completions = [[20 + i, 30 + number, 3][i % 2 :] for i in range(4)]
        groups.append(Group(number, [10 + number, 11, 12], completions, rewards))
    sequences = []
    for [of_group] in humanline.prepare_groups(groups, Config(**settings)):
        sequences += of_group
    for sequence in sequences:
        sequence.ref_logps = torch.full((len(sequence.completion),), -4.0)
    return humanline.Batch(1, sequences, [], 0.5, equal / len(groups))


def test_skipping_groups_without_a_difference_changes_no_gradient(tiny, monkeypatch):
    policy, _, config = policy_of(tiny, perception="clip")
    policy.double()
    computed = []
    log_probs = humanline.log_probs

    def watched(model, rows, *args):
        computed.extend(sum(rows, []))
        return log_probs(model, rows, *args)

    monkeypatch.setattr(humanline, "log_probs", watched)
    batch = batch_of(3, 2)
    short = gradient(policy, batch, config)
    assert len(computed) == 8
    computed.clear()
    grpo = humanline.LOSSES["grpo"]
    monkeypatch.setitem(humanline.LOSSES, "grpo", humanline.dataclasses.replace(grpo, needs_all=True))
    whole = gradient(policy, batch, config)
    assert len(computed) == 20
    largest = float(whole.abs().max())
    assert largest > 0
    assert torch.allclose(short, whole, rtol=1e-6, atol=1e-9 * largest)


@pytest.mark.parametrize("settings", [dict(kl_beta=0.1), dict(perception="sample")])
def test_settings_that_need_all_tokens_skip_no_group(settings):
    for sequence in batch_of(1, 0).sequences:
        assert humanline.is_idle(sequence, Config())
        assert not humanline.is_idle(sequence, Config(**settings))


def test_rejections_depend_only_on_the_seed_and_the_step(tiny):
    policy, _, config = policy_of(tiny, loss="dpo", perception="sample")

    def verdicts(seed: int, step: int) -> list[int]:
        config.seed = seed
        batch = random_batch("dpo")
        batch.step = step
        humanline.decide_verdicts(policy, batch, config)
        parts = [sequence.verdicts for sequence in batch.sequences]
        return torch.cat(parts).tolist()

    first = verdicts(1, 1)
    assert len(set(first)) > 1
    assert verdicts(1, 1) == first
    assert verdicts(2, 1) != first
    assert verdicts(1, 2) != first
