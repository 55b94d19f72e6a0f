"""Humanline: DPO, KTO and GRPO, plain and as humanline variants, in one file.

An implementation of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207). On a laptop:

  python humanline.py                                  # train the tiny model in configs/demo: GRPO, humanline
  python humanline.py --loss dpo                       # or kto
  python humanline.py --loss grpo --sync-k 12          # sync the reference every 12 steps instead of 24
  python humanline.py --no-humanline                   # the baseline: plain GRPO
  python humanline.py --no-humanline --sample-every 1  # the same, online

With your own model and data (the README shows the rows), on one GPU, on eight, and after an interruption:

  python humanline.py --model Qwen/Qwen3-0.6B --data pairs.jsonl --loss dpo --no-humanline --out runs/mine
  torchrun --nproc_per_node 8 humanline.py --config runs/mine/config.toml --lr 5e-7
  python humanline.py --config runs/mine/config.toml --out runs/mine --resume latest

On several nodes, --out must be a shared folder; if the ranks do not find each other, set GLOO_SOCKET_IFNAME.

A *humanline variant* of a loss makes two changes: every k steps the reference is set to the current policy
(**syncing**), and the token log-ratios are clipped before they reach the loss (**perception**). A run
without them is called *plain*.

The file is meant to be read from top to bottom. Configuration, perception, objectives and the loop come
first: they are the method. What the loop calls follows: the run's folder and logs, models, data, rollouts,
rewards, the reference, log-probs, ranks and checkpoints, and finally the command line.

Besides the policy that is trained, three appear throughout. The **old policy** drew the current rollouts. The
**reference** is what the log-ratio and the KL are measured against; online without syncs, the log-ratio is
measured against the old policy instead. The **sampler** μ is whatever model produced a completion: the old
policy, or a model that we know nothing about.

Left out on purpose: a value model, a second model on the GPU, tensor and pipeline parallelism, quantized
weights, images, tools, and several turns within one rollout.
"""

# For `uv run humanline.py`; what this file needs of requirements.txt, which pins torch:
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.13,<2.15",
#     "transformers>=5.17,<5.24",
#     "datasets>=4.0,<6",
#     "tqdm>=4.66",
#     "tyro>=1.0,<2",
#     "math-verify>=0.8,<1",
# ]
# ///

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import gzip
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import math
import modulefinder
import multiprocessing.connection
import os
import pickle
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import timeit
import tomllib
import weakref
from collections import ChainMap, Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Callable, Iterable, Iterator, Literal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below prints no traceback

import torch
import torch.distributed as dist
# Imported before join_ranks: its functions bind the default process group when they are defined, and would
# keep it from being destroyed.
import torch.distributed.nn
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

# ---------- Configuration -----------------------------------------------------------------------------------
# Each field is a command-line flag; the text beside or below it is its help, and `# --` begins a section of it.

@dataclass
class Config:
    """Align a language model with DPO, KTO or GRPO, plain or as a humanline variant."""

    # -- model
    model: str | None = None  # A Hugging Face model or a folder. Without it and --data: the demo's.
    dtype: Literal["auto", "mixed", "float32", "bfloat16"] = "auto"
    """mixed: fp32 weights with bf16 autocast. bfloat16: bf16 weights as well. auto: mixed on a GPU, and on a
    CPU with fast bf16 for models of 20 M parameters or more; float32 otherwise."""
    attn: str | None = None  # Attention implementation, such as flash_attention_2. Default: the model's.
    trust_remote_code: bool = False  # Run code that comes with the model or tokenizer.
    lora: int = 0
    """Train LoRA adapters of this rank, such as 16 (needs peft). The base model is frozen, and kept in bf16
    where --dtype is mixed or bfloat16. 0: train all weights, after merging adapters that --model has."""
    lora_alpha: int = 32  # LoRA's alpha: the adapters' output is scaled by alpha / rank.

    # -- data
    data: tuple[str, ...] = ()
    """Training data: a .jsonl, .json or .parquet file, or NAME[:[CONFIG:]SPLIT], where NAME is a folder or
    a data set on the Hugging Face hub."""
    limit: int | None = None  # Read at most this many rows from each source of --data.
    eval_data: str | None = None  # Held-out rows to measure on; see --eval-every.
    system: str | None = None  # System message for prompts that have none.
    prompt_template: str | None = None  # Text around each prompt; {prompt} and other {columns} are filled in.
    template_values: str | None = None
    """Extra variables for the chat template, as a JSON object."""
    max_length: int | None = None
    """Maximum length of prompt + completion in tokens; longer examples are dropped (online: prompts that
    leave no room for --max-new-tokens). Default: the maximum of the model."""
    max_prompt_length: int | None = None  # Maximum length of a prompt in tokens; longer ones are dropped.

    # -- method
    loss: str = "grpo"  # The objective: grpo, dpo or kto.
    humanline: bool = True  # Use syncing and perception. --no-humanline turns both off.
    sync_k: int = 24
    """Set the reference to the policy every k steps; 0: never. Tune it together with --lr. In offline GRPO,
    24 to 128 was best for tiny models, over 128 to 256 steps (8 to 24 with --positive-only); they often
    collapsed at 8 or less. For SmolLM2, over 64 steps, 1 to 4 was. The paper recommends 12 to 24 for
    mathematics, where 1 collapsed; its authors use 1 for instructions."""
    perception: Literal["clip", "sample", "none"] = "clip"  # What is done to log-ratios before the loss.
    log_eps_p: float = -1.5  # Lower bound of the clip, in nats.
    log_eps_r: float = 1.5  # Upper bound of the clip, in nats.
    # Not in the paper: against collapse on off-policy data (other models' completions, or old rollouts),
    # where worse completions can be pushed down without limit; each sync renews GRPO's ratio clip.
    positive_only: bool = False
    """Train only on better completions. GRPO: those with a positive advantage (RAFT++, Xiong et al. 2025);
    KTO: desirable ones; the others count as 0 in the mean. DPO: supervised finetuning on the chosen
    completions, without a reference."""

    # -- objective
    beta: float = 0.1  # DPO and KTO: strength of the pull towards the reference.
    desirable_weight: float | None = None
    """KTO: weight of desirable examples. Default: such that both kinds have the same total weight."""
    undesirable_weight: float = 1.0  # KTO: weight of undesirable examples.
    epsilon: float = 0.2  # GRPO: clip the ratio to [1 - epsilon, 1 + epsilon].
    epsilon_high: float | None = None  # GRPO: upper bound 1 + epsilon_high instead (DAPO: 0.28).
    scale_rewards: bool = True  # GRPO: divide advantages by their group's standard deviation.
    kl_beta: float = 0.0  # GRPO: weight of the KL to the reference (plain: the initial policy).
    average: Literal["token", "sequence", "constant"] = "token"
    """GRPO. token: mean over all completion tokens of the batch. sequence: mean over each sequence's tokens,
    then over sequences. constant: each sequence's sum divided by --max-new-tokens, then the mean over
    sequences (Dr. GRPO)."""

    # -- rollout
    sample_every: int = 0
    """0: train on the completions in the data (offline). N: draw new completions every N steps and train
    on them for N steps (1: online)."""
    reward: str = "exact"
    r"""How sampled completions are rewarded. `exact`: 1 if the completion equals the row's `answer`. `math`: 1
    if its final answer equals that, or the \boxed{} of the row's `solution`. `FILE.py:function`: your own
    function(prompts, completions, rows) -> list of floats, where prompts are lists of messages and rows are
    dicts. configs/model_reward.py:score is a reward model, configs/rewards.py:math_recipe a weighted sum."""
    reward_args: str | None = None
    """Extra keyword arguments for your reward function, as a JSON object."""
    reward_seconds: float = 10.0
    """Time limit for one call of `math` or of your own function. If a call fails or takes longer, its samples
    are rewarded one at a time under the same limit, until failures in a row have taken three times as long."""
    group_size: int = 8  # Completions drawn per prompt.
    temperature: float = 1.0
    """Sampling temperature. Online, log-probs are computed at it, too; offline, at 1."""
    top_p: float = 1.0  # Nucleus sampling.
    max_new_tokens: int = 512  # Maximum length of a sampled completion.
    mask_truncated: bool = False  # GRPO, KTO: completions cut off (`truncated` in the data) get no gradient.
    sample_tokens: int = 65536
    """Token budget for one call to `generate`: sequences x (prompt + new tokens). Lower it to save memory."""
    sampler: str = "generate"
    """What draws completions: the model's own `generate`, or `FILE.py:function`, such as
    configs/external.py:vllm (vLLM on other GPUs) and configs/external.py:servers (servers elsewhere)."""

    # -- loop
    steps: int | None = None  # Optimizer steps. Default: one pass over the data.
    batch_size: int | None = None
    """Groups (GRPO), pairs (DPO; online: prompts) or examples (KTO) per step, over all ranks. Default: 32, for
    KTO 64."""
    lr: float | None = None  # Peak learning rate of AdamW. Default: 1e-6, or 1e-5 with --lora.
    warmup: float = 0.1  # Fraction of steps of linear warmup; the learning rate is constant afterwards.
    weight_decay: float = 0.0  # Weight decay of AdamW.
    adam_eps: float = 1e-8  # Epsilon of AdamW.
    max_grad_norm: float = 1.0  # Clip the norm of the gradient to this value.
    microbatch_tokens: int = 16384
    """Token budget for one forward and backward pass, padding included. Lower it if memory runs out: it does
    not change the result."""
    checkpoint_activations: bool = False  # Recompute activations in the backward pass to save memory.
    compile: bool = torch.cuda.is_available()  # Use torch.compile on the layers; the default on a GPU.
    shard: bool = False
    """Shard weights, gradients and optimizer state over the ranks (FSDP2). While sampling, each rank holds
    the whole model."""
    seed: int = 0  # Seed of all randomness. Sampling also depends on ranks and --sample-tokens.

    # -- output
    out: str | None = None  # Folder of the run. Default: a new one under runs/.
    save_every: int = 64  # Write a checkpoint every N steps; 0: only the final model.
    keep: int = 2  # Number of checkpoints to keep.
    resume: str | None = None
    """`latest`: continue from the newest undamaged checkpoint of --out, or start afresh if there is none.
    Or the path of a checkpoint."""
    eval_every: int = 0  # Measure every N steps; 0: only before and after training.
    eval_prompts: int = 500  # Held-out prompts per evaluation.
    eval_samples: int = 2  # Completions drawn per held-out prompt.
    track: str | None = None  # Log to wandb, or to a module with the same functions, such as trackio.
    config: str | None = None
    """A .toml file with these settings; flags override it. A table of it that is named after a flag, such as
    [no-humanline], holds settings that apply if that flag is typed."""

    def __post_init__(self):
        """Resolve defaults that depend on other settings, check all values, and derive what they imply."""
        # What differs from its default.
        self.given = {name: value for name, value in vars(self).items() if value != getattr(Config, name)}
        require(self.loss in LOSSES, f"--loss {self.loss}: choose one of {', '.join(sorted(LOSSES))}, or run "
                "the script of your own loss")
        loss = LOSSES[self.loss]
        has_log_ratio = loss.needs_reference and not (self.positive_only and loss.unit == "pair")
        if not self.humanline or not has_log_ratio:
            self.sync_k = 0
            self.perception = "none"
        if self.lr is None:
            self.lr = 1e-5 if self.lora else 1e-6
        if self.batch_size is None:
            self.batch_size = loss.batch_size
        self.out = self.out and os.path.expanduser(self.out)
        check_config(self)
        # What the policy is compared with. Online without syncs it is the old policy; then only the KL is to
        # the reference.
        self.ratio_to: Literal["reference", "old policy"] | None = None
        if has_log_ratio:
            self.ratio_to = "old policy" if self.sample_every and not self.sync_k else "reference"
        self.has_reference = self.ratio_to == "reference" or (has_log_ratio and self.kl_beta > 0)
        # T in softmax(logits / T): the sampling temperature for rollouts, 1 for the completions in the data.
        self.logits_temperature = self.temperature if self.sample_every else 1.0

RANGES = {  # smallest and largest value of settings
    (0, 1e12): "sync_k sample_every save_every eval_every seed kl_beta weight_decay epsilon_high lora",
    (1, 1e12): "max_new_tokens sample_tokens steps max_length max_prompt_length microbatch_tokens keep "
               "batch_size group_size eval_prompts eval_samples limit lora_alpha",
    (1e-12, 1e12): "beta desirable_weight undesirable_weight epsilon lr adam_eps max_grad_norm reward_seconds",
    (1e-3, 1e3): "temperature",
    (-math.inf, 0): "log_eps_p",  # so that zeros at masked positions stay zero
    (0, math.inf): "log_eps_r",
    (0, 1): "warmup",
    (1e-9, 1): "top_p",
}

# ---------- Perception --------------------------------------------------------------------------------------
# How a person perceives the token log-ratio d_t = log π_θ(y_t | x, y_<t) - log π_ref(y_t | x, y_<t).
#
# Pure functions of tensors, which can be pasted elsewhere, with `import torch`, `from torch import Tensor` and
# `import torch.nn.functional as F`. (N, T) tensors are exactly zero where masked.

def humanline_clip(log_ratio: Tensor, log_eps_p: float = -1.5, log_eps_r: float = 1.5) -> Tensor:
    """Humanline clipping of (N, T) token log-ratios d: clamp(d, log ε_P, log ε_R), in nats. Outside the
    interval the gradient is 0.

    >>> humanline_clip(torch.tensor([[-4.0, 0.5, 2.0]]))
    tensor([[-1.5000,  0.5000,  1.5000]])
    """
    return log_ratio.clamp(log_eps_p, log_eps_r)

def humanline_verdicts(log_ratio: Tensor, mask: Tensor, gamma_p: float = 0.5, gamma_r: float = 0.01,
                       beta_p: float = 1.0, beta_r: float = 1.0,
                       generator: torch.Generator | None = None) -> Tensor:
    """Humanline sampling (Definition 4.2): keep each token with the probability that a person perceives it.

    Draw B_P ~ Beta(γ_P, β_P) and B_R ~ Beta(γ_R, β_R) for each token, and reject it if exp(d) < M_P B_P or
    exp(-d) < M_R B_R, where M_P and M_R are the largest exp(d) and exp(-d) among the batch's completion
    tokens. A rejected token keeps its value but passes no gradient:

        perceived = torch.where(verdicts != 0, log_ratio.detach(), log_ratio)

    In the limit where the Betas concentrate at their means m_P and m_R, the gradient is that of clipping to
    [log(M_P m_P), -log(M_R m_R)] (Theorem 4.3).

    Args:
        log_ratio: (N, T) token log-ratios d, in nats.
        mask: (N, T), true or 1 at completion tokens.
        gamma_p, gamma_r, beta_p, beta_r: the defaults are the authors' own.
        generator: random number generator on the CPU; None uses torch's global one.

    Returns (N, T) int8: -1 rejects a token as too unlikely, 1 rejects it as too likely, 0 keeps it.
    """
    verdicts = torch.zeros_like(mask, dtype=torch.int8)
    d = log_ratio.detach().double()

    def draw_log_beta(gamma: float, beta: float) -> Tensor:
        # torch.distributions takes no generator; a Beta is the first coordinate of this Dirichlet.
        shape = torch.tensor([gamma, beta], dtype=torch.float64).expand(*d.shape, 2)
        return torch._sample_dirichlet(shape, generator)[..., 0].to(d.device).log()

    log_b_p = draw_log_beta(gamma_p, beta_p)
    log_b_r = draw_log_beta(gamma_r, beta_r)
    # exp(d) < M_P B_P and exp(-d) < M_R B_R, in log space so that large ratios do not overflow.
    completion_d = d[mask.bool()]
    is_likely = -d < (-completion_d).max() + log_b_r
    is_unlikely = d < completion_d.max() + log_b_p
    verdicts[is_likely] = 1
    verdicts[is_unlikely] = -1
    return verdicts * mask.bool()

# ---------- Objectives --------------------------------------------------------------------------------------
# From perceived log-ratios to losses. Nothing is averaged here: the loop divides by global counts.

def dpo_loss(chosen_log_ratio: Tensor, rejected_log_ratio: Tensor, beta: float = 0.1) -> Tensor:
    """-log σ(β (Σ_t d̃ʷ_t - Σ_t d̃ˡ_t)) (Rafailov et al. 2023, eq. 7): (N,) losses, one per pair, of (N, T)
    token log-ratios in nats, zero at masked positions; the two T may differ.

    >>> dpo_loss(torch.zeros(1, 3), torch.zeros(1, 5))
    tensor([0.6931])
    """
    return -F.logsigmoid(beta * (chosen_log_ratio.sum(-1) - rejected_log_ratio.sum(-1)))

def kto_loss(log_ratio: Tensor, desirable: Tensor, z0: Tensor | float, beta: float = 0.1,
             weights: Tensor | float = 1.0) -> Tensor:
    """λ_D (1 - σ(β (Σ_t d̃_t - z₀))) if desirable, else λ_U (1 - σ(β (z₀ - Σ_t d̃_t))): (N,) losses
    (Ethayarajh et al. 2024, eq. 8).

    Args:
        log_ratio: (N, T) token log-ratios in nats, zero at masked positions.
        desirable: (N,) booleans.
        z0: z₀ >= 0, the reference point, in nats: one number for the whole batch, without a gradient.
        weights: λ_D of desirable examples and λ_U of the others: (N,), or one number for all.
    """
    gain = beta * (log_ratio.sum(-1) - z0)
    # 1 - σ(x) = σ(-x), which stays precise when σ(x) is close to 1.
    return weights * torch.sigmoid(torch.where(desirable, -gain, gain))

def group_advantages(rewards: Tensor, eps: float = 0.01, scale: bool = True) -> Tensor:
    """A_i = (r_i - mean) / (std + eps) within each group, population standard deviation (Shao et al. 2024).
    Returns (..., G) advantages, which are 0 in a group whose rewards are all equal.

    Args:
        rewards: (..., G) floats, those of a group in the last dimension.
        scale: False omits the division (Dr. GRPO, Liu et al. 2025).

    >>> group_advantages(torch.tensor([[1.0, 0.0], [7.0, 7.0]]))
    tensor([[ 0.9804, -0.9804],
            [ 0.0000,  0.0000]])
    """
    centred = rewards - rewards.mean(-1, keepdim=True)
    if not scale:
        return centred
    return centred / (rewards.std(-1, correction=0, keepdim=True) + eps)

def grpo_loss(log_ratio: Tensor | None, perceived_log_ratio: Tensor, advantages: Tensor, epsilon: float = 0.2,
              kl_beta: float = 0.0, epsilon_high: float | None = None) -> Tensor:
    """-min(A r_t, A clip(r_t, 1-ε, 1+ε)) + β_KL (exp(-d_t) + d_t - 1), where r_t = exp(d̃_t).

    Shao et al. 2024, eq. 3, where d̃ is measured against the old policy and d against the initial one. With
    humanline both are measured against the synced reference, and the ratio is clipped twice: upstream, as d̃,
    and here. Returns (N, T) token losses, which are -A at masked positions: multiply by the mask. To use it
    elsewhere, copy `token_kl` as well.

    Args:
        log_ratio: (N, T) raw token log-ratios d to the reference, in nats; only needed for kl_beta > 0.
        perceived_log_ratio: (N, T) token log-ratios d̃ after perception.
        advantages: (N,).
        epsilon_high: the upper bound is 1 + ε_high (Yu et al. 2025, DAPO, eq. 8); None: ε.
    """
    ratio = perceived_log_ratio.exp()
    advantages = advantages.unsqueeze(-1)
    high = epsilon if epsilon_high is None else epsilon_high
    clipped = ratio.clamp(1 - epsilon, 1 + high)
    loss = -torch.min(advantages * ratio, advantages * clipped)
    if kl_beta:
        loss = loss + kl_beta * token_kl(log_ratio)
    return loss

