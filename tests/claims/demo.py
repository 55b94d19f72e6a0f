"""What the demo shows, and how its settings were chosen.

  python tests/claims/demo.py          # run the commands that are not in results/demo.jsonl, and draw demo.png
  python tests/claims/demo.py --tune   # the runs that chose the settings, in results/demo-tuning.jsonl

The rule for the settings in configs/demo, fixed before any of these runs. The task and its 200 steps are those of
five-sorted.md, and so are the learning rates of plain, online and --positive-only (with GRPO and KTO the highest that
was tried both with k 8 and with k 24). The paper's form has one k for all three losses, 12, which the paper recommends
for mathematics, unless 24 ends better for all three; and for each loss the learning rate that ends best with this k,
by the mean pass@1 of the tuning bases 101 and 102 on the validation half of the held-out problems after the last step.
"""

import argparse
import itertools
import json
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import experiments

RESULTS = HERE / "results" / "demo.jsonl"
TUNING = HERE / "results" / "demo-tuning.jsonl"
TYPED = [  # after `python humanline.py`
    "",
    "--loss dpo",
    "--loss kto",
    "--loss grpo --sync-k 12",
    "--no-humanline",
    "--no-humanline --sample-every 1",
    "--positive-only",
]
LINES = {  # of the picture, each with its command, its colour, and by how many points its name is moved up
    "plain, online": ("--no-humanline --sample-every 1", "#7f7f7f", 7),
    "humanline, offline": ("", "#d62728", -9),
    "plain, offline": ("--no-humanline", "#1f77b4", 0),
}
SEEDS = 3
TUNING_BASES = 101, 102
# For DPO one rate is clearly best in five-sorted.md, with k 8 and with k 24.
RATES = dict(grpo=(1e-4, 2e-4), dpo=(5e-5,), kto=(2.5e-5, 5e-5))
KS = 12, 24

def read(path: Path = RESULTS) -> dict[str, dict]:
    """The stored runs, by the flags that were typed. Each has its `command`, the `commit`, the held-out mean reward of
    samples and of greedy decoding before and after training (`before`, `after`, `greedy_before`, `greedy_after`), the
    `steps` of the measurements and their `rewards`, `cpu_seconds` of the whole process, and what it `printed` last."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {json.loads(line)["flags"]: json.loads(line) for line in lines}

def with_seed(flags: str, seed: int) -> str:
    return f"{flags} --seed {seed}".strip() if seed else flags

def run(flags: str) -> dict:
    """Run a command as typed, in an empty folder."""
    command = [sys.executable, str(ROOT / "humanline.py"), *shlex.split(flags)]
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        [out] = Path(folder, "runs").iterdir()
        lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    first, measured = lines[0], [line for line in lines if "accuracy" in line]
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True)
    return dict(
        flags=flags,
        command=f"python humanline.py {flags}".strip(),
        commit=commit.stdout.strip(),
        before=first["accuracy_before"],
        after=measured[-1]["accuracy"],
        greedy_before=first["greedy_before"],
        greedy_after=measured[-1]["greedy"],
        steps=[0, *(line["step"] for line in measured)],
        rewards=[first["accuracy_before"], *(line["accuracy"] for line in measured)],
        cpu_seconds=round(seconds, 1),
        printed=done.stdout[re.search("^prompt|^mean reward", done.stdout, re.MULTILINE).start() :].splitlines(),
    )

def draw(path: Path) -> None:
    """Mean held-out reward against steps: a thin line for each seed, and a thick one for their mean with its name."""
    from matplotlib import pyplot

    known = read()
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for name, (flags, colour, up) in LINES.items():
        runs = [known[with_seed(flags, seed)] for seed in range(SEEDS)]
        steps = runs[0]["steps"]
        for run in runs:
            axes.plot(steps, run["rewards"], color=colour, linewidth=0.8, alpha=0.6)
        means = [fmean(rewards) for rewards in zip(*(run["rewards"] for run in runs))]
        axes.plot(steps, means, color=colour, linewidth=3)
        axes.annotate(name, (steps[-1], means[-1]), (10, up), textcoords="offset points", color=colour, va="center",
                      fontsize=14, annotation_clip=False)
    axes.set_xlim(0, steps[-1])
    axes.set_xlabel("optimizer steps", fontsize=12)
    axes.set_title("mean reward on held-out prompts", fontsize=12, loc="left")
    axes.tick_params(labelsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)

def tune(bases: Path) -> None:
    experiments.start_worker()
    for loss, rates in RATES.items():
        for seed, k, lr in itertools.product(TUNING_BASES, KS, rates):
            asked = experiments.Run("five-sorted", loss, "humanline", lr, k, seed)
            if asked not in experiments.read_results(TUNING):
                experiments.base_accuracy("five-sorted", seed, bases)  # makes the base if it is not there
                append(TUNING, experiments.train(asked, bases))

def best(loss: str, k: int) -> tuple[float, float]:
    """The best mean pass@1 that a loss ended with on the tuning bases with this k, and its learning rate."""
    known = experiments.read_results(TUNING)
    ends = []
    for lr in RATES[loss]:
        runs = [experiments.Run("five-sorted", loss, "humanline", lr, k, seed) for seed in TUNING_BASES]
        ends.append((fmean(known[run]["validation"][-1] for run in runs), lr))
    return max(ends)

def append(path: Path, line: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="run the tuning runs that are not stored")
    parser.add_argument("--bases", type=Path, default=Path("evals/bases"), help="a folder for the tuning bases")
    flags = parser.parse_args()
    if flags.tune:
        flags.bases.mkdir(parents=True, exist_ok=True)
        return tune(flags.bases)
    of_picture = [with_seed(typed, seed) for typed, _, _ in LINES.values() for seed in range(SEEDS)]
    for typed in dict.fromkeys(TYPED + of_picture):
        if typed not in read():
            append(RESULTS, run(typed))
    draw(HERE / "demo.png")

if __name__ == "__main__":
    main()
