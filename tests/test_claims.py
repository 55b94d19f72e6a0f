"""tests/claims: the estimates are right, each report asks for its runs, and what is stored can be read and drawn again."""

import doctest
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, rows_of, write_jsonl

import bases
import eval as evaluation
import humanline
import reproduce
from reproduce import HUMANLINE, TAPERED, Runs

RESULTS = ROOT / "tests" / "claims" / "results"


class Pretend(dict):
    """Runs whose outcomes are known: pass@1 by the flags, the first that fits, and a little more with each seed."""

    ends = {"--sample-every 1 ": 0.92, "--no-humanline --taper": 0.93, "--taper": 0.94, "--prior 1": 0.4,
            "--no-humanline": 0.6, "--eval-every": 0.3, "": 0.8}  # the forms are measured often

    def get(self, flags, default=None):
        seed = int(flags.split()[-1])
        after = next(level for held, level in self.ends.items() if held in flags) + 0.01 * seed
        steps = {f"{what} {step}": after for what in ("step", "exact", "greedy") for step in range(32, 257, 8)}
        base = {"exact 0": 0.7, "greedy 0": 0.5, "data_logp": -float("1234"["1234".find(flags[-10:-9])])}
        return dict(flags=flags, before=0.4, after=after, drawing=2.0, training=10.0, warned=None) | base | steps


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
    taught, accuracies = [], iter([0.54, 0.56])

    def draw(model, tokenizer, recipe, fields, size, seed):
        right = round(500 * next(accuracies))
        return [humanline.Group(i, [], [], [float(i < right)]) for i in range(500)]

    monkeypatch.setattr(bases, "teach", lambda model, *_: taught.append(float(model.lm_head.weight.detach().sum())))
    monkeypatch.setattr(bases, "draw", draw)
    bases.make_model("two-digits", tmp_path, 0)
    assert len(taught) == 2 and taught[0] != taught[1] and (tmp_path / "model.safetensors").exists()


# Estimates over seeds.

def test_the_share_of_the_gap_has_an_honest_interval():
    chance, covered = np.random.default_rng(0), 0
    for _ in range(1000):  # humanline closes 60 % of a gap of 0.2; seeds share their luck
        luck = chance.normal(0, 0.02, 5)
        offline, ours, online = (level + luck + chance.normal(0, 0.02, 5) for level in (0.6, 0.72, 0.8))
        _, low, high = reproduce.closed(offline, ours, online)
        covered += low <= 0.6 <= high
    assert 930 <= covered <= 970
    nothing = reproduce.closed(offline, offline + 0.1, offline + chance.normal(0, 0.1, 5))
    assert reproduce.show_share(nothing).endswith("[too few seeds to tell]")
    same = np.array([0.6, 0.5, 0.7])  # luck that all three share cancels in pairs alone
    paired, not_paired = (reproduce.closed(same, same + 0.1, same + 0.4, paired) for paired in (True, False))
    assert paired == pytest.approx((0.25, 0.25, 0.25))
    assert not_paired[1] < 0 < 0.5 < not_paired[2]


def test_what_does_as_well_may_be_a_little_worse_but_not_for_sure():
    verdict = lambda *more: reproduce.as_well(np.array(more), "claim").split("**")[1]
    assert verdict(0.01, -0.01, 0.0) == verdict(0.1, 0.11, 0.12) == "holds"
    assert verdict(-0.02, -0.021, -0.019) == "does not hold"  # surely worse
    assert verdict(0.05, -0.05, 0.0) == verdict(0.1) == "not decided"
    for seeds, t in ((5, 2.776), (11, 2.228), (121, 1.980)):
        assert reproduce.student(seeds) == pytest.approx(t, abs=0.004)


