"""Training for beacon_learning.py: beacons, and the models they are compared with."""

from __future__ import annotations

import random
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "example_configs"
BASE = EXAMPLES / "quickstart" / "base"
WINDOW, INTERVAL = 128, 64
RATIOS = [2, 4, 8, 16, 32, 64]
# (share of the steps, ratios, lengths of the documents): a small model must first learn to keep two tokens per beacon.
CURRICULUM = [
    (0.20, [2], [96, 128, 160]),
    (0.35, [2, 4, 8], [128, 192, 256]),
    (1.00, RATIOS, [192, 256, 384, 512]),
]
STEP_TOKENS = 4096
# Steps by what beacons are trained on, see `batches`.
KINDS = {"mixed": 1000, "text": 600, "prose": 600, "mean": 1000, "weighted": 1500}
# The paper's loss is the mean over all tokens; a text needs no digits, so larger ratios come soon.
PLAIN_CURRICULUM = [(0.20, [2, 4, 8], [160]), (1.00, RATIOS, [192, 256, 384, 512])]
PROSE_TRAINING, PROSE_JUDGING = ("lcet10", "plrabn12", "asyoulik"), ("alice29",)


def prose(names: tuple[str, ...], folder: Path = Path("outputs/beacon_prose")) -> list[str]:
    """Return the named texts of Brotli's source distribution: a report, two plays or poems, and a novel."""
    from smollm2 import get

    found = []
    with tarfile.open(get.download(folder, "Brotli==1.1.0", "--no-binary=:all:")) as archive:
        for name in names:
            found.append(get.read(archive, f"tests/testdata/{name}.txt"))
    return found


def modules() -> tuple[Any, Any]:
    """Return the modules of the quick start's corpus and of the beacon example's documents."""
    for folder in ("quickstart", "beacon"):
        sys.path.insert(0, str(EXAMPLES / folder))
    import corpus
    import quickstart_data

    return corpus, quickstart_data


class Data:
    """Draws texts of an exact length: library texts, documents of one fact, documents that end in a question."""

    def __init__(self, judging: bool) -> None:
        from transformers import AutoTokenizer

        corpus, documents = modules()
        tokenizer = AutoTokenizer.from_pretrained(BASE)
        tokenizer.model_max_length = 10**9
        self.corpus, self.eos, self.tokenizer, self.judging = corpus, tokenizer.eos_token_id, tokenizer, judging
        self.facts_of = documents.FactDocuments(tokenizer)
        self.near, self.far, self.lengths = documents.NEAR, documents.FAR, documents.LENGTHS
        self.keys = corpus.PasskeyMaker(tokenizer, judging=judging)
        files = corpus.JUDGING_FILES if judging else corpus.TRAINING_FILES
        self.texts = corpus.tokenise(tokenizer, corpus.read_texts(files))

    def text(self, length: int, rng: random.Random) -> list[int]:
        return self.corpus.text_document(self.texts, length, rng)

    @cached_property
    def prose_texts(self) -> list[list[int]]:
        return self.corpus.tokenise(self.tokenizer, prose(PROSE_JUDGING if self.judging else PROSE_TRAINING))

    def prose(self, length: int, rng: random.Random) -> list[int]:
        return self.corpus.text_document(self.prose_texts, length, rng)

    def facts(self, length: int, rng: random.Random, far: bool) -> tuple[list[int], list[int]]:
        """Return ids and the positions of the digits. With `far`, they are more than 128 tokens apart."""
        gap = self.far if far else (self.near[0], min(self.near[1], max(20, length - 90)))
        return self.facts_of.draw(length, gap, rng)

    def question(self, length: int, rng: random.Random) -> list[int]:
        """Return ids whose last but one is the digit. The key is before, outside about the last 128 tokens."""
        depth = rng.random() * max(0.0, 1 - 1.5 * WINDOW / length)
        made = self.keys.builder.document(length - 1, depth, rng.choice(self.keys.keys)[:1])
        return [*made.input_ids, self.eos]


