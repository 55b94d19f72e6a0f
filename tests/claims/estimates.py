"""Estimates over seeds, and how they are written.

An estimate is a mean and half of its 95% interval, by Student's t. All of them are plain dicts and lists, so that they
go into facts.json as they are.
"""

import math
import re
import warnings
from typing import Any, Iterable

import numpy as np
from scipy import stats

MARGIN = 0.02  # of pass@1: what is less does not count

def estimate(values: Iterable[float]) -> list[float]:
    values = np.array([value for value in values if not math.isnan(value)])
    if len(values) < 2:
        return [float(values.sum()) if len(values) else math.nan, math.nan]
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return [float(values.mean()), float(half)]

def compare(
    ours: np.ndarray, theirs: np.ndarray, paired: bool = True, margin: float = MARGIN
) -> dict:
    """ours - theirs over seeds, paired or by Welch's test: the mean, its 95% interval, p of no difference (two-sided),
    and p_same of a difference of `margin` or more either way (two one-sided tests)."""

    def test(shift: float, alternative: str) -> Any:
        if paired:
            return stats.ttest_1samp(ours - theirs + shift, 0, alternative=alternative)
        return stats.ttest_ind(ours + shift, theirs, equal_var=False, alternative=alternative)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one seed, or of equal differences
        tests = test(0, "two-sided"), test(margin, "greater"), test(-margin, "less")
        low, high = tests[0].confidence_interval()
    p, above, below = np.nan_to_num([found.pvalue for found in tests], nan=1.0).tolist()
    return dict(
        mean=float(np.mean(ours - theirs) if paired else np.mean(ours) - np.mean(theirs)),
        low=float(low),
        high=float(high),
        p=p,
        p_same=max(above, below),
        seeds=min(len(ours), len(theirs)),
        paired=paired,
    )

def share_of_gap(
    plain: np.ndarray,
    ours: np.ndarray,
    online: np.ndarray,
    paired: np.ndarray | bool = True,
    level: float = 0.05,
) -> list[float]:
    """The share of the gap from plain to online that ours closes, with Fieller's interval (1954) for a ratio of means:
    of 95% at level 0.05, and without an end where the gap may be 0. paired: which of the three are paired by seed,
    (3, 3)."""
    x, y = np.mean(ours - plain), np.mean(online - plain)
    if len(plain) < 2:
        return [float(x / y), -math.inf, math.inf]
    covariance = np.cov([plain, ours, online]) * (paired | np.eye(3, dtype=bool)) / len(plain)
    to_differences = np.array([[-1, 1, 0], [-1, 0, 1]])
    covariance = to_differences @ covariance @ to_differences.T
    (xx, xy), (_, yy) = covariance * stats.t.ppf(1 - level / 2, len(plain) - 1) ** 2
    a, b, c = y * y - yy, x * y - xy, x * x - xx
    if not a > 0:
        return [float(x / y), -math.inf, math.inf]
    root = math.sqrt(max(0.0, b * b - a * c))
    return [float(x / y), float((b - root) / a), float((b + root) / a)]

def holm(p_values: list[float]) -> list[float]:
    """Holm's p-values (1979), adjusted for their number."""
    order = np.argsort(p_values)
    steps = np.array(p_values)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(steps).clip(max=1)
    return adjusted.tolist()

# ---------- How they are written ----------------------------------------------------------------------------

def show(pair: list[float], digits: int = 3) -> str:
    mean, half = pair
    if math.isnan(mean):
        return ""
    return f"{mean:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")

def show_mean(pair: list[float], digits: int) -> str:
    return f"{pair[0]:.{digits}f}"

def show_difference(found: dict | None) -> str:
    if not found:
        return ""
    half = "" if math.isnan(found["high"]) else f" ± {found['high'] - found['mean']:.3f}"
    return f"{found['mean']:+.3f}{half}" + ("" if found["paired"] else ", not paired")

def show_share(share: list[float] | None) -> str:
    if not share:
        return ""
    if max(map(abs, share[1:])) > 10:
        return f"{share[0]:.0%} [too few seeds to tell]"
    return "{:.0%} [{:.0%}, {:.0%}]".format(*share)

def show_form(name: str) -> str:
    """A form as texts call it: --positive-only has a name of its own for each loss in the stored runs."""
    return re.sub(r"\b(better|chosen|desirable) alone", "better completions alone", name)

def show_rate(lr: float) -> str:
    return np.format_float_scientific(lr, trim="-", exp_digits=1)

def show_settings(lr: float, k: int) -> str:
    return show_rate(lr) + (f", k {k}" if k else "")

def markdown(head: str, rows: Iterable[list[str]]) -> str:
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])

def shown(runs: Iterable[dict]) -> list[dict]:
    """These runs, marked as read by a table; a test asks that all stored ones are."""
    runs = list(runs)
    for run in runs:
        run["is_shown"] = True
    return runs
