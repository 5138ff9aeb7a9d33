"""A task of the package verifiers, turn by turn. Runs in any interpreter that has verifiers 0.4.

verifiers ── runs ──> its environment ── harness ── chat completions ──> this file ──> reset and step of an episode
                                            ^                                                        |
                                            └────────── the policy's turn, as it was sampled <───────┘

Each request of an agent program to its model arrives here; the policy reads its messages, and the policy's turn is the
answer. A conversation may only grow: changes of earlier messages are refused.
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
import uuid
from typing import ClassVar

import aiohttp
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports] - in an environment of its own
from aiohttp import web
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports] - as above
from verifiers.v1.harnesses.utils.mcp import (  # pyright: ignore[reportMissingImports] - in an environment of its own
    call_mcp,
    connect_mcp,
)
from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports] - in an environment of its own
    load_environment,
    resolve_env_config,
)

__all__ = ["InProcessChat"]  # by which verifiers finds the harness of this module

OPEN_S = 120.0


class InProcessChatConfig(vf.HarnessConfig):
    """No settings beyond those of every harness."""


class InProcessChat(vf.Harness[InProcessChatConfig]):
    """A chat with the tools of the task, in this process: no program is installed or started."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ) -> vf.ProgramResult:
        messages = opening(*self.resolve_prompt(data))
        timeout = self.config.tool_timeout
        async with contextlib.AsyncExitStack() as stack:
            servers = {name: {"url": url, "timeout": timeout} for name, url in mcp_urls.items()}
            tools, dispatch, servers = await connect_mcp({"mcpServers": servers}, stack)
            no_limit = aiohttp.ClientTimeout(total=None)  # the policy may take long
            client = await stack.enter_async_context(aiohttp.ClientSession(timeout=no_limit))
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                headers = {"Authorization": f"Bearer {secret}"}
                async with client.post(f"{endpoint.rstrip('/')}/chat/completions", json=body, headers=headers) as reply:
                    if reply.status != 200:
                        stopped = trace.stop_condition is not None  # the environment refuses a further turn
                        return vf.ProgramResult(0 if stopped else 1, "", await reply.text())
                    message = (await reply.json())["choices"][0]["message"]
                messages = [*messages, message]
                calls = message.get("tool_calls") or []
                if not calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                messages += await asyncio.gather(*(self._answer(call, dispatch, servers) for call in calls))

    async def _answer(self, call, dispatch, servers):
        name = call["function"]["name"]
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except ValueError as error:
            content = f"error: the arguments are not JSON ({error})"
        else:
            if name in dispatch:
                content = await call_mcp(servers, dispatch, name, arguments)
            else:
                content = f"error: there is no tool {name!r}"
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


def opening(system, prompt):
    """The initial messages of a chat."""
    begin = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(prompt, str):
        return [*begin, {"role": "user", "content": prompt}]
    return [*begin, *(message_to_wire(message) for message in prompt or [])]


def text_of(message):
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    raise ValueError(f"a message of role {message['role']} holds something else than text")


def plain(messages):
    """Roles and texts."""
    return [{"role": message["role"], "content": text_of(message)} for message in messages]


