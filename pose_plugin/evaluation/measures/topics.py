"""Topic retrieval: of a long conversation about many things, what was the first? (after LongChat, Li et al. 2023)

Harder than a passkey: nothing marks the answer, and every other topic looks the same. Users report models that find
every passkey and no topic. The conversation is made here, so scores are not LongChat's; they compare models with each
other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import PrivateAttr

from pose_plugin.config import PositiveInt
from pose_plugin.evaluation.measure import Windows
from pose_plugin.evaluation.prompts import Haystack, require_room
from pose_plugin.evaluation.results import Result
from pose_plugin.evaluation.retrieval import Prompt, Retrieval
from pose_plugin.utils.errors import PoSEError

FEWEST, MOST = 5, 70
TOKENS_PER_TOPIC = 400
"""About what a topic of LongChat takes; the number of topics follows from the length."""

TOPICS = (
    "bread baking", "alpine glaciers", "chess openings", "tide tables", "Roman roads", "violin making",
    "desert foxes", "wind turbines", "paper folding", "volcanic islands", "railway timetables", "honey bees",
    "medieval castles", "soap bubbles", "deep sea fish", "coffee roasting", "night photography", "stone bridges",
    "penguin colonies", "garden ponds", "sailing knots", "meteor showers", "street markets", "wool spinning",
    "mountain rescue", "jazz pianists", "cave paintings", "lighthouse keepers", "bicycle repair", "monsoon rains",
    "puppet theatre", "Arctic explorers", "watch repair", "mushroom picking", "olive harvests", "opera costumes",
    "river dolphins", "glass blowing", "kite flying", "postage stamps", "solar eclipses", "ski jumping",
    "tea ceremonies", "canal boats", "map making", "figure skating", "sourdough starters", "bird migration",
    "clay pottery", "film projectors", "tropical orchids", "crossword puzzles", "hot air balloons",
    "marathon training", "sand dunes", "ancient alphabets", "model trains", "cheese cellars", "coral reefs",
    "folk dances", "snow leopards", "bamboo forests", "radio plays", "rock climbing", "harbour cranes",
    "water clocks", "tulip fields", "space probes", "circus tents", "maple syrup", "carrier pigeons", "salt mines",
    "fountain pens", "tree houses", "rope bridges", "thunder storms",
)  # fmt: skip
TALK = (
    "USER: That is new to me. Could you tell me more about it?\n"
    "ASSISTANT: Of course. Much of it has to do with patience, and most people learn it from someone who has done it "
    "for years.\n"
    "USER: How long does that take?\nASSISTANT: It depends. Some need a summer, others need half of their life.\n"
    "USER: And what is the usual mistake?\n"
    "ASSISTANT: To begin in a hurry. It is better to watch for a while and to take notes.\n"
)


def topics(model: Any, tokenizer: Any, lengths: Sequence[int], **options: Any) -> Result:
    """Measure topic retrieval; `options` are the fields of `Topics`.

    Example:
        >>> topics(model, tokenizer, [8192], trials=20).metrics()
        {'topics/first/8192': 0.35}
    """
    return Topics(**options).measure(model, tokenizer, lengths)


class Topics(Retrieval):
    """A conversation about 5 to 70 topics, and the question what the first one was.

    Attributes:
        count: topics of a conversation; default: one for each 400 tokens of the length, 5 to 70.
    """

    name: ClassVar[str] = "topics"
    title: ClassVar[str] = "Topics, {kind}: mean score"
    label: ClassVar[str] = "first topics found"
    steps: ClassVar[int] = 12
    rules: ClassVar[dict[str, str]] = {
        "first": "1 if the first topic of the list that the answer names is the one that was talked about first"
    }

    count: PositiveInt | None = None

    _haystack: Any = None
    _openings: dict[str, list[int]] = PrivateAttr({})

    def prepare(self, tokenizer: Any, lengths: Sequence[int], windows: Windows | None = None) -> None:
        if self.count is not None and not 2 <= self.count <= len(TOPICS):
            raise PoSEError(
                f"count={self.count} topics: give 2 to {len(TOPICS)}, or leave it out for 5 to 70 by length"
            )
        self._haystack = Haystack(tokenizer, self.filler or TALK)
        self._openings = {
            topic: self._haystack.line(
                f"USER: Now I would like to talk about {topic}.\nASSISTANT: Gladly. Let us talk about {topic}."
            )
            for topic in TOPICS
        }
        super().prepare(tokenizer, lengths, windows)

    def topics_of(self, length: int) -> int:
        """Return the topics of a conversation of `length` tokens."""
        return self.count or min(MOST, max(FEWEST, length // TOKENS_PER_TOPIC))

    def prompts(self, length: int) -> list[Prompt]:
        hay, number = self._haystack, self.topics_of(length)
        begin = [*hay.begin, *hay.piece("Below is a conversation about several topics."), *hay.newline]
        question = hay.piece(
            "USER: What was the first topic that we talked about in this conversation? Only name the topic.\n"
            "ASSISTANT: The first topic that we talked about was"
        )
        question = [*hay.newline, *question]
        budget = max(len(hay.piece(f" {topic}", after="was")) for topic in TOPICS) + 4
        found = []
        for trial in range(self.trials):
            chosen = random.Random(f"{self.seed}/{length}/{trial}").sample(TOPICS, number)
            fixed = budget + len(begin) + len(question) + sum(len(self._openings[topic]) for topic in chosen)
            require_room(f"conversation of {number} topics", length, length - fixed)
            room, ids = length - fixed, list(begin)
            filler = hay.filler(room)
            for i, topic in enumerate(chosen):
                # The talk runs on where it stopped, so that the talk differs between topics.
                ids += self._openings[topic] + filler[room * i // number : room * (i + 1) // number]
            found.append(Prompt("first", ids + question, budget, length, None, (chosen[0],)))
        return found

    def score(self, answer: str, prompt: Prompt) -> float:
        text = " ".join(answer.lower().split())
        found = [(text.find(topic.lower()), topic) for topic in TOPICS]
        named = min(((at, topic) for at, topic in found if at >= 0), default=(0, ""))
        return float(named[1] == prompt.expected[0])

    def setting(self) -> str:
        return "conversations about several topics"

    def chance(self, prompt: Prompt) -> str:
        return f"1/{self.topics_of(prompt.length)}"
