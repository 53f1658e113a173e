"""A look at the training rows before the first step: what is in the loss, and what chats need.

Rows that train nothing, answers that fell out of the loss and labels that run into the next question make no noise in
any framework. What is found is told with the number of a row, so that it can be looked at.
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

# Enough to see what a data set is like; a longer look would delay the start of every run.
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
    """What was seen in the documents that were looked at.

    Attributes:
        documents: how many.
        chats: documents in which a part is in the loss, or the headers of turns are.
        silent: no token of the window is in the loss.
        cut: the window ends before the last token that is in the loss.
        shifted: a label is another token than the one at its place.
        lost: an answer is in the loss and a later one is not.
        running: a header behind the end of a turn is in the loss, although other tokens of the row are not.
        whole: a chat with every token in the loss.
        pieces: a chat longer than the window, of which content takes pieces.
        borders: documents with a place for a jump, with a sampler that asks.
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
        """Sentences that name the first row of each kind and the way out."""
        window = settings.train_length
        said = {
            "silent": "have no token in the loss and train nothing. Drop them; where an answer stands behind the "
            f"window (train_length={window}), lengthen the window or shorten the documents",
            "cut": f"have answers, or a part of one, behind the window (train_length={window}), which are not "
            "trained. Lengthen the window, or drop longer rows",
            "shifted": "have labels that are not the tokens at their places. Models shift labels themselves: labels "
            f"are the input_ids, or {IGNORED_LABEL}",
            "lost": "have an answer in the loss and a later one that is not, as where text that quotes the chat "
            "template ends the search for answers. Look at the row; if it is so on purpose, all is well",
            "running": "have the header of a turn in the loss, as where an assistant's mask runs on into the next "
            "question (a template that ends {% generation %} in white space). Look at the row; if an answer quotes a "
            "chat, all is well",
            "whole": "are chats with every token in the loss, questions included. For answers alone: "
            "assistant_only_loss=True in TRL, type: chat_template with roles_to_train: [assistant] in Axolotl",
            "pieces": f"are chats longer than the window, and content={settings.content} leaves parts of them out: "
            "the answers then belong to a text that is not there. Use content: contiguous for chats",
        }
        return [
            f"{found.count} of {self.documents} rows {text} (the first: {found.first})"
            for name, text in said.items()
            if (found := getattr(self, name)).count
        ]


def look_at_rows(dataset: Any, collator: PositionCollator) -> RowReport | None:
    """Looks at the first rows of a data set as the collator will see them.

    Args:
        dataset: with a length, and rows by number; a stream is not looked at.
        collator: the training collator.

    Returns:
        what was seen; None where rows cannot be looked at.

    Raises:
        PoSEError: no row trains anything, or none offers a place for the jumps of a sampler that needs chats.
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
            f"none of {report.documents} rows has a token in the loss within the window (train_length="
            f"{settings.train_length}; the first: {report.silent.first}): nothing would be trained. Check which roles "
            "are trained and the chat template; where answers stand behind the window, lengthen it"
        )
    if make_sampler(settings).needs_chats and report.documents and not report.borders:
        raise PoSEError(
            f"sampler={settings.sampler} found no border between turns in {report.documents} rows: all would stay "
            "plain, or be cut anywhere. It reads labels (answers in the loss, questions not) and the tokenizer's chat "
            "template. Mask the questions (TRL: assistant_only_loss=True; Axolotl: type: chat_template), or use "
            "sampler: pose"
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
    """Whether a turn of an assistant without a label follows one with labels."""
    begins = [*sorted(places), len(trained)]
    seen = False
    for begin, end in pairwise(begins):
        if not places[begin]:
            continue
        labelled = bool(trained[begin:end].any())
        # The last one may have been cut off before its first word.
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
