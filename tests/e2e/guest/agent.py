#!/usr/bin/python3 -IS
"""The test guest's agent: Kata's agent protocol on vsock port 1024, with real cpusets behind it.

It is what `init` starts, over and over. Containers are cgroups below /sys/fs/cgroup/kata, so they
outlive it: after a restart it finds them again. Only modules that are built into the interpreter
are imported: nothing else of Python is in the ramdisk.

Port 1025 answers a tester's questions, one for each connection:

    cpus, cpuinfo, kernel    what the guest's kernel says
    processes                a line for each process of a container:
                             container, pid, Cpus_allowed_list, last CPU, CPU time in ticks
    mode M                   honest; lie: success, and nothing done; refuse: as genpolicy's default
                             policy; hang: no answer until the mode is another
    widen C                  a container gets every CPU, as if somebody else had done it
    run C COMMAND            a shell runs a command in a container; the answer is its output
    agent                    its pid
    restart                  the agent ends; init starts it again
"""

import posix
import time
from _socket import SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket
from _thread import start_new_thread

AF_VSOCK = 40
ANY = 0xFFFFFFFF  # VMADDR_CID_ANY
PORT, ASK_PORT = 1024, 1025
CGROUPS = "/sys/fs/cgroup/kata"
ONLINE = "/sys/devices/system/cpu/online"

OK, INVALID_ARGUMENT, PERMISSION_DENIED, UNIMPLEMENTED, INTERNAL = 0, 3, 7, 12, 13
REQUEST, RESPONSE = 1, 2
REFUSED = ("UpdateContainer", "ExecProcess", "GetMetrics")
"""What genpolicy's default policy refuses, of the requests that are served here."""

KATAS_OWN = ("CreateContainer", "StartContainer", "RemoveContainer")
"""What only the shim asks for: every mode lets it pass, and its updates, which have no cpuset."""

ITEMS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


class Refusal(Exception):  # noqa: N818 - a status, not a fault
    """An answer that is not OK."""


