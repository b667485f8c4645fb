"""Libraries of environments, each in a child process whose Python interpreter has the library installed.

`child` is the program of every child process, `NAME_adapter` its part that knows the library NAME. `library_process`
is the driver's side: it starts the processes, exchanges messages with them and replaces those that ended.
"""
