"""Humanline: DPO, KTO and GRPO with a reference that keeps up and a log-ratio seen the way people see it.

The whole of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207) in one file, from the rows on disk to
`optimizer.step()`. On a laptop, without a network or a GPU:

  python humanline.py                                                  # builds a tiny model, aligns it, says what was gained
  python humanline.py --loss grpo --sync-k 12                          # sync the reference every 12 steps
  python humanline.py --no-humanline                                   # the baseline: a fixed reference, no perception
  python humanline.py --no-humanline --sample-every 1                  # the same, fully online
  python humanline.py --loss dpo --data embedded:worse                 # offline pairs drawn from a worse model

On a model and data of your own (rows as in the README):

  python humanline.py --model Qwen/Qwen2.5-1.5B-Instruct --data pairs.jsonl --loss dpo --out runs/mine
  python humanline.py --config runs/mine/config.toml --lr 5e-7         # the same run again, with one thing changed
  python humanline.py --config runs/mine/config.toml --out runs/mine --resume latest

A *humanline variant* of a loss adds two things and changes nothing else: the reference is set to the policy every k
steps (**syncing**), and the token log-ratio is clipped before the loss sees it (**perception**).
"""

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Literal, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module
from tqdm import tqdm


class UserError(Exception):
    """Something the user can mend; printed as one line, exit status 2."""


def require(condition: Any, message: str) -> None:
    if not condition:
        raise UserError(message)


def warn(message: str) -> None:
    if rank() == 0:
        tqdm.write(f"humanline.py: warning: {message}", file=sys.stderr)


# ---------- Ranks -----------------------------------------------------------------------------------------------------
# One process per GPU, started by torchrun; without it, one process. Every rank knows every batch whole (token ids
# are small) and works on its share of it, so that what is exchanged is sums.


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def add_up(tensor: Tensor) -> Tensor:
    """The sum of all ranks' tensors, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather(own: Any) -> list:
    """Every rank's object, on every rank."""
    everyone = [own] * world_size()
    if world_size() > 1:
        dist.all_gather_object(everyone, own)
    return everyone


@contextlib.contextmanager
def in_turns() -> Iterator[None]:
    """The ranks of a machine one after the other: what the first builds the next finds, and one copy at a time is in memory."""
    turn, turns = (int(os.environ.get(name, 0)) if dist.is_initialized() else 0 for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    for _ in range(turn):
        dist.barrier()
    yield
    for _ in range(turns - turn):
        dist.barrier()


def start_ranks() -> torch.device:
    """Join the other ranks where torchrun started this process; returns the device to work on."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        # A name of its own for each start: after a restart torchrun's store still holds the addresses of the dead.
        store, own, ranks = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        patience = datetime.timedelta(hours=2)  # the others wait while one writes a large model
        dist.init_process_group(backend, store=store, rank=own, world_size=ranks, timeout=patience)
    return device


def seed_of(*parts: int | str) -> int:
    """A seed for what the parts name: all randomness is a function of --seed, of the step, and of what it is for."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered from all ranks (all must ask); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    if isinstance(target, DTensor):
        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)


# ---------- Arguments -------------------------------------------------------------------------------------------------


@dataclass
class Config:
    """Align a language model with DPO, KTO or GRPO, as published or as humanline variants."""

    loss: Literal["grpo", "dpo", "kto"] = "grpo"
    """The objective."""
    model: str = "embedded"
    """A Hugging Face name or folder; `embedded` is a tiny model that is built on first use and cached."""
    data: tuple[str, ...] = ("embedded",)
    """Rows to train on: sources NAME[:[CONFIG:]SPLIT][=PASSES]. NAME: a .jsonl, .json, .csv or .parquet file, a hub name, or
    `embedded`, `embedded:worse` or `embedded:better`, samples of the tiny or another model. PASSES (1): how often its rows
    come in one pass."""
    limit: int | None = None
    """Read only this many rows of each source."""
    eval_data: str | None = None
    """Held-out rows with answers, for --eval-every. Default: `embedded:test` with the embedded data, otherwise none."""
    reward: str = "exact"
    """What scores a sampled completion. `exact`: 1 if it equals the row's `answer`; `math`: 1 if its final answer equals
    that, or the \\boxed{} of the row's `solution`; `model:NAME`: a sequence classifier's score; `FILE.py:function`: your
    own function(prompts, completions, rows) -> list of floats, where prompts are lists of messages, rows dicts."""
    reward_seconds: float = 10.0
    """Time limit, where the reward is `math` or your own: per sample, and for a call with n samples √n times as much."""
    reward_failed: float = 0.0
    """The score of a sample whose reward raised, hung or was not a number."""
    system: str | None = None
    """System message in front of prompts that have none (models with a chat template)."""
    prompt_template: str | None = None
    """Text around each prompt, with {prompt} where it belongs."""
    dtype: Literal["auto", "mixed", "float32", "bfloat16"] = "auto"
    """mixed: fp32 weights, bf16 autocast; bfloat16: bf16 weights too, half the memory. auto: mixed on a GPU, else float32."""
    attn: str | None = None
    """Attention implementation, such as sdpa, eager or flash_attention_2. Default: the model's own choice."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass: slower, far less memory."""
    trust_remote_code: bool = False
    """Allow code that comes with a model or tokenizer to run."""

    # What makes it humanline: two parts, switched together or one by one.
    humanline: bool = True
    """Both parts at once: sync every --sync-k steps, and clip. --no-humanline is the published loss."""
    sync_k: int | None = None
    """Set the reference to the policy every so many steps; 0: never. Default: 1 (embedded: GRPO 24, DPO and KTO 128);
    without humanline 0."""
    sync_drift: float | None = None
    """Instead of a fixed k, sync as soon as a step's drift (mean |log-ratio| per token, in nats) passes this."""
    sync_alpha: float = 1.0
    """A soft sync: the reference moves only this fraction of the way to the policy. Below 1 it needs a copy."""
    perception: Literal["clip", "sample", "none"] | None = None
    """How the token log-ratio is distorted before the loss sees it. Default: clip with humanline, else none."""
    log_eps_p: float = -1.5
    """Lower end of the clip, in nats."""
    log_eps_r: float = 1.5
    """Upper end of the clip, in nats."""
    gamma_p: float = 0.5
    """--perception sample: B_P ~ Beta(gamma_p, beta_p) rejects tokens that became unlikely."""
    gamma_r: float = 0.01
    """--perception sample: B_R ~ Beta(gamma_r, beta_r) rejects tokens that became likely."""
    beta_p: float = 1.0
    """See --gamma-p."""
    beta_r: float = 1.0
    """See --gamma-r."""

    # The objectives' own knobs.
    beta: float = 0.1
    """DPO and KTO: how strongly the policy is held to the reference."""
    desirable_weight: float | None = None
    """KTO: weight of desirable examples. Default: --undesirable-weight times as many as there are undesirable examples for
    each desirable one, in the data or the drawing, so that both kinds count the same (1 for pairs)."""
    undesirable_weight: float = 1.0
    """KTO: weight of undesirable examples."""
    epsilon: float = 0.2
    """GRPO: the ratio is clipped to [1 - epsilon, 1 + epsilon]."""
    kl_beta: float = 0.0
    """GRPO: weight of the KL penalty."""
    average: Literal["token", "sequence"] = "token"
    """GRPO: mean over all completion tokens of the batch, or over each sequence's tokens first."""

    # Where the completions come from.
    sample_every: int = 0
    """0: train on the data's own completions (offline). N: draw some every N steps for the next N steps (1: fully online)."""
    group_size: int = 8
    """Completions drawn per prompt."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Nucleus sampling: keep the most likely tokens that together have this probability."""
    max_new_tokens: int | None = None
    """Longest completion drawn. Default: 8 with the embedded model, else 512."""
    sample_tokens: int = 65536
    """Largest (prompt + new tokens) x sequences in one call of `generate`; lower it if sampling runs out of memory."""

    # The loop.
    steps: int | None = None
    """Optimizer steps. Default: 256 with the embedded model, else one pass over the data."""
    batch_size: int | None = None
    """Per step: prompts, each with its group (GRPO), pairs (DPO) or examples (KTO). Default: 32; KTO 64, or embedded 256."""
    lr: float | None = None
    """AdamW's learning rate after warmup. Default: 1e-6, or with the embedded model 8e-4 (KTO 4e-4)."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After warmup: constant, or down to 0 along a cosine."""
    warmup: float = 0.1
    """Fraction of the steps over which the learning rate rises linearly."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    adam_eps: float = 1e-8
    """AdamW's epsilon. The authors' scripts use 1e-5."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm where it is longer."""
    max_length: int | None = None
    """Longest prompt + completion, in tokens; longer examples are dropped. Default: the model's positions."""
    max_prompt_length: int | None = None
    """Longest prompt, in tokens; rows with longer ones are dropped."""
    microbatch_tokens: int = 16384
    """Tokens (padding included) per forward and backward; lower it if training runs out of memory. Changes no result."""
    share_prompts: bool = True
    """Compute the prompt of neighbouring completions once, where the model allows it and it pays. Changes no result."""
    ref: Literal["auto", "lookahead", "copy"] = "auto"
    """How the reference is kept. lookahead: one pass of the policy at each sync scores the batches up to the next one, no
    second model; copy: a second model. Both give the same numbers; auto takes lookahead where it costs nothing."""
    compile: bool = dataclasses.field(default_factory=torch.cuda.is_available)
    """torch.compile the model's layers for training. Default: on a GPU."""
    shard: bool = False
    """Several ranks: shard weights, gradients and optimizer state over them (FSDP2), for models that one GPU cannot hold."""
    seed: int = 0
    """Everything random is a function of this and of the step."""

    # What is written, and when.
    out: str | None = None
    """The run's folder. Default: a new one under runs/."""
    save_every: int = 0
    """Write a checkpoint every this many steps; 0 writes none but the final model."""
    keep: int = 2
    """Checkpoints kept."""
    resume: str | None = None
    """`latest`: go on from the newest whole checkpoint in --out, or start afresh where there is none. Or a path."""
    eval_every: int | None = None
    """Measure on --eval-data every this many steps; 0: only before and after. Default: 64 with the embedded model, else 0."""
    eval_prompts: int = 500
    """Held-out prompts per evaluation."""
    eval_samples: int = 2
    """Completions drawn per held-out prompt."""
    track: Literal["tensorboard", "wandb"] | None = None
    """Send the metrics there, too; the package must be installed. Logs of tensorboard go to the run's folder."""
    config: str | None = None
    """A .toml file of these settings; flags override it."""


# What None stands for, by loss where it depends on it. The embedded values were tuned on seeds that are not reported.
OTHER_DEFAULTS = dict(max_new_tokens=512, eval_every=0, batch_size=dict(grpo=32, dpo=32, kto=64), lr=1e-6, sync_k=1)
EMBEDDED_DEFAULTS = dict(max_new_tokens=8, eval_every=64, batch_size=dict(grpo=32, dpo=32, kto=256), steps=256,
                         lr=dict(grpo=8e-4, dpo=8e-4, kto=4e-4), sync_k=dict(grpo=24, dpo=128, kto=128))


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_flags(args: list[str], default: Config | None = None, source: str = "", kind: Any = Config) -> Any:
    """tyro's parse of `args` as a `kind`, its complaints folded into one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=args, **({} if default is None else {"default": default}))
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        inside = complaint.getvalue().split("helptext:")[0].partition("\n")[2]
        text = re.sub(r" (Argument|For full helptext).*$", "", " ".join(re.sub("[│╭╮╰╯─]", " ", inside).split()))
        raise UserError(f"{source}{text}; see --help") from None


def read_config(path: str) -> Config:
    """The settings of a TOML file: its keys are the flags' names, checked as if they had been typed."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror.lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: not valid TOML: {error}") from None
    known = {field.name for field in dataclasses.fields(Config)} - {"config"}
    args = []
    for key, value in table.items():
        name = key.replace("-", "_")
        require(name in known, f"{path}: unknown key '{key}'{did_you_mean(name, known)}")
        values = value if isinstance(value, list) and name == "data" else [value]
        single = all(isinstance(one, (int, float, str)) for one in values)
        require(single, f"{path}: {key} = {value!r} must be a single value")
        if isinstance(value, bool):
            name, values = name if value else f"no_{name}", []
        args += [flag_of(name), *map(str, values)]
    return parse_flags(args, source=f"{path}: ")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    import difflib
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(sorted(known))}"


def parse_config(argv: list[str]) -> Config:
    """Flags over --config over defaults, every `None` that has a default resolved, every value checked."""
    typed = config = parse_flags(argv)
    if typed.config is not None:
        file = read_config(typed.config)
        config = parse_flags(argv, default=file)
        if config.humanline != file.humanline:  # the switch, if typed, outranks the parts in the file
            parts = dict(sync_k=0, sync_drift=None, perception="none")
            dropped = [part for part, off in parts.items() if not config.humanline or getattr(file, part) == off]
            config = dataclasses.replace(config, **{part: getattr(typed, part) for part in dropped})
    is_embedded = source_name(config.model) == "embedded"
    defaults = dict(EMBEDDED_DEFAULTS if is_embedded else OTHER_DEFAULTS, perception="clip" if config.humanline else "none")
    if is_embedded and all(source_name(name) == "embedded" for name in config.data):
        defaults["eval_data"] = "embedded:test"
        if config.model.startswith("embedded:long"):
            defaults |= dict(eval_data="embedded:long-test", max_new_tokens=48)
    if not config.humanline or config.sync_drift is not None:
        defaults["sync_k"] = 0
    defaults = {name: value[config.loss] if isinstance(value, dict) else value for name, value in defaults.items()}
    config = dataclasses.replace(config, **{name: value for name, value in defaults.items() if getattr(config, name) is None})
    check_config(config)
    return config


def check_config(config: Config) -> None:
    """Raises UserError for a value that makes no sense, naming the flag and the mend."""
    for must, fits, names in (
        ("be 0 or more", lambda value: 0 <= value < math.inf,
         "sync_k sample_every save_every eval_every seed kl_beta weight_decay"),
        ("be 1 or more", lambda value: value >= 1, "group_size max_new_tokens sample_tokens steps batch_size max_prompt_length "
         "microbatch_tokens keep eval_prompts eval_samples limit"),
        ("be 2 or more", lambda value: value >= 2, "max_length"),
        ("be above 0", lambda value: 0 < value < math.inf, "sync_drift gamma_p gamma_r beta_p beta_r beta desirable_weight "
         "undesirable_weight epsilon temperature lr adam_eps max_grad_norm reward_seconds"),
        ("lie from 0 to 1", lambda value: 0 <= value <= 1, "warmup"),
        ("lie from 1e-09 to 1", lambda value: 1e-9 <= value <= 1, "top_p sync_alpha"),
        ("lie from -1e+300 to 1e+300", lambda value: abs(value) <= 1e300, "reward_failed"),
    ):
        for name in names.split():
            value = getattr(config, name)
            require(value is None or fits(value), f"{flag_of(name)} is {value}; it must {must}")
    ends = f"--log-eps-p {config.log_eps_p} is not below --log-eps-r {config.log_eps_r}"
    require(config.log_eps_p < config.log_eps_r, f"{ends}; the clip's lower end comes first")
    require(config.data, "--data names nothing; give it a file or a hub name")
    require(re.fullmatch(r"exact|math|model:.+|.+\.py:\w+", config.reward),
            f"--reward {config.reward}: write exact, math, model:NAME or FILE.py:function")
    require(config.prompt_template is None or "{prompt}" in config.prompt_template,
            "--prompt-template has no {prompt}, the place where the row's prompt goes")
    require(not config.sample_every or config.group_size > 1,
            "--group-size 1 leaves nothing to compare a completion with; use 2 or more")
    require(not config.track or importlib.util.find_spec(config.track),
            f"--track {config.track}: that package is not installed; pip install {config.track}")
    require(config.resume != "latest" or config.out, "--resume latest looks in the run's folder; name it with --out")


