"""The reward of --reward math: 1 if a completion's final answer equals the row's answer, else 0.

A row has an `answer` (in GSM8K, the part after ####) or a `solution` with a \\boxed{}. Strings and plain
numbers are compared directly. Everything else is passed to math-verify, in this process, with a memory limit.
"""

import functools
import os
import re
import sys
import unicodedata
from fractions import Fraction

SECONDS = 3  # time limit for each call to math-verify: parsing an answer, and comparing two


def math(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """1 or 0 for each completion. If `answer` is a list of strings, any of them is correct."""

    def is_right(text: str, row: dict) -> bool:
        answers = row["answer"] if isinstance(row.get("answer"), list) else [row.get("answer")]
        references = [reference_answer(row | {"answer": answer}) for answer in answers]
        if not any(references) and "\\boxed" not in str(row.get("solution")):  # MATH has two empty boxes
            raise ValueError("the row has neither an answer nor a solution with a \\boxed{}")
        return any(same_answer(reference or "", final_answer(text)) for reference in references)

    return [float(is_right(text, row)) for text, row in zip(completions, rows)]


def boxed(text: str) -> str | None:
    """The contents of the last \\boxed{} that is not empty, or None if there is none or it is not closed."""
    text = re.sub(r"\\boxed\s+(\d)", r"\\boxed{\1}", text)  # MATH has "\boxed 2"
    found = 0, None
    opened = []  # where the contents of each open brace begin, and whether they are a box
    for mark in re.finditer(r"(\\(?:boxed|fbox)\s*)?(?<!\\)\{|(?<!\\)\}", text):
        if mark[0] != "}":
            opened.append((mark.end(), bool(mark[1])))
        elif opened:
            start, is_box = opened.pop()
            if is_box and text[start : mark.start()].strip():
                found = max(found, (start, text[start : mark.start()]))
    is_open = any(is_box and start > found[0] for start, is_box in opened)
    return None if is_open else found[1]


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
    counts only if it ends and nothing follows it."""
    after = text.rpartition("</think>")[2]
    text = after if after.strip() else text
    if after == text and "<think>" in text:  # the thought has not ended
        return ""
    inside = boxed(text)
    if inside is not None:
        return f"${' '.join(inside.split())}$"
    _, tag, rest = text.rpartition("<answer>")
    text = rest.partition("</answer>")[0] if tag else text
    for mark in ("####", r"(?i)(?:answer|答案)(?:\s+is\b|\s*[是为]|[\s*]*[:：])\s*[:：]?"):
        parts = re.split(mark, text)
        if len(parts) > 1:
            tail = parts[-1].strip(" \n\t*:")
            tail = re.sub(r"(?i)^(final\s+)?answer[\s*:]+", "", tail)  # "#### Final Answer:"
            tail = re.sub(r"^(\\\[|\$\$)\s*", "", tail)  # a displayed formula
            return " ".join(re.split(r"\.\s|\n", tail)[0].split())
    text = re.sub(r"(\\\]|\$\$)\s*$", "", text)  # the end of a displayed formula
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
    numbers = number(expected), number(given)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if re.fullmatch(r"\(?[A-J]\)?", expected):  # multiple choice: "(C) 12" and "C: a fox" answer C
        given = re.sub(r"^\(?([A-J])[):.].*", r"\1", given)
        expected = expected.strip("()")
    if re.fullmatch(r"[A-Za-z]{3,}|[Nn]o", expected):
        expected, given = expected.lower(), given.lower()
    if expected == given:
        return True
    if re.search(r"\\[lc]?dots|\.\.\.|…", reference):  # the library leaves dots out
        return False
    return compare(reference, answer)


# "4 or 5" and "not 5" do not answer 5, although the number could be parsed from them.
NOT = r"\bnot\s\W*\d"
HEDGE = r"\d\W*\s(?:\\text\{\s*)?or\b\W*\d|" + NOT

# How formulas are written: each pattern is replaced, in this order.
NOTATION = {
    r"\\text(?:bf|it|rm|normal)|\\math(?:bf|rm|it)|\\mbox": r"\\text",
    r"\\text\{\s*(e|i|\\?pi)\s*\}": r"\1",  # constants, which would be read as units
    r"\\(?:left|right)\s*(?=[\[\]()])": "",
    r"(?<=\d)(?:\\[,;: !]\s*|~)(?=\d{3}(?!\d))": "",  # 10\,000, but 1\,1 stays two numbers
    r"(?<=\d)(?:\\[,;: ]|~)(?=\d)": " ",
    r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])": r"\1\\times 10^{\2}",
    r"^(\W*\d+)\s+(\d+)/(\d+)(\W*)$": r"\1\\frac{\2}{\3}\4",  # 1 1/2
    r"(?<=\d)i\b": " i",  # without the space, it would be a real variable
    # As in programs: 3*pi, x**2, sqrt(2), exp(2)
    r"\*\*(?=\S)(?<=\S\*\*)": "^",
    r"\*": r"\\cdot ",
    r"(?<![\\A-Za-z])(sqrt|pi|exp|sin|cos|tan|log|ln)(?![A-Za-z])": r"\\\1",
    r"\\sqrt\s*\(([^()]*)\)": r"\\sqrt{\1}",
    r"\+\s*-": "-",
    # Intervals: x \in [0,1), and the French ]0,1]
    r"^(\$?\s*)[a-zA-Z]\s*\\in\s*(?=[\[(\]\\])": r"\1",
    r"^(\$?\s*)\]([^\[\]()]*,[^\[\]()]*[\[\])])": r"\1(\2",
    r"^(\$?\s*[\[(][^\[\]()]*,[^\[\]()]*)\[": r"\1)",
    r"\\text\{\s*(and|or)\s*\}": r" \1 ",
}
SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "±": r"\pm ", "√": r"\sqrt ",
    "∞": r"\infty ", "π": r"\pi ", "θ": r"\theta ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset "}


def written(text: str) -> str:
    """Normalize how formulas, numbers and lists are written, to LaTeX in ASCII: 10\\,000 becomes 10000, ½
    \\frac{1}{2}, 3*pi 3\\cdot \\pi, "1, 2, and 3" 1,2,3, and 1e-5 1\\times 10^{-5}."""
    text = re.sub("[⁰¹²³⁴-⁹⁺⁻ⁿ]+", lambda power: "^{" + unicodedata.normalize("NFKC", power[0]) + "}", text)
    text = re.sub("[¼-¾⅐-⅞]", lambda part: "\\frac{%s}{%s}" % tuple(
        unicodedata.normalize("NFKC", part[0]).split("⁄")), text)
    text = re.sub(r"√(\d+|\w)", r"\\sqrt{\1}", text)
    text = "".join(SYMBOLS.get(character, character) for character in text)
    text = text.strip(" *").removesuffix(".").strip(" *")
    for pattern, replacement in NOTATION.items():
        text = re.sub(pattern, replacement, text)
    if re.fullmatch(r"\S+(,\s*\S+)*,?\s+(and|or)\s+\S+", text):
        text = re.sub(r",?\s+(and|or)\s+", ",", text)
    return text


def plain(text: str) -> str:
    """Remove variations that do not matter: \\text around it, spacing, commas in numbers."""
    text = text.replace("{,}", ",").strip(" *$").removesuffix(".").strip(" *$")
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", re.sub(r"\\[dt]frac", r"\\frac", text))
    # Spaces are removed, but not between digits: "1 1/2" is not 11/2.
    text = re.sub(r"\\(?:left|right|q?quad)(?![a-zA-Z])|\\[!,;: $]|(?<!\d)\s+|\s+(?!\d)", "", text)
    text = re.sub(r"(?i)^no(?:real)?solutions?$|^\\varnothing$|^\\\{\\\}$", r"\\emptyset", text)
    is_long = re.fullmatch(r"[-+]?\d{1,3}([, ]\d{3})+(\.\d+)?", text)
    return re.sub("[, ]", "", text) if is_long else text


def number(text: str) -> Fraction | None:
    """The value of a decimal number, also of one times a power of ten, exactly; None for everything else."""
    parts = re.fullmatch(r"([-+]?(?:\d+\.?\d*|\.\d+))(?:\\times10\^\{?([-+]?\d{1,3})\}?)?", text)
    return parts and Fraction(parts[1]) * Fraction(10) ** int(parts[2] or 0)


@functools.cache
def prepare():
    """Import math-verify's two functions, after making sure that model output cannot be executed as code."""
    import sympy
    import sympy.physics.units  # imported now, since simplify would import it under the rules below
    from sympy.polys import monomials

    # sympy parses numbers and formulas with eval. Here it only parses numbers, formulas are parsed by
    # math-verify's LaTeX parser, and from now on only code that comes from a file may run.
    def number(text, *_, **__):
        return sympy.Float(text) if "." in text else sympy.Integer(text)

    sympy.parsing.sympy_parser.parse_expr = sympy.parsing.parse_expr = number
    from math_verify import grader, parse, parser, verify

    parser.parse_expr_cached = lambda text: parser.parse_latex_cached(text.replace("**", "^"))

    # math-verify rounds to 6 decimal places, which makes all small numbers equal: look at the digits too.
    rounded_eq = grader.sympy_numeric_eq

    def numeric_eq(a, b, *precision):
        is_equal = rounded_eq(a, b, *precision)
        is_percent = any(grader.get_pct_val(value) is not None for value in (a, b))
        if is_equal and not is_percent and getattr(a, "is_number", False) and getattr(b, "is_number", False):
            a, b = a.evalf(), b.evalf()
            return bool(abs(a - b) <= 1e-5 * max(abs(a), abs(b)))
        return is_equal

    grader.sympy_numeric_eq = numeric_eq

    def code_from_files_only(event, args):
        if event == "exec" and not os.path.isfile(args[0].co_filename):
            # sympy's polynomials write a few functions, from nothing but their number of variables.
            if sys._getframe(1).f_code.co_filename != monomials.__file__:
                raise RuntimeError("refused to execute code that is not in a file")

    sys.addaudithook(code_from_files_only)
    return parse, verify


# Second readings, if an answer is not right as it stands: degrees as radians, and log as ln.
READINGS = [
    (r"(\d+\.?\d*)\s*\^\s*\{?\s*\\circ\s*\}?", r"\\frac{\1\\pi}{180}"),
    (r"\\log(?!\s*_|[a-z])", r"\\ln"),
]


@functools.lru_cache(4096)  # models often make the same errors
def compare(reference: str, answer: str) -> bool:
    """Whether math-verify considers two answers equal."""
    parse, verify = prepare()

    def parsed(text):  # math-verify finds formulas between dollar signs, and numbers in sentences
        text = text.replace("\\$", "")  # a currency sign
        sentence = re.search(r"(?<!\\)\$|\\[(\[]|[A-Za-z]{3}", re.sub(r"\\[a-zA-Z]+(\{[^{}]*\})?", " ", text))
        return parse(text if sentence else f"${text}$", parsing_timeout=SECONDS, raise_on_error=True)

    def are_equal(reference, answer):
        try:
            return verify(parsed(reference), parsed(answer), timeout_seconds=SECONDS, raise_on_error=True,
                          allow_set_relation_comp=True)
        except Exception:  # not mathematics, or not comparable; a timeout is not an Exception
            return False

    expected, given = units(reference), units(answer)
    if expected and given and expected != given:
        return False
    if are_equal(reference, answer):
        return True
    for pattern, replacement in READINGS:
        other = [re.sub(pattern, replacement, text) for text in (reference, answer)]
        if other != [reference, answer] and are_equal(*other):
            return True
    return False


def units(text: str) -> list | None:
    """The units after a number, such as [meter, "/", second]; None if one of them is unknown."""
    from sympy.physics import units as known

    text = re.sub(r"\\(?:text|[dt]?frac|cdot|[,;! ])|[{}$~*]", " ", text)
    after = re.fullmatch(r"[^A-Za-z]*\d\s*([A-Za-z][A-Za-z/^\d\s]*)\.?\s*", text)
    names = re.findall(r"[A-Za-z]+|\d|/", after[1] if after else "")
    found = [getattr(known, name, None) if name.isalpha() else name for name in names]
    return None if None in found else found


def limit_memory() -> None:
    """Limit this process to 4 GiB, since a tower of powers could otherwise use up all memory."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))


if "users_file" in sys.modules:  # in the process of a reward
    if sys.platform == "linux":
        limit_memory()
    prepare()
