"""What a person reads of a model: its completions side by side, and its answers in a dialogue."""

import re
from pathlib import Path

import numpy as np
import pytest
from conftest import rows_of, write_jsonl

import eval as evaluation
import humanline


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """ask("show --samples 2") runs the command in an empty folder, 100 columns wide; returns what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(command: str) -> str:
        status = evaluation.main(command.split())
        said = capsys.readouterr()
        assert status == 0, said.err
        return said.out

    return run


@pytest.fixture
def prompts(tmp_path) -> str:
    return write_jsonl(tmp_path / "prompts.jsonl", rows_of("prompts"))


# show.

def shown(said: str, models: int) -> list[list[tuple[str, str]]]:
    """Per prompt, per model: the first completion as it stands in its column, and what is said beneath it."""
    blocks = []
    for block in re.split(r"^── \d+ of \d+: .*$", said, flags=re.M)[1:]:
        cells = [line.ljust(100).split(" │ ") for line in re.split("─{20,}\n", block)[1].splitlines()]
        end = next(i for i, line in enumerate(cells) if line[0].startswith("→"))
        blocks.append([("\n".join(line[i].rstrip() for line in cells[:end]), cells[end][i].strip())
                       for i in range(models)])
    return blocks


def test_show_prints_what_the_models_say_and_what_it_is_worth(ask, tiny, prompts, varied):
    said = ask(f"show --model {tiny} {tiny} --data {prompts} --prompts 3 --max-new-tokens 6 --reward {varied}")
    config = humanline.parse_config(["--model", tiny, "--reward", varied, "--max-new-tokens", "6"])
    rows = humanline.read_rows(prompts, config, "--data")
    sampler = evaluation.load(tiny, config)
    groups = evaluation.encode(sampler, rows, offline=False)[:3]
    drawn = [evaluation.draw(sampler, groups, rows, 1, model)[0] for model in (0, 1)]
    blocks = shown(said, 2)
    assert len(blocks) == 3
    for number, block in enumerate(blocks):
        assert f"── {number + 1} of 3: {prompts} row {number + 1} ─" in said and rows[number].prompt[0]["content"] in said
        for (text, beneath), model in zip(block, drawn):
            completion, = evaluation.completions_of(sampler, model[number])
            assert text.strip() == completion["completion"].strip()
            cut = ", truncated" * completion["truncated"]
            assert beneath == f"→ reward {completion['score']:.4g}, {completion['tokens']} tokens{cut}"
    assert ", truncated" in said and "(answer: " in said
    mean = np.mean([group.rewards[0] for group in drawn[1]])
    assert re.search(rf"^{re.escape(tiny)} .*\n{re.escape(tiny)}  {mean:.3f} ", said, re.M)


def test_greedy_completions_are_shown_once_and_are_those_of_accuracy(ask, tiny, prompts, tmp_path):
    said = ask(f"show --model {tiny} --data {prompts} --prompts 4 --samples 3 --greedy --max-new-tokens 4")
    ask(f"accuracy --model {tiny} --data {prompts} --limit 4 --samples 1 --max-new-tokens 4 --out drawn.jsonl")
    lines = map(evaluation.json.loads, (tmp_path / "drawn.jsonl").read_text().splitlines())
    greedy = [line["completion"] for line in lines if line["kind"] == "greedy"]
    assert [block[0][0].strip() for block in shown(said, 1)] == [text.strip() for text in greedy]
    assert said.count("→ reward") == 4


def test_a_model_that_is_no_run_is_asked_and_rewarded_as_the_run_beside_it(ask, run, tiny, prompts, varied):
    folder = run(f"--prompt-template <{{prompt}}> --system hello --max-new-tokens 3 --reward {varied} --steps 1")
    said = ask(f"show --model {tiny} {folder} --data {prompts} --prompts 2")
    first = rows_of("prompts")[0]["prompt"]
    assert f"system: hello\nuser: <{first}>\n" in said and said.count("system: hello") == 2
    assert " 3 tokens, truncated" in said and " 4 tokens" not in said
    rewards = [re.findall(r"→ reward (\S+),", line) for line in said.splitlines() if line.startswith("→")]
    assert {reward for pair in rewards for reward in pair} - {"0", "1"}, "these are no rewards of --reward exact"


def test_prompts_that_differ_between_runs_stand_in_the_columns(ask, run, prompts):
    folders = [run(f"--prompt-template {around} --steps 1") for around in ("<{prompt}>", "[{prompt}]")]
    said = ask(f"show --model {' '.join(map(str, folders))} --data {prompts} --prompts 1 --max-new-tokens 2")
    first = rows_of("prompts")[0]["prompt"]
    assert re.search(rf"^\(<{re.escape(first)}>\) +│ \(\[{re.escape(first)}\]\)$", said, re.M)


@pytest.mark.parametrize("columns, abreast", [(80, 2), (120, 4), (20, 1)])
def test_models_that_do_not_fit_beside_each_other_stand_below_each_other(ask, tiny, prompts, monkeypatch, columns,
                                                                        abreast):
    monkeypatch.setenv("COLUMNS", str(columns))
    said = ask(f"show --model {tiny} {tiny} {tiny} {tiny} --data {prompts} --prompts 1 --max-new-tokens 20")
    lines = said.splitlines()[1:]  # but for the head, which names the row
    assert max(line.count("│") for line in lines) == abreast - 1
    assert max(map(evaluation.cells, lines)) <= columns and said.count("→ reward") == 4


def test_columns_hold_whatever_a_model_may_say():
    texts = ["你好，世界。" * 9, "fine 😊 " * 20, "a\x1b[2J\a\r\nb\tc", "x" * 99, "", "\n\n  indented\nlines\n"]
    said = evaluation.side_by_side(texts, 120)
    lines = said.splitlines()
    edges = [[evaluation.cells(line[:i]) for i, c in enumerate(line) if c == "│"] for line in lines]
    assert all(own == edges[0][: len(own)] for own in edges) and len(edges[0]) == 5
    assert max(map(evaluation.cells, lines)) <= 120 and "\x1b" not in said and "\a" not in said and "\r" not in said
    for text in texts:  # nothing is lost but spaces where a line ends
        visible = evaluation.printable(text)
        assert "".join(evaluation.wrap(text, 17)).replace(" ", "") == re.sub(r"\s", "", visible)