class Agent:
    """The service; its state is what a restart forgets."""

    def __init__(self) -> None:
        self.mode = "honest"
        self.arguments: dict[str, list[str]] = {}  # of a container: what StartContainer runs
        self.running: dict[tuple[str, str], tuple[int, int]] = {}  # exec: pid, end of a pipe
        self.gauges: dict[tuple[int, str], int] = {}

    def call(self, method: str, payload: bytes) -> bytes:
        """Return the answer's payload; Refusal when there is none."""
        asked = Message(payload)
        update = method == "UpdateContainer" and not asked.inner(2).inner(3).text(6)
        shims = update or method in KATAS_OWN
        while self.mode == "hang" and not shims:
            time.sleep(0.1)
        if self.mode == "refuse" and method in REFUSED and not shims:
            raise Refusal(PERMISSION_DENIED, f'"{method}Request is blocked by policy: "')
        serve = getattr(self, method, None)
        if serve is None or not method[0].isupper():
            raise Refusal(UNIMPLEMENTED, f"method {method}")
        try:
            answer: bytes = serve(asked)
        except OSError as error:
            raise Refusal(INTERNAL, f'"{error}"') from error
        return answer

    # ---- containers ----------------------------------------------------------------------

    def CreateContainer(self, asked: "Message") -> bytes:
        name = asked.text(1)
        process = asked.inner(6).inner(2)
        self.arguments[name] = process.texts(4) or ["sleep", "100000"]
        posix.mkdir(f"{CGROUPS}/{name}")
        return b""

    def StartContainer(self, asked: "Message") -> bytes:
        name = self.container(asked)
        self.running[name, ""] = (spawn(name, self.arguments[name]), -1)
        return b""

    def RemoveContainer(self, asked: "Message") -> bytes:
        name = self.container(asked)
        write(f"{CGROUPS}/{name}/cgroup.kill", "1")
        pid, _ = self.running.pop((name, ""), (0, -1))
        if pid:
            posix.waitpid(pid, 0)
        while read(f"{CGROUPS}/{name}/cgroup.procs"):
            time.sleep(0.01)
        posix.rmdir(f"{CGROUPS}/{name}")
        return b""

    def UpdateContainer(self, asked: "Message") -> bytes:
        name = self.container(asked)
        cpu = asked.inner(2).inner(3)
        if cpus := cpu.text(6):  # an empty one is ignored, as Kata's agent does
            try:
                if self.mode != "lie":
                    write(f"{CGROUPS}/{name}/cpuset.cpus", cpus)
            except OSError as error:  # only a warning in its log, as Kata's agent does
                print("write cpuset failed:", error)
        return b""

    def StatsContainer(self, asked: "Message") -> bytes:
        name = self.container(asked)
        stat = dict(line.split() for line in read(f"{CGROUPS}/{name}/cpu.stat").splitlines())
        usage = number(1, int(stat["usage_usec"]) * 1000)
        return text(1, text(1, text(1, usage)))

    def GetMetrics(self, asked: "Message") -> bytes:
        """Times by rank among the online CPUs; a rank that is gone keeps its last ones."""
        lines = [line.split() for line in read("/proc/stat").splitlines()]
        cpus = [line for line in lines if line[0].startswith("cpu") and line[0] != "cpu"]
        for rank, line in enumerate(cpus):
            for item, ticks in zip(ITEMS, line[1:], strict=False):
                self.gauges[rank, item] = int(ticks) * 10
        return text(1, "".join(
            f'kata_guest_cpu_time{{cpu="{rank}",item="{item}"}} {value}\n'
            for (rank, item), value in self.gauges.items()
        ))  # fmt: skip

    # ---- programs ------------------------------------------------------------------------

    def ExecProcess(self, asked: "Message") -> bytes:
        name = self.container(asked)
        process = asked.inner(4)
        arguments = process.texts(4)
        if not exists(f"/bin/{arguments[0]}"):
            raise Refusal(INTERNAL, f'"failed to exec {arguments[0]}: ENOENT"')
        end, start = posix.pipe()
        try:
            self.running[name, asked.text(2)] = (spawn(name, arguments, stdout=start), end)
        finally:
            posix.close(start)
        return b""

    def ReadStdout(self, asked: "Message") -> bytes:
        _, end = self.process(asked)
        return text(1, posix.read(end, asked.number(3)))

    def WaitProcess(self, asked: "Message") -> bytes:
        pid, end = self.process(asked)
        status = posix.waitstatus_to_exitcode(posix.waitpid(pid, 0)[1])
        del self.running[asked.text(1), asked.text(2)]
        posix.close(end)
        return number(1, status & 0xFF)

    def SignalProcess(self, asked: "Message") -> bytes:
        posix.kill(self.process(asked)[0], asked.number(3))
        return b""

    def process(self, asked: "Message") -> tuple[int, int]:
        found = self.running.get((asked.text(1), asked.text(2)))
        if found is None or not asked.text(2):
            raise Refusal(INVALID_ARGUMENT, '"process not found"')
        return found

    def container(self, asked: "Message") -> str:
        name = asked.text(1)
        if not name or "/" in name or not exists(f"{CGROUPS}/{name}"):
            raise Refusal(INVALID_ARGUMENT, '"invalid container id"')
        return name

    # ---- questions -----------------------------------------------------------------------

    def answer(self, question: str) -> str:
        """Answer a tester."""
        verb, _, rest = question.strip().partition(" ")
        if verb == "mode":
            self.mode = rest
            return rest
        if verb == "widen":
            write(f"{CGROUPS}/{rest}/cpuset.cpus", read(ONLINE))
            return rest
        if verb == "run":
            container, _, command = rest.partition(" ")
            return output(container, command)
        if verb == "agent":
            return str(posix.getpid())
        if verb == "restart":
            start_new_thread(end_soon, ())
            return "restarting"
        if verb == "processes":
            return processes()
        files = {
            "cpus": ONLINE,
            "cpuinfo": "/proc/cpuinfo",
            "kernel": "/proc/sys/kernel/osrelease",
        }
        return read(files[verb]) if verb in files else f"what is {question!r}?"


def end_soon() -> None:
    """End the agent once its answer is out."""
    time.sleep(0.2)
    posix._exit(0)


def spawn(container: str, arguments: list[str], *, stdout: int = 1) -> int:
    """Start a program in a container's cgroup; return its pid."""
    join = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
    argv = ["sh", "-c", join, f"{CGROUPS}/{container}", *arguments]
    actions = [(posix.POSIX_SPAWN_DUP2, stdout, 1)]
    return posix.posix_spawn("/bin/sh", argv, {"PATH": "/bin"}, file_actions=actions)


def output(container: str, command: str) -> str:
    """Run a shell's command in a container's cgroup; return its output once it has ended."""
    end, start = posix.pipe()
    pid = spawn(container, ["sh", "-c", command], stdout=start)
    posix.close(start)
    text = drained(end)
    posix.waitpid(pid, 0)
    return text


def processes() -> str:
    """Return a line for each process of a container."""
    lines = []
    for name in posix.listdir(CGROUPS):
        if not exists(f"{CGROUPS}/{name}/cgroup.procs"):
            continue
        for pid in read(f"{CGROUPS}/{name}/cgroup.procs").split():
            stat = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
            status = read(f"/proc/{pid}/status").partition("Cpus_allowed_list:")[2].split()
            lines.append(f"{name} {pid} {status[0]} {stat[36]} {int(stat[11]) + int(stat[12])}")
    return "\n".join(lines)


