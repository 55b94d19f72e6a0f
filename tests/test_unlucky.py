"""Bad luck and bad input that used to be ignored silently or end in a traceback."""

import json
import os
import re
import shutil
import sys
import time

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
    assert f"does not continue from {out}/rollouts.jsonl, which is now {kept}" in capsys.readouterr().err


def test_a_run_that_goes_back_to_an_earlier_checkpoint_keeps_one_line_for_each_step(
        tiny, data_files, tmp_path, monkeypatch):
    out = tmp_path / "out"
    flags = short_run(tiny, data_files["groups"], f"--out {out} --save-every 2 --keep 9 --steps 6")
    train(flags)
    shutil.rmtree(out / "final")
    copy = shutil.copytree(out / "checkpoint" / "step-00000002", out / "checkpoint" / "step-best")
    with monkeypatch.context() as patch:
        patch.setattr(humanline, "forward_backward", None)  # it fails before its first checkpoint
        with pytest.raises(TypeError):
            train([*flags, "--resume", str(copy)])
    names = sorted(path.name for path in (out / "checkpoint").iterdir())
    assert names[0] == "step-00000002" and names[-1] == "step-best"
    assert [name[:14] for name in names[1:-1]] == ["step-00000004-", "step-00000006-"]  # under other names
    train([*flags, "--resume", "latest"])
    assert humanline.find_damage(copy) == "" and copy.exists()
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


def finished(tiny: str, rows: str, out, more: str = "--save-every 1 --steps 2",
             name: str = "final") -> list[str]:
    """The flags of a run that was interrupted before it wrote its final folder."""
    flags = short_run(tiny, rows, f"--out {out} {more}")
    train(flags)
    shutil.rmtree(out / name)
    return [*flags, "--resume", "latest"]


def test_a_copy_of_a_checkpoint_is_neither_resumed_from_nor_deleted(tiny, data_files, tmp_path):
    out = tmp_path / "out"
    again = finished(tiny, data_files["groups"], out, "--save-every 1 --steps 6 --keep 3")
    copy = shutil.copytree(out / "checkpoint" / "step-00000004", out / "checkpoint" / "step-best")
    train(again)
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in (out / "checkpoint").iterdir()) == [
        "step-00000004", "step-00000005", "step-00000006", "step-best"]
    assert humanline.find_damage(copy) == ""


def test_a_checkpoint_that_cannot_be_read_stops_the_run_and_nothing_is_deleted(
        tiny, data_files, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    again = finished(tiny, data_files["groups"], out)
    before = sorted(out.rglob("*"))
    digest = humanline.hashlib.file_digest

    def fails(file, kind):
        if file.name.endswith("step-00000002/tensors.safetensors"):
            raise OSError(5, "Input/output error", file.name)
        return digest(file, kind)

    with monkeypatch.context() as patch:
        patch.setattr(humanline.hashlib, "file_digest", fails)
        assert humanline.main(again) == 2
    [line] = warnings_of(capsys, "error")
    assert "cannot read" in line and "Input/output error" in line and sorted(out.rglob("*")) == before


def test_damaged_checkpoints_are_kept_under_another_name(tiny, data_files, tmp_path, capsys):
    out = tmp_path / "out"
    again = finished(tiny, data_files["groups"], out)
    for path in (out / "checkpoint").iterdir():
        (path / "state.json").write_text("")
    train(again)  # afresh
    kept = [path for path in (out / "checkpoint").iterdir() if len(path.name) > 13]
    assert sorted(path.name[:14] for path in kept) == ["step-00000001-", "step-00000002-"]
    assert all((path / "tensors.safetensors").exists() for path in kept)
    assert len(warnings_of(capsys, "which is now")) == 3  # and the log


def test_an_empty_final_folder_does_not_finish_a_run(tiny, data_files, tmp_path):
    again = finished(tiny, data_files["groups"], tmp_path / "out")
    (tmp_path / "out" / "final").mkdir()
    assert humanline.main(again) == 0 and (tmp_path / "out" / "final" / "config.json").exists()


@pytest.mark.parametrize("change", ["tokenizer.json", "generation_config.json", "helper.py"])
def test_a_run_whose_files_have_changed_is_not_resumed(tiny, data_files, tmp_path, capsys, change):
    model = shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "reward.py").write_text("def f(prompts, completions, rows):\n    import helper\n")
    (tmp_path / "helper.py").write_text("scale = 1\n")
    again = finished(str(model), data_files["groups"], tmp_path / "out",
                     f"--save-every 1 --steps 2 --reward {tmp_path}/reward.py:f")
    file = tmp_path / change if change == "helper.py" else model / change
    file.write_text(file.read_text() + "\n")
    assert humanline.main(again) == 2
    flag = "--reward" if change == "helper.py" else "--model"
    [line] = warnings_of(capsys, "error")
    assert f": {flag} {change} changed since; restore what it was" in line


def test_a_run_inside_of_its_data_gives_a_one_line_error(tiny, data_files, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    shutil.copy(data_files["groups"], tmp_path / "mine" / "train.jsonl")
    line = complaint(["--model", tiny, "--data", f"{tmp_path}/mine", "--out", f"{tmp_path}/mine/run1"],
                     tmp_path, capsys)
    assert "/mine/run1 is inside" in line and not (tmp_path / "mine" / "run1").exists()


def test_a_name_that_is_not_utf_8_gives_a_one_line_error(tiny, tmp_path, capsys):
    name = os.fsdecode(b"rows-\xff.jsonl")
    assert humanline.main(["--model", tiny, "--data", name, "--out", f"{tmp_path}/out"]) == 2
    assert "error: 'rows-\\udcff.jsonl' is not UTF-8; rename" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_logger_that_fails_does_not_end_the_run(tiny, data_files, tmp_path, capsys, monkeypatch):
    (tmp_path / "mylog.py").write_text(
        "def init(**_): pass\ndef log(*_, **__): raise ConnectionError('no network')\n")
    monkeypatch.syspath_prepend(tmp_path)
    train(short_run(tiny, data_files["groups"], f"--steps 2 --track mylog --out {tmp_path}/out"))
    [line] = warnings_of(capsys, "--track")
    assert "failed, and is not called again: ConnectionError('no network')" in line


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

def test_a_rank_that_waits_for_others_says_so(monkeypatch, capsys):
    def rendezvous(url):
        time.sleep(1)
        raise ValueError("environment variable MASTER_ADDR expected, but not set")

    monkeypatch.setattr(humanline, "RANKS_SECONDS", 0.01)
    monkeypatch.setattr(humanline.dist, "rendezvous", rendezvous)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    says = "MASTER_ADDR.*; start all ranks with torchrun, or unset RANK"
    with pytest.raises(humanline.UserError, match=says):
        humanline.join_ranks()
    [line] = warnings_of(capsys)
    assert "waiting for 1 more rank; start all ranks with torchrun, or unset RANK and WORLD_SIZE" in line



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
