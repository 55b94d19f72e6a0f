"""The paper's claims, tried: train what they compare, in every way, and write tables and verdicts.

  python tests/claims/reproduce.py --quick                      # GRPO's forms on the demo: three minutes of a core
  python tests/claims/reproduce.py                              # all of them: a day of a core
  python tests/claims/reproduce.py --only two-digits            # one experiment; --help lists them
  python tests/claims/reproduce.py --real FOLDER                # on a real language model: days of a core
  python tests/claims/reproduce.py --stored                     # the reports of the stored results, without training
  python tests/claims/reproduce.py --prior                      # what GRPO's prior is worth, from the stored results

The tiny models and their rows are made by bases.py, one base for each seed. Each run is `humanline.main` with the flags
that name it; what came out is a line of RESULTS/EXPERIMENT.jsonl, and is not trained again. The stored results, in
tests/claims/results, have their flags as they were at the time; `today` says what they are called now.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import re
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from tqdm import tqdm

import bases
import eval as evaluation
import humanline
from humanline import Config, Group, UserError, require

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[1] / "configs"

@dataclass
class Flags:
    """The paper's claims in miniature: train in every way that they compare; tables and verdicts."""

    only: tuple[Literal["demo", "gap", "sparse", "syncing", "ablation", "quality", "two-digits", "six-digits", "twelve-digits",
                        "five-sorted"], ...] | None = None
    """Which experiments. Default: all but demo, which is --quick."""
    real: str | None = None  # Instead: the claims on a real language model, a folder or a hub name, such as SmolLM2.
    losses: tuple[Literal["grpo", "dpo", "kto"], ...] = ("grpo", "dpo", "kto")  # With --real: which losses.
    quick: bool = False  # GRPO's forms on the demo's base. With --real: GRPO on one task.
    seeds: int | None = None  # Seeds of each run: 1, 2, … Default: 5, or 2 with --quick; with --real 3, or 1.
    jobs: int | None = None  # Runs at a time, each on one thread. Default: as many as there are cores.
    results: str = "evals/claims"  # A folder for results, rows and reports.
    stored: bool = False  # Draw the reports of the results in tests/claims/results, and train nothing.
    prior: bool = False  # Print what the stored results say of humanline with taper with and without a prior.

# ---------- What a run is called --------------------------------------------------------------------------------------

RENAMED = (  # what a stored run's flags were called when it ran, and are called today
    ("--model embedded:long --data embedded:long --eval-data embedded:long-test --max-new-tokens 48",
     "--task six-digits"),
    ("--model embedded:column --data embedded:column --eval-data embedded:column-test --max-new-tokens 128",
     "--task twelve-digits"),
    ("--model embedded:sorted --data embedded:sorted --eval-data embedded:sorted-test", "--task five-sorted"),
    ("--data embedded", "--task two-digits"))

SWITCHES = {"--stale keep --prior 0": "", "--stale taper --prior 0": "--taper"}
SWITCHES_OF_GRPO = SWITCHES | {"--stale keep --prior 1": "--prior 1", "--stale taper --prior 1": "--taper --prior 1"}

def today(flags: str) -> str:
    """The flags of a stored run as they are called today. What is gone keeps its name of then: --stale drop, a prior of
    DPO and KTO, --sync-drift, --sync-alpha. Such a run is read, and cannot be run again (98c2cf5 can)."""
    for then, now in RENAMED:
        flags = flags.replace(then, now)
    for then, now in (SWITCHES_OF_GRPO if "--loss grpo" in flags else SWITCHES).items():
        flags = flags.replace(f" {then}", f" {now}".rstrip())
    return flags

LOSSES = ("grpo", "dpo", "kto")
DATA = {"its own samples": "--task two-digits", "a worse model's": "--task two-digits --drawn-by worse",
        "a better model's": "--task two-digits --drawn-by better"}
WORSE, PLAIN = DATA["a worse model's"], "--no-humanline"
ONLINE = "--task two-digits --sample-every 1"
SIZE = {"grpo": "--batch-size 16", "dpo": "--batch-size 32", "kto": "--batch-size 64"}  # groups of 8, pairs, completions
# The best of a search over rates, k and gradient norms on seeds 101 to 104 (98c2cf5, `reproduce --only tuning`).
TUNED = {
    "grpo": dict(offline="--lr 16e-4", humanline="--lr 8e-4 --sync-k 64 --max-grad-norm 0.25",
                 online="--lr 8e-4 --max-grad-norm 0.25", both="--lr 16e-4 --sync-k 64 --max-grad-norm 0.25",
                 sparse="--lr 8e-4 --sync-k 24 --max-grad-norm 0.25"),
    "dpo": dict(offline="--lr 8e-4 --max-grad-norm 0.25", humanline="--lr 8e-4 --sync-k 128", online="--lr 16e-4",
                both="--lr 16e-4 --sync-k 128"),
    "kto": dict(offline="--lr 4e-4", humanline="--lr 4e-4 --sync-k 128", online="--lr 16e-4",
                both="--lr 8e-4 --sync-k 128 --max-grad-norm 0.25")}
TRUST = {"grpo": "--lr 16e-4 --sync-k 64", "dpo": "--lr 8e-4 --sync-k 128", "kto": "--lr 4e-4 --sync-k 64"}  # no clip
SYNCED = {"grpo": 64, "dpo": 128, "kto": 128}  # k of the ablation's rows with a sync
SURVEYED = {  # k of the survey, at its learning rates
    "16e-5": (64, 24, 8, 1), "5e-4": (64, 48, 24, 12, 8, 4, 2, 1), "16e-4": (64, 24, 8, 1)}

class Runs:
    """The runs that the experiments compare, by their flags. What has not been trained yet is noted, and gives NaN.

    A seed is of everything: the base, the data that it and its like drew, and the run.
    """

    def __init__(self, seeds: list[int], known: dict[str, dict], wanted: dict[str, None] | None = None,
                 quick: bool = False):
        self.seeds, self.known, self.quick = seeds, known, quick
        self.wanted = {} if wanted is None else wanted

    def __call__(self, flags: str, what: str = "after") -> np.ndarray:
        """One number per seed: pass@1 `before`, `after` or at `step N`; or seconds, `drawing` or `training`."""
        return np.array([run.get(what, math.nan) for run in self.each(flags)])

    def each(self, flags: str) -> list[dict]:
        """What came out of each seed's run."""
        return [self.lookup(f"{flags} --seed {seed}".replace("SEED", str(seed))) for seed in self.seeds]

    def lookup(self, flags: str) -> dict:
        self.wanted[flags] = None
        return self.known.get(flags, {})

    def variant(self, loss: str, variant: str, data: str = "--task two-digits") -> str:
        """The flags of a tuned variant: offline, humanline (offline too), online, both, or sparse (every 64 steps)."""
        switches = {"offline": f"{data} {PLAIN}", "humanline": data, "online": f"{ONLINE} {PLAIN}", "both": ONLINE,
                    "sparse": "--task two-digits --sample-every 64"}
        return f"--loss {loss} {SIZE[loss]} {switches[variant]} {TUNED[loss][variant]}"

# ---------- Estimates over seeds --------------------------------------------------------------------------------------

# The 97.5 % point of Student's t, by the number of seeds.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}

def student(seeds: int) -> float:
    """The 97.5 % point of Student's t; beyond the table by its series (Abramowitz and Stegun 1964, 26.7.5)."""
    z, more = 1.959964, max(1, seeds - 1)
    return STUDENT.get(seeds, z + (z**3 + z) / (4 * more) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * more**2))

def half(values: np.ndarray) -> float:
    """Half of the 95 % interval of a mean over seeds, by Student's t."""
    if len(values) < 2:
        return math.nan
    return student(len(values)) * np.std(values, ddof=1) / math.sqrt(len(values))

def spread(values: np.ndarray, digits: int = 3, sign: str = "") -> str:
    """Mean ± half of the 95 % interval over seeds."""
    return f"{np.mean(values):{sign}.{digits}f}" + (f" ± {half(values):.{digits}f}" if len(values) > 1 else "")

def closed(offline: np.ndarray, ours: np.ndarray, online: np.ndarray,
           paired: np.ndarray | bool = True) -> tuple[float, float, float]:
    """The share of the gap from `offline` to `online` that `ours` closes, and its 95 % interval.

    A ratio of two means: the interval is Fieller's (1954), without an end where the gap itself may be 0, and NaN for
    one seed. paired: which of the three are paired by seed, (3, 3), and do not vary independently.
    """
    gained, gap = ours - offline, online - offline
    x, y = gained.mean(), gap.mean()
    share = x / y if y else math.nan
    if len(gap) < 2 or np.isnan(x + y):
        return share, math.nan, math.nan
    covariance = np.cov([offline, ours, online]) * (paired | np.eye(3, dtype=bool))
    to_differences = np.array([[-1, 1, 0], [-1, 0, 1]])
    (xx, xy), (_, yy) = to_differences @ covariance @ to_differences.T * student(len(gap)) ** 2 / len(gap)
    a, b, c = y * y - yy, x * y - xy, x * x - xx
    if a <= 0:
        return share, -math.inf, math.inf
    root = math.sqrt(max(0.0, b * b - a * c))
    return share, (b - root) / a, (b + root) / a

