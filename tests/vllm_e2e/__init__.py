"""A real vLLM on CPUs, advised by a real planner: `make test-vllm-e2e`, not part of `make test`."""
