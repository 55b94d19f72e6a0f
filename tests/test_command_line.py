"""The command line: flags, config files, the run's folder, and a clear one-line message for every error."""

import dataclasses
import inspect
import itertools
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from conftest import ROOT, command, complaint, finished, metrics, short_run, write_jsonl
from packaging.requirements import Requirement

import humanline
from humanline import Config


def parse(flags: str) -> Config:
    return humanline.parse_config(flags.split())


# Configuration.

@pytest.mark.parametrize("flags, words", [
    ("", "GRPO, humanline"), ("--no-humanline", "GRPO, plain"),
    ("--positive-only", "GRPO, humanline on better completions alone"),
    ("--positive-only --no-humanline", "GRPO, plain on better completions alone"),
    ("--loss dpo", "DPO, humanline"), ("--loss dpo --positive-only", "DPO, plain on better completions alone"),
    ("--model x --data y --loss dpo --perception none", "DPO, humanline"),
    ("--model x --data y --loss kto --sync-k 0", "KTO, humanline")])
def test_a_run_is_named_after_its_method(flags, words):
    assert humanline.in_words(parse(flags)) == words


def test_the_settings_of_the_demo_apply_to_the_demo_only():
    other = parse("--model some/model --data some/data")
    settings = (other.lr, other.steps, other.eval_data, other.sync_k, other.save_every)
    assert settings == (1e-6, None, None, 24, 64)


