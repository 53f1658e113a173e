"""generate() over a BeaconCache, and condensing a text once for many questions."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pose_plugin.beacon.cache import BeaconCache, digest_of, stream_of
from pose_plugin.beacon.checks import one_policy, renamed, two_caches
from pose_plugin.utils.errors import PoSEError

# Arguments of generate with which tokens are guessed, read, and taken back if wrong (assisted decoding).
_GUESSING = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
# What transformers generates if neither max_new_tokens nor max_length says how much.
_USUAL_LENGTH = 20


class Generation:
    """`generate` and `condense` of BeaconModel."""

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        *,
        context: BeaconCache | None = None,
        ratio: int | str | None = None,
        ratios: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the model's own generate with prompts of any length.

        Args:
            inputs: prompt ids, (batch, tokens), rows of equal length; also accepted as `input_ids`.
            context: a condensed text to answer from; `inputs` is then only what follows it, and the context is not
                changed. If it holds several texts, all questions on the first come first, as many as on each other. A
                cache given as `past_key_values` is continued in place instead, by Hugging Face's convention: `inputs`
                is the whole text, including what is in the cache.
            ratio: "adapt" or a fixed ratio for this call.
            ratios: one per interval of the prompt that is condensed; the last also applies to generated intervals.
            kwargs: of Hugging Face's generate.

        Returns:
            What Hugging Face's generate returns: `inputs` and what follows, (batch, tokens).

        Raises:
            PoSEError: as `forward`; the cache holds all of `inputs` already; or the window cannot hold all tokens that
                may be generated.
        """
        tuner: Any = self
        if kwargs.get("cache") is not None:
            raise renamed()
        if inputs is None:
            inputs = kwargs.pop("input_ids", None)
        if tuner.disabled:
            if context is not None:
                raise PoSEError("context: the bare model cannot read a BeaconCache while the adapter is disabled")
            return tuner.model.generate(inputs, **kwargs)
        policy = one_policy(ratio, ratios)
        guesses = any(_setting(tuner, kwargs, name) for name in _GUESSING)
        past = _past(inputs, context, kwargs, guesses)
        # A model's own config often says use_cache: false, left over from training; only the call decides.
        asked = kwargs.get("use_cache", getattr(kwargs.get("generation_config"), "use_cache", None))
        if past is None and asked is not False:
            past = BeaconCache()
        if past is not None:
            kwargs |= {"use_cache": True, tuner.cache_key: past}
        elif ratios is not None:
            # It has other intervals each time, so the list would fit the first reading only.
            raise PoSEError("ratios: use_cache=False reads the whole text again for each token; give one ratio")
        if _setting(tuner, kwargs, "max_new_tokens") is None and _setting(tuner, kwargs, "max_length") is None:
            # transformers would stop at max_position_embeddings, and refuse a longer prompt.
            kwargs["max_new_tokens"] = _USUAL_LENGTH
        length, room = _lengths(tuner, inputs, kwargs, context)
        stream = past if past is not None else BeaconCache()
        tuner.check_room(stream, length - stream.tokens, policy, room)
        # A stream that has begun uses what was kept free for it.
        last = length + (room if stream.tokens else max(room, tuner.active_config.headroom))
        with _own_cache(tuner), _driven(tuner, ratio, ratios, last), _undoing(past, guesses):
            return tuner.model.generate(inputs, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse continuous batching: with its own cache, it would silently read past the window.

        Raises:
            PoSEError: always.
        """
        raise PoSEError(
            "generate_batch: continuous batching uses its own paged cache, without beacons. Call generate() with rows "
            "of equal length"
        )

    continuous_batching_context_manager = init_continuous_batching = generate_batch

    @torch.no_grad()
    def condense(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        context: BeaconCache | None = None,
        ratio: int | str | None = None,
        ratios: Sequence[int] | None = None,
        headroom: int | None = None,
    ) -> BeaconCache:
        """Read a text once, to ask about it often.

        Args:
            input_ids: (batch, tokens), or (tokens,).
            attention_mask: as tokenizers give it: `model.condense(**tokenizer(text, return_tensors="pt"))`; in the
                shape of `input_ids`.
            context: an earlier text that this one continues; it is not changed.
            ratio: "adapt" or a fixed ratio.
            ratios: one per interval that is condensed, e.g. smaller where the text matters more.
            headroom: tokens that questions and answers may take, for "adapt"; at least those of the configuration.

        Returns:
            The text's cache: full intervals condensed, the last one (up to l tokens) raw. With "adapt", a text that
            fits the window stays raw, until more tokens follow than fit.

        Raises:
            PoSEError: as `forward`.
        """
        ids = input_ids[None] if input_ids.dim() == 1 else input_ids
        if attention_mask is not None and attention_mask.dim() == input_ids.dim() == 1:
            attention_mask = attention_mask[None]
        stream = stream_of(context).copy()
        how = {"ratio": ratio, "ratios": ratios, "headroom": headroom, "logits_to_keep": 1}
        tuner: Any = self
        tuner.forward(ids, attention_mask, past_key_values=stream, **how)
        return stream


def _past(inputs: Any, context: Any, kwargs: dict[str, Any], guesses: bool) -> BeaconCache | None:
    """Return the stream that generate continues; None if neither `context` nor `past_key_values` is given."""
    past = kwargs.pop("past_key_values", None)
    if context is not None and past is not None:
        raise two_caches()
    if context is None and past is None:
        return None
    stream = stream_of(past if context is None else context)
    if guesses and stream.tokens:
        raise PoSEError(
            "cache: with assistant_model or prompt_lookup_num_tokens, transformers reads the whole text itself; give "
            "the whole text and no cache that holds a part of it"
        )
    if context is not None:
        kwargs["attention_mask"] = _whole_mask(inputs, kwargs.get("attention_mask"), stream)
        return stream.copy()
    if inputs is not None and inputs.shape[1] <= stream.tokens:
        raise PoSEError(
            f"past_key_values: {stream.tokens} tokens are in the cache and inputs has {inputs.shape[1]}, so nothing is "
            "new; give the whole text, or only what follows with context=…"
        )
    _require_beginning(inputs, stream)
    return stream


def _require_beginning(inputs: torch.Tensor | None, stream: BeaconCache) -> None:
    """Require that `inputs` begins with the text of the stream, unless that is not known, e.g. of embeddings."""
    digest = stream.digest
    if inputs is None or digest is None or inputs.shape[0] % len(digest):
        return
    repeats, begins = inputs.shape[0] // len(digest), inputs[:, : stream.tokens]
    if torch.equal(digest_of(begins), digest.to(inputs.device).repeat_interleave(repeats)):
        return
    where, or_less = f"one of the first {stream.tokens} tokens", ""
    if stream.text is not None:
        text = stream.text.to(inputs.device).repeat_interleave(repeats, dim=0)
        first = int((begins != text).any(0).nonzero()[0])
        where, or_less = f"token {first}", f", or remove the rest from the cache: crop(-{stream.tokens - first})"
    raise PoSEError(
        f"past_key_values: {where} of inputs is not the one in the cache, which would be read in its place. Give the "
        f"ids that generate returned and what follows, or only what follows with context=…{or_less}"
    )


def _whole_mask(inputs: torch.Tensor | None, mask: torch.Tensor | None, cache: BeaconCache) -> torch.Tensor:
    # generate slices `inputs`, unless a longer mask shows that only new tokens were given.
    if inputs is None:
        raise PoSEError(
            "inputs: None; with context=… give the token ids that follow the cached text. For embeddings, call "
            "model(inputs_embeds=…, past_key_values=…)"
        )
    own = inputs.new_ones(inputs.shape) if mask is None else mask
    if own.shape[1] == inputs.shape[1]:
        own = torch.cat([own.new_ones(own.shape[0], cache.tokens), own], dim=1)
    return own


@contextmanager
def _driven(tuner: Any, ratio: Any, ratios: Sequence[int] | None, last: int) -> Iterator[None]:
    """Make the model's forward that of the tuner, since Hugging Face's generate calls the model.

    Args:
        ratio, ratios: of `generate`.
        last: the length of the text for which room is kept free.
    """
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
        # After embeddings, generate gives ids; some models get both arguments, one of them None. guidance_scale gives
        # the ids without a name.
        given_as = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        text: Any = next(each for each in given_as if each is not None)
        cache = kwargs.get(tuner.cache_key)
        left = last - text.shape[1] - (cache.tokens if isinstance(cache, BeaconCache) else 0)
        how = {"ratio": None if given is not None else fixed, "ratios": given, "headroom": max(0, left)}
        return tuner.forward(*args, **how, **kwargs)

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
def _undoing(cache: BeaconCache | None, wanted: bool) -> Iterator[None]:
    """Keep the interval condensed last while guesses are read: they may be taken back past its end."""
    if not wanted or cache is None:
        yield
        return
    cache.undoes = True
    try:
        yield
    finally:
        cache.undoes, cache.before = False, None


@contextmanager
def _own_cache(tuner: Any) -> Iterator[None]:
    """Ignore a cache_implementation in the model's own generation config. transformers refuses that of a call."""
    # Not by an argument: transformers uses the model's config for anything that an argument leaves open.
    config = tuner.model.generation_config
    named, config.cache_implementation = config.cache_implementation, None
    try:
        yield
    finally:
        config.cache_implementation = named


def _setting(tuner: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Return a setting of generate as transformers looks it up: in the call, in its config, in the model's."""
    configs = (kwargs.get("generation_config"), tuner.model.generation_config)
    found = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in found if value is not None), None)


def _lengths(
    tuner: Any, inputs: torch.Tensor | None, kwargs: dict[str, Any], context: BeaconCache | None
) -> tuple[int, int]:
    """Return the tokens of the whole prompt, including a context's, and how many may be generated."""
    text = inputs if inputs is not None else kwargs.get("inputs_embeds")
    own = 0 if text is None else text.shape[1]
    new = _setting(tuner, kwargs, "max_new_tokens")
    if new is None:
        new = _setting(tuner, kwargs, "max_length") - own
    return own + (0 if context is None else context.tokens), max(0, int(new))
