"""Changes that a reader of humanline.py might make: each is an edit in one place, and correct everywhere."""

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from against_plain import (SAME, largest_difference, module_of, weights_of_humanline, weights_of_plain,
                           write_data)
from conftest import (
    ROOT, agree, gradient, metrics, policy_of, random_batch, same_weights, train_on_two_ranks, write_jsonl)

import humanline
from humanline import LOSSES, Loss, best_against_worst

# One place of humanline.py and what stands there instead.
SIGNED_CLIP = """
        low = config.log_eps_p
        high = config.log_eps_r
""", """
        low = torch.where(x.is_chosen, -0.2, -0.6)[:, None]
        high = torch.where(x.is_chosen, 0.6, 0.2)[:, None]
"""
ANNEALED_CLIP = """
        high = config.log_eps_r
""", """
        high = config.log_eps_r / x.step
"""
METRIC = """
        "logp": (x.logps, x.mask),
""", """
        "logp": (x.logps, x.mask),
        "grew": (x.log_ratio > 0, x.mask),
"""
DPO_WITH_KL = """
    return dpo_loss(x.perceived[0::2], x.perceived[1::2], config.beta)
""", """
    losses = dpo_loss(x.perceived[0::2], x.perceived[1::2], config.beta)
    if config.kl_beta:  # else nothing asks for d
        losses = losses + config.kl_beta * token_kl(x.d).sum(-1).view(-1, 2).sum(-1)
    return losses
"""
DPO_SETTINGS = 'settings="beta positive_only"', 'settings="beta positive_only kl_beta"'
BEST_OF_TWO = """
def best_of_two(run):
    mean = lambda drawn: sum(drawn[1]) / len(drawn[1])

    def draw(prompts, count, step, greedy):
        twice = [group for group in prompts for _ in range(2 * count)]
        drawn = run.sampler.draw(twice, step, greedy)
        return [max(drawn[i], drawn[i + 1], key=mean) for i in range(0, len(twice), 2)]

    return draw
"""


GSPO = """
        take_log_ratios(x, config)
""", """
        take_log_ratios(x, config)
        x.log_ratio = x.log_ratio.sum(-1, keepdim=True) / x.mask.sum(-1, keepdim=True)
"""
OWN_REFERENCE = """
        reference = Reference(policy, batches, config)
""", """
        reference = OwnReference(policy, batches, config)
"""
EMA = """
class OwnReference(Reference):
    def sync(self, until=None, ahead=()):
        policy = [part.to("cpu", copy=True) for part in self.parts]
        self.weights = self.weights or policy
        torch._foreach_lerp_(self.weights, policy, 0.25)
"""
SYNC_BY_DRIFT = """
            if step in syncs:
                reference.sync(syncs[step], batches.make(syncs[step]))
""", """
            if report["drift"] > 0.05:
                reference.sync()
"""
SYNC_AT_FIRST = """
                reference.sync(syncs[0], batches.make(syncs[0]))
""", """
                reference.sync()
"""
COSINE = """
            report["lr"] = config.lr * min(1, step / max(1, warmup))
""", """
            report["lr"] = config.lr * min(1, step / max(1, warmup))
            report["lr"] *= (1 + math.cos(math.pi * step / batches.steps)) / 2
"""


