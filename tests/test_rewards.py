"""Rewards: which answers are correct, which sample gets which reward, and that no failure of a reward stops a
run."""

import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from bases import character_tokenizer
from conftest import ROOT, metrics, write_jsonl

import eval as evaluation
import humanline
from humanline import Config, UserError
from warm import Started

MATH_FILE = ROOT / "configs" / "math_reward.py"
PROMPT = [{"role": "user", "content": "1+1="}]
spec = importlib.util.spec_from_file_location("math_reward", MATH_FILE)
math_reward = importlib.util.module_from_spec(spec)
spec.loader.exec_module(math_reward)


def load(reward: str, **settings) -> humanline.Reward:
    return humanline.Reward(Config(reward=reward, **settings))


def process_number(reward: humanline.Reward) -> int:
    return reward.function.process.pid


@pytest.fixture
def comparisons(monkeypatch) -> list[tuple[str, str]]:
    """The pairs of answers that are passed to math-verify, which is replaced by one that accepts all of
    them."""
    pairs = []
    monkeypatch.setattr(math_reward, "compare", lambda *pair: pairs.append(pair) or True)
    return pairs


def warnings(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]


# Mathematics: where an answer stands in a completion, and what equals it.

@pytest.mark.parametrize("completion, answer", [
    (r"So \boxed{17}, no, $\boxed{\frac{1}{2}}$.", r"$\frac{1}{2}$"),
    (r"\boxed{17} is what \boxed{18 would be", "\\boxed{17} is what \\boxed{18 would be"),
    ("She has <<3*6=18>>18.\n#### 18", "18"),
    ("The answer is: 42. I hope it is correct.", "42"),
    ("#### Final Answer:\n18", "18"),
    ("The answer is\n$$\n\\frac{1}{2}\n$$\n", "\\frac{1}{2}"),
    ("The answer is 17. No, the final answer is $18$.\nDone", "$18$"),
    (r"#### 17, so the answer is \boxed{18}", "$18$"),
    ("answers are hard\n\n  18 \n", "18"),
    ("<think>\n3?\n</think>\n<answer>\n$\\frac{1}{2}$\n</answer>", "$\\frac{1}{2}$"),
    ("<answer>1</answer><answer>\nThe answer is 2.\n</answer> I hope.", "2."),
    ("<think>\nso \\boxed{3}\n</think>\n", "$3$"),
    ("<think>The answer is A. No.</think>\nB", "B"),
    ("<answer>\n5", "5"),
    ("<think>\n\\boxed{7}. No, 8.\n</think>\n<answer>\n8\n</answer>", "8"),
    ("<think>\\boxed{7}? Wait.</think> The answer is **8**.", "8**."),
    ("**Final Answer**: 8\nDone.", "8"),
    (r"\boxed{5}. As asked, it is in \boxed or \boxed{}.", "$5$"),
    (r"\boxed{\left\{ 1 \right.}", r"$\left\{ 1 \right.$"),
    ("So\n\\[\nx = 5\n\\]", "x = 5"),
    ("<think>\n\\boxed{5}? Let me see", ""),
])
def test_the_final_answer_is_found(completion, answer):
    assert math_reward.final_answer(completion) == answer


@pytest.mark.parametrize("row, answer", [
    ({"answer": "3 + 4 = 7\n#### 1,234"}, "1,234"), ({"answer": 0}, "0"),
    ({"answer": r"\frac{1}{2}", "solution": r"\boxed{3}"}, r"\frac{1}{2}"),
    ({"solution": r"It is \boxed{1}, or \boxed{\frac{1}{2}}."}, r"\frac{1}{2}"),
    ({"answer": None, "solution": r"\boxed{x}"}, "x"), ({"answer": r"Thus $\boxed{8}$."}, "8"),
    ({"solution": "It is 3."}, None), ({}, None), ({"answer": " "}, None),
    ({"solution": r"so $\boxed 2$"}, "2"), ({"answer": "7\n####"}, None),
])
def test_the_reference_is_the_rows_answer_or_the_box_of_its_solution(row, answer):
    assert math_reward.reference_answer(row) == answer


