"""Sampling: `generate`, or with --sampler another process, which reads the weights from a folder and may
fail."""

import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
import weakref
from pathlib import Path

import pytest
import torch
from bases import character_tokenizer
from conftest import ROOT, command, metrics, policy_of, same_weights, timeless
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import humanline
from humanline import UserError
from warm import Started

EXTERNAL = ROOT / "configs" / "external.py"
SECONDS = 60

# Draws anything, as a function of the seed and of the weights; notes what it was asked and what it answered.
FAKE = """
import json, os, pathlib, random, sys, time

def draw(prompts, settings, count, seed, weights):
    from safetensors import safe_open  # quicker to import than torch
    file = pathlib.Path(weights, "model.safetensors")
    with safe_open(file, "np") as tensors:
        first = float(tensors.get_tensor("model.norm.weight")[0])
    chance = random.Random(f"{seed} {first}")
    stop, longest = settings["stop_ids"][0], settings["max_new_tokens"]

    def completion():
        ids = [chance.randrange(8, 90) for _ in range(chance.randint(1, longest))]
        ids = ids if len(ids) == longest else [*ids, stop]
        return ids, [-1.0] * len(ids)

    answer = [[completion() for _ in range(count)] for _ in prompts]
    note = dict(prompts=prompts, settings=settings, count=count, seed=seed, weights=weights, first=first,
                pid=os.getpid(), environment=dict(os.environ), answer=answer)
    with open(NOTES, "a") as notes:
        notes.write(json.dumps(note) + "\\n")
    return answer
"""
UNLIKELY = """
def unlikely(*request):
    return [[(ids, [-99.0] * len(ids)) for ids, _ in group] for group in draw(*request)]
"""
HANGS = """
def hangs(*request):
    import subprocess
    answer = draw(*request)
    subprocess.run(["sleep", "98765"])
    return answer
"""
# In the trainer's process: the policy draws by other code, and says of each token that it was less likely.
UNSURE = """
import torch

def unsure(run):
    policy, longest, stops = run.policy, run.config.max_new_tokens, run.sampler.stop_ids

    def log_probs(ids):
        return (policy(ids).logits.float() / run.config.temperature).log_softmax(-1)

    @torch.no_grad()
    def draw(prompts, count, step, greedy):
        generator, completions = torch.Generator().manual_seed(step), []
        for prompt in [group.prompt for group in prompts for _ in range(count)]:
            ids = torch.tensor([prompt])
            for _ in range(longest):
                token = torch.multinomial(log_probs(ids)[:, -1].exp(), 1, generator=generator)
                ids = torch.cat([ids, token], 1)
                if token in stops:
                    break
            completion, rows = ids[0, len(prompt) :], log_probs(ids)[0, len(prompt) - 1 : -1]
            logps = rows.gather(1, completion[:, None])[:, 0] - 0.3
            completions.append((completion.tolist(), logps.tolist()))
        return completions

    return draw
"""


def start(folder: Path, function: str) -> str:
    """A --sampler that starts a function from a file in the same way as configs/external.py."""
    name = function.rpartition(":")[2]
    path = folder / f"start_{name}.py"
    path.write_text(f"import runpy\n\nexternal = runpy.run_path({str(EXTERNAL)!r})\n"
                    f"external['External'].__init__.__globals__['SECONDS'] = {SECONDS}\n\n"
                    f"def {name}(run):\n    return external['External'](run, {function!r})\n")
    return f"{path}:{name}"


@pytest.fixture
def notes(tmp_path):
    """notes() returns the requests to the samplers of this test, in order."""
    return lambda: [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]


@pytest.fixture
def sampler(tmp_path, monkeypatch):
    """sampler("draw") is a --sampler from FAKE, whose log-probs are not the policy's. `more` is code to
    append."""
    def write(function: str = "draw", more: str = "") -> str:
        monkeypatch.setattr(humanline, "SAMPLER_GAP", 99.0)
        path = tmp_path / f"{function}.py"
        path.write_text(FAKE.replace("NOTES", repr(str(tmp_path / "notes.jsonl"))) + more)
        return start(tmp_path, f"{path}:{function}")

    return write