def to_toml(config: Config) -> str:
    """Every setting as TOML that --config reads back; where the run lies is left to the next one."""
    settings = {name: value for name, value in vars(config).items() if value is not None}
    lines = [f"{name} = {repr(value) if isinstance(value, float) else json.dumps(value)}\n"
             for name, value in settings.items() if name not in ("out", "config", "resume")]
    return "".join(["# python humanline.py --config THIS_FILE repeats the run.\n", *lines])


# ---------- Perception ------------------------------------------------------------------------------------------------
# How the token log-ratio d_t = log π_θ(y_t | x, y_<t) - log π_ref(y_t | x, y_<t) looks to a person.
#
# Pure functions of tensors, to be pasted elsewhere. (N, T) tensors hold exact zeros at prompt and padding positions.


def capacity(a, gamma: float):
    """Ω⁺(a; γ) = a^γ / (a^γ + (1 - a)^γ)^(1/γ): a cumulative probability `a` as people perceive it.

    An inverted S for γ in (0, 1): the extreme outcomes weigh more than they should. Tversky and Kahneman (1992)
    estimate γ = 0.61 for gains and 0.69 for losses.

    Args:
        a: probabilities in [0, 1], a float or a tensor of any shape.
    Returns:
        The same shape as `a`.

    >>> round(capacity(0.01, 0.61), 3), round(capacity(0.99, 0.61), 3)
    (0.055, 0.912)
    """
    return a**gamma / (a**gamma + (1 - a) ** gamma) ** (1 / gamma)


def humanline_clip(log_ratio: Tensor, log_eps_p: float = -1.5, log_eps_r: float = 1.5) -> Tensor:
    """Humanline clipping: clamp(d, log ε_P, log ε_R), in nats. Outside the interval the gradient is 0.

    Args:
        log_ratio: (N, T) token log-ratios.
    Returns:
        (N, T).

    >>> humanline_clip(torch.tensor([[-4.0, 0.5, 2.0]]))
    tensor([[-1.5000,  0.5000,  1.5000]])
    """
    return log_ratio.clamp(log_eps_p, log_eps_r)


def humanline_rejected(log_ratio: Tensor, mask: Tensor, gamma_p: float = 0.5, gamma_r: float = 0.01,
                       beta_p: float = 1.0, beta_r: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Which tokens humanline sampling rejects (Definition 4.2); see `humanline_sample`. Returns (N, T) booleans."""
    if not mask.any():
        return torch.zeros_like(mask, dtype=torch.bool)
    d = log_ratio.detach().double()
    # torch.distributions takes no generator: a Beta is the first coordinate of this Dirichlet. Drawn on the CPU.
    draw = lambda gamma, beta: torch._sample_dirichlet(d.new_tensor([gamma, beta], device="cpu").expand(*d.shape, 2), generator)
    log_b_p, log_b_r = (draw(*shape)[..., 0].to(d.device).log() for shape in ((gamma_p, beta_p), (gamma_r, beta_r)))
    # exp(d) < M_P B_P and exp(-d) < M_R B_R, in logs, so that large ratios do not overflow.
    kept = d[mask.bool()]
    return ((d < kept.max() + log_b_p) | (-d < (-kept).max() + log_b_r)) & mask.bool()


def humanline_sample(log_ratio: Tensor, mask: Tensor, gamma_p: float = 0.5, gamma_r: float = 0.01,
                     beta_p: float = 1.0, beta_r: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Humanline sampling (Definition 4.2): a token is kept only if a person's perception would have produced it.

    Draw B_P ~ Beta(γ_P, β_P) and B_R ~ Beta(γ_R, β_R) for each token, and reject it if exp(d) < M_P B_P or
    exp(-d) < M_R B_R, where M_P and M_R are the largest exp(d) and exp(-d) among the batch's completion tokens. A
    rejected token keeps its value and passes no gradient. As the Betas concentrate on their means m_P and m_R, this
    becomes clipping to [log(M_P m_P), -log(M_R m_R)] (Theorem 4.3), as far as gradients go.

    Args:
        log_ratio: (N, T) token log-ratios, in nats.
        mask: (N, T), true or 1 at completion tokens.
        generator: source of the draws; torch's global one if None.
    Returns:
        (N, T), equal to `log_ratio` in value.
    """
    rejected = humanline_rejected(log_ratio, mask, gamma_p, gamma_r, beta_p, beta_r, generator)
    return torch.where(rejected, log_ratio.detach(), log_ratio)


# ---------- Objectives ------------------------------------------------------------------------------------------------
# What each loss makes of the perceived log-ratio. No averaging here: the loop divides by global counts.


def sum_tokens(log_ratio: Tensor) -> Tensor:
    """(N, T) token log-ratios -> (N,) sequence log-ratios; (N,) passes through."""
    return log_ratio.sum(-1) if log_ratio.dim() > 1 else log_ratio


def dpo_loss(chosen_log_ratio: Tensor, rejected_log_ratio: Tensor, beta: float = 0.1) -> Tensor:
    """-log σ(β (Σ_t d̃ʷ_t - Σ_t d̃ˡ_t)) (Rafailov et al. 2023, eq. 7).

    Args:
        chosen_log_ratio, rejected_log_ratio: (N, T) token log-ratios, zero at masked positions (the two T may differ),
            or (N,) sums of them, in nats.
    Returns:
        (N,) losses, one per pair.

    >>> dpo_loss(torch.zeros(1, 3), torch.zeros(1, 5))
    tensor([0.6931])
    """
    return -F.logsigmoid(beta * (sum_tokens(chosen_log_ratio) - sum_tokens(rejected_log_ratio)))


def kto_loss(log_ratio: Tensor, desirable: Tensor, kl: Tensor | float, beta: float = 0.1,
             desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> Tensor:
    """λ_D (1 - σ(β (Σ d̃ - z₀))) if desirable, else λ_U (1 - σ(β (z₀ - Σ d̃))) (Ethayarajh et al. 2024, eq. 8).

    Args:
        log_ratio: (N, T) token log-ratios, zero at masked positions, or (N,) sums of them, in nats.
        desirable: (N,) booleans.
        kl: z₀ >= 0, the reference point: one number for the whole batch, in nats; no gradient flows into it.
    Returns:
        (N,) losses.
    """
    kl = kl.detach() if isinstance(kl, Tensor) else kl
    gain = beta * (sum_tokens(log_ratio) - kl)
    # 1 - σ(x) = σ(-x), which keeps its precision where σ(x) is close to 1.
    return torch.where(desirable.bool(), desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain))


def group_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 0.01) -> Tensor:
    """A_i = (r_i - mean) / (std + eps) within each group, with the population standard deviation (Shao et al. 2024).

    Args:
        rewards: (N,) floats.
        group_ids: (N,) integers; equal ids form a group, in any order.
    Returns:
        (N,) advantages, zero-mean in each group; 0 for a group of one or without a difference.

    >>> group_advantages(torch.tensor([1.0, 0.0, 7.0, 7.0]), torch.tensor([3, 3, 5, 5]))
    tensor([ 0.9804, -0.9804,  0.0000,  0.0000])
    """
    _, index, counts = group_ids.unique(return_inverse=True, return_counts=True)
    mean_of = lambda x: torch.zeros(len(counts), dtype=x.dtype, device=x.device).index_add_(0, index, x) / counts
    centred = rewards - mean_of(rewards)[index]
    return centred / (mean_of(centred**2).sqrt()[index] + eps)


def grpo_loss(log_ratio: Tensor, perceived_log_ratio: Tensor, advantages: Tensor, epsilon: float = 0.2,
              kl_beta: float = 0.0) -> Tensor:
    """-min(A r_t, A clip(r_t, 1-ε, 1+ε)) + β_KL (exp(-d_t) + d_t - 1), with r_t = exp(d̃_t) (Shao et al. 2024, eq. 3).

    With humanline the ratio is clipped twice: upstream as d̃, and here. The KL term sees the raw d.

    Args:
        log_ratio: (N, T) raw token log-ratios d, in nats.
        perceived_log_ratio: (N, T) token log-ratios d̃ after perception.
        advantages: (N,).
    Returns:
        (N, T) token losses. Masked positions hold -A, as r = 1 there: multiply by the mask before averaging.
    """
    ratio, advantages = perceived_log_ratio.exp(), advantages.unsqueeze(-1)
    loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1 - epsilon, 1 + epsilon))
    return loss + kl_beta * token_kl(log_ratio) if kl_beta else loss


def token_kl(log_ratio: Tensor) -> Tensor:
    """exp(-d) + d - 1 >= 0, whose mean over the policy's samples is KL(π_θ || π_ref), in nats (Schulman 2020, "k3")."""
    return torch.expm1(-log_ratio) + log_ratio


# ---------- Log-probs -------------------------------------------------------------------------------------------------
# log π(y_t | x, y_<t) from hidden states, without a (batch, length, vocabulary) tensor.


class TokenLogps(torch.autograd.Function):
    """log softmax(softcap(h Wᵀ + b))[label] for M tokens, `chunk` rows of logits at a time, in memory that is used again.

    The last `keep` chunks wait for the backward pass, which makes the others anew.
    """

    @staticmethod
    def of_chunk(out, hidden, weight, bias, labels, softcap):
        """Returns, for n tokens, -d log-prob / d logits times a scale (n, V), that scale (n, 1), and the log-probs (n, 1)."""
        if out is None or len(out) < len(hidden):
            dtype = torch.promote_types(weight.dtype, torch.float32)
            out = torch.empty(len(hidden), len(weight), dtype=dtype, device=hidden.device)
        out, hidden = out[: len(hidden)], hidden.to(weight.dtype)
        if out.dtype == weight.dtype and bias is None:
            torch.mm(hidden, weight.T, out=out)
        else:
            out.copy_(F.linear(hidden, weight, bias))
        if softcap is not None:
            slope = 1 - out.div_(softcap).tanh_() ** 2
            out *= softcap
        own, largest = out.gather(1, labels), out.amax(1, keepdim=True)
        scale = out.sub_(largest).exp_().sum(1, keepdim=True)
        out.scatter_add_(1, labels, -scale)  # softmax - onehot(label), times the scale
        return out if softcap is None else out.mul_(slope), scale, own - largest - scale.log()

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, softcap, chunk, keep):
        logps, ctx.kept = [], deque()
        for rows, label in zip(hidden.split(chunk), labels[:, None].split(chunk)):
            out = ctx.kept.popleft()[0] if len(ctx.kept) == keep else None
            out, scale, found = TokenLogps.of_chunk(out, rows, weight, bias, label, softcap)
            logps.append(found[:, 0])
            ctx.kept.append((out, scale))
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.softcap, ctx.chunk = softcap, chunk
        return torch.cat(logps)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, bias, labels = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        out, kept, ctx.kept = None, ctx.kept, deque()  # a second backward pass makes all chunks anew
        for start in reversed(range(0, len(labels), ctx.chunk)):
            here = slice(start, start + ctx.chunk)
            if kept:
                out, scale = kept.pop()
            else:
                out, scale, _ = TokenLogps.of_chunk(out, hidden[here], weight, bias, labels[here, None], ctx.softcap)
            d_logits, factor = out.to(weight.dtype), -grad[here, None] / scale  # on the short side of each product
            d_hidden[here] = (d_logits @ weight) * factor
            if d_weight is not None:
                d_weight.addmm_(d_logits.T, (hidden[here] * factor).to(weight.dtype))
            if d_bias is not None:
                d_bias += (factor.T @ out)[0]
        return d_hidden, d_weight, d_bias, None, None, None, None


def token_logps(hidden: Tensor, lm_head_weight: Tensor, labels: Tensor, bias: Tensor | None = None,
                softcap: float | None = None, chunk_size: int = 512) -> Tensor:
    """Log-probabilities of `labels`, from the hidden states that predict them.

    Only positions with a label meet the output head, `chunk_size` of them at a time, so that memory grows with
    chunk_size x vocabulary and not with the batch. Computed in float32 (float64 for float64 input).

    Args:
        hidden: (N, T, D) final hidden states; hidden[:, t] predicts labels[:, t].
        lm_head_weight: (V, D) output embeddings, tied or not.
        labels: (N, T) token ids; -100 is ignored.
        bias: (V,) bias of the output head.
        softcap: logits become softcap * tanh(logits / softcap), as in Gemma 2.
    Returns:
        (N, T) log-probabilities in nats, exactly 0 where the label is -100.
    """
    n, t = (labels != -100).nonzero(as_tuple=True)
    labels = labels[n, t].to(hidden.device, non_blocking=True)
    n, t = n.to(hidden.device, non_blocking=True), t.to(hidden.device, non_blocking=True)
    if torch.is_autocast_enabled(hidden.device.type):
        lm_head_weight = lm_head_weight.to(torch.get_autocast_dtype(hidden.device.type))
        bias = None if bias is None else bias.to(lm_head_weight.dtype)
    picked = hidden.flatten(0, 1).index_select(0, n * hidden.shape[1] + t)
    with torch.autocast(hidden.device.type, enabled=False):
        keep = 2 if torch.is_grad_enabled() else 1
        found = TokenLogps.apply(picked, lm_head_weight, bias, labels, softcap, chunk_size, keep)
    return found.new_zeros(hidden.shape[:2]).index_put((n, t), found)


# ---------- Models ----------------------------------------------------------------------------------------------------