def token_kl(log_ratio: Tensor) -> Tensor:
    """exp(-d) + d - 1 >= 0, whose mean over samples of π_θ is KL(π_θ || π_ref), in nats (Schulman 2020)."""
    return torch.expm1(-log_ratio) + log_ratio

# What a loss trains on. Each group is turned into units of sequences; offline, --batch-size counts units.

@dataclass
class Group:
    """A prompt and its completions as token ids, with their rewards, from the data or drawn (rollouts)."""

    row: int  # index of its row in the data
    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]
    labelled: bool = False  # rewards are labels (1 desirable, 0 undesirable), and are not compared
    logps: list[list[float]] = field(default_factory=list)  # log μ of each token, if known
    truncated: list[bool] = field(default_factory=list)  # whether completions were cut off; empty: none was

@dataclass
class Sequence:
    """A prompt with one completion, and what the losses need to know about it."""

    prompt: list[int]
    completion: list[int]
    advantage: float = 0.0  # above 0: it is better, chosen or desirable
    kto_weight: float = 1.0  # λ_D or λ_U
    ref_logps: Tensor | None = None  # (len(completion),) log π_ref(y_t | x, y_<t)
    old_logps: Tensor | None = None  # (len(completion),) of the old policy
    sampler_logps: Tensor | None = None  # (len(completion),) of the sampler; None: unknown
    verdicts: Tensor | None = None  # (len(completion),) of --perception sample, see `humanline_verdicts`
    truncated: bool = False  # it was cut off

Packed = list[Sequence]  # sequences with the same prompt in one row of the forward pass; see `log_probs`

@dataclass
class Microbatch:
    """The record of a microbatch: N sequences that go through the policy together, and every quantity that a
    loss may read, filled in from top to bottom. In pairs, chosen and rejected alternate, but with
    --positive-only the chosen are alone. Each row of an (N, T) tensor is a completion, aligned to the left and
    followed by zeros. Log-probs are in nats."""

    # Known before the forward pass.
    packed: list[Packed]
    mask: Tensor  # (N, T) booleans, true at completion tokens
    advantages: Tensor  # (N,); 1 and -1 for labels
    is_chosen: Tensor  # (N,) booleans: the advantage is positive, so chosen or desirable
    kto_weights: Tensor  # (N,) λ_D or λ_U
    ref_logps: Tensor  # (N, T) log π_ref; NaN where it is not needed
    old_logps: Tensor  # (N, T) log π_old; NaN where it is not needed
    sampler_logps: Tensor  # (N, T) log μ; NaN where it is unknown
    verdicts: Tensor  # (N, T) of --perception sample; otherwise 0, so that all tokens are kept
    step: int = 0  # the optimizer step, from 1
    is_on_policy: bool = False  # the policy is still the one that drew the completions; see Batch
    z0: Tensor | None = None  # () the reference point of KTO
    counts: bool = True  # False: a copy of another microbatch, computed only to keep pace with other ranks

    # Computed in the step, in this order.
    logps: Tensor | None = None  # (N, T) log π_θ
    d: Tensor | None = None  # (N, T) log π_θ - log π_ref, if needed
    log_ratio: Tensor | None = None  # (N, T) what is perceived: d, or log π_θ - log π_old; see Config.ratio_to
    perceived: Tensor | None = None  # (N, T) d̃
    is_low: Tensor | None = None  # (N, T) booleans: the log-ratio is too low, and passes no gradient
    is_high: Tensor | None = None  # (N, T) booleans: it is too high, and passes no gradient
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """What to log, by name: values and a mask, both (N, T) or (N,). The step logs the mean under the mask. A
    loss may add its own."""

def best_against_worst(group: Group, sequences: list[Sequence]) -> list[list[Sequence]]:
    """DPO: the best and the worst completion form a pair, unless all advantages are equal."""
    advantage = lambda sequence: sequence.advantage
    best, worst = max(sequences, key=advantage), min(sequences, key=advantage)
    return [[best, worst]] if best.advantage > worst.advantage else []

def above_and_below_mean(group: Group, sequences: list[Sequence]) -> list[list[Sequence]]:
    """KTO: each completion is an example; without labels, none of a group whose advantages are all equal."""
    if not group.labelled and len({sequence.advantage for sequence in sequences}) == 1:
        return []
    return [[sequence] for sequence in sequences]

def set_kto_weights(sequences: list[Sequence], config: Config) -> None:
    """λ_D and λ_U. By default λ_D n_D = λ_U n_U (Ethayarajh et al. 2024, section 4.2). `sequences` are those
    with a gradient, and with --positive-only also the undesirable ones."""
    desirable = sum(sequence.advantage > 0 for sequence in sequences)
    # 1 if all examples are desirable.
    balanced = config.undesirable_weight * (len(sequences) - desirable) / max(1, desirable) or 1.0
    for sequence in sequences:
        sequence.kto_weight = 0.0 if config.positive_only else config.undesirable_weight
        if sequence.advantage > 0:
            sequence.kto_weight = config.desirable_weight or balanced

def compute_dpo(x: Microbatch, config: Config) -> Tensor:
    if config.positive_only:  # the rejected are idle, and so not in x
        return -x.logps.sum(-1) / x.mask.sum(-1)
    note_implicit_rewards(x, config)
    margin = config.beta * (x.perceived[0::2] - x.perceived[1::2]).detach().sum(-1)
    x.metrics["margin"] = margin, torch.ones_like(margin)
    x.metrics["ordered"] = (margin.sign() + 1) / 2, torch.ones_like(margin)  # a tie counts half
    return dpo_loss(x.perceived[0::2], x.perceived[1::2], config.beta)

def compute_kto(x: Microbatch, config: Config) -> Tensor:
    note_implicit_rewards(x, config)
    return kto_loss(x.perceived, x.is_chosen, x.z0, config.beta, x.kto_weights)

def note_implicit_rewards(x: Microbatch, config: Config) -> None:
    """Record as metrics the mean of β Σ_t d̃_t of the chosen or desirable completions, and of the others."""
    reward = config.beta * x.perceived.detach().sum(-1)
    x.metrics["reward_chosen"] = reward, x.is_chosen
    x.metrics["reward_rejected"] = reward, ~x.is_chosen

def compute_grpo(x: Microbatch, config: Config) -> Tensor:
    ratio = x.perceived.detach().exp()
    advantages = x.advantages[:, None]
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    x.metrics["clip_fraction_low"] = (ratio < 1 - config.epsilon) & (advantages < 0), x.mask
    x.metrics["clip_fraction_high"] = (ratio > 1 + high) & (advantages > 0), x.mask
    return grpo_loss(x.d, x.perceived, x.advantages, config.epsilon, config.kl_beta, high)

@dataclass(frozen=True)
class Loss:
    """Everything that the program knows about a loss. To add a loss, add an entry to LOSSES.

    compute(x, config) takes the record of a microbatch and returns either (N, T) token losses, which are
    averaged as --average says, or one loss per pair or example. The mean is always over the global batch.
    Online without syncs, x.d is None unless --kl-beta is set. With --positive-only, a loss of pairs that lists
    it in its settings gets the chosen sequences alone, and x.d and x.perceived are None.

    Perception stops the gradient of x.perceived, not of x.logps. A loss of weighted log-probs, such as CISPO,
    becomes a humanline variant if it reads x.perceived instead: elsewhere its gradient is that of x.logps.

    Sequences with an advantage of 0 are idle, see `is_idle`: they have no part in x, and a loss of 0. A loss
    with another gradient than that of the advantage, such as an entropy bonus, must set needs_all."""

    compute: Callable[[Microbatch, Config], Tensor]
    make_units: Callable[[Group, list[Sequence]], list[list[Sequence]]]  # of a group and its sequences
    unit: Literal["group", "pair", "example"]  # what --batch-size counts
    settings: str = ""  # fields of Config that this loss reads but some other losses do not
    batch_size: int = 32  # default of --batch-size
    set_weights: Callable[[list[Sequence], Config], None] = lambda sequences, config: None  # λ of KTO
    needs_reference: bool = True  # reads x.d or x.perceived; if False, there is nothing to sync or perceive
    needs_mismatched: bool = False  # reads x.z0, from prompts with the completion of another prompt
    needs_all: bool = False  # also has a gradient where the advantage is 0, so that no sequence is idle

LOSSES = {
    "grpo": Loss(
        compute=compute_grpo,
        make_units=lambda group, sequences: [sequences],
        unit="group",
        settings="epsilon epsilon_high scale_rewards kl_beta average positive_only mask_truncated"),
    "dpo": Loss(
        compute=compute_dpo,
        make_units=best_against_worst,
        unit="pair",
        settings="beta positive_only"),
    "kto": Loss(
        compute=compute_kto,
        make_units=above_and_below_mean,
        unit="example",
        settings="beta desirable_weight undesirable_weight positive_only mask_truncated",
        batch_size=64,
        set_weights=set_kto_weights,
        needs_mismatched=True),
}

# ---------- The loop ----------------------------------------------------------------------------------------

def train(config: Config) -> "Run":
    """Train a model as described by `config`, from the rows on disk to the final folder."""
    with contextlib.ExitStack() as stack:
        run = Run(config, stack)  # the run's folder, logs, signals and ranks
        rows = [row for source in config.data for row in read_rows(source, config, "--data")]
        run.check_ranks(rows)
        policy, tokenizer = load_policy(config, run.device)
        sampler = Sampler(policy, tokenizer, config)
        groups = encode_rows(rows, sampler, online=config.sample_every > 0)
        batches = Batches(config, groups, sampler.longest)
        optimizer = torch.optim.AdamW(trained(policy).values(), config.lr, eps=config.adam_eps,
                                      weight_decay=config.weight_decay, fused=True)
        reference = Reference(policy, batches, config)
        syncs = sync_steps(config, batches.steps)
        warmup = math.ceil(config.warmup * batches.steps)
        first = run.begin(sampler, batches, optimizer, reference)  # 1, or above if the run is resumed

        for step in range(first, batches.steps + 1):
            started = time.perf_counter()
            report = {"step": step, "sample_seconds": 0.0}
            if step == 1:  # the first reference is the initial policy
                reference.sync(syncs[0], batches.make(syncs[0]))

            # Draw and reward rollouts for the next steps. The current policy is their old policy.
            if config.sample_every and step > batches.made_until:
                last = min(step + config.sample_every - 1, batches.steps)
                prompts = [group for group, _ in batches.of_steps(step, last)]
                rollouts = sampler.draw_rollouts(prompts, rows, config.group_size, step)
                batches.make(last, rollouts)
                report["sample_seconds"] = time.perf_counter() - started
                report |= run.keep_rollouts("rollouts.jsonl", rollouts, rows, step)
                if config.ratio_to == "old policy":  # in this step it is the policy itself
                    attach_logps("old_logps", policy, batches.pending[1:], config)

            # Forward, perceive, loss, backward, one microbatch at a time: the next function.
            batch = batches.next(step)
            reference.score(batch)
            report |= forward_backward(policy, batch, config)

            # Clip the gradient's norm, sync, step, in this order: a sync copies the policy before its update.
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            report["grad_norm"] = float(norm.full_tensor() if config.shard else norm)
            if not math.isfinite(report["loss"] + report["grad_norm"]):
                raise FloatingPointError(
                    f"step {step}: loss {report['loss']}, gradient norm {report['grad_norm']}; earlier "
                    f"checkpoints are in {run.out / 'checkpoint'} (see --save-every)")
            if step in syncs:
                reference.sync(syncs[step], batches.make(syncs[step]))
            report["lr"] = config.lr * min(1, step / max(1, warmup))
            optimizer.param_groups[0]["lr"] = report["lr"]
            optimizer.step()
            optimizer.zero_grad()
            report["step_seconds"] = time.perf_counter() - started

            # Measure, log, save.
            if step == batches.steps or (config.eval_every and step % config.eval_every == 0):
                report |= run.measure(step)
            run.log(report)
            if any(gather_from_ranks(len(run.signals))) and step < batches.steps:
                run.stopped_at = step
            if run.stopped_at or (config.save_every and step % config.save_every == 0):
                save_checkpoint(run.out / "checkpoint" / f"step-{step:08d}", optimizer, reference, step)
            if run.stopped_at:
                break
        run.finish()
    return run

def sync_steps(config: Config, steps: int) -> dict[int, int]:
    """The steps at which the reference is set to the policy, each with the next one, or the last step of the
    run; step 0 is the start. For another rule that is known beforehand, such as a growing k, change this."""
    if config.sync_k >= steps:
        warn(f"--sync-k {config.sync_k}: in {steps} steps the reference is never synced; lower it")
    return dict(itertools.pairwise([*range(0, steps, config.sync_k or steps), steps]))

def forward_backward(policy: Module, batch: "Batch", config: Config) -> dict[str, float]:
    """Set the .grad of the parameters, which are None or 0, to the gradient of the batch's mean loss; returns
    what the step logs. All means are over the global batch: microbatches and ranks do not change the result.
    For a running mean over steps, start from the last metrics in Run.latest, which a resume restores."""
    loss = LOSSES[config.loss]
    totals = Counter()  # of each metric; see `add_metrics`
    total_loss = torch.zeros((), device=policy.device)
    z0 = None
    if config.perception == "sample" and batch.sequences:
        decide_verdicts(policy, batch, config)
    if loss.needs_mismatched:
        z0 = kto_reference_point(policy, batch, config)

    active = [sequence for sequence in batch.sequences if not is_idle(sequence, config)]
    for x in microbatches(policy, active, config):  # those of this rank
        x.step, x.is_on_policy, x.z0 = batch.step, batch.is_on_policy, z0
        with policy.autocast():
            x.logps = log_probs(policy, x.packed, config.logits_temperature)
        take_log_ratios(x, config)
        if x.log_ratio is not None:
            x.perceived, x.is_low, x.is_high = perceive(x.log_ratio, x, config)
        losses = loss.compute(x, config)
        # FSDP needs equally many microbatches on all ranks, so some ranks repeat one, which has no share here.
        contribution = x.counts * share_of_mean(losses, x, batch, config)
        scale = WORLD_SIZE if config.shard else 1  # FSDP averages over ranks
        (contribution * scale).backward()
        if x.counts:
            total_loss += contribution.detach()
            add_metrics(totals, x, config)

    # Sum over all ranks. Every parameter needs a gradient, even if this rank had no microbatch.
    for p in trained(policy).values():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if WORLD_SIZE > 1 and not config.shard:  # if sharded, the backward pass has done so
            dist.all_reduce(p.grad)
    batch.is_on_policy = False  # the caller updates the policy
    # The sum over ranks is the mean, so it is divided by 1.
    totals["loss"] = torch.stack([total_loss, torch.full_like(total_loss, RANK == 0)]).double()
    return step_metrics(batch, totals, z0)

@torch.no_grad()
def add_metrics(totals: Counter, x: Microbatch, config: Config) -> None:
    """Add the metrics of a microbatch to the totals of the step: for each a sum and a count. To add a metric,
    add a line: its name, its values and their mask, both (N, T) or (N,). Idle sequences are not in x."""
    x.metrics |= {
        "logp": (x.logps, x.mask),
        "logp_wanted": (x.logps, x.mask & x.is_chosen[:, None]),
    }
    if x.log_ratio is not None:
        x.metrics |= {
            "drift": (x.log_ratio.abs(), x.mask),
            "unclamped": (~(x.is_low | x.is_high), x.mask),
            "clamped_low": (x.is_low, x.mask),
            "clamped_high": (x.is_high, x.mask),
        }
    if x.d is not None:
        x.metrics["kl"] = token_kl(x.d), x.mask
    to_sampler = x.logps - x.sampler_logps  # NaN where the sampler is unknown
    importance = to_sampler.sum(-1).double().clamp(-300, 300).exp()
    x.metrics["importance"] = importance, ~importance.isnan()
    x.metrics["importance_squared"] = importance**2, ~importance.isnan()
    if x.is_on_policy and config.sampler != "generate":  # the sampler and the policy have the same weights
        x.metrics["sampler_gap"] = to_sampler.abs(), x.mask
    for name, (values, where) in x.metrics.items():
        total = values.where(where.bool(), 0).sum().double()
        count = where.sum().double()
        totals[name] += torch.stack([total, count])

def take_log_ratios(x: Microbatch, config: Config) -> None:
    """Fill in d and the log-ratio that perception works on, as far as the loss needs them. Raises ValueError if
    the sequences lack log-probs that these need."""
    needs_old = config.ratio_to == "old policy" and not x.is_on_policy
    for name, is_needed, advice in (
            ("old_logps", needs_old, "call attach_logps when rollouts are drawn"),
            ("ref_logps", config.has_reference, "call Reference.score before, and Reference.sync without the "
             "step of the next sync if it is not known")):
        if is_needed and any(getattr(sequence, name) is None for sequence in itertools.chain(*x.packed)):
            raise ValueError(f"step {x.step}: the sequences have no {name}; {advice}")
    if x.is_on_policy:
        x.old_logps = x.logps.detach()
    if config.has_reference:
        x.d = x.logps - x.ref_logps
    if config.ratio_to:
        x.log_ratio = x.d if config.ratio_to == "reference" else x.logps - x.old_logps

