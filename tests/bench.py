"""Measure time and memory of training steps, for humanline.py and, if it is installed, for TRL.

  python tests/bench.py                                  # steps of DPO, KTO and GRPO, against TRL's
  python tests/bench.py --trl-python ~/trl/bin/python    # use TRL from another environment (trl==1.16.0)
  python tests/bench.py --old CHECKOUT                   # compare with another checkout instead of TRL
  python tests/bench.py --real FOLDER                    # use a real model
  python tests/bench.py --what overhead                  # the cost of syncing and clipping
  python tests/bench.py --what online                    # offline GRPO with humanline, and online GRPO
  python tests/bench.py --what decoding [--real FOLDER]  # sampling by the trainer, and by plain generate
  python tests/bench.py --what lora --real FOLDER        # adapters and full weights
  python tests/bench.py --gpu                            # GPU sizes: 0.5 B parameters, 256 to 768 tokens
  python tests/bench.py --compact                        # let TRL skip prompts and padding on a CPU, too
  python tests/bench.py --thin                           # 30 layers of width 32: the time outside of products
  python tests/bench.py --thin --what decoding           # where it goes while sampling
  python tests/bench.py --store                          # also add the ratios to claims/results/bench.jsonl
  python tests/bench.py --what table                     # the README's table, from that file

The workload consists of batches of 8 (pairs, examples, or one group of 8 samples), with prompts of 64 tokens
and completions of 64 to 192 tokens (GRPO: 64 sampled tokens). The model is a random Llama with a vocabulary
of 32,768, in fp32 on a CPU and bf16 autocast on a GPU, where humanline.py runs with and without torch.compile.
A real model is in bf16 autocast where `--dtype auto` is: also on a CPU where bf16 is faster.
Times are medians over all rounds and all steps but the first two, on a GPU after a round that warms up. Peak
memory is that of the whole process, on a GPU that of torch. On a CPU, TRL 1.16 also projects prompts and
padding to the vocabulary, which its GPU kernels skip; with --compact it skips them.
"""

import contextlib
import itertools
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TextIO
from unittest import mock

import torch
import tyro
from torch.nn.utils.rnn import pad_sequence

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "claims" / "results" / "bench.jsonl"
DEMO = str(ROOT / "configs" / "demo" / "model")
WARMUP = 2
IS_GPU = torch.cuda.is_available()


@dataclass
class Workload:
    """Lengths in tokens, and dimensions of the model."""

    vocabulary: int = 32_768
    prompt: int = 64
    low: int = 64
    high: int = 192
    new: int = 64
    hidden: int = 256
    inner: int = 1024
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    batch: int = 8
    steps: int = 8
    mixed: bool = IS_GPU  # bf16 autocast
    is_real: bool = False
    compact: bool = False  # TRL skips prompts and padding on a CPU, too


GPU = Workload(
    vocabulary=151_936, prompt=256, low=256, high=768, new=256, hidden=896, inner=4864, layers=24, heads=14
)

# So little arithmetic that a step takes what the host needs. OMP_NUM_THREADS=1 gives both programs one thread.
THIN = Workload(vocabulary=512, hidden=32, inner=64, layers=30, heads=2)


# A reward that differs between samples, as real rewards do.
REWARD = "def reward(prompts, completions, rows):\n    return [len(text) % 7 / 7 for text in completions]\n"