def test_the_warning_is_in_time_by_the_measurement_that_shows_the_fall():
    for fall, by_then, before in ((90, 0, 0), (120, 5, 0), (140, 5, 5)):
        run = {"step 64": 0.6, f"step {fall - 30}": 0.62, f"step {fall}": 0.5, "step 256": 0.1, "warned": 100}
        text = reproduce.warned_in_time([run] * 5)
        assert f"{by_then} had been warned of by then, {before} by the measurement before" in text
        assert text.startswith("- **holds**" if by_then else "- **does not hold**")
    assert "**not decided**" in reproduce.warned_in_time([run])


def test_between_two_measurements_a_reward_levels_off():
    run = {"kl 0": 0.0, "reward 0": 0.2, "kl 8": 2.0, "reward 8": 0.6, "kl 16": 18.0, "reward 16": 0.9}
    for kl, reward in ((2.0, 0.6), (18.0, 0.9), (10.0, 0.8)):  # 1 - sqrt(0.4 · 0.1); a line: 0.75
        assert reproduce.at_kl(run, kl) == pytest.approx(reward)
    for kl in (1.0, 18.1):
        assert math.isnan(reproduce.at_kl(run, kl))


# The experiments.

def test_the_gap_is_compared_seed_by_seed():
    said = "\n".join(reproduce.gap(Runs([1, 2, 3], Pretend())))
    row = next(line for line in said.splitlines() if "GRPO | a worse" in line)
    assert all(text in row for text in ("0.620 ± 0.025", "0.820", "0.940", "+0.200 ± 0.000", "% [62%"))
    assert "GRPO, a worse model's data: humanline closes 63%" in said


@pytest.mark.parametrize("name", reproduce.EXPERIMENTS)
def test_every_experiment_asks_for_its_runs_before_it_knows_them_and_for_flags_that_parse(name):
    runs = Runs([2], {})
    reproduce.EXPERIMENTS[name](runs)
    wanted = list(runs.wanted)
    assert wanted
    assert all(flags.count("--loss ") == flags.count("--task ") == 1 for flags in wanted)
    for flags in wanted:
        task, drawn_by, words = reproduce.split_flags(flags)
        assert task in (*bases.TASKS, "demo") and re.fullmatch("|worse|better|quartile-[1-4]", drawn_by)
        assert humanline.parse_config(["--model", "m", *words]).seed == 2
    assert all("nan" not in line for line in reproduce.EXPERIMENTS[name](Runs([1, 2, 3], Pretend())))


@pytest.mark.parametrize("task", [reproduce.DEMO, reproduce.LONG], ids=lambda task: task.name)
def test_a_form_that_collapses_and_one_that_does_not_are_told_apart(task):
    said = "\n".join(reproduce.compare_forms(task, Runs([1, 2, 3], Pretend())))
    row = lambda name: next(line for line in said.splitlines() if line.startswith(f"| {name} |"))
    assert "3 of 3" in row(HUMANLINE) and "0 of 3" in row(TAPERED)
    assert f"**does not hold**: GRPO, {HUMANLINE}, as in the paper, does at least as well as plain offline" in said
    assert f"**holds**: GRPO, {TAPERED} does better than plain offline, never collapses" in said


def test_seeds_that_are_not_finished_or_never_learned_are_said_and_left_out():
    class Some(Pretend):
        def get(self, flags, default=None):
            found, seed = super().get(flags), int(flags.split()[-1])
            if seed == 2:
                found["exact 0"] = 0.2
            return {} if seed == 3 and "taper" in flags else found

    kept, lines = reproduce.finished(Runs([1, 2, 3], Some()), "grpo", reproduce.SHORT)
    assert kept.seeds == [1] and "Seed 2 is left out: its base never learned (pass@1 0.200)" in lines[0]
    assert re.search(r"Left out are the seeds of which not all \d+ runs are there: 3 \(\d+\)", lines[1])


def test_one_seed_decides_nothing():
    lines = reproduce.sparse(Runs([1], Pretend()))
    assert len(lines) == 3 and all(line.startswith("- **not decided**") for line in lines[1:])


