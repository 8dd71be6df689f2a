"""A daemon that was taken over gains nothing from its broker but what docs/broker.md names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.chaos.hostile_daemon import (
    SECRET,
    HostileDaemon,
    Spoils,
    Trace,
    attack_at_random,
    attack_by_name,
    attack_children,
    hunted,
    outside_the_table,
)

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0, reason="a broker without rights refuses for another reason"
    ),
]


def test_every_row_with_wrong_arguments_and_the_attacks_by_name() -> None:
    """The runtime's socket and shims', a rootfs's, podman's, a password in a rootfs, QMP, NRI."""
    with hunted() as (_, broker, spoils):
        daemon = HostileDaemon(broker, spoils)
        attack_by_name(daemon)
        attack_children(daemon, spoils)
        assert broker.process.poll() is None
        for name in ("nri", "cri", "pods"):
            assert daemon.ask(name, {}) is None, "switched off"
    assert spoils.found == []
    assert spoils.granted > 100, "good requests are among them"


def test_mutated_requests() -> None:
    """`scripts/chaos hostile --full` sends a million."""
    with hunted() as (_, broker, spoils):
        attack_at_random(HostileDaemon(broker, spoils), 20_000, seed=1)
        assert broker.process.poll() is None
    assert spoils.found == []
    assert spoils.asked == 20_000


def test_a_prey_that_is_caught_is_noticed() -> None:
    """The hunt itself: with a root that holds a secret where a bundle's file is, it is found."""
    with hunted() as (prey, broker, spoils):
        bundle = prey.run / "io.containerd.runtime.v2.task" / "k8s.io" / "c1" / "config.json"
        bundle.write_bytes(SECRET)
        attack_by_name(HostileDaemon(broker, spoils))
    assert spoils.secrets


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace (scripts/setup installs it)")
def test_no_path_outside_the_table_is_opened() -> None:
    """As the kernel sees it, whatever is asked; with children."""
    with hunted() as (prey, broker, spoils):
        settings = prey.of_broker()
        with Trace(broker) as trace:
            daemon = HostileDaemon(broker, spoils)
            attack_by_name(daemon)
            attack_children(daemon, spoils)
            attack_at_random(daemon, 3000, seed=2)
        opened = trace.opened()
    assert any(path.endswith("p1/persist.json") for path in opened), "the trace sees what is opened"
    assert outside_the_table(opened, settings) == []
    assert outside_the_table({str(prey.home / "etc" / "shadow")}, settings) != []
    assert Spoils().found == spoils.found
    assert not any(Path(path).is_relative_to(prey.home / "etc") for path in opened)
