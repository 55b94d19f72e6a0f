"""How fast and how lean: a fixed workload through humanline.py and, where it is installed, through TRL.

  python tests/bench.py                                # DPO, KTO and GRPO steps, humanline.py against TRL, interleaved
  python tests/bench.py --trl-python ~/trl/bin/python  # with TRL from another environment (pip install trl==1.16.0)
  python tests/bench.py --old CHECKOUT                 # this humanline.py against another one's, in the place of TRL
  python tests/bench.py --real FOLDER                  # the same on a real model, in mixed precision
  python tests/bench.py --what overhead                # what syncing and clipping add to a step
  python tests/bench.py --what online                  # offline GRPO with humanline against online GRPO, 256 tokens
  python tests/bench.py --what decoding [--real FOLDER]  # ways to sample: the trainer's, and plain generate
  python tests/bench.py --what lora --real FOLDER      # adapters against all weights; what a moving reference adds
  python tests/bench.py --gpu                          # GPU sizes: 0.5 B parameters, completions of 256 to 768 tokens

The workload: batches of 8 (pairs, examples, or one group of 8 samples), prompts of 64 tokens, completions of 64 to 192
tokens (GRPO: 64 sampled ones), vocabulary 32,768, a random Llama, fp32 on a CPU, bf16 autocast on a GPU. Every number
is the median over all steps but the first two, over all rounds; peak memory is the whole process's (TRL's on a GPU:
torch's).
"""

import contextlib
import json
import math
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch.nn.utils.rnn import pad_sequence

ROOT = Path(__file__).resolve().parent.parent
DEMO = str(ROOT / "configs" / "demo" / "model")
WARMUP = 2


@dataclass
class Workload:
    """Sizes in tokens, the model's in parameters."""

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
    mixed: bool = False


GPU = Workload(vocabulary=151_936, prompt=256, low=256, high=768, new=256, hidden=896, inner=4864, layers=24, heads=14)


# A reward that differs from sample to sample, as a reward would.
REWARD = "def reward(prompts, completions, rows):\n    return [len(text) % 7 / 7 for text in completions]\n"


def write_workload(folder: Path, load: Workload) -> None:
    """A model folder, and rows for each loss."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(load.vocabulary - 3)}
    pad, eos, unknown = range(load.vocabulary - 3, load.vocabulary)
    raw = Tokenizer(models.WordLevel(words | {"<pad>": pad, "<eos>": eos, "<unk>": unknown}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=load.vocabulary, hidden_size=load.hidden, intermediate_size=load.inner,
        num_hidden_layers=load.layers, num_attention_heads=load.heads, num_key_value_heads=load.kv_heads,
        max_position_embeddings=8192, tie_word_embeddings=True, pad_token_id=pad, eos_token_id=eos,
        bos_token_id=None)).save_pretrained(folder / "model")
    chance = random.Random(0)
    words = lambda low, high: (chance.randrange(load.vocabulary - 3) for _ in range(chance.randint(low, high)))
    text = lambda low, high: " ".join(f"w{word}" for word in words(low, high))
    prompt, answer = lambda: text(load.prompt, load.prompt), lambda: text(load.low, load.high)
    make = {"dpo": lambda i: dict(prompt=prompt(), chosen=answer(), rejected=answer()),
            "kto": lambda i: dict(prompt=prompt(), completion=answer(), label=i % 2 == 0),
            "grpo": lambda i: dict(prompt=prompt(), answer=str(i)),
            "grpo-offline": lambda i: dict(
                prompt=prompt(), completions=[text(load.new - 1, load.new - 1) for _ in range(load.batch)],
                scores=[chance.random() for _ in range(load.batch)])}
    answers = ("chosen", "rejected", "completion")
    for loss, row in make.items():
        rows = [row(i) for i in range(load.batch * load.steps)]
        if loss != "grpo":
            rows = [{key: " " + value if key in answers else value for key, value in row.items()} for row in rows]
        (folder / f"{loss}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def measured(command: list[str], environment: dict[str, str]) -> tuple[str, int]:
    """Run a command; its output, and its peak memory in MiB."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True,
                                   env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", **environment})
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        errors.seek(0)
        if status:
            raise SystemExit(f"{shlex.join(command)} failed:\n{errors.read()[-2000:]}")
    return output, usage.ru_maxrss >> 10


