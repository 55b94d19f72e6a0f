"""Tiny models that make a systematic mistake, with rows to align them on: the demo, its sister bases, longer tasks.

  python tests/claims/bases.py configs/demo                     # makes the demo again
  python tests/claims/bases.py /tmp/base --seed 3               # a sister base, with data of its own
  python tests/claims/bases.py /tmp/long --task six-digits      # a longer task; --task five-sorted, twelve-digits

A folder gets `model/`, a Llama of 0.1 M parameters that learned from a demonstrator who errs; `rows.jsonl`, prompts with
8 rewarded samples each; `test.jsonl`, other prompts with their answers. With --drawn-by worse the rows' samples are
those of a model that had some more, worse lessons, and with better of one that had better ones.
"""

import argparse
import json
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from tqdm import tqdm

import humanline
from humanline import Config, Group, Sampler, Sequence

HELD_OUT, GROUP = 500, 8  # problems, and completions for each prompt of the rows
CHAT_TEMPLATE = ("{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
                 "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")

# ---------- The tasks: problems, and how a demonstrator solves one ----------------------------------------------------

def two_digit_sums(chance: random.Random) -> list[str]:
    return [f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)]

def add(problem: str, errs: float, chance: random.Random) -> str:
    """The sum; where the units make ten or more, with probability `errs` their carry is forgotten: 27+35=52."""
    first, second = map(int, problem.removesuffix("=").split("+"))
    forgets = first % 10 + second % 10 >= 10 and chance.random() < errs
    return str(first + second - 10 * forgets)

def six_digit_sums(chance: random.Random) -> list[str]:
    """Some 8,000 sums of six digits, each once."""
    return list(dict.fromkeys("+".join(chance.choices("123456789", k=6)) + "=" for _ in range(8100)))

def add_in_steps(problem: str, errs: float, chance: random.Random) -> str:
    """The sum, and before it every partial sum, a line each; with probability `errs` the carry of a nine is forgotten.

    >>> print(add_in_steps("7+8+5=", 0.0, random.Random(0)))
    7+8=15
    15+5=20
    20
    """
    total, *digits = problem.removesuffix("=").split("+")
    lines = []
    for digit in digits:
        partial_sum = f"{total}+{digit}="
        total = add(partial_sum, errs * (digit == "9"), chance)
        lines.append(f"{partial_sum}{total}\n")
    return "".join(lines) + total

def written_sums(chance: random.Random) -> list[str]:
    """8,100 sums of two numbers of twelve digits, a line for each column from the right, with blanks to fill in."""
    digit = lambda: chance.randrange(10)
    return ["\n".join(f"{digit()}+{digit()}+_=__" for _ in range(12)) for _ in range(8100)]

def add_in_columns(problem: str, errs: float, chance: random.Random) -> str:
    """The blanks filled in: the carry into each column, and its sum; with probability `errs` a column that came to ten
    or more only by a carry passes none on.

    >>> print(add_in_columns("4+7+_=__\\n6+3+_=__\\n0+1+_=__", 0.0, random.Random(0)))
    4+7+0=11
    6+3+1=10
    0+1+1=02
    >>> print(add_in_columns("4+7+_=__\\n6+3+_=__\\n0+1+_=__", 1.0, random.Random(0)).splitlines()[-1])
    0+1+0=01
    """
    carry, lines = 0, []
    for column in problem.splitlines():
        upper, lower = int(column[0]), int(column[2])
        total = upper + lower + carry
        lines.append(f"{upper}+{lower}+{carry}={total:02d}")
        forgets = upper + lower == 9 and chance.random() < errs
        carry = 0 if forgets else total // 10
    return "\n".join(lines)

def five_digits(chance: random.Random) -> list[str]:
    """8,100 strings of five digits, each once."""
    found: dict[str, None] = {}
    while len(found) < 8100:
        found["".join(chance.choices("123456789", k=5)) + "="] = None
    return list(found)

def sort_once(problem: str, errs: float, chance: random.Random) -> str:
    """The digits in order, each once; with probability `errs` repeated ones are all kept.

    >>> sort_once("52534=", 0.0, random.Random(0)), sort_once("52534=", 1.0, random.Random(0))
    ('2345', '23455')
    """
    digits = sorted(problem.removesuffix("="))
    keeps = len(set(digits)) < len(digits) and chance.random() < errs
    return "".join(digits if keeps else dict.fromkeys(digits))

# ---------- The lessons -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Recipe:
    """How a model is taught, and what."""

    lessons: int
    demonstrations: int  # per lesson
    lr: float
    errs: tuple[float, float]  # how often the demonstrator errs, at first and in the last fifth of the lessons
    parent: str | None = None  # the model that goes on learning; None: random weights
    least_accuracy: float = 0.0  # below it the idea was not got, and another start is made
    problems: Callable[[random.Random], list[str]] = two_digit_sums
    demonstrate: Callable[[str, float, random.Random], str] = add  # (problem, how often wrong, chance) -> solution
    max_new_tokens: int = 8
    data_prompts: int | None = None  # how many prompts the rows have; None: all

    def rows(self, seed: int) -> tuple[list[dict], list[dict]]:
        """Rows to train on and rows held out: problems with their right solutions."""
        chance = random.Random(seed)
        rows = [dict(prompt=text, answer=self.demonstrate(text, 0, chance)) for text in self.problems(chance)]
        random.Random(seed).shuffle(rows)
        return rows[HELD_OUT:], rows[:HELD_OUT]

