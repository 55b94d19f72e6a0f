"""The plan of the runs that settle what is open on SmolLM2 (tests/claims/method.py)."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

import decide
import humanline
import method
import real

SETTINGS = [(name, choice) for name, part in method.PARTS.items() for choice in part.tuning]


@pytest.mark.parametrize("name, choice", SETTINGS)
def test_every_setting_of_the_plan_is_a_valid_command_that_measures_on_the_way(name, choice):
    part, (form, lr, k) = method.PARTS[name], choice
    config = humanline.parse_config(["--model", "m", *part.run(choice, 101).flags()])
    assert (config.loss, config.lr, config.sync_k) == (part.loss, lr, k)
    assert config.eval_every == (16 if name == "C" else 8)
    assert config.beta == (1.0 if form.endswith("beta 1") else 0.1)
    assert config.humanline == ("plain" not in form and form != "online")
    assert config.epsilon == (1000 if "no ratio clip" in form else 0.2)


def known_of(part: method.Part, reward, seeds=(101, 102)) -> method.Known:
    """Stored tuning runs, where `reward` gives the last validation reward of a setting."""
    return {part.run(choice, seed): {"validation": [0.1, reward(*choice)]}
            for seed in seeds for choice in part.tuning}


def planned_tests(name: str, reward) -> list[method.Run]:
    part = method.PARTS[name]
    return part.plan(known_of(part, reward))


def test_tuning_comes_first_seed_by_seed():
    counts = {name: len(part.plan({})) for name, part in method.PARTS.items()}
    assert counts == dict(A=13, B=10, C=8, D=9, E=11)
    part = method.PARTS["A"]
    first = known_of(part, lambda *choice: 0.5, seeds=[101])
    assert part.plan({}) == list(first)
    assert part.plan(first) == part.missing(part.tuning, [102], {})


def test_what_can_no_longer_become_the_best_of_its_form_is_not_trained_further():
    part = method.PARTS["E"]
    known = known_of(part, lambda form, lr, k: 0.9 if k == 1 or lr == 2e-5 else 0.1, seeds=[101])
    known |= {part.run(("humanline", 1e-5, 1), 102): {"validation": [0.1, 0.3]}}
    # 1.2 in all: 0.1 and 1 are less, 0.9 and 1 more. Without a run on 102, 0.9 and 0 is less than 0.1 and 1.
    planned = {(run.form, run.lr, run.k) for run in part.plan(known)}
    assert planned == {choice for choice in part.tuning if choice[0] != "humanline" or choice[1] == 2e-5
                       or choice == ("humanline", 4e-5, 1)}
    known |= {run: {"validation": [0.1, 0.2]} for run in part.plan(known)}
    assert {choice[1:] for choice in part.chosen(known).values()} == {(2e-5, 0), (1e-5, 1)}
    assert {run.is_test for run in part.plan(known)} == {True}


def test_the_best_setting_of_each_form_is_tested_and_ties_go_to_the_lower_rate_then_to_the_larger_k():
    tests = planned_tests("A", lambda form, lr, k: 0.5 if form != "plain" else lr)
    assert {(run.form, run.lr, run.k) for run in tests} == {
        ("plain", 1.6e-4, 0), ("humanline", 1e-5, 4), ("online", 2e-5, 0)}
    assert [run.seed for run in tests if not run.is_online] == [seed for seed in range(1, 9) for _ in range(2)]
    assert [(run.seed, run.is_online) for run in tests[16:]] == [(seed, True) for seed in range(1, 9)]


def test_a_part_with_all_three_forms_is_decided_by_its_best_settings_once_all_seeds_are_there():
    part = method.PARTS["A"]
    known = known_of(part, lambda form, lr, k: 0.5 + 100 * lr - k / 100)
    assert list(method.compared(known_of(part, lambda *choice: 0.5, seeds=[101]))) == []
    [compared] = method.compared(known)
    assert compared.settings == dict(plain=[1.6e-4, 0], humanline=[8e-5, 1], online=[4e-5, 0])
    tests = part.plan(known)
    for i, run in enumerate(tests):
        [compared] = method.compared(known)
        assert decide.final_rewards(compared) is None, i
        known[run] = {"test": {"reward": dict(plain=0.5, humanline=0.7, online=0.9)[run.form] + run.seed / 100}}
    [compared] = method.compared(known)
    assert compared.share("test", "humanline")[0] == pytest.approx(0.5)
    assert compared.compare("humanline", "plain")["mean"] == pytest.approx(0.2)


def test_the_edge_is_tested_only_above_half_of_the_gap():
    assert planned_tests("B", lambda form, lr, k: 0.85) == []
    planned = planned_tests("B", lambda form, lr, k: 0.86 if k == 32 else 0.8)
    assert {(run.form, run.k) for run in planned} == {("humanline", 32), ("plain", 0)}  # plain is the control


def test_beta_1_is_tested_only_if_the_prediction_holds_in_tuning_or_plain_closes_half_of_the_gap():
    assert planned_tests("C", lambda form, lr, k: 0.5 + (not k) / 10) == []
    assert len(planned_tests("C", lambda form, lr, k: 0.8 + (not k) / 10)) == 2 * 4
    assert len(planned_tests("C", lambda form, lr, k: 0.5 + (k == 1) / 10)) == 2 * 4


def test_runs_are_stored_as_they_end_and_the_plan_is_asked_anew_after_each(tmp_path, monkeypatch):
    monkeypatch.setattr(method, "PATH", tmp_path / "method.jsonl")
    order = []

    class Pool:
        def submit(self, function, *arguments):
            future = Future()
            if function is real.draw_base:
                task, _, rows, seed = arguments
                (rows / f"{task}-{seed}.jsonl").touch()
                order.append(("draw", seed))
                future.set_result(None)
            else:
                run = arguments[0]
                order.append((run.form, run.lr, run.k, run.seed))
                reward = 0.9 if (run.lr, run.k) in ((4e-5, 4), (4e-5, 0)) else 0.4
                ends = dict(validation=[0.1, reward], validation_kl=[0.0, 1.0])
                future.set_result(vars(run) | dict(flags="", device="CPU") | ends)
            return future

    part = dataclasses.replace(method.PARTS["A"], test_seeds=range(1, 3))
    method.run_part(Pool(), part, SimpleNamespace(model="", rows=tmp_path, jobs=1))
    for seed in (101, 102, 1, 2):
        assert order.index(("draw", seed)) < order.index(("plain", 4e-5, 0, seed))
    assert len(order) == len(set(order)) and part.plan(method.read_results()) == []
    on_102 = [one for one in order if one[-1] == 102]
    tuned = {form: [one[1:3] for one in on_102 if one[0] == form] for form in real.FORMS["dpo"]}
    assert tuned == dict(plain=[(4e-5, 0)], humanline=[(4e-5, 4)], online=[(4e-5, 0)])  # the others cannot win


def run_two_at_once(tmp_path, monkeypatch, end_first):
    """Run part A, in which `end_first` ends the first of two runs before the second, which alone is stored."""
    monkeypatch.setattr(method, "PATH", tmp_path / "method.jsonl")
    (tmp_path / "sentiment-101.jsonl").touch()
    begun = []

    class Pool:
        def submit(self, function, run, *arguments):
            begun.append((run, Future()))
            if len(begun) == 2:
                end_first(*begun[0])
                threading.Timer(0.3, begun[1][1].set_result, [pretend_outcome(run)]).start()
            return begun[-1][1]

    try:
        method.run_part(Pool(), method.PARTS["A"], SimpleNamespace(model="", rows=tmp_path, jobs=2))
    finally:
        assert len(begun) == 2 and list(method.read_results()) == [begun[1][0]]


def pretend_outcome(run: real.Run) -> dict:
    return vars(run) | dict(flags="", validation=[0.1, 0.5], validation_kl=[0.0, 1.0])


def test_after_an_error_what_is_running_is_stored_and_nothing_is_begun(tmp_path, monkeypatch):
    fail = lambda run, future: future.set_exception(RuntimeError("no memory"))
    with pytest.raises(RuntimeError, match="no memory"):
        run_two_at_once(tmp_path, monkeypatch, fail)


def test_a_run_on_another_machine_ends_the_script_once_the_others_are_stored(tmp_path, monkeypatch):
    refused = []

    def check_paired(known, outcome):
        if outcome == refused[0]:
            sys.exit("finish it there")

    def end_first(run, future):
        refused.append(pretend_outcome(run))
        future.set_result(refused[0])

    monkeypatch.setattr(real, "check_paired", check_paired)
    with pytest.raises(SystemExit, match="finish it there"):
        run_two_at_once(tmp_path, monkeypatch, end_first)


def test_a_part_is_not_paired_with_the_same_seeds_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(method, "PATH", tmp_path / "method.jsonl")
    (tmp_path / "checked-1.jsonl").touch()
    one_seed = dict(test_seeds=range(1, 2), more_seeds=range(0))
    parts = {name: dataclasses.replace(method.PARTS[name], **one_seed) for name in "BC"}
    stored = [parts["C"].run(("plain, beta 1", 1e-5, 0), 1),
              *(parts["B"].run(choice, seed) for choice in parts["B"].tuning for seed in (101, 102))]
    lines = [pretend_outcome(run) | dict(device="CPU A", validation=[0.1, 0.9]) for run in stored]
    method.PATH.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def submit(function, run, *arguments):
        future = Future()
        future.set_result(pretend_outcome(run) | dict(device="CPU B"))
        return future

    flags = SimpleNamespace(model="", rows=tmp_path, jobs=1)
    method.run_part(SimpleNamespace(submit=submit), parts["B"], flags)
    assert len(method.read_results()) == len(stored) + 3  # the best setting of each form


def test_the_page_reads_every_stored_run_and_decides_when_all_seeds_are_there():
    part = method.PARTS["A"]
    tuning = part.missing(part.tuning, (101, 102), {})
    ends = {"device": "CPU A", "steps": [0, 64], "validation": [0.1, 0.5], "validation_kl": [0.0, 3.0],
            "samples": [{"completion": "a\nb"}] * 3}
    known = {run: dict(ends) for run in tuning}
    text = method.page(known)
    assert "Incomplete; runs that come next: 24." in text
    [way] = method.ways(known)
    assert way.title == "DPO, sentiment, tuning" and way.rewards.shape == (3, 2, 2)
    assert method.ways({run: known[run] for run in tuning[1:]}) == []
    assert "| plain | 2e-5 | 101, 102 | 0.500 | 3.0 | a b |" in text
    level = dict(plain=0.5, humanline=0.8, online=0.9)
    for run in part.plan(known):
        reward = level[run.form] + 0.001 * (run.seed % 3)
        measured = dict(reward=reward, kl=3.0, greedy=reward)
        ends = {"steps": [0, 8, 64], "validation": [0.1, 0.6, reward], "validation_kl": [0.0, 3.0, 9.0]}
        known[run] = ends | {"device": "CPU B", "test": measured, "best": measured}
    text = method.page(dict(reversed(known.items())))
    assert "Complete. Tuning: CPU A. Test: CPU B." in text
    assert "| +0.300 ± 0.000 |" in text and "**held**" in text
    assert "| share of the gap after | step 8 | step 64 |" in text and "| DPO | no clear gap | 75% [" in text
    assert "| KL to the base, nats | plain | humanline | online | humanline − plain |" in text
    assert "| 2 to 5 | 0.600 | 0.600 | 0.600 | +0.000 ± 0.000 |" in text  # after step 8
    assert "| 8 to 12 | 0.501 | 0.801 | 0.901 | +0.300 ± 0.001 |" in text
    [way] = method.ways({run: known[run] for run in known if not (run.is_test and run.is_online)})
    assert (way.title, way.forms) == ("DPO, sentiment", ["plain", "humanline"])
    [way] = method.ways(known)
    assert (way.title, way.forms, way.steps) == ("DPO, sentiment", list(decide.COMPARED), [0, 8, 64])
    assert way.rewards.shape == (3, 8, 3) and "(method.png)" in text
    assert all("is_shown" in outcome for outcome in known.values())


def test_runs_with_another_beta_stand_beside_those_with_the_usual_one_unpaired():
    part = method.PARTS["C"]
    known = method.read_results()
    runs = {run: known[run] for run in part.stored(known) if not run.is_test}
    for form, lr, k in ("plain, beta 1", 1e-5, 0), ("humanline, beta 1", 1e-5, 4):
        measured = dict(reward=0.5 + k / 10, kl=3.0, greedy=0.5)
        for seed in (1, 2):
            runs[part.run((form, lr, k), seed)] = {"test": measured, "best": measured}
    [table] = method.test_tables(part, runs, part.runs_beside())
    rows = {(form, seeds): difference for form, _, seeds, *_, difference in
            ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:])}
    beside = [rows.pop((form, "4")) for form in decide.COMPARED]
    assert rows == {("plain, beta 1", "2"): "", ("humanline, beta 1", "2"): "+0.400 ± 0.000"}
    assert all(difference.startswith("+0.") and difference.endswith(", not paired") for difference in beside)


@pytest.mark.parametrize("name, forms, of_real_py", [
    ("B", "plain, 1.25e-6 | humanline, 2.5e-6, k 16 | plain, 2e-5 | humanline, 1e-5, k 16 | online | "
          "humanline, 2.5e-6, k 16 − plain, 1.25e-6",
     "humanline | 1e-5, k 16 | 8 | 0.747 "),
    ("D", "plain, no ratio clip | sync alone, no ratio clip | humanline | plain | better completions alone | "
          "mask 0.1 | sync alone, no ratio clip − plain, no ratio clip",
     "better completions alone | 8e-5 | 3 | 0.697 "),
])
def test_runs_of_real_py_stand_beside_the_edge_and_the_control_of_grpo(name, forms, of_real_py):
    part = method.PARTS[name]
    measured = dict(reward=0.9, kl=9.0, greedy=0.9)
    outcome = dict(device="CPU", steps=[0, 16, 64], validation=[0.1, 0.6, 0.9], validation_kl=[0.0, 6.5, 9.0],
                   samples=[{"completion": "a"}] * 3, test=measured, best=measured)
    known = known_of(part, lambda form, *_: 0.5 if form == "clip alone" else 0.9)
    known = {run: outcome | tuned for run, tuned in known.items()}
    known |= {run: dict(outcome) for run in part.plan(known)}
    text = method.page(known)
    assert f"| KL to the base, nats | {forms} |" in text
    assert "| 8 to 12 | 0.900 | " in text and of_real_py in text
    ways = [(way.title, way.forms) for way in method.ways(known)]
    if name == "B":  # decided anew, with the online runs of real.py
        assert "| DPO | 8 | +0.095 ± 0.002 | 0% [0%, 0%] | 0.01 | " in text and "| **not here** |" in text
        assert ways == [("DPO, checked, lower rates", list(decide.COMPARED))]
        more = part.plan(known)
        assert {run.seed for run in more} == set(real.MORE_SEEDS) and len(more) == 2 * 8
        known |= {run: dict(outcome) for run in more[:3]}
        text = method.page(known)
        assert "| DPO | 8 | " in text and "which count once all of them are there: 3." in text
        assert [way.rewards.shape[1] for way in method.ways(known)] == [8]
        known |= {run: dict(outcome) for run in more}
        text = method.page(known)
        assert "| DPO | 16 | +0.09" in text and "Complete." in text and part.plan(known) == []
        assert [way.rewards.shape[1] for way in method.ways(known)] == [16]
        assert all("is_shown" in outcome for outcome in known.values())
    else:
        assert "share of the gap" not in text and ways == []


@pytest.mark.slow
def test_workers_end_with_a_killed_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import concurrent.futures, multiprocessing, os, signal, time\n"
        "import experiments\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    pool = concurrent.futures.ProcessPoolExecutor(1, context, experiments.start_worker)\n"
        "    pool.submit(int).result()\n"
        "    pool.submit(time.sleep, 3600)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n")
    paths = os.pathsep.join(filter(os.path.isdir, sys.path))
    environment = os.environ | {"PYTHONPATH": paths}
    # The worker inherits the pipes: this waits until it has ended, too.
    killed = subprocess.run([sys.executable, script], env=environment, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL
