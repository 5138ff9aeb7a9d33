"""The process that runs environments, controlled by JSON messages over its standard input. Standard library only,
except that tools need pydantic.

    {"id": 7, "op": "step", "env": 3, "action": {"text": "..."}}
        ──> {"id": 7, "value": {...}}    {"id": 7, "error": "...", "trace": "...", "kind": "infra"}

Each environment has its own thread, so one that hangs does not block the others. The standard input of an environment
is empty.
"""

import asyncio
import base64
import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import io
import json
import os
import queue
import socket
import sys
import sysconfig
import threading
import traceback
from typing import Any

STEP = ("observation", "reward", "terminated", "truncated", "info")
LARGEST = 3.4028234663852886e38  # rewards are stored as float32
MAX_REPLY = 8 << 20  # characters
MAX_TRACE = 8000  # characters
OWN_FILES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), os.path.dirname(os.path.abspath(__file__)))


class BadAnswer(TypeError):
    """A method of an environment returned an invalid value."""


class HostedAction:
    """One turn of the model: its `text`, its tool `calls`, and a `call_id`, which is the same if the turn is
    repeated."""

    def __init__(self, text, calls=(), call_id=""):
        self.text, self.calls, self.call_id = text, calls, call_id

    def __str__(self):
        return self.text


class Replies:
    """The connection to the trainer, which is standard input; one message at a time."""

    def __init__(self):
        path = os.path.join(os.path.dirname(__file__), "../../utils/child_process/channel.py")
        spec = importlib.util.spec_from_file_location("_verl_channel", path)
        assert spec is not None, path
        assert spec.loader is not None, path
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.channel = module.Channel(socket.socket(fileno=os.dup(0)), stuck_s=None, codec=module.JSONMessages)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = sys.stderr  # an environment may close the other one
        self.lock = threading.Lock()
        self.process = os.getpid()

    def send(self, reply):
        if os.getpid() != self.process:  # a fork made by an environment, which has returned
            os._exit(0)
        try:
            size = len(json.dumps(reply))
            if size > MAX_REPLY:
                error = f"the answer has {size >> 20} MiB, and {MAX_REPLY >> 20} may pass"
                reply = {"id": reply.get("id"), "error": error, "kind": "infra"}
        except Exception as error:  # noqa: BLE001 - of values of the user
            reply = {"id": reply.get("id"), "error": f"no JSON: {text_of(error)}", "kind": "infra"}
        try:
            with self.lock:
                self.channel.send(reply)
        except Exception:  # noqa: BLE001 - the trainer is gone, or the environment has closed the connection
            os._exit(1)


# Answers


def as_number(value) -> Any:
    """A NumPy or torch scalar as bool, int or float; anything else unchanged."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def as_reward(value, method="step"):
    """A reward as a float.

    Raises:
        BadAnswer: the value is not a finite number in the range of float32. True and False are 1 and 0.
    """
    number = as_number(value)
    if isinstance(number, (bool, int, float)) and abs(number) <= LARGEST:
        return float(number)
    raise BadAnswer(f"{method} gave the reward {shown(value)}: expected a finite number")


def as_flag(value, name):
    flag = as_number(value)
    if isinstance(flag, bool):
        return flag
    raise BadAnswer(f"step gave {name} = {shown(value)}: expected True or False")


def as_observation(value, method):
    """The observation with plain `str` texts, and each image as a data URL.

    Raises:
        BadAnswer: it is not a text, list of chat messages or None, or has a text that is not valid Unicode.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return as_text(value, method)
    if isinstance(value, (list, tuple)) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), (str, list, tuple))
        for m in value
    ):
        return [{**m, "role": as_text(m["role"], method), "content": as_content(m["content"], method)} for m in value]
    raise BadAnswer(
        f"{method} gave an observation of type {type(value).__name__}: expected a text, chat messages or None"
    )


def as_content(value, method) -> Any:
    """The content of a message: a text, or a list of parts `{"type": "text", "text": ...}` and `{"type": "image",
    "image": ...}`, each image a data URL.

    Args:
        value: a text, an image of Pillow, or a list of these and of such parts, in which an image may also be the bytes
            or the path of a file.
    Raises:
        BadAnswer: it is something else, or an image cannot be read.
    """
    if isinstance(value, str):
        return as_text(value, method)
    return [as_part(part, method) for part in (value if isinstance(value, (list, tuple)) else [value])] or ""


def as_part(part, method):
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind == "text" else part
    if isinstance(text, str):
        return {"type": "text", "text": as_text(text, method)}
    try:
        return {"type": "image", "image": data_url(part.get("image") if kind == "image" else part)}
    except Exception as error:  # noqa: BLE001 - of Pillow, or of the file
        raise BadAnswer(f"{method} gave {shown(part)} for a text or an image: {text_of(error)}") from None


