"""Which documents are used, and for what: filters, then each document to one task."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pose_plugin.synthesize.documents import (
    ENDINGS,
    Copies,
    Document,
    Spool,
    digest,
    file_hash,
    find_files,
    passed_over,
    pieces,
    read,
    tidy,
)
from pose_plugin.synthesize.output import Neutral
from pose_plugin.synthesize.settings import JOURNAL, MANIFEST, ROWS, SOURCES, Settings
from pose_plugin.synthesize.tasks.common import Item, item_of
from pose_plugin.utils.errors import PoSEError

SAME = "the same text again"


@dataclass
class Collection:
    """What was read.

    Attributes:
        long, short: documents within the band, and below it.
        dropped: reason → documents.
        markers: strings of chat templates that were split.
        files: path → sha256 of its bytes.
    """

    long: list[Document] = field(default_factory=list)
    short: list[Document] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    markers: int = 0
    documents: int = 0
    files: dict[str, str] = field(default_factory=dict)


def collect(settings: Settings, tokenizer: Any, show: Callable[[], object] = lambda: None) -> Collection:
    """Reads, tidies, filters and measures every document; their texts stay on disk.

    Raises:
        PoSEError: an input that cannot be read.
    """
    spool, neutral, found = Spool(), Neutral(tokenizer), Collection()
    whole, parts = Copies(), Copies()
    is_language = _language_filter(settings.languages)
    own = {(settings.output / name).resolve() for name in (ROWS, SOURCES, JOURNAL, MANIFEST)}
    files = find_files(settings.inputs, own)
    if others := passed_over(settings.inputs, own):
        found.dropped[f"files that do not end in {', '.join(ENDINGS)}"] = others
    for path in files:
        found.files[str(path)] = file_hash(path)
        for index, raw in read(path, settings.text_field):
            found.documents += 1
            text, markers = neutral(tidy(raw))
            if not text:
                found.dropped["empty"] += 1
            elif whole.same(text):
                found.dropped[SAME] += 1
            elif not is_language(text):
                found.dropped["another language"] += 1
            else:
                found.markers += markers
                _file(path, index, text, settings, tokenizer, spool, parts, found)
            show()
    return found


def _file(
    path: Path,
    index: int,
    text: str,
    settings: Settings,
    tokenizer: Any,
    spool: Spool,
    parts: Copies,
    found: Collection,
) -> None:
    """Puts a text, or the pieces of one that is split, where it belongs by its length."""
    for part, (piece, tokens) in enumerate(_cut(text, settings, tokenizer)):
        if tokens > settings.longest:
            found.dropped[f"longer than {settings.longest} tokens (--max-tokens)"] += 1
        elif tokens < min(settings.min_short, settings.shortest):
            found.dropped[f"shorter than {settings.min_short} tokens (--min-short)"] += 1
        elif parts.same(piece):
            found.dropped[SAME] += 1
        # Short ones on one subject may well be alike; groups keep copies apart by themselves.
        elif tokens >= settings.shortest and parts.like(piece):
            found.dropped["nearly the same text again"] += 1
        else:
            place = spool.add(piece)
            document = Document(str(path), index, part, digest(piece), tokens, len(piece), spool, place)
            (found.long if tokens >= settings.shortest else found.short).append(document)


def _cut(text: str, settings: Settings, tokenizer: Any) -> Iterator[tuple[str, int]]:
    tokens = count_tokens(tokenizer, text)
    if tokens <= settings.longest or settings.longer == "drop":
        yield text, tokens
        return
    # A little less, as a piece may have more tokens a character than the whole.
    for piece in pieces(text, tokens, round(settings.longest * 0.95)):
        yield piece, count_tokens(tokenizer, piece)


def count_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _language_filter(languages: tuple[str, ...]) -> Callable[[str], bool]:
    if not languages:
        return lambda text: True
    try:
        import py3langid
    except ImportError:
        raise PoSEError('--languages needs py3langid: pip install "pose-plugin[synthesize]"') from None
    known = {str(code) for code, _ in py3langid.rank("")}
    for language in languages:
        if language not in known:
            raise PoSEError(f"--languages {language!r} cannot be told; use ISO 639-1 codes, e.g. en,de")

    def fits(text: str) -> bool:
        # The middle: licences and tables of contents stand at the start.
        middle = max(0, len(text) // 2 - 2000)
        return str(py3langid.classify(text[middle : middle + 4000])[0]) in languages

    return fits


def assign(found: Collection, settings: Settings) -> list[Item]:
    """Gives each document to one task. The order is by hash, so that it is the same in every run.

    Long documents go round the tasks that still want some; short ones to groups for `compare`.

    Raises:
        PoSEError: there is nothing to ask about.
    """
    items: list[Item] = []
    for_long = [task for task in settings.tasks if task != "compare"]
    wanted = {task: settings.tasks[task] for task in for_long}
    for turn, document in enumerate(sorted(found.long, key=lambda each: _order(each, settings.seed))):
        open_tasks = [task for task in for_long if wanted[task] != 0]
        if not open_tasks:
            break
        task = open_tasks[turn % len(open_tasks)]
        left = wanted[task]
        wanted[task] = left - 1 if left is not None else None
        items.append(item_of(task, [document]))
    if "compare" in settings.tasks:
        short = sorted(found.short, key=lambda each: _order(each, settings.seed))
        most = min(settings.request_tokens, settings.longest)
        made = groups(short, settings.group_size, most)
        items += [item_of("compare", group) for group in made[: settings.tasks["compare"]]]
    if not items:
        raise PoSEError(
            f"none of {found.documents} documents can be used: {len(found.long)} have {settings.shortest} to "
            f"{settings.longest} tokens, {len(found.short)} are shorter{_reasons(found.dropped)}; widen --min-tokens "
            "and --max-tokens, or choose other --tasks"
        )
    return items


def _reasons(dropped: Counter[str]) -> str:
    return "".join(f", {count} {reason}" for reason, count in dropped.items())


def _order(document: Document, seed: int) -> str:
    return hashlib.sha256(f"{seed} {document.sha256}".encode("ascii")).hexdigest()


# Below, texts share their language and no subject; above, they are copies, and there is nothing to compare.
RELATED, COPY = 0.1, 0.9
ROWS_AT_ONCE = 256


def groups(documents: list[Document], size: int, most_tokens: int) -> list[list[Document]]:
    """Groups of 2 to `size` documents, no document twice, each of at most `most_tokens` tokens together."""
    if len(documents) < 2:
        return []
    vectors = _vectors([document.text for document in documents])
    free = set(range(len(documents)))
    found = []
    for start in range(0, len(documents), ROWS_AT_ONCE):
        block = (vectors[start : start + ROWS_AT_ONCE] @ vectors.T).toarray()
        for seed in range(start, min(start + ROWS_AT_ONCE, len(documents))):
            if seed in free:
                group = _around(seed, block[seed - start], vectors, documents, free, size, most_tokens)
                if len(group) > 1:
                    free -= set(group)
                    found.append([documents[i] for i in group])
    return found


def _around(
    seed: int,
    similarity: Any,
    vectors: Any,
    documents: list[Document],
    free: set[int],
    size: int,
    most_tokens: int,
) -> list[int]:
    group, tokens = [seed], documents[seed].tokens
    for other in sorted(free - {seed}, key=lambda i: (-similarity[i], i)):
        if similarity[other] < RELATED or len(group) == size:
            break
        is_copy = (vectors[group] @ vectors[other].T).max() > COPY
        if not is_copy and tokens + documents[other].tokens <= most_tokens:
            group.append(other)
            tokens += documents[other].tokens
    return group


def _vectors(texts: list[str]) -> Any:
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError:
        raise PoSEError('the task compare needs scikit-learn: pip install "pose-plugin[synthesize]"') from None
    # Runs of characters within words serve languages that write without spaces, too.
    words = TfidfVectorizer(analyzer="char_wb", ngram_range=(4, 5), sublinear_tf=True, max_features=1 << 17)
    return words.fit_transform(texts)
