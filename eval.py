"""Know what you got: questions to ask of a model, a command for each, each answer with its uncertainty.

  python eval.py accuracy --model RUN BASE              # pass@1, pass@k, greedy; models side by side; by level
  python eval.py show --model BASE RUN                  # what they say to the same prompts, side by side
  python eval.py chat --model RUN                       # talk to it
  python eval.py winrate --model RUN --against BASE     # whose answers are better; raw and length-controlled
  python eval.py data --model BASE --data mine.jsonl    # is this offline data good enough for that model?
  python eval.py perception --model RUN                 # the paper's Figure 2 for your model and your data
  python eval.py plot runs/mine runs/other              # learning curves: --metrics kl reward, --against kl

RUN is a run's folder: its final model, asked with the prompt format and the reward of its config.toml. BASE is a
Hugging Face name or a folder. Beside a run, a model that is none is asked as the run is. Loading, sampling, rewards
and log-probs are the training code's, from humanline.py.

Every interval covers 95 %. What is resampled is problems, never single samples: samples of one problem are alike.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Callable, Iterable, Literal

if __name__ == "__main__":  # Ctrl-C during the imports below prints no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import numpy as np
import torch
import tyro

import humanline
from humanline import Config, Group, Reward, Row, Sampler, UserError, require

# ---------- Arguments -------------------------------------------------------------------------------------------------

@dataclass
class Settings:
    """What every command that loads a model takes."""

    config: str | None = None
    """A .toml file of humanline.py's settings, for those that are no flag here. Default: the run's config.toml."""
    system: str | None = None  # System message in front of prompts that have none. Default: the run's.
    prompt_template: str | None = None  # Text around each prompt, {prompt} in its place. Default: the run's.
    max_new_tokens: int | None = None  # Longest completion drawn. Default: the run's, or as for training.
    dtype: Literal["auto", "mixed", "float32", "bfloat16"] | None = None  # As for training.
    seed: int = 0  # The draws are a function of this.

@dataclass
class RowSettings(Settings):
    """What every command that loads a model and reads rows takes."""

    limit: int | None = None  # Read only this many rows of each source. Default: the run's.
    max_prompt_length: int | None = None  # Longest prompt, in tokens; rows with longer ones are dropped.
    reward: str | None = None
    """What rewards a completion: exact, math or FILE.py:function. Default: the run's, or exact."""
    reward_seconds: float | None = None
    """Time limit of `math`, or of a reward or a judge of your own: per sample, √n times as much for n."""

@dataclass
class Sampling:
    """How a command draws that may draw in any way."""

    temperature: float = 1.0  # Sampling temperature.
    top_p: float = 1.0  # Nucleus sampling: keep the most likely tokens that together have this probability.

@dataclass(kw_only=True)
class Accuracy(Sampling, RowSettings):
    """pass@1 and pass@k on held-out problems, one model or several side by side."""

    model: tuple[str, ...]  # Models; the others are compared with the first, problem by problem.
    data: str | None = None  # Rows with answers: NAME[:[CONFIG:]SPLIT]. Default: the run's --eval-data.
    samples: int = 8  # Completions drawn per problem.
    k: tuple[int, ...] | None = None  # The k of pass@k. Default: 1 and --samples.
    greedy: bool = True  # Draw the most likely answer of each problem, too.
    out: str | None = None  # Where every sample goes, as JSON lines. Default: evals/accuracy.jsonl, numbered.

@dataclass(kw_only=True)
class Show(Sampling, RowSettings):
    """Prompts with the completions of one model, or of several side by side; rewards and lengths beneath."""

    model: tuple[str, ...]  # Models, a column each: what training started from and the run, say.
    data: str | None = None  # Rows: NAME[:[CONFIG:]SPLIT]. Default: the run's --eval-data.
    prompts: int = 5  # Show only so many prompts, the first ones.
    samples: int = 1  # Completions drawn per prompt.
    greedy: bool = False  # Show the most likely completion, in the place of --samples.

@dataclass(kw_only=True)
class Chat(Sampling, Settings):
    """Talk to a model in the terminal, or to several, which answer one after another."""

    model: tuple[str, ...]  # Models. Each keeps a dialogue of its own.

@dataclass(kw_only=True)
class Winrate(Sampling, RowSettings):
    """How often one model's completions beat another's, or the data's own. The higher --reward wins."""

    model: str  # The model.
    against: str = "data"  # The other model, or `data`: the best or desirable completion of each row.
    data: str | None = None  # Prompts: NAME[:[CONFIG:]SPLIT]. Default: the run's --eval-data.
    judge: str | None = None
    """FILE.py:function, in the place of --reward: your own function(prompts, first, second, rows) -> list of
    probabilities that the first is better. It is asked in both orders, in a process of its own."""
    samples: int = 1  # Pairs per prompt.
    out: str | None = None  # Where every pair goes, as JSON lines. Default: evals/winrate.jsonl, numbered.

@dataclass(kw_only=True)
class DataQuality(RowSettings):
    """Is this offline data good enough? How likely the model finds it, and what else could be wrong with it."""

    data: tuple[str, ...]  # Sources: NAME[:[CONFIG:]SPLIT]; several are ranked.
    model: str  # The model that training would start from.
    own: int = 500  # Draw the model's own completion of this many prompts of each source, as a yardstick.
    out: str | None = None  # Picture, .png or .svg. Default: evals/data.png, numbered.

@dataclass(kw_only=True)
class Perception(RowSettings):
    """The paper's Figure 2: outcomes of policy and data, with and without humanline, as people see them."""

    model: str  # The policy.
    ref: str | None = None  # The reference model. Default: the one that the run started from.
    data: str | None = None  # Offline completions: NAME[:[CONFIG:]SPLIT]. Default: the run's first source.
    samples: int = 8  # Completions that the policy draws per prompt.
    limit: int | None = 1000  # Read only this many rows.
    out: str | None = None  # Picture, .png or .svg. Default: evals/perception.png, numbered.

@dataclass
class Plot:
    """Learning curves of runs, from their metrics.jsonl. Runs that differ only in --seed are a line with a band."""

    runs: tyro.conf.Positional[tuple[str, ...]] = ()  # Folders of runs, or LABEL=FOLDER.
    metrics: tuple[str, ...] | None = None
    """What to draw, each in a panel of its own: columns of metrics.jsonl, such as kl reward lr, and speed and time.
    Default: the usual ones."""
    against: str = "steps"  # The horizontal axis: steps, seconds (without evaluations), or a column, such as kl.
    out: str | None = None  # Picture, .png or .svg. Default: evals/curves.png, numbered.

PANELS = {
    "reward": "reward of the batch",
    "accuracy": "pass@1, held out",
    "unclamped": "tokens let through, fraction",
    "drift": "drift, mean |d|, nats/token",
    "kl": "KL to the reference, nats/token",
    "grad_norm": "gradient norm",
    "speed": "tokens/s, so far",
    "sampling": "seconds spent on sampling, so far",
}
EXACT = ("accuracy", "speed", "lr", "seconds", "sampling")  # are not smoothed

def check_flags(flags: Any) -> None:
    """Raises UserError for a number that makes no sense, and for a flag that takes values and has none."""
    for name, least in dict(samples=1, prompts=1, own=0).items():
        value = getattr(flags, name, least)
        require(least <= value <= 10**6, f"--{name} is {value}; it must lie from {least} to 1,000,000")
    for name, value in vars(flags).items():
        require(
            value != () or name == "runs", f"--{name} has no value; give it one or more, or leave it out"
        )

