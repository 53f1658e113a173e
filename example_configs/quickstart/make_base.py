"""Train the base model of the quick start: a 512-entry tokenizer and a tiny Llama with a window of 128 tokens.

    OMP_NUM_THREADS=1 python example_configs/quickstart/make_base.py            # a few minutes on one core
    OMP_NUM_THREADS=1 python example_configs/quickstart/make_base.py --out /tmp/base --seed 1

You do not have to run it: the result is in the folder base/. The script shows how it was made.

No published RoPE model has a window so short that extending it takes minutes on a CPU. This one was trained on rows of
128 tokens, at positions 0 to 127:

- 8 of 16 rows: a library text followed by a passkey document ("What is the pass key?", see
  pose_plugin.evaluation.prompts), with an extra loss on the answer. A model this small does not learn retrieval from
  text alone: without these rows it never finds a key.
- 6 of 16 rows: texts of Python's own library.
- 2 of 16 rows: a repeated random segment, which teaches copying.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import TRAINING_FILES, WINDOW, PasskeyMaker, read_texts, text_document, tokenise
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pose_plugin.evaluation.prompts import PasskeyTemplate, random_key

VOCABULARY = 512
TEMPLATES = 2000  # enough that each word becomes one token, so filler fits into 128 tokens
EOS, PAD = "<|endoftext|>", "<|pad|>"
ROWS = {"passkey": 8, "text": 6, "copy": 2}


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters. The defaults made the committed model."""

    steps: int = 2500
    lr: float = 4e-3
    warmup: int = 50
    flat_until: float = 0.4  # share of the steps; then linear down to `end` * lr
    end: float = 0.05
    weight_decay: float = 0.01
    answer_weight: float = 0.5
    clip: float = 1.0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step as a share of lr."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        flat = self.flat_until * self.steps
        return 1.0 if step < flat else 1.0 - (1.0 - self.end) * (step - flat) / (self.steps - flat)


def make_tokenizer(texts: list[str], seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer in which every digit is one token."""
    rng = random.Random(seed)
    template = PasskeyTemplate()
    parts = template.prefix, template.filler * 2, template.key_sentence, template.question + template.answer
    passkeys = ["\n".join(parts).replace("{key}", random_key(rng)) for _ in range(TEMPLATES)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *passkeys], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=WINDOW,
        padding_side="right",
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Build a Llama with 156,096 parameters and a window of 128 tokens."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=WINDOW,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            # With the usual 0.02 the loss of answers was 0.5 after 2400 steps; with 0.06 it was 0.1 after 600.
            initializer_range=0.06,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class Rows:
    """Draw training batches: input ids [16, 128] and a mask of answer tokens [16, 128]."""

    def __init__(self, tokenizer: Any, texts: list[list[int]], seed: int) -> None:
        self.rng = random.Random(seed)
        self.texts = texts
        self.passkeys = PasskeyMaker(tokenizer)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [getattr(self, f"_{kind}")() for kind, count in ROWS.items() for _ in range(count)]
        ids, answers = zip(*rows, strict=True)
        return torch.tensor(ids), torch.tensor(answers)

    def _text(self) -> tuple[list[int], list[bool]]:
        return text_document(self.texts, WINDOW, self.rng), [False] * WINDOW

    def _passkey(self) -> tuple[list[int], list[bool]]:
        document, answer_start = self.passkeys.draw(self.rng, longest=WINDOW, sentences=False)
        front = text_document(self.texts, WINDOW - len(document), self.rng)
        ids = front + document
        start = len(front) + answer_start - 1  # the space before the key counts as part of the answer
        return ids, [index >= start for index in range(WINDOW)]

    def _copy(self) -> tuple[list[int], list[bool]]:
        segment = [self.rng.randrange(2, VOCABULARY) for _ in range(self.rng.randint(8, WINDOW // 2))]
        return (segment * (WINDOW // len(segment) + 1))[:WINDOW], [False] * WINDOW


def train(model: LlamaForCausalLM, rows: Rows, recipe: Recipe) -> None:
    """Train with AdamW on the next-token loss plus `answer_weight` times the loss of passkey answers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate)
    model.train()
    progress = tqdm(range(recipe.steps), desc="base model", unit="step")
    for step in progress:
        ids, answers = rows.batch()
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        answer_loss = losses[answers[:, 1:].flatten()].mean()
        (losses.mean() + recipe.answer_weight * answer_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{losses.mean():.2f}", answer=f"{answer_loss:.2f}")
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "base", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="training steps of 16 x 128 tokens")
    args = parser.parse_args()

    texts = read_texts(TRAINING_FILES)
    tokenizer = make_tokenizer(texts, args.seed)
    model = make_model(tokenizer, args.seed)
    train(model, Rows(tokenizer, tokenise(tokenizer, texts), args.seed), Recipe(steps=args.steps))
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(f"{args.out}: {model.num_parameters():,} parameters, {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
