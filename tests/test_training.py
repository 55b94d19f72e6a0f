"""The loop: the order of a step, the reference, global means, and that a run repeats itself."""

import dataclasses
import itertools

import pytest
import torch
from conftest import metrics, same_weights

import humanline
from humanline import Batch, Config, Sequence

OFFLINE, SPARSE, ONLINE = "--sample-every 0", "--sample-every 4", "--sample-every 1"


def policy_of(tiny, **settings):
    config = dataclasses.replace(Config(model=tiny, batch_size=4), **settings)
    policy, tokenizer = humanline.load_policy(config, torch.device("cpu"))
    return policy, tokenizer, config


def random_batch(loss: str, count: int = 8, seed: int = 0) -> Batch:
    """A batch with lengths of all kinds and reference log-probs away from the policy's."""
    generator = torch.Generator().manual_seed(seed)
    number = lambda low, high: int(torch.randint(low, high, (), generator=generator))
    ids = lambda length: torch.randint(8, 100, (length,), generator=generator).tolist()

    def sequence(signal):
        one = Sequence(ids(number(1, 9)), ids(number(1, 9)), signal)
        one.ref = -4.6 + torch.randn(len(one.completion), generator=generator)
        return one

    signals = {"dpo": [1.0, -1.0], "kto": [1.5, -1.0, -1.0], "grpo": [1.2, -0.4, 0.0, -0.8]}[loss]
    sequences = [sequence(signal) for _, signal in zip(range(count), itertools.cycle(signals))]
    return Batch(1, sequences, [sequence(0.0) for _ in range(count)] if loss == "kto" else [], None)


def gradient(policy, batch, config) -> torch.Tensor:
    policy.zero_grad()
    humanline.forward_backward(policy, batch, config)
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


@pytest.mark.parametrize("perception", ["clip", "sample", "none"])
@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_cutting_a_batch_into_microbatches_changes_nothing(tiny, loss, perception):
    policy, _, config = policy_of(tiny, loss=loss, perception=perception, kl_beta=0.1)
    policy.double()
    batch = random_batch(loss)
    for one in batch.sequences + batch.mismatched:
        one.ref = one.ref.double()
    whole = gradient(policy, batch, config)
    report = humanline.forward_backward(policy, batch, config)
    assert whole.abs().max() > 0
    cuts = set()
    for tokens in (1000, 80, 55, 36, 1):
        small = dataclasses.replace(config, microbatch_tokens=tokens)
        cuts.add(len(humanline.cut(batch.sequences, small)))
        assert torch.allclose(gradient(policy, batch, small), whole, rtol=1e-6, atol=1e-6 * float(whole.abs().max()))
        for name, value in humanline.forward_backward(policy, batch, small).items():
            assert value == pytest.approx(report[name], rel=1e-6, abs=1e-12), name
    assert {1, 2, 3} <= cuts and max(cuts) == (4 if loss == "dpo" else 8)


def shared_batch(loss: str) -> Batch:
    """A random batch whose prompts each come four times in a row."""
    batch = random_batch(loss, 16)
    for sequences in (batch.sequences, batch.mismatched):
        for i, one in enumerate(sequences):
            one.prompt = sequences[i - i % 4].prompt
    return batch


@pytest.mark.parametrize("perception", ["clip", "sample"])
@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_sharing_prompts_changes_nothing_whatever_the_cut(tiny, loss, perception):
    policy, _, config = policy_of(tiny, loss=loss, perception=perception)
    policy.double()
    batch, shared = shared_batch(loss), []
    for one in batch.sequences + batch.mismatched:
        one.ref = one.ref.double()
    apart = gradient(policy, batch, dataclasses.replace(config, share_prompts=False))
    for tokens in (1000, 70, 24, 10, 1):
        small = dataclasses.replace(config, microbatch_tokens=tokens)
        assert torch.allclose(gradient(policy, batch, small), apart, rtol=1e-6, atol=1e-6 * float(apart.abs().max()))
        cut = humanline.cut(batch.sequences, small)
        shared.append(sum(one.shares for microbatch in cut for one in microbatch))
        assert sorted(map(id, itertools.chain(*cut))) == sorted(map(id, batch.sequences))
        for microbatch in cut:
            rows = humanline.rows_of(microbatch)
            assert len(rows) * max(map(humanline.width, rows)) <= tokens or len(microbatch) == (2 if loss == "dpo" else 1)
            assert all(one.prompt == row[0].prompt for row in rows for one in row)
            if loss == "dpo":
                assert all(other.signal == -1 and one.prompt == other.prompt for one, other in zip(microbatch[::2], microbatch[1::2]))
    assert shared[0] == (8 if loss == "dpo" else 12) and shared == sorted(shared, reverse=True) and shared[-1] == 0


