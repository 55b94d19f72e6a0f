"""LoRA: adapters beside a frozen base, with a reference that moves. Skipped where peft is not installed."""

import copy
import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import metrics, random_batch, rows_of, timeless
from safetensors.torch import load_file
from test_command_line import complaint
from test_models import ARCHITECTURES, folder, full_logits_logps, some_sequences  # noqa: F401  (a fixture)
from test_ranks import DRIVER, END, torchrun
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import eval as evaluation
import humanline
from humanline import Config

peft = pytest.importorskip("peft")
LORA = "--lora 4 --lora-alpha 8"


def load(model: str, **settings):
    config = Config(model=model, **settings)
    return humanline.load_policy(config, torch.device("cpu"))[0], config


def adapters_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "adapter_model.safetensors")


def same_adapters(a: Path, b: Path) -> bool:
    first, second = adapters_of(a), adapters_of(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def plain_peft(folder: Path | str):
    """A peft folder as others load it, in fp32."""
    folder = str(folder)
    base = peft.PeftConfig.from_pretrained(folder).base_model_name_or_path
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)


def learned(policy) -> None:
    """Give fresh adapters, which change nothing, values as after some training."""
    generator = torch.Generator().manual_seed(3)
    for name, p in humanline.trained(policy).items():
        if "lora_B" in name:
            p.data = 0.1 * torch.randn(p.shape, generator=generator)


# What is trained.

@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_log_probs_with_adapters_are_those_of_plain_peft(folder, tmp_path, family, tied):
    policy, _ = load(folder(family, tied), lora=4, attn="eager")
    learned(policy)
    policy.save_pretrained(tmp_path)
    theirs, base = plain_peft(tmp_path), AutoModelForCausalLM.from_pretrained(folder(family, tied))
    sequences = some_sequences(policy)
    logps, _ = humanline.log_probs(policy, sequences)
    for ours, sequence in zip(humanline.completion_parts(logps, sequences), sequences, strict=True):
        assert torch.allclose(ours, full_logits_logps(theirs, sequence), rtol=0, atol=1e-5)
        assert (ours - full_logits_logps(base, sequence)).abs().max() > 0.01


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_all_linear_layers_but_the_head_get_an_adapter(folder, family):
    policy, _ = load(folder(family, False), lora=4)
    names = {name.partition(".lora_")[0] for name in humanline.trained(policy)}
    linear = {name for name, module in load(folder(family, False))[0].named_modules()
              if type(module).__name__ in ("Linear", "Conv1D")}
    assert names == linear - {"lm_head"} and len(names) > 4
    some, _ = load(folder("llama"), lora=4, lora_targets=("q_proj", "v_proj"))
    assert {name.split(".")[-4] for name in humanline.trained(some)} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("dtype", ["mixed", "bfloat16", "float32"])
def test_the_base_is_frozen_in_bf16_and_the_adapters_are_fp32(tiny, dtype):
    policy, config = load(tiny, lora=4, dtype=dtype)
    base = {p.dtype for p in policy.parameters() if not p.requires_grad}
    assert base == {torch.float32 if dtype == "float32" else torch.bfloat16}
    assert {p.dtype for p in humanline.trained(policy).values()} == {torch.float32}
    learned(policy)
    report = humanline.forward_backward(policy, random_batch("dpo"), dataclasses.replace(
        config, loss="dpo", perception="none", stale="keep", sync_k=1, prior=0))
    assert report["loss"] > 0
    for name, p in policy.named_parameters():
        assert (p.grad is not None) == ("lora_" in name) and (p.grad is None or p.grad.dtype == torch.float32), name
        assert p.grad is None or p.grad.abs().max() > 0, name


def test_new_adapters_change_nothing_and_are_a_function_of_the_seed(tiny):
    sequences = some_sequences(load(tiny)[0])
    policies = [load(tiny, lora=4, seed=seed)[0] for seed in (0, 0, 1)]
    plain = humanline.log_probs(load(tiny)[0], sequences)[0]
    assert all(torch.equal(humanline.log_probs(policy, sequences)[0], plain) for policy in policies)
    first, same, other = ([p.detach() for p in humanline.trained(policy).values()] for policy in policies)
    assert all(map(torch.equal, first, same)) and not all(map(torch.equal, first, other))


