"""Asks a process whether it is ready: `python -m services.common.probe ADDRESS`, status 0 when it is.

What a container's health check runs, since an image need not hold any other client.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2


def is_ready(address: str, timeout_s: float = 2.0) -> bool:
    """Whether grpc.health.v1 at `address` answers SERVING in time."""
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(0 if is_ready(sys.argv[1]) else 1)
