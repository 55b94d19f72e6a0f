"""The method, written plainly: DPO, KTO and GRPO, plain and humanline, offline and online.

  python tests/plain.py                                                     # GRPO, humanline, offline
  python tests/plain.py --loss dpo --lr 5e-5
  python tests/plain.py --loss kto --lr 5e-5 --perception none              # the sync alone
  python tests/plain.py --no-humanline --lr 4e-4                            # plain GRPO
  python tests/plain.py --no-humanline --sample-every 1 --lr 8e-4           # the same, online
  python tests/plain.py --positive-only --lr 8e-4                           # on better completions alone

Start with `train` and `mean_loss`; equations as in arXiv 2509.24207. humanline.py computes the same faster:
tests/test_plain.py holds it to this, weight for weight. Left out: all that saves memory or time (a policy is
a whole model), GPUs, ranks, checkpoints, metrics, LoRA, several passes over the data, other data than scored
completions, other rewards than exact answers, other means than that over tokens, rarer settings.
"""

import copy
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Literal

import torch
import tyro
from torch.distributions import Beta
from torch.nn.functional import cross_entropy, logsigmoid
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "configs" / "demo"
sys.path.append(str(ROOT))
from humanline import seed_for  # so that both shuffle and reject alike

@dataclass
class Settings:
    loss: Literal["dpo", "kto", "grpo"] = "grpo"
    humanline: bool = True  # both of its parts, or neither
    sync_k: int = 24  # 0: never; online the log-ratio is then to the old policy
    perception: Literal["clip", "sample", "none"] = "clip"
    log_eps_p: float = -1.5
    log_eps_r: float = 1.5
    positive_only: bool = False  # worse completions count nothing; DPO: supervised finetuning on the chosen
    kl_beta: float = 0.0
    sample_every: int = 0
    group_size: int = 8  # rollouts of a prompt
    temperature: float = 1.0  # of rollouts
    steps: int = 64
    batch_size: int = 32  # online it counts prompts; humanline.py counts completions for KTO
    lr: float = 2e-4
    warmup: float = 0.1
    weight_decay: float = 0.0
    adam_eps: float = 1e-8
    max_grad_norm: float = 1.0
    desirable_weight: float | None = None  # λ_D of KTO; None: λ_D n_D = λ_U n_U
    undesirable_weight: float = 1.0  # λ_U

    def __post_init__(self):
        if not self.sample_every:
            self.temperature = 1.0
        if not self.humanline:
            self.sync_k, self.perception = 0, "none"
config = Settings()
BETA = 0.1  # of DPO and KTO
EPSILON = 0.2  # of GRPO

@dataclass
class Sample:
    prompt: list[int]
    completion: list[int]
    reward: float = 0.0
    advantage: float = 0.0  # above 0 it is better: chosen, or desirable
    weight: float = 1.0  # KTO's λ_D or λ_U

# ---------- The loop ----------------------------------------------------------------------------------------
def train(policy, tokenizer, rows, draw):
    """Train the policy in place. Online, draw(policy, tokenizer, row, step) gives a row's rollouts."""
    reference = frozen(policy)  # π_ref: the policy as of the last sync; at first the initial policy
    old_policy = reference  # π_old: the policy that drew the completions; offline always the initial policy
    optimizer = torch.optim.AdamW(policy.parameters(), eps=config.adam_eps, weight_decay=config.weight_decay)
    size = config.batch_size
    if not config.sample_every:
        rows = offline_units(rows, tokenizer)
    torch.manual_seed(seed_for(0, "order", 0))
    units = [rows[i] for i in torch.randperm(len(rows))]
    assert config.steps * size <= len(units), "one pass over the data has fewer steps"

    for step in tqdm(range(1, config.steps + 1)):
        start = (step - 1) * size
        if config.sample_every and (step - 1) % config.sample_every == 0:
            old_policy = frozen(policy)
            here = slice(start, min(start + config.sample_every * size, config.steps * size))
            units[here] = make_units([draw(policy, tokenizer, row, step) for row in units[here]])
        batch = sum(units[start : start + size], [])
        for p in policy.parameters():
            p.grad = torch.zeros_like(p)  # also for a step without a batch
        if batch:
            mean_loss(policy, old_policy, reference, batch, step).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
        if config.sync_k and step % config.sync_k == 0:  # before the update: it lags by one step
            reference = frozen(policy)
        warmup = math.ceil(config.warmup * config.steps)
        optimizer.param_groups[0]["lr"] = config.lr * min(1, step / max(1, warmup))
        optimizer.step()

