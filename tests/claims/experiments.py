"""Every form of every loss, tuned by one rule and then compared: the list of runs, and what runs them.

  python tests/claims/experiments.py two-digits five-sorted six-digits      # some eleven hours of two cores
  python tests/claims/experiments.py two-digits --dry                       # only count the runs that are missing

Interrupt it whenever you like: each run is a line of results/tuned-TASK.jsonl, and is not trained again.
`reproduce.py` draws tables and figures from these lines.

The rule, fixed before the runs. **Tuning**, with the same learning rates for every form and the same k for every form
that syncs, each with each: on two bases that no verdict uses (the first two of 101, 102, ... that learned their task),
judged by pass@1 of the last measurement on the validation half of the held-out problems. The five best settings on the
first base are run on the second, and the best mean of both wins. Where its learning rate is at the edge of the grid, one
further is tried, with the same k. Ties go to the lower rate, then to the larger k. **Test**: the chosen settings on
bases 1, 2, ... (the first five that learned), on the other half.

Amended when the first results were known, because each form had then been tried at rates of its own. The five forms that
the verdicts compare share their rates: while the best setting of any of them has the lowest or the highest rate that the
five share, or ends below its own base, half that lowest or twice that highest rate is added to those of all five, up to
five times on either side. So do the two forms without GRPO's ratio clip. Another form whose best setting ends below its
own base gets half the lowest rate of the grid with every k on both bases, and half of that, up to four times, until it
ends above.
"""

import argparse
import concurrent.futures
import contextlib
import copy
import functools
import io
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Collection, Iterable, Iterator

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch
from torch.nn.utils.rnn import pad_sequence

import bases
import humanline
import neighbours  # noqa: F401  (adds entries to LOSSES)
from humanline import Sequence

# ---------- The list of experiments -------------------------------------------------------------------------

@dataclass(frozen=True)
class Task:
    """A task of bases.py with its sizes and grid."""

    name: str
    steps: int
    every: int  # steps from one measurement to the next
    learned: float  # least pass@1 of a base that got the idea
    batch_size: dict[str, int]
    rates: tuple[float, ...]
    ks: tuple[int, ...]
    more_ks: tuple[int, ...] = ()  # for forms that share their rates

RATES = 5e-5, 1e-4, 2e-4, 4e-4, 8e-4
DEMO_SIZES = dict(grpo=32, dpo=32, kto=128)  # groups of 8, pairs, completions
TASKS = {
    task.name: task
    for task in (
        Task("two-digits", 256, 32, 0.5, DEMO_SIZES, RATES, (1, 8, 24, 128)),
        Task("five-sorted", 200, 40, 0.3, DEMO_SIZES, RATES, (1, 8, 24, 128)),
        Task(
            "six-digits",
            128,
            32,
            0.4,
            dict(grpo=16, dpo=32, kto=64),
            (1e-4, 2e-4, 4e-4),
            (8, 24),
            more_ks=(64,),
        ),
    )
}