def patched(tmp_path: Path, *patches: tuple[str, str], more: str = ""):
    """humanline.py with these edits and additional classes, as a module and as a file in tmp_path."""
    text = (ROOT / "humanline.py").read_text(encoding="utf-8")
    for old, new in patches:
        assert text.count(old) == 1 and new.count("\n") - old.count("\n") <= 5
        text = text.replace(old, new)
    path = tmp_path / "humanline.py"
    path.write_text(text.replace("\n# ---------- Log-probs", f"{more}\n# ---------- Log-probs"),
                    encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return module_of(path)


def test_a_loss_is_an_entry_of_the_table(tiny, monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"\*\*Your own loss\*\*.*?```python\n(.*?)sys.exit", readme, re.DOTALL)[1]
    monkeypatch.setitem(LOSSES, "ipo", None)  # so that it is gone after the test
    exec(code, {})
    policy, _, config = policy_of(tiny, loss="ipo", beta=0.5)
    batch = random_batch("dpo")
    assert gradient(policy, batch, config).abs().max() > 0
    sums = []
    for sequence in batch.sequences:
        logps = humanline.log_probs(policy, [[sequence]])[0].detach()
        sums.append(float((logps - sequence.ref_logps).clamp(-1.5, 1.5).sum()))
    expected = [(chosen - rejected - 1) ** 2 for chosen, rejected in zip(sums[0::2], sums[1::2])]
    report = humanline.forward_backward(policy, batch, config)
    assert report["loss"] == pytest.approx(sum(expected) / 4, rel=1e-5)


@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_a_clip_whose_bounds_depend_on_is_chosen_needs_one_edit(tiny, tmp_path, loss):
    changed = patched(tmp_path, SIGNED_CLIP)
    policy, _, config = policy_of(tiny, loss=loss)
    batch = random_batch(loss)
    report = changed.forward_backward(policy, batch, config)

    def clipped(sequences):
        """Σ d̃ of each sequence, and whether each token is below, within or above its bounds."""
        sums, places = [], []
        for sequence in sequences:
            if sequence.advantage == 0:
                continue  # it is idle
            low, high = (-0.2, 0.6) if sequence.advantage > 0 else (-0.6, 0.2)
            d = (humanline.log_probs(policy, [[sequence]])[0] - sequence.ref_logps).detach()
            sums.append(float(d.clamp(low, high).sum()))
            places += (d > high).int().sub((d < low).int()).tolist()
        return sums, places

    _, places = clipped(batch.sequences)
    for name, place in (("clamped_low", -1), ("unclamped", 0), ("clamped_high", 1)):
        assert 0 < report[name] == pytest.approx(places.count(place) / len(places)), name
    if loss == "kto":
        assert {sequence.advantage for sequence in batch.mismatched} == {1.0, -1.0}
        sums, _ = clipped(batch.mismatched)
        assert report["z0"] == pytest.approx(max(0, sum(sums) / len(sums)), abs=1e-5)


@pytest.mark.parametrize("data", ["labels", "groups"])
def test_the_mismatched_sequences_of_a_run_have_the_advantages_of_their_examples(run, monkeypatch, data):
    seen = []
    forward = humanline.forward_backward
    monkeypatch.setattr(humanline, "forward_backward",
                        lambda policy, batch, config: (seen.append(batch), forward(policy, batch, config))[1])
    run("--loss kto --steps 2 --batch-size 8", data=data)
    for batch in seen:
        of_examples, of_mismatched = ([(sequence.prompt, sequence.advantage) for sequence in sequences]
                                      for sequences in (batch.sequences, batch.mismatched))
        assert of_mismatched == of_examples
        assert data == "groups" or {advantage for _, advantage in of_examples} == {1.0, -1.0}


@pytest.mark.slow
def test_that_clip_is_right_on_two_sharded_ranks_and_on_a_rank_without_work(tiny, data_files, tmp_path):
    changed = patched(tmp_path, SIGNED_CLIP)
    common = (f"--model {tiny} --data {data_files['groups']} --steps 3 --lr 1e-3 "
              "--microbatch-tokens 40").split()
    cases = [["--loss", "kto", "--batch-size", "5"], ["--loss", "dpo", "--batch-size", "1"]]
    runs = []
    for i, case in enumerate(cases):
        changed.train(changed.parse_config([*common, *case, "--out", str(tmp_path / f"alone{i}")]))
        for how in ([], ["--shard"]):
            runs.append([*common, *case, *how, "--out", str(tmp_path / f"ranks{i}{''.join(how)}")])
    train_on_two_ranks(tmp_path, runs, root=tmp_path)
    for i in range(len(cases)):
        alone = tmp_path / f"alone{i}"
        for folder in (tmp_path / f"ranks{i}", tmp_path / f"ranks{i}--shard"):
            agree(alone, folder)
            for a, b in zip(metrics(alone), metrics(folder), strict=True):
                names = {"clamped_low", "clamped_high", "unclamped", "z0"} & a.keys()
                assert {name: b[name] for name in names} == pytest.approx(
                    {name: a[name] for name in names}, abs=1e-5)
                assert a["clamped_low"] + a["clamped_high"] + a["unclamped"] == pytest.approx(1)


def test_a_custom_sampler_needs_one_file(run, tmp_path):
    path = tmp_path / "best.py"
    path.write_text(BEST_OF_TWO)
    folder = run(f"--sample-every 1 --steps 1 --batch-size 2 --sampler {path}:best_of_two")
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    [line] = metrics(folder)
    assert len(lines) == 8 and line["sampler_gap"] < 1e-4  # the log-probs that it reported are right


def test_a_new_metric_needs_one_line(tiny, tmp_path):
    changed = patched(tmp_path, METRIC)
    policy, _, config = policy_of(tiny, loss="dpo")
    batch = random_batch("dpo")
    grew = []
    for sequence in batch.sequences:
        grew += (humanline.log_probs(policy, [[sequence]])[0] > sequence.ref_logps).tolist()
    expected = sum(grew) / len(grew)
    assert 0 < expected < 1
    assert changed.forward_backward(policy, batch, config)["grew"] == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["--sync-k 1", "--no-humanline"])
