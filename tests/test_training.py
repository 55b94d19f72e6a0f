"""The loop: the order of a step, the reference, global means, and that a run repeats itself."""

import copy
import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import metrics, random_batch, same_weights, timeless

import humanline
from humanline import Batch, Config, Group, Loss, best_against_worst, sum_tokens

OFFLINE, SPARSE, ONLINE = "--sample-every 0", "--sample-every 4", "--sample-every 1"


def policy_of(tiny, **settings):
    config = dataclasses.replace(Config(model=tiny, batch_size=4), **settings)
    policy, tokenizer = humanline.load_policy(config, torch.device("cpu"))
    return policy, tokenizer, config


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
    for sequence in batch.sequences + batch.mismatched:
        sequence.ref_logps = sequence.ref_logps.double()
    whole = gradient(policy, batch, config)
    report = humanline.forward_backward(policy, batch, config)
    assert whole.abs().max() > 0
    cuts = set()
    for tokens in (1000, 80, 55, 36, 1):
        small = dataclasses.replace(config, microbatch_tokens=tokens)
        cuts.add(len(humanline.cut(batch.sequences, small)))
        assert torch.allclose(gradient(policy, batch, small), whole, rtol=1e-6, atol=1e-6 * float(whole.abs().max()))
        for name, value in humanline.forward_backward(policy, batch, small).items():
            assert name == "entropy" or value == pytest.approx(report[name], rel=1e-6, abs=1e-12), name
    assert {1, 2, 3} <= cuts and max(cuts) == (4 if loss == "dpo" else 8)


def shared_batch(loss: str) -> Batch:
    """A random batch whose prompts each come four times in a row."""
    batch = random_batch(loss, 16)
    for sequences in (batch.sequences, batch.mismatched):
        for i, sequence in enumerate(sequences):
            sequence.prompt = sequences[i - i % 4].prompt
    return batch


@pytest.mark.parametrize("perception", ["clip", "sample"])
@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_sharing_prompts_changes_nothing_whatever_the_cut(tiny, loss, perception):
    policy, _, config = policy_of(tiny, loss=loss, perception=perception)
    policy.double()
    batch, shared = shared_batch(loss), []
    for sequence in batch.sequences + batch.mismatched:
        sequence.ref_logps = sequence.ref_logps.double()
    apart = gradient(policy, batch, dataclasses.replace(config, share_prompts=False))
    for tokens in (1000, 70, 24, 10, 1):
        small = dataclasses.replace(config, microbatch_tokens=tokens)
        assert torch.allclose(gradient(policy, batch, small), apart, rtol=1e-6, atol=1e-6 * float(apart.abs().max()))
        cut = humanline.cut(batch.sequences, small)
        shared.append(sum(sequence.shares_prompt for microbatch in cut for sequence in microbatch))
        assert sorted(map(id, itertools.chain(*cut))) == sorted(map(id, batch.sequences))
        for microbatch in cut:
            rows = humanline.forward_rows(microbatch)
            tokens_with_padding, least = len(rows) * max(map(humanline.width, rows)), 2 if loss == "dpo" else 1
            assert tokens_with_padding <= tokens or len(microbatch) == least
            assert all(sequence.prompt == row[0].prompt for row in rows for sequence in row)
            if loss == "dpo":
                for chosen, rejected in zip(microbatch[::2], microbatch[1::2], strict=True):
                    assert chosen.is_chosen and not rejected.is_chosen and chosen.prompt == rejected.prompt
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
    for sequence in batch.sequences:
        logps, _ = humanline.log_probs(policy, [sequence])
        d = humanline.completion_parts(logps, [sequence])[0] - sequence.ref_logps
        ratio = d.clamp(-1.5, 1.5).exp()
        losses.append(-torch.minimum(sequence.advantage * ratio, sequence.advantage * ratio.clamp(0.8, 1.2)))
    expected = torch.cat(losses) if average == "token" else torch.stack([loss.mean() for loss in losses])
    assert humanline.forward_backward(policy, batch, config)["loss"] == pytest.approx(expected.mean().item(), rel=1e-4)


