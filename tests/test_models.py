"""Architectures: log-probs, token boundaries and short runs on random two-layer models of many families."""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import complaint, encode_prompt, finished, metrics, write_jsonl
from families import (CHATML_TEMPLATE, FAMILIES, SIZES, full_logits_logps, gsm8k, load, own_rows, random_ids,
                      some_sequences)
from tokenizers import Tokenizer, models
from transformers import (AutoModelForCausalLM, AutoTokenizer, CohereConfig, FalconConfig, GPT2Config,
                          GPTNeoXConfig, GraniteConfig, LlamaConfig, LlamaForCausalLM, LlamaModel,
                          MistralConfig, OPTConfig, PhiConfig, PreTrainedTokenizerFast)

import eval as evaluation
import humanline
from humanline import Config, Sequence


def check_log_probs(policy, tolerance: float) -> None:
    sequences = some_sequences(policy)
    for ours, sequence in zip(own_rows(policy, sequences), sequences, strict=True):
        assert torch.allclose(ours, full_logits_logps(policy, sequence), rtol=0, atol=tolerance)


def check_gradients(policy, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for (name, _), a, b in zip(policy.named_parameters(), ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * max(1.0, float(b.abs().max()))), name


# Log-probs.

@pytest.mark.parametrize("family, tied, attn", [
    ("llama", True, "sdpa"), ("llama", False, "eager"), ("qwen2", False, "sdpa"), ("qwen3", True, "eager"),
    ("gemma2", True, "eager"), ("gpt2", True, "sdpa"), ("gpt2", False, "eager")])
def test_log_probs_and_their_gradients_equal_those_of_the_models_full_logits(folder, family, tied, attn):
    policy, _, _ = load(folder(family, tied), attn=attn)
    assert policy.config._attn_implementation == attn
    assert (policy.get_input_embeddings().weight is policy.get_output_embeddings().weight) == tied
    check_log_probs(policy, 1e-5)
    sequences = some_sequences(policy)
    logps = own_rows(policy, sequences)
    expected = [full_logits_logps(policy, sequence) for sequence in sequences]

    weights = torch.randn(len(torch.cat(expected)), generator=torch.Generator().manual_seed(2))
    gradients = lambda parts: torch.autograd.grad((torch.cat(parts) * weights).sum(),
                                                  list(policy.parameters()))
    check_gradients(policy, gradients(logps), gradients(expected))


def random_model(folder, to: Path, config, **more):
    """A random model of another architecture, in a folder with a tokenizer."""
    config.update(dict(vocab_size=400, **SIZES, pad_token_id=0, bos_token_id=0, eos_token_id=0, **more))
    shutil.copytree(folder("llama3"), to)
    AutoModelForCausalLM.from_config(config).save_pretrained(to)
    return load(str(to), attn="eager")[0]


@pytest.mark.parametrize("config", [
    GPT2Config(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),  # modules
    # numbers for F.dropout
    OPTConfig(dropout=0.5, attention_dropout=0.5, layerdrop=0.5, ffn_dim=64, word_embed_proj_dim=32),
], ids=lambda config: config.model_type)
def test_dropout_is_turned_off_everywhere_in_a_model(folder, tmp_path, config):
    policy = random_model(folder, tmp_path / "model", config)
    sequences = some_sequences(policy)
    first, second = own_rows(policy, sequences), own_rows(policy, sequences)
    assert policy.training and all(map(torch.equal, first, second))


@pytest.mark.parametrize("config", [
    GraniteConfig(num_key_value_heads=1, logits_scaling=8.0),
    CohereConfig(num_key_value_heads=1, logit_scale=0.25)],
    ids=lambda config: config.model_type)
def test_log_probs_are_right_for_a_head_that_scales_its_logits(folder, tmp_path, config):
    check_log_probs(random_model(folder, tmp_path / "model", config, initializer_range=1.0), 1e-4)


@pytest.mark.parametrize("lora", [0, pytest.param(4, marks=pytest.mark.needs("peft"))])
def test_activation_checkpointing_changes_no_gradient(folder, lora):
    grads = []
    for checkpointing in (False, True):
        policy, _, _ = load(folder("llama"), lora=lora, checkpoint_activations=checkpointing)
        assert any(getattr(module, "gradient_checkpointing", False)
                   for module in policy.modules()) == checkpointing
        logps = humanline.log_probs(policy,
                                    [[sequence] for sequence in some_sequences(policy)] + shared_rows(policy))
        grads.append(torch.autograd.grad(logps.sum(), list(humanline.trained(policy).values())))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert any(grad.any() for grad in grads[0])


@pytest.mark.parametrize("dtype", ["mixed", "bfloat16"])
def test_bf16_log_probs_are_near_those_of_fp32_and_weights_have_the_requested_dtype(folder, dtype):
    exact, _, _ = load(folder("qwen2"), dtype="float32")
    policy, _, config = load(folder("qwen2"), dtype=dtype)
    assert {p.dtype for p in policy.parameters()} == {torch.float32 if dtype == "mixed" else torch.bfloat16}
    sequences = some_sequences(exact)
    logps = torch.cat(humanline.sequence_logps(policy, sequences, config))
    difference = (logps - torch.cat(own_rows(exact, sequences))).abs()
    assert logps.dtype == torch.float32 and 0 < difference.max() < 0.3 and difference.mean() < 0.05


def shared_rows(policy) -> list[list[Sequence]]:
    """Rows with one to five completions that share one copy of their prompt."""
    generator, rows = torch.Generator().manual_seed(2), []
    for count in (3, 1, 5, 2, 4):
        prompt = random_ids(policy, generator, 1, 30)
        rows.append([Sequence(prompt, random_ids(policy, generator, 1, 15)) for _ in range(count)])
    rows.append([Sequence([7], [5] * 9), Sequence([7], [6] * 3)])
    return rows


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gpt2"])
def test_sharing_a_prompt_changes_no_log_prob_and_no_gradient(folder, family):
    policy, _, config = load(folder(family))
    assert policy.shares_prompts
    rows, results = shared_rows(policy), []
    for layout in (rows, [[sequence] for row in rows for sequence in row]):
        logps = humanline.log_probs(policy, layout)
        weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(3))
        results.append((logps, torch.autograd.grad((logps * weights).sum(), list(policy.parameters()))))
    (shared, ours), (alone, theirs) = results
    assert torch.allclose(shared, alone, rtol=0, atol=1e-5)
    check_gradients(policy, ours, theirs)


