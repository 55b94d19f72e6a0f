"""Our losses and whole runs against the real TRL's, code that nobody here wrote. Its own methods run, unchanged; where
its conventions are others than ours, a test says so and chooses settings in which they meet."""

import collections
import dataclasses
import random
import runpy
import types

import pytest
import torch
from bases import character_tokenizer
from conftest import rows_of, write_jsonl

trl = pytest.importorskip("trl")

import datasets
from transformers import TrainerCallback
from trl.trainer import grpo_trainer

import humanline
from humanline import LOSSES, Batch, Config, Microbatch, Sequence

# ---------- The loss and its gradient, on random tensors --------------------------------------------------------------

AVERAGES = {"grpo": "sequence", "dapo": "token", "dr_grpo": "constant"}  # TRL's loss type: our --average
LONGEST = 9  # --max-new-tokens


@dataclasses.dataclass
class Draw:
    """Random log-probs of three policies, in fp64, far enough apart that the ratio is clipped on both sides."""

    logps: torch.Tensor  # (N, T), of the policy
    old_logps: torch.Tensor
    ref_logps: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor  # (N,)
    epsilon: float
    epsilon_high: float


def draw(seed: int) -> Draw:
    generator = torch.Generator().manual_seed(seed)
    count, width = (int(torch.randint(2, LONGEST + 1, (), generator=generator)) for _ in range(2))
    normal = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)
    lengths = torch.randint(1, width + 1, (count,), generator=generator)
    old_logps = -3 + normal(count, width)
    epsilon, epsilon_high = (0.05 + 0.4 * torch.rand(2, dtype=torch.float64, generator=generator)).tolist()
    return Draw(old_logps + 0.4 * normal(count, width), old_logps, -3 + normal(count, width),
                torch.arange(width) < lengths[:, None], normal(count), epsilon, epsilon_high)


def loss_of_trl(given: Draw, loss_type: str, beta: float, corrected: bool = False):
    """The loss and its gradient, by TRL's method on a stand-in for the trainer, whose model yields the given log-probs.

    corrected: `use_bias_correction_kl`, TRL's default: the KL term times the ratio (DeepSeek-V3.2; not Shao et al.).
    """
    logps = given.logps.clone().requires_grad_()
    zeros = torch.zeros_like(given.logps)
    trainer = types.SimpleNamespace(
        loss_type=loss_type, beta=beta, importance_sampling_level="token", epsilon_low=given.epsilon,
        epsilon_high=given.epsilon_high, max_completion_length=LONGEST, model=types.SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logps, zeros, None),
        args=types.SimpleNamespace(delta=None, use_bias_correction_kl=corrected, steps_per_generation=1),
        current_gradient_accumulation_steps=1, aux_loss_enabled=False, top_entropy_quantile=1.0, use_vllm=False,
        off_policy_mask_threshold=None, _entropy_bonus_enabled=False, _metrics=collections.defaultdict(
            lambda: collections.defaultdict(list)),
        accelerator=types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x))
    ids, mask = torch.zeros(given.mask.shape, dtype=torch.long), given.mask.long()
    inputs = dict(prompt_ids=ids[:, :1], prompt_mask=mask[:, :1], completion_ids=ids, completion_mask=mask,
                  advantages=given.advantages, old_per_token_logps=given.old_logps,
                  ref_per_token_logps=given.ref_logps, num_items_in_batch=mask.sum())
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss.detach(), torch.autograd.grad(loss, logps)[0]


def loss_of_ours(given: Draw, loss_type: str, beta: float):
    """The same by ours, in two microbatches."""
    config = Config(average=AVERAGES[loss_type], max_new_tokens=LONGEST, epsilon=given.epsilon,
                    epsilon_high=given.epsilon_high, kl_beta=beta)
    batch = Batch(1, [Sequence([0], [0] * int(mask.sum())) for mask in given.mask], [], None)
    logps, loss = given.logps.clone().requires_grad_(), 0.0
    for part in (slice(0, 1), slice(1, None)):
        mask, advantages = given.mask[part], given.advantages[part]
        to_reference, to_old = ((logps - other)[part] * mask for other in (given.ref_logps, given.old_logps))
        x = Microbatch([], mask, None, None, None, None, advantages, advantages > 0, torch.ones(len(mask)), 1)
        losses = LOSSES["grpo"].compute(x, to_reference, to_old, config)
        loss = loss + humanline.share_of_mean(losses, x, batch, config)
    return loss.detach(), torch.autograd.grad(loss, logps)[0]