def test_activation_checkpointing_changes_no_gradient_of_an_adapter(folder):
    grads = []
    for checkpointing in (False, True):
        policy, _ = load(folder("llama"), lora=4, checkpoint_activations=checkpointing)
        learned(policy)
        logps, _ = humanline.log_probs(policy, some_sequences(policy))
        grads.append(torch.autograd.grad(logps.sum(), list(humanline.trained(policy).values())))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_default_learning_rate_is_ten_times_that_of_the_weights():
    lr = lambda flags: humanline.parse_config(flags.split()).lr
    assert lr("--model x --lora 8") == 1e-5 and lr("--model x") == 1e-6
    assert lr("--lora 8 --loss kto") == 4e-3 and lr("--lora 8") == 8e-3 and lr("--lora 8 --lr 1e-6") == 1e-6


# The reference.

class SecondModel(humanline.Reference):
    """The reference as a whole second model, adapters and base: the long way round."""

    def __init__(self, *args):
        super().__init__(*args)
        self.second, self.copies = copy.deepcopy(self.policy).requires_grad_(False), True

    def sync(self, step: int) -> None:
        with torch.no_grad():
            for target, value in zip(self.second.parameters(), self.policy.parameters()):
                target.lerp_(value, self.config.sync_alpha) if self.config.sync_alpha < 1 else target.copy_(value)

    def attach_to_batch(self, batch) -> None:
        humanline.attach_logps("ref_logps", self.second, batch, self.config)


REFERENCES = [  # flags, whether lookahead serves them, too
    ("--loss dpo --sync-k 3", True), ("--loss kto --sync-k 2", True), ("--loss grpo --sync-k 4", True),
    ("--loss dpo --no-humanline", True), ("--loss grpo --sync-k 2 --sample-every 3", True),
    ("--loss kto --sync-k 3 --sample-every 2", True), ("--loss dpo --sync-k 1 --sample-every 1", True),
    ("--loss dpo --no-humanline --sample-every 2", True), ("--loss grpo --sync-k 2 --sync-alpha 0.5", False),
    ("--loss dpo --sync-drift 0.02", False), ("--loss kto --sync-k 2 --sample-every 3 --sync-alpha 0.3", False),
    ("--loss grpo --no-humanline --sample-every 2 --kl-beta 0.5 --temperature 0.8", True)]


@pytest.mark.parametrize("flags, looks_ahead", REFERENCES, ids=[flags for flags, _ in REFERENCES])
def test_lookahead_and_second_adapters_do_what_a_second_model_does(run, monkeypatch, flags, looks_ahead):
    made, make = [], humanline.Reference.__init__

    def spied(self, *args):
        make(self, *args)
        made.append(self)

    monkeypatch.setattr(humanline.Reference, "__init__", spied)
    ways = ["copy", "lookahead"] if looks_ahead else ["copy"]
    folders = [run(f"{LORA} --lr 0.1 {flags} --ref {way}") for way in ways]
    for reference in made:  # never a second base
        adapters = sum(p.numel() for p in humanline.trained(reference.policy).values())
        assert reference.model is None and sum(w.numel() for w in reference.weights or []) in (0, adapters)
        assert adapters < 0.5 * sum(p.numel() for p in reference.policy.parameters())
    assert [reference.copies for reference in made] == [True, False][: len(ways)]
    monkeypatch.setattr(humanline, "Reference", SecondModel)
    expected = run(f"{LORA} --lr 0.1 {flags} --ref copy")
    for folder in folders:
        assert same_adapters(expected, folder) and timeless(expected) == timeless(folder)
    assert not all(line["drift"] == 0 for line in metrics(expected))  # the reference matters


def test_the_initial_policy_is_the_base_without_adapters(tiny):
    policy, config = load(tiny, lora=4, loss="grpo", sample_every=2, kl_beta=0.1, sync_k=0, perception="none",
                          stale="keep", humanline=False)
    reference, batch = humanline.Reference(policy, None, config), random_batch("grpo")
    learned(policy)
    with reference.borrowed_weights():
        humanline.attach_logps("ref_logps", policy, batch, config)
    logps = humanline.log_probs(load(tiny)[0], batch.sequences)[0]
    for sequence, expected in zip(batch.sequences, humanline.completion_parts(logps, batch.sequences)):
        assert torch.allclose(sequence.ref_logps, expected.detach(), atol=1e-5) or not sequence.advantage


