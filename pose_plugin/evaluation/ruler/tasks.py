"""RULER's thirteen tasks as text: what a prompt contains, and which answers count (arXiv 2404.06654).

Wording, counts and draws are those of the authors' generator (Apache 2.0). A task builds a question of any `size`:
words, lines or documents. `fitted` then finds the size that fills a length in tokens. Four things differ from the
authors' generator:

- Sentences of essays end at . ! and ?; the authors split them with NLTK, which needs a download.
- Every shuffle is drawn. The authors shuffle with one seed, so that the document with the answer is always at the same
  depth for a given number of documents.
- Sizes grow by one unit instead of by 10 to 500, so that prompts fill the length, and short lengths have prompts.
- The examples of `vt` and `cwe` are left out if they take more than a third of the length.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pose_plugin.evaluation.prompts import GRASS
from pose_plugin.evaluation.ruler.data import ESSAYS, HOTPOTQA, SQUAD, Asked, Data
from pose_plugin.utils.errors import PoSEError, pip_install

SHORT = 4096
"""Tokens below which `cwe` repeats its words less often."""


@dataclass(frozen=True)
class Question:
    """A prompt as text, which ends with the beginning of the answer, and what the answer has to contain."""

    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Ask:
    """A question that can be asked at any size.

    Attributes:
        least: the smallest size.
        build: of a size and a source of randomness, the question.
        most: the largest size; None for no limit.
    """

    least: int
    build: Callable[[int, random.Random], Question]
    most: int | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of RULER's tasks.

    Attributes:
        budget: tokens that are decoded.
        file: the data file that it needs; "" for none.
    """

    budget: int
    file: str = ""

    def pool(self, data: Data) -> int | None:
        """Return the number of different questions; None if they are drawn."""
        return None

    def ask(self, data: Data, number: int, length: int, count: Callable[[str], int]) -> Ask:
        """Return a question.

        Args:
            number: of the question in the pool.
            length: of the prompt in tokens.
            count: returns the tokens of a text.
        """
        raise NotImplementedError


KINDS: dict[str, Callable[[random.Random, Data], str]] = {
    "numbers": lambda draw, data: str(draw.randint(10**6, 10**7 - 1)),
    "uuids": lambda draw, data: str(uuid.UUID(int=draw.getrandbits(128), version=4)),
    "words": lambda draw, data: data.key(draw),
}
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = tuple(round(100 * i / 39) for i in range(40))
"""In per cent of the sentences of an essay."""


