"""The process that runs environments: requests as JSON lines on stdin, replies on stdout; standard library only, except
that tools need pydantic.

    {"id": 7, "op": "step", "env": 3, "action": {"text": "..."}}   ──>   {"id": 7, "value": {...}}
                                                                  or    {"id": 7, "error": "...", "kind": "infra"}

Each environment has its own thread, so one that hangs does not block the others. Output of an environment goes to
stderr.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import queue
import sys
import threading
from typing import Any

STEP = ("observation", "reward", "terminated", "truncated", "info")
MAX_REPLY = 8 << 20  # characters


class HostedAction:
    """One turn of the model: its `text`, its tool `calls`, and a `call_id`, which is the same if the turn is
    repeated."""

    def __init__(self, text, calls=(), call_id=""):
        self.text, self.calls, self.call_id = text, calls, call_id

    def __str__(self):
        return self.text


class Replies:
    """The pipe to the trainer, one line at a time."""

    def __init__(self):
        self.file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what is printed must not stand between replies
        sys.stdout = sys.stderr
        self.lock = threading.Lock()

    def send(self, reply):
        try:
            line = json.dumps(reply)
        except (TypeError, ValueError) as error:
            line = json.dumps({"id": reply.get("id"), "error": f"no JSON: {error}", "kind": "infra"})
        if len(line) > MAX_REPLY:
            size = f"the answer has {len(line) >> 20} MiB, and {MAX_REPLY >> 20} may pass"
            line = json.dumps({"id": reply.get("id"), "error": size, "kind": "infra"})
        with self.lock:
            self.file.write(line + "\n")
            self.file.flush()


def located(path) -> Any:
    """Import the class of `file.py:Name` or `module:Name`, or the module if no name is given."""
    source, _, name = path.rpartition(":") if ":" in os.path.basename(path) else (path, "", "")
    if source.endswith(".py"):
        directory = os.path.dirname(os.path.abspath(source))
        if directory not in sys.path:
            sys.path.insert(0, directory)
        spec = importlib.util.spec_from_file_location(os.path.basename(source)[:-3], source)
        assert spec is not None, source
        assert spec.loader is not None, source
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(source)
    return getattr(module, name) if name else module


def settled(loop, found):
    return loop.run_until_complete(found) if inspect.isawaitable(found) else found


def as_reply(found):
    """The return value of `step` as a JSON object."""
    if isinstance(found, tuple) and len(found) == 5:
        found = dict(zip(STEP, found))
    elif not isinstance(found, dict) and hasattr(found, "terminated"):
        found = {name: getattr(found, name, None) for name in STEP}
    if not isinstance(found, dict):
        raise TypeError(
            f"step gave {type(found).__name__}: expected (observation, reward, terminated, truncated, info)"
        )
    for name in ("reward", "terminated", "truncated"):
        value = found.get(name)
        if value is not None and hasattr(value, "item"):
            found[name] = value.item()
    found["info"] = {k: v for k, v in (found.get("info") or {}).items() if isinstance(v, (str, int, float, bool))}
    return found


class World:
    """One environment and its thread."""

    def __init__(self, make, replies):
        self.make, self.replies = make, replies
        self.inbox = queue.SimpleQueue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        loop, environment = asyncio.new_event_loop(), None
        while True:
            request = self.inbox.get()
            op = request["op"]
            reply = {"id": request["id"]}
            try:
                if op == "reset":
                    environment = self.make()
                    reply["value"] = settled(loop, environment.reset(request["row"], request["seed"]))
                elif op == "step":
                    assert environment is not None, "step comes after reset"
                    action = HostedAction(**request["action"])
                    reply["value"] = as_reply(settled(loop, environment.step(action)))
                else:
                    if environment is not None and hasattr(environment, "close"):
                        settled(loop, environment.close())
                    reply["value"] = None
            except BaseException as error:  # noqa: BLE001 - code of the user
                reply |= {"error": f"{type(error).__name__}: {error}"[:2000], "kind": "infra"}
            self.replies.send(reply)
            if op == "close":
                loop.close()
                return


def tools_of(module):
    """The public functions of a module by name, each a `PythonTool`."""
    try:
        from python_tools import PythonTool
    except ImportError as error:
        raise RuntimeError(f"tools need the package pydantic in {sys.executable} ({error})") from error
    found = {
        name: PythonTool(x, name)
        for name, x in vars(module).items()
        if inspect.isfunction(x) and not name.startswith("_") and x.__module__ == module.__name__
    }
    if not found:
        raise TypeError(f"{module.__name__} has no public function")
    return found


def recovery_of(source):
    """How a class, or a file of tools, says that its state is restored: stateless, deterministic or restart."""
    found = getattr(source, "recovery", None)
    return None if found is None else str(found)


async def awaited(found):
    return await found


def call_tool(function, request, replies):
    reply = {"id": request["id"]}
    try:
        found = function(**request["arguments"])
        reply["value"] = asyncio.run(awaited(found)) if inspect.isawaitable(found) else found
    except (ConnectionError, TimeoutError, MemoryError) as error:
        reply |= {"error": f"{type(error).__name__}: {error}"[:2000], "kind": "infra"}
    except BaseException as error:  # noqa: BLE001 - code of the user
        reply |= {"error": f"{type(error).__name__}: {error}"[:2000], "kind": "tool"}
    replies.send(reply)


def main():
    replies = Replies()
    options = json.loads(sys.stdin.readline())
    functions: dict = {}
    kind: Any = None
    try:
        if options["kind"] == "tools":
            module = located(options["path"])
            functions = tools_of(module)
            schemas = [
                {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
                for tool in functions.values()
            ]
            replies.send({"id": 0, "value": schemas, "recovery": recovery_of(module)})
        else:
            kind = located(options["path"])
            missing = [name for name in ("reset", "step") if not hasattr(kind, name)]
            if missing:
                raise TypeError(f"{options['path']} has no {' and no '.join(missing)}")
            arguments = options.get("arguments", {})
            described = kind.describe(options.get("describe", 0), **arguments) if hasattr(kind, "describe") else None
            replies.send({"id": 0, "value": described, "recovery": recovery_of(kind)})
    except BaseException as error:  # noqa: BLE001 - code of the user
        replies.send({"id": 0, "error": f"{type(error).__name__}: {error}"[:2000], "kind": "infra"})
        return
    worlds = {}
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "call":
            function = functions[request["name"]]
            threading.Thread(target=call_tool, args=(function, request, replies), daemon=True).start()
            continue
        if request["env"] not in worlds:
            worlds[request["env"]] = World(lambda: kind(**options.get("arguments", {})), replies)
        worlds[request["env"]].inbox.put(request)
        if request["op"] == "close":
            del worlds[request["env"]]


if __name__ == "__main__":
    main()
    os._exit(0)  # threads that hang must not keep it
