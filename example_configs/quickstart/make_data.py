"""Write the training rows and the evaluation texts of the quick start.

    python example_configs/quickstart/make_data.py                   # takes seconds; writes into data/ in this folder
    python example_configs/quickstart/make_data.py --out /tmp/data --seed 1

It needs no network and writes:

- train.jsonl: rows of `input_ids`, `attention_mask` and `labels`, which TRL and Axolotl read as they are (in Axolotl:
  `path: .../train.jsonl`, `ds_type: json` and an empty `type:`). Half of the rows are passkey documents of 75 to 128
  tokens, half are pieces of 2048 tokens of Python's library. In training, `content: skip` takes a new window of 128
  tokens out of each long piece in every epoch, so no step sees more than 128 tokens.
- judge.jsonl: pieces of 2048 tokens of other files in the same form, for loss and perplexity.
- judge.txt: the text of those files.

A model this small only keeps skills it practises: trained on texts alone it found no key at any length. Therefore half
of the rows are passkey documents. Training draws from one half of the 90,000 five-digit keys. run.py evaluates with
keys of both halves, of which train.jsonl contains at most 1,200; for keys that were never trained, draw with
corpus.PasskeyMaker(tokenizer, judging=True).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from corpus import (
    JUDGING_FILES,
    TARGET,
    TRAINING_FILES,
    WINDOW,
    PasskeyMaker,
    read_texts,
    text_document,
    tokenise,
)

DOCUMENTS = 1200  # of each kind: 4 epochs are 600 steps of 16 rows
JUDGING_DOCUMENTS = 16


def training_rows(tokenizer: Any, seed: int, documents: int = DOCUMENTS) -> list[list[int]]:
    """Return `documents` passkey documents of at most 128 token ids, then as many texts of 2048 ids."""
    rng = random.Random(seed)
    passkeys = PasskeyMaker(tokenizer)
    texts = tokenise(tokenizer, read_texts(TRAINING_FILES))
    return [
        *(passkeys.draw(rng, longest=WINDOW)[0] for _ in range(documents)),
        *(text_document(texts, TARGET, rng) for _ in range(documents)),
    ]


def judging_rows(tokenizer: Any, seed: int, documents: int = JUDGING_DOCUMENTS) -> list[list[int]]:
    """Return `documents` pieces of the evaluation files, 2048 token ids each."""
    rng = random.Random(seed)
    texts = tokenise(tokenizer, read_texts(JUDGING_FILES))
    return [text_document(texts, TARGET, rng) for _ in range(documents)]


def write_rows(path: Path, rows: Iterable[list[int]]) -> None:
    """Write one JSON object per line; every token is a label."""
    with path.open("w", encoding="utf-8") as file:
        for ids in rows:
            row = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, default=here / "base", help="folder with the tokenizer")
    parser.add_argument("--out", type=Path, default=here / "data", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="training documents of each kind")
    args = parser.parse_args()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.base)
    args.out.mkdir(parents=True, exist_ok=True)
    write_rows(args.out / "train.jsonl", training_rows(tokenizer, args.seed, args.documents))
    write_rows(args.out / "judge.jsonl", judging_rows(tokenizer, args.seed))
    (args.out / "judge.txt").write_text("\n".join(read_texts(JUDGING_FILES)), encoding="utf-8")
    for file in sorted(args.out.iterdir()):
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
