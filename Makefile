.PHONY: help setup demo chaos soak machines test check format clean

help:  ## what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup:  ## make .venv from the lock; nothing is done twice
	@scripts/setup

demo: setup  ## a model learns while every checkpoint is evaluated beside it (CPU only)
	@.venv/bin/evalfleet demo --out demo-out $(ARGS)

chaos: setup  ## the service on fake engines through 200 faults, and which promises it kept
	@.venv/bin/evalfleet chaos --faults 200 $(ARGS)

soak: setup  ## half an hour of engines that come and go: nothing is lost, no process grows (ARGS="--minutes 6")
	@.venv/bin/python -m eval_service.chaos.soak $(ARGS)

machines: setup  ## several nodes on this host: one is lost, then the head, and started again from a Serve config
	@EVALFLEET_MACHINES=1 .venv/bin/python -m pytest tests/e2e/test_many_machines.py

check: setup  ## lint, format, types, import rules
	@scripts/check

test: check  ## everything that CI runs
	@scripts/test

format: setup
	@.venv/bin/ruff check --fix -q . ; .venv/bin/ruff format -q .

clean:
	rm -rf .venv demo-out build dist *.egg-info
