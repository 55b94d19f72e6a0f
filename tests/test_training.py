"""The loop: the order of a step, the reference, global means, and that a run repeats itself."""

import dataclasses
import itertools
import math
import re
from statistics import fmean

import pytest
import torch
from conftest import gradient, logps_of, metrics, policy_of, random_batch, same_weights, short_run, timeless

import humanline
from humanline import Batch, Config


def batch_of_doubles(loss: str, prompts: int) -> Batch:
    """A random batch of 16 sequences whose prompts each come so many times in a row."""
    batch = random_batch(loss, 16)
    batch.reward = 0.5
    for sequences in (batch.sequences, batch.mismatched):
        for i, sequence in enumerate(sequences):
            sequence.prompt = sequences[i - i % prompts].prompt
            sequence.ref_logps = sequence.ref_logps.double()
    return batch


@pytest.mark.parametrize("loss, perception, prompts", [
    ("dpo", "clip", 1), ("dpo", "sample", 4), ("kto", "none", 1), ("kto", "sample", 4), ("grpo", "clip", 4),
    ("grpo", "sample", 1)])
def test_cutting_a_batch_into_microbatches_and_sharing_prompts_change_nothing(
        tiny, loss, perception, prompts):
    kl_beta = 0.1 if loss == "grpo" else 0.0
    policy, _, config = policy_of(tiny, loss=loss, perception=perception, kl_beta=kl_beta)
    policy.double()
    batch = batch_of_doubles(loss, prompts)
    policy.shares_prompts = False
    whole = gradient(policy, batch, config)
    report = humanline.forward_backward(policy, batch, config)
    assert whole.abs().max() > 0
    policy.shares_prompts = True
    counts, shared = [], []
    for config.microbatch_tokens in (1000, 55, 1):
        assert torch.allclose(gradient(policy, batch, config), whole, rtol=1e-6,
                              atol=1e-6 * float(whole.abs().max()))
        again = humanline.forward_backward(policy, batch, config)
        assert again == pytest.approx(report, rel=1e-6, abs=1e-12)
        [cuts] = humanline.cut(policy, batch.sequences, config)
        counts.append(len(cuts))
        rows = [row for rows in cuts for row in rows]
        shared.append(16 - len(rows))
        assert sorted(id(sequence) for row in rows for sequence in row) == sorted(map(id, batch.sequences))
        assert all(sequence.prompt == row[0].prompt for row in rows for sequence in row)
    assert counts[0] == 1 < counts[1] < counts[2] == (8 if loss == "dpo" else 16)
    assert (shared[0] > 0) == (prompts > 1) and shared[-1] == 0


@pytest.mark.parametrize("average, high", [("token", 0.4), ("sequence", 0.4), ("constant", 0.0)])
def test_grpo_averages_over_the_whole_batch_including_idle_sequences(tiny, average, high):
    policy, _, config = policy_of(tiny, average=average, epsilon=0.1, epsilon_high=high, microbatch_tokens=30,
                                  max_new_tokens=11)
    batch = random_batch("grpo")
    losses = []
    for sequence, logps in zip(batch.sequences, logps_of(policy, batch.sequences)):
        ratio = (logps - sequence.ref_logps).clamp(-1.5, 1.5).exp()
        clipped = ratio.clamp(0.9, 1 + high)
        losses.append(-torch.minimum(sequence.advantage * ratio, sequence.advantage * clipped))
    assert 0 < sum(sequence.advantage == 0 for sequence in batch.sequences) < 8
    expected = {
        "token": torch.cat(losses).mean(),
        "sequence": sum(loss.mean() for loss in losses) / 8,
        "constant": sum(loss.sum() for loss in losses) / (8 * 11),
    }
    report = humanline.forward_backward(policy, batch, config)
    assert report["loss"] == pytest.approx(expected[average].item(), rel=1e-4)


@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_sampling_rejects_with_the_seed_and_the_step(tiny, loss):
    policy, _, config = policy_of(tiny, loss=loss, perception="sample", seed=5)
    batch = random_batch(loss)
    batch.step = 3
    d = torch.cat([logps - sequence.ref_logps
                   for sequence, logps in zip(batch.sequences, logps_of(policy, batch.sequences))])
    generator = torch.Generator().manual_seed(humanline.seed_for(5, "reject", 3))
    verdicts = humanline.humanline_verdicts(d, torch.ones_like(d, dtype=torch.bool), generator=generator)
    report = humanline.forward_backward(policy, batch, config)
    for name, verdict in (("clamped_low", -1), ("unclamped", 0), ("clamped_high", 1)):
        assert report[name] == pytest.approx((verdicts == verdict).double().mean().item()), name
    assert 0 < report["clamped_low"] < 1