def data_url(image):
    if hasattr(image, "getexif"):
        image.save(content := io.BytesIO(), "PNG")
        data = content.getvalue()
    elif isinstance(image, str) and image.startswith("data:"):
        return image
    elif isinstance(image, (str, os.PathLike)):
        with open(image, "rb") as file:
            data = file.read()
    else:
        data = image
    return f"data:image/*;base64,{base64.b64encode(data).decode()}"


def as_text(value, method):
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadAnswer(f"{method} gave a text that is not valid Unicode: {error}") from None
    return text


def as_step(result):
    """The return value of `step` as a mapping of its five parts.

    Raises:
        BadAnswer: it has another form, or a part has another type.
    """
    expected = "expected (observation, reward, terminated, truncated, info)"
    if isinstance(result, tuple):
        if len(result) != len(STEP):
            raise BadAnswer(f"step gave a tuple of {len(result)}: {expected}")
        result = dict(zip(STEP, result))
    elif not isinstance(result, dict) and hasattr(result, "terminated"):
        result = {name: getattr(result, name) for name in STEP if hasattr(result, name)}
    if not isinstance(result, dict):
        raise BadAnswer(f"step gave {type(result).__name__}: {expected}")
    if missing := [name for name in STEP[:3] if name not in result]:
        raise BadAnswer(f"step gave no {missing[0]}: {expected}")
    info = result.get("info")
    if info is not None and not isinstance(info, dict):
        raise BadAnswer(f"step gave info = {shown(info)}: expected a dict")
    step = {
        "observation": as_observation(result["observation"], "step"),
        "reward": as_reward(result["reward"]),
        "terminated": as_flag(result["terminated"], "terminated"),
        "truncated": as_flag(result.get("truncated", False), "truncated"),
        "info": info or {},
    }
    if step["observation"] is None and not (step["terminated"] or step["truncated"]):
        raise BadAnswer("step gave no observation, and the episode continues")
    return step


def shown(value):
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - code of the user
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


# Failures


def text_of(error):
    """Type and message of an exception."""
    try:
        return f"{type(error).__name__}: {error}"[:2000]
    except BaseException:  # noqa: BLE001 - code of the user
        return f"{type(error).__name__}, whose message cannot be read"


def failure(error, method):
    """The part of a reply that describes an exception: message, line of the user's file, and traceback.

    Args:
        method: name of the called method; None while a file is loaded.
    """
    if isinstance(error, BadAnswer):
        return {"error": f"{error}, {defined_at(method)}", "trace": "", "kind": "infra"}
    try:
        begin = error.__traceback__
        while begin is not None and begin.tb_frame.f_code.co_filename == __file__:
            begin = begin.tb_next
        frames = traceback.extract_tb(begin)
        user_frames = [frame for frame in frames if not frame.filename.startswith((*OWN_FILES, "<"))] or frames
        last = user_frames[-1] if user_frames else None
        where = f", at line {last.lineno} of {last.filename}, in {last.name}()" if last else ""
        trace = "".join(traceback.format_exception(type(error), error, begin)) if last else ""
        if len(trace) > MAX_TRACE:
            trace = f"{trace[: MAX_TRACE // 2]}\n...\n{trace[-MAX_TRACE // 2 :]}"
    except BaseException:  # noqa: BLE001 - the exception is the user's
        where = trace = ""
    return {"error": text_of(error) + where, "trace": trace, "kind": "infra"}


def defined_at(method):
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    name = getattr(method, "__qualname__", type(method).__name__)
    return f"{name}() at line {code.co_firstlineno} of {code.co_filename}" if code is not None else f"{name}()"


def located(path) -> Any:
    """Import the class of `file.py:Name` or `module:Name`, or the module if no name is given."""
    source, _, name = path.rpartition(":") if ":" in os.path.basename(path) else (path, "", "")
    if source.endswith(".py"):
        source = os.path.abspath(source)
        directory = os.path.dirname(source)
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
    if not name:
        return module
    if not hasattr(module, name):
        names = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise TypeError(f"{source} has no {name}. It has: {', '.join(names) or 'nothing'}")
    return getattr(module, name)


