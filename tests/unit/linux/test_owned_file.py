"""Files behind a kubelet's symlinks: followed where only root could have made them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kata_pin.linux.owned_files import FileRefused, read_projected
from kata_pin.rights.broker.files import status_of_fd
from kata_pin.rights.broker.protocol import FileStatus

OTHER = 4242


def projected(folder: Path) -> Path:
    """Return a token as a kubelet projects it into a container."""
    folder.mkdir()
    folder.chmod(0o1777)
    (folder / "..2026").mkdir()
    (folder / "..2026" / "token").write_text("secret")
    (folder / "..data").symlink_to("..2026")
    (folder / "token").symlink_to("..data/token")
    return folder / "token"


def test_symlinks_of_root(tmp_path: Path) -> None:
    """A file, a symlink to one and a projected one are read; its length is bounded."""
    token = projected(tmp_path / "volume")
    assert read_projected(str(token), 6) == b"secret"
    assert read_projected(str(token.parent / "..2026" / "token"), 6) == b"secret"
    with pytest.raises(FileRefused, match=r"volume/token is larger than 5 bytes"):
        read_projected(str(token), 5)
    with pytest.raises(FileRefused, match="not a regular file"):
        read_projected(str(token.parent / "..data"), 5)


def test_a_file_that_grows_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its length before the read says nothing of what the read returned."""
    path = tmp_path / "token"
    path.write_bytes(b"secret")

    def then_grows(descriptor: int) -> FileStatus:
        status = status_of_fd(descriptor)
        with path.open("ab", buffering=0) as file:
            file.write(b"s")
        return status

    monkeypatch.setattr("kata_pin.linux.owned_files.status_of_fd", then_grows)
    with pytest.raises(FileRefused, match="is larger than 6 bytes"):
        read_projected(str(path), 6)


def test_no_such_file(tmp_path: Path) -> None:
    """The error names the whole path, also of a symlink to nothing."""
    (tmp_path / "token").symlink_to("none")
    for name in ("token", "none", "nowhere/token"):
        with pytest.raises(FileNotFoundError) as error:
            read_projected(str(tmp_path / name), 5)
        assert error.value.filename in {str(tmp_path / name), str(tmp_path / "nowhere")}


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        pytest.param(
            lambda token: os.chown(token.parent, OTHER, OTHER),
            "volume is owned by uid 4242",
            id="folder",
        ),
        pytest.param(
            lambda token: os.chown(token, OTHER, OTHER, follow_symlinks=False),
            "volume/token is owned by uid 4242",
            id="link",
        ),
        pytest.param(
            lambda token: os.chown(token, OTHER, OTHER),
            "volume/token is owned by uid 4242",
            id="file",
        ),
        pytest.param(lambda token: token.parent.chmod(0o777), "can be written", id="no-sticky-bit"),
    ],
)
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of another user")
def test_what_others_could_have_made(
    tmp_path: Path, change: Callable[[Path], None], refused: str
) -> None:
    """No symlink of another user is followed, and none in a folder where others can replace it."""
    token = projected(tmp_path / "volume")
    change(token)
    with pytest.raises(FileRefused, match=refused):
        read_projected(str(token), 100)