@pytest.mark.parametrize("reference, answer", [
    ("18", "$18$."), ("18", "18.00"), ("18", "+18"), ("-5", "−5"), ("11,\\! 111,\\! 100", "11,111,100"),
    ("1000", "1{,}000"), ("\\$32,\\!348", "32348"), (".35625", "0.35625"),
    ("18", "**18**"), ("\\frac{3}{2}", "$\\tfrac{3}{2}$"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"), ("\\text{Evelyn}", "Evelyn"),
    ("5.4 \\text{ cents}", "5.4 cents"),
])
def test_equal_strings_and_numbers_do_not_need_the_math_library(comparisons, reference, answer):
    assert math_reward.same_answer(reference, answer) is True and not comparisons


@pytest.mark.parametrize("reference, answer", [
    ("18", "19"), ("18", ""), ("", "18"), ("1.5", "15"), ("18", "1" * 100_000), ("0.001", "0"),
    ("1,234", "234")])
def test_different_numbers_do_not_need_the_math_library(comparisons, reference, answer):
    assert math_reward.same_answer(reference, answer) is False and not comparisons


@pytest.mark.parametrize("reference, answer", [("\\frac{1}{23}", "\\frac{12}{3}"), ("1,2", "12"),
                                               ("x_{12}", "x_12"), ("\\leftarrow", "arrow")])
def test_answers_that_a_comparison_of_strings_cannot_decide_go_to_the_math_library(
        comparisons, reference, answer):
    assert math_reward.same_answer(reference, answer) is True and comparisons == [(reference, answer)]


def test_a_mixed_number_is_not_read_as_a_longer_fraction(comparisons):
    assert math_reward.same_answer("1 1/2", "11/2") is True and comparisons == [("1\\frac{1}{2}", "11/2")]


@pytest.fixture(scope="module")
def math_score():
    sys.modules.pop("math_verify", None)  # TRL imports it
    return load("math", reward_seconds=10.0)


EQUAL = [
    (r"\frac{14}{3}", r"\boxed{14/3}"), (r"\frac{1}{2}", "The answer is 0.5"),
    ("1/3", r"\boxed{\frac{2}{6}}"), ("x^2+2x+1", r"\boxed{(x+1)^2}"), ("x=5", r"\boxed{5}"),
    (r"137 \frac{1}{2}", r"\boxed{137.5}"), ("1,-2", r"\boxed{-2, 1}"), (r"90^\circ", r"\boxed{90}"),
    (r"\frac{3}{4}", "The answer is 3/4."), ("x+1", "#### 1+x."), (r"2\sqrt{3}", r"The answer is \sqrt{12}."),
    (r"\frac{3}{4}", "**3/4**"), (r"\frac{3}{4}", "**Answer:**\n**3/4.**"),
    ("18", "so 9 * 2 = 18 dollars a day"), ("18", "#### 18 dollars"), ("12", "The answer is 3*4"),
    (r"\begin{pmatrix} 1/5 \\ -3 \end{pmatrix}", r"\boxed{\begin{pmatrix} 0.2 \\ -3 \end{pmatrix}}"),
    (r"(-\infty, 2) \cup (3, \infty)", r"\boxed{(3,\infty)\cup(-\infty,2)}"), ("20", r"\boxed{20\%}"),
    (r"6 - 5i", r"\boxed{-5i+6}"), (r"\$36", r"$36 = \boxed{36}$"),
    ("104", r"The total is \$104."), ("1,-2", r"\boxed{1 \text{ or } -2}"), ("6, 7", "The answer is 6 or 7"),
    # sympy simplifies and solves
    ("2x+4y-3=0", r"\boxed{y=-\frac12x+\frac34}"), (r"\frac{x^2-1}{x-1}", r"\boxed{x+1}"),
    (r"2\sin x\cos x", r"\boxed{\sin 2x}"), (r"x \ge 2", r"\boxed{[2,\infty)}"),
    (r"[2,\infty)", r"\boxed{x \ge 2}"), (r"(0,1]", r"\boxed{]0,1]}"),
    (r"x \in (0,1]", r"\boxed{0 < x \le 1}"),
    # small and large numbers, and JSON numbers
    (1e-05, "The answer is 0.00001."), (6.63e-34, r"\boxed{6.63 \times 10^{-34}}"), (1e22, r"\boxed{10^{22}}"),
    (r"\frac{1}{2^{99}}", r"\boxed{2^{-99}}"), ("10000", r"\boxed{10~000}"),
    # constants, units, angles and logarithms
    (r"1-\frac{1}{\mathrm{e}}", r"\boxed{1-e^{-1}}"), ("14 - i", r"\boxed{14.0 + -1.0i}"),
    (r"5 \text{ cm}", r"\boxed{5}"), ("5 m", r"\boxed{5 \text{ meters}}"),
    (r"\frac{\pi}{4}", r"\boxed{45^\circ}"),
    (r"\ln 3", r"\boxed{\log 3}"), (r"\log 100", r"\boxed{2}"),
    # as in programs, and Unicode
    (r"4\sqrt{2}", r"\boxed{4*sqrt(2)}"), ("x^{10}+1", "The answer is x**10 + 1"), (r"2\pi", r"\boxed{2π}"),
    (r"x^{-1}+\frac12", r"\boxed{x⁻¹ + ½}"), ("-3", r"\boxed{–3}"),
    # words, and multiple choice
    ("C", r"\boxed{\textbf{(C) }12}"), ("C", "The answer is C: a fox"), ("Yes", r"\boxed{\text{yes}}"),
    (r"\emptyset", r"\boxed{\text{No solution}}"), ("5", "答案是：5。"),
]
UNEQUAL = [
    (r"\frac{14}{3}", r"\boxed{4.6}"), ("5", r"\boxed{x + 5}"), ("x^2+2x+1", r"\boxed{x^2+1}"),
    (r"\text{even}", "odd"),
    ("1,-2", r"\boxed{1}"), ("18", "It could be 18, or perhaps 20"), (r"\pi", r"\boxed{3.14}"),
    ("(3,4]", r"\boxed{[3,4]}"), ("3", "I do not know"), ("3", r"\boxed{}"), ("3", "3/4 cups"),
    ("6,7", "The answer is 6 or 8"), ("1,234", "The answer is 1,234 or 5"), ("(1,2)", "(1,2) or (2,1)"),
    (r"1-\frac{1}{\mathrm{e}}", r"\boxed{1}"), ("6.63e-34", r"\boxed{1.05e-34}"), ("4", r"\boxed{4\sqrt(2)}"),
    (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}"),
    (r"\frac{2^{300}+1}{2^{301}}", r"\boxed{\frac{1}{2^{301}}}"),
    (r"\frac{1}{10^6}", r"\boxed{0.0000011}"), ("0", r"\boxed{10^{-9}}"),
    (r"5 \text{ cm}", r"\boxed{5 \text{ m}}"),
    ("25 m/s", "The answer is 25 km/h"), (r"1, 2, \ldots, n", r"\boxed{1, 3, \ldots, 2n-1}"),
    (r"[2,\infty)", r"\boxed{x > 2}"), ("(0,1]", r"\boxed{]0,1[}"), ("B", r"\boxed{\textbf{(C) }12}"),
    ("4", "<think>\nMaybe it is \\boxed{4}. Let me check: 2+2"),
]


def test_the_math_library_decides_what_strings_cannot(capsys):
    references, completions = zip(*EQUAL, *UNEQUAL)
    rows = [{"answer": reference} for reference in references]
    scores = load("math", reward_seconds=300.0)([PROMPT] * len(references), list(completions), rows)
    assert scores == [1.0] * len(EQUAL) + [0.0] * len(UNEQUAL)
    assert not warnings(capsys)


HOSTILE = ["CODE", r"\boxed{CODE}", "The answer is CODE", "#### 3+CODE", r"\boxed{\text{CODE}}", "$CODE$",
           r"\boxed{" + "{" * 400 + "}" * 400 + "}", "\ud800", "\x00"]
MORE_HOSTILE = [  # some of them take forever
    r"\boxed{9^{9^{9^9}}}", "9**9**9**9", "9^9^9^9 apples", r"\boxed{(10^{10})!}",
    "(" * 400 + "3" + ")" * 400, r"\frac" * 150, "x" * 100_000, r"\boxed{" * 10_000,
    r"\boxed{" + "1+" * 50_000 + "1}", "answer is " * 10_000, "#### " + "9" * 5000,
    r"\boxed{\sum_{n=1}^{10^{12}} n^{-3}}"]


@pytest.mark.parametrize("answers", [
    HOSTILE, pytest.param(HOSTILE + MORE_HOSTILE, marks=pytest.mark.slow)], ids=["some", "all"])
def test_hostile_answers_affect_no_other_answer(math_score, tmp_path, capsys, answers):
    code = f"__import__('os').system('touch {tmp_path}/hit')"
    completions = [text for answer in answers for text in (answer.replace("CODE", code), r"\boxed{16/2}")]
    scores = math_score([PROMPT] * len(completions), completions, [{"answer": "8"}] * len(completions))
    assert set(scores[::2]) == {0.0} and set(scores[1::2]) == {1.0}
    assert not (tmp_path / "hit").exists()
    said = "".join(warnings(capsys))
    failed = rf"--reward math: \d+ of {len(scores)} samples failed and count as 0"
    assert answers == HOSTILE or re.search(failed, said) and said.count("--reward math") == 1


def test_the_math_process_runs_no_text_as_code(tmp_path):
    hostile = f"__import__('os').system('touch {tmp_path}/hit')"
    attempt = f"""
import sympy
for run in (sympy.sympify, sympy.Number, sympy.parsing.sympy_parser.parse_expr, eval, exec):
    try:
        run({hostile!r})
    except Exception as error:
        print(type(error).__name__)
"""
    source = f"""
import sys
sys.path.insert(0, {str(MATH_FILE.parent)!r})
import math_reward
math_reward.prepare()
"""
    blocked = subprocess.run([sys.executable, "-c", source + attempt], capture_output=True, text=True)
    assert not (tmp_path / "hit").exists() and len(blocked.stdout.split()) == 5, blocked
    subprocess.run([sys.executable, "-c", attempt], capture_output=True)
    assert (tmp_path / "hit").exists()  # which is what sympy does by itself


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and only Linux keeps the limit")
@pytest.mark.parametrize("name, right", [("math", 1.0), (f"{ROOT}/configs/rewards.py:math_recipe", 8.0)])
def test_the_process_of_math_rewards_has_a_memory_limit_even_after_it_was_killed(name, right):
    reward = load(name)
    killed = process_number(reward)
    os.kill(killed, signal.SIGKILL)
    sample = [PROMPT], [r"\boxed{\frac{2}{4}}"], [{"answer": r"\frac{1}{2}"}]
    reward(*sample)  # the process is gone; another rewards this sample alone
    assert reward(*sample) == [right] and process_number(reward) != killed
    limits = Path(f"/proc/{process_number(reward)}/limits").read_text()
    assert int(re.search(r"Max address space\s+(\d+)", limits)[1]) == 4 << 30


def test_the_trainer_process_does_not_import_the_math_library(math_score):
    assert math_score([PROMPT], [r"\boxed{\sqrt{4}}"], [{"answer": r"\frac{4}{2}"}]) == [1.0]
    assert "math_verify" not in sys.modules


def test_a_row_without_an_answer_counts_as_failed(math_score, capsys):
    rows = [{"answer": "8"}, {"solution": "none"}, {"solution": "\\boxed{}"}, {"answer": ["7", "8"]}]
    assert math_score([PROMPT] * 4, ["8"] * 4, rows) == [1.0, 0.0, 0.0, 1.0]
    warning = warnings(capsys)[0]
    assert "1 of 4 samples failed" in warning and "the row has neither an answer nor a solution" in warning


# Functions of the user.

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")

FUNCTIONS = """
import os, subprocess, sys, time
import beside
import numpy

print("loading", flush=True)

def good(prompts, completions, rows):
    print("scoring", flush=True)
    os.write(1, b"more noise")
    assert all(message.keys() == {"role", "content"} for prompt in prompts for message in prompt)
    samples = zip(prompts, completions, rows)
    return [beside.value * len(text) + row["bonus"] + len(prompt) for prompt, text, row in samples]

def array(prompts, completions, rows):
    return numpy.array([len(text) for text in completions]) / 2

def items(prompts, completions, rows):
    return numpy.float32(1.5), numpy.array(True), 2  # a tuple

def unchanged(prompts, completions, rows):
    return [float(repr(row["answer"]) == row["written"]) for row in rows]

def pids(prompts, completions, rows):
    return [os.getpid() for text in completions]

def trouble(prompts, completions, rows):
    for text in completions:
        if text == "raise": raise KeyError("no such\\nthing")
        if text == "exit": sys.exit(0)
        if text == "crash": os.abort()
        if text == "hang":
            child = subprocess.Popen(["sleep", "1000"])
            open(os.path.join(os.path.dirname(__file__), "pids"), "w").write(f"{os.getpid()} {child.pid}")
            time.sleep(1000)
        if text == "wrong length": return [1.0] * (len(completions) + 1)
        if text == "no list": return dict.fromkeys(completions)
    odd = {"nan": float("nan"), "none": None, "huge": 10**400}
    return [odd.get(text, 1.0) for text in completions]

def negative(prompts, completions, rows):
    return [-float(text) if text else None for text in completions]
"""


@pytest.fixture(scope="module")
def user_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("100%s{files}")
    (folder / "beside.py").write_text("value = 10\n")
    (folder / "heavy.py").write_text(FUNCTIONS)
    (folder / "light-weight.py").write_text(FUNCTIONS.replace("import numpy\n", ""))
    return folder


def test_a_custom_reward_gets_prompts_completions_and_rows(user_files, capfd):
    rows = [{"bonus": 0.25, "prompt": "x"}, {"bonus": 0, "when": Path("a date or the like")}]
    score = load(f"{user_files}/light-weight.py:good")
    assert score([PROMPT, PROMPT * 2], ["abc", "é\ud800"], rows) == [31.25, 22.0]
    assert "scoring" in capfd.readouterr().err  # what it prints is printed


MIXED = ["2024-01-08", "2024-01-08T00:00:00Z", 5, 2.5, 5.0, "5", "007", 12345678901234567890, True, None,
         [1, "2"], {"b": 1.0, "a": 2}]

def test_a_reward_gets_the_values_of_a_row_as_they_are_written(tiny, user_files, tmp_path):
    rows = [{"prompt": "a", "answer": answer, "written": repr(answer)} for answer in MIXED]
    path, out = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    flags = (f"--model {tiny} --data {path} --reward {user_files}/light-weight.py:unchanged --sample-every 1 "
             f"--group-size 2 --batch-size {len(rows)} --steps 1 --max-new-tokens 2 --out {out}")
    humanline.train(humanline.parse_config(flags.split()))
    assert metrics(out)[0]["reward"] == 1.0


def test_a_function_that_loads_a_large_model_in_its_first_call_keeps_it(tmp_path):
    (tmp_path / "large.py").write_text(
        "kept = []\n"
        "def score(prompts, completions, rows):\n"
        "    kept.append(kept or b'x' * (4 * 10**8))\n"
        "    return [float(len(kept))]\n")
    score = load(f"{tmp_path}/large.py:score", reward_seconds=300.0)
    assert [score([PROMPT], ["a"], [{}]) for _ in range(4)] == [[1.0], [2.0], [3.0], [4.0]]


def test_a_function_may_return_an_array_or_numbers_of_any_kind(user_files):
    assert load(f"{user_files}/heavy.py:array")([PROMPT] * 3, ["", "a", "bb"], [{}] * 3) == [0.0, 0.5, 1.0]
    assert load(f"{user_files}/heavy.py:items")([PROMPT] * 3, ["", "a", "bb"], [{}] * 3) == [1.5, 1.0, 2.0]


@pytest.mark.parametrize("kind, reason", [
    ("raise", "KeyError: 'no such"), ("exit", "SystemExit: 0"), ("crash", "its process ended with status -6"),
    ("hang", "took longer than 0.5 s"), ("wrong length", "it returned ["),
    ("no list", "it returned {"),
    ("nan", "nan"), ("none", "None"), ("huge", "1000000"),
])
def test_a_bad_score_fails_only_its_own_sample_with_one_warning(user_files, capsys, kind, reason):
    score = load(f"{user_files}/light-weight.py:trouble", reward_seconds=0.5 if kind == "hang" else 60.0)
    assert score([PROMPT] * 4, ["a", kind, "b", "c"], [{}] * 4) == [1.0, 0.0, 1.0, 1.0]
    [line] = warnings(capsys)
    assert "light-weight.py:trouble: 1 of 4 samples failed and count as 0" in line and reason in line
    assert score([PROMPT] * 2, ["a", "b"], [{}] * 2) == [1.0, 1.0] and not warnings(capsys)


def test_a_sample_is_reported_with_its_own_failure(tmp_path, capsys):
    (tmp_path / "reward.py").write_text(
        "def score(prompts, completions, rows):\n"
        "    if len(completions) > 1: raise ValueError('too many at once')\n"
        "    return [1 / int(completions[0])]\n")
    assert load(f"{tmp_path}/reward.py:score")([PROMPT] * 2, ["2", "0"], [{}] * 2) == [0.5, 0.0]
    [line] = warnings(capsys)
    assert "1 of 2 samples failed" in line and "ZeroDivisionError" in line and "too many" not in line


def test_to_fail_is_never_better_than_the_worst_reward_of_the_call(user_files, capsys):
    score = load(f"{user_files}/light-weight.py:negative")
    assert score([PROMPT] * 4, ["2", "", "5", "1"], [{}] * 4) == [-2.0, -5.0, -5.0, -1.0]
    assert "1 of 4 samples failed and count as -5; the first reason: None" in warnings(capsys)[0]


def test_a_file_that_cannot_be_loaded_again_is_tried_again(tmp_path, capsys):
    (tmp_path / "reward.py").write_text(
        "import os, pathlib\nhere = pathlib.Path(__file__).with_name('is-broken')\n"
        "if here.exists(): here.unlink(); raise OSError('no memory left on the GPU')\n"
        "def score(prompts, completions, rows):\n  if completions[0] == 'crash': os.abort()\n  return [1.0]\n")
    score = load(f"{tmp_path}/reward.py:score")
    assert score([PROMPT], ["fine"], [{}]) == [1.0]
    (tmp_path / "is-broken").touch()
    assert score([PROMPT], ["crash"], [{}]) == [0.0] and "no memory left" in warnings(capsys)[0]
    assert score([PROMPT], ["fine"], [{}]) == [1.0] and not warnings(capsys)


@needs_proc
def test_a_hanging_function_costs_no_more_than_four_times_its_limit(user_files, capsys):
    score = load(f"{user_files}/light-weight.py:trouble", reward_seconds=0.5)
    assert score([PROMPT], ["a"], [{}]) == [1.0]
    started = time.perf_counter()
    assert score([PROMPT] * 64, ["hang"] * 64, [{}] * 64) == [0.0] * 64
    assert time.perf_counter() - started < 20  # and a process to start for each of them
    assert "64 of 64 samples failed" in warnings(capsys)[0]
    assert all(gone(int(pid)) for pid in (user_files / "pids").read_text().split())


def gone(pid: int) -> bool:
    """Whether a process has ended, possibly as a zombie."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def reward_of(tmp_path: Path, code: str, **settings) -> humanline.Reward:
    """A reward `f` that is the last function of `code`."""
    (tmp_path / "reward.py").write_text(code)
    return load(f"{tmp_path}/reward.py:f", **settings)


def test_samples_share_neither_prompts_nor_rows_that_the_reward_changes(tmp_path):
    score = reward_of(tmp_path, """
def f(prompts, completions, rows):
    for prompt, completion in zip(prompts, completions):
        prompt.append({"role": "assistant", "content": completion})
    return [len(prompt) + len(row.pop("answer", "")) for prompt, row in zip(prompts, rows)]
""")
    prompt, row = list(PROMPT), {"answer": "2"}
    assert score([prompt] * 3, ["a", "b", "c"], [row] * 3) == [3, 3, 3]
    assert prompt == PROMPT and row == {"answer": "2"}


def test_a_model_wins_half_against_itself_even_if_the_reward_changes_its_arguments(tmp_path):
    score = reward_of(tmp_path, "def f(prompts, completions, rows):\n"
                                "    for prompt in prompts: prompt.append('more')\n"
                                "    return [len(prompt) + len(row.pop('answer', ''))\n"
                                "            for prompt, row in zip(prompts, rows)]\n")
    prompts, fields = [list(PROMPT)] * 4, [{"answer": "2"}] * 4
    assert evaluation.compare_rewards(score, prompts, list("abcd"), list("abcd"), fields).mean() == 0.5


def test_files_of_the_working_folder_do_not_replace_modules_of_python(tmp_path, monkeypatch):
    for name in "queue", "random", "types", "string", "logging", "tempfile", "pickle", "copy", "typing":
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "pytest.py").write_text("mine = 4\n")  # a module beside the file, which is also installed
    monkeypatch.chdir(tmp_path)
    score = reward_of(tmp_path, "import logging, random, tempfile, pytest\n"
                                "def f(prompts, completions, rows):\n    return [pytest.mine]\n")
    assert score([PROMPT], ["a"], [{}]) == [4]


def test_a_reward_and_what_it_starts_do_not_read_the_standard_input_of_the_trainer(tmp_path, monkeypatch):
    code = """
import os, subprocess
def f(prompts, completions, rows):
    return [len(os.read(0, 9)) + len(subprocess.run(["head", "-c", "9"], capture_output=True).stdout)]
"""
    theirs, ours = os.pipe()
    os.write(ours, b"the next run of a shell's loop\n")
    before = os.dup(0)
    os.dup2(theirs, 0)
    try:
        assert reward_of(tmp_path, code)([PROMPT], ["a"], [{}]) == [0]
    finally:
        os.dup2(before, 0)
        for descriptor in before, theirs, ours:
            os.close(descriptor)


def test_a_reward_may_use_processes_that_import_its_file(tmp_path):
    score = reward_of(tmp_path, """
import multiprocessing
def double(text):
    return 2 * len(text)
def f(prompts, completions, rows):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(double, completions)
""")
    assert score([PROMPT] * 2, ["a", "bb"], [{}] * 2) == [2, 4]


def test_a_reward_that_always_takes_too_long_names_the_flag_that_gives_it_time(tmp_path):
    score = reward_of(tmp_path, "import time\ndef f(prompts, completions, rows):\n    time.sleep(60)\n",
                      reward_seconds=0.1)
    with pytest.raises(UserError, match="every sample: .*took longer than 0.1 s.*; raise --reward-seconds$"):
        score([PROMPT], ["a"], [{}])


@needs_proc
def test_a_reward_with_a_thread_that_never_ends_ends_with_the_run(tmp_path):
    score = reward_of(tmp_path, """
import os, threading
threading.Thread(target=threading.Event().wait).start()
def f(prompts, completions, rows):
    return [os.getpid()]
""")
    [pid] = score([PROMPT], ["a"], [{}])
    del score
    assert gone(int(pid))


@needs_proc
def test_a_reward_that_is_dropped_leaves_no_process(user_files):
    score = load(f"{user_files}/light-weight.py:pids")
    [pid] = {int(value) for value in score([PROMPT] * 3, ["a"] * 3, [{}] * 3)}  # one call for all
    assert Path(f"/proc/{pid}").exists()
    del score
    assert gone(pid)


@needs_proc
def test_the_reward_process_ends_when_its_trainer_is_killed_even_during_a_call(user_files, tmp_path):
    (user_files / "pids").unlink(missing_ok=True)
    (tmp_path / "trainer.py").write_text(f"""
import sys
sys.path.append({str(ROOT)!r})
import humanline
config = humanline.Config(reward="{user_files}/light-weight.py:trouble", reward_seconds=500.0)
humanline.Reward(config)([[]], ["hang"], [{{}}])
""")
    trainer = Started(tmp_path / "trainer.py", cwd=ROOT)
    while not (user_files / "pids").exists() or not (user_files / "pids").read_text():
        assert trainer.poll() is None
        time.sleep(0.05)
    trainer.kill()
    trainer.communicate()
    assert all(gone(int(pid)) for pid in (user_files / "pids").read_text().split())


# Reward models.

@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> str:
    """A folder with a random sequence classifier whose tokenizer adds BOS to plain text."""
    from tokenizers.processors import TemplateProcessing
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder, tokenizer = tmp_path_factory.mktemp("reward-model"), character_tokenizer()
    torch.manual_seed(1)
    LlamaForSequenceClassification(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, num_labels=1, pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2)).save_pretrained(folder)
    bos = [("<bos>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=bos)
    tokenizer.save_pretrained(folder)
    return str(folder)


COMPLETIONS = ["2", "", "a long answer, with many words", "12", "<eos>x"]


def by_hand(folder: str) -> list[float]:
    """The logit of each of COMPLETIONS to PROMPT, computed separately."""
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForSequenceClassification.from_pretrained(folder)
    logits = []
    for text in COMPLETIONS:
        dialogue = [*PROMPT, {"role": "assistant", "content": text}]
        if tokenizer.chat_template:
            ids = tokenizer.apply_chat_template(dialogue, return_dict=False)
        else:
            ids = tokenizer("\n\n".join(message["content"] for message in dialogue))["input_ids"]
        assert ids.count(tokenizer.bos_token_id) == 1
        with torch.no_grad():
            logits.append(float(model(torch.tensor([ids])).logits[0, 0]))
    return logits


def score(folder: str, **settings) -> list:
    """What configs/model_reward.py gives, in this process."""
    function = runpy.run_path(str(ROOT / "configs" / "model_reward.py"))["score"]
    count = len(COMPLETIONS)
    return function([PROMPT] * count, COMPLETIONS, [{}] * count, model=str(folder), **settings)


def test_the_score_of_a_reward_model_is_its_logit_of_each_dialogue_alone(reward_model):
    scores = score(reward_model)
    assert scores == pytest.approx(by_hand(reward_model), abs=1e-5) and len(set(scores)) == 5


@pytest.mark.slow
def test_a_reward_model_is_a_reward_and_fails_only_where_a_dialogue_is_too_long(reward_model, capsys):
    reward = load(f"{ROOT}/configs/model_reward.py:score", reward_seconds=60.0,
                  reward_args=json.dumps(dict(model=reward_model)))
    scores = reward([PROMPT] * 6, [*COMPLETIONS, "x" * 100], [{}] * 6)  # the last is beyond its positions
    assert scores[:-1] == pytest.approx(by_hand(reward_model), abs=1e-5) and scores[-1] == min([0.0, *scores])
    assert "1 of 6 samples failed" in warnings(capsys)[0] and len(set(scores[:-1])) == 5


def test_a_reward_model_needs_neither_padding_nor_a_chat_template(reward_model, tmp_path):
    shutil.copytree(reward_model, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": None}))
    (tmp_path / "model" / "chat_template.jinja").unlink()
    plain = by_hand(str(tmp_path / "model"))
    assert score(tmp_path / "model") == pytest.approx(plain, abs=1e-5)
    assert plain != by_hand(reward_model)


def test_a_language_model_is_refused_as_a_reward_model(tiny):
    with pytest.raises(ValueError, match="has no score.weight"):
        score(tiny)


def test_code_that_comes_with_a_reward_model_runs_only_on_request(reward_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(reward_model, folder)
    (folder / "code.py").write_text(f"""
import pathlib, transformers
pathlib.Path({str(tmp_path / 'hit')!r}).touch()
class Model(transformers.LlamaForSequenceClassification):
    pass
""")
    file = folder / "config.json"
    settings = json.loads(file.read_text()) | {
        "auto_map": {"AutoModelForSequenceClassification": "code.Model"}}
    file.write_text(json.dumps(settings))
    scores = score(folder)
    assert scores == pytest.approx(by_hand(folder), abs=1e-5) and not (tmp_path / "hit").exists()
    assert score(folder, trust_remote_code=True) == scores and (tmp_path / "hit").exists()


@pytest.mark.parametrize("text", ["{model: x}", "[1]"])
def test_reward_args_that_are_not_a_json_object_give_a_one_line_error(text):
    with pytest.raises(UserError, match="--reward-args.*JSON object"):
        load("exact", reward_args=text)


def test_the_math_reward_ignores_the_settings_that_a_run_had_for_another_reward():
    score = load("math", reward_args='{"model": "NAME"}')
    assert score([PROMPT], ["4"], [{"answer": "4"}]) == [1.0]


def test_reward_args_reach_the_reward_and_are_recorded(run, tmp_path):
    (tmp_path / "scaled.py").write_text("def scaled(prompts, completions, rows, factor):\n"
                                        "    return [factor * len(text) for text in completions]\n")
    flags = (f"--sample-every 1 --steps 1 --reward {tmp_path}/scaled.py:scaled "
             '--reward-args {"factor":1000}')
    folder = run(flags)
    assert metrics(folder)[0]["reward"] > 500
    assert humanline.parse_config(["--config", str(folder / "config.toml")]).reward_args == '{"factor":1000}'


# Runs.

def test_a_reward_gets_all_samples_of_a_prompt_in_one_call_however_sampling_is_split(run, tmp_path):
    (tmp_path / "vote.py").write_text(
        "def vote(prompts, completions, rows):\n"
        "    prompts = [str(prompt) for prompt in prompts]\n"
        "    return [prompts.count(prompt) + 0.01 * len(prompts) for prompt in prompts]\n")
    folder = run("--sample-every 2 --steps 2 --group-size 5 --sample-tokens 60 "
                 f"--reward {tmp_path}/vote.py:vote")
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines] == [5.4] * 40  # 8 prompts of 5 samples in one call


@pytest.fixture
def sums(tmp_path) -> str:
    return write_jsonl(tmp_path / "sums.jsonl",
                       [{"prompt": f"{i}+1=", "answer": f"#### {i + 1}"} for i in range(8)])


def test_a_run_can_train_on_the_math_reward(tiny, sums, tmp_path):
    flags = (f"--model {tiny} --data {sums} --reward math --sample-every 2 --steps 3 --batch-size 2 "
             f"--group-size 3 --max-new-tokens 4 --eval-data {sums} --eval-every 2 --out {tmp_path / 'out'}")
    humanline.train(humanline.parse_config(flags.split()))
    assert "accuracy" in metrics(tmp_path / "out")[1]


def test_a_reward_that_fails_after_the_first_rollouts_does_not_stop_a_run(run, tmp_path, capsys):
    (tmp_path / "bad.py").write_text(
        "seen = 0\n\ndef bad(prompts, completions, rows):\n    global seen\n    seen += len(prompts)\n"
        "    if seen > 16:\n        raise ValueError('works no more')\n"
        "    return [len(text) / 9 for text in completions]\n")
    flags = f"--sample-every 1 --steps 3 --sample-tokens 32 --reward {tmp_path}/bad.py:bad"  # several calls
    lines = metrics(run(flags))
    assert [line["reward"] for line in lines[1:]] == [0.0] * 2 and lines[0]["reward"] > 0
    failed = "16 of 16 samples failed and count as 0"
    assert sum(failed in line and "works no more" in line for line in warnings(capsys)) == 2


def test_a_reward_that_fails_when_a_run_resumes_does_not_stop_it(run, tmp_path, capsys):
    (tmp_path / "bad.py").write_text(
        "import os\n\ndef bad(prompts, completions, rows):\n"
        f"    assert not os.path.exists({str(tmp_path / 'down')!r}), 'down'\n"
        "    return [len(text) / 9 for text in completions]\n")
    flags = f"--sample-every 1 --steps 3 --save-every 1 --reward {tmp_path}/bad.py:bad"
    folder = run(flags)
    shutil.rmtree(folder / "final")
    shutil.rmtree(folder / "checkpoint" / "step-00000003")
    (tmp_path / "down").touch()
    run(f"{flags} --resume latest", out=str(folder))
    assert metrics(folder)[-1]["reward"] == 0
    assert any("16 of 16 samples failed" in line for line in warnings(capsys))


@pytest.mark.parametrize("reward, expected", [
    ("maht", r"--reward maht: pass exact, math or FILE.py:function"),
    ("missing.py:f", r"--reward missing.py:f: .*No such file.*missing.py.*; write FILE.py:function"),
    ("empty.py:f", r"--reward empty.py:f: AttributeError: .*no attribute 'f'"),
    ("model:tiny", r"--reward model:tiny: .*such as the reward model configs/model_reward.py:score"),
    ("math", r"rows.jsonl row 2: no answer and no solution; --reward math"),
    ("exact", r"rows.jsonl row 2: no answer; --reward exact"),
])
def test_an_impossible_reward_gives_a_one_line_error_before_training(
        tiny, tmp_path, monkeypatch, capsys, reward, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("")
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b"}, {"prompt": "b"}])
    flags = f"--model {tiny} --data rows.jsonl --sample-every 1 --max-new-tokens 4 --out out --reward"
    assert humanline.main([*flags.split(), reward]) == 2
    error = capsys.readouterr().err
    assert re.search(expected, error) and error.startswith("humanline.py: error: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_math_library_gives_a_one_line_error(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ModuleNotFoundError(\"No module named 'math_verify'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    expected = "--reward math: ModuleNotFoundError: No module named 'math_verify'; pip install math-verify"
    with pytest.raises(UserError, match=expected):
        load("math")


def test_offline_training_loads_no_reward(run, tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit\n")
    run(f"--steps 2 --reward {tmp_path}/fails.py:f")


@pytest.mark.parametrize("flags, says", [
    ("--reward-seconds 0", "--reward-seconds is .*; it must be from"),
    ("--reward-args {}", "--reward-args needs --reward FILE.py:function"),
    ("--reward math --reward-args {}", "--reward-args needs --reward FILE.py:function"),
    ("--lora-alpha 8", "--lora-alpha needs --lora")])
def test_a_bad_setting_of_rewards_or_adapters_gives_a_one_line_error(flags, says):
    with pytest.raises(UserError, match=says):
        humanline.parse_config(flags.split())