def write_workload(folder: Path, load: Workload) -> None:
    """Write a model folder, and rows for each loss."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(load.vocabulary - 3)}
    pad, eos, unknown = range(load.vocabulary - 3, load.vocabulary)
    vocabulary = words | {"<pad>": pad, "<eos>": eos, "<unk>": unknown}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    with torch.device("cuda" if IS_GPU else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=load.vocabulary, hidden_size=load.hidden, intermediate_size=load.inner,
            num_hidden_layers=load.layers, num_attention_heads=load.heads, num_key_value_heads=load.kv_heads,
            max_position_embeddings=8192, tie_word_embeddings=True, pad_token_id=pad, eos_token_id=eos,
            bos_token_id=None))
    model.save_pretrained(folder / "model")
    chance = random.Random(0)
    word = lambda: f"w{chance.randrange(load.vocabulary - 3)}"
    text = lambda low, high: " ".join(word() for _ in range(chance.randint(low, high)))
    prompt = lambda: text(load.prompt, load.prompt)
    answer = lambda: f" {text(load.low, load.high)}"  # TRL puts it right behind the prompt
    make = {"dpo": lambda i: dict(prompt=prompt(), chosen=answer(), rejected=answer()),
            "kto": lambda i: dict(prompt=prompt(), completion=answer(), label=i % 2 == 0),
            "grpo": lambda i: dict(prompt=prompt(), answer=str(i)),
            "grpo-offline": lambda i: dict(
                prompt=prompt(), completions=[text(load.new - 1, load.new - 1) for _ in range(load.batch)],
                scores=[chance.random() for _ in range(load.batch)])}
    for loss, row in make.items():
        rows = [row(i) for i in range(load.batch * load.steps)]
        (folder / f"{loss}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


# A process that trains once for each line of its input, and answers with the peak of its memory in MiB and what
# `train` returns. On a GPU one process makes all runs, so that only the first one has to start and compile; on
# a CPU, where the peak is that of the process, each run has its own.
WORKER = """
import contextlib, gc, json, random, resource, sys, time
import torch
gpu = torch.cuda.is_available()
{train}
for line in sys.stdin:
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    with contextlib.redirect_stdout(sys.stderr):
        answer = train(**json.loads(line))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    peak = torch.cuda.max_memory_allocated() if gpu else resident
    print(json.dumps(answer | dict(peak=peak >> 20)), flush=True)
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
"""

HUMANLINE = """
sys.path.insert(0, {checkout!r})
import humanline
def train(flags):
    if humanline.main(flags):
        sys.exit(1)
    return dict()
"""

TRL = """
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
import trl

class Clock(TrainerCallback):
    def __init__(self):
        self.seconds = []
    def on_step_begin(self, *_, **__):
        self.start = time.perf_counter()
    def on_step_end(self, *_, **__):
        if gpu:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.start)

def train(folder, loss, load):
    module, clock = trl, Clock()
    if load["compact"]:
        from trl.trainer import utils
        utils._use_triton = lambda device: True
    settings = dict(output_dir=folder + "/trl", per_device_train_batch_size=load["batch"],
                    max_steps=load["steps"], report_to=[], save_strategy="no", logging_steps=1000,
                    use_cpu=not gpu, bf16=load["mixed"], gradient_checkpointing=False, disable_tqdm=True)
    rows = load_dataset("json", data_files=f"{folder}/{loss}.jsonl", split="train")
    common = dict(model=folder + "/model", train_dataset=rows,
                  processing_class=AutoTokenizer.from_pretrained(folder + "/model"), callbacks=[clock])
    if loss == "grpo":
        settings |= dict(num_generations=load["batch"], max_completion_length=load["new"], beta=0.01)
        if not load["is_real"]:
            settings |= dict(generation_kwargs=dict(min_new_tokens=load["new"]))
        common |= dict(reward_funcs=lambda completions, **_: [random.random() for _ in completions])
    else:
        common |= dict(ref_model=None)
        if loss == "kto" and not hasattr(trl, "KTOTrainer"):
            import trl.experimental.kto as module
    name = dict(dpo="DPO", kto="KTO", grpo="GRPO")[loss]
    args = getattr(module, name + "Config")(**settings)
    getattr(module, name + "Trainer")(**common, args=args).train()
    return dict(seconds=clock.seconds)
