"""Processes in jails: real ones, whose root and program the broker verifies by inode and owner."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kata_pin.broker.operations import Operations
from kata_pin.broker.policy import Policy
from kata_pin.broker.protocol import NUMBER
from kata_pin.calls import DIRECT
from tests.support import vmm_standin
from tests.support.vmm_standin import Spec, copy_of_python

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a jail")

CUT = "0123456789abcdef" * 2
ARGV = ("/firecracker", "--id", CUT, "--start-time-us", "1", "--config-file", "/fcConfig.json")


@pytest.fixture
def vc(tmp_path: Path) -> Path:
    """Kata's directory, as pytest's own are: root's."""
    (tmp_path / "vc").mkdir()
    return tmp_path / "vc"


def _spec(vc: Path, name: str = CUT) -> Spec:
    program = copy_of_python(vc.parent / "bin" / "firecracker")
    return Spec(program, ARGV, jail=str(vc / "firecracker" / name / "root"))


def _rules(vc: Path) -> Policy:
    return Policy(f"x{vc.parent}/bin/firecracker*\0f{vc}\0j{vc}".encode())


@contextmanager
def _changed(path: Path, mode: int = 0, uid: int = 0) -> Iterator[None]:
    """Give something another mode or owner for a while."""
    before = path.stat()
    if mode:
        path.chmod(mode)
    os.chown(path, uid, 0)
    yield
    os.chown(path, 0, 0)
    path.chmod(before.st_mode & 0o7777)


def _refusal(policy: Policy, pid: int, jail: str | Path) -> int:
    try:
        policy.verify_jail(pid, str(jail))
    except OSError as error:
        return error.errno or 0
    return 0


def test_a_jailed_vmm(vc: Path) -> None:
    """It is touched once its jail was named, and only while it is in it."""
    spec, policy = _spec(vc), _rules(vc)
    with vmm_standin.running(spec) as pid:
        assert not policy.may_change(pid), "nobody named its jail"
        policy.verify_jail(pid, spec.jail)
        DIRECT.verify_jail(pid, spec.jail)
        assert policy.may_change(pid)
        other = vc / "firecracker" / "other" / "root"
        shutil.copytree(spec.jail, other, ignore=lambda _, names: {"proc", "dev"} & {*names})
        assert _refusal(policy, pid, other) == errno.ESTALE
        assert not policy.may_change(pid), "it counts where it was verified last"
    assert not policy.may_change(os.getpid())


@pytest.mark.parametrize("part", ["", "..", "../..", "../../..", "firecracker"])
def test_who_may_write_in_a_jail(vc: Path, part: str) -> None:
    """Each folder from Kata's to the jail, and the program, is root's and writable by nobody else.

    What changes later counts at once.
    """
    spec, policy = _spec(vc), _rules(vc)
    path = Path(os.path.normpath(f"{spec.jail}/{part}"))
    with vmm_standin.running(spec) as pid:
        for options in ({"mode": 0o775}, {"mode": 0o757}, {"uid": 4242}):
            with _changed(path, **options):
                assert _refusal(policy, pid, spec.jail) == errno.EACCES
                with pytest.raises(PermissionError):
                    DIRECT.verify_jail(pid, spec.jail)
            assert _refusal(policy, pid, spec.jail) == 0
            assert policy.may_change(pid)
            with _changed(path, **options):
                assert not policy.may_change(pid)


def test_another_program_in_the_jail(vc: Path) -> None:
    """A process keeps its root; what it runs must still be the jail's program."""
    spec, policy = _spec(vc), _rules(vc)
    with vmm_standin.running(spec) as pid:
        policy.verify_jail(pid, spec.jail)
        program = Path(spec.jail, "firecracker")
        program.rename(program.with_name("before"))
        assert not policy.may_change(pid)
        shutil.copy(program.with_name("before"), program)
        assert _refusal(policy, pid, spec.jail) == errno.ESTALE
    with vmm_standin.running(replace(spec, jail="")) as pid:
        assert _refusal(policy, pid, spec.jail) == errno.ESTALE, "it runs outside of it"


def test_links_are_no_jails(vc: Path) -> None:
    """Nothing below the folder of jails is reached by a link."""
    real = vc.parent / "elsewhere"
    spec, policy = replace(_spec(vc), jail=str(real / "firecracker" / CUT / "root")), _rules(vc)
    with vmm_standin.running(spec) as pid:
        (vc / "firecracker").symlink_to(real / "firecracker")
        jail = vc / "firecracker" / CUT / "root"
        assert _refusal(policy, pid, jail) in {errno.ELOOP, errno.ENOTDIR}
        assert _refusal(policy, pid, spec.jail) == errno.EACCES, "no folder of jails"
        (vc / "firecracker").unlink()
        (vc / "firecracker" / CUT).mkdir(parents=True)
        jail.symlink_to(spec.jail)
        assert _refusal(policy, pid, jail) in {errno.ELOOP, errno.ENOTDIR}


def test_what_is_no_jail(vc: Path) -> None:
    """A path of another form, a program that is no VMM, a process that is not there."""
    spec, policy = _spec(vc), _rules(vc)
    run = Operations(policy)
    for jail in (f"{vc}/firecracker/{CUT}", f"{vc}/firecracker/../root", "/root", "/a/root"):
        with pytest.raises((ValueError, OSError)):
            run.run(b"j", NUMBER.pack(os.getpid()) + jail.encode(), ())
    assert _refusal(policy, os.getpid(), vc / "sleep" / CUT / "root") == errno.EACCES
    assert _refusal(policy, os.getpid(), spec.jail) == errno.ESTALE
    assert _refusal(policy, 2**22 + 1, spec.jail) == errno.ENOENT


def test_a_jails_pid_file(vc: Path) -> None:
    """The file that a jailer leaves is read; nothing else in a jail, and none of that name else."""
    jail = vc / "firecracker" / CUT / "root"
    jail.mkdir(parents=True)
    names = (jail / "firecracker.pid", jail / "other.pid", vc / "firecracker.pid")
    for path in names:
        path.write_text("7")
    run = Operations(_rules(vc))
    answer = run.run(b"r", NUMBER.pack(32) + os.fsencode(names[0]), ())
    assert answer.data == b"7"
    for path in names[1:]:
        with pytest.raises(PermissionError):
            run.run(b"r", NUMBER.pack(32) + os.fsencode(path), ())
