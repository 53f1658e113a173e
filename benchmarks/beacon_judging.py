"""Judging for beacon_learning.py: on files that were not trained on, with separate seeds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from beacon_training import INTERVAL, WINDOW, Data, band, token_losses

PIECE = 512  # tokens per forward of a sliding window
ROWS = 10  # questions per forward


@dataclass
class Beacons:
    """Reads with memory.

    Args:
        model: a PEFT model with a Beacon adapter.
        another: replace the first half of each text with another text's, so that memory holds the wrong facts.
    """

    model: Any
    another: bool = False

    def second_half(self, ids: Any) -> Any:
        """Return the loss of each token of the second half, given all before it, (rows, tokens / 2)."""
        import torch

        half = ids.shape[1] // 2
        first = ids[:, : half - 1].roll(1, 0) if self.another else ids[:, : half - 1]
        cache = self.model.condense(first, headroom=ids.shape[1] - half + 1)
        with torch.no_grad():
            logits = self.model(ids[:, half - 1 :], past_key_values=cache).logits
        return token_losses(logits, ids[:, half - 1 :])

    def last_digit(self, ids: Any) -> Any:
        """Return the likeliest token at the last position but one, (rows,)."""
        import torch

        with torch.no_grad():
            return self.model(ids, use_cache=False, logits_to_keep=3).logits[:, -3].argmax(-1)


@dataclass
class Alone:
    """Reads the same intervals as beacons do, each by itself: what beacons are worth without any memory.

    Args:
        model: a model without beacons.
        interval: tokens that are read together.
        lead: tokens before each interval that are read with it.
        sinks: first tokens of the text that are read before each interval.
    """

    model: Any
    interval: int = INTERVAL
    lead: int = 0
    sinks: int = 0

    def second_half(self, ids: Any) -> Any:
        import torch

        length, half, found = ids.shape[1], ids.shape[1] // 2, []
        for start in range((half - 1) // self.interval * self.interval, length - 1, self.interval):
            front = min(self.lead, start)
            # Tokens that are sinks and in front of the interval too are read once.
            first = min(self.sinks, start - front)
            part = torch.cat([ids[:, :first], ids[:, start - front : start + self.interval + 1]], dim=1)
            with torch.no_grad():
                losses = token_losses(self.model(input_ids=part, use_cache=False).logits, part)[:, first + front :]
            found.append(losses[:, max(0, half - 1 - start) :])
        return torch.cat(found, dim=1)


@dataclass
class Sliding:
    """Reads with a sliding window and full positions; layers pass on what lower layers saw.

    Args:
        model: a model without beacons, or a PEFT model, whose adapter is then disabled.
        window: raw tokens that each layer sees.
        sinks: first tokens of the text that every token sees in addition.
    """

    model: Any
    window: int = WINDOW
    sinks: int = 0

    def logits(self, ids: Any) -> Any:
        import torch

        given = {"attention_mask": band(ids.shape[1], self.window, self.sinks), "use_cache": False}
        with torch.no_grad():
            if not hasattr(self.model, "disable_adapter"):
                return self.model(input_ids=ids, **given).logits
            with self.model.disable_adapter():
                return self.model(input_ids=ids, **given).logits

    @property
    def reach(self) -> int:
        """How many tokens back a token can see through all layers. Earlier ones need not be computed."""
        # Sinks are at the beginning, so nothing can be left out before the text.
        return 10**9 if self.sinks else self.model.config.num_hidden_layers * (self.window - 1)

    def second_half(self, ids: Any) -> Any:
        import torch

        half, found = ids.shape[1] // 2, []
        # If every token depends on the beginning, pieces would only read it several times.
        piece = PIECE if self.reach < ids.shape[1] else ids.shape[1]
        for start in range(half - 1, ids.shape[1] - 1, piece):
            end, front = min(start + piece, ids.shape[1] - 1), max(0, start - self.reach)
            part = ids[:, front : end + 1]
            found.append(token_losses(self.logits(part), part)[:, start - front :])
        return torch.cat(found, dim=1)

    def last_digit(self, ids: Any) -> Any:
        return self.logits(ids[:, -self.reach - 4 :])[:, -3].argmax(-1)


MEASURES = ("digit", "facts", "text")
OFFSETS = ((0, 4), (4, 8), (8, 16), (16, 32), (32, INTERVAL))


def judge(
    readers: dict[str, Any],
    seed: int,
    lengths: list[int],
    trials: int,
    texts: int,
    measures: tuple[str, ...] = MEASURES,
) -> dict[str, Any]:
    """Return, by reader, measure and length, the share of digits found and mean losses (nats) of texts' second halves.

    - digit: the answer's digit is the likeliest token; the key is outside the last 128 tokens. Guessing finds 0.11.
    - facts: documents whose fact recurs outside every window of 128; fact digits: the digits of these only.
    - text: files of Python's library. prose: a novel, which the base does not know.
    - text offset 0–3 and so on: of these, the tokens that are predicted so many tokens behind an interval's border.
    """
    import torch

    data = Data(judging=True)
    found: dict[str, Any] = {name: {} for name in readers}
    for length in lengths:
        rng = random.Random(f"{seed} {length}")
        asked = torch.tensor([data.question(length, rng) for _ in range(trials)])
        facts = [data.facts(length, rng, far=True) for _ in range(texts)]
        pieces = torch.tensor([data.text(length, rng) for _ in range(texts)])
        if "prose" in measures:
            pieces = torch.tensor([data.prose(length, rng) for _ in range(texts)])
        half = length // 2
        ids = torch.tensor([row for row, _ in facts])
        digits = torch.zeros((texts, half), dtype=torch.bool)
        for at, (_, places) in enumerate(facts):
            digits[at, [place - half for place in places if place >= half]] = True
        offset = torch.arange(half - 1, length - 1) % INTERVAL
        for name, reader in readers.items():
            row = {}
            if "facts" in measures:
                each = reader.second_half(ids)
                row |= {"facts": each.mean(), "fact digits": each[digits].mean()}
            for measure in ("text", "prose"):
                if measure in measures:
                    each = reader.second_half(pieces)
                    row[measure] = each.mean()
                    for low, high in OFFSETS:
                        inside = (offset >= low) & (offset < high)
                        row[f"{measure} offset {low}–{high - 1}"] = each[:, inside].mean()
            if "digit" in measures and hasattr(reader, "last_digit") and not getattr(reader, "another", False):
                hits = [reader.last_digit(part) == part[:, -2] for part in asked.split(ROWS)]
                row["digit"] = torch.cat(hits).float().mean()
            for measure, value in row.items():
                found[name].setdefault(measure, {})[str(length)] = round(float(value), 4)
        print(f"  judged at {length}", flush=True)
    return found


def by_window(model: Any, seed: int, length: int, windows: list[int], texts: int) -> dict[str, float]:
    """Return the loss of the second halves of library texts, by the window that the model reads with."""
    import torch

    data, rng = Data(judging=True), random.Random(f"{seed} far")
    ids = torch.tensor([data.text(length, rng) for _ in range(texts)])
    found = {}
    for window in windows:
        reader = Sliding(model, window)
        losses = [reader.second_half(row[None]).mean() for row in ids]
        found[str(window)] = round(float(sum(losses) / len(losses)), 4)
    return found


def short_inputs_are_the_bases(model: Any) -> bool:
    """Return whether a text of one interval gets exactly the base's logits."""
    import torch

    ids = torch.arange(10, 10 + INTERVAL)[None]
    with torch.no_grad():
        ours = model(ids, use_cache=False).logits
        with model.disable_adapter():
            return bool(torch.equal(ours, model(input_ids=ids, use_cache=False).logits))
