"""Humanline: DPO, KTO and GRPO with a reference that keeps up and a log-ratio seen the way people see it.

All of "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207) in one file. On a laptop:

  python humanline.py                                      # aligns the tiny model of configs/demo
  python humanline.py --loss grpo --sync-k 12              # sync the reference every 12 steps
  python humanline.py --no-humanline --no-taper --prior 0  # the baseline: plain GRPO
  python humanline.py --no-humanline --sample-every 1      # online: sampled from the policy at every step
  python humanline.py --loss dpo                           # on the best and the worst of a prompt's samples

On a model and data of your own (rows as in the README), on one GPU and on eight, and after an interruption:

  python humanline.py --model Qwen/Qwen2.5-1.5B-Instruct --data pairs.jsonl --loss dpo --out runs/mine
  torchrun --nproc_per_node 8 humanline.py --config runs/mine/config.toml --lr 5e-7
  python humanline.py --config runs/mine/config.toml --out runs/mine --resume latest

A *humanline variant* of a loss adds two things: the reference is set to the policy every k steps
(**syncing**), and the token log-ratio is clipped before the loss sees it (**perception**). A **taper**, not
in the paper, keeps off-policy data from breaking it. So a run is *plain*, *humanline*, or *humanline with
taper*.

The order: configuration, perception, objectives, the loop: that is the method. Then what the loop calls: the
run, models, data, rollouts, rewards, the reference, log-probs, ranks, checkpoints; last the command line.

Three policies: the **old policy** drew the present rollouts; the **reference** is what humanline's log-ratio
is taken to, and the KL; the **sampler** is whatever produced a completion, the old policy or an unknown one.

Left out on purpose: a value model, a second model in memory, tensor and pipeline parallelism, quantized
weights, images, tools and turns within a rollout.
"""

# For `uv run humanline.py`, as in requirements.txt:
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers>=5.17,<5.24",
#     "datasets>=4.0,<6",
#     "tqdm>=4.66",
#     "tyro>=1.0,<2",
#     "loky>=3.5,<4",
#     "psutil>=5.9",
#     "math-verify>=0.8,<1",
# ]
# ///

import contextlib
import dataclasses
import datetime
import difflib
import fcntl
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import threading
import time
import tomllib
from collections import deque
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Callable, Iterable, Iterator, Literal

if __name__ == "__main__":  # Ctrl-C during the imports below prints no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
import torch.distributed as dist
# Imported after join_ranks its defaults would hold the ranks' group, and threads, for ever.
import torch.distributed.nn
import torch.nn.functional as F
import psutil
import tyro
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence
from loky import ProcessPoolExecutor
from tqdm import tqdm

# ---------- Configuration -----------------------------------------------------------------------------------
# Each field is a flag; the text after or below it is its help.

@dataclass
class Config:
    """Align a language model with DPO, KTO or GRPO: plain, as humanline variants, or these with a taper."""

    loss: str = "grpo"  # The objective: grpo, dpo or kto.
    model: str | None = None  # A Hugging Face name or folder. Without it, --data and --config: the demo.
    data: tuple[str, ...] = ()
    """Rows to train on: NAME[:[CONFIG:]SPLIT], of .jsonl, .json, .csv, .parquet, a folder, or a hub name."""
    limit: int | None = None  # Read only this many rows of each source.
    eval_data: str | None = None  # Held-out rows, for --eval-every.
    reward: str = "exact"
    """The reward of a drawn completion. `exact`: 1 if it equals the row's `answer`; `math`: 1 if its final
    answer equals that, or the \\boxed{} of the row's `solution`; `FILE.py:function`: your own
    function(prompts, completions, rows) -> list of floats, where prompts are lists of messages, rows dicts;
    say configs/model_reward.py:score, a reward model, or configs/rewards.py:math_recipe, a sum of several."""
    reward_args: str | None = None
    """Further keyword arguments of your reward function, as a JSON object of names and values."""
    reward_seconds: float = 10.0
    """Time limit of a call, where the reward is `math` or your own. Where a call fails or takes longer, its
    samples are rewarded one by one, each within the same limit, until three in a row have taken longer."""
    reward_failed: float = 0.0  # What a reward function counts as where it raised, hung or gave no number.
    system: str | None = None  # System message of prompts that have none (models with a chat template).
    prompt_template: str | None = None  # Text around each prompt; {prompt} and other {columns} are filled in.
    template_values: str | None = None
    """What the chat template is to be told: a JSON object of names and values."""
    dtype: Literal["auto", "mixed", "float32", "bfloat16"] = "auto"
    """mixed: fp32 weights, bf16 autocast; bfloat16: bf16 weights too. auto: mixed on a GPU, and on a CPU that
    multiplies in bf16 for models from 20 M parameters on; else float32."""
    attn: str | None = None  # Attention, such as sdpa or flash_attention_2. Default: the model's choice.
    checkpoint_activations: bool = False  # Recompute activations in the backward pass: slower, less memory.
    trust_remote_code: bool = False  # Allow code that comes with a model or tokenizer to run.
    lora: int = 0
    """Train LoRA adapters of this rank, such as 16; the base is frozen, in bf16 unless --dtype float32 (pip
    install peft). 0: train all weights. The adapters of a peft folder as --model are merged first."""
    lora_alpha: int = 32  # What the adapters add is scaled by this number divided by their rank.

    # What makes it humanline: two parts, switched together or one by one.
    humanline: bool = True  # Sync, and perceive. --no-humanline: neither, whatever the next flags say.
    sync_k: int = 1  # Set the reference to the policy every so many steps; 0: never.
    perception: Literal["clip", "sample", "none"] = "clip"  # How the log-ratio is distorted before the loss.
    log_eps_p: float = -1.5  # Lower end of the clip, in nats.
    log_eps_r: float = 1.5  # Upper end of the clip, in nats.
    gamma_p: float = 0.5  # Perception `sample`: B_P ~ Beta(gamma_p, beta_p) rejects tokens grown unlikely.
    gamma_r: float = 0.01  # Perception `sample`: B_R ~ Beta(gamma_r, beta_r) rejects tokens grown likely.
    beta_p: float = 1.0  # See --gamma-p.
    beta_r: float = 1.0  # See --gamma-r.

    # Against collapse on off-policy data: from other models, or old rollouts. Not in the paper.
    taper: bool = False
    """The gradient of worse completions (rejected, undesirable, negative advantage), and in pairs the chosen
    one's, fades as their log-prob falls below the sampler's (if unknown, the initial policy's). Otherwise
    each sync lets them be pushed down further, without limit. Their KL (--kl-beta) keeps its gradient."""
    prior: float = 0.0
    """GRPO: count this many extra rollouts in each group, with the mean reward of all groups. So a group with
    only correct answers still has a gradient that keeps them, against what other groups teach."""

    # The objectives' own knobs.
    beta: float = 0.1  # DPO and KTO: how strongly the policy is held to the reference.
    desirable_weight: float | None = None
    """KTO: weight of desirable examples. Default: makes the total weights of both kinds equal."""
    undesirable_weight: float = 1.0  # KTO: weight of undesirable examples.
    epsilon: float = 0.2  # GRPO: the ratio is clipped to [1 - epsilon, 1 + epsilon].
    epsilon_high: float | None = None  # GRPO: the upper end is 1 + epsilon_high instead (DAPO takes 0.28).
    scale_rewards: bool = True  # GRPO: divide advantages by their group's standard deviation (Dr. GRPO: not).
    kl_beta: float = 0.0  # GRPO: weight of the KL to the reference; without humanline the initial policy.
    average: Literal["token", "sequence", "constant"] = "token"
    """GRPO: mean over all completion tokens of the batch; over each sequence's tokens first; or the sum over
    each sequence's tokens divided by --max-new-tokens (Dr. GRPO)."""

    # Where the completions come from.
    sample_every: int = 0
    """0: train on the data's completions (offline). N: draw some every N steps for the next N (1: online)."""
    group_size: int = 8  # Completions drawn per prompt.
    temperature: float = 1.0  # T: samples, and log-probs of what was drawn, are of softmax(logits / T).
    top_p: float = 1.0  # Nucleus sampling: keep the most likely tokens that together have this probability.
    max_new_tokens: int = 512  # Longest completion drawn.
    sample_tokens: int = 65536
    """Most (prompt + new tokens) x sequences in a call of `generate`; lower it if memory runs out there."""
    sampler: str = "generate"
    """What draws: the model's own `generate`; or `FILE.py:function`, such as configs/external.py:vllm, an
    engine on other GPUs, and configs/external.py:servers, on other machines."""

    # The loop.
    steps: int | None = None  # Optimizer steps. Default: one pass over the data.
    batch_size: int | None = None
    """Per step, over all ranks: groups (GRPO), pairs (DPO) or examples (KTO). Default: 32; KTO 64."""
    lr: float | None = None  # AdamW's, after warmup. Default: 1e-6; with --lora 1e-5.
    warmup: float = 0.1  # Fraction of the steps over which the learning rate rises; then it is constant.
    weight_decay: float = 0.0  # AdamW's decoupled weight decay.
    adam_eps: float = 1e-8  # AdamW's epsilon. The authors' scripts use 1e-5.
    max_grad_norm: float = 1.0  # The gradient is scaled down to this norm where it is longer.
    max_length: int | None = None
    """Longest prompt + completion, in tokens; longer examples are dropped; online, prompts that
    --max-new-tokens more would make longer. Default: the model's positions."""
    max_prompt_length: int | None = None  # Longest prompt, in tokens; rows with longer ones are dropped.
    microbatch_tokens: int = 16384
    """Tokens, with padding, per forward and backward; lower it if memory runs out. Changes no result."""
    compile: bool = torch.cuda.is_available()  # Compile the layers with torch.compile. Default: on a GPU.
    shard: bool = False
    """Shard weights, gradients and moments over the ranks (FSDP2). While it draws, each has all weights."""
    seed: int = 0  # All randomness follows from this and the step; draws also from the number of ranks.

    # What is written, and when.
    out: str | None = None  # The run's folder. Default: a new one under runs/.
    save_every: int = 64  # Write a checkpoint every this many steps; 0: none but the final model.
    keep: int = 2  # Checkpoints kept.
    resume: str | None = None
    """`latest`: go on from the newest whole checkpoint of --out, or afresh if there is none. Or a path."""
    eval_every: int = 0  # Measure every so many steps; 0: before and after.
    eval_prompts: int = 500  # Held-out prompts per evaluation.
    eval_samples: int = 2  # Completions drawn per held-out prompt.
    track: str | None = None  # Send the metrics to wandb, or a module with its functions, such as trackio.
    config: str | None = None  # A .toml file of these settings; flags override it.

    def __post_init__(self):
        """Settle the defaults that depend on other settings, check them all, and say what they ask for."""
        default = {field.name: field.default for field in dataclasses.fields(self)}
        self.given = {name: value for name, value in vars(self).items() if value != default[name]}  # was set
        require(self.loss in LOSSES, f"--loss {self.loss}: {suggest(self.loss, LOSSES)}")
        loss = LOSSES[self.loss]
        if not self.humanline or not loss.needs_reference:
            self.sync_k = 0
            self.perception = "none"
        if self.lr is None:
            self.lr = 1e-5 if self.lora else 1e-6
        if self.batch_size is None:
            self.batch_size = loss.batch_size
        self.out = self.out and os.path.expanduser(self.out)
        check_config(self)
        # Online, a plain loss takes its log-ratio to the old policy, and only its KL to the reference.
        self.ratio_to_old = loss.needs_reference and self.sample_every > 0 and self.sync_k == 0
        self.needs_reference = loss.needs_reference and (not self.ratio_to_old or self.kl_beta > 0)
        # T of softmax(logits / T): the sampling temperature for rollouts, 1 for the data's completions.
        self.logits_temperature = self.temperature if self.sample_every else 1.0
        self.draws_outside = self.sample_every > 0 and self.sampler != "generate"
        # What depends on the model; load_policy settles it.
        self.is_mixed = False  # whether weights are fp32 and products bf16
        self.shares_prompts = False  # whether a row of the forward pass may hold several completions

RANGES = {  # the least and the largest value of settings
    (0, 1e12): "sync_k sample_every save_every eval_every seed kl_beta weight_decay epsilon_high prior lora",
    (1, 1e12): "max_new_tokens sample_tokens steps max_length max_prompt_length microbatch_tokens keep "
               "batch_size group_size eval_prompts eval_samples limit lora_alpha",
    (1e-12, 1e12): "gamma_p gamma_r beta_p beta_r beta desirable_weight undesirable_weight epsilon lr "
                   "adam_eps max_grad_norm reward_seconds",
    (1e-3, 1e3): "temperature",
    (0, 1): "warmup",
    (1e-9, 1): "top_p",
    (-1e12, 1e12): "reward_failed",
}

# ---------- Perception --------------------------------------------------------------------------------------
# How the token log-ratio d_t = log π_θ(y_t | x, y_<t) - log π_ref(y_t | x, y_<t) looks to a person.
#
# Pure functions of tensors, to be pasted elsewhere. (N, T) tensors hold exact zeros at masked positions.

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
    """What humanline sampling decides for each token (Definition 4.2): -1 rejects it because it has become
    too unlikely, 1 because it has become too likely, 0 keeps it. (N, T) int8; see `humanline_sample`."""
    verdicts = torch.zeros_like(mask, dtype=torch.int8)
    if not mask.any():
        return verdicts
    d = log_ratio.detach().double()

    def draw_log_beta(gamma: float, beta: float) -> Tensor:
        # torch.distributions takes no generator: a Beta is the first coordinate of this Dirichlet.
        shape = torch.tensor([gamma, beta], dtype=torch.float64).expand(*d.shape, 2)
        return torch._sample_dirichlet(shape, generator)[..., 0].to(d.device).log()

    log_b_p = draw_log_beta(gamma_p, beta_p)
    log_b_r = draw_log_beta(gamma_r, beta_r)
    # exp(d) < M_P B_P and exp(-d) < M_R B_R, in logs, so that large ratios do not overflow.
    completion_d = d[mask.bool()]
    is_likely = -d < (-completion_d).max() + log_b_r
    is_unlikely = d < completion_d.max() + log_b_p
    verdicts[is_likely] = 1
    verdicts[is_unlikely] = -1
    return verdicts * mask.bool()

def humanline_sample(log_ratio: Tensor, mask: Tensor, gamma_p: float = 0.5, gamma_r: float = 0.01,
                     beta_p: float = 1.0, beta_r: float = 1.0,
                     generator: torch.Generator | None = None) -> Tensor:
    """Humanline sampling (Definition 4.2): a token is kept if a person's perception would have produced it.

    Draw B_P ~ Beta(γ_P, β_P) and B_R ~ Beta(γ_R, β_R) for each token, and reject it if exp(d) < M_P B_P or
    exp(-d) < M_R B_R, where M_P and M_R are the largest exp(d) and exp(-d) among the batch's completion
    tokens. A rejected token keeps its value and passes no gradient. As the Betas concentrate on their means
    m_P and m_R, this becomes clipping to [log(M_P m_P), -log(M_R m_R)] (Theorem 4.3), as far as gradients go.
    Paste with `humanline_verdicts`.

    Args:
        log_ratio: (N, T) token log-ratios, in nats, which come back with the same values.
        mask: (N, T), true or 1 at completion tokens.
        generator: source of the draws; torch's global one if None.
    """
    verdicts = humanline_verdicts(log_ratio, mask, gamma_p, gamma_r, beta_p, beta_r, generator)
    return torch.where(verdicts != 0, log_ratio.detach(), log_ratio)

# ---------- Objectives --------------------------------------------------------------------------------------
# What each loss makes of the perceived log-ratio. No averaging here: the loop divides by global counts.

def dpo_loss(chosen_log_ratio: Tensor, rejected_log_ratio: Tensor, beta: float = 0.1) -> Tensor:
    """-log σ(β (Σ_t d̃ʷ_t - Σ_t d̃ˡ_t)) (Rafailov et al. 2023, eq. 7): (N,) losses, one per pair, of (N, T)
    token log-ratios in nats, zero at masked positions; the two T may differ.

    >>> dpo_loss(torch.zeros(1, 3), torch.zeros(1, 5))
    tensor([0.6931])
    """
    return -F.logsigmoid(beta * (chosen_log_ratio.sum(-1) - rejected_log_ratio.sum(-1)))

