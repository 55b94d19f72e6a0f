"""Draw every table and figure of tests/claims from the stored runs. It trains nothing.

  python tests/claims/reproduce.py                 # the tables of report.md, verdicts.md, ..., facts.json, *.png
  python tests/claims/reproduce.py --out /tmp/new  # the same, beside those that are there

The runs are made by experiments.py (tiny models, tuned by one rule) and real.py (SmolLM2, the same; decide.py has its
page), a line each in results/. first_real.py reads older runs of SmolLM2.
facts.json has every number of the pages, for texts that quote them. results/history/ is of older experiments, whose
pages stay as they are; log.md names the commits that made them.
"""

import argparse
import itertools
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable

import numpy as np

import decide
import experiments
import eval as evaluation
import first_real
import method
from estimates import (
    MARGIN,
    compare,
    estimate,
    holm,
    markdown,
    share_of_gap,
    show,
    show_difference,
    show_mean,
)
from estimates import show_form, show_rate, show_settings, show_share, shown
from experiments import FORMS_OF, TASKS, Run

HERE = Path(__file__).resolve().parent
FELL = 0.1  # of pass@1: a run that lost more has collapsed

HUMANLINE, TAPERED = "humanline", "humanline with taper"
BOTH = f"{TAPERED} and prior"
NEIGHBOUR, NO_CLIP = "best neighbour", "plain, no ratio clip"
TITLES = {
    "two-digits": "Sums of two digits",
    "five-sorted": "Sorting five digits and dropping repeated ones",
    "six-digits": "Sums of six digits with every partial sum",
}
IN_FIGURES = {"two-digits": "sums", "five-sorted": "sorting", "six-digits": "long sums"}

# ---------- The runs on tiny models -------------------------------------------------------------------------

@dataclass
class Form:
    """A form at the settings that tuning chose, and its runs there, by test base."""

    lr: float
    k: int
    validation: float
    runs: dict[int, dict]

def last(run: dict) -> float:
    return run["test"][-1]

def at_start(run: dict) -> float:
    """pass@1 of the base that the run started from."""
    return run["test"][0]

def last_kl(run: dict) -> float:
    """KL to the base after the last step, in nats a completion."""
    return run["base_kl"][-1]

def at_best(run: dict) -> float:
    """pass@1 at the measurement that was best on the validation problems; the base is one of them."""
    return run["test"][int(np.argmax(run["validation"]))]

def greedy(run: dict) -> float:
    """Of greedy decoding, after the last step."""
    return run["greedy"][-1]

class Tuned:
    """A task's stored runs, and by loss and name the forms whose tuning is complete."""

    def __init__(self, name: str):
        self.name, self.task = name, TASKS[name]
        self.known = experiments.read_results(HERE / "results" / f"tuned-{name}.jsonl")
        seeds = sorted({run.seed for run in self.known})
        self.tuning = [seed for seed in seeds if seed > 100]
        self.tests = [seed for seed in seeds if seed <= 100]
        self.losses = [loss for loss in FORMS_OF if any(run.loss == loss for run in self.known)]
        asked = self.tuning if len(self.tuning) == experiments.TUNING_BASES else [101, 102]
        self.missing = experiments.plan(self.task, self.known, (asked, self.tests or [1]))
        self.is_complete = not self.missing and len(self.tests) == experiments.TEST_BASES
        undone = {(run.loss, run.form) for run in self.missing if run.seed > 100}
        self.forms: dict[tuple[str, str], Form] = {}
        for loss in FORMS_OF:
            for form in experiments.forms_of(name, loss):
                if (loss, form) not in undone:
                    self.add_form(loss, form)

    def add_form(self, loss: str, name: str) -> None:
        lr, k = experiments.ranked(self.name, loss, name, self.known, self.tuning)[0]
        runs = {
            run.seed: outcome
            for run, outcome in self.known.items()
            if (run.loss, run.form, run.lr, run.k) == (loss, name, lr, k)
        }
        validation = [runs[seed]["validation"][-1] for seed in self.tuning]
        tests = {seed: runs[seed] for seed in self.tests if seed in runs}
        if tests:
            self.forms[loss, name] = Form(lr, k, float(np.mean(validation)), tests)

    def ends(self, loss: str, *names: str, at: Callable = last) -> list[np.ndarray]:
        """pass@1 of these forms after the last step, on the test bases that all of them have; none if there is no such
        base."""
        forms = [self.forms.get((loss, name)) for name in names]
        if None in forms:
            return []
        common = [seed for seed in self.tests if all(seed in form.runs for form in forms)]
        ends = [np.array([at(form.runs[seed]) for seed in common]) for form in forms]
        return ends if common else []

    def paired(self, loss: str, *names: str) -> np.ndarray:
        """Which of these forms are paired by seed: those whose runs started from the same bases."""
        starts = np.array(self.ends(loss, *names, at=at_start))
        return (starts[:, None] == starts[None]).all(-1)

    def compare(self, loss: str, name: str, other: str, at: Callable = last) -> dict | None:
        ends = self.ends(loss, name, other, at=at)
        if not ends or name == other:
            return None
        return compare(*ends, paired=bool(self.paired(loss, name, other).all()))

    def share(self, loss: str, name: str) -> list[float] | None:
        """Of the gap, where there is one: where the interval of online less plain lies above 0."""
        gap, ends = self.compare(loss, "online", "plain"), self.ends(loss, "plain", name, "online")
        has_gap = ends and gap["low"] > 0 and name not in ("plain", "online")
        return share_of_gap(*ends, self.paired(loss, "plain", name, "online")) if has_gap else None

    def best_neighbour(self, loss: str) -> str | None:
        """The published neighbour that is best on the validation problems of the tuning bases."""
        names = [
            name for of, name in self.forms if of == loss and name in experiments.NEIGHBOURS[loss]
        ]
        return max(names, key=lambda name: self.forms[loss, name].validation, default=None)

    def facts(self, loss: str) -> dict[str, dict]:
        """What the page says of each form of a loss."""
        found = {}
        for (of, name), form in self.forms.items():
            if of == loss:
                runs = shown(form.runs.values())
                found[name] = dict(
                    lr=form.lr,
                    k=form.k,
                    validation=form.validation,
                    seeds=len(runs),
                    base=estimate(map(at_start, runs)),
                    test=estimate(map(last, runs)),
                    best=estimate(map(at_best, runs)),
                    minus_plain=self.compare(loss, name, "plain"),
                    minus_online=self.compare(loss, name, "online"),
                    share_of_gap=self.share(loss, name),
                    collapsed=collapsed(runs, "test"),
                    kl=estimate(run["base_kl"][-1] for run in runs),
                )
        return found

def collapsed(runs: list[dict], what: str) -> list[int]:
    """How many runs end more than FELL below their base, and below their own best measurement; of how many."""
    curves = [run[what] for run in runs]
    below_base = sum(curve[-1] < curve[0] - FELL for curve in curves)
    below_best = sum(curve[-1] < max(curve) - FELL for curve in curves)
    return [below_base, below_best, len(curves)]

# ---------- Their pages -------------------------------------------------------------------------------------

