"""90 programs that attack the sandbox are contained: the host stays as it was, the reward is 0; a run takes 40 ms.

    python tools/check.py sandbox                # all, on all layers of this machine; then speed
    python tools/check.py sandbox --without namespaces landlock --only "kill by a pipe's owner"

A program prints BREACH if it got what it must not have. A row per attack; it fails if the attack was not contained or a
file, setting, socket or process of the host has changed. The last row fails if a run takes more than 40 ms of CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.rewards.functions.code import code
from megarl.sandbox.sandbox import Outcome, RunResult, Sandbox, SandboxSettings

DURATION = {"small": "5 s (the attacks that tests make)", "full": "35 s"}
CPU_SECONDS = 0.9
WALL_SECONDS = 10.0
SLOWEST_SECONDS = 20.0
MAX_CPU_MILLISECONDS = 40.0
TEST = {"inputs": ["5\n"], "outputs": ["what none of them prints"]}

_SYSCALL = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
def call(x86, arm, *values):
    number = x86 if platform.machine() == 'x86_64' else arm
    return libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, values))
"""
ATTACKS: dict[str, str] = {
    "fork bomb": "import os\nwhile True:\n    if os.fork() >= 0: print('BREACH', flush=True)",
    "thread bomb": (
        "import threading, time\nthreading.stack_size(32768)\ncount = 0\n"
        "while True:\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n    count += 1\n"
        "    if count > 5000: print('BREACH', flush=True)"
    ),
    "memory bomb": "a = []\nwhile True:\n    a.append(bytearray(64 << 20))\n    if len(a) > 32: print('BREACH')",
    "many medium processes": (
        "import os, time\nfor _ in range(12):\n    if os.fork() == 0:\n        held = b'x' * (300 << 20)\n"
        "        time.sleep(60)\n    print('BREACH', flush=True)"
    ),
    "process by posix_spawn": "import os\nprint('BREACH', os.posix_spawn('/bin/true', ['true'], {}))",
    "process by clone3": _SYSCALL + "import os\nif call(435, 435, 0, 0) > 0 or libc.vfork() > 0: print('BREACH')",
    "process by raw clone": _SYSCALL + "if call(56, 220, 17, 0, 0, 0, 0) >= 0: print('BREACH', flush=True)",
    "output flood": "while True: print('x' * 65536)",
    "error flood": "import sys\nwhile True: sys.stderr.write('x' * 65536)",
    "infinite loop": "while True: pass",
    "sleep": "import time\ntime.sleep(3600)",
    "unbounded recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "unbounded recursion in C": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\nclass A:\n"
        "    def __getattr__(self, name): return getattr(self, name)\nA().x"
    ),
    "TCP connect": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 2).send(b'x')\nprint('BREACH')",
    "UDP send": (
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))\n"
        "print('BREACH')"
    ),
    "UNIX socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('CANARY/socket')\nprint('BREACH')",
    "abstract UNIX socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0ABSTRACT')\nprint('BREACH')",
    "netlink socket": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\nprint('BREACH')",
    "write outside": "open('CANARY/file', 'a').write('x')\nprint('BREACH')",
    "write beside Python": "import os\nopen(os.__file__, 'a').write('x')\nprint('BREACH')",
    "delete outside": "import os\nos.unlink('CANARY/file')\nprint('BREACH')",
    "rename outside": "import os\nos.rename('CANARY/file', 'CANARY/other')\nprint('BREACH')",
    "chmod outside": "import os\nos.chmod('CANARY/file', 0o777)\nprint('BREACH')",
    "read passwd": "print(open('/etc/passwd').read())\nprint('BREACH')",
    "list home": "import os\nos.listdir('/root') or os.listdir('/home')\nprint('BREACH')",
    "own environment": "import os\nif 'MEGARL_CANARY' in os.environ: print('BREACH')",
    "others' environment": (
        "import glob\nfor name in glob.glob('/proc/[0-9]*/environ'):\n    open(name, 'rb').read()\n    print('BREACH')"
    ),
    "own memory by procfs": "open('/proc/self/mem', 'r+b').read(1)\nprint('BREACH')",
    "kill parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nimport time\ntime.sleep(0.2)",
    "kill all": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "kill the host's": "import os\nos.kill(PID, 9)\nprint('BREACH')",
    "kill by a pipe's owner": (
        "import fcntl, os\nread, write = os.pipe()\nfcntl.fcntl(read, fcntl.F_SETOWN, PID)\n"
        "print('BREACH', flush=True)\nfcntl.fcntl(read, 10, 9)\nfcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)\n"
        "os.write(write, b'x')"
    ),
    "signals of a pipe": (
        "import fcntl, os\nread, write = os.pipe()\nfcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)\nprint('BREACH')"
    ),
    "datagram from a pair": (
        "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', 'CANARY/socket')\n"
        "print('BREACH')"
    ),
    "datagram from a pair, abstract": (
        "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '\\0ABSTRACT')\n"
        "print('BREACH')"
    ),
    "ptrace parent": _SYSCALL + "import os\nif call(101, 117, 16, os.getppid(), 0, 0) == 0: print('BREACH')",
    "read another's memory": (_SYSCALL + "import os\nif call(310, 270, PID, 0, 0, 0, 0, 0) >= 0: print('BREACH')"),
    "symlink to shadow": "import os\nos.symlink('/etc/shadow', '/tmp/x')\nprint('BREACH', open('/tmp/x').read())",
    "leaked descriptors": (
        "import os\nfor number in range(3, 4096):\n    try: os.fstat(number)\n    except OSError: continue\n"
        "    print('BREACH', number)"
    ),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(3600)\n"
        "print('BREACH')"
    ),
    "delete own folder": "import os\nos.rmdir('/tmp')\nprint('BREACH')",
    "big file": (
        "with open('/tmp/x', 'wb') as file:\n    for _ in range(200): file.write(bytes(1 << 20))\nprint('BREACH')"
    ),
    "200,000 files": "for number in range(200_000): open(f'/tmp/{number}', 'w').close()\nprint('BREACH')",
    "ignore all signals": (
        "import signal\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    "fake pass and exit": 'import os\nprint(\'{"passed": true, "score": 1.0}\', flush=True)\nos._exit(0)',
    "exit before the tests": "import sys\nsys.exit(0)",
    "equal to everything": (
        "class Any(str):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\nprint(Any('x'))"
    ),
    "patched builtins": (
        "import builtins, sys, json\nbuiltins.print = lambda *a, **k: None\njson.dumps = lambda *a, **k: 'true'\n"
        "sys.modules['json'] = None\nsys.stdout.write('x')"
    ),
    "frames of the caller": (
        "import sys\nframe, word = sys._getframe(), ''.join(reversed(['T', 'E', 'R', 'C', 'E', 'S']))\nwhile frame:\n"
        "    if any(word in str(v) for k, v in frame.f_locals.items() if k != 'word'): print('BREACH')\n"
        "    frame = frame.f_back"
    ),
    "memory of earlier runs": (
        "import gc\nword = ''.join(reversed(['T', 'E', 'R', 'C', 'E', 'S']))\n"
        "if any(isinstance(item, (str, bytes)) and word in str(item)[:10000] for held in gc.get_objects()\n"
        "       if isinstance(held, (list, tuple)) for item in held): print('BREACH')"
    ),
    "new user namespace": _SYSCALL + "if libc.unshare(0x10000000) == 0: print('BREACH')",
    "mount": _SYSCALL + "if libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0: print('BREACH')",
    "remount for writing": _SYSCALL + "if libc.mount(None, b'/', None, 32, None) == 0: print('BREACH')",
    "unmount": _SYSCALL + "if libc.umount2(b'/tmp', 2) == 0: print('BREACH')",
    "chroot and back": "import os\nos.mkdir('/tmp/x')\nos.chroot('/tmp/x')\nprint('BREACH')",
    "become root": "import os\nos.setuid(0)\nprint('BREACH')",
    "su": "import os\nos.execv('/bin/su', ['su', '-c', 'id'])",
    "program from memory": (
        "import os\nfile = os.memfd_create('x')\nos.write(file, b'#!/bin/sh\\necho BREACH')\nos.execve(file, ['x'], {})"
    ),
    "device list": (
        "import os\nif set(os.listdir('/dev')) - {'null', 'zero', 'full', 'random', 'urandom'}: print('BREACH')"
    ),
    "write to /dev": "open('/dev/x', 'wb').write(bytes(1 << 20))\nprint('BREACH')",
    "device node": "import os, stat\nos.mknod('/tmp/x', stat.S_IFBLK | 0o600, os.makedev(8, 0))\nprint('BREACH')",
    "shared memory": "open('/dev/shm/MARK', 'w').write('x')\nprint('BREACH')",
    "System V shared memory": _SYSCALL + "if call(29, 194, 0x6d65, 4096, 0o1666) >= 0: print('BREACH')",
    "close all and sleep": "import os, time\nos.closerange(0, 64)\ntime.sleep(3600)",
    "no text": "import os\nos.write(1, b'\\xff\\xfe\\x00\\x80' * 100)",
    "compile bomb": "eval('(' * 100_000 + ')' * 100_000)",
    "regex backtracking": "import re\nre.match('(a+)+$', 'a' * 64 + 'b')",
    "huge integer": "print(len(str(9 ** 9 ** 9)))",
    "missing import": "import megarl_is_not_here",
    "sysctl": "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')\nprint('BREACH')",
    "sysrq": "open('/proc/sysrq-trigger', 'w').write('h')\nprint('BREACH')",
    "core dump": "import os\nos.abort()",
    "segmentation fault": "import ctypes\nctypes.string_at(0)",
    "rewind standard input": (
        "import os, sys\nsys.stdin.read()\nos.lseek(0, 0, 0)\nos.read(0, 100)\nos.write(0, b'x')\nprint('BREACH')"
    ),
    "read the tests": "print(open('CANARY/tests.json').read())\nprint('BREACH')",
    "write a reward": "open('CANARY/reward.txt', 'w').write('1.0')\nprint('BREACH')",
    "not a number": "print('nan inf -inf 1e999')",
    "reset the alarm": "import signal\nsignal.alarm(0)\nsignal.setitimer(signal.ITIMER_PROF, 0)\nwhile True: pass",
    "raise the limits": (
        "import resource\nfor what in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE):\n"
        "    hard = resource.getrlimit(what)[1]\n    try: resource.setrlimit(what, (hard + 1000, hard + 1000))\n"
        "    except (OSError, ValueError): continue\n    print('BREACH')"
    ),
    "limits of another": "import resource\nresource.prlimit(PID, resource.RLIMIT_NOFILE, (1, 1))\nprint('BREACH')",
    "zip bomb": (
        "import zlib\npacked = zlib.compress(bytes(64 << 20), 9)\nheld = []\n"
        "while True:\n    held.append(zlib.decompress(packed))\n    if len(held) > 32: print('BREACH')"
    ),
    "pickle in the output": (
        "import pickle, os, sys\nclass Run:\n    def __reduce__(self): return os.system, ('touch CANARY/pickled',)\n"
        "sys.stdout.buffer.write(pickle.dumps(Run()))"
    ),
    "io_uring": _SYSCALL + "if call(425, 425, 8, 0) >= 0: print('BREACH')",
    "bpf": _SYSCALL + "if call(321, 280, 0, 0, 0) >= 0: print('BREACH')",
    "keyring": _SYSCALL + "if call(250, 219, 0, -3, 1) >= 0: print('BREACH')",
    "userfaultfd": _SYSCALL + "if call(323, 282, 1) >= 0: print('BREACH')",
    "other ABI": _SYSCALL + "if call(0x40000000 + 57, -1, 0) >= 0: print('BREACH')",
    "terminal input": "import fcntl\nfcntl.ioctl(0, 0x5412, b'x')\nprint('BREACH')",
    "time priority": "import os\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))\nprint('BREACH')",
    "host's name": "import socket\nsocket.sethostname('MARK')\nprint('BREACH')",
}
"""Name -> program. Words in capitals stand for places and numbers of the host."""
EXPECTED: dict[str, tuple[Outcome, ...]] = {
    "output flood": ("output",),
    "error flood": ("timeout",),
    "infinite loop": ("timeout",),
    "sleep": ("timeout",),
    "ignore all signals": ("timeout",),
    "close all and sleep": ("timeout",),
    "reset the alarm": ("timeout",),
    "regex backtracking": ("timeout",),
    "memory bomb": ("error", "timeout"),
    "fork bomb": ("error",),
    "thread bomb": ("error", "timeout"),
    "core dump": ("error",),
    "segmentation fault": ("error",),
    "missing import": ("error",),
}
"""Outcomes of those that must end in a certain way."""
IN_TESTS = (
    "fork bomb", "memory bomb", "output flood", "TCP connect", "abstract UNIX socket", "write outside", "read passwd",
    "others' environment", "kill the host's", "ptrace parent", "leaked descriptors", "200,000 files",
    "fake pass and exit", "new user namespace", "mount", "become root", "su", "sysctl", "core dump",
    "memory of earlier runs", "thread bomb", "kill by a pipe's owner",
)  # fmt: skip
"""Attacks that the tests make, too."""
SMALL = {"only": list(IN_TESTS), "runs": 20}
BY_CALLS_ALONE = ("kill the host's", "kill by a pipe's owner", "signals of a pipe", "datagram from a pair, abstract")
"""Attacks that the filter of system calls contains without any other layer."""


