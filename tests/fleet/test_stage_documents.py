"""Stages find each other by documents that only their replica's key can sign."""

import ipaddress
import json
import socket

import pytest
from link_pairs import HOST, RUN, SIGNER, close, link_pair, start_of

from isthmus.errors import ConfigError
from isthmus.protocol.trust import Signer, canonical
from isthmus.runtime.addresses import Address
from isthmus.runtime.certificates import contexts
from isthmus.runtime.peer import HANDSHAKES_PER_SECOND, Endpoint
from isthmus.runtime.stage_documents import StageDocument, StageDocuments, advertised, own_hosts
from isthmus.store.objects import open_store

KEY = "members/edge-0/stage-0.json"


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "bucket"), create=True)


@pytest.fixture
def documents(store):
    return StageDocuments(store, RUN, SIGNER)


def test_a_stage_is_found_by_what_it_wrote_last(documents):
    with pytest.raises(ConnectionError, match="no answer; start `isthmus join` there"):
        documents.find(0)()
    first = documents.begin(0, ("192.0.2.7:29500",), clock=lambda: 50.0)
    assert documents.find(0)() == ([Address("192.0.2.7", 29500)], 50_000_000)
    find = documents.find(0)
    documents.begin(0, ("192.0.2.8:1234", "[2001:db8::1]:1234"), last_error="a fault", clock=lambda: 60.0)
    assert find() == ([Address("192.0.2.8", 1234), Address("2001:db8::1", 1234)], 60_000_000)
    assert documents.read(0).last_error == "a fault"
    assert documents.read(1) is None
    assert first.last_error == ""


def test_start_numbers_grow_even_where_the_clock_was_set_back(documents):
    starts = [documents.begin(0, (), clock=lambda now=now: now).start for now in (60.0, 10.0, 10.0, 61.0)]
    assert starts == [60_000_000, 60_000_001, 60_000_002, 61_000_000]


@pytest.mark.parametrize("secured", [True, False])
def test_stages_of_which_one_trusts_the_network_say_so(documents, secured):
    documents.begin(0, ("192.0.2.7:29500",), secured)
    assert documents.find(0, secured)()[0] == [Address("192.0.2.7", 29500)]
    with pytest.raises(ConnectionError, match="started with --trust-network, "):
        documents.find(0, not secured)()


def changed(document, **fields):
    return canonical(json.loads(document) | fields)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:-9],
        lambda data: data.replace(b"192.0.2.7", b"192.0.2.9"),
        lambda data: changed(data, replica="edge-1"),
        lambda data: data + b" " * 2**15,
        lambda data: b"[" * 10_000,
    ],
    ids=["empty", "torn", "changed", "of another", "too long", "deep"],
)
def test_what_was_spoilt_in_the_bucket_does_not_count(documents, store, spoil):
    documents.begin(0, ("192.0.2.7:29500",))
    assert documents.read(0) is not None
    store.put(KEY, spoil(store.get(KEY, max_bytes=2**14)))
    assert documents.read(0) is None


@pytest.mark.parametrize(
    "body",
    [
        {"start": True},
        {"start": 2**60},
        {"start": -1},
        {"addresses": ["192.0.2.7"]},
        {"addresses": ["192.0.2.7:99999"]},
        {"addresses": ["a b:1"]},
        {"addresses": ["h:1"] * 9},
        {"last_error": "x" * 1000},
        {"secured": 2},
        {"stage": 1},
    ],
)
def test_a_signed_document_with_fields_that_cannot_be_does_not_count(documents, store, body):
    fields = {"stage": 0, "start": 1, "addresses": ["h:1"], "secured": True, "last_error": ""}
    store.put(KEY, SIGNER.seal("stage", RUN, fields))
    assert documents.read(0) == StageDocument(stage=0, start=1, addresses=("h:1",))
    store.put(KEY, SIGNER.seal("stage", RUN, fields | body))
    assert documents.read(0) is None


def test_a_document_of_another_key_run_or_kind_does_not_count(documents, store):
    fields = {"stage": 0, "start": 1, "addresses": ["h:1"], "secured": True, "last_error": ""}
    other = Signer("edge-0", b"\7" * 32)
    for sealed in (
        other.seal("stage", RUN, fields),
        SIGNER.seal("stage", "cd" * 16, fields),
        SIGNER.seal("heartbeat", RUN, fields),
    ):
        store.put(KEY, sealed)
        assert documents.read(0) is None


@pytest.mark.parametrize(
    ("early", "late", "dials"), [(True, True, "late"), (True, False, "late"), (False, True, "early")]
)
def test_the_later_stage_dials_unless_it_alone_has_an_address(documents, early, late, dials):
    ends = []
    for stage, has_address in enumerate((early, late)):
        endpoint = Endpoint(start_of(stage, stage + 5), socket.create_server((HOST, 0)), contexts(SIGNER))
        addresses = (f"{HOST}:{endpoint.port}",) if has_address else ()
        document = documents.begin(stage, addresses, clock=lambda: 5e-6)
        endpoint.me = start_of(stage, document.start)
        ends.append((endpoint, document))
    (one, first), (two, second) = ends
    links = link_pair(one, two, documents.finder(second, 0), early_find=documents.finder(first, 1))
    links[0].send_message(b"hello")
    assert links[1].receive_message() == b"hello"
    took_handshakes = [end.pace.tokens < HANDSHAKES_PER_SECOND for end in (one, two)]
    assert took_handshakes == [dials == "late", dials == "early"]
    close(*links)


def test_an_address_that_is_given_is_what_others_are_told():
    assert advertised("203.0.113.7:29500", 1) == ("203.0.113.7:29500",)
    assert advertised("[2001:db8::1]:29500", 1) == ("[2001:db8::1]:29500",)
    assert advertised("home.example.org:29500", 1) == ("home.example.org:29500",)
    assert advertised("none", 1) == ()


@pytest.mark.parametrize("text", ["203.0.113.7", "203.0.113.7:0", ":29500", "0.0.0.0:29500", "a b:29500"])
def test_an_address_that_nobody_could_dial_is_refused_with_what_would_be_right(text):
    with pytest.raises(ConfigError, match="--advertise"):
        advertised(text, 1)


def test_without_one_they_are_told_the_addresses_of_this_machine():
    hosts = own_hosts()
    assert hosts
    for host in hosts:
        ipaddress.ip_address(host)
    assert [Address.parse(each, "x") for each in advertised("", 7)] == [Address(host, 7) for host in hosts]
