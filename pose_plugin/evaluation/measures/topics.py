"""Topic retrieval: of a long conversation about many things, what was the first? (after LongChat, Li et al. 2023)

Harder than a passkey: nothing marks the answer, and every other topic looks the same. Users report models that find
every passkey and no topic. The conversation is made here, so figures are not LongChat's; they compare models with each
other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from pose_plugin.evaluation.prompts import PasskeyBuilder, leading_ids
from pose_plugin.evaluation.retrieval import Prompt, RetrievalResult, ask, require_counts
from pose_plugin.utils.errors import PoSEError

FEWEST, MOST = 5, 70
TOKENS_A_TOPIC = 400
"""About what a topic of LongChat takes; the number of topics follows from the length by it."""

TOPICS = (
    "bread baking",
    "alpine glaciers",
    "chess openings",
    "tide tables",
    "Roman roads",
    "violin making",
    "desert foxes",
    "wind turbines",
    "paper folding",
    "volcanic islands",
    "railway timetables",
    "honey bees",
    "medieval castles",
    "soap bubbles",
    "deep sea fish",
    "coffee roasting",
    "night photography",
    "stone bridges",
    "penguin colonies",
    "garden ponds",
    "sailing knots",
    "meteor showers",
    "street markets",
    "wool spinning",
    "mountain rescue",
    "jazz pianists",
    "cave paintings",
    "lighthouse keepers",
    "bicycle repair",
    "monsoon rains",
    "puppet theatre",
    "Arctic explorers",
    "watch repair",
    "mushroom picking",
    "olive harvests",
    "opera costumes",
    "river dolphins",
    "glass blowing",
    "kite flying",
    "postage stamps",
    "solar eclipses",
    "ski jumping",
    "tea ceremonies",
    "canal boats",
    "map making",
    "figure skating",
    "sourdough starters",
    "bird migration",
    "clay pottery",
    "film projectors",
    "tropical orchids",
    "crossword puzzles",
    "hot air balloons",
    "marathon training",
    "sand dunes",
    "ancient alphabets",
    "model trains",
    "cheese cellars",
    "coral reefs",
    "folk dances",
    "snow leopards",
    "bamboo forests",
    "radio plays",
    "rock climbing",
    "harbour cranes",
    "water clocks",
    "tulip fields",
    "space probes",
    "circus tents",
    "maple syrup",
    "carrier pigeons",
    "salt mines",
    "fountain pens",
    "tree houses",
    "rope bridges",
    "thunder storms",
)
TALK = (
    "USER: That is new to me. Could you tell me more about it?\n"
    "ASSISTANT: Of course. Much of it has to do with patience, and most people learn it from someone who has done it "
    "for years.\n"
    "USER: How long does that take?\nASSISTANT: It depends. Some need a summer, others need half of their life.\n"
    "USER: And what is the usual mistake?\n"
    "ASSISTANT: To begin in a hurry. It is better to watch for a while and to take notes.\n"
)
RULE = "1 if the first topic of the list that the answer names is the one that was talked about first"


def topics(
    model: Any,
    tokenizer: Any,
    lengths: Sequence[int],
    trials: int = 20,
    count: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
    filler_text: str | None = None,
) -> RetrievalResult:
    """Measures topic retrieval. Prompts depend on the seed alone, so every model gets the same ones.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        lengths: in tokens, prompt plus answer.
        trials: prompts at each length.
        count: topics of a conversation; default: one for each 400 tokens of the length, 5 to 70.
        seed: of the topics and their order.
        batch_size: prompts in one forward; default: about 16k tokens.
        progress: whether to show a progress bar.
        filler_text: a real text to talk between the topics, instead of a few sentences over and over.

    Raises:
        PoSEError: a length that the topics do not fit in, counts that cannot work.
    """
    prompts = topic_prompts(tokenizer, lengths, trials, count, seed, filler_text)
    done = ask(model, tokenizer, prompts, score, "topics", batch_size, progress)
    example = PasskeyBuilder(tokenizer).tokenizer.decode(prompts[0].ids)
    counts = list(dict.fromkeys(count or topics_of(length) for length in sorted(set(lengths))))
    setting = f"conversations of {', '.join(map(str, counts))} topics, seed {seed}"
    chance = " … ".join(f"1/{n}" for n in counts)
    return RetrievalResult("topics", tuple(done), {"first": RULE}, {"first": chance}, {"first": example}, setting)


def topics_of(length: int) -> int:
    """Topics of a conversation of `length` tokens."""
    return min(MOST, max(FEWEST, length // TOKENS_A_TOPIC))


def topic_prompts(
    tokenizer: Any,
    lengths: Sequence[int],
    trials: int = 20,
    count: int | None = None,
    seed: int = 0,
    filler_text: str | None = None,
) -> list[Prompt]:
    """The prompts of `topics`; the arguments and what is raised are the same."""
    require_counts(lengths, trials)
    if count is not None and not 2 <= count <= len(TOPICS):
        raise PoSEError(f"count={count} topics: give 2 to {len(TOPICS)}, or leave it out for 5 to 70 by length")
    text = PasskeyBuilder(tokenizer, filler_text=filler_text or TALK)
    begin = [
        *leading_ids(text.tokenizer),
        *text._piece("Below is a conversation about several topics."),
        *text._newline,
    ]
    question = [*text._newline, *text._piece(
        "USER: What was the first topic that we talked about in this conversation? Only name the topic.\n"
        "ASSISTANT: The first topic that we talked about was"
    )]  # fmt: skip
    openings = {topic: _opening(text, topic) for topic in TOPICS}
    budget = max(len(text._piece(f" {topic}", after="was")) for topic in TOPICS) + 4
    prompts = []
    for length in sorted(set(lengths)):
        number = count or topics_of(length)
        for trial in range(trials):
            chosen = random.Random(f"{seed}/{length}/{trial}").sample(TOPICS, number)
            room = length - budget - len(begin) - len(question) - sum(len(openings[topic]) for topic in chosen)
            if room < 0:
                raise PoSEError(
                    f"length={length} is smaller than {number} topics take, {length - room} tokens with this "
                    f"tokenizer; use a length of at least {length - room}, or fewer topics (count)"
                )
            filler = text._filler_ids(room)[:room]
            ids = list(begin)
            for i, topic in enumerate(chosen):
                # The talk runs on where it stopped, so that topics differ in what is said.
                ids += openings[topic] + filler[room * i // number : room * (i + 1) // number]
            prompts.append(Prompt("first", ids + question, budget, length, 0.0, (chosen[0],)))
    return prompts


def score(kind: str, answer: str, expected: tuple[str, ...]) -> float:
    """See RULE."""
    text = " ".join(answer.lower().split())
    found = [(text.find(topic.lower()), topic) for topic in TOPICS]
    named = min(((at, topic) for at, topic in found if at >= 0), default=(0, ""))
    return float(named[1] == expected[0])


def _opening(text: PasskeyBuilder, topic: str) -> list[int]:
    said = f"USER: Now I would like to talk about {topic}.\nASSISTANT: Gladly. Let us talk about {topic}."
    return [*text._newline, *text._piece(said), *text._newline]