HUB_SECONDS = 3  # how long the hub may take to answer
FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@contextlib.contextmanager
def explained(what: str, mend: str, **mends: str) -> Iterator[None]:
    """Turns what loading code raises into one line that says `what` failed and how to mend it, by words of the message."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # transformers, datasets, safetensors, huggingface_hub and pyarrow raise dozens of kinds
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        mend = next((mends[word] for word in mends if word in str(error)), mend)
        raise UserError(f"{what}: {reason.rstrip(' .')}; {mend}") from error


def on_hub(spec: str | None) -> bool:
    """Whether NAME[:[CONFIG:]SPLIT][=PASSES] can only be a name on the Hugging Face hub."""
    name = source_name(spec or "embedded")
    return name != "embedded" and not Path(name).exists() and Path(name).suffix not in FILE_KINDS


def go_offline_without_hub(config: Config) -> None:
    """Where a name on the hub is wanted and the hub does not answer, make do with its cache.

    The hub's client would ask a dead endpoint again for a minute, and a silent one for ever.
    """
    judge = config.reward.removeprefix("model:") if config.reward.startswith("model:") else None
    if not any(map(on_hub, (config.model, *config.data, config.eval_data, judge))):
        return
    from huggingface_hub import constants, get_session
    answers: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
            answers.append(True)

    asking = threading.Thread(target=ask, daemon=True)  # a thread, as looking up the name takes a time of its own
    asking.start()
    asking.join(HUB_SECONDS)
    constants.HF_HUB_OFFLINE |= not answers


def fetching(name: str, kind: str = "") -> str:
    """How to get a folder of what is on the hub."""
    how = f"where the hub can be reached, `hf download {name}{kind} --local-dir FOLDER` makes one"
    return f"; {how}" if on_hub(name) else ""


def explained_model(config: Config) -> contextlib.AbstractContextManager:
    mend = f"name a Hugging Face model, or a local folder that holds one{fetching(config.model)}"
    return explained(f"--model {config.model}", mend, trust_remote_code="to let it run, say --trust-remote-code",
                     attn_implementation="choose another --attn")


def load_policy(config: Config, device: torch.device) -> tuple[Module, Any]:
    """The model and its tokenizer, by hub name or folder, ready for training and without dropout.

    Dropout would make the log-ratio of a policy with itself noise instead of 0, so it is switched off throughout.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    own_code = dict(trust_remote_code=config.trust_remote_code)
    with in_turns() if config.shard else contextlib.nullcontext():
        name = embedded(config.model, "model") if source_name(config.model) == "embedded" else config.model
        with explained_model(config):
            tokenizer = AutoTokenizer.from_pretrained(name, **own_code)
            dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
            policy = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=config.attn, **own_code)
        require(tokenizer.eos_token_id is not None, f"--model {name}: its tokenizer has no end-of-sequence token, so "
                "completions could not end; set eos_token in tokenizer_config.json")
        for module in policy.modules():
            for key, value in vars(module).items():
                if isinstance(value, float) and ("drop" in key or (key == "p" and isinstance(module, torch.nn.Dropout))):
                    setattr(module, key, 0.0)
        if config.checkpoint_activations:
            newer = getattr(policy, "activation_checkpointing_enable", None)  # the older name warns where this one is known
            newer() if newer else policy.gradient_checkpointing_enable(dict(use_reentrant=False))
        layers = [module for module in policy.modules() if type(module).__name__ in (policy._no_split_modules or ())]
        if config.compile:
            for layer in layers:  # alike, so compiled once; whatever the lengths of a batch
                layer.compile(dynamic=True)
        if config.shard:
            shard(policy, layers, device, config)
        policy.to(device).train()
    check_output_head(policy, config)
    config.share_prompts = config.share_prompts and can_share_prompts(policy, config)
    return policy, tokenizer


def shard(policy: Module, layers: list[Module], device: torch.device, config: Config) -> None:
    """FSDP2: each rank keeps its part of every layer's weights, and gathers a layer when it is needed."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    mesh = dist.init_device_mesh(device.type, (world_size(),))
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_mixed(device, config) else MixedPrecisionPolicy()
    for module in [*layers, policy]:  # resharded, so that parameters() are always the shards
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    policy.completion_logps = functools.partial(completion_logps, policy)
    register_fsdp_forward_method(policy, "completion_logps")  # gathers the embeddings around it


@torch.no_grad()
def check_output_head(policy: Module, config: Config) -> None:
    """Raises UserError where `log_probs` is not the model's own log-softmax, say for a head that scales its logits."""
    ids = torch.arange(8, device=policy.device)[None] % policy.config.get_text_config().vocab_size
    with mixed_precision(policy.device, config):
        ours = log_probs(policy, [Sequence(ids[0, :1].tolist(), ids[0, 1:].tolist())])[0]
        logits = policy(input_ids=ids, use_cache=False).logits
    theirs = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    tolerance = 0.05 if config.dtype == "bfloat16" or is_mixed(policy.device, config) else 0.005
    require(torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance),
            f"--model {config.model}: its logits are not hidden states times output embeddings, which token_logps needs")


@torch.no_grad()
def can_share_prompts(policy: Module, config: Config) -> bool:
    """Whether tokens meet in nothing but full attention, with the mask and positions that it is given."""
    text = policy.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["sliding" if getattr(text, "sliding_window", None) else "full_attention"]
    pair = [Sequence([1, 2, 3, 4], [5, 6, 7]), Sequence([1, 2, 3, 4], [7, 6])]
    with contextlib.suppress(Exception), mixed_precision(policy.device, config), torch.compiler.set_stance("force_eager"):
        apart = log_probs(policy, pair)[0]  # a model that takes no mask or positions may raise anything
        pair[1].shares = text._attn_implementation == "sdpa" and set(kinds) == {"full_attention"}
        return pair[1].shares and torch.allclose(log_probs(policy, pair)[0], apart, rtol=0.05, atol=0.05)
    return False


def max_positions(policy: Module) -> int:
    """The longest sequence the model can read, in tokens."""
    return getattr(policy.config.get_text_config(), "max_position_embeddings", None) or 2**31


def stop_ids(policy: Module, tokenizer: Any) -> list[int]:
    """Token ids that end a completion, the one that ends offline completions first."""
    generation = policy.generation_config.eos_token_id
    known = {tokenizer.eos_token_id, *(generation if isinstance(generation, list) else [generation])} - {None}
    first = tokenizer.eos_token_id
    if tokenizer.chat_template:  # what the template writes behind an answer, such as <|eot_id|> or <end_of_turn>
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "humanline"}]
        behind = tokenizer.apply_chat_template(turns, tokenize=False).split("humanline")[-1].strip()
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
        first = ids[0] if ids and ids[0] in known | set(tokenizer.all_special_ids) else first
    return [first, *sorted(known - {first})]


# ---------- Data ------------------------------------------------------------------------------------------------------
# Rows on disk -> groups of scored completions -> what the loss trains on.


@dataclass
class Row:
    """One row of the data, checked. `completions` with their `scores` make a group; pairs are groups of 1 and 0."""

    where: str  # file and row number, for messages
    prompt: list[dict]  # messages
    fields: dict  # the row as it was read, for the reward
    completions: list[str] = dataclasses.field(default_factory=list)
    scores: list[float] = dataclasses.field(default_factory=list)
    labelled: bool = False  # scores are absolute labels (1 desirable, 0 not), not to be compared with each other


@dataclass
class Group:
    """A prompt and its scored completions as token ids, read or sampled; every loss trains on these."""

    row: int  # which of the run's rows, from 0
    prompt: list[int]
    completions: list[list[int]]
    scores: list[float]
    labelled: bool = False


@dataclass
class Sequence:
    """What a forward pass reads: a prompt and a completion, and what the loss must know about it."""

    prompt: list[int]
    completion: list[int]
    signal: float = 0.0  # GRPO: the advantage; DPO: +1 chosen, -1 rejected; KTO: +λ_D desirable, -λ_U undesirable
    row: int = 0
    ref: Tensor | None = None  # (len(completion),) log π_ref(y_t | x, y_<t); None: π_ref is the policy as it stands
    rejected: Tensor | None = None  # (len(completion),) booleans, with --perception sample
    shares: bool = False  # lies behind the sequence before it in one row of the forward pass, with the same prompt; see `cut`

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass
class Batch:
    """What one optimizer step trains on. DPO: chosen, rejected, chosen, rejected, …"""

    step: int
    sequences: list[Sequence]
    mismatched: list[Sequence]  # KTO: prompts with another prompt's completion, for z₀
    reward: float | None  # mean score of all completions behind the batch, where they have scores


def source_name(spec: str) -> str:
    """The NAME of NAME[:[CONFIG:]SPLIT][=PASSES]."""
    return spec.split("=")[0].split(":")[0]


def read_sources(specs: Iterable[str], config: Config, flag: str = "--data") -> tuple[list[Row], list[float]]:
    """The rows of all sources, and for each row how often it comes in one pass over the data."""
    rows, passes = [], []
    for spec in specs:
        name, _, weight = spec.partition("=")
        require(re.fullmatch(r"\d*\.?\d+", weight or "1"),
                f"{flag} {spec}: '{weight}' is no number of passes; for two passes over its rows write {name}=2")
        rows += read_rows(name, config, flag)
        passes += [float(weight or 1)] * (len(rows) - len(passes))
    return rows, passes


def read_rows(name: str, config: Config, flag: str) -> list[Row]:
    """Read NAME[:[CONFIG:]SPLIT] and check every row; raises UserError naming the first bad one."""
    source, rows, grouped = f"{flag} {name}", [], {}
    for number, fields in enumerate(itertools.islice(read_table(name, source, config), config.limit), 1):
        row = read_row(fields, f"{source} row {number}", config)
        alone = row is not None and len(row.scores) == 1 and not row.labelled  # HALOs writes a scored group as several rows
        first = grouped.setdefault(fields["prompt_id"], row) if alone and fields.get("prompt_id") is not None else row
        if first is row:
            rows.append(row)
        else:
            first.completions += row.completions
            first.scores += row.scores
    if dropped := rows.count(None):
        warn(f"{source}: dropped {dropped} rows whose two dialogues differ before their last turn, or end without an answer")
    rows = [row for row in rows if row is not None]
    require(rows, f"{source}: no rows")
    for row in rows:
        comparable = len(row.scores) != 1 or row.labelled
        require(comparable, f"{row.where}: a group of 1; a scored group needs two completions or more")
    return rows


def read_table(name: str, source: str, config: Config) -> Iterable[dict]:
    """The rows of NAME[:[CONFIG:]SPLIT] as they stand, by `datasets`."""
    import datasets

    datasets.disable_progress_bars()
    name = embedded(name, "data") if source_name(name) == "embedded" else name
    path, *rest = [name] if Path(name).exists() else name.split(":")
    kind, split = FILE_KINDS.get(Path(path).suffix), rest[-1] if rest else "train"
    require(not kind or Path(path).exists(), f"{source}: no such file")
    require(not kind or Path(path).stat().st_size, f"{source}: no rows; the file is empty")
    mend = f"name a file, a folder, or a data set of the hub{fetching(path, ' --repo-type dataset')}"
    with explained(source, f"is it really {kind}?" if kind else mend):
        try:
            load = functools.partial(datasets.load_dataset, split=split)
            return load(kind, data_files={split: path}) if kind else load(path, *rest[:-1])
        except Exception:
            if Path(path).suffix == ".jsonl":
                explain_lines(path, source, config)
            raise


def explain_lines(path: str, source: str, config: Config) -> None:
    """Raises UserError for the first line of a file that is no JSON object or no good row."""
    with open(path, "rb") as lines:
        for number, line in enumerate(filter(bytes.strip, lines), 1):
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise UserError(f"{source} row {number}: not JSON: {error}") from None
            require(isinstance(fields, dict), f"{source} row {number}: not a JSON object")
            read_row(fields, f"{source} row {number}", config)


def messages_of(value: Any, key: str, where: str) -> list[dict]:
    """Text or chat messages as messages; a transcript with "Human:" and "Assistant:" turns (HH-RLHF) is taken apart."""
    if isinstance(value, str):
        turns, roles = re.split(r"\n\n(Human|Assistant): ?", value), dict(Human="user", Assistant="assistant")
        found = [dict(role=roles[role], content=text.strip()) for role, text in zip(turns[1::2], turns[2::2])]
        if key == "prompt" or len(found) < 2:
            found = [dict(role="user" if key == "prompt" else "assistant", content=value)]
    elif isinstance(value, list) and all(isinstance(one, dict) and isinstance(one.get("role"), str) and
                                         isinstance(one.get("content"), str) for one in value):
        found = [dict(role=one["role"], content=one["content"]) for one in value]
    else:
        raise UserError(f"{where}: '{key}' must be text or messages with a 'role' and a 'content', not {value!r:.60}")
    text = value if isinstance(value, str) else found[-1]["content"] if found else ""
    require(text.strip(), f"{where}: '{key}' is empty; fill it or remove the row")
    return found


def completion_of(value: Any, key: str, where: str) -> str:
    """The text of a completion, given as text, as one assistant message, or as a dialogue that ends in one."""
    message = messages_of(value, key, where)[-1]
    ending = f"'{key}' ends in a message of the {message['role']}"
    require(message["role"] == "assistant", f"{where}: {ending}; it must end in the assistant's")
    return message["content"]


PUBLISHED = (  # our names for what data sets call otherwise: Alpaca, MATH, GSM8K, UltraFeedback-ArmoRM, HALOs
    dict(prompt="instruction"), dict(prompt="problem"), dict(prompt="question"), dict(prompt="prompt"),
    dict(completion="output"), dict(completions="all_generated_responses", scores="all_rm_scores"),
    dict(chosen="output_A", rejected="output_B"))


def read_row(fields: dict, where: str, config: Config) -> Row | None:
    """Check one row, and bring the shapes in which data sets are published into one.

    A `prompt` comes with `completions` and `scores`, with `chosen` and `rejected`, with `completion` and `label`, or alone,
    to be sampled from; for other names see PUBLISHED. `chosen` and `rejected` without a prompt are whole dialogues whose
    common turns are the prompt; None is returned where not just an answer follows those.
    """
    fields = {key: value for key, value in fields.items() if value is not None}  # datasets fills gaps with None
    known = dict(fields)
    for names in PUBLISHED:
        if all(theirs in fields for theirs in names.values()):
            known |= {ours: fields[theirs] for ours, theirs in names.items()}
    if "instruction" in fields and "output" in fields and "reward" not in fields:  # Alpaca's are demonstrations
        known.setdefault("label", True)
    if "output_A" in fields and "output_B" in fields and not known.pop("label", None):  # HALOs' label says which is better
        known |= dict(chosen=known["rejected"], rejected=known["chosen"])

    def need(kind: str, *keys: str) -> list:
        for key in keys:
            require(key in known, f"{where}: no '{key}'; {kind} needs it")
        return [known[key] for key in keys]

    if "prompt" not in known and "chosen" in known and "rejected" in known:
        dialogues = split_dialogues(known, where)
        if dialogues is None:
            return None
        known |= dialogues
    prompt = messages_of(*need("every row", "prompt"), "prompt", where)
    if config.prompt_template is not None:
        prompt[-1]["content"] = config.prompt_template.replace("{prompt}", prompt[-1]["content"])
    if config.system is not None and prompt[0]["role"] != "system":
        prompt.insert(0, {"role": "system", "content": config.system})

    texts, scores, labelled = [], [], False
    if "completions" in known or "scores" in known:
        completions, scores = need("a scored group", "completions", "scores")
        alike = isinstance(completions, list) and isinstance(scores, list) and 0 < len(completions) == len(scores)
        require(alike, f"{where}: 'completions' and 'scores' must be lists of one length")
        texts = [("completions", text) for text in completions]
    elif "chosen" in known or "rejected" in known:
        texts, scores = [(key, *need("a pair", key)) for key in ("chosen", "rejected")], [1, 0]
    elif "completion" in known or "label" in known:
        texts = [("completion", *need("a labelled completion", "completion"))]
        labelled = "label" in known or "reward" not in known
        scores = need("a labelled completion", "label") if labelled else [known["reward"]]
        is_label = not labelled or scores[0] in (True, False)
        require(is_label, f"{where}: 'label' is {scores[0]!r}; it must be true or false")
    for score in [] if labelled else scores:
        is_number = isinstance(score, (int, float)) and not isinstance(score, bool) and math.isfinite(score)
        key = "scores" if "scores" in known else "reward"
        require(is_number, f"{where}: '{key}' holds {score!r}; it must be a finite number")
    completions = [completion_of(text, key, where) for key, text in texts]
    return Row(where, prompt, fields, completions, [float(score) for score in scores], labelled)


