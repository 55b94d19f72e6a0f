"""Data: from rows on disk to groups to the units of each loss, and the formats of well-known data sets."""

import json

import datasets
import pytest
import torch
from conftest import rows_of, write_jsonl

import humanline
from humanline import LOSSES, Batches, Config, Group, UserError

def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def user(content: str) -> dict:
    return message("user", content)


def assistant(content: str) -> dict:
    return message("assistant", content)


def read(row: dict, **settings):
    return humanline.read_row(row, "data.jsonl row 1", Config(**settings))


def sampler_of(tiny, **settings):
    config = Config(model=tiny, **settings)
    return humanline.Sampler(*humanline.load_policy(config, torch.device("cpu")), config)


def units(loss, *groups):
    humanline.prepare_groups(groups, Config(loss=loss))
    return sum([group.units for group in groups], [])


GROUP = Group(0, [1, 2], [[10], [11], [12], [13]], [0.0, 3.0, 1.0, 0.0])
TIED = Group(0, [1, 2], [[10], [11]], [1.0, 1.0])
LABEL = Group(0, [1, 2], [[10]], [1.0], labelled=True)
UNWANTED = Group(0, [1, 2], [[10]], [0.0], labelled=True)


@pytest.mark.parametrize("loss, group, expected", [
    ("dpo", GROUP, [[([11], True), ([10], False)]]),  # the best and the worst
    ("dpo", TIED, []),
    ("kto", TIED, []),
    # above the mean or not
    ("kto", GROUP, [[([10], False)], [([11], True)], [([12], False)], [([13], False)]]),
    ("kto", LABEL, [[([10], True)]]),
    ("kto", UNWANTED, [[([10], False)]]),
])
def test_each_loss_makes_its_own_units_of_a_group(loss, group, expected):
    made = []
    for unit in units(loss, group):
        made.append([(sequence.completion, sequence.is_chosen) for sequence in unit])
    assert made == expected


def test_kto_gives_desirable_and_undesirable_examples_the_same_total_weight_by_default():
    def weights(group, **settings):
        sequences = [sequence for [sequence] in units("kto", group)]
        config = Config(loss="kto", **settings)
        LOSSES["kto"].set_weights(sequences, config)
        return [sequence.kto_weight for sequence in sequences]

    assert weights(GROUP) == [1.0, 3.0, 1.0, 1.0]
    assert weights(GROUP, undesirable_weight=0.5) == [0.5, 1.5, 0.5, 0.5]
    both = weights(GROUP, desirable_weight=1.1, undesirable_weight=0.5)
    assert both == [0.5, 1.1, 0.5, 0.5]
    assert weights(LABEL) == [1.0]


@pytest.mark.parametrize("ending", ["JSONL", "json", "parquet"])
def test_every_file_format_gives_the_same_rows(tmp_path, ending):
    pairs = rows_of("pairs", 5)
    path = tmp_path / f"rows.{ending}"
    table = datasets.Dataset.from_list(pairs)
    if ending == "json":
        path.write_text(json.dumps(pairs))
    else:
        write = dict(JSONL=table.to_json, parquet=table.to_parquet)
        write[ending](path)
    rows = humanline.read_rows(str(path), Config(), "--data")
    for row, pair in zip(rows, pairs, strict=True):
        assert row.prompt == [user(pair["prompt"])]
        assert row.completions == [pair["chosen"], pair["rejected"]]
        assert row.rewards == [1.0, 0.0]
    assert rows[2].where == f"--data {path} row 3"