def test_a_collapse_puts_back_the_adapters_of_better_times(run, monkeypatch):
    kept, forward = {}, humanline.forward_backward

    def spied(policy, batch, config):
        kept[batch.step - 1] = [p.detach().clone() for p in humanline.trained(policy).values()]
        return forward(policy, batch, config) | dict(
            logp_wanted=-0.1 if batch.step <= 20 else -3.0, completion_length=1)

    monkeypatch.setattr(humanline, "forward_backward", spied)
    final = run(f"{LORA} --steps 40 --on-collapse restore") / "final"
    policy, _ = load(str(final), lora=4, lora_alpha=8)
    assert all(map(torch.equal, [p.detach() for p in humanline.trained(policy).values()], kept[16]))
    assert not all(map(torch.equal, kept[16], kept[20]))


# Checkpoints.

@pytest.mark.parametrize("flags", [
    "--loss dpo --sync-k 3", "--loss grpo --sync-k 4 --sync-alpha 0.5", "--loss kto --sync-drift 0.05",
    "--loss grpo --sync-k 5 --sample-every 2", "--loss grpo --no-humanline --sample-every 3 --kl-beta 0.1"])
def test_an_adapter_checkpoint_holds_no_base_weights_and_resumes_bit_for_bit(run, tmp_path, flags):
    flags += f" {LORA} --lr 0.1 --steps 8 --save-every 1 --keep 9"
    whole = run(flags)
    for step in (1, 4):
        checkpoint = whole / "checkpoint" / f"step-{step:08d}"
        for file in checkpoint.glob("*.safetensors"):
            assert all("lora_" in name for name in load_file(file))
        resumed = run(f"{flags} --resume {checkpoint}", out=str(tmp_path / f"resumed-{step}"))
        assert same_adapters(whole, resumed)
        assert timeless(whole)[step:] == timeless(resumed)


def test_adapters_are_not_resumed_on_another_base(run, tiny, tmp_path):
    model = str(tmp_path / "model")
    shutil.copytree(tiny, model)
    folder = run(f"{LORA} --model {model} --steps 4 --save-every 2")
    run(f"{LORA} --model {model} --steps 4 --resume {folder}/checkpoint/step-00000002", out=str(tmp_path / "same"))
    other = AutoModelForCausalLM.from_pretrained(model)
    other.model.layers[1].mlp.up_proj.weight.data *= 1.001
    other.save_pretrained(model)
    with pytest.raises(humanline.UserError, match="the run began with other weights than those that .* now holds"):
        run(f"{LORA} --model {model} --steps 4 --resume {folder}/checkpoint/step-00000002")
    with pytest.raises(humanline.UserError, match="the run has --lora 4, not 8"):
        run(f"--lora 8 --model {model} --steps 4 --resume {folder}/checkpoint/step-00000002")


# The final folder.

@pytest.mark.parametrize("dtype", ["float32", "mixed"])
def test_the_peft_folder_and_the_merged_one_are_the_same_model(run, tmp_path, dtype):
    flags = f"{LORA} --loss dpo --lr 0.1 --dtype {dtype}"
    adapter, merged = run(flags) / "final", run(f"{flags} --merge") / "final"
    assert {file.name for file in adapter.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert not list(merged.glob("adapter_*")) and "library_name: transformers" in (merged / "README.md").read_text()
    assert "library_name: peft" in (adapter / "README.md").read_text()
    ids = torch.arange(8, 40)[None]
    theirs, whole = plain_peft(adapter), AutoModelForCausalLM.from_pretrained(merged)
    assert torch.allclose(theirs(ids).logits, whole(ids).logits, rtol=0, atol=1e-5)
    with theirs.disable_adapter():
        assert (theirs(ids).logits - whole(ids).logits).abs().max() > 0.01
    assert theirs.peft_config["default"].task_type == "CAUSAL_LM"
    assert AutoTokenizer.from_pretrained(adapter)("ab")["input_ids"] == AutoTokenizer.from_pretrained(merged)("ab")[
        "input_ids"]


@pytest.mark.parametrize("merge", [False, True], ids=["adapters", "merged"])
def test_the_final_folder_trains_on_in_trl(run, tmp_path, merge):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    final = run(f"{LORA} --loss dpo --lr 0.1" + " --merge" * merge) / "final"
    model = str(final) if merge else peft.AutoPeftModelForCausalLM.from_pretrained(final, is_trainable=True)
    args = trl.DPOConfig(output_dir=str(tmp_path / "trl"), per_device_train_batch_size=4, max_steps=2, use_cpu=True,
                         bf16=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True)
    trainer = trl.DPOTrainer(model, args=args, train_dataset=datasets.Dataset.from_list(rows_of("pairs", 8)),
                             processing_class=AutoTokenizer.from_pretrained(final))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert before and all(merge or "lora_" in name for name in before)
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters() if name in before)
    assert all(math.isfinite(line["loss"]) for line in trainer.state.log_history if "loss" in line)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "gemma2", "gpt2"])
