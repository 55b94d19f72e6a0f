"""The embedded default: what a newcomer sees who types `python humanline.py`."""

import json
import os
import random
import re
from pathlib import Path

import pytest
import torch
from conftest import command, metrics

import humanline


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The command with no arguments, in an empty folder."""
    folder = tmp_path_factory.mktemp("newcomer")
    return command(cwd=folder), folder


def test_the_command_without_arguments_aligns_a_model(first):
    done, folder = first
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    before, after = map(float, re.search(r"went from (0\.\d+) to (0\.\d+)", last).groups())
    assert 0.35 <= before <= 0.6 and after >= 0.80
    assert "python humanline.py --config" in last and "the model is in runs/grpo-humanline-offline/final" in last
    lines = metrics(folder / "runs" / "grpo-humanline-offline")
    assert len(lines) == 256 and lines[-1]["accuracy"] == pytest.approx(after, abs=5e-4)


def test_its_final_folder_loads_in_plain_transformers_and_adds(first):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = first[1] / "runs" / "grpo-humanline-offline" / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert 80_000 < sum(p.numel() for p in model.parameters()) < 150_000
    right, rows = 0, humanline.additions()[1][:50]
    for row in rows:
        chat = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
        right += tokenizer.decode(answer, skip_special_tokens=True).strip() == row["answer"]
    assert right >= 40


def test_a_second_run_finds_the_base_and_takes_the_next_folder(first, monkeypatch):
    made = lambda: {path: path.stat().st_mtime_ns for path in Path(os.environ["HUMANLINE_CACHE"]).rglob("*") if path.is_file()}
    before = made()
    monkeypatch.chdir(first[1])
    humanline.train(humanline.parse_config(["--steps", "2", "--eval-every", "0", "--eval-prompts", "10"]))
    assert before and made() == before
    assert (first[1] / "runs" / "grpo-humanline-offline-2" / "final").exists()


def test_the_suggested_next_command_is_the_baseline(first, monkeypatch):
    suggested = first[0].stdout.splitlines()[-1].split("python humanline.py ")[1].split()
    monkeypatch.chdir(first[1])
    config = humanline.parse_config(suggested)
    assert not config.humanline and config.sync_k == 0 and config.perception == "none" and config.lr == 8e-4


@pytest.mark.parametrize("part, sign", [("worse", -1), pytest.param("better", 1, marks=pytest.mark.slow)])
def test_the_worse_model_is_worse_and_the_better_better(first, part, sign):
    rows = lambda name: map(json.loads, Path(humanline.embedded(name, "data")).read_text().splitlines())
    base, other = (torch.tensor([row["scores"] for row in rows(name)]).mean() for name in ("embedded", f"embedded:{part}"))
    assert sign * (other - base) > 0.1


def test_a_base_that_learned_nothing_is_taught_again_from_another_start(tmp_path, monkeypatch):
    taught, right = [], iter([0.29, 0.31])
    monkeypatch.setattr(humanline, "teach", lambda model, *_: taught.append(float(model.lm_head.weight.detach().sum())))
    monkeypatch.setattr(humanline, "answers", lambda *_: [humanline.Group(0, [], [], [500 * next(right)])])
    humanline.make_model("base", tmp_path)
    assert len(taught) == 2 and taught[0] != taught[1] and (tmp_path / "model.safetensors").exists()


def test_the_seed_of_the_base_is_a_number(monkeypatch):
    monkeypatch.setitem(humanline.EMBEDDED, "seed", "x")  # as HUMANLINE_BASE=x gives it
    with pytest.raises(humanline.UserError, match="HUMANLINE_BASE=x: want a whole number"):
        humanline.embedded("embedded", "model")


def test_the_long_task_writes_down_every_partial_sum():
    chance = random.Random(0)
    assert humanline.demonstrate("7+8+5=", 0, chance) == "7+8=15\n15+5=20\n20" and humanline.demonstrate("12+34=", 0, chance) == "46"
    wrong = humanline.demonstrate("7+8+5=", 1, chance).splitlines()
    assert wrong[0] != "7+8=15" and wrong[1].startswith(wrong[0].split("=")[1] + "+5=") and wrong[1].endswith(f"={wrong[2]}")
    rows, held_out = humanline.additions(long=True)
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out} and len(held_out) == 500
    lengths = {len(row["answer"]) for row in rows}
    assert 20 <= min(lengths) and max(lengths) < 48
    config = humanline.parse_config(["--model", "embedded:long", "--data", "embedded:long-worse"])
    assert config.eval_data == "embedded:long-test" and config.max_new_tokens == 48