def kto_loss(log_ratio: Tensor, desirable: Tensor, kl: Tensor | float, beta: float = 0.1,
             desirable_weight: Tensor | float = 1.0, undesirable_weight: Tensor | float = 1.0) -> Tensor:
    """λ_D (1 - σ(β (Σ_t d̃_t - z₀))) if desirable, else λ_U (1 - σ(β (z₀ - Σ_t d̃_t))): (N,) losses
    (Ethayarajh et al. 2024, eq. 8).

    Args:
        log_ratio: (N, T) token log-ratios in nats, zero at masked positions.
        desirable: (N,) booleans.
        kl: z₀ >= 0, the reference point: one number for the whole batch, in nats; no gradient flows into it.
        desirable_weight, undesirable_weight: λ_D and λ_U, one number or (N,).
    """
    if isinstance(kl, Tensor):
        kl = kl.detach()
    gain = beta * (log_ratio.sum(-1) - kl)
    is_desirable = desirable.bool()
    # 1 - σ(x) = σ(-x), which keeps its precision where σ(x) is close to 1.
    loss = torch.sigmoid(torch.where(is_desirable, -gain, gain))
    return torch.where(is_desirable, desirable_weight * loss, undesirable_weight * loss)

def group_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 0.01, scale: bool = True,
                     prior: float = 0.0, prior_mean: float = 0.0) -> Tensor:
    """A_i = (r_i - mean) / (std + eps) within each group, population standard deviation (Shao et al. 2024).
    Returns (N,) advantages; without a prior, 0 for a group without a difference.

    Args:
        rewards: (N,) floats.
        group_ids: (N,) integers; equal ids form a group, in any order.
        scale: False leaves the division out (Dr. GRPO, Liu et al. 2025).
        prior, prior_mean: mean and std are those of the group and `prior` more rollouts with this reward.

    >>> group_advantages(torch.tensor([1.0, 0.0, 7.0, 7.0]), torch.tensor([3, 3, 5, 5]))
    tensor([ 0.9804, -0.9804,  0.0000,  0.0000])
    """
    _, index, counts = group_ids.unique(return_inverse=True, return_counts=True)
    counts = counts + prior
    zeros = rewards.new_zeros(len(counts))
    means = (zeros.index_add(0, index, rewards) + prior * prior_mean) / counts
    centred = rewards - means[index]
    if not scale:
        return centred
    squares = zeros.index_add(0, index, centred**2) + prior * (prior_mean - means) ** 2
    std = (squares / counts).sqrt()
    return centred / (std[index] + eps)

def grpo_loss(log_ratio: Tensor, perceived_log_ratio: Tensor, advantages: Tensor, epsilon: float = 0.2,
              kl_beta: float = 0.0, epsilon_high: float | None = None) -> Tensor:
    """-min(A r_t, A clip(r_t, 1-ε, 1+ε)) + β_KL (exp(-d_t) + d_t - 1), where r_t = exp(d̃_t).

    Shao et al. 2024, eq. 3: there d̃ is taken to the old policy and d to the initial one. With humanline both
    are taken to the synced reference, and the ratio is clipped twice: upstream as d̃, and here. Returns
    (N, T) token losses, with -A at masked positions: multiply by the mask. Paste with `token_kl`.

    Args:
        log_ratio: (N, T) raw token log-ratios d to the reference, in nats.
        perceived_log_ratio: (N, T) token log-ratios d̃ after perception.
        advantages: (N,).
        epsilon_high: the clip's upper end is 1 + ε_high (Yu et al. 2025, DAPO, eq. 8); None: ε.
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
    """exp(-d) + d - 1 >= 0, whose mean over samples is KL(π_θ || π_ref), in nats (Schulman 2020, k3)."""
    return torch.expm1(-log_ratio) + log_ratio

def taper_weight(log_ratio_to_sampler: Tensor, sampler_logps: Tensor, mask: Tensor, is_worse: Tensor,
                 mean_surprisal: float, in_pairs: bool = False) -> Tensor:
    """Ours, not the paper's: max(0, 1 - rise / budget) for each worse completion, 1 for the others. It scales
    the gradient of the log-ratio before any loss sees it.

    rise: how far the policy's surprisal exceeds that of the sampler μ, Σ_t (log μ - log π_θ). budget: the
    surprisal under μ, -Σ_t log μ, or that of an average completion of its length if this is less, but at
    least 1 nat. So a completion that surprises the policy twice as much as its sampler is let go: online it
    would hardly be drawn. TOPR's weight, min(1, π_θ / μ) (Le Roux et al. 2025), lets a long one go at once.

    In a pair, as the rejected one's weight w fades, the chosen one's goes to w + (1 - w) / budget: alone it
    would pull the policy to one text, which helps only where there is no other right one (1 nat). Returns
    (N, 1) weights from 0 to 1.

    Args:
        log_ratio_to_sampler: (N, T) log π_θ - log μ, in nats, zero at masked positions; passes no gradient.
        sampler_logps: (N, T) log μ, zero at masked positions.
        mask: (N, T) booleans, True at completion tokens.
        is_worse: (N,) booleans: rejected, undesirable, or with a negative advantage.
        mean_surprisal: mean of -log μ over the batch's tokens, in nats: an estimate of μ's entropy.
        in_pairs: whether the rows are chosen, rejected, chosen, rejected, …
    """
    rise = -log_ratio_to_sampler.detach().sum(-1, keepdim=True)
    surprisal = -sampler_logps.sum(-1, keepdim=True)
    average = mean_surprisal * mask.sum(-1, keepdim=True)
    budget = torch.minimum(surprisal, average).clamp(min=1)
    weight = (1 - rise / budget).clamp(0, 1)
    weight = torch.where(is_worse[:, None], weight, torch.ones_like(weight))
    if in_pairs:
        rejected = weight[1::2]
        weight[0::2] = rejected + (1 - rejected) / budget[0::2]
    return weight

# What a loss trains on: a group becomes units of sequences, and a unit is what --batch-size counts.

@dataclass
class Group:
    """A prompt and its completions with their rewards, as token ids: of the data, or drawn (rollouts)."""

    row: int  # the index of its row in the data
    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]
    labelled: bool = False  # rewards are labels (1 desirable, 0 not), not to be compared with each other
    failed: list[bool] = field(default_factory=list)  # whether the reward failed
    logps: list[list[float]] = field(default_factory=list)  # log μ of each token, where known
    sequences: list["Sequence"] = field(default_factory=list)  # its completions; see `make_units`
    units: list[list["Sequence"]] = field(default_factory=list)  # what the loss makes of them

@dataclass
class Sequence:
    """A prompt with one completion, and what the losses must know about it."""

    prompt: list[int]
    completion: list[int]
    advantage: float = 0.0
    is_chosen: bool = False  # its advantage is positive; or it is labelled desirable
    kto_weight: float = 1.0  # λ_D or λ_U
    ref_logps: Tensor | None = None  # (len(completion),) log π_ref(y_t | x, y_<t)
    old_logps: Tensor | None = None  # the same of the old policy; None: it is the policy
    sampler_logps: Tensor | None = None  # the same of whatever produced the completion; None: unknown
    verdicts: Tensor | None = None  # (len(completion),) of --perception sample, see `humanline_verdicts`
    is_idle: bool = False  # has no gradient, and is left out

Packed = list[Sequence]  # sequences with one prompt, which share a row of the forward pass; see `log_probs`

@dataclass
class Microbatch:
    """The record of a step: N sequences that go through the policy together, and all that a loss can ask of
    them, filled in from top to bottom. Pairs lie as chosen, rejected, chosen, … An (N, T) tensor holds a
    completion in each row, from the left, and zeros behind its end. Log-probs are in nats."""

    # Known before the forward pass.
    packed: list[Packed]
    mask: Tensor  # (N, T) booleans, true at completion tokens
    advantages: Tensor  # (N,)
    is_chosen: Tensor  # (N,) booleans: the advantage is positive; or chosen, or desirable
    kto_weights: Tensor  # (N,) λ_D or λ_U
    ref_logps: Tensor | None  # (N, T) log π_ref, if anything asks for it
    old_logps: Tensor | None  # (N, T) log π_old; None: the old policy is the policy itself
    sampler_logps: Tensor | None  # (N, T) log μ; None: unknown
    verdicts: Tensor | None  # (N, T) of --perception sample
    step: int  # the optimizer step, from 1
    mean_surprisal: float = 0.0  # mean of -log μ over the batch's tokens, where it is known
    z0: Tensor | None = None  # () KTO's reference point
    share: float = 1.0  # 0: another rank's work, repeated only to keep in step with it

    # Computed in the step, in this order.
    logps: Tensor | None = None  # (N, T) log π_θ
    d: Tensor | None = None  # (N, T) log π_θ - log π_ref, if anything asks for it
    log_ratio: Tensor | None = None  # (N, T) what is perceived: d; plain and online log π_θ - log π_old
    taper: Tensor | None = None  # (N, 1) how much of the log-ratio's gradient is left, with --taper
    perceived: Tensor | None = None  # (N, T) d̃
    is_low: Tensor | None = None  # (N, T) booleans: too low a log-ratio, whose gradient perception stops
    is_high: Tensor | None = None  # the same for too high ones
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """To be logged, by name: values, and where they count, both (N, T) or (N,). The step logs the mean, or
    for a name that ends in `_max` the largest value. A loss may add its own."""

def best_against_worst(group: Group) -> list[list[Sequence]]:
    """DPO: the best and the worst completion are a pair; none if all rewards are equal."""
    best = group.rewards.index(max(group.rewards))
    worst = group.rewards.index(min(group.rewards))
    if group.rewards[best] == group.rewards[worst]:
        return []
    return [[group.sequences[best], group.sequences[worst]]]

def above_and_below_mean(group: Group) -> list[list[Sequence]]:
    """KTO: each completion is an example, desirable above the group's mean or if labelled so; none if all are
    equal."""
    if group.labelled:
        group.sequences[0].is_chosen = group.rewards[0] > 0.5
    elif max(group.rewards) == min(group.rewards):
        return []
    return [[sequence] for sequence in group.sequences]

def set_kto_weights(sequences: list[Sequence], config: Config) -> None:
    """λ_D and λ_U. By default λ_D n_D = λ_U n_U (Ethayarajh et al. 2024, section 4.2)."""
    desirable = sum(sequence.is_chosen for sequence in sequences)
    balanced = config.undesirable_weight * (len(sequences) - desirable) / max(1, desirable)
    if balanced == 0:  # all are desirable
        balanced = 1.0
    for sequence in sequences:
        sequence.kto_weight = config.undesirable_weight
        if sequence.is_chosen:
            sequence.kto_weight = config.desirable_weight or balanced

def compute_dpo(x: Microbatch, config: Config) -> Tensor:
    log_implicit_rewards(x, config)
    return dpo_loss(x.perceived[0::2], x.perceived[1::2], config.beta)

def compute_kto(x: Microbatch, config: Config) -> Tensor:
    log_implicit_rewards(x, config)
    return kto_loss(x.perceived, x.is_chosen, x.z0, config.beta, x.kto_weights, x.kto_weights)

def log_implicit_rewards(x: Microbatch, config: Config) -> None:
    """β Σ_t d̃_t of the chosen and of the rejected; the step logs the difference of their means."""
    reward = config.beta * x.perceived.detach().sum(-1)
    x.metrics["reward_chosen"] = reward, x.is_chosen
    x.metrics["reward_rejected"] = reward, ~x.is_chosen

def compute_grpo(x: Microbatch, config: Config) -> Tensor:
    epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    ratio = x.perceived.detach().exp()
    advantages = x.advantages[:, None]
    x.metrics["clip_fraction_low"] = (ratio < 1 - config.epsilon) & (advantages < 0), x.mask
    x.metrics["clip_fraction_high"] = (ratio > 1 + epsilon_high) & (advantages > 0), x.mask
    return grpo_loss(x.d, x.perceived, x.advantages, config.epsilon, config.kl_beta, epsilon_high)

@dataclass(frozen=True)
class Loss:
    """All that the program knows of a loss. Another one is another entry of LOSSES, and nothing else.

    compute(x, config) gets the record of the step, and returns (N, T) token losses, which --average turns
    into a mean, or one loss for each pair or example. Either way the mean is over the global batch."""

    compute: Callable[[Microbatch, Config], Tensor]
    make_units: Callable[[Group], list[list[Sequence]]]
    unit: Literal["group", "pair", "example"]  # what --batch-size counts; a pair lies as chosen, rejected
    settings: str = ""  # names of the fields of Config that this loss reads and some others do not
    batch_size: int = 32  # the default of --batch-size
    set_weights: Callable[[list[Sequence], Config], None] = lambda sequences, config: None  # of all data
    needs_reference: bool = True  # reads x.d or x.perceived; without it there is nothing to sync or perceive
    needs_mismatched: bool = False  # reads x.z0, made of each prompt with the completion of another prompt
    needs_sampler: bool = False  # reads x.sampler_logps; the initial policy's where they are unknown
    needs_all: bool = False  # has a gradient for completions with an advantage of 0, too

LOSSES = {
    "grpo": Loss(
        compute=compute_grpo,
        make_units=lambda group: [group.sequences],
        unit="group",
        settings="epsilon epsilon_high scale_rewards kl_beta average prior",
    ),
    "dpo": Loss(compute=compute_dpo, make_units=best_against_worst, unit="pair", settings="beta"),
    "kto": Loss(
        compute=compute_kto,
        make_units=above_and_below_mean,
        unit="example",
        settings="beta desirable_weight undesirable_weight",
        batch_size=64,
        set_weights=set_kto_weights,
        needs_mismatched=True,
    ),
}

# ---------- The loop ----------------------------------------------------------------------------------------

def train(config: Config) -> "Run":
    """Train a model as `config` says, from the rows on disk to the final folder."""
    with contextlib.ExitStack() as stack:
        run = Run(config, stack)  # the folder, its lock and its logs; signals; ranks
        rows = [row for source in config.data for row in read_rows(source, config, "--data")]
        run.check_rows(rows)
        policy, tokenizer = load_policy(config, run.device)
        sampler = Sampler(policy, tokenizer, config)
        batches = Batches(config, encode_rows(rows, sampler), sampler.longest)
        optimizer = torch.optim.AdamW(trained(policy).values(), config.lr, eps=config.adam_eps,
                                      weight_decay=config.weight_decay, fused=True)
        reference = Reference(policy, batches, config)
        score_by_sampler(policy, batches, config)
        warmup = math.ceil(config.warmup * batches.steps)
        run.begin(sampler, batches, optimizer, reference)  # checks what is left, and resumes

        for step in run.steps:
            started = time.perf_counter()
            report = {"step": step, "sample_seconds": 0.0}
            if step == 1:
                reference.sync(0)  # the first reference is the initial policy

            # Rollouts for the next steps, with rewards. The policy as it is now is their old policy.
            if config.sample_every and step > batches.made_until:
                last = min(step + config.sample_every - 1, batches.steps)
                prompts = batches.of_steps(step, last)
                rollouts = sampler.draw_rollouts(prompts, rows, config.group_size, step)
                batches.make(last, rollouts)
                report["sample_seconds"] = time.perf_counter() - started
                report |= run.keep_rollouts("rollouts.jsonl", rollouts, rows, step)
                if config.ratio_to_old and last > step:  # for one step the old policy is the policy itself
                    attach_logps("old_logps", policy, batches.pending, config)

            # Forward, perceive, loss, backward, a microbatch at a time: right below.
            batch = batches.next(step)
            reference.score(batch)
            report |= forward_backward(policy, batch, config)

            # Clip the gradient's norm, sync, step, in this order: a sync takes the policy before its update.
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            report["grad_norm"] = float(norm.full_tensor() if config.shard else norm)
            if not math.isfinite(report["loss"] + report["grad_norm"]):
                raise FloatingPointError(
                    f"step {step}: loss {report['loss']}, gradient norm {report['grad_norm']}; what was "
                    f"saved before is in {run.out / 'checkpoint'} (see --save-every)")
            if config.sync_k and step % config.sync_k == 0:
                reference.sync(step)
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

def forward_backward(policy: Module, batch: "Batch", config: Config) -> dict[str, float]:
    """Add the gradient of the batch's mean loss to the parameters' .grad; returns what the step logs. All
    means are over the global batch, so that microbatches and ranks change nothing."""
    loss = LOSSES[config.loss]
    totals = {}  # of each metric, for `describe_step`
    total_loss = torch.zeros((), device=policy.device)
    z0 = None
    if config.perception == "sample":
        decide_verdicts(policy, batch, config)
    if loss.needs_mismatched:
        z0 = kto_reference_point(policy, batch, config)

    active = [sequence for sequence in batch.sequences if not sequence.is_idle]
    for x in microbatches(policy, active, config, batch.step, z0):  # of this rank
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=config.is_mixed):
            x.logps = log_probs(policy, x.packed, config.logits_temperature)
        take_log_ratios(x, config)
        if config.taper:  # ours: the gradient of worse completions fades
            x.taper = taper_weight(x.logps - x.sampler_logps, x.sampler_logps, x.mask, ~x.is_chosen,
                                   x.mean_surprisal, in_pairs=loss.unit == "pair")
            x.log_ratio = x.taper * x.log_ratio + (1 - x.taper) * x.log_ratio.detach()
        if x.log_ratio is not None:
            x.perceived, x.is_low, x.is_high = perceive(x.log_ratio, x, config)
        losses = loss.compute(x, config)
        mean_loss = x.share * share_of_mean(losses, x, batch, config)
        scale = WORLD_SIZE if config.shard else 1  # FSDP takes the ranks' mean
        (mean_loss * scale).backward()
        if x.share:
            total_loss += mean_loss.detach()
            add_metrics(totals, x, config)

    # A gradient for every parameter, even on a rank without work: the sum over all ranks.
    parameters = trained(policy).values()
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if WORLD_SIZE > 1 and not config.shard:  # sharded, the backward pass has added them up
        pending = [dist.all_reduce(p.grad, async_op=True) for p in parameters]
        for reduction in pending:
            reduction.wait()
    return describe_step(batch, totals, total_loss, z0, config)

@torch.no_grad()
def add_metrics(totals: dict[str, Tensor], x: Microbatch, config: Config) -> None:
    """Add a microbatch's metrics to the step's totals: for each a sum and a count, or the largest value. A
    metric is a line: its name, values, and where they count, both (N, T) or (N,)."""
    x.metrics |= {
        "logp": (x.logps, x.mask),
        "logp_wanted": (x.logps, x.mask & x.is_chosen[:, None]),
    }
    if x.log_ratio is not None:
        x.metrics |= {
            "log_ratio": (x.log_ratio, x.mask),
            "log_ratio_max": (x.log_ratio, x.mask),
            "drift": (x.log_ratio.abs(), x.mask),
            "unclamped": (~(x.is_low | x.is_high), x.mask),
            "clamped_low": (x.is_low, x.mask),
            "clamped_high": (x.is_high, x.mask),
        }
    if x.d is not None:
        x.metrics["kl"] = token_kl(x.d), x.mask
    if x.taper is not None:
        x.metrics["taper_weight"] = x.taper[:, 0], ~x.is_chosen
    if x.sampler_logps is not None:
        to_sampler = x.logps - x.sampler_logps
        importance = to_sampler.sum(-1).double().clamp(-300, 300).exp()
        everywhere = torch.ones_like(x.is_chosen)
        x.metrics["importance"] = importance, everywhere
        x.metrics["importance_squared"] = importance**2, everywhere
        if config.draws_outside:
            x.metrics["sampler_gap"] = to_sampler.abs(), x.mask
    for name, (values, where) in x.metrics.items():
        if name.endswith("_max"):
            largest = values.masked_fill(~where, -math.inf).max()
            totals[name] = torch.maximum(totals.get(name, largest), largest)
        else:
            total = (values * where).sum().double()
            count = where.sum().double()
            totals[name] = totals.get(name, 0) + torch.stack([total, count])

def take_log_ratios(x: Microbatch, config: Config) -> None:
    """Fill in d, if anything asks for it, and the log-ratio to perceive, if the loss takes one."""
    if config.needs_reference:
        if x.ref_logps is None:
            raise ValueError("these sequences have no ref_logps: call sync and score of a Reference first")
        x.d = x.log_ratio = x.logps - x.ref_logps
    if config.ratio_to_old:
        old_logps = x.logps.detach() if x.old_logps is None else x.old_logps
        x.log_ratio = x.logps - old_logps

def perceive(log_ratio: Tensor, x: Microbatch, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """d̃ of a log-ratio, (N, T) of tokens or (N, 1) of sequences, and where perception stops the gradient
    because it is too low, and where because it is too high: three tensors of the same shape."""
    if config.perception == "clip":
        low = config.log_eps_p
        high = config.log_eps_r
        return humanline_clip(log_ratio, low, high), log_ratio < low, log_ratio > high
    verdicts = torch.zeros_like(log_ratio, dtype=torch.int8)
    if config.perception == "sample" and x.verdicts is not None:  # the mismatched ones of z₀ have none
        verdicts = x.verdicts
    perceived = torch.where(verdicts != 0, log_ratio.detach(), log_ratio)
    return perceived, verdicts < 0, verdicts > 0

def share_of_mean(losses: Tensor, x: Microbatch, batch: "Batch", config: Config) -> Tensor:
    """A microbatch's share of the mean loss of the whole batch, whose counts it is divided by."""
    count = len(batch.sequences)
    if losses.dim() == 1:  # a loss for each pair or example
        if LOSSES[config.loss].unit == "pair":
            count = count / 2
        return losses.sum() / count
    if config.average == "constant":
        return (losses * x.mask).sum() / (count * config.max_new_tokens)
    if config.average == "sequence":
        return ((losses * x.mask).sum(-1) / x.mask.sum(-1)).sum() / count
    tokens = sum(len(sequence.completion) for sequence in batch.sequences)
    return (losses * x.mask).sum() / tokens