ON_GPU = """
import sys
sys.path.insert(0, sys.argv[1])
import humanline, torch
status = humanline.main(sys.argv[2:])
print(torch.cuda.max_memory_allocated() >> 20)
sys.exit(status)
"""


def ours(folder: Path, load: Workload, loss: str, more: str = "", checkout: Path = ROOT) -> dict:
    """Steps of humanline.py: seconds each, and in all; peak MiB."""
    with tempfile.TemporaryDirectory() as out:
        flags = (f"--model {folder / 'model'} --data {folder / loss}.jsonl --loss {loss} --steps {load.steps} "
                 f"--batch-size {load.batch} --out {out}/run")
        if loss.startswith("grpo"):
            flags = flags.replace("--loss grpo-offline", "--loss grpo") + " --batch-size 1 --kl-beta 0.01"
        if loss == "grpo":
            flags += f" --group-size {load.batch} --sample-every 1 --max-new-tokens {load.new}"
            flags += f" --reward {folder}/reward.py:reward"
        start = ["-c", ON_GPU, str(checkout)] if load is GPU else [str(checkout / "humanline.py")]
        output, peak = measured([sys.executable, *start, *flags.split(), *more.split()], {})
        if load is GPU:
            peak = int(output.splitlines()[-1])
        lines = [json.loads(line) for line in Path(out, "run", "metrics.jsonl").read_text().splitlines()]
        saved = sum(file.stat().st_size for file in Path(out).glob("run/checkpoint/*/*"))
    seconds = [line["step_seconds"] for line in lines]
    return dict(seconds=seconds[WARMUP:], total=sum(seconds), peak=peak, saved=saved)


TRL = """
import json, os, random, resource, sys, time
import torch
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
import trl
folder, loss, load = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
seconds = []
class Clock(TrainerCallback):
    def on_step_begin(self, *_, **__):
        self.start = time.perf_counter()
    def on_step_end(self, *_, **__):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - self.start)
gpu = torch.cuda.is_available()
settings = dict(output_dir=folder + "/trl", per_device_train_batch_size=load["batch"], max_steps=load["steps"],
                report_to=[], save_strategy="no", logging_steps=1000, use_cpu=not gpu, bf16=gpu or load["mixed"],
                gradient_checkpointing=False, disable_tqdm=True)
rows = load_dataset("json", data_files=f"{folder}/{loss}.jsonl", split="train")
common = dict(model=folder + "/model", train_dataset=rows,
              processing_class=AutoTokenizer.from_pretrained(folder + "/model"), callbacks=[Clock()])
if loss == "grpo":
    settings |= dict(num_generations=load["batch"], max_completion_length=load["new"], beta=0.01)
    if not load["mixed"]:
        settings |= dict(generation_kwargs=dict(min_new_tokens=load["new"]))
    score = lambda completions, **_: [random.random() for _ in completions]
    trainer = trl.GRPOTrainer(**common, reward_funcs=score, args=trl.GRPOConfig(**settings))
else:
    if loss == "kto" and not hasattr(trl, "KTOTrainer"):
        import trl.experimental.kto as trl
    name = loss.upper()
    trainer = getattr(trl, name + "Trainer")(**common, ref_model=None, args=getattr(trl, name + "Config")(**settings))
trainer.train()
peak = torch.cuda.max_memory_allocated() >> 20 if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
print(json.dumps(dict(seconds=seconds, peak=peak, version=trl.__version__ if hasattr(trl, "__version__") else "")))
"""