"""

WORKERS: dict[tuple[str, str], tuple[subprocess.Popen, TextIO]] = {}  # with what they print as errors


def ask(python: str, program: str, **task) -> dict:
    """Let a worker train. Returns its answer."""
    key = python, program
    if key not in WORKERS:
        errors = tempfile.TemporaryFile("w+")
        environment = os.environ | dict(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
        process = subprocess.Popen([python, "-c", WORKER.format(train=program)], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        WORKERS[key] = process, errors
    process, errors = WORKERS[key] if IS_GPU else WORKERS.pop(key)
    print(json.dumps(task), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        errors.seek(0)
        raise SystemExit(f"{task} failed:\n{errors.read()[-2000:]}")
    if not IS_GPU:
        process.communicate()
    return json.loads(answer)


def run_humanline(folder: Path, load: Workload, loss: str, more: str = "", checkout: Path = ROOT) -> dict:
    """Train with humanline.py. Returns seconds per step and in total, peak MiB, and the size of the
    checkpoints."""
    with tempfile.TemporaryDirectory() as out:
        flags = (f"--model {folder / 'model'} --data {folder / loss}.jsonl --loss {loss} "
                 f"--steps {load.steps} --batch-size {load.batch} --out {out}/run "
                 f"--dtype {'mixed' if load.mixed else 'float32'}")
        if loss.startswith("grpo"):
            flags = flags.replace("--loss grpo-offline", "--loss grpo") + " --batch-size 1 --kl-beta 0.01"
        if loss == "grpo":
            flags += f" --group-size {load.batch} --sample-every 1 --max-new-tokens {load.new}"
            flags += f" --reward {folder}/reward.py:reward"
        program = HUMANLINE.format(checkout=str(checkout))
        peak = ask(sys.executable, program, flags=[*flags.split(), *more.split()])["peak"]
        lines = [json.loads(line) for line in Path(out, "run", "metrics.jsonl").read_text().splitlines()]
        saved = sum(file.stat().st_size for file in Path(out).glob("run/checkpoint/*/*"))
    seconds = [line["step_seconds"] for line in lines]
    return dict(seconds=seconds[WARMUP:], total=sum(seconds), peak=peak, saved=saved)


def run_trl(folder: Path, load: Workload, loss: str, python: str) -> dict:
    """Train with TRL on the same rows."""
    result = ask(python, TRL, folder=str(folder), loss=loss, load=vars(load))
    return result | dict(seconds=result["seconds"][WARMUP:])


def in_turn(rounds: int, ways: dict[str, Callable[[], dict]]) -> dict[str, list[dict]]:
    """Train in each way in turn, `rounds` times. On a GPU, one more round comes first, which warms up and does
    not count."""
    runs = {name: [] for name in ways}
    for number in range(rounds + IS_GPU):
        for name, way in ways.items():
            runs[name].append(way())
            print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)  # a real model takes minutes
            if number < IS_GPU:
                runs[name].clear()
    return runs


def real_rows(folder: Path, count: int) -> str:
    """Write pairs made of common words, with the mean lengths of HH-RLHF: with SmolLM2's chat template,
    prompts of 149 tokens and completions of 46."""
    words = ("the of and to in is you that it he was for on are as with his they at be this from have or by "
             "one had not but what all were when we there can an your which their said if do will each about "
             "how").split()
    chance = random.Random(0)
    text = lambda low, high: " ".join(chance.choices(words, k=chance.randint(low, high)))
    rows = [dict(prompt=text(40, 190), chosen=text(20, 72), rejected=text(20, 72)) for _ in range(count)]
    (folder / "real.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "real.jsonl")


def write_real_workload(folder: Path, load: Workload, real: str) -> Workload:
    """Write `real_rows` as dialogues for each loss. Returns the workload with the dimensions of the real
    model."""
    sys.path.insert(0, str(ROOT))
    from humanline import bf16_is_faster
    from transformers import AutoConfig

    folder.mkdir()
    (folder / "model").symlink_to(Path(real).resolve())
    real_rows(folder, load.batch * load.steps)
    pairs = [json.loads(line) for line in (folder / "real.jsonl").read_text().splitlines()]
    turn = lambda role, text: [dict(role=role, content=text)]
    for number, pair in enumerate(pairs):
        prompt = turn("user", pair["prompt"])
        chosen, rejected = (turn("assistant", pair[key]) for key in ("chosen", "rejected"))
        rows = dict(dpo=dict(prompt=prompt, chosen=chosen, rejected=rejected),
                    kto=dict(prompt=prompt, completion=chosen, label=number % 2 == 0),
                    grpo=dict(prompt=prompt, answer=str(number)))
        for loss, row in rows.items():
            with (folder / f"{loss}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    (folder / "reward.py").write_text(REWARD)
    config = AutoConfig.from_pretrained(real)
    return replace(load, vocabulary=config.vocab_size, hidden=config.hidden_size,
                   inner=config.intermediate_size, layers=config.num_hidden_layers,
                   heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, is_real=True,
                   mixed=IS_GPU or bf16_is_faster())


def lora(folder: Path, load: Workload, real: str | None, rounds: int) -> None:
    """DPO on a real model, with full weights and with adapters of rank 16."""
    Path(real_rows(folder, load.batch * load.steps)).rename(folder / "dpo.jsonl")
    common = f"--model {real or DEMO} --save-every {load.steps}"
    ways = {"all weights, --sync-k 1": "--sync-k 1", "--lora 16 --sync-k 1": "--lora 16 --sync-k 1",
            "--lora 16 --no-humanline": "--lora 16 --no-humanline"}
    train = lambda flags: run_humanline(folder, load, "dpo", f"{common} {flags}")
    runs = in_turn(rounds, {name: partial(train, flags) for name, flags in ways.items()})
    rows = [[f"DPO, batches of {load.batch}", "step", "peak MiB", "checkpoint MiB"]]
    of = {key: {name: median(runs[name], key) for name in ways} for key in ("seconds", "peak", "saved")}
    for name in ways:
        saved = of["saved"][name] / 2**20
        rows.append([name, f"{of['seconds'][name]:.2f} s", f"{of['peak'][name]:.0f}", f"{saved:.0f}"])
    full, adapters, plain = ways
    for a, b in ((adapters, full), (adapters, plain)):
        ratios = (of[key][a] / of[key][b] for key in ("seconds", "peak", "saved"))
        rows.append([f"{a} / {b}", *(f"{ratio:.3f}" for ratio in ratios)])
    table(rows)


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix multiplication."""
    size, best = 8192 if device == "cuda" else 2048, math.inf
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(10):
        start = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def text_lengths(folder: Path, loss: str) -> list[tuple[int, int]]:
    """Lengths in tokens of each prompt and its completion."""
    rows = [json.loads(line) for line in (folder / f"{loss}.jsonl").read_text().splitlines()]
    keys = ("chosen", "rejected", "completion")
    texts = [(row["prompt"], row[key]) for row in rows for key in keys if key in row]
    if isinstance(texts[0][0], str):
        return [(len(prompt.split()), len(completion.split()) + 1) for prompt, completion in texts]
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = lambda turns, **more: len(tokenizer.apply_chat_template(turns, return_dict=False, **more))
    prompts = [ids(prompt, add_generation_prompt=True) for prompt, _ in texts]
    whole = [ids(prompt + completion) for prompt, completion in texts]
    return [(length, total - length) for length, total in zip(prompts, whole)]


