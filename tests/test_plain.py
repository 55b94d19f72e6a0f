"""humanline.py computes what plain.py says: the same weights, whatever the loss, its form and its data.

`pytest tests/test_plain.py -s` prints the largest difference of each case.
"""

import dataclasses
import importlib.util
import json
import random
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from conftest import finished
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import humanline
import plain

STEPS = 4
GROUP = 4  # completions of a prompt
SAME = 1e-6  # of weights, in fp32
REWARDS = """import zlib

def varied(prompts, completions, rows):
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]

def coin(prompts, completions, rows):
    return [zlib.crc32(text.encode()) % 2 for text in completions]
"""

# ---------- The cases: a loss, its form, where its completions come from ------------------------------------

LOSSES = "dpo", "kto", "grpo"
FORMS = {
    "plain": dict(humanline=False),
    "humanline": dict(),
    "better alone": dict(positive_only=True),
}
SOURCES = {
    "offline": dict(sync_k=2),
    "online": dict(sync_k=1, sample_every=1),
    "every 4, k 3": dict(sync_k=3, sample_every=4),
}
CASES = {
    f"{loss}, {form}, {source}": dict(loss=loss) | FORMS[form] | SOURCES[source]
    for loss in LOSSES for form in FORMS for source in SOURCES
}
for loss in LOSSES:
    CASES[f"{loss}, sync alone"] = dict(loss=loss, perception="none", sync_k=2)
    CASES[f"{loss}, sync alone, online"] = dict(loss=loss, perception="none", sync_k=3, sample_every=4)
    CASES[f"{loss}, perception alone"] = dict(loss=loss, sync_k=0)
    CASES[f"{loss}, perception alone, online"] = dict(loss=loss, sync_k=0, sample_every=2)
    CASES[f"{loss}, T 0.7"] = dict(loss=loss, temperature=0.7, sample_every=4, sync_k=3)
    CASES[f"{loss}, sampling"] = dict(loss=loss, perception="sample", sync_k=2)
    CASES[f"{loss}, sampling, online"] = dict(loss=loss, perception="sample", reward="coin", sync_k=1,
                                              sample_every=2)
    CASES[f"{loss}, groups without difference"] = dict(loss=loss, reward="coin", sync_k=1, sample_every=2)
CASES |= {
    "grpo, KL": dict(loss="grpo", kl_beta=0.3, sync_k=2),
    "grpo, KL, better alone": dict(loss="grpo", kl_beta=0.3, sync_k=3, sample_every=4, positive_only=True),
    "grpo, KL, plain, online": dict(loss="grpo", kl_beta=0.3, reward="coin", humanline=False, sample_every=2),
    "kto, a clip that raises z0": dict(loss="kto", sync_k=3, log_eps_p=-0.02, log_eps_r=1.0),
    "grpo, six steps": dict(loss="grpo", steps=6, sample_every=2, sync_k=3, positive_only=True),
    "kto, six steps": dict(loss="kto", steps=6, sample_every=4, sync_k=3, undesirable_weight=0.6),
    "kto, one example a step": dict(loss="kto", sync_k=2, batch_size=1),
    "kto, both weights given": dict(loss="kto", sync_k=2, desirable_weight=1.7, undesirable_weight=0.6),
    "grpo, a clipped gradient": dict(loss="grpo", sync_k=2, max_grad_norm=0.1),
    "dpo, weight decay": dict(loss="dpo", sync_k=2, weight_decay=0.1),
}


def settings_of(case: dict) -> dict:
    """The settings of both programs. β, ε and the warmup are not the defaults. The bounds of the clip are
    narrow and differ in size, so that both act. AdamW's epsilon is large because its first steps divide a
    gradient by its own size, which would magnify rounding errors. The gradient's norm is not clipped: that
    would hide a wrong scale of the loss."""
    return dict(log_eps_p=-0.3, log_eps_r=0.2, batch_size=8, lr=5e-3, warmup=0.5, adam_eps=1e-3,
                max_grad_norm=1e6, steps=STEPS, group_size=GROUP,
                reward="varied", beta=0.3, epsilon=0.15) | case


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder with rows.jsonl, groups of completions of many lengths, and reward.py."""
    folder = tmp_path_factory.mktemp("data")
    chance = random.Random(0)

    def word() -> str:
        return "".join(chance.choices("abcdefgh0123456789", k=chance.randint(1, 9)))

    rows = [dict(prompt=f"{i} {word()}", completions=[word() for _ in range(GROUP)],
                 scores=[chance.random() for _ in range(GROUP)]) for i in range(48)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARDS)
    return folder


def weights_of_humanline(program, case: dict, model: str, data: Path, out: Path) -> dict[str, torch.Tensor]:
    """A run's final weights. Its microbatches are small, and so many."""
    settings = settings_of(case)
    reward = settings.pop("reward")
    del settings["epsilon" if case["loss"] != "grpo" else "beta"]  # the loss does not read it
    if case["loss"] == "kto" and "sample_every" in case:
        settings["batch_size"] *= GROUP  # it counts completions; in plain.py their prompts
    program.train(program.Config(
        model=model, data=(str(data / "rows.jsonl"),), reward=f"{data / 'reward.py'}:{reward}",
        dtype="float32", max_new_tokens=4, microbatch_tokens=64, save_every=0, out=str(out),
        **settings))
    return load_file(out / "final" / "model.safetensors")