def test_a_batch_of_one_kind_and_an_empty_batch_can_be_trained_on(tiny):
    policy, _, config = policy_of(tiny, loss="kto", perception="clip")
    batch = random_batch("kto")
    batch.sequences = [sequence for sequence in batch.sequences if sequence.advantage < 0]
    batch.mismatched = []
    assert 0 < humanline.forward_backward(policy, batch, config)["loss"] < 1
    for perception in ("clip", "sample"):
        empty = Config(loss="dpo", perception=perception)
        assert humanline.forward_backward(policy, Batch(1, [], [], 0.5), empty)["loss"] == 0


def test_log_probs_of_the_policy_are_reported_for_all_and_for_wanted_completions(tiny):
    policy, _, config = policy_of(tiny, loss="grpo", perception="none")
    batch = random_batch("grpo")
    computed = [sequence for sequence in batch.sequences if sequence.advantage != 0]  # the others are left out
    wanted = [sequence for sequence in computed if sequence.advantage > 0]
    report = humanline.forward_backward(policy, batch, config)
    for name, sequences in (("logp", computed), ("logp_wanted", wanted)):
        mean = torch.cat(logps_of(policy, sequences)).mean().item()
        assert report[name] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_implicit_rewards_are_of_perceived_log_ratios_and_ess_of_the_importance_weights(tiny, loss):
    policy, _, config = policy_of(tiny, loss=loss, beta=0.3, log_eps_p=-0.5, log_eps_r=0.8)
    batch = random_batch(loss)
    rewards, weights = {True: [], False: []}, []
    for i, (sequence, logps) in enumerate(zip(batch.sequences, logps_of(policy, batch.sequences))):
        rewards[sequence.advantage > 0].append(0.3 * (logps - sequence.ref_logps).clamp(-0.5, 0.8).sum().item())
        weights.append(1 / (1 + i * i))  # its probability divided by the sampler's
        sequence.sampler_logps = logps - math.log(weights[-1]) / len(logps)
    report = humanline.forward_backward(policy, batch, config)
    margins = [better - worse for better, worse in zip(rewards[True], rewards[False])]
    if loss == "dpo":
        assert report["margin"] == pytest.approx(fmean(margins), rel=1e-4)
        signs = [(margin > 1e-6) - (margin < -1e-6) for margin in margins]
        assert {-1, 0, 1} == set(signs) and report["ordered"] == fmean((1 + sign) / 2 for sign in signs)
    else:
        assert not {"margin", "ordered"} & report.keys()
    assert report["reward_chosen"] == pytest.approx(fmean(rewards[True]), rel=1e-4)
    assert report["reward_rejected"] == pytest.approx(fmean(rewards[False]), rel=1e-4)
    assert report["ess"] == pytest.approx(fmean(weights) ** 2 / fmean(weight**2 for weight in weights),
                                          rel=1e-4)


@pytest.mark.parametrize("flags, data, names", [
    ("--loss dpo", "pairs", {"loss", "logp_wanted", "ordered", "margin"}),
    ("--loss grpo", "groups", {"loss", "logp_wanted"}), ("--sample-every 1", "prompts", {"loss", "reward"})])
def test_the_bar_shows_what_the_policy_does_and_not_the_rewards_of_the_data(
        run, monkeypatch, flags, data, names):
    shown = []
    monkeypatch.setattr(humanline.tqdm, "set_postfix", lambda bar, values, refresh: shown.append(values))
    [line] = metrics(run(f"{flags} --steps 1", data=data))
    assert shown == [{name: line[name] for name in names}]


def test_ess_is_of_the_completions_whose_sampler_is_known_however_the_batch_is_cut(tiny):
    policy, _, config = policy_of(tiny, loss="kto")
    batch, weights = random_batch("kto"), []
    for i, (sequence, logps) in enumerate(zip(batch.sequences, logps_of(policy, batch.sequences))):
        if i % 3:
            weights.append(1 / i)
            sequence.sampler_logps = logps + math.log(i) / len(logps)
    expected = fmean(weights) ** 2 / fmean(weight**2 for weight in weights)
    for config.microbatch_tokens in (1000, 40, 1):
        assert humanline.forward_backward(policy, batch, config)["ess"] == pytest.approx(expected, rel=1e-4)
    for sequence in batch.sequences:
        sequence.sampler_logps = None
    assert "ess" not in humanline.forward_backward(policy, batch, config)


