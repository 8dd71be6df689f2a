"""The command line: asks the daemon, or reads the system itself, and renders what comes back.

    entry -> quick (help, completion), actions (show, pin, unpin without options)
          or main -> commands/ -> actions, reports/ -> render/

No decisions here: everything shown is in a document (docs/json.md) made elsewhere. A command is
imported when it runs, and imports what it needs then.
"""
