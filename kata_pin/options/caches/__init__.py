"""Caches and memory bandwidth by resctrl: a group and a class per sandbox (docs/caches.md)."""