def test_a_kl_term_in_dpo_needs_one_edit_and_is_not_always_0_online(tiny, data_files, varied, tmp_path, mode):
    changed = patched(tmp_path, DPO_WITH_KL, DPO_SETTINGS)
    runs = []
    for kl_beta in (0.0, 0.5):
        out = tmp_path / f"kl{kl_beta}"
        flags = (f"--model {tiny} --data {data_files['groups']} --loss dpo --sample-every 1 --steps 3 "
                 f"--batch-size 4 --lr 1e-2 --max-new-tokens 4 --group-size 4 --reward {varied} "
                 f"--kl-beta {kl_beta} {mode}")
        changed.train(changed.parse_config([*flags.split(), "--out", str(out)]))
        runs.append(metrics(out))
    without, with_kl = runs
    assert with_kl[0]["kl"] == 0 < min(line["kl"] for line in with_kl[1:])
    assert with_kl[1]["grad_norm"] != without[1]["grad_norm"]


def test_a_clip_that_anneals_needs_one_edit(tiny, tmp_path):
    changed = patched(tmp_path, ANNEALED_CLIP)
    policy, _, config = policy_of(tiny, loss="kto")
    batch = random_batch("kto")
    reports = {}
    for step in (1, 3):
        batch.step = step
        fixed = humanline.Config(model=tiny, loss="kto", log_eps_r=1.5 / step)
        reports[step] = changed.forward_backward(policy, batch, config)
        assert reports[step] == humanline.forward_backward(policy, batch, fixed)
    assert reports[3]["clamped_high"] > reports[1]["clamped_high"]


# A loss says in its entry what it needs.

def simpo(x, config):
    """Meng et al. 2024: no reference, and mean log-probs per token."""
    means = x.logps.sum(-1) / x.mask.sum(-1)
    return -torch.nn.functional.logsigmoid(2 * (means[0::2] - means[1::2]) - 0.5)


@pytest.mark.parametrize("more", ["", "--sample-every 2"])
def test_a_loss_can_do_without_a_reference(run, monkeypatch, capsys, more):
    monkeypatch.setitem(LOSSES, "simpo", Loss(simpo, best_against_worst, "pair", needs_reference=False))
    monkeypatch.setattr(humanline, "attach_logps", None)  # no pass of another policy is made
    lines = metrics(run(f"--loss simpo {more}"))
    assert "objective   SIMPO, plain; sync_k 0, perception none\n" in capsys.readouterr().out
    assert lines[-1]["loss"] != lines[0]["loss"] and not {"kl", "drift", "unclamped"} & lines[0].keys()
    for flag in ("--sync-k 2", "--perception none"):
        with pytest.raises(humanline.UserError, match=f"--loss simpo does not use {flag.split()[0]}"):
            run(f"--loss simpo {flag}")


def test_a_loss_can_use_log_probs_beside_the_log_ratio(tiny, monkeypatch):
    def with_nll(x, config):
        return LOSSES["dpo"].compute(x, config) - x.logps.sum(-1)[0::2]

    monkeypatch.setitem(LOSSES, "dpo-nll", Loss(with_nll, best_against_worst, "pair", settings="beta"))
    policy, _, config = policy_of(tiny, loss="dpo-nll")
    batch = random_batch("dpo")
    both, alone = (humanline.forward_backward(policy, batch, humanline.Config(model=tiny, loss=loss))["loss"]
                   for loss in ("dpo-nll", "dpo"))
    nll = -sum(humanline.log_probs(policy, [[sequence]]).sum().item()
               for sequence in batch.sequences[0::2]) / 4
    assert both - alone == pytest.approx(nll, rel=1e-5)


