# Each target sets up what it needs, from nothing but Python 3.11, g++ and make:
#   make demo                  unsplit against split, on vLLM 0.32.0      (make demo QUICK=1: one model)
#   make demo VLLM=0.30.0      the same on another release
#   make test                  every lane of tox.ini
#   make lint                  ruff and mypy
# Set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels where pip would fetch the CUDA build of torch.

VLLM ?= 0.32.0
PYTHON ?= python3.11
QUICK ?=
TOX := .venvs/tox/bin/tox
RELEASES := 0.30.0 0.31.0 0.32.0
LANE := py311-vllm0$(word 2,$(subst ., ,$(VLLM)))

# tox looks for interpreters on PATH; pyenv keeps its own elsewhere.
PYENV_BINS := $(subst $() ,:,$(strip $(wildcard $(HOME)/.pyenv/versions/*/bin)))
export PATH := $(PATH):$(PYENV_BINS)

.PHONY: demo test lint clean

demo: $(TOX)
	$(if $(filter $(VLLM),$(RELEASES)),,$(error VLLM=$(VLLM) has no CPU build here; use one of $(RELEASES)))
	$(TOX) run --quiet --notest -e $(LANE)
	.tox/$(LANE)/bin/afd-shim demo $(if $(QUICK),--quick)

test: $(TOX)
	rm -rf .tox/junit
	$(TOX) run

lint: $(TOX)
	$(TOX) run --quiet --notest -e py311-vllm032
	$(TOX) run -e lint,types

$(TOX): Makefile
	$(PYTHON) -m venv .venvs/tox
	.venvs/tox/bin/python -m pip install --quiet "tox>=4.25,<5"
	touch $@

clean:
	rm -rf .tox .venvs .mypy_cache .ruff_cache .pytest_cache
