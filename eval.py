"""Evaluate models: one command per question, and a confidence interval for every answer.

  python eval.py accuracy --model RUN BASE              # pass@1, pass@k and greedy accuracy of several models
  python eval.py show --model BASE RUN                  # completions of the same prompts, side by side
  python eval.py show --model RUN --rollouts            # what an online run sampled, step by step
  python eval.py chat --model RUN                       # chat with a model in the terminal
  python eval.py winrate --model RUN --against BASE     # win rates, raw and length-controlled
  python eval.py data --model BASE --data mine.jsonl    # is this offline data good enough for this model?
  python eval.py perception --model RUN                 # Figure 2 of the paper, for your model and data
  python eval.py plot runs/mine runs/other              # learning curves: --metrics kl reward, --against kl

RUN is the folder of a finished run. Its final model is evaluated with the prompt format and the reward from
its config.toml. BASE is a Hugging Face name or a model folder; next to a run, it is prompted and rewarded
like the run. Models are loaded, sampled and scored by the training code in humanline.py.

All intervals are 95% intervals. They resample problems, not samples, because the samples of one problem are
correlated.
"""

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import pydoc
import re
import shutil
import signal
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Callable, Iterable, Iterator, Literal

if __name__ == "__main__":  # no traceback if Ctrl-C is pressed during the slow imports below
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import numpy as np
import torch
import tyro

import humanline
from humanline import Config, Group, Reward, Row, Sampler, UserError, encode_rows, read_rows, require

# ---------- Arguments ---------------------------------------------------------------------------------------
# Each field is a flag; the text around it is its help: tyro would break a docstring where the source does.

@dataclass
class Settings:
    """Flags of every command that loads a model."""

    config: str | None = None
    """A .toml file with settings of humanline.py, to read instead of the run's config.toml."""
    system: str | None = None  # System message for prompts that have none. Default: the run's.
    prompt_template: str | None = None
    """Text around each prompt, with {prompt} in its place. Default: the run's."""
    max_new_tokens: int | None = None
    """Maximum completion length in tokens. Default: the run's, or humanline.py's."""
    dtype: Literal["auto", "mixed", "float32", "bfloat16"] | None = None  # Same as in humanline.py.
    trust_remote_code: bool = False  # Run code that comes with a model or tokenizer. Default: the run's.
    seed: int = 0  # Random seed for sampling.

@dataclass
class RowSettings(Settings):
    """Flags of every command that loads a model and reads rows."""

    limit: int | None = None  # Read at most this many rows per source. Default: all.
    max_prompt_length: int | None = None  # Drop rows with a prompt of more than this many tokens.
    max_length: int | None = None  # Maximum length of prompt + completion in tokens. Default: the run's.
    reward: str | None = None
    """Reward for a completion: exact, math or FILE.py:function. Default: the run's, or exact."""
    reward_args: str | None = None
    """Extra keyword arguments for FILE.py:function, as a JSON object. Default: the run's, without --reward."""
    reward_seconds: float | None = None
    """Time limit, in seconds, for one call to the math reward, a custom reward or a judge."""

@dataclass
class Sampling:
    """Flags of the commands that support any way of sampling."""

    temperature: float = 1.0  # Sampling temperature.
    top_p: float = 1.0
    """Nucleus sampling: sample only from the most likely tokens, up to this total probability."""

@dataclass(kw_only=True)
class Accuracy(Sampling, RowSettings):
    """Measure pass@1 and pass@k on held-out problems, for one model or several side by side."""

    model: tuple[str, ...]  # Models to evaluate; each is compared with the first, problem by problem.
    data: str | None = None  # Rows with answers: NAME[:[CONFIG:]SPLIT]. Default: the run's --eval-data.
    samples: int = 8  # Completions sampled per problem.
    k: tuple[int, ...] | None = None  # Values of k for pass@k. Default: 1 and --samples.
    greedy: bool = True  # Also decode each problem greedily.
    out: str | None = None
    """Write all samples to this JSON Lines file. Default: evals/accuracy.jsonl, numbered."""

@dataclass(kw_only=True)
class Show(Sampling, RowSettings):
    """Show prompts with their completions, rewards and lengths, for one model or several side by side."""

    model: tuple[str, ...]  # Models to compare, one column each, for example the base model and the run.
    data: str | None = None  # Rows: NAME[:[CONFIG:]SPLIT]. Default: the run's --eval-data.
    prompts: int = 5  # Number of prompts to show, from the start of the data.
    samples: int = 1  # Completions sampled per prompt.
    greedy: bool = False  # Show the greedy completion instead of --samples.
    # Show the rollouts that an online run has stored, finished or not, instead of sampling: for each step the
    # best and the worst completion of --prompts prompts, the largest differences in reward first.
    rollouts: bool = False

@dataclass(kw_only=True)
class Chat(Sampling, Settings):
    """Chat with a model in the terminal, or with several that answer in turn."""

    model: tuple[str, ...]  # Models to chat with. Each keeps its own dialogue.

@dataclass(kw_only=True)
class Winrate(Sampling, RowSettings):
    """Measure how often a model's completions beat another model's, or those in the data. The higher reward
    wins."""

    model: str  # The model to evaluate.
    against: str = "data"
    """The model to compare with, or `data` for the best or desirable completion of each row."""
    data: str | None = None  # Prompts: NAME[:[CONFIG:]SPLIT]. Default: the run's --eval-data.
    # Judge to use instead of --reward, as FILE.py:function: a function(prompts, first, second, rows) that
    # returns the probability that `first` is better for each pair. It is called in both orders, in a separate
    # process.
    judge: str | None = None
    samples: int = 1  # Pairs per prompt.
    out: str | None = None  # Write all pairs to this JSON Lines file. Default: evals/winrate.jsonl, numbered.

@dataclass(kw_only=True)
class DataQuality(RowSettings):
    """Check whether offline data is good enough: how likely it is under the model, and what else is wrong
    with it."""

    data: tuple[str, ...]  # Sources to check: NAME[:[CONFIG:]SPLIT]. Several sources are ranked.
    model: str  # The model that training would start from.
    own: int = 500
    """For comparison, sample the model's own completion for up to this many prompts per source."""
    out: str | None = None  # Write the figure to this .png or .svg file. Default: evals/data.png, numbered.

@dataclass(kw_only=True)
class Perception(RowSettings):
    """Draw the paper's Figure 2: outcomes of the policy and of the data as humans perceive them."""

    model: str  # The policy.
    ref: str | None = None  # The reference model. Default: the model that the run started from.
    data: str | None = None  # Offline completions: NAME[:[CONFIG:]SPLIT]. Default: the run's first source.
    samples: int = 8  # Completions sampled from the policy per prompt.
    limit: int | None = 1000  # Read at most this many rows.
    out: str | None = None
    """Write the figure to this .png or .svg file. Default: evals/perception.png, numbered."""

@dataclass
class Plot:
    """Plot learning curves from the metrics.jsonl of runs. Runs that differ only in --seed share a line and a
    band."""

    runs: tyro.conf.Positional[tuple[str, ...]] = ()  # Run folders, or LABEL=FOLDER.
    # Metrics to plot, one panel each: columns of metrics.jsonl, such as kl, reward or lr, and speed and
    # sampling. Default: the usual ones.
    metrics: tuple[str, ...] | None = None
    against: str = "steps"
    """Horizontal axis: steps, seconds (without evaluations), or a column of metrics.jsonl such as kl."""
    out: str | None = None  # Write the figure to this .png or .svg file. Default: evals/curves.png, numbered.

PANELS = {
    "reward": "mean reward of the batch",
    "accuracy": "held-out pass@1",
    "ordered": "fraction of pairs in the right order",
    "unclamped": "fraction of tokens not clipped",
    "drift": "drift: mean |d|, nats/token",
    "kl": "KL to the reference, nats/token",
    "grad_norm": "gradient norm",
    "speed": "tokens/s since the start",
    "sampling": "sampling time since the start, seconds",
}
MEASURED = "accuracy", "greedy"  # on held-out rows, at some steps
OF_SAMPLES = "reward", "sampling"  # say nothing of offline runs, whose rewards are those of the data
NOT_SMOOTHED = (*MEASURED, "speed", "lr", "seconds", "sampling")