# A form's flags; {k} is its --sync-k. `--loss` names an entry of neighbours.py, if the form has one. Runs with taper that
# are stored were made when humanline.py had it, as `--taper` and `--prior 1`. The forms without GRPO's ratio clip, and
# those of DPO and KTO with another beta, were added when the verdicts were known; no verdict uses them.
FORMS = {
    "plain": "--no-humanline",
    "humanline": "--sync-k {k}",
    "sync alone": "--sync-k {k} --perception none",
    "clip alone": "--sync-k 0",
    "humanline with taper": "--loss {loss}-taper --sync-k {k}",
    "taper alone": "--loss {loss}-taper --no-humanline",
    "online": "--no-humanline --sample-every 1",
}
COMPARED = "plain", "humanline", "sync alone", "clip alone", "online"  # by the verdicts
GRPO_FORMS = {
    "humanline with taper and prior": "--loss grpo-taper-prior --sync-k {k}",
    "plain, no ratio clip": "--no-humanline --epsilon 1000",
    "sync alone, no ratio clip": "--sync-k {k} --perception none --epsilon 1000",
    "every 64 steps": "--no-humanline --sample-every 64",
    "every 64 steps, humanline": "--sync-k {k} --sample-every 64",
    "every 64 steps, humanline with taper": "--loss grpo-taper --sync-k {k} --sample-every 64",
    "every 64 steps, humanline with taper and prior": "--loss grpo-taper-prior --sync-k {k} --sample-every 64",
}
# Written down before the first runs of DPO with these; KTO was added when those of sorting were known. If a sync removes
# an anchor, which helps where plain is held back, then humanline gains over plain at a larger beta. A task and a beta
# count where plain ends with a lower pass@1 and nearer to its base than at beta 0.1. There the prediction holds if the
# 95% interval of the difference, paired by base, lies above 0, and fails if it lies below 0.02.
BETAS = 1, 10
AT_BETA = {beta: (f"plain, beta {beta}", f"humanline, beta {beta}") for beta in BETAS}
BETA_FORMS = {
    form: f"{FORMS[form.split(',')[0]]} --beta {beta}" for beta, forms in AT_BETA.items() for form in forms
}
NEIGHBOURS = {  # published ones
    "grpo": {
        "better alone": "--positive-only --no-humanline",
        "better alone, synced": "--positive-only --sync-k {k}",
        "mask 0.1": "--loss grpo-mask-0.1 --no-humanline",
        "mask 0.1, synced": "--loss grpo-mask-0.1 --sync-k {k}",
        "mask 0.5": "--loss grpo-mask-0.5 --no-humanline",
        "mask 0.5, synced": "--loss grpo-mask-0.5 --sync-k {k}",
        "TOPR": "--loss grpo-topr --no-humanline",
    },
    "dpo": {
        "chosen alone": "--positive-only --no-humanline",
        "RPO": "--loss dpo-rpo --no-humanline",
        "RPO, synced": "--loss dpo-rpo --sync-k {k}",
        "DPO-positive": "--loss dpo-positive --no-humanline",
    },
    "kto": {
        "desirable alone": "--positive-only --no-humanline",
        "desirable alone, synced": "--positive-only --sync-k {k}",
    },
}
MORE_FORMS = dict(grpo=GRPO_FORMS, dpo=BETA_FORMS, kto=BETA_FORMS)
FORMS_OF = {loss: FORMS | MORE_FORMS[loss] | NEIGHBOURS[loss] for loss in NEIGHBOURS}
SHARING = {loss: [COMPARED, *AT_BETA.values()] for loss in FORMS_OF}  # groups of forms that share their rates
SHARING["grpo"] = [COMPARED, ("plain, no ratio clip", "sync alone, no ratio clip")]

def forms_of(task: str, loss: str) -> list[str]:
    """The forms of a loss that are run on a task. At other betas sorting has all, long sums all but KTO with syncs, whose
    runs take longest, and sums none."""
    left_out: Collection[str] = ()
    if task == "two-digits":
        left_out = BETA_FORMS
    elif (task, loss) == ("six-digits", "kto"):
        left_out = [synced for _, synced in AT_BETA.values()]
    return [form for form in FORMS_OF[loss] if form not in left_out]

TUNING_BASES, TEST_BASES = 2, 5
SECOND_BASE = 5  # settings of a form that are run on the second tuning base
FURTHER = 5  # rates on either side of the grid, for forms that share them
HALVINGS = 4  # of the lowest rate, for other forms that end below their base

@dataclass(frozen=True)
class Run:
    """What is trained once: a line of the results. k is 0 for a form without a sync."""

    task: str
    loss: str
    form: str
    lr: float
    k: int
    seed: int

    def flags(self) -> list[str]:
        """Those of humanline.py, but for the base's files."""
        task = TASKS[self.task]
        form = FORMS_OF[self.loss][self.form].format(k=self.k, loss=self.loss)
        loss = "" if "--loss" in form else f"--loss {self.loss} "
        return (
            f"{loss}{form} --lr {self.lr:g} --steps {task.steps} --batch-size {task.batch_size[self.loss]} "
            f"--eval-every {task.every} --seed {self.seed}"
        ).split()

Settings = tuple[float, int]  # learning rate and k

