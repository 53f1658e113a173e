"""Warnings and errors about the training rows before the first step."""

from __future__ import annotations

import pytest

from pose_plugin.frameworks.trl import PoSECollator
from pose_plugin.training.data_report import look_at_rows
from pose_plugin.utils.errors import PoSEError
from tests.chat_data import chat_tokenizer

TOKENIZER = chat_tokenizer()


def row(line: str, labels: list[int] | None = None) -> dict[str, list[int]]:
    """Words of the tokenizer with S, U, A, E, N for ChatML's; a * behind one: it is in the loss."""
    names = {"S": "<|im_start|>", "U": "user", "A": "assistant", "E": "<|im_end|>", "N": "\n"}
    words = [names.get(word.rstrip("*"), word.rstrip("*")) for word in line.split()]
    ids = TOKENIZER.convert_tokens_to_ids(words)
    marked = [i if word.endswith("*") else -100 for i, word in zip(ids, line.split(), strict=True)]
    return {"input_ids": ids, "labels": labels or marked}


GOOD = row("S U w30 E N S A w40* E* N S U w31 E N S A w41* E* N")


def warnings(*rows, **settings) -> list[str]:
    collator = PoSECollator(TOKENIZER, target_length=512, **settings)
    return look_at_rows(list(rows), collator).warnings(collator.settings)


def test_good_chats_and_plain_text_are_silent():
    text = {"input_ids": list(range(30, 60)), "labels": list(range(30, 60))}
    assert warnings(GOOD, text) == []
    assert warnings(GOOD, text, sampler="turns", train_length=64) == []
    assert warnings(text, {"input_ids": text["input_ids"]}) == []
    last_answer_alone = row("S U w30 E N S A w40 E N S U w31 E N S A w41* E* N")
    cut_off_before_the_answer = row("S U w30 E N S A w40* E* N S U w31 E N S A")
    assert warnings(last_answer_alone, cut_off_before_the_answer) == []


@pytest.mark.parametrize(
    "bad, settings, text",
    [
        (row("S U w30 E N S A w40 E N"), {}, "no token in the loss"),
        (row("S U w30 w31 w32 E N S A w40* E*"), {"train_length": 9}, "no token in the loss"),
        (GOOD, {"train_length": 12}, "after the window (train_length=12)"),
        (row("S U w30 E N S A w40* E* N S U w31 E N S A w41 E N"), {}, "a later one that is not"),
        (row("S U w30 E N S A w40* E* N* S* U* w31* E* N S A w41* E*"), {}, "the header of a turn in the loss"),
        (row("S* U* w30* E* N* S* A* w40* E* N*"), {}, "every token in the loss, questions included"),
        (GOOD, {"train_length": 12, "content": "skip"}, "content=skip drops parts"),
        (GOOD, {"train_length": 12, "content": "window"}, "content=window drops parts"),
        (row("S*"), {}, "no token in the loss"),
        ({"input_ids": row("S")["input_ids"]}, {}, "no token in the loss"),
        (row("S* " + "w30* " * 512), {}, "more tokens than target_length=512"),
    ],
)
def test_a_warning_names_the_row(bad, settings, text):
    short = row("S U w30 E N S A w40* E* N")
    found = warnings(short, short, bad, **settings)
    assert len(found) == 1 and text in found[0]
    assert "1 of 3 rows" in found[0] and "row 2, which begins '<|im_start|>" in found[0]


def test_a_row_without_tokens():
    found = warnings(GOOD, {"input_ids": [], "labels": []}, sampler="turns")
    assert len(found) == 1 and "1 of 2 rows have no tokens" in found[0] and "row 1" in found[0]


def test_labels_shifted_by_hand():
    shifted = row("S U w30 E N S A w40* E* N")
    shifted["labels"] = [*shifted["labels"][1:], -100]
    assert "labels are the input_ids, or -100" in warnings(GOOD, shifted)[0]


@pytest.mark.parametrize("content", ["window", "skip", "aligned"])
def test_answers_that_another_piece_of_the_document_reaches(content):
    far = {"input_ids": list(range(30, 60)), "labels": [-100] * 20 + list(range(50, 60))}
    found = warnings(far, far, train_length=8, content=content)
    assert len(found) == 1 and "drops parts of them" in found[0]


