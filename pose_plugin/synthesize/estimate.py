"""Estimate what a run will request and cost, before it starts."""

from __future__ import annotations

from collections import Counter

from pose_plugin.synthesize.paid import Answers, Ledger
from pose_plugin.synthesize.select import Collection
from pose_plugin.synthesize.settings import JOURNAL, Settings
from pose_plugin.synthesize.tasks import MODULES
from pose_plugin.synthesize.tasks.common import Item

# Typical tokens of a question with its answer and quotes, and of a biography.
USUAL_QUESTION, USUAL_BIOGRAPHY = 150, 700


class Plan:
    """Requests and tokens of items.

    Attributes:
        requests, input_tokens: upper limits, without repeats and unusable answers.
        longest_output: tokens if each answer is as long as allowed.
        usual_output: tokens of typical answers.
    """

    def __init__(self, items: list[Item], settings: Settings) -> None:
        self.rows = Counter(item.task for item in items)
        self.requests = self.input_tokens = self.usual_output = 0
        for item in items:
            inputs = MODULES[item.task].forecast(item.documents, settings)
            self.requests += len(inputs)
            self.input_tokens += sum(inputs)
            usual = USUAL_BIOGRAPHY * len(inputs) if item.task == "biography" else USUAL_QUESTION * settings.questions
            self.usual_output += min(usual, settings.answer_tokens * len(inputs))
        self.longest_output = self.requests * settings.answer_tokens


def describe(plan: Plan, found: Collection, items: list[Item], answers: Answers, settings: Settings) -> str:
    """Return the plan as lines for a terminal."""
    ledger = Ledger(settings.price_input, settings.price_output)
    tokens = [item.tokens for item in items]
    lines = [f"documents: {found.documents} read, {len(found.long)} long, {len(found.short)} short"]
    lines += [f"  left out: {count} {reason}" for reason, count in sorted(found.dropped.items())]
    if found.markers:
        lines.append(f"  {found.markers} strings of chat templates in them are split by a space")
    lines.append(f"rows: {', '.join(f'{task} {count}' for task, count in sorted(plan.rows.items()))}")
    lines.append(f"  documents of {min(tokens)} to {max(tokens)} tokens per row, in a window of {settings.window}")
    lines.append(
        f"requests: at most {plan.requests}, {plan.input_tokens} tokens to read, about {plan.usual_output} to write "
        f"(never more than {plan.longest_output})"
    )
    mine = {item.id for item in items}
    answered = sum(answer.item in mine for answer in answers.all())
    if answered:
        lines.append(f"  {answered} answers are in {JOURNAL} already and are not requested again")
    usual = ledger.cost(plan.input_tokens, plan.usual_output)
    longest = ledger.cost(plan.input_tokens, plan.longest_output)
    if usual is None or longest is None:
        lines.append("cost: unknown; give --price-input and --price-output, per million tokens")
    else:
        lines.append(f"cost: about {usual:.4g}, with the longest answers {longest:.4g}, without repeats")
        if settings.budget is not None:
            lines.append(f"  the run stops before it exceeds {settings.budget:g} (--budget)")
    return "\n".join(lines)