# ---- files -----------------------------------------------------------------------------------


def read(path: str) -> str:
    """Return a file's text."""
    return drained(posix.open(path, posix.O_RDONLY))


def drained(file: int) -> str:
    """Return what can be read from a descriptor, and close it."""
    try:
        parts = []
        while part := posix.read(file, 65536):
            parts.append(part)
        return b"".join(parts).decode()
    finally:
        posix.close(file)


def write(path: str, value: str) -> None:
    """Write a file of the kernel's."""
    file = posix.open(path, posix.O_WRONLY)
    try:
        posix.write(file, value.encode())
    finally:
        posix.close(file)


def exists(path: str) -> bool:
    """Whether there is something."""
    try:
        posix.stat(path)
    except OSError:
        return False
    return True


# ---- protobuf --------------------------------------------------------------------------------


class Message:
    """A message's fields by number: integers, and bytes of whatever is longer."""

    def __init__(self, data: bytes) -> None:
        self.numbers: dict[int, int] = {}
        self.parts: dict[int, list[bytes]] = {}
        position = 0
        while position < len(data):
            key, position = varint(data, position)
            value, position = varint(data, position)  # only types 0 and 2 are used here
            if key & 7 == 2:
                self.parts.setdefault(key >> 3, []).append(data[position : position + value])
                position += value
            else:
                self.numbers[key >> 3] = value

    def number(self, which: int) -> int:
        """Return an integer, 0 if it is not there."""
        return self.numbers.get(which, 0)

    def texts(self, which: int) -> list[str]:
        """Return a repeated text."""
        return [part.decode() for part in self.parts.get(which, [])]

    def text(self, which: int) -> str:
        """Return a text, empty if it is not there."""
        return self.data(which).decode()

    def data(self, which: int) -> bytes:
        """Return bytes, empty if they are not there."""
        return self.parts.get(which, [b""])[-1]

    def inner(self, which: int) -> "Message":
        """Return a message, an empty one if it is not there."""
        return Message(self.data(which))


def varint(data: bytes, position: int) -> tuple[int, int]:
    """Return an integer and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


def number(which: int, value: int) -> bytes:
    """Return an integer field."""
    return packed(which << 3) + packed(value)


def text(which: int, value: str | bytes) -> bytes:
    """Return a field of text, bytes or a message."""
    data = value.encode() if isinstance(value, str) else value
    return packed(which << 3 | 2) + packed(len(data)) + data


def packed(value: int) -> bytes:
    """Return an integer as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


# ---- ttrpc over vsock ------------------------------------------------------------------------


def serve_calls(agent: Agent, connection: socket) -> None:
    """Serve one client until it goes."""
    try:
        while header := receive(connection, 10):
            size, stream = int.from_bytes(header[:4], "big"), header[4:8]
            envelope = Message(receive(connection, size))
            method = envelope.text(2)
            try:
                answer = text(2, agent.call(method, envelope.data(3)))
            except Refusal as refusal:
                code, message = refusal.args
                answer = text(1, number(1, code) + text(2, message))
            head = len(answer).to_bytes(4, "big") + stream + bytes([RESPONSE, 0])
            connection.sendall(head + answer)
    except OSError:
        pass
    finally:
        connection.close()


def serve_question(agent: Agent, connection: socket) -> None:
    """Answer one question."""
    try:
        connection.sendall(agent.answer(connection.recv(1000).decode()).encode())
    except OSError:
        pass
    finally:
        connection.close()


def receive(connection: socket, size: int) -> bytes:
    """Return so many bytes; none at the end."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return b""
        data += part
    return data


def listen(port: int) -> socket:
    """Return a listener."""
    listener = socket(AF_VSOCK, SOCK_STREAM)
    listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    listener.bind((ANY, port))
    listener.listen(16)
    return listener


def accept(listener: socket) -> socket:
    """Return the next connection."""
    return socket(fileno=listener._accept()[0])  # type: ignore[attr-defined] # not in its stubs


def answer_questions(agent: Agent, listener: socket) -> None:
    """Serve testers for ever, one after the other."""
    while True:
        serve_question(agent, accept(listener))


def main() -> None:
    """Serve both ports for ever."""
    agent = Agent()
    calls, questions = listen(PORT), listen(ASK_PORT)
    start_new_thread(answer_questions, (agent, questions))
    while True:
        start_new_thread(serve_calls, (agent, accept(calls)))


if __name__ == "__main__":
    main()
