"""Bad luck and bad input that used to be ignored silently or end in a traceback."""

import json
import os
import re
import shutil
import sys

import pytest
import torch
from conftest import complaint, metrics, short_run, write_jsonl

import humanline
from humanline import Config, Group


def train(flags: list[str]) -> humanline.Run:
    return humanline.train(humanline.parse_config(flags))


def warnings_of(capsys, words: str = "warning") -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if re.search(words, line)]


# The final folder, and what a killed run left.

def test_unfinished_folders_of_a_killed_run_are_removed_on_resume(run, tmp_path):
    out = tmp_path / "out"
    run("--steps 4 --save-every 2", out=str(out))
    shutil.rmtree(out / "final")
    shutil.rmtree(out / "checkpoint" / "step-00000004")
    (out / ".final").mkdir()
    (out / "checkpoint" / ".step-00000004").mkdir()
    run("--steps 4 --save-every 2 --resume latest", out=str(out))
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]
    assert {path.stat().st_mode & 0o777 for path in (out / "final").iterdir()} == {0o644}


# Models and data.

@pytest.mark.parametrize("template, expected", [
    ("{% for message in %}", "its chat template fails"),
    ("{{ messages.__class__.__base__ }}", "its chat template fails: access to attribute '__class__'"),
    ("{% if messages|length == 1 %}{{ raise_exception('not today') }}{% endif %}", "not today")])
def test_a_chat_template_that_fails_gives_a_one_line_error(tiny, data_files, tmp_path, capsys, template,
                                                           expected):
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    line = complaint(["--model", str(tmp_path / "model"), "--data", data_files["groups"]], tmp_path, capsys)
    assert expected in line


def test_json_values_stay_as_they_are_written(tmp_path):
    answers = [5, "007", "2024-01-08", "1e5", "NA"]
    (tmp_path / "rows.json").write_text(json.dumps([dict(prompt="x", answer=answer) for answer in answers]))
    rows = humanline.read_rows(str(tmp_path / "rows.json"), Config(), "--data")
    assert [row.fields["answer"] for row in rows] == answers


def test_a_group_without_a_difference_has_no_advantage_even_if_its_mean_is_rounded():
    for count in (3, 8):  # the mean of three times 0.1 is above 0.1
        group = Group(0, [1], [[2]] * count, [0.1] * count)
        [[sequences]] = humanline.prepare_groups([group], Config())
        assert {sequence.advantage for sequence in sequences} == {0.0}
        assert all(humanline.is_idle(sequence, Config()) for sequence in sequences)


# Warnings: of what costs a night.

PAIR = dict(chosen="a", rejected="b")


@pytest.mark.parametrize("loss, rows, flags, words", [
    ("dpo", PAIR, "--dtype bfloat16 --lr 1e-5", "at --lr 1e-05 most updates are too small for bf16 weights"),
    ("dpo", PAIR, "--dtype bfloat16", ""),
])
def test_a_setting_that_is_hardly_intended_gives_one_warning(tiny, tmp_path, capsys, loss, rows, flags,
                                                             words):
    path = write_jsonl(tmp_path / "rows.jsonl", [dict(rows, prompt=f"{i}") for i in range(4)])
    flags = f"--out {tmp_path}/out --loss {loss} --batch-size 1 --steps 1 --sync-k 0 {flags}"
    train(short_run(tiny, path, flags))
    warned = warnings_of(capsys)
    assert len(warned) == (words != "") and re.search(words, "".join(warned)), warned


# Rewards.

def test_a_reward_that_fails_on_every_sample_stops_the_run_at_once(tiny, data_files, tmp_path, capsys):
    (tmp_path / "wrong.py").write_text(
        "def wrong(prompts, completions, rows):\n    return lenght(completions)\n")
    flags = f"--sample-every 1 --reward {tmp_path}/wrong.py:wrong --out {tmp_path}/out"
    assert humanline.main(short_run(tiny, data_files["prompts"], flags)) == 2
    error = capsys.readouterr().err
    assert "failed on every sample" in error and "name 'lenght' is not defined" in error
    assert "Traceback" not in error


def test_a_reward_file_may_have_the_name_of_a_python_module(tiny, data_files, tmp_path):
    (tmp_path / "json.py").write_text("def one(prompts, completions, rows):\n    return [1.0] * len(rows)\n")
    flags = f"--sample-every 1 --steps 1 --reward {tmp_path}/json.py:one --out {tmp_path}/out"
    train(short_run(tiny, data_files["prompts"], flags))
    assert metrics(tmp_path / "out")[0]["reward"] == 1


# Stopping and resuming.

def test_a_resumed_run_knows_earlier_measurements_and_skips_damaged_lines(tiny, data_files, tmp_path, varied):
    out = tmp_path / "out"
    flags = short_run(tiny, data_files["prompts"],
                      f"--no-humanline --sample-every 1 --reward {varied} "
                      f"--eval-data {data_files['prompts']} --eval-every 1 --save-every 2 --out {out}")
    first = train(flags)
    shutil.rmtree(out / "final")
    lines = (out / "metrics.jsonl").read_bytes().splitlines()
    (out / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b"\xff\xfe", *lines[1:]]) + b'\n{"st')
    second = train([*flags, "--resume", "latest"])
    assert [line["step"] for line in metrics(out)] == [1, 2, 3]
    for name in ("accuracy_before", "greedy_before", "accuracy", "greedy"):
        assert second.latest[name] == first.latest[name]


