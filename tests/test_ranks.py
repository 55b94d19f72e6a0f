"""Several ranks: real processes started by torchrun, compared with a single process."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, metrics
from safetensors.torch import load_file

import humanline

# Starts of torch cost more than the runs themselves, so one torchrun does many.
DRIVER = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
import torch, humanline
torch.set_num_threads(1)
for flags in json.load(open(sys.argv[1])):
    humanline.train(humanline.parse_config(flags))
torch.distributed.destroy_process_group()
"""
# Of a sharded model torch keeps the group's threads; one that outlives the interpreter can abort it.
END = """
import os
sys.stdout.flush()
os._exit(globals().get("status", 0))
"""
DRAWN = "--sample-every 4 --sample-tokens 128"
SYNCED = "--sync-k 3"
SOURCES = {"offline": SYNCED, "drawn": f"{SYNCED} {DRAWN}", "baseline": f"--no-humanline {DRAWN}",
           "better": f"{SYNCED} --positive-only", "kl": f"--no-humanline {DRAWN} --kl-beta 0.1 --temperature 0.8"}
CASES = list(itertools.product(("grpo", "dpo", "kto"), ("offline", "drawn"), ("ddp", "fsdp")))
CASES += [("grpo", "baseline", "ddp"), ("grpo", "baseline", "fsdp"), ("grpo", "better", "ddp"),
          ("kto", "better", "fsdp"), ("grpo", "kl", "ddp"), ("grpo", "kl", "fsdp")]


def flags_of(tiny, data_files, varied, loss: str, source: str, more: str = "") -> list[str]:
    # With this seed no token lies so near the clip's end that rounding decides whether it passes a gradient.
    batch_size = 12 if (loss, source) == ("kto", "drawn") else 7  # of whole groups
    return shlex.split(f"--model {tiny} --data {data_files['groups']} --loss {loss} --steps 10 "
                       f"--batch-size {batch_size} --lr 1e-3 --max-new-tokens 4 --seed 1 --group-size 4 "
                       f"--microbatch-tokens 200 --reward {varied} {SOURCES[source]} {more}")