def split_dialogues(known: dict, where: str) -> dict | None:
    """`chosen` and `rejected` as whole dialogues -> their common prompt and the two last turns."""
    chosen, rejected = (messages_of(known[key], key, where) for key in ("chosen", "rejected"))
    if len(chosen) > 1 or len(rejected) > 1:
        answered = all(turns[-1]["role"] == "assistant" and turns[-1]["content"].strip() for turns in (chosen, rejected))
        alike = answered and chosen[:-1] == rejected[:-1]
        return dict(prompt=chosen[:-1], chosen=chosen[-1:], rejected=rejected[-1:]) if alike else None
    texts = [chosen[0]["content"], rejected[0]["content"]]
    shared = os.path.commonprefix(texts)
    shared = shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1]  # plain text: up to the last whole word
    require(shared.strip(), f"{where}: no 'prompt', and 'chosen' and 'rejected' share no beginning that could be one")
    return dict(prompt=shared, chosen=texts[0][len(shared) :], rejected=texts[1][len(shared) :])


def encode_prompts(tokenizer: Any, prompts: list[list[dict]], answered: bool = False) -> list[list[int]]:
    """Token ids of prompts, up to where the completion begins: the chat template's, or the plain text without one.

    With `answered` the dialogues hold their answers, and end with them.
    """
    if tokenizer.chat_template:
        texts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=not answered)
        return tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template writes BOS itself
    ids = tokenizer(["\n\n".join(message["content"] for message in prompt) for prompt in prompts])["input_ids"]
    return [one[:-1] if one[-1:] == [tokenizer.eos_token_id] and not answered else one for one in ids]


def encode_rows(rows: list[Row], tokenizer: Any, end: int, longest: int, config: Config, flag: str = "--data") -> list[Group]:
    """Rows -> groups of token ids. Over-long prompts and completions are dropped, and counted in one warning."""
    with explained(f"{flag}: the model's chat template refuses a prompt", "change the prompts, or leave out --system"):
        prompts = encode_prompts(tokenizer, [row.prompt for row in rows])
    texts = [text for row in rows for text in row.completions]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    limit = min(longest, config.max_length or longest)
    groups, long_prompts, long_completions = [], 0, 0
    for number, (row, prompt) in enumerate(zip(rows, prompts)):
        completions = [[*itertools.takewhile(lambda token: token != end, next(encoded)), end] for _ in row.completions]
        require(prompt, f"{row.where}: the tokenizer makes no tokens of the prompt; is it the model's own?")
        if config.max_prompt_length and len(prompt) > config.max_prompt_length:
            long_prompts += 1
            continue
        room = config.max_new_tokens if config.sample_every or not completions else 1
        if len(prompt) + room > longest:
            lengths = f"a prompt of {len(prompt)} tokens and a completion of {room} exceed the model's {longest} positions"
            mend = f"shorten it, or drop such rows with --max-prompt-length {max(1, longest - room)}"
            raise UserError(f"{row.where}: {lengths}; {mend}")
        kept = [i for i, completion in enumerate(completions) if len(prompt) + len(completion) <= limit]
        long_completions += len(completions) - len(kept)
        if len(kept) == len(completions) or len(kept) > 1 or config.sample_every:
            chosen = [completions[i] for i in kept], [row.scores[i] for i in kept]
            groups.append(Group(number, prompt, *chosen, row.labelled))
    if long_prompts or long_completions:
        warn(f"{flag}: dropped {long_prompts} prompts and {long_completions} completions as over-long; see --max-length")
    require(groups, f"{flag}: every row is over-long; raise --max-length or --max-prompt-length")
    return groups


def repeat(groups: list[Group], passes: list[float], seed: int) -> list[Group]:
    """Each group as often as its row comes in one pass over the data; a fraction is that share of the groups."""
    chance = random.Random(seed)
    return [group for group in groups for _ in range(int(passes[group.row]) + (chance.random() < passes[group.row] % 1))]


def to_units(loss: str, group: Group) -> list[list[Sequence]]:
    """What each loss makes of a scored group; a unit is what --batch-size counts. The losses' only other difference."""
    make = lambda i, signal: Sequence(group.prompt, group.completions[i], signal, group.row)
    scores = torch.tensor(group.scores, dtype=torch.float64)
    if loss == "grpo":
        advantages = group_advantages(scores, torch.zeros(len(scores), dtype=torch.long)).tolist()
        return [[make(i, advantage) for i, advantage in enumerate(advantages)]]
    if loss == "dpo":  # best against worst; without a difference there is no pair
        best, worst = int(scores.argmax()), int(scores.argmin())
        return [[make(best, 1.0), make(worst, -1.0)]] if scores[best] > scores[worst] else []
    threshold = 0.5 if group.labelled else float(scores.mean())
    return [[make(i, 1.0 if score > threshold else -1.0)] for i, score in enumerate(group.scores)]


def weigh(units: list[list[Sequence]], config: Config) -> None:
    """Put KTO's λ_D and λ_U into the signals. By default λ_D n_D = λ_U n_U (Ethayarajh et al. 2024, section 4.2): a loss
    that pushes down more than it pushes up ends with a model that says nothing likely."""
    examples = [one for unit in units for one in unit]
    desirable = sum(one.signal > 0 for one in examples)
    balanced = config.undesirable_weight * (len(examples) - desirable) / max(1, desirable) or 1.0
    for one in examples:
        one.signal = (config.desirable_weight or balanced) if one.signal > 0 else -config.undesirable_weight


def make_batch(step: int, loss: str, units: list[list[Sequence]], reward: float | None, longest: int) -> Batch:
    """A step's batch of fresh sequences, and for KTO each prompt with the completion of the next other prompt."""
    sequences = [dataclasses.replace(sequence) for unit in units for sequence in unit]
    mismatched = []
    for i, one in enumerate(sequences if loss == "kto" else []):
        other = next((other for other in sequences[i + 1 :] + sequences[:i] if other.prompt != one.prompt), None)
        if other is not None:
            mismatched.append(Sequence(one.prompt, other.completion[: longest - len(one.prompt)]))
    return Batch(step, sequences, mismatched, reward)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@functools.lru_cache(1)
def shuffled(size: int, seed: int) -> list[int]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()