def log_ratios_before(policy: Module, sequences: list[Sequence], batch: "Batch",
                      config: Config) -> Microbatch:
    """The record of these sequences before any gradient, up to the log-ratio, on every rank's CPU."""
    x = make_microbatch([[sequence] for sequence in sequences], torch.device("cpu"), batch.step)
    x.logps = pad_sequence(sequence_logps(policy, sequences, config), batch_first=True)
    take_log_ratios(x, config)
    return x

def decide_verdicts(policy: Module, batch: "Batch", config: Config) -> None:
    """--perception sample: decide about each token before the step, as M_P and M_R are maxima over the
    batch."""
    if not batch.sequences:  # rollouts without a difference
        return
    x = log_ratios_before(policy, batch.sequences, batch, config)
    d = x.log_ratio[x.mask]
    generator = torch.Generator().manual_seed(seed_for(config.seed, "reject", batch.step))
    verdicts = humanline_verdicts(d, torch.ones_like(d, dtype=torch.bool), config.gamma_p, config.gamma_r,
                                  config.beta_p, config.beta_r, generator)
    lengths = x.mask.sum(-1).tolist()
    for sequence, tokens in zip(batch.sequences, verdicts.split(lengths)):
        sequence.verdicts = tokens

def kto_reference_point(policy: Module, batch: "Batch", config: Config) -> Tensor:
    """z₀ = max(0, mean over mismatched pairs of Σ_t d̃_t), one number for the whole batch, in nats."""
    is_policy = config.ratio_to_old and all(sequence.old_logps is None for sequence in batch.mismatched)
    if is_policy or not batch.mismatched:  # the log-ratio of the policy to itself is 0
        return torch.zeros((), device=policy.device)
    x = log_ratios_before(policy, batch.mismatched, batch, config)
    perceived, _, _ = perceive(x.log_ratio, x, config)
    z0 = perceived.sum(-1).mean().clamp(min=0)
    return z0.to(policy.device)

def describe_step(batch: "Batch", totals: dict[str, Tensor], loss: Tensor, z0: Tensor | None,
                  config: Config) -> dict[str, float]:
    """What a step reports, over all ranks; tests/claims/metrics.md says what each name means."""
    report = {"loss": 0.0, "reward": batch.reward}
    sums = {}
    of_this_rank = {name: total.cpu() for name, total in totals.items()}
    for loss_of_rank, totals_of_rank in gather_from_ranks((float(loss), of_this_rank)):
        report["loss"] += loss_of_rank
        for name, total in totals_of_rank.items():
            if name.endswith("_max"):
                report[name] = max(float(total), report.get(name, -math.inf))
            else:
                sums[name] = sums.get(name, 0) + total
    for name, (total, count) in sums.items():
        if count:
            report[name] = float(total / count)
    lengths = [len(sequence.completion) for sequence in batch.sequences]
    report["tokens"] = sum(lengths)
    if lengths:
        report["completion_length"] = fmean(lengths)
    if "importance" in report:
        report["ess"] = report.pop("importance") ** 2 / report.pop("importance_squared")
    if {"reward_chosen", "reward_rejected"} & report.keys():
        report["reward_margin"] = report.pop("reward_chosen", 0.0) - report.pop("reward_rejected", 0.0)
    if config.draws_outside:
        report["lag"] = (batch.step - 1) % config.sample_every
    if batch.no_difference is not None:
        report["no_difference"] = batch.no_difference
    if z0 is not None:
        report["z0"] = float(z0)
    return report


# ---------- The run -----------------------------------------------------------------------------------------

class Run:
    """What training needs beside the method: the run's folder and its lock, logs, measurements, signals. Skip
    it to read the method."""

    def __init__(self, config: Config, stack: contextlib.ExitStack):
        """Check the folder. Errors of the user are found before anything is written, the cheapest first."""
        import transformers
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.config = config
        self.stack = stack
        self.started, self.shown_at = time.perf_counter(), -math.inf
        self.stopped_at: int | None = None  # the step after which a signal ended the run
        self.latest: dict[str, float] = {}  # of every metric, and those from before the first step
        self.watch = Watch()
        self.signals = note_signals(stack)
        require(config.model, "--model names nothing; give it a Hugging Face name or a folder")
        require(config.data, "--data names nothing; give it a file or a hub name")
        require(not config.eval_every or config.eval_data,
                f"--eval-every {config.eval_every} has nothing to measure on; add --eval-data ROWS")
        self.device = join_ranks()
        require(not config.shard or dist.is_initialized(), "--shard needs several ranks; start torchrun")
        require(not config.taper or not config.sample_every or config.top_p == 1,
                "--taper compares log-probs over the whole vocabulary; online it needs --top-p 1")
        new_name = time.strftime(f"runs/{config.loss}-%m%d-%H%M%S-{os.getpid()}")
        self.out = Path(from_first_rank(lambda: config.out or new_name))
        from_first_rank(lambda: check_folder(self.out, config))
        self.checkpoint = from_first_rank(lambda: find_checkpoint(config, self.out))

    def check_rows(self, rows: list["Row"]) -> None:
        """Read --eval-data, too. All ranks must have the same rows."""
        config = self.config
        self.rows = rows
        held_out = read_rows(config.eval_data, config, "--eval-data") if config.eval_data else []
        self.eval_rows = held_out[: config.eval_prompts]
        prompts = {str(row.prompt) for row in rows}
        seen = sum(str(row.prompt) in prompts for row in self.eval_rows)
        if seen:
            warn(f"--eval-data: {seen} of its prompts are in --data, too")
        fields = json.dumps([row.fields for row in rows], default=str)
        self.fingerprint = hashlib.sha256(fields.encode()).hexdigest()  # a resumed run must have the same
        files = [*Path(config.model).glob("*.safetensors")]
        for flag, spec in ("--reward", config.reward), ("--sampler", config.sampler):
            file = Path(spec.rpartition(":")[0])
            require(file.exists(), f"{flag} {spec}: No such file: {file}; write FILE.py:function")
            files.append(file)
        self.fingerprint += from_first_rank(lambda: str(hashes(files)))
        settings = gather_from_ranks(f"{config} {self.fingerprint}")
        require(len(set(settings)) == 1, "the ranks have different flags or rows")

    def begin(self, sampler: "Sampler", batches: "Batches", optimizer: torch.optim.Optimizer,
              reference: "Reference") -> None:
        """Check what is left, lock the folder until the run's stack closes, resume, and take up the files."""
        config = self.config
        self.sampler, self.policy = sampler, sampler.policy
        self.batches, self.optimizer = batches, optimizer
        batches.fingerprint = self.fingerprint + str(sampler.tokenizer.chat_template)
        self.eval_groups = []
        if self.eval_rows:
            self.eval_groups = encode_rows(self.eval_rows, sampler, "--eval-data", online=True)
        from_first_rank(lambda: lock(self.out, config, self.stack))
        if config.sampler != "generate":
            path, _, name = config.sampler.rpartition(":")
            with explained(f"--sampler {config.sampler}", "see the docstring of configs/external.py"):
                sampler.external = runpy.run_path(path)[name](self).__call__  # None has none
        first = 1
        if self.checkpoint:
            first += load_checkpoint(self.checkpoint, optimizer, reference)
        if RANK == 0:
            self.track = start_tracker(config, self.out) if config.track else None
            self.take_up_folder(first)
            describe(self, first)
            warn_of_oddities(self)
        for line in from_first_rank(lambda: read_lines(self.out / "metrics.jsonl")):
            self.watch(line)
            self.latest |= line
        self.steps = tqdm(range(first, batches.steps + 1), config.loss, batches.steps, initial=first - 1,
                          **{"disable": True} if RANK else {})
        if first == 1:
            self.latest = {f"{name}_before": value for name, value in self.measure(0).items()}

    def take_up_folder(self, first: int) -> None:
        """Make the folder's files those of a run whose next step is `first`."""
        for unfinished in [*self.out.glob("checkpoint/.step-*"), *self.out.glob(".final-*")]:
            shutil.rmtree(unfinished)  # of a killed process
        (self.out / "config.toml").write_text(to_toml(self.config), encoding="utf-8")
        for file in map(self.out.joinpath, LINES):
            if file.exists() and not self.checkpoint:
                kept = file.rename(file.with_stem(f"{file.stem}-{time.time_ns()}"))
                warn(f"no whole checkpoint, so the run starts afresh; what it wrote is kept as {kept}")
            elif file.exists():
                cut_lines(file, first)  # later steps are done again

    def measure(self, step: int) -> dict[str, float]:
        """On --eval-data: `accuracy`, the mean reward of new samples, and `greedy`, of greedy completions."""
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
        """Append rollouts to a file of the run, a line per completion; returns their metrics."""
        lines = []
        for number, group in enumerate(rollouts):
            texts = self.sampler.tokenizer.batch_decode(group.completions, skip_special_tokens=True)
            for i, ids in enumerate(group.completions):
                advantage = group.sequences[i].advantage if group.sequences else None
                lines.append(dict(
                    step=step, row=group.row, prompt_id=f"{step}-{number}", prompt=rows[group.row].prompt,
                    completion=texts[i], reward=group.rewards[i], advantage=advantage,
                    truncated=ids[-1] not in self.sampler.stops, tokens=ids, logps=group.logps[i],
                    temperature=self.config.temperature, top_p=self.config.top_p))
        if RANK == 0:
            append_lines(self.out / file, lines)
            if time.monotonic() > self.shown_at + 10:  # show the best one, now and then
                self.shown_at = time.monotonic()
                best = max(lines, key=lambda line: line["reward"])
                prompt = best["prompt"][-1]["content"][-20:]
                answer = best["completion"][:60]
                tqdm.write(f"step {step} best {best['reward']:6.2f}  {prompt!r} → {answer!r}")
        return {"reward_std": pstdev(line["reward"] for line in lines),
                "failed": sum(sum(group.failed) for group in rollouts),
                "truncated": fmean(line["truncated"] for line in lines),
                "entropy": -fmean(logp for line in lines for logp in line["logps"])}

    def log(self, line: dict) -> None:
        """Write a step's report to metrics.jsonl, --track and the progress bar, and warn of what it shows.
        Raises UserError where a sampler that should have the policy's weights gives others' log-probs."""
        # Below a --top-p of 1 they are those among the tokens left, larger by -log(top_p) at most.
        is_fp32 = self.policy.dtype == torch.float32 and not self.config.is_mixed
        limit = SAMPLER_GAP[is_fp32] - math.log(self.config.top_p)
        gap = line.get("sampler_gap", 0.0)
        if line.get("lag") == 0 and gap > limit:
            raise UserError(
                f"step {line['step']}: --sampler {self.config.sampler} is {gap:.3f} nats a token from the "
                f"policy, of the same weights, more than {limit:.3g}; compare dtypes and versions, and see "
                "whether it takes all new weights (a tied head?); then --resume latest")
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
                self.track(line, step=line["step"])
        self.steps.set_postfix(loss=line["loss"], reward=line.get("reward"), refresh=False)

    def finish(self) -> None:
        """Write the final folder, unless a signal ended the run."""
        if not self.stopped_at:
            final = self.out / "final"
            save_final(final, self.policy, self.sampler.tokenizer, self.config, self.batches.steps)
        if WORLD_SIZE > 1:
            dist.barrier()  # no rank leaves while another still writes

SAMPLER_GAP = {True: 0.05, False: 0.1}  # most nats a token between sampler and policy, in fp32 and in bf16
EVALUATION = 500_000  # a measurement's draws are those of its step plus this
LINES = ("metrics.jsonl", "rollouts.jsonl", "eval_rollouts.jsonl")  # files of lines that have a step