def test_d_is_relative_to_the_reference_and_log_ratio_to_the_old_policy(run, monkeypatch):
    seen = []

    def compute(x, config):
        seen.append((x.logps - x.ref_logps - x.d).abs().max()
                    + (x.logps - x.old_logps - x.log_ratio).abs().max())
        assert not torch.equal(x.ref_logps, x.old_logps) or x.step <= 2
        return LOSSES["grpo"].compute(x, config)

    monkeypatch.setitem(LOSSES, "spied", dataclasses.replace(LOSSES["grpo"], compute=compute))
    run("--loss spied --no-humanline --sample-every 2 --kl-beta 0.1")
    assert len(seen) >= 6 and max(seen) == 0


def test_a_loss_can_learn_from_groups_without_a_difference(run, tmp_path, monkeypatch):
    (tmp_path / "same.py").write_text("def same(prompts, completions, rows):\n    return [1.0] * len(rows)\n")
    nll = Loss(lambda x, config: -x.logps, lambda group, sequences: [sequences], "group", needs_reference=False,
               needs_all=True)
    monkeypatch.setitem(LOSSES, "nll", nll)
    lines = metrics(run(f"--loss nll --sample-every 1 --reward {tmp_path}/same.py:same"))
    assert all(line["no_difference"] == 1 and line["grad_norm"] > 0 for line in lines)


def test_a_custom_loss_runs_on_the_demo_wherever_its_entry_is(monkeypatch):
    own = {name: Loss(simpo, LOSSES[like].make_units, LOSSES[like].unit, needs_reference=False)
           for name, like in (("a-pair", "dpo"), ("a-group", "grpo"))}
    monkeypatch.setattr(humanline, "LOSSES", own | LOSSES)
    assert humanline.parse_config(["--loss", "dpo"]).data == humanline.parse_config(["--loss", "a-pair"]).data
    for name in own:
        config = humanline.parse_config(["--loss", name])
        assert config.loss == name and config.sync_k == 0 and not config.positive_only


# The reference and the schedule.

def test_a_ratio_of_whole_sequences_is_clipped_per_sequence(tiny, tmp_path):
    changed = patched(tmp_path, GSPO)
    policy, _, config = policy_of(tiny, log_eps_p=-0.2, log_eps_r=0.3)
    batch = random_batch("grpo")
    report = changed.forward_backward(policy, batch, config)
    places = []
    for sequence in batch.sequences:
        if sequence.advantage == 0:
            continue  # it is idle
        ratio = (humanline.log_probs(policy, [[sequence]])[0] - sequence.ref_logps).mean().item()
        places += [(ratio > 0.3) - (ratio < -0.2)] * len(sequence.completion)
    for name, place in (("clamped_low", -1), ("unclamped", 0), ("clamped_high", 1)):
        assert report[name] == pytest.approx(places.count(place) / len(places)), name
    assert len(set(places)) > 1


@pytest.mark.parametrize("more", ["", "--sample-every 3"])
@pytest.mark.parametrize("rule", ["ema", "drift"])
def test_the_reference_can_follow_the_policy_by_another_rule(tiny, data_files, varied, tmp_path, monkeypatch,
                                                             rule, more):
    patches = [OWN_REFERENCE] + [SYNC_BY_DRIFT, SYNC_AT_FIRST] * (rule == "drift")
    changed = patched(tmp_path, *patches,
                      more=EMA if rule == "ema" else "class OwnReference(Reference): pass\n")
    forward_backward, syncs, gaps = changed.forward_backward, [], []

    def watched(policy, batch, config):
        nonlocal expected
        expected = expected or copy.deepcopy(policy)  # the reference as it should be
        for sequence, logps in zip(batch.sequences,
                                   humanline.sequence_logps(expected, batch.sequences, config)):
            if not changed.is_idle(sequence, config):
                gaps.append((sequence.ref_logps - logps).abs().max().item())
        report = forward_backward(policy, batch, config)
        weight = 0.25 if rule == "ema" else float(report["drift"] > 0.05)
        syncs.append(weight)
        with torch.no_grad():
            torch._foreach_lerp_(list(expected.parameters()), list(policy.parameters()), weight)
        return report

    expected = None
    monkeypatch.setattr(changed, "forward_backward", watched)
    flags = (f"--model {tiny} --data {data_files['groups']} --steps 8 --batch-size 4 --lr 1e-2 "
             f"--max-new-tokens 4 --group-size 4 --sync-k 1 --reward {varied} --out {tmp_path}/out {more}")
    changed.train(changed.parse_config(flags.split()))
    assert len(gaps) > 20 and max(gaps) < 1e-4 and (rule == "ema" or set(syncs) == {0, 1})


