"""The first experiment on SmolLM2-135M-Instruct, of three seeds and many forms: its stored runs and its page, real.md.

The runs are the lines of results/real.jsonl. Commit f948f44 has the `real.py` that trained them.
"""

import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import numpy as np

import eval as evaluation
from estimates import compare, estimate, markdown, share_of_gap, show, show_difference, show_mean, show_rate
from estimates import show_settings, show_share, shown

RESULTS = Path(__file__).resolve().parent / "results" / "real.jsonl"

# ---------- The stored runs ---------------------------------------------------------------------------------

TASKS = "sentiment", "checked"  # a reward with degrees, and one that is 0 or 1; rows: configs/{topics,checks}.jsonl
STEPS = (0, 16, 32, 48, 64)
DISTANCES = (4, 8, 14, 20)  # nats from the base, at which forms are compared
SIZE = dict(grpo=4, dpo=8, kto=16)  # groups of 8, pairs, completions
NO_CLIP = "--no-humanline --epsilon 1000 --epsilon-high 1000"

FORMS = {
    "plain": "--no-humanline",
    "humanline": "--sync-k {k}",
    "humanline with taper": "--sync-k {k} --taper",
    "online": "--sample-every 1 --no-humanline",
}
GRPO_FORMS = {
    "humanline with taper and prior": "--sync-k {k} --taper --prior 1",
    "every 16 steps": "--sample-every 16 --no-humanline",
    "every 16 steps, humanline": "--sample-every 16 --sync-k {k}",
    "plain, no ratio clip": NO_CLIP,
    "plain with taper and prior": f"{NO_CLIP} --taper --prior 1",
    "sync alone with taper and prior": "--sync-k {k} --perception none --taper --prior 1",
}
FORMS_OF = dict(grpo=FORMS | GRPO_FORMS, dpo=FORMS, kto=FORMS)
# Learning rate without syncs, offline and online; rate and k with syncs.
TUNED = dict(grpo=("2e-5", "4e-5", "2e-5", 4), dpo=("4e-5", "2e-5", "2e-5", 4), kto=("4e-5", "2e-5", "1e-5", 16))

def flags_of(task: str, loss: str, form: str, seed: int) -> str:
    """The task, and the flags of humanline.py but for model, data and measurements."""
    offline, online, synced, k = TUNED[loss]
    switches = FORMS_OF[loss][form]
    lr = synced if "{k}" in switches else online if "--sample-every" in switches else offline
    return f"{task} --loss {loss} --batch-size {SIZE[loss]} {switches.format(k=k)} --lr {lr} --seed {seed}"

THEN = {"--stale keep --prior 0": "", "--stale taper --prior 0": "--taper"}
THEN_OF_GRPO = THEN | {"--stale keep --prior 1": "--prior 1", "--stale taper --prior 1": "--taper --prior 1"}

def today(flags: str) -> str:
    """A stored run's flags, as they are called today. What is gone keeps its name: --stale drop, and a prior with
    DPO and KTO. Commit 98c2cf5 can run these."""
    for then, now in (THEN_OF_GRPO if "--loss grpo" in flags else THEN).items():
        flags = flags.replace(f" {then}", f" {now}".rstrip())
    return flags

@dataclass(frozen=True)
class Form:
    """A form at some settings; k is 0 without a sync."""

    name: str
    lr: float
    k: int

def parse(flags: str) -> tuple[str, str, Form, int]:
    """Task, loss, form and seed of a run's flags. A form that is not in the list is named by its flags."""
    pattern = r"(\S+) --loss (\S+) --batch-size \S+ (.*) --lr (\S+) --seed (\S+)"
    task, loss, switches, lr, seed = re.fullmatch(pattern, flags).groups()
    sync = re.search(r"--sync-k (\d+)", switches)
    k = int(sync[1]) if sync else 0
    names = {form.format(k=k): name for name, form in FORMS_OF[loss].items()}
    return task, loss, Form(names.get(switches, f"`{switches}`"), float(lr), k), int(seed)

