"""Data: from rows on disk to groups to the units of each loss, and the formats of well-known data sets."""

import json

import datasets
import pytest
import torch
from conftest import rows_of, write_jsonl

import humanline
from humanline import LOSSES, Batches, Config, Group, UserError

USER = lambda text: {"role": "user", "content": text}
ASSISTANT = lambda text: {"role": "assistant", "content": text}


def read(row: dict, **settings):
    return humanline.read_row(row, "data.jsonl row 1", Config(**settings))


def sampler_of(tiny, **settings):
    config = Config(model=tiny, **settings)
    return humanline.Sampler(*humanline.load_policy(config, torch.device("cpu")), config)


def units(loss, *groups):
    humanline.make_units(groups, Config(loss=loss))
    return [unit for group in groups for unit in group.units]


GROUP = Group(0, [1, 2], [[10], [11], [12], [13]], [0.0, 3.0, 1.0, 0.0])
TIED = Group(0, [1, 2], [[10], [11]], [1.0, 1.0])
LABEL = Group(0, [1, 2], [[10]], [1.0], labelled=True)
UNWANTED = Group(0, [1, 2], [[10]], [0.0], labelled=True)


@pytest.mark.parametrize("loss, group, expected", [
    ("dpo", GROUP, [[([11], True), ([10], False)]]),  # the best and the worst
    ("dpo", TIED, []),
    ("kto", TIED, []),
    ("kto", GROUP, [[([10], False)], [([11], True)], [([12], False)], [([13], False)]]),  # above the mean or not
    ("kto", LABEL, [[([10], True)]]),
    ("kto", UNWANTED, [[([10], False)]]),
])
def test_each_loss_makes_its_own_units_of_a_group(loss, group, expected):
    made = [[(sequence.completion, sequence.is_chosen) for sequence in unit] for unit in units(loss, group)]
    assert made == expected


def test_kto_gives_desirable_and_undesirable_examples_the_same_total_weight_by_default():
    def weights(*groups, **settings):
        sequences = [sequence for unit in units("kto", *groups) for sequence in unit]
        LOSSES["kto"].set_weights(sequences, Config(loss="kto", **settings))
        return [sequence.kto_weight for sequence in sequences]

    assert weights(GROUP) == [1.0, 3.0, 1.0, 1.0]
    assert weights(GROUP, desirable_weight=1.1, undesirable_weight=0.5) == [0.5, 1.1, 0.5, 0.5]
    assert weights(GROUP, undesirable_weight=0.5) == [0.5, 1.5, 0.5, 0.5]
    assert weights(LABEL) == [1.0]


@pytest.mark.parametrize("ending", ["JSONL", "json", "csv", "parquet"])
def test_every_file_format_gives_the_same_rows(tmp_path, ending):
    rows, path = rows_of("pairs", 5), tmp_path / f"rows.{ending}"
    table = datasets.Dataset.from_list(rows)
    if ending == "json":
        path.write_text(json.dumps(rows))
    else:
        write = dict(JSONL=table.to_json, csv=table.to_csv, parquet=table.to_parquet)
        write[ending](path)
    read = humanline.read_rows(str(path), Config(), "--data")
    assert [(row.prompt, row.completions, row.rewards) for row in read] == \
        [([USER(row["prompt"])], [row["chosen"], row["rejected"]], [1.0, 0.0]) for row in rows]
    assert read[2].where == f"--data {path} row 3"


