"""The loop: the order of a step, the reference, global means, and that a run repeats itself."""

import copy
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from conftest import metrics, random_batch, same_weights, timeless

import humanline
from humanline import Batch, Config

OFFLINE, SPARSE, ONLINE = "--sample-every 0", "--sample-every 4", "--sample-every 1"


def policy_of(tiny, **settings):
    config = Config(model=tiny, batch_size=4, **settings)
    policy, tokenizer = humanline.load_policy(config, torch.device("cpu"))
    return policy, tokenizer, config


def gradient(policy, batch, config) -> torch.Tensor:
    policy.zero_grad()
    humanline.forward_backward(policy, batch, config)
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def own_logps(policy, sequence) -> torch.Tensor:
    return humanline.log_probs(policy, [[sequence]])[0]


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
def test_cutting_a_batch_into_microbatches_and_sharing_prompts_change_nothing(tiny, loss, perception, prompts):
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
    for tokens in (1000, 55, 1):
        small = dataclasses.replace(config, microbatch_tokens=tokens)
        assert torch.allclose(gradient(policy, batch, small), whole, rtol=1e-6, atol=1e-6 * float(whole.abs().max()))
        again = humanline.forward_backward(policy, batch, small)
        assert again == pytest.approx(report, rel=1e-6, abs=1e-12)
        [cuts] = humanline.cut(batch.sequences, small, True)
        counts.append(len(cuts))
        rows = [row for rows in cuts for row in rows]
        shared.append(16 - len(rows))
        assert sorted(id(sequence) for row in rows for sequence in row) == sorted(map(id, batch.sequences))
        assert all(sequence.prompt == row[0].prompt for row in rows for sequence in row)
    assert counts[0] == 1 < counts[1] < counts[2] == (8 if loss == "dpo" else 16)
    assert (shared[0] > 0) == (prompts > 1) and shared[-1] == 0


