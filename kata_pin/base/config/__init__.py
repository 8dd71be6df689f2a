"""Every setting, once: a row declares its default, bounds, unit and sentence.

    kinds (how a value is read and written) -> alloc, tree (the frozen Config and what is in force)

A file becomes a Config in service/configuration.py. The man page, the sample file and `config
check` are made from the rows (table.py).
"""
