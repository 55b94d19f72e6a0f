"""The embedded default: what a newcomer sees who types `python humanline.py`."""

import ast
import dataclasses
import importlib.util
import json
import os
import random
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from conftest import command, metrics

import eval as evaluation  # it has recipes of its own
import humanline


def files_of(folder: Path) -> dict[Path, int]:
    """Every file below a folder, locks aside, with the time at which it was written."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The command with no arguments, in an empty folder."""
    folder = tmp_path_factory.mktemp("newcomer")
    return command(cwd=folder), folder


def test_the_command_without_arguments_aligns_a_model(first):
    done, folder = first
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    numbers = re.search(r"went from (0\.\d+) to (\d\.\d+), greedy from (0\.\d+) to (\d\.\d+)", last).groups()
    before, after, greedy_before, greedy_after = map(float, numbers)
    assert 0.55 <= before <= 0.8 and after >= 0.88 and 0.4 <= greedy_before <= 0.7
    assert greedy_after >= greedy_before + 0.2  # a skill, which no lower temperature gives
    assert "python humanline.py --config" in last and "the model is in runs/grpo-humanline-offline/final" in last
    lines = metrics(folder / "runs" / "grpo-humanline-offline")
    assert len(lines) == 256 and lines[-1]["accuracy"] == pytest.approx(after, abs=5e-4)


def test_its_final_folder_loads_in_plain_transformers_and_adds(first):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = first[1] / "runs" / "grpo-humanline-offline" / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert 80_000 < sum(p.numel() for p in model.parameters()) < 150_000
    right, rows = 0, humanline.RECIPES["base"].rows()[1][:50]
    for row in rows:
        chat = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
        right += tokenizer.decode(answer, skip_special_tokens=True).strip() == row["answer"]
    assert right >= 40


def test_a_second_run_finds_the_base_and_takes_the_next_folder(first, monkeypatch):
    before = files_of(Path(os.environ["HUMANLINE_CACHE"]))
    monkeypatch.chdir(first[1])
    humanline.train(humanline.parse_config(["--steps", "2", "--eval-every", "0", "--eval-prompts", "10"]))
    assert before and files_of(Path(os.environ["HUMANLINE_CACHE"])) == before
    assert (first[1] / "runs" / "grpo-humanline-offline-2" / "final").exists()


def test_the_suggested_next_command_is_the_baseline(first, monkeypatch):
    suggested = first[0].stdout.splitlines()[-1].split("python humanline.py ")[1].split()
    monkeypatch.chdir(first[1])
    config = humanline.parse_config(suggested)
    assert not config.humanline and config.sync_k == 0 and config.perception == "none" and config.lr == 8e-4


@pytest.mark.parametrize("part, sign", [("worse", -1), pytest.param("better", 1, marks=pytest.mark.slow)])
def test_the_worse_model_is_worse_and_the_better_better(first, part, sign):
    def mean_score(name: str) -> float:
        rows = map(json.loads, Path(humanline.embedded(name, "data")).read_text().splitlines())
        return float(torch.tensor([row["scores"] for row in rows]).mean())

    assert sign * (mean_score(f"embedded:{part}") - mean_score("embedded")) > 0.03


def test_a_base_that_learned_nothing_is_taught_again_from_another_start(tmp_path, monkeypatch):
    taught, accuracies = [], iter([0.54, 0.56])

    def draw_answers(model, tokenizer, part, fields, size):
        assert (part, len(fields), size) == ("base", 500, 1)
        right = round(500 * next(accuracies))
        return [humanline.Group(i, [], [], [float(i < right)]) for i in range(500)]

    monkeypatch.setattr(humanline, "teach", lambda model, *_: taught.append(float(model.lm_head.weight.detach().sum())))
    monkeypatch.setattr(humanline, "draw_answers", draw_answers)
    humanline.make_model("base", False, tmp_path)
    assert len(taught) == 2 and taught[0] != taught[1] and (tmp_path / "model.safetensors").exists()


def test_the_seed_of_the_base_is_a_number(monkeypatch):
    monkeypatch.setenv("HUMANLINE_BASE", "x")
    with pytest.raises(humanline.UserError, match="HUMANLINE_BASE=x: want a whole number"):
        humanline.embedded("embedded", "model")


