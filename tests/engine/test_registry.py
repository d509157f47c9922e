"""Who is known under which name."""

from __future__ import annotations

import pytest

from services.common.errors import InvalidArgument
from services.engine.events import Owner
from services.engine.registry import Registry
from services.engine.request import Family, make_family
from tests.engine.harness import make_spec


def make(handle: int, gateway: int = 1, token: bytes | None = None) -> Family:
    spec = make_spec(handle, [1], owner=Owner(gateway, handle), token=token or bytes([gateway, handle]))
    return make_family(spec, 100, 0.0, 0)


def test_a_request_is_found_by_both_names_until_it_is_removed() -> None:
    registry, family, other = Registry(), make(5), make(5, gateway=2)
    registry.add(family)
    registry.add(other)
    assert registry.find(Owner(1, 5)) is family
    assert registry.by_token(bytes([2, 5])) is other
    assert registry.of_gateway(1) == [family]
    assert len(registry) == 2
    registry.remove(family)
    assert registry.find(Owner(1, 5)) is None
    assert registry.by_token(bytes([1, 5])) is None
    assert registry.of_gateway(1) == []
    assert len(registry) == 1


def test_names_in_use_are_refused() -> None:
    registry = Registry()
    registry.add(make(5))
    with pytest.raises(InvalidArgument, match="handle 5") as refused:
        registry.check_free(make(5, token=b"new").spec)
    assert refused.value.field == "handle"
    with pytest.raises(InvalidArgument, match="token") as refused:
        registry.check_free(make(6, token=bytes([1, 5])).spec)
    assert refused.value.field == "token"
    registry.check_free(make(5, gateway=2).spec)
