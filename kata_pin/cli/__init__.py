"""The command line: asks the daemon, or reads the system itself, and renders what comes back.

No decisions here: everything shown is in a document (docs/json.md) made elsewhere. main.py is the
entry; one module a command; render_*.py turn documents into lines of text.
"""