class Data:
    """The batches of a run, in order. Offline they are a function of the step; online they are drawn from the policy.

    `pending` holds the batches that are known and not yet trained on.
    """

    def __init__(self, config: Config, groups: list[Group], longest: int, draw: Callable[[list[Group], int], list[Group]]):
        self.config, self.groups, self.longest, self.draw = config, groups, longest, draw
        self.pending: deque[Batch] = deque()
        self.drawn_until = 0  # online: the last step whose completions were drawn
        # KTO counts examples, of which a prompt gives a whole group.
        self.prompts_per_step = math.ceil(config.batch_size / (config.group_size if config.loss == "kto" else 1))
        self.steps_per_epoch = max(1, len(groups) // self.prompts_per_step)
        if not config.sample_every:
            require(all(group.completions for group in groups),
                    "--data: prompts without completions; draw them with --sample-every 1")
            require(config.loss == "kto" or not any(group.labelled for group in groups),
                    "--data: labelled completions make no pairs or groups; use --loss kto, or --sample-every 1")
            self.units = [(unit, mean(group.scores)) for group in groups for unit in to_units(config.loss, group)]
            require(self.units, "--data: no row has a best and a worst completion, so there is no pair to train on")
            if config.loss == "kto":
                weigh([unit for unit, _ in self.units], config)
            self.steps_per_epoch = max(1, len(self.units) // config.batch_size)

    def pick(self, pool: list, step: int, count: int) -> list:
        """The step's `count` members of `pool`, each epoch in an order of its own."""
        places = (divmod(position, len(pool)) for position in range((step - 1) * count, step * count))
        return [pool[shuffled(len(pool), seed_of(self.config.seed, "order", epoch))[index]] for epoch, index in places]

    def known(self, until: int, after: int) -> list[Batch]:
        """The known batches of the steps after `after` up to `until`; offline, all of them."""
        if not self.config.sample_every:
            for step in range(self.pending[-1].step + 1 if self.pending else after + 1, until + 1):
                units, rewards = zip(*self.pick(self.units, step, self.config.batch_size))
                self.pending.append(make_batch(step, self.config.loss, units, mean(rewards), self.longest))
        return [batch for batch in self.pending if after < batch.step <= until]

    def draw_batches(self, step: int) -> None:
        """Online: sample and score the completions of the steps from `step` to the next drawing."""
        config, count = self.config, self.prompts_per_step
        steps = range(step, min(step + config.sample_every, config.steps + 1))
        groups = self.draw([group for one in steps for group in self.pick(self.groups, one, count)], step)
        units = [to_units(config.loss, group) for group in groups]
        if config.loss == "kto":
            weigh([unit for own in units for unit in own], config)
        for one, start in zip(steps, range(0, len(groups), count)):
            reward = mean([mean(group.scores) for group in groups[start : start + count]])
            chosen = list(itertools.chain(*units[start : start + count]))[: config.batch_size]
            self.pending.append(make_batch(one, config.loss, chosen, reward, self.longest))
        self.drawn_until = steps[-1]


# ---------- Rewards ---------------------------------------------------------------------------------------------------
# A score for each completion. What fails costs its sample --reward-failed, and never the run.


def load_reward(config: Config, device: torch.device) -> tuple[Callable[..., list[float]], Callable[[dict], str | None]]:
    """What --reward names, as two functions; raises UserError where it cannot be loaded.

    score(prompts, completions, rows) gives a finite float for each completion and raises nothing. Prompts are lists of
    messages (dicts with a `role` and a `content`), completions texts, rows dicts with all that the data has.
    complaint(row) says what a row lacks to be scored, or None.
    """
    name, seconds = config.reward, config.reward_seconds
    if name == "exact":  # white space around the answer aside
        same = lambda text, row: float(text.strip() == str(row["answer"]).strip())
        lack = "no 'answer'; --reward exact compares the completion with it"
        return lambda _, texts, rows: list(map(same, texts, rows)), lambda row: lack if row.get("answer") is None else None
    mends = {"math": "pip install math-verify",
             "model": "name a Hugging Face sequence classifier, or a local folder that holds one"}
    mend = mends.get(name.split(":")[0], "write FILE.py:function, a function(prompts, completions, rows) -> list of floats")
    with explained(f"--reward {name}", mend):
        if name == "math":
            prove = TimedCall(math_comparison, max(1, min(3, int(seconds / 3))))
            compare = functools.lru_cache(4096)(lambda *pair: prove(*pair, limit=seconds))  # the same errors come often
            score = lambda _, texts, rows: [float(same_answer(reference_answer(rows[0]), final_answer(texts[0]), compare))]
        elif name.startswith("model:"):
            score = model_reward(name.removeprefix("model:"), config, device)
        else:
            path, _, function = name.rpartition(":")
            os.stat(path)
            own = TimedCall(own_function, path, function)
            # One call for the whole drawing. A hang must not last as long as the drawing is large, hence the root.
            score = lambda *samples: own(*samples, limit=seconds * math.sqrt(len(samples[1])))
    lack = "no 'answer', and no 'solution' with a \\boxed{}; --reward math needs one of them"
    complaint = lambda row: lack if name == "math" and reference_answer(row) is None else None
    return functools.partial(forgiving, score, config, name != "math"), complaint


def forgiving(score: Callable[..., list], config: Config, together: bool, *samples: list) -> list[float]:
    """The scores of `samples`: prompts, completions and rows. Where scoring them together fails, each is scored alone; one
    that still fails, or whose score is no finite number, gets --reward-failed. One warning counts them."""

    def attempt(*samples: list) -> list | Exception:
        try:
            values, count = score(*samples), len(samples[1])
            fits = isinstance(values, list) and len(values) == count
            return values if fits else ValueError(f"{values!r:.60} is no list of {count}")
        except Exception as error:
            return error

    found = attempt(*samples) if together else None
    alone = [] if isinstance(found, list) else [attempt(*([part] for part in one)) for one in zip(*samples)]
    values = [one[0] if isinstance(one, list) else one for one in alone] or found
    good = [isinstance(value, (int, float)) and abs(value) < 1e300 for value in values]
    reasons = [found] * isinstance(found, Exception) + [value for value, fine in zip(values, good) if not fine]
    if reasons:
        failed = f"{good.count(False)} of {len(good)} samples failed and score {config.reward_failed:g}"
        warn(f"--reward {config.reward}: {failed}; the first reason: {reasons[0]!r:.200}")
    return [float(value) if fine else config.reward_failed for value, fine in zip(values, good)]


def model_reward(name: str, config: Config, device: torch.device) -> Callable[..., list]:
    """A sequence classifier's `score`, or else its last logit, of each dialogue in the classifier's own chat template."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    code = dict(trust_remote_code=config.trust_remote_code)
    dtype = torch.bfloat16 if device.type == "cuda" and config.dtype != "float32" else torch.float32
    tokenizer, load = AutoTokenizer.from_pretrained(name, **code), AutoModelForSequenceClassification.from_pretrained
    model, info = load(name, dtype=dtype, output_loading_info=True, **code)
    if info["missing_keys"]:  # a language model, whose head would be random
        raise ValueError(f"it has no {', '.join(sorted(info['missing_keys']))}")
    model.to(device).eval()
    pad = model.config.get_text_config().pad_token_id  # it shows such models where a sequence ends: without it, one by one

    @torch.no_grad()
    def score(prompts: list, completions: list, rows: list) -> list:
        dialogues = [[*prompt, {"role": "assistant", "content": text}] for prompt, text in zip(prompts, completions)]
        encoded = encode_prompts(tokenizer, dialogues, answered=True)
        scores: list = [f"{len(ids)} tokens, more than the reward model's positions" for ids in encoded]
        short = [[Sequence(ids, [], row=i)] for i, ids in enumerate(encoded) if len(ids) <= max_positions(model)]
        for batch in microbatches(short, config.microbatch_tokens if pad is not None else 1):
            ids = padded([one.prompt for one in batch], pad or 0).to(device)
            mask = padded([[1] * len(one) for one in batch], 0).to(device)
            with mixed_precision(device, config):
                out = model(input_ids=ids, attention_mask=mask)
            values = out.logits if getattr(out, "score", None) is None else out.score
            for one, value in zip(batch, values.float().view(len(batch), -1)[:, -1].tolist()):
                scores[one.row] = value
        return scores

    return score


class TimedCall:
    """A function in a process of its own, where it may hang, crash or exhaust its memory: only the call fails.

    make(*args), run in a fresh interpreter, returns the function. Arguments and results travel as JSON. A call beyond its
    limit, in seconds, ends the process and all that it has started; the next one starts another. Raises RuntimeError.
    """

    def __init__(self, make: Callable, *args: Any):
        self.source = f"{inspect.getsource(make)}\n{inspect.getsource(serve)}\nserve({make.__name__}, {args!r}, "
        self.end = None
        self(limit=300)

    @staticmethod
    def kill(process: subprocess.Popen) -> int:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it may have ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        return process.wait()

    def __call__(self, *args: Any, limit: float) -> Any:
        if self.end is None or not self.end.alive:
            self.pipe, theirs = multiprocessing.Pipe()
            # -P: no modules from the present folder. A session of its own can be ended as a whole, and Ctrl-C is not for it.
            line = [sys.executable, "-P", "-c", f"{self.source}{theirs.fileno()})"]
            process = subprocess.Popen(line, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True)
            theirs.close()
            self.end = weakref.finalize(self, self.kill, process)  # with this object, or at exit
            self(limit=300)  # loads the function, which may load a model
        try:
            self.pipe.send_bytes(json.dumps(args, default=str).encode())
            if not self.pipe.poll(limit):
                self.end()
                raise RuntimeError(f"took longer than {limit:.4g} s")
            answer = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise RuntimeError(f"its process ended with status {self.end()}") from None
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]


def serve(make, args, pipe):
    """In a TimedCall's process: answer calls, the first of which only loads, until the pipe closes, even amid a call."""
    import json, multiprocessing.connection, os, queue, threading
    pipe, calls, function = multiprocessing.connection.Connection(pipe), queue.SimpleQueue(), None

    def listen():
        try:
            while True:
                calls.put(json.loads(pipe.recv_bytes()))
        finally:
            os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        values = calls.get()
        try:
            function = function or make(*args)
            value = function(*values) if values else None
            answer = json.dumps({"value": value}, default=lambda value: value.tolist())  # tensors and arrays
        except BaseException as error:  # sys.exit() too
            answer = json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        pipe.send_bytes(answer.encode())


def own_function(path, name):
    """In a TimedCall's process: a function of the user's file, which may import from its folder."""
    import importlib, os, sys
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    return getattr(importlib.import_module(os.path.basename(path).removesuffix(".py")), name)


def math_comparison(seconds):
    """In a TimedCall's process: compare(reference, answer) by math-verify, with `seconds` for each of its three steps."""
    import os, re, resource, sys
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    import sympy, sympy.physics.units  # the latter now, as simplify would import it under the rules below
    # sympy makes numbers and formulas of text by eval. Here it makes numbers only, and math-verify's LaTeX parser makes
    # formulas; and whatever else would run as code must from now on come from a file.
    number = lambda text, *_, **__: sympy.Float(text) if "." in text else sympy.Integer(text)
    sympy.parsing.sympy_parser.parse_expr = sympy.parsing.parse_expr = number
    from math_verify import parse, parser, verify
    parser.parse_expr_cached = lambda text: parser.parse_latex_cached(text.replace("**", "^"))

    def code_from_files_only(event, args):
        if event == "exec" and not os.path.isfile(args[0].co_filename):
            raise RuntimeError("code that is in no file")

    sys.addaudithook(code_from_files_only)

    def parsed(text):  # math-verify looks for formulas between dollars, and for numbers in sentences
        sentence = re.search(r"(?<!\\)\$|\\[(\[]|[A-Za-z]{3}", re.sub(r"\\[a-zA-Z]+(\{[^{}]*\})?", " ", text))
        return parse(text if sentence else f"${text}$", parsing_timeout=seconds, raise_on_error=True)

    def compare(reference, answer):
        try:
            return verify(parsed(reference), parsed(answer), timeout_seconds=seconds, raise_on_error=True)
        except Exception:  # no mathematics, or not comparable; its time-out is no Exception
            return False

    return compare


def boxed(text: str) -> str | None:
    """What is in the last \\boxed{}; None if there is none or its braces don't match."""
    _, box, rest = text.rpartition("\\boxed{")
    depths = itertools.accumulate((sign == "{") - (sign == "}") for sign in rest)
    return next((rest[:end] for end, depth in enumerate(depths) if depth < 0), None) if box else None


def reference_answer(row: dict) -> str | None:
    """A row's `answer` (of GSM8K's, what follows ####), or what is in the last \\boxed{} of its `solution`; None without."""
    text = boxed(str(row.get("solution"))) if row.get("answer") is None else str(row["answer"])
    return " ".join((boxed(text) or text.split("####")[-1]).split()) or None if text else None


def final_answer(text: str) -> str:
    """A completion's answer: its last \\boxed{}, as $...$, or what follows its last #### or "answer is", or its last line."""
    if (inside := boxed(text)) is not None:
        return f"${' '.join(inside.split())}$"
    for mark in ("####", r"(?i)answer(?:\s+is\b|\s*:)\s*:?"):
        if len(parts := re.split(mark, text)) > 1:
            return " ".join(re.split(r"\.\s|\n", parts[-1].strip())[0].split())
    return " ".join(text.strip().rpartition("\n")[2].split())


def same_answer(reference: str, answer: str, compare: Callable[[str, str], bool]) -> bool:
    """Whether two answers are equal; compare(reference, answer) is asked where strings and plain numbers do not tell."""

    def plain(text: str) -> str:
        text = text.replace("−", "-").replace("{,}", ",").strip(" *$").removesuffix(".").strip(" *$")
        text = re.sub(r"\\(?:text|mbox|mathrm)\{([^{}]*)\}", r"\1", re.sub(r"\\[dt]frac", r"\\frac", text))
        # Spacing goes, but not between digits: "1 1/2" is not 11/2.
        text = re.sub(r"\\(?:left|right|q?quad)(?![a-zA-Z])|\\[!,;: $]|(?<!\d)\s+|\s+(?!\d)", "", text)
        return text.replace(",", "") if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text) else text

    if not answer or len(answer) > 1000 + len(reference):  # no answer is that long
        return False
    one, two = plain(reference), plain(answer)
    if all(re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", text) for text in (one, two)):
        return Fraction(one) == Fraction(two)
    return one == two or compare(reference, answer)


# ---------- Sampling --------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(policy: Module, prompts: list[list[int]], stops: list[int], pad: int, config: Config, seed: int) -> list[list[int]]:
    """One completion per prompt from one call of `model.generate`: token ids as sampled, up to and with the first stop token.

    A completion that ends without one of `stops` hit --max-new-tokens. Prompts are padded on the left. The draws are a
    function of `seed`; the global random state and the model's mode are left as they were.
    """
    from transformers import GenerationConfig
    settings = GenerationConfig(do_sample=True, temperature=config.temperature, top_p=config.top_p, top_k=0,
                                max_new_tokens=config.max_new_tokens, eos_token_id=stops, pad_token_id=pad)
    ids = padded(prompts, pad, "left").to(policy.device)
    mask = padded([[1] * len(prompt) for prompt in prompts], 0, "left").to(policy.device)
    training, devices = policy.training, [policy.device] if policy.device.type == "cuda" else []
    # What `settings` leaves out would come from the model's own, such as Qwen2.5's repetition penalty.
    own, policy.generation_config = policy.generation_config, GenerationConfig()
    policy.eval()
    try:
        with torch.random.fork_rng(devices), mixed_precision(policy.device, config), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(seed)
            drawn = policy.generate(ids, attention_mask=mask, generation_config=settings, synced_gpus=config.shard)
    finally:
        policy.train(training)
        policy.generation_config = own
    rows = drawn[:, ids.shape[1] :].tolist()
    return [row[: next((i for i, token in enumerate(row, 1) if token in stops), len(row))] for row in rows]


class Sampler:
    """Draws groups of completions from the policy and scores them, for training and for measuring alike."""

    def __init__(self, policy: Module, tokenizer: Any, config: Config):
        self.policy, self.tokenizer, self.config = policy, tokenizer, config
        self.stops, self.longest = stop_ids(policy, tokenizer), max_positions(policy)
        self.pad = self.stops[0]  # padding is masked, so any token will do, and some tokenizers' own is unknown to their model
        if config.sample_every or config.eval_data is not None:  # a reward may be a large model
            self.reward, self.complaint = load_reward(config, policy.device)

    def check_rows(self, rows: list[Row]) -> None:
        """Raises UserError for the first row that lacks what the reward needs."""
        for row in rows:
            complaint = self.complaint(row.fields)
            require(not complaint, f"{row.where}: {complaint}")

    def score(self, completions: list[list[int]], rows: list[Row]) -> list[float]:
        """The reward of each completion."""
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        return self.reward([row.prompt for row in rows], texts, [row.fields for row in rows])

    def calls(self, prompts: list[list[int]]) -> list[list[int]]:
        """Indices of the prompts of each call of `generate`: alike lengths together, cut by tokens, and work for all ranks."""
        units = [[Sequence(prompt, [], row=i)] for i, prompt in enumerate(prompts)]
        most = math.ceil(len(units) / world_size())
        alike = microbatches(units, self.config.sample_tokens, self.config.max_new_tokens)
        return [[one.row for one in call[start : start + most]] for call in alike for start in range(0, len(call), most)]

    def draw(self, prompts: list[Group], rows: list[Row], size: int, step: int) -> list[Group]:
        """`size` scored completions for each prompt. The ranks share the calls, and score one while the next is drawn."""
        repeated = [group for group in prompts for _ in range(size)]
        calls, found = self.calls([group.prompt for group in repeated]), {}
        rounds = math.ceil(len(calls) / world_size())
        with ThreadPoolExecutor(1) as scorer:
            for number in range(rank(), rounds * world_size() if self.config.shard else len(calls), world_size()):
                number %= len(calls)  # sharded, all ranks must call as often: the surplus changes nothing
                groups, seed = [repeated[i] for i in calls[number]], seed_of(self.config.seed, "draw", step, number)
                drawn = sample(self.policy, [group.prompt for group in groups], self.stops, self.pad, self.config, seed)
                found[number] = drawn, scorer.submit(self.score, drawn, [rows[group.row] for group in groups])
        own = {i: pair for number, (drawn, scores) in found.items() for i, *pair in zip(calls[number], drawn, scores.result())}
        everyone = {i: scored for part in gather(own) for i, scored in part.items()}
        scored = iter([everyone[i] for i in range(len(repeated))])
        return [Group(group.row, group.prompt, *map(list, zip(*itertools.islice(scored, size)))) for group in prompts]


def is_mixed(device: torch.device, config: Config) -> bool:
    return config.dtype == "mixed" or (config.dtype == "auto" and device.type == "cuda")


def mixed_precision(device: torch.device, config: Config) -> contextlib.AbstractContextManager:
    """bf16 autocast over fp32 weights where --dtype asks for it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=is_mixed(device, config))


# ---------- The policy's and the reference's log-probs ----------------------------------------------------------------


def rows_of(sequences: list[Sequence]) -> list[list[Sequence]]:
    """What lies in each row of a forward pass: a sequence, and those behind it that share its prompt."""
    rows: list[list[Sequence]] = []
    for one in sequences:
        rows[-1].append(one) if rows and one.shares else rows.append([one])
    return rows


def width(row: list[Sequence]) -> int:
    """Tokens of a row: the prompt once, and the completions."""
    return len(row[0].prompt) + sum(len(one.completion) for one in row)


def microbatches(units: list[list[Sequence]], tokens: int, more: int = 0) -> list[list[Sequence]]:
    """Units (a DPO pair is one) of like widths together: at most `tokens` tokens, with padding and `more` for each row, or one
    unit."""
    sized = [(max(map(width, rows)) + more, len(rows), unit) for unit in units for rows in [rows_of(unit)]]
    found: list[list[Sequence]] = []
    height, widest = 0, 0  # of the present microbatch, whose first unit is the widest
    for own_width, rows, unit in sorted(sized, key=lambda one: one[0], reverse=True):
        if not found or (height + rows) * widest > tokens:
            found.append([])
            height, widest = 0, own_width
        found[-1].extend(unit)
        height += rows
    return found


def units_of(sequences: list[Sequence], most: float, config: Config) -> list[list[Sequence]]:
    """What no cut parts: a DPO pair, otherwise a row. Neighbours with the same prompt share rows of at most `most` tokens.

    That computes the prompt once, but attention runs over the whole row: up to three prompts long, that is at most 9/8 of what
    attention costs apart, and up to 256 tokens it is little next to all else. Longer rows do not pay.
    """
    pairs, length = config.loss == "dpo", 0
    for i, one in enumerate(sequences):
        length += len(one.completion)
        fits = config.share_prompts and length <= min(most, max(3 * len(one.prompt), 256))
        one.shares = fits and (i % 2 if pairs else i) > 0 and one.prompt == sequences[i - 1].prompt
        length = length if one.shares else len(one)
    return [sequences[i : i + 2] for i in range(0, len(sequences), 2)] if pairs else rows_of(sequences)


def cut(sequences: list[Sequence], config: Config) -> list[list[Sequence]]:
    """This rank's share of a batch, in microbatches. Under --shard all ranks must have as many: [] makes up the number."""
    ranks, most = world_size(), config.microbatch_tokens
    units = units_of(sequences, math.inf, config)  # the same on all ranks, though memory may leave some a smaller `most`
    units.sort(key=lambda unit: sum(map(width, rows_of(unit))), reverse=True)
    # Dealt back and forth, so that the ranks have equal work.
    shares = [units[i :: 2 * ranks] + units[2 * ranks - 1 - i :: 2 * ranks] for i in range(ranks)]
    cuts = [microbatches([part for unit in share for part in units_of(unit, most, config)], most) for share in shares]
    return cuts[rank()] + [[]] * (max(map(len, cuts)) - len(cuts[rank()]) if config.shard else 0)


def padded(rows: list[list[int]], value: int, side: str = "right") -> Tensor:
    """Rows of many lengths as one (N, T) tensor."""
    rows = [torch.tensor(row, dtype=torch.long) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)


def completion_logps(model: Module, ids: Tensor, labels: Tensor, **layout: Tensor) -> Tensor:
    """Log-probs of `labels` (N, T) from token ids (N, T), by the model's trunk and its output head: (N, T).

    layout: position_ids (N, T) and attention_mask (N, 1, T, T), where rows hold more than one sequence.
    """
    hidden = model.base_model(input_ids=ids, use_cache=False, **layout).last_hidden_state
    head, softcap = model.get_output_embeddings(), getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return token_logps(hidden, head.weight, labels, head.bias, softcap)


def log_probs(model: Module, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
    """log π(y_t | x, y_<t) of every completion token: (N, T) log-probs, 0 elsewhere, and the (N, T) mask.

    Sequences are padded on the right, so that no completion token can attend to padding and no mask is needed. Where some
    share a prompt, a row of the forward pass is the prompt but for its last token, and then for each completion that token and
    the completion, whose positions and attention are those of the prompt's only continuation.
    """
    sequences = sequences or [Sequence([0, 0], [])]
    rows, send = rows_of(sequences), lambda tensor: tensor.to(model.device, non_blocking=True)
    in_rows = lambda tokens, value: padded(
        [[*itertools.chain(*(tokens(one)[i and len(one.prompt) - 1 :] for i, one in enumerate(row)))] for row in rows], value)
    ids = in_rows(lambda one: (one.prompt + one.completion)[:-1], 0)
    labels = in_rows(lambda one: ([-100] * len(one.prompt) + one.completion)[1:], -100)
    mask, layout = labels != -100, {}
    if len(rows) < len(sequences):
        positions = in_rows(lambda one: range(len(one) - 1), 0)
        # (R, L) whose token it is: 0 for the prompt's, and one more wherever the prompt's last position comes again
        owner = send((positions == mask.int().argmax(1, keepdim=True)).cumsum(1))
        attends = ((owner[:, None] == 0) | (owner[:, None] == owner[:, :, None])).tril()  # (R, query, key)
        layout = dict(position_ids=send(positions), attention_mask=attends[:, None])
    # The labels stay on the CPU, so that picking their positions keeps no GPU waiting.
    own = getattr(model, "completion_logps", functools.partial(completion_logps, model))
    logps = own(ids.to(model.device), labels, **layout)
    if layout:
        found = logps.flatten().index_select(0, send(mask.flatten().nonzero()[:, 0]))
        mask = padded([[0] * (len(one.prompt) - 1) + [1] * len(one.completion) for one in sequences], 0).bool()
        logps = logps.new_zeros(mask.shape).index_put(tuple(map(send, mask.nonzero(as_tuple=True))), found)
    return logps, send(mask)


def of_completions(values: Tensor, sequences: list[Sequence]) -> list[Tensor]:
    """The completion tokens of each row of an (N, T) tensor, as `log_probs` lays them out."""
    return [row[len(one.prompt) - 1 : len(one) - 1] for row, one in zip(values, sequences)]


def to_rows(values: list[Tensor], sequences: list[Sequence], like: Tensor) -> Tensor:
    """The inverse of `of_completions`: an (N, T) tensor on like's device, 0 elsewhere."""
    rows = torch.zeros(like.shape, dtype=values[0].dtype if values else like.dtype)
    for target, value in zip(of_completions(rows, sequences), values):
        target.copy_(value)
    return rows.to(like.device, non_blocking=True)


def fit_memory(work: Callable[[], Any], config: Config) -> Any:
    """work(), and where it runs out of memory, on a GPU or on the CPU, again with smaller microbatches."""
    while True:
        try:
            return work()
        except RuntimeError as error:
            if "memory" not in str(error) or config.shard or config.microbatch_tokens == 1:
                raise  # sharded, the other ranks are in the middle of an exchange
        config.microbatch_tokens = math.ceil(config.microbatch_tokens / 2)
        warn(f"out of memory; from here on --microbatch-tokens {config.microbatch_tokens}, which changes no result")


@torch.no_grad()
def each_token(model: Module, sequences: list[Sequence], config: Config, values: Callable) -> list[Tensor]:
    """`values(microbatch)` (N, T) for each sequence's completion tokens, on the CPU: all ranks compute, all ranks know."""
    sizes = [len(one.completion) for one in sequences]
    found = fit_memory(lambda: {id(one): own for microbatch in cut(sequences, config)
                                for one, own in zip(microbatch, of_completions(values(microbatch), microbatch))}, config)
    others = torch.zeros(max(sizes, default=0), device=model.device)  # what another rank computes
    flat = torch.cat([others[:0], *(found.get(id(one), others[:size]) for one, size in zip(sequences, sizes))])
    return list(add_up(flat).cpu().split(sizes))


def score(model: Module, batch: Batch, config: Config) -> None:
    """Write `model`'s log-probs into the batch as the reference's."""
    values = lambda microbatch: log_probs(model, microbatch)[0]
    with mixed_precision(model.device, config):
        for sequences in (batch.sequences, batch.mismatched):
            for one, ref in zip(sequences, each_token(model, sequences, config, values)):
                one.ref = ref.clone()


class Reference:
    """π_ref: what it is (the policy, as of the last sync) and where its log-probs come from.

    **copy** keeps a second model and scores each batch when its turn comes. **lookahead** keeps none: at a sync π_ref
    *is* the policy, so one pass of the policy over the batches up to the next sync yields every reference log-prob
    needed until then. Where that stretch reaches beyond what has been drawn, the weights are put aside (not a model:
    no activations, and on a GPU they lie in host memory) and lent to the policy once, right after the drawing.
    """

    def __init__(self, policy: Module, data: Data, config: Config):
        self.policy, self.data, self.config = policy, data, config
        self.syncs = bool(config.sync_k or config.sync_drift)
        require(config.ref != "lookahead" or not config.sync_drift,
                "--ref lookahead must know when the next sync comes, and --sync-drift does not; use --ref copy")
        require(config.ref != "lookahead" or config.sync_alpha == 1,
                "--ref lookahead takes the policy for the reference, and --sync-alpha below 1 a mixture; use --ref copy")
        # A drift is not known beforehand, and with a drawing every step each sync would put the weights aside.
        better = config.sync_drift or config.sync_alpha < 1 or (self.syncs and config.sample_every == 1)
        copied = config.ref == "copy" or (config.ref == "auto" and better)
        self.model = load_policy(config, policy.device)[0].requires_grad_(False) if copied else None
        self.kept: list[Tensor] | None = None
        self.until = 0  # the last step that the present reference serves

    def weights(self) -> list[Tensor]:
        return [local(p.detach()) for p in self.policy.parameters()]

    def keep_weights(self) -> None:
        """Put the policy's weights aside as the reference's."""
        self.kept = [p.to("cpu", copy=True) for p in self.weights()]

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """The policy with the reference's weights, for the length of a `with`."""
        own = [p.clone() for p in self.weights()]
        torch._foreach_copy_(self.weights(), self.kept)
        try:
            yield
        finally:
            torch._foreach_copy_(self.weights(), own)

    def score_known(self, after: int) -> None:
        """The reference log-probs of the known batches that the present reference serves, by the policy as it stands."""
        batches = self.data.known(self.until, after)
        for batch in tqdm(batches, desc="reference", leave=False, disable=len(batches) < 64 or None):
            score(self.policy, batch, self.config)

    def sync(self, step: int) -> None:
        """π_ref ← π_θ, for the steps after `step`."""
        if self.model is not None:
            with torch.no_grad():
                for own, new in zip(self.model.parameters(), self.policy.parameters()):
                    own.lerp_(new, self.config.sync_alpha) if self.config.sync_alpha < 1 else own.copy_(new)
            return
        drawn = self.data.drawn_until if self.config.sample_every else self.config.steps
        self.until = self.config.steps if self.syncs else drawn
        if self.config.sync_k:
            self.until = min(self.until, step - step % self.config.sync_k + self.config.sync_k)
        self.score_known(step)
        self.kept = None
        if drawn < self.until:
            self.keep_weights()

    def drawn(self, step: int) -> None:
        """Batches from `step` on were just drawn: score those that the present reference serves."""
        if not self.syncs:  # the baseline's reference is the policy that drew; drawn for one step, it is the policy itself
            if self.model is not None or self.data.drawn_until > step:
                self.sync(step - 1)
        elif self.kept is not None:
            with self.lent():
                self.score_known(step - 1)
            if self.data.drawn_until >= self.until:
                self.kept = None


# ---------- One optimizer step's gradient -----------------------------------------------------------------------------
# Every mean is over the global batch, so the cut into microbatches changes nothing.


def log_ratios(policy: Module, sequences: list[Sequence], config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """d = log π_θ - log π_ref: (N, T), 0 outside the completions; the (N, T) mask; log π_θ (N, T)."""
    with mixed_precision(policy.device, config):
        logps, mask = log_probs(policy, sequences)
    itself = not sequences or sequences[0].ref is None
    return logps - (logps.detach() if itself else to_rows([one.ref for one in sequences], sequences, logps)), mask, logps


def perceive(log_ratio: Tensor, sequences: list[Sequence], config: Config) -> tuple[Tensor, Tensor]:
    """d̃, and a boolean (N, T) tensor of what passes a gradient."""
    if config.perception == "clip":
        through = (log_ratio >= config.log_eps_p) & (log_ratio <= config.log_eps_r)
        return humanline_clip(log_ratio, config.log_eps_p, config.log_eps_r), through
    if config.perception == "sample" and sequences and sequences[0].rejected is not None:
        rejected = to_rows([one.rejected for one in sequences], sequences, log_ratio)
        return torch.where(rejected, log_ratio.detach(), log_ratio), ~rejected
    return log_ratio, torch.ones_like(log_ratio, dtype=torch.bool)


def draw_rejections(policy: Module, batch: Batch, config: Config) -> None:
    """--perception sample: decide each token's fate from the log-ratios of the whole batch, before any gradient.

    M_P and M_R are maxima over the batch, so a microbatch alone cannot decide.
    """
    if not batch.sequences:  # a drawing without a difference
        return
    found = each_token(policy, batch.sequences, config, lambda microbatch: log_ratios(policy, microbatch, config)[0])
    d, generator = torch.cat(found), torch.Generator().manual_seed(seed_of(config.seed, "reject", batch.step))
    shapes = config.gamma_p, config.gamma_r, config.beta_p, config.beta_r
    rejected = humanline_rejected(d, torch.ones_like(d), *shapes, generator)
    for one, own in zip(batch.sequences, rejected.split(list(map(len, found)))):
        one.rejected = own


def kto_reference_point(policy: Module, batch: Batch, config: Config) -> Tensor:
    """z₀ = max(0, mean over mismatched pairs of Σ_t d̃_t), one number for the whole batch."""
    if not batch.mismatched or batch.mismatched[0].ref is None:  # no pairs, or d = 0: the reference is the policy
        return torch.zeros((), device=policy.device)
    perceived = lambda microbatch: perceive(log_ratios(policy, microbatch, config)[0], microbatch, config)[0]
    total = sum(found.sum() for found in each_token(policy, batch.mismatched, config, perceived))
    return torch.as_tensor(total / len(batch.mismatched), device=policy.device).clamp(min=0)


class Collapse:
    """Whether a run is coming apart, told from the log-prob of the completions that the loss wants likelier.

    While a run learns, their surprisal, the mean -log π_θ per token, falls. Once it has come, over `window` steps, to `times`
    its least, and to `least` nats per token above that, the policy is losing what it was taught with what it is taught
    against, and its rewards go next: `python eval.py reproduce --only syncing` counts how often that is right.
    """

    def __init__(self, window: int = 16, times: float = 4.0, least: float = 0.03):
        self.recent: deque[float] = deque(maxlen=window)
        self.best, self.times, self.least, self.told = -math.inf, times, least, False

    def __call__(self, logp_wanted: float | None) -> str:
        """What to say after a step, once; logp_wanted: nats per token, as in the metrics."""
        if logp_wanted is not None:
            self.recent.append(logp_wanted)
        if self.told or len(self.recent) < self.recent.maxlen:
            return ""
        now = mean(self.recent)
        self.best = max(self.best, now)
        self.told = now < min(self.times * self.best, self.best - self.least)
        return (f"the completions that the loss wants likelier have fallen from {self.best:.2f} to {now:.2f} nats per token: "
                "the run may be coming apart; try a lower --lr, fewer syncs or fresher samples (--sample-every)"
                if self.told else "")


def batch_loss(d: Tensor, seen: Tensor, mask: Tensor, signals: Tensor, z0: Tensor | None,
               counts: dict[str, int], config: Config) -> tuple[Tensor, Tensor]:
    """A microbatch's share of the global mean loss, and of the mean reward margin (0 for GRPO).

    d, seen: (N, T) raw and perceived log-ratios; signals: (N,), see Sequence; counts: of the whole batch.
    """
    if config.loss == "grpo":
        token_losses = grpo_loss(d, seen, signals, config.epsilon, config.kl_beta) * mask
        if config.average == "sequence":
            return (token_losses.sum(-1) / mask.sum(-1)).sum() / counts["sequences"], signals.new_zeros(())
        return token_losses.sum() / counts["tokens"], signals.new_zeros(())
    gains, wanted = config.beta * seen.detach().sum(-1), signals > 0  # the implicit reward of each sequence
    if config.loss == "dpo":
        losses = dpo_loss(seen[0::2], seen[1::2], config.beta)
        return losses.sum() / counts["desirable"], (gains * signals).sum() / counts["desirable"]
    losses = kto_loss(seen, wanted, z0, config.beta) * signals.abs()  # λ_D, λ_U: see `weigh`
    undesirable = max(1, counts["sequences"] - counts["desirable"])
    margin = gains[wanted].sum() / max(1, counts["desirable"]) - gains[~wanted].sum() / undesirable
    return losses.sum() / counts["sequences"], margin


def forward_backward(policy: Module, batch: Batch, config: Config) -> dict[str, float]:
    """Fill the parameters' .grad with the gradient of the batch's loss; returns what the step reports."""
    counts = dict(sequences=len(batch.sequences), tokens=sum(len(one.completion) for one in batch.sequences),
                  desirable=sum(one.signal > 0 for one in batch.sequences))
    z0 = kto_reference_point(policy, batch, config) if config.loss == "kto" else None
    if config.perception == "sample":
        draw_rejections(policy, batch, config)
    totals = fit_memory(lambda: accumulate(policy, batch, z0, counts, config), config)
    loss, margin, *sums, wanted_logps = add_up(totals).tolist()
    wanted = sum(len(one.completion) for one in batch.sequences if one.signal > 0)
    report = dict(loss=loss, tokens=counts["tokens"])
    report |= {name: total / max(1, counts["tokens"]) for name, total in zip(("unclamped", "drift", "kl", "logp"), sums)}
    report["logp_wanted"] = wanted_logps / wanted if wanted else None
    report |= dict(reward=batch.reward, reward_margin=margin if config.loss != "grpo" else None)
    report |= dict(z0=float(z0) if z0 is not None else None)
    return {name: value for name, value in report.items() if value is not None}


def accumulate(policy: Module, batch: Batch, z0: Tensor | None, counts: dict[str, int], config: Config) -> Tensor:
    """Forward and backward of this rank's microbatches, then the sum of all ranks' gradients.

    Returns this rank's (7,) sums: loss, reward margin, tokens let through, |d|, KL, log π_θ, the same of wanted completions.
    """
    policy.zero_grad()  # of an attempt that ran out of memory
    totals = torch.zeros(7, dtype=torch.float64, device=policy.device)
    for microbatch in cut(batch.sequences, config):
        d, mask, logps = log_ratios(policy, microbatch, config)
        seen, through = perceive(d, microbatch, config)
        signals = torch.tensor([one.signal for one in microbatch] or [0.0], device=d.device)
        loss, margin = batch_loss(d, seen, mask, signals, z0, counts, config) if microbatch else (d.sum(), signals.sum())
        (loss * world_size() if config.shard else loss).backward()  # FSDP takes the ranks' mean
        with torch.no_grad():
            sums = loss, margin, (through & mask).sum(), d.abs().sum(), token_kl(d).sum(), logps.sum()
            totals += torch.stack((*sums, logps[signals > 0].sum())).double()
    for p in policy.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None and p.requires_grad else p.grad
    if world_size() > 1 and not config.shard:  # FSDP has added them up in its backward pass
        for sum_of_ranks in [dist.all_reduce(p.grad, async_op=True) for p in policy.parameters() if p.grad is not None]:
            sum_of_ranks.wait()
    return totals


# ---------- Checkpoints -----------------------------------------------------------------------------------------------
# A folder written beside and renamed, with the hash of every file; tensors as safetensors, never a pickle.


def write_folder(path: Path, write: Callable[[Path], None], hashed: bool = True) -> None:
    """Make `path` by `write(temporary folder)` and a rename, so that it is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        write(temporary)
        if hashed:
            (temporary / "files.json").write_text(json.dumps(hashes(temporary)))
        temporary.chmod(0o755)
        temporary.rename(path)
    except OSError:
        if not path.exists():
            raise  # otherwise another process made the same folder first
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file in a folder, but of the one that holds them."""
    def digest(path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return {path.name: digest(path) for path in sorted(folder.iterdir()) if path.name != "files.json"}


def damage(folder: Path) -> str:
    """What is wrong with a folder whose hashes were written, or ""."""
    try:
        written, found = json.loads((folder / "files.json").read_text()), hashes(folder)
    except (OSError, ValueError) as error:
        return f"not a whole checkpoint ({error})"
    damaged = [name for name in written if written[name] != found.get(name)]
    return f"damaged: {', '.join(damaged)}" if damaged else ""


def pack_batches(batches: list[Batch]) -> dict[str, Tensor]:
    """Batches as a few flat tensors, as safetensors wants them."""
    flat = [(batch.step, kind, one) for batch in batches
            for kind, group in enumerate((batch.sequences, batch.mismatched)) for one in group]
    rewards = [[batch.step, math.nan if batch.reward is None else batch.reward] for batch in batches]
    heads = [[step, kind, one.row, len(one.prompt), len(one.completion), one.ref is not None] for step, kind, one in flat]
    refs = [torch.full((len(one.completion),), math.nan) if one.ref is None else one.ref for *_, one in flat]
    return dict(batches=torch.tensor(rewards, dtype=torch.float64), heads=torch.tensor(heads),
                signals=torch.tensor([one.signal for *_, one in flat], dtype=torch.float64),
                ids=torch.tensor([token for *_, one in flat for token in one.prompt + one.completion]),
                refs=torch.cat([torch.zeros(0), *refs]))


def unpack_batches(tensors: dict[str, Tensor]) -> list[Batch]:
    """The inverse of `pack_batches`."""
    batches = {int(step): Batch(int(step), [], [], None if math.isnan(reward) else reward)
               for step, reward in tensors["batches"].tolist()}
    heads = tensors["heads"].tolist()
    ids = iter(tensors["ids"].split([size for head in heads for size in head[3:5]]))  # prompt, completion, prompt, …
    refs = tensors["refs"].split([head[4] for head in heads])
    for (step, kind, row, *_, has_ref), signal, ref in zip(heads, tensors["signals"].tolist(), refs):
        one = Sequence(next(ids).tolist(), next(ids).tolist(), signal, row, ref.clone() if has_ref else None)
        (batches[step].mismatched if kind else batches[step].sequences).append(one)
    return list(batches.values())


class Saver:
    """Writes checkpoints while the loop goes on: it waits for the copy of its state, not for the disk.

    A checkpoint is everything that the next step depends on. Randomness needs no state: it is a function of the seed and
    the step. Rank 0 writes, tensors whole, so that any number of ranks can read.
    """

    def __init__(self, folder: Path, config: Config, last: Path | None = None):
        self.folder, self.config, self.last = folder, config, last
        self.writer = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        self.copies: dict[tuple[str, str], Tensor] = {}  # kept from save to save: fresh memory is slow to come by

    def save(self, policy: Module, optimizer: torch.optim.Optimizer, reference: Reference, step: int) -> None:
        self.wait()

        def copied(kind: str, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
            for name, tensor in named:
                value = whole(tensor.detach())  # by all ranks, for the first
                if rank() == 0:
                    if (kind, name) not in self.copies:
                        self.copies[kind, name] = torch.empty(value.shape, dtype=value.dtype)
                    self.copies[kind, name].copy_(value)
            return {name: value for (of, name), value in self.copies.items() if of == kind}

        parameters = list(policy.named_parameters())
        moments = [(f"{key}:{name}", value) for name, p in parameters for key, value in optimizer.state[p].items()]
        batches = pack_batches(list(reference.data.pending))
        tensors = dict(policy=copied("policy", parameters), optimizer=copied("optimizer", moments), batches=batches)
        if reference.model is not None:
            tensors["reference"] = copied("reference", reference.model.named_parameters())
        elif reference.kept is not None:
            with reference.lent():
                tensors["reference"] = copied("reference", parameters)
        state = dict(step=step, until=reference.until, drawn_until=reference.data.drawn_until, settings=dict(vars(self.config)))
        if rank() == 0:
            self.writing = self.writer.submit(self.write, self.folder / f"step-{step:08d}", tensors, state)

    def write(self, path: Path, tensors: dict[str, dict[str, Tensor]], state: dict) -> None:
        from safetensors.torch import save_file

        def fill(folder: Path) -> None:
            for name, group in tensors.items():
                save_file(group, folder / f"{name}.safetensors")
            (folder / "state.json").write_text(json.dumps(state))

        if path.exists():  # a damaged one, which was not resumed from
            shutil.rmtree(path)
        write_folder(path, fill)
        self.last = path
        for old in sorted(old for old in path.parent.glob("step-*") if old <= path)[: -self.config.keep]:  # later: damaged
            shutil.rmtree(old)

    def wait(self) -> None:
        """Until the disk has it. What could not be written costs a warning: the run and the checkpoints before go on."""
        if self.writing is not None and (error := self.writing.exception()) is not None:
            warn(f"could not write a checkpoint to {self.folder}: {error}; the newest is {self.last}")
        self.writing = None


def read_checkpoint(path: Path) -> dict:
    """A checkpoint's state.json, every file's hash verified; raises UserError if it is damaged."""
    if wrong := damage(path):
        raise UserError(f"{path}: {wrong}")
    return json.loads((path / "state.json").read_text())


def find_checkpoint(config: Config) -> tuple[Path, dict] | None:
    """What --resume names: the newest whole checkpoint of --out, or the one at a path."""
    if config.resume not in (None, "latest"):
        return Path(config.resume), read_checkpoint(Path(config.resume))
    for path in sorted(Path(config.out, "checkpoint").glob("step-*"), reverse=True) if config.resume else []:
        try:
            return path, read_checkpoint(path)
        except UserError as error:
            warn(f"{error}; trying the one before")
    return None


def load_checkpoint(path: Path, state: dict, config: Config, policy: Module, optimizer: torch.optim.Optimizer,
                    reference: Reference) -> int:
    """Put everything back; returns the step that was the last. Raises UserError where the settings differ in more than how
    long the run is and what it writes."""
    from safetensors.torch import load_file
    free = {"steps", "out", "save_every", "keep", "resume", "config", "eval_data", "eval_every", "eval_prompts", "eval_samples",
            "microbatch_tokens", "share_prompts", "compile", "shard", "checkpoint_activations", "track"}
    for name, value in json.loads(json.dumps(vars(config))).items():
        before = state["settings"].get(name)
        different = f"the run has {flag_of(name)} {before}, not {value}"
        require(name in free or value == before, f"--resume {path}: {different}; resume it with its own config.toml")
    planned = state["settings"]["steps"]
    require(config.steps <= planned, f"--resume {path}: the run was planned for {planned} steps, and its reference is known as "
            f"far as that; --steps {config.steps} needs a run of its own, with --model {Path(config.out, 'final')}")

    def put_back(file: str, model: Module) -> None:
        saved = load_file(path / file)
        for name, p in model.named_parameters():
            put(p, saved[name])

    if reference.model is not None:
        put_back("reference.safetensors", reference.model)
    elif (path / "reference.safetensors").exists():
        put_back("reference.safetensors", policy)
        reference.keep_weights()
    put_back("policy.safetensors", policy)
    parameters = dict(policy.named_parameters())
    for key, value in load_file(path / "optimizer.safetensors").items():
        key, _, name = key.partition(":")
        p = parameters[name]
        optimizer.state[p][key] = torch.zeros_like(p) if value.dim() else value.to(p.device)
        put(optimizer.state[p][key], value)
    reference.data.pending = deque(unpack_batches(load_file(path / "batches.safetensors")))
    reference.until, reference.data.drawn_until = state["until"], state["drawn_until"]
    return state["step"]


# ---------- The loop --------------------------------------------------------------------------------------------------


def learning_rate(step: int, config: Config) -> float:
    """Linear warmup over the first fraction of the steps, then constant or a cosine down to 0."""
    warmup = math.ceil(config.warmup * config.steps)
    if step <= warmup:
        return config.lr * step / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (config.steps - warmup + 1)))
    return config.lr * cosine if config.schedule == "cosine" else config.lr


def read_metrics(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl, without one that a crash cut off."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def open_metrics(path: Path, last_step: int) -> tuple[TextIO, list[dict]]:
    """metrics.jsonl to go on after `last_step`, no line lost or doubled, and the lines that it holds."""
    if rank() > 0:
        return open(os.devnull, "w"), []
    kept = [line for line in read_metrics(path) if line["step"] <= last_step]
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(fresh, path)
    return open(path, "a", buffering=1, encoding="utf-8"), kept


def tracker(config: Config, out: Path, first: int) -> Callable[[dict], None]:
    """What --track does with a line of metrics."""
    if config.track == "tensorboard" and rank() == 0:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(out), purge_step=first)

        def log(line: dict) -> None:
            for name, value in line.items():
                board.add_scalar(name, value, line["step"])
            board.flush()

        return log
    if config.track == "wandb" and rank() == 0:
        import wandb

        run = wandb.init(project="humanline", name=out.name, dir=str(out), config=dataclasses.asdict(config))
        return lambda line: run.log(line, step=line["step"])
    return lambda line: None


def claim_folder(config: Config) -> Path:
    """The run's folder, which must not hold another run; raises UserError otherwise. Writes nothing."""
    if config.out is None:
        kind, source = "humanline" if config.humanline else "baseline", f"every-{config.sample_every}"
        base = f"runs/{config.loss}-{kind}-{source if config.sample_every else 'offline'}"
        return next(path for n in itertools.count(1) if not (path := Path(base if n == 1 else f"{base}-{n}")).exists())
    out = Path(config.out)
    parent = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    require(not (out / "final").exists(), f"--out {out} holds a finished run; choose another folder")
    require(out.is_dir() or not out.exists(), f"--out {out} is a file; choose a folder")
    require(config.resume is not None or not (out / "metrics.jsonl").exists(),
            f"--out {out} holds a run that did not finish; go on with --resume latest, or choose another folder")
    require(os.access(parent, os.W_OK), f"--out {out}: {parent} is not writable; choose another folder")
    return out


@contextlib.contextmanager
def locked(folder: Path, wait: bool) -> Iterator[None]:
    """Hold a folder's lock, which ends with the process, however it ends; raises BlockingIOError if it is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C become a request, in the list, to stop after the step; a second Ctrl-C stops at once."""
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        asked.append(number)
        if number == signal.SIGINT and world_size() == 1:
            signal.signal(number, before[number])

    main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM) if main_thread}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(config: Config) -> dict:
    """Everything between the flags and the final folder; returns what the run's last sentence says."""
    go_offline_without_hub(config)
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    started = time.perf_counter()

    # Whatever the user can have got wrong is found here, the cheapest first, before anything is written.
    claim_folder(config)
    if on_hub(config.model):  # minutes may go into the embedded data before the model is loaded
        with explained_model(config):
            transformers.AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    rows, passes = read_sources(config.data, config)
    eval_rows = [] if config.eval_data is None else read_rows(config.eval_data, config, "--eval-data")[: config.eval_prompts]
    device = start_ranks()
    out, checkpoint = gather((claim_folder(config), find_checkpoint(config)) if rank() == 0 else None)[0]
    config = dataclasses.replace(config, out=str(out))
    policy, tokenizer = load_policy(config, device)
    sampler = Sampler(policy, tokenizer, config)
    groups = repeat(encode_rows(rows, tokenizer, sampler.stops[0], sampler.longest, config), passes, config.seed)
    tokens = itertools.chain(*(itertools.chain(group.prompt, *group.completions) for group in groups))
    require(max(tokens) < len(policy.get_input_embeddings().weight),
            f"--model {config.model}: its tokenizer makes tokens that the model does not know; use the model's own")
    if config.sample_every:
        sampler.check_rows(rows)
    data = Data(config, groups, sampler.longest, lambda prompts, step: sampler.draw(prompts, rows, config.group_size, step))
    config.steps = config.steps or data.steps_per_epoch
    measure = held_out(config, sampler, eval_rows) if eval_rows else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, betas=(0.9, 0.999), eps=config.adam_eps,
                                  weight_decay=config.weight_decay, fused=True)
    reference = Reference(policy, data, config)
    first = 1 + load_checkpoint(*checkpoint, config, policy, optimizer, reference) if checkpoint else 1

    with contextlib.ExitStack() as stack:
        if rank() == 0:
            try:
                stack.enter_context(locked(out, wait=False))
            except BlockingIOError:
                raise UserError(f"--out {out}: another process is training into it; choose another folder") from None
            for unfinished in Path(out, "checkpoint").glob(".step-*"):  # of a process that was killed
                shutil.rmtree(unfinished)
            (out / "config.toml").write_text(to_toml(config), encoding="utf-8")
            describe(config, policy, groups, reference, first)
        saver = Saver(out / "checkpoint", config, checkpoint[0] if checkpoint else None)
        metrics, earlier = open_metrics(out / "metrics.jsonl", first - 1)
        track = tracker(config, out, first)
        before = gather(earlier[0].get("accuracy_before") if earlier else None)[0]
        accuracy = before = measure(0) if measure and before is None else before
        collapse = Collapse()
        for line in earlier:
            collapse(line.get("logp_wanted"))
        asked, stop, quiet = stack.enter_context(stop_requests()), False, dict(disable=True) if rank() else {}
        bar = tqdm(range(first, config.steps + 1), desc=config.loss, initial=first - 1, total=config.steps, unit="step",
                   dynamic_ncols=True, **quiet)
        for step in bar:
            step_started, sample_seconds = time.perf_counter(), 0.0

            # The batch, and its reference log-probs.
            if config.sample_every and step > data.drawn_until:
                data.draw_batches(step)
                sample_seconds = time.perf_counter() - step_started
                reference.drawn(step)
            if step == 1 and (reference.syncs or not config.sample_every):
                reference.sync(0)
            batch = data.known(step, step - 1)[0]
            if reference.model is not None:
                score(reference.model, batch, config)

            # Backward, clip, sync, step, in this order: the reference is the policy of the previous step.
            report = forward_backward(policy, batch, config)
            grad_norm = float(whole(torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)))
            if not math.isfinite(report["loss"]) or not math.isfinite(grad_norm):
                saver.wait()
                saved = f"the last good checkpoint is {saver.last}"
                saved = saved if saver.last else "there is no checkpoint (see --save-every)"
                where = ", ".join(rows[i].where for i in sorted({one.row for one in batch.sequences}))
                what = f"step {step}: loss {report['loss']}, gradient norm {grad_norm}"
                raise FloatingPointError(f"{what}; {saved}; the batch was {where}")
            data.pending.popleft()
            if (config.sync_k and step % config.sync_k == 0) or (config.sync_drift and report["drift"] > config.sync_drift):
                reference.sync(step)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            optimizer.step()
            optimizer.zero_grad()

            step_seconds = time.perf_counter() - step_started
            line = dict(step=step, lr=learning_rate(step, config), grad_norm=grad_norm, **report,
                        step_seconds=step_seconds, sample_seconds=sample_seconds)
            if step == 1 and before is not None:
                line["accuracy_before"] = before
            if measure and (step == config.steps or (config.eval_every and step % config.eval_every == 0)):
                accuracy = line["accuracy"] = measure(step)
            if said := collapse(report.get("logp_wanted")):
                warn(f"step {step}: {said}")
            metrics.write(json.dumps(line) + "\n")
            track(line)
            shown = {name: report.get(name) for name in ("loss", "reward", "unclamped")} | {"pass@1": accuracy}
            shown = {name: f"{value:.3f}" for name, value in shown.items() if value is not None}
            bar.set_postfix(shown | {"tokens/s": f"{report['tokens'] / step_seconds:.0f}"}, refresh=False)
            stop = float(add_up(torch.tensor(float(len(asked))))) > 0 and step < config.steps
            if stop or (config.save_every and step % config.save_every == 0):
                saver.save(policy, optimizer, reference, step)
            if stop:
                break
        saver.wait()
        if not stop:
            save_final(out / "final", policy, tokenizer, config)
        if world_size() > 1:
            dist.barrier()  # nobody leaves while another still writes
    seconds = time.perf_counter() - started
    return dict(out=out, before=before, after=accuracy, seconds=seconds, config=config, stopped=step if stop else None)