def check_equal(ours, theirs, seed: int) -> None:
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.dtype == its.dtype == torch.float64
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-6, msg=lambda text: f"draw {seed}: {text}")


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", AVERAGES)
def test_the_grpo_loss_and_its_gradient_are_trls(loss_type, beta):
    gradients = []
    for seed in range(200):
        given = draw(seed)
        theirs = loss_of_trl(given, loss_type, beta)
        check_equal(loss_of_ours(given, loss_type, beta), theirs, seed)
        gradients.append(theirs[1])
    passing = torch.cat([(gradient != 0).flatten() for gradient in gradients]).float().mean()
    assert beta or 0.2 < passing < 0.8  # some tokens are clipped, others not


def test_without_an_upper_epsilon_the_lower_one_serves_for_both():
    for seed in range(200):
        given = draw(seed)
        given.epsilon_high = given.epsilon
        theirs = loss_of_trl(given, "dapo", 0.04)
        given.epsilon_high = None
        check_equal(loss_of_ours(given, "dapo", 0.04), theirs, seed)


def test_trls_default_kl_term_is_ours_times_the_ratio(monkeypatch):
    """`use_bias_correction_kl`, which the tests here switch off: another gradient even where the ratio is 1."""
    assert trl.GRPOConfig(use_cpu=True, bf16=False).use_bias_correction_kl
    published = humanline.grpo_loss

    def with_correction(log_ratio, perceived, advantages, epsilon, kl_beta, epsilon_high):
        kl = kl_beta * humanline.token_kl(log_ratio) * perceived.exp()
        return published(log_ratio, perceived, advantages, epsilon, 0.0, epsilon_high) + kl

    for seed in range(200):
        given = draw(seed)
        if seed % 2:
            given.old_logps = given.logps
        theirs = loss_of_trl(given, "dapo", 0.04, corrected=True)
        assert (loss_of_ours(given, "dapo", 0.04)[1] - theirs[1]).abs().max() > 1e-5
        with monkeypatch.context() as patch:
            patch.setattr(humanline, "grpo_loss", with_correction)
            check_equal(loss_of_ours(given, "dapo", 0.04), theirs, seed)


# ---------- Whole runs ------------------------------------------------------------------------------------------------
# The same tiny model, rows, rewards and completions; AdamW without weight decay (from which the Trainer spares norms,
# and we nothing); a constant learning rate; and gradients longer than the norm to which both cut them.

LR, EPS, NORM = 3e-3, 1e-5, 0.2  # at AdamW's own epsilon, 1e-8, a step would make noise of gradients that are all but 0
Weights = dict[str, torch.Tensor]


def copy_of(model) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def run_ours(monkeypatch, tiny, out, rows: list[dict], flags: str) -> tuple[list[Weights], list[Batch], list[dict]]:
    """The weights before each step and after the last, the batches, and the metrics."""
    weights, batches, forward_backward = [], [], humanline.forward_backward

    def watched(policy, batch, *args):
        weights.append(copy_of(policy))
        batches.append(batch)
        return forward_backward(policy, batch, *args)

    common = (f"--model {tiny} --data {write_jsonl(out / 'rows.jsonl', rows)} --no-humanline --warmup 0 --lr {LR} "
              f"--adam-eps {EPS} --max-grad-norm {NORM} --out {out / 'run'}")
    with monkeypatch.context() as patch:
        patch.setattr(humanline, "forward_backward", watched)
        run = humanline.train(humanline.parse_config([*common.split(), *flags.split()]))
    return [*weights, copy_of(run.policy)], batches, humanline.read_metrics(out / "run" / "metrics.jsonl")


def run_theirs(trainer) -> tuple[list[Weights], list[dict]]:
    """The weights before each step and after the last, and the log."""
    weights = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            weights.append(copy_of(model))

    trainer.add_callback(Watch())
    trainer.train()
    return [*weights, copy_of(trainer.model)], [line for line in trainer.state.log_history if "loss" in line]


def settings(out, steps: int, batch_size: int) -> dict:
    return dict(output_dir=str(out), max_steps=steps, per_device_train_batch_size=batch_size, learning_rate=LR,
                lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, adam_epsilon=EPS, max_grad_norm=NORM,
                gradient_checkpointing=False, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
                logging_steps=1, disable_tqdm=True)