def show_share(share: tuple[float, float, float]) -> str:
    estimate, low, high = share
    if math.isnan(low):  # one seed
        return f"{estimate:.0%}"
    return f"{estimate:.0%} [{low:.0%}, {high:.0%}]" if high - low < 10 else f"{estimate:.0%} [too few seeds to tell]"

def markdown(rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])

def holds(condition: Any, claim: str, undecided: Any = False) -> str:
    """A verdict on a claim."""
    return f"- **{'holds' if condition else 'not decided' if undecided else 'does not hold'}**: {claim}"

AS_WELL = 0.05  # "does as well" holds where the interval of the difference ends above 0 and begins above minus this

def as_well(more: np.ndarray, claim: str) -> str:
    """The verdict that something does as well as another, which it exceeds by `more`, of each seed."""
    low, high = np.mean(more) - half(more), np.mean(more) + half(more)
    return holds(high >= 0 and low > -AS_WELL, claim, undecided=not high < 0)  # NaN: one seed

def times_as_long(runs: Runs, one: str, other: str, steps: tuple[int, ...], what: str = "step") -> str:
    """The wall-clock time of `one` over that of `other` to the pass@1 that both reach, by seed; between two
    measurements pass@1 is taken to rise evenly. what: whether that of samples, or `exact`."""

    def seconds(run: dict, target: float) -> float:
        before = run.get("before" if what == "step" else f"{what} 0", math.nan)
        points = [(0, before)] + [(step, run.get(f"{what} {step}", math.nan)) for step in steps]
        for (start, low), (end, high) in itertools.pairwise(points):
            if high >= target:
                step = start + (end - start) * (target - low) / (high - low) if low < target else start
                return run["training"] * max(1, step) / steps[-1]
        return math.nan

    best = lambda run: max(run.get(f"{what} {step}", math.nan) for step in steps)
    pairs = [(slow, fast, min(best(slow), best(fast))) for slow, fast in zip(runs.each(one), runs.each(other))]
    return spread(np.array([seconds(slow, target) / seconds(fast, target) for slow, fast, target in pairs]), 2)

# ---------- The paper's claims on two digits --------------------------------------------------------------------------

def gap(runs: Runs) -> list[str]:
    """Figure 1 and Table 1: does humanline close the gap between offline and online?"""
    rows = [["pass@1", "completions of", "offline", "offline + humanline", "online", "online + humanline",
             "humanline − offline, paired", "of the gap"]]
    both = lambda loss: spread(runs(runs.variant(loss, "both")))
    verdicts = []
    for loss, least, excluded in (("grpo", 0.8, 0.4), ("dpo", 0.7, 0.3), ("kto", 0.7, 0.3)):
        online = runs(runs.variant(loss, "online"))
        for name, data in DATA.items():
            offline, ours = runs(runs.variant(loss, "offline", data)), runs(runs.variant(loss, "humanline", data))
            share = closed(offline, ours, online)
            rows.append([loss.upper(), name, *map(spread, (offline, ours, online)), both(loss),
                         spread(ours - offline, sign="+"), show_share(share)])
            if data == WORSE:
                claim = (f"{loss.upper()}, a worse model's data: humanline closes {show_share(share)} of the gap "
                         f"(asked: {least:.0%}, the interval above {excluded:.0%})")
                is_closed = share[0] >= least and share[1] > excluded
                verdicts.append(holds(is_closed, claim, undecided=not share[2] <= least))
    return [markdown(rows), *verdicts]

def sparse(runs: Runs) -> list[str]:
    """Samples drawn 64 times less often."""
    rows = [["GRPO, samples drawn", "after 64 steps", "128", "192", "256", "against every step, paired",
             "seconds, drawing"]]
    every = runs.variant("grpo", "online")
    cases = {"every step": every, "every 64 steps": every.replace("--sample-every 1", "--sample-every 64"),
             "every 64 steps, humanline": runs.variant("grpo", "sparse")}
    for name, flags in cases.items():
        curve = [spread(runs(flags, f"step {step}")) for step in (64, 128, 192, 256)]
        seconds = f"{np.mean(runs(flags, 'training')):.0f}, {np.mean(runs(flags, 'drawing')):.0f}"
        rows.append([name, *curve, spread(runs(flags) - runs(every), sign="+") if flags != every else "–", seconds])
    online, plain, ours = (runs(flags) for flags in cases.values())
    against, behind = ours - online, (plain - online, plain - ours)
    ratio = times_as_long(runs, every, cases["every 64 steps, humanline"], (64, 128, 192, 256))
    return [markdown(rows),
            as_well(against, f"every 64 steps with humanline does as well as every step: {spread(against, sign='+')}; "
                    f"to the pass@1 that both reach, every step takes {ratio} times as long"),
            holds(all(np.mean(less) + half(less) < 0 for less in behind), "plain GRPO every 64 steps lies below both: "
                  f"{spread(behind[0], sign='+')} and {spread(behind[1], sign='+')}, paired",
                  undecided=not any(np.mean(less) - half(less) > 0 for less in behind))]

def syncing(runs: Runs) -> list[str]:
    """How often to sync, over a tenfold range of the learning rate, on stale and on fresh data"""
    rows = [["GRPO, a worse model's data", *(f"lr {lr}" for lr in SURVEYED)]]
    at = lambda lr, how: f"--loss grpo {SIZE['grpo']} {how} --lr {lr}"
    ends = {lr: (runs(at(lr, f"{WORSE} {PLAIN}")), runs(at(lr, f"{ONLINE} {PLAIN}"))) for lr in SURVEYED}
    for end, name in enumerate(("offline", "online")):
        rows.append([name, *(spread(ends[lr][end]) for lr in SURVEYED)])
    stale = []
    for k in (0, *SURVEYED["5e-4"]):
        tried = [lr for lr, ks in SURVEYED.items() if k in (0, *ks)]
        found = {lr: runs(at(lr, f"{WORSE} --sync-k {k}")) for lr in tried}
        stale += [run for lr in tried for run in runs.each(at(lr, f"{WORSE} --sync-k {k}"))]
        share = {lr: closed(ends[lr][0], found[lr], ends[lr][1])[0] for lr in tried}
        rows.append([f"k = {k}" if k else "never",
                     *(f"{spread(found[lr])} ({share[lr]:.0%})" if lr in tried else "" for lr in SURVEYED)])
    fresh = [["GRPO, samples drawn every step", "lr 5e-4"],
             ["reference set to the policy at each drawing", spread(runs(at("5e-4", f"{ONLINE} {PLAIN}")))]]
    fresh += [[f"humanline, k = {k}", spread(runs(at("5e-4", f"{ONLINE} --sync-k {k}")))] for k in (64, 8, 1)]
    return [markdown(rows), "In brackets the share of the gap at that learning rate.", warned_in_time(stale),
            markdown(fresh)]

def ablation(runs: Runs) -> list[str]:
    """Which part does it: the sync or the clip, and which clip?"""
    rows = [["offline data of a worse model"] + [loss.upper() for loss in LOSSES]]
    settings = {
        "neither": PLAIN, "clip only": "--sync-k 0", "sync only (a trust region)": "--sync-k {k} --perception none",
        "sync and clip": "--sync-k {k}", "sync and rejection sampling": "--sync-k {k} --perception sample",
        "sync, tuned for no clip": "{trust} --perception none",
        "clip to ±0.5": "--sync-k {k} --log-eps-p -0.5 --log-eps-r 0.5",
        "clip to [−0.5, 1.5]": "--sync-k {k} --log-eps-p -0.5"}
    found = {}
    for name, flags in settings.items():
        for loss in LOSSES:
            lr = re.sub(r"--sync-k \S+", "", TUNED[loss]["humanline"])
            how = flags.format(k=SYNCED[loss], trust=TRUST[loss])
            how += "" if "--lr" in how else f" {lr}"
            found[name, loss] = runs(f"--loss {loss} {SIZE[loss]} {WORSE} {how}")
        rows.append([name] + [spread(found[name, loss]) for loss in LOSSES])
    verdicts = []
    for loss in LOSSES:
        parts = ("sync only (a trust region)", "clip only", "sync and clip")
        sync, clip, both = (found[name, loss] - found["neither", loss] for name in parts)
        claim = (f"{loss.upper()}: syncing gives most of the gain (sync only {spread(sync, sign='+')}, clip only "
                 f"{spread(clip, sign='+')}, both {spread(both, sign='+')}, paired)")
        more = sync - clip
        verdicts.append(holds(np.mean(more) - half(more) > 0, claim, undecided=not np.mean(more) + half(more) < 0))
    return [markdown(rows), *verdicts]

