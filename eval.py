"""Know what you got: the questions after a run of humanline.py, a command for each, each answer with its uncertainty.

  python eval.py accuracy --model runs/mine embedded           # pass@1, pass@k, greedy; models side by side; by level
  python eval.py show --model embedded runs/mine               # what they say to the same prompts, side by side
  python eval.py chat --model runs/mine                        # talk to it
  python eval.py winrate --model runs/mine --against embedded  # whose answers are better; raw and length-controlled
  python eval.py data --data embedded embedded:worse           # is this offline data good enough for that model?
  python eval.py perception --model runs/mine                  # the paper's Figure 2 for your model and your data
  python eval.py plot runs/mine runs/other                     # learning curves: --metrics kl reward, --against kl
  python eval.py reproduce                                     # the README's tables, from training on
  python eval.py reproduce --real SMOLLM2                      # the same questions, asked of a real language model

A MODEL is a run's folder (its final model, with the prompt format and the reward of its config.toml), a Hugging Face
name or folder, or `embedded`. Beside a run, a model that is none is asked as the run is. Loading, sampling, rewards and
log-probs are the training code's, from humanline.py.

Every interval covers 95 %. What is resampled is problems, never single samples: the samples of one problem are alike.
Those of `reproduce` are over seeds.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shlex
import shutil
import sys
import tempfile
import time
import unicodedata
import weakref
from collections import defaultdict
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Callable, Iterable, Iterator, Literal

import numpy as np
import torch
import tyro
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

import humanline
from humanline import Config, Group, Recipe, Row, Sampler, UserError

# ----------------------------------------------------------------------------------------------------------------------
# Arguments
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Settings:
    """What every command that loads a model takes."""

    config: str | None = None
    """A .toml file of humanline.py's settings, for those that are no flag here. Default: the run's own config.toml."""
    system: str | None = None
    """System message in front of prompts that have none. Default: the run's."""
    prompt_template: str | None = None
    """Text around each prompt, with {prompt} where it belongs. Default: the run's."""
    max_new_tokens: int | None = None
    """Longest completion drawn. Default: the run's, or as for training."""
    dtype: Literal["auto", "mixed", "float32", "bfloat16"] | None = None
    """As for training."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Nucleus sampling: keep the most likely tokens that together have this probability."""
    seed: int = 0
    """The draws are a function of this."""


@dataclass
class RowSettings(Settings):
    """What every command that loads a model and reads rows takes."""

    limit: int | None = None
    """Read only this many rows of each source. Default: the run's."""
    max_prompt_length: int | None = None
    """Longest prompt, in tokens; rows with longer ones are dropped."""
    reward: tuple[str, ...] | None = None
    """What scores a completion: exact, math, model:NAME or FILE.py:function, one or more, each with =WEIGHT if it has
    one. Default: the run's, or exact."""
    reward_seconds: float | None = None
    """Time limit of `math`, or of a reward or a judge of your own: per sample, √n times as much for a call with n."""


@dataclass
class Accuracy(RowSettings):
    """pass@1 and pass@k on held-out problems, one model or several side by side."""

    model: tuple[str, ...] = ("embedded",)
    """Models; the others are compared with the first, problem by problem."""
    data: str | None = None
    """Rows with answers: NAME[:[CONFIG:]SPLIT]. Default: the run's --eval-data."""
    samples: int = 8
    """Completions drawn per problem."""
    k: tuple[int, ...] | None = None
    """The k of pass@k. Default: 1 and --samples."""
    greedy: bool = True
    """Draw the most likely answer of each problem, too."""
    out: str | None = None
    """Where every sample goes, as JSON lines. Default: evals/accuracy.jsonl, with a number if that exists."""


@dataclass
class Show(RowSettings):
    """Prompts with the completions of one model, or of several side by side; rewards and lengths beneath."""

    model: tuple[str, ...] = ("embedded",)
    """Models, a column each: what training started from and the run, say."""
    data: str | None = None
    """Rows: NAME[:[CONFIG:]SPLIT]. Default: the run's --eval-data."""
    prompts: int = 5
    """Show only so many prompts, the first ones."""
    samples: int = 1
    """Completions drawn per prompt."""
    greedy: bool = False
    """Show the most likely completion, in the place of --samples."""


@dataclass
class Chat(Settings):
    """Talk to a model in the terminal, or to several, which answer one after another."""

    model: tuple[str, ...] = ("embedded",)
    """Models. Each keeps a dialogue of its own."""


@dataclass
class Winrate(RowSettings):
    """How often one model's completions beat another's, or the data's own. The higher --reward wins."""

    model: str = "embedded"
    """The model."""
    against: str = "data"
    """The other model, or `data`: the best completion of each row."""
    data: str | None = None
    """Prompts: NAME[:[CONFIG:]SPLIT]. Default: the run's --eval-data."""
    judge: str | None = None
    """FILE.py:function, in the place of --reward: your own function(prompts, first, second, rows) -> list of
    probabilities that the first is better. It is asked in both orders, in a process of its own."""
    samples: int = 1
    """Pairs per prompt."""
    out: str | None = None
    """Where every pair goes, as JSON lines. Default: evals/winrate.jsonl, with a number if that exists."""
    alpaca_eval: str | None = None
    """Also write the model's outputs to this .json as `alpaca_eval evaluate --model_outputs` reads them, and the other
    side's beside it, for --reference_outputs."""


@dataclass
class DataQuality(RowSettings):
    """Is this offline data good enough? How likely the model finds it, and what else could be wrong with it."""

    data: tuple[str, ...] = ("embedded",)
    """Sources: NAME[:[CONFIG:]SPLIT]; several are ranked."""
    model: str = "embedded"
    """The model that training would start from."""
    policy: str | None = None
    """A model after some training, to see how far its log-ratio with --model goes on the data."""
    own: int = 500
    """Draw the model's own completion of this many prompts of each source, as a yardstick; 0 is none."""
    out: str | None = None
    """Picture, .png or .svg. Default: evals/data.png, with a number if that exists."""


@dataclass
class Perception(RowSettings):
    """The paper's Figure 2: outcomes of the policy and of the data, with and without humanline, as people see them."""

    model: str = "embedded"
    """The policy."""
    ref: str | None = None
    """The reference model. Default: the one that the run started from."""
    data: str | None = None
    """Offline completions: NAME[:[CONFIG:]SPLIT]. Default: the run's first source."""
    samples: int = 8
    """Completions that the policy draws per prompt."""
    limit: int | None = 1000
    """Read only this many rows."""
    out: str | None = None
    """Picture, .png or .svg. Default: evals/perception.png, with a number if that exists."""


PANELS = dict(reward="reward of the batch", accuracy="pass@1, held out", unclamped="tokens let through, fraction",
              drift="drift, mean |d|, nats/token", kl="KL to the reference, nats/token", grad_norm="gradient norm",
              speed="tokens/s, so far", time="time spent, {unit} (dotted: sampling)")


Experiment = Literal["gap", "sparse", "long", "column", "syncing", "ablation", "betas", "quality", "stale", "tuning"]


@dataclass
class Reproduce:
    """The paper's claims in miniature: train the embedded model in every way that they compare; tables and verdicts."""

    only: tuple[Experiment, ...] | None = None
    """Which experiments. Default: all but the tuning, whose results stand in eval.py."""
    real: str | None = None
    """Instead of those, the claims on a real language model: this one, a folder or a name on the hub. It was made for
    SmolLM2-135M-Instruct."""
    losses: tuple[Literal["grpo", "dpo", "kto"], ...] = ("grpo", "dpo", "kto")
    """With --real: which losses."""
    quick: bool = False
    """The headline rows only. With --real: GRPO on one task."""
    seeds: int | None = None
    """Seeds of each run: 1, 2, …, on which nothing was tuned. Default: 5, or 2 with --quick; with --real 3, or 1."""
    jobs: int | None = None
    """Runs at a time, each on one thread. Default: as many as there are cores."""
    results: str | None = None
    """With --real, or --only stale, long or column: JSON lines, one for each run. What the file has is not trained
    again; what is trained is added to it. Default with --real: evals/real-MODEL.jsonl."""
    train: bool = True
    """Train what is missing. Otherwise the report is of what there is."""
    out: str | None = None
    """Report, .md; the figure stands beside it. Default: evals/reproduce.md, with a number if that exists."""


