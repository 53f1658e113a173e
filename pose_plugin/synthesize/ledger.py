"""Tokens and money: what was spent, what is on its way, and whether one more request fits the budget."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Counts of one output folder, over all its runs.

    Prices are per million tokens. What a request will cost is not known before it is answered, as the server counts
    with its own tokenizer: it is reserved at `margin` times our count of the input, with the longest answer allowed.
    """

    price_input: float | None = None
    price_output: float | None = None
    budget: float | None = None
    margin: float = 1.25
    input_tokens: int = 0
    output_tokens: int = 0
    _reserved: dict[int, float] = field(default_factory=dict)
    _next: int = 0

    def cost(self, input_tokens: float, output_tokens: float) -> float | None:
        if self.price_input is None or self.price_output is None:
            return None
        return (input_tokens * self.price_input + output_tokens * self.price_output) / 1e6

    @property
    def spent(self) -> float | None:
        return self.cost(self.input_tokens, self.output_tokens)

    def reserve(self, input_tokens: int, output_tokens: int) -> int | None:
        """Returns a number for `settle`, or None if the budget might not hold."""
        price = self.cost(input_tokens * self.margin, output_tokens) or 0.0
        if self.budget is not None and (self.spent or 0.0) + sum(self._reserved.values()) + price > self.budget:
            return None
        self._next += 1
        self._reserved[self._next] = price
        return self._next

    def settle(self, number: int, input_tokens: int = 0, output_tokens: int = 0, estimate: int = 0) -> None:
        """Ends a reservation with what was really used.

        Args:
            estimate: our count of the input, from which the margin learns where the server counts more.
        """
        self._reserved.pop(number, None)
        self.add(input_tokens, output_tokens)
        if estimate > 0:
            self.margin = max(self.margin, input_tokens / estimate)

    def add(self, input_tokens: int, output_tokens: int) -> None:
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
