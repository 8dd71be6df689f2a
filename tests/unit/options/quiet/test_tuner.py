"""What is written to the kernel's files, and what is read back from them."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kata_pin.options.quiet.tuner import Tunables, Tuner, Written
from kata_pin.options.quiet.values import Exactly, Observed, TunableKey, TunableRecord
from kata_pin.records.database import Database
from kata_pin.rights.broker.tunables import TunableKind

KEY = TunableKey(TunableKind.GOVERNOR, "0")


class Governor:
    """A file of the kernel's; `refusal` is the errno of writes, `stuck` takes them in vain."""

    def __init__(self, database: Database) -> None:
        self.value = "powersave"
        self.refusal = 0
        self.stuck = False
        self.tuner = Tuner(Tunables(database), {KEY.kind: self._write})

    async def _write(self, writes: Sequence[TunableRecord]) -> Sequence[Written]:
        for one in writes:
            if not self.refusal and not self.stuck:
                self.value = one.written
        return [Written(self.refusal, self.value) for _ in writes]

    def now(self) -> list[Observed]:
        return [Observed(KEY, "policy0", self.value)]


@pytest.fixture
def governor(tmp_path: Path) -> Iterator[Governor]:
    with closing(Database(str(tmp_path / "registry.db"), boot_id="b")) as database:
        yield Governor(database)


async def test_what_the_kernel_did_not_take_back_is_restored_again(governor: Governor) -> None:
    """A write that succeeds proves nothing: the record stays until the first value is read back."""
    await governor.tuner.apply(governor.now(), {KEY: Exactly("performance")})
    assert governor.value == "performance"
    governor.stuck = True
    await governor.tuner.apply(governor.now(), {})
    assert KEY in governor.tuner.records
    governor.stuck = False
    await governor.tuner.apply(governor.now(), {})
    assert (governor.value, dict(governor.tuner.records)) == ("powersave", {})


async def test_a_write_that_failed_leaves_nothing_to_restore(governor: Governor) -> None:
    """What kata-pin never wrote is not its own, whatever somebody else writes there later."""
    governor.refusal = errno.EINVAL
    outcome = await governor.tuner.apply(governor.now(), {KEY: Exactly("performance")})
    assert list(outcome.problems) == [str(KEY)]
    assert dict(governor.tuner.records) == {}


async def test_another_goal_for_what_is_as_before(governor: Governor) -> None:
    """The very same look at a file is decided again if its goal is another one."""
    await governor.tuner.apply(governor.now(), {KEY: Exactly("performance")})
    seen = governor.now()
    for _ in range(2):
        await governor.tuner.apply(seen, {KEY: Exactly("performance")})
    await governor.tuner.apply(seen, {KEY: Exactly("schedutil")})
    assert governor.value == "schedutil"