def test_a_run_that_starts_again_keeps_its_earlier_rollouts(run, tmp_path, capsys):
    out = run("--sample-every 1 --save-every 0", data="prompts", out=str(tmp_path / "out"))
    shutil.rmtree(out / "final")
    drawn = (out / "rollouts.jsonl").read_bytes()
    run("--sample-every 1 --save-every 0 --resume latest", data="prompts", out=str(out))
    [kept] = out.glob("rollouts-*.jsonl")
    assert kept.read_bytes() == drawn and (out / "rollouts.jsonl").read_bytes() == drawn  # drawn again
    assert f"its old log is now {kept}" in capsys.readouterr().err


def test_a_run_that_goes_back_to_an_earlier_checkpoint_keeps_one_line_for_each_step(
        tiny, data_files, tmp_path, monkeypatch):
    out = tmp_path / "out"
    flags = short_run(tiny, data_files["groups"], f"--out {out} --save-every 2 --keep 9 --steps 6")
    train(flags)
    shutil.rmtree(out / "final")
    copy = shutil.copytree(out / "checkpoint" / "step-00000002", out / "checkpoint" / "best")
    with monkeypatch.context() as patch:
        patch.setattr(humanline, "forward_backward", None)  # it fails before its first checkpoint
        with pytest.raises(TypeError):
            train([*flags, "--resume", str(copy)])
    assert [path.name for path in (out / "checkpoint").glob("step-*")] == ["step-00000002"]
    train([*flags, "--resume", "latest"])
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_of_another_run_does_not_replace_an_unfinished_one(tiny, data_files, tmp_path, capsys):
    base, fork = tmp_path / "base", tmp_path / "fork"
    flags = short_run(tiny, data_files["groups"], "--save-every 1 --steps 3 --out").__add__
    train(flags([str(base)]))
    again = flags([str(fork), "--resume", str(base / "checkpoint" / "step-00000002")])
    train(again)  # into a new folder
    shutil.rmtree(fork / "final")
    assert humanline.main(again) == 2
    assert "holds an unfinished run; pass --resume latest" in capsys.readouterr().err
    train(flags([str(fork), "--resume", "latest"]))


def test_a_checkpoint_that_is_written_while_a_run_loads_is_resumed_from(
        tiny, data_files, tmp_path, monkeypatch):
    out = tmp_path / "out"
    flags = short_run(tiny, data_files["groups"], f"--save-every 1 --keep 9 --steps 4 --out {out}")
    train(flags)
    shutil.rmtree(out / "final")
    newest, hidden = out / "checkpoint" / "step-00000004", tmp_path / "hidden"
    newest.rename(hidden)
    load, lines = humanline.load_policy, metrics(out)

    def beside_another(*args):
        hidden.rename(newest)
        return load(*args)

    monkeypatch.setattr(humanline, "load_policy", beside_another)
    train([*flags, "--resume", "latest"])
    assert newest.exists() and metrics(out) == lines  # nothing was trained again


# Memory.

@pytest.mark.parametrize("where", ["humanline.take_log_ratios", "torch.optim.AdamW.step",
                                   "transformers.LlamaForCausalLM.to",
                                   "transformers.LlamaForCausalLM.generate"])
def test_a_lack_of_memory_ends_the_run_with_a_one_line_error(tiny, data_files, tmp_path, capsys, monkeypatch,
                                                             varied, where):
    def no_memory(*args, **more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(where, no_memory)
    flags = f"--sample-every 1 --reward {varied} --microbatch-tokens 600 --out {tmp_path}/out"
    assert humanline.main(short_run(tiny, data_files["prompts"], flags)) == 1
    [stopped] = warnings_of(capsys, "stopped")
    assert "CUDA out of memory" in stopped
    assert "try --microbatch-tokens 300, a lower --sample-tokens" in stopped


def test_an_illegal_access_is_not_reported_as_a_lack_of_memory_and_an_unnamed_lack_is(monkeypatch, capsys):
    def fail(config):
        raise error

    monkeypatch.setattr(humanline, "train", fail)
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        humanline.main([])
    error = MemoryError()
    assert humanline.main([]) == 1 and "stopped: out of memory" in capsys.readouterr().err


def test_a_failure_to_compile_names_the_flag_that_does_without(tiny, data_files, tmp_path, capsys, monkeypatch):
    def no_compiler(*args):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr("humanline.check_output_head", no_compiler)
    with pytest.raises(RuntimeError, match="Failed to find C"):
        humanline.main(short_run(tiny, data_files["prompts"], f"--no-compile --out {tmp_path}/out"))
    assert humanline.main(short_run(tiny, data_files["prompts"], f"--compile --out {tmp_path}/out")) == 2
    assert "torch.compile: Failed to find C compiler" in (said := capsys.readouterr().err)
    assert said.strip().endswith("or pass --no-compile")


# Ranks.

def test_a_rank_that_fails_on_a_gpu_ends_at_once(monkeypatch):
    monkeypatch.setattr(humanline, "WORLD_SIZE", 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", lambda status: sys.exit(f"left with {status}"))
    with pytest.raises(SystemExit, match="left with 2"):
        humanline.main(["--batch-size", "0"])


def test_if_one_rank_cannot_share_prompts_no_rank_does(tiny, data_files, tmp_path, monkeypatch):
    monkeypatch.setattr(humanline, "gather_from_ranks",
                        lambda value: [value, False] if value is True else [value])
    assert not train(short_run(tiny, data_files["groups"], f"--out {tmp_path}/out")).policy.shares_prompts