HOW = """Every form was tuned by the same rule ([experiments.py](experiments.py)) on the tuning bases and the validation
half of the held-out problems, and then run on the test bases. pass@1 is exact, of the other half, after the last step.
Offline data are the base's own samples.

± is half of the 95% interval over test bases (Student's t); differences are paired by base, except where the base had
been made again in between (*not paired*). *Best measurement*: pass@1 where it was best on the validation half, the base
included: what stopping early would have given. *Online ± 0.02*: whether two one-sided tests say that the form is within
0.02 of online, and their p. *Of the gap*: the share of the gap between plain and online that the form closes, with
Fieller's interval, where the interval of online less plain lies above 0. *Collapsed*: runs that end more than 0.1 below their own base, and more than 0.1 below their own best measurement. KL is
to the base, in nats a completion."""

GRID = """Tuning: pass@1 on the validation half after the last step, the mean over the tuning bases, at every learning
rate and k; ¹: of the first base alone. The chosen setting is bold. *Collapsed*: the runs of the row, counted as
above."""

FORM_HEAD = (
    "| form | lr, k | validation | test pass@1 | best measurement | − plain | − online | online ± 0.02, p | of the gap | "
    "collapsed | KL |"
)

def task_page(tuned: Tuned, facts: dict[str, dict]) -> str:
    seeds = lambda some: ", ".join(map(str, some)) or "none yet"
    text = [
        f"# {TITLES[tuned.name]}, every form tuned",
        f"{len(tuned.known)} runs of {tuned.task.steps} steps. Tuning bases: {seeds(tuned.tuning)}. "
        f"Test bases: {seeds(tuned.tests)}.",
    ]
    if not tuned.is_complete:
        text.append(
            f"**Incomplete.** {len(tuned.missing)} runs come next, and others that depend on their outcome. "
            "A form is left out until its tuning is complete and a test base has been run."
        )
    if tuned.known:
        text += [
            HOW,
            remade_bases(tuned),
            f"![pass@1 against steps and against the learning rate, for each loss]({tuned.name}.png)\n\n*Above: each form as "
            "tuned, the mean over the test bases, test half. Below: where the tuning bases ended, validation half, at each "
            "learning rate with the best k of the form. Where plain and humanline coincide, the grey line shows at both "
            "sides of the blue one. Best neighbour: the published form that is best on the validation problems of the "
            "tuning bases: "
            + ", ".join(f"{loss.upper()} {show_form(tuned.best_neighbour(loss))}" for loss in tuned.losses)
            + ".*",
        ]
    for loss in tuned.losses:
        table = form_table(facts[loss]) if facts[loss] else "No form has been tuned and tested yet."
        text += [
            f"## {loss.upper()}",
            table,
            earlier_choices(tuned, loss),
            GRID,
            grid_table(tuned, loss),
        ]
    return "\n\n".join(filter(None, text)) + "\n"

def form_table(facts: dict[str, dict]) -> str:
    base = next(iter(facts.values()))["base"]
    rows = [["the base", "", "", show(base), *[""] * 7]]
    for name, form in facts.items():
        online = form["minus_online"]
        same = (
            f"{'yes' if online['p_same'] < 0.05 else 'no'}, {online['p_same']:.2g}"
            if online
            else ""
        )
        rows.append(
            [
                show_form(name),
                show_settings(form["lr"], form["k"]),
                f"{form['validation']:.3f}",
                show(form["test"]),
                show(form["best"]),
                show_difference(form["minus_plain"]),
                show_difference(online),
                same,
                show_share(form["share_of_gap"]),
                "{} and {} of {}".format(*form["collapsed"]),
                show_mean(form["kl"], 2),
            ]
        )
    return markdown(FORM_HEAD, rows)

def remade_bases(tuned: Tuned) -> str:
    """What is said where the runs of a seed did not all start from the same weights."""
    starts = {seed: set() for seed in tuned.tuning + tuned.tests}
    for run, outcome in tuned.known.items():
        starts[run.seed].add(at_start(outcome))
    widest = max((max(some) - min(some) for some in starts.values()), default=0)
    if not widest:
        return ""
    return (
        "The bases were made twice, on two kinds of CPU, which round differently: some runs, those added later, started "
        f"from weights whose pass@1 on the test problems differs by up to {widest:.3f}. Their differences from the "
        "others are not paired."
    )

def earlier_choices(tuned: Tuned, loss: str) -> str:
    """The test runs of settings that were chosen before further rates were tried."""
    earlier: dict[tuple[str, float, int], list[dict]] = {}
    for run, outcome in tuned.known.items():
        form = tuned.forms.get((run.loss, run.form))
        if (
            run.loss == loss
            and run.seed in tuned.tests
            and form
            and outcome not in form.runs.values()
        ):
            earlier.setdefault((run.form, run.lr, run.k), []).append(outcome)
    found = [
        f"{show_form(form)} at {show_settings(lr, k)} {show(estimate(map(last, shown(runs))))}"
        for (form, lr, k), runs in earlier.items()
    ]
    return "Chosen before further rates were tried: " + "; ".join(found) + "." if found else ""

def grid_table(tuned: Tuned, loss: str) -> str:
    cells: dict[tuple[str, int], dict[float, list[dict]]] = {}
    for run, outcome in tuned.known.items():
        if run.loss == loss and run.seed in tuned.tuning:
            cells.setdefault((run.form, run.k), {}).setdefault(run.lr, []).append(outcome)
    rates = sorted({lr for row in cells.values() for lr in row})
    order = list(FORMS_OF[loss])
    rows = []
    for name, k in sorted(cells, key=lambda cell: (order.index(cell[0]), cell[1])):
        row, form, words = cells[name, k], tuned.forms.get((loss, name)), []
        for lr in rates:
            runs = shown(row.get(lr, []))
            word = f"{np.mean([run['validation'][-1] for run in runs]):.3f}" if runs else ""
            if form and (form.lr, form.k) == (lr, k):
                word = f"**{word}**"
            words.append(word + "¹" * (len(runs) == 1))
        fell = collapsed(list(itertools.chain(*row.values())), "validation")
        rows.append([show_form(name), str(k or ""), *words, "{} and {} of {}".format(*fell)])
    head = " | ".join(map(show_rate, rates))
    return markdown(f"| form | k | {head} | collapsed |", rows)

# ---------- Verdicts ----------------------------------------------------------------------------------------

SYNCED_NO_CLIP = "sync alone, no ratio clip"
RATIO_CLIP = (  # differences that show what of the sync's gain is the ratio clip's
    ("sync alone", "plain"),
    (NO_CLIP, "plain"),
    (NO_CLIP, "sync alone"),
    (NO_CLIP, HUMANLINE),
    (SYNCED_NO_CLIP, NO_CLIP),
)

