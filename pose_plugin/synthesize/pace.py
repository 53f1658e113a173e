"""How long to wait: for a rate limit, and before a request is repeated."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime


class Pace:
    """Spaces requests evenly under a limit of requests and of tokens a minute; 0 is no limit.

    A burst at the start of a minute would be refused by servers that count by the second.
    """

    def __init__(self, requests_per_minute: float = 0, tokens_per_minute: float = 0) -> None:
        self._seconds_a_request = 60 / requests_per_minute if requests_per_minute else 0.0
        self._seconds_a_token = 60 / tokens_per_minute if tokens_per_minute else 0.0
        self._free = 0.0

    def delay(self, now: float, tokens: int) -> float:
        """Books the next place. Returns the seconds until then.

        Args:
            now: of any clock that only goes forward.
            tokens: of the request and its longest answer.
        """
        start = max(now, self._free)
        self._free = start + max(self._seconds_a_request, tokens * self._seconds_a_token)
        return start - now

    def pause(self, until: float) -> None:
        """Nothing starts before `until`: a server that is asked too often means all requests."""
        self._free = max(self._free, until)


def backoff(failures: int, first: float, longest: float = 60.0) -> float:
    """Seconds before the next try after so many failures: doubled each time, less up to half at random.

    Without the random part, requests that failed together would come again together.
    """
    return min(longest, first * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that a server asks to wait, in any of the three forms in use; None if it does not say."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * scale
        except ValueError:
            try:
                seconds = parsedate_to_datetime(value).timestamp() - (time.time() if now is None else now)
            except (TypeError, ValueError):
                continue
        if seconds == seconds and seconds < float("inf"):
            return max(0.0, seconds)
    return None
