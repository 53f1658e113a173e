"""What a batch holds, tensor by tensor; one mode per test."""

from __future__ import annotations

import copy
import doctest
import functools
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from pose_plugin.collator import PositionCollator
from pose_plugin.features import one_document
from pose_plugin.frameworks.trl import PoSECollator
from pose_plugin.positions import SAMPLERS, Window, draw_windows
from pose_plugin.utils.errors import PoSEError
from tests.models import make_tokenizer

SIX, THREE, FOUR = [10, 11, 12, 13, 14, 15], [20, 21, 22], [30, 31, 32, 33]


def window(positions, content=None):
    content = np.arange(len(positions)) if content is None else np.array(content)
    seams = np.flatnonzero(np.diff(content, prepend=content[0] - 1) != 1)
    return Window(content, np.array(positions), seams)


W6, W3, W4 = window([0, 1, 2, 13, 14, 15]), window([0, 9, 10]), window([0, 1, 2, 7])


def fixed(*windows):
    """Return windows in the documents' order, so that a test can write the tensors out."""
    return lambda documents: list(windows)


def rows(*documents, **columns):
    return [{"input_ids": list(ids), "labels": list(ids), **columns} for ids in documents]


def lists(batch):
    # TRL 1.16 adds arguments of FlashAttention (cu_seq_lens_q, …) to padding-free rows.
    core = ("input_ids", "labels", "attention_mask", "position_ids")
    return {key: batch[key].tolist() for key in core if key in batch}


def stack_packs(packs, **kwargs):
    """Join each pack into one row, as Axolotl's multipack collator does."""
    joined = [{key: [value for d in pack for value in d[key]] for key in ("input_ids", "labels")} for pack in packs]
    width = max(len(row["input_ids"]) for row in joined)
    filled = {"input_ids": 0, "labels": -100}
    return {
        key: torch.tensor([row[key] + [fill] * (width - len(row[key])) for row in joined])
        for key, fill in filled.items()
    }


def stack(features, **kwargs):
    return stack_packs([[feature] for feature in features])


def collator(inner=stack, side="right", **settings):
    return PositionCollator(inner, {"target_length": 512, **settings}, padding_side=side)


def test_the_examples_of_the_docstring():
    from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening

    names = {
        "DataCollatorForSeq2Seq": DataCollatorForSeq2Seq,
        "DataCollatorWithFlattening": DataCollatorWithFlattening,
        "PositionCollator": PositionCollator,
        "tokenizer": make_tokenizer(),
        "show": lambda batch: print("\n".join(f"{key:<14} {value}" for key, value in lists(batch).items())),
    }
    (test,) = doctest.DocTestFinder(recurse=False).find(PositionCollator, "PositionCollator", globs=names)
    assert len(test.examples) == 9
    assert doctest.DocTestRunner().run(test).failed == 0


# --- one document per row --------------------------------------------------------------------------------


def test_right_padding():
    batch = PoSECollator(make_tokenizer(), target_length=64).assemble(rows(SIX, THREE), fixed(W6, W3))
    assert lists(batch) == {
        "input_ids": [SIX, [20, 21, 22, 0, 0, 0]],
        "labels": [SIX, [20, 21, 22, -100, -100, -100]],
        "attention_mask": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 13, 14, 15], [0, 9, 10, 0, 1, 2]],
    }
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_left_padding():
    batch = PoSECollator(make_tokenizer(side="left"), target_length=64).assemble(rows(SIX, THREE), fixed(W6, W3))
    assert lists(batch) == {
        "input_ids": [SIX, [0, 0, 0, 20, 21, 22]],
        "labels": [SIX, [-100, -100, -100, 20, 21, 22]],
        "attention_mask": [[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]],
        "position_ids": [[0, 1, 2, 13, 14, 15], [0, 1, 2, 0, 9, 10]],
    }


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_to_a_multiple(side):
    from transformers import DataCollatorForSeq2Seq

    inner = DataCollatorForSeq2Seq(make_tokenizer(side=side), pad_to_multiple_of=8)
    batch = PoSECollator(collate=inner, target_length=64).assemble(rows(SIX), fixed(W6))
    pad, mask = [0, 1], [1] * 6
    tokens = [0, 1, 2, 13, 14, 15]
    assert batch["position_ids"].tolist() == [tokens + pad if side == "right" else pad + tokens]
    assert batch["attention_mask"].tolist() == [[*mask, 0, 0] if side == "right" else [0, 0, *mask]]


@pytest.mark.parametrize("side, expected", [("right", [[0, 9, 10, 0, 1, 2]]), ("left", [[0, 1, 2, 0, 9, 10]])])
def test_padding_side_is_used_if_the_inner_collator_returns_no_mask(side, expected):
    def padded(features, **kwargs):
        ids = features[0]["input_ids"]
        return {"input_ids": torch.tensor([ids + [0] * 3 if side == "right" else [0] * 3 + ids])}

    assert collator(padded, side).assemble(rows(THREE), fixed(W3))["position_ids"].tolist() == expected


