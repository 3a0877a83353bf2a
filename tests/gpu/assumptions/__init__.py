"""What pynccl takes for granted about NCCL and the CUDA driver, tried on the machine at hand.

``python -m tests.gpu.assumptions [--engine nccl|host]``. Each assumption is one module with a
function ``run``; catalog.py lists them with their questions.
"""
