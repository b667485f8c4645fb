"""Environment libraries, each in a child process with an interpreter that has the library.

`child` is the program of every child process, `NAME_adapter` the code for the library NAME. `library_process` is the
driver's side.
"""
