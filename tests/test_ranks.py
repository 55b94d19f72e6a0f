"""Several ranks: real processes started by torchrun, compared with a single process."""

import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, agree, metrics, runs_slow, train_on_two_ranks
from safetensors.torch import load_file

import humanline

DRAWN = "--sample-every 4 --sample-tokens 128"
SYNCED = "--sync-k 3"
SOURCES = {"offline": SYNCED, "drawn": f"{SYNCED} {DRAWN}", "baseline": f"--no-humanline {DRAWN}",
           "better": f"{SYNCED} --positive-only",
           "kl": f"--no-humanline {DRAWN} --kl-beta 0.1 --temperature 0.8"}
# Each loss, each source and each way of training; the others with --slow.
CASES = [("grpo", "offline", "ddp"), ("grpo", "drawn", "fsdp"), ("dpo", "offline", "fsdp"),
         ("dpo", "drawn", "ddp"), ("kto", "offline", "ddp"), ("kto", "drawn", "fsdp"),
         ("grpo", "baseline", "ddp"), ("grpo", "kl", "fsdp"), ("kto", "better", "fsdp")]
MORE = [(loss, source, {"ddp": "fsdp", "fsdp": "ddp"}[how]) for loss, source, how in CASES[:-1]]
MORE += [("grpo", "better", "ddp")]
LONELY = "--batch-size 1 --steps 4"  # of two ranks one has nothing to do


@pytest.fixture(scope="module")
def flags_of(tiny, data_files, varied):
    def flags(loss: str, source: str, more: str = "") -> list[str]:
        # With this seed no token is so near the clip's end that rounding decides whether it passes a gradient.
        batch_size = 12 if (loss, source) == ("kto", "drawn") else 7  # of whole groups
        return shlex.split(f"--model {tiny} --data {data_files['groups']} --loss {loss} --steps 7 "
                           f"--batch-size {batch_size} --lr 1e-3 --max-new-tokens 4 --seed 1 --group-size 4 "
                           f"--microbatch-tokens 200 --reward {varied} {SOURCES[source]} {more}")

    return flags


@pytest.fixture(scope="module")
def alone(flags_of, tmp_path_factory):
    """alone(loss, source, more) is the folder of a run of this process."""
    @functools.cache
    def train(loss: str, source: str, more: str = "") -> Path:
        out = tmp_path_factory.mktemp("alone") / "run"
        humanline.train(humanline.parse_config([*flags_of(loss, source, more), "--out", str(out)]))
        return out

    return train


# Draws in a process of its own, as a function of the seed and of the weights, and notes who asked.
SAMPLER = """
import os, random, runpy

def draw(prompts, settings, count, seed, weights):
    from safetensors import safe_open
    with safe_open(os.path.join(weights, "model.safetensors"), "np") as tensors:
        first = round(float(tensors.get_tensor("model.norm.weight")[0]), 4)
    with open(NOTES, "a") as notes:
        notes.write(f"{os.getppid()} {seed}\\n")
    chance = random.Random(f"{seed} {first}")
    ids = lambda: [chance.randrange(8, 90) for _ in range(settings["max_new_tokens"])]
    return [[(ids(), [-1.0] * settings["max_new_tokens"]) for _ in range(count)] for _ in prompts]

def start(run):
    return runpy.run_path(EXTERNAL)["External"](run, f"{__file__}:draw")
"""
STOPPER = """
import os, signal
init = lambda **_: None
def log(line, step):
    if step == 6:
        os.kill(os.getpid(), signal.SIGTERM)
"""
GATHERS = """
from torch.utils._python_dispatch import TorchDispatchMode

class Gathers(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "allgather_base" in str(function)
        return function(*args, **(kwargs or {}))

counts = []
for longest in (2, 6):
    flags = ["--shard", "--sample-every", "1", "--max-new-tokens", str(longest)]
    config = humanline.parse_config([*FLAGS, *flags])
    policy, tokenizer = humanline.load_policy(config, humanline.join_ranks())
    policy.shares_prompts = True
    sampler = humanline.Sampler(policy, tokenizer, config)
    rows = humanline.read_rows(config.data[0], config, "--data")
    groups = humanline.encode_rows(rows, sampler, online=True)[:4]
    with Gathers() as gathers:
        sampler.draw_rollouts(groups, rows, 2, 1)
    is_sharded = all(isinstance(p, torch.distributed.tensor.DTensor) for p in policy.parameters())
    counts.append([gathers.count, is_sharded])
if humanline.RANK == 0:
    print("counts", json.dumps(counts))
"""
REFUSED = """
for first, second in PAIRS:
    try:
        humanline.train(humanline.parse_config(second if humanline.RANK else first))
    except humanline.UserError as error:
        if humanline.RANK == 0:
            print("refused:", error)
"""