def test_ranks_share_a_batch_without_gap_or_overlap_though_memory_left_one_less(monkeypatch):
    batch = shared_batch("grpo")
    monkeypatch.setattr(humanline, "world_size", lambda: 2)
    parts = []
    for rank, tokens in enumerate([1000, 20]):
        monkeypatch.setattr(humanline, "rank", lambda: rank)
        parts += itertools.chain(*humanline.cut(batch.sequences, Config(loss="grpo", microbatch_tokens=tokens)))
    assert sorted(map(id, parts)) == sorted(map(id, batch.sequences))


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_grpo_averages_over_the_tokens_or_the_sequences_of_the_whole_batch(tiny, average):
    policy, _, config = policy_of(tiny, loss="grpo", perception="clip", average=average, microbatch_tokens=30)
    batch = random_batch("grpo")
    losses = []
    for one in batch.sequences:
        logps, _ = humanline.log_probs(policy, [one])
        d = humanline.of_completions(logps, [one])[0] - one.ref
        ratio = d.clamp(-1.5, 1.5).exp()
        losses.append(-torch.minimum(one.signal * ratio, one.signal * ratio.clamp(0.8, 1.2)))
    expected = torch.cat(losses).mean() if average == "token" else torch.stack([loss.mean() for loss in losses]).mean()
    assert humanline.forward_backward(policy, batch, config)["loss"] == pytest.approx(expected.item(), rel=1e-4)


def test_kto_has_one_reference_point_for_the_whole_batch(tiny):
    policy, _, config = policy_of(tiny, loss="kto", perception="clip", beta=0.5, microbatch_tokens=20)
    batch = random_batch("kto")
    gains = lambda sequences: torch.stack([
        (humanline.of_completions(humanline.log_probs(policy, [one])[0], [one])[0] - one.ref).clamp(-1.5, 1.5).sum() for one in sequences])
    z0 = gains(batch.mismatched).mean().clamp(min=0)
    want = torch.tensor([one.signal > 0 for one in batch.sequences])
    value = 0.5 * (gains(batch.sequences) - z0)
    expected = torch.where(want, 1.5 * (1 - torch.sigmoid(value)), 1 - torch.sigmoid(-value)).mean()
    report = humanline.forward_backward(policy, batch, config)
    assert report["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert report["z0"] == pytest.approx(z0.item(), rel=1e-4, abs=1e-6)


def test_a_batch_of_one_kind_or_of_nothing_is_a_step_like_any_other(tiny):
    policy, _, config = policy_of(tiny, loss="kto", perception="clip")
    batch = random_batch("kto")
    batch.sequences, batch.mismatched = [one for one in batch.sequences if one.signal < 0], []
    assert 0 < humanline.forward_backward(policy, batch, config)["loss"] < 1
    for perception in ("clip", "sample"):
        empty = dataclasses.replace(config, loss="dpo", perception=perception)
        assert humanline.forward_backward(policy, Batch(1, [], [], 0.5), empty)["loss"] == 0


def test_rejection_sampling_is_the_same_whatever_the_cut_and_differs_between_steps(tiny):
    policy, _, config = policy_of(tiny, loss="grpo", perception="sample", gamma_p=0.1, gamma_r=0.1)

    def rejected(step, tokens):
        batch = dataclasses.replace(random_batch("grpo"), step=step)
        humanline.draw_rejections(policy, batch, dataclasses.replace(config, microbatch_tokens=tokens))
        return torch.cat([one.rejected for one in batch.sequences])

    first = rejected(1, 1000)
    assert 0 < first.float().mean() < 1
    assert torch.equal(first, rejected(1, 20)) and not torch.equal(first, rejected(2, 1000))


def spy(monkeypatch):
    """Record the policy that each step and each reference pass saw, by a number that identifies the weights."""
    seen = {"policy": [], "reference": {}, "order": []}
    mark = lambda model: float(sum(p.detach().double().abs().sum() for p in model.parameters()))
    forward, score, clip = humanline.forward_backward, humanline.score, torch.nn.utils.clip_grad_norm_

    def spied_forward(policy, batch, config):
        seen["policy"].append(mark(policy))
        seen["order"].append("backward")
        return forward(policy, batch, config)

    def spied_score(model, batch, config):
        seen["reference"][batch.step] = mark(model)
        return score(model, batch, config)

    def spied_clip(*args, **kwargs):
        seen["order"].append("clip")
        return clip(*args, **kwargs)

    sync = humanline.Reference.sync
    monkeypatch.setattr(humanline, "forward_backward", spied_forward)
    monkeypatch.setattr(humanline, "score", spied_score)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spied_clip)
    monkeypatch.setattr(humanline.Reference, "sync", lambda self, step: (seen["order"].append("sync"), sync(self, step))[1])
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a: (seen["order"].append("step"), step(self, *a))[1])
    return seen


