"""What sees what in the real batches of the real trainers: backend × packing × batch × checkpointing.

A run of one step is made for each route and batch size. After the step, on the very batch that was trained and with
everything in force that training had in force, a document with a jump is looked at: does its second chunk depend on
its first, do other documents?
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.records import spans

BY_POSITIONS = ("eager", "sdpa", "flex_attention")
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
XFORMERS = ("xformers",)
CHECKPOINTING = {"off": None, "reentrant": True, "not reentrant": False}
BATCHES = (1, 2)

TRL: dict[str, dict[str, Any]] = {
    "one document per row": {},
    "packing_strategy: wrapped": {"packing": True, "packing_strategy": "wrapped"},
    "packing_strategy: bfd": {"packing": True, "packing_strategy": "bfd"},
    "packing_strategy: bfd_split": {"packing": True, "packing_strategy": "bfd_split"},
    "padding_free": {"padding_free": True, "max_length": None},
}
AXOLOTL: dict[str, dict[str, Any]] = {
    "one document per row": {},
    "pad_to_sequence_len": {"pad_to_sequence_len": True, "sequence_len": 96},
    "sample_packing": {"sample_packing": True, "sequence_len": 128, "pad_to_sequence_len": False},
    "sample_packing, pad_to_sequence_len": {"sample_packing": True, "sequence_len": 128, "pad_to_sequence_len": True},
    "sample_packing, multipack_real_batches": {
        "sample_packing": True,
        "sequence_len": 128,
        "multipack_real_batches": True,
    },
    "sample_packing, its evaluation": {
        "sample_packing": True,
        "eval_sample_packing": True,
        "sequence_len": 128,
        "val_set_size": 0.3,
        "eval_steps": 1,
    },
}


@dataclass(frozen=True)
class Effect:
    """Largest change of a logit when tokens of chunk 1 change, and largest gradient that flows back.

    Attributes:
        within: in chunk 1 itself.
        after: in chunk 2 (in evaluation, which has no jumps: further on in the document).
        others: in other documents and rows.
        gradient: of chunk 2's logits at chunk 1's embeddings; None where CPUs have no backward.
        gradient_others: of chunk 2's logits at other documents' embeddings.
        documents: in the batch.
    """

    within: float
    after: float
    others: float
    gradient: float | None
    gradient_others: float | None
    documents: int

    def verdict(self) -> str:
        """ "verified", or what is wrong."""
        wrong = []
        if not self.within > 1e-3:
            wrong.append("logits do not depend on tokens")
        if not self.after > 1e-4:
            wrong.append("chunks cut apart")
        if self.others != 0.0 or self.gradient_others not in (0.0, None):
            wrong.append("neighbours seen")
        if self.gradient is not None and not self.gradient > 0.0:
            wrong.append("no gradient across the jump")
        return ", ".join(wrong) or "verified"


def effect(model: Any, batch: dict[str, Any], jumps: bool = True) -> Effect:
    """Looks at the document of the batch that has a jump with most neighbours before it."""
    import torch

    given = [batch.get(name) for name in ("input_ids", "position_ids", "attention_mask")]
    tokens, places, mask = (None if each is None else each.cpu().numpy() for each in given)
    documents = list(spans(tokens, places, mask))
    row, begin, end, jump = next(
        (row, a, b, a + cut)
        for row, a, b in sorted(documents, key=lambda each: each[1], reverse=True)
        for cut in ([int(np.argmax(np.diff(places[row, a:b]))) + 1] if jumps else [(b - a) // 2])
        if 3 <= cut <= b - a - 1 and (not jumps or places[row, a + cut] - places[row, a + cut - 1] > 1)
    )
    ids = batch["input_ids"].clone()
    first = slice(begin + 1, jump)
    ids[row, first] = 30 + (ids[row, first] - 30 + 1) % 70
    embedded: list[Any] = []

    def keep(module: Any, args: Any, out: Any) -> None:
        if out.requires_grad:
            out.retain_grad()
        embedded.append(out)

    handle = model.get_input_embeddings().register_forward_hook(keep)
    flex = model.config._attn_implementation == "flex_attention" and batch["input_ids"].device.type == "cpu"
    # flex_attention is run as it is: its compiled form takes a minute on a CPU and gives the same numbers.
    stance: Any = torch.compiler.set_stance("force_eager") if flex else nullcontext()
    try:
        with stance, torch.set_grad_enabled(not flex):
            plain = model(**batch).logits
            difference = (model(**{**batch, "input_ids": ids}).logits - plain).abs().detach()
        gradient = gradient_others = None
        if not flex:
            plain[row, jump:end].square().sum().backward()
            at = embedded[0].grad.abs()
            gradient = float(at[row, begin:jump].max())
            at[row, begin:end] = 0
            gradient_others = float(at.max())
    finally:
        handle.remove()
        model.zero_grad()
    within, after = float(difference[row, first].max()), float(difference[row, jump:end].max())
    difference[row, begin:end] = 0
    if "attention_mask" in batch:
        # What is computed at padding is used nowhere.
        difference[batch["attention_mask"] == 0] = 0
    return Effect(within, after, float(difference.max()), gradient, gradient_others, len(documents))


class Probe:
    """Records what the model receives and, after the step, looks at it under every backend of the family."""

    def __init__(self, backends: tuple[str, ...], evaluation: bool = False) -> None:
        self.backends, self.evaluation = backends, evaluation
        self.batch: dict[str, Any] = {}
        self.effects: dict[tuple[str, str], Effect] = {}

    def watch(self, model: Any, trainer: Any) -> None:
        from transformers import TrainerCallback

        model.register_forward_pre_hook(self._see, with_kwargs=True)
        probe = self

        class After(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                if not probe.evaluation:
                    probe.look(model)

            def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
                if probe.evaluation:
                    probe.look(model)

        trainer.add_callback(After())

    def _see(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        import torch

        # Neither the self-test, which has no gradients, nor what `look` does. The first batch is the fullest.
        wanted = module.training != self.evaluation and torch.is_grad_enabled() != self.evaluation
        if wanted and not self.batch:
            names = ("input_ids", "position_ids", "attention_mask")
            self.batch = {k: kwargs[k].clone() for k in names if kwargs.get(k) is not None}

    def look(self, model: Any) -> None:
        import torch

        text, was = model.config.get_text_config(), model.training
        before = text._attn_implementation
        model.train(not self.evaluation)
        for backend in self.backends:
            text._attn_implementation = backend
            for name, reentrant in CHECKPOINTING.items():
                model.gradient_checkpointing_disable()
                if reentrant is not None:
                    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                with torch.enable_grad():
                    self.effects[backend, name] = effect(model, self.batch, jumps=not self.evaluation)
        text._attn_implementation = before
        model.gradient_checkpointing_disable()
        model.train(was)


def trl_effects(folder: Path, route: str, batch: int, backends: tuple[str, ...]) -> dict[tuple[str, str], Effect]:
    """One step of SFTTrainer; effects by (backend, checkpointing)."""
    from tests.integration import trl_runs
    from tests.reference_kernels import flash_attention

    with flash_attention() if backends == FLASH else nullcontext():
        trainer = trl_runs.sft(
            folder,
            attention=_built_with(backends),
            per_device_train_batch_size=batch,
            eval_strategy="no",
            max_steps=1,
            gradient_checkpointing=False,
            **TRL[route],
        )
        probe = Probe(backends)
        probe.watch(trainer.model, trainer)
        trainer.train()
        return probe.effects


def axolotl_effects(values: dict[str, Any], route: str, backends: tuple[str, ...]) -> dict[tuple[str, str], Effect]:
    """One step of `axolotl train`; effects by (backend, checkpointing)."""
    from tests.integration import axolotl_runs
    from tests.reference_kernels import flash_attention, xformers_attention

    kernels = {FLASH: flash_attention, XFORMERS: xformers_attention}.get(backends, nullcontext)
    probe = Probe(backends, evaluation="evaluation" in route)
    with kernels():
        axolotl_runs.train({**values, "max_steps": 1, "attn_implementation": _built_with(backends)}, probe.watch)
    return probe.effects


def _built_with(backends: tuple[str, ...]) -> str:
    return "sdpa" if backends == BY_POSITIONS else backends[0]


def verdicts(measure: Callable[[int, tuple[str, ...]], dict], families: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    """A verdict by backend over both batch sizes and all kinds of checkpointing; one that differs is named."""
    found: dict[str, dict[str, str]] = {}
    for batch in BATCHES:
        for backends in families:
            for (backend, checkpointing), seen in measure(batch, backends).items():
                found.setdefault(backend, {})[f"batch {batch}, checkpointing {checkpointing}"] = seen.verdict()
    return {
        backend: next(iter(each.values()))
        if len(set(each.values())) == 1
        else "; ".join(f"{where}: {verdict}" for where, verdict in each.items() if verdict != "verified")
        for backend, each in found.items()
    }