def test_the_tokenizer_beside_adapters_is_the_bases(folder, tmp_path, family):
    policy, _ = load(folder(family), lora=4)
    base, text = AutoTokenizer.from_pretrained(folder(family)), "Natalia had 27 clips, José 3.\n"
    policy.save_pretrained(tmp_path)
    base.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == base(text)["input_ids"]


def test_a_peft_folder_can_be_trained_on_merged_and_measured(run, data_files, tiny, capsys):
    first = run(f"{LORA} --loss dpo --lr 0.1")
    theirs, sequences = plain_peft(first / "final"), random_batch("dpo").sequences
    for settings in (dict(), dict(lora=4, lora_alpha=8)):  # merged; the same adapters
        policy, _ = load(str(first / "final"), **settings)
        logps, _ = humanline.log_probs(policy, sequences)
        for ours, sequence in zip(humanline.completion_parts(logps, sequences), sequences):
            assert torch.allclose(ours, full_logits_logps(theirs, sequence), atol=1e-5)
        expected = adapters_of(first) if settings else humanline.trained(load(tiny)[0])
        assert len(humanline.trained(policy)) == len(expected)
    second = run(f"{LORA} --loss dpo --lr 0.1 --model {first / 'final'}")
    named = peft.PeftConfig.from_pretrained(second / "final").base_model_name_or_path
    assert named == tiny and not same_adapters(first, second)
    line = metrics(run(f"--loss dpo --lr 1e-9 --model {first / 'final'}"))[-1]
    assert line["drift"] < 1e-4
    with pytest.raises(humanline.UserError, match="its adapters go on with --lora 4 --lora-alpha 8"):
        run(f"--lora 2 --model {first / 'final'}")
    for name in (str(first), str(first / "final")):
        assert evaluation.main(["show", "--model", name, "--data", data_files["prompts"], "--prompts", "2"]) == 0
    capsys.readouterr()


# Ranks.

@pytest.mark.parametrize("flags", [
    "--loss dpo --sync-k 3", "--loss grpo --sync-k 2 --sample-every 2 --sample-tokens 128",
    "--loss grpo --sync-k 2 --sync-alpha 0.5"])
def test_two_ranks_sharded_or_not_train_the_adapters_of_one(run, tiny, data_files, varied, tmp_path, flags):
    flags = (f"--model {tiny} --data {data_files['groups']} --reward {varied} --batch-size 6 --steps 8 --lr 1e-3 "
             f"--group-size 4 --max-new-tokens 4 --microbatch-tokens 200 {LORA} {flags}").split()
    runs = [[*flags, *more, "--out", str(tmp_path / name)] for name, more in (("ddp", []), ("fsdp", ["--shard"]))]
    runs += [[*flags, "--shard", "--dtype", "mixed", "--out", str(tmp_path / "mixed")]]
    (tmp_path / "driver.py").write_text(DRIVER + END)
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    process = torchrun(tmp_path / "driver.py", tmp_path / "runs.json")
    _, error = process.communicate(timeout=200)
    assert process.returncode == 0, error[-3000:]
    expected = run("", flags=flags)
    for name in ("ddp", "fsdp"):
        ours, theirs = adapters_of(tmp_path / name), adapters_of(expected)
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert (ours[key] - theirs[key]).norm() <= 1e-5 * theirs[key].norm(), (name, key)
    for line, other in zip(metrics(run("--dtype mixed", flags=flags)), metrics(tmp_path / "mixed"), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], abs=0.02) and line["tokens"] == other["tokens"]


