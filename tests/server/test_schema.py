"""The service against its own OpenAPI description, by schemathesis: generated requests, all checks, no exceptions.

IDML_SCHEMA_EXAMPLES is the number of requests for each operation; `make faults` sets it to 400.
"""

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.transport.serialization import Binary
from service_client import made_gallery, picture

from idml.server.app import build_app
from idml.server.limits import Limits
from idml.server.security import Keys

EXAMPLES = int(os.environ.get("IDML_SCHEMA_EXAMPLES", "10"))
KEY = "full-key"
PICTURES = [picture(number, format=format) for number, format in ((1, "PNG"), (2, "JPEG"), (3, "GIF"))]
OPERATIONS = [
    ("/api/health", "GET"),
    ("/metrics", "GET"),
    ("/api/gallery", "GET"),
    ("/api/items", "GET"),
    ("/api/items", "POST"),
    ("/api/items/{id}", "GET"),
    ("/api/items/{id}", "PATCH"),
    ("/api/items/{id}", "DELETE"),
    ("/api/items/{id}/thumbnail", "GET"),
    ("/api/items/{id}/image", "GET"),
    ("/api/items/{id}/similar", "GET"),
    ("/api/labels", "GET"),
    ("/api/feedback", "GET"),
    ("/api/feedback", "POST"),
    ("/api/feedback/{id}", "DELETE"),
    ("/api/map", "GET"),
    ("/api/search", "POST"),
]


@pytest.fixture(scope="module")
def described(tmp_path_factory, tiny_run):
    gallery = made_gallery(tmp_path_factory.mktemp("schema") / "gallery", tiny_run)
    limits = Limits(rate=1e6, burst=10**6, map_seconds=0.05)
    app = build_app(gallery, keys=Keys(KEY), limits=limits, hosts=None)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    found = {(operation.path, operation.method.upper()) for operation in (o.ok() for o in schema.get_all_operations())}
    assert found == {*OPERATIONS}
    return schema


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_answer_is_as_described(described, path, method):
    @given(case=described[path][method].as_strategy())
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
    def check(case):
        if isinstance(case.body, dict) and isinstance(image := case.body.get("image"), Binary):
            case.body["image"] = Binary(
                PICTURES[len(image) % 3]
            )  # the description cannot say which bytes are a picture
        case.call_and_validate(headers={"X-API-Key": KEY})

    check()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_nothing_is_answered_without_a_key(described, path, method):
    @given(case=described[path][method].as_strategy())
    @settings(max_examples=2, suppress_health_check=list(HealthCheck), deadline=None)
    def check(case):
        assert (case.call().status_code == 401) == (path != "/api/health")

    check()