@pytest.mark.parametrize("flags", ["--loss kto --sync-k 3", "--loss dpo --sync-k 2 --sample-every 3",
                                   "--sync-k 3 --sample-every 4",
                                   "--no-humanline --sample-every 3 --kl-beta 0.1",
                                   pytest.param("--lora 4 --sync-k 3", marks=pytest.mark.needs("peft"))])
def test_lookahead_changes_no_weight(run, monkeypatch, flags):
    ahead, sync = run(flags), humanline.Reference.sync
    monkeypatch.setattr(humanline.Reference, "sync", lambda self, until, ahead: sync(self))
    plain = run(flags)
    assert same_weights(ahead, plain)


def test_a_schedule_needs_one_edit_and_a_resumed_run_keeps_it(tiny, data_files, tmp_path):
    changed = patched(tmp_path, COSINE)
    flags = (f"--model {tiny} --data {data_files['groups']} --steps 6 --batch-size 4 --save-every 3 "
             f"--out {tmp_path}/out")
    changed.train(changed.parse_config(flags.split()))
    whole = [line["lr"] for line in metrics(tmp_path / "out")]
    shutil.rmtree(tmp_path / "out" / "final")
    shutil.rmtree(tmp_path / "out" / "checkpoint" / "step-00000006")
    changed.train(changed.parse_config([*flags.split(), "--resume", "latest"]))
    assert [line["lr"] for line in metrics(tmp_path / "out")] == whole and whole[-1] == 0 < whole[0]


RUNNING_Z0 = [("""
            reference.score(batch)
""", """
            reference.score(batch)
            batch.last_z0 = run.latest.get("z0", 0.0)
"""), ("""
    return perceived.sum(-1).mean().clamp(min=0).to(policy.device)
""", """
    return 0.5 * batch.last_z0 + 0.5 * perceived.sum(-1).mean().clamp(min=0).to(policy.device)
""")]


def test_a_running_mean_of_z0_starts_from_the_metrics_and_a_resumed_run_keeps_it(tiny, tmp_path):
    changed, out = patched(tmp_path, *RUNNING_Z0), tmp_path / "out"
    write_jsonl(tmp_path / "rows.jsonl", [  # the same answer is desirable to all prompts, so z0 is positive
        dict(prompt=f"{i}", completion="abc" if i % 4 else "xyz", label=i % 4 > 0) for i in range(48)])
    flags = (f"--model {tiny} --data {tmp_path}/rows.jsonl --loss kto --batch-size 8 --lr 1e-2 --save-every 3 "
             f"--out {out}").split()
    changed.train(changed.parse_config(flags))
    whole = metrics(out)
    shutil.rmtree(out / "final")
    shutil.rmtree(out / "checkpoint" / "step-00000006")
    changed.train(changed.parse_config([*flags, "--resume", "latest"]))
    again = metrics(out)
    assert [line["z0"] for line in again] == [line["z0"] for line in whole]
    assert [line["loss"] for line in again] == [line["loss"] for line in whole]
    assert whole[3]["z0"] > 0.4 * whole[2]["z0"] > 0  # so that the state matters


# Changes of research, each with the same change of plain.py: a case, the edits of humanline.py, and those
# of plain.py.

