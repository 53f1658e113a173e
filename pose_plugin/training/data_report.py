"""Check the training rows before the first step: which tokens are in the loss, and whether chats are complete.

No framework reports rows that train nothing, answers without labels, or labels that run into the next question. Each
warning names the number of a row, so that the user can look at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from pose_plugin.collator import PositionCollator
from pose_plugin.config import PoSESettings
from pose_plugin.features import IGNORED_LABEL, documents_of, supervised, tokens_of
from pose_plugin.positions import make_sampler
from pose_plugin.positions.turn_borders import TurnTokens, headers_behind_ends, turn_tokens
from pose_plugin.utils.errors import PoSEError

# Enough to judge a data set; reading more would delay the start of every run.
MOST_ROWS, MOST_TOKENS = 1000, 2_000_000


# What may be wrong with a document, and what the log says of the rows with it; {window} is train_length and
# {target} target_length.
FINDINGS = {
    "empty": "have no tokens, and the run will stop at the first of them. Drop them",
    "long": "have more tokens than target_length={target}, and the run will stop at the first of them. Shorten them, "
    "or set train_length to the window to be taken from them",
    # The trainer removes the column that shows it.
    "padded": "have padding that is read as text, as the trainer removes attention_mask. Tokenise without padding",
    # No token of the window is in the loss.
    "silent": "have no token in the loss and train nothing. Drop them; if answers are after the window (train_length="
    "{window}), lengthen the window or shorten the documents",
    # The window ends before the last token that is in the loss.
    "cut": "have answers after the window (train_length={window}), which are not trained. Lengthen the window or drop "
    "longer rows",
    "shifted": "have labels that differ from the tokens at their positions. Models shift labels themselves: labels are "
    f"the input_ids, or {IGNORED_LABEL}",
    "lost": "have an answer in the loss and a later one that is not. This happens if a text quotes the chat template. "
    "Check the row; ignore this if it is intended",
    # The header after the end of a turn is in the loss, although other tokens of the row are not.
    "running": "have the header of a turn in the loss. This happens if the assistant's mask runs into the next question"
    " (a template that ends {{% generation %}} in white space). Check the row; ignore this if an answer quotes a chat",
    "whole": "are chats with every token in the loss, questions included. To train answers only, set "
    "assistant_only_loss=True in TRL, or type: chat_template with roles_to_train: [assistant] in Axolotl",
    "pieces": "are chats longer than the window, and content={content} drops parts of them, so answers lose their "
    "questions. Use content: contiguous for chats",
}


@dataclass
class RowReport:
    """What was found in the documents that were checked.

    Attributes:
        documents: the number of documents.
        bordered: those with a border for a jump, for samplers that need chats.
        counts: the number of documents with each of the `FINDINGS`.
        first: the first document with each of them.
    """

    documents: int = 0
    bordered: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def warnings(self, settings: PoSESettings) -> list[str]:
        """Return a sentence for each finding, with its first row and the fix."""
        values = {"window": settings.train_length, "content": settings.content, "target": settings.target_length}
        return [
            f"{self.counts[name]} of {self.documents} rows {sentence.format(**values)} (the first: {self.first[name]})"
            for name, sentence in FINDINGS.items()
            if self.counts[name]
        ]


def look_at_rows(dataset: Any, collator: PositionCollator, columns: Collection[str] | None = None) -> RowReport | None:
    """Check rows from all over a data set, as the collator will get them.

    Args:
        dataset: with a length and rows by number; a stream is not read.
        collator: the training collator.
        columns: those that the trainer leaves in the rows; None: all.

    Returns:
        the report; None if the rows cannot be read.

    Raises:
        PoSEError: no row trains anything, or none has a border for the jumps of a sampler that needs chats.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    settings, tokenizer = collator.settings, collator.tokenizer
    headers = turn_tokens(tokenizer)
    needs_chats = make_sampler(settings).needs_chats
    report = RowReport()
    for number, feature, padded in _documents(dataset, columns):
        report.documents += 1
        for name in [*_findings(feature, settings, headers), *(["padded"] if padded else [])]:
            report.counts[name] += 1
            if name not in report.first:
                report.first[name] = f"row {number}, {_excerpt(feature, tokenizer)}"
        if needs_chats and len(feature["input_ids"]):
            (offered,) = collator.borders([feature])
            size = settings.train_length or len(feature["input_ids"])
            report.bordered += int(offered is not None and bool((offered < size).any()))
    if not report.documents:
        return None
    if report.counts["silent"] == report.documents:
        raise PoSEError(
            f"train_length={settings.train_length}: none of {report.documents} rows has a token in the loss within the "
            f"window (the first: {report.first['silent']}). Check which roles are trained and the chat template; if "
            "answers are after the window, lengthen it"
        )
    if needs_chats and not report.bordered:
        raise PoSEError(
            f"sampler={settings.sampler} found no border between turns in {report.documents} rows. It reads labels "
            "(answers in the loss, questions not) and the chat template. Mask the questions (TRL: "
            "assistant_only_loss=True; Axolotl: type: chat_template), or use sampler: pose"
        )
    return report


