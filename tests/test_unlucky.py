"""Bad luck and bad input that once went through in silence, or ended in a traceback."""

import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, metrics, rows_of, write_jsonl
from test_command_line import complaint

import humanline
from humanline import Config


def short_run(tiny: str, data: str, out, more: str = "") -> list[str]:
    flags = f"--model {tiny} --data {data} --steps 3 --batch-size 4 --lr 1e-2 --out {out} --max-new-tokens 4 --group-size 4"
    return [*flags.split(), *more.split()]


# --- the run's folder -------------------------------------------------------------------------------------------------


def test_the_folder_is_claimed_before_the_model_is_loaded(tiny, data_files, tmp_path, monkeypatch):
    folders, load = [], humanline.load_policy
    monkeypatch.setattr(humanline, "load_policy", lambda *args: folders.append((tmp_path / "out").exists()) or load(*args))
    humanline.train(humanline.parse_config(short_run(tiny, data_files["groups"], tmp_path / "out")))
    assert folders == [True]


def test_two_runs_in_one_folder_do_not_overlap(tiny, data_files, tmp_path, monkeypatch, capsys):
    flags, load, errors = short_run(tiny, data_files["groups"], tmp_path / "out"), humanline.load_policy, []

    def load_beside_another(*args):
        monkeypatch.setattr(humanline, "load_policy", load)
        errors.append(humanline.main(flags))  # the second run, while the first one loads
        return load(*args)

    monkeypatch.setattr(humanline, "load_policy", load_beside_another)
    assert humanline.main(flags) == 0 and errors == [2]
    assert "another process trains into it" in capsys.readouterr().err