def check_flags(flags: Any, words: list[str]) -> None:
    """Raises UserError if a count is out of range, or if a flag that takes a list has no value or appears twice
    in the `words` of the command."""
    for name, least in dict(samples=1, prompts=1, own=0, limit=1).items():
        value = getattr(flags, name, None)
        value = least if value is None else value
        require(least <= value <= 10**6, f"--{name} is {value}; it must be between {least} and 1,000,000")
    for name, value in vars(flags).items():
        require(
            value != () or name == "runs", f"--{name} has no value; pass at least one, or omit the flag"
        )
        count = sum(word.partition("=")[0] == f"--{name}" for word in words)
        require(
            count < 2 or not isinstance(value, tuple),
            f"--{name} appears twice; write --{name} FIRST SECOND",
        )

# ---------- Estimates and their uncertainty: pure functions -------------------------------------------------

def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of k samples is correct, if c of n are: 1 - C(n-c, k) / C(n, k).

    This is unbiased: it is the mean over all subsets of size k (Chen et al. 2021, eq. 1), in exact integers.

    >>> pass_at_k(8, 2, 1), round(pass_at_k(8, 2, 4), 4)
    (0.25, 0.7857)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k(n={n}, c={c}, k={k}) needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)

def resamples(count: int, repeats: int) -> Iterator[np.ndarray]:
    """Yields (count,) indices for each of the bootstrap resamples of `count` items."""
    generator = np.random.default_rng(0)
    for _ in range(repeats):
        yield generator.integers(0, count, count)

def interval(
    values: Iterable[float], low: float | None = None, high: float | None = None
) -> tuple[float, float, float]:
    """The mean of one value per problem, with its 95% BCa bootstrap interval (Efron 1987).

    Plain percentile intervals are too short when most problems are never solved (see tests/test_eval.py). If
    all values are equal, there is no spread to resample, and the interval is Clopper and Pearson's: 0 of 100
    gives [0, 0.036], not [0, 0].

    Args:
        values: (P,), one value per problem.
        low, high: the smallest and the largest possible value. Default: the ones observed.
    Returns:
        The mean, and the lower and upper end of the interval.
    """
    values = np.asarray(values, dtype=float)
    mean = float(values.mean())
    if np.ptp(values) == 0:
        low = mean if low is None else low
        high = mean if high is None else high
        share = 1 - 0.025 ** (1 / len(values))  # of unseen values that may be elsewhere
        return mean, mean - share * (mean - low), mean + share * (high - mean)
    normal = NormalDist()
    repeats = 2000
    deviations = values - mean
    shifts = np.array([deviations[index].mean() for index in resamples(len(values), repeats)])
    is_zero = abs(shifts) < 1e-9 * np.ptp(values)
    below = ((shifts < 0) & ~is_zero).mean() + is_zero.mean() / 2
    bias = normal.inv_cdf(min(max(below, 1 / repeats), 1 - 1 / repeats))
    acceleration = (deviations**3).sum() / (6 * (deviations**2).sum() ** 1.5)
    levels = [normal.cdf(bias + (bias + z) / (1 - acceleration * (bias + z))) for z in (-1.96, 1.96)]
    ends = np.clip(mean + np.quantile(shifts, levels), values.min(), values.max())
    return mean, float(ends[0]), float(ends[1])

def length_controlled(preference: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """The win rate that the judge would give if both completions had the same length.

    Fits P(win) = σ(θ + φ tanh(Δ / s)), where Δ is the difference in characters and s its standard deviation,
    and returns σ(θ). This is the model of AlpacaEval 2 (Dubois et al. 2024, section 3), without its term for
    the difficulty of each instruction, and with a weak ridge penalty (a normal prior with standard deviation
    10 on θ and φ) instead of L1.

    Args:
        preference: (..., N), 1 for a win of the model, 0.5 for a tie, 0 for a loss; or a judge's probability.
        delta: (..., N), characters in the model's completion minus characters in the other one.
    Returns:
        (...), one win rate per fit. The leading dimensions are bootstrap resamples.
    """
    spread = delta.std(-1, keepdims=True)
    x = np.tanh(delta / np.where(spread > 0, spread, 1))
    theta = np.zeros(x.shape[:-1])
    phi = np.zeros(x.shape[:-1])
    for _ in range(60):  # Newton's method on the log-posterior of (θ, φ); steps are limited to length 1
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
    """Ω⁺(a; γ) = a^γ / (a^γ + (1 - a)^γ)^(1/γ): how humans perceive a cumulative probability `a`.

    For γ in (0, 1) this is an inverted S, which overweights extreme outcomes. Tversky and Kahneman (1992)
    estimate γ = 0.61 for gains and 0.69 for losses.

    Args:
        a: probabilities in [0, 1], as a float or as an array or tensor of any shape.
    Returns:
        Perceived probabilities, with the shape of `a`.

    >>> round(capacity(0.01, 0.61), 3), round(capacity(0.99, 0.61), 3)
    (0.055, 0.912)
    """
    return a**gamma / (a**gamma + (1 - a) ** gamma) ** (1 / gamma)

def perceived_divergence(policy: np.ndarray, data: np.ndarray, gamma: float) -> np.ndarray:
    """KL(ω || Q) in nats, where ω is the distribution of outcomes as humans perceive it, and Q is the
    distribution in the data (Proposition 3.4).

    Outcomes are binned by the policy's quantiles. If F_b is the policy's cumulative probability at the end of
    bin b, then ω_b = Ω⁺(F_b; γ) - Ω⁺(F_b-1; γ), accumulated from the lowest outcome up. Q_b is the fraction
    of the data in bin b, after adding half an outcome to every bin so that empty bins stay finite. For any
    value function v, |u(Z; ω) - u(Z; Q)| <= sup|v| sqrt(2 KL(ω || Q)), which bounds how far the utility of
    the data is from the utility that humans perceive in the model. The bound is from the paper; the bins and
    the smoothing are ours.

    Args:
        policy: (..., B) counts of the policy's outcomes.
        data: (..., B) counts of the data's outcomes, or sums of their weights.
    Returns:
        (...) divergences.
    """
    cumulative = (np.cumsum(policy, -1) / policy.sum(-1, keepdims=True)).clip(0, 1)
    omega = np.diff(capacity(cumulative, gamma), axis=-1, prepend=0.0).clip(1e-12)
    q = (data + 0.5) / (data + 0.5).sum(-1, keepdims=True)
    return (omega * np.log(omega / q)).sum(-1)

PerToken = list[list[np.ndarray]]  # per prompt and completion, an array with one value per token

# ---------- Models and their completions --------------------------------------------------------------------

def run_folder(spec: str, flag: str) -> Path | None:
    """The folder of the run that `spec` names, or None if it names a model. Raises UserError for an
    unfinished run."""
    path = Path(spec)
    if path.name == "final" and (path.parent / "config.toml").exists():
        path = path.parent
    has_config = (path / "config.toml").exists()
    is_model = any((path / name).exists() for name in ("config.json", "adapter_config.json"))
    if has_config and (is_model or (path / "final").is_dir()):  # a run, or a copy of its final/
        return path
    require(
        not has_config and not (path / "checkpoint").is_dir(),
        f"{flag} {spec}: the run did not finish, so it has no final/; resume it with "
        f"python humanline.py --config {path / 'config.toml'} --out {path} --resume latest",
    )
    require(
        is_model or not path.is_dir(),
        f"{flag} {spec}: this folder is neither a run (config.toml and final/) nor a model (config.json)",
    )
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", spec) and not (
        spec.count("/") and path.parent.is_dir()
    )
    require(is_model or is_hub_name, f"{flag} {spec}: no such run or model")
    return None

def config_for(spec: str, flags: Settings, flag: str = "--model", fallback_run: Path | None = None) -> Config:
    """The trainer's configuration for a model: that of its run, or of `fallback_run` if the model is not a
    run, overridden by our flags."""
    own_run = run_folder(spec, flag)
    run = own_run or fallback_run
    if own_run and (own_run / "final").is_dir():
        spec = str(own_run / "final")
    args = ["--model", spec]
    if flags.config:
        args += ["--config", flags.config]
    elif run:
        args += run_flags(run)
    overrides = {field.name: getattr(flags, field.name, None) for field in dataclasses.fields(RowSettings)}
    for name in overrides.keys() - {"config", "limit", "trust_remote_code"}:
        if overrides[name] is not None:
            args.append(f"{humanline.flag_of(name)}={overrides[name]}")
    args += ["--trust-remote-code"] * flags.trust_remote_code
    sampling = {name: getattr(flags, name, 1.0) for name in ("temperature", "top_p")}
    config = dataclasses.replace(humanline.parse_config(args), **sampling)
    config.limit = overrides["limit"]  # a run's is for its training data
    if overrides["reward"] and not overrides["reward_args"]:
        config.reward_args = None  # a run's are for its own reward
    return config

