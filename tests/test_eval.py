"""What eval.py says after a run: the estimates are right, the uncertainty is honest, bad input is said in a line."""

import dataclasses
import doctest
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, metrics, rows_of, write_jsonl

import eval as evaluation
import humanline
from eval import capacity, interval, length_controlled, pass_at_k, perceived_divergence, sign_flip_p


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """ask("accuracy --samples 2") runs the command in an empty folder; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(command: str) -> str:
        status = evaluation.main(command.split())
        said = capsys.readouterr()
        assert status == 0, said.err
        return said.out

    return run


def numbers(line: str) -> list[float]:
    return [float(text) for text in re.findall(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?", line)]


def line_of(text: str, start: str) -> list[float]:
    """The numbers behind `start` in the line that begins with it."""
    return numbers(next(line for line in text.splitlines() if line.strip().startswith(start)).strip()[len(start) :])


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Estimates.

def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    chance = random.Random(0)
    for _ in range(1000):
        n = chance.randint(1, 9)
        c, k = chance.randint(0, n), chance.randint(1, n)
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert abs(pass_at_k(n, c, k) - sum(map(any, subsets)) / len(subsets)) < 1e-12, (n, c, k)


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_doctests():
    results = doctest.testmod(evaluation)
    assert results.failed == 0 and results.attempted >= 3


@pytest.mark.parametrize("samples, a, b", [(8, 0.5, 0.5), (8, 0.2, 1.8), (1, 9.0, 1.0)])
def test_the_interval_covers_the_truth_as_often_as_it_says(samples, a, b):
    """1,000 repeats of 100 problems whose solve rates are Beta(a, b): solved or not, mostly never, one sample each."""
    chance, covered = np.random.default_rng(0), 0
    for _ in range(1000):
        _, low, high = interval(chance.binomial(samples, chance.beta(a, b, 100)) / samples, 0.0, 1.0)
        covered += low <= a / (a + b) <= high
    assert 930 <= covered <= 970


def test_the_interval_stays_sane_where_few_problems_differ():
    mean, low, high = interval([0] * 499 + [1], 0.0, 1.0)
    assert mean == 0.002 and 0 <= low < 0.002 < high < 0.02
    mean, low, high = interval([0.0] * 100, 0.0, 1.0)
    assert (mean, low) == (0, 0) and math.isclose(high, 1 - 0.025**0.01)  # Clopper and Pearson
    assert interval([0.5] * 100, 0.0, 1.0)[1] < 0.5 < interval([0.5] * 100, 0.0, 1.0)[2]
    assert interval([3.0, 3.0]) == (3.0, 3.0, 3.0)  # lengths, say, of which nothing else is known


def test_the_paired_test_errs_as_often_as_it_says_and_finds_what_is_there():
    chance = np.random.default_rng(0)
    null = [sign_flip_p(chance.choice([-0.5, 0, 0, 0.5], 60), repeats=1000) for _ in range(400)]
    assert 0.02 <= np.mean(np.array(null) < 0.05) <= 0.08
    assert sign_flip_p(chance.normal(0.5, 1, 100)) < 0.001 and sign_flip_p(np.zeros(9)) == 1.0


def lengths(seed: int, longer: float, count: int = 500) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(seed)
    theirs = chance.lognormal(5, 0.5, count)
    return np.round(theirs * chance.lognormal(math.log(longer), 0.4, count)), np.round(theirs)


def test_length_control_takes_away_what_length_alone_has_won():
    for seed in range(10):
        ours, theirs = lengths(seed, longer=1.3)
        delta = ours - theirs
        probability = 1 / (1 + np.exp(-3 * delta / delta.std()))
        assert probability.mean() > 0.6 and abs(length_controlled(probability, delta) - 0.5) < 0.05
    # A judge that is a step at length 0 leaves it open how steep: right on the whole.
    found = []
    for seed in range(20):
        ours, theirs = lengths(seed, longer=1.3)
        won = (1 + np.sign(ours - theirs)) / 2
        found.append(float(length_controlled(won, ours - theirs)))
    assert won.mean() > 0.7 and abs(np.mean(found) - 0.5) < 0.05


def test_length_control_leaves_alone_what_length_has_not_won():
    chance, (ours, theirs) = np.random.default_rng(0), lengths(0, longer=1.3)
    won = (chance.random(500) < 0.7).astype(float)
    assert abs(length_controlled(won, ours - theirs) - won.mean()) < 0.02
    assert abs(length_controlled(won, np.zeros(500)) - won.mean()) < 1e-3
    both = np.stack([won, 1 - won])  # leading dimensions are fits of their own
    assert np.allclose(length_controlled(both, np.stack([ours - theirs] * 2)).sum(), 1)


def test_the_divergence_is_zero_for_data_that_looks_as_people_see_the_model_and_bounds_their_error():
    chance, policy = np.random.default_rng(0), np.full(20, 1e6)
    omega = np.diff(capacity(np.arange(21) / 20, 0.61))
    assert perceived_divergence(policy, 1e8 * omega, 0.61) < 1e-6
    for _ in range(200):
        q, v = chance.dirichlet(np.ones(20)), chance.uniform(-1, 1, 20)
        divergence = perceived_divergence(policy, 1e12 * q, 0.61)
        assert math.isclose(divergence, (omega * np.log(omega / q)).sum(), rel_tol=1e-4)
        assert abs(v @ (omega - q)) <= abs(v).max() * math.sqrt(2 * divergence) + 1e-6  # Proposition 3.4
    assert np.isfinite(perceived_divergence(policy, np.zeros(20), 0.61))


# accuracy.

def drawn_texts(model: str, rows: list[dict], samples: int, length: int) -> list[list[str]]:
    config = humanline.parse_config(["--model", model, "--max-new-tokens", str(length)])
    sampler = evaluation.load(model, config, scored=False)
    read = [humanline.read_row(fields, "", config) for fields in rows]
    groups, _ = evaluation.draw(sampler, evaluation.encode(sampler, read, offline=False), read, samples, 7)
    texts = [sampler.tokenizer.batch_decode(group.completions, skip_special_tokens=True) for group in groups]
    return [[text if text.strip() else "?" for text in own] for own in texts]


@pytest.fixture(scope="session")
def problems(tiny, tmp_path_factory):
    """Problems of two levels, whose answers are what the tiny model has once said."""
    rows = rows_of("prompts", 30)
    answers = drawn_texts(tiny, rows, 1, 1)
    rows = [dict(row, answer=answer, level=1 + i % 2) for i, (row, (answer,)) in enumerate(zip(rows, answers))]
    return write_jsonl(tmp_path_factory.mktemp("problems") / "problems.jsonl", rows)


def test_accuracy_is_what_its_samples_say(ask, tiny, problems, tmp_path):
    flags = f"--model {tiny} {tiny} --data {problems} --samples 4 --k 1 2 --max-new-tokens 1 --out samples.jsonl"
    said = ask(f"accuracy {flags}")
    lines = read_lines(tmp_path / "samples.jsonl")
    answers = [row["answer"] for row in read_lines(Path(problems))]
    assert len(lines) == 2 * 30 * (4 + 1)
    assert all(line["score"] == (line["completion"].strip() == answers[line["row"]].strip()) for line in lines)
    own = lines[: len(lines) // 2]
    sampled = [[line for line in own if line["row"] == row and line["kind"] == "sampled"] for row in range(30)]
    correct = [sum(line["score"] for line in part) for part in sampled]
    assert sum(correct) > 0
    shown = line_of(said, tiny)
    assert math.isclose(shown[0], np.mean(correct) / 4, abs_tol=6e-4)
    assert math.isclose(shown[3], np.mean([pass_at_k(4, int(c), 2) for c in correct]), abs_tol=6e-4)
    assert math.isclose(shown[6], np.mean([line["score"] for line in own if line["kind"] == "greedy"]), abs_tol=6e-4)
    assert math.isclose(shown[9], np.mean([line["tokens"] for part in sampled for line in part]), abs_tol=0.06)
    assert math.isclose(shown[12], np.mean([line["truncated"] for part in sampled for line in part]), abs_tol=6e-4)
    assert 0 < shown[12] <= 1
    assert "by level (problems)\n" in said and "1 (15)" in said
    assert f"more than {tiny}, by problem; comparisons: 1" in said


def test_greedy_answers_are_the_likeliest_and_do_not_depend_on_the_seed(ask, tiny, problems, tmp_path):
    for seed in (0, 1):
        ask(f"accuracy --model {tiny} --data {problems} --samples 2 --max-new-tokens 3 --seed {seed} "
            f"--out {seed}.jsonl")
    one, two = (read_lines(tmp_path / f"{seed}.jsonl") for seed in (0, 1))
    told = lambda lines, kind: [line["completion"] for line in lines if line["kind"] == kind]
    assert told(one, "greedy") == told(two, "greedy") and told(one, "sampled") != told(two, "sampled")
    policy, tokenizer = humanline.load_policy(humanline.Config(model=tiny), torch.device("cpu"))
    for line in [line for line in one if line["kind"] == "greedy"][:5]:
        ids = humanline.encode_prompts(tokenizer, [line["prompt"]])[0]
        for _ in range(line["tokens"]):
            ids.append(int(policy(torch.tensor([ids])).logits[0, -1].argmax()))
        assert tokenizer.decode(ids[-line["tokens"] :], skip_special_tokens=True) == line["completion"]


def test_a_runs_own_settings_are_used_and_flags_override_them(ask, run, problems, tmp_path):
    folder = run("--prompt-template <{prompt}> --system hi --max-new-tokens 3 --steps 2")
    prompt = lambda: read_lines(tmp_path / "samples.jsonl")[0]["prompt"]
    ask(f"accuracy --model {folder} --data {problems} --samples 1 --out samples.jsonl")
    assert [message["content"][0] for message in prompt()] == ["h", "<"]
    assert max(line["tokens"] for line in read_lines(tmp_path / "samples.jsonl")) == 3
    (tmp_path / "samples.jsonl").unlink()
    ask(f"accuracy --model {folder}/final --data {problems} --samples 1 --prompt-template [{{prompt}}] "
        "--out samples.jsonl")
    assert [message["content"][0] for message in prompt()] == ["h", "["]


def test_nothing_is_written_over_unless_it_is_named(ask, tiny, problems, tmp_path):
    for _ in range(2):
        ask(f"accuracy --model {tiny} --data {problems} --samples 1 --max-new-tokens 1 --no-greedy")
    assert sorted(path.name for path in (tmp_path / "evals").iterdir()) == ["accuracy-2.jsonl", "accuracy.jsonl"]


# winrate.

JUDGES = """
import os
import time