@pytest.fixture(scope="module")
def ranks(request, tiny, data_files, varied, flags_of, tmp_path_factory):
    """What two ranks did in one torchrun. The first run joins them; the others find them joined, as by a
    program that calls `train`."""
    home = tmp_path_factory.mktemp("ranks")
    more = {"ddp": "", "fsdp": "--shard"}
    cases = CASES + MORE * runs_slow(request.config)
    flags = {case: flags_of(*case[:2], more[case[2]]) for case in cases}
    flags |= {f"lonely-{how}": flags_of("dpo", "offline", f"{LONELY} {more[how]}") for how in more}
    flags["stopped"] = flags_of("dpo", "offline", "--track stopper")
    flags["resumed"] = flags_of("grpo", "drawn", "--shard --track stopper")
    flags["external"] = flags_of("grpo", "baseline", f"--shard --sampler {home}/sampler.py:start --top-p 1e-9")
    folders = {case: home / (case if isinstance(case, str) else "-".join(case)) for case in flags}
    runs = [[*flags[case], "--out", str(folder)] for case, folder in folders.items()]
    runs.append([*flags_of("grpo", "drawn", "--shard"), "--out", str(folders["resumed"]), "--resume", "latest"])
    (home / "stopper.py").write_text(STOPPER)
    (home / "sampler.py").write_text(SAMPLER.replace("NOTES", repr(str(home / "notes")))
                                     .replace("EXTERNAL", repr(str(ROOT / "configs" / "external.py"))))
    flags = ["--model", tiny, "--data", data_files["groups"], "--reward", varied]
    one = [*flags_of("dpo", "offline"), "--out", str(home / "refused")]
    other = [word.replace(data_files["groups"], data_files["pairs"]) for word in one]
    pairs = [(one, [*one, "--beta", "0.2"]), (one, other)]
    after = GATHERS.replace("FLAGS", repr(flags)) + REFUSED.replace("PAIRS", repr(pairs))
    output, error = train_on_two_ranks(home, runs, after=after)
    return SimpleNamespace(home=home, folders=folders, output=output, error=error)


@pytest.mark.parametrize(
    "case", CASES + [pytest.param(case, marks=pytest.mark.slow) for case in MORE], ids="-".join)
def test_two_ranks_train_to_the_weights_of_one_process(ranks, alone, case):
    loss, source, _ = case
    agree(alone(loss, source), ranks.folders[case])


def test_a_rank_without_a_pair_neither_hangs_nor_biases_the_gradient(ranks, alone):
    for how in ("ddp", "fsdp"):
        agree(alone("dpo", "offline", LONELY), ranks.folders[f"lonely-{how}"])
    assert "hard" not in ranks.error


def test_a_stopped_run_of_two_ranks_resumes_on_one(ranks, alone, flags_of):
    out = ranks.folders["stopped"]
    assert not (out / "final").exists() and len(metrics(out)) == 6
    humanline.main([*flags_of("dpo", "offline"), "--out", str(out), "--resume", "latest"])
    assert not list(out.glob("metrics-*.jsonl"))  # as a run that starts afresh would leave
    agree(alone("dpo", "offline"), out)


def test_a_stopped_run_of_two_sharded_ranks_resumes_on_two_bit_for_bit(ranks):
    agree(ranks.folders["grpo", "drawn", "fsdp"], ranks.folders["resumed"], tolerance=0)
    assert ranks.output.count("stopped after step 6 of 7; continue with: torchrun --nproc_per_node 2 ") == 2


def test_two_sharded_ranks_train_on_the_completions_of_one_sampler(ranks, alone):
    spec = f"--sampler {ranks.home}/sampler.py:start --top-p 1e-9"
    asked = (ranks.home / "notes").read_text().splitlines()
    assert len({line.split()[0] for line in asked}) == 1  # rank
    agree(alone("grpo", "baseline", spec), ranks.folders["external"])
    again = (ranks.home / "notes").read_text().splitlines()[len(asked):]
    assert [line.split()[1] for line in again] == [line.split()[1] for line in asked]


def test_sharded_weights_are_gathered_once_per_drawing_and_not_for_each_token(ranks):
    (short, first), (long, second) = json.loads(re.search("counts (.*)", ranks.output)[1])
    assert first and second and short == long > 0  # the weights lie in parts again


def test_ranks_with_different_flags_or_rows_give_a_one_line_error(ranks):
    assert ranks.output.count("refused: the ranks have different flags or rows\n") == 2
    assert not (ranks.home / "refused").exists()


