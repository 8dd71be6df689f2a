"""The Debian package: lintian, and a life in a Debian root: install, upgrade, remove, purge."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import debianroot

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

_LIFE = rf"""
set -e
export PATH=/tmp/double:/usr/sbin:/usr/bin LC_ALL=C
mv /tmp/*.deb /tmp/one.deb
{debianroot.LIST}
list > /tmp/before
mkdir -p /var/lib/kata-pin
echo "$(printf %064d 0)  /usr/libexec/kata-pin/kata-pin-hook" > /var/lib/kata-pin/installed
! dpkg -i /tmp/one.deb 2>/tmp/refused >&2
grep -o 'kata-pin install was run on this node' /tmp/refused && rm /tmp/refused
test ! -e /usr/bin/kata-pin
rm -r /var/lib/kata-pin
dpkg -i /tmp/one.deb >&2
echo "version: $(kata-pin --version)"
kata-pin config sample | diff -B - /etc/kata-pin/config.yaml
dpkg -L kata-pin | grep -qx /usr/share/man/man8/kata-pin.8.gz  # some roots leave it out
test -x /usr/libexec/kata-pin/kata-pin-hook
! find /usr/share/containers /etc/containers -name '*kata-pin*' 2>/dev/null | grep .
test -e /etc/systemd/system/multi-user.target.wants/kata-pin.service
test "$(find /usr/lib/kata-pin -name __pycache__ | wc -l)" -gt 20
echo "user: $(getent passwd kata-pin | cut -d: -f1,7)"
mkdir -p /usr/share/man/man8  # of an excluded man page, as is what dpkg -V finds missing
state() ( list; dpkg -V kata-pin || true )
state > /tmp/alone
kata-pin install --podman >&2
test -e /usr/share/containers/oci/hooks.d/90-kata-pin-poststop.json
! dpkg -r kata-pin 2>/tmp/refused >&2
grep -o 'run kata-pin uninstall before' /tmp/refused && rm /tmp/refused
test -x /usr/libexec/kata-pin/kata-pin-hook
kata-pin uninstall | grep -o '^affinities are kept'
rmdir -p --ignore-fail-on-non-empty /usr/share/containers/oci/hooks.d
state | diff /tmp/alone -
echo '# mine' >> /etc/kata-pin/config.yaml
{debianroot.DOUBLES}
dpkg -i /tmp/one.deb >&2
tail -n 1 /etc/kata-pin/config.yaml
sed 's/^/upgrade: /' /tmp/calls; rm /tmp/calls
mkdir /run/kata-pin
dpkg -r kata-pin >&2
test ! -e /run/kata-pin
sed 's/^/remove: /' /tmp/calls
rmdir /run/systemd/system
dpkg -P kata-pin >&2
list > /tmp/after
diff /tmp/before /tmp/after && echo clean
"""


@pytest.fixture(scope="module")
def deb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return debianroot.package("deb", folder=tmp_path_factory.mktemp("deb"))


@pytest.mark.skipif(shutil.which("lintian") is None, reason="lintian is not installed")
def test_lintian_finds_nothing(deb: Path) -> None:
    """No error and no warning, but for what the package's overrides explain."""
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error,warning", str(deb)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_life_of_the_package(deb: Path, tmp_path: Path) -> None:
    """Affinities are restored by its removal and not by an upgrade, and nothing is left behind.

    Beside it `kata-pin install` and `uninstall` register hooks, and change none of its files.
    """
    script = f'exec chroot "$root" /bin/sh -c {shlex.quote(_LIFE)}'
    lines = debianroot.run(script, deb, folder=tmp_path)
    assert lines[:6] == [
        "kata-pin install was run on this node",
        *("version: kata-pin 0.1.0", "user: kata-pin:/usr/sbin/nologin"),
        *("run kata-pin uninstall before", "affinities are kept", "# mine"),
    ]
    calls = {word: [one for one in lines if one.startswith(word)] for word in ("upgrade", "remove")}
    assert "upgrade: deb-systemd-invoke restart kata-pin.service" in calls["upgrade"]
    assert not [one for one in calls["upgrade"] if "unpin" in one or " stop " in one]
    order = ("systemctl --quiet is-active", "kata-pin unpin", "deb-systemd-invoke stop")
    places = [next(i for i, one in enumerate(calls["remove"]) if part in one) for part in order]
    assert places == sorted(places)
    assert lines[-1] == "clean"
