"""The config's section `servers`: how each vLLM role is reached and started. Secrets stay in the environment."""

import os
import re
from collections.abc import Iterable
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, field_serializer, field_validator, model_validator

from drafter.config.fields import LocalPath, Minutes, NonBlankStrings, NonNegativeInt, PositiveFloat, Section, in_home
from drafter.errors import ConfigError

# vLLM flags that other settings determine, and flags that would show a secret to every user of the machine.
OURS = {"model": "target.model", "served-model-name": "target.served_name", "port": "url"}
SECRET_FLAGS = {"api-key": "name its variable with api_key_env", "hf-token": "export HF_TOKEN"}

SECRET_NAME = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD", re.IGNORECASE)
FROM_ENVIRONMENT = "(secret: taken from the environment)"  # in every config that is written


def _spelled(flag: str) -> str:
    """vLLM also accepts a flag with underscores."""
    return flag.replace("_", "-")


class Server(Section):
    """One vLLM role."""

    kind: Literal["systemd", "command", "external"] = Field(
        description="systemd: a unit that is started and stopped; command: started here; external: started by others"
    )
    url: str = Field(description="http address without /v1; a command listens there")
    api_key_env: str | None = Field(None, description="environment variable that holds the server's API key")
    unit: Annotated[str, Field(pattern=r"^[^/]+$")] | None = Field(None, description="the systemd unit's name")
    link: LocalPath | None = Field(
        None, description="folder that the unit writes to; becomes a link to the run's folder before the unit starts"
    )
    systemctl: NonBlankStrings = Field(("systemctl",), description="the command that starts and stops units")
    args: dict[Annotated[str, Field(pattern=r"^[A-Za-z]")], JsonValue] = Field(
        {}, description="vLLM's own flags without the dashes; true stands for a bare flag"
    )
    env: dict[Annotated[str, Field(pattern=r"^[^=]+$")], str] = Field(
        {}, description="environment of a command; export secrets instead, which are never written to a file"
    )
    python: Annotated[str, AfterValidator(in_home)] | None = Field(
        None, description="interpreter that has vLLM; default: the one that runs the script"
    )
    start_minutes: Minutes = Field(60, description="minutes until it must answer")
    stop_seconds: PositiveFloat = Field(300, description="seconds until it must have stopped and freed its GPUs")
    hang_minutes: Minutes = Field(
        10, description="minutes without an answer and without progress of the stage until it is restarted"
    )
    restarts: NonNegativeInt = Field(3, description="restarts at most during one stage, if it dies or hangs")
    gpus: tuple[NonNegativeInt, ...] = Field(
        (), description="GPUs it runs on, as nvidia-smi numbers them: in use while it is up, free once it is down"
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
    def systemd_unit(self) -> str:
        """The unit of a server of the kind systemd, which always has one."""
        assert self.unit is not None
        return self.unit

    @property
    def flags(self) -> dict[str, JsonValue]:
        """`args` under vLLM's own spelling."""
        return {_spelled(flag): value for flag, value in self.args.items()}

    @property
    def secrets(self) -> dict[str, str]:
        """The secrets in `env`, by name: no file and no command line may show them."""
        return {
            name: value
            for name, value in self.env.items()
            if SECRET_NAME.search(name) and value not in ("", FROM_ENVIRONMENT)
        }

    def environment(self) -> dict[str, str]:
        """`env`, with secrets that a written config leaves out taken from this process's environment.

        Raises ConfigError naming the first one that is missing there.
        """
        left_out = [name for name, value in self.env.items() if value == FROM_ENVIRONMENT]
        if missing := [name for name in left_out if name not in os.environ]:
            raise ConfigError(f"env.{missing[0]} is a secret, which this config does not hold: export {missing[0]}")
        return self.env | {name: os.environ[name] for name in left_out}


class Servers(Section):
    generate: Server = Field(description="answers the prompts of 01b")
    extract: Server = Field(description="reads the answers back for 02")
    evaluate: Server = Field(description="serves the drafters that 06 measures; must be a command")

    def refuse_shown_secrets(self, overrides: Iterable[str]) -> None:
        """Raises ConfigError for an override with a secret, which `ps` and records would show."""
        for role in type(self).model_fields:
            for name, value in getattr(self, role).secrets.items():
                shown = [each for each in overrides if each.startswith("servers") and name in each and value in each]
                if shown:
                    raise ConfigError(f"--set servers.{role}.env.{name}: export {name} instead of showing its value")
