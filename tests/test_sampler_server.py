"""Rollouts from servers: configs/sampler_server.py with test servers that fail in many ways."""

import importlib.util
import json
import random
import re
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT, metrics

FILE = ROOT / "configs" / "sampler_server.py"
STOP = 3
SETTINGS = dict(temperature=1.0, top_p=1.0, max_new_tokens=6, stop_ids=[STOP], dtype="float32")
PROMPTS = [[40, 41, i] for i in range(8)]


def pretend(weights: str, prompt: list[int], seed: int, longest: int) -> tuple[list[int], list[float]]:
    """A completion that shows which weights it was sampled from."""
    chance = random.Random(f"{weights} {prompt} {seed}")
    ids = [chance.randrange(8, 90) for _ in range(chance.randint(1, longest))]
    return (ids if len(ids) == longest else [*ids, STOP]), [-1.0] * (min(len(ids) + 1, longest))


def why_ended(ids: list[int]) -> str:
    return "stop" if ids[-1] == STOP else "length"


class Refused(Exception):
    """An HTTP status other than 200."""


class Engine:
    """An HTTP server with the routes of vLLM and SGLang. `on` is called before each answer, `change` on the
    answer."""

    def __init__(self, port: int = 0, draw=pretend):
        self.version, self.weights, self.adapters, self.draw = "default", "as it started", {}, draw
        self.requests: list[tuple[str, dict]] = []
        self.on = lambda route, body: None
        self.change = lambda route, answer: answer
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
                status = 200
                try:
                    engine.requests.append((self.path, body))
                    engine.on(self.path, body)
                    answer = engine.change(self.path, engine.answer(self.path, body))
                except Refused as error:
                    status, answer = int(str(error)[:3]), {"error": {"message": str(error)[4:]}}
                except ConnectionAbortedError:  # killed in the middle: no answer, and the connection closes
                    self.close_connection = True
                    return
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.handle_error = lambda *args: None  # of a client that has gone
        self.port = self.http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def routes(self) -> list[str]:
        return [route for route, _ in self.requests]

    def load(self, folder: str) -> str:
        if not Path(folder).is_dir():
            raise Refused(f"500 no such folder {folder}")
        return folder

    def answer(self, route: str, body: dict):
        if route in ("/weight_info", "/model_info"):
            return dict(weight_version=self.version)
        if route == "/v1/models":
            return dict(data=[dict(id=name) for name in ("model", *self.adapters)])
        if route == "/update_weight_version":
            self.version = body["new_version"]
            return dict(success=True)
        if route == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.weights = self.load(body["kwargs"]["weights_path"])
            return dict(results=[None])
        if route == "/reset_prefix_cache":
            return dict(success=True)
        if route == "/update_weights_from_disk":
            self.weights, self.version = self.load(body["model_path"]), body["weight_version"]
            return dict(success=True)
        if route in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            self.adapters[body["lora_name"]] = self.load(body["lora_path"])
            return "Success"
        if route in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
            del self.adapters[body["lora_name"]]
            return "Success"
        if route == "/v1/completions":
            assert body["ignore_eos"] and body["return_token_ids"] and body["logprobs"] == 0
            weights = self.adapters[body["model"]] if "model" in body else self.weights
            choices = []
            for j in range(body["n"]):
                ids, logps = self.draw(weights, body["prompt"], body["seed"] + j, body["max_tokens"])
                choices.append(
                    dict(token_ids=ids, logprobs=dict(token_logprobs=logps), finish_reason=why_ended(ids)))
            return dict(choices=choices)
        if route == "/generate":
            names = body.get("lora_path") or [None] * len(body["input_ids"])
            answers = []
            for prompt, params, name in zip(body["input_ids"], body["sampling_params"], names):
                weights = self.adapters[name] if name else self.weights
                ids, logps = self.draw(weights, prompt, params["sampling_seed"], params["max_new_tokens"])
                answers.append(dict(meta_info=dict(
                    finish_reason=dict(type=why_ended(ids)), weight_version=self.version,
                    output_token_logprobs=[[logp, token, None] for token, logp in zip(ids, logps)])))
            return answers
        raise Refused(f"404 no {route}")


@pytest.fixture
def engines():
    """engines(2) starts two engines; engines(1, port=...) starts one on a port that was used before."""
    started = []

    def start(count: int, **kind) -> list[Engine]:
        new = [Engine(**kind) for _ in range(count)]
        started.extend(new)
        return new

    yield start
    for engine in started:
        engine.close()


