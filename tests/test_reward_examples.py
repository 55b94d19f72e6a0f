"""configs/rewards.py: what each example rewards, its edge cases, and its use by the program."""

import doctest
import importlib.util
import sys

import pytest
from conftest import ROOT

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
    # a line of thought and one of answer must be there...
    ("<think>\n</think>\n<answer>\n</answer>", 0, 1.0),
    ("<think>\n\n</think>\n<answer>\n\n</answer>", 1, 1.0),  # ...but may be empty
    ("<think>1+1=2</think><answer>2</answer>", 0, 0.0),  # not on lines of their own
    # wrong order; no line break before <answer>
    ("<answer>\n2\n</answer>\n<think>\n1+1\n</think>\n", 0, 0.75),
    (FORMATTED + "\nI hope it is right.", 1, 1.0),
    (FORMATTED + " Really.", 0, 1.0),
    (FORMATTED.replace("\n</answer>", ""), 0, 0.75),  # cut at --max-new-tokens
    (FORMATTED.replace("</think>\n<answer>", "</think>\n\n<answer>"), 0, 1.0),
    (FORMATTED.replace("1+1=2", "<think>\n1+1=2\n</think>\n"), 1, 0.5),  # nested
    (FORMATTED + "\n" + FORMATTED, 1, 0.0),  # each tag twice
])
def test_both_format_rewards_score_as_documented(completion, formatted, tags):
    assert reward("think_format", completion) == formatted
    assert reward("tag_count", completion) == tags


def test_think_format_does_not_slow_down_on_a_hostile_text():
    assert reward("think_format", "<think>\n" + "\n</think>\n<answer>\n" * 100_000) == 0
    assert reward("think_format", "<think>\n" * 200_000) == 0


SKY = '{"name": "sky", "color": "blue"}'


def words(count: int) -> str:
    return " word\n" * count


@pytest.mark.parametrize("name, completion, row, expected", [
    ("ends_with_question", "Why? \n", {}, 1),
    ("ends_with_question", "?", {}, 1),
    ("ends_with_question", "", {}, 0),
    ("ends_with_question", "Why?)", {}, 0),
    ("json_keys", f"```json\n{SKY}\n```", {}, 1),
    ("json_keys", f"Here it is: {SKY}", {}, 0),
    ("json_keys", f"```json\n{SKY}\n```\nHere it is.", {}, 0),
    ("json_keys", '{"name": "sky", "color": null, "size": 1}', {}, 1),
    ("json_keys", '{"a": 1}', {"keys": ["a"]}, 1),
    ("json_keys", SKY, {"keys": ["name", "size"]}, 0),
    ("json_keys", f"[{SKY}]", {}, 0),
    ("json_keys", "[" * 100_000, {}, 0),
    ("json_keys", "9" * 10_000, {}, 0),
    ("length_near", words(20), {}, 1.0),
    ("length_near", words(10), {}, 0.5),
    ("length_near", words(30), {}, 0.5),
    ("length_near", words(400), {}, 0.0),
    ("length_near", words(4), {"length": 5}, 0.8),
])
def test_each_example_rewards_what_it_claims(name, completion, row, expected):
    assert reward(name, completion, row) == pytest.approx(expected)


@pytest.mark.needs("vaderSentiment")
def test_sentiment_tells_positive_from_negative_and_neutral():
    glad = reward("sentiment", "I love this wonderful, happy day!")
    sad = reward("sentiment", "I hate this awful war.")
    assert -1 <= sad < -0.5 < 0.5 < glad <= 1
    assert reward("sentiment", "") == reward("sentiment", "A table has four legs.") == 0


def test_without_vader_sentiment_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    rewards.sentiment_analyzer.cache_clear()
    with pytest.raises(ModuleNotFoundError,
                       match="^sentiment needs vaderSentiment: pip install vaderSentiment$"):
        reward("sentiment", "fine")


def test_a_sum_of_rewards_is_a_reward():
    config = humanline.Config(reward=f"{ROOT}/configs/rewards.py:math_recipe")
    texts = ["<think>\n1+1\n</think>\n<answer>\n2\n</answer>", "2", "<think>\n3"]
    assert humanline.Reward(config)([[]] * 3, texts, [{"answer": "2"}] * 3) == [10, 8, 0.25]
