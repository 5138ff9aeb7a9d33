"""Unit tests of a program that runs in another process than the tests, so that it cannot decide their verdict.

    process of the test ── name, arguments ──> process of the program
    (judge.py)          <── value or error ──  (program_server.py)

run             One test in a sandbox
judge           Runs a test in a sandbox, with functions in place of the program's names
program_server  Runs the program in a sandbox and answers calls of its functions
values          Encoding of the values that the two exchange

The last three are scripts that run inside a sandbox, where this package is not installed: they import only the standard
library and each other.
"""
