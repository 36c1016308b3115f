"""The machine during a run: its units are claimed, one server holds the GPUs, and at the end it is restored."""

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
    """The servers of a run's roles. `production` are the units that were active before the run."""

    def __init__(self, config: Config):
        self.config = config
        self.roles: dict[Role, Server] = {role: config.server(role) for role in get_args(Role)}
        self.production: set[str] = set()
        self.restore_owed = False  # an earlier call left production units down

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Claim the units against the runs of all users. Raises ConfigError naming the run that holds one."""
        with contextlib.ExitStack() as held:
            for unit in sorted({own.systemd_unit for own in self.roles.values() if own.kind == "systemd"}):
                held.enter_context(locks.claimed(unit, f"the run in {self.config.run_dir}"))
            yield

    def snapshot(self) -> None:
        """Record the units that are active now as those to restore."""
        if self.restore_owed:  # the active units may be those that the earlier call started
            return
        systemd_roles = [role for role, own in self.roles.items() if own.kind == "systemd"]
        self.production |= {self.roles[role].systemd_unit for role in systemd_roles if roles.alive(self.config, role)}

    def bring_up_only(self, wanted: Role | None) -> None:
        """Stop every other role and wait for its GPU memory; then start the wanted role, if any."""
        keep = self.roles[wanted].unit if wanted else None
        others = [role for role, own in self.roles.items() if role != wanted and not (keep and own.unit == keep)]
        stopped = [role for role in others if roles.alive(self.config, role) and roles.stop(self.config, role)]
        if stopped:
            roles.wait_free(self.config, stopped, max(self.roles[role].stop_seconds for role in stopped))
        if wanted:
            roles.up(self.config, wanted)

    def restore(self) -> None:
        """Stop every server that we started and start the production units. A failure is logged and tried next time.

        No signal interrupts this, so its waits are short: at most RESTORE_SECONDS for each server to end, and as
        long for the GPU memory of all of them.
        """
        stopped: list[Role] = []
        for role, own in self.roles.items():
            if own.kind == "external" or own.unit in self.production:
                continue
            with only_logged(f"stopping server {role}"):
                running = own.kind == "command" or roles.alive(self.config, role)
                if running and roles.stop(self.config, role, at_most=RESTORE_SECONDS):
                    stopped.append(role)
        with only_logged("GPU memory before production starts"):
            roles.wait_free(self.config, stopped, RESTORE_SECONDS)
        for own in self.roles.values():
            if own.unit in self.production:
                with only_logged(f"restoring {own.unit}"):
                    systemd.start(own)
                    if not systemd.is_active(own):
                        raise ResumableError("it does not start, see its journal")
                    self.production.discard(own.unit)
                    log.info("%s was active before and is starting again", own.unit)


@contextlib.contextmanager
def only_logged(what: str) -> Iterator[None]:
    """Log an error of the block and go on."""
    try:
        yield
    except Exception as error:
        log.info("%s: %s", what, error)
