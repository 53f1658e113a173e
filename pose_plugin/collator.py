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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pose_plugin.config import PoSESettings, parse_settings
from pose_plugin.features import (
    IGNORED_LABEL,
    Feature,
    Packing,
    arrays,
    cut,
    joined,
    labelled,
    one_document,
    rows_of,
    supervised,
    tokens_of,
)
from pose_plugin.positions import Window, draw_windows, make_sampler, plain_window
from pose_plugin.positions.samplers import BorderFinder
from pose_plugin.rope.read import RECORD_KEY, lookup, text_config
from pose_plugin.utils.arrays import counting
from pose_plugin.utils.errors import PoSEError

Collate = Callable[..., Mapping[str, Any]]
DrawWindows = Callable[[Sequence[np.ndarray]], list[Window]]

_MOST_WORKERS = 256


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

    Examples:
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, and share its epoch and counts too: `copy.deepcopy` and `pickle` put them into own memory."""
        self.__dict__.update(state)
        self._epoch.share_memory_()
        self._counts.share_memory_()

    @property
    def epoch(self) -> int:
        """Return the epoch that positions are drawn for: 0, 1, …"""
        return int(self._epoch.item())

    def set_epoch(self, epoch: int) -> None:
        """Draw new positions from now on, those of `epoch`; also reaches dataloader workers that already run."""
        self._epoch.fill_(epoch)

    def settle_target(self, config: Any) -> None:
        """Take the target from the config of the model that will be trained, or compare it with that of the settings.

        The model may be built for the margin too.

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
        elif built is not None and not 0 <= built - self.settings.target_length <= self.settings.target_margin:
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

    def restart_counts(self) -> None:
        """Count what is drawn from now on, as a new run needs it."""
        self._counts.zero_()

    def trained(self) -> dict[str, int]:
        """Count what was drawn in this process, since the last `restart_counts`.

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
            PoSEError: a document longer than the target, 3-D positions, an inner collator that changes lengths or
                labels.
        """
        return self._assemble(features, self._draw, args, kwargs)

    def assemble(self, features: Sequence[Any], draw: DrawWindows) -> dict[str, Any]:
        """Collate with the windows that `draw` returns, for tests and the self-test at startup."""
        return self._assemble(features, lambda documents: draw([tokens_of(each) for each in documents]), (), {})

    def _assemble(
        self, features: Sequence[Any], draw: Callable[[list[Feature]], list[Window]], args: Any, kwargs: Any
    ) -> dict[str, Any]:
        if self.training and self.target_from_model:
            raise PoSEError(
                "PoSECollator has no target_length yet: give it, or train with a Trainer whose model is from "
                "extend_context"
            )
        rows, packing = rows_of(features)
        rows = [[labelled(one_document(document)) for document in row] for row in rows]
        if getattr(self.collate, "reads_arrays", False):
            rows = [[arrays(document) for document in row] for row in rows]
        windows = iter(draw([document for row in rows for document in row]))
        of_rows = [[next(windows) for _ in row] for row in rows]
        inner: list[Any] = [
            [cut(document, window) for document, window in zip(row, of_row, strict=True)]
            for row, of_row in zip(rows, of_rows, strict=True)
        ]
        if packing is Packing.SEQ_LENGTHS:
            inner = [joined(row) for row in inner]
        elif packing is None:
            inner = [row[0] for row in inner]
        batch = dict(self.collate(inner, *args, **kwargs))
        self._require_tensors(batch)
        self._require_labels(batch, inner)
        return self._finish(batch, of_rows, packing)

    def _draw(self, features: list[Feature]) -> list[Window]:
        documents = [tokens_of(feature) for feature in features]
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
        return [self._find(tokens_of(feature), supervised(feature) if chats else None) for feature in features]

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

    def _finish(self, batch: dict[str, Any], rows: list[list[Window]], packing: Packing | None) -> dict[str, Any]:
        """Write positions, mask and seam labels into the inner collator's batch.

        Args:
            batch: what the inner collator returned.
            rows: the windows of each row.
            packing: how rows handed over their documents.
        """
        shape = batch["input_ids"].shape
        # A padding-free collator stacks all rows into one.
        flat = shape[0] == 1 and len(rows) > 1
        if flat:
            rows = [[window for row in rows for window in row]]
        packed = flat or packing is not None
        # Nothing before a document predicts its first token. Lists are Axolotl's, which leaves the label there.
        first = packed and packing is not Packing.LISTS
        self._require_fitting(batch.pop("position_ids", None), packed)
        # In numpy, which takes a third of torch's time for a few small rows.
        positions, mask = np.empty(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        seams = self.settings.mask_seam and any(window.seams.size for windows in rows for window in windows)
        labels = batch.get("labels") if first or seams else None
        if labels is not None:
            # A collator may return the tokens themselves as labels, or a view of the data set's memory.
            labels = batch["labels"] = labels.clone()
        for row, windows in enumerate(rows):
            size = sum(len(window.position_ids) for window in windows)
            begin = self._first_token(batch, row, size, flat)
            # Padding counts from 0: without a mask, it then is a separate document.
            positions[row, :begin] = counting(begin)
            positions[row, begin + size :] = counting(shape[1] - begin - size)
            mask[row, begin : begin + size] = 1
            for window in windows:
                end = begin + len(window.position_ids)
                positions[row, begin:end] = window.position_ids
                if labels is not None and seams:
                    labels[row, begin + torch.from_numpy(window.seams)] = IGNORED_LABEL
                if labels is not None and first:
                    labels[row, begin] = IGNORED_LABEL
                begin = end
        batch["position_ids"] = torch.from_numpy(positions)
        if packed:
            batch.pop("attention_mask", None)
            return _one_row(batch) if self.one_row else batch
        batch["attention_mask"] = torch.from_numpy(mask)
        return batch

    def _require_tensors(self, batch: dict[str, Any]) -> None:
        """Raise PoSEError if the inner collator returns no torch tensors, as with `return_tensors="np"`."""
        name = "labels" if "labels" in batch and isinstance(batch.get("input_ids"), torch.Tensor) else "input_ids"
        if not isinstance(batch.get(name), torch.Tensor):
            given = f"of type {type(batch[name]).__name__}" if name in batch else "missing"
            raise PoSEError(
                f"the inner collator {type(self.collate).__name__} returns a batch in which {name} is {given}; "
                "training needs a torch tensor of shape (rows, length). Set its return_tensors='pt', or leave collate "
                "out: PoSECollator then pads by itself"
            )

    def _require_labels(self, batch: dict[str, Any], inner: list[Any]) -> None:
        """Raise PoSEError if the inner collator puts tokens into the loss that the rows' labels leave out."""
        features = [feature for row in inner for feature in (row if isinstance(row, list) else [row])]
        if getattr(self.collate, "reads_arrays", False) or not all("labels" in feature for feature in features):
            return
        given = sum(np.count_nonzero(np.asarray(feature["labels"]) != IGNORED_LABEL) for feature in features)
        made = int((batch["labels"] != IGNORED_LABEL).sum()) if "labels" in batch else 0
        if made > given:
            raise PoSEError(
                f"the inner collator {type(self.collate).__name__} puts {made} tokens into the loss, but the labels or "
                f"masks of the rows name {given}: it replaces labels by the tokens. Leave collate out, as PoSECollator "
                "keeps labels, or wrap one that keeps them too, such as DataCollatorForSeq2Seq"
            )

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
                "trainer is not set up for packed rows: the chunks of a document could not attend to each other. Let "
                "the trainer pack (Axolotl: sample_packing: true; TRL: packing=True or padding_free=True), or give "
                "single documents"
            )

    def _first_token(self, batch: dict[str, Any], row: int, size: int, flat: bool) -> int:
        """Return the column at which the row's tokens begin, after any padding on the left.

        Collators that stack all rows into one pad on the right, TRL's even if there is only one row.
        """
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
        flat = flat or getattr(self.collate, "padding_free", False)
        return length - size if self.padding_side == "left" and not flat else 0


def _from_zero(window: Window) -> Window:
    """Shift positions so that they start at 0; rotary attention only depends on their distances.

    randpos starts anywhere. In a packed row, a start above the last position of the document before would be read as
    a jump inside that document.
    """
    first = int(window.position_ids[0])
    return window._replace(position_ids=window.position_ids - first) if first else window


def _one_row(batch: dict[str, Any]) -> dict[str, Any]:
    """Reshape every tensor of shape (batch, length) to (1, batch · length)."""
    shape = batch["input_ids"].shape
    alike = {k: v.reshape(1, -1) for k, v in batch.items() if isinstance(v, torch.Tensor) and v.shape == shape}
    return {**batch, **alike}
