"""Random two-layer models of many families, each with a tokenizer of its own class, and their log-probs
computed separately."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (AutoModelForCausalLM, Gemma2Config, GemmaTokenizer, GPT2Config, GPT2Tokenizer,
                          LlamaConfig, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2Tokenizer,
                          Qwen3Config)

import humanline
from humanline import Config, Sequence


def gsm8k(count: int) -> list[dict]:
    """Rows in the format of GSM8K, each with its solution and a wrong one."""
    chance = random.Random(0)
    rows = []
    for _ in range(count):
        name = chance.choice(["Natalia", "Weng", "José", "Betty"])
        a, b = chance.choices(range(2, 61), k=2)
        question = f"{name} had {a} clips in April, and then {b} more in May. How many did {name} have?"
        answer = f"In both months {name} had {a}+{b} = <<{a}+{b}={a + b}>>{a + b} clips.\n#### {a + b}"
        completions = [answer.replace("#### ", "#### 1"), answer]
        rows.append(dict(question=question, answer=answer, completions=completions, scores=[0, 1]))
    return rows


# Tokenizers of each family's own class, learned from a few rows.

def learn(model, pre_tokenizer, special: list[str], **more) -> dict:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    texts = [row["question"] + row["answer"] for row in gsm8k(64)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False, **more)
    tokenizer.train_from_iterator(texts, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    return dict(vocab=learned["vocab"], merges=[tuple(pair) for pair in learned["merges"]])


def byte_level(special: list[str]) -> dict:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return learn(models.BPE(), split, special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def with_byte_fallback(special: list[str]) -> dict:
    bytes_too = special + [f"<0x{byte:02X}>" for byte in range(256)]
    return learn(models.BPE(byte_fallback=True), pre_tokenizers.Metaspace(), bytes_too)


def llama_tokenizer():
    return LlamaTokenizer(**with_byte_fallback(["<unk>", "<s>", "</s>"]), add_bos_token=True)


def llama3_tokenizer():
    marks = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    learned = Tokenizer(models.BPE(**byte_level(["<|begin_of_text|>", "<|end_of_text|>", *marks])))
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=learned, bos_token="<|begin_of_text|>",
                                   eos_token="<|end_of_text|>", extra_special_tokens=marks)


def qwen_tokenizer():
    learned = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return Qwen2Tokenizer(**learned, eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"])


def gemma_tokenizer():
    learned = with_byte_fallback(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>",
                                  "<end_of_turn>"])
    return GemmaTokenizer(**learned, add_bos_token=True,
                          extra_special_tokens=["<start_of_turn>", "<end_of_turn>"])


def gpt2_tokenizer():
    return GPT2Tokenizer(**byte_level(["<|endoftext|>"]))


LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} "
    "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endif %}{% endfor %}")
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}")

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
# family: config class, tokenizer, chat template, what ends a turn, BOS, more settings of the config
GQA = dict(num_key_value_heads=1)
FAMILIES = {
    "llama": (LlamaConfig, llama_tokenizer, LLAMA_TEMPLATE, "</s>", "<s>", GQA),
    "llama3": (LlamaConfig, llama3_tokenizer, LLAMA3_TEMPLATE, "<|eot_id|>", "<|begin_of_text|>", GQA),
    "llama-plain": (LlamaConfig, llama_tokenizer, None, "</s>", "<s>", GQA),
    "qwen2": (Qwen2Config, qwen_tokenizer, CHATML_TEMPLATE, "<|im_end|>", None, GQA),
    "qwen3": (Qwen3Config, qwen_tokenizer, CHATML_TEMPLATE, "<|im_end|>", None, GQA | dict(head_dim=16)),
    "gemma2": (Gemma2Config, gemma_tokenizer, GEMMA_TEMPLATE, "<end_of_turn>", "<bos>",
               GQA | dict(head_dim=16, sliding_window=64, final_logit_softcapping=2.0,
                          attn_logit_softcapping=5.0, query_pre_attn_scalar=16)),
    "gpt2": (GPT2Config, gpt2_tokenizer, None, "<|endoftext|>", None, {}),
}


def save_model(family: str, path: Path, tied: bool = True) -> None:
    """Save a random two-layer model with a tokenizer of its family."""
    config_class, make_tokenizer, template, end, _, settings = FAMILIES[family]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    ends = sorted({tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(end)})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(
        vocab_size=len(tokenizer), **SIZES, max_position_embeddings=512, tie_word_embeddings=tied,
        initializer_range=0.1, bos_token_id=tokenizer.bos_token_id, eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id, **settings))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def load(path: str, **settings):
    config = Config(model=path, **settings)
    policy, tokenizer = humanline.load_policy(config, torch.device("cpu"))
    return policy, tokenizer, config


def random_ids(policy, generator, low: int, high: int) -> list[int]:
    length = int(torch.randint(low, high, (), generator=generator))
    return torch.randint(policy.config.vocab_size, (length,), generator=generator).tolist()


def some_sequences(policy, count: int = 5) -> list[Sequence]:
    generator = torch.Generator().manual_seed(1)
    return [Sequence(random_ids(policy, generator, 1, 20), random_ids(policy, generator, 1, 90))
            for _ in range(count)]


def own_rows(policy, sequences: list[Sequence]) -> list[torch.Tensor]:
    """The log-probs of each completion, with one sequence per row."""
    logps = humanline.log_probs(policy, [[sequence] for sequence in sequences])
    assert all(not row[len(sequence.completion):].any()
               for row, sequence in zip(logps, sequences, strict=True))
    return [row[: len(sequence.completion)] for row, sequence in zip(logps, sequences)]


def full_logits_logps(policy, sequence: Sequence) -> torch.Tensor:
    """Log-probs from transformers, for one sequence at a time and without padding."""
    ids = torch.tensor([sequence.prompt + sequence.completion])
    logps = policy(input_ids=ids).logits.log_softmax(-1)
    return logps[0, len(sequence.prompt) - 1 : -1].gather(1, ids[0, len(sequence.prompt) :, None])[:, 0]