# What it is asked, and what becomes of the answer.

def test_a_sampler_gets_the_current_weights_for_each_drawing(run, sampler, notes, data_files, tiny):
    whole = run(f"--sampler {sampler()} --sample-every 2 --steps 6 --temperature 0.7 "
                f"--top-p 0.9 --eval-data {data_files['prompts']} --eval-every 2 --eval-samples 3")
    calls = notes()
    assert len({note["pid"] for note in calls}) == 1  # one process for the run
    # Before the first step and after every second one: held-out samples, their greedy completions, the next
    # drawing.
    assert [note["count"] for note in calls] == [3, 1, 4] * 3 + [3, 1]
    assert [len(note["prompts"]) for note in calls] == [24, 24, 8] * 3 + [24, 24]
    folders = [note["weights"] for note in calls]
    # written when they changed
    assert folders[0] == folders[1] == folders[2] != folders[3] == folders[4] == folders[5]
    assert len({note["seed"] for note in calls[2::3]}) == 3
    assert calls[2]["settings"] == dict(temperature=0.7, top_p=0.9, stop_ids=[3], max_new_tokens=4,
                                        dtype="float32")
    assert calls[1]["settings"]["temperature"] == 0
    first = AutoModelForCausalLM.from_pretrained(tiny).model.norm.weight[0].item()
    last = load_file(whole / "final" / "model.safetensors")["model.norm.weight"][0].item()
    assert calls[0]["first"] == pytest.approx(first, abs=0)
    assert calls[-1]["first"] == pytest.approx(last, abs=0)
    lines = [json.loads(line) for line in (whole / "rollouts.jsonl").read_text().splitlines()]
    drawn = [completion for note in calls[2::3] for group in note["answer"] for completion in group]
    assert [[line["tokens"], line["logps"]] for line in lines] == drawn and len(drawn) == 6 * 4 * 4
    assert not Path(folders[0]).parent.exists()
    assert not any(os.path.exists(f"/proc/{note['pid']}") for note in calls)


def test_a_sampler_is_compared_with_the_trainer_and_ends_the_run_if_its_log_probs_differ(run, tmp_path):
    """The first run is like a server that kept some of its old weights."""
    (tmp_path / "unsure.py").write_text(UNSURE)
    flags = f"--sample-every 2 --steps 4 --temperature 0.8 --sampler {tmp_path}/unsure.py:unsure"
    says = ("^step 1: --sampler .*unsure differs from the policy by 0.300 nats a token .*limit 0.1.;"
            ".*--resume latest$")
    with pytest.raises(UserError, match=says):
        run(flags, out=str(tmp_path / "ended"))
    assert not (tmp_path / "ended" / "metrics.jsonl").exists()
    bf16 = metrics(run(f"{flags} --dtype bfloat16 --top-p 0.7 --steps 2"))
    assert bf16[0]["sampler_gap"] == pytest.approx(0.3, abs=0.05)
    # A cut distribution's log-probs are larger by up to -log(0.7) = 0.36: 0.3 may be right.
    lines = metrics(run(f"{flags} --top-p 0.7"))
    gaps = [line.get("sampler_gap") for line in lines]
    assert gaps[0::2] == pytest.approx([0.3, 0.3], abs=1e-4)  # with the same weights
    assert gaps[1::2] == [None, None]  # a step has changed them


