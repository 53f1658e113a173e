"""Runs a case in a forked child: frameworks are imported once, and no case sees another's patches."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# Seconds. A case takes a few; only one that hangs meets the limit, however busy the machine is.
LIMIT = 1200.0
# For the other ranks, once one has failed: they fail with it, or wait forever.
GRACE = 120.0
# Packages, and modules of them that most cases import. Imported before the fork, they are imported once for all cases.
ON_THE_WAY = {
    "transformers": ("transformers.trainer", "transformers.models.llama.modeling_llama"),
    "trl": ("trl.trainer.sft_trainer",),
    "peft": ("peft",),
    "axolotl": (
        "axolotl.cli.config",
        "axolotl.common.datasets",
        "axolotl.core.builders",
        "axolotl.loaders",
        "axolotl.monkeypatch.multipack",
        "axolotl.train",
        "bitsandbytes",
        "trl.trainer.reward_trainer",
        "wandb",
    ),
}


class CaseError(AssertionError):
    """The case failed in its child; the text is its traceback, and what it printed."""


@dataclass
class Outcome:
    """What a case returned, and everything it printed, its logs included."""

    value: Any
    output: str


def forked(case: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> Outcome:
    """Calls `case(*args)` in a child and returns its value, which must pickle.

    Raises:
        CaseError: it raised, died or ran past `timeout` seconds.
    """
    (found,) = _together([_Child(case, args, {})], timeout, GRACE)
    if isinstance(found, CaseError):
        raise found
    return found


def ranks(
    case: Callable[..., Any],
    *args: Any,
    world: int = 2,
    timeout: float = LIMIT,
    grace: float = GRACE,
    **environment: str,
) -> list[Any]:
    """Calls `case(*args)` in `world` children at once, each with the environment that torchrun would give it.

    Args:
        timeout: seconds for all.
        grace: seconds for the others, once one has failed.
        environment: more variables.

    Returns:
        For each rank its Outcome, or the CaseError: the failure of one rank may be what a test is about.
    """
    with _store() as port:
        launched = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **environment,
        }
        children = [_Child(case, args, launched | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(world)]
        return _together(children, timeout, grace)


def good_ranks(*args: Any, **kwargs: Any) -> list[Outcome]:
    """`ranks`, where every rank must succeed.

    Raises:
        CaseError: with the failures of all ranks; what failed first is seldom what failed on rank 0.
    """
    found = ranks(*args, **kwargs)
    failed = [f"rank {rank}: {one}" for rank, one in enumerate(found) if isinstance(one, CaseError)]
    if failed:
        raise CaseError("\n".join(failed))
    return found


@contextmanager
def forked_python() -> Iterator[None]:
    """Let `subprocess.run` fork this process if the command is Python with a script or a module.

    A new interpreter would import torch, transformers and Axolotl again, which takes longer than most tests. Other
    programs and `python -c` are started as usual.
    """
    start = subprocess.run

    def run(command: Any, **options: Any) -> Any:
        words = [command] if isinstance(command, str) else [str(word) for word in command]
        if words[0] != sys.executable or words[1] == "-c":
            return start(command, **options)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given = (out, err) if options.get("capture_output") else (options.get("stdout"), options.get("stderr"))
            code = forked(_as_main, words[1:], given, options.get("env"), options.get("cwd")).value
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        done = subprocess.CompletedProcess(command, code, *texts)
        if options.get("check"):
            done.check_returncode()
        return done

    subprocess.run = run  # type: ignore[assignment]
    try:
        yield
    finally:
        subprocess.run = start


def _as_main(words: list[str], given: tuple[Any, Any], environment: dict[str, str] | None, folder: Any) -> int:
    """Run a script, or a module after `-m`, as Python does; return its exit code."""
    for descriptor, file in enumerate(given, start=1):
        if file is not None:
            os.dup2(1 if file is subprocess.STDOUT else file.fileno(), descriptor)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    os.chdir(folder or os.curdir)
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class Once:
    """Makes each thing once. What failed is not tried again: it fails again, with the same reason."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self._failed: dict[Any, Exception] = {}

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        if key in self._failed:
            raise self._failed[key]
        if key not in self._made:
            try:
                self._made[key] = make()
            except Exception as error:
                self._failed[key] = error
                raise
        return self._made[key]


