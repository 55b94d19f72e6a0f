"""The demo: what a new user sees after typing `python humanline.py`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bases
import pytest
from conftest import ROOT, command, metrics

import humanline

DEMO = ROOT / "configs" / "demo"


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Run the command without arguments in an empty folder."""
    folder = tmp_path_factory.mktemp("newcomer")
    return command(cwd=folder), folder


def test_the_command_without_arguments_trains_a_model(first):
    done, folder = first
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    numbers = re.search(r"went from (0\.\d+) to (\d\.\d+), greedy from (0\.\d+) to (\d\.\d+)", last).groups()
    before, after, greedy_before, greedy_after = map(float, numbers)
    assert 0.55 <= before <= 0.8 and after >= 0.88 and 0.4 <= greedy_before <= 0.7
    assert greedy_after >= greedy_before + 0.2  # a skill, which no lower temperature gives
    [out] = (folder / "runs").iterdir()
    assert f"the model is in runs/{out.name}/final" in last
    lines = metrics(out)
    assert len(lines) == 256 and lines[-1]["accuracy"] == pytest.approx(after, abs=5e-4)


@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
@pytest.mark.parametrize("form", ["humanline", "plain", "online"])
def test_the_forms_that_the_demos_settings_name_are_those_that_tuning_chose(loss, form):
    text = (DEMO / f"{loss}.toml").read_text()
    [flags] = re.findall(rf"^#   (--.*?) +{form}$", text, re.MULTILINE)
    config = humanline.parse_config(f"--loss {loss} {flags}".split())
    assert humanline.in_words(config) == f"{loss.upper()}, {'plain' if form == 'online' else form}"
    assert (config.sample_every > 0) == (form == "online")
    facts = json.loads((ROOT / "tests" / "claims" / "facts.json").read_text())["tasks"]["two-digits"][loss][form]
    assert (config.lr, config.sync_k) == (facts["lr"], facts["k"])


@pytest.mark.parametrize("loss, form", [
    ("grpo", "better alone, synced"), ("dpo", "chosen alone"), ("kto", "desirable alone, synced")])
def test_the_demo_has_the_settings_that_tuning_chose(loss, form):
    config = humanline.parse_config(["--loss", loss])
    facts = json.loads((ROOT / "tests" / "claims" / "facts.json").read_text())["tasks"]["two-digits"][loss][form]
    assert (config.lr, config.sync_k) == (facts["lr"], facts["k"])


def test_the_final_folder_of_the_demo_loads_in_plain_transformers_and_can_add(first):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    [folder] = (first[1] / "runs").glob("*/final")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    right, rows = 0, [json.loads(line) for line in (DEMO / "test.jsonl").read_text().splitlines()[:50]]
    for row in rows:
        chat = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt",
                                            return_dict=True)
        answer = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
        right += tokenizer.decode(answer, skip_special_tokens=True).strip() == row["answer"]
    assert right >= 40


def test_the_file_alone_says_what_the_demo_lacks(tmp_path):
    shutil.copy(ROOT / "humanline.py", tmp_path)
    line = [sys.executable, "humanline.py", "--steps", "1"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "pass --model and --data; the demo needs the folder " in done.stderr


@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
def test_each_loss_has_its_settings_and_a_custom_loss_those_of_its_unit(loss, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the demo's files are found from anywhere
    config = humanline.parse_config(["--loss", loss, "--sync-k", "12", "--no-positive-only"])
    assert (config.loss, config.sync_k, config.steps, config.max_new_tokens) == (loss, 12, 256, 8)
    assert config.batch_size == (128 if loss == "kto" else 32) and config.lr == 8e-4
    assert Path(config.model) == DEMO / "model" and Path(config.eval_data) == DEMO / "test.jsonl"
    monkeypatch.setitem(humanline.LOSSES, "mine", humanline.LOSSES[loss])
    mine = humanline.parse_config(["--loss", "mine"])
    assert (mine.loss, mine.batch_size, mine.lr) == ("mine", config.batch_size, config.lr)


def test_model_without_data_or_data_without_model_gives_a_one_line_error(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flag, error in (("--model", "--data is missing"), ("--data", "--model is missing")):
        assert humanline.main([flag, str(DEMO)]) == 2 and error in capsys.readouterr().err


def test_the_demo_is_what_its_maker_records():
    rows, test = ([json.loads(line) for line in (DEMO / f"{name}.jsonl").open()] for name in ("rows", "test"))
    made, held_out = bases.RECIPES["two-digits"].rows(seed=0)
    assert [{key: row[key] for key in ("prompt", "answer")} for row in rows] == made and test == held_out
    assert all(row["scores"] == [float(text == row["answer"]) for text in row["completions"]] for row in rows)
    assert 0.55 < sum(sum(row["scores"]) for row in rows) / (8 * len(rows)) < 0.8


@pytest.mark.slow
def test_making_the_demo_again_gives_the_same_demo(tmp_path):
    """Equal bit for bit on the machine that made the demo; rounding may differ on others."""
    subprocess.run([sys.executable, str(ROOT / "tests" / "claims" / "bases.py"), str(tmp_path / "again")],
                   check=True)
    names = ["model/model.safetensors", "model/tokenizer.json", "rows.jsonl", "test.jsonl"]
    assert all((tmp_path / "again" / name).read_bytes() == (DEMO / name).read_bytes() for name in names)
