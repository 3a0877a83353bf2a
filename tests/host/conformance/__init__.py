"""The rules of NCCL as a program: stated one by one, and asked of any library.

Run it with ``python -m tests.host.conformance``; see :mod:`program` for what it prints.
"""
