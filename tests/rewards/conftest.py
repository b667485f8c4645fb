"""Reward functions that do as the completion says."""

import pytest

FUNCTIONS = """
import ctypes, json, multiprocessing, os, pickle, signal, socket, struct, subprocess, sys, time
from pathlib import Path
from megarl.types import Reward

def act(completion_text, answer, *, correct_score):
    text = completion_text
    verb, _, argument = text.partition(" ")
    if verb == "sleep":
        time.sleep(float(argument))
    elif verb == "meet":
        own, _, other = argument.partition(" ")
        Path(own).touch()
        while not Path(other).exists():
            time.sleep(0.01)
    elif verb == "hang":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        Path(argument).write_text(f"{os.getpid()} {child.pid}")
        while True:
            time.sleep(1)
    elif verb == "power":
        9 ** 9 ** 9
    elif verb == "raise":
        raise ValueError(argument)
    elif verb == "exit":
        sys.exit(3)
    elif verb == "die":
        os._exit(3)
    elif verb == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif verb == "fill":
        bytearray(8 << 30)
    elif verb == "fork":
        if os.fork() == 0:
            time.sleep(float(argument))
    elif verb == "detach":
        started = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(argument).write_text(f"{os.getpid()} {started.pid}")
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path(argument + "2").write_text(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
    elif verb == "busy_child":
        subprocess.run([sys.executable, "-c", "while True: pass"])
    elif verb == "print":
        line = "x" * 1023
        for _ in range(int(argument)):
            print(line)
        os.write(2, b"written to stderr")
    elif verb == "reply":
        for descriptor in sockets():
            os.write(descriptor, eval(argument))
        time.sleep(600)
    elif verb == "inherited":
        listing = subprocess.run(["ls", "/proc/self/fd"], capture_output=True)
        return Reward(len(listing.stdout.split()), True, True)
    elif verb == "terminated":
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        child.terminate()
        child.join()
        os.kill(os.getpid(), signal.SIGTERM)
        return Reward(-child.exitcode, True, True)
    elif verb == "pid":
        return Reward(os.getpid(), True, True)
    elif verb == "return":
        return eval(argument)
    return Reward(correct_score, True, text == answer)

class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)

def sockets():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
                yield int(name)
        except FileNotFoundError:
            pass

def framed(payload):
    return struct.pack("!I", len(payload)) + payload

def second(completion_text, answer):
    return Reward(0.25, completion_text != "ill", True)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "reward_functions_of_a_test.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "reward_functions_of_a_test"
