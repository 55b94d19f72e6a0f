"""Shared fixtures: a random model with a few thousand parameters, rows of every kind, and short runs on
them."""

import functools
import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")
os.environ["OMP_NUM_THREADS"] = "1"  # the tensors are so small that more threads would only wait
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "claims")]

import pytest
import torch
import torch.distributed.run
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import humanline
from bases import character_tokenizer
from humanline import Batch, Sequence
from warm import Started

# Tests that run in the background would hand their ignored signals on to the runs that they stop.
for number, handler in {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}.items():
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


SLOW = ("the whole demo, compiled runs, 50 kills, ranks that are killed or stopped under torchrun, a reward "
        "model in its process, all hostile answers, more combinations against plain.py, on two ranks and in "
        "TRL, dry runs of the configs, the experiments in small, and making the demo again")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help=f"run what takes minutes, too: {SLOW}")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes; runs with --slow or -m slow")
    config.addinivalue_line("markers", "needs(package): skipped if this optional package is not installed")


def runs_slow(config) -> bool:
    return config.getoption("--slow") or "slow" in config.getoption("-m")


def pytest_report_header(config):
    return None if runs_slow(config) else f"without --slow, which adds {SLOW}"


def pytest_collection_modifyitems(config, items):
    for item in items:
        for mark in item.iter_markers("needs"):
            if importlib.util.find_spec(mark.args[0]) is None:
                item.add_marker(pytest.mark.skip(reason=f"pip install {mark.args[0]}"))
    if not runs_slow(config):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory):
    """Keep the user's caches unchanged."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets-cache"))
    import datasets

    datasets.config.HF_DATASETS_CACHE = os.environ["HF_DATASETS_CACHE"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """A folder with a random two-layer Llama and the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, initializer_range=0.2))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """folder(family, tied) is a random two-layer model with a tokenizer of its family."""
    from families import save_model

    @functools.cache
    def make(family: str, tied: bool = True) -> str:
        path = tmp_path_factory.mktemp(f"{family}-{'tied' if tied else 'untied'}")
        save_model(family, path, tied)
        return str(path)

    return make