@dataclass
class Plot:
    """Learning curves of runs, from their metrics.jsonl. Runs that differ only in --seed become a line with a band."""

    runs: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders of runs, or LABEL=FOLDER."""
    metrics: tuple[str, ...] | None = None
    """What to draw, each in a panel of its own: columns of metrics.jsonl, such as kl reward lr, and speed and time.
    Default: the usual ones."""
    against: str = "steps"
    """The horizontal axis: steps, seconds (wall-clock time without evaluations), or a column, such as kl."""
    out: str | None = None
    """Picture, .png or .svg. Default: evals/curves.png, with a number if that exists."""


def check_flags(flags: Any) -> None:
    """Raises UserError for a number that makes no sense, and for a flag that takes values and has none."""
    for name, least in dict(samples=1, prompts=1, seeds=1, jobs=1, own=0).items():
        value = getattr(flags, name, None)
        if value is not None and not least <= value <= 10**6:
            raise UserError(f"--{name} is {value}; it must lie from {least} to 1,000,000")
    for name, value in vars(flags).items():
        if value == () and name != "runs":
            raise UserError(f"--{name} has no value; give it one or more, or leave it out")
    for name in ("temperature", "top_p") if isinstance(flags, (DataQuality, Perception)) else ():
        if getattr(flags, name) != 1:
            raise UserError(f"{humanline.flag_of(name)}: these log-probs are the model's own, as are the completions "
                            "that they are compared with; leave it out")


# ----------------------------------------------------------------------------------------------------------------------
# Estimates and their uncertainty: pure functions
# ----------------------------------------------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k samples is correct, where c of n are: 1 - C(n-c, k) / C(n, k).

    Unbiased: the mean over all subsets of size k of the n samples (Chen et al. 2021, eq. 1). In exact integers.

    >>> pass_at_k(8, 2, 1), round(pass_at_k(8, 2, 4), 4)
    (0.25, 0.7857)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k(n={n}, c={c}, k={k}) needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def resamples(count: int, repeats: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Bootstrap resamples of `count` things: index arrays of shape (some, count), `repeats` rows in all."""
    chance, chunk = np.random.default_rng(seed), max(1, 2_000_000 // count)
    for start in range(0, repeats, chunk):
        yield chance.integers(0, count, (min(chunk, repeats - start), count))


def interval(values: Iterable[float], low: float | None = None,
             high: float | None = None) -> tuple[float, float, float]:
    """The mean of a value for each problem, and its 95 % interval by bootstrap: BCa, bias-corrected and accelerated
    (Efron 1987).

    Of the usual kinds this is calibrated best (tests/test_eval.py): percentiles alone are too short where most problems
    are never solved, and a studentised bootstrap breaks down where a handful of problems differ from all others.

    Values that are all the same show no spread; the interval is then Clopper and Pearson's for as many successes as
    trials: 0 correct of 100 problems gives [0, 0.036], not [0, 0].

    Args:
        values: (P,), one per problem.
        low, high: the smallest and the largest value that there could have been; by default, that there are.
    Returns:
        mean, lower end, upper end.
    """
    values = np.asarray(values, dtype=float)
    mean, away = float(values.mean()), values - values.mean()
    if np.ptp(values) == 0:
        low, high = mean if low is None else low, mean if high is None else high
        reach = (high - low) * (1 - 0.025 ** (1 / len(values)))
        return mean, max(low, mean - reach), min(high, mean + reach)
    normal, repeats = NormalDist(), 2000
    moved = np.sort(np.concatenate([away[index].mean(1) for index in resamples(len(values), repeats)]))
    still = abs(moved) < 1e-9 * np.ptp(values)
    lower = ((moved < 0) & ~still).mean() + still.mean() / 2
    bias = normal.inv_cdf(min(max(lower, 1 / repeats), 1 - 1 / repeats))
    skew = (away**3).sum() / (6 * (away**2).sum() ** 1.5)
    levels = [normal.cdf(bias + (bias + z) / (1 - skew * (bias + z))) for z in (-1.96, 1.96)]
    return mean, *np.clip(mean + np.quantile(moved, levels), values.min(), values.max()).tolist()


def sign_flip_p(differences: Iterable[float], repeats: int = 10_000) -> float:
    """Two-sided p-value of a paired test: were each problem's sign a coin flip, how often is the mean as far from 0?

    Args:
        differences: (P,), one per problem.
    """
    differences = np.asarray(differences, dtype=float)
    chance, seen, as_far = np.random.default_rng(0), abs(differences.sum()) * (1 - 1e-12), 1
    for _ in range(100):
        flips = chance.integers(0, 2, (repeats // 100, len(differences)), dtype=np.int8) * 2 - 1
        as_far += int((abs(flips @ differences) >= seen).sum())
    return as_far / (1 + repeats)


def length_controlled(preference: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """The win rate that the judge would give if both completions were of one length.

    Fits P(win) = σ(θ + φ tanh(Δ / s)), Δ the difference in characters and s its standard deviation, and returns σ(θ).
    This is AlpacaEval 2's model (Dubois et al. 2024, section 3) without its term for the difficulty of each
    instruction, which takes the judgements on many models to estimate, and with a weak ridge (a normal prior of
    standard deviation 10 on θ and φ) in the place of its L1 penalty chosen by cross-validation, so that φ is finite
    where length decides alone.

    Args:
        preference: (..., N), 1 where the model wins, 0.5 for a tie, 0 where it loses, or a judge's probability.
        delta: (..., N), characters of the model's completion minus the other's.
    Returns:
        (...), one win rate for each fit; leading dimensions are bootstrap resamples.
    """
    spread = delta.std(-1, keepdims=True)
    x = np.tanh(delta / np.where(spread > 0, spread, 1))
    theta, phi = np.zeros(x.shape[:-1]), np.zeros(x.shape[:-1])
    for _ in range(60):  # Newton's method on the (θ, φ) log-posterior, no step longer than 1
        p = 1 / (1 + np.exp(-(theta[..., None] + phi[..., None] * x)))
        d_theta, d_phi = (preference - p).sum(-1) - 0.01 * theta, ((preference - p) * x).sum(-1) - 0.01 * phi
        a, b, c = ((p * (1 - p) * power).sum(-1) for power in (1, x, x * x))
        a, c = a + 0.01, c + 0.01
        step = np.stack([c * d_theta - b * d_phi, a * d_phi - b * d_theta]) / (a * c - b * b)
        theta, phi = np.stack([theta, phi]) + step / abs(step).max(0).clip(1)
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
    of bin b, ω_b = Ω⁺(F_b; γ) - Ω⁺(F_b-1; γ), cumulated from the lowest outcome up; Q_b is the data's share of the bin,
    with half an outcome added to each, so that an empty bin stays finite. For any value function v then
    |u(Z; ω) - u(Z; Q)| <= sup|v| sqrt(2 KL(ω || Q)): that is how far what people make of the data can be from what they
    make of the model. The bound is the paper's; bins and smoothing are this project's way to a number.

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


# ----------------------------------------------------------------------------------------------------------------------
# Models and what they say
# ----------------------------------------------------------------------------------------------------------------------


def run_folder(spec: str, flag: str) -> Path | None:
    """The run that `spec` names, or None where it names a model; raises UserError for a run without a final model."""
    path = Path(spec)
    if path.name == "final" and (path.parent / "config.toml").exists():
        path = path.parent
    if (path / "final").is_dir() and (path / "config.toml").exists():
        return path
    if (path / "config.toml").exists() or (path / "checkpoint").is_dir():
        raise UserError(f"{flag} {spec}: the run did not finish, so it has no final/; go on with "
                        f"python humanline.py --config {path / 'config.toml'} --out {path} --resume latest")
    if path.is_dir() and not any((path / name).exists() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"{flag} {spec}: neither a run's folder (config.toml and final/) nor a model's (config.json)")
    in_folder = path.parent != Path(".") and path.parent.is_dir()
    is_local = spec.startswith((".", "/", "~")) or spec.count("/") > 1 or in_folder
    if is_local and not path.exists():
        raise UserError(f"{flag} {spec}: no such run or model")
    return None


def settings_of(spec: str, flags: Settings, flag: str = "--model", beside: Path | None = None) -> Config:
    """The trainer's settings for a model: its run's, or for a model that is no run those of the run `beside` it, with
    our flags over them."""
    own = run_folder(spec, flag)
    run = own or beside
    args = ["--model", str(own / "final") if own else spec]
    for field in dataclasses.fields(RowSettings):
        value = getattr(flags, field.name, None)
        if field.name == "config" and value is None and run:
            value = run / "config.toml"
        values = map(str, value) if isinstance(value, tuple) else [str(value)]
        args += [] if value is None else [humanline.flag_of(field.name), *values]
    table = str(run / "config.toml") if run and flags.config is None else ""
    # A loss of the user's own, which only the script that trained with it knows, and which nothing here needs.
    unknown = ["--loss", "grpo"] if table and humanline.read_config(table).loss not in humanline.LOSSES else []
    unknown += ["--track", "None"] * bool(table)  # its package may be missing here
    config = humanline.parse_config(args + unknown)
    if table:  # what no flag gives is what it was for the run's own model, such as embedded
        was = humanline.parse_config(["--config", table, *unknown])
        given = {one.name for one in dataclasses.fields(RowSettings) if getattr(flags, one.name, None) is not None}
        for name in {*config.untyped} - given - {"model", "untyped"}:
            setattr(config, name, getattr(was, name))
    humanline.go_offline_without_hub(config)
    return config


def settings_of_all(flags: Accuracy | Show | Chat) -> list[Config]:
    """The settings of each --model, with the first run among them for those that are no run."""
    run = next(filter(None, (run_folder(name, "--model") for name in flags.model)), None)
    return [settings_of(name, flags, beside=run) for name in flags.model]


def settings_with_one_reward(flags: Accuracy | Show) -> list[Config]:
    """The settings of each --model; raises UserError where their rewards differ."""
    configs = settings_of_all(flags)
    rewards = {config.reward for config in configs}
    if len(rewards) > 1:
        names = " and ".join(sorted(map(" ".join, rewards)))
        raise UserError(f"--model: these runs have different rewards, {names}; choose with --reward")
    return configs


def load(spec: str, config: Config, scored: bool = True) -> Sampler:
    """A model as the trainer's sampler, in this process: policy, tokenizer, and the reward unless nothing is to be
    `scored`. Adapters in its folder have targets of their own; others are new and change nothing."""
    config = dataclasses.replace(config, sample_every=1, reward=config.reward if scored else (), shard=False,
                                 lora_targets=Config.lora_targets)
    policy, tokenizer = humanline.load_policy(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    sampler = Sampler(policy.requires_grad_(False), tokenizer, config)
    sampler.name = spec
    return sampler


def check_one_vocabulary(one: Sampler, other: Sampler, flag: str) -> None:
    """Raises UserError where token ids mean different things to two models."""
    if one.tokenizer.get_vocab() != other.tokenizer.get_vocab():
        raise UserError(f"{flag} {other.name}: its vocabulary is not that of {one.name}, so the two have no log-ratio; "
                        f"name a model with the same tokenizer")


def rows_to_measure(flags: Accuracy | Show | Winrate, config: Config) -> str:
    """--data, or what the run measures itself on."""
    if flags.data is None and config.eval_data is None:
        raise UserError(f"--data: name the rows to measure on; --model {config.model} has no --eval-data of its own")
    return flags.data or config.eval_data


def read_rows(data: str, config: Config) -> list[Row]:
    """The rows of --data, each once, whatever its number of passes; raises UserError where none can be read."""
    with humanline.explained(f"--data {data}", "name a file or a data set that can be read"):
        rows = humanline.read_rows(data, config, "--data")
    return [dataclasses.replace(row, passes=1.0) for row in rows]


def encode(sampler: Sampler, rows: list[Row], offline: bool) -> list[Group]:
    """Rows as the trainer encodes them: their own completions if `offline`, or prompts to draw completions for."""
    return humanline.encode_rows(rows, sampler, online=not offline)


def draw(sampler: Sampler, prompts: list[Group], rows: list[Row], samples: int,
         stream: int) -> tuple[list[Group], float]:
    """`samples` completions with rewards for each prompt, in the order of the prompts; and the tokens per second.

    The trainer's own drawing, a few batches at a time for a progress bar. `stream` tells apart one command's drawings.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].prompt))
    width = max(len(group.prompt) for group in prompts) + sampler.config.max_new_tokens
    size = max(1, 4 * sampler.config.sample_tokens // (samples * width))
    drawn, started = {}, time.perf_counter()
    with tqdm(total=len(prompts), desc=sampler.name, unit="prompt", leave=False) as bar:
        for start in range(0, len(order), size):
            part = order[start : start + size]
            step = 10**8 * (1 + stream) + start
            drawn |= zip(part, sampler.draw_rollouts([prompts[i] for i in part], rows, samples, step))
            bar.update(len(part))
    tokens = sum(len(completion) for group in drawn.values() for completion in group.completions)
    return [drawn[i] for i in range(len(prompts))], tokens / (time.perf_counter() - started)


def greedily(config: Config) -> Config:
    """The settings with which each draw is the most likely token: a nucleus of one."""
    return dataclasses.replace(config, top_p=1e-9)


def completions_of(sampler: Sampler, group: Group) -> list[dict]:
    """A drawn group as people read it."""
    texts = sampler.tokenizer.batch_decode(group.completions, skip_special_tokens=True)
    scores = group.rewards if sampler.rewards else [None] * len(texts)
    return [dict(completion=text, score=score, tokens=len(ids), truncated=ids[-1] not in sampler.stops)
            for text, ids, score in zip(texts, group.completions, scores)]


def token_logps(sampler: Sampler, groups: list[Group]) -> list[list[np.ndarray]]:
    """log π(y_t | x, y_<t) in nats of each token of each completion of each group, as the trainer computes it."""
    policy = sampler.policy
    config, found = dataclasses.replace(sampler.config, loss="grpo"), []  # every sequence by itself
    values = lambda microbatch: humanline.log_probs(policy, microbatch)[0]
    with tqdm(total=len(groups), desc=f"log-probs by {sampler.name}", unit="prompt", leave=False) as bar:
        for start in range(0, len(groups), 64):
            part = groups[start : start + 64]
            sequences = [humanline.Sequence(group.prompt, completion)
                         for group in part for completion in group.completions]
            with humanline.mixed_precision(policy.device, config):
                logps = iter(humanline.completion_values(policy, sequences, config, values))
            found += [[next(logps).double().numpy() for _ in group.completions] for group in part]
            bar.update(len(part))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# What is printed and written
# ----------------------------------------------------------------------------------------------------------------------


def show(estimate: tuple[float, float, float], digits: int = 3, sign: str = "") -> str:
    """0.861 [0.842, 0.879]"""
    mean, low, high = (f"{value:{sign}.{digits}f}" for value in estimate)
    return f"{mean} [{low}, {high}]"


def rate(values: Iterable[float]) -> str:
    """A share of problems, say, with its interval."""
    return show(interval(values, 0.0, 1.0))


def show_p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def table(rows: list[list[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    pad = lambda i, cell: cell.rjust(widths[i]) if i else cell.ljust(widths[i])
    return "\n".join("  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows)


def printable(text: str) -> str:
    """The text without what would move the cursor or ring the bell; lines and tabs stay."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def cells(text: str) -> int:
    """How many columns of a terminal the text takes: two for Chinese characters and most emoji, none for accents.

    >>> cells("abc"), cells("你好"), cells("e\N{COMBINING ACUTE ACCENT}")
    (3, 4, 1)
    """
    return sum(0 if unicodedata.category(c) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(c) in "FW")
               for c in text)


def wrap(text: str, width: int) -> list[str]:
    """Its lines, none of them above `width` columns of a terminal; words stay whole where they can.

    >>> wrap("The sea is calm, anticonstitutionally.", 10)
    ['The sea is', 'calm,', 'anticonsti', 'tutionally', '.']
    """
    lines = []
    for paragraph in printable(text).expandtabs(4).strip("\n").split("\n"):
        line = ""
        for word in re.findall(r"\s*\S+", paragraph):
            if line and cells(line + word) > width:
                lines.append(line)
                line, word = "", word.lstrip()
            line += word
            while cells(line) > width:
                end = next(end for end in range(width, 0, -1) if cells(line[:end]) <= width)
                lines.append(line[:end])
                line = line[end:]
        lines.append(line)
    return lines


def side_by_side(texts: Iterable[str], width: int) -> str:
    """Texts in columns of one width, together at most `width` columns of a terminal."""
    texts = list(texts)
    own = (width + 3) // len(texts) - 3
    rows = itertools.zip_longest(*(wrap(text, own) for text in texts), fillvalue="")
    return "\n".join(" │ ".join(text + " " * (own - cells(text)) for text in row).rstrip() for row in rows)


def new_file(out: str | None, kinds: tuple[str, ...], default: str = "", flag: str = "--out") -> Path:
    """Where to write: `out`, or evals/`default`, numbered if it exists. Raises UserError before any work is done."""
    base = Path("evals", default)
    names = (base if n == 1 else base.with_stem(f"{base.stem}-{n}") for n in range(1, 10**6))
    path = Path(out) if out is not None else next(path for path in names if not path.exists())
    if path.suffix not in kinds:
        raise UserError(f"{flag} {path}: it must end in {' or '.join(kinds)}")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if path.exists() and flag != "--results":  # which is added to
        raise UserError(f"{flag} {path}: it exists; choose another file")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{flag} {path}: cannot be written there; choose another file")
    return path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write(path.with_suffix(".new"), text)
    path.with_suffix(".new").replace(path)


def json_lines(lines: Iterable[dict]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


# Okabe and Ito's colours differ for the colour-blind, too.
OKABE_ITO = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
GREY = "#777777"
DASHES = ["-", "--", ":", "-."]


def new_figure(height: float, rows: int, columns: int) -> tuple[Any, list]:
    """A figure as wide as a README, 8 inches, and `height` inches high; and its axes."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({
        "font.size": 10, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": "#E6E6E6", "axes.axisbelow": True, "svg.fonttype": "none"})
    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def save(figure: Any, path: Path, legend: Any) -> None:
    """Write the picture, with the lines of `legend` (axes, or a dict by label) explained above it."""
    lines = legend if isinstance(legend, dict) else dict(zip(*reversed(legend.get_legend_handles_labels())))
    columns = 3 if len(lines) % 3 == 0 else 2
    figure.legend(list(lines.values()), list(lines), loc="outside upper center", ncols=columns, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    print(f"picture: {path}")


# ----------------------------------------------------------------------------------------------------------------------
# accuracy
# ----------------------------------------------------------------------------------------------------------------------


def accuracy(flags: Accuracy) -> None:
    """Draw, score, tell."""
    ks = sorted(set(flags.k or (1, flags.samples)))
    if not 1 <= ks[0] <= ks[-1] <= flags.samples:
        raise UserError(f"--k {' '.join(map(str, ks))} --samples {flags.samples}: pass@k needs 1 <= k <= samples")
    configs = settings_with_one_reward(flags)
    data, out = rows_to_measure(flags, configs[0]), new_file(flags.out, (".jsonl",), "accuracy.jsonl")

    lines, speeds, found = [], [], defaultdict(list)
    for i, (name, config) in enumerate(zip(flags.model, configs)):  # one model in memory at a time
        rows = read_rows(data, config)
        sampler = load(name, config)
        sampler.check_rows(rows)
        prompts = encode(sampler, rows, offline=False)
        drawn, speed = draw(sampler, prompts, rows, flags.samples, 2 * i)
        speeds.append(speed)
        sampler.config = greedily(sampler.config)  # in the same precision
        greedy = draw(sampler, prompts, rows, 1, 2 * i + 1)[0] if flags.greedy else []
        for kind, group in (*(("sampled", group) for group in drawn), *(("greedy", group) for group in greedy)):
            for completion in completions_of(sampler, group):
                lines.append(dict(model=name, kind=kind, row=group.row, prompt=rows[group.row].prompt) | completion)
                found[i, kind, group.row].append(lines[-1])
        del sampler
    write(out, json_lines(lines))

    models = range(len(configs))
    problems = [row for row in range(len(rows)) if all((i, "sampled", row) in found for i in models)]

    def values(i: int, key: str, kind: str = "sampled") -> np.ndarray:  # (P, samples)
        return np.array([[line[key] for line in found[i, kind, row]] for row in problems], dtype=float)

    scores = [values(i, "score") for i in models]
    # Otherwise the reward is graded, and pass@k means nothing.
    binary = all(set(np.unique(model_scores)) <= {0.0, 1.0} for model_scores in scores)
    score = rate if binary else lambda values: show(interval(values))
    results = [["", *([f"pass@{k}" for k in ks] if binary else ["mean score"]), *["greedy"] * flags.greedy,
                "tokens", "truncated", "tokens/s"]]
    for i in models:
        correct = scores[i].sum(1).astype(int).tolist()
        passed = [[pass_at_k(flags.samples, c, k) for c in correct] for k in ks] if binary else [scores[i].mean(1)]
        greedy = [score(values(i, "score", "greedy")[:, 0])] if flags.greedy else []
        results.append([flags.model[i], *map(score, passed), *greedy, show(interval(values(i, "tokens").mean(1)), 1),
                        rate(values(i, "truncated").mean(1)), f"{speeds[i]:,.0f}"])
    print(f"{data}: {len(problems)} problems, {flags.samples} samples each at temperature {flags.temperature:g}; "
          f"[95 % bootstrap intervals over problems]\n\n{table(results)}")

    levels = np.array([str(rows[row].fields.get("level")) for row in problems])
    if set(levels) != {"None"}:
        names = sorted(set(levels), key=lambda level: (len(level), level))
        by_level = [[flags.model[i], *(score(scores[i][levels == level].mean(1)) for level in names)] for i in models]
        header = ["", *(f"{level} ({sum(levels == level)})" for level in names)]
        print("\nby level (problems)\n" + table([header, *by_level]))
    if len(models) > 1:
        differences = {i: scores[i].mean(1) - scores[0].mean(1) for i in models[1:]}
        bounds = (-1.0, 1.0) if binary else ()
        compared = [[flags.model[i], show(interval(more, *bounds), sign="+"), show_p(sign_flip_p(more))]
                    for i, more in differences.items()]
        print(f"\nmore than {flags.model[0]}, by problem; comparisons: {len(compared)}; p by flipping signs\n"
              f"{table(compared)}")
    print(f"\nsamples: {out}")


# ----------------------------------------------------------------------------------------------------------------------
# show
# ----------------------------------------------------------------------------------------------------------------------


def show_completions(flags: Show) -> None:
    """Draw and score as `accuracy` does, print."""
    configs = settings_with_one_reward(flags)
    data, samples = rows_to_measure(flags, configs[0]), 1 if flags.greedy else flags.samples
    asked, told = [], []  # of each model, by row: the prompt as text, and the completions
    for stream, (name, config) in enumerate(zip(flags.model, configs)):  # one model in memory at a time
        rows = read_rows(data, config)
        sampler = load(name, greedily(config) if flags.greedy else config)
        if flags.reward is None and config.reward == Config.reward and any("answer" not in row.fields for row in rows):
            sampler.rewards = []  # nothing to compare with
        sampler.check_rows(rows)
        drawn, _ = draw(sampler, encode(sampler, rows, offline=False)[: flags.prompts], rows, samples, stream)
        asked.append({group.row: as_text(rows[group.row].prompt) for group in drawn})
        told.append({group.row: completions_of(sampler, group) for group in drawn})
        del sampler

    shown = [row for row in told[0] if all(row in own for own in told)]
    terminal = max(27, shutil.get_terminal_size((100, 24)).columns)  # 100 into a file or a pipe
    abreast = max(1, min(len(configs), (terminal + 3) // 30))  # columns of 27 at least
    width = min(terminal, 80 * abreast)
    for number, row in enumerate(shown, 1):
        print(f"── {number} of {len(shown)}: {rows[row].where.removeprefix('--data ')} ".ljust(width, "─"))
        prompts, answer = [own[row] for own in asked], rows[row].fields.get("answer")
        for text in prompts[:1] * (len({*prompts}) == 1) + [f"(answer: {answer})"] * (answer is not None):
            print(side_by_side([text], width))
        for start in range(0, len(configs), abreast):
            part = slice(start, start + abreast)
            print("\n" + side_by_side(flags.model[part], width) + "\n" + "─" * width)
            if len({*prompts}) > 1:  # runs with prompt formats of their own
                print(side_by_side([f"({prompt})" for prompt in prompts[part]], width) + "\n")
            for completions in zip(*(own[row] for own in told[part])):
                print(side_by_side([completion["completion"] for completion in completions], width))
                print(side_by_side([in_short(completion) for completion in completions], width) + "\n")
    if len(shown) > 1:
        scores = [line["score"] for own in told for row in shown for line in own[row]]
        mean_of_row = lambda own, key: [np.mean([line[key] for line in own[row]]) for row in shown]
        score = rate if {*scores} <= {0, 1} else lambda values: show(interval(values))
        means = [[name, "–" if None in scores else score(mean_of_row(own, "score")),
                  show(interval(mean_of_row(own, "tokens")), 1), rate(mean_of_row(own, "truncated"))]
                 for name, own in zip(flags.model, told)]
        print(f"means over these {len(shown)} prompts; [95 % bootstrap intervals]; more: python eval.py accuracy\n"
              + table([["", "reward", "tokens", "truncated"], *means]))


def as_text(prompt: list[dict]) -> str:
    """A prompt as people read it: its messages, with their roles where there are several."""
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def in_short(completion: dict) -> str:
    tokens = f"{completion['tokens']} tokens{', truncated' * completion['truncated']}"
    return f"→ {'' if completion['score'] is None else 'reward {:.4g}, '.format(completion['score'])}{tokens}"


# ----------------------------------------------------------------------------------------------------------------------
# chat
# ----------------------------------------------------------------------------------------------------------------------


class Speaker:
    """A model in a chat, with its dialogue so far. What it says is on the screen as it is drawn."""

    def __init__(self, name: str, config: Config):
        from transformers import TextStreamer

        self.name, self.sampler = name, load(name, config, scored=False)
        self.dialogue, self.said = [], ""  # messages; what it has said of its present answer
        self.streamer = TextStreamer(self.sampler.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.streamer.on_finalized_text = self.say
        policy = self.sampler.policy  # humanline.sample calls its `generate`
        policy.generate = functools.partial(policy.generate, streamer=self.streamer)

    def say(self, text: str, stream_end: bool = False) -> None:
        self.said += text
        print(printable(text), end="", flush=True)

    def answer(self, message: str, seed: int) -> None:
        """Answer a message as in training: its prompt is the dialogue up to there. Ctrl-C ends the answer."""
        sampler, config = self.sampler, self.sampler.config
        dialogue = [*self.dialogue, dict(role="user", content=message)]
        prompt = humanline.read_row(dict(prompt=dialogue), "chat", config).prompt
        with humanline.explained(f"--model {self.name}: its chat template refuses the dialogue", "leave out --system"):
            ids = humanline.encode_prompts(sampler.tokenizer, [prompt])[0]
        print(f"\n{self.name}> ", end="", flush=True)
        room = sampler.longest - len(ids)
        if room < 1:
            self.dialogue = []
            print(f"[longer than the model's {sampler.longest} positions: a new dialogue begins; "
                  "say that again, or shorter]")
            return
        config, self.said = dataclasses.replace(config, max_new_tokens=min(config.max_new_tokens, room)), ""
        try:
            (completion, _), = humanline.sample(sampler.policy, [ids], sampler.stops, sampler.pad, config, seed)
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
            print(f"{speaker.name} has no chat template: it continues each text by itself, and remembers none.")
    for turn in itertools.count():
        try:
            message = input("\nyou> ").strip()
        except (EOFError, KeyboardInterrupt):
            message = "/quit"
            print()
        if message == "/quit":
            return
        if message == "/reset":
            print("[a new dialogue]")
        for speaker in speakers:
            if message == "/reset":
                speaker.dialogue = []
            elif message:
                speaker.answer(message, humanline.seed_for(flags.seed, "chat", turn))


# ----------------------------------------------------------------------------------------------------------------------
# winrate
# ----------------------------------------------------------------------------------------------------------------------


def load_judge(spec: str, config: Config) -> Callable[..., list[float]]:
    """The function that --judge FILE.py:function names, in a process of its own, with the time limit of rewards."""
    file, _, name = spec.rpartition(":")
    if not Path(file).is_file() or not file.endswith(".py"):
        raise UserError(f"--judge {spec}: no such file; write FILE.py:function")
    with humanline.explained(f"--judge {spec}", "write FILE.py:function, a function(prompts, first, second, rows)"):
        process = humanline.FunctionProcess(file, name)
    return lambda *pairs: process("call", *pairs, limit=config.reward_seconds * math.sqrt(len(pairs[0])))


def ask_twice(judge: Callable[..., list[float]], spec: str, prompts: list, first: list[str], second: list[str],
              fields: list[dict]) -> np.ndarray:
    """(2, N): probabilities that the first text is better; how much the judge favours what it reads first, -1 to 1."""
    found, mend = [], f"it must return {len(prompts)} probabilities, one for each pair"
    for texts in ((first, second), (second, first)):
        with humanline.explained(f"--judge {spec}", mend, longer="give it more time with --reward-seconds"):
            found.append(np.array([float(value) for value in judge(prompts, *texts, fields)]))
        if found[-1].shape != (len(prompts),) or not ((found[-1] >= 0) & (found[-1] <= 1)).all():
            raise UserError(f"--judge {spec}: {mend}")
    return np.stack([(found[0] + 1 - found[1]) / 2, found[0] + found[1] - 1])


def winrate(flags: Winrate) -> None:
    """Draw both sides, judge, tell."""
    run = run_folder(flags.model, "--model")
    if flags.against != "data":
        run = run or run_folder(flags.against, "--against")
    config = settings_of(flags.model, flags, beside=run)
    other = settings_of(flags.against, flags, "--against", run) if flags.against != "data" else None
    data, out = rows_to_measure(flags, config), new_file(flags.out, (".jsonl",), "winrate.jsonl")
    outputs = new_file(flags.alpaca_eval, (".json",), flag="--alpaca-eval") if flags.alpaca_eval else None
    rows = read_rows(data, config)
    if other is None and not all(row.completions for row in rows):
        raise UserError(f"--against data: {data} has rows without completions; name a model: --against MODEL")
    judge = load_judge(flags.judge, config) if flags.judge else None
    sampler = load(flags.model, config, scored=judge is None)
    if judge is None:
        sampler.check_rows(rows)
    rewards, sampler.rewards = sampler.rewards, []  # both sides are scored together, below

    def texts(one: Sampler, stream: int) -> dict[int, list[str]]:
        own = read_rows(data, one.config)  # with its own prompt template
        drawn, _ = draw(one, encode(one, own, offline=False), own, flags.samples, stream)
        return {group.row: one.tokenizer.batch_decode(group.completions, skip_special_tokens=True) for group in drawn}

    ours = texts(sampler, 0)
    if other is None:
        theirs = {i: [row.completions[int(np.argmax(row.rewards))]] * flags.samples for i, row in enumerate(rows)}
    else:  # from draws of its own, so that a model against itself is a test and no identity
        theirs = texts(load(flags.against, other, scored=False), 1)
    common = sorted(set(ours) & set(theirs))
    pairs = [(rows[row], one, two) for row in common for one, two in zip(ours[row], theirs[row])]
    of_rows, first, second = map(list, zip(*pairs))
    prompts, fields = [row.prompt for row in of_rows], [row.fields for row in of_rows]
    if judge is None:
        sampler.rewards = rewards
        parts = [sampler.compute_rewards(side, of_rows) for side in (first, second)]
        for reward in rewards:
            if not reward.worked:
                raise UserError(f"--reward {reward.name} failed on every sample: {reward.failure!r:.200}")
        scores = [[sampler.total(values) for values in side] for side in parts]
        higher = np.sign(np.subtract(*scores))
        preference, favour = (1 + higher) / 2, 0 * higher
    else:
        preference, favour = ask_twice(judge, flags.judge, prompts, first, second, fields)
    write(out, json_lines(dict(where=row.where, prompt=row.prompt, output=one, against=two, preference=value)
                          for (row, one, two), value in zip(pairs, preference.tolist())))

    lengths = np.array([[len(one), len(two)] for _, one, two in pairs], dtype=float)
    shape = len(common), flags.samples
    preference, favour, delta = (one.reshape(shape) for one in (preference, favour, lengths[:, 0] - lengths[:, 1]))
    fit = lambda index: length_controlled(*(one[index].reshape(len(index), -1) for one in (preference, delta)))
    again = np.concatenate([fit(index) for index in resamples(shape[0], 1000)])
    controlled = float(fit(np.arange(shape[0])[None])[0]), *np.quantile(again, [0.025, 0.975])
    wins, losses = np.mean(preference > 0.5), np.mean(preference < 0.5)
    results = [
        ["win rate", rate(preference.mean(1)), f"wins {wins:.3f}, ties {1 - wins - losses:.3f}, losses {losses:.3f}"],
        ["  against 0.5", show_p(sign_flip_p(preference.mean(1) - 0.5)), "by flipping signs"],
        ["length-controlled", *((show(controlled), "") if min(wins, losses) > 0.02 else ("–", "too one-sided a win"))],
        ["longer by, characters", show(interval(delta.mean(1)), 2, "+"),
         "{:.1f} against {:.1f}".format(*lengths.mean(0))],
    ]
    if judge is not None:
        favoured = show(interval(favour.mean(1), -1, 1), sign="+")
        results.append(["favours what it reads first", favoured, "the judge, -1 to 1"])
    print(f"{flags.model} against {flags.against} on {data}: {shape[0]} prompts x {shape[1]}, judged by "
          f"{flags.judge or ' '.join(config.reward)}; [95 % bootstrap intervals over prompts]\n\n{table(results)}\n\n"
          f"pairs: {out}")
    if outputs is not None:
        beside = outputs.with_stem(outputs.stem + "-against")
        write_outputs(outputs, flags.model, data, [(rows[row], ours[row][0]) for row in common])
        write_outputs(beside, flags.against, data, [(rows[row], theirs[row][0]) for row in common])
        print(f"alpaca_eval evaluate --model_outputs {outputs} --reference_outputs {beside}")


def write_outputs(path: Path, generator: str, data: str, outputs: list[tuple[Row, str]]) -> None:
    """The list of objects that alpaca_eval reads. It joins two of them by `instruction`, the text that the data has."""
    objects = []
    for row, output in outputs:
        given = [row.fields.get(name) for name in ("instruction", "prompt", "question", "problem")]
        text = next((text for text in given if isinstance(text, str)), row.prompt[-1]["content"])
        dataset = row.fields.get("dataset") or data
        objects.append(dict(instruction=text, output=output, generator=generator, dataset=dataset))
    write(path, json.dumps(objects, indent=2, ensure_ascii=False))


# ----------------------------------------------------------------------------------------------------------------------
# data
# ----------------------------------------------------------------------------------------------------------------------

PAPERS_WORST = (-1.03, -0.36)  # nats/token: the quartile of the paper's data with which offline training fell behind


class Source:
    """One source of offline data, as the starting model sees it."""

    def __init__(self, name: str, groups: list[Group], logps: list[list[np.ndarray]], own: list[list[np.ndarray]]):
        """logps: per prompt, per completion, the token log-probs; own: the same of completions that the model drew."""
        self.name, self.groups = name, groups
        self.means = [np.array([one.mean() for one in group]) for group in logps]  # nats/token
        self.all, self.estimate = np.concatenate(self.means), interval([one.mean() for one in self.means])
        self.own = [group[0].mean() for group in own]
        # Most of what the model itself says is likelier than this.
        self.line = float(np.quantile(self.own, 0.25)) if own else PAPERS_WORST[1]
        compared = [i for i, group in enumerate(groups) if len(group.rewards) > 1 and not group.labelled]
        self.gaps = np.array([np.ptp(groups[i].rewards) for i in compared])  # best minus worst score
        pairs = [(self.means[i], groups[i].rewards) for i, gap in zip(compared, self.gaps) if gap > 0]
        self.likelier = [means[np.argmax(rewards)] > means[np.argmin(rewards)] for means, rewards in pairs]

    def describe(self) -> dict[str, str]:
        """What the table says."""
        lengths = np.array([len(one) for group in self.groups for one in group.completions])
        doubles = len(lengths) - len({(*group.prompt, -1, *one) for group in self.groups for one in group.completions})
        share = lambda low, high: rate([((one >= low) & (one < high)).mean() for one in self.means])
        low, high = PAPERS_WORST
        column = {
            "prompts": f"{len(self.groups):,}",
            "completions": f"{len(lengths):,}",
            "  tokens, median (longest)": f"{np.median(lengths):.0f} ({lengths.max()})",
            "  duplicates": f"{doubles:,} ({doubles / len(lengths):.1%})",
            "mean log-prob, nats/token": show(self.estimate),
            "  its quartiles": "  ".join(f"{value:.2f}" for value in np.quantile(self.all, [0.25, 0.5, 0.75])),
            f"  in the paper's worst quartile, {low} to {high}": share(low, high),
            f"  below {low}": share(-math.inf, low),
        }
        if self.own:
            column["  of the model's own samples"] = show(interval(self.own))
            column["  less likely than 3/4 of those"] = share(-math.inf, self.line)
        if len(self.gaps):
            column |= {"best minus worst score": show(interval(self.gaps)), "  no difference": rate(self.gaps == 0)}
        if self.likelier:
            column["  best likelier than worst"] = rate(self.likelier)
        return column

    def advice(self) -> str:
        """A sentence. In the paper, humanline makes offline data as good as online, unless it is too unlikely."""
        than = "than 3/4 of the model's own" if self.own else f"than {PAPERS_WORST[1]} nats/token"
        unlikely, flat = (self.all < self.line).mean(), np.mean(self.gaps == 0) if len(self.gaps) else 0.0
        if flat > 0.8:
            return f"little to learn from: {flat:.0%} of the prompts have completions of one score only; choose others."
        if unlikely > 0.75:
            return (f"not good enough: {unlikely:.0%} of the completions are less likely {than}; "
                    f"draw them from the model itself (--sample-every 64), or imitate the best of them first.")
        if unlikely > 0.4:
            return (f"doubtful: {unlikely:.0%} of the completions are less likely {than}; "
                    "compare with --sample-every 64.")
        return f"good enough to train offline with humanline: only {unlikely:.0%} of it is less likely {than}."


def data_quality(flags: DataQuality) -> None:
    """Score the data under the starting model, count what else is wrong with it, advise."""
    run = run_folder(flags.policy, "--policy") if flags.policy else None
    config = settings_of(flags.model, flags, beside=run)
    policy_config = settings_of(flags.policy, flags, "--policy") if flags.policy else None
    out = new_file(flags.out, (".png", ".svg"), "data.png")
    read = {name: read_rows(name, config) for name in flags.data}
    for name, rows in read.items():
        if not any(row.completions for row in rows):
            raise UserError(f"--data {name}: prompts without completions; there is nothing to judge")
    model = load(flags.model, config, scored=False)
    policy = load(flags.policy, policy_config, scored=False) if flags.policy else None
    if policy is not None:
        check_one_vocabulary(model, policy, "--policy")

    described = []
    for stream, (name, rows) in enumerate(read.items()):
        groups = [group for group in encode(model, rows, offline=True) if group.completions]
        logps, positions = token_logps(model, groups), humanline.max_positions(model.policy)
        fit = [group for group in groups if len(group.prompt) + config.max_new_tokens <= positions][: flags.own]
        source = Source(name, groups, logps, token_logps(model, draw(model, fit, rows, 1, stream)[0]) if fit else [])
        lost = sum(len(row.completions) for row in rows) - len(source.all)
        column = source.describe() | {"over-long, not trained on": f"{lost:,}"}
        described.append((source, column | (describe_ratios(policy, groups, logps, config) if policy else {})))
    described.sort(key=lambda pair: -pair[0].estimate[0])
    sources, columns = zip(*described)
    results = [["", *(source.name for source in sources)]]
    for key in dict.fromkeys(key for column in columns for key in column):
        results.append([key, *(column.get(key, "") for column in columns)])
    print(f"under {flags.model}, the model to start from; [95 % bootstrap intervals over prompts]\n\n"
          f"{table(results)}\n")
    for source in sources[1:]:  # two independent means: the reaches of their intervals add in squares
        (a, a_low, a_high), (b, b_low, b_high) = source.estimate, sources[0].estimate
        gap = a - b, a - b - math.hypot(a - a_low, b_high - b), a - b + math.hypot(a_high - a, b - b_low)
        print(f"{source.name}: {show(gap, sign='+')} nats/token from {sources[0].name}, the likeliest")
    print("\n".join(f"{source.name}: {source.advice()}" for source in sources))
    picture_data(sources, flags.model, out)


def describe_ratios(policy: Sampler, groups: list[Group], logps: list[list[np.ndarray]],
                    config: Config) -> dict[str, str]:
    """How far d_t = log π_policy - log π_start goes on the data: what the clip stops, and the bound in theory."""
    d = [np.concatenate(after) - np.concatenate(before) for after, before in zip(token_logps(policy, groups), logps)]
    lowest, highest = min(one.min() for one in d), max(one.max() for one in d)
    return {
        f"tokens with d below {config.log_eps_p:g}": rate([(one < config.log_eps_p).mean() for one in d]),
        f"tokens with d above {config.log_eps_r:g}": rate([(one > config.log_eps_r).mean() for one in d]),
        "  largest ratio, and its inverse": f"{math.exp(min(highest, 700)):.3g}  {math.exp(min(-lowest, 700)):.3g}",
    }


def picture_data(sources: Iterable[Source], start: str, path: Path) -> None:
    """Histograms of mean token log-probs."""
    figure, (axes,) = new_figure(3.6, 1, 1)
    everything = np.concatenate([source.all for source in sources])
    edges = np.linspace(max(np.quantile(everything, 0.005), -8), min(0, everything.max()), 41)
    low, high = np.clip(PAPERS_WORST, edges[0], edges[-1])
    axes.axvspan(low, high, color="#E4E4E4", zorder=0, label="the paper's worst quartile")
    drawn = [(source.name, source.all, OKABE_ITO[i % 7], DASHES[i // 7 % 4]) for i, source in enumerate(sources)]
    own = [mean for source in sources for mean in source.own]
    for name, values, colour, dash in drawn + ([("the model's own samples", own, GREY, ":")] if own else []):
        shares = 100 * np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0] / len(values)
        axes.stairs(shares, edges, color=colour, linestyle=dash, linewidth=2, label=name)
    axes.set(xlim=(edges[0], edges[-1]), ylabel="completions, % per bin",
             xlabel=f"mean token log-prob of a completion under {start}, nats (the first bin holds all below it)")
    save(figure, path, axes)


# ----------------------------------------------------------------------------------------------------------------------
# perception
# ----------------------------------------------------------------------------------------------------------------------

GAMMAS = (0.61, 0.69)  # Tversky and Kahneman (1992): gains, losses
BINS = 20  # of equal probability under the policy
OWN = "the policy's own samples"


def perception(flags: Perception) -> None:
    """Outcomes of the policy and of the data, what humanline lets through, and how far each is from what people see."""
    run, config = run_folder(flags.model, "--model"), settings_of(flags.model, flags)
    if run is None and None in (flags.ref, flags.data):
        raise UserError(f"--ref and --data: name the model that {flags.model} was trained from, and offline "
                        "completions")
    ref_name = flags.ref or humanline.read_config(str(run / "config.toml")).model
    ref_config = settings_of(ref_name, flags, "--ref", run)
    data, out = flags.data or config.data[0], new_file(flags.out, (".png", ".svg"), "perception.png")
    rows = read_rows(data, config)
    if not all(row.completions for row in rows):
        raise UserError(f"--data {data}: prompts without completions; there are no outcomes to look at")
    policy, ref = load(flags.model, config, scored=False), load(ref_name, ref_config, scored=False)
    check_one_vocabulary(policy, ref, "--ref")
    groups = encode(policy, rows, offline=True)
    drawn, _ = draw(policy, groups, rows, flags.samples, 0)
    own, theirs = ([[a - b for a, b in zip(*pair)] for pair in zip(token_logps(policy, part), token_logps(ref, part))]
                   for part in (drawn, groups))  # token log-ratios d, per prompt, per completion
    if max(abs(one).max() for side in (own, theirs) for group in side for one in group) < 1e-5:
        raise UserError(f"--ref {ref_name}: it is the same model as {flags.model}, so that every outcome is 0; name "
                        "another")

    outcomes, data_outcomes = ([np.array([one.sum() for one in group]) for group in side] for side in (own, theirs))
    weights = {"the data": [np.ones(len(group)) for group in theirs], **let_through(theirs, config)}
    edges = np.unique(np.quantile(np.concatenate(outcomes), np.linspace(0, 1, BINS + 1)[1:-1]))
    count = lambda z, weight: np.bincount(np.searchsorted(edges, z), weights=weight, minlength=len(edges) + 1)
    expected = np.stack([count(z, np.ones(len(z))) for z in outcomes])  # (P, BINS)
    counts = {name: np.stack([count(*pair) for pair in zip(data_outcomes, weight)]) for name, weight in weights.items()}
    weights = {name: np.concatenate(weight) for name, weight in weights.items()}
    results, labels = [["", "tokens let through", *(f"KL, γ = {gamma}" for gamma in GAMMAS)]], {}
    for name, own in {OWN: expected, **counts}.items():
        found = [divergence(expected, own, gamma) for gamma in GAMMAS]
        results.append([name, f"{weights[name].mean():.1%}" if name in weights else "", *map(show, found)])
        labels[name] = f"{name}, KL {found[0][0]:.2f}"
    print(f"outcomes z = log π/π_ref in nats, {flags.model} over {ref_name}, {len(groups):,} prompts: {flags.samples} "
          f"samples by the policy for each, and {data}; [95 % bootstrap intervals over prompts]\n\n{table(results)}\n\n"
          f"KL is Proposition 3.4's, in nats: what people make of the data is off by at most sup|v| sqrt(2 KL).")
    picture_perception(np.concatenate(outcomes), np.concatenate(data_outcomes), weights, labels, out)


def let_through(d: list[list[np.ndarray]], config: Config) -> dict[str, list[np.ndarray]]:
    """How much of each completion humanline learns from: the share of its tokens that pass a gradient.

    Clipping passes d in [log ε_P, log ε_R]; sampling rejects by Definition 4.2, with M_P and M_R from batches of
    --batch-size prompts, as in training.

    Args:
        d: per prompt, per completion, the token log-ratios in nats.
    Returns:
        for each of the two, per prompt, (completions,) shares.
    """
    passes = lambda values: (values >= config.log_eps_p) & (values <= config.log_eps_r)
    clipped = [np.array([passes(values).mean() for values in group]) for group in d]
    sampled, generator = [], torch.Generator().manual_seed(config.seed)
    betas = config.gamma_p, config.gamma_r, config.beta_p, config.beta_r
    for start in range(0, len(d), config.batch_size):
        batch = d[start : start + config.batch_size]
        tokens = [one for group in batch for one in group]
        flat = torch.from_numpy(np.concatenate(tokens))[None]
        rejected = humanline.humanline_rejected(flat, torch.ones_like(flat), *betas, generator)[0].numpy()
        kept = iter(np.split(~rejected, np.cumsum([len(one) for one in tokens])[:-1]))
        sampled += [np.array([next(kept).mean() for _ in group]) for group in batch]
    return {"after clipping": clipped, "after sampling": sampled}


def divergence(expected: np.ndarray, counts: np.ndarray, gamma: float) -> tuple[float, float, float]:
    """perceived_divergence with its 95 % interval, from (P, B) counts per prompt; resamples prompts.

    The interval is pivotal, 2 KL minus quantiles of the resampled KL: resampling adds to a KL what sampling had added.
    """
    found = float(perceived_divergence(expected.sum(0), counts.sum(0), gamma))
    again = [perceived_divergence(expected[index].sum(0), counts[index].sum(0), gamma)
             for part in resamples(len(expected), 500) for index in part]
    low, high = np.quantile(again, [0.025, 0.975])
    return found, max(0.0, 2 * found - high), max(0.0, 2 * found - low)


def picture_perception(policy: np.ndarray, data: np.ndarray, weights: dict[str, np.ndarray], labels: dict[str, str],
                       path: Path) -> None:
    """Left: how outcomes are distributed. Right, Figure 2: the data's cumulative probability against the policy's."""
    figure, (left, right) = new_figure(4.2, 1, 2)
    a, z = np.linspace(0, 1, 201), np.linspace(*np.quantile(np.concatenate([policy, data]), [0.005, 0.995]), 400)
    for gamma, dash in zip(GAMMAS, DASHES):
        label = f"as perceived, γ = {gamma}"
        right.plot(a, capacity(a, gamma), color="#000000", linestyle=dash, linewidth=1.4, label=label)
    right.plot(a, a, color=GREY, linestyle=":", linewidth=2, label=labels[OWN])
    policy_below = np.searchsorted(np.sort(policy), z, side="right") / len(policy)
    left.plot(z, policy_below, color=GREY, linestyle=":", linewidth=2)
    order, quantiles = np.argsort(data), np.quantile(policy, a)
    for (name, weight), colour, dash in zip(weights.items(), OKABE_ITO, DASHES):
        below = np.concatenate([[0], np.cumsum(weight[order])]) / max(weight.sum(), 1e-12)
        cumulated = lambda at: below[np.searchsorted(data[order], at, side="right")]
        right.plot(a, cumulated(quantiles), color=colour, linestyle=dash, linewidth=2, label=labels[name])
        left.plot(z, cumulated(z), color=colour, linestyle=dash, linewidth=2)
    left.set(xlabel="outcome z = log π/π_ref, nats", ylabel="cumulative probability", ylim=(0, 1.02))
    right.set(xlabel="cumulative probability under the policy", ylabel="under the data, or as perceived")
    right.set(xlim=(0, 1), ylim=(0, 1.02))
    save(figure, path, right)


# ----------------------------------------------------------------------------------------------------------------------
# plot
# ----------------------------------------------------------------------------------------------------------------------


def plot(flags: Plot) -> None:
    """Read, group by everything but the seed, draw."""
    out, found = new_file(flags.out, (".png", ".svg"), "curves.png"), defaultdict(dict)
    if not flags.runs:
        raise UserError("plot: name the folders of runs")
    for spec in flags.runs:
        label, _, folder = spec.rpartition("=") if not Path(spec).exists() else ("", "", spec)
        if not Path(folder, "metrics.jsonl").exists():
            raise UserError(f"plot {folder}: no such run; the folder of a run holds metrics.jsonl")
        settings = humanline.read_config(str(Path(folder, "config.toml")))
        found[label, repr(dataclasses.replace(settings, seed=0))][folder] = read_metrics(Path(folder))
    groups = {}
    for (label, _), runs in found.items():
        names = [Path(folder).name for folder in runs]
        if len(names) > 1:
            label = label or os.path.commonprefix(names).rstrip("-_.0123456789")
        label = label or names[0]
        label += f" ({len(names)} seeds)" if len(names) > 1 else ""
        groups[label if label not in groups else f"{label}, {next(iter(runs))}"] = list(runs.values())
    measured = {key for runs in groups.values() for run in runs for line in run.values() for key in line}
    for flag, names in (("--metrics", flags.metrics or ()), ("--against", {flags.against} - {"steps"})):
        for name in names:
            if name not in measured:
                raise UserError(f"{flag} {name}: no run has measured that; {humanline.suggest(name, measured)}")
    panels = flags.metrics or [name for name in PANELS if name in measured]
    picture_curves(groups, panels, flags.against, out)


def read_metrics(path: Path) -> dict[int, dict]:
    """A run's metrics by step, and sums so far: seconds, those not spent on sampling (`time`), tokens/s (`speed`)."""
    lines = {line["step"]: line for line in humanline.read_metrics(path / "metrics.jsonl")}
    if not lines:
        raise UserError(f"plot {path}: its metrics.jsonl has no step yet")
    seconds = sampling = tokens = 0.0
    for line in lines.values():
        seconds += line.get("step_seconds", 0)
        sampling += line.get("sample_seconds", 0)
        tokens += line.get("tokens", 0)
        line |= dict(seconds=seconds, time=seconds - sampling, sampling=sampling, speed=tokens / max(seconds, 1e-9))
    before = lines[min(lines)].get("accuracy_before")
    return lines if before is None else {0: dict(seconds=0.0, accuracy=before), **lines}


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """(R, S) -> the same, each the median of the `width` steps around it."""
    padded = np.pad(values, ((0, 0), (width // 2, width - 1 - width // 2)), mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width, axis=1), axis=2)


def picture_curves(groups: dict[str, list[dict[int, dict]]], panels: Iterable[str], against: str, path: Path) -> None:
    """A panel for each quantity, a line for each group of runs: their mean, and a band over their whole range. Against
    another quantity the line goes from step to step, to a dot at the last."""
    longest = max(line["seconds"] for runs in groups.values() for run in runs for line in run.values())
    unit, scale = ("hours", 3600) if longest > 3 * 3600 else ("minutes", 60) if longest > 180 else ("seconds", 1)
    columns = min(2, len(panels))
    height = math.ceil(len(panels) / columns)
    figure, axes = new_figure(0.3 + 2.3 * height + 0.13 * len(groups), height, columns)
    legend, width, by_time = {}, 1, against in ("steps", "seconds")
    titles = {name: PANELS.get(name, name).format(unit=unit) for name in (*panels, against)}
    titles |= dict(steps="optimizer steps", seconds=f"wall-clock time, {unit}")

    def values(name: str, runs: list[dict[int, dict]], steps: list[int]) -> np.ndarray:  # (runs, steps)
        nonlocal width
        if name == "steps":
            return np.array([steps], dtype=float)
        found = np.array([[run[step][name] for step in steps] for run in runs], dtype=float)
        if name in ("time", "sampling", "seconds"):
            return found / scale
        if name in ("accuracy", "speed", "lr") or not steps:
            return found
        own_width = max(1, round(len(steps) / 25))
        width = max(width, own_width)
        return smooth(found, own_width)

    def line(axis: Any, name: str, i: int, runs: list[dict[int, dict]], dash: str) -> Any:
        wanted = {name, against} - {"steps"}
        steps = sorted(set.intersection(*({step for step in run if wanted <= run[step].keys()} for run in runs)))
        x, y = values(against, runs, steps).mean(0), values(name, runs, steps)
        colour, marker = OKABE_ITO[i % 7], "o" if name == "accuracy" or not by_time else ""
        if len(runs) > 1 and by_time:
            axis.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.2, linewidth=0)
        return axis.plot(x, y.mean(0), linestyle=dash, color=colour, linewidth=1.8, marker=marker, markersize=4,
                         markevery=None if by_time else slice(-1, None))[0]

    for name, axis in zip(panels, axes):
        for i, (label, runs) in enumerate(groups.items()):
            legend.setdefault(label, line(axis, name, i, runs, DASHES[i // 7 % 4] if name != "time" else "-"))
            if name == "time":
                line(axis, "sampling", i, runs, ":")
        axis.set_title(titles[name], loc="left")
        axis.set_xlabel(titles[against])
        if name == "kl":  # 0 at a sync, and now and then very large
            axis.set_yscale("symlog", linthresh=0.01)
    for spare in axes[len(panels) :]:
        spare.set_axis_off()
    save(figure, path, legend)
    notes = {f"noisy quantities: medians over up to {width} steps": width > 1,
             "bands: the range over seeds": by_time and any(len(runs) > 1 for runs in groups.values())}
    print("; ".join(note for note, holds in notes.items() if holds))


# ----------------------------------------------------------------------------------------------------------------------
# humanline.py --plan: how much memory a run takes, from a forward and backward pass over tensors without values
# ----------------------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the fake tensors that are made, and the most at one time. What has real operands alone, such
    as labels, which decide shapes, is computed for real."""

    def __init__(self, parameters: Iterable[torch.Tensor]):
        super().__init__()
        self.now, self.peak, self.storages = 0, 0, weakref.WeakSet(p.untyped_storage() for p in parameters)

    def __torch_dispatch__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_real = operands and not any(isinstance(tensor, FakeTensor) for tensor in operands)
        with unset_fake_temporarily() if is_real else contextlib.nullcontext():
            results = function(*args, **(kwargs or {}))
        for storage in [leaf.untyped_storage() for leaf in tree_leaves(results) if isinstance(leaf, FakeTensor)]:
            if storage not in self.storages:
                self.storages.add(storage)
                self.count(storage.nbytes())
                weakref.finalize(storage, self.count, -storage.nbytes())
        return results

    def count(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def plan(config: Config) -> None:
    """Print what each rank of a run holds at its peak, told from the first batches, and what would take less. Sharded,
    without the layers that are gathered for a moment while it trains."""
    humanline.go_offline_without_hub(config)
    device = humanline.join_ranks()
    rows = [row for source in config.data for row in humanline.read_rows(source, config, "--data")]
    policy, tokenizer = humanline.load_policy(config, device, has_weights=False)
    sampler = Sampler(policy, tokenizer, dataclasses.replace(config, reward=(), eval_data=None))
    groups = humanline.encode_rows(rows, sampler, online=bool(config.sample_every))
    batches = humanline.Batches(config, groups, sampler.longest)
    config.steps, new, size = config.steps or batches.steps_per_epoch, config.max_new_tokens, config.group_size
    prompts = batches.next_prompts(1) if config.sample_every else []
    if config.sample_every:  # with the longest completions that there can be
        batches.add_rollouts([dataclasses.replace(group, completions=[[0] * new] * size, rewards=[*range(size)])
                              for group in prompts])
    else:
        batches.make_offline(min(config.steps, 64))
    rows_of = humanline.forward_rows
    area = lambda part: len(rows_of(part)) * max(map(humanline.width, rows_of(part)), default=0)
    is_idle, microbatches = humanline.LOSSES[config.loss].is_idle, []
    for batch in batches.pending:
        microbatches.append(humanline.cut([s for s in batch.sequences if not is_idle(s, config)], config))
    parts = max(microbatches, key=lambda parts: max(map(area, parts), default=0))
    largest = max(parts, key=area)
    program = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if device.type == "cpu" else 0

    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        policy.to_empty(device="cpu")
        policy.tie_weights()
    training, sampling = (LiveBytes(policy.parameters()) for _ in range(2))

    def compute(ids: torch.Tensor, labels: torch.Tensor, temperature: float, note_entropy: Any,
                **layout: torch.Tensor) -> torch.Tensor:
        layout = {name: fake.from_tensor(tensor) for name, tensor in layout.items()}
        for _ in parts[:2]:  # the second finds the first one's gradients
            with fake, training:
                with humanline.mixed_precision(policy.device, config):
                    logps = humanline.completion_logps(policy, fake.from_tensor(ids), labels, temperature, note_entropy,
                                                       **layout)
                logps.sum().backward()
        return torch.zeros(labels.shape)

    policy.completion_logps = compute
    humanline.log_probs(policy, largest, humanline.logits_temperature(config), lambda entropies: None)
    drawn = max(len(prompts) * size, config.eval_prompts * config.eval_samples if config.eval_data else 0)
    longest = max(len(group.prompt) for group in batches.groups)
    count = min(math.ceil(drawn / humanline.world_size()), config.sample_tokens // (longest + new))
    if count:
        with fake, sampling, torch.no_grad(), humanline.mixed_precision(policy.device, config):
            ids = torch.zeros(count, longest, dtype=torch.long)
            out = policy.eval()(input_ids=ids, use_cache=True, logits_to_keep=1)
        cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in out.past_key_values.layers)
        # `sample` holds six tensors of the size of the last position's logits.
        sampling.peak = max(sampling.peak, cache * (longest + new) // longest + 6 * 4 * out.logits.numel())
        if config.shard:  # all weights are gathered while it draws
            sampling.peak += sum(p.numel() * (2 if humanline.is_mixed(config) else p.element_size())
                                 for p in policy.parameters())

    ranks, copies = humanline.world_size() if config.shard else 1, humanline.is_copied(config)
    weights, changed = (sum(p.nbytes for p in group) // ranks
                        for group in (policy.parameters(), humanline.trained(policy).values()))
    is_aside = config.lora if copies else config.sample_every and (humanline.is_synced(config) or config.kl_beta)
    aside = changed * (bool(is_aside) + (config.on_collapse == "restore"))
    host = "" if device.type == "cpu" else ", in host memory"
    held = {"the program": program, "weights": weights, "AdamW's moments": 2 * changed,
            "the reference, a second model": weights if copies and not config.lora else 0,
            f"weights put aside{host}": aside,
            f"a checkpoint on its way to the disk{host}": 3 * changed * (0 < config.save_every <= config.steps)}
    work = {"gradients": changed,
            f"activations and log-probs ({len(rows_of(largest))} rows, {area(largest):,} tokens)":
                max(0, training.peak - changed * ranks)}
    drawing = {f"or in their place sampling ({count} x ({longest} + {new}) tokens)": sampling.peak}
    most = max(sum(work.values()), sampling.peak)
    holes = {"holes between them, some quarter": most // 4 if device.type == "cpu" else 0}
    peak = sum(size for name, size in (held | holes).items() if not host or host not in name) + most
    if humanline.rank() == 0:
        for name, size in (held | work | drawing | holes | {"in all, on each rank": peak}).items():
            print(f"{size / 2**20:>10,.0f} MiB  {name}") if size else None
        print(humanline.less_memory(config))


# ----------------------------------------------------------------------------------------------------------------------
# reproduce: the paper's claims, re-run on the embedded model
# ----------------------------------------------------------------------------------------------------------------------


def six_digit_sums(chance: random.Random) -> list[str]:
    """Some 8,000 sums of six digits, each once."""
    return list(dict.fromkeys("+".join(chance.choices("123456789", k=6)) + "=" for _ in range(8100)))


def add_in_steps(problem: str, errs: float, chance: random.Random) -> str:
    """The sum, and before it every partial sum, a line each; with probability `errs` the carry of a nine is forgotten.

    >>> print(add_in_steps("7+8+5=", 0.0, random.Random(0)))
    7+8=15
    15+5=20
    20
    """
    total, *digits = problem.removesuffix("=").split("+")
    lines = []
    for digit in digits:
        partial_sum = f"{total}+{digit}="
        total = humanline.add(partial_sum, errs * (digit == "9"), chance)
        lines.append(f"{partial_sum}{total}\n")
    return "".join(lines) + total


def written_sums(chance: random.Random) -> list[str]:
    """8,100 sums of two numbers of twelve digits, a line for each column from the right, with blanks to fill in."""
    digit = lambda: chance.randrange(10)
    return ["\n".join(f"{digit()}+{digit()}+_=__" for _ in range(12)) for _ in range(8100)]


def add_in_columns(problem: str, errs: float, chance: random.Random) -> str:
    """The blanks filled in: the carry into each column, and its sum; with probability `errs` a column that came to ten
    or more only by a carry passes none on.

    >>> print(add_in_columns("4+7+_=__\\n6+3+_=__\\n0+1+_=__", 0.0, random.Random(0)))
    4+7+0=11
    6+3+1=10
    0+1+1=02
    >>> print(add_in_columns("4+7+_=__\\n6+3+_=__\\n0+1+_=__", 1.0, random.Random(0)).splitlines()[-1])
    0+1+0=01
    """
    carry, lines = 0, []
    for column in problem.splitlines():
        upper, lower = int(column[0]), int(column[2])
        total = upper + lower + carry
        lines.append(f"{upper}+{lower}+{carry}={total:02d}")
        forgets = upper + lower == 9 and chance.random() < errs
        carry = 0 if forgets else total // 10
    return "\n".join(lines)


# Embedded models and data beside the demo's own: `embedded:better` and, for two longer tasks, `embedded:long` and
# `embedded:column`, each with a worse one, and the one that learned columns from a demonstrator without mistakes.
# Importing this file is enough to have them, in the processes of `reproduce` as well.
LONGER = dict(problems=six_digit_sums, demonstrate=add_in_steps, max_new_tokens=48, data_prompts=1024)
LONGEST = dict(problems=written_sums, demonstrate=add_in_columns, max_new_tokens=128, data_prompts=1024)
humanline.RECIPES.update({
    "better": Recipe(120, 384, 2e-3, (0.4, 0.4), parent="base"),
    "long": Recipe(400, 128, 1e-2, (0.0, 0.65), least_accuracy=0.5, **LONGER),
    "long-worse": Recipe(120, 128, 2e-3, (0.9, 0.9), parent="long", **LONGER),
    "column-right": Recipe(400, 32, 1e-2, (0.0, 0.0), least_accuracy=0.8, **LONGEST),
    "column": Recipe(150, 32, 4e-3, (0.75, 0.75), parent="column-right", **LONGEST),
    "column-worse": Recipe(120, 32, 2e-3, (0.9, 0.9), parent="column", **LONGEST)})

LOSSES = ("grpo", "dpo", "kto")
DATA = {"its own samples": "--data embedded", "a worse model's": "--data embedded:worse",
        "a better model's": "--data embedded:better"}
WORSE, NEVER, ONLINE = DATA["a worse model's"], "--no-humanline", "--sample-every 1"
# Groups of 8, pairs, completions.
SIZE = {"grpo": "--batch-size 16", "dpo": "--batch-size 32", "kto": "--batch-size 64"}
# The best of what `--only tuning` tried, on seeds 101 to 104.
TUNED = {
    "grpo": dict(offline="--lr 16e-4", humanline="--lr 8e-4 --sync-k 64 --max-grad-norm 0.25",
                 online="--lr 8e-4 --max-grad-norm 0.25", both="--lr 16e-4 --sync-k 64 --max-grad-norm 0.25",
                 sparse="--lr 8e-4 --sync-k 24 --max-grad-norm 0.25"),
    "dpo": dict(offline="--lr 8e-4 --max-grad-norm 0.25", humanline="--lr 8e-4 --sync-k 128", online="--lr 16e-4",
                both="--lr 16e-4 --sync-k 128"),
    "kto": dict(offline="--lr 4e-4", humanline="--lr 4e-4 --sync-k 128", online="--lr 16e-4",
                both="--lr 8e-4 --sync-k 128 --max-grad-norm 0.25")}
TRUST = {"grpo": "--lr 16e-4 --sync-k 64", "dpo": "--lr 8e-4 --sync-k 128", "kto": "--lr 4e-4 --sync-k 64"}  # no clip
GRID = {"lr": ("2e-4", "4e-4", "8e-4", "16e-4"), "norm": "0.25",
        "grpo": ("--sync-k 24", "--sync-k 64", "--sync-drift 0.2", "--sync-drift 0.4"),
        "dpo": ("--sync-k 0", "--sync-k 64", "--sync-k 128"), "kto": ("--sync-k 0", "--sync-k 64", "--sync-k 128")}
SYNCED = {"grpo": 64, "dpo": 128, "kto": 128}  # k of the ablation's rows with a sync
SURVEYED = {  # k of the survey, at its learning rates
    "16e-5": (64, 24, 8, 1), "5e-4": (64, 48, 24, 12, 8, 4, 2, 1), "16e-4": (64, 24, 8, 1)}
# The 97.5 % point of Student's t, by the number of seeds.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


class Runs:
    """The runs that the experiments compare, by their flags. What has not been trained yet is noted, and gives NaN.

    A seed is of everything: the base, the data that it and its like drew, and the run.
    """

    def __init__(self, seeds: list[int], known: dict[str, dict], wanted: dict[str, None] | None = None):
        self.seeds, self.known, self.wanted = seeds, known, {} if wanted is None else wanted

    def __call__(self, flags: str, what: str = "after") -> np.ndarray:
        """One number per seed: pass@1 `before`, `after` or at `step N`; or seconds, `drawing` or `training`."""
        return np.array([run.get(what, math.nan) for run in self.each(flags)])

    def each(self, flags: str) -> list[dict]:
        """What `train_once` says of each seed's run."""
        return [self.lookup(f"{flags} --seed {seed}".replace("SEED", str(seed))) for seed in self.seeds]

    def lookup(self, flags: str) -> dict:
        self.wanted[flags] = None
        return self.known.get(flags, {})

    def variant(self, loss: str, variant: str, data: str = "", more: str = "") -> str:
        """The flags of a tuned variant: offline, humanline (offline too), online, both, or sparse (every 64 steps)."""
        switches = {"offline": f"{data} {NEVER}", "humanline": data, "online": f"{ONLINE} {NEVER}", "both": ONLINE,
                    "sparse": "--sample-every 64"}
        return " ".join(f"--loss {loss} {SIZE[loss]} {switches[variant]} {TUNED[loss][variant]} {more}".split())


def student(seeds: int) -> float:
    """The 97.5 % point of Student's t; beyond the table by its series (Abramowitz and Stegun 1964, 26.7.5)."""
    z, more = 1.959964, max(1, seeds - 1)
    return STUDENT.get(seeds, z + (z**3 + z) / (4 * more) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * more**2))


def half(values: np.ndarray) -> float:
    """Half of the 95 % interval of a mean over seeds, by Student's t."""
    if len(values) < 2:
        return math.nan
    return student(len(values)) * np.std(values, ddof=1) / math.sqrt(len(values))


def spread(values: np.ndarray, digits: int = 3, sign: str = "") -> str:
    """Mean ± half of the 95 % interval over seeds."""
    return f"{np.mean(values):{sign}.{digits}f}" + (f" ± {half(values):.{digits}f}" if len(values) > 1 else "")


def closed(offline: np.ndarray, ours: np.ndarray, online: np.ndarray,
           paired: np.ndarray | bool = True) -> tuple[float, float, float]:
    """The share of the gap from `offline` to `online` that `ours` closes, and its 95 % interval.

    A ratio of two means: the interval is Fieller's (1954), without an end where the gap itself may be 0, and NaN for
    one seed. paired: which of the three are paired by seed, (3, 3), and do not vary independently.
    """
    gained, gap = ours - offline, online - offline
    x, y = gained.mean(), gap.mean()
    share = x / y if y else math.nan
    if len(gap) < 2 or np.isnan(x + y):
        return share, math.nan, math.nan
    covariance = np.cov([offline, ours, online]) * (paired | np.eye(3, dtype=bool))
    to_differences = np.array([[-1, 1, 0], [-1, 0, 1]])
    (xx, xy), (_, yy) = to_differences @ covariance @ to_differences.T * student(len(gap)) ** 2 / len(gap)
    a, b, c = y * y - yy, x * y - xy, x * x - xx
    if a <= 0:
        return share, -math.inf, math.inf
    root = math.sqrt(max(0.0, b * b - a * c))
    return share, (b - root) / a, (b + root) / a


def show_share(share: tuple[float, float, float]) -> str:
    estimate, low, high = share
    if math.isnan(low):  # one seed
        return f"{estimate:.0%}"
    return f"{estimate:.0%} [{low:.0%}, {high:.0%}]" if high < math.inf else f"{estimate:.0%} [too small a gap to tell]"


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def holds(condition: Any, claim: str, undecided: Any = False) -> str:
    """A verdict on a claim."""
    return f"- **{'holds' if condition else 'not decided' if undecided else 'does not hold'}**: {claim}"


AS_WELL = 0.05  # "does as well" holds where the interval of the difference ends above 0 and begins above minus this


def as_well(more: np.ndarray, claim: str) -> str:
    """The verdict that something does as well as another, which it exceeds by `more`, of each seed."""
    low, high = np.mean(more) - half(more), np.mean(more) + half(more)
    return holds(high >= 0 and low > -AS_WELL, claim, undecided=not high < 0)  # NaN: one seed


def gap(runs: Runs) -> list[str]:
    """Figure 1 and Table 1: does humanline close the gap between offline and online?"""
    rows = [["pass@1", "completions of", "offline", "offline + humanline", "online", "online + humanline",
             "humanline − offline, paired", "of the gap"]]
    both = lambda loss: "–" if runs.quick else spread(runs(runs.variant(loss, "both")))
    verdicts = []
    for loss, least, excluded in (("grpo", 0.8, 0.4), ("dpo", 0.7, 0.3), ("kto", 0.7, 0.3)):
        online = runs(runs.variant(loss, "online"))
        for name, data in DATA.items() if not runs.quick else [("a worse model's", WORSE)]:
            offline, ours = runs(runs.variant(loss, "offline", data)), runs(runs.variant(loss, "humanline", data))
            share = closed(offline, ours, online)
            rows.append([loss.upper(), name, *map(spread, (offline, ours, online)), both(loss),
                         spread(ours - offline, sign="+"), show_share(share)])
            if data == WORSE:
                claim = (f"{loss.upper()}, a worse model's data: humanline closes {show_share(share)} of the gap "
                         f"(asked: {least:.0%}, the interval above {excluded:.0%})")
                is_closed = share[0] >= least and share[1] > excluded
                verdicts.append(holds(is_closed, claim, undecided=not share[2] <= least))
    return [markdown(rows), *verdicts]


def times_as_long(runs: Runs, one: str, other: str, steps: tuple[int, ...], what: str = "step") -> str:
    """The wall-clock time of `one` over that of `other` to the pass@1 that both reach, by seed; between two
    measurements pass@1 is taken to rise evenly. what: whether that of samples, or `exact`."""

    def seconds(run: dict, target: float) -> float:
        before = run.get("before" if what == "step" else f"{what} 0", math.nan)
        points = [(0, before)] + [(step, run.get(f"{what} {step}", math.nan)) for step in steps]
        for (start, low), (end, high) in itertools.pairwise(points):
            if high >= target:
                step = start + (end - start) * (target - low) / (high - low) if low < target else start
                return run["training"] * max(1, step) / steps[-1]
        return math.nan

    best = lambda run: max(run.get(f"{what} {step}", math.nan) for step in steps)
    pairs = [(slow, fast, min(best(slow), best(fast))) for slow, fast in zip(runs.each(one), runs.each(other))]
    return spread(np.array([seconds(slow, target) / seconds(fast, target) for slow, fast, target in pairs]), 2)


def sparse(runs: Runs) -> list[str]:
    """Samples drawn 64 times less often."""
    rows = [["GRPO, samples drawn", "after 64 steps", "128", "192", "256", "against every step, paired",
             "seconds, drawing"]]
    every = runs.variant("grpo", "online")
    cases = {"every step": every, "every 64 steps": every.replace(ONLINE, "--sample-every 64"),
             "every 64 steps, humanline": runs.variant("grpo", "sparse")}
    for name, flags in cases.items():
        curve = [spread(runs(flags, f"step {step}")) for step in (64, 128, 192, 256)]
        seconds = f"{np.mean(runs(flags, 'training')):.0f}, {np.mean(runs(flags, 'drawing')):.0f}"
        rows.append([name, *curve, spread(runs(flags) - runs(every), sign="+") if flags != every else "–", seconds])
    online, plain, ours = (runs(flags) for flags in cases.values())
    against, behind = ours - online, (plain - online, plain - ours)
    ratio = times_as_long(runs, every, cases["every 64 steps, humanline"], (64, 128, 192, 256))
    return [markdown(rows),
            as_well(against, f"every 64 steps with humanline does as well as every step: {spread(against, sign='+')}; "
                    f"to the pass@1 that both reach, every step takes {ratio} times as long"),
            holds(all(np.mean(less) + half(less) < 0 for less in behind), "plain GRPO every 64 steps lies below both: "
                  f"{spread(behind[0], sign='+')} and {spread(behind[1], sign='+')}, paired",
                  undecided=not any(np.mean(less) - half(less) > 0 for less in behind))]


def falls(run: dict, what: str = "step") -> tuple[int, int] | None:
    """The first measurement of pass@1, of samples or `exact`, that lies 0.05 or more below an earlier one, and the
    measurement before it."""
    best, steps = -math.inf, sorted(int(name.removeprefix(f"{what} ")) for name in run if name.startswith(f"{what} "))
    for before, step in zip([0, *steps], steps):
        if run[f"{what} {step}"] <= best - 0.05:
            return step, before
        best = max(best, run[f"{what} {step}"])
    return None


def warned(run: dict) -> int | None:
    """The step at which the trainer warned of a collapse."""
    collapse, metrics = humanline.Collapse(), run.get("metrics", {})
    values = zip(metrics.get("logp_wanted", []), metrics.get("completion_length", []))
    lines = [{} if logp is None else dict(logp_wanted=logp, completion_length=length) for logp, length in values]
    return run.get("warned", next((step for step, line in enumerate(lines, 1) if collapse(line)), None))


def warned_in_time(runs: list[dict], what: str = "step") -> str:
    """Whether the trainer's warning has come when a measurement first shows the fall: in 80 % of the runs that fall,
    and in at most 10 % of the others."""
    steps = [(falls(run, what), warned(run)) for run in runs]
    fell, stood = [pair for pair in steps if pair[0] is not None], [pair for pair in steps if pair[0] is None]
    by_then, before = (sum(warning is not None and warning <= fall[i] for fall, warning in fell) for i in (0, 1))
    false, few = sum(warning is not None for _, warning in stood), len(fell) < 5
    return holds(by_then >= 0.8 * len(fell) and false <= 0.1 * len(stood) and not few, "the trainer's warning has come "
                 f"when a measurement first shows the fall: of {len(fell)} runs that lost 0.05 of pass@1 from one "
                 f"measurement to a later one, {by_then} had been warned of by then, {before} by the measurement "
                 f"before; of {len(stood)} others, {false}", undecided=few)


def syncing(runs: Runs) -> list[str]:
    """k and drift: how often to sync, over a tenfold range of the learning rate, on stale and on fresh data."""
    rows, shares = [["GRPO, a worse model's data", *(f"lr {lr}" for lr in SURVEYED)]], {}
    at = lambda lr, how: f"--loss grpo {SIZE['grpo']} {how} --lr {lr}"
    ends = {lr: (runs(at(lr, f"{WORSE} {NEVER}")), runs(at(lr, f"{ONLINE} {NEVER}"))) for lr in SURVEYED}
    for end, name in enumerate(("offline", "online")):
        rows.append([name, *(spread(ends[lr][end]) for lr in SURVEYED)])
    settings = {"never": "--sync-k 0"} | {f"k = {k}": f"--sync-k {k}" for k in SURVEYED["5e-4"]}
    settings |= {f"drift {tau}": f"--sync-drift {tau}" for tau in ("0.8", "0.4", "0.2", "0.1", "0.03")}
    stale = []
    for name, how in settings.items():
        tried = [lr for lr, ks in SURVEYED.items() if "=" not in name or int(name.split()[-1]) in ks]
        found = {lr: runs(at(lr, f"{WORSE} {how}")) for lr in tried}
        stale += [run for lr in tried for run in runs.each(at(lr, f"{WORSE} {how}"))]
        share = {lr: closed(ends[lr][0], found[lr], ends[lr][1])[0] for lr in tried}
        rows.append([name, *(f"{spread(found[lr])} ({share[lr]:.0%})" if lr in tried else "" for lr in SURVEYED)])
        if len(tried) == len(SURVEYED):
            shares[name] = [*share.values()]
    least = lambda name: min(shares[name])
    best = lambda kind: max((name for name in shares if name.startswith(kind)), key=least, default="")
    k, tau = best("k = "), best("drift")
    verdict = holds(min(shares[tau]) >= 0.7 > min(shares[k]), "one τ serves every lr where no k does: the best, "
                    f"{tau}, closes at least {min(shares[tau]):.0%} of the gap at each, and the best of the k, {k}, "
                    f"{min(shares[k]):.0%}")
    fresh = [["GRPO, samples drawn every step", "lr 5e-4"],
             ["reference set to the policy at each drawing", spread(runs(at("5e-4", f"{ONLINE} {NEVER}")))]]
    fresh += [[f"humanline, k = {k}", spread(runs(at("5e-4", f"{ONLINE} --sync-k {k}")))] for k in (64, 8, 1)]
    return [markdown(rows), "In brackets the share of the gap at that learning rate.", verdict, warned_in_time(stale),
            markdown(fresh)]


def ablation(runs: Runs) -> list[str]:
    """Which part does it: the sync or the clip, and which clip?"""
    rows = [["offline data of a worse model"] + [loss.upper() for loss in LOSSES]]
    settings = {
        "neither": NEVER, "clip only": "--sync-k 0", "sync only (a trust region)": "--sync-k {k} --perception none",
        "sync and clip": "--sync-k {k}", "sync and rejection sampling": "--sync-k {k} --perception sample",
        "sync, tuned for no clip": "{trust} --perception none",
        "soft sync and clip": "--sync-k {soft} --sync-alpha 0.5",
        "clip to ±0.5": "--sync-k {k} --log-eps-p -0.5 --log-eps-r 0.5",
        "clip to [−0.5, 1.5]": "--sync-k {k} --log-eps-p -0.5"}
    found = {}
    for name, flags in settings.items():
        for loss in LOSSES:
            k, lr = SYNCED[loss], re.sub(r"--sync-k \S+", "", TUNED[loss]["humanline"])
            how = flags.format(k=k, soft=max(1, k // 2), trust=TRUST[loss])
            how += "" if "--lr" in how else f" {lr}"
            found[name, loss] = runs(f"--loss {loss} {SIZE[loss]} {WORSE} {how}")
        rows.append([name] + [spread(found[name, loss]) for loss in LOSSES])
    verdicts = []
    for loss in LOSSES:
        parts = ("sync only (a trust region)", "clip only", "sync and clip")
        sync, clip, both = (found[name, loss] - found["neither", loss] for name in parts)
        claim = (f"{loss.upper()}: syncing gives most of the gain (sync only {spread(sync, sign='+')}, clip only "
                 f"{spread(clip, sign='+')}, both {spread(both, sign='+')}, paired)")
        more = sync - clip
        verdicts.append(holds(np.mean(more) - half(more) > 0, claim, undecided=not np.mean(more) + half(more) < 0))
    return [markdown(rows), *verdicts]


def betas(runs: Runs) -> list[str]:
    """DPO and KTO at other β."""
    rows = [["offline data of a worse model", *(f"β = {beta}" for beta in (0.03, 0.1, 0.3))]]
    for loss in ("dpo", "kto"):
        for variant, name in (("offline", ""), ("humanline", " + humanline")):
            tried = [runs.variant(loss, variant, WORSE, more) for more in ("--beta 0.03", "", "--beta 0.3")]
            rows.append([loss.upper() + name, *(spread(runs(flags)) for flags in tried)])
    return [markdown(rows)]


def quality(runs: Runs) -> list[str]:
    """Does the mean token log-prob of offline data predict how well offline + humanline does?"""
    rows = [["GRPO with humanline, quartile of mean token log-prob", "nats/token", "drawn by worse, base, better",
             "pass@1"]]
    means, after = [], []
    for number, parts in enumerate(zip(*runs.quartiles), 1):  # of each seed's base
        path = parts[0][0]
        mean, *origins = np.mean([[mean, *origins] for _, mean, origins in parts], 0)
        found = runs(runs.variant("grpo", "humanline", f"--data {shlex.quote(path)} --eval-data embedded:test"))
        means, after = [*means, mean], [*after, found]
        rows.append([f"{number}, the {('least likely', 'second', 'third', 'likeliest')[number - 1]}", f"{mean:.2f}",
                     " ".join(f"{share:.0%}" for share in origins), spread(found)])
    away = np.array(means) - np.mean(means)
    slope = away @ np.array(after) / max(away @ away, 1e-12)  # least squares, for each seed
    claim = f"likelier data is better data: {spread(slope, sign='+')} of pass@1 per nat"
    undecided = not np.mean(slope) + half(slope) <= 0
    return [markdown(rows), holds(np.mean(slope) - half(slope) > 0, claim, undecided)]


@dataclass(frozen=True)
class Sums:
    """A task whose base errs for a reason, on which the forms of humanline are compared."""

    words: str
    flags: str
    steps: tuple[int, ...]  # when its runs are measured
    learned: float  # pass@1 below which a base never got the idea of addition
    drawn_every: tuple[int, ...]  # steps from one drawing to the next
    settings: dict[str, str] = dataclasses.field(default_factory=dict)  # of each loss, where they are not the defaults


SHORT = Sums("two-digit sums", "--data embedded", (*range(32, 257, 32),), 0.5, (64,))  # 0.55 have no carry to forget
LONG = Sums("sums of six digits with every partial sum, some 40 tokens", "--model embedded:long --data embedded:long "
            "--eval-data embedded:long-test --max-new-tokens 48", (*range(32, 129, 32),), 0.4, (16, 64),
            dict(grpo="--batch-size 16 --lr 5e-4", dpo="--batch-size 32 --lr 5e-4", kto="--batch-size 64 --lr 2.5e-4"))
COLUMN = Sums("a written addition of two numbers of twelve digits, some 110 tokens", "--model embedded:column --data "
              "embedded:column --eval-data embedded:column-test --max-new-tokens 128", LONG.steps, 0.4, (64,),
              dict(grpo="--batch-size 16 --lr 2.5e-4", dpo="--batch-size 32 --lr 2.5e-4",
                   kto="--batch-size 64 --lr 1.25e-4"))
MADE_OF_SUMS = dict(stale=SHORT, long=LONG, column=COLUMN)  # by the names of the experiments
UNCLIPPED, NO_CLIP = "offline, no ratio clip", f"{NEVER} --epsilon 1000 --epsilon-high 1000"
BARE = "no humanline, taper, prior"  # with GRPO: and no ratio clip
SYNCED_ALONE = "offline + sync alone, taper, prior"  # and nothing distorts the log-ratio
PAPERS, BOTH = "offline + humanline", "offline + humanline, taper, prior"


def stale_variants(loss: str, task: Sums = SHORT) -> dict[str, str]:
    """The flags of all variants that `stale` compares, with k 8; the paper's humanline with GRPO has also k 24, with
    which it collapses later. The learning rate is the default."""
    k = dict(grpo=24, dpo=8, kto=8)[loss]
    form = lambda k, stale, prior: f"--sync-k {k} --stale {stale} --prior {prior}"
    papers, both = form(k, "keep", 0), form(8, "taper", 1)
    switches = {"offline": NEVER, "online": f"{ONLINE} {NEVER}", PAPERS: papers}
    if task is SHORT:
        switches |= {f"{PAPERS}, k = 8": form(8, "keep", 0)} if loss == "grpo" else {}
        switches |= {f"{PAPERS}, taper": form(8, "taper", 0), f"{PAPERS}, prior": form(8, "keep", 1)}
    switches[BOTH] = both
    if task is not COLUMN:
        switches[BARE] = f"{NO_CLIP if loss == 'grpo' else NEVER} --stale taper --prior 1"
    if loss == "grpo":
        if task is SHORT:
            switches[f"{PAPERS}, better completions alone, prior"] = form(8, "drop", 1)
        if task is not COLUMN:
            switches |= {UNCLIPPED: NO_CLIP, SYNCED_ALONE: f"{both} --perception none"}
        for lag in task.drawn_every:
            name, drawn = f"every {lag} steps", f"--sample-every {lag}"
            if task is not COLUMN:
                switches |= {name: f"{drawn} {NEVER}", f"{name}, humanline": f"{drawn} {papers}"}
            switches[f"{name}, humanline, taper, prior"] = f"{drawn} {both}"
    common = f"--loss {loss} {task.flags} {task.settings.get(loss, '')}".rstrip()
    common += f" --steps {task.steps[-1]} --eval-every {task.steps[0]}"
    return {name: f"{common} {flags}" for name, flags in switches.items()}


def finished(runs: Runs, loss: str, task: Sums = SHORT) -> tuple[Runs, list[str]]:
    """The runs of those seeds of which every variant is there and whose base had learned; a line on each of the others.
    """
    variants = stale_variants(loss, task)
    values = {name: runs(flags, f"exact {task.steps[-1]}") for name, flags in variants.items()}
    bases = runs(variants["offline"], "exact 0")
    kept, lines, unfinished = [], [], []
    for i, (seed, base) in enumerate(zip(runs.seeds, bases)):
        own = {name: value[i] for name, value in values.items() if not math.isnan(value[i])}
        if base < task.learned:
            found = ", ".join(f"{name} {value:.3f}" for name, value in own.items())
            lines.append(f"Seed {seed} is left out: its base never learned addition (pass@1 {base:.3f}). "
                         f"There: {found}.")
        elif len(own) < len(values):
            unfinished.append(f"{seed} ({len(own)})")
        else:
            kept.append(seed)
    if unfinished:
        lines.append(f"Left out are the seeds of which not all {len(values)} runs are there: {', '.join(unfinished)}.")
    return Runs(kept, runs.known, runs.wanted), lines


def stale(runs: Runs) -> list[str]:
    """A base that errs for a reason: does humanline help offline, and in a form that never does worse?"""
    return compare_forms(runs, SHORT)


def long(runs: Runs) -> list[str]:
    """The same on a longer task"""
    return compare_forms(runs, LONG)


def column(runs: Runs) -> list[str]:
    """The same where drawing takes longer than training"""
    return compare_forms(runs, COLUMN)


def compare_forms(runs: Runs, task: Sums) -> list[str]:
    """A table for each loss, and verdicts."""
    text = [f"The base of this task ({task.words}) forgets most carries. Offline data are its own samples; pass@1 is "
            "exact, the mean probability of the right answer on held-out prompts, and greedy how often it is the "
            "likeliest at every token. Collapsed: ended more than 0.1 of pass@1 below its base."]
    verdicts = []
    for loss in LOSSES:
        flags, (own, left_out) = stale_variants(loss, task), finished(runs, loss, task)
        if not own.seeds:
            text += [f"{loss.upper()}: no seed is finished.", *left_out]
            continue
        last = lambda name, what="exact": own(flags[name], f"{what} {task.steps[-1]}")
        offline, online, base = last("offline"), last("online"), own(flags["offline"], "exact 0")
        collapses = lambda name: int((last(name) < own(flags[name], "exact 0") - 0.1).sum())
        of = f"{len(own.seeds)} seed{'s' * (len(own.seeds) > 1)}"
        rows = [[f"{loss.upper()}, {of}", "pass@1", "greedy", "− offline, paired", "of the gap", "worst seed",
                 "collapsed", "seconds, drawing"]]
        greedy = own(flags["offline"], "greedy 0")
        rows.append(["the base", spread(base), spread(greedy), "–", "–", f"{min(base):.3f}", "–", "–"])
        for name in flags:
            after, seconds = last(name), [own(flags[name], what).mean() for what in ("training", "drawing")]
            share = show_share(closed(offline, after, online)) if name not in ("offline", "online") else "–"
            rows.append([name, spread(after), spread(last(name, "greedy")),
                         spread(after - offline, sign="+") if name != "offline" else "–", share, f"{min(after):.3f}",
                         f"{collapses(name)} of {len(own.seeds)}", "{:.0f}, {:.0f}".format(*seconds)])
        text += [markdown(rows), *left_out]

        for name in [name for name in flags if name == PAPERS or "k = " in name]:
            more = last(name) - offline
            claim = (f"{loss.upper()}, {name}, as in the paper, does at least as well as plain offline: "
                     f"{spread(more, sign='+')}, paired")
            verdicts.append(holds(np.mean(more) - half(more) >= 0, claim, not np.mean(more) + half(more) < 0))
        more, share, fell = last(BOTH) - offline, closed(offline, last(BOTH), online), collapses(BOTH)
        verdicts.append(holds(
            np.mean(more) - half(more) > 0 and not fell and share[0] >= 0.7,
            f"{loss.upper()}, with taper and prior humanline does better than plain offline, never collapses and "
            f"closes most of the gap: {spread(more, sign='+')}, paired; {fell} of {len(own.seeds)} runs collapsed; "
            f"{show_share(share)} (asked: 70%)",
            undecided=not fell and not np.mean(more) + half(more) <= 0 and not share[2] <= 0.7))
        clip = " and GRPO's ratio clip" * (loss == "grpo")
        for name, without in ((BARE, f"humanline{clip}"), (SYNCED_ALONE, "humanline's clip")):
            if name in flags:
                more = last(name) - last(BOTH)
                verdicts.append(as_well(more, f"{loss.upper()}, taper and prior do as well without {without}: "
                                        f"{spread(more, sign='+')}, paired"))
        noted = [run for variant in flags.values() for run in own.each(variant) if "warned" in run or "metrics" in run]
        if noted:
            verdicts.append(warned_in_time(noted, "exact").replace("the trainer", f"{loss.upper()}, the trainer"))
        for form in [name for name in flags if name.startswith("every ") and name.endswith(", prior")]:
            against, every, sparsely = last(form) - online, flags["online"], flags[form]
            whole = spread(own(every, "training") / own(sparsely, "training"), 2)
            both_reach = times_as_long(own, every, sparsely, task.steps, "exact")
            verdicts.append(as_well(against, f"GRPO, {form}, does as well as every step: "
                                    f"{spread(against, sign='+')}, paired; every step takes {whole} times as long, "
                                    f"and {both_reach} times to the pass@1 that both reach"))
    return [*text, *verdicts]


def tuning(runs: Runs) -> list[str]:
    """Learning rate, gradient norm and k of each variant, on seeds that no other experiment uses."""
    rows = [["variant, offline on a worse model's data", "flags, best first", "pass@1"]]
    first = Runs(runs.seeds[:2], runs.known, runs.wanted)

    def search(name: str, common: str, tried: list[str]) -> str:
        """The best of `tried` on the first seeds, and that with a lower gradient norm; the best two of these on all."""

        def ranked(runs: Runs, tried: list[str]) -> list[str]:  # none as long as there are runs to make
            after = {flags.strip(): runs(f"{common} {flags.strip()}").mean() for flags in tried}
            return [] if np.isnan([*after.values()]).any() else sorted(after, key=after.get, reverse=True)

        if best := ranked(first, tried):
            best = ranked(first, [*best, f"{best[0]} --max-grad-norm {GRID['norm']}"])
        best = ranked(runs, best[:2])
        for flags in best:
            rows.append([name, f"`{flags}`", " ".join(f"{value:.3f}" for value in runs(f"{common} {flags}"))])
        return best[0] if best else ""

    for loss in LOSSES:
        each = lambda *syncs: [f"--lr {lr} {sync}" for lr in GRID["lr"] for sync in syncs]
        common = f"--loss {loss} {SIZE[loss]}"
        search(f"{loss.upper()}, offline", f"{common} {WORSE} {NEVER}", each(""))
        best = search(f"{loss.upper()}, humanline", f"{common} {WORSE}", each(*GRID[loss]))
        search(f"{loss.upper()}, online", f"{common} {ONLINE} {NEVER}", each(""))
        if best:
            best_sync = re.search(r"--sync-\S+ \S+", best)[0]
            search(f"{loss.upper()}, online + humanline", f"{common} {ONLINE}", each(best_sync))
        search(f"{loss.upper()}, a sync without a clip", f"{common} {WORSE} --perception none",
               each(*(how for how in GRID[loss] if how != "--sync-k 0")))
        if loss == "grpo":
            search("GRPO, drawn every 64 steps", f"{common} --sample-every 64 {NEVER}", each(""))
            search("GRPO, drawn every 64 steps, humanline", f"{common} --sample-every 64",
                   each("--sync-k 8", "--sync-k 24", "--sync-k 64"))
    return [markdown(rows)]


EXPERIMENTS = dict(gap=gap, sparse=sparse, syncing=syncing, ablation=ablation, betas=betas, quality=quality,
                   stale=stale, long=long, column=column)
QUICK = ("gap", "sparse")


def quartiles(home: Path, seed: int) -> list[tuple[str, float, list[float]]]:
    """Four files of all offline groups with different scores, by their mean token log-prob under a seed's base.

    Returns for each its path, SEED in place of the seed, the mean of its groups' mean token log-probs, and how much of
    it each model drew; not numbers where `make_quartiles` has not made them yet.
    """
    index = home / f"quartiles-{seed}.json"
    parts = json.loads(index.read_text()) if index.exists() else [(math.nan, [math.nan] * 3)] * 4
    return [(str(home / f"quartile-{number}-of-SEED.jsonl"), mean, origins)
            for number, (mean, origins) in enumerate(parts, 1)]


def make_quartiles(home: Path, seed: int) -> None:
    """Compute the log-probs of the three models' data, sort it by them and write it in four parts."""
    sampler, groups = load("embedded", humanline.parse_config([]), scored=False), []
    for origin, name in enumerate(("embedded:worse", "embedded", "embedded:better")):
        rows = [row for row in humanline.read_rows(name, sampler.config, "--data") if len(set(row.rewards)) > 1]
        logps = token_logps(sampler, encode(sampler, rows, offline=True))
        groups += [(float(np.concatenate(values).mean()), origin, row.fields) for values, row in zip(logps, rows)]
    groups.sort(key=lambda group: group[0])
    described = []
    for part, (path, *_) in zip(np.array_split(np.arange(len(groups)), 4), quartiles(home, seed)):
        members = [groups[i] for i in part]
        write(Path(path.replace("SEED", str(seed))), json_lines(fields for _, _, fields in members))
        origins = [np.mean([origin == i for _, origin, _ in members]) for i in range(3)]
        described.append((np.mean([mean for mean, *_ in members]), origins))
    write(home / f"quartiles-{seed}.json", json.dumps(described))


def sources_of(chosen: Iterable[str], quick: bool) -> list[str]:
    """The embedded models and data that the experiments need."""
    sources = ["embedded:test"] if {*chosen} - {"long", "column"} else []
    sources += ["embedded:worse"] if {*chosen} - {*MADE_OF_SUMS} else []
    sources += ["embedded"] if "stale" in chosen else []
    sources += ["embedded", "embedded:better"] if {"gap", "quality"} & {*chosen} and not quick else []
    longer = [f"embedded:{name}" for name in ("long", "column") if name in chosen]
    return [*sources, *longer, *(f"{name}-test" for name in longer)]


@contextlib.contextmanager
def base_of(seed: int) -> Iterator[None]:
    """The embedded models and data of another seed, for the length of a `with`."""
    before = os.environ.get("HUMANLINE_BASE")
    os.environ["HUMANLINE_BASE"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["HUMANLINE_BASE"]
        else:
            os.environ["HUMANLINE_BASE"] = before


def recipes_key() -> str:
    """Twelve digits for all recipes, as what comes out of runs and quartiles depends on them."""
    values = [value for recipe in humanline.RECIPES.values() for value in vars(recipe).values()]
    names = [str(getattr(value, "__name__", value)) for value in values]
    return hashlib.sha256(json.dumps([*humanline.RECIPES, *names]).encode()).hexdigest()[:12]


def prepare(seed: int, sources: list[str], home: Path, quality: bool) -> None:
    """Make a seed's models and data, before many runs want them at once."""
    with base_of(seed):
        for source in sources:
            humanline.embedded(source, "data")
        if quality and not (home / f"quartiles-{seed}.json").exists():
            make_quartiles(home, seed)


def run_file(flags: str, home: Path) -> Path:
    """Where the cache keeps what came out of a run; another version of the code or of torch has another place."""
    code = (Path(humanline.__file__).read_text() + torch.__version__ + flags).encode()
    return home / f"{hashlib.sha256(code).hexdigest()[:16]}.json"


@torch.no_grad()
def exact_pass(policy: torch.nn.Module, tokenizer: Any, groups: list[Group], rows: list[Row]) -> float:
    """pass@1 without the noise of samples, where a prompt has one right answer: the mean probability of that answer and
    of the token that ends it."""
    answers = tokenizer([rows[group.row].fields["answer"] + tokenizer.eos_token for group in groups])["input_ids"]
    logps, _ = humanline.log_probs(policy, [humanline.Sequence(group.prompt, answer)
                                            for group, answer in zip(groups, answers)])
    return float(logps.double().sum(1).exp().mean())


@contextlib.contextmanager
def measured_exactly() -> Iterator[None]:
    """Runs measure `exact` pass@1, too, for the length of a `with`."""
    measure = humanline.Run.measure

    def measure_both(run: humanline.Run, step: int) -> dict[str, float]:
        exact = exact_pass(run.policy, run.sampler.tokenizer, run.eval_groups, run.eval_rows) if run.eval_rows else None
        return measure(run, step) | ({} if exact is None else dict(exact=exact))

    humanline.Run.measure = measure_both
    try:
        yield
    finally:
        humanline.Run.measure = measure


def train_once(flags: str, home: Path) -> dict:
    """A run of humanline.py, or what the cache has of it: pass@1 before, after and at some steps, of samples and
    `exact`; `greedy` accuracy; seconds; metrics."""
    path = run_file(flags, home)
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, \
                contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            papers = ["--stale", "keep", "--prior", "0"]  # its forms, where the flags say nothing else
            config = humanline.parse_config([*papers, *shlex.split(flags), "--out", f"{folder}/run"])
            # A run that diverged ends with nothing right.
            with base_of(config.seed), measured_exactly(), contextlib.suppress(FloatingPointError):
                if humanline.train(config).stopped_at:
                    raise UserError("interrupted; the same command goes on where it was")
            lines = humanline.read_metrics(Path(folder, "run", "metrics.jsonl"))
        measured_at = [*range(0, config.steps, config.eval_every or config.steps)][1:] + [config.steps]
        curve = dict.fromkeys(measured_at, 0.0)
        curve |= {line["step"]: line["accuracy"] for line in lines if "accuracy" in line}
        names = ("drift", "unclamped", "kl", "grad_norm", "logp", "logp_wanted", "completion_length", "reward_margin")
        shown = {name: [float(f"{line[name]:.4g}") if name in line else None for line in lines] for name in names}
        # A run that diverged at its first step has no line: what it began with and how long it took is not known.
        before = lines[0]["accuracy_before"] if lines else math.nan
        drawing, training = (sum(line[name] for line in lines) if lines else math.nan
                             for name in ("sample_seconds", "step_seconds"))
        outcome = dict(flags=flags, before=before, after=curve[config.steps], drawing=drawing, training=training)
        outcome |= {f"step {step}": value for step, value in curve.items()}
        for name in ("exact", "greedy"):
            values = {0: lines[0].get(f"{name}_before", math.nan) if lines else math.nan}
            values |= dict.fromkeys(measured_at, 0.0) | {line["step"]: line[name] for line in lines if name in line}
            outcome |= {f"{name} {step}": value for step, value in values.items()}
        replace(path, json.dumps(outcome | dict(metrics=shown)))
    return json.loads(path.read_text())


def start_worker() -> None:
    """One thread, and each data file read and encoded once by a process that trains on it many times."""
    torch.set_num_threads(1)

    def remember(name: str, key: Callable[..., tuple]) -> None:
        make, known = getattr(humanline, name), {}

        def remembered(*args: Any, **options: Any) -> Any:
            at = humanline.embedded_seed(), *key(*args, **options)
            if at not in known and len(known) >= 8:
                known.clear()
            return known[at] if at in known else known.setdefault(at, make(*args, **options))

        setattr(humanline, name, remembered)

    def key_of_groups(rows: list[Row], sampler: Sampler, flag: str = "--data", online: bool | None = None) -> tuple:
        config = sampler.config
        online = bool(config.sample_every) if online is None else online
        return rows[0].where, rows[-1].where, len(rows), config.model, online, sampler.longest

    remember("read_rows", lambda name, config, flag: (name,))
    remember("encode_rows", key_of_groups)


@contextlib.contextmanager
def workers(jobs: int | None) -> Iterator[Callable[[Callable, list[tuple], str], Iterator]]:
    """Calls of a function in processes of one thread each, as many at once as there are cores to use, or `jobs`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pool = ProcessPoolExecutor(jobs or cores, multiprocessing.get_context("spawn"), start_worker)

    def outcomes(function: Callable, calls: list[tuple], unit: str) -> Iterator:
        asked = [pool.submit(function, *call) for call in calls]
        for done in tqdm(as_completed(asked), total=len(asked), unit=unit, disable=False):
            yield done.result()

    try:
        yield outcomes
    finally:
        pool.shutdown(cancel_futures=True)


def train_all(wanted: list[str], home: Path, jobs: int | None, sources: list[str], quality: bool,
              keep: Callable[[dict], None]) -> None:
    """`keep` what came out of each of the wanted runs; those that the cache lacks are trained, each on one thread."""
    seed = lambda run: int(run.split("--seed ")[1])
    missing = [run for run in wanted if not run_file(run, home).exists()]
    missing.sort(key=seed)  # runs on the same data in a row
    if missing:
        with workers(jobs) as outcomes:
            bases = sorted({*map(seed, missing)})
            for _ in outcomes(prepare, [(seed, sources, home, quality) for seed in bases], "base"):
                pass
            for outcome in outcomes(train_once, [(run, home) for run in missing], "run"):
                keep(outcome)
    for run in wanted:
        keep(train_once(run, home))


def reproduce(flags: Reproduce) -> None:
    """Train what the experiments need, some at a time, and write the report."""
    if flags.real:
        return reproduce_real(flags)
    if flags.losses != Reproduce.losses:
        raise UserError("--losses: only --real asks for it; leave it out")
    if flags.seeds and "tuning" in (flags.only or ()):
        raise UserError("--seeds: --only tuning has seeds of its own, 101 to 104; leave it out")
    out, start = new_file(flags.out, (".md",), "reproduce.md"), time.perf_counter()
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}  # of the processes that train
    experiments, chosen = EXPERIMENTS | {"tuning": tuning}, flags.only or (QUICK if flags.quick else tuple(EXPERIMENTS))
    home = Path(humanline.embedded("embedded:test", "data")).parents[1] / f"runs-{recipes_key()}"
    home.mkdir(exist_ok=True)
    count = flags.seeds or (2 if flags.quick else 5)
    seeds = [101, 102, 103, 104] if "tuning" in chosen else list(range(1, 1 + count))
    drawn = {name: task for name, task in MADE_OF_SUMS.items() if name in chosen}
    if flags.results and not (drawn and len(chosen) == 1):
        raise UserError("--results: it holds the runs of `stale`, `long` or `column`; write --only with one of them, "
                        "or leave it out")
    results = new_file(flags.results, (".jsonl",), flag="--results") if flags.results else None
    known = read_results(results, of_real=False) if results else {}

    def keep(outcome: dict) -> None:
        known[outcome["flags"]] = outcome
        if results:
            write_results(results, known)

    while True:  # what was found may ask for more, as the tuning does
        runs = Runs(seeds, known)
        runs.quick, runs.quartiles = flags.quick, [quartiles(home, seed) for seed in seeds]
        report = {name: experiments[name](runs) for name in chosen}
        missing = [run for run in runs.wanted
                   if run not in known and (flags.train or run_file(run, home).exists())]
        if not missing:
            break
        train_all(missing, home, flags.jobs, sources_of(chosen, flags.quick), "quality" in chosen, keep)
    verdicts = sum(line.startswith("- **") for lines in report.values() for line in lines)
    command = ["python eval.py reproduce"] + ["--quick"] * flags.quick
    command += ["--only", *chosen] * bool(flags.only) + [f"--seeds {flags.seeds}"] * bool(flags.seeds)
    text = [f"# humanline, re-run\n\n`{' '.join(command)}`: {len(runs.wanted.keys() & known)} runs, "
            f"seeds {seeds[0]} to {seeds[-1]}, each with a base of its own. Mean ± half of the 95 % interval over "
            f"seeds; differences are paired by seed. {verdicts} verdicts, not corrected for their number."]
    for name, lines in report.items():
        text.append(f"## {experiments[name].__doc__.rstrip('.')}\n\n" + "\n\n".join(lines).replace("\n\n- ", "\n- "))
    write(out, "\n\n".join(text) + "\n")
    print("\n\n".join(text))
    print(f"\nreport: {out}, after {(time.perf_counter() - start) / 60:.1f} minutes; the runs are kept in {home}")
    if {"gap", "sparse"} <= set(chosen):
        picture_report(runs, "syncing" in chosen, out.with_suffix(".png"))
    for name, task in drawn.items():
        if finished(runs, "grpo", task)[0].seeds:
            alone = len(chosen) == 1
            picture_stale(runs, out.with_suffix(".png") if alone else out.with_name(f"{out.stem}-{name}.png"), task)


def read_results(path: Path, of_real: bool) -> dict[str, dict]:
    """The runs of a file of --results, by their flags. Raises UserError where they are not all of --real, or some."""
    with humanline.explained(f"--results {path}", "name a file of `reproduce --results`, or a new one"):
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        known = {run["flags"]: run for run in map(json.loads, lines)}
    if any((flags.split()[0] in TASKS) != of_real for flags in known):
        raise UserError(f"--results {path}: its runs are {'not' if of_real else 'those'} of --real; name another file")
    return known


def write_results(path: Path, runs: dict[str, dict]) -> None:
    """A line for each run: its flags and seed, what it measured and how long it took, but not each step's metrics."""
    lines = []
    for run in runs.values():
        line = dict(flags=run["flags"], seed=int(run["flags"].split("--seed ")[1]))
        line |= {name: round(value, 4) if isinstance(value, float) else value
                 for name, value in run.items() if name != "metrics"}
        line |= {"warned": warned(run)} if "metrics" in run else {}
        lines.append(line | dict(lowest=min(value for name, value in line.items() if name.startswith("exact "))))
    replace(path, json_lines(lines))


def picture_stale(runs: Runs, path: Path, task: Sums = SHORT) -> None:
    """Held-out pass@1 of GRPO as it trains: a line for each variant of `stale`, a band over its seeds. For a task that
    is drawn at several lags those offline alone, and beside them where all ended, against the lag."""
    with_lags = len(task.drawn_every) > 1
    figure, (axis, *rest) = new_figure(4.2 if with_lags else 4.8, 1, 2 if with_lags else 1)
    (own, _), steps, variants = finished(runs, "grpo", task), (0, *task.steps), stale_variants("grpo", task)
    shown = {name: flags for name, flags in variants.items()
             if name not in (UNCLIPPED, BARE, SYNCED_ALONE) and not (with_lags and name.startswith("every "))}
    for i, (name, flags) in enumerate(shown.items()):
        curve = np.array([own(flags, f"exact {step}") for step in steps])
        colour, dash = OKABE_ITO[i % 7], "--" if name.startswith("every ") else DASHES[i // 7 * 2]
        axis.fill_between(steps, curve.min(1), curve.max(1), color=colour, alpha=0.12, linewidth=0)
        axis.plot(steps, curve.mean(1), dash, color=colour, linewidth=1.8, label=name)
    axis.set(xlabel=f"steps; bands: the range over {len(own.seeds)} seeds", ylabel="pass@1, held out", ylim=(0, 1.01),
             xlim=(0, steps[-1]))
    for axis_of_lags in rest:
        for i, offline in enumerate(shown):
            form = offline.removeprefix("offline + ")
            ends = {f"{lag}": variants.get(f"every {lag} steps" + (f", {form}" if form != "offline" else ""))
                    for lag in task.drawn_every} | {"offline": variants[offline]}
            ends = {"1": variants["online"]} | ends if form == "offline" else ends
            if form == "online":
                continue
            values = np.array([own(flags, f"exact {steps[-1]}") for flags in ends.values()])
            places = [["1", *map(str, task.drawn_every), "offline"].index(lag) for lag in ends]
            axis_of_lags.fill_between(places, values.min(1), values.max(1), color=OKABE_ITO[i % 7], alpha=0.12, lw=0)
            axis_of_lags.plot(places, values.mean(1), "-o", color=OKABE_ITO[i % 7], linewidth=1.8, markersize=4)
        axis_of_lags.set(xlabel="drawn every so many steps", xticks=range(2 + len(task.drawn_every)), ylim=(0, 1.01),
                         xticklabels=["1", *map(str, task.drawn_every), "offline"],
                         ylabel=f"pass@1 after {steps[-1]} steps")
    save(figure, path, axis)


def picture_report(runs: Runs, syncing: bool, path: Path) -> None:
    """The claims at a glance: the gap, sparse sampling, and, where it was asked for, how often to sync."""
    figure, (left, middle, *rest) = new_figure(3.4, 1, 3 if syncing else 2)
    shown = {"offline": "offline", "humanline": "offline + humanline", "online": "online"}
    for x, loss in enumerate(LOSSES):
        values = [runs(runs.variant(loss, variant, WORSE if variant != "online" else "")) for variant in shown]
        places = [x - 0.26, x, x + 0.26]
        for place, value, label, colour in zip(places, values, shown.values(), OKABE_ITO):
            left.bar(place, value.mean(), 0.24, color=colour, label=label if x == 0 else None)
        left.plot(places, values, "-o", color="black", markersize=2, linewidth=0.5)  # a line for each seed
    left.axhline(runs(runs.variant("grpo", "online"), "before").mean(), color=GREY, linestyle=":")
    left.set(title="data of a worse model", xticks=range(3), xticklabels=[loss.upper() for loss in LOSSES],
             ylim=(0.3, 1), ylabel="pass@1")
    every = runs.variant("grpo", "online")
    for flags, colour, dash in ((every, 2, "-"), (every.replace(ONLINE, "--sample-every 64"), 0, "--"),
                                (runs.variant("grpo", "sparse"), 1, "-")):
        steps = (64, 128, 192, 256)
        values = np.array([runs(flags, "before")] + [runs(flags, f"step {step}") for step in steps])
        middle.plot((0, *steps), values.mean(1), dash, color=OKABE_ITO[colour], marker="o", markersize=3)
    middle.set(title="GRPO, drawn every 64 steps\n(green: every step)", xlabel="steps", ylim=(0.3, 1))
    for axis in rest:
        ticks = [*SURVEYED["5e-4"][::-1], 0]
        for (lr, ks), colour in zip(SURVEYED.items(), (3, 4, 5)):
            flags = f"--loss grpo {SIZE['grpo']} {WORSE} --sync-k {{k}} --lr {lr}"
            values = {k: runs(flags.format(k=k)).mean() for k in (*ks[::-1], 0)}
            axis.plot([*map(ticks.index, values)], [*values.values()], color=OKABE_ITO[colour], marker="o",
                      markersize=3, label=f"lr {float(lr):g}")
        axis.set(title="GRPO offline, sync\nevery k steps (∞: never)", xlabel="k", xticks=range(len(ticks)),
                 ylim=(0.3, 1), xticklabels=[*map(str, ticks[:-1]), "∞"])
        axis.legend(frameon=False, fontsize=8, loc="lower left")
    save(figure, path, left)


# ----------------------------------------------------------------------------------------------------------------------
# reproduce --real: the same questions, asked of a real language model
# ----------------------------------------------------------------------------------------------------------------------

# A reward that knows degrees, and one that is 0 or 1. Rows: configs/{topics,checks}.jsonl, held out: …-test.jsonl.
TASKS = {"sentiment": "topics", "checked": "checks"}
REAL_STEPS = (0, 16, 32, 48, 64)
DISTANCES = (4, 8, 14, 20)  # nats
REAL_SIZE = {"grpo": "--batch-size 4", "dpo": "--batch-size 8", "kto": "--batch-size 16"}  # completions: 32, 16, 16
SPARSELY = "every 16 steps"
# --lr and --sync-k: the best in both tasks together, on seed 101. What is not here yet is searched for.
REAL_TUNED = {
    ("grpo", "offline"): ("2e-5", "0"), ("grpo", PAPERS): ("2e-5", "4"), ("grpo", "online"): ("4e-5", "0")}
REAL_GRID = dict(lr=("2e-5", "4e-5", "1e-5"), k=(4, 1, 16))
REAL_TUNING_SEED = 101


def real_variants(loss: str) -> dict[str, tuple[str, str]]:
    """Each variant's switches, where {k} is its --sync-k, and the variant whose tuned settings it takes."""
    papers, both = (f"--sync-k {{k}} --stale {stale} --prior {prior}" for stale, prior in (("keep", 0), ("taper", 1)))
    variants = {"offline": (NEVER, "offline"), PAPERS: (papers, PAPERS), BOTH: (both, PAPERS),
                "online": (f"{ONLINE} {NEVER}", "online")}
    if loss == "grpo":
        drawn = f"--sample-every {SPARSELY.split()[1]}"
        variants |= {SPARSELY: (f"{drawn} {NEVER}", "online"), f"{SPARSELY}, humanline": (f"{drawn} {papers}", PAPERS),
                     UNCLIPPED: (NO_CLIP, "offline"),
                     SYNCED_ALONE: (both.replace(" --stale", " --perception none --stale"), PAPERS)}
    return variants | {BARE: (f"{NO_CLIP if loss == 'grpo' else NEVER} --stale taper --prior 1", "offline")}


def real_flags(task: str, loss: str, switches: str, lr: str, k: int | str) -> str:
    return f"{task} --loss {loss} {REAL_SIZE[loss]} {switches.format(k=k)} --lr {lr}"


def real_tuned(runs: Runs, loss: str, variant: str) -> tuple[str, str] | None:
    """Its --lr and --sync-k: first the best rate with the first k, then the best k at that rate. The last rate is tried
    only where the second is not better than the first. None as long as runs of the tuning's seed are missing."""
    if (loss, variant) in REAL_TUNED:
        return REAL_TUNED[loss, variant]
    switches = real_variants(loss)[variant][0]

    def reward(lr: str, k: int) -> float:
        flags = (real_flags(task, loss, switches, lr, k) for task in TASKS)
        tried = [runs.lookup(f"{one} --seed {REAL_TUNING_SEED}") for one in flags]
        diverged = -math.inf  # a run that is there and has no last reward
        return float(np.mean([run.get(f"reward {REAL_STEPS[-1]}", diverged if run else math.nan) for run in tried]))

    (middle, higher, lower), (first, *others) = REAL_GRID["lr"], REAL_GRID["k"]
    rates = {lr: reward(lr, first) for lr in (middle, higher)}
    if rates[higher] <= rates[middle]:
        rates[lower] = reward(lower, first)
    lr = max(rates, key=rates.get)
    if any(map(math.isnan, rates.values())) or "{k}" not in switches:
        return None if any(map(math.isnan, rates.values())) else (lr, "0")
    ks = {first: rates[lr]} | {k: reward(lr, k) for k in others}
    return None if any(map(math.isnan, ks.values())) else (lr, str(max(ks, key=ks.get)))


@functools.cache
def base_sampler(model: str) -> Sampler:
    """The model as it was before any training, to take the KL to; one for all runs of a process."""
    flags = ["--model", model, "--data", "embedded", "--max-new-tokens", "32", *real_machine()]
    return load(model, humanline.parse_config(flags), scored=False)


def real_machine() -> list[str]:
    """Flags that the machine asks for: on a GPU this model is so small that bf16 casts cost more than they save."""
    return ["--dtype", "float32", "--no-compile"] if torch.cuda.is_available() else []


def real_rows(task: str, held_out: bool = False) -> str:
    return str(Path(humanline.__file__).with_name("configs") / f"{TASKS[task]}{'-test' * held_out}.jsonl")


def real_task_flags(task: str, model: str) -> list[str]:
    reward = Path(humanline.__file__).with_name("configs") / "rewards.py"
    return ["--model", model, "--reward", f"{reward}:{task}", "--eval-data", real_rows(task, held_out=True),
            "--max-new-tokens", "32", *real_machine()]


def draw_base(task: str, seed: int, model: str, home: Path) -> None:
    """The offline data: 8 completions of the base for each prompt, drawn once for each seed."""
    path = home / f"{task}-{seed}.jsonl"
    if path.exists():
        return
    flags = [*real_task_flags(task, model), "--data", real_rows(task), "--sample-every", "1", "--seed", str(seed)]
    config = humanline.parse_config(flags)
    sampler, rows = load(model, config), read_rows(real_rows(task), config)
    rollouts, _ = draw(sampler, encode(sampler, rows, offline=False), rows, 8, seed)
    replace(path, json_lines(
        dict(rows[group.row].fields, prompt_id=f"{number}", completion=text, reward=reward, tokens=ids, logps=logps)
        for number, group in enumerate(rollouts)
        for text, reward, ids, logps in zip(sampler.tokenizer.batch_decode(group.completions, skip_special_tokens=True),
                                            group.rewards, group.completions, group.logps)))


def train_real(flags: str, model: str, home: Path) -> dict:
    """A run of humanline.py on a real model; what it measured at REAL_STEPS, and what it wrote at the end."""
    task, *rest = shlex.split(flags)
    seed = int(rest[-1])
    data = real_rows(task) if "--sample-every" in rest else str(home / f"{task}-{seed}.jsonl")
    last = REAL_STEPS[-1]
    often = last if seed == REAL_TUNING_SEED else REAL_STEPS[1]
    often = max(1, often // 2) if f"{ONLINE} " in flags and often < last else often  # it is soon far from its base
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, \
            contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        config = humanline.parse_config([
            *rest, *real_task_flags(task, model), "--data", data, "--steps", str(last), "--save-every", "0",
            "--eval-every", str(often), "--eval-prompts", "50", "--eval-samples", "4", "--out", f"{folder}/run"])
        with contextlib.suppress(FloatingPointError):  # a run that diverged; what is not measured is NaN
            if humanline.train(config).stopped_at:
                raise UserError("interrupted; the same command goes on where it was")
        outcome = dict(flags=flags, device="CPU")
        if torch.cuda.is_available():
            outcome["device"] = torch.cuda.get_device_name()
            torch.cuda.empty_cache()
        run = Path(folder, "run")
        lines = humanline.read_metrics(run / "metrics.jsonl")
        rollouts = [json.loads(line) for line in (run / "eval_rollouts.jsonl").read_text().splitlines()]
        seconds = np.cumsum([line["step_seconds"] for line in lines])
        drawing = np.cumsum([line["sample_seconds"] for line in lines])
        for step in (0, *range(often, last + 1, often)):
            drawn = sorted((line for line in rollouts if line["step"] == step), key=lambda line: line["reward"])
            if not drawn or step > len(lines):  # it diverged before
                break
            greedy = lines[step - 1]["greedy"] if step else lines[0]["greedy_before"] if lines else math.nan
            measured = dict(reward=np.mean([one["reward"] for one in drawn]), greedy=greedy,
                            seconds=seconds[step - 1] if step else 0.0, drawing=drawing[step - 1] if step else 0.0)
            measured |= describe_completions(drawn, model, config)
            outcome |= {f"{name} {step}": round(float(value), 4) for name, value in measured.items()}
            places = dict(worst=0, low=len(drawn) // 4, median=len(drawn) // 2, high=3 * len(drawn) // 4, best=-1)
            samples = {name: dict(reward=round(drawn[place]["reward"], 3), completion=drawn[place]["completion"])
                       for name, place in places.items()}
    return outcome | dict(samples=samples)


def describe_completions(drawn: list[dict], model: str, config: Config) -> dict[str, float]:
    """Of lines of an eval_rollouts.jsonl: `kl` to the base, nats per completion, the mean of log π - log π_base;
    `entropy`, nats per token; `length`, tokens; `distinct`, different pairs of neighbouring words over all of them."""
    base = base_sampler(model)
    prompts = {group.row: group.prompt for group in encode(base, read_rows(config.eval_data, config), offline=False)}
    groups = [Group(line["row"], prompts[line["row"]], [line["tokens"]], [0.0]) for line in drawn]
    own = np.array([sum(line["logps"]) for line in drawn])
    bases = np.array([logps.sum() for logps, in token_logps(base, groups)])
    lengths = np.array([len(line["tokens"]) for line in drawn])
    words = [line["completion"].lower().split() for line in drawn]
    pairs = [pair for text in words for pair in itertools.pairwise(text)]
    return dict(kl=(own - bases).mean(), entropy=-own.sum() / lengths.sum(), length=lengths.mean(),
                distinct=len(set(pairs)) / max(1, len(pairs)))


def at_kl(run: dict, kl: float) -> float:
    """The reward of a run where it had come `kl` nats away from its base. Between measurements what it lacks to 1, the
    best reward, is taken to shrink by the same factor for each nat: a reward levels off, and a straight line would lie
    below it. NaN where it was farther away at its first measurement, or never came so far."""
    steps = sorted(int(name.split()[1]) for name in run if name.startswith("kl "))[1:]
    points = [(run[f"kl {step}"], run[f"reward {step}"]) for step in steps]
    if not points or not kl >= points[0][0]:
        return math.nan
    for (near, low), (far, high) in itertools.pairwise(points):
        if near <= kl <= far:
            part = (kl - near) / max(far - near, 1e-9)
            return 1 - max(1 - low, 1e-3) ** (1 - part) * max(1 - high, 1e-3) ** part
    return math.nan


def real(runs: Runs, losses: Iterable[str], tasks: Iterable[str]) -> tuple[list[str], dict]:
    """The report's text; and the curves to draw, by task, loss and variant."""
    text, verdicts, samples, curves, last = [], [], [], {}, REAL_STEPS[-1]
    for task, loss in itertools.product(tasks, losses):
        variants = real_variants(loss)
        if runs.quick:
            variants = {name: variants[name] for name in ("offline", PAPERS, BOTH, "online")}
        tuned = {name: real_tuned(runs, loss, like) for name, (_, like) in variants.items()}
        pending = [name for name in variants if not tuned[name]]
        if pending:
            text.append(f"{loss.upper()}, {task}: the tuning is not finished for: {'; '.join(pending)}.")
        if "offline" in pending or "online" in pending:
            continue
        flags = {name: real_flags(task, loss, variants[name][0], *tuned[name]) for name in variants if tuned[name]}
        value = lambda name, what, step=last: runs(flags[name], f"{what} {step}")
        each = {name: runs.each(flags[name]) for name in flags}
        there = {name: [run for run in each[name] if f"reward {last}" in run] for name in flags}
        if not any(there.values()):
            text.append(f"{loss.upper()}, {task}: no run is finished.")
            continue
        rows = [[f"{loss.upper()}, {task}", "seeds", "lr, k", "reward", "greedy", "of the gap", "KL to the base, nats",
                 "online's reward there", "length", "distinct pairs", "seconds, drawing"]]
        base = [f"{mean_of(value('offline', what, 0)):.3f}" for what in ("reward", "greedy")]
        rows.append(["the base", "", "", *base, "", "0", "", f"{mean_of(value('offline', 'length', 0)):.1f}",
                     f"{mean_of(value('offline', 'distinct', 0)):.2f}", ""])
        for name in [name for name in flags if there[name]]:
            of_three = common(value("offline", "reward"), value(name, "reward"), value("online", "reward"))
            share = ""
            if len(of_three[0]) and name not in ("offline", "online"):
                share = show_share(closed(*of_three, pairs(each, "offline", name, "online")))
            rewards, = common(online_at(runs, flags["online"], value(name, "kl")))
            devices = {run["device"] for run in there[name]}
            seconds = "{:.0f}, {:.0f}".format(*(mean_of(value(name, what)) for what in ("seconds", "drawing")))
            rows.append([name, f"{len(there[name])}", f"{tuned[name][0]}, {tuned[name][1]}".removesuffix(", 0"),
                         *(spread(*common(value(name, what))) for what in ("reward", "greedy")), share,
                         spread(*common(value(name, "kl")), 1), spread(rewards) if len(rewards) else "",
                         f"{mean_of(value(name, 'length')):.1f}", f"{mean_of(value(name, 'distinct')):.2f}",
                         seconds if len(devices) == 1 else "on two devices"])
        text.append(markdown(rows))
        curves[task, loss] = there
        verdicts += real_verdicts(f"{loss.upper()}, {task}", value, runs, flags)
        for name, finished in there.items():
            said = "; ".join(f"{place} {one['reward']:.2f}: \"{' '.join(printable(one['completion']).split())}\""
                             for run in finished[:1] for place, one in run["samples"].items()
                             if place in ("worst", "median", "best"))
            samples += [f"- {loss.upper()}, {task}, {name}: {said}"] if said else []
    text += [at_distances(curves, task) for task in dict.fromkeys(task for task, _ in curves)]
    return [*text, *verdicts, "What the final models write to held-out prompts (the first seed):", *samples], curves


def at_distances(curves: dict, task: str) -> str:
    """A table of what the runs of a task earned on the way, where they were equally far from their base."""
    rows = [[f"{task}: reward at a KL of", *(f"{kl} nats" for kl in DISTANCES)]]
    for (of, loss), variants in curves.items():
        for name, runs in variants.items() if of == task else ():
            rewards = [common(np.array([at_kl(run, kl) for run in runs]))[0] for kl in DISTANCES]
            if any(map(len, rewards)):
                rows.append([f"{loss.upper()}, {name}", *(f"{np.mean(one):.2f} ({len(one)})" if len(one) else ""
                                                          for one in rewards)])
    return f"{markdown(rows)}\n\nIn brackets: of how many seeds; between two measurements as above."


def common(*values: np.ndarray) -> list[np.ndarray]:
    """The same seeds of each: those of which all have a value."""
    there = ~np.isnan(np.stack(values)).any(0)
    return [value[there] for value in values]


def mean_of(values: np.ndarray) -> float:
    """Over the seeds that have a value."""
    return float(np.mean(*common(values))) if not np.isnan(values).all() else math.nan


def on_one_device(*variants: list[dict]) -> list[bool]:
    """Of each seed, whether its runs are of one device. If not, they share no offline data: the base draws other
    completions on another device."""
    return [len({run.get("device") for run in runs if run}) < 2 for runs in zip(*variants)]


def pairs(each: dict[str, list[dict]], *names: str) -> np.ndarray:
    """Which of these variants are paired by seed, (names, names)."""
    seeds = [runs for runs in zip(*(each[name] for name in names)) if all(runs)]
    devices = np.array([[str(run.get("device")) for run in runs] for runs in seeds])  # (seeds, names)
    return (devices[:, :, None] == devices[:, None, :]).all(0)


def online_at(runs: Runs, online: str, kl: np.ndarray) -> np.ndarray:
    """The reward of each seed's online run where it had come as far from the base as `kl` says."""
    return np.array([at_kl(run, one) for run, one in zip(runs.each(online), kl)])


def real_verdicts(title: str, value: Callable[..., np.ndarray], runs: Runs, flags: dict[str, str]) -> list[str]:
    """What a task and a loss say of the paper's claims, as far as there are seeds with all that a claim compares."""
    verdicts, offline, online = [], value("offline", "reward"), value("online", "reward")
    each = {name: runs.each(flags[name]) for name in flags}

    def compare(name: str, other: str, what: str, is_better: bool, more: str = "",
                theirs: np.ndarray | None = None) -> None:
        paired = theirs is not None or all(on_one_device(each[name], each[other]))  # else: read off at ours
        ours, theirs = common(value(name, "reward"), value(other, "reward") if theirs is None else theirs)
        if not len(ours):
            return
        ahead, few = np.mean(ours - theirs), len(ours) < 3
        reach = half(ours - theirs) if paired else math.hypot(half(ours), half(theirs))
        low, high = ahead - reach, ahead + reach
        found = f"{ahead:+.3f}" + f" ± {reach:.3f}" * (len(ours) > 1) + (", paired" if paired else ", not paired")
        as_good = high >= 0 and low > -AS_WELL
        seeds = f"{len(ours)} seed{'s' * (len(ours) > 1)}"
        verdicts.append(holds(not few and (low > 0 if is_better else as_good), f"{title}, {seeds}: {what}: "
                              f"{found}{more}", few or high > 0))

    compare("online", "offline", "online ends above offline", True)
    for name in [name for name in (PAPERS, BOTH) if name in flags]:
        of_three = common(offline, value(name, "reward"), online)
        share = closed(*of_three, pairs(each, "offline", name, "online")) if len(of_three[0]) else None
        share = f"; {show_share(share)} of the gap" if share else ""
        compare(name, "offline", f"{name} does better than offline", True, share)
        compare(name, "online", f"{name} gains as much as online at the same distance from the base", False,
                theirs=online_at(runs, flags["online"], value(name, "kl")))
    if PAPERS in flags and BOTH in flags:
        compare(BOTH, PAPERS, f"{BOTH} does better than {PAPERS}", True)
    if BARE in flags:
        compare(BARE, "offline", f"{BARE}, does better than offline", True)
        if BOTH in flags:
            compare(BARE, BOTH, f"{BARE}, does as well as {BOTH}", False)
    if SYNCED_ALONE in flags:
        compare(SYNCED_ALONE, BOTH, f"{SYNCED_ALONE}, does as well as {BOTH}", False)
    for name in [name for name in flags if name.startswith(f"{SPARSELY}, ")]:
        ratio, = common(np.where(on_one_device(each["online"], each[name]),
                                 value("online", "seconds") / value(name, "seconds"), math.nan))
        times = f"; every step takes {spread(ratio, 2)} times as long" if len(ratio) else ""
        compare(name, "online", f"{name} does as well as online", False, times)
        compare(name, SPARSELY, f"{name} does better than without", True)
    if UNCLIPPED in flags:
        compare(UNCLIPPED, "offline", f"{UNCLIPPED}, does better than offline", True)
        compare(UNCLIPPED, PAPERS, f"{UNCLIPPED}, does as well as {PAPERS}", False)
    return verdicts


def picture_real(curves: dict, path: Path, against: str) -> None:
    """Held-out reward against `kl` or `seconds`: a panel for each task and loss, a line for each variant from step 0
    on, which ends in a dot, and a thin one for each seed."""
    columns = 2 if len(curves) % 2 == 0 else 1
    figure, axes = new_figure(0.8 + 2.3 * len(curves) / columns, len(curves) // columns, columns)
    names, lines = list(real_variants("grpo")), {}
    for ((task, loss), variants), axis in zip(curves.items(), axes):
        for name, runs in variants.items():
            if not runs:
                continue
            i = names.index(name)
            points = np.array([[(run[f"{against} {step}"], run[f"reward {step}"]) for step in REAL_STEPS]
                               for run in runs])  # (seeds, steps, 2)
            dash = "--" if name.startswith(SPARSELY) else ":" if name in (UNCLIPPED, BARE, SYNCED_ALONE) else "-"
            style = dict(color=OKABE_ITO[i % 7], linestyle=dash)
            for seed in points if len(points) > 1 else []:
                axis.plot(*seed.T, linewidth=0.5, alpha=0.4, **style)
            lines[name], = axis.plot(*points.mean(0).T, linewidth=1.8, marker="o", markersize=4, markevery=[-1],
                                     **style)
        axis.set_title(f"{loss.upper()}, {task}: held-out reward", loc="left")
        axis.set_xlabel("KL to the base, nats per completion" if against == "kl" else "seconds, without evaluations")
    save(figure, path, lines)


def train_all_real(missing: list[str], model: str, home: Path, jobs: int | None, keep: Callable[[dict], None]) -> None:
    """`keep` what came out of each of the missing runs, each on one thread."""
    seed = lambda run: int(run.split("--seed ")[1])
    missing = sorted(missing, key=lambda run: (seed(run), ONLINE not in run, "grpo" not in run))  # the longest first
    bases = sorted({(run.split()[0], seed(run)) for run in missing if "--sample-every" not in run})
    with workers(jobs) as outcomes:
        for _ in outcomes(draw_base, [(*base, model, home) for base in bases], "base"):
            pass
        for outcome in outcomes(train_real, [(run, model, home) for run in missing], "run"):
            keep(outcome)


def reproduce_real(flags: Reproduce) -> None:
    """Tune, train and report, with every run kept in a file of results."""
    if flags.only:
        raise UserError("--only names experiments on the embedded model; leave it out with --real")
    if flags.quick and flags.losses != Reproduce.losses:
        raise UserError("--losses: --quick is GRPO alone; leave one of them out")
    run = run_folder(flags.real, "--real")
    model = str(run / "final") if run else flags.real
    out, started = new_file(flags.out, (".md",), "real.md"), time.perf_counter()
    name = re.sub(r"[^\w.-]+", "-", flags.real.strip("./"))
    results = new_file(flags.results or f"evals/real-{name}.jsonl", (".jsonl",), flag="--results")
    known, home = read_results(results, of_real=True), Path("evals", results.stem)  # home: of the offline data
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}  # of the processes that train
    losses, tasks = (flags.losses, tuple(TASKS)) if not flags.quick else (("grpo",), ("sentiment",))
    runs = Runs(list(range(1, 1 + (flags.seeds or (1 if flags.quick else 3)))), known)
    runs.quick = flags.quick

    def keep(outcome: dict) -> None:
        known[outcome["flags"]] = outcome
        replace(results, json_lines(known.values()))

    while True:  # what the tuning finds says which runs come next
        text, curves = real(runs, losses, tasks)
        missing = [run for run in runs.wanted if run not in known and flags.train]
        if not missing:
            break
        if "sentiment" in tasks and not importlib.util.find_spec("vaderSentiment"):
            raise UserError("--real: one of its rewards is not installed; pip install vaderSentiment")
        for folder in (home, results.parent):
            folder.mkdir(parents=True, exist_ok=True)
        train_all_real(missing, model, home, flags.jobs, keep)
    command = f"python eval.py reproduce --real {'FOLDER' if Path(flags.real).exists() else flags.real}"
    command += " --quick" * flags.quick + f" --losses {' '.join(losses)}" * (losses != Reproduce.losses)
    command += f" --seeds {flags.seeds}" * bool(flags.seeds)
    text.insert(0, f"# humanline on a real language model\n\n`{command}`: {len(runs.wanted.keys() & known)} runs of "
                f"{REAL_STEPS[-1]} steps. Mean ± half of the 95 % interval over seeds; a seed is the offline data and "
                "the run. Differences are paired by seed, but not where runs are of two devices, which draw different "
                f"data. The settings are the best of seed {REAL_TUNING_SEED} on the same held-out prompts; one at the "
                "edge of what was tried (lr 1e-5 to 4e-5, k 1 to 16) may be better beyond. Where the online run was "
                "as far from the base lies between its measurements. Seconds are wall-clock, beside what else ran.")
    write(out, "\n\n".join(text).replace("\n\n- ", "\n- ") + "\n")
    print("\n\n".join(text))
    print(f"\nreport: {out}, after {(time.perf_counter() - started) / 60:.1f} minutes; the runs are in {results}")
    if curves:
        picture_real(curves, out.with_suffix(".png"), "kl")
        timed = {key: curve for key, curve in curves.items() if key[1] == "grpo"} or curves
        picture_real(timed, out.with_name(f"{out.stem}-seconds.png"), "seconds")


# ----------------------------------------------------------------------------------------------------------------------

Command = (Accuracy | Show | Chat | Winrate | Annotated[DataQuality, tyro.conf.subcommand("data")] | Perception | Plot |
           Reproduce)
COMMANDS = {Accuracy: accuracy, Show: show_completions, Chat: chat, Winrate: winrate, DataQuality: data_quality,
            Perception: perception, Plot: plot, Reproduce: reproduce}


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
    except (OSError, MemoryError, BrokenExecutor) as error:  # also a process that was killed; the cache stays
        more = " (its flags go into a --config FILE here)" if isinstance(error, MemoryError) else ""
        print(f"eval.py: stopped: {error}{more}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("eval.py: stopped", file=sys.stderr)
        return 130  # as the shell says of a process that Ctrl-C ended
    return 0


if __name__ == "__main__":
    sys.exit(main())