def ratio_clip(tasks: list[Tuned], smollm2: list[first_real.Stored]) -> str:
    """GRPO with and without its ratio clip, after the last step and at the best measurement."""
    rows = []
    for tuned, (form, other) in itertools.product(tasks, RATIO_CLIP):
        cells = [show_difference(tuned.compare("grpo", form, other, at)) for at in (last, at_best)]
        rows.append([IN_FIGURES[tuned.name], f"{form} − {other}", *cells])
    of_grpo = [cell for cell in smollm2 if cell.loss == "grpo"]
    for cell, other in itertools.product(of_grpo, ("plain", HUMANLINE)):
        difference = first_real.compare_runs(*map(cell.at_tuned, (NO_CLIP, other)))
        rows.append([f"SmolLM2, {cell.task}", f"{NO_CLIP} − {other}", show_difference(difference), ""])
    return markdown("| task | difference | last step | best measurements |", rows)

def held_back(tasks: list[Tuned]) -> list[dict]:
    """For each loss, task and larger beta: plain and humanline there, plain at beta 0.1, and the outcome of the
    prediction of experiments.py; none where plain is not held back."""
    found = []
    for loss, tuned, beta in itertools.product(decide.DECIDED, tasks, experiments.AT_BETA):
        plain, synced = experiments.AT_BETA[beta]
        difference = tuned.compare(loss, synced, plain)
        if not difference:
            continue
        ends = {name: [float(np.mean([of(run) for run in tuned.forms[loss, name].runs.values()])) for of in (last, last_kl)]
                for name in ("plain", plain, synced)}
        outcome = None
        if all(larger < usual for larger, usual in zip(ends[plain], ends["plain"])):
            is_held, fails = difference["low"] > 0, difference["high"] < MARGIN
            outcome = decide.HELD if is_held else decide.NOT_HERE if fails else decide.UNDECIDED
        found.append(difference | dict(loss=loss, task=tuned.name, beta=beta, ends=list(ends.values()), outcome=outcome))
    return found

def held_back_table(found: list[dict]) -> str:
    rows = []
    for one in found:
        ends = [f"{score:.3f} at {kl:.2f}" for score, kl in one["ends"]]
        outcome = f"**{one['outcome']}**" if one["outcome"] else "not held back"
        rows.append([one["loss"].upper(), IN_FIGURES[one["task"]], f"{one['beta']}", *ends, show_difference(one), outcome])
    return markdown("| loss | task | β | plain, β 0.1: pass@1 at KL | plain, this β | humanline, this β | humanline − plain | prediction |", rows)

def rate_by_rate_table(tasks: list[Tuned]) -> str:
    """At each rate, plain and the best k of humanline, on the first tuning base."""
    rows = []
    rates = sorted({lr for tuned in tasks for lr in tuned.task.rates})
    betas = {0.1: ("plain", HUMANLINE)} | experiments.AT_BETA
    for loss, tuned, (beta, forms) in itertools.product(decide.DECIDED, tasks, betas.items()):
        ends = {name: [(run.lr, outcome["validation"][-1], run.k) for run, outcome in tuned.known.items()
                       if (run.loss, run.form, run.seed) == (loss, name, tuned.tuning[0])] for name in forms}
        cells = []
        for lr in rates:
            plain, synced = (max((end for end in ends[name] if end[0] == lr), default=None) for name in forms)
            cells.append(f"{plain[1]:.3f} → {synced[1]:.3f}, k {synced[2]}" if plain and synced else "")
        if any(cells):
            rows.append([loss.upper(), IN_FIGURES[tuned.name], f"{beta}", *cells])
    return markdown(f"| loss | task | β | {' | '.join(map(show_rate, rates))} |", rows)

def stopped_table(tasks: list[Tuned]) -> str:
    """Tokens that GRPO's own clip stops on the first tuning base, at the rates that tuning chose for humanline and for
    plain."""
    rows = []
    for tuned in tasks:
        k = tuned.forms["grpo", HUMANLINE].k
        rates = dict.fromkeys(tuned.forms["grpo", form].lr for form in (HUMANLINE, "plain"))
        for lr, (form, k) in itertools.product(rates, (("plain", 0), (HUMANLINE, k))):
            shares = stopped(tuned, form, lr, k)
            settings = show_settings(lr, k)
            rows.append([IN_FIGURES[tuned.name], form, settings, ", ".join(f"{100 * share:.1f}" for share in shares)])
    return markdown("| task | form | lr, k | % of tokens stopped, from measurement to measurement |", rows)

def stopped(tuned: Tuned, form: str, lr: float, k: int, clip: str = "clip_fraction") -> np.ndarray:
    """The share of tokens that a clip stops between measurements, with GRPO on the first tuning base."""
    run = tuned.known[Run(tuned.name, "grpo", form, lr, k, tuned.tuning[0])]
    return np.add(run[f"{clip}_low"], run[f"{clip}_high"])

class SmolLM2:
    """Humanline on a task of SmolLM2: the runs that decide the claim, where they are there, or else the first ones."""

    def __init__(self, cell: first_real.Stored, facts: dict[str, dict], compared: decide.Compared | None):
        self.task, self.loss, self.cell, self.facts = cell.task, cell.loss, cell, facts
        self.compared = compared

    def compare(self, other: str, what: str = "reward") -> dict | None:
        if self.compared and self.compared.has_seeds(min(decide.LEVELS), HUMANLINE, other):
            return self.compared.compare(HUMANLINE, other, what)
        return first_real.compare_runs(*map(self.cell.at_tuned, (HUMANLINE, other)), what)

    def shares(self) -> dict[str, list[float] | None]:
        """Of the gap, by form."""
        if self.compared and decide.final_rewards(self.compared):
            return {HUMANLINE: self.compared.share("test", HUMANLINE)}
        names = (name for name in (HUMANLINE, NO_CLIP) if name in self.facts)
        return {name: self.facts[name]["share_of_gap"] for name in names}

EVERY_64 = "every 64 steps, "
BETTER, NEAR = "better than", f"within {MARGIN} of"
PARTLY = "partly"
CLAIMS = (  # a form, the other, and what is asked of their difference
    (HUMANLINE, "plain", BETTER),
    (HUMANLINE, "online", NEAR),
    (EVERY_64 + HUMANLINE, "online", NEAR),
)

def front_verdicts(tasks: list[Tuned], smollm2: list[SmolLM2]) -> list[dict]:
    """Verdicts on each task. Holm's correction is for a family: the tasks of one claim and one loss."""
    verdicts = []
    for (form, other, asked), loss in itertools.product(CLAIMS, FORMS_OF):
        found = {tuned.name: tuned.compare(loss, form, other) for tuned in tasks}
        if other == "plain":
            found |= {f"SmolLM2, {one.task}": one.compare(other) for one in smollm2 if one.loss == loss}
        family = []
        for task, difference in found.items():
            if difference and difference["seeds"] > 1:
                p_asked, p_against = difference["p"], difference["p"]
                if asked == NEAR:
                    p_asked, p_against = difference["p_same"], min(1.0, 2 * (1 - difference["p_same"]))
                claim = f"{form} is {asked} {other}"
                family.append(dict(claim=claim, loss=loss.upper(), task=task, **difference))
                family[-1] |= dict(p_asked=p_asked, p_against=p_against)
        for name in "p_asked", "p_against":
            for verdict, p in zip(family, holm([verdict[name] for verdict in family])):
                verdict[f"{name}_holm"] = p
        for verdict in family:
            mean = verdict["mean"]
            is_for, is_against = (mean > 0, mean < 0) if asked == BETTER else (True, abs(mean) > MARGIN)
            holds = is_for and verdict["p_asked_holm"] < 0.05
            fails = is_against and verdict["p_against_holm"] < 0.05
            verdict["outcome"] = decide.HELD if holds else decide.NOT_HERE if fails else decide.UNDECIDED
        verdicts += family
    return verdicts