def module_of(file: Path):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def client(monkeypatch):
    """client(engines) is configs/sampler_server.py with these servers, loaded as in the trainer's process."""
    def load(those: list[Engine], scheme: str = ""):
        monkeypatch.setenv("HUMANLINE_SERVERS", ",".join(scheme + engine.url for engine in those))
        return module_of(FILE)

    return load


@pytest.fixture
def weights(tmp_path):
    """weights("1") is a folder of weights; weights("2", is_lora=True) is one with adapters."""
    def folder(name: str, is_lora: bool = False) -> str:
        (tmp_path / name).mkdir()
        if is_lora:
            (tmp_path / name / "adapter_config.json").write_text("{}")
        return str(tmp_path / name)

    return folder


def expected(folder: str, seed: int = 7, count: int = 3) -> list:
    return [[pretend(folder, prompt, seed + i * count + j, 6) for j in range(count)]
            for i, prompt in enumerate(PROMPTS)]


def draw(client, folder: str, seed: int = 7) -> list:
    return client.sample(PROMPTS, SETTINGS, 3, seed, folder)


# What goes well.

DRAWING = "/v1/completions", "/generate"


def in_step(*those: Engine) -> None:
    """The engines answer only when all 8 prompts have been sent, so that each of them gets some."""
    barrier = threading.Barrier(8, timeout=20)
    for engine in those:
        engine.on = lambda route, body: barrier.wait() if route in DRAWING else None


