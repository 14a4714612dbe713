"""The claims that need GPUs, each measured by one module, put together by ``run.py``."""
