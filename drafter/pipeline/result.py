"""The end of a finished run on the terminal: where the drafter is, what it reaches, where the report is."""

from collections.abc import Iterator

from drafter import model_folder
from drafter.acceptance import wording
from drafter.config import Config
from drafter.pipeline.run_state import RunState


def lines(config: Config) -> Iterator[str]:
    """As much as there is; nothing about stages that have not run."""
    folder = config.stage_dir("05_export") / "model"
    if folder.exists():
        yield f"drafter: {folder} (its README.md shows how to serve it)"
    if found := RunState(config).acceptance:
        head = found["headline"]
        if head["acceptance_length"] is not None:
            yield (
                f"acceptance length: {wording.length(head)}; that many tokens a step of the target with "
                f"{wording.named(head['drafter'])}, 1 without a drafter"
            )
        yield wording.sentence(head | {"acceptance_length": None})
        if line := wording.why_slower(head, config.target.model == model_folder.DEFAULT_MODEL):
            yield line
    yield f"report: {config.run_dir / 'report.html'}"
