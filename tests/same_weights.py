"""Check that two versions of humanline.py train to the same weights, bit for bit.

  python tests/same_weights.py OLD                  # compare a checkout with this one, on short runs
  python tests/same_weights.py OLD NEW --only kto   # compare two checkouts, on the runs whose name matches
  python tests/same_weights.py OLD --real FOLDER    # use a real model instead (smollm2.py creates one)

A checkout is a folder with humanline.py. Each run is a command line in a separate process, on the CPU. The
table shows for each run:

  weights   "same" if the two final model.safetensors are identical; else ||old - new|| / ||old||
  metrics   "same" if all values in metrics.jsonl are identical, except for times; else the largest
            difference at any step, relative to the largest value of that metric in the run
  moved     how far training moved the weights: ||old - initial|| / ||initial||
  seconds   duration of both runs together

The exit status is 1 if weights differ or a run fails. Differences in metrics are only reported.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models

# Runs are started next to the files that they read. The default data is --data ../groups.jsonl.
TINY = ("--model ../tiny --reward ../reward.py:varied "
        "--steps 8 --batch-size 8 --lr 1e-2 --group-size 4 --max-new-tokens 4")
RUNS = {  # additional flags; "2 ranks" or "resumed" in a name determines how the run is started
    "dpo offline": "--loss dpo --sync-k 3",
    "dpo online": "--loss dpo --sync-k 2 --sample-every 1",
    "dpo online, every 3": "--loss dpo --sync-k 2 --sample-every 3",
    "dpo pairs": "--loss dpo --sync-k 1 --data ../pairs.jsonl",
    "dpo baseline": "--loss dpo --no-humanline",
    "dpo perception sample": "--loss dpo --sync-k 4 --perception sample",
    "dpo weight decay": "--loss dpo --sync-k 3 --weight-decay 0.1",
    "dpo 2 ranks sharded": "--loss dpo --sync-k 3 --shard",
    "dpo resumed": "--loss dpo --sync-k 5 --save-every 3",
    "kto offline": "--loss kto --sync-k 3",
    "kto online": "--loss kto --sync-k 2 --sample-every 1",
    "kto online, every 3": "--loss kto --sync-k 2 --sample-every 3",
    "kto labels": "--loss kto --data ../labels.jsonl --sync-k 3",
    "kto baseline online, every 8": "--loss kto --no-humanline --sample-every 8",
    "kto perception sample, every 3": "--loss kto --perception sample --sync-k 2 --sample-every 3",
    "kto perception none": "--loss kto --sync-k 4 --perception none",
    "kto small microbatches": "--loss kto --sync-k 3 --microbatch-tokens 64",
    "kto 2 ranks online, every 3": "--loss kto --sync-k 2 --sample-every 3",
    "kto resumed online, every 4": "--loss kto --sync-k 5 --sample-every 4 --save-every 2 --keep 9",
    "grpo offline": "--loss grpo --sync-k 3",
    "grpo online": "--loss grpo --sync-k 2 --sample-every 1",
    "grpo online, every 3": "--loss grpo --sync-k 2 --sample-every 3",
    "grpo prompts, every 8": "--loss grpo --data ../prompts.jsonl --sync-k 3 --sample-every 8",
    "grpo baseline online": "--loss grpo --no-humanline --sample-every 1",
    "grpo narrow clip": "--loss grpo --sync-k 4 --perception clip --log-eps-p -0.2 --log-eps-r 0.1",
    "grpo online, k 5, every 3": "--loss grpo --sync-k 5 --sample-every 3",
    "grpo baseline, every 3, KL": "--loss grpo --no-humanline --sample-every 3 --kl-beta 0.1",
    "grpo mean of sequences, KL": "--loss grpo --sync-k 3 --average sequence --kl-beta 0.1",
    "grpo temperature": "--loss grpo --sync-k 2 --sample-every 2 --temperature 0.7 --top-p 0.9",
    "grpo bfloat16": "--loss grpo --sync-k 3 --dtype bfloat16",
    "grpo 2 ranks sharded online": "--loss grpo --sync-k 3 --sample-every 2 --shard",
    "grpo resumed online": "--loss grpo --sync-k 2 --save-every 3 --sample-every 1",
}
REAL = ("--model ../real --data ../dialogues.jsonl --reward ../reward.py:varied --limit 512 "
        "--steps 4 --batch-size 4 --lr 5e-5 --sync-k 2 --max-length 256 "
        "--group-size 4 --max-new-tokens 16")
REAL_RUNS = {"dpo pairs": "--loss dpo", "kto pairs": "--loss kto", "grpo pairs": "--loss grpo",
             "grpo online": "--loss grpo --sample-every 1 --batch-size 2"}
TIMES = {"step_seconds", "sample_seconds", "memory_mib"}  # metrics that differ between any two runs

# This differs between most completions and can be learned, because some characters score more than others.
REWARD = """def varied(prompts, completions, rows):
    return [sum(ord(c) % 7 for c in text) / (6 * max(1, len(text))) for text in completions]
