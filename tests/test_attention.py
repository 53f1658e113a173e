"""Which tokens see which: change a token of chunk 1, and compare the logits elsewhere.

The batches come from the collator. Each case removes its mask or adds one, with the boundary rule or without.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import masking_utils

from pose_plugin import attention
from pose_plugin.attention import (
    RestartBoundaries,
    needs_one_row,
    require_packing_support,
    restart_boundaries,
    restart_rule,
)
from pose_plugin.collator import PositionCollator
from pose_plugin.positions import Window
from pose_plugin.utils.errors import PoSEError
from tests.models import make_llama
from tests.reference_kernels import flash_attention
from tests.test_collator import stack_packs

SIZE, JUMP = 10, 5
ORIGINAL = masking_utils.find_packed_sequence_indices


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    yield
    assert masking_utils.find_packed_sequence_indices is ORIGINAL


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            made[name] = make_llama("sdpa" if "flash" in name else name, max_position_embeddings=512).train()
            if "flash" in name:
                made[name].config._attn_implementation = name
        return made[name]

    return get


def batch_of(packed, rows=1, jump=300, one_row=False):
    """Return rows of one or three documents of ten tokens, each with a jump in its middle."""
    documents = 3 if packed else 1
    generator = np.random.default_rng(0)
    ids = generator.integers(8, 120, (rows, documents, SIZE)).tolist()
    features = [[{"input_ids": document, "labels": document} for document in row] for row in ids]
    indices = np.arange(SIZE)
    window = Window(indices, indices + np.where(indices >= JUMP, jump, 0), np.zeros(0, dtype=np.int64))
    collator = PositionCollator(stack_packs if packed else stack_single, {"target_length": 512})
    collator.one_row = one_row
    given = features if packed else [row[0] for row in features]
    batch = collator.assemble(given, lambda documents: [window] * len(documents))
    batch.pop("labels")
    return batch


def stack_single(features, **kwargs):
    return stack_packs([[feature] for feature in features])


def effects(model, batch, packed):
    """Return the largest change of a logit within chunk 1, in chunk 2, and in the other documents and rows."""
    begin = SIZE if packed else 0
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, begin + 1 : begin + JUMP] += 1
    # flex_attention runs uncompiled: compiling takes a minute and gives the same numbers.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        difference = (model(**changed).logits - model(**batch).logits).abs()
    row = difference[0]
    others = torch.cat([row[:begin].flatten(), row[begin + SIZE :].flatten(), difference[1:].flatten()])
    return (
        float(row[begin + 1 : begin + JUMP].max()),
        float(row[begin + JUMP : begin + SIZE].max()),
        float(others.max()) if others.numel() else 0.0,
    )


# packed, mask, rule → chunk 2 sees chunk 1, neighbours see it. The first line is the silent fault; the last two lines
# are why packed rows have no mask.
TRUTH = [
    (False, "none", False, False, False),
    (False, "none", True, True, False),
    (False, "ones", False, True, False),
    (False, "ones", True, True, False),
    (True, "none", False, False, False),
    (True, "none", True, True, False),
    (True, "ones", False, True, True),
    (True, "ones", True, True, True),
]


@pytest.mark.parametrize("name", attention.RULED_BY_POSITIONS)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("packed, mask, rule, sees, leaks", TRUTH)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_truth_table(models, name, rows, checkpointing, packed, mask, rule, sees, leaks):
    model = models(name)
    if checkpointing:
        model.gradient_checkpointing_enable()
    else:
        model.gradient_checkpointing_disable()
    batch = batch_of(packed, rows)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"]) if mask == "ones" else None
    with restart_boundaries() if rule else nullcontext():
        within, after, neighbour = effects(model, batch, packed)
    # The silent fault is exactly 0, not small.
    assert within > 1e-2
    assert after > 1e-3 if sees else after == 0.0
    assert neighbour > 1e-3 if leaks else neighbour == 0.0


@pytest.mark.parametrize("packed", [False, True])
def test_what_the_collator_returns_is_right(models, packed):
    batch = batch_of(packed, 2)
    assert ("attention_mask" in batch) is not packed
    with restart_boundaries():
        _, after, neighbour = effects(models("sdpa"), batch, packed)
    assert after > 1e-3 and neighbour == 0.0


def test_a_cache_mixes_packed_documents(models):
    """The reason for turning the cache off with packed rows: with a cache, transformers looks for no documents."""
    batch = {**batch_of(True), "use_cache": True}
    model = models("eager")
    model.gradient_checkpointing_disable()
    with restart_boundaries():
        _, _, neighbour = effects(model, batch, packed=True)
    assert neighbour > 1e-3


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_ordinary_packed_rows_are_cut_as_before(models, name):
    batch = {**batch_of(True, 2, jump=0), "attention_mask": None}
    with torch.no_grad():
        before = models(name)(**batch).logits
        with restart_boundaries():
            during = models(name)(**batch).logits
    assert torch.equal(before, during)


@pytest.mark.parametrize(
    "positions, documents",
    [
        ([[0, 1, 2, 3]], None),
        ([[0, 1, 9, 10]], None),
        ([[5, 6, 7], [0, 4, 8]], None),
        ([[0, 1, 0, 1, 2]], [[0, 0, 1, 1, 1]]),
        ([[0, 7, 8, 0, 3, 0]], [[0, 0, 0, 1, 1, 2]]),
        # Documents of one token, and padding that counts from 0.
        ([[0, 0, 0, 1]], [[0, 1, 2, 2]]),
        ([[0, 1, 2, 3], [0, 5, 0, 1]], [[0, 0, 0, 0], [0, 0, 1, 1]]),
        # The ordinary rule and this one differ in jumps only.
        ([[0, 1, 40, 39, 41]], [[0, 0, 0, 1, 1]]),
    ],
)
def test_restart_rule(positions, documents):
    result = restart_rule(torch.tensor(positions))
    assert (None if result is None else result.tolist()) == documents


def test_restart_rule_can_be_traced():
    compiled = torch.compile(restart_rule, fullgraph=True, backend="eager")
    # A traced function must not depend on values, so it also numbers a single document.
    assert compiled(torch.tensor([[0, 1, 9, 10]])).tolist() == [[0, 0, 0, 0]]
    assert compiled(torch.tensor([[0, 9, 0, 5]])).tolist() == [[0, 0, 1, 1]]


def test_the_rule_is_undone_after_use_and_after_an_exception():
    with restart_boundaries():
        assert masking_utils.find_packed_sequence_indices is restart_rule
    assert masking_utils.find_packed_sequence_indices is ORIGINAL
    with pytest.raises(KeyError), restart_boundaries():
        raise KeyError
    assert masking_utils.find_packed_sequence_indices is ORIGINAL


def test_the_rule_within_the_rule():
    with restart_boundaries():
        with restart_boundaries():
            pass
        assert masking_utils.find_packed_sequence_indices is restart_rule, "the inner one undid the outer one"


def test_undoing_what_was_not_installed_changes_nothing():
    RestartBoundaries().undo()
    boundaries = RestartBoundaries()
    boundaries.install()
    boundaries.undo()
    boundaries.undo()
    assert masking_utils.find_packed_sequence_indices is ORIGINAL


def raises(position_ids):
    raise TypeError


@pytest.mark.parametrize(
    "other",
    [
        lambda position_ids: None,
        lambda position_ids: torch.zeros_like(position_ids),
        lambda position_ids, extra: None,
        raises,
        None,
    ],
    ids=["none", "zeros", "signature", "raises", "gone"],
)
def test_an_unknown_rule_is_not_replaced(monkeypatch, other):
    if other is None:
        monkeypatch.delattr(masking_utils, "find_packed_sequence_indices")
    else:
        monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", other)
    with pytest.raises(PoSEError, match=r"transformers .* another rule.*sample_packing: false"):
        RestartBoundaries().install()
    assert getattr(masking_utils, "find_packed_sequence_indices", None) is other
    monkeypatch.undo()


@pytest.mark.parametrize(
    "name", ["eager", "sdpa", "flex_attention", "flash_attention_2", "kernels-community/flash-attn3"]
)
def test_attention_functions_that_can_be_packed(models, name):
    model = make_llama("sdpa")
    model.config._attn_implementation = name
    require_packing_support(model)


def test_an_unknown_attention_function_is_refused():
    model = make_llama("sdpa")
    model.config._attn_implementation = "sage"
    with pytest.raises(PoSEError, match=r"attn_implementation=sage .*eager, sdpa, .*packing off"):
        require_packing_support(model)


# --- FlashAttention, with a kernel of plain torch instead ------------------------------------------------


@pytest.fixture
def borders():
    """Run FlashAttention on CPU, and yield the list of `cu_seqlens_q` that reach it."""
    with flash_attention() as seen:
        yield seen


@pytest.mark.parametrize("version", [2, 3, 4])
def test_flash_attention_finds_the_documents(models, borders, version):
    model = models(f"flash_attention_{version}")
    within, after, neighbour = effects(model, batch_of(packed=True), packed=True)
    assert within > 1e-2 and after > 1e-3 and neighbour == 0.0
    assert borders == [[0, 10, 20, 30]] * len(borders) and borders


def test_flash_attention_agrees_with_the_rule_of_the_others(models, borders):
    batch = batch_of(packed=True)
    with torch.no_grad():
        ours = models("flash_attention_2")(**batch).logits
        with restart_boundaries():
            other = models("eager")(**batch).logits
    torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("mask", ["ours", "none"])
def test_flash_attention_of_one_document_per_row(models, borders, rows, mask):
    batch = batch_of(packed=False, rows=rows)
    if mask == "none":
        batch["attention_mask"] = None
    _, after, neighbour = effects(models("flash_attention_2"), batch, packed=False)
    assert after > 1e-3 and neighbour == 0.0


def test_flash_attention_of_padded_rows(models, borders):
    batch = batch_of(packed=False, rows=2)
    batch["attention_mask"][1, 7:] = 0
    _, after, neighbour = effects(models("flash_attention_2"), batch, packed=False)
    assert after > 1e-3 and neighbour == 0.0
    assert borders == [[0, 10, 17]] * len(borders) and borders


def test_flash_attention_loses_documents_that_do_not_start_alike(models, borders):
    """The reason for starting every packed document at 0."""
    batch = batch_of(packed=True)
    batch["position_ids"][:, 10:20] += 40
    with torch.no_grad():
        models("flash_attention_2")(**batch)
    assert borders == [[0, 20, 30]] * len(borders) and borders


def test_flash_attention_mixes_packed_rows_of_a_larger_batch(models, borders):
    """The reason for `one_row`: transformers only looks for documents in a batch of one row."""
    _, _, neighbour = effects(models("flash_attention_2"), batch_of(packed=True, rows=2), packed=True)
    assert neighbour > 1e-3


def test_packed_rows_joined_into_one(models, borders):
    batch = batch_of(packed=True, rows=2, one_row=True)
    assert batch["input_ids"].shape == (1, 60)
    _, after, neighbour = effects(models("flash_attention_2"), batch, packed=True)
    assert after > 1e-3 and neighbour == 0.0
    assert borders == [[0, 10, 20, 30, 40, 50, 60]] * len(borders) and borders


@pytest.mark.parametrize(
    "name, one_row",
    [
        ("eager", False),
        ("sdpa", False),
        ("flex_attention", False),
        ("flash_attention_2", True),
        ("flash_attention_4", True),
        ("kernels-community/flash-attn3", True),
        ("xformers", True),
    ],
)
def test_which_attention_functions_need_one_row(name, one_row):
    model = make_llama("sdpa")
    model.config._attn_implementation = name
    assert needs_one_row(model) is one_row
