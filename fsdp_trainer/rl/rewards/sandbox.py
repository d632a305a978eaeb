"""The process that runs the code of one answer, or of a call of the environment `python`.

code.py starts it as a script. It imports nothing from the package. It reads a job in parts
from standard input and writes the verdict to standard output. Before it runs the answer's code, it
irrevocably gives up all privileges, all system calls except those in syscalls.json (so it cannot
start a process, send a signal, connect to the network or write a file), time and memory above its
limits and, if the kernel has Landlock, reading outside the system's and Python's folders and its
working folder.

The answer's code and the tests run in the main thread, which cannot use the two descriptors. A
second one reads each test after the code and the tests before it have run, and the token of the
verdict last.
"""

import _thread
import ast
import ctypes
import io
import json
import os
import platform
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from types import ModuleType
from typing import Any

UNPROTECTED = "unprotected"
"""The verdict if the system cannot confine the process."""
MOST_PRINTED = 900
"""Characters of what a cell prints that are returned: within MOST_OUTPUT of code.py."""
SYSCALLS = os.path.join(os.path.dirname(__file__), "syscalls.json")
"""For each machine its number in linux/audit.h, and the numbers of system calls: those that are
allowed, and those that are refused or allowed for some arguments only."""
USE_A_DESCRIPTOR = (
    "read", "write", "close", "lseek", "mmap", "pread64", "readv", "dup", "dup2", "dup3"
)  # fmt: skip
"""System calls that read, write, move in or copy the file of a descriptor."""
CLONE_THREAD = 0x10000
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: others lock files that everybody
# uses, or send signals to other processes
DUPLICATES = (0, 1, 2, 3, 4, 1030)
HARMLESS = (0x5401, 0x5421, 0x5451)  # TCGETS, FIONBIO, FIOCLEX: used by asyncio
NO_SUCH_CALL, REFUSED = 38, 13  # ENOSYS, after which glibc falls back from clone3 to clone; EACCES
# linux/filter.h, linux/seccomp.h
LOAD, EQUALS, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
# linux/landlock.h: RIGHTS are all file rights of its first version, READ reads files and folders
CREATE_RULESET, ADD_RULE, RESTRICT = 444, 445, 446
RIGHTS, READ = (1 << 13) - 1, 1 << 2 | 1 << 3
NO_NEW_PRIVILEGES, SET_FILTER, DIE_WITH_PARENT, DUMPABLE = 38, 22, 1, 4  # options of prctl(2)


class Instruction(ctypes.Structure):
    """`struct sock_filter`: one instruction of a system call filter."""

    _fields_ = [
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    ]


class Filter(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("size", ctypes.c_uint16), ("first", ctypes.POINTER(Instruction))]


class FolderRule(ctypes.Structure):
    """`struct landlock_path_beneath_attr`."""

    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def main() -> None:
    """Read a job, run it, and write the verdict: the job's token and what its kind of job says."""
    given, verdict, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    write, end, part = os.write, os._exit, parts_of(given)  # before the answer can replace them
    job = json.loads(part())
    with open(SYSCALLS) as file:
        calls = json.load(file)[platform.machine()]
    rules, serve, run = rules_for(calls), *handing_over()
    start, started, failed = _thread.allocate_lock(), _thread.allocate_lock(), list[OSError]()
    start.acquire()
    started.acquire()

    def keep() -> None:
        try:
            install(libc, rules)
        except OSError as error:
            failed.append(error)
        started.release()
        start.acquire()
        say(str(passed(job, part, run)))

    def say(result: str) -> None:
        write(verdict, f"{part()} {result}".encode(errors="replace"))
        end(0)

    try:
        libc = confine(job["cpu_seconds"], job["memory_mib"])
        if "cell" not in job:
            _thread.start_new_thread(keep, ())
            started.acquire()
            if failed:
                raise failed[0]
            install(libc, rules_to_hide((given, verdict), calls))
        install(libc, rules)
    except (OSError, KeyError, AttributeError):
        write(verdict, UNPROTECTED.encode())
        end(1)
    sys.modules["__main__"] = ModuleType("__main__")
    if "cell" in job:
        say(run_cell(job))
    start.release()
    serve()


