"""Stepped functions without their pauses."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from kata_pin.base.steps import Steps, finish
from kata_pin.placement import place as placing
from kata_pin.vmm import roles

P = ParamSpec("P")
T = TypeVar("T")


def _at_once(work: Callable[P, Steps[T]]) -> Callable[P, T]:
    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return finish(work(*args, **kwargs))

    return run


identify = _at_once(roles.identify)
place = _at_once(placing.place)
read_waiting = _at_once(roles.read_waiting)
