"""The network interfaces of a VMM, and which vhost workers serve them.

Links and tc redirects come over netlink from the VMM's network namespace; a thread enters it and
ends with the call, so the caller's own namespace never changes. Queues come from the VMM's
descriptors: the fdinfo of a tun descriptor names its interface (drivers/net/tun.c).

The kernel does not show which vhost descriptor a worker belongs to, nor which queue is that
descriptor's backend. Workers in the order of their creation are paired with vhost descriptors by
number, and these with queues by number; that is inferred unless only one answer is possible.

pyroute2 takes 0.1 s and 20 MiB to import, so it, and what only it needs, is imported by the call
(D27): `kata-pin show` of a sandbox without an interface needs descriptors.py only.
"""

from __future__ import annotations

import os
import struct
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from msgspec import Struct

from kata_pin.base.documents.state import Interface, VhostWorker
from kata_pin.base.errors import HostError, ParseError
from kata_pin.base.json_text import one_line
from kata_pin.base.sandbox import PF_USER_WORKER
from kata_pin.base.values import ThreadRole
from kata_pin.linux.descriptors import Descriptors, read_descriptors
from kata_pin.linux.files import HostRoot, read_once, translated
from kata_pin.linux.proc import kernel_worker, parse_stat
from kata_pin.linux.process import ProcessIndex, task_names

TIMEOUT_S: Final = 2.0
MAX_LINKS: Final = 1024
MAX_FILTERS: Final = 64
MAX_THREADS: Final = 4096
"""A compromised VMM may make many of each: the call ends there."""

_SHOWN: Final = frozenset({"tap", "tun", "veth", "macvtap"})
_TUN_IS_TAP: Final = 2  # IFF_TAP of linux/if_tun.h
_INGRESS: Final = (0xFFFF0000, 0xFFFFFFF2)  # handle of an ingress qdisc; its half of a clsact one
_REDIRECT: Final = 1  # TCA_EGRESS_REDIR of linux/tc_act/tc_mirred.h


class NetLink(Struct, frozen=True):
    """A link as netlink shows it: `redirects` and `lower` are indexes of other links."""

    index: int
    name: str
    kind: str
    queues: int
    lower: int = 0
    redirects: tuple[int, ...] = ()


def interfaces(root: HostRoot, pid: int) -> tuple[Interface, ...]:
    """Return the interfaces of a VMM's network namespace, by index.

    Of a namespace that it shares with the host, those that it has open and their peers only.
    Blocks for at most TIMEOUT_S. Raises TaskGone, and HostError without CAP_SYS_ADMIN and
    CAP_SYS_PTRACE.
    """
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - see above

    descriptors = read_descriptors(root, pid)
    with ThreadPoolExecutor(1, "netns") as thread:  # its exit waits for the thread's end
        links = thread.submit(_links, root, pid).result()
    workers = read_workers(root, pid, len(descriptors.vhosts))
    return combine(links, descriptors, workers, shared=_is_shared(root, pid))


def read_workers(root: HostRoot, pid: int, expected: int) -> tuple[int, ...]:
    """Return the tids of a VMM's vhost workers in the order of their creation; raises TaskGone.

    They are threads of the VMM since Linux 6.4. Kernel threads are looked for only where fewer than
    `expected` are there.
    """
    born: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for name in islice(task_names(root, pid), MAX_THREADS):
        try:
            stat = parse_stat(read_once(root.proc(pid, "task", name, "stat")))
        except (OSError, ParseError):
            continue
        born[stat.pid] = stat.starttime
        if stat.flags & PF_USER_WORKER and _is_vhost(stat.comm):
            found.append((stat.starttime, stat.pid))
    if len(found) < expected:
        index = ProcessIndex(root)
        index.refresh()
        workers = index.kernel_workers
        found += [
            (process.key.starttime, process.pid)
            for tid in born.keys() & workers.keys()
            for process in workers[tid]
            if _is_vhost(process.comm) and process.key.starttime >= born[tid]
        ]
    return tuple(tid for _, tid in sorted(found))


def combine(
    links: Sequence[NetLink], descriptors: Descriptors, workers: Sequence[int], *, shared: bool
) -> tuple[Interface, ...]:
    """Return the interfaces that links, descriptors and workers make up."""
    by_index = {link.index: link for link in links}
    by_name = {link.name: link for link in links}
    queues = [by_index.get(q) if isinstance(q, int) else by_name.get(q) for q in descriptors.queues]
    attached = [link.index for link in queues if link is not None]
    peers = _peers(links, by_index)
    served = _served(workers, descriptors.vhosts, attached)
    return tuple(
        Interface(
            name=one_line(link.name),
            kind=link.kind,
            queues=attached.count(link.index) or link.queues,
            peer=one_line(by_index[peers[link.index]].name) if link.index in peers else "",
            attached=link.index in attached,
            served_by=served.get(link.index, ()),
        )
        for link in links
        if link.index in attached
        or peers.get(link.index) in attached
        or (not shared and link.kind in _SHOWN)
    )


def _peers(links: Iterable[NetLink], by_index: Mapping[int, NetLink]) -> dict[int, int]:
    peers: dict[int, int] = {}
    for link in links:
        lower = (link.lower,) if link.kind == "macvtap" else ()
        for other in (*link.redirects, *lower):
            if other in by_index and other != link.index:
                peers[link.index] = other
                peers.setdefault(other, link.index)
    return peers