def parts_of(descriptor: int) -> Callable[[], str]:
    """Return a function that reads the next part of a job: a text after its length in bytes.

    It uses nothing that an answer's code could have replaced in the meantime.
    """
    read, number, length = os.read, int, len

    def part() -> str:
        size = number(read(descriptor, 8), 16)
        text = b""
        while length(text) < size:
            text += read(descriptor, size - length(text))
        return text.decode()

    return part


def handing_over() -> tuple[Callable[[], None], Callable[[Any, dict], bool]]:
    """Return two functions: one runs codes for ever, the other gives it a code from another thread.

    The latter returns False if the code raised. Both use nothing that a code could have replaced.
    """
    job: list[Any] = [None, None]
    is_right: list[bool] = [False]
    begin, end = _thread.allocate_lock(), _thread.allocate_lock()
    execute, raised = exec, BaseException
    # need no memory, which may be used up
    say_begin, await_begin, say_end, await_end = (
        begin.release,
        begin.acquire,
        end.release,
        end.acquire,
    )
    begin.acquire()
    end.acquire()

    def serve() -> None:
        while True:
            try:
                await_begin()
            except raised:  # of a handler of signals that a code has left
                continue
            try:
                execute(job[0], job[1])
                is_right[0] = True
            except raised:
                is_right[0] = False
            say_end()

    def run(code: Any, names: dict[str, Any]) -> bool:
        job[:] = code, names
        say_begin()
        await_end()
        return is_right[0]

    return serve, run


def passed(
    job: dict[str, Any], part: Callable[[], str], run: Callable[[Any, dict[str, Any]], bool]
) -> int:
    """Run the answer's code, then the job's tests; return the number of tests that pass.

    part: reads the next test. run: runs compiled code, see handing_over.
    """
    names: dict[str, Any] = {"__name__": "answer"}
    compiled, wrong, tests, partial = compile, BaseException, [None] * job["tests"], job["partial"]

    def is_right(text: str, file: str) -> bool:
        try:
            return run(compiled(text, file, "exec"), names)
        except wrong:
            return False

    goes_on, count = is_right(job.pop("code"), "answer.py"), 0
    for _ in tests:
        test = part()
        if goes_on:
            right = is_right(test, "test.py")
            count += right
            goes_on = right or partial
    return count