def quality(runs: Runs) -> list[str]:
    """Does the mean token log-prob of offline data predict how well offline + humanline does?"""
    rows = [["GRPO with humanline, quartile of mean token log-prob", "nats/token", "pass@1"]]
    means, after = [], []
    for number, words in enumerate(("the least likely", "the second", "the third", "the likeliest"), 1):
        flags = runs.variant("grpo", "humanline", f"--task two-digits --drawn-by quartile-{number}")
        mean, found = np.mean(runs(flags, "data_logp")), runs(flags)
        means.append(mean)
        after.append(found)
        rows.append([f"{number}, {words}", f"{mean:.2f}", spread(found)])
    away = np.array(means) - np.mean(means)
    slope = away @ np.array(after) / max(away @ away, 1e-12)  # least squares, for each seed
    claim = f"likelier data is better data: {spread(slope, sign='+')} of pass@1 per nat"
    undecided = not np.mean(slope) + half(slope) <= 0
    return [markdown(rows), holds(np.mean(slope) - half(slope) > 0, claim, undecided)]

# ---------- The forms of humanline, on bases with a systematic mistake ------------------------------------------------

def falls(run: dict, what: str = "step") -> tuple[int, int] | None:
    """The first measurement of pass@1, of samples or `exact`, that lies 0.05 or more below an earlier one, and the
    measurement before it."""
    best, steps = -math.inf, sorted(int(name.removeprefix(f"{what} ")) for name in run if name.startswith(f"{what} "))
    for before, step in zip([0, *steps], steps):
        if run[f"{what} {step}"] <= best - 0.05:
            return step, before
        best = max(best, run[f"{what} {step}"])
    return None

def warned_in_time(runs: list[dict], what: str = "step") -> str:
    """Whether the trainer's warning has come when a measurement first shows the fall: in 80 % of the runs that fall,
    and in at most 10 % of the others."""
    steps = [(falls(run, what), run.get("warned")) for run in runs]
    fell, stood = [pair for pair in steps if pair[0] is not None], [pair for pair in steps if pair[0] is None]
    by_then, before = (sum(warning is not None and warning <= fall[i] for fall, warning in fell) for i in (0, 1))
    false, few = sum(warning is not None for _, warning in stood), len(fell) < 5
    return holds(by_then >= 0.8 * len(fell) and false <= 0.1 * len(stood) and not few, "the trainer's warning has come "
                 f"when a measurement first shows the fall: of {len(fell)} runs that lost 0.05 of pass@1 from one "
                 f"measurement to a later one, {by_then} had been warned of by then, {before} by the measurement "
                 f"before; of {len(stood)} others, {false}", undecided=few)

@dataclass(frozen=True)
class Task:
    """A task whose base errs for a reason, on which the forms of humanline are compared."""

    name: str
    words: str
    steps: tuple[int, ...]  # when its runs are measured
    learned: float  # pass@1 below which a base never got the idea
    drawn_every: tuple[int, ...]  # steps from one drawing to the next
    settings: dict[str, str] = dataclasses.field(default_factory=dict)  # of each loss, where they are not the demo's

SHORT = Task("two-digits", "two-digit sums", (*range(32, 257, 32),), 0.5, (64,))  # 0.55 have no carry to forget
LONG = Task("six-digits", "sums of six digits with every partial sum, some 40 tokens", (*range(32, 129, 32),), 0.4,
            (16, 64), dict(grpo="--batch-size 16 --lr 5e-4", dpo="--batch-size 32 --lr 5e-4",
                           kto="--batch-size 64 --lr 2.5e-4"))
COLUMN = Task("twelve-digits", "a written addition of two numbers of twelve digits, some 110 tokens", LONG.steps, 0.4,
              (64,), dict(grpo="--batch-size 16 --lr 2.5e-4", dpo="--batch-size 32 --lr 2.5e-4",
                          kto="--batch-size 64 --lr 1.25e-4"))
SORTED = Task("five-sorted", "sorting five digits and dropping repeated ones", (*range(40, 201, 40),), 0.3, ())
TASKS = {task.name: task for task in (SHORT, LONG, COLUMN, SORTED)}
DEMO = Task("demo", "two-digit sums, of configs/demo", (*range(64, 257, 64),), 0.5, ())  # one base for all seeds
NO_CLIP = f"{PLAIN} --epsilon 1000 --epsilon-high 1000"
HUMANLINE, TAPERED, BOTH = "humanline", "humanline with taper", "humanline with taper and prior"
UNCLIPPED, BARE, PLAIN_TAPERED = "plain, no ratio clip", "plain with taper and prior", "plain with taper"
SYNCED_ALONE = "sync alone with taper and prior"  # and nothing distorts the log-ratio

def forms(loss: str, task: Task) -> dict[str, str]:
    """The flags of all forms that a task compares, with k 8; humanline with GRPO has also k 24, with which it collapses
    later. The learning rate is the demo's. GRPO alone has a prior."""
    k = 24 if loss == "grpo" and task is not SORTED else 8
    tapered, both = "--sync-k 8 --taper", "--sync-k 8 --taper --prior 1"
    switches = {"plain": PLAIN, "online": f"--sample-every 1 {PLAIN}", HUMANLINE: f"--sync-k {k}", TAPERED: tapered}
    if task is SORTED:
        switches[PLAIN_TAPERED] = f"{PLAIN} --taper"
    if loss == "grpo" and task is not DEMO:
        switches[BOTH] = both
        if task is SHORT:
            switches |= {f"{HUMANLINE}, k = 8": "--sync-k 8", f"{HUMANLINE} with prior": "--sync-k 8 --prior 1"}
        if task in (SHORT, LONG):
            switches |= {UNCLIPPED: NO_CLIP, BARE: f"{NO_CLIP} --taper --prior 1",
                         SYNCED_ALONE: f"{both} --perception none"}
        for lag in task.drawn_every:
            name, drawn = f"every {lag} steps", f"--sample-every {lag}"
            if task is not COLUMN:
                switches |= {name: f"{drawn} {PLAIN}", f"{name}, {HUMANLINE}": f"{drawn} --sync-k {k}"}
            if task is LONG:
                switches[f"{name}, {TAPERED}"] = f"{drawn} {tapered}"
            switches[f"{name}, {BOTH}"] = f"{drawn} {both}"
    common = f"--loss {loss} --task {task.name} {task.settings.get(loss, '')}".rstrip()
    common += f" --steps {task.steps[-1]} --eval-every {task.steps[0]}"
    return {name: f"{common} {flags}" for name, flags in switches.items()}

def finished(runs: Runs, loss: str, task: Task) -> tuple[Runs, list[str]]:
    """The runs of those seeds of which every form is there and whose base had learned; a line on the others, if any of
    theirs is there."""
    variants = forms(loss, task)
    values = {name: runs(flags, f"exact {task.steps[-1]}") for name, flags in variants.items()}
    starts = runs(variants["plain"], "exact 0")
    kept, lines, unfinished = [], [], []
    for i, (seed, base) in enumerate(zip(runs.seeds, starts)):
        own = {name: value[i] for name, value in values.items() if not math.isnan(value[i])}
        if base < task.learned:
            found = ", ".join(f"{name} {value:.3f}" for name, value in own.items())
            lines.append(f"Seed {seed} is left out: its base never learned (pass@1 {base:.3f}). There: {found}.")
        elif len(own) == len(values):
            kept.append(seed)
        elif own:
            unfinished.append(f"{seed} ({len(own)})")
    if unfinished:
        lines.append(f"Left out are the seeds of which not all {len(values)} runs are there: {', '.join(unfinished)}.")
    return Runs(kept, runs.known, runs.wanted), lines