@pytest.mark.parametrize("config_class, more, allows", [
    (GPTNeoXConfig, {}, True), (MistralConfig, dict(sliding_window=None), True),
    (LlamaConfig, dict(attn_implementation="eager"), False),
    (MistralConfig, dict(sliding_window=4096), False), (FalconConfig, dict(alibi=True), False)])
def test_a_model_is_tested_for_whether_prompts_can_be_shared(config_class, more, allows):
    config = config_class(vocab_size=100, **SIZES, num_key_value_heads=2, pad_token_id=0, bos_token_id=0,
                          eos_token_id=0, **more)
    policy = AutoModelForCausalLM.from_config(config)
    policy.autocast = contextlib.nullcontext
    assert humanline.can_share_prompts(policy) == allows


# The boundary of prompt and completion.

PROMPT, ANSWER = "How many apples? é 🎉", "3+4 = 7 apples.\n#### 7"
PAIRS = [{"prompt": "1+1?", "chosen": "2", "rejected": "3"}] * 8


def encoded_row(policy, tokenizer, config, **row):
    rows = [humanline.read_row(row, "row 1", config)]
    return humanline.encode_rows(rows, humanline.Sampler(policy, tokenizer, config), online=False)[0]


def encoded(path: str, row: dict, **settings):
    policy, tokenizer, config = load(path, **settings)
    return policy, tokenizer, encoded_row(policy, tokenizer, config, **row)


def encoded_prompts(tokenizer, *texts: str) -> list[list[int]]:
    return [encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_sees_exactly_the_prompt_and_the_completion_with_one_bos_and_one_eos(folder, family):
    _, _, template, end, bos, _ = FAMILIES[family]
    policy, tokenizer, group = encoded(folder(family), {"prompt": PROMPT, "chosen": ANSWER, "rejected": "no"})
    whole = group.prompt + group.completions[0]
    seen, note = [], lambda module, inputs, output: seen.append(inputs[0][0].tolist())
    policy.get_input_embeddings().register_forward_hook(note)
    humanline.log_probs(policy, [[Sequence(group.prompt, group.completions[0])]])
    assert seen == [whole[:-1]]  # the last token is only ever a label

    if template:
        turns = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": ANSWER}]
        expected = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)
        assert group.prompt == expected["input_ids"]
        assert whole == tokenizer.apply_chat_template(turns)["input_ids"][: len(whole)]
    else:
        assert tokenizer.decode(group.prompt, skip_special_tokens=True) == PROMPT
    assert tokenizer.decode(group.completions[0], skip_special_tokens=True) == ANSWER
    turn_end = tokenizer.convert_tokens_to_ids(end)
    assert group.completions[0].count(turn_end) == 1 and group.completions[0][-1] == turn_end
    if bos:
        assert whole.count(tokenizer.convert_tokens_to_ids(bos)) == 1 and whole[0] == tokenizer.bos_token_id


