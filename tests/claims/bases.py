"""Make tiny base models with a systematic mistake, and data to align them on.

  python tests/claims/bases.py configs/demo                   # recreate the demo
  python tests/claims/bases.py /tmp/base --seed 3             # another base, with its own data
  python tests/claims/bases.py /tmp/long --task six-digits    # a longer task; also two-digits, twelve-digits

The folder then contains `model/`, a Llama with 0.1 M parameters trained on demonstrations with mistakes;
`rows.jsonl`, prompts with 8 rewarded samples each; and `test.jsonl`, held-out prompts with their answers.
With --drawn-by worse (or better), the samples come from a model that was trained further on worse (or better)
demonstrations.
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

# The first seed after those of the tuning bases, 101 and 102, whose base has a mean reward of 0.4 to 0.6 on the
# held-out problems, which leaves room to improve. The rule was fixed before any model was trained on such a base.
DEMO_SEED = 103
HELD_OUT = 500  # problems
GROUP = 8  # completions per prompt
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# ---------- Tasks: problems, and the demonstrator that solves them with mistakes ----------------------------

def two_digit_sums(chance: random.Random) -> list[str]:
    return [f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)]

def add(problem: str, error_rate: float, chance: random.Random) -> str:
    """Add two numbers. If the units sum to ten or more, forget the carry with probability `error_rate`:
    27+35=52."""
    first, second = map(int, problem.removesuffix("=").split("+"))
    has_carry = first % 10 + second % 10 >= 10
    forgets = has_carry and chance.random() < error_rate
    return str(first + second - 10 * forgets)

def six_digit_sums(chance: random.Random) -> list[str]:
    """About 8,000 distinct sums of six digits."""
    problems = ("+".join(chance.choices("123456789", k=6)) + "=" for _ in range(8100))
    return list(dict.fromkeys(problems))

def add_in_steps(problem: str, error_rate: float, chance: random.Random) -> str:
    """Write every partial sum on its own line, then the total. When adding a nine, forget the carry with
    probability `error_rate`.

    >>> print(add_in_steps("7+8+5=", 0.0, random.Random(0)))
    7+8=15
    15+5=20
    20
    """
    total, *digits = problem.removesuffix("=").split("+")
    lines = []
    for digit in digits:
        partial_sum = f"{total}+{digit}="
        total = add(partial_sum, error_rate * (digit == "9"), chance)
        lines.append(f"{partial_sum}{total}\n")
    return "".join(lines) + total

def written_sums(chance: random.Random) -> list[str]:
    """8,100 sums of two twelve-digit numbers, one line per column from the right, with blanks to fill in."""

    def digit() -> int:
        return chance.randrange(10)

    def problem() -> str:
        return "\n".join(f"{digit()}+{digit()}+_=__" for _ in range(12))

    return [problem() for _ in range(8100)]

def add_in_columns(problem: str, error_rate: float, chance: random.Random) -> str:
    """Fill in the blanks: the carry into each column, and the column's sum. If a column reaches ten only
    because of a carry, forget to pass the carry on with probability `error_rate`.

    >>> print(add_in_columns("4+7+_=__\\n6+3+_=__\\n0+1+_=__", 0.0, random.Random(0)))
    4+7+0=11
    6+3+1=10
    0+1+1=02
    >>> print(add_in_columns("4+7+_=__\\n6+3+_=__\\n0+1+_=__", 1.0, random.Random(0)).splitlines()[-1])
    0+1+0=01
    """
    carry = 0
    lines = []
    for column in problem.splitlines():
        upper = int(column[0])
        lower = int(column[2])
        total = upper + lower + carry
        lines.append(f"{upper}+{lower}+{carry}={total:02d}")
        forgets = upper + lower == 9 and chance.random() < error_rate
        carry = 0 if forgets else total // 10
    return "\n".join(lines)

def five_digits(chance: random.Random) -> list[str]:
    """8,100 distinct strings of five digits."""
    problems: dict[str, None] = {}
    while len(problems) < 8100:
        digits = "".join(chance.choices("123456789", k=5))
        problems[digits + "="] = None
    return list(problems)

def sort_once(problem: str, error_rate: float, chance: random.Random) -> str:
    """Sort the digits and drop duplicates. With probability `error_rate`, keep the duplicates.

    >>> sort_once("52534=", 0.0, random.Random(0)), sort_once("52534=", 1.0, random.Random(0))
    ('2345', '23455')
    """
    digits = sorted(problem.removesuffix("="))
    has_duplicates = len(set(digits)) < len(digits)
    keeps = has_duplicates and chance.random() < error_rate
    return "".join(digits if keeps else dict.fromkeys(digits))

# ---------- Recipes -----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Recipe:
    """How to train a base model, and on which task."""

    steps: int
    batch_size: int  # demonstrations per step
    lr: float
    error_rates: tuple[float, float]  # of the demonstrator, at first and in the last fifth of the steps
    parent: str | None = None  # recipe of the model to continue from; None: random weights
    least_accuracy: float = 0.0  # below this the model has not learned the task, and is trained again
    problems: Callable[[random.Random], list[str]] = two_digit_sums
    demonstrate: Callable[[str, float, random.Random], str] = add  # (problem, error rate, chance) -> solution
    max_new_tokens: int = 8
    data_prompts: int | None = None  # number of prompts in rows.jsonl; None: all

    def rows(self, seed: int) -> tuple[list[dict], list[dict]]:
        """Training rows and held-out rows: problems with their correct solutions."""
        chance = random.Random(seed)
        rows = []
        for problem in self.problems(chance):
            answer = self.demonstrate(problem, 0, chance)
            rows.append(dict(prompt=problem, answer=answer))
        random.Random(seed).shuffle(rows)
        return rows[HELD_OUT:], rows[:HELD_OUT]

STEPS_TASK = dict(
    problems=six_digit_sums,
    demonstrate=add_in_steps,
    max_new_tokens=48,
    data_prompts=1024,
)
COLUMNS_TASK = dict(
    problems=written_sums,
    demonstrate=add_in_columns,
    max_new_tokens=128,
    data_prompts=1024,
)
SORTING_TASK = dict(problems=five_digits, demonstrate=sort_once)
# Most recipes start with correct demonstrations: with mistakes from the start, learning would take twice as
# long.
RECIPES = {
    "two-digits": Recipe(
        steps=400,
        batch_size=256,
        lr=2e-2,
        error_rates=(0.0, 0.7),
        least_accuracy=0.55,
    ),
    "two-digits-worse": Recipe(
        steps=120,
        batch_size=384,
        lr=2e-3,
        error_rates=(0.9, 0.9),
        parent="two-digits",
    ),
    "two-digits-better": Recipe(
        steps=120,
        batch_size=384,
        lr=2e-3,
        error_rates=(0.4, 0.4),
        parent="two-digits",
    ),
    "six-digits": Recipe(
        steps=400,
        batch_size=128,
        lr=1e-2,
        error_rates=(0.0, 0.65),
        least_accuracy=0.5,
        **STEPS_TASK,
    ),
    "twelve-digits-right": Recipe(
        steps=400,
        batch_size=32,
        lr=1e-2,
        error_rates=(0.0, 0.0),
        least_accuracy=0.8,
        **COLUMNS_TASK,
    ),
    "twelve-digits": Recipe(
        steps=150,
        batch_size=32,
        lr=4e-3,
        error_rates=(0.75, 0.75),
        parent="twelve-digits-right",
        **COLUMNS_TASK,
    ),
    "five-sorted": Recipe(
        steps=400,
        batch_size=128,
        lr=1e-2,
        error_rates=(0.0, 0.7),
        least_accuracy=0.4,
        **SORTING_TASK,
    ),
}
TASKS = ("five-sorted", "two-digits", "six-digits", "twelve-digits")

# ---------- Training a base ---------------------------------------------------------------------------------

def character_tokenizer() -> Any:
    """A tokenizer with one token per character of printable ASCII, and a chat template."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>"]
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: i for i, token in enumerate(special + characters)}
    # BPE without merges splits a text into characters.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=special[4:],
        chat_template=CHAT_TEMPLATE,
    )

