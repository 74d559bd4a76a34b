"""The engine's own process: commands in, one message of outputs a step out. No HTTP, no text.

Text (detokenization, stop strings, parsing) is made by the server, so nothing a client does can stall a step."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from lastrow.config import EngineConfig
from lastrow.core.output import EngineCoreOutput, Logprob
from lastrow.core.request import Request
from lastrow.core.scheduler import Scheduler
from lastrow.engine.engine import LLMEngine
from lastrow.engine.output_processor import RequestGroup
from lastrow.models.config import ConfigError
from lastrow.server import wire
from lastrow.server.channel import Channel
from lastrow.server.garbage import settle

logger = logging.getLogger("lastrow.engine")
STATS_INTERVAL = 0.25
IDLE_POLL = 0.5


class WireOutputs:
    """Takes the place of the engine's OutputProcessor: new tokens only, no text. Its results are wire.Output."""

    def __init__(self) -> None:
        self.groups: dict[str, list[Request]] = {}
        self._members: dict[str, tuple[str, int]] = {}

    def add(self, group: RequestGroup, requests: Sequence[Request]) -> None:
        self.groups[group.request_id] = list(requests)
        for index, request in enumerate(requests):
            self._members[request.request_id] = (group.request_id, index)

    def process(self, outputs: Iterable[EngineCoreOutput]) -> tuple[list[wire.Output], list[tuple[str, str]]]:
        return [made for output in outputs if (made := self._output(output)) is not None], []

    def _output(self, output: EngineCoreOutput) -> wire.Output | None:
        request = output.request
        found = self._members.get(request.request_id)
        if found is None:
            return None
        group_id, index = found
        made = wire.Output(group_id, index, output.new_token_ids, num_cached_tokens=request.num_cached_tokens)
        if output.new_logprobs is not None:
            made.logprobs = [_entries(entry) for entry in output.new_logprobs]
        if output.prompt_logprobs:
            made.prompt_logprobs = {at: _entries(entry) for at, entry in output.prompt_logprobs.items()}
        made.label_logits = output.label_logits
        if output.label_logits and request.sampling_params.max_tokens == 0:
            # logprob_token_ids: the place behind the prompt, which has no token of its own
            labels = request.label_token_ids or ()
            made.logprobs = [
                [(token, value - (total or 0.0), None) for token, value in zip(labels, values, strict=True)]
                for values, total in output.label_logits.values()
            ]
        if output.finish_reason is not None or 0 < len(request.output_token_ids) == len(output.new_token_ids):
            made.timings = _timings(request)
        if output.finish_reason is not None:
            made.finish_reason, made.stop_reason = output.finish_reason.value, output.stop_reason
            self._close(request.request_id)
        return made

    def _close(self, member: str) -> None:
        group_id, _ = self._members.pop(member)
        if not any(request.request_id in self._members for request in self.groups[group_id]):
            del self.groups[group_id]

    def abort(self, request_id: str) -> tuple[list[str], None]:
        members = [r.request_id for r in self.groups.get(request_id, ()) if r.request_id in self._members]
        for member in members:
            self._close(member)
        return members, None


def _entries(entry: dict[int, Logprob]) -> list[wire.TokenLogprob]:
    return [(token, p.logprob, p.rank) for token, p in entry.items()]


def _timings(request: Request) -> wire.Timings:
    m = request.metrics
    return wire.Timings(
        m.arrival_time, m.first_scheduled_time, m.first_token_time, m.last_token_time, m.finished_time, m.num_preemptions,
        m.rows_given, m.rows_computed,
    )  # fmt: skip


@dataclass(slots=True)
class _Rebuild:
    """A new pool size that waits for running requests. held: what came meanwhile, in order."""

    call_id: int
    kv_cache_memory_bytes: int
    deadline: float
    held: list[wire.Add | wire.AddMany | wire.Abort] = field(default_factory=list)


