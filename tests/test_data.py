"""Data: from rows on disk to groups to the units of each loss, and the formats of well-known data sets."""

import dataclasses
import json
import os

import datasets
import pytest
import tokenizers
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
    return sum(humanline.prepare_groups(groups, Config(loss=loss)), [])


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
        made.append([(sequence.completion, sequence.advantage > 0) for sequence in unit])
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
    cut_off = dataclasses.replace(GROUP, truncated=[False, False, True, True])
    [trained] = humanline.prepare_groups([cut_off], Config(loss="kto", mask_truncated=True))
    assert [sequence.kto_weight for [sequence] in trained[:2]] == [1.0, 1.0]


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


@pytest.mark.parametrize("answers", [["2024-01-01", "2024-01-02"], ["007", "NA"], ["1", 2]])
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_a_folder_gives_every_value_as_it_is_written_in_its_files(tmp_path, answers, ending):
    rows = [dict(prompt="day?", answer=answer) for answer in answers]
    path = tmp_path / f"train.{ending}"
    if ending == "json":
        path.write_text(json.dumps(rows), encoding="utf-8-sig")  # with a byte-order mark
    else:
        write_jsonl(path, rows)
    assert [row.fields for row in humanline.read_rows(str(tmp_path), Config(), "--data")] == rows


@pytest.mark.parametrize("folder", [True, False])
def test_a_parquet_file_that_was_replaced_by_one_of_the_same_time_is_read_anew(tmp_path, folder):
    path = tmp_path / "train.parquet"
    for answer in "12":
        datasets.Dataset.from_list([dict(prompt="a", answer=answer)]).to_parquet(path)
        os.utime(path, (10**9, 10**9))
        [row] = humanline.read_rows(str(tmp_path if folder else path), Config(), "--data")
        assert row.fields["answer"] == answer


def test_a_folder_of_save_to_disk_gives_a_one_line_error_that_helps(tmp_path):
    datasets.Dataset.from_list(rows_of("pairs", 2)).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="arrow is no .jsonl.*write the data with Dataset.to_parquet"):
        humanline.read_rows(str(tmp_path / "saved"), Config(), "--data")


