"""File permissions between two users: the extract unit's user creates files that this user renames and deletes."""

import grp
import os
import pwd
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from drafter.config import Config
from drafter.serve import systemd

# Tags of an entry of a POSIX ACL
ACL_OWNER, ACL_GROUP, ACL_MASK, ACL_OTHER = 0x01, 0x04, 0x10, 0x20


def shared_folder(config: Config) -> Iterator[str]:
    """Findings if the extract unit's user cannot write its folder, or this user cannot delete its files."""
    own, states = config.servers.extract, config.stage_dir("02_hidden_states")
    if own.kind != "systemd" or missing_folder(config.run.dir):
        return
    if own.link and (absent := missing_folder(own.link)):
        if absent != config.run.dir:  # run.dir itself is created before
            yield f"servers.extract.link: {absent} does not exist"
    elif own.link and not own.link.is_symlink() and (own.link.exists() or not os.access(own.link.parent, os.W_OK)):
        yield f"servers.extract.link: {own.link} cannot be replaced by a link; move it away, or chmod its folder"
    yield from permissions(states, own.systemd_unit, systemd.properties(own))


def permissions(folder: Path, unit: str, properties: dict[str, str]) -> Iterator[str]:
    """As `shared_folder`, for the folder that the unit writes in; `properties` are those that systemd reports."""
    try:
        writer = pwd.getpwnam(properties.get("User") or "root")
        group = grp.getgrnam(properties["Group"]).gr_gid if properties.get("Group") else writer.pw_gid
    except KeyError as error:
        yield f"{unit}: {error.args[0]}"  # name not found
        return
    if writer.pw_uid == os.getuid():
        return
    there = folder
    while not there.exists():
        there = there.parent
    if there == folder:
        found = there.stat()
        owner, mode, owning_group = found.st_uid, found.st_mode, found.st_gid
    else:
        owner, (mode, owning_group) = os.geteuid(), _would_make(there)
    name, mine = writer.pw_name, (os.getgid(), *os.getgroups())
    theirs = (group, *os.getgrouplist(name, writer.pw_gid))
    remedy = f"make {there} a folder of a group that both users are in, mode 2775, and start with umask 002"

    def writer_may(need: int, mode: int, uid: int, gid: int) -> bool:
        return writer.pw_uid == 0 or _grants(need, mode, uid == writer.pw_uid, gid in theirs)

    above = [path.stat() for path in (there, *there.parents)]
    reached = all(writer_may(0o1, each.st_mode, each.st_uid, each.st_gid) for each in above)
    if not reached or not writer_may(0o3, mode, owner, owning_group):
        yield f"{unit} runs as {name}, who could not write in {folder}: {remedy}"
    # A new file gets the folder's group if the folder has the setgid bit, else the writer's.
    inside = owning_group if mode & stat.S_ISGID else group
    umask = int(properties.get("UMask") or "0022", 8)
    if os.getuid() and not _grants(0o7, 0o777 & ~umask, False, inside in mine):
        fault = "set UMask=0002 in the unit" if inside in mine else remedy
        yield f"{unit} runs as {name}, and this user could not rename or delete what it writes: {fault}"


def _would_make(folder: Path) -> tuple[int, int]:
    """Mode and group that a new folder inside would get from the umask, the setgid bit and the default ACL."""
    above = folder.stat()
    inherited = above.st_mode & stat.S_ISGID
    return _default_mode(folder) | inherited, above.st_gid if inherited else os.getegid()


def _default_mode(folder: Path) -> int:
    try:
        acl = os.getxattr(folder, "system.posix_acl_default")
    except OSError:  # without a default ACL, or without ACLs at all
        status = Path("/proc/self/status").read_text()
        return 0o777 & ~int(status.partition("Umask:")[2].split()[0], 8)
    entries = {tag: permissions for tag, permissions, _ in struct.iter_unpack("<HHI", acl[4:])}
    group = entries.get(ACL_MASK, entries[ACL_GROUP])
    return entries[ACL_OWNER] << 6 | group << 3 | entries[ACL_OTHER]


def _grants(need: int, mode: int, owner: bool, group: bool) -> bool:
    """Whether a folder of this mode grants `need` (1 pass through, 2 change names, 4 list)."""
    bits = mode >> 6 if owner else mode >> 3 if group else mode
    return bits & need == need


def missing_folder(path: Path) -> Path | None:
    """The topmost missing parent folder of a path, or None."""
    absent = [above for above in path.absolute().parents if not above.exists()]
    return absent[-1] if absent else None