def test_a_folder_with_a_split_is_read_like_a_hub_name(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", rows_of("pairs", 5))
    write_jsonl(tmp_path / "test.jsonl", rows_of("pairs", 3))
    train = humanline.read_rows(str(tmp_path), Config(), "--data")
    test = humanline.read_rows(f"{tmp_path}:test", Config(), "--data")
    part = humanline.read_rows(f"{tmp_path}:train[1:3]", Config(), "--data")
    assert (len(train), len(test), len(part)) == (5, 3, 2)
    assert [row.prompt for row in part] == [row.prompt for row in train[1:3]]


# Rows of exactly the published schemas: as `read_row` gets them, and from a file as on the hub.

HI = user("Hi")
SKY = user("Sky?")
BLUE = assistant("Blue.")
GREEN = assistant("Green.")
START = "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Old?\n\nAssistant:"
PUBLISHED = {  # name: (row, prompt, completions, rewards)
    "GSM8K": (
        {"question": "How many?", "answer": "He has 2+2=<<2+2=4>>4.\n#### 4"},
        [user("How many?")], [], []),
    "MATH500": (
        {"problem": "Find $x$.", "solution": "So $\\boxed{2}$.", "answer": "2",
         "subject": "Algebra", "level": 1, "unique_id": "test/a/1.json"},
        [user("Find $x$.")], [], []),
    "UltraFeedback-ArmoRM": (
        {"prompt_id": "0af1", "prompt": "Hi",
         "all_generated_responses": ["one", "two", "three"],
         "all_rm_scores": [0.1, 0.3, 0.2],
         "chosen": [HI, assistant("two")],
         "rejected": [HI, assistant("one")]},
        [HI], ["one", "two", "three"], [0.1, 0.3, 0.2]),
    "HH-RLHF": (
        {"chosen": f"{START} Quite.", "rejected": f"{START} No."},
        [HI, assistant("Hello!"), user("Old?")],
        ["Quite.", "No."], [1.0, 0.0]),
    "HH-RLHF with its prompt": (
        {"prompt": START, "chosen": " Quite.", "rejected": " No.", "source": None},
        [HI, assistant("Hello!"), user("Old?")],
        [" Quite.", " No."], [1.0, 0.0]),
    "TRL DPO conversational": (
        {"prompt": [SKY], "chosen": [BLUE], "rejected": [GREEN]},
        [SKY], ["Blue.", "Green."], [1.0, 0.0]),
    "TRL DPO conversational, implicit": (
        {"chosen": [SKY, BLUE], "rejected": [SKY, GREEN]},
        [SKY], ["Blue.", "Green."], [1.0, 0.0]),
    "TRL KTO conversational": (
        {"prompt": [SKY], "completion": [GREEN], "label": False},
        [SKY], ["Green."], [0.0]),
    "orca_dpo_pairs": (
        {"system": "Be brief.", "question": "Hi",
         "chosen": "Hello.", "rejected": "Well, hello."},
        [message("system", "Be brief."), HI],
        ["Hello.", "Well, hello."], [1.0, 0.0]),
    "TRL GRPO conversational": (
        {"prompt": [SKY], "solution": "blue"},
        [SKY], [], []),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_of_published_data_sets_are_read_unchanged(tmp_path, name):
    fields, prompt, completions, rewards = PUBLISHED[name]
    datasets.Dataset.from_list([fields]).to_parquet(tmp_path / "rows.parquet")
    [from_file] = humanline.read_rows(f"{tmp_path}/rows.parquet", Config(), "--data")
    for row in (read(fields), from_file):
        assert row.prompt == prompt
        assert row.completions == completions
        assert row.rewards == rewards
        assert row.fields == fields
        assert row.labelled == ("KTO" in name)


def test_hh_rlhf_rows_that_differ_before_the_last_turn_or_end_without_an_answer_are_dropped_and_counted(
        tmp_path, capsys):
    start = "\n\nHuman: Hi there\n\nAssistant: Hello!\n\nHuman: How old\nare you?\n\nAssistant:"
    rejected = f"{start} No."
    good = {"chosen": f"{start} Quite old.", "rejected": rejected}
    rows = [
        good,
        dict(good, rejected=rejected.replace("Hello!", "Hey!")),
        dict(good, rejected=start),
        dict(good, chosen=f"{start} Old.\n\nHuman: So?"),
    ]
    hello = [user("Hi there"), assistant("Hello!")]
    rows.append(dict(chosen=hello, rejected=[user("Hi there"), assistant(" ")]))
    path = write_jsonl(tmp_path / "hh.jsonl", rows)
    [row] = humanline.read_rows(path, Config(), "--data")
    assert row.prompt[-1] == user("How old\nare you?")
    assert "dropped 4 rows whose dialogues differ before" in capsys.readouterr().err


def test_a_text_is_a_transcript_only_if_it_begins_with_a_turn():
    text = "It is 4.\n\nHuman: And 3+3?\n\nAssistant: 6."  # what a base model writes on its own
    for completion in (text, text + "\n\nHuman: So?"):
        row = read({"prompt": "2+2?", "completion": completion, "label": False})
        assert row.prompt == [user("2+2?")]
        assert row.completions == [completion]
    prompt = "\n\nHuman: 2+2?\n\nAssistant:"
    row = read({"prompt": prompt, "chosen": "4", "rejected": text})
    assert row.completions == ["4", text]


@pytest.mark.parametrize("prompt, turns", [
    ([message("system", "Be kind."), HI], [HI]),
    ([user("a"), assistant("b"), HI], [HI]),
])
def test_no_turn_of_a_prompt_is_lost_if_the_answers_are_dialogues(prompt, turns):
    def answers(start: list[dict]) -> dict:
        return dict(chosen=[*start, BLUE], rejected=[*start, GREEN])

    assert read(dict(answers(prompt), prompt=prompt)).prompt == prompt
    assert read(dict(answers(prompt), prompt="Hi")).prompt == prompt
    with pytest.raises(UserError, match="'prompt' is not among the turns before the answers"):
        read(dict(answers(turns), prompt=prompt))


def test_a_part_of_a_message_that_would_be_lost_is_refused():
    question = user("2+2?")
    call = assistant("") | dict(tool_calls=[dict(function=dict(name="add"))])
    dialogue = [question, call, message("tool", "4")]
    says = r"row 1: a message has \['tool_calls'\], which are not read; move them into"
    with pytest.raises(UserError, match=says):
        read(dict(prompt=dialogue, chosen="4", rejected="5"))

    thought = assistant("4") | dict(reasoning_content="two twos")
    with pytest.raises(UserError, match=r"a message has \['reasoning_content'\]"):
        read(dict(prompt="2+2?", chosen=[thought], rejected="5"))

    nothing = question | dict(tool_calls=None)
    row = read(dict(prompt=[nothing], chosen="4", rejected="5", tools=[]))
    assert row.prompt == [question]

    with pytest.raises(UserError, match="row 1: 'tools' are not read; remove the column"):
        read(dict(prompt="2+2?", tools=[dict(name="add")]))
    with pytest.raises(UserError, match="row 1: the prompt ends with an answer, which is not continued"):
        read(dict(prompt=[question, assistant("It is")]))


def test_feedback_files_of_halos_are_read(tmp_path):
    common = dict(prompt=[HI], split="train", prompt_id=0)
    binary = dict(
        common, output=[BLUE], label=1, reward=0.7, type="binary_feedback")
    row = read(binary)
    assert row.labelled
    assert row.rewards == [1.0]
    assert row.completions == ["Blue."]

    pair = dict(
        common, output_A=[BLUE], output_B=[GREEN], reward_A=1.0, reward_B=0.2,
        reward_difference=0.8, type="pairwise_feedback")
    for label, is_a in ((1, 1), (0, 0), (True, 1), (False, 0)):
        row = read(dict(pair, label=label))
        assert row.completions == ["Blue.", "Green."]
        assert row.rewards == [is_a, 1 - is_a]
        assert not row.labelled

    scalar = []
    for i in range(6):
        output = [assistant(f"say {i}")]
        scalar.append(dict(
            common, prompt_id=i // 3, output=output, reward=i / 10, type="scalar_feedback"))
    scalar[2]["prompt"] = [user("Bye")]  # two runs may share an id
    path = write_jsonl(tmp_path / "scalar.jsonl", scalar)
    rows = humanline.read_rows(path, Config(), "--data")
    completions = [row.completions for row in rows]
    assert completions == [["say 0", "say 1"], ["say 2"], ["say 3", "say 4", "say 5"]]
    assert rows[2].rewards == [0.3, 0.4, 0.5]


def test_system_message_and_prompt_template_surround_the_prompt():
    question = user("1+1?")
    template = "{prompt}\nPut the answer in \\boxed{}."
    row = read({"prompt": "1+1?"}, system="Be brief.", prompt_template=template)
    filled = user("1+1?\nPut the answer in \\boxed{}.")
    assert row.prompt == [message("system", "Be brief."), filled]

    mine = message("system", "Mine.")
    row = read({"prompt": [mine, question]}, system="Be brief.")
    assert row.prompt == [mine, question]
    row = read({"system": "Mine.", "prompt": "1+1?"}, system="Be brief.")
    assert row.prompt == [mine, question]
    assert read({"system": "", "prompt": "1+1?"}).prompt == [question]

    # The prompt of a rollout is complete.
    rollout = dict(
        prompt="1+1? Box it.", completion="2", reward=1, tokens=[5, 3], logps=[-1.0, -1.0])
    row = read(rollout, system="Be brief.", prompt_template="{prompt} Box it.")
    assert row.prompt == [user("1+1? Box it.")]

    template = "On {topic}: {prompt} \\frac{1}{2}"
    row = read({"prompt": "1+1?", "topic": "a {prompt}"}, prompt_template=template)
    assert row.prompt == [user("On a {prompt}: 1+1? \\frac{1}{2}")]


# Encoding.

def encoded(tiny, rows, **settings):
    sampler = sampler_of(tiny, **settings)
    rows = [read(row) for row in rows]
    return sampler.tokenizer, humanline.encode_rows(rows, sampler, online=False)


def test_completions_end_in_one_eos_and_prompts_begin_with_one_bos(tiny):
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    tokenizer, [group] = encoded(tiny, [pair])
    assert tokenizer.decode(group.prompt) == "<bos><|user|>1+1=<|assistant|>"
    completions = [tokenizer.decode(ids) for ids in group.completions]
    assert completions == ["2<eos>", "3<eos>"]


@pytest.mark.parametrize("settings, kept", [
    ({}, [0, 1]),
    (dict(max_prompt_length=20), [0]),
    (dict(max_length=20), [0]),
])
def test_over_long_rows_are_dropped_and_counted_in_one_warning(tiny, capsys, settings, kept):
    rows = []
    for prompt, chosen in (5, 1), (40, 1), (80, 1), (5, 80):
        rows.append(dict(prompt="p" * prompt, chosen="a" * chosen, rejected="b"))
    _, groups = encoded(tiny, rows, **settings)
    assert [group.row for group in groups] == kept
    dropped = 4 - len(kept)
    warning = f"--data: dropped {dropped} rows that are too long: a prompt may have"
    assert warning in capsys.readouterr().err


def test_online_prompts_without_room_for_a_completion_are_dropped(tiny):
    sampler = sampler_of(tiny, max_length=24, max_new_tokens=12)
    rows = [read({"prompt": "p" * length, "answer": "a"}) for length in (5, 20)]
    groups = humanline.encode_rows(rows, sampler, online=True)
    assert [group.row for group in groups] == [0]


# The order of batches.

def test_every_epoch_sees_every_unit_once_in_a_new_order():
    groups = [Group(i, [i], [[1], [2]], [1.0, 0.0]) for i in range(12)]

    def rows_in_order(seed: int) -> list[int]:
        config = Config(loss="dpo", batch_size=4, steps=6, seed=seed)
        batches = Batches(config, groups, 64)
        batches.make(6)
        assert [batch.step for batch in batches.pending] == list(range(1, 7))
        rows = []
        for batch in batches.pending:
            rows += [sequence.prompt[0] for sequence in batch.sequences[::2]]
        return rows

    rows = rows_in_order(seed=0)
    first, second = rows[:12], rows[12:]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert second != list(range(12))
    assert rows_in_order(seed=1) != rows


def test_a_mismatched_completion_is_cut_if_it_does_not_fit_after_a_long_prompt():
    groups = []
    for i, length in enumerate((1, 4, 6)):
        groups.append(Group(i, [i] * length, [[9] * 5], [i % 2], labelled=True))
    batches = Batches(Config(loss="kto", batch_size=3, steps=1), groups, 8)
    lengths = {len(sequence.prompt): len(sequence.completion) for sequence in batches.next(1).mismatched}
    assert lengths == {1: 5, 4: 4, 6: 2}


def test_online_z0_uses_every_completion_once():
    config = Config(loss="kto", batch_size=12, group_size=4, steps=1, sample_every=1)
    groups = [Group(i, [i], [[10 * i + j] for j in range(4)], [0, 1, 0, 1]) for i in range(3)]
    batches = Batches(config, groups, 99)
    batches.make(1, groups)
    [batch] = batches.pending
    assert sorted(s.completion for s in batch.mismatched) == sorted(s.completion for s in batch.sequences)
    assert all(s.prompt != [s.completion[0] // 10] for s in batch.mismatched)


def test_online_a_completion_without_a_label_is_only_a_prompt():
    row = read(dict(prompt="a", output="b", label=None), sample_every=1)
    assert row.prompt == [user("a")]
    assert row.completions == []
    assert row.fields["output"] == "b"
