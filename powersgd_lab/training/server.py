"""The fork server: a process with everything imported and one thread, that forks a trial's ranks on request.
Ranks are up in a tenth of a second so, and nothing of one trial is left in the next. `launch.ForkServer` starts it."""

import json
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from typing import NoReturn

import torch
import torch._dynamo  # DDP and the optimizers import it on first use, which takes a rank seconds

from powersgd_lab.training import journal
from powersgd_lab.training import rank as entry
from powersgd_lab.training.lifeline import die_with


class Server:
    """Reads requests, one JSON line each, from the socket to its controller, and tells of every rank that ended.

    launch: {"launch": id, directory, world_size, threads, cores, environment, path, launched} -> forks the ranks.
    signal: {"signal": number, "trial": id} -> sends it to the ranks that still run, and to what they started.
    Tells {"ready": pid}, then {"trial": id, "rank": r, "status": s} as ranks end, s negative for a signal."""

    def __init__(self, controller: socket.socket) -> None:
        self._controller = controller
        self._ranks: dict[int, tuple[int, int]] = {}  # pid -> trial, rank

    def serve(self) -> None:
        """Until the controller closes its end: then the ranks are killed."""
        woken, wakes = socket.socketpair()
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the byte in `woken` is what a child's end is noticed by
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to handle
        self._tell({"ready": os.getpid()})
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._controller, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if woken in ready:
                    woken.recv(4096)
                    self._reap()
                if self._controller in ready:
                    received = self._controller.recv(1 << 16)
                    if not received:
                        return self._signal(set(self._ranks.values()), signal.SIGKILL)
                    *lines, rest = (rest + received).split(b"\n")
                    for line in lines:
                        self._handle(json.loads(line), (woken, wakes))

    def _handle(self, request: dict[str, Any], ends: tuple[socket.socket, ...]) -> None:
        if "launch" in request:
            for rank in range(request["world_size"]):
                server = os.getpid()
                pid = os.fork()
                if pid == 0:
                    _become_rank(request, rank, server, (self._controller, *ends))
                self._ranks[pid] = (request["launch"], rank)
        else:
            trial = request["trial"]
            self._signal({place for place in self._ranks.values() if place[0] == trial}, request["signal"])

    def _signal(self, places: set[tuple[int, int]], number: int) -> None:
        for pid, place in self._ranks.items():
            if place in places:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, number)
                with suppress(ProcessLookupError):
                    os.kill(pid, number)  # it may not have made its group yet

    def _reap(self) -> None:
        for pid in list(self._ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # what the rank started and left behind
                trial, rank = self._ranks.pop(pid)
                self._tell({"trial": trial, "rank": rank, "status": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, Any]) -> None:
        self._controller.sendall(json.dumps(message).encode() + b"\n")


def _become_rank(request: dict[str, Any], rank: int, server: int, inherited: tuple[socket.socket, ...]) -> NoReturn:
    """In the forked child: take leave of the server, become a rank, and never return."""
    status = 1
    try:
        die_with(server)
        os.setpgid(0, 0)  # so that what the rank starts can be ended with it
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for end in inherited:
            end.close()
        directory = Path(request["directory"])
        log = os.open(directory / journal.log_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["environment"])
        sys.path[:] = request["path"]
        if request["cores"]:
            os.sched_setaffinity(0, request["cores"])
        torch.set_num_threads(request["threads"])
        rendezvous = directory / journal.RENDEZVOUS
        entry.run(directory, rank, request["world_size"], rendezvous, request["launched"])
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """`python -m powersgd_lab.training.server DESCRIPTOR PARENT`, where the descriptor is a connected socket's."""
    descriptor, parent = (int(argument) for argument in sys.argv[1:])
    die_with(parent)
    with socket.socket(fileno=descriptor) as controller:
        Server(controller).serve()


if __name__ == "__main__":
    main()
