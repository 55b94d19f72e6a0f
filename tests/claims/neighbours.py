"""Published relatives of the taper, as entries of `humanline.LOSSES`: what it is compared with, tuned by the same rule.

Import this file before `humanline.parse_config`; then `--loss grpo-mask-0.5` and the others are there. Each keeps the
equation of its source; what the sources do beside it (their KL estimates, their routing of experts) is left out.
"""

import dataclasses
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import humanline
from humanline import LOSSES, Config, Microbatch


def with_advantages(x: Microbatch, advantages: Tensor, config: Config) -> Tensor:
    """GRPO's loss, with other advantages than those of the record."""
    return humanline.compute_grpo(dataclasses.replace(x, advantages=advantages), config)


def better_alone(x: Microbatch, config: Config) -> Tensor:
    """GRPO on completions with a positive advantage: the others count 0."""
    return with_advantages(x, x.advantages.clamp(min=0), config)


def sequence_mask(delta: float) -> Callable[[Microbatch, Config], Tensor]:
    """GRPO with the off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556, section 3.1): a completion with a
    negative advantage counts 0 once mean_t log(μ / π_θ) exceeds delta, in nats a token."""

    def compute(x: Microbatch, config: Config) -> Tensor:
        rise = (x.sampler_logps - x.logps.detach()).sum(-1) / x.mask.sum(-1)
        is_masked = (x.advantages < 0) & (rise > delta)
        return with_advantages(x, x.advantages.masked_fill(is_masked, 0.0), config)

    return compute


def topr(x: Microbatch, config: Config) -> Tensor:
    """TOPR (Le Roux et al. 2025, arXiv 2503.14286, eq. 8): no clip; the gradient of a completion with a positive
    advantage is A ∇log π_θ, that of one with a negative advantage min(1, π_θ / μ) A ∇log π_θ, of whole completions."""
    ratio = (x.logps.detach() - x.sampler_logps).sum(-1).clamp(max=0).exp()
    weight = torch.where(x.advantages < 0, ratio, 1.0)
    return -(x.advantages * weight)[:, None] * x.logps


def chosen_alone(x: Microbatch, config: Config) -> Tensor:
    """Supervised finetuning on the best completion of each prompt: its NLL a token. One loss per pair."""
    return -(x.logps.sum(-1) / x.mask.sum(-1))[0::2]


def rpo(x: Microbatch, config: Config) -> Tensor:
    """DPO and the chosen one's NLL a token, weight 1 (Pang et al. 2024, arXiv 2404.19733, eq. 1)."""
    return humanline.compute_dpo(x, config) + chosen_alone(x, config)


def dpo_positive(x: Microbatch, config: Config) -> Tensor:
    """DPO-positive (Pal et al. 2024, arXiv 2402.13228, eq. 3), λ 50: the chosen one may not fall below the reference."""
    chosen, rejected = x.perceived[0::2].sum(-1), x.perceived[1::2].sum(-1)
    return -F.logsigmoid(config.beta * (chosen - rejected - 50 * F.relu(-chosen)))


def desirable_alone(x: Microbatch, config: Config) -> Tensor:
    """KTO on desirable completions: the others count 0."""
    return humanline.compute_kto(x, config) * x.is_chosen


def entry(like: str, compute: Callable[[Microbatch, Config], Tensor], **needs: bool) -> humanline.Loss:
    return dataclasses.replace(LOSSES[like], compute=compute, **needs)


LOSSES |= {
    "grpo-better": entry("grpo", better_alone),
    "grpo-mask-0.1": entry("grpo", sequence_mask(0.1), needs_sampler=True),
    "grpo-mask-0.5": entry("grpo", sequence_mask(0.5), needs_sampler=True),
    "grpo-topr": entry("grpo", topr, needs_sampler=True),
    "dpo-chosen": entry("dpo", chosen_alone),
    "dpo-rpo": entry("dpo", rpo),
    "dpo-positive": entry("dpo", dpo_positive),
    "kto-desirable": entry("kto", desirable_alone),
}