def test_a_sampler_command_starts_without_the_environment_of_torchrun(
        run, sampler, notes, tmp_path, varied, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    settings = tmp_path / "settings.toml"
    command = f"env CUDA_VISIBLE_DEVICES=5,6 {sys.executable}"
    monkeypatch.setenv("HUMANLINE_SAMPLER_COMMAND", command)
    settings.write_text(f'sampler = "{sampler()}"\nsample_every = 2\n')
    run(f"--config {settings} --steps 2 --reward {varied}")
    environment = notes()[0]["environment"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert not {"TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"} & environment.keys()


def test_resuming_between_two_drawings_is_exact(run, sampler, tmp_path, data_files):
    flags = (f"--sampler {sampler()} --sample-every 4 --steps 8 --save-every 2 --keep 9 --eval-data "
             f"{data_files['prompts']} --eval-samples 1 --eval-prompts 2")
    whole = run(flags)
    for step in (4, 6):
        checkpoint = whole / "checkpoint" / f"step-{step:08d}"
        resumed = run(f"{flags} --resume {checkpoint}", out=str(tmp_path / f"resumed-{step}"))
        assert timeless(resumed) == timeless(whole)[step:] and same_weights(resumed, whole), step


def test_numpys_numbers_of_a_sampler_become_plain_ones():
    import numpy

    config = humanline.Config(max_new_tokens=4)
    sampler = types.SimpleNamespace(stop_ids=[3], vocabulary=set(range(9)), config=config)
    drawn = [([numpy.int64(7), numpy.int64(3)], [numpy.float32(-0.5), numpy.float32(-1)])]
    checked = humanline.Sampler.check_completions(sampler, drawn, 1)
    assert json.dumps(checked) == "[[[7, 3], [-0.5, -1.0]]]"


# What goes wrong costs a line.

NOT_THAT = "is not 32 completions of token ids and log-probs"
NOT_SO_MANY = "not 4 completions for each of 8 prompts"
BREAKS = {  # what the second drawing does, and what is said of it
    "os.kill(os.getpid(), 9)": "its process ended with status -9",
    "sys.exit('no more')": "SystemExit: no more",
    "time.sleep(99)": "took longer than 2 s",
    "return None": f"it returned None, {NOT_SO_MANY}",
    "return [group[1:] for group in answer]": NOT_SO_MANY,
    "return [[ids for ids, _ in group] for group in answer]": "must be an iterable",
    "return [[([103], [-1.0])] * 4] * 8": NOT_THAT,
}


def breaking(tmp_path: Path, what: str, times: int) -> str:
    """Code of a sampler that executes `what` at its second request, `times` times."""
    return f"""

def breaking(*request):
    answer, broken = draw(*request), pathlib.Path({str(tmp_path / "broken")!r})
    times = len(broken.read_text()) if broken.exists() else 0
    if request[3] != {humanline.seed_for(0, "draw", 1)} and times < {times}:
        broken.write_text("x" * (times + 1))
        print("these are my last words", flush=True)
        {what}
    return answer
"""


@pytest.fixture(scope="module")
def kept():
    return {}


@pytest.fixture
def good(run, sampler, kept, tmp_path_factory):
    """good(FLAGS) is a run whose sampler never failed."""
    def train(flags: str) -> Path:
        if flags not in kept:
            kept[flags] = run(f"{flags} {sampler()}", out=str(tmp_path_factory.mktemp("good") / "run"))
        return kept[flags]

    return train


@pytest.mark.parametrize("what", BREAKS)
def test_a_sampler_that_fails_once_is_restarted_and_changes_no_result(
        run, sampler, good, notes, tmp_path, capsys, monkeypatch, what):
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 2 if "sleep" in what else 60)
    flags = "--sample-every 2 --steps 4 --sampler"
    broken = run(f"{flags} {sampler('breaking', breaking(tmp_path, what, 1))}")
    [line] = [line for line in capsys.readouterr().err.splitlines() if "--sampler" in line]
    assert BREAKS[what] in line and line.endswith("restarting it")
    assert len({note["pid"] for note in notes()}) == 2
    assert timeless(broken) == timeless(good(flags)) and same_weights(broken, good(flags))


@pytest.mark.parametrize("what", [
    "os.kill(os.getpid(), 9)", *(pytest.param(what, marks=pytest.mark.slow) for what in list(BREAKS)[1:4])])
def test_a_sampler_that_fails_again_ends_the_run_with_a_one_line_error_and_the_run_can_be_resumed(
        run, sampler, good, tmp_path, monkeypatch, what):
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 2 if "sleep" in what else 60)
    flags = "--sample-every 2 --steps 6 --save-every 2 --sampler"
    out, spec = str(tmp_path / "broken-run"), sampler("breaking", breaking(tmp_path, what, 2))
    with pytest.raises(UserError) as raised:
        run(f"{flags} {spec}", out=out)
    assert "\n" not in str(raised.value)
    assert BREAKS[what] in str(raised.value)
    assert "sampler.log" in str(raised.value)
    assert "these are my last words" in Path(out, "sampler.log").read_text()
    assert not list(Path(out).glob("weights*"))
    resumed = run(f"{flags} {spec} --resume latest", out=out)  # by now it has failed twice, and works
    assert timeless(resumed) == timeless(good(flags)) and same_weights(resumed, good(flags))


