"""Checks, on the model, collator and attention function that are about to train, that training can work.

Five or six short forwards look for four silent failures:
1. Chunks are cut apart: tokens after a jump do not depend on the tokens before it.
2. Packed documents are mixed: a document depends on its neighbour.
3. Positions are ignored, taken modulo the old window or cut off at its end, or one row's positions are used for
   another: logits do not follow the row's own positions.
4. The same in some attention layers only, which the logits do not show.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pose_plugin.attention import attention_function
from pose_plugin.collator import PositionCollator
from pose_plugin.features import Feature, Packing, joined
from pose_plugin.positions import Window
from pose_plugin.rope.read import original_length, text_config
from pose_plugin.selftest_layers import Layers
from pose_plugin.utils.distributed import all_problems, outside_training
from pose_plugin.utils.errors import PoSEError, SelfTestError, shown
from pose_plugin.utils.models import unwrap

# An effect below this share of the effect within a chunk counts as none. The silent failure gives exactly 0, a working
# model several percent (measured: 0.074 of 0.573), and rounding in bf16 leaves unrelated rows unchanged.
_NOTHING = 1e-4
# Linear layers that round all tokens of a batch by one scale, or by columns chosen from all of them: each token moves
# every other one a little (measured in fp8: 0.05 of 1.7; a leak moves about as much as the tokens' own document).
_SHARED_ROUNDING = ("Float8Linear", "Linear8bitLt")
_ROUNDING = 0.2
_NO_HOOKS = nullcontext()


@dataclass(frozen=True)
class SelfTestReport:
    """The largest change of any logit, per question.

    Attributes:
        same_chunk: within chunk 1, when tokens of chunk 1 change.
        after_jump: in chunk 2, when tokens of chunk 1 change. 0 means that chunks are cut apart.
        neighbour: in the other documents of the row, when chunk 1 or the document's end changes; 0 if rows are not
            packed.
        own_positions: in chunk 2, when the row's skip changes, once by the length of the old window. 0 means that
            positions are ignored; None means that the target leaves no room for another skip.
        other_row: in the other row, when this row's skip changes.
        packed: whether rows hold several documents.
        attention: the attention implementation.
        shared_rounding: whether 8-bit layers round all rows together, so that each one moves the others a little.
        deaf_layers: attention layers whose output does not change with the skip, while others' outputs do.
        rotary: whether the model has rotary positions.
    """

    same_chunk: float
    after_jump: float
    neighbour: float
    own_positions: float | None
    other_row: float
    packed: bool
    attention: str
    shared_rounding: bool = False
    deaf_layers: tuple[str, ...] = ()
    rotary: bool = True

    def __str__(self) -> str:
        parts = [f"{self.same_chunk:.3g} in chunk 1", f"{self.after_jump:.3g} in chunk 2"]
        parts += [f"{self.neighbour:.3g} in other documents"] if self.packed else []
        text = f"new tokens in chunk 1 change a logit by up to {', '.join(parts)}"
        if self.own_positions is not None:
            text += f"; another skip changes one in chunk 2 by up to {self.own_positions:.3g}"
        return f"{text} ({self.attention})"

    def problems(self) -> list[str]:
        """Return what is wrong and what to set, one sentence each; empty if training can work."""
        own = self.own_positions if self.own_positions is not None else self.same_chunk
        values = (self.same_chunk, self.after_jump, self.neighbour, own, self.other_row)
        if not all(math.isfinite(value) for value in values):
            return [
                f"the logits are not finite ({values}). Train in bf16 or fp32, and check the base model on plain text"
            ]
        nothing = _NOTHING * self.same_chunk
        found = []
        if self.same_chunk == 0.0:
            found.append("logits do not depend on the tokens at all: check that the model's weights were loaded")
        elif self.after_jump <= nothing:
            advice = "Turn packing off, or use" if self.packed else "Use"
            found.append(
                f"chunk 2 does not see chunk 1 (change of logits {self.after_jump:.3g}, within chunk 1 "
                f"{self.same_chunk:.3g}): the attention function takes the jump for a new document, and "
                f"no long distance would be learned. {advice} attn_implementation sdpa, eager "
                f"or flash_attention_2, and keep the attention_mask that PoSECollator returns"
            )
        leak = max(nothing, _ROUNDING * self.after_jump) if self.shared_rounding else nothing
        if self.neighbour > leak:
            found.append(
                f"packed documents see each other (change of logits {self.neighbour:.3g}). Turn packing off "
                "(Axolotl: sample_packing: false; TRL: packing=False), or use FlashAttention with a batch size of 1 "
                "and, for linear-attention layers, flash-linear-attention"
            )
        # If chunks are cut apart, a new skip changes no distance that counts, so this question has no answer. If rows
        # share positions, one row moves both rows or none.
        if self.after_jump > nothing and own <= nothing and self.other_row <= nothing:
            found.append(self._deaf(own))
        elif self.after_jump > nothing and self.deaf_layers:
            found.append(
                f"{len(self.deaf_layers)} attention layers do not follow position_ids, others do (the first: "
                f"{self.deaf_layers[0]}): a RoPE kernel or the model's own code ignores them there, or takes them "
                "modulo the old window. Turn the kernel off (Liger: liger_rope: false, use_liger_kernel=False)"
            )
        # Shared rounding moves other rows about as much as a change of positions does.
        if self.other_row > nothing and not self.shared_rounding:
            found.append(
                f"one row's positions move another row's logits (change {self.other_row:.3g}): the RoPE "
                f"kernel uses one row's positions for the whole batch. Turn it off (Liger: liger_rope: "
                f"false), or use a batch of 1"
            )
        return found

    def _deaf(self, change: float) -> str:
        if not self.rotary:
            return (
                f"logits do not follow position_ids (change {change:.3g}), as the model has no rotary positions: "
                "skipped positions teach it nothing. Train a RoPE model such as Llama, Mistral or Qwen"
            )
        return (
            f"logits do not follow position_ids (change {change:.3g}): a fused RoPE kernel or the model's own code "
            "ignores them, or takes them modulo the old window. Turn the kernel off (Liger: liger_rope: false, "
            "use_liger_kernel=False)"
        )


def self_test(
    model: torch.nn.Module,
    collator: PositionCollator,
    *,
    forward: Callable[[Mapping[str, Any]], torch.Tensor] | None = None,
    pack: Packing | str | None = None,
    rows: int = 2,
    length: int = 24,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> SelfTestReport:
    """Raise SelfTestError, with what was measured and what to set, if the run would learn no long distances.

    The forwards run in training mode, because gradient checkpointing and the missing cache decide how positions are
    read. RNG states, gradients, modes and the collator's counts stay as they were. Every rank must call it.

    Args:
        model: built and placed as it will be trained.
        collator: the training collator.
        forward: batch → logits of shape (batch, length, vocabulary); default `model(**batch).logits`.
        pack: how rows hand over several documents (see `Packing`); None if each row is one document.
        rows: rows in the test batch; 2 shows whether rows are mixed up, 1 is for frameworks that allow no more.
        length: tokens of each document.
        autocast: the mixed-precision context of the training step.
    """
    collator.settle_target(unwrap(model).config)
    run = forward or (lambda batch: model(**batch).logits)
    packing = Packing(pack) if pack is not None else None
    layers = Layers(model)
    # At most half of the target, so that there is room for a jump.
    probe = _Probe(model, collator, packing, rows, max(8, min(length, collator.settings.target_length // 2)))

    def logits(hooks: AbstractContextManager[Any] = _NO_HOOKS, **change: Any) -> torch.Tensor:
        # Equal random states make dropout masks equal, so that a change of logits has one cause.
        torch.manual_seed(0)
        with hooks:
            return run(probe.batch(**change)).float()

    try:
        with _as_in_training(model), autocast(), outside_training(model):
            plain = logits(layers.recorded())
            changed, moved = logits(change_tokens=True), logits(move_row=0)
            other = logits(move_row=rows - 1, half_way=True)
            # Recurrent layers forget, so a leak only shows right behind what was changed.
            ended = logits(change_end=True) if packing else plain
            logits(layers.replayed(), move_row=0)
    except (AssertionError, RuntimeError) as error:
        # Every rank of a run has the same kernels, so all of them come here.
        found = [_without_gpu(error, probe.device)]
    else:
        report = replace(probe.report(plain, changed, moved, other, ended), deaf_layers=layers.deaf())
        found = report.problems()
    problems = all_problems(found)
    if problems:
        raise SelfTestError(
            "PoSE self-test: this run would train without learning long distances.\n- "
            + "\n- ".join(problems)
            + f"\nMeasured with attn_implementation={probe.attention}, packed rows: {packing is not None}. "
            "To train anyway, set self_test: false"
        )
    return report


def _without_gpu(error: Exception, device: torch.device) -> str:
    """Return what is wrong if a kernel found no GPU; raise any other error again."""
    if device.type != "cpu" or not re.search("CUDA|NVIDIA|[Tt]riton|active driver", str(error)):
        raise error
    return (
        f"a kernel of this run needs a GPU, and the model is on the CPU ({str(error).splitlines()[0]}). Axolotl's LoRA "
        "kernels are turned off by lora_mlp_kernel: false, lora_qkv_kernel: false and lora_o_kernel: false"
    )


@contextmanager
def _as_in_training(model: torch.nn.Module) -> Iterator[None]:
    """Put the model into training mode, and restore modes and random states at the end; no gradients."""
    states = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        model.train()
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            yield
    finally:
        for module, training in states:
            module.training = training


class _Probe:
    """Batches of random tokens with a known jump in the middle of every document."""

    def __init__(
        self, model: torch.nn.Module, collator: PositionCollator, pack: Packing | None, rows: int, length: int
    ) -> None:
        self.collator, self.pack, self.rows = collator, pack, rows
        self.attention = attention_function(model)
        self.shared_rounding = any(type(module).__name__ in _SHARED_ROUNDING for module in model.modules())
        self.device = next(model.parameters()).device
        config = text_config(unwrap(model).config)
        vocabulary = int(config.vocab_size)
        # L_0, the window of the base; 0 if the model was not extended.
        self.window = int(original_length(config) or 0)
        self.rotary = any("rotary" in type(module).__name__.lower() for module in model.modules()) or any(
            name.endswith("inv_freq") for name, _ in model.named_buffers()
        )
        # Rows of different lengths, so that there is padding if the collator pads.
        documents = 3 if pack else 1
        self.sizes = [[length - row - document for document in range(documents)] for row in range(rows)]
        generator = np.random.default_rng(0)
        # Leaves out low ids, which are often special tokens, unless the vocabulary is tiny.
        low = min(32, vocabulary // 2)
        self.tokens = [[generator.integers(low, vocabulary, size) for size in row] for row in self.sizes]
        self.jump = length // 2 - 1
        self.document = documents // 2
        self.span = (low, vocabulary)

    def batch(
        self,
        change_tokens: bool = False,
        change_end: bool = False,
        move_row: int | None = None,
        half_way: bool = False,
    ) -> dict[str, Any]:
        """Return the batch, with one change. Without one, every tested document ends at the target.

        Args:
            change_tokens: change the tokens of chunk 1 of the tested document in the first row.
            change_end: change the last tokens of the tested document in the first row.
            move_row: give chunk 2 of this row's tested document another skip, smaller by the old window.
            half_way: move it by half of the skip instead. Positions that are cut off at the end of the old window would
                not change.
        """
        tokens = [[document.copy() for document in row] for row in self.tokens]
        if change_tokens or change_end:
            low, vocabulary = self.span
            first = tokens[0][self.document][1 : self.jump] if change_tokens else tokens[0][self.document][-2:]
            # The next id, and the first one after the last: always another id.
            first[:] = low + (first - low + 1) % (vocabulary - low)
        features = [[_feature(document) for document in row] for row in tokens]
        try:
            batch = self.collator.assemble(
                self._packed(features), lambda documents: self._windows(documents, move_row, half_way)
            )
        except PoSEError:
            raise
        except Exception as error:
            raise PoSEError(
                f"self-test: the inner collator {type(self.collator.collate).__name__} failed on rows of random tokens "
                f"({type(error).__name__}: {shown(error)}). They have the columns {', '.join(_feature(tokens[0][0]))} "
                "only: let it do without others. To train anyway, set self_test: false"
            ) from error
        batch.pop("labels", None)
        return {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}

    def _packed(self, features: list[list[Feature]]) -> list[Any]:
        if self.pack is Packing.LISTS:
            return features
        if self.pack is Packing.SEQ_LENGTHS:
            # TRL gives packed rows no mask.
            return [{k: v for k, v in joined(row).items() if k != "attention_mask"} for row in features]
        return [row[0] for row in features]

    def _windows(self, documents: Sequence[np.ndarray], move_row: int | None, half_way: bool) -> list[Window]:
        settings = self.collator.settings
        windows = []
        flat = [(row, document) for row, sizes in enumerate(self.sizes) for document in range(len(sizes))]
        for (row, document), tokens in zip(flat, documents, strict=True):
            indices = np.arange(len(tokens))
            free = max(settings.target_length - len(tokens), 0)
            skip = free if document == self.document else free // 3
            if row == move_row and document == self.document:
                skip -= self.window if 0 < self.window < free and not half_way else (free + 1) // 2
            positions = indices + np.where(indices >= self.jump, skip, 0)
            windows.append(Window(indices, positions, np.zeros(0, dtype=np.int64)))
        return windows

    def _starts(self, flat: bool) -> list[int]:
        """Return the column at which each row's tokens begin: after padding on the left, or after other rows."""
        lines = self.batch()["input_ids"].cpu().numpy()
        starts, behind = [], 0
        for row, documents in enumerate(self.tokens):
            tokens, line = np.concatenate(documents), lines[0 if flat else row]
            spots = range(behind if flat else 0, len(line) - len(tokens) + 1)
            start = next((i for i in spots if np.array_equal(line[i : i + len(tokens)], tokens)), None)
            if start is None:
                raise PoSEError(
                    f"self-test: the inner collator {type(self.collator.collate).__name__} changes tokens, so their "
                    "effect cannot be measured. To train anyway, set self_test: false"
                )
            starts.append(start)
            behind = start + len(tokens)
        return starts

    def report(
        self,
        plain: torch.Tensor,
        changed: torch.Tensor,
        moved: torch.Tensor,
        other: torch.Tensor,
        ended: torch.Tensor,
    ) -> SelfTestReport:
        """Compare logits, each of shape (batch, length, vocabulary).

        Args:
            plain: of the batch without a change.
            changed: with other tokens in chunk 1 of the first row.
            moved: with another skip in the first row, smaller by the old window.
            other: with half of the skip in the last row, which may be the first.
            ended: with other tokens at the end of the tested document in the first row.
        """
        flat = plain.shape[0] == 1 and self.rows > 1
        starts = self._starts(flat)

        def effect(a: torch.Tensor, row: int, begin: int, end: int) -> float:
            offset = starts[row]
            line = 0 if flat else row
            piece = (a - plain)[line, offset + begin : offset + end]
            return float(piece.abs().max()) if piece.numel() else 0.0

        begin = sum(self.sizes[0][: self.document])
        size = self.sizes[0][self.document]
        middle = begin + self.jump
        before = effect(changed, 0, 0, begin) if begin else 0.0
        rest = begin + size, sum(self.sizes[0])
        after = max(effect(changed, 0, *rest), effect(ended, 0, *rest))
        last = self.rows - 1
        last_begin = sum(self.sizes[last][: self.document])
        last_end = last_begin + self.sizes[last][self.document]
        own = min(effect(moved, 0, middle, begin + size), effect(other, last, last_begin + self.jump, last_end))
        crossed = 0.0
        if self.rows > 1:
            crossed = max(effect(moved, last, last_begin, last_end), effect(other, 0, begin, begin + size))
        can_move = self.collator.settings.target_length >= size + 2
        return SelfTestReport(
            same_chunk=effect(changed, 0, begin + 1, middle),
            after_jump=effect(changed, 0, middle, begin + size),
            neighbour=max(before, after),
            own_positions=own if can_move else None,
            other_row=crossed,
            packed=self.pack is not None,
            attention=self.attention,
            shared_rounding=self.shared_rounding,
            rotary=self.rotary,
        )


def _feature(tokens: np.ndarray) -> Feature:
    ids = tokens.tolist()
    return {"input_ids": ids, "labels": list(ids), "attention_mask": [1] * len(ids)}