def operations(folder: Path, load: Workload, loss: str) -> float:
    """Matrix operations per training step: per weight and token, 2 forward, 4 backward and 2 in the
    reference."""
    head = load.hidden * load.vocabulary
    layer = load.hidden * (2 * load.hidden + 2 * load.kv_heads * load.hidden // load.heads + 3 * load.inner)
    lengths = text_lengths(folder, loss)
    completion = sum(length for _, length in lengths) / load.steps
    tokens = completion + sum(length for length, _ in lengths) / load.steps
    attention = sum(2 * load.hidden * sum(pair)**2 for pair in lengths) / load.steps  # causal
    mismatched = 2 / 8 * 2 if loss == "kto" else 0  # z₀: policy and reference, forward only
    matrices = load.layers * layer * tokens + head * completion
    return (8 + 8 * mismatched) * matrices + 4 * (1 + mismatched) * load.layers * attention


def table(rows: list[list[str]]) -> None:
    """Print rows as a Markdown table."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def median(runs: list[dict], key: str = "seconds") -> float:
    lists = (run[key] if isinstance(run[key], list) else [run[key]] for run in runs)
    return statistics.median(value for values in lists for value in values)


def against(folder: Path, load: Workload, losses: list[str], rounds: int, checkout: Path) -> None:
    """Compare this humanline.py with that of another checkout, in alternating runs."""
    rows = [["step", "old", "new", "new / old", "old MiB", "new MiB"]]
    for loss in losses:
        train = partial(run_humanline, folder, load, loss, "--sync-k 1")
        old, new = in_turn(rounds, {"old": partial(train, checkout), "new": train}).values()
        ratio = median(new) / median(old)
        rows.append([loss.upper(), f"{median(old):.3f} s", f"{median(new):.3f} s", f"{ratio:.3f}",
                     f"{median(old, 'peak'):.0f}", f"{median(new, 'peak'):.0f}"])
    table(rows)


def steps(folder: Path, load: Workload, losses: list[str], rounds: int, python: str | None,
          workload: str) -> None:
    """Compare with TRL, in alternating runs, and store the results under the name of a workload, if any."""
    dtype = torch.bfloat16 if load.mixed else torch.float32
    rate = matmul_rate("cuda" if IS_GPU else "cpu", dtype)
    print(f"{device_name()}, matrix multiplication {rate / 1e9:,.0f} GFLOP/s in {dtype}")
    rows = [["step", "humanline.py", "TRL", "times faster", "humanline.py MiB", "TRL MiB", "memory ratio",
             "of the matmul rate"]]
    for loss in losses:
        results = []
        train = partial(run_humanline, folder, load, loss)
        ways = {loss.upper(): partial(train, "--sync-k 1")}
        if IS_GPU:
            ways[f"{loss.upper()}, eager"] = partial(train, "--sync-k 1 --no-compile")
        if python:
            ways["TRL"] = partial(run_trl, folder, load, loss, python)
        own_runs = in_turn(rounds, ways)
        trl_runs = own_runs.pop("TRL", None)
        for name, runs in own_runs.items():
            share = f"{operations(folder, load, loss) / median(runs) / rate:.0%}" if loss != "grpo" else "–"
            seconds, peak = median(runs), median(runs, "peak")
            result = dict(step=name, seconds=seconds, mib=peak)
            trl_time = trl_memory = ["–", "–"]
            if trl_runs:
                trl_seconds, trl_peak = median(trl_runs), median(trl_runs, "peak")
                result |= dict(trl_seconds=trl_seconds, trl_mib=trl_peak, times=trl_seconds / seconds,
                               memory=peak / trl_peak)
                trl_time = [f"{trl_seconds:.3f} s", f"{result['times']:.2f}"]
                trl_memory = [f"{trl_peak:.0f}", f"{result['memory']:.2f}"]
            rows.append([name, f"{seconds:.3f} s", *trl_time, f"{peak:.0f}", *trl_memory, share])
            print(*rows[-1], sep=", ", file=sys.stderr, flush=True)  # progress; the table is printed at the end
            results.append(dict(gflops=rate / 1e9) | result)
        if workload:  # at once, so that an interruption loses one loss at most
            store_results(results, workload)
    table(rows)


def device_name() -> str:
    if IS_GPU:
        return torch.cuda.get_device_name()
    is_linux = sys.platform == "linux"
    names = re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text()) if is_linux else []
    return f"{[*names, platform.machine()][0]}, {torch.get_num_threads()} threads"


def store_results(results: list[dict], workload: str) -> None:
    """Add what was measured to the stored results, rounded."""
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    known = dict(date=time.strftime("%Y-%m-%d"), commit=commit.stdout.strip(), device=device_name(),
                 torch=torch.__version__, workload=workload)
    with RESULTS.open("a", encoding="utf-8") as file:
        for result in results:
            short = {key: value if isinstance(value, str) else float(f"{value:.4g}")
                     for key, value in result.items()}
            file.write(json.dumps(known | short) + "\n")


def readme_table() -> list[str]:
    """Rows of the README's table: for each loss the smallest and the largest ratio that was stored."""
    results = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]

    def spread(step: str, workload: str, key: str, digits: int) -> str:
        values = [one[key] for one in results if (one["step"], one["workload"]) == (step, workload)]
        return "–".join(dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values))))

    def row(words: str, step: str, *workloads: str) -> str:
        columns = itertools.product(workloads, (("times", 1), ("memory", 2)))
        cells = [spread(step, workload, *column) for workload, column in columns]
        return f"| {' | '.join([words, *cells])} |" + " | |" * (2 - len(workloads))

    return [
        row("DPO", "DPO", "small", "real"),
        row("DPO, `--compact`", "DPO", "compact"),
        row("KTO", "KTO", "small", "real"),
        row("GRPO, with sampling", "GRPO", "small", "real"),
    ]


