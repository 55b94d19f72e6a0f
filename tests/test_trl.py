"""configs/trl_humanline.py with the real TRL, which is an optional dependency: the weights of plain.py, step by
step, on the same batches."""

import importlib.util
import inspect
import random
import re
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT, in_two_ranks, rows_of

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.needs("trl")

import datasets
from transformers import AutoModelForCausalLM, AutoTokenizer

import humanline
import plain
from test_trl_agreement import EPS, LR, NORM, copy_of, distance, settings

# Imported when it is first used: it takes seconds, in which a worker that has other tests would run them.
file = importlib.util.spec_from_file_location("trl_humanline", ROOT / "configs" / "trl_humanline.py")
file.loader = importlib.util.LazyLoader(file.loader)
trl_humanline = sys.modules["trl_humanline"] = importlib.util.module_from_spec(file)
file.loader.exec_module(trl_humanline)

STEPS, SIZE, GROUP = 5, 8, 4  # SIZE: pairs, examples or completions of a step
LENGTHS = [2, 8, 5, 3]  # of a group's completions
BETA = 2.0  # of DPO and KTO: so large that z₀ matters
# Narrow, so that both bounds act within five steps; KTO's so that z₀ is above 0.
CLIPS = dict(dpo=dict(log_eps_p=-0.03, log_eps_r=0.02), kto=dict(log_eps_p=-0.02, log_eps_r=0.1))
CLIPS["grpo"] = CLIPS["dpo"]


