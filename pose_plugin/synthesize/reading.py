"""Reads documents from txt, md, jsonl and parquet files and folders."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from pose_plugin.utils.errors import PoSEError

WHOLE = (".txt", ".md", ".markdown")
ROWS = (".jsonl", ".parquet")


def _inside(folder: Path, own: Collection[Path]) -> list[Path]:
    """Every file in a folder, in order of names, without hidden ones and those that this command writes."""
    found = sorted(path for path in folder.rglob("*") if not _hidden(path.relative_to(folder)))
    return [path for path in found if path.is_file() and path.resolve() not in own]


def passed_over(inputs: Iterable[Path], own: Collection[Path] = ()) -> int:
    """How many files in the folders have an ending that is not read; hidden ones are not counted."""
    inside = (each for path in inputs if path.is_dir() for each in _inside(path, own))
    return sum(each.suffix.lower() not in WHOLE + ROWS for each in inside)


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
            found.update(dict.fromkeys(each for each in inside if each.suffix.lower() in WHOLE + ROWS))
        elif not path.exists():
            raise PoSEError(f"input {path} does not exist; name files or folders of documents")
        elif path.suffix.lower() not in WHOLE + ROWS:
            raise PoSEError(f"input {path} ends in {path.suffix or 'nothing'}; readable are {', '.join(WHOLE + ROWS)}")
        else:
            found[path] = None
    if not found:
        raise PoSEError(
            f"no document in {', '.join(map(str, inputs))}: looked for files that end in {', '.join(WHOLE + ROWS)}"
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
    if ending in WHOLE:
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