def test_a_completion_with_an_end_token_gets_no_second_one(folder):
    row = {"prompt": PROMPT, "chosen": ANSWER + "<|im_end|>", "rejected": "no<|im_end|>\n"}
    _, tokenizer, group = encoded(folder("qwen2"), row)
    assert [ids.count(tokenizer.eos_token_id) for ids in group.completions] == [1, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_stops_at_every_token_that_ends_an_answer(folder, family):
    policy, tokenizer, config = load(folder(family), max_new_tokens=40)
    stops = humanline.find_stop_ids(policy, tokenizer)
    assert stops[0] == tokenizer.convert_tokens_to_ids(FAMILIES[family][3])
    assert tokenizer.eos_token_id in stops
    prompts = encoded_prompts(tokenizer, "short", PROMPT, PROMPT * 3)
    drawn = [ids for ids, _ in humanline.sample(policy, prompts * 40, stops, config, 0)]
    ended = [ids for ids in drawn if ids[-1] in stops]
    assert ended and all(1 <= len(ids) <= 40 and not set(ids[:-1]) & set(stops) for ids in drawn)


def test_the_models_generation_settings_do_not_affect_samples_but_are_kept_in_the_final_folder(
        folder, rows, tmp_path):
    settings = dict(repetition_penalty=50.0, no_repeat_ngram_size=1, top_k=1, min_new_tokens=8,
                    suppress_tokens=[*range(40, 300)])
    model = copy_of(folder("qwen2"), tmp_path / "model", generation_config=settings)

    def draw(path: str) -> list[tuple[list[int], list[float]]]:
        policy, tokenizer, config = load(path, max_new_tokens=20)
        prompts = encoded_prompts(tokenizer, PROMPT) * 30
        return humanline.sample(policy, prompts, humanline.find_stop_ids(policy, tokenizer), config, 0)

    assert draw(model) == draw(folder("qwen2"))
    run = train(model, rows, tmp_path / "out", "--steps 1 --sample-every 1")
    assert settings.items() <= json.loads((run.out / "final" / "generation_config.json").read_text()).items()


def test_generation_settings_that_contradict_each_other_do_not_cost_the_final_model(folder, rows, tmp_path):
    model = Path(copy_of(folder("llama3"), tmp_path / "model"))
    settings = dict(temperature=0.9, top_p=0.6, do_sample=False)  # as Llama 2 and Vicuna were published
    (model / "generation_config.json").write_text(json.dumps(settings))
    run = train(str(model), rows, tmp_path / "out", "--steps 1")
    written = json.loads((run.out / "final" / "generation_config.json").read_text())
    assert written["eos_token_id"] == run.sampler.stop_ids and "temperature" not in written


def test_the_final_model_stops_where_it_was_trained_to(folder, rows, tmp_path):
    run = train(folder("llama3"), rows, tmp_path / "out", "--steps 1")
    written = json.loads((run.out / "final" / "generation_config.json").read_text())
    ends = run.sampler.tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|end_of_text|>"])
    assert written["eos_token_id"] == ends
    assert run.config.dtype == "float32"  # which checkpoints store


def test_a_pad_token_that_the_model_does_not_know_is_not_used(folder, rows, tmp_path):
    add_pad = lambda tokenizer: tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    model = with_tokenizer(folder("llama3"), tmp_path / "model", add_pad)
    policy, tokenizer, _ = load(model)
    assert tokenizer.pad_token_id == policy.config.vocab_size
    train(model, rows, tmp_path / "out", "--steps 1 --sample-every 1")


def test_a_system_message_is_kept_without_a_chat_template(folder):
    _, tokenizer, group = encoded(folder("gpt2"), PAIRS[0], system="Be brief.",
                                  prompt_template="Q: {prompt}\nA:")
    assert tokenizer.decode(group.prompt) == "Be brief.\n\nQ: 1+1?\nA:"


# Where an answer begins.

QWEN3_TEMPLATE = CHATML_TEMPLATE.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}"
    "<think>\n\n</think>\n\n"
    "{% endif %}{{ m.content }}").replace("assistant\n{% endif",
                                          "assistant\n{% if enable_thinking is defined and not "
    "enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif")