def test_a_killed_trainer_leaves_no_sampler_process_and_a_resumed_run_no_weights(
        tiny, data_files, sampler, notes, tmp_path, varied):
    flags = (f"--model {tiny} --data {data_files['prompts']} --reward {varied} --steps 2 --batch-size 2 "
             f"--group-size 2 --max-new-tokens 4 --sample-every 2 --top-p 1e-9 --out {tmp_path / 'run'} "
             f"--sampler {sampler('hangs', HANGS)}").split()
    trainer = Started(ROOT / "humanline.py", *flags)
    while not (tmp_path / "notes.jsonl").exists():
        assert trainer.poll() is None
        time.sleep(0.1)
    folder = Path(notes()[0]["weights"]).parent

    def session() -> list[str]:  # the sampler and what it has started
        line = ["ps", "-o", "pid=", "-g", str(notes()[0]["pid"])]
        return subprocess.run(line, capture_output=True, text=True).stdout.split()

    assert session()
    trainer.kill()
    trainer.communicate()
    for _ in range(100):
        if not session():
            break
        time.sleep(0.1)
    assert not session() and folder.exists()  # nobody was left to remove it
    sampler("hangs", HANGS.replace("98765", "0"))
    assert command(*flags, "--resume", "latest").returncode == 0
    assert not folder.exists()


@pytest.mark.parametrize("function, command, says", [
    ("missing.py:draw", "", "No such file or directory: "),
    ("{file}:absent", "", "has no attribute 'absent'"),
    ("{file}:draw", "/no/python", "No such file or directory: '/no/python'"),
    ("{file}:draw", "/bin/ls", "its process ended with status 2"),
])
def test_a_sampler_that_does_not_start_gives_a_one_line_error(run, sampler, tmp_path, monkeypatch, function,
                                                              command, says):
    sampler()
    monkeypatch.setenv("HUMANLINE_SAMPLER_COMMAND", command)
    spec = start(tmp_path, function.replace("{file}", str(tmp_path / "draw.py")))
    with pytest.raises(UserError) as raised:
        run(f"--sampler {spec} --sample-every 2", out=str(tmp_path / "none"))
    assert says in str(raised.value)
    assert f"--sampler {spec}: " in str(raised.value)
    assert "\n" not in str(raised.value)
    assert [path.name for path in (tmp_path / "none").iterdir()] in ([], ["sampler.log"])


@pytest.mark.parametrize("flags, says", [
    ("--sampler vllm", "--sampler vllm: pass generate or FILE.py:function"),
    ("--sampler missing.py:f", "--sampler missing.py:f: No such file: missing.py; write FILE.py:function"),
    (f"--sampler {EXTERNAL}:f", "--sampler .*external.py:f: no 'f'"),
])
def test_an_invalid_sampler_gives_a_one_line_error(run, flags, says):
    with pytest.raises(UserError, match=says):
        run(f"{flags} --sample-every 2")