def test_a_row_alone_gets_an_all_ones_mask():
    batch = PoSECollator(make_tokenizer(), target_length=64).assemble(rows(SIX), fixed(W6))
    assert batch["attention_mask"].tolist() == [[1] * 6]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 13, 14, 15]]


def test_rows_without_labels_are_taken_whole():
    features = [{"input_ids": SIX}, {"input_ids": THREE}]
    batch = PoSECollator(make_tokenizer(), target_length=64).assemble(features, fixed(W6, W3))
    assert batch["labels"].tolist() == [SIX, [20, 21, 22, -100, -100, -100]]


def seq2seq():
    from transformers import DataCollatorForSeq2Seq

    return DataCollatorForSeq2Seq(make_tokenizer())


def language_modeling():
    from transformers import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(make_tokenizer(), mlm=False)


def trl_language_modeling(**options):
    trainer = pytest.importorskip("trl.trainer.sft_trainer")
    return trainer.DataCollatorForLanguageModeling(pad_token_id=0, **options)


@pytest.mark.parametrize("inner", [seq2seq, language_modeling, trl_language_modeling])
@pytest.mark.parametrize("extra", [{}, {"attention_mask": True}], ids=["bare", "with a mask column"])
def test_inner_collators_agree(inner, extra):
    make = inner()
    features = rows(SIX, THREE)
    # Hugging Face's language modelling collator makes labels from the tokens, and cannot stack a column of labels.
    for feature in features:
        if inner is language_modeling:
            del feature["labels"]
        if extra:
            feature["attention_mask"] = [1] * len(feature["input_ids"])
    batch = PoSECollator(collate=make, target_length=64).assemble(features, fixed(W6, W3))
    assert lists(batch) == {
        "input_ids": [SIX, [20, 21, 22, 0, 0, 0]],
        "labels": [SIX, [20, 21, 22, -100, -100, -100]],
        "attention_mask": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 13, 14, 15], [0, 9, 10, 0, 1, 2]],
    }


def test_labels_are_not_shifted():
    drawn = collator(train_length=8, content="skip", mask_seam=False)(rows(range(40, 100)))
    assert drawn["labels"].tolist() == drawn["input_ids"].tolist()


def test_arguments_reach_the_inner_collator():
    seen = []

    def inner(features, *args, **kwargs):
        seen.append((args, kwargs))
        return stack(features)

    collator(inner)(rows(SIX), "first", return_tensors="pt")
    assert seen == [(("first",), {"return_tensors": "pt"})]


# --- packed rows -----------------------------------------------------------------------------------------


def test_packs_as_lists():
    features = [rows(SIX, THREE), rows(FOUR)]
    batch = collator(stack_packs).assemble(features, fixed(W6, W3, W4))
    assert lists(batch) == {
        "input_ids": [SIX + THREE, FOUR + [0] * 5],
        "labels": [SIX + THREE, FOUR + [-100] * 5],
        "position_ids": [[0, 1, 2, 13, 14, 15, 0, 9, 10], [0, 1, 2, 7, 0, 1, 2, 3, 4]],
    }


def test_packs_joined_into_one_row():
    """As FlashAttention needs them. The padding of a row becomes a document between the others, counting from 0."""
    one_row = collator(stack_packs)
    one_row.one_row = True
    batch = one_row.assemble([rows(SIX, THREE), rows(FOUR)], fixed(W6, W3, W4))
    assert lists(batch) == {
        "input_ids": [SIX + THREE + FOUR + [0] * 5],
        "labels": [SIX + THREE + FOUR + [-100] * 5],
        "position_ids": [[0, 1, 2, 13, 14, 15, 0, 9, 10, 0, 1, 2, 7, 0, 1, 2, 3, 4]],
    }
    assert one_row.plain().one_row
    # Rows that are documents keep their mask and their shape.
    apart = collator(lambda features: stack_packs([[feature] for feature in features]))
    apart.one_row = True
    assert apart.assemble(rows(SIX, FOUR), fixed(W6, W4))["attention_mask"].tolist() == [[1] * 6, [1] * 4 + [0] * 2]


def test_packs_as_lists_through_axolotls_collator():
    collators = pytest.importorskip("axolotl.utils.collators")
    inner = collators.V2BatchSamplerDataCollatorForSeq2Seq(
        make_tokenizer(), padding=True, pad_to_multiple_of=8, return_tensors="pt"
    )
    features = [[{**d, "attention_mask": [1] * len(d["input_ids"])} for d in rows(SIX, THREE)]]
    batch = collator(inner).assemble(features, fixed(W6, W3))
    assert "attention_mask" not in batch
    assert batch["input_ids"].tolist() == [SIX + THREE + [0] * 7]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 13, 14, 15, 0, 9, 10, 0, 1, 2, 3, 4, 5, 6]]


