"""The claims: the tiny bases, the runs, the estimates, and the pages that are drawn from the stored runs."""

import dataclasses
import doctest
import itertools
import json
import math
import re
from concurrent.futures import Executor, Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, rows_of, write_jsonl

import again
import bases
import decide
import eval as evaluation
import experiments
import first_real
import humanline
import method
import real
import reproduce
from experiments import FORMS_OF, TASKS, Run
from reproduce import HUMANLINE, NO_CLIP, TAPERED

CLAIMS = ROOT / "tests" / "claims"


# The bases.

def test_the_docstrings_hold():
    outcome = doctest.testmod(bases)
    assert outcome.attempted >= 3 and not outcome.failed


@pytest.mark.parametrize("name", ["six-digits", "twelve-digits"])
def test_a_long_tasks_answers_are_right_fit_and_are_held_out(name):
    recipe = bases.RECIPES[name]
    rows, held_out = recipe.rows(0)
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out} and len(held_out) == 500
    assert max(len(row["answer"]) for row in rows) < recipe.max_new_tokens and rows != recipe.rows(1)[0]
    for row in held_out[:20]:
        lines = row["answer"].splitlines()
        if name == "six-digits":
            assert lines[-1] == str(sum(map(int, row["prompt"][:-1].split("+"))))
        else:  # the two numbers, read from the last column up
            upper, lower = (int("".join(line[i] for line in reversed(lines))) for i in (0, 2))
            assert int(lines[-1][-2] + "".join(line[-1] for line in reversed(lines))) == upper + lower