def weights_of_plain(case: dict, model: str, data: Path, out: Path) -> tuple[dict[str, torch.Tensor], float]:
    """The weights of plain.py, trained on the completions that the run in `out` has drawn, and the largest
    difference between the log-probs that they were drawn with and those of plain.py."""
    settings = settings_of(case)
    del settings["reward"]  # the run has written it down
    plain.BETA, plain.EPSILON = settings.pop("beta"), settings.pop("epsilon")
    plain.config = plain.Settings(**settings)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in open(data / "rows.jsonl")]
    gaps = [0.0]
    rollouts = defaultdict(list)
    if "sample_every" in case:
        for line in map(json.loads, open(out / "rollouts.jsonl")):
            rollouts[line["step"], line["prompt"][-1]["content"]].append(line)

    def draw(policy, tokenizer, row, step):
        """The run's rollouts of this step and row."""
        lines = rollouts.pop((step, row["prompt"]))
        group = [plain.Sample(plain.encode(row, tokenizer), line["tokens"], line["reward"]) for line in lines]
        ids, mask = plain.collate(group)
        drawn_with = torch.tensor([logp for line in lines for logp in line["logps"]])
        gaps.append((plain.log_probs(policy, ids, mask)[mask] - drawn_with).abs().max().item())
        return group

    plain.train(policy, tokenizer, rows, draw)
    assert not rollouts
    return dict(policy.named_parameters()), max(gaps)


def largest_difference(weights: dict, others: dict) -> float:
    return max(float((weights[name] - others[name]).detach().abs().max()) for name in weights)


@pytest.mark.parametrize("name", CASES)
def test_humanline_trains_to_the_weights_of_the_plain_method(name, tiny, data, tmp_path):
    ours = weights_of_humanline(humanline, CASES[name], tiny, data, tmp_path / "run")
    plains, gap = weights_of_plain(CASES[name], tiny, data, tmp_path / "run")
    difference = largest_difference(ours, plains)
    moved = largest_difference(ours, load_file(Path(tiny) / "model.safetensors"))
    print(f"\n{name:32} differs by {difference:.1e}; training moved weights by {moved:.1e}")
    assert difference <= SAME
    assert moved > 1e4 * SAME
    assert gap < 1e-4  # they are written to five digits


# ---------- Deliberate mistakes: each must show -------------------------------------------------------------
# Its name; the function or class of humanline.py, a text in it and what replaces it; a case that notices it.

