"""Batches of samplers that jump at borders, tensor by tensor."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from torch.utils.data import DataLoader

from pose_plugin.collator import PositionCollator
from pose_plugin.frameworks.trl import PoSECollator
from tests.chat_data import chat_tokenizer, chats, expected_labels
from tests.test_collator import stack_packs

TOKENIZER = chat_tokenizer()


def features() -> list[dict[str, list[int]]]:
    rows = [expected_labels(TOKENIZER, row["messages"]) for row in chats()]
    return [{"input_ids": tokens, "labels": labels} for tokens, labels in rows]


def lines() -> list[dict[str, list[int]]]:
    words = np.random.default_rng(0).integers(30, 100, (8, 40))
    words[:, [9, 21, 30]] = TOKENIZER.convert_tokens_to_ids("\n")
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in words]


def test_a_chat_written_out():
    """Each row has one border, at the header of its answer; its skip depends on this row alone."""
    words = TOKENIZER.convert_tokens_to_ids
    start, end, line = words("<|im_start|>"), words("<|im_end|>"), words("\n")
    tokens = [start, words("user"), line, 30, 31, end, line, start, words("assistant"), line, 40, 41, end, line]
    labels = [*[-100] * 10, 40, 41, end, -100]
    collate = PoSECollator(TOKENIZER, target_length=200, sampler="turns")
    batch = collate([{"input_ids": tokens, "labels": labels}, {"input_ids": tokens[:12], "labels": labels[:12]}])
    first, second = batch["position_ids"].tolist()
    skips = first[7] - 7, second[7] - 7
    assert skips[0] > 0 and skips[1] > 0 and skips[0] != skips[1]
    assert first == [*range(7), *range(7 + skips[0], 14 + skips[0])]
    assert second == [*range(7), *range(7 + skips[1], 12 + skips[1]), 0, 1]
    assert batch["attention_mask"].tolist() == [[1] * 14, [1] * 12 + [0] * 2]
    assert batch["labels"].tolist() == [labels, [*labels[:12], -100, -100]]
    assert collate.trained() == {
        "documents": 2, "skipped": 2, "tokens": 26, "farthest": max(first[-1], second[11]), "anywhere": 0, "uncut": 0,
    }  # fmt: skip


def test_packed_chats_have_the_positions_of_single_ones():
    documents = features()[:3]
    alone = PoSECollator(TOKENIZER, target_length=512, sampler="turns")
    inner = functools.partial(stack_packs)
    inner.tokenizer = TOKENIZER
    packed = PositionCollator(inner, {"target_length": 512, "sampler": "turns"})
    expected = [alone([document])["position_ids"][0].tolist() for document in documents]
    batch = packed([documents])
    assert batch["position_ids"][0].tolist() == [*itertools.chain(*expected)]
    assert "attention_mask" not in batch


def test_what_has_no_border_is_counted():
    text = {"input_ids": list(range(30, 60)), "labels": list(range(30, 60))}
    unlabelled = {"input_ids": list(range(30, 60)), "labels": [-100] * 30}
    collate = PoSECollator(TOKENIZER, target_length=512, sampler="turns")
    batch = collate([text, unlabelled, text])
    assert batch["position_ids"][1].tolist() == list(range(30))
    assert batch["position_ids"][0, -1] > 29
    assert {key: collate.trained()[key] for key in ("anywhere", "uncut")} == {"anywhere": 2, "uncut": 1}
    assert "anywhere" not in PoSECollator(TOKENIZER, target_length=512).trained()


def test_a_window_without_the_end_of_a_sentence_is_counted_as_cut_anywhere():
    words = [*range(30, 60), *TOKENIZER.convert_tokens_to_ids(["\n"]), *range(60, 70)]
    collate = PoSECollator(TOKENIZER, target_length=2048, train_length=16, sampler="sentences")
    positions = collate([{"input_ids": words}])["position_ids"][0].tolist()
    assert positions[-1] > 15, "it was cut"
    assert {key: collate.trained()[key] for key in ("skipped", "anywhere", "uncut")} == {
        "skipped": 1, "anywhere": 1, "uncut": 0,
    }  # fmt: skip


def test_trls_masks_give_the_same_borders_as_labels():
    (row,) = features()[:1]
    mask = [int(label != -100) for label in row["labels"]]
    collate = PoSECollator(TOKENIZER, target_length=512, sampler="turns")
    (expected,) = collate.borders([row])
    for name in ("assistant_masks", "completion_mask"):
        (found,) = collate.borders([{"input_ids": row["input_ids"], name: mask}])
        assert found.tolist() == expected.tolist() and found.size == 3


@pytest.mark.parametrize("sampler, rows", [("turns", features()), ("sentences", lines())])
def test_positions_do_not_depend_on_workers(sampler, rows):
    def positions(workers: int, batch: int):
        collate = PoSECollator(TOKENIZER, target_length=4096, sampler=sampler)
        loader = DataLoader(rows, batch_size=batch, num_workers=workers, collate_fn=collate)
        drawn = [
            line[mask.bool()].tolist()
            for each in loader
            for line, mask in zip(each["position_ids"], each["attention_mask"], strict=True)
        ]
        return drawn, collate.trained()

    alone, counts = positions(0, 1)
    assert positions(2, 4) == (alone, counts)
    assert counts["skipped"] == len(rows) and counts["anywhere"] == 0
