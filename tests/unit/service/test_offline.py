"""Commands without a daemon: looking leaves everything as it was, acting is remembered."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config
from kata_pin.base.counters import Scheduling
from kata_pin.base.errors import DaemonError
from kata_pin.base.threads import ThreadKey
from kata_pin.options.caches import CacheGroupTable
from kata_pin.options.quiet.tuner import Tunables
from kata_pin.options.quiet.values import TunableKey, TunableRecord
from kata_pin.options.realtime import RtThreads
from kata_pin.records.containers import Registry
from kata_pin.records.pins import Pins
from kata_pin.rights.broker.tunables import TunableKind
from kata_pin.service import offline
from kata_pin.service.runtime_dir import boot_id, locked

SANDBOX = "oneshot-test-pod"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A node of its own with one spooled message about a container whose VMM is not there."""
    bundle = tmp_path / "bundles" / "c1"
    bundle.mkdir(parents=True)
    annotations = {
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.sandbox-id": SANDBOX,
    }
    linux = {"resources": {"cpu": {"cpus": "0"}}}
    (bundle / "config.json").write_text(json.dumps({"annotations": annotations, "linux": linux}))
    state = {"ociVersion": "", "id": "c1", "status": "", "pid": 0, "bundle": str(bundle)}
    body = json.dumps(state).encode()
    spool = tmp_path / "kp" / "spool"
    spool.mkdir(parents=True)
    (spool / "5-6.msg").write_bytes(b"KP1 createRuntime 5 6 %d\n" % len(body) + body)
    (spool / "7-8.msg").write_bytes(b"garbage")
    paths = replace(
        Config().paths,
        vc=str(tmp_path / "vc"),
        kata=str(tmp_path / "kata"),
        bundle_roots=(str(tmp_path / "bundles"),),
        kubelet_state=str(tmp_path / "absent"),
        kata_configs=(),
    )
    return replace(Config(), runtime_dir=str(tmp_path / "kp"), paths=paths)


def _files(config: Config) -> list[str]:
    return sorted(p.name for p in (Path(config.runtime_dir) / "spool").iterdir())


def test_looking_takes_the_spool_in_and_leaves_it(config: Config) -> None:
    """The document knows the spooled container; the message stays for the daemon."""
    document = offline.state(config)
    assert document.daemon.running is False
    (shown,) = [one for one in document.sandboxes if one.id == SANDBOX]
    assert (shown.state, shown.containers[0].cpus) == ("no-vmm", "0")
    assert _files(config) == ["5-6.msg", "7-8.msg"]
    assert not (Path(config.runtime_dir) / "registry.db").exists()


def test_explaining_names_what_is_unknown(config: Config) -> None:
    """A sandbox that is known is explained, another is refused with a hint."""
    assert offline.explain(config, SANDBOX).lines
    with pytest.raises(DaemonError, match="no sandbox 'nobody'"):
        offline.explain(config, "nobody")


def test_unpin_is_remembered_and_pin_ends_it(config: Config) -> None:
    """What an operator released without a daemon is still released for the next look."""
    offline.unpin(config, SANDBOX)
    (shown,) = [one for one in offline.state(config).sandboxes if one.id == SANDBOX]
    assert shown.state == "released"
    offline.pin(config, SANDBOX)
    (shown,) = [one for one in offline.state(config).sandboxes if one.id == SANDBOX]
    assert shown.state == "no-vmm"
    with pytest.raises(DaemonError, match="no sandbox"):
        offline.pin(config, "nobody")


def test_work_without_a_daemon_is_in_the_history(config: Config) -> None:
    """With what it was; looking is not."""
    offline.state(config)
    offline.unpin(config, SANDBOX)
    offline.pin(config, SANDBOX)
    changes = offline.history(config, SANDBOX, since_s=None, limit=10).changes
    causes = {cause for change in changes for cause in change.triggers}
    assert causes == {"unpin, without a daemon", "pin, without a daemon"}


def test_nobody_sees_new_threads_after_work_without_a_daemon(config: Config) -> None:
    """What the daemon before it could, the next look must not count on."""
    path = os.path.join(config.runtime_dir, "registry.db")
    with closing(Registry(path, boot_id=boot_id())) as registry:
        Pins(registry).set_live_threads(live=True)
    offline.pin(config, None)
    with closing(Registry(path, boot_id=boot_id())) as registry:
        assert not Pins(registry).live_threads()


def test_cpus_of_a_vm_that_nothing_is_recorded_of_are_not_known(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have exclusive ones: a pin without a daemon is told so."""
    with offline._reading(config) as parts:
        assert "other" not in offline._others(parts, SANDBOX).unknown
        monkeypatch.setattr(offline, "_known", lambda _: [SANDBOX, "other"])
        assert "nothing is recorded of sandbox other" in offline._others(parts, SANDBOX).unknown


def test_what_options_changed_is_restored_although_they_are_off(config: Config) -> None:
    """A group of resctrl and the class of a thread, both of a sandbox that is gone by now, and a
    value of the node: an interrupt's, which is gone too."""
    interrupt = TunableRecord(TunableKey(TunableKind.INTERRUPT, "99999"), "eth0", "0-1", "0")
    path = os.path.join(config.runtime_dir, "registry.db")
    with closing(Registry(path, boot_id=boot_id())) as registry:
        CacheGroupTable(registry).keep("gone", "")
        RtThreads(registry).keep("gone", ThreadKey(1, 2, 3), Scheduling(0, 0, 3))
        Tunables(registry).keep([interrupt])
    offline.unpin(config, SANDBOX)
    with closing(Registry(path, boot_id=boot_id())) as registry:
        assert CacheGroupTable(registry).all() == [("gone", "")]
        assert RtThreads(registry).sandboxes() == ["gone"]
        assert Tunables(registry).all() == {interrupt.key: interrupt}
    offline.release_all(config)
    with closing(Registry(path, boot_id=boot_id())) as registry:
        assert CacheGroupTable(registry).all() == []
        assert RtThreads(registry).sandboxes() == []
        assert Tunables(registry).all() == {}


def test_a_serving_daemon_keeps_writers_out(config: Config) -> None:
    """While the directory is locked, acting is refused and looking is not."""
    with locked(config.runtime_dir):
        with pytest.raises(DaemonError, match="another kata-pin serves"):
            offline.pin(config, SANDBOX)
        assert offline.state(config).sandboxes


def test_looking_where_nothing_ever_ran(config: Config, tmp_path: Path) -> None:
    """Without a runtime directory there is nothing to show, and none is made."""
    elsewhere = replace(config, runtime_dir=str(tmp_path / "absent"))
    assert SANDBOX not in [one.id for one in offline.state(elsewhere).sandboxes]
    assert not (tmp_path / "absent").exists()