def test_a_copy_of_the_settings_keeps_the_precision(tiny):
    policy, _, config = policy_of(tiny, dtype="mixed")
    [sequence, *_] = random_batch("grpo").sequences
    of_copy = humanline.sequence_logps(policy, [sequence], dataclasses.replace(config, seed=1))
    assert torch.equal(*humanline.sequence_logps(policy, [sequence], config), *of_copy)
    assert not torch.equal(*logps_of(policy, [sequence]), *of_copy)  # which is without autocast


def test_a_step_is_backward_clip_sync_step(run, monkeypatch):
    order = []

    def note(owner, name: str, what: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: order.append(what) or real(*args, **more))

    note(humanline, "forward_backward", "backward")
    note(torch.nn.utils, "clip_grad_norm_", "clip")
    note(humanline.Reference, "sync", "sync")
    note(torch.optim.AdamW, "step", "step")
    run("--sync-k 1 --steps 3")
    assert order == ["sync", *["backward", "clip", "sync", "step"] * 2, "backward", "clip", "step"]


@pytest.mark.parametrize("flags", ["--sync-k 2", "--sync-k 2 --sample-every 3"])
def test_a_sync_looks_ahead_only_to_the_next_sync(run, monkeypatch, flags):
    computed, sequence_logps = [], humanline.sequence_logps

    def note(policy, sequences, config):
        computed.extend(sequences)
        return sequence_logps(policy, sequences, config)

    monkeypatch.setattr(humanline, "sequence_logps", note)
    run(flags)
    assert len(computed) == len(set(map(id, computed))) > 0


@pytest.mark.parametrize("until", [None, 2, 6])
def test_a_sync_that_comes_earlier_than_was_said_replaces_all_log_probs_of_the_reference(tiny, until):
    policy, _, config = policy_of(tiny, loss="kto", steps=6, batch_size=4)
    groups = [humanline.Group(i, [10 + i], [[20, 3], [30 + i, 31, 3]], [1.0, 0.0]) for i in range(12)]
    batches = humanline.Batches(config, groups, 64)
    reference = humanline.Reference(policy, batches, config)
    reference.sync(6, batches.make(6))
    for rate in (0.9, 1.1):  # the second is the update of a step
        with torch.no_grad():
            policy.lm_head.weight.mul_(rate)
        if rate == 0.9:
            expected = humanline.sequence_logps(policy, batches.pending[0].sequences, config)
            reference.sync(until, batches.make(until or 0))
    batch = batches.next(1)
    reference.score(batch)
    for sequence, logps in zip(batch.sequences, expected):
        torch.testing.assert_close(sequence.ref_logps, logps, rtol=0, atol=1e-6)
    assert (reference.weights is None) == (until is not None)
    if until == 2:
        assert batches.pending[-1].sequences[0].ref_logps is None  # it waits for the next sync


RESUMED = [
    ("--loss dpo --sync-k 4 --perception sample", 2), ("--loss kto --no-humanline", 3),
    ("--sync-k 3 --positive-only", 5),
    ("--loss kto --sync-k 6 --log-eps-p -0.02", 3),  # whose z0 is not 0
    ("--loss grpo --sample-every 4 --sync-k 3", 5), ("--loss dpo --sample-every 1 --sync-k 3", 2),
    ("--loss kto --sample-every 3 --no-humanline", 5), ("--loss dpo --sample-every 3 --sync-k 7", 2),
    ("--loss grpo --no-humanline --sample-every 3 --kl-beta 0.1", 5)]


@pytest.mark.parametrize("flags, stop", RESUMED, ids=[flags for flags, _ in RESUMED])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(run, flags, stop):
    flags += " --steps 8 --save-every 1 --keep 9"
    whole = run(flags)
    resumed = run(f"{flags} --resume {whole}/checkpoint/step-{stop:08d}")
    assert timeless(resumed) == timeless(whole)[stop:] and same_weights(resumed, whole)


def test_a_checkpoint_holds_the_bits_of_log_probs_which_read_faster_than_numbers(run):
    folder = run("--loss kto --no-humanline --save-every 2 --keep 3") / "checkpoint" / "step-00000002"
    state = humanline.json.loads((folder / "state.json").read_text())
    sequences = [sequence for batch in state["batches"] for sequence in batch["sequences"]]
    assert len(sequences) == 4 * 4  # of four more steps
    assert all(len(sequence["ref_logps"]) == 8 * len(sequence["completion"]) for sequence in sequences)


