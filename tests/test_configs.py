"""Every file of configs/ is a run: it parses, says what it reproduces and needs, and trains on small stand-ins."""

import re
import tomllib

import pytest
import torch
from conftest import ROOT, metrics, write_jsonl
from transformers import LlamaConfig, LlamaForCausalLM

import humanline

FILES = sorted((ROOT / "configs").glob("*.toml"))
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


SCHEMAS = {"princeton-nlp/llama3-ultrafeedback-armorm": armorm, "princeton-nlp/gemma2-ultrafeedback-armorm": armorm,
           "nlile/hendrycks-MATH-benchmark": math}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> str:
    """A random two-layer model that reads prompts of some length."""
    folder, tokenizer = tmp_path_factory.mktemp("stand-in"), humanline.embedded_tokenizer()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, str]:
    """For each data set that a config names, a file with rows of its schema."""
    folder = tmp_path_factory.mktemp("rows")
    path = lambda name: folder / f"{name.replace('/', '-')}.jsonl"
    files = {name: write_jsonl(path(name), [make(i) for i in range(12)]) for name, make in SCHEMAS.items()}
    scored = lambda i: dict(completions=[str(i), str(i + 1)], scores=[0.0, 1.0])
    sums = [dict(prompt=f"{i}+1=", answer=str(i + 1)) | scored(i) for i in range(12)]
    return files | {"embedded": write_jsonl(folder / "embedded.jsonl", sums)}


def test_the_papers_runs_are_there():
    names = {file.stem for file in FILES}
    modes = ("offline", "online", "humanline")
    assert {f"llama3-8b-{loss}-{mode}" for loss in ("dpo", "kto", "grpo") for mode in modes} <= names
    assert {"gemma2-27b-kto-humanline"} | {f"qwen2.5-1.5b-math-grpo-{mode}" for mode in (
        "online", "every-64", "every-64-humanline-k12", "every-64-humanline-k24")} <= names
    assert sum(name.startswith("embedded-") for name in names) >= 3


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_config_says_what_it_reproduces_what_it_needs_and_where_each_value_is_from(file):
    head, _, settings = file.read_text(encoding="utf-8").partition("\n\n")
    assert all(line.startswith("#") for line in head.splitlines())
    assert "\n# Needs: " in head and f"--config configs/{file.name}" in head
    for line in filter(None, settings.splitlines()):
        assert re.search(r"  # (authors|paper|ours|the published loss)", line), line
    assert "GPU" in head and "from the hub" in head or "a CPU" in head
    table, name = tomllib.loads(settings), file.stem
    assert table["loss"] in name
    assert table["humanline"] == ("humanline" in name)
    sample_every = table.get("sample_every", 0)
    assert ("every-64" in name) == (sample_every == 64) and ("online" in name) == (0 < sample_every < 64)
    assert 0 <= sample_every <= 64


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_config_builds_its_run_on_small_stand_ins(file, stand_in, rows, tmp_path):
    config = humanline.parse_config(["--config", str(file)])
    length = "def length(prompts, completions, rows):\n    return [len(text) for text in completions]\n"
    (tmp_path / "judge.py").write_text(length)
    reward = f"{tmp_path}/judge.py:length" if config.reward[0].startswith("model:") else config.reward[0]
    data = [rows[humanline.source_name(name)] for name in config.data]
    flags = ["--model", stand_in, "--data", *data, "--reward", reward, "--out", str(tmp_path / "out"),
             *("--dtype float32 --steps 2 --batch-size 2 --group-size 2 --max-new-tokens 4 --max-length 200 "
               "--max-prompt-length 150 --save-every 0 --eval-prompts 2 --no-shard").split()]
    if config.eval_data:
        flags += ["--eval-data", rows[humanline.source_name(config.eval_data)]]
    short = humanline.parse_config(["--config", str(file), *flags])
    for name in "loss humanline sync_k perception log_eps_p log_eps_r beta epsilon kl_beta sample_every".split():
        assert getattr(config, name) == getattr(short, name), name
    humanline.train(short)
    lines = metrics(tmp_path / "out")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["tokens"] > 0 or config.sample_every for line in lines)