def test_seq_lengths():
    feature = {"input_ids": SIX + THREE, "labels": SIX + THREE, "seq_lengths": [6, 3]}
    other = {"input_ids": FOUR, "labels": FOUR, "seq_lengths": [4]}
    batch = collator(trl_language_modeling(padding_free=True)).assemble([feature, other], fixed(W6, W3, W4))
    assert lists(batch) == {
        "input_ids": [SIX + THREE + FOUR],
        # TRL masks the first token of each document, because nothing before it predicts it.
        "labels": [[-100, 11, 12, 13, 14, 15, -100, 21, 22, -100, 31, 32, 33]],
        "position_ids": [[0, 1, 2, 13, 14, 15, 0, 9, 10, 0, 1, 2, 7]],
    }


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_packed_before_are_padded_and_lose_first_labels(side):
    """As with TRL's collator: nothing before a document predicts its first token."""
    feature = {"input_ids": SIX + THREE, "seq_lengths": [6, 3]}
    other = {"input_ids": FOUR, "seq_lengths": [4]}
    pad = {"input_ids": [0] * 5, "labels": [-100] * 5, "position_ids": [0, 1, 2, 3, 4]}
    batch = PoSECollator(make_tokenizer(side=side), target_length=64).assemble([feature, other], fixed(W6, W3, W4))
    short = {"input_ids": FOUR, "labels": [-100, 31, 32, 33], "position_ids": [0, 1, 2, 7]}
    assert lists(batch) == {
        key: [row, short[key] + pad[key] if side == "right" else pad[key] + short[key]]
        for key, row in {
            "input_ids": SIX + THREE,
            "labels": [-100, 11, 12, 13, 14, 15, -100, 21, 22],
            "position_ids": [0, 1, 2, 13, 14, 15, 0, 9, 10],
        }.items()
    }


@pytest.mark.parametrize("documents", [[SIX], [SIX, THREE]])
def test_padding_free_rows_are_padded_on_the_right(documents):
    """Whatever the side of the tokenizer, also if there is only one row."""
    inner = trl_language_modeling(padding_free=True, pad_to_multiple_of=8)
    batch = collator(inner, "left").assemble(rows(*documents), fixed(*[W6, W3][: len(documents)]))
    assert batch["input_ids"][0, :6].tolist() == SIX
    assert batch["position_ids"][0, :6].tolist() == [0, 1, 2, 13, 14, 15]


@pytest.mark.parametrize("lengths", [[10], [5, 5], [-1, 10], [9, 0], [], [4.0, 5.0], [[4, 5]], [True] * 9, 9])
@pytest.mark.parametrize("training", [True, False])
def test_seq_lengths_that_are_not_those_of_the_documents(lengths, training):
    """They would lose tokens, or let positions run back inside a document."""
    collate = collator(trl_language_modeling(padding_free=True))
    collate.training = training
    with pytest.raises(PoSEError, match=r"seq_lengths=.* of a row of 9 tokens"):
        collate([{"input_ids": SIX + THREE, "labels": SIX + THREE, "seq_lengths": lengths}])


def test_rows_of_several_kinds_in_one_batch():
    packed = {"input_ids": SIX, "labels": SIX, "seq_lengths": [6]}
    for features in ([packed, *rows(THREE)], [*rows(THREE), packed], [rows(SIX), *rows(THREE)]):
        with pytest.raises(PoSEError, match="several kinds"):
            collator()(features)


@pytest.mark.parametrize("name", ["labels", "attention_mask", "token_type_ids", "completion_mask"])
def test_a_column_of_another_length_than_the_tokens(name):
    with pytest.raises(PoSEError, match=f"6 input_ids and 5 {name}"):
        collator(train_length=4)([{"input_ids": SIX, name: [1] * 5}])


@pytest.mark.parametrize("name", ["assistant_masks", "completion_mask"])
def test_masks_of_rows_without_labels_become_labels(name):
    mask = [0, 0, 1, 1, 0, 1]
    batch = collator().assemble([{"input_ids": SIX, name: mask}, *rows(THREE)], fixed(W6, W3))
    assert lists(batch)["labels"] == [[-100, -100, 12, 13, -100, 15], [*THREE, -100, -100, -100]]
    given = collator().assemble([{"input_ids": SIX, "labels": SIX, name: mask}], fixed(W6))
    assert lists(given)["labels"] == [SIX]
    packed = collator().assemble(
        [{"input_ids": SIX + THREE, name: [0] * 6 + [1] * 3, "seq_lengths": [6, 3]}], fixed(W6, W3)
    )
    assert lists(packed)["labels"] == [[-100] * 7 + THREE[1:]]


