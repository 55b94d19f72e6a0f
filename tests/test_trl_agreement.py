"""Complete runs give the same weights as TRL, an independent implementation whose methods run unchanged.
Where its conventions differ from ours, a test says so and chooses settings for which both agree.

Both use the same tiny model, rows, rewards and completions, AdamW without weight decay (because the Trainer
exempts norms from it, and we do not), a constant learning rate, and gradients that are clipped in every step.
"""

import collections
import random
import runpy

import pytest
import torch
from bases import character_tokenizer
from conftest import rows_of, write_jsonl

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.needs("trl")

import datasets
from transformers import TrainerCallback

import humanline
from humanline import Batch

# at AdamW's own epsilon, 1e-8, a step would make noise of gradients that are all but 0
LR, EPS, NORM = 3e-3, 1e-5, 0.2
Weights = dict[str, torch.Tensor]


def copy_of(model) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def run_ours(
    monkeypatch, tiny, out, rows: list[dict], flags: str
) -> tuple[list[Weights], list[Batch], list[dict]]:
    """Returns the weights before each step and after the last one, the batches (whose sequences know their
    row) and the metrics."""
    weights, batches, row_of_prompt = [], [], {}
    forward_backward, prepare_groups = humanline.forward_backward, humanline.prepare_groups

    def noted(groups, config):
        row_of_prompt.update({tuple(group.prompt): group.row for group in groups})
        return prepare_groups(groups, config)

    def watched(policy, batch, *args):
        weights.append(copy_of(policy))
        batches.append(batch)
        for sequence in batch.sequences:
            sequence.row = row_of_prompt[tuple(sequence.prompt)]
        return forward_backward(policy, batch, *args)

    common = (f"--model {tiny} --data {write_jsonl(out / 'rows.jsonl', rows)} --no-humanline "
              f"--warmup 0 --lr {LR} --adam-eps {EPS} --max-grad-norm {NORM} --out {out / 'run'}")
    with monkeypatch.context() as patch:
        patch.setattr(humanline, "forward_backward", watched)
        patch.setattr(humanline, "prepare_groups", noted)
        run = humanline.train(humanline.parse_config([*common.split(), *flags.split()]))
    return [*weights, copy_of(run.policy)], batches, list(humanline.read_lines(out / "run" / "metrics.jsonl"))


def dataset(rows: list[dict], order: list[int]):
    """The rows as dialogues."""
    def say(key, value):
        return [dict(role="user" if key == "prompt" else "assistant", content=value)]

    return datasets.Dataset.from_list([
        {key: say(key, value) if isinstance(value, str) else value for key, value in rows[i].items()}
        for i in order])


def settings(out, steps: int, batch_size: int) -> dict:
    return dict(output_dir=str(out), max_steps=steps, per_device_train_batch_size=batch_size,
                learning_rate=LR, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
                adam_epsilon=EPS, max_grad_norm=NORM, gradient_checkpointing=False, use_cpu=True, bf16=False,
                report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True)


def distance(ours: Weights, theirs: Weights) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def check_same(ours: list[Weights], metrics: list[dict], trainer) -> list[dict]:
    """Check that weights agree to 1e-5 after every step, which moves them by far more than that. AdamW and
    gradient clipping hide the length of a gradient, so losses and gradient norms are compared, too.

    Returns the trainer's log.
    """
    theirs = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            theirs.append(copy_of(model))

    trainer.add_callback(Watch())
    trainer.train()
    theirs.append(copy_of(trainer.model))
    log = [line for line in trainer.state.log_history if "loss" in line]
    assert len(ours) == len(theirs) == len(metrics) + 1 == len(log) + 1
    assert distance(ours[0], theirs[0]) == 0
    differences = {name: max(abs(mine[name] - its[name]) for mine, its in zip(metrics, log))
                   for name in ("loss", "grad_norm")}
    print("largest differences: weights", max(map(distance, ours, theirs)), differences)
    for step, (mine, its) in enumerate(zip(metrics, log), 1):
        assert distance(ours[step], ours[step - 1]) > 1e-3, f"step {step}"
        assert distance(ours[step], theirs[step]) < 1e-5, f"step {step}"
        for name in ("loss", "grad_norm"):
            assert mine[name] == pytest.approx(its[name], 5e-5, 1e-5), f"step {step}, {name}"
        assert mine["grad_norm"] > NORM
    return log


# GRPO: what is drawn, and in which order, is given.

GROUP, PROMPTS, NEW_TOKENS, STEPS = 4, 3, 8, 4
LENGTHS = [2, 8, 5, 3]


class Dealer:
    """Returns the same completions to both trainers, one after another for each prompt."""

    def __init__(self, end: int):
        self.end, self.given = end, collections.Counter()

    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        completions = []
        for prompt in prompts:
            number = self.given[tuple(prompt)]
            self.given[tuple(prompt)] += 1
            chance, length = random.Random(f"{prompt} {number}"), LENGTHS[(sum(prompt) + number) % GROUP]
            ids = [chance.randrange(8, 100) for _ in range(length)]  # of 8 tokens: cut off, without an end
            completions.append(ids if length == NEW_TOKENS else [*ids[:-1], self.end])
        return completions