class Watch:
    """Warns, once each in a run, of what a step's report shows. A collapse: once the mean over 12 steps of
    -log π_θ of the completions that the loss wants likelier rises to twice its minimum, and by 0.3 nats per
    completion, the policy unlearns them along with the others (tests/claims counts how often it is so)."""

    def __init__(self):
        self.warned = set()
        self.length = 0.0  # of the first batch's completions: they may grow, which is no collapse
        self.wanted = deque(maxlen=12)
        self.best = -math.inf

    def __call__(self, line: dict[str, float]) -> list[str]:
        """The warnings that a line of the metrics gives reason for."""
        if "logp_wanted" in line:
            self.length = self.length or line.get("completion_length", 0.0)
            self.wanted.append(line["logp_wanted"] * self.length)
        wanted = math.nan
        if len(self.wanted) == self.wanted.maxlen:
            wanted = fmean(self.wanted)
            self.best = max(self.best, wanted)
        reasons = {
            "the run may be coming apart: the completions that the loss wants likelier fell; try --taper, a "
            "lower --lr, fewer syncs or fresher rollouts (--sample-every)":
                wanted < min(2 * self.best, self.best - 0.3),
            "more than half of the completions were cut off at --max-new-tokens; raise it, or ask for less":
                line.get("truncated", 0) > 0.5,
            "every completion that was drawn has the same reward; look at rollouts.jsonl and at --reward":
                line.get("reward_std", 1) < 1e-9,
        }
        found = [text for text, is_so in reasons.items() if is_so and text not in self.warned]
        self.warned |= set(found)
        return found

def append_lines(path: Path, lines: Iterable[dict]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)

def read_lines(path: Path) -> list[dict]:
    """What a file's lines hold, without those that a crash cut off."""
    lines = []
    for text in path.open("rb") if path.exists() else ():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return lines

def cut_lines(path: Path, end: int) -> None:
    """Leave out the lines of the steps from `end` on."""
    kept = path.with_suffix(".new")
    kept.unlink(missing_ok=True)
    append_lines(kept, [line for line in read_lines(path) if line["step"] < end])
    kept.replace(path)

def start_tracker(config: Config, out: Path) -> Callable:
    """The `log` of the module that --track names, told of the run. It takes each line of the metrics."""
    with explained(f"--track {config.track}", "pip install it, and log in",
                   attribute="name wandb, or a module with its functions init and log, such as trackio"):
        tracker = importlib.import_module(config.track)
        tracker.init(project="humanline", name=out.name, config=dataclasses.asdict(config))
        return tracker.log

def check_folder(out: Path, config: Config) -> None:
    """Raises UserError where the run's folder holds another run, or files of other origin with its names."""
    settings = out / "config.toml"
    is_run = settings.is_file() and settings.read_bytes().startswith(TOML_HEAD.encode())
    require(not (out / "final").exists(), f"--out {out} holds a finished run; choose another folder")
    for name in "config.toml", *LINES, "checkpoint":
        require(is_run or not (out / name).exists(),
                f"--out {out}: {name} there was not written by this version of humanline.py; choose "
                "another folder")
    require(config.resume is not None or not is_run,
            f"--out {out} holds a run that did not finish; go on with --resume latest, or choose another")

def lock(out: Path, config: Config, stack: contextlib.ExitStack) -> None:
    """Make the run's folder, and hold its lock until `stack` closes or the process ends."""
    with explained(f"--out {out!s:.60}", "choose another folder",
                   unavailable="another process trains into it; choose another folder"):
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    check_folder(out, config)  # again: another run may have come and gone

def note_signals(stack: contextlib.ExitStack) -> list[int]:
    """A list that SIGTERM, SIGHUP and Ctrl-C are added to until `stack` closes: stop after this step."""
    received = []

    def note(number, _):
        received.append(number)
        text = f"humanline.py: warning: {signal.Signals(number).name}: stopping after this step\n"
        with contextlib.suppress(OSError):  # at once: stderr's buffer may be in use, its terminal gone
            os.write(2, text.encode())
        if number == signal.SIGINT and WORLD_SIZE == 1:  # a second one stops at once
            signal.signal(number, signal.default_int_handler)

    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        stack.callback(signal.signal, number, signal.signal(number, note))
    return received

# ---------- Models ------------------------------------------------------------------------------------------

@contextlib.contextmanager
def explained(what: str, advice: str, **advice_by_word: str) -> Iterator[None]:
    """Turns what loading code raises into a line: `what` failed, the reason, the advice for a word in it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # transformers, datasets and huggingface_hub raise dozens of kinds
        text = str(error).strip() or type(error).__name__
        if isinstance(error, KeyError):
            text = f"no {text}"
        reason = text.splitlines()[0].rstrip(" .")
        advice = next((advice_by_word[word] for word in advice_by_word if word in text), advice)
        raise UserError(f"{what}: {reason}; {advice}") from error

def load_policy(config: Config, device: torch.device) -> tuple[Module, Any]:
    """The model and its tokenizer, by hub name or folder, ready for training, and without dropout, which
    would make the log-ratio of a policy with itself noise instead of 0."""
    from transformers import AutoTokenizer
    name = config.model
    with ranks_in_turn() if config.shard else contextlib.nullcontext():
        with explained(
                f"--model {name}", "name a Hugging Face model or a folder; `hf download NAME --local-dir "
                "FOLDER` makes one, given a network; without one set HF_HUB_OFFLINE=1",
                trust_remote_code="to let it run, say --trust-remote-code",
                attn_implementation="choose another --attn", peft="pip install peft"):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
            require(tokenizer.chat_template or not config.template_values,
                    f"--template-values: {name} has no template")
            with explained("--template-values", "write JSON, such as '{\"enable_thinking\": false}'"):
                values = dict(json.loads(config.template_values or "{}"))
            values.setdefault("date_string", "26 Jul 2024")  # one for ever: else no resume on the next day
            tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **values)
            policy = load_weights(config, device)
        require(tokenizer.eos_token_id is not None, f"--model {name}: its tokenizer has no end-of-sequence "
                "token, so completions could not end; set eos_token in tokenizer_config.json")
        config.is_mixed = is_mixed(policy, config)
        if config.lora:
            add_adapters(policy, config)
        switch_off_dropout(policy)
        if config.checkpoint_activations:
            older_name = policy.gradient_checkpointing_enable
            getattr(policy, "activation_checkpointing_enable", older_name)(dict(use_reentrant=False))
        layer_names = policy._no_split_modules or ()
        layers = [module for module in policy.modules() if type(module).__name__ in layer_names]
        if config.compile:
            for layer in layers:  # once for all of them, and for all lengths of a batch
                layer.compile(dynamic=True)
        if config.shard:
            shard(policy, layers, device, config)
        policy.to(device)
    policy.train()
    check_output_head(policy, config)
    config.shares_prompts = all(gather_from_ranks(can_share_prompts(policy, config)))  # all ranks cut alike
    return policy, tokenizer

def load_weights(config: Config, device: torch.device) -> Module:
    """The model of --model; a peft folder's adapters are merged into the weights that they belong to. Raises
    UserError where weights are missing, which would be random, or have no place."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import find_adapter_config_file
    name = config.model
    has_adapters = find_adapter_config_file(name) is not None
    if has_adapters:
        from peft import PeftConfig, PeftModel
        require(not config.lora, f"--model {name} has adapters already; merge them before --lora adds others")
        name = PeftConfig.from_pretrained(name).base_model_name_or_path
    is_frozen_on_gpu = config.lora and device.type == "cuda" and config.dtype != "float32"
    is_bf16 = config.dtype == "bfloat16" or is_frozen_on_gpu
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    policy, info = AutoModelForCausalLM.from_pretrained(
        name, output_loading_info=True, dtype=dtype, attn_implementation=config.attn,
        trust_remote_code=config.trust_remote_code)
    foreign = ", ".join(sorted(info["unexpected_keys"])[:3])
    missing = ", ".join(sorted(info["missing_keys"])[:3])
    require(not foreign, f"--model {name}: it has no place for {foreign} of its files; mend its config.json")
    require(not missing, f"--model {name}: its files lack {missing}, which would be random")
    if has_adapters:
        policy = PeftModel.from_pretrained(policy, config.model).merge_and_unload()
        policy.requires_grad_(True)
    return policy

def add_adapters(policy: Module, config: Config) -> None:
    """Freeze the policy, and put adapters beside its linear layers but the head. New ones change nothing."""
    with explained("--lora", "pip install peft"):
        from peft import LoraConfig
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, "lora"))
        policy.add_adapter(LoraConfig(r=config.lora, lora_alpha=config.lora_alpha, task_type="CAUSAL_LM",
                                      target_modules="all-linear"))
    for p in policy.parameters():
        stays_fp32 = p.requires_grad or not config.is_mixed
        p.data = p.data.to(torch.float32 if stays_fp32 else torch.bfloat16)
    for module in policy.modules():
        if hasattr(module, "lora_A"):  # autocast casts what it must; peft would keep a copy for each adapter
            module.cast_input_dtype_enabled = False

def switch_off_dropout(policy: Module) -> None:
    """Models keep its rate in modules, or in numbers that they hand to functions."""
    for module in policy.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)

def trained(policy: Module) -> dict[str, Tensor]:
    """The parameters that training changes, by name: all of them, or with --lora the adapters."""
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}

def shard(policy: Module, layers: list[Module], device: torch.device, config: Config) -> None:
    """FSDP2: each rank keeps its part of every layer's weights, and gathers a layer when it is needed."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    mesh = dist.init_device_mesh(device.type, (WORLD_SIZE,))
    precision = MixedPrecisionPolicy(torch.bfloat16 if config.is_mixed else None, torch.float32)
    for module in [*layers, policy]:  # resharded, so that parameters() are always the shards
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    policy.completion_logps = functools.partial(completion_logps, policy)
    register_fsdp_forward_method(policy, "completion_logps")  # gathers the embeddings around it

@torch.no_grad()
def check_output_head(policy: Module, config: Config) -> None:
    """Raises UserError where `log_probs` is not the model's own log-softmax."""
    ids = torch.arange(8, device=policy.device)[None] % policy.config.get_text_config().vocab_size
    sequence = Sequence(ids[0, :1].tolist(), ids[0, 1:].tolist())
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=config.is_mixed):
        ours = log_probs(policy, [[sequence]])
        logits = policy(input_ids=ids, use_cache=False).logits
    theirs = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    tolerance = 0.005 if policy.dtype == torch.float32 and not config.is_mixed else 0.05
    name = f"--model {config.model}"
    require(logits.isfinite().all(), f"{name}: its logits are not finite numbers; its weights are spoilt")
    require(torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance),
            f"{name}: its logits are not hidden states times output embeddings, which token_logps needs, or "
            "they are random in training")

@torch.no_grad()
def can_share_prompts(policy: Module, config: Config) -> bool:
    """Whether tokens meet in nothing but full attention, with the mask and positions that it is given."""
    text = policy.config.get_text_config()
    window = "sliding" if getattr(text, "sliding_window", None) else "full_attention"
    kinds = getattr(text, "layer_types", None) or [window]
    if set(kinds) != {"full_attention"} or text._attn_implementation != "sdpa":
        return False
    pair = [Sequence([1, 2, 3, 4], [5, 6, 7]), Sequence([1, 2, 3, 4], [7, 6])]
    with contextlib.suppress(Exception), torch.compiler.set_stance("force_eager"):  # it may raise anything
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=config.is_mixed):
            in_one_row = log_probs(policy, [pair])
            in_own_rows = log_probs(policy, [[sequence] for sequence in pair])
        return torch.allclose(in_one_row, in_own_rows, rtol=0.05, atol=0.05)
    return False

def is_mixed(policy: Module, config: Config) -> bool:
    """Whether weights are fp32 and products bf16. `--dtype auto` does so on a GPU, and for large models on a
    CPU that multiplies in bf16."""
    if config.dtype != "auto":
        return config.dtype == "mixed" or (config.lora > 0 and config.dtype == "bfloat16")  # fp32 adapters
    is_large = sum(p.numel() for p in policy.parameters()) >= 20_000_000
    return torch.cuda.is_available() or (is_large and torch.cpu._is_avx512_bf16_supported())

# ---------- Data --------------------------------------------------------------------------------------------
# Rows on disk -> groups of rewarded completions -> batches.

@dataclass
class Row:
    """One row of the data, checked. `completions` with their `rewards` are a group; a pair has 1 and 0."""

    where: str  # file and row number, for messages
    prompt: list[dict]  # messages
    fields: dict  # the row as it was read, for the reward
    completions: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    labelled: bool = False  # see Group
    tokens: list[list[int]] = field(default_factory=list)  # of the completions, as they were sampled
    logps: list[list[float]] = field(default_factory=list)  # log μ of those tokens, or empty

def read_rows(spec: str, config: Config, flag: str) -> list[Row]:
    """Read NAME[:[CONFIG:]SPLIT] and check every row; raises UserError naming the first bad one."""
    source = f"{flag} {spec}"
    rows = {}
    dropped = 0
    for number, fields in enumerate(itertools.islice(read_table(spec, source), config.limit), 1):
        where = f"{source} row {number}"
        with explained(f"{where} cannot be read", "the README shows which columns it needs"):
            row = read_row(fields, where, config)
        if row is None:
            dropped += 1
            continue
        key = number
        if "prompt_id" in fields and len(row.rewards) == 1 and not row.labelled:  # a group as several rows
            key = f"{fields['prompt_id']} {row.prompt}"  # two runs may share an id
        first = rows.setdefault(key, row)
        if first is not row:
            first.completions += row.completions
            first.rewards += row.rewards
            first.tokens += row.tokens
            first.logps += row.logps
    if dropped:
        warn(f"{source}: dropped {dropped} rows whose dialogues differ before the last turn, or end without "
             "an answer")
    require(rows, f"{source}: no rows")
    return list(rows.values())

def read_table(spec: str, source: str) -> Iterable[dict]:
    """The rows of NAME[:[CONFIG:]SPLIT]."""
    kind = Path(spec).suffix.lower()
    if kind in (".jsonl", ".json"):  # of which `datasets` would turn texts into numbers and dates
        return read_json(Path(spec), source)
    import datasets
    datasets.disable_progress_bars()
    with explained(
        source,
        "name a .jsonl, .json, .csv or .parquet file, a folder, or a data set of the hub; `hf download "
        "NAME --repo-type dataset --local-dir FOLDER` makes a folder of it, given a network",
    ):
        if kind == ".parquet":
            return datasets.Dataset.from_parquet(spec)
        if kind == ".csv":
            import pandas
            texts = pandas.read_csv(spec, dtype=str, keep_default_na=False, na_values=[""])
            require(isinstance(texts.index, pandas.RangeIndex),
                    f"{source} row 1: more values than columns; quote a text that holds a comma")
            return datasets.Dataset.from_pandas(texts)
        name, *parts = spec.split(":")
        split = parts.pop() if parts else "train"
        if Path(name).is_dir():
            files = datasets.load_dataset_builder(name, *parts).config.data_files[split]
            if Path(files[0]).suffix in (".jsonl", ".json", ".csv"):
                return [row for file in files for row in read_table(file, source)]
        return datasets.load_dataset(name, *parts, split=split)

def read_json(path: Path, source: str) -> Iterator[dict]:
    """JSON lines, or one list of objects."""
    with explained(source, "name a file of JSON lines, or of one JSON list"):
        text = path.read_bytes().strip()
        if text.startswith(b"["):
            yield from json.loads(text)
            return
    for number, line in enumerate(text.splitlines(), 1):
        with explained(f"{source} row {number}: not JSON", "mend the row or remove it"):
            yield json.loads(line)

# What data sets call our columns: GSM8K, MATH, UltraFeedback-ArmoRM, HALOs. For another name add a line.
COLUMN_NAMES = {
    "question": "prompt",
    "problem": "prompt",
    "output": "completion",
    "all_generated_responses": "completions",
    "all_rm_scores": "scores",
    "output_A": "chosen",
    "output_B": "rejected",
}

def read_row(fields: dict, where: str, config: Config) -> Row | None:
    """Bring a row's columns under our names, its answers into dialogues, these into a prompt and completions.

    A `prompt` comes with `completions` and `scores`, with `chosen` and `rejected`, with `completion` and
    `label`, or alone, to be sampled from. Answers may be whole dialogues, whose common turns are the prompt;
    None is returned where not just an answer follows those."""
    fields = {name: value for name, value in fields.items() if value is not None}  # None fills gaps
    known = {COLUMN_NAMES.get(name, name): value for name, value in fields.items()} | fields
    answers, rewards = find_answers(known, where)
    row = Row(where, [], fields, rewards=rewards)
    row.labelled = len(answers) == 1 and "label" in known
    if "prompt" in known:
        row.prompt = read_messages(known["prompt"], "user", where)
    if "tokens" in known and "logps" in known:  # a line of a run's rollouts.jsonl
        ids, logps = known["tokens"], known["logps"]
        is_right = len(ids) == len(logps) > 0 <= min(ids) and max(logps) < 0.01
        require(is_right, f"{where}: 'tokens' and 'logps' are not token ids and as many log-probs")
        row.completions = answers
        row.tokens = [ids]
        if known.get("temperature", 1) == known.get("top_p", 1) == 1:  # as log π_θ is, offline
            row.logps = [logps]
    elif answers:
        dialogues = [read_messages(answer, "assistant", where) for answer in answers]
        if not split_answers(row, dialogues):
            return None
    require(row.prompt, f"{where}: no 'prompt'; every row needs it")
    if config.prompt_template is not None and not row.tokens:  # a rollout's prompt has it already
        known["prompt"] = row.prompt[-1]["content"]
        with explained(f"{where}: --prompt-template", "name a column of the rows"):
            text = re.sub(r"\{([a-zA-Z_]\w*)\}", lambda name: str(known[name[1]]), config.prompt_template)
        row.prompt[-1]["content"] = text
    system = known.get("system") or config.system
    if system is not None and row.prompt[0]["role"] != "system":
        row.prompt.insert(0, dict(role="system", content=system))
    return row