def overhead(folder: Path, load: Workload, losses: list[str], rounds: int) -> None:
    """Compare syncing at every step and clipping with a fixed reference. Whole runs are compared, because
    both score each batch once with the reference, but a fixed reference scores all of them before the first
    step."""
    rows = [["run", "without humanline", "with", "ratio of medians"]]
    for loss in losses:
        train = partial(run_humanline, folder, load, loss)
        runs = in_turn(rounds, {flags: partial(train, flags)
                                for flags in ("--no-humanline", "--sync-k 1 --perception clip")})
        a, b = (median(of_way, "total") for of_way in runs.values())
        rows.append([loss.upper(), f"{a:.2f} s", f"{b:.2f} s", f"{b / a:.3f}"])
    table(rows)


def online(folder: Path, load: Workload, rounds: int) -> None:
    """Compare GRPO with humanline on completions in the data with GRPO that samples as many of the same
    length."""
    train = partial(run_humanline, folder, load)
    offline, drawn = in_turn(rounds, {"offline": partial(train, "grpo-offline", "--sync-k 1"),
                                      "online": partial(train, "grpo", "--no-humanline")}).values()
    table([["GRPO step", "offline, humanline", "online", "times"],
           [f"completions of {load.new} tokens", f"{median(offline):.3f} s", f"{median(drawn):.3f} s",
            f"{median(drawn) / median(offline):.2f}"]])


