"""Rows on disk -> groups -> what each loss trains on; and the published shapes of well-known data sets."""

import csv
import dataclasses
import json

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
    return [unit for group in groups for unit in LOSSES[loss].make_units(group, Config(), 0.5)]


def chosen(loss, group):
    """Each unit's completions, and which of them are chosen."""
    return [[(sequence.completion, sequence.is_chosen) for sequence in unit] for unit in units(loss, group)]


GROUP = Group(0, [1, 2], [[10], [11], [12], [13]], [0.0, 3.0, 1.0, 0.0])
TIED = Group(0, [1, 2], [[10], [11]], [1.0, 1.0])
PAIR = Group(0, [1, 2], [[10], [11]], [1.0, 0.0])
LABEL = Group(0, [1, 2], [[10]], [1.0], labelled=True)
UNWANTED = Group(0, [1, 2], [[10]], [0.0], labelled=True)


def test_dpo_pairs_the_best_with_the_worst_and_makes_no_pair_of_a_tie():
    assert chosen("dpo", GROUP) == [[([11], True), ([10], False)]]
    assert chosen("dpo", PAIR) == [[([10], True), ([11], False)]]
    assert chosen("dpo", TIED) == []


def test_kto_wants_what_lies_above_the_groups_mean():
    assert chosen("kto", GROUP) == [[([10], False)], [([11], True)], [([12], False)], [([13], False)]]
    assert chosen("kto", PAIR) == [[([10], True)], [([11], False)]]
    assert chosen("kto", LABEL) == [[([10], True)]]
    assert chosen("kto", UNWANTED) == [[([10], False)]]


def test_grpo_keeps_the_group_together_with_its_advantages():
    (unit,) = units("grpo", GROUP)
    assert [sequence.completion for sequence in unit] == GROUP.completions
    assert sum(sequence.advantage for sequence in unit) == pytest.approx(0, abs=1e-12)
    assert unit[1].advantage == pytest.approx(2 / (1.5**0.5 + 0.01))
    assert [sequence.is_chosen for sequence in unit] == [False, True, False, False]
    assert not any(sequence.advantage or sequence.is_chosen for sequence in units("grpo", TIED)[0])


def test_kto_weighs_both_kinds_the_same_unless_told_otherwise():
    def weights(*groups, **settings):
        sequences = [sequence for unit in units("kto", *groups) for sequence in unit]
        LOSSES["kto"].set_weights(sequences, Config(**settings))
        return [sequence.weight for sequence in sequences]

    assert weights(GROUP) == [1.0, 3.0, 1.0, 1.0]
    assert weights(PAIR, PAIR) == [1.0, 1.0, 1.0, 1.0]
    assert weights(GROUP, desirable_weight=1.1, undesirable_weight=0.5) == [0.5, 1.1, 0.5, 0.5]
    assert weights(GROUP, undesirable_weight=0.5) == [0.5, 1.5, 0.5, 0.5]
    assert weights(LABEL) == [1.0] and weights(UNWANTED) == [1.0]


def make_batch(loss, units, reward=0.0):
    """The first batch of these units."""
    batches = Batches(Config(loss=loss, batch_size=8, sample_every=1), [], 64)
    batches.add(units, [Group(0, [], [], [reward])])
    return batches.pending.pop()