@dataclass(frozen=True)
class Plan:
    """What the rule asks for, given the runs of a loss that are known."""

    task: Task
    loss: str
    known: dict[Run, dict]
    tuning: list[int]  # bases
    test: list[int]

    def sharing(self, forms: tuple[str, ...]) -> list[Run]:
        """The runs that come next of forms that share their rates."""
        rates = list(self.task.rates)
        while True:
            ks = self.task.ks + self.task.more_ks
            wave = [run for form in forms for run in self.over_grid(form, rates, ks)]
            if wave:
                return wave
            best_rates = [self.best(form)[0] for form in forms]
            is_low = min(best_rates) <= rates[0] or any(map(self.ends_below_its_base, forms))
            if is_low and rates[0] > self.task.rates[0] / 2**FURTHER:
                rates.insert(0, rates[0] / 2)
            elif max(best_rates) >= rates[-1] and rates[-1] < self.task.rates[-1] * 2**FURTHER:
                rates.append(rates[-1] * 2)
            else:
                return [run for form in forms for run in self.tests(form)]

    def other(self, form: str) -> list[Run]:
        """The runs of another form that come next."""
        rates = self.task.rates
        wave = self.over_grid(form, rates, self.task.ks)
        if not wave:
            lr, k = self.best(form)
            further = {rates[0]: lr / 2, rates[-1]: 2 * lr}.get(lr, lr)
            wave = self.missing(form, [(further, k)], self.tuning)
        for halvings in range(1, HALVINGS + 1):
            if not wave and self.ends_below_its_base(form):
                lower = itertools.product([rates[0] / 2**halvings], self.ks(form, self.task.ks))
                wave = self.missing(form, lower, self.tuning)
        return wave or self.tests(form)

    def over_grid(self, form: str, rates: Iterable[float], ks: tuple[int, ...]) -> list[Run]:
        """Every setting on the first base; then the best of them on the second."""
        wave = self.missing(form, itertools.product(rates, self.ks(form, ks)), self.tuning[:1])
        best = ranked(self.task.name, self.loss, form, self.known, self.tuning[:1])[:SECOND_BASE]
        return wave or self.missing(form, best, self.tuning[1:])

    def tests(self, form: str) -> list[Run]:
        return self.missing(form, [self.best(form)], self.test)

    def missing(self, form: str, settings: Iterable[Settings], seeds: list[int]) -> list[Run]:
        runs = (
            Run(self.task.name, self.loss, form, lr, k, seed)
            for lr, k in settings
            for seed in seeds
        )
        return [run for run in runs if run not in self.known]

    def ks(self, form: str, ks: tuple[int, ...]) -> tuple[int, ...]:
        return ks if "{k}" in FORMS_OF[self.loss][form] else (0,)

    def best(self, form: str) -> Settings:
        return ranked(self.task.name, self.loss, form, self.known, self.tuning)[0]

    def ends_below_its_base(self, form: str) -> bool:
        """Whether the best setting does, on the mean of the tuning bases."""
        runs = [
            Run(self.task.name, self.loss, form, *self.best(form), seed) for seed in self.tuning
        ]
        curves = [self.known[run]["validation"] for run in runs]
        return sum(curve[-1] - curve[0] for curve in curves) < 0

def plan(task: Task, known: dict[Run, dict], seeds: tuple[list[int], list[int]]) -> list[Run]:
    """The runs that the rule asks for next, of tuning and test bases; none when all is done."""
    runs = []
    for loss in FORMS_OF:
        of_loss, forms = Plan(task, loss, known, *seeds), forms_of(task.name, loss)
        groups = [tuple(form for form in group if form in forms) for group in SHARING[loss]]
        for group in filter(None, groups):
            runs += of_loss.sharing(group)
        for form in forms:
            if not any(form in group for group in groups):
                runs += of_loss.other(form)
    return runs

def ranked(
    task: str, loss: str, form: str, known: dict[Run, dict], seeds: Collection[int]
) -> list[Settings]:
    """The settings of a form that were run on all these seeds, by validation after the last step, the mean over the
    seeds, best first. Ties go to the lower rate, then to the larger k."""
    ends: dict[Settings, list[float]] = {}
    for run, outcome in known.items():
        if (run.task, run.loss, run.form) == (task, loss, form) and run.seed in seeds:
            ends.setdefault((run.lr, run.k), []).append(outcome["validation"][-1])
    means = {
        settings: round(fmean(values), 4)
        for settings, values in ends.items()
        if len(values) == len(seeds)
    }
    return sorted(means, key=lambda settings: (-means[settings], settings[0], -settings[1]))

# Metrics under the names that they had when the first runs were stored.
RENAMED = dict(clip_low="clip_fraction_low", clip_high="clip_fraction_high")

def read_results(path: Path, kind: type[Run] = Run) -> dict[Run, dict]:
    """The stored runs of a file."""
    known = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        outcome = {RENAMED.get(name, name): value for name, value in json.loads(line).items()}
        known[kind(*(outcome[name] for name in Run.__dataclass_fields__))] = outcome
    return known

