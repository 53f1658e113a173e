"""Wraps a data collator and gives its training batches skipped positions.

The inner collator pads and stacks as usual. This one cuts each document to its window before that, and afterwards
writes `position_ids` and what keeps the chunks of a document together:

- One document per row: a 2-D mask. With a mask, transformers does not read document borders from the positions. Without
  one, every jump would cut the chunks apart and nothing long would be learned.
- Packed documents: no mask, and every document starts at position 0. FlashAttention starts a document at the row's
  smallest position, and only in a batch of one row (see `one_row`); the other attention functions need
  `attention.restart_boundaries`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from pose_plugin.config import PoSESettings, parse_settings
from pose_plugin.positions import Window, draw_windows, make_sampler, plain_window
from pose_plugin.positions.samplers import BorderFinder
from pose_plugin.rope.read import RECORD_KEY, lookup, text_config
from pose_plugin.utils.arrays import counting, int_array
from pose_plugin.utils.errors import PoSEError

Feature = Mapping[str, Any]
Collate = Callable[..., Mapping[str, Any]]
DrawWindows = Callable[[Sequence[np.ndarray]], list[Window]]

IGNORED_LABEL = -100
_MOST_WORKERS = 256
# TRL's masks of what is in the loss, in rows that its own collator has not turned into labels yet.
_MASKS = ("assistant_masks", "completion_mask")
# Bookkeeping columns of the frameworks, which are not model inputs and could not be stacked.
_DROPPED = ("position_ids", "length", "seq_lengths")
# Columns with an entry per token in all frameworks; a column of another length could not be cut with the tokens.
_PER_TOKEN = ("labels", "attention_mask", "token_type_ids", *_MASKS)


class Packing(str, Enum):
    """How a row hands over several documents. `Packing | None`: None if each row is one document."""

    LISTS = "lists"
    """A list of features, as from Axolotl's multipack sampler."""
    SEQ_LENGTHS = "seq_lengths"
    """One feature with the lengths of its documents in a column `seq_lengths`, as from TRL; or a padding-free batch."""