def taper_rule(tasks: list[Tuned]) -> dict:
    """Rule 1: the taper against the best published neighbour. Both are chosen on validation problems."""
    cells, above, below = [], dict.fromkeys(FORMS_OF, 0), []
    for loss, tuned in itertools.product(FORMS_OF, tasks):
        neighbour = tuned.best_neighbour(loss)
        for form in TAPERED, BOTH, HUMANLINE:
            difference = tuned.compare(loss, form, neighbour)
            if difference:
                cells.append(
                    dict(
                        loss=loss.upper(),
                        task=tuned.name,
                        form=form,
                        neighbour=neighbour,
                        **difference,
                    )
                )
            if difference and form == TAPERED:
                above[loss] += difference["low"] > 0
                if difference["mean"] < -MARGIN:
                    below.append(f"{loss.upper()} on {IN_FIGURES.get(tuned.name, tuned.name)}")
    left = sum(not tuned.is_complete for tuned in tasks)
    outcome = "open" if max(above.values()) + left >= 2 and not below else "goes"
    if not left and outcome == "open":
        outcome = "stays"
    return dict(cells=cells, above=above, below=below, tasks_left=left, outcome=outcome)

def taper_cells_of_smollm2(compared: decide.Compared) -> list[dict]:
    """What stands beside rule 1: humanline against the best published neighbour on SmolLM2, where the taper was not run."""
    loss = compared.loss
    neighbour = compared.best_of(experiments.NEIGHBOURS[loss])
    if not neighbour:
        return []
    difference = compare(*compared.rewards("test", HUMANLINE, neighbour))
    task = f"SmolLM2, {compared.task}"
    return [dict(loss=loss.upper(), task=task, form=HUMANLINE, neighbour=neighbour, **difference)]

def prior_rule(tasks: list[Tuned]) -> dict:
    """Rule 2: the prior of GRPO is needed where a cell is worse without it by more than MARGIN."""
    cells = []
    for tuned, drawn in itertools.product(tasks, ("", EVERY_64)):
        difference = tuned.compare("grpo", drawn + TAPERED, drawn + BOTH)
        if difference:
            cells.append(dict(task=tuned.name, data=drawn.strip(", ") or "offline", **difference))
    left = sum(not tuned.is_complete for tuned in tasks)
    needed = any(cell["high"] < -MARGIN for cell in cells)
    return dict(
        cells=cells, tasks_left=left, outcome="stays" if needed else "open" if left else "goes"
    )

ABOUT_VERDICTS = f"""*Better than*: a two-sided t test over seeds. *Within {MARGIN} of*: two one-sided t tests, which ask
whether the difference is smaller than {MARGIN} in both directions; five bases cannot show it where half of the interval
is larger than that. p-values are corrected by Holm's method over a family, which is one claim with one loss on all of
its tasks. The same holds for the opposite (*{decide.NOT_HERE}*: worse than plain, or more than {MARGIN} away from
online). What neither shows is *{decide.UNDECIDED}*."""

ABOUT_MEASURES = """Of pass@1 on the tiny models, of the reward on SmolLM2; after the last step. *Best measurements*: each
run where it was best on the validation problems, as early stopping would have it. *Greedy*: of greedy decoding, not of
samples. On SmolLM2 each form has three test seeds and was tuned on one ([page](real.md)); DPO and KTO on *checked*
have those of the decision ([page](real-checked.md)), and DPO on *sentiment* those of part A
([page](method.md))."""

TAPER_RULE = f"""The taper stays if for at least one loss it is above the best published neighbour on two of the three
tasks (the paired interval above 0), and nowhere more than {MARGIN} below it (the mean). The neighbour is the one that
is best on the validation problems. The forms with prior and without taper stand beside it, and decide nothing. On
SmolLM2 the taper was not run."""

PRIOR_RULE = f"""The prior stays if some cell of GRPO with taper is worse without it by more than {MARGIN}, with the
whole interval."""

ABOUT_RATIO_CLIP = """Written down before the tuned runs of the small tasks without the clip (those of SmolLM2, and all of the
sync alone, were known): if a sync helps GRPO by renewing its ratio clip, plain GRPO without the clip gains as
much, and a sync adds nothing to it."""

ABOUT_HELD_BACK = f"""Written down before DPO's runs at these β: if a sync removes an anchor, which helps where plain is held back,
then humanline gains over plain at a larger β. A row counts where plain ends with a lower pass@1 and nearer to its base
than at β 0.1. There the prediction has *{decide.HELD}* if the 95% interval of the difference lies above 0, and is *{decide.NOT_HERE}*
if it lies below {MARGIN}. The forms were tuned at each β."""

ABOUT_RATES = """The same rate by rate: plain → humanline with its best k, validation pass@1 after the last step, on the first tuning
base (made again between β 0.1 and the others). Where a small rate and a large β hold plain back, a sync
gains; the best of several k also gains by chance."""

ABOUT_CORRECTED = """Differences whose 95% interval lies above or below 0; *corrected*: by Holm's method over the
tasks of the row."""

ABOUT_PARTS = """Humanline's two parts, each alone, on the small tasks; 95% intervals, not corrected for their number. (The report counts
the gains of GRPO's sync by Holm's method over these tasks.) SmolLM2 has no run with one part alone."""

ABOUT_MECHANISM = """*GRPO, one run each, on the first tuning base, at the rate that tuning chose for humanline; means between
measurements.*"""

ABOUT_STOPPED = """What GRPO's clip stops on the first tuning base, as means between measurements, at the rates that tuning chose
for humanline and for plain. On sums and sorting a sync lowers it; on long sums the sync hardly changes it at either
rate."""

