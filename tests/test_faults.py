"""Faults: kills, signals, damaged files, a full disk, too little memory, two runs in the same folder."""

import collections
import dataclasses
import datetime
import glob
import itertools
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import site
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, command, finished, metrics, same_weights, timeless

import humanline
from warm import Started, close_standard_output


def start(*flags: str, before: tuple = ()) -> Started:
    """Start humanline.py FLAGS in the background; `before`, a function and its arguments, is called first."""
    return Started(ROOT / "humanline.py", *flags, before=before)


def same_files(a: Path, b: Path) -> bool:
    names = "rollouts.jsonl", "eval_rollouts.jsonl"
    return (same_weights(a, b) and timeless(a) == timeless(b)
            and all((a / name).read_text() == (b / name).read_text() for name in names))


@pytest.mark.parametrize("kills", [4, pytest.param(int(os.environ.get("KILLS", 50)), marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_resumes_to_the_same_weights_and_files(
        tiny, data_files, varied, tmp_path, kills):
    """While loading, sampling, rewarding, training, evaluating, saving or exiting. Other flags are in
    KILLED_FLAGS, such as "--model FOLDER --lora 4 --steps 5"; with --slow, KILLS says how often."""
    flags = shlex.split(f"--model {tiny} --data {data_files['prompts']} --reward {varied} --steps 24 "
                        "--batch-size 2 --group-size 4 --max-new-tokens 4 --lr 1e-3 --sync-k 5 --save-every 3 "
                        f"--sample-every 4 --eval-data {data_files['prompts']} --eval-prompts 4 --eval-every 8 "
                        f"--resume latest {os.environ.get('KILLED_FLAGS', '')}")
    whole, killed, chance = tmp_path / "whole", tmp_path / "killed", random.Random(kills)
    landed = collections.Counter()
    command("--help")  # so that the first run is no longer than the others
    started = time.perf_counter()
    assert command(*flags, "--out", str(whole)).returncode == 0
    seconds = time.perf_counter() - started
    half_written = lambda: glob.glob(f"{killed}/checkpoint/.step-*/*")
    for number in range(kills):  # every other one while a second checkpoint is written, or soon after
        before, aimed = half_written(), number % 2
        process = start(*flags, "--out", str(killed))
        until = time.perf_counter() + (seconds if aimed else chance.uniform(0, seconds))
        while process.poll() is None and time.perf_counter() < until:
            if aimed and glob.glob(f"{killed}/checkpoint/step-*") and half_written() != before:
                time.sleep(0.03 * seconds * chance.random() ** 4)
                break
            time.sleep(0.001)
        process.kill()
        process.communicate()
        landed["all"] += 1
        landed["within a checkpoint"] += half_written() != before
        landed["after a checkpoint"] += any((killed / "checkpoint").glob("step-*"))
        if (killed / "final").exists():  # the kill came too late; begin again
            landed["too late"] += 1
            assert same_files(killed, whole)
            shutil.rmtree(killed)
    done = command(*flags, "--out", str(killed))
    assert done.returncode == 0, done.stderr
    assert same_files(killed, whole)
    print("kills:", dict(landed))


@pytest.mark.parametrize("phase, number", [
    ("sample", signal.SIGTERM), ("forward_backward", signal.SIGINT),
    ("save_checkpoint", signal.SIGTERM), ("measure", signal.SIGINT)])
def test_a_signal_stops_the_run_after_its_step_so_that_it_can_be_resumed(
        run, data_files, tmp_path, monkeypatch, phase, number):
    flags = ("--sample-every 2 --sync-k 3 --steps 6 --save-every 1 --eval-every 2 "
             f"--eval-data {data_files['prompts']}")
    whole, handler = run(flags), signal.getsignal(number)
    where = humanline.Run if phase == "measure" else humanline
    real, calls = getattr(where, phase), itertools.count(1)

    def signalled(*args, **kwargs):
        if next(calls) == 3:
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    out = str(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(where, phase, signalled)
        run(flags, out=out)
    assert signal.getsignal(number) == handler
    saved = sorted((tmp_path / "out" / "checkpoint").iterdir())[-1]
    assert json.loads((saved / "state.json").read_text())["step"] == len(metrics(tmp_path / "out")) < 6
    assert not (tmp_path / "out" / "final").exists()
    resumed = run(flags + " --resume latest", out=out)
    assert timeless(resumed) == timeless(whole) and same_weights(resumed, whole)


@pytest.mark.parametrize("flags, times", [
    ("--sample-every 1 --data PROMPTS", 2),
    ("--data GROUPS --eval-data PROMPTS", 1),  # before the first step
])
def test_ctrl_c_twice_or_before_the_first_step_ends_the_command_in_one_line(
        tiny, data_files, tmp_path, flags, times):
    slow = tmp_path / "slow.py"  # a reward that is still awaited when the signal comes
    slow.write_text("import time\ndef reward(prompts, completions, rows):\n    time.sleep(60)\n")
    flags = flags.replace("PROMPTS", data_files["prompts"]).replace("GROUPS", data_files["groups"])
    flags += (f" --model {tiny} --steps 9 --batch-size 4 --max-new-tokens 4 --reward {slow}:reward "
              "--reward-seconds 99")
    process = start(*flags.split(), "--out", str(tmp_path / "out"))
    while "\nsteps  " not in process.so_far()[0]:
        assert process.poll() is None
        time.sleep(0.01)
    try:
        for _ in range(times):
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in error
    assert error.splitlines()[-1] == "humanline.py: stopped at once; earlier checkpoints are kept"


@pytest.mark.parametrize("program", ["humanline.py", "eval.py"])
def test_ctrl_c_during_the_imports_prints_no_traceback(tmp_path, program):
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    done = subprocess.run([sys.executable, str(ROOT / program)],
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT and done.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_command_exits_with_the_status_of_its_signal_and_says_how_to_resume(
        tiny, data_files, tmp_path, monkeypatch, number):
    out, sent = tmp_path / "my run", tmp_path / "sent"
    (tmp_path / "waits.py").write_text(f"""
import pathlib, time
init = lambda **_: None
def log(line, step):
    while step == 2 and not pathlib.Path({str(sent)!r}).exists():
        time.sleep(0.01)
""")
    monkeypatch.syspath_prepend(tmp_path)
    flags = f"--model {tiny} --data {data_files['groups']} --steps 4 --batch-size 4 --track waits".split()
    process = start(*flags, "--out", str(out), before=(site.addsitedir, str(tmp_path)))
    while not ((out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    sent.touch()
    output, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in error
    assert f"{number.name}: stopping after this step" in error
    last_line = output.splitlines()[-1]
    assert last_line.startswith("stopped after step ") and "--resume latest" in last_line
    again = shlex.split(last_line.split(f"python {ROOT}/humanline.py ")[1])
    humanline.main(again)
    assert (out / "final").exists()


def test_nohup_keeps_a_run_from_stopping_when_its_terminal_closes(tiny, data_files, tmp_path):
    flags = (f"--model {tiny} --data {data_files['groups']} --steps 20 --batch-size 4 "
             f"--out {tmp_path / 'out'}").split()
    process = start(*flags, before=(signal.signal, signal.SIGHUP, signal.SIG_IGN))
    while not (tmp_path / "out" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0 and "SIGHUP" not in error


def test_a_run_whose_data_have_images_can_be_resumed(run, data_files, tmp_path, monkeypatch):
    read_file = humanline.read_file
    with_image = lambda *file: (row | dict(image=object()) for row in read_file(*file))
    monkeypatch.setattr(humanline, "read_file", with_image)
    whole = run("--save-every 3")
    resumed = run(f"--resume {whole}/checkpoint/step-00000003")
    assert [line["step"] for line in metrics(resumed)] == [4, 5, 6] and same_weights(resumed, whole)


def test_a_date_in_the_data_that_changed_is_noticed_on_resume(run, monkeypatch):
    read_file, days = humanline.read_file, itertools.count(1)
    monkeypatch.setattr(humanline, "read_file", lambda *file: (
        row | dict(day=datetime.date(2026, 11, day)) for day in [next(days)] for row in read_file(*file)))
    whole = run("--save-every 3")
    with pytest.raises(humanline.UserError, match="--data changed since"):
        humanline.train(humanline.parse_config(["--config", f"{whole}/config.toml", "--out", f"{whole}-resumed",
                                                "--resume", f"{whole}/checkpoint/step-00000003"]))


def damage(folder: Path, chance: random.Random) -> str:
    """Damage a file of a folder, and return how."""
    file = chance.choice(sorted(folder.iterdir()))
    content, kind = file.read_bytes(), chance.choice(["cut", "flipped", "deleted", "renamed"])
    at = chance.randrange(len(content))
    if kind == "cut":
        file.write_bytes(content[:at])
    elif kind == "flipped":
        flipped = bytes([content[at] ^ 1 << chance.randrange(8)])
        file.write_bytes(content[:at] + flipped + content[at + 1 :])
    elif kind == "deleted":
        file.unlink()
    else:
        file.rename(file.with_suffix(".other"))
    return f"{file.name} {kind} at {at}"


@pytest.mark.parametrize("trials", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_a_run_goes_on_from_the_newest_undamaged_checkpoint_or_starts_afresh_and_ends_the_same(
        run, tmp_path, capsys, trials):
    flags, chance = "--sample-every 3 --sync-k 2 --steps 3 --save-every 1 --keep 3", random.Random(trials)
    whole, out = run(flags), tmp_path / "damaged"
    for trial in range(trials):
        shutil.copytree(whole, out)
        shutil.rmtree(out / "final")
        newest_first = sorted((out / "checkpoint").iterdir(), reverse=True)
        done = {path: damage(path, chance) for path in newest_first[: trial % 3 + 1]}
        capsys.readouterr()
        run(f"{flags} --resume latest", out=str(out))
        error = capsys.readouterr().err
        assert [path for path in newest_first if re.search(f"{path}: .*; trying the previous one", error)
                ] == [*done], done
        assert same_weights(out, whole) and timeless(out) == timeless(whole), done
        shutil.rmtree(out)


def test_a_run_without_an_undamaged_checkpoint_starts_afresh_unless_one_was_named(run, capsys):
    folder = run("--sample-every 3 --sync-k 2 --steps 3 --save-every 1 --keep 3") / "checkpoint"
    newest, settings = folder / "step-00000003", str(folder.parent / "config.toml")
    config = humanline.parse_config(["--config", settings, "--out", str(folder.parent), "--resume", "latest"])
    assert humanline.find_checkpoint(config, folder.parent) == newest
    for path in folder.iterdir():
        (path / "tensors.safetensors").write_bytes(b"")
    assert humanline.find_checkpoint(config, folder.parent) is None
    with pytest.raises(humanline.UserError, match=f"has another --data; add --config {settings}, or"):
        humanline.find_checkpoint(dataclasses.replace(config, data=()), folder.parent)
    with pytest.raises(humanline.UserError, match="damaged: tensors.safetensors"):
        humanline.find_checkpoint(humanline.Config(resume=str(newest)), folder.parent)


def test_no_pickle_is_ever_read_from_disk(run, monkeypatch):
    import pickle

    flags = "--steps 3 --save-every 1 --sample-every 2"
    whole = run(flags)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *args, **kwargs: pytest.fail("a pickle"))
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load"))
    resumed = run(f"{flags} --resume {whole}/checkpoint/step-00000002")
    assert [line["step"] for line in metrics(resumed)] == [3]


def test_a_full_disk_costs_the_checkpoint_but_not_the_run(tiny, data_files, tmp_path):
    out = tmp_path / "out"
    flags = (f"--model {tiny} --data {data_files['groups']} --steps 4 --batch-size 4 --save-every 1 "
             f"--out {out} --resume latest")
    limited = start(*flags.split(), before=(resource.setrlimit, resource.RLIMIT_FSIZE, (40 << 10, 40 << 10)))
    _, error = limited.communicate()
    assert limited.returncode == 1 and len(metrics(out)) == 4, error
    warnings = [line for line in error.splitlines() if "warning: could not write" in line]
    assert len(warnings) == 4 and error.splitlines()[-1].startswith("humanline.py: stopped: ")
    assert "Traceback" not in error and not (out / "final").exists()
    assert not list((out / "checkpoint").glob("step-*"))
    humanline.main(flags.split())
    assert (out / "final").exists()


def test_a_clock_that_jumps_changes_no_measured_time(run, monkeypatch):
    monkeypatch.setattr(time, "time", itertools.count(1e9, -1e6).__next__)
    assert all(line["step_seconds"] >= 0 for line in metrics(run("")))


@pytest.mark.parametrize("program", ["humanline.py", "eval.py"])
def test_a_closed_standard_output_ends_no_program(program):
    done = finished(ROOT / program, "--no-such-flag", before=(close_standard_output,))
    assert done.returncode == 2 and "Traceback" not in done.stderr and "no-such-flag" in done.stderr
