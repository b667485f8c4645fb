"""Printed output of the commands: tables of sizes, memory, metrics and data, and the error ending a command."""
