"""The texts and documents of the quick start, shared by make_base.py and make_data.py.

Texts are files of Python's own library (PSF licence): they are on every machine that can run the scripts, so
nothing is downloaded. They differ a little between Python versions, which is why the base model is committed.
Training and judging use different files; PasskeyMaker also keeps half of the keys out of all training.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

from pose_plugin.evaluation.prompts import PasskeyBuilder
from pose_plugin.utils.errors import PoSEError

WINDOW = 128  # L_0 and L_c: the window of the base model, and of the extension's training
TARGET = 2048  # L_t: the window that is wanted, and the length of a text document

TRAINING_FILES = (
    "pydoc_data/topics.py",
    "typing.py",
    "inspect.py",
    "pydoc.py",
    "tarfile.py",
    "unittest/mock.py",
    "argparse.py",
    "urllib/request.py",
    "pickletools.py",
    "subprocess.py",
    "difflib.py",
    "optparse.py",
    "statistics.py",
)
JUDGING_FILES = ("_pydecimal.py", "doctest.py", "mailbox.py", "imaplib.py")


def read_texts(files: tuple[str, ...]) -> list[str]:
    """The contents of files of Python's library, in the order given.

    Raises:
        PoSEError: when this Python comes without one of the files.
    """
    library = Path(sysconfig.get_path("stdlib"))
    missing = [name for name in files if not (library / name).is_file()]
    if missing:
        raise PoSEError(
            f"{library} has no {', '.join(missing)}: this Python was packaged without its whole library. "
            "Install the full standard library, or run with another CPython >= 3.10"
        )
    return [(library / name).read_text(encoding="utf-8") for name in files]


def tokenise(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens."""
    return [tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in texts]


def text_document(texts: list[list[int]], length: int, rng: random.Random) -> list[int]:
    """`length` consecutive tokens of one text; every start in the corpus is equally likely.

    Args:
        texts: token ids of each text; none of the pieces crosses from one text into another.
        length: tokens wanted; texts shorter than this are never chosen.
        rng: the only source of chance.
    """
    starts = [max(len(ids) - length + 1, 0) for ids in texts]
    if not sum(starts):
        raise PoSEError(f"length={length} is longer than the longest text of {max(map(len, texts))} tokens")
    number = rng.randrange(sum(starts))
    for ids, count in zip(texts, starts, strict=True):
        if number < count:
            return ids[number : number + length]
        number -= count
    raise AssertionError("unreachable: number < sum(starts)")


class PasskeyMaker:
    """Draws passkey documents with a random length, depth and key.

    Keys of training and judging never meet: a fixed shuffle of all 90,000 five-digit keys is cut in two.

    Args:
        tokenizer: as for PasskeyBuilder.
        judging: draw from the judging keys instead of the training keys.
    """

    def __init__(self, tokenizer: Any, judging: bool = False) -> None:
        self.builder = PasskeyBuilder(tokenizer)
        keys = [str(number) for number in range(10_000, 100_000)]
        random.Random(0).shuffle(keys)
        half = len(keys) // 2
        self.keys = keys[half:] if judging else keys[:half]
        filler = tokenizer.encode(self.builder.template.filler * 8, add_special_tokens=False)
        stop = tokenizer.convert_tokens_to_ids(".")
        self.ends = [0, *(index + 1 for index, token in enumerate(filler) if token == stop)]

    def draw(self, rng: random.Random, longest: int, sentences: bool = True) -> tuple[list[int], int]:
        """One document of at most `longest` tokens, its end-of-text token included.

        Args:
            rng: the only source of chance.
            longest: in tokens; at least what the template takes and the end.
            sentences: cut the filler at ends of sentences only. Cut anywhere it makes more varied documents, but
                teaches that a line may end behind "is", and some models extended on such documents answered
                "The pass key is" with a line break at the longest lengths.

        Returns:
            token ids; index of the first answer token.
        """
        key = rng.choice(self.keys)
        fixed = self.builder.fixed_tokens(key)
        if sentences:
            room = rng.choice([end for end in self.ends if end < longest - fixed])
            depth = rng.choice([end for end in self.ends if end <= room]) / max(room, 1)
        else:
            room = rng.randint(0, longest - 1 - fixed)
            depth = rng.random()
        document = self.builder.document(fixed + room, depth, key)
        # Without the end the model would go on writing digits, and no reader could tell where the key stops.
        return [*document.input_ids, self.builder.tokenizer.eos_token_id], document.answer_start
