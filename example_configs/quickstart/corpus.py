"""The texts and documents of the quick start, shared by make_base.py and make_data.py.

- Texts are files of Python's own library (PSF licence), so nothing is downloaded.
- They differ slightly between Python versions; therefore the trained base model is committed.
- Training and evaluation use different files, and half of all passkeys never occur in training.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

from pose_plugin.evaluation.prompts import PasskeyBuilder
from pose_plugin.utils.errors import PoSEError

WINDOW = 128  # L_0 and L_c: the window of the base model, and the trained window
TARGET = 2048  # L_t: the target window, and the length of a text document

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
    """Return the contents of files of Python's library, in the given order.

    Raises:
        PoSEError: this Python does not have one of the files.
    """
    library = Path(sysconfig.get_path("stdlib"))
    missing = [name for name in files if not (library / name).is_file()]
    if missing:
        raise PoSEError(
            f"{library} has no {', '.join(missing)}: this Python comes without its full standard library. "
            "Install it, or use another CPython >= 3.10"
        )
    return [(library / name).read_text(encoding="utf-8") for name in files]


def tokenise(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the token ids of each text, without special tokens."""
    return [tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in texts]


def text_document(texts: list[list[int]], length: int, rng: random.Random) -> list[int]:
    """Draw `length` consecutive tokens of one text; every start in the corpus is equally likely.

    Args:
        texts: token ids of each text.
        length: in tokens; shorter texts are never chosen.
        rng: the only source of randomness.
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
    """Draw passkey documents with a random length, depth and key.

    A fixed shuffle splits all 90,000 five-digit keys into training keys and evaluation keys.

    Args:
        tokenizer: as for PasskeyBuilder.
        judging: draw evaluation keys instead of training keys.
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
        """Draw one document of at most `longest` tokens, including its end-of-text token.

        Args:
            rng: the only source of randomness.
            longest: in tokens; the template and the end token must fit.
            sentences: cut the filler only at ends of sentences. Cuts anywhere make more varied documents, but teach
                that a line may end after "is": some models then answered "The pass key is" with a line break.

        Returns:
            token ids, and the index of the first answer token.
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
        # Without the end token the model continues with more digits, and the key has no end.
        return [*document.input_ids, self.builder.tokenizer.eos_token_id], document.answer_start
