"""Runs a unit test in a sandbox. The program's functions send each call to the program's process.

`job.json` has the test and the mark of the verdict. Only the text after the mark on standard output is a verdict: the
program's process does not know the mark.
"""

import builtins
import importlib
import json
import linecache
import os
import sys
import threading
import traceback
import types
from types import MappingProxyType

from verl.sandbox.unit_tests.values import Messages, NotPlain, decode, encode, overwrite


class ProgramEnded(BaseException):
    """The program's process has ended, or sent what is not an answer."""


class NeedsObjects(Exception):
    """Something other than a plain value would have to be exchanged."""


class JudgedProgram:
    """The program in the other process.

    Attributes:
        fault: why the test cannot pass, even if it catches the error: `ended`, `object: TYPE` or `exit`.
    """

    def __init__(self):
        self.fault = "fail"  # until a name of the program is used
        self._lock = threading.Lock()
        self._messages = Messages()

    def named(self, name):
        """The function or a copy of the value that the program defines by a name.

        Raises:
            KeyError: it defines no such name, or imports a module of Python by it.
        """
        description = self._ask({"name": name})[0]
        if "missing" in description or (name in sys.stdlib_module_names and "object" in description):
            raise KeyError(name)
        if "object" in description:
            self._give_up(str(description["object"]))
        self.fault = None if self.fault == "fail" else self.fault
        if "value" in description:
            return decode(description["value"])

        def call(*args, **kwargs):
            return self._call(name, args, kwargs)

        call.__name__ = call.__qualname__ = name
        return call

    def _call(self, name, args, kwargs):
        try:
            request = {"call": name, "args": encode(list(args)), "kwargs": {x: encode(y) for x, y in kwargs.items()}}
        except (NotPlain, RecursionError) as error:
            self._give_up(f"an argument of type {error}")
        reply, result, error = self._ask(request, args, kwargs)
        sys.stdout.write(reply.get("printed", ""))
        if "object" in reply:
            self._give_up(str(reply["object"]))
        if error is not None:
            if not isinstance(error, Exception):
                self.fault = self.fault or "exit"
            raise error
        return result

    def _ask(self, request, args=(), kwargs=MappingProxyType({})):
        """The answer, with the result and the exception that it holds; changes arguments as the program did."""
        try:
            with self._lock:
                self._messages.send(request)
                reply = self._messages.receive()
            for argument, changed in zip(args, decode(reply.get("args", []))):
                overwrite(argument, changed)
            for key, changed in reply.get("kwargs", {}).items():
                overwrite(kwargs[key], decode(changed))
            return reply, decode(reply.get("result")), exception_of(reply["error"]) if "error" in reply else None
        except Exception:  # noqa: BLE001  whatever it sent, the program is at fault
            self.fault = "ended"
            raise ProgramEnded from None

    def _give_up(self, what):
        self.fault = f"object: {what}"
        raise NeedsObjects(what)


def exception_of(reply):
    """The exception that the program raised, of the nearest class that Python itself defines."""
    kinds = [getattr(builtins, str(name), None) for name in reply["kinds"]]
    kind = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseException)), RuntimeError)
    try:
        return kind(*decode(reply["args"]))
    except Exception:  # noqa: BLE001  classes that take other arguments
        return RuntimeError(str(reply["text"]))


class Names(dict):
    """Global names of a test. Those that neither it nor Python defines are the program's, or modules of Python that it
    uses without an import, as programs often import them for it."""

    def __init__(self, program):
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._program = program

    def __missing__(self, name):
        if hasattr(builtins, name):  # not the program's: it could replace what the test relies on
            raise KeyError(name)
        try:
            return self._program.named(name)
        except KeyError:
            if name not in sys.stdlib_module_names:
                raise
            return importlib.import_module(name)


class Solution(types.ModuleType):
    """The module `solution`, which a test may import."""

    def __init__(self, program):
        super().__init__("solution")
        self._program = program

    def __getattr__(self, name):
        try:
            return self._program.named(name)
        except KeyError:
            raise AttributeError(name) from None


class Main(types.ModuleType):
    """The module `__main__`, in which `unittest.main()` looks for the tests."""

    def __init__(self, names):
        super().__init__("__main__")
        self._names = names

    def __dir__(self):
        return [name for name in self._names if not name.startswith("__")]

    def __getattr__(self, name):
        if name in self._names:
            return self._names[name]
        raise AttributeError(name)


def judged(test):
    """Run one test; returns `pass`, or why it did not pass."""
    program = JudgedProgram()
    names = Names(program)
    sys.modules["__main__"], sys.modules["solution"] = Main(names), Solution(program)
    sys.argv = ["test.py"]
    linecache.cache["test.py"] = (0, None, test.splitlines(True), "test.py")
    try:
        exec(compile(test, "test.py", "exec"), names)
    except SystemExit as error:  # how `unittest.main()` ends
        if error.code:
            return program.fault or "fail"
    except BaseException as error:  # noqa: BLE001
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        if program.fault in (None, "fail"):
            return "memory" if isinstance(error, MemoryError) else "error"
    return program.fault or "pass"


def main():
    with open("job.json", encoding="utf-8") as file:
        job = json.load(file)
    verdict = judged(job["test"])
    sys.stdout.flush()
    os.write(1, (job["mark"] + verdict).encode("utf-8", "backslashreplace"))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
