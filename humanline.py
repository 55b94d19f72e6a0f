"""Humanline: DPO, KTO and GRPO with a reference that keeps up and a log-ratio seen the way people see it.

All of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207) in one file. On a laptop, without a GPU:

  python humanline.py                                      # builds a tiny model, aligns it, says what was gained
  python humanline.py --loss grpo --sync-k 12              # sync the reference every 12 steps
  python humanline.py --no-humanline                       # the baseline: GRPO as published
  python humanline.py --no-humanline --sample-every 1      # the same, fully online
  python humanline.py --loss dpo --data embedded:worse     # offline pairs drawn from a worse model

On a model and data of your own (rows as in the README), on one GPU and on eight, and after an interruption:

  python humanline.py --model Qwen/Qwen2.5-1.5B-Instruct --data pairs.jsonl --loss dpo --out runs/mine
  torchrun --nproc_per_node 8 humanline.py --config runs/mine/config.toml --lr 5e-7
  python humanline.py --config runs/mine/config.toml --out runs/mine --resume latest

A *humanline variant* of a loss adds two things and changes nothing else: the reference is set to the policy every k
steps (**syncing**), and the token log-ratio is clipped before the loss sees it (**perception**).

The order: configuration, perception, objectives, the loop; that is the whole method. Then what the loop calls, in that
order: the run, models, data, rollouts, rewards, the reference, log-probs, ranks, checkpoints; last the command
line and the embedded demo. Three policies have three names: the **old policy** drew the present rollouts; the
**reference** is what the log-ratio is taken to; the **sampler** is whatever produced a completion, the old policy or an
unknown one.
"""

import contextlib
import csv
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
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import unittest.mock
import warnings
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Literal

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after join_ranks its defaults would hold the ranks' group, and threads, for ever
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module
from tqdm import tqdm

# ---------- Configuration ---------------------------------------------------------------------------------------------
# Each field is a flag; the text after or below it is its help.

@dataclass
class Config:
    """Align a language model with DPO, KTO or GRPO, as published or as humanline variants."""

    loss: str = "grpo"  # The objective: grpo, dpo or kto.
    model: str = "embedded"  # A Hugging Face name or folder; embedded: a tiny one, built on first use and cached.
    data: tuple[str, ...] = ("embedded",)
    """Rows to train on: sources NAME[:[CONFIG:]SPLIT][=PASSES]. NAME: a .jsonl, .json, .csv or .parquet file, a hub
    name, or `embedded` or `embedded:worse`, samples of the tiny model or of a worse one. PASSES: how often each row
    comes per epoch (1)."""
    limit: int | None = None  # Read only this many rows of each source.
    eval_data: str | None = None  # Held-out rows, for --eval-every. Default: `embedded:test` with the embedded data.
    reward: tuple[str, ...] = ("exact",)
    """The reward of a drawn completion: the weighted sum of one or more NAME[=WEIGHT]. `exact`: 1 if it equals the
    row's `answer`; `math`: 1 if its final answer equals that, or the \\boxed{} of the row's `solution`; `model:NAME`:
    the output of a sequence classifier; `FILE.py:function`: your own function(prompts, completions, rows) -> list of
    floats, where prompts are lists of messages, rows dicts."""
    reward_seconds: float = 10.0
    """Time limit, where the reward is `math` or your own: per sample, and √n times as much for a call with n
    samples."""
    reward_failed: float = 0.0  # What a reward function counts as where it raised, hung or gave no number.
    system: str | None = None  # System message in front of prompts that have none (models with a chat template).
    prompt_template: str | None = None  # Text around each prompt: {prompt} and other columns' {names} are filled in.
    template_values: tuple[str, ...] = ()
    """What the chat template is to be told, each as NAME=VALUE: enable_thinking=false. `final/` keeps it."""
    dtype: Literal["auto", "mixed", "float32", "bfloat16"] = "auto"
    """mixed: fp32 weights, bf16 autocast; bfloat16: bf16 weights too. auto: mixed on a GPU, and on a CPU that
    multiplies in bf16 for models from 20 M parameters on; else float32."""
    attn: str | None = None  # Attention implementation, such as sdpa or flash_attention_2. Default: the model's choice.
    checkpoint_activations: bool = False  # Recompute activations in the backward pass: slower, far less memory.
    trust_remote_code: bool = False  # Allow code that comes with a model or tokenizer to run.
    lora: int = 0
    """Train LoRA adapters of this rank, such as 16; the base is frozen, in bf16 unless --dtype float32 (pip install
    peft). 0: train all weights. If --model is a peft folder, its adapters are trained further, or with 0 merged."""
    lora_alpha: int = 32  # What the adapters add is scaled by this number divided by their rank.
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of the layers that get an adapter, such as `q_proj v_proj`. all-linear: all but the output head."""
    merge: bool = False  # With --lora: final/ is an ordinary folder, with the adapters in its weights.

    # What makes it humanline: two parts, switched together or one by one.
    humanline: bool = True  # Sync every --sync-k steps, and clip. --no-humanline is the published loss.
    sync_k: int | None = None
    """Set the reference to the policy every so many steps; 0: never. Default: 1 (embedded: 8)."""
    sync_drift: float | None = None
    """Sync as soon as a step's drift (mean |log-ratio| per token, in nats) passes this; by --sync-k only if that is
    given, too."""
    sync_alpha: float = 1.0  # A soft sync moves the reference this fraction of the way. Below 1 it needs a copy.
    perception: Literal["clip", "sample", "none"] | None = None
    """How the token log-ratio is distorted before the loss sees it. Default: clip with humanline, else none."""
    log_eps_p: float = -1.5  # Lower end of the clip, in nats.
    log_eps_r: float = 1.5  # Upper end of the clip, in nats.
    gamma_p: float = 0.5  # --perception sample: B_P ~ Beta(gamma_p, beta_p) rejects tokens that became unlikely.
    gamma_r: float = 0.01  # --perception sample: B_R ~ Beta(gamma_r, beta_r) rejects tokens that became likely.
    beta_p: float = 1.0  # See --gamma-p.
    beta_r: float = 1.0  # See --gamma-r.

    # Against collapse on off-policy data: from other models, or old rollouts. Not in the paper.
    stale: Literal["taper", "keep", "drop"] | None = None
    """For worse completions (rejected, undesirable, negative advantage). taper: their gradient, and in pairs the chosen
    one's, fades as their log-prob falls below the sampler's (if unknown, the initial policy's). keep: full gradient;
    each sync lets it push them down further, without limit. drop: no gradient. Their KL (--kl-beta) keeps its own.
    Default: taper with the embedded model and humanline, else keep."""
    prior: float | None = None
    """Count this many extra rollouts in each group, with the mean reward of all groups. So a group with only correct
    answers still has a gradient that keeps them, against what other groups teach. Default: 1 with the embedded model
    and humanline, else 0."""

    on_collapse: Literal["warn", "stop", "restore"] = "warn"
    """If the preferred completions' log-prob falls so far that the run is collapsing: warn; stop, and save the current
    weights as final; or restore: stop, and save those from about when that log-prob was highest, in a resumed run
    since then."""

    # The objectives' own knobs.
    beta: float = 0.1  # DPO and KTO: how strongly the policy is held to the reference.
    desirable_weight: float | None = None
    """KTO: weight of desirable examples. Default: makes both kinds' total weights equal, in the data or rollouts."""
    undesirable_weight: float = 1.0  # KTO: weight of undesirable examples.
    epsilon: float = 0.2  # GRPO: the ratio is clipped to [1 - epsilon, 1 + epsilon].
    epsilon_high: float | None = None  # GRPO: the upper end is 1 + epsilon_high instead (DAPO takes 0.28).
    ratio: Literal["token", "sequence"] = "token"
    """GRPO: each token has its own ratio, or all tokens of a sequence their geometric mean (GSPO)."""
    scale_rewards: bool = True  # GRPO: divide a group's advantages by their standard deviation. Dr. GRPO does not.
    kl_beta: float = 0.0  # GRPO: weight of the KL to the reference; without humanline that is the initial policy.
    average: Literal["token", "sequence", "constant"] = "token"
    """GRPO: mean over all completion tokens of the batch; over each sequence's tokens first; or the sum over each
    sequence's tokens divided by --max-new-tokens (Dr. GRPO)."""

    # Where the completions come from.
    sample_every: int = 0
    """0: train on the data's own completions (offline). N: draw some every N steps for the next N steps (1: online)."""
    group_size: int = 8  # Completions drawn per prompt.
    temperature: float = 1.0  # Sampling temperature T. Log-probs of what was drawn are of softmax(logits / T), too.
    top_p: float = 1.0  # Nucleus sampling: keep the most likely tokens that together have this probability.
    max_new_tokens: int | None = None  # Longest completion drawn. Default: 8 with the embedded model, else 512.
    sample_tokens: int = 65536
    """Largest (prompt + new tokens) x sequences in one call of `generate`; lower it if sampling runs out of memory."""
    sampler: str = "generate"
    """What draws: the model's own `generate`; `vllm`; or `FILE.py:function`, to be copied from
    configs/sampler_vllm.py. These work in a process that lives as long as the run, and get the weights in a folder."""
    sampler_python: str | None = None  # The interpreter for such a sampler, say vllm/bin/python. Default: this one.
    sampler_devices: str | None = None  # Its GPUs, such as 6,7. Default: all that this process may see.
    sampler_seconds: float = 3600.0  # Its time limit, from a request for completions to the answer.
    draw_ahead: bool = False
    """With such a sampler: generate the next completions while training on these, from the weights before that
    training; so all but the first are --sample-every steps older. A checkpoint waits until they are done."""

    # The loop.
    steps: int | None = None  # Optimizer steps. Default: 256 with the embedded model, else one pass over the data.
    batch_size: int | None = None
    """Per step: prompts with their groups (GRPO), pairs (DPO) or examples (KTO), of all ranks together. Default: 32;
    KTO 64, with the embedded model 256."""
    lr: float | None = None
    """AdamW's, after warmup. Default: 1e-6, or with the embedded model 8e-4 (KTO 4e-4); with --lora ten times that
    (Schulman et al. 2025, LoRA Without Regret)."""
    schedule: Literal["constant", "cosine"] = "constant"  # After warmup: constant, or down to 0 along a cosine.
    warmup: float = 0.1  # Fraction of the steps over which the learning rate rises linearly.
    weight_decay: float = 0.0  # AdamW's decoupled weight decay.
    adam_eps: float = 1e-8  # AdamW's epsilon. The authors' scripts use 1e-5.
    max_grad_norm: float = 1.0  # The gradient is scaled down to this norm where it is longer.
    max_length: int | None = None
    """Longest prompt + completion, in tokens; longer examples are dropped; online, prompts that --max-new-tokens more
    would make longer. Default: the model's positions."""
    max_prompt_length: int | None = None  # Longest prompt, in tokens; rows with longer ones are dropped.
    microbatch_tokens: int = 16384
    """Tokens, with padding, per forward and backward; lower it if training runs out of memory. Changes no result."""
    share_prompts: bool = True
    """Compute the prompt of neighbouring completions once, where the model allows it and it pays. Changes no result."""
    ref: Literal["auto", "lookahead", "copy"] = "auto"
    """Source of reference log-probs. lookahead: at each sync the policy computes them for all batches up to the next
    sync; copy: a second model, with --lora second adapters. Both give the same numbers; auto: lookahead where it
    costs nothing."""
    compile: bool = dataclasses.field(default_factory=torch.cuda.is_available)  # torch.compile. Default: on a GPU.
    shard: bool = False
    """Several ranks: shard weights, gradients and optimizer state over them (FSDP2). While `generate` draws, each rank
    holds all weights."""
    seed: int = 0  # All that is random is a function of this and the step; what is drawn, of the number of ranks, too.

    # What is written, and when.
    out: str | None = None  # The run's folder. Default: a new one under runs/.
    save_every: int | None = None
    """Write a checkpoint every this many steps; 0: none but the final model. Default: 64, embedded model 0."""
    keep: int = 2  # Checkpoints kept.
    resume: str | None = None
    """`latest`: go on from the newest whole checkpoint in --out, or start afresh where there is none. Or a path."""
    eval_every: int | None = None  # Measure every so many steps; 0: before and after. Default: embedded 64, else 0.
    eval_prompts: int = 500  # Held-out prompts per evaluation.
    eval_samples: int = 2  # Completions drawn per held-out prompt.
    eval_greedy: bool = True  # Also reward the greedy completion of each held-out prompt.
    eval_temperature: float | None = None  # Sampling temperature for them. Default: --temperature.
    eval_top_p: float | None = None  # Nucleus sampling for them. Default: --top-p.
    rollouts: bool = True
    """Write each sampled completion into rollouts.jsonl, or eval_rollouts.jsonl if held out: some 25 bytes per
    token, and the prompt. --data reads the file back, with the tokens as they were sampled."""
    track: Literal["tensorboard", "wandb"] | None = None  # Send the metrics there, too; pip install it.
    config: str | None = None  # A .toml file of these settings; flags override it.
    plan: bool = False  # Do not train, but say how much memory that would take; the weights are not loaded.
    untyped: tyro.conf.Suppress[tuple[str, ...]] = dataclasses.field(default=(), compare=False)
    """The settings that neither a flag nor a file has set."""

# ---------- Perception ------------------------------------------------------------------------------------------------
# How the token log-ratio d_t = log π_θ(y_t | x, y_<t) - log π_ref(y_t | x, y_<t) looks to a person.
#
# Pure functions of tensors, to be pasted elsewhere. (N, T) tensors hold exact zeros at prompt and padding positions.

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

    def draw_log_beta(gamma: float, beta: float) -> Tensor:
        # torch.distributions takes no generator: a Beta is the first coordinate of this Dirichlet. Drawn on the CPU.
        shape = torch.tensor([gamma, beta], dtype=torch.float64).expand(*d.shape, 2)
        return torch._sample_dirichlet(shape, generator)[..., 0].to(d.device).log()

    log_b_p, log_b_r = draw_log_beta(gamma_p, beta_p), draw_log_beta(gamma_r, beta_r)
    # exp(d) < M_P B_P and exp(-d) < M_R B_R, in logs, so that large ratios do not overflow.
    completion_d = d[mask.bool()]
    rejected = (d < completion_d.max() + log_b_p) | (-d < (-completion_d).max() + log_b_r)
    return rejected & mask.bool()

def humanline_sample(log_ratio: Tensor, mask: Tensor, gamma_p: float = 0.5, gamma_r: float = 0.01,
                     beta_p: float = 1.0, beta_r: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Humanline sampling (Definition 4.2): a token is kept only if a person's perception would have produced it.

    Draw B_P ~ Beta(γ_P, β_P) and B_R ~ Beta(γ_R, β_R) for each token, and reject it if exp(d) < M_P B_P or
    exp(-d) < M_R B_R, where M_P and M_R are the largest exp(d) and exp(-d) among the batch's completion tokens. A
    rejected token keeps its value and passes no gradient. As the Betas concentrate on their means m_P and m_R, this
    becomes clipping to [log(M_P m_P), -log(M_R m_R)] (Theorem 4.3), as far as gradients go.

    Paste with `humanline_rejected`.

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
    """-log σ(β (Σ_t d̃ʷ_t - Σ_t d̃ˡ_t)) (Rafailov et al. 2023, eq. 7). Paste with `sum_tokens`.

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

    Paste with `sum_tokens`.

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
    gains, losses = desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain)
    return torch.where(desirable.bool(), gains, losses)

def group_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 0.01, scale: bool = True, prior: float = 0.0,
                     prior_mean: float = 0.0) -> Tensor:
    """A_i = (r_i - mean) / (std + eps) within each group, with the population standard deviation (Shao et al. 2024).

    Args:
        rewards: (N,) floats.
        group_ids: (N,) integers; equal ids form a group, in any order.
        scale: False leaves the division out (Dr. GRPO, Liu et al. 2025).
        prior, prior_mean: mean and std are those of the group and `prior` more rollouts with this reward.
    Returns:
        (N,) advantages. Without a prior zero-mean in each group, and 0 for a group of one or without a difference.

    >>> group_advantages(torch.tensor([1.0, 0.0, 7.0, 7.0]), torch.tensor([3, 3, 5, 5]))
    tensor([ 0.9804, -0.9804,  0.0000,  0.0000])
    """
    _, index, counts = group_ids.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=rewards.dtype, device=rewards.device)
    means = (sums.index_add(0, index, rewards) + prior * prior_mean) / (counts + prior)
    centred = rewards - means[index]
    if not scale:
        return centred
    squares = sums.index_add(0, index, centred**2) + prior * (prior_mean - means) ** 2
    std = (squares / (counts + prior)).sqrt()
    return centred / (std[index] + eps)

def grpo_loss(log_ratio: Tensor, perceived_log_ratio: Tensor, advantages: Tensor, epsilon: float = 0.2,
              kl_beta: float = 0.0, epsilon_high: float | None = None) -> Tensor:
    """-min(A r_t, A clip(r_t, 1-ε, 1+ε)) + β_KL (exp(-d_t) + d_t - 1), with r_t = exp(d̃_t) (Shao et al. 2024, eq. 3).

    As published, d̃ is taken to the old policy and d to the initial one. With humanline both are taken to the synced
    reference, and the ratio is clipped twice: upstream as d̃, and here. The KL term sees the raw d.

    Paste with `token_kl`.

    Args:
        log_ratio: (N, T) raw token log-ratios d to the reference, in nats.
        perceived_log_ratio: (N, T) token log-ratios d̃ after perception.
        advantages: (N,).
        epsilon_high: the clip's upper end is 1 + ε_high (Yu et al. 2025, DAPO, eq. 8); None: ε.
    Returns:
        (N, T) token losses. Masked positions hold -A, as r = 1 there: multiply by the mask before averaging.
    """
    ratio, advantages = perceived_log_ratio.exp(), advantages.unsqueeze(-1)
    clipped = ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    loss = -torch.min(advantages * ratio, advantages * clipped)
    return loss + kl_beta * token_kl(log_ratio) if kl_beta else loss

def sequence_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Each token gets the mean over its sequence, so that exp of it is the sequence's ratio to the power 1 / length
    (Zheng et al. 2025, GSPO, eq. 7).

    Args:
        log_ratio: (N, T) token log-ratios, zero at masked positions.
        mask: (N, T), true or 1 at completion tokens.
    Returns:
        (N, T), zero at masked positions.
    """
    means = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return means * mask

def staleness_weight(log_ratio_to_sampler: Tensor, sampler_logps: Tensor, mask: Tensor, is_worse: Tensor,
                     mean_surprisal: float, in_pairs: bool = False) -> Tensor:
    """max(0, 1 - rise / budget) for each worse completion, 1 for the others. budget: its surprisal under the sampler μ,
    -Σ_t log μ, or that of an average completion of its length if this is less, but at least 1 nat; rise: how far the
    policy's surprisal exceeds μ's, Σ_t (log μ - log π_θ).

    It scales the gradient of the log-ratio before any loss sees it. A completion as likely as under the sampler is
    pushed down with full weight; one that surprises the policy twice as much is let go, as online it would hardly be
    sampled. TOPR's weight, min(1, π_θ / μ) (Le Roux et al. 2025), lets go of a long completion at once, though the
    policy still says much the same in other words. So the budget is the entropy of what the sampler writes: 1 nat where
    it is nearly sure, many where it writes freely. A mean over tokens would not do: many easy ones hide a wrong one.

    In a pair, as the rejected one's weight w fades, the chosen one's goes to w + (1 - w) / budget. For a chosen one
    alone pulls the policy to one text. That helps where it is the only right answer (a budget of 1 nat), and harms
    where it is one text of many (80). Beside the prior's empty completion a chosen one has the weight 1 / budget, and a
    rejected one w / budget.

    Args:
        log_ratio_to_sampler: (N, T) log π_θ - log μ, in nats, zero at masked positions; no gradient flows into it.
        sampler_logps: (N, T) log μ, zero at masked positions.
        mask: (N, T) booleans, True at completion tokens.
        is_worse: (N,) booleans: rejected, undesirable, or with a negative advantage.
        mean_surprisal: of -log μ over the batch's tokens that are trained on, in nats: an estimate of μ's entropy.
        in_pairs: whether the rows are chosen, rejected, chosen, rejected, …
    Returns:
        (N, 1) weights from 0 to 1.
    """
    rise = -log_ratio_to_sampler.detach().sum(-1, keepdim=True)
    budget = -sampler_logps.sum(-1, keepdim=True)
    budget = torch.minimum(budget, mean_surprisal * mask.sum(-1, keepdim=True)).clamp(min=1)
    weight = (1 - rise / budget).clamp(0, 1)
    weight = torch.where(is_worse[:, None], weight, torch.ones_like(weight))
    if in_pairs:
        is_whole = mask.any(-1, keepdim=True)[0::2] & mask.any(-1, keepdim=True)[1::2]
        together = torch.where(is_whole, weight[1::2], 0.0)
        weight[1::2] = torch.where(is_whole, weight[1::2], weight[1::2] / budget[1::2])
        weight[0::2] = together + (1 - together) / budget[0::2]
    return weight

def token_kl(log_ratio: Tensor) -> Tensor:
    """exp(-d) + d - 1 >= 0, whose mean over the policy's samples is KL(π_θ || π_ref), in nats (Schulman 2020, "k3")."""
    return torch.expm1(-log_ratio) + log_ratio

# What a loss trains on: a scored group becomes units of sequences, and a unit is what --batch-size counts.

@dataclass
class Group:
    """A prompt and its completions with their rewards, as token ids: read from the data, or drawn (rollouts)."""

    row: int  # which of the run's rows, from 0
    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]
    labelled: bool = False  # rewards are absolute labels (1 desirable, 0 not), not to be compared with each other
    parts: list[list[float | None]] = dataclasses.field(default_factory=list)  # of each reward; None: it failed
    logps: list[list[float]] = dataclasses.field(default_factory=list)  # log μ of each token, where known

@dataclass
class Sequence:
    """A prompt with one completion, and what the losses must know about it."""

    prompt: list[int]
    completion: list[int]
    row: int = 0
    advantage: float = 0.0  # GRPO
    is_chosen: bool = False  # DPO: chosen; KTO: desirable; GRPO: its advantage is positive
    weight: float = 1.0  # KTO: λ_D or λ_U
    ref_logps: Tensor | None = None  # (len(completion),) log π_ref(y_t | x, y_<t); None: the reference is the policy
    old_logps: Tensor | None = None  # the same of the old policy, where the loss needs both; see `takes_old_policy`
    sampler_logps: Tensor | None = None  # the same of whatever produced the completion; see `needs_sampler_logps`
    rejected_tokens: Tensor | None = None  # (len(completion),) booleans, with --perception sample
    shares_prompt: bool = False  # lies behind the sequence before it in one row of the forward pass; see `cut`
    index: int = 0  # its place in the batch

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)

@dataclass
class LossInputs:
    """What a loss sees of a microbatch of N sequences. DPO: chosen, rejected, chosen, rejected, …"""

    log_ratio: Tensor  # (N, T) d to the reference, in nats; 0 outside the completions
    perceived: Tensor  # (N, T) d̃, in nats, of the same d unless `takes_old_policy`
    mask: Tensor  # (N, T) booleans, true at completion tokens
    advantages: Tensor  # (N,)
    is_chosen: Tensor  # (N,) booleans
    weights: Tensor  # (N,)
    kl: Tensor | None  # () z₀, in nats, for a loss with `needs_mismatched`

def sequences_of(group: Group, config: Config, **fields: list) -> list[Sequence]:
    """A group's completions as sequences. fields: a list of values each, one for each completion."""
    if group.logps and needs_sampler_logps(config):
        fields["sampler_logps"] = [torch.tensor(values, dtype=torch.float32) for values in group.logps]
    return [Sequence(group.prompt, completion, group.row, **{name: values[i] for name, values in fields.items()})
            for i, completion in enumerate(group.completions)]

