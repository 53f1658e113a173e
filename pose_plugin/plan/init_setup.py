"""The choices of a run that `pose-plugin init` writes, with their reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pose_plugin.training.checks import LARGE_STRETCH

# Rows of one step over all GPUs, as in the PoSE paper.
_ROWS_OF_STEP = 64
# The keys by which rows are read; of several in a row, the first one here counts.
ROWS = ("input_ids", "messages", "conversations", "text", "instruction")
# The usual key of a chat, by how its turns name the speaker and the text. Some files have the one key and the other
# names.
TURNS = {"messages": ("role", "content"), "conversations": ("from", "value")}
# What else must be in a row, with Axolotl and with TRL.
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "axolotl": {"instruction": ("output",), "input_ids": ("attention_mask", "labels")},
    "trl": {"instruction": ("output",)},
}


@dataclass(frozen=True)
class Setup:
    """What the YAML and the script both write down.

    Attributes:
        base: a folder or a hub name.
        data: a JSONL file.
        output: the run's output folder.
        row: how its rows are read, one of `ROWS`; of chats, what `TURNS` says.
        key: by which they are read.
        original, target, window: L_0, L_t and L_c, tokens.
        gpus: how many; 0 for a CPU.
        method: full, lora or qlora.
        layer: the class of the base's decoder layers, which FSDP wraps.
        beside_lora: names of the base's "norms" and "embeddings"; without embeddings that are also its output head.
        embeddings_fit: whether the embeddings can be trained in addition to an adapter.
        gib: estimated memory of each GPU.
    """

    base: str
    data: str
    output: str
    row: str
    key: str
    original: int
    target: int
    window: int
    gpus: int
    method: str = "full"
    layer: str = ""
    beside_lora: Mapping[str, list[str]] = field(default_factory=dict)
    embeddings_fit: bool = True
    gib: float = 0.0

    rope = "yarn"
    unskipped_ratio = 0.1
    epochs = 1
    warmup_steps = 10
    scheduler = "cosine"
    lora = (("r", 32), ("alpha", 64), ("dropout", 0.0))

    @property
    def chat(self) -> bool:
        return self.row in TURNS

    @property
    def accumulate(self) -> int:
        return max(1, _ROWS_OF_STEP // max(self.gpus, 1))

    @property
    def learning_rate(self) -> float:
        return 2e-5 if self.method == "full" else 1e-4

    @property
    def sharded(self) -> bool:
        """Whether each GPU holds a part of the weights (FSDP)."""
        return self.method == "full" and self.gpus > 1

    @property
    def saved_modules(self) -> list[str]:
        """Modules that are trained whole in addition to an adapter."""
        if self.method == "full" or self.target / self.original < LARGE_STRETCH:
            return []
        parts = [part for part in self.beside_lora if part != "embeddings" or self.embeddings_fit]
        return [name for part in parts for name in self.beside_lora[part]]

    @property
    def trains_embeddings(self) -> bool:
        return bool(set(self.beside_lora.get("embeddings", ())) & set(self.saved_modules))

    @property
    def shown_method(self) -> str:
        return self.method if self.embeddings_fit else f"{self.method} without the embeddings"

    @property
    def notes(self) -> list[str]:
        """What to know about the method."""
        if self.embeddings_fit:
            return []
        names = ", ".join(self.beside_lora["embeddings"])
        return [
            f"{self.method} fits only if the embeddings ({names}) stay frozen. LongLoRA (arXiv 2309.12307) trained "
            "them for a stretch by 8, so `pose-plugin plan` warns of it. With more memory per GPU, init trains them too"
        ]

    @property
    def optimizer(self) -> str:
        if self.gpus and self.method == "qlora":
            return "adamw_bnb_8bit"
        # All weights are kept in bf16, which loses small steps unless they are rounded at random.
        return "adamw_torch_8bit" if self.gpus and self.method == "full" else "adamw_torch"

    @property
    def rounding(self) -> str:
        """The optimizer's argument that rounds steps of bf16 weights at random, or "" if nothing is rounded away."""
        return "bf16_stochastic_round" if self.optimizer == "adamw_torch_8bit" else ""

    @property
    def title(self) -> tuple[str, str]:
        """What the file does, and the memory that it needs."""
        each = "GPU" if self.gpus else "process"
        return (
            f"{self.base} from {self.original} to {self.target} tokens, written by `pose-plugin init`.",
            f"Memory of each {each}: about {self.gib:.1f} GiB, as `pose-plugin plan` estimates.",
        )

    @property
    def reasons(self) -> dict[str, str]:
        """Why each value is as it is, by the names of this class and of PoSESettings."""
        gpus, window = max(self.gpus, 1), "the trained window"
        return {
            "target_length": f"{self.target / self.original:g} times the base's window",
            "train_length": f"{window}, and the longest conversation" if self.chat
            else f"{window}: no step sees more tokens",
            "rope": "lost least before any training, see docs/smollm2.md",
            "unskipped_ratio": "a tenth of the rows keep plain positions, for short texts",
            "sampler": "positions jump between turns only",
            "content": "of longer documents, each chunk from a random place, in order",
            "accumulate": f"× 1 × {gpus} = {self.accumulate * gpus} rows per step",
            "answers": "loss on the answers",
            "input_ids": "the rows are token ids already",
            "attention": "flash_attention_2, if flash-attn is installed, is faster",
            "optimizer": "the weights are bf16, which loses small steps;",
            "rounding": "this rounding takes them on average",
            "fsdp": "each GPU holds a part of the weights",
            "state_dict": "saves the whole model",
            "saved_modules": "LongLoRA (arXiv 2309.12307) trained them for a stretch by 8"
            + ("" if self.embeddings_fit else ", and the embeddings, which do not fit"),
        }  # fmt: skip


def one_line(text: str) -> str:
    """Return a text as it can be put into a comment: line ends and control characters are escaped."""
    return text if text.isprintable() else ascii(text)