def test_a_base_that_learned_nothing_is_taught_again_from_another_start(tmp_path, monkeypatch):
    taught, accuracies, draw_one = [], iter([0.54, 0.56]), bases.draw

    def draw(model, tokenizer, recipe, fields, size, seed):
        assert len(draw_one(model, tokenizer, recipe, fields[:1], size, seed)) == 1
        right = round(500 * next(accuracies))
        return [humanline.Group(i, [], [], [float(i < right)]) for i in range(500)]

    monkeypatch.setattr(bases, "train_base", lambda model, *_: taught.append(float(model.lm_head.weight.detach().sum())))
    monkeypatch.setattr(bases, "draw", draw)
    bases.make_model("two-digits", tmp_path, 0)
    assert len(taught) == 2 and taught[0] != taught[1] and (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("test, ends_right", [
    ([0.5, 0.8], True),  # the same base, bit for bit
    ([0.5, 0.8001], False),
    ([0.6, 0.72], True),  # another base: 0.8 ± t(2) · 0.1 · √(1 + 1/3), by hand 0.303 to 1.297
    ([0.6, 0.31], True),
    ([0.6, 0.29], False),
])
def test_a_form_that_is_trained_again_ends_as_stored_or_where_another_seed_would(test, ends_right):
    stored = {seed: {"test": [start, end]} for seed, start, end in [(1, 0.5, 0.8), (2, 0.4, 0.7), (3, 0.4, 0.9)]}
    line, is_right = again.judge(reproduce.Form(2e-4, 8, 0.8, stored), 1, {"test": test})
    assert is_right == ends_right == ("not as stored" not in line) and "0.800 ± 0.497" in line


# The list of runs.

@pytest.mark.parametrize("loss, form", [(loss, form) for loss, forms in FORMS_OF.items() for form in forms])
def test_every_form_parses_and_its_loss_is_an_entry(loss, form):
    config = humanline.parse_config(["--model", "m", *Run("two-digits", loss, form, 1e-4, 8, 3).flags()])
    assert config.loss.startswith(loss) and humanline.LOSSES[config.loss].unit == humanline.LOSSES[loss].unit
    assert (config.lr, config.seed, config.eval_every) == (1e-4, 3, 32)
    assert config.sync_k == 8 * ("{k}" in FORMS_OF[loss][form])


@pytest.mark.parametrize("loss, form", [("grpo", "mask 0.5, synced"), ("grpo", "TOPR"), ("dpo", "RPO, synced"),
                                        ("kto", "desirable alone")])
def test_a_run_is_measured_at_each_step_and_has_its_mechanism(tiny, tmp_path, monkeypatch, loss, form):
    base = tmp_path / "two-digits-1"
    base.mkdir()
    (base / "model").symlink_to(tiny)
    write_jsonl(base / "rows.jsonl", rows_of("groups", 8))
    write_jsonl(base / "test.jsonl", rows_of("prompts", 8))
    task = dataclasses.replace(TASKS["two-digits"], steps=4, every=2, batch_size=dict(grpo=4, dpo=4, kto=8))
    monkeypatch.setitem(TASKS, "two-digits", task)
    monkeypatch.setattr(humanline.Run, "measure", humanline.Run.measure)  # so that it is put back
    outcome = experiments.train(Run("two-digits", loss, form, 1e-2, 2, 1), tmp_path)
    assert all(len(outcome[name]) == 3 for name in ("validation", "test", "greedy", "base_kl"))
    assert outcome["base_kl"][0] == pytest.approx(0, abs=1e-3) and len(set(outcome["test"])) > 1
    assert all(len(outcome[name]) == 2 for name in ("clamped_low", "drift", "logp_wanted"))
    assert ("clip_fraction_low" in outcome) == (form == "mask 0.5, synced")


def test_exact_pass_is_what_samples_tend_to(tiny):
    config = humanline.parse_config(["--model", tiny, "--max-new-tokens", "8"])
    sampler = evaluation.load(config, rewarded=False)
    rows = rows_of("prompts", 6)
    right, _ = experiments.score(sampler.policy, sampler, rows)
    for prompt, row, probability in zip(experiments.encode(sampler, rows), rows, right):  # a token at a time
        ids, chance = list(prompt), 1.0
        for token in sampler.tokenizer(row["answer"] + sampler.tokenizer.eos_token)["input_ids"]:
            chance *= float(sampler.policy(torch.tensor([ids])).logits[0, -1].softmax(-1)[token])
            ids.append(token)
        assert probability == pytest.approx(chance, rel=1e-4)


# The list of runs on SmolLM2.

@pytest.mark.parametrize("loss, form", [(loss, form) for loss, forms in real.FORMS.items() for form in forms])
def test_every_form_of_smollm2_parses(loss, form):
    flags = real.Run("checked", loss, form, 2e-5, 4, 1).flags()
    config = humanline.parse_config(["--model", "m", *flags])
    assert config.loss.startswith(loss)
    assert (config.lr, config.seed, config.steps, config.eval_every) == (2e-5, 1, 64, 16)
    assert config.sync_k == 4 * (form == HUMANLINE or form.endswith("synced"))
    assert config.sample_every == (form == "online")


def test_no_topic_is_in_two_splits_and_each_gives_every_prompt_of_its_task():
    topics = real.split_topics()
    assert {split: len(set(some)) for split, some in topics.items()} == real.TOPICS
    assert not any(set(topics[one]) & set(topics[other]) for one, other in itertools.combinations(topics, 2))
    for task in real.TEMPLATES:
        rows = real.make_rows(task, "train")
        assert len({row["prompt"] for row in rows}) == len(rows) == 2 * real.TOPICS["train"] >= 600
        assert not any(re.search(r" a [aeiou]| an [^aeiou]", row["prompt"]) for row in rows)


def pretend_real(run: real.Run) -> dict:
    """What a run might give: humanline is best at 1e-5 and k 1, the others at 5e-6 or 2e-5."""
    best = {"plain": 5e-6, HUMANLINE: 1e-5}.get(run.form, 2e-5)
    level = {"plain": 0.7, HUMANLINE: 0.8}.get(run.form, 0.9)
    reward = level - 0.05 * abs(math.log2(run.lr / best)) - 0.01 * run.k + 0.001 * run.seed % 0.01
    measured = dict(reward=reward, greedy=reward, kl=3.0, length=20.0, distinct=0.8)
    sample = dict(prompt="Why?", completion="So.", reward=1.0)
    return dict(device="CPU", torch="2", steps=[0, 64], validation=[0.1, reward], validation_kl=[0.0, 3.0], best_step=64,
                seconds=9, drawing=0, test=measured, best=measured, samples=[sample] * 3)


def test_a_form_is_tested_when_its_tuning_is_complete_one_rate_further_at_the_edge():
    known, waves, seeds = {}, [], list(real.TEST_SEEDS["dpo"])
    while wave := real.plan("checked", "dpo", known, seeds):
        waves.append(wave)
        known |= {run: pretend_real(run) for run in wave}
    assert not any(run.is_test for run in waves[0])
    assert [len(wave) for wave in waves] == [18, 4 + 8, 2 + 2 + 8, 8]
    settings = [{(run.form, run.lr, run.k) for run in wave if not run.is_test} for wave in waves]
    assert settings[1] == {("plain", 5e-6, 0), (HUMANLINE, 5e-6, 4)}
    assert settings[2] == {(HUMANLINE, 1e-5, 1), (HUMANLINE, 1e-5, 16)}
    tests = [{(run.form, run.lr, run.k) for run in wave if run.is_test} for wave in waves]
    assert tests == [set(), {("online", 2e-5, 0)}, {("plain", 5e-6, 0)}, {(HUMANLINE, 1e-5, 1)}]
    for wave in waves:
        assert [run.seed for run in wave] == sorted(run.seed for run in wave)
    assert len(real.plan("checked", "dpo", known, [*seeds, *real.MORE_SEEDS])) == 24


def test_ties_of_settings_go_to_the_lower_rate_and_then_to_the_larger_k():
    settings = [(2e-5, 4), (1e-5, 4), (1e-5, 16), (4e-5, 4)]
    known = {
        real.Run("checked", "dpo", HUMANLINE, *setting, seed): {"validation": [0.5]}
        for setting in settings
        for seed in real.TUNING_SEEDS
    }
    assert real.ranked("checked", "dpo", HUMANLINE, known) == [(1e-5, 16), (1e-5, 4), (2e-5, 4), (4e-5, 4)]


def test_the_count_of_missing_runs_is_that_of_a_plan_without_edges():
    counts = {loss: real.count_missing("checked", loss, {}, list(real.TEST_SEEDS[loss])) for loss in real.FORMS}
    assert counts == {"dpo": 22 + 24, "kto": 22 + 24, "grpo": 48 + 18}


def test_samples_that_would_be_used_twice_are_refused():
    groups = [humanline.Group(i, [], [], [0.0, float(i < 512)]) for i in range(1000)]
    real.check_one_pass(groups)
    with pytest.raises(ValueError, match="64 steps of DPO need 512 pairs.* give 511: 511 of 999 prompts"):
        real.check_one_pass(groups[1:])


@pytest.fixture
def small_real(tiny, tmp_path, monkeypatch):
    """The experiment on SmolLM2, but with the tiny model, a few short prompts and a few steps."""
    small = dict(STEPS=4, EVERY=2, RATES=(3e-2,), TUNING_SEEDS=(101,), TOPICS=dict(test=3, validation=3, train=12),
                 TEST_SEEDS=dict(dpo=(1, 2), kto=(1, 2), grpo=(1, 2)), BATCH_SIZE=dict(dpo=4, kto=8, grpo=2),
                 TEMPLATES={"checked": {"{}": {}, "{}!": {}}, "sentiment": {}}, REWARDS=tmp_path / "rewards.py")
    for name, value in small.items():
        monkeypatch.setattr(real, name, value)
    reward = "def checked(prompts, completions, rows):\n  return [len(set(text)) / 40 for text in completions]\n"
    (tmp_path / "rewards.py").write_text(reward)
    monkeypatch.setattr(decide, "RESULTS", tmp_path)
    monkeypatch.setattr(decide, "LEVELS", {2: 0.05})
    monkeypatch.setattr(humanline.Run, "measure", humanline.Run.measure)  # so that it is put back
    real.write_rows("checked", tmp_path)
    yield SimpleNamespace(task="checked", model=tiny, rows=tmp_path, dry=False)
    real.load_base.cache_clear()


class InThisProcess(Executor):
    """A pool without workers."""

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.mark.slow
def test_the_chain_from_tuning_over_the_test_to_the_page(small_real):
    path = small_real.rows / "real-checked.jsonl"
    real.run_all(InThisProcess(), small_real, "dpo", [1, 2], path)
    stored = path.read_text()
    real.run_all(InThisProcess(), small_real, "dpo", [1, 2], path)
    assert path.read_text() == stored  # nothing is trained again
    known = real.read_results(path)
    assert len(known) == 2 + 2 + 4 + 6
    for run, outcome in known.items():
        assert outcome["steps"] == [0, 2, 4] and len(outcome["validation"]) == len(outcome["validation_kl"]) == 3
        assert abs(outcome["validation_kl"][0]) < 1e-3 < abs(outcome["validation_kl"][-1])
        assert len(outcome["samples"]) == 3 and ("test" in outcome) == run.is_test
        best = max(outcome["validation"])
        assert outcome["best_step"] == outcome["steps"][outcome["validation"].index(best)]
        if run.is_test:
            assert (outcome["test"]["reward"] == outcome["best"]["reward"]) == (outcome["best_step"] == 4)
    befores = {run.seed: set() for run in known}
    for run, outcome in known.items():
        befores[run.seed].add(outcome["validation"][0])
    assert all(len(values) == 1 for values in befores.values())
    compared = [decide.read_compared("checked", loss) for loss in real.FORMS]
    text = decide.page("checked", compared, decide.decide_task(compared))
    assert "| humanline | 0.0" in text or "| humanline | 3e-2" in text or "| humanline | 6e-2" in text
    assert "Runs are missing of" in text and "| KTO |  |" in text  # KTO and GRPO were not run
    assert [run for run, outcome in compared[0].known.items() if "is_shown" not in outcome] == []


@pytest.mark.slow
def test_a_part_of_the_plan_is_tuned_tested_and_decided(small_real, monkeypatch):
    monkeypatch.setattr(real, "STEPS", 16)
    monkeypatch.setattr(real, "TOPICS", dict(test=3, validation=3, train=40))
    real.write_rows("checked", small_real.rows)
    choices = [(form, 3e-2, 2 * (form == HUMANLINE)) for form in decide.COMPARED]
    part = method.Part("checked", "dpo", choices, range(1, 3))
    monkeypatch.setattr(method, "PATH", small_real.rows / "method.jsonl")
    monkeypatch.setattr(method, "PARTS", {"A": part})
    small_real.jobs = 1
    method.run_part(InThisProcess(), part, small_real)
    known = method.read_results()
    assert len(known) == 3 * 3 and all(outcome["steps"] == [0, 8, 16] for outcome in known.values())
    text = method.page(known)
    assert "Complete. Tuning: CPU in float32, one thread. Test: CPU in float32, one thread." in text
    assert "| share of the gap after | step 8 | step 16 |" in text
    assert "| loss | seeds | gap: online − plain |" in text and len(method.ways(known)) == 1
    [compared] = method.compared(known)
    assert [len(rewards) for rewards in decide.final_rewards(compared)] == [2, 2, 2]


def test_the_forms_of_a_test_seed_are_run_on_the_same_samples():
    known = {real.Run("checked", "grpo", "plain", 1e-5, 0, seed): dict(
        device="CPU", validation=[0.1, 0.3], validation_kl=[0.2, 3.0]) for seed in (1, 2, 101)}
    of_seed = lambda seed, task="checked", kl=0.4, device="CPU", form="better alone": dict(
        task=task, loss="grpo", form=form, seed=seed, device=device, validation=[0.1, 0.9], validation_kl=[kl, 3.0])
    real.check_paired(known, of_seed(101))  # tuning is not paired
    real.check_paired(known, of_seed(3))
    real.check_paired(known, of_seed(2, kl=0.2))
    real.check_paired(known, of_seed(1, form="online"))  # it uses no offline data
    real.check_paired(known, of_seed(1, "sentiment"))  # method.py has both tasks in one file
    with pytest.raises(SystemExit, match="seed 1 of GRPO was begun on another machine"):
        real.check_paired(known, of_seed(1))
    with pytest.raises(SystemExit, match="seed 2 of GRPO was begun on another machine"):
        real.check_paired(known, of_seed(2, kl=0.2, device="CPU without bf16"))  # `before` was measured on the first


def test_after_an_error_no_run_is_trained_for_nothing(small_real):
    class Failing(InThisProcess):
        """Draws data; the first run fails, and the others wait."""

        def submit(self, function, *arguments):
            if function is not real.train:
                return super().submit(function, *arguments)
            future = Future()
            if not waiting:
                future.set_exception(RuntimeError("no memory"))
            waiting.append(future)
            return future

    waiting = []
    with pytest.raises(RuntimeError, match="no memory"):
        real.run_all(Failing(), small_real, "dpo", [1], small_real.rows / "real-checked.jsonl")
    assert len(waiting) > 1 and all(future.cancelled() for future in waiting[1:])


@pytest.mark.parametrize("loss, form", [
    ("kto", HUMANLINE), pytest.param("kto", "online", marks=pytest.mark.slow),
    pytest.param("grpo", "mask 0.1, synced", marks=pytest.mark.slow)])
def test_other_losses_run_on_smollm2s_data_too(small_real, loss, form):
    real.draw_base("checked", small_real.model, small_real.rows, 1)
    drawn = [json.loads(line) for line in (small_real.rows / "checked-1.jsonl").read_text().splitlines()]
    assert len(drawn) == 24 * 8 and all(len(line["tokens"]) == len(line["logps"]) for line in drawn)
    outcome = real.train(real.Run("checked", loss, form, 1e-2, 2, 1), small_real.model, small_real.rows)
    assert outcome["test"].keys() == set(real.MEASURES) and (outcome["drawing"] >= 0)


# The decision on SmolLM2.

def made_up(share: float, gap: float, seeds: int = 8, spread: float = 0.01) -> decide.Rewards:
    """Rewards of plain, humanline and online whose means differ exactly as said, with a spread over seeds."""
    noise = np.random.default_rng(seeds).normal(0, spread, (3, seeds))
    noise -= noise.mean(axis=1, keepdims=True)
    plain, ours, online = noise + 0.6 + gap * np.array([[0], [share], [1]])
    return plain, ours, online


@pytest.mark.parametrize("rewards, outcome", [
    (made_up(0.9, 0.2), "held"),
    (made_up(0.1, 0.2), "not here"),
    (made_up(0.5, 0.2), "undecided; eight more seeds"),
    (made_up(0.5, 0.2, seeds=16), "undecided"),
    (made_up(0.9, 0.02), "no gap here, the claim cannot be tested"),
    (made_up(0.9, 0.2, spread=0.2), "no gap here, the claim cannot be tested"),
    (None, "incomplete")])
def test_the_rule_decides_each_loss(rewards, outcome):
    decisions = decide.decide({"dpo": rewards, "kto": made_up(0.9, 0.2)})
    assert decisions["dpo"]["outcome"] == outcome and decisions["kto"]["outcome"] == "held"


def test_parity_asks_for_equivalence_and_not_for_a_large_share():
    near, far = made_up(0.99, 0.2, spread=0.005), made_up(0.8, 0.2, spread=0.005)
    decisions = decide.decide({"dpo": near, "kto": far})
    assert decisions["dpo"]["p_parity"] < 0.05 < decisions["kto"]["p_parity"]
    assert [decision["outcome"] for decision in decisions.values()] == ["held", "held"]


def test_holms_method_counts_both_losses():
    wave = np.array([1, -1] * 4) / 100
    slow_wave = np.array([1, 1, -1, -1] * 2) / 100
    rewards = np.full(8, 0.6), 0.7157 + wave, 0.8 + slow_wave
    p = decide.weigh(*rewards)["p_half"]
    assert 0.005 < p < 0.01  # enough for one loss, too little for one of two
    assert decide.decide({"dpo": rewards})["dpo"]["outcome"] == "held"
    assert decide.decide({"dpo": rewards, "kto": None})["dpo"]["outcome"] == "undecided; eight more seeds"
    assert decide.decide({"dpo": rewards, "kto": made_up(0.9, 0.2)})["dpo"]["outcome"] == "held"


def on_the_way(seeds: int = 8) -> decide.Compared:
    """A decided loss whose plain form reaches 0.9 and falls back, humanline the same but more slowly, and online stays."""
    ways = {"plain": ([0.1, 0.9, 0.6], [0.0, 6.0, 15.0]), HUMANLINE: ([0.1, 0.7, 0.9], [0.0, 3.0, 6.0]),
            "online": ([0.1, 0.99, 0.99], [0.0, 9.0, 9.0])}
    noise = np.random.default_rng(0).normal(0, 0.01, (3, seeds))
    one = object.__new__(decide.Compared)
    one.task, one.loss, one.seeds, one.tests = "checked", "dpo", seeds, {}
    for (form, (rewards, distances)), noises in zip(ways.items(), noise):
        one.tests[form] = {
            seed: dict(steps=[0, 32, 64], validation=[reward + noises[seed - 1] for reward in rewards],
                       validation_kl=distances, test=dict(reward=rewards[-1] + noises[seed - 1]))
            for seed in range(1, seeds + 1)}
    return one


def test_the_share_of_the_gap_depends_on_the_step_where_two_forms_are_on_one_curve():
    doubts = on_the_way().doubts()
    early, late = (doubts["share_at"][step] for step in (32, 64))
    assert early[0] == pytest.approx(-0.2 / 0.09, rel=0.2) and late[0] == pytest.approx(0.3 / 0.39, rel=0.05)
    at = doubts["equally_far"]["5 to 8"]
    assert (at["plain"], at[HUMANLINE], at["online"]) == (pytest.approx(0.9, abs=0.01), pytest.approx(0.9, abs=0.01), None)
    assert abs(at["difference"]["mean"]) < 0.03
    assert doubts["equally_far"]["12 to 20"]["difference"] is None and doubts["equally_far"]["20 and more"]["plain"] is None
    one = on_the_way()
    last = [run["validation"][-1] for run in one.tests["plain"].values()]
    assert doubts["tuning_error"]["plain"] == pytest.approx(np.std(last, ddof=1))
    one.seeds = None
    assert one.doubts() is None


def test_the_page_of_a_decision_opens_with_it_and_says_what_it_hangs_on():
    text = "\n".join(decide.doubt_tables("checked", {"dpo": on_the_way().doubts()}))
    assert "| share of the gap after | step 32 | step 64 |" in text and "| DPO | 5 to 8 | 0.9" in text
    page = (CLAIMS / "real-checked.md").read_text()
    assert page.splitlines()[2].startswith("**DPO: not here. KTO: not here.**")
    assert page.index("## What the decision hangs on") < page.index("## The rule") < page.index("## Settings")


@pytest.mark.slow
def test_the_page_grows_with_the_runs_and_reads_every_one(tmp_path, monkeypatch):
    monkeypatch.setattr(decide, "RESULTS", tmp_path)
    known = {}
    for loss in real.FORMS:
        while wave := real.plan("checked", loss, known, list(real.TEST_SEEDS[loss])):
            known |= {run: pretend_real(run) for run in wave}
            write_jsonl(tmp_path / "real-checked.jsonl", [vars(run) | outcome for run, outcome in known.items()])
            compared = decide.read_tasks()["checked"]
            text = decide.page("checked", compared, decide.decide_task(compared))
            assert unread_real(compared) == []
    assert f"{len(known)} runs of" in text and "Runs are missing" not in text
    [cell] = reproduce.taper_cells_of_smollm2(compared[2])  # all neighbours end alike: the first one
    assert (cell["neighbour"], cell["seeds"]) == ("better alone", 3) and cell["mean"] == pytest.approx(-0.11)
    row = reproduce.methods_table([], compared).splitlines()[4]
    assert row == "| GRPO, better completions alone | 0.902 ± 0.002 |"
    compared[2].tests["mask 0.1"].pop(3)
    assert reproduce.taper_cells_of_smollm2(compared[2]) == []  # not from a part of the seeds
    undecided = {loss: {"outcome": decide.NEEDS_MORE} for loss in decide.DECIDED}
    text = decide.page("checked", compared, undecided)
    forms = "*humanline*, *online*, *plain* (some 24)"  # 8 seeds each
    assert f"missing of DPO: {forms}; KTO: {forms}." in text
    [more, *_] = real.plan("checked", "dpo", known, [*real.TEST_SEEDS["dpo"], *real.MORE_SEEDS])
    before = decide.read_compared("checked", "dpo").facts()
    write_jsonl(tmp_path / "real-checked.jsonl", [vars(run) | pretend_real(run) for run in [*known, more]])
    compared = decide.read_tasks()["checked"]
    assert unread_real(compared) == [] and compared[0].facts() == before  # no verdict with a part of the seeds
    assert "seeds from 9 on, which count once all of them are there: 1." in decide.page("checked", compared, undecided)
    extra = real.Run("checked", "dpo", "plain", 4e-5, 0, 1)  # a test seed at a setting that was not chosen
    write_jsonl(tmp_path / "real-checked.jsonl", [vars(run) | pretend_real(run) for run in [*known, extra]])
    assert len(unread_real(decide.read_tasks()["checked"])) == 1
    begun = [run for run in known if run.form != "mask 0.1, synced" or run.lr == 1e-5]
    write_jsonl(tmp_path / "real-checked.jsonl", [vars(run) | pretend_real(run) for run in begun])
    compared = decide.read_tasks()["checked"]
    assert row in reproduce.methods_table([], compared)  # the other forms are judged without it
    text = decide.page("checked", compared, decide.decide_task(compared))
    assert "missing of GRPO: *mask 0.1, synced* (some" in text and unread_real(compared) == []


def unread_real(compared: list[decide.Compared]) -> list[dict]:
    """The stored runs of real.py that no table reads."""
    decide.page("checked", compared, decide.decide_task(compared))
    runs = [outcome for one in compared for outcome in one.known.values()]
    return [run for run in runs if not run.pop("is_shown", False)]


# The estimates.

def test_an_estimate_is_students_t_and_a_pair_takes_away_the_luck_of_its_seed():
    assert reproduce.estimate([1, 2, 3, 4, 5]) == pytest.approx([3, 2.776445 * math.sqrt(2.5 / 5)])
    assert reproduce.estimate([3, math.nan]) == [3, pytest.approx(math.nan, nan_ok=True)]
    ours, theirs = np.array([0.8, 0.7, 0.9]), np.array([0.5, 0.4, 0.6])
    paired, not_paired = (reproduce.compare(ours, theirs, paired) for paired in (True, False))
    assert [paired["mean"], not_paired["mean"]] == pytest.approx([0.3, 0.3])
    assert paired["high"] - paired["low"] < 1e-9 and not_paired["high"] - 0.3 == pytest.approx(0.2267, abs=1e-4)


def test_one_seed_and_equal_runs_decide_nothing_that_they_cannot():
    one = reproduce.compare(np.array([0.9]), np.array([0.5]))
    assert one["p"] == one["p_same"] == 1 and reproduce.show_difference(one) == "+0.400"
    same = reproduce.compare(np.array([0.9, 0.8]), np.array([0.9, 0.8]))
    assert same["p"] == 1 and same["p_same"] < 1e-6


@pytest.mark.slow
def test_two_one_sided_tests_rarely_call_a_difference_of_the_margin_the_same():
    chance, called = np.random.default_rng(0), {0.0: 0, reproduce.MARGIN: 0}
    for true in called:
        for _ in range(1000):
            found = reproduce.compare(chance.normal(true, 0.005, 5), np.zeros(5))
            called[true] += found["p_same"] < 0.05
    assert called[0.0] > 950 and 30 <= called[reproduce.MARGIN] <= 70


def test_the_share_of_the_gap_has_an_honest_interval():
    chance, covered = np.random.default_rng(0), 0
    for _ in range(1000):  # humanline closes 60% of a gap of 0.2; seeds share their luck
        luck = chance.normal(0, 0.02, 5)
        offline, ours, online = (level + luck + chance.normal(0, 0.02, 5) for level in (0.6, 0.72, 0.8))
        _, low, high = reproduce.share_of_gap(offline, ours, online)
        covered += low <= 0.6 <= high
    assert 930 <= covered <= 970
    nothing = reproduce.share_of_gap(offline, offline + 0.1, offline + chance.normal(0, 0.1, 5))
    assert reproduce.show_share(nothing).endswith("[too few seeds to tell]")
    assert reproduce.show_share([0.22, -89.7, 0.71]) == "22% [too few seeds to tell]"
    same = np.array([0.6, 0.5, 0.7])  # luck that all three share cancels in pairs alone
    paired, not_paired = (reproduce.share_of_gap(same, same + 0.1, same + 0.4, paired) for paired in (True, False))
    assert paired == pytest.approx([0.25, 0.25, 0.25])
    assert not_paired[1] < 0 < 0.5 < not_paired[2]


def test_holm_multiplies_by_what_is_left_and_keeps_the_order():
    assert reproduce.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert reproduce.holm([0.9, 0.6]) == [1, 1]


def test_between_two_measurements_a_reward_levels_off():
    run = {"kl 0": 0.0, "reward 0": 0.2, "kl 8": 2.0, "reward 8": 0.6, "kl 16": 18.0, "reward 16": 0.9}
    for kl, reward in ((2.0, 0.6), (18.0, 0.9), (10.0, 0.8)):  # 1 - sqrt(0.4 · 0.1); a line: 0.75
        assert first_real.reward_at(run, kl) == pytest.approx(reward)
    for kl in (1.0, 18.1):
        assert math.isnan(first_real.reward_at(run, kl))


def test_both_ways_to_collapse_are_counted():
    runs = [dict(test=curve) for curve in ([0.6, 0.9, 0.4], [0.6, 0.9, 0.7], [0.6, 0.5, 0.55])]
    assert reproduce.collapsed(runs, "test") == [1, 2, 3]


# The rules.

def pretend(run: Run) -> dict:
    """What a run might give: best at 2e-4, online and taper above humanline above plain."""
    level = dict(plain=0.7, online=0.95).get(run.form, 0.8 if "taper" not in run.form else 0.94)
    end = level - 0.05 * abs(math.log2(run.lr / 2e-4)) + 0.001 * run.seed % 0.01
    return dict(validation=[0.65, end], test=[0.65, end], greedy=[0, 0], base_kl=[0, 1])


def test_the_plan_ends_with_every_form_tuned_and_tested(monkeypatch):
    known = {}
    while missing := experiments.plan(TASKS["six-digits"], known, ([101, 102], [1, 2, 3, 4, 5])):
        known |= {run: pretend(run) for run in missing}
    monkeypatch.setattr(experiments, "read_results", lambda path: known)
    tuned = reproduce.Tuned("six-digits")
    assert tuned.is_complete and len(tuned.forms) == sum(len(experiments.forms_of("six-digits", loss)) for loss in FORMS_OF)
    assert {form.lr for form in tuned.forms.values()} == {2e-4}
    assert tuned.share("dpo", HUMANLINE) == pytest.approx([0.4, 0.4, 0.4])
    assert tuned.best_neighbour("kto").startswith("desirable alone") and not unread([tuned], [])
    known[Run("six-digits", "dpo", "plain", 1e-4, 0, 1)] = pretend(Run("six-digits", "dpo", "plain", 1e-4, 0, 1))
    tuned = reproduce.Tuned("six-digits")  # a test base at settings that were chosen earlier
    assert "plain at 1e-4" in reproduce.task_page(tuned, {loss: tuned.facts(loss) for loss in FORMS_OF})
    del known[Run("six-digits", "dpo", "plain", 2e-4, 0, 102)]
    tuned = reproduce.Tuned("six-digits")
    assert not tuned.is_complete and ("dpo", "plain") not in tuned.forms and ("dpo", "online") in tuned.forms


def test_a_form_that_ends_below_its_base_is_tried_at_lower_rates_with_every_k():
    known, waves, task, form = {}, [], TASKS["six-digits"], "RPO, synced"
    while wave := experiments.Plan(task, "dpo", known, [101, 102], [1, 2, 3, 4, 5]).other(form):
        waves.append(wave)
        known |= {run: dict(validation=[0.65, 0.7 if run.lr < 3e-5 else 0.1 / run.lr * 1e-5]) for run in wave}
    assert [len(wave) for wave in waves] == [6, 5, 2, 2, 4, 5]
    assert {(run.lr, run.k) for run in waves[4]} == {(2.5e-5, 8), (2.5e-5, 24)}
    assert {(run.lr, run.k) for run in waves[-1]} == {(2.5e-5, 24)}
    known = {run: dict(validation=[0.65, 0.1]) for run in known if run.seed > 100}
    while wave := experiments.Plan(task, "dpo", known, [101, 102], []).other(form):
        known |= {run: dict(validation=[0.65, 0.1]) for run in wave}
    assert min(run.lr for run in known) == 1e-4 / 2**experiments.HALVINGS


def test_the_compared_forms_share_their_rates_which_go_on_while_one_is_best_at_an_edge():
    task, known, waves = TASKS["six-digits"], {}, []
    best = dict.fromkeys(experiments.COMPARED, 2e-4) | {"sync alone": 2.5e-5, "online": 8e-4}
    while wave := experiments.Plan(task, "kto", known, [101, 102], [1, 2]).sharing(experiments.COMPARED):
        waves.append(wave)
        for run in wave:
            end = 0.9 - 0.05 * abs(math.log2(run.lr / best[run.form])) - 0.001 * abs(run.k - 8)
            known[run] = dict(validation=[0.3, end])
    assert {run.lr for run in known} == {1.25e-5, 2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3}
    for form in experiments.COMPARED:
        of_form = [run for run in known if run.form == form]
        ks = (8, 24, 64) if "sync" in form or form == HUMANLINE else (0,)
        assert {(run.lr, run.k) for run in of_form if run.seed == 101} == set(
            itertools.product(sorted({run.lr for run in known}), ks))
        assert {(run.lr, run.k) for run in of_form if run.seed < 100} == {(best[form], ks[0])}
    assert not any(run.seed < 100 for wave in waves[:-1] for run in wave) and len(waves[-1]) == 10
    known = {run: dict(validation=[0.65, 0.1]) for run in known}
    while wave := experiments.Plan(task, "kto", known, [101, 102], []).sharing(experiments.COMPARED):
        known |= {run: dict(validation=[0.65, 0.1]) for run in wave}
    assert min(run.lr for run in known) == 1e-4 / 2**experiments.FURTHER


@pytest.mark.parametrize("differences, unfinished, outcome", [
    ((0.02, 0.02, 0.0), 0, "stays"), ((0.02, 0.0, 0.0), 0, "goes"), ((0.02, 0.02, -0.03), 0, "goes"),
    ((0.02, 0.0, 0.0), 1, "open"), ((0.0, 0.0, 0.0), 1, "goes"), ((-0.03, 0.02, 0.02), 1, "goes")])
def test_the_taper_stays_where_it_is_above_its_best_neighbour_on_two_tasks(differences, unfinished, outcome):
    def task(i: int, difference: float):
        found = dict(mean=difference, low=difference - 0.01, high=difference + 0.01)
        return SimpleNamespace(name=f"task {i}", is_complete=i >= unfinished, best_neighbour=lambda loss: "RPO",
                               compare=lambda loss, form, other: found if loss == "dpo" and form == TAPERED else None)

    tasks = [task(i, difference) for i, difference in enumerate(differences)]
    assert reproduce.taper_rule(tasks)["outcome"] == outcome


@pytest.mark.parametrize("high, unfinished, outcome", [(-0.03, 1, "stays"), (-0.01, 0, "goes"), (-0.01, 1, "open")])
def test_the_prior_stays_where_a_cell_is_surely_worse_without_it(high, unfinished, outcome):
    found = dict(mean=high - 0.01, low=high - 0.02, high=high)
    tuned = SimpleNamespace(name="t", is_complete=not unfinished, compare=lambda *names: found)
    assert reproduce.prior_rule([tuned])["outcome"] == outcome


# What is stored, and the pages.

def unread(tasks, cells) -> list[dict]:
    """The stored runs that no table reads."""
    for tuned in tasks:
        reproduce.task_page(tuned, {loss: tuned.facts(loss) for loss in FORMS_OF})
    if cells:
        first_real.page(cells, [first_real.facts_of(cell) for cell in cells])
    runs = [run for tuned in tasks for run in tuned.known.values()]
    runs += [run for cell in cells for by_seed in (*cell.forms.values(), cell.tuning) for run in by_seed.values()]
    return [run for run in runs if not run.pop("is_shown", False)]


@pytest.fixture(scope="module")
def everything():
    return reproduce.Everything()


def test_every_stored_run_is_read_by_a_table(everything):
    assert unread(everything.tasks, everything.cells) == []
    count = sum(len(tuned.known) for tuned in everything.tasks)
    count += sum(len(by_seed) for cell in everything.cells for by_seed in (*cell.forms.values(), cell.tuning))
    files = {path.name for path in (CLAIMS / "results").glob("*.jsonl")}
    files -= {"fits.jsonl", "bench.jsonl", "demo.jsonl", "demo-tuning.jsonl"}  # of test_fits, test_docs and test_demo
    for compared in everything.compared.values():
        assert unread_real(compared) == []
        count += sum(len(one.known) for one in compared)
    method.page(everything.more)
    assert all("is_shown" in outcome for outcome in everything.more.values())
    count += len(everything.more)
    of_smollm2 = {"real.jsonl", "method.jsonl", *(f"real-{task}.jsonl" for task in real.TEMPLATES)}
    assert files <= of_smollm2 | {f"tuned-{name}.jsonl" for name in TASKS}
    assert count == sum(len((CLAIMS / "results" / name).read_text().splitlines()) for name in files)


def test_the_pages_are_those_that_the_stored_runs_give(everything):
    stale = [name for name, text in everything.pages().items() if (CLAIMS / name).read_text() != text]
    assert stale == [], "python tests/claims/reproduce.py draws them anew"


@pytest.mark.slow
def test_the_figures_are_drawn(everything, tmp_path):
    everything.draw(tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    assert {"two-digits.png", "mechanism.png", "gap.png", "real.png", "real-checked.png", "method.png"} <= made
    assert [name for name in made if not (CLAIMS / name).exists()] == []


RENAMED = re.compile("taper|better|RPO|chosen|desirable")


def test_the_flags_of_stored_runs_are_those_of_today(everything):
    for tuned in everything.tasks:
        for run, outcome in tuned.known.items():
            flags, stored = run.flags(), outcome["flags"].split()
            assert flags == stored or RENAMED.search(run.form)
            assert flags[flags.index("--lr") :] == stored[stored.index("--lr") :]
    all_flags = {flags.partition(" ")[2].partition(" --seed")[0] for flags in first_real.read_results()}
    of_today = {flags for flags in all_flags if not re.search("--stale|--taper|--prior", flags)}
    assert len(of_today) > len(all_flags) / 2
    for flags in of_today:
        humanline.parse_config(["--model", "m", *flags.split()])


def test_the_tuned_settings_of_smollm2_are_runs_on_three_seeds(everything):
    for cell in everything.cells:
        for name in FORMS_OF["dpo"].keys() & first_real.FORMS_OF[cell.loss].keys():
            assert cell.at_tuned(name).keys() == {1, 2, 3}, (cell.task, cell.loss, name)


@pytest.mark.parametrize("then, now", [
    ("checked --loss dpo --sync-k 4 --stale taper --prior 0 --lr 2e-5", "checked --loss dpo --sync-k 4 --taper --lr 2e-5"),
    ("checked --loss grpo --stale keep --prior 0 --lr 2e-5", "checked --loss grpo --lr 2e-5"),
    ("checked --loss grpo --stale taper --prior 1 --lr 2e-5", "checked --loss grpo --taper --prior 1 --lr 2e-5"),
    ("checked --loss dpo --sync-k 4 --stale taper --prior 1 --lr 2e-5", None),
    ("checked --loss grpo --sync-k 8 --stale drop --prior 1 --seed 1", None)])
def test_flags_of_then_are_called_as_today_and_what_is_gone_keeps_its_name(then, now):
    assert first_real.today(then) == (now or then)


def test_metrics_are_read_under_the_names_of_today(tmp_path):
    line = dict(task="two-digits", loss="grpo", form="plain", lr=1e-4, k=0, seed=1, clip_low=[0.1], clamped_low=[0.2])
    write_jsonl(tmp_path / "runs.jsonl", [line])
    [outcome] = experiments.read_results(tmp_path / "runs.jsonl").values()
    assert outcome["clip_fraction_low"] == [0.1] and outcome["clamped_low"] == [0.2] and "clip_low" not in outcome


def test_one_family_of_tests_is_one_claim_and_one_loss(everything):
    families = {}
    for verdict in everything.verdicts:
        families.setdefault((verdict["claim"], verdict["loss"]), []).append(verdict)
    assert sorted(map(len, families.values())) == [3, 3, 3, 3, 5, 5, 5]
    for family in families.values():
        assert [one["p_asked_holm"] for one in family] == reproduce.holm([one["p_asked"] for one in family])
        for one in family:
            is_better = reproduce.BETTER in one["claim"]
            if one["outcome"] == "held":
                assert one["p_asked_holm"] < 0.05 and (one["mean"] > 0 or not is_better)
            if one["outcome"] == "not here":
                assert one["p_against_holm"] < 0.05 and (one["mean"] < 0 if is_better else abs(one["mean"]) > 0.02)
    of_grpo = [one["outcome"] for one in families[f"{HUMANLINE} is {reproduce.BETTER} plain", "GRPO"]]
    assert of_grpo == ["undecided", "held", "held", "held", "held"]


TEXTS = {"README.md": ROOT} | {f"{name}.md": CLAIMS for name in ("report", "neighbours", "how")}


@pytest.mark.parametrize("name", TEXTS)
def test_the_figures_of_the_texts_are_those_of_the_pages(name):
    plain = lambda path: re.sub(r"[\s%+]", "", path.read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-"))
    pages = "".join(plain(CLAIMS / page) for page in (
        "two-digits.md", "five-sorted.md", "six-digits.md", "verdicts.md", "real.md", "real-checked.md", "method.md"))
    figure = r"-?0\.\d{3}±0\.\d{3}|-?\d+\[-?\d+,-?\d+\]" + r"|0\.\d{3}" * (name != "README.md")  # it has a demo's, too
    figures = re.findall(figure, plain(TEXTS[name] / name))
    assert [figure for figure in figures if figure not in pages] == []


VERDICTS = "held", "partly", "not here", "undecided"


def verdict_rows(text: str) -> list[list[str]]:
    """The rows of a table, without emphasis, that have a verdict in their second cell."""
    rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if len(row) > 2 and row[1] in VERDICTS]


def test_the_verdicts_of_report_and_readme_are_those_that_are_computed(everything):
    answers = {one["claim"]: (one["verdict"], one["number"]) for one in everything.answers}
    of_report, of_readme = (verdict_rows(path.read_text()) for path in (CLAIMS / "report.md", ROOT / "README.md"))
    assert [row[0] for row in of_report] == list(answers)
    for claim, verdict, number, *_ in of_report + of_readme:
        assert claim in answers, "copy the claim, verdict and number of a row of report.md"
        assert (verdict, number.replace("*", "")) == (answers[claim][0], answers[claim][1].replace("*", ""))


def test_the_rates_of_the_readme_are_those_tuned_here(everything):
    checked = {one.loss: one for one in everything.compared["checked"]}
    rows = re.findall(r"^(GRPO|DPO|KTO) .* --lr (\S+)( --beta 1)? (--no-humanline|--sync-k \d+)$",
                      (ROOT / "README.md").read_text(), re.M)
    assert [loss for loss, *_ in rows] == ["GRPO", "DPO", "KTO"]
    for loss, lr, beta, form in rows:
        tuned = checked[loss.lower()].settings["plain" if form == "--no-humanline" else HUMANLINE]
        if beta:
            tuned, at_1, at_usual = at_beta_1(everything)["plain"]
            online = at_beta_1(everything)["online"][2]
            share = f"`--beta 1` alone closes {(at_1 - at_usual) / (online - at_usual):.0%} of DPO's gap on *checked*"
            assert loss == "DPO" and at_1 > at_usual and share in " ".join((ROOT / "README.md").read_text().split())
        assert (float(lr), *map(int, form.split()[1:])) == (tuned if tuned[1] else tuned[:1])


def test_the_readme_gives_what_grpo_gains_without_its_ratio_clip(everything):
    shares = [forms[NO_CLIP][0] for (loss, _), forms in everything.shares().items() if loss == "grpo"]
    said = f"Plain GRPO without its ratio clip (`--epsilon 1000`) closes {min(shares):.0%} to {max(shares):.0%} of it"
    assert len(shares) == 5 and said in " ".join((ROOT / "README.md").read_text().split())


def at_beta_1(everything):
    """DPO on checked, by form: the best setting at beta 1, and the mean test reward there and at 0.1."""
    part, known = method.PARTS["C"], everything.more
    usual = part.runs_beside()

    def tested(runs, form):
        rewards = [runs[run]["test"]["reward"] for run in runs if run.form == form and run.is_test]
        return np.mean(rewards) if rewards else None

    found = {}
    for form in real.FORMS["dpo"]:
        tuned = [choice for choice in part.tuning if choice[0] == f"{form}, beta 1"
                 and all(part.run(choice, seed) in known for seed in real.TUNING_SEEDS)]
        best = max(tuned, key=lambda choice: part.mean(choice, known), default=(form, None))  # none of online
        found[form] = best[1:], tested(part.stored(known), best[0]), tested(usual, form)
    return found


def prose_of(path) -> str:
    """A Markdown text without tables and comments."""
    text = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("|"))
    return re.sub("<!--.*?-->", "", text)


def test_the_report_is_short():
    prose = prose_of(CLAIMS / "report.md")
    words, numbers = len(prose.split()), len(re.findall(r"\d[\d.,]*", re.sub(r"\]\([^)]*\)", "]", prose)))
    assert words <= 900 and numbers <= 0.08 * words


def test_what_the_report_says_in_numbers_is_computed(everything):
    prose = " ".join(prose_of(CLAIMS / "report.md").split())
    checked = {one.loss: one for one in everything.compared["checked"]}
    decisions = everything.decisions["checked"]
    doubts = {loss: checked[loss].doubts() for loss in decide.DECIDED}
    assert [decisions[loss]["outcome"] for loss in decide.DECIDED] == ["not here", "not here"]
    no_clip = everything.smollm2["sentiment", "grpo"][NO_CLIP]["share_of_gap"][0]
    part = method.PARTS["D"]
    tests = method.by_choice({run: one for run, one in (part.stored(everything.more) | part.runs_beside()).items() if run.is_test})
    control = {form: {what: np.mean([one["test"][what] for one in outcomes.values()]) for what in ("reward", "kl")}
               for (form, *_), outcomes in tests.items()}
    assert control[reproduce.SYNCED_NO_CLIP]["reward"] < control[NO_CLIP]["reward"] and set(map(len, tests.values())) == {3}
    assert part.plan(everything.more) == [] and control[HUMANLINE]["kl"] < control[NO_CLIP]["kl"]
    errors = [doubts[loss]["tuning_error"][form] for loss in decide.DECIDED for form in ("plain", HUMANLINE)]
    shares = [doubts["dpo"]["share_at"][step][0] for step in (32, 64)]
    at_highest = checked["grpo"].facts()
    assert checked["grpo"].settings["plain"][0] == checked["kto"].settings["plain"][0] == 8e-5
    assert checked["kto"].settings[HUMANLINE][1] == max(real.OTHER_KS) == 16
    at_lower = method.PARTS["B"].compared(everything.more)
    gain, ends_at = at_lower.compare(HUMANLINE, "plain"), np.mean(at_lower.rewards("test", HUMANLINE))
    assert gain["seeds"] == 16 and gain["p"] < 0.001
    assert decide.decide({"dpo": decide.final_rewards(at_lower)})["dpo"]["outcome"] == decide.NOT_HERE
    assert all(at_lower.settings[form][0] < checked["dpo"].settings[form][0] for form in ("plain", HUMANLINE))
    said = [
        f"humanline ended {at_highest[HUMANLINE]['minus_plain']['mean']:.3f} above plain",
        f"On *sentiment*, plain GRPO without the clip closes {no_clip:.0%} of the gap",
        f"Tuned alike on *checked*, three seeds, it ends at {control[NO_CLIP]['reward']:.3f}, with a sync at "
        f"{control[reproduce.SYNCED_NO_CLIP]['reward']:.3f}, humanline at {control[HUMANLINE]['reward']:.3f}, nearer to the base",
        f"DPO closed {decisions['dpo']['share'][0]:.0%}; KTO ended below plain",
        f"differ by chance by {min(errors):.2f} to {max(errors):.2f}",
        f"humanline closes {shares[0]:.0%} of the gap at step 32, and {shares[1]:.0%} at step 64",
        f"except DPO on *checked* at lower rates, by {gain['mean']:.3f}",
        f"humanline ends at {ends_at:.3f}, {gain['mean']:.3f} ± {gain['high'] - gain['mean']:.3f} above plain",
        f"It closes {at_lower.share('test', HUMANLINE)[0]:.0%} of the gap",
        f"k {max(real.OTHER_KS)} (KTO) and the rate 8e-5 (plain GRPO and KTO) are the largest",
        "1e-5 is the lowest with β 1",
        "less than 4% of the tokens", "out of [0.8, 1.2]", "From 8 nats on",
        "Nothing above 135 M parameters", "SmolLM2-135M", "SmolLM2", "pass@1", "temperature 1", "95% intervals",
        "at 8B", "in bf16", "the ratio back to 1",
    ]
    ends = {}  # of plain at beta 0.1, and at the other beta that is better on validation
    for loss, tuned in itertools.product(decide.DECIDED, everything.tasks[1:]):
        others = [plain for plain, _ in experiments.AT_BETA.values()]
        chosen = max(others, key=lambda form: tuned.forms[loss, form].validation)
        ends[loss, tuned.name] = [f"{np.mean(tuned.ends(loss, form)[0]):.3f}" for form in ("plain", chosen)]
        assert loss == "dpo" or tuned.compare(loss, chosen, "online")["mean"] > 0
    dpo, kto = ([ends[loss, tuned.name] for tuned in everything.tasks[1:]] for loss in decide.DECIDED)
    (at_best, at_1, at_01), (synced_best, synced, _), (_, _, online) = at_beta_1(everything).values()
    part = method.PARTS["C"]
    assert abs(ends_at - at_1) < 0.02  # humanline at lower rates comes as far as plain at beta 1
    assert at_best[0] == synced_best[0] == min(lr for _, lr, _ in part.tuning) == 1e-5
    early = {form: np.mean([outcome["best"]["reward"] for run, outcome in part.stored(everything.more).items()
                            if run.form == f"{form}, beta 1" and run.is_test]) for form in ("plain", HUMANLINE)}
    assert len(everything.held_back) == 6 and not any(one["outcome"] for one in everything.held_back)
    [gain] = [one for one in everything.held_back if one["low"] > 0]
    assert (gain["loss"], gain["task"], gain["beta"]) == ("dpo", "six-digits", 10)
    said += [
        "All of this is at β 0.1", "we tuned β 1 and 10", "online only at 0.1",
        f"β 1 lifts plain DPO from {at_01:.3f} to {at_1:.3f}, {(at_1 - at_01) / (online - at_01):.0%} of the way to online",
        f"At β 1 humanline's best step earns {early[HUMANLINE]:.3f}, plain's {early['plain']:.3f}; it then falls to {synced:.3f}",
        f"plain KTO ends at {kto[0][1]} and {kto[1][1]}", f"plain DPO at {dpo[0][1]} and {dpo[1][1]}",
        f"against {dpo[0][0]} and {dpo[1][0]}",
        f"DPO on long sums with β 10, by {gain['mean']:.3f} ± {gain['high'] - gain['mean']:.3f}",
    ]
    [on_sentiment] = method.compared(everything.more)
    lead, lag = on_sentiment.compare(HUMANLINE, "plain"), on_sentiment.compare("online", HUMANLINE)
    said.append(f"too small to tell: humanline ends {lead['mean']:.3f} above plain and "
                f"{lag['mean']:.3f} below online")
    assert lead["seeds"] == lag["seeds"] == 8
    [decision] = decide.decide({"dpo": decide.final_rewards(on_sentiment)}).values()
    assert decision["outcome"] == decide.NO_GAP
    [verdict] = [one for one in everything.verdicts if one["loss"] == "DPO" and one["task"] == "SmolLM2, sentiment"]
    assert verdict["mean"] == lead["mean"] and verdict["p_asked"] < 0.05 < verdict["p_asked_holm"]
    for words in said:
        assert words in prose, words
        prose = prose.replace(words, "")
    assert re.findall(r"\S*\d\S*", re.sub(r"\]\([^)]*\)", "]", prose)) == []  # nothing else is a figure
    assert decisions["kto"]["share"][0] < 0
    assert {form: round(shares_at[0], 2) for form, shares_at in doubts["dpo"]["share_at"].items()} == {
        16: -0.65, 32: 0.61, 48: 0.36, 64: 0.01}
    for loss, bins in ((loss, found["equally_far"].values()) for loss, found in doubts.items()):
        far = [at for at in list(bins)[2:] if at["online"] is not None]
        assert all(at["online"] > max(at["plain"], at[HUMANLINE]) for at in far)
        if loss == "dpo":
            differences = [at["difference"] for at in bins if at["difference"]]
            assert len(differences) == 4 and all(one["low"] < 0 < one["high"] for one in differences)
    plain, ours = at_highest["plain"], at_highest[HUMANLINE]
    assert 0.75 < plain["kl"][0] / ours["kl"][0] < 1 and plain["reward"][0] < ours["reward"][0] / 2
    long_sums = everything.tasks[2]
    for form, of_humanline in itertools.product(("plain", HUMANLINE), (False, True)):
        chosen = long_sums.forms["grpo", HUMANLINE]
        lr = chosen.lr if of_humanline else long_sums.forms["grpo", "plain"].lr
        assert reproduce.stopped(long_sums, form, lr, chosen.k if form == HUMANLINE else 0).max() < 0.04
    for tuned in everything.tasks[:2]:  # where a sync does lower it
        chosen = tuned.forms["grpo", HUMANLINE]
        plain, ours = (reproduce.stopped(tuned, form, chosen.lr, k) for form, k in (("plain", 0), (HUMANLINE, chosen.k)))
        assert (plain - ours).max() > 0.04
    for part, is_sure in ("sync alone", True), ("clip alone", False):
        alone = [tuned.compare("grpo", part, "plain") for tuned in everything.tasks]
        assert all((p < 0.05 and one["mean"] > 0) == is_sure for p, one in zip(reproduce.holm([one["p"] for one in alone]), alone))


def test_what_the_texts_say_of_rates_and_syncs_holds(everything):
    sums, sorting, long_sums = everything.tasks
    assert [tuned.forms["grpo", HUMANLINE].k for tuned in everything.tasks] == [128, 24, 64]
    for loss, form in itertools.product(("dpo", "kto"), ("plain", HUMANLINE, "sync alone", "clip alone")):
        assert long_sums.forms[loss, form].lr == 6.25e-6 and abs(long_sums.compare(loss, "plain", HUMANLINE)["mean"]) < 0.002
    ends = {form: {} for form in ("plain", HUMANLINE)}  # of DPO on sums, by rate, with the best k
    for run, outcome in sums.known.items():
        if run.loss == "dpo" and run.form in ends and run.seed == 101:
            ends[run.form][run.lr] = max(outcome["validation"][-1] - outcome["validation"][0], ends[run.form].get(run.lr, -1))
    rates = [lr for lr in ends["plain"] if lr >= 2.5e-5]
    assert all(ends["plain"][lr] < 0 for lr in rates) and sum(ends[HUMANLINE][lr] > 0 for lr in rates) >= 3
    for tuned in everything.tasks:  # without the ratio clip, twice the best rate is too high
        lr = tuned.forms["grpo", NO_CLIP].lr
        twice = Run(tuned.name, "grpo", NO_CLIP, 2 * lr, 0, 101)
        assert tuned.known[twice]["test"][-1] < tuned.known[dataclasses.replace(twice, lr=lr)]["test"][-1] - 0.05
        gains = [tuned.compare("grpo", *pair, reproduce.at_best)["mean"] for pair in reproduce.RATIO_CLIP]
        assert min(gains[:2]) > 0 and gains[2] > -0.01 and gains[-1] < 0
    fallen = {form: reproduce.collapsed(list(long_sums.forms["grpo", form].runs.values()), "test")[1]
              for form in (HUMANLINE, NO_CLIP, reproduce.SYNCED_NO_CLIP)}
    assert list(fallen.values()) == [0, 1, 4]
    nats = {form: reproduce.show_mean(long_sums.facts("grpo")[form]["kl"], 2) for form in fallen}
    assert (nats[HUMANLINE], nats[NO_CLIP]) == ("0.54", "1.80")
    [sentiment] = [cell for cell in everything.cells if (cell.task, cell.loss) == ("sentiment", "grpo")]
    nats = {name: np.mean([run["kl 64"] for run in sentiment.at_tuned(name).values()])
            for name in ("online", NO_CLIP, HUMANLINE)}
    assert round(nats["online"]) == 101 and round(nats[NO_CLIP] / nats[HUMANLINE]) == 3
    equally_far = {
        (cell.task, kl, name): np.nanmean([reproduce.first_real.reward_at(run, kl) for run in cell.at_tuned(name).values()])
        for cell, distances in zip((cell for cell in everything.cells if cell.loss == "grpo"), ((4, 8, 10), (7, 8)))
        for kl in distances for name in ("online", NO_CLIP, HUMANLINE)}
    behind = [place for place, reward in equally_far.items() if reward < equally_far[*place[:2], HUMANLINE]]
    assert [place for place in equally_far if place[2] != HUMANLINE and place not in behind] == [
        ("checked", 7, "online"), ("checked", 8, "online"), ("checked", 8, NO_CLIP)]
    assert [(task.steps - 1) // tuned.forms["dpo", HUMANLINE].k for tuned in everything.tasks
            for task in [reproduce.TASKS[tuned.name]]] == [1, 1, 1]
    sure = {}  # differences from 0 in the direction that the texts speak of, and those that the correction leaves
    for loss, (words, other, at) in itertools.product(FORMS_OF, reproduce.MEASURES):
        found = reproduce.family(everything.tasks, everything.on_smollm2, loss, other, at).values()
        sign = 1 if other == "plain" else -1
        sure[loss, words] = [sum(sign * one["mean"] > 0 and p < 0.05 for one, p in some)
                             for some in ([(one, one["p"]) for one, _ in found], found)]
    plain, greedily, online = (reproduce.MEASURES[i][0] for i in (0, 2, 3))
    assert [sure["grpo", words] for words in (plain, greedily)] == [[4, 4], [2, 0]]
    assert [sure[loss, online] for loss in FORMS_OF] == [[3, 1], [5, 5], [4, 4]]
    assert [sure[loss, plain][1] for loss in ("dpo", "kto")] == [0, 0]
    lost = reproduce.collapsed(list(sorting.forms["grpo", "better alone, synced"].runs.values()), "test")
    assert lost == [0, 1, 5]