# ---------- One run -----------------------------------------------------------------------------------------

# Means of these metrics of a run are stored, over the steps between two measurements.
MECHANISM = (
    "clip_fraction_low",
    "clip_fraction_high",
    "clamped_low",
    "clamped_high",
    "drift",
    "kl",
    "ess",
    "taper_weight",
    "no_difference",
    "grad_norm",
    "logp_wanted",
    "sample_seconds",
    "step_seconds",
)

def train(run: Run, home: Path) -> dict:
    """Train; pass@1 on both halves of the held-out problems, greedy accuracy, KL to the base, and the mechanism."""
    base = home / f"{run.task}-{run.seed}"
    task, recipe = TASKS[run.task], bases.RECIPES[run.task]
    test = [json.loads(line) for line in (base / "test.jsonl").read_text().splitlines()]
    half = len(test) // 2
    measured = []

    def measure(trainer: humanline.Run, step: int) -> dict[str, float]:
        if step == 0:
            trainer.base = copy.deepcopy(trainer.policy)
        right, is_greedy = score(trainer.policy, trainer.sampler, test)
        measured.append(
            dict(
                step=step,
                validation=fmean(right[:half]),
                test=fmean(right[half:]),
                greedy=fmean(is_greedy[half:]),
                base_kl=kl_to(trainer.base, trainer, test[:half]),
            )
        )
        return {}

    humanline.Run.measure = measure
    with tempfile.TemporaryDirectory() as folder, quietly() as said:
        out = Path(folder, "run")
        flags = [
            *run.flags(),
            "--model",
            str(base / "model"),
            "--data",
            str(base / "rows.jsonl"),
            "--eval-data",
            str(base / "test.jsonl"),
            "--max-new-tokens",
            str(recipe.max_new_tokens),
            "--save-every",
            "0",
            "--out",
            str(out),
        ]
        status = humanline.main(flags)
        lines = list(humanline.read_lines(out / "metrics.jsonl"))
        if status not in (0, 1) or (
            status == 1 and "stopped: step" not in said.getvalue()
        ):  # 1: it diverged
            raise RuntimeError(f"{' '.join(flags)}: {said.getvalue()[-500:]}")
    outcome = vars(run) | dict(
        flags=" ".join(run.flags()), device="CPU, one thread", torch=torch.__version__
    )
    steps = list(range(0, task.steps + 1, task.every))
    for name in ("validation", "test", "greedy", "base_kl"):
        values = [line[name] for line in measured]
        outcome[name] = [round(value, 4) for value in values] + [0.0] * (len(steps) - len(values))
    if run.seed <= 101:
        for name in MECHANISM:
            means = [mean_between(lines, name, *ends) for ends in zip(steps, steps[1:])]
            if any(mean is not None for mean in means):
                outcome[name] = means
        if run.k:  # the drift of the last step before each sync: how far a sync moves the reference
            ends = [
                line | dict(moved=line["drift"])
                for line in lines
                if line["step"] % run.k == 0 and "drift" in line
            ]  # without a difference there is none
            outcome["moved"] = [
                mean_between(ends, "moved", *between) for between in zip(steps, steps[1:])
            ]
    return outcome

def mean_between(lines: list[dict], name: str, after: int, until: int) -> float | None:
    """The mean of a metric over some steps, to four digits."""
    values = [line[name] for line in lines if after < line["step"] <= until and name in line]
    return float(f"{fmean(values):.4g}") if values else None

@torch.no_grad()
def score(
    policy: torch.nn.Module, sampler: humanline.Sampler, rows: list[dict]
) -> tuple[list[float], list[bool]]:
    """For each row, whose prompt has one right answer: its probability, which is pass@1 without the noise of samples;
    and whether each of its tokens is the likeliest."""
    prompts, answers = encode(sampler, rows), [
        row["answer"] + sampler.tokenizer.eos_token for row in rows
    ]
    wholes = [
        (prompt, ids) for prompt, ids in zip(prompts, sampler.tokenizer(answers)["input_ids"])
    ]
    ids = pad_sequence([torch.tensor(prompt + answer) for prompt, answer in wholes], True)
    labels = pad_sequence(
        [torch.tensor([-100] * len(prompt) + answer) for prompt, answer in wholes], True, -100
    )[:, 1:]
    right, is_greedy = [], []
    for some_ids, some_labels in zip(ids.split(100), labels.split(100)):
        logits = policy(some_ids).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.mT, some_labels, reduction="none")
        right += (-losses.double().sum(1)).exp().tolist()
        is_greedy += ((logits.argmax(-1) == some_labels) | (some_labels == -100)).all(1).tolist()
    return right, is_greedy

