"""The CDI specs of DRA claims for CPUs; the bytes: wire/kube/cdi.py."""

from __future__ import annotations

from typing import Final

from kata_pin.calls import DIRECT, Calls
from kata_pin.errors import ParseError, StateError, reason_of
from kata_pin.model.cpuset import CpuSet
from kata_pin.owned_file import FileRefused, read_owned
from kata_pin.wire.kube.cdi import MAX_BYTES, parse_claims

MAX_SPECS: Final = 4096
"""Most files that are read; other drivers' specs are in the same folder."""


def read_claims(folder: str, calls: Calls = DIRECT) -> tuple[dict[str, CpuSet], str]:
    """Return the CPUs of all DRA claims by the claim's uid, and what could not be read.

    A spec that disappears meanwhile has ended. Nothing without such a folder; StateError if it
    cannot be listed.
    """
    claims: dict[str, CpuSet] = {}
    problem = ""
    try:
        names = sorted(name for name in calls.listdir(folder) if name.endswith(".json"))
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        raise StateError(f"{folder}: {reason_of(error)}") from error
    for name in names[:MAX_SPECS]:
        try:
            claims |= parse_claims(read_owned(f"{folder}/{name}", MAX_BYTES, calls=calls))
        except FileNotFoundError:
            continue
        except (ParseError, FileRefused) as error:
            problem = f"{folder}/{name}: {error}"
        except OSError as error:
            problem = f"{folder}/{name}: {reason_of(error)}"
    if len(names) > MAX_SPECS:
        problem = f"{folder}: more than {MAX_SPECS} specs"
    return claims, problem