def decoding(folder: Path, load: Workload, rounds: int, real: str | None) -> None:
    """Sampled tokens per second of the trainer, and of plain `generate`.

    One token in 128 is a stop token, so lengths vary as they do with a real model. A real model gets 4 groups
    of 8, with prompts of 37 tokens and completions of 28.
    """
    sys.path.insert(0, str(ROOT))
    import humanline
    from transformers import GenerationConfig

    device = torch.device("cuda" if IS_GPU else "cpu")
    new = 28 if real else load.new
    config = humanline.Config(model=real or str(folder / "model"), max_new_tokens=new, compile=False,
                              dtype="bfloat16" if device.type == "cuda" else "auto" if real else "float32")
    policy = humanline.load_policy(config, device)[0].eval()
    chance, count = random.Random(0), 32 if real else 256 if IS_GPU else 16
    lengths = [37 if real else chance.randint(load.prompt // 2, load.prompt) for _ in range(count)]
    prompts = [chance.choices(range(10, policy.config.vocab_size), k=length) for length in lengths]
    prompts = [prompts[i - i % 8] for i in range(count)] if real else prompts
    stops = [0] if real else list(range(0, load.vocabulary, 128))
    settings = dict(do_sample=True, top_k=0, max_new_tokens=new, eos_token_id=stops, pad_token_id=0)

    def plain() -> int:
        tensors = [torch.tensor(prompt) for prompt in prompts]
        ids = pad_sequence(tensors, True, 0, padding_side="left").to(device)
        ones = [torch.ones(len(prompt), dtype=torch.long) for prompt in prompts]
        mask = pad_sequence(ones, True, 0, padding_side="left").to(device)
        torch.manual_seed(0)
        with policy.autocast():
            drawn = policy.generate(ids, attention_mask=mask, generation_config=GenerationConfig(**settings))
        if real:
            return new * count
        is_stop = drawn[:, ids.shape[1] :] % 128 == 0
        return int((is_stop.cumsum(1) - is_stop.int() == 0).sum())  # up to the first stop

    def trainers() -> int:
        return sum(len(ids) for ids, _ in humanline.sample(policy, prompts, stops, config, 0))

    ways = {"as the trainer samples": trainers, "generate, plain": plain}
    rates, busy = ({name: [] for name in ways} for _ in range(2))
    for _ in range(1 + rounds):  # the first round warms up
        for name, way in ways.items():
            start, used = time.perf_counter(), time.process_time()
            tokens = way()
            rates[name].append(tokens / (time.perf_counter() - start))
            busy[name].append(tokens / (time.process_time() - used))
    title = f"{count} prompts, completions of at most {new} tokens"
    rows = [[title, "tokens/s", "ratio", "tokens per CPU second"]]
    medians = {name: statistics.median(rates[name][1:]) for name in ways}
    first = next(iter(medians.values()))
    for name, rate in medians.items():
        per_cpu_second = statistics.median(busy[name][1:])
        rows.append([name, f"{rate:,.0f}", f"{rate / first:.2f}", f"{per_cpu_second:,.0f}"])
    table(rows)
    groups = [prompts[i - i % 8] for i in range(count)]
    parts = parts_of(partial(humanline.sample, policy, groups, stops, config, 0), policy)
    table([["of the trainer's time, groups of 8", "ms", "share"], *parts])


def parts_of(draw: Callable, policy: torch.nn.Module) -> list[list[str]]:
    """Where the time of a drawing goes: the pass over the prompts, `generate` itself, our choice of tokens, and
    the lists of the result."""
    import humanline

    seconds = Counter()

    def timed(name: str, function: Callable) -> Callable:
        def wrapped(*args, **named):
            start = time.perf_counter()
            result = function(*args, **named)
            seconds[name] += time.perf_counter() - start
            return result

        return wrapped

    with mock.patch.object(humanline, "prompt_cache", timed("the prompts' own pass", humanline.prompt_cache)), \
            mock.patch.object(humanline, "draw_tokens", timed("choice of tokens", humanline.draw_tokens)), \
            mock.patch.object(policy, "generate", timed("generate", policy.generate)):
        timed("all", draw)()
    whole = seconds.pop("all")
    seconds["generate"] -= seconds["choice of tokens"]  # it calls it
    seconds["lists of the result"] = whole - seconds.total()
    return [[name, f"{1000 * value:.1f}", f"{value / whole:.0%}"] for name, value in seconds.items()]


def main(what: list[Literal["steps", "overhead", "online", "decoding", "lora", "table"]] = ["steps"],
         losses: list[str] = ["dpo", "kto", "grpo"], rounds: int = 3, trl_python: str | None = None,
         old: Path | None = None, gpu: bool = False, train_steps: int = 8, real: str | None = None,
         store: bool = False, compact: bool = False, thin: bool = False) -> None:
    """Run benchmarks and print a table of each.

    Args:
        what: the benchmarks; see the top of this file.
        losses: any of dpo, kto and grpo.
        rounds: number of runs of each program, in turn.
        trl_python: a Python with TRL. Default: this Python, if TRL is installed.
        old: a checkout to compare with instead of TRL.
        gpu: use GPU sizes.
        train_steps: steps per run; the first two are not counted.
        real: folder of a real model, for steps, decoding and lora. Default: a random model, or the demo.
        store: add what `steps` measures beside TRL to claims/results/bench.jsonl.
        compact: let TRL skip prompts and padding on a CPU, as on a GPU.
        thin: use a model of 30 layers of width 32.
    """
    if "table" in what:
        print(*readme_table(), sep="\n")
        return
    load = replace(GPU if gpu else THIN if thin else Workload(), steps=train_steps, compact=compact)
    if trl_python is None:
        with contextlib.suppress(ImportError):
            import trl  # noqa: F401

            trl_python = sys.executable
    if store and not trl_python:
        raise SystemExit("--store needs TRL")
    with tempfile.TemporaryDirectory() as temporary:
        for kind in what:
            of_kind = replace(load, new=256) if kind == "online" else load
            is_real = kind == "steps" and real is not None
            of_cpu = "real" if is_real else "compact" if compact else "thin" if thin else "small"
            workload = ("real-" * is_real + "gpu" if gpu else of_cpu) if store else ""
            folder = Path(temporary, f"{is_real}-{of_kind.new}")
            if is_real:
                of_kind = write_real_workload(folder, load, real)
            elif not folder.exists():
                write_workload(folder, of_kind)
            {"lora": lambda: lora(folder, of_kind, real, rounds),
             "online": lambda: online(folder, of_kind, rounds),
             "decoding": lambda: decoding(folder, of_kind, rounds, real),
             "steps": lambda: against(folder, of_kind, losses, rounds, old) if old else steps(
                 folder, of_kind, losses, rounds, trl_python, workload),
             "overhead": lambda: overhead(folder, of_kind, losses, rounds)}[kind]()


if __name__ == "__main__":
    tyro.cli(main)