R1_TEMPLATE = CHATML_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
ZEPHYR_TEMPLATE = ("{{ bos_token }}{% for m in messages %}"
                   "[{{ m.role }}]\n{{ m.content }}{{ eos_token }}{% endfor %}"
                   "{% if add_generation_prompt %}[assistant]\n{% endif %}")


def with_tokenizer(path: str, to: Path, change) -> str:
    """A copy of a model folder, with its tokenizer modified by change(tokenizer)."""
    shutil.copytree(path, to)
    tokenizer = AutoTokenizer.from_pretrained(to)
    change(tokenizer)
    tokenizer.save_pretrained(to)
    return str(to)


def with_template(folder, family: str, template: str, to: Path, **settings):
    """A model of a family, its tokenizer with another chat template, and the configuration."""
    change = lambda tokenizer: setattr(tokenizer, "chat_template", template)
    return load(with_tokenizer(folder(family), to, change), **settings)


@pytest.mark.parametrize("family, template", [
    ("qwen3", QWEN3_TEMPLATE), ("qwen3", R1_TEMPLATE),
    ("llama", ZEPHYR_TEMPLATE), ("llama3", ZEPHYR_TEMPLATE)])
def test_offline_answers_begin_where_the_chat_template_puts_them(folder, tmp_path, family, template):
    loaded = with_template(folder, family, template, tmp_path / "model")
    group = encoded_row(*loaded, prompt=PROMPT, chosen=ANSWER, rejected="no")
    for answer, completion in zip((ANSWER, "no"), group.completions, strict=True):
        turns = [dict(role="user", content=PROMPT), dict(role="assistant", content=answer)]
        whole = group.prompt + completion
        assert whole == loaded[1].apply_chat_template(turns)["input_ids"][: len(whole)]


def test_offline_answers_that_contain_thinking_open_it_exactly_once(folder, tmp_path):
    loaded = with_template(folder, "qwen3", R1_TEMPLATE, tmp_path / "model")
    decode = loaded[1].decode
    group = encoded_row(*loaded, prompt=PROMPT, chosen="3 + 4 is 7.\n</think>\n\n7", rejected="</think>\n\nn")
    assert decode(group.prompt).endswith("assistant\n<think>\n")
    group = encoded_row(*loaded, prompt=PROMPT, chosen="<think>\n3 + 4 is 7.\n</think>\n\n7", rejected="no")
    whole = [decode(group.prompt + completion) for completion in group.completions]
    assert [text.count("<think>") for text in whole] == [1, 0]
    assert whole[1].endswith("assistant\nno<|im_end|>")


def test_a_system_message_stays_if_the_template_drops_it_once_an_answer_follows(folder, tmp_path):
    template = ("{% for m in messages %}{% if m.role != 'system' or messages[-1].role == 'user' %}"
                "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
                "{% if add_generation_prompt %}[assistant]{% endif %}")
    loaded = with_template(folder, "qwen3", template, tmp_path / "model", system="Be brief.")
    group = encoded_row(*loaded, prompt=PROMPT, chosen=ANSWER, rejected="no")
    assert loaded[1].decode(group.prompt) == f"[system]Be brief.[user]{PROMPT}[assistant]"
    assert loaded[1].decode(group.completions[0]) == f"{ANSWER}<|im_end|>"


def test_template_arguments_reach_the_prompts(folder, tmp_path):
    settings = dict(template_values='{"enable_thinking": false, "more": {"none": null, "text": "é"}}')
    _, tokenizer, _ = with_template(folder, "qwen3", QWEN3_TEMPLATE, tmp_path / "model", **settings)
    assert tokenizer.decode(encoded_prompts(tokenizer, "a")[0]).endswith("assistant\n<think>\n\n</think>\n\n")
    for model, says in ((str(tmp_path / "model"), "Expecting value"), (folder("gpt2"), "has no template")):
        with pytest.raises(humanline.UserError, match=says):
            load(model, template_values="a=1")