def verdicts_page(
    measures: str, corrected: str, parts: str, clip: str, beta: str, verdicts: list[dict], taper: dict, prior: dict
) -> str:
    columns = lambda cell, *names: [IN_FIGURES.get(cell[name], cell[name]) for name in names]
    near = lambda cell: [show_difference(cell), f"{cell['p_same']:.2g}"]
    rows = []
    for cell in verdicts:
        p_values = f"{cell['p_asked']:.2g}", f"{cell['p_asked_holm']:.2g}"
        found = show_difference(cell), str(cell["seeds"]), *p_values, f"**{cell['outcome']}**"
        rows.append([*columns(cell, "claim", "loss", "task"), *found])
    taper_rows = [
        [*columns(cell, "loss", "task", "form"), show_form(cell["neighbour"])] + near(cell) for cell in taper["cells"]
    ]
    prior_rows = [columns(cell, "task", "data") + near(cell) for cell in prior["cells"]]
    left = (
        f" {taper['tasks_left']} of the {len(TASKS)} tasks are incomplete."
        if taper["tasks_left"]
        else ""
    )
    counts = ", ".join(f"{loss.upper()} on {count}" for loss, count in taper["above"].items())
    below = ", ".join(taper["below"]) or "nowhere"
    outcomes = Counter(cell["outcome"] for cell in verdicts)
    outcomes = ", ".join(f"{outcomes[name]} {name}" for name in (decide.HELD, decide.NOT_HERE, decide.UNDECIDED))
    text = [
        "# Verdicts, tuned against tuned",
        f"{len(verdicts)} verdicts: {outcomes}.{left} {ABOUT_VERDICTS}",
        markdown("| claim | loss | task | difference | seeds | p | Holm's p | verdict |", rows),
        "## All losses by the same measures",
        ABOUT_MEASURES,
        measures,
        ABOUT_CORRECTED,
        corrected,
        "## The sync and the clip, each alone",
        ABOUT_PARTS,
        parts,
        "![tokens that both clips stop, on three tasks](mechanism.png)",
        ABOUT_MECHANISM,
        "## GRPO without its ratio clip",
        ABOUT_RATIO_CLIP,
        clip,
        "## DPO and KTO at a larger β",
        ABOUT_HELD_BACK,
        beta,
        "## Rule 1: the taper against its best neighbour",
        TAPER_RULE,
        markdown(
            "| loss | task | form | best neighbour | form − neighbour | within 0.02, p |",
            taper_rows,
        ),
        f"**The taper: {taper['outcome']}.** Above its best neighbour: {counts} of {len(TASKS)} tasks. More than "
        f"{MARGIN} below it: {below}.{left}",
        "## Rule 2: the prior",
        PRIOR_RULE,
        markdown("| task | data | without − with, paired | within 0.02, p |", prior_rows),
        f"**The prior: {prior['outcome']}.**{left}",
    ]
    return "\n\n".join(text) + "\n"

# ---------- The tables of report.md -------------------------------------------------------------------------

PUBLISHED = {  # forms of a published method by its name in the report; that which validation chooses stands in it
    "better completions alone": (
        "better alone",
        "better alone, synced",
        "chosen alone",
        "desirable alone",
        "desirable alone, synced",
    ),
    "sequence mask (DeepSeek-V3.2, 2512.02556)": (
        "mask 0.1",
        "mask 0.1, synced",
        "mask 0.5",
        "mask 0.5, synced",
    ),
    "TOPR (2503.14286)": ("TOPR",),
    "RPO (2404.19733)": ("RPO", "RPO, synced"),
    "DPO-positive (2402.13228)": ("DPO-positive",),
}
IN_REPORT = {name: (name,) for name in ("plain", NO_CLIP, HUMANLINE)} | PUBLISHED
IN_REPORT |= {"humanline with our taper": (TAPERED,), "online": ("online",)}
PARTS = {"grpo": (RATIO_CLIP[1], *RATIO_CLIP[3:]), "dpo": (), "kto": ()}  # and these, of every loss
OF_ALL = ("sync alone", "plain"), ("clip alone", "plain"), (HUMANLINE, "sync alone")
MEASURES = (  # what the report says of humanline: in words, the other form, and of which measurement
    ("humanline − plain", "plain", last),
    ("humanline − plain, best measurements", "plain", at_best),
    ("humanline − plain, greedy", "plain", greedy),
    ("humanline − online", "online", last),
)
ON_SMOLLM2 = {last: "reward", greedy: "greedy"}  # its name of a measurement
ON_TASKS = " | sums | sorting | long sums |"

def of_each_task(
    tasks: list[Tuned], smollm2: list["SmolLM2"], loss: str, other: str, at: Callable = last
) -> dict[str, dict | None]:
    """Humanline less another form, by task."""
    found = {IN_FIGURES[tuned.name]: tuned.compare(loss, HUMANLINE, other, at) for tuned in tasks}
    if at in ON_SMOLLM2:
        found |= {one.task: one.compare(other, ON_SMOLLM2[at]) for one in smollm2 if one.loss == loss}
    return found

def family(
    tasks: list[Tuned], smollm2: list["SmolLM2"], loss: str, other: str, at: Callable
) -> dict[str, tuple[dict, float]]:
    """Humanline's differences from another form by task, each with its p-value after Holm's correction for all of them."""
    found = {task: some for task, some in of_each_task(tasks, smollm2, loss, other, at).items() if some}
    return dict(zip(found, zip(found.values(), holm([difference["p"] for difference in found.values()]))))

def corrected_table(tasks: list[Tuned], smollm2: list["SmolLM2"]) -> str:
    """Which of humanline's differences lie above and below 0, before and after Holm's correction over a family."""
    rows = []
    for (words, other, at), loss in itertools.product(MEASURES, FORMS_OF):
        if at is at_best:  # not of SmolLM2
            continue
        found = family(tasks, smollm2, loss, other, at)
        row = [f"{loss.upper()}, {words}"]
        for sign, is_corrected in itertools.product((1, -1), (False, True)):
            names = [
                task for task, (difference, p) in found.items()
                if sign * difference["mean"] > 0 and (p if is_corrected else difference["p"]) < 0.05
            ]
            row.append(", ".join(names) or "none")
        rows.append(row)
    return markdown("| difference | above 0 | corrected | below 0 | corrected |", rows)

def differences_table(tasks: list[Tuned], smollm2: list["SmolLM2"]) -> str:
    """The report's choice of differences; bold where they remain after the correction."""
    rows = []
    for loss, (words, other, at) in itertools.product(FORMS_OF, MEASURES):
        if at is at_best or (at is greedy and loss != "grpo"):
            continue
        row = [f"{loss.upper()}, {words}"]
        for difference, p in family(tasks, smollm2, loss, other, at).values():
            cell = show_difference(difference).replace(", not paired", "ʷ")
            row.append(f"**{cell}**" if p < 0.05 else cell)
        rows.append(row)
    return markdown("| difference" + ON_TASKS + " sentiment | checked |", rows)

