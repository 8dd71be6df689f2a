"""Running OCI hooks as Kata's two runtimes run them, each with its own ways.

| | Go runtime | runtime-rs |
|---|---|---|
| env | the hook's; the shim's when it has none | the hook's; empty when it has none |
| timeout | none, unless given | 10 s, unless given |
| fails | the caller decides (HookError) | logged, the next one runs |
| twice the same | runs twice | runs once |

Both: cwd is the sandbox's bundle, stdin a pipe with the state, and stdout and stderr are read to
their end, so a hook that leaves a process with its stdout open looks hung.
Facts: Kata's katautils/hook.go, kata-sys-util/src/hooks.rs, and recordings of 3.21.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

CLONE_NEWNET: Final = 0x40000000
RS_TIMEOUT_S: Final = 10

Hook = Mapping[str, Any]


class HookError(Exception):
    """A hook that failed or took too long."""


def run_go(hooks: Iterable[Hook], state: Mapping[str, Any], netns: str) -> None:
    """Run hooks one after the other in a network namespace; the first failure ends it."""
    with network_namespace(netns):
        for hook in hooks:
            _run(hook, state, hook.get("env"), hook.get("timeout"))


def run_rs(hooks: Iterable[Hook], state: Mapping[str, Any], netns: str) -> None:
    """Run hooks one after the other; failures are logged only."""
    seen = []
    with network_namespace(netns):
        for hook in hooks:
            if hook in seen:
                continue
            seen.append(hook)
            try:
                _run(hook, state, hook.get("env") or [], hook.get("timeout") or RS_TIMEOUT_S)
            except HookError as error:
                print(error, file=sys.stderr, flush=True)


def _run(
    hook: Hook, state: Mapping[str, Any], env: list[str] | None, timeout: float | None
) -> None:
    path = hook["path"]
    pipe = subprocess.PIPE
    variables = None if env is None else dict(entry.split("=", 1) for entry in env if "=" in entry)
    try:
        process = subprocess.Popen(
            hook.get("args") or [path],
            executable=path,
            env=variables,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        )
    except OSError as error:
        raise HookError(f"hook {path}: {error.strerror}") from error
    try:
        out, err = process.communicate(json.dumps(state, separators=(",", ":")).encode(), timeout)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.wait()
        raise HookError(f"hook {path}: hook timeout") from error
    if process.returncode:
        said = f"stdout: {out.decode(errors='replace')}, stderr: {err.decode(errors='replace')}"
        raise HookError(f"hook {path}: exit status {process.returncode}: {said}")


@contextlib.contextmanager
def network_namespace(path: str) -> Iterator[None]:
    """Have this thread in another network namespace; an empty path changes nothing."""
    if not path:
        yield
        return
    with contextlib.ExitStack() as stack:
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, before)
        target = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, target)
        _enter(target)
        stack.callback(_enter, before)
        yield


def _enter(namespace: int) -> None:
    if sys.version_info >= (3, 12):
        os.setns(namespace, CLONE_NEWNET)
        return
    import ctypes  # only where Python cannot: it costs ten milliseconds

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