def test_a_folder_with_a_split_is_read_like_a_hub_name(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", rows_of("pairs", 5))
    write_jsonl(tmp_path / "test.jsonl", rows_of("pairs", 3))
    for spec, count in ((tmp_path, 5), (f"{tmp_path}:test", 3)):
        assert len(humanline.read_rows(str(spec), Config(), "--data")) == count


# Rows of exactly the published schemas: as `read_row` sees them, and through a file as the hub holds it.

SCORED = ["one", "two", "three"]
PUBLISHED = {  # name: (row, prompt, completions, rewards)
    "GSM8K": ({"question": "How many?", "answer": "He has 2+2=<<2+2=4>>4.\n#### 4"}, [USER("How many?")], [], []),
    "MATH500": ({"problem": "Find $x$.", "solution": "So $\\boxed{2}$.", "answer": "2", "subject": "Algebra",
                 "level": 1, "unique_id": "test/a/1.json"}, [USER("Find $x$.")], [], []),
    "UltraFeedback-ArmoRM": (
        {"prompt_id": "0af1", "prompt": "Hi", "all_generated_responses": SCORED, "all_rm_scores": [0.1, 0.3, 0.2],
         "chosen": [USER("Hi"), ASSISTANT("two")], "rejected": [USER("Hi"), ASSISTANT("one")]},
        [USER("Hi")], SCORED, [0.1, 0.3, 0.2]),
    "HH-RLHF": ({"chosen": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Old?\n\nAssistant: Quite.",
                 "rejected": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Old?\n\nAssistant: No."},
                [USER("Hi"), ASSISTANT("Hello!"), USER("Old?")], ["Quite.", "No."], [1.0, 0.0]),
    "TRL DPO conversational": (
        {"prompt": [USER("Sky?")], "chosen": [ASSISTANT("Blue.")], "rejected": [ASSISTANT("Green.")]},
        [USER("Sky?")], ["Blue.", "Green."], [1.0, 0.0]),
    "TRL DPO conversational, implicit": (
        {"chosen": [USER("Sky?"), ASSISTANT("Blue.")], "rejected": [USER("Sky?"), ASSISTANT("Green.")]},
        [USER("Sky?")], ["Blue.", "Green."], [1.0, 0.0]),
    "TRL KTO conversational": (
        {"prompt": [USER("Sky?")], "completion": [ASSISTANT("Green.")], "label": False},
        [USER("Sky?")], ["Green."], [0.0]),
    "orca_dpo_pairs": ({"system": "Be brief.", "question": "Hi", "chosen": "Hello.", "rejected": "Well, hello."},
                       [{"role": "system", "content": "Be brief."}, USER("Hi")], ["Hello.", "Well, hello."], [1.0, 0.0]),
    "TRL GRPO conversational": ({"prompt": [USER("Sky?")], "solution": "blue"}, [USER("Sky?")], [], []),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_of_published_data_sets_are_read_unchanged(tmp_path, name):
    fields, prompt, completions, rewards = PUBLISHED[name]
    datasets.Dataset.from_list([fields]).to_parquet(tmp_path / "rows.parquet")
    [as_on_the_hub] = humanline.read_rows(f"{tmp_path}/rows.parquet", Config(), "--data")
    for row in (read(fields), as_on_the_hub):
        assert (row.prompt, row.completions, row.rewards, row.fields) == (prompt, completions, rewards, fields)
        assert row.labelled == ("KTO" in name)


def test_hh_rlhf_rows_that_differ_before_the_last_turn_or_end_without_an_answer_are_dropped_and_counted(
        tmp_path, capsys):
    start = "\n\nHuman: Hi there\n\nAssistant: Hello!\n\nHuman: How old\nare you?\n\nAssistant:"
    good = {"chosen": start + " Quite old.", "rejected": start + " No."}
    bad = [
        dict(good, rejected=good["rejected"].replace("Hello!", "Hey!")),
        dict(good, rejected=start),
        dict(good, chosen=start + " Old.\n\nHuman: So?"),
    ]
    [row] = humanline.read_rows(write_jsonl(tmp_path / "hh.jsonl", [good, *bad]), Config(), "--data")
    assert row.prompt[-1] == USER("How old\nare you?")
    assert "dropped 3 rows whose dialogues differ before" in capsys.readouterr().err


def test_a_text_is_a_transcript_only_if_it_begins_with_a_turn():
    text = "It is 4.\n\nHuman: And 3+3?\n\nAssistant: 6."  # what a base model writes on its own
    for tail in ("", "\n\nHuman: So?"):
        row = read({"prompt": "2+2?", "completion": text + tail, "label": False})
        assert row.completions == [text + tail] and row.prompt == [USER("2+2?")]
    assert read({"prompt": "\n\nHuman: 2+2?\n\nAssistant:", "chosen": "4", "rejected": text}).completions == ["4", text]


@pytest.mark.parametrize("prompt, turns", [
    ([dict(role="system", content="Be kind."), USER("Hi")], [USER("Hi")]),
    ([USER("a"), ASSISTANT("b"), USER("Hi")], [USER("Hi")])])
def test_no_turn_of_a_prompt_is_lost_if_the_answers_are_dialogues(prompt, turns):
    row = lambda start: dict(prompt=prompt, chosen=[*start, ASSISTANT("yes")], rejected=[*start, ASSISTANT("no")])
    assert read(row(prompt)).prompt == prompt
    assert read(dict(row(prompt), prompt="Hi")).prompt == prompt
    with pytest.raises(UserError, match="'prompt' is not among the turns before the answers"):
        read(row(turns))


def test_a_part_of_a_message_that_would_be_lost_is_refused():
    call = dict(role="assistant", content="", tool_calls=[dict(function=dict(name="add"))])
    with pytest.raises(UserError, match=r"row 1: a message has \['tool_calls'\], which are not read; move them into"):
        read(dict(prompt=[USER("2+2?"), call, dict(role="tool", content="4")], chosen="4", rejected="5"))
    with pytest.raises(UserError, match=r"a message has \['reasoning_content'\]"):
        read(dict(prompt="2+2?", chosen=[ASSISTANT("4") | dict(reasoning_content="two twos")], rejected="5"))
    assert read(dict(prompt=[USER("2+2?") | dict(tool_calls=None)], chosen="4", rejected="5")).prompt == [USER("2+2?")]


def test_feedback_files_of_halos_are_read(tmp_path):
    common = dict(prompt=[USER("Hi")], split="train")
    binary = read(dict(common, prompt_id=0, output=[ASSISTANT("Yes")], label=1, reward=0.7, type="binary_feedback"))
    assert binary.labelled and binary.rewards == [1.0] and binary.completions == ["Yes"]
    for label, is_a in ((1, 1), (0, 0), ("1", 1), ("0", 0), (True, 1), ("False", 0)):
        pair = read(dict(
            common, prompt_id=0, output_A=[ASSISTANT("A")], output_B=[ASSISTANT("B")], label=label,
            reward_A=1.0, reward_B=0.2, reward_difference=0.8, type="pairwise_feedback"))
        assert (pair.completions, pair.rewards, pair.labelled) == (["A", "B"], [is_a, 1 - is_a], False)
    scalar = [
        dict(common, prompt_id=i // 3, output=[ASSISTANT(f"say {i}")], reward=i / 10, type="scalar_feedback")
        for i in range(6)]
    scalar[2]["prompt"] = [USER("Bye")]  # two runs may share an id
    rows = humanline.read_rows(write_jsonl(tmp_path / "scalar.jsonl", scalar), Config(), "--data")
    assert [row.completions for row in rows] == [["say 0", "say 1"], ["say 2"], ["say 3", "say 4", "say 5"]]
    assert rows[2].rewards == [0.3, 0.4, 0.5]


def test_system_message_and_prompt_template_surround_the_prompt():
    row = read({"prompt": "1+1?"}, system="Be brief.", prompt_template="{prompt}\nPut the answer in \\boxed{}.")
    assert row.prompt == [{"role": "system", "content": "Be brief."}, USER("1+1?\nPut the answer in \\boxed{}.")]
    row = read({"prompt": [{"role": "system", "content": "Mine."}, USER("1+1?")]}, system="Be brief.")
    assert row.prompt[0]["content"] == "Mine." and len(row.prompt) == 2
    assert read({"system": "Mine.", "prompt": "1+1?"}, system="Be brief.").prompt[0]["content"] == "Mine."
    assert read({"system": "", "prompt": "1+1?"}).prompt == [USER("1+1?")]
    rollout = dict(prompt="1+1? Box it.", completion="2", reward=1, tokens=[5, 3], logps=[-1.0, -1.0])
    assert read(rollout, prompt_template="{prompt} Box it.").prompt == [USER("1+1? Box it.")]  # it has been filled in
    row = read({"prompt": "1+1?", "topic": "a {prompt}"}, prompt_template="On {topic}: {prompt} \\frac{1}{2}")
    assert row.prompt == [USER("On a {prompt}: 1+1? \\frac{1}{2}")]


# Encoding.

def encoded(tiny, rows, **settings):
    sampler = sampler_of(tiny, **settings)
    return sampler.tokenizer, humanline.encode_rows([read(row) for row in rows], sampler)


def test_completions_end_in_one_eos_and_prompts_begin_with_one_bos(tiny):
    tokenizer, (group,) = encoded(tiny, [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
    assert tokenizer.decode(group.prompt) == "<bos><|user|>1+1=<|assistant|>"
    assert [tokenizer.decode(ids) for ids in group.completions] == ["2<eos>", "3<eos>"]


@pytest.mark.parametrize("settings, kept", [
    ({}, [0, 1]), (dict(max_prompt_length=20), [0]), (dict(max_length=20), [0])])
def test_over_long_rows_are_dropped_and_counted_in_one_warning(tiny, capsys, settings, kept):
    lengths = (5, 1), (40, 1), (80, 1), (5, 80)
    rows = [dict(prompt="p" * prompt, chosen="a" * chosen, rejected="b") for prompt, chosen in lengths]
    _, groups = encoded(tiny, rows, **settings)
    assert [group.row for group in groups] == kept
    assert f"--data: dropped {4 - len(kept)} rows that are too long: a prompt may have" in capsys.readouterr().err


def test_online_prompts_without_room_for_a_completion_are_dropped(tiny):
    sampler = sampler_of(tiny, max_length=24, max_new_tokens=12)
    rows = [read({"prompt": "p" * length, "answer": "a"}) for length in (5, 20)]
    assert [group.row for group in humanline.encode_rows(rows, sampler, online=True)] == [0]


# The order of batches.

def test_every_epoch_sees_every_unit_once_in_a_new_order():
    groups = [Group(i, [i], [[1], [2]], [1.0, 0.0]) for i in range(12)]

    def rows_in_order(seed: int) -> list[int]:
        batches = Batches(Config(loss="dpo", batch_size=4, steps=6, seed=seed), groups, 64)
        batches.make(6)
        assert [batch.step for batch in batches.pending] == list(range(1, 7))
        return [sequence.prompt[0] for batch in batches.pending for sequence in batch.sequences[::2]]

    rows = rows_in_order(seed=0)
    assert sorted(rows[:12]) == sorted(rows[12:]) == list(range(12)) and rows[:12] != rows[12:] != list(range(12))
    assert rows_in_order(seed=1) != rows


def test_a_mismatched_completion_is_cut_if_it_does_not_fit_after_a_long_prompt():
    groups = [Group(i, [i] * length, [[9] * 5], [i % 2], labelled=True) for i, length in enumerate((1, 4, 6))]
    batches = Batches(Config(loss="kto", batch_size=3, steps=1), groups, 8)
    lengths = {len(sequence.prompt): len(sequence.completion) for sequence in batches.next(1).mismatched}
    assert lengths == {1: 5, 4: 4, 6: 2}


def test_online_a_completion_without_a_label_is_only_a_prompt():
    row = read(dict(prompt="a", output="b", label=None), sample_every=1)
    assert (row.prompt, row.completions, row.fields["output"]) == ([USER("a")], [], "b")
