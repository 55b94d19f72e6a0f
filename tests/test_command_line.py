"""What a user types: flags, config files, the run's folder, and one clear line for everything that is wrong."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import ROOT, command, metrics, rows_of, write_jsonl

import humanline
from humanline import Config, UserError


def parse(flags: str) -> Config:
    return humanline.parse_config(flags.split())


# Configuration.

def test_humanline_switches_both_parts_and_each_part_is_one_flag():
    parts = lambda flags: (parse(flags).sync_k, parse(flags).perception)
    k = parse("").sync_k
    assert k > 0 and parts("") == (k, "clip") and parts("--no-humanline") == (0, "none")
    assert parts("--sync-k 0") == (0, "clip") and parts("--perception none") == (k, "none")
    assert parts("--no-humanline --sync-k 12") == (12, "none") and parts("--no-humanline --perception sample") == (0, "sample")
    assert parts("--sync-drift 0.2") == (0, "clip")


def test_defaults_fit_the_embedded_model_and_any_other():
    assert parse("").eval_data == "embedded:test" and parse("").lr > 1e-5
    other = parse("--model some/model --data some/data")
    assert (other.lr, other.steps, other.eval_data, other.sync_k) == (1e-6, None, None, 1)


def test_a_config_file_sets_defaults_and_flags_override_it(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('loss = "dpo"\nsync-k = 12\nhumanline = false\nlr = 1e-5\ndata = ["a.jsonl", "b.jsonl=2"]\n')
    config = parse(f"--config {path} --lr 3e-5 --humanline")
    assert (config.loss, config.sync_k, config.humanline, config.lr, config.data) == ("dpo", 12, True, 3e-5, ("a.jsonl", "b.jsonl=2"))


@pytest.mark.parametrize("flags, switch", [("", "--no-humanline"), ("--no-humanline", "--humanline"), ("--sync-drift 0.2", "--no-humanline"),
                                           ("--perception sample --sync-k 5", "--no-humanline")])
def test_the_switch_over_a_runs_config_file_is_the_other_variant(tmp_path, flags, switch):
    (tmp_path / "config.toml").write_text(humanline.to_toml(parse(flags)))
    other = parse(f"--config {tmp_path}/config.toml {switch}")
    assert dataclasses.replace(other, config=None) == parse(switch)
    kept = parse(f"--config {tmp_path}/config.toml {switch} --sync-k 7 --perception sample")
    assert (kept.sync_k, kept.perception) == (7, "sample")


def test_every_setting_survives_the_runs_config_file(tmp_path):
    odd = {bool: lambda v: not v, int: lambda v: v + 3, float: lambda v: v * 0.7 or 0.7, str: lambda v: v, tuple: lambda v: ("a b.jsonl", 'q"uote')}
    start = dataclasses.replace(parse("--steps 5 --limit 3 --max-length 9 --max-prompt-length 4"), system='say "no"\nthen \\ stop', prompt_template="é {prompt}")
    config = dataclasses.replace(start, **{f.name: odd[type(value)](value) for f in dataclasses.fields(start)
                                           if (value := getattr(start, f.name)) is not None and f.name not in ("log_eps_p", "top_p", "warmup")})
    (tmp_path / "config.toml").write_text(humanline.to_toml(config))
    assert humanline.parse_config(["--config", str(tmp_path / "config.toml")]) == dataclasses.replace(config, config=str(tmp_path / "config.toml"))


def test_the_runs_config_file_repeats_the_run(run, tmp_path):
    first = run("--loss kto --sync-k 2 --desirable-weight 1.1")
    again = tmp_path / "again"
    humanline.train(humanline.parse_config(["--config", str(first / "config.toml"), "--out", str(again)]))
    assert [line["loss"] for line in metrics(first)] == [line["loss"] for line in metrics(again)]


def test_every_flag_has_a_help_text_and_design_names_are_there():
    text = command("--help").stdout
    for flag in ("loss model data reward humanline no-humanline sync-k perception log-eps-p log-eps-r sample-every group-size steps batch-size sync-drift "
                 "lr seed out save-every eval-every max-new-tokens config resume ref compile").split():
        assert f"--{flag}" in text, flag
    source = Path(humanline.__file__).read_text().split("class Config:")[1].split("\n\n\nEMBEDDED_DEFAULTS")[0]
    for field in dataclasses.fields(Config):
        assert re.search(rf"\n    {field.name}: [^\n]*\n    \"\"\"", source), field.name


# What a run leaves behind.

@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
def test_a_run_leaves_config_metrics_and_a_hugging_face_folder(run, loss):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run(f"--loss {loss} --steps 4")
    assert {"config.toml", "metrics.jsonl", "final"} <= {path.name for path in folder.iterdir()}
    assert tomllib.loads((folder / "config.toml").read_text())["loss"] == loss
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    keys = {"loss", "lr", "grad_norm", "tokens", "step_seconds", "sample_seconds", "reward", "kl", "unclamped", "drift"}
    keys |= {"reward_margin"} if loss != "grpo" else set()
    assert all(keys <= line.keys() for line in lines)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder / "final"), AutoTokenizer.from_pretrained(folder / "final")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]


def test_the_default_folder_is_a_new_one_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = humanline.claim_folder(parse("--loss dpo"))
    assert first == Path("runs/dpo-humanline-offline")
    first.mkdir(parents=True)
    assert humanline.claim_folder(parse("--loss dpo")) == Path("runs/dpo-humanline-offline-2")
    assert humanline.claim_folder(parse("--no-humanline --sample-every 64")) == Path("runs/grpo-baseline-every-64")


# Bad input: one line, exit status 2, before any training, and nothing written.

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
GROUP = {"prompt": "a", "completions": ["b", "c"], "scores": [1, 0]}
BAD_FLAGS = [
    ("--sync-k -1", r"--sync-k is -1; it must be 0 or more"),
    ("--sync-k 1.5", r"--sync-k.*1\.5"),
    ("--sinc-k 3", r"--sinc-k.*--sync-k"),
    ("--loss ppo", r"'ppo'.*--loss.*grpo"),
    ("--lr", r"--lr"),
    ("--lr fast", r"--lr.*'fast'"),
    ("--lr 0", r"--lr is 0\.0; it must be above 0"),
    ("--lr nan", r"--lr is nan; it must be above 0"),
    ("--log-eps-p 2", r"--log-eps-p 2\.0 is not below --log-eps-r 1\.5"),
    ("--temperature 0", r"--temperature is 0\.0"),
    ("--top-p 1.5", r"--top-p is 1\.5; it must lie from"),
    ("--warmup 2", r"--warmup is 2\.0"),
    ("--steps 0", r"--steps is 0; it must be 1 or more"),
    ("--batch-size 0", r"--batch-size is 0"),
    ("--sample-every 1 --group-size 1", r"--group-size 1 leaves nothing to compare"),
    ("--prompt-template hello", r"--prompt-template has no \{prompt\}"),
    ("--resume latest", r"--resume latest .* name it with --out"),
    ("--resume nowhere", r"nowhere: not a whole checkpoint"),
    ("--config missing.toml", r"--config missing\.toml: no such file"),
    ("--data missing.jsonl", r"--data missing\.jsonl: no such file"),
    ("--data embedded:best", r"--data embedded:best: no such part; there are embedded:base"),
    ("--model no-such-folder", r"--model no-such-folder: .*; name a Hugging Face model, or a local folder"),
    ("--ref lookahead --sync-drift 0.1", r"--ref lookahead must know .* use --ref copy"),
    ("--ref lookahead --sync-alpha 0.5", r"--ref lookahead takes the policy .* use --ref copy"),
    ("--sync-alpha 1.5", r"--sync-alpha is 1.5; it must lie from 1e-09 to 1"),
    ("extra", r"extra"),
]
BAD_CONFIGS = [
    ("sync_q = 3\n", r"unknown key 'sync_q'; did you mean 'sync_k'"),
    ("sync_k = \n", r"not valid TOML"),
    ("lr = 'fast'\n", r"bad\.toml: .*--lr.*'fast'"),
    ("lr = [1, 2]\n", r"lr = \[1, 2\] must be a single value"),
    ("sync_k = -3\n", r"--sync-k is -3"),
]
BAD_ROWS = [  # (loss and flags, rows, complaint)
    ("dpo", [PAIR, {"prompt": "a", "chosen": "b"}], r"row 2: no 'rejected'; a pair needs it"),
    ("dpo", [PAIR, {"chosen": "b", "rejected": "c"}], r"row 2: no 'prompt', and 'chosen' and 'rejected' share no beginning"),
    ("dpo", [PAIR, dict(PAIR, prompt=" ")], r"row 2: 'prompt' is empty"),
    ("dpo", [PAIR, PAIR, dict(PAIR, rejected="")], r"row 3: 'rejected' is empty"),
    ("dpo", [{"text": "a"}], r"row 1: no 'prompt'; every row needs it"),
    ("dpo", [dict(GROUP, scores=[1, 1])], r"no pair to train on"),
    ("dpo", [{"prompt": "a", "completion": "b", "label": True}], r"labelled completions make no pairs or groups; use --loss kto"),
    ("grpo", [{"prompt": "a", "completion": "b", "label": True}], r"labelled completions make no pairs or groups"),
    ("kto", [{"prompt": "a", "completion": "b", "label": "yes"}], r"row 1: 'label' is 'yes'; it must be true or false"),
    ("kto", [{"prompt": "a", "completion": "b"}], r"row 1: no 'label'; a labelled completion needs it"),
    ("grpo", [GROUP, dict(GROUP, scores=[1, "high"])], r"row 2: 'scores' holds '.*high.*'; it must be a finite number"),
    ("grpo", [GROUP, dict(GROUP, scores=[1, None])], r"row 2: 'scores' holds None; it must be a finite number"),
    ("grpo", [GROUP, dict(GROUP, completions=["b"], scores=[1])], r"row 2: a group of 1; a scored group needs two"),
    ("grpo", [GROUP, dict(GROUP, scores=[1, 0, 1])], r"row 2: 'completions' and 'scores' must be lists of one length"),
    ("grpo", [{"prompt": "a", "answer": "b"}], r"prompts without completions; draw them with --sample-every 1"),
    ("grpo --sample-every 1", [{"prompt": "a"}], r"row 1: no 'answer'; --reward exact"),
    ("grpo", [dict(GROUP, prompt="p" * 100)], r"row 1: a prompt of 103 tokens .* exceed the model's 64 positions"),
    ("dpo", [dict(PAIR, prompt=[{"text": "a"}])], r"row 1: 'prompt' must be text or messages with a 'role' and a 'content'"),
    ("dpo", [dict(PAIR, chosen="b" * 100, rejected="c" * 100)], r"every row is over-long"),
    ("dpo", [], r"no rows|cannot be read|is it really json"),
]


def complaint(flags: list[str], tmp_path, capsys) -> str:
    """The one line that main prints; checks the status, and that nothing was written."""
    before = sorted(tmp_path.rglob("*"))
    assert humanline.main(flags) == 2
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if "warning" not in line]
    assert len(lines) == 1 and lines[0].startswith("humanline.py: error: "), shown.err
    assert sorted(tmp_path.rglob("*")) == before
    return lines[0]


@pytest.mark.parametrize("flags, expected", BAD_FLAGS, ids=[flags for flags, _ in BAD_FLAGS])
def test_a_bad_flag_is_one_line(tiny, data_files, tmp_path, capsys, monkeypatch, flags, expected):
    monkeypatch.chdir(tmp_path)
    start = [] if "--model" in flags else ["--model", tiny]
    start += [] if "--data" in flags else ["--data", data_files["groups"]]
    assert re.search(expected, complaint(start + flags.split(), tmp_path, capsys))


@pytest.mark.parametrize("text, expected", BAD_CONFIGS, ids=[text.strip() for text, _ in BAD_CONFIGS])
def test_a_bad_config_file_is_one_line(tmp_path, capsys, text, expected):
    (tmp_path / "bad.toml").write_text(text)
    assert re.search(expected, complaint(["--config", str(tmp_path / "bad.toml")], tmp_path, capsys))


@pytest.mark.parametrize("loss, rows, expected", BAD_ROWS, ids=[expected[:40] for _, _, expected in BAD_ROWS])
def test_a_bad_row_is_one_line_that_names_it(tiny, tmp_path, capsys, loss, rows, expected):
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = ["--model", tiny, "--data", path, "--out", str(tmp_path / "out"), "--max-new-tokens", "4", "--loss", *loss.split()]
    line = complaint(flags, tmp_path, capsys)
    assert re.search(expected, line) and "rows.jsonl" in line or "every row" in line or "no pair" in line or "--data" in line


@pytest.mark.parametrize("name, content, expected", [
    ("rows.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": \n', r"row 2: not JSON"),
    ("rows.jsonl", "[1, 2]\n", r"row 1: (not a JSON object|no 'prompt')"),
    ("rows.parquet", "prompt,answer\n", r"is it really parquet\?"),
    ("rows.csv", "\x00\x01\x02", r"csv|no 'prompt'"),
    ("rows.jsonl", "PAR1\x00\x00", r"row 1: not JSON"),
])
def test_a_file_that_is_not_what_its_ending_says_is_one_line(tiny, tmp_path, capsys, name, content, expected):
    (tmp_path / name).write_text(content)
    assert re.search(expected, complaint(["--model", tiny, "--data", str(tmp_path / name)], tmp_path, capsys))


def test_a_folder_that_holds_a_run_is_not_written_over(run, tiny, data_files, tmp_path, capsys):
    folder = run("--steps 2 --save-every 1")
    flags = ["--model", tiny, "--data", data_files["groups"], "--out", str(folder)]
    assert "holds a finished run" in complaint(flags, tmp_path, capsys)
    assert humanline.main(flags + ["--resume", "latest"]) == 0  # nothing to do
    assert "is finished already" in capsys.readouterr().out
    humanline.shutil.rmtree(folder / "final")
    assert "did not finish; go on with --resume latest" in complaint(flags, tmp_path, capsys)
    (tmp_path / "file").write_text("")
    assert "is a file" in complaint(flags[:-1] + [str(tmp_path / "file")], tmp_path, capsys)


def test_the_error_reaches_the_shell_as_one_line_and_status_2(tmp_path):
    done = command("--sync-k", "-1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr == "humanline.py: error: --sync-k is -1; it must be 0 or more\n"
    assert not list(tmp_path.iterdir())


def test_a_model_without_eos_or_with_another_head_is_refused(tiny, tmp_path, capsys, data_files):
    import shutil

    shutil.copytree(tiny, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "eos_token"}))
    line = complaint(["--model", str(tmp_path / "model"), "--data", data_files["groups"]], tmp_path, capsys)
    assert "no end-of-sequence token" in line


def test_a_nan_is_one_line_and_status_1(run, monkeypatch, capsys, tiny, data_files, tmp_path):
    monkeypatch.setattr(humanline, "forward_backward", lambda *_: dict(loss=float("nan"), tokens=1, drift=0.0))
    flags = ["--model", tiny, "--data", data_files["groups"], "--out", str(tmp_path / "out"), "--steps", "2", "--batch-size", "1"]
    assert humanline.main(flags) == 1
    assert re.fullmatch(r"humanline.py: stopped: step 1: loss nan.*there is no checkpoint.*groups.jsonl row \d+\n", capsys.readouterr().err)