def find_answers(known: dict, where: str) -> tuple[list, list[float]]:
    """A row's answers, texts or messages, with their rewards or labels. A group counts before a pair."""
    answers, rewards = [], []
    if "completions" in known:
        answers = known["completions"]
        rewards = known["scores"]
    elif "chosen" in known:
        answers = [known["chosen"], known["rejected"]]
        rewards = [known["label"] if "output_A" in known else 1, 0]  # HALOs: whether A is better
    elif "completion" in known and {"label", "reward"} & known.keys():
        answers = [known["completion"]]
        rewards = [known.get("label", known.get("reward"))]
    require(len(answers) == len(rewards), f"{where}: {len(answers)} completions have {len(rewards)} scores")
    for i, reward in enumerate(rewards):
        with contextlib.suppress(ValueError):  # of a CSV: 1, 0.5 or True, or else a word
            rewards[i] = json.loads(str(reward).lower())
        require(isinstance(rewards[i], (int, float)) and abs(rewards[i]) < 1e100,
                f"{where}: a score or label is {reward!r:.60}; it must be a number below 1e100")
    if "output_A" in known:
        rewards[1] = 1 - rewards[0]
    is_label = "label" in known and "completions" not in known
    require(not is_label or set(rewards) <= {0, 1, -1},
            f"{where}: a label is {known.get('label')!r:.60}; it must be 1 or true for a good completion, or "
            "0, -1 or false; turn ratings into such labels")
    return answers, [float(reward) for reward in rewards]

def read_messages(value: Any, role: str, where: str) -> list[dict]:
    """A text by `role`, or chat messages, as messages; HH-RLHF's "Human:" and "Assistant:" are split."""
    if isinstance(value, str):
        is_dialogue = re.match(r"(?s)\s*\[\s*\{.*['\"]role['\"]:\s*['\"](system|user|assistant)", value)
        require(not is_dialogue, f"{where}: chat messages in a text; write the rows as JSON lines")
        before, *parts = re.split(r"\n\n(Human|Assistant): ?", value)
        if role == "assistant" and not before.strip() and len(parts) > 2:
            roles = dict(Human="user", Assistant="assistant")
            return [dict(role=roles[who], content=text.strip()) for who, text in zip(parts[::2], parts[1::2])]
        value = [dict(role=role, content=value)]
    messages = []
    for turn in value:
        unread = ("tool_calls", "reasoning_content", "reasoning", "thinking")
        lost = [name for name in unread if turn.get(name)]
        require(not lost, f"{where}: a message has {lost}, which is not read; write it into 'content'")
        require(isinstance(turn["content"], str),
                f"{where}: a message's content is {turn['content']!r:.60}, not text")
        messages.append(dict(role=turn["role"], content=turn["content"]))
    require(messages[-1]["content"].strip(), f"{where}: an empty text of the {role}; remove the row")
    return messages

def split_answers(row: Row, dialogues: list[list[dict]]) -> bool:
    """Make a prompt of the turns in which all dialogues begin, and completions of their last turns; False
    where the turns before the last differ, or the last is no answer."""
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

def encode_rows(rows: list[Row], sampler: "Sampler", flag: str = "--data",
                online: bool | None = None) -> list[Group]:
    """Rows -> groups of token ids; over-long ones are dropped. online: completions are to be drawn; None: as
    --sample-every says."""
    config, tokenizer = sampler.config, sampler.tokenizer
    if online is None:
        online = config.sample_every > 0
    if online:
        sampler.check_rows(rows)
        rows = [dataclasses.replace(row, completions=[], tokens=[]) for row in rows]
    has_answers = any(turn["role"] == "assistant" for row in rows for turn in row.prompt)
    if flag == "--data" and has_answers and not tokenizer.chat_template:
        tokenizer.chat_template = TRANSCRIPT
        warn(f"{flag}: its dialogues are written as Human: … Assistant: …, as the model has no chat template")
    with explained(f"{flag}: the model's chat template refuses a prompt",
                   "change the prompts, or leave out --system"):
        encoded = encode_dialogues(tokenizer, rows)
    longest = min(sampler.longest, config.max_length or sampler.longest)
    longest_prompt = config.max_prompt_length or longest
    groups = []
    foreign = 0
    for number, (row, (prompt, *wholes)) in enumerate(zip(rows, encoded)):
        group = Group(number, prompt, row.tokens, row.rewards, row.labelled)
        if are_tokens_of(tokenizer, row):
            if len(row.logps) == len(row.tokens):
                group.logps = row.logps
        else:
            foreign += len(row.tokens) > 0
            group.prompt = os.path.commonprefix([prompt, *wholes])
            stops = sampler.stops
            group.completions = [cut_at_stop([*ids[len(group.prompt):], stops[0]], stops) for ids in wholes]
        texts = (group.prompt, *group.completions)
        require(all(texts) and sampler.vocabulary.issuperset(itertools.chain(*texts)),
                f"{row.where}: the tokenizer of --model {config.model} makes no tokens of it, or some that "
                "the model does not know; use the model's own")
        room = max(map(len, group.completions), default=config.max_new_tokens)
        if len(group.prompt) <= longest_prompt and len(group.prompt) + room <= longest:
            groups.append(group)
    if foreign:
        warn(f"{flag}: the tokens of {foreign} rows are not what this tokenizer makes of their text, which "
             "is taken instead, with an end; so their sampler is unknown")
    limits = (f"a prompt must fit in {longest_prompt} tokens, and with its completion in {longest} of the "
              f"model's {sampler.longest}; see --max-length, --max-prompt-length and --max-new-tokens")
    require(groups, f"{flag}: no row is left: {limits}")
    if len(groups) < len(rows):
        warn(f"{flag}: dropped {len(rows) - len(groups)} rows as over-long: {limits}")
    return groups

def are_tokens_of(tokenizer: Any, row: Row) -> bool:
    """Whether a row has tokens, and they are this tokenizer's."""
    largest = max(map(max, row.tokens), default=math.inf)
    if largest >= len(tokenizer):
        return False
    return tokenizer.batch_decode(row.tokens, skip_special_tokens=True) == row.completions

def encode_dialogues(tokenizer: Any, rows: list[Row]) -> list[list[list[int]]]:
    """For each row the token ids of its prompt, up to where the model is to go on, and of its prompt with
    each of its answers, as the chat template writes them. What is trained is what these do not share:

        <user> 2+2? <assistant>                         the prompt
        <user> 2+2? <assistant> It is 4. <end>          with an answer
        <------- common ------> <- completion ->

    So an empty thought that Qwen3 puts before an answer is a part of it. DeepSeek-R1 opens a thought at the
    end of a prompt, and none before an answer; there the prompt of an answer ends earlier."""
    is_plain = not tokenizer.chat_template  # a template writes special tokens itself
    texts = []
    for row in rows:
        start = render(tokenizer, row.prompt, add_generation_prompt=True)
        require(is_written(row.prompt, start),
                f"{row.where}: the model's chat template leaves out a message of its prompt")
        texts += [start, *(place_answer(tokenizer, row, start, answer) for answer in row.completions)]
    ids_of = iter(tokenizer(texts, add_special_tokens=is_plain)["input_ids"])
    encoded = [[next(ids_of) for _ in ("prompt", *row.completions)] for row in rows]
    for prompt, *_ in encoded:
        if is_plain and prompt[-1:] == [tokenizer.eos_token_id]:  # some put an end behind every text
            prompt.pop()
    return encoded

# For a model without a chat template: texts, and dialogues.
PLAIN = ("{% for turn in messages %}{{ '\n\n' if not loop.first and turn.role != 'assistant' }}"
         "{{ turn.content }}{% endfor %}")
TRANSCRIPT = ("{{ bos_token }}{% for turn in messages %}{{ '\n\n' + dict(user='Human').get(turn.role, "
              "turn.role.title()) + ':\n' + turn.content }}{% endfor %}"
              "{% if add_generation_prompt %}{{ '\n\nAssistant:\n' }}{% endif %}")

def render(tokenizer: Any, dialogue: list[dict], **settings: Any) -> str:
    """A dialogue as the chat template writes it."""
    template = None if tokenizer.chat_template else PLAIN
    return tokenizer.apply_chat_template(dialogue, chat_template=template, tokenize=False, **settings)

def place_answer(tokenizer: Any, row: Row, start: str, answer: str) -> str:
    """A prompt with its answer as the chat template writes them; or the answer behind `start`, if that leaves
    out the answer's thought (DeepSeek-R1) or the prompt's system message (Mistral)."""
    whole = render(tokenizer, row.prompt + [dict(role="assistant", content=answer)])
    has_thought_opened = whole.startswith(start) or "</think>" not in answer
    if has_thought_opened and answer.strip() in whole and is_written(row.prompt, whole):
        return whole
    if answer.startswith("<think>"):
        start = start.removesuffix("<think>\n")
    return start + answer

def is_written(turns: list[dict], text: str) -> bool:
    """Whether a text holds what all turns say, but for thoughts, which templates drop from earlier turns."""
    return all(turn["content"].split("</think>")[-1].strip() in text for turn in turns)

@dataclass
class Batch:
    """What one optimizer step trains on. DPO: chosen, rejected, chosen, rejected, …"""

    step: int
    sequences: list[Sequence]
    mismatched: list[Sequence]  # KTO: prompts with another prompt's completion, for z₀
    reward: float  # mean reward of all completions behind the batch
    no_difference: float | None = None  # share of the groups behind it whose rewards are all the same

class Batches:
    """The batches of a run, in order. Offline they are a function of the step; online they are made of
    rollouts. `pending` holds those that are made and not yet trained on."""

    def __init__(self, config: Config, groups: list[Group], longest: int):
        self.config = config
        self.longest = longest
        self.fingerprint = ""  # of the rows and the model, if somebody takes one
        self.loss = LOSSES[config.loss]
        self.pending = deque()
        self.made_until = 0  # the last step whose batch has been made
        self.prompts = len(groups)
        self.pool = groups  # online prompts, offline units with their groups
        self.per_step = config.batch_size  # how many of them a step takes
        if config.sample_every and self.loss.unit == "example":  # of which a prompt gives a group
            self.per_step, rest = divmod(config.batch_size, config.group_size)
            require(not rest, f"--batch-size {config.batch_size} counts completions, which come in groups of "
                    f"--group-size {config.group_size}; use a multiple of it")
        if not config.sample_every:
            require(all(group.completions for group in groups), "--data: prompts without completions, or "
                    "without their labels; draw them with --sample-every 1")
            require(self.loss.unit == "example" or not any(group.labelled for group in groups), "--data: "
                    "labelled completions make no pairs or groups; use --loss kto, or --sample-every 1")
            make_units(groups, config)
            self.pool = [(unit, group) for group in groups for unit in group.units]
            require(self.pool, "--data: no row has a better and a worse completion to learn from")
        require(self.per_step <= len(self.pool), f"--batch-size {config.batch_size}: a step takes "
                f"{self.per_step} prompts, pairs or examples, and --data has {len(self.pool)}; lower it")
        self.steps = config.steps or len(self.pool) // self.per_step  # of the whole run
        self.order = []  # of the pool's members, over the run; each epoch has its own
        needed = self.steps * self.per_step
        for epoch in range(math.ceil(needed / len(self.pool))):
            generator = torch.Generator().manual_seed(seed_for(config.seed, "order", epoch))
            self.order += torch.randperm(len(self.pool), generator=generator).tolist()
        del self.order[needed:]

    def of_steps(self, first: int, last: int) -> list:
        """What the steps from `first` to `last` take from the pool: online the prompts to draw for."""
        return [self.pool[i] for i in self.order[(first - 1) * self.per_step : last * self.per_step]]

    def next(self, step: int) -> Batch:
        """The batch of the next step."""
        if not self.config.sample_every and not self.pending:
            self.make(step)
        return self.pending.popleft()

    def ahead(self, until: int) -> list[Batch]:
        """The coming batches up to the step `until`, as far as they can be known now."""
        if not self.config.sample_every:
            self.make(until)
        return [batch for batch in self.pending if batch.step <= until]

    def make(self, until: int, rollouts: list[Group] | None = None) -> None:
        """Make the batches up to the step `until`: online of the rollouts of the prompts `of_steps`."""
        first = self.made_until + 1
        if rollouts is not None:
            make_units(rollouts, self.config)
        for step in range(first, until + 1):
            if rollouts is None:
                members = self.of_steps(step, step)
                units = [unit for unit, _ in members]
                groups = [group for _, group in members]
            else:
                start = (step - first) * self.per_step
                groups = rollouts[start : start + self.per_step]
                units = [unit for group in groups for unit in group.units]
            sequences = [dataclasses.replace(sequence) for unit in units for sequence in unit]
            mismatched = self.mismatch(sequences) if self.loss.needs_mismatched else []
            no_difference = None
            if self.config.sample_every or self.loss.unit == "group":
                no_difference = fmean([max(group.rewards) == min(group.rewards) for group in groups])
            reward = fmean([fmean(group.rewards) for group in groups])
            self.pending.append(Batch(step, sequences, mismatched, reward, no_difference))
            self.made_until = step

    def mismatch(self, sequences: list[Sequence]) -> list[Sequence]:
        """Each prompt with the completion of the next sequence that has another prompt, for z₀."""
        mismatched = []
        for i, sequence in enumerate(sequences):
            for other in sequences[i + 1 :] + sequences[:i]:
                if other.prompt != sequence.prompt:
                    completion = other.completion[: self.longest - len(sequence.prompt)]
                    mismatched.append(Sequence(sequence.prompt, completion, is_chosen=sequence.is_chosen))
                    break
        return mismatched

def make_units(groups: list[Group], config: Config) -> None:
    """Each group's completions as sequences, with their advantages in the group and, with --prior, to the
    mean reward of all groups; and the units that the loss makes of them."""
    loss = LOSSES[config.loss]
    mean_reward = fmean([fmean(group.rewards) for group in groups])
    # The M_P and M_R of --perception sample are maxima over all tokens.
    needs_all = (loss.needs_all or loss.unit != "group" or config.kl_beta > 0
                 or config.perception == "sample")
    for group in groups:
        rewards = torch.tensor(group.rewards, dtype=torch.float64)
        one_group = torch.zeros(len(rewards), dtype=torch.long)
        advantages = group_advantages(
            rewards, one_group, scale=config.scale_rewards, prior=config.prior, prior_mean=mean_reward)
        advantages[advantages.abs() < 1e-9] = 0  # but for rounding there is no difference
        group.sequences = []
        for i, completion in enumerate(group.completions):
            advantage = float(advantages[i])
            sequence = Sequence(group.prompt, completion, advantage, is_chosen=advantage > 0)
            sequence.is_idle = advantage == 0 and not needs_all
            if group.logps:
                sequence.sampler_logps = torch.tensor(group.logps[i], dtype=torch.float32)
            group.sequences.append(sequence)
        group.units = loss.make_units(group)
    loss.set_weights([sequence for group in groups for unit in group.units for sequence in unit], config)

# ---------- Rollouts ----------------------------------------------------------------------------------------
# Completions drawn from the policy, with their rewards.

Completion = tuple[list[int], list[float]]  # token ids as they were drawn, and the log-prob of each

