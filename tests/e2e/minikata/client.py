#!/usr/bin/python3 -IS
"""minikata, the command: what containerd's runc shim, or a test, calls. A thin client.

    minikata [--root R] [--config FILE] create --bundle B [--pid-file F] ID
    minikata [--root R] start|state|ps|events ID
    minikata [--root R] kill ID SIGNAL | delete [--force] ID
    minikata [--root R] update [--resources FILE|-] [--cpuset-cpus L] [--cpu-quota N] ... ID
    minikata [--root R] purge
    minikata features | --version

It starts one service for each sandbox (service.py, which stands for Kata's shim) and passes every
command on to it over R/ID/s; a container of the pod has R/ID as a link to its sandbox. It lives for
one command. Every command costs an interpreter start, which is slow in a lab machine: so only what
is built into the interpreter is imported, and nothing is parsed that the service can parse.
Out of scope: everything that Kata does (service.py and its neighbours).
"""

import posix
import sys
from _socket import (
    AF_UNIX,
    SCM_RIGHTS,
    SHUT_WR,
    SOCK_CLOEXEC,
    SOCK_STREAM,
    SOL_SOCKET,
    socket,
)

FLAGS = {
    *("--debug", "--systemd-cgroup", "--version", "--stats", "--force", "-f", "--all", "-a"),
    *("--no-pivot", "--no-new-keyring", "--rootless"),
}
"""Options without a value; all others have one, behind `=` or as the next word."""

FEATURES = (  # containerd 2.0, 2.1 and early 2.2 and 2.3 panic without `linux` (supportsCRIUserns)
    '{"ociVersionMin":"1.0.0","ociVersionMax":"1.2.0",'
    '"hooks":["prestart","createRuntime","createContainer","poststart","poststop"],'
    '"linux":{"namespaces":["cgroup","ipc","mount","network","pid","uts"]}}'
)
VERSION = "runc version 1.1.5-minikata\nspec: 1.0.2-dev"  # go-runc reads runc's own form
SHIM = "/usr/bin/containerd-shim-kata-v2"
SIGKILL = 9


class Failure(Exception):  # noqa: N818 - it is not always this program's error
    """Why a command failed: one line for stderr and for containerd's log file."""


class Gone(Failure):
    """The sandbox's service is dead, as Kata's shim after a panic."""


class Call:
    """The command line, taken apart by hand: argparse would cost more than all the rest."""

    def __init__(self, arguments: list[str]) -> None:
        self.options: dict[str, str] = {}
        self.words: list[str] = []
        rest = iter(arguments)
        for word in rest:
            if not word.startswith("-") or word == "-":
                self.words.append(word)
                continue
            name, equals, value = word.partition("=")
            if not equals and name not in FLAGS:
                value = next(rest, "")
            self.options[name.lstrip("-")] = value

    def has(self, *names: str) -> bool:
        """Whether one of the options was given."""
        return any(name in self.options for name in names)

    @property
    def root(self) -> str:
        """Where the state of this runtime is kept."""
        return self.options.get("root", "/run/minikata")

    @property
    def id(self) -> str:
        """The container that the command is about."""
        if len(self.words) < 2 or "/" in self.words[1]:
            raise Failure("no container id given")
        return self.words[1]


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    call = Call(arguments)
    try:
        output = VERSION if call.has("version") else _run(call)
    except Failure as failure:
        _complain(call, str(failure))
        return 1
    except OSError as error:
        _complain(call, f"{error.strerror or error}: {error.filename or call.words[1:]}")
        return 1
    if output:
        posix.write(1, output.encode() + b"\n")
    return 0


def _run(call: Call) -> str:
    verb = call.words[0] if call.words else ""
    if verb == "features":
        return FEATURES
    if verb == "purge":
        program = _beside("purge.py")
        posix.execve(sys.executable, [sys.executable, "-IS", program, call.root], posix.environ)
    if verb == "create":
        return _create(call)
    if verb == "delete":
        return _delete(call)
    if verb == "kill":
        return _kill(call)
    if verb == "update":
        return _ask(call, "update", _resources(call), *_update_options(call))
    if verb in {"start", "state", "ps", "events"}:
        return _ask(call, verb)
    raise Failure(f"minikata has no command {verb!r}")


# ---- create ----------------------------------------------------------------------------------


def _create(call: Call) -> str:
    if call.has("console-socket"):
        raise Failure("minikata has no terminals")
    bundle = call.options.get("bundle", call.options.get("b", "."))
    if not bundle.startswith("/"):
        bundle = f"{posix.getcwd()}/{bundle}".removesuffix("/.")
    sandbox = _sandbox_of(_read(f"{bundle}/config.json"), call.id)
    home = f"{call.root}/{call.id}"
    if _exists(home):
        raise Failure("container with given ID already exists")
    if sandbox == call.id:
        _start_service(call, home, bundle)
    elif _exists(f"{call.root}/{sandbox}"):
        posix.symlink(sandbox, home)
    else:
        raise Failure(f"sandbox {sandbox} does not exist")
    placeholder, lifeline = _start_placeholder()
    try:
        _ask(call, "create", bundle, str(placeholder), lifeline=lifeline)
        if call.has("pid-file"):
            _write_pid(call.options["pid-file"], placeholder)
    except BaseException:
        posix.kill(placeholder, SIGKILL)
        posix.waitpid(placeholder, 0)
        _remove(home)
        raise
    return ""