def run_cell(job: dict[str, Any]) -> str:
    """Run earlier code, then a cell; return 1 if the cell raised, else 0, and what it printed.

    As in an interactive session the value of a last expression is printed.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    with redirect_stdout(io.StringIO()) as earlier, redirect_stderr(earlier):
        for code in job["earlier"]:
            exec(compile(code, "earlier.py", "exec"), names)
    raised = 0
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(printed):
        try:
            tree = ast.parse(job["cell"])
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "cell.py", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "cell.py", "eval"), names)
                if value is not None:
                    print(repr(value))
        except BaseException as error:
            raised = 1
            print(f"{type(error).__name__}: {error}")
    text = printed.getvalue().strip()
    return f"{raised} {text if len(text) <= MOST_PRINTED else text[:MOST_PRINTED] + ' …'}"


def confine(cpu_seconds: int, memory_mib: int) -> ctypes.CDLL:
    """Drop all rights that the answer's code must not have, but for system calls.

    Returns the C library. Raises OSError if the system cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    libc.prctl(DUMPABLE, 0, 0, 0, 0)
    limit(resource.RLIMIT_CPU, cpu_seconds)
    limit(resource.RLIMIT_AS, memory_mib << 20)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_NOFILE, 64)
    if os.getppid() != parent:
        os._exit(1)
    check(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    read_only(libc, [sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", os.getcwd()])
    drop_capabilities(libc)
    return libc


def install(libc: ctypes.CDLL, rules: list[Instruction]) -> None:
    """Filter all further system calls of this thread. Raises OSError."""
    program = (Instruction * len(rules))(*rules)
    check(libc.prctl(SET_FILTER, 2, ctypes.byref(Filter(len(program), program)), 0, 0))


def limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, value))


def read_only(libc: ctypes.CDLL, folders: list[str]) -> None:
    """Restrict the process to reading files in these folders; no effect without Landlock."""
    handled = ctypes.c_uint64(RIGHTS)
    rules = libc.syscall(CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0)
    if rules < 0:
        return
    for folder in filter(os.path.isdir, folders):
        opened = os.open(folder, os.O_PATH)
        rule = FolderRule(READ, opened)
        check(libc.syscall(ADD_RULE, rules, 1, ctypes.byref(rule), 0))
        os.close(opened)
    check(libc.syscall(RESTRICT, rules, 0))
    os.close(rules)


def drop_capabilities(libc: ctypes.CDLL) -> None:
    """Give up root's privileges."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    check(libc.capset(header, (ctypes.c_uint32 * 6)()))


def check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "the system refused to confine the process")


def rules_to_hide(descriptors: tuple[int, ...], calls: dict[str, Any]) -> list[Instruction]:
    """Return a filter of the system calls that use one of these descriptors.

    calls: those of this machine, see SYSCALLS.
    """
    refuse, allow = Instruction(RETURN, 0, 0, ERROR | REFUSED), Instruction(RETURN, 0, 0, ALLOW)
    of_descriptors = [*each(descriptors, refuse), allow]
    rules = rules_of_machine(calls)
    for name in USE_A_DESCRIPTOR:
        number = calls["allowed"].get(name)
        rules += when(number, 4 if name == "mmap" else 0, of_descriptors)
    return [*rules, *when(calls["limited"]["fcntl"], 0, of_descriptors), allow]


def rules_of_machine(calls: dict[str, Any]) -> list[Instruction]:
    """Return the begin of a filter: it ends other machines' calls, and loads a call's number."""
    return [
        Instruction(LOAD, 0, 0, 4),
        Instruction(EQUALS, 1, 0, calls["audit"]),
        Instruction(RETURN, 0, 0, KILL),
        Instruction(LOAD, 0, 0, 0),
    ]


def rules_for(calls: dict[str, Any]) -> list[Instruction]:
    """Return the filter under which an answer's code runs. calls: see SYSCALLS."""
    limited = calls["limited"]
    refuse, allow = Instruction(RETURN, 0, 0, ERROR | REFUSED), Instruction(RETURN, 0, 0, ALLOW)
    rules = rules_of_machine(calls) + each(tuple(calls["allowed"].values()), allow)
    no_clone3 = Instruction(RETURN, 0, 0, ERROR | NO_SUCH_CALL)
    rules += [Instruction(EQUALS, 0, 1, limited["clone3"]), no_clone3]
    rules += when(limited["clone"], 0, [Instruction(ANY_BIT, 0, 1, CLONE_THREAD), allow, refuse])
    rules += when(limited["prlimit64"], 0, [Instruction(EQUALS, 0, 1, 0), allow, refuse])
    reads = [Instruction(ANY_BIT, 1, 0, WRITES), allow, refuse]
    rules += [*when(limited.get("open"), 1, reads), *when(limited["openat"], 2, reads)]
    rules += when(limited["fcntl"], 1, [*each(DUPLICATES, allow), refuse])
    rules += when(limited["ioctl"], 1, [*each(HARMLESS, allow), refuse])
    return [*rules, refuse]


def each(values: tuple[int, ...], then: Instruction) -> list[Instruction]:
    """Return instructions that run `then` if the value loaded last is one of these."""
    return [one for value in values for one in (Instruction(EQUALS, 0, 1, value), then)]


def when(number: int | None, place: int, then: list[Instruction]) -> list[Instruction]:
    """Return instructions that, for system call `number`, load argument `place` and run `then`."""
    if number is None:
        return []
    load = Instruction(LOAD, 0, 0, 16 + 8 * place)  # both machines are little-endian
    return [Instruction(EQUALS, 0, 1 + len(then), number), load, *then]


if __name__ == "__main__":
    main()