KTO_Z0 = """
                pairs.append(Sample(sample.prompt, other.completion))
""", """
                pairs.append(Sample(sample.prompt, other.completion, advantage=sample.advantage))
"""
SHAPED = [("""
        rewards = torch.tensor(group.rewards, dtype=torch.float64)
""", """
        rewards = torch.tensor(group.rewards, dtype=torch.float64)
        rewards -= torch.tensor([sum(ids) % 101 / 101 for ids in group.completions], dtype=torch.float64)
""")], [("""
        rewards = [sample.reward for sample in group]
""", """
        for sample in group:
            sample.reward -= sum(sample.completion) % 101 / 101
        rewards = [sample.reward for sample in group]
""")]
CHANGES = {
    "bounds of the clip by the sign of the advantage": (
        dict(loss="kto", sync_k=2), [("""
        low = config.log_eps_p
        high = config.log_eps_r
""", """
        low = torch.where(x.advantages > 0, -0.02, -0.3)[:, None]
        high = torch.where(x.advantages > 0, 1.0, 0.1)[:, None]
""")], [KTO_Z0, ("""
def perceive(d, mask, step):
""", """
def perceive(d, batch):
"""), ("""
        return d.clamp(config.log_eps_p, config.log_eps_r)
""", """
        is_better = torch.tensor([sample.advantage > 0 for sample in batch])[:, None]
        return d.clamp(torch.where(is_better, -0.02, -0.3), torch.where(is_better, 1.0, 0.1))
"""), ("perceived = perceive(d, mask, step)", "perceived = perceive(d, batch)"),
            ("return perceive(d, mask, step)", "return perceive(d, pairs)")]),
    "an entropy bonus": (
        dict(loss="grpo", reward="coin", sync_k=1, sample_every=2), [("""
    return grpo_loss(x.d, x.perceived, x.advantages, config.epsilon, config.kl_beta, high)
""", """
    loss = grpo_loss(x.d, x.perceived, x.advantages, config.epsilon, config.kl_beta, high)
    return loss + 0.1 * x.logps.detach() * x.logps
"""), ("""
        unit="group",
        settings=""", """
        unit="group",
        needs_all=True,
        settings=""")], [("""
    return (mask * losses).sum() / mask.sum()
""", """
    losses += 0.1 * logps.detach() * logps
    return (mask * losses).sum() / mask.sum()
""")]),
    "a growing k": (
        dict(loss="dpo", sync_k=1, sample_every=3), [("""
    return dict(itertools.pairwise([*range(0, steps, config.sync_k or steps), steps]))
""", """
    return dict(itertools.pairwise([0, 1, 3, steps]))
""")], [("""
        if config.sync_k and step % config.sync_k == 0:""", """
        if step in (1, 3):""")]),
    "two inner epochs": (
        dict(loss="kto", sync_k=0, sample_every=2), [("""
            report |= forward_backward(policy, batch, config)
""", """
            report |= forward_backward(policy, batch, config)
            torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            report |= forward_backward(policy, batch, config)
"""), ("batches.pending[1:], config)", "batches.pending, config)")], [("""
            mean_loss(policy, old_policy, reference, batch, step).backward()
""", """
            mean_loss(policy, old_policy, reference, batch, step).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            mean_loss(policy, old_policy, reference, batch, step).backward()
"""), ("torch.optim.AdamW(policy.parameters(), eps", "torch.optim.AdamW(policy.parameters(), config.lr, eps")]),
    "DAPO's mask of completions without an end, and redraws of groups without a difference": (
        dict(loss="grpo", reward="coin", humanline=False, sample_every=2), [("""
                rollouts = sampler.draw_rollouts(prompts, rows, config.group_size, step)
""", """
                rollouts = sampler.draw_rollouts(prompts, rows, config.group_size, step)
                while same := [i for i, group in enumerate(rollouts) if len(set(group.rewards)) == 1]:
                    again = sampler.draw_rollouts([prompts[i] for i in same], rows, config.group_size, step)
                    for i, group in zip(same, again):
                        rollouts[i] = group
"""), ("""
    return grpo_loss(x.d, x.perceived, x.advantages, config.epsilon, config.kl_beta, high)
""", """
    ends = torch.tensor([[sequence.completion[-1] == 3] for sequence in itertools.chain(*x.packed)])
    return ends * grpo_loss(x.d, x.perceived, x.advantages, config.epsilon, config.kl_beta, high)
""")], [("""
    return (mask * losses).sum() / mask.sum()
""", """
    ends = torch.tensor([[sample.completion[-1] == 3] for sample in batch])
    return (mask * losses * ends).sum() / mask.sum()
""")]),
    "rewards shaped by the tokens, in DPO": (
        dict(loss="dpo", reward="coin", sync_k=2, sample_every=2), *SHAPED),
    "rewards shaped by the tokens, in KTO": (
        dict(loss="kto", reward="coin", sync_k=2, sample_every=2), *SHAPED),
    "CISPO": (
        dict(loss="grpo", sync_k=2), [("""
    return grpo_loss(x.d, x.perceived, x.advantages, config.epsilon, config.kl_beta, high)
""", """
    return -(ratio.clamp(max=1 + high) * advantages) * x.perceived
""")], [("""
    losses = -torch.min(advantages * ratio, advantages * clipped)
""", """
    is_kept = (d >= config.log_eps_p) & (d <= config.log_eps_r)
    losses = -(is_kept * ratio.detach().clamp(max=1 + EPSILON) * advantages) * logps
""")]),
    "bounds that anneal over --steps": (
        dict(loss="dpo", sync_k=2), [("""
        low = config.log_eps_p
        high = config.log_eps_r
""", """
        low, high = (bound * x.step / config.steps for bound in (config.log_eps_p, config.log_eps_r))
""")], [("""
        return d.clamp(config.log_eps_p, config.log_eps_r)
""", """
        return d.clamp(config.log_eps_p * step / config.steps, config.log_eps_r * step / config.steps)
""")]),
    "RLOO": (
        dict(loss="grpo", sync_k=2), [("""
    return centred / (rewards.std(-1, correction=0, keepdim=True) + eps)
""", """
    return centred * rewards.shape[-1] / (rewards.shape[-1] - 1)
""")], [("(sample.reward - fmean(rewards)) / (pstdev(rewards) + 0.01)",
         "sample.reward - (sum(rewards) - sample.reward) / (len(rewards) - 1)")]),
    "a cosine schedule": (
        dict(loss="dpo", sync_k=2), [COSINE], [("""
        optimizer.step()
""", """
        optimizer.param_groups[0]["lr"] *= (1 + math.cos(math.pi * step / config.steps)) / 2
        optimizer.step()
""")]),
    "truncated importance weights, where the sampler is known": (
        dict(loss="grpo", sync_k=2), [("""
    return grpo_loss(x.d, x.perceived, x.advantages, config.epsilon, config.kl_beta, high)
""", """
    weights = (x.logps.detach() - x.sampler_logps).exp().clamp(max=2).nan_to_num(1.0)
    return weights * grpo_loss(x.d, x.perceived, x.advantages, config.epsilon, config.kl_beta, high)
"""), ("""
        for sequence, logps in zip(sequences, group.logps):
""", """
        for sequence in sequences[1:]:
            logps = [-4.0] * len(sequence.completion)
""")], [("""
            sample.advantage = (""", """
            sample.is_known = sample is not group[0]
            sample.advantage = ("""), ("""
    return (mask * losses).sum() / mask.sum()
""", """
    is_known = torch.tensor([[sample.is_known] for sample in batch])
    losses = losses * torch.where(is_known, (logps.detach() + 4.0).exp().clamp(max=2), 1.0)
    return (mask * losses).sum() / mask.sum()
""")]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_research_is_what_the_same_change_of_the_plain_method_is(name, tiny, data, tmp_path):
    case, edits, edits_of_plain = CHANGES[name]
    changed, text = patched(tmp_path, *edits), (ROOT / "tests" / "plain.py").read_text(encoding="utf-8")
    for old, new in edits_of_plain:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    text = text.replace("ROOT = Path(__file__).resolve().parent.parent", f"ROOT = Path({str(ROOT)!r})")
    (tmp_path / "plain.py").write_text(text, encoding="utf-8")
    ours = weights_of_humanline(changed, case, tiny, data, tmp_path / "run")
    plains, _ = weights_of_plain(module_of(tmp_path / "plain.py"), case, tiny, data, tmp_path / "run")
    assert largest_difference(ours, plains) <= SAME
    if "redraws" in name:
        assert {line["no_difference"] for line in metrics(tmp_path / "run")} == {0.0}


def test_a_second_inner_epoch_without_the_log_probs_of_the_old_policy_is_refused(tiny, data, tmp_path):
    case, [epochs, _], _ = CHANGES["two inner epochs"]
    changed = patched(tmp_path, epochs)
    with pytest.raises(ValueError, match="no old_logps; call attach_logps when rollouts are drawn"):
        weights_of_humanline(changed, case, tiny, data, tmp_path / "run")


def test_inner_epochs_do_not_widen_the_gap_of_a_sampler(tiny, data_files, varied, tmp_path):
    _, [epochs, _], _ = CHANGES["two inner epochs"]
    changed, path = patched(tmp_path, epochs), tmp_path / "best.py"
    path.write_text(BEST_OF_TWO)
    changed.train(changed.parse_config(
        f"--model {tiny} --data {data_files['groups']} --steps 3 --batch-size 4 --lr 1e-2 --max-new-tokens 4 "
        f"--group-size 4 --reward {varied} --sample-every 2 --sampler {path}:best_of_two --out {tmp_path}/out"
        .split()))
    gaps = [line.get("sampler_gap") for line in metrics(tmp_path / "out")]
    assert gaps[1] is None and max(gaps[0], gaps[2]) < 1e-4