def test_runs_of_two_devices_are_compared_but_not_in_pairs():
    ours, offline = np.array([0.8, 0.7, 0.9]), np.array([0.5, 0.4, 0.6])  # the same luck by seed
    value = lambda name, what: {HUMANLINE: ours, "plain": offline}.get(name, ours + 0.1)
    device = dict(zip(("ours", "offline", "online"), ("GPU", "CPU", "CPU")))
    runs = SimpleNamespace(each=lambda flags: [dict(device=device[flags])] * 3)
    flags = {HUMANLINE: "ours", "plain": "offline", "online": "online"}
    verdicts = reproduce.real_verdicts("GRPO", value, runs, flags)
    assert "online ends above plain offline: +0.400 ± 0.000, paired" in verdicts[0]
    assert "does better than plain offline: +0.300 ± 0.351, not paired" in verdicts[1]  # 4.303 sqrt(2 · 0.01 / 3)
    device["ours"] = "CPU"
    assert "+0.300 ± 0.000, paired" in reproduce.real_verdicts("GRPO", value, runs, flags)[1]


# What is stored, and what is trained.

def test_a_stored_result_has_flags_of_today_or_says_that_its_code_is_gone():
    found = set()
    for name in (*reproduce.TASKS, "real"):
        for flags in reproduce.read_results(RESULTS / f"{name}.jsonl"):
            flags = flags.split(" --seed")[0]
            found.add(flags.partition(" ")[2] if name == "real" else " ".join(reproduce.split_flags(flags)[2]))
    gone = {flags for flags in found if re.search("--stale|--data embedded|--sync-drift|--sync-alpha", flags)}
    assert 5 < len(gone) < len(found) / 3
    for flags in found - gone:
        assert humanline.parse_config(["--model", "m", *flags.split()]).taper == ("--taper" in flags), flags
    assert not any("--prior" in flags for flags in found - gone if "--loss grpo" not in flags)


@pytest.mark.parametrize("then, now", [
    ("--loss grpo --data embedded --sync-k 24 --stale keep --prior 0 --seed 1",
     "--loss grpo --task two-digits --sync-k 24 --seed 1"),
    ("--loss grpo --no-humanline --stale taper --prior 1 --seed 1", "--loss grpo --no-humanline --taper --prior 1 --seed 1"),
    ("checked --loss dpo --sync-k 4 --stale taper --prior 0 --lr 2e-5", "checked --loss dpo --sync-k 4 --taper --lr 2e-5"),
    ("checked --loss dpo --sync-k 4 --stale taper --prior 1 --lr 2e-5", None),
    ("--loss grpo --sync-k 8 --stale drop --prior 1 --seed 1", None)])
def test_flags_of_then_are_called_as_today_and_what_is_gone_keeps_its_name(then, now):
    assert reproduce.today(then) == (now or then)


def test_the_stored_reports_are_drawn_without_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "in_processes", lambda *_: pytest.fail("it trains"))
    assert reproduce.main(["--stored"]) == reproduce.main(["--prior"]) == 0
    made = {path.name for path in (tmp_path / "evals" / "claims").iterdir()}
    assert {"two-digits.md", "two-digits.png", "six-digits.md", "real.md", "real.png"} <= made
    said = capsys.readouterr().out
    assert "| humanline | 0.315 ± 0.159 |" in said and "| humanline with taper | 0.959 ± 0.022 |" in said
    assert "GRPO, six-digits, drawn every 64 steps | 5 | 0.940 ± 0.044 | 0.882 ± 0.049 | -0.058 ± 0.034 | 0, 0 |" in said
    assert "**The prior stays**" in said and "DPO: no cell needs it" in said


