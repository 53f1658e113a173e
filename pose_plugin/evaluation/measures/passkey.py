"""Passkey retrieval: can the model repeat five digits from anywhere in its window? (PoSE paper, section 4.3)

As many tokens are decoded as the answer has. k_max, the effective length of Chen et al. (2023, arXiv 2306.15595), is
found from the same prompts: it depends on how far the key is from the end, not on the length of the prompt.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from pose_plugin.evaluation.measure import Windows
from pose_plugin.evaluation.prompts import PasskeyBuilder, PasskeyTemplate, random_key
from pose_plugin.evaluation.results import Result
from pose_plugin.evaluation.retrieval import Prompt, Retrieval, for_each_depth, require_depths


def passkey(model: Any, tokenizer: Any, lengths: Sequence[int], **options: Any) -> Result:
    """Measure passkey retrieval; `options` are the fields of `Passkey`.

    Example:
        >>> passkey(model, tokenizer, [2048, 8192], trials=20).k_max()
        8192
    """
    return Passkey(**options).measure(model, tokenizer, lengths)


class Passkey(Retrieval):
    """Digits in a text about grass and sky (Mohtashami & Jaggi 2023), scored by the first run of digits.

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

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        if self.depths is not None:
            require_depths(self.depths, self.trials)
            self.trials = for_each_depth(self.trials, self.depths)
        super().prepare(tokenizer, lengths, windows)

    def documents(self, length: int) -> list[Any]:
        """Return the prompts with their answers, as `PasskeyDocument`s."""
        if self._builder is None or self._builder.tokenizer is not self._tokenizer:
            self._builder = PasskeyBuilder(self._tokenizer, self.template, self.filler)
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
            found.append(Prompt("", row.prompt, len(row.answer), length, depth, (row.key,), row.distance))
        return found

    def setting(self) -> str:
        depths = "drawn at random" if self.depths is None else ", ".join(map("{:g}".format, self.depths))
        text = "" if self.filler is None else " in a real text"
        return f"5-digit keys{text}, depths {depths}, a space that is a token of its own ends the prompt"

    def score(self, answer: str, prompt: Prompt) -> float:
        found = re.search("[0-9]+", answer)
        return float(found is not None and found.group() == prompt.expected[0])

    @classmethod
    def summary(cls, result: Result) -> dict[str, int]:
        return {"k_max": result.k_max()}
