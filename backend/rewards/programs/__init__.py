"""Run the programs that completions contain against a dataset's tests, and say how many pass.

row_tests   a row's tests, read from the forms that datasets use       assertions   `assert` statements as observations
client      the process that runs programs, as its callers know it     server       what runs in it: one fork a program
program     a fork, confined, that executes one program                values       plain values, there and back
grading     what a program did, against what the tests expect

Nothing that a program could print, return or write can pass a test whose expected value it does not know: expected values stay in
the process that asks. A program is one process, which can start no other, with limits on time, memory, files and network
(`backend.rewards.confinement.confine_program`).
"""