@pytest.mark.parametrize("ref", ["lookahead", "copy"])
@pytest.mark.parametrize("source", [OFFLINE, SPARSE, ONLINE])
@pytest.mark.parametrize("k", [1, 3])
def test_reference_is_the_policy_of_the_step_that_synced(run, monkeypatch, k, source, ref):
    seen = spy(monkeypatch)
    run(f"--sync-k {k} --ref {ref} {source} --steps 10")
    policies = seen["policy"]  # policies[s - 1] is the policy that step s trained, before its update
    assert len(set(policies)) == 10
    for step in range(1, 11):
        synced = (step - 1) // k * k  # the newest sync before this step; 0 is the start
        assert seen["reference"][step] == policies[max(0, synced - 1)], f"step {step}"


def test_with_k_1_the_reference_lags_by_one_step_so_log_ratios_are_not_zero(run):
    lines = metrics(run("--sync-k 1"))
    assert lines[0]["drift"] == 0 and lines[1]["drift"] > 0 and all(line["drift"] > 0 for line in lines[1:])


def test_a_step_is_backward_clip_sync_step(run, monkeypatch):
    seen = spy(monkeypatch)
    run("--sync-k 2 --steps 2")
    assert seen["order"] == ["sync", "backward", "clip", "step", "backward", "clip", "sync", "step"]


def test_without_humanline_the_reference_is_fixed_offline_and_the_drawing_policy_online(run, monkeypatch):
    seen = spy(monkeypatch)
    run("--no-humanline")
    assert {seen["reference"][step] for step in range(1, 7)} == {seen["policy"][0]}
    seen = spy(monkeypatch)
    run(f"--no-humanline {SPARSE}")
    assert [seen["reference"][step] for step in range(1, 7)] == [seen["policy"][0]] * 4 + [seen["policy"][4]] * 2


@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("source", [OFFLINE, SPARSE])
def test_lookahead_and_copy_give_the_same_numbers_bit_for_bit(run, loss, k, source):
    flags = f"--loss {loss} --sync-k {k} {source} --steps 10"
    one, two = run(f"{flags} --ref lookahead"), run(f"{flags} --ref copy")
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert {key: a[key] for key in ("loss", "grad_norm", "drift", "kl")} == {key: b[key] for key in ("loss", "grad_norm", "drift", "kl")}
    assert same_weights(one, two)


def test_no_second_model_is_made_where_the_batches_are_known(run, monkeypatch):
    loaded, load = [], humanline.load_policy
    monkeypatch.setattr(humanline, "load_policy", lambda *args: loaded.append(1) or load(*args))
    run("--sync-k 3")
    run(f"--sync-k 3 {SPARSE}")
    run(f"--no-humanline {ONLINE}")
    assert len(loaded) == 3
    run("--sync-k 3 --ref copy")
    assert len(loaded) == 5


@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_a_reference_that_is_the_policy_itself_is_not_computed(run, monkeypatch, loss):
    passes, each_token = [], humanline.each_token  # nor, with KTO, the z₀ that it gives
    monkeypatch.setattr(humanline, "each_token", lambda *args: passes.append(1) or each_token(*args))
    flags = f"--loss {loss} --no-humanline {ONLINE} --batch-size 8"
    one = run(flags)
    assert not passes
    two = run(f"{flags} --ref copy")  # computes them
    assert len(passes) == (18 if loss == "kto" else 12) and same_weights(one, two)
    assert [line["loss"] for line in metrics(one)] == [line["loss"] for line in metrics(two)]
    assert all(line["drift"] == 0 for line in metrics(one))