def test_rows_that_train_nothing_at_all_are_refused():
    with pytest.raises(PoSEError, match=r"train_length=None: none of 2 rows .* row 0, which begins"):
        warnings(*[row("S U w30 E N S A w40 E N")] * 2)


def test_turns_without_any_border_are_refused():
    text = {"input_ids": list(range(30, 60)), "labels": list(range(30, 60))}
    with pytest.raises(PoSEError, match=r"sampler=turns found no border between turns in 3 rows"):
        warnings(text, text, text, sampler="turns")
    assert warnings(text, GOOD, sampler="turns") == []


def test_packed_rows_are_checked_document_by_document():
    bad = row("S U w30 E N S A w40 E N")
    packed = {key: GOOD[key] + bad[key] for key in GOOD}
    packed["seq_lengths"] = [len(GOOD["input_ids"]), len(bad["input_ids"])]
    (found,) = warnings(packed)
    assert "1 of 2 rows have no token in the loss" in found and "row 0" in found


def test_columns_that_a_trainer_removes_are_not_read():
    """TRL shortens the tokens of a data set and leaves its attention_mask, which never reaches the collator."""
    collator = PoSECollator(TOKENIZER, target_length=512)
    rows = [{**GOOD, "attention_mask": [1] * 100}]
    assert look_at_rows(rows, collator, ["input_ids", "labels"]).documents == 1
    with pytest.raises(PoSEError, match="100 attention_mask"):
        look_at_rows(rows, collator)


def test_padding_that_the_trainer_does_not_see():
    """TRL trains it as text; a mask that reaches the collator removes it."""
    collator = PoSECollator(TOKENIZER, target_length=512)
    size = len(GOOD["input_ids"])
    rows = [{**GOOD, "attention_mask": [1] * (size - 1) + [0] * 9}, {**GOOD, "attention_mask": [1] * size + [0] * 9}]
    (found,) = look_at_rows(rows, collator, ["input_ids", "labels"]).warnings(collator.settings)
    assert found.startswith("1 of 2 rows have padding that is read as text") and "row 0" in found
    seen = {**GOOD, "attention_mask": [1] * (size - 1) + [0]}
    assert look_at_rows([seen], collator, ["input_ids", "labels", "attention_mask"]).counts["padded"] == 0


@pytest.mark.parametrize("size", [5, 3000])
def test_chats_behind_many_texts_are_found(size):
    """Rows are read from all over the data set, up to the limits of rows and tokens."""
    text = {"input_ids": [30] * size, "labels": [30] * size}
    assert warnings(*[text] * 1200, *[GOOD] * 1200, sampler="turns", train_length=64) == []


def test_rows_of_two_dimensions_are_refused_as_such():
    with pytest.raises(PoSEError, match="a non-empty 1-D list is needed"):
        warnings({"input_ids": [[30, 31]], "labels": [[30, 31]]})


def test_rows_that_cannot_be_read_are_skipped():
    collator = PoSECollator(TOKENIZER, target_length=512)
    assert look_at_rows(iter([GOOD]), collator) is None
    assert look_at_rows([], collator) is None
    assert look_at_rows([{"text": "w30"}], collator) is None
    assert look_at_rows([([30, 31], [30, 31])], collator) is None


def test_answers_that_quote_the_template_keep_their_labels_without_a_warning():
    """A header alone is no turn; where a whole chat is quoted, the row is named."""
    quoting = row("S U w30 S A w31 E N S A w40* S* A* w41* E* N S U w31 E N S A w41* E* N")
    assert warnings(quoting, sampler="turns") == []
    whole = row("S U w30 E N S A w40* E* N* S* U* w31* E* N* w32* E*")
    assert "ignore this if an answer quotes a chat" in warnings(whole)[0]


def test_a_tokenizer_is_not_needed():
    from transformers import default_data_collator

    collator = PoSECollator(collate=default_data_collator, target_length=512)
    report = look_at_rows([row("S U w30 E N"), GOOD], collator)
    assert "which begins with the tokens [" in report.warnings(collator.settings)[0]