def test_a_run_is_trained_once_measured_at_each_step_and_kept(tiny, data_files, tmp_path, monkeypatch):
    base = tmp_path / "bases" / "two-digits-own-1"
    base.mkdir(parents=True)
    (base / "model").symlink_to(tiny)
    rows = [dict(row, answer="1") for row in rows_of("groups", 8)]
    for name in ("rows", "test"):
        write_jsonl(base / f"{name}.jsonl", rows)
    flags = "--loss grpo --task two-digits --batch-size 4 --lr 1e-2 --steps 4 --eval-every 2 --sync-k 1 --seed 1"

    def one(runs):
        """One run."""
        return [str(runs(flags.removesuffix(" --seed 1")))]

    monkeypatch.setattr(reproduce, "EXPERIMENTS", dict(gap=one))
    monkeypatch.setattr(reproduce, "in_processes", lambda function, calls, *_: [function(*call) for call in calls])
    ask = lambda: reproduce.main(["--only", "gap", "--seeds", "1", "--results", str(tmp_path)])
    assert ask() == 0
    [line] = (tmp_path / "gap.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["flags"] == flags and {"exact 0", "exact 2", "exact 4", "step 2", "greedy 4", "warned"} <= found.keys()
    assert len({found[f"exact {step}"] for step in (0, 2, 4)}) >= 2 and found["after"] == found["step 4"]
    monkeypatch.setattr(reproduce, "train_tiny", lambda *_: pytest.fail("it trains again"))
    assert ask() == 0


def test_exact_pass_is_what_samples_tend_to(tiny):
    config = humanline.parse_config(["--model", tiny, "--max-new-tokens", "8"])
    sampler = evaluation.load(tiny, config, rewarded=False)
    rows = [humanline.read_row(row, "", sampler.config) for row in rows_of("prompts", 6)]
    groups, expected = evaluation.encode(sampler, rows, offline=False), []
    for group, row in zip(groups, rows):  # a token at a time
        ids, chance = list(group.prompt), 1.0
        for token in sampler.tokenizer(row.fields["answer"] + sampler.tokenizer.eos_token)["input_ids"]:
            chance *= float(sampler.policy(torch.tensor([ids])).logits[0, -1].softmax(-1)[token])
            ids.append(token)
        expected.append(chance)
    assert reproduce.exact_pass(sampler, rows) == pytest.approx(np.mean(expected), rel=1e-4)


def test_a_real_run_is_measured_and_its_distance_from_the_base_is_that_of_its_log_probs(tiny, tmp_path, monkeypatch):
    for name in ("topics", "topics-test", "checks", "checks-test"):
        write_jsonl(tmp_path / f"{name}.jsonl", rows_of("prompts", 8))
    reward = "def sentiment(prompts, completions, rows):\n  return [len(text) / 40 for text in completions]\n"
    (tmp_path / "rewards.py").write_text(reward)
    monkeypatch.setattr(reproduce, "CONFIGS", tmp_path)
    monkeypatch.setattr(reproduce, "REAL_STEPS", (0, 2, 4))
    reproduce.base_sampler.cache_clear()
    reproduce.draw_base("sentiment", 1, tiny, tmp_path)
    drawn = [json.loads(line) for line in (tmp_path / "sentiment-1.jsonl").read_text().splitlines()]
    assert len(drawn) == 8 * 8 and all(len(line["tokens"]) == len(line["logps"]) for line in drawn)
    found = reproduce.train_real("sentiment --loss grpo --batch-size 2 --sync-k 2 --lr 3e-2 --seed 1", tiny, tmp_path)
    assert found["device"] == ("CPU" if not torch.cuda.is_available() else torch.cuda.get_device_name())
    assert abs(found["kl 0"]) < 1e-3 < found["kl 4"] and found["samples"].keys() >= {"worst", "median", "best"}
    reproduce.base_sampler.cache_clear()


@pytest.mark.parametrize("flags, said", [
    ("--seeds 0", "--seeds is 0; it must be 1 or more"), ("--losses grpo", "--losses: only --real asks for it"),
    ("--real runs/none", "--real runs/none: no such run or model")])
def test_a_flag_that_would_change_nothing_or_the_wrong_thing_is_refused(capsys, flags, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert reproduce.main(flags.split()) == 2
    assert re.fullmatch(r"reproduce.py: error: .*\n", err := capsys.readouterr().err) and said in err
