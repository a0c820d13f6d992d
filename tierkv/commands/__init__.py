"""The commands of the command line, one module each: add_parser() says what it takes, run() does it and
returns the exit status. Heavy imports are made in run(), so that help and usage errors are quick.
"""
