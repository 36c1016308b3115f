"""The machine during a night: no other run on its units, one server at a time, and afterwards as it was before."""

import contextlib
import logging
from collections.abc import Iterator
from typing import get_args

from drafter import locks
from drafter.config import Config, Role, Server
from drafter.errors import ResumableError
from drafter.serve import roles, systemd

log = logging.getLogger("drafter")

RESTORE_SECONDS = 30


class Machine:
    """The servers of a run's roles. `production` are the units that were active before, and are to be so again."""

    def __init__(self, config: Config):
        self.config = config
        self.roles: dict[Role, Server] = {role: config.server(role) for role in get_args(Role)}
        self.production: set[str] = set()
        self.restore_owed = False  # by an earlier call, which was killed, or could not give something back

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """The units are one run's at a time, of all users. Raises ConfigError naming the other run."""
        with contextlib.ExitStack() as held:
            for unit in sorted({own.unit for own in self.roles.values() if own.kind == "systemd"}):
                held.enter_context(locks.claimed(unit, f"the run in {self.config.run_dir}"))
            yield

    def snapshot(self) -> None:
        """From here on, the units that are active now are to be so afterwards."""
        if self.restore_owed:  # what is active now may be what that call started
            return
        systemd_roles = [role for role, own in self.roles.items() if own.kind == "systemd"]
        self.production |= {self.roles[role].unit for role in systemd_roles if roles.alive(self.config, role)}

    def bring_up_only(self, wanted: Role | None) -> None:
        """The wanted role up, every other one that holds the machine down."""
        keep = self.roles[wanted].unit if wanted else None
        others = [role for role, own in self.roles.items() if role != wanted and not (keep and own.unit == keep)]
        stopped = [role for role in others if roles.alive(self.config, role) and roles.stop(self.config, role)]
        if stopped:
            roles.wait_free(self.config, stopped, max(self.roles[role].stop_seconds for role in stopped))
        if wanted:
            roles.up(self.config, wanted)

    def restore(self) -> None:
        """Every server of ours down, every production unit starting again. What fails is logged, and stays owed.

        No signal interrupts this, so its waits are short: at most RESTORE_SECONDS for each server to end, and as
        much for the GPU memory of all of them together.
        """
        stopped: list[Role] = []
        for role, own in self.roles.items():
            if own.kind == "external" or own.unit in self.production:
                continue
            with only_logged(f"stopping server {role}"):
                running = own.kind == "command" or roles.alive(self.config, role)
                if running and roles.stop(self.config, role, at_most=RESTORE_SECONDS):
                    stopped.append(role)
        with only_logged("before production starts"):
            roles.wait_free(self.config, stopped, RESTORE_SECONDS)
        for own in self.roles.values():
            if own.unit in self.production:
                with only_logged(f"giving back {own.unit}"):
                    systemd.start(own)
                    if not systemd.is_active(own):
                        raise ResumableError("it does not start; its journal says why")
                    self.production.discard(own.unit)
                    log.info("%s is starting again, as it was before", own.unit)


@contextlib.contextmanager
def only_logged(what: str) -> Iterator[None]:
    """An error in the block is said, and the night goes on."""
    try:
        yield
    except Exception as error:
        log.info("%s: %s", what, error)