# What any --sampler returns for 16 completions of at most 4 tokens, and what is said of it. 3 is the stop
# token.
GOOD = ([9, 3], [-1.0, -1.0])
RETURNS = {
    "None": "'NoneType' object is not iterable",
    "[GOOD] * 15": "is not 16 completions",
    "[GOOD] * 17": "is not 16 completions",
    "[GOOD] * 15 + [None]": "cannot unpack non-iterable NoneType",
    "[GOOD] * 15 + [([9, 3], [-1.0, float('nan')])]": "is not 16 completions",
    "[GOOD] * 15 + [([9, 3], [1.0, 1.0])]": "is not 16 completions",
    "[GOOD] * 15 + [([9, 3], [-1.0])]": "is not 16 completions",
    "[GOOD] * 15 + [([103, 3], [-1.0, -1.0])]": "is not 16 completions",
    "[GOOD] * 15 + [([-1, 3], [-1.0, -1.0])]": "is not 16 completions",
    "[GOOD] * 15 + [([9.5, 3], [-1.0, -1.0])]": "is not 16 completions",
    "[GOOD] * 15 + [([9], [-1.0])]": "is not 16 completions",
    "[GOOD] * 15 + [([9, 3, 9, 3], [-1.0] * 4)]": "is not 16 completions",
    "[GOOD] * 15 + [([9] * 5, [-1.0] * 5)]": "is not 16 completions",
    "[GOOD] * 15 + [([], [])]": "is not 16 completions",
    "[GOOD] * 15 + [((9, 3), (-1.0, -1.0))]": "is not 16 completions",
    "[GOOD] * 15 + [(torch.tensor([9, 3]), torch.zeros(2))]": "is not 16 completions",
    "[GOOD][7]": "list index out of range",
}


@pytest.mark.parametrize("value", RETURNS)
def test_what_any_sampler_returns_is_checked(run, tmp_path, value):
    path = tmp_path / "sampler.py"
    path.write_text(f"import torch\nGOOD = {GOOD!r}\ndef draw(run):\n"
                    f"    return lambda prompts, count, step, greedy: {value}\n")
    with pytest.raises(UserError) as raised:
        run(f"--sampler {path}:draw --sample-every 1")
    message = str(raised.value)
    assert message.startswith(f"--sampler {path}:draw: ")
    assert RETURNS[value] in message
    assert "\n" not in message


def test_a_sampler_that_returns_no_function_gives_a_one_line_error(run, tmp_path):
    path = tmp_path / "sampler.py"
    path.write_text("def draw(run):\n    lambda prompts, count, step, greedy: []\n")
    with pytest.raises(UserError, match="draw: 'NoneType' .*; see the docstring of configs/external.py"):
        run(f"--sampler {path}:draw --sample-every 1")


def test_missing_vllm_is_reported_at_once(run):
    if importlib.util.find_spec("vllm"):
        pytest.skip("vllm is installed")
    says = "--sampler configs/external.py:vllm: .*'vllm'; set HUMANLINE_SAMPLER_COMMAND"
    with pytest.raises(UserError, match=says):
        run("--sampler configs/external.py:vllm --sample-every 2")


# --sampler generate: quicker than `generate` alone would be, with the same probabilities.

# Equal neighbours, and others: the last two differ only in what is padding, since 3 is the padding token, too.
PROMPTS = [[40, 41, 42]] * 3 + [[50]] * 2 + [[60, 61]] + [[40, 41, 42]] + [[3, 50, 51], [50, 51]]


@pytest.mark.parametrize("settings", [dict(temperature=0.6), dict(top_p=0.8), dict(temperature=0.6, top_p=0.8)])
def test_completions_are_drawn_with_the_probabilities_that_are_reported(tiny, settings):
    policy, _, config = policy_of(tiny, max_new_tokens=1, **settings)
    count = 20_000
    drawn = humanline.sample(policy, [[40, 41, 42]] * count, [3], config, 0)
    reported = {ids[0]: logps[0] for ids, logps in drawn}
    logits = policy(torch.tensor([[40, 41, 42]])).logits[0, -1].detach() / config.temperature
    values, order = logits.softmax(-1).sort(descending=True)
    nucleus = order[: int((values.cumsum(0) < config.top_p).sum()) + 1]
    expected = torch.full_like(logits, -torch.inf).index_put((nucleus,), logits[nucleus]).softmax(-1)
    for token, logp in reported.items():
        assert logp == pytest.approx(float(expected[token].log()), abs=2e-4)
    counts = torch.bincount(torch.tensor([ids[0] for ids, _ in drawn]), minlength=len(expected))
    common = expected * count > 5
    chi_squared = float(((counts - expected * count) ** 2 / (expected * count))[common].sum())
    freedom = int(common.sum()) - 1
    assert freedom > 10 and abs(chi_squared - freedom) < 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("dtype", ["float32", "mixed", "bfloat16"])