def test_an_unknown_split_gives_a_one_line_error_that_lists_the_others(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", rows_of("pairs", 2))
    with pytest.raises(UserError, match='Unknown split "test".*train'):
        humanline.read_rows(f"{tmp_path}:test", Config(), "--data")


# Rollouts of other programs.

def test_completions_with_rewards_and_equal_prompts_form_a_group(tmp_path):
    lines = [dict(prompt=f"{i % 2}+1=", response=str(i), score=i / 4) for i in range(4)]
    rows = humanline.read_rows(write_jsonl(tmp_path / "rows.jsonl", lines), Config(), "--data")
    assert [row.completions for row in rows] == [["0", "2"], ["1", "3"]]
    assert [row.rewards for row in rows] == [[0, 0.5], [0.25, 0.75]]


@pytest.mark.parametrize("names", [("tokens", "logps"), ("token_ids", "logprobs"), ("completion_ids", "logps")])
def test_tokens_and_log_probs_have_the_names_of_vllm_and_trl_too(tiny, names, capsys):
    def line(text: str, ids: list[int], **more) -> dict:
        sampled = dict(zip(names, (ids, [-0.5] * len(ids))))
        return dict(prompt="a", completion=text, reward=len(text)) | sampled | more

    _, [group] = encoded(tiny, [line("b", [74, 3])])
    assert (group.completions, group.logps) == ([[74, 3]], [[-0.5, -0.5]])
    assert "warning" not in capsys.readouterr().err
    row = line("b", [74])  # of a program that leaves the stop token out
    _, groups = encoded(tiny, [row, row | dict(finish_reason="length"), row | dict(truncated=True)])
    assert "the tokens of 1 rows end without '<eos>' and count as cut off" in capsys.readouterr().err
    assert all(group.truncated == [True] for group in groups)


def test_a_text_that_was_cut_off_teaches_no_end(tiny):
    rows = [dict(prompt="a", completion="b c", reward=1) | more
            for more in ({}, dict(finish_reason="length"), dict(truncated=True), dict(finish_reason="stop"))]
    tokenizer, groups = encoded(tiny, rows)
    texts = [tokenizer.decode(ids) for group in groups for ids in group.completions]
    assert texts == ["b c<eos>", "b c", "b c", "b c<eos>"]


@pytest.mark.parametrize("column", [dict(truncated=[True, False]), dict(finish_reason=["length", "stop"])])
def test_of_a_group_each_completion_may_be_cut_off(tiny, column):
    row = dict(prompt="a", completions=["b c", "b"], scores=[1, 0]) | column
    tokenizer, [group] = encoded(tiny, [row])
    assert [tokenizer.decode(ids) for ids in group.completions] == ["b c", "b<eos>"]
    assert group.truncated == [True, False]
    with pytest.raises(UserError, match="row 1: 'truncated' or 'finish_reason' is a list of another length"):
        encoded(tiny, [row | dict(completions=["b", "c", "d"], scores=[1, 0, 0])])


def test_tokens_without_log_probs_are_used(tiny):
    _, [group] = encoded(tiny, [dict(prompt="a", completion="b", reward=1, tokens=[74, 3])])
    assert (group.completions, group.logps) == ([[74, 3]], [])


@pytest.mark.parametrize("row", [
    dict(completion="b", reward=1, tokens=[74, 3], logps=[-float("inf"), 0]),
    dict(completion="b", reward=1, tokens=[74, 3], logps=[None, 0]),
    dict(completion="b", reward=1, tokens=[74, 3], logps=[float("nan"), 0]),
    dict(completion="b", reward=1, tokens=[[74, 3]], logps=[[-1, -1]]),
    dict(completions=["b", "c"], scores=[1, 0], tokens=[[74, 3], [75, 3]]),
])
def test_bad_tokens_or_log_probs_give_a_one_line_error(row):
    with pytest.raises(UserError, match="row 1: 'tokens' and 'logps' must be token ids and as many log-probs"):
        read(dict(row, prompt="a"))


def test_a_system_message_or_template_that_rollouts_do_not_get_is_reported(tmp_path, capsys):
    line = dict(prompt="a", completion="b", reward=1, tokens=[74, 3], logps=[-1, -1])
    path = write_jsonl(tmp_path / "rollouts.jsonl", [line])
    for settings in (dict(system="Be brief."), dict(prompt_template="{prompt}!")):
        humanline.read_rows(path, Config(**settings), "--data")
        assert "--system and --prompt-template are not applied to the complete" in capsys.readouterr().err
    humanline.read_rows(path, Config(), "--data")
    assert not capsys.readouterr().err


# Formats that were misread.

def test_a_single_message_may_stand_for_a_list():
    row = read(dict(prompt=[SKY], chosen=BLUE, rejected=GREEN))
    assert (row.prompt, row.completions) == ([SKY], ["Blue.", "Green."])
    with pytest.raises(KeyError, match="content"):  # reported as: no 'content'
        read(dict(prompt=[SKY], chosen={"from": "gpt", "value": "Blue."}, rejected=GREEN))


def test_a_pair_of_halos_whose_label_is_minus_one_prefers_the_second():
    row = read(dict(prompt=[SKY], output_A=[BLUE], output_B=[GREEN], label=-1))
    assert row.rewards == [0.0, 1.0]


def test_half_of_a_surrogate_pair_gives_a_one_line_error_that_names_the_row(tmp_path):
    rows = [dict(prompt="a", chosen="b", rejected="c"), dict(prompt="a", chosen="b \ud83d", rejected="c")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match="rows.jsonl row 2 cannot be read: .*surrogates"):
        humanline.read_rows(path, Config(), "--data")


@pytest.mark.parametrize("columns", [
    dict(response_1="1", response_2="2", preference_strength=-2),  # HelpSteer2
    dict(response_0="1", response_1="2", better_response_id=0),  # PKU-SafeRLHF
])
def test_rows_without_completions_are_not_said_to_be_too_long(tiny, columns):
    with pytest.raises(UserError, match="no completions with rewards or labels among its columns prompt, resp"):
        encoded(tiny, [dict(prompt="0+1=") | columns], max_new_tokens=512)


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


def test_special_tokens_in_texts_are_counted_and_named_and_an_answer_stays_whole(tiny, capsys):
    chosen = "The token <eos> ends it, and so on"
    rows = [dict(prompt="a", chosen="b", rejected="c"),
            dict(prompt="<|user|>how?", chosen=chosen, rejected="<eos> b <eos> ")]
    tokenizer, [_, group] = encoded(tiny, rows)
    assert [tokenizer.decode(ids) for ids in group.completions] == [chosen + "<eos>", "<eos> b <eos>"]
    says = "contain 3 special tokens of the tokenizer, which are read as such, the first one '<|user|>' in "
    assert says in capsys.readouterr().err
    _, [group] = encoded(tiny, [dict(prompt="a", chosen="b<eos>", rejected="c<eos><eos>\n")])  # their end
    assert [tokenizer.decode(ids) for ids in group.completions] == ["b<eos>", "c<eos>"]
    assert "warning" not in capsys.readouterr().err


def test_texts_of_completions_keep_special_tokens_other_than_stop_bos_and_padding(tiny):
    sampler = sampler_of(tiny)
    ids = sampler.tokenizer("<bos><|system|>a<pad><eos>", add_special_tokens=False)["input_ids"]
    assert sampler.texts([ids, ids[:-1]]) == ["<|system|>a"] * 2


@pytest.mark.parametrize("ending, stop", [
    ("<turn>", "<turn>"),  # Llama 3, if its EOS is <|end_of_text|>
    ("<response><turn>", "<turn>"),  # Cohere 2
])
def test_a_turn_may_end_with_tokens_that_are_special_in_the_tokenizers_file_alone(tiny, ending, stop, capsys):
    sampler = sampler_of(tiny)
    policy, tokenizer = sampler.policy, sampler.tokenizer
    for token in ("<response>", "<turn>"):
        tokenizer.add_tokens([tokenizers.AddedToken(token, special=True)])
    assert tokenizer.convert_tokens_to_ids("<turn>") not in tokenizer.all_special_ids
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ eos_token }}", ending + "\n")
    assert humanline.find_stop_ids(policy, tokenizer) == [tokenizer.convert_tokens_to_ids(stop), 3]
    policy.resize_token_embeddings(len(tokenizer))
    sampler = humanline.Sampler(policy, tokenizer, sampler.config)
    [group] = humanline.encode_rows([read(dict(prompt="a", chosen="b", rejected="c"))], sampler, online=False)
    assert [tokenizer.decode(ids) for ids in group.completions] == ["b" + ending, "c" + ending]


