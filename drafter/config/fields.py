"""Field types of the config (bounded numbers, paths) and the base class of its sections."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

# Strict numbers: booleans and numeric strings are rejected. The bounds only catch typos.
StrictInt = Annotated[int, Field(strict=True)]
StrictFloat = Annotated[float, Field(strict=True)]
MAX_COUNT = 10**8  # of anything counted
PositiveInt = Annotated[StrictInt, Field(gt=0, le=MAX_COUNT)]
NonNegativeInt = Annotated[StrictInt, Field(ge=0, le=MAX_COUNT)]
Parallel = Annotated[StrictInt, Field(gt=0, le=10_000)]  # of anything done at once
Epochs = Annotated[StrictInt, Field(gt=0, le=10_000)]
LoaderThreads = Annotated[StrictInt, Field(ge=0, le=256)]  # each holds a pack
SequenceLength = Annotated[StrictInt, Field(ge=32, le=MAX_COUNT)]  # in shorter rows no answer is left
DraftTokens = Annotated[StrictInt, Field(gt=0, le=64)]
PositiveFloat = Annotated[StrictFloat, Field(gt=0, le=MAX_COUNT)]
NonNegativeFloat = Annotated[StrictFloat, Field(ge=0, le=MAX_COUNT)]
Minutes = Annotated[StrictFloat, Field(gt=0, le=7 * 24 * 60)]
Share = Annotated[StrictFloat, Field(ge=0, le=1)]
Beta = Annotated[StrictFloat, Field(ge=0, lt=1)]
Temperature = Annotated[StrictFloat, Field(ge=0, le=2)]
Penalty = Annotated[StrictFloat, Field(ge=-2, le=2)]


def in_home(path: str) -> str:
    """Expand `~` and `~user` at the beginning of a path. Raises ValueError for an unknown user."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError:
        raise ValueError(f"{path}: that user has no home folder") from None


LocalPath = Annotated[Path, AfterValidator(lambda path: Path(in_home(str(path))))]
NonBlankString = Annotated[str, Field(pattern=r"\S"), AfterValidator(in_home)]
NonBlankStrings = Annotated[tuple[NonBlankString, ...], Field(min_length=1)]


class Section(BaseModel):
    """Frozen; an unknown key is an error, so that no misspelled setting is ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _something(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.strip():
            raise ValueError("is blank: give it a value, or leave the key out")
        return value
