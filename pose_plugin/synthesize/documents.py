"""Documents: found and read from files, tidied, cut into pieces, compared with those that were there before.

A collection for windows of 80K tokens does not fit in memory: texts lie on disk.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import tempfile
import unicodedata
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pose_plugin.utils.errors import PoSEError

TEXTS = (".txt", ".md", ".markdown")
ENDINGS = (*TEXTS, ".jsonl", ".parquet")


def _inside(folder: Path, own: Collection[Path]) -> list[Path]:
    """Every file in a folder, in order of names, without hidden ones and those that this command writes."""
    found = sorted(path for path in folder.rglob("*") if not _hidden(path.relative_to(folder)))
    return [path for path in found if path.is_file() and path.resolve() not in own]


def passed_over(inputs: Iterable[Path], own: Collection[Path] = ()) -> int:
    """How many files in the folders have an ending that is not read; hidden ones are not counted."""
    inside = (each for path in inputs if path.is_dir() for each in _inside(path, own))
    return sum(each.suffix.lower() not in ENDINGS for each in inside)


def find_files(inputs: Iterable[Path], own: Collection[Path] = ()) -> list[Path]:
    """Every readable file, folders walked in order of names, hidden ones left out.

    Args:
        own: resolved paths of what this command writes, which may lie in an input folder.

    Raises:
        PoSEError: a path does not exist, has an unknown ending, or nothing is found.
    """
    found: dict[Path, None] = {}
    for path in inputs:
        if path.is_dir():
            inside = _inside(path, own)
            found.update(dict.fromkeys(each for each in inside if each.suffix.lower() in ENDINGS))
        elif not path.exists():
            raise PoSEError(f"input {path} does not exist; name files or folders of documents")
        elif path.suffix.lower() not in ENDINGS:
            raise PoSEError(f"input {path} ends in {path.suffix or 'nothing'}; readable are {', '.join(ENDINGS)}")
        else:
            found[path] = None
    if not found:
        raise PoSEError(
            f"no document in {', '.join(map(str, inputs))}: looked for files that end in {', '.join(ENDINGS)}"
        )
    return list(found)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def read(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    """Yields (index, text) of every document in a file.

    Raises:
        PoSEError: what is in the file cannot be read, with its place.
    """
    ending = path.suffix.lower()
    if ending in TEXTS:
        yield 0, _decode(path, path.read_bytes())
    elif ending == ".jsonl":
        yield from _lines(path, text_field)
    else:
        yield from _parquet(path, text_field)


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _hash(file)


def _hash(file: Any) -> str:
    found = hashlib.sha256()  # Python 3.10
    for block in iter(lambda: file.read(1 << 20), b""):
        found.update(block)
    return found.hexdigest()


def _decode(where: object, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        source = "UTF-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
        way = f"convert it (iconv -f {source} -t UTF-8), or leave it out"
        if b"\0" in data and source != "UTF-16":
            way = "it is no text; leave it out"
        raise PoSEError(f"{where}: byte {error.start} is not UTF-8; {way}") from None


def _lines(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            where = f"{path}, line {number + 1}"
            try:
                row = json.loads(_decode(where, line))
            except json.JSONDecodeError as error:
                raise PoSEError(f"{where}: no JSON ({error}); each line must be one object") from None
            if not isinstance(row, dict):
                raise PoSEError(f"{where}: a {type(row).__name__}, not an object with {text_field!r}")
            yield number, _text(where, row, text_field)


def _parquet(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise PoSEError(f'{path} needs pyarrow: pip install "pose-plugin[synthesize]"') from None
    try:
        file = parquet.ParquetFile(path)
        if text_field not in file.schema_arrow.names:
            _missing(path, file.schema_arrow.names, text_field)
        number = 0
        for batch in file.iter_batches(batch_size=64, columns=[text_field]):
            for row in batch.to_pylist():
                yield number, _text(f"{path}, row {number}", row, text_field)
                number += 1
    except (ArrowException, OSError) as error:
        raise PoSEError(f"{path} is no readable parquet file: {error}") from None


def _text(where: str, row: dict[str, Any], text_field: str) -> str:
    if text_field not in row:
        _missing(where, list(row), text_field)
    if row[text_field] is None:
        return ""  # counted like every empty text
    if not isinstance(row[text_field], str):
        raise PoSEError(f"{where}: {text_field!r} is {type(row[text_field]).__name__}, not text; see --text-field")
    return row[text_field]


def _missing(where: object, names: list[str], text_field: str) -> None:
    raise PoSEError(f"{where}: no field {text_field!r}; there are {', '.join(names) or 'none'}: say --text-field NAME")


class Spool:
    """Texts in a temporary file that is gone with the process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the documents do

    def add(self, text: str) -> tuple[int, int]:
        """Returns (offset, bytes)."""
        data = text.encode("utf-8")
        offset = self._file.seek(0, 2)
        self._file.write(data)
        return offset, len(data)

    def read(self, place: tuple[int, int]) -> str:
        self._file.seek(place[0])
        return self._file.read(place[1]).decode("utf-8")