def test_a_mask_next_to_labels_is_not_read():
    """TRL shortens labels to max_length, and leaves the mask as long as it was if completion_only_loss is off."""
    batch = collator().assemble(rows(SIX, completion_mask=[0, 0, 0, 1, 1, 1, 1]), fixed(W6))
    assert lists(batch)["labels"] == [SIX]


def test_a_column_that_would_be_left_out_of_the_batch():
    pad = PoSECollator(make_tokenizer(), target_length=64)
    for value in ([0.5] * 6, torch.zeros(3, 2, 2, dtype=torch.bfloat16), [[1, 2]]):
        with pytest.raises(PoSEError, match="column weights"):
            pad(rows(SIX, weights=value))
    assert "text" not in pad(
        rows(SIX, text="a", tools=[["a"], ["b", "c"]], messages=[{"role": "user"}], number=3, length=6)
    )


def test_seq_lengths_follow_documents_that_were_cut():
    feature = {"input_ids": SIX + THREE, "labels": SIX + THREE, "seq_lengths": [6, 3]}
    cut = [window([0, 1, 9, 10], [0, 1, 4, 5]), window([0, 7], [0, 2])]
    batch = collator(trl_language_modeling(padding_free=True), mask_seam=False).assemble([feature], fixed(*cut))
    assert lists(batch) == {
        "input_ids": [[10, 11, 14, 15, 20, 22]],
        "labels": [[-100, 11, 14, 15, -100, 22]],
        "position_ids": [[0, 1, 9, 10, 0, 7]],
    }


def test_padding_free_rows_are_packed_unless_there_is_only_one():
    inner = collator(trl_language_modeling(padding_free=True))
    batch = inner.assemble(rows(SIX, THREE), fixed(W6, W3))
    assert sorted(lists(batch)) == ["input_ids", "labels", "position_ids"]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 13, 14, 15, 0, 9, 10]]
    alone = inner.assemble(rows(SIX), fixed(W6))
    assert alone["attention_mask"].tolist() == [[1] * 6]
    assert alone["position_ids"].tolist() == [[0, 1, 2, 13, 14, 15]]


def test_transformers_flattening_collator():
    from transformers import DataCollatorWithFlattening

    batch = collator(DataCollatorWithFlattening()).assemble(rows(SIX, THREE), fixed(W6, W3))
    assert sorted(batch) == ["input_ids", "labels", "position_ids"]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 13, 14, 15, 0, 9, 10]]


def test_a_document_has_the_same_positions_packed_or_not():
    alone = collator()(rows(SIX, THREE, FOUR))["position_ids"]
    as_lists = collator(stack_packs)([rows(SIX, THREE), rows(FOUR)])["position_ids"]
    feature = {"input_ids": SIX + THREE + FOUR, "labels": SIX + THREE + FOUR, "seq_lengths": [6, 3, 4]}
    flat = collator(trl_language_modeling(padding_free=True))([feature])["position_ids"]
    expected = [alone[0].tolist(), alone[1, :3].tolist(), alone[2, :4].tolist()]
    assert as_lists[0].tolist() == expected[0] + expected[1]
    assert as_lists[1, :4].tolist() == expected[2]
    assert flat[0].tolist() == [*expected[0], *expected[1], *expected[2]]
    assert max(map(max, expected)) > 6, "no document has a jump"


def test_packed_documents_start_at_zero_with_every_sampler():
    documents = [list(range(start, start + 3)) for start in range(10, 60)]
    inner = [functools.partial(each) for each in (stack_packs, stack)]
    for each in inner:
        each.tokenizer = make_tokenizer()
    for sampler in SAMPLERS:
        batch = collator(inner[0], sampler=sampler)([rows(*documents)])
        alone = collator(inner[1], sampler=sampler)(rows(*documents))
        assert batch["position_ids"][0, ::3].tolist() == [0] * 50, sampler
        assert batch["position_ids"][0].tolist() == alone["position_ids"].flatten().tolist(), sampler


# --- columns ---------------------------------------------------------------------------------------------


def test_all_per_token_columns_are_cut_alike():
    seen = []

    def inner(features, **kwargs):
        seen.extend(features)
        return stack(features)

    feature = {
        "input_ids": torch.tensor(SIX),
        "labels": np.array(SIX),
        "loss_weight": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
        "token_type_ids": [0, 0, 0, 1, 1, 1],
        "name": "sixsix",
        "id": 7,
        "pair": [1, 2],
        "length": 6,
        "position_ids": [0, 1, 2, 3, 4, 5],
    }
    collator(inner).assemble([feature], fixed(window([0, 1, 9], [0, 1, 4])))
    (given,) = seen
    plain = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in given.items()}
    assert plain == {
        "input_ids": [10, 11, 14],
        "labels": [10, 11, 14],
        "loss_weight": [0.0, 0.1, 0.4],
        "token_type_ids": [0, 0, 1],
        "name": "sixsix",
        "id": 7,
        "pair": [1, 2],
    }
    assert isinstance(given["input_ids"], torch.Tensor)
    assert isinstance(given["labels"], np.ndarray)


