"""The config's section `servers`: how each vLLM role is reached and started. Secrets stay in the environment."""

import os
import re
from collections.abc import Iterable
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, field_serializer, field_validator, model_validator

from drafter.config.fields import LocalPath, Minutes, NonBlankStrings, NonNegativeInt, PositiveFloat, Section, in_home
from drafter.errors import ConfigError

# Of vLLM's flags those that other settings give, and those that would show a secret to everyone on the machine.
OURS = {"model": "target.model", "served-model-name": "target.served_name", "port": "url"}
SECRET_FLAGS = {"api-key": "name its variable with api_key_env", "hf-token": "export HF_TOKEN"}

SECRET_NAME = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD", re.IGNORECASE)
FROM_ENVIRONMENT = "(secret: taken from the environment)"  # in every config that is written


def _spelled(flag: str) -> str:
    """vLLM takes a flag with underscores, too."""
    return flag.replace("_", "-")


class Server(Section):
    """One vLLM role."""

    kind: Literal["systemd", "command", "external"] = Field(
        description="systemd: a unit that is started and stopped; command: started here; external: already there"
    )
    url: str = Field(description="http address without /v1; of a command, where it is to listen")
    api_key_env: str | None = Field(None, description="environment variable that holds the server's API key")
    unit: Annotated[str, Field(pattern=r"^[^/]+$")] | None = Field(None, description="the systemd unit's name")
    link: LocalPath | None = Field(
        None, description="folder that the unit's command names; starting the unit links it to the run's own"
    )
    systemctl: NonBlankStrings = Field(("systemctl",), description="the command that starts and stops units")
    args: dict[Annotated[str, Field(pattern=r"^[A-Za-z]")], JsonValue] = Field(
        {}, description="vLLM's own flags without the dashes; true stands for a bare flag"
    )
    env: dict[Annotated[str, Field(pattern=r"^[^=]+$")], str] = Field(
        {}, description="environment of a command; secrets are better exported, and never written to a file"
    )
    python: Annotated[str, AfterValidator(in_home)] | None = Field(
        None, description="interpreter that has vLLM; default: the one that runs the script"
    )
    start_minutes: Minutes = Field(60, description="minutes until it must answer")
    stop_seconds: PositiveFloat = Field(300, description="seconds until it must have stopped and freed its GPUs")
    hang_minutes: Minutes = Field(
        10, description="minutes without an answer and without progress of the stage, then it is restarted"
    )
    restarts: NonNegativeInt = Field(3, description="restarts of a server that dies or hangs during one stage")
    gpus: tuple[NonNegativeInt, ...] = Field(
        (), description="GPUs it runs on, as nvidia-smi numbers them: full while it is up, free once it is down"
    )

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.password is not None:
            raise ValueError("holds a password: name the variable of an API key with api_key_env instead")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # raises on a wrong port
            raise ValueError(f"{url!r} is no http address")
        if parts.path.rstrip("/").endswith("/v1"):
            raise ValueError(f"give {url!r} without /v1, which is put behind it")
        return url

    @field_validator("args")
    @classmethod
    def _foreign(cls, args: dict) -> dict:
        for flag in args:
            if setting := OURS.get(_spelled(flag)):
                raise ValueError(f"{flag} follows from {setting}: leave it out")
            if remedy := SECRET_FLAGS.get(_spelled(flag)):
                raise ValueError(f"{flag} would show the secret in `ps` and in records: {remedy}")
        return args

    @field_serializer("env")
    def _without_secrets(self, env: dict[str, str]) -> dict[str, str]:
        return {name: FROM_ENVIRONMENT if SECRET_NAME.search(name) else value for name, value in env.items()}

    @model_validator(mode="after")
    def _unit(self):
        if self.kind == "systemd" and not self.unit:
            raise ValueError("a systemd server needs `unit`")
        if self.kind == "command" and (not self.url.startswith("http:") or urlsplit(self.url).path.strip("/")):
            raise ValueError(f"a server that is started here listens at http://HOST:PORT, not at {self.url}")
        return self

    @property
    def flags(self) -> dict[str, JsonValue]:
        """`args` by the one name that vLLM shows for each."""
        return {_spelled(flag): value for flag, value in self.args.items()}

    @property
    def secrets(self) -> dict[str, str]:
        """The values in `env` that no file and no command line may show, by name."""
        return {
            name: value
            for name, value in self.env.items()
            if SECRET_NAME.search(name) and value not in ("", FROM_ENVIRONMENT)
        }

    def environment(self) -> dict[str, str]:
        """`env`, with what a written config leaves out taken from this process's environment.

        Raises ConfigError naming what is missing there.
        """
        left_out = [name for name, value in self.env.items() if value == FROM_ENVIRONMENT]
        if missing := [name for name in left_out if name not in os.environ]:
            raise ConfigError(f"env.{missing[0]} is a secret, which this config does not hold: export {missing[0]}")
        return self.env | {name: os.environ[name] for name in left_out}


class Servers(Section):
    generate: Server = Field(description="answers the prompts of 01b")
    extract: Server = Field(description="reads the answers back for 02")
    evaluate: Server = Field(description="serves the drafters that 06 measures, so it must be a command")

    def keep_secrets(self, overrides: Iterable[str]) -> None:
        """Raises ConfigError for an override that holds a secret: `ps` shows it, and records repeat it."""
        for role in type(self).model_fields:
            for name, value in getattr(self, role).secrets.items():
                shown = [each for each in overrides if each.startswith("servers") and name in each and value in each]
                if shown:
                    raise ConfigError(f"--set servers.{role}.env.{name}: export {name} instead of showing its value")