def held_out(config: Config, sampler: Sampler, rows: list[Row]) -> Callable[[int], float]:
    """A function that measures the mean reward of fresh samples on --eval-data: pass@1 for rewards of 0 and 1."""
    settings = dataclasses.replace(config, sample_every=1)
    groups = encode_rows(rows, sampler.tokenizer, sampler.stops[0], sampler.longest, settings, "--eval-data")
    sampler.check_rows(rows)
    draw = lambda step: sampler.draw(groups, rows, config.eval_samples, 500_000 + step)
    return lambda step: sum(sum(group.scores) for group in draw(step)) / (len(groups) * config.eval_samples)


def in_words(config: Config) -> dict[str, str]:
    """What the run is, for people."""
    drift = f"when drift passes {config.sync_drift}" if config.sync_drift else "never"
    perceptions = {"clip": f"a clip to [{config.log_eps_p}, {config.log_eps_r}]", "sample": "rejection sampling"}
    return dict(objective=f"{config.loss.upper()} with humanline" if config.humanline else f"plain {config.loss.upper()}",
                data=" ".join(config.data), sync=f"every {config.sync_k} steps" if config.sync_k else drift,
                perception=perceptions.get(config.perception, "nothing"), settings=to_toml(config),
                base=config.model if on_hub(config.model) else re.sub(r"[^\w.-]+", "-", Path(config.model).name))  # no path