def perceive(log_ratio: Tensor, x: Microbatch, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Apply perception to (N, T) log-ratios. Returns d̃ and two boolean tensors of the same shape, where the
    gradient stops because the log-ratio is too low and too high. To try another perception, change this
    function: the booleans are logged."""
    if config.perception == "clip":
        low = config.log_eps_p
        high = config.log_eps_r
        return humanline_clip(log_ratio, low, high), log_ratio < low, log_ratio > high
    perceived = torch.where(x.verdicts != 0, log_ratio.detach(), log_ratio)
    return perceived, x.verdicts < 0, x.verdicts > 0

def share_of_mean(losses: Tensor, x: Microbatch, batch: "Batch", config: Config) -> Tensor:
    """The contribution of a microbatch to the mean loss of the whole batch. Idle sequences count in the
    denominator: their loss is 0, not absent."""
    count = len(batch.sequences)
    if losses.dim() == 1:  # a loss for each pair or example
        if LOSSES[config.loss].unit == "pair":
            count = count / 2
        return losses.sum() / count
    if config.average == "constant":
        return (losses * x.mask).sum() / (count * config.max_new_tokens)
    if config.average == "sequence":
        means = (losses * x.mask).sum(-1) / x.mask.sum(-1)
        return means.sum() / count
    tokens = sum(len(sequence.completion) for sequence in batch.sequences)
    return (losses * x.mask).sum() / tokens

def log_ratios_without_gradient(policy: Module, sequences: list[Sequence], batch: "Batch",
                                config: Config) -> Microbatch:
    """The record of these sequences up to their log-ratios, without gradients, on the CPU of every rank."""
    x = make_microbatch([[sequence] for sequence in sequences], torch.device("cpu"))
    x.step, x.is_on_policy = batch.step, batch.is_on_policy
    x.logps = pad_sequence(sequence_logps(policy, sequences, config), batch_first=True)
    take_log_ratios(x, config)
    return x

def decide_verdicts(policy: Module, batch: "Batch", config: Config) -> None:
    """--perception sample: decide for each token before the step starts, because M_P and M_R are maxima over
    the whole batch."""
    x = log_ratios_without_gradient(policy, batch.sequences, batch, config)
    d = x.log_ratio[x.mask]
    generator = torch.Generator().manual_seed(seed_for(config.seed, "reject", batch.step))
    verdicts = humanline_verdicts(d, torch.ones_like(d, dtype=torch.bool), generator=generator)
    for sequence, tokens in zip(batch.sequences, verdicts.split(x.mask.sum(-1).tolist())):
        sequence.verdicts = tokens

def kto_reference_point(policy: Module, batch: "Batch", config: Config) -> Tensor:
    """z₀ = max(0, mean of Σ_t d̃_t over mismatched prompts and completions), in nats, for the whole batch."""
    is_unchanged = config.ratio_to == "old policy" and batch.is_on_policy
    if is_unchanged or not batch.mismatched:  # the log-ratio of the policy with itself is 0
        return torch.zeros((), device=policy.device)
    x = log_ratios_without_gradient(policy, batch.mismatched, batch, config)
    perceived, _, _ = perceive(x.log_ratio, x, config)
    return perceived.sum(-1).mean().clamp(min=0).to(policy.device)

def step_metrics(batch: "Batch", totals: Counter, z0: Tensor | None) -> dict[str, float]:
    """The metrics of a step, over all ranks; tests/claims/metrics.md explains each of them."""
    sums = Counter()
    for of_rank in gather_from_ranks({name: total.cpu() for name, total in totals.items()}):
        sums.update(of_rank)
    report = {name: float(total / count) for name, (total, count) in sums.items() if count}
    report["reward"] = batch.reward
    lengths = [len(sequence.completion) for sequence in batch.sequences]
    report["tokens"] = sum(lengths)
    if lengths:
        report["completion_length"] = fmean(lengths)
    if "importance" in report:
        report["ess"] = report.pop("importance") ** 2 / report.pop("importance_squared")
    if batch.no_difference is not None:
        report["no_difference"] = batch.no_difference
    if z0 is not None:
        report["z0"] = float(z0)
    return report

# ---------- The run -----------------------------------------------------------------------------------------

class Run:
    """What training needs besides the method: the folder with its lock and logs, measurements, and signals.
    To understand the method, you can skip this class."""

    def __init__(self, config: Config, stack: contextlib.ExitStack):
        """Join the other ranks and check the folder. Nothing is written before all user errors are found."""
        import transformers
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.config = config
        self.stack = stack
        self.started = time.perf_counter()
        self.stopped_at: int | None = None  # the step after which a signal stopped the run
        # Latest value of every metric, also after a resume, and values before the first step.
        self.latest: dict[str, float] = {}
        self.watch = Watch()
        require(config.model, "--model is missing; pass a Hugging Face name or a folder")
        require(config.data, "--data is missing; pass a file or a data set of the hub")
        require(not config.eval_every or config.eval_data,
                f"--eval-every {config.eval_every} needs data to measure on; add --eval-data ROWS")
        self.device = join_ranks()
        require(not config.shard or dist.is_initialized(), "--shard needs several ranks; use torchrun")
        self.out = from_first_rank(lambda: Path(
            config.out or time.strftime(f"runs/{config.loss}-%m%d-%H%M%S-{os.getpid()}")))
        from_first_rank(lambda: check_folder(self.out, config))

    def check_ranks(self, rows: list["Row"]) -> None:
        """Read --eval-data, and check that all ranks have the same rows and settings."""
        config, self.rows = self.config, rows
        held_out = read_rows(config.eval_data, config, "--eval-data") if config.eval_data else []
        self.eval_rows = held_out[: config.eval_prompts]
        seen = {str(row.prompt) for row in rows} & {str(row.prompt) for row in self.eval_rows}
        if seen:
            warn(f"--eval-data: {len(seen)} of its prompts are also in --data")
        # Must be the same on resume.
        content = hashlib.sha256()
        for row in rows:
            text = json.dumps(vars(row), default=str)  # of dates, and of images in unread columns, too
            content.update(re.sub(" at 0x[0-9A-Fa-f]+", "", text).encode())
        self.fingerprint = {"--data": content.hexdigest()}
        files = {"--model": [*Path(config.model).glob("[!.]*")]}
        for flag, spec in ("--reward", config.reward), ("--sampler", config.sampler):
            path, _ = function_file(spec)
            require(not path or os.path.isfile(path),
                    f"{flag} {spec}: No such file: {path}; write FILE.py:function, or copy it there")
            files[flag] = with_imports(path) if path else []
        for flag in files:
            for name, digest in from_first_rank(lambda: hashes(files[flag])).items():
                self.fingerprint[f"{flag} {name}"] = digest
        settings = set(gather_from_ranks(f"{config} {self.fingerprint}"))
        require(len(settings) == 1, "the ranks have different flags or rows")

    def begin(self, sampler: "Sampler", batches: "Batches", optimizer: torch.optim.Optimizer,
              reference: "Reference") -> int:
        """Create and lock the folder, load --sampler, resume from a checkpoint, or measure before step 1.
        Returns the first step to train."""
        config = self.config
        self.sampler, self.policy = sampler, sampler.policy
        self.batches, self.optimizer = batches, optimizer
        batches.fingerprint = self.fingerprint | {"the chat template": str(sampler.tokenizer.chat_template)}
        self.eval_groups = encode_rows(self.eval_rows, sampler, True, "--eval-data")
        # Only now: a process that is stopped writes its last checkpoint, perhaps while this loads the model.
        self.checkpoint = from_first_rank(lambda: find_checkpoint(config, self.out))
        from_first_rank(lambda: lock(self.out, config, self.stack))
        if config.sampler != "generate":
            path, name = function_file(config.sampler)
            with explained(f"--sampler {config.sampler}", "see the docstring of configs/external.py"):
                sampler.external = runpy.run_path(path)[name](self).__call__  # fails for None
        first = 1
        if self.checkpoint:
            first += load_checkpoint(self.checkpoint, optimizer, reference)
            if sampler.reward:
                sampler.reward.worked = True  # it did, before the checkpoint
        self.track = None
        if config.track:  # a logger cannot be sent to other ranks; an error can
            from_first_rank(lambda: setattr(self, "track", start_tracker(config, self.out)))
        if RANK == 0:
            for path in checkpoints(self.out):
                if path.name >= f"step-{first:08d}":  # damaged, or later than the one that the run resumes from
                    set_aside(path)
            (self.out / "config.toml").write_bytes(to_toml(config).encode())
            for file in filter(Path.exists, map(self.out.joinpath, LOG_FILES)):
                if self.checkpoint:
                    cut_lines(file, first)  # later steps are repeated
                else:
                    set_aside(file)
            describe(self, first)
        for line in from_first_rank(lambda: list(read_lines(self.out / "metrics.jsonl"))):
            self.watch(line)
            self.latest |= line
        self.bar = tqdm(desc=config.loss, total=batches.steps, initial=first - 1,
                        **{"disable": True} if RANK else {})
        self.stack.callback(self.bar.close)
        if first == 1:
            self.latest = {f"{name}_before": value for name, value in self.measure(0).items()}
        self.signals = note_signals(self.stack)
        return first

    def measure(self, step: int) -> dict[str, float]:
        """On --eval-data: `accuracy`, the mean reward of samples, and `greedy`, that of greedy ones."""
        measured = {}
        for name, size in {"accuracy": self.config.eval_samples, "greedy": 1}.items():
            if self.eval_groups:
                rollouts = self.sampler.draw_rollouts(
                    self.eval_groups, self.eval_rows, size, EVALUATION + step, greedy=name == "greedy")
                measured[name] = fmean(fmean(group.rewards) for group in rollouts)
                if name == "accuracy":
                    self.keep_rollouts("eval_rollouts.jsonl", rollouts, self.eval_rows, step)
        return measured

    def keep_rollouts(self, file: str, rollouts: list[Group], rows: list["Row"],
                      step: int) -> dict[str, float]:
        """Append rollouts to a file of the run, one line per completion, and return their metrics."""
        lines = []
        for number, group in enumerate(rollouts):
            texts = self.sampler.texts(group.completions)
            fields = group.completions, group.rewards, group.logps, group.truncated
            for text, ids, reward, logps, truncated in zip(texts, *fields):
                lines.append(dict(
                    step=step, row=group.row, prompt_id=f"{step}-{number}", prompt=rows[group.row].prompt,
                    completion=text, reward=reward, truncated=truncated,
                    tokens=ids, logps=logps, temperature=self.config.temperature, top_p=self.config.top_p))
        if RANK == 0:  # at once, so that a step that diverges can be read
            append_lines(self.out / file, lines)
        return {"reward_std": pstdev(line["reward"] for line in lines),
                "truncated": fmean(line["truncated"] for line in lines),
                "entropy": -fmean(logp for line in lines for logp in line["logps"])}

    def log(self, line: dict) -> None:
        """Write the report of a step to metrics.jsonl and --track, and print warnings.
        Raises UserError if an external sampler with the same weights gives other log-probs."""
        # With --top-p below 1, the sampler's log-probs are renormalized over the nucleus, and so larger by up
        # to -log(top_p).
        limit = SAMPLER_GAP - math.log(self.config.top_p)
        gap = line.get("sampler_gap", 0.0)
        if gap > limit:
            raise UserError(
                f"step {line['step']}: --sampler {self.config.sampler} differs from the policy by {gap:.3f} "
                f"nats a token with the same weights (limit {limit:.3g}); compare dtypes and versions, check "
                "that it loads all new weights (a tied head?), and continue with --resume latest")
        if line["step"] == 1:
            line |= self.latest
        if self.policy.device.type == "cuda":
            line["memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
        self.latest |= line
        for warning in self.watch(line):
            warn(f"step {line['step']}: {warning}")
        if RANK == 0:
            append_lines(self.out / "metrics.jsonl", [line])
            if self.track:
                try:
                    self.track(line, step=line["step"])
                except Exception as error:
                    warn(f"--track {self.config.track} failed, and is not called again: {error!r:.200}")
                    self.track = None
        # Offline, the reward is that of the data.
        shown = "loss", "reward" if self.config.sample_every else "logp_wanted", "ordered", "margin"
        self.bar.set_postfix({name: line[name] for name in shown if name in line}, refresh=False)
        self.bar.update()

    def finish(self) -> None:
        """Write the final model, unless a signal stopped the run."""
        if not self.stopped_at:
            save_final(self.out / "final", self.sampler)
        if WORLD_SIZE > 1:
            dist.barrier()  # no rank exits while another still writes

SAMPLER_GAP = 0.1  # largest mean difference between a --sampler and the policy, in nats per token
EVALUATION = 500_000  # added to the step to seed the samples of a measurement
REDRAW = 10**9  # subtracted from the step to seed its second drawing, and again for the third
LOG_FILES = ("metrics.jsonl", "rollouts.jsonl", "eval_rollouts.jsonl")  # each line has a step

class Watch:
    """Warnings about what the metrics show, each printed once per run. A collapse is suspected when the mean
    over 12 steps of -log π_θ of the better completions has risen to twice its minimum, and by 0.3 nats per
    completion: a sign that pushing down the worse completions also pushes down the better ones."""

    def __init__(self):
        self.warned = set()
        self.length = 0.0  # of completions in the first batch: longer ones later are no collapse
        self.wanted = deque(maxlen=12)
        self.best = -math.inf

    def __call__(self, line: dict[str, float]) -> list[str]:
        """The new warnings that a line of the metrics gives rise to."""
        if "logp_wanted" in line:
            self.length = self.length or line["completion_length"]
            self.wanted.append(line["logp_wanted"] * self.length)
        wanted = math.nan
        if len(self.wanted) == self.wanted.maxlen:
            wanted = fmean(self.wanted)
            self.best = max(self.best, wanted)
        reasons = {
            "the run may be collapsing: even the better completions have become less likely; try a lower "
            "--lr, fewer syncs, fresher rollouts (--sample-every), or --positive-only":
                wanted < min(2 * self.best, self.best - 0.3),
            "more than half of the completions were cut off at --max-new-tokens; raise it":
                line.get("truncated", 0) > 0.5,
            "all sampled completions have the same reward; use harder prompts if these are solved, or else "
            "look at rollouts.jsonl and check --reward":
                line.get("reward_std", 1) < 1e-9,
        }
        new = [text for text, is_so in reasons.items() if is_so and text not in self.warned]
        self.warned |= set(new)
        return new

def append_lines(path: Path, lines: Iterable[dict]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)

def read_lines(path: Path) -> Iterator[dict]:
    """The lines of a file, without any that a crash has cut off."""
    for text in path.open("rb") if path.exists() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(text)

def cut_lines(path: Path, end: int) -> None:
    """Remove the lines of step `end` and later ones."""
    kept = path.with_suffix(".new")
    kept.unlink(missing_ok=True)
    append_lines(kept, (line for line in read_lines(path) if line["step"] < end))
    kept.replace(path)

def set_aside(path: Path) -> None:
    """Rename what the run does not go on from, so that nothing is lost."""
    kept = path.rename(path.with_stem(f"{path.stem}-{time.time_ns()}"))
    warn(f"the run does not continue from {path}, which is now {kept}")

def start_tracker(config: Config, out: Path) -> Callable:
    """Start a run in the module that --track names, and return its function `log`."""
    with explained(f"--track {config.track}", "install wandb, or another module with the functions init and "
                   "log, such as trackio, and log in"):
        tracker = importlib.import_module(config.track)
        tracker.init(project="humanline", name=out.name, config=dataclasses.asdict(config))
        return tracker.log

def check_folder(out: Path, config: Config) -> None:
    """Raises UserError if the folder holds another run, or files with the same names from elsewhere."""
    settings = out / "config.toml"
    is_run = settings.is_file() and settings.read_bytes().startswith(TOML_HEAD.encode())
    require(not any((out / "final").glob("*")), f"--out {out} holds a finished run; choose another folder")
    for source in filter(None, [*config.data, config.eval_data]):
        require(Path(source.partition(":")[0]).resolve() not in (out / "final").resolve().parents,
                f"--out {out} is inside {source}, so the run would change its own data; choose another folder")
    for name in "config.toml", *LOG_FILES, "checkpoint":
        require(is_run or not (out / name).exists(),
                f"--out {out}: {name} there was not written by this version of humanline.py; choose "
                "another folder")
    is_own = config.resume == "latest" or out.resolve() in Path(config.resume or "/").resolve().parents
    require(is_own or not is_run,
            f"--out {out} holds an unfinished run; pass --resume latest, or choose another folder")

def lock(out: Path, config: Config, stack: contextlib.ExitStack) -> None:
    """Create the folder, and hold its lock until `stack` closes or the process ends."""
    with explained(f"--out {out!s:.60}", "choose another folder",
                   unavailable="another process is training in it; choose another folder"):
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    check_folder(out, config)  # again: another run may have finished in the meantime

def note_signals(stack: contextlib.ExitStack) -> list[int]:
    """From now on finish the step on SIGTERM, SIGHUP and Ctrl-C, unless they are ignored, as by nohup. Returns
    the list to which they are added until `stack` closes."""
    received = []

    def note(number, _):
        received.append(number)
        text = f"humanline.py: warning: {signal.Signals(number).name}: stopping after this step\n"
        with contextlib.suppress(OSError):  # unbuffered: stderr may be in use, or its terminal gone
            os.write(2, text.encode())
        if number == signal.SIGINT and WORLD_SIZE == 1:  # a second one stops at once
            signal.signal(number, signal.default_int_handler)

    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        if signal.getsignal(number) != signal.SIG_IGN:
            stack.callback(signal.signal, number, signal.signal(number, note))
    return received

# ---------- Models ------------------------------------------------------------------------------------------

@contextlib.contextmanager
def explained(what: str, advice: str, **advice_by_word: str) -> Iterator[None]:
    """Turn an exception of library code into one line: `what` failed, why, and what to do about it. If the
    text of the exception contains the name of a keyword argument, its value is the advice."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # transformers, datasets and huggingface_hub raise dozens of kinds
        reason = " ".join(str(error).split())[:300].rstrip(" .") or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"no {reason}"
        advice = next((advice_by_word[word] for word in advice_by_word if word in str(error)), advice)
        raise UserError(f"{what}: {reason}; {advice}") from error

def load_policy(config: Config, device: torch.device) -> tuple[Module, Any]:
    """Load the model and its tokenizer from the hub or a folder, ready for training. Dropout is off: it would
    turn the log-ratio of a policy with itself from 0 into noise."""
    from transformers import AutoTokenizer
    name = tokenizer_name = config.model
    require(not Path(name, "final").is_dir(), f"--model {name} is a run; pass {name}/final")
    adapters = Path(name, "adapter_config.json")
    if adapters.exists() and not Path(name, "tokenizer_config.json").exists():  # as peft alone saves them
        tokenizer_name = json.loads(adapters.read_text())["base_model_name_or_path"]
    with ranks_in_turn() if config.shard else contextlib.nullcontext():
        with explained(
                f"--model {name}", "pass a Hugging Face model or a folder; `hf download NAME --local-dir "
                "FOLDER` downloads one; without a network set HF_HUB_OFFLINE=1",
                trust_remote_code="pass --trust-remote-code to run it",
                attn_implementation="choose another --attn", peft="pip install peft"):
            tokenizer = AutoTokenizer.from_pretrained(
                tokenizer_name, trust_remote_code=config.trust_remote_code)
            require(tokenizer.chat_template or not config.template_values,
                    f"--template-values: {name} has no template")
            with explained("--template-values", "pass JSON, such as '{\"enable_thinking\": false}'"):
                values = {"date_string": "26 Jul 2024"} | json.loads(config.template_values or "{}")
            tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **values)
            policy = load_weights(config, device)
        if policy.num_parameters() < 1_000_000:
            torch.set_num_threads(1)  # several are no faster, and on a busy CPU much slower
        require(tokenizer.eos_token_id is not None, f"--model {name}: its tokenizer has no end-of-sequence "
                "token, so completions cannot end; set eos_token in tokenizer_config.json")
        config.dtype = choose_dtype(policy, config)  # so that resuming on another machine is exact
        # Whether the trained weights are fp32 and matrix products bf16.
        policy.is_mixed = config.dtype == "mixed" or (config.lora > 0 and config.dtype == "bfloat16")
        policy.autocast = functools.partial(
            torch.autocast, device.type, torch.bfloat16, enabled=policy.is_mixed)  # around every pass
        if config.lora:
            add_adapters(policy, config)
        switch_off_dropout(policy)
        if config.checkpoint_activations:
            older_name = policy.gradient_checkpointing_enable
            getattr(policy, "activation_checkpointing_enable", older_name)(dict(use_reentrant=False))
        layer_names = policy._no_split_modules or ()
        layers = [module for module in policy.modules() if type(module).__name__ in layer_names]
        if config.compile:
            # All layers share their graphs, one for each kind of pass: with and without gradients, one row or
            # several, completions that share a prompt or not, ... The default limit of 8 is too low.
            torch._dynamo.config.recompile_limit = 64
            for layer in layers:
                layer.compile(dynamic=True)
        if config.shard:
            shard(policy, layers, device, config)
        policy.to(device)
    policy.train()
    advice = "install a C++ compiler and the headers of Python, or pass --no-compile"
    with explained("torch.compile", advice) if config.compile else contextlib.nullcontext():
        check_output_head(policy, config)
    # Whether a row of the forward pass may hold several completions. All ranks must cut batches alike.
    policy.shares_prompts = all(gather_from_ranks(can_share_prompts(policy)))
    return policy, tokenizer