def group_with_advantages(group: Group, config: Config, mean_reward: float) -> list[list[Sequence]]:
    """GRPO: the whole group is one unit."""
    rewards, ids = torch.tensor(group.rewards, dtype=torch.float64), torch.zeros(len(group.rewards), dtype=torch.long)
    advantages = group_advantages(rewards, ids, 0.01, config.scale_rewards, config.prior or 0.0, mean_reward).tolist()
    if all(is_same(reward, mean_reward if config.prior else group.rewards[0]) for reward in group.rewards):
        advantages = [0.0] * len(advantages)  # and no rounding errors
    return [sequences_of(group, config, advantage=advantages, is_chosen=[advantage > 0 for advantage in advantages])]

def is_same(reward: float, mean_reward: float) -> bool:
    """Whether they differ by no more than the rounding of the mean."""
    return math.isclose(reward, mean_reward, rel_tol=1e-9, abs_tol=1e-12)

def best_against_worst(group: Group, config: Config, mean_reward: float) -> list[list[Sequence]]:
    """DPO: the best and the worst completion are a pair. If all rewards are equal: none, or with --prior the
    first one against an empty completion, which counts as having the mean reward."""
    rewards, sequences = group.rewards, sequences_of(group, config)
    best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
    chosen, rejected = sequences[best], sequences[worst]
    if rewards[best] == rewards[worst]:
        if not config.prior or is_same(rewards[best], mean_reward):
            return []
        empty = Sequence(group.prompt, [], group.row, sampler_logps=torch.zeros(0))
        chosen, rejected = (chosen, empty) if rewards[best] > mean_reward else (empty, rejected)
    chosen.is_chosen = True
    return [[chosen, rejected]]

def above_and_below_mean(group: Group, config: Config, mean_reward: float) -> list[list[Sequence]]:
    """KTO: each completion is an example; desirable are those above the group's mean, or labelled so. A group with
    equal rewards gives none, except with --prior, which adds the mean of all groups, if it is another, to that mean."""
    rewards, prior = torch.tensor(group.rewards, dtype=torch.float64), config.prior or 0.0
    mean_of_both = float((rewards.sum() + prior * mean_reward) / (len(rewards) + prior))
    threshold = 0.5 if group.labelled else mean_of_both
    is_equal = rewards.max() == rewards.min() and (not prior or is_same(group.rewards[0], mean_reward))
    if is_equal and not group.labelled:
        return []
    is_chosen = [reward > threshold for reward in group.rewards]
    return [[sequence] for sequence in sequences_of(group, config, is_chosen=is_chosen)]

def set_kto_weights(sequences: list[Sequence], config: Config) -> None:
    """λ_D and λ_U. By default λ_D n_D = λ_U n_U (Ethayarajh et al. 2024, section 4.2): a loss that pushes down more
    than it pushes up ends in a model that finds no text likely."""
    desirable = sum(sequence.is_chosen for sequence in sequences)
    balanced = config.undesirable_weight * (len(sequences) - desirable) / max(1, desirable) or 1.0
    for sequence in sequences:
        sequence.weight = (config.desirable_weight or balanced) if sequence.is_chosen else config.undesirable_weight

def of_ratio(x: LossInputs, config: Config) -> Tensor:
    """The perceived log-ratio of each token, or as --ratio says of its sequence: (N, T)."""
    return sequence_log_ratio(x.perceived, x.mask) if config.ratio == "sequence" else x.perceived

def grpo_of_inputs(x: LossInputs, config: Config) -> Tensor:
    perceived = of_ratio(x, config)
    return grpo_loss(x.log_ratio, perceived, x.advantages, config.epsilon, config.kl_beta, config.epsilon_high)

def grpo_clipped(x: LossInputs, config: Config) -> tuple[Tensor, Tensor]:
    """Where GRPO's own clip takes the gradient, at its lower and at its upper end: two (N, T) boolean tensors."""
    ratio = of_ratio(x, config).exp()
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    falls, advantages = ratio < 1 - config.epsilon, x.advantages[:, None]
    return falls & (advantages < 0) & x.mask, (ratio > 1 + high) & (advantages > 0) & x.mask

@dataclass(frozen=True)
class Loss:
    """All that the program knows of a loss. Another one is another entry of LOSSES, and nothing else.

    compute(inputs, config) returns (N, T) token losses, which --average turns into a mean, or one loss for each pair or
    example; either way the mean is over the global batch.
    """

    compute: Callable[[LossInputs, Config], Tensor]
    make_units: Callable[[Group, Config, float], list[list[Sequence]]]  # the float: mean reward of all groups
    unit: Literal["group", "pair", "example"]  # what --batch-size counts; a pair lies as chosen, rejected
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)  # where they differ from DEFAULTS
    embedded_defaults: dict[str, Any] = dataclasses.field(default_factory=dict)  # the same, from EMBEDDED_DEFAULTS
    set_weights: Callable[[list[Sequence], Config], None] = lambda sequences, config: None  # of all data or rollouts
    needs_mismatched: bool = False  # z₀, from each prompt with the completion of another prompt
    has_old_policy: bool = False  # as published its log-ratio is to the old policy; see `takes_old_policy`
    is_idle: Callable[[Sequence, Config], bool] = lambda sequence, config: False  # has no gradient; is left out
    clipped: Callable[[LossInputs, Config], tuple[Tensor, Tensor]] | None = None  # where its own clip acts: low, high

LOSSES = {
    "grpo": Loss(grpo_of_inputs, group_with_advantages, "group", has_old_policy=True, clipped=grpo_clipped,
                 # the M_P and M_R of --perception sample are of all tokens
                 is_idle=lambda s, config: not (s.advantage or config.kl_beta or config.perception == "sample")),
    "dpo": Loss(
        lambda x, config: dpo_loss(x.perceived[0::2], x.perceived[1::2], config.beta),
        best_against_worst, "pair"),
    "kto": Loss(
        lambda x, config: x.weights * kto_loss(x.perceived, x.is_chosen, x.kl, config.beta),
        above_and_below_mean, "example", dict(batch_size=64), dict(batch_size=256, lr=4e-4),
        set_weights=set_kto_weights, needs_mismatched=True),
}

# ---------- The loop --------------------------------------------------------------------------------------------------

def train(config: Config) -> "Run":
    """Align a model as `config` says, from the rows on disk to the final folder."""
    with contextlib.ExitStack() as stack:
        run = Run(config, stack)  # finds what the user can have got wrong, loads, and resumes
        config, policy, optimizer, reference = run.config, run.policy, run.optimizer, run.reference
        signals = stack.enter_context(stop_signals())
        if run.before is None:
            run.before = run.latest = run.measure(0)
        if not len(run.progress):  # resumed at its end, as --steps is less now
            run.latest = run.measure(config.steps)

        for step in run.progress:
            step_started, sample_seconds, about_rollouts = time.perf_counter(), 0.0, {}

            # Rollouts for the next steps, with rewards. The policy as it is now is their old policy.
            if config.sample_every and step > run.batches.made_until:
                prompts = run.batches.next_prompts(step)
                ahead = run.batches.next_prompts(step + config.sample_every) if config.draw_ahead else []
                rollouts = run.sampler.draw_rollouts(prompts, run.rows, config.group_size, step, ahead=ahead)
                run.batches.add_rollouts(rollouts)
                sample_seconds = time.perf_counter() - step_started
                about_rollouts = run.keep_rollouts("rollouts.jsonl", rollouts, run.rows, step, config, sample_seconds)
                reference.after_rollouts(step)

            # The batch, with its reference log-probs. The first reference is the initial policy.
            if step == 1 and (reference.syncs or not config.sample_every):
                reference.sync(0)
            batch = run.batches.take(step)
            reference.attach_to_batch(batch)

            # Forward, perceive, loss, backward, a microbatch at a time: right below.
            report = forward_backward(policy, batch, config)

            # Clip the gradient's norm, sync, step, in this order: the sync takes the policy before its update.
            grad_norm = float(full(torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)))
            run.stop_unless_finite(batch, report["loss"], grad_norm)
            k, most_drift = config.sync_k, config.sync_drift
            if (k and step % k == 0) or (most_drift and report["drift"] > most_drift):
                reference.sync(step)
            optimizer.param_groups[0]["lr"] = learning_rate(step, config)
            optimizer.step()
            optimizer.zero_grad()

            # Measure, log, save.
            report |= about_rollouts | dict(step=step, lr=learning_rate(step, config), grad_norm=grad_norm)
            report |= dict(sample_seconds=sample_seconds, step_seconds=time.perf_counter() - step_started)
            if step == config.steps or (config.eval_every and step % config.eval_every == 0):
                run.latest = run.measure(step)
                report |= run.latest
            run.log(report)
            if run.is_falling and config.on_collapse != "warn":
                run.end_early(step)
                break
            if float(sum_over_ranks(torch.tensor(float(len(signals))))) and step < config.steps:
                run.stopped_at, run.signal = step, max([0, *signals])
            if run.stopped_at or (config.save_every and step % config.save_every == 0):
                if config.draw_ahead:
                    run.sampler.external.collect()  # a checkpoint holds what is being drawn
                run.saver.save(policy, optimizer, reference, step)
            if run.stopped_at:
                break

        run.saver.wait()
        if not run.stopped_at:
            save_final(run.out / "final", policy, run.sampler.tokenizer, config, run.ended)
        if world_size() > 1:
            dist.barrier()  # no rank leaves while another still writes
    return run

def forward_backward(policy: Module, batch: "Batch", config: Config) -> dict[str, float]:
    """Fill the parameters' .grad with the gradient of the batch's mean loss; returns what the step reports. All means
    are over the global batch, so that microbatches and ranks change nothing."""
    loss, device = LOSSES[config.loss], policy.device
    kl = kto_reference_point(policy, batch, config) if loss.needs_mismatched else None
    if config.perception == "sample":
        draw_rejections(policy, batch, config)
    names = ("loss tokens unclamped clamped_low clamped_high clip_low clip_high drift kl logp logp_wanted wanted "
             "chosen rejected entropy entropy_tokens sampler_gap stale_weight worse").split()
    taught = [sequence for sequence in batch.sequences if not loss.is_idle(sequence, config)]
    if config.stale == "taper":  # over the whole batch, as all means are
        mean_surprisal = -float(torch.cat([s.sampler_logps for s in taught]).mean()) if taught else 0.0

    def backward() -> Tensor:  # of this rank's share; where memory runs out, again in smaller microbatches
        policy.zero_grad()
        sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        for microbatch in cut(taught, config):
            entropies: list[Tensor] = []
            log_ratio, ref_log_ratio, mask, logps = log_ratios(policy, microbatch, config, entropies.append)  # forward
            sequences = microbatch or [Sequence([], [])]
            chosen = torch.tensor([s.is_chosen for s in sequences], device=device)
            sampler_logps = logps.detach()
            if needs_sampler_logps(config) and microbatch:
                sampler_logps = pad_completions([s.sampler_logps for s in microbatch], microbatch, logps)
            weight = torch.ones_like(log_ratio[:, :1])
            if config.stale == "taper":
                weight = staleness_weight(logps - sampler_logps, sampler_logps, mask, ~chosen, mean_surprisal,
                                          in_pairs=loss.unit == "pair" and len(microbatch) > 0)
                log_ratio = weight * log_ratio + (1 - weight) * log_ratio.detach()
            if config.stale == "drop":
                log_ratio = torch.where(chosen[:, None], log_ratio, log_ratio.detach())
            perceived, passes = perceive(log_ratio, microbatch, config)
            advantages = torch.tensor([s.advantage for s in sequences], device=device)
            weights = torch.tensor([s.weight for s in sequences], device=device)
            inputs = LossInputs(ref_log_ratio, perceived, mask, advantages, chosen, weights, kl)
            if microbatch:
                mean_loss = share_of_mean(loss.compute(inputs, config), mask, batch, config)
            else:  # sharded, a rank without work goes along
                mean_loss = log_ratio.sum()
            (mean_loss * world_size() if config.shard else mean_loss).backward()  # FSDP takes the ranks' mean
            with torch.no_grad():
                gain, entropy = config.beta * perceived.sum(-1), torch.cat(entropies)
                low, high = loss.clipped(inputs, config) if loss.clipped else (~mask & mask,) * 2
                worse = ~chosen & mask.any(-1)
                sums += torch.stack([
                    mean_loss, mask.sum(), (passes & mask).sum(), (log_ratio < config.log_eps_p).sum(),
                    (log_ratio > config.log_eps_r).sum(), low.sum(), high.sum(), log_ratio.abs().sum(),
                    token_kl(ref_log_ratio).sum(), logps.sum(), logps[chosen].sum(), mask[chosen].sum(),
                    gain[chosen].sum(), gain[~chosen].sum(), entropy.sum(), torch.tensor(len(entropy), device=device),
                    (logps - sampler_logps).abs().sum(), weight[worse].sum(), worse.sum(),
                ]).double()
        return sums

    sums = fit_memory(backward, taught, config)
    parameters = trained(policy).values()
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    if world_size() > 1 and not config.shard:  # sharded, FSDP has added them up in its backward pass
        for pending in [dist.all_reduce(p.grad, async_op=True) for p in parameters]:
            pending.wait()
    return step_report(batch, dict(zip(names, sum_over_ranks(sums).tolist())), kl, config)

def log_ratios(policy: Module, sequences: list[Sequence], config: Config,
               note_entropy: Callable[[Tensor], None] | None = None) -> tuple[Tensor, ...]:
    """Four (N, T) tensors: the log-ratio before perception; the log-ratio d to the reference, the same unless
    `takes_old_policy` (both 0 outside the completions); the mask; log π_θ."""
    with mixed_precision(policy.device, config):
        logps, mask = log_probs(policy, sequences, logits_temperature(config), note_entropy)

    def to(name: str) -> Tensor:
        if not sequences or getattr(sequences[0], name) is None:  # the policy itself
            return logps - logps.detach()
        return logps - pad_completions([getattr(s, name) for s in sequences], sequences, logps)

    ref_log_ratio = to("ref_logps")
    return to("old_logps") if takes_old_policy(config) else ref_log_ratio, ref_log_ratio, mask, logps

def takes_old_policy(config: Config) -> bool:
    """Whether the log-ratio is to the old policy and only the KL to the reference: standard GRPO online.
    Humanline takes both to the synced reference; offline there is no old policy, and the reference replaces it."""
    return LOSSES[config.loss].has_old_policy and bool(config.sample_every) and not is_synced(config)

def needs_sampler_logps(config: Config) -> bool:
    return config.stale == "taper" or draws_outside(config)

def draws_outside(config: Config) -> bool:
    """Whether another process draws what is trained on."""
    return bool(config.sample_every) and config.sampler != "generate"

def is_synced(config: Config) -> bool:
    return bool(config.sync_k or config.sync_drift)

def logits_temperature(config: Config) -> float:
    """T of softmax(logits / T): the sampling temperature for rollouts, 1 for the data's completions."""
    return config.temperature if config.sample_every else 1.0

def perceive(log_ratio: Tensor, sequences: list[Sequence], config: Config) -> tuple[Tensor, Tensor]:
    """d̃, and a boolean (N, T) tensor of what passes a gradient. Row i is of sequences[i]."""
    if config.perception == "clip":
        passes = (log_ratio >= config.log_eps_p) & (log_ratio <= config.log_eps_r)
        return humanline_clip(log_ratio, config.log_eps_p, config.log_eps_r), passes
    if config.perception == "sample" and sequences and sequences[0].rejected_tokens is not None:
        rejected = pad_completions([s.rejected_tokens for s in sequences], sequences, log_ratio)
        return torch.where(rejected, log_ratio.detach(), log_ratio), ~rejected
    return log_ratio, torch.ones_like(log_ratio, dtype=torch.bool)

def share_of_mean(losses: Tensor, mask: Tensor, batch: "Batch", config: Config) -> Tensor:
    """A microbatch's share of the mean loss of the whole batch, whose counts it is divided by."""
    if losses.dim() == 1:  # a loss for each pair or example
        return losses.sum() / (len(batch.sequences) / (2 if LOSSES[config.loss].unit == "pair" else 1))
    if config.average == "constant":
        return (losses * mask).sum() / (len(batch.sequences) * config.max_new_tokens)
    if config.average == "sequence":
        return ((losses * mask).sum(-1) / mask.sum(-1)).sum() / len(batch.sequences)
    return (losses * mask).sum() / sum(len(s.completion) for s in batch.sequences)

def step_report(batch: "Batch", sums: dict[str, float], kl: Tensor | None, config: Config) -> dict[str, float]:
    """What the metrics say of a step, from sums over the global batch.

    Means over the completion tokens that were computed (GRPO skips those without gradient): `drift`, |log-ratio|; `kl`,
    to the reference; `logp`, log π_θ. Fractions of these tokens: `unclamped`, kept by perception; `clamped_low` and
    `clamped_high`, beyond the humanline clip's ends; `clip_low` and `clip_high`, stopped by GRPO's own clip. `entropy`:
    of the next-token distribution, in nats, at every 8th token; which ones depends on the microbatches.
    `logp_wanted`: `logp` of the chosen, desirable or positive-advantage completions. `reward_margin`: the mean β Σ d̃
    of the chosen completions minus that of the others. `stale_weight`: the mean `staleness_weight` of the worse
    completions; near 0 the data have little left to teach. `no_difference`: the fraction of the step's groups whose
    rewards are all equal; `reward`: these groups' mean, of rollouts or of the data. `z0`: KTO's reference point, in
    nats. With --sampler: `lag`, the optimizer steps since the sampler got its weights, and
    `sampler_gap`, |log π_θ - log μ|, which at lag 0 is the mismatch of sampler and trainer.
    """
    loss, lengths = LOSSES[config.loss], [len(s.completion) for s in batch.sequences]
    report = dict(loss=sums["loss"], tokens=sum(lengths))
    if lengths:
        report |= dict(completion_length=mean(lengths), completion_longest=max(lengths))
    names = ["unclamped", "drift", "logp"]
    names += ["kl"] if config.kl_beta or not takes_old_policy(config) else []  # otherwise no reference was asked
    names += ["clamped_low", "clamped_high"] if config.perception == "clip" else []
    names += ["clip_low", "clip_high"] if loss.clipped else []
    if draws_outside(config):
        names.append("sampler_gap")
        is_ahead = config.draw_ahead and batch.step > config.sample_every
        report["lag"] = (batch.step - 1) % config.sample_every + is_ahead * config.sample_every
    report |= {name: sums[name] / max(1, sums["tokens"]) for name in names}
    if sums["wanted"]:
        report["logp_wanted"] = sums["logp_wanted"] / sums["wanted"]
    if config.stale == "taper" and sums["worse"]:
        report["stale_weight"] = sums["stale_weight"] / sums["worse"]
    if sums["entropy_tokens"]:
        report["entropy"] = sums["entropy"] / sums["entropy_tokens"]
    if loss.unit != "group":
        chosen = sum(s.is_chosen for s in batch.sequences)
        others = len(batch.sequences) - chosen
        report["reward_margin"] = sums["chosen"] / max(1, chosen) - sums["rejected"] / max(1, others)
    report |= dict(reward=batch.reward, no_difference=batch.no_difference, z0=None if kl is None else float(kl))
    return {name: value for name, value in report.items() if value is not None}

def draw_rejections(policy: Module, batch: "Batch", config: Config) -> None:
    """--perception sample: decide each token's fate before any gradient: M_P and M_R are maxima over the batch."""
    if not batch.sequences:  # rollouts without a difference
        return
    values = lambda microbatch: log_ratios(policy, microbatch, config)[0]
    log_ratio = completion_values(policy, batch.sequences, config, values)
    d, generator = torch.cat(log_ratio), torch.Generator().manual_seed(seed_for(config.seed, "reject", batch.step))
    betas = config.gamma_p, config.gamma_r, config.beta_p, config.beta_r
    rejected = humanline_rejected(d, torch.ones_like(d), *betas, generator)
    for sequence, tokens in zip(batch.sequences, rejected.split([len(values) for values in log_ratio])):
        sequence.rejected_tokens = tokens

def kto_reference_point(policy: Module, batch: "Batch", config: Config) -> Tensor:
    """z₀ = max(0, mean over mismatched pairs of Σ_t d̃_t), one number for the whole batch, in nats."""
    if not batch.mismatched or batch.mismatched[0].ref_logps is None:  # no pairs, or d = 0: the reference is the policy
        return torch.zeros((), device=policy.device)
    values = lambda microbatch: perceive(log_ratios(policy, microbatch, config)[0], microbatch, config)[0]
    total = sum(values.sum() for values in completion_values(policy, batch.mismatched, config, values))
    return torch.as_tensor(total / len(batch.mismatched), device=policy.device).clamp(min=0)

def learning_rate(step: int, config: Config) -> float:
    """Linear warmup over the first fraction of the steps, then constant or a cosine down to 0."""
    warmup = math.ceil(config.warmup * config.steps)
    if step <= warmup:
        return config.lr * step / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (config.steps - warmup + 1)))
    return config.lr * cosine if config.schedule == "cosine" else config.lr

# ---------- The run ---------------------------------------------------------------------------------------------------