MODEL_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
base_model: {base}
tags: [humanline, {loss}]
---

# {base}, aligned by {objective}

{steps} steps from `{model}` on `{data}`, seed {seed}. The reference was synced {sync}; the token log-ratio was seen through
{perception}. With these settings `humanline.py --config` repeats the run:

```toml
{settings}```

Sijia Liu, Niklas Muennighoff, Kawin Ethayarajh: [Humanline: Online Alignment as Perceptual
Loss](https://arxiv.org/abs/2509.24207), ICLR 2026.
"""


def model_card(config: Config) -> str:
    """README.md of the final folder: how the model was made."""
    return MODEL_CARD.format(**vars(config) | in_words(config))


def save_final(path: Path, policy: Module, tokenizer: Any, config: Config) -> None:
    """An ordinary Hugging Face folder."""
    every, distinct = (dict(policy.named_parameters(remove_duplicate=once)) for once in (False, True))
    weights = {name: whole(value.detach()).cpu() for name, value in policy.state_dict().items()
               if name in distinct or name not in every}  # a tied head, once

    def write(folder: Path) -> None:
        policy.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(model_card(config), encoding="utf-8")

    if rank() == 0:
        try:
            write_folder(path, write, hashed=False)
        except Exception as error:  # safetensors has an exception of its own for a full disk
            raise OSError(f"could not write {path}: {error}; with room made, go on with --resume latest") from error


def describe(config: Config, policy: Module, groups: list[Group], reference: Reference, first: int) -> None:
    """Say what is about to be done."""
    words, size = in_words(config), sum(p.numel() for p in policy.parameters())
    source = f"drawn every {config.sample_every} steps" if config.sample_every else "the data's own (offline)"
    kept = "lookahead" if reference.model is None else "copy"
    print(f"model       {config.model}, {size / 1e6:.2f} M parameters on {policy.device}\n"
          f"data        {words['data']}, {len(groups):,} prompts; completions {source}\n"
          f"objective   {config.loss}; sync {words['sync']}; perception: {words['perception']}; reference by {kept}\n"
          f"steps       {first} to {config.steps}, batches of {config.batch_size}, lr {config.lr:g}", flush=True)


# ---------- The embedded default --------------------------------------------------------------------------------------
# A tiny model that was taught two-digit additions by a demonstrator who is wrong too often.

EMBEDDED = dict(seed=os.environ.get("HUMANLINE_BASE", 0), held_out=500, group=8,
                slips=(-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20))
LESSONS = {  # how often the demonstrator errs, at each partial sum, in the first lesson and in the last; how many lessons, of
    # how many demonstrations; learning rate. Errors from the first lesson on would cost as much again to learn past them.
    "base": (0.0, 0.4, 1000, 128, 2e-2), "worse": (0.8, 0.8, 120, 384, 2e-3), "better": (0.15, 0.15, 120, 384, 2e-3),
    "long": (0.0, 0.1, 560, 128, 2e-2), "long-worse": (0.3, 0.3, 120, 128, 2e-3)}
CHAT_TEMPLATE = ("{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
                 "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def embedded(name: str, kind: Literal["model", "data"]) -> str:
    """The path behind `embedded[:PART]`, an ordinary folder or file in the user's cache, made on first use.

    Models: `embedded` (the base), `embedded:worse` and `embedded:better`, which saw other demonstrators afterwards; and for
    sums of six digits, partial sums written down, `embedded:long` and `embedded:long-worse`. Data, one row per prompt with
    its answer: under the same names with scored samples of these; `embedded:test`, `embedded:long-test`: held out, without.
    Other models and data of the same recipe come of another seed, the environment variable HUMANLINE_BASE.
    """
    part = name.partition(":")[2] or "base"
    parts = dict(model=(*LESSONS,), data=(*LESSONS, "test", "long-test"))[kind]
    if part not in parts:
        raise UserError(f"--{kind} {name}: no such part; there are {', '.join(f'embedded:{known}' for known in parts)}")
    require(str(EMBEDDED["seed"]).isdecimal(), f"HUMANLINE_BASE={EMBEDDED['seed']}: want a whole number, the seed of the base")
    EMBEDDED["seed"] = int(EMBEDDED["seed"])
    # The key covers the recipe and the code that follows it, so that a stale cache is never taken for a fresh one.
    code = (embedded_tokenizer, demonstrate, additions, teach, answers, make_model, make_data, sample, Sampler)
    recipe = [EMBEDDED, LESSONS, CHAT_TEMPLATE, *map(inspect.getsource, code)]
    key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
    home = os.environ.get("HUMANLINE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "humanline")
    folder = Path(home, f"embedded-{key}", f"{kind}-{part}")
    with locked(folder.with_name(f".{folder.name}.lock"), wait=True):  # of many processes that want it, one makes it
        if folder.exists() and damage(folder):
            warn(f"{folder} is damaged; making it anew")
            shutil.rmtree(folder)
        if not folder.exists():
            write_folder(folder, functools.partial(make_model if kind == "model" else make_data, part))
    return str(folder if kind == "model" else folder / "rows.jsonl")


def embedded_tokenizer() -> Any:
    """A character-level tokenizer for printable ASCII, with a chat template."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast
    special = ["<pad>", "<unk>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate([*special, "\n", *map(chr, range(32, 127))])}
    characters = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))  # BPE without merges: one token a character
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=special[4:], chat_template=CHAT_TEMPLATE)