# Bad input.

BAD = [("--merge", "--merge is about adapters; it needs --lora RANK"),
       ("--lora-targets q_proj", "--lora-targets is about adapters; it needs --lora RANK"),
       ("--lora-alpha 8", "--lora-alpha is about adapters; it needs --lora RANK"),
       ("--lora -1", "--lora is -1; it must be 0 or more"),
       ("--lora 4 --lora-alpha 0", "--lora-alpha is 0; it must be 1 or more"),
       ("--lora 4 --lora-targets nothing", "--lora-targets: Target modules"),
       ("--lora 4 --lora-targets q_proj lm_head", "the output head takes no adapter")]


@pytest.mark.parametrize("flags, expected", BAD, ids=[flags for flags, _ in BAD])
def test_a_bad_flag_of_lora_is_one_line(tiny, data_files, tmp_path, capsys, monkeypatch, flags, expected):
    monkeypatch.chdir(tmp_path)
    line = complaint(["--model", tiny, "--data", data_files["groups"], *flags.split()], tmp_path, capsys)
    assert expected in line, line


def test_adapters_that_cannot_be_merged_are_saved_as_they_are(run, monkeypatch):
    loaded, load = [], humanline.load_policy

    def once(*args):
        loaded.append(args)
        if len(loaded) > 1:  # the base, to merge them
            raise MemoryError("no room")
        return load(*args)

    monkeypatch.setattr(humanline, "load_policy", once)
    with pytest.raises(OSError, match="no room.*the model is in ") as error:
        run(f"{LORA} --merge --steps 2")
    final = Path(str(error.value).rpartition("the model is in ")[2])
    assert (final / "adapter_model.safetensors").exists() and "library_name: peft" in (final / "README.md").read_text()
    shutil.rmtree(final.parent)


@pytest.mark.parametrize("kind, flags, expected", [
    ("embeddings", "", "the input embeddings cannot be merged"), ("embeddings", LORA, None),
    ("embeddings", f"{LORA} --merge", "the input embeddings cannot be merged"),
    ("dora", "", None), ("dora", LORA, "would begin anew; merge them first"),
    ("ia3", LORA, "its adapters are not LoRA's")])
def test_adapters_that_would_become_others_are_refused(tiny, data_files, tmp_path, capsys, monkeypatch, kind, flags,
                                                       expected):
    made = {"embeddings": peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "embed_tokens"]),
            "dora": peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], use_dora=True),
            "ia3": peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])}[kind]
    base = AutoModelForCausalLM.from_pretrained(tiny)
    assert base.config.tie_word_embeddings
    peft.get_peft_model(base, made).save_pretrained(tmp_path / kind)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / kind)
    monkeypatch.chdir(tmp_path)
    start = ["--model", str(tmp_path / kind), "--data", data_files["groups"], *flags.split()]
    if expected is None:
        humanline.load_policy(humanline.parse_config(start), torch.device("cpu"))
    else:
        assert expected in complaint(start, tmp_path, capsys)


