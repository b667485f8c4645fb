"""Not collected by itself: a test that passes and leaves a process, shared memory and a temporary file."""

import subprocess
import sys
import tempfile

LEAVE = """
import mmap, time
with open("/dev/shm/megarl-left-{name}", "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
time.sleep(600)
"""


def test_leaves() -> None:
    file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
    code = LEAVE.format(name=file.name.rpartition("/")[2])
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