class Run:
    """All that the loop works with: config, out, rows, policy, sampler, batches, reference, optimizer, saver."""

    def __init__(self, config: Config, stack: contextlib.ExitStack):
        """Lock the run's folder until `stack` closes, check, load, resume. User errors are found here, the cheapest
        check first, before anything is written."""
        self.started, self.stopped_at, self.signal = time.perf_counter(), None, 0
        self.measured = "pass@1"
        go_offline_without_hub(config)
        import transformers
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        if "WORLD_SIZE" in os.environ:  # drawing its data would wait for the ranks that wait for one to make it
            make_embedded(config)
        device = join_ranks()
        require(not config.shard or dist.is_initialized(), "--shard needs several ranks; start them with torchrun")
        self.out, checkpoint = from_first_rank(lambda: (claim_out_folder(config, stack), find_checkpoint(config)))
        self.config = config = dataclasses.replace(config, out=str(self.out))
        self.rows = [row for source in config.data for row in read_rows(source, config, "--data")]
        self.eval_rows = []
        if config.eval_data is not None:
            self.eval_rows = read_rows(config.eval_data, config, "--eval-data")[: config.eval_prompts]

        self.seen = {str(row.prompt) for row in self.rows} & {str(row.prompt) for row in self.eval_rows}
        rows = json.dumps([row.fields for row in self.rows], default=str)
        fingerprint = hashlib.sha256(rows.encode()).hexdigest()  # by which a resumed run knows its rows again
        require(len({*gather_from_ranks(f"{config} {fingerprint}")}) == 1, "the ranks have different flags or rows")
        self.policy, tokenizer = load_policy(config, device)
        config.share_prompts = all(gather_from_ranks(config.share_prompts))  # all ranks must cut their batches alike
        self.sampler = Sampler(self.policy, tokenizer, config)
        groups = encode_rows(self.rows, self.sampler, online=bool(config.sample_every))
        largest = max(token for group in groups for ids in (group.prompt, *group.completions) for token in ids)
        require(largest < len(self.policy.get_input_embeddings().weight),
                f"--model {config.model}: its tokenizer makes tokens that the model does not know; use the model's own")
        self.batches = Batches(config, groups, self.sampler.longest, fingerprint)
        config.steps = config.steps or self.batches.steps_per_epoch
        self.eval_groups = encode_rows(self.eval_rows, self.sampler, "--eval-data", True) if self.eval_rows else []
        self.sampler.check_rows(self.eval_rows + (self.rows if config.sample_every else []))
        self.optimizer = torch.optim.AdamW(trained(self.policy).values(), lr=config.lr, betas=(0.9, 0.999), fused=True,
                                           eps=config.adam_eps, weight_decay=config.weight_decay)
        self.reference = Reference(self.policy, self.batches, config)
        if config.sampler != "generate":
            self.sampler.external = ExternalSampler(self.sampler, self.batches, self.optimizer, stack)
        first = 1 + (load_checkpoint(checkpoint, self.optimizer, self.reference) if checkpoint else 0)
        self.saver = Saver(self.out / "checkpoint", config, checkpoint)
        stack.callback(self.saver.wait)  # however the run ends

        metrics = self.out / "metrics.jsonl"
        earlier = from_first_rank(lambda: [line for line in read_metrics(metrics) if line["step"] < first])
        if rank() == 0:
            for unfinished in [*self.out.glob("checkpoint/.step-*"), *self.out.glob(".final-*")]:  # of a killed process
                shutil.rmtree(unfinished)
            (self.out / "config.toml").write_text(to_toml(config), encoding="utf-8")
            for file in filter(Path.exists, map(self.out.joinpath, LINES)):
                if checkpoint:
                    cut_lines(file, first)  # later steps are done again
                else:
                    kept = file.rename(file.with_stem(f"{file.stem}-{time.time_ns()}"))
                    warn(f"no whole checkpoint, so the run starts afresh; what it wrote is kept as {kept}")
            describe(config, self.policy, groups, self.reference, first)
            warn_of_oddities(config, self.policy, self.rows, self.batches)
            if self.seen:
                warn(f"--eval-data: {len(self.seen)} of its prompts are also in --data")
            self.track = tracker(config, self.out, first)
        self.collapse, self.health, self.shown_at = Collapse(), Health(bool(config.prior)), -math.inf
        self.kept, self.ended = None, config.steps  # weights of before a collapse; the step whose weights are final
        self.before, self.latest = None, {}  # what `measure` gave before the first step, and at last
        for line in earlier:
            of_line = {name: line[name] for name in ("accuracy", "greedy") if name in line}
            before = {name: line[f"{name}_before"] for name in ("accuracy", "greedy") if f"{name}_before" in line}
            self.before, self.latest = self.before or before, of_line or self.latest or before
            self.collapse(line)
            self.health(line)
        if checkpoint and self.before is None:  # of another folder, where its metrics are
            self.before = {}
        if config.on_collapse != "warn":
            self.collapse.warned = False  # so that a resumed run ends where it goes on collapsing
        if checkpoint and config.on_collapse == "restore":
            self.keep_weights(first - 1)
        self.progress = tqdm(range(first, config.steps + 1), desc=config.loss, initial=first - 1, total=config.steps,
                             unit="step", dynamic_ncols=True, **(dict(disable=True) if rank() else {}))

    def measure(self, step: int) -> dict[str, float]:
        """On --eval-data, if there is any: `accuracy`, the mean reward of new samples, which is pass@1 if rewards are 0
        or 1; and `greedy`, the mean reward of greedy completions."""
        config, values = self.config, {}
        temperature, top_p = config.eval_temperature or config.temperature, config.eval_top_p or config.top_p
        ways = [("accuracy", config.eval_samples, temperature, top_p), ("greedy", 1, 0.001, 1.0)]
        for name, samples, temperature, top_p in ways[: 1 + config.eval_greedy] if self.eval_groups else []:
            sampling = dataclasses.replace(config, temperature=temperature, top_p=top_p)
            rollouts = self.sampler.draw_rollouts(self.eval_groups, self.eval_rows, samples, 500_000 + step, sampling)
            if name == "accuracy":
                self.keep_rollouts("eval_rollouts.jsonl", rollouts, self.eval_rows, step, sampling)
            if any(reward not in (0, 1) for group in rollouts for reward in group.rewards):
                self.measured = "mean reward"
            values[name] = sum(sum(group.rewards) for group in rollouts) / (len(rollouts) * samples)
        return values

    def keep_rollouts(self, name: str, rollouts: list[Group], rows: list["Row"], step: int, sampling: Config,
                      seconds: float = math.inf) -> dict[str, float]:
        """Append rollouts to a file of the run, one line per completion, which --data can read; print a prompt's best
        and worst one, at most every ten seconds; return their metrics. seconds: how long sampling took."""
        sampler, lines = self.sampler, []
        names = [reward.short_name for reward in sampler.rewards]
        for number, group in enumerate(rollouts):
            texts = sampler.tokenizer.batch_decode(group.completions, skip_special_tokens=True)
            for i, ids in enumerate(group.completions):
                lines.append(dict(
                    step=step, row=group.row, prompt_id=f"{step}-{number}", prompt=rows[group.row].prompt,
                    completion=texts[i], reward=group.rewards[i], rewards=dict(zip(names, group.parts[i])),
                    truncated=ids[-1] not in sampler.stops, tokens=ids, logps=group.logps[i],
                    temperature=sampling.temperature, top_p=sampling.top_p))
        if rank() == 0 and self.config.rollouts:
            with open(self.out / name, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        if rank() == 0 and math.isfinite(seconds) and time.monotonic() > self.shown_at + 10:
            size, self.shown_at = self.config.group_size, time.monotonic()
            groups = [sorted(lines[i : i + size], key=lambda line: line["reward"]) for i in range(0, len(lines), size)]
            ranked = next((group for group in groups if group[0]["reward"] < group[-1]["reward"]), groups[0])
            for kind, line in (("best", ranked[-1]), ("worst", ranked[0])):
                text = f"{line['prompt'][-1]['content'][-20:]} → {line['completion']}".replace("\n", " ")
                shown = f"step {step} {kind:5} {line['reward']:6.2f}  {text}"
                tqdm.write(shown[: shutil.get_terminal_size().columns - 1])

        rewards = [line["reward"] for line in lines]
        report = dict(reward_std=float(torch.tensor(rewards, dtype=torch.float64).std(correction=0)),
                      truncated=mean([line["truncated"] for line in lines]),
                      sample_tokens_per_second=sum(len(line["tokens"]) for line in lines) / seconds)
        for part in names:
            given = [line["rewards"][part] for line in lines if line["rewards"][part] is not None]
            if len(names) > 1 and given:
                report[f"reward_{part}"] = mean(given)
            if len(given) < len(lines):
                report[f"failed_{part}"] = len(lines) - len(given)
        return report

    def stop_unless_finite(self, batch: "Batch", loss: float, grad_norm: float) -> None:
        """Raises FloatingPointError, which ends the run, where a step would spoil the weights."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        self.saver.wait()
        where = ", ".join(self.rows[row].where for row in sorted({s.row for s in batch.sequences}))
        raise FloatingPointError(f"step {batch.step}: loss {loss}, gradient norm {grad_norm}; last good checkpoint: "
                                 f"{self.saver.newest or 'none (see --save-every)'}; the batch was {where}")

    def log(self, line: dict) -> None:
        """Write a step's report to metrics.jsonl, --track and the progress bar, and warn of a collapse."""
        if line["step"] == 1:
            line |= {f"{name}_before": value for name, value in self.before.items()}
        collapse = self.collapse(line)
        self.is_falling = bool(collapse)
        for warning in [collapse, *self.health(line)]:
            if warning:
                warn(f"step {line['step']}: {warning}")
        if rank() == 0:
            with open(self.out / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self.track(line)
        shown = {name: line.get(name) for name in ("loss", "reward", "unclamped")}
        shown[self.measured] = self.latest.get("accuracy")
        shown = {name: f"{value:.3f}" for name, value in shown.items() if value is not None}
        is_kept = self.config.on_collapse == "restore" and self.collapse.is_best
        if is_kept and (not self.kept or line["step"] % 16 == 0):
            self.keep_weights(line["step"])
        speed = f"{line['tokens'] / line['step_seconds']:.0f}"
        self.progress.set_postfix(shown | {"tokens/s": speed}, refresh=False)

    def keep_weights(self, step: int) -> None:
        """Those after this step, for `end_early`."""
        self.kept = step, [local_part(p.detach()).to("cpu", copy=True) for p in trained(self.policy).values()]

    def end_early(self, step: int) -> None:
        """The run has come apart: end it here, or with the weights that were kept when all was well."""
        self.ended = step
        if self.kept:
            self.ended, weights = self.kept
            torch._foreach_copy_([local_part(p.detach()) for p in trained(self.policy).values()], weights)
            if self.sampler.external:
                self.sampler.external.changed = True
        self.latest = self.measure(step + 1)  # a number that no samples have yet
        warn(f"--on-collapse {self.config.on_collapse}: the run ends, and its model is that of step {self.ended}")

class Collapse:
    """Detects collapse from the log-prob of the preferred completions: chosen, desirable or positive advantage.

    While a run learns, their mean -log π_θ falls. Once its mean over 12 steps rises to twice its minimum, and at least
    0.3 nats per completion above it, the policy unlearns preferred completions along with the others, and its rewards
    fall with it: `python eval.py reproduce` counts how often that is right.
    """

    def __init__(self):
        self.recent, self.best, self.is_best, self.warned = deque(maxlen=12), -math.inf, False, False
        self.length = 0.0

    def __call__(self, line: dict[str, float]) -> str:
        """The warning, if a step's report calls for it, once per run; else ""."""
        if "logp_wanted" in line:  # a token's, times the first batch's mean length: completions may grow
            self.length = self.length or line.get("completion_length", 0.0)
            self.recent.append(line["logp_wanted"] * self.length)
        if self.warned or len(self.recent) < self.recent.maxlen:
            return ""
        now = mean(self.recent)
        self.is_best = now >= self.best
        self.best = max(self.best, now)
        self.warned = now < min(2 * self.best, self.best - 0.3)
        if not self.warned:
            return ""
        return (f"the completions that the loss wants likelier fell from {self.best:.2f} to {now:.2f} nats: "
                "the run may be coming apart; try --stale taper --prior 1, a lower --lr, fewer syncs or fresher "
                "rollouts (--sample-every)")

class Health:
    """Whether there is something to learn from, told from what a step reports; each warning comes once in a run."""

    def __init__(self, has_prior: bool = False):
        self.warned, self.equal_steps, self.first_entropy = set(), 0, 0.0
        self.has_prior = has_prior  # with it a group whose rewards are all equal teaches something, too

    def __call__(self, line: dict) -> list[str]:
        """The warnings that a line of the metrics gives reason for."""
        no_difference = 0 if self.has_prior else line.get("no_difference", 0)
        self.equal_steps = self.equal_steps + 1 if no_difference > 0.8 else 0
        entropy = line.get("entropy", math.inf)
        self.first_entropy = self.first_entropy or line.get("entropy", 0.0)
        reasons = {
            "more than half of the completions were cut off at --max-new-tokens; raise it, or ask for shorter answers":
                line.get("truncated", 0) > 0.5,
            "for 8 steps more than 80 % of the groups had no difference in their rewards, and taught nothing; take "
            "easier or harder prompts, a larger --group-size, or a reward with more steps": self.equal_steps == 8,
            "the entropy has fallen below a tenth of its start, the policy says one thing only; try a lower --lr "
            "or fewer steps": entropy < self.first_entropy / 10 and self.first_entropy > 0.2,  # nats
            "the sampler's log-probs are more than 0.05 nats per token from the policy's, of the same weights; compare "
            "the dtypes and versions of the two (a --top-p below 1 sets them apart, too)":
                line.get("lag") == 0 and line.get("sampler_gap", 0) > 0.05,
            "every completion that was drawn has the same reward; look at rollouts.jsonl and at --reward":
                line.get("reward_std", 1) < 1e-9,
            "no group of this batch has a difference, so that nothing was learned": no_difference == 1}
        found = [text for text, is_so in reasons.items() if is_so and text not in self.warned]
        self.warned |= set(found)
        return found

def cut_lines(path: Path, end: int) -> None:
    """Leave out the lines of the steps from `end` on, and what a crash cut off or the disk damaged."""
    if not path.exists():
        return
    kept = path.with_suffix(".new")
    with open(path, "rb") as old, open(kept, "wb") as new:
        for text in old:
            if text.endswith(b"\n") and (line := read_line(text)) and line["step"] < end:
                new.write(text)
    kept.replace(path)

def read_line(text: bytes) -> dict | None:
    """A line that has a step; None of one that a crash cut off or the disk damaged."""
    with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
        line = json.loads(text)
        return line | dict(step=int(line["step"]))

def read_metrics(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl, without what a crash cut off or the disk damaged."""
    texts = path.read_bytes().splitlines() if path.exists() else []
    lines = [{name: value for name, value in line.items() if isinstance(value, (int, float))}
             for line in map(read_line, texts) if line]
    if len(lines) < len(texts):
        warn(f"{path}: {len(texts) - len(lines)} damaged lines are left out")
    return lines

def tracker(config: Config, out: Path, first_step: int) -> Callable[[dict], None]:
    """What --track does with a line of metrics."""
    if config.track == "wandb":
        import wandb
        with explained("--track wandb", "run `wandb login`, or set WANDB_MODE=offline"):
            run = wandb.init(project="humanline", name=out.name, dir=str(out), config=dataclasses.asdict(config))
        return lambda line: run.log(line, step=line["step"])
    if config.track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        board = SummaryWriter(str(out), purge_step=first_step)

        def log(line: dict) -> None:
            for name, value in line.items():
                board.add_scalar(name, value, line["step"])
            board.flush()

        return log
    return lambda line: None

def claim_out_folder(config: Config, stack: contextlib.ExitStack) -> Path:
    """The run's folder, locked until `stack` closes; a new one goes again if nothing was written into it. Raises
    UserError where it holds another run."""
    out = Path(config.out or "")
    if config.out is None:
        source = f"every-{config.sample_every}" if config.sample_every else "offline"
        base = f"runs/{config.loss}-{'humanline' if config.humanline else 'baseline'}-{source}"
        names = (base + (f"-{number}" if number > 1 else "") for number in itertools.count(1))
        out = next(Path(name) for name in names if not Path(name).exists())
    try:
        new_folders = [folder for folder in (out, *out.parents) if not folder.exists()]
        stack.enter_context(locked(out, fcntl.LOCK_NB))
    except BlockingIOError:
        if config.out is None:  # another run took the name just now
            return claim_out_folder(config, stack)
        raise UserError(f"--out {out}: another process trains into it; choose another folder") from None
    except OSError as error:  # a file is in the way, or the name is too long
        raise UserError(f"--out {out!s:.60}: {error.strerror.lower()}; choose another folder") from None

    def remove_empty() -> None:
        for folder in new_folders:
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()

    stack.callback(remove_empty)
    require(os.access(out, os.W_OK), f"--out {out} is not writable; choose another folder")
    require(not (out / "final").exists(), f"--out {out} holds a finished run; choose another folder")
    settings = out / "config.toml"
    is_run = settings.is_file() and settings.read_bytes().startswith(TOML_HEAD.encode())
    for name in "config.toml", *LINES, "checkpoint":
        require(is_run or not (out / name).exists(),
                f"--out {out}: its {name} was not written by a run of humanline.py; choose another folder")
    require(config.resume is not None or not is_run,
            f"--out {out} holds a run that did not finish; go on with --resume latest, or choose another folder")
    return out

LINES = ("metrics.jsonl", "rollouts.jsonl", "eval_rollouts.jsonl")  # of a run's folder: lines that have a step

@contextlib.contextmanager
def locked(folder: Path, flags: int = 0) -> Iterator[None]:
    """Hold a folder's lock, which ends with the process, however it ends; raises BlockingIOError with LOCK_NB."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(descriptor)

@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """SIGTERM, SIGHUP and Ctrl-C become entries of a list: stop after this step. A second Ctrl-C stops at once."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        received.append(number)
        with contextlib.suppress(OSError):  # written at once: stderr's own buffer may be in use, or its terminal gone
            os.write(2, f"humanline.py: warning: {signal.Signals(number).name}: stopping after this step\n".encode())
        if number == signal.SIGINT and world_size() == 1:
            signal.signal(number, signal.default_int_handler)

    with contextlib.ExitStack() as handlers:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handlers.callback(signal.signal, number, signal.signal(number, note))
        yield received

# ---------- Models ----------------------------------------------------------------------------------------------------

HUB_SECONDS = 3  # how long the hub may take to answer

@contextlib.contextmanager
def explained(what: str, advice: str, **advice_by_word: str) -> Iterator[None]:
    """Turns what loading code raises into one line: `what` failed, the reason, and the advice for a word in it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # transformers, datasets, safetensors, huggingface_hub and pyarrow raise dozens of kinds
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        advice = next((advice_by_word[word] for word in advice_by_word if word in str(error)), advice)
        raise UserError(f"{what}: {reason.rstrip(' .')}; {advice}") from error

def explained_model(name: str) -> contextlib.AbstractContextManager:
    """`explained` of loading a model."""
    advice = "name a Hugging Face model or a folder; `hf download NAME --local-dir FOLDER` makes one, given a network"
    return explained(f"--model {name}", advice, trust_remote_code="to let it run, say --trust-remote-code",
                     attn_implementation="choose another --attn", peft="pip install peft")

def on_hub(spec: str | None) -> bool:
    """Whether NAME[:[CONFIG:]SPLIT][=PASSES] can only be a name on the Hugging Face hub."""
    name = source_name(spec or "embedded")
    return name != "embedded" and not Path(name).exists() and Path(name).suffix.lower() not in FILE_KINDS

def go_offline_without_hub(config: Config) -> None:
    """Where the hub does not answer, make do with its cache: its client would ask for half a minute, or for ever."""
    rewards = [spec.split("=")[0].removeprefix("model:") for spec in config.reward if spec.startswith("model:")]
    if not any(map(on_hub, (config.model, *config.data, config.eval_data, *rewards))):
        return
    from huggingface_hub import constants, get_session
    if constants.HF_HUB_OFFLINE:
        return
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):
            get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
            answered.set()

    threading.Thread(target=ask, daemon=True).start()  # a thread, as looking up the name takes a time of its own
    if not answered.wait(HUB_SECONDS):
        constants.HF_HUB_OFFLINE = True

def load_policy(config: Config, device: torch.device, has_weights: bool = True) -> tuple[Module, Any]:
    """The model and its tokenizer, by hub name or folder, ready for training, and without dropout, which would make the
    log-ratio of a policy with itself noise instead of 0. Without has_weights it stays on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    trust = dict(trust_remote_code=config.trust_remote_code)
    with ranks_in_turn() if config.shard else contextlib.nullcontext():
        name = embedded(config.model, "model") if source_name(config.model) == "embedded" else config.model
        # The warnings are of peft's asking transformers by an old name.
        with explained_model(config.model), warnings.catch_warnings(category=FutureWarning, action="ignore"):
            tokenizer = AutoTokenizer.from_pretrained(name, **trust)
            if config.template_values:
                require(tokenizer.chat_template, f"--template-values: {name} has no chat template")
                tokenizer.chat_template = tokenizer.get_chat_template()  # of several, the default
                told, mark = [f"{{%- set {key} = {value} -%}}" for key, value in template_values(config)], "{#-told-#}"
                rest = tokenizer.chat_template.rpartition(mark)[2]  # without what an earlier run has told it
                tokenizer.chat_template = mark.join(["", "".join(told), rest])
            base, frozen_on_gpu = base_of(name), config.lora and device.type == "cuda" and config.dtype != "float32"
            dtype = torch.bfloat16 if config.dtype == "bfloat16" or frozen_on_gpu else torch.float32
            settings, missing = dict(dtype=dtype, attn_implementation=config.attn, **trust), []
            if has_weights:
                policy, info = AutoModelForCausalLM.from_pretrained(base, output_loading_info=True, **settings)
                missing, foreign = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
                require(not foreign, f"--model {base}: it has no place for {', '.join(foreign[:3])} of its files; mend "
                        "its config.json")
            else:
                with torch.device("meta"):
                    policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base, **trust), **settings)
            require(not missing, f"--model {base}: its files lack {', '.join(missing[:3])}, which would be random")
            if base != name and not config.lora and has_weights:
                from peft import PeftModel
                adapted = PeftModel.from_pretrained(policy, name)
                check_mergeable(adapted, f"--model {name}")
                policy = adapted.merge_and_unload().requires_grad_(True)
        require(tokenizer.eos_token_id is not None, f"--model {name}: its tokenizer has no end-of-sequence token, so "
                "completions could not end; set eos_token in tokenizer_config.json")
        if config.dtype == "auto":
            config.dtype = "mixed" if pays_mixed(policy, device) else "float32"
        policy.base_hash = sampled_hash(policy) if has_weights else ""
        if config.lora:
            with contextlib.nullcontext() if has_weights else torch.device("meta"):
                add_adapters(policy, name if base != name and has_weights else None, config)
        for module in policy.modules():
            for key, value in vars(module).items():
                is_dropout = "drop" in key or (key == "p" and isinstance(module, torch.nn.Dropout))
                if is_dropout and isinstance(value, float):
                    setattr(module, key, 0.0)
        if config.checkpoint_activations and hasattr(policy, "activation_checkpointing_enable"):
            policy.activation_checkpointing_enable()
        elif config.checkpoint_activations:  # its older name
            policy.gradient_checkpointing_enable(dict(use_reentrant=False))
        if has_weights:
            split = policy._no_split_modules or ()
            layers = [module for module in policy.modules() if type(module).__name__ in split]
            for layer in layers if config.compile else ():  # once for all of them, and for all lengths of a batch
                layer.compile(dynamic=True)
            if config.shard:
                shard(policy, layers, device, config)
            policy.to(device)
    policy.train()
    if has_weights:
        check_output_head(policy, config)
    config.share_prompts = config.share_prompts and can_share_prompts(policy, config)
    return policy, tokenizer

def template_values(config: Config) -> Iterator[tuple[str, str]]:
    """--template-values as names and Jinja's literals; text needs no quotes."""
    for spec in config.template_values:
        name, equals, value = spec.partition("=")
        require(re.fullmatch(r"[a-zA-Z_]\w*", name) and equals, f"--template-values {spec}: write NAME=VALUE")
        value = {"True": "true", "False": "false", "None": "null"}.get(value, value)  # Python's spelling
        try:
            known = json.loads(value)
        except ValueError:
            known = value
        yield name, "none" if known is None else json.dumps(known, ensure_ascii=False)

def base_of(name: str) -> str:
    """The model that a peft folder's adapters belong to; of any other model its own name."""
    from transformers.utils import find_adapter_config_file
    if find_adapter_config_file(name) is None:
        return name
    from peft import PeftConfig
    return PeftConfig.from_pretrained(name).base_model_name_or_path

def check_mergeable(model: Module, what: str) -> None:
    """Raises UserError where merging adapters of the input embeddings would change an output head tied to them."""
    is_tied = model.config.get_text_config().tie_word_embeddings
    require(not is_tied or not hasattr(model.get_input_embeddings(), "lora_embedding_A"), f"{what}: adapters of the "
            "input embeddings cannot be merged, as this model's output head has the same weights; leave them out")

def add_adapters(policy: Module, folder: str | None, config: Config) -> None:
    """Freeze the policy, and put adapters to be trained beside its layers: new ones, which change nothing yet, or those
    of a peft folder. So the initial policy is the policy with the adapters as they are now, and needs no copy."""
    from peft import LoraConfig, PeftConfig
    targets = list(config.lora_targets)
    lora = LoraConfig(r=config.lora, lora_alpha=config.lora_alpha, task_type="CAUSAL_LM",
                      target_modules="all-linear" if targets == ["all-linear"] else targets)
    if folder is not None:
        lora = PeftConfig.from_pretrained(folder)
        require(isinstance(lora, LoraConfig), f"--model {folder}: its adapters are not LoRA's; try it without --lora")
        require((lora.r, lora.lora_alpha) == (config.lora, config.lora_alpha) and targets == ["all-linear"],
                f"--model {folder}: its adapters go on with --lora {lora.r} --lora-alpha {lora.lora_alpha} and no "
                "--lora-targets; others begin on the folder that --merge writes")
    with explained("--lora-targets", "name linear layers of the model"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, "lora"))
        loaded = policy.load_adapter(folder, is_trainable=True) if folder else policy.add_adapter(lora)
    lacking = sorted(getattr(loaded, "missing_keys", None) or ())  # such as the magnitudes of DoRA
    require(not lacking, f"--model {folder}: its adapters' {', '.join(lacking[:2])} would begin anew; merge them first")
    if config.merge:
        check_mergeable(policy, "--lora-targets")
    require(not hasattr(policy.get_output_embeddings(), "lora_A"),
            "--lora-targets: the output head takes no adapter; name layers below it")
    for p in policy.parameters():
        p.data = p.data.to(torch.float32 if p.requires_grad or config.dtype == "float32" else torch.bfloat16)
    for module in policy.modules():
        if hasattr(module, "lora_A"):  # autocast casts what it must; peft would keep a copy for each adapter
            module.cast_input_dtype_enabled = False

def trained(policy: Module) -> dict[str, Tensor]:
    """The parameters that training changes, by name: all of them, or with --lora the adapters."""
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}

