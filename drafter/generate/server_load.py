"""How 01b's server copes with the requests in flight: what its KV cache holds, what waits, what it preempted."""

import asyncio
import contextlib

from drafter.config import Generate
from drafter.serve import kv_cache
from drafter.serve.client import Client
from drafter.serve.kv_cache import KvCache

LOOK_SECONDS = 30


class ServerLoad:
    """Looks at the server's /metrics now and then; one that does not give them is no fault."""

    def __init__(self, client: Client):
        self._client = client
        self.last = KvCache(0, 0, 0, 0)
        self.preemptions = 0  # since the first look, also over a restart of the server
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
        """How many requests fit, for the log; empty where the server does not say."""
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
        """For the progress line, once something waits or was preempted."""
        shown = {"waiting": self.last.waiting, "preempted": self.preemptions}
        return {name: count for name, count in shown.items() if count}

    def facts(self) -> dict[str, int]:
        return {"kv_cache_tokens": self.last.tokens, "preemptions": self.preemptions} if self._seen else {}
