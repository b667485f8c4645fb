"""The sandbox: runs a Python program that nobody trusts, on a plain Linux machine, without root or containers.

Each run is a process of its own, forked from a spawner that has imported Python's usual modules. It sees a read-only
Python and a private /tmp, no network and no other process; the kernel takes its calls from a list and bounds its CPU
time, memory and output. Who asked for the run gets bytes and numbers: whether they are right is decided outside.

Reading order: `layers` (what protects, and what to do where a machine lacks it), `sandbox` (a program in, its output
out), `load` (how busy the machine is), `check` (what this machine has), `remote` (a SandboxFusion server instead). In
other processes, by the standard library alone: `spawner` (forks a process for each run), `inside` (what that process
does), `namespaces`, `landlock`, `seccomp`, `kernel` (system calls).
"""