def sampled_hash(model: Module) -> str:
    """A hash of every tensor's name, shape and some 1,000 of its values, by which a model is known again at once."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        digest.update(f"{name} {list(p.shape)}".encode())
        digest.update(p.detach().flatten()[:: p.numel() // 1000 | 1].float().numpy().tobytes())
    return digest.hexdigest()

def shard(policy: Module, layers: list[Module], device: torch.device, config: Config) -> None:
    """FSDP2: each rank keeps its part of every layer's weights, and gathers a layer when it is needed."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    mesh, mixed = dist.init_device_mesh(device.type, (world_size(),)), is_mixed(config)
    precision = MixedPrecisionPolicy(torch.bfloat16 if mixed else None, torch.float32)
    for module in [*layers, policy]:  # resharded, so that parameters() are always the shards
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    policy.completion_logps = functools.partial(completion_logps, policy)
    register_fsdp_forward_method(policy, "completion_logps")  # gathers the embeddings around it

@torch.no_grad()
def check_output_head(policy: Module, config: Config) -> None:
    """Raises UserError where `log_probs` is not the model's own log-softmax, or is random."""
    ids = torch.arange(8, device=policy.device)[None] % policy.config.get_text_config().vocab_size
    with mixed_precision(policy.device, config):
        ours, again = (log_probs(policy, [Sequence(ids[0, :1].tolist(), ids[0, 1:].tolist())])[0] for _ in range(2))
        logits = policy(input_ids=ids, use_cache=False).logits
    theirs = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    tolerance = 0.005 if config.dtype == "float32" else 0.05
    require(logits.isfinite().all(), f"--model {config.model}: its logits are not finite numbers; its weights are spoilt")
    require(torch.allclose(ours, again, rtol=0, atol=1e-3), f"--model {config.model}: its log-probs are random in "
            "training (not by dropout, which is off), so its log-ratio with itself would not be 0")
    require(torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance), f"--model {config.model}: its logits are not "
            "hidden states times output embeddings, which token_logps needs")

@torch.no_grad()
def can_share_prompts(policy: Module, config: Config) -> bool:
    """Whether tokens meet in nothing but full attention, with the mask and positions that it is given."""
    text = policy.config.get_text_config()
    window = "sliding" if getattr(text, "sliding_window", None) else "full_attention"
    kinds = set(getattr(text, "layer_types", None) or [window])
    pair = [Sequence([1, 2, 3, 4], [5, 6, 7]), Sequence([1, 2, 3, 4], [7, 6])]
    fits = kinds == {"full_attention"} and text._attn_implementation == "sdpa"
    if not fits or policy.device.type == "meta":
        return fits
    eager = torch.compiler.set_stance("force_eager")
    with contextlib.suppress(Exception), mixed_precision(policy.device, config), eager:  # may raise anything
        apart = log_probs(policy, pair)[0]
        pair[1].shares_prompt = True
        return torch.allclose(log_probs(policy, pair)[0], apart, rtol=0.05, atol=0.05)
    return False

def max_positions(policy: Module) -> int:
    """The longest sequence the model can read, in tokens."""
    return getattr(policy.config.get_text_config(), "max_position_embeddings", None) or 2**31

def pays_mixed(policy: Module, device: torch.device) -> bool:
    """Whether `--dtype auto` takes bf16 autocast: on a GPU, or for a large model where the CPU multiplies in bf16."""
    if device.type != "cpu":
        return device.type == "cuda"
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return has_bf16 and sum(p.numel() for p in policy.parameters()) >= 20_000_000

def is_mixed(config: Config) -> bool:
    """Whether what is trained is fp32 and the products are bf16; adapters are fp32 however --dtype sets the rest."""
    return config.dtype == "mixed" or (config.dtype == "bfloat16" and config.lora > 0)

def mixed_precision(device: torch.device, config: Config) -> contextlib.AbstractContextManager:
    """bf16 autocast over fp32 weights where --dtype asks for it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=is_mixed(config))

# ---------- Data ------------------------------------------------------------------------------------------------------
# Rows on disk -> groups of rewarded completions -> batches.

FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}

@dataclass
class Row:
    """One row of the data, checked. `completions` with their `rewards` make a group; pairs are groups of 1 and 0."""

    where: str  # file and row number, for messages
    prompt: list[dict]  # messages
    fields: dict  # the row as it was read, for the reward
    completions: list[str] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)
    labelled: bool = False  # see Group
    tokens: list[list[int]] = dataclasses.field(default_factory=list)  # of the completions, as they were sampled
    logps: list[list[float]] = dataclasses.field(default_factory=list)  # log μ of those tokens, or empty
    passes: float = 1.0  # how often it comes in one pass over the data

def split_passes(spec: str) -> tuple[str, str]:
    """NAME[:[CONFIG:]SPLIT][=PASSES] -> the part before its last =, and PASSES or "". Folders may have a = in them."""
    name, _, passes = spec.rpartition("=")
    return (spec, "") if not name or "/" in passes or Path(spec).exists() else (name, passes)

def source_name(spec: str) -> str:
    """The NAME of NAME[:[CONFIG:]SPLIT][=PASSES]."""
    return split_passes(spec)[0].split(":")[0]

def read_rows(spec: str, config: Config, flag: str) -> list[Row]:
    """Read NAME[:[CONFIG:]SPLIT][=PASSES] and check every row; raises UserError naming the first bad one."""
    name, passes = split_passes(spec)
    require(re.fullmatch(r"\d*\.?\d+", passes or "1"),
            f"{flag} {spec}: '{passes}' is no number of passes; for two passes over its rows write {name}=2")
    source, rows, first_of_prompt, dropped = f"{flag} {name}", [], {}, 0
    for number, fields in enumerate(itertools.islice(read_table(name, source), config.limit), 1):
        require(isinstance(fields, dict), f"{source} row {number}: not a JSON object")
        row = read_row(fields, f"{source} row {number}", config)
        if row is None:
            dropped += 1
            continue
        prompt_id = fields.get("prompt_id")
        if prompt_id is not None and len(row.rewards) == 1 and not row.labelled:  # HALOs: a group as several rows
            prompt_id = f"{prompt_id} {row.prompt}"  # of several runs, one id may be of several prompts
            if prompt_id in first_of_prompt:
                for values in ("completions", "rewards", "tokens", "logps"):
                    getattr(first_of_prompt[prompt_id], values).extend(getattr(row, values))
                continue
            first_of_prompt[prompt_id] = row
        rows.append(row)
    asked = re.findall(r"\{(\w+)\}", config.prompt_template or "")
    lacking = {*asked} - {"prompt"}.union(*(row.fields for row in rows))
    require(not lacking or any(row.tokens for row in rows), f"--prompt-template: no row of {name} has {sorted(lacking)}")
    if dropped:
        warn(f"{source}: dropped {dropped} rows whose dialogues differ before the last turn, or end without an answer")
    require(rows, f"{source}: no rows")
    for row in rows:
        row.passes = float(passes or 1)
        require(row.labelled or len(row.rewards) != 1, f"{row.where}: a group of 1; a scored group needs two or more")
    return rows

def read_table(name: str, source: str) -> Iterator[dict]:
    """The rows of NAME[:[CONFIG:]SPLIT] as they stand: JSON lines by `json`, anything else by `datasets`."""
    name = embedded(name, "data") if source_name(name) == "embedded" else name
    path, *rest = [name] if Path(name).exists() else name.split(":")
    kind, split = FILE_KINDS.get(Path(path).suffix.lower()), rest[-1] if rest else "train"
    require(kind or not Path(path).is_file(), f"{source}: a file of no known kind; there are {', '.join(FILE_KINDS)}")
    require(not kind or Path(path).exists(), f"{source}: no such file")
    require(not kind or not rest, f"{source}: a file has no parts; leave :{':'.join(rest)} out")
    if kind in ("json", "csv"):  # values as they are written, where `datasets` would make dates and numbers of texts
        yield from read_text_table(Path(path), kind, source)
        return
    import datasets
    datasets.disable_progress_bars()
    advice = ("name a file, a data set of the hub, or a folder; `hf download NAME --repo-type dataset --local-dir "
              "FOLDER` makes one, given a network")
    with explained(source, f"is it really {kind}?" if kind else advice):
        if kind:
            table = datasets.load_dataset(kind, data_files={split: path}, split=split)
        else:
            table = datasets.load_dataset(path, *rest[:-1], split=split)
    yield from table

def read_text_table(path: Path, kind: str, source: str) -> Iterator[dict]:
    """JSON lines, a JSON list of objects, or CSV, of which all values are texts but for `label` and `reward`."""
    with explained(source, "mend the file"):
        if kind == "csv":
            reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig")), strict=True)
            names = reader.fieldnames or []
            require(len({*names}) == len(names), f"{source}: two columns have one name")
            for number, fields in enumerate(reader, 1):
                require(None not in [*fields, *fields.values()], f"{source} row {number}: it has other than "
                        f"the {len(names)} cells of the first line; put quotes around a cell with a comma")
                for key in {"label", "reward"} & fields.keys():
                    with contextlib.suppress(ValueError):  # no number
                        fields[key] = json.loads(fields[key].lower())
                yield {key: None if value == "" else value for key, value in fields.items()}
            return
        if path.suffix.lower() == ".json" and path.read_bytes().lstrip()[:1] == b"[":
            yield from json.loads(path.read_bytes())
            return
        file = path.open("rb")
    for number, line in enumerate(filter(bytes.strip, file), 1):
        with explained(f"{source} row {number}: not JSON", "mend the row or remove it"):
            yield json.loads(line)

# Our names for what data sets call otherwise: Alpaca, MATH, GSM8K, UltraFeedback-ArmoRM, HALOs. For others add a line.
PUBLISHED = (
    dict(prompt="instruction"), dict(prompt="problem"), dict(prompt="question"), dict(prompt="prompt"),
    dict(completion="output"), dict(completions="all_generated_responses", scores="all_rm_scores"),
    dict(chosen="output_A", rejected="output_B"))

def read_row(fields: dict, where: str, config: Config) -> Row | None:
    """Check one row, and bring the shapes in which data sets are published into one.

    A `prompt` comes with `completions` and `scores`, with `chosen` and `rejected`, with `completion` and `label`, or
    alone, to be sampled from; for other names see PUBLISHED. `chosen` and `rejected` without a prompt are whole
    dialogues whose common turns are the prompt; None is returned where not just an answer follows those.
    """
    fields = {key: value for key, value in fields.items() if value is not None}  # datasets fills gaps with None
    known = dict(fields)
    for names in PUBLISHED:
        if all(theirs in fields for theirs in names.values()):
            known |= {ours: fields[theirs] for ours, theirs in names.items()}
    if "instruction" in fields and "output" in fields and "reward" not in fields:  # Alpaca's are demonstrations
        known.setdefault("label", True)
        if "input" in fields and str(fields["input"]).strip():
            known["prompt"] = f"{fields['instruction']}\n\n{fields['input']}"
    if "output_A" in fields and "output_B" in fields:  # HALOs' label: whether A is better
        label = known.pop("label", None)
        require(label in (0, 1), f"{where}: 'label' is {label!r}; with output_A and output_B it must be 1 (A) or 0 (B)")
        if not label:
            known |= dict(chosen=known["rejected"], rejected=known["chosen"])

    def need(key: str, kind: str) -> Any:
        require(key in known, f"{where}: no '{key}'; {kind} needs it")
        return known[key]

    given = read_messages(known["prompt"], "prompt", where) if "prompt" in known else None
    pair = [known[key] for key in ("chosen", "rejected") if key in known]
    has_dialogues = any(isinstance(answer, list) and len(answer) > 1 for answer in pair)
    require(not pair or "completions" not in fields, f"{where}: both a pair and a group; remove one of the two")
    if len(pair) == 2 and (has_dialogues or given is None):
        dialogues = split_dialogues(known, where)
        if dialogues is None:
            return None
        known |= dialogues
    prompt = read_messages(need("prompt", "every row"), "prompt", where)
    has = {turn["content"].strip() for turn in prompt}
    require(given is None or {turn["content"].strip() for turn in given} <= has,
            f"{where}: 'prompt' is not among the turns before the answers in 'chosen'; remove one of the two")
    tokens, logps = fields.get("tokens"), fields.get("logps")
    is_rollout = isinstance(tokens, list) and isinstance(logps, list) and "completion" in known
    if config.prompt_template is not None and not is_rollout:  # whose prompt has it already
        values = fields | dict(prompt=prompt[-1]["content"])
        prompt[-1]["content"] = re.sub(r"\{(\w+)\}", lambda name: str(values.get(name[1], name[0])),
                                       config.prompt_template)
    if config.system is not None and prompt[0]["role"] != "system":
        prompt.insert(0, {"role": "system", "content": config.system})

    answers, rewards, labelled = [], [], False  # answers: with the names of their columns
    if "completions" in known or "scores" in known:
        texts, rewards = need("completions", "a scored group"), need("scores", "a scored group")
        require(isinstance(texts, list) and isinstance(rewards, list) and 0 < len(texts) == len(rewards),
                f"{where}: 'completions' and 'scores' must be lists of one length")
        answers = [("completions", text) for text in texts]
    elif pair:
        answers, rewards = [(key, need(key, "a pair")) for key in ("chosen", "rejected")], [1, 0]
    elif "completion" in known or "label" in known:
        answers = [("completion", need("completion", "a labelled completion"))]
        labelled = "label" in known or "reward" not in known
        rewards = [need("label", "a labelled completion") if labelled else known["reward"]]
        require(not labelled or rewards[0] in (True, False),
                f"{where}: 'label' is {rewards[0]!r}; it must be true or false")
    for value in [] if labelled else rewards:
        key = "scores" if "scores" in known else "reward"
        require(is_score(value), f"{where}: '{key}' holds {value!r}; it must be a number below 1e100")
    completions = []
    if is_rollout:
        require(0 < len(tokens) == len(logps) and all(isinstance(token, int) and token >= 0 for token in tokens)
                and all(isinstance(value, (int, float)) and -math.inf < value < 0.01 for value in logps),
                f"{where}: 'tokens' and 'logps' must be lists of one length, of token ids and of log-probs")
        is_whole = fields.get("temperature", 1) == fields.get("top_p", 1) == 1  # as log π_θ is, offline
        known_logps = [logps] if is_whole else []
        return Row(where, prompt, fields, [known["completion"]], [float(rewards[0])], labelled, [tokens], known_logps)
    for key, answer in answers:  # text, an assistant's message, or a dialogue that ends in one
        last = read_messages(answer, key, where)[-1]
        require(last["role"] == "assistant",
                f"{where}: '{key}' ends in a message of the {last['role']}; it must end in the assistant's")
        completions.append(last["content"])
    return Row(where, prompt, fields, completions, [float(value) for value in rewards], labelled)

def is_score(value: Any) -> bool:
    """Whether it is a number whose square is one, too."""
    return isinstance(value, (int, float)) and abs(value) < 1e100

def split_dialogues(known: dict, where: str) -> dict | None:
    """`chosen` and `rejected` as whole dialogues -> their common prompt and the two last turns."""
    chosen, rejected = (read_messages(known[key], key, where) for key in ("chosen", "rejected"))
    if len(chosen) > 1 or len(rejected) > 1:
        answered = all(turn["role"] == "assistant" and turn["content"].strip() for turn in (chosen[-1], rejected[-1]))
        if not answered or chosen[:-1] != rejected[:-1]:
            return None
        return dict(prompt=chosen[:-1], chosen=chosen[-1:], rejected=rejected[-1:])
    texts = [chosen[0]["content"], rejected[0]["content"]]
    prompt = os.path.commonprefix(texts)
    prompt = prompt[: max(prompt.rfind(" "), prompt.rfind("\n") + 1, 0)]  # up to the last whole word, as TRL cuts it
    require(prompt.strip(), f"{where}: no 'prompt', and 'chosen' and 'rejected' share no beginning that could be one")
    return dict(prompt=prompt, chosen=texts[0][len(prompt) :], rejected=texts[1][len(prompt) :])

def read_messages(value: Any, key: str, where: str) -> list[dict]:
    """Text or chat messages as messages; a transcript with "Human:" and "Assistant:" turns (HH-RLHF) is taken apart."""
    is_message = lambda m: isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
    if isinstance(value, str):
        turns, roles = re.split(r"\n\n(Human|Assistant): ?", value), dict(Human="user", Assistant="assistant")
        messages = [dict(role=roles[role], content=text.strip()) for role, text in zip(turns[1::2], turns[2::2])]
        if key == "prompt" or turns[0].strip() or len(messages) < 2:
            messages = [dict(role="user" if key == "prompt" else "assistant", content=value)]
    else:
        require(isinstance(value, list) and all(map(is_message, value)),
                f"{where}: '{key}' must be text or messages with a 'role' and a 'content', not {value!r:.60}")
        lost = {name for message in value for name in message if message[name]} & set(UNREAD)
        require(not lost, f"{where}: '{key}' has {', '.join(sorted(lost))}, which is not read; write it into 'content'")
        messages = [dict(role=message["role"], content=message["content"]) for message in value]
    text = value if isinstance(value, str) else messages[-1]["content"] if messages else ""
    require(text.strip(), f"{where}: '{key}' is empty; fill it or remove the row")
    require(len(text) <= 2_000_000, f"{where}: '{key}' has {len(text):,} characters; shorten it or remove the row")
    require(not any(re.search("[\ud800-\udfff]", message["content"]) for message in messages),
            f"{where}: '{key}' holds half of a character (a lone surrogate); mend or remove the row")
    return messages

UNREAD = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # parts of messages that some models have

def encode_rows(rows: list[Row], sampler: "Sampler", flag: str = "--data", online: bool = False) -> list[Group]:
    """Rows -> groups of token ids, each as often as its row comes in one pass over the data. Over-long prompts and
    completions are dropped. online: completions are to be drawn."""
    config, tokenizer, end, longest = sampler.config, sampler.tokenizer, sampler.stops[0], sampler.longest
    roles = {turn["role"] for row in rows for turn in row.prompt}
    if flag == "--data" and "assistant" in roles and not tokenizer.chat_template:
        adds_bos = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
        tokenizer.chat_template = "{{ bos_token }}" * adds_bos + TRANSCRIPT
        warn(f"{flag}: its dialogues are written as Human: … Assistant: …, as the model has no chat template")
    with explained(f"{flag}: the model's chat template refuses a prompt", "change the prompts, or leave out --system"):
        prompts = encode_prompts(tokenizer, [row.prompt for row in rows], where=[row.where for row in rows])
        lead, gap = place_answers(tokenizer, rows, prompts) if not online else ("", "")
    texts = [lead + gap * (not text[:1].isspace()) + text for row in rows for text in row.completions]
    special = re.compile("|".join(map(re.escape, tokenizer.all_special_tokens)))
    for row in rows if special.pattern else []:
        found = next(filter(None, map(special.search, [row.prompt[-1]["content"], *row.completions])), None)
        if found:
            warn(f"{row.where}: its text holds the special token {found[0]}, which is read as one; the chat template "
                 "adds them where they belong")
            break
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    skip = len(tokenizer(lead, add_special_tokens=False)["input_ids"])
    groups, foreign, long_prompts, long_completions, chance = [], 0, 0, 0, random.Random(config.seed)
    for number, (row, prompt) in enumerate(zip(rows, prompts)):
        answers = [next(encoded)[skip:] for _ in row.completions]
        completions = [[*itertools.takewhile(lambda token: token != end, answer), end] for answer in answers]
        is_ours = bool(row.tokens) and max(map(max, row.tokens)) < len(tokenizer) and (
            tokenizer.batch_decode(row.tokens, skip_special_tokens=True) == row.completions)
        if is_ours:
            completions = row.tokens
        foreign += bool(row.tokens) and not is_ours
        require(prompt, f"{row.where}: the tokenizer makes no tokens of the prompt; is it the model's own?")
        room = config.max_new_tokens if online or not completions else 1
        too_long = config.max_length and len(prompt) + room > config.max_length
        if too_long or (config.max_prompt_length and len(prompt) > config.max_prompt_length):
            long_prompts += 1
            continue
        require(len(prompt) + room <= longest,
                f"{row.where}: a prompt of {len(prompt)} tokens and a completion of {room} exceed the model's "
                f"{longest} positions; " + ("shorten it, or drop such rows with --max-prompt-length "
                f"{longest - room}" if room < longest else "choose a smaller --max-new-tokens"))
        limit = min(longest, config.max_length or longest) - len(prompt)
        short = [i for i, completion in enumerate(completions) if len(completion) <= limit]
        long_completions += len(completions) - len(short)
        if len(short) == len(completions) or len(short) > 1 or online:
            completions, rewards = [completions[i] for i in short], [row.rewards[i] for i in short]
            logps = [row.logps[i] for i in short] if is_ours and len(row.tokens) == len(row.logps) else []
            times = int(row.passes) + (chance.random() < row.passes % 1)  # a fraction is that share of the groups
            groups += itertools.repeat(Group(number, prompt, completions, rewards, row.labelled, logps=logps), times)
    if foreign:
        warn(f"{flag}: the tokens of {foreign} rows are not what this tokenizer makes of their text, which is taken "
             "instead, with an end; so their sampler is unknown")
    if long_prompts or long_completions:
        dropped = f"{long_prompts} prompts and {long_completions} completions"
        warn(f"{flag}: dropped {dropped} as over-long; see --max-length")
    require(groups, f"{flag}: no row is left; raise --max-length, --max-prompt-length or the rows' =PASSES")
    return groups

TRANSCRIPT = ("{% for turn in messages %}{{ '\n\n' + dict(user='Human').get(turn.role, turn.role.title()) + ':\n' }}"
              "{{ turn.content }}{% endfor %}{% if add_generation_prompt %}{{ '\n\nAssistant:\n' }}{% endif %}")

def place_answers(tokenizer: Any, rows: list[Row], prompts: list[list[int]]) -> tuple[str, str]:
    """Let answers begin where the chat template puts them. A template for models that think may write more before an
    answer than where the model is to go on (Qwen3: an empty thought), or less (DeepSeek-R1: no opened thought); prompts
    change in place, but for answers that go on with a thought. Returns what answers are tokenized behind, a newline
    where a tokenizer would else put a space in front of them (Llama 2's kind); and a space that is part of them."""
    if not tokenizer.chat_template:
        return "", ""

    def before_answers(dialogues: list[list[dict]]) -> list[str]:
        answered = render(tokenizer, [[*turns, dict(role="assistant", content="humanline")] for turns in dialogues])
        return [whole.rpartition("humanline")[0] for whole in answered]

    newline, alone, behind = tokenizer(["\n", "a", "\na"], add_special_tokens=False)["input_ids"]
    adds_space = behind[: len(newline)] == newline and behind[len(newline) :] != alone
    dialogue = [dict(role="user", content="a")]
    [start], [before] = render(tokenizer, [dialogue], add_generation_prompt=True), before_answers([dialogue])
    # A space before an answer is part of its first token.
    gap = " " if before.endswith(" ") and not adds_space and not start.endswith(" ") else ""
    plain, opened = [], []
    for i, row in enumerate(rows):
        if row.completions and not row.tokens and row.prompt[-1]["role"] != "assistant":
            if not any("</think>" in text for text in row.completions):
                plain.append(i)
            elif any(text.lstrip().startswith("<think>") for text in row.completions):
                opened.append(i)
    if plain and before and before.strip() != start.strip():
        warn(f"answers without a thought are trained behind {before[-32:]!r}, and drawn behind {start[-32:]!r}; "
             "--template-values enable_thinking=false may make them one")
        for i, text in zip(plain, before_answers([rows[i].prompt for i in plain])):
            prompts[i] = tokenizer(text.removesuffix(gap), add_special_tokens=False)["input_ids"]
    if opened and start.rstrip().endswith("<think>"):
        for i, text in zip(opened, render(tokenizer, [rows[i].prompt for i in opened], add_generation_prompt=True)):
            prompts[i] = tokenizer(text.rpartition("<think>")[0], add_special_tokens=False)["input_ids"]
    return "\n" if before.endswith("\n") and adds_space else "", gap

def encode_prompts(tokenizer: Any, prompts: list[list[dict]], answered: bool = False,
                   where: Iterable[str] = ()) -> list[list[int]]:
    """Token ids of prompts, by the chat template or as plain text, up to where the completion begins; with `answered`
    up to the end of the answers that they hold. where: their rows, for a message where a template leaves a turn out."""
    if tokenizer.chat_template:
        texts = render(tokenizer, prompts, add_generation_prompt=not answered)
        for row, prompt, text in zip(where, prompts, texts):
            for turn in prompt:  # but for a thought, which templates drop from earlier turns
                require(turn["content"].split("</think>")[-1].strip() in text, f"{row}: the model's chat template "
                        f"leaves out the turn of the {turn['role']}, {turn['content']!r:.60}")
        return tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template writes BOS itself
    encoded = tokenizer(["\n\n".join(message["content"] for message in prompt) for prompt in prompts])["input_ids"]
    if not answered:  # some tokenizers put an end behind every text
        encoded = [ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids for ids in encoded]
    return encoded

def render(tokenizer: Any, dialogues: list[list[dict]], **settings: Any) -> list[str]:
    """Each dialogue as the chat template writes it. A template is code that comes with a model: in the main thread it
    has ten seconds and a gigabyte, and more as the dialogues are more; beyond them TimeoutError, MemoryError."""
    def too_long(*_: Any) -> None:
        raise TimeoutError(f"it took longer than {seconds:.0f} s")

    def apply() -> list[str]:
        with unittest.mock.patch("transformers.utils.chat_template_utils.datetime", TemplateDay, create=True):
            return tokenizer.apply_chat_template(dialogues, tokenize=False, **settings)

    seconds = TEMPLATE_SECONDS + len(dialogues) / 100
    room = 2**30 + 32 * sum(len(str(message.get("content"))) for dialogue in dialogues for message in dialogue)
    if threading.current_thread() is not threading.main_thread():
        return apply()
    limits, before = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, too_long)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        if os.path.exists("/proc/self/statm"):  # on Linux
            room += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            most = min([room, *(limit for limit in limits if limit != resource.RLIM_INFINITY)])
            resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
        return apply()
    except MemoryError:
        raise MemoryError("it wants more than a gigabyte") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)

