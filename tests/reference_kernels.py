"""FlashAttention and xformers without a GPU: the documented contract of each kernel's functions in plain torch.

The signatures are those of the kernels, since transformers reads from them which options a kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None) -> torch.Tensor:
    """Attention over tensors of shape (batch, length, heads, width); fewer key heads are shared."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


class Borders(list):
    """Every `cu_seqlens_q` that reached a kernel, as lists."""


def _varlen(seen: Borders, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any, **how: Any) -> Any:
    """Tensors of shape (total, heads, width); document i lies between borders i and i + 1."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and torch.equal(cu_q, cu_k)
    ends = cu_q.tolist()
    assert ends[0] == 0 and ends[-1] == len(q), "borders span all tokens"
    assert all(a < b for a, b in pairwise(ends)), "no document is empty"
    assert int(max_q) == int(max_k) == max(np.diff(ends)), "the longest document"
    seen.append(ends)
    return torch.cat([dense(q[None, a:b], k[None, a:b], v[None, a:b], **how)[0] for a, b in pairwise(ends)])


def flash_functions(version: int, seen: Borders) -> tuple[Callable, Callable]:
    """`flash_attn_func` and `flash_attn_varlen_func` of FlashAttention 2, 3 or 4."""

    def func2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
              alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
        return dense(q, k, v, causal, softmax_scale)

    def varlen2(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                return_attn_probs=False, block_table=None):  # fmt: skip
        borders = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return _varlen(seen, q, k, v, *borders, causal=causal, scale=softmax_scale)

    def func3(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
              window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
              sm_margin=0, return_attn_probs=False):  # fmt: skip
        return dense(q, k, v, causal, softmax_scale)

    def varlen3(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
                softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                deterministic=False, sm_margin=0, return_attn_probs=False):  # fmt: skip
        borders = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return _varlen(seen, q, k, v, *borders, causal=causal, scale=softmax_scale)

    def func4(q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
              num_splits=1, pack_gqa=None, deterministic=False):  # fmt: skip
        return dense(q, k, v, causal, softmax_scale), None

    def varlen4(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
                seqused_k=None, page_table=None, softmax_scale=None, causal=False, window_size=(None, None),
                learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False):  # fmt: skip
        borders = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return _varlen(seen, q, k, v, *borders, causal=causal, scale=softmax_scale), None

    return {2: (func2, varlen2), 3: (func3, varlen3), 4: (func4, varlen4)}[version]


@contextmanager
def flash_attention() -> Iterator[Borders]:
    """transformers' own code of FlashAttention 2, 3 and 4 runs on the functions above; also lets models be built so."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils, modeling_utils

    seen = Borders()
    utils = modeling_flash_attention_utils

    def imports(implementation: str, *args: Any, **kwargs: Any) -> Any:
        func, varlen = flash_functions(int(str(implementation)[-1]), seen)
        return func, varlen, None, utils._pad_input, utils._unpad_input

    table = modeling_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    there = {version: {**row, "general_availability_check": lambda: True} for version, row in table.items()}
    replaced = [
        (utils, "_lazy_imports", imports),
        (utils, "_loaded_implementation", None),
        (PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True),
        (modeling_utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", there),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield seen
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def xformers_attention() -> Iterator[Borders]:
    """Axolotl's code of the backend xformers runs on a dense reading of xformers' own masks."""
    from axolotl.monkeypatch.attention import xformers as module

    seen = Borders()

    def memory_efficient(q: Any, k: Any, v: Any, attn_bias: Any = None) -> Any:
        """Tensors of shape (batch, length, heads, width); the bias knows which keys each query sees."""
        if hasattr(attn_bias, "q_seqinfo"):
            seen.append(list(attn_bias.q_seqinfo.seqstart_py))
        mask = attn_bias.materialize((1, 1, q.shape[1], k.shape[1]), dtype=q.dtype)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2)

    before = module.xformers_attention
    module.xformers_attention = memory_efficient
    try:
        yield seen
    finally:
        module.xformers_attention = before
