"""configs/rewards.py: what each example rewards, at its edges, and that the program can use it."""

import doctest
import importlib.util
import json
import sys

import pytest
from conftest import ROOT, metrics, write_jsonl

import humanline

FILE = ROOT / "configs" / "rewards.py"
spec = importlib.util.spec_from_file_location("reward_examples", FILE)
rewards = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rewards)

FORMATTED = "<think>\n1+1=2\n</think>\n<answer>\n2\n</answer>"


def reward(name: str, completion: str, row: dict | None = None) -> float:
    [value] = getattr(rewards, name)([[{"role": "user", "content": "1+1="}]], [completion], [row or {}])
    assert isinstance(value, float)
    return value


def test_the_examples_in_the_docstrings_hold():
    outcome = doctest.testmod(rewards)
    assert outcome.attempted >= 5 and not outcome.failed


@pytest.mark.parametrize("completion, formatted, tags", [
    (FORMATTED, 1, 1.0),
    ("", 0, 0.0),
    ("<think>\n</think>\n<answer>\n</answer>", 0, 1.0),  # a line of thought and one of answer must be there...
    ("<think>\n\n</think>\n<answer>\n\n</answer>", 1, 1.0),  # ...but may be empty
    ("<think>1+1=2</think><answer>2</answer>", 0, 0.0),  # not on lines of their own
    ("<answer>\n2\n</answer>\n<think>\n1+1\n</think>\n", 0, 0.75),  # wrong order; no line break before <answer>
    (FORMATTED + "\nI hope it is right.", 1, 1.0),
    (FORMATTED + " Really.", 0, 1.0),
    (FORMATTED.replace("\n</answer>", ""), 0, 0.75),  # cut at --max-new-tokens
    (FORMATTED.replace("</think>\n<answer>", "</think>\n\n<answer>"), 0, 1.0),
    (FORMATTED.replace("1+1=2", "<think>\n1+1=2\n</think>\n"), 1, 0.5),  # nested
    (FORMATTED + "\n" + FORMATTED, 1, 0.0),  # each tag twice
])
def test_the_two_rewards_of_the_format(completion, formatted, tags):
    assert reward("think_format", completion) == formatted
    assert reward("tag_count", completion) == tags


def test_think_format_does_not_slow_down_on_a_hostile_text():
    assert reward("think_format", "<think>\n" + "\n</think>\n<answer>\n" * 100_000) == 0
    assert reward("think_format", "<think>\n" * 200_000) == 0


@pytest.mark.parametrize("completion, expected", [
    ("Why? \n", 1), ("Why? Because.", 0), ("?", 1), ("", 0), ("Why?)", 0)])
def test_a_question_ends_with_its_mark(completion, expected):
    assert reward("ends_with_question", completion) == expected


SKY = '{"name": "sky", "color": "blue"}'


@pytest.mark.parametrize("completion, keys, expected", [
    (SKY, None, 1),
    (f"```json\n{SKY}\n```", None, 1),
    (f"Here it is: {SKY}", None, 0),
    (f"```json\n{SKY}\n```\nHere it is.", None, 0),
    ('{"name": "sky", "color": null, "size": 1}', None, 1),
    ('{"name": "sky"}', None, 0),
    ('{"a": 1}', ["a"], 1),
    (SKY, ["name", "size"], 0),
    (f"[{SKY}]", None, 0),
    ("{'name': 'sky', 'color': 'blue'}", None, 0),
    ("", None, 0),
    ("[" * 100_000, None, 0),
    ("9" * 10_000, None, 0),
])
def test_json_has_the_keys_that_the_row_names(completion, keys, expected):
    assert reward("json_keys", completion, {"keys": keys}) == expected


@pytest.mark.parametrize("words, row, expected", [
    (20, {}, 1.0), (10, {}, 0.5), (30, {}, 0.5), (400, {}, 0.0), (0, {}, 0.0), (4, {"length": 5}, 0.8)])
def test_the_best_length_is_the_rows(words, row, expected):
    assert reward("length_near", " word\n" * words, row) == pytest.approx(expected)


def test_sentiment_tells_glad_from_sad_and_from_neither():
    pytest.importorskip("vaderSentiment", reason="pip install vaderSentiment")
    glad, sad = reward("sentiment", "I love this wonderful, happy day!"), reward("sentiment", "I hate this awful war.")
    assert -1 <= sad < -0.5 < 0.5 < glad <= 1
    assert reward("sentiment", "") == reward("sentiment", "A table has four legs.") == 0


def test_without_vader_sentiment_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    rewards.sentiment_analyzer.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="^sentiment needs vaderSentiment: pip install vaderSentiment$"):
        reward("sentiment", "fine")


# In a run.

@pytest.fixture
def flags(tiny, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(ROOT)
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)])
    return (f"--model {tiny} --data {rows} --sample-every 1 --steps 2 --batch-size 2 --group-size 3 --max-new-tokens 4 "
            f"--no-humanline --out {tmp_path / 'out'}").split()


def test_a_sum_of_rewards_is_a_reward():
    config = humanline.Config(reward=f"{ROOT}/configs/rewards.py:math_recipe")
    texts = ["<think>\n1+1\n</think>\n<answer>\n2\n</answer>", "2", "<think>\n3"]
    assert humanline.Reward(config)([[]] * 3, texts, [{"answer": "2"}] * 3) == [10, 8, 0.25]


# The topics.

def test_topics_are_plain_prompts_and_the_held_out_ones_are_others():
    rows = {name: [json.loads(line) for line in (ROOT / "configs" / f"{name}.jsonl").read_text("utf-8").splitlines()]
            for name in ("topics", "topics-test")}
    assert len(rows["topics"]) == 200 and len(rows["topics-test"]) == 50
    both = rows["topics"] + rows["topics-test"]
    assert len({row["topic"] for row in both}) == 250
    assert all(row["prompt"] == f"Write one sentence about a {row['topic']}." for row in both)
    assert not any(row["topic"][0] in "aeiou" for row in both)  # "a" fits


def test_the_checked_rows_ask_for_one_of_two_things_about_the_same_topics():
    for name, other in (("checks", "topics"), ("checks-test", "topics-test")):
        rows, topics = ([json.loads(line) for line in open(ROOT / "configs" / f"{file}.jsonl", encoding="utf-8")]
                        for file in (name, other))
        assert [row["topic"] for row in rows] == [row["topic"] for row in topics]
        assert [row["check"] for row in rows] == ["question", "json"] * (len(rows) // 2)
        assert all(("question" in row["prompt"]) == (row["check"] == "question") for row in rows)
    assert reward("checked", "Why?", rows[0]) == 1 and reward("checked", "Why?", rows[1]) == 0
    assert reward("checked", '{"name": "a", "color": "b"}', rows[1]) == 1