def longer(prompts, first, second, rows):
    return [(1 + (len(a) > len(b)) - (len(a) < len(b))) / 2 for a, b in zip(first, second)]

def lopsided(prompts, first, second, rows):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts) and "prompt" in rows[0]
    return [0.8] * len(first)

def wrong(prompts, first, second, rows):
    return [2.0] * len(first)

def hangs(prompts, first, second, rows):
    time.sleep(60)

def dies(prompts, first, second, rows):
    os._exit(3)
"""


@pytest.fixture
def judges(tmp_path):
    (tmp_path / "judges.py").write_text(JUDGES)
    return tmp_path / "judges.py"


def test_a_model_does_not_beat_itself(ask, tiny, problems, judges):
    covered = []
    for seed in range(8):  # each interval misses once in 20 times
        said = ask(f"winrate --model {tiny} --against {tiny} --data {problems} --judge {judges}:longer --samples 4 "
                   f"--seed {seed} --max-new-tokens 9")
        for name in ("win rate", "length-controlled"):
            _, low, high = line_of(said, name)[:3]
            covered.append(low <= 0.5 <= high and high - low < 0.4)
        assert "losses 0.0" not in said  # other draws, hence other lengths
    assert sum(covered) >= 14


def test_a_judge_is_asked_in_both_orders(ask, tiny, problems, judges):
    said = ask(f"winrate --model {tiny} --against {tiny} --data {problems} --judge {judges}:lopsided "
               "--max-new-tokens 3")
    assert line_of(said, "win rate")[0] == 0.5 and "wins 0.000, ties 1.000, losses 0.000" in said
    assert line_of(said, "favours what it reads first")[0] == 0.6


def test_the_higher_reward_wins_and_ties_count_half(ask, tiny, data_files, tmp_path):
    said = ask(f"winrate --model {tiny} --against data --data {data_files['groups']} --max-new-tokens 3 "
               "--out pairs.jsonl")
    pairs, rows = read_lines(tmp_path / "pairs.jsonl"), read_lines(Path(data_files["groups"]))
    for pair, row in zip(pairs, rows):
        assert pair["against"] == row["completions"][int(np.argmax(row["scores"]))]
        ours, theirs = (text.strip() == row["answer"] for text in (pair["output"], pair["against"]))
        assert pair["preference"] == 0.5 + (ours - theirs) / 2
    assert math.isclose(line_of(said, "win rate")[0], np.mean([pair["preference"] for pair in pairs]), abs_tol=6e-4)


def test_alpaca_evals_files_are_read_and_written_as_it_has_them(ask, tiny, judges, tmp_path):
    data = tmp_path / "alpaca_eval.json"
    rows = [dict(instruction=row["prompt"], output=row["answer"], generator="reference", dataset="helpful_base")
            for row in rows_of("prompts")]
    data.write_text(json.dumps(rows))
    ask(f"winrate --model {tiny} --data {data} --judge {judges}:longer --max-new-tokens 3 "
        "--prompt-template <{prompt}> --alpaca-eval out.json")
    ours, theirs = (json.loads((tmp_path / name).read_text()) for name in ("out.json", "out-against.json"))
    prompts = lambda outputs: [one["instruction"] for one in outputs]
    assert prompts(ours) == prompts(theirs) == prompts(rows)
    assert [one["output"] for one in theirs] == [row["output"] for row in rows] and theirs[0]["generator"] == "data"
    assert all(set(one) == {"instruction", "output", "generator", "dataset"} for one in ours)
    assert {(one["generator"], one["dataset"]) for one in ours} == {(tiny, "helpful_base")}


def test_both_sides_are_asked_as_the_run_among_them_is(run, tiny, problems, judges, tmp_path, monkeypatch):
    folder, asked = run("--system hello --max-new-tokens 3 --steps 1"), []
    encode = evaluation.encode
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation, "encode", lambda one, *more, **how: asked.append(one) or encode(one, *more, **how))
    for sides in ((folder, tiny), (tiny, folder)):
        flags = "--data {} --judge {}:longer --limit 3".format(problems, judges)
        assert evaluation.main(f"winrate --model {sides[0]} --against {sides[1]} {flags}".split()) == 0
    assert [(one.config.system, one.config.max_new_tokens) for one in asked] == [("hello", 3)] * 4


def test_each_side_is_asked_in_its_own_template(run, problems, judges, tmp_path, monkeypatch):
    folders, asked = [run(f"--prompt-template {word}{{prompt}} --max-new-tokens 3 --steps 1") for word in "QR"], []
    encode = evaluation.encode
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation, "encode",
                        lambda one, rows, offline: asked.append(rows[0].prompt) or encode(one, rows, offline))
    command = "winrate --model {} --against {} --data {} --judge {}:longer --limit 3"
    assert evaluation.main(command.format(*folders, problems, judges).split()) == 0
    assert [prompt[0]["content"][0] for prompt in asked] == ["Q", "R"]


def test_the_model_beside_a_run_is_loaded_as_the_run_is(ask, run, tiny, data_files, monkeypatch):
    folder, load, found = run("--system hello --dtype float32 --steps 1"), evaluation.load, []
    monkeypatch.setattr(evaluation, "load", lambda name, config, **how: (
        found.append((config.system, config.dtype)) or load(name, config, **how)))
    ask(f"data --model {tiny} --policy {folder} --data {data_files['groups']} --limit 4")
    ask(f"perception --model {folder} --data {data_files['groups']} --limit 4 --samples 2 --max-new-tokens 3")
    assert found == [("hello", "float32")] * 4


def test_a_run_that_sent_its_metrics_elsewhere_is_measured_without_that_package(run, monkeypatch):
    folder = run("--steps 1")
    with open(folder / "config.toml", "a") as file:
        file.write('\ntrack = "wandb"\n')
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name != "wandb" and find(name, *more))
    config = evaluation.settings_of(str(folder), evaluation.Accuracy(model=(str(folder),)))
    assert config.track is None and config.model == str(folder / "final")


def test_a_flag_outranks_the_run_though_it_is_the_default(run):
    folder = run("--temperature 0.7 --top-p 0.9 --seed 42 --reward math --steps 1")
    flags = dict(model=(str(folder),))
    config = evaluation.settings_of(str(folder), evaluation.Accuracy(**flags))
    assert (config.temperature, config.top_p, config.seed, config.reward) == (1, 1, 0, ("math",))
    config = evaluation.settings_of(str(folder), evaluation.Accuracy(**flags, temperature=0.5, reward=("exact",)))
    assert (config.temperature, config.reward) == (0.5, ("exact",))


def test_a_run_of_many_ranks_is_measured_by_one_process(ask, run, problems):
    folder = run("--steps 1")
    with open(folder / "config.toml", "a") as file:
        file.write("\nshard = true\n")
    assert "pass@1" in ask(f"accuracy --model {folder} --data {problems} --limit 2 --samples 2 --max-new-tokens 3")


def test_greedy_completions_are_drawn_in_the_precision_of_the_others(ask, tiny, problems, monkeypatch):
    draw, found = evaluation.draw, []
    monkeypatch.setattr(evaluation, "draw", lambda one, *more: found.append(one.config.dtype) or draw(one, *more))
    ask(f"accuracy --model {tiny} --data {problems} --limit 2 --samples 2 --max-new-tokens 3")
    assert found == ["float32"] * 2  # what auto stands for here


def test_rows_are_measured_once_however_often_they_are_trained_on(ask, tiny, problems):
    said = ask(f"accuracy --model {tiny} --data {problems}=2 --limit 3 --samples 2 --max-new-tokens 3")
    assert "3 problems" in said and len(read_lines(Path("evals/accuracy.jsonl"))) == 3 * (2 + 1)


def test_a_reward_that_always_fails_makes_no_tie(tiny, problems, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text("def score(prompts, completions, rows):\n    raise ValueError('no')\n")
    flags = f"--data {problems} --reward wrong.py:score --limit 2 --samples 2 --max-new-tokens 3"
    assert evaluation.main(f"winrate --model {tiny} --against {tiny} {flags}".split()) == 2
    assert "error: --reward wrong.py:score failed on every sample: " in capsys.readouterr().err


def test_an_alpaca_row_is_a_prompt_with_a_desirable_completion():
    read = lambda **fields: humanline.read_row(fields, "row 1", humanline.Config())
    row = read(instruction="Add 1 and 2.", output="3")
    assert row.prompt[0]["content"] == "Add 1 and 2."
    assert (row.completions, row.rewards, row.labelled) == (["3"], [1.0], True)
    assert read(instruction="Add.", output="3", label=False).rewards == [0.0]


# data.

@pytest.fixture(scope="session")
def two_sources(tiny, tmp_path_factory):
    """Scored groups that the tiny model has drawn itself, and that it would never draw."""
    folder, chance, rows = tmp_path_factory.mktemp("sources"), random.Random(0), rows_of("prompts", 40)
    other = [["".join(chance.choice("uvwxyzUVWXYZ") for _ in range(4)) for _ in range(4)] for _ in rows]
    scored = lambda texts: [dict(row, completions=own, scores=[1, 0, 0, i % 2])
                            for i, (row, own) in enumerate(zip(rows, texts))]
    return {name: write_jsonl(folder / f"{name}.jsonl", scored(texts))
            for name, texts in (("own", drawn_texts(tiny, rows, 4, 6)), ("other", other))}


def test_data_ranks_what_the_model_finds_likely_first_and_says_so(ask, tiny, two_sources, tmp_path):
    said = ask(f"data --model {tiny} --data {two_sources['other']} {two_sources['own']} --max-new-tokens 6 "
               "--out data.svg")
    own, own_low, own_high, other = line_of(said, "mean log-prob, nats/token")[:4]
    assert own > other + 1 and own_low < own < own_high
    gap, low, high = line_of(said, f"{two_sources['other']}:")[:3]
    assert math.isclose(gap, other - own, abs_tol=2e-3) and low < gap < high < 0
    assert line_of(said, "less likely than 3/4 of those")[3] > 0.9
    assert f"{two_sources['other']}: not good enough" in said
    assert "mean token log-prob" in (tmp_path / "data.svg").read_text()


@pytest.mark.parametrize("nats, scores, advice", [
    (-0.1, [1, 0], "good enough"), (-0.3, [1, 0], "doubtful"), (-1.0, [1, 0], "not good enough"),
    (-0.1, [1, 1], "little to learn")])
def test_advice_follows_from_the_models_own_samples(nats, scores, advice):
    own = [[np.full(4, value)] for value in np.linspace(-0.4, 0, 100)]
    groups = [humanline.Group(i, [1], [[2], [3]], scores) for i in range(100)]
    spread = np.linspace(-0.1, 0.1, 100)
    source = evaluation.Source("it", groups, [[np.full(3, nats + one), np.full(2, nats - one)] for one in spread], own)
    assert source.advice().startswith(advice) and source.advice().endswith(".")
    assert source.estimate[0] == pytest.approx(nats)


def test_data_counts_what_is_wrong_with_it(ask, tiny, tmp_path):
    rows = [dict(prompt=f"p{i}", completions=["aa", "aa", "bbb"], scores=[1, 1, 1 if i < 15 else 0]) for i in range(20)]
    rows[0]["completions"][2] *= 30
    data = write_jsonl(tmp_path / "odd.jsonl", rows)
    said = ask(f"data --model {tiny} --data {data} --own 0 --max-new-tokens 4")
    assert line_of(said, "completions") == [59] and line_of(said, "duplicates")[0] == 20
    assert line_of(said, "over-long, not trained on") == [1]
    assert line_of(said, "no difference")[0] == 0.75 and line_of(said, "best minus worst score")[0] == 0.25
    assert "own samples" not in said


def test_data_says_how_far_the_log_ratio_goes(ask, tiny, run, data_files):
    folder = run("--loss dpo --lr 3e-2 --steps 8", data="pairs")
    said = ask(f"data --model {tiny} --policy {folder} --data {data_files['pairs']} --own 0")
    before, after = (evaluation.load(name, humanline.parse_config(["--model", name]), scored=False)
                     for name in (tiny, f"{folder}/final"))
    rows = humanline.read_rows(data_files["pairs"], humanline.Config(), "--data")
    groups = evaluation.encode(before, rows, offline=True)
    logps = [[np.concatenate(group) for group in evaluation.token_logps(model, groups)] for model in (before, after)]
    d = [b - a for a, b in zip(*logps)]
    lowest, highest = min(map(np.min, d)), max(map(np.max, d))
    ratios = [np.exp(highest), np.exp(-lowest)]
    assert line_of(said, "largest ratio, and its inverse") == pytest.approx(ratios, rel=1e-2)
    below, above = np.mean([(one < -1.5).mean() for one in d]), np.mean([(one > 1.5).mean() for one in d])
    assert below > 0 and math.isclose(line_of(said, "tokens with d below -1.5")[0], below, abs_tol=6e-4)
    assert above > 0 and math.isclose(line_of(said, "tokens with d above 1.5")[0], above, abs_tol=6e-4)


# perception.

def test_what_perception_lets_through_is_what_training_lets_through():
    chance, config = np.random.default_rng(0), humanline.Config(batch_size=4)
    d = [[chance.normal(0, 1.5, chance.integers(1, 6)) for _ in range(3)] for _ in range(10)]
    found = evaluation.let_through(d, config)
    for group, clipped in zip(d, found["after clipping"]):
        for one, share in zip(group, clipped):
            through = humanline.perceive(torch.tensor(one)[None], [], dataclasses.replace(config, perception="clip"))[1]
            assert share == through.double().mean()
    # Sampling: with Betas that concentrate on their means, it rejects what lies beyond a batch's
    # [M_P m_P, 1 / (M_R m_R)].
    sharp = dataclasses.replace(config, gamma_p=3e5, beta_p=7e5, gamma_r=1e5, beta_r=9e5)
    for start in range(0, 10, 4):
        flat = np.concatenate([one for group in d[start : start + 4] for one in group])
        low, high = flat.max() + math.log(0.3), -((-flat).max() + math.log(0.1))
        shares = np.concatenate(evaluation.let_through(d, sharp)["after sampling"][start : start + 4])
        expected = [((one > low) & (one < high)).mean() for group in d[start : start + 4] for one in group]
        assert np.mean(np.abs(shares - expected) > 1e-9) < 0.1  # but for outcomes right at an end


def test_perception_finds_the_policys_own_samples_closer_than_other_data(ask, run, two_sources, tmp_path):
    folder = run("--loss dpo --lr 2e-2 --steps 10 --batch-size 8", data="pairs")
    said = ask(f"perception --model {folder} --data {two_sources['other']} --max-new-tokens 6 --out figure.png")
    own, data = line_of(said, "the policy's own samples"), line_of(said, "the data")
    assert own[0] < data[1] and own[3] < data[4]  # KL for both γ; the data's first number is the share let through
    assert data[0] == 100.0 and line_of(said, "after clipping")[0] < 100.0
    assert all(low <= kl <= high for kl, low, high in (own[:3], own[3:], data[1:4], data[4:]))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


# plot.

def test_plot_puts_seeds_into_one_line_and_keeps_settings_apart(ask, run, tmp_path):
    flags = "--steps 4 --eval-data {0} --eval-every 2 --eval-prompts 4 --sample-every 2"
    data = write_jsonl(tmp_path / "problems.jsonl", rows_of("prompts"))
    different = ("--seed 0", "--seed 1", "--seed 0 --no-humanline")
    runs = [run(f"{flags.format(data)} {more}") for more in different]
    for against, word in (("steps", "optimizer steps"), ("seconds", "wall-clock time, seconds")):
        ask(f"plot ours={runs[0]} ours={runs[1]} plain={runs[2]} --against {against} --out {against}.svg")
        picture = (tmp_path / f"{against}.svg").read_text()
        assert "ours (2 seeds)" in picture and "plain<" in picture and word in picture
        assert all(title.split(",")[0] in picture for title in evaluation.PANELS.values())
    ask(f"plot {' '.join(map(str, runs))} --metrics accuracy --out few.svg")
    picture = (tmp_path / "few.svg").read_text()
    assert "pass@1" in picture and "gradient norm" not in picture and "run (2 seeds)" in picture and "run3" in picture


def test_plot_leaves_out_no_run_whose_folder_has_the_name_of_another(ask, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(evaluation, "picture_curves", lambda groups, *more: found.append(list(groups)))
    folders = [written_run(tmp_path / name / "run", [dict(step=1, loss=1)]) for name in "abc"]
    for lr, folder in enumerate(folders, 1):
        (folder / "config.toml").write_text(f"lr = {lr}e-5\n")
    ask(f"plot {' '.join(map(str, folders))}")
    assert found == [["run", f"run, {folders[1]}", f"run, {folders[2]}"]]


@pytest.fixture
def curves(monkeypatch):
    """curves[title] -> [(x, y) of each line] of the last figure."""
    from matplotlib.figure import Figure

    drawn, savefig = {}, Figure.savefig

    def keep(figure, *args, **options):
        drawn.clear()
        for axes in figure.axes:
            drawn[axes.get_title(loc="left")] = [tuple(map(list, line.get_data())) for line in axes.lines]
            drawn["x"] = axes.get_xlabel()
        savefig(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return drawn


def written_run(folder: Path, lines: list[dict], more: bytes = b"") -> Path:
    """The folder of a run with these metrics and no more."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    (folder / "metrics.jsonl").write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + more)
    return folder