@torch.no_grad()
def kl_to(base: torch.nn.Module, trainer: humanline.Run, rows: list[dict]) -> float:
    """KL(policy || base) in nats a completion: the mean of log π - log π_base over a sample for each row."""
    prompts, config = encode(trainer.sampler, rows), trainer.config
    drawn = humanline.sample(trainer.policy, prompts, trainer.sampler.stop_ids, config, seed=0)
    sequences = [Sequence(prompt, ids) for prompt, (ids, _) in zip(prompts, drawn)]
    of_base = humanline.sequence_logps(base, sequences, config)
    return fmean(sum(logps) - float(theirs.sum()) for (_, logps), theirs in zip(drawn, of_base))

def encode(sampler: humanline.Sampler, rows: list[dict]) -> list[list[int]]:
    dialogues = [humanline.Row("", [dict(role="user", content=row["prompt"])], row) for row in rows]
    return [ids for [ids] in humanline.encode_dialogues(sampler.tokenizer, dialogues)]

# ---------- All of them -------------------------------------------------------------------------------------

@contextlib.contextmanager
def quietly() -> Iterator[io.StringIO]:
    """What is printed in a `with` goes into the text that is given."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield said

def base_accuracy(task: str, seed: int, home: Path) -> float:
    """pass@1 of a base, which is made if it is not there."""
    folder = home / f"{task}-{seed}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=home) as unfinished, quietly():
            bases.make(Path(unfinished, "base"), task, seed)
            Path(unfinished, "base").rename(folder)
    config = humanline.Config(model=str(folder / "model"), compile=False)
    policy, tokenizer = humanline.load_policy(config, torch.device("cpu"))
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    return fmean(score(policy, humanline.Sampler(policy, tokenizer, config), rows)[0])

def learned_bases(pool, task: Task, first: int, count: int, home: Path) -> list[int]:
    """The first `count` seeds from `first` on whose base learned its task."""
    found: list[int] = []
    while len(found) < count:
        seeds = range(first, first + count - len(found))
        accuracies = pool.map(functools.partial(base_accuracy, task.name, home=home), seeds)
        found += [seed for seed, accuracy in zip(seeds, accuracies) if accuracy >= task.learned]
        first = seeds[-1] + 1
    return found

def start_worker() -> None:
    """One thread; the worker ends with the script, even if that is killed; and the rows of a base are encoded once for
    all runs of a worker, a third of the time of a short run."""
    if script := multiprocessing.parent_process():
        threading.Thread(target=lambda: (script.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    encode_dialogues, encoded = humanline.encode_dialogues, {}

    def encode_once(tokenizer, rows: list[humanline.Row]) -> list[list[list[int]]]:
        key = tuple((str(row.prompt), *row.completions) for row in rows)
        if key not in encoded:
            if len(encoded) > 8:
                encoded.clear()
            encoded[key] = encode_dialogues(tokenizer, rows)
        return encoded[key]

    humanline.encode_dialogues = encode_once

def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument(
        "--bases", type=Path, default=Path("evals/bases"), help="a folder for the tiny models"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--dry", action="store_true", help="only count the runs that are missing, once their bases are made"
    )
    flags = parser.parse_args()
    flags.bases.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(flags.jobs, context, start_worker) as pool:
        for task in map(TASKS.get, flags.tasks):
            path = flags.results / f"tuned-{task.name}.jsonl"
            known = read_results(path)
            seeds = (
                learned_bases(pool, task, 101, TUNING_BASES, flags.bases),
                learned_bases(pool, task, 1, TEST_BASES, flags.bases),
            )
            while missing := plan(task, known, seeds):
                print(
                    f"{task.name}: {len(known)} runs are stored, {len(missing)} come next",
                    flush=True,
                )
                if flags.dry:
                    break
                asked = [
                    pool.submit(train, run, flags.bases)
                    for run in sorted(missing, key=lambda run: run.seed)
                ]
                for done in concurrent.futures.as_completed(asked):
                    with path.open("a") as file:
                        file.write(json.dumps(done.result()) + "\n")
                known = read_results(path)

if __name__ == "__main__":
    main()