def compare_forms(task: Task, runs: Runs) -> list[str]:
    """A table for each loss, and verdicts."""
    text = [f"The base of this task ({task.words}) errs for a reason. Offline data are its own samples; pass@1 is "
            "exact, the mean probability of the right answer on held-out prompts, and greedy how often it is the "
            "likeliest at every token. Collapsed: ended more than 0.1 of pass@1 below its base."]
    verdicts = []
    for loss in LOSSES if task not in (COLUMN, DEMO) else ("grpo",):
        flags, (own, left_out) = forms(loss, task), finished(runs, loss, task)
        if not own.seeds:
            text += [f"{loss.upper()}: no seed is finished.", *left_out]
            continue
        last = lambda name, what="exact": own(flags[name], f"{what} {task.steps[-1]}")
        offline, online, base = last("plain"), last("online"), own(flags["plain"], "exact 0")
        collapses = lambda name: int((last(name) < own(flags[name], "exact 0") - 0.1).sum())
        of = f"{len(own.seeds)} seed{'s' * (len(own.seeds) > 1)}"
        rows = [[f"{loss.upper()}, {of}", "pass@1", "greedy", "− plain, paired", "of the gap", "worst seed",
                 "collapsed", "seconds, drawing"]]
        greedy = own(flags["plain"], "greedy 0")
        rows.append(["the base", spread(base), spread(greedy), "–", "–", f"{min(base):.3f}", "–", "–"])
        for name in flags:
            after, seconds = last(name), [own(flags[name], what).mean() for what in ("training", "drawing")]
            share = show_share(closed(offline, after, online)) if name not in ("plain", "online") else "–"
            rows.append([name, spread(after), spread(last(name, "greedy")),
                         spread(after - offline, sign="+") if name != "plain" else "–", share, f"{min(after):.3f}",
                         f"{collapses(name)} of {len(own.seeds)}", "{:.0f}, {:.0f}".format(*seconds)])
        text += [markdown(rows), *left_out]

        for name in [name for name in flags if name == HUMANLINE or "k = " in name]:
            more = last(name) - offline
            claim = (f"{loss.upper()}, {name}, as in the paper, does at least as well as plain offline: "
                     f"{spread(more, sign='+')}, paired")
            verdicts.append(holds(np.mean(more) - half(more) >= 0, claim, not np.mean(more) + half(more) < 0))
        for name in [name for name in (TAPERED, BOTH) if name in flags]:
            more, share, fell = last(name) - offline, closed(offline, last(name), online), collapses(name)
            verdicts.append(holds(
                np.mean(more) - half(more) > 0 and not fell and share[0] >= 0.7,
                f"{loss.upper()}, {name} does better than plain offline, never collapses and closes most of the gap: "
                f"{spread(more, sign='+')}, paired; {fell} of {len(own.seeds)} runs collapsed; {show_share(share)} "
                "(asked: 70%)",
                undecided=not fell and not np.mean(more) + half(more) <= 0 and not share[2] <= 0.7))
        for name, without in ((BARE, "humanline and GRPO's ratio clip"), (SYNCED_ALONE, "humanline's clip")):
            if name in flags:
                more = last(name) - last(BOTH)
                verdicts.append(as_well(more, f"{loss.upper()}, taper and prior do as well without {without}: "
                                        f"{spread(more, sign='+')}, paired"))
        noted = [run for variant in flags.values() for run in own.each(variant) if "warned" in run]
        if noted:
            verdicts.append(warned_in_time(noted, "exact").replace("the trainer", f"{loss.upper()}, the trainer"))
        for name in [name for name in flags if name.startswith("every ") and "taper" in name]:
            against, every, sparsely = last(name) - online, flags["online"], flags[name]
            whole = spread(own(every, "training") / own(sparsely, "training"), 2)
            both_reach = times_as_long(own, every, sparsely, task.steps, "exact")
            verdicts.append(as_well(against, f"GRPO, {name}, does as well as every step: "
                                    f"{spread(against, sign='+')}, paired; every step takes {whole} times as long, "
                                    f"and {both_reach} times to the pass@1 that both reach"))
    return [*text, *verdicts]

EXPERIMENTS: dict[str, Callable[[Runs], list[str]]] = dict(
    gap=gap, sparse=sparse, syncing=syncing, ablation=ablation, quality=quality,
    **{task.name: functools.partial(compare_forms, task) for task in (*TASKS.values(), DEMO)})
TITLES = {"demo": "A base that errs for a reason: what the forms make of it, in miniature",
          "two-digits": "A base that errs for a reason: does humanline help offline, and which form never does worse?",
          "six-digits": "The same on a longer task", "twelve-digits": "The same where drawing takes longer than training",
          "five-sorted": "The same on a task of another kind"}

# ---------- Training on the tiny models -------------------------------------------------------------------------------

def base_folder(home: Path, task: str, seed: int, drawn_by: str = "") -> Path:
    if task == DEMO.name:
        return CONFIGS / "demo"
    return home / f"{task}-{drawn_by or 'own'}-{seed}"

def prepare(home: Path, task: str, seed: int, drawn_by: str) -> None:
    """Make a base with its rows, whole or not at all."""
    folder = base_folder(home, task, seed, drawn_by)
    if folder.exists():
        return
    if drawn_by.startswith("quartile"):
        make_quartiles(home, seed)
        return
    with tempfile.TemporaryDirectory(dir=home) as unfinished:
        own = base_folder(home, task, seed) if drawn_by else None
        bases.make(Path(unfinished, "base"), task, seed, drawn_by, own)
        Path(unfinished, "base").rename(folder)

def make_quartiles(home: Path, seed: int) -> None:
    """The rows of the base, its worse and its better sister whose rewards differ, in four parts by how likely the base
    finds them, each a folder like a base's."""
    sources = [base_folder(home, "two-digits", seed, drawn_by) for drawn_by in ("worse", "", "better")]
    for drawn_by in ("", "worse", "better"):
        prepare(home, "two-digits", seed, drawn_by)
    model = str(sources[1] / "model")
    config = humanline.parse_config(["--model", model, "--data", "-", "--max-new-tokens", "8"])
    sampler, groups = evaluation.load(model, config, rewarded=False), []
    for source in sources:
        rows = [row for row in evaluation.read_rows(str(source / "rows.jsonl"), config) if len(set(row.rewards)) > 1]
        logps = evaluation.token_logps(sampler, evaluation.encode(sampler, rows, offline=True))
        groups += [(float(np.concatenate(values).mean()), row.fields) for values, row in zip(logps, rows)]
    groups.sort(key=lambda group: group[0])
    for number, part in enumerate(np.array_split(np.arange(len(groups)), 4), 1):
        folder = base_folder(home, "two-digits", seed, f"quartile-{number}")
        folder.mkdir(exist_ok=True)
        (folder / "model").symlink_to(Path(model).resolve())
        (folder / "test.jsonl").symlink_to((sources[1] / "test.jsonl").resolve())
        evaluation.write(folder / "rows.jsonl", evaluation.json_lines(groups[i][1] for i in part))
        evaluation.write(folder / "logp.json", json.dumps(float(np.mean([groups[i][0] for i in part]))))

def split_flags(flags: str) -> tuple[str, str, list[str]]:
    """--task and --drawn-by of a run's flags, and the flags of humanline.py."""
    words = shlex.split(flags)
    taken = {"--task": "two-digits", "--drawn-by": ""}
    for name in taken:
        if name in words:
            place = words.index(name)
            taken[name] = words[place + 1]
            del words[place : place + 2]
    return *taken.values(), words

@torch.no_grad()
def exact_pass(sampler: humanline.Sampler, rows: list[humanline.Row]) -> float:
    """pass@1 without the noise of samples, where a prompt has one right answer: the mean probability of that answer and
    of the token that ends it."""
    groups = evaluation.encode(sampler, rows, offline=False)
    end = sampler.tokenizer.eos_token
    answers = sampler.tokenizer([rows[group.row].fields["answer"] + end for group in groups])["input_ids"]
    scored = [Group(group.row, group.prompt, [answer], []) for group, answer in zip(groups, answers)]
    return float(np.mean([math.exp(logps.sum()) for logps, in evaluation.token_logps(sampler, scored)]))

