"""What a user types: flags, config files, the run's folder, and one clear line for everything that is wrong."""

import contextlib
import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import ROOT, command, metrics, same_weights, write_jsonl

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
    assert parts("--no-humanline --sync-k 12") == (12, "none")
    assert parts("--no-humanline --perception sample") == (0, "sample")
    assert parts("--sync-drift 0.2") == (0, "clip")


def test_defaults_fit_the_embedded_model_and_any_other():
    assert parse("").eval_data == "embedded:test" and parse("").lr > 1e-5
    other = parse("--model some/model --data some/data")
    assert (other.lr, other.steps, other.eval_data, other.sync_k) == (1e-6, None, None, 1)


def test_a_config_file_sets_defaults_and_flags_override_it(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('loss = "dpo"\nsync-k = 12\nhumanline = false\nlr = 1e-5\ndata = ["a.jsonl", "b.jsonl=2"]\n')
    config = parse(f"--config {path} --lr 3e-5 --humanline")
    assert (config.loss, config.sync_k, config.humanline, config.lr) == ("dpo", 12, True, 3e-5)
    assert config.data == ("a.jsonl", "b.jsonl=2")


@pytest.mark.parametrize("flags, switch", [
    ("", "--no-humanline"), ("--no-humanline", "--humanline"), ("--sync-drift 0.2", "--no-humanline"),
    ("--perception sample --sync-k 5", "--no-humanline")])
def test_the_switch_over_a_runs_config_file_is_the_other_variant(tmp_path, flags, switch):
    (tmp_path / "config.toml").write_text(humanline.to_toml(parse(flags)))
    other = parse(f"--config {tmp_path}/config.toml {switch}")
    assert dataclasses.replace(other, config=None) == parse(switch)
    typed = parse(f"--config {tmp_path}/config.toml {switch} --sync-k 7 --perception sample")
    assert (typed.sync_k, typed.perception) == (7, "sample")


def test_every_setting_survives_the_runs_config_file(tmp_path):
    changed = {bool: lambda v: not v, int: lambda v: v + 3, float: lambda v: v * 0.7 or 0.7, str: lambda v: v,
               tuple: lambda v: ("a b.jsonl", 'q"uote')}
    start = dataclasses.replace(parse("--steps 5 --limit 3 --max-length 9 --max-prompt-length 4"),
                                system='say "no"\nthen \\ stop', prompt_template="é {prompt}")
    settings = {name: value for name, value in vars(start).items() if value is not None}
    # What the changes would put out of bounds; and adapters, which have a test of their own.
    for name in ("log_eps_p", "top_p", "warmup", "lora", "lora_alpha", "lora_targets", "merge"):
        del settings[name]
    config = dataclasses.replace(start, **{name: changed[type(value)](value) for name, value in settings.items()})
    config.kl_beta, config.reward, config.sampler = 0.7, ("exact", "a b.py:f=0.5"), "engine.py:draw"
    file = tmp_path / "config.toml"
    file.write_text(humanline.to_toml(config))
    assert humanline.parse_config(["--config", str(file)]) == dataclasses.replace(config, config=str(file))


def test_the_runs_config_file_holds_what_was_typed_so_that_another_model_or_loss_has_its_own_defaults(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(humanline.to_toml(parse("--lr 3e-4 --stale drop")))
    other = parse(f"--config {file} --model some/model --data some/data")
    plain = parse("--model some/model --data some/data --lr 3e-4 --stale drop")
    assert dataclasses.replace(other, config=None) == plain
    assert parse(f"--config {file} --loss kto").batch_size == 256 != parse("").batch_size
    assert "\n# batch_size = 32\n" in file.read_text() and "\nlr = 0.0003\n" in file.read_text()
    file.write_text("untyped = 3\n")
    with pytest.raises(humanline.UserError, match="unknown key 'untyped'"):
        parse(f"--config {file}")


def test_the_runs_config_file_repeats_the_run(run, tmp_path):
    first = run("--loss kto --sync-k 2 --desirable-weight 1.1")
    again = tmp_path / "again"
    humanline.train(humanline.parse_config(["--config", str(first / "config.toml"), "--out", str(again)]))
    assert [line["loss"] for line in metrics(first)] == [line["loss"] for line in metrics(again)]


def test_every_flag_has_a_help_text_and_design_names_are_there():
    text = command("--help", COLUMNS="200").stdout
    for flag in ("loss model data reward humanline no-humanline sync-k perception log-eps-p log-eps-r sample-every "
                 "group-size steps batch-size sync-drift lr seed out save-every eval-every max-new-tokens config "
                 "resume ref compile").split():
        assert f"--{flag}" in text, flag
    squeezed = re.sub(r"[│\s]", "", text)
    source = inspect.getsource(Config)
    for field in (field for field in dataclasses.fields(Config) if field.name != "untyped"):
        beside = rf"\n    {field.name}: [^\n]*  # (?P<beside>\S[^\n]*\.)\n"
        below = rf"\n    {field.name}: [^\n#]*\n    \"\"\"(?P<below>[^\"]*)\"\"\"\n"
        stands = re.search(rf"{beside}|{below}", source)
        assert stands, f"{field.name} has no help beside or under it"
        words = (stands["beside"] or stands["below"]).replace("\\\\", "\\")  # the source's \\\\ is a \\ to read
        assert re.sub(r"\s", "", words) in squeezed, f"the help of {field.name} is not shown"


# The three policies: the old policy drew the rollouts, the reference is what the log-ratio is taken to.

@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
@pytest.mark.parametrize("flags, anchor", [
    ("--sync-k 12", "the reference is synced every 12 steps"),
    ("--sync-k 12 --sample-every 1", "the reference is synced every 12 steps"),
    ("--sync-drift 0.5", "the reference is synced when the drift passes 0.5"),
    ("--no-humanline", "the reference is the initial policy"),
    ("--sync-k 0", "the reference is the initial policy"),
    ("--no-humanline --ref copy", "the reference is the initial policy"),
    ("--no-humanline --sample-every 1", "the reference is the old policy, which drew the rollouts"),
    ("--no-humanline --sample-every 2", "the reference is the old policy, which drew the rollouts"),
    ("--no-humanline --sample-every 2 --ref copy", "the reference is the old policy, which drew the rollouts"),
])
def test_a_run_calls_its_reference_by_the_right_name(run, capsys, loss, flags, anchor):
    if loss == "grpo" and "old policy" in anchor:  # published GRPO has a ratio to one policy and a KL to another
        flags += " --kl-beta 0.1"
        anchor = "the ratio is to the old policy, which drew the rollouts, the KL to the initial policy"
    folder = run(f"--loss {loss} --steps 2 {flags}")
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("objective ")]
    kind = "copy" if "copy" in flags or "drift" in flags or "--sync-k 12 --sample-every 1" in flags else "lookahead"
    assert line.startswith(f"objective   {loss}; {anchor} (by {kind}); perception: ")
    assert f"; {anchor}; the log-ratio was perceived through" in (folder / "final" / "README.md").read_text()


def test_the_name_of_the_reference_is_true(run, varied, monkeypatch):
    """Where the log-ratios are exactly 0, the reference is the policy itself."""
    taken = {}

    def note(policy, batch, config, forward_backward=humanline.forward_backward):
        report = forward_backward(policy, batch, config)
        taken[config.sample_every, config.sync_k].append(report["drift"])
        return report

    monkeypatch.setattr(humanline, "forward_backward", note)
    for sample_every, sync_k in ((0, 0), (0, 2), (1, 0), (2, 0)):
        taken[sample_every, sync_k] = []
        run(f"--steps 4 --no-humanline --sync-k {sync_k} --sample-every {sample_every} --reward {varied}")
    zero = {key: [drift < 1e-6 for drift in drifts] for key, drifts in taken.items()}
    assert zero[0, 0] == [True, False, False, False]  # the initial policy
    assert zero[0, 2] == [True, False, False, False]  # the sync after step 2 is to the policy of before that step
    assert zero[1, 0] == [True, True, True, True]  # the old policy, which is the policy itself
    assert zero[2, 0] == [True, False, True, False]  # the old policy, which drew at steps 1 and 3


def test_no_text_says_that_an_online_reference_is_fixed_or_never_synced(run, capsys):
    for loss in humanline.LOSSES:
        run(f"--loss {loss} --steps 2 --no-humanline --sample-every 2")
    shown = capsys.readouterr()
    online = [path for path in (ROOT / "configs").glob("*.toml") if re.search("online|every", path.name)]
    files = [ROOT / "README.md", ROOT / "humanline.py", *online]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    texts |= {"help": command("--help", COLUMNS="200").stdout, "messages": shown.out + shown.err}
    assert len(texts) > 8 and "the old policy" in texts["messages"]
    for name, text in texts.items():
        words = " ".join(text.split()).lower()
        for wrong in ("sync never", "synced never", "never synced", "fixed reference", "reference is fixed"):
            assert wrong not in words, (name, wrong)


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
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    chat = [{"role": "user", "content": "1+1="}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]


def test_the_default_folder_is_a_new_one_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as stack:
        claim = lambda flags: str(humanline.claim_out_folder(parse(flags), stack))
        assert claim("--loss dpo") == "runs/dpo-humanline-offline"
        assert claim("--loss dpo") == "runs/dpo-humanline-offline-2"
        assert claim("--no-humanline --sample-every 64") == "runs/grpo-baseline-every-64"
    assert not list(tmp_path.iterdir())  # as nothing was written into them


# Bad input: one line, exit status 2, before any training, and nothing written.

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
GROUP = {"prompt": "a", "completions": ["b", "c"], "scores": [1, 0]}
BAD_FLAGS = [
    ("--sync-k -1", r"--sync-k is -1; it must be 0 or more"),
    ("--sync-k 1.5", r"--sync-k.*1\.5"),
    ("--sinc-k 3", r"--sinc-k, 3; did you mean --sync-k\?; see --help$"),  # without that flag's own help
    ("--loss ppo", r"--loss ppo: did you mean 'dpo'\?"),
    ("--loss zpo", r"--loss zpo: did you mean 'dpo'\?"),
    ("--loss grop", r"--loss grop: did you mean 'grpo'\?"),
    ("--loss sft", r"--loss sft: known: dpo, grpo, kto"),
    ("--kl-beta -1", r"--kl-beta is -1\.0; it must be 0 or more"),
    ("--kl-beta 0.1 --loss dpo", r"--kl-beta 0\.1: only GRPO has a KL term; leave it out"),
    ("--kl-beta 0.1 --loss kto", r"--kl-beta 0\.1: only GRPO has a KL term; leave it out"),
    ("--kl-beta 0.1 --loss dpo --sample-every 4", r"--kl-beta 0\.1: only GRPO has a KL term"),
    ("--lr", r"--lr"),
    ("--lr fast", r"--lr: could not convert string to float: 'fast'; see --help$"),
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
    ("--config missing.toml", r"--config missing\.toml: .*No such file"),
    ("--data missing.jsonl", r"--data missing\.jsonl: no such file"),
    ("--data embedded:best", r"--data embedded:best: no such part; there are embedded:base"),
    ("--model no-such-folder", r"--model no-such-folder: .*; name a Hugging Face model or a folder"),
    ("--ref lookahead --sync-drift 0.1", r"--ref lookahead must know .* use --ref copy"),
    ("--ref lookahead --sync-alpha 0.5", r"--ref lookahead takes the policy .* use --ref copy"),
    ("--sync-alpha 1.5", r"--sync-alpha is 1.5; it must lie from 1e-09 to 1"),
    ("extra", r"extra"),
]
BAD_CONFIGS = [
    ("sync_q = 3\n", r"unknown key 'sync_q'; did you mean 'sync_k'"),
    ("sync_k = \n", r"line 1, column 10.*valid TOML"),
    ("lr = 'fast'\n", r"bad\.toml: .*--lr.*'fast'"),
    ("lr = [1, 2]\n", r"lr = \[1, 2\] must be a single value"),
    ("sync_k = -3\n", r"--sync-k is -3"),
]
BAD_ROWS = [  # (loss and flags, rows, complaint)
    ("dpo", [PAIR, {"prompt": "a", "chosen": "b"}], r"row 2: no 'rejected'; a pair needs it"),
    ("dpo", [PAIR, {"chosen": "b", "rejected": "c"}],
     r"row 2: no 'prompt', and 'chosen' and 'rejected' share no beginning"),
    ("dpo", [PAIR, dict(PAIR, prompt=" ")], r"row 2: 'prompt' is empty"),
    ("dpo", [PAIR, PAIR, dict(PAIR, rejected="")], r"row 3: 'rejected' is empty"),
    ("dpo", [{"text": "a"}], r"row 1: no 'prompt'; every row needs it"),
    ("dpo", [dict(GROUP, scores=[1, 1])], r"nothing to train on"),
    ("dpo", [{"prompt": "a", "completion": "b", "label": True}],
     r"labelled completions make no pairs or groups; use --loss kto"),
    ("grpo", [{"prompt": "a", "completion": "b", "label": True}], r"labelled completions make no pairs or groups"),
    ("kto", [{"prompt": "a", "completion": "b", "label": "yes"}], r"row 1: 'label' is 'yes'; it must be true or false"),
    ("kto", [{"prompt": "a", "completion": "b"}], r"row 1: no 'label'; a labelled completion needs it"),
    ("grpo", [GROUP, dict(GROUP, scores=[1, "high"])], r"row 2: 'scores' holds '.*high.*'; it must be a number below 1e100"),
    ("grpo", [GROUP, dict(GROUP, scores=[1, None])], r"row 2: 'scores' holds None; it must be a number below 1e100"),
    ("grpo", [GROUP, dict(GROUP, completions=["b"], scores=[1])], r"row 2: a group of 1; a scored group needs two"),
    ("kto", [dict(prompt="a", completion="b", reward=1, tokens=[5, -3], logps=[-1, -1])],
     r"row 1: 'tokens' and 'logps' must be lists of one length, of token ids and of log-probs"),
    ("kto", [dict(prompt="a", completion="b", reward=1, tokens=[5, 3], logps=[-1, None])],
     r"row 1: 'tokens' and 'logps' must be lists of one length, of token ids"),
    ("grpo", [GROUP, dict(GROUP, scores=[1, 0, 1])], r"row 2: 'completions' and 'scores' must be lists of one length"),
    ("grpo", [{"prompt": "a", "answer": "b"}], r"prompts without completions; draw them with --sample-every 1"),
    ("grpo --sample-every 1", [{"prompt": "a"}], r"row 1: no 'answer'; --reward exact"),
    ("grpo", [dict(GROUP, prompt="p" * 100)], r"row 1: a prompt of 103 tokens .* exceed the model's 64 positions"),
    ("dpo", [dict(PAIR, prompt=[{"text": "a"}])],
     r"row 1: 'prompt' must be text or messages with a 'role' and a 'content'"),
    ("dpo", [dict(PAIR, chosen="b" * 100, rejected="c" * 100)], r"no row is left; raise --max-length"),
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


@pytest.mark.parametrize("flags", ["--sample-every 4 --no-humanline", "--sample-every 1 --sync-k 3", "--no-humanline",
                                   "--sample-every 1 --no-humanline --sync-drift 0.5", "--sample-every 1 --sync-k 1"])
def test_a_kl_weight_that_has_an_effect_is_accepted_and_has_it(run, flags):
    folders = [run(f"--kl-beta {beta} {flags}") for beta in (0, 5)]
    losses = [[line["loss"] for line in metrics(folder)] for folder in folders]
    assert losses[0] != losses[1] and not same_weights(*folders)


@pytest.mark.parametrize("text, expected", BAD_CONFIGS, ids=[text.strip() for text, _ in BAD_CONFIGS])
def test_a_bad_config_file_is_one_line(tmp_path, capsys, text, expected):
    (tmp_path / "bad.toml").write_text(text)
    assert re.search(expected, complaint(["--config", str(tmp_path / "bad.toml")], tmp_path, capsys))


@pytest.mark.parametrize("loss, rows, expected", BAD_ROWS, ids=[expected[:40] for _, _, expected in BAD_ROWS])
def test_a_bad_row_is_one_line_that_names_it(tiny, tmp_path, capsys, loss, rows, expected):
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = f"--model {tiny} --data {path} --out {tmp_path / 'out'} --max-new-tokens 4 --loss {loss}".split()
    line = complaint(flags, tmp_path, capsys)
    assert re.search(expected, line) and ("rows.jsonl" in line or "--data: " in line)


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
    shutil.rmtree(folder / "final")
    assert "did not finish; go on with --resume latest" in complaint(flags, tmp_path, capsys)
    (tmp_path / "file").write_text("")
    assert "file exists; choose another folder" in complaint(flags[:-1] + [str(tmp_path / "file")], tmp_path, capsys)


def test_the_error_reaches_the_shell_as_one_line_and_status_2(tmp_path):
    done = command("--sync-k", "-1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "humanline.py: error: --sync-k is -1; it must be 0 or more\n"
    assert not list(tmp_path.iterdir())


def test_a_model_without_eos_or_with_another_head_is_refused(tiny, tmp_path, capsys, data_files):
    shutil.copytree(tiny, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "eos_token"}))
    line = complaint(["--model", str(tmp_path / "model"), "--data", data_files["groups"]], tmp_path, capsys)
    assert "no end-of-sequence token" in line


def test_a_nan_is_one_line_and_status_1(run, monkeypatch, capsys, tiny, data_files, tmp_path):
    monkeypatch.setattr(humanline, "forward_backward", lambda *_: dict(loss=float("nan"), tokens=1, drift=0.0))
    flags = f"--model {tiny} --data {data_files['groups']} --out {tmp_path / 'out'} --steps 2 --batch-size 1".split()
    assert humanline.main(flags) == 1
    expected = r"humanline.py: stopped: step 1: loss nan.*last good checkpoint: none.*groups.jsonl row \d+\n"
    assert re.fullmatch(expected, capsys.readouterr().err)


# The file alone.

@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """alone("--help") runs a copy of humanline.py without the project's other files; returns process and folder."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(ROOT / "humanline.py", folder)
    reward = "def length(prompts, completions, rows):\n    return [len(text) for text in completions]\n"
    (folder / "length.py").write_text(reward)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def run(flags: str) -> tuple[subprocess.CompletedProcess, Path]:
        line = [sys.executable, "humanline.py", *flags.split()]
        return subprocess.run(line, capture_output=True, text=True, cwd=folder, env=environment, timeout=600), folder

    return run


def test_the_file_alone_shows_its_help(alone):
    done, folder = alone("--help")
    assert done.returncode == 0 and not done.stderr and "--sync-k" in done.stdout
    assert {path.name for path in folder.iterdir()} <= {"humanline.py", "__pycache__", "runs", "length.py"}


@pytest.mark.parametrize("flags, out", [
    ("--loss dpo", "dpo-humanline-offline"),
    ("--sample-every 1 --reward length.py:length", "grpo-humanline-every-1")])
def test_the_file_alone_trains_a_model(alone, tiny, data_files, flags, out):
    done, folder = alone(f"--model {tiny} --data {data_files['groups']} --steps 2 --batch-size 2 --max-new-tokens 4 "
                         + flags)
    assert done.returncode == 0, done.stderr
    assert len(metrics(folder / "runs" / out)) == 2 and (folder / "runs" / out / "final" / "model.safetensors").exists()


def test_the_file_alone_says_where_it_looked_for_the_reward_of_mathematics(alone, tiny, data_files):
    done, folder = alone(f"--model {tiny} --data {data_files['prompts']} --reward math --sample-every 1 --out out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (folder / "out").exists(), done.stderr
    expected = r"humanline.py: error: --reward math: .*No such file.*configs/math_reward\.py.* beside humanline\.py"
    assert re.match(expected, done.stderr)
