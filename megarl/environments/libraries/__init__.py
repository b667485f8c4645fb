"""Environment libraries. Each runs in a child process with a Python interpreter that has the library installed.

`child` is the program of every child process, `NAME_adapter` the code for the library NAME. `library_process` is the
driver's side: it starts the processes, exchanges messages with them and replaces ended ones.
"""