def read_results() -> dict[str, dict]:
    """The stored runs by their flags of today."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines()
    return {today(run["flags"]): run for run in map(json.loads, lines)}

Runs = dict[int, dict]  # what came out, by seed

class Stored:
    """The stored runs of a task and a loss: by form and settings those of seeds 1, 2, ..., and those on tuning."""

    def __init__(self, task: str, loss: str):
        self.task, self.loss = task, loss
        self.forms: dict[Form, Runs] = {}
        self.tuning: dict[Form, dict] = {}
        for flags, run in read_results().items():
            of_task, of_loss, form, seed = parse(flags)
            if (of_task, of_loss) != (task, loss):
                continue
            if seed > 100:
                self.tuning[form] = run
            else:
                self.forms.setdefault(form, {})[seed] = run

    def at_tuned(self, name: str) -> Runs:
        """The runs of a form at its tuned settings."""
        _, _, form, _ = parse(flags_of(self.task, self.loss, name, 1))
        return self.forms.get(form, {})

    def distance_rows(self) -> Iterator[list[str]]:
        """For each form the mean reward of its runs where they were as far from the base as DISTANCES say."""
        for name in FORMS_OF[self.loss]:
            words = []
            for kl in DISTANCES:
                rewards = [reward_at(run, kl) for run in self.at_tuned(name).values()]
                rewards = [reward for reward in rewards if not math.isnan(reward)]
                words.append(f"{np.mean(rewards):.2f} ({len(rewards)})" if rewards else "")
            if any(words):
                yield [f"{self.task}, {self.loss.upper()}, {name}", *words]

    def lead_rows(self) -> Iterator[list[str]]:
        """How far humanline is ahead of other forms there, by Welch's test, where both have two seeds or more."""
        for other in "online", "plain, no ratio clip":
            words = []
            for kl in DISTANCES:
                rewards = [
                    np.array([reward_at(run, kl) for run in self.at_tuned(name).values()])
                    for name in ("humanline", other)
                ]
                ours, theirs = (some[~np.isnan(some)] for some in rewards)
                is_enough = min(len(ours), len(theirs)) > 1
                words.append(show_difference(compare(ours, theirs, paired=False)) if is_enough else "")
            if any(words):
                yield [f"{self.task}, {self.loss.upper()}, humanline − {other}", *words]

    def samples(self) -> Iterator[str]:
        """What the first run of each form writes in the end."""
        for name in FORMS_OF[self.loss]:
            for run in list(self.at_tuned(name).values())[:1]:
                said = []
                for place in "worst", "median", "best":
                    sample = run["samples"][place]
                    words = " ".join(evaluation.printable(sample["completion"]).split())
                    said.append(f'{place} {sample["reward"]:.2f}: "{words}"')
                yield f"- {self.loss.upper()}, {self.task}, {name}: {'; '.join(said)}"

def rewards_of(*runs: Runs, what: str = "reward") -> tuple[list[np.ndarray], np.ndarray]:
    """Rewards at the end over the seeds that all have, and which of them are paired: of one device for each seed."""
    common = sorted(set.intersection(*map(set, runs)))
    devices = np.array([[some[seed]["device"] for some in runs] for seed in common])
    paired = (devices[:, :, None] == devices[:, None, :]).all(0)
    return [np.array([some[seed][f"{what} {STEPS[-1]}"] for seed in common]) for some in runs], paired

def steps_of(runs: list[dict]) -> list[int]:
    """The steps at which all these runs were measured."""
    return [step for step in range(STEPS[-1] + 1) if all(f"kl {step}" in run for run in runs)]

def path_of(run: dict, steps: list[int]) -> np.ndarray:
    """The KL to the base and the reward of a run after each of these steps but the first, which is before training."""
    return np.array([(run[f"kl {step}"], run[f"reward {step}"]) for step in steps[1:]])

def reward_at(run: dict, kl: float) -> float:
    """The reward of a run where it had come `kl` nats away from its base. Between measurements what it lacks to 1, the
    best reward, is taken to shrink by the same factor for each nat: a reward levels off. NaN where it was farther away
    at its first measurement, or never came so far."""
    points = path_of(run, steps_of([run]))
    for (near, low), (far, high) in itertools.pairwise(points):
        if near <= kl <= far:
            part = (kl - near) / max(far - near, 1e-9)
            return 1 - max(1 - low, 1e-3) ** (1 - part) * max(1 - high, 1e-3) ** part
    return math.nan

# ---------- Their page --------------------------------------------------------------------------------------

LAST = STEPS[-1]

HOW = f"""SmolLM2-135M-Instruct, {LAST} steps; reward on 50 held-out prompts with 4 completions each. The first
table of each loss is of seeds 1 to 3; a seed is the offline data and the run. Learning rate and k are the best for both
tasks together on seed 101, whose runs are in the second table. They were measured on the same 50 prompts, so the
settings were chosen on the test prompts, with other offline data; the best one may lie beyond the edge of what was
tried. Where the base's reward differs, a run is of another device, which drew other data: in DPO's tables k was chosen
across two.

± is half of the 95% interval over seeds. Differences are paired by seed, but not where runs are of two devices, which
draw different data (*not paired*). *Online's reward there*: that of the online run where it was as far from the base,
interpolated between two measurements. *Distinct pairs*: different pairs of neighbouring words, as a share of all.
Seconds are wall-clock, beside what else ran. A form that is written as flags is gone from the program."""

def compare_runs(runs: Runs, other: Runs, what: str = "reward") -> dict | None:
    if runs is other or not runs.keys() & other.keys():
        return None
    rewards, paired = rewards_of(runs, other, what=what)
    return compare(*rewards, paired=bool(paired.all()))