def test_a_model_whose_class_does_not_name_its_body_is_refused(tiny, monkeypatch):
    monkeypatch.setattr("transformers.LlamaForCausalLM.base_model_prefix", "body")
    with pytest.raises(humanline.UserError, match="its class does not name its body"):
        load(tiny)


def test_a_template_that_writes_the_date_writes_the_same_date_every_day(folder, tmp_path):
    today = ("{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
             "Today is {{ date_string }}, {{ strftime_now('%Y-%m-%d') }}.")  # as Llama 3.2 and gpt-oss write it
    _, tokenizer, _ = with_template(folder, "qwen3", today + CHATML_TEMPLATE, tmp_path / "model")
    assert tokenizer.decode(encoded_prompts(tokenizer, "a")[0]).startswith("Today is 26 Jul 2024, 2024-07-26.")


def test_dialogues_keep_their_speakers_without_a_chat_template(folder, capsys):
    start = ("\n\nHuman: What is the capital of France?\n\nAssistant: Paris."
             "\n\nHuman: And of Spain?\n\nAssistant:")
    row = dict(chosen=f"{start} Madrid.", rejected=f"{start} Rome.")
    _, tokenizer, group = encoded(folder("gpt2"), row)
    assert tokenizer.decode(group.prompt, skip_special_tokens=True) == start.replace(": ", ":\n") + "\n"
    assert tokenizer.decode(group.completions[0], skip_special_tokens=True) == "Madrid."
    assert "so dialogues are formatted as Human: … Assistant: …" in capsys.readouterr().err
    policy, tokenizer, group = encoded(folder("llama-plain"), row)
    assert group.prompt.count(tokenizer.bos_token_id) == 1
    policy, tokenizer, config = load(folder("gpt2"), max_new_tokens=4)  # held-out rows do not decide on it
    rows = [humanline.read_row(row, "row 1", config)]
    humanline.encode_rows(rows, humanline.Sampler(policy, tokenizer, config), True, "--eval-data")
    assert not tokenizer.chat_template


# What is refused, in one line.


def copy_of(path: str, to: Path, **changes: dict) -> str:
    """A copy of a model folder with keys of its JSON files changed, or removed if the value is None."""
    shutil.copytree(path, to)
    for file, keys in changes.items():
        content = json.loads((to / f"{file}.json").read_text()) | keys
        content = {key: value for key, value in content.items() if value is not None}
        (to / f"{file}.json").write_text(json.dumps(content))
    return str(to)


def refusal(model: str, tmp_path, capsys, *flags: str) -> str:
    data = write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    flags = ["--model", model, "--data", data, "--loss", "dpo", "--out", str(tmp_path / "out"), *flags]
    return complaint(flags, tmp_path, capsys)


def test_code_that_comes_with_a_model_runs_only_on_request(folder, tmp_path, capsys):
    mine = tmp_path / "model"
    classes = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    copy_of(folder("llama"), mine, config=dict(model_type="mine", auto_map=classes))
    (mine / "mine.py").write_text("import pathlib\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
                                  f"pathlib.Path({str(tmp_path / 'ran')!r}).write_text('')\n"
                                  "class Mine(LlamaConfig):\n    model_type = 'mine'\n"
                                  "class MineForCausalLM(LlamaForCausalLM):\n    config_class = Mine\n")
    line = refusal(str(mine), tmp_path, capsys)
    assert "--trust-remote-code" in line and str(mine) in line and not (tmp_path / "ran").exists()
    policy, _, _ = load(str(mine), trust_remote_code=True)
    assert type(policy).__name__ == "MineForCausalLM" and (tmp_path / "ran").exists()
    flags = evaluation.Chat(model=(str(mine),), trust_remote_code=True)
    assert evaluation.config_for(str(mine), flags).trust_remote_code


def test_a_run_in_place_of_a_model_is_refused(tmp_path, capsys):
    (tmp_path / "run" / "final").mkdir(parents=True)
    assert f"is a run; pass {tmp_path}/run/final" in refusal(str(tmp_path / "run"), tmp_path, capsys)


def test_a_tokenizer_without_eos_is_refused(folder, tmp_path, capsys):
    model = copy_of(folder("llama3"), tmp_path / "model", tokenizer_config=dict(eos_token=None))
    assert "no end-of-sequence token" in refusal(model, tmp_path, capsys)


