"""Filter of system calls for sandboxed programs. Calls that are not listed are refused (seccomp(2)).

A program may start threads, but no processes or other programs. It has no socket to the outside.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from megarl.sandbox.kernel import CLONE_THREAD, PR_SET_NO_NEW_PRIVS, prctl, processor_name, syscall

_ALLOWED = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70 close:3:57
close_range:436:436 lseek:8:62 fstat:5:80 stat:4:- lstat:6:- newfstatat:262:79 statx:332:291 access:21:-
faccessat:269:48 faccessat2:439:439 open:2:- openat:257:56 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59
poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21
epoll_wait:232:- epoll_pwait:281:22 eventfd2:290:19 getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49
fchdir:81:50 mkdir:83:- mkdirat:258:34 rmdir:84:- unlink:87:- unlinkat:263:35 rename:82:- renameat:264:38
renameat2:316:276 link:86:- linkat:265:37 symlink:88:- symlinkat:266:36 readlink:89:- readlinkat:267:78 ftruncate:77:46
fallocate:285:47 fsync:74:82 fdatasync:75:83 umask:95:166 flock:73:32 fadvise64:221:223 statfs:137:43 fstatfs:138:44
mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233 brk:12:214 msync:26:227 mincore:27:232
membarrier:324:283 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136
rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 pause:34:- alarm:37:- setitimer:38:103
getitimer:36:102 nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169
time:201:- times:100:153 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109
timer_delete:226:111 getpid:39:172 gettid:186:178 getppid:110:173 getuid:102:174 geteuid:107:175 getgid:104:176
getegid:108:177 getgroups:115:158 getpgrp:111:- getpgid:121:155 getsid:124:156 getresuid:118:148 getresgid:120:150
uname:63:160 sysinfo:99:179 getrusage:98:165 getrlimit:97:163 setrlimit:160:164 getpriority:140:141 getcpu:309:168
sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120
sched_get_priority_max:146:125 sched_get_priority_min:147:126 capget:125:90 futex:202:98 set_robust_list:273:99
get_robust_list:274:100 set_tid_address:218:96 rseq:334:293 arch_prctl:158:- exit:60:93 exit_group:231:94 wait4:61:260
waitid:247:95 restart_syscall:219:128 getrandom:318:278 recvfrom:45:207
"""
"""Allowed system calls, as name:number on x86_64:number on aarch64; -: the processor has no such call."""
_ALLOWED_IF_ISOLATED = """
kill:62:129 tkill:200:130 tgkill:234:131 chmod:90:- fchmod:91:52 fchmodat:268:53 truncate:76:45 utime:132:-
utimensat:280:88
"""
"""System calls allowed only if a program sees no processes and files except its own.

Otherwise it could signal the user's processes. Landlock restricts neither the modes and times of files nor, before its
version 3, their sizes.
"""
# Calls allowed only with certain arguments, by processor.
_AT_CONDITION = {
    "x86_64": {"clone": 56, "clone3": 435, "prlimit64": 302, "ioctl": 16, "socketpair": 53, "fcntl": 72, "sendto": 44},
    "aarch64": {
        "clone": 220,
        "clone3": 435,
        "prlimit64": 261,
        "ioctl": 29,
        "socketpair": 199,
        "fcntl": 25,
        "sendto": 206,
    },
}
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Allowed ioctl commands, used by Python itself: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_FILE_COMMANDS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030, 1032, 1033, 1034)
"""Allowed commands of fcntl: duplicates, flags, locks, a pipe's size, seals. None makes the kernel send signals."""
_F_SETFL, _O_ASYNC = 4, 0x2000
_AF_UNIX = 1

# Opcodes of the kernel's classic BPF, offsets in struct seccomp_data, then return values.
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL_PROCESS, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_SET_MODE_FILTER = 1

_Instruction = tuple[int, int, int, int]
"""Instruction of the kernel's filter language: code, jump if true, jump if false, constant."""


