"""Decide by the rule whether humanline reaches online with DPO and KTO on SmolLM2, and draw the page of these runs.

The runs are those of real.py; `reproduce.py` writes the pages. The rule, fixed before the runs, is in `decide`.
"""

import itertools
from pathlib import Path
from statistics import fmean
from typing import Iterable, Iterator, NamedTuple

import numpy as np

import real  # first: experiments.py, which it imports, makes the next line possible
import eval as evaluation
from estimates import (
    compare,
    estimate,
    holm,
    markdown,
    share_of_gap,
    show,
    show_difference,
    show_form,
    show_mean,
    show_rate,
    show_settings,
    show_share,
    shown,
)

RESULTS = Path(__file__).resolve().parent / "results"
LEAST_GAP = 0.03  # of the reward: a gap that may be smaller cannot be tested
PARITY = 0.03  # of the reward: what is less does not count
LEVELS = {8: 0.01, 16: 0.04}  # of the intervals and tests of the share, by the number of seeds
DECIDED = "dpo", "kto"
COMPARED = "plain", "humanline", "online"  # the forms that the rule reads
DISTANCES = 2, 5, 8, 12, 20  # nats from the base: the ranges in which rewards are compared
HELD, NOT_HERE, UNDECIDED = "held", "not here", "undecided"
NEEDS_MORE = f"{UNDECIDED}; eight more seeds"
NO_GAP = "no gap here, the claim cannot be tested"

class Compared:
    """The stored runs of a task and a loss, and the forms whose tuning is complete, each with its chosen setting."""

    def __init__(self, task: str, loss: str, known: real.Known, settings: dict[str, real.Settings]):
        self.task, self.loss, self.known, self.settings = task, loss, known, settings
        self.tests = {form: self.outcomes(form, is_test=True) for form in settings}  # by form and seed

        # Eight more seeds count once all of them are there, so nothing is judged on the way.
        self.seeds = max(filter(self.has_seeds, LEVELS), default=None)
        self.waiting = []
        for runs in self.tests.values():
            later = [seed for seed in runs if seed > (self.seeds or min(LEVELS))]
            self.waiting += map(runs.pop, later)

    def outcomes(self, form: str, is_test: bool) -> dict[int, dict]:
        """The runs of a form at its setting, by seed."""
        setting = (form, *self.settings[form])
        return {
            run.seed: outcome
            for run, outcome in self.known.items()
            if (run.form, run.lr, run.k) == setting and run.is_test == is_test
        }

    def has_seeds(self, count: int, *forms: str) -> bool:
        """Whether these forms, or else all whose tuning is complete, if any, were tested on seeds 1 to `count`."""
        tests = [self.tests.get(form, {}) for form in forms or self.tests]
        return bool(tests) and all(seed in runs for seed in range(1, count + 1) for runs in tests)

    def validation(self, form: str) -> float:
        """The mean validation reward that chose the setting."""
        return fmean(run["validation"][-1] for run in self.outcomes(form, is_test=False).values())

    def best_of(self, names: Iterable[str]) -> str | None:
        """Of the forms with these names, the one that is best on the validation prompts; None if there is none, or if
        test runs of a tuned form are missing."""
        if not self.has_seeds(len(real.TEST_SEEDS[self.loss])):
            return None
        return max((name for name in names if name in self.tests), key=self.validation, default=None)

    def rewards(self, model: str, *forms: str, what: str = "reward") -> list[np.ndarray]:
        """One of real.MEASURES on the test prompts, of the final model ("test") or of the best checkpoint ("best"), over
        the seeds that all these forms have; none if there is no such seed."""
        tests = [self.tests.get(form, {}) for form in forms]
        common = sorted(set.intersection(*map(set, tests)))
        if not common:
            return []
        return [np.array([runs[seed][model][what] for seed in common]) for runs in tests]

    def compare(self, form: str, other: str, what: str = "reward", model: str = "test") -> dict | None:
        rewards = self.rewards(model, form, other, what=what)
        return compare(*rewards, margin=PARITY) if rewards and form != other else None

    def share(self, model: str, form: str) -> list[float] | None:
        """The share of the gap that a form closes, where it has two seeds or more."""
        rewards = self.rewards(model, "plain", form, "online")
        is_between = form not in ("plain", "online")
        return share_of_gap(*rewards) if rewards and len(rewards[0]) > 1 and is_between else None

    def on_the_way(self) -> tuple[list[int], np.ndarray, np.ndarray]:
        return on_the_way([self.tests[form] for form in COMPARED])

    def way(self) -> "Way":
        return Way(f"{self.loss.upper()}, SmolLM2, {self.task}", COMPARED, *self.on_the_way())

    def doubts(self) -> dict | None:
        """How much the decision hangs on the step at which the forms stop, on how far they travel, and on the few seeds of
        tuning; None where there is no decision."""
        if not final_rewards(self):
            return None
        steps, rewards, distances = self.on_the_way()
        # Two means of two seeds each differ by chance by sd * sqrt(1/2 + 1/2): the spread over seeds.
        spread = [float(of_form[:, -1].std(ddof=1)) for of_form in rewards]
        return dict(
            share_at=shares_on_the_way(steps, rewards),
            equally_far=equally_far(COMPARED, rewards, distances),
            tuning_error=dict(zip(COMPARED, spread)),
        )

    def facts(self) -> dict[str, dict]:
        """What the page says of each form that has been tested."""
        found = {}
        for form, runs in self.tests.items():
            outcomes = shown(runs.values())
            if not outcomes:
                continue
            lr, k = self.settings[form]
            found[form] = dict(
                lr=lr,
                k=k,
                seeds=len(outcomes),
                validation=self.validation(form),
                minus_plain=self.compare(form, "plain"),
                minus_online=self.compare(form, "online"),
                share_of_gap=self.share("test", form),
                share_of_gap_best=self.share("best", form),
                best_step=estimate(run["best_step"] for run in outcomes),
                seconds=estimate(run["seconds"] for run in outcomes),
                drawing=estimate(run["drawing"] for run in outcomes),
            )
            for name in real.MEASURES:
                found[form][name] = estimate(run["test"][name] for run in outcomes)
            for name in "reward", "kl":
                found[form][f"{name}_best"] = estimate(run["best"][name] for run in outcomes)
        return found

