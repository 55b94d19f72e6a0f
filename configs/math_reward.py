"""--reward math: 1 for a completion whose final answer equals the row's, else 0.

The row has an `answer` (of GSM8K's, what follows ####), or a `solution` with a \\boxed{}. Strings and plain numbers are
compared at once; for anything else math-verify is asked, in this process, with a limit for its memory.
"""

import functools
import os
import re
import sys
from fractions import Fraction

SECONDS = 3  # for each of math-verify's steps: reading the two answers, and comparing them


def math(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """1 or 0 for each completion. An `answer` that is a list of texts means any of them."""

    def is_right(text: str, row: dict) -> bool:
        answers = row["answer"] if isinstance(row.get("answer"), list) else [row.get("answer")]
        references = [reference_answer(row | {"answer": answer}) for answer in answers]
        if not any(references) and boxed(str(row.get("solution"))) is None:  # MATH has an empty box, twice
            raise ValueError("the row has no answer, and no solution with a \\boxed{}")
        return any(same_answer(reference or "", final_answer(text)) for reference in references)

    return [float(is_right(text, row)) for text, row in zip(completions, rows)]


def boxed(text: str) -> str | None:
    """What is in the last \\boxed{}; None if there is none or its braces don't match."""
    _, box, rest = re.sub(r"\\boxed\s+(\w)", r"\\boxed{\1}", text).rpartition("\\boxed{")  # MATH has "\boxed 2"
    depth = 0
    for end, sign in enumerate(rest if box else ""):
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return rest[:end]
    return None


def reference_answer(row: dict) -> str | None:
    """A row's `answer` (of GSM8K's, what follows ####), or what is in the last \\boxed{} of its `solution`; or None."""
    text = boxed(str(row.get("solution"))) if row.get("answer") is None else str(row["answer"])
    if not text:
        return None
    return " ".join((boxed(text) or text.split("####")[-1]).split()) or None


def final_answer(text: str) -> str:
    """A completion's answer: its last \\boxed{}, as $...$, or what follows its last #### or "answer is", or its last
    line; the latter in its last <answer>…</answer>, if it has one."""
    inside = boxed(text)
    if inside is not None:
        return f"${' '.join(inside.split())}$"
    _, tag, rest = text.rpartition("<answer>")
    text = rest.partition("</answer>")[0] if tag else text
    for mark in ("####", r"(?i)answer(?:\s+is\b|\s*:)\s*:?"):
        parts = re.split(mark, text)
        if len(parts) > 1:
            tail = re.sub(r"(?i)^(final\s+)?answer[\s*:]+", "", parts[-1].strip(" \n\t*:"))  # "#### Final Answer:"
            tail = re.sub(r"^(\\\[|\$\$)\s*", "", tail)  # a formula on lines of its own
            return " ".join(re.split(r"\.\s|\n", tail)[0].split())
    return " ".join(text.strip().rpartition("\n")[2].split())


def same_answer(reference: str, answer: str) -> bool:
    """Whether two answers are equal; `compare` is asked where strings and plain numbers do not tell."""
    if not reference or not answer or len(answer) > 1000 + len(reference):  # no answer is that long
        return False
    if re.search(HEDGE, answer) and not re.search(HEDGE, reference):
        return False
    reference, answer = written(reference), written(answer)
    expected, given = plain(reference), plain(answer)
    if all(re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", text) for text in (expected, given)):
        return Fraction(expected) == Fraction(given)
    return expected == given or compare(reference, answer.strip(" *").removesuffix(".").strip(" *"))


# "4 or 5" and "not 5" are no 5, though a number can be read off them.
HEDGE = r"\d\W*\s(?:\\text\{\s*)?or\b\W*\d|\bnot\s\W*\d"


def written(text: str) -> str:
    """An answer with its numbers and lists as they are usually written: 10\\,000 is 10000, but 1\\,1 is two numbers;
    "1, 2, and 3" is 1,2,3; "1 1/2" is 1\\frac{1}{2}."""
    text = re.sub(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<=\d)\\[,;: ](?=\d)", " ", text)
    if re.fullmatch(r"\S+(,\s*\S+)*,?\s+and\s+\S+", text):
        text = re.sub(r",?\s+and\s+", ",", text)
    return re.sub(r"^(\W*\d+)\s+(\d+)/(\d+)(\W*)$", r"\1\\frac{\2}{\3}\4", text)


def plain(text: str) -> str:
    """An answer without what does not matter: signs of other shapes, text around it, spacing, commas in numbers."""
    text = text.replace("−", "-").replace("{,}", ",").strip(" *$").removesuffix(".").strip(" *$")
    text = re.sub(r"\\(?:text|mbox|mathrm)\{([^{}]*)\}", r"\1", re.sub(r"\\[dt]frac", r"\\frac", text))
    # Spacing goes, but not between digits: "1 1/2" is not 11/2.
    text = re.sub(r"\\(?:left|right|q?quad)(?![a-zA-Z])|\\[!,;: $]|(?<!\d)\s+|\s+(?!\d)", "", text)
    return text.replace(",", "") if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text) else text


@functools.cache
def prepare():
    """math-verify's two functions, in a process where nothing that a model writes can be run as code."""
    import sympy
    import sympy.physics.units  # now, as simplify would import it under the rules below

    # sympy makes numbers and formulas of text by eval. Here it makes numbers only, and math-verify's LaTeX parser makes
    # formulas; and whatever else would run as code must from now on come from a file.
    def number(text, *_, **__):
        return sympy.Float(text) if "." in text else sympy.Integer(text)

    sympy.parsing.sympy_parser.parse_expr = sympy.parsing.parse_expr = number
    from math_verify import parse, parser, verify

    parser.parse_expr_cached = lambda text: parser.parse_latex_cached(text.replace("**", "^"))

    def code_from_files_only(event, args):
        if event == "exec" and not os.path.isfile(args[0].co_filename):
            raise RuntimeError("code that is in no file")

    sys.addaudithook(code_from_files_only)
    return parse, verify


@functools.lru_cache(4096)  # the same errors come often
def compare(reference: str, answer: str) -> bool:
    """Whether math-verify takes two answers for the same."""
    parse, verify = prepare()

    def parsed(text):  # math-verify looks for formulas between dollars, and for numbers in sentences
        text = text.replace("\\$", "")  # of an amount of money
        sentence = re.search(r"(?<!\\)\$|\\[(\[]|[A-Za-z]{3}", re.sub(r"\\[a-zA-Z]+(\{[^{}]*\})?", " ", text))
        return parse(text if sentence else f"${text}$", parsing_timeout=SECONDS, raise_on_error=True)

    try:
        return verify(parsed(reference), parsed(answer), timeout_seconds=SECONDS, raise_on_error=True)
    except Exception:  # no mathematics, or not comparable; its time-out is no Exception
        return False


def limit_memory() -> None:
    """4 GiB for this process: a power of powers would take all that there is."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "users_file":  # in the process of --reward math
    if sys.platform == "linux":
        limit_memory()
    prepare()