TEMPLATE_SECONDS = 10.0

class TemplateDay(datetime.datetime):
    """Today, to templates that write the date (Llama 3.2): always one day, or a run could not be resumed the next."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime.datetime:
        return cls(2024, 7, 26, tzinfo=tz)  # which Llama's own template takes where it knows no day

@dataclass
class Batch:
    """What one optimizer step trains on. DPO: chosen, rejected, chosen, rejected, …"""

    step: int
    sequences: list[Sequence]
    mismatched: list[Sequence]  # KTO: prompts with another prompt's completion, for z₀
    reward: float  # mean reward of all completions behind the batch
    no_difference: float | None = None  # share of the groups behind it whose rewards are all the same

class Batches:
    """The batches of a run, in order. Offline they are a function of the step; online they are made of rollouts.
    `pending` holds those that are made and not yet trained on."""

    def __init__(self, config: Config, groups: list[Group], longest: int, fingerprint: str = ""):
        self.config, self.groups, self.longest, self.loss = config, groups, longest, LOSSES[config.loss]
        self.pending: deque[Batch] = deque()
        self.orders: dict[int, list[int]] = {}  # of the present epoch
        self.fingerprint = fingerprint
        self.made_until = 0  # the last step whose batch has been made
        self.drawn_ahead: list | None = None  # --draw-ahead: the completions of the drawing after that
        # A prompt gives one unit, or where units are examples as many as its group has.
        per_prompt = config.group_size if self.loss.unit == "example" else 1
        self.prompts_per_step = math.ceil(config.batch_size / per_prompt)
        self.steps_per_epoch = max(1, len(groups) // self.prompts_per_step)
        if not config.sample_every:
            require(all(group.completions for group in groups),
                    "--data: prompts without completions; draw them with --sample-every 1")
            require(self.loss.unit == "example" or not any(group.labelled for group in groups),
                    "--data: labelled completions make no pairs or groups; use --loss kto, or --sample-every 1")
            mean_reward = mean([mean(group.rewards) for group in groups])
            self.units = [(unit, group) for group in groups
                          for unit in self.loss.make_units(group, config, mean_reward)]
            require(self.units, "--data: no row has a better and a worse completion, so there is nothing to train on")
            self.loss.set_weights([sequence for unit, _ in self.units for sequence in unit], config)
            self.steps_per_epoch = max(1, len(self.units) // config.batch_size)

    def next_prompts(self, step: int) -> list[Group]:
        """Online: the prompts of the steps from `step` to the next drawing."""
        steps = range(step, min(step + self.config.sample_every, self.config.steps + 1))
        return [group for step in steps for group in self.choose(self.groups, step, self.prompts_per_step)]

    def choose(self, pool: list, step: int, count: int) -> list:
        """The step's `count` members of `pool`; each epoch goes through it in an order of its own."""
        chosen = []
        for position in range((step - 1) * count, step * count):
            epoch, place = divmod(position, len(pool))
            if epoch not in self.orders:
                generator = torch.Generator().manual_seed(seed_for(self.config.seed, "order", epoch))
                self.orders = {epoch: torch.randperm(len(pool), generator=generator).tolist()}
            chosen.append(pool[self.orders[epoch][place]])
        return chosen

    def add_rollouts(self, rollouts: list[Group]) -> None:
        """Online: make the next batches, of the rollouts of `next_prompts`."""
        mean_reward = mean([mean(group.rewards) for group in rollouts])
        units = [self.loss.make_units(group, self.config, mean_reward) for group in rollouts]
        self.loss.set_weights([sequence for group in units for unit in group for sequence in unit], self.config)
        for start in range(0, len(rollouts), self.prompts_per_step):
            here = slice(start, start + self.prompts_per_step)
            self.add([*itertools.chain(*units[here])][: self.config.batch_size], rollouts[here])

    def make_offline(self, until: int) -> None:
        """Offline: make the batches up to the step `until`."""
        for step in range(self.made_until + 1, until + 1):
            self.add(*zip(*self.choose(self.units, step, self.config.batch_size)))

    def add(self, units: Iterable[list[Sequence]], groups: Iterable[Group]) -> None:
        """The next step's batch, of fresh sequences from these groups; for z₀ each prompt with the next other prompt's
        completion."""
        sequences = [dataclasses.replace(sequence) for unit in units for sequence in unit]
        mismatched = []
        for i, sequence in enumerate(sequences if self.loss.needs_mismatched else []):
            others = itertools.chain(sequences[i + 1 :], sequences[:i])
            other = next((other for other in others if other.prompt != sequence.prompt), None)
            if other is not None:
                room = self.longest - len(sequence.prompt)
                mismatched.append(Sequence(sequence.prompt, other.completion[:room]))
        self.made_until += 1
        no_difference = None
        if self.config.sample_every or self.loss.unit == "group":
            no_difference = mean([max(group.rewards) == min(group.rewards) for group in groups])
        reward = mean([mean(group.rewards) for group in groups])
        self.pending.append(Batch(self.made_until, sequences, mismatched, reward, no_difference))

    def units_until(self, step: int) -> list[list[Sequence]]:
        """Offline: the units that the batches up to a step are made of, each once."""
        numbers = range(len(self.units))
        used = {i for step in range(1, step + 1) for i in self.choose(numbers, step, self.config.batch_size)}
        return [self.units[i][0] for i in sorted(used)]

    def take(self, step: int) -> Batch:
        """The batch of a step, to be trained on now."""
        if not self.config.sample_every:
            self.make_offline(step)
        return self.pending.popleft()

def mean(values: Iterable[float]) -> float:
    return sum(values) / len(values)

# ---------- Rollouts --------------------------------------------------------------------------------------------------
# Completions drawn from the policy, with their rewards.

class Sampler:
    """Draws groups of completions from the policy and rewards them, for training and for measuring."""

    def __init__(self, policy: Module, tokenizer: Any, config: Config):
        self.policy, self.tokenizer, self.config = policy, tokenizer, config
        with explained(f"--model {config.model}: its chat template fails", "put another into the tokenizer's folder"):
            self.stops, self.longest = stop_ids(policy, tokenizer), max_positions(policy)
        self.pad = self.stops[0]  # padding is masked: any token that the model knows will do
        self.rewards: list[Reward] = []
        self.external: ExternalSampler | None = None  # draws instead of the policy's `generate`
        if config.sample_every or config.eval_data is not None:  # a reward may be a large model
            self.rewards = [Reward(spec, config, policy.device) for spec in config.reward]

    def check_rows(self, rows: list[Row]) -> None:
        """Raises UserError for the first row that lacks what a reward needs."""
        for reward in self.rewards if rows else []:
            for row, missing in zip(rows, reward.missing([row.fields for row in rows])):
                require(not missing, f"{row.where}: {missing}")

    def draw_rollouts(self, prompts: list[Group], rows: list[Row], size: int, step: int,
                      sampling: Config | None = None, ahead: Iterable[Group] = ()) -> list[Group]:
        """`size` completions with rewards for each prompt. The ranks share the calls of `generate`, and reward one
        call's completions while the next are drawn. The draws are a function of --seed, `step` and the calls, which
        --sample-tokens and the number of ranks decide. sampling: other settings than the run's. ahead: the prompts of
        the next drawing, to be begun now."""
        if self.external:
            completions = self.external.draw(prompts, size, step, sampling)
            if ahead:
                self.external.ask(ahead, size, step + self.config.sample_every, self.config)
        repeated = [group for group in prompts for _ in range(size)]
        most = math.ceil(len(repeated) / world_size())
        packed = pack([len(group.prompt) + self.config.max_new_tokens for group in repeated], self.config.sample_tokens)
        calls = [call[start : start + most] for call in packed for start in range(0, len(call), most)]  # for all ranks
        numbers = range(rank(), len(calls), world_size())
        if self.config.shard:  # all ranks must call equally often: the surplus changes nothing
            rounds = math.ceil(len(calls) / world_size())
            numbers = [(turn * world_size() + rank()) % len(calls) for turn in range(rounds)]
        drawn, rewards, results, longest = {}, {}, {}, self.config.max_new_tokens
        bar = tqdm(total=sum(len(calls[number]) for number in numbers) * longest, desc=f"drawing {len(repeated)}",
                   unit="token", unit_scale=True, leave=False, delay=1, disable=True if rank() else None)
        with ThreadPoolExecutor(1) as executor, bar, self.rewards_given_up(), gathered(self.policy, self.config):
            for count, number in enumerate(numbers, 1):
                groups = [repeated[i] for i in calls[number]]
                ids, seed = [group.prompt for group in groups], seed_for(self.config.seed, "draw", step, number)
                on_token, settings = functools.partial(bar.update, len(groups)), sampling or self.config
                if self.external:
                    drawn[number] = [completions[i] for i in calls[number]]
                else:
                    drawn[number] = sample(self.policy, ids, self.stops, self.pad, settings, seed, on_token)
                bar.update(sum(len(calls[number]) for number in numbers[:count]) * longest - bar.n)
                texts = self.tokenizer.batch_decode([ids for ids, _ in drawn[number]], skip_special_tokens=True)
                call_rows = [rows[group.row] for group in groups]
                rewards[number] = executor.submit(self.compute_rewards, texts, call_rows)
            bar.set_description(f"rewarding {len(repeated)}")
            for number in drawn:
                results |= zip(calls[number], zip(drawn[number], rewards[number].result()))
        results = {i: result for part in gather_from_ranks(results) for i, result in part.items()}
        for reward in self.rewards:  # one with a mistake in it fails on everything, from the start
            require(any(gather_from_ranks(reward.worked)), f"--reward {reward.name} failed on every sample of the "
                    f"first rollouts: {reward.failure!r:.200}")
        rollouts = []
        for number, group in enumerate(prompts):
            samples, parts = zip(*(results[i] for i in range(number * size, (number + 1) * size)))
            completions, logps = map(list, zip(*samples))
            rewards = [self.total(values) for values in parts]
            rollouts.append(Group(group.row, group.prompt, completions, rewards, parts=list(parts), logps=logps))
        return rollouts

    @contextlib.contextmanager
    def rewards_given_up(self) -> Iterator[None]:
        """On a second Ctrl-C no reward is waited for."""
        try:
            yield
        except KeyboardInterrupt:
            for process in [reward.process for reward in self.rewards if reward.process]:
                process.close()
            raise

    def compute_rewards(self, texts: list[str], rows: list[Row]) -> list[list[float | None]]:
        """What each reward gives for the completion of each row; None where it failed."""
        samples = [row.prompt for row in rows], texts, [row.fields for row in rows]
        given = [reward(*samples) for reward in self.rewards]
        return [[values[i] for values in given] for i in range(len(texts))]

    def total(self, parts: list[float | None]) -> float:
        """The reward of a completion: the weighted sum of `parts`."""
        values = [self.config.reward_failed if value is None else value for value in parts]
        return sum(reward.weight * value for reward, value in zip(self.rewards, values))

@contextlib.contextmanager
def gathered(policy: Module, config: Config) -> Iterator[None]:
    """Sharded, each rank gets all weights at the first forward pass of a `with` and keeps them to its end: otherwise
    `generate` gathers every layer for every token."""
    if config.shard:
        policy.set_reshard_after_forward(False)
    try:
        yield
    finally:
        for module in policy.modules() if config.shard else []:
            if hasattr(module, "set_reshard_after_forward"):  # FSDP has it
                module.set_reshard_after_forward(True, recurse=False)
                module.reshard()

@torch.no_grad()
def sample(policy: Module, prompts: list[list[int]], stops: list[int], pad: int, config: Config, seed: int,
           on_token: Callable[[], Any] = lambda: None) -> list[tuple[list[int], list[float]]]:
    """One completion per prompt from one call of `model.generate`: ids as sampled, up to and with the first of `stops`,
    and the log-prob of each under the distribution that it was drawn from, to five digits; one that ends without a stop
    hit --max-new-tokens. The draws are a function of `seed`; the global random state stays as it was. on_token() is
    called for each position."""
    from transformers import GenerationConfig, TemperatureLogitsWarper, TopPLogitsWarper
    generator, logps = torch.Generator(policy.device).manual_seed(seed), []  # (N, 1) log-probs for each position
    cumulative = torch.empty(0, dtype=torch.float64, device=policy.device)  # the same memory for each position

    def draw(ids: Tensor, scores: Tensor) -> Tensor:
        """Scores that leave one token of each row. Where the cumulative distribution passes a random number: that takes
        one of them, and `generate`'s own way one for each token of the vocabulary, a fifth of the whole time."""
        probs = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        torch.cumsum(probs, -1, dtype=torch.float64, out=cumulative)
        total = cumulative[:, -1:]
        points = torch.rand(total.shape, generator=generator, dtype=torch.float64, device=policy.device) * total
        tokens = torch.searchsorted(cumulative, points, right=True)
        logps.append((probs.gather(1, tokens) / total).log())
        on_token()
        return scores.fill_(-math.inf).scatter_(1, tokens, 0.0)

    settings = GenerationConfig(do_sample=False, eos_token_id=stops, pad_token_id=pad, disable_compile=True,
                                max_new_tokens=config.max_new_tokens)
    # Given here and not in `settings`, as those come behind what is given here.
    processors = [TemperatureLogitsWarper(config.temperature)] if config.temperature != 1 else []
    processors += [TopPLogitsWarper(config.top_p)] if config.top_p < 1 else []
    ids = padded(prompts, pad, "left").to(policy.device)
    mask = padded([[1] * len(prompt) for prompt in prompts], 0, "left").to(policy.device)
    was_training, model_settings = policy.training, policy.generation_config
    # What `settings` leaves out would come from the model's own, such as Qwen2.5's repetition penalty.
    policy.generation_config = GenerationConfig()
    policy.eval()
    eager = torch.compiler.set_stance("force_eager")
    try:
        with mixed_precision(policy.device, config), eager:
            drawn = policy.generate(ids, attention_mask=mask, past_key_values=prompt_cache(policy, ids, mask, config),
                                    generation_config=settings, synced_gpus=config.shard,
                                    logits_processor=[*processors, draw])
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(f"out of memory while drawing {len(prompts)} completions at once "
                          f"({str(error).splitlines()[0]:.200}); lower --sample-tokens") from error
    finally:
        policy.train(was_training)
        policy.generation_config = model_settings
    completions = []
    for tokens, values in zip(drawn[:, ids.shape[1] :].tolist(), torch.cat(logps, 1).tolist()):
        end = next((i for i, token in enumerate(tokens, 1) if token in stops), len(tokens))
        completions.append((tokens[:end], [round(value, 5) for value in values[:end]]))
    return completions

def prompt_cache(policy: Module, ids: Tensor, mask: Tensor, config: Config) -> Any:
    """The keys and values of (N, T) prompts but for the last token of each, computed once where neighbours are the same
    prompt; None where that is nowhere so, or where `can_share_prompts` or FSDP is against it.

    Where a completion cannot be longer than the prompts, the cache has its full length from the start, in the dtype of
    the multiplications: attention over empty places then costs less than a cache that grows with each token.
    """
    from transformers import DynamicCache, StaticCache
    different, index = torch.cat([ids, mask], 1).unique_consecutive(dim=0, return_inverse=True)
    if len(different) == len(ids) or ids.shape[1] < 2 or config.shard or not config.share_prompts:
        return None
    cache, dtype = DynamicCache(), torch.bfloat16 if config.dtype == "mixed" else policy.dtype

    class CastingCache(StaticCache):
        def update(self, keys: Tensor, values: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
            return super().update(keys.to(dtype), values.to(dtype), *args, **more)

    if config.max_new_tokens <= ids.shape[1]:
        cache = CastingCache(config=policy.config, max_cache_len=ids.shape[1] + config.max_new_tokens)
    ids, mask = different.tensor_split(2, 1)
    ids, mask = ids[:, :-1], mask[:, :-1]
    policy.base_model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                      past_key_values=cache, use_cache=True)
    cache.reorder_cache(index)
    return cache

class ExternalSampler:
    """--sampler vllm or FILE.py:function, in a process that the first rank starts; all ranks get what it draws. A
    request holds all that its completions depend on, so that it can be made ahead of its turn, or again."""

    def __init__(self, sampler: Sampler, batches: Batches, optimizer: torch.optim.Optimizer,
                 stack: contextlib.ExitStack):
        self.sampler, self.batches, self.config, self.process = sampler, batches, sampler.config, None
        self.log = Path(self.config.out, "sampler.log")
        self.request: tuple | None = None  # the one that has no answer yet
        self.changed, self.versions = True, 0  # whether the policy has changed since it was written; how often it was
        optimizer.register_step_post_hook(lambda *_: setattr(self, "changed", True))
        self.folder = from_first_rank(lambda: self.start(stack))

    def start(self, stack: contextlib.ExitStack) -> Path:
        """Start the process, until `stack` closes; returns the folder for weights, in memory where there is room."""
        config, room = self.config, sum(8 * p.numel() for p in self.sampler.policy.parameters())
        path, _, name = config.sampler.rpartition(":")
        if config.sampler == "vllm":
            path, name = str(Path(__file__).with_name("configs") / "sampler_vllm.py"), "sample"
        devices = dict(CUDA_VISIBLE_DEVICES=config.sampler_devices) if config.sampler_devices else {}
        environment = {key: value for key, value in os.environ.items()  # without what torchrun says of our ranks
                       if not re.fullmatch("(.*_)?(RANK|WORLD_SIZE)|(MASTER|TORCHELASTIC)_.*", key)} | devices
        # The run's own name, by which it finds what it left there when it was killed.
        key = hashlib.sha256(str(Path(config.out).resolve()).encode()).hexdigest()[:12]
        in_memory = os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > room
        folder = Path("/dev/shm" if in_memory else config.out, f"humanline-{key}")

        def end() -> None:
            self.process = None
            shutil.rmtree(folder, ignore_errors=True)
            if not Path(config.out, "config.toml").exists():  # the run did not begin
                self.log.unlink(missing_ok=True)

        with explained(f"--sampler {config.sampler}", "write FILE.py:function, as in configs/sampler_vllm.py",
                       ModuleNotFoundError="name the interpreter of an environment that has it with --sampler-python"):
            os.stat(path)
            stack.callback(end)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
            self.process = FunctionProcess(path, name, config.sampler_python or sys.executable, environment, self.log)
        return folder

    def ask(self, prompts: Iterable[Group], count: int, step: int, sampling: Config) -> None:
        """Ask for `count` completions of each prompt by the policy as it is, and do not wait for them."""
        dtype = "float32" if self.config.dtype == "float32" else "bfloat16"
        settings = dict(temperature=sampling.temperature, top_p=sampling.top_p, stop_ids=self.sampler.stops,
                        max_new_tokens=sampling.max_new_tokens, dtype=dtype)
        if self.changed:  # into a folder with another name, by which it can be told that they are others
            shutil.rmtree(self.folder / f"{self.versions}", ignore_errors=True)
            self.changed, self.versions = False, self.versions + 1
            write_weights(self.folder / f"{self.versions}", self.sampler.policy, self.sampler.tokenizer, dtype)
        self.request = ([group.prompt for group in prompts], settings, count, seed_for(self.config.seed, "draw", step),
                        str(self.folder / f"{self.versions}"))
        if rank() == 0:
            with contextlib.suppress(RuntimeError, OSError):  # `answer` will try again
                self.process.ask("call", *self.request)

    def answer(self) -> list[tuple[list[int], list[float]]]:
        """What was asked for, the first prompt's completions first, each as `sample` gives it. Where the process dies,
        hangs or answers something else, it is started anew and asked again; raises UserError if that fails, too."""
        request, self.request = self.request, None
        vocabulary = len(self.sampler.policy.get_input_embeddings().weight)

        def attempt() -> list:
            return checked_completions(self.process.answer(self.config.sampler_seconds), *request[:3], vocabulary)

        def from_process() -> list:
            try:
                return attempt()
            except RuntimeError as error:
                warn(f"--sampler {self.config.sampler}: {error}; starting it anew")
            self.process.end()
            with explained(f"--sampler {self.config.sampler}, started anew", f"see {self.log}; then --resume latest"):
                self.process.ask("call", *request)
                return attempt()

        return from_first_rank(from_process)

    def collect(self) -> None:
        """Wait for the completions that are drawn ahead, if there are any."""
        if self.request is not None:
            self.batches.drawn_ahead = self.answer()

    def draw(self, prompts: list[Group], count: int, step: int, sampling: Config | None) -> list:
        """`count` completions of each prompt, as `answer` gives them. sampling: settings, where they are to measure."""
        self.collect()
        if sampling is None and self.batches.drawn_ahead is not None:
            completions, self.batches.drawn_ahead = self.batches.drawn_ahead, None
            return completions
        self.ask(prompts, count, step, sampling or self.config)
        return self.answer()

def checked_completions(answer: Any, prompts: list, settings: dict, count: int, vocabulary: int) -> list:
    """What an external sampler has answered, as `ExternalSampler.answer` gives it. Raises RuntimeError where it is not
    `count` pairs of ids and log-probs for each prompt, up to and with the first stop token."""
    def check(is_so: bool, what: str) -> None:
        if not is_so:
            raise RuntimeError(f"it returned {what}")

    longest, stops = settings["max_new_tokens"], settings["stop_ids"]
    try:
        check([len(group) for group in answer] == [count] * len(prompts),
              f"other than {count} completions for each of {len(prompts)} prompts")
        completions = [(ids, [round(value, 5) for value in logps]) for group in answer for ids, logps in group]
        for ids, logps in completions:
            check(all(type(token) is int and 0 <= token < vocabulary for token in ids), "a token that is none")
            check(len(ids) <= longest, f"{len(ids)} tokens, where {longest} were the most")
            check(len(ids) == len(logps) and all(-math.inf < value < 0.01 for value in logps), "no log-prob of a token")
            end = next((i for i, token in enumerate(ids, 1) if token in stops), longest)
            check(len(ids) == end, "a completion that does not end with its first stop token")
    except (TypeError, ValueError):
        raise RuntimeError(f"it returned no pairs of token ids and log-probs, but {answer!r:.60}") from None
    return completions