# The cache: what lies in it is a function of the recipe, not of the code.

@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, which is filled in no time: a model or data file is the text "made"."""
    def make(part: str, held_out: bool, folder: Path) -> None:
        (folder / "rows.jsonl").write_text("made")

    monkeypatch.setenv("HUMANLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HUMANLINE_BASE", raising=False)
    monkeypatch.setattr(humanline, "make_model", make)
    monkeypatch.setattr(humanline, "make_data", make)
    return tmp_path / "cache"


PARTS = [("embedded", "model"), ("embedded:worse", "model"), ("embedded", "data"), ("embedded:worse", "data"),
         ("embedded:test", "data"), ("embedded:worse-test", "data")]
EDITED = {"sample", "draw_rollouts", "compute_rewards", "log_probs", "teach", "draw_answers", "make_model", "make_data"}


def edited_module(folder: Path, monkeypatch):
    """A copy of humanline.py, imported, whose functions in EDITED differ, and which refuses to fill the cache."""
    tree, edits = ast.parse(Path(humanline.__file__).read_text(encoding="utf-8")), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in EDITED:
            node.body += ast.parse("edited = True").body
            edits.add(node.name)
    assert edits == EDITED
    source = ast.unparse(ast.fix_missing_locations(tree))  # all comments are gone as well, and every line is elsewhere
    (folder / "edited_humanline.py").write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("edited_humanline", folder / "edited_humanline.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "edited_humanline", module)  # where dataclasses look
    spec.loader.exec_module(module)

    def refuse(part: str, held_out: bool, folder: Path) -> None:
        raise AssertionError(f"{folder} is made anew")

    monkeypatch.setattr(module, "make_model", refuse)
    monkeypatch.setattr(module, "make_data", refuse)
    return module


def test_editing_the_sampler_or_the_teacher_teaches_nothing_again(cache, tmp_path, monkeypatch):
    paths = [humanline.embedded(name, kind) for name, kind in PARTS]
    before = files_of(cache)
    assert len(set(paths)) == len(PARTS) and len(before) == 2 * len(PARTS)  # each with its files.json
    edited = edited_module(tmp_path, monkeypatch)
    assert [edited.embedded(name, kind) for name, kind in PARTS] == paths and files_of(cache) == before
    edited.RECIPES["base"] = dataclasses.replace(edited.RECIPES["base"], version=2)  # which says that the code matters
    with pytest.raises(AssertionError, match="made anew"):
        edited.embedded("embedded", "model")


def other_problems(chance: random.Random) -> list[str]:
    return ["1+1="]


def other_demonstrate(problem: str, errs: float, chance: random.Random) -> str:
    return "2"


CHANGES = dict(lessons=999, demonstrations=127, lr=1e-2, errs=(0.0, 0.5), parent="worse", least_accuracy=0.2,
               problems=other_problems, demonstrate=other_demonstrate, max_new_tokens=9, data_prompts=100, version=2)


def test_every_field_of_a_recipe_is_in_the_changes_below():
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(humanline.Recipe)}


@pytest.mark.parametrize("field", CHANGES)
def test_another_recipe_is_another_model_and_so_are_those_that_go_on_from_it(cache, monkeypatch, field):
    monkeypatch.setitem(humanline.RECIPES, "worse", dataclasses.replace(humanline.RECIPES["worse"], parent=None))
    monkeypatch.setitem(humanline.RECIPES, "child", humanline.Recipe(1, 1, 1e-3, (0, 0), parent="base"))
    unchanged, child = humanline.embedded("embedded", "model"), humanline.embedded("embedded:child", "model")
    base = humanline.RECIPES["base"]
    monkeypatch.setitem(humanline.RECIPES, "base", dataclasses.replace(base, **{field: CHANGES[field]}))
    assert humanline.embedded("embedded", "model") != unchanged
    assert humanline.embedded("embedded:child", "model") != child
    monkeypatch.setitem(humanline.RECIPES, "base", base)
    before = files_of(cache)
    assert humanline.embedded("embedded", "model") == unchanged and files_of(cache) == before


@pytest.mark.parametrize("kind", ["model", "data"])
def test_another_seed_or_chat_template_is_another_base_and_what_they_were_is_found_again(cache, monkeypatch, kind):
    first = humanline.embedded("embedded", kind)
    monkeypatch.setenv("HUMANLINE_BASE", "7")  # read at each call, not when the module is imported
    seventh = humanline.embedded("embedded", kind)
    monkeypatch.setenv("HUMANLINE_BASE", "0")
    before = files_of(cache)
    assert humanline.embedded("embedded", kind) == first != seventh and files_of(cache) == before
    monkeypatch.setattr(humanline, "CHAT_TEMPLATE", humanline.CHAT_TEMPLATE + " ")
    assert humanline.embedded("embedded", kind) not in (first, seventh)


def test_more_recipes_leave_the_base_where_it_is(cache, monkeypatch):
    paths = [humanline.embedded(name, kind) for name, kind in PARTS]
    for name in {*humanline.RECIPES} - {"base", "worse"}:  # eval.py's
        monkeypatch.delitem(humanline.RECIPES, name)
    assert [humanline.embedded(name, kind) for name, kind in PARTS] == paths


def test_a_damaged_model_in_the_cache_is_made_anew(cache, capsys):
    path = Path(humanline.embedded("embedded", "model"))
    (path / "rows.jsonl").write_text("damaged")
    assert humanline.embedded("embedded", "model") == str(path) and (path / "rows.jsonl").read_text() == "made"
    assert f"{path} is damaged; making it anew" in capsys.readouterr().err


# The longer tasks, which eval.py adds.

def test_the_long_task_writes_down_every_partial_sum():
    chance, recipe = random.Random(0), humanline.RECIPES["long"]
    assert recipe.demonstrate("7+8+5=", 0, chance) == "7+8=15\n15+5=20\n20"
    assert humanline.RECIPES["base"].demonstrate("12+34=", 0, chance) == "46"
    assert recipe.demonstrate("7+8+5=", 1, chance) == "7+8=15\n15+5=20\n20"
    assert recipe.demonstrate("7+9+5=", 1, chance) == "7+9=6\n6+5=11\n11"  # the carry of a nine, forgotten
    rows, held_out = recipe.rows()
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out} and len(held_out) == 500
    assert all(re.fullmatch(r"([1-9]\+){5}[1-9]=", row["prompt"]) for row in rows + held_out)
    assert all(row["answer"].endswith(f"\n{sum(map(int, row['prompt'][:-1].split('+')))}") for row in rows + held_out)
    lengths = {len(row["answer"]) for row in rows}
    assert 20 <= min(lengths) and max(lengths) < recipe.max_new_tokens == 48
    config = humanline.parse_config(shlex.split(evaluation.LONG.flags))
    assert config.eval_data == "embedded:long-test" and config.max_new_tokens == 48
    assert (config.model, config.data) == ("embedded:long", ("embedded:long",))


def test_the_longest_task_writes_down_every_column():
    chance, recipe = random.Random(0), humanline.RECIPES["column"]
    config = humanline.parse_config(shlex.split(evaluation.COLUMN.flags))
    assert (config.model, config.eval_data, config.max_new_tokens) == ("embedded:column", "embedded:column-test", 128)
    assert recipe.demonstrate("4+7+_=__\n6+3+_=__\n0+1+_=__", 0, chance) == "4+7+0=11\n6+3+1=10\n0+1+1=02"
    assert recipe.demonstrate("4+7+_=__\n6+3+_=__\n0+1+_=__", 1, chance) == "4+7+0=11\n6+3+1=10\n0+1+0=01"
    rows, held_out = recipe.rows()
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out} and len(held_out) == 500
    assert {len(row["answer"]) for row in rows} == {12 * 9 - 1} and recipe.max_new_tokens == 128
    for row in held_out[:20]:  # the two numbers, read from the last column up
        lines = row["answer"].splitlines()
        upper, lower = (int("".join(line[i] for line in reversed(lines))) for i in (0, 2))
        assert int(lines[-1][-2] + "".join(line[-1] for line in reversed(lines))) == upper + lower
