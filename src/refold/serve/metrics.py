"""The metrics of the service, for Prometheus."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """In a registry of their own, so that one process may have several services."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="refold", registry=self.registry)
        gauge = partial(Gauge, namespace="refold", registry=self.registry)
        labels = ("route", "method", "status")
        self.requests = counter("requests", "Requests that were answered.", labels)
        self.request_seconds = Histogram(
            "refold_request_seconds",
            "Time from a request's headers to the end of its response; streams are left out.",
            ("route",),
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        about = "Requests that the service refused or failed to answer."
        self.refusals = counter("refusals", about, ("status",))
        self.tokens_before = counter("tokens_before", "Tokens of the requests as clients sent them.")
        self.tokens_sent = counter("tokens_sent", "Tokens of the requests as they went upstream.")
        self.tokens_saved = counter("tokens_saved", "Tokens that did not go upstream.")
        about = "Requests that went upstream unchanged because refold's part failed."
        self.bypasses = counter("bypasses", about)
        self.compactions = counter("compactions", "Compaction events, by kind.", ("kind",))
        about = "Error responses of upstreams, and responses that were cut off."
        self.upstream_errors = counter("upstream_errors", about, ("upstream", "status"))
        self.open_streams = gauge("open_streams", "Responses that are being streamed now.")
        self.sessions_kept = gauge("sessions_kept", "Sessions that are open now.")

    def text(self) -> bytes:
        return generate_latest(self.registry)