# Drawings for two steps each, so that policy, old policy and initial policy are three; and for one.
OURS_AND_TRLS = {
    "by token": (2, "--average token", dict(loss_type="dapo")),
    "by sequence, at temperature 0.7": (2, "--average sequence --temperature 0.7",
                                        dict(loss_type="grpo", temperature=0.7)),
    "by a constant, with an upper epsilon": (2, "--average constant --epsilon-high 0.28",
                                             dict(loss_type="dr_grpo", epsilon_high=0.28)),
    "online": (1, "", dict(loss_type="dapo")),
}


@pytest.mark.parametrize("every, flags, more", OURS_AND_TRLS.values(), ids=OURS_AND_TRLS)
def test_grpo_with_kl_steps_to_trls_weights(monkeypatch, tiny, tmp_path, varied, every, flags, more):
    """The ratio is to the old policy, the KL to the initial policy.

    The conventions differ as follows. TRL multiplies the KL by the ratio, which is turned off here. TRL
    divides rewards by the sample standard deviation + 1e-4, we by the population standard deviation + 0.01;
    here, neither divides. TRL's `dapo` divides by the mean token count of all steps of a generation batch, we
    by that of the step; here, all groups have the same lengths. TRL shuffles a generation batch over its
    steps, we keep the prompts of each step; here, TRL does so, too.
    """
    reward = runpy.run_path(varied.removesuffix(":varied"))["varied"]
    rows = rows_of("prompts", PROMPTS * STEPS)
    mine, its = (Dealer(character_tokenizer().eos_token_id) for _ in range(2))
    monkeypatch.setattr(humanline, "sample",
                        lambda policy, prompts, *args: [(ids, [0.0] * len(ids)) for ids in mine(prompts)])
    ours, batches, metrics = run_ours(
        monkeypatch, tiny, tmp_path, rows, f"--loss grpo --sample-every {every} --group-size {GROUP} "
        f"--reward {varied} --batch-size {PROMPTS} --max-new-tokens {NEW_TOKENS} --steps {STEPS} "
        f"--no-scale-rewards --kl-beta 0.04 {flags}")

    class Given(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            return its(prompt_ids), None

    order = list(dict.fromkeys(sequence.row for batch in batches for sequence in batch.sequences))
    assert len(order) == PROMPTS * STEPS  # every prompt has its turn, and just once
    args = trl.GRPOConfig(**settings(tmp_path / "theirs", STEPS, PROMPTS * GROUP), **more, beta=0.04,
                          num_generations=GROUP, max_completion_length=NEW_TOKENS, steps_per_generation=every,
                          scale_rewards="none", shuffle_dataset=False, use_bias_correction_kl=False)
    # A step keeps its own prompts.
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)
    log = check_same(ours, metrics, Given(
        tiny, args=args, train_dataset=dataset(rows, order),
        reward_funcs=lambda prompts, completions, **columns: reward(
            prompts, [completion[0]["content"] for completion in completions], None)))
    assert its.given == mine.given  # the same prompts, token by token
    assert [line["kl"] for line in metrics] == pytest.approx([line["kl"] for line in log], abs=1e-5)
    assert log[0]["kl"] == 0 < min(line["kl"] for line in log[1:])  # a drawing starts no new reference
    # None is clipped right after a drawing.
    clipped = [0 < line["clip_ratio/region_mean"] < 1 for line in log]
    assert clipped == [step % every > 0 for step in range(STEPS)]


def test_dpo_steps_to_trls_weights(monkeypatch, tiny, tmp_path):
    rows = rows_of("pairs", 12)
    ours, batches, metrics = run_ours(monkeypatch, tiny, tmp_path, rows,
                                      "--loss dpo --batch-size 6 --steps 2")
    order = [sequence.row for batch in batches for sequence in batch.sequences[::2]]
    args = trl.DPOConfig(**settings(tmp_path / "theirs", 2, 6), train_sampling_strategy="sequential")
    check_same(ours, metrics, trl.DPOTrainer(tiny, args=args, train_dataset=dataset(rows, order)))


@pytest.mark.parametrize("desirable, undesirable", [(1.0, 1.0), (1.5, 0.7)])
def test_kto_steps_to_trls_weights(monkeypatch, tiny, tmp_path, desirable, undesirable):
    """For z₀, TRL combines each prompt with the preceding completion in the batch, we with the following one,
    so TRL gets every batch in reverse order. TRL's default weights are 1, ours balance both labels; here,
    both are set."""
    rows, count = rows_of("labels", 12), 6
    ours, batches, metrics = run_ours(
        monkeypatch, tiny, tmp_path, rows,
        f"--loss kto --batch-size {count} --steps 2 --desirable-weight {desirable} "
        f"--undesirable-weight {undesirable}")
    order = [sequence.row for batch in batches for sequence in reversed(batch.sequences)]
    args = trl.KTOConfig(**settings(tmp_path / "theirs", 2, count), desirable_weight=desirable,
                         undesirable_weight=undesirable)
    trainer = trl.KTOTrainer(tiny, args=args, train_dataset=dataset(rows, order))
    their_pairs = [(row["prompt_ids"], row["KL_completion_ids"]) for row in trainer.train_dataset]
    assert their_pairs == [(s.prompt, s.completion) for batch in batches for s in reversed(batch.mismatched)]
    log = check_same(ours, metrics, trainer)
    assert [line["z0"] for line in metrics] == pytest.approx([line["kl"] for line in log], abs=1e-5)
    assert log[0]["kl"] == 0 and (log[1]["kl"] > 0) == (desirable > undesirable)  # else cut off at 0, by both
