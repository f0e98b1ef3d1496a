"""afd-shim: Attention-FFN Disaggregation (AFD) for stock vLLM, without a fork."""

__version__ = "0.1.0"
