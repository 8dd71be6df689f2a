"""NRI: containerd and CRI-O report pods and containers as things happen (D14; docs/nri.md).

    the runtime -> session (one connection) -> messages -> the ports that plugin.py is given

Public: plugin.py, and the ports of session.py.
"""
