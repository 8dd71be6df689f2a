"""Keeping interrupts and the kernel's own work off exclusive pCPUs (D22; docs/quiet.md).

    claims (which pCPUs) -> decide -> keeper -> tuner (records first, then writes, then makes sure)

read.py and services.py read what disturbs pCPUs; findings.py puts it into words.
"""
