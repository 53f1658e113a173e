"""Reads the rows that a trainer hands to a collator: single documents, or several documents packed into one row."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from pose_plugin.positions import Window
from pose_plugin.utils.arrays import int_array
from pose_plugin.utils.errors import PoSEError

Feature = Mapping[str, Any]

IGNORED_LABEL = -100
# Masks of what is in the loss, in rows that TRL has not given labels: those of `apply_chat_template`, and rows with
# `skip_prepare_dataset`.
_MASKS = ("assistant_masks", "completion_mask")
# Columns that a collator reads, besides the inputs of the model. A trainer must not remove them.
COLUMNS = ("seq_lengths", *_MASKS)
# Columns of the frameworks that describe a whole row.
_OF_A_ROW = ("position_ids", "length", "seq_lengths")
# Columns that are not model inputs and could not be stacked.
_DROPPED = (*_OF_A_ROW, *_MASKS)
# Columns with an entry per token in all frameworks; a column of another length could not be cut with the tokens.
_PER_TOKEN = ("labels", "attention_mask", "token_type_ids", *_MASKS)


class Packing(str, Enum):
    """How a row hands over several documents. `Packing | None`: None if each row is one document."""

    LISTS = "lists"
    """A list of features, as from Axolotl's multipack sampler."""
    SEQ_LENGTHS = "seq_lengths"
    """One feature with the lengths of its documents in a column `seq_lengths`, as from TRL; or a padding-free batch."""


def is_packed(dataset: Any) -> bool:
    """Return whether rows of a data set name the lengths of their documents. Rows of a stream are not read."""
    columns = getattr(dataset, "column_names", None)
    if columns is None and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset):
        # A list, or a data set of torch: its rows name the columns.
        columns = dataset[0] if isinstance(dataset[0], Mapping) else None
    return "seq_lengths" in (columns or ())


def rows_of(features: Sequence[Any]) -> tuple[list[list[Feature]], Packing | None]:
    """Return each row as the list of its documents, and how rows hand them over.

    Raises:
        PoSEError: no rows, rows of several kinds, or lengths of documents that do not add up.
    """
    kinds = {_packing_of(feature) for feature in features}
    if not kinds:
        raise PoSEError("the collator was called with no features")
    if len(kinds) > 1:
        names = " and ".join(sorted("single documents" if kind is None else kind.value for kind in kinds))
        raise PoSEError(f"one batch has rows of several kinds ({names}); give all rows the column seq_lengths, or none")
    (packing,) = kinds
    if packing is Packing.LISTS:
        return [list(pack) for pack in features], packing
    if packing is Packing.SEQ_LENGTHS:
        return [_split(feature) for feature in features], packing
    return [[feature] for feature in features], packing


def _packing_of(feature: Any) -> Packing | None:
    for each in feature if isinstance(feature, list) else [feature]:
        if not isinstance(each, Mapping):
            raise PoSEError(f"a row is a {type(each).__name__}; give dicts with input_ids, and labels if it has any")
    if isinstance(feature, list):
        return Packing.LISTS
    return Packing.SEQ_LENGTHS if "seq_lengths" in feature else None


