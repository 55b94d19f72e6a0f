"""The code in configs/trl.md, run unchanged with the real TRL, which is an optional dependency."""

import math
import re

import pytest
import torch
from conftest import ROOT, rows_of

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.needs("trl")

import datasets
from transformers import TrainerCallback

K, STEPS = 2, 5


def lines() -> str:
    return re.search(r"```python\n(.*?)```", (ROOT / "configs" / "trl.md").read_text(encoding="utf-8"),
                     re.DOTALL)[1]


def weights(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(tiny, tmp_path, code: str):
    """Run the code for five steps. Returns the log, and the weights of policy and reference at the start of
    each step."""
    settings = dict(output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=STEPS,
                    learning_rate=1e-2, logging_steps=1, ref_model_sync_steps=K, report_to=[],
                    save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, seed=0)
    names = dict(model=tiny, args=trl.DPOConfig(**settings),
                 dataset=datasets.Dataset.from_list(rows_of("pairs", 24)))
    exec(code, names)
    trainer, seen = names["trainer"], []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            seen.append((weights(model), weights(trainer.ref_model)))

    trainer.add_callback(Watch())
    trainer.train()
    assert len(seen) == STEPS
    return [line for line in trainer.state.log_history if "loss" in line], seen


def test_the_first_loss_is_log_2_and_a_sync_takes_the_policy_of_the_step_before(tiny, tmp_path):
    assert len(lines().splitlines()) <= 15
    log, seen = train(tiny, tmp_path, lines())
    assert log[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert all(line["grad_norm"] > 0 for line in log)
    assert log[1]["loss"] != pytest.approx(math.log(2), abs=1e-4)
    same = lambda a, b: all(torch.equal(*pair) for pair in zip(a, b, strict=True))
    policies = [policy for policy, _ in seen]
    assert not any(same(a, b) for a, b in zip(policies, policies[1:]))
    for step, (_, reference) in enumerate(seen):
        synced = step // K * K  # the newest sync before this step; 0 is the start
        assert same(reference, policies[max(0, synced - 1)]), f"step {step + 1}"


def test_log_ratios_outside_the_clip_pass_no_gradient_and_inside_it_change_nothing(tiny, tmp_path):
    def with_clip(low, high):
        code = lines().replace("-1.5, 1.5", f"{low}, {high}")
        assert code != lines()
        return train(tiny, tmp_path, code)[0]

    closed = with_clip(1e-6, 2e-6)  # every log-ratio lies outside, the first step's zeros too
    assert all(line["grad_norm"] == 0 for line in closed)
    without_clip = re.sub(r"humanline_clip\((.*?), -1.5, 1.5\)", r"(\1)", lines())
    plain, open_clip = train(tiny, tmp_path, without_clip)[0], with_clip(-1e6, 1e6)
    assert [line["loss"] for line in plain] == [line["loss"] for line in open_clip]
    assert plain[-1]["loss"] != train(tiny, tmp_path, lines())[0][-1]["loss"]


def test_without_clip_and_sync_the_lines_equal_plain_trl_dpo(tiny, tmp_path):
    code = lines().replace("-1.5, 1.5", "-1e6, 1e6")
    code = code.replace("ref_model_sync_steps == 0", "ref_model_sync_steps == -1")
    ours = train(tiny, tmp_path, code)[0]
    code = "import trl\ntrainer = trl.DPOTrainer(model, args=args, train_dataset=dataset)"
    theirs = train(tiny, tmp_path, code)[0]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], abs=1e-5)