@pytest.mark.parametrize("longest, cache", [(2, StaticCache), (9, DynamicCache)])  # than the prompts
def test_computing_a_prompt_once_changes_no_completion(tiny, monkeypatch, longest, cache, dtype):
    policy, _, config = policy_of(tiny, max_new_tokens=longest, temperature=0.001, dtype=dtype)
    caches, prompt_cache = [], humanline.prompt_cache
    monkeypatch.setattr(humanline, "prompt_cache",
                        lambda *args: caches.append(prompt_cache(*args)) or caches[-1])
    together = humanline.sample(policy, PROMPTS, [3], config, 0)
    alone = [humanline.sample(policy, [prompt], [3], config, 0)[0] for prompt in PROMPTS]
    [made], *others = [list(argument.values()) for argument in caches]
    assert isinstance(made, cache) and others == [[]] * len(PROMPTS)
    assert made.layers[0].keys.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)
    if dtype != "bfloat16":  # whose logits have ties, between which the draw is random
        assert [ids for ids, _ in together] == [ids for ids, _ in alone]
    config.temperature = 1.0
    for prompt, (ids, logps) in zip(PROMPTS, humanline.sample(policy, PROMPTS, [3], config, 0)):
        logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1)
        tolerance = 2e-4 if dtype == "float32" else 0.1
        assert logps == pytest.approx(expected[range(len(ids)), ids].tolist(), abs=tolerance)


@pytest.mark.parametrize("longest", [2, 9])
def test_no_cache_is_kept_after_a_drawing(tiny, monkeypatch, longest):
    policy, _, config = policy_of(tiny, max_new_tokens=longest)
    caches, prompt_cache = [], humanline.prompt_cache

    def watched(*args):
        argument = prompt_cache(*args)
        [cache] = argument.values()
        caches.append(weakref.ref(cache.layers[0].keys))
        return argument

    monkeypatch.setattr(humanline, "prompt_cache", watched)
    gc.disable()  # on a GPU nobody waits for it
    try:
        humanline.sample(policy, PROMPTS, [3], config, 0)
        assert len(caches) == 1 and caches[0]() is None
    finally:
        gc.enable()


def test_drawing_depends_only_on_the_seed_and_does_not_touch_the_global_random_state(tiny):
    policy, _, config = policy_of(tiny, max_new_tokens=5)
    state = torch.random.get_rng_state()
    first, again, other = (humanline.sample(policy, PROMPTS, [3], config, seed) for seed in (1, 1, 2))
    assert first == again != other and torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.skipif("VLLM_PYTHON" not in os.environ,
                    reason="VLLM_PYTHON names no interpreter of an environment with vLLM")
def test_vllm_draws_with_the_trainers_weights_before_and_after_a_step(tmp_path, data_files, varied):
    """In fp32 the gap is tiny if the weights are equal, so a reload that missed a tensor would show. The head
    size is one that vLLM supports."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    done = command(*(f"--model {tmp_path / 'model'} --data {data_files['prompts']} --reward {varied} "
                     f"--sample-every 2 --steps 6 --batch-size 4 --group-size 4 --max-new-tokens 8 --lr 1e-2 "
                     f"--sampler configs/external.py:vllm --out {tmp_path / 'run'}").split(),
                   HUMANLINE_SAMPLER_COMMAND=os.environ["VLLM_PYTHON"])
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path / "run")
    assert all(line["sampler_gap"] < 1e-3 for line in lines[0::2])
    assert lines[2]["drift"] > 1e-2  # the policy has changed since the first drawing