def test_any_column_is_drawn_and_against_any_other(ask, curves, tmp_path):
    lines = [dict(step=i, kl=i * i, reward=10 - i, novel=3 * i, kind="text") for i in (1, 2, 3)]
    folder = written_run(tmp_path / "run", lines)
    ask(f"plot {folder} --metrics novel kl")
    assert curves["novel"] == [([1, 2, 3], [3, 6, 9])] and curves["x"] == "optimizer steps" and "reward" not in curves
    said = ask(f"plot {folder} --metrics reward novel --against kl")
    assert curves[evaluation.PANELS["reward"]] == [([1, 4, 9], [9, 8, 7])]
    assert curves["novel"] == [([1, 4, 9], [3, 6, 9])] and curves["x"] == evaluation.PANELS["kl"] and "bands" not in said


def test_of_damaged_metrics_the_good_lines_are_drawn_with_one_warning(ask, curves, tmp_path, capsys):
    lines = [dict(step=i, loss=i / 2) for i in (1, 2)] + [dict(step=3, step_seconds="long"), dict(step=4, loss=None)]
    damage = b'\xff\xfe\n7\n[]\n{"loss": 3}\n{"step": "x"}\n{"step": 5, "loss": 9'
    folder = written_run(tmp_path / "run", lines, damage)
    assert evaluation.main(["plot", str(folder), "--metrics", "loss"]) == 0
    said = capsys.readouterr()
    assert curves["loss"] == [([1, 2], [0.5, 1])]
    assert said.err == f"humanline.py: warning: {folder}/metrics.jsonl: 6 damaged lines are left out\n"