def frozen(model):
    return copy.deepcopy(model).requires_grad_(False)

# ---------- The method. (N, T) tensors hold zeros outside of the completions --------------------------------
def mean_loss(policy, old_policy, reference, batch, step):
    """The mean loss of a batch of samples. DPO: chosen, rejected, chosen, rejected, …"""
    ids, mask = collate(batch)
    advantages = torch.tensor([sample.advantage for sample in batch])
    is_better = advantages > 0
    ratio_to = reference if config.sync_k else old_policy

    # d_t = log π_θ(y_t | x, y_<t) - log π_ref(y_t | x, y_<t)
    logps = log_probs(policy, ids, mask)
    d = logps - log_probs(ratio_to, ids, mask)
    perceived = perceive(d, mask, step)
    outcome = perceived.sum(1)

    if config.loss == "dpo" and config.positive_only:  # the mean over tokens of -log π_θ of the chosen
        return -(logps.sum(1) / mask.sum(1))[0::2].mean()
    if config.loss == "dpo":  # -log σ(β (Σ_t d̃ʷ_t - Σ_t d̃ˡ_t))
        margin = outcome[0::2] - outcome[1::2]
        return -logsigmoid(BETA * margin).mean()
    if config.loss == "kto":  # λ_D (1 - σ(β (Σ_t d̃_t - z₀))), undesirable λ_U (1 - σ(β (z₀ - Σ_t d̃_t)))
        z0 = reference_point(policy, ratio_to, batch, step)
        gain = torch.where(is_better, outcome - z0, z0 - outcome)
        weights = torch.tensor([sample.weight for sample in batch])
        return (weights * torch.sigmoid(-BETA * gain)).mean()

    # -min(A r_t, A clip(r_t, 1-ε, 1+ε)) + β_KL (exp(-d_t) + d_t - 1), r_t = exp(d̃_t)
    ratio = perceived.exp()
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    advantages = advantages[:, None]
    losses = -torch.min(advantages * ratio, advantages * clipped)
    if config.kl_beta:
        d = logps - log_probs(reference, ids, mask)
        losses += config.kl_beta * ((-d).exp() + d - 1)
    return (mask * losses).sum() / mask.sum()

def perceive(d, mask, step):
    """d̃. Sampling stops a token's gradient if exp(d) < M_P B_P or exp(-d) < M_R B_R."""
    if config.perception == "none":
        return d
    if config.perception == "clip":
        return d.clamp(config.log_eps_p, config.log_eps_r)
    ratio = d[mask].detach().exp()
    torch.manual_seed(seed_for(0, "reject", step))
    is_unlikely = ratio < ratio.max() * Beta(0.5, 1.0).sample(ratio.shape)
    is_likely = 1 / ratio < (1 / ratio).max() * Beta(0.01, 1.0).sample(ratio.shape)
    rejected = mask.clone()
    rejected[mask] = is_unlikely | is_likely
    return torch.where(rejected, d.detach(), d)

@torch.no_grad()
def reference_point(policy, ratio_to, batch, step):
    """KTO's z₀ = max(0, mean of Σ_t d̃_t), of each prompt with a completion of the next other prompt."""
    pairs = []
    for i, sample in enumerate(batch):
        start = (i + config.group_size) % len(batch) if config.sample_every else i
        for other in batch[start:] + batch[:start]:
            if other.prompt != sample.prompt:
                pairs.append(Sample(sample.prompt, other.completion))
                break
    if not pairs:  # all have the same prompt
        return torch.zeros(())
    ids, mask = collate(pairs)
    d = log_probs(policy, ids, mask) - log_probs(ratio_to, ids, mask)
    return perceive(d, mask, step).sum(1).mean().clamp(min=0)