def theirs(folder: Path, load: Workload, loss: str, python: str) -> dict:
    """Steps of TRL on the same rows."""
    output, _ = measured([python, "-c", TRL, str(folder), loss, json.dumps(vars(load))], {})
    result = json.loads(output.splitlines()[-1])
    return dict(seconds=result["seconds"][WARMUP:], peak=result["peak"])


def real_rows(folder: Path, count: int) -> str:
    """Pairs of common words, with the mean lengths of HH-RLHF's: with SmolLM2's template prompts of 149 tokens and
    completions of 46."""
    words = ("the of and to in is you that it he was for on are as with his they at be this from have or by one "
             "had not but what all were when we there can an your which their said if do will each about how").split()
    chance = random.Random(0)
    text = lambda low, high: " ".join(chance.choices(words, k=chance.randint(low, high)))
    rows = [dict(prompt=text(40, 190), chosen=text(20, 72), rejected=text(20, 72)) for _ in range(count)]
    (folder / "real.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "real.jsonl")


def write_real_workload(folder: Path, load: Workload, real: str) -> Workload:
    """The rows of `real_rows` for each loss, as dialogues; the sizes of the model in the folder `real`."""
    from transformers import AutoConfig
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
    return replace(load, vocabulary=config.vocab_size, hidden=config.hidden_size, inner=config.intermediate_size,
                   layers=config.num_hidden_layers, heads=config.num_attention_heads,
                   kv_heads=config.num_key_value_heads, mixed=True)


def lora(folder: Path, load: Workload, real: str | None, rounds: int) -> None:
    """DPO on a real model, with all weights and with adapters of rank 16."""
    data = real_rows(folder, load.batch * load.steps)
    common = f"--model {real or DEMO} --data {data} --save-every {load.steps}"
    ways = {"all weights, --sync-k 1": "--sync-k 1", "--lora 16 --sync-k 1": "--lora 16 --sync-k 1",
            "--lora 16 --no-humanline": "--lora 16 --no-humanline"}
    runs = {name: [] for name in ways}
    for _ in range(rounds):
        for name, flags in ways.items():
            runs[name].append(ours(folder, load, "dpo", f"{common} {flags}"))
    rows = [[f"DPO, batches of {load.batch}", "step", "peak MiB", "checkpoint MiB"]]
    of = {key: {name: middle(runs[name], key) for name in ways} for key in ("seconds", "peak", "saved")}
    rows += [[name, f"{of['seconds'][name]:.2f} s", f"{of['peak'][name]:.0f}", f"{of['saved'][name] / 2**20:.0f}"]
             for name in ways]
    full, adapters, plain = ways
    for a, b in ((adapters, full), (adapters, plain)):
        rows.append([f"{a} / {b}", *(f"{of[key][a] / of[key][b]:.3f}" for key in ("seconds", "peak", "saved"))])
    table(rows)


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix multiplication."""
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
    """The tokens of each prompt and of its completion."""
    rows = [json.loads(line) for line in (folder / f"{loss}.jsonl").read_text().splitlines()]
    texts = [(row["prompt"], row[key]) for row in rows for key in ("chosen", "rejected", "completion") if key in row]
    if isinstance(texts[0][0], str):
        return [(len(prompt.split()), len(completion.split()) + 1) for prompt, completion in texts]
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = lambda turns, **more: len(tokenizer.apply_chat_template(turns, return_dict=False, **more))
    prompts = [ids(prompt, add_generation_prompt=True) for prompt, _ in texts]
    return [(length, ids(prompt + completion) - length) for length, (prompt, completion) in zip(prompts, texts)]


def operations(folder: Path, load: Workload, loss: str) -> float:
    """Matrix operations of one training step: per weight and token 2 forward, 4 backward, and 2 in the reference."""
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


def middle(runs: list[dict], key: str = "seconds") -> float:
    lists = (run[key] if isinstance(run[key], list) else [run[key]] for run in runs)
    return statistics.median(value for values in lists for value in values)


def against(folder: Path, load: Workload, losses: list[str], rounds: int, checkout: Path) -> None:
    """This humanline.py and another checkout's, a run of each in turn."""
    rows = [["step", "old", "new", "new / old", "old MiB", "new MiB"]]
    for loss in losses:
        old, new = [], []
        for _ in range(rounds):
            old.append(ours(folder, load, loss, "--sync-k 1", checkout))
            new.append(ours(folder, load, loss, "--sync-k 1"))
        ratio = middle(new) / middle(old)
        rows.append([loss.upper(), f"{middle(old):.3f} s", f"{middle(new):.3f} s", f"{ratio:.3f}",
                     f"{middle(old, 'peak'):.0f}", f"{middle(new, 'peak'):.0f}"])
    table(rows)


def steps(folder: Path, load: Workload, losses: list[str], rounds: int, python: str | None) -> None:
    dtype = torch.bfloat16 if load is GPU or load.mixed else torch.float32
    rate = matmul_rate("cuda" if load is GPU else "cpu", dtype)
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
          f"matrix multiplication {rate / 1e9:,.0f} GFLOP/s in {dtype}")
    rows = [["step", "humanline.py", "TRL", "times faster", "humanline.py MiB", "TRL MiB", "memory ratio",
             "of the matmul rate"]]
    for loss in losses:
        us, them = [], []
        for _ in range(rounds):
            us.append(ours(folder, load, loss, "--sync-k 1"))
            if python:
                them.append(theirs(folder, load, loss, python))
        share = f"{operations(folder, load, loss) / middle(us) / rate:.0%}" if loss != "grpo" else "–"
        other = [f"{middle(them):.3f} s", f"{middle(them) / middle(us):.2f}"] if them else ["–", "–"]
        ours_mib, theirs_mib = middle(us, "peak"), middle(them, "peak") if them else math.nan
        memory = [f"{theirs_mib:.0f}", f"{ours_mib / theirs_mib:.2f}"] if them else ["–", "–"]
        rows.append([loss.upper(), f"{middle(us):.3f} s", *other, f"{ours_mib:.0f}", *memory, share])
        print(*rows[-1], sep=", ", file=sys.stderr, flush=True)  # the table comes minutes later
    table(rows)


