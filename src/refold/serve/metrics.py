"""The metrics of the service, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """In a registry of their own, so that one process may have several services."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.requests = Counter(
            "refold_requests",
            "Requests that were answered.",
            ["route", "method", "status"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "refold_request_seconds",
            "Time from a request's headers to the end of its response; streams are left out.",
            ["route"],
            buckets=BUCKETS_S,
            registry=registry,
        )
        self.refusals = Counter(
            "refold_refusals",
            "Requests that the service refused or failed to answer.",
            ["status"],
            registry=registry,
        )
        self.tokens_before = Counter(
            "refold_tokens_before", "Tokens of the requests as clients sent them.", registry=registry
        )
        self.tokens_sent = Counter(
            "refold_tokens_sent", "Tokens of the requests as they went upstream.", registry=registry
        )
        self.tokens_saved = Counter(
            "refold_tokens_saved", "Tokens that did not go upstream.", registry=registry
        )
        self.bypasses = Counter(
            "refold_bypasses",
            "Requests that went upstream unchanged because refold's part failed.",
            registry=registry,
        )
        self.compactions = Counter(
            "refold_compactions", "Compaction events, by kind.", ["kind"], registry=registry
        )
        self.upstream_errors = Counter(
            "refold_upstream_errors",
            "Error responses of upstreams, and responses that were cut off.",
            ["upstream", "status"],
            registry=registry,
        )
        self.open_streams = Gauge(
            "refold_open_streams", "Responses that are being streamed now.", registry=registry
        )
        self.sessions_kept = Gauge("refold_sessions_kept", "Sessions that are open now.", registry=registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