def test_a_tokenizer_that_does_not_belong_to_the_model_is_refused(folder, tmp_path, capsys):
    # A word-level tokenizer beside a Qwen2 config comes back as a byte-level one without an alphabet.
    words = Tokenizer(models.WordLevel({"<eos>": 0, "1+1?": 1}, unk_token="<eos>"))
    shutil.copytree(folder("qwen2"), tmp_path / "none")
    for file in [*(tmp_path / "none").glob("tokenizer*"), *(tmp_path / "none").glob("chat_template*")]:
        file.unlink()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path / "none")
    assert re.search(r"row 1: .*gives no tokens", refusal(str(tmp_path / "none"), tmp_path, capsys))
    add = lambda tokenizer: tokenizer.add_tokens(["1+1"])
    more = with_tokenizer(folder("llama3"), tmp_path / "more", add)
    assert "or some that the model does not have" in refusal(more, tmp_path, capsys)


def test_an_unknown_attention_implementation_gives_a_one_line_error(folder, tmp_path, capsys):
    line = refusal(folder("llama"), tmp_path, capsys, "--attn", "nonsense")
    assert line.endswith("; choose another --attn")


@pytest.mark.parametrize("dtype", ["float32", "mixed"])
def test_a_model_whose_log_probs_we_cannot_compute_is_refused(folder, tmp_path, capsys, monkeypatch, dtype):
    forward, trunk = LlamaForCausalLM.forward, LlamaModel.forward

    def scaled(self, *args, **more):
        outputs = forward(self, *args, **more)
        outputs.logits = outputs.logits * 2
        return outputs

    def noisy(self, *args, **more):
        outputs = trunk(self, *args, **more)
        outputs.last_hidden_state = outputs.last_hidden_state * (1 + 0.1 * torch.rand(()))
        return outputs

    for kind, wrong, says in (
            (LlamaForCausalLM, scaled, "its logits are not hidden states times output embeddings"),
            (LlamaModel, noisy, "infinite or random in training")):
        monkeypatch.setattr(kind, "forward", wrong)
        assert says in refusal(folder("llama3"), tmp_path, capsys, "--dtype", dtype)