def train_tiny(flags: str, home: Path) -> dict:
    """A run of humanline.py: pass@1 before, after and at some steps, of samples and `exact`; `greedy` accuracy; seconds;
    the step of the warning, if there was one."""
    from safetensors.torch import load_file

    task, drawn_by, words = split_flags(flags)
    loss, seed = words[words.index("--loss") + 1], int(words[words.index("--seed") + 1])
    base, recipe = base_folder(home, task, seed, drawn_by), bases.RECIPES.get(task, bases.RECIPES["two-digits"])
    rate, size = ("4e-4", "256") if loss == "kto" else ("8e-4", "32")
    with tempfile.TemporaryDirectory() as folder, quietly() as said:
        run, test = Path(folder, "run"), str(base / "test.jsonl")
        defaults = ["--model", str(base / "model"), "--data", str(base / "rows.jsonl"), "--eval-data", test,
                    "--max-new-tokens", str(recipe.max_new_tokens), "--steps", "256", "--lr", rate,
                    "--batch-size", size, "--eval-every", "64", "--keep", "99"]
        config = humanline.parse_config([*defaults, *words])
        status = humanline.main([*defaults, *words, "--save-every", str(config.eval_every), "--out", str(run)])
        require(status in (0, 1), f"interrupted, or wrong flags: {flags}: {said.getvalue()[-300:]}")  # 1: it diverged
        lines = humanline.read_lines(run / "metrics.jsonl")
        measured_at = [*range(config.eval_every, config.steps, config.eval_every), config.steps]
        sampler = evaluation.load(str(base / "model"), config, rewarded=False)
        rows = evaluation.read_rows(test, config)
        exact = {0: exact_pass(sampler, rows)}
        for step in measured_at:
            weights = run / "checkpoint" / f"step-{step:08d}" / "tensors.safetensors"
            if weights.exists():
                saved = {key.removeprefix("policy:"): value for key, value in load_file(weights).items()}
                sampler.policy.load_state_dict(saved, strict=False)
            exact[step] = exact_pass(sampler, rows) if weights.exists() else 0.0
        warnings = re.findall(r"step (\d+): .*completions that the loss wants likelier fell", said.getvalue())
    before = lines[0] if lines else {}
    outcome = dict(flags=flags, seed=seed, before=before.get("accuracy_before", math.nan))
    outcome |= {what: sum(line[name] for line in lines) if lines else math.nan
                for what, name in (("drawing", "sample_seconds"), ("training", "step_seconds"))}
    for name, key in (("step", "accuracy"), ("greedy", "greedy")):
        values = dict.fromkeys(measured_at, 0.0) | {line["step"]: line[key] for line in lines if key in line}
        outcome |= {f"{name} {step}": value for step, value in values.items()}
    outcome |= {"after": outcome[f"step {config.steps}"], "greedy 0": before.get("greedy_before", math.nan)}
    outcome |= {f"exact {step}": value for step, value in exact.items()}
    outcome |= dict(warned=int(warnings[0]) if warnings else None, lowest=min(exact.values()))
    if drawn_by.startswith("quartile"):
        outcome["data_logp"] = json.loads((base / "logp.json").read_text())
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in outcome.items()}

@contextlib.contextmanager
def quietly() -> Iterator[Any]:
    """What is printed in a `with` goes into a text, which is given."""
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield said

def start_worker() -> None:
    torch.set_num_threads(1)

def in_processes(function: Callable, calls: list[tuple], jobs: int | None, unit: str) -> Iterator:
    """What a function gives for each call, in processes of one thread each, as they end."""
    if not calls:
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        jobs or len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn"), start_worker)
    try:
        asked = [pool.submit(function, *call) for call in calls]
        for done in tqdm(concurrent.futures.as_completed(asked), total=len(asked), unit=unit, disable=False):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)

def seed_of(flags: str) -> int:
    return int(flags.split("--seed ")[1])

def train_missing(missing: list[str], home: Path, jobs: int | None) -> Iterator[dict]:
    """What came out of each of the missing runs, seed by seed; the bases first."""
    home.mkdir(parents=True, exist_ok=True)
    sources = sorted({(task, seed_of(flags), by) for flags in missing for task, by, _ in [split_flags(flags)]})
    own = sorted({(task, seed, "") for task, seed, _ in sources})
    sisters = [source for source in sources if source[2] and not source[2].startswith("quartile")]
    parts = sorted({(task, seed, by[:-1] + "1") for task, seed, by in sources if by.startswith("quartile")})  # four at once
    for made in (own, sisters, parts):  # what the next ones are made from
        for _ in in_processes(prepare, [(home, *source) for source in made], jobs, "base"):
            pass
    yield from in_processes(train_tiny, [(flags, home) for flags in sorted(missing, key=seed_of)], jobs, "run")

# ---------- Results and reports ---------------------------------------------------------------------------------------

def read_results(path: Path) -> dict[str, dict]:
    """The runs of a file of results, by their flags as they are called today."""
    with humanline.explained(str(path), "name a folder of results of this script"):
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return {today(run["flags"]): run for run in map(json.loads, lines)}

def add_result(path: Path, run: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(run, ensure_ascii=False) + "\n")

def reproduce(flags: Flags) -> None:
    """Train what the experiments need, some at a time, and write a report and its picture for each."""
    folder = HERE / "results" if flags.stored else Path(flags.results)
    out = Path(flags.results)
    seeds = list(range(1, 1 + (flags.seeds or (2 if flags.quick else 6 if flags.stored else 5))))
    chosen = flags.only or ((DEMO.name,) if flags.quick else tuple(name for name in EXPERIMENTS if name != DEMO.name))
    if flags.stored:
        chosen = [name for name in chosen if (folder / f"{name}.jsonl").exists()]
    for name in chosen:
        file = folder / f"{name}.jsonl"
        known = read_results(file)
        runs = Runs(seeds, known)
        EXPERIMENTS[name](runs)
        missing = [run for run in runs.wanted if run not in known] if not flags.stored else []
        for run in train_missing(missing, out / "bases", flags.jobs) if missing else []:
            known[run["flags"]] = run
            add_result(file, run)
        text = EXPERIMENTS[name](runs)
        verdicts = sum(line.startswith("- **") for line in text)
        command = f"reproduce.py --only {name} " + ("--stored" if flags.stored else f"--seeds {len(seeds)}")
        title = TITLES.get(name) or EXPERIMENTS[name].__doc__.rstrip(".")
        text.insert(0, f"# {title}\n\n`{command}`: {len(runs.wanted.keys() & known.keys())} runs, seeds {seeds[0]} to "
                    f"{seeds[-1]}, {'all on the demo' if name == DEMO.name else 'each with a base of its own'}. Mean ± half of the 95 % interval over seeds; "
                    f"differences are paired by seed. {verdicts} verdicts, not corrected for their number.")
        report(text, out / f"{name}.md")
        task = (TASKS | {DEMO.name: DEMO}).get(name)
        if task and finished(runs, "grpo", task)[0].seeds:
            picture_forms(runs, out / f"{name}.png", task)

def report(text: list[str], path: Path) -> None:
    whole = "\n\n".join(text).replace("\n\n- ", "\n- ") + "\n"
    evaluation.write(path, whole)
    print(whole)
    print(f"report: {path}")

def picture_forms(runs: Runs, path: Path, task: Task) -> None:
    """Held-out pass@1 of GRPO as it trains: a line for each form of README, named at its end, a band over its seeds."""
    figure, (axis,) = evaluation.new_figure(4.4, 1, 1)
    own, _ = finished(runs, "grpo", task)
    steps, variants = (0, *task.steps), forms("grpo", task)
    ends = []
    for i, name in enumerate(("plain", HUMANLINE, TAPERED, "online")):
        curve = np.array([own(variants[name], f"exact {step}") for step in steps])
        colour = evaluation.OKABE_ITO[i]
        axis.fill_between(steps, curve.min(1), curve.max(1), color=colour, alpha=0.12, linewidth=0)
        axis.plot(steps, curve.mean(1), color=colour, linewidth=2)
        ends.append([curve.mean(1)[-1], name if name != "plain" else "plain, offline", colour])
    ends.sort(key=lambda end: end[0])
    for low, high in itertools.pairwise(ends):  # so that no name lies on another
        high[0] = max(high[0], low[0] + 0.055)
    for height, name, colour in ends:
        axis.annotate(name, (steps[-1], height), (6, 0), textcoords="offset points", color=colour, va="center")
    axis.set(xlabel=f"steps; bands: the range over {len(own.seeds)} seeds", ylabel="pass@1, held out", ylim=(0, 1.04),
             xlim=(0, steps[-1]))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    print(f"picture: {path}")

# ---------- The same questions, asked of a real language model --------------------------------------------------------

# A reward that knows degrees, and one that is 0 or 1. Rows: configs/{topics,checks}.jsonl, held out: …-test.jsonl.
REAL_TASKS = {"sentiment": "topics", "checked": "checks"}
REAL_STEPS = (0, 16, 32, 48, 64)
DISTANCES = (4, 8, 14, 20)  # nats
REAL_SIZE = {"grpo": "--batch-size 4", "dpo": "--batch-size 8", "kto": "--batch-size 16"}  # completions: 32, 16, 16
SPARSELY = "every 16 steps"
# --lr and --sync-k: the best in both tasks together, on seed 101 (98c2cf5, `reproduce --real`; its runs are stored).
REAL_TUNED = {
    ("grpo", "plain"): ("2e-5", "0"), ("grpo", HUMANLINE): ("2e-5", "4"), ("grpo", "online"): ("4e-5", "0"),
    ("dpo", "plain"): ("4e-5", "0"), ("dpo", HUMANLINE): ("2e-5", "4"), ("dpo", "online"): ("4e-5", "0"),
    ("kto", "plain"): ("4e-5", "0"), ("kto", HUMANLINE): ("1e-5", "16"), ("kto", "online"): ("4e-5", "0")}

