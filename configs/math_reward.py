"""The reward of --reward math: 1 if a completion's final answer equals the row's answer, else 0.

A row has an `answer` (in GSM8K, the part after ####) or a `solution` with a \\boxed{}. Strings and plain
numbers are compared directly. Everything else is passed to math-verify, in this process, with a memory limit.
"""

import functools
import os
import re
import sys
from fractions import Fraction

SECONDS = 3  # time limit for each call to math-verify: parsing an answer, and comparing two


def math(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """1 or 0 for each completion. If `answer` is a list of strings, any of them is correct."""

    def is_right(text: str, row: dict) -> bool:
        answers = row["answer"] if isinstance(row.get("answer"), list) else [row.get("answer")]
        references = [reference_answer(row | {"answer": answer}) for answer in answers]
        if not any(references) and boxed(str(row.get("solution"))) is None:  # MATH has two empty boxes
            raise ValueError("the row has neither an answer nor a solution with a \\boxed{}")
        return any(same_answer(reference or "", final_answer(text)) for reference in references)

    return [float(is_right(text, row)) for text, row in zip(completions, rows)]


def boxed(text: str) -> str | None:
    """The contents of the last \\boxed{}, or None if there is none or its braces are unbalanced."""
    text = re.sub(r"\\boxed\s+(\w)", r"\\boxed{\1}", text)  # MATH has "\boxed 2"
    _, box, rest = text.rpartition("\\boxed{")
    depth = 0
    for end, character in enumerate(rest if box else ""):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return rest[:end]
    return None


def reference_answer(row: dict) -> str | None:
    """The row's `answer` (in GSM8K, the part after ####), or the last \\boxed{} of its `solution`, or
    None."""
    text = boxed(str(row.get("solution"))) if row.get("answer") is None else str(row["answer"])
    if not text:
        return None
    return " ".join((boxed(text) or text.split("####")[-1]).split()) or None


def final_answer(text: str) -> str:
    """The final answer in a completion: its last \\boxed{}, as $...$; otherwise the text after the last ####
    or "answer is", or the last line, within the last <answer>…</answer> if there is one. What a thought says
    counts only if nothing follows it."""
    after = text.rpartition("</think>")[2]
    text = after if after.strip() else text
    inside = boxed(text)
    if inside is not None:
        return f"${' '.join(inside.split())}$"
    _, tag, rest = text.rpartition("<answer>")
    text = rest.partition("</answer>")[0] if tag else text
    for mark in ("####", r"(?i)answer(?:\s+is\b|[\s*]*:)\s*:?"):
        parts = re.split(mark, text)
        if len(parts) > 1:
            tail = parts[-1].strip(" \n\t*:")
            tail = re.sub(r"(?i)^(final\s+)?answer[\s*:]+", "", tail)  # "#### Final Answer:"
            tail = re.sub(r"^(\\\[|\$\$)\s*", "", tail)  # a displayed formula
            return " ".join(re.split(r"\.\s|\n", tail)[0].split())
    return " ".join(text.strip().rpartition("\n")[2].split())


def same_answer(reference: str, answer: str) -> bool:
    """Whether two answers are equal. `compare` decides when strings and plain numbers are not enough."""
    if not reference or not answer or len(answer) > 1000 + len(reference):  # too long to be an answer
        return False
    is_list = re.search(r"^[^(\[]*(,(?!\d{3}(?!\d))|\band\b)[^(\[]*$", reference)
    if re.search(NOT if is_list else HEDGE, answer) and not re.search(HEDGE, reference):
        return False
    reference, answer = written(reference), written(answer)
    expected, given = plain(reference), plain(answer)
    if all(re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", text) for text in (expected, given)):
        return Fraction(expected) == Fraction(given)
    return expected == given or compare(reference, answer.strip(" *").removesuffix(".").strip(" *"))


# "4 or 5" and "not 5" do not answer 5, although the number could be parsed from them.
NOT = r"\bnot\s\W*\d"
HEDGE = r"\d\W*\s(?:\\text\{\s*)?or\b\W*\d|" + NOT


def written(text: str) -> str:
    """Normalize how numbers and lists are written: 10\\,000 becomes 10000, but 1\\,1 stays two numbers;
    "1, 2, and 3" and "1, 2, or 3" become 1,2,3; "1 1/2" becomes 1\\frac{1}{2}."""
    text = re.sub(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<=\d)\\[,;: ](?=\d)", " ", text)
    text = re.sub(r"\\text\{\s*(and|or)\s*\}", r" \1 ", text)
    if re.fullmatch(r"\S+(,\s*\S+)*,?\s+(and|or)\s+\S+", text):
        text = re.sub(r",?\s+(and|or)\s+", ",", text)
    return re.sub(r"^(\W*\d+)\s+(\d+)/(\d+)(\W*)$", r"\1\\frac{\2}{\3}\4", text)


def plain(text: str) -> str:
    """Remove variations that do not matter: minus signs, \\text around it, spacing, commas in numbers."""
    text = text.replace("−", "-").replace("{,}", ",").strip(" *$").removesuffix(".").strip(" *$")
    text = re.sub(r"\\(?:text|mbox|mathrm)\{([^{}]*)\}", r"\1", re.sub(r"\\[dt]frac", r"\\frac", text))
    # Spaces are removed, but not between digits: "1 1/2" is not 11/2.
    text = re.sub(r"\\(?:left|right|q?quad)(?![a-zA-Z])|\\[!,;: $]|(?<!\d)\s+|\s+(?!\d)", "", text)
    return text.replace(",", "") if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text) else text


@functools.cache
def prepare():
    """Import math-verify's two functions, after making sure that model output cannot be executed as code."""
    import sympy
    import sympy.physics.units  # imported now, since simplify would import it under the rules below

    # sympy parses numbers and formulas with eval. Here it only parses numbers, formulas are parsed by
    # math-verify's LaTeX parser, and from now on only code that comes from a file may run.
    def number(text, *_, **__):
        return sympy.Float(text) if "." in text else sympy.Integer(text)

    sympy.parsing.sympy_parser.parse_expr = sympy.parsing.parse_expr = number
    from math_verify import parse, parser, verify

    parser.parse_expr_cached = lambda text: parser.parse_latex_cached(text.replace("**", "^"))

    def code_from_files_only(event, args):
        if event == "exec" and not os.path.isfile(args[0].co_filename):
            raise RuntimeError("refused to execute code that is not in a file")

    sys.addaudithook(code_from_files_only)
    return parse, verify


@functools.lru_cache(4096)  # models often make the same errors
def compare(reference: str, answer: str) -> bool:
    """Whether math-verify considers two answers equal."""
    parse, verify = prepare()

    def parsed(text):  # math-verify finds formulas between dollar signs, and numbers in sentences
        text = text.replace("\\$", "")  # a currency sign
        sentence = re.search(r"(?<!\\)\$|\\[(\[]|[A-Za-z]{3}", re.sub(r"\\[a-zA-Z]+(\{[^{}]*\})?", " ", text))
        return parse(text if sentence else f"${text}$", parsing_timeout=SECONDS, raise_on_error=True)

    try:
        return verify(parsed(reference), parsed(answer), timeout_seconds=SECONDS, raise_on_error=True)
    except Exception:  # not mathematics, or not comparable; a timeout is not an Exception
        return False


def limit_memory() -> None:
    """Limit this process to 4 GiB, since a tower of powers could otherwise use up all memory."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))


if "users_file" in sys.modules:  # in the process of a reward
    if sys.platform == "linux":
        limit_memory()
    prepare()