def test_a_head_with_a_bias_is_refused_however_small_the_bias_is(folder, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(folder("llama3"))
    model = AutoModelForCausalLM.from_config(PhiConfig(
        vocab_size=len(tokenizer), **SIZES, eos_token_id=tokenizer.eos_token_id))
    model.lm_head.bias.data.fill_(1e-3)
    model.save_pretrained(tmp_path / "phi")
    tokenizer.save_pretrained(tmp_path / "phi")
    assert "its output head has a bias" in refusal(str(tmp_path / "phi"), tmp_path, capsys)


# Runs.

@pytest.fixture
def rows(tmp_path) -> str:
    return write_jsonl(tmp_path / "gsm8k.jsonl", gsm8k(24))


def train(model: str, data: str, out: Path, flags: str) -> humanline.Run:
    defaults = (f"--model {model} --data {data} --out {out} --lr 1e-3 --batch-size 2 --group-size 4 "
                "--max-new-tokens 8 --sync-k 2")
    return humanline.train(humanline.parse_config([*defaults.split(), *flags.split()]))


@pytest.mark.parametrize("parameters, has_gpu, has_bf16, mixed", [
    (1_000_000, True, True, True), (20_000_000, True, False, False), (1_000_000, False, True, False),
    (20_000_000, False, True, True), (20_000_000, False, False, False)])
def test_auto_is_mixed_on_a_gpu_with_bf16_and_for_large_models_on_a_cpu_where_it_is_faster(
        monkeypatch, parameters, has_gpu, has_bf16, mixed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    monkeypatch.setattr(humanline, "bf16_is_faster", lambda: has_bf16 or has_gpu)
    model = SimpleNamespace(num_parameters=lambda: parameters)
    assert humanline.choose_dtype(model, Config()) == ("mixed" if mixed else "float32")


@pytest.mark.parametrize("has_instructions, seconds, faster", [
    (True, 0.01, True), (True, 0.05, False), (False, 0.001, False)])
def test_bf16_must_be_half_as_fast_again_on_a_cpu_that_has_it(monkeypatch, has_instructions, seconds, faster):
    taken = {torch.float32: 0.06, torch.bfloat16: seconds}
    repeat = lambda product, number, repeat: [taken[product().dtype]] * repeat
    monkeypatch.setattr(humanline.timeit, "repeat", repeat)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    assert humanline.bf16_is_faster() == faster


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_trains_on_gsm8k_and_on_its_own_samples_of_it(
        folder, rows, varied, tmp_path, family):
    online = f"--sample-every 2 --reward {varied} --checkpoint-activations"
    for out, flags in ((tmp_path / "offline", ""), (tmp_path / "online", online)):
        train(folder(family, family == "gpt2"), rows, out, f"{flags} --steps 2")
        assert [line["step"] for line in metrics(out)] == [1, 2]
        assert all(0 < line["grad_norm"] < math.inf for line in metrics(out))
        check_log_probs(load(str(out / "final"))[0], 1e-5)


def test_a_tiny_model_uses_one_thread(folder):
    try:
        torch.set_num_threads(2)
        load(folder("llama3"))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


# The final folder.

LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for path in sys.argv[1:]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    logits, ids = model(torch.arange(60)[None]).logits, tokenizer("3 apples é")["input_ids"]
    torch.save((logits, ids, tokenizer.chat_template), path + ".pt")
"""


def test_the_final_folder_gives_the_same_logits_in_plain_transformers_bit_for_bit(folder, rows, tmp_path):
    cases = [("llama3", True, "float32"), ("qwen3", False, "float32"), ("gemma2", True, "bfloat16"),
             ("gpt2", True, "mixed")]
    runs = []
    for family, tied, dtype in cases:
        runs.append(train(folder(family, tied), rows, tmp_path / family, f"--steps 2 --dtype {dtype}"))
    finals = [str(run.out / "final") for run in runs]
    (tmp_path / "logits.py").write_text(LOGITS)
    assert finished(tmp_path / "logits.py", *finals).returncode == 0
    for (family, tied, _), run, final in zip(cases, runs, finals, strict=True):
        logits, ids, template = torch.load(f"{final}.pt", weights_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder(family, tied))
        assert torch.equal(run.policy.eval()(torch.arange(60)[None]).logits, logits), family
        assert ids == tokenizer("3 apples é")["input_ids"] and template == tokenizer.chat_template


def test_the_final_folder_has_the_settings_of_the_run(folder, rows, tmp_path):
    out = train(folder("gpt2"), rows, tmp_path / "out", "--steps 2 --loss kto --seed 7").out
    assert (out / "final" / "config.toml").read_bytes() == (out / "config.toml").read_bytes()


EVERY_PASS = list(itertools.product((False, True), (1, 5), (1, 2)))


@pytest.mark.parametrize("flags, passes", [
    ("--no-checkpoint-activations", [(True, 5, 2)]),
    pytest.param("--checkpoint-activations", EVERY_PASS, marks=pytest.mark.slow),
    pytest.param("--lora 4 --checkpoint-activations", EVERY_PASS,
                 marks=[pytest.mark.needs("peft"), pytest.mark.slow])])
def test_every_kind_of_pass_is_compiled(folder, monkeypatch, flags, passes):
    torch.compiler.reset()
    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *a, **b: compile_layer(*a, **b, backend="eager"))
    line = f"--model {folder('llama3')} --data x --compile {flags}".split()
    policy, _ = humanline.load_policy(humanline.parse_config(line), torch.device("cpu"))
    for with_grad, rows, in_row in passes:
        packed = [[Sequence([3, 4, 5, 6], [7, 8, 9])] * in_row for _ in range(rows)]
        with torch.set_grad_enabled(with_grad), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            logps = humanline.log_probs(policy, packed)
        if with_grad:
            logps.sum().backward()
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                    reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_draws_the_same_completions_and_has_the_same_losses(folder, rows, tmp_path, varied):
    """With shared prompts, for training, rollouts and reference log-probs."""
    losses, drawn, graphs = [], [], []
    for compiled in ("--no-compile", "--compile"):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        flags = f"--steps 3 --sample-every 2 --sync-k 2 --reward {varied} {compiled}"
        run = train(folder("llama3"), rows, tmp_path / compiled, flags)
        losses.append([line["loss"] for line in metrics(run.out)])
        lines = (run.out / "rollouts.jsonl").read_text().splitlines()
        drawn.append([json.loads(line)["tokens"] for line in lines])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert run.policy.shares_prompts
    torch.compiler.reset()
    assert graphs[0] == 0 < graphs[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 3
    assert drawn[0] == drawn[1] and len(drawn[0]) == 6 * 4
