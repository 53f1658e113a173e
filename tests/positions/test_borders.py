"""Borders between the turns of chats, written out."""

from __future__ import annotations

import numpy as np
import pytest

from pose_plugin.config import parse_settings
from pose_plugin.positions import draw_windows
from pose_plugin.positions.turn_borders import TurnTokens, turn_borders, turn_tokens
from tests.chat_data import TEMPLATES, chat, chat_tokenizer

# Tokens of a chat as ChatML writes it: `S u` opens a user's turn, `S a` an assistant's, `E n` closes each.
S, U, A, E, N, Y, I, J, C = range(1, 10)  # noqa: E741
CHATML = TurnTokens(assistant=(S, A), user=(S, U), closing=(E,))
# `I` opens a user's turn and `J` closes it; `C` closes the answer.
INST = TurnTokens(assistant=(), user=(I,), closing=(C,))


def borders(line: str, headers=None):
    """Find borders. Letters are the tokens above, other words are content, and a * marks a token in the loss."""
    names = {"S": S, "U": U, "A": A, "E": E, "N": N, "Y": Y, "I": I, "J": J, "C": C}
    words = line.split()
    tokens = np.array([names.get(word.rstrip("*"), 50 + i) for i, word in enumerate(words)])
    found = turn_borders(tokens, np.array([word.endswith("*") for word in words]), headers)
    return None if found is None else found.tolist()


ROWS = {
    "headers stay with their turns": (
        "S U q q E N S A a* a* E* N S U q E N S A a* E* N",
        CHATML,
        [6, 12, 17],
    ),
    "the end of the turn is not trained": (
        "S U q q E N S A a* a* E N S U q E N S A a* E N",
        CHATML,
        [6, 12, 17],
    ),
    "the ends of all turns are trained": (
        "S U q q E* N S A a* a* E* N S U q E* N S A a* E* N",
        CHATML,
        [6, 12, 17],
    ),
    "headers are trained too": ("S U q E N S* A* a* E* N* S U q E N S* A* a* E*", CHATML, [5, 10, 15]),
    "a system prompt stays with the first question": ("S Y q E N S U q E N S A a* E* N", CHATML, [10]),
    "an answer quotes headers": ("S U q E N S A a* S* U* a* E* N* S* A* a* E* N", CHATML, [5]),
    "a question quotes headers": ("S U q S A q E N S A a* E* N", CHATML, [8]),
    "a question behind an answer quotes headers": ("S U q E N S A a* E* N S U S A q E N S A a*", CHATML, [5, 10, 17]),
    "thoughts between header and answer are not trained": ("S U q E N S A t t a* a* E* N", CHATML, [5]),
    "a part of an answer is not trained": ("S U q E N S A a* a a* E* N S U q E N S A a*", CHATML, [5, 12, 17]),
    "an answer that is not trained is not cut": (
        "S U q E N S A a a E N S U q E N S A a* E* N",
        CHATML,
        [16],
    ),
    "a last question without an answer": ("S U q E N S A a* E* N S U q E N", CHATML, [5, 10]),
    "cut off inside an answer": ("S U q E N S A a* a* a*", CHATML, [5]),
    "begins inside an answer": ("a* a* E* N S U q E N S A a* E*", CHATML, [4, 9]),
    "one answer and nothing else trained": ("a* a* E* N", CHATML, []),
    "nothing is trained": ("S U q E N S A a E N", CHATML, []),
    "no header before the answer": ("I q q J a* a* C* I q J a* C*", INST, [4, 7, 10]),
    "no header, the end is not trained": ("I q q J a* a* C I q J a* C", INST, [4, 7, 10]),
    "no header, a part is not trained": ("I q q J a* a a* C I q J a*", INST, [4, 8, 11]),
    "labels alone": ("q q a* a* q a* q", None, [2, 4, 5]),
    "labels alone, from the first token": ("a* a* q q a* q", None, [2, 4]),
    "headers of another template": ("q q a* a* q a* q", CHATML, [2, 4, 5]),
    "all trained: headers behind an end": (
        "S* U* q* E* N* S* A* a* E* N* S* U* q* E* N* S* A* a*",
        CHATML,
        [5, 10, 15],
    ),
    "all trained: quoted headers": ("S* U* q* E* N* S* A* a* S* U* a* E* N*", CHATML, [5]),
    "all trained, no headers": ("q* q* q* q*", CHATML, None),
    "all trained, no template": ("q* q* q* q*", None, None),
}


@pytest.mark.parametrize("name", ROWS)
def test_borders(name):
    line, headers, expected = ROWS[name]
    assert borders(line, headers) == expected


@pytest.mark.parametrize("name", [name for name in ROWS if "all trained" not in name])
def test_no_border_is_inside_a_stretch_of_labels(name):
    line, headers, _ = ROWS[name]
    words = line.split()
    for border in borders(line, headers):
        assert not (words[border].endswith("*") and words[border - 1].endswith("*"))