class Sampler:
    """Draws groups of completions from the policy and rewards them, for training and for measuring."""

    def __init__(self, policy: Module, tokenizer: Any, config: Config):
        self.policy, self.tokenizer, self.config = policy, tokenizer, config
        with explained(f"--model {config.model}: its chat template fails", "put another in its folder"):
            self.stops = stop_ids(policy, tokenizer)
        self.longest = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or 2**31
        self.vocabulary = set(range(len(policy.get_input_embeddings().weight)))
        self.external = None  # draws instead of the policy's `generate`
        is_asked = config.sample_every or config.eval_data is not None  # loading one may take its time
        self.reward = Reward(config) if is_asked else None

    def check_rows(self, rows: list[Row]) -> None:
        """Raises UserError for the first row that lacks what the reward needs."""
        name = self.config.reward
        columns = NEEDED_COLUMNS.get(name) if self.reward else None
        for row in rows if columns else ():
            require(row.fields.keys() & columns,
                    f"{row.where}: no {' and no '.join(columns)}; --reward {name} needs it")

    def draw_rollouts(self, prompts: list[Group], rows: list[Row], size: int, step: int,
                      greedy: bool = False) -> list[Group]:
        """`size` completions with rewards for each prompt: plan the calls, draw, reward, gather. The draws
        are a function of --seed, `step` and the calls, which --sample-tokens and the number of ranks decide.
        `rows` are those that the prompts' `row` counts. UserError for a reward that never worked."""
        repeated = [group for group in prompts for _ in range(size)]
        calls = self.plan_calls(repeated)
        if self.external:
            with explained(f"--sampler {self.config.sampler}", "see the docstring of configs/external.py"):
                drawn = self.checked(self.external(prompts, size, step, greedy), len(repeated))
        else:
            drawn = self.draw(repeated, calls, step, greedy)
        rewarded = {}
        for places in calls.values():
            texts = self.tokenizer.batch_decode([drawn[i][0] for i in places], skip_special_tokens=True)
            of = [rows[repeated[i].row] for i in places]
            rewards = [None] * len(places)
            if self.reward:
                rewards = self.reward([row.prompt for row in of], texts, [row.fields for row in of])
            for i, reward in zip(places, rewards):
                rewarded[i] = (*drawn[i], reward)
        everything = {}
        for part in gather_from_ranks(rewarded):
            everything |= part
        if self.reward and not any(gather_from_ranks(self.reward.worked)):
            raise UserError(f"--reward {self.config.reward} failed on every sample of the first rollouts: "
                            f"{self.reward.failure!r:.200}")
        rollouts = []
        for number, group in enumerate(prompts):
            found = [everything[i] for i in range(number * size, (number + 1) * size)]
            ids, logps, rewards = map(list, zip(*found))
            failed = [reward is None for reward in rewards]
            rewards = [self.config.reward_failed if reward is None else reward for reward in rewards]
            rollouts.append(Group(group.row, group.prompt, ids, rewards, failed=failed, logps=logps))
        return rollouts

    def checked(self, drawn: list[Completion], count: int) -> list[Completion]:
        """What a --sampler returned; ValueError where it is not `count` completions, each a list of token ids
        up to and with the first stop token, or --max-new-tokens long, and a list of their log-probs."""
        completions = []
        for ids, logps in drawn:
            whole = cut_at_stop([*ids, self.stops[0]], self.stops)[: self.config.max_new_tokens]
            is_whole = whole == ids and self.vocabulary.issuperset(ids)
            if is_whole and len(logps) == len(ids) and -math.inf < sum(logps) < 0.01:
                completions.append((ids, [round(value, 5) for value in logps]))
        if not len(completions) == len(drawn) == count:
            raise ValueError(f"{drawn!r:.80} is not {count} completions, each as token ids and log-probs")
        return completions

    def plan_calls(self, repeated: list[Group]) -> dict[int, list[int]]:
        """This rank's calls of `generate`, by their number among those of all ranks: places in `repeated`.
        All ranks have equally many, as FSDP must: the surplus changes nothing."""
        most = math.ceil(len(repeated) / WORLD_SIZE)
        widths = [len(group.prompt) + self.config.max_new_tokens for group in repeated]
        calls = []
        for packed in pack(widths, self.config.sample_tokens):
            for start in range(0, len(packed), most):
                calls.append(packed[start : start + most])
        turns = math.ceil(len(calls) / WORLD_SIZE)
        mine = [(turn * WORLD_SIZE + RANK) % len(calls) for turn in range(turns)]
        return {number: calls[number] for number in mine}

    def draw(self, repeated: list[Group], calls: dict[int, list[int]], step: int,
             greedy: bool) -> dict[int, Completion]:
        """The completions of this rank's calls of `generate`, by place."""
        drawn = {}
        bar = tqdm(calls.items(), "drawing", leave=False, delay=1, disable=RANK > 0 or None)
        with gathered(self.policy) if self.config.shard else contextlib.nullcontext():
            for number, places in bar:
                ids = [repeated[i].prompt for i in places]
                seed = seed_for(self.config.seed, "draw", step, number)
                drawn |= zip(places, sample(self.policy, ids, self.stops, self.config, seed, greedy))
        return drawn

@contextlib.contextmanager
def gathered(policy: Module) -> Iterator[None]:
    """Sharded, each rank gets all weights at the first forward pass of a `with` and keeps them to its end:
    otherwise `generate` gathers every layer for every token."""
    policy.set_reshard_after_forward(False)
    try:
        yield
    finally:
        for module in policy.modules():
            if hasattr(module, "set_reshard_after_forward"):  # FSDP has it
                module.set_reshard_after_forward(True, recurse=False)
                module.reshard()

@torch.no_grad()
def sample(policy: Module, prompts: list[list[int]], stops: list[int], config: Config, seed: int,
           greedy: bool = False) -> list[Completion]:
    """One completion per prompt from one call of `model.generate`: ids up to and with the first of `stops`,
    and the log-prob of each under the distribution that it was drawn from, to five digits; one that ends
    without a stop hit --max-new-tokens. The draws are a function of `seed`, and change no global state."""
    from transformers import GenerationConfig, TemperatureLogitsWarper, TopPLogitsWarper
    pad = stops[0]  # padding is masked: any token that the model knows will do
    generator = torch.Generator(policy.device).manual_seed(seed)
    logps = []  # (N, 1) for each position
    cumulative = torch.empty(0, dtype=torch.float64, device=policy.device)  # memory for all

    # T and top-p are given here and not in `settings`, as those come behind what is given here.
    processors = []
    if config.temperature != 1 and not greedy:
        processors.append(TemperatureLogitsWarper(config.temperature))
    if config.top_p < 1 and not greedy:
        processors.append(TopPLogitsWarper(config.top_p))
    processors.append(lambda _, scores: draw_tokens(scores, generator, cumulative, logps, greedy))
    settings = GenerationConfig(do_sample=False, eos_token_id=stops, pad_token_id=pad,
                                max_new_tokens=config.max_new_tokens, disable_compile=True)

    ids = [torch.tensor(prompt) for prompt in prompts]
    mask = [torch.ones_like(prompt) for prompt in ids]
    ids = pad_sequence(ids, True, pad, padding_side="left").to(policy.device)
    mask = pad_sequence(mask, True, 0, padding_side="left").to(policy.device)
    was_training = policy.training
    model_settings = policy.generation_config
    # What `settings` leaves out would come from the model's own, such as Qwen2.5's repetition penalty.
    policy.generation_config = GenerationConfig()
    policy.eval()
    try:
        with (torch.autocast(policy.device.type, torch.bfloat16, enabled=config.is_mixed),
              torch.compiler.set_stance("force_eager")):
            cache = prompt_cache(policy, ids, mask, config)
            drawn = policy.generate(ids, attention_mask=mask, past_key_values=cache, synced_gpus=config.shard,
                                    generation_config=settings, logits_processor=processors)
    finally:
        policy.train(was_training)
        policy.generation_config = model_settings

    completions = []
    for tokens, values in zip(drawn[:, ids.shape[1] :].tolist(), torch.cat(logps, 1).tolist()):
        tokens = cut_at_stop(tokens, stops)
        completions.append((tokens, [round(value, 5) for value in values[: len(tokens)]]))
    return completions

def draw_tokens(scores: Tensor, generator: torch.Generator, cumulative: Tensor, logps: list[Tensor],
                greedy: bool) -> Tensor:
    """Scores that leave one token of each row: the likeliest, or the one at which the cumulative distribution
    passes a random number. `generate`'s own way draws a number for each token of the vocabulary, which takes
    a fifth of the whole time."""
    probs = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    torch.cumsum(probs, -1, dtype=torch.float64, out=cumulative)
    total = cumulative[:, -1:]
    points = torch.rand(total.shape, generator=generator, dtype=torch.float64, device=scores.device) * total
    tokens = torch.searchsorted(cumulative, points, right=True)
    if greedy:
        tokens = probs.argmax(-1, keepdim=True)
    logps.append((probs.gather(1, tokens) / total).log())
    return scores.fill_(-math.inf).scatter_(1, tokens, 0.0)

def prompt_cache(policy: Module, ids: Tensor, mask: Tensor, config: Config) -> Any:
    """The keys and values of (N, T) prompts but for the last token of each, computed once where neighbours
    are the same prompt; None where that is nowhere so, or where `can_share_prompts` or FSDP is against it.
    Where a completion cannot be longer than the prompts, the cache has its full length from the start, in the
    dtype of the multiplications: empty places cost less than a cache that grows with each token."""
    from transformers import DynamicCache, StaticCache
    different, index = torch.cat([ids, mask], 1).unique_consecutive(dim=0, return_inverse=True)
    if len(different) == len(ids) or ids.shape[1] < 2 or config.shard or not config.shares_prompts:
        return None
    dtype = torch.bfloat16 if torch.is_autocast_enabled(policy.device.type) else policy.dtype
    cache = DynamicCache()
    if config.max_new_tokens <= ids.shape[1]:
        cast_update = lambda self, k, v, *more: StaticCache.update(self, k.to(dtype), v.to(dtype), *more)
        kind = type("FullLengthCache", (StaticCache,), {"update": cast_update})
        cache = kind(config=policy.config, max_cache_len=ids.shape[1] + config.max_new_tokens)
    ids, mask = different.tensor_split(2, 1)
    ids, mask = ids[:, :-1], mask[:, :-1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    policy.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
    cache.reorder_cache(index)
    return cache

def cut_at_stop(ids: list[int], stops: list[int]) -> list[int]:
    """Up to and with the first of `stops`; without one, all."""
    return ids[:next((i for i, token in enumerate(ids, 1) if token in stops), len(ids))]

def stop_ids(policy: Module, tokenizer: Any) -> list[int]:
    """Token ids that end a completion, the one that ends offline completions first."""
    configured = policy.generation_config.eos_token_id
    first = tokenizer.eos_token_id
    stops = {first, *(configured if isinstance(configured, list) else [configured])} - {None}
    # What the chat template writes behind an answer, such as <end_of_turn>.
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "humanline"}]
    behind = render(tokenizer, turns).split("humanline")[-1].strip()
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    if ids and ids[0] in stops | set(tokenizer.all_special_ids):
        first = ids[0]
    return [first, *sorted(stops - {first})]

# ---------- Rewards -----------------------------------------------------------------------------------------
# A number for each completion. What fails costs its sample --reward-failed, and never the run.

CONFIGS = Path(__file__).with_name("configs")
NEEDED_COLUMNS = {"exact": ["answer"], "math": ["answer", "solution"]}  # of which a row must have one

class Reward:
    """What --reward names, as a function(prompts, completions, rows) that gives a finite float for each
    completion, or None where it failed. Prompts are lists of messages (dicts with a `role` and a `content`),
    completions texts, rows dicts with all that the data has. UserError where it cannot be loaded."""

    def __init__(self, config: Config):
        self.config = config
        self.worked, self.failure = False, None  # whether it ever gave a number, and why it did not
        path, _, name = config.reward.rpartition(":")
        if config.reward == "math":
            path, name = str(CONFIGS / "math_reward.py"), "math"
            require(os.path.exists(path), f"--reward math needs {path}; copy that file there, too")
        with explained("--reward-args", "write a JSON object, such as '{\"model\": \"NAME\"}'"):
            settings = dict(json.loads(config.reward_args or "{}"))
        self.function = exact_reward
        advice = "write FILE.py:function, a function(prompts, completions, rows) -> list of floats"
        with explained(f"--reward {config.reward}", advice, math_verify="pip install math-verify"):
            if path:
                self.function = FunctionProcess(path, name, config.reward_seconds, settings)

    def __call__(self, *samples: list) -> list[float | None]:
        """Where rewarding all of them together fails, each is rewarded alone; what still fails, or is no
        finite number, is None, and counts as --reward-failed. One warning counts them."""
        count = len(samples[0])
        try:
            values = self.function(*samples)
            if not isinstance(values, list) or len(values) != count:
                raise ValueError(f"{values!r:.60} is no list of {count}")
            reasons = []
        except Exception as error:
            values = self.one_by_one(*samples)
            reasons = [error]
        good = [isinstance(value, (int, float)) and abs(value) < 1e100 for value in values]
        reasons += [value for value, is_good in zip(values, good) if not is_good]
        self.worked = self.worked or any(good)
        if reasons:
            self.failure = reasons[0]
            warn(f"--reward {self.config.reward}: {good.count(False)} of {count} samples failed and count as "
                 f"{self.config.reward_failed:g}; the first reason: {self.failure!r:.200}")
        return [float(value) if is_good else None for value, is_good in zip(values, good)]

    def one_by_one(self, *samples: list) -> list:
        """The value of each sample, or why there is none; no more are tried once three in a row are late."""
        values, late = [], 0
        for sample in zip(*samples):
            if late < 3:
                try:
                    [value] = self.function(*([part] for part in sample))
                except Exception as error:
                    value = error
            late = late + 1 if isinstance(value, TimeoutError) else 0
            values.append(value)
        return values

def exact_reward(prompts: list, completions: list[str], rows: list[dict]) -> list[float]:
    """1 for a completion that equals the row's `answer`, or one of a list, white space around it aside."""
    rewards = []
    for text, row in zip(completions, rows):
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        rewards.append(float(text.strip() in [str(answer).strip() for answer in answers]))
    return rewards

class FunctionProcess:
    """A function of the user's file in a process of its own, where it may hang, crash or exhaust its memory:
    only the call fails. Beyond `seconds` it raises TimeoutError, and the process ends with all that it
    started; the next call starts another. Returns a list; `settings` are further keyword arguments."""

    def __init__(self, path: str, name: str, seconds: float, settings: dict | None = None):
        self.path, self.name, self.seconds = os.path.abspath(path), name, seconds
        self.settings = settings or {}
        self.start()

    def start(self) -> None:
        self.pool = ProcessPoolExecutor(1)
        self.run(300)  # load the file

    def __call__(self, *arguments: Any) -> list:
        if self.pool is None:
            self.start()
        return self.run(self.seconds, *arguments)

    def run(self, seconds: float, *arguments: Any) -> list:
        path, name, settings, trainer = self.path, self.name, self.settings, os.getpid()

        def end_with_trainer():
            psutil.Process(trainer).wait()
            for child in psutil.Process().children(recursive=True):
                child.kill()
            os._exit(1)

        def call() -> tuple[list, str]:  # in the process, which imports nothing of this file
            try:
                if "users_file" not in sys.modules:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
                    threading.Thread(target=end_with_trainer, daemon=True).start()
                    with contextlib.suppress(OSError):  # where no memory is left, Linux ends this one first
                        Path("/proc/self/oom_score_adj").write_text("1000")
                    sys.path.insert(0, os.path.dirname(path))
                    spec = importlib.util.spec_from_file_location("users_file", path)
                    sys.modules["users_file"] = importlib.util.module_from_spec(spec)
                    spec.loader.exec_module(sys.modules["users_file"])
                function = getattr(sys.modules["users_file"], name)
                values = function(*arguments, **settings) if arguments else []
                if not isinstance(values, list):
                    values = values.tolist()  # of an array or a tensor
                return [value.item() if hasattr(value, "item") else value for value in values], ""
            except BaseException as error:  # sys.exit() too
                return [], f"{type(error).__name__}: {error}".splitlines()[0]

        try:
            values, failure = self.pool.submit(call).result(seconds)
        except BaseException as error:  # it took too long, died, or there was a Ctrl-C
            self.pool.shutdown(kill_workers=True)
            self.pool = None
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"took longer than {seconds:.4g} s") from None
            if isinstance(error, BrokenExecutor):
                raise RuntimeError("its process died: a crash, or no memory was left") from None
            raise
        if failure:
            raise RuntimeError(failure)
        return values

# ---------- The reference -----------------------------------------------------------------------------------

class Reference:
    """π_ref: an earlier policy, and its log-probs of the batches to come. There is no second model.

    Its weights (with LoRA the adapters) lie in host memory, and before a step the policy borrows them for a
    pass over the batch. That is right for any rule by which the reference follows the policy: write another
    `sync`, call it when you like, and say lookahead=False.

    Lookahead saves most of this. At a sync the reference *is* the policy, so where the next sync is known,
    one pass of the policy right then gives the log-probs of all batches up to it. The weights are put aside
    only if some of these batches are still to be drawn, and borrowed once for all that a drawing brings."""

    def __init__(self, policy: Module, batches: Batches, config: Config, lookahead: bool = True):
        self.policy, self.batches, self.config, self.lookahead = policy, batches, config, lookahead
        self.until = 0  # the last step that is known to be the present reference's
        self.weights: list[Tensor] | None = None  # in host memory; None: no batch will ask for them
        self.parts = [p.detach() for p in trained(policy).values()]  # this rank's parts of the policy's
        if config.shard:
            self.parts = [part.to_local() for part in self.parts]

    def sync(self, step: int) -> None:
        """π_ref ← π_θ, as it is before the update of this step."""
        if not self.config.needs_reference:
            return
        self.until = step
        if self.lookahead:  # to the next sync
            self.until = self.batches.steps
            if self.config.sync_k:
                self.until = min(self.until, step + self.config.sync_k)
            attach_logps("ref_logps", self.policy, self.batches.ahead(self.until), self.config)
        self.weights = None
        if not self.lookahead or self.batches.made_until < self.until:
            self.weights = [part.to("cpu", copy=True) for part in self.parts]

    def score(self, batch: Batch) -> None:
        """Before a step: see that its batch has the reference's log-probs."""
        sequences = batch.sequences + batch.mismatched
        lacks = any(sequence.ref_logps is None and not sequence.is_idle for sequence in sequences)
        if self.weights is None or not lacks:
            return
        self.swap_weights()
        others = [other for other in self.batches.pending if other.step <= self.until]
        attach_logps("ref_logps", self.policy, [batch, *others], self.config)
        self.swap_weights()
        if self.lookahead and self.batches.made_until >= self.until:
            self.weights = None

    def swap_weights(self) -> None:
        """Exchange the policy's weights and the reference's."""
        for i, part in enumerate(self.parts):
            present = part.to("cpu", copy=True)
            part.copy_(self.weights[i])
            self.weights[i] = present

