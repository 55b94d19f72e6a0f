"""Sample completions from vLLM or SGLang servers on other machines. Copy this file for another kind of
server.

  export HUMANLINE_SERVERS=http://a:8000,sglang+http://b:30000 HUMANLINE_SAMPLER_WEIGHTS=/shared/weights
  python humanline.py ... --sample-every 64 --sampler configs/external.py:servers

The servers read the weights from HUMANLINE_SAMPLER_WEIGHTS, which must be the same path on all machines.
Start them with the run's --model. Their routes let anybody load any weights, so use a trusted network only.

  VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --generation-config vllm
  python -m sglang.launch_server --model-path MODEL --enable-deterministic-inference        # not tested

With --lora, only the adapters are sent. vLLM then needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=True instead of the
development mode, and --enable-lora --max-lora-rank RANK. SGLang needs these two flags and
--lora-target-modules.

vLLM 0.32 on a CPU fails if a prompt with a seed is split: add --enforce-eager --no-enable-chunked-prefill. It
also silently keeps the old weights of a tied output head on every reload. To avoid this, train and serve a
folder whose config.json has "tie_word_embeddings": false and whose weights include lm_head.weight, or use
--lora.

If a server fails, it is skipped until the next request for rollouts, and the others take over its prompts.
sampler.log names the server and the reason. Before and after sampling, each server is asked for the name of
its weights. This detects weights loaded by another program if that program names them, as this one does;
otherwise only the metric `sampler_gap` shows it.
"""

import http.client
import json
import math
import os
import secrets
import urllib.error
import urllib.request
from collections import deque
from concurrent.futures import ThreadPoolExecutor

SERVERS = os.environ.get("HUMANLINE_SERVERS", "http://127.0.0.1:8000").replace(" ", "").split(",")
AT_ONCE = 64  # concurrent prompts per server
ANSWER_SECONDS = 10  # time limit for cheap requests
LOAD_SECONDS = 600  # time limit for loading weights
DRAW_SECONDS = 900  # time limit for the completions of one prompt
LOADS = 3  # how often to reload weights that another program replaces, before skipping the server

