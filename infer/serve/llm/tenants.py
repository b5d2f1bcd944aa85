"""Tenants: the API key a request came with, or the client's address where the server has no keys.

Tenants share the engine fairly; they share prefix-cache pages only where the operator allows it.
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
    """Return the name of the request's API key, or its address (IPv6: the /64 network)."""
    if call.service.keys is not None:
        return call.service.keys.tenant(call.headers)
    try:
        address = ipaddress.ip_address(call.client)
    except ValueError:
        return call.client
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((int(address) >> IPV6_BITS << IPV6_BITS, IPV6_BITS)))
    return str(getattr(address, "ipv4_mapped", None) or address)


def queue_tenant_of(service: Service, headers: Mapping[bytes, bytes]) -> str:
    """Return the tenant whose share of a tensor queue a request takes; "" with fewer than two keys."""
    keys = service.keys
    return keys.tenant(headers) if keys is not None and len(keys) > 1 else ""


def assign_tenant(call: RequestContext, requests: Sequence[Request]) -> Sequence[Request]:
    """Set the tenant of each request; with keys, also a prefix-cache salt per tenant."""
    service, tenant = call.service, tenant_of(call)
    salt = tenant if service.keys is not None and not service.share_prefix_cache else ""
    for request in requests:
        request.tenant, request.salt = tenant, salt
    return requests