@dataclass(frozen=True, slots=True)
class Host:
    """What attacks aim at: a folder that all may write to, sockets that listen, a process, a variable."""

    folder: Path
    port: int
    abstract: str
    process: subprocess.Popen[bytes]
    sockets: Sequence[socket.socket]
    """Bound to port, path and name."""

    def program(self, text: str) -> str:
        """Return an attack's program with the paths and numbers of this host."""
        for word, value in {
            "CANARY": str(self.folder),
            "PORT": str(self.port),
            "ABSTRACT": self.abstract,
            "PID": str(self.process.pid),
            "MARK": f"megarl-attack-{os.getpid()}",
        }.items():
            text = text.replace(word, value)
        return text

    def state(self) -> dict[str, object]:
        """Return everything on the host that an attack could have changed."""
        mark = f"megarl-attack-{os.getpid()}"
        files = {path.name: (_hash(path), path.stat().st_mode) for path in sorted(self.folder.iterdir())}
        settings = {name: _hash(Path("/proc/sys/kernel", name)) for name in ("core_pattern", "hostname", "sysrq")}
        return {
            "files": files,
            "settings": settings,
            "passwd": _hash(Path("/etc/passwd")),
            "mounts": Path("/proc/self/mountinfo").read_text(),
            "marked": sorted(str(path) for place in ("/tmp", "/dev/shm", "/dev") for path in Path(place).glob(mark)),
            "System V": Path("/proc/sysvipc/shm").read_text().count("\n"),
            "sockets": self._visits(),
            "process runs": self.process.poll() is None,
            "its limits": resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE),
        }

    def _visits(self) -> list[str]:
        """Return who reached a socket since the last call."""
        visitors = []
        for listener in self.sockets:
            with contextlib.suppress(BlockingIOError):
                visitors.append(repr(listener.recv(100) if listener.type == socket.SOCK_DGRAM else listener.accept()))
        return visitors


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"


