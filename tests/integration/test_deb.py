"""The Debian package: lintian, and a life in a Debian root: install, upgrade, remove, purge."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.packages.parts import NOT_HERE
from tests.lab.rootfs import root_builder

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

_IN_ROOT = r"""
set -e
mount -t tmpfs tmpfs "$2"
mkdir "$2/upper" "$2/work" "$2/mnt"
mount -t overlay overlay -o lowerdir="$1",upperdir="$2/upper",workdir="$2/work" "$2/mnt"
cp "$3" "$2/mnt/tmp/one.deb"
exec chroot "$2/mnt" /bin/sh -c "$4"
"""
"""Runs a script in the Debian root, below a file system that is gone afterwards."""

_LIFE = r"""
set -e
export PATH=/tmp/double:/usr/sbin:/usr/bin LC_ALL=C
list() {
    find / -xdev \( -path /tmp -o -path /var/lib/dpkg -o -path /var/log -o -path /var/cache \) \
        -prune -o -print | grep -vE '^/etc/(passwd|group|g?shadow)-?$' | sort
}
list > /tmp/before
dpkg -i /tmp/one.deb >&2
echo "version: $(kata-pin --version)"
kata-pin config sample | diff -B - /etc/kata-pin/config.yaml
dpkg -L kata-pin | grep -qx /usr/share/man/man8/kata-pin.8.gz  # some roots leave it out
test -x /usr/libexec/kata-pin/kata-pin-hook
! find /usr/share/containers /etc/containers -name '*kata-pin*' 2>/dev/null | grep .
test -e /etc/systemd/system/multi-user.target.wants/kata-pin.service
test "$(find /usr/lib/kata-pin -name __pycache__ | wc -l)" -gt 20
echo "user: $(getent passwd kata-pin | cut -d: -f1,7)"
echo '# mine' >> /etc/kata-pin/config.yaml
# a system that is up, for the package's scripts: what they call is noted
mkdir -p /run/systemd/system /tmp/double
for one in systemctl deb-systemd-invoke kata-pin systemd-tmpfiles; do
    printf '#!/bin/sh\necho "%s $*" >> /tmp/calls\n' "$one" > "/tmp/double/$one"
    chmod +x "/tmp/double/$one"
done
dpkg -i /tmp/one.deb >&2
tail -n 1 /etc/kata-pin/config.yaml
sed 's/^/upgrade: /' /tmp/calls; rm /tmp/calls
dpkg -r kata-pin >&2
sed 's/^/remove: /' /tmp/calls
rmdir /run/systemd/system
dpkg -P kata-pin >&2
list > /tmp/after
diff /tmp/before /tmp/after && echo clean
"""


@pytest.fixture(scope="module")
def deb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = subprocess.run(
        [str(ROOT / "scripts/deb"), "--folder", str(tmp_path_factory.mktemp("deb"))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VENV": sys.prefix},
    )
    if done.returncode == NOT_HERE:
        pytest.skip(done.stderr)  # scripts/test says so too, for the image
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


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
    """Affinities are restored by its removal and not by an upgrade, and nothing is left behind."""
    root = root_builder(lambda _: None).find_root()
    if root is None:
        pytest.skip("no Debian 13 root: scripts/debian-root builds one (once, some minutes)")
    words = (str(root), str(tmp_path), str(deb), _LIFE)
    done = subprocess.run(
        [*["unshare", "-m", "--propagation", "private", "sh", "-c"], _IN_ROOT, "sh", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[:3] == ["version: kata-pin 0.1.0", "user: kata-pin:/usr/sbin/nologin", "# mine"]
    calls = {word: [one for one in lines if one.startswith(word)] for word in ("upgrade", "remove")}
    assert "upgrade: deb-systemd-invoke restart kata-pin.service" in calls["upgrade"]
    assert not [one for one in calls["upgrade"] if "unpin" in one or " stop " in one]
    order = ("systemctl --quiet is-active", "kata-pin unpin", "deb-systemd-invoke stop")
    places = [next(i for i, one in enumerate(calls["remove"]) if part in one) for part in order]
    assert places == sorted(places)
    assert lines[-1] == "clean"