# ---------- Estimates and their uncertainty: pure functions -----------------------------------------------------------

def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k samples is correct, where c of n are: 1 - C(n-c, k) / C(n, k).

    Unbiased: the mean over all subsets of size k of the n samples (Chen et al. 2021, eq. 1). In exact integers.

    >>> pass_at_k(8, 2, 1), round(pass_at_k(8, 2, 4), 4)
    (0.25, 0.7857)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k(n={n}, c={c}, k={k}) needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)

def resamples(count: int, repeats: int) -> np.ndarray:
    """Bootstrap resamples of `count` things: (repeats, count) indices."""
    return np.random.default_rng(0).integers(0, count, (repeats, count))

def interval(
    values: Iterable[float], low: float | None = None, high: float | None = None
) -> tuple[float, float, float]:
    """The mean of a value for each problem, and its 95 % interval by bootstrap: BCa (Efron 1987).

    Percentiles alone are too short where most problems are never solved (tests/test_eval.py). Values that are all the
    same show no spread; the interval is then Clopper and Pearson's: 0 of 100 gives [0, 0.036], not [0, 0].

    Args:
        values: (P,), one per problem.
        low, high: the smallest and the largest value that there could have been; by default, that there are.
    Returns:
        mean, lower end, upper end.
    """
    values = np.asarray(values, dtype=float)
    mean = float(values.mean())
    if np.ptp(values) == 0:
        low = mean if low is None else low
        high = mean if high is None else high
        reach = (high - low) * (1 - 0.025 ** (1 / len(values)))
        return mean, max(low, mean - reach), min(high, mean + reach)
    normal = NormalDist()
    repeats = 2000
    away = values - mean
    moved = np.array([away[index].mean() for index in resamples(len(values), repeats)])
    still = abs(moved) < 1e-9 * np.ptp(values)
    lower = ((moved < 0) & ~still).mean() + still.mean() / 2
    bias = normal.inv_cdf(min(max(lower, 1 / repeats), 1 - 1 / repeats))
    skew = (away**3).sum() / (6 * (away**2).sum() ** 1.5)
    levels = [normal.cdf(bias + (bias + z) / (1 - skew * (bias + z))) for z in (-1.96, 1.96)]
    ends = np.clip(mean + np.quantile(moved, levels), values.min(), values.max())
    return mean, float(ends[0]), float(ends[1])

def length_controlled(preference: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """The win rate that the judge would give if both completions were of one length.

    Fits P(win) = σ(θ + φ tanh(Δ / s)), Δ the difference in characters and s its standard deviation, and returns σ(θ).
    This is AlpacaEval 2's model (Dubois et al. 2024, section 3) without its term for each instruction's difficulty,
    and with a weak ridge (a normal prior of standard deviation 10 on θ and φ) in the place of its L1 penalty.

    Args:
        preference: (..., N), 1 where the model wins, 0.5 for a tie, 0 where it loses, or a judge's probability.
        delta: (..., N), characters of the model's completion minus the other's.
    Returns:
        (...), one win rate for each fit; leading dimensions are bootstrap resamples.
    """
    spread = delta.std(-1, keepdims=True)
    x = np.tanh(delta / np.where(spread > 0, spread, 1))
    theta = np.zeros(x.shape[:-1])
    phi = np.zeros(x.shape[:-1])
    for _ in range(60):  # Newton's method on the (θ, φ) log-posterior, no step longer than 1
        p = 1 / (1 + np.exp(-(theta[..., None] + phi[..., None] * x)))
        d_theta = (preference - p).sum(-1) - 0.01 * theta
        d_phi = ((preference - p) * x).sum(-1) - 0.01 * phi
        curvature = p * (1 - p)
        a = curvature.sum(-1) + 0.01
        b = (curvature * x).sum(-1)
        c = (curvature * x * x).sum(-1) + 0.01
        step = np.stack([c * d_theta - b * d_phi, a * d_phi - b * d_theta]) / (a * c - b * b)
        step /= abs(step).max(0).clip(1)
        theta += step[0]
        phi += step[1]
    return 1 / (1 + np.exp(-theta))

def capacity(a, gamma: float):
    """Ω⁺(a; γ) = a^γ / (a^γ + (1 - a)^γ)^(1/γ): a cumulative probability `a` as people perceive it.

    An inverted S for γ in (0, 1): the extreme outcomes weigh more than they should. Tversky and Kahneman (1992)
    estimate γ = 0.61 for gains and 0.69 for losses.

    Args:
        a: probabilities in [0, 1], a float, or an array or a tensor of any shape.
    Returns:
        The same shape as `a`.

    >>> round(capacity(0.01, 0.61), 3), round(capacity(0.99, 0.61), 3)
    (0.055, 0.912)
    """
    return a**gamma / (a**gamma + (1 - a) ** gamma) ** (1 / gamma)

def perceived_divergence(policy: np.ndarray, data: np.ndarray, gamma: float) -> np.ndarray:
    """KL(ω || Q) in nats: ω is how people perceive the distribution of outcomes, Q is the data's (Proposition 3.4).

    Outcomes are sorted into bins by the policy's quantiles. With F_b the policy's cumulative probability up to the end
    of bin b, ω_b = Ω⁺(F_b; γ) - Ω⁺(F_b-1; γ), cumulated from the lowest outcome up; Q_b is the data's share of the
    bin, with half an outcome added to each, so that an empty bin stays finite. For any value function v then
    |u(Z; ω) - u(Z; Q)| <= sup|v| sqrt(2 KL(ω || Q)): that is how far what people make of the data can be from what
    they make of the model. The bound is the paper's; bins and smoothing are this project's way to a number.

    Args:
        policy: (..., B) counts of the policy's outcomes.
        data: (..., B) counts, or sums of weights, of the data's.
    Returns:
        (...).
    """
    cumulated = (np.cumsum(policy, -1) / policy.sum(-1, keepdims=True)).clip(0, 1)
    omega = np.diff(capacity(cumulated, gamma), axis=-1, prepend=0.0).clip(1e-12)
    q = (data + 0.5) / (data + 0.5).sum(-1, keepdims=True)
    return (omega * np.log(omega / q)).sum(-1)

PerToken = list[list[np.ndarray]]  # per prompt, per completion: a value for each of its tokens

# ---------- Models and what they say ----------------------------------------------------------------------------------

def run_folder(spec: str, flag: str) -> Path | None:
    """The run that `spec` names, or None of a model; raises UserError for a run without a final model."""
    path = Path(spec)
    if path.name == "final" and (path.parent / "config.toml").exists():
        path = path.parent
    has_settings = (path / "config.toml").exists()
    if has_settings and (path / "final").is_dir():
        return path
    require(
        not has_settings and not (path / "checkpoint").is_dir(),
        f"{flag} {spec}: the run did not finish, so it has no final/; go on with "
        f"python humanline.py --config {path / 'config.toml'} --out {path} --resume latest",
    )
    is_model = any((path / name).exists() for name in ("config.json", "adapter_config.json"))
    require(
        is_model or not path.is_dir(),
        f"{flag} {spec}: neither a run's folder (config.toml and final/) nor a model's (config.json)",
    )
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", spec) and not (
        spec.count("/") and path.parent.is_dir()
    )
    require(is_model or is_hub_name, f"{flag} {spec}: no such run or model")
    return None

