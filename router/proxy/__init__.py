"""An HTTP/1.1 proxy in front of the router's targets: `/lanes/{target}/...`. It knows nothing of evals."""

from router.proxy.limits import ProxyLimits
from router.proxy.messages import Refused
from router.proxy.runner import GC_THRESHOLDS, ProxyRunner, ProxySettings
from router.proxy.server import Server
from router.proxy.service import ROUTES, Service
from router.proxy.table import Follower, Source, Table, TableReport, Target, Targets

__all__ = [
    "GC_THRESHOLDS",
    "ROUTES",
    "Follower",
    "ProxyLimits",
    "ProxyRunner",
    "ProxySettings",
    "Refused",
    "Server",
    "Service",
    "Source",
    "Table",
    "TableReport",
    "Target",
    "Targets",
]