class PositionCollator:
    """A collator around a collator.

    Args:
        collate: the inner collator: takes a list of features (or, from Axolotl's multipack sampler, a list of packs of
            features) and returns a batch of tensors with `input_ids` of shape (batch, length).
        settings: what to draw.
        padding_side: "right" or "left"; used only if the inner collator returns no attention mask.

    Attributes:
        training: False gives plain positions and whole documents, as evaluation needs them.
        one_row: True puts the packed rows of a batch one after the other into a single row, as FlashAttention needs it.
        packs: whether the trainer is set up for packed rows; None if no trainer is bound.
        target_from_model: True until `settle_target` has set a target that the settings leave to the model.

    Example:
        >>> pad = DataCollatorForSeq2Seq(tokenizer)
        >>> first = {"input_ids": [10, 11, 12, 13, 14, 15], "labels": [10, 11, 12, 13, 14, 15]}
        >>> second = {"input_ids": [20, 21, 22], "labels": [20, 21, 22]}

        One document per row:

        >>> collator = PositionCollator(pad, {"target_length": 64})
        >>> show(collator([first, second]))
        input_ids      [[10, 11, 12, 13, 14, 15], [20, 21, 22, 0, 0, 0]]
        labels         [[10, 11, 12, 13, 14, 15], [20, 21, 22, -100, -100, -100]]
        attention_mask [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]
        position_ids   [[0, 1, 2, 3, 4, 37], [0, 1, 28, 0, 1, 2]]

        Packed documents, here by a padding-free collator; the positions of a document are the same:

        >>> packed = PositionCollator(DataCollatorWithFlattening(), {"target_length": 64})
        >>> show(packed([first, second]))
        input_ids      [[10, 11, 12, 13, 14, 15, 20, 21, 22]]
        labels         [[-100, 11, 12, 13, 14, 15, -100, 21, 22]]
        position_ids   [[0, 1, 2, 3, 4, 37, 0, 1, 28]]

        A window of four tokens, one piece of the document per chunk. There is no loss on the token after the seam:

        >>> skip = PositionCollator(pad, {"target_length": 64, "train_length": 4, "content": "skip", "seed": 6})
        >>> show(skip([first]))
        input_ids      [[10, 11, 14, 15]]
        labels         [[10, 11, -100, 15]]
        attention_mask [[1, 1, 1, 1]]
        position_ids   [[0, 1, 28, 29]]
    """

    def __init__(self, collate: Collate, settings: PoSESettings | dict[str, Any], padding_side: str = "right") -> None:
        self.collate = collate
        self.settings = parse_settings(settings, where="PoSECollator")
        self.padding_side = padding_side
        self.training = True
        self.one_row = False
        self.packs: bool | None = None
        self.target_from_model = False
        self._sampler = make_sampler(self.settings)
        self._find: BorderFinder | None = None
        # In shared memory, so that dataloader workers that outlive an epoch see the next one.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        # One line per worker, so that none overwrites another's count: documents, documents with a skip, tokens,
        # farthest position; if jumps are at borders: documents cut anywhere, documents without a border to cut at.
        self._counts = torch.zeros(_MOST_WORKERS, 6, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """Return the epoch that positions are drawn for: 0, 1, …"""
        return int(self._epoch.item())

    def set_epoch(self, epoch: int) -> None:
        """Draw new positions from now on, those of `epoch`; also reaches dataloader workers that already run."""
        self._epoch.fill_(epoch)

    def settle_target(self, config: Any) -> None:
        """Take the target from the config of the model that will be trained, or compare it with that of the settings.

        Raises:
            PoSEError: they differ, or neither names a target.
        """
        built = (lookup(text_config(config), RECORD_KEY) or {}).get("target_length")
        if self.target_from_model:
            if built is None:
                raise PoSEError(
                    "PoSECollator has no target_length, and the model's config names none, as it is not from "
                    "extend_context. Write PoSECollator(tokenizer, target_length=32768)"
                )
            given = {name: getattr(self.settings, name) for name in self.settings.model_fields_set}
            self.settings = parse_settings(given | {"target_length": built}, where="PoSECollator")
            self.target_from_model = False
        elif built not in (None, self.settings.target_length):
            raise PoSEError(
                f"target_length={self.settings.target_length} of the collator, but the model was built by "
                f"extend_context(config, target_length={built}). Positions and frequencies must reach equally far: "
                "give both the same number, or leave it out of PoSECollator, which then takes the model's"
            )

    @property
    def tokenizer(self) -> Any:
        """Return the inner collator's tokenizer; trainers look for it here when they save."""
        return getattr(self.collate, "tokenizer", None)

    def plain(self) -> PositionCollator:
        """Return the same collator for evaluation: plain positions, whole documents."""
        other = PositionCollator(self.collate, self.settings, self.padding_side)
        other.training = False
        other.one_row = self.one_row
        return other

    def trained(self) -> dict[str, int]:
        """Count what was drawn so far in this process.

        Returns:
            documents; skipped (those with a jump); tokens; farthest (the farthest position). For samplers that jump at
            borders also anywhere (documents that were cut without regard to borders, as the sampler found none) and
            uncut (documents that stayed plain, as no border was in their window).
        """
        counts = self._counts
        bordered = {"anywhere": int(counts[:, 4].sum()), "uncut": int(counts[:, 5].sum())}
        return {
            "documents": int(counts[:, 0].sum()),
            "skipped": int(counts[:, 1].sum()),
            "tokens": int(counts[:, 2].sum()),
            "farthest": int(counts[:, 3].max()),
            **(bordered if self._sampler.border_finder is not None else {}),
        }

    def __call__(self, features: Sequence[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Collate features into a training batch.

        Args:
            features: dicts with `input_ids` (list or 1-D tensor) and any per-token columns; or packs of them.
            args, kwargs: for the inner collator.

        Returns:
            The inner collator's batch with `position_ids` of shape (batch, length), int64, and either a 2-D
            `attention_mask` (one document per row) or none (packed documents).

        Raises:
            PoSEError: a document longer than the target, 3-D positions, an inner collator that changes lengths.
        """
        return self._assemble(features, self._draw, args, kwargs)

    def assemble(self, features: Sequence[Any], draw: DrawWindows) -> dict[str, Any]:
        """Collate with the windows that `draw` returns, for tests and the self-test at startup."""
        return self._assemble(features, lambda documents: draw([_tokens(each) for each in documents]), (), {})

    def _assemble(
        self, features: Sequence[Any], draw: Callable[[list[Feature]], list[Window]], args: Any, kwargs: Any
    ) -> dict[str, Any]:
        if self.training and self.target_from_model:
            raise PoSEError(
                "PoSECollator has no target_length yet: give it, or train with a Trainer whose model is from "
                "extend_context"
            )
        rows, packing = _rows_of(features)
        rows = [[_one_document(document) for document in row] for row in rows]
        if getattr(self.collate, "reads_arrays", False):
            rows = [[_arrays(document) for document in row] for row in rows]
        windows = iter(draw([document for row in rows for document in row]))
        of_rows = [[next(windows) for _ in row] for row in rows]
        inner: list[Any] = [
            [_cut(document, window) for document, window in zip(row, of_row, strict=True)]
            for row, of_row in zip(rows, of_rows, strict=True)
        ]
        if packing is Packing.SEQ_LENGTHS:
            inner = [_joined(row) for row in inner]
        elif packing is None:
            inner = [row[0] for row in inner]
        batch = dict(self.collate(inner, *args, **kwargs))
        return self._finish(batch, of_rows, packing is not None)

    def _draw(self, features: list[Feature]) -> list[Window]:
        documents = [_tokens(feature) for feature in features]
        if not self.training:
            return [plain_window(len(tokens)) for tokens in documents]
        borders = self.borders(features) if self._sampler.border_finder is not None else None
        windows = [_from_zero(window) for window in draw_windows(documents, self.settings, self.epoch, borders)]
        self._count(windows)
        return windows

    def borders(self, features: Sequence[Feature]) -> list[np.ndarray | None]:
        """Return where each document may have a jump; for samplers with a `border_finder`."""
        if self._find is None:
            assert self._sampler.border_finder is not None
            self._find = self._sampler.border_finder(self.tokenizer)
        # Only finders for chats read the labels, so others do not pay for their conversion.
        chats = self._sampler.needs_chats
        return [self._find(_tokens(feature), supervised(feature) if chats else None) for feature in features]

    def _count(self, windows: list[Window]) -> None:
        info = torch.utils.data.get_worker_info()
        # Through numpy, as each operation on a tensor takes microseconds.
        line = self._counts.numpy()[(info.id + 1) % _MOST_WORKERS if info is not None else 0]
        sizes = [len(window.position_ids) for window in windows]
        last = [int(window.position_ids[-1]) for window in windows]
        jumped = [end >= size for end, size in zip(last, sizes, strict=True)]
        anywhere = sum(jump and window.borders is None for jump, window in zip(jumped, windows, strict=True))
        uncut = sum(window.borders == 0 for window in windows)
        line += (len(windows), sum(jumped), sum(sizes), 0, anywhere, uncut)
        line[3] = max(line[3], *last)

    def _finish(self, batch: dict[str, Any], rows: list[list[Window]], packed: bool) -> dict[str, Any]:
        """Write positions, mask and seam labels into the inner collator's batch.

        Args:
            batch: what the inner collator returned.
            rows: the windows of each row.
            packed: whether rows hold several documents.
        """
        shape = batch["input_ids"].shape
        # A padding-free collator stacks all rows into one.
        if shape[0] == 1 and len(rows) > 1:
            rows, packed = [[window for row in rows for window in row]], True
        self._require_fitting(batch.pop("position_ids", None), packed)
        # In numpy, which takes a third of torch's time for a few small rows.
        positions, mask = np.empty(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        labels = batch.get("labels") if self.settings.mask_seam else None
        if labels is not None and any(window.seams.size for windows in rows for window in windows):
            # A collator may return the tokens themselves as labels, or a view of the data set's memory.
            labels = batch["labels"] = labels.clone()
        for row, windows in enumerate(rows):
            size = sum(len(window.position_ids) for window in windows)
            begin = self._first_token(batch, row, size, packed)
            # Padding counts from 0: without a mask, it then is a separate document.
            positions[row, :begin] = counting(begin)
            positions[row, begin + size :] = counting(shape[1] - begin - size)
            mask[row, begin : begin + size] = 1
            for window in windows:
                end = begin + len(window.position_ids)
                positions[row, begin:end] = window.position_ids
                if labels is not None and window.seams.size:
                    labels[row, begin + torch.from_numpy(window.seams)] = IGNORED_LABEL
                begin = end
        batch["position_ids"] = torch.from_numpy(positions)
        if packed:
            batch.pop("attention_mask", None)
            return _one_row(batch) if self.one_row else batch
        batch["attention_mask"] = torch.from_numpy(mask)
        return batch

    def _require_fitting(self, given: torch.Tensor | None, packed: bool) -> None:
        """Raise PoSEError if the inner collator's positions or packing cannot be trained with skips."""
        if given is not None and given.ndim == 3:
            raise PoSEError(
                f"the inner collator returns position_ids of shape {tuple(given.shape)}: multimodal (3-D) "
                f"positions cannot be skipped. Train a text-only model, or a text-only checkpoint of this one"
            )
        if packed and self.training and self.packs is False:
            raise PoSEError(
                f"rows are packed (by a column seq_lengths, or by the collator {type(self.collate).__name__}), but the "
                "trainer is not set up for packed rows, and chunks would be cut apart. Let the trainer pack (Axolotl: "
                "sample_packing: true; TRL: packing=True or padding_free=True), or give single documents"
            )

    def _first_token(self, batch: dict[str, Any], row: int, size: int, packed: bool) -> int:
        """Return the column at which the row's tokens begin, after any padding on the left."""
        length = batch["input_ids"].shape[1]
        mask = batch.get("attention_mask")
        if mask is not None and mask.ndim == 2:
            real = np.asarray(mask[row]) != 0
            used = np.count_nonzero(real)
            if used != size:
                raise PoSEError(
                    f"the inner collator {type(self.collate).__name__} returned {used} tokens for a row of "
                    f"{size}. A collator that truncates or adds tokens cannot be wrapped: shorten the "
                    f"samples before it, or set train_length"
                )
            return int(real.argmax())
        if length < size:
            raise PoSEError(
                f"the inner collator {type(self.collate).__name__} returned {length} columns for a row of "
                f"{size} tokens. Shorten the samples before it, or set train_length"
            )
        return length - size if self.padding_side == "left" and not packed else 0


def _from_zero(window: Window) -> Window:
    """Shift positions so that they start at 0; rotary attention only depends on their distances.

    randpos starts anywhere. In a packed row, a start above the last position of the document before would be read as
    a jump inside that document.
    """
    first = int(window.position_ids[0])
    return window._replace(position_ids=window.position_ids - first) if first else window


def _rows_of(features: Sequence[Any]) -> tuple[list[list[Feature]], Packing | None]:
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
    own = {key: value for key, value in feature.items() if key not in _DROPPED}
    return [
        {key: value[begin:end] if _per_token(value, size) else value for key, value in own.items()}
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _joined(documents: list[Feature]) -> Feature:
    """Undo `_split`, after each document was cut to its window."""
    joined: dict[str, Any] = {}
    for key, value in documents[0].items():
        if _per_token(value, len(documents[0]["input_ids"])):
            joined[key] = np.concatenate([np.asarray(document[key]) for document in documents]).tolist()
        else:
            joined[key] = value
    joined["seq_lengths"] = [len(document["input_ids"]) for document in documents]
    return joined


def _cut(feature: Feature, window: Window) -> Feature:
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


def _one_row(batch: dict[str, Any]) -> dict[str, Any]:
    """Reshape every tensor of shape (batch, length) to (1, batch · length)."""
    shape = batch["input_ids"].shape
    alike = {k: v.reshape(1, -1) for k, v in batch.items() if isinstance(v, torch.Tensor) and v.shape == shape}
    return {**batch, **alike}


def _one_document(feature: Feature) -> Feature:
    """Return a document without the padding that it got when it was tokenised, which would be trained as text.

    Raises:
        PoSEError: columns of different lengths, several documents (a numbered mask or restarting position_ids), or
            tokens that the mask hides in the middle.
    """
    size = len(feature.get("input_ids", ()))
    for name in _PER_TOKEN:
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
    hidden = np.zeros(size, dtype=bool) if mask is None else np.asarray(mask) == 0
    found = (
        f"an attention_mask that numbers {np.max(mask)} documents" if mask is not None and np.max(mask) > 1 else None
    )
    if _per_token(positions, size) and bool((np.diff(np.asarray(positions)[~hidden]) < 1).any()):
        found = "position_ids that restart in the middle"
    if found:
        raise PoSEError(
            f"a sample of {size} tokens has {found}: packed documents would be trained as one. Give "
            "single documents and let the trainer pack, or name their lengths in a column seq_lengths; if the sample "
            "is one document, remove the column"
        )
    used = np.flatnonzero(~hidden) if mask is not None else hidden
    if used.size in (0, size):
        return feature
    begin, end = int(used[0]), int(used[-1]) + 1
    if end - begin != used.size:
        raise PoSEError(
            f"the attention_mask of one sample hides {end - begin - used.size} of its tokens in the middle; only "
            "padding at its ends can be removed. Remove the hidden tokens from the sample"
        )
    return {key: value[begin:end] if _per_token(value, size) else value for key, value in feature.items()}


def _per_token(value: Any, size: int) -> bool:
    return isinstance(value, (list, tuple, np.ndarray, torch.Tensor)) and len(value) == size


def documents_of(row: Feature) -> list[Feature]:
    """Return the documents of one row of a data set, as a training batch takes them."""
    rows, _ = _rows_of([row])
    return [_one_document(feature) for feature in rows[0]]


def supervised(feature: Feature) -> np.ndarray | None:
    """Return which tokens are in the loss, shape (n,), bool; None if the row does not say."""
    size = len(feature["input_ids"])
    if _per_token(feature.get("labels"), size):
        trained: np.ndarray = np.asarray(feature["labels"]) != IGNORED_LABEL
        return trained
    masks = [np.asarray(feature[name]) != 0 for name in _MASKS if _per_token(feature.get(name), size)]
    return np.logical_and.reduce(masks) if masks else None


def _arrays(feature: Feature) -> Feature:
    """Return a document with its per-token columns as arrays, so that each list is read once."""
    size = len(feature.get("input_ids", ()))
    return {
        key: int_array(value) if isinstance(value, list) and _per_token(value, size) else value
        for key, value in feature.items()
        if key not in _DROPPED
    }


def _tokens(feature: Feature) -> np.ndarray:
    if "input_ids" not in feature:
        if any(str(name).startswith(("chosen", "rejected")) for name in feature):
            raise PoSEError(
                f"a feature has the columns {sorted(feature)}: preference data (DPO, reward models) is not supported. "
                "Extend the window with SFTTrainer first"
            )
        raise PoSEError(
            f"a feature has the columns {sorted(feature)}, but no input_ids. Tokenise the data set first "
            "(SFTTrainer and Axolotl do), and keep dataset_kwargs={'skip_prepare_dataset': True} off"
        )
    tokens = int_array(feature["input_ids"])
    if tokens.ndim != 1 or tokens.size == 0:
        raise PoSEError(f"input_ids of one feature have shape {tokens.shape}; a non-empty 1-D list is needed")
    return tokens