def checked_class(path, arguments):
    """The class of environments.

    Raises:
        TypeError: it is not a class, lacks a method, or does not accept the arguments that are passed.
    """
    kind = located(path)
    if not isinstance(kind, type):
        raise TypeError(f"{path} is {shown(kind)}: expected a class")
    missing = [name for name in ("reset", "step") if not callable(getattr(kind, name, None))]
    if missing:
        raise TypeError(f"{path} has no {' and no '.join(missing)}")
    calls = [("__init__", (), arguments), ("reset", ("row", "seed"), {}), ("step", ("action",), {})]
    for name, positional, named in calls:
        method = inspect.getattr_static(kind, name)
        if inspect.isfunction(method):
            try:
                inspect.signature(method).bind("self", *positional, **named)
            except TypeError as error:
                called_with = ", ".join([*positional, *(f"{key}=" for key in named)])
                text = f"is called with ({called_with}): {error}"
                raise TypeError(f"{kind.__name__}.{name} {text}, {defined_at(method)}") from None
    return kind


def settled(loop, found):
    return loop.run_until_complete(found) if inspect.isawaitable(found) else found


class World:
    """One environment and its thread."""

    def __init__(self, make, replies, number):
        self.make, self.replies, self.inbox = make, replies, queue.SimpleQueue()
        threading.Thread(target=self.run, name=f"env {number}", daemon=True).start()

    def run(self):
        loop, environment = asyncio.new_event_loop(), None
        while True:
            request = self.inbox.get()
            op, method = request["op"], None
            reply = {"id": request["id"]}
            try:
                if op == "reset":
                    environment = self.make()
                    method = environment.reset
                    reply["value"] = as_observation(settled(loop, method(request["row"], request["seed"])), "reset")
                elif op == "step":
                    assert environment is not None, "step comes after reset"
                    method = environment.step
                    reply["value"] = as_step(settled(loop, method(HostedAction(**request["action"]))))
                    info = reply["value"]["info"].items()
                    reply["value"]["info"] = {k: v for k, v in info if isinstance(v, (str, int, float, bool))}
                else:
                    if environment is not None and hasattr(environment, "close"):
                        settled(loop, environment.close())
                    reply["value"] = None
            except BaseException as error:  # noqa: BLE001 - code of the user
                reply.update(failure(error, method))
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
    tools = {
        name: PythonTool(x, name)
        for name, x in vars(module).items()
        if inspect.isfunction(x) and not name.startswith("_") and x.__module__ == module.__name__
    }
    if not tools:
        raise TypeError(f"{module.__name__} has no public function")
    return tools


def recovery_of(source):
    """Kind of recovery that a class or a file of tools declares: stateless, deterministic or restart."""
    declared = getattr(source, "recovery", None)
    return None if declared is None else str(declared)


async def awaited(found):
    return await found


def call_tool(function, request, replies):
    reply = {"id": request["id"]}
    try:
        result = function(**request["arguments"])
        result = asyncio.run(awaited(result)) if inspect.isawaitable(result) else result
        reply["value"] = as_content(result, request["name"])
    except (ConnectionError, TimeoutError, MemoryError) as error:
        reply.update(failure(error, function))
    except BaseException as error:  # noqa: BLE001 - code of the user
        reply |= {"error": text_of(error), "kind": "tool"}
    replies.send(reply)


def opened(options) -> Any:
    """The requested tools or environment class, and the first reply."""
    arguments = options.get("arguments", {})
    if options["kind"] == "tools":
        module = located(options["path"])
        functions = tools_of(module)
        schemas = [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in functions.values()
        ]
        return functions, {"value": schemas, "recovery": recovery_of(module), "file": module.__file__}
    kind = checked_class(options["path"], arguments)
    if options.get("try"):  # as the first episode would, but before the weights of a run are loaded
        environment = kind(**arguments)
        if options["try"] == "reset":
            environment.reset({"prompt_text": "", "prompt_id": 0, "index": 0}, 0)
    described = kind.describe(options["describe"], **arguments) if "describe" in options else None
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind, {"value": described, "recovery": recovery_of(kind), "file": file}


def serve():
    """Answer requests until the trainer closes the connection."""
    replies = Replies()
    options = replies.channel.receive()
    try:
        source, reply = opened(options)
    except BaseException as error:  # noqa: BLE001 - code of the user
        replies.send(failure(error, None))
        return
    replies.send(reply)
    worlds = {}
    while True:
        request = replies.channel.receive()
        if request["op"] == "call":
            arguments = source[request["name"]], request, replies
            threading.Thread(target=call_tool, args=arguments, daemon=True).start()
            continue
        number = request["env"]
        if number not in worlds:
            worlds[number] = World(lambda: source(**options.get("arguments", {})), replies, number)
        worlds[number].inbox.put(request)
        if request["op"] == "close":
            del worlds[number]


if __name__ == "__main__":
    faulthandler.enable()
    with contextlib.suppress(ConnectionError):  # the trainer is gone
        serve()
    os._exit(0)  # hanging threads must not keep the process alive