def load_weights(config: Config, device: torch.device) -> Module:
    """Load the weights of --model; the adapters of a peft folder are merged into their base model. Raises
    UserError if weights are missing, and so would be random, or do not belong to the model."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import find_adapter_config_file
    name = config.model
    has_adapters = find_adapter_config_file(name) is not None
    if has_adapters:
        from peft import PeftConfig, PeftModel
        require(not config.lora, f"--model {name} already has adapters; merge them before using --lora")
        name = PeftConfig.from_pretrained(name).base_model_name_or_path
    is_frozen_on_gpu = config.lora and device.type == "cuda" and config.dtype != "float32"
    dtype = torch.bfloat16 if config.dtype == "bfloat16" or is_frozen_on_gpu else torch.float32
    policy, info = AutoModelForCausalLM.from_pretrained(
        name, output_loading_info=True, dtype=dtype, attn_implementation=config.attn,
        trust_remote_code=config.trust_remote_code)
    foreign = sorted(info["unexpected_keys"])[:3]
    missing = sorted(info["missing_keys"])[:3]
    require(not foreign, f"--model {name}: its config.json has no place for {foreign}; fix it")
    text_config = policy.config.get_text_config()
    if getattr(text_config, "output_router_logits", False):
        warn(f"--model {name}: output_router_logits is true, but the loss of the router is left out")
    [*whole] = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code).architectures or ()
    if whole and type(policy).__name__ not in whole:
        warn(f"--model {name}: of {whole[0]} only the text part is trained; final/ holds a "
             f"{type(policy).__name__}, which some servers refuse")
    require(not missing, f"--model {name}: its files lack {missing}, which would be random; add them")
    if has_adapters:
        policy = PeftModel.from_pretrained(policy, config.model).merge_and_unload()
        policy.requires_grad_(True)
    return policy

def add_adapters(policy: Module, config: Config) -> None:
    """Freeze the policy, and add adapters to all linear layers but the head. New adapters change nothing."""
    # The kernels of Mamba read the weight of out_proj, past its adapter.
    is_mamba = re.search("mamba|falcon_h1|nemotron_h", policy.config.model_type)
    with explained("--lora", "pip install --upgrade peft, or use an older transformers"):
        from peft import LoraConfig
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(config.seed, "lora"))
            policy.add_adapter(LoraConfig(r=config.lora, lora_alpha=config.lora_alpha, task_type="CAUSAL_LM",
                                          target_modules="all-linear",
                                          exclude_modules=["out_proj"] if is_mamba else None))
    if Path(config.model).exists():  # final/ must find it from anywhere
        policy.peft_config["default"].base_model_name_or_path = os.path.abspath(config.model)
    # Experts are parameters of three dimensions; a layer with an adapter has its weight in .base_layer.
    bare = {re.sub(r"\d+", "*", name) for name, p in policy.named_parameters()
            if p.dim() > 2 or name.endswith(".out_proj.weight")}
    if bare:
        warn(f"--lora: {', '.join(sorted(bare))} have no adapters and are not trained")
    for p in policy.parameters():
        stays_fp32 = p.requires_grad or not policy.is_mixed
        p.data = p.data.to(torch.float32 if stays_fp32 else torch.bfloat16)
    for module in policy.modules():
        if hasattr(module, "lora_A"):  # autocast casts already; peft would keep a copy for each adapter
            module.cast_input_dtype_enabled = False

def switch_off_dropout(policy: Module) -> None:
    """Set all dropout rates to 0, which models keep in modules or in attributes."""
    for module in policy.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)

def trained(policy: Module) -> dict[str, Tensor]:
    """The trained parameters by name: all of them, or with --lora those of the adapters."""
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}

def shard(policy: Module, layers: list[Module], device: torch.device, config: Config) -> None:
    """FSDP2: each rank keeps a part of the weights of every layer, and gathers a layer when it is needed."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    mesh = dist.init_device_mesh(device.type, (WORLD_SIZE,))
    precision = MixedPrecisionPolicy(torch.bfloat16 if policy.is_mixed else None, torch.float32)
    for module in [*layers, policy]:  # resharded after use, so that parameters() are always shards
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    policy.completion_logps = functools.partial(completion_logps, policy)
    register_fsdp_forward_method(policy, "completion_logps")  # gathers the embeddings around it

@torch.no_grad()
def check_output_head(policy: Module, config: Config) -> None:
    """Raises UserError unless `log_probs` agrees with the log-softmax of the model's own logits."""
    name = f"--model {config.model}"
    require(policy.base_model is not policy, f"{name}: its class does not name its body (base_model_prefix)")
    ids = torch.arange(8, device=policy.device)[None] % policy.config.get_text_config().vocab_size
    sequence = Sequence(ids[0, :1].tolist(), ids[0, 1:].tolist())
    with policy.autocast():
        ours = log_probs(policy, [[sequence]])
        logits = policy(input_ids=ids, use_cache=False).logits
    theirs = logits[:, :-1].float().log_softmax(-1)
    theirs = theirs.gather(2, ids[:, 1:, None])[..., 0]
    tolerance = 0.005 if policy.dtype == torch.float32 and not policy.is_mixed else 0.05
    require(torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance),
            f"{name}: its logits are not hidden states times output embeddings, which token_logps requires, "
            "or they are NaN, infinite or random in training")
    require(getattr(policy.get_output_embeddings(), "bias", None) is None,
            f"{name}: its output head has a bias, which token_logps leaves out")

@torch.no_grad()
def can_share_prompts(policy: Module) -> bool:
    """True if every layer uses full causal attention and respects the mask and positions that it is given."""
    text = policy.config.get_text_config()
    window = "sliding" if getattr(text, "sliding_window", None) else "full_attention"
    kinds = getattr(text, "layer_types", None) or [window]
    if set(kinds) != {"full_attention"} or text._attn_implementation != "sdpa":
        return False
    pair = [
        Sequence([1, 2, 3, 4], [5, 6, 7]),
        Sequence([1, 2, 3, 4], [7, 6])
    ]
    with contextlib.suppress(Exception), torch.compiler.set_stance("force_eager"):  # some reject such masks
        with policy.autocast():
            in_one_row = log_probs(policy, [pair])
            in_own_rows = log_probs(policy, [[sequence] for sequence in pair])
        return torch.allclose(in_one_row, in_own_rows, rtol=0.05, atol=0.05)
    return False

def choose_dtype(policy: Module, config: Config) -> str:
    """--dtype; for `auto`, mixed on a GPU with bf16, and for large models on a CPU where bf16 is faster."""
    if config.dtype != "auto":
        return config.dtype
    if torch.cuda.is_available():
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bf16 = policy.num_parameters() >= 20_000_000 and from_first_rank(bf16_is_faster)
    return "mixed" if has_bf16 else "float32"