def answers(
    tasks: list[Tuned],
    smollm2: list["SmolLM2"],
    verdicts: list[dict],
    decisions: dict[str, dict],
    at_lower_rates: decide.Compared,
) -> list[dict]:
    """What the report and the README say: claim, verdict, one number, how sure we are, and the page. DPO's later test on
    *checked*, at lower rates, stands beside the verdicts and is in none of them."""
    outcomes = lambda claim, *losses: [
        verdict["outcome"] for verdict in verdicts if verdict["claim"].startswith(claim) and verdict["loss"] in losses
    ]
    count = lambda some, words: f"{sum(one == decide.HELD for one in some)} of {len(some)} {words}"
    shares = [tuned.share("grpo", HUMANLINE) for tuned in tasks]
    shares = [share[0] for share in shares + [one.shares()[HUMANLINE] for one in smollm2 if one.loss == "grpo"]]
    alone = [tuned.compare("grpo", "sync alone", "plain") for tuned in tasks]
    p_values = holm([difference["p"] for difference in alone])
    gains = sum(p < 0.05 and difference["mean"] > 0 for p, difference in zip(p_values, alone))
    better = f"{HUMANLINE} is {BETTER} plain"
    below = {}
    for loss in decide.DECIDED:
        found = family(tasks, smollm2, loss, "online", last).values()
        below[loss] = sum(p < 0.05 and difference["mean"] < 0 for difference, p in found)
    gain = at_lower_rates.compare(HUMANLINE, "plain")
    *_, p = holm([one["p_asked"] for one in verdicts if one["claim"] == better and one["loss"] == "DPO"] + [gain["p"]])
    is_gain = p < 0.05 and gain["mean"] > 0
    share = at_lower_rates.share("test", HUMANLINE)
    rows = [
        (
            "GRPO: offline, humanline beats plain", decide.HELD, f"on {count(outcomes(better, 'GRPO'), 'tasks')}",
            "fairly sure; less so with greedy decoding", "verdicts.md",
        ),
        (
            "GRPO: offline with humanline matches online", PARTLY,
            f"closes {min(shares):.0%} to {max(shares):.0%} of the gap", "fairly sure that it falls short on some tasks",
            "verdicts.md",
        ),
        (
            "GRPO: on small tasks, the gain comes from syncing", decide.HELD,
            f"the sync alone gains on {gains} of {len(tasks)} small tasks", "likely", "verdicts.md",
        ),
        (
            "DPO and KTO: offline with humanline matches online", decide.NOT_HERE,
            f"DPO closes {decisions['dpo']['share'][0]:.0%} of the gap on *checked*, {share[0]:.0%} at lower rates",
            f"sure, for DPO also at [lower rates](method.md); DPO ended below online on {below['dpo']} tasks, KTO on {below['kto']}",
            "real-checked.md",
        ),
        (
            "DPO and KTO: offline, humanline beats plain", decide.UNDECIDED,
            f"shown in {count(outcomes(better, 'DPO', 'KTO'), 'cases')}, later in {is_gain:d} at lower rates", "open",
            "verdicts.md",
        ),
        (
            "GRPO: drawing samples 64 times less often is as good", decide.UNDECIDED,
            f"shown on {count(outcomes(EVERY_64, 'GRPO'), 'tasks')}", "open; five models are too few", "neighbours.md",
        ),
    ]
    return [dict(zip(("claim", "verdict", "number", "sure", "page"), row)) for row in rows]

def answer_table(found: list[dict]) -> str:
    rows = [
        [one["claim"], f"**{one['verdict']}**", one["number"], one["sure"], f"[{one['page'].removesuffix('.md')}]({one['page']})"]
        for one in found
    ]
    return markdown("| claim | verdict | in one number | how sure we are | page |", rows)

def measures_table(tasks: list[Tuned], smollm2: list["SmolLM2"]) -> str:
    rows = []
    for loss, (words, other, at) in itertools.product(FORMS_OF, MEASURES):
        found = of_each_task(tasks, smollm2, loss, other, at).values()
        rows.append([f"{loss.upper()}, {words}", *map(show_difference, found)])
        rows[-1] += [""] * (6 - len(rows[-1]))
    return markdown("| difference" + ON_TASKS + " SmolLM2, sentiment | SmolLM2, checked |", rows)

def parts_table(tasks: list[Tuned]) -> str:
    rows = []
    for loss, more in PARTS.items():
        for form, other in OF_ALL + more:
            found = [show_difference(tuned.compare(loss, form, other)) for tuned in tasks]
            rows.append([f"{loss.upper()}, {form} − {other}", *found])
    return markdown("| difference" + ON_TASKS, rows)

def methods_table(tasks: list[Tuned], compared: list[decide.Compared]) -> str:
    """pass@1 on the tiny models, and the reward of those runs on SmolLM2 that real.py tuned."""
    with_k = lambda ends, k: show(estimate(ends)) + (f", k {k}" if k else "")
    rows = []
    for loss, (way, names) in itertools.product(FORMS_OF, IN_REPORT.items()):
        row = []
        for tuned in tasks:
            forms = [tuned.forms[loss, name] for name in names if (loss, name) in tuned.forms]
            best = max(forms, key=lambda form: form.validation, default=None)
            row.append(with_k(map(last, best.runs.values()), best.k) if best else "")
        for one in compared:
            if one.loss == loss:
                name = one.best_of(names)
                row.append(with_k(one.rewards("test", name)[0], one.settings[name][1]) if name else "")
        if any(row):
            rows.append([f"{loss.upper()}, {way}", *row])
    on_smollm2 = "".join(f" SmolLM2, {task} |" for task in dict.fromkeys(one.task for one in compared))
    return markdown("| pass@1, or reward, at the end" + ON_TASKS + on_smollm2, rows)

def fill(text: str, tables: dict[str, str]) -> str:
    """Replace what stands between `<!-- NAME -->` and the next empty comment."""
    for name, table in tables.items():
        text, found = re.subn(
            rf"(<!-- {name} -->\n\n).*?(\n\n<!-- -->)",
            lambda m: m[1] + table + m[2],
            text,
            flags=re.DOTALL,
        )
        assert found == 1, name
    return text

# ---------- Figures -----------------------------------------------------------------------------------------

COLOURS = {"plain": "#555555", HUMANLINE: "#0072B2", NEIGHBOUR: "#D55E00", "online": "#009E73", NO_CLIP: "#CC79A7"}
# Where lines coincide, a thin one that is drawn later leaves the edges of a thick one in sight.
STYLES = {
    "online": dict(linewidth=5, alpha=0.4),
    NEIGHBOUR: dict(linewidth=1.8, linestyle=":"),
    "plain": dict(linewidth=3.2),
    HUMANLINE: dict(linewidth=1.6, linestyle="--"),
}
LIGHT_BLUE = "#56B4E9"

def new_figure(height: float, rows: int, columns: int) -> tuple[Any, np.ndarray]:
    figure, axes = evaluation.new_figure(height, rows, columns)
    return figure, np.array(axes).reshape(rows, columns)

def add_common_legend(figure: Any, axis: Any) -> None:
    """The legend of one panel, below all of them."""
    lines, labels = axis.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=4, frameon=False)

def add_line(axis: Any, x: Iterable[float], y: Iterable[float], colour: str, label: str, **style: Any) -> None:
    axis.plot(x, y, color=colour, label=label, **dict(linewidth=1.8, markersize=4) | style)

def draw_curves(tuned: Tuned, path: Path) -> None:
    """Above, pass@1 against steps at the setting that tuning chose for each form, means over the test bases; below, where
    the tuning bases ended at each learning rate, with the best k."""
    figure, axes = new_figure(5.0, 2, len(tuned.losses))
    steps = range(0, tuned.task.steps + 1, tuned.task.every)
    for loss, (top, bottom) in zip(tuned.losses, axes.T):
        for label, style in STYLES.items():
            name = tuned.best_neighbour(loss) if label == NEIGHBOUR else label
            form = tuned.forms.get((loss, name))
            if not form:
                continue
            curves = [run["test"] for run in form.runs.values()]
            add_line(top, steps, np.mean(curves, axis=0), COLOURS[label], label, **style)
            ends = {}
            for run, outcome in tuned.known.items():
                if (run.loss, run.form) == (loss, name) and run.seed in tuned.tuning:
                    ends.setdefault((run.lr, run.k), []).append(outcome["validation"][-1])
            rates = sorted({lr for lr, _ in ends})
            best = [max(np.mean(some) for (of_rate, _), some in ends.items() if of_rate == lr) for lr in rates]
            add_line(bottom, rates, best, COLOURS[label], label, marker="o", **style)
        top.set(title=loss.upper(), xlim=(0, steps[-1]), xlabel="steps")
        bottom.set(ylim=(0, 1.02), xscale="log", xlabel="learning rate")
        bottom.xaxis.set_minor_formatter("")
    lowest = min(axis.get_ylim()[0] for axis in axes[0])
    for axis in axes[0]:
        axis.set_ylim(max(0, math.floor(10 * lowest) / 10), 1.02)
    axes[0, 0].set_ylabel("pass@1, tuned")
    axes[1, 0].set_ylabel("pass@1 after the last step")
    add_common_legend(figure, axes[0, 0])
    figure.savefig(path, dpi=150)