def settings_of(spec: str, flags: Settings, flag: str = "--model", beside: Path | None = None) -> Config:
    """The trainer's settings for a model: its run's, or for a model that is no run those of the run `beside` it, with
    our flags over them."""
    own = run_folder(spec, flag)
    run = own or beside
    args = ["--model", str(own / "final") if own else spec]
    if flags.config:
        args += ["--config", flags.config]
    elif run:
        args += flags_of_run(run)
    names = "seed system prompt_template max_new_tokens dtype limit max_prompt_length reward reward_seconds"
    found = {name: getattr(flags, name, None) for name in names.split()}
    for name in ("temperature", "top_p"):
        found[name] = getattr(flags, name, 1.0)
    for name, value in found.items():
        if value is not None:
            values = value if isinstance(value, tuple) else [value]
            args += [humanline.flag_of(name), *map(str, values)]
    config = humanline.parse_config(args)
    return config

def flags_of_run(run: Path) -> list[str]:
    """The settings of a run, as flags."""
    path = run / "config.toml"
    loss = tomllib.loads(path.read_text(encoding="utf-8")).get("loss", "grpo")
    if loss not in humanline.LOSSES:  # the user's own, of which nothing here needs more than its settings
        every = " ".join(entry.settings for entry in humanline.LOSSES.values())
        humanline.LOSSES[loss] = dataclasses.replace(humanline.LOSSES["grpo"], settings=every)
    return ["--config", str(path)]

def settings_of_all(flags: Accuracy | Show | Chat) -> list[Config]:
    """The settings of each --model, with the first run among them for those that are no run."""
    run = next(filter(None, (run_folder(name, "--model") for name in flags.model)), None)
    return [settings_of(name, flags, beside=run) for name in flags.model]

def settings_with_one_reward(flags: Accuracy | Show) -> list[Config]:
    """The settings of each --model; raises UserError where their rewards differ."""
    configs = settings_of_all(flags)
    names = sorted({config.reward for config in configs})
    require(
        len(names) == 1,
        f"--model: these runs have different rewards, {' and '.join(names)}; choose with --reward",
    )
    return configs

def load(spec: str, config: Config, rewarded: bool = True) -> Sampler:
    """A model as the trainer's sampler, in this process: policy, tokenizer, and the reward where it is `rewarded`."""
    of_training = {
        one.name: one.default
        for one in dataclasses.fields(Config)
        if one.name == "shard" or one.name.startswith("lora")
    }
    reward = config.reward if rewarded else "exact"  # which needs no loading
    config = dataclasses.replace(config, **of_training, sample_every=1, reward=reward)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy, tokenizer = humanline.load_policy(config, device)
    sampler = Sampler(policy.requires_grad_(False), tokenizer, config)
    sampler.name = spec
    if not rewarded:
        sampler.reward = None
    return sampler

def rows_to_measure(flags: Accuracy | Show | Winrate, config: Config) -> str:
    """--data, or what the run measures itself on."""
    data = flags.data or config.eval_data
    require(
        data, f"--data: name the rows to measure on; --model {config.model} has no --eval-data of its own"
    )
    return data

def read_rows(data: str, config: Config) -> list[Row]:
    """The rows of --data; raises UserError where none can be read."""
    with humanline.explained(f"--data {data}", "name a file or a data set that can be read"):
        return humanline.read_rows(data, config, "--data")

def encode(sampler: Sampler, rows: list[Row], offline: bool) -> list[Group]:
    """Rows as the trainer encodes them: their own completions if `offline`, or prompts to draw completions for."""
    return humanline.encode_rows(rows, sampler, online=not offline)

def draw(
    sampler: Sampler,
    prompts: list[Group],
    rows: list[Row],
    samples: int,
    stream: int,
    greedy: bool = False,
) -> list[Group]:
    """`samples` completions with rewards for each prompt. `stream` tells apart one command's drawings."""
    return sampler.draw_rollouts(prompts, rows, samples, 10**8 * (1 + stream), greedy)

def completions_of(sampler: Sampler, group: Group) -> list[dict]:
    """A drawn group as people read it."""
    texts = sampler.tokenizer.batch_decode(group.completions, skip_special_tokens=True)
    rewards = group.rewards if sampler.reward else [None] * len(texts)
    return [
        dict(completion=text, reward=reward, tokens=len(ids), truncated=ids[-1] not in sampler.stops)
        for text, ids, reward in zip(texts, group.completions, rewards)
    ]

def token_logps(sampler: Sampler, groups: list[Group]) -> PerToken:
    """log π(y_t | x, y_<t) in nats of each token of each completion of each group, as the trainer computes it."""
    config = Config(loss="grpo", microbatch_tokens=sampler.config.microbatch_tokens)  # every sequence by itself
    sequences = [humanline.Sequence(group.prompt, ids) for group in groups for ids in group.completions]
    logps = iter(humanline.sequence_logps(sampler.policy, sequences, config))
    return [[next(logps).double().numpy() for _ in group.completions] for group in groups]

# ---------- What is printed and written -------------------------------------------------------------------------------

def show(estimate: tuple[float, float, float], digits: int = 3, sign: str = "") -> str:
    """0.861 [0.842, 0.879]"""
    mean, low, high = (f"{value:{sign}.{digits}f}" for value in estimate)
    return f"{mean} [{low}, {high}]"

def rate(values: Iterable[float]) -> str:
    """A share of problems, say, with its interval."""
    return show(interval(values, 0.0, 1.0))