def _split(feature: Feature) -> list[Feature]:
    """Return the documents of a row that TRL packed; `seq_lengths` holds their lengths.

    Raises:
        PoSEError: the lengths do not add up to the row, so tokens would be lost or positions would run back.
    """
    lengths = np.asarray(feature["seq_lengths"])
    size = len(feature.get("input_ids", ()))
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 1).any() or lengths.sum() != size:
        raise PoSEError(
            f"seq_lengths={reprlib.repr(lengths.tolist())} of a row of {size} tokens: give the length of each of "
            "its documents, whole numbers of at least 1 that add up to the row"
        )
    ends = np.cumsum(lengths).tolist()
    own = {key: value for key, value in feature.items() if key not in _OF_A_ROW}
    return [
        {key: value[begin:end] if _per_token(value, size) else value for key, value in own.items()}
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def joined(documents: list[Feature]) -> Feature:
    """Undo `_split`, after each document was cut to its window."""
    joined: dict[str, Any] = {}
    for key, value in documents[0].items():
        if _per_token(value, len(documents[0]["input_ids"])):
            joined[key] = np.concatenate([np.asarray(document[key]) for document in documents]).tolist()
        else:
            joined[key] = value
    joined["seq_lengths"] = [len(document["input_ids"]) for document in documents]
    return joined


def cut(feature: Feature, window: Window) -> Feature:
    """Keep the window's tokens in every per-token column, and drop the columns that the batch does not need."""
    size = len(feature["input_ids"])
    whole = len(window.content) == size
    result = {}
    for key, value in feature.items():
        if key in _DROPPED:
            continue
        if whole or not _per_token(value, size):
            result[key] = value
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            result[key] = value[window.content]
        else:
            result[key] = np.asarray(value)[window.content].tolist()
    return result


def one_document(feature: Feature) -> Feature:
    """Return a document without the padding that it got when it was tokenised, which would be trained as text.

    Raises:
        PoSEError: columns of different lengths, several documents (a numbered mask or restarting position_ids),
            position_ids that jump, or tokens that the mask hides in the middle.
    """
    size = len(feature.get("input_ids", ()))
    # Masks of the loss are not read next to labels. TRL shortens only the labels.
    for name in _PER_TOKEN if "labels" not in feature else _PER_TOKEN[: -len(_MASKS)]:
        if name in feature and not _per_token(feature[name], size):
            raise PoSEError(
                f"one sample has {size} input_ids and {np.size(feature[name])} {name}; give one per token (labels: "
                f"{IGNORED_LABEL} for no loss), or remove the column"
            )
    mask, positions = feature.get("attention_mask"), feature.get("position_ids")
    # Counting is the fastest way to read a list of ones.
    if isinstance(mask, list) and mask.count(1) == size:
        mask = None
    if mask is None and positions is None:
        return feature
    # A data set may give tensors, of which np.max takes none.
    numbers = np.ones(size, dtype=int) if mask is None else np.asarray(mask)
    hidden, last = numbers == 0, numbers.max(initial=0)
    found = f"an attention_mask that numbers {last} documents" if last > 1 else None
    steps = np.diff(np.asarray(positions)[~hidden]) if _per_token(positions, size) else np.ones(1)
    if (steps < 1).any():
        found = "position_ids that restart in the middle"
    elif (steps > 1).any():
        raise PoSEError(
            f"a sample of {size} tokens has position_ids with jumps, which would be replaced by those that this "
            "package draws. Remove the column"
        )
    if found:
        raise PoSEError(
            f"a sample of {size} tokens has {found}: packed documents would be trained as one. Give "
            "single documents and let the trainer pack, or name their lengths in a column seq_lengths; if the sample "
            "is one document, remove the column"
        )
    used = np.flatnonzero(~hidden) if mask is not None else hidden
    if used.size == size:
        return feature
    begin, end = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
    if end - begin != used.size:
        raise PoSEError(
            f"the attention_mask of one sample hides {end - begin - used.size} of its tokens in the middle; only "
            "padding at its ends can be removed. Remove the hidden tokens from the sample"
        )
    return {key: value[begin:end] if _per_token(value, size) else value for key, value in feature.items()}


def labelled(feature: Feature) -> Feature:
    """Return a document with `labels`, if it has none but masks of what is in the loss; else the document itself.

    Without labels, inner collators take every token into the loss.
    """
    masked = "labels" not in feature and any(name in feature for name in _MASKS)
    trained = supervised(feature) if masked else None
    if trained is None:
        return feature
    return {**feature, "labels": np.where(trained, int_array(feature["input_ids"]), IGNORED_LABEL).tolist()}


def _per_token(value: Any, size: int) -> bool:
    return isinstance(value, (list, tuple, np.ndarray, torch.Tensor)) and len(value) == size


def documents_of(row: Feature) -> list[Feature]:
    """Return the documents of one row of a data set, as a training batch takes them."""
    rows, _ = rows_of([row])
    return [one_document(feature) for feature in rows[0]]


def supervised(feature: Feature) -> np.ndarray | None:
    """Return which tokens are in the loss, shape (n,), bool; None if the row does not say."""
    size = len(feature["input_ids"])
    if _per_token(feature.get("labels"), size):
        trained: np.ndarray = np.asarray(feature["labels"]) != IGNORED_LABEL
        return trained
    masks = [np.asarray(feature[name]) != 0 for name in _MASKS if _per_token(feature.get(name), size)]
    return np.logical_and.reduce(masks) if masks else None


def arrays(feature: Feature) -> Feature:
    """Return a document with its per-token columns as arrays, so that each list is read once."""
    size = len(feature.get("input_ids", ()))
    return {
        key: int_array(value) if isinstance(value, list) and _per_token(value, size) else value
        for key, value in feature.items()
        if key not in _DROPPED
    }


def tokens_of(feature: Feature) -> np.ndarray:
    if "input_ids" not in feature:
        if any(str(name).startswith(("chosen", "rejected")) for name in feature):
            raise PoSEError(
                f"a feature has the columns {sorted(feature)}: preference data (DPO, reward models) is not supported. "
                "Extend the window with SFTTrainer first"
            )
        raise PoSEError(
            f"a feature has the columns {sorted(feature)}, but no input_ids. Tokenise the data set first "
            "(SFTTrainer and Axolotl do, unless skip_prepare_dataset is set)"
        )
    tokens = int_array(feature["input_ids"])
    if tokens.ndim != 1 or tokens.size == 0:
        raise PoSEError(f"input_ids of one feature have shape {tokens.shape}; a non-empty 1-D list is needed")
    return tokens