class EngineLoop:
    """Serves one server until it says stop or is gone."""

    def __init__(self, engine: LLMEngine, channel: Channel) -> None:
        self.engine = engine
        self.outputs = WireOutputs()
        engine.outputs = self.outputs  # pyright: ignore[reportAttributeAccessIssue]
        self._channel = channel
        self._parent = os.getppid()
        self._next_stats = 0.0
        self._was_busy = False
        self._step_tokens: list[int] = []
        self._rebuild: _Rebuild | None = None

    def announce(self) -> None:
        limits = self.engine.scheduler.config
        self._send(wire.Ready(limits.max_model_len, self.engine.vocab_size, limits.max_num_seqs, os.getpid()))

    def run(self) -> None:
        while self._take_commands():
            busy = self.engine.has_unfinished_requests
            outputs: list[Any] = []
            if busy:
                before = self.engine.runner.stats.rows_given
                outputs = self.engine.step()
                self._step_tokens.append(self.engine.runner.stats.rows_given - before)
            now = time.monotonic()
            # After the last step one more message tells the server that everything is free again.
            stats = self._stats() if now >= self._next_stats or busy != self._was_busy else None
            if stats is not None:
                self._next_stats = now + STATS_INTERVAL
            self._was_busy = busy
            if outputs or stats is not None:
                self._send(wire.Outputs(outputs, stats))
            if self._rebuild is not None:
                self._go_on_with_rebuild(self._rebuild)

    def _take_commands(self) -> bool:
        """Handle what has arrived; waits only when there is nothing to compute. False when the process should end."""
        if not self.engine.has_unfinished_requests and not self._was_busy and not self._channel.poll(IDLE_POLL):
            return os.getppid() == self._parent
        while self._channel.poll():
            command = wire.decode_to_engine(self._channel.receive())
            if isinstance(command, wire.Stop):
                return False
            self._handle(command)
        return os.getppid() == self._parent

    def _handle(self, command: wire.Add | wire.AddMany | wire.Abort | wire.Call) -> None:
        if self._rebuild is not None and not isinstance(command, wire.Call):
            self._rebuild.held.append(command)
            if isinstance(command, wire.Abort):  # of a running request: at once; of one that is held: in its turn
                self.engine.abort(command.request_ids)
        elif isinstance(command, wire.Add):
            self._add(command)
        elif isinstance(command, wire.AddMany):
            for add in command.adds:
                self._add(add)
        elif isinstance(command, wire.Abort):
            self.engine.abort(command.request_ids)
        else:
            self._call(command)

    def _add(self, add: wire.Add) -> None:
        try:
            self.engine.add_request(
                add.request_id, add.prompt_token_ids, add.params, priority=add.priority, arrival_time=add.arrival_time,
                cache_salt=add.cache_salt, stream=True, prompt_rows=add.prompt_rows, label_token_ids=add.label_token_ids,
                fork_of=add.fork_of, fork_num_tokens=add.fork_num_tokens, is_kept=True,
            )  # fmt: skip
        except ValueError as error:
            self.engine.abort(add.request_id)
            self._send(wire.Rejected(add.request_id, str(error).removeprefix(f"request {add.request_id}: ")))

    def _call(self, call: wire.Call) -> None:
        try:
            value: Any = None
            if call.name == "cache_status":
                value = self._cache_status()
            elif call.name == "reset_prefix_cache":
                value = not self.engine.has_unfinished_requests
                if value:
                    self.engine.reset_prefix_cache()
            elif call.name == "rebuild_cache" and self._rebuild is None:
                self._rebuild = _Rebuild(
                    call.call_id, call.arguments["kv_cache_memory_bytes"], time.monotonic() + call.arguments["timeout"]
                )
                return  # answered when the running requests are finished
            elif call.name == "rebuild_cache":
                value = {"state": "busy"}
            elif call.name == "check_integrity":
                self.engine.scheduler.kv.check_integrity(self.engine.scheduler.requests.values())
            else:
                raise ValueError(f"no call named {call.name!r}")
            self._send(wire.Reply(call.call_id, value))
        except (ValueError, AssertionError) as error:
            self._send(wire.Reply(call.call_id, error=str(error)))

    def _go_on_with_rebuild(self, rebuild: _Rebuild) -> None:
        """Once nothing runs, give the pool its new size; after the deadline, let go. Then take what was held back."""
        reply = wire.Reply(rebuild.call_id)
        if self.engine.has_unfinished_requests:
            if time.monotonic() < rebuild.deadline:
                return
            reply.value = {"state": "not drained", "unfinished": len(self.engine.outputs.groups)}
        else:
            try:
                self.engine.rebuild_cache(rebuild.kv_cache_memory_bytes)
                scheduler = self.engine.scheduler
                scheduler.config = replace(scheduler.config, max_model_len=self.engine.max_model_len)
                fit_length_to_pool(scheduler)
                self.announce()  # the window may have changed
                reply.value = {"state": "rebuilt", "status": self._cache_status()}
            except ValueError as error:
                reply.error = str(error)
        self._rebuild = None
        for command in rebuild.held:
            self._handle(command)
        self._send(reply)

    def _cache_status(self) -> dict[str, Any]:
        return {**self.engine.cache_status(), "rows": self._rows()}

    def _rows(self) -> dict[str, int]:
        stats = self.engine.runner.stats
        return {"given": stats.rows_given, "computed": stats.rows_computed}

    def _stats(self) -> wire.Stats:
        scheduler, runner = self.engine.scheduler, self.engine.runner.stats
        now, counters = scheduler.stats(), scheduler.counters
        free = [pool.num_free_blocks for pool in scheduler.kv.pools]
        total = [pool.num_usable_blocks for pool in scheduler.kv.pools]
        speculator = self.engine.runner.speculator
        stats = wire.Stats(
            now.num_running, now.num_waiting, now.kv_usage, (free[0], free[1]), (total[0], total[1]), now.prefix_cache_queries,
            now.prefix_cache_hits, now.num_preemptions, counters.generated_tokens, counters.scheduled_tokens, runner.steps,
            runner.rows_given, runner.rows_computed, runner.graphs, runner.eager, speculator and speculator.stats, self._step_tokens,
        )  # fmt: skip
        self._step_tokens = []
        return stats

    def _send(self, message: wire.FromEngine) -> None:
        self._channel.send(wire.encode(message))


