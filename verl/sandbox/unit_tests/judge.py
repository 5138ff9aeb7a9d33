"""Runs unit tests in a sandbox. The program's names are functions that send a call to the program's process.

`job.json` has the mark of the verdict, and either one test, or several to try without a program. Only the text after
the mark on standard output is a verdict: the program's process does not know the mark.
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

    def __init__(self, names):
        self.fault = None
        self._names = names  # others that it sends are not taken: they could replace what the test itself uses
        self._lock = threading.Lock()
        self._spaces = []
        try:
            self._messages = Messages()
            self._messages.send({"names": names})
            self._found = self._messages.receive()["found"]
        except Exception:  # noqa: BLE001
            self.fault, self._found = "ended", {}

    def fill(self, *spaces):
        """Put the names of the program into dicts, and keep those of values up to date."""
        self._spaces = spaces
        self._update(self._found)

    def _update(self, found):
        for name in self._names:
            description = found.get(name, {})
            if "object" in description:
                self.fault = f"object: {description['object']}"
            if "callable" in description:
                value = self._function(name)
            elif "value" in description:
                value = decode(description["value"])
            else:
                continue
            for space in self._spaces:
                space[name] = value

    def _function(self, name):
        def call(*args, **kwargs):
            return self._call(name, args, kwargs)

        call.__name__ = call.__qualname__ = name
        return call

    def _call(self, name, args, kwargs):
        try:
            request = {"call": name, "args": encode(list(args)), "kwargs": {x: encode(y) for x, y in kwargs.items()}}
        except (NotPlain, RecursionError) as error:
            self._give_up(f"an argument of type {error}")
        with self._lock:
            reply, result, error = self._reply(request, args, kwargs)
        sys.stdout.write(reply.get("printed", ""))
        if "object" in reply:
            self._give_up(str(reply["object"]))
        if error is not None:
            if not isinstance(error, Exception):
                self.fault = self.fault or "exit"
            raise error
        return result

    def _reply(self, request, args, kwargs):
        try:
            self._messages.send(request)
            reply = self._messages.receive()
            for argument, changed in zip(args, decode(reply.get("args", []))):
                overwrite(argument, changed)
            for key, changed in reply.get("kwargs", {}).items():
                overwrite(kwargs[key], decode(changed))
            self._update(reply["found"])
            error = exception_of(reply["error"]) if "error" in reply else None
            return reply, decode(reply.get("result")), error
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


def prepared(test):
    """The module `__main__` in which a test runs, and the module `solution` that it may import."""
    main, solution = types.ModuleType("__main__"), types.ModuleType("solution")
    sys.modules["__main__"], sys.modules["solution"] = main, solution
    sys.argv = ["test.py"]
    linecache.cache["test.py"] = (0, None, test["code"].splitlines(True), "test.py")
    for name in test["modules"]:
        vars(main)[name] = importlib.import_module(name)
    return vars(main), vars(solution)


def judged(test):
    """Run one test; returns `pass`, or why it did not pass."""
    program = JudgedProgram(test["names"])
    main, solution = prepared(test)
    program.fill(main, solution)
    if program.fault is not None:
        return program.fault
    try:
        exec(compile(test["code"], "test.py", "exec"), main)
    except SystemExit as error:  # how `unittest.main()` ends
        if error.code:
            return program.fault or "fail"
    except BaseException as error:  # noqa: BLE001
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        return program.fault or ("memory" if isinstance(error, MemoryError) else "error")
    return program.fault or "pass"


def tried(test):
    """Run a test up to its first call of the program; returns `called`, or what is wrong with the test."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        report = _try(test, writer)
        os.write(writer, report.encode("utf-8", "backslashreplace"))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read().decode()
    os.waitpid(child, 0)
    return text or "its process ends before a call of the program"


def _try(test, writer):
    def call(*args, **kwargs):
        report = "called"
        try:
            encode([list(args), kwargs])
        except (NotPlain, RecursionError) as error:
            report = f"object: passes an argument of type {error}"
        os.write(writer, report.encode())
        os._exit(0)

    main, solution = prepared(test)
    for name in test["names"]:
        main[name] = solution[name] = call
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
    except PermissionError:  # some machines give the user of a jail no /dev/null to write to
        quiet = os.open("quiet", os.O_WRONLY | os.O_CREAT)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        exec(compile(test["code"], "test.py", "exec"), main)
    except (AssertionError, TypeError, AttributeError):
        return "called"  # it may use a name of the program that is no function
    except BaseException as error:  # noqa: BLE001
        return f"before a call of the program it raises {type(error).__name__}: {str(error)[:200]}"
    return "it ends without a call of the program" if test["called"] else "called"


def main():
    with open("job.json", encoding="utf-8") as file:
        job = json.load(file)
    verdict = json.dumps([tried(test) for test in job["tests"]]) if "tests" in job else judged(job["test"])
    sys.stdout.flush()
    os.write(1, (job["mark"] + verdict).encode("utf-8", "backslashreplace"))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
