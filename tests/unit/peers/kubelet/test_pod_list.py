"""The request to a played kubelet over real HTTP and TLS: answers, refusals, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kata_pin.base.allocation import PodSpec
from kata_pin.base.errors import StateError
from kata_pin.peers.http import DEADLINE_S, HttpClient
from kata_pin.peers.kubelet.pods import PodList
from tests.support.certificates import certificate
from tests.support.kubeletpods import TOKEN, Kubelet, playing_kubelet


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    with playing_kubelet() as server:
        yield server


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return str(path)


async def test_with_a_token(kubelet: Kubelet, token: str) -> None:
    """The credential is sent, and read again after it was replaced."""
    pods = PodList(kubelet.url(), token)
    assert await pods.read() == {"u1": PodSpec()}
    Path(token).write_text("old")
    with pytest.raises(StateError, match="answered HTTP 401"):
        await pods.read()
    Path(token).write_text(TOKEN)
    assert await pods.read() == {"u1": PodSpec()}


async def test_without_a_token(kubelet: Kubelet) -> None:
    """An open port needs none; a closed one refuses."""
    assert await PodList(kubelet.url("/open")).read() == {"u1": PodSpec()}
    with pytest.raises(StateError, match="answered HTTP 401"):
        await PodList(kubelet.url()).read()


@pytest.mark.parametrize("text", ["", "a\nb", "é"])
async def test_a_token_that_is_none(kubelet: Kubelet, token: str, text: str) -> None:
    """What could break out of a header is never sent."""
    Path(token).write_text(text)
    with pytest.raises(StateError, match="does not hold a token"):
        await PodList(kubelet.url(), token).read()


async def test_deadline(kubelet: Kubelet) -> None:
    """A kubelet that drips its answer is given up in time."""
    began = time.monotonic()
    with pytest.raises(StateError, match="no answer within"):
        await PodList(kubelet.url("/slow"), deadline_s=0.2).read()
    assert time.monotonic() - began < 3


async def test_a_name_that_is_looked_up_for_ever(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name lookup cannot be cut: no further request starts until it ends.

    A resolver that hangs cannot be had here without its own network: so the function is replaced.
    """
    found = threading.Event()
    looked_up: list[object] = []
    resolve = socket.getaddrinfo

    def hangs(*arguments: object, **_: object) -> object:
        looked_up.append(arguments)
        found.wait(20)
        return resolve("127.0.0.1", kubelet.server_address[1], type=socket.SOCK_STREAM)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    pods = PodList(kubelet.url("/open"), deadline_s=0.1)
    with pytest.raises(StateError, match="no answer within"):
        await pods.read()
    for _ in range(3):
        with pytest.raises(StateError, match="not ended"):
            await pods.read()
    assert len(looked_up) == 1
    (thread,) = readers()
    assert thread.daemon
    found.set()
    thread.join(10)
    for _ in range(100):
        await asyncio.sleep(0.1)  # the loop hears of it
        with contextlib.suppress(StateError):  # a loaded machine takes longer than the deadline
            assert await pods.read() == {"u1": PodSpec()}
            return
    pytest.fail("no answer after the lookup has ended")


async def test_headers_that_drip(kubelet: Kubelet) -> None:
    """A connection on which each byte comes in time is cut when all of them take too long."""
    pods = PodList(kubelet.url("/drip"), deadline_s=0.3)
    began = time.monotonic()
    with pytest.raises(StateError, match="no answer within"):
        await pods.read()
    assert time.monotonic() - began < 3
    for thread in readers():
        thread.join(3)
    assert readers() == []


def readers() -> list[threading.Thread]:
    """Return the threads that ask."""
    return [one for one in threading.enumerate() if one.name == PodList.thread]


async def test_a_list_without_end(kubelet: Kubelet) -> None:
    """An answer that is too long is not read to its end."""
    with pytest.raises(StateError, match="longer than"):
        await PodList(kubelet.url("/long")).read()


async def test_nobody_there(kubelet: Kubelet, tmp_path: Path) -> None:
    """No server, another protocol, an absent token: each has its own error."""
    with pytest.raises(StateError, match="refused"):
        await PodList("http://localhost:1/pods").read()
    with pytest.raises(StateError, match="TLS"):
        await PodList(kubelet.url(scheme="https")).read()
    with pytest.raises(StateError, match="No such file"):
        await PodList(kubelet.url(), str(tmp_path / "none")).read()


@pytest.mark.parametrize(
    "url",
    ["http://a..b/pods", f"http://{'x' * 64}.example/pods", "http://localhost:x/pods", "http://[/"],
)
async def test_what_is_no_address(url: str) -> None:
    """An invalid host or port is a StateError too."""
    with pytest.raises(StateError, match="not a valid URL"):
        await PodList(url).read()


NEEDS_OPENSSL = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl makes the certificate"
)


