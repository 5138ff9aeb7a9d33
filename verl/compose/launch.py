"""Entry point of `verl ppo` and `verl sft`: command line, torchrun, run directory, logging, and the clean end of a run.

arguments -> aliases and checks of the command line -> Hydra -> LaunchedRun -> main(run)

    torchrun --nproc_per_node=2 -m verl.cli ppo sharding=fsdp   is   verl ppo sharding=fsdp trainer.n_gpus_per_node=2

The driver starts its workers itself: under torchrun on one host the first process drives, and the others exit. On
several hosts (`torchrun --nnodes=2 ...`) the others stay and have a worker each, `verl.cluster.hosts`.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl import errors
from verl.component import BuildContext
from verl.compose import schema
from verl.compose.command_line import PRINTS_ONLY, SHOWS_ONLY, command_line, composition_faults, swept_paths
from verl.compose.overrides import Overrides
from verl.compose.print_config import print_start, remove_refused, save_config
from verl.compose.schema import conf_dir
from verl.errors import CheckpointError, ConfigError, StorageError, VerlError, WorkerError
from verl.tracking.console import reader_may_leave, set_command, shown_path
from verl.tracking.logging_setup import IN_RUN_LOG, setup_logging
from verl.utils import torchrun
from verl.utils.component_exits import component_exits
from verl.utils.kernel_cache import set_kernel_cache
from verl.utils.progress import report_to_starter
from verl.utils.redact import redact
from verl.utils.signals import Terminated, orderly_termination

if TYPE_CHECKING:
    from rich.console import Console


COUNT, HOSTS = "trainer.n_gpus_per_node", "trainer.nnodes"


def take_over(arguments: list[str], assigned: Overrides) -> None:
    """Let the run have as many processes as torchrun has started, and forget the places that it gave them.

    Args:
        arguments: for Hydra; the numbers of hosts and of processes are added to them.
    Raises:
        ConfigError: there are not equally many processes on all hosts.
    """
    (count, here), place = torchrun.counts(), torchrun.place()
    hosts = 1 if place is None else place.num_hosts
    if count != here * hosts:
        raise ConfigError(
            f"torchrun has started {count} processes on {hosts} hosts, {here} of them on this one: every host needs as "
            "many. Start each with the same --nproc_per_node."
        )
    torchrun.join_hosts(place)
    torchrun.forget()
    if count == 1:
        return
    on_hosts = f" on {hosts} hosts" if hosts > 1 else ""
    for key, number in ((COUNT, here), (HOSTS, hosts)):
        wanted = [str(value) for name, value in assigned.values if name == key]
        if wanted[-1:] == [str(number)] or (key == HOSTS and hosts == 1):
            continue
        if wanted:
            told = f"torchrun has started {count} processes{on_hosts}"
            assigned.faults.append(f"{key} is {wanted[-1]}: {told}. Leave it out.")
        else:
            assigned.notes.append(f"torchrun has started {count} processes{on_hosts}: {key}={number}")
            arguments.append(f"++{key}={number}")


INTERRUPTED, TERMINATED = 130, 143  # 128 and the number of the signal, as shells have it
THREADS_TIMEOUT_S = 10.0  # of threads, once the run is over


@dataclass
class LaunchedRun:
    """One run as composed from the command line.

    Attributes:
        config: the composed root.
        root, choices: `ppo` or `sft`, and the option of every group.
        overrides: what was assigned on the command line.
        faults: found on the command line, to be reported with those of the check.
        run_dir: where the run writes.
        name: of this job of a sweep, or empty.
        console: standard output.
        closing: what ends with the run.
        swept: configuration paths that the sweep varies.
    """

    config: DictConfig
    root: str
    choices: Mapping[str, str | None]
    run_dir: Path
    console: Console
    name: str = ""
    overrides: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    closing: ExitStack = field(default_factory=ExitStack)
    is_recorded: bool = False
    is_new: bool = False
    swept: tuple[str, ...] = ()

    @property
    def context(self) -> BuildContext:
        """What the trainer is built in."""
        return BuildContext(run_dir=self.run_dir, job=self.name, swept=self.swept)

    def record(self) -> None:
        """Print what differs from the defaults and where the run writes, save the configuration there, without secrets,
        and log to run.log from here on. A run that is refused later leaves nothing of it."""
        print_start(self.config, self.root, self.choices, self.run_dir, self.console)
        self.is_recorded = True
        self.is_new = not self.run_dir.exists() or not any(self.run_dir.iterdir())
        save_config(self.config, self.overrides, self.run_dir)
        self.closing.callback(setup_logging(self.run_dir))

    def withdraw(self) -> None:
        """Remove what `record` and a refused build have written, where nothing else is there."""
        if self.is_new:
            remove_refused(self.run_dir)


def entry_point(root: str) -> Callable[[Callable[[LaunchedRun], Any]], Callable[[], None]]:
    """Make `main(job)` a command: `root` names the configuration, `ppo` or `sft`.

    A fault in the configuration prints as a list and ends with status 2, Ctrl-C with 130, SIGTERM with 143, any other
    error with what it says and 1; an `exit()` of a component is such an error, whatever status it asks for. One
    traceback follows where the message alone does not lead to the line; run.log has all of them.
    """

    def decorate(main: Callable[[LaunchedRun], Any]) -> Callable[[], None]:
        @functools.wraps(main)
        def command() -> None:
            if torchrun.number() > 0:  # the first one drives
                _serve_driver_elsewhere()
                return
            report_to_starter()
            with _without_threads(), _clean_end(), orderly_termination(), _hosts_told():
                set_kernel_cache()
                schema.register()
                sys.path.append(str(Path.cwd()))  # a user's own modules lie where the user stands
                script, given, count = sys.argv[0], sys.argv[1:], torchrun.counts()[0]
                arguments, assigned = command_line(root, given)
                set_command([*start_message(script, count), *given])
                take_over(arguments, assigned)
                for note in assigned.notes:
                    _tell(note)
                if assigned.faults and any(a.partition("=")[0] in SHOWS_ONLY for a in arguments):
                    raise ConfigError(assigned.faults)
                sys.argv[1:] = arguments
                only_shows = any(argument in PRINTS_ONLY for argument in arguments)
                with reader_may_leave() if only_shows else nullcontext():
                    _run_hydra(root, main, assigned.faults)

        return command

    return decorate


def _serve_driver_elsewhere() -> None:
    """Of a process of torchrun that does not drive: have a worker where there are several hosts, or do nothing."""
    if (place := torchrun.place()) is None:
        return
    from verl.cluster.hosts.agent import serve_driver

    set_kernel_cache()
    sys.path.append(str(Path.cwd()))
    sys.exit(serve_driver(place))


@contextmanager
def _hosts_told() -> Iterator[None]:
    """Let processes on other hosts end once the driver has done its work; one that fails torchrun takes notice of."""
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise
    if (place := torchrun.joined_hosts()) is not None:
        from verl.cluster.hosts.rendezvous import say_ended

        say_ended(place)


def _run_hydra(root: str, main: Callable[[LaunchedRun], Any], faults: Sequence[str]) -> None:
    statuses: list[int] = []
    is_composed = False

    def task(config: DictConfig) -> None:
        nonlocal is_composed
        import rich

        is_composed = True
        running = HydraConfig.get()
        run_dir = Path(running.runtime.output_dir)
        overrides: Any = OmegaConf.to_container(running.overrides.task, resolve=False)
        is_sweep = running.mode == RunMode.MULTIRUN
        name = f"job_{running.job.num}" if is_sweep else ""
        choices: Any = OmegaConf.to_container(running.runtime.choices)
        job = LaunchedRun(config, root, choices, run_dir, rich.get_console(), name, overrides, list(faults))
        if is_sweep:
            job.swept = swept_paths(sys.argv[1:], running.sweeper)
            set_command([*start_message(sys.argv[0]), *overrides])
        try:
            with _clean_end(run_dir):
                try:
                    with job.closing, component_exits(directly=False):
                        _with_log(main, job)
                except OmegaConfBaseException as error:
                    raise ConfigError(list(composition_faults(root, error))) from error
                except ConfigError:
                    if not is_sweep:  # whose table names every job
                        job.withdraw()
                    raise
                finally:
                    _remove_if_empty(run_dir)
                    _remove_if_empty(Path(running.run.dir).parts[0])  # `outputs`, of `outputs/../x`
        except SystemExit as end:
            statuses.append(int(end.code or 0))
            if running.mode != RunMode.MULTIRUN or statuses[-1] in (INTERRUPTED, TERMINATED):
                raise
            _tell(f"Job {running.job.num} of the sweep ended with status {statuses[-1]}; the others go on.")

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us as they are, and `_clean_end` words them
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=root)(task)()
    except (HydraException, OmegaConfBaseException) as error:  # it cannot be composed at all
        raise ConfigError([*faults, *composition_faults(root, error)]) from error
    except (OSError, AssertionError, TypeError, ValueError) as error:
        if is_composed:
            raise
        raise ConfigError([*faults, _of_hydra_itself(error)]) from error
    if any(statuses):
        sys.exit(max(statuses))


def _of_hydra_itself(error: Exception) -> str:
    """What is said where Hydra fails before the run begins: at its log, or at the directory that it makes."""
    if isinstance(error, OSError):
        key = "hydra.sweep.dir" if any(word in ("-m", "--multirun") for word in sys.argv) else "hydra.run.dir"
        return f"{key} leads to {error.filename}: it cannot be made ({error.strerror}). Set {key}=DIR to another place."
    given = ", ".join(word for word in sys.argv[1:] if word.startswith("hydra")) or "its arguments"
    reason = f": {error}" if str(error) else ""
    return f"{given}: Hydra does not take it ({type(error).__name__}{reason}). `--cfg hydra` shows what there is."


def start_message(script: str, count: int = 1) -> list[str]:
    """What a person types before the arguments.

    Args:
        script: the path of a script, or `verl ppo` and `verl sft`, as cli/train.py names itself.
        count: of processes that torchrun has started.
    """
    starter = ["torchrun", f"--nproc_per_node={count}"] if count > 1 else ["python"]
    if not script.startswith("verl "):
        return [*starter, script]
    words = script.split()
    return words if count == 1 else [*starter, "-m", "verl.cli", *words[1:]]


@contextmanager
def _without_threads() -> Iterator[None]:
    """End the process although threads that were started within go on: the interpreter would wait for them for ever."""
    before, status = set(threading.enumerate()), 0
    try:
        yield
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        started = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
        end = time.monotonic() + THREADS_TIMEOUT_S
        for thread in started:
            thread.join(timeout=max(0.0, end - time.monotonic()))
        left = sorted(thread.name for thread in started if thread.is_alive())
        if left:
            _tell(f"The run is over. Threads that a component has started go on ({', '.join(left)}), and are ended.")
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _with_log(main: Callable[[LaunchedRun], Any], job: LaunchedRun) -> None:
    """Run `main`, with the traceback of whatever ends it in run.log."""
    try:
        main(job)
    except Exception as error:
        if job.is_recorded and not getattr(error, IN_RUN_LOG, False):
            extra = {"console": False}  # `_clean_end` says it, once
            logging.getLogger(__name__).error("The run has ended.", exc_info=True, extra=extra)
        raise


@contextmanager
def _clean_end(run_dir: Path | None = None) -> Iterator[None]:
    """Turn what ends a run early into a message and an exit status."""
    try:
        yield
    except ConfigError as error:
        _tell(str(error))
        sys.exit(2)
    except Terminated:
        _tell("terminated")
        sys.exit(TERMINATED)
    except CheckpointError as error:  # a save's is in the log with its traceback
        _tell(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        _tell("interrupted")
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the end of the program: all that is left is to tell, without secrets
        log = None if run_dir is None else run_dir / "run.log"
        _tell(end_message(error, log if log is not None and log.is_file() else None))
        sys.exit(1)


def end_message(error: BaseException, log: Path | None = None) -> str:
    """What ended a run: a sentence, and one traceback where it leads to a line of code.

    An error that verl raises on purpose says all in its message, unless code of the user's is its cause.

    Args:
        log: where the whole chain of tracebacks is.
    """
    cause = error
    while (below := cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)) is not None:
        cause = below
    sentence, _, detail = str(error).strip().partition("\n")
    if isinstance(error, WorkerError) and _TRACEBACK in detail:  # the worker's own
        if (said := _is_user_message(detail)) is not None:
            return f"{sentence.partition(' verl.errors.')[0]} {said}{_in_log(log)}"
        last = next(line for line in reversed(detail.splitlines()) if line.strip())
        return f"{sentence} {last.strip()}\n\n{detail[detail.rindex(_TRACEBACK) :]}{_in_log(log)}"
    if isinstance(error, VerlError) and (isinstance(cause, (VerlError, OSError)) or not _is_of_code(cause)):
        return f"{error}{_in_log(log)}"
    named = str(error) if isinstance(error, VerlError) else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(type(cause), cause, _from_users_code(cause), chain=False))
    return f"{named}\n\n{trace.rstrip()}{_in_log(log)}"


_TRACEBACK = "Traceback (most recent call last):"
_OF_VERL = re.compile(r"^verl\.errors\.(\w+): ", re.MULTILINE)


def _is_user_message(traces: str) -> str | None:
    """The message of what ended a worker, where verl raised it and it was no code of the user's."""
    found = [*_OF_VERL.finditer(traces)]
    kind = getattr(errors, found[-1][1], None) if found else None
    last = traces[traces.rindex(_TRACEBACK) :]
    if kind is None or not issubclass(kind, (ConfigError, CheckpointError, StorageError)):
        return None
    return traces[found[-1].end() :].strip() if _OF_VERL.search(last) else None


_PACKAGE = str(Path(__file__).resolve().parents[1])


def _is_of_code(error: BaseException) -> bool:
    """Whether its last frame is in code of the user's: neither of this package nor of an installed one."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not frames[-1].filename.startswith(_PACKAGE) and "site-packages" not in frames[-1].filename


def _from_users_code(error: BaseException) -> TracebackType | None:
    """Its traceback from the first frame that is not this package's, where the last one is the user's."""
    trace = error.__traceback__
    while _is_of_code(error) and trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    return trace


def _in_log(log: Path | None) -> str:
    return "" if log is None else f"\n(all tracebacks are in {shown_path(log)})"


def _tell(text: str) -> None:
    """To standard error, so that what `--cfg job` prints stays readable by machines."""
    sys.stderr.write(redact(text).rstrip() + "\n")


def _remove_if_empty(run_dir: Path | str) -> None:
    """Hydra makes the run's directory first; a run that was refused leaves none behind, nor empty parents."""
    directory, here = Path(run_dir).resolve(), Path.cwd()
    while here in directory.parents and not (directory.is_dir() and any(directory.iterdir())):
        if directory.is_dir():
            directory.rmdir()
        directory = directory.parent
