"""One program for each system that is measured, ours included: all do the same work and speak the same line protocol (protocol.py).

Those of other systems run in `.venv-peers` (`make peers`) and import nothing of ours but their neighbours in this folder.
"""
