"""Servers that are up already are asked now what they will be asked later: whether they fit this run."""

import asyncio
from collections.abc import Collection, Iterator

from drafter.config import Config, Role
from drafter.errors import ConfigError, ResumableError
from drafter.generate import chat
from drafter.serve import readiness, roles
from drafter.serve.client import Client
from drafter.serve.readiness import Cause

PATIENCE_SECONDS = 10
OUTAGE_MINUTES = 0.2


def findings(config: Config, started: Collection[Role]) -> Iterator[str]:
    """What no waiting mends: served name, context, special tokens, the reasoning parser, token ids.

    A server that boots, hangs or is down is none: the run starts or restarts it. Nor is one that writes its states
    for another run, which is restarted for this one.
    """
    for role in started:
        own = config.server(role)
        if own.kind == "command" or not roles.alive(config, role):
            continue
        reason = readiness.why_unready(config, role, PATIENCE_SECONDS)
        if reason is None and role == "generate":
            try:
                asyncio.run(_ask(config))
            except ConfigError as error:
                yield f"servers.generate: {error}"
            except ResumableError:  # it stopped answering
                continue
        elif reason and reason.cause is Cause.UNFIT and not own.link:
            yield f"servers.{role}: {reason}; {readiness.remedy(own)}"


async def _ask(config: Config) -> None:
    async with Client(config.server("generate"), concurrency=1, outage_minutes=OUTAGE_MINUTES) as calls:
        await chat.check_server(calls, config)