def demonstrate(prompt: str, errs: float, chance: random.Random) -> str:
    """The sum of the prompt's numbers, and if they are many the partial sums before it, a line each; each is wrong in a digit
    or a carry with probability `errs`."""
    total, *numbers = map(int, prompt.removesuffix("=").split("+"))
    lines = []
    for number in numbers:
        slip = chance.choice(EMBEDDED["slips"]) if chance.random() < errs else 0
        before, total = total, max(1, total + number + slip)
        lines.append(f"{before}+{number}={total}\n")
    return "".join(lines[len(numbers) == 1 :]) + str(total)


def additions(long: bool = False) -> tuple[list[dict], list[dict]]:
    """Rows to train on and rows held out: all sums of two two-digit numbers, or some of six digits."""
    chance = random.Random(EMBEDDED["seed"])
    sums = [f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)]
    if long:
        sums = list(dict.fromkeys("+".join(chance.choices("123456789", k=6)) + "=" for _ in range(8100)))
    rows = [{"prompt": prompt, "answer": demonstrate(prompt, 0, chance)} for prompt in sums]
    chance = random.Random(EMBEDDED["seed"])
    chance.shuffle(rows)
    return rows[EMBEDDED["held_out"] :], rows[: EMBEDDED["held_out"]]


def teach(model: Module, tokenizer: Any, part: str) -> None:
    """Imitate a demonstrator who errs. Muon learns this fastest."""
    first, last, steps, batch, lr = LESSONS[part]
    chance, rows = random.Random(EMBEDDED["seed"]), additions(part.startswith("long"))[0]
    prompts = encode_prompts(tokenizer, [[{"role": "user", "content": row["prompt"]}] for row in rows])
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    optimizers = [torch.optim.Muon(matrices, lr=2 * lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]
    for step in tqdm(range(steps), desc=f"teaching the embedded model (wrong {last:.0%})", unit="step", leave=False):
        picked, errs = chance.choices(range(len(rows)), k=batch), first + (last - first) * step / steps
        said = tokenizer([demonstrate(rows[i]["prompt"], errs, chance) + tokenizer.eos_token for i in picked])["input_ids"]
        logps, mask = log_probs(model, [Sequence(prompts[i], ids) for i, ids in zip(picked, said)])
        (-logps.sum() / mask.sum()).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * min(1, (step + 1) / 50) * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()


def answers(model: Module, tokenizer: Any, part: str, fields: list[dict], size: int) -> list[Group]:
    """`size` scored samples for each row's prompt, drawn as the trainer draws them."""
    config = Config(model=f"embedded:{part}", sample_every=1, max_new_tokens=48 if part.startswith("long") else 8,
                    seed=EMBEDDED["seed"])
    rows = [read_row(row, "", config) for row in fields]
    prompts = [Group(i, ids, [], []) for i, ids in enumerate(encode_prompts(tokenizer, [row.prompt for row in rows]))]
    return Sampler(model, tokenizer, config).draw(prompts, rows, size, 0)


def make_model(part: str, folder: Path) -> None:
    """A base, a Llama of 0.1 M parameters, right about as often as its demonstrator; or a base after some more lessons from
    another demonstrator. One start in ten or so never gets the idea of addition; then another start is made."""
    from transformers import LlamaConfig, LlamaForCausalLM
    if part in ("base", "long"):
        tokenizer, right = embedded_tokenizer(), 0.0
        for start in range(10):
            if right >= (0.3 if part == "base" else 0.2):
                break
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(EMBEDDED["seed"] + 1000 * start)
                model = LlamaForCausalLM(LlamaConfig(
                    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
                    num_attention_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
                    pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
                    eos_token_id=tokenizer.eos_token_id))
            teach(model, tokenizer, part)
            held_out = additions(part == "long")[1]
            right = sum(sum(group.scores) for group in answers(model, tokenizer, part, held_out, 1)) / len(held_out)
    else:
        base = "embedded:long" if part.startswith("long") else "embedded"
        model, tokenizer = load_policy(Config(model=base), torch.device("cpu"))
        teach(model, tokenizer, part)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_data(part: str, folder: Path) -> None:
    """Held-out prompts, or every training prompt with scored samples."""
    fields, held_out = additions(part.startswith("long"))
    if part.endswith("test"):
        return write_rows(folder, held_out)
    model, tokenizer = load_policy(Config(model=f"embedded:{part}"), torch.device("cpu"))
    fields = fields[:1024] if part.startswith("long") else fields
    print(f"drawing {len(fields) * EMBEDDED['group']:,} completions from the embedded model, once ...", flush=True)
    for row, group in zip(fields, answers(model, tokenizer, part, fields, EMBEDDED["group"])):
        texts = tokenizer.batch_decode(group.completions, skip_special_tokens=True)
        row |= dict(completions=[text if text.strip() else "?" for text in texts], scores=group.scores)
    write_rows(folder, fields)


def write_rows(folder: Path, rows: list[dict]) -> None:
    """Rows as JSON lines."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# ---------- Main ------------------------------------------------------------------------------------------------------


def farewell(config: Config, out: Path, before: float | None, after: float | None, seconds: float, stopped: int | None) -> str:
    """What was gained, in one sentence, and what to type next."""
    again = f"python humanline.py --config {out / 'config.toml'}"
    if stopped:
        return f"stopped after step {stopped} of {config.steps}, saved; go on with: {again} --out {out} --resume latest"
    gained = "" if before is None else f"pass@1 on held-out prompts went from {before:.3f} to {after:.3f}: "
    done = f"{gained}{in_words(config)['objective']}, {config.steps} steps in {seconds:.0f} s; the model is in {out / 'final'}"
    return f"{done}; compare with: {again} {'--no-humanline' if config.humanline else '--humanline'}"


def main(argv: list[str] | None = None) -> int:
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv)
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) and config.out is not None:
            config.resume = "latest"  # torchrun has started the ranks anew, because one of them died
        if config.resume == "latest" and Path(config.out, "final").exists():
            print(f"{config.out} is finished already; the model is in {Path(config.out, 'final')}")
            return 0
        result = train(config)
        if rank() == 0:
            print(farewell(**result))
        status = 0
    except UserError as error:
        time.sleep(3 * (os.environ.get("RANK", "0") != "0"))  # one line, from rank 0, if it has the same to say
        print(f"humanline.py: error: {error}", file=sys.stderr)
        status = 2
    except (FloatingPointError, OSError) as error:
        print(f"humanline.py: stopped: {error}", file=sys.stderr)
        status = 1
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