def test_kto_has_one_reference_point_for_the_whole_batch(tiny):
    policy, _, config = policy_of(tiny, loss="kto", perception="clip", beta=0.5, microbatch_tokens=20)
    batch = random_batch("kto")

    def gain(sequence):
        logps = humanline.completion_parts(humanline.log_probs(policy, [sequence])[0], [sequence])[0]
        return (logps - sequence.ref_logps).clamp(-1.5, 1.5).sum()

    gains = lambda sequences: torch.stack(list(map(gain, sequences)))
    z0 = gains(batch.mismatched).mean().clamp(min=0)
    desirable = torch.tensor([sequence.is_chosen for sequence in batch.sequences])
    value = 0.5 * (gains(batch.sequences) - z0)
    expected = torch.where(desirable, 1.5 * (1 - torch.sigmoid(value)), 1 - torch.sigmoid(-value)).mean()
    report = humanline.forward_backward(policy, batch, config)
    assert report["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert report["z0"] == pytest.approx(z0.item(), rel=1e-4, abs=1e-6)


def test_a_batch_of_one_kind_or_of_nothing_is_a_step_like_any_other(tiny):
    policy, _, config = policy_of(tiny, loss="kto", perception="clip")
    batch = random_batch("kto")
    batch.sequences, batch.mismatched = [sequence for sequence in batch.sequences if not sequence.is_chosen], []
    assert 0 < humanline.forward_backward(policy, batch, config)["loss"] < 1
    for perception in ("clip", "sample"):
        empty = dataclasses.replace(config, loss="dpo", perception=perception)
        assert humanline.forward_backward(policy, Batch(1, [], [], 0.5), empty)["loss"] == 0


def add_ipo(monkeypatch) -> None:
    """A loss of one's own: identity preference optimization (Azar et al. 2023)."""
    def ipo(inputs, config):
        margin = sum_tokens(inputs.perceived[0::2]) - sum_tokens(inputs.perceived[1::2])
        return (margin - 1 / (2 * config.beta)) ** 2

    monkeypatch.setitem(humanline.LOSSES, "ipo", Loss(compute=ipo, make_units=best_against_worst, unit="pair"))


@pytest.mark.parametrize("perception", ["clip", "none"])
def test_ipo_added_as_an_entry_of_losses_has_the_value_and_gradient_of_its_formula(tiny, monkeypatch, perception):
    add_ipo(monkeypatch)
    policy, _, config = policy_of(tiny, loss="ipo", perception=perception, beta=0.25, microbatch_tokens=30)
    batch, terms = random_batch("dpo"), []
    for chosen, rejected in zip(batch.sequences[0::2], batch.sequences[1::2]):
        difference = 0.0  # log (π_θ(y_w) / π_ref(y_w)) - log (π_θ(y_l) / π_ref(y_l))
        for sequence, sign in ((chosen, 1), (rejected, -1)):
            logits = policy(input_ids=torch.tensor([sequence.prompt + sequence.completion])).logits[0]
            for position, token in enumerate(sequence.completion):
                logp = logits[len(sequence.prompt) + position - 1].log_softmax(0)[token]
                log_ratio = logp - sequence.ref_logps[position]
                difference += sign * (log_ratio.clamp(-1.5, 1.5) if perception == "clip" else log_ratio)
        terms.append((difference - 1 / (2 * 0.25)) ** 2)
    expected = sum(terms) / 4
    slopes = torch.cat([slope.flatten() for slope in torch.autograd.grad(expected, list(policy.parameters()))])
    assert humanline.forward_backward(policy, batch, config)["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert torch.allclose(gradient(policy, batch, config), slopes, rtol=1e-3, atol=1e-5 * float(slopes.abs().max()))


@pytest.mark.parametrize("flags, data", [
    ("--microbatch-tokens 60", "pairs"), ("--sample-every 2 --sync-k 3", "prompts")])
def test_ipo_added_as_an_entry_of_losses_trains(run, monkeypatch, flags, data):
    add_ipo(monkeypatch)
    folder = run(f"--loss ipo --beta 0.5 {flags}", data=data)
    lines = metrics(folder)
    assert len(lines) == 6 and (folder / "final" / "model.safetensors").exists()
    assert lines[0]["loss"] == pytest.approx(1.0)  # (0 - 1 / (2 · 0.5))², as the reference is the policy
    assert all("reward_margin" in line and line["grad_norm"] > 0 for line in lines)
    assert lines[-1]["loss"] != lines[0]["loss"]


@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_without_a_sync_there_is_nothing_to_soften(run, loss):
    flags = f"--no-humanline --loss {loss} --sample-every 3"
    assert same_weights(run(flags), run(f"{flags} --sync-alpha 0.5"))


@pytest.mark.parametrize("latest, gained", [
    (dict(accuracy=0.5, greedy=0.6), "pass@1 on held-out prompts went from 0.100 to 0.500, greedy from 0.200 to 0.600: "),
    (dict(accuracy=0.5), "pass@1 on held-out prompts went from 0.100 to 0.500: "), ({}, "")])
def test_the_last_line_says_what_a_resumed_run_still_measures(tiny, latest, gained):
    config = humanline.parse_config(["--model", tiny])
    made = SimpleNamespace(config=config, out=Path("a"), stopped_at=None, started=0, ended=7, measured="pass@1", seen=(),
                           before=dict(accuracy=0.1, greedy=0.2), latest=latest)
    assert humanline.last_line(made).startswith(f"{gained}GRPO with humanline, 7 steps in ")


def test_what_to_type_next_names_the_script_that_knows_the_loss(run, monkeypatch, tiny):
    add_ipo(monkeypatch)
    monkeypatch.setattr("sys.argv", ["somewhere/ipo.py"])
    for loss, script in (("ipo", "ipo.py"), ("dpo", "humanline.py")):
        config = humanline.parse_config(["--loss", loss, "--model", tiny])
        made = SimpleNamespace(config=config, out=Path("runs/a"), stopped_at=3)
        assert f"go on with: python {script} --config runs/a/config.toml --out runs/a" in humanline.last_line(made)
        made.out = Path("my run")
        assert "--config 'my run/config.toml' --out 'my run' --resume latest" in humanline.last_line(made)


@pytest.mark.parametrize("loss, advice", [("zpo", "did you mean 'dpo'?"), ("reinforce", "known: dpo, grpo, kto")])
def test_a_loss_without_an_entry_is_refused_in_one_line(capsys, loss, advice):
    assert humanline.main(["--loss", loss]) == 2
    assert capsys.readouterr().err == f"humanline.py: error: --loss {loss}: {advice}\n"


def test_a_config_with_a_loss_without_an_entry_trains_as_nothing_else(tiny):
    policy, _, config = policy_of(tiny, loss="zpo", perception="clip")
    for loss in ("dpo", "kto", "grpo"):
        with pytest.raises(KeyError, match="zpo"):
            humanline.forward_backward(policy, random_batch(loss), config)
    assert all(p.grad is None for p in policy.parameters())
    groups = [Group(i, [i], [[1], [2]], [1.0, 0.0]) for i in range(8)]
    for sample_every in (0, 1):
        with pytest.raises(KeyError, match="zpo"):
            humanline.Batches(dataclasses.replace(config, sample_every=sample_every), groups, 64)


def test_rejection_sampling_is_the_same_whatever_the_cut_and_differs_between_steps(tiny):
    policy, _, config = policy_of(tiny, loss="grpo", perception="sample", gamma_p=0.1, gamma_r=0.1)

    def rejected(step, tokens):
        batch = dataclasses.replace(random_batch("grpo"), step=step)
        humanline.draw_rejections(policy, batch, dataclasses.replace(config, microbatch_tokens=tokens))
        return torch.cat([sequence.rejected_tokens for sequence in batch.sequences])

    first = rejected(1, 1000)
    assert 0 < first.float().mean() < 1
    assert torch.equal(first, rejected(1, 20)) and not torch.equal(first, rejected(2, 1000))


def spy(monkeypatch):
    """Record the policy that each step and each reference pass saw, by a number that identifies the weights."""
    seen = {"policy": [], "reference": {}, "order": []}
    mark = lambda model: float(sum(p.detach().double().abs().sum() for p in model.parameters()))
    forward, attach, clip = humanline.forward_backward, humanline.attach_logps, torch.nn.utils.clip_grad_norm_

    def spied_forward(policy, batch, config):
        seen["policy"].append(mark(policy))
        seen["order"].append("backward")
        return forward(policy, batch, config)

    def spied_attach(name, model, batch, config):
        if name == "ref_logps":
            seen["reference"][batch.step] = mark(model)
        return attach(name, model, batch, config)

    def spied_clip(*args, **kwargs):
        seen["order"].append("clip")
        return clip(*args, **kwargs)

    sync = humanline.Reference.sync
    monkeypatch.setattr(humanline, "forward_backward", spied_forward)
    monkeypatch.setattr(humanline, "attach_logps", spied_attach)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spied_clip)
    spied_sync = lambda self, step: (seen["order"].append("sync"), sync(self, step))[1]
    monkeypatch.setattr(humanline.Reference, "sync", spied_sync)
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
    run(f"--loss dpo --no-humanline {SPARSE}")  # for GRPO see test_grpo.py
    assert [seen["reference"][step] for step in range(1, 7)] == [seen["policy"][0]] * 4 + [seen["policy"][4]] * 2


@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("source", [OFFLINE, SPARSE])
def test_lookahead_and_copy_give_the_same_numbers_bit_for_bit(run, loss, k, source):
    flags = f"--loss {loss} --sync-k {k} {source} --steps 10"
    lookahead, second_model = run(f"{flags} --ref lookahead"), run(f"{flags} --ref copy")
    for a, b in zip(metrics(lookahead), metrics(second_model), strict=True):
        for key in ("loss", "grad_norm", "drift", "kl"):
            assert a[key] == b[key], key
    assert same_weights(lookahead, second_model)


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
    passes, completion_values = [], humanline.completion_values  # nor, with KTO, the z₀ that it gives
    monkeypatch.setattr(humanline, "completion_values", lambda *args: passes.append(1) or completion_values(*args))
    flags = f"--loss {loss} --no-humanline {ONLINE} --batch-size 8"
    without = run(flags)
    assert not passes
    second_model = run(f"{flags} --ref copy")  # computes them, but for GRPO, which asks no reference without a KL
    assert len(passes) == dict(kto=18, dpo=12, grpo=0)[loss] and same_weights(without, second_model)
    assert [line["loss"] for line in metrics(without)] == [line["loss"] for line in metrics(second_model)]
    assert all(line["drift"] == 0 for line in metrics(without))


@pytest.mark.parametrize("logps, step", [
    ([-0.5 + 0.01 * i for i in range(40)], None),  # rises
    ([-0.4] * 20 + [-0.75] * 40, None),  # falls a little
    ([-0.4] * 20 + [-1.2] * 40, 27),  # 7 of 12 at -1.2: the mean is below -0.8
    ([-0.05] * 20 + [-0.34] * 40, None),  # seven times as unlikely, but by less than 0.3
    ([-0.4, None] * 20 + [-1.2] * 40, 47),
    ([-0.4] * 6 + [-1.2] * 5, None),  # shorter than the window
])
def test_a_collapse_is_told_once_the_wanted_completions_have_become_unlikely(logps, step):
    for length in (1, 50):  # what counts is the completion, and not the token
        collapse = humanline.Collapse()
        lines = [{} if logp is None else dict(logp_wanted=logp / length, completion_length=length) for logp in logps]
        said = [i for i, line in enumerate(lines, 1) if collapse(line)]
        assert said == ([] if step is None else [step])


def test_the_run_warns_of_a_collapse(run, monkeypatch, capsys):
    monkeypatch.setattr(humanline, "Collapse", lambda: lambda line: "it falls" if line["logp_wanted"] < 0 else "")
    run("--steps 2")
    assert "warning: step 1: it falls" in capsys.readouterr().err


def test_a_resumed_run_remembers_what_a_collapse_is_told_from(run, tmp_path, monkeypatch):
    out = str(tmp_path / "out")
    folder = run("--steps 4 --save-every 2", out=out)
    humanline.shutil.rmtree(folder / "final")
    humanline.shutil.rmtree(folder / "checkpoint" / "step-00000004")
    seen: list[float] = []
    monkeypatch.setattr(humanline, "Collapse", lambda: lambda line: seen.append(line["logp_wanted"]) or "")
    run("--steps 4 --save-every 2 --resume latest", out=out)
    assert len(seen) == 4 and seen == [line["logp_wanted"] for line in metrics(folder)]


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
        assert not torch.equal(before, policy)
        assert torch.allclose(after, 0.75 * before + 0.25 * policy, rtol=0, atol=1e-7)
    assert len(seen) == 4


def test_the_policys_log_probs_are_reported_of_all_and_of_wanted_completions(tiny):
    policy, _, config = policy_of(tiny, loss="grpo", perception="none")
    batch = random_batch("grpo")
    computed = [sequence for sequence in batch.sequences if sequence.advantage]  # the others teach nothing
    with torch.no_grad():
        logps, mask = humanline.log_probs(policy, computed)
    wanted = mask & torch.tensor([sequence.is_chosen for sequence in computed])[:, None]
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


@pytest.mark.parametrize("flags", [
    "--loss grpo --sample-every 3", "--loss dpo", "--loss kto --perception sample --sync-k 2"])
def test_the_same_command_gives_the_same_run_to_the_last_digit(run, flags):
    first, second = run(flags), run(flags)
    assert timeless(first) == timeless(second) and same_weights(first, second)
    assert timeless(run(flags + " --seed 1")) != timeless(first)


@pytest.mark.parametrize("flags", [
    "--loss grpo --sync-k 3", "--loss dpo --sync-k 4 --perception sample", "--loss kto --no-humanline",
    "--loss grpo --sample-every 4 --sync-k 3", "--loss dpo --sample-every 1 --sync-k 3",
    "--loss kto --sample-every 3 --no-humanline", "--loss grpo --sync-drift 0.3", "--ref copy --sync-k 3",
    "--sync-k 2 --sync-alpha 0.5", "--loss dpo --sample-every 3 --sync-k 7"])
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
    assert timeless(resumed) == timeless(whole) and same_weights(resumed, whole)


def assert_same_batch(a: Batch, b: Batch) -> None:
    """Equal in every field, tensors bit for bit and of one type."""
    assert (a.step, a.reward, len(a.mismatched)) == (b.step, b.reward, len(b.mismatched))
    for x, y in zip(a.sequences + a.mismatched, b.sequences + b.mismatched, strict=True):
        assert dataclasses.replace(x, ref_logps=None) == dataclasses.replace(y, ref_logps=None)
        assert (x.ref_logps is None) == (y.ref_logps is None)
        assert x.ref_logps is None or (x.ref_logps.dtype == y.ref_logps.dtype and torch.equal(x.ref_logps, y.ref_logps))


@pytest.mark.parametrize("flags, pending", [
    ("--loss grpo --sync-k 4", 3), ("--loss dpo --no-humanline", 7), ("--loss kto --sync-k 8 --sample-every 4", 3),
    ("--loss kto --no-humanline --sample-every 4", 3), ("--loss grpo --sync-k 2 --sample-every 4 --ref copy", 3)])
def test_pending_batches_come_back_from_a_checkpoint_exactly(run, tmp_path, monkeypatch, flags, pending):
    flags += " --steps 8 --batch-size 8 --save-every 1 --keep 9"
    saved, restored, save, load = {}, [], humanline.Saver.save, humanline.load_checkpoint

    def spied_save(self, policy, optimizer, reference, step):
        saved[step] = copy.deepcopy(vars(reference.batches) | dict(until=reference.until))
        save(self, policy, optimizer, reference, step)

    def spied_load(*args):
        step = load(*args)
        restored.append(vars(args[-1].batches) | dict(until=args[-1].until))
        raise KeyboardInterrupt

    monkeypatch.setattr(humanline.Saver, "save", spied_save)
    folder = run(flags)
    monkeypatch.setattr(humanline, "load_checkpoint", spied_load)
    for step in (1, 5):
        with pytest.raises(KeyboardInterrupt):
            run(f"{flags} --resume {folder / 'checkpoint' / f'step-{step:08d}'}", out=str(tmp_path / f"resumed-{step}"))
        before, after = saved[step], restored.pop()
        for name in ("made_until", "until"):
            assert after[name] == before[name], name
        for a, b in zip(before["pending"], after["pending"], strict=True):
            assert_same_batch(a, b)
    # What was compared holds what each case is about.
    batches = saved[1]["pending"]
    assert [batch.step for batch in batches] == list(range(2, 2 + pending))
    assert all(bool(batch.mismatched) == ("kto" in flags) for batch in batches)
    assert all((s.ref_logps is None) == ("copy" in flags) for batch in batches for s in batch.sequences)


def test_resume_starts_afresh_where_there_is_no_checkpoint_and_skips_a_damaged_one(run, tmp_path, capsys):
    out = str(tmp_path / "out")
    folder = run("--steps 4 --save-every 1 --keep 3 --resume latest", out=out)
    whole = (folder / "final" / "model.safetensors").read_bytes()
    names = sorted(path.name for path in (folder / "checkpoint").iterdir())
    assert names == ["step-00000002", "step-00000003", "step-00000004"]
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
    with pytest.raises(humanline.UserError, match="it has done 4 of its planned 4 steps, so --steps 6 must lie between"):
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
    assert humanline.find_damage(out / "checkpoint" / "step-00000003") == ""


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
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", spied)
    lines = metrics(run("--max-grad-norm 0.01"))
    assert all(line["grad_norm"] > 0.01 for line in lines)
    assert norms == [pytest.approx(0.01, rel=1e-3)] * len(lines)