def made_once(path: Path, write: Callable[[Path], Any]) -> Path:
    """`path`, a file or a folder, by `write(path)` if it is not there yet.

    Ranks may come here at once: it appears whole, and the one that was made first stays.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as place:
            made = Path(place) / path.name
            write(made)
            try:
                if made.is_dir():
                    made.rename(path)
                else:
                    os.link(made, path)
            except OSError:
                # Not empty, or there already: another rank was faster.
                if not path.exists():
                    raise
    return path


@contextmanager
def _store() -> Iterator[int]:
    """The port of the store through which ranks find each other, in a process of its own as torchrun has it.

    It binds its port itself. One that was looked up and given to rank 0 could be another's by the time that it listens,
    and a store of rank 0 would be gone with it while others still use theirs.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    stay, leave = context.Pipe(duplex=False)

    def host() -> None:
        from torch.distributed import TCPStore

        leave.close()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        send.send(store.port)
        try:
            stay.recv()
        except EOFError:
            os._exit(0)

    process = context.Process(target=host)
    process.start()
    send.close()
    try:
        yield receive.recv()
    finally:
        leave.close()
        process.kill()
        process.join()


def _together(children: list[_Child], timeout: float, grace: float) -> list[Any]:
    """Of each child its Outcome or CaseError. All are gone afterwards, also where this is interrupted."""
    found: dict[_Child, Any] = {}
    end, why = time.monotonic() + timeout, f"no answer within {timeout:.0f} s"
    try:
        while len(found) < len(children):
            waiting = {child.receive: child for child in children if child not in found}
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                found |= {child: child.killed(why) for child in waiting.values()}
            for each in ready:
                child = waiting[each]  # type: ignore[index]
                found[child] = child.outcome()
                if isinstance(found[child], CaseError) and time.monotonic() + grace < end:
                    end, why = time.monotonic() + grace, f"no answer within {grace:.0f} s after another rank had failed"
    finally:
        for child in children:
            child.end()
    return [found[child] for child in children]


class _Child:
    """A case that has been started."""

    def __init__(self, case: Callable[..., Any], args: tuple, environment: dict[str, str]) -> None:
        for package, modules in ON_THE_WAY.items():
            for module in modules if package in sys.modules else ():
                importlib.import_module(module)
        context = multiprocessing.get_context("fork")
        self.receive, send = context.Pipe(duplex=False)
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "output"

        def child() -> None:
            # Trainers collect garbage several times a run, and walking over all imported modules takes most of a tiny
            # run. What is frozen is not walked over.
            gc.freeze()
            descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            # pytest has put its own capture in their place. In a child of a child, a replaced one must not close them.
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            os.environ.update(environment)
            if "torch" in sys.modules:
                # Threads that torch has made in the parent are not here, and whoever gives them work waits forever.
                sys.modules["torch"].set_num_threads(1)
            if "accelerate.state" in sys.modules:
                # A trainer that an earlier test made in this process would decide how many ranks there are.
                sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
            try:
                send.send((True, case(*args)))
            except BaseException as error:
                send.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)

        self._process = context.Process(target=child)
        self._process.start()
        send.close()

    def outcome(self) -> Outcome | CaseError:
        """To be called when there is something to receive."""
        try:
            good, value = self.receive.recv()
        except EOFError:
            good, value = False, "the child died"
        self._process.join()
        return Outcome(value, self._output()) if good else self._failed(value)

    def killed(self, why: str) -> CaseError:
        self._process.kill()
        self._process.join()
        return self._failed(why)

    def end(self) -> None:
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._folder.cleanup()

    def _failed(self, why: str) -> CaseError:
        return CaseError(f"{why}\n--- output ---\n{self._output()[-6000:]}")

    def _output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""