def draw_mechanism(tasks: list[Tuned], path: Path) -> None:
    """Tokens that both clips stop, of GRPO on the first tuning base, at the rate that tuning chose for humanline."""
    figure, axes = new_figure(2.9, 1, len(tasks))
    for axis, tuned in zip(axes[0], tasks):
        steps = np.arange(0, tuned.task.steps + 1, tuned.task.every)
        middles = (steps[1:] + steps[:-1]) / 2
        chosen = tuned.forms["grpo", HUMANLINE]
        plain = stopped(tuned, "plain", chosen.lr, 0)
        ours, own = (stopped(tuned, HUMANLINE, chosen.lr, chosen.k, clip) for clip in ("clip_fraction", "clamped"))
        add_line(axis, middles, 100 * plain, COLOURS["plain"], "GRPO's clip in plain")
        add_line(axis, middles, 100 * ours, COLOURS[HUMANLINE], "GRPO's clip in humanline")
        add_line(axis, middles, 100 * own, LIGHT_BLUE, "humanline's own clip", linestyle="--")
        title = f"{IN_FIGURES[tuned.name]}, {show_settings(chosen.lr, chosen.k)}"
        axis.set(title=title, ylim=(0, 21), xlim=(0, steps[-1]), xlabel="steps")
    axes[0, 0].set_ylabel("tokens stopped, %")
    add_common_legend(figure, axes[0, 0])
    figure.savefig(path, dpi=150)

def draw_gap(shares: dict[tuple[str, str], dict], path: Path) -> None:
    """The share of the gap between plain and online that humanline closes, and that GRPO closes without its ratio clip."""
    has_no_gap = lambda row: shares[row][HUMANLINE] is None
    rows = sorted(shares, key=lambda row: (has_no_gap(row), list(FORMS_OF).index(row[0])))
    first = sum(not has_no_gap(row) for row in rows) - 0.5
    figure, axes = new_figure(1.3 + 0.3 * len(rows), 1, 1)
    axis, low, high = axes[0, 0], -1.0, 1.5
    series = (HUMANLINE, "humanline", -0.16), (NO_CLIP, "plain GRPO without its ratio clip", 0.16)
    for name, label, offset in series:
        colour = COLOURS[name]
        found = [
            (i + offset * (NO_CLIP in shares[row]), *shares[row][name])
            for i, row in enumerate(rows) if shares[row].get(name)
        ]
        y, middle, start, end = np.array(found).T
        axis.hlines(y, start.clip(low), end.clip(max=high), color=colour, linewidth=2.2)
        add_line(axis, middle.clip(low, high), y, colour, label, marker="o", linestyle="", markersize=6)
        for where, at in zip(y, start):  # the interval goes on
            if at < low:
                axis.plot(low, where, "<", color=colour, markersize=7, clip_on=False)
    for i in range(0, math.ceil(first), 2):
        axis.axhspan(i - 0.5, i + 0.5, color="#F7F7F7", zorder=0)
    axis.axhspan(first, len(rows) - 0.5, color="#EEEEEE", zorder=0)
    place = dict(ha="center", va="center")
    axis.text(0.25, (first + len(rows) - 0.5) / 2, "no clear gap between plain and online", **place)
    axis.vlines([0, 1], -0.5, first, color="#999999", linewidth=1)
    names = [f"{loss.upper()}, {task}" for loss, task in rows]
    axis.set(yticks=range(len(rows)), yticklabels=names, ylim=(len(rows) - 0.5, -0.5), xlim=(low, high))
    axis.set(xticks=[-1, -0.5, 0, 0.5, 1, 1.5], xticklabels=["−100%", "−50%", "0%\nplain", "50%", "100%\nonline", "150%"])
    add_common_legend(figure, axis)
    figure.savefig(path, dpi=150)

def draw_real(cells: list[first_real.Stored], path: Path) -> None:
    """Reward against KL to the base, GRPO: means over seeds, faint dots for each seed, and where those end that leave the
    figure."""
    figure, axes = new_figure(3.6, 1, 2)
    for axis, cell in zip(axes[0], cells):
        forms = "online", NO_CLIP, "plain", HUMANLINE
        runs = {name: list(cell.at_tuned(name).values()) for name in forms}
        paths = {
            name: np.array([first_real.path_of(run, first_real.steps_of(some)) for run in some])
            for name, some in runs.items()
        }
        edge, gone = 1.15 * paths[HUMANLINE][..., 0].max(), []
        for name, points in paths.items():
            axis.plot(*points.reshape(-1, 2).T, "o", color=COLOURS[name], markersize=3, alpha=0.3)
            add_line(axis, *points.mean(0).T, COLOURS[name], name, marker="o")
            kl, reward = points[:, -1].mean(0)
            if kl > edge:
                gone.append((reward, f"{name} ends at {kl:.0f} nats →", COLOURS[name]))
        axis.set(title=f"SmolLM2, {cell.task}", ylim=(0, 1.03), xlim=(-0.3, edge))
        axis.set_xlabel("KL to the base, nats a completion")
        for i, (_, words, colour) in enumerate(sorted(gone)):
            place = dict(ha="right", va="center", transform=axis.transAxes)
            axis.text(0.98, 0.06 + 0.08 * i, words, color=colour, **place)
    axes[0, 0].set_ylabel("held-out reward, GRPO")
    add_common_legend(figure, axes[0, 0])
    figure.savefig(path, dpi=150)

def draw_ways(ways: list[decide.Way], path: Path) -> None:
    """Reward against KL to the base on the validation prompts, with the steps marked."""
    figure, axes = new_figure(4.4, 1, len(ways))
    for axis, way in zip(axes[0], ways):
        rewards, distances = (values[..., 1:] for values in (way.rewards, way.distances))  # from the first measurement on
        low = min(0.4, rewards.mean(1).min() - 0.05)
        axis.set(title=way.title, ylim=(low, 1.03), xlim=(0, np.percentile(distances, 97)))
        axis.set_xlabel("KL to the base, nats")
        marked = [j for j, step in enumerate(way.steps[1:]) if step % 16 == 0]
        for i, name in enumerate(way.forms):
            colour, means = COLOURS[name], (distances[i].mean(0), rewards[i].mean(0))
            axis.plot(distances[i].ravel(), rewards[i].ravel(), "o", color=colour, markersize=3, alpha=0.3)
            add_line(axis, *means, colour, name, marker="o", markersize=6)
            if name != "online":
                add_steps(axis, [way.steps[1 + j] for j in marked], *(mean[marked] for mean in means), colour)
    axes[0, 0].set_ylabel("validation reward")
    add_common_legend(figure, axes[0, 0])
    figure.savefig(path, dpi=150)

