"""The workers of both roles, over the default worker of each platform vLLM runs on."""