def test_without_peft_one_line_says_what_to_install(tiny, data_files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    find = humanline.importlib.util.find_spec
    monkeypatch.setattr(humanline.importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    line = complaint(["--model", tiny, "--data", data_files["groups"], "--lora", "4"], tmp_path, capsys)
    assert line.endswith("pip install peft")


def test_a_runs_config_repeats_it_and_its_adapters_are_measured(run, tmp_path):
    first = run(f"{LORA} --lora-targets q_proj v_proj --loss dpo")
    settings = evaluation.settings_of(str(first), evaluation.Accuracy(model=(str(first),)))
    policy = evaluation.load(str(first), settings, scored=False).policy
    adapters = {name for name, _ in policy.named_parameters() if "lora_" in name}
    assert adapters and all("q_proj" in name or "v_proj" in name for name in adapters)
    again = run("", flags=["--config", str(first / "config.toml")])
    assert same_adapters(first, again)
    assert all("q_proj" in name or "v_proj" in name for name in adapters_of(first))


# The plan.

def planned(capsys, *flags: str) -> tuple[dict[str, int], str]:
    """What --plan prints: MiB by name, and the advice."""
    assert humanline.main([*flags, "--plan"]) == 0
    *lines, advice = capsys.readouterr().out.splitlines()
    return {line.partition(" MiB  ")[2]: int(line.partition(" MiB")[0].replace(",", "")) for line in lines}, advice


@pytest.fixture(scope="module")
def weightless(tmp_path_factory) -> str:
    """A folder that says what a model of 68 M parameters is, without its weights."""
    path, tokenizer = tmp_path_factory.mktemp("weightless"), humanline.embedded_tokenizer()
    LlamaConfig(vocab_size=32_768, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, bos_token_id=2,
                num_attention_heads=8, tie_word_embeddings=True, eos_token_id=3, pad_token_id=0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


PLANS = [  # loss, more, what the rows must be, of W MiB of weights and A MiB of adapters
    ("dpo", "", lambda w, a: {"weights": w, "AdamW's moments": 2 * w, "gradients": w}),
    ("kto", "--ref copy", lambda w, a: {"weights": w, "the reference, a second model": w, "gradients": w}),
    ("grpo", "--dtype bfloat16", lambda w, a: {"weights": w / 2, "AdamW's moments": w, "gradients": w / 2}),
    ("dpo", "--lora 16", lambda w, a: {"weights": w + a, "AdamW's moments": 2 * a, "gradients": a}),
    ("kto", "--lora 16 --ref copy --dtype mixed", lambda w, a: {"weights": w / 2 + a, "weights put aside": a})]


@pytest.mark.parametrize("loss, more, expected", PLANS, ids=[f"{loss} {more}" for loss, more, _ in PLANS])
def test_a_plan_needs_no_weights_and_counts_what_a_run_holds(
        weightless, data_files, tmp_path, capsys, monkeypatch, loss, more, expected):
    monkeypatch.chdir(tmp_path)
    flags = ["--model", weightless, "--data", data_files["groups"], "--loss", loss, *more.split(), "--max-length", "60"]
    flags += ["--batch-size", "8"] + ([] if "--dtype" in more else ["--dtype", "float32"])
    table, _ = planned(capsys, *flags)
    layer = 4 * 512 * 512 + 3 * 512 * 2048 + 2 * 512
    weights, adapters = 4 * (32_768 * 512 + 12 * layer + 512), 4 * 12 * 16 * (8 * 512 + 3 * 2560)
    for name, size in expected(weights / 2**20, adapters / 2**20).items():
        assert abs(table[name] - size) <= 1, name
    assert sum(table.values()) == pytest.approx(2 * table["in all, on each rank"], abs=9)
    assert not list(tmp_path.iterdir())


def test_a_plans_activations_follow_the_microbatch_checkpointing_and_sampling(weightless, data_files, capsys, varied):
    common = ["--model", weightless, "--data", data_files["groups"], "--loss", "dpo", "--dtype", "float32"]

    def activations(*flags: str) -> int:
        table, _ = planned(capsys, *common, *flags)
        return next(size for name, size in table.items() if "activations" in name)

    many = ["--batch-size", "24", "--lora", "16"]  # beside them gradients are small
    whole, half = activations(*many), activations(*many, "--microbatch-tokens", "600")
    assert half < whole and activations(*many, "--checkpoint-activations") < whole
    online = ["--sample-every", "1", "--reward", varied, "--group-size", "64", "--max-new-tokens", "40"]
    table, advice = planned(capsys, *common, *online)
    sampling = next(size for name, size in table.items() if "sampling" in name)
    tokens = eval(next(name for name in table if "sampling" in name).partition("(")[2].removesuffix(" tokens)")
                  .replace("x", "*"))
    assert sampling > tokens * 12 * 2 * 512 * 4 / 2**20  # the cache: keys and values of each layer
    assert "--lora 16" in advice and "--checkpoint-activations" in advice
    assert "--lora" not in planned(capsys, *common, "--lora", "16")[1]


def test_settings_of_adapters_survive_the_runs_config_file(tmp_path):
    config = humanline.parse_config("--lora 4 --lora-alpha 8 --lora-targets q_proj v_proj --merge".split())
    file = tmp_path / "config.toml"
    file.write_text(humanline.to_toml(config))
    assert humanline.parse_config(["--config", str(file)]) == dataclasses.replace(config, config=str(file))
