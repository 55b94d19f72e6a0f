"""Kill an online run at random times, resume it, and compare it with an uninterrupted run.

  python tests/kills.py 20                                # the demo
  python tests/kills.py 5 --real FOLDER                   # a real model (smollm2.py creates one)
  python tests/kills.py 20 --more="--lora 4 --sync-k 3"   # with additional flags

Each kill is a SIGKILL at a random time within the duration of the whole run: while loading, sampling,
rewarding, training, saving or exiting. The final weights, rollouts.jsonl, eval_rollouts.jsonl and
metrics.jsonl (except for times) must be equal, bit for bit. The exit status is 1 if anything differs.
"""

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = "--steps 24 --sample-every 4 --save-every 3 --eval-every 8 --eval-prompts 40 --batch-size 8 --lr 1e-4"
REAL = ("--config configs/smollm2-135m-grpo-online.toml --reward configs/rewards.py:ends_with_question "
        "--steps 4 --sample-every 2 --save-every 1 --batch-size 1 --max-new-tokens 12 --eval-prompts 4 "
        "--eval-samples 1")


def contents(folder: Path) -> dict[str, object]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"weights": [file.read_bytes() for file in sorted((folder / "final").glob("*.safetensors"))],
            "metrics": [{key: value for key, value in line.items()
                         if "second" not in key and key != "memory_mib"} for line in lines],
            "rollouts": (folder / "rollouts.jsonl").read_text(),
            "eval_rollouts": (folder / "eval_rollouts.jsonl").read_text()}


def finish(run: subprocess.Popen) -> None:
    error = run.communicate()[1]
    if run.returncode:
        sys.exit(f"a run failed:\n{error}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int)
    parser.add_argument("--real", help="folder of a real model")
    parser.add_argument("--more", default="", help="additional flags of humanline.py")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    chance = random.Random(flags.seed)
    settings = f"{f'{REAL} --model {flags.real}' if flags.real else TINY} {flags.more}"

    def start(out: Path) -> subprocess.Popen:
        command = [sys.executable, "humanline.py", *settings.split(), "--out", str(out), "--resume", "latest"]
        return subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        started = time.perf_counter()
        finish(start(whole))
        seconds, expected = time.perf_counter() - started, contents(whole)
        print(f"an uninterrupted run takes {seconds:.0f} s", flush=True)
        different = []
        for number in range(flags.kills):
            out, is_whole = Path(folder, f"killed-{number}"), True
            while is_whole:  # until a kill came before the run was over
                shutil.rmtree(out, ignore_errors=True)
                run, moment = start(out), chance.uniform(0, 1.1 * seconds)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.communicate(timeout=moment)
                run.kill()
                run.communicate()
                is_whole = run.returncode == 0
            finish(start(out))
            actual = contents(out)
            differs = [name for name in expected if actual[name] != expected[name]]
            print(f"{number + 1}: killed after {moment:.1f} s, "
                  f"{'different ' + ', '.join(differs) if differs else 'equal'}", flush=True)
            different += differs
            shutil.rmtree(out)
    print(f"{flags.kills} kills: {'some runs differ' if different else 'all runs are equal, bit for bit'}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
