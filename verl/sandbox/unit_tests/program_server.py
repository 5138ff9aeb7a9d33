"""Runs a program, `solution.py`, in a sandbox and answers what the judge of its test asks.

    judge -> {"name": name}                      this process -> {"missing" | "callable" | "value" | "object"}
    judge -> {"call": name, "args", "kwargs"}
        this process -> {"result" | "error" | "object", "args", "kwargs", "printed"}

Nothing here is protected from the program, and need not be: all that the judge takes from this process are values.
"""

import contextlib
import importlib
import io
import os

from verl.sandbox.unit_tests.values import Messages, NotPlain, decode, encode


def described(module, name):
    """A name of the program: missing, a callable, a value, or an object that cannot be sent."""
    if not hasattr(module, name):
        return {"missing": True}
    value = getattr(module, name)
    if callable(value):
        return {"callable": True}
    try:
        return {"value": encode(value)}
    except (NotPlain, RecursionError):
        return {"object": type(value).__name__}


def called(module, request):
    """Call a function of the program."""
    args = decode(request["args"])
    kwargs = {key: decode(value) for key, value in request["kwargs"].items()}
    printed, reply = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        try:
            result = getattr(module, request["call"])(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001  the test may expect it
            reply["error"] = raised(error)
        else:
            try:
                reply["result"] = encode(result)
            except (NotPlain, RecursionError):
                reply["object"] = type(result).__name__
    reply["printed"] = printed.getvalue()
    try:
        reply["args"], reply["kwargs"] = encode(args), {key: encode(value) for key, value in kwargs.items()}
    except (NotPlain, RecursionError):
        reply["object"] = "an argument that was changed"
    return reply


def raised(error):
    """An exception, by the names of its classes, its arguments and its text."""
    try:
        args = encode(list(error.args))
    except (NotPlain, RecursionError):
        args = None
    return {"kinds": [kind.__name__ for kind in type(error).__mro__], "args": args, "text": str(error)}


def serve():
    messages = Messages()
    module = importlib.import_module("solution")
    while True:
        try:
            request = messages.receive()
        except EOFError:
            os._exit(0)  # the test has ended; threads of the program are not waited for
        messages.send(described(module, request["name"]) if "name" in request else called(module, request))


if __name__ == "__main__":
    serve()