def score_by_sampler(policy: Module, batches: Batches, config: Config) -> None:
    """Attach log μ to offline sequences whose sampler is unknown: the initial policy stands in for it."""
    if (config.taper or LOSSES[config.loss].needs_sampler) and not config.sample_every:
        used = [sequence for i in sorted(set(batches.order)) for sequence in batches.pool[i][0]]
        unknown = [sequence for sequence in used if sequence.sampler_logps is None]
        for sequence, logps in zip(unknown, sequence_logps(policy, unknown, config)):
            sequence.sampler_logps = logps

def attach_logps(name: Literal["ref_logps", "old_logps"], policy: Module, batches: Iterable[Batch],
                 config: Config) -> None:
    """Give the sequences of these batches the log-probs of the policy as it is."""
    for batch in batches:
        for sequences in (batch.sequences, batch.mismatched):
            active = [sequence for sequence in sequences if not sequence.is_idle]
            for sequence, logps in zip(active, sequence_logps(policy, active, config)):
                setattr(sequence, name, logps)

# ---------- Log-probs and microbatches ----------------------------------------------------------------------

@torch.no_grad()
def sequence_logps(policy: Module, sequences: list[Sequence], config: Config) -> list[Tensor]:
    """log π_θ(y_t | x, y_<t) of each sequence's completion, (len(completion),), on every rank's CPU."""
    parts = {id(sequence): torch.zeros(len(sequence.completion), device=policy.device)
             for sequence in sequences}
    cuts = microbatches(policy, sequences, config)
    for x in tqdm(cuts, desc="log-probs", leave=False, delay=2, disable=RANK > 0 or None):
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=config.is_mixed):
            logps = log_probs(policy, x.packed, config.logits_temperature)
        if x.share:
            for sequence, values in zip(itertools.chain(*x.packed), logps):
                parts[id(sequence)] = values[: len(sequence.completion)]
    if not parts:
        return []
    flat = torch.cat(list(parts.values()))
    if WORLD_SIZE > 1:
        dist.all_reduce(flat)
    lengths = [len(sequence.completion) for sequence in sequences]
    return [part.clone() for part in flat.cpu().split(lengths)]

def microbatches(policy: Module, sequences: list[Sequence], config: Config, step: int = 0,
                 z0: Tensor | None = None) -> list[Microbatch]:
    """This rank's share of the sequences, at most --microbatch-tokens at a time. Sharded, all ranks must
    compute as many: one with fewer computes one of another's again, which counts nothing."""
    if not sequences:
        return []
    cuts = cut(sequences, config)
    known = [sequence.sampler_logps for sequence in sequences if sequence.sampler_logps is not None]
    mean_surprisal = -float(torch.cat(known).mean()) if known else 0.0
    mine = cuts[RANK]
    surplus = [cuts[0][-1]] * (max(map(len, cuts)) - len(mine)) if config.shard else []
    made = [make_microbatch(packed, policy.device, step, mean_surprisal, z0) for packed in mine + surplus]
    for x in made[len(mine) :]:
        x.share = 0.0
    return made

def make_microbatch(packed: list[Packed], device: torch.device, step: int = 0, mean_surprisal: float = 0.0,
                    z0: Tensor | None = None) -> Microbatch:
    """The record of a step as it is before the forward pass; the one place where completions are padded."""
    sequences = list(itertools.chain(*packed))
    lengths = torch.tensor([len(sequence.completion) for sequence in sequences])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).to(device, non_blocking=True)
    columns = {}
    for name in ("ref_logps", "old_logps", "sampler_logps", "verdicts"):
        parts = [getattr(sequence, name) for sequence in sequences]
        is_known = all(part is not None for part in parts)
        columns[name] = pad_sequence(parts, batch_first=True).to(device) if is_known else None
    for name, one in (("advantages", "advantage"), ("is_chosen", "is_chosen"), ("kto_weights", "kto_weight")):
        columns[name] = torch.tensor([getattr(sequence, one) for sequence in sequences], device=device)
    return Microbatch(packed=packed, mask=mask, step=step, mean_surprisal=mean_surprisal, z0=z0, **columns)

def cut(sequences: list[Sequence], config: Config) -> list[list[list[Packed]]]:
    """For each rank a list of microbatches, each a list of rows of the forward pass. All ranks make the same
    cuts.

    A DPO pair stays together. Neighbours with one prompt share a row. That computes the prompt once, but
    attention runs over the whole row: up to three prompts long, that is at most 9/8 of what it costs in rows
    of their own, and up to 256 tokens it is little next to all else. Longer rows do not pay."""
    in_pairs = LOSSES[config.loss].unit == "pair"
    width = lambda row: len(row[0].prompt) + sum(len(sequence.completion) for sequence in row)
    units = []  # what stays together: a row, or the one or two rows of a pair
    for i, sequence in enumerate(sequences):
        is_second = in_pairs and i % 2 == 1
        row = units[-1][-1] if is_second or (units and not in_pairs) else []
        longest = min(config.microbatch_tokens, max(3 * len(sequence.prompt), 256))
        is_neighbour = config.shares_prompts and row and row[0].prompt == sequence.prompt
        if is_neighbour and width([*row, sequence]) <= longest:
            row.append(sequence)
        elif is_second:
            units[-1].append([sequence])
        else:
            units.append([[sequence]])
    units.sort(key=lambda unit: sum(map(width, unit)), reverse=True)
    cuts = []
    for i in range(WORLD_SIZE):  # dealt out, so that the ranks have like work
        share = units[i::WORLD_SIZE]
        widths = [max(map(width, unit)) for unit in share]
        packed = pack(widths, config.microbatch_tokens, heights=[len(unit) for unit in share])
        cuts.append([[row for place in places for row in share[place]] for places in packed])
    return cuts

def pack(widths: list[int], tokens: float, heights: list[int] | None = None) -> list[list[int]]:
    """Indices of things of like widths, each `heights` rows (1) high, in packs of at most `tokens` tokens
    with padding, or of one thing. The widest come first."""
    packed = []
    height = widest = 0  # of the present pack, whose first thing is the widest
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
    """log π(y_t | x, y_<t) of every completion token: (N, T), a sequence a row, from the left, 0 behind it.
    The model can be any causal language model of transformers whose logits are hidden states times output
    embeddings. Precision is the caller's, by autocast.

    Rows are padded on the right, so that no completion token attends to padding. Sequences a, b of one row
    share their prompt p, of which only the last token comes again, before each completion:

        ids        p1 p2 p3   p4 a1 a2   p4 b1
        labels      -  -  -   a1 a2 a3   b1 b2
        positions   0  1  2    3  4  5    3  4
        segments    0  0  0    1  1  1    2  2    a token attends to segment 0 and its own, up to itself
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
        pad_sequence([torch.tensor(row[i]) for row in table], True, -100 if i == 1 else 0) for i in range(4))
    move = functools.partial(Tensor.to, device=model.device, non_blocking=True)
    layout = {}
    if any(len(sequences) > 1 for sequences in packed):
        segments = move(segments)
        attends = (segments[:, None] == 0) | (segments[:, None] == segments[:, :, None])  # (rows, query, key)
        layout["attention_mask"] = attends.tril()[:, None]
        layout["position_ids"] = move(positions)
    compute = getattr(model, "completion_logps", functools.partial(completion_logps, model))
    logps = compute(move(ids), labels, temperature, **layout)  # (rows, width), at the labels
    # The labels have stayed on the CPU, so that finding their places keeps no GPU waiting.
    places = (labels != -100).flatten().nonzero()[:, 0]
    values = logps.flatten().index_select(0, move(places))
    lengths = [len(sequence.completion) for sequences in packed for sequence in sequences]
    return pad_sequence(values.split(lengths), batch_first=True)

def completion_logps(model: Module, ids: Tensor, labels: Tensor, temperature: float = 1.0,
                     **layout: Tensor) -> Tensor:
    """Log-probs of `labels` (N, T) from token ids (N, T), by the model's trunk and its output head: (N, T).

    layout: position_ids (N, T) and attention_mask (N, 1, T, T), where rows hold more than one sequence."""
    hidden = model.base_model(input_ids=ids, use_cache=False, **layout).last_hidden_state
    head = model.get_output_embeddings()
    text = model.config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    # Granite divides its logits by one number, Cohere multiplies them by another.
    divisor = getattr(text, "logits_scaling", None) or 1.0
    factor = getattr(text, "logit_scale", None) or 1.0
    temperature = temperature * (divisor / factor)
    return token_logps(hidden, head.weight, labels, softcap, temperature=temperature)

def token_logps(hidden: Tensor, lm_head_weight: Tensor, labels: Tensor, softcap: float | None = None,
                chunk_size: int = 512, temperature: float = 1.0) -> Tensor:
    """(N, T) log-probabilities of `labels` in nats, from the hidden states that predict them; else 0.

    Only positions with a label meet the output head, `chunk_size` of them at a time, so that memory grows
    with chunk_size x vocabulary and not with the batch. Computed in float32 (float64 for float64 input).
    Paste with `TokenLogps`.

    Args:
        hidden: (N, T, D) final hidden states; hidden[:, t] predicts labels[:, t].
        lm_head_weight: (V, D) output embeddings, tied or not; a head with a bias (GPT-J, Phi-2) is another.
        labels: (N, T) token ids; -100 is ignored.
        softcap: logits become softcap * tanh(logits / softcap), as in Gemma 2.
        temperature: then they are divided by this, as they were for sampling.
    """
    places = (labels != -100).flatten().nonzero()[:, 0]
    labels = labels.flatten()[places].to(hidden.device, non_blocking=True)
    places = places.to(hidden.device, non_blocking=True)
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        lm_head_weight = lm_head_weight.to(torch.get_autocast_dtype(device_type))
    picked = hidden.flatten(0, 1).index_select(0, places)
    with torch.autocast(device_type, enabled=False):
        logps = TokenLogps.apply(picked, lm_head_weight, labels, softcap, temperature, chunk_size)
    width = hidden.shape[1]
    return logps.new_zeros(hidden.shape[:2]).index_put((places // width, places % width), logps)

class TokenLogps(torch.autograd.Function):
    """log softmax(softcap(h Wᵀ) / T)[label] of M tokens, `chunk` rows of logits at a time. The last two
    chunks wait for the backward pass, which computes the others anew: half the time of checkpointing."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, softcap, temperature, chunk):
        logps = []
        ctx.kept = []
        for rows, label in zip(hidden.split(chunk), labels[:, None].split(chunk)):
            out = None
            if len(ctx.kept) == 2:
                out, _ = ctx.kept.pop(0)
            out, scale, of_rows = TokenLogps.of_chunk(out, rows, weight, label, softcap, temperature)
            logps.append(of_rows[:, 0])
            ctx.kept.append((out, scale))
        ctx.save_for_backward(hidden, weight, labels)
        ctx.settings = softcap, temperature
        ctx.chunk = chunk
        return torch.cat(logps)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, labels = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if needs_weight else None
        out = None
        kept = ctx.kept
        ctx.kept = []  # a second backward pass computes all chunks anew
        for start in reversed(range(0, len(labels), ctx.chunk)):
            here = slice(start, start + ctx.chunk)
            rows = hidden[here]
            if kept:
                out, scale = kept.pop()
            else:
                label = labels[here, None]
                out, scale, _ = TokenLogps.of_chunk(out, rows, weight, label, *ctx.settings)
            d_logits = out.to(weight.dtype)
            factor = -grad[here, None] / scale  # on the short side of each product
            d_hidden[here] = (d_logits @ weight) * factor
            if needs_weight:
                d_weight.addmm_(d_logits.T, (rows * factor).to(weight.dtype))
        return d_hidden, d_weight, None, None, None, None

    @staticmethod
    def of_chunk(out, hidden, weight, labels, softcap, temperature):
        """For n tokens: -d log-prob / d logits times a scale (n, V), that scale and the log-probs (n, 1)."""
        if out is None or len(out) < len(hidden):
            dtype = torch.promote_types(weight.dtype, torch.float32)
            out = torch.empty(len(hidden), len(weight), dtype=dtype, device=hidden.device)
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
        return out, scale * temperature, logps

# ---------- Ranks -------------------------------------------------------------------------------------------
# One process per GPU, started by torchrun; without it, one process. Every rank knows every batch whole (token
# ids are small) and works on its share of it, so that what is exchanged is sums.

RANK, WORLD_SIZE = 0, 1  # which of how many processes this is; `join_ranks` sets them

def join_ranks() -> torch.device:
    """Join the other ranks where torchrun started this process; returns the device to work on."""
    global RANK, WORLD_SIZE
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        count = torch.cuda.device_count()
        require(device.index < count, f"rank {device.index} has no GPU; say --nproc_per_node {count}")
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        # A name for each start: after a restart torchrun's store still holds the addresses of the dead.
        store, this_rank, ranks = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        patience = datetime.timedelta(hours=4)  # while one writes a large model, or its engine starts anew
        store.set_timeout(patience)
        dist.init_process_group(backend, store=store, rank=this_rank, world_size=ranks, timeout=patience)
        RANK, WORLD_SIZE = this_rank, ranks
    return device

def gather_from_ranks(value: Any) -> list:
    """Every rank's object, on every rank."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values

def from_first_rank(make: Callable[[], Any]) -> Any:
    """make() of rank 0, or the UserError that it raises, on every rank."""
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
    """A machine's ranks one after the other: the next finds what one builds, and memory holds one copy."""
    my_turn = int(os.environ.get("LOCAL_RANK", 0))
    for turn in range(int(os.environ.get("LOCAL_WORLD_SIZE", my_turn + 1))):
        if turn == my_turn:
            yield
        if dist.is_initialized():
            dist.barrier()

def seed_for(*parts: int | str) -> int:
    """A seed for what the parts name: all randomness is a function of --seed, the step and what it is for."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])



@torch.no_grad()
def copy_full(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    if isinstance(target, DTensor):
        value = value.to(target.device)
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)

# ---------- Checkpoints and the final folder ----------------------------------------------------------------
# A folder written beside and renamed, with the hash of every file; safetensors and JSON, never a pickle.

def save_checkpoint(path: Path, optimizer: torch.optim.Optimizer, reference: Reference, step: int) -> None:
    """Write everything that the next step depends on, and remove what --keep does not ask for. Rank 0 writes,
    tensors whole, so that any number of ranks can read. What cannot be written costs a warning."""
    from safetensors.torch import save_file
    policy, batches, config = reference.policy, reference.batches, reference.config
    tensors = gather_whole(weights_and_moments(policy, optimizer))
    if reference.weights is not None:
        reference.swap_weights()
        tensors |= gather_whole({f"reference:{name}": p for name, p in trained(policy).items()})
        reference.swap_weights()
    state = dict(step=step, settings=dataclasses.asdict(config) | dict(steps=batches.steps),
                 data=batches.fingerprint, made_until=batches.made_until, reference_until=reference.until,
                 has_reference=reference.weights is not None, batches=list(batches.pending))

    def as_json(value: Any) -> dict:
        """Of a tensor the name under which it is kept; of a batch or sequence its fields."""
        if not isinstance(value, Tensor):
            return vars(value)
        name = f"batches:{len(tensors)}"
        tensors[name] = value.clone()  # two sequences may share it, and safetensors refuses that
        return {"tensor": name}

    if RANK != 0:
        return
    text = json.dumps(state, default=as_json)
    try:
        shutil.rmtree(path, ignore_errors=True)  # a damaged one, which was not resumed from
        with new_folder(path) as folder:
            save_file(tensors, folder / "tensors.safetensors")
            (folder / "state.json").write_text(text)
            (folder / "files.json").write_text(json.dumps(dict(format=FORMAT) | hashes(folder.iterdir())))
    except Exception as error:  # safetensors has an exception of its own for a full disk
        warn(f"could not write {path}: {error}; what was saved before stays")
        return
    saved = sorted(path.parent.glob("step-*"))
    kept = [old for old in saved if old <= path][-config.keep :]  # later ones: damaged, or undone
    for old in set(saved) - set(kept):
        shutil.rmtree(old)

def weights_and_moments(policy: Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What a step of the optimizer changes, by kind (policy, step, exp_avg, exp_avg_sq) and parameter."""
    tensors = {}
    for name, p in trained(policy).items():
        tensors[f"policy:{name}"] = p
        for kind, moment in optimizer.state[p].items():
            tensors[f"{kind}:{name}"] = moment
    return tensors