def stop_ids(policy: Module, tokenizer: Any) -> list[int]:
    """Token ids that end a completion, the one that ends offline completions first."""
    configured = policy.generation_config.eos_token_id
    configured = configured if isinstance(configured, list) else [configured]
    stops, first = {tokenizer.eos_token_id, *configured} - {None}, tokenizer.eos_token_id
    if tokenizer.chat_template:  # what the template writes behind an answer, such as <|eot_id|> or <end_of_turn>
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "humanline"}]
        behind = render(tokenizer, [turns])[0].split("humanline")[-1].strip()
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
        if ids and ids[0] in stops | set(tokenizer.all_special_ids):
            first = ids[0]
    return [first, *sorted(stops - {first})]

# ---------- Rewards ---------------------------------------------------------------------------------------------------
# A number for each completion. What fails costs its sample --reward-failed, and never the run.

def split_reward(spec: str) -> tuple[str, float]:
    """NAME[=WEIGHT] -> its name and its weight, by default 1."""
    parts = re.fullmatch(r"(exact|math|model:.+?|.+\.py:\w+)(?:=(-?\d*\.?\d+))?", spec)
    require(parts, f"--reward {spec}: write exact, math, model:NAME or FILE.py:function, with =WEIGHT if it has one")
    return parts[1], float(parts[2] or 1)

class Reward:
    """What --reward names, as a function(prompts, completions, rows) that gives a finite float for each completion, or
    None where it failed, and raises nothing; raises UserError where it cannot be loaded. Prompts are lists of messages
    (dicts with a `role` and a `content`), completions texts, rows dicts with all that the data has. A file of yours may
    also have `prepare_reward()`, called once in its process, and `missing_for_reward(row)`: what a row lacks, or ""."""

    def __init__(self, spec: str, config: Config, device: torch.device):
        self.config, (self.name, self.weight) = config, split_reward(spec)
        self.process, self.worked, self.failure = None, False, ""
        ends = [re.split("[:/]", split_reward(other)[0])[-1] for other in config.reward]
        end = re.split("[:/]", self.name)[-1]
        self.short_name = end if ends.count(end) == 1 else self.name  # in the metrics
        path, _, function = self.name.rpartition(":")
        advice = {"model": "name a Hugging Face sequence classifier, or a local folder that holds one",
                  "": "put the project's configs/math_reward.py beside humanline.py"}
        own_advice = "write FILE.py:function, a function(prompts, completions, rows) -> list of floats"
        with explained(f"--reward {self.name}", advice.get(path, own_advice), math_verify="pip install math-verify"):
            if path == "model":
                self.function = model_reward(function, config, device)
            elif self.name == "exact":
                self.function = exact_reward
            else:
                if self.name == "math":
                    path = str(Path(__file__).with_name("configs") / "math_reward.py")
                os.stat(path)
                self.process = process = FunctionProcess(path, function)
                # One call for many samples. A hang must not last as long as the samples are many, hence the root.
                limit = lambda samples: config.reward_seconds * math.sqrt(len(samples[1]))
                self.function = lambda *samples: process("call", *samples, limit=limit(samples))

    def missing(self, rows: list[dict]) -> list[str]:
        """What each row lacks to be rewarded, or ""."""
        if self.process:
            with explained(f"--reward {self.name}", "its missing_for_reward(row) must return text"):
                return self.process("missing", rows, limit=300)
        lack = "no 'answer'; --reward exact compares the completion with it"
        return [lack if self.name == "exact" and row.get("answer") is None else "" for row in rows]

    def __call__(self, prompts: list, completions: list[str], rows: list[dict]) -> list[float | None]:
        """Where rewarding all of them together fails, each is rewarded alone; what still fails, or is no finite number,
        is None, and counts as --reward-failed. One warning counts them."""

        def attempt(*samples: list) -> list | Exception:
            try:
                values, count = self.function(*samples), len(samples[1])
            except Exception as error:
                return error.with_traceback(None)  # its frames would hold the tensors of a reward model
            is_good = isinstance(values, list) and len(values) == count
            return values if is_good else ValueError(f"{values!r:.60} is no list of {count}")

        # A hard formula costs its own sample alone.
        values, reasons = None if self.name == "math" else attempt(prompts, completions, rows), []
        if isinstance(values, Exception):
            reasons.append(values)
        if not isinstance(values, list):
            end = math.inf  # where all together took too long, one by one they get as long again
            if "took longer" in str(values):
                end = time.monotonic() + self.config.reward_seconds * math.sqrt(len(completions))
            alone = []
            for sample in zip(prompts, completions, rows):
                late = time.monotonic() > end
                alone.append(TimeoutError("no time was left") if late else attempt(*([part] for part in sample)))
            values = [value[0] if isinstance(value, list) else value for value in alone]
        good = [is_score(value) for value in values]
        reasons += [value for value, is_good in zip(values, good) if not is_good]
        self.worked, self.failure = self.worked or any(good), (reasons or [""])[0]
        if reasons:
            failed = f"{good.count(False)} of {len(good)} samples failed and count as {self.config.reward_failed:g}"
            warn(f"--reward {self.name}: {failed}; the first reason: {reasons[0]!r:.200}")
        return [float(value) if is_good else None for value, is_good in zip(values, good)]