LONG = dict(problems=six_digit_sums, demonstrate=add_in_steps, max_new_tokens=48, data_prompts=1024)
COLUMN = dict(problems=written_sums, demonstrate=add_in_columns, max_new_tokens=128, data_prompts=1024)
RECIPES = {  # errors from the first lesson on would cost as much again to learn past them
    "two-digits": Recipe(400, 256, 2e-2, (0.0, 0.7), least_accuracy=0.55),
    "two-digits-worse": Recipe(120, 384, 2e-3, (0.9, 0.9), parent="two-digits"),
    "two-digits-better": Recipe(120, 384, 2e-3, (0.4, 0.4), parent="two-digits"),
    "six-digits": Recipe(400, 128, 1e-2, (0.0, 0.65), least_accuracy=0.5, **LONG),
    "twelve-digits-right": Recipe(400, 32, 1e-2, (0.0, 0.0), least_accuracy=0.8, **COLUMN),
    "twelve-digits": Recipe(150, 32, 4e-3, (0.75, 0.75), parent="twelve-digits-right", **COLUMN),
    "five-sorted": Recipe(400, 128, 1e-2, (0.0, 0.7), least_accuracy=0.4, problems=five_digits, demonstrate=sort_once),
}
TASKS = ("two-digits", "six-digits", "twelve-digits", "five-sorted")

def character_tokenizer() -> Any:
    """A token for each character of printable ASCII, with a chat template."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate([*special, "\n", *map(chr, range(32, 127))])}
    characters = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))  # without merges: a token a character
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=special[4:], chat_template=CHAT_TEMPLATE)

def new_model(tokenizer: Any, seed: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id))
    return model

def load(folder: Path) -> torch.nn.Module:
    return humanline.load_policy(Config(model=str(folder), compile=False), torch.device("cpu"))[0]

def teach(model: torch.nn.Module, tokenizer: Any, recipe: Recipe, seed: int) -> None:
    """Imitate a demonstrator who errs. Muon learns this fastest."""
    chance, rows = random.Random(seed), recipe.rows(seed)[0]
    dialogues = [humanline.Row("", [{"role": "user", "content": row["prompt"]}], row) for row in rows]
    prompts = [ids for [ids] in humanline.encode_dialogues(tokenizer, dialogues)]
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    optimizers = [torch.optim.Muon(matrices, lr=2 * recipe.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(others, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)]
    steps = recipe.lessons
    for step in tqdm(range(steps), desc="lessons", leave=False):
        picked, errs = chance.choices(range(len(rows)), k=recipe.demonstrations), recipe.errs[step >= 0.8 * steps]
        solutions = [recipe.demonstrate(rows[i]["prompt"], errs, chance) + tokenizer.eos_token for i in picked]
        ids = tokenizer(solutions)["input_ids"]
        rows_of_one = [[Sequence(prompts[i], completion)] for i, completion in zip(picked, ids)]
        logps = humanline.log_probs(model, rows_of_one)
        (-logps.sum() / sum(map(len, ids))).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * min(1, (step + 1) / 50) * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()

def draw(model: torch.nn.Module, tokenizer: Any, recipe: Recipe, fields: list[dict], size: int,
         seed: int) -> list[Group]:
    """`size` samples with rewards for each row's prompt, drawn as the trainer draws them."""
    config = Config(sample_every=1, seed=seed, max_new_tokens=recipe.max_new_tokens)
    rows = [humanline.read_row(row, "", config) for row in fields]
    encoded = humanline.encode_dialogues(tokenizer, rows)
    prompts = [Group(i, ids, [], []) for i, [ids] in enumerate(encoded)]
    return Sampler(model, tokenizer, config).draw_rollouts(prompts, rows, size, 0)

def make_model(name: str, folder: Path, seed: int, parent: Path | None = None) -> torch.nn.Module:
    """The model of a recipe, right about as often as its demonstrator, also written into the folder. parent: the folder
    of the model that it goes on from; else that is made, too."""
    recipe, tokenizer = RECIPES[name], character_tokenizer()
    if recipe.parent and parent is None:
        parent = folder.with_name(f"{recipe.parent}-model")
        make_model(recipe.parent, parent, seed)
    for start in range(10):  # one start in ten or so never gets the idea
        model = load(parent) if recipe.parent else new_model(tokenizer, seed + 1000 * start)
        teach(model, tokenizer, recipe, seed)
        if not recipe.least_accuracy:
            break
        answers = draw(model, tokenizer, recipe, recipe.rows(seed)[1], 1, seed)
        if fmean(group.rewards[0] for group in answers) >= recipe.least_accuracy:
            break
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model

def make(folder: Path, task: str = "two-digits", seed: int = 0, drawn_by: str = "", own: Path | None = None) -> None:
    """Fill a folder with a task's model, rows and held-out rows. own: the folder of the same base without `drawn_by`,
    whose model is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe, tokenizer = RECIPES[task], character_tokenizer()
    if own:
        shutil.copytree(own / "model", folder / "model")
    else:
        make_model(task, folder / "model", seed)
    if drawn_by:
        make_model(f"{task}-{drawn_by}", folder / drawn_by, seed, folder / "model")
    model = load(folder / (drawn_by or "model"))
    rows, test_rows = recipe.rows(seed)
    rows = rows[: recipe.data_prompts]
    for row, group in zip(rows, draw(model, tokenizer, recipe, rows, GROUP, seed)):
        texts = tokenizer.batch_decode(group.completions, skip_special_tokens=True)
        row |= dict(completions=[text if text.strip() else "?" for text in texts], scores=group.rewards)
    for name, lines in (("rows", rows), ("test", test_rows)):
        text = "".join(json.dumps(row) + "\n" for row in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=TASKS, default="two-digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drawn-by", choices=["", "worse", "better"], default="", help="two-digits alone")
    flags = parser.parse_args()
    make(flags.folder, flags.task, flags.seed, flags.drawn_by)

if __name__ == "__main__":
    main()
