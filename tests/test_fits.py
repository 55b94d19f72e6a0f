"""Dry runs of a small model of each family: `fits.py` follows the trainer, and counts what it takes."""

import pytest
from conftest import ROOT

import fits
import humanline

SMALL = dict(vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8)
SHORT = "--max-length 96 --max-prompt-length 32 --max-new-tokens 64 --microbatch-tokens 200 --batch-size 8".split()
LLAMA, GEMMA, QWEN = "llama3-8b-dpo-humanline", "gemma2-27b-kto-humanline", "qwen2.5-1.5b-math-grpo-every-64-humanline-k12"


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, sizes in fits.MODELS.items():
        monkeypatch.setitem(fits.MODELS, name, sizes | SMALL)


@pytest.mark.parametrize("name", [LLAMA, GEMMA, QWEN, pytest.param(f"{LLAMA}-lora", marks=pytest.mark.needs("peft"))])
def test_a_small_model_of_each_family_runs_dry_on_two_ranks(name):
    kinds, policy = fits.dry_run(f"configs/{name}.toml", SHORT, ranks=2)
    assert policy.config.model_type in name
    whole = sum(p.nbytes for p in policy.parameters())
    trained = sum(p.nbytes for p in humanline.trained(policy).values())
    assert kinds["weights"] == pytest.approx(whole / 2, rel=0.05)
    assert kinds["gradients"] == pytest.approx(trained / 2, rel=0.05)
    assert kinds["moments"] == pytest.approx(trained, rel=0.05)
    assert kinds["gathered"] > 0 and kinds["activations"] > 0
    assert humanline.WORLD_SIZE == 1 and not humanline.dist.is_initialized()


@pytest.mark.parametrize("name", [GEMMA, QWEN])
def test_fake_tensors_take_what_real_ones_take(name):
    peaks = []
    for fake_mode in fits.FakeTensorMode(allow_non_fake_inputs=True), None:
        memory = fits.Memory(fake_mode)
        fits.two_steps(f"configs/{name}.toml", SHORT, ranks=1, memory=memory)
        peaks.append(memory.by_kind())
    assert peaks[0] == peaks[1]
    assert peaks[0]["gathered"] == 0 < peaks[0]["gradients"]


def test_the_table_says_what_fits_and_how_much_work_it_is(capsys, monkeypatch):
    monkeypatch.setattr(fits, "RANKS", (1,))
    assert fits.main(["configs/llama3-8b-grpo-online.toml", *SHORT]) == 0
    out = capsys.readouterr().out
    # Of the weights only the reward model's are of the true size.
    assert out.splitlines()[2].split() == "1 0.0 0.0 0.0 0.0 0.0 0.0 14.0 14.0 14.0 fits fits fits".split()
    assert "312 steps, 2,496 prompts, 19,968 sequences of 32 + 64 tokens at most" in out
    assert "19,968 completions drawn" in out


@pytest.mark.parametrize("line, complaint", [
    ("colour = 1", "unknown key 'colour'"),
    ("loss = 'ppo'", "--loss ppo"),
    ("reward = 'configs/rewards.py:nobody'", "defines no nobody"),
    ("reward = 'nowhere.py:score'", "there is no file nowhere.py"),
    ("sampler = 'configs/external.py:nobody'", "defines no nobody"),
    ("model = 'nobody/nothing'", "--model nobody/nothing"),
])
def test_a_config_that_names_what_is_not_there_fails(line, complaint, tmp_path, capsys):
    settings = dict(loss="loss = 'grpo'", model="model = 'google/gemma-2-27b-it'", data="data = ['rows.jsonl']")
    file = tmp_path / "bad.toml"
    file.write_text("\n".join((settings | {line.split()[0]: line}).values()))
    assert fits.main([str(file)]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda file: file.stem)
def test_what_a_config_names_is_there(file):
    config = fits.read(str(file), [])
    assert config.model in fits.MODELS
