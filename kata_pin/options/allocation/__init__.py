"""Who gets which CPUs, if `alloc.policy` is set (D8, D9, D14, D15; docs/allocation.md).

    an event -> nri_decider -> requests -> allocator -> checked_policy -> a policy
                             grants (stored first) -> ledger -> push -> the runtime

The policies are pure: accumulator, choice, pooled, policies. Where a VM's threads go inside the
CPUs given is not decided here (placement/).
"""
