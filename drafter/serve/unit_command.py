"""A systemd unit's program without systemd: with other flags, in the unit's environment, for root as the unit's user.

`python -m drafter.serve.unit_command UNIT -m MODULE FLAGS` stands for the interpreter of a `command` role and becomes
the unit's program with these flags.
"""

import json
import os
import pwd
import sys
from typing import Any

from drafter.serve import unit_file
from drafter.serve.unit_file import UnitFile

GIVEN = ("model", "served-model-name", "host", "port", "api-key")  # flags that the config of a command role gives
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # that systemd gives to a service


def program(unit: UnitFile) -> list[str]:
    """The words before the flags, without the model that `vllm serve` takes there."""
    flag = next((at for at, word in enumerate(unit.command) if word.startswith("--")), len(unit.command))
    words = unit.command[:flag]
    return words[: words.index("serve") + 1] if "serve" in words else words


def role_args(unit: UnitFile) -> dict[str, Any]:
    """The unit's flags as `servers.ROLE.args` of a command role: JSON as what it says, several words as a list."""
    words = unit_file.flag_words(unit.command)
    return {name: _value(values) for name, values in words.items() if name not in GIVEN}


def _value(words: list[str]) -> Any:
    if len(words) != 1:
        return words or True
    return json.loads(words[0]) if words[0].startswith("{") else words[0]


def can_switch_user(unit: UnitFile) -> bool:
    """Whether this process can run the unit's program as the unit's user: root can, and that user itself."""
    return os.geteuid() in (0, pwd.getpwnam(unit.user).pw_uid)


def main(argv: list[str]) -> None:
    """Become the unit's program."""
    name, _, _, *flags = argv
    unit = unit_file.read(name)
    if unit is None or not unit.command:
        sys.exit(f"the unit {name} has no file that can be read")
    for path in unit.unread:
        print(f"{path}: this user may not read it, its settings are left out", file=sys.stderr)
    own = pwd.getpwuid(os.geteuid())
    account = pwd.getpwnam(unit.user) if can_switch_user(unit) else own
    variables = {
        "PATH": SYSTEM_PATH,
        "LANG": "C.UTF-8",
        "HOME": account.pw_dir,
        "SHELL": account.pw_shell or "/bin/sh",
    }
    variables |= {"USER": account.pw_name, "LOGNAME": account.pw_name} | unit.environment
    os.umask(unit.umask)
    os.chdir(unit.folder)
    if account.pw_uid != own.pw_uid:
        os.initgroups(account.pw_name, account.pw_gid)
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    elif not os.access(variables["HOME"], os.W_OK):  # of the unit's user, whose program this one cannot be
        variables["HOME"] = own.pw_dir
    words = program(unit)
    if words[-1] == "serve":
        at = flags.index("--model")
        flags = [flags[at + 1], *flags[:at], *flags[at + 2 :]]
    try:
        os.execvpe(words[0], [*words, *flags], variables)
    except OSError as error:
        sys.exit(f"the unit {name}: {words[0]} does not run ({error.strerror})")


if __name__ == "__main__":
    main(sys.argv[1:])
