"""CPU placement for sandboxed containers.

A Kata container runs in a virtual machine; what runs on the host are the threads of its VMM.
kata-pin records the CPUs each container was given, finds every thread that works for the sandbox
and keeps it on them. `docs/architecture.md` has the map of this package.
"""

__version__ = "0.1.0"