REPLAY = """
import json
from collections import defaultdict

def start(run):
    drawn = defaultdict(list)
    for line in map(json.loads, open(ROLLOUTS)):
        drawn[line["step"], line["row"]].append((line["tokens"], line["logps"]))
    return lambda prompts, count, step, greedy: sum((drawn[step, group.row] for group in prompts), [])
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    "--loss dpo --lr 5e-5", "--loss kto --lr 5e-5", "--loss grpo --lr 2e-4",
    "--loss grpo --lr 8e-4 --sample-every 1 --reward exact"])
def test_64_steps_of_the_demo_are_the_same_on_two_ranks_sharded_and_compiled(more, tmp_path):
    """All but the first run replay its rollouts: rounding would change the samples. Prints the differences."""
    demo, online = ROOT / "configs" / "demo", "--sample-every" in more
    flags = (f"--model {demo}/model --data {demo}/rows.jsonl --limit 1100 --steps 64 "
             f"--batch-size 16 --max-new-tokens 8 --save-every 0 --no-compile {more}").split()
    (tmp_path / "replay.py").write_text(REPLAY.replace("ROLLOUTS", repr(str(tmp_path / "one/rollouts.jsonl"))))
    replayed = flags + ["--sampler", f"{tmp_path}/replay.py:start"] * online
    first = tmp_path / "one"
    humanline.train(humanline.parse_config([*flags, "--out", str(first)]))
    train_on_two_ranks(tmp_path, [[*replayed, "--out", str(tmp_path / "two ranks")],
                                  [*replayed, "--shard", "--out", str(tmp_path / "sharded")]])
    humanline.train(humanline.parse_config([*replayed, "--compile", "--out", str(tmp_path / "compiled")]))
    before, after = load_file(demo / "model/model.safetensors"), load_file(first / "final/model.safetensors")
    norm = lambda tensors: torch.stack([tensor.norm() for tensor in tensors]).norm()
    moved = norm(after[name] - before[name] for name in after)
    for how in ("two ranks", "sharded", "compiled"):
        weights = load_file(tmp_path / how / "final/model.safetensors")
        apart = norm(after[name] - weights[name] for name in after) / moved
        losses, others = ([line["loss"] for line in metrics(run)] for run in (first, tmp_path / how))
        largest = max(abs(a - b) for a, b in zip(losses, others, strict=True))
        print(f"\n{more}, {how}: losses differ by at most {largest:.1e} of {max(map(abs, losses)):.1e}, "
              f"the weights by {apart:.1e} of their way")
        assert 0 < apart < 1e-3 and largest < 1e-4


# By torchrun's own process.

def torchrun(*args: Path | str) -> subprocess.Popen:
    """Run torchrun ARGS with two ranks of one thread each."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
            *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.slow
def test_torchrun_hands_a_signal_on_and_the_run_says_how_to_continue(alone, flags_of, tmp_path):
    flags, out = flags_of("dpo", "offline"), tmp_path / "out"
    process = torchrun(ROOT / "humanline.py", *flags, "--out", out)
    wait_for(out / "metrics.jsonl", process)
    process.send_signal(signal.SIGTERM)
    output, error = process.communicate(timeout=60)
    assert list((out / "checkpoint").glob("step-*")), error[-2000:]
    assert "continue with: torchrun --nproc_per_node 2 " in output
    humanline.main([*flags, "--out", str(out), "--resume", "latest"])
    agree(alone("dpo", "offline"), out)


@pytest.mark.slow
@pytest.mark.parametrize("loss, source, how, more", [
    ("kto", "offline", "ddp", ""), ("grpo", "drawn", "fsdp", "--shard")])
def test_torchrun_restarts_a_killed_rank_and_the_run_finishes_bit_for_bit(
        flags_of, ranks, tmp_path, monkeypatch, loss, source, how, more):
    flags = flags_of(loss, source, f"--save-every 1 {more}")
    out, killed = tmp_path / "out", tmp_path / "killed"
    (tmp_path / "killer.py").write_text(f"""
import os, pathlib, signal
init = lambda **_: None
def log(line, step):
    if step == 6 and not os.path.exists({str(killed)!r}):
        pathlib.Path({str(killed)!r}).touch()
        os.kill(os.getpid(), signal.SIGKILL)
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = torchrun("--max-restarts=2", ROOT / "humanline.py", *flags, "--out", out, "--resume", "latest",
                       "--track", "killer")
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0 and killed.exists(), error[-3000:]
    assert not list(out.glob("metrics-*.jsonl"))
    agree(ranks.folders[loss, source, how], out, tolerance=0)