def batches(steps: int, seed: int, tokens: int, kind: str = "weighted") -> Iterator[tuple[int, list[int], Any, Any]]:
    """Yield (step, ratios, ids, which of them are digits).

    Args:
        steps: of the whole training; the curriculum depends on it.
        seed: of the documents.
        tokens: of a step.
        kind: "weighted": three steps of facts, one of library texts. "mixed", "mean": facts and library texts in turns.
            "text", "prose": only these. "digits": only facts, with all ratios from the start, as in
            example_configs/beacon/quickstart.yaml.
    """
    import torch

    data, rng = Data(judging=False), random.Random(seed)
    curriculum = PLAIN_CURRICULUM if kind in ("text", "prose") else CURRICULUM
    # Every n-th step has texts; with "digits", none.
    every = {"weighted": 4, "mixed": 2, "mean": 2, "text": 1, "prose": 1}.get(kind, steps + 1)
    draw = data.prose if kind == "prose" else data.text
    for step in range(steps):
        _, ratios, lengths = next(part for part in curriculum if step < part[0] * steps)
        text = step % every == every - 1
        if kind == "digits":
            ratios, lengths = RATIOS, list(data.lengths)
        # A text is as long as the curriculum allows; with texts alone, lengths take turns.
        length = rng.choice(lengths) if not text else max(lengths) if every > 1 else lengths[step % len(lengths)]
        rows = [
            (draw(length, rng), []) if text else data.facts(length, rng, far=False)
            for _ in range(max(1, tokens // length))
        ]
        ids = torch.tensor([row for row, _ in rows])
        digits = torch.zeros(ids.shape, dtype=torch.bool)
        for at, (_, places) in enumerate(rows):
            digits[at, places] = True
        yield step, ratios, ids, digits


def fit(
    parameters: list[Any],
    steps: int,
    rate: float,
    losses: Callable[[], Iterator[tuple[Any, Any]]],
    kind: str = "weighted",
) -> list[float]:
    """Train with AdamW and a falling learning rate.

    Args:
        parameters: to train.
        steps: of the schedule.
        rate: the highest learning rate.
        losses: yields (loss of each token, which are digits) per step, each (rows, tokens).
        kind: "weighted": a step's loss is the digits' mean plus the mean of all others. "mixed", "digits": the mean
            over all labelled tokens. In documents with facts, only the digits are labelled, as answers in instruction
            data are; in texts, all tokens are. "mean", "text", "prose": the mean over all tokens.

    Returns:
        The digits' loss of each step that has digits.
    """
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 10) * (1 - s / steps))
    seen: list[float] = []
    for step, (each, digits) in enumerate(losses()):
        loss = each.mean() if kind not in ("weighted", "digits") else each[~digits].mean()
        if bool(digits.any()):
            own = each[digits].mean()
            seen.append(float(own.detach()))
            loss = {"weighted": loss + own, "digits": own, "mixed": own}.get(kind, loss)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 99:
            recent = sum(seen[-30:]) / max(1, len(seen[-30:]))
            others = float(each[~digits].detach().mean())
            print(f"  step {step + 1}: digits {recent:.3f}, all others {others:.3f}", flush=True)
    return seen


def token_losses(logits: Any, ids: Any) -> Any:
    """Return the loss of each token but the first, (rows, tokens − 1)."""
    from torch.nn import functional as F

    flat = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return flat.view(ids.shape[0], -1)


def beacons(
    steps: int, seed: int, tokens: int = STEP_TOKENS, kind: str = "weighted", **changes: Any
) -> tuple[Any, list[float]]:
    """Train beacons over the frozen base, see `batches`; return the PEFT model and the digits' training losses."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from pose_plugin.beacon import BeaconConfig, find_tuner, set_ratio_step

    base = AutoModelForCausalLM.from_pretrained(BASE)
    model: Any = get_peft_model(base, BeaconConfig(interval=INTERVAL, headroom=0, seed=seed, **changes)).train()
    tuner = find_tuner(model)

    def losses() -> Iterator[tuple[Any, Any]]:
        for step, ratios, ids, digits in batches(steps, seed, tokens, kind):
            set_ratio_step(model, step)
            tuner.active_config.ratios = ratios
            yield token_losses(model(ids).logits, ids), digits[:, 1:]

    seen = fit([p for p in model.parameters() if p.requires_grad], steps, 3e-3, losses, kind)
    tuner.active_config.ratios = list(RATIOS)
    return model.eval(), seen


def unfrozen(steps: int, seed: int, tokens: int = STEP_TOKENS) -> Any:
    """Train the base itself on the same batches with a sliding window: the control without memory."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(BASE).train()

    def losses() -> Iterator[tuple[Any, Any]]:
        for _, _, ids, digits in batches(steps, seed, tokens):
            mask = band(ids.shape[1], WINDOW)
            yield token_losses(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, ids), digits[:, 1:]

    fit(list(model.parameters()), steps, 1e-3, losses)
    return model.eval()


def long_base(steps: int, seed: int, length: int, tokens: int = STEP_TOKENS) -> Any:
    """Train the base with full attention on library texts of `length` tokens, with a larger RoPE base."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(BASE, max_position_embeddings=length)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    model: Any = AutoModelForCausalLM.from_pretrained(BASE, config=config).train()
    data, rng = Data(judging=False), random.Random(seed)

    def losses() -> Iterator[tuple[Any, Any]]:
        for _ in range(steps):
            ids = torch.tensor([data.text(length, rng) for _ in range(max(1, tokens // length))])
            none = torch.zeros((ids.shape[0], length - 1), dtype=torch.bool)
            yield token_losses(model(input_ids=ids, use_cache=False).logits, ids), none

    fit(list(model.parameters()), steps, 2e-3, losses)
    return model.eval()


def band(length: int, window: int, sinks: int = 0) -> Any:
    """Return the mask of a sliding window, (1, 1, length, length)."""
    import torch

    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    return ((key <= query) & ((key > query - window) | (key < sinks)))[None, None]