def distance(ours: Weights, theirs: Weights) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def check_same(ours: list[Weights], metrics: list[dict], theirs: list[Weights], log: list[dict], steps: int) -> None:
    """Weights equal to 1e-5 after every step, each of which moves them by far more than that. AdamW and the clip, here
    of every gradient, hide how long a gradient is: so losses and gradient norms are compared, too."""
    assert len(ours) == len(theirs) == steps + 1 and len(metrics) == len(log) == steps
    assert distance(ours[0], theirs[0]) == 0
    for step in range(1, steps + 1):
        assert distance(ours[step], ours[step - 1]) > 1e-3, f"step {step}"
        assert distance(ours[step], theirs[step]) < 1e-5, f"step {step}"
        for name in ("loss", "grad_norm"):
            assert metrics[step - 1][name] == pytest.approx(log[step - 1][name], 5e-5, 1e-5), f"step {step}, {name}"
        assert metrics[step - 1]["grad_norm"] > NORM


def messages(role: str, text: str) -> list[dict]:
    return [dict(role=role, content=text)]


# GRPO: what is drawn, and in which order, is given.

GROUP, PROMPTS, NEW_TOKENS = 4, 3, 8
LENGTHS = [2, 8, 5, 3]


class Dealer:
    """Gives whoever asks the same completions: of each prompt one after the other."""

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


def both_grpo(monkeypatch, tiny, out, varied, flags: str = "", *, every: int, steps: int, **more):
    """Run GRPO with KL here and in TRL on the same drawings; (weights, metrics) of ours and of TRL's."""
    reward = runpy.run_path(varied.removesuffix(":varied"))["varied"]
    end, rows = character_tokenizer().eos_token_id, rows_of("prompts", PROMPTS * steps)

    dealer = Dealer(end)
    with monkeypatch.context() as patch:
        patch.setattr(humanline, "sample",
                      lambda policy, prompts, *args: [(ids, [0.0] * len(ids)) for ids in dealer(prompts)])
        ours, batches, metrics = run_ours(
            monkeypatch, tiny, out, rows, f"--loss grpo --sample-every {every} --group-size {GROUP} --reward {varied} "
            f"--batch-size {PROMPTS} --max-new-tokens {NEW_TOKENS} --steps {steps} --no-scale-rewards {flags}")

    class Given(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            return deal(prompt_ids), None

    deal = Dealer(end)
    order = list(dict.fromkeys(sequence.row for batch in batches for sequence in batch.sequences))
    assert len(order) == PROMPTS * steps  # every prompt has its turn, and just once
    args = trl.GRPOConfig(**settings(out / "theirs", steps, PROMPTS * GROUP), **more, num_generations=GROUP,
                          max_completion_length=NEW_TOKENS, steps_per_generation=every, scale_rewards="none",
                          shuffle_dataset=False, use_bias_correction_kl=False)
    with monkeypatch.context() as patch:
        patch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)  # a step keeps its own prompts
        theirs, log = run_theirs(Given(
            tiny, args=args, train_dataset=datasets.Dataset.from_list(
                [dict(prompt=messages("user", rows[row]["prompt"])) for row in order]),
            reward_funcs=lambda prompts, completions, **columns: reward(
                prompts, [completion[0]["content"] for completion in completions], None)))
    assert deal.given == dealer.given  # the same prompts, token by token
    return (ours, metrics), (theirs, log)


OURS_AND_TRLS = {  # two drawings for two steps each, so that policy, old policy and initial policy are three
    "by token": ("--average token", dict(loss_type="dapo")),
    "by sequence, at temperature 0.7": ("--average sequence --temperature 0.7",
                                        dict(loss_type="grpo", temperature=0.7)),
    "by a constant, with an upper epsilon": ("--average constant --epsilon-high 0.28",
                                             dict(loss_type="dr_grpo", epsilon_high=0.28)),
}


