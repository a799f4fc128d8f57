"""Keys: who may do what."""

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idml.server import security as module
from idml.server.security import Keys, Role, is_loopback, required_role

FULL, READ = "full-key-1", "read-key-2"


@pytest.mark.parametrize(
    ("api", "read", "role"),
    [
        (None, None, {None: 2, FULL: 2, READ: 2, "x": 2}),
        (FULL, None, {None: 0, FULL: 2, READ: 0, "x": 0}),
        (FULL, READ, {None: 0, FULL: 2, READ: 1, "x": 0}),
        (None, READ, {None: 0, FULL: 0, READ: 1, "x": 0}),
    ],
)
def test_roles(api, read, role):
    keys = Keys(api, read)
    for given_key, expected in role.items():
        for headers in ({"x-api-key": given_key}, {"authorization": f"Bearer {given_key}"}):
            assert keys.role({} if given_key is None else headers) == expected
    assert keys.open == (api is None and read is None)
    assert keys.can_write == (api is not None)


@given(st.text(max_size=20))
def test_only_the_exact_key_is_accepted(guess):
    keys = Keys(FULL, READ)
    expected = {FULL: Role.WRITER, READ: Role.READER}.get(guess, Role.NOBODY)
    assert keys.role({"x-api-key": guess}) == expected


def test_both_keys_are_always_compared_in_constant_time(monkeypatch):
    compared = []

    monkeypatch.setattr(
        module.hmac, "compare_digest", lambda a, b, real=hmac.compare_digest: compared.append(b) or real(a, b)
    )
    keys = Keys(FULL, READ)
    for guess in (FULL, READ, "x", "", FULL[:-1], FULL + "x"):
        compared.clear()
        keys.role({"x-api-key": guess})
        assert len(compared) == 2
        assert {len(b) for b in compared} == {32}


@pytest.mark.parametrize("bad", ["", " ", "a b", "key\n", "schlüssel", "a\tb"])
@pytest.mark.parametrize("name", ["IDML_API_KEY", "IDML_READ_KEY"])
def test_a_key_that_cannot_be_sent_is_refused(name, bad):
    words = f"^{name} must be ASCII letters, digits and signs without spaces, or unset$"
    with pytest.raises(ValueError, match=words):
        Keys.from_environment({name: bad})
    assert Keys.from_environment({}).open
    both = Keys.from_environment({"IDML_API_KEY": FULL, "IDML_READ_KEY": READ})
    assert [both.role({"x-api-key": key}) for key in (FULL, READ)] == [Role.WRITER, Role.READER]
    assert Keys("!~").can_write  # the first and the last sign


def test_equal_keys_are_refused():
    words = "^IDML_API_KEY and IDML_READ_KEY are the same: the read key could write; choose another$"
    with pytest.raises(ValueError, match=words):
        Keys("one", "one")


def test_a_guess_that_is_no_text_is_no_key():
    """A header may hold any bytes."""
    for keys in (Keys(FULL), Keys(None, READ)):
        assert keys.role({"x-api-key": "\udcff"}) == Role.NOBODY
        assert keys.role({"authorization": "Bearer \xff"}) == Role.NOBODY


def test_keys_are_not_in_the_repr():
    keys = Keys(FULL, READ)
    assert FULL not in repr(keys) + repr(vars(keys))
    assert READ not in repr(keys) + repr(vars(keys))


def test_required_roles():
    for path in ("/", "/docs", "/static/app.js", "/api/health", "/openapi.json"):
        assert required_role("GET", path) == Role.NOBODY
    for path in ("/metrics", "/api/gallery", "/api/items", "/api/items/1/image", "/api/map", "/nothing", "/static"):
        assert required_role("GET", path) == Role.READER
    assert required_role("POST", "/api/search") == Role.READER
    for method, path in [("POST", "/api/items"), ("PATCH", "/api/items/1"), ("DELETE", "/api/items/1"), ("BREW", "/")]:
        assert required_role(method, path) == Role.WRITER


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "127.0.0.1.nip.io", "128.0.0.1"]
)
def test_not_loopback(host):
    assert not is_loopback(host)
