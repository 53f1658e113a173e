"""What keeps the chunks of a document together and documents apart where rows are packed.

Without an attention mask, transformers finds the documents of a packed row by their positions: *every*
step other than +1 opens a new one. A PoSE chunk would be cut off from the chunk before it, silently.
While PoSE trains, only a step below 1, a restart, opens a document; rows packed the ordinary way, each
document counting from 0, are cut just as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pose_plugin.rope.read import text_config
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.models import unwrap

# Attention functions whose masks go through the rule below.
RULED_BY_POSITIONS = ("eager", "sdpa", "flex_attention")
# Those that find documents by "the position is the row's smallest" or "is 0"; a jump never cuts there.
RULED_BY_SMALLEST = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "xformers")

_NAME = "find_packed_sequence_indices"


def restart_rule(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Numbers the documents of packed rows; a position that is not above the one before opens a document.

    Args:
        position_ids: shape (batch, length).

    Returns:
        Document numbers of the same shape, or None if every row is one document (outside of tracing).
    """
    first = position_ids[:, :1] - 1
    documents = (torch.diff(position_ids, prepend=first, dim=-1) < 1).cumsum(-1)
    if not _tracing(documents) and bool((documents[:, -1] == 0).all()):
        return None
    return documents


class RestartBoundaries:
    """Puts `restart_rule` in transformers' place and takes it out again.

    Raises:
        PoSEError: transformers' own rule is not the one this was measured against.
    """

    def __init__(self) -> None:
        self._original: Any = None

    def install(self) -> None:
        from transformers import masking_utils

        current = getattr(masking_utils, _NAME, None)
        if current is restart_rule:
            return
        if current is None or not _is_known(current):
            import transformers

            raise PoSEError(
                f"packed rows need transformers.masking_utils.{_NAME} to cut at every position step other "
                f"than +1, but transformers {transformers.__version__} does something else. Turn packing off "
                "(Axolotl: sample_packing: false; TRL: packing=False), or use FlashAttention"
            )
        self._original = current
        setattr(masking_utils, _NAME, restart_rule)

    def undo(self) -> None:
        from transformers import masking_utils

        if self._original is not None and getattr(masking_utils, _NAME) is restart_rule:
            setattr(masking_utils, _NAME, self._original)
        self._original = None


@contextmanager
def restart_boundaries() -> Iterator[None]:
    """`with restart_boundaries(): …`, the rule in force inside."""
    boundaries = RestartBoundaries()
    boundaries.install()
    try:
        yield
    finally:
        boundaries.undo()


def attention_function(model: Any) -> str:
    """The name of the attention implementation a model runs, e.g. "sdpa"."""
    config = text_config(unwrap(model).config)
    return str(getattr(config, "_attn_implementation", None) or "eager")


def needs_one_row(model: Any) -> bool:
    """Whether packed rows must be handed over as one: FlashAttention looks for documents in a batch of one row only,
    and in a larger one neighbours would see each other.
    """
    name = attention_function(model)
    # "kernels-community/flash-attn2" and the like run the same interface as flash_attention_2.
    return name in RULED_BY_SMALLEST or "flash" in name


def require_packing_support(model: Any) -> None:
    """Checks that packed PoSE rows can be right with the model's attention implementation.

    Raises:
        PoSEError: naming the implementation and the way out.
    """
    name = attention_function(model)
    if name in RULED_BY_POSITIONS or needs_one_row(model):
        return
    raise PoSEError(
        f"attn_implementation={name}: it is not known how it finds the documents of a packed row, so chunks "
        f"may be cut apart without a sign. Use one of "
        f"{', '.join(RULED_BY_POSITIONS + RULED_BY_SMALLEST)}, or turn packing off"
    )


def _is_known(rule: Any) -> bool:
    """Known answers: a jump, a restart, one plain document."""
    try:
        jump = rule(torch.tensor([[0, 1, 5, 6, 0, 1]]))
        plain = rule(torch.tensor([[0, 1, 2]]))
    except Exception:
        return False
    return jump is not None and jump.tolist() == [[0, 0, 1, 1, 2, 2]] and plain is None


def _tracing(tensor: torch.Tensor) -> bool:
    try:
        from transformers.utils import is_tracing
    except ImportError:
        return torch.compiler.is_compiling()
    return bool(is_tracing(tensor))
