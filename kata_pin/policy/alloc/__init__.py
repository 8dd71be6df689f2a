"""Who gets which CPUs: the topology accumulator and what is built on it.

Pure functions over frozen values; nothing here lives longer than a call. Out of scope: writing a
cpuset anywhere, and where a VM's threads go inside the CPUs given (policy.place decides that).
"""
