"""ask.py URL: a question to the cluster there. Where it has TLS, /etc/springtide/gateway/tls.crt is the certificate that it must have; what
it wants of clients, a certificate or a key, is in /etc/springtide/client."""

import ssl
import sys
from pathlib import Path
from typing import Any

import httpx

END = "-----END CERTIFICATE-----\n"
(url,) = sys.argv[1:]
expected, own = Path("/etc/springtide/gateway/tls.crt"), Path("/etc/springtide/client")
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname = False  # it need not be for the Service's name: whoever has its key is the one
context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
if expected.exists():
    context.load_verify_locations(cadata=expected.read_text().partition(END)[0] + END)
if (own / "tls.crt").exists():
    context.load_cert_chain(own / "tls.crt", own / "tls.key")
headers = {"authorization": f"Bearer {(own / 'api-key').read_text().strip()}"} if (own / "api-key").exists() else {}


def checked(response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        sys.exit(response.text)
    return dict(response.json())


try:
    with httpx.Client(base_url=url, verify=context, headers=headers, timeout=300, trust_env=False) as client:
        model = checked(client.get("/v1/models"))["data"][0]["id"]
        asked = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}
        answer = checked(client.post("/v1/chat/completions", json=asked))
except httpx.TransportError as error:
    sys.exit(f"{url}: {error}")
print(answer["choices"][0]["message"]["content"])
