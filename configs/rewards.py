"""Reward functions to use or copy, each with --reward configs/rewards.py:NAME.

A reward is a function(prompts, completions, rows) that returns one number per completion. Prompts are lists
of messages, completions are strings, and rows are the rows of the data as dicts, with all their columns. All
completions of a prompt come in the same call, one after another, so a reward may compare them. To combine
several rewards, write a function that sums them, as math_recipe does.
"""

import functools
import json
import re


def think_format(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    r"""1 if the completion is <think>…</think> followed by <answer>…</answer>, with each tag on its own line,
    starting from the first line; else 0. Like open-r1's `format`, it allows further lines afterwards and
    further tags inside. Some chat templates end a prompt with <think>, so it may be missing.

    >>> think_format([], ["<think>\n1+1\n</think>\n<answer>\n2\n</answer>", "<answer>\n2\n</answer>"], [])
    [1.0, 0.0]
    >>> think_format([], ["1+1\n</think>\n<answer>\n2\n</answer>"], [])
    [1.0]
    """
    def is_formatted(text: str) -> bool:
        inside = text.removeprefix("<think>\n")
        answer = inside.partition("\n</think>\n<answer>\n")[2]
        is_opened = inside != text or "<think>" not in text
        return is_opened and "\n</answer>\n" in answer + "\n"

    return [float(is_formatted(text)) for text in completions]


def tag_count(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    r"""1/4 for each of the four tags that occurs exactly once, with its line breaks, like open-r1's
    `tag_count`.

    >>> tag_count([], ["<think>\n1+1\n</think>\n<answer>\n2\n</answer>", "<think>\n1+1\n</think>\n2"], [])
    [1.0, 0.5]
    """
    tags = "<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"
    return [sum(text.count(tag) == 1 for tag in tags) / len(tags) for text in completions]


def math_recipe(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """The authors' reward for math: 8 for the correct answer, plus up to 1 each for think_format and
    tag_count."""
    from math_reward import math

    weights = {math: 8, think_format: 1, tag_count: 1}
    totals = [0.0] * len(completions)
    for function, weight in weights.items():
        for i, value in enumerate(function(prompts, completions, rows)):
            totals[i] += weight * value
    return totals


def sentiment(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """Sentiment from -1 to 1: the `compound` score of VADER, a lexicon of 7,500 rated words."""
    analyzer = sentiment_analyzer()
    return [analyzer.polarity_scores(text)["compound"] for text in completions]


@functools.cache
def sentiment_analyzer():
    """Load VADER once."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ModuleNotFoundError:
        raise ModuleNotFoundError("sentiment needs vaderSentiment: pip install vaderSentiment") from None
    return SentimentIntensityAnalyzer()


def ends_with_question(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    r"""1 if the text ends with a question mark, ignoring trailing white space; else 0.

    >>> ends_with_question([], ["Why?\n", "Why? Because."], [])
    [1.0, 0.0]
    """
    return [float(text.rstrip().endswith("?")) for text in completions]


def json_keys(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """1 if the completion is a single JSON object, optionally in a ``` code block, that has the row's `keys`,
    by default "name" and "color"; else 0. Further keys are allowed.

    >>> json_keys([], ['{"name": "sky", "color": "blue"}', '{"name": "sky"}'], [{}, {}])
    [1.0, 0.0]
    """
    def has_keys(text: str, keys: list[str]) -> bool:
        fenced = re.fullmatch(r"```\w*\n(.*)```", text.strip(), re.DOTALL)
        try:
            value = json.loads(fenced[1] if fenced else text)
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            return False
        return isinstance(value, dict) and set(keys) <= set(value)

    default = ["name", "color"]
    return [float(has_keys(text, row.get("keys") or default)) for text, row in zip(completions, rows)]


def checked(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """Apply the row's `check`: "question" for ends_with_question, "json" for json_keys.

    >>> checked([], ["Why?", "Why?"], [{"check": "question"}, {"check": "json"}])
    [1.0, 0.0]
    """
    checks = dict(question=ends_with_question, json=json_keys)
    return [checks[row["check"]]([], [text], [row])[0] for text, row in zip(completions, rows)]


def length_near(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """1 if the completion has the row's `length` in words, by default 20. Each word more or less costs 1 /
    length, down to 0.

    >>> length_near([], ["one two three", "one two three four five", ""], [{"length": 4}] * 3)
    [0.75, 0.75, 0.0]
    """
    def nearness(text: str, length: float) -> float:
        return max(0.0, 1 - abs(len(text.split()) - length) / length)

    return [nearness(text, row.get("length") or 20) for text, row in zip(completions, rows)]