def log_probs(model, ids, mask):
    """log π(y_t | x, y_<t) of softmax(logits / T)."""
    logits = model(ids).logits[:, :-1] / config.temperature
    losses = cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    return -losses * mask

def collate(samples):
    """Token ids (N, T + 1), and which of the second and later ones are completions' (N, T)."""
    ids = [torch.tensor(sample.prompt + sample.completion) for sample in samples]
    mask = [torch.arange(len(row)) >= len(sample.prompt) for row, sample in zip(ids, samples)]
    return pad_sequence(ids, True), pad_sequence(mask, True)[:, 1:]

# ---------- Rows and rollouts -------------------------------------------------------------------------------
def offline_units(rows, tokenizer):
    """The groups (GRPO), pairs (DPO) or single samples (KTO) that the rows' scored completions make."""
    groups = []
    for row in rows:
        prompt = encode(row, tokenizer)
        completions = tokenizer(row["completions"], add_special_tokens=False).input_ids
        scored = zip(completions, row["scores"])
        groups.append([Sample(prompt, ids + [tokenizer.eos_token_id], score) for ids, score in scored])
    units = make_units(groups)
    if config.loss == "kto":
        units = [[sample] for unit in units for sample in unit]
    return [unit for unit in units if unit]

def encode(row, tokenizer):
    turn = {"role": "user", "content": row["prompt"]}
    return tokenizer.apply_chat_template([turn], add_generation_prompt=True).input_ids

def make_units(groups):
    """The samples of each group that the loss trains on, with A_i = (r_i - mean) / (std + 0.01)."""
    units = []
    for group in groups:
        rewards = [sample.reward for sample in group]
        for sample in group:
            sample.advantage = (sample.reward - fmean(rewards)) / (pstdev(rewards) + 0.01)
            if config.positive_only:
                sample.advantage = max(0.0, sample.advantage)
        best = rewards.index(max(rewards))
        worst = rewards.index(min(rewards))
        if config.loss == "dpo":
            group = [group[best], group[worst]]
        if config.loss != "grpo" and best == worst:
            group = []
        units.append(group)
    samples = sum(units, [])
    for sample in samples:
        sample.weight = 0.0 if config.positive_only else config.undesirable_weight
    better = [sample for sample in samples if sample.advantage > 0]
    for sample in better:
        balanced = config.undesirable_weight * (len(samples) / len(better) - 1)
        sample.weight = config.desirable_weight or balanced
    return units

@torch.no_grad()
def draw(policy, tokenizer, row, step):
    """Rollouts of a row's prompt, with a reward of 1 for its answer."""
    prompt = encode(row, tokenizer)
    rollouts = policy.generate(
        torch.tensor([prompt]), do_sample=True, top_k=0, temperature=config.temperature,
        num_return_sequences=config.group_size, max_new_tokens=8)
    group = []
    for ids in rollouts[:, len(prompt) :].tolist():
        ids = [token for token in ids if token != tokenizer.pad_token_id]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        group.append(Sample(prompt, ids, float(text == row["answer"])))
    return group

def main():
    policy = AutoModelForCausalLM.from_pretrained(DEMO / "model")
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    rows = [json.loads(line) for line in open(DEMO / "rows.jsonl")]
    test = [json.loads(line) for line in open(DEMO / "test.jsonl")]

    def pass_at_1():
        torch.manual_seed(0)
        return fmean(sample.reward for row in test[:100] for sample in draw(policy, tokenizer, row, 0))

    print("before:", pass_at_1())
    train(policy, tokenizer, rows, draw)
    print("after: ", pass_at_1())

if __name__ == "__main__":
    config = tyro.cli(Settings)
    main()