@pytest.mark.parametrize("mask_seam, expected", [(True, [10, 11, -100, 15]), (False, [10, 11, 14, 15])])
def test_the_label_at_a_seam(mask_seam, expected):
    cut = window([0, 1, 9, 10], [0, 1, 4, 5])
    batch = collator(mask_seam=mask_seam).assemble(rows(SIX), fixed(cut))
    assert batch["labels"].tolist() == [expected]
    assert batch["input_ids"].tolist() == [[10, 11, 14, 15]]


def test_seams_are_masked_after_padding_and_in_packs():
    cut = window([0, 1, 9, 10], [0, 1, 4, 5])
    left = PoSECollator(make_tokenizer(side="left"), target_length=64)
    batch = left.assemble(rows(range(50, 55), SIX), fixed(window(range(5)), cut))
    assert batch["labels"].tolist() == [[50, 51, 52, 53, 54], [-100, 10, 11, -100, 15]]
    packed = collator(stack_packs).assemble([rows(THREE, SIX)], fixed(W3, cut))
    assert packed["labels"].tolist() == [[20, 21, 22, 10, 11, -100, 15]]


def test_a_jump_over_unbroken_text_is_not_a_seam():
    batch = collator()(rows(range(40, 60)))
    assert (batch["labels"] != -100).all()
    assert int(batch["position_ids"].max()) > 19


@pytest.mark.parametrize("content", ["contiguous", "skip", "aligned"])
def test_tokens_and_positions_agree_with_the_windows(content):
    documents = [np.arange(1000, 1600), np.arange(2000, 2500)]
    settings = {"train_length": 16, "content": content, "chunks": 3}
    one = collator(**settings)
    batch = one(rows(*documents))
    for row, drawn in enumerate(draw_windows(documents, one.settings, 0)):
        assert batch["input_ids"][row].tolist() == documents[row][drawn.content].tolist()
        assert batch["position_ids"][row].tolist() == drawn.position_ids.tolist()
        if content == "aligned":
            assert (batch["input_ids"][row] - documents[row][0]).tolist() == drawn.position_ids.tolist()


def test_more_chunks_than_tokens():
    batch = collator(chunks=50)(rows(THREE, [5]))
    first, second = batch["position_ids"].tolist()
    assert first[0] == 0 and first[0] < first[1] < first[2] < 512
    assert second[0] == 0
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


# --- evaluation ------------------------------------------------------------------------------------------


def test_plain_gives_whole_documents_at_plain_positions():
    training = collator(train_length=4, content="skip")
    plain = training.plain()
    batch = plain(rows(SIX, THREE))
    assert lists(batch) == {
        "input_ids": [SIX, [20, 21, 22, 0, 0, 0]],
        "labels": [SIX, [20, 21, 22, -100, -100, -100]],
        "attention_mask": [[1] * 6, [1, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]],
    }
    assert plain.trained()["documents"] == 0
    assert training(rows(SIX))["input_ids"].shape == (1, 4)


def test_plain_packs():
    batch = collator(stack_packs).plain()([rows(SIX, THREE)])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2]]
    assert "attention_mask" not in batch


# --- refused ---------------------------------------------------------------------------------------------


def test_positions_of_three_dimensions_are_refused():
    def multimodal(features, **kwargs):
        return {**stack(features), "position_ids": torch.zeros(3, 1, 6, dtype=torch.int64)}

    with pytest.raises(PoSEError, match=r"shape \(3, 1, 6\): multimodal \(3-D\) positions cannot be skipped"):
        collator(multimodal)(rows(SIX))


def truncating(features, **kwargs):
    return {key: value[:, :4] for key, value in stack(features).items()}