"""
TEMPLATE = ("{{ bos_token }}{% for message in messages %}"
            "<|{{ message['role'] }}|>{{ message['content'] }}"
            "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def make_tiny(folder: Path) -> None:
    """Write a random two-layer Llama, and a tokenizer with one token per character."""
    transformers.utils.logging.disable_progress_bar()
    special = ["<pad>", "<unk>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate([*special, "\n", *map(chr, range(32, 127))])}
    characters = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    characters.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>",
        eos_token="<eos>", additional_special_tokens=special[4:], chat_template=TEMPLATE,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, initializer_range=0.2,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )).save_pretrained(folder)


def make_rows(folder: Path) -> None:
    """Write a file for each kind of row, with prompts and completions of various lengths."""
    chance = random.Random(0)
    text = lambda longest: "".join(chance.choices("abcdefgh01234", k=chance.randint(1, longest)))
    kinds = dict(
        prompts=lambda i: dict(answer=text(2)),
        pairs=lambda i: dict(chosen=text(9), rejected=text(9)),
        labels=lambda i: dict(completion=text(9), label=i % 3 == 0),
        groups=lambda i: dict(completions=[text(9) for _ in range(4)],
                              scores=[chance.random() for _ in range(4)]))
    for kind, more in kinds.items():
        rows = [dict(prompt=f"{i} {text(12)}", **more(i)) for i in range(24)]
        write_jsonl(folder / f"{kind}.jsonl", rows)


def make_dialogues(path: Path) -> None:
    """Write rows in the format of HH-RLHF: two full transcripts that differ in the last answer."""
    chance = random.Random(0)
    topics = ["bread", "a bicycle", "the moon", "chess", "taxes", "a violin", "volcanoes"]
    questions = ["How do I look after {}?", "Tell me about {}.", "Why do people care about {}?"]
    answers = ["Start with something small.", "I would read a book about {} first.", "No.",
               "It depends on your time.", "There is more to {} than most people think."]

    def turn(role: str, sentences: list[str]) -> str:
        picked = chance.sample(sentences, chance.randint(1, len(sentences)))
        return f"\n\n{role}: " + " ".join(picked).replace("{}", chance.choice(topics))

    rows = []
    for i in range(40):
        talk = "".join(turn("Human", questions) + turn("Assistant", answers) for _ in range(i % 3))
        talk += turn("Human", questions)
        rows.append({kind: talk + turn("Assistant", answers) for kind in ("chosen", "rejected")})
    write_jsonl(path, rows)


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train(checkout: Path, side: Path, name: str, flags: str, threads: int) -> None:
    """Run the command line in the folder `side`. Raises RuntimeError if it fails."""
    ranks = "-m torch.distributed.run --standalone --nproc_per_node=2" if "2 ranks" in name else ""
    command = [sys.executable, *ranks.split(), str(checkout.resolve() / "humanline.py"),
               *flags.split(), "--out", str(side / name)]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE",  # fast even on a busy machine
        "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1",
        "HF_DATASETS_CACHE": str(side / "datasets")}

    def start(*more: str) -> None:
        done = subprocess.run(
            [*command, *more], cwd=side, env=environment, capture_output=True, text=True)
        if done.returncode:
            last = [f"exit status {done.returncode}", *done.stderr.strip().splitlines()][-1]
            raise RuntimeError(f"{side.name}: {last}")

    start()
    if "resumed" in name:  # simulate a kill after the first checkpoint
        shutil.rmtree(side / name / "final")
        for checkpoint in sorted((side / name / "checkpoint").glob("step-*"))[1:]:
            shutil.rmtree(checkpoint)
        start("--resume", "latest")


def distance(old: Path, new: Path) -> float:
    """||old - new|| / ||old|| for the weights in two files."""
    a, b = load_file(old), load_file(new)
    norm = lambda tensors: torch.stack([tensor.double().norm() for tensor in tensors]).norm()
    if a.keys() != b.keys():
        return math.inf
    return float(norm(a[name].double() - b[name].double() for name in a) / norm(a.values()))


def compare_files(old: Path, new: Path) -> str:
    if old.read_bytes() == new.read_bytes():
        return "same"
    return f"DIFFER by {distance(old, new):.1e}"


def compare_metrics(old: Path, new: Path, one_sided: set[str]) -> str:
    """Compare metrics relative to their largest value in the run, because single values can be zero up to
    rounding. Metrics that only one side has are added to `one_sided`."""
    a, b = ([json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (old, new))
    if len(a) != len(b):
        return f"DIFFER: {len(a)} lines and {len(b)}"
    largest: dict[str, float] = {}
    differences: list[tuple[str, int, float]] = []  # metric, step, absolute difference
    for old_line, new_line in zip(a, b):
        one_sided |= old_line.keys() ^ new_line.keys()
        for key in (old_line.keys() & new_line.keys()) - TIMES:
            old_value, new_value = old_line[key], new_line[key]
            largest[key] = max(largest.get(key, 0.0), abs(old_value), abs(new_value))
            if old_value != new_value:
                differences.append((key, old_line["step"], abs(old_value - new_value)))
    if not differences:
        return "same"
    key, step, difference = max(differences, key=lambda entry: entry[2] / largest[entry[0]])
    return f"differ by {difference / largest[key]:.1e} ({key}, step {step})"


def compare(args: argparse.Namespace, home: Path) -> int:
    """Write the inputs, train both checkouts and print the table. Returns the exit status."""
    make_tiny(home / "tiny")
    make_rows(home)
    make_dialogues(home / "dialogues.jsonl")
    (home / "reward.py").write_text(REWARD)
    base, common, runs, threads = home / "tiny", TINY, RUNS, 1
    if args.real:
        base, common, runs, threads = home / "real", REAL, REAL_RUNS, 2
        base.symlink_to(args.real.resolve())
    if args.rows:
        shutil.copy(args.rows, home / "dialogues.jsonl")
    data = lambda flags: "" if "--data " in f"{common} {flags}" else " --data ../groups.jsonl"
    runs = {name: f"{common}{data(flags)} {flags}" for name, flags in runs.items()}
    names = [name for name in runs if re.search(args.only, name)]
    if not names:
        raise SystemExit(f"no run matches --only {args.only}; the runs are: {'; '.join(runs)}")
    old, new = home / "old", home / "new"
    old.mkdir()
    new.mkdir()

    failed, one_sided = [], set()

    def report(name: str, weights: str, *cells: str) -> None:
        print("|", " | ".join([name, weights, *cells]), "|", flush=True)
        if weights != "same":
            failed.append(name)

    print("| run | weights | metrics | moved | seconds |\n|---|---|---|---|---|")
    for name in names:
        started, final = time.time(), Path(name, "final", "model.safetensors")
        try:
            train(args.old, old, name, runs[name], threads)
            train(args.new, new, name, runs[name], threads)
        except RuntimeError as error:
            report(name, f"FAILED: {error}", "", "", "")
            continue
        metrics = compare_metrics(old / name, new / name, one_sided)
        moved = f"{distance(base / 'model.safetensors', old / final):.2%}"
        seconds = f"{time.time() - started:.0f}"
        report(name, compare_files(old / final, new / final), metrics, moved, seconds)
    if one_sided:
        print(f"\nMetrics that only one side has: {', '.join(sorted(one_sided))}.")
    print(f"\nNot the same: {'; '.join(failed)}." if failed else "\nAll weights are the same.")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--only", default="", metavar="REGEX", help="only runs whose name matches")
    parser.add_argument("--real", type=Path, metavar="FOLDER", help="use this real model, with two threads")
    parser.add_argument("--rows", type=Path, metavar="FILE",
                        help="with --real: your own JSON lines with `chosen` and `rejected`")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # clean up if stopped by `timeout`
    with tempfile.TemporaryDirectory() as home:
        return compare(args, Path(home))


if __name__ == "__main__":
    sys.exit(main())
