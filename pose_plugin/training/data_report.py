"""Check the training rows before the first step: which tokens are in the loss, and whether chats are complete.

No framework reports rows that train nothing, answers without labels, or labels that run into the next question. Each
warning names the number of a row, so that the user can look at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from pose_plugin.collator import IGNORED_LABEL, PositionCollator, documents_of, supervised
from pose_plugin.config import PoSESettings
from pose_plugin.positions import make_sampler
from pose_plugin.positions.turn_borders import TurnTokens, headers_behind_ends, turn_tokens
from pose_plugin.utils.errors import PoSEError

# Enough to judge a data set; reading more would delay the start of every run.
MOST_ROWS, MOST_TOKENS = 1000, 2_000_000


@dataclass
class Found:
    """Rows with one property: how many, and the first of them."""

    count: int = 0
    first: str = ""

    def add(self, name: Callable[[], str]) -> None:
        self.count += 1
        self.first = self.first or name()


@dataclass
class RowReport:
    """Counts of what was found in the documents that were checked.

    Attributes:
        documents: the number of documents.
        chats: documents with labels on a part of their tokens, or with headers of turns.
        silent: no token of the window is in the loss.
        cut: the window ends before the last token that is in the loss.
        shifted: a label differs from the token at its position.
        lost: an answer is in the loss and a later one is not.
        running: the header after the end of a turn is in the loss, although other tokens of the row are not.
        whole: a chat with every token in the loss.
        pieces: a chat longer than the window, of which `content` takes pieces.
        borders: documents with a place for a jump, for samplers that need one.
    """

    documents: int = 0
    chats: int = 0
    silent: Found = field(default_factory=Found)
    cut: Found = field(default_factory=Found)
    shifted: Found = field(default_factory=Found)
    lost: Found = field(default_factory=Found)
    running: Found = field(default_factory=Found)
    whole: Found = field(default_factory=Found)
    pieces: Found = field(default_factory=Found)
    borders: int = 0

    def warnings(self, settings: PoSESettings) -> list[str]:
        """Return a sentence for each property that was found, with its first row and the fix."""
        window = settings.train_length
        sentences = {
            "silent": "have no token in the loss and train nothing. Drop them; if answers are after the window "
            f"(train_length={window}), lengthen the window or shorten the documents",
            "cut": f"have answers after the window (train_length={window}), which are not trained. Lengthen the window "
            "or drop longer rows",
            "shifted": "have labels that differ from the tokens at their positions. Models shift labels themselves: "
            f"labels are the input_ids, or {IGNORED_LABEL}",
            "lost": "have an answer in the loss and a later one that is not. This happens if a text quotes the chat "
            "template. Check the row; ignore this if it is intended",
            "running": "have the header of a turn in the loss. This happens if the assistant's mask runs into the next "
            "question (a template that ends {% generation %} in white space). Check the row; ignore this if an answer "
            "quotes a chat",
            "whole": "are chats with every token in the loss, questions included. To train answers only, set "
            "assistant_only_loss=True in TRL, or type: chat_template with roles_to_train: [assistant] in Axolotl",
            "pieces": f"are chats longer than the window, and content={settings.content} drops parts of them, so "
            "answers lose their questions. Use content: contiguous for chats",
        }
        return [
            f"{found.count} of {self.documents} rows {text} (the first: {found.first})"
            for name, text in sentences.items()
            if (found := getattr(self, name)).count
        ]


def look_at_rows(dataset: Any, collator: PositionCollator) -> RowReport | None:
    """Check the first rows of a data set as the collator will get them.

    Args:
        dataset: with a length and rows by number; a stream is not read.
        collator: the training collator.

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
    for number, feature in _documents(dataset):

        def name(row: int = number, document: Any = feature) -> str:
            return f"row {row}, {_excerpt(document, tokenizer)}"

        _look(report, feature, settings, headers, name)
        if needs_chats:
            (offered,) = collator.borders([feature])
            size = settings.train_length or len(feature["input_ids"])
            report.borders += int(offered is not None and bool((offered < size).any()))
    _require(report, settings)
    return report if report.documents else None


def _require(report: RowReport, settings: PoSESettings) -> None:
    if report.documents and report.silent.count == report.documents:
        raise PoSEError(
            f"train_length={settings.train_length}: none of {report.documents} rows has a token in the loss within the "
            f"window (the first: {report.silent.first}). Check which roles are trained and the chat template; if "
            "answers are after the window, lengthen it"
        )
    if make_sampler(settings).needs_chats and report.documents and not report.borders:
        raise PoSEError(
            f"sampler={settings.sampler} found no border between turns in {report.documents} rows. It reads labels "
            "(answers in the loss, questions not) and the chat template. Mask the questions (TRL: "
            "assistant_only_loss=True; Axolotl: type: chat_template), or use sampler: pose"
        )


def _look(
    report: RowReport,
    feature: Any,
    settings: PoSESettings,
    headers: TurnTokens | None,
    name: Callable[[], str],
) -> None:
    tokens = np.asarray(feature["input_ids"])
    trained = supervised(feature)
    report.documents += 1
    places = headers_behind_ends(tokens, headers)
    partly = trained is not None and bool(trained.any()) and not bool(trained.all())
    if partly or places:
        report.chats += 1
    if trained is None or trained.all():
        if places:
            report.whole.add(name)
        return
    size = settings.train_length or len(tokens)
    if not trained[:size].any():
        report.silent.add(name)
    elif trained[size:].any() and settings.content == "contiguous":
        report.cut.add(name)
    labels = np.asarray(feature["labels"]) if "labels" in feature else None
    if labels is not None and (labels[trained] != tokens[trained]).any():
        report.shifted.add(name)
    if places and trained[list(places)].any():
        report.running.add(name)
    if headers is not None and _lost(trained, places, np.isin(tokens, headers.closing)):
        report.lost.add(name)
    if partly and len(tokens) > size and settings.content != "contiguous":
        report.pieces.add(name)


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


def _documents(dataset: Any) -> Iterator[tuple[int, Any]]:
    rows, tokens = 0, 0
    for number in range(min(len(dataset), MOST_ROWS)):
        row = dataset[number]
        if not isinstance(row, Mapping) or "input_ids" not in row or tokens > MOST_TOKENS:
            return
        for document in documents_of(row):
            rows, tokens = rows + 1, tokens + len(document["input_ids"])
            yield number, document


def _excerpt(feature: Any, tokenizer: Any) -> str:
    ids: Sequence[int] = np.asarray(feature["input_ids"])[:16].tolist()
    if not hasattr(tokenizer, "decode"):
        return f"which begins with the tokens {ids}"
    return f"which begins {tokenizer.decode(ids)!r}"
