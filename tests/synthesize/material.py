"""A tokenizer of single bytes with chat markers, and documents."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.models import spelled_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SUBJECTS = ("whale", "ship", "harbour", "storm", "captain", "sail", "anchor", "island", "lantern", "compass")


def byte_tokenizer() -> Any:
    """Return a tokenizer of bytes with the ChatML template."""
    found = spelled_tokenizer(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=100000,
    )  # fmt: skip
    found.chat_template = CHATML
    return found


def story(seed: int, length: int) -> str:
    """Return paragraphs with random numbers, so that no sentence occurs twice."""
    draw = random.Random(seed)
    parts, size = [], 0
    while size < length:
        sentence = (
            f"On day {draw.randrange(10**6)} the {draw.choice(SUBJECTS)} of Ahab met the {draw.choice(SUBJECTS)} "
            f"number {draw.randrange(10**6)}, and Ishmael wrote it down.{draw.choice((' ', chr(10) * 2))}"
        )
        parts.append(sentence)
        size += len(sentence)
    return "".join(parts)[:length].strip()


def make_books(folder: Path, count: int = 4, length: int = 3000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"book{number}.txt").write_text(story(number, length), encoding="utf-8")
    return folder
