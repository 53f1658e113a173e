"""generate() over a BeaconCache, and condensing a text once for many questions."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pose_plugin.beacon import checks
from pose_plugin.beacon.cache import BeaconCache
from pose_plugin.utils.errors import PoSEError


class Generation:
    """The reading verbs of BeaconModel."""

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        *,
        cache: BeaconCache | None = None,
        ratio: int | str | None = None,
        ratios: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's own generate, reading prompts of any length.

        Args:
            inputs: prompt ids, (batch, tokens), rows of equal length; also accepted as `input_ids`.
            cache: a condensed text to answer from; `inputs` is then only what follows it, and the cache is left as it
                was. A cache given as `past_key_values` is continued in place instead, by Hugging Face's convention:
                `inputs` is the whole text, what is in the cache already included.
            ratio: "adapt" or a fixed ratio for this call.
            ratios: one ratio for each interval of the prompt that is condensed; the last holds for what is generated.
            kwargs: of Hugging Face's generate.

        Returns:
            What Hugging Face's generate returns: `inputs` and what follows, (batch, tokens).

        Raises:
            PoSEError: as `forward`; or the cache holds all of `inputs` already.
        """
        tuner: Any = self
        if inputs is None:
            inputs = kwargs.pop("input_ids", None)
        checks.check_ids(inputs)
        checks.check_cache(cache)
        checks.policy(ratio, ratios)
        if tuner.disabled:
            if cache is not None or isinstance(kwargs.get("past_key_values"), BeaconCache):
                raise PoSEError("cache: a BeaconCache was given while the adapter is disabled; leave it out there")
            return tuner.model.generate(inputs, **kwargs)
        if inputs is not None:
            checks.check_input(inputs, None, tuner.embedding, tuner.model)
        past = kwargs.pop("past_key_values", None)
        past = checks.stream_of(past) if past is not None else None
        guesses = _guesses(tuner, kwargs)
        if guesses and any(isinstance(each, BeaconCache) and each.tokens for each in (cache, past)):
            raise PoSEError(
                "cache: with assistant_model or prompt_lookup_num_tokens, transformers reads the whole text itself; "
                "give the whole text and no cache that holds a part of it"
            )
        if cache is not None:
            if past is not None:
                raise PoSEError("cache: give either cache (kept as it is) or past_key_values (continued in place)")
            kwargs["attention_mask"] = _whole_mask(inputs, kwargs.get("attention_mask"), cache)
            past = cache.copy()
        elif isinstance(past, BeaconCache) and inputs is not None and inputs.shape[1] <= past.tokens:
            raise PoSEError(
                f"past_key_values: {past.tokens} tokens are in the cache and inputs has {inputs.shape[1]}, so nothing "
                "is new; pass the whole text, or pass only what follows with cache=…"
            )
        # A model's own config often says use_cache: false, left over from training; only the call's word counts.
        asked = kwargs.get("use_cache", getattr(kwargs.get("generation_config"), "use_cache", None))
        if past is not None or asked is not False:
            kwargs["use_cache"] = True
            past = BeaconCache() if past is None else past
        if past is not None:
            kwargs[tuner.cache_key] = past
        elif ratios is not None:
            raise PoSEError("ratios: use_cache=False reads the whole text again for each token; give one ratio instead")
        room = _room(tuner, inputs, kwargs)
        with _own_cache(tuner, kwargs), _driven(tuner, ratio, ratios, room), _undoing(past, guesses):
            return tuner.model.generate(inputs, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            PoSEError: always; continuous batching has a cache of its own, and would read past the window uncondensed.
        """
        raise PoSEError(
            "generate_batch: continuous batching keeps all keys and values in pages, where beacons condense them; call "
            "generate() with rows of equal length"
        )

    continuous_batching_context_manager = init_continuous_batching = generate_batch

    @torch.no_grad()
    def condense(
        self,
        input_ids: torch.Tensor,
        *,
        cache: BeaconCache | None = None,
        ratio: int | str | None = None,
        ratios: Sequence[int] | None = None,
        headroom: int | None = None,
    ) -> BeaconCache:
        """Reads a text once, to be asked about often.

        Args:
            input_ids: (batch, tokens), or (tokens,).
            cache: an earlier text that this one continues; it is left as it was.
            ratio: "adapt" or a fixed ratio.
            ratios: one ratio for each interval that is condensed; finer where retrieval says it matters.
            headroom: tokens that questions and answers may take, for "adapt".

        Returns:
            The text's cache: full intervals condensed, the last one (up to l tokens) raw.

        Raises:
            PoSEError: as `forward`.
        """
        tuner: Any = self
        if tuner.disabled:
            raise PoSEError("condense: the adapter is disabled; call it outside disable_adapter()")
        if input_ids is None:
            raise PoSEError("input_ids: None; give the text's token ids, (batch, tokens)")
        checks.check_cache(cache)
        ids = input_ids[None] if isinstance(input_ids, torch.Tensor) and input_ids.dim() == 1 else input_ids
        stream = BeaconCache() if cache is None else cache.copy()
        tuner.forward(ids, past_key_values=stream, logits_to_keep=1, ratio=ratio, ratios=ratios, headroom=headroom)
        return stream


@contextmanager
def _driven(tuner: Any, ratio: Any, ratios: Sequence[int] | None, room: int) -> Iterator[None]:
    """Hugging Face's generate calls the model, not the tuner: while it runs, the model's forward is the tuner's."""
    model = tuner.model
    had = "forward" in model.__dict__
    original = model.forward
    first = True

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        given = list(ratios) if ratios is not None and first else None
        fixed = ratio if ratios is None or not ratios else list(ratios)[-1]
        first = False
        return tuner.forward(*args, ratio=None if given is not None else fixed, ratios=given, headroom=room, **kwargs)

    tuner._base_forward = original
    model.forward = forward
    try:
        yield
    finally:
        tuner._base_forward = None
        if had:
            model.forward = original
        else:
            del model.forward


@contextmanager
def _undoing(cache: Any, wanted: bool) -> Iterator[None]:
    """While guesses are read, the interval condensed last is kept: they may be taken back over its end."""
    if wanted and isinstance(cache, BeaconCache):
        cache.undoes = True
        try:
            yield
        finally:
            cache.undoes, cache.before = False, None
    else:
        yield


def _whole_mask(inputs: torch.Tensor | None, mask: torch.Tensor | None, cache: BeaconCache) -> torch.Tensor:
    # generate slices `inputs` unless the mask is longer, which tells it that only new tokens were passed.
    if inputs is None:
        raise PoSEError(
            "inputs: None; with cache=… give the token ids that follow the cached text, (batch, tokens). Embeddings "
            "are read by model(inputs_embeds=…, past_key_values=…)"
        )
    own = inputs.new_ones(inputs.shape) if mask is None else mask
    if own.shape[1] == inputs.shape[1]:
        own = torch.cat([own.new_ones(own.shape[0], cache.tokens), own], dim=1)
    return own


@contextmanager
def _own_cache(tuner: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Settings that would make another cache: those of the call are refused, the model's own passed over."""
    config = kwargs.get("generation_config")
    asked = kwargs.get("cache_implementation", getattr(config, "cache_implementation", None))
    if asked is not None:
        raise PoSEError(
            f"cache_implementation: {asked!r} cannot go with beacons, whose own cache stays within the window; leave "
            "it out"
        )
    # Not by an argument: what an argument leaves open, transformers takes from the model's own.
    own, named = tuner.model.generation_config, tuner.model.generation_config.cache_implementation
    own.cache_implementation = None
    try:
        yield
    finally:
        own.cache_implementation = named


def _guesses(tuner: Any, kwargs: dict[str, Any]) -> bool:
    """Whether tokens are guessed, read, and taken back where they were wrong."""
    config = kwargs.get("generation_config") or tuner.model.generation_config
    helper = kwargs.get("assistant_model")
    if isinstance(helper, nn.Module) and any(module is tuner.model for module in helper.modules()):
        raise PoSEError(
            "assistant_model: it is the model itself, which guesses no faster than it reads; give a smaller model"
        )
    return any(kwargs.get(n) or getattr(config, n, None) for n in ("assistant_model", "prompt_lookup_num_tokens"))


def _room(tuner: Any, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> int:
    """Tokens that may be generated, for `adapt`."""
    config = kwargs.get("generation_config") or tuner.model.generation_config
    new = kwargs.get("max_new_tokens", getattr(config, "max_new_tokens", None))
    if new is None and (longest := kwargs.get("max_length", getattr(config, "max_length", None))) is not None:
        new = longest - (inputs.shape[1] if inputs is not None else 0)
    return max(0, int(new or 0))
