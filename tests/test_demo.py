"""The demo: what a new user sees after typing `python humanline.py`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bases
import demo
import pytest
from conftest import ROOT, finished, metrics

import humanline

DEMO = ROOT / "configs" / "demo"


# The first 50 of its 200 steps: the warmup is a share of the steps.
BEGINNING = "--steps", "50", "--warmup", "0.4"


@pytest.fixture(scope="module", params=[BEGINNING, pytest.param((), marks=pytest.mark.slow)], ids=["50", "200"])
def first(request, tmp_path_factory):
    """Run the command without arguments, or its beginning, in an empty folder."""
    folder = tmp_path_factory.mktemp("newcomer")
    done = finished(ROOT / "humanline.py", *request.param, cwd=folder)
    return done, folder


def test_the_command_without_arguments_trains_a_model_as_the_stored_run_did(first):
    done, folder = first
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    numbers = re.search(r"went from (0\.\d+) to (\d\.\d+), greedy from (0\.\d+) to (\d\.\d+)", last).groups()
    before, after, greedy_before, greedy_after = map(float, numbers)
    assert 0.4 <= before <= 0.6 and after >= 0.85 and greedy_before <= 0.95 <= greedy_after
    [out] = (folder / "runs").iterdir()
    lines = metrics(out)
    assert f"GRPO, humanline, {len(lines)} steps in " in last
    assert f"the model is in runs/{out.name}/final" in last
    assert lines[-1]["accuracy"] == pytest.approx(after, abs=5e-4)
    stored = demo.read()[""]
    measured = {line["step"]: line["accuracy"] for line in lines if "accuracy" in line}
    assert {*stored["steps"]} - {0} >= measured.keys() == {*range(25, len(lines) + 1, 25)}
    for step, reward in zip(stored["steps"], stored["rewards"]):
        assert step not in measured or measured[step] == pytest.approx(reward, abs=0.05), step


def test_a_run_ends_with_three_held_out_prompts_before_and_after_one_that_changed_first(first):
    shown = "\n".join(first[0].stdout.splitlines()[-10:-1])
    groups = re.findall(r"prompt  '(.*)'\nbefore  '(.*)'  reward (.)\nafter   '(.*)'  reward (.)", shown)
    answers = {row["prompt"]: row["answer"] for row in map(json.loads, (DEMO / "test.jsonl").open())}
    assert len(groups) == 3 == len({prompt for prompt, *_ in groups}) and groups[0][1] != groups[0][3]
    for prompt, before, reward_before, after, reward in groups:
        assert (before == answers[prompt]) == int(reward_before) and (after == answers[prompt]) == int(reward)


FORMS = {"plain": "--no-humanline", "online": "--no-humanline --sample-every 1"}


@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
@pytest.mark.parametrize("form", FORMS)
def test_plain_and_online_have_the_rates_that_tuning_chose(loss, form):
    config = humanline.parse_config(f"--loss {loss} {FORMS[form]}".split())
    assert humanline.in_words(config) == f"{loss.upper()}, plain" and config.sample_every == (form == "online")
    facts = json.loads((ROOT / "tests" / "claims" / "facts.json").read_text())
    assert config.lr == facts["tasks"]["five-sorted"][loss][form]["lr"]


@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
def test_each_loss_has_the_rate_that_ended_best_with_its_k_on_the_tuning_bases(loss):
    config = humanline.parse_config(["--loss", loss])
    assert humanline.in_words(config) == f"{loss.upper()}, humanline" and config.perception == "clip"
    _, lr = demo.best(loss, config.sync_k)
    assert config.lr == lr


def test_k_is_12_unless_24_ended_better_for_all_three_losses():
    ends = {k: [demo.best(loss, k)[0] for loss in demo.RATES] for k in demo.KS}
    is_better = all(longer > shorter for shorter, longer in zip(ends[12], ends[24]))
    assert {humanline.parse_config(["--loss", loss]).sync_k for loss in demo.RATES} == {24 if is_better else 12}


@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
@pytest.mark.parametrize("flags", [
    "--sync-k 12", "--sync-k 0", "--perception none", "--perception sample", "--no-humanline",
    "--sample-every 1 --sync-k 4", "--sample-every 64 --no-humanline --temperature 0.9", "--lora 4 --sync-k 2",
    "--log-eps-p -1 --beta 0.2", "--positive-only --no-humanline"])
def test_what_can_be_typed_on_data_of_ones_own_can_be_typed_on_the_demo(loss, flags):
    if loss == "grpo":
        flags = flags.replace("--beta", "--epsilon")
    humanline.parse_config(["--loss", loss, *flags.split()])


def test_every_command_of_the_demo_is_stored_and_ends_well():
    stored = demo.read()
    for flags in demo.TYPED:
        config = humanline.parse_config(flags.split())
        line = stored[flags]
        assert line["steps"] == [0, *range(config.eval_every, config.steps + 1, config.eval_every)], flags
        assert line["rewards"][0] == line["before"] < 0.6 and line["rewards"][-1] == line["after"], flags
        assert line["after"] > line["before"] + 0.25, flags
        assert line["greedy_after"] > line["greedy_before"] - 0.01, flags
        assert humanline.in_words(config) in line["printed"][-1] and len(line["printed"]) == 10, flags


def test_the_final_folder_of_the_demo_loads_in_plain_transformers_and_can_sort(first):
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
    done = finished("humanline.py", "--steps", "1", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "pass --model and --data; the demo needs the folder " in done.stderr


@pytest.mark.parametrize("loss", ["grpo", "dpo", "kto"])
def test_each_loss_has_its_settings_and_a_custom_loss_those_of_its_unit(loss, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the demo's files are found from anywhere
    config = humanline.parse_config(["--loss", loss])
    assert (config.loss, config.steps, config.max_new_tokens) == (loss, 200, 8)
    assert config.batch_size == (128 if loss == "kto" else 32)
    assert Path(config.model) == DEMO / "model" and Path(config.eval_data) == DEMO / "test.jsonl"
    monkeypatch.setitem(humanline.LOSSES, "mine", humanline.LOSSES[loss])
    for flags in [], ["--no-humanline"]:
        config = humanline.parse_config(["--loss", loss, *flags])
        mine = humanline.parse_config(["--loss", "mine", *flags])
        assert (mine.loss, mine.batch_size, mine.lr) == ("mine", config.batch_size, config.lr)


def test_model_without_data_or_data_without_model_gives_a_one_line_error(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flag, error in (("--model", "--data is missing"), ("--data", "--model is missing")):
        assert humanline.main([flag, str(DEMO)]) == 2 and error in capsys.readouterr().err


def test_the_demo_is_what_its_maker_records():
    rows, test = ([json.loads(line) for line in (DEMO / f"{name}.jsonl").open()] for name in ("rows", "test"))
    made, held_out = bases.RECIPES["five-sorted"].rows(bases.DEMO_SEED)
    assert [{key: row[key] for key in ("prompt", "answer")} for row in rows] == made and test == held_out
    assert all(row["scores"] == [float(text == row["answer"]) for text in row["completions"]] for row in rows)
    assert 0.4 < sum(sum(row["scores"]) for row in rows) / (8 * len(rows)) < 0.6
    assert (DEMO / "rows.jsonl").stat().st_size <= 1.22e6


@pytest.mark.slow
def test_making_the_demo_again_gives_such_a_demo(tmp_path):
    """Rounding differs from one CPU to another, and with it the model; what it earns and all else does not."""
    subprocess.run([sys.executable, str(ROOT / "tests" / "claims" / "bases.py"), str(tmp_path)], check=True)
    for name in "test.jsonl", "model/tokenizer.json":
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes(), name
    again, rows = ([json.loads(line) for line in (folder / "rows.jsonl").open()] for folder in (tmp_path, DEMO))
    assert [(row["prompt"], row["answer"]) for row in again] == [(row["prompt"], row["answer"]) for row in rows]
    rewards = [sum(sum(row["scores"]) for row in some) / (8 * len(some)) for some in (again, rows)]
    assert rewards[0] == pytest.approx(rewards[1], abs=0.1)