def main(config: EngineConfig, connection: Connection, log_level: int) -> None:
    """Entry point of the process. connection: its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=log_level, format="%(levelname)s:     engine: %(message)s")
    channel = Channel(connection)
    code = 0
    try:
        try:
            engine = _build(config)
        except (ValueError, OSError) as error:  # a wrong option or checkpoint: the message says all
            channel.send(wire.encode(wire.Failed(str(error))))
            channel.close(timeout=0.5)
            sys.exit(1)
        loop = EngineLoop(engine, channel)
        loop.announce()
        loop.run()
    except EOFError:
        code = 1  # the server is gone: nobody to tell
    except Exception as error:
        logger.exception("the engine cannot go on")
        channel.send(wire.encode(wire.Failed(f"{type(error).__name__}: {error}")))
        code = 1
    # Half a second for the last message, which must not keep a broken process alive.
    channel.close(timeout=0.5)
    sys.exit(code)


def _build(config: EngineConfig) -> LLMEngine:
    """A warm engine: weights loaded, grammars ready, one prompt computed."""
    from lastrow.core.sampling_params import SamplingParams
    from lastrow.engine.build import build_engine

    engine = build_engine(config)
    fit_length_to_pool(engine.scheduler)
    engine.prepare_grammars()
    start = engine.tokenizer.bos_token_id if engine.tokenizer is not None else 0
    engine.add_request("warm-up", [start] * 8, SamplingParams(max_tokens=2, temperature=0.0))
    while engine.has_unfinished_requests:
        engine.step()
    engine.scheduler.kv.reset_prefix_cache()
    settle()
    return engine


def fit_length_to_pool(scheduler: Scheduler) -> None:
    """Lower max_model_len to what the K/V pool can hold, so that a request without max_tokens is never refused for its default."""
    blocks, pools, config = scheduler.kv.config, scheduler.kv.pools, scheduler.config

    def fits(length: int) -> bool:
        # The last token's K/V is never needed.
        need = blocks.blocks_needed(length - 1, config.enable_chunked_prefill)
        return all(count <= pool.num_usable_blocks for count, pool in zip(need, pools, strict=True))

    if fits(config.max_model_len):
        return
    low, high = 1, config.max_model_len
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low < 2:
        raise ConfigError("the K/V pool holds no request of two tokens: give it more memory (--kv-cache-memory-bytes)")
    logger.warning("max_model_len is %d in place of %d: the K/V pool holds no longer request", low, config.max_model_len)
    scheduler.config = replace(config, max_model_len=low)
