"""The client on whose account a request runs: by its API key, or by its address where the server has no keys.

Tenants share the engine fairly, and pages of the prefix cache only where the operator says so.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...llm.engine.requests import Request
from ..http.request_context import RequestContext

if TYPE_CHECKING:
    from ..service import Service

IPV6_BITS = 64  # of an address that its owner does not choose


def tenant_of(call: RequestContext) -> str:
    """The name of its key, or its address; an IPv6 address up to the part that its owner chooses."""
    if call.service.keys is not None:
        return call.service.keys.tenant(call.headers)
    try:
        address = ipaddress.ip_address(call.client)
    except ValueError:
        return call.client
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((int(address) >> IPV6_BITS << IPV6_BITS, IPV6_BITS)))
    return str(getattr(address, "ipv4_mapped", None) or address)


def sharer_of(service: Service, headers: Mapping[bytes, bytes]) -> str:
    """Whose share of a queue of tensors a request takes that was let in: its key's, "" for all with less than two."""
    keys = service.keys
    return keys.tenant(headers) if keys is not None and len(keys) > 1 else ""


def owned(call: RequestContext, requests: Sequence[Request]) -> Sequence[Request]:
    """The same requests, marked with their tenant; with keys, each tenant has a prefix cache of its own."""
    service, tenant = call.service, tenant_of(call)
    salt = tenant if service.keys is not None and not service.share_prefix_cache else ""
    for request in requests:
        request.tenant, request.salt = tenant, salt
    return requests