def same(one, other):
    """Whether two messages have the same content."""
    calls = [
        [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        for message in (one, other)
    ]
    return one["role"] == other["role"] and text_of(one) == text_of(other) and calls[0] == calls[1]


class ModelCall:
    """A request for a turn, and its answer."""

    def __init__(self, body):
        self.messages, self.tools = body["messages"], body.get("tools") or []
        self.answer = asyncio.get_running_loop().create_future()


class Run:
    """One episode of verifiers, in the loop of the service."""

    def __init__(self, service, task):
        self.requests = asyncio.Queue()
        self.traces = []
        self.now: ModelCall | None = None  # the request that waits for the policy
        self.episode = asyncio.create_task(self._play(service, task))

    async def _play(self, service, task):
        def begun(trace):
            self.traces.append(trace.id)
            service.runs[trace.id] = self

        context = vf.ModelContext(model="policy", client=service.client)
        try:
            return await service.env.run_episode(task, context, on_trace=begun)
        finally:
            for trace in self.traces:
                service.runs.pop(trace, None)

    async def next(self):
        """The next request, or None when the episode has ended."""
        waiting = asyncio.create_task(self.requests.get())
        await asyncio.wait({waiting, self.episode}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            self.now = waiting.result()
            return self.now
        waiting.cancel()
        self.now = None
        return None

    async def go_on(self, message):
        assert self.now is not None
        self.now.answer.set_result(message)
        return await self.next()

    async def end(self):
        self.episode.cancel()
        with contextlib.suppress(BaseException):
            await self.episode


class Service:
    """verifiers' environment, which runs in its own event loop, and the endpoint that serves as its model."""

    services: ClassVar[dict] = {}
    lock = threading.Lock()

    def __init__(self, config):
        self.runs, self.tasks = {}, []
        self.loop = asyncio.new_event_loop()
        self.failure = None
        self.ready = threading.Event()
        threading.Thread(target=self._serve, args=(config,), daemon=True).start()
        if not self.ready.wait(OPEN_S):
            raise TimeoutError(f"verifiers' environment was not served within {OPEN_S:g} s")
        if self.failure is not None:
            raise self.failure

    @classmethod
    def of(cls, config):
        key = json.dumps(config, sort_keys=True)
        with cls.lock:
            if key not in cls.services:
                cls.services[key] = cls(config)
            return cls.services[key]

    def wait(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def task(self, index):
        """The task with this number, modulo the number of tasks."""
        with self.lock:
            while len(self.tasks) <= index:
                task = next(self.stream, None)
                if task is None:
                    break
                self.tasks.append(task)
            if not self.tasks:
                raise ValueError("verifiers' taskset has no tasks")
            return self.tasks[index % len(self.tasks)]

    def has(self, index):
        """Whether there are more tasks than this."""
        self.task(index)
        return len(self.tasks) > index

    def written(self, index):
        """The initial messages of a task in the taskset."""
        data = self.task(index).data
        messages = opening(data.system_prompt, data.prompt)
        return plain(messages) if messages else []

    def first_request(self, index):
        """The first request of a task to its model."""
        run, request = self.wait(self.begin(self.task(index)))
        self.wait(run.end())
        if request is None:
            raise ValueError(f"task {index} of verifiers ends before it asks its model for anything")
        return request

    async def begin(self, task):
        run = Run(self, task)
        return run, await run.next()

    def _serve(self, config):
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._open(config))
        except BaseException as error:  # noqa: BLE001 - of the package, or of the user's environment
            self.failure = error
            self.ready.set()
            return
        self.ready.set()
        self.loop.run_forever()

    async def _open(self, config):
        self.env = load_environment(resolve_env_config(config))
        self.stream = iter(self.env.taskset)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1")
        self.serving = self.env.serving()
        await self.serving.__aenter__()

    async def _complete(self, http):
        body = json.loads(await http.read())
        run = self.runs.get(http.headers.get("X-Session-ID", ""))
        if run is None:
            return web.json_response({"error": {"message": "no episode is in progress"}}, status=404)
        if body.get("stream") or (body.get("n") or 1) != 1:
            error = {"message": "stream and n are not understood: one turn is generated at a time"}
            return web.json_response({"error": error}, status=400)
        request = ModelCall(body)
        run.requests.put_nowait(request)
        message = await request.answer
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        answer = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        }
        return web.json_response(answer)


def completed(config):
    """A configuration of `verifiers.v1` with a harness and a runtime that need only this machine."""
    completed_config = json.loads(json.dumps(config))
    if not completed_config.get("id"):  # verifiers' environment of one agent
        agent = completed_config.setdefault("agent", {})
        agent.setdefault("harness", {"id": os.path.splitext(os.path.basename(__file__))[0]})
        agent.setdefault("runtime", {"type": "subprocess"})
    return completed_config


class VerifiersTask:
    """One task as an environment of turns.

    Args:
        config: of verifiers' environment, such as {"taskset": {"id": "my_tasks"}}; paths: directories of modules.
    """

    def __init__(self, config, paths=()):
        for path in paths:
            if path not in sys.path:
                sys.path.insert(0, path)
                inherited = [path, os.environ.get("PYTHONPATH", "")]  # by servers of tools, which verifiers starts
                os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, inherited))
        sys.modules.setdefault(os.path.splitext(os.path.basename(__file__))[0], sys.modules[type(self).__module__])
        self.service = Service.of(completed(config))
        self.run: Run | None = None
        self.read = []

    @classmethod
    def describe(cls, count, **arguments):
        """Tools of the first task, and initial messages of the first tasks."""
        service = cls(**arguments).service
        first = service.first_request(0)
        prompts = [plain(first.messages)]
        is_as_written = prompts[0] == service.written(0)
        for index in range(1, count):
            if not service.has(index):
                break
            prompts.append(service.written(index) if is_as_written else plain(service.first_request(index).messages))
        return {"tools": [tool["function"] for tool in first.tools], "prompts": prompts[:count]}

    def reset(self, row, seed):
        task = self.service.task(int(row.get("index", row["prompt_id"])))
        self.run, request = self.service.wait(self.service.begin(task))
        if request is None:
            raise RuntimeError(f"the task ended before it asked for a turn: {self._fault()}")
        self.read = request.messages
        given = row.get("prompt_messages")
        self.is_chat = given is not None
        if given is not None and len(given) == len(self.read) and all(map(same, given, self.read)):
            return None  # already in the prompt
        if given is None and row.get("prompt_text") == as_text(self.read):
            return None
        return self._shown(self.read)

    def step(self, action):
        assert self.run is not None, "step comes after reset"
        message = {"role": "assistant", "content": action.text}
        calls = list(action.calls)
        if calls and all("name" in call for call in calls):  # an unreadable one is text
            functions = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in calls]
            message["tool_calls"] = [
                {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": f} for f in functions
            ]
        request = self.service.wait(self.run.go_on(message))
        if request is None:
            return self._ended()
        before = [*self.read, message]
        new = request.messages[len(before) :]
        if not new or not all(map(same, before, request.messages)) or any(m["role"] == "assistant" for m in new):
            raise RuntimeError(
                "verifiers' environment asks for a turn of a conversation that does not continue the last one: it "
                "has several agents, or its harness rewrites what was said"
            )
        self.read = request.messages
        return self._shown(new), 0.0, False, False, {}

    def close(self):
        if self.run is not None:
            self.service.wait(self.run.end())

    def _ended(self):
        assert self.run is not None
        episode = self.run.episode.result()
        if not episode.ok:
            raise RuntimeError(f"the episode failed: {self._fault()}")
        if len(episode.traces) != 1:
            raise RuntimeError(f"the episode has {len(episode.traces)} agents: environments of one are understood")
        trace = episode.traces[0]
        metrics = {name: value for name, value in trace.metrics.items() if isinstance(value, (int, float))}
        info = {"stop_condition": str(trace.stop_condition), **metrics}
        return None, float(trace.reward), not trace.is_truncated, bool(trace.is_truncated), info

    def _fault(self):
        assert self.run is not None
        episode = self.run.episode.result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return "; ".join(f"{error.type}: {error.message}" for error in errors)[:500] or "without an error"

    def _shown(self, messages):
        if self.is_chat:
            return plain(messages)
        return as_text(messages)


def as_text(messages):
    """Messages for a prompt that is not a chat."""
    return "".join(f"{text_of(message)}\n" for message in messages)
