"""Keeps the chunks of a document together, and documents apart, in packed rows.

Without an attention mask, transformers finds the documents of a packed row by their positions: *every* step other than
+1 starts a new one. This would silently cut a PoSE chunk off from the chunk before it. While PoSE trains, only a
restart (a step below 1) starts a document. Rows packed in the ordinary way, with documents that count from 0, are cut
as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pose_plugin.rope.read import text_config
from pose_plugin.utils.errors import PoSEError
from pose_plugin.utils.models import unwrap

# Attention functions whose masks follow transformers' rule, which `restart_rule` replaces.
RULED_BY_POSITIONS = ("eager", "sdpa", "flex_attention")
# Attention functions that start a document where the position is the row's smallest, or 0; a jump never cuts there.
RULED_BY_SMALLEST = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "xformers")

_NAME = "find_packed_sequence_indices"


def restart_rule(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Number the documents of packed rows; a position that is not above the one before starts a document.

    Args:
        position_ids: shape (batch, length).

    Returns:
        Document numbers of the same shape, or None if every row is one document (outside of tracing).

    Example:
        >>> restart_rule(torch.tensor([[0, 7, 8, 0, 3, 0]]))
        tensor([[0, 0, 0, 1, 1, 2]])
    """
    from transformers.utils import is_tracing

    first = position_ids[:, :1] - 1
    documents = (torch.diff(position_ids, prepend=first, dim=-1) < 1).cumsum(-1)
    if not is_tracing(documents) and bool((documents[:, -1] == 0).all()):
        return None
    return documents


class RestartBoundaries:
    """Replaces transformers' rule by `restart_rule`, and puts it back.

    Raises:
        PoSEError: from `install`, if transformers' own rule is not the one that this package was tested with.
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
                f"packing: transformers {transformers.__version__} finds the documents of packed rows by another rule "
                f"than the one known here (masking_utils.{_NAME}). Turn packing off (Axolotl: sample_packing: false; "
                "TRL: packing=False), or use FlashAttention"
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
    """Apply `restart_rule` inside the block: `with restart_boundaries(): …`."""
    boundaries = RestartBoundaries()
    boundaries.install()
    try:
        yield
    finally:
        boundaries.undo()


def attention_function(model: Any) -> str:
    """Return the name of the attention implementation that a model runs, e.g. "sdpa"."""
    config = text_config(unwrap(model).config)
    return str(getattr(config, "_attn_implementation", None) or "eager")


def needs_one_row(model: Any) -> bool:
    """Return whether the packed rows of a batch must be joined into one.

    FlashAttention only looks for documents in a batch of one row; in a larger one, neighbours would see each other.
    """
    name = attention_function(model)
    # "kernels-community/flash-attn2" and the like run the same interface as flash_attention_2.
    return name in RULED_BY_SMALLEST or "flash" in name


def require_packing_support(model: Any) -> None:
    """Raise PoSEError unless the model's attention implementation is known to find the documents of packed rows."""
    name = attention_function(model)
    if name in RULED_BY_POSITIONS or needs_one_row(model):
        return
    raise PoSEError(
        f"attn_implementation={name} may find the documents of a packed row by an unknown rule and silently separate "
        f"the chunks of one document. Use one of {', '.join(RULED_BY_POSITIONS + RULED_BY_SMALLEST)}, or turn packing "
        "off"
    )


def _is_known(rule: Any) -> bool:
    """Return whether transformers' rule gives the known answers for a jump, a restart and one plain document."""
    try:
        jump = rule(torch.tensor([[0, 1, 5, 6, 0, 1]]))
        plain = rule(torch.tensor([[0, 1, 2]]))
    except Exception:
        return False
    return jump is not None and jump.tolist() == [[0, 0, 1, 1, 2, 2]] and plain is None