def torchrun(*args: Path | str) -> subprocess.Popen:
    """Run torchrun ARGS with two ranks of one thread each."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
            *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def folders(tiny, data_files, varied, tmp_path_factory):
    """The run folder of each case, trained on two ranks."""
    home = tmp_path_factory.mktemp("ranks")
    folders = {case: home / "-".join(case) for case in CASES}
    more = {"ddp": "", "fsdp": "--shard"}
    runs = [[*flags_of(tiny, data_files, varied, loss, source, more[how]), "--out", str(folder)]
            for (loss, source, how), folder in folders.items()]
    (home / "driver.py").write_text(DRIVER + END)
    (home / "runs.json").write_text(json.dumps(runs))
    process = torchrun(home / "driver.py", home / "runs.json")
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error[-3000:]
    return folders


def agree(expected: Path, folder: Path, tolerance: float = 1e-5) -> None:
    """Losses and weights equal, relative to their size (a GRPO loss passes through zero, so 0.1 is the least
    size)."""
    for a, b in zip(metrics(expected), metrics(folder), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=tolerance, abs=0.1 * tolerance), a["step"]
        assert a["tokens"] == b["tokens"] and a["reward"] == pytest.approx(b["reward"])
    if (expected / "rollouts.jsonl").exists():
        lines = [map(json.loads, (run / "rollouts.jsonl").read_text().splitlines())
                 for run in (expected, folder)]
        first, second = ([(line["step"], line["row"], line["tokens"]) for line in of_run] for of_run in lines)
        assert first == second
    first, second = (load_file(run / "final" / "model.safetensors") for run in (expected, folder))
    assert first.keys() == second.keys()
    for name in first:
        assert (first[name] - second[name]).norm() <= tolerance * first[name].norm(), name


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_two_ranks_train_to_the_weights_of_one_process(tiny, data_files, varied, folders, run, case):
    loss, source, _ = case
    alone = run("", data="groups", flags=flags_of(tiny, data_files, varied, loss, source))
    agree(alone, folders[case])


def test_a_rank_without_a_pair_neither_hangs_nor_biases_the_gradient(tiny, data_files, varied, tmp_path, run):
    small = "--batch-size 1 --steps 4"
    flags = [flags_of(tiny, data_files, varied, "dpo", "offline", f"{small} {how}")
             for how in ("", "--shard")]
    runs = [[*run_flags, "--out", str(tmp_path / str(i))] for i, run_flags in enumerate(flags)]
    joined = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"  # by the calling program
    (tmp_path / "driver.py").write_text(joined + DRIVER + END)
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    process = torchrun(tmp_path / "driver.py", tmp_path / "runs.json")
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error[-3000:]
    alone = run("", flags=flags[0])
    agree(alone, tmp_path / "0")
    agree(alone, tmp_path / "1")
    assert "hard" not in error


def test_a_stopped_run_of_two_ranks_resumes_on_one(tiny, data_files, varied, tmp_path, run):
    flags = flags_of(tiny, data_files, varied, "dpo", "offline")
    whole = run("", flags=flags)
    out = tmp_path / "out"
    process = torchrun(ROOT / "humanline.py", *flags, "--out", out)
    wait_for(out / "metrics.jsonl", process)
    process.send_signal(signal.SIGTERM)
    output, error = process.communicate(timeout=60)
    assert list((out / "checkpoint").glob("step-*")), error[-2000:]
    assert "continue with: torchrun --nproc_per_node 2 " in output
    humanline.main([*flags, "--out", str(out), "--resume", "latest"])
    assert not list(out.glob("metrics-*.jsonl"))  # as a run that starts afresh would leave
    agree(whole, out)


@pytest.mark.parametrize("case, more", [
    pytest.param(("kto", "offline", "ddp"), "", marks=pytest.mark.slow), (("grpo", "drawn", "fsdp"), "--shard")])
def test_torchrun_restarts_a_killed_rank_and_the_run_finishes_bit_for_bit(
        tiny, data_files, varied, folders, tmp_path, monkeypatch, case, more):
    loss, source, _ = case
    flags = flags_of(tiny, data_files, varied, loss, source, f"--save-every 1 {more}")
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
    agree(folders[case], out, tolerance=0)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


GATHERS = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
import torch, humanline
from torch.utils._python_dispatch import TorchDispatchMode

class Gathers(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "allgather_base" in str(function)
        return function(*args, **(kwargs or {{}}))

torch.set_num_threads(1)
counts = []
for longest in (2, 6):
    flags = ["--shard", "--sample-every", "1", "--max-new-tokens", str(longest)]
    config = humanline.parse_config([*sys.argv[1:], *flags])
    policy, tokenizer = humanline.load_policy(config, humanline.join_ranks())
    config.shares_prompts = True
    sampler = humanline.Sampler(policy, tokenizer, config)
    rows = humanline.read_rows(config.data[0], config, "--data")
    groups = humanline.encode_rows(rows, sampler, online=True)[:4]
    with Gathers() as gathers:
        sampler.draw_rollouts(groups, rows, 2, 1)
    is_sharded = all(isinstance(p, torch.distributed.tensor.DTensor) for p in policy.parameters())
    counts.append([gathers.count, is_sharded])
if humanline.RANK == 0:
    print("counts", json.dumps(counts))
torch.distributed.destroy_process_group()
"""


def test_sharded_weights_are_gathered_once_per_drawing_and_not_for_each_token(
        tiny, data_files, varied, tmp_path):
    (tmp_path / "gathers.py").write_text(GATHERS + END)
    process = torchrun(tmp_path / "gathers.py", "--model", tiny, "--data", data_files["groups"], "--reward",
                       varied)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (short, first), (long, second) = json.loads(re.search("counts (.*)", output)[1])
    assert first and second and short == long > 0  # the weights lie in parts again