def _served(
    workers: Sequence[int], vhosts: Sequence[str], queues: Sequence[int]
) -> dict[int, tuple[VhostWorker, ...]]:
    """Return the workers of each interface (index), none where numbers do not fit together.

    The pairing is certain where nothing but one interface has workers.
    """
    only_net = set(vhosts) == {"vhost-net"}
    single = len(set(queues)) == 1
    if len(workers) == len(vhosts):
        net = [tid for tid, name in zip(workers, vhosts, strict=True) if name == "vhost-net"]
    else:
        net = list(workers) if only_net and single else []
    if single:
        pairs = [(queues[0], tid) for tid in net]
    else:
        pairs = list(zip(queues, net, strict=True)) if len(net) == len(queues) else []
    served: dict[int, tuple[VhostWorker, ...]] = {}
    for index, tid in pairs:
        worker = VhostWorker(tid, inferred=not (only_net and single))
        served[index] = (*served.get(index, ()), worker)
    return served


def _is_vhost(comm: str) -> bool:
    worker = kernel_worker(comm)
    return worker is not None and worker.role is ThreadRole.VHOST


def _is_shared(root: HostRoot, pid: int) -> bool:
    """Return whether it is in the namespace of this process or of pid 1."""
    namespaces = []
    for one in (pid, "self", 1):
        try:
            namespaces.append(os.readlink(root.proc(one, "ns/net")))
        except OSError:
            namespaces.append(str(one))
    return namespaces[0] in namespaces[1:]


def _links(root: HostRoot, pid: int) -> list[NetLink]:
    """Enter the namespace for the rest of this thread's life, and list its links."""
    import asyncio  # noqa: PLC0415
    import ctypes  # noqa: PLC0415

    from pyroute2 import netns  # noqa: PLC0415
    from pyroute2.netlink.exceptions import NetlinkDecodeError, NetlinkError  # noqa: PLC0415

    failed = "list interfaces of", f"process {pid}"
    try:
        namespace = os.open(root.proc(pid, "ns/net"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise translated(error, *failed) from error
    try:
        netns.setns(namespace, flags=0, libc=ctypes.CDLL(None, use_errno=True), fork=False)
        links = asyncio.run(_ask())
    except TimeoutError as error:
        raise HostError(*failed, hint=f"no answer within {TIMEOUT_S:g} s") from error
    except OSError as error:
        raise HostError(*failed, error.errno or 0, hint="needs CAP_SYS_ADMIN") from error
    except NetlinkError as error:
        raise HostError(*failed, abs(error.code)) from error
    except (ValueError, struct.error, NetlinkDecodeError) as error:
        raise HostError(*failed, hint=str(error)) from error
    finally:
        os.close(namespace)
    if len(links) > MAX_LINKS:
        raise HostError(*failed, hint=f"it has more than {MAX_LINKS}")
    return links


async def _ask() -> list[NetLink]:
    """Return the links of the thread's namespace, no more than one above MAX_LINKS."""
    import asyncio  # noqa: PLC0415

    from pyroute2 import AsyncIPRoute  # noqa: PLC0415

    async with asyncio.timeout(TIMEOUT_S), AsyncIPRoute() as route:
        messages = [one async for one in _first(MAX_LINKS + 1, await route.get_links())]
        qdiscs = _first(MAX_LINKS + 1, await route.get_qdiscs())
        kinds = {"ingress", "clsact"}
        filtered = {one["index"] async for one in qdiscs if one.get("kind") in kinds}
        links = []
        for message in messages:
            index = message["index"]
            redirects = await _redirects(route, index) if index in filtered else ()
            links.append(_link(message, redirects))
        return links


async def _first(count: int, messages: AsyncIterable[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        yield message
        count -= 1
        if not count:
            return


def _link(message: Any, redirects: tuple[int, ...]) -> NetLink:  # noqa: ANN401 - pyroute2 has no types
    kind = message.get(("linkinfo", "kind")) or ""
    data = message.get(("linkinfo", "data"))
    queues = message.get("num_tx_queues") or 0
    if kind == "tun" and data:
        kind = "tap" if data.get("IFLA_TUN_TYPE") == _TUN_IS_TAP else kind
        queues = data.get("IFLA_TUN_NUM_QUEUES") or 0
    name = message.get("IFLA_IFNAME") or ""
    if isinstance(name, bytes):  # not UTF-8
        name = name.decode("utf-8", "backslashreplace")
    lower = message.get("IFLA_LINK") or 0
    return NetLink(message["index"], name, kind, queues, lower, redirects)


async def _redirects(route: Any, index: int) -> tuple[int, ...]:  # noqa: ANN401
    """Return the links that a link's incoming packets are redirected to."""
    found = []
    for parent in _INGRESS:
        filters = _first(MAX_FILTERS, await route.get_filters(index=index, parent=parent))
        async for one in filters:
            found += [
                parameters["ifindex"]
                for name, actions in (one.get("options") or {}).get("attrs", ())
                if name.endswith("_ACT")
                for _, action in actions["attrs"]
                if action.get("TCA_ACT_KIND") == "mirred"
                and (parameters := action.get(("TCA_ACT_OPTIONS", "TCA_MIRRED_PARMS")))
                and parameters["eaction"] == _REDIRECT
            ]
    return tuple(dict.fromkeys(found))
