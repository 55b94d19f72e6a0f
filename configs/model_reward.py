"""A reward model: --reward configs/model_reward.py:score is the output of a sequence classifier for each dialogue.

  python humanline.py ... --reward configs/model_reward.py:score --reward-seconds 600 \
      --reward-args '{"model": "Skywork/Skywork-Reward-V2-Qwen3-0.6B"}'

It runs in a process of its own, on the GPU of the rank that started it. The reward is the model's `score` output where
it has one, as ArmoRM does, and its last logit otherwise. ArmoRM's model code comes with the model, so it needs
"trust_remote_code": true among the arguments.
"""

import functools

import os

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.llama import modeling_llama

TOKENS = 16384  # with padding, in one forward pass
vars(modeling_llama).setdefault("LLAMA_INPUTS_DOCSTRING", "")  # ArmoRM's code imports it; transformers 5 lacks it
DEVICE = torch.device("cpu")
if torch.cuda.is_available():
    DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


@functools.cache
def load(name: str, trust_remote_code: bool) -> tuple:
    """The reward model and its tokenizer, once for all calls."""
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        name, dtype=DTYPE, output_loading_info=True, trust_remote_code=trust_remote_code)
    if info["missing_keys"]:  # a language model, whose head would be random
        raise ValueError(f"{name} has no {', '.join(sorted(info['missing_keys']))}")
    return model.to(DEVICE).eval(), tokenizer


@torch.no_grad()
def score(prompts: list[list[dict]], completions: list[str], rows: list[dict], model: str,
          trust_remote_code: bool = False) -> list:
    """A float for each completion; a text, which counts as failed, for one that the model has too few positions for.
    `model` is a Hugging Face name or a folder."""
    model, tokenizer = load(model, trust_remote_code)
    text_config = model.config.get_text_config()
    encoded = []
    for prompt, text in zip(prompts, completions):
        dialogue = [*prompt, {"role": "assistant", "content": text}]
        if tokenizer.chat_template:
            ids = tokenizer.apply_chat_template(dialogue, return_dict=True)["input_ids"]
        else:
            ids = tokenizer("\n\n".join(turn["content"] for turn in dialogue))["input_ids"]
        encoded.append(torch.tensor(ids))
    longest = getattr(text_config, "max_position_embeddings", None) or 2**31
    rewards = ["more tokens than the reward model's positions"] * len(encoded)
    fitting = [i for i, ids in enumerate(encoded) if len(ids) <= longest]
    fitting.sort(key=lambda i: len(encoded[i]), reverse=True)
    pad = text_config.pad_token_id  # shows where a sequence ends; without it, one by one
    while fitting:
        count = 1 if pad is None else max(1, TOKENS // len(encoded[fitting[0]]))
        places, fitting = fitting[:count], fitting[count:]
        ids = pad_sequence([encoded[i] for i in places], True, pad or 0).to(DEVICE)
        mask = pad_sequence([torch.ones_like(encoded[i]) for i in places], True).to(DEVICE)
        out = model(input_ids=ids, attention_mask=mask)
        values = out.logits if getattr(out, "score", None) is None else out.score
        for i, value in zip(places, values.float().view(len(places), -1)[:, -1].tolist()):
            rewards[i] = value
    return rewards