def test_time_and_tokens_add_up(run):
    folder = run("--steps 4 --sample-every 2")
    lines = evaluation.read_metrics(folder)
    total = sum(line["step_seconds"] for line in metrics(folder))
    assert math.isclose(lines[4]["seconds"], total) and math.isclose(lines[4]["time"] + lines[4]["sampling"], total)
    assert math.isclose(lines[4]["speed"], sum(line["tokens"] for line in metrics(folder)) / total)


def test_smoothing_is_a_running_median():
    values = np.random.default_rng(0).normal(size=(2, 30))
    found = evaluation.smooth(values, 5)
    assert np.allclose(found[:, 2:-2], [[np.median(own[i : i + 5]) for i in range(26)] for own in values])
    assert found.shape == values.shape
    assert (evaluation.smooth(values, 1) == values).all()


# What is wrong is said in one line, with exit status 2, before anything is written.

@pytest.fixture
def other_vocabulary(tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "other-vocabulary"
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    saved = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    return folder


@pytest.mark.parametrize("command, complaint", [
    ("accuracy --model runs/none", "--model runs/none: no such run or model"),
    ("accuracy --model died", "--model died: the run did not finish"),
    ("accuracy --model nothing", "--model nothing: neither a run's folder"),
    ("accuracy --model TINY", "--data: name the rows to measure on"),
    ("accuracy --model TINY --data empty.jsonl", "--data empty.jsonl: no rows"),
    ("accuracy --model TINY --data none.jsonl", "--data none.jsonl: no such file"),
    ("accuracy --model TINY --data noanswer.jsonl", "--data noanswer.jsonl row 1: no 'answer'"),
    ("accuracy --model TINY --data prompts.jsonl --samples 4 --k 1 5",
     "--k 1 5 --samples 4: pass@k needs 1 <= k <= samples"),
    ("accuracy --model TINY --data prompts.jsonl --out samples.txt", "--out samples.txt: it must end in .jsonl"),
    ("accuracy --model TINY --data prompts.jsonl --temperature 0", "--temperature is 0.0; it must lie from 0.001 to 1000"),
    ("winrate --model TINY --data prompts.jsonl", "--against data: prompts.jsonl has rows without completions"),
    ("winrate --model TINY --data prompts.jsonl --against runs/none", "--against runs/none: no such run or model"),
    ("winrate --model TINY --data prompts.jsonl --against TINY --judge none.py:f", "--judge none.py:f: no such file"),
    ("winrate --model TINY --data prompts.jsonl --against TINY --judge judges.py:none", "--judge judges.py:none: "),
    ("winrate --model TINY --data prompts.jsonl --against TINY --judge judges.py:wrong --limit 3 --max-new-tokens 3",
     "it must return 3 probabilities"),
    ("winrate --model TINY --data prompts.jsonl --against TINY --judge judges.py:dies --limit 3 --max-new-tokens 3",
     "--judge judges.py:dies: its process ended with status 3"),
    ("winrate --model TINY --data prompts.jsonl --against TINY --judge judges.py:hangs --limit 4 --max-new-tokens 3 "
     "--reward-seconds 0.2", "took longer than 0.4 s; give it more time with --reward-seconds"),
    ("winrate --model TINY --data prompts.jsonl --samples 0", "--samples is 0; it must lie from 1 to 1,000,000"),
    ("data --model TINY --data prompts.jsonl", "--data prompts.jsonl: prompts without completions"),
    ("data --model TINY --data empty.jsonl", "--data empty.jsonl: no rows"),
    ("data --model TINY --data groups.jsonl --policy OTHER", "its vocabulary is not that of"),
    ("perception --model TINY --data groups.jsonl", "--ref and --data: name the model that"),
    ("perception --model TINY --ref OTHER --data groups.jsonl", "its vocabulary is not that of"),
    ("perception --model TINY --ref TINY --data groups.jsonl --max-new-tokens 2", "so that every outcome is 0"),
    ("plot", "plot: name the folders of runs"),
    ("plot runs/none", "plot runs/none: no such run"),
    ("plot young", "plot young: its metrics.jsonl has no step yet"),
    ("plot old --metrics los", "--metrics los: no run has measured that; did you mean 'loss'?"),
    ("plot old --against klx", "--against klx: no run has measured that; did you mean 'kl'?"),
    ("plot old --metrics", "--metrics has no value"),
    ("plot --out curves.pdf", "--out curves.pdf: it must end in .png or .svg"),
    ("nothing", "accuracy, show, chat, winrate, data, perception, plot"),
    ("accuracy --nothing 1", "--nothing"),
    ("accuracy --model --limit 2", "--model has no value; give it one or more, or leave it out"),
    ("accuracy --model TINY --data prompts.jsonl --k", "--k has no value"),
    ("show --model TINY", "--data: name the rows to measure on"),
    ("show --model TINY --data prompts.jsonl --prompts 0", "--prompts is 0; it must lie from 1 to 1,000,000"),
    ("chat --model", "--model has no value"),
    ("chat --model runs/none", "--model runs/none: no such run or model"),
    ("data --model TINY --data", "--data has no value"),
    ("data --model TINY --data groups.jsonl --own -1", "--own is -1; it must lie from 0 to 1,000,000"),
    ("reproduce --only", "--only has no value"),
    ("reproduce --results results.jsonl", "--results: it holds the runs of `stale`, `long` or `column`; write"),
    ("reproduce --only stale --results results.md", "--results results.md: it must end in .jsonl"),
    ("reproduce --only stale --results prompts.jsonl", "--results prompts.jsonl: 'flags'"),
    ("reproduce --seeds 0", "--seeds is 0; it must lie from 1 to 1,000,000"),
    ("reproduce --jobs -1", "--jobs is -1; it must lie from 1 to 1,000,000"),
    ("reproduce --losses grpo", "--losses: only --real asks for it"),
    ("reproduce --real TINY --only gap", "--only names experiments on the embedded model"),
    ("reproduce --real runs/none", "--real runs/none: no such run or model"),
    ("reproduce --real TINY --results results.md", "--results results.md: it must end in .jsonl"),
    ("reproduce --real TINY --losses ppo", "invalid choice"),
])
def test_bad_input_is_one_line_and_exit_status_2(command, complaint, tiny, other_vocabulary, judges, tmp_path,
                                                 monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation, "train_all", lambda *_: pytest.fail("it trains, for an hour and more"))
    for folder in ("runs", "nothing", "died/checkpoint", "young", "old"):
        Path(folder).mkdir(parents=True)
    for run in ("died", "young", "old"):
        Path(run, "config.toml").write_text("")
    Path("young/metrics.jsonl").write_text("")
    Path("old/metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "kl": 0.1, "kind": "text"}\n')
    Path("empty.jsonl").write_text("")
    write_jsonl(Path("prompts.jsonl"), rows_of("prompts"))
    write_jsonl(Path("groups.jsonl"), rows_of("groups"))
    write_jsonl(Path("noanswer.jsonl"), [dict(prompt="p")])
    status = evaluation.main(command.replace("TINY", tiny).replace("OTHER", str(other_vocabulary)).split())
    said = capsys.readouterr()
    assert (status, said.out) == (2, "") and not Path("evals").exists()
    assert re.fullmatch(r"eval\.py: error: [^\n]+\n", said.err) and complaint in said.err, said.err


@pytest.mark.parametrize("command", ["accuracy", "show", "winrate --against TINY", "data", "perception --ref TINY"])
@pytest.mark.parametrize("rows, complaint", [
    ("latin-1.jsonl", "row 2: not JSON"), ("folder.jsonl", "Is a directory"), ("nested.jsonl", "row 1: not JSON")])
def test_rows_that_cannot_be_read_are_one_line(command, rows, complaint, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("folder.jsonl").mkdir()
    Path("latin-1.jsonl").write_text('{"prompt": "a"}\n{"prompt": "é"}\n', encoding="latin-1")
    Path("nested.jsonl").write_text("[" * 100_000)
    status = evaluation.main(f"{command} --model TINY --data {rows}".replace("TINY", tiny).split())
    said = capsys.readouterr()
    assert (status, said.out) == (2, "") and not Path("evals").exists()
    assert re.fullmatch(rf"eval\.py: error: --data {rows}[^\n]+\n", said.err) and complaint in said.err, said.err


def test_the_command_line_works_as_typed(tmp_path):
    line = [sys.executable, str(ROOT / "eval.py"), "plot", "none"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    said = "eval.py: error: plot none: no such run; the folder of a run holds metrics.jsonl\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


# --track, in humanline.py.

def test_a_tracker_that_is_not_installed_is_one_line_before_training(run, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(humanline.UserError, match="--track wandb: that package is not installed; pip install wandb"):
        run("--track wandb", out=str(tmp_path / "tracked"))
    assert not (tmp_path / "tracked").exists()


def test_a_tracker_gets_every_line_of_the_metrics(run, tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(
        "lines = []\ndef init(**settings):\n    import wandb\n    wandb.settings = settings\n    return wandb\n"
        "def log(line, step):\n    lines.append((step, dict(line)))\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    folder = run("--track wandb --steps 3")
    import wandb

    assert wandb.lines == [(line["step"], line) for line in metrics(folder)] and wandb.settings["config"]["steps"] == 3
    monkeypatch.delitem(sys.modules, "wandb")


# reproduce.


class Pretend(dict):
    """Runs whose outcomes are known: pass@1 by the flags, a little more with each seed."""

    def get(self, flags, default=None):
        level = 0.9 if "--sample-every 1 " in flags else 0.6 if "--no-humanline" in flags else 0.8
        after = level + 0.01 * int(flags.split()[-1])
        steps = {f"{what} {step}": after for what in ("step", "exact", "greedy") for step in range(32, 257, 32)}
        base = {"exact 0": 0.6, "greedy 0": 0.5}
        return dict(flags=flags, before=0.4, after=after, drawing=2.0, training=10.0) | base | steps


def pretended(known, quick=False):
    runs = evaluation.Runs([1, 2, 3], known)
    quartiles = [(f"quartile-{i}.jsonl", float(-i), [0.2, 0.3, 0.5]) for i in (4, 3, 2, 1)]
    runs.quick, runs.quartiles = quick, [quartiles] * 3
    return runs


def test_the_gap_is_compared_seed_by_seed():
    said = "\n".join(evaluation.gap(pretended(Pretend())))
    row = next(line for line in said.splitlines() if "GRPO | a worse" in line)
    assert all(text in row for text in ("0.620 ± 0.025", "0.820", "0.920", "+0.200 ± 0.000", "67% [67%, 67%]"))
    assert "**does not hold**: GRPO, a worse model's data: humanline closes 67%" in said  # 80 % are asked


@pytest.mark.parametrize("name", [*evaluation.EXPERIMENTS, "tuning"])
def test_every_experiment_asks_for_its_runs_before_it_knows_them_and_for_flags_that_parse(name):
    experiment = getattr(evaluation, name)
    runs = pretended({})
    experiment(runs)
    wanted = list(runs.wanted)
    assert wanted and all(flags.count("--lr ") == (name != "stale") for flags in wanted)
    assert all(flags.count("--loss ") == 1 for flags in wanted)
    for flags in wanted:
        config = humanline.parse_config(flags.split())
        assert config.seed in (1, 2, 3)
        part = config.model.partition(":")[2]
        assert config.eval_data == (f"embedded:{part}-test" if part else "embedded:test")
        assert config.max_new_tokens == humanline.RECIPES[part or "base"].max_new_tokens
    known = Pretend(dict.fromkeys(wanted, 0))
    assert all(isinstance(line, str) and "nan" not in line for line in experiment(pretended(known)))


class Stale(dict):
    """Runs of `stale` or `long` with known outcomes: `ends` has pass@1 by what the flags hold, the first that fits."""

    def __init__(self, **ends):
        self.ends = {"--sample-every 1 ": 0.95, "1000 --stale taper": 0.9, "--no-humanline --stale taper": 0.94,
                     "--perception none": 0.93, "--stale taper --prior 1": 0.94, "--stale taper": 0.8, "--prior 1": 0.4,
                     "--no-humanline": 0.8, "": 0.3} | ends.pop("ends", {})
        self.bases = dict.fromkeys(range(1, 6), 0.7) | ends.pop("bases", {})

    def get(self, flags, default=None):
        seed = int(flags.split()[-1])
        after = next(value for text, value in self.ends.items() if text in flags) + 0.001 * seed
        run = {"flags": flags, "before": 0.6, "after": after, "drawing": 2.0, "training": 10.0 + ("every 1 " in flags)}
        last = 128 if "embedded:long" in flags else 256
        for step in range(0, last + 1, 32):
            value = self.bases[seed] + (after - self.bases[seed]) * step / last
            run |= {f"exact {step}": value, f"greedy {step}": value} | ({f"step {step}": value} if step else {})
        return run


def test_a_form_that_collapses_and_one_that_does_not_are_told_apart():
    lines = evaluation.stale(pretended(Stale()))
    said = "\n".join(lines)
    cells_of = lambda start: next(line for line in said.splitlines() if line.startswith(f"| {start} |"))
    assert "GRPO, 3 seeds" in said and "DPO, 3 seeds" in said and "KTO, 3 seeds" in said
    assert cells_of("the base").startswith("| the base | 0.700 ± 0.000 | 0.700 ± 0.000 |")
    paper, both = cells_of("offline + humanline"), cells_of("offline + humanline, taper, prior")
    assert "0.302 ± 0.002" in paper and "-0.500 ± 0.000" in paper and "| 0.301 | 3 of 3 |" in paper
    assert "+0.140 ± 0.000" in both and "93% [93%, 93%]" in both and "| 0.941 | 0 of 3 | 10, 2 |" in both
    verdicts = [line for line in lines if line.startswith("- **")]
    assert len(verdicts) == 12  # the paper's form, for GRPO with two k; the other, against none or a part; every 64 steps
    assert sum("**does not hold**: " in line and "as in the paper" in line for line in verdicts) == 4
    assert sum("**holds**: " in line and "with taper and prior" in line for line in verdicts) == 3
    assert ("**does not hold**: GRPO, taper and prior do as well without humanline and GRPO's ratio clip: "
            "-0.040 ± 0.000, paired") in said
    assert "**does not hold**: GRPO, taper and prior do as well without humanline's clip: -0.010 ± 0.000" in said
    assert "**holds**: DPO, taper and prior do as well without humanline: +0.000 ± 0.000, paired" in said
    assert "**does not hold**: GRPO, every 64 steps, humanline, taper, prior" in said  # -0.010 ± 0.000
    assert "takes 1.10 ± 0.00 times as long" in said


def test_the_longer_task_is_judged_alike_and_also_when_drawn_every_few_steps():
    ends = {"--sample-every 1 ": 0.95, "--sample-every 16 --sync-k 8 --stale taper": 0.96,
            "--stale taper --prior 1": 0.9, "--no-humanline": 0.8}
    known = Stale()
    known.ends = ends | known.ends | ends  # asked first, and with these values
    said = "\n".join(evaluation.long(pretended(known)))
    assert "GRPO, 3 seeds" in said and "DPO, 3 seeds" in said and "KTO, 3 seeds" in said
    assert "**does not hold**: GRPO, with taper and prior" in said  # 0.902 - 0.802 of 0.952 - 0.802: 67 %
    assert "**holds**: GRPO, every 16 steps, humanline, taper, prior" in said
    assert "**does not hold**: GRPO, every 64 steps, humanline, taper, prior" in said  # -0.050 ± 0.000
    wanted = [flags for seed in (1,) for loss in evaluation.LOSSES
              for flags in evaluation.stale_variants(loss, evaluation.LONG).values()]
    assert len(wanted) == len({*wanted}) and all("--data embedded:long " in flags for flags in wanted)


@pytest.mark.parametrize("ends, verdict", [
    ({"--stale taper --prior 1": 0.89}, "does not hold"),  # 60 % of the gap
    ({"--stale taper --prior 1": 0.5}, "does not hold"), ({"--stale taper --prior 1": 0.96}, "holds")])
def test_the_other_form_must_close_most_of_the_gap(ends, verdict):
    lines = evaluation.stale(pretended(Stale(ends=ends)))
    assert sum(f"**{verdict}**" in line and "with taper and prior" in line for line in lines) == 3


def test_one_run_that_collapses_is_enough_to_refuse_a_form():
    class Unlucky(Stale):
        def get(self, flags, default=None):
            run = super().get(flags)
            fell = "taper --prior 1" in flags and "--seed 2" in flags and "--loss grpo" in flags
            return run | ({"exact 0": 1.1} if fell else {})

    lines = evaluation.stale(pretended(Unlucky()))
    verdict = {line[:30].split(":")[0] for line in lines if "GRPO, with taper and prior" in line}
    assert verdict == {"- **does not hold**"} and any("1 of 3 runs collapsed" in line for line in lines)


def test_seeds_that_are_not_finished_or_never_learned_are_said_and_left_out():
    class Some(Stale):
        def get(self, flags, default=None):
            missing = "--loss kto" in flags or "--loss dpo" in flags and "--seed 3" in flags and "--prior 1" in flags
            return {} if missing else super().get(flags)

    said = "\n".join(evaluation.stale(pretended(Some(bases={1: 0.3}))))
    assert "GRPO, 2 seeds" in said and "| DPO, 1 seed |" in said and "KTO: no seed is finished." in said
    assert "Seed 1 is left out: its base never learned addition (pass@1 0.300). There: offline 0.801" in said
    assert "Left out are the seeds of which not all 7 runs are there: 3 (4).\n" in said
    assert "nan" not in said and "**not decided**: DPO, with taper and prior" in said  # one seed
    assert "**not decided**: DPO, taper and prior do as well without humanline: +0.000, paired" in said


def test_the_runs_come_seed_by_seed_grpo_first():
    runs = pretended({})
    evaluation.stale(runs)
    seed = lambda flags: int(flags.split()[-1])
    wanted = sorted(runs.wanted, key=seed)  # as `train_all` sorts
    assert [flags.split()[1] for flags in wanted] == (["grpo"] * 14 + ["dpo"] * 7 + ["kto"] * 7) * 3


def test_offline_runs_without_grpos_clip_differ_from_plain_ones_in_that_alone():
    plain, unclipped = (humanline.parse_config(evaluation.stale_variants("grpo")[name].split())
                        for name in ("offline", evaluation.UNCLIPPED))
    differ = {name for name, value in vars(plain).items() if value != getattr(unclipped, name)} - {"untyped"}
    assert differ == {"epsilon", "epsilon_high"} and unclipped.epsilon == unclipped.epsilon_high == 1000
    assert evaluation.UNCLIPPED not in evaluation.stale_variants("dpo")
    for loss, than in (("grpo", evaluation.UNCLIPPED), ("dpo", "offline")):  # taper and prior, and nothing of humanline
        plain, bare = (humanline.parse_config(evaluation.stale_variants(loss)[name].split())
                       for name in (than, evaluation.BARE))
        differ = {name for name, value in vars(plain).items() if value != getattr(bare, name)} - {"untyped"}
        assert differ == {"stale", "prior"} and not humanline.is_synced(bare) and bare.perception == "none"
    whole, sync_alone = (humanline.parse_config(evaluation.stale_variants("grpo")[name].split())
                         for name in (evaluation.BOTH, evaluation.SYNCED_ALONE))
    assert {name for name, value in vars(whole).items() if value != getattr(sync_alone, name)} == {"perception", "untyped"}
    real = evaluation.real_variants("grpo")
    whole = real[evaluation.BOTH][0]
    assert real[evaluation.SYNCED_ALONE] == (whole.replace("--stale", "--perception none --stale"), evaluation.PAPERS)
    assert real[evaluation.UNCLIPPED] == (f"{real['offline'][0]} --epsilon 1000 --epsilon-high 1000", "offline")


@pytest.mark.parametrize("task", [*evaluation.MADE_OF_SUMS.values()])
def test_the_curves_of_stale_are_drawn(tmp_path, task):
    evaluation.picture_stale(pretended(Stale()), tmp_path / "stale.png", task)
    assert (tmp_path / "stale.png").stat().st_size > 10_000


@pytest.mark.parametrize("task", ["long", "column"])
def test_results_of_the_longer_tasks_are_kept_likewise(ask, tmp_path, monkeypatch, task):
    runs, known = pretended({}), Stale()
    evaluation.EXPERIMENTS[task](runs)
    evaluation.write_results(tmp_path / "long.jsonl", {flags: known.get(flags) for flags in runs.wanted})
    monkeypatch.setattr(evaluation, "train_all", lambda *_: pytest.fail("trained again"))
    said = ask(f"reproduce --only {task} --seeds 3 --results long.jsonl --no-train")
    assert "GRPO, 3 seeds" in said and (tmp_path / "evals" / "reproduce.png").exists()


def test_results_are_read_back_and_drawn_again_without_training(ask, tmp_path, monkeypatch):
    runs, known = pretended({}), Stale()
    evaluation.stale(runs)
    found = {flags: known.get(flags) | dict(metrics={"kl": [0.1]}) for flags in runs.wanted}
    path = tmp_path / "stale.jsonl"
    evaluation.write_results(path, found)
    assert {line["seed"] for line in read_lines(path)} == {1, 2, 3} and "metrics" not in read_lines(path)[0]
    assert read_lines(path)[0]["lowest"] == pytest.approx(0.7)
    monkeypatch.setattr(evaluation, "train_all", lambda *_: pytest.fail("trained again"))
    before = path.read_bytes()
    said = ask("reproduce --only stale --seeds 3 --results stale.jsonl")
    assert "84 runs, seeds 1 to 3" in said and "GRPO, 3 seeds" in said and path.read_bytes() == before
    assert (tmp_path / "evals" / "reproduce.png").exists()
    said = ask("reproduce --only stale --seeds 5 --results stale.jsonl --no-train")
    assert "84 runs" in said and "GRPO, 3 seeds" in said and "not all 14 runs are there: 4 (0), 5 (0)." in said


def test_what_is_trained_is_added_to_the_results(ask, tiny, data_files, tmp_path, monkeypatch):
    data = data_files["groups"]
    flags = (f"--model {tiny} --data {data} --eval-data {data} --steps 2 --batch-size 2 --lr 1e-3 --max-new-tokens 2 "
             "--eval-prompts 4")

    def stale(runs):
        """What is stale."""
        return [evaluation.spread(runs(flags, "exact 2"))]

    monkeypatch.setattr(evaluation, "EXPERIMENTS", {"stale": stale})
    monkeypatch.setattr(humanline, "embedded", lambda *_: str(tmp_path / "key" / "data" / "rows.jsonl"))
    monkeypatch.setattr(evaluation, "sources_of", lambda *_: [])
    (tmp_path / "key").mkdir()
    command = "reproduce --only stale --jobs 1 --results results.jsonl --seeds"
    ask(f"{command} 1")
    one = read_lines(tmp_path / "results.jsonl")
    assert [line["seed"] for line in one] == [1] and one[0]["lowest"] == one[0]["exact 2"] == 0  # to four digits
    trained, start = [], evaluation.train_all
    monkeypatch.setattr(evaluation, "train_all", lambda wanted, *more: trained.extend(wanted) or start(wanted, *more))
    ask(f"{command} 2")
    assert trained == [f"{flags} --seed 2"] and read_lines(tmp_path / "results.jsonl")[:1] == one


def pretended_real(losses=("grpo", "kto"), tasks=("sentiment", "checked"), seeds=(1, 2, 3), quick=False, **tops):
    """The report of `reproduce --real` on made-up runs, whose last reward is planted by variant; and how its runs were
    asked for, a list for each turn."""
    known, turns = {}, []
    runs = evaluation.Runs([*seeds], known)
    runs.quick = quick
    while True:
        text, curves = evaluation.real(runs, losses, tasks)
        missing = [flags for flags in runs.wanted if flags not in known]
        if not missing:
            return text, curves, turns
        turns.append(missing)
        for flags in missing:
            kind = "online" if "--sample-every 1 " in flags else "offline" if "--no-humanline" in flags else "humanline"
            seed = int(flags.split()[-1])
            luck = {"2e-5": 0.0, "1e-5": -0.2, "4e-5": -0.1}[flags.split("--lr ")[1].split()[0]] + seed % 5 / 1000
            luck -= 0.05 * ("--sync-k 4 " not in flags and kind == "humanline")
            run = dict(flags=flags, device="CPU", samples=dict(best=dict(reward=1.0, completion="two\nlines")))
            for step in evaluation.REAL_STEPS:
                share = step / evaluation.REAL_STEPS[-1]
                reward = 0.2 + share * (tops.get(kind, 0.5) + luck - 0.2)
                line = dict(reward=reward, greedy=reward, kl=20 * share, length=20, distinct=0.9)
                line |= dict(seconds=step, drawing=0)
                run |= {f"{name} {step}": value for name, value in line.items()}
            known[flags] = run


def test_the_real_experiment_tunes_first_and_then_compares_what_the_tuning_chose():
    text, curves, turns = pretended_real(losses=("kto",), offline=0.3, humanline=0.8, online=0.9)
    tuning = [[flags for flags in asked if flags.endswith("--seed 101")] for asked in turns]
    assert list(map(len, tuning)) == [2 * 3 * 2, 2 * 3, 2 * 2, 0]  # two rates each in both tasks, the third rate, two k
    assert all("--lr 1e-5" in flags for flags in tuning[1])
    ks, reported = tuning[2], [flags for asked in turns for flags in asked if not flags.endswith("--seed 101")]
    assert len(reported) == 2 * 5 * 3  # tasks, variants, seeds
    assert all("--lr 2e-5" in flags for flags in ks + reported)
    assert all("--sync-k 4 " in flags for flags in reported if "--no-humanline" not in flags)
    assert set(curves) == {("sentiment", "kto"), ("checked", "kto")}
    report = "\n".join(text)
    assert "| offline + humanline | 3 | 2e-5, 4 | 0.802 ± 0.002 | 0.802 ± 0.002 | 83% [83%, 83%] |" in report
    assert "- **holds**: KTO, checked, 3 seeds: online ends above offline: +0.600 ± 0.000, paired" in report
    assert "offline + humanline gains as much as online at the same distance from the base: -0.100" in report
    assert ("- **does not hold**: KTO, checked, 3 seeds: no humanline, taper, prior, does as well as offline + humanline, "
            "taper, prior: -0.500 ± 0.000, paired") in report
    assert 'best 1.00: "two' in report
    far = next(line for line in report.splitlines() if line.startswith("| KTO, offline + humanline |"))
    assert "| checked: reward at a KL of | 4 nats | 8 nats | 14 nats | 20 nats |" in report
    assert far.split(" | ")[1] == "" and far.endswith("| 0.80 (3) |")  # first measured at 5 nats, last at 20


def test_the_real_experiment_does_not_try_the_low_rate_where_the_high_one_is_better(monkeypatch):
    monkeypatch.setattr(evaluation, "REAL_GRID", dict(lr=("1e-5", "2e-5", "4e-5"), k=(4, 1, 16)))  # as a hill from 1e-5
    _, _, turns = pretended_real(losses=("kto",))
    assert not any("--lr 4e-5" in flags for asked in turns for flags in asked)
    assert "--lr 2e-5 --seed 1" in " ".join(turns[-1])


def test_the_real_experiment_reports_the_variants_whose_tuning_is_finished(monkeypatch):
    monkeypatch.setattr(evaluation, "real_tuned", lambda runs, loss, variant: (
        None if variant == evaluation.PAPERS else ("2e-5", "4")))
    text, curves, _ = pretended_real(losses=("kto",), tasks=("checked",))
    assert text[0] == f"KTO, checked: the tuning is not finished for: {evaluation.PAPERS}; {evaluation.BOTH}."
    assert list(curves["checked", "kto"]) == ["offline", "online", evaluation.BARE]


def test_the_real_experiment_says_what_does_not_hold():
    text, _, _ = pretended_real(losses=("kto",), offline=0.6, humanline=0.5, online=0.9)
    report = "\n".join(text)
    assert "- **does not hold**: KTO, checked, 3 seeds: offline + humanline does better than offline: -0.100" in report
    assert ("- **does not hold**: KTO, checked, 3 seeds: offline + humanline gains as much as online at the same "
            "distance") in report


def test_the_quick_real_experiment_is_four_runs_with_the_settings_that_are_known():
    text, curves, (runs,) = pretended_real(losses=("grpo",), tasks=("sentiment",), seeds=(1,), quick=True)
    assert [flags.split("--seed ")[1] for flags in runs] == ["1"] * 4 and "not decided" in "\n".join(text)


def test_the_real_experiment_reports_what_is_there_and_compares_the_seeds_that_two_share(monkeypatch):
    lookup = evaluation.Runs.lookup  # no online run but that of seed 3
    missing = lambda flags: "--sample-every 1 " in flags and flags.endswith(("--seed 1", "--seed 2"))
    monkeypatch.setattr(evaluation.Runs, "lookup", lambda runs, flags: {} if missing(flags) else lookup(runs, flags))
    text, curves, _ = pretended_real(losses=("kto",), tasks=("checked",), offline=0.3, humanline=0.8, online=0.9)
    report = "\n".join(text)
    assert "| online | 1 | 2e-5 | 0.903 |" in report and "| offline | 3 | 2e-5 |" in report
    assert "- **not decided**: KTO, checked, 1 seed: online ends above offline: +0.600, paired" in report
    assert "- **holds**: KTO, checked, 3 seeds: offline + humanline does better than offline: +0.500 ± 0.000" in report
    assert [len(runs) for runs in curves["checked", "kto"].values()] == [3, 3, 3, 1, 3]


def test_the_real_experiment_is_drawn(tmp_path):
    _, curves, _ = pretended_real()
    for against in ("kl", "seconds"):
        evaluation.picture_real(curves, tmp_path / f"{against}.png", against)
        assert (tmp_path / f"{against}.png").stat().st_size > 10_000


def test_a_report_without_grpo_has_both_its_pictures(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, curves, _ = pretended_real(losses=("dpo", "kto"))
    monkeypatch.setattr(evaluation, "real", lambda *_: (text, curves))
    assert evaluation.main(["reproduce", "--real", tiny, "--no-train", "--losses", "dpo", "kto"]) == 0
    assert f"evals/real{tiny.replace('/', '-')}.jsonl" in capsys.readouterr().out  # another model, another file
    assert Path("evals/real.png").exists() and Path("evals/real-seconds.png").exists()


def test_a_real_run_is_measured_and_its_distance_from_the_base_is_that_of_its_log_probs(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "REAL_STEPS", (0, 1, 2))
    short = [dict(prompt=f"Ask {i}", check="question") for i in range(12)]  # the tiny model has 64 positions
    write_jsonl(tmp_path / "short.jsonl", short)
    monkeypatch.setattr(evaluation, "real_rows", lambda task, held_out=False: str(tmp_path / "short.jsonl"))
    evaluation.draw_base("checked", 1, tiny, tmp_path)
    lines = read_lines(tmp_path / "checked-1.jsonl")
    assert len(lines) == 12 * 8 and {"check", "tokens", "logps", "reward"} <= lines[0].keys()
    for line in lines[::3]:  # the tiny model never earns one
        line["reward"] = 1.0
    write_jsonl(tmp_path / "checked-1.jsonl", lines)
    flags = "checked --loss grpo --batch-size 4 --no-humanline --lr 3e-2 --seed 1"
    outcome = evaluation.train_real(flags, tiny, tmp_path)
    assert outcome["kl 0"] == pytest.approx(0, abs=1e-3) and outcome["kl 2"] > outcome["kl 1"] > 0.01
    assert {f"{name} {step}" for name in ("reward", "greedy", "length", "entropy", "distinct", "seconds")
            for step in (0, 1, 2)} <= outcome.keys()
    assert outcome["seconds 2"] > outcome["seconds 1"] > 0 == outcome["drawing 2"] and len(outcome["samples"]) == 5

    def diverges(run, batch, loss, grad_norm):
        if batch.step == 2:
            raise FloatingPointError("step 2: loss nan")

    monkeypatch.setattr(humanline.Run, "stop_unless_finite", diverges)
    diverged = evaluation.train_real(flags, tiny, tmp_path)
    assert {"reward 0", "reward 1"} <= diverged.keys() and "reward 2" not in diverged and len(diverged["samples"]) == 5


def test_the_real_experiment_asks_for_its_reward_before_it_draws(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(evaluation, "train_all_real", lambda *_: pytest.fail("it draws"))
    assert evaluation.main(["reproduce", "--real", tiny, "--quick"]) == 2 and not Path("evals").exists()
    assert capsys.readouterr().err.endswith("not installed; pip install vaderSentiment\n")


def test_exact_pass_is_what_samples_tend_to(tiny, data_files):
    rows = [dict(row, answer="".join(random.Random(i).choices("0123456789", k=1 + i % 3)))
            for i, row in enumerate(rows_of("prompts", 6))]
    config = humanline.parse_config(["--model", tiny, "--max-new-tokens", "8"])
    sampler = evaluation.load(tiny, config, scored=False)
    read = [humanline.read_row(row, "", sampler.config) for row in rows]
    groups = evaluation.encode(sampler, read, offline=False)
    expected = []
    for group, row in zip(groups, rows):  # a token at a time
        ids, chance = list(group.prompt), 1.0
        for token in sampler.tokenizer(row["answer"] + sampler.tokenizer.eos_token)["input_ids"]:
            chance *= float(sampler.policy(torch.tensor([ids])).logits[0, -1].softmax(-1)[token])
            ids.append(token)
        expected.append(chance)
    found = evaluation.exact_pass(sampler.policy, sampler.tokenizer, groups, read)
    assert found == pytest.approx(np.mean(expected), rel=1e-4) and found > 0


@pytest.mark.parametrize("syncing", [True, False])
def test_the_claims_are_drawn(tmp_path, syncing):
    evaluation.picture_report(pretended(Pretend()), syncing, tmp_path / "claims.png")
    assert (tmp_path / "claims.png").stat().st_size > 10_000


def test_the_share_of_the_gap_has_an_honest_interval():
    chance, covered, rounds = np.random.default_rng(0), 0, 2000
    for _ in range(rounds):  # humanline closes 60 % of a gap of 0.2; seeds share their luck
        luck = chance.normal(0, 0.02, 5)
        offline, online = (level + luck + chance.normal(0, 0.02, 5) for level in (0.6, 0.8))
        _, low, high = evaluation.closed(offline, 0.72 + luck + chance.normal(0, 0.02, 5), online)
        covered += low <= 0.6 <= high
    assert 0.93 <= covered / rounds <= 0.97
    nothing = evaluation.closed(offline, offline + 0.1, offline + chance.normal(0, 0.1, 5))
    assert nothing[1:] == (-math.inf, math.inf) and evaluation.show_share(nothing).endswith("[too small a gap to tell]")


def test_the_share_of_the_gap_of_runs_that_share_nothing_has_an_honest_interval_too():
    chance, covered, rounds = np.random.default_rng(0), 0, 2000
    for _ in range(rounds):
        offline, ours, online = (chance.normal(level, 0.02, 5) for level in (0.6, 0.72, 0.8))
        _, low, high = evaluation.closed(offline, ours, online, paired=False)
        covered += low <= 0.6 <= high
    assert covered / rounds >= 0.95
    same = np.array([0.6, 0.5, 0.7])  # luck that all three share cancels in pairs alone
    paired, not_paired = (evaluation.closed(same, same + 0.1, same + 0.4, paired) for paired in (True, False))
    assert paired == pytest.approx((0.25, 0.25, 0.25)) and not_paired[1] < 0 < 0.5 < not_paired[2]


def test_which_variants_are_paired_is_asked_of_the_seeds_that_all_have():
    run = lambda device: dict(device=device)
    each = dict(offline=[run("CPU")] * 3 + [run("GPU")], ours=[run("CPU")] * 3 + [{}], online=[run("CPU")] * 4)
    assert evaluation.pairs(each, *each).all()
    each["ours"][3] = run("GPU")
    assert (evaluation.pairs(each, *each) == [[True, True, False], [True, True, False], [False, False, True]]).all()


def test_what_does_as_well_may_be_a_little_worse_but_not_for_sure():
    verdict = lambda *more: evaluation.as_well(np.array(more), "claim").split("**")[1]
    assert verdict(0.01, -0.01, 0.0) == "holds" and verdict(0.1, 0.11, 0.12) == "holds"
    assert verdict(-0.02, -0.021, -0.019) == "does not hold"  # surely worse
    assert verdict(0.05, -0.05, 0.0) == "not decided" and verdict(0.1) == "not decided"


def test_a_share_is_shown_with_the_interval_it_has():
    assert evaluation.show_share(evaluation.closed(*np.array([[0.4], [0.5], [0.8]]))) == "25%"  # one seed
    assert evaluation.show_share((-2.37, -6.0, -1.0)) == "-237% [-600%, -100%]"


def test_runs_of_two_devices_are_compared_but_not_in_pairs():
    ours, offline = np.array([0.8, 0.7, 0.9]), np.array([0.5, 0.4, 0.6])  # the same luck by seed
    value = lambda name, what: {evaluation.PAPERS: ours, "offline": offline}.get(name, ours + 0.1)
    device = dict(zip(("ours", "offline", "online"), ("GPU", "CPU", "CPU")))
    runs = SimpleNamespace(each=lambda flags: [dict(device=device[flags])] * 3)
    flags = {evaluation.PAPERS: "ours", "offline": "offline", "online": "online"}
    verdicts = evaluation.real_verdicts("GRPO", value, runs, flags)
    assert "online ends above offline: +0.400 ± 0.000, paired" in verdicts[0]
    assert "does better than offline: +0.300 ± 0.351, not paired" in verdicts[1]  # 4.303 sqrt(2 · 0.01 / 3)
    device["ours"] = "CPU"
    assert "+0.300 ± 0.000, paired" in evaluation.real_verdicts("GRPO", value, runs, flags)[1]
    two = SimpleNamespace(each=runs.each)
    few = lambda name, what: value(name, what)[:2]
    assert evaluation.real_verdicts("GRPO", few, two, flags)[0].startswith("- **not decided**")


def test_reproduce_trains_once_and_then_reads_its_cache(ask, tiny, data_files, tmp_path, monkeypatch):
    data = data_files["groups"]
    flags = (f"--model {tiny} --data {data} --eval-data {data} --steps 2 --batch-size 2 "
             "--lr 1e-3 --max-new-tokens 2 --eval-prompts 4")
    monkeypatch.setattr(evaluation, "EXPERIMENTS", {"gap": lambda runs: [evaluation.spread(runs(flags), digits=6)]})
    monkeypatch.setattr(humanline, "embedded", lambda *_: str(tmp_path / "key" / "data" / "rows.jsonl"))
    (tmp_path / "key").mkdir()
    monkeypatch.setattr(evaluation, "sources_of", lambda *_: [])
    evaluation.gap.__doc__ = evaluation.EXPERIMENTS["gap"].__doc__ = "The gap."
    first = ask("reproduce --only gap --seeds 1 --jobs 1")
    assert (tmp_path / "evals" / "reproduce.md").exists() and len(list((tmp_path / "key").glob("runs-*/*.json"))) == 1
    monkeypatch.setattr(evaluation, "ProcessPoolExecutor", lambda *_: pytest.fail("trained again"))
    second = ask("reproduce --only gap --seeds 1 --jobs 1")
    assert first.split("report:")[0] == second.split("report:")[0]
    alone = evaluation.train_once(f"{flags} --seed 1", tmp_path)  # in a process of its own or not, the same
    cache = next((tmp_path / "key").glob("runs-*"))
    assert alone["metrics"] == evaluation.train_once(f"{flags} --seed 1", cache)["metrics"]


@pytest.mark.parametrize("before", [None, "5"])
def test_another_base_is_used_for_a_while_only(monkeypatch, before):
    monkeypatch.setenv("HUMANLINE_BASE", before) if before else monkeypatch.delenv("HUMANLINE_BASE", raising=False)
    rows = humanline.RECIPES["long"].rows()
    with pytest.raises(RuntimeError), evaluation.base_of(7):
        assert humanline.embedded_seed() == 7 and humanline.RECIPES["long"].rows() != rows
        raise RuntimeError
    assert os.environ.get("HUMANLINE_BASE") == before and humanline.RECIPES["long"].rows() == rows


def test_a_process_that_trains_knows_the_data_of_every_experiment(tmp_path):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), evaluation.start_worker) as pool:
        pool.submit(evaluation.prepare, 3, ["embedded:long-test"], tmp_path, False).result()
    with evaluation.base_of(3):
        path = humanline.embedded("embedded:long-test", "data")
        assert read_lines(Path(path)) == humanline.RECIPES["long"].rows()[1]


def test_other_recipes_have_other_results(monkeypatch):
    key = evaluation.recipes_key()
    assert key == evaluation.recipes_key()
    monkeypatch.setitem(humanline.RECIPES, "long", dataclasses.replace(humanline.RECIPES["long"], version=2))
    assert key != evaluation.recipes_key()


@pytest.mark.parametrize("last", [1, 3])
def test_a_run_that_diverges_ends_with_nothing_right(last, tiny, data_files, tmp_path, monkeypatch):
    data = data_files["groups"]
    flags = (f"--model {tiny} --data {data} --eval-data {data} --steps 4 --batch-size 2 "
             "--lr 1e-3 --max-new-tokens 2 --eval-prompts 4 --eval-every 2 --seed 1")
    work, steps = humanline.forward_backward, []
    broken = lambda *args: steps.append(1) or work(*args) | (dict(loss=math.nan) if len(steps) == last else {})
    monkeypatch.setattr(humanline, "forward_backward", broken)
    found = evaluation.train_once(flags, tmp_path)
    assert found["after"] == found["step 4"] == 0 and len(found["metrics"]["logp"]) == last - 1 and "step 2" in found
    assert math.isnan(found["before"]) == math.isnan(found["training"]) == (last == 1)  # of which no line was written


def test_the_tuning_takes_the_best_on_all_its_seeds_of_the_best_on_the_first():
    class Tuned(dict):
        def get(self, flags, default=None):  # 4e-4 wins on the first two seeds, 2e-4 over all four
            early, lr = int(flags.split()[-1]) < 103, flags.split("--lr ")[1].split()[0]
            level = {"4e-4": 0.6 if early else 0.4, "2e-4": 0.58 if early else 0.6}.get(lr, 0.5)
            return dict(after=level - 0.05 * ("--max-grad-norm" in flags))

    runs = evaluation.Runs([101, 102, 103, 104], Tuned())
    rows = [line for line in evaluation.tuning(runs)[0].splitlines() if line.startswith("| GRPO, online |")]
    assert len(rows) == 2 and "--lr 2e-4" in rows[0] and "0.580 0.580 0.600 0.600" in rows[0]


def test_time_is_compared_to_the_pass_that_both_reach():
    known = {"slow --seed 1": {"before": 0.4, "step 64": 0.6, "step 128": 0.8, "training": 20.0},
             "fast --seed 1": {"before": 0.4, "step 64": 0.7, "step 128": 0.65, "training": 10.0}}
    runs = evaluation.Runs([1], known)  # both reach 0.7: the slow one after 96 of 128 steps, the fast one after 64
    assert evaluation.times_as_long(runs, "slow", "fast", (64, 128)) == "3.00"


def test_a_worker_that_remembers_its_rows_mixes_none_up(tiny, data_files, monkeypatch):
    for name in ("read_rows", "encode_rows"):
        monkeypatch.setattr(humanline, name, getattr(humanline, name))  # which puts them back afterwards
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    evaluation.start_worker()
    sampler = evaluation.load(tiny, humanline.parse_config(["--model", tiny]), scored=False)
    rows = lambda kind: humanline.read_rows(data_files[kind], sampler.config, "--data")
    pairs, groups, again, some = (evaluation.encode(sampler, rows, offline=True)
                                  for rows in (rows("pairs"), rows("groups"), rows("pairs"), rows("pairs")[:5]))
    assert pairs is again and pairs != groups and some == pairs[:5]


@pytest.mark.parametrize("error, said", [
    (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    (BrokenProcessPool("a process was terminated abruptly"), "a process was terminated abruptly"),
    (MemoryError("out of memory; lower --sample-tokens"),
     "out of memory; lower --sample-tokens (its flags go into a --config FILE here)")])
def test_bad_luck_while_training_costs_one_line(monkeypatch, capsys, error, said):
    def fail(flags):
        raise error

    monkeypatch.setitem(evaluation.COMMANDS, evaluation.Reproduce, fail)
    assert evaluation.main(["reproduce"]) == 1 and capsys.readouterr().err == f"eval.py: stopped: {said}\n"


@pytest.mark.parametrize("flags, of, said", [
    ("--only stale", "sentiment --loss grpo --seed 1", "its runs are those of --real"),
    ("--real some/model --no-train", "--loss grpo --seed 1", "its runs are not of --real")])
def test_results_of_another_kind_are_refused(tmp_path, capsys, flags, of, said):
    (tmp_path / "results.jsonl").write_text(json.dumps(dict(flags=of)) + "\n")
    assert evaluation.main(["reproduce", *flags.split(), "--results", str(tmp_path / "results.jsonl")]) == 2
    assert f"{said}; name another file" in capsys.readouterr().err


@pytest.mark.parametrize("flags, name", [
    ("perception --temperature 0.7", "--temperature"), ("data --top-p 0.9", "--top-p"),
    ("reproduce --real some/model --quick --losses dpo", "--losses"), ("reproduce --only tuning --seeds 2", "--seeds")])
def test_a_flag_that_would_change_nothing_or_the_wrong_thing_is_refused(capsys, flags, name):
    assert evaluation.main(flags.split()) == 2
    assert re.fullmatch(rf"eval.py: error: {name}: .*leave .*out.*\n", capsys.readouterr().err)


def test_one_seed_decides_nothing():
    runs = pretended(Pretend())
    runs.seeds = [1]
    lines = itertools.chain(*(getattr(evaluation, name)(runs) for name in ("gap", "sparse")))
    verdicts = [line for line in lines if "every 64 steps" in line and "**" in line]
    assert len(verdicts) == 2 and all(line.startswith("- **not decided**") for line in verdicts)


def test_a_wide_interval_around_0_decides_nothing():
    ahead = np.array([0.3, -0.1, 0.0])
    value = lambda name, what: np.array([0.5, 0.5, 0.5]) + (ahead if name == evaluation.PAPERS else 0)
    runs = SimpleNamespace(each=lambda flags: [{"kl 0": 0, "kl 8": 0.0, "reward 8": 0.5, "kl 16": 9.0, "reward 16": 0.5}] * 3)
    verdicts = evaluation.real_verdicts("GRPO", value, runs, {evaluation.PAPERS: "", "offline": "", "online": ""})
    assert all(line.startswith("- **not decided**") for line in verdicts[1:]) and len(verdicts) == 3


@pytest.mark.parametrize("fall, by_then, before", [(90, 0, 0), (100, 1, 0), (120, 1, 0), (140, 1, 1)])
def test_the_warning_is_in_time_by_the_measurement_that_shows_the_fall_and_ahead_by_the_one_before(fall, by_then, before):
    run = {"step 64": 0.6, f"step {fall - 30}": 0.62, f"step {fall}": 0.5, "step 256": 0.1, "warned": 100}
    text = evaluation.warned_in_time([run] * 5)
    assert f"{5 * by_then} had been warned of by then, {5 * before} by the measurement before" in text
    assert text.startswith("- **holds**" if by_then else "- **does not hold**")
    assert "**not decided**" in evaluation.warned_in_time([run])


def test_between_two_measurements_a_reward_levels_off():
    run = {"kl 0": 0.0, "reward 0": 0.2, "kl 8": 2.0, "reward 8": 0.6, "kl 16": 18.0, "reward 16": 0.9}
    assert evaluation.at_kl(run, 2.0) == pytest.approx(0.6) and evaluation.at_kl(run, 18.0) == pytest.approx(0.9)
    assert evaluation.at_kl(run, 10.0) == pytest.approx(0.8)  # 1 - sqrt(0.4 · 0.1); a straight line gives 0.75
    assert math.isnan(evaluation.at_kl(run, 1.0)) and math.isnan(evaluation.at_kl(run, 18.1))


def test_students_t_beyond_the_table():
    for seeds, t in ((5, 2.776), (11, 2.228), (21, 2.086), (121, 1.980)):
        assert evaluation.student(seeds) == pytest.approx(t, abs=0.004)


def test_the_longer_task_alone_makes_nothing_else():
    assert all("long" in source for source in evaluation.sources_of(("long",), quick=False))
    assert "embedded:worse" in evaluation.sources_of(("gap",), quick=True)