def bf16_is_faster() -> bool:
    """Whether this CPU's matrix products are at least 1.5 times as fast in bf16, by a test of some 20 ms. They
    are with AMX; with AVX512_BF16 alone that depends on the CPU, and without it bf16 is emulated."""
    if not torch.cpu._is_avx512_bf16_supported():
        return False
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(512, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
        seconds.append(min(timeit.repeat(lambda: F.linear(x, weight), number=1, repeat=5)))
    return seconds[0] > 1.5 * seconds[1]

# ---------- Data --------------------------------------------------------------------------------------------
# From rows on disk to groups of rewarded completions to batches.

@dataclass
class Row:
    """A checked row of the data. `completions` and `rewards` form a group; those of a pair are 1 and 0."""

    where: str  # file and row number, for error messages
    prompt: list[dict]  # messages
    fields: dict  # the original row, for the reward
    completions: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    labelled: bool = False  # see Group
    tokens: list[list[int]] = field(default_factory=list)  # of the completions, as they were sampled
    logps: list[list[float]] = field(default_factory=list)  # log μ of those tokens, or empty
    truncated: list[bool] = field(default_factory=list)  # whether the sampler says that they were cut off

def read_rows(spec: str, config: Config, flag: str) -> list[Row]:
    """Read NAME[:[CONFIG:]SPLIT] and check every row. Raises UserError for the first bad one."""
    source = f"{flag} {spec}"
    rows = {}
    dropped = 0
    limit = config.limit if flag == "--data" else None
    for number, fields in enumerate(itertools.islice(read_table(spec, source), limit), 1):
        where = f"{source} row {number}"
        with explained(f"{where} cannot be read", "the README shows which columns it needs"):
            row = read_row(fields, where, config)
        if row is None:
            dropped += 1
            continue
        key = str(number)
        if len(row.rewards) == 1 and not row.labelled:  # one completion of a group
            key = f"{fields.get('prompt_id')} {row.prompt}"  # files from two runs may use the same prompt_id
        first = rows.setdefault(key, row)
        if first is not row:
            for part in ("completions", "rewards", "tokens", "logps", "truncated"):
                getattr(first, part).extend(getattr(row, part))
    if (config.system, config.prompt_template) != (None, None) and any(row.tokens for row in rows.values()):
        warn(f"{source}: --system and --prompt-template are not applied to the complete prompts of rollouts")
    if dropped:
        warn(f"{source}: dropped {dropped} rows whose dialogues differ before the last turn, or do not end "
             "with an answer")
    require(rows, f"{source} has no rows")
    return list(rows.values())

FILE_KINDS = ".jsonl", ".json", ".parquet"

def read_table(spec: str, source: str) -> Iterable[dict]:
    """The rows of a file or of NAME[:[CONFIG:]SPLIT]. Files are read here, also those of a folder: `datasets`
    would parse some strings as numbers or dates, and recognizes a changed file by its time alone."""
    if Path(spec).suffix.lower() in FILE_KINDS or Path(spec).is_file():
        return read_file(spec, source)
    import datasets
    datasets.disable_progress_bars()
    with explained(
            source, "pass a .jsonl, .json or .parquet file, a folder, or a data set of the hub; `hf download "
            "NAME --repo-type dataset --local-dir FOLDER` downloads one"):
        name, *parts = re.split(r":(?![^\[]*\])", spec)  # not at the colon of train[:50]
        split = parts.pop() if parts else "train"
        if not Path(name).is_dir():
            return datasets.load_dataset(name, *parts, split=split)
        files = datasets.load_dataset_builder(name, *parts).config.data_files
        rows = {part: [row for file in files[part] if str(part) in split for row in read_file(file, source)]
                for part in files}
        sizes = {part: len(rows[part]) for part in rows}
        slices = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
        return [row for part in slices for row in rows[part.splitname][part.from_ : part.to]]

def read_file(path: str, source: str) -> Iterator[dict]:
    """Read a Parquet file, JSON lines, or one JSON list of objects, compressed with gzip or not."""
    kind = Path(path.lower().removesuffix(".gz")).suffix
    require(kind in FILE_KINDS, f"{source}: {path} is no .jsonl, .json or .parquet file; write the data with "
            "Dataset.to_parquet, for example")
    with explained(source, "pass a file of JSON lines, or of one JSON list"):
        if kind == ".parquet":
            import pyarrow.parquet
            yield from pyarrow.parquet.ParquetFile(path).read().to_pylist()
            return
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            text = file.read().removeprefix(b"\xef\xbb\xbf").strip()
        if text.startswith(b"["):
            yield from json.loads(text)
            return
    for number, line in enumerate(text.splitlines(), 1):
        with explained(f"{source} row {number}: not JSON", "fix the row or remove it"):
            yield json.loads(line)

# Column names of GSM8K, MATH, UltraFeedback-ArmoRM, HALOs, vLLM and TRL. For another data set, add lines.
COLUMN_NAMES = {
    "question": "prompt",
    "problem": "prompt",
    "output": "completion",
    "all_generated_responses": "completions",
    "all_rm_scores": "scores",
    "output_A": "chosen",
    "output_B": "rejected",
    "response": "completion",
    "score": "reward",
    "token_ids": "tokens",
    "completion_ids": "tokens",
    "logprobs": "logps",
}

def read_row(fields: dict, where: str, config: Config) -> Row | None:
    """Check a row and convert it to a prompt and completions.

    A `prompt` comes with `completions` and `scores`, with `chosen` and `rejected`, with `completion` and
    `label` or `reward`, or alone, to be sampled from. A rewarded completion may come with its `tokens` and
    their `logps`. Answers may be whole dialogues, whose common turns are the prompt. Returns None if the
    dialogues differ in more than their last turn."""
    known = {name: value for name, value in fields.items() if value is not None}  # None fills gaps
    columns = {COLUMN_NAMES.get(name, name): value for name, value in known.items()} | known
    answers, rewards = find_answers(columns, where)
    row = Row(where, [], fields, rewards=rewards)
    row.labelled = len(answers) == 1 and "label" in columns
    if "prompt" in columns:
        row.prompt = read_messages(columns["prompt"], "user", where)
    cut = columns.get("truncated", columns.get("finish_reason"))
    are_cut = cut if isinstance(cut, list) else [cut] * len(answers)
    row.truncated = [one in (True, "length") for one in are_cut]
    require(not answers or len(row.truncated) == len(answers),
            f"{where}: 'truncated' or 'finish_reason' is a list of another length than the completions")
    ids = columns.get("tokens")
    if isinstance(ids, list) and answers:  # a line of rollouts.jsonl, or of another program
        logps = columns.get("logps", [0.0] * len(ids))
        are_ids = ids and all(isinstance(token, int) and token >= 0 for token in ids)
        are_logps = all(isinstance(value, (int, float)) and -math.inf < value < 0.01 for value in logps)
        require(len(answers) == 1 and are_ids and are_logps and len(ids) == len(logps),
                f"{where}: 'tokens' and 'logps' must be token ids and as many log-probs, finite and in nats")
        row.completions = answers
        row.tokens = [ids]
        if "logps" in columns and columns.get("temperature", 1) == columns.get("top_p", 1) == 1:
            row.logps = [logps]  # offline, log π_θ is at T = 1
    elif answers:
        dialogues = [read_messages(answer, "assistant", where) for answer in answers]
        if not split_answers(row, dialogues):
            return None
    require(row.prompt, f"{where}: no 'prompt'; every row needs one")
    require(row.prompt[-1]["role"] != "assistant",
            f"{where}: the prompt ends with an answer, which is not continued; remove its last message")
    require(not columns.get("tools"), f"{where}: 'tools' are not read; remove the column")
    if config.prompt_template is not None and not row.tokens:  # the prompt of a rollout is complete
        columns["prompt"] = row.prompt[-1]["content"]
        with explained(f"{where}: --prompt-template", "name columns of the rows"):
            text = re.sub(r"\{([a-zA-Z_]\w*)\}", lambda name: str(columns[name[1]]), config.prompt_template)
        row.prompt[-1]["content"] = text
    system = columns.get("system") or config.system
    if system is not None and not row.tokens and row.prompt[0]["role"] != "system":
        row.prompt.insert(0, dict(role="system", content=system))
    return row

def find_answers(columns: dict, where: str) -> tuple[list, list[float]]:
    """The answers of a row, texts or messages, and their rewards or labels. A group takes precedence."""
    answers, rewards = [], []
    if "completions" in columns:
        answers = columns["completions"]
        rewards = list(columns["scores"])
    elif "chosen" in columns:
        answers = [columns["chosen"], columns["rejected"]]
        rewards = [columns["label"] if "output_A" in columns else 1, 0]  # HALOs: 1 if A is better
    elif "completion" in columns and {"label", "reward"} & columns.keys():
        answers = [columns["completion"]]
        rewards = [columns.get("label", columns.get("reward"))]
    require(len(answers) == len(rewards), f"{where}: {len(answers)} completions have {len(rewards)} scores")
    for reward in rewards:
        require(isinstance(reward, (int, float)) and abs(reward) < 1e100,
                f"{where}: a score or label is {reward!r:.60}; it must be a finite number")
    is_label = "label" in columns and "completions" not in columns
    require(not is_label or set(rewards) <= {0, 1, -1},
            f"{where}: a label is {columns.get('label')!r:.60}; it must be 1 or true for a good completion, "
            "or 0, -1 or false; convert ratings to such labels")
    if "output_A" in columns:
        rewards = [max(0, rewards[0]), 1 - max(0, rewards[0])]
    return answers, [float(reward) for reward in rewards]

def read_messages(value: Any, role: str, where: str) -> list[dict]:
    """Convert a text by `role`, an HH-RLHF dialogue ("Human:", "Assistant:") or chat messages to messages."""
    if isinstance(value, str):
        is_dialogue = re.match(r"(?s)\s*\[\s*\{.*['\"]role['\"]:\s*['\"](system|user|assistant)", value)
        require(not is_dialogue, f"{where}: chat messages inside a string; save the rows as JSON lines")
        before, *parts = re.split(r"\n\n(Human|Assistant): ?", value)
        is_open = role == "user" and parts[-2:-1] == ["Assistant"] and not parts[-1].strip()
        if is_open:
            parts = parts[:-2]
        if not before.strip() and (is_open or role == "assistant" and len(parts) > 2):
            roles = dict(Human="user", Assistant="assistant")
            turns = zip(parts[::2], parts[1::2])
            return [dict(role=roles[who], content=text.strip()) for who, text in turns]
        value = [dict(role=role, content=value)]
    if isinstance(value, dict):  # a single message
        value = [value]
    messages = []
    for turn in value:
        unread = ("tool_calls", "reasoning_content", "reasoning", "thinking")
        lost = [name for name in unread if turn.get(name)]
        require(not lost, f"{where}: a message has {lost}, which are not read; move them into 'content'")
        require(isinstance(turn["content"], str),
                f"{where}: the content of a message is {turn['content']!r:.60}; it must be a string")
        turn["content"].encode()  # fails for half of a surrogate pair, which no tokenizer takes
        messages.append(dict(role=turn["role"], content=turn["content"]))
    require(role == "assistant" or messages[-1]["content"].strip(),  # `split_answers` drops empty answers
            f"{where}: the text of the user is empty; remove the row")
    return messages

def split_answers(row: Row, dialogues: list[list[dict]]) -> bool:
    """Take the common first turns of all dialogues as the prompt and their last turns as completions. Returns
    False if they differ before the last turn, or if the last turn is not an answer."""
    before = dialogues[0][:-1]
    answers = [dialogue[-1] for dialogue in dialogues]
    row.completions = [answer["content"] for answer in answers]
    if any(dialogue[:-1] != before for dialogue in dialogues):
        return False
    if before:
        require(all(turn in before for turn in row.prompt),
                f"{row.where}: 'prompt' is not among the turns before the answers; remove one of the two")
        row.prompt = before
    return all(answer["role"] == "assistant" and answer["content"].strip() for answer in answers)

def encode_rows(rows: list[Row], sampler: "Sampler", online: bool, flag: str = "--data") -> list[Group]:
    """Convert rows to groups of token ids, and drop those that are too long. online: completions will be
    sampled, and those of the rows are ignored."""
    config, tokenizer = sampler.config, sampler.tokenizer
    find_special_tokens(rows, sampler, flag)
    if online:
        sampler.check_columns(rows)
        rows = [dataclasses.replace(row, completions=[], tokens=[]) for row in rows]
    has_answers = any(turn["role"] == "assistant" for row in rows for turn in row.prompt)
    if flag == "--data" and has_answers and not tokenizer.chat_template:
        tokenizer.chat_template = TRANSCRIPT
        warn(f"{flag}: the model has no chat template, so dialogues are formatted as Human: … Assistant: …")
    with explained(f"{flag}: the chat template of the model rejects a prompt",
                   "change the prompts, or omit --system"):
        encoded = encode_dialogues(tokenizer, rows)
    longest_prompt = config.max_prompt_length or sampler.longest
    stops = sampler.stop_ids
    groups = []
    foreign = unfinished = 0
    for number, (row, (prompt, *wholes)) in enumerate(zip(rows, encoded)):
        require(online or row.completions, f"{row.where}: no completions with rewards or labels among its "
                f"columns {', '.join(row.fields)}; rename them as in the README, or use --sample-every 1")
        group = Group(number, prompt, row.tokens, row.rewards, row.labelled, truncated=row.truncated)
        if are_tokens_of(sampler, row):
            if len(row.logps) == len(row.tokens):
                group.logps = row.logps
            group.truncated = [cut or ids[-1] not in stops for ids, cut in zip(row.tokens, row.truncated)]
            unfinished += group.truncated != row.truncated
        else:
            foreign += bool(row.tokens)
            group.prompt = os.path.commonprefix([prompt, *wholes])
            group.completions = [
                cut_at_stop([*ids[len(group.prompt):], stops[0]], stops,
                            len(re.findall(sampler.stop_pattern, text)))[: -1 if cut else None]
                for ids, text, cut in zip(wholes, row.completions, row.truncated)
            ]
            if len(set(map(tuple, group.completions))) == 1:  # none is better
                group.rewards = [fmean(row.rewards)] * len(row.rewards)
        texts = (group.prompt, *group.completions)
        require(all(texts) and sampler.vocabulary.issuperset(itertools.chain(*texts)),
                f"{row.where}: the tokenizer of --model {config.model} gives no tokens for it, or some that "
                "the model does not have; use the model's own tokenizer")
        room = max(map(len, group.completions), default=config.max_new_tokens)
        if len(group.prompt) <= longest_prompt and len(group.prompt) + room <= sampler.longest:
            groups.append(group)
    if unfinished:
        warn(f"{flag}: the tokens of {unfinished} rows end without {tokenizer.decode(stops[0])!r} and count as "
             "cut off; append it, or set 'truncated' to true")
    if foreign:
        warn(f"{flag}: the tokens of {foreign} rows do not match their texts under this tokenizer; the texts "
             "are used instead, and their sampler counts as unknown")
    limits = (f"a prompt may have {longest_prompt} tokens, and with its completion {sampler.longest} (the "
              f"model has {sampler.max_positions}); see --max-length, --max-prompt-length and --max-new-tokens")
    require(groups or not rows, f"{flag}: no row is short enough: {limits}")
    if len(groups) < len(rows):
        warn(f"{flag}: dropped {len(rows) - len(groups)} rows that are too long: {limits}")
    return groups

def are_tokens_of(sampler: "Sampler", row: Row) -> bool:
    """True if a row has tokens and they are those of this tokenizer."""
    largest = max(map(max, row.tokens), default=math.inf)
    if largest >= len(sampler.tokenizer):
        return False
    without_special = sampler.tokenizer.batch_decode(row.tokens, skip_special_tokens=True)
    return row.completions in (sampler.texts(row.tokens), without_special)

def find_special_tokens(rows: list[Row], sampler: "Sampler", flag: str) -> None:
    """Warn of texts that contain special tokens, and remove a stop token at the end of an answer."""
    special = [token.content for token in sampler.tokenizer.added_tokens_decoder.values() if token.special]
    pattern = re.compile("|".join(map(re.escape, special)) or "(?!)")
    found = []
    for row in rows:
        row.completions = [re.sub(rf"(({sampler.stop_pattern})\s*)+$", "", text) for text in row.completions]
        for text in [turn["content"] for turn in row.prompt] + row.completions:
            found += [f"{match[0]!r} in {row.where}" for match in pattern.finditer(text)]
    if found:
        warn(f"{flag}: the texts contain {len(found)} special tokens of the tokenizer, which are read as such, "
             f"the first one {found[0]}; remove them, also those of a chat template, which is applied anyway")

def encode_dialogues(tokenizer: Any, rows: list[Row]) -> list[list[list[int]]]:
    """For each row, the token ids of its prompt, up to where the model continues, and of the prompt followed
    by each answer, as the chat template formats them. The loss is on the tokens that they do not share:

        <user> 2+2? <assistant>                         the prompt
        <user> 2+2? <assistant> It is 4. <end>          with an answer
        <------- common ------> <- completion ->

    So an empty thought, which Qwen3 puts before an answer, is part of the completion. DeepSeek-R1 opens a
    thought at the end of a prompt but not before an answer; there the common part ends earlier."""
    has_template = bool(tokenizer.chat_template)  # it adds special tokens itself
    texts = []
    for row in rows:
        start = render(tokenizer, row.prompt, add_generation_prompt=True)
        require(is_written(row.prompt, start),
                f"{row.where}: the chat template of the model drops a message of its prompt")
        texts += [start, *(place_answer(tokenizer, row, start, answer) for answer in row.completions)]
    # 1000 at a time: while it works, a tokenizer takes four times the memory of its ids.
    ids_of = itertools.chain.from_iterable(
        tokenizer(texts[start : start + 1000], add_special_tokens=not has_template)["input_ids"]
        for start in range(0, len(texts), 1000))
    encoded = [[next(ids_of) for _ in ("prompt", *row.completions)] for row in rows]
    for prompt, *_ in encoded:
        if not has_template and prompt[-1:] == [tokenizer.eos_token_id]:  # some end every text with EOS
            prompt.pop()
    return encoded

# What templates get for today's date, so that resuming on another day is exact. They take no function.
DATE = ("{% macro strftime_now(format) %}{{ format|replace('%d', '26')|replace('%m', '07')|replace('%b', 'Jul')"
        "|replace('%B', 'July')|replace('%y', '24')|replace('%Y', '2024') }}{% endmacro %}")

# Templates for models without one: for plain texts, and for dialogues.
PLAIN = ("{% for turn in messages %}{{ '\n\n' if not loop.first and turn.role != 'assistant' }}"
         "{{ turn.content }}{% endfor %}")
TRANSCRIPT = ("{{ bos_token }}{% for turn in messages %}{{ '\n\n' + dict(user='Human').get(turn.role, "
              "turn.role.title()) + ':\n' + turn.content }}{% endfor %}"
              "{% if add_generation_prompt %}{{ '\n\nAssistant:\n' }}{% endif %}")

def render(tokenizer: Any, dialogue: list[dict], **settings: Any) -> str:
    """Format a dialogue with the chat template."""
    template = tokenizer.get_chat_template() if tokenizer.chat_template else PLAIN
    if "strftime_now" in template:
        template = DATE + template
    return tokenizer.apply_chat_template(dialogue, chat_template=template, tokenize=False, **settings)

def place_answer(tokenizer: Any, row: Row, start: str, answer: str) -> str:
    """Format a prompt with its answer. If the chat template drops the thought of the answer (DeepSeek-R1) or
    the system message (Mistral), append the answer to `start` instead."""
    whole = render(tokenizer, row.prompt + [dict(role="assistant", content=answer)])
    keeps_thought = whole.startswith(start) or "</think>" not in answer
    if keeps_thought and answer.strip() in whole and is_written(row.prompt, whole):
        return whole
    if answer.startswith("<think>"):
        start = start.removesuffix("<think>\n")
    return start + answer

def is_written(turns: list[dict], text: str) -> bool:
    """True if `text` contains all turns, except for thoughts, which templates drop from earlier turns."""
    return all(turn["content"].split("</think>")[-1].strip() in text for turn in turns)

@dataclass
class Batch:
    """What one optimizer step trains on. In pairs, chosen and rejected alternate."""

    step: int
    sequences: list[Sequence]
    mismatched: list[Sequence]  # KTO: prompts with the completion of another prompt, for z₀
    reward: float  # mean reward of the groups that the batch was made of
    no_difference: float | None = None  # share of these groups whose rewards are all equal
    is_on_policy: bool = False  # drawn from the policy as it is; `forward_backward` is followed by an update

class Batches:
    """The batches of a run, in order. Offline they are a function of --seed and the step; online they are
    made from rollouts. `pending` holds batches that were made but not yet trained on."""

    def __init__(self, config: Config, groups: list[Group], longest: int):
        self.config = config
        self.longest = longest  # see Sampler
        self.fingerprint = {}  # of the rows and the model; must be the same on resume
        self.loss = LOSSES[config.loss]
        self.pending: list[Batch] = []
        self.made_until = 0  # the last step whose batch has been made
        # Groups with the sequences to train on: offline, one unit of the loss; online, none are drawn yet.
        self.pool: list[tuple[Group, list[Sequence]]] = [(group, []) for group in groups]
        self.per_step = config.batch_size  # how many of them a step takes
        if config.sample_every and self.loss.unit == "example":  # each prompt gives a whole group of examples
            self.per_step, rest = divmod(config.batch_size, config.group_size)
            require(not rest, f"--batch-size {config.batch_size} counts completions, which come in groups of "
                    f"--group-size {config.group_size}; use a multiple of it")
        if not config.sample_every:
            require(self.loss.unit == "example" or not any(group.labelled for group in groups), "--data: "
                    "labelled completions do not form pairs or groups; use --loss kto, or --sample-every 1")
            prepared = prepare_groups(groups, config)
            self.pool = [(group, unit) for group, units in zip(groups, prepared) for unit in units]
            require(any(not is_idle(sequence, config) for _, unit in self.pool for sequence in unit),
                    "--data: no row has both a better and a worse completion")
            if tied := sum(not group.labelled and len(set(group.rewards)) == 1 for group in groups):
                warn(f"--data: {tied} of {len(groups)} prompts have no better and worse completion, and so no "
                     "gradient")
        require(self.per_step <= len(self.pool), f"--batch-size {config.batch_size}: a step needs "
                f"{self.per_step} prompts, pairs or examples, but --data has {len(self.pool)}; lower it")
        prompts = {tuple(group.prompt) for group in groups}
        if self.loss.needs_mismatched and 1 in (self.per_step, len(prompts)):
            warn("z₀ is 0 in every step, as a batch has only one prompt; raise --batch-size, or add prompts")
        self.steps = config.steps or len(self.pool) // self.per_step  # in the whole run
        self.order = []  # indices into the pool; each epoch is shuffled anew
        while len(self.order) < self.steps * self.per_step:
            epoch = len(self.order) // len(self.pool)
            generator = torch.Generator().manual_seed(seed_for(config.seed, "order", epoch))
            self.order += torch.randperm(len(self.pool), generator=generator).tolist()

    def next(self, step: int) -> Batch:
        """The batch of the next step."""
        if not self.pending:
            self.make(step)
        return self.pending.pop(0)

    def make(self, until: int, rollouts: list[Group] | None = None) -> list[Batch]:
        """Make the batches up to step `until`: offline from the data, online from rollouts of the prompts
        `of_steps`, and without rollouts none. Returns those of them that have not been trained on."""
        first = self.made_until + 1
        members = []
        if rollouts is not None:
            units = prepare_groups(rollouts, self.config)
            members = [(group, sum(of_group, [])) for group, of_group in zip(rollouts, units)]
        elif not self.config.sample_every:
            members = self.of_steps(first, min(until, self.steps))
        for step in range(first, first + len(members) // self.per_step):
            start = (step - first) * self.per_step
            groups, units = zip(*members[start : start + self.per_step])
            # Copies, because in another epoch they have another reference.
            sequences = [dataclasses.replace(sequence) for unit in units for sequence in unit]
            mismatched = self.mismatch(sequences) if self.loss.needs_mismatched else []
            no_difference = None
            if self.config.sample_every or self.loss.unit == "group":
                no_difference = fmean(max(group.rewards) == min(group.rewards) for group in groups)
            reward = fmean(fmean(group.rewards) for group in groups)
            is_on_policy = rollouts is not None and step == first
            self.pending.append(Batch(step, sequences, mismatched, reward, no_difference, is_on_policy))
            self.made_until = step
        return [batch for batch in self.pending if batch.step <= until]

    def of_steps(self, first: int, last: int) -> list[tuple[Group, list[Sequence]]]:
        """The members of the pool for steps `first` to `last`."""
        places = self.order[(first - 1) * self.per_step : last * self.per_step]
        return [self.pool[i] for i in places]

    def mismatch(self, sequences: list[Sequence]) -> list[Sequence]:
        """Combine each prompt with the completion of the next sequence that has another prompt, for z₀. Online,
        this looks from a whole group further on: otherwise all completions of a prompt, which are neighbours,
        would be replaced by the same one."""
        shift = self.config.group_size if self.config.sample_every else 0
        mismatched = []
        for i, sequence in enumerate(sequences):
            start = (i + shift) % len(sequences)
            for other in sequences[start:] + sequences[:start]:
                if other.prompt != sequence.prompt:
                    completion = other.completion[: self.longest - len(sequence.prompt)]
                    mismatched.append(Sequence(sequence.prompt, completion, sequence.advantage))
                    break
        return mismatched

def prepare_groups(groups: list[Group], config: Config) -> list[list[list[Sequence]]]:
    """For each group, the units of the loss: lists of sequences with advantages."""
    loss = LOSSES[config.loss]
    prepared = []
    for group in groups:
        rewards = torch.tensor(group.rewards, dtype=torch.float64)
        advantages = group_advantages(rewards, scale=config.scale_rewards)
        if group.labelled:
            advantages = torch.where(rewards > 0.5, 1.0, -1.0)
        advantages[advantages.abs() < 1e-9] = 0  # rounding errors
        if config.positive_only:
            advantages.clamp_(min=0)
        truncated = group.truncated or [False] * len(rewards)
        sequences = [Sequence(group.prompt, ids, advantage, truncated=is_cut)
                     for ids, advantage, is_cut in zip(group.completions, advantages.tolist(), truncated)]
        for sequence, logps in zip(sequences, group.logps):
            sequence.sampler_logps = torch.tensor(logps, dtype=torch.float32)
        prepared.append(loss.make_units(group, sequences))
    loss.set_weights([sequence for units in prepared for unit in units for sequence in unit
                      if not (sequence.truncated and config.mask_truncated)], config)
    return prepared

def is_idle(sequence: Sequence, config: Config) -> bool:
    """True if a sequence has no gradient, and so is skipped: it counts in the mean with a loss of 0."""
    loss = LOSSES[config.loss]
    if loss.unit == "pair":
        return sequence.advantage == 0 and config.positive_only
    if sequence.truncated and config.mask_truncated:
        return True
    # M_P and M_R of --perception sample are maxima over all tokens, so it needs every token's d.
    needs_all = loss.needs_all or config.kl_beta > 0 or config.perception == "sample"
    return sequence.advantage == 0 and not needs_all and (config.positive_only or loss.unit == "group")

# ---------- Rollouts ----------------------------------------------------------------------------------------
# Completions sampled from the policy, with their rewards.

Completion = tuple[list[int], list[float]]  # sampled token ids, and the log-prob of each

class Sampler:
    """Samples groups of completions from the policy and rewards them, for training and for measurements."""

    def __init__(self, policy: Module, tokenizer: Any, config: Config):
        self.policy, self.tokenizer, self.config = policy, tokenizer, config
        with explained(f"--model {config.model}: its chat template fails", "fix its chat_template.jinja"):
            self.stop_ids = find_stop_ids(policy, tokenizer)
        stop_texts = filter(None, tokenizer.convert_ids_to_tokens(self.stop_ids))  # None: it has no such id
        self.stop_pattern = "|".join(map(re.escape, stop_texts))
        self.max_positions = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or 2**31
        # of a prompt with its completion, in tokens
        self.longest = min(self.max_positions, config.max_length or self.max_positions)
        self.vocabulary = set(range(len(policy.get_input_embeddings().weight)))
        self.external = None  # a --sampler, used instead of `generate`
        self.drawings = Counter()  # how often samples were drawn at a step
        # Loading a reward can take long.
        self.reward = Reward(config) if config.sample_every or config.eval_data else None

    def check_columns(self, rows: list[Row]) -> None:
        """Raises UserError for the first row without a column that the reward needs."""
        name = self.config.reward
        columns = self.reward and NEEDED_COLUMNS.get(name)
        for row in rows if columns else ():
            require(any(row.fields.get(column) is not None for column in columns),
                    f"{row.where}: no {' and no '.join(columns)}; --reward {name} needs it")

    def draw_rollouts(self, prompts: list[Group], rows: list[Row], size: int, step: int,
                      greedy: bool = False) -> list[Group]:
        """Sample `size` completions for each prompt and reward them. The samples are a function of --seed, of
        `step`, of how often it was drawn at this step, and of how calls are split, which --sample-tokens and
        the number of ranks decide. The `row` of a prompt is an index into `rows`. Raises UserError if the
        reward failed on every sample so far."""
        key = step, greedy
        step -= REDRAW * self.drawings[key]
        self.drawings[key] += 1
        repeated = [group for group in prompts for _ in range(size)]
        if self.external:
            with explained(f"--sampler {self.config.sampler}", "see the docstring of configs/external.py"):
                drawn = self.check_completions(self.external(prompts, size, step, greedy), len(repeated))
        else:
            drawn = in_order(self.draw(repeated, step, greedy))
        rollouts = []
        for number, group in enumerate(prompts):
            ids, logps = map(list, zip(*drawn[number * size : (number + 1) * size]))
            cut = [completion[-1] not in self.stop_ids for completion in ids]
            rollouts.append(Group(group.row, group.prompt, ids, [0.0] * size, False, logps, cut))
        if self.reward:
            self.reward_groups(rollouts, rows)
        return rollouts

    def reward_groups(self, groups: list[Group], rows: list[Row]) -> None:
        """Set the rewards of groups of the same size; each rank computes a part. A call of the reward gets one
        group, or several whole ones of at most 64 completions."""
        count = max(1, 64 // len(groups[0].rewards))
        attempted = {}
        for start in range(RANK * count, len(groups), WORLD_SIZE * count):
            samples = [(rows[group.row], ids) for group in groups[start : start + count]
                       for ids in group.completions]
            texts = self.texts([ids for _, ids in samples])
            attempted[start] = self.reward.attempt(
                [row.prompt for row, _ in samples], texts, [row.fields for row, _ in samples])
        rewards = iter(self.reward.settle([*itertools.chain(*in_order(attempted))]))
        for group in groups:
            group.rewards = list(itertools.islice(rewards, len(group.rewards)))

    def check_completions(self, drawn: list[Completion], count: int) -> list[Completion]:
        """Check what a --sampler returned. Raises ValueError unless it is `count` completions, each a list of
        token ids that ends at its first stop token or is --max-new-tokens long, and their log-probs."""
        completions = []
        for ids, logps in drawn:
            whole = cut_at_stop([*ids, self.stop_ids[0]], self.stop_ids)[: self.config.max_new_tokens]
            is_whole = whole == ids and self.vocabulary.issuperset(ids)
            if is_whole and len(logps) == len(ids) and -math.inf < sum(logps) < 0.01:
                completions.append(([int(token) for token in ids], [round(float(value), 5) for value in logps]))
        if not len(completions) == len(drawn) == count:
            raise ValueError(f"{drawn!r:.80} is not {count} completions of token ids and log-probs")
        return completions

    def draw(self, repeated: list[Group], step: int, greedy: bool) -> dict[int, Completion]:
        """The completions of this rank, by their index into `repeated`. All ranks make equally many calls of
        `generate`, because FSDP requires it; a call that is made twice changes nothing."""
        most = math.ceil(len(repeated) / WORLD_SIZE)
        widths = [len(group.prompt) + self.config.max_new_tokens for group in repeated]
        calls = [packed[start : start + most] for packed in pack(widths, self.config.sample_tokens)
                 for start in range(0, len(packed), most)]
        mine = range(RANK, math.ceil(len(calls) / WORLD_SIZE) * WORLD_SIZE, WORLD_SIZE)
        drawn = {}
        with gathered(self.policy) if self.config.shard else contextlib.nullcontext():
            for turn in tqdm(mine, "drawing", leave=False, delay=1, disable=RANK > 0 or None):
                number = turn % len(calls)
                ids = [repeated[i].prompt for i in calls[number]]
                seed = seed_for(self.config.seed, "draw", step, number)
                drawn |= zip(calls[number], sample(self.policy, ids, self.stop_ids, self.config, seed, greedy))
        return drawn

    def texts(self, completions: list[list[int]]) -> list[str]:
        """Completions as text, without stop tokens, BOS and padding. Other special tokens are kept: thoughts
        may begin and end with them."""
        hidden = {self.tokenizer.bos_token_id, self.tokenizer.pad_token_id, *self.stop_ids}
        return self.tokenizer.batch_decode([[i for i in ids if i not in hidden] for ids in completions])

@contextlib.contextmanager
def gathered(policy: Module) -> Iterator[None]:
    """Inside this context, FSDP gathers all weights in the first forward pass and keeps them: otherwise
    `generate` would gather every layer for every token."""
    policy.set_reshard_after_forward(False)
    try:
        yield
    finally:
        for module in policy.modules():
            if hasattr(module, "set_reshard_after_forward"):  # an FSDP module
                module.set_reshard_after_forward(True, recurse=False)
                module.reshard()

@torch.no_grad()
def sample(policy: Module, prompts: list[list[int]], stops: list[int], config: Config, seed: int,
           greedy: bool = False) -> list[Completion]:
    """Sample one completion per prompt with one call of `model.generate`. Returns token ids, up to and
    including the first of `stops` or --max-new-tokens long, and the log-prob of each token under the
    distribution that it was drawn from, to five digits. The result is a function of `seed`; no global state
    changes."""
    from transformers import GenerationConfig, TemperatureLogitsWarper, TopPLogitsWarper
    pad = stops[0]  # any token of the model, as padding is masked
    generator = torch.Generator(policy.device).manual_seed(seed)
    logps = []  # one (N, 1) tensor per position
    cumulative = torch.empty(0, dtype=torch.float64, device=policy.device)  # a buffer for all positions

    # T and top-p are passed here because `generate` applies those in `settings` after our own processor.
    processors = []
    if config.temperature != 1 and not greedy:
        processors.append(TemperatureLogitsWarper(config.temperature))
    if config.top_p < 1 and not greedy:
        processors.append(TopPLogitsWarper(config.top_p))
    processors.append(lambda _, scores: draw_tokens(scores, generator, cumulative, logps, greedy))
    settings = GenerationConfig(do_sample=False, eos_token_id=stops, pad_token_id=pad,
                                max_new_tokens=config.max_new_tokens, disable_compile=True)

    ids = list(map(torch.tensor, prompts))
    mask = list(map(torch.ones_like, ids))
    ids = pad_sequence(ids, True, pad, padding_side="left").to(policy.device)
    mask = pad_sequence(mask, True, 0, padding_side="left").to(policy.device)
    model_settings = policy.generation_config
    # Otherwise the model's own settings would fill in what is unset, such as Qwen2.5's repetition penalty.
    policy.generation_config = GenerationConfig()
    policy.eval()
    try:
        with policy.autocast(), torch.compiler.set_stance("force_eager"):
            cache = prompt_cache(policy, ids, mask, config)
            drawn = policy.generate(ids, attention_mask=mask, **cache,
                                    generation_config=settings, logits_processor=processors)
    finally:
        policy.train()
        policy.generation_config = model_settings

    completions = []
    for tokens, values in zip(drawn[:, ids.shape[1] :].tolist(), torch.cat(logps, 1).tolist()):
        tokens = cut_at_stop(tokens, stops)
        values = [round(value, 5) for value in values[: len(tokens)]]
        completions.append((tokens, values))
    return completions

def draw_tokens(scores: Tensor, generator: torch.Generator, cumulative: Tensor, logps: list[Tensor],
                greedy: bool) -> Tensor:
    """Choose one token per row, the most likely one or a sample, and return scores that allow no other.
    Sampling looks up one random number in the cumulative distribution; `generate` itself would draw a number
    for each token of the vocabulary, which takes a fifth of the sampling time."""
    probs = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    cumulative.resize_(probs.shape).copy_(probs).cumsum_(-1)
    total = cumulative[:, -1:]
    points = total * torch.rand(
        total.shape, generator=generator, dtype=torch.float64, device=scores.device)
    tokens = torch.searchsorted(cumulative, points, right=True)
    if greedy:
        tokens = probs.argmax(-1, keepdim=True)
    logps.append((probs.gather(1, tokens) / total).log())
    return scores.fill_(-math.inf).scatter_(1, tokens, 0.0)

def prompt_cache(policy: Module, ids: Tensor, mask: Tensor, config: Config) -> dict[str, Any]:
    """Keys and values of all but the last token of (N, T) prompts, computed once for equal neighbours, as an
    argument of `generate`. Returns {} if no neighbours are equal, with FSDP, or if prompts cannot be shared.
    The cache has the dtype of the matrix products. If completions cannot be longer than the prompts, it is
    allocated at full length, which costs less than a cache that grows with each token."""
    from transformers import DynamicCache, StaticCache
    different, index = torch.cat([ids, mask], 1).unique_consecutive(dim=0, return_inverse=True)
    if len(different) == len(ids) or ids.shape[1] < 2 or config.shard or not policy.shares_prompts:
        return {}
    dtype = torch.bfloat16 if torch.is_autocast_enabled(policy.device.type) else policy.dtype
    kind, size = DynamicCache, {}
    if config.max_new_tokens <= ids.shape[1]:
        kind, size = StaticCache, dict(max_cache_len=ids.shape[1] + config.max_new_tokens)
    cast_update = lambda self, k, v, *more, **named: kind.update(
        self, k.to(dtype), v.to(dtype), *more, **named)
    cache = type("PromptCache", (kind,), {"update": cast_update})(config=policy.config, **size)
    ids, mask = different.tensor_split(2, 1)
    ids, mask = ids[:, :-1], mask[:, :-1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    # The name of the argument as of transformers 5.24, and before.
    name = "cache" if "cache" in inspect.signature(policy.forward).parameters else "past_key_values"
    argument = {name: cache}
    policy.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **argument)
    cache.reorder_cache(index)
    return argument

def cut_at_stop(ids: list[int], stops: list[int], skip: int = 0) -> list[int]:
    """Token ids up to and including the first of `stops` after `skip` others, or all of them."""
    places = [i for i, token in enumerate(ids, 1) if token in stops]
    return ids[: places[skip]] if len(places) > skip else ids

def find_stop_ids(policy: Module, tokenizer: Any) -> list[int]:
    """Token ids that end a completion. The first one is put at the end of offline completions."""
    configured = policy.generation_config.eos_token_id
    first = tokenizer.eos_token_id
    stops = {first, *(configured if isinstance(configured, list) else [configured])} - {None}
    # The token that the chat template puts after an answer, such as <end_of_turn>.
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "humanline"}]
    after = render(tokenizer, turns).split("humanline")[-1].strip()
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | stops
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    for last in itertools.takewhile(special.__contains__, ids):  # answers of Cohere 2 end with two
        first = last
    return [first, *sorted(stops - {first})]

# ---------- Rewards -----------------------------------------------------------------------------------------
# A number for each completion. A failure stops the run only if no sample has had a reward.

CONFIGS = Path(__file__).with_name("configs")
NEEDED_COLUMNS = {"exact": ["answer"], "math": ["answer", "solution"]}  # a row needs one of them

def function_file(spec: str) -> tuple[str, str]:
    """The file and the function that --reward or --sampler names; without a file it is built in."""
    path, _, name = spec.rpartition(":")
    return (str(CONFIGS / "math_reward.py") if spec == "math" else path), name

class Reward:
    """The reward that --reward names, as a function(prompts, completions, rows) that returns a finite float
    for each completion. Prompts are lists of messages (dicts with `role` and `content`), completions are
    strings, rows are dicts with all columns. In training, a call gets all completions of each of its prompts,
    one after another. Raises UserError if it cannot be loaded."""

    def __init__(self, config: Config):
        self.config = config
        self.worked = False  # whether any sample of the run ever got a reward
        path, name = function_file(config.reward)
        with explained("--reward-args", "pass a JSON object, such as '{\"model\": \"NAME\"}'"):
            settings = dict(json.loads(config.reward_args or "{}"))
        settings = settings if ":" in config.reward else {}  # those of a run, measured with another reward
        self.function = exact_reward
        advice = "pass FILE.py:function, a function(prompts, completions, rows) -> list of floats"
        with explained(f"--reward {config.reward}", advice, math_verify="pip install math-verify"):
            if path:
                self.function = FunctionProcess(path, name, config.reward_seconds, settings)

    def __call__(self, *samples: list) -> list[float]:
        return self.settle(self.attempt(*samples))

    def attempt(self, *samples: list, again: bool = True) -> list[float | str]:
        """Reward all samples in one call; if that fails, one at a time, until failures in a row have taken
        three times --reward-seconds, unless `again` is false. Returns the reward of each sample, or why it has
        none."""
        count = len(samples[0])
        try:
            values = self.function(*samples)
            if not isinstance(values, list) or len(values) != count:
                raise ValueError(f"it returned {values!r:.60} for {count} completions")
            good = [isinstance(value, (int, float)) and abs(value) < 1e100 for value in values]
            return [float(value) if is_good else f"{value!r:.200}" for value, is_good in zip(values, good)]
        except Exception as error:
            reason = result = f"{error!r:.200}"
        if not again:
            return [reason]
        results, lost = [], 0.0
        for sample in zip(*samples):
            if lost < 3 * self.config.reward_seconds:  # afterwards every sample keeps the last reason
                started = time.perf_counter()
                [result] = self.attempt(*([part] for part in sample), again=False)
                lost = 0.0 if isinstance(result, float) else lost + time.perf_counter() - started
            results.append(result)
        if all(isinstance(result, float) for result in results):
            warn(f"--reward {self.config.reward} failed on {count} samples together, and is called for each of "
                 f"them, which is slower: {reason}")
        return results

    def settle(self, attempted: list[float | str]) -> list[float]:
        """Replace the reasons in the results of `attempt`, gathered from all ranks: a sample that failed gets
        0, or the lowest reward among them if that is negative. One warning reports how many failed. Raises
        UserError if no sample of the run ever got a reward."""
        good = [reward for reward in attempted if isinstance(reward, float)]
        reason = next((reward for reward in attempted if isinstance(reward, str)), "")
        if "took longer" in reason:
            reason += "; raise --reward-seconds"
        self.worked |= bool(good)
        if not self.worked:
            raise UserError(f"--reward {self.config.reward} failed on every sample: {reason}")
        lowest = min([0.0, *good])
        if reason:
            warn(f"--reward {self.config.reward}: {len(attempted) - len(good)} of {len(attempted)} samples "
                 f"failed and count as {lowest:g}; the first reason: {reason}")
        return [lowest if isinstance(reward, str) else reward for reward in attempted]

def exact_reward(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """1 for a completion that equals the row's `answer`, or one of its answers, up to surrounding spaces."""
    rewards = []
    for text, row in zip(completions, rows):
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        if not all(isinstance(answer, (str, int)) for answer in answers):
            raise ValueError(f"'answer' is {row['answer']!r:.60}, which is neither a text nor an integer")
        rewards.append(float(text.strip() in [str(answer).strip() for answer in answers]))
    return rewards

class FunctionProcess:
    """Calls a function of the user's file in a separate process, of this Python or of the one that `command`
    starts, which needs only the standard library. If the function hangs, crashes or runs out of memory, only
    that call fails: with TimeoutError after `seconds`, otherwise with RuntimeError. The process is killed with
    its children, also at exit or when this object is deleted, and the next call starts a new one.

    Arguments are pickled, and every element of a list is copied, so that the function may change it. Results
    are numbers, strings, lists, arrays or tensors, and are sent as JSON. `settings` are keyword arguments of
    the function, `options` those of Popen."""

    def __init__(self, path: str, name: str, seconds: float, settings: dict | None = None,
                 command: Iterable[str] = (), **options: Any):
        self.function = os.path.abspath(path), name, settings or {}
        # -P: files in the working folder must not replace modules of Python.
        self.line = [*(command or [sys.executable]), "-P", "-c", SERVER]
        self.seconds, self.options = seconds, options
        self.start()

    def start(self) -> None:
        # In a new session, so that it can be killed with its children, and Ctrl-C does not reach it.
        self.process = subprocess.Popen(self.line, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        start_new_session=True, **self.options)
        self.end = weakref.finalize(self, self.kill, self.process)
        self.ask(300, None)  # load the file

    @staticmethod
    def kill(process: subprocess.Popen) -> int:
        with contextlib.suppress(OSError):  # it may have ended already, with unread input
            os.killpg(process.pid, signal.SIGKILL)
            process.stdin.close()
        return process.wait()

    def __call__(self, *arguments: Any) -> Any:
        if not self.end.alive:
            self.start()
        return self.ask(self.seconds, arguments)

    def ask(self, seconds: float, arguments: tuple | None) -> Any:
        try:
            with contextlib.suppress(BrokenPipeError):  # it has died, which shows below
                request = pickle.dumps((seconds, self.function, arguments))
                self.process.stdin.write(request.hex().encode() + b"\n")
                self.process.stdin.flush()
            if not multiprocessing.connection.wait([self.process.stdout], seconds):
                raise TimeoutError(f"took longer than {seconds:.4g} s")
            answer = self.process.stdout.readline()
            if not answer:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(1)  # it has closed its output and is probably exiting
                raise RuntimeError(f"its process ended with status {self.end()}")
        except BaseException:  # also Ctrl-C
            self.end()
            raise
        value, failure = json.loads(answer)
        if failure and arguments is None:  # the file did not load
            self.end()
        if failure:
            raise RuntimeError(failure)
        return value

def serve_function() -> None:
    """The process of a FunctionProcess, which runs this source without the rest of the file: load the function,
    and call it for each request. Ends when the trainer ends, even in the middle of a call."""
    import copy, faulthandler, importlib.util, json, multiprocessing, os, pickle, queue, signal, sys, threading
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what the function starts must not read requests
    os.dup2(2, 1)  # what it prints must not be taken for an answer
    calls = queue.SimpleQueue()

    def listen() -> None:
        for line in requests:
            calls.put(line)
        os.killpg(0, signal.SIGKILL)  # also its children, such as the workers of an engine

    threading.Thread(target=listen, daemon=True).start()
    while True:
        seconds, (path, name, settings), arguments = pickle.loads(bytes.fromhex(calls.get()))
        # This ends the process even if a loop in C keeps `listen` from running.
        faulthandler.dump_traceback_later(seconds + 5, exit=True)
        try:
            if arguments is None:
                value = None
                # Modules beside the file take precedence over installed ones, but not over those of Python.
                places = [place for place, entry in enumerate(sys.path) if entry.endswith("-packages")]
                sys.path.insert(min(places, default=len(sys.path)), os.path.dirname(path))
                sys.path.append(os.getcwd())
                # With these names, processes of `multiprocessing` find the functions of the file.
                sys.modules["__main__"].__file__ = path
                spec = importlib.util.spec_from_file_location("__mp_main__", path)
                module = importlib.util.module_from_spec(spec)
                sys.modules["__mp_main__"] = sys.modules["users_file"] = module
                spec.loader.exec_module(module)
                function = getattr(module, name)
            else:
                copies = [[copy.deepcopy(item) for item in part] if isinstance(part, list) else part
                          for part in arguments]
                value = function(*copies, **settings)
            answer = json.dumps([value, ""], default=lambda value: value.tolist())  # arrays and tensors
        except BaseException as error:  # also sys.exit()
            answer = json.dumps([None, f"{type(error).__name__}: {error}".splitlines()[0]])
        faulthandler.cancel_dump_traceback_later()
        print(answer, file=answers, flush=True)

SERVER = f"{inspect.getsource(serve_function)}\nserve_function()"  # now, as the file may change while it runs

# ---------- The reference -----------------------------------------------------------------------------------

class Reference:
    """π_ref, an earlier policy, and its log-probs. There is no second model. There are two cases:

    Lookahead: at a sync the reference *is* the policy, so one pass of the policy gives the log-probs of all
    batches up to the next sync. Offline nothing else is needed.

    Weights put aside: if batches are still to be sampled, or the step of the next sync is not known, the
    weights of the reference (with LoRA, its adapters) are kept in host memory, and swapped into the policy for
    one pass over the batches that are known to need them.

    For a reference that is not a copy of the policy, such as an average, override `sync`, which is called at
    the steps of `sync_steps`: set `weights`, and ignore `ahead`, which the policy would score. The weights
    have the policy's dtype; in bf16 an average would lose its small steps."""

    def __init__(self, policy: Module, batches: Batches, config: Config):
        self.policy, self.batches, self.config = policy, batches, config
        self.until = 0  # no sync comes before this step
        self.weights: list[Tensor] | None = None  # put aside, in host memory
        self.parts = [p.detach() for p in trained(policy).values()]  # this rank's part of the policy
        if config.shard:
            self.parts = [part.to_local() for part in self.parts]

    def sync(self, until: int | None = None, ahead: Iterable[Batch] = ()) -> None:
        """π_ref ← π_θ, before the update of a step.

        Args:
            until: the step of the next sync, or the last step. None: it is not known, so the weights are put
                aside, and every batch is scored in its own step.
            ahead: the batches up to that step, as far as they have been made.
        """
        if not self.config.has_reference:
            return
        for batch in self.batches.pending:  # what they have is of the reference before
            for sequence in batch.sequences + batch.mismatched:
                sequence.ref_logps = None
        self.until = until or 0
        attach_logps("ref_logps", self.policy, ahead, self.config)
        self.weights = None
        if until is None or self.batches.made_until < until:
            self.weights = [part.to("cpu", copy=True) for part in self.parts]

    def score(self, batch: Batch) -> None:
        """Make sure that a batch has the log-probs of the reference; call it before each step."""
        is_scored = any(sequence.ref_logps is not None for sequence in batch.sequences + batch.mismatched)
        if is_scored or self.weights is None:
            return
        ahead = [other for other in self.batches.pending if other.step <= self.until]
        self.swap_weights()
        attach_logps("ref_logps", self.policy, [batch, *ahead], self.config)
        self.swap_weights()

    def swap_weights(self) -> None:
        """Exchange the weights of the policy and of the reference."""
        for part, weight in zip(self.parts, self.weights):
            present = part.clone()
            part.copy_(weight)
            weight.copy_(present)

def attach_logps(name: Literal["ref_logps", "old_logps"], policy: Module, batches: list[Batch],
                 config: Config) -> None:
    """Attach the log-probs of the current policy to the sequences of these batches."""
    tokens = sum(len(one.prompt + one.completion) for batch in batches for one in batch.sequences)
    for batch in tqdm(batches, f"scoring {tokens:,} tokens", leave=False, delay=1, disable=RANK > 0,
                      mininterval=0.1 if sys.stderr.isatty() else 10):
        active = [sequence for sequence in batch.sequences if not is_idle(sequence, config)]
        for sequences in (active, batch.mismatched):
            for sequence, logps in zip(sequences, sequence_logps(policy, sequences, config)):
                setattr(sequence, name, logps)

# ---------- Log-probs and microbatches ----------------------------------------------------------------------

@torch.no_grad()
def sequence_logps(policy: Module, sequences: list[Sequence], config: Config) -> list[Tensor]:
    """log π_θ(y_t | x, y_<t) of each completion, (len(completion),), on the CPU of every rank."""
    parts = {id(sequence): torch.zeros(len(sequence.completion), device=policy.device)
             for sequence in sequences}
    for x in microbatches(policy, sequences, config):
        with policy.autocast():
            logps = log_probs(policy, x.packed, config.logits_temperature)
        if x.counts:
            for sequence, values in zip(itertools.chain(*x.packed), logps):
                parts[id(sequence)] = values[: len(sequence.completion)]
    if not parts:
        return []
    flat = torch.cat(list(parts.values()))
    if WORLD_SIZE > 1:
        dist.all_reduce(flat)
    return [part.clone() for part in flat.cpu().split([*map(len, parts.values())])]

def microbatches(policy: Module, sequences: list[Sequence], config: Config) -> list[Microbatch]:
    """This rank's share of the sequences in microbatches of at most --microbatch-tokens. With FSDP, all ranks
    need equally many: a rank with fewer repeats one of them, which does not count."""
    if not sequences:
        return []
    cuts = cut(policy, sequences, config)
    mine = cuts[RANK]
    count = len(mine)
    if config.shard:
        mine = mine + [cuts[0][-1]] * (max(map(len, cuts)) - count)
    made = [make_microbatch(packed, policy.device) for packed in mine]
    for x in made[count:]:
        x.counts = False
    return made

def make_microbatch(packed: list[Packed], device: torch.device) -> Microbatch:
    """The record of a microbatch before the forward pass. Only here are completions padded."""
    sequences = list(itertools.chain(*packed))
    lengths = torch.tensor([len(sequence.completion) for sequence in sequences])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).to(device, non_blocking=True)
    columns = {}
    unknown_values = dict(ref_logps=math.nan, old_logps=math.nan, sampler_logps=math.nan, verdicts=0)
    for name, unknown in unknown_values.items():
        parts = [getattr(sequence, name) for sequence in sequences]
        parts = [torch.full((n,), unknown) if part is None else part for part, n in zip(parts, lengths)]
        columns[name] = pad_sequence(parts, batch_first=True).to(device)
    for name in ("advantage", "kto_weight"):
        columns[f"{name}s"] = torch.tensor([getattr(sequence, name) for sequence in sequences], device=device)
    return Microbatch(packed=packed, mask=mask, is_chosen=columns["advantages"] > 0, **columns)

def cut(policy: Module, sequences: list[Sequence], config: Config) -> list[list[list[Packed]]]:
    """For each rank a list of microbatches. All ranks compute the same result. From small to large:

        sequence    a prompt with one completion
        row         neighbouring sequences with the same prompt, which is then computed once
        block       what stays together: one row, or the two halves of a pair in one row or in two
        microbatch  a list of rows, which go through the policy together; blocks of similar width

    In a row each token also pays for the masked attention to its neighbours: at most 9/8 of that of separate
    rows while the row is no longer than three prompts, and little up to 256 tokens."""
    width = lambda row: len(row[0].prompt) + sum(len(sequence.completion) for sequence in row)
    longest = lambda row: min(config.microbatch_tokens, max(3 * len(row[0].prompt), 256))
    is_row = lambda row: (
        policy.shares_prompts and row[0].prompt == row[-1].prompt and width(row) <= longest(row))
    blocks = []
    if LOSSES[config.loss].unit == "pair" and not config.positive_only:
        for pair in zip(sequences[0::2], sequences[1::2]):
            blocks.append([[*pair]] if is_row(pair) else [[sequence] for sequence in pair])
    else:
        for sequence in sequences:
            if blocks and is_row([*blocks[-1][0], sequence]):
                blocks[-1][0].append(sequence)
            else:
                blocks.append([[sequence]])
    blocks.sort(key=lambda block: sum(map(width, block)), reverse=True)
    cuts = []
    for i in range(WORLD_SIZE):  # in turn, so that ranks have similar work
        mine = blocks[i::WORLD_SIZE]
        widths = [max(map(width, block)) for block in mine]
        packed = pack(widths, config.microbatch_tokens, heights=[len(block) for block in mine])
        cuts.append([[row for place in places for row in mine[place]] for places in packed])
    return cuts

def pack(widths: list[int], tokens: float, heights: list[int] | None = None) -> list[list[int]]:
    """Group items of similar width into packs of at most `tokens` tokens, padding included, or of one item.
    Item i has heights[i] rows (default: 1). Returns lists of indices, the widest items first."""
    packed = []
    height = widest = 0  # of the current pack, whose first item is the widest
    for i in sorted(range(len(widths)), key=lambda i: widths[i], reverse=True):
        rows = heights[i] if heights else 1
        if not packed or (height + rows) * widest > tokens:
            packed.append([])
            height = 0
            widest = widths[i]
        packed[-1].append(i)
        height += rows
    return packed

def log_probs(model: Module, packed: list[Packed], temperature: float = 1.0) -> Tensor:
    """log π(y_t | x, y_<t) of every completion token, as an (N, T) tensor with one sequence per row, aligned
    to the left and followed by zeros. Works with any causal language model of transformers whose logits are
    hidden states times output embeddings. The caller chooses the precision with autocast.

    Rows are padded on the right, so no completion token attends to padding. Sequences a and b in one row
    share their prompt p; only its last token is repeated before each completion:

        ids        p1 p2 p3   p4 a1 a2   p4 b1
        labels      -  -  -   a1 a2 a3   b1 b2
        positions   0  1  2    3  4  5    3  4
        segments    0  0  0    1  1  1    2  2    attention is causal, within segment 0 and its own
    """
    table = []
    for sequences in packed:
        ids, labels, positions, segments = [], [], [], []
        for segment, sequence in enumerate(sequences, 1):
            last = len(sequence.prompt) - 1
            start = 0 if segment == 1 else last
            tokens = sequence.prompt + sequence.completion
            ids += tokens[start:-1]
            labels += [-100] * (last - start) + sequence.completion
            positions += range(start, len(tokens) - 1)
            segments += [0] * (last - start) + [segment] * len(sequence.completion)
        table.append((ids, labels, positions, segments))

    ids, labels, positions, segments = (
        pad_sequence(list(map(torch.tensor, rows)), True, padding)
        for rows, padding in zip(zip(*table), (0, -100, 0, 0)))
    move = functools.partial(Tensor.to, device=model.device, non_blocking=True)
    layout = {}
    if any(len(sequences) > 1 for sequences in packed):
        segments = move(segments)
        attends = segments[:, None] == segments[:, :, None]  # (rows, query, key)
        attends |= segments[:, None] == 0
        layout["attention_mask"] = attends.tril()[:, None]
        layout["position_ids"] = move(positions)
    compute = getattr(model, "completion_logps", functools.partial(completion_logps, model))
    logps = compute(move(ids), labels, temperature, **layout)  # (rows, width), at the labels
    # Labels stay on the CPU, so that looking for their places does not synchronize with the GPU.
    places = (labels != -100).flatten().nonzero()[:, 0]
    values = logps.flatten().index_select(0, move(places))
    lengths = [len(sequence.completion) for sequences in packed for sequence in sequences]
    return pad_sequence(values.split(lengths), batch_first=True)

def completion_logps(model: Module, ids: Tensor, labels: Tensor, temperature: float = 1.0,
                     **layout: Tensor) -> Tensor:
    """Log-probs of `labels` (N, T) from token ids (N, T), by the model's body and its output head: (N, T).

    layout: position_ids (N, T) and attention_mask (N, 1, T, T), if rows hold more than one sequence."""
    hidden = model.base_model(input_ids=ids, use_cache=False, **layout).last_hidden_state
    text = model.config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    # Granite divides its logits by one number, Cohere multiplies them by another.
    divisor = getattr(text, "logits_scaling", None) or 1.0
    factor = getattr(text, "logit_scale", None) or 1.0
    temperature = temperature * (divisor / factor)
    weight = model.get_output_embeddings().weight
    return token_logps(hidden, weight, labels, softcap, temperature=temperature)

def token_logps(hidden: Tensor, lm_head_weight: Tensor, labels: Tensor, softcap: float | None = None,
                chunk: int | None = None, temperature: float = 1.0) -> Tensor:
    """(N, T) log-probabilities of `labels` in nats, from the hidden states that predict them, and 0
    elsewhere.

    The output head is applied only where there is a label, to at most `chunk` positions at a time, so memory
    grows with chunk x vocabulary and not with the batch; the backward pass can run once. Logits are products
    in the dtype of the weight, with autocast in bf16; the softmax is in float32 (in float64 for float64
    input). The gradient of the weight is summed over chunks in the weight's dtype. To use it elsewhere, copy
    `TokenLogps` as well.

    Args:
        hidden: (N, T, D) final hidden states; hidden[:, t] predicts labels[:, t].
        lm_head_weight: (V, D) output embeddings, tied or not; heads with a bias (GPT-J, Phi-2) do not work.
        labels: (N, T) token ids; -100 is ignored.
        softcap: replaces logits by softcap * tanh(logits / softcap), as in Gemma 2.
        chunk: None: as many positions as give 128 MiB of float32 logits, but at least 512.
        temperature: divides the logits afterwards, as in sampling.
    """
    places = (labels != -100).flatten().nonzero()[:, 0]
    labels = labels.flatten()[places].to(hidden.device, non_blocking=True)
    places = places.to(hidden.device, non_blocking=True)
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        lm_head_weight = lm_head_weight.to(torch.get_autocast_dtype(device_type))
    picked = hidden.flatten(0, 1).index_select(0, places)
    with torch.autocast(device_type, enabled=False):
        count = len(labels) // (chunk or max(512, 2**25 // len(lm_head_weight))) + 1
        logps = TokenLogps.apply(picked, lm_head_weight, labels, softcap, temperature, count)
    width = hidden.shape[1]
    return logps.new_zeros(hidden.shape[:2]).index_put((places // width, places % width), logps)

class TokenLogps(torch.autograd.Function):
    """log softmax(softcap(h Wᵀ) / T)[label] of M tokens, in `count` chunks. The logits of the first chunk are
    kept for the backward pass, which can run once and computes the others again, in the same memory.

    With z = softcap(h Wᵀ) / T, m = max z and s = Σ exp(z - m), the log-prob is z[label] - m - log s, and its
    gradient by z is onehot(label) - exp(z - m) / s. `out` holds D = exp(z - m) - s onehot(label), times the
    slope of the softcap, which is -s T times the gradient by h Wᵀ. So with g, the gradient of the log-probs,
    dh = f D W and dW = Dᵀ (f h), where f = -g / (s T)."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, softcap, temperature, count):
        chunks = [*zip(hidden.chunk(count), labels[:, None].chunk(count))]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        out = torch.empty(len(chunks[0][0]), len(weight), dtype=dtype, device=hidden.device)
        logps = []
        for rows, label in reversed(chunks):
            scale, of_rows = TokenLogps.of_chunk(out, rows, weight, label, softcap, temperature)
            logps.insert(0, of_rows[:, 0])
        ctx.save_for_backward(hidden, weight, labels)
        ctx.settings = softcap, temperature
        ctx.kept = out, scale
        ctx.count = count
        return torch.cat(logps)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, labels = ctx.saved_tensors
        out, scale = ctx.kept
        ctx.kept = None  # the graph may live longer than this call
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        parts = hidden, labels[:, None], grad[:, None], d_hidden
        for rows, label, d_logps, d_rows in zip(*(part.chunk(ctx.count) for part in parts)):
            if scale is None:
                scale, _ = TokenLogps.of_chunk(out, rows, weight, label, *ctx.settings)
            d_logits = out[: len(rows)].to(weight.dtype)
            factor = -d_logps / scale  # applied to the smaller factor of each product
            d_rows.copy_((d_logits @ weight) * factor)
            if d_weight is not None:
                d_weight.addmm_(d_logits.T, (rows * factor).to(weight.dtype))
            scale = None
        return d_hidden, d_weight, None, None, None, None

    @staticmethod
    def of_chunk(out, hidden, weight, labels, softcap, temperature):
        """For n tokens: write -scale * d log-prob / d logits (n, V) to the first rows of `out`. Returns the
        scale (n, 1) and the log-probs (n, 1)."""
        out = out[: len(hidden)]
        hidden = hidden.to(weight.dtype)
        if out.dtype == weight.dtype:
            torch.mm(hidden, weight.T, out=out)
        else:
            out.copy_(hidden @ weight.T)
        if softcap is not None:
            slope = 1 - out.div_(softcap).tanh_() ** 2
            out *= softcap
        if temperature != 1:
            out /= temperature
        label_logits = out.gather(1, labels)
        largest = out.amax(1, keepdim=True)
        scale = out.sub_(largest).exp_().sum(1, keepdim=True)
        out.scatter_add_(1, labels, -scale)  # softmax - onehot(label), times the scale
        logps = label_logits - largest - scale.log()
        if softcap is not None:
            out *= slope
        return scale * temperature, logps

# ---------- Ranks -------------------------------------------------------------------------------------------
# torchrun starts one process per GPU; without it there is one process. Every rank knows every whole batch
# (token ids are small) and works on its share; ranks exchange sums, and rollouts with their rewards.

RANK, WORLD_SIZE = 0, 1  # set by `join_ranks`
RANKS_SECONDS = 10  # after which a rank says that it waits for others

def join_ranks() -> torch.device:
    """Join the other ranks if torchrun started this process, and return the device to use."""
    global RANK, WORLD_SIZE
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys() and not dist.is_initialized():
        advice = "start all ranks with torchrun, or unset RANK and WORLD_SIZE"
        with explained("the ranks do not find each other", advice):
            missing = int(os.environ["WORLD_SIZE"]) - 1
            words = f"waiting for {missing} more rank{'s' if missing > 1 else ''}; {advice}"
            alarm = threading.Timer(RANKS_SECONDS, warn, [words])
            alarm.daemon = True
            alarm.start()
            # Each restart needs its own prefix: torchrun's store still has the addresses of the old processes.
            store, this_rank, ranks = next(dist.rendezvous("env://"))
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            patience = datetime.timedelta(hours=4)  # one may write a large model, or restart an engine
            store.set_timeout(patience)
            dist.init_process_group(backend, store=store, rank=this_rank, world_size=ranks, timeout=patience)
            alarm.cancel()
    if dist.is_initialized():  # here, or by a program that calls `train`
        RANK, WORLD_SIZE = dist.get_rank(), dist.get_world_size()
    return device

def in_order(values: dict[int, Any]) -> list:
    """The values of all ranks, in the order of their keys."""
    everything = ChainMap(*gather_from_ranks(values))
    return [everything[key] for key in sorted(everything)]

def gather_from_ranks(value: Any) -> list:
    """The objects of all ranks, on every rank."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values

def from_first_rank(make: Callable[[], Any]) -> Any:
    """The result of make() on rank 0, or the UserError that it raises, on every rank."""
    try:
        made = make() if RANK == 0 else None
    except UserError as error:
        made = error
    made = gather_from_ranks(made)[0]
    if isinstance(made, UserError):
        raise made
    return made

@contextlib.contextmanager
def ranks_in_turn() -> Iterator[None]:
    """Run the ranks of a machine one after the other, so that its memory holds one copy of the model."""
    my_turn = int(os.environ.get("LOCAL_RANK", 0))
    for turn in range(int(os.environ.get("LOCAL_WORLD_SIZE", my_turn + 1))):
        if turn == my_turn:
            yield
        if dist.is_initialized():
            dist.barrier()

def seed_for(*parts: int | str) -> int:
    """A seed derived from --seed, the step and a purpose. All randomness is seeded this way."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])

@torch.no_grad()
def copy_full(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor
    if isinstance(target, DTensor):
        value = distribute_tensor(
            value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)

# ---------- Checkpoints and the final folder ----------------------------------------------------------------
# A folder is written under another name and then renamed; a checkpoint has a hash of every file. No pickles.

def save_checkpoint(path: Path, optimizer: torch.optim.Optimizer, reference: Reference, step: int) -> None:
    """Write everything that the next step depends on, and remove old checkpoints beyond --keep. Rank 0 writes
    whole tensors, which any number of ranks can read. If writing fails, print a warning and go on."""
    from safetensors.torch import save_file
    policy, batches, config = reference.policy, reference.batches, reference.config
    tensors = gather_whole(weights_and_moments(policy, optimizer))
    if reference.weights is not None:
        reference.swap_weights()
        tensors |= gather_whole({f"reference:{name}": p for name, p in trained(policy).items()})
        reference.swap_weights()
    state = dict(step=step, settings=dataclasses.asdict(config) | dict(steps=batches.steps),
                 data=batches.fingerprint, made_until=batches.made_until, reference_until=reference.until,
                 has_reference=reference.weights is not None, batches=batches.pending)
    if RANK != 0:
        return
    # Offline plain runs write the log-probs of all remaining data. Numbers would take four times as long.
    text = json.dumps(state, default=lambda item: item.numpy().tobytes().hex() if isinstance(item, Tensor)
                      else vars(item))
    try:
        with new_folder(path) as folder:
            save_file(tensors, folder / "tensors.safetensors")
            (folder / "state.json").write_text(text)
            written = dict(format=FORMAT) | hashes([*folder.iterdir()])
            (folder / "files.json").write_text(json.dumps(written))
    except Exception as error:  # safetensors has an exception of its own for a full disk
        warn(f"could not write {path}: {error}; earlier checkpoints are kept")
        return
    for old in checkpoints(path.parents[1])[: -config.keep]:
        shutil.rmtree(old)

def checkpoints(out: Path) -> list[Path]:
    """The checkpoints of a run, oldest first. Those that somebody has copied to another name are left alone."""
    return sorted((out / "checkpoint").glob("step-" + 8 * "[0-9]"))

def weights_and_moments(policy: Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors that an optimizer step changes, by kind (policy, step, exp_avg, exp_avg_sq) and
    parameter."""
    tensors = {}
    for name, p in trained(policy).items():
        tensors[f"policy:{name}"] = p
        for kind, moment in optimizer.state[p].items():
            tensors[f"{kind}:{name}"] = moment
    return tensors

def gather_whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies, gathered from all ranks, in the host memory of rank 0; the other ranks get none."""
    from torch.distributed.tensor import DTensor
    copies = {}
    for name, tensor in tensors.items():
        value = tensor.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()  # all ranks must call it
        if RANK == 0:
            copies[name] = value.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copies

@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `path` at the end, so that `path` is complete or does not
    exist."""
    folder = path.with_name(f".{path.name}")
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
    folder.mkdir(parents=True)
    try:
        yield folder
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors makes them readable by the owner only
        folder.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

def hashes(paths: list[Path]) -> dict[str, str]:
    """SHA-256 of each regular file, by its path from the folder that they have in common."""
    digests = {}
    folder = os.path.commonpath([path.parent for path in paths]) if paths else ""
    for path in sorted(paths):
        if path.is_file():
            with path.open("rb") as file:
                digests[os.path.relpath(path, folder)] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests

def with_imports(path: str) -> list[Path]:
    """A Python file and the modules beside it that it imports."""
    finder = modulefinder.ModuleFinder([os.path.dirname(os.path.abspath(path))])
    with explained(path, "fix the file"):
        finder.run_script(os.path.abspath(path))
    return [Path(module.__file__) for module in finder.modules.values() if module.__file__]

def find_damage(folder: Path) -> str:
    """What is wrong with a checkpoint, or "" if nothing is. Raises UserError if it cannot be read: it may be
    intact."""
    try:
        written = json.loads((folder / "files.json").read_text())
        present = hashes([*folder.iterdir()])
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        return f"not a complete checkpoint ({error})"
    except OSError as error:
        raise UserError(f"--resume: cannot read {folder} ({error}); make it readable") from error
    if written.pop("format", None) != FORMAT:
        return "written by another version of humanline.py; resume with that version"
    damaged = [name for name in written if written[name] != present.get(name)]
    return f"damaged: {', '.join(damaged)}" if damaged else ""

def find_checkpoint(config: Config, out: Path) -> Path | None:
    """The checkpoint to resume from: the newest undamaged one of --out, if there is one, or a path."""
    if config.resume is None:
        return None
    paths = [Path(config.resume)]
    if config.resume == "latest":
        paths = checkpoints(out)[::-1]
    for path in paths:
        damage = find_damage(path)
        if not damage:
            return path
        require(config.resume == "latest", f"{path}: {damage}")
        warn(f"{path}: {damage}; trying the previous one")
    file = out / "config.toml"
    if file.exists():  # the run starts afresh
        with explained(f"--resume {config.resume}: {file}", "choose another folder"):
            before = tomllib.loads(file.read_text(encoding="utf-8"))
        now = tomllib.loads(to_toml(config))
        for name in sorted((before | now).keys() - FREE_ON_RESUME):
            require(before.get(name) == now.get(name),
                    f"--resume {config.resume}: the run in {out} has another {flag_of(name)}; add --config "
                    f"{file}, or choose another folder")
    return None

# Settings that may change on resume: what is written, what affects the result by rounding alone, and what can
# help a run to go on.
FREE_ON_RESUME = set("out save_every keep resume config eval_data eval_every eval_prompts eval_samples "
                     "microbatch_tokens compile shard checkpoint_activations track "
                     "sample_tokens reward_seconds".split())

def load_checkpoint(path: Path, optimizer: torch.optim.Optimizer, reference: Reference) -> int:
    """Restore everything and return the step of the checkpoint. Raises UserError if settings differ."""
    from safetensors import safe_open
    policy, batches, config = reference.policy, reference.batches, reference.config
    tensors = safe_open(path / "tensors.safetensors", framework="pt")  # reads tensors one by one

    def from_json(item: dict) -> Any:
        if "completion" in item:
            logps = {name: torch.frombuffer(bytearray.fromhex(item[name]), dtype=torch.float32)
                     for name in item if "logps" in name and item[name]}
            return Sequence(**item | logps)
        return Batch(**item) if "sequences" in item else item

    state = json.loads((path / "state.json").read_text(), object_hook=from_json)
    present = dataclasses.asdict(config) | dict(steps=batches.steps)
    for name, value in json.loads(json.dumps(present)).items():
        before = state["settings"].get(name, value)
        require(name in FREE_ON_RESUME or value == before,
                f"--resume {path}: the run has {flag_of(name)} {before}, not {value}; resume it with that, or "
                "with its own config.toml from the folder where it was started")
    changed = [name for name in sorted(state["data"].keys() | batches.fingerprint)
               if state["data"].get(name) != batches.fingerprint.get(name)]
    require(not changed, f"--resume {path}: {', '.join(changed)} changed since; restore what it was")

    if state["has_reference"]:  # through the policy, which knows how it is sharded; its own weights come next
        for name, p in trained(policy).items():
            copy_full(p, tensors.get_tensor(f"reference:{name}"))
        reference.weights = [part.to("cpu", copy=True) for part in reference.parts]
    for p in trained(policy).values():
        optimizer.state[p] = dict(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p),
                                  exp_avg_sq=torch.zeros_like(p))
    for name, target in weights_and_moments(policy, optimizer).items():
        copy_full(target, tensors.get_tensor(name))
    batches.made_until = state["made_until"]
    batches.pending = state["batches"]
    reference.until = state["reference_until"]
    return state["step"]

def final_weights(policy: Module, config: Config) -> dict[str, Tensor]:
    """The tensors of the final folder by name: weights and buffers, a tied head once; or the adapters."""
    if config.lora:
        return gather_whole(trained(policy))
    return gather_whole({name: value for name, value in policy.state_dict().items()
                         if name not in policy.all_tied_weights_keys})

def save_final(path: Path, sampler: Sampler) -> None:
    """Write an ordinary Hugging Face folder, or with --lora a peft folder, and the settings of the run."""
    from transformers import GenerationConfig
    policy, config = sampler.policy, sampler.config
    weights = final_weights(policy, config)
    if RANK != 0:
        return
    try:
        with new_folder(path) as folder:
            policy.generation_config.eos_token_id = sampler.stop_ids  # where it learned to stop
            try:
                policy.save_pretrained(folder, state_dict=weights)
            except ValueError:  # generation settings that contradict each other, such as Llama 2's
                policy.generation_config = GenerationConfig(eos_token_id=sampler.stop_ids)
                policy.save_pretrained(folder, state_dict=weights)
            sampler.tokenizer.save_pretrained(folder)
            (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    except Exception as error:  # safetensors has an exception of its own for a full disk
        text = f"could not write {path} ({error}); free some space, then pass --resume latest"
        raise OSError(text) from error

# ---------- The command line --------------------------------------------------------------------------------

class UserError(Exception):
    """An error that the user can fix; printed as one line, with exit status 2."""

def require(condition: Any, message: str) -> None:
    if not condition:
        raise UserError(message)

def warn(message: str) -> None:
    if RANK == 0:
        tqdm.write(f"humanline.py: warning: {message}", file=sys.stderr)

def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # KeyboardInterrupt, as before the imports
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv)
        if config.resume == "latest" and any(Path(config.out, "final").glob("*")):
            return leave(0, f"{config.out} is already finished; the model is in {config.out}/final")
        run = train(config)
        if RANK == 0:
            print(*changes(run), last_line(run), sep="\n")
        if run.stopped_at and run.signals:
            return leave(128 + max(run.signals))  # the shell's convention for signals
        return leave(0)
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)  # usually rank 0 reports the same error and ends all ranks
        return leave(2, f"error: {error}")
    except (FloatingPointError, MemoryError, OSError) as error:
        return leave(1, f"stopped: {str(error) or 'out of memory'}")
    except RuntimeError as error:
        if not re.search("out of memory|allocate memory", str(error)):  # as CUDA and the CPU say it
            raise
        return leave(1, f"stopped: {str(error).splitlines()[0]:.200}; try --microbatch-tokens "
                     f"{config.microbatch_tokens // 2}, a lower --sample-tokens or --max-length, "
                     "--checkpoint-activations, --lora 16 or --shard")
    except KeyboardInterrupt:  # the second Ctrl-C, or one before the run has begun
        return leave(130, "stopped at once; earlier checkpoints are kept")

def leave(status: int, message: str = "") -> int:
    """Print a message, leave the process group, and return the exit status."""
    if message:
        print(f"humanline.py: {message}", file=sys.stderr)
    if status and WORLD_SIZE > 1 and torch.cuda.is_initialized():
        sys.stdout.flush()
        os._exit(status)  # NCCL would wait for the other ranks; torchrun ends them
    if dist.is_initialized():
        dist.destroy_process_group()
    return status

def parse_config(argv: list[str]) -> Config:
    """Flags override --config or the settings of the demo, which override the defaults."""
    for word in argv:
        require(word == word.encode(errors="ignore").decode(), f"{word!a} is not UTF-8; rename the file")
    # --flag=VALUE is --flag VALUE
    words = [part for word in argv for part in word.split("=", word.startswith("--"))]
    typed = {word.replace("_", "-"): value for word, value in itertools.pairwise([*words, ""])}
    require(words.count("--data") < 2, "--data appears twice; write --data FIRST SECOND")
    loss = typed.get("--loss", "grpo")
    settings = []
    if "--config" in typed:
        settings = read_config(typed["--config"], typed)
    elif loss in LOSSES and not {"--model", "--data", "--help", "-h"} & typed.keys():
        settings = demo_settings(loss, typed)
    # tyro would search the source for help texts, which `in_sections` has done.
    options = tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff
    sections = parse_flags(settings + argv, in_sections(), config=options, description=Config.__doc__)
    config = Config(**ChainMap(*map(vars, vars(sections).values())))
    reads_samples = config.sample_every or config.eval_data
    for flags, needed, is_read in (
            ("--sync-k --perception", "--humanline and a loss with a reference, which DPO with --positive-only "
             "lacks", config.humanline and config.ratio_to),
            ("--log-eps-p --log-eps-r", "--humanline and --perception clip", config.perception == "clip"),
            ("--beta", "a reference, which DPO with --positive-only lacks",
             not config.positive_only or LOSSES[config.loss].unit != "pair"),
            ("--lora-alpha", "--lora", config.lora),
            ("--sampler --temperature --top-p", "--sample-every or --eval-data", reads_samples),
            ("--eval-samples --eval-prompts", "--eval-data", config.eval_data),
            ("--reward-args", "--reward FILE.py:function", ":" in config.reward)):
        for flag in flags.split():
            require(flag not in typed or is_read, f"{flag} needs {needed}")
    return config

def does_read(loss: str, setting: str) -> bool:
    """True if a setting has an effect with this loss."""
    if setting in ("sync_k", "perception"):
        return LOSSES[loss].needs_reference
    is_of_some = any(setting in entry.settings.split() for entry in LOSSES.values())
    return not is_of_some or setting in LOSSES[loss].settings.split()

def demo_settings(loss: str, typed: dict[str, str]) -> list[str]:
    """The settings of the demo for a loss, as flags: those of GRPO, DPO or KTO, whichever trains on the same
    unit, as far as the loss reads them."""
    like = dict(group="grpo", pair="dpo", example="kto")[LOSSES[loss].unit]
    path = CONFIGS / "demo" / f"{like}.toml"
    require(path.exists(),
            f"pass --model and --data; the demo needs the folder {path.parent}, which is missing")
    unread = {field.name for field in dataclasses.fields(Config) if not does_read(loss, field.name)}
    return read_config(str(path), typed, without={"loss", *unread})

@functools.cache
def in_sections() -> type:
    """Config for tyro, which groups flags by nested dataclasses: one for each `# -- NAME` in Config. Help texts
    are passed as metadata, because tyro would break them where the source does."""
    sections = {}
    pattern = r'^    (?:# -- (\w+)|(\w+): .*(?:  # (.*)|\n    r?"""([^"]*)"""))'
    for section, name, beside, below in re.findall(pattern, inspect.getsource(Config), re.M):
        if section:
            members = sections[section] = []
        else:
            known = Config.__dataclass_fields__[name]
            known.metadata = {"help": " ".join((beside + below).split())}
            members.append((name, known.type, known))
    return dataclasses.make_dataclass("Settings", [
        (name, dataclasses.make_dataclass(name, members)) for name, members in sections.items()])

def parse_flags(args: list[str], kind: Any, **options: Any) -> Any:
    """Parse `args` with tyro, and report its errors in one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=args, **options)
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
    text = complaint.getvalue().partition("\n")[2]  # below the title of tyro's box
    text = re.split("Got errors|Perhaps you|Argument help|For full", text)[0]
    words = re.sub("[│─]|-{9,}", " ", text).split()
    raise UserError(f"{' '.join(words)}; see --help")

def read_config(path: str, typed: dict[str, str], without: Iterable[str] = ()) -> list[str]:
    """The settings of a TOML file as flags, except those in `without`. A table that is named after a flag, such
    as [no-humanline] or [sample-every], replaces settings above it if that flag is typed, and not with 0."""
    with explained(f"--config {path}", "pass a valid TOML file of settings"):
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    settings = {}
    for key, value in table.items():
        if isinstance(value, dict):
            require(key.replace("-", "_").removeprefix("no_") in Config.__dataclass_fields__,
                    f"--config {path}: name the table [{key}] after a flag, such as [no-humanline]")
            settings |= value if typed.get(flag_of(key), "0") != "0" else {}
        else:
            settings[key] = value
    args = []
    for key, value in settings.items():
        name = key.replace("-", "_")
        if name in without:
            continue
        if name in ("model", "eval_data", "reward", "sampler"):
            value = find_file(str(value))
        if name == "data":
            args += ["--data", *map(find_file, [value] if isinstance(value, str) else value)]
        elif isinstance(value, bool):
            args.append(flag_of(name if value else f"no_{name}"))
        else:
            args.append(f"{flag_of(name)}={value}")
    return args

def find_file(spec: str) -> str:
    """Resolve a path in settings: relative to the working directory, or else to this file."""
    path = spec.partition(":")[0]
    home = Path(__file__).parent
    if Path(path).exists() or not (home / path).exists():
        return spec
    return str(home / spec)

def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")

def check_config(config: Config) -> None:
    """Raises UserError for the first invalid value, or one that differs from its default though the loss does
    not read it."""
    for name in config.given:
        require(does_read(config.loss, name),
                f"--loss {config.loss} does not use {flag_of(name)}; omit it")
    for (least, most), names in RANGES.items():
        for name in names.split():
            value = getattr(config, name)
            require(value is None or least <= value <= most,
                    f"{flag_of(name)} is {value}; it must be from {least:g} to {most:g}")
    require(re.fullmatch(r"exact|math|.+\.py:\w+", config.reward),
            f"--reward {config.reward}: pass exact, math or FILE.py:function, such as the "
            "reward model configs/model_reward.py:score")
    require(config.prompt_template is None or "{prompt}" in config.prompt_template,
            "--prompt-template must contain {prompt}")
    require(not config.sample_every or config.group_size > 1,
            "--group-size must be at least 2 to compare completions")
    require(not config.mask_truncated or config.perception != "sample",
            "--mask-truncated needs --perception clip or none: `sample` compares all tokens of a batch")
    require(re.fullmatch(r"generate|.+\.py:\w+", config.sampler),
            f"--sampler {config.sampler}: pass generate or FILE.py:function, like configs/external.py:vllm")
    require(config.resume != "latest" or config.out,
            "--resume latest needs the folder of the run; pass --out")

FORMAT = 6  # of run folders; increased when older ones can no longer be resumed
TOML_HEAD = f"# python humanline.py --config THIS_FILE repeats the run. Format {FORMAT}.\n"

def to_toml(config: Config) -> str:
    """All settings that differ from their defaults, as TOML for --config, without the folder of the run."""
    lines = [TOML_HEAD]
    for name, value in config.given.items():
        if name not in ("out", "config", "resume"):
            text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
            lines.append(f"{name} = {text}\n")
    return "".join(lines)

def in_words(config: Config) -> str:
    """The loss and its form, such as "GRPO, humanline"."""
    form = "humanline" if config.sync_k or config.perception != "none" else "plain"
    if config.positive_only:
        form += " on better completions alone"
    return f"{config.loss.upper()}, {form}"

def describe(run: Run, first: int) -> None:
    """Print a summary of the run, which starts at step `first`."""
    config = run.config
    print(f"model       {config.model}, {run.policy.num_parameters() / 1e6:.2f} M parameters on "
          f"{run.policy.device}\n"
          f"data        {' '.join(config.data)}, {len(run.batches.pool):,} "
          f"{'prompt' if config.sample_every else LOSSES[config.loss].unit}s; "
          f"sample_every {config.sample_every}, sampler {config.sampler}\n"
          f"objective   {in_words(config)}; sync_k {config.sync_k}, perception {config.perception}\n"
          f"steps       {first} to {run.batches.steps}, batches of {config.batch_size}, lr {config.lr:g}",
          flush=True)
    # Half a bf16 step of a typical weight, 0.02, is 4e-5.
    if config.dtype == "bfloat16" and not config.lora and config.lr < 5e-5:
        warn(f"--dtype bfloat16: at --lr {config.lr:g} most updates are too small for bf16 weights and are "
             "lost; use --dtype mixed or --lora")

def changes(run: Run) -> Iterator[str]:
    """Three held-out prompts, each with a sample and its reward before and after training, as lines of text.
    The first prompt is one whose completion changed."""
    lines = list(read_lines(run.out / "eval_rollouts.jsonl"))[::-1]  # the first sample of a prompt is kept
    old, new = ({str(line["prompt"]): line for line in lines if line["step"] == step}
                for step in (0, run.batches.steps))
    pairs = [(old[prompt], new[prompt]) for prompt in reversed(old) if prompt in new]
    first = next((pair for pair in pairs if pair[0]["completion"] != pair[1]["completion"]), None)
    for before, after in sorted(pairs, key=lambda pair: pair is not first)[:3]:
        yield f"prompt  {before['prompt'][-1]['content']!r:.100}"
        yield f"before  {before['completion']!r:.85}  reward {before['reward']:.3g}"
        yield f"after   {after['completion']!r:.85}  reward {after['reward']:.3g}"

def last_line(run: Run) -> str:
    """One sentence about the result."""
    if run.stopped_at:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", 1)
        start = ["torchrun", "--nproc_per_node", ranks] if WORLD_SIZE > 1 else ["python"]
        words = [*start, sys.argv[0], "--config", run.out / "config.toml", "--out", run.out,
                 "--resume", "latest"]
        return (f"stopped after step {run.stopped_at} of {run.batches.steps}; continue with: "
                f"{shlex.join(map(str, words))}")
    gained = ""
    if "accuracy_before" in run.latest and "accuracy" in run.latest:
        gained = ("mean reward on --eval-data went from {accuracy_before:.3f} to {accuracy:.3f}, "
                  "greedy from {greedy_before:.3f} to {greedy:.3f}: ").format(**run.latest)
    return (f"{gained}{in_words(run.config)}, {run.batches.steps} steps in "
            f"{time.perf_counter() - run.started:.0f} s; the model is in {run.out / 'final'}")

if __name__ == "__main__":
    sys.stdout = sys.stdout or open(os.devnull, "w")  # closed
    sys.stdout.reconfigure(errors="replace")  # print what the terminal's encoding lacks as a question mark
    sys.modules["humanline"] = sys.modules["__main__"]  # for --sampler files that import it
    sys.exit(main())
