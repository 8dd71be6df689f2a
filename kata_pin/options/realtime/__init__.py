"""Paired vCPUs as real-time threads, where the setting `rt.vcpus` says so."""
