"""humanline.py computes what plain.py says: the same weights, whatever the loss, its form and its data.

`pytest tests/test_plain.py -s` prints the largest difference of each case.
"""

import dataclasses
import re
from pathlib import Path

import pytest
from against_plain import (SAME, largest_difference, module_of, weights_of_humanline, weights_of_plain,
                           write_data)
from conftest import finished
from safetensors.torch import load_file

import humanline
import plain

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
    "kto, a clip that raises z0, online": dict(loss="kto", sync_k=0, sample_every=4, log_eps_p=-0.02,
                                               log_eps_r=1.0),
    "kto, six steps": dict(loss="kto", steps=6, sample_every=4, sync_k=3, undesirable_weight=0.6),
    "kto, one example a step": dict(loss="kto", sync_k=2, batch_size=1),
    "kto, both weights given": dict(loss="kto", sync_k=2, desirable_weight=1.7, undesirable_weight=0.6),
    "grpo, a clipped gradient": dict(loss="grpo", sync_k=2, max_grad_norm=0.1),
    "dpo, weight decay": dict(loss="dpo", sync_k=2, weight_decay=0.1),
}


# Where both the loss with another source and the source with another loss are tested without --slow.
SLOW_CASES = {"dpo, plain, online", "kto, plain, online", "dpo, better alone, online",
              "kto, better alone, online", "grpo, better alone, online", "dpo, perception alone, online",
              "dpo, sync alone, online", "grpo, sync alone, online", "dpo, sampling", "kto, sampling",
              "grpo, six steps", "kto, T 0.7"}
assert SLOW_CASES < CASES.keys()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_CASES)) for name in CASES])
def test_humanline_trains_to_the_weights_of_the_plain_method(name, tiny, data, tmp_path):
    ours = weights_of_humanline(humanline, CASES[name], tiny, data, tmp_path / "run")
    plains, gap = weights_of_plain(plain, CASES[name], tiny, data, tmp_path / "run")
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
            if step in syncs:
                reference.sync(syncs[step], batches.make(syncs[step]))
""",
     "grpo, humanline, offline"),
    ("the reference has no T",
     "attach_logps", "sequence_logps(policy, sequences, config)",
     "sequence_logps(policy, sequences, dataclasses.replace(config, temperature=1.0))",
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
     "Config", '"old policy" if self.sample_every and not self.sync_k',
     '"old policy" if self.sample_every',
     "grpo, humanline, every 4, k 3"),
    ("the KL has the wrong sign",
     "token_kl", "torch.expm1(-log_ratio) + log_ratio",
     "torch.expm1(log_ratio) - log_ratio",
     "grpo, KL"),
    ("warmup is off by one",
     "train", "min(1, step / max(1, warmup))",
     "min(1, (step - 1) / max(1, warmup))",
     "dpo, plain, offline"),
    ("online without syncs, z0 is 0",
     "kto_reference_point", 'config.ratio_to == "old policy" and batch.is_on_policy',
     'config.ratio_to == "old policy"',
     "kto, a clip that raises z0, online"),
]
SLOW = [
    ("the ratio is to the reference, not to the old policy",
     "take_log_ratios", 'x.d if config.ratio_to == "reference"',
     "x.d if config.has_reference",
     "grpo, KL, plain, online"),
    ("the KL is of what is perceived",
     "grpo_loss", "token_kl(log_ratio)",
     "token_kl(perceived_log_ratio)",
     "grpo, KL"),
    ("the sync is a step late",
     "train", """if step in syncs:
                reference.sync(syncs[step], batches.make(syncs[step]))
""",
     """if step - 1 in syncs:
                reference.sync()
""",
     "kto, humanline, offline"),
    ("GRPO takes the larger of the two",
     "grpo_loss", "-torch.min(",
     "-torch.max(",
     "grpo, plain, offline"),
    ("kept and rejected tokens are mixed up",
     "perceive", "torch.where(x.verdicts != 0,",
     "torch.where(x.verdicts == 0,",
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
     "is_idle", "sequence.advantage == 0 and config.positive_only",
     "False",
     "dpo, better alone, offline"),
    ("the log-ratio is of the sampler",
     "take_log_ratios", "x.logps - x.ref_logps",
     "x.logps - torch.where(x.sampler_logps.isnan(), x.ref_logps, x.sampler_logps)",
     "grpo, humanline, every 4, k 3"),
    ("the old policy is the policy of the step",
     "Batches", "rollouts is not None and step == first",
     "rollouts is not None",
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
    module = module_of(path)
    module.CONFIGS = humanline.CONFIGS
    return module


@pytest.mark.parametrize("mistake, place, right, wrong, name",
                         QUICK + [pytest.param(*mistake, marks=pytest.mark.slow) for mistake in SLOW])
def test_every_planted_mistake_changes_the_weights(mistake, place, right, wrong, name, tiny, data, tmp_path):
    mistaken = with_mistake(place, right, wrong, tmp_path)
    ours = weights_of_humanline(mistaken, CASES[name], tiny, data, tmp_path / "run")
    plains, _ = weights_of_plain(plain, CASES[name], tiny, data, tmp_path / "run")
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