def _findings(feature: Any, settings: PoSESettings, headers: TurnTokens | None) -> Iterator[str]:
    """Yield the names of what is wrong with a document."""
    if not np.size(feature["input_ids"]):
        yield "empty"
        return
    tokens = tokens_of(feature)
    if settings.train_length is None and len(tokens) > settings.target_length:
        yield "long"
    trained = supervised(feature)
    places = headers_behind_ends(tokens, headers)
    size = settings.train_length or len(tokens)
    # Other contents take the window from anywhere in the document.
    reach = size if settings.content == "contiguous" else len(tokens)
    # No model predicts the first token of a document.
    if not (np.ones(len(tokens), dtype=bool) if trained is None else trained)[1:reach].any():
        yield "silent"
    if trained is None or trained.all():
        if places:
            yield "whole"
        return
    if trained[1:size].any() and trained[size:].any() and settings.content == "contiguous":
        yield "cut"
    if "labels" in feature and (np.asarray(feature["labels"])[trained] != tokens[trained]).any():
        yield "shifted"
    if places and trained[list(places)].any():
        yield "running"
    if headers is not None and _lost(trained, places, np.isin(tokens, headers.closing)):
        yield "lost"
    if trained.any() and len(tokens) > size and settings.content != "contiguous":
        yield "pieces"


def _lost(trained: np.ndarray, places: dict[int, bool], closing: np.ndarray) -> bool:
    """Return whether an assistant's turn without labels follows one with labels.

    Args:
        trained: (length,) whether each token is in the loss.
        places: first position of each turn → whether the turn is the assistant's.
        closing: (length,) whether each token can end a turn.
    """
    begins = [*sorted(places), len(trained)]
    seen = False
    for begin, end in pairwise(begins):
        if not places[begin]:
            continue
        labelled = bool(trained[begin:end].any())
        # The last turn may have been cut off before its first word.
        if seen and not labelled and (end < len(trained) or closing[begin:].any()):
            return True
        seen = seen or labelled
    return False


def _documents(dataset: Any, columns: Collection[str] | None) -> Iterator[tuple[int, Any, bool]]:
    """Yield the number of a row, each of its documents, and whether padding in the row is read as text."""
    tokens = 0
    for number in _spread(dataset):
        row = dataset[number]
        if not isinstance(row, Mapping) or "input_ids" not in row or tokens > MOST_TOKENS:
            return
        # TRL shortens input_ids and labels only, and removes other columns that would not fit them.
        left = {name: value for name, value in row.items() if columns is None or name in columns}
        for document in documents_of(left):
            tokens += len(document["input_ids"])
            yield number, document, "attention_mask" not in left and _pads(row)


def _spread(dataset: Any) -> range:
    """Return the numbers of the rows to read. They are spread, as texts may come first and chats after them."""
    size = len(dataset)
    row = dataset[0] if size else None
    longest = np.size(row["input_ids"]) if isinstance(row, Mapping) and "input_ids" in row else 0
    most = max(1, min(MOST_ROWS, MOST_TOKENS // max(longest, 1)))
    return range(0, size, -(-size // most) or 1)


def _pads(row: Mapping[str, Any]) -> bool:
    """Return whether the mask of a row, which may be longer than its tokens, hides one of them."""
    mask = row.get("attention_mask")
    return mask is not None and bool((np.asarray(mask)[: len(row["input_ids"])] == 0).any())


def _excerpt(feature: Any, tokenizer: Any) -> str:
    ids: Sequence[int] = np.asarray(feature["input_ids"])[:16].tolist()
    if not hasattr(tokenizer, "decode"):
        return f"which begins with the tokens {ids}"
    return f"which begins {tokenizer.decode(ids)!r}"
