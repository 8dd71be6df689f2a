"""Inside the VM: which guest CPU each vCPU is, and the containers' cpusets there (D12).

    host pins -> manager -> keeper (one task per sandbox) -> peers/agent -> probe (does it hold?)

A hook never waits for a guest (ADR 10).
"""
