"""Words that everybody uses: CPU sets, topology, threads, containers, settings, documents, errors.

    errors, values, cpuset -> sandbox, placement, allocation -> documents
                                        settings, config

No decisions, and no I/O but reading text that was handed in. Everything here is public; every other
room may import it, and it imports none. Values are frozen Structs (docs/design.md, D16).
"""