def rows_of(kind: str, count: int = 24) -> list[dict]:
    """Rows of one kind, with prompts and completions of various lengths."""
    chance = random.Random(count)
    characters = lambda low, high: (chance.choice("abcdefgh 0123456789")
                                    for _ in range(chance.randint(low, high)))
    word = lambda low, high: "".join(characters(low, high)).strip() or "x"
    make = {
        "prompts": lambda i: dict(prompt=f"{i} {word(1, 12)}", answer=word(1, 3)),
        "pairs": lambda i: dict(prompt=f"{i} {word(1, 12)}", chosen=word(1, 9), rejected=word(1, 9)),
        "labels": lambda i: dict(prompt=f"{i} {word(1, 12)}", completion=word(1, 9), label=i % 3 == 0),
        "groups": lambda i: dict(prompt=f"{i} {word(1, 12)}", answer="x",
                                 completions=[word(1, 9) for _ in range(4)],
                                 scores=[float(j == i % 4) for j in range(4)]),
    }[kind]
    return [make(i) for i in range(count)]


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def data_files(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("rows")
    kinds = "prompts", "pairs", "labels", "groups"
    return {kind: write_jsonl(folder / f"{kind}.jsonl", rows_of(kind)) for kind in kinds}


# What each loss needs to know about its sequences, in turn.
SIGNALS = {
    "dpo": [dict(advantage=1.0), dict(advantage=-1.0)],
    "kto": [dict(advantage=1.0, kto_weight=1.5), dict(advantage=-1.0), dict(advantage=-1.0)],
    "grpo": [dict(advantage=advantage) for advantage in (1.2, -0.4, 0.0, -0.8)],
}


def random_batch(loss: str, count: int = 8, seed: int = 0) -> Batch:
    """A batch with various lengths, and reference log-probs that differ from the policy's."""
    generator = torch.Generator().manual_seed(seed)
    number = lambda low, high: int(torch.randint(low, high, (), generator=generator))
    ids = lambda length: torch.randint(8, 100, (length,), generator=generator).tolist()

    def random_sequence(**signal) -> Sequence:
        sequence = Sequence(ids(number(1, 9)), ids(number(1, 9)), **signal)
        sequence.ref_logps = -4.6 + torch.randn(len(sequence.completion), generator=generator)
        return sequence

    sequences = [random_sequence(**signal) for _, signal in zip(range(count), itertools.cycle(SIGNALS[loss]))]
    mismatched = []
    if loss == "kto":  # one per example, with the same advantage
        mismatched = [random_sequence(advantage=sequence.advantage) for sequence in sequences]
    return Batch(1, sequences, mismatched, 0.0)


@pytest.fixture(scope="session")
def varied(tmp_path_factory) -> str:
    """A --reward that differs between most completions. With `exact`, a random model would never be right and
    learn nothing."""
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text("import zlib\n\n\ndef varied(prompts, completions, rows, **_):\n"
                    "    return [zlib.crc32(text.encode()) % 7 / 7 for text in completions]\n")
    return f"{path}:varied"


@pytest.fixture
def run(tiny, data_files, tmp_path, varied):
    """run("--loss dpo ...", data="pairs") trains in this process and returns the run's folder."""
    count = 0

    def train(more: str, data: str = "groups", out: str | None = None,
              flags: list[str] | None = None) -> Path:
        nonlocal count
        count += 1
        defaults = (f"--model {tiny} --data {data_files[data]} --steps 6 --batch-size 4 --lr 1e-2 "
                    "--max-new-tokens 4 --group-size 4")
        if "--sample-every" in more and "--reward " not in more:
            defaults += f" --reward {varied}"
        out = out or str(tmp_path / f"run{count}")
        humanline.train(humanline.parse_config([*(flags or defaults.split()), *more.split(), "--out", out]))
        return Path(out)

    return train


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(folder: Path) -> list[dict]:
    """The metrics of a run without those that depend on time or memory."""
    return [{key: value for key, value in line.items() if "second" not in key and key != "memory_mib"}
            for line in metrics(folder)]


def same_weights(a: Path, b: Path) -> bool:
    """Whether two runs have the same final weights, or adapters, bit for bit."""
    first, second = (load_file(*(folder / "final").glob("*.safetensors")) for folder in (a, b))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def command(*flags: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Run humanline.py FLAGS in a separate process."""
    return finished(ROOT / "humanline.py", *flags, cwd=cwd, **environment)


def finished(*line: object, **settings) -> subprocess.CompletedProcess:
    """Run a script in a separate process."""
    process = Started(*line, **settings)
    output, error = process.communicate()
    return subprocess.CompletedProcess(line, process.returncode, output, error)


def policy_of(tiny: str, **settings):
    """The tiny model, its tokenizer, and a configuration."""
    config = humanline.Config(**{"model": tiny, "batch_size": 4, **settings})
    policy, tokenizer = humanline.load_policy(config, torch.device("cpu"))
    policy.shares_prompts = True
    return policy, tokenizer, config


def encode_prompt(tokenizer, messages: list[dict]) -> list[int]:
    [[ids]] = humanline.encode_dialogues(tokenizer, [humanline.Row("", messages, {})])
    return ids


def double(policy, batch: Batch) -> None:
    """Convert the policy and the batch to float64."""
    policy.double()
    for sequence in batch.sequences + batch.mismatched:
        sequence.ref_logps = sequence.ref_logps.double()


def gradient(policy, batch: Batch, config) -> torch.Tensor:
    policy.zero_grad()
    humanline.forward_backward(policy, batch, config)
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def logps_of(policy, sequences: list[Sequence], temperature: float = 1.0) -> list[torch.Tensor]:
    """The log-probs of each sequence's completion, with one sequence per row."""
    logps = humanline.log_probs(policy, [[sequence] for sequence in sequences], temperature).detach()
    return [row[: len(sequence.completion)] for row, sequence in zip(logps, sequences)]


def short_run(tiny: str, data: str, more: str = "") -> list[str]:
    flags = "--steps 3 --batch-size 4 --lr 1e-2 --max-new-tokens 4 --group-size 4"
    return f"--model {tiny} --data {data} {flags} {more}".split()


def complaint(flags: list[str], tmp_path, capsys) -> str:
    """The one-line message that main prints. Checks the exit status, and that nothing was written."""
    before = sorted(tmp_path.rglob("*"))
    assert humanline.main(flags) == 2
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if "warning" not in line]
    assert len(lines) == 1 and lines[0].startswith("humanline.py: error: "), shown.err
    assert sorted(tmp_path.rglob("*")) == before
    return lines[0]


# eval.py.

@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """ask("accuracy --samples 2") runs the command in an empty folder, 100 columns wide, and returns its
    output."""
    import eval as evaluation

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(command: str) -> str:
        status = evaluation.main(command.split())
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return captured.out

    return run


# Several ranks.

def in_two_ranks(driver: Path, first_import: str = "torch") -> tuple[str, str]:
    """Run torchrun DRIVER with two ranks, which are forks of a process that has imported what they need.
    Returns stdout and stderr."""
    done = finished(torch.distributed.run.__file__, "--standalone", "--nproc_per_node=2", "--start-method=fork",
                    "--run-path", driver, before=(importlib.import_module, first_import))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def train_on_two_ranks(home: Path, runs: list[list[str]], root: Path = ROOT, after: str = "",
                       first_import: str = "torch") -> tuple[str, str]:
    """Train each list of flags with the humanline.py in `root`, all of them in one torchrun, because starting
    torch costs more than the runs. `after` is code that follows. Returns stdout and stderr."""
    (home / "runs.json").write_text(json.dumps(runs))
    (home / "driver.py").write_text(f"""
import json, os, sys
sys.path[:0] = [{str(root)!r}, {str(home)!r}]
import torch, humanline
torch.set_num_threads(1)
for flags in json.load(open({str(home / "runs.json")!r})):
    run = humanline.train(humanline.parse_config(flags))
    if humanline.RANK == 0:
        print(humanline.last_line(run))
{after}
torch.distributed.destroy_process_group()
""")
    return in_two_ranks(home / "driver.py", first_import)


def agree(expected: Path, folder: Path, tolerance: float = 1e-5) -> None:
    """Losses and weights equal, relative to their size (a GRPO loss passes through zero, so 0.1 is the least
    size)."""
    for a, b in zip(metrics(expected), metrics(folder), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=tolerance, abs=0.1 * tolerance), a["step"]
        assert a["tokens"] == b["tokens"] and a["reward"] == pytest.approx(b["reward"])
    if (expected / "rollouts.jsonl").exists():
        lines = [map(json.loads, (run / "rollouts.jsonl").read_text().splitlines())
                 for run in (expected, folder)]
        first, second = ([(line["step"], line["row"], line["tokens"]) for line in of_run] for of_run in lines)
        assert first == second
    first, second = (load_file(run / "final" / "model.safetensors") for run in (expected, folder))
    assert first.keys() == second.keys()
    for name in first:
        assert (first[name] - second[name]).norm() <= tolerance * first[name].norm(), name
