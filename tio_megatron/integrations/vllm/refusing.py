"""A request whose answer would mix weights ends with an error, and the engine lives on.

Two requests are meant: one that would run while weights are half loaded, and one that had begun when a load changed them. vLLM ends an engine
whose model raises. So the model is not reached: every call of the workers brings back, with its answer, whether the weights are whole and how
many loads there were; the engine's core keeps both, and its next step answers such requests instead of running them. The reason travels to the
front end in the answer's ``stop_reason`` and is raised there: HTTP 503 in a server. A paused engine (``pause_generation``) keeps the requests
that had not begun waiting.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from vllm import exceptions
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus
from vllm.v1.serial_utils import run_method

from tio_megatron.integrations.vllm.ending import naming_the_killed

_MARK = "tio_megatron: weights are not whole: "

_CHANGED = "a load changed them while the request was running, so one answer would come from two sets of weights; send the request again"

_GRACEFUL: Any = getattr(exceptions, "GracefulHTTPError", None)
"""What a server answers with its status; not there in vLLM 0.23, the one that vllm-ascend 0.23 is for."""


class WeightsNotWholeError(*((_GRACEFUL,) if _GRACEFUL else ()), ValueError):  # type: ignore[misc]  # a base that one release lacks
    """A request would have run on half-loaded weights, or on two sets of weights; the engine lives."""

    def __init__(self, message: str) -> None:
        super().__init__(message, *((HTTPStatus.SERVICE_UNAVAILABLE,) if _GRACEFUL else ()))


class Failed:
    """An exception of a worker: itself within a process, its text between processes, as vLLM passes them on."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return Failed, (RuntimeError(f"Worker failed with error '{self.error}', please check the stack trace above for the root cause"),)


def answered(method: str | Callable[..., Any], worker: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, str | None, int]:
    """Runs in the worker: the method's answer (or :class:`Failed`), why the model must not run (None: it may), and how many loads there were."""
    try:
        answer = run_method(worker, method, args, kwargs)
    except Exception as error:
        from vllm.logger import init_logger

        init_logger(__name__).error("%s failed: %s: %s", method, type(error).__name__, error)
        answer = Failed(error)
    model = getattr(getattr(worker, "model_runner", None), "model", None)
    ledger = getattr(model, "ledger", None)
    return answer, *((None, 0) if ledger is None else (ledger.stopped(), ledger.version))


def watch_weights(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``EngineCore.collective_rpc``: notes whether the weights are whole; after a load, which requests had begun, and resets the prefix cache.

    Every rank answers, also when methods fail: vLLM would leave the answers of the ranks after the first that failed in their queues and take
    them for those of the next call.
    """

    # vLLM reads the signature when the call comes from another process.
    @functools.wraps(stock)
    def collective_rpc(self: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        with naming_the_killed(self.model_executor):
            answers = stock(self, functools.partial(answered, method), timeout, tuple(args), kwargs)
        self.tio_stopped = next((why for _, why, _ in answers if why), None)
        loads = max(count for _, _, count in answers)
        if loads != getattr(self, "tio_loads", 0):
            self.tio_loads = loads
            begun = {name for name, request in self.scheduler.requests.items() if request.num_computed_tokens or request.num_output_tokens}
            self.tio_begun = begun | getattr(self, "tio_begun", set())
            if not self.reset_prefix_cache(reset_running_requests=True):
                raise ValueError(f"{method}: the prefix cache could not be reset; its keys and values belong to older weights")
        for answer, _, _ in answers:
            if isinstance(answer, Failed):
                raise answer.error
        return [answer for answer, _, _ in answers]

    return collective_rpc


def refuse_requests(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``EngineCore.step``: answers requests that would run on half-loaded weights or on two sets of weights."""

    @functools.wraps(stock)
    def step(self: Any) -> Any:
        if hasattr(self.model_executor, "driver_worker"):
            # Whoever has the worker in this process may have loaded weights without a call that passes by the core. Any method will do.
            self.collective_rpc("check_health")
        scheduler = self.scheduler
        names, why = self.__dict__.pop("tio_begun", set()), _CHANGED
        if not names and (self.__dict__.get("tio_stopped") and scheduler.pause_state != PauseState.PAUSED_ALL):
            why = self.tio_stopped
            # A pause that drains runs what was begun and keeps the others waiting.
            names = None if scheduler.pause_state == PauseState.UNPAUSED else [request.request_id for request in scheduler.running]
        refused = defaultdict(list)
        for request in scheduler.finish_requests(names, RequestStatus.FINISHED_ERROR):
            refused[request.client_index].append(request.request_id)
        if not refused:
            with naming_the_killed(self.model_executor):
                return stock(self)

        def answers(requests: list[str]) -> EngineCoreOutputs:
            outputs = [EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR, stop_reason=_MARK + why) for name in requests]
            return EngineCoreOutputs(outputs=outputs, finished_requests=set(requests))

        return {client: answers(requests) for client, requests in refused.items()}, False

    return step


def raise_refusals(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``OutputProcessor.process_outputs``, in the front end: the reason is raised where the caller waits."""

    @functools.wraps(stock)
    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        refused = [output for output in engine_core_outputs if str(output.stop_reason or "").startswith(_MARK)]
        if not refused:
            return stock(self, engine_core_outputs, *args, **kwargs)
        states = [self.request_states.get(output.request_id) for output in refused]
        processed = stock(self, engine_core_outputs, *args, **kwargs)
        error = WeightsNotWholeError(str(refused[0].stop_reason))
        for state in states:
            if state is not None and state.queue is not None:
                state.queue.put(error)
        if any(state is not None and state.queue is None for state in states):
            # The caller's other requests go with this one: refused too, but perhaps a step later, they would end the caller's next call.
            self.abort_requests([name for name, state in self.request_states.items() if state.queue is None], internal=True)
            raise error
        return processed

    return process_outputs