# The server chooses its own value for anything that a request does not set.
PLAIN = dict(min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
RUN = secrets.token_hex(4)  # unique, so that no weights of an earlier process have our names
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class VLLM:
    """A vLLM server."""

    lora_routes = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.adapters = ""  # the name of the adapters loaded last

    def call(self, route: str, seconds: float, body: dict | None = None) -> dict:
        """POST `body`, or GET if there is none. Raises OSError or ValueError with a readable reason."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + route, data, {"Content-Type": "application/json"})
        try:
            with opener.open(request, timeout=seconds) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            raise OSError(f"{route} answered {error.code}: {error.read().decode(errors='replace')}") from None
        except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise OSError(f"{route} took longer than {seconds:g} s") from None
            raise OSError(f"{route} failed: {reason!r}") from None
        return json.loads(text) if text.startswith(("{", "[")) else {}

    def holds(self, version: str, is_lora: bool) -> bool:
        """Whether the server has the weights of this name."""
        if is_lora:
            models = self.call("/v1/models", ANSWER_SECONDS)["data"]
            return version in [model["id"] for model in models]
        return self.whole_version() == version

    def load(self, version: str, weights: str, is_lora: bool) -> None:
        """Load new weights under a new name."""
        if not is_lora:
            self.load_whole(version, weights)
            return
        load, unload = self.lora_routes
        self.call(load, LOAD_SECONDS, dict(lora_name=version, lora_path=weights))
        old, self.adapters = self.adapters, version
        if old not in ("", version) and self.holds(old, is_lora):  # false after a restart of the server
            self.call(unload, ANSWER_SECONDS, dict(lora_name=old))

    def whole_version(self) -> str:
        return self.call("/weight_info", ANSWER_SECONDS)["weight_version"]

    def load_whole(self, version: str, weights: str) -> None:
        # Partially loaded weights must not have the old name.
        self.call("/update_weight_version", ANSWER_SECONDS, dict(new_version=f"loading {version}"))
        reload = dict(method="reload_weights", kwargs=dict(weights_path=weights))
        self.call("/collective_rpc", LOAD_SECONDS, reload)
        # The prefix cache was computed with the old weights.
        if not self.call("/reset_prefix_cache", ANSWER_SECONDS, {}).get("success"):
            raise ValueError("/reset_prefix_cache failed, so the cache still depends on the old weights")
        self.call("/update_weight_version", ANSWER_SECONDS, dict(new_version=version))

    def draw(
        self, prompt: list[int], settings: dict, count: int, seed: int, adapters: str | None
    ) -> list[tuple]:
        """Returns `count` tuples (finish reason, token ids, log-probs). Completion j has the seed seed +
        j."""
        body = dict(settings, prompt=prompt, n=count, seed=seed, logprobs=0, return_token_ids=True, top_k=0)
        body["ignore_eos"] = True  # stop_token_ids contains it
        body["max_tokens"] = body.pop("max_new_tokens")
        if adapters:
            body["model"] = adapters
        choices = self.call("/v1/completions", DRAW_SECONDS, body)["choices"]
        return [(choice["finish_reason"], choice["token_ids"], choice["logprobs"]["token_logprobs"])
                for choice in choices]


class SGLang(VLLM):
    """An SGLang server."""

    lora_routes = "/load_lora_adapter", "/unload_lora_adapter"

    def whole_version(self) -> str:
        return self.call("/model_info", ANSWER_SECONDS)["weight_version"]

    def load_whole(self, version: str, weights: str) -> None:
        body = dict(model_path=weights, weight_version=version, flush_cache=True)
        answer = self.call("/update_weights_from_disk", LOAD_SECONDS, body)
        if not answer.get("success"):
            raise ValueError(f"/update_weights_from_disk: {answer.get('message')}")

    def draw(
        self, prompt: list[int], settings: dict, count: int, seed: int, adapters: str | None
    ) -> list[tuple]:
        # SGLang's n would give all completions the same seed.
        params = [dict(settings, top_k=-1, sampling_seed=(seed + j) % 2**31) for j in range(count)]
        body = dict(input_ids=[prompt] * count, sampling_params=params, return_logprob=True)
        if adapters:
            body["lora_path"] = [adapters] * count
        infos = [answer["meta_info"] for answer in self.call("/generate", DRAW_SECONDS, body)]
        return [(info["finish_reason"]["type"], [token for _, token, *_ in info["output_token_logprobs"]],
                 [logp for logp, *_ in info["output_token_logprobs"]]) for info in infos]


servers = [SGLang(url[7:]) if url.startswith("sglang+") else VLLM(url) for url in SERVERS]


def check(drawn: list[tuple], settings: dict, count: int) -> list[tuple]:
    """The completions as (ids, log-probs). Raises ValueError if they are not what was requested."""
    if len(drawn) != count:
        raise ValueError(f"it returned {len(drawn)} completions, not {count}")
    for reason, ids, logps in drawn:
        if reason not in ("stop", "length"):
            raise ValueError(f'a completion has the finish reason "{reason}"')
        if len(ids) != len(logps):
            raise ValueError(f"it returned {len(ids)} tokens but {len(logps)} log-probs")
        is_whole = len(ids) == settings["max_new_tokens"] or (ids and ids[-1] in settings["stop_token_ids"])
        if not is_whole:
            raise ValueError(f"a completion of {len(ids)} tokens has no stop token, and is below the limit")
    return [(ids, logps) for _, ids, logps in drawn]


def sample(prompts: list[list[int]], settings: dict, count: int, seed: int, weights: str) -> list:
    """Like `sample` in sampler_vllm.py. Completion j of prompt i has the seed seed + i * count + j on any
    server."""
    is_lora = os.path.exists(os.path.join(weights, "adapter_config.json"))
    version = f"humanline-{RUN}-{weights}".replace("/", "-") if is_lora else f"{RUN} {weights}"
    # Engines reject temperatures near 0. Those mean greedy decoding here, which is 0 for them.
    temperature = settings["temperature"] if settings["temperature"] >= 0.01 else 0.0
    request = dict(
        PLAIN, temperature=temperature, top_p=settings["top_p"], max_new_tokens=settings["max_new_tokens"],
        stop_token_ids=settings["stop_ids"])
    waiting = deque(range(len(prompts)))
    completions, skipped, loads = {}, {}, dict.fromkeys(servers, 0)

    def skip(server: VLLM, error: Exception) -> None:
        reason = f"unexpected answer ({error!r:.60})"
        if isinstance(error, (OSError, ValueError)):
            reason = str(error).split("\n")[0][:200]
        skipped.setdefault(server, f"{server.url}: {reason}")

    def draw_prompts(server: VLLM, drawn: dict) -> None:
        """Sample one prompt after another over one connection, into `drawn`."""
        while server not in skipped:
            try:
                i = waiting.popleft()
            except IndexError:
                return
            try:
                adapters = version if is_lora else None
                answer = server.draw(prompts[i], request, count, seed + i * count, adapters)
                drawn[i] = check(answer, request, count)
            except Exception as error:
                waiting.append(i)
                skip(server, error)

    def use(server: VLLM, connections: int) -> None:
        """Load our weights if needed, sample, and keep the completions if the server still has our
        weights."""
        drawn = {}
        try:
            if not server.holds(version, is_lora):
                loads[server] += 1
                if loads[server] > LOADS:
                    raise ValueError("another program keeps replacing the weights")
                server.load(version, weights, is_lora)
            with ThreadPoolExecutor(connections) as pool:
                for _ in range(connections):
                    pool.submit(draw_prompts, server, drawn)
            if server.holds(version, is_lora):
                completions.update(drawn)
                drawn = {}
        except Exception as error:
            skip(server, error)
        waiting.extend(drawn)  # we do not know which weights these were sampled with

    while waiting:
        working = [server for server in servers if server not in skipped]
        if not working:
            raise RuntimeError(f"no server is left. {'; '.join(skipped.values())}")
        connections = min(AT_ONCE, math.ceil(len(waiting) / len(working)))
        with ThreadPoolExecutor(len(working)) as pool:
            for server in working:
                pool.submit(use, server, connections)
    for reason in skipped.values():
        print(f"{reason}; the other servers took over its prompts", flush=True)
    return [completions[i] for i in range(len(prompts))]
