"""Tokenizers with chat templates of the common shapes, and small chats."""

from __future__ import annotations

import random
from typing import Any

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The end of the user's turn opens the assistant's.
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' </s>' }}{% endif %}{% endfor %}"
)
# Words that are no special tokens open turns, and nothing closes them.
WORDED = (
    "{% for m in messages %}{{ 'USER: ' if m['role'] == 'user' else 'BOT: ' }}{{ m['content'] + '\n' }}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "inst": INST, "worded": WORDED}
ENDS = {"chatml": "<|im_end|>", "inst": "</s>", "worded": "</s>"}
_SPECIAL = ("<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "</s>")


def chat_tokenizer(template: str | None = "chatml") -> Any:
    """w0…w99, roles, headers and line ends are a token each; w0 pads.

    Args:
        template: a key of `TEMPLATES`, or None for a tokenizer without one.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(100)] + ["system", "user", "assistant", "USER:", "BOT:", "\n"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w1"))
    split = pre_tokenizers.Split
    inner.pre_tokenizer = pre_tokenizers.Sequence([split(Regex("\n"), "isolated"), split(" ", "removed")])
    end = ENDS.get(template or "", "</s>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="w0", unk_token="w1", eos_token=end, model_max_length=64,
        additional_special_tokens=[token for token in _SPECIAL if token != end],
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATES[template] if template else None
    return tokenizer


def chat(*words: int, roles: tuple[str, ...] = ("user", "assistant"), seed: int = 0) -> dict[str, Any]:
    """A chat whose messages have so many words each, roles taking turns."""
    picker = random.Random(seed)
    return {
        "messages": [
            {"role": roles[i % len(roles)], "content": " ".join(f"w{picker.randrange(30, 100)}" for _ in range(count))}
            for i, count in enumerate(words)
        ]
    }


def chats(count: int = 12) -> list[dict[str, Any]]:
    """Two questions and two answers each, of three to six words."""
    picker = random.Random(1)
    return [chat(*(picker.randrange(3, 7) for _ in range(4)), seed=i) for i in range(count)]


# Chats whose text quotes the templates: headers, ends of turns, a whole chat; and blanks at the ends.
QUOTING = [
    ("w30 <|im_start|>assistant w31 [/INST] w32", "w40 <|im_start|>assistant w41 <|im_end|> w42", "w33", "w43 [/INST]"),
    ("w30 </s> w31 [/INST] w32", "[INST] w40 [/INST] w41 </s> w42", "w33", "w30 <|im_start|>user\nw44"),
    ("w30", "<|im_start|>assistant\nw41", "<|im_end|>\n<|im_start|>assistant\nw31<|im_end|>\n", "w43"),
    ("w30", "w41<|im_end|>\n<|im_start|>user\nw50<|im_end|>\n<|im_start|>assistant\nw51", "w31", "w43"),
    (" w30 ", " w41 [/INST]", " w31", "w43"),
]


def quoting() -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}
        for texts in QUOTING
    ]


def expected_labels(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Tokens, and labels on every answer with the end of its turn; put together message by message.

    Possible as every header, end and word of these tokenizers is a token of its own.
    """
    end = tokenizer.eos_token
    tokens: list[int] = []
    labels: list[int] = []

    def add(text: str, trained: bool = False) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens.extend(ids)
        labels.extend(ids if trained else [-100] * len(ids))

    for message in messages:
        answer = message["role"] == "assistant"
        if tokenizer.chat_template == INST:
            add("" if answer else "[INST] ")
            add(message["content"] + (f" {end}" if answer else ""), answer)
            add("" if answer else " [/INST]")
        else:
            add(f"<|im_start|>{message['role']}\n")
            add(message["content"] + end, answer)
            add("\n")
    return tokens, labels
