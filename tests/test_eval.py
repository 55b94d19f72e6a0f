"""eval.py: estimates are correct, intervals have their coverage, and bad input gives a one-line message."""

import doctest
import functools
import itertools
import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, encode_prompt, finished, metrics, rows_of, write_jsonl

import eval as evaluation
import humanline
from eval import capacity, divergence, interval, length_controlled, pass_at_k, perceived_divergence


def line_of(text: str, start: str) -> list[float]:
    """The numbers after `start` in the line that begins with it."""
    line = re.search(rf"^ *{re.escape(start)}(.*)", text, re.M)[1]
    return [float(number) for number in re.findall(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?", line)]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Estimates.

def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    for n, c, k in [(n, c, k) for n in range(1, 8) for c in range(n + 1) for k in range(1, n + 1)]:
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert abs(pass_at_k(n, c, k) - sum(map(any, subsets)) / len(subsets)) < 1e-12, (n, c, k)
    for impossible in ((4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)):
        with pytest.raises(ValueError):
            pass_at_k(*impossible)


def test_doctests():
    results = doctest.testmod(evaluation)
    assert results.failed == 0 and results.attempted >= 2


@pytest.mark.parametrize("samples, a, b", [
    (8, 0.2, 1.8), pytest.param(1, 9.0, 1.0, marks=pytest.mark.slow)])
def test_the_interval_covers_the_truth_as_often_as_it_claims(samples, a, b):
    """75 repeats of 100 problems with solve rates from Beta(a, b): most are never solved, or have one sample
    each."""
    chance, covered = np.random.default_rng(0), 0
    for _ in range(75):
        _, low, high = interval(chance.binomial(samples, chance.beta(a, b, 100)) / samples, 0.0, 1.0)
        covered += low <= a / (a + b) <= high
    assert 68 <= covered <= 74


def test_the_interval_is_sensible_if_few_problems_differ():
    mean, low, high = interval([0] * 499 + [1], 0.0, 1.0)
    assert mean == 0.002 and 0 <= low < 0.002 < high < 0.02
    mean, low, high = interval([0.0] * 100, 0.0, 1.0)
    assert (mean, low) == (0, 0) and math.isclose(high, 1 - 0.025**0.01)  # Clopper and Pearson
    assert interval([0.5] * 100, 0.0, 1.0)[1] < 0.5 < interval([0.5] * 100, 0.0, 1.0)[2]
    assert interval([3.0, 3.0]) == (3.0, 3.0, 3.0)  # values without known bounds, such as lengths


def test_length_control_removes_the_advantage_of_length_and_nothing_else():
    win_rates = []
    for seed in range(10):
        chance = np.random.default_rng(seed)
        theirs = np.round(chance.lognormal(5, 0.5, 500))
        delta = np.round(theirs * chance.lognormal(math.log(1.3), 0.4, 500)) - theirs
        probability = 1 / (1 + np.exp(-3 * delta / delta.std()))
        assert probability.mean() > 0.6 and abs(length_controlled(probability, delta) - 0.5) < 0.05
        win_rates.append(float(length_controlled((1 + np.sign(delta)) / 2, delta)))
    # a judge with a step at length 0 does not determine the slope
    assert abs(np.mean(win_rates) - 0.5) < 0.05
    won = (chance.random(500) < 0.7).astype(float)
    assert abs(length_controlled(won, delta) - won.mean()) < 0.02
    both = np.stack([won, 1 - won])  # leading dimensions are separate fits
    assert np.allclose(length_controlled(both, np.stack([delta] * 2)).sum(), 1)


def test_the_divergence_of_a_policy_from_its_own_samples_lies_in_its_interval():
    chance = np.random.default_rng(0)
    for _ in range(20):
        first, second = chance.multinomial(8, np.full(20, 1 / 20), (2, 100))
        estimate, low, high = divergence(first, second, 1.0)
        assert 0 <= low <= estimate <= high < 0.1


def test_the_divergence_is_zero_for_data_from_the_perceived_model_and_bounds_the_error():
    chance, policy = np.random.default_rng(0), np.full(20, 1e6)
    omega = np.diff(capacity(np.arange(21) / 20, 0.61))
    assert perceived_divergence(policy, 1e8 * omega, 0.61) < 1e-6
    for _ in range(100):
        q, v = chance.dirichlet(np.ones(20)), chance.uniform(-1, 1, 20)
        found = perceived_divergence(policy, 1e12 * q, 0.61)
        assert math.isclose(found, (omega * np.log(omega / q)).sum(), rel_tol=1e-4)
        assert abs(v @ (omega - q)) <= abs(v).max() * math.sqrt(2 * found) + 1e-6  # Proposition 3.4


# accuracy.

def drawn_texts(model: str, rows: list[dict], samples: int, length: int) -> list[list[str]]:
    config = humanline.parse_config(["--model", model, "--max-new-tokens", str(length)])
    sampler = evaluation.load(config, rewarded=False)
    read = [humanline.read_row(fields, "", config) for fields in rows]
    groups = evaluation.draw(sampler, humanline.encode_rows(read, sampler, online=True), read, samples, 7)
    texts = [sampler.tokenizer.batch_decode(group.completions, skip_special_tokens=True) for group in groups]
    return [[text if text.strip() else "?" for text in own] for own in texts]


@pytest.fixture(scope="session")
def problems(tiny, tmp_path_factory):
    """Problems of two levels, with answers that were sampled from the tiny model."""
    rows = rows_of("prompts", 30)
    answers = drawn_texts(tiny, rows, 1, 1)
    rows = [dict(row, answer=answer, level=1 + i % 2)
            for i, (row, (answer,)) in enumerate(zip(rows, answers))]
    return write_jsonl(tmp_path_factory.mktemp("problems") / "problems.jsonl", rows)


def test_accuracy_agrees_with_its_samples(ask, tiny, problems, tmp_path):
    output = ask(f"accuracy --model {tiny} {tiny} --data {problems} --samples 4 --k 1 2 --max-new-tokens 1")
    lines = read_lines(tmp_path / "evals" / "accuracy.jsonl")
    answers = [row["answer"] for row in read_lines(Path(problems))]
    assert len(lines) == 2 * 30 * (4 + 1)
    assert all(line["reward"] == (line["completion"].strip() == answers[line["row"]].strip())
               for line in lines)
    sampled, greedy = lines[:120], lines[120:150]
    mean = lambda key, of=sampled: np.mean([line[key] for line in of])
    assert mean("reward") > 0
    correct = np.reshape([line["reward"] for line in sampled], (30, 4)).sum(1)
    pass_at_2 = np.mean([pass_at_k(4, int(c), 2) for c in correct])
    expected = [mean("reward"), pass_at_2, mean("reward", greedy), mean("tokens"), mean("truncated")]
    assert line_of(output, tiny)[::3] == pytest.approx(expected, abs=6e-4)
    assert "by level (number of problems)\n" in output and "1 (15)" in output
    assert f"difference from {tiny}, paired by problem; comparisons: 1\n" in output


def test_greedy_answers_are_the_most_likely_and_files_are_not_overwritten(ask, tiny, problems, tmp_path):
    for seed in (0, 1):
        ask(f"accuracy --model {tiny} --data {problems} --limit 8 --samples 2 --max-new-tokens 3 "
            f"--seed {seed}")
    first, second = (read_lines(tmp_path / "evals" / name) for name in ("accuracy.jsonl", "accuracy-2.jsonl"))
    texts = lambda lines, kind: [line["completion"] for line in lines if line["kind"] == kind]
    assert texts(first, "greedy") == texts(second, "greedy")
    assert texts(first, "sampled") != texts(second, "sampled")
    policy, tokenizer = humanline.load_policy(humanline.Config(model=tiny), torch.device("cpu"))
    for line in [line for line in first if line["kind"] == "greedy"][:5]:
        ids = encode_prompt(tokenizer, line["prompt"])
        for _ in range(line["tokens"]):
            ids.append(int(policy(torch.tensor([ids])).logits[0, -1].argmax()))
        assert tokenizer.decode(ids[-line["tokens"] :]).removesuffix(tokenizer.eos_token) == line["completion"]


def test_a_run_with_a_custom_loss_is_evaluated_with_all_its_settings(ask, run, problems, monkeypatch):
    folder = run("--loss dpo --beta 0.2", data="pairs")
    settings = folder / "config.toml"
    settings.write_text(settings.read_text().replace('"dpo"', '"mine"'))
    monkeypatch.setattr(humanline, "LOSSES", dict(humanline.LOSSES))
    ask(f"accuracy --model {folder} --data {problems} --limit 2 --samples 2 --max-new-tokens 3")
    assert evaluation.config_for(str(folder), evaluation.Accuracy(model=())).beta == 0.2


def test_the_settings_of_a_run_are_used_and_flags_override_them(ask, run, problems, tmp_path):
    folder = run("--prompt-template <{prompt}> --system hi --max-new-tokens 3 --temperature 0.7 --seed 42 "
                 f"--steps 1 --eval-data {problems}")
    # as if trained with many ranks, adapters and a package that is missing here
    with open(folder / "config.toml", "a") as file:
        file.write('\nshard = true\ntrack = "wandb"\nlora = 4\nlora_alpha = 8\n')
    opened = []
    for spec, more in ((folder, ""), (folder / "final", "--prompt-template [{prompt}] --max-new-tokens 2")):
        ask(f"accuracy --model {spec} --limit 4 --samples 1 --out {len(opened)}.jsonl {more}")
        lines = read_lines(tmp_path / f"{len(opened)}.jsonl")
        assert max(line["tokens"] for line in lines) == 3 - len(opened)
        opened.append([message["content"][0] for message in lines[0]["prompt"]])
    assert opened == [["h", "<"], ["h", "["]]
    copy = str(shutil.copytree(folder / "final", tmp_path / "copy"))
    for spec, model in ((str(folder), str(folder / "final")), (copy, copy)):
        config = evaluation.config_for(spec, evaluation.Accuracy(model=()))
        assert (config.model, config.system) == (model, "hi")
        # a flag overrides the run's setting even at its default
        assert (config.temperature, config.seed) == (1, 0)


def test_a_run_keeps_the_arguments_of_its_own_reward_and_its_limit_is_for_training(tmp_path):
    for name in "ab":
        (tmp_path / name / "final").mkdir(parents=True)
        settings = f"limit = 9\nreward = 'own.py:f'\nreward_args = '{{\"word\": \"{name}\"}}'\n"
        (tmp_path / name / "config.toml").write_text(settings)
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    config = lambda **flags: evaluation.config_for(first, evaluation.Accuracy(model=(), **flags))
    assert config().reward_args == '{"word": "a"}' and config().limit is None
    assert config(reward="other.py:f").reward_args is None
    assert config(reward="other.py:f", reward_args="{}").reward_args == "{}"
    with pytest.raises(humanline.UserError, match="different rewards"):
        evaluation.configs_with_one_reward(evaluation.Accuracy(model=(first, second)))


# winrate.

JUDGES = """
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
"""


@pytest.fixture
def judges(tmp_path):
    (tmp_path / "judges.py").write_text(JUDGES)
    return tmp_path / "judges.py"


def test_a_model_does_not_beat_itself(ask, tiny, problems, judges):
    covered, flags = 0, f"--model {tiny} --against {tiny} --data {problems}"
    for seed in range(2):  # each interval misses the truth 5% of the time
        output = ask(f"winrate {flags} --judge {judges}:longer --samples 4 --seed {seed} --max-new-tokens 9")
        for name in ("win rate", "length-controlled"):
            _, low, high = line_of(output, name)[:3]
            covered += low <= 0.5 <= high and high - low < 0.4
        assert "losses 0.0" not in output  # the samples differ, so lengths do, too
    assert covered >= 3
    # it is asked in both orders
    output = ask(f"winrate {flags} --judge {judges}:lopsided --max-new-tokens 3")
    assert line_of(output, "win rate")[0] == 0.5 and "wins 0.000, ties 1.000, losses 0.000" in output
    assert "all pairs tie" in next(line for line in output.splitlines() if "length-controlled" in line)
    assert line_of(output, "position bias of the judge")[0] == 0.6


def test_the_higher_reward_wins_and_ties_count_half(ask, tiny, data_files, tmp_path):
    output = ask(f"winrate --model {tiny} --against data --data {data_files['groups']} --max-new-tokens 3 "
               "--out pairs.jsonl")
    pairs, rows = read_lines(tmp_path / "pairs.jsonl"), read_lines(Path(data_files["groups"]))
    for pair, row in zip(pairs, rows):
        assert pair["against"] == row["completions"][int(np.argmax(row["scores"]))]
        ours, theirs = (text.strip() == row["answer"] for text in (pair["output"], pair["against"]))
        assert pair["preference"] == 0.5 + (ours - theirs) / 2
    assert math.isclose(line_of(output, "win rate")[0], np.mean([pair["preference"] for pair in pairs]),
                        abs_tol=6e-4)


def test_failed_rewards_count_alike_on_both_sides(tmp_path):
    (tmp_path / "picky.py").write_text("def length(prompts, completions, rows):\n"
                                       "    assert 'bad' not in completions\n"
                                       "    return [-len(text) for text in completions]\n")
    reward = humanline.Reward(humanline.Config(reward=f"{tmp_path}/picky.py:length"))
    first, second = ["bad", "12345"], ["1234567", "bad"]  # a failure counts -7, the lowest of both sides
    preferences = evaluation.compare_rewards(reward, [[]] * 2, first, second, [{}] * 2)
    assert preferences.tolist() == [0.5, 1.0]


def test_win_rates_compare_only_with_desirable_completions_of_the_data(ask, tiny, tmp_path, capsys):
    labels = [False, True, True, False, True]
    rows = [dict(prompt=f"p{i}", completion=f"c{i}<eos>", label=label, answer="x")  # <eos> ends it
            for i, label in enumerate(labels)]
    data = write_jsonl(tmp_path / "labels.jsonl", rows)
    output = ask(f"winrate --model {tiny} --against data --data {data} --max-new-tokens 3 --out pairs.jsonl")
    assert [pair["against"] for pair in read_lines(tmp_path / "pairs.jsonl")] == ["c1", "c2", "c4"]
    assert "3 prompts" in output
    data = write_jsonl(tmp_path / "bad.jsonl", [row for row in rows if not row["label"]])
    assert evaluation.main(f"winrate --model {tiny} --data {data} --max-new-tokens 3".split()) == 2
    error = capsys.readouterr().err
    assert "or no desirable completion; compare with a model instead: --against MODEL" in error


def test_the_pairs_of_a_win_rate_are_converted_to_the_format_of_alpaca_eval(ask, tiny, data_files, tmp_path):
    ask(f"winrate --model {tiny} --data {data_files['groups']} --max-new-tokens 3 --out pairs.jsonl")
    first, *others = (tmp_path / "pairs.jsonl").read_text().splitlines(keepends=True)
    first = json.dumps(json.loads(first) | {"output": "a\u2028b"}, ensure_ascii=False)
    (tmp_path / "pairs.jsonl").write_text("".join([first, "\n", *others]))
    assert finished(ROOT / "configs" / "alpaca_eval.py", "pairs.jsonl", cwd=tmp_path).returncode == 0
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").open("rb")]
    rows = read_lines(Path(data_files["groups"]))
    for side in ("output", "against"):
        outputs = json.loads((tmp_path / f"pairs-{side}.json").read_text(encoding="utf-8"))
        assert [line["output"] for line in outputs] == [pair[side] for pair in pairs]
        assert [line["instruction"] for line in outputs] == [row["prompt"] for row in rows]
        assert {(line["generator"], line["dataset"]) for line in outputs} == {(side, "pairs")}


def test_a_run_is_prompted_with_its_own_template_and_a_model_next_to_it_like_the_run(
        ask, run, tiny, problems, judges, monkeypatch):
    first, second = (run(f"--prompt-template {word}{{prompt}} --max-new-tokens 3 --steps 1") for word in "QR")
    encode, prompts = evaluation.encode_rows, []

    def note(rows, sampler, online):
        prompts.append(rows[0].prompt[0]["content"][0] + str(sampler.config.max_new_tokens))
        return encode(rows, sampler, online)

    monkeypatch.setattr(evaluation, "encode_rows", note)
    flags = f"--data {problems} --judge {judges}:longer --limit 3"
    for model, against in ((first, second), (first, tiny), (tiny, first)):
        ask(f"winrate --model {model} --against {against} {flags}")
    assert prompts == ["Q3", "R3", "Q3", "Q3", "Q3", "Q3"]


def test_a_base_without_a_template_gets_that_of_the_run_beside_it(tiny, tmp_path):
    bare = shutil.copytree(tiny, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    final = shutil.copytree(tiny, tmp_path / "run" / "final")
    (final / "chat_template.jinja").write_text(humanline.TRANSCRIPT)
    (tmp_path / "run" / "config.toml").write_text("")
    copy = shutil.copytree(final, tmp_path / "copy")
    (copy / "config.toml").write_text("")
    for folder in tmp_path / "run", copy:
        flags = evaluation.Accuracy(model=(str(folder), str(bare)), data="x")
        for name, config in zip(flags.model, evaluation.configs_for(flags)):
            assert evaluation.load(config).tokenizer.chat_template == humanline.TRANSCRIPT


def test_two_commands_at_once_take_different_files_and_a_failed_one_leaves_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [evaluation.new_file(None, (".jsonl",), "accuracy.jsonl").name for _ in range(2)]
    assert names == ["accuracy.jsonl", "accuracy-2.jsonl"]
    Path("evals", "accuracy.jsonl").write_text("{}")
    evaluation.remove_empty_files()
    assert [path.name for path in Path("evals").iterdir()] == ["accuracy.jsonl"]


def test_a_full_disk_leaves_the_samples_that_were_written(tmp_path, monkeypatch):
    evaluation.write(tmp_path / "pairs.jsonl", "first")

    def full(path, text, encoding):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError):
        evaluation.write(tmp_path / "pairs.jsonl", "first and second")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["first"]


# data.

@pytest.fixture(scope="session")
def two_sources(tiny, tmp_path_factory):
    """Scored groups sampled from the tiny model, and others that it would never sample."""
    folder = tmp_path_factory.mktemp("sources")
    rows = rows_of("prompts", 40)
    texts = dict(
        own=drawn_texts(tiny, rows, 4, 6),
        other=[["XZYW", "WUVX", "zyxU", "VzUW"]] * 40)
    files = {}
    for name, completions in texts.items():
        scored = [dict(row, completions=own, scores=[1, 0, 0, 1]) for row, own in zip(rows, completions)]
        files[name] = write_jsonl(folder / f"{name}.jsonl", scored)
    return files


def test_data_ranks_sources_by_likelihood_and_gives_advice(ask, tiny, two_sources, tmp_path):
    output = ask(f"data --model {tiny} --data {two_sources['other']} {two_sources['own']} --max-new-tokens 6 "
               "--out data.svg")
    own, own_low, own_high, other = line_of(output, "mean log-prob, nats/token")[:4]
    assert own > other + 1 and own_low < own < own_high
    gap, low, high = line_of(output, f"{two_sources['other']}:")[:3]
    assert math.isclose(gap, other - own, abs_tol=2e-3) and low < gap < high < 0
    assert line_of(output, "less likely than 3/4 of its samples")[3] > 0.9
    assert f"{two_sources['other']}: not good enough" in output
    assert "mean token log-prob" in (tmp_path / "data.svg").read_text()


def test_a_model_is_measured_in_the_precision_in_which_it_was_trained(tiny, monkeypatch):
    sampler, precise = evaluation.load(humanline.Config(model=tiny, dtype="mixed")), []
    log_probs = humanline.log_probs

    def note(*arguments):
        precise.append(not torch.is_autocast_enabled("cpu"))
        return log_probs(*arguments)

    monkeypatch.setattr(humanline, "log_probs", note)
    evaluation.token_logps(sampler, [humanline.Group(0, [1, 2], [[3, 4]], [0.0])])
    assert precise == [False]


def test_a_figure_can_be_drawn_for_very_unlikely_data(tmp_path):
    groups = [humanline.Group(i, [1], [[2]], [1.0]) for i in range(3)]
    source = evaluation.Source("it", groups, [[np.full(2, value)] for value in (-9.0, -12.0, -30.0)], [])
    evaluation.picture_data([source], "model", tmp_path / "data.svg")
    assert (tmp_path / "data.svg").exists() and source.advice().startswith("not good enough")


@pytest.mark.parametrize("nats, scores, advice", [
    (-0.1, [1, 0], "likely enough"), (-0.3, [1, 0], "doubtful"), (-1.0, [1, 0], "not good enough"),
    (-0.1, [1, 1], "little to learn")])
def test_advice_follows_from_the_models_own_samples(nats, scores, advice):
    own = [[np.full(4, value)] for value in np.linspace(-0.4, 0, 100)]
    groups = [humanline.Group(i, [1], [[2], [3]], scores) for i in range(100)]
    spread = np.linspace(-0.1, 0.1, 100)
    logps = [[np.full(3, nats + shift), np.full(2, nats - shift)] for shift in spread]
    source = evaluation.Source("it", groups, logps, own)
    assert source.advice().startswith(advice) and source.advice().endswith(".")
    assert source.estimate[0] == pytest.approx(nats)


def test_data_counts_duplicates_dropped_completions_and_groups_without_a_difference(ask, tiny, tmp_path):
    rows = [dict(prompt=f"p{i}", completions=["aa", "aa", "bbb"], scores=[1, 1, 1 if i < 15 else 0])
            for i in range(20)]
    rows[0]["completions"][2] *= 30
    data = write_jsonl(tmp_path / "odd.jsonl", rows)
    output = ask(f"data --model {tiny} --data {data} --own 0 --max-new-tokens 4")
    expected = {"completions": 57, "duplicates": 19, "dropped": 3,
                "groups without a difference": 0.737, "best minus worst reward": 0.263}
    assert {name: line_of(output, name)[0] for name in expected} == expected and "own samples" not in output


# perception.

def test_perception_passes_the_same_tokens_as_training(monkeypatch):
    chance, config = np.random.default_rng(0), humanline.Config(batch_size=4)
    betas = dict(gamma_p=3e5, beta_p=7e5, gamma_r=1e5, beta_r=9e5)
    concentrated = functools.partial(humanline.humanline_verdicts, **betas)
    monkeypatch.setattr(humanline, "humanline_verdicts", concentrated)
    d = [[chance.normal(0, 1.5, chance.integers(1, 6)) for _ in range(3)] for _ in range(10)]
    fractions = evaluation.fractions_passed(d, config)
    for group, clipped in zip(d, fractions["after humanline clipping"]):
        for log_ratios, fraction in zip(group, clipped):
            _, is_low, is_high = humanline.perceive(torch.tensor(log_ratios), None, config)
            assert fraction == (~(is_low | is_high)).double().mean()
    # If the Betas concentrate on their means, sampling rejects tokens outside the batch's [M_P m_P, 1 / (M_R
    # m_R)].
    first = [log_ratios for group in d[:4] for log_ratios in group]
    flat = np.concatenate(first)
    low, high = flat.max() + math.log(0.3), -((-flat).max() + math.log(0.1))
    expected = [((log_ratios > low) & (log_ratios < high)).mean() for log_ratios in first]
    sampled = np.concatenate(fractions["after humanline sampling"][:4])
    assert np.mean(np.abs(sampled - expected) > 1e-9) < 0.1  # except for outcomes close to an end


def test_perception_reads_the_rows_that_the_run_was_trained_on(ask, run, tmp_path):
    folder = run("--limit 8 --steps 2 --lr 1e-2", data="groups")
    (tmp_path / "eager.toml").write_text('attn = "eager"\n')
    output = ask(f"perception --model {folder} --samples 2 --max-new-tokens 4 --config eager.toml")
    assert " 8 prompts, 2 policy samples each" in output and line_of(output, "the data")[0] == 100.0
    assert (tmp_path / "evals" / "perception.png").exists()


# show --rollouts; tests/test_show_chat.py has the rest.

def test_stored_rollouts_are_shown_by_step_with_the_largest_differences_first(ask, tmp_path):
    def line(step, prompt, completion, reward):
        return dict(step=step, prompt_id=f"{step}-{prompt}", prompt=[dict(role="user", content=prompt)],
                    completion=completion, reward=reward, truncated=completion == "long", tokens=[5, 6, 7])

    write_jsonl(tmp_path / "rollouts.jsonl", [
        line(1, "equal?", "same", 1.0), line(1, "equal?", "same", 1.0),
        line(1, "first?", "middling", 0.5), line(1, "first?", "bad", 0.0), line(1, "first?", "good", 1.0),
        line(9, "near?", "long", 0.25), line(9, "near?", "short", 0.75)])
    shown = ask(f"show --model {tmp_path} --rollouts --prompts 1")
    first, second = shown.split("step 9")
    assert "step 1: 2 prompts, mean reward 0.7, 1 without a difference" in first
    assert "first?" in first and "equal?" not in first and "middling" not in first
    assert re.search("good +│ bad", first) and "reward 1, 3 tokens" in first
    assert re.search("short +│ long", second) and "reward 0.25, 3 tokens, truncated" in second


# plot.

def test_plot_merges_seeds_into_one_line_and_separates_settings(ask, run, tmp_path):
    flags = "--steps 4 --eval-data {0} --eval-every 2 --eval-prompts 4 --sample-every 2"
    data = write_jsonl(tmp_path / "problems.jsonl", rows_of("prompts"))
    runs = [run(f"{flags.format(data)} {more}") for more in ("--seed 0", "--seed 1", "--no-humanline")]
    ask(f"plot ours={runs[0]} ours={runs[1]} plain={runs[2]} --against seconds --out all.svg")
    picture = (tmp_path / "all.svg").read_text()
    assert "ours (2 seeds)" in picture and "plain<" in picture and "wall-clock time, seconds" in picture
    titles = [title.split(",")[0] for name, title in evaluation.PANELS.items() if name != "ordered"]  # DPO's
    assert all(title in picture for title in titles)
    ask(f"plot {' '.join(map(str, runs))} --metrics accuracy --out few.svg")
    picture = (tmp_path / "few.svg").read_text()
    assert "pass@1" in picture
    assert "gradient norm" not in picture
    assert "run (2 seeds)" in picture
    assert "run3" in picture
    again = shutil.copytree(runs[0], tmp_path / "run1-again")
    ask(f"plot {runs[0]} {again} --metrics reward --out again.svg")
    assert "run1 (2 runs)" in (tmp_path / "again.svg").read_text()
    lines = evaluation.read_metrics(runs[0])
    total = sum(line["step_seconds"] for line in metrics(runs[0]))
    assert math.isclose(lines[4]["seconds"], total) and 0 < lines[4]["sampling"] < total
    assert math.isclose(lines[4]["speed"], sum(line["tokens"] for line in metrics(runs[0])) / total)


def test_the_curves_of_offline_runs_leave_out_the_rewards_of_the_data(ask, run, tmp_path):
    ask(f"plot {run('--steps 2 --loss dpo', data='pairs')} --out offline.svg")
    picture = (tmp_path / "offline.svg").read_text()
    assert evaluation.PANELS["ordered"] in picture
    assert not any(evaluation.PANELS[name] in picture for name in evaluation.OF_SAMPLES)


def test_a_legend_stays_within_its_figure(tmp_path, monkeypatch):
    policy, data = np.random.default_rng(0).normal(size=(2, 100))
    names = ["the data", "after humanline clipping", "after humanline sampling"]
    figures, save = [], evaluation.save
    labels = {name: f"{name}, KL 10.25" for name in (*names, evaluation.POLICY_SAMPLES)}
    monkeypatch.setattr(evaluation, "save", lambda figure, *rest: figures.append(figure) or save(figure, *rest))
    evaluation.picture_perception(policy, data, dict.fromkeys(names, np.ones(100)), labels, tmp_path / "p.png")
    [figure] = figures
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 and box.x1 <= figure.bbox.x1


# Bad input gives a one-line message and exit status 2, before anything is written.

@pytest.fixture(scope="module")
def other_vocabulary(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny, folder)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(
        re.sub('"a": (\\d+),(\\s*)"b": (\\d+)', r'"a": \3,\2"b": \1', text))
    return folder


@pytest.mark.parametrize("command, message", [
    ("accuracy --model runs/none", "--model runs/none: no such run or model"),
    ("accuracy --model died", "--model died: the run did not finish"),
    ("accuracy --model nothing", "--model nothing: this folder is neither a run"),
    ("accuracy --model TINY", "--data: pass the rows to evaluate on"),
    ("accuracy --model TINY --data none.jsonl", "--data none.jsonl: [Errno 2] No such file"),
    ("accuracy --model TINY --data noanswer.jsonl", "--data noanswer.jsonl row 1: no answer"),
    ("accuracy --model TINY --data prompts.jsonl --samples 4 --k 1 5", "pass@k needs 1 <= k <= samples"),
    ("accuracy --model TINY --data prompts.jsonl --out samples.txt",
     "--out samples.txt: the name must end in .jsonl"),
    ("accuracy --model TINY --data prompts.jsonl --temperature 0", "--temperature is 0.0; it must be from"),
    ("accuracy --model --limit 2", "--model has no value; pass at least one, or omit the flag"),
    ("accuracy --model TINY --model TINY --data prompts.jsonl", "--model appears twice; write --model FIRST"),
    ("accuracy --nothing 1", "--nothing"),
    ("show --model TINY --data prompts.jsonl --prompts 0",
     "--prompts is 0; it must be between 1 and 1,000,000"),
    ("show --model old --rollouts", "--rollouts: no old/rollouts.jsonl; pass the folder of a run with"),
    ("show --model old --rollouts --samples 2", "omit --samples"),
    ("data --model TINY --data tied.jsonl", "tied.jsonl: no row has both a better and a worse completion"),
    ("winrate --model TINY --data prompts.jsonl",
     "--against data: prompts.jsonl has rows without completions"),
    ("winrate --model TINY --data prompts.jsonl --against TINY --judge none.py:f",
     "--judge none.py:f: no such file"),
    ("winrate --model TINY --data prompts.jsonl --against TINY --judge judges.py:none",
     "--judge judges.py:none: "),
    ("winrate --model TINY --data prompts.jsonl --against TINY --judge judges.py:wrong --limit 3 "
     "--max-new-tokens 3",
     "it must return 3 probabilities"),
    ("winrate --model TINY --data prompts.jsonl --against TINY --judge judges.py:hangs --limit 4 "
     "--max-new-tokens 3 --reward-seconds 0.2", "increase the time limit with --reward-seconds"),
    ("winrate --model TINY --data prompts.jsonl --against TINY --reward judges.py:wrong --max-new-tokens 3",
     "--reward judges.py:wrong failed on every sample: "),
    ("data --model TINY --data prompts.jsonl",
     "--data prompts.jsonl: these rows are prompts without completions"),
    ("data --model TINY --data latin-1.jsonl", "--data latin-1.jsonl"),
    ("perception --model TINY --data groups.jsonl", "--ref and --data: pass both, since "),
    ("perception --model TINY --ref OTHER --data groups.jsonl", "its vocabulary differs from that of"),
    ("perception --model TINY --ref TINY --data groups.jsonl --max-new-tokens 2", "so every log-ratio is 0"),
    ("perception --model TINY --ref TINY --data groups.jsonl --max-new-tokens 64", "no row is short enough"),
    ("plot", "plot: pass one or more run folders"),
    ("plot young", "plot young: metrics.jsonl is empty; wait for the first step"),
    ("plot old --metrics los", "--metrics los: no run has logged this metric; choose from "),
    ("plot --out curves.pdf", "--out curves.pdf: the name must end in .png or .svg"),
    ("nothing", "accuracy, show, chat, winrate, data, perception, plot"),
])
def test_bad_input_gives_a_one_line_error_and_exit_status_2(
        command, message, tiny, other_vocabulary, judges, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "nothing", "died/checkpoint", "young", "old"):
        Path(folder).mkdir(parents=True)
    for run in ("died", "young", "old"):
        Path(run, "config.toml").write_text("")
    Path("young/metrics.jsonl").write_text("")
    Path("old/metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "kl": 0.1, "kind": "text"}\n')
    Path("latin-1.jsonl").write_text('{"prompt": "a"}\n{"prompt": "é"}\n', encoding="latin-1")
    write_jsonl(Path("prompts.jsonl"), rows_of("prompts"))
    write_jsonl(Path("groups.jsonl"), rows_of("groups"))
    write_jsonl(Path("noanswer.jsonl"), [dict(prompt="p")])
    write_jsonl(Path("tied.jsonl"), [dict(prompt="p", completions=["a", "b"], scores=[1, 1])] * 2)
    status = evaluation.main(command.replace("TINY", tiny).replace("OTHER", str(other_vocabulary)).split())
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    if "judges.py" in command and Path("evals").exists():  # what was sampled is kept
        assert "against" in read_lines(Path("evals", "winrate.jsonl"))[0]
    else:
        assert not Path("evals").exists()
    [line] = [line for line in captured.err.splitlines() if "warning" not in line]
    assert line.startswith("eval.py: error: ") and message in line


def test_the_command_line_works_as_typed(tmp_path):
    done = finished(ROOT / "eval.py", "plot", "none", cwd=tmp_path)
    error = "eval.py: error: plot none: no such run; pass a folder that contains metrics.jsonl\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", error)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.\nTried.")])
def test_a_lack_of_memory_gives_one_line(tiny, data_files, monkeypatch, capsys, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(humanline, "load_policy", fail)
    assert evaluation.main(["show", "--model", tiny, "--data", data_files["prompts"]]) == 1
    assert re.fullmatch("eval.py: stopped: .*out of memory.?; try --dtype bfloat16\n", capsys.readouterr().err)


# --track, in humanline.py.


def test_a_tracker_gets_every_line_of_the_metrics(run, monkeypatch):
    says = "--track absent: No module named 'absent'; install wandb, or another"
    with pytest.raises(humanline.UserError, match=says):
        run("--track absent")
    for functions, lacking in ((dict(log=print), "init"), (dict(init=lambda **kwargs: None), "log")):
        monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(**functions))
        with pytest.raises(humanline.UserError, match=f"no attribute '{lacking}'; install wandb, or another"):
            run("--track mine")
    settings, lines = {}, []
    tracker = SimpleNamespace(init=lambda **kwargs: settings.update(kwargs),
                              log=lambda line, step: lines.append((step, dict(line))))
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    folder = run("--track wandb --steps 3")
    assert lines == [(line["step"], line) for line in metrics(folder)] and settings["config"]["steps"] == 3