def gather_whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies, gathered from all ranks, in the host memory of rank 0; on the others none."""
    copies = {}
    for name, tensor in tensors.items():
        value = tensor.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()  # all ranks must ask
        if RANK == 0:
            copies[name] = value.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copies

@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which then becomes `path` by a rename, so that `path` is whole or not there."""
    folder = path.with_name(f".{path.name}-{time.time_ns()}")
    folder.mkdir(parents=True)
    try:
        yield folder
        for file in folder.iterdir():
            file.chmod(0o644)  # those of safetensors are the owner's alone
        folder.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

def hashes(paths: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of those that are files, by name."""
    found = {}
    for path in sorted(paths):
        if path.is_file():
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found

def find_damage(folder: Path) -> str:
    """What is wrong with a folder whose hashes were written, or ""."""
    try:
        written = json.loads((folder / "files.json").read_text())
        found = hashes(folder.iterdir())
    except (OSError, ValueError) as error:
        return f"not a whole checkpoint ({error})"
    if written.pop("format", None) != FORMAT:
        return "written by another version of humanline.py, which can go on with it"
    damaged = [name for name in written if written[name] != found.get(name)]
    return f"damaged: {', '.join(damaged)}" if damaged else ""

def find_checkpoint(config: Config, out: Path) -> Path | None:
    """What --resume names: the newest whole checkpoint of --out, if there is one, or the one at a path."""
    if config.resume is None:
        return None
    paths = [Path(config.resume)]
    if config.resume == "latest":
        paths = sorted((out / "checkpoint").glob("step-*"), reverse=True)
    for path in paths:
        damage = find_damage(path)
        if not damage:
            return path
        require(config.resume == "latest", f"{path}: {damage}")
        warn(f"{path}: {damage}; trying the one before")
    return None

# What may differ between a run and its resume: what it writes, and what changes no result.
FREE_ON_RESUME = ("out save_every keep resume config eval_data eval_every eval_prompts eval_samples "
                  "microbatch_tokens compile shard checkpoint_activations track").split()

def load_checkpoint(path: Path, optimizer: torch.optim.Optimizer, reference: Reference) -> int:
    """Put everything back; returns the step that was the last. Raises UserError where the settings differ."""
    from safetensors import safe_open
    policy, batches, config = reference.policy, reference.batches, reference.config
    tensors = safe_open(path / "tensors.safetensors", framework="pt")  # reads one when it is asked for

    def from_json(item: dict) -> Any:
        if "tensor" in item:
            return tensors.get_tensor(item["tensor"])
        if "completion" in item:
            return Sequence(**item)
        return Batch(**item) if "sequences" in item else item

    state = json.loads((path / "state.json").read_text(), object_hook=from_json)
    settings = state["settings"]
    present = dataclasses.asdict(config) | dict(steps=batches.steps)
    for name, value in json.loads(json.dumps(present)).items():
        before = settings.get(name, value)
        require(name in FREE_ON_RESUME or value == before,
                f"--resume {path}: the run has {flag_of(name)} {before}, not {value}; resume it with its own "
                "config.toml")
    require(state["data"] == batches.fingerprint,
            f"--resume {path}: since then --data, the weights or the chat template of --model, or the file "
            "of --reward or --sampler have changed")

    if state["has_reference"]:
        for name, p in trained(policy).items():
            copy_full(p, tensors.get_tensor(f"reference:{name}"))
        reference.weights = [part.to("cpu", copy=True) for part in reference.parts]
    for p in trained(policy).values():
        step = torch.zeros((), device=p.device)
        optimizer.state[p] = dict(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    for name, target in weights_and_moments(policy, optimizer).items():
        copy_full(target, tensors.get_tensor(name))
    batches.made_until = state["made_until"]
    batches.pending = deque(state["batches"])
    reference.until = state["reference_until"]
    return state["step"]

def final_weights(policy: Module, config: Config) -> dict[str, Tensor]:
    """What a folder of the model holds, by name: weights and buffers, a tied head once; or the adapters."""
    if config.lora:
        return gather_whole(trained(policy))
    every = dict(policy.named_parameters(remove_duplicate=False))
    tied = every.keys() - dict(policy.named_parameters()).keys()
    return gather_whole({name: value for name, value in policy.state_dict().items() if name not in tied})

MODEL_CARD = """\
---
library_name: {library}
pipeline_tag: text-generation
{base}tags: [humanline, {loss}]
---

`{model}` after {steps} steps of {loss}, by [Humanline](https://arxiv.org/abs/2509.24207).
With these settings `humanline.py --config` repeats the run:

```toml
{settings}```
"""

def save_final(path: Path, policy: Module, tokenizer: Any, config: Config, steps: int) -> None:
    """An ordinary Hugging Face folder, or with --lora a peft folder."""
    weights = final_weights(policy, config)
    if RANK != 0:
        return
    base = "" if Path(config.model).exists() else f"base_model: {config.model}\n"
    card = MODEL_CARD.format(library="peft" if config.lora else "transformers", base=base, model=config.model,
                             loss=config.loss, steps=steps, settings=to_toml(config))
    try:
        with new_folder(path) as folder:
            policy.save_pretrained(folder, state_dict=weights)
            tokenizer.save_pretrained(folder)
            (folder / "README.md").write_text(card, encoding="utf-8")
    except Exception as error:  # safetensors has an exception of its own for a full disk
        raise OSError(f"could not write {path} ({error}); make room, then --resume latest") from error

# ---------- The command line --------------------------------------------------------------------------------

class UserError(Exception):
    """Something that the user can put right; printed as one line, exit status 2."""

def require(condition: Any, message: str) -> None:
    if not condition:
        raise UserError(message)

def warn(message: str) -> None:
    if RANK == 0:
        tqdm.write(f"humanline.py: warning: {message}", file=sys.stderr)

def print_anything() -> None:
    """What a terminal's encoding lacks is printed as a question mark."""
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")

def main(argv: list[str] | None = None) -> int:
    """The whole program; returns the exit status."""
    print_anything()
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv)
        if config.resume == "latest" and Path(config.out, "final").exists():
            return leave(0, f"{config.out} is finished already; the model is in {config.out}/final")
        run = train(config)
        if RANK == 0:
            print(last_line(run))
        if run.stopped_at and run.signals:
            return leave(128 + max(run.signals))  # as the shell says of a process that a signal ended
        return leave(0)
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)  # one line, from rank 0, if it has the same to say
        return leave(2, f"error: {error}")
    except (FloatingPointError, MemoryError, OSError) as error:
        return leave(1, f"stopped: {str(error) or 'out of memory'}")
    except RuntimeError as error:
        if not re.search("out of memory|allocate memory", str(error)):  # a GPU's words, and a CPU's
            raise
        return leave(1, f"stopped: {str(error).splitlines()[0]:.200}; try --microbatch-tokens "
                     f"{config.microbatch_tokens // 2}, a lower --sample-tokens or --max-length, "
                     "--checkpoint-activations, --lora 16 or --shard")
    except KeyboardInterrupt:  # before the first step, or a second one
        return leave(130, "stopped at once; what was saved before stays")

def leave(status: int, message: str = "") -> int:
    """Say why, and part from the other ranks; returns the exit status."""
    if message:
        print(f"humanline.py: {message}", file=sys.stderr)
    if status and WORLD_SIZE > 1 and torch.cuda.is_initialized():
        sys.stdout.flush()
        os._exit(status)  # NCCL's own end would wait for ranks that wait for this one; torchrun ends them
    if dist.is_initialized():
        dist.destroy_process_group()
    return status

def parse_config(argv: list[str]) -> Config:
    """Flags over --config, or over the settings of the demo, over defaults."""
    words = [part for word in argv for part in word.split("=", 1)]  # --flag_name=VALUE is --flag-name VALUE
    typed = {word.replace("_", "-"): value for word, value in itertools.pairwise([*words, ""])}
    require(words.count("--data") < 2, "--data is there twice; write --data ONE OTHER")
    parts = sorted({"--sync-k", "--perception"} & typed.keys())
    require("--no-humanline" not in typed or not parts,
            f"{' and '.join(parts)}: --no-humanline is without it; for a part alone switch off the other")
    settings = None
    if "--config" in typed:
        settings = read_config(typed["--config"])
    elif not {"--model", "--data", "--help", "-h"} & typed.keys():
        settings = demo_settings(typed.get("--loss", "grpo"))
    config = parse_flags(argv if settings is None else settings + argv)
    for name in config.given:
        require(does_read(config.loss, name),
                f"--loss {config.loss} does not read {flag_of(name)}; leave it out")
    return config

def does_read(loss: str, setting: str) -> bool:
    """Whether a setting has an effect with this loss."""
    if setting in ("sync_k", "perception", "taper"):
        return LOSSES[loss].needs_reference
    is_of_some = any(setting in entry.settings.split() for entry in LOSSES.values())
    return not is_of_some or setting in LOSSES[loss].settings.split()

def demo_settings(loss: str) -> list[str]:
    """The demo's settings for a loss, as flags. A loss without a file of its own takes those of the loss with
    the same unit that it reads."""
    require(loss in LOSSES, f"--loss {loss}: {suggest(loss, LOSSES)}")
    path = CONFIGS / "demo" / f"{loss}.toml"
    if not path.exists():
        like = dict(group="grpo", pair="dpo", example="kto")[LOSSES[loss].unit]
        path = path.with_stem(like)
    require(path.exists(),
            f"--model and --data name nothing, and the demo, {path.parent}, is not there; give both")
    unread = {field.name for field in dataclasses.fields(Config) if not does_read(loss, field.name)}
    return read_config(str(path), without={"loss", *unread})

def parse_flags(args: list[str], kind: Any = Config) -> Any:
    """tyro's parse of `args` as a `kind`, its complaints folded into one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=args)
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
    text = complaint.getvalue().split("helptext:")[0].partition("\n")[2]
    text = " ".join(re.sub("[│╭╮╰╯─]|-{3,}", " ", text).split())
    text = re.sub(r" (Argument|For full helptext).*$|no type matching .*<class '\w+'>: ", "", text)
    text = re.sub(r" Perhaps you meant: (--[\w-]+).*$", r"; did you mean \1?", text)
    raise UserError(f"{text}; see --help")

def read_config(path: str, without: Iterable[str] = ()) -> list[str]:
    """The settings of a TOML file as flags, but for those named in `without`."""
    with explained(f"--config {path}", "name a file of settings that is valid TOML"):
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    names = {one.name for one in dataclasses.fields(Config)} - {"config"}
    args = []
    for key, value in table.items():
        name = key.replace("-", "_")
        require(name in names, f"{path}: unknown key '{key}'; {suggest(name, names)}")
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
    """A file or folder that settings name: where there is none from here, the one beside humanline.py."""
    path = spec.partition(":")[0]
    home = Path(__file__).parent
    return spec if Path(path).exists() or not (home / path).exists() else str(home / spec)

def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")

def suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}"

def check_config(config: Config) -> None:
    """Raises UserError for a value that makes no sense, naming the flag and what to type instead."""
    for (least, most), names in RANGES.items():
        for name in names.split():
            value = getattr(config, name)
            require(value is None or least <= value <= most,
                    f"{flag_of(name)} is {value}; it must lie from {least:g} to {most:g}")
    require(config.log_eps_p < config.log_eps_r, f"--log-eps-p {config.log_eps_p} is not below --log-eps-r "
            f"{config.log_eps_r}; the clip's lower end comes first")
    require(re.fullmatch(r"exact|math|.+\.py:\w+", config.reward),
            f"--reward {config.reward}: write exact, math or FILE.py:function; a reward model is "
            "configs/model_reward.py:score, a sum of several configs/rewards.py:math_recipe")
    require(config.prompt_template is None or "{prompt}" in config.prompt_template,
            "--prompt-template has no {prompt}, the place where the row's prompt goes")
    require(not config.sample_every or config.group_size > 1,
            "--group-size 1 leaves nothing to compare; use 2 or more")
    require(re.fullmatch(r"generate|.+\.py:\w+", config.sampler),
            f"--sampler {config.sampler}: write generate or FILE.py:function, say configs/external.py:vllm")
    require(config.resume != "latest" or config.out,
            "--resume latest looks in the run's folder; name it with --out")

FORMAT = 1  # of a run's folder: raised where an older one can no longer be resumed
TOML_HEAD = f"# python humanline.py --config THIS_FILE repeats the run. Format {FORMAT}.\n"

def to_toml(config: Config) -> str:
    """What was set, as TOML that --config reads back. Where the run lies is left to the next one."""
    lines = [TOML_HEAD]
    for name, value in config.given.items():
        if name not in ("out", "config", "resume"):
            text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
            lines.append(f"{name} = {text}\n")
    return "".join(lines)

def in_words(config: Config) -> str:
    """The loss and its form: plain, humanline or one of its parts, and what is not in the paper."""
    if not LOSSES[config.loss].needs_reference:
        return config.loss.upper()
    form = "plain"
    if config.sync_k and config.perception != "none":
        form = "humanline"
    elif config.sync_k:
        form = "humanline's sync alone"
    elif config.perception != "none":
        form = "humanline's perception alone"
    added = [name for name in ("taper", "prior") if getattr(config, name)]
    if added:
        form += f" with {' and '.join(added)}"
    return f"{config.loss.upper()}, {form}"

def describe(run: Run, first: int) -> None:
    """Say what is about to be done, from the step `first` on."""
    config = run.config
    size = sum(p.numel() for p in run.policy.parameters())
    source = "the data's own (offline)"
    if config.sample_every:
        source = f"drawn every {config.sample_every} steps by {config.sampler}"
    anchor = "the initial policy"
    if config.sync_k:
        anchor = f"the policy, synced every {config.sync_k} steps"
    elif config.ratio_to_old:
        anchor = "the old policy, which drew the rollouts"
    elif not config.needs_reference:
        anchor = "nothing"
    print(f"model       {config.model}, {size / 1e6:.2f} M parameters on {run.policy.device}\n"
          f"data        {' '.join(config.data)}, {run.batches.prompts:,} prompts; completions {source}\n"
          f"objective   {in_words(config)}; log-ratio to {anchor}; perception: {config.perception}\n"
          f"steps       {first} to {run.batches.steps}, batches of {config.batch_size}, lr {config.lr:g}",
          flush=True)

def warn_of_oddities(run: Run) -> None:
    """One line for each thing that runs, costs a night and is hardly meant."""
    config = run.config
    units = [] if config.sample_every else [unit for unit, _ in run.batches.pool]
    passes = run.batches.steps * config.batch_size / max(1, len(units))
    kinds = {sequence.is_chosen for unit in units for sequence in unit}
    if config.dtype == "bfloat16" and not config.lora and config.lr < 5e-5:  # 1/400 of a usual weight, 0.02
        warn(f"--dtype bfloat16: at --lr {config.lr:g} most updates are below half a bf16 step of their "
             "weight, and lost; --dtype mixed or --lora keeps them")
    if config.loss == "kto" and len(kinds) == 1:
        warn("all examples are of one kind, so KTO has nothing to hold them against")
    if units and passes > 10:
        warn(f"{run.batches.steps} steps of {config.batch_size} go through the data {passes:.0f} times")

def last_line(run: Run) -> str:
    """What was gained, in one sentence, and what to type next."""
    settings = shlex.quote(str(run.out / "config.toml"))
    again = f"python {shlex.quote(sys.argv[0])} --config {settings}"
    if run.stopped_at:
        return (f"stopped after step {run.stopped_at} of {run.batches.steps}, saved; go on with: {again} "
                f"--out {shlex.quote(str(run.out))} --resume latest")
    gained = ""
    if "accuracy_before" in run.latest and "accuracy" in run.latest:
        gained = ("mean reward on --eval-data went from {accuracy_before:.3f} to {accuracy:.3f}, "
                  "greedy from {greedy_before:.3f} to {greedy:.3f}: ").format(**run.latest)
    other = "--no-humanline --no-taper --prior 0" if run.config.humanline else "--humanline"
    seconds = time.perf_counter() - run.started
    return (f"{gained}{in_words(run.config)}, {run.batches.steps} steps in {seconds:.0f} s; the model is in "
            f"{run.out / 'final'}; compare with: {again} {other}")

if __name__ == "__main__":
    sys.modules["humanline"] = sys.modules["__main__"]  # for a file of --sampler that imports it
    sys.exit(main())
