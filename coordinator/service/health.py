"""The answers of the control port to anybody: `grpc.health.v1.Health/Check`, and that there is no other method.

Unary only, and as often as strangers may call at all: neither streams of health nor reflection, which would hold
memory for whoever asks. A probe of the coordinator's own (`ServiceProbe`) shows whether the port answers.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

SERVICE = "grpc.health.v1.Health"
PROBE_INTERVAL = 1.0  # seconds between two probes
PROBE_TIMEOUT = 2.0  # seconds
MAX_PROBE_SILENCE = 3.0  # seconds without an answer after which the port refuses calls
Context = grpc.aio.ServicerContext[object, object]
Guard = Callable[[Context], Awaitable[None]]  # aborts a stranger's call that is one too many


class Health:
    """The health of the service, for load balancers and people; `guard` is asked before each answer."""

    def __init__(self, service: str, guard: Guard) -> None:
        self._names, self._guard = ("", service), guard
        self.serving = False
        self.draining = False  # for good

    def handlers(self) -> tuple[grpc.GenericRpcHandler, grpc.GenericRpcHandler]:
        """The handler of `Check`, and one for whatever no other handler takes."""
        check = grpc.unary_unary_rpc_method_handler(
            self._check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Check": check}), _Anything(self._guard)

    async def _check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        await self._guard(context)
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service is here")
        up = self.serving and not self.draining
        return HealthCheckResponse(status=HealthCheckResponse.SERVING if up else HealthCheckResponse.NOT_SERVING)


class _Anything(grpc.GenericRpcHandler):
    """Refuses every method, without waiting for a message."""

    def __init__(self, guard: Guard) -> None:
        self._handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(self._refuse)
        self._guard = guard

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        return self._handler

    async def _refuse(self, requests: object, context: Context) -> bytes:
        await self._guard(context)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method is here: update atoll")
        return b""  # not reached


class ServiceProbe:
    """A call that the coordinator makes to itself, again and again: while it is not answered, nobody's are."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """`channel` leads to the service itself, not by its door."""
        self._channel = channel
        self._check = channel.unary_unary(
            f"/{SERVICE}/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )
        self._answered_at: float | None = None  # seconds; None: never

    @property
    def refused(self) -> bool:
        """Whether calls have not been answered for a while: nobody can be blamed for not being heard."""
        return self._answered_at is not None and time.monotonic() - self._answered_at > MAX_PROBE_SILENCE

    async def run(self) -> None:
        """Probe until cancelled."""
        try:
            while True:
                with suppress(grpc.aio.AioRpcError):
                    await self._check(HealthCheckRequest(), timeout=PROBE_TIMEOUT)
                    self._answered_at = time.monotonic()
                await asyncio.sleep(PROBE_INTERVAL)
        finally:
            await self._channel.close()