def truncating_with_a_mask(features, **kwargs):
    batch = truncating(features)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def adding(features, **kwargs):
    ids = torch.tensor([[1, *features[0]["input_ids"]]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    "inner, sentence",
    [
        (truncating, "returned 4 columns for a row of 6 tokens"),
        (truncating_with_a_mask, "returned 4 tokens for a row of 6"),
        (adding, "returned 7 tokens for a row of 6"),
    ],
)
def test_inner_collators_that_change_lengths_are_refused(inner, sentence):
    with pytest.raises(PoSEError, match=sentence):
        collator(inner)(rows(SIX))


@pytest.mark.parametrize(
    "given, words",
    [
        ({"input_ids": [SIX]}, "input_ids is of type list"),
        ({"input_ids": np.array([SIX])}, "input_ids is of type ndarray"),
        ({"input_ids": torch.tensor([SIX]), "labels": [SIX]}, "labels is of type list"),
        ({"text": ["a"]}, "input_ids is missing"),
    ],
)
def test_an_inner_collator_that_returns_no_tensors_is_refused(given, words):
    with pytest.raises(PoSEError, match=rf"in which {words}; .*return_tensors='pt'"):
        collator(lambda features: given)(rows(SIX))


@pytest.mark.parametrize("column", [{"labels": [-100] * 3 + SIX[3:]}, {"assistant_masks": [0, 0, 0, 1, 1, 1]}])
def test_an_inner_collator_that_replaces_labels_is_refused(column):
    """Rows of equal length: labels of others cannot be stacked by it, which is an error of its own."""
    features = [{"input_ids": SIX, **column}] * 2
    with pytest.raises(PoSEError, match=r"DataCollatorForLanguageModeling puts 12 tokens into the loss, .* name 6"):
        collator(language_modeling())(features)
    for keeps in (seq2seq(), trl_language_modeling()):
        assert lists(collator(keeps)(features))["labels"] == [[-100] * 3 + SIX[3:]] * 2


def test_a_document_beyond_the_target_is_refused():
    with pytest.raises(PoSEError, match="a training sample has 600 tokens, more than target_length=512"):
        collator()(rows(range(600)))
    # A train_length limits how much of it is read.
    assert collator(train_length=64)(rows(range(600)))["input_ids"].shape == (1, 64)


@pytest.mark.parametrize(
    "features, sentence",
    [
        ([], "called with no features"),
        ([{"text": "a"}], r"columns \['text'\], but no input_ids"),
        ([{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}], "preference data .* is not supported"),
        ([{"input_ids": []}], r"shape \(0,\); a non-empty 1-D list is needed"),
        ([{"input_ids": [[1, 2]]}], r"shape \(1, 2\); a non-empty 1-D list is needed"),
        ([torch.arange(3)], "a row is a Tensor; give dicts with input_ids"),
        ([[3, 4, 5]], "a row is a int; give dicts with input_ids"),
    ],
)
def test_features_without_tokens(features, sentence):
    with pytest.raises(PoSEError, match=sentence):
        collator()(features)


def test_a_collator_needs_something_to_pad_with():
    with pytest.raises(PoSEError, match="needs a tokenizer, or collate="):
        PoSECollator(target_length=64)
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    with pytest.raises(PoSEError, match=r"no pad token.*tokenizer.pad_token = tokenizer.eos_token"):
        PoSECollator(tokenizer, target_length=64)


def test_a_tokenizer_next_to_a_collator_finds_borders():
    """A function has no tokenizer of its own."""
    given = make_tokenizer()
    collate = PoSECollator(given, collate=lambda features: stack(features), target_length=64, sampler="sentences")
    assert collate.tokenizer is given
    assert collate(rows(SIX))["position_ids"].shape == (1, 6)


def test_a_processor_gives_its_tokenizer():
    from transformers import ProcessorMixin

    processor = ProcessorMixin.__new__(ProcessorMixin)
    processor.tokenizer = make_tokenizer()
    collate = PoSECollator(processor, target_length=64)
    assert collate.tokenizer is processor.tokenizer
    assert collate(rows(SIX, SIX[:3]))["input_ids"].shape == (2, 6)


def test_settings_of_a_collator_are_checked_when_it_is_made():
    with pytest.raises(PoSEError, match=r"PoSECollator\.chunks=0"):
        PoSECollator(make_tokenizer(), chunks=0)


# --- side effects ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_padding_of_a_row_of_any_type_is_removed(kind):
    document = one_document({"input_ids": kind([0, *SIX]), "attention_mask": kind([0] + [1] * 6)})
    assert {key: np.asarray(value).tolist() for key, value in document.items()} == {
        "input_ids": SIX, "attention_mask": [1] * 6
    }  # fmt: skip


def views(features, **kwargs):
    """Return tensors that share their memory with the first feature's."""
    return {key: torch.as_tensor(features[0][key])[None] for key in ("input_ids", "labels")}


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize("inner", [stack, views])
@pytest.mark.parametrize("cut", [window([0, 9], [0, 5]), Window(np.arange(6), np.arange(6), np.array([2]))])
def test_features_are_not_changed(kind, inner, cut):
    def features():
        return [{"input_ids": kind(SIX), "labels": kind(SIX), "position_ids": kind(SIX), "length": 6}]

    given = features()
    batch = collator(inner).assemble(given, fixed(cut))
    assert -100 in batch["labels"]
    for after, before in zip(given, features(), strict=True):
        assert list(after) == list(before)
        assert all(np.array_equal(after[key], before[key]) for key in before)


def test_labels_that_are_the_tokens_themselves():
    def shared(features, **kwargs):
        ids = torch.tensor([feature["input_ids"] for feature in features])
        return {"input_ids": ids, "labels": ids}

    batch = collator(shared).assemble(rows(SIX), fixed(window([0, 1, 9, 10], [0, 1, 4, 5])))
    assert batch["input_ids"].tolist() == [[10, 11, 14, 15]]
    assert batch["labels"].tolist() == [[10, 11, -100, 15]]


def test_counts():
    one = collator(train_length=8)
    assert one.trained() == {"documents": 0, "skipped": 0, "tokens": 0, "farthest": 0}
    first = one(rows(range(40, 60), SIX))["position_ids"]
    second = one(rows([5]))["position_ids"]
    farthest = [int(first[0].max()), int(first[1, :6].max()), int(second.max())]
    assert one.trained() == {
        "documents": 3,
        "skipped": (farthest[0] > 7) + (farthest[1] > 5),
        "tokens": 8 + 6 + 1,
        "farthest": max(farthest),
    }
    plain = collator(unskipped_ratio=1.0)
    plain(rows(SIX))
    assert plain.trained() == {"documents": 1, "skipped": 0, "tokens": 6, "farthest": 5}


def test_global_generators_are_not_moved():
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    collator()(rows(SIX))
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.array_equal(np.random.get_state()[1], state[1])


def test_a_copy_is_its_own():
    one = collator()
    other = copy.deepcopy(one)
    other.set_epoch(3)
    assert (one.epoch, other.epoch) == (0, 3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_reaches_workers_too(copied, without_workers):
    """They outlive an epoch, and what they draw is counted."""
    other = copied(PositionCollator(stack, {"target_length": 512}))
    loading = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    assert epochs(other, **loading) == without_workers
    assert other.trained()["documents"] == 3 * len(DOCUMENTS)


# --- epochs and dataloader workers -----------------------------------------------------------------------

DOCUMENTS = [list(range(start, start + size)) for start, size in zip(range(8, 72, 4), range(20, 36), strict=True)]


def epochs(collate, count=3, **loading):
    """Return the position ids of every batch, one list per epoch."""
    loader = DataLoader(rows(*DOCUMENTS), batch_size=3, collate_fn=collate, **loading)
    seen = []
    for epoch in range(count):
        collate.set_epoch(epoch)
        seen.append([batch["position_ids"].tolist() for batch in loader])
    return seen


@pytest.fixture(scope="module")
def without_workers():
    return epochs(collator())


def test_every_epoch_draws_new_positions(without_workers):
    for first, second in [(0, 1), (1, 2), (0, 2)]:
        pairs = zip(without_workers[first], without_workers[second], strict=True)
        assert all(a != b for a, b in pairs), "a batch of two epochs is the same"
    again = collator()
    again.set_epoch(1)
    assert epochs_of_one(again) == without_workers[1], "an epoch depends on the ones before it"


def epochs_of_one(collate):
    loader = DataLoader(rows(*DOCUMENTS), batch_size=3, collate_fn=collate)
    return [batch["position_ids"].tolist() for batch in loader]


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("persistent", [False, True], ids=["new", "persistent"])
def test_positions_do_not_depend_on_workers(workers, persistent, without_workers):
    collate = collator()
    loading = {"num_workers": workers, "persistent_workers": persistent, "multiprocessing_context": "fork"}
    assert epochs(collate, **loading) == without_workers
    trained = collate.trained()
    assert trained["documents"] == 3 * len(DOCUMENTS)
    assert trained["tokens"] == 3 * sum(map(len, DOCUMENTS))


def test_positions_do_not_depend_on_how_workers_start():
    # torch's own collator for rows of one length, so that the new interpreters do not import transformers.
    documents = [{"input_ids": torch.arange(start, start + 20)} for start in range(12)]
    collate = collator(default_collate)
    expected = [[collate_of(epoch, documents[i : i + 3]) for i in range(0, 12, 3)] for epoch in range(2)]
    loader = DataLoader(
        documents,
        batch_size=3,
        collate_fn=collate,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    for epoch in range(2):
        collate.set_epoch(epoch)
        assert [batch["position_ids"].tolist() for batch in loader] == expected[epoch]
    # The counts of the workers reach this process.
    assert collate.trained()["documents"] == 24
    assert collate.trained()["farthest"] == max(np.max(batch) for epoch in expected for batch in epoch)


def collate_of(epoch, features):
    one = collator(default_collate)
    one.set_epoch(epoch)
    return one(features)["position_ids"].tolist()


def test_a_collator_with_a_tokenizer_travels_to_workers():
    collate = PoSECollator(make_tokenizer(), target_length=512)
    arrived = pickle.loads(ForkingPickler.dumps(collate))
    collate.set_epoch(5)
    assert arrived.epoch == 5, "the epoch is not shared"
    assert arrived(rows(SIX))["position_ids"].tolist() == collate(rows(SIX))["position_ids"].tolist()
    assert collate.trained()["documents"] == 2, "the counts are not shared"


def test_shuffling_moves_positions_with_their_documents():
    loader = DataLoader(
        rows(*DOCUMENTS),
        batch_size=1,
        collate_fn=collator(),
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
    )
    shuffled = {tuple(b["input_ids"][0].tolist()): b["position_ids"][0].tolist() for b in loader}
    in_order = {
        tuple(b["input_ids"][0].tolist()): b["position_ids"][0].tolist()
        for b in DataLoader(rows(*DOCUMENTS), batch_size=1, collate_fn=collator())
    }
    assert list(shuffled) != list(in_order)
    assert shuffled == in_order


def test_positions_of_a_seed_stay_what_they_are():
    """A resumed run must find the positions of the run it resumes, also across versions of this package."""
    batch = collator(chunks=3)(rows(range(100, 112)))
    assert batch["position_ids"].tolist() == [[0, 1, 418, 419, 420, 421, 493, 494, 495, 496, 497, 498]]


@pytest.mark.parametrize(
    ("mask", "tokens"),
    [
        ([1, 1, 1, 1, 0, 0], [10, 11, 12, 13]),
        ([0, 0, 1, 1, 1, 1], [12, 13, 14, 15]),
        ([0, 1, 1, 1, 1, 0], [11, 12, 13, 14]),
    ],
)
def test_padding_from_tokenisation_is_removed(mask, tokens):
    collate = PoSECollator(make_tokenizer(), target_length=64)
    batch = collate([{"input_ids": SIX, "attention_mask": mask}, {"input_ids": SIX, "attention_mask": [1] * 6}])
    assert batch["input_ids"].tolist() == [[*tokens, 0, 0], SIX]
    assert batch["labels"].tolist() == [[*tokens, -100, -100], SIX]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    alone = collate([{"input_ids": tokens}])
    assert alone["position_ids"][0].tolist() == batch["position_ids"][0, :4].tolist(), "positions of the tokens alone"


def test_a_row_of_padding_alone_is_refused():
    collate = PoSECollator(make_tokenizer(), target_length=64)
    with pytest.raises(PoSEError, match="a non-empty 1-D list is needed"):
        collate([{"input_ids": [0] * 6, "attention_mask": [0] * 6}])


def test_tokens_hidden_in_the_middle_are_refused():
    collate = PoSECollator(make_tokenizer(), target_length=64)
    with pytest.raises(PoSEError, match="hides 1 of its tokens in the middle"):
        collate([{"input_ids": SIX, "attention_mask": [1, 1, 0, 1, 1, 1]}])


def test_arguments_that_are_not_a_tokenizer_or_a_collator():
    for wrong in ({"tokenizer": "gpt2"}, {"tokenizer": make_tokenizer(), "collate": 2048}):
        with pytest.raises(PoSEError, match="settings are keywords"):
            PoSECollator(**wrong, target_length=64)


@pytest.mark.parametrize(
    "columns, words",
    [
        ({"position_ids": [0, 1, 2, 0, 1, 2]}, "position_ids that restart"),
        ({"position_ids": torch.tensor([0, 1, 2, 3, 0, 1])}, "position_ids that restart"),
        ({"attention_mask": [1, 1, 1, 2, 2, 0]}, "an attention_mask that numbers 2 documents"),
    ],
)
@pytest.mark.parametrize("pack", [False, True])
def test_samples_that_were_packed_before(columns, words, pack):
    features = rows(SIX, **columns)
    with pytest.raises(PoSEError, match=words):
        collator()([features] if pack else features)


def test_a_column_of_positions_of_one_document():
    """Padding may count from 0 again, and is removed."""
    features = rows(SIX, position_ids=[0, 1, 2, 3, 0, 0], attention_mask=[1, 1, 1, 1, 0, 0])
    assert collator().assemble(features, fixed(W4))["position_ids"].tolist() == [[0, 1, 2, 7]]


def test_jumps_that_the_data_has_already_are_not_replaced_silently():
    with pytest.raises(PoSEError, match=r"position_ids with jumps.* Remove the column"):
        collator()(rows(SIX, position_ids=[0, 1, 2, 90, 91, 92]))


def test_packed_rows_without_a_trainer_set_up_for_them():
    feature = {"input_ids": SIX + THREE, "labels": SIX + THREE, "seq_lengths": [6, 3]}
    bound = collator(trl_language_modeling(padding_free=True))
    bound.packs = False
    with pytest.raises(PoSEError, match="rows are packed"):
        bound([feature])
    # Plain positions of evaluation are right with any rule.
    bound.training = False
    assert bound([feature])["position_ids"].tolist() == [[*range(6), *range(3)]]