def make_units(loss: str) -> list[list[plain.Sample]]:
    """The pairs, examples or groups of all steps, of random tokens. Tokens 8 to 99 are characters."""
    chance, end = random.Random(0), AutoTokenizer.from_pretrained(plain.DEMO / "model").eos_token_id
    units = []
    for number in range(STEPS * SIZE // (GROUP if loss == "grpo" else 1)):
        prompt = [chance.randrange(8, 100) for _ in range(chance.randint(3, 9))]
        count = {"dpo": 2, "kto": 1, "grpo": GROUP}[loss]
        rewards = {"dpo": [1.0, -1.0], "kto": [chance.choice([1.0, -1.0])],
                   "grpo": [0.9, -0.4, 0.5, -1.0]}[loss]
        lengths = LENGTHS if loss == "grpo" else [chance.randint(1, 9) for _ in range(count)]
        units.append([
            plain.Sample(prompt, [*(chance.randrange(8, 100) for _ in range(length)), end], reward, reward)
            for length, reward in zip(lengths, rewards)])
    return units


def weights_of_plain(policy, monkeypatch, units: list, **more) -> dict[str, torch.Tensor]:
    """The weights of plain.py after training on the units in this order."""
    torch.manual_seed(humanline.seed_for(0, "order", 0))
    shuffled = [None] * len(units)
    for unit, i in zip(units, torch.randperm(len(units)).tolist()):
        shuffled[i] = unit
    unit_size = len(units[0]) if more["loss"] == "grpo" else 1
    monkeypatch.setattr(plain, "BETA", BETA)
    monkeypatch.setattr(plain, "config", plain.Settings(
        **dict(sync_k=2, positive_only=False, steps=STEPS, batch_size=SIZE // unit_size, lr=LR, warmup=0,
               adam_eps=EPS, max_grad_norm=NORM, **CLIPS[more["loss"]]) | more))
    monkeypatch.setattr(plain, "offline_units", lambda rows, tokenizer: shuffled)
    plain.config.temperature = more.get("temperature", 1.0)  # also offline
    plain.train(policy, None, None, None)
    return copy_of(policy)


def rows_for_trl(loss: str, units: list, size: int) -> list[dict]:
    """The units as rows of text. For z₀, TRL combines each prompt with the completion before it in the
    microbatch, plain.py with the one after it, so TRL gets KTO's in reverse order."""
    tokenizer = AutoTokenizer.from_pretrained(plain.DEMO / "model")
    text = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    if loss == "dpo":
        return [dict(prompt=text(best.prompt), chosen=text(best.completion), rejected=text(worst.completion))
                for best, worst in units]
    if loss == "kto":
        batches = [units[start : start + size] for start in range(0, len(units), size)]
        samples = [unit[0] for batch in batches for unit in reversed(batch)]
        return [dict(prompt=text(s.prompt), completion=text(s.completion), label=s.advantage > 0)
                for s in samples]
    return [dict(prompt=text(group[0].prompt)) for group in units]


def make_trainer(loss: str, model, out, units: list, given: dict = {}, **more):
    """A trainer on these units. `given` are further arguments of the trainer, `more` of its TRL config."""
    size = more.get("per_device_train_batch_size", SIZE)
    arguments = settings(out, STEPS, SIZE) | dict(disable_dropout=True)
    common = dict(train_dataset=datasets.Dataset.from_list(rows_for_trl(loss, units, size)),
                  processing_class=AutoTokenizer.from_pretrained(plain.DEMO / "model"))
    common |= dict(sync_k=2, **CLIPS[loss]) | given
    Trainer = getattr(trl_humanline, f"Humanline{loss.upper()}Trainer")
    Config = getattr(trl, f"{loss.upper()}Config")
    if loss != "grpo":
        arguments |= dict(train_sampling_strategy="sequential", beta=BETA)
    else:
        arguments |= dict(num_generations=GROUP, max_completion_length=max(LENGTHS) + 1, scale_rewards="none",
                          shuffle_dataset=False, use_bias_correction_kl=False)
        completions = {tuple(unit[0].prompt): [sample.completion for sample in unit] for unit in units}
        rewards = {tuple(sample.completion): sample.reward for unit in units for sample in unit}
        common |= dict(reward_funcs=lambda completion_ids, **_: [rewards[tuple(ids)] for ids in completion_ids])

        class Trainer(Trainer):
            def _generate_single_turn(self, prompt_ids, *args, **kwargs):
                return [completions[tuple(prompt)][i % GROUP] for i, prompt in enumerate(prompt_ids)], None

    return Trainer(model, args=Config(**arguments | more), **common)


def weights_of_trl(trainer) -> dict[str, torch.Tensor]:
    trainer.train()
    assert trainer.state.global_step == STEPS
    return copy_of(trainer.model)


@pytest.fixture(autouse=True)
def unshuffled(monkeypatch):
    """A step keeps its own groups."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)


def load(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


CASES = {
    "dpo": ("dpo", {}, {}),
    "kto": ("kto", {}, {}),
    "grpo": ("grpo", {}, {}),
    "dpo, k 1": ("dpo", dict(sync_k=1), {}),
    "kto, k 1": ("kto", dict(sync_k=1), {}),
    "grpo, k 1": ("grpo", dict(sync_k=1), {}),
    "dpo, no sync": ("dpo", dict(sync_k=0), {}),
    "kto, no sync": ("kto", dict(sync_k=0), {}),
    "grpo, no sync": ("grpo", dict(sync_k=0), {}),
    "grpo, KL": ("grpo", dict(kl_beta=0.3), dict(beta=0.3)),
    "grpo, KL, one drawing": ("grpo", dict(kl_beta=0.3), dict(beta=0.3, steps_per_generation=STEPS)),
    "grpo, T 0.7": ("grpo", dict(temperature=0.7), dict(temperature=0.7)),
    "dpo, accumulated": ("dpo", {}, dict(per_device_train_batch_size=2, gradient_accumulation_steps=4)),
    "kto, accumulated": ("kto", {}, dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)),
    "grpo, accumulated": ("grpo", dict(kl_beta=0.3), dict(
        beta=0.3, per_device_train_batch_size=GROUP, gradient_accumulation_steps=2)),
}


# Each loss, each k, and what is TRL's alone; the others with --slow.
QUICK = ("dpo", "kto", "grpo", "kto, k 1", "grpo, no sync", "grpo, KL, one drawing", "grpo, T 0.7",
         "kto, accumulated", "grpo, accumulated")


def slow_unless(is_quick: bool, *values):
    return pytest.param(*values, marks=[] if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("loss, form, more", [
    slow_unless(name in QUICK, *case) for name, case in CASES.items()], ids=CASES)
def test_five_steps_end_in_the_weights_of_plain(monkeypatch, tiny, tmp_path, loss, form, more):
    units = make_units(loss)
    trainer = make_trainer(loss, tiny, tmp_path, units, given=dict(sync_k=form.get("sync_k", 2)), **more)
    before = copy_of(trainer.model)
    ours = weights_of_trl(trainer)
    if loss == "kto" and more:  # TRL takes z₀ of each microbatch
        mean_loss = plain.mean_loss

        def of_microbatches(policy, old_policy, reference, batch, step):
            halves = batch[:4], batch[4:]
            return sum(mean_loss(policy, old_policy, reference, half, step) for half in halves) / 2

        monkeypatch.setattr(plain, "mean_loss", of_microbatches)
    plainly = weights_of_plain(load(tiny), monkeypatch, units, loss=loss, **form)
    assert distance(ours, before) > 1e-2
    assert distance(ours, plainly) < 1e-5
    log = [line for line in trainer.state.log_history if "loss" in line]
    assert min(line["unclamped"] for line in log) < 0.9 < log[0]["unclamped"] == 1
    assert loss != "kto" or max(line["kl"] for line in log) > 1e-3  # z₀


def test_a_drawing_that_is_used_twice_is_scored_by_the_reference_once_per_sync(monkeypatch, tiny, tmp_path):
    """Syncs come before the updates of steps 3 and 6; the five steps train on the drawings 1, 1, 2, 2, 3."""
    units, count = make_units("grpo"), SIZE // GROUP
    trainer = make_trainer("grpo", tiny, tmp_path, units[: 3 * count], given=dict(sync_k=3), beta=0.3,
                           num_iterations=2)
    scored, score = [], trl_humanline.Reference.__call__
    monkeypatch.setattr(trl_humanline.Reference, "__call__", lambda self, **batch: (
        scored.append(trainer.state.global_step + 1), score(self, **batch))[1])
    ours = weights_of_trl(trainer)
    assert scored == [1, 3, 4, 5]
    twice = [units[start + i] for start in (0, 0, count, count, 2 * count) for i in range(count)]
    plainly = weights_of_plain(load(tiny), monkeypatch, twice, loss="grpo", sync_k=3, kl_beta=0.3)
    assert distance(ours, plainly) < 1e-5


# ---------- Mutants -----------------------------------------------------------------------------------------

def without_clip(monkeypatch):
    monkeypatch.setattr(trl_humanline, "humanline_clip", lambda log_ratio, *bounds: log_ratio)


def with_a_sync_after_the_step(monkeypatch):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.sync_k == 0:
            self.reference.sync()

    monkeypatch.setattr(trl_humanline.SyncBeforeStep, "on_pre_optimizer_step", lambda *_, **__: None)
    monkeypatch.setattr(trl_humanline.SyncBeforeStep, "on_step_end", on_step_end)


def with_raw_mismatched_pairs(monkeypatch):
    perceive = trl_humanline.Humanline.perceive
    monkeypatch.setattr(trl_humanline.Humanline, "perceive", lambda self, outputs, reference: (
        perceive(self, outputs, reference) if outputs.log_probs.requires_grad else reference))


@pytest.mark.parametrize("loss, mutate", [
    ("dpo", without_clip), ("grpo", with_a_sync_after_the_step), ("kto", with_raw_mismatched_pairs),
    *(slow_unless(False, *mutant) for mutant in (
        ("dpo", with_a_sync_after_the_step), ("kto", without_clip), ("kto", with_a_sync_after_the_step),
        ("grpo", without_clip))),
])
def test_mutants_end_in_other_weights(monkeypatch, tiny, tmp_path, loss, mutate):
    units = make_units(loss)
    plainly = weights_of_plain(load(tiny), monkeypatch, units, loss=loss)
    mutate(monkeypatch)
    assert distance(weights_of_trl(make_trainer(loss, tiny, tmp_path, units)), plainly) > 1e-3


# ---------- PEFT, ranks, resuming, evaluation ---------------------------------------------------------------

def lora():
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"],
                           init_lora_weights=False)


@pytest.mark.needs("peft")
@pytest.mark.parametrize("loss, more, is_wrapped", [
    ("kto", {}, False), ("grpo", dict(beta=0.3), True), ("dpo", dict(gradient_checkpointing=True), False),
    *(slow_unless(False, *case) for case in (
        ("dpo", {}, False), ("grpo", {}, False), ("grpo", dict(beta=0.3), False), ("dpo", {}, True))),
])
def test_adapters_end_in_the_weights_of_plain(monkeypatch, tiny, tmp_path, loss, more, is_wrapped):
    """Also where the model comes with adapters, for which TRL adds a second, frozen adapter of its own."""
    from peft import get_peft_model

    units, model, policy = make_units(loss), tiny, get_peft_model(load(tiny), lora())
    given = dict(peft_config=lora())
    if is_wrapped:
        model, given = get_peft_model(load(tiny), lora()), {}
    trainer = make_trainer(loss, model, tmp_path, units, given=given, **more)
    before = copy_of(trainer.model)
    policy.load_state_dict(before, strict=False)
    ours = weights_of_trl(trainer)
    kl_beta = more.get("beta", 0.0)
    plainly = weights_of_plain(policy, monkeypatch, units, loss=loss, kl_beta=kl_beta)
    assert distance(ours, before) > 1e-2
    assert distance(ours, plainly) < 1e-5
    assert len(trainer.ref_model.weights) == 2 * 3 * 2  # A and B of three matrices in two layers
    assert any(line.get("unclamped", 1) < 1 for line in trainer.state.log_history)


ON_RANKS = {
    "dpo": ("dpo", dict(per_device_train_batch_size=2, gradient_accumulation_steps=2)),
    "kto": ("kto", dict(per_device_train_batch_size=4)),
    "grpo": ("grpo", dict(per_device_train_batch_size=GROUP, beta=0.3)),
    "lora": ("dpo", dict(per_device_train_batch_size=4)),
}


def train_on_ranks(model: str, out: Path, names: list[str]) -> None:
    """What each of two ranks does in the next test."""
    for name in names:
        loss, more = ON_RANKS[name]
        given = dict(peft_config=lora()) if name == "lora" else {}
        trainer = make_trainer(loss, model, out / name, make_units(loss), given=given, ddp_backend="gloo",
                               **more)
        assert trainer.accelerator.num_processes == 2
        weights = weights_of_trl(trainer)
        if trainer.is_world_process_zero():
            torch.save((weights, trainer.state.log_history), out / f"{name}.pt")


@pytest.mark.needs("peft")
@pytest.mark.parametrize("names", [["grpo", "lora"], slow_unless(False, ["dpo", "kto"])], ids=", ".join)
def test_two_ranks_end_in_the_weights_of_one_process(tiny, tmp_path, names):
    (tmp_path / "driver.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        f"import pathlib, test_trl, torch\ntorch.set_num_threads(1)\n"
        f"test_trl.train_on_ranks({tiny!r}, pathlib.Path({str(tmp_path)!r}), {names})\n")
    in_two_ranks(tmp_path / "driver.py", first_import="trl.trainer.grpo_trainer")
    for name in names:
        loss, more = ON_RANKS[name]
        units, given = make_units(loss), dict(peft_config=lora()) if name == "lora" else {}
        trainer = make_trainer(loss, tiny, tmp_path / name, units, given=given,
                               **{name: value for name, value in more.items() if name == "beta"})
        if loss == "kto":  # completions change places within the microbatch of a rank
            trainer.train_dataset = make_trainer(loss, tiny, tmp_path / name, units, **more).train_dataset
        weights = weights_of_trl(trainer)
        of_ranks, log = torch.load(tmp_path / f"{name}.pt")
        assert distance(weights, of_ranks) < 1e-5, name
        for mine, theirs in zip(trainer.state.log_history[:STEPS], log):
            assert mine["unclamped"] == pytest.approx(theirs["unclamped"], abs=0.01), name


@pytest.mark.needs("peft")
@pytest.mark.parametrize("given", [{}, dict(peft_config=None)], ids=["whole", "lora"])
def test_a_resumed_run_has_the_reference_of_the_last_sync(tiny, tmp_path, given):
    """The checkpoint of step 3 needs the policy of step 1."""
    def make():
        return make_trainer("dpo", tiny, tmp_path, make_units("dpo"), save_strategy="steps", save_steps=3,
                            given={name: lora() for name in given})

    weights = weights_of_trl(make())
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert distance(weights, copy_of(resumed.model)) < 1e-6


@pytest.mark.parametrize("loss, first", [("dpo", 0.6931), ("kto", 0.5), ("grpo", None)])
def test_evaluation_is_to_the_reference_too(tiny, tmp_path, loss, first):
    units = make_units(loss)
    trainer = make_trainer(loss, tiny, tmp_path, units, per_device_eval_batch_size=SIZE)
    result = trainer.evaluate(datasets.Dataset.from_list(rows_for_trl(loss, units, SIZE)))
    assert first is None or result["eval_loss"] == pytest.approx(first, abs=1e-4)


# ---------- What does not work, and the text ----------------------------------------------------------------

@pytest.mark.parametrize("loss, given, more, message", [
    ("dpo", {}, dict(sync_ref_model=True), "sync_ref_model: it syncs after"),
    ("kto", {}, dict(precompute_ref_log_probs=True), "precompute_ref_log_probs: the reference changes"),
    ("dpo", dict(ref_model=torch.nn.Linear(1, 1)), {}, "ref_model: the first reference is the initial policy"),
    ("dpo", {}, dict(loss_type=["sigmoid", "aot"]), "loss_type='aot': its gradient"),
    ("grpo", {}, dict(loss_type="cispo"), "loss_type='cispo': its gradient"),
    ("grpo", {}, dict(off_policy_mask_threshold=0.0), "off_policy_mask_threshold: it needs"),
    ("dpo", dict(sync_k=-1), {}, "needs sync_k >= 0"),
    ("kto", dict(log_eps_p=0.1), {}, "needs sync_k >= 0 and log_eps_p <= 0"),
])
def test_what_cannot_be_combined_is_an_error_before_the_model_is_loaded(tmp_path, loss, given, more, message):
    with pytest.raises(ValueError, match=f"Trainer .*{message}"):
        make_trainer(loss, "no/model", tmp_path, make_units(loss), given=given, **more)


@pytest.mark.needs("peft")
def test_sharded_weights_are_an_error(monkeypatch, tiny, tmp_path):
    import transformers

    create = transformers.Trainer.create_accelerator_and_postprocess

    def sharded(self):
        create(self)
        self.is_fsdp_enabled = True

    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", sharded)
    with pytest.raises(ValueError, match="HumanlineDPOTrainer cannot sync sharded weights. Launch with DDP"):
        make_trainer("dpo", tiny, tmp_path, make_units("dpo"), given=dict(peft_config=lora()))


def test_the_copied_function_and_the_defaults_are_those_of_humanline():
    assert inspect.getsource(trl_humanline.humanline_clip) == inspect.getsource(humanline.humanline_clip)
    arguments = inspect.signature(trl_humanline.Humanline.__init__).parameters
    for name in ("sync_k", "log_eps_p", "log_eps_r"):
        assert arguments[name].default == getattr(humanline.Config, name)


@pytest.mark.parametrize("loss", ["dpo", "kto", "grpo"])
def test_the_example_in_the_docstring_runs(monkeypatch, tiny, tmp_path, loss):
    examples = re.findall(r"    from datasets.*?trainer\.train\(\)\n", trl_humanline.__doc__, re.DOTALL)
    [code] = [code for code in examples if f"Humanline{loss.upper()}Trainer" in code]
    rows = rows_of({"dpo": "pairs", "kto": "labels", "grpo": "prompts"}[loss], 64)
    name = f"{loss.upper()}Config"
    cheap = dict(use_cpu=True, bf16=False, report_to=[], max_steps=2, save_strategy="no")
    cheap |= dict(max_completion_length=4) if loss == "grpo" else {}
    monkeypatch.setattr(trl, name, partial(getattr(trl, name), **cheap))
    monkeypatch.setattr("trl.rewards.accuracy_reward",
                        lambda completions, **_: [float(len(text)) for text in completions])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    monkeypatch.chdir(tmp_path)
    code = textwrap.dedent(code).replace("Qwen/Qwen2.5-0.5B-Instruct", tiny)
    assert tiny in code and len(code.splitlines()) <= 13
    names = {}
    exec(code, names)
    assert names["trainer"].state.global_step == 2
