"""Machines join a cluster, and renew their certificates, while its head is dead: at another machine with a copy of the authority."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest
from cryptography import x509

from deploy.ca.authority import Authority, addresses_in, name_of, new_request
from deploy.ca.identity import Identity
from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.joined import JoinedNode, new_token, ready
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import Reference, random_prompt
from tests.support.valkey import new_valkey
from tests.support.waiting import wait_until

SECOND = "127.0.0.8"
OUTPUT_TOKENS = 24


@pytest.mark.timeout(300)
def test_while_the_head_is_dead_machines_join_at_another_and_have_their_certificates_renewed_there(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    kv = {"block_tokens": 16, "arena_size": "64MiB", "transports": ["tcp"]}
    settings = {"model": str(model), "served_model_name": "joined", "dtype": "float32", "device": "cpu", "kv": kv, "profile": TINY_PROFILE}
    settings |= {"prefill": 0, "decode": 0, "join_port": 0, "join_hosts": [SECOND]}
    conductor = {"admission": "baseline", "leader_lease_s": 1.0}
    with new_valkey() as valkey, Cluster(**settings, conductor=conductor, redis_url=valkey.connection_url) as head:
        copied = tmp_path / "ca"
        shutil.copytree(head.record.ca_dir, copied)
        token, first = new_token(head)
        invitation = token, f"{first},{SECOND}:{first.rpartition(':')[2]}"
        free = ("--port", "0", "--grpc-port", "0")
        with (
            JoinedNode(head, "conductor", SECOND, "--set", f"tls.ca_dir={copied}", invitation=invitation) as second,
            JoinedNode(head, "prefill", "127.0.0.2", invitation=invitation) as prefill,
            JoinedNode(head, "gateway", "127.0.0.4", *free, invitation=invitation) as gateway,
        ):
            assert f"Machines join at {SECOND}:" in second.log
            head.supervisor.kill()
            head.supervisor.wait()
            with JoinedNode(head, "decode", "127.0.0.3", invitation=(new_token(second)[0], invitation[1])) as decode:
                wait_until(lambda: ready(gateway.url), "the cluster to take requests", more=gateway.logs)
                prompt = random_prompt(1, 100, 10, 250)
                answer = generate(gateway.record.grpc_address, "joined", prompt, OUTPUT_TOKENS)
                assert answer.token_ids == Reference.from_directory(model).greedy(prompt, OUTPUT_TOKENS)
                for node in (second, prefill, gateway, decode):
                    identity = Identity(Path(node.record.run_dir, "tls"))
                    age(identity, Authority.open(copied))
                    wait_until(lambda own=identity: days_left(own) > 80, f"{node.name} to have another certificate", more=node.logs)


def own_certificate(identity: Identity) -> x509.Certificate:
    return x509.load_pem_x509_certificates(identity.certificate.read_bytes())[0]


def age(identity: Identity, authority: Authority) -> None:
    """As if the certificate had been there for most of its time."""
    own = own_certificate(identity)
    key, request = new_request(sorted(addresses_in(own)))
    chain = authority.issue(name_of(own), request, datetime.timedelta(minutes=1), machine=True)
    identity.install(key, chain, identity.authorities.read_bytes())


def days_left(identity: Identity) -> int:
    return (own_certificate(identity).not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
