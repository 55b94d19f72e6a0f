"""The forms on a real language model, SmolLM2-135M-Instruct: the list of runs, and what runs one of them.

  python tests/claims/real.py FOLDER                       # train what is missing; days of a core
  python tests/claims/real.py FOLDER --losses grpo --seeds 1

Each run is a line of results/real.jsonl and is not trained again; `reproduce.py` draws tables and the figure from
these lines. Learning rate and k are the best for both tasks together on seed 101, whose runs are stored as well.
"""

import argparse
import functools
import itertools
import json
import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import numpy as np
import torch

import experiments
import eval as evaluation
import humanline
from humanline import Config, Group

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[1] / "configs"
RESULTS = HERE / "results" / "real.jsonl"

# ---------- The list of runs --------------------------------------------------------------------------------

# A reward with degrees, and one that is 0 or 1. Rows: configs/{topics,checks}.jsonl, held out: ...-test.jsonl.
TASKS = {"sentiment": "topics", "checked": "checks"}
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

def rewards_of(*runs: Runs) -> tuple[list[np.ndarray], np.ndarray]:
    """Rewards at the end over the seeds that all have, and which of them are paired: of one device for each seed."""
    common = sorted(set.intersection(*map(set, runs)))
    devices = np.array([[some[seed]["device"] for some in runs] for seed in common])
    paired = (devices[:, :, None] == devices[:, None, :]).all(0)
    return [np.array([some[seed][f"reward {STEPS[-1]}"] for seed in common]) for some in runs], paired

def steps_of(runs: list[dict]) -> list[int]:
    """The steps at which all these runs were measured."""
    return [step for step in range(STEPS[-1] + 1) if all(f"kl {step}" in run for run in runs)]

def reward_at(run: dict, kl: float) -> float:
    """The reward of a run where it had come `kl` nats away from its base. Between measurements what it lacks to 1, the
    best reward, is taken to shrink by the same factor for each nat: a reward levels off. NaN where it was farther away
    at its first measurement, or never came so far."""
    points = [(run[f"kl {step}"], run[f"reward {step}"]) for step in steps_of([run])[1:]]
    for (near, low), (far, high) in itertools.pairwise(points):
        if near <= kl <= far:
            part = (kl - near) / max(far - near, 1e-9)
            return 1 - max(1 - low, 1e-3) ** (1 - part) * max(1 - high, 1e-3) ** part
    return math.nan

# ---------- One run -----------------------------------------------------------------------------------------

def machine_flags() -> list[str]:
    """On a GPU this model is so small that casts to bf16 cost more than they save."""
    return ["--dtype", "float32", "--no-compile"] if torch.cuda.is_available() else []

def task_flags(task: str, model: str) -> list[str]:
    return ["--model", model, "--reward", f"{CONFIGS / 'rewards.py'}:{task}", "--max-new-tokens", "32",
            "--eval-data", str(CONFIGS / f"{TASKS[task]}-test.jsonl"), *machine_flags()]

@functools.cache
def base_sampler(model: str) -> humanline.Sampler:
    """The model before any training, to take the KL to; one for all runs."""
    flags = ["--model", model, "--max-new-tokens", "32", *machine_flags()]
    return evaluation.load(model, humanline.parse_config(flags), rewarded=False)

def draw_base(task: str, seed: int, model: str, home: Path) -> Path:
    """The offline data: 8 completions of the base for each prompt, drawn once for each seed."""
    path = home / f"{task}-{seed}.jsonl"
    if path.exists():
        return path
    config = humanline.parse_config(
        [*task_flags(task, model), "--sample-every", "1", "--seed", str(seed)])
    sampler = evaluation.load(model, config)
    rows = evaluation.read_rows(str(CONFIGS / f"{TASKS[task]}.jsonl"), config)
    rollouts = evaluation.draw(sampler, evaluation.encode(sampler, rows, offline=False), rows, 8, seed)
    lines = []
    for number, group in enumerate(rollouts):
        texts = sampler.tokenizer.batch_decode(group.completions, skip_special_tokens=True)
        for text, reward, ids, logps in zip(texts, group.rewards, group.completions, group.logps):
            lines.append(dict(rows[group.row].fields, prompt_id=f"{number}", completion=text, reward=reward,
                              tokens=ids, logps=logps))
    evaluation.write(path.with_suffix(".new"), evaluation.json_lines(lines))
    path.with_suffix(".new").rename(path)
    return path

def train(flags: str, model: str, home: Path) -> dict:
    """What a run measured at STEPS, and what it wrote at the end."""
    task, *rest = flags.split()
    data = CONFIGS / f"{TASKS[task]}.jsonl"
    if "--sample-every" not in rest:
        data = draw_base(task, int(rest[-1]), model, home)
    often = STEPS[1] // 2 if "--sample-every 1 " in flags else STEPS[1]  # online soon is far from its base
    with tempfile.TemporaryDirectory() as folder, experiments.quietly() as said:
        out = Path(folder, "run")
        whole = [*rest, *task_flags(task, model), "--data", str(data), "--steps", str(STEPS[-1]),
                 "--eval-every", str(often), "--eval-prompts", "50", "--eval-samples", "4"]
        config = humanline.parse_config(whole)
        status = humanline.main([*whole, "--save-every", "0", "--out", str(out)])
        if status not in (0, 1):  # 1: it diverged
            raise RuntimeError(f"{flags}: {said.getvalue()[-500:]}")
        lines = humanline.read_lines(out / "metrics.jsonl")
        rollouts = humanline.read_lines(out / "eval_rollouts.jsonl")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    outcome = dict(flags=flags, device=device)
    for step in (0, *range(often, STEPS[-1] + 1, often)):
        drawn = sorted((line for line in rollouts if line["step"] == step), key=lambda line: line["reward"])
        if not drawn or step > len(lines):  # it diverged before
            break
        measured = describe_completions(drawn, model, config)
        measured["reward"] = np.mean([line["reward"] for line in drawn])
        measured["greedy"] = lines[step - 1]["greedy"] if step else lines[0]["greedy_before"]
        for name, metric in ("seconds", "step_seconds"), ("drawing", "sample_seconds"):
            measured[name] = sum(line[metric] for line in lines[:step])
        outcome |= {f"{name} {step}": round(float(value), 4) for name, value in measured.items()}
        places = dict(worst=0, low=len(drawn) // 4, median=len(drawn) // 2, high=3 * len(drawn) // 4, best=-1)
        outcome["samples"] = {
            name: dict(reward=round(drawn[place]["reward"], 3), completion=drawn[place]["completion"])
            for name, place in places.items()}
    return outcome

def describe_completions(drawn: list[dict], model: str, config: Config) -> dict[str, float]:
    """Of lines of an eval_rollouts.jsonl: `kl` to the base, nats per completion, the mean of log π - log π_base;
    `entropy`, nats per token; `length`, tokens; `distinct`, different pairs of neighbouring words over all."""
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

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a hub name")
    parser.add_argument("--losses", nargs="+", choices=FORMS_OF, default=list(FORMS_OF))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=Path, default=Path("evals/real-rows"), help="a folder for the data drawn")
    flags = parser.parse_args()
    flags.rows.mkdir(parents=True, exist_ok=True)
    for seed, loss, task in itertools.product(range(1, flags.seeds + 1), flags.losses, TASKS):
        for form in FORMS_OF[loss]:
            run = flags_of(task, loss, form, seed)
            if run in read_results():
                continue
            print(run, flush=True)
            line = json.dumps(train(run, flags.model, flags.rows), ensure_ascii=False)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

if __name__ == "__main__":
    main()