@pytest.mark.parametrize("loss", ["dpo", "grpo"])
def test_ranks_share_a_batch_without_gap_or_overlap(monkeypatch, loss):
    batch = batch_of_doubles(loss, 4)
    monkeypatch.setattr(humanline, "WORLD_SIZE", 3)
    cuts = humanline.cut(batch.sequences, Config(loss=loss, microbatch_tokens=40), True)
    of_rank = [[sequence for rows in of_rank for row in rows for sequence in row] for of_rank in cuts]
    assert len(cuts) == 3 and all(of_rank)
    assert sorted(map(id, itertools.chain(*of_rank))) == sorted(map(id, batch.sequences))
    for sequences in of_rank if loss == "dpo" else []:
        assert [sequence.is_chosen for sequence in sequences] == [True, False] * (len(sequences) // 2)


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_grpo_averages_over_the_tokens_or_the_sequences_of_the_whole_batch(tiny, average):
    policy, _, config = policy_of(tiny, loss="grpo", perception="clip", average=average, microbatch_tokens=30)
    batch = random_batch("grpo")
    losses = []
    for sequence in batch.sequences:
        d = own_logps(policy, sequence) - sequence.ref_logps
        ratio = d.clamp(-1.5, 1.5).exp()
        losses.append(-torch.minimum(sequence.advantage * ratio, sequence.advantage * ratio.clamp(0.8, 1.2)))
    expected = torch.cat(losses) if average == "token" else torch.stack([loss.mean() for loss in losses])
    assert humanline.forward_backward(policy, batch, config)["loss"] == pytest.approx(expected.mean().item(), rel=1e-4)


def test_a_batch_of_one_kind_or_of_nothing_is_a_step_like_any_other(tiny):
    policy, _, config = policy_of(tiny, loss="kto", perception="clip")
    batch = random_batch("kto")
    batch.sequences, batch.mismatched = [sequence for sequence in batch.sequences if not sequence.is_chosen], []
    assert 0 < humanline.forward_backward(policy, batch, config)["loss"] < 1
    for perception in ("clip", "sample"):
        empty = Config(loss="dpo", perception=perception)
        assert humanline.forward_backward(policy, Batch(1, [], [], 0.5), empty)["loss"] == 0


@pytest.mark.parametrize("loss, advice", [("zpo", "did you mean 'dpo'?"), ("reinforce", "known: dpo, grpo, kto")])
def test_a_loss_without_an_entry_is_refused_in_one_line(capsys, loss, advice):
    assert humanline.main(["--loss", loss]) == 2
    assert capsys.readouterr().err == f"humanline.py: error: --loss {loss}: {advice}\n"


def test_rejection_sampling_is_the_same_whatever_the_cut_and_differs_between_steps(tiny):
    policy, _, config = policy_of(tiny, loss="grpo", perception="sample", gamma_p=0.1, gamma_r=0.1)

    def rejected(step, tokens):
        batch = dataclasses.replace(random_batch("grpo"), step=step)
        humanline.draw_rejections(policy, batch, dataclasses.replace(config, microbatch_tokens=tokens))
        return torch.cat([sequence.rejected for sequence in batch.sequences])

    first = rejected(1, 1000)
    assert 0 < first.float().mean() < 1
    assert torch.equal(first, rejected(1, 20)) and not torch.equal(first, rejected(2, 1000))


def spy(monkeypatch) -> SimpleNamespace:
    """Note the order of a step's parts, and keep each step's policy, before its update, and batch."""
    seen = SimpleNamespace(order=[], policies=[], batches=[])

    def note(owner, name: str, what: str) -> None:
        real = getattr(owner, name)

        def spied(*args, **more):
            seen.order.append(what)
            if what == "backward":
                seen.policies.append(copy.deepcopy(args[0]))
                seen.batches.append(copy.deepcopy(args[1]))
            return real(*args, **more)

        monkeypatch.setattr(owner, name, spied)

    note(humanline, "forward_backward", "backward")
    note(torch.nn.utils, "clip_grad_norm_", "clip")
    note(humanline.Reference, "sync", "sync")
    note(torch.optim.AdamW, "step", "step")
    return seen


def test_with_k_1_the_reference_lags_by_one_step_so_log_ratios_are_not_zero(run):
    lines = metrics(run("--sync-k 1"))
    assert lines[0]["drift"] == 0 and lines[1]["drift"] > 0 and all(line["drift"] > 0 for line in lines[1:])


def test_a_step_is_backward_clip_sync_step(run, monkeypatch):
    seen = spy(monkeypatch)
    run("--sync-k 2 --steps 2")
    assert seen.order == ["sync", "backward", "clip", "step", "backward", "clip", "sync", "step"]


def test_the_policys_log_probs_are_reported_of_all_and_of_wanted_completions(tiny):
    policy, _, config = policy_of(tiny, loss="grpo", perception="none")
    batch = random_batch("grpo")
    batch.sequences[2].is_idle = True  # it teaches nothing, and is left out
    computed = [sequence for sequence in batch.sequences if not sequence.is_idle]
    mean = lambda sequences: torch.cat([own_logps(policy, sequence) for sequence in sequences]).mean().item()
    report = humanline.forward_backward(policy, batch, config)
    assert report["logp"] == pytest.approx(mean(computed), rel=1e-5)
    wanted = [sequence for sequence in computed if sequence.is_chosen]
    assert report["logp_wanted"] == pytest.approx(mean(wanted), rel=1e-5)


@pytest.mark.parametrize("flags", [
    "--loss grpo --sample-every 3", "--loss dpo", "--loss kto --perception sample --sync-k 2"])
def test_the_same_command_gives_the_same_run_to_the_last_digit(run, flags):
    first, second = run(flags), run(flags)
    assert timeless(first) == timeless(second) and same_weights(first, second)
    assert timeless(run(flags + " --seed 1")) != timeless(first)


RESUMED = [
    ("--loss dpo --sync-k 4 --perception sample", 2), ("--loss kto --no-humanline", 3), ("--sync-k 3 --taper", 5),
    ("--loss grpo --sample-every 4 --sync-k 3", 5), ("--loss dpo --sample-every 1 --sync-k 3", 2),
    ("--loss kto --sample-every 3 --no-humanline", 5), ("--loss dpo --sample-every 3 --sync-k 7", 2),
    ("--loss grpo --no-humanline --sample-every 3 --kl-beta 0.1", 5)]


@pytest.mark.parametrize("flags, stop", RESUMED, ids=[flags for flags, _ in RESUMED])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(run, tmp_path, monkeypatch, flags, stop):
    flags += " --steps 8 --save-every 1"
    whole = run(flags)
    interrupted = str(tmp_path / "interrupted")
    step, calls = torch.optim.AdamW.step, itertools.count(1)

    def failing(self, *args):
        if next(calls) > stop:
            raise KeyboardInterrupt
        return step(self, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.optim.AdamW, "step", failing)
        run(flags, out=interrupted)
    resumed = run(f"{flags} --resume latest", out=interrupted)
    assert timeless(resumed) == timeless(whole) and same_weights(resumed, whole)


def assert_same_batch(a: Batch, b: Batch) -> None:
    """Equal in every field, tensors bit for bit and of one type."""
    assert (a.step, a.reward, a.no_difference, len(a.mismatched)) == (b.step, b.reward, b.no_difference, len(b.mismatched))
    for x, y in zip(a.sequences + a.mismatched, b.sequences + b.mismatched, strict=True):
        for name, value in vars(x).items():
            other = getattr(y, name)
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.dtype and torch.equal(value, other), name
            else:
                assert value == other, name


@pytest.mark.parametrize("flags, pending, known", [
    ("--loss grpo --sync-k 4 --taper", 3, "ref_logps sampler_logps"), ("--loss dpo --no-humanline", 7, "ref_logps"),
    ("--loss kto --sync-k 8 --sample-every 4", 3, "ref_logps sampler_logps"),
    ("--loss kto --no-humanline --sample-every 4", 3, "old_logps sampler_logps")])
def test_pending_batches_come_back_from_a_checkpoint_exactly(run, tmp_path, monkeypatch, flags, pending, known):
    flags += " --steps 8 --batch-size 8 --save-every 1 --keep 9"
    saved, restored, save, load = {}, [], humanline.save_checkpoint, humanline.load_checkpoint
    state_of = lambda reference: [reference.until, reference.batches.made_until, [*reference.batches.pending]]

    def spied_save(path, optimizer, reference, step):
        saved[step] = copy.deepcopy(state_of(reference))
        save(path, optimizer, reference, step)

    def spied_load(path, optimizer, reference):
        load(path, optimizer, reference)
        restored.append(state_of(reference))
        raise KeyboardInterrupt

    monkeypatch.setattr(humanline, "save_checkpoint", spied_save)
    folder = run(flags)
    monkeypatch.setattr(humanline, "load_checkpoint", spied_load)
    for step in (1, 5):
        with pytest.raises(KeyboardInterrupt):
            run(f"{flags} --resume {folder / 'checkpoint' / f'step-{step:08d}'}", out=str(tmp_path / f"resumed-{step}"))
        before, after = saved[step], restored.pop()
        assert after[:2] == before[:2]
        for a, b in zip(before[2], after[2], strict=True):
            assert_same_batch(a, b)
    # What was compared holds what each case is about.
    batches = saved[1][2]
    assert [batch.step for batch in batches] == list(range(2, 2 + pending))
    assert all(bool(batch.mismatched) == ("kto" in flags) for batch in batches)
    for name in ("ref_logps", "old_logps", "sampler_logps"):
        sequences = [sequence for batch in batches for sequence in batch.sequences if not sequence.is_idle]
        assert all((getattr(sequence, name) is not None) == (name in known) for sequence in sequences), name


def test_resume_starts_afresh_where_there_is_no_checkpoint_and_skips_a_damaged_one(run, tmp_path, capsys):
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


@pytest.mark.parametrize("flags, expected", [
    ("--lr 0.5", "the run has --lr 0.01, not 0.5"), ("--sync-k 2", "the run has --sync-k 1, not 2"),
    ("--steps 6", "it has done 4 of its planned 4 steps, so --steps 6 must lie between"),
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


def test_a_nan_stops_the_run_and_leaves_the_last_checkpoint(run, tmp_path, monkeypatch, capsys):
    out, calls = tmp_path / "out", itertools.count(1)
    forward = humanline.forward_backward

    def poisoned(policy, batch, config):
        report = forward(policy, batch, config)
        if next(calls) == 4:
            next(policy.parameters()).grad[0, 0] = float("nan")
        return report

    monkeypatch.setattr(humanline, "forward_backward", poisoned)
    with pytest.raises(FloatingPointError, match=r"step 4: .*what was saved before is in .*checkpoint"):
        run("--save-every 1 --steps 6", out=str(out))
    assert len(metrics(out)) == 3 and not (out / "final").exists()
    assert humanline.find_damage(out / "checkpoint" / "step-00000003") == ""


def test_warmup_is_linear_then_constant():
    config = Config(lr=2.0, warmup=0.1)
    assert [humanline.learning_rate(step, 100, config) for step in (1, 5, 10, 11, 100)] == [0.2, 1.0, 2.0, 2.0, 2.0]
    assert humanline.learning_rate(1, 100, dataclasses.replace(config, warmup=0.0)) == 2.0


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
