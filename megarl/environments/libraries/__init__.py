"""Libraries of environments. Each runs in a child process, whose Python interpreter has the library installed.

`child` is the program of every child process, and `NAME_adapter` the code for the library NAME. `library_process`
starts the processes from the driver, exchanges messages with them and replaces ended ones.
"""