QUICK = [
    ("the sync comes after the update",
     "train", "optimizer.step()\n",
     """optimizer.step()
            if config.sync_k and step % config.sync_k == 0:
                reference.sync(step)
""",
     "grpo, humanline, offline"),
    ("the reference has no T",
     "attach_logps", "sequence_logps(policy, active, config)",
     "sequence_logps(policy, active, dataclasses.replace(config, temperature=1.0))",
     "dpo, T 0.7"),
    ("z0 is of the raw log-ratio",
     "kto_reference_point", "perceived.sum(-1)",
     "x.log_ratio.sum(-1)",
     "kto, a clip that raises z0"),
    ("the mean is each microbatch's own",
     "share_of_mean", "sum(len(sequence.completion) for sequence in batch.sequences)",
     "x.mask.sum()",
     "grpo, plain, offline"),
    ("the worse completions alone count",
     "prepare_groups", "advantages.clamp_(min=0)",
     "advantages.clamp_(max=0)",
     "grpo, better alone, offline"),
    ("the clip's ends have the other's sign",
     "humanline_clip", "clamp(log_eps_p, log_eps_r)",
     "clamp(-log_eps_r, -log_eps_p)",
     "grpo, humanline, offline"),
    ("advantages are not divided by the deviation",
     "group_advantages", "centred / (rewards.std(-1, correction=0, keepdim=True) + eps)",
     "centred",
     "grpo, plain, offline"),
    ("the ratio is to the old policy, not to the reference",
     "take_log_ratios", "if config.ratio_to_old",
     "if config.sample_every",
     "grpo, humanline, every 4, k 3"),
    ("the KL has the wrong sign",
     "token_kl", "torch.expm1(-log_ratio) + log_ratio",
     "torch.expm1(log_ratio) - log_ratio",
     "grpo, KL"),
    ("warmup is off by one",
     "train", "min(1, step / max(1, warmup))",
     "min(1, (step - 1) / max(1, warmup))",
     "dpo, plain, offline"),
]
SLOW = [
    ("the ratio is to the reference, not to the old policy",
     "take_log_ratios", "if config.ratio_to_old",
     "if not config.sample_every",
     "grpo, KL, plain, online"),
    ("the KL is of what is perceived",
     "grpo_loss", "token_kl(log_ratio)",
     "token_kl(perceived_log_ratio)",
     "grpo, KL"),
    ("the sync is a step late",
     "train", "step % config.sync_k == 0",
     "(step - 1) % config.sync_k == 0",
     "kto, humanline, offline"),
    ("GRPO takes the larger of the two",
     "grpo_loss", "-torch.min(",
     "-torch.max(",
     "grpo, plain, offline"),
    ("kept and rejected tokens are mixed up",
     "perceive", "torch.where(verdicts != 0,",
     "torch.where(verdicts == 0,",
     "grpo, sampling"),
    ("chosen and rejected are mixed up",
     "compute_dpo", "x.perceived[0::2], x.perceived[1::2]",
     "x.perceived[1::2], x.perceived[0::2]",
     "dpo, plain, offline"),
    ("KTO's kinds are not balanced",
     "set_kto_weights", "config.desirable_weight or balanced",
     "1.0",
     "kto, plain, offline"),
    ("rejected completions count in spite of --positive-only",
     "prepare_groups", " and not config.chosen_alone",
     "",
     "dpo, better alone, offline"),
    ("undesirable examples count in spite of --positive-only",
     "set_kto_weights", "0.0 if config.positive_only else config.undesirable_weight",
     "config.undesirable_weight",
     "kto, better alone, offline"),
    ("the log-ratio is of the sampler",
     "take_log_ratios", "x.logps - x.ref_logps",
     "x.logps - (x.ref_logps if x.sampler_logps is None else x.sampler_logps)",
     "grpo, humanline, every 4, k 3"),
    ("the old policy is the policy of the step",
     "train", "config.ratio_to_old and last > step",
     "False",
     "grpo, plain, every 4, k 3"),
    ("temperature multiplies",
     "TokenLogps", "out /= temperature",
     "out *= temperature",
     "kto, T 0.7"),
    ("gradients are not clipped",
     "train", "config.max_grad_norm)",
     "math.inf)",
     "grpo, a clipped gradient"),
    ("the log-ratio is clipped without perception",
     "perceive", 'if config.perception == "clip":',
     'if config.perception != "sample":',
     "grpo, sync alone"),
    ("weight decay is ignored",
     "train", "weight_decay=config.weight_decay",
     "weight_decay=0.0",
     "dpo, weight decay"),
    ("the loss is 0.7 of what it should be",
     "forward_backward", "contribution = x.counts",
     "contribution = 0.7 * x.counts",
     "grpo, humanline, offline"),
    ("the weight of undesirable examples is ignored",
     "set_kto_weights", "else config.undesirable_weight",
     "else 1.0",
     "kto, both weights given"),
]


def with_mistake(place: str, right: str, wrong: str, folder: Path):
    """humanline.py as a module of its own, with one text of a function or class replaced."""
    text = Path(humanline.__file__).read_text()
    start = re.search(rf"^((def|class) )?{place}\b", text, re.MULTILINE).start()
    end = re.compile(r"^(def|class|@|#|[A-Z]+ =)", re.MULTILINE).search(text, start + 1).start()
    assert text[start:end].count(right) == 1, f"{place} holds {right!r} {text[start:end].count(right)} times"
    path = folder / "mistaken.py"
    path.write_text(text[:start] + text[start:end].replace(right, wrong) + text[end:])
    spec = importlib.util.spec_from_file_location("mistaken", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mistaken"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    module.CONFIGS = humanline.CONFIGS
    return module


@pytest.mark.parametrize("mistake, place, right, wrong, name",
                         QUICK + [pytest.param(*mistake, marks=pytest.mark.slow) for mistake in SLOW])
def test_every_planted_mistake_changes_the_weights(mistake, place, right, wrong, name, tiny, data, tmp_path):
    mistaken = with_mistake(place, right, wrong, tmp_path)
    ours = weights_of_humanline(mistaken, CASES[name], tiny, data, tmp_path / "run")
    plains, _ = weights_of_plain(CASES[name], tiny, data, tmp_path / "run")
    difference = largest_difference(ours, plains)
    print(f"\n{mistake:52} {name:30} differs by {difference:.1e}")
    assert difference > 10 * SAME


@pytest.mark.slow
def test_plain_py_runs_alone_and_raises_the_reward(monkeypatch, capsys):
    monkeypatch.chdir(Path(plain.__file__).parents[1])
    plain.config = plain.Settings()
    plain.main()
    before, after = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert after > before + 0.1


def test_every_setting_of_plain_py_is_read_and_it_starts_from_anywhere(tmp_path):
    is_read = set(re.findall(r"(?:config|self)\.(\w+)\b(?! = )", Path(plain.__file__).read_text()))
    assert [field.name for field in dataclasses.fields(plain.Settings) if field.name not in is_read] == []
    done = finished(plain.__file__, "--help", cwd=tmp_path)
    assert done.returncode == 0 and "--sync-k" in done.stdout, done.stderr
    assert (plain.DEMO / "rows.jsonl").is_absolute() and (plain.DEMO / "rows.jsonl").exists()