def _sandbox_of(config: bytes, container: str) -> str:
    """Return the sandbox that a container belongs to, from the annotations of its config.json.

    Looked up as Kata does: containerd's names, then CRI-O's; none is a pod of its own. The values
    contain no escapes, so the JSON need not be parsed for them.
    """
    for kind, sandbox in (
        (b"io.kubernetes.cri.container-type", b"io.kubernetes.cri.sandbox-id"),
        (b"io.kubernetes.cri-o.ContainerType", b"io.kubernetes.cri-o.SandboxID"),
    ):
        if _annotation(config, kind) == "container":
            return _annotation(config, sandbox)
    return container


def _annotation(config: bytes, name: bytes) -> str:
    _, found, rest = config.partition(b'"%s"' % name)
    if not found:
        return ""
    return rest.partition(b'"')[2].partition(b'"')[0].decode()


def _start_service(call: Call, home: str, bundle: str) -> None:
    """Start the sandbox's service on a socket that listens already; it outlives this command."""
    executable, argv = interpreter(), _service_argv(call, home)
    made = ""
    for part in call.root.strip("/").split("/"):
        made += f"/{part}"
        _make_folder(made, 0o711)
    posix.mkdir(home, 0o700)
    _make_folder(f"{call.root}/.log", 0o700)
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
    listener.bind(f"{home}/s")
    listener.listen(64)
    child = posix.fork()
    if child:
        posix.waitpid(child, 0)
        listener.close()
        return
    try:
        posix.setsid()
        if posix.fork():
            posix._exit(0)
        posix.chdir(bundle)  # as containerd starts Kata's shim; runtime-rs has qmp.sock there
        posix.dup2(posix.open("/dev/null", posix.O_RDONLY), 0)
        log = posix.open(_log_of(call), posix.O_WRONLY | posix.O_CREAT | posix.O_APPEND, 0o600)
        posix.dup2(log, 1)
        posix.dup2(log, 2)
        posix.dup2(listener.fileno(), 3)
        posix.set_inheritable(3, True)  # dup2 to itself would leave it close-on-exec
        posix.closerange(4, 256)
        become(executable, argv)
    finally:
        posix._exit(127)


def become(executable: str, argv: list[str]) -> None:
    """Become the service; nursery.py replaces this by one that needs no interpreter."""
    posix.execve(executable, argv, posix.environ)


def _log_of(call: Call) -> str:
    """Return the path of the service's log; it stays when the sandbox goes, until purge."""
    sandbox = call.id
    try:  # noqa: SIM105 - contextlib would have to be imported
        sandbox = posix.readlink(f"{call.root}/{call.id}")
    except OSError:  # the sandbox itself
        pass
    return f"{call.root}/.log/{sandbox}"


def _service_argv(call: Call, home: str) -> list[str]:
    """Return a command line in the shape of Kata's shim (its `-id` is what matters)."""
    namespace = call.root.rpartition("/")[2]
    return [
        *(SHIM, "-IS", _beside("service.py"), "-namespace", namespace),
        *("-address", "/run/containerd/containerd.sock", "-publish-binary", "", "-id", call.id),
        *(f"--home={home}", f"--config={call.options.get('config', '')}"),
    ]


def interpreter() -> str:
    """Return a copy of this interpreter under the name of Kata's shim, made when missing.

    Kata's shim is known by /proc/PID/exe, among other things. The copy is not below the root: /run
    may be mounted noexec.
    """
    folder = _beside("../../../.cache/minikata")
    target = f"{folder}/{sys.version.partition(' ')[0]}/containerd-shim-kata-v2"
    if _exists(target):
        return target
    made = folder.removesuffix("/.cache/minikata")
    for part in (".cache", "minikata", sys.version.partition(" ")[0]):
        made += f"/{part}"
        _make_folder(made, 0o755)
    temporary = f"{target}.{posix.getpid()}"
    source = posix.open("/proc/self/exe", posix.O_RDONLY)
    copy = posix.open(temporary, posix.O_WRONLY | posix.O_CREAT, 0o755)
    while posix.sendfile(copy, source, None, 1 << 24):
        pass
    posix.close(copy)
    posix.close(source)
    posix.rename(temporary, target)
    return target


