"""Dry runs of a small model of each family: `fits.py` follows the trainer and counts its memory. What the
heads of the configs and the README say about memory is a stored result of it."""

import re

import pytest
from conftest import ROOT

import fits
import humanline

SMALL = dict(vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8)
SHORT = ("--max-length 96 --max-prompt-length 32 --max-new-tokens 64 --microbatch-tokens 200 "
         "--batch-size 8").split()
LLAMA, GEMMA, SMOLLM2 = "llama3-8b-dpo-humanline", "gemma2-27b-kto-humanline", "smollm2-135m-grpo-online"
QWEN = "qwen2.5-1.5b-math-grpo-every-64-humanline-k12"
MODELS = dict(fits.MODELS)
FILES = sorted((ROOT / "configs").glob("*.toml"))
FIGURE = r"\d+ GiB of \d+"  # in heads
MACHINE = r"\d × \d+ GB \(\d+\)"  # in the README's table


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, sizes in fits.MODELS.items():
        monkeypatch.setitem(fits.MODELS, name, sizes | SMALL)


@pytest.mark.parametrize("name", [
    LLAMA, pytest.param(GEMMA, marks=pytest.mark.slow), pytest.param(QWEN, marks=pytest.mark.slow),
    pytest.param(f"{LLAMA}-lora", marks=[pytest.mark.needs("peft"), pytest.mark.slow])])
def test_a_dry_run_on_two_ranks_works_for_a_small_model_of_each_family(name):
    kinds, policy = fits.dry_run(f"configs/{name}.toml", SHORT, ranks=2)
    assert policy.config.model_type in name
    whole = sum(p.nbytes for p in policy.parameters())
    trained = sum(p.nbytes for p in humanline.trained(policy).values())
    assert kinds["weights"] == pytest.approx(whole / 2, rel=0.05)
    assert kinds["gradients"] == pytest.approx(trained / 2, rel=0.05)
    assert kinds["moments"] == pytest.approx(trained, rel=0.05)
    assert kinds["gathered"] > 0 and kinds["activations"] > 0
    assert humanline.WORLD_SIZE == 1 and not humanline.dist.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("name", [GEMMA, QWEN])
def test_fake_tensors_need_as_much_memory_as_real_ones(name):
    peaks = []
    for fake_mode in fits.FakeTensorMode(allow_non_fake_inputs=True), None:
        memory = fits.Memory(fake_mode)
        fits.two_steps(f"configs/{name}.toml", SHORT, ranks=1, memory=memory)
        peaks.append(memory.by_kind())
    assert peaks[0] == peaks[1]
    assert peaks[0]["gathered"] == 0 < peaks[0]["gradients"]


@pytest.mark.slow
def test_the_table_says_what_fits_and_how_much_work_it_is(capsys, monkeypatch):
    monkeypatch.setattr(fits, "RANKS", {1: "one GPU"})
    assert fits.main(["configs/llama3-8b-grpo-online.toml", *SHORT]) == 0
    out = capsys.readouterr().out
    # Only the weights of the reward model have their full size.
    assert out.splitlines()[2].split() == "1 0.0 0.0 0.0 0.0 0.0 0.0 14.0 14.0 14.0 fits fits fits".split()
    assert "Needs one GPU of 24 GB (14 GiB of 24)." in out
    assert "312 steps, at most 2,496 prompts, 19,968 sequences of at most 32 + 64 tokens" in out
    assert "19,968 completions drawn" in out


def test_machines_are_listed_from_the_fewest_gpus_up():
    def machines(*peaks):
        gib = {str(ranks): dict(training=peak, drawing=0) for ranks, peak in zip(fits.RANKS, peaks)}
        return fits.machines(dict(gib=gib))

    assert machines(18, 9, 5, 3) == "one GPU of 24 GB (18 GiB of 24)"
    assert machines(79, 44, 21, 12) == (
        "one GPU of 141 GB (79 GiB of 141) or two GPUs of 80 GB (44 GiB of 80) "
        "or eight GPUs of 24 GB (12 GiB of 24)")
    assert machines(999, 999, 999, 125) == "more than eight GPUs of 141 GB"


def test_six_times_faster_requires_sampling_to_take_five_sixths_of_a_step():
    config = fits.read(f"configs/{QWEN}.toml", [])
    assert fits.flops_factor(config) == 8  # 6, and a pass of the reference, as online
    text = " ".join(fits.work(config, 1_500_000_000))
    assert "409,600 completions drawn" in text and "only where that takes 83.3% of a step: " in text
    plain = fits.read("configs/qwen2.5-1.5b-math-grpo-every-64.toml", [])
    assert fits.flops_factor(plain) == 10  # and a pass of the old policy
    # reference, and both passes for z0
    assert fits.flops_factor(fits.read(f"configs/{GEMMA}.toml", [])) == 12
    assert fits.flops_factor(fits.read("configs/llama3-8b-kto-online.toml", [])) == 12  # old policy instead


@pytest.mark.parametrize("line, complaint", [
    ("colour = 1", "Unrecognized options: --colour=1"),
    ("loss = 'ppo'", "--loss ppo"),
    ("reward = 'configs/rewards.py:nobody'", "defines no nobody"),
    ("reward = 'nowhere.py:score'", "there is no file nowhere.py"),
    ("sampler = 'configs/external.py:nobody'", "defines no nobody"),
    ("model = 'nobody/nothing'", "--model nobody/nothing"),
])
def test_a_config_that_names_something_missing_fails(line, complaint, tmp_path, capsys):
    settings = dict(loss="loss = 'grpo'", model="model = 'google/gemma-2-27b-it'",
                    data="data = ['rows.jsonl']")
    file = tmp_path / "bad.toml"
    file.write_text("\n".join((settings | {line.split()[0]: line}).values()))
    assert fits.main([str(file)]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_everything_a_config_names_exists_and_its_head_says_where_it_fits(file):
    config = fits.read(str(file), [])
    assert config.model in fits.MODELS
    result = fits.stored()[file.stem, ""]
    assert result["settings"] == fits.memory_settings(config), f"stale: python tests/fits.py --store {file}"
    head, _, _ = file.read_text(encoding="utf-8").partition("\n\n")
    head = " ".join(head.replace("\n#", " ").split())
    assert fits.machines(result) in head
    assert re.findall(FIGURE, head) == re.findall(FIGURE, fits.machines(result))


def test_the_readme_says_where_configs_fit_as_in_the_stored_results():
    rows = [fits.row(f"configs/{name}.toml", flags.split(), result)
            for (name, flags), result in fits.stored().items() if "gib" in result]
    assert all(re.search(MACHINE, row) for row in rows)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = list(filter(re.compile(MACHINE).search, text.splitlines()))
    assert len(lines) == 3 and set(lines) <= set(rows)


@pytest.mark.slow
def test_a_stored_result_is_what_a_dry_run_gives(monkeypatch):
    monkeypatch.setattr(fits, "MODELS", MODELS)
    monkeypatch.setattr(fits, "RANKS", {1: "one GPU"})
    parameters, gib = fits.gib_by_ranks(f"configs/{SMOLLM2}.toml", [])
    result = fits.stored()[SMOLLM2, ""]
    assert parameters == result["parameters"]
    assert gib["1"] == pytest.approx(result["gib"]["1"], rel=0.02, abs=0.01)