def test_a_run_reads_all_of_its_data(run, tiny, data_files, capsys):
    both = f"{data_files['groups']} {data_files['labels']}"
    run("--loss kto", flags=short_run(tiny, both))
    assert f"{24 * 4 + 24} examples" in capsys.readouterr().out


def test_resume_starts_from_scratch_without_a_checkpoint_and_skips_a_damaged_one(run, tmp_path, capsys):
    out = str(tmp_path / "out")
    folder = run("--steps 4 --save-every 1 --keep 3 --resume latest", out=out)
    whole = (folder / "final" / "model.safetensors").read_bytes()
    names = sorted(path.name for path in (folder / "checkpoint").iterdir())
    assert names == ["step-00000002", "step-00000003", "step-00000004"]
    humanline.shutil.rmtree(folder / "final")
    humanline.shutil.rmtree(folder / "checkpoint" / "step-00000004")
    file = folder / "checkpoint" / "step-00000003" / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-9] + b"humanline")
    run("--steps 4 --save-every 1 --keep 3 --resume latest", out=out)
    assert "damaged: tensors.safetensors" in capsys.readouterr().err
    assert (folder / "final" / "model.safetensors").read_bytes() == whole and len(metrics(folder)) == 4
    assert humanline.find_damage(file.parent) == ""


@pytest.mark.parametrize("flags, expected", [
    ("--dtype mixed", "the run has --dtype float32, not mixed"),
    ("--lr 0.5", "the run has --lr 0.01, not 0.5"), ("--sync-k 2", "the run has --sync-k 24, not 2"),
    ("--steps 3", "the run has --steps 4, not 3"), ("--steps 6", "the run has --steps 4, not 6"),
    ("--keep 1 --microbatch-tokens 99", None)])
def test_only_what_changes_no_result_may_differ_in_a_resumed_run(run, tmp_path, flags, expected):
    out = str(tmp_path / "out")
    folder = run("--steps 4 --save-every 2", out=out)
    humanline.shutil.rmtree(folder / "final")
    if expected is None:
        assert (run(f"--steps 4 --save-every 2 --resume latest {flags}", out=out) / "final").exists()
    else:
        with pytest.raises(humanline.UserError, match=expected):
            run(f"--steps 4 --save-every 2 --resume latest {flags}", out=out)


def test_a_nan_gives_a_one_line_error_and_exit_status_1_and_keeps_the_last_checkpoint(
        tiny, data_files, tmp_path, monkeypatch, capsys):
    out, calls = tmp_path / "out", itertools.count(1)
    forward = humanline.forward_backward

    def poisoned(policy, batch, config):
        report = forward(policy, batch, config)
        if next(calls) == 4:
            next(policy.parameters()).grad[0, 0] = float("nan")
        return report

    monkeypatch.setattr(humanline, "forward_backward", poisoned)
    flags = f"--save-every 1 --steps 6 --sync-k 2 --out {out}"
    assert humanline.main(short_run(tiny, data_files["groups"], flags)) == 1
    expected = r"humanline.py: stopped: step 4: loss .*earlier checkpoints are in .*checkpoint.*\n"
    assert re.fullmatch(expected, capsys.readouterr().err)
    assert len(metrics(out)) == 3 and not (out / "final").exists()
    assert humanline.find_damage(out / "checkpoint" / "step-00000003") == ""


@pytest.mark.parametrize("warmup, rates", [
    ("0.5", [0.5, 1.0, 1.0, 1.0]), ("0.3", [0.5, 1.0, 1.0, 1.0]), ("0", [1.0] * 4)])
def test_warmup_is_linear_then_constant(run, warmup, rates):
    lines = metrics(run(f"--lr 0.01 --steps 4 --warmup {warmup}"))
    assert [line["lr"] for line in lines] == pytest.approx([0.01 * rate for rate in rates])


def test_gradients_are_clipped_to_the_norm(run, monkeypatch):
    norms, step = [], torch.optim.AdamW.step

    def spied(self, *args):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", spied)
    lines = metrics(run("--max-grad-norm 0.01"))
    assert all(line["grad_norm"] > 0.01 for line in lines)
    assert norms == [pytest.approx(0.01, rel=1e-3)] * len(lines)