def overhead(folder: Path, load: Workload, losses: list[str], rounds: int) -> None:
    """Syncing every step and clipping, against a fixed reference. Whole runs: both score each batch once with the
    reference, which without a sync is done before the first step."""
    rows = [["run", "without humanline", "with", "ratio of medians"]]
    for loss in losses:
        plain, with_it = [], []
        for _ in range(rounds):
            plain.append(ours(folder, load, loss, "--no-humanline"))
            with_it.append(ours(folder, load, loss, "--sync-k 1 --perception clip"))
        a, b = middle(plain, "total"), middle(with_it, "total")
        rows.append([loss.upper(), f"{a:.2f} s", f"{b:.2f} s", f"{b / a:.3f}"])
    table(rows)


def online(folder: Path, load: Workload, rounds: int) -> None:
    """GRPO with humanline on the data's completions, and GRPO that draws as many of that length at every step."""
    offline, drawn = [], []
    for _ in range(rounds):
        offline.append(ours(folder, load, "grpo-offline", "--sync-k 1"))
        drawn.append(ours(folder, load, "grpo", "--no-humanline"))
    table([["GRPO step", "offline, humanline", "online", "times"],
           [f"completions of {load.new} tokens", f"{middle(offline):.3f} s", f"{middle(drawn):.3f} s",
            f"{middle(drawn) / middle(offline):.2f}"]])