def make_filter(processor: str, *, is_isolated: bool) -> bytes:
    """Return the filter program in the kernel's format for a processor, `x86_64` or `aarch64`.

    `is_isolated`: the sandboxed program sees only its own processes and files.
    """
    number_column = 1 if processor == "x86_64" else 2
    entries = [entry.split(":") for entry in (_ALLOWED + (_ALLOWED_IF_ISOLATED if is_isolated else "")).split()]
    numbers = [int(entry[number_column]) for entry in entries if entry[number_column] != "-"]
    at_condition = _AT_CONDITION[processor]
    # Another architecture (for example 32-bit calls) has other call numbers, so it ends the process.
    instructions: list[_Instruction] = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, _ARCHITECTURE[processor]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    # A filter cannot read clone3's flags. After ENOSYS, glibc falls back to clone, whose flags it can read.
    instructions += _for_call(at_condition["clone3"], [(_RETURN, 0, 0, _REFUSE | errno.ENOSYS)])
    instructions += _for_call(at_condition["clone"], _allow_if_any([(_ANY_BIT, 0, CLONE_THREAD)]))
    # Allow prlimit64 only for process 0, the caller itself.
    instructions += _for_call(at_condition["prlimit64"], _allow_if_any([(_EQUAL, 0, 0)]))
    instructions += _for_call(at_condition["socketpair"], _allow_if_any([(_EQUAL, 0, _AF_UNIX)]))
    instructions += _for_call(at_condition["ioctl"], _allow_if_any([(_EQUAL, 1, value) for value in _HARMLESS_IOCTLS]))
    instructions += _for_call(at_condition["fcntl"], _FCNTL)
    instructions += _for_call(at_condition["sendto"], _SENDTO)
    for number in numbers:
        instructions += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    instructions.append((_RETURN, 0, 0, _REFUSE | errno.EPERM))
    return b"".join(
        struct.pack("<HBBI", code, jump_if_true, jump_if_false, constant)
        for code, jump_if_true, jump_if_false, constant in instructions
    )


def _for_call(number: int, then: list[_Instruction]) -> list[_Instruction]:
    return [(_EQUAL, 0, len(then), number), *then]


def _allow_if_any(tests: list[tuple[int, int, int]]) -> list[_Instruction]:
    """Return instructions that allow a call if any test holds.

    A test is (code, argument number, constant), and reads the argument's low 32 bits.
    """
    instructions: list[_Instruction] = []
    for test_code, argument, constant in tests:
        instructions += [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (test_code, 0, 1, constant), (_RETURN, 0, 0, _ALLOW)]
    return [*instructions, (_RETURN, 0, 0, _REFUSE | errno.EPERM)]


_FCNTL: list[_Instruction] = [
    (_LOAD, 0, 0, _ARGUMENTS + 8),
    (_EQUAL, 0, 4, _F_SETFL),
    (_LOAD, 0, 0, _ARGUMENTS + 16),
    (_ANY_BIT, 0, 1, _O_ASYNC),
    (_RETURN, 0, 0, _REFUSE | errno.EPERM),
    (_RETURN, 0, 0, _ALLOW),
    *_allow_if_any([(_EQUAL, 1, command) for command in _FILE_COMMANDS]),
]
_SENDTO: list[_Instruction] = [
    # Allow sending without an address: to the other end of a socket pair. The address has two 32-bit halves.
    (_LOAD, 0, 0, _ARGUMENTS + 32),
    (_EQUAL, 0, 3, 0),
    (_LOAD, 0, 0, _ARGUMENTS + 36),
    (_EQUAL, 0, 1, 0),
    (_RETURN, 0, 0, _ALLOW),
    (_RETURN, 0, 0, _REFUSE | errno.EPERM),
]


def apply_filter(*, is_isolated: bool) -> None:
    """Filter all later system calls of this process. Raises KernelError."""
    instructions = make_filter(processor_name(), is_isolated=is_isolated)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    header = ctypes.create_string_buffer(struct.pack("@HxxxxxxP", len(instructions) // 8, ctypes.addressof(buffer)), 16)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall("seccomp", _SET_MODE_FILTER, 0, header)
