"""Who may work on a run: its pipeline or manual stages, and no process in a folder that another stage reads.

A stage holds the lock of its own folder and read locks of its input folders. The pipeline holds the lock of the run's
folder and read locks of the folders that it takes from other runs.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from drafter import files, locks, signals
from drafter.config import STAGES, Config, StageName
from drafter.errors import ConfigError

log = logging.getLogger("drafter")

PIPELINE = "run_pipeline.sh"
STOP_SECONDS = 150  # a stage of a killed pipeline was asked to stop and saves first


@contextlib.contextmanager
def stage(
    config: Config,
    name: StageName,
    reads: tuple[StageName, ...],
    own: Callable[[str, list[Path]], contextlib.AbstractContextManager] | None = None,
) -> Iterator[None]:
    """Work as a stage that reads the folders of the stages `reads`; removes what killed calls left in its own folder.

    `own(who, reads)` locks and sweeps the folder of a stage that several processes may share. Raises ConfigError
    before anything is written while a pipeline that did not start this process works on the run, or another process
    works in the stage's folder, reads it, or works in one of `reads`.
    """
    folder, run_dir = config.run_dir / name, config.run_dir
    with contextlib.ExitStack() as held:
        upstream = [config.stage_dir(each) for each in reads]
        for each in upstream:
            held.enter_context(locks.reading(each, theirs=each.parent != run_dir))
        who = f"{PIPELINE}: {name}" if locks.in_use(run_dir) else name
        try:
            held.enter_context((own or partial(locks.locked, folder))(who, upstream))
        except ConfigError:
            if reader := _reader(config, folder):
                raise ConfigError(f"another process is reading {folder}{reader}; wait for it or stop it") from None
            raise
        refuse_beside_pipeline(run_dir, name)  # a pipeline may have started meanwhile
        if own is None:
            files.sweep(folder)
        yield


def _reader(config: Config, folder: Path) -> str:
    """The running stage of any run that reads a folder, for a message; empty when none is found."""
    for name in STAGES:
        for other in config.run.dir.glob(f"*/{name}"):
            for place in workers(other):
                if str(folder.resolve()) in locks.holder(place).get("reads", ()):
                    return locks.describe(place)
    return ""


def refuse_beside_pipeline(run_dir: Path, name: str) -> None:
    """Raises ConfigError while a pipeline that did not start this process works on the run."""
    if not locks.in_use(run_dir) or locks.is_ancestor(locks.holder(run_dir)):
        return
    if locks.in_use(run_dir, locks.LOCK_SECONDS):
        raise ConfigError(
            f"{name} cannot run manually now: another process is working in {run_dir}{locks.describe(run_dir)}; "
            "wait for it or stop it"
        )


@contextlib.contextmanager
def pipeline(config: Config) -> Iterator[None]:
    """Work as the run's pipeline; waits for a stage of a killed pipeline to end.

    Raises ConfigError while another pipeline or a manual stage works on the run.
    """
    run_dir = config.run_dir
    with contextlib.ExitStack() as held:
        taken = config.run.take.values()
        held.enter_context(locks.locked(run_dir, PIPELINE, taken))
        for folder in taken:
            held.enter_context(locks.reading(folder, theirs=True))
        for name in STAGES:
            _wait_for_stage(run_dir / name)
        for place in (run_dir, run_dir / "servers"):
            files.sweep(place, below=False)
        yield


def _wait_for_stage(folder: Path) -> None:
    until = time.monotonic() + STOP_SECONDS
    said = False
    while busy := workers(folder):
        by_hand = not all(locks.holder(place).get("who", "").startswith(PIPELINE) for place in busy)
        if by_hand or time.monotonic() > until:
            raise ConfigError(
                f"another process is working in {busy[0]}{locks.describe(busy[0])}; wait for it or stop it"
            )
        if not said:
            log.info("waiting until a stage of a killed pipeline%s has stopped", locks.describe(busy[0]))
            said = True
        signals.raise_if_received()
        time.sleep(0.2)


def workers(folder: Path) -> list[Path]:
    """Which of a stage's folder and its shares are locked by a process at work there."""
    return [folder] * locks.in_use(folder) + locks.shares_in_use(folder)


def busy_folders(run_dir: Path) -> list[Path]:
    """Which of a run's folder, its stages and their shares are locked by a process at work there."""
    return [run_dir] * locks.in_use(run_dir) + [place for name in STAGES for place in workers(run_dir / name)]


@contextlib.contextmanager
def removing(run_dir: Path, name: str) -> Iterator[None]:
    """Lock a run and one of its folders so that the folder can be deleted.

    Raises ConfigError while the run's pipeline or a stage works, or another process reads the folder.
    """
    with locks.locked(run_dir, "drafter.disk clean"), locks.locked(run_dir / name, "drafter.disk clean"):
        for stage_name in STAGES:
            for place in workers(run_dir / stage_name):
                if place != run_dir / name:
                    raise ConfigError(f"another process is working in {place}{locks.describe(place)}")
        yield
