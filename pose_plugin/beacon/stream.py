"""Reading a text interval by interval with the unmodified model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pose_plugin.beacon.cache import BeaconCache
from pose_plugin.beacon.layout import RAW, Pass, lay_out, moves, positions, visible
from pose_plugin.beacon.ratios import intervals
from pose_plugin.beacon.rope import rotate
from pose_plugin.utils.errors import PoSEError


@dataclass
class Outcome:
    """What came of a call: outputs of the raw rows of all its passes."""

    logits: list[torch.Tensor] = field(default_factory=list)
    hidden: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    condensed: int = 0

    def all_logits(self) -> torch.Tensor:
        """(batch, kept tokens, vocabulary)."""
        return self.logits[0] if len(self.logits) == 1 else torch.cat(self.logits, dim=1)

    def all_hidden(self) -> tuple[torch.Tensor, ...] | None:
        """One (batch, tokens, hidden) a layer; None where they were not asked for."""
        if not self.hidden:
            return None
        return tuple(torch.cat(layer, dim=1) for layer in zip(*self.hidden, strict=True))


@dataclass
class Reader:
    """Runs the passes of one call.

    Args:
        tuner: the BeaconModel.
        call: the model's forward, as it is.
        cache: the stream; it is changed in place.
        extra: arguments for every pass.
        keep: how many of the last tokens' logits are wanted; None for all.
    """

    tuner: Any
    call: Callable[..., Any]
    cache: BeaconCache
    extra: dict[str, Any]
    keep: int | None = None

    def read(self, ids: torch.Tensor | None, embedded: torch.Tensor | None, ratios: list[int]) -> Outcome:
        """Reads new tokens behind the cache.

        Args:
            ids: (batch, tokens), or None where `embedded` is given.
            embedded: (batch, tokens, hidden).
            ratios: see `ratios.plan`.
        """
        config, cache = self.tuner.active_config, self.cache
        given = ids if ids is not None else embedded
        assert given is not None
        tokens = given.shape[1]
        condensed, _ = intervals(tokens, config.interval, cache.pending)
        result, at = Outcome(condensed=condensed), 0
        for index in range(condensed + 1):
            count = min(config.interval - cache.pending, tokens - at)
            closing = index < condensed
            ratio = ratios[index] if index < len(ratios) else 0
            if config.interleaved and not cache.tail:
                cache.open_ratio = ratio
            layout = lay_out(
                cache.len_memory,
                cache.tail,
                count,
                config.interval,
                ratio,
                closing,
                config.mask,
                config.interleaved,
                config.attend_previous,
            )
            wanted = count if self.keep is None else max(0, min(count, at + count - (tokens - self.keep)))
            piece = slice(at, at + count)
            self._pass(
                layout,
                None if ids is None else ids[:, piece],
                None if embedded is None else embedded[:, piece],
                wanted,
                result,
            )
            at += count
        return result

    def _pass(
        self, given: Pass, ids: torch.Tensor | None, embedded: torch.Tensor | None, wanted: int, result: Outcome
    ) -> None:
        tuner, cache = self.tuner, self.cache
        device = (ids if ids is not None else embedded).device  # type: ignore[union-attr]
        view = cache.view(given, tuner.active_config.gradient_intervals)
        raw = [at for at, row in enumerate(given.rows) if row == RAW]
        kept = raw[len(raw) - wanted :]
        inputs: dict[str, Any] = {
            "position_ids": torch.tensor([positions(given)], device=device),
            tuner.cache_key: view,
            "use_cache": False,
            "return_dict": True,
            **self.extra,
        }
        slices = "logits_to_keep" in tuner.accepts
        if slices:  # 0 keeps all rows, so "none" is said with an empty index
            index = torch.tensor(kept, dtype=torch.long, device=device)
            inputs["logits_to_keep"] = 0 if len(kept) == len(given.rows) else index
        tuner.router.given = given
        try:
            if embedded is not None:
                inputs["inputs_embeds"] = tuner.embedding.insert(embedded, given)
            else:
                inputs["input_ids"] = self._with_beacons(ids, given)  # type: ignore[arg-type]
            if not given.plain:
                inputs["attention_mask"] = self._mask(given, device)
            output = self.call(**inputs)
        finally:
            tuner.router.given = None
        written = view.seal()
        if not written or sorted(written) != list(range(len(written))):
            raise PoSEError(
                f"model: {type(tuner.model).__name__} wrote layers {sorted(written)} to the cache it was given; Beacon "
                "needs a decoder whose layers all call cache.update"
            )
        cache.extend(given, written)
        if wanted:
            result.logits.append(output.logits if slices else output.logits[:, kept])
        if output.hidden_states is not None and raw:
            rows = torch.tensor(raw, device=device)
            result.hidden.append(tuple(layer.index_select(1, rows.to(layer.device)) for layer in output.hidden_states))
        if given.closing:
            self._close(given)

    def _close(self, given: Pass) -> None:
        index, shifts = moves(given)
        tuner, inv_freq = self.tuner, self.tuner.rotary.inv_freq
        shift = torch.tensor(shifts, device=inv_freq.device)

        def place(layer: int, keys: torch.Tensor) -> torch.Tensor:
            return rotate(keys, shift, inv_freq) if tuner.rotates(layer) else keys

        self.cache.close(index, place, given.ratio)
        if not torch.is_grad_enabled():
            self.cache.compact()

    def _with_beacons(self, ids: torch.Tensor, given: Pass) -> torch.Tensor:
        if not given.beacons:
            return ids
        rows = torch.cat([ids, ids.new_full((ids.shape[0], given.beacons), self.tuner.embedding.sentinel)], dim=1)
        return rows if given.order is None else rows[:, given.order]

    def _mask(self, given: Pass, device: torch.device) -> torch.Tensor:
        """(1, 1, rows, keys): bool for sdpa, added to the scores for eager."""
        seen = visible(given, device)[None, None]
        if self.tuner.attention == "sdpa":
            return seen
        dtype = self.tuner.compute_dtype
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)