def test_kto_is_mismatched_with_the_completion_of_another_prompt():
    labelled = [Group(i, [i // 2], [[10 + i]], [1.0], labelled=True) for i in range(3)]
    batch = make_batch("kto", units("kto", *labelled))
    mismatched = [(sequence.prompt, sequence.completion) for sequence in batch.mismatched]
    assert mismatched == [([0], [12]), ([0], [12]), ([1], [10])]
    assert make_batch("kto", units("kto", *labelled[:2])).mismatched == []
    assert make_batch("dpo", units("kto", *labelled)).mismatched == []


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_every_file_format_gives_the_same_rows(tmp_path, ending):
    rows, path = rows_of("pairs", 5), tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        write_jsonl(path, rows)
    elif ending == "json":
        path.write_text(json.dumps(rows))
    elif ending == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(path)
    read = humanline.read_rows(str(path), Config(), "--data")
    assert [(row.prompt, row.completions, row.rewards) for row in read] == \
        [([USER(row["prompt"])], [row["chosen"], row["rejected"]], [1.0, 0.0]) for row in rows]
    assert read[2].where == f"--data {path} row 3"


def test_a_folder_with_a_split_is_read_like_a_hub_name(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", rows_of("pairs", 5))
    write_jsonl(folder / "test.jsonl", rows_of("pairs", 3))
    assert len(humanline.read_rows(str(folder), Config(), "--data")) == 5
    assert len(humanline.read_rows(f"{folder}:test", Config(), "--data")) == 3


def test_several_sources_are_mixed_by_passes_and_limited(tmp_path, tiny):
    a = write_jsonl(tmp_path / "a.jsonl", rows_of("pairs", 8))
    b = write_jsonl(tmp_path / "b.jsonl", rows_of("groups", 6))
    rows = [row for spec in (f"{a}=3", f"{b}=0.5") for row in humanline.read_rows(spec, Config(limit=4), "--data")]
    assert len(rows) == 8 and [row.passes for row in rows] == [3.0] * 4 + [0.5] * 4
    groups = humanline.encode_rows(rows, sampler_of(tiny))
    often = [sum(group.row == i for group in groups) for i in range(8)]
    assert often[:4] == [3] * 4 and set(often[4:]) == {0, 1}
    with pytest.raises(UserError, match="'x' is no number of passes"):
        humanline.read_rows(f"{a}=x", Config(), "--data")


# Rows of exactly the published schemas: as `read_row` sees them, and through a file as the hub holds it.

SCORED = ["one", "two", "three"]
PUBLISHED = {  # name: (row, prompt, completions, rewards)
    "GSM8K": ({"question": "How many?", "answer": "He has 2+2=<<2+2=4>>4.\n#### 4"}, [USER("How many?")], [], []),
    "MATH": ({"problem": "Find $x$.", "level": "Level 1", "type": "Algebra", "solution": "So $x=\\boxed{\\frac12}$."},
             [USER("Find $x$.")], [], []),
    "MATH500": ({"problem": "Find $x$.", "solution": "So $\\boxed{2}$.", "answer": "2", "subject": "Algebra",
                 "level": 1, "unique_id": "test/a/1.json"}, [USER("Find $x$.")], [], []),
    "UltraFeedback-ArmoRM": (
        {"prompt_id": "0af1", "prompt": "Hi", "all_generated_responses": SCORED, "all_rm_scores": [0.1, 0.3, 0.2],
         "chosen": [USER("Hi"), ASSISTANT("two")], "rejected": [USER("Hi"), ASSISTANT("one")]},
        [USER("Hi")], SCORED, [0.1, 0.3, 0.2]),
    "HH-RLHF": ({"chosen": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Old?\n\nAssistant: Quite.",
                 "rejected": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Old?\n\nAssistant: No."},
                [USER("Hi"), ASSISTANT("Hello!"), USER("Old?")], ["Quite.", "No."], [1.0, 0.0]),
    "TRL DPO standard": (
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        [USER("The sky is")], [" blue.", " green."], [1.0, 0.0]),
    "TRL DPO standard, implicit": (
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        [USER("The sky is")], [" blue.", " green."], [1.0, 0.0]),
    "TRL DPO conversational": (
        {"prompt": [USER("Sky?")], "chosen": [ASSISTANT("Blue.")], "rejected": [ASSISTANT("Green.")]},
        [USER("Sky?")], ["Blue.", "Green."], [1.0, 0.0]),
    "TRL DPO conversational, implicit": (
        {"chosen": [USER("Sky?"), ASSISTANT("Blue.")], "rejected": [USER("Sky?"), ASSISTANT("Green.")]},
        [USER("Sky?")], ["Blue.", "Green."], [1.0, 0.0]),
    "TRL KTO standard": (
        {"prompt": "The sky is", "completion": " blue.", "label": True}, [USER("The sky is")], [" blue."], [1.0]),
    "TRL KTO conversational": (
        {"prompt": [USER("Sky?")], "completion": [ASSISTANT("Green.")], "label": False},
        [USER("Sky?")], ["Green."], [0.0]),
    "TRL GRPO standard": ({"prompt": "The sky is"}, [USER("The sky is")], [], []),
    "TRL GRPO conversational": ({"prompt": [USER("Sky?")], "solution": "blue"}, [USER("Sky?")], [], []),
}


@pytest.mark.parametrize("ending", ["parquet", "json"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_of_a_published_schema_are_read_as_they_stand(tmp_path, name, ending):
    import datasets

    fields, prompt, completions, rewards = PUBLISHED[name]
    path = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        datasets.Dataset.from_list([fields, fields]).to_parquet(path)
    else:
        path.write_text(json.dumps([fields, fields]))
    rows = humanline.read_rows(str(path), Config(), "--data")
    assert len(rows) == 2
    for row in (read(fields), *rows):
        assert (row.prompt, row.completions, row.rewards, row.fields) == (prompt, completions, rewards, fields)
        assert row.labelled == ("KTO" in name)


def test_hh_rlhf_rows_that_differ_before_the_last_turn_or_end_without_an_answer_are_dropped_and_counted(
        tmp_path, capsys):
    start = "\n\nHuman: Hi there\n\nAssistant: Hello!\n\nHuman: How old\nare you?\n\nAssistant:"
    good = {"chosen": start + " Quite old.", "rejected": start + " No."}
    assert read(good).prompt[-1] == USER("How old\nare you?")
    bad = [dict(good, rejected=good["rejected"].replace("Hello!", "Hey!")), dict(good, rejected=start),
           dict(good, chosen=start + " Old.\n\nHuman: So?")]
    assert [read(row) for row in bad] == [None] * 3
    rows = humanline.read_rows(write_jsonl(tmp_path / "hh.jsonl", [good, *bad]), Config(), "--data")
    assert len(rows) == 1 and "dropped 3 rows whose dialogues differ before" in capsys.readouterr().err


def test_a_path_may_have_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1e-6").mkdir()
    write_jsonl(tmp_path / "lr=1e-6" / "pairs=2.jsonl", rows_of("pairs"))
    for spec, passes in (("lr=1e-6/pairs=2.jsonl", 1), ("lr=1e-6/pairs=2.jsonl=3", 3)):
        rows = humanline.read_rows(spec, Config(), "--data")
        assert len(rows) == len(rows_of("pairs")) and {row.passes for row in rows} == {passes}
    assert not humanline.on_hub("lr=1e-6/pairs=2.jsonl=3") and humanline.source_name("a/b:c:d=2") == "a/b"


def test_only_a_text_that_begins_with_a_turn_is_a_transcript():
    text = "It is 4.\n\nHuman: And 3+3?\n\nAssistant: 6."  # what a base model writes on its own
    for tail in ("", "\n\nHuman: So?"):
        row = read({"prompt": "2+2?", "completion": text + tail, "label": False})
        assert row.completions == [text + tail] and row.prompt == [USER("2+2?")]
    assert read({"prompt": "\n\nHuman: 2+2?\n\nAssistant:", "chosen": "4", "rejected": text}).completions == ["4", text]


@pytest.mark.parametrize("prompt, turns", [
    ([dict(role="system", content="Be kind."), USER("Hi")], [USER("Hi")]),
    ([USER("a"), ASSISTANT("b"), USER("Hi")], [USER("Hi")])])
def test_no_turn_of_a_prompt_gets_lost_where_the_answers_are_dialogues(prompt, turns):
    row = lambda start: dict(prompt=prompt, chosen=[*start, ASSISTANT("yes")], rejected=[*start, ASSISTANT("no")])
    assert read(row(prompt)).prompt == prompt
    with pytest.raises(UserError, match="'prompt' is not among the turns before the answers"):
        read(row(turns))


def test_one_prompt_id_of_two_prompts_is_two_groups(tmp_path):
    line = lambda prompt, text, reward: dict(prompt=prompt, completion=text, reward=reward, prompt_id="1-0")
    lines = [line("A?", "a", 0), line("A?", "b", 1), line("B?", "c", 1), line("B?", "d", 0)]
    rows = humanline.read_rows(write_jsonl(tmp_path / "two_runs.jsonl", lines), Config(), "--data")
    assert [row.completions for row in rows] == [["a", "b"], ["c", "d"]]


def test_a_part_of_a_message_that_would_be_lost_is_refused():
    call = dict(role="assistant", content="", tool_calls=[dict(function=dict(name="add"))])
    with pytest.raises(UserError, match="'prompt' has tool_calls, which is not read; write it into 'content'"):
        read(dict(prompt=[USER("2+2?"), call, dict(role="tool", content="4")], chosen="4", rejected="5"))
    with pytest.raises(UserError, match="'chosen' has reasoning_content, which"):
        read(dict(prompt="2+2?", chosen=[ASSISTANT("4") | dict(reasoning_content="two twos")], rejected="5"))
    assert read(dict(prompt=[USER("2+2?") | dict(tool_calls=None)], chosen="4", rejected="5")).prompt == [USER("2+2?")]


def test_half_of_a_character_is_one_line(tmp_path):
    path = tmp_path / "cut.jsonl"
    path.write_text('{"prompt": "a", "chosen": "fine", "rejected": "cut \\ud83d"}\n')
    with pytest.raises(UserError, match="row 1: 'rejected' holds half of a character"):
        humanline.read_rows(str(path), Config(), "--data")


def test_a_list_with_something_else_than_an_object_is_one_line(tmp_path):
    path = tmp_path / "list.json"
    path.write_text('[{"prompt": "a", "chosen": "b", "rejected": "c"}, ["x"]]')
    with pytest.raises(UserError, match="row 2: not a JSON object"):
        humanline.read_rows(str(path), Config(), "--data")


def test_halos_feedback_files(tmp_path):
    common = dict(prompt=[USER("Hi")], split="train")
    binary = read(dict(common, prompt_id=0, output=[ASSISTANT("Yes")], label=1, reward=0.7, type="binary_feedback"))
    assert binary.labelled and binary.rewards == [1.0] and binary.completions == ["Yes"]
    for label, order in ((1, ["A", "B"]), (0, ["B", "A"])):
        pair = read(dict(common, prompt_id=0, output_A=[ASSISTANT("A")], output_B=[ASSISTANT("B")], label=label,
                         reward_A=1.0, reward_B=0.2, reward_difference=0.8, type="pairwise_feedback"))
        assert pair.completions == order and not pair.labelled
    path = tmp_path / "scalar.json"
    say = lambda i: dict(prompt_id=i // 3, output=[ASSISTANT(f"say {i}")], reward=i / 10, type="scalar_feedback")
    path.write_text(json.dumps([dict(common, **say(i)) for i in range(6)]))
    rows = humanline.read_rows(str(path), Config(), "--data")
    assert [row.completions for row in rows] == [["say 0", "say 1", "say 2"], ["say 3", "say 4", "say 5"]]
    assert rows[1].rewards == [0.3, 0.4, 0.5]


def test_system_message_and_prompt_template_surround_the_prompt():
    row = read({"prompt": "1+1?"}, system="Be brief.", prompt_template="{prompt}\nPut the answer in \\boxed{}.")
    assert row.prompt == [{"role": "system", "content": "Be brief."}, USER("1+1?\nPut the answer in \\boxed{}.")]
    row = read({"prompt": [{"role": "system", "content": "Mine."}, USER("1+1?")]}, system="Be brief.")
    assert row.prompt[0]["content"] == "Mine." and len(row.prompt) == 2
    rollout = dict(prompt="1+1? Box it.", completion="2", reward=1, tokens=[5, 3], logps=[-1.0, -1.0])
    assert read(rollout, prompt_template="{prompt} Box it.").prompt == [USER("1+1? Box it.")]  # it has been filled in
    row = read({"prompt": "1+1?", "topic": "a {prompt}"}, prompt_template="On {topic}, {other}: {prompt} \\frac{1}{2}")
    assert row.prompt == [USER("On a {prompt}, {other}: 1+1? \\frac{1}{2}")]


# Encoding.

def encoded(tiny, rows, **settings):
    sampler = sampler_of(tiny, **settings)
    return sampler.tokenizer, humanline.encode_rows([read(row) for row in rows], sampler)


def test_completions_end_in_one_eos_and_prompts_begin_with_one_bos(tiny):
    tokenizer, (group,) = encoded(tiny, [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
    assert tokenizer.decode(group.prompt) == "<bos><|user|>1+1=<|assistant|>"
    assert [tokenizer.decode(ids) for ids in group.completions] == ["2<eos>", "3<eos>"]


def test_over_long_examples_are_dropped_and_counted_in_one_warning(tiny, capsys):
    rows = [{"prompt": "p" * 5, "chosen": "a", "rejected": "b"}, {"prompt": "p" * 40, "chosen": "a", "rejected": "b"},
            {"prompt": "p" * 5, "chosen": "a" * 80, "rejected": "b"},
            {"prompt": "p" * 5, "completions": ["a", "b", "c" * 80], "scores": [0, 1, 2]}]
    _, groups = encoded(tiny, rows, max_prompt_length=20)
    assert [(group.row, len(group.completions)) for group in groups] == [(0, 2), (3, 2)]
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "dropped 1 prompts and 2 completions" in warning


def test_a_prompt_beyond_the_models_positions_is_an_error_that_says_how_to_drop_it(tiny):
    with pytest.raises(UserError, match=r"data.jsonl row 1: a prompt of 83 tokens .* --max-prompt-length 63"):
        encoded(tiny, [{"prompt": "p" * 80, "chosen": "a", "rejected": "b"}])


def test_online_prompts_that_leave_no_room_under_max_length_are_dropped(tiny, capsys):
    sampler = sampler_of(tiny, max_length=24, max_new_tokens=12)
    rows = [read({"prompt": "p" * length, "answer": "a"}) for length in (5, 20)]
    assert [group.row for group in humanline.encode_rows(rows, sampler, online=True)] == [0]
    assert "dropped 1 prompts and 0 completions" in capsys.readouterr().err


# The order of batches.

def test_every_epoch_sees_every_unit_once_in_an_order_of_its_own():
    groups = [Group(i, [i], [[1], [2]], [1.0, 0.0]) for i in range(12)]

    def rows_in_order(seed: int) -> list[int]:
        batches = Batches(Config(loss="dpo", batch_size=4, steps=6, seed=seed), groups, 64)
        batches.make_offline(6)
        assert batches.steps_per_epoch == 3 and [batch.step for batch in batches.pending] == list(range(1, 7))
        return [sequence.row for batch in batches.pending for sequence in batch.sequences[::2]]

    rows = rows_in_order(seed=0)
    assert sorted(rows[:12]) == sorted(rows[12:]) == list(range(12)) and rows[:12] != rows[12:] != list(range(12))
    assert rows_in_order(seed=1) != rows


def test_batches_come_in_order_whether_made_ahead_or_when_their_turn_comes():
    groups = [Group(i, [i], [[1], [2]], [1.0, 0.0]) for i in range(12)]
    ahead, in_turn = (Batches(Config(loss="dpo", batch_size=4, steps=6), groups, 64) for _ in range(2))
    ahead.make_offline(5)
    for step in range(1, 7):
        batch = ahead.take(step)
        assert batch == in_turn.take(step) and batch.step == step


def test_batches_survive_a_checkpoint():
    labelled = [Group(i, [i, 9], [[5, i]], [float(i % 2)], labelled=True) for i in range(4)]
    batch = make_batch("kto", units("kto", *labelled), 0.25)
    LOSSES["kto"].set_weights(batch.sequences, Config(desirable_weight=1 / 3))
    for sequence in batch.sequences:
        sequence.ref_logps = torch.randn(2)
    batches = [batch, humanline.Batch(4, [], [], None)]
    text = json.dumps([dataclasses.asdict(batch) for batch in batches], default=torch.Tensor.tolist)
    back = [humanline.restore_batch(saved) for saved in json.loads(text)]
    assert back[1] == batches[1] and (back[0].step, back[0].reward) == (1, 0.25) and len(back[0].mismatched) == 4
    for a, b in zip(batch.sequences + batch.mismatched, back[0].sequences + back[0].mismatched, strict=True):
        assert dataclasses.replace(a, ref_logps=None) == dataclasses.replace(b, ref_logps=None)
        assert (a.ref_logps is None and b.ref_logps is None) or torch.equal(a.ref_logps, b.ref_logps)
    assert any(sequence.weight == 1 / 3 for sequence in back[0].sequences)
