# make demo   a fleet on this machine, a deployment, a failed rollout that takes itself back
# make test   the same things as tests
SHELL := /bin/bash
VENV ?= .venv
STAMP := $(VENV)/.installed
export PATH := $(abspath $(VENV))/bin:$(PATH)
# two cores are enough: threads of torch beyond that only disturb the engines under test
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test unit lint format docs check clean

help:
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(STAMP) ## install everything this needs into .venv, and missing Debian packages (as root)

$(STAMP): pyproject.toml scripts/setup
	scripts/setup $(VENV)
	@touch $@

demo: $(STAMP) ## sandbox fleet up, first deployment, a broken release tried and taken back
	@python demo/demo.py

test: $(STAMP) ## every test: units, engine, and the sandbox fleet (as root)
	@python -m pytest

unit: $(STAMP) ## the tests that need neither root nor a sandbox
	@python -m pytest tests/unit tests/engine

lint: $(STAMP) ## ruff, mypy, ansible-lint
	ruff check .
	ruff format --check .
	mypy
	@# a playbook that does not parse is skipped by ansible-lint, and would pass
	ansible-playbook --syntax-check -i inventory/example deploy.yml rollback.yml playbooks/*.yml >/dev/null
	ANSIBLE_INVENTORY=inventory/example ansible-lint --nocolor -q
	python -m fleet.docs --check

format: $(STAMP) ## let ruff write the code as it wants to read it
	ruff check --fix .
	ruff format .

docs: $(STAMP) ## regenerate the reference pages from the code
	python -m fleet.docs

check: lint test ## what has to pass before a change is good

clean: ## remove the sandbox fleet and everything built here, but not .venv
	@if [ -x $(VENV)/bin/fleet ] && [ "$$(id -u)" = 0 ]; then $(VENV)/bin/fleet sandbox down || true; fi
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .ansible
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
