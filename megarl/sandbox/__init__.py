"""Sandbox for untrusted Python programs on a plain Linux machine, without root or containers.

Each run is a process forked from a spawner. The spawner has already imported Python's usual modules. A run sees a
read-only Python and a private /tmp, but no network and no other process. The kernel allows only listed system calls,
and limits CPU time, memory and output. The caller gets bytes and numbers, and decides whether they are right.

`layers` describes the protections, and remedies for a machine without them. `sandbox` runs programs, `check` examines
this machine, and `sandbox_fusion` uses a SandboxFusion server instead. The other modules run in other processes, and
import only the standard library and `processes.process_tree`. `spawner` forks a process per run. `inside` prepares the
forked process. `namespaces`, `landlock`, `seccomp` and `kernel` make system calls.
"""
