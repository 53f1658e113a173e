"""Retrieval without shared words: the question names what a fact implies (after NoLiMa, arXiv 2502.05167).

    … Boris climbed the Eiffel Tower. …   Which person has been to France?

A model that looks for the words of the question finds nothing; it has to know that the one implies the other. Each
fact is also asked for in its own words, in the same text: what `literal` finds and `associated` does not is lost to the
association, not to the distance. The pairs are made here, so scores are not NoLiMa's.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from pose_plugin.evaluation.measure import Windows
from pose_plugin.evaluation.measures.needle import DEPTHS
from pose_plugin.evaluation.prompts import Haystack, require_room
from pose_plugin.evaluation.results import Result
from pose_plugin.evaluation.retrieval import Prompt, Retrieval, for_each_depth

FACTS = 4
"""People in a text; one of them is asked for."""
# What a person does, and a question about it that shares no content word. No fact answers another one's question.
PAIRS = (
    ("climbed the Eiffel Tower", "Which person has been to France?"),
    ("walked through the Colosseum", "Which person has been to Italy?"),
    ("sketched the pyramids of Giza", "Which person has been to Egypt?"),
    ("fed kangaroos near Sydney", "Which person has been to Australia?"),
    ("waved at the guards of Buckingham Palace", "Which person has been to England?"),
    ("slept in a hut below Mount Fuji", "Which person has been to Japan?"),
    ("photographed the Taj Mahal", "Which person has been to India?"),
    ("danced at the carnival of Rio de Janeiro", "Which person has been to Brazil?"),
    ("never eats meat, milk or eggs", "Which person is vegan?"),
    ("injects insulin before lunch", "Which person has diabetes?"),
    ("sneezes whenever the birches bloom", "Which person has a pollen allergy?"),
    ("cannot tell red from green", "Which person is colour blind?"),
    ("drills molars and fits crowns", "Which person is a dentist?"),
    ("defends clients in court", "Which person is a lawyer?"),
    ("lands jets on aircraft carriers", "Which person is a pilot?"),
    ("kneads dough from three in the morning", "Which person is a baker?"),
    ("milks forty cows", "Which person is a farmer?"),
    ("speaks in the Bundestag", "Which person is a politician?"),
    ("measures the orbits of comets", "Which person is an astronomer?"),
    ("plays the cello in an orchestra", "Which person is a musician?"),
    ("serves twenty aces per match", "Which person is good at tennis?"),
    ("checkmated a grandmaster", "Which person is good at chess?"),
    ("sailed from Cork to Boston", "Which person has crossed the Atlantic?"),
    ("keeps a poodle", "Which person owns a dog?"),
)
NAMES = (
    "Agnes", "Boris", "Carmen", "Dmitri", "Elena", "Felix", "Greta", "Hassan", "Ingrid", "Jorge", "Katya", "Laszlo",
    "Miriam", "Nadia", "Oskar", "Paula", "Quentin", "Rosa", "Stefan", "Tamara", "Ursula", "Viktor", "Wilma", "Yusuf",
)  # fmt: skip
INTRO = "Below is a long text. It mentions some people; remember what it says about them."


def association(model: Any, tokenizer: Any, lengths: Sequence[int], **options: Any) -> Result:
    """Measure retrieval without shared words; `options` are the fields of `Association`.

    Example:
        >>> association(model, tokenizer, [8192], trials=20).metrics()
        {'association/literal/8192': 0.95, 'association/associated/8192': 0.4}
    """
    return Association(**options).measure(model, tokenizer, lengths)


class Association(Retrieval):
    """Four facts about four people in a text, and the question who one of them is."""

    name: ClassVar[str] = "association"
    title: ClassVar[str] = "Association, {kind}: mean score"
    label: ClassVar[str] = "people found"
    depth_label: ClassVar[str] = "depth of the fact"
    steps: ClassVar[int] = 8
    rules: ClassVar[dict[str, str]] = dict.fromkeys(
        ("literal", "associated"), "1 if the first of the people that the answer names is the right one"
    )

    _haystack: Any = None

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        self.trials = for_each_depth(self.trials, DEPTHS)
        self._haystack = Haystack(tokenizer, self.filler)
        super().prepare(tokenizer, lengths, windows)

    def prompts(self, length: int) -> list[Prompt]:
        return [
            self.prompt(kind, length, DEPTHS[trial % len(DEPTHS)], random.Random(f"{self.seed}/{length}/{trial}"))
            for kind in self.rules
            for trial in range(self.trials)
        ]

    def prompt(self, kind: str, length: int, depth: float, draw: random.Random) -> Prompt:
        """Return one prompt; both kinds have the same text if `draw` is in the same state.

        Raises:
            PoSEError: a length below what the text around the facts takes.
        """
        hay = self._haystack
        names, pairs = draw.sample(NAMES, FACTS), draw.sample(PAIRS, FACTS)
        facts = [hay.line(f"{name} {does}.") for name, (does, _) in zip(names, pairs, strict=True)]
        # The first one is asked for. The others are spread evenly from there, and round again from the start.
        places = [depth, *((depth + i / FACTS) % 1 for i in range(1, FACTS))]
        does, associated = pairs[0]
        question = f"Which person {does}?" if kind == "literal" else associated
        head = [*hay.begin, *hay.piece(INTRO), *hay.newline]
        tail = [*hay.newline, *hay.piece(f"Question: {question} Give the name only.\nAnswer:")]
        budget = max(len(hay.piece(f" {name}", after=":")) for name in NAMES) + 4
        room = length - budget - len(head) - len(tail) - sum(map(len, facts))
        require_room("association prompt", length, room)
        hidden = hay.hide(sorted(zip(places, facts, strict=True), key=lambda fact: fact[0]), room)
        return Prompt(kind, head + hidden + tail, budget, length, depth, (names[0],))

    def score(self, answer: str, prompt: Prompt) -> float:
        named = re.search("|".join(NAMES), answer)
        return float(named is not None and named.group() == prompt.expected[0])

    def setting(self) -> str:
        where = "grass and sky" if self.filler is None else "a real text"
        return f"facts about {FACTS} people in {where}, asked for in their words or by what they imply"

    def chance(self, prompt: Prompt) -> str:
        return f"1/{FACTS}"
