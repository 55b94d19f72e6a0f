"""The commands `show` and `chat` of eval.py: completions side by side, and answers in a dialogue."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
import transformers
from bases import character_tokenizer
from conftest import ROOT, finished, rows_of, write_jsonl

import eval as evaluation
import humanline


@pytest.fixture
def prompts(tmp_path) -> str:
    return write_jsonl(tmp_path / "prompts.jsonl", rows_of("prompts"))


# show.

def shown(output: str, models: int) -> list[list[tuple[str, str]]]:
    """Per prompt and model: the first completion in its column, and the summary below it."""
    blocks = []
    for block in re.split(r"^── \d+ of \d+: .*$", output, flags=re.M)[1:]:
        cells = [[cell.strip() for cell in line.split("│")]
                 for line in re.split("─{20,}\n", block)[1].splitlines()]
        end = next(i for i, line in enumerate(cells) if line[0].startswith("→"))
        blocks.append([("\n".join(line[i] for line in cells[:end]), cells[end][i]) for i in range(models)])
    return blocks


def test_show_prints_completions_and_their_rewards(ask, tiny, prompts, varied):
    output = ask(f"show --model {tiny} {tiny} --data {prompts} --prompts 3 --max-new-tokens 6 "
                 f"--reward {varied}")
    config = humanline.parse_config(["--model", tiny, "--reward", varied, "--max-new-tokens", "6"])
    rows = humanline.read_rows(prompts, config, "--data")
    sampler = evaluation.load(config)
    groups = humanline.encode_rows(rows, sampler, online=True)[:3]
    drawn = [evaluation.draw(sampler, groups, rows, 1, model) for model in (0, 1)]
    blocks = shown(output, 2)
    assert len(blocks) == 3
    for number, block in enumerate(blocks):
        assert f"── {number + 1} of 3: {prompts} row {number + 1} " in output
        assert f"\n{rows[number].prompt[0]['content']}\n" in output
        for (text, beneath), model in zip(block, drawn):
            completion, = evaluation.completions_of(sampler, model[number])
            assert text.strip() == completion["completion"].strip()
            cut = ", truncated" * completion["truncated"]
            assert beneath == f"→ reward {completion['reward']:.4g}, {completion['tokens']} tokens{cut}"
    assert ", truncated" in output and "(answer: " in output


def test_greedy_completions_are_shown_once_and_equal_those_of_accuracy(ask, tiny, prompts, tmp_path):
    output = ask(f"show --model {tiny} --data {prompts} --prompts 4 --samples 3 --greedy --max-new-tokens 4")
    ask(f"accuracy --model {tiny} --data {prompts} --limit 4 --samples 1 --max-new-tokens 4 "
        "--out drawn.jsonl")
    lines = map(json.loads, (tmp_path / "drawn.jsonl").read_text().splitlines())
    greedy = [line["completion"] for line in lines if line["kind"] == "greedy"]
    assert [block[0][0].strip() for block in shown(output, 1)] == [text.strip() for text in greedy]
    assert output.count("→ reward") == 4


def test_a_model_that_is_not_a_run_gets_the_prompts_and_reward_of_the_run_next_to_it(
        ask, run, tiny, prompts, varied):
    folder = run("--prompt-template <{prompt}> --system hello --max-new-tokens 3 "
                 f"--reward {varied} --steps 1")
    output = ask(f"show --model {tiny} {folder} --data {prompts} --prompts 2")
    first = rows_of("prompts")[0]["prompt"]
    assert f"system: hello\nuser: <{first}>\n" in output and output.count("system: hello") == 2
    assert " 3 tokens, truncated" in output and " 4 tokens" not in output
    rewards = [re.findall(r"→ reward (\S+),", line) for line in output.splitlines() if line.startswith(" →")]
    # Rewards of --reward exact would be 0 or 1.
    assert {reward for pair in rewards for reward in pair} - {"0", "1"}


def test_prompts_that_differ_between_runs_are_shown_in_the_columns(ask, run, prompts):
    folders = [run(f"--prompt-template {around} --steps 1") for around in ("<{prompt}>", "[{prompt}]")]
    models = " ".join(map(str, folders))
    output = ask(f"show --model {models} --data {prompts} --prompts 1 --max-new-tokens 2")
    first = rows_of("prompts")[0]["prompt"]
    assert re.search(rf"^ \(<{re.escape(first)}>\) +│ \(\[{re.escape(first)}\]\) *$", output, re.M)


# chat.

TEMPLATE = ("{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
            "{% if add_generation_prompt %}a:{% endif %}")


def with_template(tiny: str, template: str | None, folder: Path) -> str:
    """The tiny model with another chat template, or with none."""
    transformers.AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def talker(tiny, tmp_path_factory) -> str:
    """A model with prompts of the form u:hello;a:…;u:more;a:"""
    return with_template(tiny, TEMPLATE, tmp_path_factory.mktemp("models") / "talker")


@pytest.fixture(scope="session")
def plain(tiny, tmp_path_factory) -> str:
    return with_template(tiny, None, tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture
def talk(monkeypatch, capsys):
    """talk("--model x", "hello", …) returns the output, and the prompt and completion of each answer as
    text."""

    def run(flags: str, *messages: str) -> tuple[str, list[tuple[str, str]]]:
        turns, sample = [], humanline.sample
        tokenizer = character_tokenizer()

        def listen(policy, prompts, *more):
            (drawn,) = sample(policy, prompts, *more)
            turns.append(tuple(tokenizer.decode(ids, skip_special_tokens=True)
                               for ids in (prompts[0], drawn[0])))
            return [drawn]

        lines = io.BytesIO("".join(f"{message}\n" for message in messages).encode())
        with monkeypatch.context() as patch:
            patch.setattr(humanline, "sample", listen)
            patch.setattr(sys, "stdin", io.TextIOWrapper(lines))
            status = evaluation.main(["chat", *flags.split()])
        captured = capsys.readouterr()
        assert (status, captured.err) == (0, "")
        return captured.out, turns

    return run


def test_a_chat_remembers_its_turns_until_it_is_reset(talk, talker):
    output, turns = talk(f"--model {talker} --max-new-tokens 5", "1", "2", "", "/reset", "3")
    (first, answer), (second, second_answer), (third, third_answer) = turns
    assert (first, second, third) == ("u:1;a:", f"u:1;a:{answer};u:2;a:", "u:3;a:")
    for text in (answer, second_answer, third_answer):
        assert f"\n{talker}> {text} [truncated after 5 tokens]\n" in output
    assert "[new dialogue]" in output and answer != third_answer
    # the same seed gives the same answers
    assert talk(f"--model {talker} --max-new-tokens 5", "1", "2", "", "/reset", "3") == (output, turns)


def test_a_chat_uses_the_prompt_settings_of_training(talk, talker, run, data_files):
    data = data_files["groups"]
    folder = run("--steps 1 --sync-k 0 --system be --prompt-template <{prompt}> --max-new-tokens 3",
                 flags=["--model", talker, "--data", data, "--batch-size", "2"])
    _, ((first, answer), (second, _)) = talk(f"--model {folder}", "1", "2")
    assert first == "s:be;u:<1>;a:" and second == f"s:be;u:1;a:{answer};u:<2>;a:" and len(answer) <= 3


def test_without_a_chat_template_each_text_is_continued_alone_with_one_warning(talk, plain):
    output, turns = talk(f"--model {plain} --max-new-tokens 4", "1", "2")
    assert [prompt for prompt, _ in turns] == ["1", "2"]
    assert output.count(f"{plain} has no chat template") == 1


def test_an_answer_streams_and_ctrl_c_stops_only_that_answer(talk, talker, monkeypatch):
    _, ((_, whole),) = talk(f"--model {talker} --max-new-tokens 9", "1")
    count, put = iter(range(1, 100)), transformers.TextStreamer.put

    def interrupted(streamer, value):
        put(streamer, value)
        if next(count) == 6:  # the prompt and five tokens
            raise KeyboardInterrupt

    monkeypatch.setattr(transformers.TextStreamer, "put", interrupted)
    # the stopped call returned nothing
    output, ((second, _),) = talk(f"--model {talker} --max-new-tokens 9", "1", "2")
    partial, = re.findall(rf"{talker}> (.*) \[stopped\]", output)
    assert partial and whole.startswith(partial) and partial != whole and second == f"u:1;a:{partial};u:2;a:"


def test_ctrl_c_at_the_prompt_ends_the_chat(talker, monkeypatch, capsys):
    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert evaluation.main(["chat", "--model", talker]) == 0 and capsys.readouterr().err == ""


def test_a_dialogue_too_long_for_the_model_starts_again(talk, talker):
    long = "1" * 30  # of 64 positions
    output, turns = talk(f"--model {talker} --max-new-tokens 20", long, long, "2", "3" * 70, "4")
    assert output.count("[the dialogue exceeds the model's 64 positions: starting a new one;") == 2
    assert [prompt for prompt, _ in turns] == [f"u:{long};a:", "u:2;a:", "u:4;a:"]


def test_a_piped_chat_reads_any_bytes_and_ends_with_its_input(talker, tmp_path):
    done = finished(ROOT / "eval.py", "chat", "--model", talker, "--max-new-tokens", "2", cwd=tmp_path,
                    input=b"1\n\xff\n")
    output = done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert output.count(f"\n{talker}> ") == 2
    assert output.endswith("you> \n")


def test_a_template_that_refuses_the_dialogue_gives_a_one_line_error(tiny, tmp_path, monkeypatch, capsys):
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    folder = with_template(tiny, refusal + TEMPLATE, tmp_path / "strict")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1\n")))
    assert evaluation.main(["chat", "--model", folder, "--system", "be"]) == 2
    assert re.fullmatch(r"eval\.py: error: .*the chat template rejected the dialogue: no system; "
                        r"try it without --system\n",
                        capsys.readouterr().err)
