"""Read documents from files, clean and split their texts, and find copies."""

from __future__ import annotations

import codecs
import hashlib
import json
import tempfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from pose_plugin.utils.errors import PoSEError, module_of_extra

TEXTS = (".txt", ".md", ".markdown")
ENDINGS = (*TEXTS, ".jsonl", ".parquet")

# Copies: words per run, and the share of runs in common from which two texts count as nearly the same.
RUN, LIKE = 8, 0.5
# Sketches that agree in all three hashes of one of 42 bands are compared. That finds 996 of 1000 pairs that share half
# of their runs, and 41 of 1000 that share a tenth, such as a licence. An estimate of 0.5 from all 126 hashes has a
# standard error of 0.045.
BANDS = 42, 3
# Runs hashed at a time: each needs 126 numbers of memory.
AT_ONCE = 4096


class Spool:
    """Texts in a temporary file: a collection for windows of 80K tokens does not fit in memory."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the documents do

    def add(self, text: str) -> tuple[int, int]:
        """Store a text. Returns (offset, bytes), to be passed to `read`."""
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
        source, index: the file, and the line or row in it, from 0.
        part: number of the piece, from 0, if the text was split.
        sha256: hash of the cleaned text.
        tokens, characters: length in the training tokenizer, and in characters.
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
        """Return what `sources.jsonl` holds of it."""
        return {"source": self.source, "index": self.index, "part": self.part, "sha256": self.sha256}


def find_files(inputs: Iterable[Path], own: Collection[Path] = ()) -> tuple[list[Path], int]:
    """Find the readable files in folders, in order of their names, without hidden ones.

    Args:
        own: resolved paths of the files that this command writes, which may lie in an input folder.

    Returns:
        The files, and how many others were skipped for their ending.

    Raises:
        PoSEError: a path does not exist or has an unknown ending, or nothing is found.
    """
    found: dict[Path, None] = {}
    skipped = 0
    for path in inputs:
        if path.is_dir():
            for each in sorted(path.rglob("*")):
                hidden = any(part.startswith(".") for part in each.relative_to(path).parts)
                if hidden or not each.is_file() or each.resolve() in own:
                    continue
                if each.suffix.lower() in ENDINGS:
                    found[each] = None
                else:
                    skipped += 1
        elif not path.exists():
            raise PoSEError(f"input {path} does not exist; give files or folders of documents")
        elif path.suffix.lower() not in ENDINGS:
            raise PoSEError(f"input {path} ends in {path.suffix or 'nothing'}; supported are {', '.join(ENDINGS)}")
        else:
            found[path] = None
    if not found:
        raise PoSEError(f"no document in {', '.join(map(str, inputs))}: supported are {', '.join(ENDINGS)}")
    return list(found), skipped


def read(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    """Yield (index, text) of each document in a file.

    Raises:
        PoSEError: with the place of what cannot be read.
    """
    ending = path.suffix.lower()
    if ending in TEXTS:
        yield 0, _decode(path, path.read_bytes())
    elif ending == ".jsonl":
        yield from _lines(path, text_field)
    else:
        yield from _parquet(path, text_field)


def _decode(where: object, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        fix = f"convert it (iconv -f {'UTF-16' if utf16 else 'LATIN1'} -t UTF-8), or leave it out"
        if b"\0" in data and not utf16:
            fix = "it is not text; leave it out"
        raise PoSEError(f"{where}: byte {error.start} is not UTF-8; {fix}") from None


def _lines(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            where = f"{path}, line {number + 1}"
            try:
                row = json.loads(_decode(where, line))
            except json.JSONDecodeError as error:
                raise PoSEError(f"{where} is not JSON ({error}); each line must be one object") from None
            if not isinstance(row, dict):
                raise PoSEError(f"{where}: a {type(row).__name__}, not an object with {text_field!r}")
            yield number, _text(where, row, text_field)


def _parquet(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    parquet = module_of_extra("pyarrow.parquet", f"{path} needs pyarrow", "synthesize")
    from pyarrow import ArrowException

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
        raise PoSEError(f"{path} is not a readable parquet file: {error}") from None


def _text(where: str, row: dict[str, Any], text_field: str) -> str:
    if text_field not in row:
        _missing(where, list(row), text_field)
    text = row[text_field]
    if text is None:
        return ""  # counted as an empty text
    if not isinstance(text, str):
        raise PoSEError(f"{where}: {text_field!r} is {type(text).__name__}, not text; see --text-field")
    return text


def _missing(where: object, names: list[str], text_field: str) -> NoReturn:
    raise PoSEError(f"{where}: no field {text_field!r}; give --text-field one of: {', '.join(names) or 'none'}")


def file_hash(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def digest(text: str) -> str:
    """Return the sha256 of a text."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def pieces(text: str, tokens: int, size: int) -> list[str]:
    """Split a text of `tokens` tokens into pieces of at most about `size`, at the end of a paragraph, sentence or word.

    Sizes are measured in characters, by the text's mean characters per token: pieces are not tokenized again. The last
    piece may be short.
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
    """Return where to cut: after the last paragraph, line, sentence or word in the second half, else at the end."""
    half = len(text) // 2
    for mark in ("\n\n", "\n", ". ", "。", " "):
        place = text.rfind(mark, half)
        if place >= 0:
            return place + len(mark)
    return len(text)


def spread(parts: list[str], count: int) -> list[str]:
    """Choose `count` of the parts, evenly spaced, with the first and the last."""
    if count >= len(parts):
        return parts
    if count == 1:
        return [parts[len(parts) // 2]]
    return [parts[round(i * (len(parts) - 1) / (count - 1))] for i in range(count)]


class Copies:
    """Recognize texts that are the same as an earlier one, or nearly the same.

    A model that is asked about both copies has seen the answers already. Nearly the same are, e.g., two editions of a
    book. Each text is sketched by hashes of its runs of words (MinHash, Broder 1997), so memory does not grow with it.
    """

    def __init__(self) -> None:
        self._digests: set[str] = set()
        self._sketches: list[Any] = []
        self._index = _datasketch().MinHashLSH(num_perm=BANDS[0] * BANDS[1], params=BANDS)

    def same(self, text: str) -> bool:
        """Whether exactly this text came before."""
        key = digest(text)
        known = key in self._digests
        self._digests.add(key)
        return known

    def like(self, text: str) -> bool:
        """Whether a text that shares half of its runs of words came before. If not, this one is remembered."""
        mine = sketch(text)
        if any(mine.jaccard(self._sketches[number]) >= LIKE for number in self._index.query(mine)):
            return True
        self._index.insert(len(self._sketches), mine)
        self._sketches.append(mine)
        return False


def sketch(text: str) -> Any:
    """Return a MinHash of all runs of 8 words, or of 8 characters in scripts without spaces.

    It is the same in every process: a resumed run must find the same copies. `jaccard` of two sketches estimates the
    share of runs that their texts have in common, from 0 to 1.
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
    return module_of_extra("datasketch", "synthesize needs datasketch", "synthesize")