def real_forms(loss: str) -> dict[str, tuple[str, str]]:
    """Each form's switches, where {k} is its --sync-k, and the form whose tuned settings it takes."""
    tapered, both = "--sync-k {k} --taper", "--sync-k {k} --taper --prior 1"
    found = {"plain": (PLAIN, "plain"), HUMANLINE: ("--sync-k {k}", HUMANLINE), TAPERED: (tapered, HUMANLINE),
             "online": (f"--sample-every 1 {PLAIN}", "online")}
    if loss == "grpo":
        drawn = f"--sample-every {SPARSELY.split()[1]}"
        found |= {BOTH: (both, HUMANLINE),
                  SPARSELY: (f"{drawn} {PLAIN}", "online"),
                  f"{SPARSELY}, {HUMANLINE}": (f"{drawn} --sync-k {{k}}", HUMANLINE),
                  UNCLIPPED: (NO_CLIP, "plain"),
                  SYNCED_ALONE: (both.replace(" --taper", " --perception none --taper"), HUMANLINE),
                  BARE: (f"{NO_CLIP} --taper --prior 1", "plain")}
    return found

def real_flags(task: str, loss: str, name: str) -> str:
    switches, like = real_forms(loss)[name]
    lr, k = REAL_TUNED[loss, like]
    return f"{task} --loss {loss} {REAL_SIZE[loss]} {switches.format(k=k)} --lr {lr}"

@functools.cache
def base_sampler(model: str) -> humanline.Sampler:
    """The model as it was before any training, to take the KL to; one for all runs of a process."""
    flags = ["--model", model, "--max-new-tokens", "32", *real_machine()]
    return evaluation.load(model, humanline.parse_config(flags), rewarded=False)

def real_machine() -> list[str]:
    """Flags that the machine asks for: on a GPU this model is so small that bf16 casts cost more than they save."""
    return ["--dtype", "float32", "--no-compile"] if torch.cuda.is_available() else []

def real_rows(task: str, held_out: bool = False) -> str:
    return str(CONFIGS / f"{REAL_TASKS[task]}{'-test' * held_out}.jsonl")

def real_task_flags(task: str, model: str) -> list[str]:
    return ["--model", model, "--reward", f"{CONFIGS / 'rewards.py'}:{task}", "--eval-data",
            real_rows(task, held_out=True), "--max-new-tokens", "32", *real_machine()]

def draw_base(task: str, seed: int, model: str, home: Path) -> None:
    """The offline data: 8 completions of the base for each prompt, drawn once for each seed."""
    path = home / f"{task}-{seed}.jsonl"
    if path.exists():
        return
    config = humanline.parse_config([*real_task_flags(task, model), "--sample-every", "1", "--seed", str(seed)])
    sampler, rows = evaluation.load(model, config), evaluation.read_rows(real_rows(task), config)
    rollouts = evaluation.draw(sampler, evaluation.encode(sampler, rows, offline=False), rows, 8, seed)
    texts = [sampler.tokenizer.batch_decode(group.completions, skip_special_tokens=True) for group in rollouts]
    evaluation.write(path.with_suffix(".new"), evaluation.json_lines(
        dict(rows[group.row].fields, prompt_id=f"{number}", completion=text, reward=reward, tokens=ids, logps=logps)
        for number, group in enumerate(rollouts)
        for text, reward, ids, logps in zip(texts[number], group.rewards, group.completions, group.logps)))
    path.with_suffix(".new").rename(path)