# What can have no gradient.

def test_pairs_and_groups_that_have_no_gradient_are_dropped_with_a_count(tiny, capsys):
    rows = [dict(prompt="a", chosen="b", rejected="c"), dict(prompt="a", chosen="b", rejected="b"),
            dict(prompt="b", completions=["c", "d"], scores=[1, 1]), dict(prompt="b", completion="c", reward=1)]
    _, groups = encoded(tiny, rows)
    for loss in ("dpo", "kto", "grpo"):
        batches = Batches(Config(loss=loss, batch_size=1), groups, 64)
        if loss != "grpo":  # which has them as zeros in the mean
            assert {id(group) for group, _ in batches.pool} == {id(groups[0])}
        assert "3 of 4 prompts have no better and worse completion, and so no " in capsys.readouterr().err
        with pytest.raises(UserError, match="no row has both a better and a worse completion"):
            Batches(Config(loss=loss, batch_size=1), groups[1:], 64)


@pytest.mark.parametrize("prompts, batch_size, says", [
    ([1, 2, 3], 1, True), ([1, 1, 1], 2, True), ([1, 2, 1], 2, False)])
def test_a_reference_point_of_kto_that_is_always_0_is_reported(prompts, batch_size, says, capsys):
    groups = [Group(i, [prompt], [[i]], [i % 2], labelled=True) for i, prompt in enumerate(prompts)]
    Batches(Config(loss="kto", batch_size=batch_size), groups, 64)
    assert ("z₀ is 0 in every step" in capsys.readouterr().err) == says


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