def _start_placeholder() -> tuple[int, int]:
    """Start the process that stands for the container's on the host; return its pid and lifeline.

    It keeps our stdout and stderr. Its stdin is a pipe whose other end, the lifeline, the service
    gets: when that dies all containers of the pod end, as containerd has it with a dead shim.
    """
    ours, lifeline = posix.pipe()
    child = posix.fork()
    if child:
        posix.close(ours)
        return child, lifeline
    try:
        posix.setsid()
        posix.dup2(ours, 0)
        posix.execve("/usr/bin/cat", ["cat"], {})
    finally:
        posix._exit(127)


def _write_pid(path: str, pid: int) -> None:
    temporary = f"{path}.tmp"
    file = posix.open(temporary, posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC, 0o644)
    posix.write(file, str(pid).encode())
    posix.close(file)
    posix.rename(temporary, path)


# ---- the other commands ----------------------------------------------------------------------


def _delete(call: Call) -> str:
    """Delete. With its service dead a container is gone already; QEMU stays, as with Kata."""
    force = call.has("force", "f")
    if _exists(f"{call.root}/{call.id}") or not force:
        try:  # noqa: SIM105 - contextlib would have to be imported
            _ask(call, "delete", "force" if force else "")
        except Gone:
            pass
    _remove(f"{call.root}/{call.id}")
    return ""


def _kill(call: Call) -> str:
    try:
        return _ask(call, "kill", call.words[2] if len(call.words) > 2 else "SIGTERM")
    except Gone:
        raise Failure("container not running") from None


def _resources(call: Call) -> str:
    """Return the JSON of LinuxResources that an update has, empty for none."""
    source = call.options.get("resources", call.options.get("r", ""))
    if not source:
        return ""
    return (_drain(0) if source == "-" else _read(source)).decode()


def _update_options(call: Call) -> list[str]:
    names = ("cpuset-cpus", "cpuset-mems", "cpu-quota", "cpu-period", "cpu-share")
    return [f"{name}={call.options[name]}" for name in names if name in call.options]


def _ask(call: Call, verb: str, *arguments: str, lifeline: int = -1) -> str:
    """Pass a command on: fields with NUL between them; the answer is `0` or `1`, then text.

    `lifeline` goes along as a descriptor and is closed here. Raises Gone without a service.
    No deadline: Kata itself waits for ever for a hook without one, and its caller for Kata.
    """
    path = f"{call.root}/{call.id}/s"
    if not _exists(path):
        raise Failure(f"container {call.id} does not exist")
    connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise Gone("ttrpc: closed") from error
    try:
        if lifeline >= 0:
            rights = (SOL_SOCKET, SCM_RIGHTS, lifeline.to_bytes(4, sys.byteorder))
            connection.sendmsg([b"\0"], [rights])
            posix.close(lifeline)
        connection.sendall("\0".join((verb, call.id, *arguments)).encode())
        connection.shutdown(SHUT_WR)
        answer = _drain(connection.fileno()).decode()
    except OSError:
        answer = ""
    finally:
        connection.close()
    if not answer:
        log = _read(_log_of(call))[-400:].decode() if _exists(_log_of(call)) else ""
        raise Failure(f"ttrpc: closed {log}".strip())
    if answer[0] != "0":
        raise Failure(answer[1:])
    return answer[1:]


def _complain(call: Call, text: str) -> None:
    if "log" in call.options:
        quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        line = f'{{"level":"error","msg":"{quoted}","time":"2026-01-01T00:00:00Z"}}\n'
        log = posix.open(
            call.options["log"], posix.O_WRONLY | posix.O_CREAT | posix.O_APPEND, 0o644
        )
        posix.write(log, line.encode())
        posix.close(log)
    posix.write(2, text.encode() + b"\n")  # last: containerd's stderr may be one that is only read


def _remove(home: str) -> None:
    """Remove a container's entry: the link, or the sandbox's folder if the service left it."""
    try:
        posix.unlink(home)
    except IsADirectoryError:
        for name in posix.listdir(home):
            posix.unlink(f"{home}/{name}")
        posix.rmdir(home)
    except FileNotFoundError:
        pass


def _beside(name: str) -> str:
    """Return a path relative to this file, wherever links to it are."""
    path = __file__
    while True:
        try:
            target = posix.readlink(path)
        except OSError:
            folder = path.rpartition("/")[0] or "."
            return f"{folder if folder.startswith('/') else posix.getcwd() + '/' + folder}/{name}"
        path = target if target.startswith("/") else f"{path.rpartition('/')[0]}/{target}"


def _make_folder(path: str, mode: int) -> None:
    """Make a folder; another command may do so at the same time."""
    try:  # noqa: SIM105 - contextlib would have to be imported
        posix.mkdir(path, mode)
    except FileExistsError:
        pass


def _exists(path: str) -> bool:
    try:
        posix.lstat(path)
    except OSError:
        return False
    return True


def _read(path: str) -> bytes:
    file = posix.open(path, posix.O_RDONLY)
    try:
        return _drain(file)
    finally:
        posix.close(file)


def _drain(file: int) -> bytes:
    parts = []
    while part := posix.read(file, 65536):
        parts.append(part)
    return b"".join(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
