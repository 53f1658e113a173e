"""Filter documents, assign each to one task, and group short ones by subject."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pose_plugin.synthesize.documents import (
    ENDINGS,
    Copies,
    Document,
    Spool,
    digest,
    file_hash,
    find_files,
    pieces,
    read,
)
from pose_plugin.synthesize.output import MarkerSplitter
from pose_plugin.synthesize.settings import JOURNAL, MANIFEST, ROWS, SOURCES, Settings
from pose_plugin.synthesize.tasks.common import Item, item_of
from pose_plugin.utils.clean import tidy
from pose_plugin.utils.errors import PoSEError, module_of_extra
from pose_plugin.utils.log import printable

SAME, ALIKE = "the same text again", "nearly the same text again"
# Cosines of documents. Below RELATED two share a language but no subject, above COPY there is nothing to compare.
RELATED, COPY = 0.1, 0.9
# Rows of the similarity matrix that are computed at a time.
ROWS_AT_ONCE = 256


@dataclass
class Collection:
    """The documents that were read.

    Attributes:
        long, short: documents within the band of lengths, and below it.
        dropped: reason → number of documents.
        markers: strings of chat templates that were split.
        documents: how many were read.
        files: path → sha256 of its bytes.
    """

    long: list[Document] = field(default_factory=list)
    short: list[Document] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    markers: int = 0
    documents: int = 0
    files: dict[str, str] = field(default_factory=dict)


def collect(settings: Settings, tokenizer: Any, show: Callable[[], object] = lambda: None) -> Collection:
    """Read, clean, filter and measure all documents. Their texts stay on disk.

    Args:
        show: called after each document.

    Raises:
        PoSEError: an input cannot be read.
    """
    split_markers, found = MarkerSplitter(tokenizer), Collection()
    whole, band = Copies(), _Band(settings, tokenizer, found)
    is_language = _language_filter(settings.languages)
    own = {(settings.output / name).resolve() for name in (ROWS, SOURCES, JOURNAL, MANIFEST)}
    files, skipped = find_files(settings.inputs, own)
    if skipped:
        found.dropped[f"files that do not end in {', '.join(ENDINGS)}"] = skipped
    for path in files:
        source = printable(str(path))
        found.files[source] = file_hash(path)
        for index, raw in read(path, settings.text_field):
            found.documents += 1
            text, markers = split_markers(tidy(raw))
            if not text:
                found.dropped["empty"] += 1
            elif whole.same(text):
                found.dropped[SAME] += 1
            elif not is_language(text):
                found.dropped["another language"] += 1
            else:
                found.markers += markers
                band.add(source, index, text)
            show()
    return found


class _Band:
    """Sorts texts by length into the long and the short ones of a collection."""

    def __init__(self, settings: Settings, tokenizer: Any, found: Collection) -> None:
        self._settings, self._tokenizer, self._found = settings, tokenizer, found
        self._spool, self._copies, self._split = Spool(), Copies(), Copies()

    def add(self, source: str, index: int, text: str) -> None:
        settings, found = self._settings, self._found
        cut = list(self._cut(text))
        # Pieces of two editions begin at other places, so that none is like another.
        if len(cut) > 1 and self._split.like(text):
            found.dropped[ALIKE] += 1
            return
        for part, (piece, tokens) in enumerate(cut):
            if tokens > settings.longest:
                found.dropped[f"longer than {settings.longest} tokens (--max-tokens)"] += 1
            elif tokens < min(settings.min_short, settings.shortest):
                found.dropped[f"shorter than {settings.min_short} tokens (--min-short)"] += 1
            elif self._copies.same(piece):
                found.dropped[SAME] += 1
            # Short documents on one subject may well be alike. `groups` keeps copies apart.
            elif tokens >= settings.shortest and self._copies.like(piece):
                found.dropped[ALIKE] += 1
            else:
                place = self._spool.add(piece)
                document = Document(source, index, part, digest(piece), tokens, len(piece), self._spool, place)
                (found.long if tokens >= settings.shortest else found.short).append(document)

    def _cut(self, text: str) -> Iterator[tuple[str, int]]:
        settings = self._settings
        tokens = self._count(text)
        if tokens <= settings.longest or settings.longer == "drop":
            yield text, tokens
            return
        # 5 % less, as a piece may have more tokens per character than the whole text. One with far more is cut again.
        for piece in pieces(text, tokens, round(settings.longest * 0.95)):
            yield from self._cut(piece)

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _language_filter(languages: tuple[str, ...]) -> Callable[[str], bool]:
    if not languages:
        return lambda text: True
    py3langid = module_of_extra("py3langid", "--languages needs py3langid", "synthesize")
    known = {str(code) for code, _ in py3langid.rank("")}
    for language in languages:
        if language not in known:
            raise PoSEError(f"--languages {language!r} is not supported; use ISO 639-1 codes, e.g. en,de")

    def fits(text: str) -> bool:
        # From the middle: licences and tables of contents are at the start.
        middle = max(0, len(text) // 2 - 2000)
        return str(py3langid.classify(text[middle : middle + 4000])[0]) in languages

    return fits


def assign(found: Collection, settings: Settings) -> list[Item]:
    """Assign each document to one task, in an order by hash that is the same in every run.

    Tasks take long documents in turn, as long as they want more. Short ones are grouped for `compare`.

    Raises:
        PoSEError: there is no document to ask about.
    """
    items: list[Item] = []
    left = {task: count for task, count in settings.tasks.items() if task != "compare"}
    for turn, document in enumerate(sorted(found.long, key=lambda each: _order(each, settings.seed))):
        unfilled = [task for task, count in left.items() if count != 0]
        if not unfilled:
            break
        task = unfilled[turn % len(unfilled)]
        count = left[task]
        left[task] = None if count is None else count - 1
        items.append(item_of(task, [document]))
    if "compare" in settings.tasks:
        short = sorted(found.short, key=lambda each: _order(each, settings.seed))
        least = settings.group_tokens or 0
        made = groups(short, settings.group_size, min(settings.request_tokens, settings.longest), least)
        items += [item_of("compare", group) for group in made[: settings.tasks["compare"]]]
        if least:
            reason = f"short, in no group of {least} tokens (--group-tokens)"
            found.dropped[reason] = len(short) - sum(map(len, made))
    if not items:
        reasons = "".join(f", {count} {reason}" for reason, count in found.dropped.items())
        raise PoSEError(
            f"none of {found.documents} documents can be used: {len(found.long)} have {settings.shortest} to "
            f"{settings.longest} tokens, {len(found.short)} are shorter{reasons}; change --min-tokens and "
            "--max-tokens, or choose other --tasks"
        )
    return items


def _order(document: Document, seed: int) -> str:
    return hashlib.sha256(f"{seed} {document.sha256}".encode("ascii")).hexdigest()


def groups(documents: list[Document], size: int, most_tokens: int, least_tokens: int = 0) -> list[list[Document]]:
    """Group documents on one subject: 2 to `size` each, of at most `most_tokens` tokens together, none used twice.

    Related documents alone rarely fill a long row. Up to `least_tokens`, the nearest others follow them, and the reader
    has to find the related ones among them. A group that stays smaller is left out.

    TF-IDF vectors need no model, GPU or request, and texts on one subject share their rarer words. scikit-learn's
    clusterings make groups of any size, but a row has room for a few documents. So each document is grouped, greedily,
    with its nearest ones that are still free.
    """
    if len(documents) < 2:
        return []
    vectors = _vectors([document.text for document in documents])
    free = set(range(len(documents)))
    found = []
    for start in range(0, len(documents), ROWS_AT_ONCE):
        block = (vectors[start : start + ROWS_AT_ONCE] @ vectors.T).toarray()
        for seed in range(start, start + len(block)):
            if seed not in free:
                continue
            similarity = block[seed - start]
            group, tokens = [seed], documents[seed].tokens
            for other in sorted(free - {seed}, key=lambda i: (-similarity[i], i)):
                filled = tokens >= least_tokens or len(group) < 2
                if (similarity[other] < RELATED and filled) or len(group) == size:
                    break
                is_copy = (vectors[group] @ vectors[other].T).max() > COPY
                if not is_copy and tokens + documents[other].tokens <= most_tokens:
                    group.append(other)
                    tokens += documents[other].tokens
            if len(group) > 1 and tokens >= least_tokens:
                free -= set(group)
                found.append([documents[i] for i in group])
    return found


def _vectors(texts: list[str]) -> Any:
    text = module_of_extra("sklearn.feature_extraction.text", "the task compare needs scikit-learn", "synthesize")
    # Runs of letters within words also serve languages that are written without spaces.
    return text.TfidfVectorizer(
        analyzer="char_wb", ngram_range=(4, 5), sublinear_tf=True, max_features=1 << 17
    ).fit_transform(texts)
