"""Train one test seed of every stored form again, and compare where it ends with the stored seeds.

  python tests/claims/again.py two-digits five-sorted six-digits      # some two hours of two cores

A base that is not in --bases is made first. On the CPU that made the stored ones it is the same model, and each run
should end as it is stored; elsewhere it is another model, which should end within the 95% prediction interval of the
stored seeds (Student's t). A run that does neither is marked: on another model, one in twenty is so by chance.
"""

import argparse
import concurrent.futures
import math
import multiprocessing
import os
from pathlib import Path

import experiments
from estimates import estimate, show, show_settings
from reproduce import Form, Tuned, at_start, last

def judge(form: Form, seed: int, outcome: dict) -> tuple[str, bool]:
    """What is printed of a form that was trained again from this seed, and whether it ends where it should."""
    stored = form.runs[seed]
    mean, half = estimate(map(last, form.runs.values()))
    half *= math.sqrt(len(form.runs) + 1)  # from the interval of the mean to that of another seed
    if at_start(outcome) == at_start(stored):  # the same base
        ends_right = outcome["test"] == stored["test"]
    else:
        ends_right = abs(last(outcome) - mean) <= half
    found, asked = (f"{last(run):.3f} from {at_start(run):.3f}" for run in (outcome, stored))
    line = f"{found}; stored: {asked}, another seed {show([mean, half])}"
    return line + ("" if ends_right else "  <-- not as stored"), ends_right

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("tasks", nargs="+", choices=experiments.TASKS)
    add("--seed", type=int, default=1)
    add("--bases", type=Path, default=Path("evals/bases"), help="a folder for the tiny models")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    flags = parser.parse_args()
    flags.bases.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(flags.jobs, context, experiments.start_worker) as pool:
        for task in flags.tasks:
            experiments.base_accuracy(task, flags.seed, flags.bases)
            asked = {}
            for (loss, name), form in Tuned(task).forms.items():
                run = experiments.Run(task, loss, name, form.lr, form.k, flags.seed)
                asked[pool.submit(experiments.train, run, flags.bases)] = run, form
            right = 0
            for done in concurrent.futures.as_completed(asked):
                run, form = asked[done]
                line, ends_right = judge(form, flags.seed, done.result())
                right += ends_right
                print(f"{run.loss} {run.form}, {show_settings(run.lr, run.k)}: {line}", flush=True)
            print(f"{task}: {right} of {len(asked)} forms end as they should", flush=True)

if __name__ == "__main__":
    main()