def serve_tls(kubelet: Kubelet, made: Path, key: Path, clients: Path | None = None) -> None:
    """Let the server speak TLS; with `clients` only to those with a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients)
    kubelet.socket = context.wrap_socket(kubelet.socket, server_side=True)


@NEEDS_OPENSSL
async def test_https(kubelet: Kubelet, token: str, tmp_path: Path) -> None:
    """The kubelet's certificate is checked: against the authority that is named, or not at all."""
    made, key = certificate(tmp_path, "DNS:localhost")
    serve_tls(kubelet, made, key)
    url = kubelet.url(scheme="https")
    assert await PodList(url, token, str(made)).read() == {"u1": PodSpec()}
    with pytest.raises(StateError, match=r"not accepted: self.signed certificate.*alloc.pods_ca"):
        await PodList(url, token).read()
    with pytest.raises(StateError, match="does not hold a certificate"):
        await PodList(url, token, token).read()
    with pytest.raises(StateError, match=r"/none: No such file"):
        await PodList(url, token, str(tmp_path / "none")).read()


@NEEDS_OPENSSL
async def test_a_certificate_with_the_nodes_name_only(
    kubelet: Kubelet, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kubelet's own: by address it needs the name, which the environment may give."""
    made, key = certificate(tmp_path, "DNS:node-7")
    serve_tls(kubelet, made, key)
    url = kubelet.url(scheme="https").replace("localhost", "127.0.0.1")

    def named(name: str) -> PodList:
        return PodList(url, token, str(made), name=name)

    assert await named("node-7").read() == {"u1": PodSpec()}
    with pytest.raises(StateError, match=r"mismatch.*127.0.0.1.*set alloc.pods_name"):
        await named("").read()
    with pytest.raises(StateError, match=r"ostname mismatch.*node-8.*set alloc.pods_name"):
        await named("node-8").read()
    monkeypatch.setenv("NODE_NAME", "node-7")
    assert await named("$NODE_NAME").read() == {"u1": PodSpec()}
    monkeypatch.delenv("NODE_NAME")
    with pytest.raises(StateError, match="NODE_NAME is not set"):
        await named("$NODE_NAME").read()


@NEEDS_OPENSSL
async def test_a_client_certificate(kubelet: Kubelet, tmp_path: Path) -> None:
    """It is shown to a kubelet that wants one, and read again after it was replaced."""
    made, key = certificate(tmp_path, "DNS:localhost")
    client, client_key = certificate(tmp_path, "DNS:kata-pin")
    serve_tls(kubelet, made, key, client)
    both = tmp_path / "client.pem"
    pods = PodList(kubelet.url("/open", scheme="https"), ca=str(made), certificate=str(both))
    with pytest.raises(StateError, match=r"client.pem: No such file"):
        await pods.read()
    both.write_text(client.read_text())
    with pytest.raises(StateError, match=r"client.pem: not a certificate with its key"):
        await pods.read()
    both.write_text(client.read_text() + client_key.read_text())
    assert await pods.read() == {"u1": PodSpec()}
    without = PodList(kubelet.url("/open", scheme="https"), ca=str(made))
    with pytest.raises(StateError, match=r"TLS|reset|HTTP"):
        await without.read()


async def test_a_projected_token(kubelet: Kubelet, tmp_path: Path) -> None:
    """The kubelet's symlinks are followed, also when it renews the token by replacing them."""
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o1777)

    def project(name: str, text: str) -> None:
        (volume / name).mkdir()
        (volume / name / "token").write_text(text)
        (volume / "..new").symlink_to(name)
        (volume / "..new").rename(volume / "..data")

    project("..2026_11_22_a", "expired")
    (volume / "token").symlink_to("..data/token")
    pods = PodList(kubelet.url(), str(volume / "token"))
    with pytest.raises(StateError, match=r"HTTP 401 \(its token .* has expired"):
        await pods.read()
    project("..2026_11_22_b", TOKEN)
    assert await pods.read() == {"u1": PodSpec()}


async def test_a_credential_that_may_not(kubelet: Kubelet) -> None:
    """The missing right is named, as newer and older kubelets call it."""
    with pytest.raises(StateError, match=r"HTTP 403 .*nodes/pods.*nodes/proxy"):
        await PodList(kubelet.url("/forbidden")).read()


def test_the_deadline_is_shorter_than_the_period() -> None:
    """By default a request ends before the next one starts."""
    assert DEADLINE_S < 10


async def test_a_request_that_ends_while_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may close the connection at any moment: that must not end the daemon."""
    seen = iter([http.client.HTTPConnection("localhost"), None])
    closing = property(lambda _: next(seen, None), lambda *_: None)
    monkeypatch.setattr(HttpClient, "_connected", closing)
    with pytest.raises(StateError):
        await PodList("nowhere://").read()