def share_of(cell: Stored, runs: Runs) -> list[float] | None:
    """Of the gap, where there is one, on two seeds or more."""
    plain, online = cell.at_tuned("plain"), cell.at_tuned("online")
    if runs is plain or runs is online or compare_runs(online, plain)["low"] <= 0:
        return None
    rewards, paired = rewards_of(plain, runs, online)
    return share_of_gap(*rewards, paired) if len(paired) and len(rewards[0]) > 1 else None

def facts_of(cell: Stored) -> dict[str, dict]:
    """What the page says of each form; one at other settings than the tuned ones has them in its name."""
    found, online = {}, cell.at_tuned("online")
    order = list(FORMS_OF[cell.loss])
    listed = lambda form: order.index(form.name) if form.name in order else len(order)
    for form in sorted(cell.forms, key=lambda form: (listed(form), form.lr)):
        runs = cell.forms[form]
        is_other = form.name in order and runs is not cell.at_tuned(form.name)
        name = f"{form.name}, lr {show_rate(form.lr)}" if is_other else form.name
        common = [seed for seed in runs if seed in online]
        found[name] = dict(
            lr=form.lr,
            k=form.k,
            seeds=len(runs),
            devices=len({run["device"] for run in shown(runs.values())}),
            minus_plain=compare_runs(runs, cell.at_tuned("plain")),
            share_of_gap=share_of(cell, runs),
            online_there=estimate(
                reward_at(online[seed], runs[seed][f"kl {LAST}"]) for seed in common
            ),
        )
        for what in "reward", "greedy", "kl", "length", "distinct", "seconds", "drawing":
            found[name][what] = estimate(run[f"{what} {LAST}"] for run in runs.values())
            found[name][f"{what}_before"] = estimate(run[f"{what} 0"] for run in runs.values())
    return found

FORM_HEAD = (
    "| form | lr, k | seeds | reward | greedy | − plain | of the gap | KL to the base, nats | "
    "online's reward there | length | distinct pairs | seconds, drawing |"
)

def page(cells: list[Stored], facts: list[dict]) -> str:
    count = len(read_results())
    text = [
        "# SmolLM2: the forms on a real language model",
        f"{count} runs. {HOW}",
        "![reward against KL to the base, GRPO](real.png)",
    ]
    for cell, found in zip(cells, facts):
        text += [f"## {cell.loss.upper()}, {cell.task}", form_table(found), tuning_table(cell)]
    text.append(
        "## Reward on the way, where the forms are equally far from their base\n\nIn brackets: of how many "
        "seeds."
    )
    distances = " | ".join(f"{kl} nats" for kl in DISTANCES)
    text.append(
        markdown(
            f"| reward at a KL of | {distances} |",
            itertools.chain(*(cell.distance_rows() for cell in cells)),
        )
    )
    text.append(
        markdown(
            f"| difference at a KL of | {distances} |",
            itertools.chain(*(cell.lead_rows() for cell in cells if cell.loss == "grpo")),
        )
    )
    text.append("## What the final models write to held-out prompts (the first seed)")
    text.append("\n".join(itertools.chain(*(cell.samples() for cell in cells))))
    return "\n\n".join(text) + "\n"

def form_table(facts: dict[str, dict]) -> str:
    digits = dict(reward=3, greedy=3, length=1, distinct=2)
    base = {
        what: show_mean(facts["plain"][f"{what}_before"], count) for what, count in digits.items()
    }
    rows = [
        [
            "the base",
            "",
            "",
            base["reward"],
            base["greedy"],
            "",
            "",
            "0",
            "",
            base["length"],
            base["distinct"],
            "",
        ]
    ]
    for name, form in facts.items():
        seconds = f"{show_mean(form['seconds'], 0)}, {show_mean(form['drawing'], 0)}"
        rows.append(
            [
                name,
                show_settings(form["lr"], form["k"]),
                f"{form['seeds']}",
                show(form["reward"]),
                show(form["greedy"]),
                show_difference(form["minus_plain"]),
                show_share(form["share_of_gap"]),
                show(form["kl"], 1),
                show(form["online_there"]),
                show_mean(form["length"], 1),
                show_mean(form["distinct"], 2),
                seconds if form["devices"] == 1 else "on two devices",
            ]
        )
    return markdown(FORM_HEAD, rows)

def tuning_table(cell: Stored) -> str:
    rows = []
    for form in sorted(cell.tuning, key=lambda form: (form.name, form.lr, form.k)):
        [run] = shown([cell.tuning[form]])
        rows.append(
            [
                form.name,
                show_settings(form.lr, form.k),
                f"{run['reward 0']:.3f}",
                f"{run[f'reward {LAST}']:.3f}",
                f"{run[f'kl {LAST}']:.1f}",
            ]
        )
    return markdown("| tuning, seed 101 | lr, k | the base | reward | KL to the base, nats |", rows)