def test_a_run_that_fails_before_training_leaves_no_folder(tiny, data_files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(humanline, "load_policy", lambda *_: humanline.require(False, "no model"))
    assert humanline.main(short_run(tiny, data_files["groups"], tmp_path / "out")) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("spoil, expected", [
    (lambda out: (out / "config.toml").mkdir(), "its config.toml was not written by a run"),
    (lambda out: (out / "final").write_text("x"), "holds a finished run"),
    (lambda out: (out / "checkpoint").symlink_to(out.parent), "its checkpoint was not written by a run"),
])
def test_what_is_not_ours_in_the_folder_is_not_written_over(spoil, expected, tiny, data_files, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    spoil(tmp_path / "out")
    assert humanline.main(short_run(tiny, data_files["groups"], tmp_path / "out")) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("out, expected", [("file/inside", "not a directory; choose another folder"), ("x" * 300, "file name too long")])
def test_an_impossible_folder_is_one_line(out, expected, tiny, data_files, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert humanline.main(short_run(tiny, data_files["groups"], tmp_path / out)) == 2
    assert re.fullmatch(rf"humanline.py: error: [^\n]*{expected}[^\n]*\n", capsys.readouterr().err)


def test_unfinished_folders_of_a_killed_run_go_when_it_is_resumed(run, tmp_path):
    out = tmp_path / "out"
    run("--steps 4 --save-every 2", out=str(out))
    humanline.shutil.rmtree(out / "final")
    (out / ".final-abc").mkdir()
    run("--steps 4 --save-every 2 --resume latest", out=str(out))
    assert not (out / ".final-abc").exists() and (out / "final").exists()


def test_all_files_of_the_final_folder_can_be_read_by_others(run):
    modes = {path.stat().st_mode & 0o777 for path in (run("--steps 2") / "final").iterdir()}
    assert modes == {0o644}


# --- models and data --------------------------------------------------------------------------------------------------


def test_a_model_that_lacks_a_weight_is_refused(tiny, data_files, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    humanline.shutil.copytree(tiny, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    line = complaint(["--model", str(tmp_path / "model"), "--data", data_files["groups"]], tmp_path, capsys)
    assert "its files lack model.layers.1.mlp.up_proj.weight" in line


@pytest.mark.parametrize("template, expected", [
    ("{% for message in %}", "its chat template fails"),
    ("{{ messages.__class__.__base__ }}", "its chat template fails: access to attribute '__class__'"),
    ("{% if messages|length == 1 %}{{ raise_exception('not today') }}{% endif %}",
     "the model's chat template refuses a prompt: not today"),
    ("{{ 'a' * 3000000000 }}", "its chat template fails: it wants more than a gigabyte"),
    ("{% if messages|length == 1 %}{{ 'a' * 3000000000 }}{% endif %}",
     "the model's chat template refuses a prompt: it wants more than a gigabyte"),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
     "its chat template fails: it took longer than 1 s")])
def test_a_chat_template_that_fails_is_one_line(tiny, data_files, tmp_path, capsys, monkeypatch, template, expected):
    monkeypatch.setattr(humanline, "TEMPLATE_SECONDS", 1.0)
    humanline.shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    line = complaint(["--model", str(tmp_path / "model"), "--data", data_files["groups"]], tmp_path, capsys)
    assert expected in line
    assert resource.getrlimit(resource.RLIMIT_AS) == limits and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_a_reward_process_goes_first_where_memory_runs_out(tmp_path):
    score = Path("/proc/self/oom_score_adj")
    if not score.exists():
        pytest.skip("Linux alone has it")
    (tmp_path / "reward.py").write_text(f"def score():\n    return int(open('{score}').read())\n")
    process = humanline.FunctionProcess(str(tmp_path / "reward.py"), "score")
    assert process("call", limit=60) == 1000
    process.close()


@pytest.mark.parametrize("fields, expected", [
    (dict(prompt="a", output_A="b", output_B="c"), "'label' is None; with output_A"),
    (dict(prompt="a", output_A="b", output_B="c", label="B"), "'label' is 'B'; with output_A"),
    (dict(prompt="a", chosen=[dict(role="user", content="x"), dict(role="assistant", content="y")],
          rejected=[dict(role="user", content="x"), dict(role="assistant", content="z")]), "'prompt' is not among the turns"),
    (dict(prompt="x", chosen=[dict(role="user", content="x"), dict(role="assistant", content="y")]), "no 'rejected'"),
])
def test_a_row_that_contradicts_itself_is_refused(fields, expected):
    with pytest.raises(humanline.UserError, match=re.escape(expected)):
        humanline.read_row(fields, "row 1", Config())


def test_the_turns_between_prompt_and_answer_are_used():
    turns = [dict(role="user", content="a"), dict(role="assistant", content="b"), dict(role="user", content="c")]
    answers = {key: [*turns, dict(role="assistant", content=key)] for key in ("chosen", "rejected")}
    row = humanline.read_row(dict(prompt="a", **answers), "row 1", Config())
    assert row.prompt == turns and row.completions == ["chosen", "rejected"]


def test_an_alpaca_row_keeps_its_input():
    row = humanline.read_row(dict(instruction="Add.", input="1 and 2", output="3"), "row 1", Config())
    assert row.prompt[0]["content"] == "Add.\n\n1 and 2"
    assert humanline.read_row(dict(instruction="Add.", input="", output="3"), "", Config()).prompt[0]["content"] == "Add."


def test_halos_labels_say_which_answer_is_better():
    for label, better in ((1, "a"), (0, "b")):
        row = humanline.read_row(dict(prompt="x", output_A="a", output_B="b", label=label), "", Config())
        assert row.completions[0] == better


@pytest.mark.parametrize("name, expected", [
    ("rows.txt", "a file of no known kind; there are .jsonl"), ("", "--data names nothing"), ("rows.jsonl=0", "no row is left")])
def test_data_that_gives_no_rows_is_one_line(name, expected, tiny, tmp_path, capsys):
    (tmp_path / "rows.txt").write_text("x")
    write_jsonl(tmp_path / "rows.jsonl", rows_of("groups"))
    line = complaint(["--model", tiny, "--data", f"{tmp_path}/{name}" if name else ""], tmp_path, capsys)
    assert expected in line


def test_a_file_may_end_in_capitals(tiny, tmp_path):
    path = write_jsonl(tmp_path / "ROWS.JSONL", rows_of("groups"))
    assert len(humanline.read_rows(path, Config(), "--data")) == 24


@pytest.mark.parametrize("content", [b"\xff\xfe\xfa\n", b"[" * 100_000 + b"\n"])
def test_a_line_that_is_no_text_or_too_deep_is_named(content, tiny, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_bytes(json.dumps(rows_of("groups")[0]).encode() + b"\n" + content)
    line = complaint(["--model", tiny, "--data", f"{tmp_path}/rows.jsonl"], tmp_path, capsys)
    assert "row 2: not JSON" in line


# --- flags and settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, expected", [
    ("--temperature 1e-300", "--temperature is 1e-300; it must lie from 0.001 to 1000"),
    ("--batch-size 99999999999", "--batch-size is 99999999999; it must lie from 1 to 1,000,000"),
    ("--shard", "--shard needs several ranks; start them with torchrun")])
def test_a_flag_that_would_hang_or_crash_is_one_line(flags, expected, tiny, data_files, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert expected in complaint(["--model", tiny, "--data", data_files["groups"], *flags.split()], tmp_path, capsys)


def test_any_text_survives_in_config_toml(tmp_path):
    text = "emoji 🙂, quote \", backslash \\, newline \n, tab \t, delete \x7f, 汉字"
    config = humanline.parse_config(["--system", text])
    (tmp_path / "config.toml").write_text(humanline.to_toml(config), encoding="utf-8")
    assert humanline.read_config(str(tmp_path / "config.toml")).system == text


def test_a_drift_that_is_typed_replaces_the_files_k(tmp_path):
    (tmp_path / "config.toml").write_text("sync_k = 12\n")
    flags = ["--config", str(tmp_path / "config.toml")]
    both = humanline.parse_config([*flags, "--sync-drift", "0.2", "--sync-k", "3"])
    assert humanline.parse_config([*flags, "--sync-drift", "0.2"]).sync_k == 0 and both.sync_k == 3


@pytest.mark.parametrize("flags, objective", [
    ("", "GRPO with humanline, a taper, a prior of 1"), ("--stale keep --prior 0", "GRPO with humanline"),
    ("--no-humanline", "plain GRPO"), ("--model x --data y --loss dpo", "DPO with humanline"),
    ("--no-humanline --sync-k 5 --perception clip", "GRPO with humanline"),
    ("--no-humanline --sync-k 5", "GRPO with syncing only"), ("--sync-k 0 --stale keep --prior 0", "GRPO with perception only")])
def test_a_run_is_called_what_it_did(flags, objective):
    assert humanline.in_words(humanline.parse_config(flags.split()))["objective"] == objective


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_a_reward_that_fails_on_every_sample_stops_the_run_at_once(tiny, data_files, tmp_path, capsys):
    (tmp_path / "wrong.py").write_text("def wrong(prompts, completions, rows):\n    return lenght(completions)\n")
    flags = f"--sample-every 1 --reward {tmp_path}/wrong.py:wrong"
    assert humanline.main(short_run(tiny, data_files["prompts"], tmp_path / "out", flags)) == 2
    error = capsys.readouterr().err
    assert "failed on every sample of the first rollouts" in error and "name 'lenght' is not defined" in error
    assert "Traceback" not in error


def test_a_mean_of_graded_rewards_is_not_called_pass_at_1(tiny, data_files, tmp_path, varied, capsys):
    flags = f"--sample-every 1 --reward {varied} --eval-data {data_files['prompts']}"
    assert humanline.main(short_run(tiny, data_files["prompts"], tmp_path / "out", flags)) == 0
    assert "mean reward on rows of --data went from" in capsys.readouterr().out


# --- stopping and resuming --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_run_exits_as_one_that_a_signal_ended(number, tiny, data_files, tmp_path):
    flags = short_run(tiny, data_files["groups"], tmp_path / "out", "--steps 100000")
    process = subprocess.Popen([sys.executable, str(ROOT / "humanline.py"), *flags], stderr=subprocess.PIPE, text=True,
                               stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not (tmp_path / "out" / "metrics.jsonl").exists() or not (tmp_path / "out" / "metrics.jsonl").read_text():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "stopped after step" in out
    assert f"{number.name}: stopping after this step" in error
    assert list((tmp_path / "out" / "checkpoint").glob("step-*"))


def test_a_run_is_not_resumed_on_other_rows(run, tiny, tmp_path):
    rows, out = rows_of("groups"), tmp_path / "out"
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = short_run(tiny, path, out, "--steps 4 --save-every 2")
    humanline.train(humanline.parse_config(flags))
    humanline.shutil.rmtree(out / "final")
    humanline.shutil.rmtree(out / "checkpoint" / "step-00000004")
    write_jsonl(tmp_path / "rows.jsonl", rows[:12])
    with pytest.raises(humanline.UserError, match="the rows of --data have changed since then"):
        humanline.train(humanline.parse_config([*flags, "--resume", "latest"]))


def test_a_resume_to_fewer_steps_than_are_done_is_refused(run, tmp_path):
    out = tmp_path / "out"
    run("--steps 6 --save-every 4", out=str(out))
    humanline.shutil.rmtree(out / "final")
    with pytest.raises(humanline.UserError, match="it has done 4 of its planned 6 steps, so --steps 3 must lie between"):
        run("--steps 3 --save-every 4 --resume latest", out=str(out))


def test_a_resumed_run_remembers_its_last_accuracy(tiny, data_files, tmp_path, varied, capsys):
    out = tmp_path / "out"
    flags = short_run(tiny, data_files["prompts"], out,
                      f"--sample-every 1 --reward {varied} --eval-data {data_files['prompts']} --eval-every 1 --save-every 2")
    run = humanline.train(humanline.parse_config(flags))
    humanline.shutil.rmtree(out / "final")
    assert metrics(out)[-1]["accuracy"] == run.latest["accuracy"]
    resumed = humanline.train(humanline.parse_config([*flags, "--resume", "latest"]))
    assert resumed.latest == run.latest and resumed.before == run.before


def test_damaged_lines_of_the_metrics_are_left_out_with_one_warning(run, tmp_path, capsys):
    out = tmp_path / "out"
    run("--steps 4 --save-every 2", out=str(out))
    humanline.shutil.rmtree(out / "final")
    humanline.shutil.rmtree(out / "checkpoint" / "step-00000004")
    lines = (out / "metrics.jsonl").read_bytes().splitlines()
    (out / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b"\xff\xfe", b"7", b'{"loss": 1}', lines[1]]) + b"\n")
    run("--steps 4 --save-every 2 --resume latest", out=str(out))
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("3 damaged lines are left out") == 1


def test_a_list_of_no_hashes_is_damage(run, tmp_path):
    folder = run("--steps 2 --save-every 2") / "checkpoint" / "step-00000002"
    assert humanline.find_damage(folder) == ""
    (folder / "files.json").write_text("{}")
    assert "damaged" in humanline.find_damage(folder)


# Files as they are written, rewards that hang or have a known name, no memory, no room.

def test_csv_and_json_values_stay_as_they_are_written(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer,label\n1+6=,007,\nwhen?,2024-01-08,\n\"a,\nb\",2.50,TRUE\n")
    rows = [*humanline.read_table(str(tmp_path / "rows.csv"), "--data")]
    assert rows == [dict(prompt="1+6=", answer="007", label=None), dict(prompt="when?", answer="2024-01-08", label=None),
                    dict(prompt="a,\nb", answer="2.50", label=True)]
    values = [dict(prompt="x", answer=5), dict(prompt="y", answer=2.5), dict(prompt="z", answer="2024-01-08")]
    for name, text in (("list.json", json.dumps(values)), ("lines.json", "\n".join(map(json.dumps, values)))):
        (tmp_path / name).write_text(text)
        read = [*humanline.read_table(str(tmp_path / name), "--data")]
        assert [(row["answer"], type(row["answer"])) for row in read] == [(5, int), (2.5, float), ("2024-01-08", str)]


def test_a_hanging_reward_takes_twice_the_root_of_its_samples_and_no_more(tmp_path):
    (tmp_path / "slow.py").write_text("import time\n\ndef slow(prompts, completions, rows):\n    time.sleep(60)\n")
    reward = humanline.Reward(f"{tmp_path}/slow.py:slow", Config(reward_seconds=0.2), torch.device("cpu"))
    started = time.perf_counter()
    assert reward([[]] * 16, ["a"] * 16, [{}] * 16) == [None] * 16
    # 0.8 s together, 0.8 s one by one, and a process to start for each of those
    assert time.perf_counter() - started < 15


def test_a_reward_file_may_have_the_name_of_a_module_of_pythons(tmp_path):
    (tmp_path / "json.py").write_text("def one(prompts, completions, rows):\n    return [1.0] * len(rows)\n")
    reward = humanline.Reward(f"{tmp_path}/json.py:one", Config(), torch.device("cpu"))
    assert reward([[]], ["a"], [{}]) == [1.0]


def test_a_byte_order_mark_in_the_settings_is_no_error(tmp_path):
    (tmp_path / "settings.toml").write_text("\ufeffloss = 'dpo'\n", encoding="utf-8")
    assert humanline.parse_config(["--config", str(tmp_path / "settings.toml")]).loss == "dpo"


def test_without_memory_for_one_sequence_the_run_ends_in_one_line(tiny, data_files, tmp_path, capsys, monkeypatch):
    def no_memory(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    flags = short_run(tiny, data_files["pairs"], tmp_path / "out", "--loss dpo --batch-size 4")
    monkeypatch.setattr(humanline, "log_ratios", no_memory)
    assert humanline.main(flags) == 1
    lines = capsys.readouterr().err.splitlines()
    stopped = [line for line in lines if "stopped" in line]
    assert len(stopped) == 1 and "one sequence of" in stopped[0] and "--max-length" in stopped[0]
    assert 1 <= sum("out of memory; from here on" in line for line in lines) <= 12  # not down to one token


def test_without_room_for_the_final_folder_the_model_is_put_elsewhere(run, tmp_path, capsys, monkeypatch):
    new_folder = humanline.new_folder

    def full_disk(path, hashed=True):
        if path.parent == tmp_path / "out":
            raise OSError(28, "No space left on device")
        return new_folder(path, hashed)

    monkeypatch.setattr(humanline, "new_folder", full_disk)
    with pytest.raises(OSError, match="could not write .*No space left.*the model is in (/.*/final)") as error:
        run("--steps 1", out=str(tmp_path / "out"))
    rescued = Path(re.search(r"the model is in (/.*/final)", str(error.value))[1])
    assert (rescued / "model.safetensors").exists()
    humanline.shutil.rmtree(rescued.parent)


def test_a_model_of_yours_has_checkpoints_by_default():
    assert humanline.parse_config(["--model", "x", "--data", "y"]).save_every == 64
    assert humanline.parse_config([]).save_every == 0


def test_a_special_token_in_a_row_is_said_once_with_the_row(tiny, tmp_path, capsys):
    rows = [dict(prompt=f"{i}", chosen="a<eos>b" if i > 1 else "a", rejected="b") for i in range(4)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    humanline.train(humanline.parse_config(short_run(tiny, path, tmp_path / "out", "--loss dpo --steps 1")))
    [line] = [line for line in capsys.readouterr().err.splitlines() if "special token" in line]
    assert "row 3" in line and "<eos>" in line


@pytest.mark.parametrize("loss", ["kto", "dpo"])
def test_groups_without_a_difference_are_left_out(tiny, tmp_path, loss):
    rows = [dict(prompt=f"{i}", completions=["a", "b"], scores=[float(i % 2), 0.0]) for i in range(8)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "out"
    humanline.train(humanline.parse_config(short_run(tiny, path, out, f"--loss {loss} --steps 1 --batch-size 4")))
    assert metrics(out)[0]["tokens"] == {"kto": 8, "dpo": 16}[loss]  # "a" and its end: of 4 examples or 4 pairs


@pytest.mark.parametrize("loss, rows, flags, words", [
    ("dpo", dict(chosen="a", rejected="a"), "", "4 pairs have the same completion on both sides"),
    ("kto", dict(completion="a", label=True), "", "all examples are of one kind"),
    ("grpo", None, "--log-eps-p 0.1", r"the clip \[0.1, 1.5\] does not hold 0"),
    ("dpo", dict(chosen="a", rejected="b"), "--epsilon 0.1 --no-scale-rewards", "--epsilon, --scale-rewards does nothing with"),
    ("dpo", dict(chosen="a", rejected="b"), "--steps 42 --lr 1e-6", "42 steps of 1 go through the data 10 times"),
    ("dpo", dict(prompt=[dict(role="user", content="a"), dict(role="assistant", content="b")], chosen="c", rejected="d"),
     "", "row 1: its prompt ends in the assistant's turn"),
    ("dpo", dict(chosen="a", rejected="b"), "--reward math", "--reward is of what is drawn; without --sample-every"),
    ("dpo", dict(chosen="a", rejected="b"), "--limit 3 --eval-data ROWS", "--limit also cuts the held-out rows"),
    ("dpo", dict(chosen="a", rejected="b"), "--dtype bfloat16 --lr 1e-6", "at --lr 1e-06 most updates are below half a"),
    ("dpo", dict(chosen="a", rejected="b"), "--dtype bfloat16", None),
    ("dpo", dict(chosen="a", rejected="b"), "", None),
])
def test_what_is_hardly_meant_costs_one_warning(tiny, tmp_path, capsys, loss, rows, flags, words):
    rows = [dict(prompt=f"{i}", answer="x") | (rows or dict(completions=["a", "b"], scores=[0.0, 1.0])) for i in range(4)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    others = write_jsonl(tmp_path / "others.jsonl", [row | dict(prompt=f"other {i}") for i, row in enumerate(rows)])
    more = f"--loss {loss} --batch-size 1 " + ("" if "--steps" in flags else "--steps 1 ") + flags.replace("ROWS", others)
    humanline.train(humanline.parse_config(short_run(tiny, path, tmp_path / "out", more)))
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warned) == (words is not None) and (words is None or re.search(words, warned[0])), warned


# --- what a sixth reader found ----------------------------------------------------------------------------------------


def test_without_memory_to_draw_the_run_ends_in_one_line(tiny, data_files, tmp_path, capsys, monkeypatch):
    def no_memory(*args, **more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    flags = short_run(tiny, data_files["prompts"], tmp_path / "out", "--sample-every 1")
    monkeypatch.setattr("transformers.LlamaForCausalLM.generate", no_memory)
    assert humanline.main(flags) == 1
    stopped = [line for line in capsys.readouterr().err.splitlines() if "stopped" in line]
    assert len(stopped) == 1 and "out of memory while drawing" in stopped[0] and "lower --sample-tokens" in stopped[0]


def test_an_illegal_access_to_memory_is_no_lack_of_it():
    def illegal():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        humanline.fit_memory(illegal, [humanline.Sequence([1] * 5, [2])], Config())


def test_a_run_taken_back_to_an_earlier_checkpoint_drops_the_later_ones(tiny, data_files, tmp_path):
    out = tmp_path / "out"
    flags = short_run(tiny, data_files["groups"], out, "--save-every 2 --keep 9")
    humanline.train(humanline.parse_config([*flags, "--steps", "6"]))
    humanline.shutil.rmtree(out / "final")
    back = ["--steps", "5", "--save-every", "5", "--resume", str(out / "checkpoint" / "step-00000002")]
    humanline.train(humanline.parse_config([*flags, *back]))
    saved = sorted(path.name for path in (out / "checkpoint").glob("step-*"))
    assert saved == ["step-00000002", "step-00000004", "step-00000005"]
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4, 5]


def test_a_run_that_goes_on_elsewhere_claims_no_gain_that_it_has_not_measured(tiny, data_files, tmp_path):
    measured = f"--eval-data {data_files['prompts']} --eval-prompts 4"
    flags = [short_run(tiny, data_files["groups"], tmp_path / name, measured) for name in ("one", "other")]
    first = humanline.train(humanline.parse_config([*flags[0], "--save-every", "2"]))
    assert "went from" in humanline.last_line(first)
    checkpoint = tmp_path / "one" / "checkpoint" / "step-00000002"
    second = humanline.train(humanline.parse_config([*flags[1], "--resume", str(checkpoint)]))
    assert second.before == {} and "accuracy" in second.latest and "went from" not in humanline.last_line(second)


@pytest.mark.parametrize("flags, said", [
    ("--loss grpo --beta 0.04", "--beta does nothing with --loss grpo; the weight of GRPO's KL is --kl-beta"),
    ("--loss dpo --desirable-weight 2", "--desirable-weight does nothing with --loss dpo"),
    ("--loss kto --epsilon 0.3", "--epsilon does nothing with --loss kto"),
    ("--loss dpo --beta 0.04", ""), ("--loss kto --desirable-weight 2", ""), ("--loss grpo --epsilon 0.3", "")])
def test_what_another_loss_takes_is_warned_of(tiny, data_files, tmp_path, capsys, flags, said):
    flags = short_run(tiny, data_files["groups"], tmp_path / "out", f"{flags} --steps 1")
    humanline.train(humanline.parse_config(flags))
    warned = [line for line in capsys.readouterr().err.splitlines() if "does nothing" in line]
    assert warned == ([f"humanline.py: warning: {said}"] if said else [])


def test_a_rank_without_a_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(humanline.UserError, match="rank 3 has no GPU, there are 2; start so many with --nproc_per_node 2"):
        humanline.join_ranks()


def test_ranks_that_are_started_again_go_on_from_where_the_user_said_until_there_is_a_checkpoint(
        tiny, data_files, tmp_path, monkeypatch):
    given, seen = str(tmp_path / "elsewhere" / "step-00000064"), []
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    def stop(config):
        seen.append(config.resume)
        raise OSError("enough")

    monkeypatch.setattr(humanline, "train", stop)
    flags = short_run(tiny, data_files["groups"], tmp_path / "out")
    assert humanline.main([*flags, "--resume", given]) == 1 and humanline.main(flags) == 1
    (tmp_path / "out" / "checkpoint" / "step-00000002").mkdir(parents=True)
    assert humanline.main([*flags, "--resume", given]) == 1
    assert seen == [given, "latest", "latest"]


# --- what a seventh reader found --------------------------------------------------------------------------------------


def test_a_group_without_a_difference_has_no_advantage_though_its_mean_is_rounded():
    group = humanline.Group(0, [1], [[2]] * 8, [0.1] * 8)  # eight times 0.1 is less than 0.8
    (unit,) = humanline.group_with_advantages(group, humanline.parse_config(["--prior", "0"]), 0.5)
    assert [(s.advantage, s.is_chosen) for s in unit] == [(0.0, False)] * 8
    (unit,) = humanline.group_with_advantages(group, humanline.parse_config(["--prior", "1"]), 0.5)
    assert all(s.advantage < 0 for s in unit)  # against the prior's rollout
    (unit,) = humanline.group_with_advantages(group, humanline.parse_config(["--prior", "1"]), sum([0.1] * 8) / 8)
    assert [s.advantage for s in unit] == [0.0] * 8


def test_log_probs_that_a_tool_has_made_whole_numbers_stay_fractions_beside_others():
    group = humanline.Group(0, [1], [[2], [3]], [0.0, 1.0], logps=[[0], [-0.5]])
    (unit,) = humanline.group_with_advantages(group, humanline.parse_config(["--stale", "taper"]), 0.5)
    assert [s.sampler_logps.dtype for s in unit] == [torch.float32] * 2


def test_a_run_that_is_ended_at_its_checkpoint_is_measured_there(tiny, data_files, tmp_path):
    out = tmp_path / "out"
    flags = short_run(tiny, data_files["groups"], out, f"--eval-data {data_files['prompts']} --eval-prompts 4")
    humanline.train(humanline.parse_config([*flags, "--save-every", "2"]))
    humanline.shutil.rmtree(out / "final")
    run = humanline.train(humanline.parse_config([*flags, "--resume", "latest", "--steps", "2"]))
    assert (out / "final").exists() and run.latest is not run.before
    steps = [json.loads(line)["step"] for line in (out / "eval_rollouts.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [0, 2]


@pytest.mark.parametrize("flags, said", [
    ("--gamma-p 0.3 --log-eps-r 2", "--gamma-p does nothing here: GRPO with humanline, perception: a clip to [-1.5, 2.0]"),
    ("--perception sample --log-eps-p -1 --log-eps-r 1", "--log-eps-p, --log-eps-r does nothing here: GRPO with "
     "humanline, perception: rejection sampling"),
    ("--sync-k 0 --sync-alpha 0.5", "--sync-alpha does nothing here: GRPO with perception only, perception: a clip to "
     "[-1.5, 1.5]"),
    ("--no-humanline --log-eps-p -1", ""),
    ("--eval-every 2 --eval-samples 3", "--eval-every, --eval-samples: nothing is measured without --eval-data"),
    ("--eval-every 2 --eval-data PROMPTS", ""),
    ("--loss kto --sample-every 1 --group-size 4", "each step has the completions of one prompt, so that KTO's "
     "reference point z0 is 0; raise --batch-size")])
def test_what_does_nothing_is_named(tiny, data_files, tmp_path, capsys, flags, said):
    flags = flags.replace("PROMPTS", data_files["prompts"])
    humanline.train(humanline.parse_config(short_run(tiny, data_files["groups"], tmp_path / "out", f"{flags} --steps 1")))
    words = "does nothing here|nothing is measured|reference point"
    warned = [line for line in capsys.readouterr().err.splitlines() if re.search(words, line)]
    assert warned == ([f"humanline.py: warning: {said}"] if said else [])


@pytest.mark.parametrize("where, words", [("AdamW.step", "--lora 16"), ("Module.to", "--checkpoint-activations")])
def test_without_memory_for_the_optimizer_or_the_model_the_run_ends_in_one_line(
        tiny, data_files, tmp_path, capsys, monkeypatch, where, words):
    def no_memory(*args, **more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    flags = short_run(tiny, data_files["groups"], tmp_path / "out")
    if where == "AdamW.step":
        monkeypatch.setattr(torch.optim.AdamW, "step", no_memory)
    else:
        monkeypatch.setattr("transformers.LlamaForCausalLM.to", no_memory)
    assert humanline.main(flags) == 1
    stopped = [line for line in capsys.readouterr().err.splitlines() if "stopped" in line]
    assert len(stopped) == 1 and "CUDA out of memory" in stopped[0] and words in stopped[0]


def test_a_clip_with_one_end_is_kept_in_config_toml(tmp_path):
    config = humanline.parse_config(["--log-eps-r", "inf", "--log-eps-p=-inf", "--lr", "1e-6"])
    (tmp_path / "config.toml").write_text(humanline.to_toml(config), encoding="utf-8")
    again = humanline.read_config(str(tmp_path / "config.toml"))
    assert (again.log_eps_p, again.log_eps_r, again.lr) == (-float("inf"), float("inf"), 1e-6)


def test_a_k_that_is_typed_replaces_the_files_drift(tmp_path):
    (tmp_path / "config.toml").write_text("sync_drift = 0.2\n")
    flags = ["--config", str(tmp_path / "config.toml"), "--sync-k", "12"]
    config, both = humanline.parse_config(flags), humanline.parse_config([*flags, "--sync-drift", "0.1"])
    assert (config.sync_k, config.sync_drift) == (12, None) and (both.sync_k, both.sync_drift) == (12, 0.1)
    assert "synced every 12 steps and when the drift passes 0.1" in humanline.in_words(both)["anchor"]


def test_the_command_to_go_on_starts_as_many_ranks(tiny, monkeypatch):
    made = SimpleNamespace(config=humanline.parse_config(["--model", tiny]), out=Path("runs/a"), stopped_at=3)
    monkeypatch.setattr(humanline, "world_size", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "go on with: torchrun --nproc_per_node 2 humanline.py --config" in humanline.last_line(made)


def test_a_file_has_no_parts_to_choose(tiny, data_files, tmp_path, capsys):
    said = complaint(["--model", tiny, "--data", f"{data_files['groups']}:train[:10]"], tmp_path, capsys)
    assert "groups.jsonl:train[:10]: a file has no parts; leave :train[:10] out" in said


def test_a_prompt_beyond_max_length_is_dropped_offline_too(tiny, tmp_path, capsys):
    rows = rows_of("groups")
    long = dict(rows[0], prompt="12" * 40)
    data = write_jsonl(tmp_path / "rows.jsonl", [long, *rows[1:]])
    humanline.train(humanline.parse_config(short_run(tiny, str(data), tmp_path / "out", "--max-length 30")))
    assert "dropped 1 prompts and" in capsys.readouterr().err


def test_a_csv_row_that_ends_early_is_named(tiny, tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("prompt,completion,label\na,b,true\nc,d\n")
    said = complaint(["--model", tiny, "--data", str(tmp_path / "rows.csv"), "--loss", "kto"], tmp_path, capsys)
    assert "rows.csv row 2" in said and "NoneType" not in said


def test_a_dtype_that_the_machine_chose_is_named_where_another_machine_resumes(
        tiny, data_files, tmp_path, capsys, monkeypatch):
    flags = short_run(tiny, data_files["groups"], tmp_path / "out", "--save-every 2")
    humanline.train(humanline.parse_config(flags))
    humanline.shutil.rmtree(tmp_path / "out" / "final")
    monkeypatch.setattr(humanline, "pays_mixed", lambda *_: True)
    assert humanline.main([*flags, "--resume", "latest"]) == 2
    said = capsys.readouterr().err
    assert "the run has --dtype float32, not mixed; resume it with its own config.toml and --dtype float32" in said


# --- what a reader of the GPU's paths found ---------------------------------------------------------------------------


def test_a_rank_that_fails_on_a_gpu_ends_at_once(monkeypatch):
    monkeypatch.setattr(humanline, "world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", lambda status: sys.exit(f"left with {status}"))
    with pytest.raises(SystemExit, match="left with 2"):
        humanline.main(["--batch-size", "0"])


def test_a_checkpoint_is_whole_before_a_run_that_fails_ends(tiny, data_files, tmp_path, monkeypatch):
    write = humanline.Saver.write

    def write_late(*args):
        time.sleep(0.5)
        write(*args)

    monkeypatch.setattr(humanline.Saver, "write", write_late)
    monkeypatch.setattr(humanline, "learning_rate", lambda step, _: humanline.require(step < 2, "no more") or 1e-3)
    flags = humanline.parse_config(short_run(tiny, data_files["groups"], tmp_path / "out", "--save-every 1"))
    with pytest.raises(humanline.UserError, match="no more"):
        humanline.train(flags)
    assert humanline.find_damage(tmp_path / "out" / "checkpoint" / "step-00000001") == ""


def test_whole_weights_are_on_the_first_rank_alone(tiny, monkeypatch):
    policy = humanline.load_policy(Config(model=tiny), torch.device("cpu"))[0]
    assert humanline.whole_weights(policy).keys() == dict(policy.named_parameters()).keys()
    monkeypatch.setattr(humanline, "rank", lambda: 1)
    assert humanline.whole_weights(policy) == {}


def test_a_reward_that_fails_keeps_none_of_its_tensors():
    score, alive = humanline.Reward("exact", Config(), torch.device("cpu")), weakref.WeakSet()

    def fail(prompts, completions, rows):
        activations = torch.zeros(3)
        alive.add(activations)
        raise torch.OutOfMemoryError("CUDA out of memory")

    score.function = fail
    assert score([[]] * 2, ["a", "b"], [{}] * 2) == [None, None]
    assert score.failure and not alive


def test_ranks_of_which_one_cannot_share_prompts_all_do_without(tiny, data_files, tmp_path, monkeypatch):
    monkeypatch.setattr(humanline, "gather_from_ranks", lambda value: [value, False] if value is True else [value])
    run = humanline.train(humanline.parse_config(short_run(tiny, data_files["groups"], tmp_path / "out")))
    assert not run.config.share_prompts


def test_what_the_embedded_model_is_made_of_is_never_compiled(tmp_path, monkeypatch):
    def load(config, *_):
        loaded.append(config.compile)
        raise humanline.UserError("enough")

    loaded = []
    monkeypatch.setattr(humanline, "load_policy", load)
    monkeypatch.setattr(humanline, "Config", functools.partial(Config, compile=True))  # the default on a GPU
    for make, part in ((humanline.make_data, "base"), (humanline.make_model, "worse")):
        with pytest.raises(humanline.UserError, match="enough"):
            make(part, False, tmp_path)
    assert loaded == [False, False]


def test_a_checkpoint_from_before_a_flag_was_added_can_be_resumed(tiny, data_files, tmp_path):
    flags = short_run(tiny, data_files["groups"], tmp_path / "out", "--save-every 1")
    humanline.train(humanline.parse_config(flags))
    humanline.shutil.rmtree(tmp_path / "out" / "final")
    for folder in (tmp_path / "out" / "checkpoint").glob("step-*"):
        state = json.loads((folder / "state.json").read_text())
        del state["settings"]["template_values"]
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "files.json").write_text(json.dumps(humanline.hashes(folder)))
    with pytest.raises(humanline.UserError, match=r"the run has --template-values \[\], not \['a=1'\]"):
        humanline.train(humanline.parse_config([*flags, "--resume", "latest", "--template-values", "a=1"]))
    assert humanline.train(humanline.parse_config([*flags, "--resume", "latest"])).config.steps == 3