@pytest.mark.parametrize("is_lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("scheme, route", [("", DRAWING[0]), ("sglang+", DRAWING[1])])
def test_servers_share_prompts_and_get_new_weights_first(engines, client, weights, scheme, route, is_lora):
    both = engines(2)
    in_step(*both)
    sampler = client(both, scheme)
    first, second = weights("1", is_lora), weights("2", is_lora)
    assert draw(sampler, first) == expected(first)
    assert [engine.routes().count(route) for engine in both] == [4, 4]
    loads = [len(engine.requests) for engine in both]
    assert draw(sampler, first, seed=8) == expected(first, seed=8)
    counts = [len(engine.requests) - before for engine, before in zip(both, loads)]
    assert counts == [6, 6]  # which weights, four prompts, which weights; nothing was loaded
    assert draw(sampler, second) == expected(second)
    for engine in both:
        assert len(engine.adapters) == is_lora  # the old ones are gone
        prompts = [body.get("prompt") or body["input_ids"][0] for path, body in engine.requests
                   if path == route]
        assert len(prompts) == 12


def test_each_completion_has_its_own_seed_and_no_setting_is_left_to_the_servers_defaults(
        engines, client, weights):
    (vllm,), (sglang,) = engines(1), engines(1)
    folder, greedy = weights("1"), dict(SETTINGS, temperature=0.001)
    client([vllm]).sample(PROMPTS, greedy, 3, 7, folder)
    client([sglang], "sglang+").sample(PROMPTS, greedy, 3, 2**40 + 7, folder)
    bodies = {tuple(body["prompt"]): body for route, body in vllm.requests if route == "/v1/completions"}
    assert [bodies[tuple(prompt)]["seed"] for prompt in PROMPTS] == [7 + 3 * i for i in range(8)]
    assert bodies[40, 41, 0] == dict(
        prompt=[40, 41, 0], n=3, seed=7, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=6,
        stop_token_ids=[STOP], ignore_eos=True, repetition_penalty=1.0, presence_penalty=0.0,
        frequency_penalty=0.0, logprobs=0, return_token_ids=True)
    params = {tuple(body["input_ids"][0]): body["sampling_params"] for route, body in sglang.requests
              if route == "/generate"}
    seeds = [each["sampling_seed"] for prompt in PROMPTS for each in params[tuple(prompt)]]
    assert len(set(seeds)) == 24 and all(0 <= seed < 2**31 for seed in seeds)
    assert params[40, 41, 0][0]["temperature"] == 0.0


# What fails at one server: the others draw its share.

def refuses(status_and_words: str):
    def fail(answer):
        raise Refused(status_and_words)
    return fail


def killed(answer):
    raise ConnectionAbortedError


def late(answer):
    time.sleep(1.3)


def choice_with(**changes):
    return lambda answer: answer["choices"][1].update(changes)


DRAW, RELOAD, CACHE = DRAWING[0], "/collective_rpc", "/reset_prefix_cache"
FAILURES = {  # the route that fails; what is done to its answer, or instead; what is said of it
    "dead": (DRAW, refuses("500 the engine is dead"), "answered 500: .*the engine is dead"),
    "killed": (DRAW, killed, "/v1/completions failed: RemoteDisconnected"),
    "late": (DRAW, late, "/v1/completions took longer than 1 s"),
    "no reload": (RELOAD, refuses("500 no such folder"), "/collective_rpc answered 500: .*no such folder"),
    "cache": (CACHE, lambda answer: answer.update(success=False), "/reset_prefix_cache failed"),
    "aborted": (DRAW, choice_with(finish_reason="abort"), 'a completion has the finish reason "abort"'),
    "no log-prob": (DRAW, choice_with(token_ids=[9] * 6, logprobs=dict(token_logprobs=[-1.0] * 5)),
                    "6 tokens but 5 log-probs"),
    "cut": (DRAW, choice_with(token_ids=[9] * 4, logprobs=dict(token_logprobs=[-1.0] * 4)),
            "of 4 tokens has no stop token"),
    "shapeless": (DRAW, choice_with(logprobs=None), "unexpected answer"),
    "one too few": (DRAW, lambda answer: answer["choices"].pop(), "it returned 2 completions, not 3"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_is_left_out_and_the_other_draws_its_share(
        engines, client, weights, capsys, failure):
    where, fail, says = FAILURES[failure]
    bad, good = engines(2)
    has_failed = threading.Event()
    good.on = lambda route, body: has_failed.wait(20) if route == DRAW else None

    def change(route, answer):
        if route == where:
            has_failed.set()
            fail(answer)
        return answer

    bad.change = change
    sampler, folder = client([bad, good]), weights("1")
    if failure == "late":
        sampler.DRAW_SECONDS = 1
    assert draw(sampler, folder) == expected(folder)
    line = capsys.readouterr().out.strip()
    assert line.startswith(f"{bad.url}: ")
    assert "\n" not in line
    assert line.endswith("the other servers took over its prompts")
    good.close()
    with pytest.raises(RuntimeError, match="^no server is left. .*$") as raised:
        draw(sampler, folder)
    for server, reason in ((bad, says), (good, "refused")):
        assert re.search(f"{server.url}: .*{reason}", str(raised.value))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("is_lora", [False, True], ids=["whole", "lora"])
def test_a_server_that_comes_back_gets_the_weights_before_it_draws(engines, client, weights, is_lora):
    falls, stays = engines(2)
    sampler, first, second = client([falls, stays]), weights("1", is_lora), weights("2", is_lora)
    assert draw(sampler, first) == expected(first)
    falls.close()
    assert draw(sampler, first, seed=8) == expected(first, seed=8)
    (back,) = engines(1, port=falls.port)  # with the weights that it started on
    in_step(back, stays)
    assert draw(sampler, first, seed=9) == expected(first, seed=9)
    assert back.routes().count(DRAW) == 4
    assert draw(sampler, second) == expected(second)


def load_by_hand(engine: Engine, folder: str) -> None:
    engine.weights, engine.version = folder, "by hand"


def test_completions_drawn_with_other_weights_are_discarded_and_drawn_again(engines, client, weights):
    (engine,) = engines(1)
    mine, theirs = weights("mine"), weights("theirs")
    has_changed = threading.Event()

    def once(route, body):
        if engine.routes().count(DRAW) >= 3 and not has_changed.is_set():
            has_changed.set()
            load_by_hand(engine, theirs)

    engine.on = once
    assert draw(client([engine]), mine) == expected(mine)
    assert engine.routes().count(RELOAD) == 2 and engine.routes().count(DRAW) == 16


def test_a_server_whose_weights_others_keep_changing_is_left_out(engines, client, weights):
    (engine,) = engines(1)
    mine, theirs = weights("mine"), weights("theirs")
    engine.on = lambda route, body: load_by_hand(engine, theirs) if route == DRAW else None
    with pytest.raises(RuntimeError, match=f"{engine.url}: another program keeps replacing the weights"):
        draw(client([engine]), mine)


def test_half_loaded_weights_never_have_a_version_that_a_client_expects(engines, client, weights):
    (engine,) = engines(1)
    draw(client([engine]), weights("1"))
    name, loading, reload, cache, ready = [route for route in engine.routes() if route != DRAW][:5]
    assert [name, loading, reload, cache, ready] == [
        "/weight_info", "/update_weight_version", RELOAD, CACHE, "/update_weight_version"]
    names = [body["new_version"] for route, body in engine.requests if route == ready]
    assert len(names) == len(set(names)) == 2 and engine.version == names[1]


@pytest.mark.parametrize("is_lora, route", [(False, RELOAD), (True, "/v1/load_lora_adapter")])
def test_weights_of_an_earlier_process_are_not_mistaken_for_those_at_the_same_path(
        engines, client, weights, is_lora, route):
    (engine,) = engines(1)
    folder = weights("1", is_lora)
    draw(client([engine]), folder)
    draw(client([engine]), folder)
    assert engine.routes().count(route) == 2


# A run.

def transformers_draws(loaded: dict):
    """An engine's `draw` with transformers: the model in the folder, or the base model with the folder's
    adapters."""
    import torch
    from transformers import AutoModelForCausalLM

    lock = threading.Lock()

    @torch.no_grad()
    def draw(folder: str, prompt: list[int], seed: int, longest: int):
        with lock:
            if folder not in loaded:
                loaded[folder] = AutoModelForCausalLM.from_pretrained(folder).eval()
        model, generator = loaded[folder], torch.Generator().manual_seed(seed)
        ids, logps = torch.tensor([prompt]), []
        while len(logps) < longest and (not logps or ids[0, -1] != STOP):
            row = model(ids).logits[0, -1].log_softmax(-1)
            token = torch.multinomial(row.exp(), 1, generator=generator)
            logps.append(float(row[token]))
            ids = torch.cat([ids, token[None]], 1)
        return ids[0, len(prompt) :].tolist(), logps

    return draw


@pytest.mark.parametrize("lora", [0, pytest.param(4, marks=pytest.mark.needs("peft"))])
def test_a_run_draws_from_servers_of_both_kinds(run, engines, monkeypatch, tmp_path, lora):
    loaded = {}
    both = engines(2, draw=transformers_draws(loaded))
    in_step(*both)
    monkeypatch.setenv("HUMANLINE_SERVERS", f"{both[0].url}, sglang+{both[1].url}")
    monkeypatch.setenv("HUMANLINE_SAMPLER_WEIGHTS", str(tmp_path / "shared"))
    lines = metrics(run(f"--sampler configs/external.py:servers --sample-every 2 --steps 6 --lora {lora}"))
    # Measured where the weights are the same: in the step that has just drawn.
    gaps = [line.get("sampler_gap") for line in lines]
    assert gaps[1::2] == [None] * 3 and max(gaps[0::2]) <= 1e-3
    assert [len(engine.adapters) for engine in both] == [lora > 0] * 2
    assert len(loaded) == 3 and all(Path(name).parent.parent == tmp_path / "shared" for name in loaded)
    assert not list((tmp_path / "shared").iterdir())  # removed with the run


# The engine on this machine, as a stand-in for vLLM sees it.

def test_vllm_gets_adapters_with_the_base_and_a_new_number_when_they_change(weights, monkeypatch):
    calls = []

    class LLM:
        def __init__(self, model, **room):
            calls.append((model, room["enable_lora"], room["max_lora_rank"]))

        def generate(self, prompts, params, use_tqdm, lora_request):
            calls.append(lora_request)
            return []

    request = types.ModuleType("vllm.lora.request")
    request.LoRARequest = lambda name, number, path: (number, path)
    engine = types.ModuleType("vllm")
    engine.LLM, engine.SamplingParams = LLM, dict
    modules = {"vllm": engine, "vllm.lora": types.ModuleType("vllm.lora"), "vllm.lora.request": request}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    sampler = module_of(FILE.with_name("sampler_vllm.py"))
    folders = weights("1", True), weights("2", True)
    for folder in folders:
        Path(folder, "adapter_config.json").write_text(json.dumps(dict(r=12, base_model_name_or_path="base")))
    for folder in (folders[0], folders[0], folders[1]):
        sampler.sample(PROMPTS, SETTINGS, 3, 7, folder)
    assert calls == [("base", True, 16), (1, folders[0]), (1, folders[0]), (2, folders[1])]