@pytest.mark.parametrize("logps, step", [
    ([-0.5 + 0.01 * i for i in range(40)], None),  # rises
    ([-0.2] * 20 + [-0.5] * 40, None),  # falls a little
    ([-0.2] * 20 + [-1.2] * 40, 30),  # 10 of 16 at -1.2: the mean is below -0.8
    ([-0.005] * 20 + [-0.034] * 40, None),  # seven times as unlikely, but by less than 0.03
    ([-0.2, None] * 20 + [-1.2] * 40, 50),
    ([-0.2] * 10 + [-1.2] * 5, None),  # shorter than the window
])
def test_a_collapse_is_told_once_the_wanted_completions_have_become_unlikely(logps, step):
    collapse = humanline.Collapse()
    said = [i for i, logp in enumerate(logps, 1) if collapse(logp)]
    assert said == ([] if step is None else [step])


def test_the_run_warns_of_a_collapse(run, monkeypatch, capsys):
    monkeypatch.setattr(humanline, "Collapse", lambda: lambda logp: "it falls" if logp < 0 else "")
    run("--steps 2")
    assert "warning: step 1: it falls" in capsys.readouterr().err


def test_a_resumed_run_remembers_what_a_collapse_is_told_from(run, tmp_path, monkeypatch):
    out = str(tmp_path / "out")
    folder = run("--steps 4 --save-every 2", out=out)
    humanline.shutil.rmtree(folder / "final")
    humanline.shutil.rmtree(folder / "checkpoint" / "step-00000004")
    told: list[float] = []
    monkeypatch.setattr(humanline, "Collapse", lambda: lambda logp: told.append(logp) or "")
    run("--steps 4 --save-every 2 --resume latest", out=out)
    assert len(told) == 4 and told == [line["logp_wanted"] for line in metrics(folder)]


def test_a_soft_sync_goes_a_part_of_the_way(run, monkeypatch):
    flat = lambda model: torch.cat([p.detach().double().flatten() for p in model.parameters()])
    seen, sync = [], humanline.Reference.sync

    def spied(self, step):
        before = flat(self.model)
        sync(self, step)
        seen.append((before, flat(self.policy), flat(self.model)))

    monkeypatch.setattr(humanline.Reference, "sync", spied)
    run("--sync-k 2 --sync-alpha 0.25 --steps 6")
    for before, policy, after in seen[1:]:
        assert not torch.equal(before, policy) and torch.allclose(after, 0.75 * before + 0.25 * policy, rtol=0, atol=1e-7)
    assert len(seen) == 4


def test_the_policys_log_probs_are_reported_of_all_and_of_wanted_completions(tiny):
    policy, _, config = policy_of(tiny, loss="grpo", perception="none")
    batch = random_batch("grpo")
    with torch.no_grad():
        logps, mask = humanline.log_probs(policy, batch.sequences)
    wanted = mask & torch.tensor([one.signal > 0 for one in batch.sequences])[:, None]
    report = humanline.forward_backward(policy, batch, config)
    assert report["logp"] == pytest.approx(float(logps[mask].mean()), rel=1e-5)
    assert report["logp_wanted"] == pytest.approx(float(logps[wanted].mean()), rel=1e-5)


def test_sync_drift_syncs_when_the_drift_passes_and_only_then(run, monkeypatch):
    seen = spy(monkeypatch)
    lines = metrics(run("--sync-drift 0.4 --steps 12"))
    passed = [line["step"] for line in lines if line["drift"] > 0.4]
    assert passed and passed[0] > 2
    for step in range(2, 13):
        synced = max([s for s in passed if s < step], default=1)
        assert seen["reference"][step] == seen["policy"][synced - 1]


@pytest.mark.parametrize("flags", ["--loss grpo --sample-every 3", "--loss dpo", "--loss kto --perception sample --sync-k 2"])
def test_the_same_command_gives_the_same_run_to_the_last_digit(run, flags):
    one, two = run(flags), run(flags)
    timeless = lambda folder: [{k: v for k, v in line.items() if "seconds" not in k} for line in metrics(folder)]
    assert timeless(one) == timeless(two) and same_weights(one, two)
    assert timeless(run(flags + " --seed 1")) != timeless(one)