def new_model(tokenizer: Any, seed: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)

def load(folder: Path) -> torch.nn.Module:
    config = Config(model=str(folder), compile=False)
    policy, _ = humanline.load_policy(config, torch.device("cpu"))
    return policy

def make_optimizers(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, with which the models learn fastest, and AdamW for everything else."""
    matrices = []
    others = []
    for name, p in model.named_parameters():
        is_matrix = p.dim() == 2 and "embed" not in name
        (matrices if is_matrix else others).append(p)
    return [
        torch.optim.Muon(matrices, lr=2 * lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]

def train_base(model: torch.nn.Module, tokenizer: Any, recipe: Recipe, seed: int) -> None:
    """Supervised training on demonstrations with mistakes, with linear warmup and decay."""
    chance = random.Random(seed)
    rows, _ = recipe.rows(seed)
    dialogues = [humanline.Row("", [{"role": "user", "content": row["prompt"]}], row) for row in rows]
    prompts = [ids for [ids] in humanline.encode_dialogues(tokenizer, dialogues)]
    optimizers = make_optimizers(model, recipe.lr)
    for step in tqdm(range(recipe.steps), desc="demonstrations", leave=False):
        picked = chance.choices(range(len(rows)), k=recipe.batch_size)
        error_rate = recipe.error_rates[step >= 0.8 * recipe.steps]
        solutions = []
        for i in picked:
            solution = recipe.demonstrate(rows[i]["prompt"], error_rate, chance)
            solutions.append(solution + tokenizer.eos_token)
        completions = tokenizer(solutions)["input_ids"]
        sequences = [[Sequence(prompts[i], ids)] for i, ids in zip(picked, completions)]
        logps = humanline.log_probs(model, sequences)
        loss = -logps.sum() / sum(map(len, completions))
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                peak = group.setdefault("peak", group["lr"])
                group["lr"] = peak * min(1, (step + 1) / 50) * (1 - step / recipe.steps)
            optimizer.step()
            optimizer.zero_grad()

def draw(
    model: torch.nn.Module,
    tokenizer: Any,
    recipe: Recipe,
    fields: list[dict],
    size: int,
    seed: int,
) -> list[Group]:
    """Sample and reward `size` completions for the prompt of each row, as the trainer does."""
    config = Config(sample_every=1, seed=seed, max_new_tokens=recipe.max_new_tokens)
    rows = [humanline.read_row(row, "", config) for row in fields]
    encoded = humanline.encode_dialogues(tokenizer, rows)
    prompts = [Group(i, ids, [], []) for i, [ids] in enumerate(encoded)]
    return Sampler(model, tokenizer, config).draw_rollouts(prompts, rows, size, 0)

def make_model(name: str, folder: Path, seed: int, parent: Path | None = None) -> torch.nn.Module:
    """Train the model of a recipe, which is then correct about as often as its demonstrator, and save it to
    `folder`.

    Args:
        parent: folder of the model to continue from. If the recipe needs one and it is None, it is trained
            first.
    """
    recipe = RECIPES[name]
    tokenizer = character_tokenizer()
    if recipe.parent and parent is None:
        parent = folder.with_name(f"{recipe.parent}-model")
        make_model(recipe.parent, parent, seed)
    tokenizer.save_pretrained(folder)
    for attempt in range(10):  # about one initialization in ten never learns the task
        model = load(parent) if recipe.parent else new_model(tokenizer, seed + 1000 * attempt)
        train_base(model, tokenizer, recipe, seed)
        model.save_pretrained(folder)
        if not recipe.least_accuracy:
            break
        _, test_rows = recipe.rows(seed)
        groups = draw(load(folder), tokenizer, recipe, test_rows, 1, seed)
        accuracy = fmean(group.rewards[0] for group in groups)
        if accuracy >= recipe.least_accuracy:
            break
    return model

def make(
    folder: Path,
    task: str = "five-sorted",
    seed: int = DEMO_SEED,
    drawn_by: str = "",
    own: Path | None = None,
) -> None:
    """Fill a folder with the model of a task, its rows and held-out rows.

    Args:
        drawn_by: "worse" or "better" to sample from such a model instead of the base itself.
        own: folder of the same base without `drawn_by`, to copy its model instead of training it again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe = RECIPES[task]
    tokenizer = character_tokenizer()
    if own:
        shutil.copytree(own / "model", folder / "model")
    else:
        make_model(task, folder / "model", seed)
    if drawn_by:
        make_model(f"{task}-{drawn_by}", folder / drawn_by, seed, folder / "model")
    model = load(folder / (drawn_by or "model"))
    rows, test_rows = recipe.rows(seed)
    rows = rows[: recipe.data_prompts]
    groups = draw(model, tokenizer, recipe, rows, GROUP, seed)
    for row, group in zip(rows, groups):
        texts = tokenizer.batch_decode(group.completions, skip_special_tokens=True)
        row["completions"] = [text if text.strip() else "?" for text in texts]
        row["scores"] = [int(text.strip() == row["answer"]) for text in row["completions"]]
    for name, lines in (("rows", rows), ("test", test_rows)):
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")

def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=TASKS, default="five-sorted")
    parser.add_argument("--seed", type=int, default=DEMO_SEED)
    parser.add_argument("--drawn-by", choices=["", "worse", "better"], default="", help="two-digits only")
    flags = parser.parse_args()
    make(flags.folder, flags.task, flags.seed, flags.drawn_by)

if __name__ == "__main__":
    main()
