"""valkey_relay.py SOCKET DIRECTORY: the way to the Valkey at this socket, port 6379, for whoever shows a certificate of the cluster's; its
own is in the directory."""

import asyncio
import socket
import sys
from pathlib import Path

from deploy.valkey_relay import ValkeyRelay
from springtide.tls import Tls, TlsFiles

valkey, directory = map(Path, sys.argv[1:])
files = TlsFiles(directory / "tls.crt", directory / "tls.key", directory / "ca.crt", ("certificate", "key", "authorities"))
both = socket.has_dualstack_ipv6()
family = socket.AF_INET6 if both else socket.AF_INET
listening = socket.create_server(("", 6379), family=family, backlog=2048, dualstack_ipv6=both)
asyncio.run(ValkeyRelay(valkey, Tls(files)).serve(listening))