@pytest.mark.parametrize("flags", [
    "--loss grpo --sync-k 3", "--loss dpo --sync-k 4 --perception sample", "--loss kto --no-humanline", "--loss grpo --sample-every 4 --sync-k 3",
    "--loss dpo --sample-every 1 --sync-k 3", "--loss kto --sample-every 3 --no-humanline", "--loss grpo --sync-drift 0.3", "--ref copy --sync-k 3", "--sync-k 2 --sync-alpha 0.5",
    "--loss dpo --sample-every 3 --sync-k 7"])
@pytest.mark.parametrize("stop", [2, 3, 5])
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
    timeless = lambda folder: [{k: v for k, v in line.items() if "seconds" not in k} for line in metrics(folder)]
    assert timeless(resumed) == timeless(whole) and same_weights(resumed, whole)


def test_resume_starts_afresh_where_there_is_no_checkpoint_and_skips_a_damaged_one(run, tmp_path, capsys):
    out = str(tmp_path / "out")
    folder = run("--steps 4 --save-every 1 --keep 3 --resume latest", out=out)
    whole = (folder / "final" / "model.safetensors").read_bytes()
    kept = sorted(path.name for path in (folder / "checkpoint").iterdir())
    assert kept == ["step-00000002", "step-00000003", "step-00000004"]
    humanline.shutil.rmtree(folder / "final")
    humanline.shutil.rmtree(folder / "checkpoint" / "step-00000004")
    file = folder / "checkpoint" / "step-00000003" / "policy.safetensors"
    file.write_bytes(file.read_bytes()[:-9] + b"humanline")
    run("--steps 4 --save-every 1 --keep 3 --resume latest", out=out)
    assert "damaged: policy.safetensors" in capsys.readouterr().err
    assert (folder / "final" / "model.safetensors").read_bytes() == whole and len(metrics(folder)) == 4


def test_a_run_is_not_resumed_under_other_settings(run, tmp_path):
    out = str(tmp_path / "out")
    folder = run("--steps 2 --save-every 1", out=out)
    humanline.shutil.rmtree(folder / "final")
    with pytest.raises(humanline.UserError, match="--lr 0.01, not 0.5"):
        run("--steps 2 --save-every 1 --resume latest --lr 0.5", out=out)


def test_a_run_is_not_made_longer_than_its_reference_is_known(run, tmp_path):
    out = str(tmp_path / "out")
    folder = run("--steps 4 --save-every 2 --no-humanline", out=out)
    humanline.shutil.rmtree(folder / "final")
    with pytest.raises(humanline.UserError, match="planned for 4 steps"):
        run("--steps 6 --resume latest --no-humanline", out=out)


def test_a_nan_stops_the_run_and_leaves_the_last_checkpoint(run, tmp_path, monkeypatch, capsys):
    out, calls = tmp_path / "out", itertools.count(1)
    forward = humanline.forward_backward

    def poisoned(policy, batch, config):
        report = forward(policy, batch, config)
        if next(calls) == 4:
            next(policy.parameters()).grad[0, 0] = float("nan")
        return report

    monkeypatch.setattr(humanline, "forward_backward", poisoned)
    with pytest.raises(FloatingPointError, match=r"step 4: .*step-00000003.*groups.jsonl row \d+"):
        run("--save-every 1 --steps 6", out=str(out))
    assert len(metrics(out)) == 3 and not (out / "final").exists()
    assert humanline.read_checkpoint(out / "checkpoint" / "step-00000003")["step"] == 3


def test_warmup_is_linear_then_constant_or_a_cosine():
    config = Config(lr=2.0, steps=100, warmup=0.1)
    assert [humanline.learning_rate(step, config) for step in (1, 5, 10, 11, 100)] == [0.2, 1.0, 2.0, 2.0, 2.0]
    cosine = dataclasses.replace(config, schedule="cosine")
    rates = [humanline.learning_rate(step, cosine) for step in range(10, 101)]
    assert rates == sorted(rates, reverse=True) and rates[0] == 2.0 and 0 < rates[-1] < 0.01
    assert humanline.learning_rate(1, dataclasses.replace(config, warmup=0.0)) == 2.0


def test_gradients_are_clipped_to_the_norm(run, monkeypatch):
    norms, step = [], torch.optim.AdamW.step

    def spied(self, *args):
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for group in self.param_groups for p in group["params"]])))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", spied)
    lines = metrics(run("--max-grad-norm 0.01"))
    assert all(line["grad_norm"] > 0.01 for line in lines) and all(norm == pytest.approx(0.01, rel=1e-3) for norm in norms)