def run_flags(run: Path) -> list[str]:
    """The settings of a run, as flags."""
    path = run / "config.toml"
    loss = tomllib.loads(path.read_text(encoding="utf-8")).get("loss", "grpo")
    if loss not in humanline.LOSSES:  # a custom loss; it is never computed here, but its settings must parse
        every_setting = " ".join(entry.settings for entry in humanline.LOSSES.values())
        humanline.LOSSES[loss] = dataclasses.replace(humanline.LOSSES["grpo"], settings=every_setting)
    return ["--config", str(path)]

def configs_for(flags: Accuracy | Show | Chat) -> list[Config]:
    """The configuration of each --model. Models that are not runs use that of the first run among them."""
    run = next(filter(None, (run_folder(name, "--model") for name in flags.model)), None)
    return [config_for(name, flags, fallback_run=run) for name in flags.model]

def configs_with_one_reward(flags: Accuracy | Show) -> list[Config]:
    """The configuration of each --model. Raises UserError if their rewards differ."""
    configs = configs_for(flags)
    names = sorted({f"{config.reward} {config.reward_args or ''}".strip() for config in configs})
    require(
        len(names) == 1,
        f"--model: these runs have different rewards, {' and '.join(names)}; choose one with --reward",
    )
    return configs

def load(config: Config, rewarded: bool = True) -> Sampler:
    """Load a model into the trainer's sampler: policy, tokenizer and, if `rewarded`, the reward."""
    config = dataclasses.replace(
        config, lora=0, shard=False, compile=False, sample_every=int(rewarded), eval_data=None, group_size=8
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy, tokenizer = humanline.load_policy(config, device)
    if config.config and not tokenizer.chat_template:  # a base is prompted like the run that it is compared to
        folder = Path(config.config).parent  # a run, or a copy of its final/
        template = (folder / "final" if (folder / "final").is_dir() else folder) / "chat_template.jinja"
        tokenizer.chat_template = template.read_text(encoding="utf-8") if template.exists() else None
    return Sampler(policy, tokenizer, config)

def unload(sampler: Sampler) -> None:
    """Free the memory of a model that is no longer needed and of its reward, for other models and processes."""
    sampler.policy = sampler.reward = None
    torch.cuda.empty_cache()

def data_to_evaluate(flags: Accuracy | Show | Winrate, config: Config) -> str:
    """--data, or else the run's --eval-data."""
    data = flags.data or config.eval_data
    require(
        data, f"--data: pass the rows to evaluate on; --model {config.model} has no --eval-data of its own"
    )
    return data

def draw(
    sampler: Sampler,
    prompts: list[Group],
    rows: list[Row],
    samples: int,
    stream: int,
    greedy: bool = False,
) -> list[Group]:
    """Sample `samples` completions per prompt and reward them, in parts, so that a broken reward stops the
    command early. `stream` numbers the independent draws of a command."""
    drawn, size = [], max(1, 16384 // samples)
    for part in range(0, len(prompts), size):
        number = 10**8 * (1 + stream) + part // size
        drawn += sampler.draw_rollouts(prompts[part : part + size], rows, samples, number, greedy)
    return drawn

def with_room(config: Config, max_new_tokens: int) -> Config:
    """A loaded model's config for completions of other lengths."""
    config = copy.copy(config)
    config.max_new_tokens = max_new_tokens
    return config

def completions_of(sampler: Sampler, group: Group) -> list[dict]:
    """The completions of a sampled group as text, with reward and length."""
    texts = sampler.texts(group.completions)
    rewards = group.rewards if sampler.reward else [None] * len(texts)
    return [
        dict(completion=text, reward=reward, tokens=len(ids), truncated=ids[-1] not in sampler.stop_ids)
        for text, ids, reward in zip(texts, group.completions, rewards)
    ]

def token_logps(sampler: Sampler, groups: list[Group]) -> PerToken:
    """log π(y_t | x, y_<t), in nats, of every completion token, computed as in training."""
    config = Config(loss="grpo", microbatch_tokens=sampler.config.microbatch_tokens)
    sequences = [humanline.Sequence(group.prompt, ids) for group in groups for ids in group.completions]
    logps = iter(humanline.sequence_logps(sampler.policy, sequences, config))
    return [[next(logps).double().numpy() for _ in group.completions] for group in groups]

# ---------- Text, files and figures -------------------------------------------------------------------------

def format_interval(estimate: tuple[float, float, float], digits: int = 3, sign: str = "") -> str:
    """Format a mean and its interval, as in 0.861 [0.842, 0.879]."""
    mean, low, high = (f"{value:{sign}.{digits}f}" for value in estimate)
    return f"{mean} [{low}, {high}]"

def rate(values: Iterable[float]) -> str:
    """Format the mean of values in [0, 1], such as a fraction per problem, with its interval."""
    return format_interval(interval(values, 0.0, 1.0))

def table(rows: list[list[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

def printable(text: str) -> str:
    """Replace control characters, which could move the cursor or ring the bell. Newlines and tabs are
    kept."""
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n")
    )

def print_columns(names: list[str], rows: list[list[str]], width: int) -> None:
    """Print texts side by side under their column names, at most `width` characters wide."""
    from rich import box, console, table, text
    columns = table.Table(box=box.MINIMAL, show_edge=False, width=width)
    for name in names:
        columns.add_column(text.Text(name), ratio=1, overflow="fold")
    for cells in rows:
        columns.add_row(*(text.Text(printable(cell).strip("\n")) for cell in cells))
    console.Console(width=width).print(columns)

def new_file(out: str | None, suffixes: tuple[str, ...], default: str, flag: str = "--out") -> Path:
    """The path to write to: `out`, or evals/`default`, with a number if that exists. Raises UserError early,
    before any work is done."""
    path = Path(out or Path("evals", default))
    number = 2
    while out is None and not reserve(path):
        path = Path("evals", default).with_stem(f"{Path(default).stem}-{number}")
        number += 1
    require(path.suffix in suffixes, f"{flag} {path}: the name must end in {' or '.join(suffixes)}")
    if out is not None:
        require(reserve(path), f"{flag} {path}: the file already exists; choose another name")
    return path

def reserve(path: Path) -> bool:
    """Create an empty file, so that no other process takes its name. Returns False if it exists."""
    with humanline.explained(f"--out {path}", "choose another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            return False
    RESERVED.append(path)
    return True

RESERVED = []  # files that this process has created

def remove_empty_files() -> None:
    """Remove reserved files that a command which failed has left empty."""
    for path in RESERVED:
        if path.exists() and path.stat().st_size == 0:
            path.unlink()
            with contextlib.suppress(OSError):  # other files are there
                Path("evals").rmdir()
    RESERVED.clear()

def write(path: Path, text: str) -> None:
    """Write a file whole or, on a full disk, leave what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)

def json_lines(lines: Iterable[dict]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

OKABE_ITO = [  # a palette that is safe for colour blindness
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
]
GREY = "#777777"
DASHES = ["-", "--", ":", "-."]

def new_figure(height: float, rows: int, columns: int) -> tuple[Any, list]:
    """Create a figure 8 inches wide, the width of a README, and `height` inches high. Returns it with its
    axes."""
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
    """Add a legend for the `lines`, by label, above the figure, and write it to `path`."""
    columns = max(1, min(3, 105 // (max(map(len, lines)) + 8)))  # as many as fit beside each other
    figure.legend(
        list(lines.values()), list(lines), loc="outside upper center", ncols=columns, frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    print(f"figure: {path}")

def legend_of(axes: Any) -> dict[str, Any]:
    handles, labels = axes.get_legend_handles_labels()
    return dict(zip(labels, handles))

# ---------- accuracy ----------------------------------------------------------------------------------------

def accuracy(flags: Accuracy) -> None:
    """Sample completions, reward them, and print tables."""
    ks = sorted(set(flags.k or (1, flags.samples)))
    require(
        1 <= ks[0] <= ks[-1] <= flags.samples,
        f"--k {' '.join(map(str, ks))} --samples {flags.samples}: pass@k needs 1 <= k <= samples",
    )
    configs = configs_with_one_reward(flags)
    data = data_to_evaluate(flags, configs[0])
    out = new_file(flags.out, (".jsonl",), "accuracy.jsonl")

    all_samples = []
    samples_of = defaultdict(list)  # by the model's index, sampled or greedy, and row
    for i, (name, config) in enumerate(zip(flags.model, configs)):  # only one model in memory at a time
        rows = read_rows(data, config, "--data")
        sampler = load(config)
        prompts = encode_rows(rows, sampler, online=True)
        groups_by_kind = dict(sampled=draw(sampler, prompts, rows, flags.samples, 2 * i))
        if flags.greedy:
            groups_by_kind["greedy"] = draw(sampler, prompts, rows, 1, 2 * i + 1, greedy=True)
        for kind, groups in groups_by_kind.items():
            for group in groups:
                source = dict(model=name, kind=kind, row=group.row, prompt=rows[group.row].prompt)
                samples = [source | completion for completion in completions_of(sampler, group)]
                samples_of[i, kind, group.row] = samples
                all_samples += samples
        write(out, json_lines(all_samples))  # now, in case that the next model fails
        unload(sampler)

    models = range(len(configs))
    problems = [
        row for row in range(len(rows)) if all((i, "sampled", row) in samples_of for i in models)
    ]

    def values(i: int, key: str, kind: str = "sampled") -> np.ndarray:  # (problems, samples)
        samples = [[sample[key] for sample in samples_of[i, kind, row]] for row in problems]
        return np.array(samples, dtype=float)

    rewards = [values(i, "reward") for i in models]
    # pass@k is only defined for rewards of 0 and 1.
    is_binary = all(set(np.unique(values)) <= {0.0, 1.0} for values in rewards)
    estimate = rate if is_binary else lambda values: format_interval(interval(values))
    header = ["", *([f"pass@{k}" for k in ks] if is_binary else ["mean reward"])]
    header += ["greedy"] * flags.greedy + ["tokens", "truncated"]
    results = [header]
    for i in models:
        columns = [rewards[i].mean(1)]
        if is_binary:
            correct = rewards[i].sum(1).astype(int).tolist()
            columns = [[pass_at_k(flags.samples, c, k) for c in correct] for k in ks]
        if flags.greedy:
            columns.append(values(i, "reward", "greedy")[:, 0])
        results.append(
            [
                flags.model[i],
                *map(estimate, columns),
                format_interval(interval(values(i, "tokens").mean(1)), 1),
                rate(values(i, "truncated").mean(1)),
            ]
        )
    print(
        f"{data}: {len(problems)} problems, {flags.samples} samples each at temperature "
        f"{flags.temperature:g}; [95% bootstrap intervals over problems]\n\n{table(results)}"
    )

    levels = np.array([str(rows[row].fields.get("level")) for row in problems])
    if set(levels) != {"None"}:
        names = sorted(set(levels), key=lambda level: (len(level), level))
        results = [["", *(f"{level} ({sum(levels == level)})" for level in names)]]
        for i in models:
            results.append(
                [flags.model[i], *(estimate(rewards[i][levels == level].mean(1)) for level in names)]
            )
        print("\nby level (number of problems)\n" + table(results))
    if len(models) > 1:
        bounds = (-1.0, 1.0) if is_binary else ()
        results = []
        for i in models[1:]:
            difference = rewards[i].mean(1) - rewards[0].mean(1)
            results.append([flags.model[i], format_interval(interval(difference, *bounds), sign="+")])
        print(
            f"\ndifference from {flags.model[0]}, paired by problem; comparisons: {len(results)}\n"
            f"{table(results)}"
        )
    print(f"\nsamples: {out}")

# ---------- show --------------------------------------------------------------------------------------------

def show_completions(flags: Show) -> None:
    """Sample and reward completions as `accuracy` does, and print them."""
    if flags.rollouts:
        show_rollouts(flags)
        return
    configs = configs_with_one_reward(flags)
    data = data_to_evaluate(flags, configs[0])
    samples = 1 if flags.greedy else flags.samples
    prompts, completions = [], []  # one dict per model: a prompt's text and its completions, by row
    for stream, (name, config) in enumerate(zip(flags.model, configs)):  # only one model in memory at a time
        rows = read_rows(data, config, "--data")
        sampler = load(config)
        if (
            flags.reward is None
            and config.reward == Config.reward
            and any(row.fields.get("answer") is None for row in rows)
        ):
            sampler.reward = None  # there is no answer to compare with
        groups = encode_rows(rows, sampler, online=True)[: flags.prompts]
        drawn = draw(sampler, groups, rows, samples, stream, flags.greedy)
        prompts.append({group.row: prompt_text(rows[group.row].prompt) for group in drawn})
        completions.append({group.row: completions_of(sampler, group) for group in drawn})
        unload(sampler)

    shown = [row for row in completions[0] if all(row in by_row for by_row in completions)]
    # 100 columns when the output is not a terminal
    width = min(shutil.get_terminal_size((100, 24)).columns, 80 * len(configs))
    for number, row in enumerate(shown, 1):
        print(f"── {number} of {len(shown)}: {rows[row].where.removeprefix('--data ')} ".ljust(width, "─"))
        texts = [by_row[row] for by_row in prompts]
        same_prompt = len(set(texts)) == 1  # prompts differ between runs with different prompt formats
        if same_prompt:
            print(printable(texts[0]))
        if rows[row].fields.get("answer") is not None:
            print(f"(answer: {printable(str(rows[row].fields['answer']))})")
        lines = [] if same_prompt else [[f"({text})" for text in texts]]
        for side_by_side in zip(*(by_row[row] for by_row in completions)):
            lines.append([sample["completion"] for sample in side_by_side])
            lines.append([summary(sample) for sample in side_by_side])
        print()
        print_columns(flags.model, lines, width)
        print()

def show_rollouts(flags: Show) -> None:
    """Print the rollouts that runs have stored, through the terminal's pager. Only --prompts is read."""
    others = [f.name for f in dataclasses.fields(flags) if f.name not in ("model", "rollouts", "prompts")]
    for name in others:
        require(
            getattr(flags, name) == getattr(Show, name),
            f"--rollouts shows what was sampled in training; omit {humanline.flag_of(name)}",
        )
    width = min(shutil.get_terminal_size((100, 24)).columns, 160)
    with contextlib.redirect_stdout(io.StringIO()) as pages:
        for folder in flags.model:
            path = Path(folder, "rollouts.jsonl")
            require(path.exists(), f"--rollouts: no {path}; pass the folder of a run with --sample-every")
            by_step = defaultdict(lambda: defaultdict(list))  # the lines of each step and prompt
            for line in humanline.read_lines(path):
                line["tokens"] = len(line["tokens"])
                by_step[line["step"]][line["prompt_id"]].append(line)
            for step, groups in by_step.items():
                show_step(f"{folder}, step {step}", list(groups.values()), flags.prompts, width)
    pydoc.pager(pages.getvalue())

def show_step(title: str, groups: list[list[dict]], prompts: int, width: int) -> None:
    """Print the best and the worst completion of some prompts of a step, the largest differences first."""
    for group in groups:
        group.sort(key=lambda line: -line["reward"])
    groups.sort(key=lambda group: group[-1]["reward"] - group[0]["reward"])
    mean = np.mean([line["reward"] for group in groups for line in group])
    equal = sum(group[0]["reward"] == group[-1]["reward"] for group in groups)
    title = f"── {title}: {len(groups)} prompts, mean reward {mean:.4g}, {equal} without a difference "
    print(title.ljust(width, "─"))
    for group in groups[:prompts]:
        print(printable(prompt_text(group[0]["prompt"])) + "\n")
        best, worst = group[0], group[-1]
        cells = [[best["completion"], worst["completion"]], [summary(best), summary(worst)]]
        print_columns([f"best of {len(group)}", "worst"], cells, width)
        print()

def prompt_text(prompt: list[dict]) -> str:
    """A prompt as readable text. Roles are shown if there is more than one message."""
    texts = [f"{message['role']}: {message['content']}" for message in prompt]
    return "\n".join(texts) if len(texts) > 1 else prompt[0]["content"]

def summary(sample: dict) -> str:
    reward = "" if sample["reward"] is None else f"reward {sample['reward']:.4g}, "
    truncated = ", truncated" if sample["truncated"] else ""
    return f"→ {reward}{sample['tokens']} tokens{truncated}"

# ---------- chat --------------------------------------------------------------------------------------------

class Speaker:
    """A model in a chat, with its own dialogue. Its answers are printed token by token as they are
    sampled."""

    def __init__(self, name: str, config: Config):
        from transformers import TextStreamer
        self.name = name
        self.sampler = load(config, rewarded=False)
        self.dialogue: list[dict] = []  # messages
        self.answer_text = ""  # the current answer so far
        self.streamer = TextStreamer(self.sampler.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.streamer.on_finalized_text = self.on_text
        policy = self.sampler.policy  # humanline.sample calls its `generate`
        policy.generate = functools.partial(policy.generate, streamer=self.streamer)

    def on_text(self, text: str, stream_end: bool = False) -> None:
        self.answer_text += text
        print(printable(text), end="", flush=True)

    def answer(self, message: str, seed: int) -> None:
        """Answer a message. The prompt is the dialogue so far, formatted as in training. Ctrl-C stops the
        answer."""
        sampler = self.sampler
        dialogue = [*self.dialogue, dict(role="user", content=message)]
        prompt = humanline.read_row(dict(prompt=dialogue), "chat", sampler.config).prompt
        with humanline.explained(
            f"--model {self.name}: the chat template rejected the dialogue", "try it without --system"
        ):
            [[ids]] = humanline.encode_dialogues(sampler.tokenizer, [Row("chat", prompt, {})])
        print(f"\n{self.name}> ", end="", flush=True)
        room = sampler.max_positions - len(ids)
        if room < 1:
            self.dialogue = []
            print(
                f"[the dialogue exceeds the model's {sampler.max_positions} positions: starting a new one; "
                "repeat the message, or shorten it]"
            )
            return
        config = with_room(sampler.config, min(sampler.config.max_new_tokens, room))
        self.answer_text = ""
        try:
            ((completion, _),) = humanline.sample(
                sampler.policy, [ids], sampler.stop_ids, config, seed
            )
            is_complete = completion[-1] in sampler.stop_ids
            print("" if is_complete else f" [truncated after {len(completion)} tokens]")
        except KeyboardInterrupt:
            self.streamer.end()
            print(" [stopped]")
        if sampler.tokenizer.chat_template:
            self.dialogue = [*dialogue, dict(role="assistant", content=self.answer_text)]

def chat(flags: Chat) -> None:
    """Read messages and let each model answer, until /quit or the end of input."""
    speakers = [Speaker(name, config) for name, config in zip(flags.model, configs_for(flags))]
    sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it enables arrow keys and history
    print("/reset starts a new dialogue, /quit exits, Ctrl-C stops an answer.")
    for speaker in speakers:
        if not speaker.sampler.tokenizer.chat_template:
            print(
                f"{speaker.name} has no chat template: it continues each message on its own and remembers "
                "none of them."
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
            print("[new dialogue]")
            for speaker in speakers:
                speaker.dialogue = []
        elif message:
            for speaker in speakers:
                speaker.answer(message, humanline.seed_for(flags.seed, "chat", turn))

# ---------- winrate -----------------------------------------------------------------------------------------

def load_judge(spec: str, config: Config) -> Callable[..., list[float]]:
    """Load the function that --judge FILE.py:function names into a separate process, with the time limit of
    rewards."""
    file, _, name = spec.rpartition(":")
    require(
        Path(file).is_file() and file.endswith(".py"),
        f"--judge {spec}: no such file; write FILE.py:function",
    )
    with humanline.explained(
        f"--judge {spec}", "write FILE.py:function, with a function(prompts, first, second, rows)"
    ):
        return humanline.FunctionProcess(file, name, config.reward_seconds)

def batched(*samples: list) -> Iterator[list[list]]:
    """The samples in calls of at most 64, since --reward-seconds limits the time of each call."""
    for start in range(0, len(samples[0]), 64):
        yield [part[start : start + 64] for part in samples]

def judge_both_orders(
    judge: Callable[..., list[float]],
    spec: str,
    prompts: list,
    first: list[str],
    second: list[str],
    fields: list[dict],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (N,) probabilities that the first text is better, and (N,) by how much the judge prefers
    whichever text it reads first."""
    by_order = []
    expected = f"it must return {len(prompts)} probabilities, one per pair"
    for texts in ((first, second), (second, first)):
        with humanline.explained(
            f"--judge {spec}", expected, longer="increase the time limit with --reward-seconds"
        ):
            calls = batched(prompts, *texts, fields)
            values = np.array([float(value) for pairs in calls for value in judge(*pairs)])
        is_valid = values.shape == (len(prompts),) and ((values >= 0) & (values <= 1)).all()
        require(is_valid, f"--judge {spec}: {expected}")
        by_order.append(values)
    return (by_order[0] + 1 - by_order[1]) / 2, by_order[0] + by_order[1] - 1

def compare_rewards(
    reward: Reward, prompts: list, first: list[str], second: list[str], fields: list[dict]
) -> np.ndarray:
    """(N,) preferences: 1 if the first text has the higher reward, 0.5 if the rewards are equal, else 0."""
    attempted = []
    for sample in batched(prompts * 2, first + second, fields * 2):
        attempted += reward.attempt(*sample)
    rewards = reward.settle(attempted)  # of both sides, so that failures count alike
    return (1 + np.sign(np.subtract(*np.split(np.array(rewards), 2)))) / 2

def winrate(flags: Winrate) -> None:
    """Sample from both sides, compare the completions pair by pair, and print the win rates."""
    against_model = flags.against != "data"
    run = run_folder(flags.model, "--model") or (
        run_folder(flags.against, "--against") if against_model else None
    )
    config = config_for(flags.model, flags, fallback_run=run)
    other_config = config_for(flags.against, flags, "--against", run) if against_model else None
    data = data_to_evaluate(flags, config)
    out = new_file(flags.out, (".jsonl",), "winrate.jsonl")
    rows = read_rows(data, config, "--data")
    desirable = [i for i, row in enumerate(rows) if not row.labelled or row.rewards == [1]]
    require(
        against_model or (desirable and all(row.completions for row in rows)),
        f"--against data: {data} has rows without completions, or no desirable completion; compare with a "
        "model instead: --against MODEL",
    )
    judge = load_judge(flags.judge, config) if flags.judge else None
    sampler = load(config, rewarded=judge is None)
    reward = sampler.reward
    sampler.check_columns(rows)
    humanline.find_special_tokens(rows, sampler, "--data")  # removes stop tokens at the end of answers
    sampler.reward = None  # both sides are rewarded together, below

    def completions_by_row(sampler: Sampler, stream: int) -> dict[int, list[str]]:
        rows = read_rows(data, sampler.config, "--data")  # in the sampler's own prompt format
        drawn = draw(sampler, encode_rows(rows, sampler, online=True), rows, flags.samples, stream)
        return {group.row: sampler.texts(group.completions) for group in drawn}

    model_texts = completions_by_row(sampler, 0)
    unload(sampler)
    if against_model:  # another stream, so that comparing a model with itself is a meaningful check
        other = load(other_config, rewarded=False)
        other_texts = completions_by_row(other, 1)
        unload(other)
    else:
        other_texts = {
            i: [rows[i].completions[int(np.argmax(rows[i].rewards))]] * flags.samples for i in desirable
        }
    common = sorted(set(model_texts) & set(other_texts))
    pair_rows = [rows[row] for row in common for _ in model_texts[row]]
    first = [text for row in common for text in model_texts[row]]
    second = [text for row in common for text in other_texts[row]]
    prompts = [row.prompt for row in pair_rows]
    fields = [row.fields for row in pair_rows]
    pairs = [
        dict(where=row.where, prompt=row.prompt, output=output, against=against)
        for row, output, against in zip(pair_rows, first, second)
    ]
    write(out, json_lines(pairs))  # now, in case that the judge fails
    if judge is None:
        preference = compare_rewards(reward, prompts, first, second, fields)
    else:
        preference, position_bias = judge_both_orders(judge, flags.judge, prompts, first, second, fields)
    judged = (pair | dict(preference=value) for pair, value in zip(pairs, preference.tolist()))
    write(out, json_lines(judged))

    shape = len(common), flags.samples
    lengths = np.array([list(map(len, pair)) for pair in zip(first, second)], dtype=float)
    delta = (lengths[:, 0] - lengths[:, 1]).reshape(shape)
    preference = preference.reshape(shape)

    def fit(index: np.ndarray) -> np.ndarray:
        return length_controlled(
            preference[index].reshape(len(index), -1), delta[index].reshape(len(index), -1)
        )

    parts = np.array_split(list(resamples(shape[0], 1000)), 40)  # a fit takes much memory
    resampled = np.concatenate([fit(part) for part in parts])
    controlled = float(fit(np.arange(shape[0])[None])[0]), *np.quantile(resampled, [0.025, 0.975])
    wins = np.mean(preference > 0.5)
    losses = np.mean(preference < 0.5)
    cannot_fit = np.ptp(preference) == 0 or abs(preference.mean() - 0.5) >= 0.48
    results = [
        [
            "win rate",
            rate(preference.mean(1)),
            f"wins {wins:.3f}, ties {1 - wins - losses:.3f}, losses {losses:.3f}",
        ],
        [
            "length-controlled",
            "–" if cannot_fit else format_interval(controlled),
            "not estimated: all pairs tie, or one side nearly always wins" if cannot_fit else "",
        ],
        [
            "length difference, characters",
            format_interval(interval(delta.mean(1)), 2, "+"),
            "{:.1f} against {:.1f}".format(*lengths.mean(0)),
        ],
    ]
    if judge is not None:
        bias = interval(position_bias.reshape(shape).mean(1), -1, 1)
        results.append(
            ["position bias of the judge", format_interval(bias, sign="+"), "1: the first text always wins"]
        )
    print(
        f"{flags.model} against {flags.against} on {data}: {shape[0]} prompts x {shape[1]}, judged by "
        f"{flags.judge or config.reward}; [95% bootstrap intervals over prompts]\n\n{table(results)}\n\n"
        f"pairs: {out}"
    )

# ---------- data --------------------------------------------------------------------------------------------

# In nats/token: the range of the worst quartile of the paper's data, on which offline training fell behind.
PAPER_WORST_QUARTILE = (-1.03, -0.36)

class Source:
    """A source of offline data, described by how likely it is under the starting model."""

    def __init__(self, name: str, groups: list[Group], logps: PerToken, own_logps: PerToken):
        """logps: token log-probs per prompt and completion; own_logps: the same for the model's own
        samples."""
        self.name = name
        self.groups = groups
        self.means = [np.array([tokens.mean() for tokens in group]) for group in logps]  # nats/token
        self.all_means = np.concatenate(self.means)
        self.estimate = interval([group.mean() for group in self.means])
        self.own_means = [group[0].mean() for group in own_logps]
        # Three quarters of the model's own samples are more likely than this.
        self.threshold = float(np.quantile(self.own_means, 0.25)) if own_logps else PAPER_WORST_QUARTILE[1]
        self.reward_gaps = []  # best minus worst reward, per group
        for group in groups:
            if len(group.rewards) > 1 and not group.labelled:
                self.reward_gaps.append(np.ptp(group.rewards))

    def fraction_between(self, low: float, high: float) -> str:
        """The fraction of completions with a mean log-prob in [low, high), with its interval."""
        return rate([((means >= low) & (means < high)).mean() for means in self.means])

    def describe(self) -> dict[str, str]:
        """This source's column of the table, by row name."""
        lengths = np.array([len(ids) for group in self.groups for ids in group.completions])
        distinct = {(*group.prompt, -1, *ids) for group in self.groups for ids in group.completions}
        duplicates = len(lengths) - len(distinct)
        quartiles = np.quantile(self.all_means, [0.25, 0.5, 0.75])
        low, high = PAPER_WORST_QUARTILE
        column = {
            "prompts": f"{len(self.groups):,}",
            "completions": f"{len(lengths):,}",
            "  median length (maximum), tokens": f"{np.median(lengths):.0f} ({lengths.max()})",
            "  duplicates": f"{duplicates:,} ({duplicates / len(lengths):.1%})",
            "mean log-prob, nats/token": format_interval(self.estimate),
            "  quartiles": "  ".join(f"{value:.2f}" for value in quartiles),
            f"  in the paper's worst quartile, {low} to {high}": self.fraction_between(low, high),
            f"  below {low}": self.fraction_between(-math.inf, low),
        }
        if self.own_means:
            column["  of the model's own samples"] = format_interval(interval(self.own_means))
            column["  less likely than 3/4 of its samples"] = self.fraction_between(-math.inf, self.threshold)
        if self.reward_gaps:
            column["best minus worst reward"] = format_interval(interval(self.reward_gaps))
            column["  groups without a difference"] = rate(np.equal(self.reward_gaps, 0))
        return column

    def advice(self) -> str:
        """One sentence of advice. In the paper, humanline makes offline data as good as online data unless it
        is too unlikely."""
        than = "3/4 of the model's own samples" if self.own_means else f"{PAPER_WORST_QUARTILE[1]} nats/token"
        unlikely = (self.all_means < self.threshold).mean()
        without_difference = np.equal(self.reward_gaps, 0).mean() if self.reward_gaps else 0.0
        if without_difference > 0.8:
            return (
                f"little to learn: in {without_difference:.0%} of the groups all completions have the same "
                "reward; choose other prompts."
            )
        if unlikely > 0.75:
            return (
                f"not good enough: {unlikely:.0%} of the completions are less likely than {than}; sample "
                "completions from the model itself (--sample-every 64), or finetune on the best ones first."
            )
        if unlikely > 0.4:
            return (
                f"doubtful: {unlikely:.0%} of the completions are less likely than {than}; compare with "
                "--sample-every 64."
            )
        return (
            f"likely enough, by the paper, for offline training: only {unlikely:.0%} of the completions are "
            f"less likely than {than}."
        )

def data_quality(flags: DataQuality) -> None:
    """Compute how likely the data are under the starting model, count other defects, and give advice."""
    config = config_for(flags.model, flags)
    out = new_file(flags.out, (".png", ".svg"), "data.png")
    rows_by_source = {name: read_rows(name, config, "--data") for name in flags.data}
    for name, rows in rows_by_source.items():
        require(
            any(row.completions for row in rows),
            f"--data {name}: these rows are prompts without completions; pass offline data",
        )
    model = load(config, rewarded=False)

    described = []
    for stream, (name, rows) in enumerate(rows_by_source.items()):
        groups = encode_rows(rows, model, online=False)
        require(
            any(group.labelled or len(set(group.rewards)) > 1 for group in groups),
            f"--data {name}: no row has both a better and a worse completion",
        )
        logps = token_logps(model, groups)
        longest = max(len(ids) for group in groups for ids in group.completions)
        room = min(config.max_new_tokens, longest)
        model.config = with_room(model.config, room)
        prompts = [group for group in groups if len(group.prompt) + room <= model.max_positions][: flags.own]
        own_logps = token_logps(model, draw(model, prompts, rows, 1, stream)) if prompts else []
        source = Source(name, groups, logps, own_logps)
        dropped = sum(len(row.completions) for row in rows) - len(source.all_means)
        described.append((source, source.describe() | {"dropped": f"{dropped:,}"}))
    described.sort(key=lambda pair: -pair[0].estimate[0])
    sources, columns = zip(*described)
    results = [["", *(source.name for source in sources)]]
    for key in dict.fromkeys(key for column in columns for key in column):
        results.append([key, *(column.get(key, "") for column in columns)])
    print(
        f"log-probs under the starting model {flags.model}; [95% bootstrap intervals over prompts]\n\n"
        f"{table(results)}\n"
    )
    for source in sources[1:]:  # independent means: the half-widths of their intervals add in quadrature
        a, a_low, a_high = source.estimate
        b, b_low, b_high = sources[0].estimate
        gap = a - b
        low = gap - math.hypot(a - a_low, b_high - b)
        high = gap + math.hypot(a_high - a, b - b_low)
        gap = format_interval((gap, low, high), sign="+")
        print(f"{source.name}: {gap} nats/token relative to {sources[0].name}, the most likely source")
    for source in sources:
        print(f"{source.name}: {source.advice()}")
    picture_data(sources, flags.model, out)

def picture_data(sources: Iterable[Source], model: str, path: Path) -> None:
    """Draw histograms of the mean token log-probs of each source."""
    figure, (axes,) = new_figure(3.6, 1, 1)
    all_means = np.concatenate([source.all_means for source in sources])
    high = max(-7, min(0, all_means.max()))  # above the first edge even if all data are below -8
    edges = np.linspace(max(np.quantile(all_means, 0.005), -8), high, 41)
    low, high = np.clip(PAPER_WORST_QUARTILE, edges[0], edges[-1])
    axes.axvspan(low, high, color="#E4E4E4", zorder=0, label="worst quartile in the paper")
    histograms = [
        (source.name, source.all_means, OKABE_ITO[i % 7], DASHES[i // 7 % 4])
        for i, source in enumerate(sources)
    ]
    own_means = [mean for source in sources for mean in source.own_means]
    if own_means:
        histograms.append(("the model's own samples", own_means, GREY, ":"))
    for name, means, colour, dash in histograms:
        percentages = 100 * np.histogram(np.clip(means, edges[0], edges[-1]), edges)[0] / len(means)
        axes.stairs(percentages, edges, color=colour, linestyle=dash, linewidth=2, label=name)
    axes.set(
        xlim=(edges[0], edges[-1]),
        ylabel="completions per bin, %",
        xlabel=f"mean token log-prob under {model}, nats (the first bin includes all lower values)",
    )
    save(figure, path, legend_of(axes))

# ---------- perception --------------------------------------------------------------------------------------

GAMMAS = (0.61, 0.69)  # for gains and for losses (Tversky and Kahneman 1992)
BINS = 20  # bins of equal probability under the policy
POLICY_SAMPLES = "the policy's own samples"

def perception(flags: Perception) -> None:
    """Compare the outcomes of the data, before and after humanline, with the policy's outcomes as humans
    perceive them."""
    run = run_folder(flags.model, "--model")
    config = config_for(flags.model, flags)
    require(
        run or (flags.ref and flags.data),
        f"--ref and --data: pass both, since {flags.model} is not a run: the model that it was trained from, "
        "and offline completions",
    )
    trained = humanline.parse_config(run_flags(run)) if run else config
    ref_name = flags.ref or trained.model
    ref_config = config_for(ref_name, flags, "--ref", run)
    data = flags.data or trained.data[0]
    if not flags.data:  # only rows that the run read
        config.limit = min(filter(None, (flags.limit, trained.limit)), default=None)
    out = new_file(flags.out, (".png", ".svg"), "perception.png")
    rows = read_rows(data, config, "--data")
    require(
        all(row.completions for row in rows),
        f"--data {data}: some rows have no completions, and so no outcomes; pass offline data",
    )
    policy = load(config, rewarded=False)
    ref = load(ref_config, rewarded=False)
    require(
        policy.tokenizer.get_vocab() == ref.tokenizer.get_vocab(),
        f"--ref {ref_name}: its vocabulary differs from that of {flags.model}, so there is no log-ratio "
        "between them; pass a model with the same tokenizer",
    )
    leave_room = {group.row for group in encode_rows(rows, policy, online=True)}
    groups = [group for group in encode_rows(rows, policy, online=False) if group.row in leave_room]
    sampled_groups = draw(policy, groups, rows, flags.samples, 0)

    def log_ratios(groups: list[Group]) -> PerToken:
        by_group = zip(token_logps(policy, groups), token_logps(ref, groups))
        return [[a - b for a, b in zip(policy_logps, ref_logps)] for policy_logps, ref_logps in by_group]

    policy_d = log_ratios(sampled_groups)
    data_d = log_ratios(groups)
    largest = max(abs(d).max() for group in policy_d + data_d for d in group)
    require(
        largest >= 1e-5,
        f"--ref {ref_name}: it is the same model as {flags.model}, so every log-ratio is 0; pass another one",
    )

    policy_outcomes = [np.array([d.sum() for d in group]) for group in policy_d]
    data_outcomes = [np.array([d.sum() for d in group]) for group in data_d]
    weights = {"the data": [np.ones(len(group)) for group in data_d]} | fractions_passed(data_d, config)
    levels = np.linspace(0, 1, BINS + 1)[1:-1]
    edges = np.unique(np.quantile(np.concatenate(policy_outcomes), levels))

    def count(outcomes: np.ndarray, weight: np.ndarray) -> np.ndarray:  # sum of weights per bin
        return np.bincount(np.searchsorted(edges, outcomes), weights=weight, minlength=len(edges) + 1)

    policy_counts = np.stack([count(z, np.ones(len(z))) for z in policy_outcomes])  # (prompts, bins)
    counts_by_name = {POLICY_SAMPLES: policy_counts}
    for name, weight in weights.items():
        counts_by_name[name] = np.stack([count(*pair) for pair in zip(data_outcomes, weight)])
    weights = {name: np.concatenate(weight) for name, weight in weights.items()}
    results = [["", "tokens passed", *(f"KL, γ = {gamma}" for gamma in GAMMAS)]]
    labels = {}
    for name, counts in counts_by_name.items():
        divergences = [divergence(policy_counts, counts, gamma) for gamma in GAMMAS]
        passed = f"{weights[name].mean():.1%}" if name in weights else ""
        results.append([name, passed, *map(format_interval, divergences)])
        labels[name] = f"{name}, KL {divergences[0][0]:.2f}"
    print(
        f"outcomes z = log π/π_ref in nats, {flags.model} over {ref_name}; {len(groups):,} prompts, "
        f"{flags.samples} policy samples each, and {data}; [95% bootstrap intervals over prompts]\n\n"
        f"{table(results)}\n\n"
        "KL, in nats, is the divergence of Proposition 3.4: the utility of the data differs from the "
        "perceived utility of the policy by at most sup|v| sqrt(2 KL)."
    )
    picture_perception(
        np.concatenate(policy_outcomes), np.concatenate(data_outcomes), weights, labels, out
    )

def fractions_passed(d: PerToken, config: Config) -> dict[str, list[np.ndarray]]:
    """The fraction of each completion's tokens whose gradient passes humanline clipping and humanline
    sampling.

    Clipping passes d in [log ε_P, log ε_R]. Sampling rejects tokens by Definition 4.2, with M_P and M_R
    computed over batches of --batch-size prompts.

    Args:
        d: token log-ratios in nats, per prompt and completion.
    Returns:
        For each of the two methods, a (completions,) array of fractions per prompt.
    """
    clipped = []
    for group in d:
        passed = [(tokens >= config.log_eps_p) & (tokens <= config.log_eps_r) for tokens in group]
        clipped.append(np.array([tokens.mean() for tokens in passed]))
    sampled = []
    generator = torch.Generator().manual_seed(config.seed)
    for start in range(0, len(d), config.batch_size):
        batch = d[start : start + config.batch_size]
        completions = [tokens for group in batch for tokens in group]
        flat = torch.from_numpy(np.concatenate(completions))[None]
        verdicts = humanline.humanline_verdicts(flat, torch.ones_like(flat), generator=generator)[0].numpy()
        kept = iter(np.split(verdicts == 0, np.cumsum([len(tokens) for tokens in completions])[:-1]))
        sampled += [np.array([next(kept).mean() for _ in group]) for group in batch]
    return {"after humanline clipping": clipped, "after humanline sampling": sampled}

def divergence(policy: np.ndarray, data: np.ndarray, gamma: float) -> tuple[float, float, float]:
    """perceived_divergence with its 95% interval over prompts, from (P, B) counts.

    Both are 2 KL minus the resampled KL, its mean and its quantiles, because resampling biases the KL upward
    just as sampling did.
    """
    raw = float(perceived_divergence(policy.sum(0), data.sum(0), gamma))
    resampled = [
        perceived_divergence(policy[index].sum(0), data[index].sum(0), gamma)
        for index in resamples(len(policy), 500)
    ]
    low, high = np.quantile(resampled, [0.025, 0.975])
    estimate, low, high = (max(0.0, 2 * raw - value) for value in (np.mean(resampled), high, low))
    return float(estimate), float(low), float(high)

def picture_perception(
    policy: np.ndarray,
    data: np.ndarray,
    weights: dict[str, np.ndarray],
    labels: dict[str, str],
    path: Path,
) -> None:
    """Draw Figure 2: cumulative probability under the data against cumulative probability under the
    policy."""
    figure, (axes,) = new_figure(4.6, 1, 1)
    a = np.linspace(0, 1, 201)
    for gamma, dash in zip(GAMMAS, DASHES):
        label = f"as perceived, γ = {gamma}"
        axes.plot(a, capacity(a, gamma), color="#000000", linestyle=dash, linewidth=1.4, label=label)
    axes.plot(a, a, color=GREY, linestyle=":", linewidth=2, label=labels[POLICY_SAMPLES])
    order = np.argsort(data)
    quantiles = np.quantile(policy, a)
    for (name, weight), colour, dash in zip(weights.items(), OKABE_ITO, DASHES):
        below = np.concatenate([[0], np.cumsum(weight[order])]) / max(weight.sum(), 1e-12)
        at_quantiles = below[np.searchsorted(data[order], quantiles, side="right")]
        axes.plot(a, at_quantiles, color=colour, linestyle=dash, linewidth=2, label=labels[name])
    axes.set(
        xlabel="cumulative probability under the policy",
        ylabel="cumulative probability, data or as perceived",
    )
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    save(figure, path, legend_of(axes))

# ---------- plot --------------------------------------------------------------------------------------------

RunMetrics = dict[int, dict]  # the metrics of one run, by step

def plot(flags: Plot) -> None:
    """Read the metrics of each run, group runs that differ only in the seed, and draw the curves."""
    out = new_file(flags.out, (".png", ".svg"), "curves.png")
    require(flags.runs, "plot: pass one or more run folders")
    by_settings = defaultdict(dict)  # by label and settings: the metrics of each run, by folder
    seeds = {}
    for spec in flags.runs:
        label, _, folder = spec.rpartition("=") if not Path(spec).exists() else ("", "", spec)
        require(
            Path(folder, "metrics.jsonl").exists(),
            f"plot {folder}: no such run; pass a folder that contains metrics.jsonl",
        )
        settings = tomllib.loads(Path(folder, "config.toml").read_text(encoding="utf-8"))
        seeds[folder] = settings.pop("seed", 0)
        by_settings[label, repr(settings)][folder] = read_metrics(Path(folder))
    groups = {}
    for (label, _), runs in by_settings.items():
        names = [Path(folder).name for folder in runs]
        label = label or os.path.commonprefix(names).rstrip("-_.") or names[0]
        if len(names) > 1:
            distinct = len({seeds[folder] for folder in runs})
            label += f" ({distinct} seeds)" if distinct == len(names) else f" ({len(names)} runs)"
        if label in groups:
            label += f", {next(iter(runs))}"
        groups[label] = list(runs.values())
    logged = {key for runs in groups.values() for run in runs for line in run.values() for key in line}
    for flag, names in (("--metrics", flags.metrics or ()), ("--against", {flags.against} - {"steps"})):
        for name in names:
            require(
                name in logged,
                f"{flag} {name}: no run has logged this metric; choose from {', '.join(sorted(logged))}",
            )
    lines = (line for runs in groups.values() for run in runs for line in run.values())
    hidden = () if any(line.get("sample_seconds") for line in lines) else OF_SAMPLES
    panels = flags.metrics or [name for name in PANELS if name in logged and name not in hidden]
    picture_curves(groups, panels, flags.against, out)

def read_metrics(path: Path) -> RunMetrics:
    """Read a run's metrics, by step, and add running totals: `seconds`, `sampling` seconds, and tokens/s
    (`speed`)."""
    lines = {line["step"]: line for line in humanline.read_lines(path / "metrics.jsonl")}
    require(lines, f"plot {path}: metrics.jsonl is empty; wait for the first step")
    seconds = sampling = tokens = 0.0
    for line in lines.values():
        seconds += line.get("step_seconds", 0)
        sampling += line.get("sample_seconds", 0)
        tokens += line.get("tokens", 0)
        line |= dict(seconds=seconds, sampling=sampling, speed=tokens / max(seconds, 1e-9))
    first = lines[min(lines)]
    before = {name: first[f"{name}_before"] for name in MEASURED if f"{name}_before" in first}
    return {0: dict(seconds=0.0, **before), **lines} if before else lines

def picture_curves(
    groups: dict[str, list[RunMetrics]], panels: Iterable[str], against: str, path: Path
) -> None:
    """Draw one panel per metric, and in it one line per group of runs: their mean, with a band over their
    range. Against another metric, the line connects consecutive steps and ends in a dot."""
    columns = min(2, len(panels))
    height = math.ceil(len(panels) / columns)
    figure, axes = new_figure(0.3 + 2.3 * height + 0.13 * len(groups), height, columns)
    by_time = against in ("steps", "seconds")
    titles = {name: PANELS.get(name, name) for name in (*panels, against)}
    titles |= dict(steps="optimizer steps", seconds="wall-clock time, seconds")
    legend = {}

    def values(name: str, runs: list[RunMetrics], steps: list[int]) -> np.ndarray:  # (runs, steps)
        if name == "steps":
            return np.array([steps], dtype=float)
        raw = np.array([[run[step][name] for step in steps] for run in runs], dtype=float)
        if name in NOT_SMOOTHED or not steps:
            return raw
        width = max(1, round(len(steps) / 25))  # noisy metrics are smoothed by a running median of this width
        padded = np.pad(raw, ((0, 0), (width // 2, width - 1 - width // 2)), mode="edge")
        return np.median(np.lib.stride_tricks.sliding_window_view(padded, width, axis=1), axis=2)

    def draw_line(axis: Any, name: str, i: int, runs: list[RunMetrics]) -> Any:
        needed = {name, against} - {"steps"}
        logged_steps = [{step for step in run if needed <= run[step].keys()} for run in runs]
        steps = sorted(set.intersection(*logged_steps))
        x = values(against, runs, steps).mean(0)
        y = values(name, runs, steps)
        style = dict(color=OKABE_ITO[i % 7], linestyle=DASHES[i // 7 % 4], linewidth=1.8, markersize=4)
        if name in MEASURED:
            style["marker"] = "o"
        if not by_time:
            style |= dict(marker="o", markevery=slice(-1, None))
        if len(runs) > 1 and by_time:
            axis.fill_between(x, y.min(0), y.max(0), color=style["color"], alpha=0.2, linewidth=0)
        return axis.plot(x, y.mean(0), **style)[0]

    for name, axis in zip(panels, axes):
        for i, (label, runs) in enumerate(groups.items()):
            legend[label] = draw_line(axis, name, i, runs)
        axis.set_title(titles[name], loc="left")
        axis.set_xlabel(titles[against])
        if name == "kl":  # it is 0 after a sync and occasionally very large
            axis.set_yscale("symlog", linthresh=0.01)
    for unused in axes[len(panels) :]:
        unused.set_axis_off()
    save(figure, path, legend)
    if by_time and any(len(runs) > 1 for runs in groups.values()):
        print("bands show the range over the runs of a line")

# ---------- The command line --------------------------------------------------------------------------------

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
    """Run a command; returns the exit status."""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        words = sys.argv[1:] if argv is None else argv
        flags = humanline.parse_flags(words, kind=Command)
        check_flags(flags, words)
        COMMANDS[type(flags)](flags)
    except UserError as error:
        print(f"eval.py: error: {error}", file=sys.stderr)
        return 2
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        text = (str(error) or "out of memory").splitlines()[0]
        advice = "" if isinstance(error, OSError) else "; try --dtype bfloat16"
        print(f"eval.py: stopped: {text:.200}{advice}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("eval.py: stopped", file=sys.stderr)
        return 130  # the shell's exit status for SIGINT
    finally:
        remove_empty_files()
    return 0

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Python's default again
    sys.stdout = sys.stdout or open(os.devnull, "w")  # closed
    sys.stdout.reconfigure(errors="replace")
    sys.exit(main())