@contextlib.contextmanager
def host() -> Iterator[Host]:
    """Yield a host to attack: a folder with secrets, sockets, and a process."""
    with tempfile.TemporaryDirectory(prefix="megarl-canary-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o777)
        for file in ("file", "tests.json"):
            (folder / file).write_text("SECRET")
            (folder / file).chmod(0o666)
        abstract = f"megarl-canary-{os.getpid()}"
        listeners = [socket.socket(socket.AF_INET), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        for listener, address in zip(listeners, (("127.0.0.1", 0), f"{folder}/socket", f"\0{abstract}"), strict=True):
            stack.enter_context(listener)
            listener.bind(address)
            listener.listen()
        port = listeners[0].getsockname()[1]
        datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        datagrams.bind(("127.0.0.1", port))
        (folder / "socket").chmod(0o777)
        for listener in (*listeners, datagrams):
            listener.setblocking(False)
        os.environ["MEGARL_CANARY"] = "SECRET"
        stack.callback(os.environ.pop, "MEGARL_CANARY")
        process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        stack.callback(process.wait)
        assert process.stdin is not None
        stack.callback(process.stdin.close)
        yield Host(folder, port, abstract, process, (*listeners, datagrams))


def fault_of(name: str, ran: RunResult) -> str | None:
    """Return why an attack was not contained, or None."""
    if "BREACH" in ran.stdout:
        return f"got through: {ran.stdout[:200]!r}"
    if name in EXPECTED and ran.outcome not in EXPECTED[name]:
        return f"ended with {ran.outcome} (exit code {ran.exit_code}), not {' or '.join(EXPECTED[name])}"
    if ran.wall_seconds > SLOWEST_SECONDS:
        return f"took {ran.wall_seconds:.1f} s"
    return None


def settings(without: Sequence[str] = ()) -> SandboxSettings:
    required = tuple(layer for layer in SandboxSettings().require if layer not in without)
    return SandboxSettings(
        require=required, timeout_seconds=CPU_SECONDS, wall_timeout_seconds=WALL_SECONDS, packages=()
    )


class Observed:
    """A sandbox that keeps the end of its last run."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.settings = sandbox.settings
        self.start, self.close = sandbox.start, sandbox.close
        self.last: RunResult | None = None

    def run(
        self, program: str, stdin: str = "", *, cpu_seconds: float | None = None, output_bytes: int | None = None
    ) -> RunResult:
        self.last = self._sandbox.run(program, stdin, cpu_seconds=cpu_seconds, output_bytes=output_bytes)
        return self.last


def attack(sandbox: Sandbox, target: Host, names: Sequence[str]) -> dict[str, tuple[RunResult, str | None]]:
    """Run attacks as answers that the reward `code` scores. Returns how each ended, and why it was not contained.

    After each attack, the host is compared with its state before.
    """
    before = target.state()
    sandbox.run("print('SECRET of an earlier run')", "SECRET")
    results = {}
    for name in names:
        observed = Observed(sandbox)
        answer = f"```python\n{target.program(ATTACKS[name])}\n```"
        earned = code(answer, TEST, {}, observed, score="fraction").score
        assert observed.last is not None
        after = target.state()
        changed = [place for place in before if before[place] != after[place]]
        fault = f"changed the host's {', '.join(changed)}" if changed else fault_of(name, observed.last)
        results[name] = observed.last, fault or (f"earned {earned}" if earned else None)
    return results


def speed(sandbox: Sandbox, runs: int) -> tuple[float, float]:
    """Return the CPU seconds of a run, over all processes, and the runs a second of one sandbox."""
    sandbox.run("print(1)")
    start, before = time.perf_counter(), time.process_time()
    of_runs = sum(sandbox.run("print(int(input()) + 1)", "1").cpu_seconds for _ in range(runs))
    return (of_runs + time.process_time() - before) / runs, runs / (time.perf_counter() - start)


def rate(num_sandboxes: int, runs: int, without: Sequence[str]) -> float:
    """Return the runs a second of several sandboxes at once, like those of several reward processes."""
    boxes = [Sandbox(settings(without), _without=without) for _ in range(num_sandboxes)]
    for box in boxes:
        box.start()

    def work(box: Sandbox) -> None:
        for _ in range(runs):
            box.run("print(int(input()) + 1)", "1")

    threads = [threading.Thread(target=work, args=(box,)) for box in boxes]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    for box in boxes:
        box.close()
    return num_sandboxes * runs / seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", choices=list(ATTACKS), default=list(ATTACKS), help="attacks to run")
    parser.add_argument("--without", nargs="*", default=[], help="layers to leave out")
    parser.add_argument("--runs", type=int, default=200, help="runs to measure the speed with")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    sandbox = Sandbox(settings(options.without), _without=options.without)
    with contextlib.closing(sandbox), host() as target:
        sandbox.start()
        assert sandbox.layers is not None
        for name in options.only:
            ran, fault = attack(sandbox, target, [name])[name]
            yield {
                "attack": f"{name:30}",
                "outcome": ran.outcome,
                "cpu_seconds": ran.cpu_seconds,
                "fault": fault or "none",
                "met": fault is None,
            }
        cpu_seconds, per_second = speed(sandbox, options.runs)
    layers = ", ".join(sorted(sandbox.layers.active))
    together = rate(os.cpu_count() or 1, options.runs, options.without)
    yield {
        "attack": "none: speed",
        "outcome": f"{per_second:.0f} runs/s, {together:.0f} with {os.cpu_count()} sandboxes",
        "cpu_seconds": cpu_seconds,
        "fault": f"layers: {layers}",
        "met": 1000 * cpu_seconds <= MAX_CPU_MILLISECONDS,
    }