def test_headers_are_read_from_the_template():
    ids = chat_tokenizer("chatml").convert_tokens_to_ids
    start, end = ids("<|im_start|>"), ids("<|im_end|>")
    assert turn_tokens(chat_tokenizer("chatml")) == TurnTokens((start, ids("assistant")), (start, ids("user")), (end,))
    inst = chat_tokenizer("inst").convert_tokens_to_ids
    assert turn_tokens(chat_tokenizer("inst")) == TurnTokens((), (inst("[INST]"),), (inst("</s>"),))
    worded = chat_tokenizer("worded").convert_tokens_to_ids
    assert turn_tokens(chat_tokenizer("worded")) == TurnTokens((worded("BOT:"),), (worded("USER:"),), ())


def test_templates_that_cannot_be_read():
    assert turn_tokens(chat_tokenizer(None)) is None
    assert turn_tokens(None) is None
    refusing = chat_tokenizer("chatml")
    refusing.chat_template = "{{ raise_exception('no') }}"
    assert turn_tokens(refusing) is None
    silent = chat_tokenizer("chatml")
    silent.chat_template = "{{ 'always this' }}"
    assert turn_tokens(silent) is None


@pytest.mark.parametrize("template", TEMPLATES)
def test_borders_of_a_rendered_chat_are_where_its_messages_begin(template):
    tokenizer = chat_tokenizer(template)
    messages = chat(4, 3, 5, 2)["messages"]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    supervised = np.zeros(len(tokens["input_ids"]), dtype=bool)
    begins = []
    for message in messages:
        begin = text.index(message["content"])
        first = next(i for i, (a, _) in enumerate(tokens["offset_mapping"]) if a >= begin)
        count = len(message["content"].split())
        begins.append(first)
        if message["role"] == "assistant":
            supervised[first : first + count] = True
    header = {"chatml": [3, 3, 3], "inst": [0, 1, 0], "worded": [1, 1, 1]}[template]
    expected = [begin - size for begin, size in zip(begins[1:], header, strict=True)]
    found = turn_borders(np.array(tokens["input_ids"]), supervised, turn_tokens(tokenizer))
    assert found.tolist() == expected


def settings(**changes):
    return parse_settings({"target_length": 512, "train_length": 64, "sampler": "turns", **changes})


def jumps(window) -> list[int]:
    return (np.flatnonzero(np.diff(window.position_ids) > 1) + 1).tolist()


def test_jumps_are_only_at_borders_and_at_each_equally_often():
    documents = [np.random.default_rng(i).integers(0, 1000, 60) for i in range(900)]
    windows = draw_windows(documents, settings(), 0, [np.array([7, 21, 50])] * 900)
    seen = [jumps(window) for window in windows]
    # A skip of 0 is one of 449.
    assert {len(places) for places in seen} <= {0, 1} and sum(not places for places in seen) < 12
    counts = [seen.count([border]) for border in (7, 21, 50)]
    assert sum(counts) == sum(map(bool, seen)) and min(counts) > 240
    last = [int(window.position_ids[-1]) for window in windows]
    assert max(last) > 500 and min(last) < 80


def test_exact_positions():
    tokens = np.arange(100, 112)
    windows = draw_windows([tokens, tokens], settings(target_length=64), 0, [np.array([5]), np.zeros(0, int)])
    skip = windows[0].position_ids[5] - 5
    assert skip > 0
    assert windows[0].position_ids.tolist() == [0, 1, 2, 3, 4, *range(5 + skip, 12 + skip)]
    assert windows[1].position_ids.tolist() == list(range(12)), "nowhere to cut: plain"


def test_more_chunks_take_more_borders_and_no_more_than_there_are():
    offered = np.array([4, 9, 30, 44])
    documents = [np.random.default_rng(i).integers(0, 1000, 60) for i in range(50)]
    for chunks, most in ((1, 0), (3, 2), (5, 4), (9, 4)):
        windows = draw_windows(documents, settings(chunks=chunks, target_length=100_000), 0, [offered] * 50)
        assert max(len(jumps(window)) for window in windows) == most
        assert all(set(jumps(window)) <= set(offered.tolist()) for window in windows)


def test_rows_without_turns_are_cut_anywhere_and_borders_behind_the_window_do_not_count():
    documents = [np.random.default_rng(i).integers(0, 1000, 90) for i in range(60)]
    raw = draw_windows(documents, settings(), 0, [None] * 60)
    assert len({tuple(jumps(window)) for window in raw}) > 20
    behind = draw_windows(documents, settings(), 0, [np.array([64, 70])] * 60)
    assert all(window.position_ids.tolist() == list(range(64)) for window in behind)


def test_positions_do_not_depend_on_the_other_documents_of_a_batch():
    documents = [np.random.default_rng(i).integers(0, 1000, size) for i, size in enumerate((60, 2, 33, 1, 48))]
    offered = [np.array([7, 21, 50]), None, np.array([12]), np.zeros(0, int), None]
    for chunks in (2, 4):
        together = draw_windows(documents, settings(chunks=chunks), 3, offered)
        for i, document in enumerate(documents):
            (alone,) = draw_windows([document], settings(chunks=chunks), 3, [offered[i]])
            assert alone.position_ids.tolist() == together[i].position_ids.tolist()