def exact_reward(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """1 for a completion that equals the row's `answer`, or one of a list, white space around it aside."""
    answers = [row["answer"] if isinstance(row["answer"], list) else [row["answer"]] for row in rows]
    return [float(text.strip() in [str(answer).strip() for answer in right])
            for text, right in zip(completions, answers)]

def model_reward(name: str, config: Config, device: torch.device) -> Callable[..., list]:
    """A sequence classifier's `score`, or else its last logit, of each dialogue in the classifier's chat template."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.models.llama import modeling_llama
    vars(modeling_llama).setdefault("LLAMA_INPUTS_DOCSTRING", "")  # ArmoRM's code imports it; transformers 5 has none
    trust = dict(trust_remote_code=config.trust_remote_code)
    dtype = torch.bfloat16 if device.type == "cuda" and config.dtype != "float32" else torch.float32
    tokenizer, load = AutoTokenizer.from_pretrained(name, **trust), AutoModelForSequenceClassification.from_pretrained
    model, info = load(name, dtype=dtype, output_loading_info=True, **trust)
    if info["missing_keys"]:  # a language model, whose head would be random
        raise ValueError(f"it has no {', '.join(sorted(info['missing_keys']))}")
    model.to(device).eval()
    pad = model.config.get_text_config().pad_token_id  # shows where a sequence ends; without it, one by one

    @torch.no_grad()
    def reward(prompts: list, completions: list, rows: list) -> list:
        dialogues = [[*prompt, {"role": "assistant", "content": text}] for prompt, text in zip(prompts, completions)]
        encoded = encode_prompts(tokenizer, dialogues, answered=True)
        rewards: list = [f"{len(ids)} tokens, more than the reward model's positions" for ids in encoded]
        short = [i for i, ids in enumerate(encoded) if len(ids) <= max_positions(model)]
        widths = [len(encoded[i]) for i in short]
        for packed in pack(widths, 1 if pad is None else config.microbatch_tokens):
            here = [short[i] for i in packed]
            ids = padded([encoded[i] for i in here], pad or 0).to(device)
            mask = padded([[1] * len(encoded[i]) for i in here], 0).to(device)
            with mixed_precision(device, config):
                out = model(input_ids=ids, attention_mask=mask)
            values = out.logits if getattr(out, "score", None) is None else out.score
            for i, value in zip(here, values.float().view(len(here), -1)[:, -1].tolist()):
                rewards[i] = value
        return rewards

    return reward

class FunctionProcess:
    """A function of the user's file in a process of its own, where it may hang, crash or exhaust its memory: only the
    call fails, with RuntimeError. Arguments and results travel as JSON. A call beyond its limit, in seconds, ends the
    process and all that it has started; the next one starts another. python: another interpreter. environment: its
    variables, else ours. log: a file for what it prints."""

    def __init__(self, path: str, name: str, python: str = sys.executable, environment: dict[str, str] | None = None,
                 log: Path | None = None):
        self.code = f"{inspect.getsource(serve_function)}\nserve_function({path!r}, {name!r}, "
        self.python, self.environment, self.log, self.end, self.is_closed = python, environment, log, None, False
        self(limit=300)

    @staticmethod
    def kill(process: subprocess.Popen) -> int:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it may have ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        return process.wait()

    def __call__(self, *call: Any, limit: float) -> Any:
        self.ask(*call)
        return self.answer(limit)

    def close(self) -> None:
        """End the process, for good: a call under way fails, and so do all later ones."""
        self.is_closed = True
        self.end()

    def ask(self, *call: Any) -> None:
        """Send a call, and do not wait for its answer."""
        if self.is_closed:
            raise RuntimeError("it was ended")
        if self.end is None or not self.end.alive:
            self.pipe, theirs = multiprocessing.Pipe()
            # -P: no modules from the present folder. A session can be ended as a whole, and Ctrl-C is not for it.
            line = [self.python, "-P", "-c", f"{self.code}{theirs.fileno()})"]
            with open(self.log, "ab") if self.log else contextlib.nullcontext() as log:
                process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment,
                                           pass_fds=[theirs.fileno()], start_new_session=True)
            theirs.close()
            self.end = weakref.finalize(self, self.kill, process)  # with this object, or at exit
            self(limit=300)  # loads the file, which may load a model
        self.asked = time.monotonic()
        with contextlib.suppress(OSError):  # it is dead, as `answer` will find
            self.pipe.send_bytes(json.dumps(call, default=str).encode())

    def answer(self, limit: float) -> Any:
        """The answer to the last call, at most `limit` seconds after that."""
        try:
            if not self.pipe.poll(max(0, self.asked + limit - time.monotonic())):
                self.end()
                raise RuntimeError(f"took longer than {limit:.4g} s")
            answer = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            words = self.log.read_text(errors="replace").split("\n") if self.log else []
            words = next((f": {line.strip()}" for line in reversed(words) if line.strip()), "")
            raise RuntimeError(f"its process ended with status {self.end()}{words}") from None
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

def serve_function(path, name, pipe):
    """In a FunctionProcess: answer calls, the first of which only loads, until the pipe closes, even amid a call."""
    import contextlib, importlib.util, json, multiprocessing.connection, os, queue, signal, sys, threading
    pipe, calls, loaded = multiprocessing.connection.Connection(pipe), queue.SimpleQueue(), False
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where the machine has no memory left, Linux ends this process, and not the trainer

    def listen():
        try:
            while True:
                calls.put(json.loads(pipe.recv_bytes()))
        finally:
            os.killpg(0, signal.SIGKILL)  # with what it has started, such as an engine's workers

    threading.Thread(target=listen, daemon=True).start()
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # the file may import from its folder
    while True:
        kind, *values = calls.get() or ["load"]
        try:
            if not loaded:  # by its path, as it may have the name of a module of Python's
                spec = importlib.util.spec_from_file_location("users_file", path)
                module = importlib.util.module_from_spec(spec)
                sys.modules["users_file"] = module
                spec.loader.exec_module(module)
            value, function = None, getattr(module, name)
            if not loaded and hasattr(module, "prepare_reward"):
                module.prepare_reward()
            loaded = True
            if kind == "missing":
                missing = getattr(module, "missing_for_reward", lambda row: "")
                value = [missing(row) for row in values[0]]
            elif kind == "call":
                value = function(*values)
            answer = json.dumps({"value": value}, default=lambda value: value.tolist())  # tensors and arrays
        except BaseException as error:  # sys.exit() too
            answer = json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        pipe.send_bytes(answer.encode())

# ---------- The reference ---------------------------------------------------------------------------------------------

class Reference:
    """π_ref and π_old, and where their log-probs come from.

    The reference is, with humanline, the policy as of the last sync; as published, the initial policy, or for DPO and
    KTO online the old policy (the authors' rounds). The old policy drew the rollouts; see `takes_old_policy`.

    **copy** keeps a second model, which computes each batch's log-probs just before its step; with --lora only second
    adapters, which the policy swaps in. **lookahead** keeps no second model: at a sync π_ref equals the policy, so one
    forward pass of the policy over the batches up to the next sync gives all reference log-probs needed until then. If
    the rollouts end before the next sync, the reference's weights (not a model; in host memory) are stored, and the
    policy swaps them in after the next rollouts. With --lora these weights are the adapters alone.
    """

    def __init__(self, policy: Module, batches: Batches, config: Config):
        self.policy, self.batches, self.config = policy, batches, config
        self.syncs, self.apart = is_synced(config), takes_old_policy(config)
        require(config.ref != "lookahead" or not config.sync_drift,
                "--ref lookahead must know when the next sync comes, and --sync-drift does not; use --ref copy")
        require(config.ref != "lookahead" or config.sync_alpha == 1,
                "--ref lookahead takes the policy as reference, and --sync-alpha below 1 a mixture; use --ref copy")
        self.copies = is_copied(config)
        self.model: Module | None = None
        if self.copies and not config.lora:
            self.model = load_policy(dataclasses.replace(config), policy.device)[0].requires_grad_(False)
        self.weights: list[Tensor] | None = None  # put aside
        if self.model is None and (self.copies or (config.kl_beta and self.apart)):
            self.put_weights_aside()  # the initial policy's, for the whole run, or as the copy
        self.until = 0  # the last step that the present reference serves
        if config.stale == "taper" and not config.sample_every:  # unknown samplers: the initial policy stands in
            unknown = [s for unit in batches.units_until(config.steps) for s in unit if s.sampler_logps is None]
            attach_logps("sampler_logps", policy, Batch(0, unknown, [], None), config)

    def sync(self, step: int) -> None:
        """π_ref ← π_θ, for the steps after `step`."""
        if self.copies:
            targets = self.weights if self.model is None else self.model.parameters()
            alpha = self.config.sync_alpha if self.syncs else 1  # else it becomes the old policy, whole
            with torch.no_grad():
                for target, value in zip(map(local_part, targets), trained(self.policy).values()):
                    value = local_part(value).to(target.device)
                    target.lerp_(value, alpha) if alpha < 1 else target.copy_(value)
            return
        known_until = self.batches.made_until if self.config.sample_every else self.config.steps
        self.until = self.config.steps if self.syncs else known_until
        if self.config.sync_k:
            self.until = min(self.until, step - step % self.config.sync_k + self.config.sync_k)
        if not self.config.sample_every:
            self.batches.make_offline(self.until)
        self.attach_to_pending("ref_logps", step + 1, self.until)
        self.weights = None
        if known_until < self.until:
            self.put_weights_aside()

    def attach_to_pending(self, name: str, first: int, last: int) -> None:
        """The log-probs of the pending batches from step `first` to `last`, by the policy as it is."""
        batches = [batch for batch in self.batches.pending if first <= batch.step <= last]
        for batch in tqdm(batches, desc="reference", leave=False, delay=1, disable=True if rank() else None):
            attach_logps(name, self.policy, batch, self.config)

    def after_rollouts(self, step: int) -> None:
        """Batches from `step` on have new rollouts: compute their log-probs under the old policy (the policy as it is
        now) and the reference, up to its next sync. With rollouts for one step the old policy is the policy; d = 0."""
        until = self.batches.made_until
        if self.apart and until > step:
            self.attach_to_pending("old_logps", step, until)
        if not self.apart and not self.syncs and (self.copies or until > step):
            self.sync(step - 1)
        if self.weights is not None and not self.copies:
            with self.borrowed_weights():
                self.attach_to_pending("ref_logps", step, until if self.apart else self.until)
            if self.syncs and until >= self.until:
                self.weights = None

    def attach_to_batch(self, batch: Batch) -> None:
        """A copy computes a batch's log-probs when its turn comes; looking ahead has computed them before."""
        if self.copies:
            with self.borrowed_weights() if self.model is None else contextlib.nullcontext():
                attach_logps("ref_logps", self.model or self.policy, batch, self.config)

    def put_weights_aside(self) -> None:
        self.weights = [local_part(p.detach()).to("cpu", copy=True) for p in trained(self.policy).values()]

    @contextlib.contextmanager
    def borrowed_weights(self) -> Iterator[None]:
        """The policy with the reference's weights, for the length of a `with`. They change places some rows at a time,
        so that no more memory is needed."""
        def swap() -> None:
            for p, aside in zip(trained(self.policy).values(), self.weights):
                rows = (torch.atleast_1d(tensor).split(4096) for tensor in (local_part(p.detach()), aside))
                for weight, other in zip(*rows):
                    present = weight.to("cpu", copy=True)
                    weight.copy_(other)
                    other.copy_(present)

        swap()
        try:
            yield
        finally:
            swap()

def is_copied(config: Config) -> bool:
    """Whether the reference is a copy, and does not look ahead."""
    # With rollouts at every step each sync would put the weights aside.
    needs_copy = is_synced(config) and (config.sync_drift or config.sync_alpha < 1 or config.sample_every == 1)
    is_asked = config.kl_beta or not takes_old_policy(config)
    return bool(is_asked and (config.ref == "copy" or (config.ref == "auto" and needs_copy)))

def attach_logps(name: Literal["ref_logps", "old_logps", "sampler_logps"], model: Module, batch: Batch,
                 config: Config) -> None:
    """Write `model`'s log-probs into the batch as those of the reference, the old policy or the sampler."""
    values = lambda microbatch: log_probs(model, microbatch, logits_temperature(config))[0]
    with mixed_precision(model.device, config):
        for sequences in (batch.sequences, batch.mismatched):
            sequences = [sequence for sequence in sequences if not LOSSES[config.loss].is_idle(sequence, config)]
            for sequence, logps in zip(sequences, completion_values(model, sequences, config, values)):
                setattr(sequence, name, logps.clone())

# ---------- Log-probs and microbatches --------------------------------------------------------------------------------

@torch.no_grad()
def completion_values(model: Module, sequences: list[Sequence], config: Config,
                      values: Callable[[list[Sequence]], Tensor]) -> list[Tensor]:
    """values(microbatch), an (N, T) tensor, of all sequences, as a (len(completion),) tensor for each, on the CPU. The
    ranks share the work, and all know the result."""
    def compute() -> list[Tensor]:
        parts = [torch.zeros(len(sequence.completion), device=model.device) for sequence in sequences]
        microbatches = cut(sequences, config)
        for microbatch in tqdm(microbatches, desc="log-probs", leave=False, delay=2, disable=True if rank() else None):
            for sequence, value in zip(microbatch, completion_parts(values(microbatch), microbatch)):
                parts[sequence.index] = value
        return parts

    parts = fit_memory(compute, sequences, config)
    flat = torch.cat(parts) if parts else torch.zeros(0, device=model.device)
    return list(sum_over_ranks(flat).cpu().split([len(part) for part in parts]))

def fit_memory(work: Callable[[], Any], sequences: list[Sequence], config: Config) -> Any:
    """work() on sequences, and where it runs out of memory, on a GPU or on the CPU, again with smaller microbatches."""
    while True:
        try:
            return work()
        except RuntimeError as error:
            if not is_out_of_memory(error) or config.shard:
                raise  # sharded, the other ranks are in the middle of an exchange
            reason, longest = str(error).splitlines()[0], max(map(len, sequences))
        if config.microbatch_tokens <= longest:
            raise MemoryError(f"out of memory with one sequence of {longest} tokens at a time ({reason:.200}); --plan "
                              f"says what takes it; {less_memory(config)}")
        config.microbatch_tokens = math.ceil(config.microbatch_tokens / 2)
        warn(f"out of memory; from here on --microbatch-tokens {config.microbatch_tokens}, which changes no result")

def is_out_of_memory(error: RuntimeError) -> bool:
    return bool(re.search("out of memory|allocate memory", str(error)))  # a GPU's words, and the CPU's

def less_memory(config: Config) -> str:
    """What takes less memory and is not asked for yet."""
    must_copy = config.lora or config.sync_drift or config.sync_alpha < 1
    ways = {"--lora 16": config.lora, "--ref lookahead": must_copy or not is_copied(config),
            "--checkpoint-activations": config.checkpoint_activations, "--shard": config.shard}
    return f"less takes: {', '.join(way for way, is_set in ways.items() if not is_set)}, a lower --max-length"

def cut(sequences: list[Sequence], config: Config) -> list[list[Sequence]]:
    """This rank's share of a batch, in microbatches. Sharded, all ranks must have as many: [] makes up the number."""
    for index, sequence in enumerate(sequences):
        sequence.index = index
    ranks, most = world_size(), config.microbatch_tokens
    units = inseparable(sequences, math.inf, config)  # the same on all ranks, though some may have less memory
    units.sort(key=lambda unit: sum(map(width, forward_rows(unit))), reverse=True)
    cuts = []
    for i in range(ranks):  # dealt back and forth, so that the ranks have equal work
        share = units[i :: 2 * ranks] + units[2 * ranks - 1 - i :: 2 * ranks]
        parts = [part for unit in share for part in inseparable(unit, most, config)]
        rows = [forward_rows(part) for part in parts]
        packed = pack([max(map(width, part)) for part in rows], most, [len(part) for part in rows])
        cuts.append([[sequence for i in indices for sequence in parts[i]] for indices in packed])
    mine = cuts[rank()]
    if config.shard:
        mine += [[]] * (max(map(len, cuts)) - len(mine))
    return mine

def inseparable(sequences: list[Sequence], most: float, config: Config) -> list[list[Sequence]]:
    """What no cut parts: a DPO pair, otherwise a row. Neighbours with one prompt share rows of at most `most` tokens.
    That computes the prompt once, but attention runs over the whole row: up to three prompts long, that is at most 9/8
    of what attention costs apart, and up to 256 tokens it is little next to all else. Longer rows do not pay."""
    pairs, length = LOSSES[config.loss].unit == "pair", 0
    for i, sequence in enumerate(sequences):
        length += len(sequence.completion)
        is_first = i % 2 == 0 if pairs else i == 0
        fits = length <= min(most, max(3 * len(sequence.prompt), 256))
        sequence.shares_prompt = (config.share_prompts and fits and not is_first
                                  and sequence.prompt == sequences[i - 1].prompt)
        if not sequence.shares_prompt:
            length = len(sequence)
    if pairs:
        return [sequences[i : i + 2] for i in range(0, len(sequences), 2)]
    return forward_rows(sequences)

def forward_rows(sequences: list[Sequence]) -> list[list[Sequence]]:
    """What lies in each row of a forward pass: a sequence, and those behind it that share its prompt."""
    rows: list[list[Sequence]] = []
    for sequence in sequences:
        if not rows or not sequence.shares_prompt:
            rows.append([])
        rows[-1].append(sequence)
    return rows

def width(row: list[Sequence]) -> int:
    """Tokens of a row of the forward pass: the prompt once, and the completions."""
    return len(row[0].prompt) + sum(len(sequence.completion) for sequence in row)

def pack(widths: list[int], tokens: float, heights: list[int] | None = None) -> list[list[int]]:
    """Indices of things of like widths, each `heights` rows (1), together: at most `tokens` tokens with padding, or one
    thing. The widest come first."""
    packed: list[list[int]] = []
    height, widest = 0, 0  # of the present pack, whose first thing is the widest
    for i in sorted(range(len(widths)), key=lambda i: widths[i], reverse=True):
        rows = heights[i] if heights else 1
        if not packed or (height + rows) * widest > tokens:
            packed.append([])
            height, widest = 0, widths[i]
        packed[-1].append(i)
        height += rows
    return packed

def log_probs(model: Module, sequences: list[Sequence], temperature: float = 1.0,
              note_entropy: Callable[[Tensor], None] | None = None) -> tuple[Tensor, Tensor]:
    """log π(y_t | x, y_<t) of every completion token: (N, T) log-probs, 0 elsewhere, and the (N, T) mask.

    Sequences are padded on the right, so that no completion token can attend to padding and no mask is needed. Where
    some share a prompt, a row of the forward pass is the prompt but for its last token, and then for each completion
    that token and the completion, whose positions and attention are those of the prompt's only continuation.
    """
    sequences = sequences or [Sequence([0, 0], [])]
    rows = []  # ids, labels, positions and segments of each; segment 0 is the prompt, which all others see
    for row in forward_rows(sequences):
        ids, labels, positions, segments = lists = [], [], [], []
        for segment, sequence in enumerate(row, 1):
            last = len(sequence.prompt) - 1
            start = 0 if segment == 1 else last  # behind a shared prompt only its last token comes again
            tokens = sequence.prompt + sequence.completion
            ids += tokens[start:-1]
            labels += [-100] * (last - start) + sequence.completion
            positions += range(start, len(tokens) - 1)
            segments += [0] * (last - start) + [segment] * len(sequence.completion)
        rows.append(lists)
    ids, labels, positions, segments = zip(*rows)
    on_device = lambda tensor: tensor.to(model.device, non_blocking=True)
    labels, layout, shared = padded(labels, -100), {}, len(ids) < len(sequences)
    mask = labels != -100
    if shared:
        segment = on_device(padded(segments, 0))
        attends = (segment[:, None] == 0) | (segment[:, None] == segment[:, :, None])  # (rows, query, key)
        layout = dict(position_ids=on_device(padded(positions, 0)), attention_mask=attends.tril()[:, None])
    # The labels stay on the CPU, so that picking their positions keeps no GPU waiting.
    compute = getattr(model, "completion_logps", functools.partial(completion_logps, model))
    logps = compute(padded(ids, 0).to(model.device), labels, temperature, note_entropy, **layout)
    if shared:  # from rows of several completions to a row for each
        values = logps.flatten().index_select(0, on_device(mask.flatten().nonzero()[:, 0]))
        mask = padded([[0] * (len(s.prompt) - 1) + [1] * len(s.completion) for s in sequences], 0).bool()
        places = tuple(map(on_device, mask.nonzero(as_tuple=True)))
        logps = logps.new_zeros(mask.shape).index_put(places, values)
    return logps, on_device(mask)

def completion_logps(model: Module, ids: Tensor, labels: Tensor, temperature: float = 1.0,
                     note_entropy: Callable[[Tensor], None] | None = None, **layout: Tensor) -> Tensor:
    """Log-probs of `labels` (N, T) from token ids (N, T), by the model's trunk and its output head: (N, T).

    layout: position_ids (N, T) and attention_mask (N, 1, T, T), where rows hold more than one sequence.
    """
    hidden = model.base_model(input_ids=ids, use_cache=False, **layout).last_hidden_state
    head, text = model.get_output_embeddings(), model.config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    temperature *= (getattr(text, "logits_scaling", None) or 1.0) / (getattr(text, "logit_scale", None) or 1.0)
    return token_logps(hidden, head.weight, labels, head.bias, softcap, temperature=temperature,
                       note_entropy=note_entropy)

def completion_parts(values: Tensor, sequences: list[Sequence]) -> list[Tensor]:
    """The completion tokens of each row of an (N, T) tensor, as `log_probs` lays them out."""
    return [row[len(sequence.prompt) - 1 : len(sequence) - 1] for row, sequence in zip(values, sequences)]

def pad_completions(parts: list[Tensor], sequences: list[Sequence], like: Tensor) -> Tensor:
    """The inverse of `completion_parts`: an (N, T) tensor on like's device, 0 elsewhere."""
    values = torch.zeros(like.shape, dtype=parts[0].dtype if parts else like.dtype)
    for target, part in zip(completion_parts(values, sequences), parts):
        target.copy_(part)
    return values.to(like.device, non_blocking=True)

def padded(rows: list[list[int]], value: int, side: str = "right") -> Tensor:
    """Rows of many lengths as one (N, T) tensor."""
    rows = [torch.tensor(row, dtype=torch.long) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)

def token_logps(hidden: Tensor, lm_head_weight: Tensor, labels: Tensor, bias: Tensor | None = None,
                softcap: float | None = None, chunk_size: int = 512, temperature: float = 1.0,
                note_entropy=None) -> Tensor:
    """Log-probabilities of `labels`, from the hidden states that predict them.

    Only positions with a label meet the output head, `chunk_size` of them at a time, so that memory grows with
    chunk_size x vocabulary and not with the batch. Computed in float32 (float64 for float64 input).

    Paste with `TokenLogps`.

    Args:
        hidden: (N, T, D) final hidden states; hidden[:, t] predicts labels[:, t].
        lm_head_weight: (V, D) output embeddings, tied or not.
        labels: (N, T) token ids; -100 is ignored.
        bias: (V,) bias of the output head.
        softcap: logits become softcap * tanh(logits / softcap), as in Gemma 2.
        temperature: then they are divided by this, as they were for sampling.
        note_entropy: called for each chunk with the entropies, in nats, at every 8th of its positions.
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
        logps = TokenLogps.apply(picked, lm_head_weight, bias, labels, softcap, temperature, chunk_size, keep,
                                 note_entropy)
    return logps.new_zeros(hidden.shape[:2]).index_put((n, t), logps)

class TokenLogps(torch.autograd.Function):
    """log softmax(softcap(h Wᵀ + b) / T)[label] of M tokens, `chunk` rows of logits at a time, in memory used again.

    The last `keep` chunks wait for the backward pass, which computes the others anew: half the time of checkpointing.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, softcap, temperature, chunk, keep, note_entropy):
        logps, ctx.kept = [], []
        for rows, label in zip(hidden.split(chunk), labels[:, None].split(chunk)):
            out = ctx.kept.pop(0)[0] if len(ctx.kept) == keep else None
            out, scale, chunk_logps = TokenLogps.of_chunk(
                out, rows, weight, bias, label, softcap, temperature, note_entropy)
            logps.append(chunk_logps[:, 0])
            ctx.kept.append((out, scale))
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.softcap, ctx.temperature, ctx.chunk = softcap, temperature, chunk
        return torch.cat(logps)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, bias, labels = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        out, kept, ctx.kept = None, ctx.kept, []  # a second backward pass computes all chunks anew
        for start in reversed(range(0, len(labels), ctx.chunk)):
            here = slice(start, start + ctx.chunk)
            if kept:
                out, scale = kept.pop()
            else:
                out, scale, _ = TokenLogps.of_chunk(
                    out, hidden[here], weight, bias, labels[here, None], ctx.softcap, ctx.temperature)
            d_logits, factor = out.to(weight.dtype), -grad[here, None] / scale  # on the short side of each product
            d_hidden[here] = (d_logits @ weight) * factor
            if d_weight is not None:
                d_weight.addmm_(d_logits.T, (hidden[here] * factor).to(weight.dtype))
            if d_bias is not None:
                d_bias += (factor.T @ out)[0]
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None

    @staticmethod
    def of_chunk(out, hidden, weight, bias, labels, softcap, temperature, note_entropy=None):
        """For n tokens: -d log-prob / d logits times a scale (n, V), that scale (n, 1), and the log-probs (n, 1)."""
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
        if temperature != 1:
            out /= temperature
        label_logits, largest = out.gather(1, labels), out.amax(1, keepdim=True)
        some = None if note_entropy is None else out[::8] - largest[::8]
        scale = out.sub_(largest).exp_().sum(1, keepdim=True)
        if some is not None:  # log Σ exp(l) - Σ p l, with the logits l less the largest
            note_entropy(scale[::8, 0].log() - some.mul_(out[::8]).sum(1) / scale[::8, 0])
        out.scatter_add_(1, labels, -scale)  # softmax - onehot(label), times the scale
        logps = label_logits - largest - scale.log()
        return out if softcap is None else out.mul_(slope), scale * temperature, logps

# ---------- Ranks -----------------------------------------------------------------------------------------------------
# One process per GPU, started by torchrun; without it, one process. Every rank knows every batch whole (token ids
# are small) and works on its share of it, so that what is exchanged is sums.

def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0

def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1

def join_ranks() -> torch.device:
    """Join the other ranks where torchrun started this process; returns the device to work on."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device, count = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), torch.cuda.device_count()
        require(device.index < count, f"rank {device.index} has no GPU, there are {count}; start so many with "
                f"--nproc_per_node {count}")
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        # A name of its own for each start: after a restart torchrun's store still holds the addresses of the dead.
        store, this_rank, ranks = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        patience = datetime.timedelta(hours=4)  # while one writes a large model, or its engine starts anew
        store.set_timeout(patience)
        dist.init_process_group(backend, store=store, rank=this_rank, world_size=ranks, timeout=patience)
    return device

def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of all ranks' tensors, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor

def gather_from_ranks(value: Any) -> list:
    """Every rank's object, on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values

def from_first_rank(make: Callable[[], Any]) -> Any:
    """make() of rank 0, or the UserError that it raises, on every rank."""
    try:
        made = make() if rank() == 0 else None
    except UserError as error:
        made = error
    made = gather_from_ranks(made)[0]
    if isinstance(made, UserError):
        raise made
    return made

@contextlib.contextmanager
def ranks_in_turn() -> Iterator[None]:
    """A machine's ranks one after the other: what the first builds the next finds, and memory holds one copy."""
    my_turn = int(os.environ.get("LOCAL_RANK", 0))
    for turn in range(int(os.environ.get("LOCAL_WORLD_SIZE", my_turn + 1))):
        if turn == my_turn:
            yield
        if dist.is_initialized():
            dist.barrier()

def seed_for(*parts: int | str) -> int:
    """A seed for what the parts name: all randomness is a function of --seed, of the step, and of what it is for."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])

def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

def full(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered from all ranks (all must ask); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

@torch.no_grad()
def copy_full(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    if isinstance(target, DTensor):
        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)

# ---------- Checkpoints and the final folder --------------------------------------------------------------------------
# A folder written beside and renamed, with the hash of every file; safetensors and JSON, never a pickle.

class Saver:
    """Writes checkpoints while the loop goes on: it waits for the copy of its state, not for the disk. A checkpoint is
    everything that the next step depends on; randomness needs none, as a function of the seed and the step. Rank 0
    writes, tensors whole, so that any number of ranks can read."""

    def __init__(self, folder: Path, config: Config, newest: Path | None):
        self.folder, self.config, self.newest = folder, config, newest
        self.writer, self.writing = ThreadPoolExecutor(1), None
        self.copies: dict[str, Tensor] = {}  # kept from save to save: fresh memory is slow to come by

    def save(self, policy: Module, optimizer: torch.optim.Optimizer, reference: Reference, step: int) -> None:
        self.wait()
        parameters, batches = trained(policy), reference.batches
        moments = {f"{key}:{name}": v for name, p in parameters.items() for key, v in optimizer.state[p].items()}
        files = dict(policy=self.copy("policy", parameters), optimizer=self.copy("optimizer", moments))
        if reference.model is not None:
            files["reference"] = self.copy("reference", dict(reference.model.named_parameters()))
        elif reference.weights is not None:
            with reference.borrowed_weights():
                files["reference"] = self.copy("reference", parameters)
        state = dict(step=step, base=policy.base_hash, reference_until=reference.until,
                     made_until=batches.made_until, settings=dict(vars(self.config)), data=batches.fingerprint,
                     batches=[snapshot(batch) for batch in batches.pending], drawn_ahead=batches.drawn_ahead)
        if rank() == 0:
            self.writing = self.writer.submit(self.write, self.folder / f"step-{step:08d}", files, state)

    def copy(self, kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors, gathered by all ranks, in the host memory of rank 0."""
        copies, empty = {}, functools.partial(torch.empty_like, device="cpu", memory_format=torch.contiguous_format)
        for name, tensor in tensors.items():
            value, key = full(tensor.detach()), f"{kind}:{name}"
            if rank() == 0:
                copies[name] = self.copies.setdefault(key, empty(value)).copy_(value)
        return copies

    def write(self, path: Path, files: dict[str, dict[str, Tensor]], state: dict) -> None:
        from safetensors.torch import save_file
        if path.exists():  # a damaged one, which was not resumed from
            shutil.rmtree(path)
        with new_folder(path) as folder:
            for kind, tensors in files.items():
                save_file(tensors, folder / f"{kind}.safetensors")
            (folder / "state.json").write_text(json.dumps(state, default=Tensor.tolist))
        self.newest = path
        saved = sorted(path.parent.glob("step-*"))
        here = saved.index(path) + 1  # later ones are damaged, or of a run that was taken back to an earlier step
        for old in (*saved[: max(0, here - self.config.keep)], *saved[here:]):
            shutil.rmtree(old)

    def wait(self) -> None:
        """Until the disk has it. What could not be written costs a warning: run and earlier checkpoints stay."""
        if self.writing is not None and (error := self.writing.exception()) is not None:
            warn(f"could not write a checkpoint to {self.folder}: {error}; the newest is {self.newest}")
        self.writing = None

@contextlib.contextmanager
def new_folder(path: Path, hashed: bool = True) -> Iterator[Path]:
    """A folder to fill, which then becomes `path` by a rename, so that `path` is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        yield folder
        if hashed:
            (folder / "files.json").write_text(json.dumps(hashes(folder)))
        for file in (folder, *folder.iterdir()):
            file.chmod(0o755 if file.is_dir() else 0o644)
        folder.rename(path)

def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file in a folder, but of the one that holds them."""
    return {path.name: hashlib.file_digest(path.open("rb"), "sha256").hexdigest()
            for path in sorted(folder.iterdir()) if path.name != "files.json"}

def find_damage(folder: Path) -> str:
    """What is wrong with a folder whose hashes were written, or ""."""
    try:
        different = json.loads((folder / "files.json").read_text()).items() ^ hashes(folder).items()
    except (OSError, ValueError) as error:
        return f"not a whole checkpoint ({error})"
    damaged = sorted({name for name, _ in different})
    return f"damaged: {', '.join(damaged)}" if damaged else ""

def find_checkpoint(config: Config) -> Path | None:
    """What --resume names: the newest whole checkpoint of --out, if there is one, or the one at a path."""
    if config.resume is None:
        return None
    paths = [Path(config.resume)]
    if config.resume == "latest":
        paths = sorted(Path(config.out, "checkpoint").glob("step-*"), reverse=True)
    for path in paths:
        damage = find_damage(path)
        if not damage:
            return path
        require(config.resume == "latest", f"{path}: {damage}")
        warn(f"{path}: {damage}; trying the one before")
    return None

# What may differ between a run and its resume: how long the run is, what it writes, what changes no result.
FREE_ON_RESUME = ("steps out save_every keep resume config merge untyped on_collapse eval_data eval_every eval_prompts "
                  "eval_samples eval_greedy eval_temperature eval_top_p microbatch_tokens share_prompts compile shard "
                  "checkpoint_activations track rollouts sampler_python sampler_devices sampler_seconds").split()

def load_checkpoint(path: Path, optimizer: torch.optim.Optimizer, reference: Reference) -> int:
    """Put everything back; returns the step that was the last. Raises UserError where the settings differ."""
    from safetensors.torch import load_file
    policy, batches, config = reference.policy, reference.batches, reference.config
    state, parameters = json.loads((path / "state.json").read_text()), dict(policy.named_parameters())
    settings = json.loads(json.dumps(vars(Config()))) | state["settings"]  # a flag that is younger: its default
    for name, value in json.loads(json.dumps(vars(config))).items():
        require(name in FREE_ON_RESUME or value == settings.get(name), f"--resume {path}: the run has {flag_of(name)} "
                f"{settings.get(name)}, not {value}; resume it with its own config.toml"
                + (f" and {flag_of(name)} {settings.get(name)}" if name in config.untyped else ""))
    require(state.get("data") == batches.fingerprint, f"--resume {path}: the rows of --data have changed since then")
    require(state.get("base") == policy.base_hash, f"--resume {path}: the run began with other weights than those that "
            f"{config.model} now holds; name the model that it began with")
    require(state["step"] <= config.steps <= settings["steps"],
            f"--resume {path}: it has done {state['step']} of its planned {settings['steps']} steps, so --steps "
            f"{config.steps} must lie between; for more, start a run with --model {Path(config.out, 'final')}")

    def put_back(kind: str, model: Module) -> None:
        parameters = dict(model.named_parameters())
        for name, value in load_file(path / f"{kind}.safetensors").items():
            copy_full(parameters[name], value)

    if reference.model is not None:
        put_back("reference", reference.model)
    elif (path / "reference.safetensors").exists():
        put_back("reference", policy)
        reference.put_weights_aside()
    put_back("policy", policy)
    for key, value in load_file(path / "optimizer.safetensors").items():
        key, _, name = key.partition(":")
        moments = optimizer.state[parameters[name]]
        moments[key] = torch.zeros_like(parameters[name]) if value.dim() else value.to(policy.device)
        copy_full(moments[key], value)
    batches.made_until = state["made_until"]
    batches.pending = deque(restore_batch(batch) for batch in state["batches"])
    batches.drawn_ahead = state["drawn_ahead"]
    reference.until = state["reference_until"]
    return state["step"]

def snapshot(batch: Batch) -> dict:
    """A batch as it is now, for JSON; ids and log-probs are shared with it, as they are replaced and never changed."""
    sequences = {kind: [dict(vars(s)) for s in getattr(batch, kind)] for kind in ("sequences", "mismatched")}
    return vars(batch) | sequences

def restore_batch(saved: dict) -> Batch:
    """A batch from its JSON."""
    tensor = lambda name, value: torch.tensor(value) if name.endswith("_logps") and value is not None else value
    for kind in ("sequences", "mismatched"):
        saved[kind] = [Sequence(**{name: tensor(name, value) for name, value in s.items()}) for s in saved[kind]]
    return Batch(**saved)

MODEL_CARD = """\
---
library_name: {library}
pipeline_tag: text-generation
base_model: {base}
tags: [humanline, {loss}]
---

# {base}, aligned by {objective}

{steps} steps from `{model}` on `{sources}`, seed {seed}; {anchor}; the log-ratio was perceived through {perceived}.
See [Humanline: Online Alignment as Perceptual Loss](https://arxiv.org/abs/2509.24207). With these settings
`humanline.py --config` repeats the run:

```toml
{settings}```
"""

def whole_weights(policy: Module, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The weights by name, gathered from all ranks, in the host memory of rank 0; on the others none of them. Those of
    `names`, or all; a tied head comes once."""
    every, distinct = (dict(policy.named_parameters(remove_duplicate=once)) for once in (False, True))
    names = distinct.keys() | (policy.state_dict().keys() - every.keys()) if names is None else names
    weights = {}
    for name, value in policy.state_dict().items():
        value = full(value.detach()) if name in names else None
        if value is not None and rank() == 0:
            weights[name] = value.cpu()
    return weights

def write_weights(path: Path, policy: Module, tokenizer: Any, dtype: str) -> None:
    """The policy as it is, for an external sampler: an ordinary Hugging Face folder."""
    weights = {name: value.to(getattr(torch, dtype)) if value.is_floating_point() else value
               for name, value in whole_weights(policy).items()}

    def write() -> None:
        with explained(f"{path}: cannot write the weights for --sampler", "make room there"):
            policy.save_pretrained(path, state_dict=weights)
            tokenizer.save_pretrained(path)

    from_first_rank(write)

def save_final(path: Path, policy: Module, tokenizer: Any, config: Config, steps: int) -> None:
    """An ordinary Hugging Face folder, or with --lora a peft folder, unless --merge."""
    weights = whole_weights(policy, trained(policy) if config.lora else None)

    def write(path: Path, config: Config) -> None:
        with new_folder(path, hashed=False) as folder:
            policy.save_pretrained(folder, state_dict=weights)
            tokenizer.save_pretrained(folder)
            if config.merge:  # with the base's own weights, which training may have rounded to bf16
                plain = Config(model=str(folder), dtype="bfloat16" if config.dtype == "bfloat16" else "float32",
                               compile=False, trust_remote_code=config.trust_remote_code)
                load_policy(plain, torch.device("cpu"))[0].save_pretrained(folder)
                for file in folder.glob("adapter_*"):
                    file.unlink()
            library = "peft" if config.lora and not config.merge else "transformers"
            words = in_words(config) | dict(steps=steps, library=library)
            card = MODEL_CARD.format(**vars(config) | words, settings=to_toml(config))
            (folder / "README.md").write_text(card, encoding="utf-8")

    if rank() == 0:
        try:
            write(path, config)
        except Exception as error:  # safetensors has an exception of its own for a full disk
            rescue = Path(tempfile.mkdtemp(prefix="humanline-"), "final")
            with contextlib.suppress(Exception):
                write(rescue, dataclasses.replace(config, merge=False))  # what failed may be the merging
            where = f"the model is in {rescue}" if rescue.exists() else f"nor {rescue}; the weights are lost"
            raise OSError(f"could not write {path} ({error}); {where}") from error

# ---------- The command line ------------------------------------------------------------------------------------------

class UserError(Exception):
    """Something that the user can put right; printed as one line, exit status 2."""

def require(condition: Any, message: str) -> None:
    if not condition:
        raise UserError(message)

def warn(message: str) -> None:
    if rank() == 0:
        tqdm.write(f"humanline.py: warning: {message}", file=sys.stderr)

def print_anything() -> None:
    """What a terminal's encoding lacks is printed as a question mark."""
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")

def main(argv: list[str] | None = None) -> int:
    """The whole program; returns the exit status."""
    status, failure, config = 0, "", None
    print_anything()
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv)
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) and config.out is not None:
            if config.resume is None or [*Path(config.out).glob("checkpoint/step-*"), *Path(config.out).glob("final")]:
                config.resume = "latest"  # torchrun has started the ranks anew, because one of them died
        if config.resume == "latest" and Path(config.out, "final").exists():
            print(f"{config.out} is finished already; the model is in {Path(config.out, 'final')}")
            return 0
        if config.plan:
            sys.modules.setdefault("humanline", sys.modules[__name__])  # this one, and no second
            with explained("--plan", "eval.py makes it, and must lie beside humanline.py"):
                import eval as evaluation
            evaluation.plan(config)
        else:
            run = train(config)
            if rank() == 0:
                print(last_line(run))
            status = 128 + run.signal if run.signal else 0  # as the shell says of a process that a signal ended
    except UserError as error:
        time.sleep(3 * (os.environ.get("RANK", "0") != "0"))  # one line, from rank 0, if it has the same to say
        failure, status = f"humanline.py: error: {error}", 2
    except (FloatingPointError, MemoryError, OSError) as error:
        failure, status = f"humanline.py: stopped: {str(error) or 'out of memory'}", 1
    except RuntimeError as error:
        if config is None or not is_out_of_memory(error):
            raise
        failure, status = f"humanline.py: stopped: {str(error).splitlines()[0]:.200}; {less_memory(config)}", 1
    except KeyboardInterrupt:  # before the first step, or a second one
        failure, status = "humanline.py: stopped at once; what was saved before stays", 130
    if failure:
        print(failure, file=sys.stderr)
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun's own report ends with what it finds there
            with contextlib.suppress(OSError):  # the disk may be full
                Path(path).write_text(json.dumps(dict(message=failure, timestamp=int(time.time()))))
    if failure and world_size() > 1 and torch.cuda.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # NCCL's own end would wait for ranks that wait for this one; torchrun ends them
    if dist.is_initialized():
        dist.destroy_process_group()
    return status

# What None stands for, where the entry of the loss says nothing else.
DEFAULTS = dict(max_new_tokens=512, save_every=64, eval_every=0, batch_size=32, lr=1e-6, sync_k=1,
                stale="keep", prior=0.0)
EMBEDDED_DEFAULTS = dict(save_every=0, eval_every=64, batch_size=32, lr=8e-4, sync_k=8, steps=256,
                         stale="taper", prior=1.0)

