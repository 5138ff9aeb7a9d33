"""Entry point of the commands that train: command line, run directory, logging, and the clean end of a run.

arguments -> aliases and checks of the command line -> Hydra -> RunStart -> main(run)

`--help` prints usage, examples, and the options of every group.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl.compose import schema
from verl.compose.compose import compose_root
from verl.compose.overrides import command_line, composition_fault, composition_faults, flags_of, swept_overrides
from verl.compose.run_start import RunStart, save_overrides
from verl.compose.schema import ROOTS, conf_dir, group_options, own_conf_dirs, root_keys
from verl.errors import CheckpointError, ConfigError, OutputFailed, VerlError, WorkerError, error_text, root_cause
from verl.tracking.console import reader_may_leave, set_command, shown_path
from verl.tracking.logging_setup import IN_RUN_LOG
from verl.utils.directories import set_kernel_cache
from verl.utils.progress import report_to_starter
from verl.utils.redact import redact, redact_output
from verl.utils.signals import Terminated, component_exits, ignore_interrupts, orderly_termination
from verl.utils.torchrun import refuse_copies

_GROUPS = {
    "actor": "The model that is trained, with its optimizer and LoRA.",
    "algorithm": "Advantages, loss, KL penalty, number of updates.",
    "checkpoint": "When the whole training state is saved, and how.",
    "critic": "The model that estimates values, for algorithms that need it.",
    "data": "Prompts or texts to train on, and held-out ones.",
    "debug": "Small variations that work with every experiment.",
    "environment": "Episodes of several turns, with tools or a world.",
    "experiment": "A whole run as one file.",
    "loss": "The loss of preferences.",
    "reference": "The frozen model of the KL penalty, or a teacher.",
    "replay": "Whether scored rows are kept and used again.",
    "reward": "How a response is scored.",
    "rollout": "The engine that samples responses.",
    "sandbox": "Where programs run that the model wrote.",
    "sharding": "How the model and its work are divided over processes.",
    "storage": "A second place for checkpoints, in object storage.",
    "sweep": "Several runs from one command, compared in a table.",
    "tracker": "Where metrics, samples and tables go.",
    "trainer": "Length of the run, batch sizes, evaluation, devices.",
}
EXPLAIN = "--explain"


def help_text(root: str) -> str:
    """The help of a root, with the options of the user's directories. Hydra would take seconds to list them.

    Args:
        root: a name of `ROOTS`.
    """
    options, indent = group_options(), " " * 6
    wrap: Any = {"width": 80, "initial_indent": indent, "subsequent_indent": indent, "break_on_hyphens": False}
    groups = "\n".join(
        f"  {group}: {_GROUPS.get(group, '')}\n{textwrap.fill(', '.join(options[group]), **wrap)}"
        for group in sorted(root_keys(root))
    )
    return f"""{ROOTS[root].purpose}

  usage: verl {ROOTS[root].command} [GROUP=OPTION ...] [PATH.TO.KEY=VALUE ...] [-m]

  examples{ROOTS[root].examples}

  groups
{groups}

  --explain prints the whole configuration with a sentence for each key.
  Results go to outputs/<project>/<experiment>/<time>.
