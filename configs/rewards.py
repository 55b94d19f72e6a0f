"""Reward functions to use and to copy, each with --reward configs/rewards.py:NAME. A sum of several is a function,
too: see math_recipe.

A reward is a function(prompts, completions, rows) that gives one number for each completion. Prompts are lists of
messages, completions are texts, and rows are dicts: the rows of the data with all that they hold.
"""

import functools
import json
import re


def think_format(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    r"""1 for <think>…</think> and then <answer>…</answer>, each tag on a line of its own, from the first line on; else
    0. As open-r1's `format`, which lets more lines follow and more tags stand inside.

    >>> think_format([], ["<think>\n1+1\n</think>\n<answer>\n2\n</answer>", "<answer>\n2\n</answer>"], [])
    [1.0, 0.0]
    """
    def is_formatted(text: str) -> bool:
        inside = text.removeprefix("<think>\n")
        answer = inside.partition("\n</think>\n<answer>\n")[2]
        return inside != text and "\n</answer>\n" in answer + "\n"

    return [float(is_formatted(text)) for text in completions]


def tag_count(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    r"""A quarter for each of the four tags that is there exactly once, with its line breaks. As open-r1's `tag_count`.

    >>> tag_count([], ["<think>\n1+1\n</think>\n<answer>\n2\n</answer>", "<think>\n1+1\n</think>\n2"], [])
    [1.0, 0.5]
    """
    tags = "<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"
    return [sum(text.count(tag) == 1 for tag in tags) / len(tags) for text in completions]


def math_recipe(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """The authors' for math: 8 for the right answer, and up to 1 each for think_format and tag_count."""
    from math_reward import math

    weights = {math: 8, think_format: 1, tag_count: 1}
    totals = [0.0] * len(completions)
    for function, weight in weights.items():
        for i, value in enumerate(function(prompts, completions, rows)):
            totals[i] += weight * value
    return totals


def sentiment(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """How glad a text sounds, from -1 to 1: the "compound" of VADER, which knows the mood of 7,500 words."""
    analyzer = sentiment_analyzer()
    return [analyzer.polarity_scores(text)["compound"] for text in completions]


@functools.cache
def sentiment_analyzer():
    """VADER, loaded once."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ModuleNotFoundError:
        raise ModuleNotFoundError("sentiment needs vaderSentiment: pip install vaderSentiment") from None
    return SentimentIntensityAnalyzer()


def ends_with_question(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    r"""1 if the last character is a question mark, white space aside.

    >>> ends_with_question([], ["Why?\n", "Why? Because."], [])
    [1.0, 0.0]
    """
    return [float(text.rstrip().endswith("?")) for text in completions]


def json_keys(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """1 if all of it is one JSON object, perhaps between lines of ```, that has the row's `keys`, by default "name" and
    "color". It may have others.

    >>> json_keys([], ['{"name": "sky", "color": "blue"}', '{"name": "sky"}'], [{}, {}])
    [1.0, 0.0]
    """
    def has_keys(text: str, keys: list[str]) -> bool:
        fenced = re.fullmatch(r"```\w*\n(.*)```", text.strip(), re.DOTALL)
        try:
            value = json.loads(fenced[1] if fenced else text)
        except (ValueError, RecursionError):  # no JSON, or brackets without end
            return False
        return isinstance(value, dict) and set(keys) <= set(value)

    return [float(has_keys(text, row.get("keys") or ["name", "color"])) for text, row in zip(completions, rows)]


def checked(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """What the row's `check` asks for: "question" is ends_with_question, "json" is json_keys.

    >>> checked([], ["Why?", "Why?"], [{"check": "question"}, {"check": "json"}])
    [1.0, 0.0]
    """
    checks = dict(question=ends_with_question, json=json_keys)
    return [checks[row["check"]]([], [text], [row])[0] for text, row in zip(completions, rows)]


def length_near(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """1 at the row's `length` in words, by default 20; a word more or less costs one part of that, and 0 is the least.

    >>> length_near([], ["one two three", "one two three four five", ""], [{"length": 4}] * 3)
    [0.75, 0.75, 0.0]
    """
    def nearness(text: str, length: float) -> float:
        return max(0.0, 1 - abs(len(text.split()) - length) / length)

    return [nearness(text, row.get("length") or 20) for text, row in zip(completions, rows)]
