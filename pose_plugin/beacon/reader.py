"""Run the passes of one call: one per interval, each with the memory of the intervals before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from pose_plugin.beacon.cache import BeaconCache
from pose_plugin.beacon.checks import check_input
from pose_plugin.beacon.layout import RAW, Pass, lay_out, moves, overlapping, positions, visible
from pose_plugin.beacon.ratios import intervals
from pose_plugin.beacon.rope import rotate
from pose_plugin.beacon.views import Enough
from pose_plugin.utils.errors import PoSEError


@dataclass
class Outcome:
    """The outputs of the raw rows of all passes of a call, which reads `tokens` new tokens.

    Attributes:
        before_beacons: new tokens before the first beacon; those behind it see one. None: this call reads no beacon.
    """

    tokens: int
    logits: list[torch.Tensor] = field(default_factory=list)
    hidden: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    condensed: int = 0
    before_beacons: int | None = None

    def all_logits(self) -> torch.Tensor:
        """Return (batch, kept tokens, vocabulary)."""
        return self.logits[0] if len(self.logits) == 1 else torch.cat(self.logits, dim=1)

    def all_hidden(self) -> tuple[torch.Tensor, ...] | None:
        """Return (batch, tokens, hidden) per layer; None if hidden states were not requested."""
        if not self.hidden:
            return None
        # A stream that was raw is read again from its beginning; only the new tokens' states were asked for.
        return tuple(torch.cat(layer, dim=1)[:, -self.tokens :] for layer in zip(*self.hidden, strict=True))

    def pad(self, tokens: int) -> None:
        """Add outputs of zeros for padding that was not read, up to `tokens` in all."""
        if missing := tokens - self.tokens:
            self.tokens = tokens
            self.logits.append(_zeros_behind(self.logits[-1], missing))
            if self.hidden:
                self.hidden.append(tuple(_zeros_behind(layer, missing) for layer in self.hidden[-1]))


def _zeros_behind(rows: torch.Tensor, count: int) -> torch.Tensor:
    return rows.new_zeros(rows.shape[0], count, rows.shape[2])


@dataclass
class Reader:
    """Runs the passes of one call.

    Args:
        tuner: the BeaconModel.
        call: the base model's unmodified forward.
        cache: the stream; it is changed in place.
        extra: arguments for every pass.
        keep: how many of the last tokens' logits to return; None for all.
    """

    tuner: Any
    call: Callable[..., Any]
    cache: BeaconCache
    extra: dict[str, Any]
    keep: int | None = None

    def read(self, text: torch.Tensor, ratios: list[int] | None) -> Outcome:
        """Read new tokens behind the cache.

        Args:
            text: ids, (batch, tokens), or embeddings, (batch, tokens, hidden).
            ratios: see `Reading.plan`; None reads all tokens raw.
        """
        scheme, cache, result = self.tuner.active_config.scheme, self.cache, Outcome(text.shape[1])
        if ratios is None:
            whole, count = self._whole(text), text.shape[1]
            given = Pass(0, cache.tail, (RAW,) * count, scheme)
            cache.note(text)
            self._pass(given, text, count if self.keep is None else min(self.keep, count), result)
            cache.text = whole
            return result
        if cache.must_read_again(scheme):
            if cache.text is not None and cache.text.dim() == 2:  # it may come from a file
                check_input(cache.text, None, self.tuner.embedding.sentinel)
            self.keep = min(text.shape[1], self.keep or text.shape[1])
            text = self._whole(text)
            cache.clear_text()
        cache.note(text)
        cache.text = None
        tokens, at = text.shape[1], 0
        condensed, _ = intervals(tokens, scheme.interval, cache.pending)
        result.condensed = condensed
        for index in range(condensed + 1):
            count = min(scheme.interval - cache.pending, tokens - at)
            ratio = ratios[index] if index < len(ratios) else 0
            if scheme.interleaved and not cache.tail:
                cache.open_ratio = ratio
            closing = index < condensed
            given = lay_out(cache.len_memory, cache.tail, count, scheme, ratio, closing, cache.len_overlap)
            if result.before_beacons is None and given.beacons:
                before = next(row for row, kind in enumerate(given.rows) if kind != RAW)
                result.before_beacons = max(0, at + before - (tokens - result.tokens))
            wanted = count if self.keep is None else max(0, min(count, at + count - (tokens - self.keep)))
            self._pass(given, text[:, at : at + count], wanted, result)
            at += count
        return result

    @cached_property
    def last_layer(self) -> int | None:
        """The layer after which a pass without outputs ends; None if all passes must be complete."""
        config = self.tuner.model.config.get_text_config()
        hidden = self.extra.get("output_hidden_states", getattr(config, "output_hidden_states", False))
        # accelerate moves weights to the device and back in hooks around the layers' forwards.
        hooked = any(hasattr(module, "_hf_hook") for module in self.tuner.model.modules())
        return None if hidden or hooked else int(config.num_hidden_layers) - 1

    def _whole(self, text: torch.Tensor) -> torch.Tensor:
        """Return a raw stream's text and what follows: ids, or embeddings if one of them is embeddings."""
        if self.cache.text is None:
            return text
        parts = [self.cache.text.to(text.device), text]
        if parts[0].dim() != parts[1].dim():
            parts = [part if part.dim() == 3 else self.tuner.embedding(part) for part in parts]
        return torch.cat(parts, dim=1)

    def _pass(self, given: Pass, text: torch.Tensor, wanted: int, result: Outcome) -> None:
        tuner, device = self.tuner, text.device
        last = self.last_layer if not wanted and not torch.is_grad_enabled() else None
        view = self.cache.view(given, tuner.active_config.gradient_intervals, last)
        raw = [at for at, row in enumerate(given.rows) if row == RAW]
        kept = raw[len(raw) - wanted :]
        slices = "logits_to_keep" in tuner.accepts
        output: Any = None
        # The hooks on the attention modules set it again from the view; the embedding has no such hook.
        tuner.router.given = given
        try:
            inputs: dict[str, Any] = self._inputs(given, text)
            inputs["position_ids"] = torch.tensor([positions(given)], device=device)
            if slices:  # 0 would keep all rows, so an empty index asks for none
                index = torch.tensor(kept, dtype=torch.long, device=device)
                inputs["logits_to_keep"] = 0 if len(kept) == len(given.rows) else index
            output = self.call(**{tuner.cache_key: view}, use_cache=False, return_dict=True, **self.extra, **inputs)
        except Enough:
            pass
        finally:
            tuner.router.given = None
        written = view.seal()
        if not written or sorted(written) != list(range(len(written))):
            raise PoSEError(
                f"model: {type(tuner.model).__name__} wrote layers {sorted(written)} to the cache it was given; Beacon "
                "needs a decoder whose layers all call cache.update"
            )
        self.cache.extend(given, written)
        if wanted:
            result.logits.append(output.logits if slices else output.logits[:, kept])
        if output is not None and output.hidden_states is not None and raw:
            rows = torch.tensor(raw, device=device)
            result.hidden.append(tuple(layer.index_select(1, rows.to(layer.device)) for layer in output.hidden_states))
        if given.closing:
            self._close(given)

    def _inputs(self, given: Pass, text: torch.Tensor) -> dict[str, torch.Tensor]:
        embedding, inputs = self.tuner.embedding, {}
        if text.dim() == 3:
            inputs["inputs_embeds"] = embedding.insert(text, given)
        elif given.beacons:
            ids = torch.cat([text, text.new_full((text.shape[0], given.beacons), embedding.sentinel)], dim=1)
            inputs["input_ids"] = ids if given.order is None else ids[:, given.order]
        else:
            inputs["input_ids"] = text
        if not given.plain:
            inputs["attention_mask"] = self._mask(given, text.device)
        return inputs

    def _mask(self, given: Pass, device: torch.device) -> torch.Tensor:
        """Return (1, 1, rows, keys): bool for sdpa, or what eager adds to the scores."""
        seen = visible(given, device)[None, None]
        if self.tuner.attention == "sdpa":
            return seen
        dtype = self.tuner.compute_dtype
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)

    def _close(self, given: Pass) -> None:
        tuner, inv_freq = self.tuner, self.tuner.rotary.inv_freq

        def place(layer: int, keys: torch.Tensor, shifts: list[int]) -> torch.Tensor:
            return rotate(keys, torch.tensor(shifts), inv_freq) if tuner.rotates(layer) else keys

        self.cache.close(moves(given), overlapping(given), place, given.ratio)
        if not torch.is_grad_enabled():
            self.cache.compact()
