"""certificates.py AUTHORITY DIRECTORY RENEW_S NAME ADDRESS…: keeps a certificate for these addresses in the directory, and makes another
one after so many seconds, and soon after the authority is another."""

import sys
import time
from pathlib import Path

from deploy.ca.authority import Authority
from deploy.ca.identity import Identity, issue_to
from springtide.errors import ConfigError

LOOK_EVERY_S = 5.0

source, renew_s, name, addresses = Path(sys.argv[1]), float(sys.argv[3]), sys.argv[4], sys.argv[5:]
own = Identity(Path(sys.argv[2]))
made: tuple[bytes, float] | None = None
"""The authorities that were believed when the present one was made, and when that was."""
while True:
    try:
        authority = Authority.open(source)
        wanted = authority.bundle
        if made is None or made[0] != wanted or time.monotonic() - made[1] >= renew_s:
            issue_to(own, authority, name, addresses)
            made = wanted, time.monotonic()
    except ConfigError as error:
        if made is None:
            sys.exit(str(error))
        print(f"the certificate of before is kept: {error}", file=sys.stderr, flush=True)
    time.sleep(LOOK_EVERY_S)