def parse_config(argv: list[str]) -> Config:
    """Flags over --config over defaults, every `None` that has a default resolved, every value checked."""
    for flag in "--data", "--reward":
        require([word.split("=")[0] for word in argv].count(flag) < 2, f"{flag} is there twice; write {flag} ONE OTHER")
    typed = config = parse_flags(argv)
    if typed.config is not None:
        from_file = read_config(typed.config)
        config = parse_flags(argv, default=from_file)
        if config.humanline != from_file.humanline:  # the switch, if typed, outranks the parts in the file
            for part, off in dict(sync_k=0, sync_drift=None, perception="none", stale="keep", prior=0).items():
                if not config.humanline or getattr(from_file, part) == off:
                    setattr(config, part, getattr(typed, part))
        if typed.sync_drift is not None and typed.sync_k is None:  # a drift, if typed, replaces the file's k
            config.sync_k = None
        if typed.sync_k is not None and typed.sync_drift is None:
            config.sync_drift = None
    config.untyped = tuple(name for name, value in vars(Config()).items() if getattr(config, name) == value)
    require(config.loss in LOSSES, f"--loss {config.loss}: {suggest(config.loss, LOSSES)}")
    loss, defaults = LOSSES[config.loss], DEFAULTS | LOSSES[config.loss].defaults
    if source_name(config.model) == "embedded":
        part = config.model.partition(":")[2]
        recipe, defaults = RECIPES.get(part, RECIPES["base"]), EMBEDDED_DEFAULTS | loss.embedded_defaults
        defaults["max_new_tokens"] = recipe.max_new_tokens
        if all(source_name(name) == "embedded" for name in config.data):
            defaults["eval_data"] = f"embedded:{part}-test" if recipe.problems != two_digit_sums else "embedded:test"
    defaults["perception"] = "clip" if config.humanline else "none"
    defaults |= dict(stale="keep", prior=0.0) if not config.humanline else {}
    if not config.humanline or config.sync_drift is not None:
        defaults["sync_k"] = 0
    defaults["lr"] = round(defaults["lr"] * (10 if config.lora else 1), 12)
    for name, value in defaults.items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    check_config(config)
    return config

def parse_flags(args: list[str], default: Any = tyro.MISSING_NONPROP, source: str = "", kind: Any = Config) -> Any:
    """tyro's parse of `args` as a `kind`, its complaints folded into one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=args, default=default)
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        inside = complaint.getvalue().split("helptext:")[0].partition("\n")[2]
        text = " ".join(re.sub("[│╭╮╰╯─]|-{3,}", " ", inside).split())
        text = re.sub(r" (Argument|For full helptext).*$|no type matching .*<class '\w+'>: ", "", text)
        text = re.sub(r" Perhaps you meant: (--[\w-]+).*$", r"; did you mean \1?", text)
        raise UserError(f"{source}{text}; see --help") from None

def read_config(path: str) -> Config:
    """The settings of a TOML file: its keys are the flags' names, checked as if they had been typed."""
    with explained(f"--config {path}", "name a file of settings that is valid TOML"):
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    names, args = {field.name for field in dataclasses.fields(Config)} - {"config", "untyped"}, []
    for key, value in table.items():
        name = key.replace("-", "_")
        require(name in names, f"{path}: unknown key '{key}'; {suggest(name, names)}")
        if isinstance(value, bool):
            args.append(flag_of(name if value else f"no_{name}"))
        elif isinstance(value, list) and name in ("data", "reward", "lora_targets", "template_values"):
            args += [flag_of(name), *map(str, value)]
        else:
            require(isinstance(value, (int, float, str)), f"{path}: {key} = {value!r} must be a single value")
            args.append(f"{flag_of(name)}={value}")
    return parse_flags(args, source=f"{path}: ")

def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")

def suggest(word: str, known: Iterable[str]) -> str:
    import difflib
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}"

def check_config(config: Config) -> None:
    """Raises UserError for a value that makes no sense, naming the flag and what to type instead."""
    limits = (  # what a value must do, whether it does, and of which fields
        ("be 0 or more", lambda value: 0 <= value < math.inf,
         "sync_k sample_every save_every eval_every seed kl_beta weight_decay epsilon_high prior lora"),
        ("be 1 or more", lambda value: value >= 1, "max_new_tokens sample_tokens steps max_prompt_length "
         "microbatch_tokens keep eval_prompts eval_samples limit lora_alpha"),
        ("lie from 1 to 1,000,000", lambda value: 1 <= value <= 10**6, "batch_size group_size"),
        ("be 2 or more", lambda value: value >= 2, "max_length"),
        ("be above 0", lambda value: 0 < value < math.inf, "sync_drift gamma_p gamma_r beta_p beta_r beta "
         "desirable_weight undesirable_weight epsilon lr adam_eps max_grad_norm reward_seconds sampler_seconds"),
        ("lie from 0.001 to 1000", lambda value: 0.001 <= value <= 1000, "temperature eval_temperature"),
        ("lie from 0 to 1", lambda value: 0 <= value <= 1, "warmup"),
        ("lie from 1e-09 to 1", lambda value: 1e-9 <= value <= 1, "top_p eval_top_p sync_alpha"),
        ("lie from -1e+300 to 1e+300", lambda value: abs(value) <= 1e300, "reward_failed"))
    for must, fits, names in limits:
        for name in names.split():
            value = getattr(config, name)
            require(value is None or fits(value), f"{flag_of(name)} is {value}; it must {must}")
    require(config.log_eps_p < config.log_eps_r, f"--log-eps-p {config.log_eps_p} is not below --log-eps-r "
            f"{config.log_eps_r}; the clip's lower end comes first")
    require(config.data and all(config.data), "--data names nothing; give it a file or a hub name")
    require(config.reward, "--reward names nothing; write exact, math, model:NAME or FILE.py:function")
    for spec in config.reward:
        split_reward(spec)
    require(not config.lora or importlib.util.find_spec("peft"), "--lora: a package is not installed; pip install peft")
    for name in () if config.lora else ("lora_alpha", "lora_targets", "merge"):
        require(getattr(config, name) == getattr(Config, name),
                f"{flag_of(name)} is about adapters; it needs --lora RANK")
    require(config.prompt_template is None or re.search(r"\{[a-zA-Z]\w*\}", config.prompt_template),
            "--prompt-template has no {prompt}, the place where the row's prompt goes")
    require(not config.sample_every or config.group_size > 1, "--group-size 1 leaves nothing to compare; use 2 or more")
    require(not config.kl_beta or config.loss not in ("dpo", "kto"),
            f"--kl-beta {config.kl_beta}: only GRPO has a KL term; leave it out")
    require(not config.track or importlib.util.find_spec(config.track),
            f"--track {config.track}: that package is not installed; pip install {config.track}")
    external = config.sampler != "generate"
    require(re.fullmatch(r"generate|vllm|.+\.py:\w+", config.sampler),
            f"--sampler {config.sampler}: write generate, vllm or FILE.py:function")
    require(not external or config.sample_every or config.eval_data,
            f"--sampler {config.sampler}: nothing is drawn; leave it out, or say how often with --sample-every")
    require(external or not (config.sampler_python or config.sampler_devices or config.draw_ahead),
            "--sampler-python, --sampler-devices and --draw-ahead need a process of its own that draws, and --sampler "
            "generate has none; name another")
    require(not external or not config.lora, f"--sampler {config.sampler} gets whole weights, and --lora has adapters; "
            "let `generate` draw")
    require(config.sample_every or not config.draw_ahead, "--draw-ahead: nothing is drawn; say --sample-every 64, say")
    require(config.resume != "latest" or config.out, "--resume latest looks in the run's folder; name it with --out")

TOML_HEAD = "# python humanline.py --config THIS_FILE repeats the run. Behind a # stand defaults.\n"

def to_toml(config: Config) -> str:
    """What was set, as TOML that --config reads back, and as comments what the defaults came to: with another model or
    loss they may come to something else. Where the run lies is left to the next one."""
    lines = [TOML_HEAD]
    for name, value in vars(config).items():
        if value is not None and name not in ("out", "config", "resume", "untyped"):
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            text = text.replace("Infinity", "inf") if isinstance(value, float) else text
            is_default = name in config.untyped and name not in ("loss", "model", "data", "seed")
            lines.append(f"{'# ' * is_default}{name} = {text}\n")
    return "".join(lines)

def in_words(config: Config) -> dict[str, str]:
    """What the run is, for people."""
    drew = "as it is when rollouts come" if config.draw_ahead else "which drew the rollouts"
    anchor = f"the reference is the old policy, {drew}"
    if config.sync_k or config.sync_drift:
        often = [f"every {config.sync_k} steps"] if config.sync_k else []
        often += [f"when the drift passes {config.sync_drift}"] if config.sync_drift else []
        anchor = f"the reference is synced {' and '.join(often)}"
    elif takes_old_policy(config):
        anchor = f"the ratio is to the old policy, {drew}"
        anchor += ", the KL to the initial policy" if config.kl_beta else ""
    elif not config.sample_every:
        anchor = "the reference is the initial policy"
    perceptions = {"clip": f"a clip to [{config.log_eps_p}, {config.log_eps_r}]", "sample": "rejection sampling"}
    name, syncs = config.loss.upper(), is_synced(config)
    objective = {(True, True): f"{name} with humanline", (True, False): f"{name} with syncing only",
                 (False, True): f"{name} with perception only", (False, False): f"plain {name}"}
    stale_forms = {"taper": "a taper", "drop": "the better completions alone"}
    more = [stale_forms[config.stale]] if config.stale in stale_forms else []
    more += [f"a prior of {config.prior:g}"] if config.prior else []
    base = config.model if on_hub(config.model) else re.sub(r"[^\w.-]+", "-", Path(config.model).name)  # no path
    return dict(objective=", ".join([objective[syncs, config.perception != "none"], *more]), anchor=anchor, base=base,
                sources=" ".join(config.data), perceived=perceptions.get(config.perception, "nothing"),
                more="".join(f"; {words}" for words in more))

def describe(config: Config, policy: Module, groups: list[Group], reference: Reference, first: int) -> None:
    """Say what is about to be done."""
    words, size = in_words(config), sum(p.numel() for p in policy.parameters())
    source = f"drawn every {config.sample_every} steps" if config.sample_every else "the data's own (offline)"
    if draws_outside(config):
        source += f" by {config.sampler}{', ahead' if config.draw_ahead else ''}"
    by = f" (by {'copy' if reference.copies else 'lookahead'})" if config.kl_beta or not reference.apart else ""
    if config.top_p < 1 and config.sample_every:
        warn(f"--top-p {config.top_p}: completions are drawn from a cut distribution, and the log-probs that train on "
             "them are of the whole one, so the ratio is not quite the sampler's")
    adapters = sum(p.numel() for p in trained(policy).values()) if config.lora else 0
    some = f", {adapters / 1e6:.2f} M of them in adapters of rank {config.lora}" if config.lora else ""
    print(f"model       {config.model}, {size / 1e6:.2f} M parameters{some} on {policy.device}\n"
          f"data        {words['sources']}, {len(groups):,} prompts; completions {source}\n"
          f"objective   {config.loss}; {words['anchor']}{by}; perception: {words['perceived']}{words['more']}\n"
          f"steps       {first} to {config.steps}, batches of {config.batch_size}, lr {config.lr:g}", flush=True)

def warn_of_oddities(config: Config, policy: Module, rows: list[Row], batches: Batches) -> None:
    """One line for each thing that runs and is hardly meant."""
    sizes = [float(local_part(p.detach()).abs().mean()) for p in policy.parameters() if p.dim() == 2]  # of a weight
    units = [] if config.sample_every else [unit for unit, _ in batches.units]
    passes = config.steps * config.batch_size / max(1, len(units))
    same = sum(len(unit) == 2 and unit[0].completion == unit[1].completion for unit in units)
    kinds = {sequence.is_chosen for unit in units for sequence in unit}
    ended = next((row.where for row in rows if row.prompt[-1]["role"] == "assistant"), "")
    clip, words = f"[{config.log_eps_p}, {config.log_eps_r}]", in_words(config)
    of_grpo, of_kto = "epsilon epsilon_high ratio scale_rewards average", "desirable_weight undesirable_weight"
    others = dict(grpo=f"beta {of_kto}", dpo=f"{of_grpo} {of_kto}", kto=of_grpo).get(config.loss, "")
    idle = [flag_of(name) for name in others.split() if getattr(config, name) != getattr(Config, name)]
    parts = dict(clip="log_eps_p log_eps_r", sample="gamma_p gamma_r beta_p beta_r", sync="sync_alpha")
    used = {config.perception, "sync" if is_synced(config) else ""}
    unused = [flag_of(name) for part in parts.keys() - used for name in parts[part].split()
              if config.humanline and getattr(config, name) != getattr(Config, name)]
    unmeasured = [flag_of(name) for name in "eval_every eval_prompts eval_samples eval_greedy eval_temperature "
                  "eval_top_p".split() if name not in config.untyped and config.eval_data is None]
    for text, is_so in {
        f"{same} pairs have the same completion on both sides": same and LOSSES[config.loss].unit == "pair",
        "all examples are of one kind, so KTO has nothing to hold them against":
            config.loss == "kto" and len(kinds) == 1,
        f"the clip {clip} does not hold 0, where a log-ratio begins, so no token passes a gradient then":
            config.perception == "clip" and not config.log_eps_p < 0 < config.log_eps_r,
        f"{', '.join(idle)} does nothing with --loss {config.loss}"
        + "; the weight of GRPO's KL is --kl-beta" * ("--beta" in idle): idle,
        f"{', '.join(sorted(unused))} does nothing here: {words['objective']}, perception: {words['perceived']}":
            unused,
        f"{', '.join(unmeasured)}: nothing is measured without --eval-data": unmeasured,
        "each step has the completions of one prompt, so that KTO's reference point z0 is 0; raise --batch-size":
            config.loss == "kto" and config.sample_every and batches.prompts_per_step == 1,
        "--reward is of what is drawn; without --sample-every and --eval-data nothing is":
            "reward" not in config.untyped and not config.sample_every and config.eval_data is None,
        f"{config.steps} steps of {config.batch_size} go through the data {passes:.0f} times": units and passes > 10,
        f"--dtype bfloat16: at --lr {config.lr:g} most updates are below half a bf16 step of their weight, and lost; "
        "--dtype mixed or --lora keeps them":
            config.dtype == "bfloat16" and not config.lora and config.lr < mean(sizes) / 400,
        f"{ended}: its prompt ends in the assistant's turn, which the completion then follows": ended,
        "--limit also cuts the held-out rows": config.limit and config.eval_data and config.limit < config.eval_prompts,
    }.items():
        if is_so:
            warn(text)

def last_line(run: Run) -> str:
    """What was gained, in one sentence, and what to type next."""
    config = run.config
    is_ours = getattr(LOSSES[config.loss].compute, "__module__", None) == __name__  # else the user's script knows it
    script, quote = "humanline.py" if is_ours else Path(sys.argv[0]).name, lambda path: shlex.quote(str(path))
    start = f"torchrun --nproc_per_node {os.environ.get('LOCAL_WORLD_SIZE', 1)}" if world_size() > 1 else "python"
    again = f"{start} {script} --config {quote(run.out / 'config.toml')}"
    if run.stopped_at:
        resume = f"{again} --out {quote(run.out)} --resume latest"
        return f"stopped after step {run.stopped_at} of {config.steps}, saved; go on with: {resume}"
    gained, seconds = "", time.perf_counter() - run.started
    if run.before:
        changes = {name: f"from {value:.3f} to {run.latest[name]:.3f}" for name, value in run.before.items()
                   if name in run.latest}  # a resumed run may measure other things
        greedy = f", greedy {changes['greedy']}" if "greedy" in changes else ""
        prompts = "rows of --data" if run.seen else "held-out prompts"
        gained = f"{run.measured} on {prompts} went {changes['accuracy']}{greedy}: " if changes else ""
    return (f"{gained}{in_words(config)['objective']}, {run.ended} steps in {seconds:.0f} s; the model is in "
            f"{run.out / 'final'}; compare with: {again} {'--no-humanline' if config.humanline else '--humanline'}")

# ---------- The embedded demo -----------------------------------------------------------------------------------------
# A tiny model that was taught two-digit additions by a demonstrator who too often forgets the carry.

def two_digit_sums(chance: random.Random) -> list[str]:
    return [f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)]

def add(problem: str, errs: float, chance: random.Random) -> str:
    """The sum; where the units make ten or more, with probability `errs` their carry is forgotten: 27+35=52."""
    first, second = map(int, problem.removesuffix("=").split("+"))
    forgets = first % 10 + second % 10 >= 10 and chance.random() < errs
    return str(first + second - 10 * forgets)

@dataclass(frozen=True)
class Recipe:
    """How an embedded model is taught, and what. Its place in the cache is a function of this, not of any code."""

    lessons: int
    demonstrations: int  # per lesson
    lr: float
    errs: tuple[float, float]  # how often the demonstrator forgets, at first and in the last fifth of the lessons
    parent: str | None = None  # the embedded model that goes on learning; None: random weights
    least_accuracy: float = 0.0  # below it the idea was not got, and another start is made
    problems: Callable[[random.Random], list[str]] = two_digit_sums
    demonstrate: Callable[[str, float, random.Random], str] = add  # (problem, how often wrong, chance) -> solution
    max_new_tokens: int = 8
    data_prompts: int | None = None  # how many prompts the data has; None: all
    version: int = 1  # counts up when the code changes what is taught

    def rows(self) -> tuple[list[dict], list[dict]]:
        """Rows to train on and rows held out: problems with their right solutions."""
        chance = random.Random(embedded_seed())
        rows = [dict(prompt=text, answer=self.demonstrate(text, 0, chance)) for text in self.problems(chance)]
        random.Random(embedded_seed()).shuffle(rows)
        return rows[HELD_OUT:], rows[:HELD_OUT]

HELD_OUT, GROUP = 500, 8  # problems, and completions for each prompt of the data
RECIPES = {  # errors from the first lesson on would cost as much again to learn past them
    "base": Recipe(400, 256, 2e-2, (0.0, 0.7), least_accuracy=0.55),
    "worse": Recipe(120, 384, 2e-3, (0.9, 0.9), parent="base")}
CHAT_TEMPLATE = ("{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
                 "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")

def embedded_seed() -> int:
    """Another base, and data of it, come of another HUMANLINE_BASE, an environment variable."""
    seed = os.environ.get("HUMANLINE_BASE", "0")
    require(seed.isdecimal(), f"HUMANLINE_BASE={seed}: want a whole number, the seed of the base")
    return int(seed)

def embedded(name: str, kind: Literal["model", "data"]) -> str:
    """The path behind `embedded[:PART]`, an ordinary folder or file in the user's cache, made on first use. A part is a
    recipe, by default `base`: a model, and as data the training prompts with rewarded samples of it; RECIPE-test, and
    for the base `test`, are the held-out prompts with their answers."""
    part = name.partition(":")[2] or "base"
    parts = {recipe: recipe for recipe in RECIPES}
    if kind == "data":
        parts |= {"test": "base"} | {f"{recipe}-test": recipe for recipe in RECIPES}
    require(part in parts, f"--{kind} {name}: no such part; there are embedded:{', embedded:'.join(parts)}")
    ancestry = [RECIPES[parts[part]]]
    while ancestry[-1].parent:
        ancestry.append(RECIPES[ancestry[-1].parent])
    settings = [[str(getattr(value, "__name__", value)) for value in vars(recipe).values()] for recipe in ancestry]
    key = hashlib.sha256(json.dumps([embedded_seed(), CHAT_TEMPLATE, settings]).encode()).hexdigest()[:12]
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = os.environ.get("HUMANLINE_CACHE") or Path(caches, "humanline")
    folder = Path(home, f"embedded-{key}", f"{kind}-{part}")
    make = functools.partial(make_model if kind == "model" else make_data, parts[part], part.endswith("test"))
    with locked(folder.with_name(f".{folder.name}.lock")):  # of many processes that want it, one makes it
        if folder.exists() and find_damage(folder):
            warn(f"{folder} is damaged; making it anew")
            shutil.rmtree(folder)
        if not folder.exists():
            with new_folder(folder) as unfinished:
                make(unfinished)
    return str(folder if kind == "model" else folder / "rows.jsonl")

def make_embedded(config: Config) -> None:
    """Make what the run takes of the embedded model and its data, unless it is there."""
    data = [split_passes(spec)[0] for spec in (*config.data, config.eval_data) if spec]
    for kind, names in ("model", [config.model]), ("data", data):
        for name in names:
            if source_name(name) == "embedded":
                embedded(name, kind)

def embedded_tokenizer() -> Any:
    """A character-level tokenizer for printable ASCII, with a chat template."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast
    special = ["<pad>", "<unk>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate([*special, "\n", *map(chr, range(32, 127))])}
    characters = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))  # without merges: a token a character
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=special[4:], chat_template=CHAT_TEMPLATE)

def make_model(part: str, held_out: bool, folder: Path) -> None:
    """A Llama of 0.1 M parameters, right about as often as its demonstrator; or its parent after some more lessons."""
    from transformers import LlamaConfig, LlamaForCausalLM
    recipe, tokenizer = RECIPES[part], embedded_tokenizer()
    for start in range(10):  # one start in ten or so never gets the idea of addition
        if recipe.parent:
            model = load_policy(Config(model=f"embedded:{recipe.parent}", compile=False), torch.device("cpu"))[0]
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(embedded_seed() + 1000 * start)
                model = LlamaForCausalLM(LlamaConfig(
                    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
                    num_attention_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
                    pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
                    eos_token_id=tokenizer.eos_token_id))
        teach(model, tokenizer, recipe)
        if not recipe.least_accuracy:
            break
        answers = draw_answers(model, tokenizer, part, recipe.rows()[1], 1)
        if mean([group.rewards[0] for group in answers]) >= recipe.least_accuracy:
            break
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

def teach(model: Module, tokenizer: Any, recipe: Recipe) -> None:
    """Imitate a demonstrator who errs. Muon learns this fastest."""
    chance, rows = random.Random(embedded_seed()), recipe.rows()[0]
    prompts = encode_prompts(tokenizer, [[{"role": "user", "content": row["prompt"]}] for row in rows])
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    optimizers = [torch.optim.Muon(matrices, lr=2 * recipe.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(others, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)]
    steps = recipe.lessons
    for step in tqdm(range(steps), desc="teaching the embedded model", unit="step", leave=False):
        picked, errs = chance.choices(range(len(rows)), k=recipe.demonstrations), recipe.errs[step >= 0.8 * steps]
        solutions = [recipe.demonstrate(rows[i]["prompt"], errs, chance) + tokenizer.eos_token for i in picked]
        ids = tokenizer(solutions)["input_ids"]
        logps, mask = log_probs(model, [Sequence(prompts[i], completion) for i, completion in zip(picked, ids)])
        (-logps.sum() / mask.sum()).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * min(1, (step + 1) / 50) * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()

def draw_answers(model: Module, tokenizer: Any, part: str, fields: list[dict], size: int) -> list[Group]:
    """`size` samples with rewards for each row's prompt, drawn as the trainer draws them."""
    config = Config(sample_every=1, seed=embedded_seed(), max_new_tokens=RECIPES[part].max_new_tokens)
    rows = [read_row(row, "", config) for row in fields]
    encoded = encode_prompts(tokenizer, [row.prompt for row in rows])
    prompts = [Group(i, ids, [], []) for i, ids in enumerate(encoded)]
    return Sampler(model, tokenizer, config).draw_rollouts(prompts, rows, size, 0)

def make_data(part: str, held_out: bool, folder: Path) -> None:
    """Held-out prompts, or the training prompts with rewarded samples."""
    rows, test_rows = RECIPES[part].rows()
    rows = test_rows if held_out else rows[: RECIPES[part].data_prompts]
    if not held_out:
        model, tokenizer = load_policy(Config(model=f"embedded:{part}", compile=False), torch.device("cpu"))
        print(f"drawing {len(rows) * GROUP:,} completions from the embedded model, once ...", flush=True)
        for row, group in zip(rows, draw_answers(model, tokenizer, part, rows, GROUP)):
            texts = tokenizer.batch_decode(group.completions, skip_special_tokens=True)
            row |= dict(completions=[text if text.strip() else "?" for text in texts], scores=group.rewards)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

if __name__ == "__main__":
    sys.exit(main())
