"""Former silent errors: each case now gives a one-line message, or the correct result."""

import gzip
import json
import shutil

import pytest
import torch
from conftest import ROOT, command, complaint, short_run, write_jsonl
from safetensors.torch import load_file, save_file

import eval as evaluation
import humanline


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    """Runs without --out are written to a temporary folder."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


# Data.

def test_a_folder_of_compressed_files_is_read_as_well(tmp_path):
    """HH-RLHF has this format on the hub."""
    with gzip.open(tmp_path / "train.jsonl.gz", "wt") as file:
        file.write('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    [row] = humanline.read_rows(str(tmp_path), humanline.Config(), "--data")
    assert row.completions == ["b", "c"]


TURNS = [dict(content="What is 1+1?", role="user")]


@pytest.mark.parametrize("row, expected", [
    (dict(prompt="a", completion="b", reward=1, tokens=[9, 3], logps=[5.0, -1.0]),
     "must be token ids and as many log-probs"),
    (dict(prompt="a", completions=["b", "c"], scores=[0, 1e200]), "a score or label is 1e+200"),
    (dict(prompt="a", completion="b", label=4), "a label is 4; it must be 1 or true for a good"),
    (dict(prompt="a", completion="b", label="1"), "a score or label is '1'"),
    (dict(prompt="a", output_A="b", output_B="c", label=0.5), "a label is 0.5"),
    (dict(prompt=json.dumps(TURNS), chosen="b", rejected="c"),
     "chat messages inside a string; save the rows as JSON lines"),
    (dict(prompt="a", chosen=str(TURNS), rejected="c"), "chat messages inside a string"),
])
def test_a_row_that_would_be_misread_gives_a_one_line_error(tiny, tmp_path, capsys, row, expected):
    data = write_jsonl(tmp_path / "rows.jsonl", [row])
    line = complaint(short_run(tiny, data), tmp_path, capsys)
    assert "row 1: " in line and expected in line


def test_a_prompt_template_field_that_no_row_has_is_refused(tiny, data_files, tmp_path, capsys):
    wrong = [*short_run(tiny, data_files["groups"]), "--prompt-template", "Solve: {prompt} {promt}"]
    assert "row 1: --prompt-template: no 'promt'; name columns" in complaint(wrong, tmp_path, capsys)
    humanline.read_rows(data_files["groups"], humanline.Config(prompt_template="{answer}: {prompt}"),
                        "--data")


def test_a_chat_template_that_drops_a_message_gives_a_one_line_error(tiny, data_files, tmp_path, capsys):
    shutil.copytree(tiny, tmp_path / "model")
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}A:"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    wrong = short_run(tmp_path / "model", data_files["groups"], "--system Rhyme!")
    assert "row 1: the chat template of the model drops a message of its prompt" in complaint(
        wrong, tmp_path, capsys)


@pytest.mark.parametrize("flags, rows, expected", [
    ("--loss kto --sample-every 1 --batch-size 10 --group-size 4", "prompts",
     "--batch-size 10 counts completions, which come in groups of --group-size 4; use a multiple of it"),
    ("--loss dpo --batch-size 25", "pairs", "--batch-size 25: a step needs 25 prompts, pairs or examples"),
    ("--loss kto --sample-every 1 --batch-size 100", "prompts", "but --data has 24; lower it"),
])
def test_a_batch_that_would_differ_from_what_was_asked_gives_a_one_line_error(
        tiny, data_files, tmp_path, capsys, flags, rows, expected):
    flags = short_run(tiny, data_files[rows], f"--out {tmp_path / 'out'} {flags}")
    assert expected in complaint(flags, tmp_path, capsys)


# Models.

@pytest.mark.parametrize("spoil, expected", [
    ("layers", "its config.json has no place for ['model.layers.1."),
    ("more", "its config.json has no place for ['model.extra"),
    ("fewer", "its files lack ['model.norm.weight']"),
    ("nan", "or they are NaN, infinite or random in training")])
def test_weights_that_do_not_fit_the_config_give_a_one_line_error(
        tiny, data_files, tmp_path, capsys, spoil, expected):
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    weights = load_file(model / "model.safetensors")
    if spoil == "layers":
        settings = json.loads((model / "config.json").read_text()) | dict(
            num_hidden_layers=1, layer_types=None)
        (model / "config.json").write_text(json.dumps(settings))
    elif spoil == "more":
        weights["model.extra.weight"] = torch.zeros(3)
    elif spoil == "fewer":
        del weights["model.norm.weight"]
    else:
        weights["model.norm.weight"] = torch.full((32,), float("nan"))
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert expected in complaint(short_run(model, data_files["groups"]), tmp_path, capsys)


# Resume, and the ranks.

def test_resuming_notices_a_change_in_any_line_of_a_group(run, tiny, tmp_path):
    lines = [dict(prompt_id=str(i // 2), prompt=f"{i // 2}+1=", completion=str(i), reward=i % 2)
             for i in range(16)]
    data = write_jsonl(tmp_path / "rows.jsonl", lines)
    start = short_run(tiny, data, "--save-every 2")
    out = run("", flags=start, out=str(tmp_path / "out"))
    shutil.rmtree(out / "final")
    lines = [line | dict(reward=2) if line["completion"] == "3" else line for line in lines]
    write_jsonl(tmp_path / "rows.jsonl", lines)
    with pytest.raises(humanline.UserError, match=": --data changed since; restore"):
        run("--resume latest", flags=start, out=str(out))


@pytest.mark.parametrize("changed", ["rows", "weights", "template", "reward", "sampler"])
def test_resuming_notices_changes_in_files_that_rewards_and_weights_depend_on(
        run, tiny, varied, tmp_path, changed):
    rows = [dict(prompt=f"{i}+1=", answer=str(i)) for i in range(8)]
    data, model = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "model"
    shutil.copytree(tiny, model)
    reward = shutil.copy(varied.partition(":")[0], tmp_path / "reward.py")
    sampler = tmp_path / "sampler.py"
    sampler.write_text("def draw(run):\n    def drawn(prompts, count, step, greedy):\n"
                       "        return [([3], [-0.1])] * (len(prompts) * count)\n    return drawn\n")
    start = short_run(model, data, f"--no-humanline --sample-every 1 --save-every 2 --reward {reward}:varied")
    start += ["--sampler", f"{sampler}:draw", "--top-p", "1e-9"]  # any log-probs will do
    out = run("", flags=start, out=str(tmp_path / "out"))
    shutil.rmtree(out / "final")
    if changed == "rows":
        write_jsonl(tmp_path / "rows.jsonl", [row | dict(answer="x") for row in rows])
    elif changed == "weights":
        other = {name: tensor * 1.01 for name, tensor in load_file(model / "model.safetensors").items()}
        save_file(other, model / "model.safetensors", metadata={"format": "pt"})
    else:
        file = {"template": model / "chat_template.jinja", "reward": reward, "sampler": sampler}[changed]
        with open(file, "a") as text:
            text.write(" ")
    names = dict(rows="--data", weights="--model model.safetensors", reward="--reward reward.py",
                 template="--model chat_template.jinja, the chat template", sampler="--sampler sampler.py")
    with pytest.raises(humanline.UserError, match=f": {names[changed]} changed since; restore"):
        run("--resume latest", flags=start, out=str(out))


def test_a_stray_file_in_a_checkpoint_is_not_damage(run, tmp_path):
    out = run("--save-every 3", out=str(tmp_path / "out"))
    shutil.rmtree(out / "final")
    for name in ("step-00000006", "step-00000003"):
        (out / "checkpoint" / name / ".DS_Store").write_text("Finder was here")
    config = humanline.Config(out=str(out), resume="latest")
    assert humanline.find_checkpoint(config, out).name == "step-00000006"


def test_a_run_of_another_version_is_reported_as_such(run, tiny, data_files, tmp_path, capsys):
    out = run("--save-every 3", out=str(tmp_path / "out"))
    shutil.rmtree(out / "final")
    checkpoint, settings = out / "checkpoint" / "step-00000006", out / "config.toml"
    hashes = json.loads((checkpoint / "files.json").read_text())
    hashes.pop("format")
    (checkpoint / "files.json").write_text(json.dumps(hashes))
    flags = short_run(tiny, data_files["groups"], f"--resume {checkpoint}")
    assert f"{checkpoint}: written by another version of humanline.py" in complaint(flags, tmp_path, capsys)
    head = f"Format {humanline.FORMAT}"
    settings.write_text(settings.read_text().replace(head, "Format 0"))
    flags = short_run(tiny, data_files["groups"], f"--out {out} --resume latest")
    assert "config.toml there was not written by this version of humanline.py" in complaint(
        flags, tmp_path, capsys)


@pytest.mark.parametrize("flags, expected", [
    ("--reward nosuchfile.py:f",
     "--reward nosuchfile.py:f: No such file: nosuchfile.py; write FILE.py:function, or copy"),
    ("--eval-every 2", "--eval-every 2 needs data to measure on; add --eval-data"),
])
def test_a_flag_that_would_do_nothing_gives_a_one_line_error(tiny, data_files, tmp_path, capsys, flags,
                                                             expected):
    assert expected in complaint(short_run(tiny, data_files["groups"], flags), tmp_path, capsys)


def test_evaluating_on_prompts_of_the_training_data_gives_a_warning(run, tiny, tmp_path, capsys):
    rows = [dict(prompt=f"{i}+1=", answer=str(i)) for i in range(8)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    held = write_jsonl(tmp_path / "held.jsonl", rows[:3] + [dict(prompt="9+9=", answer="18")])
    run("", flags=short_run(tiny, data, f"--no-humanline --sample-every 1 --steps 1 --eval-data {held}"))
    assert "warning: --eval-data: 3 of its prompts are also in --data" in capsys.readouterr().err


def test_growing_completions_are_not_reported_as_a_collapse():
    grows, collapse = humanline.Watch(), humanline.Watch()
    # log-probs of a token stay, and the completions come to have five times the tokens
    for step in range(100):
        assert not grows(dict(logp_wanted=-0.5, completion_length=4 + step / 5))
    warnings = [collapse(dict(logp_wanted=-0.5 - max(0, step - 50) / 50, completion_length=4))
                for step in range(100)]
    assert sum(map(len, warnings)) == 1


# What is printed, and rewards.

def test_a_terminal_without_unicode_gets_question_marks(tiny, data_files, varied, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "modèle")
    flags = f"--reward {varied} --eval-data {data_files['prompts']} --out {tmp_path / 'out'}"
    done = command(*short_run(model, data_files["groups"], flags), PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "mod?le" in done.stdout and "\nbefore  '" in done.stdout


ANSWERS = [  # what a model writes, the row's answer, and whether that is right
    ("I think 4 or 5", "5", 0), ("The answer is not 5", "5", 0), (r"\boxed{4\text{ or }5}", "5", 0),
    ("The answer is 2 or 3", "2 or 3", 1), ("it does not work without 5", "5", 1),
    (r"1\,1", "11", 0), (r"\boxed{1\,1}", "11", 0), (r"10\,000", "10000", 1), (r"10,\!000", "10000", 1),
    ("1, 2, and 3", "1,2,3", 1), ("1, 2 and 3", "1,2,3", 1), ("1 1/2", "1.5", 1), ("1.5", "1 1/2", 1),
    ("-1 1/2", "-1.5", 1),
    ("2", ["2", "two"], 1), ("two", ["2", "two"], 1), ("3", ["2", "two"], 0)]


def test_math_accepts_what_the_answer_says_and_no_more():
    process = humanline.FunctionProcess(str(ROOT / "configs" / "math_reward.py"), "math", 300)
    texts, answers, right = zip(*ANSWERS)
    scores = process([""] * len(texts), texts, [dict(answer=answer) for answer in answers])
    assert list(zip(texts, scores)) == list(zip(texts, right))


def test_any_answer_of_a_list_is_accepted():
    row = dict(answer=["2", "two"])
    assert humanline.exact_reward([""] * 3, ["2", " two", "['2', 'two']"], [row] * 3) == [1, 1, 0]


@pytest.mark.parametrize("answer", [5.0, b"5", {"value": 5}, [5, 5.5], None])
def test_an_answer_that_is_neither_text_nor_integer_is_never_compared(answer):
    reward = humanline.Reward(humanline.Config())
    says = "exact failed on every sample: .*neither a text nor an integer"
    with pytest.raises(humanline.UserError, match=says):
        reward([[]], ["5"], [dict(answer=answer)])


def test_an_evaluation_does_not_overwrite_a_file(tiny, data_files, tmp_path, capsys):
    (tmp_path / "mine.jsonl").write_text("mine")
    flags = ["accuracy", "--model", tiny, "--data", data_files["prompts"], "--out",
             str(tmp_path / "mine.jsonl")]
    assert evaluation.main(flags) == 2
    assert "the file already exists; choose another name" in capsys.readouterr().err
    assert (tmp_path / "mine.jsonl").read_text() == "mine"