@pytest.mark.parametrize("flags, more", OURS_AND_TRLS.values(), ids=OURS_AND_TRLS)
def test_grpo_with_kl_steps_to_trls_weights(monkeypatch, tiny, tmp_path, varied, flags, more):
    """The ratio is to the policy that drew, the KL to the initial policy.

    Where the conventions differ: TRL multiplies the KL by the ratio; here it is told not to. TRL divides rewards by the
    sample's standard deviation + 1e-4, we by the population's + 0.01; here neither divides. TRL's `dapo` divides by the
    mean token count of a drawing's steps, we by each step's own; here all groups have the same lengths. TRL shuffles a
    drawing over its steps, we keep each step's prompts; here TRL does so, too.
    """
    (ours, metrics), (theirs, log) = both_grpo(
        monkeypatch, tiny, tmp_path, varied, f"--kl-beta 0.04 {flags}", every=2, steps=4, beta=0.04, **more)
    check_same(ours, metrics, theirs, log, 4)
    assert [line["kl"] for line in metrics] == pytest.approx([line["kl"] for line in log], abs=1e-5)
    assert log[0]["kl"] == 0 < log[1]["kl"] < log[2]["kl"]  # a drawing starts no new reference
    clipped = [line["clip_ratio/region_mean"] for line in log]
    assert clipped[0] == clipped[2] == 0 < clipped[1] < 1  # none right after a drawing


def test_fully_online_grpo_with_kl_steps_to_trls_weights(monkeypatch, tiny, tmp_path, varied):
    """As above, but drawing for every step: the ratio is 1, and the KL is not 0."""
    (ours, metrics), (theirs, log) = both_grpo(monkeypatch, tiny, tmp_path, varied, "--kl-beta 0.04", every=1, steps=2,
                                               beta=0.04, loss_type="dapo")
    check_same(ours, metrics, theirs, log, 2)
    assert log[0]["kl"] == 0 < log[1]["kl"]


def test_another_kl_weight_ends_elsewhere(monkeypatch, tiny, tmp_path, varied):
    (ours, _), (theirs, _) = both_grpo(monkeypatch, tiny, tmp_path, varied, "--kl-beta 0.05", every=1, steps=2,
                                       beta=0.04, loss_type="dapo")
    assert distance(ours[1], theirs[1]) < 1e-5 < distance(ours[2], theirs[2])


def test_dpo_steps_to_trls_weights(monkeypatch, tiny, tmp_path):
    rows = rows_of("pairs", 12)
    ours, batches, metrics = run_ours(monkeypatch, tiny, tmp_path, rows, "--loss dpo --batch-size 6 --steps 2")
    order = [sequence.row for batch in batches for sequence in batch.sequences[::2]]
    theirs, log = run_theirs(trl.DPOTrainer(
        tiny, args=trl.DPOConfig(**settings(tmp_path / "theirs", 2, 6), train_sampling_strategy="sequential"),
        train_dataset=datasets.Dataset.from_list([
            dict(prompt=messages("user", rows[row]["prompt"]), chosen=messages("assistant", rows[row]["chosen"]),
                 rejected=messages("assistant", rows[row]["rejected"])) for row in order])))
    check_same(ours, metrics, theirs, log, 2)


@pytest.mark.parametrize("desirable, undesirable", [(1.0, 1.0), (1.5, 0.7)])
def test_kto_steps_to_trls_weights(monkeypatch, tiny, tmp_path, desirable, undesirable):
    """TRL takes z₀ from each prompt with the completion before its own in the batch, we with the one after it, so TRL
    is given every batch backwards. Its weights are 1 unless set, ours balance the two kinds; here both are set."""
    rows, count = rows_of("labels", 12), 6
    ours, batches, metrics = run_ours(
        monkeypatch, tiny, tmp_path, rows, f"--loss kto --batch-size {count} --steps 2 --desirable-weight {desirable} "
        f"--undesirable-weight {undesirable}")
    order = [sequence.row for batch in batches for sequence in reversed(batch.sequences)]
    args = trl.KTOConfig(**settings(tmp_path / "theirs", 2, count), desirable_weight=desirable,
                         undesirable_weight=undesirable)
    trainer = trl.KTOTrainer(tiny, args=args, train_dataset=datasets.Dataset.from_list([
        dict(prompt=messages("user", rows[row]["prompt"]), completion=messages("assistant", rows[row]["completion"]),
             label=rows[row]["label"]) for row in order]))
    their_pairs = [(row["prompt_ids"], row["KL_completion_ids"]) for row in trainer.train_dataset]
    assert their_pairs == [(s.prompt, s.completion) for batch in batches for s in reversed(batch.mismatched)]
    theirs, log = run_theirs(trainer)
    check_same(ours, metrics, theirs, log, 2)
    assert [line["z0"] for line in metrics] == pytest.approx([line["kl"] for line in log], abs=1e-5)
    assert log[0]["kl"] == 0 and (log[1]["kl"] > 0) == (desirable > undesirable)  # else cut off at 0, by both