@dataclass(frozen=True, kw_only=True)
class Niah(Task):
    """Needles in a haystack: values of keys, hidden in repeated sentences, in essays, or among other needles.

    Attributes:
        haystack: "repeat", "essay" or "needle".
        key: kind of the keys.
        value: kind of the values.
        keys: how many keys are hidden.
        values: of each key.
        queries: keys that are asked for.
    """

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    budget: int = 128

    def ask(self, data: Data, number: int, length: int, count: Callable[[str], int]) -> Ask:
        return Ask(1, lambda size, draw: self.build(size, draw, data))

    def build(self, size: int, draw: random.Random, data: Data) -> Question:
        keys, values, needles = list[str](), list[list[str]](), list[str]()
        for _ in range(self.keys):
            keys.append(KINDS[self.key](draw, data))
            values.append([])
            for _ in range(self.values):
                values[-1].append(KINDS[self.value](draw, data))
                needles.append(NEEDLE.format(kind=self.value, key=keys[-1], value=values[-1][-1]))
        draw.shuffle(needles)
        context = self._hidden(needles, size, draw, data)
        asked = draw.sample(range(self.keys), self.queries)
        names = [keys[i] for i in asked]
        query = f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]
        if self.queries * self.values == 1:
            kind = self.value[:-1]
            head, are, asked_for = f"A special magic {kind} is", "is", f"What is the special magic {kind}"
        else:
            kind = self.value
            head, are, asked_for = f"Some special magic {kind} are", "are", f"What are all the special magic {kind}"
        text = (
            f"{head} hidden within the following text. Make sure to memorize it. I will quiz you about the {kind} "
            f"afterwards.\n{context}\n{asked_for} for {query} mentioned in the provided text? "
            f"The special magic {kind} for {query} mentioned in the provided text {are}"
        )
        return Question(text, tuple(value for i in asked for value in values[i]))

    def _hidden(self, needles: list[str], size: int, draw: random.Random, data: Data) -> str:
        """Return a haystack of `size` words of essays, or of `size` lines, with the needles in it."""
        if self.haystack == "essay":
            words = itertools.islice(itertools.cycle(data.essays), size)
            sentences = sentences_of(" ".join(words))
            cuts = sorted(int(len(sentences) * (depth / 100)) for depth in draw.sample(DEPTHS, len(needles)))
            pieces = [sentences[a:b] for a, b in itertools.pairwise([0, *cuts, len(sentences)])]
            parts = [" ".join(pieces[0])]
            for needle, piece in zip(needles, pieces[1:], strict=True):
                parts += [needle, " ".join(piece)]
            return " ".join(parts)
        lines = [GRASS.strip()] * size
        if self.haystack == "needle":
            drawn = [(KINDS[self.key](draw, data), KINDS[self.value](draw, data)) for _ in range(size)]
            lines = [NEEDLE.format(kind=self.value, key=key, value=value) for key, value in drawn]
        places = sorted(draw.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text; one ends at . ! or ? before a space."""
    return re.split(r"(?<=[.!?])\s+", text) if text else []


@dataclass(frozen=True, kw_only=True)
class VariableTracking(Task):
    """A number is assigned to a variable, which is assigned to another one, and so on; name all of them.

    An example comes first, if it takes at most a third of the length.
    """

    hops: int = 4
    budget: int = 30

    def ask(self, data: Data, number: int, length: int, count: Callable[[str], int]) -> Ask:
        lines = self._example_lines(count)
        with_example = 3 * count(self.example(lines, random.Random(0))) <= length

        def build(size: int, draw: random.Random) -> Question:
            example = f"{self.example(lines, draw)}\n\n\n\n" if with_example else ""
            question = self.build(size, draw)
            return Question(example + question.text, question.answers)

        return Ask(1, build)

    def _example_lines(self, count: Callable[[str], int]) -> int:
        """Return the lines of filler in the example, a multiple of five; it has up to 470 tokens."""
        return next(n for n in itertools.count(5, 5) if count(self.example(n + 5, random.Random(0))) > 470)

    def example(self, size: int, draw: random.Random) -> str:
        """Return a question with its answer. Its variables have three letters."""
        question = self.build(size, draw, letters=3)
        return f"{question.text}  {' '.join(question.answers)}"

    def build(self, size: int, draw: random.Random, letters: int = 5) -> Question:
        """Return a question with `size` lines of filler."""
        names = list[str]()
        while len(names) <= self.hops:
            name = "".join(draw.choices(string.ascii_uppercase, k=letters))
            names += [name] if name not in names else []
        value = draw.randrange(10**4, 10**5 - 1)
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
        line = f"{GRASS.strip()}\n"
        lines = [line] * size
        if size <= len(chain):
            # There are not enough lines to put one assignment behind each: behind each sentence then.
            lines = [f"{part}." if part.strip() else part for part in (line * size).split(".")]
        places = sorted(draw.sample(range(len(lines)), len(chain)))
        for moved, (place, assigned) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + moved, assigned)
        context = " ".join(lines).replace(". \n", ".\n")
        text = (
            f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
            f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According "
            "to the chain(s) of variable assignment in the text above, "
            # The misspelling is RULER's.
            f"{len(names)} variables are assgined the value {value}, they are:"
        )
        return Question(text, tuple(names))


@dataclass(frozen=True, kw_only=True)
class CommonWords(Task):
    """A numbered list of words in which ten words are more frequent than the others; name the ten.

    An example comes first, if it takes at most a third of the length. lm-eval makes the example and leaves it out.
    """

    common: int = 10
    budget: int = 120

    def ask(self, data: Data, number: int, length: int, count: Callable[[str], int]) -> Ask:
        short = length < SHORT
        lines, often, seldom = (20, 3, 1) if short else (40, 10, 3)

        def example(draw: random.Random) -> str:
            question = self.build(lines, often, seldom, draw, data)
            numbered = " ".join(f"{i}. {word}" for i, word in enumerate(question.answers, 1))
            return f"{question.text}{numbered}\n"

        with_example = 3 * count(example(random.Random(0))) <= length

        def build(size: int, draw: random.Random) -> Question:
            before = example(draw) if with_example else ""
            question = self.build(size, *((6, 1) if short else (30, 3)), draw, data)
            return Question(before + question.text, question.answers)

        return Ask(self.common + 1, build, len(data.words))

    def build(self, size: int, often: int, seldom: int, draw: random.Random, data: Data) -> Question:
        """Return a question with `size` different words, ten of them `often`, the others `seldom`."""
        chosen = draw.sample(data.words, size)
        words = chosen[: self.common] * often + chosen[self.common :] * seldom
        draw.shuffle(words)
        context = " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
        text = (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            f"that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? "
            "Answer: The top 10 words that appear most often in the list are:"
        )
        return Question(text, tuple(chosen[: self.common]))


@dataclass(frozen=True, kw_only=True)
class FrequentWords(Task):
    """A text of made-up words whose frequencies fall with the square of their rank; name the three most frequent."""

    letters: int = 6
    budget: int = 50

    def ask(self, data: Data, number: int, length: int, count: Callable[[str], int]) -> Ask:
        # With fewer than 75 words, the third and the fourth of them may be equally frequent.
        return Ask(75, lambda size, draw: self.build(size, draw, vocabulary=max(5, length // 50)))

    def build(self, size: int, draw: random.Random, vocabulary: int) -> Question:
        def word() -> str:
            return "".join(draw.choices(string.ascii_lowercase, k=self.letters))

        made = [word() for _ in range(vocabulary)]
        while len(set(made)) < vocabulary:
            made.append(word())
        ranked = sorted(set(made))
        draw.shuffle(ranked)
        # The most frequent one is noise.
        ranked[0] = "..."
        shares = (rank**-2.0 / (math.pi**2 / 6) for rank in range(1, vocabulary + 1))
        words = [each for each, share in zip(ranked, shares, strict=True) for _ in range(int(size * share))]
        draw.shuffle(words)
        text = (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(words)}\nQuestion: Do not provide any explanation. Please ignore the "
            "dots '....'. What are the three most frequently appeared words in the above coded text? Answer: "
            "According to the coded text above, the three most frequently appeared words are:"
        )
        return Question(text, tuple(ranked[1:4]))


@dataclass(frozen=True, kw_only=True)
class Reading(Task):
    """A question about one or two documents among others."""

    budget: int = 32

    def pool(self, data: Data) -> int | None:
        return len(data.questions(self.file)[0])

    def ask(self, data: Data, number: int, length: int, count: Callable[[str], int]) -> Ask:
        asked, documents = data.questions(self.file)
        question = asked[number]
        return Ask(len(question.needed), lambda size, draw: self.build(size, draw, question, documents), len(documents))

    def build(self, size: int, draw: random.Random, asked: Asked, documents: list[str]) -> Question:
        own = list(asked.own)
        if size < len(own):
            own = [*asked.needed, *(i for i in own if i not in asked.needed)][:size]
        missing = size - len(own)
        if missing > len(asked.related):
            taken = {*own, *asked.related}
            others = [i for i in range(len(documents)) if i not in taken]
            own += [*asked.related, *draw.sample(others, min(missing - len(asked.related), len(others)))]
        else:
            own += draw.sample(asked.related, missing)
        draw.shuffle(own)
        context = "\n\n".join(f"Document {i}:\n{documents[number]}" for i, number in enumerate(own, 1))
        task = (
            "Answer the question based on the given documents. Only give me the answer and do not output any other "
            "words."
        )
        text = f"{task}\n\nThe following are given documents.\n\n{context}\n\n{task}\n\nQuestion: {asked.text} Answer:"
        return Question(text, asked.answers)


TASKS: dict[str, Task] = {
    "niah_single_1": Niah(haystack="repeat"),
    "niah_single_2": Niah(haystack="essay", file=ESSAYS),
    "niah_single_3": Niah(haystack="essay", file=ESSAYS, value="uuids"),
    "niah_multikey_1": Niah(haystack="essay", file=ESSAYS, keys=4),
    "niah_multikey_2": Niah(haystack="needle"),
    "niah_multikey_3": Niah(haystack="needle", key="uuids", value="uuids"),
    "niah_multivalue": Niah(haystack="essay", file=ESSAYS, values=4),
    "niah_multiquery": Niah(haystack="essay", file=ESSAYS, keys=4, queries=4),
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": Reading(file=SQUAD),
    "qa_2": Reading(file=HOTPOTQA),
}


def require(data: Data, tasks: Sequence[str]) -> None:
    """Raise PoSEError if a file that a task needs is missing."""
    missing: dict[str, list[str]] = {}
    for task in tasks:
        file = TASKS[task].file
        replaced = file == ESSAYS and data.given_essays is not None
        if file and not replaced and (data.folder is None or not (data.folder / file).is_file()):
            missing.setdefault(file, []).append(task)
    if missing:
        needs = "; ".join(f"ruler_tasks={','.join(names)} needs {file}" for file, names in missing.items())
        free = ",".join(name for name, each in TASKS.items() if not each.file)
        where = "" if data.given is None else f", and ruler_data={data.given} does not contain it"
        raise PoSEError(
            f"{needs}{where}; {pip_install('ruler')}, give a folder with the files as "
            f"ruler_data, or use the tasks that need no file: {free}"
        )