"""


INTERRUPTED, HUNG_UP, TERMINATED = 130, 129, 143  # 128 + number of the signal, as in shells
THREADS_TIMEOUT_S = 10.0  # wait for threads at the end of the run


def entry_point(root: str) -> Callable[[Callable[[RunStart], Any]], Callable[[], None]]:
    """Decorator that makes `main(job)` a command; `root` is a name of `ROOTS`.

    Exit statuses: 2 after a list of configuration faults, 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP, 1 with a
    message for any other error, including `exit()` in a component. One traceback is printed if the message does not
    identify the line; run.log has all tracebacks.
    """

    def decorate(main: Callable[[RunStart], Any]) -> Callable[[], None]:
        @functools.wraps(main)
        def command() -> None:
            report_to_starter()
            redact_output()
            with _without_threads(), _clean_end(), orderly_termination():
                refuse_copies()
                set_kernel_cache()
                schema.register()
                sys.path.append(str(Path.cwd()))  # user modules are in the working directory
                words = sys.argv[1:]
                explains = EXPLAIN in words
                arguments, assigned = command_line(root, [word for word in words if word != EXPLAIN])
                set_command([*start_message(sys.argv[0]), *words])
                for note in assigned.notes:
                    _tell(note)
                flags, _ = flags_of(arguments)
                only_shown = flags.cfg or flags.info or explains  # which never reach the check of the run
                if assigned.faults and (only_shown or assigned.is_sweep):  # every job would have them
                    raise ConfigError(assigned.faults)
                sys.argv[1:] = arguments
                only_shows = only_shown or flags.help or flags.hydra_help
                redact_output(may_fail=not only_shows)
                with reader_may_leave() if only_shows else nullcontext():
                    if flags.help:
                        sys.stdout.write(help_text(root))
                    elif explains:
                        _explain(root, arguments)
                    else:
                        _run_hydra(root, main, assigned.faults)

        return command

    return decorate


def _explain(root: str, arguments: Sequence[str]) -> None:
    from verl.compose.explain import explained

    with composition_faults(root):
        sys.stdout.write(explained(compose_root(root, [word for word in arguments if not word.startswith("-")])))


def _run_hydra(root: str, main: Callable[[RunStart], Any], faults: Sequence[str]) -> None:
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
        job = RunStart(config, root, choices, run_dir, rich.get_console(), name, overrides, list(faults))
        if is_sweep:
            job.swept = swept_overrides(sys.argv[1:], running.sweeper, overrides)
            directories = [f"--config-dir={directory}" for directory in own_conf_dirs()]
            set_command([*start_message(sys.argv[0]), *directories, *overrides])
        try:
            with _clean_end(run_dir):
                try:
                    _refuse_no_directory(
                        *("hydra.sweep.dir", running.sweep.dir) if is_sweep else ("hydra.run.dir", running.run.dir)
                    )
                    with job.closing, component_exits(directly=False):
                        _with_log(main, job)
                except OmegaConfBaseException as error:
                    raise ConfigError(composition_fault(root, error)) from error
                except ConfigError:
                    if not is_sweep:
                        job.withdraw()
                    raise
                finally:
                    for directory in (run_dir, *Path(running.run.dir).parents):  # `outputs`, of `outputs/../x`
                        _remove_if_empty(directory)
        except SystemExit as end:
            statuses.append(int(end.code or 0))
            if running.mode != RunMode.MULTIRUN or statuses[-1] in (INTERRUPTED, HUNG_UP, TERMINATED):
                raise
            # it was refused before: the table of a sweep lists every job; another run's record stays
            if not job.is_recorded and not (run_dir / "config.yaml").exists():
                save_overrides(overrides, run_dir)
            _tell(f"Job {running.job.num} of the sweep ended with status {statuses[-1]}; this does not end the sweep.")

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach `_clean_end` unchanged, which prints them
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=root)(task)()
    except (HydraException, OmegaConfBaseException) as error:  # composition failed
        raise ConfigError([*faults, composition_fault(root, error)]) from error
    except (OSError, AssertionError, AttributeError, TypeError, ValueError, RecursionError, YAMLError) as error:
        if is_composed or isinstance(error, (BrokenPipeError, OutputFailed)):  # what is shown cannot be read
            raise
        said = _of_run_directory(error) if isinstance(error, OSError) else composition_fault(root, error)
        raise ConfigError([*faults, said]) from (None if isinstance(error, RecursionError) else error)
    if any(statuses):
        sys.exit(max(statuses))


def _refuse_no_directory(key: str, given: str) -> None:
    if not given.strip() or given[0] == "~" or Path(given).resolve() == Path("/"):
        raise ConfigError(f"{key} is {given!r}: expected the path of a directory for the files of this run.")


def _of_run_directory(error: OSError) -> str:
    key = "hydra.sweep.dir" if any(word in ("-m", "--multirun") for word in sys.argv) else "hydra.run.dir"
    return (
        f"{key} leads to {error.filename}, which cannot be created ({error.strerror}). Set {key} to another directory."
    )


def start_message(script: str) -> list[str]:
    """The command without its arguments, of the path of a script, or of words such as `verl ppo`."""
    return script.split() if script.startswith("verl ") else ["python", script]


@contextmanager
def _without_threads() -> Iterator[None]:
    """End the process even if threads started inside this context still run; the interpreter would wait for them."""
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
            _tell(f"The run is over. Threads of a component still run ({', '.join(left)}) and are ended.")
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _with_log(main: Callable[[RunStart], Any], job: RunStart) -> None:
    """Run `main`, and write the traceback of an error to run.log."""
    try:
        main(job)
    except Exception as error:
        if job.is_recorded and not getattr(error, IN_RUN_LOG, False):
            extra = {"console": False}  # `_clean_end` prints it
            logging.getLogger(__name__).error("The run has ended.", exc_info=True, extra=extra)
        raise


@contextmanager
def _clean_end(run_dir: Path | None = None) -> Iterator[None]:
    """Convert exceptions that end a run to a message and an exit status."""
    try:
        yield
    except ConfigError as error:
        _tell(str(error))
        sys.exit(2)
    except Terminated as error:
        ignore_interrupts()
        _tell("terminated")
        sys.exit(128 + error.number)
    except CheckpointError as error:  # the traceback of a failed save is in the log
        _tell(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        ignore_interrupts()
        _tell("interrupted")
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - end of the program: report, redacted
        log = None if run_dir is None else run_dir / "run.log"
        _tell(end_message(error, log if log is not None and log.is_file() else None))
        sys.exit(1)


def end_message(error: BaseException, log: Path | None = None) -> str:
    """Message about an error that ended a run, with one traceback if it helps to find the line.

    Errors raised by verl have no traceback, unless user code is their cause.

    Args:
        error: the error.
        log: path of run.log, which has all tracebacks.
    """
    cause = root_cause(error)
    text = str(error).strip() if isinstance(error, VerlError) else ""
    sentence, _, detail = text.partition("\n")
    if isinstance(error, WorkerError) and _TRACEBACK in detail:  # the traceback of the worker
        if (refusal := getattr(error.detail, "refusal", None)) is not None:
            return f"{sentence} {refusal}{_in_log(log)}"
        last = next(line for line in reversed(detail.splitlines()) if line.strip())
        return f"{sentence} {last.strip()}\n\n{detail[detail.rindex(_TRACEBACK) :]}{_in_log(log)}"
    if isinstance(error, VerlError) and (isinstance(cause, (VerlError, OSError)) or not _is_of_code(cause)):
        return f"{error}{_in_log(log)}"
    named = str(error) if isinstance(error, VerlError) else error_text(error)
    trace = "".join(traceback.format_exception(type(cause), cause, _from_users_code(cause), chain=False))
    return f"{named}\n\n{trace.rstrip()}{_in_log(log)}"


_TRACEBACK = "Traceback (most recent call last):"
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


def _is_of_code(error: BaseException) -> bool:
    """Whether the last frame of an error is in user code, neither in this package nor in an installed one."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not frames[-1].filename.startswith(_PACKAGE) and "site-packages" not in frames[-1].filename


def _from_users_code(error: BaseException) -> TracebackType | None:
    """The traceback of an error from the first frame outside this package, if its last frame is in user code."""
    trace = error.__traceback__
    while _is_of_code(error) and trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    return trace


def _in_log(log: Path | None) -> str:
    return "" if log is None else f"\n(all tracebacks are in {shown_path(log)})"


def _tell(text: str) -> None:
    """Print to standard error, so that the output of `--cfg job` can be parsed."""
    sys.stderr.write(redact(text).rstrip() + "\n")


def _remove_if_empty(run_dir: Path | str) -> None:
    """Remove the run directory that Hydra has created, and its parents, if they are empty."""
    directory, here = Path(run_dir).resolve(), Path.cwd()
    while here in directory.parents and not (directory.is_dir() and any(directory.iterdir())):
        if directory.is_dir():
            directory.rmdir()
        directory = directory.parent
