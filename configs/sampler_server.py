"""Completions from servers on other machines, by HTTP: vLLM's or SGLang's. Copy it for another kind.

  export HUMANLINE_SERVERS=http://a:8000,sglang+http://b:30000 HUMANLINE_SAMPLER_WEIGHTS=/shared/weights
  python humanline.py ... --sample-every 64 --sampler configs/external.py:servers

The servers read the weights in HUMANLINE_SAMPLER_WEIGHTS, which has that path on their machines, too. They start on
the run's own --model. Their routes let anyone load anything: on a trusted network only.

  VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --generation-config vllm
  python -m sglang.launch_server --model-path MODEL --enable-deterministic-inference        (not tested)

With --lora only the adapters go there. vLLM then needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in place of the
development mode, and --enable-lora --max-lora-rank RANK; SGLang these two and --lora-target-modules.

vLLM 0.32 on a CPU: add --enforce-eager --no-enable-chunked-prefill, as it fails where a prompt with a seed is cut
in two. There a tied output head keeps its old weights through every reload, and nothing says so: train and serve
a folder whose config.json has "tie_word_embeddings": false and whose weights have a lm_head.weight, or use --lora.

A server that fails is left out until the next drawing, and the others draw its share; sampler.log says which, and
why. A server is asked before and after for the name that we gave its weights. So weights that another program puts
in are noticed if it names them, as this one does; of others only `sampler_gap` tells.
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
AT_ONCE = 64  # prompts under way at one server
ANSWER_SECONDS = 10  # the limit for a question that costs nothing
LOAD_SECONDS = 600  # for reading weights
DRAW_SECONDS = 900  # for the completions of one prompt, from sending it
LOADS = 3  # in one drawing, where others put in their weights, too; then the server is left out

# What a request leaves unset is the server's to choose.
PLAIN = dict(min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
RUN = secrets.token_hex(4)  # no server can hold the weights of an earlier process by our name for them
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class VLLM:
    """A server, and how to speak to vLLM."""

    lora_routes = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.adapters = ""  # the name of those that we put in last

    def call(self, route: str, seconds: float, body: dict | None = None) -> dict:
        """POST `body`, or GET without one. Raises OSError or ValueError, with a reason to show."""
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
        """Whether its weights are those that we call so."""
        if is_lora:
            models = self.call("/v1/models", ANSWER_SECONDS)["data"]
            return version in [model["id"] for model in models]
        return self.whole_version() == version

    def load(self, version: str, weights: str, is_lora: bool) -> None:
        """Put in new weights, under a name of ours."""
        if not is_lora:
            self.load_whole(version, weights)
            return
        load, unload = self.lora_routes
        self.call(load, LOAD_SECONDS, dict(lora_name=version, lora_path=weights))
        old, self.adapters = self.adapters, version
        if old not in ("", version) and self.holds(old, is_lora):  # not after a restart
            self.call(unload, ANSWER_SECONDS, dict(lora_name=old))

    def whole_version(self) -> str:
        return self.call("/weight_info", ANSWER_SECONDS)["weight_version"]

    def load_whole(self, version: str, weights: str) -> None:
        # Half-loaded weights must not go by the old name.
        self.call("/update_weight_version", ANSWER_SECONDS, dict(new_version=f"loading {version}"))
        reload = dict(method="reload_weights", kwargs=dict(weights_path=weights))
        self.call("/collective_rpc", LOAD_SECONDS, reload)
        # The cache holds what the old weights made of the prompts.
        if not self.call("/reset_prefix_cache", ANSWER_SECONDS, {}).get("success"):
            raise ValueError("/reset_prefix_cache had no success: it would go on from what the old weights made")
        self.call("/update_weight_version", ANSWER_SECONDS, dict(new_version=version))

    def draw(self, prompt: list[int], settings: dict, count: int, seed: int, adapters: str | None) -> list[tuple]:
        """`count` times why it ended, the token ids, their log-probs; completion j has the seed seed + j."""
        body = dict(settings, prompt=prompt, n=count, seed=seed, logprobs=0, return_token_ids=True, top_k=0)
        body["ignore_eos"] = True  # stop_token_ids has them
        body["max_tokens"] = body.pop("max_new_tokens")
        if adapters:
            body["model"] = adapters
        choices = self.call("/v1/completions", DRAW_SECONDS, body)["choices"]
        return [(choice["finish_reason"], choice["token_ids"], choice["logprobs"]["token_logprobs"])
                for choice in choices]


class SGLang(VLLM):
    """The same for SGLang."""

    lora_routes = "/load_lora_adapter", "/unload_lora_adapter"

    def whole_version(self) -> str:
        return self.call("/model_info", ANSWER_SECONDS)["weight_version"]

    def load_whole(self, version: str, weights: str) -> None:
        body = dict(model_path=weights, weight_version=version, flush_cache=True)
        answer = self.call("/update_weights_from_disk", LOAD_SECONDS, body)
        if not answer.get("success"):
            raise ValueError(f"/update_weights_from_disk: {answer.get('message')}")

    def draw(self, prompt: list[int], settings: dict, count: int, seed: int, adapters: str | None) -> list[tuple]:
        # Its n would give all of them one seed.
        params = [dict(settings, top_k=-1, sampling_seed=(seed + j) % 2**31) for j in range(count)]
        body = dict(input_ids=[prompt] * count, sampling_params=params, return_logprob=True)
        if adapters:
            body["lora_path"] = [adapters] * count
        infos = [answer["meta_info"] for answer in self.call("/generate", DRAW_SECONDS, body)]
        return [(info["finish_reason"]["type"], [token for _, token, *_ in info["output_token_logprobs"]],
                 [logp for logp, *_ in info["output_token_logprobs"]]) for info in infos]


servers = [SGLang(url[7:]) if url.startswith("sglang+") else VLLM(url) for url in SERVERS]


def check(drawn: list[tuple], settings: dict, count: int) -> list[tuple]:
    """The completions as (ids, log-probs). Raises ValueError where they are not what was asked for."""
    if len(drawn) != count:
        raise ValueError(f"it drew {len(drawn)} completions, not {count}")
    for reason, ids, logps in drawn:
        if reason not in ("stop", "length"):
            raise ValueError(f'a completion ended by "{reason}"')
        if len(ids) != len(logps):
            raise ValueError(f"it gave {len(ids)} tokens and {len(logps)} log-probs")
        is_whole = len(ids) == settings["max_new_tokens"] or (ids and ids[-1] in settings["stop_token_ids"])
        if not is_whole:
            raise ValueError(f"a completion of {len(ids)} tokens ends neither with a stop token nor at the limit")
    return [(ids, logps) for _, ids, logps in drawn]


def sample(prompts: list[list[int]], settings: dict, count: int, seed: int, weights: str) -> list:
    """As in sampler_vllm.py. Completion j of prompt i has the seed seed + i * count + j, whoever draws it."""
    is_lora = os.path.exists(os.path.join(weights, "adapter_config.json"))
    version = f"humanline-{RUN}-{weights}".replace("/", "-") if is_lora else f"{RUN} {weights}"
    # No engine takes a temperature near 0; the likeliest token is meant, which 0 stands for.
    temperature = settings["temperature"] if settings["temperature"] >= 0.01 else 0.0
    asked = dict(
        PLAIN, temperature=temperature, top_p=settings["top_p"], max_new_tokens=settings["max_new_tokens"],
        stop_token_ids=settings["stop_ids"])
    waiting = deque(range(len(prompts)))
    completions, lost, loads = {}, {}, dict.fromkeys(servers, 0)

    def leave_out(server: VLLM, error: Exception) -> None:
        lines = str(error).split("\n")
        lost.setdefault(server, f"{server.url}: {lines[0]:.200}" if isinstance(error, (OSError, ValueError)) else
                        f"{server.url}: it answered something else ({error!r:.60})")

    def draw_some(server: VLLM, drawn: dict) -> None:
        """One connection: a prompt after the other, into `drawn`."""
        while server not in lost:
            try:
                i = waiting.popleft()
            except IndexError:
                return
            try:
                answer = server.draw(prompts[i], asked, count, seed + i * count, version if is_lora else None)
                drawn[i] = check(answer, asked, count)
            except Exception as error:
                waiting.append(i)
                leave_out(server, error)

    def take_part(server: VLLM, connections: int) -> None:
        """Load what it lacks, draw, and keep what was drawn if it still holds our weights."""
        drawn = {}
        try:
            if not server.holds(version, is_lora):
                loads[server] += 1
                if loads[server] > LOADS:
                    raise ValueError("another program puts in its weights again and again")
                server.load(version, weights, is_lora)
            with ThreadPoolExecutor(connections) as pool:
                for _ in range(connections):
                    pool.submit(draw_some, server, drawn)
            if server.holds(version, is_lora):
                completions.update(drawn)
                drawn = {}
        except Exception as error:
            leave_out(server, error)
        waiting.extend(drawn)  # of which nobody knows by which weights

    while waiting:
        able = [server for server in servers if server not in lost]
        if not able:
            raise RuntimeError(f"no server is left. {'; '.join(lost.values())}")
        connections = min(AT_ONCE, math.ceil(len(waiting) / len(able)))
        with ThreadPoolExecutor(len(able)) as pool:
            for server in able:
                pool.submit(take_part, server, connections)
    for reason in lost.values():
        print(f"{reason}; the others drew its share", flush=True)
    return [completions[i] for i in range(len(prompts))]
