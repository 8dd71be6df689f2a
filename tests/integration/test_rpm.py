"""The .rpm: the Debian package's files, and a life in a root: install, upgrade, erase.

The root is Debian's, with rpm's own database in it: no root of an rpm distribution is to be had
without its mirrors. The package is that for Python 3.13, which this root has.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.packages import build_rpm, stage
from scripts.packages.build_rpm import LICENCE
from scripts.packages.parts import Component
from tests.support import debianroot

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("rpmbuild") is None, reason="rpm is not installed"),
]

DEBIAN_ONLY = {
    "/usr/share/doc/kata-pin/changelog.gz",
    "/usr/share/doc/kata-pin/copyright",
    "/usr/share/lintian/overrides/kata-pin",
}

_LIFE = rf"""
export LC_ALL=C
inside() {{ chroot "$root" /bin/sh -es; }}
rpm_in_root() {{ rpm --root "$root" --dbpath /var/lib/rpm --nodeps "$@"; }}  # dpkg has the others
change() {{ rpm_in_root --define '_install_script_path /tmp/double:/usr/sbin:/usr/bin' "$@" >&2; }}
mv "$root"/tmp/kata-pin-*.rpm "$top"
inside <<'END'
mkdir -p /usr/share/licenses  # rpm distributions have it
{debianroot.LIST}
list > /tmp/before
mkdir -p /var/lib/kata-pin
echo "$(printf %064d 0)  /usr/libexec/kata-pin/kata-pin-hook" > /var/lib/kata-pin/installed
END
! change -i "$top"/kata-pin-0.0.1-*.rpm
test ! -e "$root/usr/bin/kata-pin"
rm -r "$root/var/lib/kata-pin"
change -i "$top"/kata-pin-0.0.1-*.rpm
inside <<'END'
test -e /usr/lib/kata-pin/gone/__pycache__
echo '# mine' >> /etc/kata-pin/config.yaml
{debianroot.DOUBLES}
echo 'case $* in *disable*) SYSTEMD_OFFLINE=1 exec /usr/bin/systemctl "$@" ;; esac' \
    >> /tmp/double/systemctl
END
change -U "$top"/kata-pin-0.1.*.rpm
inside <<'END'
sed 's/^/upgrade: /' /tmp/calls; rm /tmp/calls
tail -n 1 /etc/kata-pin/config.yaml
sed -i '$ d' /etc/kata-pin/config.yaml
kata-pin config sample | diff -B - /etc/kata-pin/config.yaml
test ! -e /usr/lib/kata-pin/gone
test "$(find /usr/lib/kata-pin -name __pycache__ | wc -l)" -gt 20
kata-pin --version
getent passwd kata-pin | cut -d: -f1,7
END
rpm_in_root --verify kata-pin | grep -v ' c /etc/kata-pin/config.yaml' || true
mkdir "$root/var/lib/kata-pin" "$root/run/kata-pin"
touch "$root/var/lib/kata-pin/installed"  # by kata-pin install, which gave a runtime the hook
! change -e kata-pin
test -x "$root/usr/libexec/kata-pin/kata-pin-hook"
rm -r "$root/var/lib/kata-pin"
exec 8>"$root/run/kata-pin/lock"  # as a daemon that took over when the service stopped
flock 8
change -e kata-pin
test -e "$root/run/kata-pin/lock"
exec 8>&-
rm -r "$root/run/kata-pin"
inside <<'END'
sed 's/^/remove: /' /tmp/calls
rmdir /run/systemd/system
rm -f /etc/kata-pin/config.yaml.rpmsave
{debianroot.LIST}
list > /tmp/after
diff /tmp/before /tmp/after && echo clean
END
"""


@pytest.fixture(scope="module")
def rpm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rpm")
    return debianroot.package("rpm", "--release", "fc42", folder=folder)


def asked(rpm: Path, *words: str) -> list[str]:
    """Return the lines that rpm says of a package's file."""
    command = ["rpm", "-qp", *words, str(rpm)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_files_are_those_of_the_debian_package(rpm: Path, tmp_path: Path) -> None:
    """The same paths, modes, sizes and configuration, but for what each distribution wants."""
    deb = debianroot.package("deb", folder=tmp_path)
    listing = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(deb)], capture_output=True, check=True
    )
    names = subprocess.run(
        ["tar", "-tv", "--numeric-owner"], input=listing.stdout, capture_output=True, check=True
    ).stdout.decode()
    debian = {}
    for line in names.splitlines():
        mode, owner, size, _, _, name = line.split(None, 5)
        if not mode.startswith("d"):
            debian[name.removeprefix(".")] = (mode, owner, int(size))
    found = {}
    query = "[%{FILEMODES:perms} %{FILEUSERNAME}/%{FILEGROUPNAME} %{FILESIZES} %{FILENAMES}\\n]"
    for line in asked(rpm, "--queryformat", query):
        mode, owner, size, name = line.split(None, 3)
        if not mode.startswith("d"):
            found[name] = (mode, owner.replace("root", "0"), int(size))
    assert set(debian) - set(found) == DEBIAN_ONLY
    assert set(found) - set(debian) == {LICENCE}
    named = {"/usr/bin/kata-pin", "/usr/libexec/kata-pin/kata-pin-hook"}  # they name python3.13
    assert {name for name in found if debian.get(name, found[name]) != found[name]} == named
    assert asked(rpm, "--configfiles") == ["/etc/kata-pin/config.yaml"]


def test_what_it_needs_and_offers(rpm: Path) -> None:
    """The interpreter is a requirement; no library of ours is offered but as bundled."""
    done = subprocess.run(
        ["rpm", "-K", "--nosignature", str(rpm)], capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith(": digests OK\n"), done.stdout + done.stderr
    assert "/usr/bin/python3.13" in asked(rpm, "--requires")
    offered = [one for one in asked(rpm, "--provides") if not one.startswith("kata-pin")]
    assert {one.partition("(")[0] for one in offered} == {"bundled"}
    assert len(offered) > 5


def test_life_of_the_package(rpm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Affinities are restored by its removal and not by an upgrade, and nothing is left behind."""
    folder = tmp_path / "root"
    folder.mkdir()
    lines = debianroot.run(_LIFE, before(tmp_path, monkeypatch), rpm, folder=folder)
    calls = {word: [one for one in lines if one.startswith(word)] for word in ("upgrade", "remove")}
    assert "upgrade: systemctl try-restart kata-pin.service" in calls["upgrade"]
    refused = re.compile(r"unpin| (stop|preset|disable) ")
    assert not [one for one in calls["upgrade"] if refused.search(one)]
    order = ("is-active", "kata-pin unpin", "systemctl stop", "disable", "daemon-reload")
    places = [next(i for i, one in enumerate(calls["remove"]) if part in one) for part in order]
    assert places == sorted(places)
    assert [one for one in lines if not one.startswith(("upgrade: ", "remove: "))] == [
        "# mine",
        "kata-pin 0.1.0",
        "kata-pin:/usr/sbin/nologin",
        "clean",
    ]


def before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build a version before, which has a module that the present one does not have."""
    as_it_is = stage.stage

    def with_a_module(root: Path, *args: Any, **kw: Any) -> list[Component]:
        stage.write(root, "/usr/lib/kata-pin/gone/__init__.py", b"GONE = True\n")
        return as_it_is(root, *args, **kw)

    monkeypatch.setattr(stage, "stage", with_a_module)
    monkeypatch.setattr(build_rpm, "__version__", "0.0.1")
    return build_rpm.build(folder, "fc42")