def train_real(flags: str, model: str, home: Path) -> dict:
    """A run of humanline.py on a real model; what it measured at REAL_STEPS, and what it wrote at the end."""
    task, *rest = shlex.split(flags)
    data = real_rows(task) if "--sample-every" in rest else str(home / f"{task}-{seed_of(flags)}.jsonl")
    last, often = REAL_STEPS[-1], REAL_STEPS[1]
    often = often // 2 if "--sample-every 1 " in flags else often  # it is soon far from its base
    with tempfile.TemporaryDirectory() as folder, quietly() as said:
        run = Path(folder, "run")
        more = ["--data", data, "--steps", str(last), "--save-every", "0", "--eval-every", str(often),
                "--eval-prompts", "50", "--eval-samples", "4"]
        config = humanline.parse_config([*rest, *real_task_flags(task, model), *more])
        status = humanline.main([*rest, *real_task_flags(task, model), *more, "--out", str(run)])
        require(status in (0, 1), f"interrupted, or wrong flags: {flags}: {said.getvalue()[-300:]}")  # 1: it diverged
        outcome = dict(flags=flags, device="CPU")
        if torch.cuda.is_available():
            outcome["device"] = torch.cuda.get_device_name()
            torch.cuda.empty_cache()
        lines = humanline.read_lines(run / "metrics.jsonl")
        rollouts = [json.loads(line) for line in (run / "eval_rollouts.jsonl").read_text().splitlines()]
    seconds = np.cumsum([line["step_seconds"] for line in lines])
    drawing = np.cumsum([line["sample_seconds"] for line in lines])
    for step in (0, *range(often, last + 1, often)):
        drawn = sorted((line for line in rollouts if line["step"] == step), key=lambda line: line["reward"])
        if not drawn or step > len(lines):  # it diverged before
            break
        greedy = lines[step - 1]["greedy"] if step else lines[0]["greedy_before"] if lines else math.nan
        measured = dict(reward=np.mean([one["reward"] for one in drawn]), greedy=greedy,
                        seconds=seconds[step - 1] if step else 0.0, drawing=drawing[step - 1] if step else 0.0)
        measured |= describe_completions(drawn, model, config)
        outcome |= {f"{name} {step}": round(float(value), 4) for name, value in measured.items()}
        places = dict(worst=0, low=len(drawn) // 4, median=len(drawn) // 2, high=3 * len(drawn) // 4, best=-1)
        samples = {name: dict(reward=round(drawn[place]["reward"], 3), completion=drawn[place]["completion"])
                   for name, place in places.items()}
    return outcome | dict(samples=samples)

def describe_completions(drawn: list[dict], model: str, config: Config) -> dict[str, float]:
    """Of lines of an eval_rollouts.jsonl: `kl` to the base, nats per completion, the mean of log π - log π_base;
    `entropy`, nats per token; `length`, tokens; `distinct`, different pairs of neighbouring words over all of them."""
    base = base_sampler(model)
    rows = evaluation.read_rows(config.eval_data, config)
    prompts = {group.row: group.prompt for group in evaluation.encode(base, rows, offline=False)}
    groups = [Group(line["row"], prompts[line["row"]], [line["tokens"]], [0.0]) for line in drawn]
    own = np.array([sum(line["logps"]) for line in drawn])
    of_base = np.array([logps.sum() for logps, in evaluation.token_logps(base, groups)])
    lengths = np.array([len(line["tokens"]) for line in drawn])
    words = [line["completion"].lower().split() for line in drawn]
    pairs = [pair for text in words for pair in itertools.pairwise(text)]
    return dict(kl=(own - of_base).mean(), entropy=-own.sum() / lengths.sum(), length=lengths.mean(),
                distinct=len(set(pairs)) / max(1, len(pairs)))

def at_kl(run: dict, kl: float) -> float:
    """The reward of a run where it had come `kl` nats away from its base. Between measurements what it lacks to 1, the
    best reward, is taken to shrink by the same factor for each nat: a reward levels off, and a straight line would lie
    below it. NaN where it was farther away at its first measurement, or never came so far."""
    steps = sorted(int(name.split()[1]) for name in run if name.startswith("kl "))[1:]
    points = [(run[f"kl {step}"], run[f"reward {step}"]) for step in steps]
    if not points or not kl >= points[0][0]:
        return math.nan
    for (near, low), (far, high) in itertools.pairwise(points):
        if near <= kl <= far:
            part = (kl - near) / max(far - near, 1e-9)
            return 1 - max(1 - low, 1e-3) ** (1 - part) * max(1 - high, 1e-3) ** part
    return math.nan

def real(runs: Runs, losses: Iterable[str], tasks: Iterable[str]) -> tuple[list[str], dict]:
    """The report's text; and the curves to draw, by task, loss and form."""
    text, verdicts, samples, curves, last = [], [], [], {}, REAL_STEPS[-1]
    for task, loss in itertools.product(tasks, losses):
        names = ("plain", HUMANLINE, TAPERED, "online") if runs.quick else tuple(real_forms(loss))
        flags = {name: real_flags(task, loss, name) for name in names}
        value = lambda name, what, step=last: runs(flags[name], f"{what} {step}")
        each = {name: runs.each(flags[name]) for name in flags}
        there = {name: [run for run in each[name] if f"reward {last}" in run] for name in flags}
        if not any(there.values()):
            text.append(f"{loss.upper()}, {task}: no run is finished.")
            continue
        rows = [[f"{loss.upper()}, {task}", "seeds", "lr, k", "reward", "greedy", "of the gap", "KL to the base, nats",
                 "online's reward there", "length", "distinct pairs", "seconds, drawing"]]
        base = [f"{mean_of(value('plain', what, 0)):.3f}" for what in ("reward", "greedy")]
        rows.append(["the base", "", "", *base, "", "0", "", f"{mean_of(value('plain', 'length', 0)):.1f}",
                     f"{mean_of(value('plain', 'distinct', 0)):.2f}", ""])
        for name in [name for name in flags if there[name]]:
            of_three = common(value("plain", "reward"), value(name, "reward"), value("online", "reward"))
            share = ""
            if len(of_three[0]) and name not in ("plain", "online"):
                share = show_share(closed(*of_three, pairs(each, "plain", name, "online")))
            rewards, = common(online_at(runs, flags["online"], value(name, "kl")))
            devices = {run["device"] for run in there[name]}
            seconds = "{:.0f}, {:.0f}".format(*(mean_of(value(name, what)) for what in ("seconds", "drawing")))
            tuned = ", ".join(REAL_TUNED[loss, real_forms(loss)[name][1]]).removesuffix(", 0")
            rows.append([name, f"{len(there[name])}", tuned,
                         *(spread(*common(value(name, what))) for what in ("reward", "greedy")), share,
                         spread(*common(value(name, "kl")), 1), spread(rewards) if len(rewards) else "",
                         f"{mean_of(value(name, 'length')):.1f}", f"{mean_of(value(name, 'distinct')):.2f}",
                         seconds if len(devices) == 1 else "on two devices"])
        text.append(markdown(rows))
        curves[task, loss] = there
        verdicts += real_verdicts(f"{loss.upper()}, {task}", value, runs, flags)
        for name, done in there.items():
            said = "; ".join(f"{place} {one['reward']:.2f}: "
                             f"\"{' '.join(evaluation.printable(one['completion']).split())}\""
                             for run in done[:1] for place, one in run["samples"].items()
                             if place in ("worst", "median", "best"))
            samples += [f"- {loss.upper()}, {task}, {name}: {said}"] if said else []
    text += [at_distances(curves, task) for task in dict.fromkeys(task for task, _ in curves)]
    return [*text, *verdicts, "What the final models write to held-out prompts (the first seed):", *samples], curves

def at_distances(curves: dict, task: str) -> str:
    """A table of what the runs of a task earned on the way, where they were equally far from their base."""
    rows = [[f"{task}: reward at a KL of", *(f"{kl} nats" for kl in DISTANCES)]]
    for (of, loss), variants in curves.items():
        for name, runs in variants.items() if of == task else ():
            rewards = [common(np.array([at_kl(run, kl) for run in runs]))[0] for kl in DISTANCES]
            if any(map(len, rewards)):
                rows.append([f"{loss.upper()}, {name}", *(f"{np.mean(one):.2f} ({len(one)})" if len(one) else ""
                                                          for one in rewards)])
    return f"{markdown(rows)}\n\nIn brackets: of how many seeds; between two measurements as above."

def common(*values: np.ndarray) -> list[np.ndarray]:
    """The same seeds of each: those of which all have a value."""
    there = ~np.isnan(np.stack(values)).any(0)
    return [value[there] for value in values]

def mean_of(values: np.ndarray) -> float:
    """Over the seeds that have a value."""
    return float(np.mean(*common(values))) if not np.isnan(values).all() else math.nan

def on_one_device(*variants: list[dict]) -> list[bool]:
    """Of each seed, whether its runs are of one device. If not, they share no offline data: the base draws other
    completions on another device."""
    return [len({run.get("device") for run in runs if run}) < 2 for runs in zip(*variants)]

def pairs(each: dict[str, list[dict]], *names: str) -> np.ndarray:
    """Which of these forms are paired by seed, (names, names)."""
    seeds = [runs for runs in zip(*(each[name] for name in names)) if all(runs)]
    devices = np.array([[str(run.get("device")) for run in runs] for runs in seeds])  # (seeds, names)
    return (devices[:, :, None] == devices[:, None, :]).all(0)

def online_at(runs: Runs, online: str, kl: np.ndarray) -> np.ndarray:
    """The reward of each seed's online run where it had come as far from the base as `kl` says."""
    return np.array([at_kl(run, one) for run, one in zip(runs.each(online), kl)])

def real_verdicts(title: str, value: Callable[..., np.ndarray], runs: Runs, flags: dict[str, str]) -> list[str]:
    """What a task and a loss say of the paper's claims, as far as there are seeds with all that a claim compares."""
    verdicts, offline, online = [], value("plain", "reward"), value("online", "reward")
    each = {name: runs.each(flags[name]) for name in flags}

    def compare(name: str, other: str, what: str, is_better: bool, more: str = "",
                theirs: np.ndarray | None = None) -> None:
        if name not in flags or other not in flags:
            return
        paired = theirs is not None or all(on_one_device(each[name], each[other]))  # else: read off at ours
        ours, theirs = common(value(name, "reward"), value(other, "reward") if theirs is None else theirs)
        if not len(ours):
            return
        ahead, few = np.mean(ours - theirs), len(ours) < 3
        reach = half(ours - theirs) if paired else math.hypot(half(ours), half(theirs))
        low, high = ahead - reach, ahead + reach
        found = f"{ahead:+.3f}" + f" ± {reach:.3f}" * (len(ours) > 1) + (", paired" if paired else ", not paired")
        as_good = high >= 0 and low > -AS_WELL
        seeds = f"{len(ours)} seed{'s' * (len(ours) > 1)}"
        verdicts.append(holds(not few and (low > 0 if is_better else as_good), f"{title}, {seeds}: {what}: "
                              f"{found}{more}", few or high > 0))

    compare("online", "plain", "online ends above plain offline", True)
    for name in [name for name in (HUMANLINE, TAPERED, BOTH) if name in flags]:
        of_three = common(offline, value(name, "reward"), online)
        share = closed(*of_three, pairs(each, "plain", name, "online")) if len(of_three[0]) else None
        share = f"; {show_share(share)} of the gap" if share else ""
        compare(name, "plain", f"{name} does better than plain offline", True, share)
        compare(name, "online", f"{name} gains as much as online at the same distance from the base", False,
                theirs=online_at(runs, flags["online"], value(name, "kl")))
    compare(TAPERED, HUMANLINE, f"{TAPERED} does better than {HUMANLINE}", True)
    compare(BOTH, HUMANLINE, f"{BOTH} does better than {HUMANLINE}", True)
    compare(BARE, "plain", f"{BARE} does better than plain offline", True)
    compare(BARE, BOTH, f"{BARE} does as well as {BOTH}", False)
    compare(SYNCED_ALONE, BOTH, f"{SYNCED_ALONE} does as well as {BOTH}", False)
    name = f"{SPARSELY}, {HUMANLINE}"
    if name in flags:
        ratio, = common(np.where(on_one_device(each["online"], each[name]),
                                 value("online", "seconds") / value(name, "seconds"), math.nan))
        times = f"; every step takes {spread(ratio, 2)} times as long" if len(ratio) else ""
        compare(name, "online", f"{name} does as well as online", False, times)
        compare(name, SPARSELY, f"{name} does better than without", True)
    compare(UNCLIPPED, "plain", f"{UNCLIPPED}, does better than plain offline", True)
    compare(UNCLIPPED, HUMANLINE, f"{UNCLIPPED}, does as well as {HUMANLINE}", False)
    return verdicts

def picture_real(curves: dict, path: Path) -> None:
    """Held-out reward against the KL to the base: a panel for each task and loss, a line for each form from step 0 on,
    which ends in a dot, and a thin one for each seed."""
    columns = 2 if len(curves) % 2 == 0 else 1
    figure, axes = evaluation.new_figure(1.3 + 2.3 * len(curves) / columns, len(curves) // columns, columns)
    names, lines = list(real_forms("grpo")), {}
    for ((task, loss), variants), axis in zip(curves.items(), axes):
        for name, runs in variants.items():
            if not runs:
                continue
            i = names.index(name)
            points = np.array([[(run[f"kl {step}"], run[f"reward {step}"]) for step in REAL_STEPS]
                               for run in runs])  # (seeds, steps, 2)
            dash = "--" if name.startswith(SPARSELY) else ":" if name in (UNCLIPPED, BARE, SYNCED_ALONE) else "-"
            style = dict(color=evaluation.OKABE_ITO[i % 7], linestyle=dash)
            for seed in points if len(points) > 1 else []:
                axis.plot(*seed.T, linewidth=0.5, alpha=0.4, **style)
            lines[name], = axis.plot(*points.mean(0).T, linewidth=1.8, marker="o", markersize=4, markevery=[-1],
                                     **style)
        axis.set_title(f"{loss.upper()}, {task}: held-out reward", loc="left")
        axis.set_xlabel("KL to the base, nats per completion")
    evaluation.save(figure, path, lines)

def train_all_real(missing: list[str], model: str, home: Path, jobs: int | None) -> Iterator[dict]:
    """What came out of each of the missing runs."""
    require("sentiment" not in " ".join(missing) or importlib.util.find_spec("vaderSentiment"),
            "--real: one of its rewards is not installed; pip install vaderSentiment")
    home.mkdir(parents=True, exist_ok=True)
    drawn = sorted({(run.split()[0], seed_of(run)) for run in missing if "--sample-every" not in run})
    for _ in in_processes(draw_base, [(*one, model, home) for one in drawn], jobs, "base"):
        pass
    longest_first = sorted(missing, key=lambda run: (seed_of(run), "--sample-every 1 " not in run, "grpo" not in run))
    yield from in_processes(train_real, [(run, model, home) for run in longest_first], jobs, "run")

def reproduce_real(flags: Flags) -> None:
    """Train and report, with every run kept in a file of results."""
    require(not flags.only, "--only names experiments on the tiny models; leave it out with --real")
    require(not flags.quick or flags.losses == LOSSES, "--losses: --quick is GRPO alone; leave one of them out")
    model, out = flags.real, Path(flags.results)
    if model:
        run = evaluation.run_folder(model, "--real")
        model = str(run / "final") if run else model
    results = (HERE / "results" if flags.stored else out) / "real.jsonl"
    known = read_results(results)
    losses, tasks = (("grpo",), ("sentiment",)) if flags.quick else (flags.losses, tuple(REAL_TASKS))
    runs = Runs(list(range(1, 1 + (flags.seeds or (1 if flags.quick else 3)))), known, quick=flags.quick)
    real(runs, losses, tasks)
    missing = [run for run in runs.wanted if run not in known] if not flags.stored else []
    for run in train_all_real(missing, model, out / "real-rows", flags.jobs) if missing else []:
        known[run["flags"]] = run
        add_result(results, run)
    text, curves = real(runs, losses, tasks)
    command = "reproduce.py --real FOLDER" + " --quick" * flags.quick
    command += f" --losses {' '.join(losses)}" * (losses != LOSSES and not flags.quick)
    command += f" --seeds {flags.seeds}" * bool(flags.seeds)
    text.insert(0, f"# humanline on a real language model\n\n`{command}`: {len(runs.wanted.keys() & known)} runs of "
                f"{REAL_STEPS[-1]} steps. Mean ± half of the 95 % interval over seeds; a seed is the offline data and "
                "the run. Differences are paired by seed, but not where runs are of two devices, which draw different "
                "data. The settings are the best of seed 101 on the same held-out prompts; one at the edge of what "
                "was tried (lr 1e-5 to 4e-5, k 1 to 16) may be better beyond. Where the online run was as far from "
                "the base lies between its measurements. Seconds are wall-clock, beside what else ran.")
    report(text, out / "real.md")
    if curves:
        picture_real(curves, out / "real.png")

# ---------- What the prior is worth -----------------------------------------------------------------------------------

LEAST = -0.02  # a cell is worse without the prior if the interval of the difference lies wholly below this

def prior_cells() -> dict[tuple[str, str], list[tuple[dict, dict]]]:
    """By loss and cell, the stored runs of humanline with taper, without the prior and with it, paired by seed."""
    cells: dict[tuple[str, str], list[tuple[dict, dict]]] = {}
    for name in (*TASKS, "real"):
        known = read_results(HERE / "results" / f"{name}.jsonl")
        for flags, run in known.items():
            loss = flags.split("--loss ")[1].split()[0]
            with_prior = "--taper --prior 1" if loss == "grpo" else "--stale taper --prior 1"
            other = known.get(flags.replace("--taper", with_prior))
            if "--taper" not in flags or "--prior" in flags or other is None:
                continue
            if run.get("device") != other.get("device"):  # other data: no pair
                continue
            drawn = re.search("--sample-every ([0-9]+)", flags)
            cell = f"SmolLM2, {flags.split()[0]}" if name == "real" else name
            cell += f", drawn every {drawn[1]} steps" if drawn else ", offline"
            cells.setdefault((loss, cell), []).append((run, other))
    return cells

def ends(runs: Iterable[dict]) -> tuple[np.ndarray, int]:
    """pass@1 or reward after the last step of each run, and how many ended more than 0.1 below their base."""
    after, fell = [], 0
    for run in runs:
        what = "exact" if "exact 0" in run else "reward"
        last = max(int(key.split()[1]) for key in run if key.startswith(f"{what} "))
        after.append(run[f"{what} {last}"])
        fell += after[-1] < run[f"{what} 0"] - 0.1
    return np.array(after), fell

def worth_of_prior() -> list[str]:
    """A table of all cells, and the verdict."""
    rows = [["humanline with taper", "pairs", "with prior", "without", "without − with, paired", "collapsed: with, without"]]
    means = []
    reasons: dict[str, list[str]] = {loss: [] for loss in LOSSES}
    for (loss, cell), pairs in sorted(prior_cells().items(), key=lambda item: LOSSES.index(item[0][0])):
        without, fell = ends(one for one, _ in pairs)
        with_it, fell_with = ends(other for _, other in pairs)
        more = without - with_it
        rows.append([f"{loss.upper()}, {cell}", f"{len(pairs)}", spread(with_it), spread(without),
                     spread(more, sign="+"), f"{fell_with}, {fell}"])
        if cell.startswith(SHORT.name):  # known when the rule was made
            continue
        means.append(np.mean(more))
        if np.mean(more) + half(more) < LEAST:
            reasons[loss].append(f"{cell}: {spread(more, sign='+')}")
        if fell > fell_with == 0:
            reasons[loss].append(f"{cell}: {fell} of {len(pairs)} collapse without it, none with it")
    by_loss = [f"{loss.upper()}: {'; '.join(found) or 'no cell needs it'}" for loss, found in reasons.items()]
    stays = any(reasons.values()) or np.mean(means) < -0.01
    return [markdown(rows),
            "Pass@1, or SmolLM2's held-out reward, after the last step; the mean ± half of the 95 % interval over pairs. "
            f"The rule was fixed before the runs, all but those on two digits: the prior goes if no cell's interval lies "
            f"wholly below {LEAST}, no cell collapses without it alone, and the mean of the differences over all cells is "
            "at least -0.01.",
            f"- **The prior {'stays' if stays else 'goes'}**: the mean over {len(means)} cells is {np.mean(means):+.3f}. "
            + ". ".join(by_loss) + ".",
            "Why GRPO needs it: a group whose rollouts are all right has no difference, and so no gradient. Nothing then "
            "keeps what such groups do right while the others change the policy, for as long as the same rollouts are "
            "trained on. An extra rollout with the mean reward of all groups gives them one. A pair or an example has "
            "a difference by itself: DPO and KTO have no prior any more, and their runs with one cannot be run again."]

# ----------------------------------------------------------------------------------------------------------------------

def main(argv: list[str] | None = None) -> int:
    humanline.print_anything()
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}  # of the processes that train
    started = time.perf_counter()
    try:
        flags = humanline.parse_flags(sys.argv[1:] if argv is None else argv, kind=Flags)
        for name in ("seeds", "jobs"):
            value = getattr(flags, name)
            require(value is None or value >= 1, f"--{name} is {value}; it must be 1 or more")
        require(flags.real or flags.losses == LOSSES or flags.stored, "--losses: only --real asks for it; leave it out")
        if flags.prior:
            print("\n\n".join(worth_of_prior()).replace("\n\n- ", "\n- "))
            return 0
        if flags.real:
            reproduce_real(flags)
        else:
            reproduce(flags)
        if flags.stored and not flags.only and not flags.real:
            reproduce_real(flags)
    except (UserError, OSError, concurrent.futures.BrokenExecutor) as error:
        print(f"reproduce.py: error: {error}", file=sys.stderr)
        return 2
    print(f"after {(time.perf_counter() - started) / 60:.1f} minutes")
    return 0

if __name__ == "__main__":
    sys.exit(main())
