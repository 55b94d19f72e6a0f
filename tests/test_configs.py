"""Every file of configs/ is a run: it parses, says what it reproduces and needs, and trains on small
stand-ins."""

import importlib.util
import json
import re
import shutil
import tomllib

import pytest
from conftest import ROOT, metrics, write_jsonl

import humanline

MATH_MODES = ("online", "every-64", "every-64-humanline-k12")
FILES = sorted((ROOT / "configs").glob("*.toml"))  # those of the demo: tests/test_demo.py
USER = lambda text: {"role": "user", "content": text}
ASSISTANT = lambda text: {"role": "assistant", "content": text}


def armorm(i: int) -> dict:
    responses, question = [f"answer {i} {j}" for j in range(5)], f"question {i}?"
    scores = [0.1 * ((i + j) % 5) for j in range(5)]
    return dict(prompt_id=f"{i:x}", prompt=question, all_generated_responses=responses, all_rm_scores=scores,
                chosen=[USER(question), ASSISTANT(responses[scores.index(max(scores))])],
                rejected=[USER(question), ASSISTANT(responses[scores.index(min(scores))])])


def math(i: int) -> dict:
    return dict(problem=f"What is ${i}+1$?", solution=f"It is $\\boxed{{{i + 1}}}$.", answer=str(i + 1),
                subject="Algebra", level=1, unique_id=f"algebra/{i}.json")


def rollout(i: int) -> dict:
    """A line of rollouts.jsonl: one of three completions of a prompt."""
    return dict(step=1 + i // 6, prompt_id=str(i // 3), prompt=f"Write one sentence about a {i // 3}.",
                completion=f"{i} is {'good' if i % 3 else 'bad'}.", reward=[-0.5, 0.25, 0.75][i % 3])


def topic(i: int) -> dict:
    return dict(prompt=f"Write one sentence about a {i}.", topic=str(i))


SCHEMAS = {"princeton-nlp/llama3-ultrafeedback-armorm": armorm,
           "princeton-nlp/gemma2-ultrafeedback-armorm": armorm, "simplescaling/openaimath": math,
           "runs/smollm2-grpo-online/rollouts.jsonl": rollout, "configs/topics.jsonl": topic,
           "configs/topics-test.jsonl": topic}


@pytest.fixture(scope="module")
def stand_in(tiny, tmp_path_factory) -> str:
    """The tiny model, told to read prompts of some length."""
    folder = tmp_path_factory.mktemp("stand-in") / "model"
    shutil.copytree(tiny, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | dict(max_position_embeddings=1024)))
    return str(folder)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, str]:
    """For each data set that a config names, a file with rows of its schema."""
    folder = tmp_path_factory.mktemp("rows")
    files = {}
    for name, make in SCHEMAS.items():
        path = folder / f"{name.replace('/', '-')}.jsonl"
        files[name] = write_jsonl(path, [make(i) for i in range(12)])
    return files


def test_there_is_a_config_for_each_run_of_the_paper():
    names = {file.stem for file in FILES}
    modes = ("offline", "online", "humanline")
    assert {f"llama3-8b-{loss}-{mode}" for loss in ("dpo", "kto", "grpo") for mode in modes} <= names
    assert "gemma2-27b-kto-humanline" in names


def test_the_math_runs_differ_only_in_sampling_and_humanline_and_step_as_the_authors_do():
    read = lambda name: tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8"))
    runs = {mode: read(f"qwen2.5-1.5b-math-grpo-{mode}") for mode in MATH_MODES}
    switches = ("humanline", "sync_k", "log_eps_p", "log_eps_r", "sample_every")
    switched = {mode: tuple(run.pop(name, None) for name in switches) for mode, run in runs.items()}
    assert all(run == runs["online"] for run in runs.values())
    assert switched.pop("online") == (False, None, None, None, 1)
    assert switched.pop("every-64") == (False, None, None, None, 64)
    assert switched == {"every-64-humanline-k12": (True, 12, -1.5, 1.5, 64)}
    # In the units of their recipes: parts of 8 completions on each of 8 GPUs, 4 of which make a step, 256 a
    # drawing.
    run = runs["online"]
    assert run["batch_size"] * run["group_size"] == 8 * 8 * 4
    assert run["system"].endswith("format: <think>\n...\n</think>\n<answer>\n...\n</answer>")


def check_comments(file) -> None:
    """That it says what it reproduces, what it needs, and where each value is from."""
    head, _, settings = file.read_text(encoding="utf-8").partition("\n\n")
    assert "\n# Needs: " in head and f"--config configs/{file.name}" in head
    assert ("GPU" in head and "from the hub" in head) or "a CPU" in head
    one_line_each = re.sub(r'"""[^"]*"""', '"..."', settings)
    for line in filter(None, one_line_each.splitlines()):
        assert re.search(r"  # (authors|paper|ours)", line), line
    table, name = tomllib.loads(settings), file.stem
    assert table["loss"] in name and table["humanline"] == ("humanline" in name)
    sample_every, stated = table.get("sample_every", 0), re.search(r"every-(\d+)", name)
    assert sample_every == int(stated[1]) if stated else ("online" in name) == (0 < sample_every < 64)


@pytest.mark.parametrize("file", [
    pytest.param(file, marks=pytest.mark.needs("peft") if "lora" in file.stem else ()) for file in FILES
], ids=lambda file: file.stem)
def test_a_config_says_what_it_is_and_runs_with_small_stand_ins(
        file, stand_in, rows, varied, tmp_path, monkeypatch):
    check_comments(file)
    monkeypatch.chdir(ROOT)  # a config names files from here
    config = humanline.parse_config(["--config", str(file)])
    reward = config.reward
    if "model_reward" in reward:
        reward = varied
    if "sentiment" in reward and not importlib.util.find_spec("vaderSentiment"):
        reward = varied
    data = [rows[name.split(":")[0]] for name in config.data]
    flags = ["--model", stand_in, "--data", *data, "--reward", reward, "--out", str(tmp_path / "out"),
             *("--dtype float32 --steps 2 --batch-size 2 --group-size 2 --max-new-tokens 4 --max-length 1000 "
               "--max-prompt-length 900 --save-every 0 --no-shard").split()]
    if config.eval_data:
        flags += ["--eval-data", rows[config.eval_data.split(":")[0]], "--eval-prompts", "2"]
    humanline.train(humanline.parse_config(["--config", str(file), *flags]))
    lines = metrics(tmp_path / "out")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["tokens"] > 0 or config.sample_every for line in lines)


def test_the_offline_configs_train_on_what_the_online_config_samples(stand_in, varied, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)

    def train(name: str, more: str = "") -> list[dict]:
        flags = (f"--config configs/smollm2-135m-{name}.toml --model {stand_in} --reward {varied} --steps 2 "
                 f"--dtype float32 --max-new-tokens 8 --eval-prompts 2 --out {tmp_path / name} {more}")
        humanline.train(humanline.parse_config(flags.split()))
        return metrics(tmp_path / name)

    assert len(train("grpo-online")) == 2
    drawn = tmp_path / "grpo-online" / "rollouts.jsonl"
    assert len(drawn.read_text(encoding="utf-8").splitlines()) == 2 * 4 * 8  # steps, prompts, completions
    for loss in ("grpo", "dpo", "kto"):
        lines = train(f"{loss}-offline-humanline", f"--data {drawn}")
        assert len(lines) == 2
        assert all(line["tokens"] > 0 and line["grad_norm"] > 0 for line in lines)