def read_compared(task: str, loss: str) -> Compared:
    """The runs of real.py."""
    known = real.read_results(RESULTS / f"real-{task}.jsonl")
    known = {run: outcome for run, outcome in known.items() if run.loss == loss}
    tuned = [form for form in real.FORMS[loss] if not real.plan_tuning(task, loss, form, known)]
    return Compared(task, loss, known, {form: real.ranked(task, loss, form, known)[0] for form in tuned})

def read_tasks() -> dict[str, list[Compared]]:
    """The stored runs by task. The second task is run only where the first has no gap."""
    first, second = real.TEMPLATES
    is_run = (RESULTS / f"real-{second}.jsonl").exists()
    tasks = (first, second) if is_run else (first,)
    return {task: [read_compared(task, loss) for loss in real.FORMS] for task in tasks}

# ---------- On the way --------------------------------------------------------------------------------------

class Way(NamedTuple):
    """A panel of a figure: what `on_the_way` gives."""

    title: str
    forms: Iterable[str]
    steps: list[int]
    rewards: np.ndarray
    distances: np.ndarray

def on_the_way(tests: list[dict[int, dict]]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Of the runs of some forms, by seed: the steps at which all were measured on the validation prompts, and their
    rewards and KL to the base there: (forms, seeds, steps), of the seeds that all forms have."""
    seeds = sorted(set.intersection(*map(set, tests)))
    steps = sorted(set.intersection(*(set(runs[seed]["steps"]) for runs in tests for seed in seeds)))
    at_steps = lambda run, what: [run[what][run["steps"].index(step)] for step in steps]
    rewards, distances = (
        np.array([[at_steps(runs[seed], what) for seed in seeds] for runs in tests])
        for what in ("validation", "validation_kl")
    )
    return steps, rewards, distances

def shares_on_the_way(steps: list[int], rewards: np.ndarray) -> dict[int, list[float] | None]:
    """The share of the gap after each step, from the rewards of COMPARED; None where there is no clear gap."""
    shares = {}
    for step, (plain, ours, online) in zip(steps[1:], np.moveaxis(rewards, -1, 0)[1:]):
        has_gap = compare(online, plain)["low"] > 0
        shares[step] = share_of_gap(plain, ours, online) if has_gap else None
    return shares

def share_table(shares: dict[str, dict]) -> str:
    """What `shares_on_the_way` found for each loss."""
    steps = " | ".join(f"step {step}" for step in next(iter(shares.values())))
    rows = [[loss.upper(), *(show_share(share) or "no clear gap" for share in at.values())] for loss, at in shares.items()]
    return markdown(f"| share of the gap after | {steps} |", rows)

def equally_far(forms: Iterable[str], rewards: np.ndarray, distances: np.ndarray) -> dict[str, dict]:
    """The mean reward of each form while its runs were in a range of KL to the base, and the second form less the
    first."""
    found = {}
    for low, high in itertools.pairwise((*DISTANCES, np.inf)):
        is_there = (low <= distances) & (distances < high)
        in_range = [  # of each form, a mean for each seed that was there
            np.array([some[there].mean() for some, there in zip(*of_form) if there.any()])
            for of_form in zip(rewards, is_there)
        ]
        first, second, *_ = in_range
        is_enough = min(len(first), len(second)) > 1
        difference = compare(second, first, paired=False) if is_enough else None
        means = [float(some.mean()) if len(some) else None for some in in_range]
        name = f"{low} to {high}" if high < np.inf else f"{low} and more"
        found[name] = dict(zip(forms, means), difference=difference)
    return found

def distance_rows(found: dict[str, dict]) -> list[list[str]]:
    """What `equally_far` found, as rows of a table."""
    reward = lambda mean: "" if mean is None else f"{mean:.3f}"
    return [
        [nats, *(reward(mean) for form, mean in at.items() if form != "difference"),
         show_difference(at["difference"]).removesuffix(", not paired")]
        for nats, at in found.items()
    ]

# ---------- The decision ------------------------------------------------------------------------------------

Rewards = tuple[np.ndarray, np.ndarray, np.ndarray]  # of plain, humanline and online, over the same seeds

RULE = f"""The gap is online − plain, paired by seed. Where the lower end of its 95% interval is below {LEAST_GAP},
there is no gap to test the claim on. Else the claim, that humanline closes more than half of the gap, has *{HELD}*
where Fieller's interval of the share lies wholly above one half, and is said to be *{NOT_HERE}* where it lies wholly below
(when the rule was written: *confirmed* and *refuted*). If neither, eight more seeds are run, once; therefore the level is
{LEVELS[8]} with eight seeds and {LEVELS[16]} with sixteen. *p of one half*: a paired t test of humanline against the mean
of plain and online, by Holm's method over DPO and KTO; it must be below the level, too. *Parity*: whether two one-sided
tests say that humanline is within {PARITY} of online (Holm's p). A loss without a gap, or with missing runs, counts
p = 1."""

def decide(rewards: dict[str, Rewards | None]) -> dict[str, dict]:
    """Apply the rule to the final test rewards of each loss; None where fewer than eight seeds are complete."""
    found = {loss: weigh(*arrays) for loss, arrays in rewards.items() if arrays is not None}
    for name in "half", "parity":
        p_values = [found[loss][f"p_{name}"] if loss in found else 1.0 for loss in rewards]
        for loss, p in zip(rewards, holm(p_values)):
            if loss in found:
                found[loss][f"p_{name}"] = p
    decisions = {}
    for loss in rewards:
        decision = found.get(loss, {})
        decisions[loss] = decision | dict(outcome=outcome_of(decision))
    return decisions

def weigh(plain: np.ndarray, ours: np.ndarray, online: np.ndarray) -> dict:
    """The estimates of one loss that the rule needs, before Holm's method."""
    seeds = len(plain)
    gap = compare(online, plain)
    has_gap = gap["low"] >= LEAST_GAP
    half = compare(ours, (plain + online) / 2)
    parity = compare(ours, online, margin=PARITY)
    return dict(
        seeds=seeds,
        level=LEVELS[seeds],
        gap=gap,
        has_gap=has_gap,
        share=share_of_gap(plain, ours, online, level=LEVELS[seeds]),
        minus_online=parity,
        p_half=half["p"] if has_gap else 1.0,
        p_parity=parity["p_same"] if has_gap else 1.0,
    )

def outcome_of(decision: dict) -> str:
    if not decision:
        return "incomplete"
    if not decision["has_gap"]:
        return NO_GAP
    _, low, high = decision["share"]
    if decision["p_half"] < decision["level"] and low > 0.5:
        return HELD
    if decision["p_half"] < decision["level"] and high < 0.5:
        return NOT_HERE
    return NEEDS_MORE if decision["seeds"] < max(LEVELS) else UNDECIDED

def decide_task(compared: list[Compared]) -> dict[str, dict]:
    return decide({one.loss: final_rewards(one) for one in compared if one.loss in DECIDED})

def final_rewards(compared: Compared) -> Rewards | None:
    """The rewards that the rule reads: of all sixteen seeds, or else of the first eight. None if any is missing."""
    rewards = compared.rewards("test", *COMPARED)
    return tuple(rewards) if compared.seeds and rewards else None

# ---------- The page ----------------------------------------------------------------------------------------

HOW = f"""± is half of the 95% interval over seeds; differences are paired by seed. A seed is the offline data and the
run. *Final* is the model after the last step, which alone decides; *best* that of the best validation measurement, with
its mean step. *Of the gap* has Fieller's 95% interval. Reward and KL are of the test prompts with
{real.EVAL_SAMPLES} samples each; KL is to the base, in nats a completion, of one sample a prompt. *Distinct pairs*:
different pairs of neighbouring words, as a share of all. Seconds are of training, without measurements, beside what
else ran."""

FORM_HEAD = (
    "| form | lr, k | seeds | validation | reward, final | KL, final | reward, best | KL, best | best step | − plain | "
    "− online | of the gap | of the gap, best | greedy | length | distinct pairs | seconds, drawing |"
)

def page(task: str, compared: list[Compared], decisions: dict[str, dict]) -> str:
    count = sum(len(one.known) for one in compared)
    incomplete = []
    for one in compared:
        seeds = list(real.TEST_SEEDS[one.loss])
        if one.loss in DECIDED and decisions[one.loss]["outcome"] == NEEDS_MORE:
            seeds += real.MORE_SEEDS
        if forms := {run.form for run in real.plan(task, one.loss, one.known, seeds)}:
            number = real.count_missing(task, one.loss, one.known, seeds)
            names = ", ".join(f"*{show_form(form)}*" for form in sorted(forms))
            incomplete.append(f"{one.loss.upper()}: {names} (some {number})")
    outcomes = " ".join(f"{loss.upper()}: {decision['outcome']}." for loss, decision in decisions.items())
    text = [
        f"# SmolLM2 on *{task}*: does humanline reach online?",
        f"**{outcomes}** The claim is that humanline closes more than half of the gap between plain and online.",
        decision_table(decisions),
    ]
    doubts = {one.loss: one.doubts() for one in compared if one.loss in DECIDED}
    text += doubt_tables(task, {loss: found for loss, found in doubts.items() if found})
    text += ["## The rule, fixed before the runs", RULE]
    text += ["## Settings", f"{count} runs of [real.py](real.py).", setting_table(task, compared)]
    if incomplete:
        text.append(
            f"Runs are missing of {'; '.join(incomplete)}. No form is tested before its tuning is complete."
        )
    waiting = shown(itertools.chain(*(one.waiting for one in compared)))
    if waiting:
        text.append(f"Stored runs of seeds from 9 on, which count once all of them are there: {len(waiting)}.")
    text += ["## Tests", HOW]
    for one in compared:
        facts = one.facts()
        table = form_table(facts) if facts else "No form has been tuned and tested yet."
        text += [f"### {one.loss.upper()}", table]
        text += [part for part in (lead_table(one), tuning_table(one), way_table(one)) if part]
    samples = list(itertools.chain(*map(sample_lines, compared)))
    if samples:
        text += ["## What the final models write to test prompts (the first seed)", "\n".join(samples)]
    return "\n\n".join(text) + "\n"

def doubt_tables(task: str, doubts: dict[str, dict]) -> list[str]:
    """The section on how much the decision hangs on the stopping step, on the distance, and on the tuning seeds."""
    if not doubts:
        return []
    rows = [[loss.upper(), *row] for loss, found in doubts.items() for row in distance_rows(found["equally_far"])]
    errors = [[loss.upper(), *(f"{found['tuning_error'][form]:.3f}" for form in COMPARED)] for loss, found in doubts.items()]
    forms = " | ".join(COMPARED)
    return [
        "## What the decision hangs on",
        f"![reward against KL to the base, with the steps marked](real-{task}.png)",
        ABOUT_PICTURE,
        f"**The step at which all forms stop.** {ABOUT_STEPS}",
        share_table({loss: found["share_at"] for loss, found in doubts.items()}),
        f"**How far a form travels.** {ABOUT_DISTANCES}",
        markdown(f"| loss | KL to the base, nats | {forms} | humanline − plain |", rows),
        f"**Two tuning seeds.** {ABOUT_TUNING}",
        markdown(f"| standard error | {forms} |", errors),
    ]

ABOUT_PICTURE = """*Validation prompts. A faint dot is a seed at a step; lines join the means over seeds, and numbers are
steps.*"""

ABOUT_STEPS = """The decision reads the test prompts after the last step. On the validation prompts, which were measured on
the way, with Fieller's 95% interval:"""

ABOUT_DISTANCES = """Mean validation reward of the runs while they were in a range of KL to their base, each seed counted once
in it; the difference is by Welch's test, because not every seed was in each range with both forms."""

ABOUT_TUNING = """The rate and k were chosen by the mean of two seeds after the last step (tables below). Two such means differ
by chance by this much, judged by the spread over the test seeds:"""

def setting_table(task: str, compared: list[Compared]) -> str:
    prompts = {split: count * len(real.TEMPLATES[task]) for split, count in real.TOPICS.items()}
    outcomes = [outcome for one in compared for outcome in one.known.values()]
    machines = {f"{outcome['device']}, torch {outcome['torch']}" for outcome in outcomes}
    listed = lambda values: ", ".join(map(str, values))
    bases: dict[str, set] = {}
    for one, outcome in ((one, outcome) for one in compared for outcome in one.known.values()):
        bases.setdefault(f"{one.loss.upper()}, {outcome['seed']}", set()).add(real.base_of(outcome))
    redrawn = "; ".join(sorted(seed for seed, starts in bases.items() if len(starts) > 1))
    rates = listed(map(show_rate, real.RATES))
    ks = f"k {real.FIRST_K}, then {listed(real.OTHER_KS)}"
    settings = {
        "model": "SmolLM2-135M-Instruct",
        "prompts": listed(f"{split} {count}" for split, count in prompts.items()),
        "offline data": f"{real.SAMPLES} samples of the base for each training prompt and seed",
        "drawn again, on another machine": redrawn or "for no seed",
        "steps": f"{real.STEPS}, one pass or less; measured every {real.EVERY}",
        "a step": "DPO {dpo} pairs, KTO {kto} examples, GRPO {grpo} groups".format(**real.BATCH_SIZE),
        "completion": f"at most {real.MAX_NEW_TOKENS} tokens",
        "tuning": f"learning rates {rates}; {ks}; seeds {listed(real.TUNING_SEEDS)}",
        "device": "; ".join(sorted(machines)),
    }
    return markdown("| setting | |", map(list, settings.items()))

def decision_table(decisions: dict[str, dict]) -> str:
    rows = []
    for loss, decision in decisions.items():
        numbers = [""] * 7
        if decision.get("seeds"):
            parity = "yes" if decision["p_parity"] < 0.05 else "no"
            numbers = [
                str(decision["seeds"]),
                show_difference(decision["gap"]),
                show_share(decision["share"]),
                f"{decision['level']}",
                f"{decision['p_half']:.2g}",
                show_difference(decision["minus_online"]),
                f"{parity}, {decision['p_parity']:.2g}",
            ]
        rows.append([loss.upper(), *numbers, f"**{decision['outcome']}**"])
    head = (
        "| loss | seeds | gap: online − plain | share of the gap | level | p of one half | humanline − online | "
        "parity, p | claim |"
    )
    return markdown(head, rows)

def form_table(facts: dict[str, dict]) -> str:
    rows = []
    for name, form in facts.items():
        rows.append(
            [
                show_form(name),
                show_settings(form["lr"], form["k"]),
                f"{form['seeds']}",
                f"{form['validation']:.3f}",
                show(form["reward"]),
                show(form["kl"], 1),
                show(form["reward_best"]),
                show(form["kl_best"], 1),
                show_mean(form["best_step"], 0),
                show_difference(form["minus_plain"]),
                show_difference(form["minus_online"]),
                show_share(form["share_of_gap"]),
                show_share(form["share_of_gap_best"]),
                show(form["greedy"]),
                show_mean(form["length"], 1),
                show_mean(form["distinct"], 2),
                f"{show_mean(form['seconds'], 0)}, {show_mean(form['drawing'], 0)}",
            ]
        )
    return markdown(FORM_HEAD, rows)

def lead_table(compared: Compared) -> str:
    """Humanline less each other form, of a loss on which the rule decides nothing."""
    if compared.loss in DECIDED:
        return ""
    rows = []
    for form in compared.tests:
        found = [
            compared.compare("humanline", form),
            compared.compare("humanline", form, model="best"),
            compared.compare("humanline", form, "greedy"),
        ]
        if any(found):
            rows.append([show_form(form), *map(show_difference, found)])
    table = markdown("| humanline − | reward, final | reward, best | greedy |", rows)
    return f"Paired by seed; the intervals are not corrected for their number.\n\n{table}" if rows else ""

def tuning_table(compared: Compared) -> str:
    """Validation rewards after the last step at every setting; the chosen one is bold."""
    cells: dict[tuple[str, int], dict[float, list[dict]]] = {}
    for run, outcome in compared.known.items():
        if not run.is_test:
            cells.setdefault((run.form, run.k), {}).setdefault(run.lr, []).append(outcome)
    if not cells:
        return ""
    rates = sorted({lr for row in cells.values() for lr in row})
    order = real.FORMS[compared.loss]
    rows = []
    for form, k in sorted(cells, key=lambda cell: (order.index(cell[0]), cell[1])):
        words = []
        for lr in rates:
            runs = shown(cells[form, k].get(lr, []))
            word = f"{fmean(run['validation'][-1] for run in runs):.3f}" if runs else ""
            if compared.settings.get(form) == (lr, k):
                word = f"**{word}**"
            words.append(word + "¹" * (len(runs) == 1))
        rows.append([show_form(form), f"{k or ''}", *words])
    table = markdown(f"| tuning | k | {' | '.join(map(show_rate, rates))} |", rows)
    return (
        "Mean validation reward of both tuning seeds after the last step; ¹: of one seed. The chosen setting is bold."
        f"\n\n{table}"
    )

def way_table(compared: Compared) -> str:
    """Reward and KL on the validation prompts on the way, means over the test seeds."""
    rows, steps = [], ()
    for form, runs in compared.tests.items():
        if runs:
            steps = next(iter(runs.values()))["steps"]
            rewards = np.mean([run["validation"] for run in runs.values()], axis=0)
            distances = np.mean([run["validation_kl"] for run in runs.values()], axis=0)
            rows.append([show_form(form), *(f"{reward:.3f} at {kl:.1f}" for reward, kl in zip(rewards, distances))])
    if not rows:
        return ""
    table = markdown(f"| validation: reward at KL, nats | {' | '.join(f'step {step}' for step in steps)} |", rows)
    return f"Reward against the distance from the base on the way, means over the seeds.\n\n{table}"

def sample_lines(compared: Compared) -> Iterator[str]:
    for form, runs in compared.tests.items():
        for seed in sorted(runs)[:1]:
            words = []
            for sample in runs[seed].get("samples", ()):  # a run that diverged has none
                text = " ".join(evaluation.printable(sample["completion"]).split())
                words.append(f'{sample["prompt"]} → "{text}" ({sample["reward"]:g})')
            yield f"- {compared.loss.upper()}, {show_form(form)}: {'; '.join(words)}"