def table(rows: list[list[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

def printable(text: str) -> str:
    """The text without what would move the cursor or ring the bell; lines and tabs stay."""
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n")
    )

def print_columns(names: list[str], rows: list[list[str]], width: int) -> None:
    """Texts under their names, side by side, at most `width` columns of a terminal."""
    from rich import box, console, table, text
    columns = table.Table(box=box.MINIMAL, show_edge=False, width=width)
    for name in names:
        columns.add_column(text.Text(name), ratio=1, overflow="fold")
    for cells in rows:
        columns.add_row(*(text.Text(printable(cell).strip("\n")) for cell in cells))
    console.Console(width=width).print(columns)

def new_file(out: str | None, kinds: tuple[str, ...], default: str = "", flag: str = "--out") -> Path:
    """Where to write: `out`, or evals/`default`, numbered if it exists. Raises UserError before any work is done."""
    path = Path(out or Path("evals", default))
    number = 2
    while out is None and path.exists():
        path = Path("evals", default).with_stem(f"{Path(default).stem}-{number}")
        number += 1
    require(path.suffix in kinds, f"{flag} {path}: it must end in {' or '.join(kinds)}")
    require(not path.exists(), f"{flag} {path}: it exists; choose another file")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    require(
        parent.is_dir() and os.access(parent, os.W_OK),
        f"{flag} {path}: cannot be written there; choose another",
    )
    return path

def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")

def json_lines(lines: Iterable[dict]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

OKABE_ITO = [
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
]  # also for the colour-blind
GREY = "#777777"
DASHES = ["-", "--", ":", "-."]

def new_figure(height: float, rows: int, columns: int) -> tuple[Any, list]:
    """A figure as wide as a README, 8 inches, and `height` inches high; and its axes."""
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcParams.update(
        {
            "font.size": 10,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#E6E6E6",
            "axes.axisbelow": True,
            "svg.fonttype": "none",
        }
    )
    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)

def save(figure: Any, path: Path, lines: dict[str, Any]) -> None:
    """Write the picture, with the `lines` explained above it by their labels."""
    columns = 3 if len(lines) % 3 == 0 else 2
    figure.legend(
        list(lines.values()), list(lines), loc="outside upper center", ncols=columns, frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    print(f"picture: {path}")

def legend_of(axes: Any) -> dict[str, Any]:
    handles, labels = axes.get_legend_handles_labels()
    return dict(zip(labels, handles))

# ---------- accuracy --------------------------------------------------------------------------------------------------

def accuracy(flags: Accuracy) -> None:
    """Draw, reward, tell."""
    ks = sorted(set(flags.k or (1, flags.samples)))
    require(
        1 <= ks[0] <= ks[-1] <= flags.samples,
        f"--k {' '.join(map(str, ks))} --samples {flags.samples}: pass@k needs 1 <= k <= samples",
    )
    configs = settings_with_one_reward(flags)
    data = rows_to_measure(flags, configs[0])
    out = new_file(flags.out, (".jsonl",), "accuracy.jsonl")

    lines = []
    found = defaultdict(list)  # by the model's number, sampled or greedy, and row
    for i, (name, config) in enumerate(zip(flags.model, configs)):  # one model in memory at a time
        rows = read_rows(data, config)
        sampler = load(name, config)
        prompts = encode(sampler, rows, offline=False)
        kinds = dict(sampled=draw(sampler, prompts, rows, flags.samples, 2 * i))
        if flags.greedy:
            kinds["greedy"] = draw(sampler, prompts, rows, 1, 2 * i + 1, greedy=True)
        for kind, groups in kinds.items():
            for group in groups:
                about = dict(model=name, kind=kind, row=group.row, prompt=rows[group.row].prompt)
                found[i, kind, group.row] = [
                    about | completion for completion in completions_of(sampler, group)
                ]
                lines += found[i, kind, group.row]
        del sampler
    write(out, json_lines(lines))

    models = range(len(configs))
    problems = [row for row in range(len(rows)) if all((i, "sampled", row) in found for i in models)]

    def values(i: int, key: str, kind: str = "sampled") -> np.ndarray:  # (problems, samples)
        return np.array([[line[key] for line in found[i, kind, row]] for row in problems], dtype=float)

    rewards = [values(i, "reward") for i in models]
    is_binary = all(
        set(np.unique(one)) <= {0.0, 1.0} for one in rewards
    )  # if graded, pass@k means nothing
    estimate = rate if is_binary else lambda values: show(interval(values))
    header = ["", *([f"pass@{k}" for k in ks] if is_binary else ["mean reward"])]
    header += ["greedy"] * flags.greedy + ["tokens", "truncated"]
    results = [header]
    for i in models:
        passed = [rewards[i].mean(1)]
        if is_binary:
            correct = rewards[i].sum(1).astype(int).tolist()
            passed = [[pass_at_k(flags.samples, c, k) for c in correct] for k in ks]
        if flags.greedy:
            passed.append(values(i, "reward", "greedy")[:, 0])
        results.append(
            [
                flags.model[i],
                *map(estimate, passed),
                show(interval(values(i, "tokens").mean(1)), 1),
                rate(values(i, "truncated").mean(1)),
            ]
        )
    print(
        f"{data}: {len(problems)} problems, {flags.samples} samples each at temperature {flags.temperature:g}; "
        f"[95 % bootstrap intervals over problems]\n\n{table(results)}"
    )

    levels = np.array([str(rows[row].fields.get("level")) for row in problems])
    if set(levels) != {"None"}:
        names = sorted(set(levels), key=lambda level: (len(level), level))
        results = [["", *(f"{level} ({sum(levels == level)})" for level in names)]]
        for i in models:
            results.append(
                [flags.model[i], *(estimate(rewards[i][levels == level].mean(1)) for level in names)]
            )
        print("\nby level (problems)\n" + table(results))
    if len(models) > 1:
        bounds = (-1.0, 1.0) if is_binary else ()
        results = []
        for i in models[1:]:
            more = rewards[i].mean(1) - rewards[0].mean(1)
            results.append([flags.model[i], show(interval(more, *bounds), sign="+")])
        print(f"\nmore than {flags.model[0]}, by problem; comparisons: {len(results)}\n{table(results)}")
    print(f"\nsamples: {out}")

# ---------- show ------------------------------------------------------------------------------------------------------

def show_completions(flags: Show) -> None:
    """Draw and reward as `accuracy` does, print."""
    configs = settings_with_one_reward(flags)
    data = rows_to_measure(flags, configs[0])
    samples = 1 if flags.greedy else flags.samples
    prompts, said = [], []  # of each model, by row: the prompt as text, and the completions
    for stream, (name, config) in enumerate(zip(flags.model, configs)):  # one model in memory at a time
        rows = read_rows(data, config)
        sampler = load(name, config)
        if (
            flags.reward is None
            and config.reward == Config.reward
            and any("answer" not in row.fields for row in rows)
        ):
            sampler.reward = None  # nothing to compare with
        groups = encode(sampler, rows, offline=False)[: flags.prompts]
        drawn = draw(sampler, groups, rows, samples, stream, flags.greedy)
        prompts.append({group.row: as_text(rows[group.row].prompt) for group in drawn})
        said.append({group.row: completions_of(sampler, group) for group in drawn})
        del sampler

    shown = [row for row in said[0] if all(row in of_model for of_model in said)]
    width = min(
        shutil.get_terminal_size((100, 24)).columns, 80 * len(configs)
    )  # 100 into a file or a pipe
    for number, row in enumerate(shown, 1):
        print(f"── {number} of {len(shown)}: {rows[row].where.removeprefix('--data ')} ".ljust(width, "─"))
        texts = [of_model[row] for of_model in prompts]
        are_same = len(set(texts)) == 1  # or runs with prompt formats of their own
        if are_same:
            print(printable(texts[0]))
        if "answer" in rows[row].fields:
            print(f"(answer: {printable(str(rows[row].fields['answer']))})")
        lines = [] if are_same else [[f"({text})" for text in texts]]
        for completions in zip(*(of_model[row] for of_model in said)):
            lines.append([completion["completion"] for completion in completions])
            lines.append([in_short(completion) for completion in completions])
        print()
        print_columns(flags.model, lines, width)
        print()

def as_text(prompt: list[dict]) -> str:
    """A prompt as people read it: its messages, with their roles where there are several."""
    texts = [f"{message['role']}: {message['content']}" for message in prompt]
    return "\n".join(texts) if len(texts) > 1 else prompt[0]["content"]

def in_short(completion: dict) -> str:
    reward = "" if completion["reward"] is None else f"reward {completion['reward']:.4g}, "
    cut = ", truncated" if completion["truncated"] else ""
    return f"→ {reward}{completion['tokens']} tokens{cut}"

# ---------- chat ------------------------------------------------------------------------------------------------------

class Speaker:
    """A model in a chat, with its dialogue so far. What it says is on the screen as it is drawn."""

    def __init__(self, name: str, config: Config):
        from transformers import TextStreamer
        self.name = name
        self.sampler = load(name, config, rewarded=False)
        self.dialogue: list[dict] = []  # messages
        self.said = ""  # of its present answer
        self.streamer = TextStreamer(self.sampler.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.streamer.on_finalized_text = self.say
        policy = self.sampler.policy  # humanline.sample calls its `generate`
        policy.generate = functools.partial(policy.generate, streamer=self.streamer)

    def say(self, text: str, stream_end: bool = False) -> None:
        self.said += text
        print(printable(text), end="", flush=True)

    def answer(self, message: str, seed: int) -> None:
        """Answer a message as in training: its prompt is the dialogue up to there. Ctrl-C ends the answer."""
        sampler = self.sampler
        dialogue = [*self.dialogue, dict(role="user", content=message)]
        prompt = humanline.read_row(dict(prompt=dialogue), "chat", sampler.config).prompt
        with humanline.explained(
            f"--model {self.name}: its chat template refuses the dialogue", "leave out --system"
        ):
            [[ids]] = humanline.encode_dialogues(sampler.tokenizer, [Row("chat", prompt, {})])
        print(f"\n{self.name}> ", end="", flush=True)
        room = sampler.longest - len(ids)
        if room < 1:
            self.dialogue = []
            print(
                f"[longer than the model's {sampler.longest} positions: a new dialogue begins; say that again, or "
                "shorter]"
            )
            return
        config = dataclasses.replace(
            sampler.config, max_new_tokens=min(sampler.config.max_new_tokens, room)
        )
        self.said = ""
        try:
            ((completion, _),) = humanline.sample(
                sampler.policy, [ids], sampler.stops, config, seed
            )
            print("" if completion[-1] in sampler.stops else f" [cut after {len(completion)} tokens]")
        except KeyboardInterrupt:
            self.streamer.end()
            print(" [stopped]")
        if sampler.tokenizer.chat_template:
            self.dialogue = [*dialogue, dict(role="assistant", content=self.said)]

def chat(flags: Chat) -> None:
    """Listen, answer, remember."""
    speakers = [Speaker(name, config) for name, config in zip(flags.model, settings_of_all(flags))]
    sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  arrow keys and history, by its import alone
    print("/reset begins a new dialogue, /quit ends; Ctrl-C stops an answer.")
    for speaker in speakers:
        if not speaker.sampler.tokenizer.chat_template:
            print(
                f"{speaker.name} has no chat template: it continues each text by itself, and remembers none."
            )
    for turn in itertools.count():
        try:
            message = input("\nyou> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if message == "/quit":
            return
        if message == "/reset":
            print("[a new dialogue]")
            for speaker in speakers:
                speaker.dialogue = []
        elif message:
            for speaker in speakers:
                speaker.answer(message, humanline.seed_for(flags.seed, "chat", turn))

# ---------- winrate ---------------------------------------------------------------------------------------------------

def load_judge(spec: str, config: Config) -> Callable[..., list[float]]:
    """The function that --judge FILE.py:function names, in a process of its own, with the time limit of rewards."""
    file, _, name = spec.rpartition(":")
    require(
        Path(file).is_file() and file.endswith(".py"),
        f"--judge {spec}: no such file; write FILE.py:function",
    )
    with humanline.explained(
        f"--judge {spec}", "write FILE.py:function, a function(prompts, first, second, rows)"
    ):
        return humanline.FunctionProcess(file, name, config.reward_seconds)

def ask_twice(
    judge: Callable[..., list[float]],
    spec: str,
    prompts: list,
    first: list[str],
    second: list[str],
    fields: list[dict],
) -> tuple[np.ndarray, np.ndarray]:
    """(N,) probabilities that the first text is better; (N,) how much the judge favours what it reads first."""
    found = []
    mend = f"it must return {len(prompts)} probabilities, one for each pair"
    for texts in ((first, second), (second, first)):
        with humanline.explained(
            f"--judge {spec}", mend, longer="give it more time with --reward-seconds"
        ):
            values = np.array([float(value) for value in judge(prompts, *texts, fields)])
        is_good = values.shape == (len(prompts),) and ((values >= 0) & (values <= 1)).all()
        require(is_good, f"--judge {spec}: {mend}")
        found.append(values)
    return (found[0] + 1 - found[1]) / 2, found[0] + found[1] - 1

def compare_rewards(
    reward: Reward, prompts: list, first: list[str], second: list[str], fields: list[dict]
) -> np.ndarray:
    """(N,) 1 where the first text has the higher reward, 0.5 where both have the same, else 0."""
    found = []
    for texts in (first, second):
        values = reward(prompts, texts, fields)
        found.append([reward.config.reward_failed if value is None else value for value in values])
    require(
        reward.worked, f"--reward {reward.config.reward} failed on every sample: {reward.failure!r:.200}"
    )
    return (1 + np.sign(np.subtract(*found))) / 2

def winrate(flags: Winrate) -> None:
    """Draw both sides, judge, tell."""
    has_other = flags.against != "data"
    run = run_folder(flags.model, "--model") or (
        run_folder(flags.against, "--against") if has_other else None
    )
    config = settings_of(flags.model, flags, beside=run)
    other = settings_of(flags.against, flags, "--against", run) if has_other else None
    data = rows_to_measure(flags, config)
    out = new_file(flags.out, (".jsonl",), "winrate.jsonl")
    rows = read_rows(data, config)
    good = [i for i, row in enumerate(rows) if not row.labelled or row.rewards == [1]]
    require(
        has_other or (good and all(row.completions for row in rows)),
        f"--against data: {data} has rows without completions, or no good one; name a model: --against MODEL",
    )
    judge = load_judge(flags.judge, config) if flags.judge else None
    sampler = load(flags.model, config, rewarded=judge is None)
    reward = sampler.reward
    sampler.check_rows(rows)
    sampler.reward = None  # both sides are rewarded together, below

    def texts(one: Sampler, stream: int) -> dict[int, list[str]]:
        own = read_rows(data, one.config)  # with its own prompt template
        drawn = draw(one, encode(one, own, offline=False), own, flags.samples, stream)
        return {
            group.row: one.tokenizer.batch_decode(group.completions, skip_special_tokens=True)
            for group in drawn
        }

    ours = texts(sampler, 0)
    if has_other:  # from draws of its own, so that a model against itself is a test and no identity
        theirs = texts(load(flags.against, other, rewarded=False), 1)
    else:
        theirs = {
            i: [rows[i].completions[int(np.argmax(rows[i].rewards))]] * flags.samples for i in good
        }
    common = sorted(set(ours) & set(theirs))
    of_rows = [rows[row] for row in common for _ in ours[row]]
    first = [text for row in common for text in ours[row]]
    second = [text for row in common for text in theirs[row]]
    prompts = [row.prompt for row in of_rows]
    fields = [row.fields for row in of_rows]
    if judge is None:
        preference = compare_rewards(reward, prompts, first, second, fields)
    else:
        preference, favour = ask_twice(judge, flags.judge, prompts, first, second, fields)
    write(
        out,
        json_lines(
            dict(where=row.where, prompt=row.prompt, output=one, against=two, preference=value)
            for row, one, two, value in zip(of_rows, first, second, preference.tolist())
        ),
    )

    shape = len(common), flags.samples
    lengths = np.array([[len(one), len(two)] for one, two in zip(first, second)], dtype=float)
    delta = (lengths[:, 0] - lengths[:, 1]).reshape(shape)
    preference = preference.reshape(shape)

    def fit(index: np.ndarray) -> np.ndarray:
        return length_controlled(
            preference[index].reshape(len(index), -1), delta[index].reshape(len(index), -1)
        )

    again = fit(resamples(shape[0], 1000))
    controlled = float(fit(np.arange(shape[0])[None])[0]), *np.quantile(again, [0.025, 0.975])
    wins = np.mean(preference > 0.5)
    losses = np.mean(preference < 0.5)
    is_one_sided = min(wins, losses) <= 0.02
    results = [
        [
            "win rate",
            rate(preference.mean(1)),
            f"wins {wins:.3f}, ties {1 - wins - losses:.3f}, losses {losses:.3f}",
        ],
        ["length-controlled", *(("–", "too one-sided a win") if is_one_sided else (show(controlled), ""))],
        [
            "longer by, characters",
            show(interval(delta.mean(1)), 2, "+"),
            "{:.1f} against {:.1f}".format(*lengths.mean(0)),
        ],
    ]
    if judge is not None:
        favoured = interval(favour.reshape(shape).mean(1), -1, 1)
        results.append(["favours what it reads first", show(favoured, sign="+"), "the judge, -1 to 1"])
    print(
        f"{flags.model} against {flags.against} on {data}: {shape[0]} prompts x {shape[1]}, judged by "
        f"{flags.judge or config.reward}; [95 % bootstrap intervals over prompts]\n\n{table(results)}\n\n"
        f"pairs: {out}"
    )

# ---------- data ------------------------------------------------------------------------------------------------------

# Nats/token: the quartile of the paper's data with which offline training fell behind.
PAPERS_WORST = (-1.03, -0.36)

class Source:
    """One source of offline data, as the starting model sees it."""

    def __init__(self, name: str, groups: list[Group], logps: PerToken, own: PerToken):
        """logps: per prompt, per completion, the token log-probs; own: the same of completions that the model drew."""
        self.name = name
        self.groups = groups
        self.means = [np.array([one.mean() for one in group]) for group in logps]  # nats/token
        self.all = np.concatenate(self.means)
        self.estimate = interval([one.mean() for one in self.means])
        self.own = [group[0].mean() for group in own]
        # Most of what the model itself says is likelier than this.
        self.line = float(np.quantile(self.own, 0.25)) if own else PAPERS_WORST[1]
        self.gaps = []  # best minus worst reward
        for group in groups:
            if len(group.rewards) > 1 and not group.labelled:
                self.gaps.append(np.ptp(group.rewards))

    def share(self, low: float, high: float) -> str:
        """Of the completions, those with a mean log-prob from low up to high."""
        return rate([((one >= low) & (one < high)).mean() for one in self.means])

    def describe(self) -> dict[str, str]:
        """What the table says."""
        lengths = np.array([len(ids) for group in self.groups for ids in group.completions])
        texts = {(*group.prompt, -1, *ids) for group in self.groups for ids in group.completions}
        doubles = len(lengths) - len(texts)
        quartiles = np.quantile(self.all, [0.25, 0.5, 0.75])
        low, high = PAPERS_WORST
        column = {
            "prompts": f"{len(self.groups):,}",
            "completions": f"{len(lengths):,}",
            "  tokens, median (longest)": f"{np.median(lengths):.0f} ({lengths.max()})",
            "  duplicates": f"{doubles:,} ({doubles / len(lengths):.1%})",
            "mean log-prob, nats/token": show(self.estimate),
            "  its quartiles": "  ".join(f"{value:.2f}" for value in quartiles),
            f"  in the paper's worst quartile, {low} to {high}": self.share(low, high),
            f"  below {low}": self.share(-math.inf, low),
        }
        if self.own:
            column["  of the model's own samples"] = show(interval(self.own))
            column["  less likely than 3/4 of those"] = self.share(-math.inf, self.line)
        if self.gaps:
            column["best minus worst reward"] = show(interval(self.gaps))
            column["  no difference"] = rate(np.equal(self.gaps, 0))
        return column

    def advice(self) -> str:
        """A sentence. In the paper, humanline makes offline data as good as online, unless it is too unlikely."""
        than = "than 3/4 of the model's own" if self.own else f"than {PAPERS_WORST[1]} nats/token"
        unlikely = (self.all < self.line).mean()
        flat = np.equal(self.gaps, 0).mean() if self.gaps else 0.0
        if flat > 0.8:
            return f"little to learn from: {flat:.0%} of the prompts have completions of one reward; choose others."
        if unlikely > 0.75:
            return (
                f"not good enough: {unlikely:.0%} of the completions are less likely {than}; "
                f"draw them from the model itself (--sample-every 64), or imitate the best of them first."
            )
        if unlikely > 0.4:
            return (
                f"doubtful: {unlikely:.0%} of the completions are less likely {than}; "
                "compare with --sample-every 64."
            )
        return f"good enough to train offline with humanline: only {unlikely:.0%} of it is less likely {than}."

def data_quality(flags: DataQuality) -> None:
    """Find how likely the data are under the starting model, count what else is wrong with them, advise."""
    config = settings_of(flags.model, flags)
    out = new_file(flags.out, (".png", ".svg"), "data.png")
    read = {name: read_rows(name, config) for name in flags.data}
    for name, rows in read.items():
        require(
            any(row.completions for row in rows),
            f"--data {name}: prompts without completions; there is nothing to judge",
        )
    model = load(flags.model, config, rewarded=False)

    described = []
    for stream, (name, rows) in enumerate(read.items()):
        groups = [group for group in encode(model, rows, offline=True) if group.completions]
        logps = token_logps(model, groups)
        room = min(config.max_new_tokens, max(len(ids) for group in groups for ids in group.completions))
        model.config = dataclasses.replace(model.config, max_new_tokens=room)
        fit = [group for group in groups if len(group.prompt) + room <= model.longest]
        own = token_logps(model, draw(model, fit[: flags.own], rows, 1, stream)) if fit[: flags.own] else []
        source = Source(name, groups, logps, own)
        lost = sum(len(row.completions) for row in rows) - len(source.all)
        described.append((source, source.describe() | {"over-long, not trained on": f"{lost:,}"}))
    described.sort(key=lambda pair: -pair[0].estimate[0])
    sources, columns = zip(*described)
    results = [["", *(source.name for source in sources)]]
    for key in dict.fromkeys(key for column in columns for key in column):
        results.append([key, *(column.get(key, "") for column in columns)])
    print(
        f"under {flags.model}, the model to start from; [95 % bootstrap intervals over prompts]\n\n"
        f"{table(results)}\n"
    )
    for source in sources[1:]:  # two independent means: the reaches of their intervals add in squares
        a, a_low, a_high = source.estimate
        b, b_low, b_high = sources[0].estimate
        gap = a - b
        low = gap - math.hypot(a - a_low, b_high - b)
        high = gap + math.hypot(a_high - a, b - b_low)
        gap = show((gap, low, high), sign="+")
        print(f"{source.name}: {gap} nats/token from {sources[0].name}, the likeliest")
    for source in sources:
        print(f"{source.name}: {source.advice()}")
    picture_data(sources, flags.model, out)

def picture_data(sources: Iterable[Source], start: str, path: Path) -> None:
    """Histograms of mean token log-probs."""
    figure, (axes,) = new_figure(3.6, 1, 1)
    everything = np.concatenate([source.all for source in sources])
    high = max(-7, min(0, everything.max()))  # the first bin may hold all of them
    edges = np.linspace(max(np.quantile(everything, 0.005), -8), high, 41)
    low, high = np.clip(PAPERS_WORST, edges[0], edges[-1])
    axes.axvspan(low, high, color="#E4E4E4", zorder=0, label="the paper's worst quartile")
    drawn = [
        (source.name, source.all, OKABE_ITO[i % 7], DASHES[i // 7 % 4]) for i, source in enumerate(sources)
    ]
    own = [mean for source in sources for mean in source.own]
    if own:
        drawn.append(("the model's own samples", own, GREY, ":"))
    for name, values, colour, dash in drawn:
        shares = 100 * np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0] / len(values)
        axes.stairs(shares, edges, color=colour, linestyle=dash, linewidth=2, label=name)
    axes.set(
        xlim=(edges[0], edges[-1]),
        ylabel="completions, % per bin",
        xlabel=f"mean token log-prob of a completion under {start}, nats (the first bin holds all below it)",
    )
    save(figure, path, legend_of(axes))

# ---------- perception ------------------------------------------------------------------------------------------------

GAMMAS = (0.61, 0.69)  # Tversky and Kahneman (1992): gains, losses
BINS = 20  # of equal probability under the policy
OWN = "the policy's own samples"

def perception(flags: Perception) -> None:
    """Outcomes of the policy and of the data, what humanline lets through, and how far each is from what people see."""
    run = run_folder(flags.model, "--model")
    config = settings_of(flags.model, flags)
    require(
        run or (flags.ref and flags.data),
        f"--ref and --data: name the model that {flags.model} was trained from, and offline completions",
    )
    ref_name = flags.ref or humanline.parse_config(flags_of_run(run)).model
    ref_config = settings_of(ref_name, flags, "--ref", run)
    data = flags.data or config.data[0]
    out = new_file(flags.out, (".png", ".svg"), "perception.png")
    rows = read_rows(data, config)
    require(
        all(row.completions for row in rows),
        f"--data {data}: prompts without completions; there are no outcomes to look at",
    )
    policy = load(flags.model, config, rewarded=False)
    ref = load(ref_name, ref_config, rewarded=False)
    require(
        policy.tokenizer.get_vocab() == ref.tokenizer.get_vocab(),
        f"--ref {ref_name}: its vocabulary is not that "
        f"of {flags.model}, so the two have no log-ratio; name a model with the same tokenizer",
    )
    groups = encode(policy, rows, offline=True)
    drawn = draw(policy, groups, rows, flags.samples, 0)

    def ratios(groups: list[Group]) -> PerToken:  # token log-ratios d, per prompt, per completion
        both = zip(token_logps(policy, groups), token_logps(ref, groups))
        return [[a - b for a, b in zip(ours, theirs)] for ours, theirs in both]

    own = ratios(drawn)
    theirs = ratios(groups)
    largest = max(abs(one).max() for side in (own, theirs) for group in side for one in group)
    require(
        largest >= 1e-5,
        f"--ref {ref_name}: it is the same model as {flags.model}, so that every outcome is 0; "
        "name another",
    )

    outcomes = [np.array([one.sum() for one in group]) for group in own]
    data_outcomes = [np.array([one.sum() for one in group]) for group in theirs]
    weights = {"the data": [np.ones(len(group)) for group in theirs]} | let_through(theirs, config)
    edges = np.unique(np.quantile(np.concatenate(outcomes), np.linspace(0, 1, BINS + 1)[1:-1]))

    def count(z: np.ndarray, weight: np.ndarray) -> np.ndarray:  # in each bin
        return np.bincount(np.searchsorted(edges, z), weights=weight, minlength=len(edges) + 1)

    expected = np.stack([count(z, np.ones(len(z))) for z in outcomes])  # (prompts, bins)
    counts = {OWN: expected}
    for name, weight in weights.items():
        counts[name] = np.stack([count(*pair) for pair in zip(data_outcomes, weight)])
    weights = {name: np.concatenate(weight) for name, weight in weights.items()}
    results = [["", "tokens let through", *(f"KL, γ = {gamma}" for gamma in GAMMAS)]]
    labels = {}
    for name, of_bins in counts.items():
        found = [divergence(expected, of_bins, gamma) for gamma in GAMMAS]
        results.append([name, f"{weights[name].mean():.1%}" if name in weights else "", *map(show, found)])
        labels[name] = f"{name}, KL {found[0][0]:.2f}"
    print(
        f"outcomes z = log π/π_ref in nats, {flags.model} over {ref_name}, {len(groups):,} prompts: {flags.samples} "
        f"samples by the policy for each, and {data}; [95 % bootstrap intervals over prompts]\n\n{table(results)}\n\n"
        f"KL is Proposition 3.4's, in nats: what people make of the data is off by at most sup|v| sqrt(2 KL)."
    )
    picture_perception(np.concatenate(outcomes), np.concatenate(data_outcomes), weights, labels, out)

def let_through(d: PerToken, config: Config) -> dict[str, list[np.ndarray]]:
    """How much of each completion humanline learns from: the share of its tokens that pass a gradient.

    Clipping passes d in [log ε_P, log ε_R]; sampling rejects by Definition 4.2, with M_P and M_R from batches of
    --batch-size prompts, as in training.

    Args:
        d: per prompt, per completion, the token log-ratios in nats.
    Returns:
        for each of the two, per prompt, (completions,) shares.
    """
    clipped = []
    for group in d:
        passes = [(one >= config.log_eps_p) & (one <= config.log_eps_r) for one in group]
        clipped.append(np.array([one.mean() for one in passes]))
    sampled = []
    generator = torch.Generator().manual_seed(config.seed)
    betas = config.gamma_p, config.gamma_r, config.beta_p, config.beta_r
    for start in range(0, len(d), config.batch_size):
        batch = d[start : start + config.batch_size]
        tokens = [one for group in batch for one in group]
        flat = torch.from_numpy(np.concatenate(tokens))[None]
        verdicts = humanline.humanline_verdicts(flat, torch.ones_like(flat), *betas, generator)[0].numpy()
        kept = iter(np.split(verdicts == 0, np.cumsum([len(one) for one in tokens])[:-1]))
        sampled += [np.array([next(kept).mean() for _ in group]) for group in batch]
    return {"after clipping": clipped, "after sampling": sampled}

def divergence(expected: np.ndarray, counts: np.ndarray, gamma: float) -> tuple[float, float, float]:
    """perceived_divergence with its 95 % interval, from (P, B) counts per prompt; resamples prompts.

    The interval is pivotal, 2 KL minus quantiles of the resampled KL: resampling adds to a KL what sampling had added.
    """
    found = float(perceived_divergence(expected.sum(0), counts.sum(0), gamma))
    again = [
        perceived_divergence(expected[index].sum(0), counts[index].sum(0), gamma)
        for index in resamples(len(expected), 500)
    ]
    low, high = np.quantile(again, [0.025, 0.975])
    return found, max(0.0, 2 * found - high), max(0.0, 2 * found - low)

def picture_perception(
    policy: np.ndarray,
    data: np.ndarray,
    weights: dict[str, np.ndarray],
    labels: dict[str, str],
    path: Path,
) -> None:
    """Figure 2: the data's cumulative probability against the policy's."""
    figure, (axes,) = new_figure(4.6, 1, 1)
    a = np.linspace(0, 1, 201)
    for gamma, dash in zip(GAMMAS, DASHES):
        label = f"as perceived, γ = {gamma}"
        axes.plot(a, capacity(a, gamma), color="#000000", linestyle=dash, linewidth=1.4, label=label)
    axes.plot(a, a, color=GREY, linestyle=":", linewidth=2, label=labels[OWN])
    order = np.argsort(data)
    quantiles = np.quantile(policy, a)
    for (name, weight), colour, dash in zip(weights.items(), OKABE_ITO, DASHES):
        below = np.concatenate([[0], np.cumsum(weight[order])]) / max(weight.sum(), 1e-12)
        at_quantiles = below[np.searchsorted(data[order], quantiles, side="right")]
        axes.plot(a, at_quantiles, color=colour, linestyle=dash, linewidth=2, label=labels[name])
    axes.set(xlabel="cumulative probability under the policy", ylabel="under the data, or as perceived")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    save(figure, path, legend_of(axes))

# ---------- plot ------------------------------------------------------------------------------------------------------

Metrics = list[dict[int, dict]]  # of each run, by step

def plot(flags: Plot) -> None:
    """Read, group by everything but the seed, draw."""
    out = new_file(flags.out, (".png", ".svg"), "curves.png")
    require(flags.runs, "plot: name the folders of runs")
    found = defaultdict(dict)  # by label and settings: the metrics of each run
    for spec in flags.runs:
        label, _, folder = spec.rpartition("=") if not Path(spec).exists() else ("", "", spec)
        require(
            Path(folder, "metrics.jsonl").exists(),
            f"plot {folder}: no such run; the folder of a run holds metrics.jsonl",
        )
        settings = tomllib.loads(Path(folder, "config.toml").read_text(encoding="utf-8"))
        settings.pop("seed", None)
        found[label, repr(settings)][folder] = read_metrics(Path(folder))
    groups = {}
    for (label, _), runs in found.items():
        names = [Path(folder).name for folder in runs]
        label = label or os.path.commonprefix(names).rstrip("-_.") or names[0]
        if len(names) > 1:
            label += f" ({len(names)} seeds)"
        if label in groups:
            label += f", {next(iter(runs))}"
        groups[label] = list(runs.values())
    measured = {key for runs in groups.values() for run in runs for line in run.values() for key in line}
    for flag, names in (("--metrics", flags.metrics or ()), ("--against", {flags.against} - {"steps"})):
        for name in names:
            require(
                name in measured,
                f"{flag} {name}: no run has measured that; {humanline.suggest(name, measured)}",
            )
    panels = flags.metrics or [name for name in PANELS if name in measured]
    picture_curves(groups, panels, flags.against, out)

def read_metrics(path: Path) -> dict[int, dict]:
    """A run's metrics by step, and sums so far: seconds, those spent on sampling, and tokens/s (`speed`)."""
    lines = {line["step"]: line for line in humanline.read_lines(path / "metrics.jsonl")}
    require(lines, f"plot {path}: its metrics.jsonl has no step yet")
    seconds = sampling = tokens = 0.0
    for line in lines.values():
        seconds += line.get("step_seconds", 0)
        sampling += line.get("sample_seconds", 0)
        tokens += line.get("tokens", 0)
        line |= dict(seconds=seconds, sampling=sampling, speed=tokens / max(seconds, 1e-9))
    before = lines[min(lines)].get("accuracy_before")
    return lines if before is None else {0: dict(seconds=0.0, accuracy=before), **lines}

def picture_curves(groups: dict[str, Metrics], panels: Iterable[str], against: str, path: Path) -> None:
    """A panel for each quantity, a line for each group of runs: their mean, and a band over their whole range. Against
    another quantity the line goes from step to step, to a dot at the last."""
    columns = min(2, len(panels))
    height = math.ceil(len(panels) / columns)
    figure, axes = new_figure(0.3 + 2.3 * height + 0.13 * len(groups), height, columns)
    by_time = against in ("steps", "seconds")
    titles = {name: PANELS.get(name, name) for name in (*panels, against)}
    titles |= dict(steps="optimizer steps", seconds="wall-clock time, seconds")
    legend = {}

    def values(name: str, runs: Metrics, steps: list[int]) -> np.ndarray:  # (runs, steps)
        if name == "steps":
            return np.array([steps], dtype=float)
        found = np.array([[run[step][name] for step in steps] for run in runs], dtype=float)
        if name in EXACT or not steps:
            return found
        width = max(1, round(len(steps) / 25))  # the median of so many steps, as these are noisy
        padded = np.pad(found, ((0, 0), (width // 2, width - 1 - width // 2)), mode="edge")
        return np.median(np.lib.stride_tricks.sliding_window_view(padded, width, axis=1), axis=2)

    def line(axis: Any, name: str, i: int, runs: Metrics) -> Any:
        wanted = {name, against} - {"steps"}
        found = [{step for step in run if wanted <= run[step].keys()} for run in runs]
        steps = sorted(set.intersection(*found))
        x = values(against, runs, steps).mean(0)
        y = values(name, runs, steps)
        style = dict(color=OKABE_ITO[i % 7], linestyle=DASHES[i // 7 % 4], linewidth=1.8, markersize=4)
        if name == "accuracy":
            style["marker"] = "o"
        if not by_time:
            style |= dict(marker="o", markevery=slice(-1, None))
        if len(runs) > 1 and by_time:
            axis.fill_between(x, y.min(0), y.max(0), color=style["color"], alpha=0.2, linewidth=0)
        return axis.plot(x, y.mean(0), **style)[0]

    for name, axis in zip(panels, axes):
        for i, (label, runs) in enumerate(groups.items()):
            legend[label] = line(axis, name, i, runs)
        axis.set_title(titles[name], loc="left")
        axis.set_xlabel(titles[against])
        if name == "kl":  # 0 at a sync, and now and then very large
            axis.set_yscale("symlog", linthresh=0.01)
    for spare in axes[len(panels) :]:
        spare.set_axis_off()
    save(figure, path, legend)
    if by_time and any(len(runs) > 1 for runs in groups.values()):
        print("bands: the range over seeds")

# ---------- The command line ------------------------------------------------------------------------------------------

Command = (
    Accuracy
    | Show
    | Chat
    | Winrate
    | Annotated[DataQuality, tyro.conf.subcommand("data")]
    | Perception
    | Plot
)
COMMANDS = {
    Accuracy: accuracy,
    Show: show_completions,
    Chat: chat,
    Winrate: winrate,
    DataQuality: data_quality,
    Perception: perception,
    Plot: plot,
}

def main(argv: list[str] | None = None) -> int:
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    humanline.print_anything()
    try:
        flags = humanline.parse_flags(sys.argv[1:] if argv is None else argv, kind=Command)
        check_flags(flags)
        COMMANDS[type(flags)](flags)
    except UserError as error:
        print(f"eval.py: error: {error}", file=sys.stderr)
        return 2
    except (OSError, MemoryError) as error:
        print(f"eval.py: stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("eval.py: stopped", file=sys.stderr)
        return 130  # as the shell says of a process that Ctrl-C ended
    return 0

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python has it
    sys.exit(main())
