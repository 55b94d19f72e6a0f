"""LoRA: adapters on a frozen base model, with a moving reference. Skipped if peft is not installed."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import complaint, metrics, random_batch, timeless, train_on_two_ranks
from families import full_logits_logps, load, own_rows, some_sequences
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import eval as evaluation
import humanline
from humanline import Config

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.needs("peft")
LORA = "--lora 4 --lora-alpha 16"  # 8 is the default of peft


def adapters_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "adapter_model.safetensors")


def check_same_adapters(a: Path, b: Path) -> None:
    torch.testing.assert_close(adapters_of(a), adapters_of(b), rtol=0, atol=0)


def plain_peft(folder: Path | str):
    """Load a peft folder with peft alone, in fp32."""
    folder = str(folder)
    base = peft.PeftConfig.from_pretrained(folder).base_model_name_or_path
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
                                          folder)


def learned(policy) -> None:
    """Give new adapters, which start as the identity, values as if they had been trained."""
    generator = torch.Generator().manual_seed(3)
    for name, p in humanline.trained(policy).items():
        if "lora_B" in name:
            p.data = 0.1 * torch.randn(p.shape, generator=generator)


# What is trained.

@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_all_linear_layers_but_the_head_get_an_adapter_and_log_probs_are_those_of_plain_peft(
        folder, tmp_path, family):
    tied = family != "llama"
    policy, _, _ = load(folder(family, tied), lora=4, attn="eager")
    base = AutoModelForCausalLM.from_pretrained(folder(family, tied))
    names = {name.partition(".lora_")[0] for name in humanline.trained(policy)}
    linear = {name for name, module in base.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}
    assert names == linear - {"lm_head"} and len(names) > 4
    assert policy.peft_config["default"].lora_alpha == Config().lora_alpha
    learned(policy)
    policy.save_pretrained(tmp_path)
    theirs, sequences = plain_peft(tmp_path), some_sequences(policy)
    for ours, sequence in zip(own_rows(policy, sequences), sequences, strict=True):
        assert torch.allclose(ours, full_logits_logps(theirs, sequence), rtol=0, atol=1e-5)
        assert (ours - full_logits_logps(base, sequence)).abs().max() > 0.01


@pytest.mark.parametrize("dtype", ["mixed", "bfloat16", "float32"])
def test_the_base_is_frozen_in_bf16_and_the_adapters_are_fp32(tiny, dtype):
    policy, _, config = load(tiny, lora=4, dtype=dtype, loss="dpo", perception="none")
    base = {p.dtype for p in policy.parameters() if not p.requires_grad}
    assert base == {torch.float32 if dtype == "float32" else torch.bfloat16}
    assert {p.dtype for p in humanline.trained(policy).values()} == {torch.float32}
    learned(policy)
    assert humanline.forward_backward(policy, random_batch("dpo"), config)["loss"] > 0
    for name, p in policy.named_parameters():
        assert (p.grad is not None) == ("lora_" in name), name
        assert p.grad is None or p.grad.dtype == torch.float32, name
        assert p.grad is None or p.grad.abs().max() > 0, name


def test_new_adapters_change_no_output_and_depend_on_the_seed_only(tiny):
    sequences = some_sequences(load(tiny)[0])
    policies = [load(tiny, lora=4, seed=seed)[0] for seed in (0, 0, 1)]
    plain = own_rows(load(tiny)[0], sequences)
    assert all(torch.equal(*pair) for policy in policies for pair in zip(own_rows(policy, sequences), plain))
    first, same, other = ([p.detach() for p in humanline.trained(policy).values()] for policy in policies)
    assert all(map(torch.equal, first, same)) and not all(map(torch.equal, first, other))


def test_the_default_learning_rate_is_ten_times_that_of_full_finetuning():
    lr = lambda flags: humanline.parse_config(flags.split()).lr
    assert lr("--model x --lora 8") == 1e-5
    assert lr("--model x") == 1e-6
    assert lr("--model x --lora 8 --lr 1e-7") == 1e-7


# Checkpoints.

@pytest.mark.parametrize("flags", [
    "--loss dpo --sync-k 3",
    "--loss grpo --sync-k 5 --sample-every 2"])
def test_an_adapter_checkpoint_holds_no_base_weights_and_resumes_bit_for_bit(run, tmp_path, flags):
    flags += f" {LORA} --lr 0.1 --steps 8 --save-every 1 --keep 9"
    whole = run(flags)
    for step in (1, 4):
        checkpoint = whole / "checkpoint" / f"step-{step:08d}"
        for file in checkpoint.glob("*.safetensors"):
            assert all("lora_" in name for name in load_file(file))
        resumed = run(f"{flags} --resume {checkpoint}", out=str(tmp_path / f"resumed-{step}"))
        check_same_adapters(whole, resumed)
        assert timeless(whole)[step:] == timeless(resumed)


# The final folder.

@pytest.mark.parametrize("dtype", ["float32", "mixed"])
def test_the_final_folder_is_a_peft_folder_that_merges_to_the_same_model(run, tmp_path, dtype):
    adapter = run(f"{LORA} --loss dpo --lr 0.1 --dtype {dtype}") / "final"
    assert {file.name for file in adapter.glob("*.safetensors")} == {"adapter_model.safetensors"}
    merged = tmp_path / "merged"
    peft.AutoPeftModelForCausalLM.from_pretrained(adapter).merge_and_unload().save_pretrained(merged)
    ids = torch.arange(8, 40)[None]
    theirs, whole = plain_peft(adapter), AutoModelForCausalLM.from_pretrained(merged)
    assert torch.allclose(theirs(ids).logits, whole(ids).logits, rtol=0, atol=1e-4)
    with theirs.disable_adapter():
        assert (theirs(ids).logits - whole(ids).logits).abs().max() > 0.01


def test_a_peft_folder_is_merged_on_load_and_can_be_evaluated(run, tmp_path, data_files, tiny, capsys):
    first = run(f"{LORA} --loss dpo --lr 0.1")
    theirs, sequences = plain_peft(first / "final"), random_batch("dpo").sequences
    policy, _, _ = load(str(first / "final"))
    assert humanline.trained(policy).keys() == humanline.trained(load(tiny)[0]).keys()
    second = run(f"--loss dpo --lr 1e-9 --model {first / 'final'}")
    assert metrics(second)[-1]["drift"] < 1e-4
    assert not list((second / "final").glob("adapter_*"))
    whole = AutoModelForCausalLM.from_pretrained(second / "final")
    assert torch.allclose(full_logits_logps(whole, sequences[0]), full_logits_logps(theirs, sequences[0]),
                          atol=1e-4)
    for name in (str(first), str(first / "final")):
        flags = ["show", "--model", name, "--data", data_files["prompts"], "--prompts", "2"]
        assert evaluation.main(flags) == 0
    for path in (first / "final").glob("*token*"):
        path.unlink()
    assert load(str(first / "final"))[1].get_vocab() == load(tiny)[1].get_vocab()  # of the base
    start = f"--model {first}/final --data {data_files['groups']} --lora 4 --out {tmp_path}/o".split()
    assert "already has adapters; merge them before using --lora" in complaint(start, tmp_path, capsys)


# Ranks.

def test_two_ranks_sharded_or_not_train_the_same_adapters_as_one_process(
        run, tiny, data_files, varied, tmp_path):
    common = (f"--model {tiny} --data {data_files['groups']} --reward {varied} --batch-size 6 --steps 5 "
              f"--lr 1e-3 --group-size 4 --max-new-tokens 4 --microbatch-tokens 200 {LORA}").split()
    cases = {"offline": [*common, *"--loss dpo --sync-k 3".split()],
             "drawn": [*common, *"--loss grpo --sync-k 2 --sample-every 2 --sample-tokens 128".split()]}
    ways = {"ddp": [], "fsdp": ["--shard"], "mixed": ["--shard", "--dtype", "mixed"]}
    runs = [("offline", "ddp"), ("offline", "mixed"), ("drawn", "fsdp")]
    train_on_two_ranks(tmp_path, [[*cases[name], *ways[way], "--out", str(tmp_path / name / way)]
                                  for name, way in runs], first_import="peft")
    for name, way in (runs[0], runs[2]):
        ours, theirs = adapters_of(tmp_path / name / way), adapters_of(run("", flags=cases[name]))
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert (ours[key] - theirs[key]).norm() <= 1e-5 * theirs[key].norm(), (name, way, key)
    mixed = metrics(run("--dtype mixed", flags=cases["offline"])), metrics(tmp_path / "offline" / "mixed")
    for line, other in zip(*mixed, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], abs=0.02) and line["tokens"] == other["tokens"]


# Bad input.

@pytest.mark.parametrize("flag, least", [("--lora -1", 0), ("--lora-alpha 0", 1)])
def test_a_bad_lora_flag_gives_a_one_line_error(flag, least):
    with pytest.raises(humanline.UserError, match=f"it must be from {least} to"):
        humanline.parse_config(f"--model x {flag}".split())


def test_without_peft_a_one_line_error_says_what_to_install(tiny, data_files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    line = complaint(["--model", tiny, "--data", data_files["groups"], "--lora", "4"], tmp_path, capsys)
    assert line.endswith("pip install --upgrade peft, or use an older transformers")


def test_a_peft_that_is_too_old_gives_a_one_line_error(tiny, data_files, tmp_path, capsys, monkeypatch):
    def too_old(min_version):
        raise ValueError("The version of PEFT you are using is not compatible, please use 0.22")

    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", too_old)
    line = complaint(["--model", tiny, "--data", data_files["groups"], "--lora", "4"], tmp_path, capsys)
    assert "--lora: The version of PEFT" in line and line.endswith("peft, or use an older transformers")


# What cannot have an adapter.

def test_a_relative_path_of_the_model_is_absolute_in_the_final_folder(run, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(tiny).parent)
    folder = run(f"{LORA} --steps 1 --model {Path(tiny).name}") / "final"
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == tiny


SMALL = dict(vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)


def with_adapters(policy, capsys) -> tuple[set[str], str]:
    """The layers that get an adapter, and what is said of the rest."""
    policy.is_mixed = False
    humanline.add_adapters(policy, Config(model="hub/name", lora=4))
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in humanline.trained(policy)}
    return names, capsys.readouterr().err


def test_experts_without_adapters_are_named(capsys):
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    policy = Qwen2MoeForCausalLM(Qwen2MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16))
    names, said = with_adapters(policy, capsys)
    assert "q_proj" in names and said.count("warning") == 1
    assert "model.layers.*.mlp.experts.gate_up_proj" in said and said.endswith("are not trained\n")
    assert "embed_tokens" not in said and "lm_head" not in said and "q_proj" not in said


def test_mamba_gets_adapters_where_its_kernels_read_them(capsys):
    from transformers import FalconH1Config, FalconH1ForCausalLM

    policy = FalconH1ForCausalLM(FalconH1Config(
        **SMALL, head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
        mamba_chunk_size=8))
    names, said = with_adapters(policy, capsys)
    assert {"in_proj", "q_proj"} <= names and "out_proj" not in names
    assert "model.layers.*.mamba.out_proj.weight" in said


@pytest.mark.parametrize("change, says", [
    ({"output_router_logits": True}, "output_router_logits is true, but the loss of the router is left out"),
    ({"architectures": ["Qwen3_5ForConditionalGeneration"]},
     "of Qwen3_5ForConditionalGeneration only the text part is trained; final/ holds a LlamaForCausalLM")])
def test_what_a_model_loses_in_training_is_said(tiny, tmp_path, capsys, change, says):
    folder = shutil.copytree(tiny, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | change))
    humanline.load_weights(Config(model=str(folder)), torch.device("cpu"))
    assert says in capsys.readouterr().err
    humanline.load_weights(Config(model=tiny), torch.device("cpu"))
    assert capsys.readouterr().err == ""
