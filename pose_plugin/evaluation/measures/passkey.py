"""Passkey retrieval: can the model repeat five digits from anywhere in its window? (PoSE paper, section 4.3)

What is scored is greedy decoding of as many tokens as the answer has. Most prompts need a single forward for
that: with the right answer in place (teacher forcing), the argmax at each answer position is what greedy decoding
would have written up to its first mistake, and a first mistake usually settles the case. Only where it does not
(e.g. the model begins with a line break and may still write the key) the answer is decoded token by token.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from pose_plugin.evaluation.prompts import PasskeyBuilder, PasskeyTemplate, random_key
from pose_plugin.evaluation.results import Result, Work
from pose_plugin.evaluation.retrieval import Prompt, Retrieval, end_tokens, require_depths


def passkey(model: Any, tokenizer: Any, lengths: Sequence[int], **options: Any) -> Result:
    """Measure passkey retrieval; `options` are the fields of `Passkey`.

    Example:
        >>> passkey(model, tokenizer, [2048, 8192], trials=20).k_max()
        8192
    """
    return Passkey(**options).measure(model, tokenizer, lengths)


class Passkey(Retrieval):
    """Digits in a text about grass and sky (Mohtashami & Jaggi 2023), scored with one forward per prompt.

    Attributes:
        depths: None draws one in 0…1 for each prompt; a list shares out the prompts of a length among its values.
        template: the texts.
    """

    name: ClassVar[str] = "passkey"
    title: ClassVar[str] = "Passkey accuracy ± standard error"
    label: ClassVar[str] = "passkeys found"
    by_default: ClassVar[bool] = True
    depth_label: ClassVar[str] = "depth of the key"
    rules: ClassVar[dict[str, str]] = {"": "1 if the first run of digits is the key"}

    depths: list[float] | None = Field(None, description="depths of the key, e.g. 0,0.5,1; default: drawn at random")
    template: PasskeyTemplate = PasskeyTemplate()

    _builder: Any = None

    def documents(self, length: int) -> list[Any]:
        """Return the prompts with their answers, as `PasskeyDocument`s."""
        if self._builder is None or self._builder.tokenizer is not self._tokenizer:
            self._builder = PasskeyBuilder(self._tokenizer, self.template, self.filler)
        if self.depths is not None:
            require_depths(self.depths, self.trials)
        found = []
        for trial in range(self.trials):
            rng = random.Random(f"{self.seed}/{length}/{trial}")
            key, drawn, start = random_key(rng), rng.random(), rng.random()
            depth = drawn if self.depths is None else self.depths[trial % len(self.depths)]
            found.append(self._builder.document(length, depth, key, start))
        return found

    def prompts(self, length: int) -> list[Prompt]:
        found = []
        for row in self.documents(length):
            # Depths drawn at random are put together in fifths, named by their middle.
            depth = row.depth if self.depths else round(min(int(row.depth * 5), 4) / 5 + 0.1, 1)
            answer = tuple(row.answer)
            found.append(Prompt("", row.prompt, len(answer), length, depth, (row.key,), answer))
        return found

    def setting(self) -> str:
        depths = "drawn at random" if self.depths is None else ", ".join(map("{:g}".format, self.depths))
        text = "" if self.filler is None else " in a real text"
        return f"5-digit keys{text}, depths {depths}, a space that is a token of its own ends the prompt"

    def work(self, length: int) -> Work:
        return Work(length, self.trials)

    def answers_to(self, model: Any, prompts: Sequence[Prompt], bar: Any) -> list[tuple[str, float]]:
        from pose_plugin.evaluation.memory import in_batches

        reader = _Reader(self._tokenizer, model)

        def run(batch: Sequence[Prompt], chunk: int | None) -> list[tuple[str, float]]:
            bar.update(len(batch))
            return _answers(model, batch, reader, chunk)

        return in_batches(model, prompts, prompts[0].length, run, self.batch_size)

    @classmethod
    def summary(cls, result: Result) -> dict[str, int]:
        return {"k_max": result.k_max()}


class _Reader:
    """Reads tokens as an answer and knows when more tokens could not change the score."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self.tokenizer = tokenizer
        self.ends = end_tokens(tokenizer, model)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.most_digits = max((_digits(t) for t in tokenizer.get_vocab() if t not in special), default=0)

    def __call__(self, tokens: list[int], budget: int, key: str) -> tuple[str, bool | None]:
        """Return the text of the first `budget` tokens, and: right, wrong, or None if the rest decides."""
        tokens = tokens[:budget]
        end = next((i for i, token in enumerate(tokens) if token in self.ends), None)
        left = budget - len(tokens) if end is None else 0
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        return text, verdict(text, key, left * self.most_digits)


def verdict(text: str, key: str, digits_to_come: int) -> bool | None:
    """Return whether the first run of digits is the key; None while `digits_to_come` more digits could decide it."""
    run = re.search("[0-9]+", text)
    found = run.group() if run else ""
    if run and (run.end() < len(text) or digits_to_come == 0):
        return found == key
    if key.startswith(found) and len(found) + digits_to_come >= len(key):
        return None
    return False


def _digits(token: str) -> int:
    # A byte token such as <0x31> stands for one character.
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", token) else sum(letter in "0123456789" for letter in token)


def _answers(model: Any, prompts: Sequence[Prompt], reader: _Reader, chunk: int | None) -> list[tuple[str, float]]:
    """Return text and score of greedy decoding, for prompts whose answers have the same number of tokens."""
    import torch

    from pose_plugin.evaluation.model import device_of, greedy, last_logits
    from pose_plugin.evaluation.sharded import agreed

    device, budget = device_of(model), prompts[0].budget
    ids = torch.tensor([[*prompt.ids, *prompt.answer] for prompt in prompts], device=device)
    # The logits at a token say what follows it, so the last position has nothing to say.
    chosen = last_logits(model, ids, budget + 1, chunk)[:, :-1].argmax(-1).tolist()
    results: list[tuple[str, bool | None]] = []
    for prompt, argmax in zip(prompts, chosen, strict=True):
        first = next((i for i in range(budget) if argmax[i] != prompt.answer[i]), budget)
        results.append(reader(argmax[: first + 1], budget, prompt.expected[0]))
    # As rank 0 sees it, if ranks go in step: another rounding elsewhere must not make another forward.
    unsettled = agreed(model, [i for i, (_, correct) in enumerate(results) if correct is None])
    if unsettled:
        ids = torch.tensor([prompts[i].ids for i in unsettled], device=device)
        for i, tokens in zip(unsettled, greedy(model, ids, budget, chunk).tolist(), strict=True):
            results[i] = reader(tokens, budget, prompts[i].expected[0])
    return [(text, float(bool(correct))) for text, correct in results]
