"""Where each thread of a sandbox belongs. Pure: values in, a decision out (D7 to D11).

    cpusets -> masks -> exclusive -> pairing -> place -> drift (what differs, and the actions)
    measured time of tasks -> proof -> proof_rows (the rows of the prove document)

Public: place.py, drift.py, notes.py, proof.py, proof_rows.py. No clocks, no files, no state between
two calls.
"""