def add_steps(axis: Any, steps: list[int], x: np.ndarray, y: np.ndarray, colour: str) -> None:
    """Write the step beside each point of a line, on the side where the line is not; points that lie on one another share
    a label."""
    places = axis.transData.transform(np.stack([x, y], -1))
    groups = [[0]]
    for i in range(1, len(steps)):
        if np.hypot(*(places[i] - places[i - 1])) < 15:
            groups[-1].append(i)
        else:
            groups.append([i])
    for i, group in enumerate(groups):
        near = [places[some[-1]] for some in groups[max(0, i - 1) : i + 2] if some is not group]
        away = places[group].mean(0) - np.mean(near, axis=0)
        if i == 0:  # down, at a right angle
            away = np.array([away[1], -away[0]]) * (1 if away[0] > 0 else -1)
        offset = 13 * away / max(np.hypot(*away), 1)
        words = "–".join(str(steps[j]) for j in sorted({group[0], group[-1]}))
        place = dict(textcoords="offset points", ha="center", va="center", color=colour, fontweight="bold")
        axis.annotate(words, (x[group].mean(), y[group].mean()), offset, **place)

# ---------- All of it ---------------------------------------------------------------------------------------

class Everything:
    """All stored runs, and what is computed from them."""

    def __init__(self):
        self.tasks = [Tuned(name) for name in TASKS]
        self.cells = [
            first_real.Stored(task, loss)
            for task in first_real.TASKS
            for loss in first_real.FORMS_OF
        ]
        self.tiny = {
            tuned.name: {loss: tuned.facts(loss) for loss in FORMS_OF} for tuned in self.tasks
        }
        self.smollm2 = {(cell.task, cell.loss): first_real.facts_of(cell) for cell in self.cells}
        self.compared = decide.read_tasks()
        self.more = method.read_results()
        decided = {
            (one.task, one.loss): one
            for one in itertools.chain(*self.compared.values(), method.compared(self.more))
            if one.loss in decide.DECIDED
        }
        self.on_smollm2 = [
            SmolLM2(cell, facts, decided.get(place))
            for cell, (place, facts) in zip(self.cells, self.smollm2.items())
        ]
        self.verdicts = front_verdicts(self.tasks, self.on_smollm2)
        self.held_back = held_back(self.tasks)
        self.taper, self.prior = taper_rule(self.tasks), prior_rule(self.tasks)
        for one in itertools.chain(*self.compared.values()):
            self.taper["cells"] += taper_cells_of_smollm2(one)
        self.decisions = {task: decide.decide_task(some) for task, some in self.compared.items()}
        at_lower_rates = method.PARTS["B"].compared(self.more)
        self.answers = answers(self.tasks, self.on_smollm2, self.verdicts, self.decisions["checked"], at_lower_rates)

    def pages(self) -> dict[str, str]:
        """The text of each file."""
        texts = {
            f"{tuned.name}.md": task_page(tuned, self.tiny[tuned.name]) for tuned in self.tasks
        }
        texts["real.md"] = first_real.page(self.cells, list(self.smollm2.values()))
        for task, compared in self.compared.items():
            texts[f"real-{task}.md"] = decide.page(task, compared, self.decisions[task])
        if self.more:
            texts["method.md"] = method.page(self.more)
        measures = measures_table(self.tasks, self.on_smollm2)
        clip = f"{ratio_clip(self.tasks, self.cells)}\n\n{ABOUT_STOPPED}\n\n{stopped_table(self.tasks)}"
        beta = f"{held_back_table(self.held_back)}\n\n{ABOUT_RATES}\n\n{rate_by_rate_table(self.tasks)}"
        corrected = corrected_table(self.tasks, self.on_smollm2)
        texts["verdicts.md"] = verdicts_page(
            measures, corrected, parts_table(self.tasks), clip, beta, self.verdicts, self.taper, self.prior
        )
        tables = {
            "report.md": dict(answer=answer_table(self.answers), differences=differences_table(self.tasks, self.on_smollm2)),
            "neighbours.md": dict(methods=methods_table(self.tasks, list(itertools.chain(*self.compared.values())))),
        }
        for name, filled in tables.items():
            texts[name] = fill((HERE / name).read_text(encoding="utf-8"), filled)
        facts = dict(
            runs={tuned.name: len(tuned.known) for tuned in self.tasks},
            tests={tuned.name: tuned.tests for tuned in self.tasks},
            incomplete=[tuned.name for tuned in self.tasks if not tuned.is_complete],
            tasks=self.tiny,
            smollm2={f"{task}, {loss}": forms for (task, loss), forms in self.smollm2.items()},
            tuned_smollm2={
                f"{one.task}, {one.loss}": one.facts()
                for one in itertools.chain(*self.compared.values())
            },
            decisions=self.decisions,
            doubts={
                f"{one.task}, {one.loss}": one.doubts()
                for one in itertools.chain(*self.compared.values()) if one.loss in decide.DECIDED
            },
            answers=self.answers,
            held_back=self.held_back,
            verdicts=self.verdicts,
            taper=self.taper,
            prior=self.prior,
        )
        texts["facts.json"] = json.dumps(rounded(facts), indent=1) + "\n"
        return texts

    def shares(self) -> dict[tuple[str, str], dict]:
        """By loss and task, the share of the gap that forms close, of every experiment that compares them."""
        found = {(one.loss, f"SmolLM2 {one.task}"): one.shares() for one in self.on_smollm2}
        for tuned, loss in itertools.product(self.tasks, FORMS_OF):
            if (loss, HUMANLINE) in tuned.forms:
                found[loss, IN_FIGURES[tuned.name]] = {
                    name: tuned.share(loss, name) for name in (HUMANLINE, NO_CLIP) if (loss, name) in tuned.forms
                }
        return found

    def draw(self, out: Path) -> None:
        for tuned in self.tasks:
            if tuned.known:
                draw_curves(tuned, out / f"{tuned.name}.png")
        draw_mechanism(self.tasks, out / "mechanism.png")
        draw_gap(self.shares(), out / "gap.png")
        draw_real([cell for cell in self.cells if cell.loss == "grpo"], out / "real.png")
        for task, compared in self.compared.items():
            if decided := [one for one in compared if one.loss in decide.DECIDED and decide.final_rewards(one)]:
                draw_ways([one.way() for one in decided], out / f"real-{task}.png")
        if ways := method.ways(self.more):
            draw_ways(ways, out / "method.png")

def rounded(value: Any) -> Any:
    """Floats to four digits, and None where there is no number."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value

def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE, help="a folder for pages and figures")
    out = parser.parse_args().out
    everything = Everything()
    for name, text in everything.pages().items():
        evaluation.write(out / name, text)
    everything.draw(out)

if __name__ == "__main__":
    main()
