"""Published ways to train on old completions, and our form of one, the taper, as entries of `humanline.LOSSES`.

Import this file before `humanline.parse_config`; then `--loss grpo-mask-0.5` and the others are there. (Training on
better completions alone is a setting of humanline.py, `--positive-only`.) Each keeps the equation of its source; what
the sources do beside it (their KL estimates, their routing of experts) is left out. The taper and the prior were part
of humanline.py until commit f948f44: the rules of verdicts.md took them out.
"""

import dataclasses
from statistics import fmean
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import humanline
from humanline import LOSSES, Config, Group, Microbatch, Sequence, group_advantages


def with_advantages(x: Microbatch, advantages: Tensor, config: Config) -> Tensor:
    """GRPO's loss, with other advantages than those of the record."""
    return humanline.compute_grpo(dataclasses.replace(x, advantages=advantages), config)


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


def rpo(x: Microbatch, config: Config) -> Tensor:
    """RPO (Pang et al. 2024, arXiv 2404.19733, eq. 1), α 1: DPO, and the chosen completion's NLL a token."""
    nll = -x.logps.sum(-1) / x.mask.sum(-1)
    return humanline.compute_dpo(x, config) + nll[0::2]


def dpo_positive(x: Microbatch, config: Config) -> Tensor:
    """DPO-positive (Pal et al. 2024, arXiv 2402.13228, eq. 3), λ 50: the chosen one may not fall below the reference."""
    chosen, rejected = x.perceived[0::2].sum(-1), x.perceived[1::2].sum(-1)
    return -F.logsigmoid(config.beta * (chosen - rejected - 50 * F.relu(-chosen)))


# ---------- Ours --------------------------------------------------------------------------------------------


def tapered(like: str) -> Callable[[Microbatch, Config], Tensor]:
    """A loss whose log-ratios of worse completions (rejected, undesirable, or with a negative advantage) pass less
    gradient the less likely they have become: the weight is max(0, 1 - rise / budget).

    rise is Σ_t (log μ - log π_θ) over the completion, in nats. budget is its surprisal under its sampler μ, -Σ_t log μ,
    or that of an average completion of the same length if that is less, but at least 1 nat. In a pair, as the weight w
    of the rejected completion falls, that of the chosen one becomes w + (1 - w) / budget. It is a heuristic: the floor
    of 1 nat and the weight of the chosen one were fitted on the sums of two digits."""

    def compute(x: Microbatch, config: Config) -> Tensor:
        rise = (x.sampler_logps - x.logps.detach()).sum(-1)
        surprisal = -x.sampler_logps.sum(-1)
        average = surprisal.sum() / x.mask.sum() * x.mask.sum(-1)  # the tiny tasks' batches are one microbatch
        budget = torch.minimum(surprisal, average).clamp(min=1)
        weight = (1 - rise / budget).clamp(0, 1)
        weight[x.is_chosen] = 1.0
        if like == "dpo":
            rejected = weight[1::2]
            weight[0::2] = rejected + (1 - rejected) / budget[0::2]
        weight = weight[:, None]
        perceived = weight * x.perceived + (1 - weight) * x.perceived.detach()
        tapered_x = dataclasses.replace(x, perceived=perceived)
        losses = LOSSES[like].compute(tapered_x, config)
        x.metrics["taper_weight"] = weight[:, 0], ~x.is_chosen
        return losses

    return compute


prepare_groups = humanline.prepare_groups


def prepare_groups_with_prior(groups: list[Group], config: Config) -> list[list[list[Sequence]]]:
    """With a loss whose name ends in "prior", advantages are computed as if each group had one more rollout, with the
    mean reward of all groups: then a group whose completions are all right still has a gradient. AsymRE (arXiv
    2506.20520) lowers the baseline for the same reason."""
    prepared = prepare_groups(groups, config)
    if not config.loss.endswith("prior"):
        return prepared
    mean_reward = fmean([fmean(group.rewards) for group in groups])
    for group, [sequences] in zip(groups, prepared):
        advantages = group_advantages(torch.tensor([*group.rewards, mean_reward], dtype=torch.float64))
        advantages[advantages.abs() < 1e-9] = 0
        for sequence, advantage in zip(sequences, advantages.tolist()):
            sequence.advantage = advantage
    return prepared


humanline.prepare_groups = prepare_groups_with_prior


class Reference(humanline.Reference):
    """Offline, the initial policy stands in for a sampler that is unknown, for the losses that ask for its log-probs."""

    def __init__(self, policy: torch.nn.Module, batches: humanline.Batches, config: Config):
        super().__init__(policy, batches, config)
        if config.loss.startswith(NEED_SAMPLER) and not config.sample_every:
            sequences = [sequence for _, unit in batches.pool for sequence in unit]
            unknown = [sequence for sequence in sequences if sequence.sampler_logps is None]
            for sequence, logps in zip(unknown, humanline.sequence_logps(policy, unknown, config)):
                sequence.sampler_logps = logps


NEED_SAMPLER = "grpo-mask", "grpo-topr", "grpo-taper", "dpo-taper", "kto-taper"
humanline.Reference = Reference


def entry(like: str, compute: Callable[[Microbatch, Config], Tensor]) -> humanline.Loss:
    settings = LOSSES[like].settings.replace(" positive_only", "")
    return dataclasses.replace(LOSSES[like], compute=compute, settings=settings)


LOSSES |= {
    "grpo-mask-0.1": entry("grpo", sequence_mask(0.1)),
    "grpo-mask-0.5": entry("grpo", sequence_mask(0.5)),
    "grpo-topr": entry("grpo", topr),
    "dpo-rpo": entry("dpo", rpo),
    "dpo-positive": entry("dpo", dpo_positive),
    "grpo-taper": entry("grpo", tapered("grpo")),
    "grpo-taper-prior": entry("grpo", tapered("grpo")),
    "dpo-taper": entry("dpo", tapered("dpo")),
    "kto-taper": entry("kto", tapered("kto")),
}
