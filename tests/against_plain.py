"""Train with humanline.py and with plain.py on the same rows and rollouts, to compare their weights."""

import importlib.util
import json
import random
import sys
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


STEPS = 4
GROUP = 4  # completions of a prompt
SAME = 1e-6  # of weights, in fp32
REWARDS = """import zlib

def varied(prompts, completions, rows):
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]

def coin(prompts, completions, rows):
    return [zlib.crc32(text.encode()) % 2 for text in completions]
"""

def settings_of(case: dict) -> dict:
    """The settings of both programs. β, ε and the warmup are not the defaults. The bounds of the clip are
    narrow and differ in size, so that both act. AdamW's epsilon is large because its first steps divide a
    gradient by its own size, which would magnify rounding errors. The gradient's norm is not clipped: that
    would hide a wrong scale of the loss."""
    return dict(log_eps_p=-0.3, log_eps_r=0.2, batch_size=8, lr=5e-3, warmup=0.5, adam_eps=1e-3,
                max_grad_norm=1e6, steps=STEPS, group_size=GROUP,
                reward="varied", beta=0.3, epsilon=0.15) | case


def write_data(folder: Path) -> Path:
    """Write rows.jsonl, groups of completions of many lengths, and reward.py."""
    chance = random.Random(0)

    def word() -> str:
        return "".join(chance.choices("abcdefgh0123456789", k=chance.randint(1, 9)))

    rows = [dict(prompt=f"{i} {word()}", completions=[word() for _ in range(GROUP)],
                 scores=[chance.random() for _ in range(GROUP)]) for i in range(48)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARDS)
    return folder


def weights_of_humanline(program, case: dict, model: str, data: Path, out: Path) -> dict[str, torch.Tensor]:
    """A run's final weights. Its microbatches are small, and so many."""
    settings = settings_of(case)
    reward = settings.pop("reward")
    del settings["epsilon" if case["loss"] != "grpo" else "beta"]  # the loss does not read it
    if case["loss"] == "kto" and "sample_every" in case:
        settings["batch_size"] *= GROUP  # it counts completions; in plain.py their prompts
    program.train(program.Config(
        model=model, data=(str(data / "rows.jsonl"),), reward=f"{data / 'reward.py'}:{reward}",
        dtype="float32", max_new_tokens=4, microbatch_tokens=64, save_every=0, out=str(out),
        **settings))
    return load_file(out / "final" / "model.safetensors")


def weights_of_plain(
    program, case: dict, model: str, data: Path, out: Path
) -> tuple[dict[str, torch.Tensor], float]:
    """The weights of plain.py, trained on the completions that the run in `out` has drawn, and the largest
    difference between the log-probs that they were drawn with and those of plain.py."""
    settings = settings_of(case)
    del settings["reward"]  # the run has written it down
    program.BETA, program.EPSILON = settings.pop("beta"), settings.pop("epsilon")
    program.config = program.Settings(**settings)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in open(data / "rows.jsonl")]
    gaps = [0.0]
    rollouts = defaultdict(list)
    if "sample_every" in case:
        for line in map(json.loads, open(out / "rollouts.jsonl")):
            rollouts[line["step"], line["prompt"][-1]["content"]].append(line)

    def draw(policy, tokenizer, row, step):
        """The run's rollouts of this step and row."""
        lines = rollouts.pop((step, row["prompt"]))
        prompt = program.encode(row, tokenizer)
        group = [program.Sample(prompt, line["tokens"], line["reward"]) for line in lines]
        ids, mask = program.collate(group)
        drawn_with = torch.tensor([logp for line in lines for logp in line["logps"]])
        gaps.append((program.log_probs(policy, ids, mask)[mask] - drawn_with).abs().max().item())
        return group

    program.train(policy, tokenizer, rows, draw)
    assert not rollouts
    return dict(policy.named_parameters()), max(gaps)


def largest_difference(weights: dict, others: dict) -> float:
    return max(float((weights[name] - others[name]).detach().abs().max()) for name in weights)


def module_of(path: Path):
    """Import a changed copy of a program as a module."""
    spec = importlib.util.spec_from_file_location(f"changed_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
