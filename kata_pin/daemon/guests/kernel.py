"""The guest's kernel release, as far as the VMM's command line gives it away.

Nothing is kept; reading a vmlinux takes tens of milliseconds, so the daemon does it in a thread.
"""

from __future__ import annotations

from kata_pin.errors import HostError, ParseError
from kata_pin.host.kernel_image import read_release
from kata_pin.host.root import HostRoot
from kata_pin.model.guest_map import GuestFacts
from kata_pin.model.sandbox import Vmm


def kernel_facts(root: HostRoot, vmm: Vmm) -> GuestFacts:
    """Return the guest kernel's release and the file it is from, or why it is not known."""
    if not vmm.kernel:
        return GuestFacts(source="the VMM's command line names none")
    try:
        return GuestFacts(read_release(root, vmm.kernel, vmm.process), vmm.kernel)
    except (HostError, ParseError) as error:
        return GuestFacts(source=str(error))
