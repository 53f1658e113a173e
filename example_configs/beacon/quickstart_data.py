"""Make documents with one recurring fact, for beacons on the quick start's tiny model.

    python example_configs/beacon/quickstart_data.py      # seconds; writes outputs/beacon_quickstart/train.jsonl

A document gives a pass key of one digit, then asks for it and answers repeatedly, with filler between. The gaps are 8
to 150 tokens for training and 130 to 180 for judging, where no window of 128 tokens contains the digit twice. Only
the digits have labels. Rows have the columns that Axolotl reads without a prompt type: `input_ids`, `attention_mask`,
`labels`. Filler is cut at the ends of sentences.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).parent.parent / "quickstart"
NEAR, FAR = (8, 150), (130, 180)  # tokens of filler between two answers
LENGTHS = (192, 256, 384)  # of the training rows
IGNORED = -100


class FactDocuments:
    """Draws documents of an exact length.

    Args:
        tokenizer: of the quick start's base.
    """

    def __init__(self, tokenizer: Any) -> None:
        sys.path.insert(0, str(QUICKSTART))
        from corpus import PasskeyMaker

        self.builder = builder = PasskeyMaker(tokenizer).builder
        stop = tokenizer.convert_tokens_to_ids(".")
        filler = builder.haystack.filler(4000)
        # The tokens repeat with the sentences; the first copy differs, as a text begins without a space.
        period = next(n for n in range(1, 200) if filler[300 + n : 1300 + n] == filler[300:1300])
        self.filler = filler[300 : 300 + period]
        self.ends = [at + 1 for at, token in enumerate(self.filler) if token == stop]

    def draw(self, length: int, gap: tuple[int, int], rng: random.Random) -> tuple[list[int], list[int]]:
        """Draw one document.

        Args:
            length: in tokens; at least about 80, for the opening and one answer.
            gap: minimum and maximum tokens of filler before a question (fewer if a sentence would be cut).
            rng: the only source of randomness.

        Returns:
            Token ids, (length,); the indices of the answers' digits, which the token before predicts.
        """
        made, key = self.builder, str(rng.randrange(1, 10))
        line = made.haystack.newline
        answer = made.answer_ids(key)
        spaces = next(at for at, token in enumerate(answer) if made.tokenizer.decode([token]).strip())
        place = rng.choice(self.ends)

        def fill(room: int, whole: bool = True) -> list[int]:
            """Return sentences of at most `room` tokens; if not `whole`, exactly `room` tokens, the last one cut."""
            nonlocal place
            found = [self.filler[(place + at) % len(self.filler)] for at in range(max(0, room))]
            if whole:
                ends = [at + 1 for at in range(len(found)) if (place + at) % len(self.filler) + 1 in self.ends]
                found = found[: max(ends, default=0)]
            place = (place + len(found)) % len(self.filler)
            return found

        ids = [*made.prefix, *line, *fill(rng.randrange(40) if length > 100 else 0), *made.key_line(key)]
        asked = [*line, *made.question, *answer[:spaces]]
        places: list[int] = []
        closing = len(asked) + len(answer) - spaces + len(line)
        while True:
            room = rng.randint(*gap)
            left = length - len(ids) - closing
            if room > left:
                if places:
                    break
                room = left  # every document has an answer
            ids += [*fill(room), *asked]
            places.append(len(ids))
            ids += [*answer[spaces:], *line]
        return [*ids, *fill(length - len(ids), whole=False)][:length], places


def row(ids: list[int], places: list[int]) -> dict[str, list[int]]:
    """Return a training row in which only the digits have labels."""
    labels = [IGNORED] * len(ids)
    for at in places:
        labels[at] = ids[at]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, default=QUICKSTART / "base", help="folder with the tokenizer")
    parser.add_argument("--out", type=Path, default=Path("outputs/beacon_quickstart"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=8000)
    args = parser.parse_args()

    from transformers import AutoTokenizer

    documents, rng = FactDocuments(AutoTokenizer.from_pretrained(args.base)), random.Random(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "train.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(args.rows):
            length = rng.choice(LENGTHS)
            near = (NEAR[0], min(NEAR[1], length - 90))
            file.write(json.dumps(row(*documents.draw(length, near, rng)), separators=(",", ":")) + "\n")
    print(f"{args.out / 'train.jsonl'}: {args.rows} rows")


if __name__ == "__main__":
    main()