@dataclass(frozen=True)
class Document:
    """A text to ask about.

    Attributes:
        source, index: file, and line or row in it, from 0; pieces of a split text add `part`.
        sha256: of the text as it is used.
        tokens, characters: its length in the training tokenizer, and in characters.
    """

    source: str
    index: int
    part: int
    sha256: str
    tokens: int
    characters: int
    _spool: Spool
    _place: tuple[int, int]

    @property
    def text(self) -> str:
        return self._spool.read(self._place)

    def described(self) -> dict[str, object]:
        """For the manifest."""
        return {"source": self.source, "index": self.index, "part": self.part, "sha256": self.sha256}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def tidy(text: str) -> str:
    """One form of line ends, no control characters or lone surrogates, nothing blank around.

    Templates strip what they are given, and a turn that changes on its way cannot be found again by its text.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs"))
    return re.sub(r"\n{4,}", "\n\n\n", text).strip()


def pieces(text: str, tokens: int, size: int) -> list[str]:
    """Cuts a text of `tokens` tokens into pieces of about `size`, at the end of a paragraph, sentence or word.

    Sizes are by the text's own characters a token, so that any tokenizer serves. No piece is longer than that; what is
    left at the end joins none if it is short, so the last piece may be shorter.
    """
    target = max(1, int(len(text) * size / max(tokens, 1)))
    found, start = [], 0
    while len(text) - start > target:
        end = start + _border(text[start : start + target])
        found.append(text[start:end])
        start = end
    found.append(text[start:])
    return [piece for piece in (piece.strip() for piece in found) if piece]


def _border(text: str) -> int:
    """Where to cut: the last end of a paragraph, line, sentence or word in the second half, else the end."""
    half = len(text) // 2
    for mark in ("\n\n", "\n", ". ", "。", " "):
        place = text.rfind(mark, half)
        if place >= 0:
            return place + len(mark)
    return len(text)


def spread(parts: list[str], count: int) -> list[str]:
    """`count` of the parts, evenly over the whole, first and last among them."""
    if count >= len(parts):
        return parts
    if count == 1:
        return [parts[len(parts) // 2]]
    return [parts[round(i * (len(parts) - 1) / (count - 1))] for i in range(count)]


# Words of a run, and the share of runs in common from which two texts are nearly the same.
RUN, LIKE = 8, 0.5
# Sketches that agree in three hashes of one band are compared: of two texts at LIKE 996 in 1000, and of two that share
# a tenth, such as a licence, 41. An estimate of 0.5 from all 126 hashes is off by 0.045 (one standard error).
BANDS = 42, 3
# Runs hashed at a time: each takes 126 numbers while it is.
AT_ONCE = 4096


class Copies:
    """Remembers what it is shown."""

    def __init__(self) -> None:
        self._digests: set[str] = set()
        self._sketches: list[Any] = []
        self._index = _datasketch().MinHashLSH(num_perm=BANDS[0] * BANDS[1], params=BANDS)

    def same(self, text: str) -> bool:
        """Whether this very text was shown here before."""
        key = digest(text)
        known = key in self._digests
        self._digests.add(key)
        return known

    def like(self, text: str) -> bool:
        """Whether a text with at least half of its runs of words was shown here before; if not, it is remembered."""
        mine = sketch(text)
        if any(mine.jaccard(self._sketches[number]) >= LIKE for number in self._index.query(mine)):
            return True
        self._index.insert(len(self._sketches), mine)
        self._sketches.append(mine)
        return False


def sketch(text: str) -> Any:
    """A MinHash of all runs of 8 words, or of 8 characters where words are not parted by spaces.

    The same in every process, as a run that goes on must find the same copies. Two of them estimate the share of runs
    that their texts have in common (`jaccard`, from 0 to 1).
    """
    words = text.casefold().split()
    if sum(map(len, words)) > 20 * len(words):
        words = list("".join(words))
    runs = iter({" ".join(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1))})
    found = _datasketch().MinHash(num_perm=BANDS[0] * BANDS[1], scheme="affine32", hashfunc=zlib.crc32)
    while some := [run.encode("utf-8") for run in islice(runs, AT_ONCE)]:
        found.update_batch(some)
    return found


def _datasketch() -> Any:
    try:
        import datasketch
    except ImportError:
        raise PoSEError('synthesize needs datasketch: pip install "pose-plugin[synthesize]"') from None
    return datasketch