def decoding(folder: Path, load: Workload, rounds: int, real: str | None) -> None:
    """Sampled tokens per second: the trainer's own way, and `generate` of plain transformers.

    One token of 128 ends a completion, so their lengths differ as those of a real model do. real: 4 groups of 8, prompts
    of 37 and completions of 28 tokens.
    """
    sys.path.insert(0, str(ROOT))
    import humanline
    from transformers import GenerationConfig

    device = torch.device("cuda" if load is GPU and torch.cuda.is_available() else "cpu")
    new = 28 if real else load.new
    config = humanline.Config(model=real or str(folder / "model"), max_new_tokens=new, compile=False,
                              dtype="bfloat16" if device.type == "cuda" else "auto" if real else "float32")
    policy = humanline.load_policy(config, device)[0].eval()
    chance, count = random.Random(0), 256 if load is GPU else 32 if real else 16
    lengths = [37 if real else chance.randint(load.prompt // 2, load.prompt) for _ in range(count)]
    prompts = [chance.choices(range(10, policy.config.vocab_size), k=length) for length in lengths]
    prompts = [prompts[i - i % 8] for i in range(count)] if real else prompts
    stops = [0] if real else list(range(0, load.vocabulary, 128))
    settings = dict(do_sample=True, top_k=0, max_new_tokens=new, eos_token_id=stops, pad_token_id=0)

    def plain() -> int:
        ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], True, 0, padding_side="left").to(device)
        ones = [torch.ones(len(prompt), dtype=torch.long) for prompt in prompts]
        mask = pad_sequence(ones, True, 0, padding_side="left").to(device)
        torch.manual_seed(0)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.is_mixed):
            drawn = policy.generate(ids, attention_mask=mask, generation_config=GenerationConfig(**settings))
        return new * count if real else int(((drawn[:, ids.shape[1] :] % 128 == 0).cumsum(1) == 0).sum()) + count

    def trainers() -> int:
        return sum(len(ids) for ids, _ in humanline.sample(policy, prompts, stops, config, 0))

    ways = {"as the trainer samples": trainers, "generate, plain": plain}
    rates, busy = ({name: [] for name in ways} for _ in range(2))
    for _ in range(1 + rounds):  # the first compiles
        for name, way in ways.items():
            start, used = time.perf_counter(), time.process_time()
            tokens = way()
            rates[name].append(tokens / (time.perf_counter() - start))
            busy[name].append(tokens / (time.process_time() - used))
    rows = [[f"{count} prompts, completions of at most {new} tokens", "tokens/s", "ratio", "tokens per CPU second"]]
    medians = {name: statistics.median(rates[name][1:]) for name in ways}
    first = next(iter(medians.values()))
    rows += [[name, f"{median:,.0f}", f"{median / first:.2f}", f"{statistics.median(busy[name][1:]):,.0f}"]
             for name, median in medians.items()]
    table(rows)


def main(what: Literal["steps", "overhead", "online", "decoding", "lora"] = "steps",
         losses: list[str] = ["dpo", "kto", "grpo"], rounds: int = 3, trl_python: str | None = None,
         old: Path | None = None, gpu: bool = False, train_steps: int = 8, real: str | None = None) -> None:
    """Measure, and print a table.

    Args:
        what: see the top of this file.
        losses: which of dpo, kto, grpo.
        rounds: whole runs of each, interleaved.
        trl_python: a Python that has TRL installed; this one if it has.
        old: a checkout to compare with, in the place of TRL.
        gpu: GPU sizes.
        train_steps: steps of each run, of which the first two do not count.
        real: the folder of a real model, for steps, decoding and lora; without it a random one or the
            demo's.
    """
    global GPU
    GPU = replace(GPU, steps=train_steps)
    load = GPU if gpu else Workload(steps=train_steps)
    load = replace(load, new=256) if what == "online" else load
    if trl_python is None:
        with contextlib.suppress(ImportError):
            import trl  # noqa: F401

            trl_python = sys.executable
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if what == "steps" and real:
            load = write_real_workload(folder, load, real)
        elif what != "ahead":
            write_workload(folder, load)
        {"lora": lambda: lora(folder, load, real, rounds),
         "online": lambda: online(folder, load, rounds),
         "decoding": lambda: decoding(folder, load, rounds, real),
         "steps": lambda: against(folder, load, losses, rounds, old) if old else steps(
             folder, load, losses, rounds, trl_python),
         "overhead": lambda: overhead(folder, load, losses, rounds)}[what]()


if __name__ == "__main__":
    tyro.cli(main)