def test_a_tilde_in_out_means_the_home_folder(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    run("--steps 1", out="~/mine")
    assert (tmp_path / "mine" / "final").is_dir() and not Path("~").exists()


@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_a_config_file_sets_defaults_and_flags_override_it(tmp_path, form):
    path = tmp_path / "lr=1e-4.toml"
    path.write_text('\ufeffloss = "dpo"\nsync-k = 12\nhumanline = false\nlr = 1e-5\n'
                    'data = ["a.jsonl", "b.jsonl"]\n')
    config = parse(form.format(path) + " --lr 3e-5 --humanline")
    assert (config.loss, config.sync_k, config.humanline, config.lr) == ("dpo", 12, True, 3e-5)
    assert config.data == ("a.jsonl", "b.jsonl")


@pytest.mark.parametrize("flags, lr, sync_k", [
    ("", 1e-5, 12), ("--no-humanline", 2e-5, 0), ("--sample-every 0", 1e-5, 12), ("--sample-every=4", 3e-5, 6),
    ("--no_humanline --sample-every 4", 3e-5, 0), ("--sample-every 4 --lr 7e-5", 7e-5, 6)])
def test_a_table_of_a_config_file_counts_if_its_flag_is_typed(tmp_path, flags, lr, sync_k):
    (tmp_path / "a.toml").write_text("sync_k = 12\nlr = 1e-5\n[no-humanline]\nlr = 2e-5\n"
                                     "[sample-every]\nlr = 3e-5\nsync_k = 6\n")
    config = parse(f"--config {tmp_path}/a.toml {flags}")
    assert (config.lr, config.sync_k) == (lr, sync_k)


@pytest.mark.parametrize("loss", humanline.LOSSES)
def test_every_setting_survives_the_runs_config_file(tmp_path, loss):
    special = dict(
        loss=loss, model="some/model", data=("a b.jsonl", 'q"uo'), eval_data="c.jsonl", reward="b.py:f",
        perception="sample", dtype="mixed", average="constant", sampler="a.py:f", top_p=0.5, warmup=0.5,
        system='emoji 🙂, "quote" \\ \n\t 汉字', prompt_template="é {prompt}", humanline=False,
        log_eps_p=-float("inf"), log_eps_r=float("inf"))
    change = {bool: lambda value: not value, int: lambda value: (value or 0) + 3,
              float: lambda value: (value or 0) * 0.7 + 0.1, str: lambda value: "text"}
    of_losses = {name for entry in humanline.LOSSES.values() for name in entry.settings.split()}
    left = {"config", "out", "resume"} | of_losses - set(humanline.LOSSES[loss].settings.split())
    special = {name: value for name, value in special.items() if name not in left}
    for field in dataclasses.fields(Config):
        if field.name not in left | special.keys():
            kind, *_ = get_args(field.type) or [field.type]
            special[field.name] = change[kind](field.default)
    config = Config(**special)
    assert config.given.keys() | {"loss"} == {field.name for field in dataclasses.fields(Config)} - left
    (tmp_path / "config.toml").write_text(humanline.to_toml(config), encoding="utf-8")
    assert dataclasses.replace(parse(f"--config {tmp_path}/config.toml"), config=None) == config


def test_a_config_made_in_python_is_checked_like_flags():
    with pytest.raises(humanline.UserError, match="--loss dpo does not use --kl-beta"):
        Config(loss="dpo", kl_beta=0.1)
    wider = dataclasses.replace(Config(), epsilon=0.4)
    assert wider == Config(epsilon=0.4)


def test_the_config_file_of_a_run_holds_only_what_was_set_so_that_another_loss_gets_its_own_defaults(
        tmp_path):
    (tmp_path / "config.toml").write_text(humanline.to_toml(parse("--model m --data d --lr 3e-4")))
    lines = (tmp_path / "config.toml").read_text().splitlines()
    assert lines[1:] == ['model = "m"', 'data = ["d"]', "lr = 0.0003"]
    assert parse(f"--config {tmp_path}/config.toml --loss kto").batch_size == 64


def test_help_has_a_section_for_each_subject_with_whole_sentences_about_every_flag():
    shown = command("--help", COLUMNS="80").stdout
    titles = re.findall(r"╭─ (\w+) options ─", shown)
    assert titles == ["model", "data", "method", "objective", "rollout", "loop", "output"]
    squeezed, source = " ".join(shown.replace("│", " ").split()), inspect.getsource(Config)
    for field in dataclasses.fields(Config):
        beside = rf"\n    {field.name}: [^\n]*  # (?P<beside>\S[^\n]*\.)\n"
        below = rf"\n    {field.name}: [^\n#]*\n    r?\"\"\"(?P<below>[^\"]*)\"\"\"\n"
        stands = re.search(rf"{beside}|{below}", source)
        assert stands, f"{field.name} has no help beside or under it"
        words = " ".join((stands["beside"] or stands["below"]).split())
        assert f"{words} (default: " in squeezed, f"the help of {field.name} is not shown"
    under_flag = "│" + 22 * " "
    # A line ends only where the next word does not fit.
    for line, following in itertools.pairwise(shown.splitlines()):
        if line.startswith(under_flag) and following.startswith(under_flag):
            assert len(line.rstrip("│ ")) + 1 + len(following.strip("│ ").split()[0]) > 78, line


@pytest.mark.parametrize("flags, words", [
    ("--sync-k 12", "GRPO, humanline; sync_k 12, perception clip"),
    ("--loss kto --no-humanline", "KTO, plain; sync_k 0, perception none")])
def test_a_run_says_what_its_objective_is(run, capsys, flags, words):
    run(f"--steps 1 {flags}")
    assert f"objective   {words}\n" in capsys.readouterr().out


# What a run leaves behind.

@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
def test_a_run_writes_its_settings_its_metrics_and_a_model(run, loss):
    folder = run(f"--loss {loss} --steps 4")
    assert {"config.toml", "metrics.jsonl", "final"} == {path.name for path in folder.iterdir()}
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    keys = {"loss", "lr", "grad_norm", "tokens", "step_seconds", "sample_seconds", "reward", "kl",
            "unclamped", "drift"}
    assert all(keys <= line.keys() for line in lines)
    implicit = {"reward_chosen", "reward_rejected"}  # KTO: a batch may have examples of one kind alone
    assert all(bool(implicit & line.keys()) == (loss != "grpo") for line in lines)


# Bad input: one line, exit status 2, before any training, and nothing written.

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
GROUP = {"prompt": "a", "completions": ["b", "c"], "scores": [1, 0]}
BAD_FLAGS = [
    ("--sync-k -1", r"--sync-k is -1; it must be from 0 to 1e\+12"),
    ("--sync-k 1.5", r"--sync-k.*1\.5"),
    ("--sinc-k 3", r": Unrecognized options: --sinc-k, 3; see --help$"),
    ("--loss dpo --mask-truncated", r"--loss dpo does not use --mask-truncated; omit it"),
    ("--mask-truncated --perception sample", r"--mask-truncated needs --perception clip or none"),
    ("--loss sft", r"--loss sft: choose one of dpo, .*grpo.*, kto"),
    ("--kl-beta 0.1 --loss dpo", r"--loss dpo does not use --kl-beta; omit it"),
    ("--lr", r"--lr"),
    ("--lr fast", r"--lr: no type matching .* could be instantiated from \['fast'\]\.; see --help$"),
    ("--lr nan", r"--lr is nan; it must be from 1e-12 to"),
    ("--log-eps-p 2", r"--log-eps-p is 2\.0; it must be from -inf to 0"),
    ("--temperature 1e-300", r"--temperature is 1e-300; it must be from 0\.001 to 1000"),
    ("--top-p 1.5", r"--top-p is 1\.5; it must be from"),
    ("--batch-size 99999999999", r"--batch-size 99999999999: a step needs"),
    ("--sample-every 1 --group-size 1", r"--group-size must be at least 2"),
    ("--prompt-template hello", r"--prompt-template must contain \{prompt\}"),
    ("--sampler configs/external.py:vllm", r"--sampler needs --sample-every or --eval-data"),
    ("--temperature 0.7", r"--temperature needs --sample-every or --eval-data"),
    ("--eval-samples 2", r"--eval-samples needs --eval-data"),
    ("--resume latest", r"--resume latest .* pass --out"),
    ("--resume nowhere", r"nowhere: not a complete checkpoint"),
    ("--config missing.toml", r"--config missing\.toml: .*No such file"),
    ("--data missing.jsonl", r"--data missing\.jsonl: .*No such file"),
    ("--model no-such-folder", r"--model no-such-folder: .*; pass a Hugging Face model or a folder"),
    ("--no-humanline --sync-k 7", r"--sync-k needs --humanline and a loss with a reference"),
    ("--no-humanline --log-eps-p=-2", r"--log-eps-p needs --humanline and --perception clip"),
    ("--loss dpo --positive-only --sync-k 7", r"--sync-k needs --humanline and a loss with a reference"),
    ("--loss dpo --positive-only --beta 3", r"--beta needs a reference, which DPO with --positive-only lacks"),
    ("--perception none --log-eps-r 1", r"--log-eps-r needs --humanline and --perception clip"),
    ("--out /dev/null/x", r"--out /dev/null/x: .*; choose another folder"),
    ("--template-values {enable_thinking:false}",
     r"--template-values: .*; pass JSON, such as '\{\"enable_thi"),
    ("--template-values [1]", r"--template-values: .*; pass JSON"),
    ("--sample-every 1 --max-new-tokens 64",
     r"no row is short enough: .* 64 \(the model has 64\); .* --max-new-tokens"),
    ("--max-length 30 --max-prompt-length 3",
     r"may have 3 tokens, and with its completion 30 \(the model has 64"),
    ("--shard", r"--shard needs several ranks; use torchrun"),
    ("--data x --data y", r"--data appears twice; write --data FIRST SECOND"),
    ("--data=x --data=y", r"--data appears twice; write --data FIRST SECOND"),
    ("--no_humanline --sync_k=4", r"--sync-k needs --humanline"),
    ("extra", r"extra"),
]
BAD_CONFIGS = [
    ("sync_q = 3\n", r"Unrecognized options: --sync-q=3; see --help$"),
    ("sync_k = \n", r"line 1, column 10.*valid TOML"),
    ("lr = 'fast'\n", r"--lr.*'fast'"),
    ("lr = [1, 2]\n", r"--lr: no type matching .* could be instantiated from \['\[1, 2\]'\]"),
    ("sync_k = -3\n", r"--sync-k is -3"),
    ("[plain]\nlr = 1e-5\n", r"name the table \[plain\] after a flag, such as \[no-humanline\]"),
]
BAD_ROWS = [  # (loss and flags, rows, complaint)
    ("dpo", [PAIR, {"prompt": "a", "chosen": "b"}], r"row 2 cannot be read: no 'rejected'"),
    ("dpo", [PAIR, dict(PAIR, prompt=" ")], r"row 2: the text of the user is empty"),
    ("dpo", [{"text": "a"}], r"row 1: no 'prompt'; every row needs one"),
    ("dpo", [dict(GROUP, scores=[1, 1])], r"no row has both a better and a worse completion"),
    ("grpo", [dict(GROUP, scores=[1, 1])], r"no row has both a better and a worse completion"),
    ("grpo", [{"prompt": "a", "completion": "b", "label": True}],
     r"labelled completions do not form pairs or groups; use --loss kto"),
    ("kto", [{"prompt": "a", "completion": "b", "label": "yes"}], r"row 1: a score or label is 'yes'"),
    ("grpo", [GROUP, dict(GROUP, scores=[1, "high"])],
     r"row 2: a score or label is 'high'; it must be a finite number"),
    ("kto", [dict(prompt="a", completion="b", reward=1, tokens=[5, -3], logps=[-1, -1])],
     r"row 1: 'tokens' and 'logps' must be token ids and as many log-probs"),
    ("grpo", [GROUP, dict(GROUP, scores=[1, 0, 1])], r"row 2: 2 completions have 3 scores"),
    ("grpo", [dict(GROUP, scores=[1, float("nan")])], r"row 1: a score or label is nan"),
    ("grpo", [dict(GROUP, prompt=[dict(role="user", content=["a"])])],
     r"row 1: the content of a message is \['a'\]; it must be a string"),
    ("grpo", [{"prompt": "a", "answer": "b"}],
     r"row 1: no completions with rewards or labels among its columns prompt, answer; rename them as in the"),
    ("grpo --sample-every 1", [{"prompt": "a"}], r"row 1: no answer; --reward exact"),
    ("grpo", [dict(GROUP, prompt="p" * 100)], r"no row is short enough: a prompt may have 64 tokens"),
    ("dpo", [], r"no rows"),
]


@pytest.mark.parametrize("flags, expected", BAD_FLAGS, ids=[flags for flags, _ in BAD_FLAGS])
def test_a_bad_flag_gives_a_one_line_error(tiny, data_files, tmp_path, capsys, monkeypatch, flags, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    start = [] if "--model" in flags else ["--model", tiny]
    start += [] if "--data" in flags else ["--data", data_files["groups"]]
    start += [] if "--batch-size" in flags else ["--batch-size", "4"]
    assert re.search(expected, complaint(start + flags.split(), tmp_path, capsys))


def test_a_process_that_torchrun_did_not_start_is_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")  # as some job scripts do
    monkeypatch.delenv("RANK", raising=False)
    humanline.join_ranks()
    assert humanline.WORLD_SIZE == 1


def test_a_reason_of_several_lines_is_given_whole():
    with pytest.raises(humanline.UserError, match="^x: wrong shapes: a has 3; fix it$"):
        with humanline.explained("x", "fix it"):
            raise ValueError("wrong shapes:\n\ta has 3.")


@pytest.mark.parametrize("text, expected", BAD_CONFIGS, ids=[text.strip() for text, _ in BAD_CONFIGS])
def test_a_bad_config_file_gives_a_one_line_error(tmp_path, capsys, text, expected):
    (tmp_path / "bad.toml").write_text(text)
    assert re.search(expected, complaint(["--config", str(tmp_path / "bad.toml")], tmp_path, capsys))


@pytest.mark.parametrize("loss, rows, expected", BAD_ROWS, ids=[expected[:40] for _, _, expected in BAD_ROWS])
def test_a_bad_row_gives_a_one_line_error_that_names_it(tiny, tmp_path, capsys, loss, rows, expected):
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = f"--model {tiny} --data {path} --out {tmp_path / 'out'} --max-new-tokens 4 --loss {loss}".split()
    line = complaint(flags, tmp_path, capsys)
    assert re.search(expected, line) and ("rows.jsonl" in line or "--data: " in line)


@pytest.mark.parametrize("name, content, expected", [
    ("rows.jsonl", b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": \n', r"row 2: not JSON"),
    ("rows.jsonl", b"[1, 2]\n", r"row 1 cannot be read"),
    ("rows.jsonl", b"\xff\xfe\xfa\n", r"row 1: not JSON"),
    ("rows.parquet", b"prompt,answer\n", r"rows\.parquet: "),
    ("rows.csv", b"x", r"rows\.csv is no \.jsonl, \.json or \.parquet file; write the data with"),
])
def test_a_file_whose_content_does_not_match_its_ending_gives_a_one_line_error(
        tiny, tmp_path, capsys, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert re.search(expected, complaint(["--model", tiny, "--data", str(tmp_path / name)], tmp_path, capsys))


def test_an_error_reaches_the_shell_as_one_line_and_exit_status_2(tmp_path):
    done = command("--sync-k", "-1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "humanline.py: error: --sync-k is -1; it must be from 0 to 1e+12\n"
    assert not list(tmp_path.iterdir())


# The run's folder.

def test_without_out_the_folder_is_named_after_the_loss_and_the_time(tiny, data_files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    humanline.train(parse(f"--model {tiny} --data {data_files['pairs']} --loss dpo --steps 1 --batch-size 4"))
    [folder] = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"dpo-\d{4}-\d{6}-\d+", folder.name) and (folder / "final").is_dir()


def test_a_folder_that_holds_a_run_is_not_overwritten(run, tiny, data_files, tmp_path, capsys):
    folder = run("--steps 2 --save-every 1")
    flags = ["--model", tiny, "--data", data_files["groups"], "--out", str(folder)]
    assert "holds a finished run" in complaint(flags, tmp_path, capsys)
    assert humanline.main(flags + ["--resume", "latest"]) == 0  # nothing to do
    assert "is already finished" in capsys.readouterr().err
    shutil.rmtree(folder / "final")
    assert "an unfinished run; pass --resume latest" in complaint(flags, tmp_path, capsys)


@pytest.mark.parametrize("name", ["config.toml", "rollouts.jsonl", "eval_rollouts.jsonl", "metrics.jsonl",
                                  "checkpoint"])
@pytest.mark.parametrize("more", ["", "--resume latest"])
def test_a_folder_with_other_files_is_refused_and_left_unchanged(
        tiny, data_files, tmp_path, capsys, name, more):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("lr = 1e-3  # mine\n")
    flags = f"--model {tiny} --data {data_files['groups']} --out {tmp_path / 'out'} {more}".split()
    assert f"{name} there was not written by this version of humanline.py;" in complaint(
        flags, tmp_path, capsys)
    assert (tmp_path / "out" / name).read_text() == "lr = 1e-3  # mine\n"


@pytest.mark.parametrize("moment", ["load_policy", "lock"])
def test_two_runs_in_one_folder_do_not_overlap(tiny, data_files, tmp_path, monkeypatch, capsys, moment):
    """The second run starts while the first one is loading, and again when it holds the lock."""
    flags = (f"--model {tiny} --data {data_files['groups']} --out {tmp_path / 'out'} --steps 1 "
             "--batch-size 4").split()
    original, others = getattr(humanline, moment), []

    def beside_another(*args):
        monkeypatch.setattr(humanline, moment, original)
        made = original(*args)
        others.append(humanline.main(flags))
        return made

    monkeypatch.setattr(humanline, moment, beside_another)
    status = humanline.main(flags)
    assert sorted([status, *others]) == [0, 2] and len(metrics(tmp_path / "out")) == 1
    expected = {"load_policy": "holds a finished run", "lock": "another process is training in it"}[moment]
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("out", ["file", "file/inside", "x" * 300])
def test_an_impossible_folder_gives_a_one_line_error(tiny, data_files, tmp_path, capsys, out):
    (tmp_path / "file").write_text("")
    flags = (f"--model {tiny} --data {data_files['groups']} --steps 1 --batch-size 4 "
             f"--out {tmp_path / out}").split()
    assert humanline.main(flags) in (1, 2)
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
    assert len(lines) == 1 and str(tmp_path) in lines[0]


def test_a_run_that_was_not_evaluated_before_its_first_step_still_prints_its_last_line():
    made = SimpleNamespace(config=parse("--model m --data d"), out=Path("out"), stopped_at=None, started=0,
                           batches=SimpleNamespace(steps=7), latest=dict(accuracy=0.5, greedy=0.6))
    assert humanline.last_line(made).startswith("GRPO, humanline, 7 steps in")


def test_held_out_prompts_are_shown_a_line_a_completion_one_that_changed_first(tmp_path):
    def line(step: int, row: int) -> dict:
        text = "a line\n" * 99 if row == 2 and step == 7 else "b\n"
        prompt = [dict(role="user", content=f"row {row}")]
        return dict(step=step, row=row, prompt=prompt, completion=text, reward=step / 3)

    counts = {0: 2, 3: 2, 7: 3}  # --eval-samples, which a resume may change
    write_jsonl(tmp_path / "eval_rollouts.jsonl",
                [line(step, row) for step in counts for row in range(4) for _ in range(counts[step])])
    run = SimpleNamespace(out=tmp_path, batches=SimpleNamespace(steps=7))
    shown = list(humanline.changes(run))
    long = repr("a line\n" * 99)[:85]
    assert shown[:3] == ["prompt  'row 2'", "before  'b\\n'  reward 0", f"after   {long}  reward 2.33"]
    assert shown[3::3] == ["prompt  'row 0'", "prompt  'row 1'"] and len(shown) == 9
    run.batches.steps = 9  # it was stopped before its last step
    assert list(humanline.changes(run)) == []


# The file alone.

@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """alone(FLAGS) runs a copy of humanline.py in a folder without our other files."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(ROOT / "humanline.py", folder)

    def run(*flags: str) -> subprocess.CompletedProcess:
        return finished("humanline.py", *flags, cwd=folder)

    run.folder = folder
    return run


def test_the_file_alone_explains_its_flags(alone):
    done = alone("--help")
    assert done.returncode == 0 and "--sync-k" in done.stdout and not done.stderr


@pytest.mark.parametrize("data, more", [("pairs", "--loss dpo"), ("prompts", "--sample-every 1")])
def test_the_file_alone_trains_offline_and_online(alone, tiny, data_files, data, more):
    done = alone(*short_run(tiny, data_files[data], more), "--out", data)
    assert done.returncode == 0, done.stderr
    assert len(metrics(alone.folder / data)) == 3
    assert (alone.folder / data / "final" / "model.safetensors").exists()


MOODS = """
import os, subprocess, sys, time
import neighbour

def mood(prompts, completions, rows, good):
    print("rewarding")
    subprocess.run(["cat"])  # reads its input to the end, which comes at once
    for row in rows:
        if row["mood"] == "hang": time.sleep(1000)
        if row["mood"] == "exit": sys.exit(3)
        if row["mood"] == "crash": os.abort()
        if row["mood"] == "raise": raise ValueError("no")
    return [float("nan") if row["mood"] == "nan" else neighbour.value + good for row in rows]
"""


def test_with_the_file_alone_no_reward_stops_a_run(alone, tiny):
    (alone.folder / "sub").mkdir()
    (alone.folder / "sub" / "neighbour.py").write_text("value = 1")
    (alone.folder / "sub" / "moods.py").write_text(MOODS)
    # The longest prompt is rewarded first: failures in a row may take three seconds, and more if it is busy.
    moods = {"a prompt": "good"} | {mood: mood for mood in ("hang", "exit", "crash", "raise", "nan")}
    rows = [dict(prompt=prompt, mood=mood) for prompt, mood in moods.items()]
    data = write_jsonl(alone.folder / "rows.jsonl", rows)
    done = alone("--model", tiny, "--data", data,
                 *("--sample-every 1 --steps 1 --batch-size 6 --group-size 2 "
                 "--max-new-tokens 3 --reward sub/moods.py:mood --reward-seconds 1 --out moods").split(),
                 "--reward-args", '{"good": 5}')
    assert done.returncode == 0, done.stderr
    [line] = metrics(alone.folder / "moods")
    assert "10 of 12 samples failed and count as 0" in done.stderr
    assert line["reward"] == pytest.approx(1.0)  # 6 for 2 samples of 12, else 0


def test_the_file_alone_says_what_the_math_reward_needs(alone, tiny, data_files):
    done = alone(*short_run(tiny, data_files["prompts"], "--sample-every 1 --reward math"), "--out", "math")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (alone.folder / "math").exists()
    assert re.search(r"error: --reward math: No such file: .*configs/math_reward\.py; .*, or copy it there",
                     done.stderr)


def test_the_inline_requirements_are_those_of_requirements_txt():
    block = re.search(r"^# /// script\n(.*?)^# ///$", (ROOT / "humanline.py").read_text(),
                      re.DOTALL | re.MULTILINE)
    script = tomllib.loads(re.sub("^# ", "", block[1], flags=re.MULTILINE))
    needed = (ROOT / "requirements.txt").read_text().partition("\n#")[0].splitlines()
    needed = [line.partition("  #")[0] for line in needed]
    (torch_range, *others), (tested, *needed) = script["dependencies"], needed
    assert others == needed and script["requires-python"] == ">=3.11"
    assert Requirement(torch_range).specifier.contains(tested.removeprefix("torch=="))
