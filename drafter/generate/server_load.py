"""The load of 01b's server: the size of its KV cache, waiting requests and preemptions, from its /metrics."""

import asyncio
import contextlib

from drafter.config import Generate
from drafter.serve import kv_cache
from drafter.serve.client import Client
from drafter.serve.kv_cache import KvCache

LOOK_SECONDS = 30


class ServerLoad:
    """Reads the server's /metrics every LOOK_SECONDS; a server without them is accepted."""

    def __init__(self, client: Client):
        self._client = client
        self.last = KvCache(0, 0, 0, 0)
        self.preemptions = 0  # since the first look, restarts of the server included
        self._seen = False

    async def look(self) -> None:
        with contextlib.suppress(ValueError, OverflowError):
            now = kv_cache.read(await self._client.metrics())
            if not now.tokens:
                return
            if self._seen:
                before = self.last.preemptions
                self.preemptions += now.preemptions - (before if now.preemptions >= before else 0)
            self.last, self._seen = now, True

    async def keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    def room(self, settings: Generate) -> str:
        """How many requests fit, for the log; "" if the server does not report it."""
        if not self.last.tokens:
            return ""
        half, whole = (self.last.fitting(settings.max_tokens * share) for share in (0.5, 1))
        asked = settings.concurrency
        text = f"its KV cache holds {self.last.tokens:,} tokens: "
        if half >= asked:
            return text + f"all {asked} requests fit at half of generate.max_tokens"
        return text + (
            f"{half} of {asked} requests fit at half of generate.max_tokens, {whole} at all of it; the others wait, "
            "or are preempted and computed again, unless the server gets more room (--decode-context-parallel-size) "
            "and a --watermark of 0.05"
        )

    def status(self) -> dict[str, int]:
        """Waiting and preempted requests for the progress line; empty if there are none."""
        shown = {"waiting": self.last.waiting, "preempted": self.preemptions}
        return {name: count for name, count in shown.items() if count}

    def facts(self) -> dict[str, int]:
        return {"kv_cache_tokens": self.last.tokens, "preemptions": self.preemptions} if self._seen else {}
