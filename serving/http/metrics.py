"""Metrics for Prometheus: latency by stage, queue, verdicts, errors, what computes."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

__all__ = ["CONTENT_TYPE_LATEST", "STAGES", "Metrics"]

STAGES = ("read", "prepare", "queue", "first_pass", "masked_pass", "score", "answer", "total")
"""Of a request: body, decoding and resizing, waiting, both passes, scoring, writing the answer, and all of it."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """All series of one server, in a registry of its own. Labels take few values: names of models, fixed words."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.stage = Histogram(
            "mdps_stage_seconds", "Time of a judged request by stage.", ("model", "stage"),
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.batch = Histogram(
            "mdps_batch_images", "Images judged at once.", ("model",), buckets=(1, 2, 4, 8, 16, 32), registry=registry
        )
        self.verdicts = Counter("mdps_verdicts", "Images judged.", ("model", "verdict"), registry=registry)
        self.errors = Counter("mdps_errors", "Requests without a result.", ("kind",), registry=registry)
        self.requests = Counter("mdps_requests", "Requests answered.", ("route", "status"), registry=registry)
        self.nan = Counter(
            "mdps_nan", "Images for which the network gave NaN or infinity.", ("model",), registry=registry
        )
        self.reloads = Counter("mdps_reloads", "Reloads of a model.", ("model", "outcome"), registry=registry)
        self.queue = Gauge(
            "mdps_queue_length", "Requests accepted and not yet answered.", ("model",), registry=registry
        )
        self.ready = Gauge("mdps_model_ready", "1 where the model answers.", ("model",), registry=registry)
        self.threshold = Gauge("mdps_threshold", "Score above which a part fails.", ("model",), registry=registry)
        self.provider = Gauge(
            "mdps_provider_info",
            "What computes each graph.",
            ("model", "engine", "graph", "provider"),
            registry=registry,
        )
        self.dropped_logs = Counter("mdps_dropped_log_lines", "Log lines nobody took in time.", registry=registry)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
